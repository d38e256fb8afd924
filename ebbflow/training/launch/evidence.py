"""Evidence about failed ranks: stacks, flight recorders and failure records.

Stacks come from py-spy if tracing is permitted, else from Python's faulthandler, which writes them
on a signal. py-spy with --nonblocking reads the process's memory, so it works even if the process
is stopped or its GIL is held.

torch's flight recorder records the collectives of each rank. In a correct program, the n-th
collective of a process group is the same on all ranks. This module represents a collective as
[group, sequence, operation]: the group's name, n, and the operation's name, followed by the tensor
sizes if they must be equal on all ranks. NCCL has its own recorder. Its collectives have a fourth
element, the state on the device: "scheduled" (queued by the host), "started" (its kernel waits for
the other GPUs) or "completed".
"""

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
from dataclasses import dataclass, replace
from pathlib import Path

from ebbflow.core.json_values import JsonObject
from ebbflow.core.process import process_state
from ebbflow.core.program import IMPORT_ROOT, INSTALLED, PACKAGE_ROOT
from ebbflow.diagnose.nccl_errors import find_message_cause
from ebbflow.training.launch.heartbeat import DUMP_SIGNAL, RECORDER, STACKS

_SPY_SECONDS = 3.0
_STACK_SECONDS = 1.0
_LAST_BYTES = 65536
_MAIN = "MainThread"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)', re.MULTILINE)
_WAITING_FILES = ("training/gang.py", "training/step_sync.py")
_EXCHANGE_FILE = "training/gang.py"
# Functions that exchange numbers between ranks. The frame of their caller shows the rank's
# position.
_EXCHANGE = ("gather", "gather_numbers", "wait")
_ENGINE_FILES = (
    "training/engine/loop.py",
    "training/engine/trainer_setup.py",
    "training/engine/guards/",
    "training/engine/trainer.py",
    "training/session.py",
    "training/evaluation.py",
)
_ENGINE_PLACES = (*_WAITING_FILES, *_ENGINE_FILES)
_WAITING_FUNCTIONS = ("sync_step",)  # the CPU waits here for the GPU, and so for its collectives
_NOT_WAITING = ("/torch/distributed/checkpoint/", "/torch/distributed/elastic/")
# Runs the program whose path and arguments follow, killed together with the thread that waits for
# it.
_DIE_WITH_CALLER = (
    *(sys.executable, "-I", "-S", "-c"),
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execv(sys.argv[1], "
    "sys.argv[1:])",
)

_HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")  # of NCCL's recorder and of gloo's
_SCHEDULED = "scheduled"
_STARTED = "started"
_COMPLETED = "completed"
_KEPT_CALLS = 64
_KEPT_QUEUED = 32  # of calls that the device has not reached
_LEAST_CALLS = 8  # fewer calls do not show which call is usual
_SAME_SIZES = (
    "all_reduce",
    "allreduce",
    "all_gather",
    "allgather",
    "reduce_scatter",
    "broadcast",
    "barrier",
)
_RECORDER_SECONDS = 0.5

Calls = Sequence[Sequence]

PROVEN = "proven"
SLOW = "slow"

_OTHER_SIZE = "op.preamble"
_COLLECTIVE_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was closed",
    "broken pipe",
    "gloo/transport",
    "timed out waiting",
    "ranks came to the end of",
    _OTHER_SIZE,
    "watchdog caught collective operation timeout",
    "ncclremoteerror",
    "ncclsystemerror",
    "ncclinternalerror",
    "nccl communicator was aborted",
    "remote process exited",
)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    name: str

    @property
    def own_code(self) -> bool:
        parts = ("site-packages", "dist-packages", "/lib/python3")
        return not self.file.startswith("<") and not any(part in self.file for part in parts)

    @property
    def exchange(self) -> bool:
        return self.file.endswith(_EXCHANGE_FILE) and self.name.endswith(_EXCHANGE)

    @property
    def collective(self) -> bool:
        if "/torch/distributed/" in self.file:
            return not any(part in self.file for part in _NOT_WAITING)
        return (
            self.file.endswith(_WAITING_FILES)
            or self.name.endswith(_WAITING_FUNCTIONS)
            or "/torch/nn/parallel/distributed.py" in self.file
        )

    def __str__(self) -> str:
        path = Path(self.file)
        real = Path(self.file).resolve()
        if real.is_relative_to(PACKAGE_ROOT):
            shown = str(real.relative_to(PACKAGE_ROOT))
        elif not INSTALLED and real.is_relative_to(IMPORT_ROOT):
            # The checkout's examples and tests
            shown = str(real.relative_to(IMPORT_ROOT))
        else:
            shown = "/".join(path.parts[-2:]).lstrip("/")
        return f"{shown}:{self.line} in {self.name}"


