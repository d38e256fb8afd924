"""Heartbeats: a rank's progress in shared memory, and how long a rank may stay in one phase.

It carries progress (step and phase), not mere liveness: a frozen rank still exists. One beat costs about a microsecond.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import mmap
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ebbflow.infra.config.schema import RunConfig

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
)
_INTERLUDES = frozenset({"compile", "store"})  # in the midst of other phases, which go on after them
_PHASE_NUMBER = {name: number for number, name in enumerate(PHASES)}
_PID, _STEP, _PHASE, _NANOSECONDS, _ENTERED = range(5)
_FIELDS = _ENTERED + len(PHASES)


@dataclass(frozen=True)
class HeartbeatReading:
    """The last beat: t_mono is the monotonic clock of this machine, in seconds. entered: how often that phase
    was begun; compilation and a wait for the store in its midst do not begin it anew."""

    pid: int
    step: int
    phase: str
    t_mono: float
    entered: int = 0


class Heartbeat:
    """Created by the agent, opened by the worker: one writer, one reader, no lock.

    Aligned 8-byte integers, each stored whole: a reader may see a mix of two neighbouring beats, never half a number.
    (`struct.pack_into` would not do: it clears the buffer first, and a reader that comes then sees zeros.)
    """

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._record = memoryview(mmap.mmap(file.fileno(), _FIELDS * 8)).cast("q")
        self._interrupted = ""  # the phase that goes on after the present interlude

    @classmethod
    def create(cls, path: Path) -> Heartbeat:
        path.write_bytes(bytes(_FIELDS * 8))
        heartbeat = cls(path)
        heartbeat._record[_NANOSECONDS] = time.monotonic_ns()
        return heartbeat

    def beat(self, step: int, phase: str) -> None:
        record, number = self._record, _PHASE_NUMBER[phase]
        last = PHASES[record[_PHASE]]
        goes_on = last in _INTERLUDES and phase == self._interrupted
        if phase in _INTERLUDES and last not in _INTERLUDES:
            self._interrupted = last
        record[_PID] = os.getpid()
        record[_STEP] = step
        record[_PHASE] = number
        if not goes_on:
            record[_ENTERED + number] += 1
        record[_NANOSECONDS] = time.monotonic_ns()

    def read(self) -> HeartbeatReading:
        record = self._record
        number = record[_PHASE]
        number = number if 0 <= number < len(PHASES) else 0  # the rank's memory may be overwritten by its own code
        return HeartbeatReading(
            record[_PID], record[_STEP], PHASES[number], record[_NANOSECONDS] / 1e9, record[_ENTERED + number]
        )


_PR_SET_PTRACER = 0x59616D61  # <linux/prctl.h>


def stacks_path(heartbeat: Path) -> Path:
    """Where a rank's faulthandler writes; beside its heartbeat, as are the others."""
    return heartbeat.with_suffix(".stacks")


def recorder_socket_path(heartbeat: Path) -> Path:
    """The socket at which its flight recorder answers."""
    return heartbeat.with_suffix(".recorder")


def records_path(heartbeat: Path) -> Path:
    """What the flight recorder held when the rank ended in an exception."""
    return heartbeat.with_suffix(".records.json")


class WatchHooks:
    """Of a worker that has an agent; kept for as long as the rank lives."""

    def __init__(self, heartbeat: Path, agent_pid: int | None) -> None:
        self._heartbeat = heartbeat
        if sys.platform.startswith("linux") and agent_pid is not None:
            # Where the kernel lets only ancestors trace (Yama), py-spy is the agent's child and not ours.
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, agent_pid, 0, 0, 0)
        self._stacks = open(stacks_path(heartbeat), "w")  # noqa: SIM115
        faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True)
        self._server = self._serve_recorder()

    def save_records(self) -> None:
        """After an exception: what an agent may want to compare, since nobody can be asked once the process is gone."""
        with contextlib.suppress(Exception):
            from torch._C._distributed_c10d import _dump_fr_trace_json

            records_path(self._heartbeat).write_bytes(_dump_fr_trace_json(includeCollectives=True, onlyActive=False))

    def _serve_recorder(self) -> object | None:
        """torch's own handlers, in C++ threads: private to torch, so that a version without them is watched without."""
        try:
            from torch._C._distributed_c10d import _WorkerServer

            door = recorder_socket_path(self._heartbeat)
            door.unlink(missing_ok=True)
            folder = os.open(door.parent, os.O_RDONLY)
            try:
                return _WorkerServer(f"/proc/self/fd/{folder}/{door.name}")
            finally:
                os.close(folder)
        except Exception:
            return None


