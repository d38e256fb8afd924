"""What a plan says of dollars and chances: data gravity, quantiles, what is left of a job, job
history.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import FAULT_INJECTED, NODE_STARTED, NOTICE, PLAN, Event
from ebbflow.core.footprint import causal_lm_shape
from ebbflow.core.store import Store
from ebbflow.cost.catalogue import load_catalogue, load_rates
from ebbflow.cost.errors import ReportError
from ebbflow.cost.frontier import find_frontier, render_frontier, render_frontier_page
from ebbflow.cost.job_history import (
    EVIDENCE_WORTH,
    JobHistory,
    JobMeasurements,
    PoolStay,
    load_job_history,
    save_job_record,
    summarize_job,
)
from ebbflow.cost.jobs import get_accumulated_cost, get_cheapest_suitable_instance
from ebbflow.cost.plan.candidates import PlanInputs, feasible_pools, read_progress
from ebbflow.cost.plan.forecast import ForecastInputs
from ebbflow.cost.plan.live_forecast import Forecaster, simulate_live
from ebbflow.cost.plan.plan import KEPT_POOLS, Plan, make_plan
from ebbflow.cost.plan.plan_text import render_plan
from ebbflow.cost.plan.spot_belief import ObservedWait, SpotEvidence, ZoneSpells, believe
from ebbflow.cost.plan.throughput import UNCALIBRATED
from ebbflow.cost.prices.quote import StaticPrices
from ebbflow.cost.prices.recorded import SpotRecord
from tests.support.checks import passed
from tests.support.timelines import WALL, GangLog, event

STEPS = 100_000
VOLUME_USD = 100 * 0.08 / 730  # of `cost.volume_gib_per_node` in us-east-1, per hour
CLUSTER = {"nodes": 1, "plan_for": "kubernetes", "instance_types": ["g5.xlarge"]}


def config(**sections: dict) -> RunConfig:
    given = {"training": {"max_steps": STEPS}, "cluster": CLUSTER, **sections}
    return RunConfig.model_validate(given)


def plan(now: float = WALL, **sections: dict) -> Plan:
    return make_plan(config(**sections), now_utc=now)


def test_a_store_in_another_region_costs_transfer_by_the_list_and_none_at_home():
    near = plan(store="s3://bucket/p", cost={"store_region": "us-east-1"}).chosen
    far = plan(store="s3://bucket/p", cost={"store_region": "us-west-2"}).chosen
    folder = plan().chosen
    assert (near.transfer_usd, folder.transfer_usd) == (
        0.0,
        0.0,
    ) and near.storage_usd > folder.storage_usd
    assert far.expected_usd == pytest.approx(far.compute_usd + far.storage_usd + far.transfer_usd)
    rates = load_rates()
    parameters = causal_lm_shape(config().model).parameters
    leaves = (
        STEPS / 50 * 12 * parameters / 2**30 * rates.egress_usd_per_gb("us-east-1", "us-west-2")
    )
    tokens = STEPS * 32 * 128 / 2**30 * rates.egress_usd_per_gb("us-west-2", "us-east-1")
    assert far.transfer_usd == pytest.approx(leaves + tokens, rel=0.01)
    unknown = plan(store="s3://bucket/p")
    assert any("cost.store_region is not set" in note for note in unknown.notes)


def test_a_cost_without_a_price_counts_as_zero_with_a_note():
    one = plan(cost={"regions": ["us-east-1", "ap-northeast-1"]})
    assert any(
        "storage and volumes in ap-northeast-1: no list price on record" in note
        for note in one.notes
    )
    assert any(
        note.startswith("storage, requests and transfer: list prices, recorded")
        for note in one.notes
    )


def simulated(case: ForecastInputs, hazard: float, wait: float, seed: int) -> tuple[float, float]:
    """(paid hours, hours) of one job, loss by loss as it happens, in a zone whose spells are
    exponential. Nothing of `cost.plan` but the case.
    """
    chance = random.Random(seed)
    left = case.work_hours
    start = max(case.start_hours, case.fixed_lost_hours)
    up = chance.random() < 1 / (1 + hazard * wait)
    paid = 0.0
    waited = 0.0 if up else chance.expovariate(1 / wait)
    while True:
        until = chance.expovariate(hazard)
        if until >= start + left:
            return paid + start + left, paid + start + left + waited
        left -= max(0.0, until - start - case.interval_hours * chance.random())
        paid += until
        waited += chance.expovariate(1 / wait)


def exponential_groups(mean: float) -> tuple[float, ...]:
    """Means of six equal groups of an exponential distribution."""
    edges = [-math.log(1 - share / 6) for share in range(6)]
    means = []
    for low, high in zip(edges, [*edges[1:], math.inf], strict=True):
        inside = (low + 1) * math.exp(-low)
        if math.isfinite(high):
            inside -= (high + 1) * math.exp(-high)
        means.append(6 * inside * mean)
    return tuple(means)


def test_hours_and_dollars_agree_with_a_simulation_of_single_losses() -> None:
    """One zone alone has no spread, so that the belief is that zone."""
    best = next(pool for pool in plan().ranked if pool.market == "spot")
    case = replace(best.case, work_hours=40.0, interval_hours=0.3, speed_log_deviation=0.0)
    best = replace(best, case=case)
    hazard, wait = 0.25, 1.5
    zone = ZoneSpells(0.7, exponential_groups(1 / hazard), exponential_groups(wait))
    drawn = simulate_live(
        config(), best, None, hours_left=None, usd_left=math.inf, zones={"z": zone}
    )
    runs = [simulated(case, hazard, wait, seed) for seed in range(4000)]
    paid = drawn.usd / best.gang_usd_per_hour
    for mine, theirs in ((paid, [run[0] for run in runs]), (drawn.hours, [run[1] for run in runs])):
        assert mine.mean() == pytest.approx(sum(theirs) / len(theirs), rel=0.04)
        ranked = sorted(mine)
        ordered = sorted(theirs)
        for share in (0.1, 0.5, 0.9):
            assert ranked[int(share * len(ranked))] == pytest.approx(
                ordered[int(share * len(ordered))], rel=0.07
            )
    each = case.fixed_lost_hours + case.interval_hours / 2
    expected = (case.start_hours + case.work_hours) / (1 - hazard * each)
    assert expected == pytest.approx(sum(run[0] for run in runs) / len(runs), rel=0.03), (
        "the mean that orders the pools"
    )


def test_the_belief_follows_own_losses_and_waits() -> None:
    before = believe()
    often = believe(SpotEvidence(losses=10.0, hours=10.0))
    seldom = believe(SpotEvidence(losses=0.5, hours=100.0))
    assert seldom.hazard_per_hour < 0.1 < before.hazard_per_hour < 0.5 < often.hazard_per_hour
    assert seldom.share_up > before.share_up > often.share_up
    waits = (ObservedWait(12.0, False, 1.0),) * 5
    assert believe(SpotEvidence(waits=waits)).wait_hours > 1.5 * before.wait_hours
    cut = (ObservedWait(0.3, True, 1.0),) * 5
    short = (ObservedWait(0.3, False, 1.0),) * 5
    assert (
        believe(SpotEvidence(waits=short)).wait_hours < believe(SpotEvidence(waits=cut)).wait_hours
    ), "what ended elsewhere after 0.3 h was no short wait"


def test_the_probability_to_be_in_time_rises_with_the_deadline():
    alone = {**CLUSTER, "market": "spot"}
    hours = plan(cluster=alone).chosen.expected_hours
    chance = [
        plan(
            cluster=alone, cost={"deadline_hours": hours * f, "confidence": 0.01}
        ).live.deadline_probability
        for f in (1.0, 1.5, 3.0, 20.0)
    ]
    assert 0.4 < chance[0] < 0.6 and chance == sorted(chance) and chance[0] < chance[-1] <= 1.0
    ahead = plan().live
    assert (
        ahead.deadline_probability is None
        and ahead.p50_hours < ahead.p90_hours
        and ahead.p50_usd < ahead.p90_usd
    )


def test_a_pool_that_probably_misses_the_deadline_is_not_ranked_by_its_dollars_alone() -> None:
    cluster = {"nodes": 1, "plan_for": "kubernetes", "instance_types": ["g6e.xlarge", "p5.4xlarge"]}
    model = {"hidden_size": 2048, "num_layers": 12, "num_heads": 16}
    given = {"cluster": cluster, "model": model, "fsdp": {"use_mixed_precision": True}}
    free = plan(**given).ranked
    hours = 0.8 * free[0].expected_hours
    bold, careful = (
        plan(**given, cost={"deadline_hours": hours, "confidence": p}) for p in (0.3, 0.9)
    )
    assert str(bold.chosen) == str(free[0]) and bold.chosen.outlook.deadline_probability < 0.9
    assert careful.chosen.expected_usd > bold.chosen.expected_usd
    assert careful.chosen.outlook.deadline_probability >= 0.9
    assert any("cost.confidence, 90%" in note for note in careful.notes)
    assert "cheaper pools would probably miss the deadline" in render_plan(careful)
    chances = [candidate.outlook.deadline_probability for candidate in careful.ranked]
    kept = [
        candidate.expected_usd
        for candidate in careful.ranked
        if candidate.outlook.deadline_probability >= 0.9
    ]
    assert kept == sorted(kept) and all(chance >= 0.9 for chance in chances[: len(kept)])
    late = [
        candidate.expected_usd / candidate.outlook.deadline_probability
        for candidate in careful.ranked[len(kept) :]
    ]
    assert late == sorted(late) and late
    cluster["instance_types"] = ["g6e.4xlarge", "p5.4xlarge"]
    sure = plan(
        **given,
        cost={
            "deadline_hours": 1.01 * free[0].case.work_hours + 0.1,
            "confidence": 0.9999,
            "budget_usd": 99.0,
        },
    )
    ranked = [(candidate.instance_type, candidate.market) for candidate in sure.ranked]
    dear, cheap = (ranked.index((name, "on_demand")) for name in cluster["instance_types"][::-1])
    assert dear < cheap, "$22.84 with 96 % is better than $16.29 with 56 %"


def test_no_choice_of_the_frontier_is_beaten_in_both_hours_and_dollars() -> None:
    cluster = {
        "nodes": 1,
        "plan_for": "kubernetes",
        "instance_types": ["g6e.", "p5."],
        "processes_per_node": "auto",
    }
    model = {"hidden_size": 2048, "num_layers": 12, "num_heads": 16}
    cost = {"budget_usd": 60.0, "deadline_hours": 4.0}
    batch = {"efa_interfaces": 32}
    fsdp = {"use_mixed_precision": True}
    given = config(cluster=cluster, model=model, fsdp=fsdp, cost=cost, batch=batch)
    sources = PlanInputs(
        catalogue=load_catalogue(),
        shape=causal_lm_shape(given.model),
        prices=StaticPrices(),
        now_utc=WALL,
    )
    front = find_frontier(given, sources)
    hours = [point.pool.expected_hours for point in front]
    usd = [point.pool.expected_usd for point in front]
    assert len(front) > 3 and hours == sorted(hours) and usd == sorted(usd, reverse=True)
    page = render_frontier_page(front, make_plan(given, now_utc=WALL))
    assert page.count("<circle") == len(front) and front[0].pool.instance_type in page
    free = [
        replace(point, pool=replace(point.pool, expected_hours=0.0, expected_usd=0.0))
        for point in front
    ]
    assert render_frontier_page(free, make_plan(given, now_utc=WALL)).count("<circle") == len(front)
    cheap = given.changed("checkpoint", interval="seconds", interval_seconds=300.0)
    pools = list(feasible_pools(cheap.changed("cost", deadline_hours=None), sources))
    forecaster = Forecaster(given, sources, pools)
    for pool in map(forecaster.simulate, pools):
        assert any(
            h <= 1.02 * pool.expected_hours and d <= 1.02 * pool.expected_usd
            for h, d in zip(hours, usd, strict=True)
        ), str(pool)
    assert len({(point.pool.nodes, point.pool.market) for point in front}) > 2
    inside = [point for point in front if point.within]
    assert inside and all(point.needed_usd <= 60.0 for point in inside)
    text = render_frontier(front, make_plan(given, now_utc=WALL))
    assert len(text.splitlines()) == len(front) + 3 and "! " in text and "P(in time)" in text
    json.dumps([point.to_json() for point in front], allow_nan=False)


def job(
    one: Plan, *, steps: int, speed: float, reclaimed: bool, start: float = 10.0
) -> list[Event]:
    """Events of one generation on the plan's pool. speed: seconds per step; 1,000 tokens each."""
    gang = GangLog(1, start, [[0]])
    gang.steps(1, steps, useful_step=speed)
    gang.commit(steps)
    if reclaimed:
        gang.add(NOTICE, gang.now, node=0)
    gang.ended("node_lost" if reclaimed else "completed", gang.now - start)
    if not reclaimed:
        gang.outcome("completed")
    return [event(PLAN, 0.0, **json.loads(json.dumps(one.brief().to_json()))), *gang.events]


