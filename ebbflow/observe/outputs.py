"""Outputs of the observer: their interface, and threads in which they do their work.

With threads, a slow or failing output delays nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ebbflow.core.errors import InfraError
from ebbflow.core.events import Event
from ebbflow.core.retry import backoff_pauses
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.report.report import RunReport

_FIRST_PAUSE_SECONDS = 1.0  # after an error
_LONGEST_PAUSE_SECONDS = 30.0
_LAST_PAUSE_SECONDS = 1.0  # longest pause after an error once the job has ended
_LONGEST_ERROR = 300  # characters


@dataclass(frozen=True)
class JobView:
    """The report and events of a job at one moment, as the observer passes them to outputs."""

    report: RunReport
    events: Sequence[Event]  # all events so far, merged
    last: bool  # the launcher has ended, so that no more events will come


class Output(Protocol):
    """Destination of a job's events and report, such as a tracker or the live page.

    All methods are called by the observer's main thread, which they must not delay.
    """

    # Whether a launcher that ends replaces what the output shows
    ends_with_launcher: bool

    def add(self, events: Sequence[Event]) -> None:
        """Receive new events.

        They are not merged (see `ebbflow.observe.watch.merge_committed_steps`).
        """
        ...

    def show(self, view: JobView) -> None:
        """Receive the newest report and all events."""
        ...

    def wake(self, *, last: bool) -> None:
        """Let the output's threads write what they have received, even if there was no report."""
        ...

    def report_problem(self, error: Exception) -> None:
        """Report that the observer could not read the job or build its report, because of
        `error`.
        """
        ...

    def finish(self, seconds: float) -> bool:
        """Wait at most `seconds` until the output's threads have ended, and return whether they
        have.
        """
        ...


class OutputThread(threading.Thread):
    """Thread that calls `work` each time `wake` is called.

    It ends after `wake(last=True)`, once `work` has succeeded. It prints the first of consecutive
    errors, and retries.

    Args:
        work: called with whether the job has ended.
        tell: prints a line for the user.
    """

    def __init__(
        self, name: str, work: Callable[[bool], None], tell: Callable[[str], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._tell = tell
        self._woken = threading.Event()
        self._last = False
        self._failed = False  # since the last success
        self._abandoned = False

    def wake(self, *, last: bool = False) -> None:
        if last:
            self._last = True
        self._woken.set()

    def finish(self, seconds: float) -> bool:
        """Wait at most `seconds` until the thread has ended, and return whether it has.

        If it has not, its next error or success ends it.
        """
        self.join(max(0.0, seconds))
        self._abandoned = True
        return not self.is_alive()

    def run(self) -> None:
        pauses = _new_pauses()
        while self._woken.wait() and not self._abandoned:
            self._woken.clear()
            last = self._last
            try:
                self._work(last)
            except Exception as error:  # libraries raise many kinds of errors
                self._report(error)
                longest = _LAST_PAUSE_SECONDS if self._last else _LONGEST_PAUSE_SECONDS
                time.sleep(min(next(pauses), longest))
                self._woken.set()
                continue
            if self._failed:
                self._tell(f"{self.name}: works again")
            self._failed = False
            pauses = _new_pauses()
            if last:
                return

    def _report(self, error: Exception) -> None:
        if not self._failed:
            if isinstance(error, InfraError):
                known = one_line(error)
            else:
                known = one_line(f"{type(error).__name__}: {error}")
            self._tell(
                f"{self.name}: {known[:_LONGEST_ERROR]}; training goes on, and this is sent later"
            )
        self._failed = True


def _new_pauses() -> Iterator[float]:
    return backoff_pauses(
        first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS
    )