@dataclass(frozen=True)
class StackTrace:
    frames: Sequence[Frame]  # frames of the main thread, innermost first
    text: str  # stacks of all threads, as text
    idle: bool = False  # whether the main thread used no CPU

    @property
    def where(self) -> str:
        """Code location of the process, as "file.py:123 in function"; "" if there are no frames.

        This is the innermost frame in code of Ebbflow or of the user. Functions that only exchange
        numbers between ranks are skipped, since their caller is more informative. If this leaves no
        frame, the result is the innermost of all frames.
        """
        own = [frame for frame in self.frames if frame.own_code and not frame.exchange]
        return next((str(frame) for frame in [*own, *self.frames]), "")

    @property
    def reason(self) -> str:
        """Message of the uncaught C++ exception in `text`; "" if there is no such exception."""
        found = re.search(r"^  what\(\):\s*(.*)", self.text, re.MULTILINE)
        if found:
            return found[1][:300]
        return ""

    @property
    def waiting(self) -> bool:
        """Whether the main thread waits for other ranks.

        On a CPU, the backward pass calls its collectives in C++ from the frame
        `_engine_run_backward`, so an idle thread in that frame counts as waiting.
        """
        for frame in self.frames:
            if frame.collective or (self.idle and frame.name.endswith("_engine_run_backward")):
                return True
            if frame.own_code:
                return False
        return False


