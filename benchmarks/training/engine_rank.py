"""One rank of `bench engine`: the engine as a worker assembles it, and bare loops beside it in the
same process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.training.bare import BareLoop
from benchmarks.training.laps import Contestant, Lap, run_laps
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import STEP, Event, Origin
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.core.terms import Terms
from ebbflow.training.data import SampleOrder, open_tokens
from ebbflow.training.engine.loop import train
from ebbflow.training.engine.trainer_setup import build_trainer
from ebbflow.training.errors import TrainingError
from ebbflow.training.gang import Gang
from ebbflow.training.launch.heartbeat import Heartbeat
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.limits import Position
from ebbflow.training.reporter import Clock, Reporter
from ebbflow.training.session import open_saver
from ebbflow.training.worker import arrange_arithmetic
from tests.support.no_saver import NoSaver

UNLIMITED = Terms(usd_per_rank_second=1e-6, budget_usd=1e6, deadline_utc=4e9)


class EngineLoop:
    """The whole engine: step sync, clock, heartbeat, limits, events.

    The time of a lap includes putting its events.

    Args:
        saves: Whether it saves as configured, into the generation of `spec`.
        watch: Is called with each event.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        gang: Gang,
        folder: Path,
        *,
        saves: bool = False,
        watch: Callable[[Event], object] = lambda _event: None,
    ) -> None:
        heartbeat = folder / f"heartbeat-{spec.job}-{gang.rank}"
        Heartbeat.create(heartbeat)
        worker = replace(spec, heartbeat_path=str(heartbeat))
        self._log = EventLog(
            Store.open(spec.store_uri).sub(job_prefix(spec.job)),
            Origin(job=spec.job, rank=gang.rank),
        )
        self._last: Event | None = None
        self._last_cpu = 0.0
        self._watch = watch
        reporter = Reporter(Clock(self._log.emit), self._emit, Heartbeat(heartbeat).beat)
        if saves:
            saver = open_saver(worker, gang, reporter)
        else:
            saver = NoSaver()
        self._trainer = build_trainer(worker, gang, reporter=reporter, saver=saver)
        self._at = Position()

    def run(self, steps: int) -> Lap:
        """Time steps from the call of `train` to the last step's event, which precedes a job's end."""
        until = self._at.step + steps
        training = self._trainer.config.training.model_copy(update={"max_steps": until})
        config = self._trainer.config.model_copy(update={"training": training})
        trainer = replace(self._trainer, config=config, start=self._at)
        arrange_arithmetic(training, trainer.session.gang.device)
        began = time.monotonic()
        cpu_began = time.process_time()
        ending = train(trainer)
        if ending.step != until or self._last is None:
            raise TrainingError(
                f"the engine ended at step {ending.step} of {until}: {ending.message}"
            )
        seconds = self._last.t_mono - began
        cpu_seconds = self._last_cpu - cpu_began
        self._at = Position(until, until * training.batch_size)
        began = time.monotonic()
        cpu_began = time.process_time()
        self._log.flush()
        return Lap(
            seconds=seconds + time.monotonic() - began,
            cpu_seconds=cpu_seconds + time.process_time() - cpu_began,
            steps=until,
            loss=self._last.data["loss"],
        )

    @property
    def state(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        return self._trainer.spread.module, self._trainer.optimizer

    def close(self) -> None:
        if not isinstance(self._trainer.session.saver, NoSaver):
            self._trainer.session.saver.close()
        self._log.close()

    def _emit(self, name: str, **data: Any) -> None:
        """Emit without a flush, so that the flush of the lap puts all events."""
        event = self._log.emit(name, **{**data, "flush": False})
        if name == STEP:
            self._last = event
            self._last_cpu = time.process_time()
        self._watch(event)


def measure_engine(task: dict[str, Any], gang: Gang) -> dict[str, Any]:
    """Measure laps by mode and contestant. Collective."""
    return {"modes": {mode: _measure_mode(task, mode, gang) for mode in task["modes"]}}


def _measure_mode(task: dict[str, Any], mode: str, gang: Gang) -> dict[str, list[dict[str, Any]]]:
    plain = RunConfig.model_validate(task["config"])
    config = plain.changed("parallel", mode="ddp" if mode == "single" else mode)
    spec = WorkerSpec(
        job=f"bench-{mode}",
        run="bench",
        attempt=0,
        node=0,
        generation=1,
        generation_id="bench",
        candidates=[],
        config=config,
        store_uri=task["store_uri"],
        prepared={"fingerprint": task["tokens"]},
        terms=UNLIMITED,
        colocated_ranks=gang.world_size,
    )
    engine = EngineLoop(spec, gang, Path(task["folder"]))
    tokens = open_tokens(Store.open(spec.store_uri), spec.prepared["fingerprint"]).train
    order = SampleOrder((tokens.size - 1) // config.model.sequence_length, config.training.seed)
    windows = order.window(0, config.training.batch_size * task["steps"] * (task["rounds"] + 1))
    contestants: dict[str, Contestant] = {
        "engine": engine,
        "bare": BareLoop(config, gang, tokens, windows, tuned=False),
    }
    if not gang.alone:
        contestants["bare_tuned"] = BareLoop(config, gang, tokens, windows, tuned=True)
    try:
        return run_laps(contestants, rounds=task["rounds"], steps=task["steps"])
    finally:
        engine.close()
