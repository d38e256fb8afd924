"""The guarantee of deadline and budget: admission, the reserve of attempts on Spot, and clocks that
jump.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from ebbflow.core.errors import Outcome
from ebbflow.core.events import GENERATION_STARTED, PLAN
from ebbflow.core.store import Store
from ebbflow.core.terms import Fallback, Terms
from ebbflow.cost.capacity import choose_placement, read_attempts
from ebbflow.cost.plan.candidates import JobProgress, read_progress
from ebbflow.cost.plan.guarantee import start_hours
from ebbflow.cost.plan.live_forecast import ZONE_SPELLS, simulate_live
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.plan.spot_belief import ZoneSpells
from ebbflow.flows.job import CLOCK_TOLERANCE_SECONDS, ClockReading
from ebbflow.training.launch.messages import end_if_unaffordable
from ebbflow.training.limits import Limits, Stop
from tests.support import virtual_batch
from tests.support.adversary import adversarial_job
from tests.support.capacity import JobLog, batch_config, placed_now, planned, queue, queues
from tests.support.timelines import WALL, event
from tests.support.virtual_batch import BEGAN_UTC, HOUR, VirtualBatch

WORK_HOURS = planned(batch_config(), WALL).ranked[0].case.work_hours

SLOW_COMMITS = (
    "checkpoint.interval=seconds",
    "checkpoint.interval_seconds=900",
    "batch.runnable_minutes=20",
)

BOTH_STATES = (queue("spot-g5", "spot", ["g5"]), queue("on-demand-g5", "on_demand", ["g5"]))


def first_plan(*overrides: str):
    return make_plan(batch_config(*overrides), now_utc=WALL)


def test_a_deadline_that_on_demand_cannot_keep_is_refused_with_the_arithmetic() -> None:
    tight = (f"cost.deadline_hours={WORK_HOURS + 0.44:.3f}", "batch.runnable_minutes=60")
    refused = first_plan(*tight).refusal
    assert refused is not None and refused.outcome is Outcome.DEADLINE
    assert "1.00 h for on-demand capacity (batch.runnable_minutes)" in refused.message
    hours = refused.hint.split("deadline_hours to ")[1].split()[0]
    assert first_plan(f"cost.deadline_hours={hours}", tight[1]).refusal is None, "the hint suffices"
    assert first_plan(tight[0], "batch.runnable_minutes=5").refusal is None
    bold = first_plan(*tight, "cluster.market=spot", "cost.confidence=0.01")
    assert bold.refusal is None, "no guarantee is asked for"
    started = make_plan(batch_config(*tight), now_utc=WALL, progress=JobProgress(started_utc=WALL))
    assert started.refusal is None, "a job that has started goes on"
    assert make_plan(batch_config(*tight), now_utc=WALL, simulated=True).refusal is None
    owned = batch_config(*tight, "cluster.plan_for=local")
    assert make_plan(owned, now_utc=WALL, simulated=False).refusal is None, "its price is stated"


def test_a_budget_that_on_demand_exceeds_is_refused_if_there_is_a_deadline() -> None:
    on_demand = next(
        candidate for candidate in first_plan().ranked if candidate.market == "on_demand"
    )
    low = f"cost.budget_usd={on_demand.expected_usd * 0.7:.4f}"
    refused = first_plan(low).refusal
    assert refused is not None and refused.outcome is Outcome.BUDGET
    assert first_plan(low, "cost.deadline_hours=null").refusal is None


@pytest.mark.slow
def test_no_adversary_makes_an_admitted_job_late_or_exceed_its_budget() -> None:
    found = [adversarial_job(batch_config(*SLOW_COMMITS), seed) for seed in (5, 7, 10)]
    admitted = [job for job in found if job is not None]
    assert len(admitted) > 1 and sum(job.strikes for job in admitted) >= 4
    for job in admitted:
        assert job.late_hours == 0 and job.over_usd == 0, job


def test_a_price_that_triples_within_an_attempt_breaks_no_limit_unless_nobody_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = batch_config("cost.prices=live", *SLOW_COMMITS)
    for seed in (27, 53):
        job = adversarial_job(watched, seed)
        assert job is not None and job.late_hours == 0 and job.over_usd == 0, job
    monkeypatch.setattr(virtual_batch, "ANSWER_SECONDS", math.inf)
    blind = adversarial_job(watched, 27)
    assert blind is not None and blind.over_minutes > 1, blind


def test_without_the_guard_an_adversary_breaks_both_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Terms, "why_leave", lambda *args, **known: "")
    found = adversarial_job(batch_config(*SLOW_COMMITS), 7)
    assert found is not None and found.late_hours > 0 and found.over_usd > 0


def test_a_clock_set_back_neither_delays_on_demand_nor_makes_the_job_late() -> None:
    config = batch_config("cost.deadline_hours=6", "batch.runnable_minutes=20")
    for seed in range(2):
        course = VirtualBatch(
            [True, False, False],
            seed=seed,
            slowest=True,
            clock=lambda at: at - (1800 if at > 600 else 0),
        ).run(config)
        assert course.finished is not None and course.finished <= 6 * HOUR


def test_the_stores_clock_corrects_the_launchers(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    now = time.time()
    assert ClockReading.of(store).ahead_seconds == 0.0
    back = ClockReading.of(store, now - 1800)
    assert back.ahead_seconds == pytest.approx(1800, abs=CLOCK_TOLERANCE_SECONDS)
    assert back.utc == pytest.approx(now, abs=CLOCK_TOLERANCE_SECONDS)


def test_waits_before_the_first_start_count_towards_the_deadline() -> None:
    chosen = {"instance_type": "g5.xlarge", "market": "spot", "usd_per_hour": 1.0}
    plans = [
        event(PLAN, WALL + at, made_utc=WALL + at, chosen=chosen) for at in (0.0, 3600.0, 7200.0)
    ]
    run = plans[0].run
    assert read_progress(plans, run=run).started_utc == WALL
    assert read_progress(plans, run="another").started_utc is None
    start = replace(
        event(GENERATION_STARTED, WALL + 7300, nodes=1, processes_per_node=1), generation=1
    )
    assert read_progress([*plans, start]).started_utc == WALL
    ahead = [
        event(PLAN, WALL + at + 9000, made_utc=WALL + at, chosen=chosen) for at in (0.0, 3600.0)
    ]
    assert read_progress([*ahead, start]).started_utc == WALL, (
        "a launcher's clock that is ahead gives no more time"
    )


def test_refused_zones_leave_untried_pools_unknown() -> None:
    """One pool without capacity says nothing of the others: each is tried before any is tried
    again.
    """
    config = batch_config("cluster.instance_types=[g5]", "batch.runnable_minutes=20")
    log = JobLog()
    where = queues(
        queue("od", "on_demand", ["g5"]),
        *(queue(f"spot-{name}", "spot", ["g5.xlarge"]) for name in "abc"),
    )
    tried = []
    for number in range(4):
        found = placed_now(config, log, number * 1200.0, where=where)
        assert found.market == "spot"
        tried.append(found.queue)
        log.told(
            "never_started", found, (number + 1) * 1200.0 - 1, started=None, job_id=f"job-{number}"
        )
    assert sorted(tried[:3]) == ["spot-a", "spot-b", "spot-c"] and tried[3] == tried[0], tried


def test_an_attempt_leaves_spot_while_on_demand_still_keeps_both_limits() -> None:
    reserve = Fallback(
        seconds=1800, restart_seconds=300, restart_usd=0.1, step_seconds=10, usd=1.0, step_usd=0.01
    )
    terms = Terms(
        usd_per_rank_second=1e-4, budget_usd=10.0, deadline_utc=WALL + 10 * 3600, fallback=reserve
    )
    last = WALL + 10 * 3600 - 1800 - 100 * 10
    assert terms.why_leave(100, spent_usd=5.0, now_utc=last) == ""
    assert "finishing on demand may take 0.78 h" in terms.why_leave(
        100, spent_usd=5.0, now_utc=last + 1
    )
    assert terms.why_leave(100, spent_usd=5.0, now_utc=last - 299, restart=True)
    assert terms.why_leave(100, spent_usd=5.0, now_utc=last - 400, slowness=1.5)
    assert "$8.0100 of $10.0000" in terms.why_leave(100, spent_usd=8.01, now_utc=WALL)
    assert Terms.from_json(terms.to_json()) == terms


def test_a_decision_never_uses_a_time_before_the_last_one_that_batch_reported() -> None:
    config = batch_config("cost.deadline_hours=6", "batch.runnable_minutes=20")
    log = JobLog()
    first = placed_now(config, log, 0.0)
    at = (6 - WORK_HOURS - 0.5) * HOUR
    log.told("reclaimed", first, at, started=60.0)
    plan = planned(config, BEGAN_UTC + at)
    history = read_attempts(log.events)
    back = choose_placement(
        config, plan=plan, history=history, queues=queues(*BOTH_STATES), now_utc=WALL + at - 1800
    )
    assert back.market == "on_demand"


def test_a_rank_and_its_agent_leave_spot_before_the_reserve_is_used_up() -> None:
    reserve = Fallback(
        seconds=1800, restart_seconds=300, restart_usd=0.1, step_seconds=10, usd=1.0, step_usd=0.01
    )
    for left, stays, restarts in ((3000, True, True), (2800, True, False), (2500, False, False)):
        terms = Terms(usd_per_rank_second=1e-4, deadline_utc=time.time() + left, fallback=reserve)
        limits = Limits(terms, world_size=1, elapsed_seconds=lambda: 0.0)
        stop = limits.stop(80)
        assert (stop is Stop.NONE) is stays
        if not stays:
            assert (
                stop.outcome is Outcome.INTERRUPTED
                and "leaves Spot for on-demand" in limits.describe(stop)
            )
        assert limits.stop(0) is Stop.NONE, "the last step is worth no other machine"
        start: Any = SimpleNamespace(terms=terms, generation=2)
        refused = end_if_unaffordable(start, 0, max_steps=80, restart=True)
        assert (refused is None) is restarts
        assert end_if_unaffordable(start, 0, max_steps=80, restart=False) is None, (
            "a first start was checked already"
        )


def test_the_dollar_band_allows_for_a_zone_unlike_the_recorded_ones() -> None:
    """us-east-1a had capacity for 17 % of the time, so half of its jobs cost more than $3.50."""
    config = batch_config("cost.deadline_hours=12", "batch.runnable_minutes=20")
    best = {
        candidate.market: candidate for candidate in reversed(planned(config, BEGAN_UTC).ranked)
    }
    others = {name: zone for name, zone in ZONE_SPELLS.items() if name != "us-east-1a"}
    runs = simulate_live(
        config, best["spot"], best["on_demand"], hours_left=12.0, usd_left=100.0, zones=others
    )
    assert float(numpy.quantile(runs.usd, 0.9)) > 3.5
    assert float(numpy.quantile(runs.usd, 0.1)) < 1.7


def test_a_large_gang_on_spot_pays_for_its_machine_failures() -> None:
    """A failure per 2 h beside capacity that never ends: each costs a start and half an interval."""
    spot = next(pool for pool in planned(batch_config(), BEGAN_UTC).ranked if pool.market == "spot")
    endless = {"zone": ZoneSpells(1.0, (1e6,) * 6, (1e-6,) * 6)}
    sound = replace(spot, case=replace(spot.case, failures_per_hour=0.0, start_chance=1.0))
    frail = replace(spot, case=replace(sound.case, failures_per_hour=0.5))
    simulate = partial(simulate_live, hours_left=None, usd_left=100.0, zones=endless)
    before = simulate(batch_config(), sound, None)
    after = simulate(batch_config(), frail, None)
    each = start_hours(spot) + spot.case.interval_hours / 2
    longer = float(after.hours.mean() - before.hours.mean())
    assert longer == pytest.approx(
        0.5 * each * float(before.hours.mean() - start_hours(spot)), rel=0.05
    )
    assert float(after.losses.mean()) == pytest.approx(0.5 * float(after.hours.mean()), rel=0.05)
    assert float(before.losses.mean()) < 0.05
