"""A virtual AWS Batch for `cost.capacity`: Spot capacity follows a trace, on a simulated clock.

There is no service behind it. Decisions read what came before from events, as separate processes do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ebbflow.cost.capacity import Placement, batch_attempt_data, choose_placement, read_attempts, with_placement
from ebbflow.cost.plan.candidates import JobProgress
from ebbflow.cost.plan.forecast import ForecastInputs
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.prices.quote import PriceSource
from ebbflow.infra.batch.jobs import BatchAttempt, Cause
from ebbflow.infra.batch.queues import Market, QueueState
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.events import BATCH_ATTEMPT, PLACED, Event
from ebbflow.infra.terms import Fallback, Terms

HOUR = 3600.0
BEGAN_UTC = 1_800_000_000.0  # of every job


def queue(name: str, market: Market | None, types: Sequence[str] = (), **known: Any) -> QueueState:
    """Make a usable queue; on-demand queues run jobs of several nodes. `known` overrides fields."""
    fields = {"multi_node": market == "on_demand", "usable": True, "problem": "", "arn": f"arn:{name}"} | known
    return QueueState(name=name, market=market, instance_types=tuple(types), **fields)


def queues(*states: QueueState) -> dict[str, QueueState]:
    return {state.name: state for state in states}


BOTH = queues(queue("spot-g5", "spot", ["g5"]), queue("on-demand-g5", "on_demand", ["g5"]))


def planned(
    config: RunConfig,
    now_utc: float,
    *,
    share_done: float = 0.0,
    spent_usd: float = 0.0,
    prices: PriceSource | None = None,
) -> Plan:
    """Plan the rest of a job that began at `BEGAN_UTC`, at the static table's prices unless others are given."""
    done = round(config.training.max_steps * share_done)
    progress = JobProgress(done_steps=done, spent_usd=spent_usd, started_utc=BEGAN_UTC)
    return make_plan(config, now_utc=now_utc, progress=progress, prices=prices)


def attempt(cause: Cause, stopped: float, started: float | None, job_id: str = "", *, nodes: int = 1) -> BatchAttempt:
    """Make a finished Batch job. Times in seconds after `BEGAN_UTC`."""
    return BatchAttempt(
        job_id=job_id or f"job-at-{stopped}",
        job_name="train",
        queue="q",
        nodes=nodes,
        status="SUCCEEDED" if cause == "ended" else "FAILED",
        created_utc=BEGAN_UTC + (stopped if started is None else started) - 60,
        started_utc=None if started is None else BEGAN_UTC + started,
        stopped_utc=BEGAN_UTC + stopped,
        exit_code=None,
        reason="",
        cause=cause,
    )


@dataclass
class JobLog:
    """The events of a job as its launcher writes them: placements and ended Batch jobs."""

    events: list[Event] = field(default_factory=list)

    def placed(self, placement: Placement, at: float) -> None:
        self._add(PLACED, at, placement=placement.to_json(), attempt=0, round=1, why=placement.reason)

    def told(self, cause: Cause, placement: Placement, at: float, *, started: float | None, job_id: str = "") -> None:
        """Record how the newest placement ended at second `at`."""
        self._add(BATCH_ATTEMPT, at, **batch_attempt_data(attempt(cause, at, started, job_id), placement))

    def _add(self, name: str, at: float, **data: Any) -> None:
        writer: dict[str, Any] = {"attempt": 0, "generation": 0, "node": 0, "rank": -1, "step": None}
        self.events.append(
            Event(name=name, job="simulated", run="run-1", data=data, t_wall=BEGAN_UTC + at, t_mono=at, **writer)
        )


def placed_now(
    config: RunConfig,
    log: JobLog,
    at: float,
    *,
    share_done: float = 0.0,
    spent_usd: float = 0.0,
    where: Mapping[str, QueueState] | None = None,
) -> Placement:
    """Place the next attempt at second `at` of the job, and record it."""
    plan = planned(config, BEGAN_UTC + at, share_done=share_done, spent_usd=spent_usd)
    history = read_attempts(log.events)
    placement = choose_placement(config, plan=plan, history=history, queues=where or BOTH, now_utc=BEGAN_UTC + at)
    log.placed(placement, at + 0.01)
    return placement


@dataclass
class Course:
    """Course of a job. Times in seconds from its beginning; decisions: (second, placement, remaining work hours)."""

    finished: float | None = None
    usd: float = 0.0
    decisions: list[tuple[float, Placement, float]] = field(default_factory=list)
    spent_before: list[float] = field(default_factory=list)
    log: JobLog = field(default_factory=JobLog)

    @property
    def markets(self) -> list[str]:
        return [placement.market for _, placement, _ in self.decisions]


@dataclass(frozen=True)
class Run:
    """What an adversary sees of a running attempt on Spot. Times in seconds, work in hours."""

    placement: Placement
    started: float
    now: float
    kept_hours: float
    uncommitted_hours: float
    restarts: int


Adversary = Callable[[Run], str]
"""Called at each step of an attempt on Spot. It answers "", "fail" (ranks start again) or "reclaim"."""


