"""`python -m benchmarks recovery`: the time from a killed rank to the next new step, with many ranks
on few cores.

One job on one node trains; each time a rank is killed, and the event log has when what happened. The
load of the machine is printed beside each figure, since other processes share the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbflow.core import events as ev
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import Event, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.process import children
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.training.data import prepare_tokens
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.messages import GangSpec

_STEPS_BETWEEN = 12
_TIMEOUT_SECONDS = 180.0
_CONFIG = {
    "model": {"hidden_size": 64, "num_layers": 2, "sequence_length": 64},
    "checkpoint": {"interval_steps": 4},
    "data": {"held_out_samples": 16},
}


@dataclass(frozen=True)
class Recovery:
    """Seconds from a kill to what followed it."""

    verdict: float
    opened: float  # the next generation
    restored: float  # the last rank's restore
    new_step: float  # the first step that no former generation had completed
    load: float  # mean number of runnable processes in the last minute


def main(arguments: Sequence[str]) -> int:
    """Print one line for each recovery, then the medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks recovery", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ebbflow-recovery-") as folder:
        found = _measure(Path(folder), given.ranks, given.kills, random.Random(given.seed))
    median = statistics.median(recovery.new_step for recovery in found)
    cores = len(os.sched_getaffinity(0))
    print(f"median of {len(found)} kills, {given.ranks} ranks on {cores} cores: {median:.2f} s")
    if given.json is not None:
        given.json.write_text(json.dumps([vars(recovery) for recovery in found], indent=1))
    return 0


def _measure(folder: Path, ranks: int, kills: int, chance: random.Random) -> list[Recovery]:
    spec = _spec(folder, ranks, kills)
    store = Store.open(spec.store_uri).sub(job_prefix(spec.job))
    gang = LocalGang(spec, folder / "agents", folder / "agents.log")
    found = []
    try:
        _await_step(store, _STEPS_BETWEEN)
        for _ in range(kills):
            agents = [agent.pid for agent in gang.agents]
            victims = _children_of(_children_of(_children_of(agents)))  # of keepers, of standbys
            before = _newest_step(read_events(store))
            killed_at = time.time()
            os.kill(chance.choice(victims), signal.SIGKILL)
            _await_step(store, before + _STEPS_BETWEEN)
            recovery = _read_recovery(read_events(store), killed_at)
            found.append(recovery)
            text = " ".join(f"{name}={value:.2f}" for name, value in vars(recovery).items())
            print(text, flush=True)
    finally:
        gang.kill()
    return found


def _spec(folder: Path, ranks: int, kills: int) -> GangSpec:
    steps = 100 * _STEPS_BETWEEN * (kills + 1)
    training = {"batch_size": 2 * ranks, "max_steps": steps, "evaluation_interval_steps": steps}
    config = RunConfig.model_validate(
        {
            **_CONFIG,
            "store": str(folder / "store"),
            "training": training,
            "cluster": {"nodes": 1, "processes_per_node": ranks},
        }
    )
    store = Store.open(config.store)
    tokens = prepare_tokens(config.data, store, project_root=PROJECT_ROOT)
    return GangSpec(
        job="recovery",
        run="recovery",
        attempt=0,
        node=0,
        nodes=1,
        processes_per_node=ranks,
        main_address="127.0.0.1",
        config=config,
        store_uri=config.store,
        prepared=tokens.to_json(),
        log_folder=str(folder / "logs"),
    )


def _await_step(store: Store, step: int) -> None:
    limit = time.monotonic() + _TIMEOUT_SECONDS
    while _newest_step(read_events(store)) < step:
        if time.monotonic() > limit:
            raise TimeoutError(f"step {step} was not reached within {_TIMEOUT_SECONDS:g} s")
        time.sleep(1.0)


def _newest_step(events: Sequence[Event]) -> int:
    return max((event.step or 0 for event in events if event.name == ev.STEP), default=0)


def _read_recovery(events: Sequence[Event], killed_at: float) -> Recovery:
    before = _newest_step([event for event in events if event.t_wall < killed_at])
    after = [event for event in events if event.t_wall >= killed_at]

    def first(name: str) -> float:
        return min(event.t_wall for event in after if event.name == name) - killed_at

    generation = max(event.generation or 0 for event in after)
    restored = [
        event.t_wall - killed_at
        for event in after
        if event.name == ev.RESTORE and event.generation == generation
    ]
    new = [
        event.t_wall - killed_at
        for event in after
        if event.name == ev.STEP and (event.step or 0) > before and event.generation == generation
    ]
    return Recovery(
        verdict=first(ev.FAULT_DETECTED),
        opened=first(ev.GENERATION_STARTED),
        restored=max(restored),
        new_step=min(new),
        load=os.getloadavg()[0],
    )


def _children_of(pids: Sequence[int]) -> list[int]:
    found: list[int] = []
    for pid in pids:
        found += children(pid)
    return found
