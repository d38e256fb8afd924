"""Remarks of a rank: messages about a problem that training survived, such as a dead data worker.

A remark is printed, and it is in the job's report and on its live page.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from ebbflow.core.events import NOTICE

Emit = Callable[..., object]

_lock = threading.Lock()
_emit: Emit | None = None  # of this process's event log, while it is open


def remark(text: str) -> None:
    """Print a remark, and record it as an event if this process has an event log.

    May be called from any thread.
    """
    print(text, flush=True)
    with _lock:
        if _emit is not None:
            _emit(NOTICE, message=text)


@contextlib.contextmanager
def record_remarks(emit: Emit) -> Iterator[None]:
    """Record remarks of this process with `emit` while the context is active."""
    global _emit
    with _lock:
        before = _emit
        _emit = emit
    try:
        yield
    finally:
        with _lock:
            _emit = before
