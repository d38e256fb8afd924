"""Control of processes: tie children to their parent, inspect processes, and handle signals and
closed outputs.
"""

import contextlib
import ctypes
import errno
import io
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ebbflow.core.errors import EbbflowError, Outcome, describe_error
from ebbflow.core.grouping import group_by_key
from ebbflow.core.program import IMPORT_ROOT, python_path

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_MOST_LISTINGS = 20  # of a tree of processes that changes while it is listed

# By version of cgroups: the files with limit and use, and the lines of memory.stat that count the
# page cache, which the kernel drops before it kills a process.
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
# Ports of node 0's agent: below Linux's default ephemeral range (32768-60999), so that no outgoing
# connection uses one of them
AGENT_PORTS = range(20_000, 32_000)
_NO_LIMIT = 1 << 60  # version 1 shows a huge number where there is no limit


class OwnProgram(StrEnum):
    """Modules that run as separate processes, each started with `python -m MODULE`."""

    COMMAND = "ebbflow"  # `ebbflow COMMAND`
    RANK = "ebbflow.training"
    AGENT = "ebbflow.training.launch.agent"
    SLURM_NODE = "ebbflow.training.launch.slurm_node"
    SLURM_PROBE = "ebbflow.infra.slurm.probe"
    OBSERVER = "ebbflow.observe.observer"
    UPLOADER = "ebbflow.training.checkpoint.uploader"
    PART_READER = "ebbflow.training.checkpoint.reader"
    SCRIPT_TRIAL = "ebbflow.integrations"
    TRYOUT = "ebbflow.tryout"
    BENCHMARKS = "benchmarks"


@dataclass(frozen=True)
class ProcessStat:
    """Status of a process from /proc/PID/stat (proc(5))."""

    pid: int  # process id
    state: str  # the kernel's state letter
    parent: int
    group: int
    session: int
    threads: int  # number of threads
    started_ticks: (
        int  # start in clock ticks since boot, which identifies a process if its id is reused
    )
    wait_status: int  # as of wait(2), of a process that has ended
    cpu_ticks: int  # clock ticks of CPU time that its threads have used

    @property
    def living(self) -> bool:
        """Whether the process is alive.

        A zombie with several threads is alive: only its main thread has ended.
        """
        return self.state not in ("Z", "X") or self.threads > 1


class AwakeClock:
    """Clock that stands still while this process is paused, for measuring the silence of other
    processes.

    Each iteration of this process's main loop adds at most `longest_turn_seconds`. So a pause of
    the whole process (SIGSTOP, `docker pause`, a frozen virtual machine) adds at most
    `longest_turn_seconds`.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, *, longest_turn_seconds: float = 0.25
    ) -> None:
        self._now = now
        self._longest = longest_turn_seconds
        self._last = now()
        self.seconds = 0.0

    def tick(self) -> float:
        """Advance the clock by the time since the last call, at most by `longest_turn_seconds`.

        Return the total in seconds. The main loop calls this in each iteration.
        """
        now = self._now()
        self.seconds += min(max(now - self._last, 0.0), self._longest)
        self._last = now
        return self.seconds


class StoppedProcesses:
    """Detector of processes that have been stopped (state T) for longer than `limit_seconds`.

    State t, a stop by a debugger, does not count, nor does time during which this process itself
    was stopped, for example by Ctrl-Z in a terminal.
    """

    def __init__(self, limit_seconds: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit_seconds
        self._awake = AwakeClock(now, longest_turn_seconds=2.0)
        self._since: dict[int, float] = {}  # awake seconds at which each was first seen stopped

    def look(self, pids: Iterable[int]) -> dict[int, float]:
        """Map each process that has been stopped for over `limit_seconds` to the seconds since
        then.

        Call this once per second.
        """
        awake = self._awake.tick()
        stopped = [pid for pid in pids if process_state(pid) == "T"]
        self._since = {pid: self._since.get(pid, awake) for pid in stopped}
        return {
            pid: awake - since for pid, since in self._since.items() if awake - since > self._limit
        }


class MessageReader:
    """Reader of a child process's JSON messages, one per line, from a non-blocking pipe or socket.

    Args:
        receive: returns the available bytes, or b"" at the end; raises BlockingIOError if none are
            available.
    """

    def __init__(self, receive: Callable[[], bytes]) -> None:
        self._receive = receive
        self._unfinished = b""

    def read(self, note: Callable[[dict[str, int]], None]) -> bool:
        """Pass each available message to `note`, and return whether more messages may follow.

        No message can follow the end of the pipe, a read error, or bytes that are not a message.
        Such bytes come from another process.
        """
        while True:
            try:
                data = self._receive()
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            *lines, self._unfinished = (self._unfinished + data).split(b"\n")
            try:
                for line in lines:
                    note(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError):
                return False


def own_program_line(program: OwnProgram, *words: str) -> list[str]:
    """Return the command line that starts one of the project's own programs."""
    return [sys.executable, "-m", program, *words]


