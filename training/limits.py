"""Where a job is, the reasons to stop before the last step, and how its loop ended."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from ebbflow.infra.errors import Outcome
from ebbflow.infra.terms import BUDGET_THRESHOLDS, Terms
from ebbflow.training.launch.messages import OrderRecord


@dataclass(frozen=True)
class Position:
    """The number of steps taken, and the global index of the first sample that no step has read."""

    step: int = 0
    cursor: int = 0

    def next(self, samples: int) -> Position:
        return Position(self.step + 1, self.cursor + samples)


@dataclass(frozen=True)
class LoopResult:
    """The end of the loop, the same on all ranks.

    Attributes:
        step: the last one taken.
        weights_sha256: None if not computed.
    """

    outcome: Outcome
    step: int
    message: str = ""
    weights_sha256: str | None = None


_LEAVING_SECONDS = 2.0  # from the last save to the end of the process
_STEPS_REMEMBERED = 32
_LOOK_SECONDS = 0.01


class Stop(IntEnum):
    """A reason to stop.

    If ranks differ, the largest counts: a notice leaves the least time, the budget a little more.
    """

    NONE = 0
    DEADLINE = 1
    BUDGET = 2
    INTERRUPTED = 3

    @property
    def outcome(self) -> Outcome:
        return Outcome[self.name]


class Limits:
    """Budget, deadline, SIGTERM and the agent's requests, as reasons to stop.

    Args:
        elapsed_seconds: returns the time since this rank's process started.
        stop_seconds: time from SIGTERM until the process is killed.
        control: the agent's requests, if there is an agent.
    """

    def __init__(
        self,
        terms: Terms | None,
        *,
        world_size: int,
        elapsed_seconds: Callable[[], float],
        stop_seconds: float = math.inf,
        control: OrderRecord | None = None,
    ) -> None:
        self.terms = terms
        self._stop_seconds = stop_seconds
        self._killed_at = math.inf  # time.monotonic(), as far as is known
        self._control = control
        self._saves_answered = 0
        self.usd_per_second = terms.usd_per_rank_second * world_size if terms else 0.0
        self._elapsed_seconds = elapsed_seconds
        self._asked = False
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)  # seconds from one look at the limits to the next
        self._looked_at: float | None = None
        self._told = {share for share in BUDGET_THRESHOLDS if terms and share <= terms.last_notified_threshold}

    def watch_signals(self) -> None:
        """Treat SIGTERM as a drain request from now on. Call it in the main thread."""
        signal.signal(signal.SIGTERM, lambda *_: self.request_drain(self._stop_seconds - _LEAVING_SECONDS))

    def request_drain(self, seconds: float) -> None:
        """Request a stop at the end of the step, with `seconds` left for a save.

        The shortest of several requests counts.
        """
        self._asked = True
        self._killed_at = min(self._killed_at, time.monotonic() + seconds)

    @property
    def drain_requested(self) -> bool:
        """Whether SIGTERM or this node's agent requested a drain."""
        if self._control is not None and (leave_at := self._control.leave_at) < math.inf:
            self._asked = True
            self._killed_at = min(self._killed_at, leave_at - _LEAVING_SECONDS)
        return self._asked

    def wait_for_drain(self, seconds: float) -> None:
        """Wait at most `seconds` for a drain request."""
        limit = time.monotonic() + seconds
        while not self.drain_requested and time.monotonic() < limit:
            time.sleep(_LOOK_SECONDS)

    def save_wanted(self) -> bool:
        """Return whether the agent asked for a save since the last call."""
        asked = 0 if self._control is None else self._control.saves
        wanted = asked > self._saves_answered
        self._saves_answered = asked
        return wanted

    @property
    def stop_seconds(self) -> float:
        """Seconds left for a last save; infinite without a drain request."""
        return max(self._killed_at - time.monotonic(), 0.0)

    @property
    def spent_usd(self) -> float:
        """Dollars that the job has cost at the planned price: ended attempts, plus this one since its start."""
        if self.terms is None:
            return 0.0
        return self.terms.spent_usd + self.usd_per_second * self._elapsed_seconds()

    def stop(self) -> Stop:
        """Return the reason to stop now.

        Call it once per step: the time between two calls estimates the next step's cost.
        """
        self._look()
        if self.drain_requested:
            return Stop.INTERRUPTED
        terms = self.terms
        if terms is None:
            return Stop.NONE
        if terms.spendable_usd is not None and self.spent_usd + self.next_step_usd >= terms.spendable_usd:
            return Stop.BUDGET
        # The reserve pays for the last save; the same seconds are kept back from the deadline.
        reserve_seconds = terms.reserve_usd / self.usd_per_second if self.usd_per_second > 0 else 0.0
        if terms.deadline_utc is not None and time.time() >= terms.deadline_utc - reserve_seconds:
            return Stop.DEADLINE
        return Stop.NONE

    def _look(self) -> None:
        now = self._elapsed_seconds()
        if self._looked_at is not None:
            self._steps.append(now - self._looked_at)
        self._looked_at = now

    @property
    def next_step_usd(self) -> float:
        """The most that the next step may cost.

        The longest recent step with its save or evaluation, at first the plan's figure.
        """
        expected = self.terms.step_seconds if self.terms else 0.0
        return self.usd_per_second * max(self._steps, default=expected)

    def new_budget_thresholds(self, stop: Stop) -> list[dict[str, float]]:
        """Return the budget thresholds that were reached since the last call, as data of `budget` events.

        Args:
            stop: the reason that all ranks agreed on. A stop for the budget reaches every threshold, since the rest of
                the budget is reserved.
        """
        terms = self.terms
        if terms is None or terms.budget_usd is None:
            return []
        spent = self.spent_usd
        reached = {*terms.reached(spent), *(BUDGET_THRESHOLDS if stop is Stop.BUDGET else ())}
        if stop is not Stop.BUDGET:
            reached.discard(BUDGET_THRESHOLDS[-1])  # the ranks agree on it one step later
        fresh = sorted(reached - self._told)
        self._told |= reached
        known = {"spent_usd": spent, "budget_usd": terms.budget_usd, "reserve_usd": terms.reserve_usd}
        return [{"threshold": share, **known} for share in fresh]

    def describe(self, stop: Stop) -> str:
        """Return the arithmetic behind a stop, for the outcome's message."""
        terms = self.terms
        if stop is Stop.BUDGET and terms and terms.budget_usd is not None:
            return (
                f"budget: ${self.spent_usd:.4f} spent of ${terms.budget_usd:.4f}, of which ${terms.reserve_usd:.4f} "
                f"is kept for the last save (a step costs up to ${self.next_step_usd:.4f}); fix: run the job again "
                "with a larger cost.budget_usd"
            )
        if stop is Stop.DEADLINE and terms and terms.deadline_utc is not None:
            over = time.time() - terms.deadline_utc
            return f"deadline: now is {over:+.0f} s from it; fix: run the job again with a later cost.deadline_hours"
        if stop is not Stop.INTERRUPTED:
            return ""
        cause = self._control.cause if self._control is not None else ""
        return f"asked to leave ({cause or 'SIGTERM'})"
