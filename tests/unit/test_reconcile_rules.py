"""Reconciliation by hand-made bill lines: each part of a gap in exact dollars, and each finding at
its limit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.core.events import BATCH_ATTEMPT, PLAN, Event
from ebbflow.core.layout import event_key
from ebbflow.core.store import Store
from ebbflow.cost.errors import BillError
from ebbflow.cost.finance.bill import BillLine
from ebbflow.cost.finance.reconcile import (
    BillingFinding,
    GapPart,
    Reconciliation,
    add_command,
    reconcile,
    render,
)
from tests.support.bills import write_report
from tests.support.records import is_frozen, takes_names_only
from tests.support.timelines import WALL, GangLog, event, plan_event, prices_event

HOUR = 3600.0
MACHINE = {
    "instance_type": "g5.xlarge",
    "market": "spot",
    "region": "us-east-1",
    "zone": "us-east-1a",
}
TAG = {"ebbflowjob": "demo"}
_generation = iter(range(1, 10**6))

AT_PRICE = "3,000 s billed at $3.600000/h, metered at $3.600000/h"

NO_AGENT = (
    "no agent of the job was there: is it still running, or did another job use it (--also JOB)?"
)

EVERYTHING = """\
reconciliation of job demo with the synthetic bill
  forecast  $0.90  (estimated by the plan)
  metered   $10.90  (from the job's events)
    of it $0.10 on 1 nodes whose instance is unknown
  billed    $8.60  (2 of 3 instances found)
  gap       -$2.20  billed less metered on joined instances, of which
    price                     $1.40  (1 instance)
    unexplained              -$3.60  (1 instance)
  unexplained: 41.86 % of the bill, more than 1 %
  · i-a: price $1.40: 3,600 s billed at $5.000000/h, metered at $3.600000/h
  · i-c: unexplained -$3.60: metered and not billed
  ! wrong price: i-a ($5.00): $5.0000 billed for 3,600 s in 1 hour from 2027-01-15 08:00 UTC; at the
    prices on record it would be $3.6000
  ! not billed: i-c ($3.60): not in this bill: another account's, or daily?
  · i-a: $3.60 more at other times, not for this job
  · i-b: its clock was about 60 s ahead of the bill's
  · i-a: nodes of the job ran on it at once and divided its price
  · 1 line was given twice, as deliveries of one report repeat them, and counted once
  · storage: $0.25 in lines of its instances or with its tag, which the ledger does not count
  · transfer: $0.50 in lines of its instances or with its tag, which the ledger does not count
  ! unknown instances cannot be joined with a bill; fix: let containers reach the metadata service
    (HttpPutResponseHopLimit 2), or set EBBFLOW_INSTANCE_ID, EBBFLOW_INSTANCE_TYPE and EBBFLOW_ZONE"""

HELP = [
    "[--store URI] [--tag KEY] [--also RUN] [--json] RUN FILE [FILE ...]",
    "RUN a job's name, 'latest', or the folder or s3:// URI of a job",
    "FILE Cost and Usage Report or FOCUS bill (CSV or Parquet), Cost Explorer's daily costs "
    "(CSV), or allocations of OpenCost or Kubecost (JSON or CSV)",
    "--store URI the job's store, if not known to this machine",
    "--tag KEY cost allocation tag of a job (ebbflow-job)",
    "--also RUN another job that may have used the same instances; repeatable",
    "--json as JSON, dollars as exact strings",
]


def node(
    name: str | None, start: float, end: float, *, uptime: float = 0.0, ended: bool = True, **known
) -> list[Event]:
    """One node of one rank, which costs a tenth of a cent per second at the plan's price."""
    machine = {**MACHINE, "instance_id": name, "uptime_seconds": uptime, **known}
    gang = GangLog(next(_generation), start, [[0]], machines=[machine])
    gang.steps(1, 1, useful_step=end - start)
    if ended:
        gang.ended("node_lost", end - start)
    return gang.events


def line(name: str, hour: int, seconds: float, usd: str | None = None, **changes) -> BillLine:
    """A line of an instance for one hour after WALL; without dollars, at a tenth of a cent per
    second.
    """
    known = {
        "resource_id": name,
        "start": WALL + hour * HOUR,
        "end": WALL + (hour + 1) * HOUR,
        "kind": "instance",
        "usage_type": "SpotUsage:g5.xlarge",
        "line_type": "Usage",
        "amount": Decimal(str(seconds)) / 3600,
        "usd": Decimal(str(seconds)) / 1000 if usd is None else Decimal(usd),
        "zone": "us-east-1a",
        "instance_type": "g5.xlarge",
        "market": "spot",
        "tags": TAG,
    }
    return BillLine(**{**known, **changes})


def stored(name: str, usd: str, kind: str = "storage", **changes) -> BillLine:
    return line(name, 0, 3600, usd, kind=kind, instance_type="", market="", **changes)


def reconciled(events: list[Event], *lines: BillLine, **known) -> Reconciliation:
    return reconcile([plan_event(3.6), *events], lines, **known)


def parts(found: Reconciliation) -> list[tuple[str, Decimal, str]]:
    """Without the 28th digit of a quotient."""
    return [(part.cause, round(part.usd, 9), part.words) for part in found.parts]


def findings(found: Reconciliation) -> list[tuple[str, str, Decimal, str]]:
    return [
        (finding.kind, finding.resource, finding.usd, finding.words) for finding in found.findings
    ]


def kinds(found: Reconciliation) -> list[str]:
    return [finding.kind for finding in found.findings]


def test_the_gap_of_an_hour_is_split_by_price_boot_and_end() -> None:
    """3,000 s are common; of 600 s that are only billed, half precedes the agent and half follows
    it.
    """
    found = reconciled(node("i-one", 300, 3300, uptime=300), line("i-one", 0, 3600, "4.32"))
    assert parts(found) == [
        ("price", Decimal("0.6"), "3,000 s billed at $4.320000/h, metered at $3.600000/h"),
        ("boot time", Decimal("0.36"), "300 s from the instance's boot to the first agent"),
        (
            "ended later",
            Decimal("0.36"),
            "300 s from the last agent's end to the end of the instance",
        ),
    ]
    assert (found.billed_usd, found.joined_usd, found.gap_usd) == (
        Decimal("4.32"),
        3,
        Decimal("1.32"),
    )
    assert {part.instance_id for part in found.parts} == {"i-one"}


def test_the_gap_of_several_hours_is_summed_by_cause() -> None:
    """Of the second hour 600 metered seconds are not billed; in the third 700 s are billed at twice
    the price.
    """
    events = node("i-one", 600, 2 * HOUR + 100, uptime=600)
    found = reconciled(
        events, line("i-one", 0, 3600), line("i-one", 1, 3000), line("i-one", 2, 800, "1.6")
    )
    assert parts(found) == [
        ("price", Decimal("0.1"), "6,100 s billed at $3.989189/h, metered at $3.600000/h"),
        ("unexplained", Decimal("-0.6"), "600 s metered and not billed"),
        ("boot time", Decimal("0.6"), "600 s from the instance's boot to the first agent"),
        ("unexplained", Decimal("1.4"), "700 s billed while no agent of the job was there"),
    ]


def test_a_boot_over_two_hours_is_one_part() -> None:
    found = reconciled(
        node("i-one", HOUR + 300, 2 * HOUR, uptime=600),
        line("i-one", 0, 300),
        line("i-one", 1, 3600),
    )
    assert parts(found) == [
        ("boot time", Decimal("0.6"), "600 s from the instance's boot to the first agent")
    ]


def test_every_cause_has_its_words() -> None:
    lost = node("i-one", 1800, 3000, uptime=1700, ended=False)
    others = [node("i-one", 3300, 3500)]
    found = reconciled(lost, line("i-one", 0, 3585), others=others)
    assert [(part.cause, part.words) for part in found.parts] == [
        (
            "warm instance",
            "1,700 s before the first agent, on an instance that another job had started",
        ),
        ("another job", "200 s while another job used the instance"),
        ("end not recorded", "15 s after the last event of a lost node"),
        ("ended later", "470 s from the last agent's end to the end of the instance"),
    ]


def test_a_minimum_charge_that_the_ledger_does_not_count_is_named() -> None:
    """A simulated run has no minimum charge."""
    events = [plan_event(3.6, simulated=True), *node("i-one", 100, 125, uptime=5)]
    assert parts(reconcile(events, [line("i-one", 0, 60)])) == [
        ("boot time", Decimal("0.005"), "5 s from the instance's boot to the first agent"),
        ("minimum charge", Decimal("0.03"), "30 s to fill the minimum of one minute"),
    ]


def test_an_hour_that_was_not_billed_is_unexplained_at_the_metered_price() -> None:
    found = reconciled(node("i-one", 0, 2 * HOUR), line("i-one", 0, 3600))
    assert parts(found) == [("unexplained", Decimal("-3.6"), "3,600 s metered and not billed")]
    nothing = reconciled(node("i-one", 0, 3600))
    assert parts(nothing) == [("unexplained", Decimal("-3.6"), "metered and not billed")]


def test_dollars_without_seconds_are_unexplained() -> None:
    found = reconciled(
        node("i-one", 0, 2 * HOUR),
        line("i-one", 0, 3600),
        line("i-one", 1, 3600),
        line("i-one", 2, 0, "5"),
    )
    assert [(cause, usd) for cause, usd, _ in parts(found)] == [("unexplained", Decimal(5))]
    assert not found.agrees and found.findings == ()
    only = reconciled(node("i-one", 0, 3600), line("i-one", 0, 0, "5"))
    assert parts(only) == [
        ("unexplained", Decimal("-3.6"), "3,600 s metered and not billed"),
        ("unexplained", Decimal(5), "0 s billed while no agent of the job was there"),
    ]
    assert kinds(only) == ["not billed"]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 5000)), min_size=1, max_size=4),
    st.integers(0, 3500),
    st.integers(1, 12_000),
    st.integers(0, 900),
)
def test_the_parts_of_a_gap_sum_to_it(
    hours: list[tuple[int, int]], start: int, seconds: int, uptime: int
) -> None:
    events = node("i-one", start, start + seconds, uptime=uptime)
    lines = [line("i-one", hour, billed, str(usd)) for hour, (billed, usd) in enumerate(hours)]
    found = reconciled(events, *lines)
    assert abs(sum((part.usd for part in found.parts), Decimal(0)) - found.gap_usd) < Decimal(
        "1e-12"
    )


