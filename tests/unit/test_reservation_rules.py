"""Reservations, Capacity Blocks and placement scores: when one is usable, its price, and what EC2
is asked.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from ebbflow.core.config.schema import ReservationConfig, RunConfig
from ebbflow.cost.prices.quote import Quote
from ebbflow.cost.prices.reservations import CapacityEvidence, Reservation, open_evidence
from tests.support.fake_ec2 import FakeEc2, record_joins, refusal

NOW = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC
HOUR = 3600.0
HELD = Reservation(
    id="cr-1", instance_type="g5.xlarge", instances=2, region="us-east-1", zone="use1-az4"
)
DECLARED = {
    "id": "cr-1",
    "instance_type": "g5.xlarge",
    "instances": 2,
    "region": "us-east-1",
    "zone": "use1-az4",
}

ON_DEMAND = Quote(
    instance_type="g5.xlarge",
    region="us-east-1",
    zone=None,
    zone_name=None,
    usd_per_hour=Decimal("1.006"),
    at=None,
    observed=NOW - HOUR,
    kind="recorded",
    source="2026-07-20",
)

FOUND = {
    "InstanceType": "g5.2xlarge",
    "TotalInstanceCount": 8,
    "AvailableInstanceCount": 5,
    "State": "active",
}

BLOCK_TYPES = (
    "p4d.24xlarge",
    "p4de.24xlarge",
    "p5.48xlarge",
    "p5e.48xlarge",
    "p5en.48xlarge",
    "p6-b200.48xlarge",
)

THREE = ("g5.xlarge", "g5.2xlarge", "g6.xlarge")


def utc(hours: float) -> datetime:
    return datetime.fromtimestamp(NOW + hours * HOUR, UTC)


OFFER = {
    "CapacityBlockOfferingId": "cbo-1",
    "InstanceType": "p5.48xlarge",
    "InstanceCount": 2,
    "AvailabilityZone": "us-east-1a",
    "StartDate": utc(10),
    "EndDate": utc(34),
    "CapacityBlockDurationHours": 24,
    "UpfrontFee": "1440.00",
}


def test_a_configured_reservation_is_read_field_by_field() -> None:
    times = {"start": "2026-09-21T14:13:20Z", "end": "2026-09-21T17:13:20+01:00"}
    declared = ReservationConfig(**DECLARED, **times, usd_per_hour=0.1)
    timed = replace(HELD, start_utc=NOW, end_utc=NOW + 2 * HOUR, usd_per_hour=Decimal("0.1"))
    assert Reservation.of(declared) == timed
    assert Reservation.of(ReservationConfig(**DECLARED)) == HELD
    assert Reservation.of(ReservationConfig(**DECLARED, usd_per_hour=0)).usd_per_hour == 0
    assert (HELD.kind, HELD.problem) == ("configured", "")


@pytest.mark.parametrize(
    ("start", "hours"), [(None, 0.0), (-HOUR, 0.0), (0.0, 0.0), (1.5 * HOUR, 1.5)]
)
def test_the_wait_for_a_reservation_is_until_it_begins(start: float | None, hours: float) -> None:
    if start is None:
        begins = None
    else:
        begins = NOW + start
    assert replace(HELD, start_utc=begins).wait_hours(NOW) == hours


@pytest.mark.parametrize(
    ("changes", "nodes", "why"),
    [
        ({}, 2, ""),
        ({}, 3, "has 2 instances free, and the pool has 3"),
        ({"end_utc": NOW}, 1, "ended 2026-09-21 14:13 UTC"),
        ({"end_utc": NOW - HOUR, "problem": "is expired"}, 1, "ended 2026-09-21 13:13 UTC"),
        ({"end_utc": NOW + 0.25}, 2, ""),
        ({"problem": "is expired"}, 2, "is expired"),
        ({"problem": "is expired"}, 3, "is expired"),
    ],
)
def test_an_unusable_reservation_has_a_reason(
    changes: dict[str, Any], nodes: int, why: str
) -> None:
    assert replace(HELD, **changes).why_unusable(nodes, NOW) == why


@pytest.mark.parametrize(
    ("changes", "kind", "source"),
    [
        ({}, "recorded", "in cost.reservations"),
        ({"kind": "live"}, "recorded", "in cost.reservations"),
        ({"fee_usd": Decimal(9)}, "recorded", "the block's fee ÷ its hours"),
        ({"kind": "live", "fee_usd": Decimal(9)}, "live", "the block's fee ÷ its hours"),
    ],
)
def test_a_reservation_is_quoted_at_its_own_price(
    changes: dict[str, Any], kind: str, source: str
) -> None:
    assert replace(HELD, usd_per_hour=Decimal(0), **changes).quote(ON_DEMAND, NOW) == Quote(
        instance_type="g5.xlarge",
        region="us-east-1",
        zone="use1-az4",
        zone_name=None,
        usd_per_hour=Decimal(0),
        at=None,
        observed=NOW,
        kind=kind,
        source=source,
    )


def test_a_reservation_without_a_price_is_quoted_at_the_on_demand_price_in_its_zone() -> None:
    assert HELD.quote(ON_DEMAND, NOW) == replace(ON_DEMAND, zone="use1-az4")
    assert HELD.quote(None, NOW) is None


@pytest.mark.parametrize(
    ("region", "zone", "score"),
    [
        ("us-east-1", "use1-az4", 3),
        ("us-east-1", "use1-az9", None),
        ("us-east-1", None, 7),
        ("us-west-2", None, 9),
        ("eu-west-1", None, None),
    ],
)
def test_a_placement_score_is_of_a_zone_or_the_highest_of_its_region(
    region: str, zone: str | None, score
) -> None:
    scores = {
        ("us-east-1", "use1-az4"): 3,
        ("us-east-1", "use1-az6"): 7,
        ("us-west-2", "usw2-az1"): 9,
    }
    assert CapacityEvidence(scores=scores).score(region, zone) == score


def configuration(
    *, types: tuple[str, ...] = ("g5.xlarge",), plan_for: str = "kubernetes", **options: Any
) -> RunConfig:
    """Live prices and one reservation. options: of the cluster (nodes, market) or of the costs."""
    cluster = {
        "nodes": 2,
        "market": "on_demand",
        "instance_types": list(types),
        "plan_for": plan_for,
    }
    cost = {"prices": "live", "reservations": [DECLARED]}
    for name, value in options.items():
        (cluster if name in ("nodes", "market") else cost)[name] = value
    return RunConfig.model_validate({"cluster": cluster, "cost": cost})


def described(**found: Any) -> Reservation:
    """The configured reservation, as EC2 corrects it."""
    timed = [DECLARED | {"start": "2026-09-21T14:13:20Z", "end": "2026-09-21T15:13:20Z"}]
    client = FakeEc2(describe_capacity_reservations=[{"CapacityReservations": [FOUND | found]}])
    evidence = open_evidence(configuration(reservations=timed), client=lambda _: client)
    assert client.requests == [
        ("describe_capacity_reservations", {"CapacityReservationIds": ["cr-1"]})
    ]
    assert evidence.notes == ()
    [held] = evidence.held
    return held


def test_ec2_corrects_each_field_that_it_knows_of_a_reservation() -> None:
    configured = replace(
        HELD,
        instance_type="g5.2xlarge",
        instances=5,
        start_utc=NOW,
        end_utc=NOW + HOUR,
        kind="live",
    )
    assert described() == configured, "what EC2 does not say stays as configured"
    times = {"StartDate": utc(3), "EndDate": utc(9)}
    corrected = replace(
        configured, zone="use1-az2", start_utc=NOW + 3 * HOUR, end_utc=NOW + 9 * HOUR
    )
    assert described(AvailabilityZoneId="use1-az2", **times) == corrected


@pytest.mark.parametrize(
    ("kind", "end", "expected"),
    [
        ("capacity-block", utc(9), NOW + 8.5 * HOUR),  # its instances end half an hour earlier
        ("default", utc(9), NOW + 9 * HOUR),
        ("capacity-block", None, NOW + HOUR),
    ],
)
def test_a_capacity_block_ends_its_instances_half_an_hour_early(
    kind: str, end, expected: float
) -> None:
    assert described(ReservationType=kind, EndDate=end).end_utc == expected


@pytest.mark.parametrize(
    ("state", "instances", "problem"),
    [
        ("active", 5, ""),
        ("scheduled", 8, ""),  # all its instances will be free when it begins
        ("payment-pending", 8, ""),
        ("expired", 5, "is expired"),
        ("cancelled", 5, "is cancelled"),
    ],
)
def test_the_state_of_a_reservation_decides_what_is_free(
    state: str, instances: int, problem: str
) -> None:
    held = described(State=state)
    assert (held.instances, held.problem) == (instances, problem)


def test_ec2_has_15_seconds_for_all_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = record_joins(monkeypatch)
    described()
    assert limits and all(10.0 < limit <= 15.0 for limit in limits)


@pytest.mark.parametrize("answer", [{}, {"CapacityReservations": []}])
def test_a_reservation_that_ec2_does_not_know_is_unusable(answer: dict) -> None:
    client = FakeEc2(describe_capacity_reservations=[answer])
    [held] = open_evidence(configuration(), client=lambda _: client).held
    assert held == replace(HELD, problem="EC2 knows no reservation cr-1 in us-east-1", kind="live")


@pytest.mark.parametrize(
    "answer",
    [
        refusal("describe_capacity_reservations"),
        {"CapacityReservations": [{"State": "active"}]},  # a field is missing
        {"CapacityReservations": [FOUND, FOUND]},
    ],
)
def test_a_reservation_stays_as_configured_if_ec2_gives_no_usable_answer(answer: Any) -> None:
    client = FakeEc2(describe_capacity_reservations=[answer])
    evidence = open_evidence(configuration(), client=lambda _: client)
    assert evidence.held == (HELD,)
    [note] = evidence.notes
    assert note.startswith("state of reservation cr-1 unknown: ")


@pytest.mark.parametrize(
    ("changes", "network"),
    [({"prices": "static"}, True), ({"plan_for": "local"}, True), ({}, False)],
)
def test_ec2_is_asked_only_for_live_prices_of_a_cloud_and_with_the_network(
    changes: dict, network: bool
) -> None:
    def make(region: str) -> FakeEc2:
        raise AssertionError(region)

    evidence = open_evidence(configuration(**changes), network=network, client=make)
    assert evidence == CapacityEvidence(held=(HELD,))


@pytest.mark.parametrize(("nodes", "count", "days"), [(4, 4, 1), ("auto", 1, 3)])
def test_capacity_blocks_are_asked_for_all_nodes_and_days(
    nodes: int | str, count: int, days: int
) -> None:
    offers = [
        OFFER | {"CurrencyCode": "EUR"},
        OFFER,
        OFFER | {"CurrencyCode": "USD", "CapacityBlockOfferingId": "cbo-2"},
    ]
    pages = [
        {"CapacityBlockOfferings": offers[:2], "NextToken": "more"},
        {"CapacityBlockOfferings": offers[2:]},
    ]
    client = FakeEc2(describe_capacity_block_offerings=pages)
    config = configuration(
        types=("p5.48xlarge",), nodes=nodes, capacity_block_days=days, reservations=[]
    )
    evidence = open_evidence(config, client=lambda _: client)
    first = Reservation(
        id="cbo-1",
        instance_type="p5.48xlarge",
        instances=2,
        region="us-east-1",
        zone="us-east-1a",
        start_utc=NOW + 10 * HOUR,
        end_utc=NOW + 33.5 * HOUR,
        usd_per_hour=Decimal(30),  # $1440 ÷ 2 instances ÷ 24 hours
        fee_usd=Decimal(1440),
        kind="live",
    )
    assert evidence.blocks == (first, replace(first, id="cbo-2")), (
        "a price in another currency is no dollars"
    )
    wanted = {
        "InstanceType": "p5.48xlarge",
        "InstanceCount": count,
        "CapacityDurationHours": 24 * days,
    }
    asked = ("describe_capacity_block_offerings", wanted)
    assert client.requests == [asked, (asked[0], wanted | {"NextToken": "more"})]


@pytest.mark.parametrize("name", [*BLOCK_TYPES, "g5.xlarge", "p3.16xlarge"])
def test_capacity_blocks_are_sold_of_some_families_in_each_region(name: str) -> None:
    regions = ["us-east-1", "us-west-2"]
    answers = [{"CapacityBlockOfferings": []}] * 2
    clients = {
        region: FakeEc2(region, describe_capacity_block_offerings=list(answers))
        for region in regions
    }
    config = configuration(types=(name,), regions=regions, capacity_block_days=1, reservations=[])
    assert open_evidence(config, client=clients.__getitem__) == CapacityEvidence()
    if name in BLOCK_TYPES:
        asked = 1
    else:
        asked = 0
    assert [len(client.requests) for client in clients.values()] == [asked, asked]


def test_capacity_blocks_are_not_asked_for_without_their_days_and_a_refusal_is_a_note() -> None:
    types = ("p5.48xlarge",)
    nothing = FakeEc2()
    open_evidence(configuration(types=types, reservations=[]), client=lambda _: nothing)
    assert nothing.requests == []
    refused = FakeEc2(
        describe_capacity_block_offerings=[refusal("describe_capacity_block_offerings")]
    )
    config = configuration(types=types, capacity_block_days=1, reservations=[])
    evidence = open_evidence(config, client=lambda _: refused)
    assert evidence.blocks == () and len(evidence.notes) == 1
    assert evidence.notes[0].startswith(
        "Capacity Blocks of p5.48xlarge in us-east-1 unknown: ec2:DescribeCapacity"
    )


@pytest.mark.parametrize(("nodes", "capacity"), [(2, 2), ("auto", 1)])
def test_placement_scores_are_asked_once_for_all_types_and_regions(
    nodes: int | str, capacity: int
) -> None:
    pages = [
        {
            "SpotPlacementScores": [
                {"Region": "us-east-1", "AvailabilityZoneId": "use1-az1", "Score": 2}
            ],
            "NextToken": "m",
        },
        {
            "SpotPlacementScores": [
                {"Region": "us-west-2", "AvailabilityZoneId": "usw2-az1", "Score": 9}
            ]
        },
    ]
    client = FakeEc2(get_spot_placement_scores=pages)
    regions = ["us-west-2", "us-east-1"]
    config = configuration(
        types=THREE, market="spot", nodes=nodes, regions=regions, reservations=[]
    )
    asked_regions = []

    def make(region: str) -> FakeEc2:
        asked_regions.append(region)
        return client

    evidence = open_evidence(config, client=make)
    assert evidence == CapacityEvidence(
        scores={("us-east-1", "use1-az1"): 2, ("us-west-2", "usw2-az1"): 9}
    )
    assert asked_regions == ["us-west-2"]
    (_, first), (_, second) = client.requests
    assert second == first | {"NextToken": "m"}
    assert sorted(first.pop("InstanceTypes")) == sorted(THREE)
    assert first == {
        "TargetCapacity": capacity,
        "TargetCapacityUnitType": "units",
        "SingleAvailabilityZone": True,
        "RegionNames": regions,
    }


@pytest.mark.parametrize(
    ("types", "market", "asked"),
    [(THREE, "spot", 1), (THREE, "auto", 1), (THREE, "on_demand", 0), (THREE[:2], "spot", 0)],
)
def test_placement_scores_are_asked_for_spot_of_at_least_three_types(
    types, market: str, asked: int
) -> None:
    client = FakeEc2(get_spot_placement_scores=[refusal("get_spot_placement_scores")])
    config = configuration(types=types, market=market, reservations=[])
    evidence = open_evidence(config, client=lambda _: client)
    assert (len(client.requests), len(evidence.notes), evidence.scores) == (asked, asked, {})
