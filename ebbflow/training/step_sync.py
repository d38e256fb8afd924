"""The step sync: one small all-gather per step, in which every rank shares its figures and requests
with all others.

From it, all ranks learn the same facts at the same step: the exact mean loss, the total weight, the
gradient norm, non-finite losses, stragglers, requests to stop or save, and whether all ranks are at
the same step.

On a CPU the host reads the result at once. On a GPU (`DeviceExchange`) the gradients are scaled and
clipped on the device, and the host reads the result one step later, so that it never waits for an
idle device. Then every decision is made one step later, on all ranks alike.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ebbflow.core.events import GuardAction
from ebbflow.training.errors import DivergenceError
from ebbflow.training.gang import Gang
from ebbflow.training.limits import Position, Stop

STEPS_IN_A_ROW = 20
SLOW_RATIO = 1.3
# As a share of the step's time. A slowdown that costs less is not reported.
SMALLEST_SHARE = 0.05
SMALLEST_SECONDS = 0.002  # the same limit in seconds, for very short steps
DATA_SHARE = 0.15


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    action: GuardAction  # SLOW_RANK for a straggler, DATA_BOUND for a rank that waits for data
    rank: int  # the straggler, or the rank that waits longest for its data
    # The share of the step's time that is lost, as the mean over consecutive steps, from 0 to 1
    share: float
    usd_per_hour: float  # what the lost time costs; 0 without prices
    # The straggler's own time over the median of the other ranks'; 0 for DATA_BOUND
    ratio: float = 0.0
    seconds: float = 0.0  # the straggler's own time beyond that median, in each step

    @property
    def reason(self) -> str:
        if self.usd_per_hour:
            usd = f", ${self.usd_per_hour:.4f} an hour"
        else:
            usd = ""
        if self.action is GuardAction.DATA_BOUND:
            return f"rank {self.rank} waits for data in {self.share:.0%} of the step{usd}"
        lost = f"{self.seconds * 1000:.0f} ms ({self.share:.0%}) of each step{usd}"
        return f"rank {self.rank} takes {self.ratio:.1f} times as long as the others: {lost}"


class Slowest(NamedTuple):
    rank: int
    ratio: float  # its own time over the median of the other ranks'
    lost_seconds: float  # its own time beyond that median


class PaceMonitor:
    """Detector of slowdowns that last for `STEPS_IN_A_ROW` steps.

    It reports a slowdown once, and can report it again only after a normal step.
    """

    def __init__(self) -> None:
        self._streaks = {
            action: _Streak() for action in (GuardAction.SLOW_RANK, GuardAction.DATA_BOUND)
        }

    def note(
        self,
        own_seconds: Sequence[float],
        data_seconds: Sequence[float],
        step_seconds: float,
        usd_per_second: float = 0.0,
    ) -> list[Slowdown]:
        """Record one step, and return the slowdowns that have now lasted long enough to report.

        Args:
            own_seconds: each rank's time without waiting for other ranks.
            data_seconds: each rank's time for data alone.
            step_seconds: the slowest rank's time for the step.
            usd_per_second: the price of the whole gang.
        """
        whole = max(step_seconds, 1e-9)
        hourly = 3600 * usd_per_second
        rank, ratio, seconds = find_slowest(own_seconds)
        if ratio > SLOW_RATIO:
            lost = seconds / whole
        else:
            lost = 0.0
        waiting = max(range(len(data_seconds)), key=data_seconds.__getitem__)
        share = data_seconds[waiting] / whole
        slow = Slowdown(
            action=GuardAction.SLOW_RANK,
            rank=rank,
            share=lost,
            usd_per_hour=lost * hourly,
            ratio=ratio,
            seconds=seconds,
        )
        bound = Slowdown(
            action=GuardAction.DATA_BOUND, rank=waiting, share=share, usd_per_hour=share * hourly
        )
        least = SMALLEST_SECONDS / whole
        found = [
            self._streaks[slow.action].note(slow, lost > max(SMALLEST_SHARE, least)),
            self._streaks[bound.action].note(bound, share > max(DATA_SHARE, least)),
        ]
        return [drag for drag in found if drag is not None]

    @property
    def now(self) -> str:
        """Description of the current slowdowns for the progress line; "" if there are none."""
        return ", ".join(
            streak.told.reason for streak in self._streaks.values() if streak.told is not None
        )


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
    save_limit_seconds: float = 0.0  # the time for a save of the rank's bytes to become a commit
    # The time left for a last save; infinite if no drain was requested
    stop_seconds: float = math.inf
    own_seconds: float = 0.0  # the time without waiting for other ranks
    # The checksum of the weights before this step; 0 if they are not compared now
    weights_checksum: float = 0.0
    renew: float = 0.0  # whether the rank's memory is about to run out
    failed_save: float = 0.0  # the step of the rank's last save if it failed, else 0
    # Whether the rank has gradients that no optimizer step has used, so that it cannot save
    unsettled: float = 0.0
    # Whether the rank's weights or optimizer state changed since the last update; 0 if not compared
    changed_at_rest: float = 0.0


_LOSS = Row._fields.index("loss_sum")
_WEIGHT = Row._fields.index("weight")
_SQUARES = Row._fields.index("square_sum")


@dataclass(frozen=True)
class StepSync:
    """The `Row` of each rank for one step, equal on all ranks.

    `rows` is empty if there is no new step to read. On a GPU, the rows of a step are often read one
    step later.
    """

    rows: list[Row]

    @property
    def at(self) -> Position:
        """The job's position (steps and samples) before the step that `rows` describe."""
        return Position(int(self.rows[0].step) - 1, int(self.rows[0].cursor))

    def merge(self, older: StepSync) -> StepSync:
        """Return this sync with the unmet requests of the previous step's sync, `older`, added."""
        if not older.rows:
            return self
        rows = [
            row._replace(
                stop=max(row.stop, before.stop),
                save_due=max(row.save_due, before.save_due),
                renew=max(row.renew, before.renew),
            )
            for row, before in zip(self.rows, older.rows, strict=True)
        ]
        return StepSync(rows)

    @property
    def weight(self) -> float:
        return sum(row.weight for row in self.rows)

    @property
    def loss(self) -> float:
        """Exact mean loss: the sum of all loss sums over the sum of all weights, in float64."""
        return sum(row.loss_sum for row in self.rows) / self.weight

    @property
    def scale(self) -> float:
        """Factor that turns gradients averaged by DDP or FSDP2 into the gradients of the exact mean
        loss.
        """
        return len(self.rows) / self.weight

    @property
    def gradient_norm(self) -> float:
        """Norm of the mean loss's gradient over all parameters, before clipping."""
        return self.scale * math.sqrt(sum(row.square_sum for row in self.rows))

    @property
    def stop(self) -> Stop:
        return Stop(int(max((row.stop for row in self.rows), default=0)))

    @property
    def save_due(self) -> bool:
        return bool(self.rows and self.rows[0].save_due)

    @property
    def saving(self) -> list[int]:
        return [rank for rank, row in enumerate(self.rows) if row.saving]

    @property
    def failed_save(self) -> int:
        return int(max((row.failed_save for row in self.rows), default=0))

    @property
    def settled(self) -> bool:
        return not any(row.unsettled for row in self.rows)

    @property
    def last_save(self) -> tuple[float, float]:
        """Expected seconds of a save on the slowest rank, and the fewest seconds that any rank has
        for a last save.
        """
        return max(row.save_seconds for row in self.rows), min(
            row.stop_seconds for row in self.rows
        )

    @property
    def non_finite(self) -> str:
        """Message that names the ranks with a non-finite loss or gradient; "" if all are finite."""
        bad_losses = [
            str(rank) for rank, row in enumerate(self.rows) if not math.isfinite(row.loss_sum)
        ]
        if bad_losses:
            return f"loss is not finite on rank {', '.join(bad_losses)}"
        bad_gradients = [
            str(rank) for rank, row in enumerate(self.rows) if not math.isfinite(row.square_sum)
        ]
        if bad_gradients:
            return (
                f"gradient is not finite on rank {', '.join(bad_gradients)}, though every loss is"
            )
        return ""

    @property
    def save_limit_seconds(self) -> float:
        return max((row.save_limit_seconds for row in self.rows), default=0.0)

    @property
    def own_seconds(self) -> list[float]:
        return [row.own_seconds for row in self.rows]

    @property
    def step_seconds(self) -> float:
        return max(row.compute_seconds + row.data_seconds for row in self.rows)

    @property
    def renew(self) -> list[int]:
        return [rank for rank, row in enumerate(self.rows) if row.renew]

    def check(self) -> None:
        """Raise DivergenceError if ranks are at different steps or samples, or if the batch's total
        weight is 0.
        """
        places = [(int(row.step), int(row.cursor)) for row in self.rows]
        if len(set(places)) > 1:
            usual = max(places, key=places.count)  # of equally many, those of the lowest rank
            strays = [
                f"rank {rank} at step {p[0]}, sample {p[1]}"
                for rank, p in enumerate(places)
                if p != usual
            ]
            raise DivergenceError(
                f"ranks have gone apart: {'; '.join(strays)}; the others at step {usual[0]}, "
                f"sample {usual[1]}; fix: restart from the last commit, and give every rank the "
                "same configuration and code"
            )
        if self.weight <= 0:
            raise DivergenceError(
                f"step {places[0][0]}: the batch has weight {self.weight:g}; there is nothing to "
                "average"
            )