@dataclass
class VirtualBatch:
    """A Spot queue and an on-demand queue.

    On-demand starts wait for a random time within the stated limit, or for all of it. An attempt on Spot asks at each
    step whether it must leave, as training does (`ebbflow.infra.terms.Terms.why_leave`).

    Attributes:
        up: Whether the Spot queue has capacity, per `gap_seconds`; the last value holds for ever.
        step_seconds: Time between two questions within an attempt.
        adversary: None reclaims an attempt only when capacity ends.
        slowest: On-demand starts take the whole stated limit.
        clock: Returns the launcher's clock, given the true second.
        queues, prices: The queues, and the prices of the plans.
        capacity: Like `up`, by name of a queue; `up` holds for the other Spot queues.
    """

    up: Sequence[bool]
    gap_seconds: float = 195.0
    seed: int = 0
    step_seconds: float = 60.0
    adversary: Adversary | None = None
    slowest: bool = False
    clock: Callable[[float], float] = float
    queues: Mapping[str, QueueState] = field(default_factory=lambda: BOTH)
    prices: PriceSource | None = None
    capacity: Mapping[str, Sequence[bool]] = field(default_factory=dict)

    def next_change(self, second: float, wanted: bool, queue: str = "") -> float:
        """Return the first time from `second` on at which the queue's capacity is `wanted`; infinite if never."""
        up = self.capacity.get(queue, self.up)
        if up[min(len(up) - 1, int(second // self.gap_seconds))] is wanted:
            return second
        for index in range(int(second // self.gap_seconds) + 1, len(up)):
            if up[index] is wanted:
                return index * self.gap_seconds
        return float("inf")

    def run(self, config: RunConfig) -> Course:
        """Place, run, lose and place again until the job is done or ten times its deadline has passed."""
        course, draw, now, done = Course(), random.Random(self.seed), 0.0, 0.0
        whole = planned(config, BEGAN_UTC, prices=self.prices).ranked[0].case.work_hours
        limit = 10 * (config.cost.deadline_hours or 1000.0) * HOUR
        while now < limit and course.finished is None:
            # Each decision is made by a new process, which knows only what is in the store.
            course.log.events = [Event.from_json(one.to_json()) for one in course.log.events]
            share = min(1.0, done / whole)
            history = read_attempts(course.log.events)
            believed = history.latest_utc(BEGAN_UTC + self.clock(now))
            plan = planned(config, believed, share_done=share, spent_usd=course.usd, prices=self.prices)
            placement = choose_placement(config, plan=plan, history=history, queues=self.queues, now_utc=believed)
            course.log.placed(placement, now + 0.01)
            course.spent_before.append(course.usd)
            course.decisions.append((now, placement, whole - done))
            terms = replace(
                with_placement(plan, placement).terms(spent_usd=course.usd),
                fallback=placement.fallback and Fallback(**placement.fallback),
            )
            pool = with_placement(plan, placement).ranked[0]
            price = pool.gang_usd_per_hour + pool.transfer_usd / pool.paid_hours
            now, done = self._attempt(placement, course, draw, now, done, whole, pool.case, terms, plan.steps, price)
        return course

    def _attempt(
        self,
        placement: Placement,
        course: Course,
        draw: random.Random,
        now: float,
        done: float,
        whole: float,
        case: ForecastInputs,
        terms: Terms,
        steps: int,
        price: float,
    ) -> tuple[float, float]:
        waits, spot = placement.runnable_seconds, placement.market == "spot"
        begins = case.wait_hours * HOUR  # of a reservation
        delay = waits if self.slowest else begins + draw.uniform(0, waits - begins)
        start = self.next_change(now, True, placement.queue) if spot else now + delay
        job = f"job-{now}"
        if start > now + waits:
            course.log.told("never_started", placement, now + waits, started=None, job_id=job)
            return now + waits, done
        startup = max(case.fixed_lost_hours, case.start_hours)
        lost = self.next_change(start, False, placement.queue) if spot else float("inf")
        if not spot:
            end = start + (startup + whole - done) * HOUR
            course.usd += (end - start) / HOUR * price
            course.log.told("ended", placement, end, started=start, job_id=job)
            course.finished = end
            return end, whole
        at, trained, commit, restarts = start + startup * HOUR, 0.0, 0.0, 0
        spent, left = course.usd, whole - done

        def ended(cause: Cause, end: float, kept: float) -> tuple[float, float]:
            course.usd = spent + (end - start) / HOUR * price
            course.log.told(cause, placement, end, started=start, job_id=job)
            return end, done + kept

        while True:
            if lost <= at:
                # Half a commit interval is redone in the mean; with an adversary, all since the last commit.
                kept = commit if self.adversary else max(0.0, trained - case.interval_hours / 2)
                return ended("reclaimed", lost, kept)
            if trained >= left:
                course.finished = at
                return ended("ended", at, left)
            remaining = round((left - trained) / left * steps)
            paid, utc = spent + (at - start) / HOUR * price, BEGAN_UTC + at
            if terms.why_leave(remaining, spent_usd=paid, now_utc=utc):
                return ended("unknown", at, trained)
            seen = Run(placement, start, at, commit, trained - commit, restarts)
            answer = self.adversary(seen) if self.adversary else ""
            if answer == "reclaim":
                return ended("reclaimed", at, commit)
            if answer == "fail":
                remaining = round((left - commit) / left * steps)
                if terms.why_leave(remaining, spent_usd=paid, now_utc=utc, restart=True):
                    return ended("unknown", at, commit)
                trained, restarts = commit, restarts + 1
                at += startup * HOUR
                continue
            step = min(self.step_seconds / HOUR, left - trained)
            if lost < at + step * HOUR:
                trained += (lost - at) / HOUR
                at = lost
                continue
            at, trained = at + step * HOUR, trained + step
            if trained - commit >= case.interval_hours - 1e-9:
                commit = trained
