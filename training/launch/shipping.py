"""Carries the JSON lines of a node's ranks to the job's store, where this machine's disk is not part of it.

A thread of its own puts segments, since object stores cannot append. Whoever adds lines never waits, and what a store
that is away does not take is kept up to a limit: of logs the oldest and the newest are worth the most, so that what
does not fit any more is left out at the end of the queue, and counted.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from ebbflow.infra.layout import log_key
from ebbflow.infra.store import Store

_INTERVAL_SECONDS = 15.0  # each put is a request to be paid for; a rank that printed nothing costs none
_CLOSE_DEADLINE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
_QUEUE_BYTES = 8 * 1024 * 1024


class LogShipper:
    """Puts `logs/<generation>/<node>-<rank>-<segment>.jsonl`. say: takes one line of notice."""

    def __init__(
        self,
        job_store: Store,
        *,
        generation: int,
        node: int,
        say: Callable[[str], object],
        interval_seconds: float = _INTERVAL_SECONDS,
        queue_bytes: int = _QUEUE_BYTES,
    ) -> None:
        self._store, self._generation, self._node, self._say = job_store, generation, node, say
        self._interval_seconds, self._queue_limit = interval_seconds, queue_bytes
        self._writer = secrets.token_hex(3)  # two agents never share a segment
        self._changed = threading.Condition()  # guards what follows
        self._pending: dict[int, list[bytes]] = {}
        self._pending_bytes = self._left_out = 0
        self._segments: dict[int, int] = {}
        self._closed = self._given_up = self._away = False
        self._thread = threading.Thread(target=self._put_forever, name="logs", daemon=True)
        self._thread.start()

    def add(self, rank: int, records: list[bytes]) -> None:
        """Keep these for the next segment. Never waits."""
        with self._changed:
            for record in records:
                if self._pending_bytes + len(record) > self._queue_limit:
                    self._left_out += 1
                    continue
                self._pending.setdefault(rank, []).append(record)
                self._pending_bytes += len(record)

    def close(self, *, deadline_seconds: float = _CLOSE_DEADLINE_SECONDS) -> None:
        """A last try to put everything; what is lost to the store is told. Never raises."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(deadline_seconds)
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
            lost = self._left_out + sum(map(len, self._pending.values()))
        if lost:
            self._say(f"logs: WARNING: {lost} lines did not reach {self._store.uri}/logs; this machine's disk has them")

    def _put_forever(self) -> None:
        """The only place that puts: a store that hangs holds up this thread and no other."""
        pause = _FIRST_PAUSE_SECONDS
        while (batch := self._next_batch()) is not None:
            try:
                for rank, records in batch.items():
                    self._put(rank, records)
                pause, self._away = _FIRST_PAUSE_SECONDS, False
            except Exception as error:  # whatever it was, the lines are still there and the next try may do
                if not self._away:
                    self._say(f"logs: WARNING: {self._store.uri} takes no logs for now, trying on: {error}")
                self._away = True
                with self._changed:
                    self._changed.wait_for(lambda: self._given_up, pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _next_batch(self) -> dict[int, list[bytes]] | None:
        with self._changed:
            if not self._away:
                self._changed.wait_for(lambda: self._closed, self._interval_seconds)
            done = self._given_up or (self._closed and not self._pending)
            return None if done else {rank: list(records) for rank, records in self._pending.items()}

    def _put(self, rank: int, records: list[bytes]) -> None:
        """A put that failed may have arrived all the same; readers know a record that they see twice."""
        number = self._segments.get(rank, 0)
        key = log_key(self._generation, self._node, rank, f"{number:06d}.{self._writer}")
        self._store.put(key, b"\n".join(records) + b"\n")
        with self._changed:
            self._segments[rank] = number + 1
            self._pending_bytes -= sum(map(len, records))
            del self._pending[rank][: len(records)]
            if not self._pending[rank]:
                del self._pending[rank]
