"""Evidence about the ranks of a node at one moment: stacks, flight recorders, and why a rank failed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ebbflow.infra.process import process_state
from ebbflow.training.launch.watch.heartbeat import recorder_door, stacks_path
from ebbflow.training.launch.watch.recorder import fetch_records, parse_records
from ebbflow.training.launch.watch.stacks import take_stack

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


def is_collective_error(message: str) -> bool:
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
class Standing:
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
        self._futures: dict[int, Future[Standing]] = {
            rank: pool.submit(_look_at, pid, heartbeat, folder / f"rank-{rank}.txt")
            for rank, (pid, heartbeat) in heartbeats.items()
        }

    @property
    def done(self) -> bool:
        return all(future.done() for future in self._futures.values())

    def standing(self, rank: int) -> Standing:
        """Of a finished dump."""
        future = self._futures.get(rank)
        return Standing() if future is None or future.exception() else future.result()


def _look_at(pid: int, heartbeat: Path, path: Path) -> Standing:
    stack = take_stack(pid, stacks_path(heartbeat))
    raw = b"" if process_state(pid) == "T" else fetch_records(recorder_door(heartbeat))
    kept = ""
    with contextlib.suppress(OSError):
        path.write_text(stack.text if stack else "no stack: py-spy and faulthandler were both refused\n")
        kept = str(path)
        if raw:
            path.with_suffix(".recorder.json").write_bytes(raw)
    return Standing(
        where=stack.where if stack else "",
        waiting=stack.waiting if stack else False,
        calls=tuple(parse_records(raw)),
        path=kept,
    )
