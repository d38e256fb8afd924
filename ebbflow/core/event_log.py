"""Writer of the event log: a thread that writes a process's events to the store in batches."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, cast

from ebbflow.core.errors import StoreError
from ebbflow.core.events import STAGED, Event, Origin
from ebbflow.core.layout import event_key
from ebbflow.core.retry import backoff_pauses
from ebbflow.core.segments import seal_segment
from ebbflow.core.store import Store

_LOCAL_FLUSH_SECONDS = 2.0
_REMOTE_FLUSH_SECONDS = 10.0  # each put to an object store is billed
_DURABLE_DEADLINE_SECONDS = 10.0
_CLOSE_DEADLINE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0


class EventLog:
    """Buffer of a process's events, which a background thread writes to the job's store.

    The thread writes an event at most `flush_seconds` after it was emitted: by default 2 s for a
    local folder and 10 s for a remote store. While the store is unavailable, events stay in memory
    and the thread retries. Only `emit(..., flush=True)`, `flush` and `close` wait for the store,
    each within a deadline.
    """

    def __init__(
        self, job_store: Store, origin: Origin, *, flush_seconds: float | None = None
    ) -> None:
        self._store = job_store
        self.origin = origin
        if flush_seconds is None:
            if job_store.local_path("events") is None:
                flush_seconds = _REMOTE_FLUSH_SECONDS
            else:
                flush_seconds = _LOCAL_FLUSH_SECONDS
        self._flush_seconds = flush_seconds
        self._changed = threading.Condition()  # guards the fields below
        self._lines: list[str] = []  # events that are emitted, but not yet durable
        # Numbers of events; wanted: to be written at once
        self._emitted = self._durable = self._wanted = 0
        self._error: BaseException | None = None  # error of the last failed write
        self._closed = self._given_up = False
        self._complete = False  # whether the last segment is durable
        self._segment = 0
        # Being put; retried unchanged, because a failed put may arrive late
        self._unanswered: _Sealed | None = None
        self._writer = secrets.token_hex(3)  # unique, so that two processes never share a segment
        self._thread = threading.Thread(target=self._put_forever, name="events", daemon=True)
        self._thread.start()

    def emit(
        self,
        name: str,
        *,
        step: int | str | None = None,
        flush: bool = False,
        at: tuple[float, float] | None = None,
        **data: Any,
    ) -> Event:
        """Append an event to the log; with `flush`, also wait until it is durable.

        step: training step, or the name of a step of the flow.
        at: (Unix time, monotonic time) of an event in the past; None for now.

        Raises:
            StoreError: with `flush`, the event was not durable within 10 s. It stays in memory and
                is retried.
            TypeError: the data cannot be written as JSON.
        """
        shared = {key: value for key, value in vars(self.origin).items() if key != "process"}
        t_wall, t_mono = at or (time.time(), time.monotonic())
        number = cast(int | None, step)  # a flow step has its name in this field
        event = Event(name=name, step=number, t_wall=t_wall, t_mono=t_mono, data=data, **shared)
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
        """Wait until all emitted events are durable.

        At the deadline, raise StoreError but keep the events.
        """
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
        """Write the remaining events within the deadline; print a warning if events are lost.

        Never raises.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._wanted = self._emitted
            self._changed.notify_all()
        self._thread.join(deadline_seconds)
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
            if lost := self._emitted - self._durable:
                cause = self._error or "the store has not answered yet"
                _complain(
                    f"{lost} events lost, {self._store.uri} took none within "
                    f"{deadline_seconds:g} s: {cause}"
                )

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _put_forever(self) -> None:
        pauses = backoff_pauses(
            first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS
        )
        while (sealed := self._next_segment()) is not None:
            try:
                self._put(sealed)
                pauses = backoff_pauses(
                    first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS
                )
            except BaseException as error:  # the lines are kept, and a retry may succeed
                with self._changed:
                    self._error = error
                    self._changed.wait_for(lambda: self._given_up, next(pauses))

    def _next_segment(self) -> _Sealed | None:
        """Wait for the next segment (a batch of events) to write, and return it.

        Returns None if all events of a closed log are written, or `close` has reached its deadline.
        """
        with self._changed:
            while not (self._given_up or self._complete):
                self._changed.wait_for(
                    lambda: self._closed or self._wanted > self._durable, self._flush_seconds
                )
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
        self._store.put(sealed.key, sealed.content)
        with self._changed:
            self._unanswered = None
            self._segment += 1
            del self._lines[: sealed.count]
            self._durable += sealed.count
            self._complete = sealed.last
            self._error = None
            self._changed.notify_all()


@dataclass(frozen=True)
class _Sealed:
    """A segment (an object with several events) that is complete and ready to be written to the
    store.
    """

    key: str  # key of the object
    content: bytes  # bytes of the object
    count: int  # number of events
    last: bool  # whether no segment follows, because the log was closed


def _complain(text: str) -> None:
    print(f"events: WARNING: {text}", file=sys.stderr, flush=True)
