"""The guarantee against an adversary at the tightest limits: each term of the reserve is needed,
and they suffice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.terms import Fallback
from ebbflow.cost.capacity import decision
from ebbflow.cost.plan import guarantee
from ebbflow.cost.plan.guarantee import DECIDE_HOURS, delay_hours, start_hours, undone_hours
from ebbflow.cost.plan.pools import Candidate
from tests.support.adversary import FailOnce, LastMoment, TightCase, Verdict, tight_job
from tests.support.capacity import batch_config, queue, queues

JOB = (
    "training.max_steps=30000",
    "batch.runnable_minutes=20",
    "cost.deadline_hours=12",
    "cost.budget_usd=60",
    "checkpoint.interval=seconds",
)
# A loss undoes much: 15 min of work. Or less than a last save may take: 5 s, and 3 s until a hang
# is noticed.
LONG = batch_config(*JOB, "checkpoint.interval_seconds=900")
SHORT = batch_config(*JOB, "checkpoint.interval_seconds=5", "survival.hang_floor_seconds=3")
# A g4dn.xlarge takes four times as long as a g5.xlarge.
MIXED = batch_config(
    *JOB, "checkpoint.interval_seconds=900", "cluster.instance_types=[g5.xlarge,g4dn.xlarge]"
)
FAST_SPOT = queues(queue("spot", "spot", ["g5"]), queue("on-demand", "on_demand", ["g4dn"]))
SLOW_SPOT = queues(queue("spot", "spot", ["g4dn"]), queue("on-demand", "on_demand", ["g5"]))

HOURS = "deadline_hours"
USD = "budget_usd"
LATE_CONTAINER = TightCase(limit=HOURS, late_containers=True)
LOSES_MOST = partial(LastMoment, "reclaim")
LEAVES = partial(LastMoment, "leave")
FAILS_LATE = partial(LastMoment, "fail")


@dataclass(frozen=True)
class Course:
    """A job, its tightest limit and the adversary's course. moves: attempts on Spot that have to
    leave it.
    """

    config: RunConfig
    case: TightCase
    moves: int = 0

    def holds(self, verdict: Verdict) -> bool:
        """Whether the job kept both limits, and its attempts on Spot stayed as long as they were
        meant to.
        """
        in_time = verdict.late_hours * 3600 < 0.1
        within_budget = verdict.over_usd < 1e-4
        return in_time and within_budget and verdict.moves == self.moves


COURSES = {
    "admitted, placed 5 min later on demand": Course(LONG, TightCase(limit=HOURS, admission=True)),
    "admitted with the least budget": Course(LONG, TightCase(limit=USD, admission=True)),
    "container as late as allowed": Course(LONG, LATE_CONTAINER),
    "container as late as allowed, slow saves": Course(SHORT, LATE_CONTAINER),
    "Spot slower than on-demand": Course(MIXED, replace(LATE_CONTAINER, queues=SLOW_SPOT)),
    "failure at the first step": Course(
        LONG, TightCase(limit=HOURS, adversary=partial(FailOnce, False))
    ),
    "failure before the first commit": Course(
        LONG, TightCase(limit=USD, adversary=partial(FailOnce, True))
    ),
}
for limit, name in ((HOURS, "time"), (USD, "money")):
    COURSES |= {
        f"{name}: loss at the last moment": Course(
            LONG, TightCase(limit=limit, adversary=LOSES_MOST)
        ),
        f"{name}: departure at the last moment": Course(
            SHORT, TightCase(limit=limit, adversary=LEAVES), moves=1
        ),
        f"{name}: restart at the last moment": Course(
            SHORT, TightCase(limit=limit, adversary=FAILS_LATE), moves=1
        ),
        f"{name}: loss, on-demand slower than Spot": Course(
            MIXED, TightCase(limit=limit, adversary=LOSES_MOST, queues=FAST_SPOT)
        ),
    }


@pytest.mark.parametrize("name", COURSES)
@pytest.mark.slow
def test_a_job_of_the_tightest_limits_keeps_them_whatever_the_adversary_does(name: str) -> None:
    course = COURSES[name]
    assert course.holds(tight_job(course.config, course.case))


STRONG_FALLBACK = guarantee.make_fallback
Weaker = tuple[str, Callable[..., Any]]
Term = Callable[[RunConfig, Candidate, Candidate], float]


def _save_hours(config: RunConfig) -> float:
    return config.checkpoint.deadline_seconds / 3600


def _hang_hours(config: RunConfig) -> float:
    return config.survival.hang_floor_seconds / 3600


def needing_less(name: str, term: Callable[[RunConfig, Candidate], float]) -> Weaker:
    """Weaken `finish_hours` or `finish_usd` by a term."""
    strong = getattr(guarantee, name)
    return name, lambda config, one: strong(config, one) - term(config, one)


def sparing_more(name: str, term: Term) -> Weaker:
    """Weaken `spare_hours` or `spare_usd` by a term."""
    strong = getattr(guarantee, name)
    return (
        name,
        lambda config, spot, last, left: (
            strong(config, spot, last, left) + term(config, spot, last)
        ),
    )


def keeping_less(name: str, term: Term) -> Weaker:
    """Weaken a field of the reserve of an attempt on Spot by a term."""

    def weaker(config: RunConfig, spot: Candidate, last: Candidate, **more: Any) -> Fallback:
        reserve = STRONG_FALLBACK(config, spot, last, **more)
        return replace(reserve, **{name: getattr(reserve, name) - term(config, spot, last)})

    return "make_fallback", weaker


def counting_a_share(name: str, share: float) -> Weaker:
    """Let the reserve count only a share of each remaining step."""

    def weaker(config: RunConfig, spot: Candidate, last: Candidate, **more: Any) -> Fallback:
        reserve = STRONG_FALLBACK(config, spot, last, **more)
        return replace(reserve, **{name: getattr(reserve, name) * share})

    return "make_fallback", weaker


WEAKER: dict[str, tuple[Weaker, str]] = {
    "admission without D": (
        needing_less("finish_hours", lambda config, one: delay_hours(config)),
        "admitted, placed 5 min later on demand",
    ),
    "admission without a start": (
        needing_less("finish_hours", lambda config, one: start_hours(one)),
        "admitted, placed 5 min later on demand",
    ),
    "admission without a last save": (
        needing_less("finish_hours", lambda config, one: _save_hours(config)),
        "admitted, placed 5 min later on demand",
    ),
    "admission without 5 min to place the job": (
        needing_less("finish_hours", lambda config, one: DECIDE_HOURS),
        "admitted, placed 5 min later on demand",
    ),
    "admission without the dollars of a last save": (
        needing_less("finish_usd", lambda config, one: _save_hours(config) * one.gang_usd_per_hour),
        "admitted with the least budget",
    ),
    "admission without the dollars of idle machines": (
        needing_less("finish_usd", lambda config, one: 300 / 3600 * one.gang_usd_per_hour),
        "admitted with the least budget",
    ),
    "admission without the dollars of storage": (
        needing_less("finish_usd", lambda config, one: one.storage_usd),
        "admitted with the least budget",
    ),
    "start with one start-up on Spot": (
        sparing_more("spare_hours", lambda config, spot, last: start_hours(spot)),
        "container as late as allowed",
    ),
    "start with one start-up on Spot, and a failure": (
        sparing_more("spare_hours", lambda config, spot, last: start_hours(spot)),
        "failure at the first step",
    ),
    "start without what a loss undoes": (
        sparing_more("spare_hours", lambda config, spot, last: undone_hours(config, spot, last)),
        "container as late as allowed",
    ),
    "start without a save when it leaves": (
        sparing_more(
            "spare_hours",
            lambda config, spot, last: _save_hours(config) - undone_hours(config, spot, last),
        ),
        "container as late as allowed, slow saves",
    ),
    "start without the time by which Spot is slower": (
        sparing_more(
            "spare_hours", lambda config, spot, last: spot.case.work_hours - last.case.work_hours
        ),
        "Spot slower than on-demand",
    ),
    "start with the dollars of one start-up": (
        sparing_more(
            "spare_usd", lambda config, spot, last: start_hours(spot) * spot.gang_usd_per_hour
        ),
        "failure before the first commit",
    ),
    "start without the dollars of the lost work": (
        sparing_more(
            "spare_usd",
            lambda config, spot, last: undone_hours(config, spot, last) * spot.gang_usd_per_hour,
        ),
        "failure before the first commit",
    ),
    "start without the dollars of redoing it on demand": (
        sparing_more(
            "spare_usd",
            lambda config, spot, last: undone_hours(config, spot, last) * last.gang_usd_per_hour,
        ),
        "failure before the first commit",
    ),
    "start without the dollars of a save when it leaves": (
        sparing_more(
            "spare_usd", lambda config, spot, last: _save_hours(config) * spot.gang_usd_per_hour
        ),
        "failure before the first commit",
    ),
    "reserve without D": (
        keeping_less("seconds", lambda config, spot, last: 3600 * delay_hours(config)),
        "time: loss at the last moment",
    ),
    "reserve without a start": (
        keeping_less("seconds", lambda config, spot, last: 3600 * start_hours(last)),
        "time: loss at the last moment",
    ),
    "reserve without a last save": (
        keeping_less("seconds", lambda config, spot, last: 3600 * _save_hours(config)),
        "time: loss at the last moment",
    ),
    "reserve without the interval": (
        keeping_less(
            "seconds",
            lambda config, spot, last: 3600 * (spot.case.interval_hours - _save_hours(config)),
        ),
        "time: loss at the last moment",
    ),
    "reserve without hang detection": (
        keeping_less("seconds", lambda config, spot, last: 3600 * _hang_hours(config)),
        "time: loss at the last moment",
    ),
    "reserve without a save when it leaves": (
        keeping_less(
            "seconds",
            lambda config, spot, last: (
                3600 * (_save_hours(config) - undone_hours(config, spot, last))
            ),
        ),
        "time: departure at the last moment",
    ),
    "reserve of an interval at the speed of Spot": (
        keeping_less(
            "seconds",
            lambda config, spot, last: (
                3600 * (undone_hours(config, spot, last) - undone_hours(config, spot, spot))
            ),
        ),
        "time: loss, on-demand slower than Spot",
    ),
    "reserve without a restart": (
        keeping_less("restart_seconds", lambda config, spot, last: 3600 * start_hours(spot)),
        "time: restart at the last moment",
    ),
    "reserve of 97 % of the steps": (
        counting_a_share("step_seconds", 0.97),
        "time: loss at the last moment",
    ),
    "reserve without the dollars of a start": (
        keeping_less("usd", lambda config, spot, last: start_hours(last) * last.gang_usd_per_hour),
        "money: loss at the last moment",
    ),
    "reserve without the dollars of redone work": (
        keeping_less(
            "usd",
            lambda config, spot, last: undone_hours(config, spot, last) * last.gang_usd_per_hour,
        ),
        "money: loss at the last moment",
    ),
    "reserve without the dollars of a last save": (
        keeping_less(
            "usd", lambda config, spot, last: _save_hours(config) * last.gang_usd_per_hour
        ),
        "money: departure at the last moment",
    ),
    "reserve without the dollars of idle machines on Spot and on demand": (
        keeping_less(
            "usd",
            lambda config, spot, last: (
                300 / 3600 * (spot.gang_usd_per_hour + last.gang_usd_per_hour)
            ),
        ),
        "money: departure at the last moment",
    ),
    "reserve without the dollars of a save when it leaves": (
        keeping_less(
            "usd", lambda config, spot, last: _save_hours(config) * spot.gang_usd_per_hour
        ),
        "money: departure at the last moment",
    ),
    "reserve without the dollars of storage": (
        keeping_less("usd", lambda config, spot, last: last.storage_usd),
        "money: departure at the last moment",
    ),
    "reserve of dollars for an interval at the speed of Spot": (
        keeping_less(
            "usd",
            lambda config, spot, last: (
                (undone_hours(config, spot, last) - undone_hours(config, spot, spot))
                * last.gang_usd_per_hour
            ),
        ),
        "money: loss, on-demand slower than Spot",
    ),
    "reserve without the dollars of a restart": (
        keeping_less(
            "restart_usd", lambda config, spot, last: start_hours(spot) * spot.gang_usd_per_hour
        ),
        "money: restart at the last moment",
    ),
    "reserve of dollars for 90 % of the steps": (
        counting_a_share("step_usd", 0.9),
        "money: departure at the last moment",
    ),
}


@pytest.mark.parametrize("name", WEAKER)
@pytest.mark.slow
def test_the_adversary_finds_a_violation_as_soon_as_a_term_is_weakened(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (function, weaker), course_name = WEAKER[name]
    course = COURSES[course_name]
    monkeypatch.setattr(guarantee, function, weaker)
    monkeypatch.setattr(decision, function, weaker, raising=False)
    assert not course.holds(tight_job(course.config, course.case))
