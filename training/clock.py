"""A rank's clock: from its process's first moment to its last event, every second is in exactly one ledger class."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from ebbflow.infra.events import PHASE, LedgerClass


class Clock:
    """Starts in STARTUP at `started` (monotonic seconds). Time is booked when it is taken, so that sums have no gap.

    emit: `EventLog.emit`, or whatever takes (name, **data). now: the monotonic clock, replaceable for tests.
    """

    def __init__(
        self, emit: Callable[..., object], *, started: float | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._emit = emit
        self._now = now
        self._started = self._since = process_start_monotonic() if started is None else started
        self._current = LedgerClass.STARTUP
        self._booked: dict[LedgerClass, float] = {}
        self._own = False
        self._own_seconds = 0.0

    @property
    def elapsed_seconds(self) -> float:
        return self._now() - self._started

    def enter(self, ledger_class: LedgerClass, *, own: bool = False) -> None:
        """own: in what begins now this rank waits for no other."""
        self._book()
        self._current, self._own = ledger_class, own

    def booked_seconds(self, ledger_class: LedgerClass) -> float:
        """In this class since the last `take`, up to now."""
        self._book()
        return self._booked.get(ledger_class, 0.0)

    @property
    def own_seconds(self) -> float:
        """Without waiting for other ranks, since the last `take`, up to the last `enter`."""
        return self._own_seconds

    def take(self) -> dict[str, float]:
        """Seconds by class since the last `take`, for a step's event. The running class goes on."""
        self._book()
        booked, self._booked = self._booked, {}
        self._own_seconds = 0.0
        return {str(name): seconds for name, seconds in booked.items()}

    def emit_phases(self) -> None:
        """What was booked, as `phase` events: for time that belongs to no step."""
        for name, seconds in self.take().items():
            self._emit(PHASE, **{"class": name, "seconds": seconds})

    def _book(self) -> None:
        now = self._now()
        spent = now - self._since
        self._booked[self._current] = self._booked.get(self._current, 0.0) + spent
        if self._own:
            self._own_seconds += spent
        self._since = now


def process_start_monotonic() -> float:
    """When this process started, on the monotonic clock: interpreter and imports are paid for as well.

    The kernel counts a process's start in ticks since boot (proc(5), /proc/pid/stat field 22). Without /proc, now.
    """
    try:
        # The second field is the command in parentheses, which may hold anything; count from its end.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.monotonic()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started_since_boot
    return time.monotonic() - max(age, 0.0)