def die_with_parent(parent_pid: int | None = None, *, by: signal.Signals = signal.SIGKILL) -> bool:
    """Let the kernel kill this process, or send it the signal `by`, as soon as its parent ends.

    The kernel watches the parent *thread*: a thread that starts such a process must live as long as
    the parent does. If the parent `parent_pid` has already died, this process exits.

    Returns:
        False on systems other than Linux. The caller must then detect the parent's end in another
            way, such as by the end of a pipe.
    """
    if parent_pid is None:
        expected = os.getppid()
    else:
        expected = parent_pid
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0) != 0:
        return False
    if os.getppid() != expected:  # it died before the kernel got the request
        os._exit(Outcome.INTERRUPTED.exit_code)
    return True


def tie_forked_children() -> None:
    """Let the kernel kill forked children, such as data-loader workers, when this process ends.

    Grandchildren are not affected. Children that threads other than the main thread fork are not
    affected either, because those threads may end before this process.
    """
    if not sys.platform.startswith("linux"):
        return
    own = os.getpid()
    libc = ctypes.CDLL(None)
    by_main_thread = [False]

    def before() -> None:
        by_main_thread[0] = threading.current_thread() is threading.main_thread()

    def after_in_child() -> None:
        if by_main_thread[0] and os.getppid() == own:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    os.register_at_fork(before=before, after_in_child=after_in_child)


def read_system_file(path: Path | str) -> str:
    """Return the stripped text of a file in /proc or /sys, or "" if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def process_stat(pid: int) -> ProcessStat | None:
    """Read the status of a process.

    Return None if the process is gone or the system has no /proc.
    """
    try:
        # The second field is the command in parentheses, which may contain anything: count from its
        # end.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        parent, group, session = (int(field) for field in fields[1:4])
        ticks = int(fields[11]) + int(fields[12])
        others = (int(fields[at]) for at in (17, 19, 49))
        return ProcessStat(pid, fields[0], parent, group, session, *others, cpu_ticks=ticks)
    except (OSError, ValueError, IndexError):
        return None


def all_processes() -> Iterator[ProcessStat]:
    """Yield the living processes that this process can see."""
    try:
        numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return
    for number in numbers:
        stat = process_stat(number)
        if stat is not None and stat.living:
            yield stat


def descendants(
    root: int, spare: Collection[int] = (), spare_trees: Collection[int] = ()
) -> list[ProcessStat]:
    """Return the living processes below `root`, which must be a subreaper.

    The function follows the kernel's lists of children. If these yield nothing, it examines the
    parents of all processes.

    Args:
        spare: ids of processes to leave out; their descendants are still returned.
        spare_trees: ids of processes to leave out together with all their descendants.
    """
    listed_before: set[int] | None = None
    # Bounded because nothing is reaped meanwhile if this process is the root.
    for _ in range(_MOST_LISTINGS):
        listed = _list_below(root, spare_trees)
        stats = [stat for pid, stat in listed.items() if pid not in spare]
        found = [stat for stat in stats if stat is not None and stat.living]
        if found:
            return found
        # A process that forks and exits at once may have moved its child to the root after the
        # root's children were read. Only a second list without new or vanished processes shows that
        # nothing is alive.
        if set(listed) == listed_before and None not in stats:
            break
        listed_before = set(listed)
    return _descendants_by_parent(root, spare, spare_trees)


def zombie_status(pid: int, parent: int) -> int | None:
    """Return the exit code of a zombie child of `parent`, or -N if signal N killed it.

    Return None if the process is not such a zombie.
    """
    stat = process_stat(pid)
    if stat is None or stat.state != "Z" or stat.parent != parent or stat.threads > 1:
        return None
    return os.waitstatus_to_exitcode(stat.wait_status)


def children(pid: int) -> list[int]:
    """Return the ids of the living children of `pid`'s main thread."""
    listed = read_system_file(f"/proc/{pid}/task/{pid}/children").split()
    return [int(child) for child in listed if process_state(int(child)) not in ("Z", "")]


def available_bytes() -> int | None:
    """Return the machine's available memory in bytes (MemAvailable), or None if it is unknown."""
    found = read_system_file("/proc/meminfo").partition("MemAvailable:")[2].split()
    if found:
        return int(found[0]) * 1024
    return None


