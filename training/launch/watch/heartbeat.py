"""A rank's sign of life: a few bytes of shared memory that its agent reads without asking.

It carries progress (step and phase), not mere liveness: a frozen rank still exists. One beat costs about a microsecond.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

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
class Beat:
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

    def read(self) -> Beat:
        record = self._record
        number = record[_PHASE]
        number = number if 0 <= number < len(PHASES) else 0  # the rank's memory may be overwritten by its own code
        return Beat(record[_PID], record[_STEP], PHASES[number], record[_NANOSECONDS] / 1e9, record[_ENTERED + number])