class DeviceExchange:
    """The step sync of ranks on GPUs.

    `send` never waits for the device. `read` waits for the oldest unread step.

    Rows travel through page-locked memory. Two sets of buffers alternate, so at most two steps may
    be unread.
    """

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        shape = (len(Row._fields),)
        self._own = [torch.empty(shape, dtype=torch.float64, pin_memory=True) for _ in range(2)]
        self._all = [
            torch.empty((gang.world_size, *shape), dtype=torch.float64, pin_memory=True)
            for _ in range(2)
        ]
        self._arrived = [torch.cuda.Event() for _ in range(2)]
        self._next = 0
        self._unread: deque[tuple[int, list[list[torch.cuda.Event]]]] = deque()
        self._spans: list[list[torch.cuda.Event]] = []
        # Of the device's forward and backward passes, in the step that was read last
        self.own_seconds = 0.0

    @property
    def unread(self) -> int:
        return len(self._unread)

    def begin_own(self) -> None:
        """Mark on the device where a micro-batch begins.

        Sharded models wait within it, to gather weights.
        """
        self._spans.append([])
        self._mark()

    def end_own(self) -> None:
        """Mark on the device where a micro-batch ends, before DDP waits for the other ranks'
        gradients.
        """
        if self._spans:
            self._mark()

    def _mark(self) -> None:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        self._spans[-1].append(mark)

    def send(self, row: Row, loss_sum: Tensor, square_sum: Tensor) -> tuple[Tensor, Tensor]:
        """Send this rank's row to all ranks, with its loss sum and sum of squares from the device.

        Return the step's scale and gradient norm. Collective.
        """
        slot = self._next
        self._next = 1 - self._next
        self._own[slot].copy_(torch.tensor(row, dtype=torch.float64))
        own = self._own[slot].to(self._gang.device, non_blocking=True)
        own[_LOSS].copy_(loss_sum)
        own[_SQUARES].copy_(square_sum)
        rows = self._gang.gather(own)
        self._all[slot].copy_(rows, non_blocking=True)
        self._arrived[slot].record()
        spans = self._spans
        self._spans = []
        self._unread.append((slot, spans))
        scale = self._gang.world_size / rows[:, _WEIGHT].sum()
        return scale, scale * rows[:, _SQUARES].sum().sqrt()

    def read(self) -> StepSync:
        """Check and return the rows of the oldest step that is unread."""
        slot, spans = self._unread.popleft()
        self._arrived[slot].synchronize()
        self.own_seconds = (
            sum(span[0].elapsed_time(span[1]) for span in spans if len(span) > 1) / 1000
        )
        sync = StepSync([Row._make(numbers) for numbers in self._all[slot].tolist()])
        sync.check()
        return sync


