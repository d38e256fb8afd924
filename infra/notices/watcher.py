"""One thread per node that watches every source of notices, so that nobody else ever waits for one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

from ebbflow.infra.notices.notice import STALE_SECONDS, Notice, Source

_SILENT_POLLS = 5  # in a row, before it is said that a source has fallen silent
_LONGEST_PAUSE_SECONDS = 10.0
_SHORTEST_PAUSE_SECONDS = 0.02
_CLOSE_SECONDS = 3.0


class Watcher:
    """Polls its sources until it is closed. One that has nothing to watch is asked once, and never again.

    Requests of one source hold up the others for their deadline at most (about 2 s), and nobody but this thread.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self._notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._absent: dict[str, str] = {}
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._decided, self._looked, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._told: dict[tuple[str, str], float] = {}
        self._thread = threading.Thread(target=self._watch, name="notices", daemon=True)
        self._thread.start()

    def news(self) -> list[Notice]:
        """Notices not handed out before. One whose time became shorter by more than a second is news again, and so is
        any that follows one whose time has passed."""
        return _all(self._notices)

    def await_first_look(self, seconds: float) -> bool:
        """Whether each source has been asked once, within the time: what stood before this was made is news then."""
        return self._looked.wait(seconds)

    def problems(self) -> list[str]:
        """What keeps a source from being asked, each thing said once."""
        return _all(self._problems)

    def decided(self) -> dict[str, str] | None:
        """{source: "" where it is watched, else why not}, or None while that is not known yet (about a second)."""
        return dict(self._absent) if self._decided.is_set() else None

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_CLOSE_SECONDS)

    def _watch(self) -> None:
        self._absent = {source.name: _begun(source) for source in self._sources}
        self._decided.set()
        watched = [source for source in self._sources if not self._absent[source.name]]
        due = {source.name: 0.0 for source in watched}
        failed = {source.name: 0 for source in watched}
        if not watched:
            self._looked.set()
        while watched and not self._closed.is_set():
            for source in watched:
                if time.monotonic() >= due[source.name]:
                    failed[source.name] = 0 if self._look(source, failed[source.name]) else failed[source.name] + 1
                    pause = min(source.poll_seconds * 2 ** min(failed[source.name], 8), _LONGEST_PAUSE_SECONDS)
                    due[source.name] = time.monotonic() + pause
            self._looked.set()
            self._closed.wait(max(min(due.values()) - time.monotonic(), _SHORTEST_PAUSE_SECONDS))

    def _look(self, source: Source, failed: int) -> bool:
        try:
            found = source.look()
        except Exception as error:  # whatever it was, the thread must live: the other sources hang on it
            if failed + 1 == _SILENT_POLLS:
                self._problems.put(f"{source.name}: {_SILENT_POLLS} requests in a row failed, the last: {error}")
            return False
        for notice in found:
            key = (notice.source, notice.action)
            told = self._told.get(key)
            if told is None or notice.ends_at < told - 1.0 or told < time.monotonic() - STALE_SECONDS < notice.ends_at:
                self._told[key] = notice.ends_at
                self._notices.put(notice)
        return True


def _begun(source: Source) -> str:
    """Why there is nothing to watch, or "". One that cannot even be asked takes no other source along."""
    try:
        return source.begin()
    except Exception as error:
        return f"it cannot be watched: {error or type(error).__name__}"


def _all(waiting: queue.SimpleQueue) -> list:
    found = []
    while not waiting.empty():
        found.append(waiting.get())
    return found
