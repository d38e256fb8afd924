"""Decisions about saves: when to save, when to skip a save, and how often.

Rank 0 asks for a save, and the step sync distributes the request, so that all ranks save at the
same step.

With `interval: auto`, the time between two saves is Daly's optimal interval. It depends on the cost
of a save and on the hazard. The cost is measured: the stall, plus the slowdown of steps during the
upload. The hazard is the plan's estimate, corrected by the interruptions of the job so far.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ebbflow.core.config.schema import CheckpointConfig, RunConfig
from ebbflow.core.events import COMMIT_SKIPPED, INTERVAL, LedgerClass
from ebbflow.core.reliability import (
    GammaHazard,
    PlannedHazard,
    daly_interval_seconds,
    expected_loss,
)
from ebbflow.training.checkpoint import Checkpointer
from ebbflow.training.engine.parallel import Spread
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.limits import Limits, Position, Stop
from ebbflow.training.reporter import Reporter
from ebbflow.training.step_sync import StepSync

# The default and the minimum: machines fail even where no plan expects interruptions.
_HAZARD_PER_HOUR = 1.0 / (24 * 7)
_LONGEST_SECONDS = 3600.0
_FIRST_SECONDS = 60.0  # with "auto" the first save is early, to measure its cost
_REMEMBERED = 8  # the number of saves from which the next is estimated
_STEPS_REMEMBERED = 64
_STEPS_TO_COMPARE = 3
Hazard = GammaHazard | PlannedHazard
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Choice:
    seconds: float  # the interval
    stall_seconds: float  # the time that training stops for one save
    slow_down_seconds: float  # the time that one upload costs by slowing down steps
    upload_seconds: float  # the longest recent time until a save was durable
    hazard_per_hour: float  # expected interruptions per hour
    predicted_loss: (
        float  # the share of the time that is lost to saves and repeated steps, from 0 to 1
    )


class SaveSchedule:
    """Rank 0's rule for when to save.

    It uses the configuration, the hazard per hour and the measured cost of saves.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        hazard: GammaHazard | PlannedHazard,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._hazard = hazard
        self._now = now
        self._began = self._saved_at = self._safe_at = now()
        self._asked_at: dict[int, float] = {}  # start of each save that is not durable yet, by step
        self._exposed_before = 0.0
        self._saves = 0
        self._stalls: deque[float] = deque(maxlen=_REMEMBERED)
        self._uploads: deque[float] = deque(maxlen=_REMEMBERED)
        self._quiet: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._busy: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._busy_steps = self._steps = 0
        self._committed_step: int | None = None

    def due(self, step: int) -> bool:
        if self._config.interval == "steps":
            return step % self._config.interval_steps == 0
        since = self._now() - self._saved_at
        if self._config.interval == "seconds":
            return since >= self._config.interval_seconds
        if self._saves == 0:
            return since >= _FIRST_SECONDS or self._steps + 1 >= self._config.interval_steps
        return since >= self.choice().seconds

    def record_step(self, seconds: float, *, busy: bool) -> None:
        """Record the duration of a step, without its save.

        `busy` means that an upload was in progress.
        """
        self._steps += 1
        (self._busy if busy else self._quiet).append(seconds)
        self._busy_steps += busy

    def saved(self, step: int, stall_seconds: float) -> None:
        self._saves += 1
        self._saved_at = self._now()
        self._asked_at[step] = self._saved_at - stall_seconds
        self._stalls.append(stall_seconds)

    def committed(self, step: int, seconds: float) -> None:
        """Record that the save of `step` was durable after `seconds`.

        A second call for the same step is ignored.
        """
        if step != self._committed_step:
            self._committed_step = step
            self._uploads.append(seconds)
            self._safe_at = self._asked_at.pop(step, self._safe_at)

    def remember(self, exposed_seconds: float) -> None:
        """Add the running time of the job's earlier generations to the estimate of the hazard."""
        self._hazard = self._hazard.seen(0, exposed_seconds / 3600.0)
        self._exposed_before = exposed_seconds

    @property
    def exposed_seconds(self) -> float:
        """Seconds during which the job could have been interrupted, over all its generations."""
        return self._exposed_before + self._now() - self._began

    @property
    def seconds_at_risk(self) -> float:
        """Seconds of training that an interruption now would lose: the time since the last commit
        was staged.
        """
        return self._now() - self._safe_at

    def choice(self) -> Choice:
        """Return the optimal interval and the estimates behind it.

        Only the setting "auto" uses this interval.
        """
        if self._stalls:
            stall = statistics.median(self._stalls)
        else:
            stall = 0.0
        upload = max(self._uploads, default=0.0)
        slow_down = self._slow_down_seconds()
        hazard = self._hazard.seen(0, (self._now() - self._began) / 3600.0).per_hour
        best = daly_interval_seconds(stall + slow_down, hazard)
        seconds = used = max(min(best, _LONGEST_SECONDS), upload)
        if self._config.interval != "auto" and self._saves:  # the mean interval so far is in use
            used = (self._saved_at - self._began) / self._saves
        return Choice(
            seconds=seconds,
            stall_seconds=stall,
            slow_down_seconds=slow_down,
            upload_seconds=upload,
            hazard_per_hour=hazard,
            predicted_loss=expected_loss(
                max(used, 1e-3), stall + slow_down, hazard, exposed_seconds=upload
            ),
        )

    def _slow_down_seconds(self) -> float:
        """Return the extra step time, in seconds, that the upload of one save causes."""
        if min(len(self._quiet), len(self._busy)) < _STEPS_TO_COMPARE or not self._saves:
            return 0.0
        longer = statistics.median(self._busy) - statistics.median(self._quiet)
        return max(0.0, longer) * self._busy_steps / self._saves