@dataclass(frozen=True)
class Mismatch:
    ranks: Sequence[int]  # ranks that are at fault, which called `operation`
    group: str  # name of the process group
    sequence: int  # number of the collective in the group
    operation: str
    expected: str
    others: Sequence[int]  # ranks that called `expected`

    def __str__(self) -> str:
        ranks, others = (", ".join(map(str, ranks)) for ranks in (self.ranks, self.others))
        return (
            f"collective {self.sequence} of group {self.group} is {self.operation} on rank {ranks} "
            f"and {self.expected} on rank {others}"
        )


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """Failure of one rank, or a report of the position of a rank that has not failed.

    In a position report, `witness` is True, and fields about the failure have no meaning.
    """

    rank: int
    message: str  # description of the failure
    node: int = 0
    killed_by: str | None = None  # name of the signal that killed the rank
    # Number of the rank's node (`GangSpec.node`) if the node was lost
    lost_node: int | None = None
    memory_kill: bool = False  # whether the kernel killed the rank because memory ran out
    # Whether the rank failed only because it lost a peer or waited for one until a deadline
    cascade: bool = False
    hung: bool = False  # whether the rank is alive without progress
    stopped: bool = False  # whether the rank is hung because it is stopped (SIGSTOP)
    witness: bool = False
    left: bool = False  # whether the rank has finished with a result
    completed: bool = False  # whether this result is COMPLETED
    error: str = ""  # class name of the rank's exception
    gpu_fault: str = ""  # a fault of the node's GPUs that explains the failure; "" for none
    timestamp: float = 0.0  # Unix time of the rank's death or, if it is alive, of its last progress
    # PROVEN (dead, stopped) or SLOW (without progress for longer than its hang threshold)
    certainty: str = PROVEN
    step: int = 0  # step and phase of the rank's last heartbeat
    phase: str = ""
    where: str = ""  # code location, as in `StackTrace.where`
    waiting: bool = False  # whether that location is in a collective
    idle_seconds: float = 0.0  # how long the rank, alive without progress, has used no CPU time
    dump: str = ""  # path of the file with the rank's stacks
    # Whether the rank's flight recorder did not answer within its time limit
    recorder_silent: bool = False
    calls: Sequence[
        Sequence
    ] = ()  # the rank's last collectives, oldest first (see the module's docstring)

    @property
    def headline(self) -> str:
        if self.message:
            first = self.message.splitlines()[0]
        else:
            first = "no message"
        if self.cascade:
            return f"followed a lost peer ({first[:60]}…)"
        return first[:300]

    @property
    def killed(self) -> bool:
        return self.killed_by is not None or self.lost_node is not None

    @property
    def kind(self) -> str:  # noqa: PLR0911 one return per kind
        if self.memory_kill:
            return "killed for memory"
        if self.lost_node is not None:
            return f"killed by node {self.lost_node}"
        if self.killed_by:
            return f"killed by {self.killed_by}"
        if self.stopped:
            return "stopped"
        if self.gpu_fault:
            return "GPU fault"
        if self.hung:
            return "hang"
        if self.cascade:
            return "followed a peer"
        return self.error or "ended early"

    @property
    def fingerprint(self) -> str:
        """Kind and location of the failure.

        The same failure has the same fingerprint in each attempt.
        """
        if self.where:
            return f"{self.kind} at {self.where}"
        return self.kind

    @property
    def priority(self) -> tuple[int, float]:
        """Sort key: first killed or stopped ranks, then exceptions, then hangs, then cascades; each
        kind by time.
        """
        if self.killed or self.stopped:
            return 0, self.timestamp
        if self.cascade:
            return 3, self.timestamp
        if self.hung:
            return 2, self.timestamp
        return 1, self.timestamp


