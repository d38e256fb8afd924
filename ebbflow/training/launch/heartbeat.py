"""Heartbeats, which a rank writes to shared memory to show its progress, and the hang thresholds of
its phases.

A heartbeat contains the rank's step and phase, because a frozen process still exists but makes no
progress. Writing a heartbeat takes about 1 µs.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import math
import mmap
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ebbflow.core.config.schema import RunConfig

DUMP_SIGNAL = signal.SIGRTMIN + 3  # SIGUSR1 and SIGUSR2 belong to schedulers and to users
PHASES = (
    "init",
    "restore",
    "compile",
    "data",
    "forward",
    "backward",
    "optimizer",
    "checkpoint",
    "store",
    "evaluation",
    "done",
    "profile",
)
# These phases interrupt another one, which continues afterwards
_INTERLUDES = frozenset({"compile", "profile", "store"})
_PHASE_NUMBER = {name: number for number, name in enumerate(PHASES)}
_PID, _STEP, _PHASE, _NANOSECONDS, _ENTERED = range(5)
_TRAINED = _ENTERED + len(PHASES)
_FIELDS = _TRAINED + 1
# A user's script may patch `time`, also in all modules (freezegun); a partial is left alone
_monotonic_ns = functools.partial(time.monotonic_ns)

_PR_SET_PTRACER = 0x59616D61  # <linux/prctl.h>
# Endings of files beside a rank's heartbeat
STACKS = ".stacks"  # faulthandler's output
RECORDER = ".recorder"  # the flight recorder's socket
RECORDS = ".records.json"  # the flight recorder's last content

MINIMUM_SECONDS = 3.0
_FIRST_SECONDS = 5.0  # suspicion threshold of the phases of a first step, which have no history
FACTOR = 10.0  # hang threshold, relative to the p99 of the phase's duration
_START_MARGIN_SECONDS = 10.0
# A rank stops waiting for its uploader some seconds after the save's deadline
_STORE_MARGIN_SECONDS = 10.0
_START_PHASES = frozenset({"init", "restore"})
PROFILE_PHASE = "profile"
# In these phases a rank waits for the store, and all others wait for it in a collective
STORE_PHASES = frozenset({"store", PROFILE_PHASE})
_STEP_PHASES = frozenset({"data", "forward", "backward", "optimizer"})
_BASE = 2**0.25
_SHORTEST_SECONDS = 1e-3
_ENOUGH = 20
_BUCKETS = 96  # up to 1.4e4 s


@dataclass(frozen=True)
class HeartbeatReading:
    pid: int
    step: int
    phase: str
    t_mono: float  # time.monotonic() of the heartbeat
    # How often this phase has begun, not counting continuations after an interlude
    entered: int = 0
    trained: int = 0  # last completed step, as in `step` events


class Heartbeat:
    """Heartbeat of a rank in shared memory.

    The agent creates the file, and the rank writes to it without a lock.

    Each field is one aligned 8-byte integer, which is written atomically: a reader may see fields
    of two heartbeats, but never a part of a number. (`struct.pack_into` would clear the buffer
    first, so a reader could see zeros.)
    """

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._record = memoryview(mmap.mmap(file.fileno(), _FIELDS * 8)).cast("q")
        self._interrupted = ""  # phase that continues after the current interlude

    @classmethod
    def create(cls, path: Path) -> Heartbeat:
        path.write_bytes(bytes(_FIELDS * 8))
        heartbeat = cls(path)
        heartbeat._record[_NANOSECONDS] = _monotonic_ns()
        return heartbeat

    def beat(self, step: int, phase: str) -> None:
        record = self._record
        number = _PHASE_NUMBER[phase]
        last = PHASES[record[_PHASE]]
        goes_on = last in _INTERLUDES and phase == self._interrupted
        if phase in _INTERLUDES and last not in _INTERLUDES:
            self._interrupted = last
        record[_PID] = os.getpid()
        record[_STEP] = step
        record[_PHASE] = number
        if not goes_on:
            record[_ENTERED + number] += 1
        record[_NANOSECONDS] = _monotonic_ns()

    def mark_trained(self, step: int) -> None:
        self._record[_TRAINED] = step

    def read(self) -> HeartbeatReading:
        record = self._record
        if 0 <= record[_PHASE] < len(PHASES):
            number = record[_PHASE]
        else:
            number = 0  # user code has overwritten the record
        at = record[_NANOSECONDS] / 1e9
        entered = record[_ENTERED + number]
        trained = record[_TRAINED]
        return HeartbeatReading(record[_PID], record[_STEP], PHASES[number], at, entered, trained)


class WatchHooks:
    """Hooks in a rank that give evidence to its agent: stacks after a signal, and the flight
    recorder over a socket.
    """

    def __init__(self, heartbeat: Path, agent_pid: int | None) -> None:
        self._heartbeat = heartbeat
        if sys.platform.startswith("linux") and agent_pid is not None:
            # With Yama only ancestors may trace a process, but py-spy is a child of the agent.
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, agent_pid, 0, 0, 0)
        self._stacks = open(heartbeat.with_suffix(STACKS), "w")  # noqa: SIM115
        faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True)
        self._server = self._serve_recorder()

    def save_records(self) -> None:
        """Save the flight recorder's content to a file, for use after the process has ended.

        Never raises.
        """
        with contextlib.suppress(Exception):
            from torch._C import _distributed_c10d as recorders

            # A build without NCCL lacks the first
            for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
                dump = getattr(recorders, name, None)
                if dump is None:
                    raw = b""
                else:
                    raw = dump(includeCollectives=True, onlyActive=False)
                if b'"entries"' in raw:
                    self._heartbeat.with_suffix(RECORDS).write_bytes(raw)
                    return

    def _serve_recorder(self) -> object | None:
        """Start torch's private debug server, which runs in C++ threads.

        Return None if torch has no such server.
        """
        try:
            from torch._C._distributed_c10d import _WorkerServer

            path = self._heartbeat.with_suffix(RECORDER)
            path.unlink(missing_ok=True)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                return _WorkerServer(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
        except Exception:
            return None


class DurationHistogram:
    """Histogram of durations.

    Bucket k has an upper bound of 1 ms × 2^(k/4), so a quantile is at most 19 % too high.
    """

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._total = 0

    def add(self, seconds: float) -> None:
        bucket = math.ceil(math.log(max(seconds, _SHORTEST_SECONDS) / _SHORTEST_SECONDS, _BASE))
        self._counts[min(max(bucket, 0), _BUCKETS - 1)] += 1
        self._total += 1

    def quantile(self, share: float) -> float:
        """Return the `share` quantile of all durations in seconds, rounded up to the upper bound of
        a bucket.

        If there are at least 20 durations, the longest one does not count, so that one stall early
        in a run does not raise the hang threshold.
        """
        wanted = share * self._total
        seen = 0
        if self._total >= _ENOUGH:
            wanted = min(wanted, self._total - 1)
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return _SHORTEST_SECONDS * _BASE**bucket
        return 0.0


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    floor_seconds: float  # lower bound of every learned hang threshold
    start_seconds: float  # hang threshold of the phases init and restore
    store_seconds: float  # hang threshold of the phase store, a wait until a save is durable
    longest_seconds: (
        float  # upper bound of a learned threshold; threshold of a phase that has not ended once
    )

    @classmethod
    def from_config(cls, config: RunConfig) -> HangLimits:
        """Compute the hang limits from the configuration.

        The limits include a margin, so that ranks that wait for a missing rank can report it before
        their agent ends them.
        """
        cluster = config.cluster
        return cls(
            floor_seconds=config.survival.hang_floor_seconds,
            start_seconds=cluster.start_deadline_seconds + _START_MARGIN_SECONDS,
            store_seconds=config.checkpoint.deadline_seconds + _STORE_MARGIN_SECONDS,
            longest_seconds=cluster.step_deadline_seconds,
        )


class PhaseThresholds:
    """Hang thresholds of one rank, learned from the heartbeats that the agent reads at intervals.

    A phase that begins and ends between two reads is not measured. Only short phases are omitted in
    this way, so the learned p99 may be too high, but is hardly ever too low.
    """

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._seen: dict[str, DurationHistogram] = {}
        self._beat: HeartbeatReading | None = None
        self._looked = 0.0
        self._first_step: int | None = None

    def observe(self, beat: HeartbeatReading, now: float) -> None:
        """Learn the duration of a phase from a heartbeat.

        `now` is the time.monotonic() at which it was read.
        """
        last = self._beat
        looked = self._looked
        self._beat = beat
        self._looked = now
        if beat.phase in _STEP_PHASES and self._first_step is None:
            self._first_step = beat.step
        if last is None or last.t_mono == beat.t_mono:
            return
        # Compilation in an evaluation is a phase of its own
        if self._is_first(last) and last.phase != "evaluation":
            return
        # If this read is late, several phases may have ended since the last one: count only the
        # time up to that one.
        seconds = min(beat.t_mono - last.t_mono, looked - last.t_mono + 0.1)
        self._seen.setdefault(last.phase, DurationHistogram()).add(seconds)

    def suspicion_threshold(self, beat: HeartbeatReading) -> float:
        """Return the seconds without progress after which the agent collects evidence: 10 × p99, at
        least 3 s.

        The p99 is that of the phase's earlier durations. Start-up, store requests and the first
        step, first save and first evaluation have fixed thresholds instead; that of the first step
        is 5 s.
        """
        if beat.phase in _STEP_PHASES and self._is_first(beat):
            return min(_FIRST_SECONDS, self._limits.longest_seconds)
        own = self._fixed_limit(beat)
        if own is not None:
            return own
        seen = self._seen.get(beat.phase)
        return min(
            max(FACTOR * seen.quantile(0.99) if seen else 0.0, MINIMUM_SECONDS),
            self._limits.longest_seconds,
        )

    def hang_threshold(self, beat: HeartbeatReading) -> float:
        own = self._fixed_limit(beat)
        if own is not None:
            return own
        return min(
            max(self.suspicion_threshold(beat), self._limits.floor_seconds),
            self._limits.longest_seconds,
        )

    def _fixed_limit(self, beat: HeartbeatReading) -> float | None:
        if beat.phase in _START_PHASES:
            return self._limits.start_seconds
        if beat.phase in STORE_PHASES:
            return self._limits.store_seconds
        if self._is_first(beat):
            return self._limits.longest_seconds
        return None

    def _is_first(self, beat: HeartbeatReading) -> bool:
        """Return whether this is the rank's first step, save or evaluation.

        The first takes longer than later ones.
        """
        if beat.phase in _STEP_PHASES:
            return self._first_step is None or beat.step <= self._first_step
        return beat.entered <= 1 or beat.phase in ("compile", "done")
