"""A virtual AWS Batch for `cost.capacity`: Spot capacity follows a trace, on a simulated clock.

There is no service behind it. Decisions read what came before from events, as separate processes
do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache
from typing import Any

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import BATCH_ATTEMPT, PLACED, Event
from ebbflow.core.terms import Fallback, PriceWatch, Terms
from ebbflow.cost.capacity import (
    Placement,
    batch_attempt_data,
    choose_placement,
    read_attempts,
    with_placement,
)
from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.plan.candidates import JobProgress
from ebbflow.cost.plan.guarantee import busy_hours, start_hours
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.plan.pools import get_idle_seconds
from ebbflow.cost.prices.quote import PriceSource
from ebbflow.infra.batch.jobs import BatchAttempt, Cause
from ebbflow.infra.batch.queues import Market, QueueState
from tests.support.price_leap import LeaptPrices, PriceLeap

HOUR = 3600.0
ANSWER_SECONDS = 2.0  # from a new price to the agents' store, beside the looks
BEGAN_UTC = 1_800_000_000.0  # of every job


def queue(name: str, market: Market | None, types: Sequence[str] = (), **known: Any) -> QueueState:
    """Make a usable queue; on-demand queues run jobs of several nodes. `known` overrides fields."""
    fields = {
        "multi_node": market == "on_demand",
        "usable": True,
        "problem": "",
        "arn": f"arn:{name}",
    } | known
    return QueueState(name=name, market=market, instance_types=tuple(types), **fields)


def queues(*states: QueueState) -> dict[str, QueueState]:
    return {state.name: state for state in states}


BOTH = queues(queue("spot-g5", "spot", ["g5"]), queue("on-demand-g5", "on_demand", ["g5"]))


shipped_catalogue = cache(load_catalogue)


def planned(
    config: RunConfig,
    now_utc: float,
    *,
    share_done: float = 0.0,
    spent_usd: float = 0.0,
    prices: PriceSource | None = None,
) -> Plan:
    """Plan the rest of a job that began at `BEGAN_UTC`, at the static table's prices unless others
    are given.
    """
    done = round(config.training.max_steps * share_done)
    progress = JobProgress(done_steps=done, spent_usd=spent_usd, started_utc=BEGAN_UTC)
    return make_plan(
        config, now_utc=now_utc, catalogue=shipped_catalogue(), progress=progress, prices=prices
    )


def attempt(
    cause: Cause, stopped: float, started: float | None, job_id: str = "", *, nodes: int = 1
) -> BatchAttempt:
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
        self._add(
            PLACED, at, placement=placement.to_json(), attempt=0, round=1, why=placement.reason
        )

    def told(
        self,
        cause: Cause,
        placement: Placement,
        at: float,
        *,
        started: float | None,
        job_id: str = "",
    ) -> None:
        """Record how the newest placement ended at second `at`."""
        self._add(
            BATCH_ATTEMPT, at, **batch_attempt_data(attempt(cause, at, started, job_id), placement)
        )

    def _add(self, name: str, at: float, **data: Any) -> None:
        writer: dict[str, Any] = {
            "attempt": 0,
            "generation": 0,
            "node": 0,
            "rank": -1,
            "step": None,
        }
        self.events.append(
            Event(
                name=name,
                job="simulated",
                run="run-1",
                data=data,
                t_wall=BEGAN_UTC + at,
                t_mono=at,
                **writer,
            )
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
    placement = choose_placement(
        config,
        plan=plan,
        history=history,
        queues=where or BOTH,
        now_utc=BEGAN_UTC + at,
        catalogue=shipped_catalogue(),
    )
    log.placed(placement, at + 0.01)
    return placement


@dataclass
class Course:
    """Course of a job.

    Times in seconds from its beginning; decisions: (second, placement, remaining work hours).
    """

    finished: float | None = None
    usd: float = 0.0
    moves: int = 0  # attempts on Spot that left it for on-demand, or for a reservation
    strikes: int = 0  # of the adversary
    spot_is_gone: bool = False  # by a strike for good
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
    uncommitted_hours: float
    interval_hours: float  # work between two commits
    commits_next: bool  # whether the next step ends with a commit
    restarts: int
    # Whether the attempt may stay after so many more seconds without a step
    stays_after: Callable[[float], bool]
    # Whether its ranks may start again if they fail after so many seconds
    restarts_after: Callable[[float], bool]


@dataclass(frozen=True)
class Strike:
    """An adversary's strike on an attempt on Spot: its ranks stall for `seconds`, then `kind`
    happens.

    kind: "stall" (they go on), "fail" (they start again from the last commit) or "reclaim" (the
    machine is lost). for_good: whether Spot has no capacity for any later attempt.
    """

    kind: str
    seconds: float = 0.0
    for_good: bool = False


Adversary = Callable[[Run], Strike | None]
"""Called at each step of an attempt on Spot."""


@dataclass
class VirtualBatch:
    """A Spot queue and an on-demand queue.

    On-demand starts wait for a random time within the stated limit, or for all of it. An attempt on
    Spot asks at each step whether it must leave, as training does
    (`ebbflow.core.terms.Terms.why_leave`).

    Attributes:
        up: Whether the Spot queue has capacity, per `gap_seconds`; the last value holds for ever.
        step_seconds: Time between two questions within an attempt.
        adversary: None reclaims an attempt only when capacity ends.
        slowest: All takes as long as it may: starts on demand, the last save of each attempt,
            failures on demand.
        late_containers: Containers on Spot are made a second before the last moment that the
            placement allows.
        first_second: Time between the admission of the job and its first placement.
        patience: Number of deadlines after which the job is given up.
        clock: Returns the launcher's clock, given the true second.
        queues, prices: The queues, and the prices of the plans.
        capacity: Like `up`, by name of a queue; `up` holds for the other Spot queues.
        leap: A leap of the Spot prices.
    """

    up: Sequence[bool]
    gap_seconds: float = 195.0
    seed: int = 0
    step_seconds: float = 60.0
    adversary: Adversary | None = None
    slowest: bool = False
    late_containers: bool = False
    first_second: float = 0.0
    patience: float = 10.0
    clock: Callable[[float], float] = float
    queues: Mapping[str, QueueState] = field(default_factory=lambda: BOTH)
    prices: PriceSource | None = None
    capacity: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    leap: PriceLeap | None = None

    def prices_at(self, second: float) -> PriceSource | None:
        if self.leap is None or second < self.leap.at:
            return self.prices
        return LeaptPrices(factor=Decimal(str(self.leap.factor)))

    def next_change(self, second: float, wanted: bool, queue: str = "") -> float:
        """Return the first time from `second` on at which the queue's capacity is `wanted`;
        infinite if never.
        """
        up = self.capacity.get(queue, self.up)
        if up[min(len(up) - 1, int(second // self.gap_seconds))] is wanted:
            return second
        for index in range(int(second // self.gap_seconds) + 1, len(up)):
            if up[index] is wanted:
                return index * self.gap_seconds
        return float("inf")

    def run(self, config: RunConfig) -> Course:
        """Place, run, lose and place again until the job is done or given up."""
        course = Course()
        draw = random.Random(self.seed)
        now = self.first_second
        share_done = 0.0
        whole = planned(config, BEGAN_UTC, prices=self.prices).ranked[0].case.work_hours
        limit = self.patience * (config.cost.deadline_hours or 1000.0) * HOUR
        while now < limit and course.finished is None:
            # Each decision is made by a new process, which knows only what is in the store.
            course.log.events = [Event.from_json(event.to_json()) for event in course.log.events]
            history = read_attempts(course.log.events)
            believed = history.latest_utc(BEGAN_UTC + self.clock(now))
            plan = planned(
                config,
                believed,
                share_done=share_done,
                spent_usd=course.usd,
                prices=self.prices_at(now),
            )
            placement = choose_placement(
                config,
                plan=plan,
                history=history,
                queues=self.queues,
                now_utc=believed,
                catalogue=shipped_catalogue(),
            )
            course.log.placed(placement, now + 0.01)
            course.spent_before.append(course.usd)
            course.decisions.append((now, placement, (1 - share_done) * whole))
            if course.spot_is_gone and placement.market == "spot" and placement.fallback is None:
                break  # nothing but Spot is left to the job
            attempt = _Attempt(self, course, with_placement(plan, placement), placement, now)
            now, kept_share = attempt.run(draw)
            share_done += kept_share * (1 - share_done)
        return course


class _Attempt:
    """One attempt of a job.

    Times in seconds from the job's beginning, work in hours of the attempt's pool.
    """

    def __init__(
        self, batch: VirtualBatch, course: Course, plan: Plan, placement: Placement, placed: float
    ) -> None:
        self._batch = batch
        self._course = course
        self._placement = placement
        self._placed = placed
        self._pool = plan.ranked[0]
        self._steps = plan.steps
        fallback = placement.fallback and Fallback(**placement.fallback)
        self._idle_seconds = get_idle_seconds(plan.backend)
        self._terms = replace(plan.terms(spent_usd=course.usd), fallback=fallback)
        self._usd_per_hour = (
            self._pool.gang_usd_per_hour + self._pool.transfer_usd / self._pool.paid_hours
        )
        self._leap = None
        if batch.leap is not None and placed < batch.leap.at and self._pool.market == "spot":
            self._leap = batch.leap
            watch = PriceWatch(plan.price_seconds, plan.budget_usd)
            look = watch.look_seconds(self._pool.gang_usd_per_hour)
            self._leap_known = batch.leap.at + 2 * look + ANSWER_SECONDS
        if batch.slowest:
            self._save_seconds = plan.reserve_seconds
        else:
            self._save_seconds = 0.0
        self._work = self._pool.case.work_hours
        self._spent_before = course.usd
        # On Spot: the start of the container, the time now, the work that is done and committed,
        # and the restarts.
        self._start = placed
        self._at = placed
        self._trained = 0.0
        self._committed = 0.0
        self._restarts = 0

    def run(self, draw: random.Random) -> tuple[float, float]:
        """Run the attempt.

        Return the second of its end, and the share of the remaining work that it did.
        """
        waits = self._placement.runnable_seconds
        if self._placement.market != "spot":
            begins = self._pool.case.wait_hours * HOUR  # of a reservation
            if self._batch.slowest:
                delay = waits
            else:
                delay = begins + draw.uniform(0, waits - begins)
            return self._run_on_demand(self._placed + delay)
        start = self._batch.next_change(self._placed, True, self._placement.queue)
        if start > self._placed + waits or self._course.spot_is_gone:
            return self._end("never_started", self._placed + waits, None, 0.0)
        if self._batch.late_containers and self._placement.start_by_utc is not None:
            start = self._placement.start_by_utc - BEGAN_UTC - 1.0
        return self._run_on_spot(start)

    def _run_on_demand(self, start: float) -> tuple[float, float]:
        hours = start_hours(self._pool) + self._work
        if self._batch.slowest:
            hours = busy_hours(self._pool)
            self._course.usd += self._pool.storage_usd
        end = start + hours * HOUR + self._save_seconds
        self._course.usd += (end - start) / HOUR * self._usd_per_hour
        self._course.usd += self._idle_seconds / HOUR * self._pool.gang_usd_per_hour
        self._course.finished = end
        return self._end("ended", end, start, self._work)

    def _end(
        self, cause: Cause, end: float, start: float | None, kept: float
    ) -> tuple[float, float]:
        self._course.log.told(
            cause, self._placement, end, started=start, job_id=f"job-{self._placed}"
        )
        return end, kept / self._work if self._work else 1.0

    def _end_on_spot(self, cause: Cause, end: float, kept: float) -> tuple[float, float]:
        self._course.usd = self._usd_at(end)
        if cause != "reclaimed":
            self._course.usd += self._idle_usd(end)
        return self._end(cause, end, self._start, kept)

    def _idle_usd(self, end: float) -> float:
        """Return the dollars of the time for which AWS Batch keeps the machines."""
        usd = self._idle_seconds / HOUR * self._pool.gang_usd_per_hour
        if self._leap is None:
            return usd
        dearer_seconds = max(0.0, end + self._idle_seconds - max(end, self._leap.at))
        return usd + dearer_seconds / HOUR * (self._leap.factor - 1) * self._pool.gang_usd_per_hour

    def _usd_at(self, second: float) -> float:
        usd = self._spent_before + (second - self._start) / HOUR * self._usd_per_hour
        if self._leap is None:
            return usd
        dearer = (self._leap.factor - 1) * self._pool.gang_usd_per_hour
        return usd + max(0.0, second - max(self._start, self._leap.at)) / HOUR * dearer

    def _terms_at(self, second: float) -> tuple[Terms, float]:
        """Return the terms of the ranks, and the dollars that they believe to have spent."""
        if self._leap is None:
            return self._terms, self._usd_at(second)
        if second < self._leap_known:
            told = self._spent_before + (second - self._start) / HOUR * self._usd_per_hour
            return self._terms, told
        usd = self._terms.usd_per_rank_second * self._leap.factor
        spent = self._usd_at(second)
        return self._terms.at_price(usd, spent_usd=spent), spent

    def stays_after(self, seconds: float) -> bool:
        """Return whether the attempt may stay after so many more seconds without a step."""
        return self._why_leave(seconds, self._trained, restart=False) == ""

    def restarts_after(self, seconds: float) -> bool:
        """Return whether the ranks may start again if they fail after so many more seconds."""
        return self._why_leave(seconds, self._committed, restart=True) == ""

    def _why_leave(self, seconds: float, work: float, *, restart: bool) -> str:
        second = self._at + seconds
        steps = round((self._work - work) / self._work * self._steps)
        terms, spent = self._terms_at(second)
        return terms.why_leave(steps, spent_usd=spent, now_utc=BEGAN_UTC + second, restart=restart)

    def _run_on_spot(self, start: float) -> tuple[float, float]:
        adversary = self._batch.adversary
        interval = self._pool.case.interval_hours
        startup_seconds = start_hours(self._pool) * HOUR
        lost = self._batch.next_change(start, False, self._placement.queue)
        self._start = start
        self._at = start + startup_seconds
        while True:
            if lost <= self._at:
                # Half a commit interval is redone in the mean; with an adversary, all since the
                # last commit.
                if adversary:
                    kept = self._committed
                else:
                    kept = max(0.0, self._trained - interval / 2)
                return self._end_on_spot("reclaimed", lost, kept)
            if self._trained >= self._work:
                self._course.finished = self._at + self._save_seconds
                return self._end_on_spot("ended", self._course.finished, self._work)
            if not self.stays_after(0.0):
                self._course.moves += 1
                return self._end_on_spot("unknown", self._at + self._save_seconds, self._trained)
            if adversary is None:
                strike = None
            else:
                strike = adversary(self._seen())
            if strike is not None:
                end = self._suffer(strike, startup_seconds)
                if end is not None:
                    return end
                continue
            step = self._next_step_hours()
            if lost < self._at + step * HOUR:
                self._trained += (lost - self._at) / HOUR
                self._at = lost
                continue
            self._at += step * HOUR
            self._trained += step
            if self._trained - self._committed >= interval - 1e-9:
                self._committed = self._trained

    def _suffer(self, strike: Strike, startup_seconds: float) -> tuple[float, float] | None:
        """Apply a strike of the adversary. Return the end of the attempt if it leads to one."""
        self._course.strikes += 1
        self._course.spot_is_gone |= strike.for_good
        self._at += strike.seconds
        if strike.kind == "reclaim":
            return self._end_on_spot("reclaimed", self._at, self._committed)
        if strike.kind == "fail":
            if not self.restarts_after(0.0):
                self._course.moves += 1
                return self._end_on_spot("unknown", self._at, self._committed)
            self._trained = self._committed
            self._restarts += 1
            self._at += startup_seconds
        return None

    def _next_step_hours(self) -> float:
        return min(self._batch.step_seconds / HOUR, self._work - self._trained)

    def _seen(self) -> Run:
        interval = self._pool.case.interval_hours
        uncommitted = self._trained - self._committed
        return Run(
            placement=self._placement,
            started=self._start,
            now=self._at,
            uncommitted_hours=uncommitted,
            interval_hours=interval,
            commits_next=uncommitted + self._next_step_hours() >= interval - 1e-9,
            restarts=self._restarts,
            stays_after=self.stays_after,
            restarts_after=self.restarts_after,
        )
