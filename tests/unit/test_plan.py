"""The plan: what it offers, how it counts, what it refuses and what it says would help."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.footprint import causal_lm_shape
from ebbflow.core.terms import PriceWatch
from ebbflow.cost.__main__ import main
from ebbflow.cost.catalogue import Catalogue, load_catalogue
from ebbflow.cost.errors import PlanError
from ebbflow.cost.plan.candidates import PlanInputs, feasible_pools
from ebbflow.cost.plan.forecast import DETECT_SECONDS, FAILURES_PER_GPU_HOUR
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.plan.plan_text import render_brief, render_plan
from ebbflow.cost.plan.pools import Candidate
from ebbflow.cost.plan.refusal import describe_reserve
from ebbflow.cost.prices.quote import StaticPrices

ROOT = Path(__file__).parents[2]
NOW = 1_790_000_000.0


def config(**sections: dict) -> RunConfig:
    # In float32, whose speeds the tests' arithmetic has
    plain = {"training": {"max_steps": 100_000}, "fsdp": {"use_mixed_precision": False}}
    return RunConfig.model_validate(plain | sections)


def plan(**sections: dict) -> Plan:
    return make_plan(config(**sections), now_utc=NOW)


def judged(**sections: dict) -> list[Candidate]:
    """Pools with the means that order them, before any is simulated; cheapest first."""
    given = config(**sections)
    sources = PlanInputs(
        catalogue=load_catalogue(),
        shape=causal_lm_shape(given.model),
        prices=StaticPrices(),
        now_utc=NOW,
    )
    return sorted(feasible_pools(given, sources), key=lambda pool: pool.expected_usd)


def pools(one: Plan, market: str | None = None) -> set[tuple[str, int]]:
    return {(c.instance_type, c.nodes) for c in one.ranked if market in (None, c.market)}


def by_kind(one: Plan) -> dict[str, int]:
    kinds = [rejection.kind for rejection in one.rejected]
    return {kind: kinds.count(kind) for kind in set(kinds)}


@pytest.mark.parametrize(("said", "start"), [({}, 240.0), ({"expected_start_seconds": 30.0}, 30.0)])
def test_expected_hours_and_dollars_by_hand(said: dict, start: float):
    cluster = {
        "plan_for": "kubernetes",
        "instance_types": ["g5.xlarge"],
        "market": "spot",
        "nodes": 2,
        **said,
    }
    (best,) = judged(cluster=cluster)
    step = best.step_seconds
    carry = best.case.fixed_lost_hours * 3600 / 2 - (start + DETECT_SECONDS) / 2
    assert 0 < carry < 1, (
        "to bring a commit of 0.4 million parameters to the store takes no time to speak of"
    )
    undisturbed = (start + 100_000 * step * (1 + best.save_seconds / (50 * step))) / 3600
    each = (50 * step / 2 + carry + DETECT_SECONDS + start + carry) / 3600
    assert best.paid_hours == pytest.approx(undisturbed + best.interruptions * each)
    assert best.interruptions == pytest.approx(best.hazard_per_hour * best.paid_hours)
    volume = 100 * 0.08 / 730
    assert float(best.price.volume_usd_per_hour) == pytest.approx(volume, abs=1e-9)
    assert best.compute_usd == pytest.approx(
        best.paid_hours * 2 * (1.006 * 0.41 + volume), rel=1e-5
    )
    assert best.storage_usd == 0.0, "the store is a folder"
    assert best.expected_usd == best.compute_usd + best.storage_usd + best.transfer_usd
    assert best.usd_per_step * 100_000 == pytest.approx(best.expected_usd)
    assert best.expected_hours >= best.paid_hours, "waits for capacity are not paid"
    assert best.tokens_per_second * step == pytest.approx(32 * 128)


def test_every_pool_is_ranked_or_rejected_once_with_a_reason():
    one = plan(cluster={"nodes": "auto", "processes_per_node": "auto", "plan_for": "kubernetes"})
    assert len(one.ranked) + len(one.rejected) == len(load_catalogue().types) * 4 * 2
    assert all(rejection.reason for rejection in one.rejected)
    costs = [
        (pool.outlook is None, pool.expected_usd, pool.nodes, pool.instance_type)
        for pool in one.ranked
    ]
    assert costs == sorted(costs), "simulated pools first"
    assert {"batch not divisible", "peak unknown", "GPU too old", "no spot price"} <= set(
        by_kind(one)
    )


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, {1}), (2, {1, 2}), (3, {1, 2}), (None, {1, 2, 4, 8})]
)
@pytest.mark.slow
def test_auto_tries_no_more_nodes_than_are_allowed(most: int | None, sizes: set[int]):
    one = plan(
        cluster={
            "nodes": "auto",
            "max_nodes": most,
            "processes_per_node": "auto",
            "plan_for": "kubernetes",
        }
    )
    assert {pool.nodes for pool in [*one.ranked, *one.rejected]} == sizes


@pytest.mark.slow
def test_a_plan_offers_only_what_the_backend_can_run():
    two = {"nodes": 2, "processes_per_node": 1}
    batch = plan(cluster={**two, "plan_for": "batch"})
    assert not pools(batch, "spot") and pools(batch, "on_demand")
    assert "AWS Batch runs no multi-node job on Spot" in next(
        rejection.reason for rejection in batch.rejected if rejection.kind == "backend cannot"
    )
    assert pools(plan(cluster={**two, "nodes": 1, "plan_for": "batch"}), "spot")
    for backend in ("kubernetes", "local"):
        assert pools(plan(cluster={**two, "plan_for": backend}), "spot")
    only = plan(cluster={**two, "plan_for": "kubernetes", "market": "on_demand"})
    assert {c.market for c in only.ranked} == {"on_demand"} and by_kind(only)[
        "market excluded"
    ] == 63


def test_the_whole_instance_is_paid_for_and_shared_by_its_ranks():
    one = plan(
        cluster={
            "nodes": 1,
            "processes_per_node": 2,
            "instance_types": ["g5."],
            "market": "on_demand",
        }
    )
    assert one.chosen.instance_type == "g5.12xlarge"  # four GPUs, two of them idle
    assert by_kind(one)["too few GPUs"] == 5
    assert one.terms().usd_per_rank_second == pytest.approx((5.672 + 100 * 0.08 / 730) / 2 / 3600)


def test_terms_carry_limits_reserve_and_hazard():
    one = plan(
        cost={"budget_usd": 500.0, "deadline_hours": 72.0}, checkpoint={"deadline_seconds": 60.0}
    )
    terms = one.terms(spent_usd=1.25)
    assert (terms.budget_usd, terms.spent_usd, terms.deadline_utc) == (500.0, 1.25, NOW + 72 * 3600)
    # A last save of 1 min, and 5 min of idle machines
    assert terms.reserve_usd == pytest.approx(one.chosen.gang_usd_per_hour * (1 + 5) / 60)
    assert terms.hazard_per_hour == one.chosen.hazard_per_hour > 0
    assert (terms.price_kind, replace(one, simulated=True).terms().price_kind) == (
        "recorded",
        "simulated",
    )
    assert plan(cluster={"plan_for": "local"}).simulated


def test_a_budget_below_the_cheapest_pool_is_refused_with_the_arithmetic():
    free = plan()
    cheapest = free.chosen
    needed = cheapest.expected_usd + free.reserve_usd
    low = free.reserve_usd + 0.5 * cheapest.expected_usd
    refused = plan(cost={"budget_usd": low})
    assert refused.refusal.outcome is Outcome.BUDGET
    for figure in (
        f"${low:.4f}",
        f"${needed:.4f}",
        f"{cheapest.paid_hours:.4g} h",
        str(cheapest),
    ):
        assert figure in refused.refusal.message
    assert plan(cost={"budget_usd": needed * 1.001}).refusal is None
    steps = int(refused.refusal.hint.split("max_steps to ")[1].split()[0])
    fewer = plan(cost={"budget_usd": low}, training={"max_steps": steps})
    assert fewer.refusal is None, "the hint must make it fit"


@pytest.mark.parametrize(
    ("plan_for", "prices", "market", "text"),
    [
        ("kubernetes", "static", "spot", "reserve for the last save"),
        ("batch", "static", "spot", "reserve for the last save and 5 min of idle machines"),
        (
            "batch",
            "live",
            "spot",
            "reserve for the last save, 5 min of idle machines and a price 3 times as high",
        ),
        ("batch", "live", "on_demand", "reserve for the last save and 5 min of idle machines"),
    ],
)
def test_a_reserve_is_described_by_what_it_is_for(plan_for, prices, market, text):
    watch = PriceWatch.of(config(cluster={"plan_for": plan_for}, cost={"prices": prices}))
    pool = replace(plan().chosen, market=market)
    assert describe_reserve(watch, pool, plan_for) == text


def test_a_refusal_says_where_the_user_wrote_the_keys_that_it_names():
    refused = plan(cost={"budget_usd": 0.25})
    sources = {"cost.budget_usd": "job.yaml:3", "training.max_steps": "default"}
    named = refused.with_sources(sources).refusal
    assert named.message.startswith("cost.budget_usd (job.yaml:3) is $0.25")
    assert "training.max_steps to" in refused.with_sources(sources).refusal.hint
    late = plan(cost={"deadline_hours": 0.01}).with_sources({"cost.deadline_hours": "--set"})
    assert "cost.deadline_hours (--set) is 0.01" in late.refusal.message
    assert plan().with_sources(sources) == plan()
    written = replace(late.refusal, message="late", hint="set cost.deadline_hours=2").with_sources(
        {"cost.deadline_hours": "--set"}
    )
    assert written.hint == "set cost.deadline_hours=2"


def test_the_budget_is_judged_over_all_pools_and_the_choice_keeps_it():
    """The pool with the fewest expected dollars may be a dear gang, whose last save needs too much
    in reserve.
    """
    cluster = {"nodes": "auto", "processes_per_node": "auto", "plan_for": "kubernetes"}
    given = {"cluster": cluster, "checkpoint": {"deadline_seconds": 7200}}
    given["training"] = {"max_steps": 400_000, "batch_size": 256}

    def need(pool: Candidate) -> float:
        return pool.expected_usd + pool.gang_usd_per_hour * 2

    free = judged(**given)
    first = free[0]
    least = min(free, key=need)
    assert need(least) < 0.8 * need(first) and first.expected_usd < least.expected_usd
    budget = (need(least) + need(first)) / 2
    one = plan(**given, cost={"budget_usd": budget})
    borne = [pool for pool in free if need(pool) <= budget]
    assert one.refusal is None and {str(pool) for pool in one.ranked} == {
        str(pool) for pool in borne
    }
    assert one.chosen.expected_usd == min(pool.expected_usd for pool in one.ranked)
    assert one.terms().spendable_usd == pytest.approx(budget - one.chosen.gang_usd_per_hour * 2)
    assert by_kind(one)["over the budget"] == len(free) - len(borne)
    dear = next(pool for pool in one.rejected if str(pool) == str(first))
    assert (
        f"needs ${need(first):.4f}" in dear.reason
        and f"cost.budget_usd is ${budget:.4f}" in dear.reason
    )
    poor = plan(**given, cost={"budget_usd": need(least) * 0.9})
    assert poor.refusal.outcome is Outcome.BUDGET and str(least) in poor.refusal.message
    assert poor.refusal.enough == pytest.approx(need(least)), (
        "what would do is the least that any pool needs"
    )


@pytest.mark.slow
def test_a_deadline_that_no_pool_meets_is_refused_and_slow_pools_are_rejected():
    cluster = {"nodes": 1, "plan_for": "kubernetes"}
    free = plan(cluster=cluster)
    fastest = min(c.expected_hours for c in free.ranked)
    refused = plan(cluster=cluster, cost={"deadline_hours": fastest * 0.9})
    assert refused.refusal.outcome is Outcome.DEADLINE and refused.chosen is None
    assert f"{fastest:.4g} h" in refused.refusal.message
    hours = float(refused.refusal.hint.split("deadline_hours to ")[1].split()[0])
    assert plan(cluster=cluster, cost={"deadline_hours": hours}).refusal is None, (
        "the hint must make it fit"
    )
    with pytest.raises(PlanError, match="no pool meets the deadline"):
        refused.terms()

    hours = sorted(pool.case.start_hours + pool.case.work_hours for pool in free.ranked)
    middle = hours[len(hours) // 2]
    half = plan(
        cluster={**cluster, "market": "spot"}, cost={"deadline_hours": middle, "confidence": 0.01}
    )
    assert half.refusal is None and by_kind(half)["misses the deadline"] > 0
    assert all(c.case.start_hours + c.case.work_hours <= middle for c in half.ranked)


def long_plan(market: str, *, backend: str = "kubernetes", **cost: float) -> Plan:
    """Plan a job of many hours on one g5.xlarge."""
    cluster = {"plan_for": backend, "instance_types": ["g5.xlarge"], "nodes": 1, "market": market}
    return plan(cluster=cluster, training={"max_steps": 4_000_000}, cost=cost)


def test_a_spot_job_that_is_unlikely_in_time_is_refused_with_ways_that_help():
    deadline = round(1.6 * long_plan("spot").chosen.case.work_hours, 2)
    bare = long_plan("spot", deadline_hours=deadline)
    chance = bare.live.deadline_probability
    assert 0.2 < chance < 0.9 and bare.refusal.outcome is Outcome.DEADLINE
    assert f"{chance:.1%}" in bare.refusal.message and "90.0%" in bare.refusal.message
    assert "set cluster.market to auto" in bare.refusal.hint
    both = long_plan("auto", deadline_hours=deadline)
    assert both.refusal is None and both.live.deadline_probability >= 0.9
    enough = float(bare.refusal.hint.split("deadline_hours to ")[1].split()[0])
    later = long_plan("spot", deadline_hours=enough)
    assert later.refusal is None and later.live.deadline_probability >= 0.9
    bold = float(bare.refusal.hint.split("confidence to ")[1].split()[0])
    assert long_plan("spot", deadline_hours=deadline, confidence=bold).refusal is None
    local = long_plan("spot", backend="local", deadline_hours=deadline)
    assert local.refusal is None, "a run on this machine waits for no capacity"


def test_a_job_that_may_fall_back_and_is_unlikely_in_time_starts_with_a_warning():
    work = long_plan("on_demand").chosen.case.work_hours
    tight = long_plan("on_demand", deadline_hours=round(1.1 * work + 1.0, 2))
    chance = tight.live.deadline_probability
    assert tight.refusal is None and chance < 0.9
    [warning] = [note for note in tight.notes if note.startswith("! P(in time)")]
    assert f"{chance:.1%} is below cost.confidence, 90.0%" in warning
    enough = float(warning.split("deadline_hours to ")[1].split()[0])
    sure = long_plan("on_demand", deadline_hours=enough)
    assert sure.live.deadline_probability >= 0.9
    assert not any(note.startswith("! P(in time)") for note in sure.notes)


@pytest.mark.parametrize("market", ["auto", "spot", "on_demand"])
def test_a_plan_shows_one_chance_one_duration_and_one_price(market: str):
    one = long_plan(market, deadline_hours=60.0, confidence=0.01)
    text = render_plan(one)
    brief = " ".join(render_brief(one))
    ahead = one.live
    assert text.count("P(in time)  ") == 1 and "as placed" not in text
    assert "staying in" not in text and "advisor's band" not in text
    best = one.chosen
    assert (best.expected_hours, best.expected_usd) == (ahead.p50_hours, ahead.mean_usd)
    assert ahead.p10_hours <= ahead.p50_hours <= ahead.p90_hours
    assert ahead.p10_usd <= ahead.mean_usd <= ahead.p90_usd
    for shown in (f"{ahead.p90_hours:.4f}", f"${ahead.mean_usd:.4f}", f"${ahead.p90_usd:.4f}"):
        assert shown in text.replace(",", ""), shown
    first_row = next(line for line in text.splitlines() if line.startswith("│ 1  "))
    assert first_row.endswith(f"{ahead.p50_hours:.3f}  ${ahead.mean_usd:.4f}")
    assert f"{100 * ahead.deadline_probability:.1f} %" in brief
    assert ("end on demand" in text) is (market == "auto" and ahead.on_demand_share > 0)


def test_a_plan_names_deadline_and_budget_when_both_bind():
    given = {"training": {"max_steps": 20_000_000}}
    free = plan(**given, cost={"deadline_hours": None})
    every = judged(**given, cost={"deadline_hours": None})
    fastest = min(every, key=lambda pool: pool.expected_hours)
    cheapest = every[0]
    assert fastest.expected_hours < 0.9 * cheapest.expected_hours
    budget = (cheapest.expected_usd + free.reserve_usd) * 1.001
    late = plan(**given, cost={"deadline_hours": 2, "budget_usd": budget})
    assert late.refusal.outcome is Outcome.DEADLINE
    assert cheapest.expected_hours < late.refusal.enough < cheapest.expected_hours + 1, (
        "with what on-demand needs"
    )
    assert f"The fastest within the budget, {cheapest}" in late.refusal.message
    enough = plan(
        **given, cost={"deadline_hours": late.refusal.enough + 0.01, "budget_usd": budget}
    )
    assert enough.refusal is None, "what would do does"
    both = plan(**given, cost={"deadline_hours": 2, "budget_usd": 1.0})
    assert "The budget is exceeded as well" in both.refusal.message
    hours, usd = re.search(
        r"deadline_hours to ([\d.]+) or more.*budget_usd to ([\d.]+)", both.refusal.hint
    ).groups()
    lifted = plan(**given, cost={"deadline_hours": float(hours), "budget_usd": float(usd)})
    assert lifted.refusal is None, "what the hint says of both is enough"


def test_queues_in_a_region_without_a_price_need_a_price_and_no_other_model():
    sections = {
        "cluster": {"plan_for": "batch", "instance_types": ["g5.xlarge"]},
        "batch": {"region": "eu-west-1"},
    }
    hint = plan(store="s3://bucket/x", cost={"regions": ["eu-west-1"]}, **sections).refusal.hint
    assert hint == "run ebbflow catalogue refresh --regions eu-west-1"


def test_nothing_that_fits_is_refused_with_the_nearest_miss_and_a_hint_that_helps():
    large = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "sequence_length": 2048}
    sections = {
        "model": large,
        "training": {"batch_size": 64},
        "cluster": {"nodes": 1, "processes_per_node": "auto", "instance_types": ["p4de"]},
        "fsdp": {"use_mixed_precision": True},
    }
    refused = plan(**sections)
    assert refused.refusal.outcome is Outcome.NO_CAPACITY
    assert (
        "A100 has 80.00 GiB" in refused.refusal.message and "optimizer" in refused.refusal.message
    )
    steps = int(refused.refusal.hint.removeprefix("set training.gradient_accumulation_steps to "))
    sections["training"] = {"batch_size": 64, "gradient_accumulation_steps": steps}
    assert plan(**sections).chosen is not None, "the hint must make it fit"

    unknown = plan(cluster={"instance_types": ["q9"]})
    assert (
        unknown.refusal.outcome is Outcome.NO_CAPACITY
        and "begins with q9" in unknown.refusal.message
    )
    assert "g5" in unknown.refusal.hint


def test_json_is_plain_and_complete():
    for made in (
        plan(),
        plan(cost={"budget_usd": 1e-6}),
        replace(plan(cluster={"instance_types": ["q9"]}), simulated=True),
    ):
        text = json.dumps(made.to_json(), allow_nan=False)
        assert Plan.from_json(json.loads(text)) == made
    data = plan().to_json()
    assert data["kinds"]["on_demand_usd_per_hour"].startswith("recorded 2026-07-20")
    assert data["chosen"]["on_demand_usd_per_hour"] >= data["chosen"]["usd_per_hour"]
    with pytest.raises(PlanError, match="schema 99"):
        Plan.from_json({**data, "schema": 99})


def test_a_plan_uses_the_given_catalogue():
    kind = load_catalogue()["g6.xlarge"]
    one = make_plan(config(cluster={"nodes": 1}), now_utc=NOW, catalogue=Catalogue((kind,)))
    assert [(c.instance_type, c.market) for c in one.ranked] == [
        ("g6.xlarge", "spot"),
        ("g6.xlarge", "on_demand"),
    ]


@pytest.mark.parametrize(
    "sections",
    [
        {"cluster": {"plan_for": "local"}, "cost": {"budget_usd": 5.0, "deadline_hours": 500.0}},
        {
            "cluster": {"nodes": "auto", "processes_per_node": "auto"},
            "training": {"batch_size": 512},
        },
        {"cost": {"budget_usd": 0.0001}},
        {"cost": {"deadline_hours": 0.001}},
        {"model": {"hidden_size": 16384, "num_layers": 128}},
    ],
)
def test_the_plans_text_is_narrow_and_complete(sections: dict):
    one = plan(**sections)
    text = render_plan(one)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert all(line[0] in "┌│└" for line in lines), "leading spaces do not survive log viewers"
    if one.chosen:
        assert_shows(text, one, one.chosen)
    if one.refusal:
        assert f"refused ({one.refusal.outcome})" in text and "hint:" in text
    for kind, count in by_kind(one).items():
        assert f"- {count} × {kind}, such as " in text


def assert_shows(text: str, one: Plan, best: Candidate) -> None:
    assert f"+ {best.nodes} × {best.instance_type}" in text
    assert (
        f"${best.price.usd_float:.4f}/h per node" in text and f"${best.expected_usd:,.4f}" in text
    )
    assert ("simulated: this run stays" in text) == one.simulated
    assert text.count(", micro-batch ") == 1 and "… and" in text


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cost", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_the_command_prints_the_plan_and_exits_with_its_outcome(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text("training:\n  max_steps: 1000\n")
    done = run("plan", str(path), "--json", "--set", "cluster.nodes=1")
    assert done.returncode == 0, done.stderr
    assert Plan.from_json(json.loads(done.stdout)).chosen.nodes == 1
    refused = run("plan", str(path), "--set", "cost.budget_usd=0.001")
    assert refused.returncode == 4 and "refused (budget)" in refused.stdout
    wrong = run("plan", str(path), "--set", "model.num_heads=7")
    assert wrong.returncode == 2 and "num_heads" in wrong.stderr and not wrong.stdout


@pytest.mark.slow
def test_the_command_plans_for_the_pools_that_a_configured_queue_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = [
        "configs/laptop.yaml",
        "--set",
        "cluster.plan_for=batch",
        "--set",
        "cluster.nodes=1",
        "--json",
    ]
    queues = (
        "batch.queues=[{name: spot-g6, market: spot, instance_types: [g6.xlarge]}, {name: od, "
        "market: on_demand}]"
    )
    assert main(["plan", *job, "--set", queues]) == 0
    spot = {
        load["instance_type"]
        for load in json.loads(capsys.readouterr().out)["ranked"]
        if load["market"] == "spot"
    }
    assert spot == {"g6.xlarge"}
    assert main(["plan", *job, "--set", queues, "--frontier"]) == 0
    points = json.loads(capsys.readouterr().out)
    assert {point["instance_type"] for point in points if point["market"] == "spot"} <= {
        "g6.xlarge"
    }
    assert main(["plan", *job]) == 0
    assert (
        len({load["instance_type"] for load in json.loads(capsys.readouterr().out)["ranked"]}) > 3
    )


def test_a_gang_is_reclaimed_at_once_and_only_machine_failures_grow_with_it():
    cluster = {"market": "spot", "plan_for": "kubernetes", "instance_types": ["g5.xlarge"]}
    one, two = (plan(cluster={**cluster, "nodes": nodes}).ranked[0] for nodes in (1, 2))
    assert two.hazard_per_hour - one.hazard_per_hour == pytest.approx(
        FAILURES_PER_GPU_HOUR * (two.ranks - one.ranks)
    )