@pytest.mark.parametrize(
    ("changes", "cause", "finding", "words"),
    [
        (
            {"zone": "us-east-1b"},
            "other zone",
            "wrong zone",
            "billed in us-east-1b, the events have us-east-1a",
        ),
        (
            {"instance_type": "g5.8xlarge"},
            "other type",
            "wrong type",
            "billed in g5.8xlarge, the events have g5.xlarge",
        ),
        (
            {"market": "on_demand"},
            "other market",
            "wrong market",
            "billed in on_demand, the events have spot",
        ),
        (
            {"zone": ""},
            "price",
            "wrong price",
            "$7.2000 billed for 3,600 s in 1 hour from 2027-01-15 08:00 UTC; at the prices on "
            "record it would be $3.6000",
        ),
    ],
)
def test_a_price_difference_is_explained_by_the_machine_on_the_bill(
    changes: dict, cause: str, finding: str, words: str
) -> None:
    found = reconciled(node("i-one", 0, 3600), line("i-one", 0, 3600, "7.2", **changes))
    assert [(part.cause, part.usd) for part in found.parts] == [(cause, Decimal("3.6"))]
    assert findings(found) == [(finding, "i-one", Decimal("7.2"), words)]


def test_a_bill_with_the_machines_zone_among_others_does_not_contradict_it() -> None:
    events = node("i-one", 0, 2 * HOUR)
    there = line("i-one", 0, 3600)
    elsewhere = line("i-one", 1, 3600, zone="us-east-1b")
    assert reconciled(events, there, elsewhere).agrees
    found = reconciled(events, replace(there, zone="us-east-1c"), elsewhere)
    assert found.findings[0].words == "billed in us-east-1b, us-east-1c, the events have us-east-1a"
    assert reconciled(node("i-one", 0, 2 * HOUR, zone=None), there, elsewhere).agrees


