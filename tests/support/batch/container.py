"""What runs as process 1 would in a container: when the command ends, or is stopped, nothing of it
stays behind.

    python -S tests/support/batch/container.py PARENT_PID COMMAND…

SIGTERM kills everything at once (exit 137), which is also what happens when the parent ends.
SIGUSR1 asks the command to end, as `docker stop` does: a signal for which process 1 has no handler
never reaches it. Nothing of this project is imported, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
KILLED = 137


def main(parent: int, command: list[str]) -> int:
    libc = ctypes.CDLL(None)
    signal.signal(signal.SIGTERM, _kill_all)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        return KILLED
    process = subprocess.Popen(command)
    signal.signal(signal.SIGUSR1, lambda *_: _ask(process.pid))
    while True:
        pid, status = os.wait()  # orphans come here too
        if pid == process.pid:
            break
    _kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    return 128 - code


def _kill_all(number: int, frame: FrameType | None) -> None:
    _kill_descendants()
    os._exit(KILLED)


def _kill_descendants() -> None:
    """Until none is left: what one of them starts meanwhile is met in the next round."""
    while found := _descendants(os.getpid()):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                for child in map(int, file.read().split()):
                    found += [child, *_descendants(child)]
    return [child for child in found if not _is_zombie(child)]


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _ask(pid: int) -> None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
        if int(caught, 16) & (1 << (signal.SIGTERM - 1)):
            os.kill(pid, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
