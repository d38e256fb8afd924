"""A rank's own part in being watched: it lets its agent look, and answers when it is asked. No Python runs for that."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import sys
from pathlib import Path

from training.launch.watch.stacks import DUMP_SIGNAL

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