@pytest.mark.parametrize(
    ("usd", "right"), [("3.6363", True), ("3.6364", False), ("3.5644", True), ("3.5643", False)]
)
def test_a_price_may_differ_by_a_percent(usd: str, right: bool) -> None:
    found = reconciled(node("i-one", 0, 3600), line("i-one", 0, 3600, usd))
    assert kinds(found) == ([] if right else ["wrong price"])


@pytest.mark.parametrize(
    ("end", "billed", "usd", "right"),
    [
        # At the most $1.80 metered, $1.20 at the later price, and $0.30 for clocks
        (1800, 2400, "3.3333", True),
        (1800, 2400, "3.3334", False),
        # At the least $1.80 metered, $0.60 at the earlier price, less $0.30
        (1800, 2400, "2.0792", False),
        (1800, 2400, "2.0793", True),
        (3600, 3000, "5.1515", True),  # at the most $5.40 metered, less $0.60 at the earlier price
        (3600, 3000, "5.1516", False),
        (3600, 3000, "3.8613", False),
        (3600, 3000, "3.8615", True),
    ],
)
def test_a_price_that_changes_within_the_hour_has_bounds(
    end: float, billed: float, usd: str, right: bool
) -> None:
    events = [*node("i-one", 0, end), prices_event([(1800, 7.2)])]
    assert ("wrong price" not in kinds(reconciled(events, line("i-one", 0, billed, usd)))) is right


@pytest.mark.parametrize(("change", "usd", "right"), [(3700, "2.2", True), (100, "3.8", False)])
def test_the_bounds_of_a_price_follow_the_agents_clock(
    change: float, usd: str, right: bool
) -> None:
    """The agent's clock was 300 s ahead, so the bill's first hour is from 300 s to 3,900 s by its
    clock.
    """
    events = [*node("i-one", 2100, 9300), prices_event([(change, 7.2)])]
    lines = [
        line("i-one", 0, 1800, usd),
        line("i-one", 1, 3600, "7.2"),
        line("i-one", 2, 1800, "3.6"),
    ]
    found = reconciled(events, *lines)
    assert found.notes == ("i-one: its clock was about 300 s ahead of the bill's",)
    assert kinds(found) == ([] if right else ["wrong price"])


def test_a_clock_that_is_behind_is_noted() -> None:
    found = reconciled(
        node("i-one", 1800 - 120, 5400 - 120), line("i-one", 0, 1800), line("i-one", 1, 1800)
    )
    assert found.notes == ("i-one: its clock was about 120 s behind the bill's",)


def test_a_price_that_differs_by_exactly_a_percent_is_right() -> None:
    assert reconciled(node("i-one", 0, 990), line("i-one", 0, 990, "1.00")).agrees


def test_hours_at_a_wrong_price_are_summed() -> None:
    events = [*node("i-one", 0, 3 * HOUR), prices_event([(2 * HOUR + 1800, 7.2)])]
    lines = [line("i-one", 0, 3600, "8"), line("i-one", 1, 3600), line("i-one", 2, 3590, "20")]
    found = reconciled(events, *lines)
    [wrong] = [finding for finding in found.findings if finding.kind == "wrong price"]
    assert wrong.words == (
        "$28.0000 billed for 7,190 s in 2 hours from 2027-01-15 08:00 UTC; at the prices on "
        "record it would be $8.9800 to $8.9900"
    )
    assert wrong.usd == Decimal("31.6")


def test_a_simulated_price_is_not_compared() -> None:
    events = [plan_event(3.6, simulated=True), *node("i-one", 0, 3600)]
    assert reconcile(events, [line("i-one", 0, 3600, "7.2")]).findings == ()
    wrong_zone = reconcile(events, [line("i-one", 0, 3600, "7.2", zone="us-east-1b")])
    assert kinds(wrong_zone) == ["wrong zone"]


def test_an_instance_without_a_bill_has_a_finding_with_the_reason() -> None:
    later = "the bill ends before it did: try a later report"
    other = "not in this bill: another account's, or daily?"
    events = node("i-one", 0, 3600)
    early = reconciled(events)
    assert findings(early) == [("not billed", "i-one", Decimal("3.6"), later)]
    assert (
        findings(reconciled(events, line("i-x", -1, 3600, tags={"ebbflowjob": "x"})))[0][3] == later
    )
    assert (
        findings(reconciled(events, line("i-x", 0, 3600, tags={"ebbflowjob": "x"})))[0][3] == other
    )
    unordered = [line("i-x", hour, 3600, tags={"ebbflowjob": "x"}) for hour in (0, -1)]
    assert findings(reconciled(events, *unordered))[0][3] == other
    assert "not billed" in kinds(reconciled(events, line("i-one", 0, 0, "0")))


@pytest.mark.parametrize(("seconds", "twice"), [(3601, False), (3601.1, True)])
def test_an_hour_may_exceed_its_length_by_a_second(seconds: float, twice: bool) -> None:
    found = reconciled(node("i-one", 0, 3600), line("i-one", 0, seconds))
    assert kinds(found) == (["billed twice"] if twice else [])


def test_an_hour_that_is_billed_twice_has_its_reasons() -> None:
    events = node("i-one", 0, 3600)
    twice = reconciled(
        events, line("i-one", 0, 3600), line("i-one", 0, 3400, usd="3.6", delivery=1)
    )
    words = (
        "1 of its hours are in two files that differ, 3,400 s billed beyond the length of their "
        "hours"
    )
    assert findings(twice)[-1][::3] == (
        "billed twice",
        f"{words}: two deliveries together? fix: pass only the newest one",
    )
    within = reconciled(events, line("i-one", 0, 1000), line("i-one", 0, 900, delivery=1))
    assert [words.partition(":")[0] for *_, words in findings(within)] == [
        "1 of its hours are in two files that differ"
    ]


