"""One rank of `bench overhead`: the same step bare, with heartbeat and step sync, and with guards
as well.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training.laps import await_all
from benchmarks.training.parts import example_row, judged, measure_parts
from ebbflow.core.config.schema import RunConfig
from ebbflow.training.gang import Gang
from ebbflow.training.launch.heartbeat import Heartbeat
from ebbflow.training.step_sync import exchange

BARE = "bare"
WATCHED = "watched"
GLOO = "watched_gloo"
GUARDED = "guarded"
_GRADIENTS = 2**18  # float32 numbers that are reduced in each step: 1 MiB
_WARM_UP_ROUNDS = 10


@dataclass
class _Measured:
    """Seconds of one contestant, by round: the whole step, and within it heartbeats, step sync and
    guards.
    """

    step: list[float] = field(default_factory=list)
    beats: list[float] = field(default_factory=list)
    step_sync: list[float] = field(default_factory=list)
    guards: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


class _Step:
    """What a rank does between two steps of its gang: it waits for its device, reduces gradients,
    and goes on.

    The device is a sleep: on a machine whose cores others want too, computing would take as long as
    they please, and a hundredth of it could not be told from that.
    """

    def __init__(self, seconds: float, gang: Gang, heartbeat: Heartbeat, config: RunConfig) -> None:
        self._seconds = seconds
        self._gang = gang
        self._heartbeat = heartbeat
        self._gradients = torch.ones(_GRADIENTS)
        self._row = example_row()
        self._gloo = replace(gang, peers=None)
        self._guards = judged(config, gang)
        self._number = 0

    def take(self, name: str, found: _Measured) -> None:
        """Collective."""
        if name != BARE:
            beat = self._heartbeat.beat
        else:
            beat = _no_beat
        self._number += 1
        spent = [0.0, 0.0]

        def enter(phase: str) -> None:
            began = time.perf_counter()
            cpu_began = time.thread_time()
            beat(self._number, phase)
            spent[0] += time.perf_counter() - began
            spent[1] += time.thread_time() - cpu_began

        began = time.perf_counter()
        enter("data")
        enter("forward")
        time.sleep(self._seconds)
        enter("backward")
        if not self._gang.alone:
            dist.all_reduce(self._gradients, dist.ReduceOp.MAX)
        if name == BARE:
            parts = (0.0, 0.0, 0.0)
        else:
            parts = self._watch(name)
        enter("optimizer")
        self._gradients.mul_(1.0)
        found.step.append(time.perf_counter() - began)
        found.beats.append(spent[0])
        found.step_sync.append(parts[0])
        found.guards.append(parts[1])
        found.processor.append(spent[1] + parts[2])

    def _watch(self, name: str) -> tuple[float, float, float]:
        """(seconds of the step sync, of the guards, processor seconds of both)."""
        began = time.perf_counter()
        cpu_began = time.thread_time()
        sync = exchange(self._gloo if name == GLOO else self._gang, self._row)
        exchanged = time.perf_counter()
        if name == GUARDED:
            self._guards(sync)
        return exchanged - began, time.perf_counter() - exchanged, time.thread_time() - cpu_began


def measure_overhead(task: dict[str, Any], gang: Gang) -> dict[str, Any]:
    """`steps`: by contestant, seconds by round; in each round every contestant takes a step, each
    begins with another. `parts`: microseconds of each part where it is called again and again, with
    warm caches. Collective."""
    heartbeat = Heartbeat.create(Path(task["folder"]) / f"heartbeat-overhead-{gang.rank}")
    step = _Step(task["step_seconds"], gang, heartbeat, RunConfig.model_validate(task["config"]))
    names = [BARE, WATCHED, GLOO, GUARDED]
    found = {name: _Measured() for name in names}
    await_all()
    for number in range(_WARM_UP_ROUNDS + task["rounds"]):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            step.take(name, found[name] if number >= _WARM_UP_ROUNDS else _Measured())
    parts = measure_parts({**task, "rounds": task["part_rounds"]}, gang)
    return {"steps": {name: vars(measured) for name, measured in found.items()}, "parts": parts}


def _no_beat(step: int, phase: str) -> None:
    """What the bare step calls, so that the call itself is not counted."""