def test_a_resumed_job_is_planned_with_the_remaining_work_and_limits():
    limits = {"budget_usd": 3.0, "deadline_hours": 4.0}
    first = plan(cost=limits)
    events = job(first, steps=400, speed=9.0, reclaimed=True)
    progress = read_progress(events)
    assert (progress.done_steps, progress.started_utc) == (400, WALL)
    node_usd = 0.41246 + VOLUME_USD
    assert progress.spent_usd == pytest.approx(3610 / 3600 * node_usd, rel=0.01)
    given = config(cost=limits, training={"max_steps": 1000})
    whole = make_plan(given, now_utc=WALL)
    rest = make_plan(given, now_utc=WALL + 3600, progress=progress)
    assert (rest.steps, rest.done_steps, rest.tokens) == (600, 400, 600 * 32 * 128)
    work = [plan.chosen.case.work_hours for plan in (rest, whole)]
    assert work[0] == pytest.approx(0.6 * work[1], rel=1e-6)
    assert rest.terms().deadline_utc == WALL + 4 * 3600, (
        "the deadline counts from the job's first plan"
    )
    assert "400 steps are done" in render_plan(rest)
    done = make_plan(given, now_utc=WALL + 3600, progress=replace(progress, done_steps=1000))
    assert (done.steps, done.live) == (0, None), "as after a launcher that was lost at the end"
    late = make_plan(given, now_utc=WALL + 5 * 3600, progress=progress)
    assert late.refusal.outcome == "deadline" and late.refusal.enough > 5
    poor = make_plan(config(cost={"budget_usd": 0.4}), now_utc=WALL, progress=progress)
    assert poor.refusal.outcome == "budget" and "spent so far" in poor.refusal.message


