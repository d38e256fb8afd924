"""The pool whose price a node pays: planned, recorded, quoted for another zone or type, or the
Batch job's own.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from ebbflow.core.events import PLAN, PRICES, Event
from ebbflow.cost.errors import LedgerError
from ebbflow.cost.ledger.instances import BatchJob
from ebbflow.cost.ledger.pricing import NodePrice, PoolName, Pricing, parse_pool, parse_usd
from tests.support.timelines import WALL, event, paid_node, prices_event

CHOSEN: dict[str, Any] = {
    "instance_type": "g5.xlarge",
    "market": "spot",
    "region": "us-east-1",
    "zone": "use1-az1",
    "usd_per_hour": 1.0,
    "on_demand_usd_per_hour": 3.0,
    "price_kind": "planned",
}
G6 = {"instance_type": "g6.xlarge"}
ON_DEMAND = "on-demand in use1-az1"
PLANNED = "g5.xlarge spot in use1-az1"

POOL = {"instance_type": "g5.xlarge", "market": "spot", "changes": [[WALL, "1"]]}


def plan(
    t: float = 0.0,
    *,
    ranked: list[dict] | None = None,
    on_demand: dict | None = None,
    **chosen: Any,
) -> Event:
    """A plan of $1 on spot in use1-az1. ranked, on_demand: the quotes of other pools. chosen: other
    than `CHOSEN`.
    """
    return event(
        PLAN, t, simulated=False, chosen=CHOSEN | chosen, ranked=ranked, on_demand=on_demand
    )


def candidate(usd: str, **pool: Any) -> dict[str, Any]:
    return CHOSEN | {"quoted_usd_per_hour": usd, "price_kind": f"quote of {usd}"} | pool


AZ1 = candidate("5", zone="use1-az1")
AZ2 = candidate("6", zone="use1-az2")
G6_AZ1 = candidate("7", instance_type="g6.xlarge", zone="use1-az1")
G6_AZ2 = candidate("8", instance_type="g6.xlarge", zone="use1-az2")
G6_NAMED = candidate("9", instance_type="g6.xlarge", zone="us-east-1c")
G6_ON_DEMAND = candidate("10", instance_type="g6.xlarge", market="on_demand", zone="use1-az1")
G6_FAR = candidate("11", instance_type="g6.xlarge", region="us-west-2", zone="use1-az1")
AZ2_FAR = candidate("12", region="us-west-2", zone="use1-az2")
AZ2_ON_DEMAND = candidate("13", market="on_demand", zone="use1-az2")
NO_AZ2 = [AZ1, AZ2_FAR, AZ2_ON_DEMAND, G6_AZ2]


def price(
    events: list[Event], machine: dict | None = None, job: BatchJob | None = None, at: float = 100.0
):
    return Pricing.of(events).price_node(paid_node(at, 10.0, **(machine or {})), job)


def usd_and_place(found: NodePrice) -> tuple[Decimal, str]:
    return found.curve.first, str(found.pool)


@pytest.mark.parametrize(
    ("at", "usd"),
    [(99.0, 1), (100.0, 2), (150.0, 2), (200.0, 3), (0.0, 1)],
)
def test_a_node_has_the_price_of_the_last_plan_before_its_start_or_of_the_first(
    at: float, usd: int
) -> None:
    plans = [plan(50.0), plan(100.0, usd_per_hour=2.0), plan(200.0, usd_per_hour=3.0)]
    assert price(plans, at=at).curve.first == usd


def test_a_plan_that_chose_no_pool_is_none() -> None:
    refused = event(PLAN, 90.0, simulated=False, chosen=None)
    assert price([plan(), refused]).curve.first == 1
    other = event(PRICES, 90.0, chosen=CHOSEN | {"usd_per_hour": 9.0})
    assert price([plan(), other]).curve.first == 1, "nor is another event that chose one"
    nothing = price([refused])
    assert (nothing.curve.first, nothing.on_demand_usd_per_hour, nothing.kind, nothing.pool) == (
        0,
        None,
        "unpriced",
        None,
    )


@pytest.mark.parametrize(
    ("machine", "usd", "place"),
    [
        ({}, 10, "g5.xlarge spot in use1-az1"),
        ({"zone_id": "use1-az2", "zone": "us-east-1c"}, 20, "g5.xlarge spot in use1-az2"),
        ({"zone": "us-east-1c"}, 30, "g5.xlarge spot in us-east-1c"),
        ({"zone_id": "use1-az9", "zone": "us-east-1c"}, 30, "g5.xlarge spot in us-east-1c"),
        ({"instance_type": "g6.xlarge"}, 40, "g6.xlarge spot in use1-az1"),
        ({"market": "on_demand"}, 50, "g5.xlarge on-demand in use1-az1"),
        # Prices for any place are no prices of a zone.
        ({"instance_type": "p5.48xlarge"}, 1, "p5.48xlarge spot in use1-az1"),
    ],
)
def test_recorded_changes_of_the_machines_pool_come_first(
    machine: dict, usd: int, place: str
) -> None:
    """A pool other than the planned one has the price of its first change before that change, too."""
    changes = [
        prices_event([(-5.0, "10")], region="us-east-1", zone="use1-az1"),
        prices_event([(150.0, "21"), (120.0, "20")], zone="use1-az2"),
        prices_event([(-5.0, "30")], zone="us-east-1c"),
        prices_event([(-5.0, "40")], zone="use1-az1", instance_type="g6.xlarge"),
        prices_event([(-5.0, "50")], zone="use1-az1", market="on_demand"),
    ]
    found = price([plan(), *changes], machine)
    assert (found.curve.price_at(WALL + 100.0), str(found.pool)) == (usd, place)
    is_planned = str(found.pool) == PLANNED
    assert found.curve.first == (1 if is_planned else usd)
    assert (found.kind == "planned") is (usd != 1), "without recorded changes it says what it is of"


def test_a_pool_with_recorded_changes_keeps_them_after_the_plans_quote() -> None:
    recorded = prices_event([(200.0, "7"), (150.0, "5")], zone="use1-az1")
    curve = price([plan(), recorded]).curve
    assert [curve.price_at(WALL + at) for at in (149.0, 150.0, 199.0, 200.0)] == [1, 5, 5, 7]


def test_a_simulated_run_has_the_planned_price_wherever_it_runs() -> None:
    simulated = event(PLAN, 0.0, simulated=True, chosen=CHOSEN)
    found = price(
        [simulated, prices_event([(-1.0, "9")], zone="use1-az2")],
        {"zone_id": "use1-az2", "market": "on_demand"},
    )
    assert (found.curve.first, found.kind, str(found.pool)) == (
        1,
        "simulated",
        "g5.xlarge spot in use1-az1",
    )


@pytest.mark.parametrize(
    ("machine", "ranked", "usd", "pool", "kind"),
    [
        # The planned type and market: another zone has its own quote, if the plan has one.
        ({}, [AZ1, AZ2], 1, PLANNED, "planned"),
        ({"zone_id": "use1-az1"}, [AZ1, AZ2], 1, PLANNED, "planned"),
        (
            {"zone_id": "use1-az2"},
            [*NO_AZ2, AZ2],
            6,
            "g5.xlarge spot in use1-az2",
            "quote of 6; of",
        ),
        ({"zone": "us-east-1c"}, [candidate("6", zone="us-east-1c")], 1, PLANNED, "planned"),
        (
            {"zone_id": "use1-az2"},
            NO_AZ2,
            1,
            PLANNED,
            f"planned, of the planned {PLANNED}: the machine is in use1-az2, no price is on record",
        ),
        ({"zone_id": "use1-az2"}, None, 1, PLANNED, "planned, of the planned"),
        # Another type: first a quote of the machine's zone, by id or by name, else that of the
        # planned zone.
        (
            G6,
            [G6_ON_DEMAND, G6_FAR, G6_AZ2, G6_AZ1],
            7,
            "g6.xlarge spot in use1-az1",
            "quote of 7; of g6.xlarge spot",
        ),
        (
            G6 | {"zone_id": "use1-az2"},
            [G6_AZ1, G6_AZ2],
            8,
            "g6.xlarge spot in use1-az2",
            "quote of 8; of",
        ),
        (
            G6 | {"zone": "us-east-1c"},
            [G6_AZ1, G6_NAMED],
            9,
            "g6.xlarge spot in us-east-1c",
            "quote of 9; of",
        ),
        (
            G6 | {"zone_id": "use1-az7"},
            [G6_AZ2, G6_AZ1],
            8,
            "g6.xlarge spot in use1-az2",
            "quote of 8; of",
        ),
        (
            G6,
            [G6_ON_DEMAND, G6_FAR],
            1,
            "g6.xlarge spot in use1-az1",
            f"planned, of the planned {PLANNED}: the machine is g6.xlarge spot, of which no "
            "price is on record",
        ),
        # On demand: the type's own on-demand price before any quote, and never the spot price.
        (
            {"market": "on_demand"},
            [AZ1, AZ2_ON_DEMAND],
            3,
            f"g5.xlarge {ON_DEMAND}",
            "recorded: on-demand, of g5",
        ),
        (
            G6 | {"market": "on_demand"},
            [G6_AZ1, G6_ON_DEMAND],
            4,
            f"g6.xlarge {ON_DEMAND}",
            "recorded: on-demand",
        ),
    ],
)
def test_without_recorded_changes_a_node_pays_a_quote_of_the_plan(
    machine, ranked, usd: int, pool: str, kind: str
) -> None:
    found = price([plan(ranked=ranked, on_demand={"g6.xlarge": "4"})], machine)
    assert usd_and_place(found) == (usd, pool)
    assert found.kind.startswith(kind)


def test_an_on_demand_machine_without_its_own_price_pays_a_quote_or_the_planned_types_on_demand_price() -> (
    None
):
    machine = G6 | {"market": "on_demand"}
    quoted = price([plan(ranked=[G6_AZ1, G6_ON_DEMAND])], machine)
    assert usd_and_place(quoted) == (10, "g6.xlarge on-demand in use1-az1")
    usual = price([plan(ranked=[G6_AZ1])], machine)
    assert usd_and_place(usual) == (3, "g6.xlarge on-demand in use1-az1")
    why = "the machine is g6.xlarge on-demand, of which no price is on record"
    assert usual.kind == f"planned, of the planned g5.xlarge on-demand in use1-az1: {why}"
    nothing = price([plan(on_demand_usd_per_hour=None)], machine)
    assert nothing.curve.first == 1 and f"of the planned {PLANNED}: {why}" in nothing.kind


def test_a_zone_name_of_the_plan_is_compared_with_the_machines_zone_name() -> None:
    named = plan(zone="us-east-1a", ranked=[candidate("6", zone="us-east-1b")])
    assert price([named], {"zone_id": "use1-az2", "zone": "us-east-1a"}).curve.first == 1
    assert price([named], {"zone_id": "use1-az2", "zone": "us-east-1b"}).curve.first == 6
    anywhere = plan(zone=None, ranked=[candidate("6", zone="us-east-1b")])
    assert price([anywhere], {"zone_id": "use1-az2", "zone": "us-east-1b"}).curve.first == 1, (
        "planned for any zone"
    )


@pytest.mark.parametrize(
    ("machine", "usd"),
    [({}, 3), (G6, 4), ({"instance_type": "p5.48xlarge"}, None), ({"market": "on_demand"}, 3)],
)
def test_on_demand_price_is_that_of_the_machines_type(machine: dict, usd: int | None) -> None:
    assert (
        price([plan(ranked=[G6_AZ1], on_demand={"g6.xlarge": 4})], machine).on_demand_usd_per_hour
        == usd
    )
    assert price([plan(on_demand_usd_per_hour=None)]).on_demand_usd_per_hour is None


def batch_job(placed: float = 100.0, **placement: Any) -> BatchJob:
    return BatchJob(
        job_id="j",
        nodes=1,
        ranks=1,
        started=WALL,
        stopped=WALL + 50,
        cause="ended",
        placed_wall=WALL + placed,
        candidate={
            key: CHOSEN[key]
            for key in ("instance_type", "market", "region", "zone", "usd_per_hour")
        }
        | placement,
    )


def test_a_batch_job_has_the_plan_before_its_submission_and_the_pool_of_its_placement() -> None:
    plans = [plan(), plan(150.0, usd_per_hour=2.0, on_demand_usd_per_hour=4.0, price_kind="later")]
    early = price(plans, job=batch_job(100.0), at=900.0)
    assert (early.curve.first, early.on_demand_usd_per_hour, early.kind) == (1, 3, "planned")
    early = price(plans, job=batch_job(100.0, usd_per_hour=6.0), at=900.0)
    assert (early.curve.first, early.on_demand_usd_per_hour) == (6, 3)
    assert price(plans, job=batch_job(usd_per_hour=2.0, placed=160.0), at=100.0).curve.first == 2
    assert Pricing.of(plans).price_job(batch_job(160.0, quoted_usd_per_hour="8")).curve.first == 8
    elsewhere = price(plans, job=batch_job(zone="use1-az2", usd_per_hour=6.0))
    assert usd_and_place(elsewhere) == (6, "g5.xlarge spot in use1-az2")
    assert elsewhere.kind == "planned" and elsewhere.on_demand_usd_per_hour == 3
    alone = price([], job=batch_job(usd_per_hour=6.0))
    assert (alone.curve.first, alone.on_demand_usd_per_hour, alone.kind) == (6, None, "recorded")


def test_a_batch_job_at_the_planned_price_keeps_the_plans_details() -> None:
    found = price([plan(price_kind="planned, and kept")], job=batch_job(price_kind="of the job"))
    assert found.kind == "planned, and kept"
    assert (
        price(
            [plan(price_kind="planned")], job=batch_job(quoted_usd_per_hour="2", price_kind="own")
        ).kind
        == "own"
    )


@pytest.mark.parametrize(
    ("placement", "on_demand", "usd"),
    [
        ({"usd_per_hour": 2.0}, {"g5.xlarge": 9}, 3),
        ({"instance_type": "g6.xlarge"}, {"g6.xlarge": 4}, 4),
        ({"instance_type": "g6.xlarge"}, {}, None),
        ({"instance_type": "g6.xlarge"}, None, None),
    ],
)
def test_a_batch_job_of_another_type_has_that_types_on_demand_price(
    placement, on_demand, usd
) -> None:
    assert (
        price([plan(on_demand=on_demand)], job=batch_job(**placement)).on_demand_usd_per_hour == usd
    )
    without = plan(on_demand_usd_per_hour=None, on_demand={"g5.xlarge": 9})
    assert price([without], job=batch_job(usd_per_hour=2.0)).on_demand_usd_per_hour == 9


@pytest.mark.parametrize(
    ("values", "usd"),
    [
        ({}, None),
        ({"usd_per_hour": 2.5}, "2.5"),
        ({"usd_per_hour": 2.5, "quoted_usd_per_hour": "2.50"}, "2.50"),
        ({"usd_per_hour": 0}, "0"),
        ({"usd_per_hour": -0.1}, None),
        ({"usd_per_hour": -1}, None),
        ({"usd_per_hour": "free"}, None),
        ({"usd_per_hour": "NaN"}, None),
        ({"usd_per_hour": "Infinity"}, None),
    ],
)
def test_a_batch_jobs_price_is_valid_or_missing(values: dict, usd: str | None) -> None:
    job = BatchJob(
        job_id="j",
        nodes=1,
        ranks=1,
        started=0.0,
        stopped=1.0,
        cause="ended",
        placed_wall=0.0,
        candidate=values,
    )
    assert (None if job.price is None else str(job.price.usd_per_hour)) == usd


def test_a_batch_job_without_a_price_has_the_plans() -> None:
    job = batch_job(usd_per_hour="unknown", zone="use1-az2")
    assert usd_and_place(price([plan()], job=job)) == (1, PLANNED)
    assert price([], job=job).kind == "unpriced"


@pytest.mark.parametrize(
    ("values", "pool", "name"),
    [
        (
            {"zone": "use1-az1", "region": "us-east-1"},
            ("spot", "use1-az1"),
            "g5.xlarge spot in use1-az1",
        ),
        (
            {"zone": None, "region": "us-east-1"},
            ("spot", "us-east-1"),
            "g5.xlarge spot in us-east-1",
        ),
        ({"market": "on_demand"}, ("on_demand", ""), "g5.xlarge on-demand"),
    ],
)
def test_a_pool_is_named_by_its_zone_or_its_region(
    values: dict, pool: tuple[str, str], name: str
) -> None:
    parsed = parse_pool({"instance_type": "g5.xlarge", "market": "spot", **values})
    assert parsed == PoolName(instance_type="g5.xlarge", market=pool[0], place=pool[1])
    assert str(parsed) == name


def test_a_quote_is_exact_where_the_plan_has_it_as_text() -> None:
    assert str(parse_usd({"quoted_usd_per_hour": "0.410400", "usd_per_hour": 0.41})) == "0.410400"
    assert str(parse_usd({"usd_per_hour": 0.1})) == "0.1"


@pytest.mark.parametrize(
    "pool",
    [
        {key: value for key, value in POOL.items() if key != "changes"},
        {key: value for key, value in POOL.items() if key != "market"},
        POOL | {"changes": 3},
        POOL | {"changes": [["noon", "1"]]},
        POOL | {"changes": [[WALL, "dear"]]},
        POOL | {"changes": [[WALL]]},
        POOL | {"changes": [[WALL, "Infinity"]]},
        POOL | {"changes": [[WALL, "1"], [WALL, "-0.000001"]]},
    ],
)
def test_an_invalid_pool_of_a_prices_event_is_a_ledger_error(pool: dict) -> None:
    with pytest.raises(LedgerError, match=r"^a prices event "):
        Pricing.of([plan(), event(PRICES, 1.0, pools=[pool])])


def test_a_price_of_zero_is_valid() -> None:
    free = event(PRICES, 1.0, pools=[POOL | {"zone": "use1-az1", "changes": [[WALL, "0"]]}])
    assert price([plan(), free]).curve.price_at(WALL) == 0
    assert price([plan(), event(PRICES, 1.0)]).curve.changes == (), (
        "an event without pools changes nothing"
    )


def test_changes_of_several_events_are_joined_and_the_later_event_prevails() -> None:
    events = [
        prices_event([(10.0, "2"), (20.0, "3")], zone="use1-az1"),
        prices_event([(20.0, "4")], zone="use1-az1"),
    ]
    curve = price([plan(), *events]).curve
    assert [curve.price_at(WALL + at) for at in (0.0, 10.0, 20.0)] == [1, 2, 4]
