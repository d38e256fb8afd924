"""The keeper: a small process on each node that starts programs for the agent, and kills them all
if the agent ends.

The keeper is a subreaper (`PR_SET_CHILD_SUBREAPER`): if a process below it loses its parent, the
keeper becomes the parent, even of a daemon with its own session and environment. All processes that
a rank started can therefore be found as descendants of the keeper. When the agent ends for any
reason, the keeper kills all its descendants and exits.

The agent and the keeper exchange lines of JSON over a socket. In this example, 7 is a request
number and 4711 a process id:

    agent → {"spawn": 7, "argv": […], "environment": {…}} and three file descriptors: stdin, stdout,
    stderr agent ← {"spawned": 7, "pid": 4711}  {"refused": 7, "errno": 12}  {"ended": 4711,
    "status": -9}
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NoReturn, Protocol, TypedDict

from ebbflow.core import process
from ebbflow.core.program import IMPORT_ROOT

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_ANSWER_SECONDS = 10.0
_LOOK_SECONDS = 1.0  # between checks that the agent is still the parent
# A parent that does not report an ended child for this long must be stopped
_UNREAPED_SECONDS = 1.0
_LINGER_SECONDS = 1.0
_STUCK_SECONDS = 2.0  # a killed process in state D for this long cannot be ended
_END_SECONDS = 30.0
_FDS = 3
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from ebbflow.core.keeper import serve; "
    "serve(int(sys.argv[2]), int(sys.argv[3]))"
)
# Helpers of Python and torch that release resources of killed processes (shared memory,
# semaphores), then exit.
_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
# Signals that keep their default action: the keeper's own faults, and those that no process can
# handle.
_NOT_IGNORED = {
    *(
        signal.SIGKILL,
        signal.SIGSTOP,
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGABRT,
    ),
    *(signal.SIGSYS, signal.SIGTRAP, signal.SIGCONT),
}


class SpawnRequest(TypedDict):
    """Request to the keeper to start a program."""

    spawn: int
    argv: list[str]
    environment: dict[str, str]


class Parent(Protocol):
    """A process that starts and reaps children for the agent: a keeper or a standby."""

    @property
    def pid(self) -> int: ...
    def ended(self, pid: int) -> int | None:
        """Return a child's exit status, or None while it runs; -9 means that signal 9 killed it."""


