"""What a notice is, and what a source of notices must do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class NoticeSource(StrEnum):
    """Who says that the machine, or the process, is about to go."""

    SIGNAL = "signal"
    METADATA = "metadata"
    METAFLOW = "metaflow"
    REHEARSAL = "rehearsal"


RECLAIMS = frozenset({"terminate", "stop", "hibernate"})  # EC2's: the pool takes its machine back
# Actions besides those.
LEAVE = "leave"  # SIGTERM: the process is to end, whatever becomes of the machine
REBALANCE = "rebalance"  # a recommendation: the machine is more likely than usual to be taken
STALE_SECONDS = 10.0  # so long after its time a notice counts for nothing: the machine is still there


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One word of one source. ends_at: time.monotonic() here when it takes effect; infinite: no time was said.

    What it is about is (source, action): the same said again is no news, though its time may have become shorter.
    """

    source: NoticeSource
    action: str
    ends_at: float
    heard_at: float = field(default_factory=time.monotonic)
    detail: str = ""

    @property
    def seconds_left(self) -> float:
        return max(self.ends_at - time.monotonic(), 0.0)

    @property
    def reclaims(self) -> bool:
        """Whether it is the pool that takes its machine back, and not somebody who ends the process."""
        return self.action in RECLAIMS


class Source(Protocol):
    """Where notices come from. Only the watcher's thread calls it."""

    name: NoticeSource
    poll_seconds: float

    def begin(self) -> str:
        """Decide, within about a second, whether there is anything to watch: "" or why there is not. Never raises."""
        ...

    def look(self) -> list[Notice]:
        """What the source says now; within its deadline. Raises OSError when it cannot be asked just now."""
        ...
