"""Nodes on machines as they really were: shared by two nodes, or of another type than planned."""

from __future__ import annotations

import random
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.core.events import NODE_ENDED, NODE_HEARTBEAT, NODE_STARTED, Event
from ebbflow.cost.ledger.ledger import Ledger, fold
from ebbflow.cost.report.figure_text import explain_figures
from ebbflow.cost.report.report import build_report
from tests.support.timelines import GangLog, plan_event, prices_event, timelines

SPOT = {"instance_type": "g5.xlarge", "market": "spot"}

_changes = st.lists(
    st.tuples(
        st.integers(-5000, 60_000).map(lambda hundredths: hundredths / 100), st.floats(0.01, 90)
    ),
    max_size=6,
    unique_by=lambda change: change[0],
)

OTHER = {
    "instance_id": "i-1",
    "instance_type": "g6.4xlarge",
    "market": "spot",
    "uptime_seconds": 3600.0,
}


def gang(
    machines: list[dict], *, number: int = 1, start: float = 0.0, seconds: float = 100.0
) -> GangLog:
    """One rank on each node: 10 s of start-up, steps, 10 s of shutdown."""
    log = GangLog(number, start, [[rank] for rank in range(len(machines))], machines=machines)
    log.phase("startup", 10.0)
    log.steps(1, 4, useful_step=(seconds - 20.0) / 4)
    log.commit(4)
    log.outcome("completed")
    log.phase("shutdown", 10.0)
    log.ended("completed", seconds)
    return log


def real_plan(**more) -> Event:
    """$3.60 on spot, $7.20 on demand, of a run that is no simulation. more: of the plan, beside the
    chosen pool.
    """
    made = plan_event(3.6, 7.2)
    return replace(made, data={**made.data, **more})


def assert_adds_up(ledger: Ledger) -> None:
    for lines in (ledger.lines, ledger.causes):
        assert sum((line.usd for line in lines), Decimal(0)) == ledger.total_usd
        assert sum(line.rank_microseconds for line in lines) == ledger.paid_microseconds


def test_two_nodes_on_one_instance_pay_for_it_once() -> None:
    apart = [{"instance_id": f"i-{n}", "uptime_seconds": 3600.0, **SPOT} for n in (1, 2)]
    together = [apart[0], apart[0]]
    assert fold([real_plan(), *gang(apart).events]).total_usd == Decimal("0.2")
    ledger = fold([real_plan(), *gang(together).events])
    assert ledger.total_usd == Decimal("0.1") and ledger.paid_rank_seconds == 200.0
    assert ledger.useful_on_demand_usd == Decimal("0.16"), (
        "80 s of useful steps on demand: the instance once, too"
    )
    report = build_report([real_plan(), *gang(together).events])
    assert report.money["hindsight"]["usd"] == pytest.approx(0.1), "and so it is in hindsight"
    assert_adds_up(ledger)


def test_a_simulated_run_is_priced_as_if_each_node_had_the_planned_machine() -> None:
    known = {"instance_id": "i-1", "uptime_seconds": 5.0, "zone_id": "use1-az4", **SPOT}
    first = gang([known, known], seconds=30.0)
    second = gang([known, known], number=2, start=50.0, seconds=30.0)
    elsewhere = prices_event([(-1.0, 36.0)], zone="use1-az4")
    ledger = fold([plan_event(3.6, simulated=True), *first.events, *second.events, elsewhere])
    assert ledger.total_usd == Decimal("0.12"), (
        "4 × 30 s: this machine's zone, sharing, pauses and minimum are not the plan's"
    )
    assert {line.ledger_class for line in ledger.lines}.isdisjoint({"idle", "minimum_charge"})


def test_the_price_is_shared_only_while_both_are_there() -> None:
    known = {"instance_id": "i-1", "uptime_seconds": 3600.0, **SPOT}
    log = gang([known, known])
    log.events = [
        event for event in log.events if not (event.name == NODE_ENDED and event.node == 1)
    ]
    log.node_ended(1, 160.0)
    # $3.60/h is a tenth of a cent a second, from second 130 on ten times that: 100 s together and
    # 60 s alone.
    ledger = fold([real_plan(), *log.events, prices_event([(130.0, 36.0)])])
    assert ledger.total_usd == Decimal("0.1") + Decimal("0.03") + Decimal("0.3")
    assert [bill.usd for bill in ledger.nodes] == [Decimal("0.05"), Decimal("0.38")]
    assert_adds_up(ledger)


