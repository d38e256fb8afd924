"""What a rank leaves behind: a data loader's process that is stuck in the user's own code does not hear of its end.

A rank leads a session of its own, in which its children stay unless they leave it; those that do, and were started as
a program of their own, still carry the rank's spec in their environment. (What a rank's main thread forks the kernel
ends with it: `infra.process.tie_forked_children`.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from infra.process import ProcessStat, all_processes, process_stat
from training.launch.spec import SPEC_VARIABLE

# They give back what the killed ones held (shared memory, semaphores), and leave by themselves.
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
_CLEANING_SECONDS = 1.0
_KILLED_SECONDS = 2.0


class Session:
    """Of one rank. To be made when it was just started. parents: who may have started it."""

    def __init__(self, pid: int, spec_path: Path, parents: Collection[int]) -> None:
        stat = process_stat(pid)
        # A rank that is gone already has left nobody; and a number that is not a rank's is nobody to end.
        self._leader = stat if stat is not None and stat.parent in parents else None
        self._mark = f"{SPEC_VARIABLE}={spec_path}".encode()

    def left_behind(self, living: Iterable[ProcessStat]) -> list[int]:
        """Of those living, who belongs to this rank, the rank itself left out."""
        leader = self._leader
        if leader is None:
            return []
        # The kernel does not give a number anew while a session of that number has members: whoever has it now and is
        # not the rank has a session of its own.
        now = process_stat(leader.pid)
        in_session = now is None or now.started_ticks == leader.started_ticks
        return [
            one.pid
            for one in living
            if one.pid != leader.pid
            and one.started_ticks >= leader.started_ticks
            and ((in_session and one.session == leader.pid) or self._mark in _environment(one.pid))
        ]


def end_left_behind(sessions: Iterable[Session]) -> list[int]:
    """None of them is left when this returns, but those that are returned: killed, and not let go by the kernel."""
    sessions = list(sessions)
    begun = time.monotonic()
    while sessions:
        living = list(all_processes())
        found = {pid for session in sessions for pid in session.left_behind(living)}
        seconds = time.monotonic() - begun
        if not found or seconds > _KILLED_SECONDS:
            return sorted(found)
        for pid in found:
            if seconds > _CLEANING_SECONDS or not _cleans_up(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return []


def _cleans_up(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(cleaner in command for cleaner in _CLEANERS)


def _environment(pid: int) -> list[bytes]:
    """As it was started with; nothing of a process of somebody else's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