class RemoteChild:
    """Handle of a process that is not a child of this process; its `Parent` reports its exit
    status.

    If the parent is stopped and does not report within 1 s, the status is read from the kernel.
    """

    def __init__(self, pid: int, parent: Parent) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent
        self._unreported_since: float | None = None
        self._next_look = 0.0

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.ended(self.pid)
        if self.returncode is None and (now := time.monotonic()) >= self._next_look:
            self._next_look = now + _UNREAPED_SECONDS / 4
            status = process.zombie_status(self.pid, self._parent.pid)
            if status is None:
                self._unreported_since = None
            elif self._unreported_since is None:
                self._unreported_since = now
            elif now - self._unreported_since >= _UNREAPED_SECONDS:
                self.returncode = status
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is not None:
            return
        # The parent reaps the child before its report arrives; meanwhile another process may get
        # the same id.
        stat = process.process_stat(self.pid)
        if stat is None or stat.parent == self._parent.pid:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Wait for the process to end, and return its exit status.

        Raises subprocess.TimeoutExpired if the process is still alive after `timeout` seconds. A
        process in uninterruptible sleep (state D) can stay alive even after SIGKILL.
        """
        import subprocess

        limit = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return status


class Keeper:
    """Handle of a running keeper, by which the agent starts programs.

    Args:
        log: file for the keeper's own errors.
    """

    def __init__(self, log: Path) -> None:
        import subprocess

        own, other = socket.socketpair()
        arguments = [str(IMPORT_ROOT), str(os.getpid()), str(other.fileno())]
        try:
            with open(log, "wb") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    pass_fds=[other.fileno()],
                    # Signals to the agent's process group must not reach the keeper
                    start_new_session=True,
                )
        except OSError:
            own.close()
            raise
        finally:
            other.close()
        own.setblocking(False)
        self._channel = own
        self._messages = process.MessageReader(lambda: self._channel.recv(65536))
        self._number = 0
        self._spawned: dict[int, int | OSError] = {}
        self._ended: dict[int, int] = {}
        self.lost = False  # the keeper has ended, or did not answer in time and was killed

    @property
    def pid(self) -> int:
        return self._process.pid

    def spawn(
        self,
        argv: Iterable[str],
        environment: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
    ) -> RemoteChild:
        """Start a program in its own session as a child of the keeper; argv[0] is its absolute
        path. Raises OSError.
        """
        self._number += 1
        request: SpawnRequest = {
            "spawn": self._number,
            "argv": list(argv),
            "environment": dict(environment),
        }
        limit = time.monotonic() + _ANSWER_SECONDS
        self._ask(json.dumps(request).encode() + b"\n", [stdin, stdout, stderr], limit)
        while self._number not in self._spawned and not self.lost:
            left = limit - time.monotonic()
            if left <= 0:
                self._lose()
                break
            select.select([self._channel], [], [], left)
            self._hear()
        answer = self._spawned.pop(self._number, None)
        if isinstance(answer, int):
            return RemoteChild(answer, self)
        raise answer or OSError(
            f"the keeper (process {self.pid}) did not answer within {_ANSWER_SECONDS:g} s"
        )

    def ended(self, pid: int) -> int | None:
        self._hear()
        return self._ended.get(pid, -signal.SIGKILL if self.lost else None)

    def close(self) -> None:
        """End the keeper and all processes below it.

        Only processes in uninterruptible sleep (state D) may remain.
        """
        import subprocess

        self._channel.close()
        try:
            self._process.wait(_ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            kill_descendants(self.pid, _LINGER_SECONDS)
        self._lose()

    def _ask(self, request: bytes, descriptors: list[int], limit: float) -> None:
        """Send a request with its file descriptors.

        Kill the keeper if it has not read the request at time `limit`.
        """
        unsent = memoryview(request)
        while unsent and not self.lost:
            left = limit - time.monotonic()
            if left <= 0:
                return self._lose()
            select.select([], [self._channel], [], left)
            try:
                sent = socket.send_fds(self._channel, [unsent], descriptors)
            except BlockingIOError:
                continue
            except OSError:
                return self._lose()
            unsent = unsent[sent:]
            descriptors = []
        return None

    def _hear(self) -> None:
        if not self.lost and not self._messages.read(self._note):
            self._lose()

    def _note(self, message: dict[str, int]) -> None:
        if "spawned" in message:
            self._spawned[message["spawned"]] = message["pid"]
            self._ended.pop(message["pid"], None)  # status of an earlier process with this id
        elif "refused" in message:
            number = message["errno"]
            self._spawned[message["refused"]] = OSError(number, os.strerror(number))
        else:
            self._ended[message["ended"]] = message["status"]

    def _lose(self) -> None:
        """Kill the keeper and mark it as lost.

        The kernel then kills its children and a standby's ranks.
        """
        import subprocess

        self.lost = True
        self._process.kill()
        try:
            self._process.wait(_ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            return


def kill_descendants(keeper: int, seconds: float) -> list[int]:
    """Kill the processes below the keeper, and return the ids of those alive after `seconds`."""
    return kill_until_none(lambda: process.descendants(keeper), seconds)


def kill_until_none(
    find: Callable[[], list[process.ProcessStat]],
    seconds: float,
    *,
    spare_groups: Collection[int] = (),
    reap: Callable[[], bool] = lambda: True,
) -> list[int]:
    """Kill the processes that `find` returns, again and again until `find` and `reap` report none
    left.

    Processes may fork faster than `find` lists them. If `find` returns new processes in the third
    round or later, their whole process groups are killed, because a fork cannot escape a signal to
    its group. All processes found are then also stopped before any of them is killed one by one, so
    that none can fork meanwhile. Every group is entirely below the keeper, because the keeper
    starts each program in its own session.

    Args:
        spare_groups: process groups that are not killed as a whole.
        reap: function that reaps ended children, and returns whether no child is left.

    Returns:
        Ids of the processes that still exist after `seconds`, or earlier if all stay in
        uninterruptible sleep (state D).
    """
    begun = time.monotonic()
    changed_at = 0.0
    sleeping_before: set[int] = set()
    known: set[int] = set()
    rounds = 0
    while True:
        done = reap()
        found = find()
        passed = time.monotonic() - begun
        sleeping = {stat.pid for stat in found if stat.state == "D"}
        # A process that waits for a lock of the file system is in state D too, but not for long.
        if len(sleeping) < len(found) or sleeping != sleeping_before:
            changed_at = passed
        sleeping_before = sleeping
        stuck = bool(found) and passed - changed_at > _STUCK_SECONDS
        if (not found and done) or stuck or passed > seconds:
            return sorted(process.pid for process in found)
        spreading = rounds > 1 and any(process.pid not in known for process in found)
        known.update(process.pid for process in found)
        rounds += 1
        if spreading:
            for group in {process.group for process in found}.difference(spare_groups):
                _send(os.killpg, group, signal.SIGKILL)
            for process in found:
                _send(os.kill, process.pid, signal.SIGSTOP)
        for process in found:
            if spreading or passed > _LINGER_SECONDS or not _cleans_up(process.pid):
                _send(os.kill, process.pid, signal.SIGKILL)
        if not spreading:
            time.sleep(0.01 if passed > 0.1 else 0.001)


def serve(agent: int, channel: int) -> None:
    """Run the keeper until the agent ends; then kill all processes below the keeper and exit.

    Does not return.

    agent: process id of the agent. channel: file descriptor of the socket to the agent.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in signal.valid_signals() - _NOT_IGNORED:
        # A handler instead of SIG_IGN, which spawned programs would inherit.
        try:
            signal.signal(number, lambda *_: None)
        except (OSError, ValueError):
            continue
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    os.set_inheritable(channel, False)
    try:
        if process.die_with_parent(agent, by=signal.SIGUSR1):  # the signal only wakes the keeper
            _Desk(agent, socket.socket(fileno=channel), woken).serve()
    finally:
        with contextlib.suppress(OSError):
            # Endless forks leave little time to other processes
            os.setpriority(os.PRIO_PROCESS, 0, -10)
        kill_until_none(lambda: process.descendants(os.getpid()), _END_SECONDS, reap=_reap_all)
        os._exit(0)


