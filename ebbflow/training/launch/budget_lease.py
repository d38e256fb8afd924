"""Watch whether a job keeps its reservation in its team's budget, on node 0 of a gang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ebbflow.core.errors import EbbflowError
from ebbflow.training.launch.logs import print_line

# Without an answer of the store for so long, the gang leaves, because others may soon take the dollars
UNKNOWN_SECONDS = 90.0
_LOOK_SECONDS = 20.0


class BudgetLease:
    """Thread that drains the gang as soon as the job has no reservation in the budget any more."""

    def __init__(
        self,
        is_reserved: Callable[[], bool],
        drain: Callable[[], None],
        *,
        look_seconds: float = _LOOK_SECONDS,
        unknown_seconds: float = UNKNOWN_SECONDS,
    ) -> None:
        self._is_reserved = is_reserved
        self._drain = drain
        self._look_seconds = look_seconds
        self._unknown_seconds = unknown_seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="budget lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask the thread to end, without waiting for a request that hangs."""
        self._done.set()

    def _watch(self) -> None:
        known = time.monotonic()
        while not self._done.is_set():
            why = ""
            try:
                if self._is_reserved():
                    known = time.monotonic()
                else:
                    why = "its team's budget has no reservation for it any more"
            except EbbflowError as error:
                silent = time.monotonic() - known
                if silent >= self._unknown_seconds:
                    why = f"its team's budget could not be read for {silent:.0f} s: {error}"
            if why:
                print_line(f"the job leaves: {why}")
                self._drain()
                return
            self._done.wait(self._look_seconds)
