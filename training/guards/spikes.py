"""How far a number lies above those before it, by median and MAD: a few wild values among them change neither."""

from __future__ import annotations

import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

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
