"""Who keeps the others waiting, and whether data does: told after so many steps in a row, with the share it costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ebbflow.infra.events import GuardAction

STEPS_IN_A_ROW = 20
SLOW_RATIO = 1.5
# Of the step's time: below it a slow rank or loader costs too little to be worth a word.
SMALLEST_SHARE = 0.05
SMALLEST_SECONDS = 0.002  # so too where steps are so short that anything is a share of them
DATA_SHARE = 0.15


@dataclass(frozen=True, kw_only=True)
class Drag:
    """rank: the one that is slow, or waits longest for its data. share: of the step's time, lost to it; the mean of
    the steps in a row. ratio: its own time over the median of the others'."""

    action: GuardAction
    rank: int
    share: float
    ratio: float = 0.0

    @property
    def reason(self) -> str:
        if self.action is GuardAction.DATA_BOUND:
            return f"rank {self.rank} waits for data in {self.share:.0%} of the step"
        return f"rank {self.rank} takes {self.ratio:.1f} times as long as the others: {self.share:.0%} of the step"


def slowest(own_seconds: Sequence[float]) -> tuple[int, float]:
    """(rank, its time over the median of the others'). own_seconds: what ranks spend without waiting for each other."""
    rank = max(range(len(own_seconds)), key=own_seconds.__getitem__)
    others = [seconds for other, seconds in enumerate(own_seconds) if other != rank]
    if not others:
        return rank, 1.0
    return rank, own_seconds[rank] / max(statistics.median(others), 1e-9)


class PaceWatch:
    """Each drag is told once, when it has lasted; and again when it comes back after a step without it."""

    def __init__(self) -> None:
        self._streaks = {action: _Streak() for action in (GuardAction.SLOW_RANK, GuardAction.DATA_BOUND)}

    def note(self, own_seconds: Sequence[float], data_seconds: Sequence[float], step_seconds: float) -> list[Drag]:
        """One step. Per rank: seconds of data and forward, of data alone. step_seconds: of the longest rank."""
        whole = max(step_seconds, 1e-9)
        rank, ratio = slowest(own_seconds)
        lost = (1 - 1 / ratio) * own_seconds[rank] / whole if ratio > SLOW_RATIO else 0.0
        waiting = max(range(len(data_seconds)), key=data_seconds.__getitem__)
        share = data_seconds[waiting] / whole
        slow = Drag(action=GuardAction.SLOW_RANK, rank=rank, share=lost, ratio=ratio)
        bound = Drag(action=GuardAction.DATA_BOUND, rank=waiting, share=share)
        least = SMALLEST_SECONDS / whole
        found = [
            self._streaks[slow.action].note(slow, lost > max(SMALLEST_SHARE, least)),
            self._streaks[bound.action].note(bound, share > max(DATA_SHARE, least)),
        ]
        return [drag for drag in found if drag is not None]

    @property
    def now(self) -> str:
        """What lasts at the moment, for the line that a human sees."""
        return ", ".join(streak.told.reason for streak in self._streaks.values() if streak.told is not None)


class _Streak:
    def __init__(self) -> None:
        self._drags: list[Drag] = []
        self.told: Drag | None = None

    def note(self, drag: Drag, dragging: bool) -> Drag | None:
        """The drag, with the means of its streak, at the step at which it has lasted long enough."""
        same = not self._drags or self._drags[-1].rank == drag.rank or drag.action is GuardAction.DATA_BOUND
        if not dragging or not same:
            self._drags, self.told = [], None
        if not dragging:
            return None
        if self.told is not None:
            return None
        self._drags.append(drag)
        if len(self._drags) < STEPS_IN_A_ROW:
            return None
        self.told = Drag(
            action=drag.action,
            rank=drag.rank,
            share=statistics.fmean(one.share for one in self._drags),
            ratio=statistics.fmean(one.ratio for one in self._drags),
        )
        return self.told
