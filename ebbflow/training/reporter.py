"""The reports of one rank: its current phase, its time by ledger class, and its events."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ebbflow.core.events import PHASE, LedgerClass
from ebbflow.core.process import process_stat

# The ledger class of each phase. The phases are those of the heartbeat.
_CLASS_OF_PHASE = {
    "init": LedgerClass.STARTUP,
    "compile": LedgerClass.STARTUP,
    "restore": LedgerClass.RESTORE,
    "data": LedgerClass.DATA_WAIT,
    "forward": LedgerClass.USEFUL_STEP,
    "backward": LedgerClass.USEFUL_STEP,
    "optimizer": LedgerClass.USEFUL_STEP,
    "checkpoint": LedgerClass.CHECKPOINT_STALL,
    "store": LedgerClass.CHECKPOINT_STALL,  # waiting for a save to be durable; has its own deadline
    "evaluation": LedgerClass.EVALUATION,
    "profile": LedgerClass.PROFILING,
    "done": LedgerClass.SHUTDOWN,
}
# Phases in which a rank computes. The waits for other ranks within them are excluded
# (`gang.time_waits`).
_OWN_PHASES = frozenset({"data", "forward", "backward", "optimizer"})


class Clock:
    """Clock that assigns every second since the start of a rank's process to exactly one ledger
    class.
    """

    def __init__(
        self,
        emit: Callable[..., object],
        *,
        started: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit = emit
        self._now = now
        self._started = self._since = process_start_monotonic() if started is None else started
        self._current = LedgerClass.STARTUP
        self._booked: dict[LedgerClass, float] = {}
        self._own = False
        # Without waiting for other ranks, from the last `take_own` to the last `enter`
        self.own_seconds = 0.0

    @property
    def elapsed_seconds(self) -> float:
        return self._now() - self._started

    def enter(self, ledger_class: LedgerClass, *, own: bool = False) -> None:
        """Assign the time from now on to `ledger_class`.

        `own` says that the rank does not wait for other ranks in this time.
        """
        self._book()
        self._current = ledger_class
        self._own = own

    def booked_seconds(self, ledger_class: LedgerClass) -> float:
        self._book()
        return self._booked.get(ledger_class, 0.0)

    def take(self) -> dict[str, float]:
        """Return the seconds spent in each ledger class since the last call."""
        self._book()
        booked = self._booked
        self._booked = {}
        return {str(name): seconds for name, seconds in booked.items()}

    def begin_own(self) -> None:
        """Count the time until the next `end_own` or `enter` as own time: the rank waits for no
        other rank.
        """
        self._book()
        self._own = True

    def exclude(self, seconds: float) -> None:
        """Do not count the last `seconds` as the rank's own, because it waited for other ranks."""
        if self._own:
            self.own_seconds -= seconds
        else:
            self.own_seconds -= 0.0

    def end_own(self) -> None:
        """Count the time until the next `enter` as waiting for other ranks."""
        self._book()
        self._own = False

    def take_own(self) -> float:
        """Return the rank's own time in seconds since the last call, and call `end_own`.

        Own time excludes waits for other ranks.
        """
        self.end_own()
        own = self.own_seconds
        self.own_seconds = 0.0
        return own

    def emit_phases(self) -> None:
        """Emit the seconds since the last call of `take` as `phase` events.

        Use this for time outside of steps.
        """
        for name, seconds in self.take().items():
            self._emit(PHASE, **{"class": name, "seconds": seconds})

    def _book(self) -> None:
        now = self._now()
        spent = now - self._since
        self._booked[self._current] = self._booked.get(self._current, 0.0) + spent
        if self._own:
            self.own_seconds += spent
        self._since = now


def process_start_monotonic() -> float:
    """Return when this process started, on the monotonic clock, so that durations include the
    imports.
    """
    stat = process_stat(os.getpid())
    if stat is None:
        return time.monotonic()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started_ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(age, 0.0)


@dataclass(frozen=True)
class Reporter:
    """Reporting interface of one rank: phases go to its agent, time goes to the ledger, and events
    to the event log.
    """

    clock: Clock  # assigns time to ledger classes
    emit: Callable[..., object]  # takes (name, step=, flush=, **data)
    beat: Callable[[int, str], None] = lambda *_: None  # writes a heartbeat
    # Tells the agent the last completed step
    mark_trained: Callable[[int], None] = lambda _: None
    _at: list[tuple[str, int]] = field(default_factory=lambda: [("init", 0)])
    _on_close: list[Callable[[], object]] = field(default_factory=list)

    def enter(self, phase: str, step: int) -> None:
        self._at[0] = (phase, step)
        self.beat(step, phase)
        self.clock.enter(_CLASS_OF_PHASE[phase], own=phase in _OWN_PHASES)

    def enter_temporarily(self, phase: str) -> Callable[[], None]:
        """Enter `phase`. Return a function that goes back to the previous phase."""
        before, step = self._at[0]
        self.enter(phase, step)
        return lambda: self.enter(before, step)

    def on_close(self, undo: Callable[[], object]) -> None:
        self._on_close.append(undo)

    def close(self) -> None:
        while self._on_close:
            self._on_close.pop()()
