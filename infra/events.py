"""The append-only event log of a job: what the ledger, the report and the metrics are folded from.

    event = {v, t_wall, t_mono, job, run, attempt, generation, node, rank, step, name, data}

Object stores cannot append, so each process writes segments of its own. Names are free; the ones that the ledger reads
are constants here, with the data they carry.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from infra.errors import StoreError
from infra.layout import event_key
from infra.store import Store

VERSION = 1

# Written by the lead agent. started: parent (commit key or null), parent_step, nodes, processes_per_node, resumed.
# ended: reason ("completed", an outcome, "rank_died", "node_lost" ...), culprit (text), user_code (bool).
GENERATION_STARTED = "generation_started"
GENERATION_ENDED = "generation_ended"
# Written by each node's agent: what is paid for. started: ranks (list), host. ended: seconds (since started), reason.
NODE_STARTED = "node_started"
NODE_HEARTBEAT = "node_heartbeat"  # seconds (since started)
NODE_ENDED = "node_ended"
# Written by each rank. phase: class (a ledger class), seconds. step: loss, tokens, seconds ({ledger class: seconds}),
# on rank 0 also flops (of all ranks).
PHASE = "phase"
STEP = "step"
COMMIT = "commit"  # step, key, bytes, seconds
COMMIT_FAILED = "commit_failed"  # step, message
RESTORE = "restore"  # step, key, seconds, rejected (list of {key, reason})
PEAK = "peak"  # flops_per_second (measured, of one rank), dtype
EVALUATION = "evaluation"  # metrics {name: value}
NOTICE = "notice"
FAULT_INJECTED = "fault_injected"  # kind, target, step
FAULT_DETECTED = "fault_detected"  # culprit (text), seconds
# Written by the flow's steps.
PREFLIGHT = "preflight"  # results (list)
PREPARED = "prepared"  # fingerprint, train_tokens, held_out_tokens, unigram_entropy_nats, files, bytes
PLAN = "plan"  # the plan as JSON
BUDGET = "budget"  # spent_usd, budget_usd, threshold
OUTCOME = "outcome"  # outcome, step, weights_sha256, message


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the log. t_wall: Unix time; t_mono: monotonic clock of the writing machine; rank -1: no rank."""

    name: str
    job: str
    run: str
    attempt: int
    generation: int
    node: int
    rank: int
    step: int | None
    t_wall: float
    t_mono: float
    data: dict[str, Any] = field(default_factory=dict)
    v: int = VERSION

    @classmethod
    def from_json(cls, line: str | bytes) -> Event:
        return cls(**json.loads(line))

    def to_json(self) -> str:
        return json.dumps(self.__dict__, separators=(",", ":"), default=str, allow_nan=True)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Who writes: the fields that every event of a process shares. `process` names one that is no rank."""

    job: str
    run: str = ""
    attempt: int = 0
    generation: int = 0
    node: int = 0
    rank: int = -1
    process: str = "rank"

    @property
    def writer(self) -> int | str:
        return self.rank if self.rank >= 0 else self.process


class EventLog:
    """Buffers events and puts them as segments, at the latest `flush_seconds` after they were emitted.

    A store that is away costs nothing but memory: segments are kept and tried again, and `close` gives up after one
    last try. `emit(..., flush=True)` returns after the put, for events that must survive what comes next.
    """

    def __init__(self, job_store: Store, origin: Origin, *, flush_seconds: float = 2.0) -> None:
        self._store = job_store
        self.origin = origin
        self._flush_seconds = flush_seconds
        self._lines: list[str] = []
        self._segment = 0
        self._writer = secrets.token_hex(3)  # two processes never share a segment, across attempts and resumes
        self._lock = threading.Lock()
        self._put_lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._flush_forever, name="events", daemon=True)
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
        """Append one event. `at`: (Unix time, monotonic time) of something that happened before now."""
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
        with self._lock:
            self._lines.append(event.to_json())
        if flush:
            self.flush()
        return event

    def flush(self) -> None:
        """Put what is buffered. On a store error the lines are kept for the next try."""
        with self._put_lock:
            with self._lock:
                lines, self._lines = self._lines, []
            if not lines:
                return
            segment = f"{self._segment:06d}.{self._writer}"
            key = event_key(self.origin.generation, self.origin.node, self.origin.writer, segment)
            try:
                self._store.put(key, ("\n".join(lines) + "\n").encode())
                self._segment += 1
            except StoreError:
                with self._lock:
                    self._lines = lines + self._lines

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._thread.join()
        self.flush()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _flush_forever(self) -> None:
        while not self._wake.wait(self._flush_seconds):
            self.flush()


def read_events(job_store: Store) -> list[Event]:
    """All events of a job, by wall time. A torn last line, which a local crash can leave, is passed over."""
    events = [event for meta in job_store.list("events") for event in _parse(job_store.get(meta.key))]
    return sorted(events, key=lambda event: (event.t_wall, event.t_mono))


def _parse(segment: bytes) -> Iterable[Event]:
    for line in segment.splitlines():
        try:
            yield Event.from_json(line)
        except (ValueError, TypeError):
            continue
