"""The step sync: one small all-gather per step in which every rank shares its figures and requests with all others.

From it all ranks learn the same facts at the same step: the exact mean loss, the total weight, the gradient norm, a
non-finite number and its rank, ranks that are at different steps, stragglers, and whether to stop.

On a CPU the result is read at once. On a GPU that would make the host wait for the device at every step. There the rows
are to stay on the device, the gradients' scale is computed there, and the optimizer step is guarded there (`found_inf`
of fused AdamW). The host reads the rows of step s while step s + 1 runs, so every decision falls one step later, on all
ranks alike. `Row` and `StepSync` are written for both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ebbflow.infra.events import GuardAction
from ebbflow.training.errors import DivergenceError
from ebbflow.training.gang import Gang
from ebbflow.training.limits import Stop

STEPS_IN_A_ROW = 20
SLOW_RATIO = 1.5
# Of the step's time: below it a slow rank or loader costs too little to be worth a word.
SMALLEST_SHARE = 0.05
SMALLEST_SECONDS = 0.002  # so too where steps are so short that anything is a share of them
DATA_SHARE = 0.15


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """A straggler, or a rank that waits for its data.

    Attributes:
        rank: the straggler, or the rank that waits longest for its data.
        share: lost share of the step's time, the mean over the consecutive steps.
        ratio: the straggler's own time over the median of the others'.
    """

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
    """Return the straggler and its time over the median of the others'.

    Args:
        own_seconds: per rank, the time without waiting for other ranks.
    """
    rank = max(range(len(own_seconds)), key=own_seconds.__getitem__)
    others = [seconds for other, seconds in enumerate(own_seconds) if other != rank]
    if not others:
        return rank, 1.0
    return rank, own_seconds[rank] / max(statistics.median(others), 1e-9)


class PaceMonitor:
    """Detects slowdowns that last. Each is reported once, and again if it returns after a normal step."""

    def __init__(self) -> None:
        self._streaks = {action: _Streak() for action in (GuardAction.SLOW_RANK, GuardAction.DATA_BOUND)}

    def note(self, own_seconds: Sequence[float], data_seconds: Sequence[float], step_seconds: float) -> list[Slowdown]:
        """Record a step and return the slowdowns to report now.

        Args:
            own_seconds: per rank, seconds of data and forward.
            data_seconds: per rank, seconds of data alone.
            step_seconds: of the slowest rank.
        """
        whole = max(step_seconds, 1e-9)
        rank, ratio = slowest(own_seconds)
        lost = (1 - 1 / ratio) * own_seconds[rank] / whole if ratio > SLOW_RATIO else 0.0
        waiting = max(range(len(data_seconds)), key=data_seconds.__getitem__)
        share = data_seconds[waiting] / whole
        slow = Slowdown(action=GuardAction.SLOW_RANK, rank=rank, share=lost, ratio=ratio)
        bound = Slowdown(action=GuardAction.DATA_BOUND, rank=waiting, share=share)
        least = SMALLEST_SECONDS / whole
        found = [
            self._streaks[slow.action].note(slow, lost > max(SMALLEST_SHARE, least)),
            self._streaks[bound.action].note(bound, share > max(DATA_SHARE, least)),
        ]
        return [drag for drag in found if drag is not None]

    @property
    def now(self) -> str:
        """The current slowdown, for the progress line."""
        return ", ".join(streak.told.reason for streak in self._streaks.values() if streak.told is not None)


class _Streak:
    def __init__(self) -> None:
        self._drags: list[Slowdown] = []
        self.told: Slowdown | None = None

    def note(self, drag: Slowdown, dragging: bool) -> Slowdown | None:
        """Return the slowdown, with the means of its streak, at the step at which it has lasted long enough."""
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
        self.told = Slowdown(
            action=drag.action,
            rank=drag.rank,
            share=statistics.fmean(one.share for one in self._drags),
            ratio=statistics.fmean(one.ratio for one in self._drags),
        )
        return self.told


class Row(NamedTuple):
    """One rank's part of the step sync, as float64 numbers.

    Attributes:
        loss_sum, weight, flops: over the rank's micro-batches.
        square_sum: the rank's share of the squared norm of the reduced gradients.
    """

    step: float
    cursor: float
    loss_sum: float
    weight: float
    square_sum: float
    flops: float
    compute_seconds: float
    data_seconds: float
    stop: float
    save_due: float = 0.0  # rank 0's counts
    saving: float = 0.0  # a save of this rank is still under way
    save_seconds: float = 0.0  # that another would take, as far as it is known
    stop_seconds: float = math.inf  # that are left for it, where this rank was told to leave
    own_seconds: float = 0.0  # without waiting for other ranks, as far as they can be told apart: data and forward
    weights_checksum: float = 0.0  # of its weights before this step, where they are to be compared
    renew: float = 0.0  # its memory is about to run out
    failed_save: float = 0.0  # the step that this rank failed to save, 0: its last save is well or under way


@dataclass(frozen=True)
class StepSync:
    """All ranks' rows of one step, the same on every rank."""

    rows: list[Row]

    @property
    def weight(self) -> float:
        return sum(row.weight for row in self.rows)

    @property
    def loss(self) -> float:
        """Exact mean loss: the sum of all ranks' loss sums over the sum of their weights, in float64."""
        return sum(row.loss_sum for row in self.rows) / self.weight

    @property
    def scale(self) -> float:
        """Factor from gradients averaged over ranks (as DDP and FSDP do) to those of the mean loss."""
        return len(self.rows) / self.weight

    @property
    def gradient_norm(self) -> float:
        """Norm of the mean loss's gradient over all parameters, before clipping."""
        return self.scale * math.sqrt(sum(row.square_sum for row in self.rows))

    @property
    def flops(self) -> float:
        return sum(row.flops for row in self.rows)

    @property
    def stop(self) -> Stop:
        return Stop(int(max(row.stop for row in self.rows)))

    @property
    def save_due(self) -> bool:
        """Rank 0's request for a save, so that all ranks save after the same step."""
        return bool(self.rows[0].save_due)

    @property
    def saving(self) -> list[int]:
        """Ranks with a save in flight."""
        return [rank for rank, row in enumerate(self.rows) if row.saving]

    @property
    def failed_save(self) -> int:
        """The newest step that a rank failed to save, or 0."""
        return int(max(row.failed_save for row in self.rows))

    @property
    def last_save(self) -> tuple[float, float]:
        """(expected seconds of a save on the slowest rank, seconds left for one)."""
        return max(row.save_seconds for row in self.rows), min(row.stop_seconds for row in self.rows)

    @property
    def non_finite(self) -> str:
        """The non-finite number and its ranks; "" if all are finite."""
        ranks = [str(rank) for rank, row in enumerate(self.rows) if not math.isfinite(row.loss_sum)]
        if ranks:
            return f"loss is not finite on rank {', '.join(ranks)}"
        ranks = [str(rank) for rank, row in enumerate(self.rows) if not math.isfinite(row.square_sum)]
        if ranks:
            return f"gradient is not finite on rank {', '.join(ranks)}, though every loss is"
        return ""

    @property
    def slowest(self) -> tuple[int, float]:
        """The straggler and its own time over the median of the others'."""
        return slowest(self.own_seconds)

    @property
    def own_seconds(self) -> list[float]:
        return [row.own_seconds for row in self.rows]

    @property
    def data_seconds(self) -> list[float]:
        return [row.data_seconds for row in self.rows]

    @property
    def step_seconds(self) -> float:
        """Seconds of the slowest rank up to the step sync."""
        return max(row.compute_seconds + row.data_seconds for row in self.rows)

    @property
    def weights_checksums(self) -> list[float]:
        return [row.weights_checksum for row in self.rows]

    @property
    def renew(self) -> list[int]:
        """Ranks whose memory is about to run out."""
        return [rank for rank, row in enumerate(self.rows) if row.renew]

    def check(self) -> None:
        """Raise DivergenceError if ranks are at different steps or samples. Names the minority, or the higher ranks."""
        places = [(int(row.step), int(row.cursor)) for row in self.rows]
        if len(set(places)) > 1:
            usual = max(places, key=lambda place: (places.count(place), -places.index(place)))
            strays = [f"rank {rank} at step {p[0]}, sample {p[1]}" for rank, p in enumerate(places) if p != usual]
            raise DivergenceError(
                f"ranks have gone apart: {'; '.join(strays)}; the others at step {usual[0]}, sample {usual[1]}; "
                "fix: restart from the last commit, and give every rank the same configuration and code"
            )
        if self.weight <= 0:
            raise DivergenceError(
                f"step {places[0][0]}: the batch has weight {self.weight:g}; there is nothing to average"
            )


def exchange(gang: Gang, row: Row) -> StepSync:
    """Share this rank's row, and check and return all ranks' rows. Collective."""
    sync = StepSync([Row._make(numbers) for numbers in gang.gather_numbers(row)])
    sync.check()
    return sync
