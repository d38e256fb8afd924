"""Evidence about ranks: stacks, flight recorders, and the record of a failure.

py-spy with --nonblocking reads the memory of the process and so works on one that is stopped, or whose GIL is held.

What it calls a record is reduced to [group, sequence, operation]; of the operation the sizes are a part where they
must agree.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ebbflow.infra.process import process_state
from ebbflow.infra.program import PACKAGE_ROOT
from ebbflow.training.launch.heartbeat import DUMP_SIGNAL, recorder_socket_path, stacks_path

_SPY_SECONDS = 3.0
_STACK_SECONDS = 1.0
_LAST_BYTES = 65536
_MAIN = "MainThread"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)', re.MULTILINE)
_WAITING_FILES = ("training/gang.py", "training/step_sync.py", "training/peer_sockets.py")
_EXCHANGE_FILES = ("training/gang.py", "training/peer_sockets.py")
# There, who called it is where a rank stands.
_EXCHANGE = ("gather", "gather_numbers", "_tell", "_hear", "_read", "_lost")
_ENGINE_PLACES = (*_WAITING_FILES, "training/trainer_setup.py", "training/guards/", "training/trainer.py")
_WAITING_FUNCTIONS = ("sync_step",)  # where the host of a GPU waits for its stream, and so for the collectives on it
_NOT_WAITING = ("/torch/distributed/checkpoint/", "/torch/distributed/elastic/")
# The kernel ends what is run by this (its path and arguments follow) with the thread that waits for it.
_WITH_ME = (
    *(sys.executable, "-I", "-S", "-c"),
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])",
)


def is_engine_location(where: str) -> bool:
    """Whether a place, as `Stack.where` has it, is the engine's own collective, to which all ranks come."""
    return where.startswith(_ENGINE_PLACES)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    name: str

    @property
    def ours(self) -> bool:
        """Of the project or of the user, and not of a library, the interpreter's included."""
        parts = ("site-packages", "dist-packages", "/lib/python3")
        return not self.file.startswith("<") and not any(part in self.file for part in parts)

    @property
    def exchange(self) -> bool:
        """How rows of numbers go from rank to rank, whoever has called for it."""
        return self.file.endswith(_EXCHANGE_FILES) and self.name.endswith(_EXCHANGE)

    @property
    def collective(self) -> bool:
        """It waits for other ranks, or for what they do together."""
        if "/torch/distributed/" in self.file:
            return not any(part in self.file for part in _NOT_WAITING)
        return (
            self.file.endswith(_WAITING_FILES)
            or self.name.endswith(_WAITING_FUNCTIONS)
            or "/torch/nn/parallel/distributed.py" in self.file
        )

    def __str__(self) -> str:
        path, real = Path(self.file), Path(self.file).resolve()
        if real.is_relative_to(PACKAGE_ROOT):
            return f"{real.relative_to(PACKAGE_ROOT)}:{self.line} in {self.name}"
        return f"{'/'.join(path.parts[-2:]).lstrip('/')}:{self.line} in {self.name}"


@dataclass(frozen=True)
class StackTrace:
    """The main thread's frames, innermost first, and the text of all threads. idle: it used no processor."""

    frames: Sequence[Frame]
    text: str
    idle: bool = False

    @property
    def where(self) -> str:
        """The innermost frame of ours that is no mere exchange of rows; without one, the innermost."""
        ours = [frame for frame in self.frames if frame.ours and not frame.exchange]
        return next((str(frame) for frame in [*ours, *self.frames]), "")

    @property
    def reason(self) -> str:
        """What a C++ exception that nobody caught said of itself."""
        found = re.search(r"^  what\(\):\s*(.*)", self.text, re.MULTILINE)
        return found[1][:300] if found else ""

    @property
    def waiting(self) -> bool:
        """That what it does at the innermost frame of ours is to wait for other ranks.

        A CPU's backward runs collectives below one frame of torch: there an idle thread waits.
        """
        for frame in self.frames:
            if frame.collective or (self.idle and frame.name.endswith("_engine_run_backward")):
                return True
            if frame.ours:
                return False
        return False


def take_stack(pid: int, answer: Path | None) -> StackTrace | None:
    """A rank's stack, within 4 s. answer: the file that its faulthandler writes to. None when neither way is open."""
    return _spy(pid) or (_ask(pid, answer) if answer else None)


def parse_py_spy(text: str) -> StackTrace:
    """What `py-spy dump --json` printed."""
    threads = json.loads(text)
    main = next((thread for thread in threads if thread["thread_name"] == _MAIN), threads[-1])
    return StackTrace(_spy_frames(main), "\n\n".join(map(_describe, threads)), idle=not main["active"])


