"""The command: which faults, how many, on which jobs; and what came of them beside bare torchrun."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from infra.config.schema import RunConfig
from infra.errors import InfraError
from infra.events import read_events
from training.bench.machine import describe_machine
from training.bench.survival.bare import bare_figures, bare_text
from training.bench.survival.figures import survival_figures, survival_text
from training.bench.survival.job import make_scene, survival_config
from training.bench.survival.judge import Finding, judge
from training.bench.tables import machine_line
from training.chaos.fault import Aim, Fault, Means
from training.chaos.kinds import FAULTS
from training.chaos.kinds.disk import mount_small_disk, own_mounts, unmount
from training.chaos.trial import Trial, run_trial
from training.errors import TrainingError

Planned = list[tuple[Fault, Aim]]


def main(arguments: list[str]) -> int:
    """0, 1 when weights differ or something waited beyond its limit, or the exit code of what ended the bench."""
    given = _parse(arguments)
    try:
        return _bench(given)
    except (InfraError, TrainingError) as error:
        print(error, file=sys.stderr)
        return error.outcome.exit_code


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training bench survival", description="Inject faults into small gangs and judge what is said."
    )
    parser.add_argument("--injections", type=int, default=60, help="how many in all (default 60)")
    parser.add_argument("--kinds", default=",".join(FAULTS), metavar="LIST", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--floor", type=float, default=3.0, help="survival.hang_floor_seconds (default 3)")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="the least that a step takes (default 0.05)")
    parser.add_argument("--per-job", type=int, default=10, help="injections into one job (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the targets (default 0)")
    parser.add_argument("--torchrun", action="store_true", help="bare torchrun under the same faults as well")
    parser.add_argument("--torchrun-cap", type=float, default=120.0, help="seconds for each case (default 120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--folder", type=Path, help="where stores are made (default: the temporary folder)")
    given = parser.parse_args(arguments)
    given.kinds = [kind for kind in given.kinds.split(",") if kind]
    if unknown := [kind for kind in given.kinds if kind not in FAULTS]:
        parser.error(f"there is no fault {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    return given


def _bench(given: argparse.Namespace) -> int:
    figures: dict[str, Any] = {"kind": "measured", "machine": describe_machine()}
    print(machine_line(figures["machine"]), flush=True)
    refused = own_mounts()
    faults = _available([FAULTS[kind] for kind in given.kinds], refused)
    plan = _plan(faults, given.injections, random.Random(given.seed))
    with tempfile.TemporaryDirectory(prefix="ebbflow-bench-", dir=given.folder) as folder:
        findings, different = _torment(plan, given, Path(folder)) if plan else ([], [])
        figures |= survival_figures(findings) | {"floor_seconds": given.floor, "seed": given.seed}
        figures["different_weights"] = different
        print(f"\n{survival_text(figures)}", flush=True)
        if given.torchrun:
            figures["torchrun"] = bare_figures(faults, Path(folder), cap_seconds=given.torchrun_cap)
            print(f"\n{bare_text(figures['torchrun'])}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    waited = [finding.kind for finding in findings if finding.overdue]
    for complaint in (*different, *(f"{kind}: nothing came of it in time" for kind in waited)):
        print(f"WRONG: {complaint}", flush=True)
    return int(bool(different or waited))


def _available(faults: list[Fault], refused: str) -> list[Fault]:
    """What can be done here; the rest is said to be left out, with its reason."""
    usable = []
    for fault in faults:
        reason = fault.missing() or (refused if fault.means is Means.DISK else "")
        if reason:
            print(f"{fault.kind}: skipped, because {reason}", flush=True)
        else:
            usable.append(fault)
    return usable


def _plan(faults: list[Fault], injections: int, chance: random.Random) -> Planned:
    """Every kind as often as every other, in random order, on random targets."""
    kinds = [faults[i % len(faults)] for i in range(injections)] if faults else []
    chance.shuffle(kinds)
    plan = []
    for number, fault in enumerate(kinds):
        node = chance.choice(fault.nodes)
        plan.append((fault, Aim(node=node, rank=node, number=number)))
    return plan


def _torment(plan: Planned, given: argparse.Namespace, folder: Path) -> tuple[list[Finding], list[str]]:
    """Findings of all jobs, and the jobs whose weights are not those of the quiet one."""
    per_job = min(given.per_job, len(plan))
    config = survival_config(folder, injections=per_job, floor_seconds=given.floor, step_seconds=given.step_seconds)
    quiet = run_trial(make_scene(config, folder, "quiet"), [], _tell)
    if quiet.outcome is None:
        raise TrainingError(f"the quiet job did not come to its end: {quiet.errors[-1:]}")
    _tell(f"quiet job: step {quiet.outcome.step}, weights {quiet.outcome.weights_sha256}")
    findings: list[Finding] = []
    different: list[str] = []
    on_disk = [one for one in plan if one[0].means is Means.DISK]
    left, number = [one for one in plan if one[0].means is not Means.DISK], 0
    while left or on_disk:
        batch, left, small = (left[:per_job], left[per_job:], False) if left else ([on_disk.pop(0)], [], True)
        number += 1
        trial, found = _one_job(config, folder, f"job-{number}", batch, small_disk=small)
        findings += found
        ended = trial.outcome
        if ended is None or (ended.step, ended.weights_sha256) != (quiet.outcome.step, quiet.outcome.weights_sha256):
            different.append(f"job-{number} ended with {ended or trial.errors[-1:]}")
        left = trial.left + left if not small else left
        if not trial.injections:
            different.append(f"job-{number} took none of its {len(batch)} faults: {trial.errors[-1:]}")
            break
    return findings, different


def _one_job(
    config: RunConfig, folder: Path, job: str, batch: Planned, *, small_disk: bool
) -> tuple[Trial, list[Finding]]:
    store = folder / f"{job}-disk" if small_disk else None
    if store is not None and (problem := mount_small_disk(store)):
        raise TrainingError(f"{store}: {problem}")
    try:
        scene = make_scene(config, folder, job, store=store)
        trial = run_trial(scene, batch, _tell)
        found = judge(trial, read_events(scene.store))
    finally:
        if store is not None:
            unmount(store)
    for finding in found:
        print(f"  {finding.kind:18} {_short(finding.verdict_seconds)} {_short(finding.back_seconds)} {finding.said}")
    for error in trial.errors:
        print(f"  ended: {error.splitlines()[0][:200]}")
    return trial, found


def _short(seconds: float | None) -> str:
    return "    –" if seconds is None else f"{seconds:5.1f}"


def _tell(line: str) -> None:
    print(line, flush=True)
