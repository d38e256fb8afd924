"""When a rank saves and when it leaves a save out: what all ranks decide alike, from the pulse."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ebbflow.infra.config.schema import CheckpointConfig
from ebbflow.infra.events import COMMIT_SKIPPED, INTERVAL, LedgerClass
from ebbflow.training.cadence import Cadence
from ebbflow.training.limits import Limits, Stop
from ebbflow.training.parallel import Spread
from ebbflow.training.position import Position
from ebbflow.training.pulse import Pulse
from ebbflow.training.reporter import Reporter
from ebbflow.training.saver import Saver

# What a step without its save is made of.
_STEP_CLASSES = (str(LedgerClass.USEFUL_STEP), str(LedgerClass.DATA_WAIT))

_LOOK_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Saves:
    """One rank's. extra, carried: what every commit carries besides step, cursor and money, fixed and as it is then.

    cadence: rank 0 only.
    """

    config: CheckpointConfig
    rank: int
    spread: Spread
    optimizer: torch.optim.Optimizer
    saver: Saver
    limits: Limits
    reporter: Reporter
    extra: dict[str, Any]
    carried: Callable[[int], dict[str, Any]] = lambda step: {}
    cadence: Cadence | None = None

    def due(self, step: int) -> bool:
        """What this rank has to say of it, rank 0's word counts. What the agent asks for waits for the save before it,
        so that it is never left out for that."""
        asked = not self.saver.busy and self.limits.save_wanted()
        return asked or (self.cadence is not None and self.cadence.due(step))

    def if_due(self, at: Position, pulse: Pulse, *, last: bool) -> None:
        """What all ranks decide alike, from the pulse: save, leave it out, or save while there is time."""
        if pulse.stop is Stop.INTERRUPTED:
            self._in_time(at, pulse)
        elif last or pulse.renew:
            self.save(at)
        elif pulse.save_due and pulse.saving and self.config.when_busy == "skip":
            self._skip(at, f"the save before is still under way on rank {', '.join(map(str, pulse.saving[:5]))}")
        elif pulse.save_due:
            self.save(at)

    def save(self, at: Position, *, deadline_seconds: float | None = None) -> None:
        """Returns once the state is staged; it becomes durable behind training's back."""
        self.reporter.enter("checkpoint", at.step)
        extra = self.extra | self.carried(at.step)
        extra |= {"step": at.step, "cursor": at.cursor, "spent_usd": self.limits.spent_usd}
        if self.cadence is not None:
            extra["exposed_seconds"] = self.cadence.exposed_seconds
        module = self.spread.module
        stall = self.saver.save(at.step, module, self.optimizer, extra, deadline_seconds=deadline_seconds)
        self.spread.committed()
        if self.cadence is not None:
            self.cadence.saved(at.step, stall)
            self.reporter.emit(INTERVAL, step=at.step, **self.cadence.choice().to_json())

    def _in_time(self, at: Position, pulse: Pulse) -> None:
        """The last save before the machine goes, if what is measured says that it fits; else the last commit stands."""
        needed, left = pulse.last_save
        self.saver.hurry()
        if needed > left:
            self._skip(at, f"a save takes {needed:.1f} s and {left:.1f} s are left; the last commit stands")
        else:
            limit = self.config.deadline_seconds
            self.save(at, deadline_seconds=max(min(left, limit), 1.0))

    def finish(self) -> None:
        """Until the newest save is a commit, by the saver's own deadlines; hurried when this rank is told to leave."""
        self.saver.before_step()
        over = self.reporter.enter_for_a_while("store")
        limit = time.monotonic() + self.config.deadline_seconds
        while self.saver.busy and not self.limits.asked_to_leave and time.monotonic() < limit:
            time.sleep(_LOOK_SECONDS)
        over()
        if self.limits.asked_to_leave:
            self.saver.hurry()
        self.saver.wait()

    def left_behind(self, at: Position) -> str:
        """What a later attempt finds, once nothing is under way any more."""
        commit = self.saver.last_commit
        if commit is None:
            return "there is no commit to be resumed from"
        if commit.step == at.step:
            return "saved, to be resumed"
        return f"step {at.step} is not saved, to be resumed from step {commit.step}"

    def _skip(self, at: Position, reason: str) -> None:
        if self.rank == 0:
            self.reporter.emit(COMMIT_SKIPPED, step=at.step, reason=reason)
            print(f"step {at.step}: not saved: {reason}", flush=True)

    def note_step(self, seconds: dict[str, float], *, saving: bool) -> dict[str, float]:
        """What a step tells of saves; returns what the step's event has of it."""
        cadence = self.cadence
        if cadence is None:
            return {}
        cadence.stepped(sum(seconds.get(name, 0.0) for name in _STEP_CLASSES), busy=saving)
        if (durable := self.saver.last_durable) is not None:
            cadence.committed(*durable)
        return {"at_risk_usd": cadence.seconds_at_risk * self.limits.usd_per_second}

    @property
    def seconds_before_leaving(self) -> float:
        """What the last save before leaving would take, as far as it is known. It will be spared no bandwidth, so that
        what saves took under a cap says nothing of it; it is then tried, and ends at its deadline."""
        capped = self.config.upload_mib_per_second is not None
        return 0.0 if capped else self.saver.expected_seconds or 0.0