class Dump:
    """Dump of the stacks and flight recorders of several ranks, made in the threads of `pool`.

    `heartbeats` has the process id and heartbeat file of each rank.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        folder: Path,
        heartbeats: Mapping[int, tuple[int, Path]],
        at: float,
    ) -> None:
        # On a full disk the files are missing, the positions are not
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        self.at = at
        self._futures: dict[int, Future[JsonObject]] = {
            rank: pool.submit(_locate, pid, heartbeat, folder / f"rank-{rank}.txt")
            for rank, (pid, heartbeat) in heartbeats.items()
        }

    @property
    def done(self) -> bool:
        return all(future.done() for future in self._futures.values())

    def position(self, rank: int) -> JsonObject:
        future = self._futures.get(rank)
        if future is None or future.exception():
            return {"where": ""}
        return future.result()


def recorder_variables(torch_version: str) -> dict[str, str]:
    """Return the environment variables that switch on torch's flight recorders.

    NCCL's recorder records starts only with timing. Before torch 2.8, its size had a variable of its
    own; later releases warn about that name.
    """
    variables = {"TORCH_FR_BUFFER_SIZE": "512", "TORCH_NCCL_ENABLE_TIMING": "1"}
    release = tuple(int(part) for part in torch_version.split(".")[:2])
    if release < (2, 8):
        variables["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "512"
    return variables


def is_engine_location(where: str) -> bool:
    """Return whether a code location (see `StackTrace.where`) is in the engine's own collectives.

    All ranks call these in the training loop.
    """
    return where.startswith(_ENGINE_PLACES)


def parse_py_spy(text: str) -> StackTrace:
    threads = json.loads(text)
    main = next((thread for thread in threads if thread["thread_name"] == _MAIN), threads[-1])
    return StackTrace(
        _spy_frames(main), "\n\n".join(map(_describe, threads)), idle=not main["active"]
    )


def parse_faulthandler(text: str) -> StackTrace:
    """Parse faulthandler's output.

    The result has the frames of the thread that faulthandler marks as "current". This thread
    received the signal and is usually the main thread. If it has no Python frames, the result has
    the frames of the last thread in the output, which is the oldest thread.
    """
    blocks = re.split(r"^(?=Thread |Current thread )", text, flags=re.MULTILINE)
    frames: list[Frame] = []
    for block in blocks:
        block_frames = [
            Frame(at["file"], int(at["line"]), at["name"]) for at in _FRAME.finditer(block)
        ]
        if block_frames:
            frames = block_frames
        if block_frames and block.startswith("Current"):
            break
    return StackTrace(frames, text, idle=True)


def read_crash_stack(log: Path) -> StackTrace | None:
    """Return the stack that faulthandler wrote to a rank's log on a fatal signal (SIGSEGV); None if
    there is none.
    """
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    before, fatal, after = text.rpartition("Fatal Python error")
    stack = parse_faulthandler(after)
    if fatal:
        return StackTrace(stack.frames, before[-2000:] + fatal + after, idle=True)
    return None


def parse_traceback(text: str) -> str:
    """Return the code location (see `StackTrace.where`) of an exception, from its traceback; "" if
    it has no frames.
    """
    lines = re.findall(r'  File "(.*)", line (\d+), in (.*)', text)
    frames = [Frame(file, int(line), name) for file, line, name in reversed(lines)]
    return StackTrace(frames, text).where


def parse_records(raw: bytes) -> list[list]:
    """Return the last 64 collectives in a flight recorder's JSON, oldest first; [] if the JSON is
    malformed.

    At most 32 of the 64 are collectives that the device has not started, because a host can be far
    ahead of its device.
    """
    try:
        entries = json.loads(raw).get("entries", [])
        calls = [_call(entry) for entry in entries if not entry.get("is_p2p")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
    queued = next(
        (number for number, call in enumerate(calls) if call[3:] == [_SCHEDULED]), len(calls)
    )
    return calls[: queued + _KEPT_QUEUED][-_KEPT_CALLS:]


def fetch_records(socket_path: Path) -> tuple[bytes, bool]:
    """Return a rank's flight recorder as JSON, and whether the recorder failed to answer in time.

    The recorder is NCCL's, or gloo's if NCCL's is empty. A C++ thread of the rank answers, even
    while Python code is blocked. The limit is 0.5 s.
    """
    raw = b""
    is_silent = False
    for handler in _HANDLERS:
        connection = _UnixConnection(socket_path)
        try:
            with contextlib.closing(connection):
                connection.request("POST", f"/handler/{handler}")
                raw = connection.getresponse().read()
        except TimeoutError:
            is_silent = True
        except (OSError, http.client.HTTPException):  # there is no such recorder
            continue
        if parse_records(raw):
            return raw, False
    return raw, is_silent


def find_mismatch(
    calls: Mapping[int, Calls], places: Mapping[int, str] | None = None
) -> Mismatch | None:
    """Return the first collective of a group for which the ranks called different operations, or
    None.

    The ranks in the minority are at fault. In a tie, the ranks with the less usual operation are at
    fault. This is the operation that followed the preceding operation less often before. If that is
    a tie too, as in a first step, the ranks outside the training loop are at fault; `places` has
    the code location of each rank (`StackTrace.where`).
    """
    for group, sequence, by_rank in _common_places(calls):
        operations = Counter(by_rank.values())
        if len(operations) == 1:
            continue
        in_loop = Counter(
            by_rank[rank]
            for rank in by_rank
            if (places or {}).get(rank, "").startswith(_ENGINE_PLACES)
        )
        habits = {
            operation: (
                count,
                _habit(calls, group, sequence, by_rank, operation),
                in_loop[operation],
            )
            for operation, count in operations.items()
        }
        usual = max(operations, key=habits.__getitem__)
        ranks = sorted(rank for rank, operation in by_rank.items() if operation != usual)
        others = sorted(rank for rank, operation in by_rank.items() if operation == usual)
        odd = next(operation for operation in by_rank.values() if operation != usual)
        return Mismatch(ranks, group, sequence, odd, usual, others)
    return None


def is_unusual_call(calls: Calls) -> bool | None:
    """Return whether a rank's last two calls in a group have never followed each other before.

    None if it has fewer than 8 calls in the group.
    """
    if calls:
        group = calls[-1][0]
    else:
        group = ""
    own = [operation for name, _, operation, *_ in calls if name == group]
    if len(own) < _LEAST_CALLS:
        return None
    pairs = list(itertools.pairwise(own))
    return pairs[-1] not in pairs[:-1]


def find_furthest_behind(calls: Mapping[int, Calls]) -> list[int]:
    """Return the ranks for which the other ranks wait; [] if no rank is behind.

    They are behind in at least one of their process groups and ahead in none. If no rank meets both
    conditions, return all ranks that are behind in a group. With several groups (HSDP), a rank that
    waits in one group falls behind in another one. It does not meet the second condition, because
    it is ahead of the rank for which it waits.
    """
    last: dict[str, dict[int, int]] = {}
    for rank, records in calls.items():
        for group, sequence, *_ in records:
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


def find_device_behind(calls: Mapping[int, Calls]) -> list[int]:
    """Return the ranks whose GPU has not started a collective in which GPUs of other ranks wait; []
    if none is known.

    A rank whose own GPU waits in some collective is not returned, because it waits for another rank
    (HSDP).
    """
    waited: dict[str, int] = {}
    ahead: set[int] = set()
    for rank, records in calls.items():
        for group, sequence, _, *state in records:
            if state == [_STARTED]:
                ahead.add(rank)
                waited[group] = max(waited.get(group, 0), sequence)
    behind: set[int] = set()
    for rank, records in calls.items():
        for group, first in waited.items():
            own = [(sequence, state) for name, sequence, _, *state in records if name == group]
            reached = max((sequence for sequence, state in own if state != [_SCHEDULED]), default=0)
            if own and reached < first:
                behind.add(rank)
    return sorted(behind - ahead)


def has_queued_calls(calls: Calls) -> bool:
    """Return whether the rank's device has not completed all collectives that the host has called
    (NCCL).

    If so, any line of the host's code may wait for the device: a kernel launch blocks if the
    device's queue is full.
    """
    return any(state and state != [_COMPLETED] for _, _, _, *state in calls)


def is_peer_loss_error(message: str) -> bool:
    """Return whether `message` is an error of gloo, NCCL or torch's TCP store about a dead or
    missing peer.

    A system error of NCCL whose words name a cause on its own machine is none, such as a full
    /dev/shm: no peer had to fail first.
    """
    cause = find_message_cause(message)
    if cause is not None and cause.is_local:
        return False
    return any(sign in message.lower() for sign in _COLLECTIVE_SIGNS)


def has_other_size(message: str) -> bool:
    """Return whether a peer sent data of another size than expected, according to an error
    `message`.

    Then ranks have called different collectives.
    """
    return _OTHER_SIZE in message


def _run_py_spy(pid: int) -> StackTrace | None:
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which(
        "py-spy"
    )
    if program is None:
        return None
    try:
        command = [*_DIE_WITH_CALLER, program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SPY_SECONDS)
        if done.returncode == 0:
            return parse_py_spy(done.stdout)
        return None
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError):
        return None


def _signal_faulthandler(pid: int, output: Path) -> StackTrace | None:
    """Signal a process to write its stacks, and return the stacks; None if the process does not
    write any.

    A process without a handler gets no signal, since that would kill it.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
        if not int(caught, 16) >> (DUMP_SIGNAL - 1) & 1:
            return None
        before = output.stat().st_size
        text = ""
        is_running = process_state(pid) == "R"  # the handler itself runs
        os.kill(pid, DUMP_SIGNAL)
        limit = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < limit:
            time.sleep(0.05)
            with open(output) as file:
                file.seek(before)
                newer = file.read()
            if newer and newer == text:
                return replace(parse_faulthandler(newer), idle=not is_running)
            text = newer
    return None