@pytest.mark.parametrize(("missing", "found"), [(60, []), (61, ["hour not billed"])])
def test_a_minute_of_each_hour_may_be_metered_and_not_billed(
    missing: int, found: list[str]
) -> None:
    lines = [line("i-one", 0, 3600 - missing), line("i-one", 1, 3600 - missing)]
    assert kinds(reconciled(node("i-one", 0, 2 * HOUR), *lines)) == found


@pytest.mark.parametrize(("unused", "found"), [(60, []), (61, ["billed without use"])])
def test_a_minute_may_be_billed_without_use(unused: int, found: list[str]) -> None:
    """Besides the ten minutes in which Batch ends an idle instance."""
    assert kinds(reconciled(node("i-one", 0, 1000), line("i-one", 0, 1600 + unused))) == found


def test_an_hour_with_a_minute_without_use_is_not_listed_beside_others() -> None:
    found = reconciled(
        node("i-one", 60, HOUR + 1000), line("i-one", 0, 3600), line("i-one", 1, 1661)
    )
    assert [words for *_, words in findings(found)] == [
        f"661 s in the hour from 2027-01-15 09:00 UTC: {NO_AGENT}"
    ]


def test_wrong_hours_are_listed_with_their_seconds_and_dollars() -> None:
    events = node("i-one", 0, 8 * HOUR)
    some = [line("i-one", hour, 3600) for hour in (0, 5, 7)]
    found = reconciled(events, *some)
    assert findings(found) == [
        (
            "hour not billed",
            "i-one",
            5 * Decimal("3.6"),
            "18,000 s in the hours from 2027-01-15 09:00 UTC, 2027-01-15 10:00 UTC, 2027-01-15 "
            "11:00 UTC and 2 more: metered, and not in this bill",
        )
    ]
    found = reconciled(events, *[line("i-one", hour, 3600) for hour in (0, 1, 2, 3, 4, 5)])
    assert [words for *_, words in findings(found)] == [
        "7,200 s in the hours from 2027-01-15 14:00 UTC, 2027-01-15 15:00 UTC: the bill ends "
        "before: try a later report"
    ]
    assert kinds(found) == ["not billed"]
    three = reconciled(events, *[line("i-one", hour, 3600) for hour in (0, 1, 2, 3, 7)])
    assert findings(three)[0][3] == (
        "10,800 s in the hours from 2027-01-15 12:00 UTC, 2027-01-15 13:00 UTC, 2027-01-15 14:00 "
        "UTC: metered, and not in this bill"
    )
    four = reconciled(events, *[line("i-one", hour, 3600) for hour in (0, 1, 2, 7)])
    assert findings(four)[0][3].endswith("13:00 UTC and 1 more: metered, and not in this bill")
    one = reconciled(node("i-one", 0, 1000), line("i-one", 0, 1000), line("i-one", 1, 700))
    assert findings(one) == [
        (
            "billed without use",
            "i-one",
            Decimal("0.7"),
            f"700 s in the hour from 2027-01-15 09:00 UTC: {NO_AGENT}",
        )
    ]
    partly = reconciled(node("i-one", 0, 2 * HOUR), line("i-one", 0, 3000), line("i-one", 1, 3600))
    assert findings(partly) == [
        (
            "hour not billed",
            "i-one",
            3,
            "600 s in the hour from 2027-01-15 08:00 UTC: metered, and not in this bill",
        )
    ]


@pytest.mark.parametrize(
    ("tags", "uptime", "words"),
    [
        ({}, 600.0, None),  # AWS Batch puts no tag of a job on an instance
        (
            {"ebbflowjob": "x"},
            0.0,
            "its tag ebbflow-job has the value x: cost allocation by tag misses it",
        ),
        (TAG, 0.0, None),
        # A warm instance keeps the tag of the job that started it
        ({"ebbflowjob": "x"}, 601.0, None),
    ],
)
def test_an_instance_without_the_jobs_tag_has_a_finding(
    tags: dict, uptime: float, words: str | None
) -> None:
    found = reconciled(node("i-one", 3600, 7200, uptime=uptime), line("i-one", 1, 3600, tags=tags))
    assert findings(found) == (
        [] if words is None else [("missed tag", "i-one", Decimal("3.6"), words)]
    )


def test_several_wrong_tags_are_listed() -> None:
    lines = [
        line("i-one", 0, 3600, tags={"ebbflowjob": "y"}),
        line("i-one", 1, 3600, tags={"ebbflowjob": "x"}),
    ]
    [*_, missed] = reconciled(node("i-one", 0, 2 * HOUR), *lines).findings
    assert "has the value x, y:" in missed.words


def test_lines_of_other_jobs_and_kinds_are_left_out() -> None:
    events = node("i-one", 0, 3600)
    found = reconciled(
        events,
        line("i-one", 0, 3600),
        line("i-other", 0, 3600, tags={"ebbflowjob": "another"}),
        line("i-type", 0, 3600, tags={}, instance_type="p4d.24xlarge"),
        line("i-nameless", 0, 3600, tags={}, instance_type=""),
        stored("bucket", "9", tags={"ebbflowjob": "another"}),
        stored("i-one", "9", tags={}),
        stored("volume", "9", tags={}, zone="us-east-1a"),
        replace(stored("shared", "9", tags={}, line_id="s"), instance_type="g5.xlarge"),
        # Of no interest
        replace(stored("shared", "8", tags={}, line_id="s"), instance_type="g5.xlarge"),
        stored("vol-1", "0.25"),
        stored("vol-2", "0.5"),
        stored("i-one", "0.125", kind="transfer"),
    )
    assert found.agrees and found.orphans == {}
    assert found.other_usd == {"storage": Decimal("9.75"), "transfer": Decimal("0.125")}


def test_a_line_without_a_type_is_no_stranger_of_a_node_without_a_type() -> None:
    events = node("i-one", 0, 3600, instance_type=None)
    found = reconciled(events, line("i-x", 0, 100, tags={}, instance_type=""))
    assert found.orphans == {}