def test_job_history_changes_hazard_and_speed_with_a_note(tmp_path: Path):
    store = Store.open(str(tmp_path))
    one = plan()
    events = job(one, steps=40, speed=0.5, reclaimed=True)
    assert save_job_record(store, events) == save_job_record(store, events), (
        "the same events say the same"
    )
    real = {"zone_id": "use1-az1", "market": "on_demand"}
    for known in ({}, {"zone_id": "use1-az1"}, real):
        told = [
            replace(e, data={**e.data, **known}) if e.name == NODE_STARTED else e for e in events
        ]
        [stay] = summarize_job(told).stays
        assert (stay.zone, stay.market, stay.reclaimed) == (
            known.get("zone_id"),
            known.get("market", "spot"),
            known != real,
        )
    soon = WALL + 3600
    every = {
        c.market: c
        for c in make_plan(config(), now_utc=soon, history=load_job_history(store)).ranked
    }
    assert every["spot"].hazard_per_hour > 1.5 * one.chosen.hazard_per_hour
    assert every["spot"].hazard_kind.endswith("updated by 1 stays of own jobs")
    assert (
        every["spot"].tokens_per_second == pytest.approx(2000.0)
        and every["spot"].speed_kind == "measured"
    )
    assert every["on_demand"].speed_kind == "measured", "the market does not change the speed"
    asked = {"training": {"max_steps": STEPS}, "cluster": CLUSTER, "store": str(tmp_path)}
    checked = passed("budget-deadline", **asked).detail
    hours = float(checked.split("; ")[1].split(" h")[0])
    assert hours > 2 * one.chosen.expected_hours, "preflight plans with what own jobs showed"
    later = make_plan(config(), now_utc=WALL + 60 * 86400, history=load_job_history(store))
    forgotten = next(c for c in later.ranked if c.market == "spot")
    assert forgotten.hazard_per_hour == pytest.approx(one.chosen.hazard_per_hour, rel=0.1)


