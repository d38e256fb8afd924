"""Worker processes of a rank that load data: their number, and prefixes for what they print."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from ebbflow.core.footprint import size_text
from ebbflow.core.process import host_bytes_left
from ebbflow.infra.checks.machine import usable_cores

AHEAD = 2  # batches that each worker reads in advance
_MOST = 8  # workers of one machine that the rule starts
_SHARE = 0.8  # of the free memory and of the free /dev/shm that batches may take
# Pages of its own that a worker has without batches: 18 MB measured
_OWN_BYTES = {"fork": 64 << 20}
_OWN_BYTES_STARTED_ANEW = 256 << 20  # with its own imports of torch: 206 MB measured
_SHARED_MEMORY = "/dev/shm"


def ranks_of_machine() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def choose_workers(asked: int, batch_bytes: int, start: str) -> tuple[int, str]:
    """Return the number of workers for one rank, and an explanation if it is lower than `asked`.

    Args:
        asked: number of workers; -1: as many as the cores of this machine, at most 8, divided by
            its ranks.
        batch_bytes: size of one rank's batch. Workers pass batches through /dev/shm, which is
            memory too. Beside those of the workers, the rank has one that it trains on and one that
            is next.
        start: how workers start: fork, forkserver or spawn.
    """
    ranks = ranks_of_machine()
    if asked < 0:
        wanted = max(1, min(_MOST, int(usable_cores())) // ranks)
    else:
        wanted = asked
    memory = host_bytes_left()
    own = _OWN_BYTES.get(start, _OWN_BYTES_STARTED_ANEW)
    fits = int(min(memory * _SHARE / ranks // (batch_bytes * (AHEAD + 1) + own), wanted))
    limits = [
        (
            fits,
            f"{size_text(memory)} of memory left",
            "a smaller training.batch_size, or fewer ranks",
        )
    ]
    if Path(_SHARED_MEMORY).is_dir() and batch_bytes:
        place = os.statvfs(_SHARED_MEMORY)
        free = place.f_bavail * place.f_frsize
        fits = max(0, int((free * _SHARE / ranks / batch_bytes - 2) // AHEAD))
        limits.append(
            (fits, f"{size_text(free)} of {_SHARED_MEMORY} left", "docker run --shm-size=16g")
        )
    number, left, fix = min(limits)
    if number >= wanted:
        return wanted, ""
    return number, (
        f"{number} workers load data instead of {wanted}: {left} for {ranks} ranks, of which "
        f"batches may take {_SHARE:.0%}; a batch has {size_text(batch_bytes)}, and each worker "
        f"has {AHEAD} waiting and one in work; fix: {fix}"
    )


def count_bytes(content: Any) -> int:
    """Return the total bytes of the tensors in nested dicts, lists and tuples."""
    if isinstance(content, Tensor):
        return content.numel() * content.element_size()
    if isinstance(content, dict):
        return sum(map(count_bytes, content.values()))
    if isinstance(content, (list, tuple)):
        return sum(map(count_bytes, content))
    return 0


def name_output(worker: int) -> None:
    """Prefix each line that this worker process prints with the worker's number."""
    prefix = f"loader worker {worker}: "
    sys.stdout, sys.stderr = (_PrefixedLines(stream, prefix) for stream in (sys.stdout, sys.stderr))


class _PrefixedLines(io.TextIOBase):
    """Text stream that begins each line with a prefix.

    It writes whole lines, so those of several processes do not mix.
    """

    def __init__(self, stream: Any, prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix
        self._rest = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        if self._rest:
            self.write("\n")
        self._stream.flush()