def test_orphans_are_named_by_their_tag_and_sorted() -> None:
    events = node("i-one", 0, 3600)
    found = reconciled(
        events,
        line("i-one", 0, 3600),
        line("i-untagged", 0, 100, tags={}),
        line("i-orphan", 50, 200),
        line("i-orphan", 51, 200),
    )
    running = "and is in no event of the job: is it still running?"
    assert findings(found) == [
        ("orphan instance", "i-orphan", Decimal("0.4"), f"has the tag ebbflow-job=demo, {running}"),
    ]
    assert not found.agrees


def test_an_instance_of_a_colleague_is_no_alarm_and_one_of_the_environment_a_note() -> None:
    environment = {"batchcomputeenvironment": "spot-g5"}
    events = [*node("i-two", 3 * HOUR, 5 * HOUR), *node("i-one", HOUR, 2 * HOUR)]
    mine = [
        line("i-one", 1, 3600, tags=environment),
        line("i-two", 3, 3600, tags=environment),
        line("i-two", 4, 3600, tags=environment),
    ]
    colleague = line("i-x", 1, 3600, tags={})
    elsewhere = line("i-z", 1, 3600, tags={"batchcomputeenvironment": "other"})
    before = line("i-w", 0, 3600, tags=environment)
    found = reconciled(events, *mine, colleague, elsewhere, before)
    assert found.agrees and found.orphans == {}
    [note] = found.notes
    assert note.startswith("2 of 2 instances ($10.80) have no tag ebbflow-job")
    [_, beside] = reconciled(events, *mine, line("i-y", 1, 1800, tags=environment)).notes
    assert beside.startswith("i-y ($1.80) ran in the job's compute environment at its time")


def test_a_job_without_instances_has_no_untagged_orphans() -> None:
    events = node(None, 0, 3600)
    found = reconciled(events, line("i-x", 0, 3600, tags={}))
    assert found.orphans == {} and len(found.unknown) == 1 and not found.agrees


def test_another_tag_may_name_the_job() -> None:
    lines = [
        line("i-one", 0, 3600, tags={"team": "demo"}),
        line("i-x", 0, 100, tags={"team": "demo"}),
    ]
    found = reconciled(node("i-one", 0, 3600), *lines, job_tag="user:team")
    assert kinds(found) == ["orphan instance"] and found.job_tag == "user:team"


def test_repeats_of_the_jobs_lines_are_counted_and_those_of_strangers_are_not() -> None:
    mine = line("i-one", 0, 3600, line_id="a")
    orphan = line("i-x", 0, 100, line_id="b")
    untagged = line("i-one", 0, 0, "0", line_id="d", tags={})
    stranger = line("i-y", 0, 100, line_id="c", tags={})
    volume = stored("vol-1", "0.25", line_id="e")
    lines = [mine, orphan, untagged, stranger, volume]
    found = reconciled(node("i-one", 0, 3600), *lines, *lines)
    assert found.repeated_lines == 4
    assert (found.billed_usd, found.other_usd["storage"]) == (Decimal("3.6"), Decimal("0.25"))


@pytest.mark.parametrize(
    ("flags", "synthetic"), [((False, False), False), ((True, False), True), ((False, True), True)]
)
def test_a_bill_with_a_synthetic_line_is_synthetic(
    flags: tuple[bool, bool], synthetic: bool
) -> None:
    stranger = {"ebbflowjob": "another"}
    lines = [line("i-x", hour, 1, tags=stranger, synthetic=flag) for hour, flag in enumerate(flags)]
    found = reconciled(node("i-one", 0, 3600), *lines)
    assert found.synthetic is synthetic
    assert found.to_json()["bill"] == ("synthetic bill" if synthetic else "bill")


def test_other_jobs_uses_are_read_from_their_events() -> None:
    """Also those of an instance that this job did not use, and of a node whose instance is unknown."""
    events = node("i-one", 0, 3600)
    lines = [line("i-one", 0, 3600), line("i-one", 2, 3600)]
    used = [*node("i-two", 0, 9 * HOUR), *node(None, 0, 9 * HOUR)]
    assert kinds(reconciled(events, *lines, others=[used])) == ["billed without use"]
    found = reconciled(events, *lines, others=[used, node("i-one", 2 * HOUR, 3 * HOUR)])
    assert found.agrees and found.billed["i-one"].elsewhere_usd == Decimal("3.6")


def silent(started: float, stopped: float, **known) -> Event:
    """A Batch job whose node recorded no event."""
    chosen = {
        "instance_type": "g5.xlarge",
        "market": "spot",
        "usd_per_hour": 3.6,
        "price_kind": "recorded",
    }
    times = {
        "started_utc": WALL + started,
        "stopped_utc": WALL + stopped,
        "cause": "reclaimed",
        "nodes": 1,
    }
    return event(
        BATCH_ATTEMPT,
        stopped,
        **{"job_id": "job-1", "processes_per_node": 1, **times, **chosen, **known},
    )


@pytest.mark.parametrize(
    ("started", "stopped", "billed", "joined"),
    [
        (HOUR + 200, 2 * HOUR - 200, 3200, True),
        (HOUR - 300, HOUR + 900, 1200, True),
        (HOUR - 301, HOUR + 900, 1201, False),
        (2 * HOUR - 900, 2 * HOUR + 300, 1200, True),
        (2 * HOUR - 900, 2 * HOUR + 301, 1201, False),
        (HOUR + 100, HOUR + 1100, 940, True),  # 60 s less than Batch counts
        (HOUR + 100, HOUR + 1100, 939, False),
        (HOUR + 100, HOUR + 1100, 2200, True),  # 600 s before, and 600 s after
        (HOUR + 100, HOUR + 1100, 2201, False),
    ],
)
def test_a_node_without_events_is_joined_with_an_instance_of_its_hours(
    started: float, stopped: float, billed: float, joined: bool
) -> None:
    found = reconciled([silent(started, stopped)], line("i-x", 1, billed))
    assert list(found.metered) == (["i-x"] if joined else [])
    assert list(found.orphans) == ([] if joined else ["i-x"])


