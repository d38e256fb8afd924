"""Writing the event log: a process's events as segments, without anybody waiting for the store."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.errors import StoreError
from ebbflow.infra.events import STAGED, Event, Origin
from ebbflow.infra.layout import event_key
from ebbflow.infra.retry import Backoff
from ebbflow.infra.segments import seal_segment
from ebbflow.infra.store import Store

_LOCAL_FLUSH_SECONDS = 2.0
_REMOTE_FLUSH_SECONDS = 10.0  # each put of an object store is a request to be paid for
_DURABLE_DEADLINE_SECONDS = 10.0
_CLOSE_DEADLINE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0


@dataclass(frozen=True)
class _Sealed:
    """A segment with its seal. count: events in it; last: none follows."""

    key: str
    content: bytes
    count: int
    last: bool


class EventLog:
    """Buffers events; a thread of its own puts them as segments, at the latest `flush_seconds` after they were emitted.

    A store that is away costs nothing but memory: what was not put is kept and tried again. Nobody waits for the store
    but who asks for it: `emit(..., flush=True)` and `flush`, and `close` for its last try, each within a deadline.

    flush_seconds: None for 2 s where the store is a local folder and 10 s where it is remote.
    """

    def __init__(self, job_store: Store, origin: Origin, *, flush_seconds: float | None = None) -> None:
        self._store = job_store
        self.origin = origin
        if flush_seconds is None:
            flush_seconds = _REMOTE_FLUSH_SECONDS if job_store.local_path("events") is None else _LOCAL_FLUSH_SECONDS
        self._flush_seconds = flush_seconds
        self._changed = threading.Condition()  # guards what follows
        self._lines: list[str] = []  # emitted and not yet durable
        self._emitted = self._durable = self._wanted = 0  # events since the start; wanted: to be durable at once
        self._error: BaseException | None = None  # why the last put failed
        self._closed = self._given_up = False
        self._complete = False  # the segment that is sealed as the last one is durable
        self._segment = 0
        self._unanswered: _Sealed | None = None  # its put failed: it may arrive late, so that it is put again as it is
        self._writer = secrets.token_hex(3)  # two processes never share a segment, across attempts and resumes
        self._thread = threading.Thread(target=self._put_forever, name="events", daemon=True)
        self._thread.start()

    def emit(
        self,
        name: str,
        *,
        step: int | None = None,
        flush: bool = False,
        at: tuple[float, float] | None = None,
        **data: Any,
    ) -> Event:
        """Append one event. `at`: (Unix time, monotonic time) of something that happened before now.

        flush: return when the event is durable, for those that must survive what comes next. Raises StoreError when
        it could not be made durable within 10 s (it is kept and tried again), TypeError for data that is not JSON.
        """
        origin = self.origin
        t_wall, t_mono = at or (time.time(), time.monotonic())
        event = Event(
            name=name,
            job=origin.job,
            run=origin.run,
            attempt=origin.attempt,
            generation=origin.generation,
            node=origin.node,
            rank=origin.rank,
            step=step,
            t_wall=t_wall,
            t_mono=t_mono,
            data=data,
        )
        line = event.to_json()
        with self._changed:
            if self._closed:
                _complain(f"{name!r} was emitted after the log was closed, and is lost")
                return event
            self._lines.append(line)
            self._emitted += 1
            if name == STAGED:
                self._wanted = self._emitted
                self._changed.notify_all()
        if flush:
            self.flush()
        return event

    def flush(self, *, deadline_seconds: float = _DURABLE_DEADLINE_SECONDS) -> None:
        """Wait until all that was emitted so far is durable. Raises StoreError at the deadline; nothing is dropped."""
        with self._changed:
            target = self._emitted
            self._wanted = max(self._wanted, target)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._durable >= target, deadline_seconds):
                raise StoreError(
                    f"{self._store.uri}/events: {target - self._durable} events not durable within "
                    f"{deadline_seconds:g} s: {self._error or 'the store has not answered yet'}"
                ) from self._error

    def close(self, *, deadline_seconds: float = _CLOSE_DEADLINE_SECONDS) -> None:
        """A last try to make everything durable; what is lost is told on stderr. Never raises."""
        with self._changed:
            if self._closed:
                return
            self._closed, self._wanted = True, self._emitted
            self._changed.notify_all()
        self._thread.join(deadline_seconds)
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
            if lost := self._emitted - self._durable:
                cause = self._error or "the store has not answered yet"
                _complain(f"{lost} events lost, {self._store.uri} took none within {deadline_seconds:g} s: {cause}")

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _put_forever(self) -> None:
        """The only place that puts: a store that hangs holds up this thread and no other."""
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while (sealed := self._next_segment()) is not None:
            try:
                self._put(sealed)
                backoff.reset()
            except BaseException as error:  # whatever it was, the lines are still there and the next try may do
                with self._changed:
                    self._error = error
                    self._changed.wait_for(lambda: self._given_up, backoff.next_pause())

    def _next_segment(self) -> _Sealed | None:
        """What to put next, after waiting until it is time to; None: all is done."""
        with self._changed:
            while not (self._given_up or self._complete):
                self._changed.wait_for(lambda: self._closed or self._wanted > self._durable, self._flush_seconds)
                if self._given_up or (self._closed and not self._lines and self._segment == 0):
                    break
                if self._unanswered is None and (self._lines or self._closed):
                    self._unanswered = self._seal(list(self._lines), last=self._closed)
                if self._unanswered is not None:
                    return self._unanswered
        return None

    def _seal(self, lines: list[str], *, last: bool) -> _Sealed:
        segment = f"{self._segment:06d}.{self._writer}"
        key = event_key(self.origin.generation, self.origin.node, self.origin.writer, segment)
        return _Sealed(key, seal_segment(key, lines, last=last), len(lines), last)

    def _put(self, sealed: _Sealed) -> None:
        """A put that failed may arrive later all the same, also after the next try: equal bytes do no harm then."""
        self._store.put(sealed.key, sealed.content)
        with self._changed:
            self._unanswered = None
            self._segment += 1
            del self._lines[: sealed.count]
            self._durable += sealed.count
            self._complete = sealed.last
            self._error = None
            self._changed.notify_all()


def _complain(text: str) -> None:
    print(f"events: WARNING: {text}", file=sys.stderr, flush=True)
