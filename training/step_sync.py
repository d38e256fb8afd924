"""The step sync: one small all-gather per step, in which every rank shares its figures and requests with all others.

From it all ranks learn the same facts at the same step: the exact mean loss, the total weight, the gradient norm,
non-finite losses, stragglers, requests to stop or save, and whether all ranks are at the same step.

The host reads the result at once. On a GPU, this makes the host wait for the device at every step. `Row` and `StepSync`
are written so that a later version can avoid the wait: it would keep the rows on the device, scale the gradients and
guard the optimizer step there (`found_inf` of fused AdamW), and read the rows of step s during step s + 1. Every
decision would then be made one step later, on all ranks alike.
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
# As a share of the step's time. A slowdown that costs less is not reported.
SMALLEST_SHARE = 0.05
SMALLEST_SECONDS = 0.002  # the same limit in seconds, for very short steps
DATA_SHARE = 0.15


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """A straggler, or a rank that waits for its data."""

    action: GuardAction  # SLOW_RANK for a straggler, DATA_BOUND for a rank that waits for data
    rank: int  # the straggler, or the rank that waits longest for its data
    share: float  # the share of the step's time that is lost, as the mean over consecutive steps, from 0 to 1
    ratio: float = 0.0  # the straggler's own time over the median of the other ranks'; 0 for DATA_BOUND

    @property
    def reason(self) -> str:
        if self.action is GuardAction.DATA_BOUND:
            return f"rank {self.rank} waits for data in {self.share:.0%} of the step"
        return f"rank {self.rank} takes {self.ratio:.1f} times as long as the others: {self.share:.0%} of the step"


def slowest(own_seconds: Sequence[float]) -> tuple[int, float]:
    """Return the slowest rank, and the ratio of its time to the median of the other ranks'.

    Args:
        own_seconds: for each rank, its time in the step without waiting for other ranks.
    """
    rank = max(range(len(own_seconds)), key=own_seconds.__getitem__)
    others = [seconds for other, seconds in enumerate(own_seconds) if other != rank]
    if not others:
        return rank, 1.0
    return rank, own_seconds[rank] / max(statistics.median(others), 1e-9)


class PaceMonitor:
    """Detector of slowdowns that last for `STEPS_IN_A_ROW` steps.

    A slowdown is reported once. It is reported again if it comes back after a normal step.
    """

    def __init__(self) -> None:
        self._streaks = {action: _Streak() for action in (GuardAction.SLOW_RANK, GuardAction.DATA_BOUND)}

    def note(self, own_seconds: Sequence[float], data_seconds: Sequence[float], step_seconds: float) -> list[Slowdown]:
        """Record a step, and return the slowdowns to report now.

        Args:
            own_seconds: for each rank, its time for data and forward.
            data_seconds: for each rank, its time for data alone.
            step_seconds: the time of the slowest rank up to the step sync.
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
        """A description of the current slowdowns, for the progress line; "" if there are none."""
        return ", ".join(streak.told.reason for streak in self._streaks.values() if streak.told is not None)


class _Streak:
    def __init__(self) -> None:
        self._drags: list[Slowdown] = []
        self.told: Slowdown | None = None

    def note(self, drag: Slowdown, dragging: bool) -> Slowdown | None:
        """Record a step.

        Args:
            drag: the slowdown as measured in this step alone.
            dragging: whether this step was slow enough to count.

        Returns:
            The slowdown with its mean figures, at the step at which it has lasted long enough to be reported; else
            None.
        """
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
    """One rank's data in the step sync, as float64 numbers."""

    step: float  # the number of this step
    cursor: float  # the index of the step's first sample over all ranks
    loss_sum: float  # the sum of the loss over the rank's micro-batches
    weight: float  # the sum of their weights
    square_sum: float  # the rank's share of the squared norm of the reduced gradients
    flops: float  # the floating point operations of its micro-batches
    compute_seconds: float  # the time in forward and backward
    data_seconds: float  # the time waiting for data
    stop: float  # the rank's `Stop` value
    save_due: float = 0.0  # whether to save after this step; only rank 0's value counts
    saving: float = 0.0  # whether a save of this rank is in flight
    save_seconds: float = 0.0  # the expected duration of another save; 0 if unknown
    stop_seconds: float = math.inf  # the time left for a last save; infinite if no drain was requested
    own_seconds: float = 0.0  # the time for data and forward, in which a rank hardly waits for others
    weights_checksum: float = 0.0  # the checksum of the weights before this step; 0 if they are not compared now
    renew: float = 0.0  # whether the rank's memory is about to run out
    failed_save: float = 0.0  # the step of the rank's last save if it failed, else 0
    unsettled: float = 0.0  # whether the rank has gradients that no optimizer step has used, so that it cannot save


@dataclass(frozen=True)
class StepSync:
    """The rows of all ranks for one step, the same on every rank."""

    rows: list[Row]

    @property
    def weight(self) -> float:
        return sum(row.weight for row in self.rows)

    @property
    def loss(self) -> float:
        """Exact mean loss: the sum of all loss sums over the sum of all weights, in float64."""
        return sum(row.loss_sum for row in self.rows) / self.weight

    @property
    def scale(self) -> float:
        """Factor by which gradients are multiplied to become gradients of the mean loss.

        DDP and FSDP2 average gradients over the ranks, where the mean loss has the sum divided by the total weight.
        """
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
        """Whether rank 0 asks all ranks to save after this step."""
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
    def settled(self) -> bool:
        return not any(row.unsettled for row in self.rows)

    @property
    def last_save(self) -> tuple[float, float]:
        """The expected seconds of a save on the slowest rank, and the seconds left for it."""
        return max(row.save_seconds for row in self.rows), min(row.stop_seconds for row in self.rows)

    @property
    def non_finite(self) -> str:
        """A message that names the ranks with a non-finite loss or gradient; "" if all are finite."""
        ranks = [str(rank) for rank, row in enumerate(self.rows) if not math.isfinite(row.loss_sum)]
        if ranks:
            return f"loss is not finite on rank {', '.join(ranks)}"
        ranks = [str(rank) for rank, row in enumerate(self.rows) if not math.isfinite(row.square_sum)]
        if ranks:
            return f"gradient is not finite on rank {', '.join(ranks)}, though every loss is"
        return ""

    @property
    def slowest(self) -> tuple[int, float]:
        """The slowest rank, and the ratio of its own time to the median of the other ranks'."""
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
        """Check that all ranks are at the same step and sample, and that the batch has a weight.

        Raises:
            DivergenceError: if not. It names the ranks in the minority; in a tie, those that differ from the lowest
                rank.
        """
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
    """Send this rank's row to all ranks; check and return the rows of all ranks. Collective."""
    sync = StepSync([Row._make(numbers) for numbers in gang.gather_numbers(row)])
    sync.check()
    return sync