def test_a_node_without_events_is_metered_at_its_known_dollars() -> None:
    found = reconciled(
        [silent(HOUR + 700, HOUR + 1700)], line("i-x", 1, 1300), line("i-x", 1, 0, "0", tags={})
    )
    [one] = found.metered.values()
    assert (one.instance_id, one.market, one.lost_ends, one.usd) == ("i-x", "spot", 0, 1)
    assert (one.start, one.end, one.machine) == (
        WALL + HOUR + 700,
        WALL + HOUR + 1700,
        {"uptime_seconds": 300.0},
    )
    assert parts(found) == [
        ("boot time", Decimal("0.3"), "300 s from the instance's boot to the first agent")
    ]
    assert found.agrees


@pytest.mark.parametrize(
    ("billed", "uptime"), [(990, 0.0), (1500, 500.0), (1600, 600.0), (1700, 600.0)]
)
def test_a_node_without_events_has_booted_for_ten_minutes_at_the_most(
    billed: float, uptime: float
) -> None:
    [one] = reconciled([silent(HOUR + 700, HOUR + 1700)], line("i-x", 1, billed)).metered.values()
    assert one.uptime_seconds == uptime


def test_a_node_without_events_takes_one_instance_of_its_type() -> None:
    job = silent(HOUR + 700, HOUR + 1700)
    other_type = line("i-a", 1, 1000, instance_type="g5.2xlarge")
    found = reconciled([job], other_type, line("i-c", 1, 1000), line("i-b", 1, 1000))
    assert (list(found.metered), sorted(found.orphans)) == (["i-b"], ["i-a", "i-c"])
    both = reconciled(
        [job, silent(HOUR + 700, HOUR + 1700, job_id="job-2")],
        line("i-b", 1, 1000),
        line("i-c", 1, 1000),
    )
    assert list(both.metered) == ["i-b", "i-c"] and both.agrees
    untagged = reconciled(
        [*node("i-one", 0, 3600), job], line("i-one", 0, 3600), line("i-b", 1, 1000, tags={})
    )
    assert sorted(untagged.metered) == ["i-b", "i-one"]


def test_a_node_without_events_takes_an_instance_of_several_hours() -> None:
    found = reconciled(
        [silent(HOUR + 700, 3 * HOUR)], *[line("i-x", hour, 3600) for hour in (2, 1)]
    )
    assert list(found.metered) == ["i-x"]


def test_a_node_without_a_price_is_not_joined() -> None:
    unpriced = silent(HOUR + 700, HOUR + 1700, instance_type=None)
    found = reconcile([unpriced], [line("i-x", 1, 1000)])
    assert list(found.metered) == [] and list(found.orphans) == ["i-x"]


def test_an_untagged_instance_of_a_silent_nodes_type_is_a_candidate() -> None:
    job = silent(HOUR + 700, HOUR + 1700, instance_type="p4d.24xlarge")
    found = reconciled([job], line("i-x", 1, 1000, tags={}, instance_type="p4d.24xlarge"))
    assert list(found.metered) == ["i-x"]


def test_a_reconciliation_has_the_first_chosen_plans_forecast() -> None:
    events = node("i-one", 0, 3600)
    refused = event(PLAN, -2.0, chosen=None, refusal={"outcome": "budget", "message": ""})
    assert reconcile([*events, refused, plan_event(3.6)], []).forecast_usd == 0.9
    later = plan_event(3.6, t=10.0)
    later.data["chosen"]["expected_usd"] = 5.0
    assert reconcile([*events, later, plan_event(3.6)], []).forecast_usd == 0.9
    exact = plan_event(3.6)
    exact.data["chosen"]["compute_usd"] = 0.8
    assert reconcile([exact, *events], []).forecast_usd == 0.8
    with_volume = plan_event(3.6)
    with_volume.data["chosen"] |= {"volume_usd_per_hour": "0.05", "nodes": 2, "paid_hours": 1.0}
    with_volume.data["chosen"]["compute_usd"] = 0.8
    assert reconcile([with_volume, *events], []).forecast_usd == pytest.approx(0.7)
    assert reconcile(events, []).forecast_usd is None
    other = event("note", -3.0, chosen={"expected_usd": 7.0})
    assert reconcile([other, plan_event(3.6)], []).forecast_usd == 0.9
    assert reconcile([plan_event(3.6)], []).job == "demo"
    empty = reconcile([], [])
    assert (empty.job, empty.metered_usd, empty.unexplained_share, empty.agrees) == (
        "",
        0,
        None,
        False,
    )
    assert reconcile(events, []).job == "demo"


def test_a_reconciliation_reads_events_in_the_order_of_their_clocks() -> None:
    """Of two events at one wall time, the monotonic clock tells the first."""
    first = plan_event(3.6)
    second = plan_event(3.6)
    second = replace(second, t_mono=second.t_mono + 1.0)
    second.data["chosen"]["expected_usd"] = 5.0
    assert reconcile([second, first], []).forecast_usd == 0.9
    rebooted = replace(second, t_wall=second.t_wall + 1.0, t_mono=-1.0)
    assert reconcile([rebooted, first], []).forecast_usd == 0.9
    other = [plan_event(3.6), *node("i-one", 2 * HOUR, 3 * HOUR)]
    other.reverse()
    lines = [line("i-one", 0, 3600), line("i-one", 2, 3600)]
    assert reconciled(node("i-one", 0, 3600), *lines, others=[other]).agrees


def test_instances_that_nodes_shared_are_listed_once() -> None:
    names = []
    for number in range(5):
        for _ in range(2):
            names.append(f"i-{number}")
    machines = [{**MACHINE, "instance_id": name, "uptime_seconds": 0.0} for name in reversed(names)]
    gang = GangLog(1, 0.0, [[rank] for rank in range(10)], machines=machines)
    gang.steps(1, 1, useful_step=3600.0)
    gang.ended("node_lost", 3600.0)
    found = reconciled([*gang.events, *node("i-alone", 0, 3600)])
    assert found.shared == ["i-0", "i-1", "i-2", "i-3", "i-4"]


