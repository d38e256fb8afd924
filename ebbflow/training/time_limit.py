"""A time limit for users' code that runs in the main thread."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeIsUp(BaseException):
    """Raised when a trial or a reward takes too long.

    Not an `Exception`, which the user's code might catch.
    """


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp inside the context after `seconds`.

    This works only in the main thread, which handles signals.
    """

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler
        raise TimeIsUp

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    begun = time.monotonic()
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # A limit around this one has lost the time that passed here. 0 would end it.
        signal.setitimer(signal.ITIMER_REAL, left and max(1e-3, left - (time.monotonic() - begun)))
        signal.signal(signal.SIGALRM, before)