def test_a_measured_speed_is_scaled_to_other_gangs_and_is_of_one_configuration_only(tmp_path: Path):
    store = Store.open(str(tmp_path))
    prior = plan().chosen
    save_job_record(store, job(plan(), steps=40, speed=0.5, reclaimed=False))
    elsewhere = {**CLUSTER, "instance_types": ["g6.xlarge"]}
    scaled = make_plan(
        config(cluster=elsewhere), now_utc=WALL, history=load_job_history(store)
    ).chosen
    estimate = plan(cluster=elsewhere).chosen
    assert scaled.speed_kind == "scaled from 1 × g5.xlarge"
    assert scaled.tokens_per_second / estimate.tokens_per_second == pytest.approx(
        2000.0 / prior.tokens_per_second
    )
    other = config(model={"num_layers": 3})
    assert (
        make_plan(other, now_utc=WALL, history=load_job_history(store)).chosen.speed_kind
        == UNCALIBRATED
    )


def test_a_local_run_teaches_nothing_of_any_pool_and_a_users_stop_is_no_reclaim(tmp_path: Path):
    store = Store.open(str(tmp_path))
    assert (
        save_job_record(
            store, job(replace(plan(), simulated=True), steps=40, speed=0.5, reclaimed=True)
        )
        is None
    )
    planned = job(plan(), steps=40, speed=0.5, reclaimed=False)[0]
    gang = GangLog(1, 10.0, [[0]])
    gang.steps(1, 40, useful_step=0.5)
    gang.ended("agent_stopped", gang.now - 10.0)
    found = save_job_record(store, [planned, *gang.events])
    assert [stay.reclaimed for stay in found.stays] == [False]
    rehearsed = job(plan(), steps=40, speed=0.5, reclaimed=True)
    rehearsed.insert(
        -1, event(FAULT_INJECTED, 20.0, generation=1, rank=0, step=40, kind="node-loss")
    )
    assert [stay.reclaimed for stay in summarize_job(rehearsed).stays] == [False]
    (tmp_path / "experience" / "20990101-other.json").write_text("{}")
    assert len(load_job_history(store).stays) == 1, "what cannot be read is left out"


