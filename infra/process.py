"""Nothing of a job outlives it: ties a process to the life of the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from infra.outcome import Outcome

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent_pid: int | None = None) -> bool:
    """Have the kernel kill this process (SIGKILL) as soon as its parent ends, however that ends.

    parent_pid: who must be the parent, as told by the parent itself; a parent that died before this call is then
    noticed and the process exits at once. Without it only a death during the call is. Returns False where the
    system has no such service (anything but Linux); callers that can should then watch a pipe for its end.

    The kernel means the parent *thread*: start such a process from a thread that lives as long as the parent does.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return False
    if os.getppid() != expected:  # it died before the kernel knew of the request
        os._exit(Outcome.INTERRUPTED.exit_code)
    return True
