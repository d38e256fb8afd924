"""Admitted jobs on the virtual AWS Batch under an adversary that watches the job and strikes where
it hurts most.

`adversarial_job` draws a job and an adversary. `tight_job` needs no luck: it gives a job the
tightest limit with which the rule still admits it or still starts it on Spot, and plays the worst
course against it. The job then ends exactly at its limit, so a reserve that is too small by any
term breaks the limit.

    python -m tests.support.adversary --jobs 2000
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.capacity import AttemptHistory, choose_placement
from ebbflow.cost.errors import PlacementError
from ebbflow.cost.plan.guarantee import DECIDE_HOURS, start_hours
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.plan.pools import get_idle_seconds
from ebbflow.infra.batch.queues import QueueState
from tests.support.capacity import batch_config
from tests.support.price_leap import PriceLeap
from tests.support.virtual_batch import (
    BEGAN_UTC,
    BOTH,
    HOUR,
    Adversary,
    Run,
    Strike,
    VirtualBatch,
    planned,
    shipped_catalogue,
)


@dataclass(frozen=True)
class Verdict:
    """Outcome of one job: how late in hours, and how far over its budget in dollars and in minutes
    of on-demand.
    """

    late_hours: float
    over_usd: float
    over_minutes: float
    strikes: int
    moves: int = 0  # attempts on Spot that left for on-demand


class Watcher:
    """An adversary that sees the job: it strikes just before a commit, or at the first steps of a
    start.
    """

    def __init__(self, draw: random.Random, interval_hours: float) -> None:
        self._draw = draw
        self._interval_hours = interval_hours
        self._patience_hours = draw.choice([0.0, 0.0, 0.3, 1.5])
        self._kind = draw.choice(["fail", "reclaim", "both"])
        self._before_commit = draw.random() < 0.7

    def __call__(self, run: Run) -> Strike | None:
        if (run.now - run.started) / HOUR < self._patience_hours or run.restarts > 40:
            return None
        if self._before_commit and run.uncommitted_hours < 0.9 * self._interval_hours:
            return None
        return Strike(
            self._draw.choice(["fail", "reclaim"]) if self._kind == "both" else self._kind
        )


@dataclass
class FailOnce:
    """An adversary that fails the ranks once: at their first step, or just before their first
    commit.
    """

    before_commit: bool
    hang_seconds: float
    struck: bool = False

    def __call__(self, run: Run) -> Strike | None:
        if self.struck:
            return None
        self.struck = True
        if self.before_commit:
            lost_seconds = run.interval_hours * HOUR + self.hang_seconds
        else:
            lost_seconds = 0.0
        return Strike("fail", lost_seconds)


@dataclass
class LastMoment:
    """An adversary that stalls the ranks until the reserve alone is left, and then strikes with the
    most to lose.

    kind: "reclaim" (the ranks hang when a commit is all but durable, and the machine is lost),
    "leave" (the attempt has to leave of itself) or "fail" (the ranks fail as late as they may start
    again, and then "leave").
    """

    kind: str
    hang_seconds: float

    def __call__(self, run: Run) -> Strike | None:
        if run.placement.fallback is None or (self.kind == "reclaim" and not run.commits_next):
            return None
        if self.kind == "fail":
            self.kind = "leave"
            return Strike("fail", _longest(run.restarts_after), for_good=True)
        stall = _longest(run.stays_after)
        if self.kind == "leave":
            return Strike("stall", stall + 0.01, for_good=True)
        until_commit = (run.interval_hours - run.uncommitted_hours) * HOUR
        return Strike("reclaim", stall + until_commit + self.hang_seconds, for_good=True)


@dataclass(frozen=True, kw_only=True)
class TightCase:
    """A course of a job whose deadline or budget is as tight as the rule allows.

    Attributes:
        limit: "deadline_hours" or "budget_usd", of which the tightest is sought. The other one is
            ample.
        adversary: Function that makes the adversary from `survival.hang_floor_seconds`; None if no
            strike is needed.
        queues: The queues.
        admission: Whether the limit is the tightest that is admitted. Otherwise the first attempt
            must be on Spot.
        late_containers: As of `VirtualBatch`. Otherwise Spot capacity comes a second before the
            first wait ends.
    """

    limit: str
    adversary: Callable[[float], Adversary] | None = None
    queues: Mapping[str, QueueState] = field(default_factory=lambda: BOTH)
    admission: bool = False
    late_containers: bool = False

    def tightest(self, config: RunConfig) -> float:
        """Return the tightest limit, a bit more than which is needed."""
        if self.limit == "deadline_hours":
            width = 1 / HOUR
        else:
            width = 1e-4
        most = getattr(config.cost, self.limit)
        return _bisect(
            lambda limit: self._suffices(_with_limit(config, self.limit, limit)), 0.0, most, width
        )[1]

    def _suffices(self, config: RunConfig) -> bool:
        if self.admission:
            plan = make_plan(
                config, now_utc=BEGAN_UTC, catalogue=shipped_catalogue(), queues=self.queues
            )
            return plan.refusal is None
        try:
            first = choose_placement(
                config,
                plan=planned(config, BEGAN_UTC),
                history=AttemptHistory(),
                queues=self.queues,
                now_utc=BEGAN_UTC,
                catalogue=shipped_catalogue(),
            )
        except PlacementError:
            return False
        return first.market == "spot" and first.fallback is not None


def adversarial_job(config: RunConfig, seed: int) -> Verdict | None:
    """Draw limits, capacity, a jump of the launcher's clock and an adversary, and run the job.

    With watched prices, those of Spot triple: at the first commit, or at any moment of the work.

    The budget is 5–35 % above on-demand, the deadline 1.2–2.5 times the work. On-demand starts take
    all of the stated wait. Capacity comes and goes, or never ends. The clock of half of the jobs is
    set back by 30 min after an hour.

    Returns:
        None if the job is not admitted.
    """
    draw = random.Random(seed)
    usual = next(
        candidate
        for candidate in planned(config, BEGAN_UTC).ranked
        if candidate.market == "on_demand"
    )
    # AWS Batch keeps machines after an attempt on Spot, and after one on demand
    idle_hours = get_idle_seconds(config.cluster.plan_for) / HOUR
    idle_usd = 2 * idle_hours * usual.gang_usd_per_hour
    limits = {
        "budget_usd": usual.expected_usd * draw.uniform(1.05, 1.35) + idle_usd,
        "deadline_hours": usual.case.work_hours * draw.uniform(1.2, 2.5),
    }
    config = config.model_copy(update={"cost": config.cost.model_copy(update=limits)})
    if make_plan(config, now_utc=BEGAN_UTC).refusal is not None:
        return None
    length = draw.choice([1, 3, 20, 60])
    up = [up for _ in range(400) for up in [bool(draw.getrandbits(1))] * length]
    skew = draw.choice([0.0, -1800.0])
    watcher = Watcher(draw, usual.case.interval_hours)
    leap = None
    if config.cost.prices != "static":
        first_commit = start_hours(usual) + usual.case.interval_hours
        any_time = draw.uniform(0.0, usual.case.work_hours)
        leap = PriceLeap(draw.choice([first_commit, any_time]) * HOUR, 3.0)
    batch = VirtualBatch(
        up if draw.random() < 0.5 else [True],
        seed=seed,
        adversary=watcher,
        slowest=True,
        clock=lambda second: second + (skew if second > HOUR else 0.0),
        leap=leap,
    )
    return _judge(batch, config, usual.gang_usd_per_hour)


def tight_job(config: RunConfig, case: TightCase) -> Verdict:
    """Run a job of ample limits on Spot, with the limit of the case as tight as the rule allows."""
    tight = _with_limit(config, case.limit, case.tightest(config))
    wait_seconds = DECIDE_HOURS * HOUR - 1.0
    by_deadline = case.limit == "deadline_hours"
    batch = VirtualBatch(
        [not by_deadline or case.late_containers, True],
        gap_seconds=wait_seconds,
        step_seconds=10.0,
        adversary=None
        if case.adversary is None
        else case.adversary(config.survival.hang_floor_seconds),
        slowest=True,
        late_containers=case.late_containers,
        first_second=wait_seconds if case.admission else 0.0,
        patience=1.0,
        queues=case.queues,
    )
    usual = next(
        candidate
        for candidate in planned(config, BEGAN_UTC).ranked
        if candidate.market == "on_demand"
    )
    return _judge(batch, tight, usual.gang_usd_per_hour)


def main() -> None:
    """Print how many drawn jobs were late or over their budget under an adversary."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--jobs", type=int, default=2000, help="number of jobs (default 2000)")
    parser.add_argument("--leap", action="store_true", help="prices of Spot triple at a moment")
    given = parser.parse_args()
    prices = "live" if given.leap else "static"
    config = batch_config(
        f"cost.prices={prices}",
        "checkpoint.interval=seconds",
        "checkpoint.interval_seconds=900",
        "batch.runnable_minutes=20",
    )
    drawn = [adversarial_job(config, seed) for seed in range(given.jobs)]
    verdicts = [verdict for verdict in drawn if verdict is not None]
    late = sum(verdict.late_hours > 1e-6 for verdict in verdicts)
    over = sum(verdict.over_minutes > 1 for verdict in verdicts)
    strikes = sum(verdict.strikes for verdict in verdicts)
    print(
        f"{len(verdicts)} of {given.jobs} jobs admitted, {strikes} strikes: {late} late, {over} "
        "over the budget by more than a minute of on-demand"
    )