@dataclass(frozen=True, kw_only=True)
class SaveController:
    """Controller of one rank's saves. All ranks start, skip or hurry a save at the same step."""

    config: CheckpointConfig
    rank: int
    spread: Spread
    optimizer: torch.optim.Optimizer | None
    saver: Checkpointer
    limits: Limits
    reporter: Reporter
    extra: dict[str, Any]  # fields that every commit has, besides step, cursor and spent dollars
    # Returns further fields of the commit of a step
    carried: Callable[[int], dict[str, Any]] = lambda _: {}
    # The rule for when to save, on rank 0; None on other ranks
    save_schedule: SaveSchedule | None = None

    def due(self, step: int) -> bool:
        """Return this rank's vote for a save after `step`; only the vote of rank 0 counts."""
        asked = not self.saver.busy and self.limits.save_wanted()
        return asked or (self.save_schedule is not None and self.save_schedule.due(step))

    def save_if_due(self, at: Position, sync: StepSync, *, last: bool) -> None:
        # Of the rank with the most bytes
        limit = max(sync.save_limit_seconds, self.config.deadline_seconds)
        if sync.stop is Stop.INTERRUPTED:
            needed, left = sync.last_save
            self.saver.hurry()
            if needed > left:  # it would not be durable when the process is killed
                self._skip(
                    at,
                    f"a save takes {needed:.1f} s and {left:.1f} s are left; the last commit "
                    "counts",
                )
            else:
                self.save(at, deadline_seconds=max(min(left, limit), 1.0))
        elif last or sync.renew:
            self.save(at, least_seconds=limit)
        elif sync.save_due and sync.saving and self.config.when_busy == "skip":
            self._skip(
                at,
                "the previous save is still in flight on rank "
                f"{', '.join(map(str, sync.saving[:5]))}",
            )
        elif sync.save_due:
            self.save(at, least_seconds=limit)

    def save(self, at: Position, **limits: float) -> None:
        """Copy the state into staging buffers; `limits` are those of `Checkpointer.save`.

        The upload is concurrent.
        """
        self.reporter.enter("checkpoint", at.step)
        extra = self.extra | self.carried(at.step)
        extra |= {"step": at.step, "cursor": at.cursor, "spent_usd": self.limits.spent_usd}
        if self.save_schedule is not None:
            extra["exposed_seconds"] = self.save_schedule.exposed_seconds
        module = self.spread.module
        stall = self.saver.save(at.step, module, self.optimizer, extra, **limits)
        self.spread.reset_compression()  # its state is not part of a commit
        if self.save_schedule is not None:
            self.save_schedule.saved(at.step, stall)
            self.reporter.emit(INTERVAL, step=at.step, **asdict(self.save_schedule.choice()))

    def finish(self) -> None:
        """Wait until the newest save is a commit.

        After a drain request, lift the bandwidth limit.
        """
        self.saver.before_step()
        over = self.reporter.enter_temporarily("store")
        limit = time.monotonic() + self.config.deadline_seconds
        while self.saver.busy and not self.limits.drain_requested and time.monotonic() < limit:
            time.sleep(_LOOK_SECONDS)
        over()
        if self.limits.drain_requested:
            self.saver.hurry()
        self.saver.wait()

    def describe_resume_point(self, at: Position) -> str:
        """Describe the step from which a later attempt resumes.

        Call this when no save is in flight.
        """
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

    def record_step_time(self, seconds: dict[str, float], *, saving: bool) -> dict[str, float]:
        """Record a step's duration in the save schedule, and return the fields about saves for the
        step's event.
        """
        schedule = self.save_schedule
        if schedule is None:
            return {}
        own_seconds = (
            seconds.get(str(name), 0.0) for name in (LedgerClass.USEFUL_STEP, LedgerClass.DATA_WAIT)
        )
        schedule.record_step(sum(own_seconds), busy=saving)
        durable = self.saver.last_durable
        if durable is not None:
            schedule.committed(*durable)
        return {"at_risk_usd": schedule.seconds_at_risk * self.limits.usd_per_second}

    @property
    def last_save_seconds(self) -> float:
        """Expected seconds of the last save before exit; 0 if unknown.

        With a bandwidth cap it is unknown, because the cap does not apply to the last save.
        """
        capped = self.config.upload_mib_per_second is not None
        if capped:
            return 0.0
        return self.saver.expected_seconds or 0.0


def make_save_schedule(spec: WorkerSpec, config: RunConfig, gang: Gang) -> SaveSchedule | None:
    """On rank 0, return the rule for when to save.

    Return None on all other ranks, whose votes do not count.
    """
    if gang.rank != 0:
        return None
    planned = spec.terms.hazard_per_hour if spec.terms is not None else None
    interruptions = max(0, spec.generation - 1)
    return SaveSchedule(config.checkpoint, prior_hazard(planned, interruptions=interruptions))


def prior_hazard(planned_per_hour: float | None, *, interruptions: int) -> PlannedHazard:
    """Return the estimated hazard at the start of a generation, from the plan and the job's
    interruptions so far.
    """
    return PlannedHazard(max(planned_per_hour or 0.0, _HAZARD_PER_HOUR)).seen(interruptions, 0.0)