def _send(send: Callable[[int, int], None], target: int, number: int) -> None:
    try:
        send(target, number)
    except (ProcessLookupError, PermissionError):
        return


def _cleans_up(pid: int) -> bool:
    command = process.read_system_file(f"/proc/{pid}/cmdline")
    return any(cleaner in command for cleaner in _CLEANERS)


class _Desk:
    """The keeper's event loop: it starts programs on request and reports which children exited."""

    def __init__(self, agent: int, channel: socket.socket, woken: int) -> None:
        self._agent = agent
        self._channel = channel
        self._woken = woken
        self._spawned: set[int] = set()
        self._heard = b""
        self._descriptors: list[int] = []

    def serve(self) -> None:
        """Serve requests and reap children until the agent ends or closes its end of the socket."""
        while os.getppid() == self._agent:
            ready, _, _ = select.select([self._channel, self._woken], [], [], _LOOK_SECONDS)
            if self._woken in ready:
                os.read(self._woken, 4096)
            try:
                self._reap()
                if self._channel in ready and not self._hear():
                    return
            except OSError:  # the agent is gone
                return

    def _hear(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 20, 4 * _FDS)
        for (
            descriptor
        ) in descriptors:  # received as inheritable: no program may get another's pipes
            os.set_inheritable(descriptor, False)
        self._descriptors += descriptors
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            fds = self._descriptors[:_FDS]
            self._descriptors = self._descriptors[_FDS:]
            self._spawn(json.loads(line), fds)
        return bool(data)

    def _spawn(self, request: SpawnRequest, fds: list[int]) -> None:
        # A signal that arrives before the child has its own handlers waits until then.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                _become(request["argv"], request["environment"], fds, before)
        except OSError as error:
            self._answer({"refused": request["spawn"], "errno": error.errno or 0})
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for descriptor in fds:
            os.close(descriptor)
        self._spawned.add(pid)
        self._answer({"spawned": request["spawn"], "pid": pid})

    def _reap(self) -> None:
        while (ended := _reap_one()) is not None and ended[0]:
            if ended[0] in self._spawned:
                self._spawned.discard(ended[0])
                self._answer({"ended": ended[0], "status": ended[1]})

    def _answer(self, message: dict[str, int]) -> None:
        self._channel.sendall(json.dumps(message).encode() + b"\n")


def _become(
    argv: list[str], environment: dict[str, str], fds: list[int], mask: Collection[int]
) -> NoReturn:
    """Replace a forked child of the keeper by a program, in its own session.

    The program inherits no file descriptors of the keeper except `fds`, which become stdin, stdout
    and stderr. mask: signals that are blocked when the program starts.
    """
    try:
        keeper = os.getppid()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                continue
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setsid()
        process.die_with_parent(keeper)
        for target, descriptor in enumerate(fds):  # all above 2: the keeper has 0 to 2 open
            os.dup2(descriptor, target)  # the copy is inheritable
        os.execve(argv[0], argv, environment)
    finally:
        os._exit(127)


def _reap_one() -> tuple[int, int] | None:
    """Reap one ended child, and return (pid, status).

    Return (0, 0) if all children still run, and None if there are no children.
    """
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    if pid:
        return (pid, os.waitstatus_to_exitcode(status))
    return (0, 0)


def _reap_all() -> bool:
    """Reap all ended children, and return whether this process has no children left."""
    while (ended := _reap_one()) is not None:
        if not ended[0]:
            return False
    return True