MINIMUM_SECONDS = 3.0
FACTOR = 10.0  # of the p99 of a phase
_START_MARGIN_SECONDS = 10.0
_STORE_MARGIN_SECONDS = 10.0  # a rank gives its own uploader up some seconds after the save's deadline
_START_PHASES = frozenset({"init", "restore"})
STORE_PHASE = "store"
_STEP_PHASES = frozenset({"data", "forward", "backward", "optimizer"})
_BASE = 2**0.25
_SHORTEST_SECONDS = 1e-3
_ENOUGH = 20
_BUCKETS = 96  # up to 1.4e4 s


class DurationHistogram:
    """Streaming quantiles in 96 counters: bucket k holds durations up to 1 ms × 2^(k/4), so that they are at most 19 %
    too high, and never too low."""

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._total = 0

    def add(self, seconds: float) -> None:
        bucket = math.ceil(math.log(max(seconds, _SHORTEST_SECONDS) / _SHORTEST_SECONDS, _BASE))
        self._counts[min(max(bucket, 0), _BUCKETS - 1)] += 1
        self._total += 1

    def quantile(self, share: float) -> float:
        """Upper end of the bucket that holds it, in seconds; 0 while nothing was seen.

        Of 20 and more the longest one is always left out: a single stall of a young run is no habit.
        """
        wanted, seen = share * self._total, 0
        if self._total >= _ENOUGH:
            wanted = min(wanted, self._total - 1)
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return _SHORTEST_SECONDS * _BASE**bucket
        return 0.0


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """floor_seconds: what is only slow is left alone for so long. start_seconds: for init and restore. store_seconds:
    for a save to be durable, where a rank waits for that.

    longest_seconds: no phase is given more, and one that was never seen to end is given this.
    """

    floor_seconds: float
    start_seconds: float
    store_seconds: float
    longest_seconds: float

    @classmethod
    def of(cls, config: RunConfig) -> HangLimits:
        """The ranks have the start's deadline to find each other, and name the missing; an agent speaks after them."""
        cluster = config.cluster
        return cls(
            floor_seconds=config.survival.hang_floor_seconds,
            start_seconds=cluster.start_deadline_seconds + _START_MARGIN_SECONDS,
            store_seconds=config.checkpoint.deadline_seconds + _STORE_MARGIN_SECONDS,
            longest_seconds=cluster.step_deadline_seconds,
        )


class PhaseThresholds:
    """Learns from the beats of one rank, as its agent sees them every few hundredths of a second.

    A phase that ends between two looks was shorter than their distance, and only the heartbeat's own count tells that
    it ever was; what is seen of the others is their length to within that distance. So p99 is of the phases that were
    seen, longer ones first: too high rather than too low.
    """

    def __init__(self, deadlines: HangLimits) -> None:
        self._deadlines = deadlines
        self._seen: dict[str, DurationHistogram] = {}
        self._beat: HeartbeatReading | None = None
        self._looked = 0.0
        self._first_step: int | None = None

    def observe(self, beat: HeartbeatReading, now: float) -> None:
        """now: time.monotonic() of this look."""
        last, looked = self._beat, self._looked
        self._beat, self._looked = beat, now
        if beat.phase in _STEP_PHASES and self._first_step is None:
            self._first_step = beat.step
        if last is None or last.t_mono == beat.t_mono:
            return
        if self._is_first(last) and last.phase != "evaluation":  # what it compiles is a phase of its own: all are alike
            return
        # After a look that came late, several phases may have ended: what was certain before counts.
        seconds = min(beat.t_mono - last.t_mono, looked - last.t_mono + 0.1)
        self._seen.setdefault(last.phase, DurationHistogram()).add(seconds)

    def suspicion_threshold(self, beat: HeartbeatReading) -> float:
        """Longer than this in its phase is remarkable: 10 × p99, at least 3 s. What was never seen to end has time."""
        if (own := self._own_deadline(beat)) is not None:
            return own
        if self._is_first(beat):
            return self._deadlines.longest_seconds
        seen = self._seen.get(beat.phase)
        return min(max(FACTOR * seen.quantile(0.99) if seen else 0.0, MINIMUM_SECONDS), self._deadlines.longest_seconds)

    def limit(self, beat: HeartbeatReading) -> float:
        """When a rank without progress is given up: the same, and never below the floor."""
        if (own := self._own_deadline(beat)) is not None:
            return own
        return min(max(self.suspicion_threshold(beat), self._deadlines.floor_seconds), self._deadlines.longest_seconds)

    def _own_deadline(self, beat: HeartbeatReading) -> float | None:
        """Of phases whose length says nothing of the rank, but of the others or of the store."""
        if beat.phase in _START_PHASES:
            return self._deadlines.start_seconds
        return self._deadlines.store_seconds if beat.phase == STORE_PHASE else None

    def _is_first(self, beat: HeartbeatReading) -> bool:
        """The first step compiles, allocates and connects; so do the first save and the first evaluation."""
        if beat.phase in _STEP_PHASES:
            return self._first_step is None or beat.step <= self._first_step
        return beat.entered <= 1 or beat.phase in ("compile", "done")
