"""A rank's own part in hang detection: its heartbeat in shared memory, and the hooks through which its agent looks.

It carries progress (step and phase), not mere liveness: a frozen rank still exists. One beat costs about a microsecond.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ebbflow.training.launch.watch.stacks import DUMP_SIGNAL

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


_PR_SET_PTRACER = 0x59616D61  # <linux/prctl.h>


def stacks_path(heartbeat: Path) -> Path:
    """Where a rank's faulthandler writes; beside its heartbeat, as are the others."""
    return heartbeat.with_suffix(".stacks")


def recorder_door(heartbeat: Path) -> Path:
    """The socket at which its flight recorder answers."""
    return heartbeat.with_suffix(".recorder")


def records_path(heartbeat: Path) -> Path:
    """What the flight recorder held when the rank ended in an exception."""
    return heartbeat.with_suffix(".records.json")


class Observed:
    """Of a worker that has an agent; kept for as long as the rank lives."""

    def __init__(self, heartbeat: Path, agent_pid: int | None) -> None:
        self._heartbeat = heartbeat
        if sys.platform.startswith("linux") and agent_pid is not None:
            # Where the kernel lets only ancestors trace (Yama), py-spy is the agent's child and not ours.
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, agent_pid, 0, 0, 0)
        self._stacks = open(stacks_path(heartbeat), "w")  # noqa: SIM115
        faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True)
        self._server = self._serve_recorder()

    def keep_records(self) -> None:
        """After an exception: what an agent may want to compare, since nobody can be asked once the process is gone."""
        with contextlib.suppress(Exception):
            from torch._C._distributed_c10d import _dump_fr_trace_json

            records_path(self._heartbeat).write_bytes(_dump_fr_trace_json(includeCollectives=True, onlyActive=False))

    def _serve_recorder(self) -> object | None:
        """torch's own handlers, in C++ threads: private to torch, so that a version without them is watched without."""
        try:
            from torch._C._distributed_c10d import _WorkerServer

            door = recorder_door(self._heartbeat)
            door.unlink(missing_ok=True)
            folder = os.open(door.parent, os.O_RDONLY)
            try:
                return _WorkerServer(f"/proc/self/fd/{folder}/{door.name}")
            finally:
                os.close(folder)
        except Exception:
            return None
