"""One look at all ranks of a node at once: stacks and flight recorders, kept in files before anything is ended."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from infra.process import process_state
from training.launch.watch.observed import recorder_door, stacks_path
from training.launch.watch.recorder import fetch_records, parse_records
from training.launch.watch.stacks import take_stack


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