def gap(cause: str, usd: str) -> GapPart:
    return GapPart(cause=cause, instance_id="i-one", usd=Decimal(usd), words="why")


@pytest.mark.parametrize(
    ("amounts", "share", "agrees"),
    [
        ([], 0.0, True),
        ([("unexplained", "0.1")], 0.01, True),
        ([("unexplained", "0.1000001")], 0.01000001, False),
        ([("unexplained", "-0.2")], 0.02, False),
        ([("unexplained", "0.2"), ("unexplained", "-0.2")], 0.04, False),
        ([("price", "5"), ("unexplained", "0.05")], 0.005, True),
    ],
)
def test_a_bill_agrees_if_a_percent_is_unexplained(
    amounts: list[tuple[str, str]], share: float, agrees: bool
) -> None:
    base = reconciled(node("i-one", 0, 3600), line("i-one", 0, 3600, "10"))
    found = replace(base, parts=tuple(gap(*amount) for amount in amounts), findings=())
    assert (found.unexplained_share, found.agrees) == (share, agrees)


def test_a_bill_with_a_finding_or_an_unknown_instance_does_not_agree() -> None:
    base = reconciled(node("i-one", 0, 3600), line("i-one", 0, 3600))
    assert base.agrees
    finding = BillingFinding(kind="x", resource="i-one", usd=Decimal(1), words="why")
    assert not replace(base, findings=(finding,)).agrees
    assert not reconciled(
        [*node("i-one", 0, 3600), *node(None, 9000, 9100)], line("i-one", 0, 3600)
    ).agrees


def everything() -> Reconciliation:
    """A reconciliation in which each kind of sentence occurs."""
    machine = {**MACHINE, "instance_id": "i-a", "uptime_seconds": 0.0}
    gang = GangLog(next(_generation), 0.0, [[0], [1]], machines=[machine, machine])
    gang.steps(1, 1, useful_step=3600.0)
    gang.ended("node_lost", 3600.0)
    events = [
        *gang.events,
        *node("i-b", 1800 + 60, 5400 + 60),
        *node(None, 9000, 9100),
        *node("i-c", 0, 3600),
    ]
    volume = stored("vol", "0.25", line_id="v")
    return reconciled(
        events,
        line("i-a", 0, 3600, "5", synthetic=True),
        line("i-a", 3, 3600),
        line("i-b", 0, 1800),
        line("i-b", 1, 1800),
        stored("nat", "0.5", kind="transfer"),
        volume,
        volume,
        others=[node("i-a", 3 * HOUR, 4 * HOUR)],
    )


def test_a_reconciliation_is_rendered_line_by_line() -> None:
    assert render(everything()).splitlines() == EVERYTHING.splitlines()


def test_a_rendered_reconciliation_has_cents_from_ten_dollars_on() -> None:
    lines = {
        usd: render(reconciled(node("i-one", 0, 3600), line("i-one", 0, 3600, usd)))
        for usd in ("9.99", "10")
    }
    assert "  billed    $9.9900  (1 of 1 instances found)" in lines["9.99"]
    assert "  billed    $10.00  (1 of 1 instances found)" in lines["10"]
    metered = render(reconciled(node("i-one", 0, 3 * HOUR)))
    assert (
        "  metered   $10.80  (from the job's events)" in metered and "unexplained: " not in metered
    )


def test_a_long_line_is_wrapped_between_words_and_not_at_hyphens() -> None:
    base = reconciled(node("i-one", 0, 3600), line("i-one", 0, 3600))

    def rendered(words: str) -> str:
        part = GapPart(cause="price", instance_id="i-one", usd=Decimal(1), words=words)
        return render(replace(base, parts=(part,)))

    start = "  · i-one: price $1.0000: "
    word = "x" * 70
    assert f"{start}{word}\n    ebbflow-job-of-a-team" in rendered(f"{word} ebbflow-job-of-a-team")
    assert f"{start}{word} abc" in rendered(f"{word} abc"), "100 characters"
    assert f"{start}{word}\n    abcd" in rendered(f"{word} abcd")


def test_dollars_for_other_jobs_are_rendered_by_instance() -> None:
    events = [*node("i-a", 0, 3600), *node("i-b", 0, 3600)]
    others = [
        line("i-b", 5, 3600, tags={"ebbflowjob": "x"}),
        line("i-a", 5, 1800, tags={"ebbflowjob": "x"}),
    ]
    found = reconciled(events, *others, line("i-a", 0, 3600), line("i-b", 0, 3600))
    assert [text for text in render(found).splitlines() if "more at other times" in text] == [
        "  · i-a: $1.8000 more at other times, not for this job",
        "  · i-b: $3.6000 more at other times, not for this job",
    ]


def test_a_rendered_share_is_within_a_percent_or_not() -> None:
    base = reconciled(node("i-one", 0, 3600), line("i-one", 0, 3600, "10"))
    within = replace(base, parts=(gap("unexplained", "0.1"),))
    beyond = replace(base, parts=(gap("unexplained", "0.11"), gap("price", "1"), gap("price", "2")))
    assert "  unexplained: 1.00 % of the bill, within 1 %" in render(within).splitlines()
    assert "  unexplained: 1.10 % of the bill, more than 1 %" in render(beyond).splitlines()
    assert "    price                     $3.00  (2 instances)" in render(beyond).splitlines()
    causes = [
        text.split()[0]
        for text in render(beyond).splitlines()
        if text.startswith("    ") and "instance" in text
    ]
    assert causes == ["price", "unexplained"]
    assert "given twice" not in render(base) and "more at other times" not in render(base)


