"""A clock that stands still until a test moves it, for modules that call `time.monotonic()` and
`time.time()`.
"""

from __future__ import annotations

import time
from types import ModuleType

import pytest


class StandingClock:
    """seconds: what `time.monotonic()` gives; the Unix time is `EPOCH` later."""

    EPOCH = 1_700_000_000.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.seconds = float(int(time.monotonic()) + 1000)  # whole, so that sums of it are exact
        for module in modules:
            monkeypatch.setattr(module, "time", self)
            if hasattr(module, "_monotonic_ns"):  # it keeps the clock that users' patches miss
                monkeypatch.setattr(module, "_monotonic_ns", self.monotonic_ns)

    def monotonic(self) -> float:
        return self.seconds

    def monotonic_ns(self) -> int:
        return int(self.seconds * 1e9)

    def time(self) -> float:
        return self.EPOCH + self.seconds

    def sleep(self, seconds: float) -> None:
        """Move the clock, and give other threads a turn."""
        self.seconds += seconds
        time.sleep(0)
