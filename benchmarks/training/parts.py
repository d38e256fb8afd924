"""What the engine adds to a step, part by part, each called many times by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.laps import await_all
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import STEP, Origin
from ebbflow.core.store import Store
from ebbflow.training.data import SampleOrder
from ebbflow.training.engine.guards.guards import Guards
from ebbflow.training.gang import Gang
from ebbflow.training.launch.heartbeat import Heartbeat
from ebbflow.training.limits import Position
from ebbflow.training.step_sync import Row, StepSync, exchange

_WINDOWS = 100_000
_STEP_DATA = {
    "loss": 2.345678901234567,
    "tokens": 2048.0,
    "learning_rate": 1e-3,
    "gradient_norm": 0.987654321,
    "seconds": {"useful_step": 0.0512345678, "data_wait": 0.000456789},
}


def measure_parts(task: dict[str, Any], gang: Gang) -> dict[str, list[float]]:
    """Microseconds per call, one figure for each round, by part. Collective."""
    path = Path(task["folder"]) / f"heartbeat-parts-{gang.rank}"
    heartbeat = Heartbeat.create(path)
    row = example_row()
    config = RunConfig.model_validate(task["config"])
    watchful = config.model_copy(
        update={"guards": config.guards.model_copy(update={"spike": "skip"})}
    )
    order = SampleOrder(_WINDOWS, seed=1)
    share = max(1, task["config"]["training"]["batch_size"] // gang.world_size)
    values = torch.tensor(row, dtype=torch.float64, device=gang.device)
    with EventLog(
        Store.open(task["store_uri"]).sub("jobs/parts"), Origin(job="parts", rank=gang.rank)
    ) as log:
        sync = exchange(gang, row)
        parts: dict[str, Callable[[], object]] = {
            "guards": partial(judged(config, gang), sync),
            "guards_with_spikes": partial(judged(watchful, gang), sync),
            "heartbeat_beat": lambda: heartbeat.beat(1, "forward"),
            "sample_order": lambda: order.window(10_000, share),
            "event_emit": lambda: log.emit(STEP, step=1, **_STEP_DATA),
            "step_sync": lambda: exchange(gang, row),
            "step_sync_all_gather": lambda: gang.gather(values),
        }
        return {
            name: _microseconds(call, task["rounds"], task["calls"]) for name, call in parts.items()
        }


def example_row() -> Row:
    """Of a rank that has taken an ordinary step."""
    return Row(
        step=1.0,
        cursor=0.0,
        loss_sum=4803.9,
        weight=2048.0,
        square_sum=1.5,
        flops=1e9,
        compute_seconds=0.05,
        data_seconds=0.0005,
        stop=0.0,
        own_seconds=0.02,
    )


def judged(config: RunConfig, gang: Gang) -> Callable[[StepSync], None]:
    """What guards do with the step sync of a step in which nothing is wrong, on rank 0."""
    guards = Guards(config=config, gang=gang, copies=1, emit=lambda *_, **__: None)
    at = Position(1)

    def judge(sync: StepSync) -> None:
        guards.judge(at, sync, lambda: None)
        guards.is_memory_running_out(0.0)
        guards.record_pace(1, sync, 0.001)

    return judge


def _microseconds(call: Callable[[], object], rounds: int, calls: int) -> list[float]:
    found = []
    for _ in range(rounds + 1):
        await_all()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append(1e6 * (time.perf_counter() - began) / calls)
    return found[1:]