def test_a_minute_is_charged_of_the_instance_and_not_of_each_node_on_it() -> None:
    known = {"instance_id": "i-1", "uptime_seconds": 10.0, **SPOT}
    ledger = fold([real_plan(), *gang([known, known], seconds=30.0).events])
    assert ledger.total_usd == Decimal("0.06"), (
        "10 s of boot, 30 s together and 20 s to make up a minute"
    )
    assert_adds_up(ledger)


def exact_usd(events: list[Event], changes: list[tuple[float, float]], first: float) -> Fraction:
    """What all instances cost: each is paid while any node is on it.

    In fractions, moment by moment.
    """
    lives: dict[str, list[tuple[float, float]]] = {}
    for started in (event for event in events if event.name == NODE_STARTED):
        mine = [
            event
            for event in events
            if (event.generation, event.node) == (started.generation, started.node)
        ]
        told = [
            started.t_mono + event.data["seconds"] for event in mine if event.name == NODE_ENDED
        ]
        seen = [event.t_mono for event in mine if event.rank >= 0 or event.name == NODE_HEARTBEAT]
        if told:
            end = told[0]
        else:
            end = max(seen, default=started.t_mono)
        lives.setdefault(started.data["instance_id"], []).append((started.t_mono, end))
    total = Fraction(0)
    for mine in lives.values():
        moments = sorted({moment for life in mine for moment in life} | {at for at, _ in changes})
        for left, right in pairwise(moments):
            if any(start <= left < end for start, end in mine):
                held = [usd for at, usd in sorted(changes) if at <= left]
                total += Fraction(str(held[-1] if held else first)) * Fraction(right - left) / 3600
    return total


@settings(max_examples=100, deadline=None)
@given(timelines(), _changes, st.integers(0, 10**6))
def test_shared_instances_are_paid_once_at_the_price_of_each_moment(
    timeline, changes, seed: int
) -> None:
    """Nodes that random instances share, at random prices and with random ends: total, lines and
    causes add up.
    """
    draw = random.Random(seed)
    events = []
    for event in timeline[0]:
        if event.name == NODE_STARTED:
            # An hour up, and another one in each generation: no minimum and no pause, which have
            # tests of their own.
            name = f"i-{event.generation}-{draw.randrange(2)}"
            event = replace(
                event, data={**event.data, **SPOT, "instance_id": name, "uptime_seconds": 3600.0}
            )
        if event.name == "plan":
            first = event.data["chosen"]["usd_per_hour"]
        events.append(event)
    ledger = fold([*events, prices_event(changes)])
    assert_adds_up(ledger)
    assert all(line.usd >= 0 for line in ledger.lines)
    steepest = (
        max([first, *(usd for _, usd in changes)])
        / 3600
        * 2e-6
        * (4 + len(changes))
        * len(ledger.nodes)
    )
    assert float(ledger.total_usd) == pytest.approx(
        float(exact_usd(events, changes, first)), abs=1e-6 + steepest
    )


def test_waiting_for_ranks_that_are_still_to_come_or_never_came_is_start_up() -> None:
    waiting, refused = (GangLog(1, 0.0, [[0], [1]]) for _ in range(2))
    for node in (0, 1):
        waiting.heartbeat(node, 30.0)
    refused.add("outcome", 30.0, outcome="budget", message="nothing is left to train with")
    refused.ended("budget", 30.0)
    for log, running in ((waiting, True), (refused, False)):
        [line] = fold([real_plan(), *log.events], running=running).lines
        assert (line.ledger_class, line.rank_seconds) == ("startup", 60.0)


def usd_and_kind(machine: dict, *events: Event) -> tuple[Decimal, str]:
    ledger = fold([*events, *gang([machine]).events])
    return ledger.total_usd, ledger.price_kind


def test_another_type_than_planned_pays_its_own_recorded_price() -> None:
    there = prices_event([(-50.0, 36.0), (50.0, 72.0)], instance_type="g6.4xlarge", zone="use1-az4")
    known = {**OTHER, "zone_id": "use1-az4"}
    assert usd_and_kind(known, real_plan(), there)[0] == Decimal("0.5") + Decimal("1.0")


