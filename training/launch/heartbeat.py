"""A rank's sign of life: a few bytes of shared memory that its agent reads without asking.

It carries progress (step and phase), not mere liveness: a frozen rank still exists. One beat costs about a microsecond.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

PHASES = ("init", "data", "forward", "backward", "optimizer", "checkpoint", "evaluation", "restore", "done")
_RECORD = struct.Struct("<qqqd")  # pid, step, phase, monotonic seconds
_PHASE_NUMBER = {name: number for number, name in enumerate(PHASES)}


@dataclass(frozen=True)
class Beat:
    """The last beat: t_mono is the monotonic clock of this machine, in seconds."""

    pid: int
    step: int
    phase: str
    t_mono: float


class Heartbeat:
    """Created by the agent, opened by the worker: one writer, one reader, no lock.

    A beat is four aligned 8-byte stores; a reader may see a mix of two neighbouring beats, never a torn number.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _RECORD.size)

    @classmethod
    def create(cls, path: Path) -> Heartbeat:
        path.write_bytes(_RECORD.pack(0, 0, 0, time.monotonic()))
        return cls(path)

    def beat(self, step: int, phase: str) -> None:
        _RECORD.pack_into(self._memory, 0, os.getpid(), step, _PHASE_NUMBER[phase], time.monotonic())

    def read(self) -> Beat:
        pid, step, phase, t_mono = _RECORD.unpack_from(self._memory, 0)
        return Beat(pid, step, PHASES[phase], t_mono)

    def close(self) -> None:
        self._memory.close()
