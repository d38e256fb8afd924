"""`ebbflow soak faults`: one job under so many faults per hour: how much of its time was of use.

The faults of `benchmarks.chaos` strike at moments drawn by seed. Goodput is the time that the ranks
spent on steps that are part of the result (their last execution, without waiting for data), over
all time from the first start to the end, gaps between attempts included.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.fault import Aim, Fault
from benchmarks.chaos.kinds import FAULTS
from benchmarks.chaos.places import Place
from benchmarks.chaos.scene import Scene
from benchmarks.chaos.trial import Trial, await_steady_steps, inject, start_again
from benchmarks.soak.goodput import shares_text, time_shares
from benchmarks.training.survival.figures import survival_figures, survival_text
from benchmarks.training.survival.job import make_scene, survival_config
from benchmarks.training.survival.judge import judge
from benchmarks.training.tables import machine_line
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError
from ebbflow.core.events import LedgerClass, read_events
from ebbflow.infra.instance import describe_machine
from ebbflow.training.errors import GangError, TrainingError

DEFAULT_KINDS = (
    "rank-kill",
    "rank-stop",
    "exception",
    "sleep",
    "agent-kill",
    "uploader-kill",
    "connection-reset",
)
_END_SECONDS = 60.0
_LOOK_SECONDS = 0.1


def main(arguments: list[str]) -> int:
    """0 when the goodput is at least --at-least and every fault came to a verdict, else 1."""
    given = _parse(arguments)
    try:
        return _soak(given)
    except (InfraError, TrainingError) as error:
        print(error, file=sys.stderr)
        return error.outcome.exit_code


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ebbflow soak faults",
        description="One job under so many faults per hour: its goodput.",
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default 30)")
    parser.add_argument("--per-hour", type=float, default=12.0, help="faults (default 12)")
    parser.add_argument(
        "--kinds", default=",".join(DEFAULT_KINDS), metavar="LIST", help=f"of {', '.join(FAULTS)}"
    )
    parser.add_argument(
        "--floor", type=float, default=3.0, help="survival.hang_floor_seconds (default 3)"
    )
    parser.add_argument(
        "--at-least", type=float, default=0.0, metavar="SHARE", help="fail below this goodput"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of moments, kinds and targets (default 0)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument(
        "--folder", type=Path, help="where the store is made (default: the temporary folder)"
    )
    given = parser.parse_args(arguments)
    if unknown := [kind for kind in given.kinds.split(",") if kind not in FAULTS]:
        parser.error(f"there is no fault {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    if elsewhere := [kind for kind in given.kinds.split(",") if FAULTS[kind].place is not Place]:
        parser.error(
            f"{', '.join(elsewhere)}: only `bench survival` makes the place that this needs"
        )
    if refused := [
        f"{kind}: {reason}" for kind in given.kinds.split(",") if (reason := FAULTS[kind].refused())
    ]:
        parser.error("; ".join(refused))
    return given


def soak_config(folder: Path, *, floor_seconds: float) -> RunConfig:
    """Steps of real work, a commit each few seconds, and more steps than any soak waits for."""
    config = survival_config(folder, injections=1, floor_seconds=floor_seconds, step_seconds=0.0)
    sections: dict[str, dict[str, Any]] = {
        "model": {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "sequence_length": 128},
        "training": {"batch_size": 8, "max_steps": 10**6, "evaluation_interval_steps": 500},
        "checkpoint": {"interval": "seconds", "interval_seconds": 4.0},
    }
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=values)
            for name, values in sections.items()
        }
    )


def _soak(given: argparse.Namespace) -> int:
    machine = describe_machine()
    print(machine_line(machine), flush=True)
    with tempfile.TemporaryDirectory(prefix="ebbflow-soak-", dir=given.folder) as name:
        folder = Path(name)
        scene = make_scene(soak_config(folder, floor_seconds=given.floor), folder, "soaked")
        trial = _torment(scene, _schedule(given), given.minutes * 60.0)
        events = read_events(scene.store)
    figures = survival_figures(judge(trial, events))
    shares = time_shares(events)
    share = shares.get(LedgerClass.USEFUL_STEP, 0.0)
    figures |= {
        "kind": "measured",
        "machine": machine,
        "goodput": share,
        "time_shares": shares,
        "starts": trial.starts,
        "seed": given.seed,
    }
    figures |= {"minutes": given.minutes, "per_hour": given.per_hour, "floor_seconds": given.floor}
    print(f"\n{survival_text(figures)}")
    print(
        f"goodput {share:.1%} over {given.minutes:g} minutes with {len(trial.injections)} "
        f"faults, {trial.starts} starts"
    )
    print(f"the rest of the time: {shares_text(shares)}")
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    overdue = any(injection.overdue for injection in trial.injections)
    return int(overdue or share < given.at_least)


def _schedule(given: argparse.Namespace) -> list[tuple[float, Fault, Aim]]:
    """(seconds since the first steady steps, fault, aim) by time: as many as the rate gives, at
    uniform moments.
    """
    chance = random.Random(given.seed)
    kinds = given.kinds.split(",")
    seconds = given.minutes * 60.0
    moments = sorted(
        chance.uniform(0.0, seconds) for _ in range(round(given.per_hour * given.minutes / 60.0))
    )
    planned = []
    for number, moment in enumerate(moments):
        fault = FAULTS[chance.choice(kinds)]
        node = chance.choice(fault.nodes)
        planned.append((moment, fault, Aim(node=node, rank=node, number=number)))
    return planned


def _torment(scene: Scene, planned: Sequence[tuple[float, Fault, Aim]], seconds: float) -> Trial:
    trial = Trial(most_starts=len(planned) + 3)
    limit = time.monotonic() + seconds
    try:
        start_again(scene, trial)
        began = time.monotonic()
        for moment, fault, aim in planned:
            _let_run(scene, trial, until=min(began + moment, limit))
            if time.monotonic() >= limit or not await_steady_steps(scene, trial):
                break
            injection = inject(scene, fault, aim, trial)
            if injection is not None:
                trial.injections.append(injection)
                print(
                    f"{time.monotonic() - began:7.1f} s: {fault.kind} on rank {aim.rank}",
                    flush=True,
                )
        _let_run(scene, trial, until=limit)
        for agent in scene.gang.agents if scene.gang else []:
            agent.send_signal(signal.SIGTERM)
        scene.await_end(_END_SECONDS)
    finally:
        scene.close()
        trial.starts = scene.starts
    return trial


def _let_run(scene: Scene, trial: Trial, *, until: float) -> None:
    """A gang that has ended is started again at once, as a scheduler would.

    Raises GangError when it ended for good.
    """
    while time.monotonic() < until:
        if not scene.running and not start_again(scene, trial):
            raise GangError(f"the job came to its end before the soak did: {trial.outcome}")
        time.sleep(_LOOK_SECONDS)
