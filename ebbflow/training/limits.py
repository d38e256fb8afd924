"""Positions in a job, the limits that stop a job before its last step, and the result of the
training loop.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from statistics import median

from ebbflow.core.errors import Outcome
from ebbflow.core.terms import BUDGET_THRESHOLDS, Terms
from ebbflow.infra.slurm.environment import stop_signals
from ebbflow.training.launch.messages import OrderRecord

# The deadline of a workload's `prepare`, which may download and convert data
PREPARE_SECONDS = 6 * 3600.0
_LEAVING_SECONDS = 2.0  # reserved between the last save and the exit of the process
_STEPS_REMEMBERED = 32
_LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class Position:
    step: int = 0  # the number of steps taken
    cursor: int = 0  # the index of the next sample to read, counted over all ranks and epochs

    def next(self, samples: int) -> Position:
        return Position(self.step + 1, self.cursor + samples)


@dataclass(frozen=True)
class LoopResult:
    outcome: Outcome
    step: int  # the last step that was taken
    message: str = ""  # the reason if the loop stopped early, else ""
    weights_sha256: str | None = None  # the hash of the final weights; None if it was not computed


class Stop(IntEnum):
    """A reason to stop before the last step. The more urgent a reason, the larger its value."""

    NONE = 0
    DEADLINE = 1
    BUDGET = 2
    INTERRUPTED = 3

    @property
    def outcome(self) -> Outcome:
        return Outcome[self.name]


class Limits:
    """The conditions that stop a job early: budget, deadline, SIGTERM and requests of the agent
    (`control`).
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
        self._control = control
        self._stop_seconds = stop_seconds
        self._elapsed_seconds = elapsed_seconds
        # On the clock of time.monotonic(); infinite until a drain is requested
        self._killed_at = math.inf
        self._world_size = world_size
        self._terms_version = 0  # of the agent's new terms that are in force
        self._terms_since = 0.0  # elapsed seconds until which `terms` has the spending
        self._asked = False
        self._why_left = ""
        self._saves_answered = 0
        # Seconds between calls of `stop`
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._looked_at: float | None = None
        self._told = {
            share for share in BUDGET_THRESHOLDS if terms and share <= terms.last_notified_threshold
        }

    @property
    def usd_per_second(self) -> float:
        """Price of all ranks together, in US dollars per second."""
        if self.terms is None:
            return 0.0
        return self.terms.usd_per_rank_second * self._world_size

    def watch_signals(self) -> None:
        """Install handlers that request a drain, of SIGTERM and of Slurm's signal before the time
        limit. Call this in the main thread.
        """
        for number in stop_signals(os.environ):
            signal.signal(
                number, lambda *_: self.request_drain(self._stop_seconds - _LEAVING_SECONDS)
            )

    def request_drain(self, seconds: float) -> None:
        """Request a stop after this step, with at most `seconds` left for a last save."""
        self._asked = True
        self._killed_at = min(self._killed_at, time.monotonic() + seconds)

    @property
    def drain_requested(self) -> bool:
        if self._control is not None:
            leave_at = self._control.leave_at
            if leave_at < math.inf:
                self._asked = True
                self._killed_at = min(self._killed_at, leave_at - _LEAVING_SECONDS)
        return self._asked

    def wait_for_drain(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not self.drain_requested and time.monotonic() < limit:
            time.sleep(_LOOK_SECONDS)

    def save_wanted(self) -> bool:
        if self._control is None:
            asked = 0
        else:
            asked = self._control.saves
        wanted = asked > self._saves_answered
        self._saves_answered = asked
        return wanted

    @property
    def stop_seconds(self) -> float:
        return max(self._killed_at - time.monotonic(), 0.0)

    @property
    def spent_usd(self) -> float:
        """The job's cost so far in US dollars, as far as prices are known: all attempts, including
        this one.
        """
        self.follow_terms()
        if self.terms is None:
            return 0.0
        since = self._elapsed_seconds() - self._terms_since
        return self.terms.spent_usd + self.usd_per_second * since

    def follow_terms(self) -> None:
        """Replace the cost terms (budget, price, spending) if the agent has sent new ones."""
        control = self._control
        if control is None or control.terms_version == self._terms_version:
            return
        self._terms_version = control.terms_version
        new = control.read_terms()
        self.terms = new.terms
        self._terms_since = self._elapsed_seconds() - (time.monotonic() - new.at)

    def stop(self, steps_left: int = 0) -> Stop:
        """Return the reason to stop now, or NONE.

        `steps_left` is the number of steps after this one.

        Call this exactly once per step: the time between two calls is taken as the duration of a
        step.
        """
        now = self._elapsed_seconds()
        if self._looked_at is not None:
            self._steps.append(now - self._looked_at)
        self._looked_at = now
        self.follow_terms()
        if self.drain_requested:
            return Stop.INTERRUPTED
        terms = self.terms
        if terms is None:
            return Stop.NONE
        if steps_left > 0:
            why = self._why_leave(terms, steps_left)
            if why:
                self._why_left = why
                return Stop.INTERRUPTED
        if (
            terms.spendable_usd is not None
            and self.spent_usd + self.next_step_usd >= terms.spendable_usd
        ):
            return Stop.BUDGET
        if (
            terms.deadline_utc is not None
            and time.time() >= terms.deadline_utc - terms.reserve_seconds
        ):
            return Stop.DEADLINE
        return Stop.NONE

    def _why_leave(self, terms: Terms, steps_left: int) -> str:
        enough = len(self._steps) == self._steps.maxlen and terms.step_seconds > 0
        if enough:
            slowness = max(1.0, median(self._steps) / terms.step_seconds)
        else:
            slowness = 1.0
        return terms.why_leave(
            steps_left, spent_usd=self.spent_usd, now_utc=time.time(), slowness=slowness
        )

    @property
    def next_step_usd(self) -> float:
        """Upper estimate of the next step's cost in US dollars.

        It assumes the longest recent step, including its save, at a price that may rise during the
        step. Before the first measurement, it is based on the plan's step time.
        """
        if self.terms is None:
            return 0.0
        seconds = max(self._steps, default=self.terms.step_seconds)
        return self.usd_per_second * self.terms.price_rise * seconds

    def new_budget_thresholds(self, stop: Stop) -> list[dict[str, float]]:
        """Return the budget thresholds that were reached since the last call, as data of `budget`
        events.

        If `stop` is BUDGET, all thresholds count as reached, because the unspent remainder is
        reserved for the last save.
        """
        terms = self.terms
        if terms is None or terms.budget_usd is None:
            return []
        spent = self.spent_usd
        reached = {*terms.reached(spent), *(BUDGET_THRESHOLDS if stop is Stop.BUDGET else ())}
        if stop is not Stop.BUDGET:
            reached.discard(BUDGET_THRESHOLDS[-1])  # reported once all ranks agree to stop
        fresh = sorted(reached - self._told)
        self._told |= reached
        known = {
            "spent_usd": spent,
            "budget_usd": terms.budget_usd,
            "reserve_usd": terms.reserve_usd,
        }
        return [{"threshold": share, **known} for share in fresh]

    def describe(self, stop: Stop) -> str:
        terms = self.terms
        if stop is Stop.BUDGET and terms and terms.budget_usd is not None:
            return (
                f"budget: ${self.spent_usd:.4f} spent of ${terms.budget_usd:.4f}, of which "
                f"${terms.reserve_usd:.4f} is kept in reserve (a step costs up to "
                f"${self.next_step_usd:.4f}); fix: run the job again with a larger "
                "cost.budget_usd"
            )
        if stop is Stop.DEADLINE and terms and terms.deadline_utc is not None:
            over = time.time() - terms.deadline_utc
            return (
                f"deadline: now is {over:+.0f} s from it; fix: run the job again with a later "
                "cost.deadline_hours"
            )
        if stop is not Stop.INTERRUPTED:
            return ""
        if self._why_left and not self._asked:
            return self._why_left
        if self._control is not None:
            cause = self._control.cause
        else:
            cause = ""
        return f"asked to leave ({cause or 'SIGTERM'})"
