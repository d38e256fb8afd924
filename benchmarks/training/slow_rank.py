"""One rank of the slow-down bench: real steps while a capped upload runs and while it is held, in
turn.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import nn
from torch.optim import Optimizer

from benchmarks.training.laps import await_all
from benchmarks.training.state import local_bytes, trained_state
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.layout import job_prefix
from ebbflow.core.reliability import daly_interval_seconds
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import Checkpointer, Generation, RetentionPolicy
from ebbflow.training.gang import Gang

_STALL_SAVES = 5
_LONGEST_STEPS = 10_000
_BLOCK_STEPS = 3
Lap = tuple[float, float]  # wall and processor seconds of a step


def measure_slow_down(task: dict[str, Any], gang: Gang) -> dict[str, Any]:
    """Step seconds of each round, under an upload and without, as rank 0 sees them. Collective."""
    config = RunConfig.model_validate(task["config"])
    model, optimizer = trained_state(config, gang)
    size = local_bytes(model, optimizer)
    uri = Store.open(task["store_uri"]).sub(job_prefix(task["job"])).uri
    steps = _Steps(config, model, optimizer)
    for _ in range(3):
        steps.take()
    generation = Generation(task["generation"], task["generation_id"])
    options = {"generation": generation, "rank": gang.rank, "world_size": gang.world_size}
    options["retention"] = RetentionPolicy(keep_last=1)
    with Checkpointer(uri, **options) as saver:
        saver.prepare(model, optimizer)
        stall = _agreed(
            statistics.median(
                [_save(saver, number, model, optimizer) for number in range(_STALL_SAVES)]
            )
        )
    interval = daly_interval_seconds(stall, task["hazard_per_hour"])
    cap = size / (interval / 2)
    rounds = []
    with Checkpointer(
        uri, **options, upload_bytes_per_second=cap, deadline_seconds=10 * interval
    ) as saver:
        saver.prepare(model, optimizer)
        for number in range(task["rounds"]):
            rounds.append(_round(saver, _STALL_SAVES + number, model, optimizer, steps))
    return {
        "bytes": size,
        "stall": stall,
        "interval": interval,
        "cap": cap,
        "rounds": rounds,
        "block_steps": _BLOCK_STEPS,
    }


def _save(saver: Checkpointer, step: int, model: nn.Module, optimizer: Optimizer) -> float:
    await_all()
    stall = saver.save(step + 1, model, optimizer, {})
    saver.wait()
    return stall


def _round(
    saver: Checkpointer, number: int, model: nn.Module, optimizer: Optimizer, steps: _Steps
) -> dict[str, Any]:
    """A few steps beside the upload and as many while it is held still, in turn until it has ended.

    So a drift of the machine, which outlasts a few steps, is in both alike.
    """
    await_all()
    carried = saver.upload_cost.cpu_seconds
    stall = _agreed(saver.save(number + 1, model, optimizer, {}))
    pid = saver.uploader_pid
    assert pid is not None
    laps: dict[str, list[Lap]] = {"busy": [], "quiet": []}
    upload = 0.0
    while len(laps["busy"]) < _LONGEST_STEPS and (_agreed(float(saver.busy)) or not laps["busy"]):
        await_all()
        began = time.monotonic()
        laps["busy"] += [steps.take() for _ in range(_BLOCK_STEPS)]
        upload += time.monotonic() - began
        os.kill(pid, signal.SIGSTOP)
        try:
            await_all()
            laps["quiet"] += [steps.take() for _ in range(_BLOCK_STEPS)]
        finally:
            os.kill(pid, signal.SIGCONT)
    saver.wait()
    return {
        "stall": stall,
        **laps,
        "upload": upload,
        "carrier": saver.upload_cost.cpu_seconds - carried,
    }


def _agreed(value: float) -> float:
    """The largest of all ranks."""
    row = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(row, dist.ReduceOp.MAX)
    return row.item()


class _Steps:
    """Forward, backward and optimizer on random tokens."""

    def __init__(self, config: RunConfig, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        shape = (config.training.batch_size, config.model.sequence_length)
        self._tokens = torch.randint(config.model.vocab_size, shape)

    def take(self) -> Lap:
        began = time.monotonic()
        cpu_began = time.process_time()
        logits = self._model(self._tokens)
        F.cross_entropy(logits.flatten(0, 1), self._tokens.flatten()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.monotonic() - began, time.process_time() - cpu_began
