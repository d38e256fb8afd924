"""What the loop calls: the parts of one rank's training, put together, and the chores around a step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infra.config.schema import RunConfig
from infra.errors import StoreError
from infra.events import BUDGET, COMMIT_SKIPPED, EVALUATION, FAULT_INJECTED, INTERVAL, NOTICE, OUTCOME, STEP
from infra.ledger_classes import LedgerClass
from infra.outcome import Outcome
from training.cadence import Cadence
from training.clock import Clock
from training.errors import CheckpointError, GenerationSuperseded
from training.gang import Gang
from training.limits import Limits, Stop
from training.parallel import Spread
from training.progress import Progress, Status
from training.pulse import Pulse, Row, exchange
from training.rehearse import Fault
from training.saver import Saver
from training.weights.digest import weights_sha256
from training.workload import Batch, Cursor, Loss, Workload, as_numbers

# Where the time of a phase goes. The phases are those of the heartbeat, by which an agent sees progress.
_CLASS_OF_PHASE = {
    "init": LedgerClass.STARTUP,
    "restore": LedgerClass.RESTORE,
    "data": LedgerClass.DATA_WAIT,
    "forward": LedgerClass.USEFUL_STEP,
    "backward": LedgerClass.USEFUL_STEP,
    "optimizer": LedgerClass.USEFUL_STEP,
    "checkpoint": LedgerClass.CHECKPOINT_STALL,
    "evaluation": LedgerClass.EVALUATION,
    "done": LedgerClass.SHUTDOWN,
}


# What a step without its save is made of.
_STEP_CLASSES = (str(LedgerClass.USEFUL_STEP), str(LedgerClass.DATA_WAIT))


@dataclass(frozen=True)
class Position:
    """Where the job is: steps taken, and the global index of the first sample that no step has seen."""

    step: int = 0
    cursor: int = 0

    def next(self, samples: int) -> Position:
        return Position(self.step + 1, self.cursor + samples)


@dataclass(frozen=True)
class Ending:
    """How the loop ended, the same on all ranks. step: the last one taken. weights_sha256: None when not computed."""

    outcome: Outcome
    step: int
    message: str = ""
    weights_sha256: str | None = None


@dataclass(frozen=True)
class Reporter:
    """Phases and events. emit takes (name, step=, flush=, **data); beat takes (step, phase), where an agent watches."""

    clock: Clock
    emit: Callable[..., object]
    beat: Callable[[int, str], None] = lambda step, phase: None

    def enter(self, phase: str, step: int) -> None:
        """From now on this rank is in `phase`; its time is booked in the ledger class of that phase."""
        self.beat(step, phase)
        self.clock.enter(_CLASS_OF_PHASE[phase])


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A fault to inject, and what it needs to know to aim."""

    fault: Fault
    node: int
    nodes: int
    agent_pid: int | None


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """One rank's parts. extra: what every commit carries besides step, cursor and money.

    progress, cadence: rank 0 only.
    """

    config: RunConfig
    gang: Gang
    workload: Workload
    spread: Spread
    optimizer: torch.optim.Optimizer
    saver: Saver
    limits: Limits
    reporter: Reporter
    extra: dict[str, Any]
    start: Position = Position()
    progress: Progress | None = None
    cadence: Cadence | None = None
    rehearsal: Rehearsal | None = None

    def enter(self, phase: str, step: int) -> None:
        self.reporter.enter(phase, step)

    def seed_random_numbers(self, step: int) -> None:
        """The state is a function of (seed, step, rank), so that a resumed run draws what the first would have."""
        text = f"{self.config.training.seed}\n{step}\n{self.gang.rank}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little"))

    def share(self, at: Position) -> Cursor:
        return Cursor(at.cursor, self.config.training.batch_size).share(self.gang.rank, self.gang.world_size)

    def exchange_pulse(self, at: Position, batch: Batch, loss: Loss, gradients: Sequence[Tensor]) -> Pulse:
        clock = self.reporter.clock
        row = Row(
            step=at.step + 1,
            cursor=at.cursor,
            loss_sum=float(loss.sum),
            weight=loss.weight,
            square_sum=float(self.spread.square_sum(gradients)),
            flops=self.workload.flops(batch),
            compute_seconds=clock.booked_seconds(LedgerClass.USEFUL_STEP),
            data_seconds=clock.booked_seconds(LedgerClass.DATA_WAIT),
            stop=self.limits.stop(),
            save_due=self.cadence is not None and self.cadence.due(at.step + 1),
            saving=self.saver.busy,
            save_seconds=self._last_save_seconds,
            stop_seconds=self.limits.stop_seconds,
        )
        return exchange(self.gang, row)

    @property
    def _last_save_seconds(self) -> float:
        """What the last save before leaving would take, as far as it is known. It will be spared no bandwidth, so that
        what saves took under a cap says nothing of it; it is then tried, and ends at its deadline."""
        capped = self.config.checkpoint.upload_mib_per_second is not None
        return 0.0 if capped else self.saver.expected_seconds or 0.0

    def record_step(self, at: Position, pulse: Pulse, learning_rate: float) -> None:
        """The step's event, with all time since the last one; on rank 0 also what concerns the whole gang."""
        data: dict[str, Any] = {
            "loss": pulse.loss,
            "tokens": pulse.weight,
            "learning_rate": learning_rate,
            "gradient_norm": pulse.gradient_norm,
            "seconds": self.reporter.clock.take(),
        }
        if self.cadence is not None:
            data |= self._note_cadence(self.cadence, data["seconds"], saving=bool(pulse.saving))
        if self.progress is not None:
            slowest, ratio = pulse.slowest
            data |= {"flops": pulse.flops, "slowest_rank": slowest, "slowest_ratio": ratio}
            commit = self.saver.last_commit
            self.progress.step(
                Status(
                    step=at.step,
                    loss=pulse.loss,
                    tokens=pulse.weight,
                    flops=pulse.flops,
                    spent_usd=self.limits.spent_usd,
                    last_commit_step=commit.step if commit else None,
                    at_risk_usd=data.get("at_risk_usd"),
                )
            )
        self.reporter.emit(STEP, step=at.step, **data)
        if self.gang.rank == 0:
            self._tell_budget(at, pulse.stop)

    def _tell_budget(self, at: Position, stop: Stop) -> None:
        for news in self.limits.budget_news(stop):
            self.reporter.emit(BUDGET, step=at.step, **news)
            share = f"{news['threshold']:.0%} of the budget ${news['budget_usd']:.4f}"
            print(
                f"step {at.step}: {share} is reached: ${news['spent_usd']:.4f} spent, ${news['reserve_usd']:.4f} kept",
                flush=True,
            )

    def rehearse_fault(self, step: int) -> None:
        """After the step and before its save, so that work really is lost."""
        aim = self.rehearsal
        if aim is None or not aim.fault.due(step, self.config.training.max_steps):
            return
        world_size = self.gang.world_size
        if not aim.fault.targets(node=aim.node, rank=self.gang.rank, nodes=aim.nodes, world_size=world_size):
            return
        try:
            self.reporter.emit(FAULT_INJECTED, step=step, flush=True, kind=aim.fault.kind, target=str(aim.fault))
        except StoreError as error:  # without its record it would strike again in every attempt
            message = f"rehearsed fault {aim.fault} was left out at step {step}: its record could not be kept: {error}"
            print(message, flush=True)
            self.reporter.emit(NOTICE, step=step, message=message)
            return
        aim.fault.strike(aim.agent_pid)

    def save_if_due(self, at: Position, pulse: Pulse, *, last: bool) -> None:
        """What all ranks decide alike, from the pulse: save, leave it out, or save while there is time."""
        if pulse.stop is Stop.INTERRUPTED:
            self._save_in_time(at, pulse)
        elif last:
            self.save(at)
        elif pulse.save_due and pulse.saving and self.config.checkpoint.when_busy == "skip":
            self._skip(at, f"the save before is still under way on rank {', '.join(map(str, pulse.saving[:5]))}")
        elif pulse.save_due:
            self.save(at)

    def save(self, at: Position, *, deadline_seconds: float | None = None) -> None:
        """Returns once the state is staged; it becomes durable behind training's back."""
        self.enter("checkpoint", at.step)
        extra = self.extra | {"step": at.step, "cursor": at.cursor, "spent_usd": self.limits.spent_usd}
        if self.cadence is not None:
            extra["exposed_seconds"] = self.cadence.exposed_seconds
        module = self.spread.module
        stall = self.saver.save(at.step, module, self.optimizer, extra, deadline_seconds=deadline_seconds)
        self.spread.committed()
        if self.cadence is not None:
            self.cadence.saved(at.step, stall)
            self.reporter.emit(INTERVAL, step=at.step, **self.cadence.choice().to_json())

    def _save_in_time(self, at: Position, pulse: Pulse) -> None:
        """The last save before the machine goes, if what is measured says that it fits; else the last commit stands."""
        needed, left = pulse.last_save
        self.saver.hurry()
        if needed > left:
            self._skip(at, f"a save takes {needed:.1f} s and {left:.1f} s are left; the last commit stands")
        else:
            limit = self.config.checkpoint.deadline_seconds
            self.save(at, deadline_seconds=max(min(left, limit), 1.0))

    def _left_behind(self, at: Position) -> str:
        """What a later attempt finds, once nothing is under way any more."""
        commit = self.saver.last_commit
        if commit is None:
            return "there is no commit to be resumed from"
        if commit.step == at.step:
            return "saved, to be resumed"
        return f"step {at.step} is not saved, to be resumed from step {commit.step}"

    def _skip(self, at: Position, reason: str) -> None:
        if self.gang.rank == 0:
            self.reporter.emit(COMMIT_SKIPPED, step=at.step, reason=reason)
            print(f"step {at.step}: not saved: {reason}", flush=True)

    def _note_cadence(self, cadence: Cadence, seconds: dict[str, float], *, saving: bool) -> dict[str, float]:
        """What a step tells of saves; returns what the step's event has of it."""
        cadence.stepped(sum(seconds.get(name, 0.0) for name in _STEP_CLASSES), busy=saving)
        if (durable := self.saver.last_durable) is not None:
            cadence.committed(*durable)
        return {"at_risk_usd": cadence.seconds_at_risk * self.limits.usd_per_second}

    def evaluate(self, at: Position) -> None:
        self.enter("evaluation", at.step)
        with self.spread.evaluating() as model:
            metrics = as_numbers(self.workload.evaluate(model))
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.extra["metrics"] = {**finite, "step": at.step}  # with the commit of this step, for retention to choose by
        if self.gang.rank == 0:
            self.reporter.emit(EVALUATION, step=at.step, metrics=metrics)

    def end(self, at: Position, outcome: Outcome, message: str = "") -> Ending:
        """Wait for the save in flight to be committed, then tell the outcome. Collective."""
        self.enter("checkpoint", at.step)
        try:
            self.saver.wait()
        except GenerationSuperseded:
            raise
        except CheckpointError as error:
            if outcome is not Outcome.INTERRUPTED:
                raise
            message = f"{message}; the last save did not become a commit: {error}"
        if outcome is Outcome.INTERRUPTED:
            message = f"{message}; {self._left_behind(at)}"
        self.enter("done", at.step)
        # Who was told to leave has no time to read all weights; a later attempt will end the job.
        sha256 = None if outcome is Outcome.INTERRUPTED else weights_sha256(self.spread.module)
        if self.gang.rank == 0:
            self.reporter.emit(
                OUTCOME, step=at.step, flush=True, outcome=str(outcome), weights_sha256=sha256, message=message
            )
        return Ending(outcome, at.step, message, sha256)
