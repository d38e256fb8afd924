"""A plan over several regions and zones: from recorded prices, ages shown, and nothing quietly
replaced.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import PLAN
from ebbflow.cost.catalogue import Catalogue, load_catalogue
from ebbflow.cost.ledger.ledger import fold
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.plan.plan_text import render_plan
from ebbflow.cost.prices.quote import warn_of_age
from ebbflow.cost.prices.source import open_prices
from ebbflow.cost.report.figure_text import explain_figures, format_key_figures
from ebbflow.cost.report.report import build_report
from tests.support.timelines import GangLog, event

SYNTHETIC = Path(__file__).parents[1].joinpath("prices") / "synthetic.json"
NOW = 1_790_000_000.0  # 2026-09-21 14:13 UTC, six hours after the recording
REGIONS = ["us-east-1", "us-east-2", "us-west-2"]


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def configuration(cost: dict | None = None, **sections: dict) -> RunConfig:
    cluster = {"nodes": 2, "plan_for": "kubernetes", "instance_types": ["g5.xlarge", "g6.xlarge"]}
    cost = {"prices": str(SYNTHETIC), "regions": REGIONS, **(cost or {})}
    sections = {"training": {"max_steps": 100_000}, **sections}
    return RunConfig.model_validate(
        {**sections, "cluster": {**cluster, **sections.get("cluster", {})}, "cost": cost}
    )


def planned(config: RunConfig, **options: bool) -> Plan:
    return make_plan(config, now_utc=NOW, prices=open_prices(config, NOW), **options)


def test_spot_pools_are_zones_and_the_cheapest_region_wins():
    plan = planned(configuration())
    spot = {
        (c.instance_type, c.zone): f"{c.price.usd_per_hour:f}"
        for c in plan.ranked
        if c.market == "spot"
    }
    assert spot == {
        ("g5.xlarge", "use1-az4"): "0.418200",  # the last change, not the first, and not Windows
        ("g5.xlarge", "use1-az6"): "0.450300",  # seven weeks old, and still in force
        ("g6.xlarge", "use1-az4"): "0.402400",
        ("g5.xlarge", "use2-az1"): "0.298800",
        ("g5.xlarge", "use2-az2"): "0.301000",
        ("g6.xlarge", "use2-az2"): "0.322800",
        ("g5.xlarge", "usw2-az2"): "0.377900",
        ("g5.xlarge", "usw2-az1"): "0.377900",
    }
    assert (plan.chosen.instance_type, plan.chosen.region, plan.chosen.zone) == (
        "g5.xlarge",
        "us-east-2",
        "use2-az1",
    )
    costs = [c.expected_usd for c in plan.ranked]
    assert costs == sorted(costs)
    assert all(c.region in REGIONS for c in plan.ranked)


def test_on_demand_prices_are_never_another_regions_and_the_advisors_band_moves_no_hazard(
    catalogue: Catalogue,
):
    plan = planned(configuration())
    bands = {region: catalogue["g5.xlarge"].interruption_band(region) for region in REGIONS}
    assert bands["us-east-2"] < bands["us-west-2"] == bands["us-east-1"]
    hazards = {
        c.region: c.hazard_per_hour
        for c in plan.ranked
        if (c.market, c.instance_type) == ("spot", "g5.xlarge")
    }
    assert len(set(hazards.values())) == 1 and hazards["us-east-2"] > 0.1
    on_demand = [c for c in plan.ranked if c.market == "on_demand"]
    assert {(c.region, c.zone) for c in on_demand} == {("us-east-1", None)}
    lacking = {r.region: r.reason for r in plan.rejected if r.kind == "no on-demand price"}
    assert lacking["us-west-2"].endswith("on-demand price of g6.xlarge in us-west-2 on record")
    assert {c.on_demand_usd_per_hour is None for c in plan.ranked if c.region != "us-east-1"} == {
        True
    }


def test_a_zone_and_a_region_without_a_price_are_rejected_by_name():
    plan = planned(configuration())
    spot = {(r.instance_type, r.place): r.reason for r in plan.rejected if r.market == "spot"}
    assert set(spot) == {
        ("g5.xlarge", "use1-az1"),  # a zone that the file knows, without any price
        ("g6.xlarge", "use1-az1"),
        ("g6.xlarge", "use1-az6"),
        ("g6.xlarge", "use2-az1"),
        ("g6.xlarge", "us-west-2"),  # in no zone of the region
    }
    assert (
        spot["g6.xlarge", "use2-az1"] == "no spot price of g6.xlarge in use2-az1 in synthetic.json"
    )
    absent = planned(configuration({"regions": ["us-east-2", "eu-west-1"]}))
    reasons = {r.reason for r in absent.rejected if r.region == "eu-west-1" and r.market == "spot"}
    assert (
        "no spot price of g5.xlarge in eu-west-1 in synthetic.json: it has no record of the region"
        in reasons
    )
    assert any("eu-west-1 none" in line for line in absent.prices)


def test_zones_of_the_configuration_are_the_only_candidates():
    plan = planned(configuration({"zones": ["use1-az6", "usw2-az1"]}))
    assert {c.place for c in plan.ranked} == {"use1-az6", "usw2-az1"}
    assert {(c.market, c.zone) for c in plan.ranked if c.region == "us-east-1"} == {
        ("spot", "use1-az6"),
        # On-demand costs the same in each zone, and the gang lies in one
        ("on_demand", "use1-az6"),
    }
    assert {r.kind for r in plan.rejected if r.region == "us-east-2"} == {"outside cost.zones"}


def test_zones_of_the_configuration_find_no_price_in_a_file_that_names_zones_only(tmp_path: Path):
    path = tmp_path / "prices.csv"
    path.write_text(
        "Timestamp,InstanceType,AvailabilityZone,SpotPrice\n2026-09-21T07:00:00Z,g5.xlarge,us-east-1a,0.41\n"
    )
    config = configuration({"prices": str(path), "regions": ["us-east-1"], "zones": ["use1-az4"]})
    reasons = {
        r.instance_type: r.reason for r in planned(config).rejected if r.kind == "no spot price"
    }
    why = (
        "zones are known by name only, because the file has no ids of us-east-1a; leave "
        "cost.zones empty"
    )
    assert reasons["g5.xlarge"] == f"no spot price of g5.xlarge in use1-az4 in prices.csv: {why}"
    assert reasons["g6.xlarge"] == "no spot price of g6.xlarge in us-east-1 in prices.csv"


def test_the_price_reaches_terms_bill_and_report_as_quoted_with_kind_and_age():
    plan = planned(configuration({"budget_usd": 50.0}))
    node_usd = plan.chosen.price.usd_per_hour + plan.chosen.price.volume_usd_per_hour
    assert plan.terms().usd_per_rank_second == pytest.approx(float(node_usd) / 3600, rel=1e-12)
    assert plan.terms().price_kind == "recorded"
    gang = GangLog(1, 10.0, [[0], [1]])
    gang.steps(1, 5, useful_step=7.7)
    gang.outcome("completed")
    gang.ended("completed", gang.now - 10.0)
    events = [event(PLAN, 0.0, **json.loads(json.dumps(plan.to_json()))), *gang.events]
    ledger = fold(events)
    exact = (
        (Decimal("0.298800") + Decimal("0.010958904"))
        * ledger.paid_microseconds
        / (3600 * 1_000_000)
    )
    assert abs(ledger.total_usd - exact) <= Decimal("0.0000005") and ledger.total_usd > 0
    assert ledger.price_kind == "recorded 2026-09-21 08:00 UTC, 6.2 h old"
    report = build_report(events)
    assert report.savings_usd is None, (
        "no on-demand price of us-east-2 is on record to compare with"
    )
    assert format_key_figures(report)["prices"] == ledger.price_kind
    trust = " ".join(explain_figures(report))
    assert (
        "recorded in synthetic.json (us-east-1, us-east-2, us-west-2 2026-09-21 08:00 UTC, 6.2 h "
        "old)" in trust
    )
    assert (
        "dollars: recorded 2026-09-21 08:00 UTC, 6.2 h old, $0.298800/h per node + $0.0110/h for its volume; exact"
        in trust
    )
    local = build_report(
        [event(PLAN, 0.0, **replace(plan, simulated=True).to_json()), *gang.events]
    )
    assert (
        format_key_figures(local)["prices"]
        == "simulated: priced as if on 2 × g5.xlarge spot in use2-az1"
    )
    trust = " ".join(explain_figures(local))
    assert (
        "in use2-az1, $0.298800/h per node (recorded 2026-09-21 08:00 UTC, 6.2 h old) + $0.0110/h for its volume; exact at "
        "that price" in trust
    )


def test_a_stale_price_is_used_and_marked_as_stale():
    fresh = planned(configuration())
    stale = planned(configuration({"max_price_age_hours": 6.0}))
    assert stale.chosen.zone == fresh.chosen.zone
    assert [c.price.is_stale for c in (fresh.chosen, stale.chosen)] == [False, True]
    assert stale.chosen.price.kind.endswith(": stale") and not fresh.chosen.price.kind.endswith(
        "stale"
    )
    assert any("stale, older than cost.max_price_age_hours 6" in line for line in stale.prices)
    assert (
        "(r!)" in render_plan(stale) and "!:" in render_plan(stale) and "(r)" in render_plan(fresh)
    )


@pytest.mark.slow
def test_the_text_shows_places_and_ages_and_does_not_flood():
    everything = {"nodes": "auto", "processes_per_node": "auto", "instance_types": []}
    for config in (configuration(), configuration(cluster=everything)):
        plan = planned(config, simulated=True)
        text = render_plan(plan)
        lines = text.splitlines()
        assert max(map(len, lines)) <= 100 and len(lines) < 70, "hundreds of rejections are grouped"
        assert f"in {plan.chosen.zone}: the cheapest pool" in text and "6.2h" in text
        assert "usw2-az1 +1" in text or len(plan.ranked) > 50, "equal zones share a line"
        joined = " ".join(line.lstrip("│· ") for line in lines)
        assert "(us-east-1, us-east-2, us-west-2 2026-09-21 08:00 UTC, 6.2 h old)" in joined
        assert (
            "on-demand prices: static table of us-east-1, 2026-07-20, 2 months old; none on "
            "record for us-east-2," in joined
        )
        assert Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False))) == plan


def test_the_static_table_shows_its_age_and_covers_only_its_regions():
    config = configuration({"prices": "static", "regions": ["us-west-2"]})
    refused = planned(config)
    assert not refused.ranked and "no spot price" in refused.refusal.message
    assert refused.refusal.hint == (
        "run ebbflow catalogue refresh --regions us-west-2, set cost.prices to live, or add "
        "us-east-1 to cost.regions"
    )
    both = planned(configuration({"prices": "static", "regions": ["us-east-1", "us-west-2"]}))
    assert {c.region for c in both.ranked} == {"us-east-1"}
    assert (
        "on-demand prices of 2026-07-20, 2 months old; savings of 2025-07, 15 months old"
        in both.prices[0]
    )
    assert str(both.chosen.price.usd_per_hour) == "0.410448" and both.chosen.price.kind.startswith(
        "estimated"
    )


def test_tables_older_than_90_days_are_named_with_the_command() -> None:
    recorded = datetime(2026, 7, 20, tzinfo=UTC).timestamp()
    regions = ["us-east-1"]
    young = warn_of_age(recorded + 60 * 86400, regions)
    assert young is not None and "on-demand" not in young, "only the advisor's table is old"
    late = warn_of_age(recorded + 91 * 86400, regions)
    assert late is not None and "on-demand prices of us-east-1 (3 months)" in late
    assert "spot advisor (16 months)" in late and late.endswith(
        "fix: ebbflow catalogue refresh --regions us-east-1"
    )
    assert late in make_plan(RunConfig(), now_utc=recorded + 91 * 86400).notes
