"""Notices that stand as an agent starts, since an earlier attempt heard them on the same machine: they are waited out.

To leave for one at once would take attempt after attempt for the same notice, and what starts now would hardly begin to
train. Whatever goes with the machine then goes with this one attempt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ebbflow.infra.notices import STALE_SECONDS, Notice, NoticeSource


def stands(notice: Notice) -> bool:
    """One that an attempt before this one may have heard already, of the same machine; a rehearsal is heard once."""
    return notice.reclaims and notice.source is not NoticeSource.REHEARSAL


def wait_seconds(notice: Notice) -> float:
    """Until it counts no more, if the machine is still there."""
    return max(notice.ends_at + STALE_SECONDS - time.monotonic(), 0.0)


class Standing:
    """One node's. open: from the first look at the sources until what stands is over, or is left for after all."""

    def __init__(self) -> None:
        self.open = False
        self._waiting: list[Notice] = []
        self._unrecorded: list[Notice] = []

    def take(self, heard: Sequence[Notice]) -> list[Notice]:
        """What of `heard` stands is waited out from now on; returns the rest."""
        fresh = [one for one in heard if stands(one)]
        self._waiting += fresh
        self._unrecorded += fresh
        return [one for one in heard if one not in fresh]

    @property
    def soonest(self) -> Notice | None:
        """Whose time comes first; None: nothing is waited out any more."""
        over = time.monotonic() - STALE_SECONDS
        self._waiting = [one for one in self._waiting if one.ends_at >= over]
        return min(self._waiting, key=lambda one: one.ends_at, default=None)

    def unrecorded(self) -> list[Notice]:
        """Those that no event tells of yet; each is handed out once."""
        fresh, self._unrecorded = self._unrecorded, []
        return fresh
