"""What the loop calls: the parts of one rank's training, put together, and the chores around a step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infra.config.schema import RunConfig
from infra.errors import StoreError
from infra.events import EVALUATION, FAULT_INJECTED, NOTICE, OUTCOME, STEP
from infra.ledger_classes import LedgerClass
from infra.outcome import Outcome
from training.clock import Clock
from training.gang import Gang
from training.limits import Limits
from training.parallel import Spread
from training.progress import Progress, Status
from training.pulse import Pulse, Row, exchange
from training.rehearse import Fault
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


class Saver(Protocol):
    """The part of `training.checkpoint.Checkpointer` that the loop needs."""

    @property
    def last_commit(self) -> Any: ...

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict) -> float: ...

    def wait(self) -> Any: ...


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
    """One rank's parts. extra: what every commit carries besides step, cursor and money. progress: rank 0 only."""

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
        )
        return exchange(self.gang, row)

    def record_step(self, at: Position, pulse: Pulse, learning_rate: float) -> None:
        """The step's event, with all time since the last one; on rank 0 also what concerns the whole gang."""
        data: dict[str, Any] = {
            "loss": pulse.loss,
            "tokens": pulse.weight,
            "learning_rate": learning_rate,
            "gradient_norm": pulse.gradient_norm,
            "seconds": self.reporter.clock.take(),
        }
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
                )
            )
        self.reporter.emit(STEP, step=at.step, **data)

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

    def save(self, at: Position) -> None:
        """Returns once the state is staged; it becomes durable behind training's back."""
        self.enter("checkpoint", at.step)
        extra = self.extra | {"step": at.step, "cursor": at.cursor, "spent_usd": self.limits.spent_usd}
        self.saver.save(at.step, self.spread.module, self.optimizer, extra)
        self.spread.committed()

    def evaluate(self, at: Position) -> None:
        self.enter("evaluation", at.step)
        with self.spread.evaluating() as model:
            metrics = as_numbers(self.workload.evaluate(model))
        if self.gang.rank == 0:
            self.reporter.emit(EVALUATION, step=at.step, metrics=metrics)

    def end(self, at: Position, outcome: Outcome, message: str = "") -> Ending:
        """Wait for the save in flight to be committed, then tell the outcome. Collective."""
        self.enter("checkpoint", at.step)
        self.saver.wait()
        self.enter("done", at.step)
        # Who was told to leave has no time to read all weights; a later attempt will end the job.
        sha256 = None if outcome is Outcome.INTERRUPTED else weights_sha256(self.spread.module)
        if self.gang.rank == 0:
            self.reporter.emit(
                OUTCOME, step=at.step, flush=True, outcome=str(outcome), weights_sha256=sha256, message=message
            )
        return Ending(outcome, at.step, message, sha256)