def parse_faulthandler(text: str) -> StackTrace:
    """What faulthandler wrote: the thread that took the signal, the main one as a rule, is called the current one. A
    thread of C++ has no frames to show; then it is the last one, which is the oldest."""
    blocks = re.split(r"^(?=Thread |Current thread )", text, flags=re.MULTILINE)
    stacks = [(block.startswith("Current"), _frames(block)) for block in blocks]
    told = [(current, frames) for current, frames in stacks if frames]
    frames = next((frames for current, frames in told if current), told[-1][1] if told else [])
    return StackTrace(frames, text, idle=True)


def read_crash_stack(log: Path) -> StackTrace | None:
    """Where a rank was when a signal such as SIGSEGV or SIGABRT ended it. torch's @record turns faulthandler on, which
    writes to the rank's log then."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    before, fatal, after = text.rpartition("Fatal Python error")
    stack = parse_faulthandler(after)
    return StackTrace(stack.frames, before[-2000:] + fatal + after, idle=True) if fatal else None


def parse_traceback(text: str) -> str:
    """The innermost place of ours in an exception's traceback, as `Stack.where`; "" without one."""
    lines = re.findall(r'  File "(.*)", line (\d+), in (.*)', text)
    frames = [Frame(file, int(line), name) for file, line, name in reversed(lines)]
    return StackTrace(frames, text).where


def _spy(pid: int) -> StackTrace | None:
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [*_WITH_ME, program, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_SPY_SECONDS,
        )
        return parse_py_spy(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError):
        return None


def _ask(pid: int, answer: Path) -> StackTrace | None:
    """The signal would end a process that has no handler for it, so the kernel is asked first."""
    if not _handles(pid, DUMP_SIGNAL):
        return None
    try:
        before, text = answer.stat().st_size, ""
        os.kill(pid, DUMP_SIGNAL)
        limit = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < limit:
            time.sleep(0.05)
            with open(answer) as file:
                file.seek(before)
                newer = file.read()
            if newer and newer == text:
                return parse_faulthandler(newer)
            text = newer
    except OSError:
        return None
    return None