def _judge(batch: VirtualBatch, config: RunConfig, usd_per_hour: float) -> Verdict:
    try:
        course = batch.run(config)
    except PlacementError:  # nothing within deadline and budget can go on
        return Verdict(math.inf, math.inf, math.inf, 0)
    if course.finished is None:
        end = math.inf
    else:
        end = course.finished / HOUR
    if config.cost.deadline_hours is None:
        late = 0.0
    else:
        late = max(0.0, end - config.cost.deadline_hours)
    if config.cost.budget_usd is None:
        over = 0.0
    else:
        over = max(0.0, course.usd - config.cost.budget_usd)
    return Verdict(late, over, 60 * over / usd_per_hour, course.strikes, course.moves)


def _longest(allowed: Callable[[float], bool]) -> float:
    """Return the most seconds that are allowed; 0 if none are."""
    return _bisect(lambda seconds: not allowed(seconds), 0.0, 30 * 24 * HOUR, 1e-3)[0]


def _bisect(
    enough: Callable[[float], bool], low: float, high: float, width: float
) -> tuple[float, float]:
    """Narrow an interval until it is at most `width` long.

    `enough` is false at its lower and true at its upper end.
    """
    while high - low > width:
        middle = (low + high) / 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return low, high


def _with_limit(config: RunConfig, name: str, limit: float) -> RunConfig:
    return config.changed("cost", **{name: limit})


if __name__ == "__main__":
    main()
