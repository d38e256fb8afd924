"""Guards of losses and gradients: non-finite values and spikes, and what is done about them.

A pure function of what all ranks hear in the pulse, so that all decide alike. Its memory goes with every commit: a job
that is resumed judges each step as one that was not interrupted would have.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ebbflow.infra.config.schema import GuardsConfig

# The standard deviation of a normal distribution is so many times its median absolute deviation
# (Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation", 1993).
_SIGMA_PER_MAD = 1.4826
# Below this share of the median, a deviation is rounding and no spread: values that are all equal are no reason to
# take the next one for a spike.
_SMALLEST_SHARE = 1e-3


class RobustWindow:
    """The last `size` values, and the robust z-score of the next one. Judges nothing before it is half full."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._values: deque[float] = deque(values, maxlen=size)
        self._sorted = sorted(self._values)

    @property
    def values(self) -> list[float]:
        """Oldest first."""
        return list(self._values)

    @property
    def median(self) -> float:
        return statistics.median(self._sorted)

    def add(self, value: float) -> None:
        """value: finite."""
        if len(self._values) == self._values.maxlen:
            del self._sorted[bisect_left(self._sorted, self._values[0])]
        self._values.append(value)
        insort(self._sorted, value)

    def z_score(self, value: float) -> float:
        """(value - median) / (1.4826 MAD), never below 0: only what lies above is a spike."""
        if 2 * len(self._values) < (self._values.maxlen or 0) or value <= (median := self.median):
            return 0.0
        mad = statistics.median([abs(other - median) for other in self._sorted])
        return (value - median) / max(_SIGMA_PER_MAD * mad, _SMALLEST_SHARE * abs(median), 1e-12)


class Action(Enum):
    """STEP: as it should be. SKIP: the optimizer's step is left out. REWIND: back to an older commit. STOP: the end."""

    STEP = "step"
    SKIP = "skip"
    REWIND = "rewind"
    STOP = "stop"


@dataclass(frozen=True)
class Judgement:
    """finite: whether it is a spike (or nothing at all) rather than a number that is not finite."""

    action: Action
    reason: str = ""
    finite: bool = True


_GOOD = Judgement(Action.STEP)


class NumberGuard:
    """skipped_in_a_row: steps that were left out since the last good one."""

    def __init__(self, config: GuardsConfig) -> None:
        self._config = config
        self._losses = RobustWindow(config.spike_window_steps)
        self._norms = RobustWindow(config.spike_window_steps)
        self.skipped_in_a_row = 0

    def judge(self, *, loss: float, gradient_norm: float, non_finite: str) -> Judgement:
        """non_finite: which number is not, on which rank; empty when all are finite."""
        config = self._config
        if non_finite:
            return self._bad(config.non_finite, non_finite, finite=False)
        if config.spike == "off":
            self.skipped_in_a_row = 0
            return _GOOD
        reason = self._spike("loss", loss, self._losses) or self._spike("gradient norm", gradient_norm, self._norms)
        if reason:
            return self._bad(config.spike, reason, finite=True)
        self._losses.add(loss)
        self._norms.add(gradient_norm)
        self.skipped_in_a_row = 0
        return _GOOD

    def to_json(self) -> dict[str, Any]:
        return {
            "losses": self._losses.values,
            "gradient_norms": self._norms.values,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """What `to_json` gave; nothing of a commit from before there were guards."""
        size = self._config.spike_window_steps
        self._losses = RobustWindow(size, data.get("losses", ()))
        self._norms = RobustWindow(size, data.get("gradient_norms", ()))
        self.skipped_in_a_row = data.get("skipped_in_a_row", 0)

    def _spike(self, name: str, value: float, window: RobustWindow) -> str:
        score = window.z_score(value)
        if score <= self._config.spike_z:
            return ""
        return (
            f"{name} {value:.4g} is {score:.1f} robust deviations (limit {self._config.spike_z:g}) above the median "
            f"{window.median:.4g} of {len(window.values)} steps"
        )

    def _bad(self, policy: str, reason: str, *, finite: bool) -> Judgement:
        action = Action(policy)
        if action is Action.SKIP and self.skipped_in_a_row >= self._config.skips_in_a_row:
            action = Action.REWIND
            reason = f"{reason}, after {self.skipped_in_a_row} steps left out in a row"
        if action is Action.SKIP:
            self.skipped_in_a_row += 1
        return Judgement(action, reason, finite)