def test_without_recorded_changes_it_pays_what_the_plan_quoted_of_its_type() -> None:
    quoted = {
        "instance_type": "g6.4xlarge",
        "market": "spot",
        "region": None,
        "zone": None,
        "nodes": 1,
    }
    ranked = [
        {
            **quoted,
            "usd_per_hour": 36.0,
            "quoted_usd_per_hour": "36.00",
            "price_kind": "recorded 2026-07",
        }
    ]
    ranked += [{**ranked[0], "zone": "use1-az4", "quoted_usd_per_hour": "72.00"}]
    usd, kind = usd_and_kind(OTHER, real_plan(ranked=ranked))
    assert usd == Decimal("1") and kind.startswith("recorded 2026-07; of g6.4xlarge spot")
    assert usd_and_kind({**OTHER, "zone_id": "use1-az4"}, real_plan(ranked=ranked))[0] == Decimal(
        "2"
    ), "its own zone"
    on_demand = {**OTHER, "market": "on_demand"}
    usd, kind = usd_and_kind(on_demand, real_plan(ranked=ranked, on_demand={"g6.4xlarge": "72.0"}))
    assert usd == Decimal("2") and kind.startswith("recorded: on-demand, of g6.4xlarge")


def test_a_node_in_an_unplanned_zone_pays_its_quoted_price_or_is_noted() -> None:
    plan = real_plan()
    plan.data["chosen"] |= {"region": "us-east-1", "zone": "use1-az1"}
    there = {
        **plan.data["chosen"],
        "zone": "use1-az2",
        "quoted_usd_per_hour": "36.00",
        "price_kind": "recorded 2026-07",
    }
    plan.data["ranked"] = [plan.data["chosen"], there]
    known = {"instance_id": "i-1", "uptime_seconds": 3600.0, **SPOT, "zone": "us-east-1b"}
    usd, kind = usd_and_kind({**known, "zone_id": "use1-az2"}, plan)
    assert usd == Decimal("1") and kind.startswith(
        "recorded 2026-07; of g5.xlarge spot in use1-az2"
    )
    usd, kind = usd_and_kind({**known, "zone_id": "use1-az4"}, plan)
    assert (
        usd == Decimal("0.1")
        and "of the planned g5.xlarge spot in use1-az1: the machine is in use1-az4, no price"
        in kind
    )
    # A name alone says nothing against an id
    for machine in (known, {**known, "zone_id": "use1-az1"}):
        assert usd_and_kind(machine, plan) == (Decimal("0.1"), "recorded 2026-07-20")


def test_an_unrecorded_price_falls_back_to_the_planned_type_with_a_note() -> None:
    usd, kind = usd_and_kind(OTHER, real_plan(on_demand={"g6.4xlarge": "72.0"}))
    assert usd == Decimal("0.1"), "a spot machine is never charged at the on-demand price"
    assert (
        "of the planned g5.xlarge spot: the machine is g6.4xlarge spot, of which no price is on "
        "record" in kind
    )
    usd, kind = usd_and_kind({**OTHER, "market": "on_demand"}, real_plan())
    assert usd == Decimal("0.2") and "of the planned g5.xlarge on-demand" in kind


def test_the_report_lists_how_each_machine_was_charged() -> None:
    first = gang([OTHER])
    second = gang([{**OTHER, **SPOT}], number=2, start=5000.0)
    report = build_report([real_plan(), *first.events, *second.events])
    assert [(line["pool"], line["nodes"], line["usd"]) for line in report.money["prices"]] == [
        ("g6.4xlarge spot", 1, 0.1),
        ("g5.xlarge spot", 1, 0.1),
    ]
    [told] = [
        line
        for line in explain_figures(report)
        if line.startswith("prices: 1 of 2 nodes on g6.4xlarge spot")
    ]
    assert "of the planned g5.xlarge spot" in told and "no price is on record" in told
    plan = real_plan()
    plan.data["chosen"]["quoted_usd_per_hour"] = "3.60"
    for machine, quoted in ((OTHER, False), (OTHER | SPOT, True)):
        lines = explain_figures(build_report([plan, *gang([machine]).events]))
        assert any("$3.60/h per node" in line for line in lines) is quoted, (
            "the quote is of the planned machine"
        )