def _spy_frames(thread: dict) -> list[Frame]:
    return [Frame(frame["filename"], frame["line"], frame["name"]) for frame in thread["frames"]]


def _describe(thread: dict) -> str:
    state = ("active" if thread["active"] else "idle") + (
        ", holds the GIL" if thread["owns_gil"] else ""
    )
    lines = [f"  {frame.file}:{frame.line} in {frame.name}" for frame in _spy_frames(thread)]
    return "\n".join([f"thread {thread['thread_name']} ({state})", *lines])


def _call(entry: dict) -> list:
    library, _, name = entry["profiling_name"].rpartition(":")
    sized = any(kind in name.lower() for kind in _SAME_SIZES)
    if sized:
        operation = f"{name} {entry.get('input_sizes')}"
    else:
        operation = name
    if library == "nccl":
        state = [entry["state"]]
    else:
        state = []
    return [str(entry["process_group"][0]), int(entry["collective_seq_id"]), operation, *state]


def _common_places(calls: Mapping[int, Calls]) -> list[tuple[str, int, dict[int, str]]]:
    """Return (group, sequence, {rank: operation}) for each collective that several ranks recorded,
    sorted by sequence.

    Coalesced calls are omitted, because they share a sequence number, and a dump may show a rank
    between two such calls.
    """
    places: dict[tuple[str, int], dict[int, str]] = {}
    coalesced: set[tuple[str, int]] = set()
    for rank, records in calls.items():
        for group, sequence, operation, *_ in records:
            by_rank = places.setdefault((group, sequence), {})
            if rank in by_rank:
                coalesced.add((group, sequence))
            by_rank[rank] = operation
    shared = [
        (*place, by_rank)
        for place, by_rank in places.items()
        if len(by_rank) > 1 and place not in coalesced
    ]
    return sorted(shared, key=lambda place: place[1])