def memory_left() -> dict[str, int]:
    """Return the bytes that can still be allocated under each limit, by the limit's name.

    The result is empty if they are unknown.

    A container has the limit of its cgroup and those of the cgroups around it.
    """
    available = available_bytes()
    if available is None:
        left = {}
    else:
        left = {"available on this machine": available}
    for line in read_system_file("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            version = "memory"
        else:
            version = controllers
        if version not in _CGROUP_FILES:
            continue
        limit, use, cached = _CGROUP_FILES[version]
        group = Path(path)
        for folder in (group, *group.parents):  # a container may see its own group as the root
            place = _CGROUPS / version / str(folder).lstrip("/")
            most, used = (read_system_file(place / name) for name in (limit, use))
            if most.isdecimal() and used.isdecimal() and int(most) < _NO_LIMIT:
                stat = (row.split() for row in read_system_file(place / "memory.stat").splitlines())
                free = int(most) - int(used) + sum(int(row[1]) for row in stat if row[0] in cached)
                left["left in this container"] = min(free, left.get("left in this container", free))
    return left


def host_bytes_left() -> float:
    """Return the bytes that can still be allocated on this machine or in this container.

    Return infinity if they are unknown.
    """
    return min(memory_left().values(), default=math.inf)


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state, such as R (running), T (stopped) or Z
    (zombie).

    Return "" if the process is gone.
    """
    stat = process_stat(pid)
    if stat is None:
        return ""
    return stat.state


def describe_exit(code: int) -> str:
    """Describe how a process ended, such as "was killed by SIGKILL" or "ended with exit code 1".

    Args:
        code: as of `subprocess.Popen.returncode`, negative after a signal.
    """
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"ended with exit code {code}"


def signal_name(number: int) -> str:
    """Return the name of a signal, including real-time signals, which `signal.Signals` does not
    name.
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        first = getattr(signal, "SIGRTMIN", 0)
        last = getattr(signal, "SIGRTMAX", 0)
        if first <= number <= last:
            return f"SIGRTMIN+{number - first}"
        return f"signal {number}"


def exit_when_interrupted() -> None:
    """On Ctrl-C, SIGTERM or a closed terminal, kill all descendants, print one line and exit with
    code 75.

    A SIGINT or SIGHUP that this process already ignores (background job, nohup) stays ignored.
    """

    def leave(number: int, frame: object) -> None:  # noqa: ARG001 (signal's interface)
        with contextlib.suppress(OSError):
            os.write(2, b"interrupted\n")
        _end_descendants()
        os._exit(Outcome.INTERRUPTED.exit_code)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def end_with_descendants(number: int, frame: object) -> None:  # noqa: ARG001 (signal's interface)
    """Signal handler that kills all descendants and exits with 128 + the signal's number, as a
    shell does.
    """
    _end_descendants()
    os._exit(128 + number)


def ignore_lost_readers() -> None:
    """Drop output to stdout or stderr once its reader is gone, as with `| head` or a closed
    terminal.

    Otherwise the next line of output raises BrokenPipeError in the middle of the work.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            descriptor = stream.fileno()
            stream.flush()
        except (AttributeError, OSError, ValueError):  # closed, or none at all
            continue
        raw = io.BufferedWriter(_LastingOutput(descriptor, "wb", closefd=False))
        lasting = io.TextIOWrapper(
            raw,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
        )
        setattr(sys, name, lasting)


def run_command(command: Callable[[], int]) -> int:
    """Run a function as a console command, and return the exit code.

    An expected error becomes a message on stderr.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except EbbflowError as error:
        print(describe_error(error), file=sys.stderr)
        return error.outcome.exit_code
    except BrokenPipeError:
        return silence_stdout()


def silence_stdout() -> int:
    """Discard all further output to stdout, after a BrokenPipeError (`… | head`).

    Return 141, the exit code for SIGPIPE.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def run_benchmarks(arguments: list[str]) -> NoReturn:
    """Replace this process with `python -m benchmarks ARGUMENTS`.

    Outside a source checkout, exit with code 2.
    """
    root = IMPORT_ROOT
    if not (root / "benchmarks").is_dir():
        print(
            "benchmarks are part of the source checkout only: clone the repository to run them",
            file=sys.stderr,
        )
        sys.exit(2)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = own_program_line(OwnProgram.BENCHMARKS, *arguments)
    os.execve(sys.executable, command, environment)


def _list_below(root: int, spare_trees: Collection[int]) -> dict[int, ProcessStat | None]:
    """Map the processes in the kernel's lists of children below `root` to their status.

    The status is None if the process has vanished since.
    """
    listed: dict[int, ProcessStat | None] = {}
    ahead = [root]
    while ahead:
        parent = ahead.pop()
        children_of_threads: list[int] = []
        with contextlib.suppress(OSError, ValueError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children_of_threads += map(
                    int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split()
                )
        for pid in children_of_threads:
            if pid in spare_trees:
                continue
            listed[pid] = process_stat(pid)
            if listed[pid] is not None:
                ahead.append(pid)
    return listed


def _descendants_by_parent(
    root: int, spare: Collection[int], spare_trees: Collection[int]
) -> list[ProcessStat]:
    by_parent = group_by_key((stat.parent, stat) for stat in all_processes())
    found: list[ProcessStat] = []
    ahead = [root]
    while ahead:
        below = [stat for stat in by_parent.pop(ahead.pop(), []) if stat.pid not in spare_trees]
        ahead += [stat.pid for stat in below]
        found += [stat for stat in below if stat.pid not in spare]
    return found


def _end_descendants() -> None:
    for stat in _descendants_by_parent(os.getpid(), (), ()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(stat.pid, signal.SIGKILL)


class _LastingOutput(io.FileIO):
    """Output that switches to /dev/null once its reader is gone, and drops data if the disk is
    full.
    """

    def write(self, data: "Buffer") -> int | None:
        size = memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            # Space may be free again later
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return size
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            return size