@pytest.mark.slow
def test_the_plan_event_is_small_and_counts_the_pools():
    cluster = {"nodes": "auto", "processes_per_node": "auto", "plan_for": "kubernetes"}
    whole = plan(
        cluster=cluster, training={"batch_size": 512}, cost={"regions": ["us-east-1", "us-east-2"]}
    )
    brief = Plan.from_json(json.loads(json.dumps(whole.brief().to_json())))
    assert len(json.dumps(brief.to_json())) < 64 * 1024 < len(json.dumps(whole.to_json()))
    assert (len(brief.ranked), brief.chosen, brief.counts) == (
        KEPT_POOLS,
        whole.chosen,
        whole.counts,
    )
    assert sum(brief.counts.values()) == len(whole.ranked) + len(whole.rejected)
    assert {rejection.kind for rejection in brief.rejected} == {
        rejection.kind for rejection in whole.rejected
    }


@pytest.mark.slow
def test_the_two_questions_of_a_script():
    best = get_cheapest_suitable_instance(config(), now_utc=WALL)
    assert (best["instance_type"], best["market"]) == ("g5.xlarge", "spot")
    assert best["savings_percent"] == pytest.approx(59.0), (
        "the advisor's savings of g5.xlarge in us-east-1"
    )
    one = plan()
    events = job(
        replace(one, ranked=(replace(one.chosen, zone="use1-az1"),)),
        steps=7200,
        speed=0.5,
        reclaimed=False,
    )
    flat = get_accumulated_cost(events)
    assert float(flat) == pytest.approx(0.41246 + VOLUME_USD, rel=1e-3), "an hour at plan's price"
    where = {
        "instance_type": "g5.xlarge",
        "region": "us-east-1",
        "zone_name": "us-east-1a",
        "zone_id": "use1-az1",
    }
    halfway = WALL + 10 + 1800
    dearer = SpotRecord(**where, usd_per_hour=Decimal("0.82492"), at=halfway)
    assert float(get_accumulated_cost(events, history=[dearer])) == pytest.approx(
        1.5 * 0.41246 + VOLUME_USD, rel=1e-3
    )
    named = job(
        replace(one, ranked=(replace(one.chosen, zone="us-east-1a"),)),
        steps=7200,
        speed=0.5,
        reclaimed=False,
    )
    assert get_accumulated_cost(named, history=[dearer]) == get_accumulated_cost(
        events, history=[dearer]
    )
    # The static table knows regions only
    nowhere = job(one, steps=7200, speed=0.5, reclaimed=False)
    with pytest.raises(ReportError, match="the price history lacks g5"):
        get_accumulated_cost(nowhere, history=[dearer])
    with pytest.raises(ReportError, match="no events"):
        get_accumulated_cost([])