def _habit(
    calls: Mapping[int, Calls],
    group: str,
    sequence: int,
    by_rank: Mapping[int, str],
    operation: str,
) -> int:
    """Count how often `operation` followed the call that precedes it at `sequence`, earlier in the
    run.

    For example, if the call before `sequence` is an all_gather, count the earlier calls of
    `operation` right after an all_gather. Only the calls of ranks that call `operation` at
    `sequence` count.
    """
    count = 0
    for rank in (rank for rank, called in by_rank.items() if called == operation):
        own = [
            (number, name)
            for name_of_group, number, name, *_ in calls[rank]
            if name_of_group == group
        ]
        before = next((name for number, name in own if number == sequence - 1), None)
        pairs = itertools.pairwise(own)
        count += sum(
            first == before and second == operation and number < sequence
            for (_, first), (number, second) in pairs
        )
    return count


class _UnixConnection(http.client.HTTPConnection):
    """HTTP connection over a Unix socket.

    Socket paths are limited to 108 bytes, so it opens the socket's folder and uses a short path
    relative to that.
    """

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_RECORDER_SECONDS)
        self._path = path

    def connect(self) -> None:
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(_RECORDER_SECONDS)
            self.sock.connect(f"/proc/self/fd/{folder}/{self._path.name}")
        finally:
            os.close(folder)


def _locate(pid: int, heartbeat: Path, path: Path) -> JsonObject:
    stack = (
        _run_py_spy(pid)
        or _signal_faulthandler(pid, heartbeat.with_suffix(STACKS))
        or StackTrace((), "")
    )
    raw = b""
    is_silent = False
    if process_state(pid) != "T":
        raw, is_silent = fetch_records(heartbeat.with_suffix(RECORDER))
    kept = ""
    with contextlib.suppress(OSError):
        path.write_text(stack.text or "no stack: py-spy and faulthandler were both refused\n")
        kept = str(path)
        if raw:
            path.with_suffix(".recorder.json").write_bytes(raw)
    return {
        "where": stack.where,
        "waiting": stack.waiting,
        "calls": tuple(parse_records(raw)),
        "recorder_silent": is_silent,
        "dump": kept,
    }
