"""Counts what becomes of random single changes to what was stored, kind by kind: our commits beside
torch's DCP.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.training.mutations.trials import NAMES, Bench, Tally, as_json
from benchmarks.training.tables import machine_line, table
from ebbflow.core.errors import InfraError
from ebbflow.infra.instance import describe_machine
from ebbflow.training.errors import TrainingError

_COLUMNS = ("changes", "refused", "fell back", "untold", "same bits", "crashed", "wrong", "named")
_TITLES = {"commits": "Ebbflow's commits", "dcp": "torch's DCP"}
_ABOUT = (
    "refused: the start failed and said so. fell back: it said so and went on from the commit "
    "before, whose\nweights were compared too; untold: it did so without a word. same bits: what "
    "was changed is not read, or\ndoes not matter. crashed: killed, out of memory, or silent for "
    "20 s. wrong: other weights, or none,\nwithout a word. named: `checkpoints verify` of the "
    "job named it; DCP has no such command. record: of a\ngeneration. DCP: its FileSystemWriter "
    "and FileSystemReader; manifest: its .metadata."
)


def main(arguments: list[str]) -> int:
    """0 when every change to a commit was found, else 1."""
    given = _parse(arguments)
    figures: dict[str, Any] = {
        "kind": "measured",
        "machine": describe_machine(),
        "seed": given.seed,
    }
    try:
        with contextlib.ExitStack() as stack:
            benches = _benches(given, stack)
            if given.only is not None:
                return _replay(benches, given)
            print(machine_line(figures["machine"]), flush=True)
            processes = min(given.processes, given.count)
            tallies = {
                name: bench.all(given.count, processes, every_seconds=10.0)
                for name, bench in benches.items()
            }
    except (TrainingError, InfraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.outcome.exit_code
    print(f"\n{text(tallies)}", flush=True)
    figures |= {
        "count": given.count,
        "contestants": {name: as_json(tally) for name, tally in tallies.items()},
    }
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    if all(_sound(tally) for name, tally in tallies.items() if name == "commits"):
        return 0
    return 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ebbflow bench mutations", description=" ".join(__doc__.split("\n\n")[0].split())
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--count", type=int, default=10_000, help="changes to each of the two (default 10000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the changes (default 0)")
    parser.add_argument(
        "--only", type=int, metavar="N", help="change number N alone, and all that is said of it"
    )
    parser.add_argument(
        "--contestants", default=",".join(NAMES), metavar="LIST", help=f"default {','.join(NAMES)}"
    )
    parser.add_argument(
        "--processes", type=int, default=cores, help=f"asked at once (default: cores, {cores})"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep the checkpoints there, or take those that are there: --only needs the same",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    given = parser.parse_args(arguments)
    given.contestants = given.contestants.split(",")
    if unknown := set(given.contestants) - set(NAMES):
        parser.error(f"--contestants: {', '.join(sorted(unknown))}: not among {', '.join(NAMES)}")
    if given.count < 1 or given.processes < 1:
        parser.error("--count and --processes are at least 1")
    return given


def _benches(given: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Bench]:
    """Checkpoints have random names in them: those that are kept are the ones whose changes can be
    repeated.
    """
    work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ebbflow-mutations-")))
    kept = given.folder or work / "made"
    return {name: Bench(name, kept / name, work / name, given.seed) for name in given.contestants}


def _replay(benches: dict[str, Bench], given: argparse.Namespace) -> int:
    for name, bench in benches.items():
        trial = bench.one(given.only)
        if trial.named:
            named = ", named by verify"
        else:
            named = ""
        print(
            f"{name}, seed {given.seed}, number {trial.number}: "
            f"{trial.change}\n{trial.outcome}{named}\n{trial.told}"
        )
    return 0


def _sound(tally: Tally) -> bool:
    """Every change was named, and none of them loaded or crashed anything."""
    return (
        tally.count("named") == tally.trials
        and not tally.count("wrong")
        and not tally.count("crashed")
    )


def text(tallies: dict[str, Tally]) -> str:
    """One table: kinds of change, and what became of them."""
    rows: list[list[str]] = []
    for name, tally in tallies.items():
        rows.append([_TITLES[name], *[""] * len(_COLUMNS)])
        rows += [[f"  {kind}", *_cells(counts)] for kind, counts in tally.by_kind.items()]
        rows.append(["  all", *_cells({column: tally.count(column) for column in _COLUMNS})])
    lines = [table(["", *_COLUMNS], rows, text_columns=1), "", _ABOUT]
    for name, tally in tallies.items():
        lines += [
            f"{name} crashed: {number} × {cause}" for cause, number in tally.crashes.most_common()
        ]
        if name == "commits":
            lines += [
                f"  --only {trial.number}: {trial.outcome}: {trial.change}"
                for trial in tally.examples
            ]
    return "\n".join(lines)


def _cells(counts: Any) -> list[str]:
    return [f"{counts.get(column, 0):,}" for column in _COLUMNS]
