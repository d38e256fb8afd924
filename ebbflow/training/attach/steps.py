"""The steps of an attached job: when the ranks sync, and which events record the steps."""

import math
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ebbflow.core.config.schema import CheckpointConfig
from ebbflow.core.events import STEP
from ebbflow.training.metric_values import read_metric
from ebbflow.training.reporter import Reporter

_SYNC_SECONDS = 0.5
_MOST_STEPS = 100  # between two syncs


class SyncSchedule:
    """Schedule of the syncs: the steps at which all ranks agree whether to save and whether to
    stop.

    It is the same on all ranks.

    Attributes:
        synced_step: step of the last sync, or of the restored commit.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._next_step = 0
        self._synced_at = 0.0
        self.synced_step = 0

    def begin(self, step: int) -> None:
        """Begin at the step of the restored commit."""
        self._next_step = step
        self.synced_step = step

    def start_clock(self) -> None:
        self._synced_at = time.monotonic()

    def is_due(self, step: int) -> bool:
        return step >= self._next_step

    def postpone(self, step: int) -> None:
        """Sync again after the next step."""
        self._next_step = step + 1

    def mean_of_steps(self, seconds: float, step: int) -> float:
        """Return the mean per step of `seconds`, a time that was measured since the last sync."""
        return seconds / max(1, step - self.synced_step)

    def seconds_per_step(self, step: int) -> float:
        return self.mean_of_steps(time.monotonic() - self._synced_at, step)

    def plan_next(self, step: int, step_seconds: float) -> None:
        """Choose the step of the next sync, given rank 0's seconds per step."""
        steps = int(_SYNC_SECONDS / max(step_seconds, 1e-6))
        self._next_step = step + max(1, min(_MOST_STEPS, steps))
        if self._config.interval == "steps":
            interval = self._config.interval_steps
            self._next_step = min(self._next_step, (step // interval + 1) * interval)
        self.start_clock()
        self.synced_step = step


class StepLog:
    """The script's metrics of the current step, and the step events that are still to be emitted.

    They wait because reading their losses now would make the loop wait for the device.

    Args:
        kept_steps: number of the newest events that wait for a loss that is logged later.
    """

    def __init__(self, reporter: Reporter, kept_steps: int) -> None:
        self._reporter = reporter
        self._kept_steps = kept_steps
        self._values: dict[str, Any] = {}
        self._pending: list[_PendingStep] = []
        self._max_steps = 0  # as recorded last

    def log(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self._values[name] = value.detach() if isinstance(value, Tensor) else value

    def take(self, name: str, default: object = None) -> Any:
        """Remove a value from the metrics of the current step, and return it."""
        return self._values.pop(name, default)

    def take_metrics(self) -> dict[str, object]:
        metrics = self._values
        self._values = {}
        return metrics

    def add(self, step: int, data: dict[str, Any], loss: Any, *, max_steps: int = 0) -> None:
        """Add the event of a step. `max_steps` is the number of steps of the job, 0 if unknown."""
        if max_steps != self._max_steps:
            self._max_steps = max_steps
            data["max_steps"] = max_steps
        at = (time.time(), time.monotonic())
        self._pending.append(_PendingStep(step, at, data, loss))

    def set_last_loss(self, loss: float) -> None:
        if self._pending:
            self._pending[-1].loss = loss

    def flush(self, *, all_steps: bool = True) -> float:
        """Emit the pending events. Unless `all_steps`, keep those that wait for a loss.

        Return the worst loss in these events, or 0 if none.
        """
        count = len(self._pending) - (0 if all_steps else self._kept_steps)
        losses: list[float] = []
        for pending in self._pending[:count]:
            loss = read_metric(pending.loss)
            if loss is not None:
                losses.append(loss)
                if math.isfinite(losses[-1]):
                    pending.data["loss"] = losses[-1]
            self._reporter.emit(STEP, step=pending.step, at=pending.at, **pending.data)
        del self._pending[:count]
        return worst_loss(losses)


def worst_loss(losses: list[float]) -> float:
    """Return the largest loss, NaN if a loss is not finite, or 0 if there are no losses."""
    if all(map(math.isfinite, losses)):
        return max(losses, default=0.0)
    return math.nan


@dataclass
class _PendingStep:
    step: int
    at: tuple[float, float]  # wall clock and monotonic clock at the step's end
    data: dict[str, Any]
    loss: Any  # a number or a tensor on the device; None if none was logged
