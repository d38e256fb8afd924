"""When to save: each so many steps, each so many seconds, or as often as what was measured says is worth it.

Rank 0 asks; the others hear of it through the pulse, so that all save at the same step. With "auto" the time between
two saves is Daly's, from what a save costs (the stall, and the steps that an upload slows down), and from the hazard:
the plan's as a prior, corrected by the interruptions that the job has seen.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ebbflow.infra.config.schema import CheckpointConfig
from ebbflow.infra.reliability import GammaHazard, PlannedHazard, daly_interval_seconds, expected_loss

# Without a plan's figure, and for capacity that is said never to be taken: machines fail all the same. An assumption.
_HAZARD_PER_HOUR = 1.0 / (24 * 7)
_LONGEST_SECONDS = 3600.0
_FIRST_SECONDS = 60.0  # in "auto" the first save comes soon: nothing is known before it
_REMEMBERED = 8  # saves whose median stands for the next
_STEPS_REMEMBERED = 64
_STEPS_TO_COMPARE = 3


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The interval in use and where it comes from. predicted_loss: share of the time, for saves and redone work."""

    seconds: float
    stall_seconds: float
    slow_down_seconds: float
    upload_seconds: float
    hazard_per_hour: float
    predicted_loss: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Cadence:
    """hazard: what is believed of interruptions when this generation begins. now: the monotonic clock."""

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
        self._asked_at: dict[int, float] = {}  # by step, of the saves that are not durable yet
        self._exposed_before = 0.0
        self._saves = 0
        self._stalls: deque[float] = deque(maxlen=_REMEMBERED)
        self._uploads: deque[float] = deque(maxlen=_REMEMBERED)
        self._quiet: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._busy: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._busy_steps = self._steps = 0
        self._committed_step: int | None = None

    def due(self, step: int) -> bool:
        """Whether to save after `step`."""
        if self._config.interval == "steps":
            return step % self._config.interval_steps == 0
        since = self._now() - self._saved_at
        if self._config.interval == "seconds":
            return since >= self._config.interval_seconds
        if self._saves == 0:
            return since >= _FIRST_SECONDS or self._steps + 1 >= self._config.interval_steps
        return since >= self.choice().seconds

    def stepped(self, seconds: float, *, busy: bool) -> None:
        """A step took so long, without its save; `busy`: while an upload was under way."""
        self._steps += 1
        (self._busy if busy else self._quiet).append(seconds)
        self._busy_steps += busy

    def saved(self, step: int, stall_seconds: float) -> None:
        """The save of `step` held training up for so long."""
        self._saves += 1
        self._saved_at = self._now()
        self._asked_at[step] = self._saved_at - stall_seconds
        self._stalls.append(stall_seconds)

    def committed(self, step: int, seconds: float) -> None:
        """The save of `step` was durable so long after it was asked for; hearing of it again changes nothing."""
        if step != self._committed_step:
            self._committed_step = step
            self._uploads.append(seconds)
            self._safe_at = self._asked_at.pop(step, self._safe_at)

    def remember(self, exposed_seconds: float) -> None:
        """What earlier generations of the job have lived through, as the commit that was restored says."""
        self._hazard = self._hazard.seen(0, exposed_seconds / 3600.0)
        self._exposed_before = exposed_seconds

    @property
    def exposed_seconds(self) -> float:
        """In which interruptions were counted, over all generations: to be kept with the commit."""
        return self._exposed_before + self._now() - self._began

    @property
    def seconds_at_risk(self) -> float:
        """Since the state of the last commit."""
        return self._now() - self._safe_at

    def choice(self) -> Choice:
        """What is best by what is known now; what is in use with "auto"."""
        stall = statistics.median(self._stalls) if self._stalls else 0.0
        upload = max(self._uploads, default=0.0)
        slow_down = self._slow_down_seconds()
        hazard = self._hazard.seen(0, (self._now() - self._began) / 3600.0).per_hour
        best = daly_interval_seconds(stall + slow_down, hazard)
        seconds = max(min(best, _LONGEST_SECONDS), upload)
        return Choice(
            seconds=seconds,
            stall_seconds=stall,
            slow_down_seconds=slow_down,
            upload_seconds=upload,
            hazard_per_hour=hazard,
            predicted_loss=self._loss(stall + slow_down, upload, hazard, seconds),
        )

    def _loss(self, cost: float, upload: float, hazard: float, best: float) -> float:
        """Of the interval that is really used: with a fixed one, the mean since the start."""
        used = best
        if self._config.interval != "auto" and self._saves:
            used = max((self._saved_at - self._began) / self._saves, 1e-3)
        return expected_loss(max(used, 1e-3), cost, hazard, exposed_seconds=upload)

    def _slow_down_seconds(self) -> float:
        """Per save: how much longer steps are under an upload than else, times those steps."""
        if min(len(self._quiet), len(self._busy)) < _STEPS_TO_COMPARE or not self._saves:
            return 0.0
        longer = statistics.median(self._busy) - statistics.median(self._quiet)
        return max(0.0, longer) * self._busy_steps / self._saves


def believed_hazard(planned_per_hour: float | None, *, interruptions: int, seconds: float) -> PlannedHazard:
    """The plan's hazard (None: there is no plan), and what the job has seen so far: interruptions in `seconds`."""
    plan = PlannedHazard(max(planned_per_hour or 0.0, _HAZARD_PER_HOUR))
    return plan.seen(interruptions, seconds / 3600.0)
