"""The ledger at prices that change: the price of each moment, by the second, a minute at least for
each instance.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.core.events import CONFIGURED, GENERATION_ENDED, NODE_ENDED, NODE_STARTED, Event
from ebbflow.cost.errors import LedgerError
from ebbflow.cost.ledger.ledger import fold
from ebbflow.cost.ledger.pricing import PriceCurve
from tests.support.timelines import WALL, GangLog, event, plan_event, prices_event, timelines

_moments = st.integers(-5000, 90_000).map(lambda hundredths: hundredths / 100)
_changes = st.lists(
    st.tuples(_moments, st.floats(0.01, 90)), max_size=8, unique_by=lambda change: change[0]
)


def usd_of(events: list[Event]) -> dict[str, Decimal]:
    return {str(line.ledger_class): line.usd for line in fold(events).lines}


def one_node(machine: dict | None = None, *, start: float = 0.0, number: int = 1) -> GangLog:
    """20 s: 4 of start-up, 4 steps of 3 s, 4 of shutdown, on one node of two ranks."""
    gang = GangLog(number, start, [[0, 1]], machines=[machine or {}])
    gang.phase("startup", 4.0)
    gang.steps(1, 4, useful_step=3.0)
    gang.commit(4)
    gang.outcome("completed")
    gang.phase("shutdown", 4.0)
    gang.ended("completed", 20.0)
    return gang


def test_a_change_within_a_step_is_charged_to_the_seconds_after_it():
    # $3.60/h is 0.1 cent a second for the node; from second 5.5, in the middle of a step, ten times
    # that.
    events = [plan_event(3.6), *one_node().events, prices_event([(5.5, 36.0)])]
    assert usd_of(events) == {
        "startup": Decimal("0.004"),
        "useful_step": Decimal("0.001") * Decimal("1.5") + Decimal("0.01") * Decimal("10.5"),
        "shutdown": Decimal("0.04"),
    }
    assert fold(events).total_usd == Decimal("0.1505")


def test_prices_of_another_pool_change_nothing_and_a_price_from_before_holds():
    elsewhere = [
        prices_event([(5.0, 99.0)], zone="use1-az9"),
        prices_event([(5.0, 99.0)], market="on_demand"),
    ]
    assert fold([plan_event(3.6), *one_node().events, *elsewhere]).total_usd == Decimal("0.02")
    before = prices_event([(-500.0, 7.2), (-9000.0, 99.0)])
    assert fold([plan_event(3.6), *one_node().events, before]).total_usd == Decimal("0.04")


def test_a_machine_in_another_zone_than_planned_pays_that_zones_price():
    recorded = prices_event([(-1.0, 72.0)], zone="use1-az4")
    there, unknown = (
        {"instance_id": "i-1", "zone_id": zone, "uptime_seconds": 3600.0}
        for zone in ("use1-az4", "x")
    )
    assert fold([plan_event(3.6), *one_node(there).events, recorded]).total_usd == Decimal("0.4")
    assert fold([plan_event(3.6), *one_node(unknown).events, recorded]).total_usd == Decimal("0.02")


@pytest.mark.parametrize(("uptime", "missing"), [(0.0, 40.0), (25.0, 15.0), (300.0, 0.0)])
def test_an_instance_is_billed_a_minute_at_least_its_boot_included(uptime: float, missing: float):
    events = [plan_event(3.6), *one_node({"instance_id": "i-1", "uptime_seconds": uptime}).events]
    ledger = fold(events)
    assert ledger.paid_rank_seconds == 2 * (20.0 + missing + uptime)
    assert usd_of(events).get("minimum_charge", Decimal(0)) == Decimal("0.001") * Decimal(missing)
    assert fold([plan_event(3.6), *one_node().events]).paid_rank_seconds == 40.0, (
        "no instance, no start of one"
    )


def test_an_instance_is_billed_while_it_waits_for_the_next_generation():
    machine = {"instance_id": "i-1", "uptime_seconds": 3600.0}
    first = one_node(machine)
    soon = one_node(machine, start=50.0, number=2)
    late = one_node(machine, start=5000.0, number=3)
    ledger = fold([plan_event(3.6), *first.events, *soon.events, *late.events])
    idle = next(line for line in ledger.lines if line.ledger_class == "idle")
    assert (idle.rank_seconds, idle.usd, idle.kind) == (2 * 30.0, Decimal("0.03"), "estimated")
    assert ledger.total_usd == Decimal("0.03") + 3 * Decimal("0.02")


def test_an_on_demand_machine_is_never_charged_at_the_planned_spot_price():
    machine = {"instance_type": "g5.xlarge", "market": "on_demand"}
    real = fold([plan_event(3.6, 7.2), *one_node(machine).events])
    assert (real.total_usd, real.price_kind.split(":")[0]) == (Decimal("0.04"), "recorded")
    as_if = fold([plan_event(3.6, 7.2, simulated=True), *one_node(machine).events])
    assert (as_if.total_usd, as_if.price_kind) == (Decimal("0.02"), "simulated")


def test_a_launch_that_never_became_a_node_costs_nothing():
    gang = GangLog(1, 0.0, [[0], [1]])
    gang.events = [
        event for event in gang.events if not (event.name == NODE_STARTED and event.node == 1)
    ]
    gang.add(
        GENERATION_ENDED, 30.0, reason="roll_call", culprit="node 1 never came", user_code=False
    )
    gang.node_ended(0, 30.0, "roll_call")
    ledger = fold([plan_event(3.6), *gang.events])
    assert ledger.paid_rank_seconds == 30.0 and ledger.total_usd == Decimal("0.03")
    gang.events = [event for event in gang.events if event.name not in (NODE_STARTED, NODE_ENDED)]
    assert fold([plan_event(3.6), *gang.events]).total_usd == 0


def test_the_ledger_names_the_payer():
    rows = [
        {"key": "cost.owner", "value": "ada", "source": "--set"},
        {"key": "cost.project", "value": None},
    ]
    ledger = fold([event(CONFIGURED, 0.0, settings=rows), plan_event(), *one_node().events])
    assert (ledger.owner, ledger.project) == ("ada", "")


@pytest.mark.parametrize("price", ["coffee", "NaN", "-1"])
def test_a_price_that_is_none_is_named(price: str):
    with pytest.raises(LedgerError, match="prices event"):
        fold([plan_event(), *one_node().events, prices_event([(5.0, price)])])


def exact_usd(events: list[Event], changes: list[tuple[float, float]], first: float) -> Fraction:
    """What all nodes cost, added up second by second of constant price, in fractions: no code of
    the ledger's.
    """
    total = Fraction(0)
    for group in {
        (recorded.generation, recorded.node) for recorded in events if recorded.name == NODE_STARTED
    }:
        mine = [recorded for recorded in events if (recorded.generation, recorded.node) == group]
        start = next(event.t_mono for event in mine if event.name == NODE_STARTED)
        told = [start + event.data["seconds"] for event in mine if event.name == NODE_ENDED]
        seen = [event.t_mono for event in mine if event.rank >= 0 or event.name == "node_heartbeat"]
        if told:
            end = told[0]
        else:
            end = max(seen, default=start)
        moments = sorted({start, end, *(at for at, _ in changes if start < at < end)})
        for left, right in pairwise(moments):
            held = [usd for at, usd in sorted(changes, key=lambda change: change[0]) if at <= left]
            total += Fraction(str(held[-1] if held else first)) * Fraction(right - left) / 3600
    return total


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(timelines(), _changes)
def test_every_paid_second_costs_the_price_of_its_moment(
    timeline: tuple[list[Event], int], changes
):
    """Random kills and lost ends at random prices: lines sum to the total, and the total is ∫ price
    over paid time.
    """
    events, _ = timeline
    first = next(event.data["chosen"]["usd_per_hour"] for event in events if event.name == "plan")
    ledger = fold([*events, prices_event(changes)])
    assert sum(line.rank_microseconds for line in ledger.lines) == ledger.paid_microseconds
    assert sum((line.usd for line in ledger.lines), Decimal(0)) == ledger.total_usd
    assert sum(bill.rank_microseconds for bill in ledger.nodes) == ledger.paid_microseconds
    assert all(line.usd >= 0 for line in ledger.lines)
    # Wall times are known to about a microsecond, and dollars are rounded once, at the sixth
    # decimal.
    steepest = (
        max([first, *(usd for _, usd in changes)])
        / 3600
        * 2e-6
        * (2 + len(changes))
        * len(ledger.nodes)
    )
    assert float(ledger.total_usd) == pytest.approx(
        float(exact_usd(events, changes, first)), abs=1e-6 + steepest
    )


@settings(max_examples=60, deadline=None)
@given(timelines(), _changes, st.data())
def test_instances_are_billed_a_minute_and_for_their_pauses(timeline, changes, data: st.DataObject):
    """On instances that random nodes share, at once or one after the other: it adds up, and none is
    billed less.
    """
    events = []
    for logged in timeline[0]:
        if logged.name == NODE_STARTED:
            known = {"instance_id": f"i-{data.draw(st.integers(1, 3))}", "uptime_seconds": 10.0}
            logged = replace(logged, data={**logged.data, **known})
        events.append(logged)
    ledger = fold([*events, prices_event(changes)])
    assert sum((line.usd for line in ledger.lines), Decimal(0)) == ledger.total_usd
    assert sum(line.rank_microseconds for line in ledger.lines) == ledger.paid_microseconds
    assert sum((line.usd for line in ledger.causes), Decimal(0)) == ledger.total_usd
    assert sum(line.rank_microseconds for line in ledger.causes) == ledger.paid_microseconds
    for name in {bill.node.instance_id for bill in ledger.nodes}:
        mine = [bill for bill in ledger.nodes if bill.node.instance_id == name]
        extra_seconds = []
        for bill in mine:
            extra_seconds += [extra.seconds for extra in bill.extras]
        seconds = sum(extra_seconds)
        reached = 0.0
        for node in sorted((bill.node for bill in mine), key=lambda node: node.started_wall):
            seconds += max(0.0, node.ended_wall - max(node.started_wall, reached))
            reached = max(reached, node.ended_wall)
        assert seconds >= 60.0 - 1e-3


@given(_changes, st.floats(-100, 1000), st.floats(0, 500), st.floats(0, 500))
def test_a_curves_integrals_add_up(changes, start: float, one: float, two: float):
    curve = PriceCurve.of(Decimal("1.5"), [(WALL + at, Decimal(str(usd))) for at, usd in changes])
    a, b, c = (round((WALL + at) * 1e6) for at in (start, start + one, start + one + two))
    assert curve.cost(a, b) + curve.cost(b, c) == pytest.approx(
        curve.cost(a, c), abs=Decimal("1e-20")
    )
    if curve.is_constant(a, c):
        assert curve.cost(a, c) == pytest.approx(
            curve.price_at(a / 1e6) * (c - a) / 3_600_000_000, abs=Decimal("1e-20")
        )
