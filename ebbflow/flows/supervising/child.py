"""The flow as a child process that dies with the supervisor and receives the supervisor's signals.

When run as a program (`child.py PID COMMAND…`), this file makes the kernel end its process when the
parent PID dies, and then replaces itself with COMMAND.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
if (_ROOT / "ebbflow").is_dir():  # a checkout
    sys.path.insert(1, str(_ROOT))

from ebbflow.core.errors import Outcome
from ebbflow.core.process import StoppedProcesses, die_with_parent

# A drained launcher waits 60 s or longer (`CheckpointConfig.drain_seconds`) for its last save, and then
# writes the report.
LEAVE_SECONDS = 180.0
STOPPED_SECONDS = 60.0  # a launcher suspended this long is continued; the next time it is killed


class FlowProcess:
    """Runner of one command at a time, which also records whether a signal has asked the supervisor
    to exit.

    Use it in the main thread only: the kernel ends a child when the thread that started it ends,
    and Python handles signals in the main thread.

    Args:
        leave_seconds: time from a signal to the end of the command by SIGKILL.
    """

    def __init__(self, *, leave_seconds: float = LEAVE_SECONDS) -> None:
        self._leave_seconds = leave_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._left = threading.Event()
        self._limit: float | None = None
        self.environment: dict[str, str] = {}  # additional variables of the commands

    @property
    def asked_to_leave(self) -> bool:
        return self._left.is_set()

    def listen(self) -> None:
        """Install handlers that pass SIGTERM, SIGHUP and Ctrl-C on to the child."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Nohup ignores it
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._leave)

    def run(self, command: Sequence[str]) -> int:
        """Run a command and return its exit code, which is negative if a signal ended it.

        If a signal has already asked the supervisor to exit, return 75 without running the command.
        """
        if self.asked_to_leave:
            return Outcome.INTERRUPTED.exit_code
        tied = [sys.executable, __file__, str(os.getpid()), *command]
        # In its own session, so that the child gets a terminal's Ctrl-C only once, from this
        # process.
        self._process = subprocess.Popen(
            tied, env={**os.environ, **self.environment}, start_new_session=True
        )
        self._stopped = StoppedProcesses(STOPPED_SECONDS)
        self._continued = False  # whether the command was suspended for too long, and continued
        if self.asked_to_leave:  # a signal came between the check and the start
            self._tell(signal.SIGTERM)
        while (code := self._ended()) is None:
            if self._limit is not None and time.monotonic() > self._limit:
                self._tell(signal.SIGKILL)
            self._end_stop()
        return code

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a signal asks the supervisor to exit."""
        self._left.wait(seconds)

    def _end_stop(self) -> None:
        """Resume a launcher that has been suspended (SIGSTOP) for 60 s.

        If it is suspended for 60 s again, kill it.
        """
        assert self._process is not None
        for seconds in self._stopped.look([self._process.pid]).values():
            if self._continued:
                does = "killed"
            else:
                does = "continued"
            print(f"the run was stopped (state T) for {seconds:.0f} s: {does}", file=sys.stderr)
            self._tell(signal.SIGKILL if self._continued else signal.SIGCONT)
            self._stopped = StoppedProcesses(STOPPED_SECONDS)
            self._continued = True

    def _ended(self) -> int | None:
        assert self._process is not None
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return None

    def _leave(self, number: int, _frame: object) -> None:
        again = self.asked_to_leave
        self._left.set()
        self._limit = self._limit or time.monotonic() + self._leave_seconds
        # A second Ctrl-C does not wait for the last checkpoint
        hurried = again and number == signal.SIGINT
        self._tell(signal.SIGINT if hurried else signal.SIGTERM)

    def _tell(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