def test_each_hour_of_a_stay_counts_by_its_own_age_and_leaves_the_doubt_of_losses_in_bursts() -> (
    None
):
    """One long stay says what the same hours do as many short ones; a loss of a day ago counts
    half.
    """

    def stay(hours: float, *, ended: float, reclaimed: bool) -> PoolStay:
        place = {
            "instance_type": "g5.xlarge",
            "nodes": 1,
            "market": "spot",
            "region": "us-east-1",
            "zone": "us-east-1a",
        }
        return PoolStay(**place, ended_utc=ended * 3600, hours=hours, reclaimed=reclaimed)

    def believed(*stays: PoolStay) -> SpotEvidence:
        seen = JobHistory.of([JobMeasurements(job="j", stays=stays)])
        return seen.spot_evidence("g5.xlarge", "us-east-1", "us-east-1a", 48 * 3600)[0]

    whole = believed(stay(48.0, ended=48, reclaimed=True))
    parts = believed(*(stay(1.0, ended=hour, reclaimed=hour == 48) for hour in range(1, 49)))
    assert (whole.losses, whole.hours) == pytest.approx((parts.losses, parts.hours))
    assert whole.hours == pytest.approx(
        EVIDENCE_WORTH * sum(0.5 ** (age / 24) for age in range(48)), rel=0.02
    )
    halved = believed(stay(1.0, ended=24, reclaimed=True))
    assert halved.losses == pytest.approx(EVIDENCE_WORTH / 2)
    fresh = believed(stay(1.0, ended=48, reclaimed=True))
    assert fresh.losses / fresh.hours == pytest.approx(1.0, rel=0.02)


def test_waits_of_own_jobs_lengthen_those_recorded_elsewhere() -> None:
    events = job(plan(), steps=40, speed=0.5, reclaimed=True)
    started = [event for event in events if event.generation == 1]
    gap = 6 * 3600.0
    again = [
        replace(event, generation=2, t_wall=event.t_wall + gap, t_mono=event.t_mono + gap)
        for event in started
    ]
    record = summarize_job([*events, *again])
    first, second = record.stays
    assert first.gone_hours == pytest.approx(
        second.ended_utc / 3600 - second.hours - first.ended_utc / 3600
    )
    assert 5.5 < first.gone_hours < 6 and not first.moved and second.gone_hours is None
    elsewhere = summarize_job([*events, *(replace(event, run="another") for event in again)])
    assert elsewhere.stays[0].gone_hours is None, "a later run says nothing of the wait"
    history = JobHistory.of([JobMeasurements(job="j", stays=(first,) * 10)])
    now = WALL + gap + 3600
    evidence, stays = history.spot_evidence("g5.xlarge", "us-east-1", None, now)
    assert stays == 10 and [wait.hours for wait in evidence.waits] == [first.gone_hours] * 10
    assert believe(evidence).wait_hours > believe(replace(evidence, waits=())).wait_hours
    assert not history.spot_evidence("g6.xlarge", "us-east-1", None, now)[0].waits
    known, none = (
        make_plan(
            config(
                cluster={**CLUSTER, "market": "spot"},
                cost={"deadline_hours": 6.0, "confidence": 0.01},
            ),
            now_utc=now,
            history=seen,
        ).ranked
        for seen in (
            history,
            JobHistory.of(
                [JobMeasurements(job="j", stays=(replace(first, gone_hours=None),) * 10)]
            ),
        )
    )
    chances = []
    for candidates in (known, none):
        chances.append(
            next(
                candidate.outlook.deadline_probability
                for candidate in candidates
                if candidate.market == "spot"
            )
        )
    assert chances[0] < chances[1]
    assert make_plan(config(), now_utc=WALL, history=history) == Plan.from_json(
        json.loads(json.dumps(make_plan(config(), now_utc=WALL, history=history).to_json()))
    )


@pytest.mark.parametrize("mixed", [True, False])
def test_rows_of_gpus_without_fitted_runs_are_marked_as_uncalibrated(mixed: bool) -> None:
    found = make_plan(
        config(
            model={"hidden_size": 1024, "num_layers": 8, "num_heads": 16},
            cluster={"nodes": 1, "processes_per_node": 8},
            fsdp={"use_mixed_precision": mixed},
        ),
        now_utc=WALL,
    )
    text = render_plan(found)
    rows = [line for line in text.splitlines() if line[2:3].isdigit() and " × " in line]
    fitted = [line for line in rows if "8 A100" in line or "8 H100" in line]
    others = [line for line in rows if line not in fitted]
    assert fitted and not any(" u " in line for line in fitted)
    assert others and all(" u " in line for line in others)
    assert "uncalibrated, no published run of this GPU is in the" in text
