"""`ebbflow doctor SCRIPT.py [-- ARGUMENTS]`: kill a script, resume it, and name the lost state.

The script runs on the CPU in copies of its folder: once uninterrupted, and once for each kill, with
a second start that resumes by the script's own means. `script_tracer` records what each step begins
with. The resumed run is compared with the uninterrupted one, rank by rank, from the step whose
weights it has restored. A difference is harmless if it changes no weight and is in none of the
variables that hold a state.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ebbflow.tryout.harness import torchrun_variables
from ebbflow.tryout.resume_findings import (
    UNEXPLAINED,
    LostState,
    compare,
    find_deciding,
    find_passing,
    find_unlike,
    why_not_repeatable,
)
from ebbflow.tryout.resume_patches import Places, explain, find_assignment
from ebbflow.tryout.resume_repairs import Repair, apply_repairs, propose_repairs
from ebbflow.tryout.script_copy import copy_folder, detach
from ebbflow.tryout.script_tracer import StepRecord, run_traced

_RUN_SECONDS = 180.0
_LAST_SECONDS = 10.0  # for the other ranks after one has ended
_OUTPUT_LINES = 5
_FEWEST_STEPS = 4
_MOST_TRIALS = 6  # of repairs, each with as many kills as the examination
_TORCHRUN = re.compile(r"RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|init_process_group|process group")
_CUDA = re.compile(r"CUDA|NVIDIA|NCCL", re.IGNORECASE)


def main(words: list[str]) -> int:
    """Run `ebbflow doctor` on a script.

    Return 0 if the script resumes exactly, 1 if it does not, 2 if it cannot be examined.
    """
    own = words
    arguments: list[str] = []
    if "--" in words:
        end = words.index("--")
        own = words[:end]
        arguments = words[end + 1 :]
    given = _parser().parse_args(own)
    if not given.script.is_file():
        print(
            f"ebbflow: {given.script}: no such script; fix: give the path of a Python file",
            file=sys.stderr,
        )
        return 2
    # Read when torch is loaded, before the forks
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    import torch.optim.optimizer  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="ebbflow-doctor-") as folder:
        runs = _Runs(given.script.resolve(), arguments, Path(folder), given.ranks or 0)
        try:
            return _examine(runs, given)
        except _CannotExamine as problem:
            print(problem)
            return 2
        except _DoesNotResume as problem:
            print(problem)
            return 1


class _CannotExamine(Exception):
    """Error: the script cannot be examined. The message is for the user."""


class _DoesNotResume(Exception):
    """Error: the script does not resume, or its runs cannot be compared. The message is for the
    user.
    """


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ebbflow doctor", description="Find what a script's resume loses."
    )
    parser.add_argument("script", type=Path, help="the script; its arguments follow after --")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of each run (24)")
    parser.add_argument(
        "--kills", type=int, default=2, help="number of kills, each at a random step (2)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the steps to kill at (0)")
    parser.add_argument(
        "--ranks",
        type=int,
        help="start as many ranks as torchrun does (2 if the script needs torchrun, else no rank)",
    )
    return parser


class _Run:
    """Traces of one run of the script: the records of each rank, the saves, and the output.

    For saves and loads, it has their steps and their lines in the script.
    """

    def __init__(self, traces: list[Path], outputs: list[Path]) -> None:
        lines_by_rank: list[list[Any]] = []
        for trace in traces:
            lines_by_rank.append([json.loads(line) for line in trace.read_text().splitlines()])
        self.records: list[list[StepRecord]] = []
        lines: list[Any] = []
        for lines_of_rank in lines_by_rank:
            self.records.append([line for line in lines_of_rank if "params" in line])
            lines += lines_of_rank
        self.steps = min(map(len, self.records)) - 1
        saved = [line for line in lines if "saved" in line]
        # A file that was opened counts only if no other save was seen
        saved = [line for line in saved if line["by"] != "open"] or saved
        self.saves = sorted(line["saved"] for line in saved)
        self.in_file = _variables_in_each_file(saved)
        self.is_attached = any(line["by"] == "attach" for line in saved)
        self.save_place = next((line["place"] for line in saved if line["place"]), "")
        self.load_place = next((line["loaded"] for line in lines if line.get("loaded")), "")
        files: set[str] = set()
        for line in lines:
            files.update(line.get("files", []))
        self.files = sorted(files)
        texts = [output.read_text(errors="replace") for output in outputs]
        self.output = next((text for text in texts if "Traceback" in text), texts[0])

    @property
    def end(self) -> str:
        return "\n".join(self.output.splitlines()[-_OUTPUT_LINES:])


def _variables_in_each_file(saved: list[Any]) -> set[tuple[str, str]] | None:
    """Return the variables whose values are in all files that a line of the script saves.

    The place inside the file must also be the same in all of them. Return None if no save was seen.
    """
    by_line: dict[str, set[tuple[str, str]]] = {}
    for line in saved:
        if "numbers" not in line:
            continue
        pairs = {(name, path) for name, path in line["numbers"]}
        by_line[line["place"]] = by_line.get(line["place"], pairs) & pairs
    if not by_line:
        return None
    return set().union(*by_line.values())


class _Runs:
    """Runs of one script in copies of its folder."""

    def __init__(self, script: Path, arguments: list[str], folder: Path, ranks: int) -> None:
        self.script = script
        self.ranks = ranks  # 0 without torchrun's variables
        self._arguments = arguments
        self._folder = folder

    def run(self, folder: str, name: str, steps: int, *, kill: int = 0, seed: int = 0) -> _Run:
        """Run all ranks in a copy of the script's folder for `steps` steps.

        With `kill`, the ranks are killed after that step.
        """
        copy = self.copy(folder)
        sys.stdout.flush()
        environments = torchrun_variables(self.ranks) if self.ranks else [{}]
        stem = f"{folder}-{name}"
        traces = [self._folder / f"{stem}-{rank}.jsonl" for rank in range(len(environments))]
        outputs = [trace.with_suffix(".output") for trace in traces]
        running = set()
        for environment, output in zip(environments, outputs, strict=True):
            pid = os.fork()
            if pid == 0:
                os.environ |= environment
                script = copy / self.script.name
                run_traced(script, self._arguments, traces, kill or steps, seed=seed, output=output)
            running.add(pid)
        _wait(running)
        return _Run(traces, outputs)

    def copy(self, folder: str, sources: Mapping[str, str] | None = None) -> Path:
        """Return the copy of the script's folder with this name, and make it if it is missing.

        Args:
            sources: text of the files that differ from the original, by name.
        """
        copy = self._folder / folder
        if not copy.exists():
            copy_folder(self.script.parent, copy)
            for name, text in (sources or {}).items():
                detach(copy, copy / name, emptied=True)
                (copy / name).write_text(text)
        return copy


def _wait(running: set[int]) -> None:
    """Wait for the ranks, and kill those that take too long."""
    limit = time.monotonic() + _RUN_SECONDS
    while running:
        time.sleep(0.02)
        ended = {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
        if ended:
            running = running - ended
            limit = min(limit, time.monotonic() + _LAST_SECONDS)
        if time.monotonic() > limit:
            for pid in running:
                os.kill(pid, signal.SIGKILL)


@dataclass
class _Verdict:
    """Result of examining a script: the state that its resumed runs have lost."""

    ranks_by_finding: dict[LostState, set[int]] = field(default_factory=dict)
    # Lost variables on which no weight depends, in the order in which they were found
    unused: dict[str, None] = field(default_factory=dict)
    points: list[str] = field(default_factory=list)  # the kills, and the steps of the resumes
    kills: list[int] = field(default_factory=list)  # the steps after which the script was killed
    passing: frozenset[str] = frozenset()  # as of `find_passing`
    deciding: frozenset[str] = frozenset()  # as of `find_deciding`
    load_place: str = ""  # file and line that loads; "" if it was not seen

    def add(self, rank: int, findings: list[LostState]) -> None:
        for finding in findings:
            if finding.kind == "unused":
                self.unused[finding.variable] = None
            else:
                self.ranks_by_finding.setdefault(finding, set()).add(rank)


def _examine(runs: _Runs, given: argparse.Namespace) -> int:
    whole = _run_whole(runs, given.steps)
    name = runs.script.name
    sources = {
        file: (runs.script.parent / file).read_text()
        for file in dict.fromkeys([name, *whole.files])
    }
    verdict = _kill_and_resume(runs, whole, sources, kills=given.kills, seed=given.seed)
    places = Places(name, whole.save_place, verdict.load_place, whole.is_attached)
    repairs: list[Repair] = []
    if verdict.ranks_by_finding:
        repairs = _find_repairs(runs, whole, sources, verdict, places)
    _print_verdict(runs, whole, sources, verdict, places=places, repairs=repairs)
    return int(bool(verdict.ranks_by_finding))


def _run_whole(runs: _Runs, steps: int) -> _Run:
    """Run the script uninterrupted; use two ranks if it turns out to need torchrun."""
    name = runs.script.name
    whole = runs.run("whole", "whole", steps)
    if whole.steps < _FEWEST_STEPS and not runs.ranks and _TORCHRUN.search(whole.output):
        runs.ranks = 2
        whole = runs.run("whole-2", "whole", steps)
    if whole.steps < _FEWEST_STEPS:
        lines = [
            f"ebbflow: {name}: {max(whole.steps, 0)} steps of a torch optimizer were seen, at "
            f"least {_FEWEST_STEPS} are needed; its end:",
            whole.end,
        ]
        if _CUDA.search(whole.end):
            lines.append(
                "fix: let the script use the CPU if torch.cuda.is_available() is false: no "
                "GPU is visible here"
            )
        raise _CannotExamine("\n".join(lines))
    if not any(step < whole.steps - 1 for step in whole.saves):
        raise _DoesNotResume(
            f"{name} does not resume: it saved nothing in its first {whole.steps - 1} steps; fix: "
            "save more often, or --steps"
        )
    return whole


def _kill_and_resume(
    runs: _Runs, whole: _Run, sources: dict[str, str], *, kills: int, seed: int
) -> _Verdict:
    """Kill the script at random steps after its first save, resume it, and compare the resumed
    runs.
    """
    passing = find_passing(sources.values())
    deciding = find_deciding(sources.values(), whole.in_file)
    choose = random.Random(seed)
    verdict = _Verdict(passing=passing, deciding=deciding)
    for number in range(kills):
        kill = choose.randrange(whole.saves[0] + 1, whole.steps)
        verdict.kills.append(kill)
        killed = runs.run(str(number), "killed", whole.steps, kill=kill)
        for whole_records, killed_records in zip(whole.records, killed.records, strict=True):
            difference = why_not_repeatable(whole_records, killed_records)
            if difference:
                raise _DoesNotResume(
                    f"{runs.script.name} is not repeatable: two equal starts differ at "
                    f"{difference}; fix: seed that generator"
                )
        resumed = runs.run(str(number), "resumed", whole.steps, seed=1)
        verdict.load_place = verdict.load_place or resumed.load_place
        ranks = zip(whole.records, killed.records, resumed.records, strict=True)
        for rank, (whole_records, killed_records, resumed_records) in enumerate(ranks):
            step, findings = compare(
                whole_records,
                resumed_records,
                kill,
                passing=passing,
                deciding=deciding,
                unlike=find_unlike(whole_records, killed_records),
            )
            verdict.add(rank, findings)
            if rank == 0:
                verdict.points.append(f"killed after step {kill}, went on from step {step}")
        if not all(resumed.records):
            print(resumed.end)
    return verdict


def _find_repairs(
    runs: _Runs, whole: _Run, sources: dict[str, str], verdict: _Verdict, places: Places
) -> list[Repair]:
    """Return the repairs with which the script resumed exactly after each kill, or [] if none
    did.
    """
    findings = list(verdict.ranks_by_finding)
    if len(findings) > 1 and UNEXPLAINED in findings:
        findings.remove(UNEXPLAINED)
    for number, trial in enumerate(propose_repairs(sources, findings, places)[:_MOST_TRIALS]):
        try:
            repaired = apply_repairs(sources, trial)
            for text in repaired.values():
                ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        if _resumes_exactly(runs, whole, repaired, verdict, f"repair-{number}"):
            return trial
    return []


def _resumes_exactly(
    runs: _Runs, whole: _Run, repaired: dict[str, str], verdict: _Verdict, stem: str
) -> bool:
    """Return whether the script, with these sources, resumes exactly after each kill.

    The weights must equal those of `whole`, the uninterrupted run.
    """
    for number, kill in enumerate(verdict.kills):
        folder = f"{stem}-{number}"
        runs.copy(folder, repaired)
        runs.run(folder, "killed", whole.steps, kill=kill)
        resumed = runs.run(folder, "resumed", whole.steps, seed=1)
        for whole_records, resumed_records in zip(whole.records, resumed.records, strict=True):
            if len(resumed_records) < 2:
                return False
            _, findings = compare(
                whole_records,
                resumed_records,
                kill,
                passing=verdict.passing,
                deciding=verdict.deciding,
            )
            if any(finding.kind != "unused" for finding in findings):
                return False
    return True


def _print_verdict(
    runs: _Runs,
    whole: _Run,
    sources: dict[str, str],
    verdict: _Verdict,
    *,
    places: Places,
    repairs: list[Repair],
) -> None:
    name = runs.script.name
    lost = verdict.ranks_by_finding
    ranks = f" on {runs.ranks} ranks" if runs.ranks > 1 else ""
    if lost:
        text = "does not resume exactly"
    else:
        text = f"resumes exactly, bit for bit up to step {whole.steps}"
    print(f"{name} {text}{ranks} ({'; '.join(verdict.points)})")
    for finding, where in lost.items():
        # Of several ranks, one may have lost what makes the weights of all differ
        if finding == UNEXPLAINED and len(lost) > 1:
            continue
        only = ""
        if 0 not in where and finding.kind != "start":
            only = f" on rank {', '.join(map(str, sorted(where)))}"
        told = explain(sources, finding, places, only=only, is_repaired=bool(repairs))
        print("\n".join(told))
    if repairs:
        lines = list(chain.from_iterable(repair.lines for repair in repairs))
        print(
            "\n".join(
                [
                    f"  fix (tried: {name} then resumes exactly):",
                    *(f"      {line}" for line in lines),
                ]
            )
        )
    if lost and not whole.is_attached:
        print("  or let ebbflow.attach save all of it (docs/attach.md)")
    for variable in verdict.unused:
        if LostState("counter", variable) not in lost:
            place = find_assignment(sources, variable) or name
            print(
                "  remark: not restored, and no weight depends on it in these steps: "
                f"{variable} at {place}"
            )
