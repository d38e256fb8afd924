"""The append-only event log of a job: what the ledger, the report and the metrics are folded from.

    event = {v, t_wall, t_mono, job, run, attempt, generation, node, rank, step, name, data}

Object stores cannot append, so each process writes segments of its own. Names are free; the ones that the ledger reads
are constants here, with the data they carry.
"""

from __future__ import annotations

import json
import math
import secrets
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from infra.errors import StoreError
from infra.layout import event_key
from infra.segments import read_segments
from infra.store import Store

VERSION = 1

# Written by the lead agent. started: parent (commit key or null), parent_step, nodes, processes_per_node.
# ended: reason (an EndReason, or the Outcome of a planned end), culprit (text), user_code (bool).
GENERATION_STARTED = "generation_started"
GENERATION_ENDED = "generation_ended"
# Written by each node's agent: what is paid for. started: ranks (list), host, and of the machine what is known of it
# (`infra.instance`): instance_id, instance_type, zone, zone_id, market, uptime_seconds, identified_by.
# ended: seconds (since started), reason.
NODE_STARTED = "node_started"
NODE_HEARTBEAT = "node_heartbeat"  # seconds (since started)
NODE_ENDED = "node_ended"
# Written by each rank. phase: class (a ledger class), seconds. step: loss, tokens (the batch's weight, whatever it
# counts), seconds ({ledger class: seconds}), on rank 0 also flops (of all ranks).
PHASE = "phase"
STEP = "step"
STAGED = "staged"  # step, bytes: a save is on its way; what came before it is put at once, to be durable as it is
COMMIT = "commit"  # step, key, bytes, seconds, stall_seconds
COMMIT_SKIPPED = "commit_skipped"  # step, reason: a save that was due was left out, by policy or for want of time
INTERVAL = "interval"  # seconds, stall_seconds, slow_down_seconds, upload_seconds, hazard_per_hour, predicted_loss
COMMIT_FAILED = "commit_failed"  # step, message
RESTORE = "restore"  # step, key, seconds, split, rejected (list of {key, reason, lost_steps, lost_usd, lost})
INITIAL_WEIGHTS = "initial_weights"  # tensors, seconds, files (list of {path, bytes, modified_unix, sha256})
PEAK = "peak"  # flops_per_second (measured, of one rank), dtype
EVALUATION = "evaluation"  # metrics {name: value}
# Written by the agent that hears of it. notice: source, action, seconds_left (null: no time was said), save_seconds
# (that are left for a save), does (leave, save, nothing), detail.
# sources: watched (list), absent ({source: why}), or problem (text).
NOTICE = "notice"
NOTICE_SOURCES = "notice_sources"
FAULT_INJECTED = "fault_injected"  # kind, target, step
# What a guard did, told by the rank that saw it, or by rank 0 where all did. action (`GuardAction`), reason (text);
# skip: samples ([first, end)); rewind: limit (the newest commit to go back to), first_sample, samples; split:
# accumulation (micro-batches per step); slow_rank, data_bound: rank, share; diverged: ranks.
GUARD = "guard"
FAULT_DETECTED = "fault_detected"  # culprit (text)
# Written by the flow's steps, or by rank 0 where there is no flow.
CONFIGURED = "configured"  # settings (list of {key, value, source}, one for each key of the configuration)
PREFLIGHT = "preflight"  # results (list)
# prepared: fingerprint, weight_unit, and of text train_tokens, held_out_tokens, unigram_entropy_nats, files, bytes …
PREPARED = "prepared"
PLAN = "plan"  # the plan as JSON
BUDGET = "budget"  # threshold (share of the budget), spent_usd, budget_usd, reserve_usd
# prices: pools (list of {instance_type, market, region, zone, kind, changes: [[Unix time, "dollars per hour"], …]})
PRICES = "prices"
OUTCOME = "outcome"  # outcome, step, weights_sha256, message

_LOCAL_FLUSH_SECONDS = 2.0
_REMOTE_FLUSH_SECONDS = 10.0  # each put of an object store is a request to be paid for
_DURABLE_DEADLINE_SECONDS = 10.0
_CLOSE_DEADLINE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0


class EndReason(StrEnum):
    """Why a generation or a node's part of it ended; one that ended as planned has an `Outcome` instead."""

    RANK_FAILED = "rank_failed"
    RANK_KILLED = "rank_killed"
    NODE_LOST = "node_lost"
    HANG = "hang"
    ROLL_CALL = "roll_call"
    AGENT_STOPPED = "agent_stopped"
    SUPERSEDED = "superseded"
    STORE = "store"
    REWIND = "rewind"  # a guard went back to an older commit
    SPLIT = "split"  # a micro-batch did not fit into memory
    RENEWAL = "renewal"  # memory grew: processes were replaced before it ran out


class GuardAction(StrEnum):
    """What a guard can do. `training.guards.orders` hands rewind and split to the next start of the gang."""

    SKIP = "skip"
    REWIND = "rewind"
    SPLIT = "split"
    RENEW = "renew"
    SLOW_RANK = "slow_rank"
    DATA_BOUND = "data_bound"
    DIVERGED = "diverged"


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
        """One line of strict JSON: a number that is not finite becomes null. Raises TypeError for foreign objects."""
        try:
            return json.dumps(self.__dict__, separators=(",", ":"), allow_nan=False)
        except ValueError:  # rare, so that only these events pay for the walk
            return json.dumps(_finite(self.__dict__), separators=(",", ":"), allow_nan=False)


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
        self._segment = 0
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
        pause = _FIRST_PAUSE_SECONDS
        while (batch := self._next_batch()) is not None:
            try:
                self._put(batch)
                pause = _FIRST_PAUSE_SECONDS
            except BaseException as error:  # whatever it was, the lines are still there and the next try may do
                with self._changed:
                    self._error = error
                    self._changed.wait_for(lambda: self._given_up, pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _next_batch(self) -> list[str] | None:
        """What to put next, after waiting until it is time to; None when the log is closed and all is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._wanted > self._durable, self._flush_seconds)
            done = self._given_up or (self._closed and not self._lines)
            return None if done else list(self._lines)

    def _put(self, batch: list[str]) -> None:
        """A put that failed may have arrived all the same: the next try writes the same key, so nothing is doubled."""
        if not batch:
            return
        segment = f"{self._segment:06d}.{self._writer}"
        key = event_key(self.origin.generation, self.origin.node, self.origin.writer, segment)
        self._store.put(key, ("\n".join(batch) + "\n").encode())
        with self._changed:
            self._segment += 1
            del self._lines[: len(batch)]
            self._durable += len(batch)
            self._error = None
            self._changed.notify_all()


def read_events(job_store: Store) -> list[Event]:
    """All events of a job, by wall time. A torn last line, which a local crash can leave, is passed over."""
    events = [event for segment in read_segments(job_store) for event in _parse(segment)]
    return sorted(events, key=lambda event: (event.t_wall, event.t_mono))


def _parse(segment: bytes) -> Iterable[Event]:
    for line in segment.splitlines():
        try:
            yield Event.from_json(line)
        except (ValueError, TypeError):
            continue


def _finite(value: Any) -> Any:
    """The same with None for each float that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _complain(text: str) -> None:
    print(f"events: WARNING: {text}", file=sys.stderr, flush=True)
