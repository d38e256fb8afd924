"""One rank of a small gang, run as a process: trains as each scenario says, and writes down what it
saw.

`python -m tests.support.engine_rank SCENARIOS.json`, with torchrun's environment. Commits go
nowhere.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import StoreError
from ebbflow.core.footprint import SMALL_MODEL_BYTES
from ebbflow.core.store import Store
from ebbflow.training.engine.guards.guards import Guards
from ebbflow.training.engine.loop import train
from ebbflow.training.engine.optimizer import make_optimizer
from ebbflow.training.engine.parallel import spread_model
from ebbflow.training.gang import Gang, connect, disconnect, leave, time_waits
from ebbflow.training.limits import Limits
from ebbflow.training.rehearse import Fault
from ebbflow.training.reporter import Clock, Reporter
from ebbflow.training.session import Rehearsal
from ebbflow.training.workload import Cursor, Loss
from ebbflow.training.workload_loader import workload_context
from ebbflow.workloads.language.language_model import TextBatch, TextWorkload
from tests.support.assembled_trainer import assemble_trainer
from tests.support.no_saver import NoSaver


class ScenarioWorkload(TextWorkload):
    """Text, with what a scenario does to it."""

    scenario: dict[str, Any]
    seen: list[tuple[int, int]]

    def next_batch(self, model: Any, cursor: Cursor) -> TextBatch:
        self.seen.append((cursor.first, cursor.count))
        if self.scenario.get("ragged"):
            return RaggedBatch.cut(super().next_batch(model, cursor), cursor)
        return super().next_batch(model, cursor)

    def loss(self, model: Any, batch: TextBatch) -> Loss:
        if isinstance(batch, RaggedBatch):
            logits = model(batch.inputs)
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.targets.flatten(), reduction="none", ignore_index=-1
            )
            return Loss(losses.sum(), batch.weight)
        loss = super().loss(model, batch)
        if loss.sum.requires_grad:
            slow = self.scenario.get("slow")
        else:
            slow = None  # an evaluation
        if slow and self._context.rank == slow["rank"]:
            if slow["phase"] == "backward":
                loss.sum.register_hook(lambda _: time.sleep(slow["seconds"]))
            else:
                time.sleep(slow["seconds"])
        poison = self.scenario.get("poison")
        if poison and self._context.rank == poison["rank"] and len(self.seen) == poison["step"]:
            return Loss(loss.sum * float("nan"), loss.weight)
        return loss


class RaggedBatch(TextBatch):
    """Samples of different length: sample i counts only its first 1 + i mod length tokens."""

    @classmethod
    def cut(cls, whole: TextBatch, cursor: Cursor) -> RaggedBatch:
        targets = whole.targets.clone()
        for row in range(cursor.count):
            targets[row, 1 + (7 * (cursor.first + row)) % targets.shape[1] :] = -1
        return cls(whole.inputs, targets)

    @property
    def weight(self) -> float:
        return float((self.targets >= 0).sum())

    def split(self, parts: int) -> list[RaggedBatch]:
        return [RaggedBatch(part.inputs, part.targets) for part in super().split(parts)]


class ForgetfulLog:
    """Keeps events in memory, but for those of one name that are to be durable."""

    def __init__(self, forgets: str | None) -> None:
        self.events: list[tuple[str, dict]] = []
        self._forgets = forgets

    def emit(self, name: str, *, flush: bool = False, **data: Any) -> None:
        if flush and name == self._forgets:
            raise StoreError("the disk is full")
        self.events.append((name, data))


def run(scenario: dict[str, Any], gang: Gang) -> dict[str, Any]:
    config = RunConfig.model_validate(scenario["config"])
    log = ForgetfulLog(scenario.get("forgets"))
    events = log.events
    clock = Clock(log.emit)
    reporter = Reporter(clock, log.emit)
    prepared = {"fingerprint": scenario["tokens"]}
    store = Store.open(config.store)
    workload = ScenarioWorkload(workload_context(config, gang, store=store, prepared=prepared))
    workload.scenario = scenario
    workload.seen = []
    small = scenario.get("small_model_bytes", SMALL_MODEL_BYTES)
    spread = spread_model(workload, config, gang, small_model_bytes=small)
    limits = Limits(None, world_size=gang.world_size, elapsed_seconds=lambda: clock.elapsed_seconds)
    limits.watch_signals()
    saver = NoSaver()
    trainer = assemble_trainer(
        config,
        gang,
        workload=workload,
        spread=spread,
        optimizer=make_optimizer(spread.module, config.training),
        saver=saver,
        limits=limits,
        reporter=reporter,
        guards=Guards(config=config, gang=gang, copies=spread.copies, emit=log.emit),
        rehearsal=_rehearsal(scenario.get("rehearse")),
    )
    leave = scenario.get("leave")
    if leave and gang.rank == leave["rank"]:
        trainer = replace(trainer, workload=_leaving(workload, leave["step"]))
    if "slow" in scenario:
        time_waits(clock.exclude)
    clock.emit_phases()
    compiled_before = counters["stats"]["unique_graphs"]
    ending = train(trainer)
    clock.emit_phases()
    steps = [data for name, data in events if name == "step"]
    return {
        "outcome": str(ending.outcome),
        "step": ending.step,
        "message": ending.message,
        "weights_sha256": ending.weights_sha256,
        "steps": steps,
        "guards": [data for name, data in events if name == "guard"],
        "losses": [data["loss"] for data in steps],
        "seconds": [data["seconds"] for data in steps],
        "norms": [data["gradient_norm"] for data in steps],
        "evaluations": [
            data["metrics"]["held_out_loss"] for name, data in events if name == "evaluation"
        ],
        "saved": saver.steps,
        "notices": [data for name, data in events if name == "notice"],
        "seen": workload.seen,
        "compiled_graphs": counters["stats"]["unique_graphs"] - compiled_before,
    }


def main() -> None:
    scenarios = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    gang = connect(start_seconds=60, collective_seconds=60, generation="test")
    results = {name: run(scenario, gang) for name, scenario in scenarios.items()}
    Path(f"{sys.argv[1]}.{gang.rank}").write_text(json.dumps(results))
    disconnect()
    leave(0)


def _rehearsal(fault: str | None) -> Rehearsal | None:
    if fault:
        return Rehearsal(fault=Fault.parse(fault), node=0, nodes=1, agent_pid=None)
    return None


def _leaving(workload: ScenarioWorkload, step: int) -> ScenarioWorkload:
    """Sends itself SIGTERM when the batch of `step` is asked for."""
    next_batch = workload.next_batch

    def leave(model: Any, cursor: Cursor) -> TextBatch:
        if len(workload.seen) + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return next_batch(model, cursor)

    workload.next_batch = leave  # type: ignore[method-assign]
    return workload


if __name__ == "__main__":
    main()
