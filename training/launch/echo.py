"""What a user sees of a gang while it runs: rank 0's lines, and the last words of a rank that failed."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from training.launch.workers import WorkerGroup

_TRACEBACK = "Traceback (most recent call last)"


class Echo:
    """Passes rank 0's whole lines on to this process's own output.

    Up to a traceback: whether that is the cause or only follows from it, the verdict will say.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._path = next((worker.log_path for worker in group.workers if worker.rank == 0), None)
        self._passed = 0
        self._muted = False

    def pass_on(self) -> None:
        if self._path is None or self._muted:
            return
        with open(self._path, "rb") as log:
            log.seek(self._passed)
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._passed += len(whole)
        text, traceback, _ = whole.decode(errors="replace").partition(_TRACEBACK)
        self._muted = bool(traceback)
        sys.stdout.write(text)
        sys.stdout.flush()


def show_last_lines(group: WorkerGroup, ranks: Iterable[int]) -> None:
    """The end of these ranks' logs, and where the whole of it is."""
    for worker in group.workers:
        if worker.rank in ranks:
            say(f"last lines of rank {worker.rank} ({worker.log_path}):")
            say("\n".join(f"| {line}" for line in worker.log_tail().splitlines()))


def say(text: str) -> None:
    print(text, flush=True)