def test_a_reconciliation_as_json_has_exact_dollars() -> None:
    found = everything()
    document = found.to_json()
    assert document == json.loads(json.dumps(document))
    assert {
        key: value for key, value in document.items() if key not in ("parts", "findings", "notes")
    } == {
        "schema": 1,
        "job": "demo",
        "bill": "synthetic bill",
        "forecast_usd": 0.9,
        "metered_usd": str(found.metered_usd),
        "joined_usd": "10.8",
        "billed_usd": "8.6",
        "gap_usd": "-2.2",
        "unexplained_usd": str(
            sum(part.usd for part in found.parts if part.cause == "unexplained")
        ),
        "unexplained_share": found.unexplained_share,
        "agrees": False,
        "repeated_lines": 1,
        "other_usd": {"storage": "0.25", "transfer": "0.5"},
        "volumes_usd": "0",
        "billed_volumes_usd": "0",
    }
    assert list(document["other_usd"]) == ["storage", "transfer"]
    assert document["parts"] == [{**vars(part), "usd": str(part.usd)} for part in found.parts]
    assert document["findings"] == [
        {**vars(finding), "usd": str(finding.usd)} for finding in found.findings
    ]
    assert document["notes"] == list(found.notes) != []


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run `reconcile` on jobs in a store."""

    def put(job: str, events: list[Event]) -> None:
        store = Store.open(str(tmp_path / "store" / "jobs" / job))
        store.put(
            event_key(1, 0, "test", "000000.a"),
            "\n".join(event.to_json() for event in events).encode(),
        )

    put("demo", [plan_event(3.6), *node("i-one", 0, 3600)])
    put("other", [plan_event(3.6), *node("i-one", 2 * HOUR, 3 * HOUR)])

    def run(*words: str) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        add_command(parser.add_subparsers())
        arguments = parser.parse_args(
            ["reconcile", "demo", *words, "--store", str(tmp_path / "store")]
        )
        code = arguments.run(arguments)
        return code, capsys.readouterr().out

    return run


def report(path: Path, hours: dict[int, str], *, tag: str = "ebbflow-job") -> str:
    rows = [
        {
            "lineItem/ResourceId": "i-one",
            "lineItem/UsageStartDate": f"2027-01-15T{8 + hour:02d}:00:00Z",
            "lineItem/UsageEndDate": f"2027-01-15T{9 + hour:02d}:00:00Z",
            "lineItem/ProductCode": "AmazonEC2",
            "lineItem/UsageType": "SpotUsage:g5.xlarge",
            "lineItem/UsageAmount": "1",
            "lineItem/UnblendedCost": usd,
            f"resourceTags/user:{tag}": "demo",
        }
        for hour, usd in hours.items()
    ]
    return str(write_report(path, rows))


def test_the_command_returns_0_if_bill_and_ledger_agree(
    command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    good = report(tmp_path / "good.csv", {0: "3.6"})
    dear = report(tmp_path / "dear.csv", {0: "9"})
    code, text = command(good)
    assert code == 0 and text.startswith("reconciliation of job demo with the bill\n")
    assert command(dear)[0] == 1
    code, text = command(good, "--json")
    assert code == 0 and json.loads(text)["agrees"] is True and text.startswith('{\n "schema": 1,')
    code, text = command(good, report(tmp_path / "again.csv", {0: "3.6"}), "--json")
    assert code == 0 and json.loads(text)["repeated_lines"] == 1, (
        "equal lines of two files are one line"
    )


def test_the_command_takes_a_tag_and_other_jobs(
    command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    tagged = report(tmp_path / "tag.csv", {0: "3.6"}, tag="team")
    assert "no tag ebbflow-job" in command(tagged)[1]
    assert "no tag" not in command(tagged, "--tag", "team")[1]
    longer = report(tmp_path / "longer.csv", {0: "3.6", 2: "3.6"})
    assert command(longer)[0] == 1
    assert command(longer, "--also", "other")[0] == 0


def allocations(path: Path, minutes: dict[str, float]) -> str:
    pods = {
        pod: {"properties": {"pod": pod}, "minutes": lasted, "totalCost": 1.0}
        for pod, lasted in minutes.items()
    }
    path.write_text(json.dumps({"code": 200, "data": [pods]}))
    return str(path)


def test_the_command_compares_allocations_of_a_cluster(
    command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    """It returns 0 if there are attempts, and the pods of all of them have the times that the
    cluster has.
    """
    one = allocations(tmp_path / "one.json", {"js-1-a": 60.0})
    other = allocations(tmp_path / "2.json", {"js-2-a": 60.0})
    assert command(one)[0] == 1, "the job has no attempts"
    times = {"started_utc": WALL, "stopped_utc": WALL + 3600, "node_times": [(WALL, WALL + 3600)]}
    ended = {"status": "SUCCEEDED", "cause": "ended", "queue": "kubernetes", "nodes": 1, **times}
    names = ("js-1", "js-2")
    attempts = [
        event(BATCH_ATTEMPT, 3600.0, job_id=f"space/jobsets/{name}", job_name=name, **ended)
        for name in names
    ]
    store = Store.open(str(tmp_path / "store" / "jobs" / "demo"))
    store.put(
        event_key(2, 0, "test", "000000.a"),
        "\n".join(attempt.to_json() for attempt in attempts).encode(),
    )
    code, text = command(one, other)
    assert code == 0 and "js-1: 1 pods, 3,600 s" in text and "reconciliation of job" not in text
    assert command(one)[0] == 1, "an attempt has no pod"
    with pytest.raises(BillError, match=r"one.json: not a Cost and Usage Report"):
        command(one, report(tmp_path / "good.csv", {0: "3.6"}))


def test_the_command_has_a_help(
    command: Callable[..., tuple[int, str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        command("--help")
    usage, *sentences = HELP
    text = " ".join(capsys.readouterr().out.split())
    assert usage in text
    for sentence in sentences:
        assert sentence in text
    parser = argparse.ArgumentParser(prog="cost")
    add_command(parser.add_subparsers())
    assert "reconcile compare a job's forecast and ledger with what was billed" in " ".join(
        parser.format_help().split()
    )


@pytest.mark.parametrize(
    ("record", "frozen"), [(GapPart, True), (BillingFinding, True), (Reconciliation, False)]
)
def test_a_record_of_a_reconciliation_takes_names_only(record: type, frozen: bool) -> None:
    assert takes_names_only(record) and is_frozen(record) is frozen
