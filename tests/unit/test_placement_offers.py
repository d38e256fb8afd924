"""Placements as records, the memory of a job, and the queues that can run each pool."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ebbflow.cost.capacity import (
    Placement,
    with_placement,
)
from ebbflow.cost.capacity.placement import (
    QueueOffer,
    explain_no_offer,
    find_offers,
    memory_mib,
    pool_id,
)
from ebbflow.cost.catalogue import load_catalogue
from tests.support.capacity import queue, queues
from tests.support.placing import in_region, placement
from tests.support.pools import on_demand_pool, spot_pool, template_plan

CATALOGUE = load_catalogue()


def test_a_placement_names_its_pool_and_costs_the_price_of_all_nodes() -> None:
    found = placement()
    assert found.pool == pool_id("spot", "g5.xlarge", 2) == "spot/2xg5.xlarge"
    assert found.gang_usd_per_hour == 3.0
    assert str(placement(market="on_demand", nodes=1)) == "1 × g5.xlarge on-demand in queue spot"


def test_a_placement_is_read_from_json_of_any_version() -> None:
    stored = json.loads(json.dumps(placement(fallback={"usd": 1.0}).to_json()))
    assert Placement.from_json({**stored, "of a later version": 1}) == placement(
        fallback={"usd": 1.0}
    )
    for name in ("policy", "start_by_utc", "reservation", "fallback"):
        del stored[name]
    older = Placement.from_json(stored)
    assert (older.policy, older.start_by_utc, older.reservation, older.fallback) == (
        "",
        None,
        None,
        None,
    )
    del stored["nodes"]
    with pytest.raises(TypeError, match="nodes"):
        Placement.from_json(stored)


def test_a_placement_is_logged_without_its_reserve() -> None:
    stored = placement(fallback={"usd": 1.0}).to_json()
    assert "fallback" not in repr(Placement.from_json(stored))


def test_a_job_may_ask_for_the_memory_that_kernel_system_and_agent_leave() -> None:
    """8 GiB register as 7,985 MiB with AWS Batch, so 2.5 % are the kernel's; 5 % are kept for the
    system.
    """
    kind = CATALOGUE["g5.xlarge"]
    for gib, mib in ((16.0, 15143), (64.0, 60670), (1.0, 916)):
        assert memory_mib(replace(kind, ram_gib=gib)) == mib == int(gib * 1024 * 0.975 * 0.95) - 32


def test_a_plan_that_follows_a_placement_has_its_pool_first_and_its_reserve() -> None:
    pools = [
        on_demand_pool(),
        spot_pool(zone="use1-az1"),
        spot_pool(zone="use1-az2"),
        on_demand_pool(nodes=4),
    ]
    plan = replace(template_plan(), ranked=tuple(pools), reserve_seconds=1800.0, reserve_usd=77.0)
    followed = with_placement(plan, placement(zone="use1-az2"))
    assert followed.ranked == (pools[2], pools[0], pools[1], pools[3])
    # A last save of half an hour, and 5 min of idle machines
    assert followed.reserve_usd == pytest.approx(3.0 * (0.5 + 300 / 3600))
    with pytest.raises(
        KeyError, match=r"2 × g5\.xlarge spot in queue spot is not among the 4 pools of the plan"
    ):
        with_placement(plan, placement(zone="use1-az3"))
    with pytest.raises(KeyError):
        with_placement(plan, placement(zone="use1-az2", reservation="cr-1"))


@pytest.mark.parametrize(
    ("queue_region", "region", "pool_region", "offered"),
    [
        ("us-east-1", None, "us-east-1", True),
        ("us-west-2", None, "us-east-1", False),
        ("us-east-1", "us-west-2", "us-east-1", True),
        (None, "us-east-1", "us-east-1", True),
        (None, "us-west-2", "us-east-1", False),
        (None, None, "us-east-1", True),
        (None, "us-west-2", None, True),
        ("us-west-2", None, None, True),
    ],
)
def test_a_queue_runs_pools_of_its_region_or_of_any_if_it_has_none(
    queue_region: str | None, region: str | None, pool_region: str | None, offered: bool
) -> None:
    found = find_offers(
        [spot_pool(region=pool_region)], queues(in_region(queue_region)), region=region
    )
    assert len(found) == int(offered)


def test_each_queue_type_and_size_is_offered_once_in_the_plans_order() -> None:
    cheap = spot_pool(zone="use1-az1")
    dear = spot_pool(zone="use1-az2", usd_per_hour=9.0)
    other = spot_pool(instance_type="g6.xlarge")
    where = queues(in_region("us-east-1", "a"), in_region("us-east-1", "b", ["g5.xlarge"]))
    found = find_offers([on_demand_pool(), cheap, other, dear], where)
    assert [(offer.id, offer.candidate) for offer in found] == [
        ("a/2xg5.xlarge", cheap),
        ("b/2xg5.xlarge", cheap),
        ("a/2xg6.xlarge", other),
    ]
    assert all(offer.is_spot for offer in found)
    assert not QueueOffer(candidate=on_demand_pool(), queue="a").is_spot


def test_the_given_catalogue_decides_which_pools_fit_a_queue() -> None:
    large = replace(CATALOGUE, types=(replace(CATALOGUE["g5.xlarge"], vcpu=64),))
    where = queues(in_region("us-east-1", max_vcpus=100))
    assert len(find_offers([spot_pool()], where)) == 1
    assert find_offers([spot_pool()], where, catalogue=large) == ()
    assert "has 8" not in explain_no_offer([spot_pool()], where, catalogue=large)
    assert "has 128" in explain_no_offer([spot_pool()], where, catalogue=large)
    assert "has 8" in explain_no_offer([spot_pool()], queues(in_region("us-east-1", max_vcpus=7)))


def test_without_an_offer_each_queue_explains_itself_with_the_pool_that_is_nearest_to_it() -> None:
    spot = spot_pool()
    arm = spot_pool(instance_type="g5g.xlarge")
    plain = on_demand_pool()
    where = queues(
        queue("arm", "spot", ["g5g"]),
        queue("od", "on_demand", ["p5"]),
        queue("mixed", None, ["g5"], multi_node=True),
    )
    text = explain_no_offer([plain, spot, arm], where)
    lines = text.split("; ")
    assert lines[0] == f"arm: AWS Batch runs no job of several nodes on Spot, and {arm} is one"
    assert lines[1] == f"od: has p5, and {plain} is none of them", (
        "no pool has its types, so the market's cheapest"
    )
    assert lines[2].startswith("mixed: None, of which the plan has no pool"), "none has its market"
    assert lines[3] == f"its best is {plain}"
    single = queues(queue("od", "on_demand", ["g5"], multi_node=False))
    assert (
        explain_no_offer([spot, plain], single)
        == f"od: takes no job of several nodes, and {plain} is one"
    )
    only_spot = explain_no_offer([spot], queues(queue("od", "on_demand", ["p5"])))
    assert only_spot == f"od: on-demand, of which the plan has no pool; its best is {spot}"


def test_the_explanation_names_a_region_without_a_queue_or_pool() -> None:
    assert explain_no_offer([spot_pool()], {}) == "the account has no queue that training may go to"
    regions = (
        "us-west-2",
        "us-west-1",
        "eu-west-3",
        "eu-west-2",
        "eu-west-1",
        "ca-central-1",
        None,
    )
    where = queues(*(in_region(region, f"in-{region}") for region in regions))
    assert explain_no_offer([spot_pool()], where, region="ap-south-1") == (
        "the plan has no pool in ap-south-1, ca-central-1, eu-west-1, eu-west-2, eu-west-3, "
        "us-west-1, us-west-2, where the queues are; fix: name it in cost.regions"
    )
    here = queues(
        in_region("us-west-2", "a"),
        in_region("us-east-1", "b", usable=False, problem="is DISABLED"),
    )
    assert explain_no_offer([spot_pool()], here) == "a: is in us-west-2; b: is DISABLED"