def find_slowest(own_seconds: Sequence[float]) -> Slowest:
    rank = max(range(len(own_seconds)), key=own_seconds.__getitem__)
    others = [seconds for other, seconds in enumerate(own_seconds) if other != rank]
    if not others:
        return Slowest(rank, 1.0, 0.0)
    usual = statistics.median(others)
    return Slowest(rank, own_seconds[rank] / max(usual, 1e-9), own_seconds[rank] - usual)


def exchange(gang: Gang, row: Row) -> StepSync:
    """Send this rank's row to all ranks.

    Check the rows of all ranks and return them. Collective.
    """
    sync = StepSync([Row._make(numbers) for numbers in gang.gather_numbers(row)])
    sync.check()
    return sync


class _Streak:
    def __init__(self) -> None:
        self._drags: list[Slowdown] = []
        self.told: Slowdown | None = None

    def note(self, drag: Slowdown, dragging: bool) -> Slowdown | None:
        """Record a step. `dragging` says whether it is slow.

        Return the mean slowdown once it has lasted for `STEPS_IN_A_ROW` steps, otherwise None.
        """
        same = (
            not self._drags
            or self._drags[-1].rank == drag.rank
            or drag.action is GuardAction.DATA_BOUND
        )
        if not dragging or not same:
            self._drags = []
            self.told = None
        if not dragging or self.told is not None:
            return None
        self._drags.append(drag)
        if len(self._drags) < STEPS_IN_A_ROW:
            return None
        self.told = replace(
            drag,
            share=statistics.fmean(drag.share for drag in self._drags),
            usd_per_hour=statistics.fmean(drag.usd_per_hour for drag in self._drags),
            ratio=statistics.fmean(drag.ratio for drag in self._drags),
            seconds=statistics.fmean(drag.seconds for drag in self._drags),
        )
        return self.told
