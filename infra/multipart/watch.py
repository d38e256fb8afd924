"""Ends what has not ended by its time. One thread for all: starting one for each request waits for a busy machine."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watch:
    """Thread-safe. Its thread is started when there is something to watch, and ends when there is nothing left."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int]] = []  # time.monotonic() and number
        self._actions: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, seconds: float, action: Callable[[], None]) -> Iterator[None]:
        """Call `action` if the block has not ended within `seconds`; never after it. action: short, does not raise."""
        number = next(self._numbers)
        due = (time.monotonic() + seconds, number)
        with self._changed:
            self._actions[number] = action
            heapq.heappush(self._due, due)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
                self._thread.start()
            elif self._due[0] is due:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._actions.pop(number, None)

    def _run(self) -> None:
        with self._changed:
            while True:
                while self._due and self._due[0][1] not in self._actions:
                    heapq.heappop(self._due)
                if not self._due:
                    self._thread = None
                    return
                due, number = self._due[0]
                left = due - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                else:
                    self._actions.pop(number)()