def _handles(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    except (OSError, StopIteration, ValueError):
        return False


def _frames(text: str) -> list[Frame]:
    return [Frame(found["file"], int(found["line"]), found["name"]) for found in _FRAME.finditer(text)]


def _spy_frames(thread: dict) -> list[Frame]:
    return [Frame(frame["filename"], frame["line"], frame["name"]) for frame in thread["frames"]]


def _describe(thread: dict) -> str:
    state = "active" if thread["active"] else "idle"
    lines = [f"  {frame.file}:{frame.line} in {frame.name}" for frame in _spy_frames(thread)]
    return "\n".join(
        [f"thread {thread['thread_name']} ({state}{', holds the GIL' if thread['owns_gil'] else ''})", *lines]
    )


BUFFER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
BUFFER_RECORDS = "512"
_KEPT_CALLS = 64
_LEAST_CALLS = 8  # of which a habit can be told
_SAME_SIZES = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast", "barrier")
_RECORDER_SECONDS = 0.5

Calls = Sequence[Sequence]


@dataclass(frozen=True)
class Mismatch:
    """Ranks that called `operation` where the others, at the same place in the sequence, called `expected`."""

    ranks: Sequence[int]
    group: str
    sequence: int
    operation: str
    expected: str
    others: Sequence[int]

    def __str__(self) -> str:
        ranks, others = (", ".join(map(str, ranks)) for ranks in (self.ranks, self.others))
        return (
            f"collective {self.sequence} of group {self.group} is {self.operation} on rank {ranks} "
            f"and {self.expected} on rank {others}"
        )


def parse_records(raw: bytes) -> list[list]:
    """The last collectives, oldest first, of a dump in JSON; point-to-point calls are left out."""
    try:
        entries = json.loads(raw).get("entries", [])
        calls = [_call(entry) for entry in entries if not entry.get("is_p2p")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
    return calls[-_KEPT_CALLS:]


def fetch_records(door: Path) -> bytes:
    """Ask a rank's recorder, which answers from a thread that needs no GIL. b"" when it does not within 0.5 s."""
    connection = _UnixConnection(door)
    try:
        connection.request("POST", "/handler/fr_trace_json")
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()


def find_mismatch(calls: Mapping[int, Calls]) -> Mismatch | None:
    """The first place where ranks called different things, and who is the odd one: the minority. Of equally many,
    those whose call is the less usual one after the call before it."""
    for group, sequence, by_rank in _common_places(calls):
        operations = Counter(by_rank.values())
        if len(operations) == 1:
            continue
        usual = max(
            operations,
            key=lambda operation: (operations[operation], _habit(calls, group, sequence, by_rank, operation)),
        )
        odd = next(operation for operation in by_rank.values() if operation != usual)
        return Mismatch(
            ranks=sorted(rank for rank, operation in by_rank.items() if operation != usual),
            group=group,
            sequence=sequence,
            operation=odd,
            expected=usual,
            others=sorted(rank for rank, operation in by_rank.items() if operation == usual),
        )
    return None


def is_unusual_call(calls: Calls) -> bool | None:
    """Whether a rank never before called its last operation after the one before; None when too little is known."""
    group = calls[-1][0] if calls else ""
    own = [operation for name, _, operation in calls if name == group]
    if len(own) < _LEAST_CALLS:
        return None
    pairs = list(itertools.pairwise(own))
    return pairs[-1] not in pairs[:-1]


def find_furthest_behind(calls: Mapping[int, Calls]) -> list[int]:
    """The ranks that others wait for: behind in one of their groups and ahead in none; [] when none is behind.

    With several groups (HSDP) who waits for a rank keeps others waiting in turn: it is behind as well, but ahead of
    the first.
    """
    last: dict[str, dict[int, int]] = {}
    for rank, records in calls.items():
        for group, sequence, _ in records:
            last.setdefault(group, {})[rank] = sequence
    behind: set[int] = set()
    ahead: set[int] = set()
    for ranks in last.values():
        least = min(ranks.values())
        late = {rank for rank, sequence in ranks.items() if sequence == least}
        if len(late) < len(ranks):
            behind |= late
            ahead |= set(ranks) - late
    return sorted(behind - ahead or behind)


def _call(entry: dict) -> list:
    name = entry["profiling_name"].rpartition(":")[2]
    sized = any(kind in name.lower() for kind in _SAME_SIZES)
    operation = f"{name} {entry.get('input_sizes')}" if sized else name
    return [str(entry["process_group"][0]), int(entry["collective_seq_id"]), operation]


def _common_places(calls: Mapping[int, Calls]) -> list[tuple[str, int, dict[int, str]]]:
    """(group, sequence, {rank: operation}) where two ranks or more have a record, earliest first.

    Coalesced calls share a number, and a dump may catch a rank between them: such a place says nothing.
    """
    places: dict[tuple[str, int], dict[int, str]] = {}
    coalesced: set[tuple[str, int]] = set()
    for rank, records in calls.items():
        for group, sequence, operation in records:
            by_rank = places.setdefault((group, sequence), {})
            if rank in by_rank:
                coalesced.add((group, sequence))
            by_rank[rank] = operation
    told = [(place, by_rank) for place, by_rank in places.items() if len(by_rank) > 1 and place not in coalesced]
    shared = [(group, sequence, by_rank) for (group, sequence), by_rank in told]
    return sorted(shared, key=lambda place: place[1])


def _habit(calls: Mapping[int, Calls], group: str, sequence: int, by_rank: Mapping[int, str], operation: str) -> int:
    """How often the operation came after its predecessor, before this place, on the ranks that now called it."""
    count = 0
    for rank in (rank for rank, called in by_rank.items() if called == operation):
        own = [(number, name) for name_of_group, number, name in calls[rank] if name_of_group == group]
        before = next((name for number, name in own if number == sequence - 1), None)
        pairs = itertools.pairwise(own)
        count += sum(
            first == before and second == operation and number < sequence for (_, first), (number, second) in pairs
        )
    return count


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket in the file system; through its folder's descriptor, since such paths are limited to 108
    bytes."""

    def __init__(self, door: Path) -> None:
        super().__init__("localhost", timeout=_RECORDER_SECONDS)
        self._door = door

    def connect(self) -> None:
        folder = os.open(self._door.parent, os.O_RDONLY)
        try:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(_RECORDER_SECONDS)
            self.sock.connect(f"/proc/self/fd/{folder}/{self._door.name}")
        finally:
            os.close(folder)


PROVEN = "proven"
SLOW = "slow"


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """Why a rank ended, or must be; or, as a `witness`, where it stood while another one failed.

    killed_by: signal name when it died of one. memory_kill: the kernel ended it for want of memory. cascade: it only
    followed a peer's death, or waited in vain for one. hung: alive, without progress; stopped: and not even scheduled
    (SIGSTOP, a debugger). error: name of its exception's class.
    timestamp: Unix time of the death, or of the last progress of a hung rank.
    certainty: PROVEN (dead, stopped) or SLOW (no progress for longer than its phase allows).
    step, phase: of its last beat. where: "file.py:123 in function", of the project's or user's innermost frame.
    waiting: that frame is in a collective, so that it waits for its peers. left: it ended as if all were done.
    dump: path of the file with its stacks. calls: its last collectives, oldest first: [group, sequence, operation].
    """

    rank: int
    message: str
    node: int = 0
    killed_by: str | None = None
    memory_kill: bool = False
    cascade: bool = False
    hung: bool = False
    stopped: bool = False
    witness: bool = False
    left: bool = False
    error: str = ""
    timestamp: float = 0.0
    certainty: str = PROVEN
    step: int = 0
    phase: str = ""
    where: str = ""
    waiting: bool = False
    dump: str = ""
    calls: Sequence[Sequence] = ()

    @property
    def headline(self) -> str:
        """One line for the terminal."""
        first = self.message.splitlines()[0] if self.message else "no message"
        return f"followed a lost peer ({first[:60]}…)" if self.cascade else first[:300]

    @property
    def kind(self) -> str:
        """What happened, in a word or two."""
        if self.memory_kill:
            return "killed for memory"
        if self.killed_by:
            return f"killed by {self.killed_by}"
        if self.stopped:
            return "stopped"
        if self.hung:
            return "hang"
        return "followed a peer" if self.cascade else self.error or "ended early"

    @property
    def fingerprint(self) -> str:
        """The same for the same trouble in another attempt: kind and place, and no number that varies."""
        return f"{self.kind} at {self.where}" if self.where else self.kind

    @property
    def priority(self) -> tuple[int, float]:
        """Smaller is guiltier: what is proven (killed, stopped), then an own exception, then who is only silent, then
        what a lost peer caused; among equals the first by time."""
        proven = self.killed_by or self.stopped
        return (0 if proven else 3 if self.cascade else 2 if self.hung else 1, self.timestamp)


def is_peer_loss_error(message: str) -> bool:
    """gloo, NCCL and the TCP store report a dead or absent peer as one of these; the cause is to be found at the peer.

    A collective that differs between ranks is reported in the same ways, on ranks that did nothing wrong too.
    """
    return any(sign in message.lower() for sign in _COLLECTIVE_SIGNS)


_COLLECTIVE_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was closed",
    "broken pipe",
    "gloo/transport",
    "timed out waiting",
    "op.preamble",
    "called another exchange",
    "watchdog caught collective operation timeout",
    "ncclremoteerror",
    "remote process exited",
)


@dataclass(frozen=True)
class RankPosition:
    """Where a rank stands, as `WorkerFailure` has it. path: the file with all that was seen of it, where the disk
    took it."""

    where: str = ""
    waiting: bool = False
    calls: tuple = ()
    path: str = ""


class Dump:
    """Taken by threads, so that the agent goes on with its watch. heartbeats: {rank: (pid, path of its heartbeat)}.
    at: when it is begun, by the clock of who asks."""

    def __init__(
        self, pool: ThreadPoolExecutor, folder: Path, heartbeats: Mapping[int, tuple[int, Path]], at: float
    ) -> None:
        with contextlib.suppress(OSError):  # a full disk takes the files, not the watch nor what is seen
            folder.mkdir(parents=True, exist_ok=True)
        self.at = at
        self._futures: dict[int, Future[RankPosition]] = {
            rank: pool.submit(_look_at, pid, heartbeat, folder / f"rank-{rank}.txt")
            for rank, (pid, heartbeat) in heartbeats.items()
        }

    @property
    def done(self) -> bool:
        return all(future.done() for future in self._futures.values())

    def standing(self, rank: int) -> RankPosition:
        """Of a finished dump."""
        future = self._futures.get(rank)
        return RankPosition() if future is None or future.exception() else future.result()


def _look_at(pid: int, heartbeat: Path, path: Path) -> RankPosition:
    stack = take_stack(pid, stacks_path(heartbeat))
    raw = b"" if process_state(pid) == "T" else fetch_records(recorder_socket_path(heartbeat))
    kept = ""
    with contextlib.suppress(OSError):
        path.write_text(stack.text if stack else "no stack: py-spy and faulthandler were both refused\n")
        kept = str(path)
        if raw:
            path.with_suffix(".recorder.json").write_bytes(raw)
    return RankPosition(
        where=stack.where if stack else "",
        waiting=stack.waiting if stack else False,
        calls=tuple(parse_records(raw)),
        path=kept,
    )
