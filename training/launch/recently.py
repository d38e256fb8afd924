"""Something that was told a moment ago and is told again while it holds."""

from __future__ import annotations

import time
from collections.abc import Callable

STORE_WAIT_SECONDS = 3.0  # it is told each second; and those who waited along have a moment to go on when it is over


class Recently:
    """Whether `mark` was called within the last `seconds`."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._now = seconds, now
        self._marked = float("-inf")

    def mark(self) -> None:
        self._marked = self._now()

    @property
    def seconds_since(self) -> float:
        return self._now() - self._marked

    @property
    def holds(self) -> bool:
        return self.seconds_since < self._seconds
