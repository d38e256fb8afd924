"""What an agent tells its ranks while they run: a few bytes of shared memory that each rank reads once per step.

A signal would do the same to a rank that is ready for it, and kill one that is only starting. The record is read when
the rank comes to it, says until when, and costs a fraction of a microsecond.
"""

from __future__ import annotations

import math
import mmap
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SIGTERM = "SIGTERM"
# Why ranks are told to leave; the record holds the place in this list.
CAUSES = (
    "",
    SIGTERM,
    "spot interruption notice",
    "Metaflow's notice of a spot interruption",
    "rehearsed notice",
    "rebalance recommendation",
)
_LEAVE_AT, _CAUSE, _NODE, _SAVES, _WORDS = range(5)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What all ranks of a gang are to do: leave within `seconds`, or save now and go on (seconds: infinite).

    cause: one of CAUSES. node: where it came from.
    """

    seconds: float
    cause: str
    node: int

    @property
    def leave(self) -> bool:
        return math.isfinite(self.seconds)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds if self.leave else None}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Order:
        seconds = data["seconds"]
        return cls(seconds=math.inf if seconds is None else seconds, cause=data["cause"], node=data["node"])


class Control:
    """Created by the agent of a node, opened by its ranks: one writer, no lock, each number stored whole."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._record = memoryview(mmap.mmap(file.fileno(), _WORDS * 8)).cast("q")

    @classmethod
    def create(cls, path: Path) -> Control:
        path.write_bytes(bytes(_WORDS * 8))
        return cls(path)

    def tell(self, order: Order) -> None:
        """Of several times to leave the shortest counts; a save is asked for once each time."""
        record = self._record
        if not order.leave:
            record[_SAVES] += 1
            return
        leave_at = time.monotonic_ns() + int(max(order.seconds, 0.0) * 1e9)
        if record[_LEAVE_AT] and record[_LEAVE_AT] <= leave_at:
            return
        if not record[_LEAVE_AT]:  # what came first is what they leave for; the place before the time, for readers
            record[_NODE], record[_CAUSE] = order.node, CAUSES.index(order.cause)
        record[_LEAVE_AT] = leave_at

    @property
    def leave_at(self) -> float:
        """time.monotonic() by which the ranks must be gone; infinite while nobody has told them to leave."""
        return self._record[_LEAVE_AT] / 1e9 or math.inf

    @property
    def saves(self) -> int:
        """How many times a save was asked for."""
        return self._record[_SAVES]

    @property
    def cause(self) -> str:
        """Why, for people; "" while nobody has told them to leave."""
        record = self._record
        if not record[_LEAVE_AT]:
            return ""
        cause = CAUSES[record[_CAUSE]]
        return cause if cause == SIGTERM else f"{cause} to node {record[_NODE]}"
