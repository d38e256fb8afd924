"""Metered time against billed hours: each term of the match, and each limit at its edge."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.core.events import LedgerClass
from ebbflow.cost.finance.bill import BillLine
from ebbflow.cost.finance.bill_matching import (
    BilledHour,
    BilledInstance,
    HourMatch,
    MeteredInstance,
    PaidPiece,
    match_instance,
    meter_instances,
    to_decimal,
)
from ebbflow.cost.ledger.ledger import fold
from ebbflow.cost.ledger.pricing import PriceCurve
from tests.support.records import is_frozen, takes_names_only
from tests.support.timelines import WALL, GangLog, plan_event

HOUR = 3600.0
CURVE = PriceCurve(Decimal("3.6"))  # a tenth of a cent per second


def at(seconds: float) -> float:
    """Unix seconds of a moment, in seconds after a full hour."""
    return WALL + seconds


def piece(start: float, end: float, usd: str | None = None, curve: PriceCurve = CURVE) -> PaidPiece:
    return PaidPiece(
        start=at(start), end=at(end), curve=curve, usd=None if usd is None else Decimal(usd)
    )


def metered(
    *spans: tuple[float, float], uptime: float | None = 0.0, lost_ends: int = 0
) -> MeteredInstance:
    return MeteredInstance(
        instance_id="i-one",
        machine={} if uptime is None else {"uptime_seconds": uptime},
        market="spot",
        lost_ends=lost_ends,
        pieces=[piece(start, end) for start, end in spans],
    )


def billed(*hours: tuple[int, float], tags: dict[int, str] | None = None) -> BilledInstance:
    """Hours as pairs (number of the hour, billed seconds), at a tenth of a cent per second."""
    instance = BilledInstance(instance_id="i-one")
    for number, seconds in hours:
        start = at(number * HOUR)
        end = at((number + 1) * HOUR)
        instance.hours[start, end] = BilledHour(
            start=start,
            end=end,
            seconds=seconds,
            usd=to_decimal(seconds) / 1000,
            tags={tags[number]} if tags and number in tags else set(),
        )
    return instance


def line(**changes) -> BillLine:
    known = {
        "resource_id": "i-one",
        "start": at(0),
        "end": at(HOUR),
        "kind": "instance",
        "usage_type": "SpotUsage:g5.xlarge",
        "line_type": "Usage",
        "amount": Decimal("0.5"),
        "usd": Decimal("1.5"),
        "zone": "us-east-1a",
        "instance_type": "g5.xlarge",
        "market": "spot",
        "tags": {"ebbflowjob": "demo"},
    }
    return BillLine(**{**known, **changes})


@pytest.mark.parametrize(
    ("start", "end", "usd"),
    [
        (-100, 900, "0.4"),  # the whole piece
        (100, 500, "0.4"),
        (200, 500, "0.3"),
        (100, 400, "0.3"),
        (250, 350, "0.1"),
        (-100, 100, "0"),
        (500, 900, "0"),
        (300, 200, "0"),
    ],
)
def test_a_paid_piece_costs_its_share_of_an_interval(start: float, end: float, usd: str) -> None:
    assert piece(100, 500).usd_between(at(start), at(end)) == Decimal(usd)
    known = piece(100, 500, usd="8")
    assert known.usd_between(at(start), at(end)) == 20 * Decimal(usd)


def test_a_paid_piece_of_no_time_costs_nothing_and_a_fraction_of_a_second_its_share() -> None:
    assert piece(100, 100, usd="8").usd_between(at(0), at(200)) == 0
    assert piece(0, 0.75).usd_between(at(0.5), at(1)) == Decimal("0.00025")


def test_a_metered_instance_has_its_first_start_its_last_end_and_all_its_dollars() -> None:
    instance = replace(
        metered(), pieces=[piece(300, 400), piece(100, 200), piece(150, 350, usd="1")]
    )
    assert (instance.start, instance.end) == (at(100), at(400))
    assert instance.usd == Decimal("0.1") + Decimal("0.1") + Decimal("1")
    assert instance.usd_between(at(150), at(350)) == Decimal("0.05") + Decimal("0.05") + Decimal(
        "1"
    )


@pytest.mark.parametrize(
    ("uptime", "warm"), [(None, False), (0, False), (600.0, False), (600.001, True), ("700", True)]
)
def test_an_instance_that_was_up_for_more_than_ten_minutes_was_warm(
    uptime: float | str | None, warm: bool
) -> None:
    instance = metered((0, 10), uptime=uptime)  # type: ignore[arg-type]
    assert instance.was_warm is warm
    assert instance.uptime_seconds == (None if uptime is None else float(uptime))


@pytest.mark.parametrize(
    ("spans", "start", "end", "seconds"),
    [
        ([(0, 100)], 0, 100, 100),
        ([(0, 100)], 20, 70, 50),
        ([(0, 100)], 100, 200, 0),
        ([(0, 100), (200, 300)], 50, 250, 100),
        ([(200, 300), (0, 100)], 50, 250, 100),
        ([(0, 100), (50, 150)], 0, 200, 150),
        ([(0, 100), (10, 20), (50, 120)], 0, 200, 120),
        ([(0, 100), (90, 300)], 0, 95, 95),
        ([(0, 100), (0, 100)], -50, 200, 100),
    ],
)
def test_time_in_which_several_nodes_ran_counts_once(
    spans: list, start: float, end: float, seconds: float
) -> None:
    assert metered(*spans).seconds_between(at(start), at(end)) == seconds


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 50),
    st.integers(0, 50),
)
def test_seconds_between_counts_each_covered_second_once(spans: list, one: int, other: int) -> None:
    start, end = sorted((one, other))
    covered = sum(
        any(first <= second < last for first, last in spans) for second in range(start, end)
    )
    assert metered(*spans).seconds_between(at(start), at(end)) == covered


def test_price_bounds_are_those_of_all_pieces_in_the_interval() -> None:
    falling = PriceCurve.of(Decimal(4), [(at(100), Decimal(3)), (at(200), Decimal(1))])
    rising = PriceCurve.of(Decimal(5), [(at(300), Decimal(9))])
    instance = replace(metered(), pieces=[piece(0, 50, curve=falling), piece(0, 50, curve=rising)])
    assert instance.price_bounds(at(0), at(50)) == (4, 5)
    assert instance.price_bounds(at(0), at(150)) == (3, 5)
    assert instance.price_bounds(at(150), at(400)) == (1, 9)


def test_a_billed_instance_sums_its_lines_by_hour() -> None:
    instance = BilledInstance(instance_id="i-one")
    instance.add(line(), "user:ebbflow-job")
    later = {"start": at(HOUR), "end": at(2 * HOUR)}
    instance.add(line(amount=Decimal("0.25"), usd=Decimal("0.5")), "ebbflow-job")
    assert list(instance.hours) == [(at(0), at(HOUR))]
    instance.add(
        line(
            **later,
            zone="us-east-1b",
            instance_type="",
            market="on_demand",
            tags={},
            usd=Decimal(4),
        ),
        "ebbflow-job",
    )
    instance.add(
        line(**later, amount=Decimal(0), usd=Decimal(0), tags={"ebbflowjob": "other"}),
        "ebbflow-job",
    )
    assert instance.seconds == 1800 + 900 + 1800
    assert instance.usd == Decimal("1.5") + Decimal("0.5") + 4
    assert instance.tags == {"demo", "other"}
    assert [hour.tags for hour in instance.hours.values()] == [{"demo"}, {"other"}]
    assert instance.values("zone") == {"us-east-1a", "us-east-1b"}
    assert instance.values("type") == {"g5.xlarge"}
    assert instance.values("market") == {"spot", "on_demand"}
    assert instance.elsewhere_usd == 0


def test_seconds_beyond_an_hour_are_excess_and_are_summed() -> None:
    assert billed((0, 3600), (1, 1000)).excess_seconds == 0
    assert billed((0, 3601), (1, 3610), (2, 10)).excess_seconds == 11


def test_uses_in_several_files_conflict_and_are_counted() -> None:
    instance = BilledInstance(instance_id="i-one")
    instance.add(line(), "ebbflow-job")
    instance.add(line(), "ebbflow-job")
    assert instance.conflicting_uses == 0
    instance.add(line(delivery=1, line_type="DiscountedUsage"), "ebbflow-job")
    instance.add(line(delivery=1, usage_type="BoxUsage:g5.xlarge"), "ebbflow-job")
    instance.add(line(delivery=1, start=at(HOUR), end=at(2 * HOUR)), "ebbflow-job")
    assert instance.conflicting_uses == 0
    instance.add(line(delivery=1), "ebbflow-job")
    assert instance.conflicting_uses == 1
    instance.add(line(delivery=2, start=at(HOUR), end=at(2 * HOUR)), "ebbflow-job")
    assert instance.conflicting_uses == 2


def ended_node(gang: GangLog, seconds: float) -> None:
    gang.steps(1, 1, useful_step=seconds)
    gang.ended("node_lost", seconds)


def test_meter_instances_has_the_nodes_pauses_and_minimum_charge_of_each_instance() -> None:
    """Two nodes with a pause between them on one instance, and a node of half a minute on another."""
    machine = {"instance_id": "i-one", "instance_type": "g5.xlarge", "uptime_seconds": 100.0}
    first = GangLog(1, 1000.0, [[0]], machines=[{**machine, "market": "on_demand"}])
    ended_node(first, 200.0)
    second = GangLog(2, 1300.0, [[0]], machines=[{**machine, "uptime_seconds": 400.0}])
    second.heartbeat(0, 50.0)
    short = GangLog(3, 500.0, [[0]], machines=[{"instance_id": "i-two", "uptime_seconds": 10.0}])
    ended_node(short, 30.0)
    nameless = GangLog(4, 9000.0, [[0]])
    ended_node(nameless, 30.0)
    events = [plan_event(3.6), *short.events, *second.events, *first.events, *nameless.events]
    ledger = fold(sorted(events, key=lambda event: event.t_wall))
    found = meter_instances(ledger.nodes)
    assert list(found) == ["i-one", "i-two"]
    one = found["i-one"]
    two = found["i-two"]
    spans = [(paid.start - WALL, paid.end - WALL, paid.usd is None) for paid in one.pieces]
    assert spans == [(1000, 1200, True), (1200, 1300, False), (1300, 1350, True)]
    assert (one.instance_id, one.market, one.lost_ends, one.uptime_seconds) == (
        "i-one",
        "on_demand",
        1,
        100.0,
    )
    on_demand = Decimal("0.002")  # dollars per second, twice the price of Spot
    assert one.usd == (200 + 100) * on_demand + 50 * Decimal("0.001")
    spans = [(paid.start - WALL, paid.end - WALL, paid.usd is None) for paid in two.pieces]
    assert spans == [(500, 530, True), (530, 550, False)]
    assert (two.market, two.lost_ends, two.usd) == ("spot", 0, Decimal("0.05"))


def test_meter_instances_places_extra_time_beside_its_node() -> None:
    """Extra time is placed by another clock, so it is moved to where it cannot overlap the node."""
    gang = GangLog(1, 1000.0, [[0]], machines=[{"instance_id": "i-one", "uptime_seconds": 10.0}])
    ended_node(gang, 20.0)
    ledger = fold([plan_event(3.6), *gang.events])
    [bill] = ledger.nodes
    (extra,) = (extra for extra in bill.extras if extra.ledger_class is LedgerClass.MINIMUM_CHARGE)
    assert extra.seconds == 30.0

    def extra_span(start: float) -> tuple[float, float]:
        moved = replace(bill, extras=(replace(extra, start=at(start)),))
        [_, placed] = meter_instances([moved])["i-one"].pieces
        assert placed.usd == Decimal("0.03")
        return placed.start - WALL, placed.end - WALL

    assert extra_span(999) == (970, 1000)
    assert extra_span(500) == (970, 1000)
    assert extra_span(1000) == (1020, 1050)
    assert extra_span(1010) == (1020, 1050)
    assert extra_span(1030) == (1030, 1060)


def test_a_node_without_a_plan_has_no_market() -> None:
    gang = GangLog(1, 1000.0, [[0]], machines=[{"instance_id": "i-one"}])
    ended_node(gang, 100.0)
    assert meter_instances(fold(gang.events).nodes)["i-one"].market == ""


@pytest.mark.parametrize(("own", "missing"), [(100, 0), (120, 0), (150, 30)])
def test_missing_seconds_are_metered_and_not_billed(own: float, missing: float) -> None:
    hour = BilledHour(start=at(0), end=at(HOUR), seconds=120)
    found = HourMatch(
        start=at(0),
        end=at(HOUR),
        billed=hour,
        own_seconds=own,
        own_usd=Decimal(0),
        explained={},
        rest_seconds=0,
    )
    assert found.missing_seconds == missing
    assert found.name == "2027-01-15 08:00 UTC"


def matched(
    instance: MeteredInstance, bill: BilledInstance, *others: tuple[float, float], job: str = "demo"
) -> list[tuple[float, float, dict[str, float], float]]:
    """Each hour as (start, metered seconds, explained seconds, rest)."""
    uses = [(at(start), at(end)) for start, end in others]
    hours = match_instance(instance, bill, uses, job)
    return [
        (hour.start - WALL, hour.own_seconds, hour.explained, hour.rest_seconds) for hour in hours
    ]


def test_an_hour_is_explained_by_boot_then_end_and_the_rest_stays() -> None:
    bill = billed((0, 3600), (1, 2000))
    assert matched(metered((700, HOUR + 1000), uptime=600), bill) == [
        (0, 2900, {"boot time": 600}, 100),
        (HOUR, 1000, {}, 1000),  # it ran on for too long to have ended later
    ]
    assert matched(metered((630, HOUR + 1500), uptime=600), bill) == [
        (0, 2970, {"boot time": 600}, 30),
        (HOUR, 1500, {"ended later": 500}, 0),
    ]


def test_the_match_of_an_hour_has_both_bills_dollars() -> None:
    bill = billed((0, 3600), (1, 1000))
    [first, second] = match_instance(metered((0, HOUR + 900)), bill, [], "demo")
    assert (first.own_usd, second.own_usd) == (Decimal("3.6"), Decimal("0.9"))
    assert first.billed is bill.hours[at(0), at(HOUR)] and second.end == at(2 * HOUR)


def test_a_warm_instance_is_explained_before_the_job() -> None:
    assert matched(metered((1800, 3600), uptime=1770), billed((0, 3600))) == [
        (0, 1800, {"warm instance": 1770}, 30)
    ]


@pytest.mark.parametrize(("rest", "late"), [(60, 600), (61, None)])
def test_an_instance_that_kept_running_did_not_end_late(rest: float, late: float | None) -> None:
    """600 s after the last agent are explained, unless another minute and more is not."""
    [(_, own, explained, left)] = matched(metered((0, 1000)), billed((0, 1600 + rest)))
    assert own == 1000
    assert (explained, left) == (({"ended later": late}, rest) if late else ({}, 600 + rest))


def test_a_lost_end_is_explained_for_fifteen_seconds_of_each_lost_node() -> None:
    bill = billed((0, 1100))
    explained = {"end not recorded": 30, "ended later": 70}
    assert matched(metered((0, 1000), lost_ends=2), bill) == [(0, 1000, explained, 0)]
    assert matched(metered((0, 1000), lost_ends=0), bill) == [(0, 1000, {"ended later": 100}, 0)]
    assert matched(metered((0, 1000)), billed((0, 1000.5))) == [(0, 1000, {"ended later": 0.5}, 0)]
    [(*_, explained, rest)] = matched(metered((0, 1000), lost_ends=2), billed((0, 1610)))
    assert (explained, rest) == ({"end not recorded": 30, "ended later": 570}, 10)


def test_the_minimum_charge_explains_what_the_ledger_may_have_missed() -> None:
    """A bill of a minute at the most, of an instance whose uptime is unknown or known."""
    assert matched(metered((0, 40), uptime=None), billed((0, 60))) == [
        (0, 40, {"minimum charge": 20}, 0)
    ]
    assert matched(metered((100, 140), uptime=5), billed((0, 60))) == [
        (0, 40, {"boot time": 5, "minimum charge": 15}, 0)
    ]
    assert matched(metered((0, 40), uptime=None), billed((0, 61))) == [
        (0, 40, {"ended later": 21}, 0)
    ]
    assert matched(metered((0, 20), (30, 40), uptime=None), billed((0, 60))) == [
        (0, 30, {"minimum charge": 30}, 0),
    ]


def test_the_minimum_charge_counts_no_more_than_ten_minutes_of_uptime_and_is_never_negative() -> (
    None
):
    [(_, own, explained, rest)] = matched(
        metered((3500, 3510), uptime=3000), billed((0, 20), (1, 40))
    )[:1]
    assert (own, explained, rest) == (10, {"warm instance": 10}, 0)
    assert matched(metered((0, 50), uptime=59), billed((0, 60))) == [
        (0, 50, {"ended later": 10}, 0)
    ]


def test_another_jobs_use_is_explained_by_its_interval() -> None:
    assert matched(metered((0, 1000)), billed((0, 3600)), (1700, 3600)) == [
        (0, 1000, {"another job": 1900}, 700)
    ]
    assert matched(metered((0, 1000)), billed((0, 3600)), (1620, 3600)) == [
        (0, 1000, {"another job": 1980, "ended later": 600}, 20)
    ]
    assert matched(metered((0, 1000)), billed((0, 3600)), (1000, 2000), (1600, 3590)) == [
        (0, 1000, {"another job": 2600}, 0)
    ]


def test_hours_that_were_metered_and_not_billed_are_added_without_a_bill() -> None:
    bill = billed((1, 3600))
    assert matched(metered((1800, 3 * HOUR + 1)), bill) == [
        (0, 1800, {}, 0),
        (HOUR, 3600, {}, 0),
        (2 * HOUR, 3600, {}, 0),
        (3 * HOUR, 1, {}, 0),
    ]
    assert [
        start for start, *_ in matched(metered((0, 2 * HOUR)), billed((0, 3600), (1, 3600)))
    ] == [0, HOUR]
    assert list(bill.hours) == [(at(HOUR), at(2 * HOUR))]


def test_a_daily_bill_has_no_further_hours() -> None:
    day = BilledInstance(instance_id="i-one")
    day.hours[at(0), at(24 * HOUR)] = BilledHour(
        start=at(0), end=at(24 * HOUR), seconds=8000, usd=Decimal(8)
    )
    assert matched(metered((3000, 11000)), day) == [(0, 8000, {}, 0)]
    assert matched(metered((3000, 24 * HOUR + 1000)), day)[1:] == [(24 * HOUR, 1000, {}, 0)]
    next_day = (at(24 * HOUR), at(48 * HOUR))
    day.hours[next_day] = BilledHour(start=next_day[0], end=next_day[1])
    assert [start for start, *_ in matched(metered((3000, 11000)), day)] == [0, 24 * HOUR]
    day.hours = {
        (at(HOUR), at(25 * HOUR)): BilledHour(start=at(HOUR), end=at(25 * HOUR), seconds=8000)
    }
    assert [start for start, *_ in matched(metered((3000, 11000)), day)] == [0, HOUR]


# A clock that is ahead by some seconds, and the offset that the match finds. The job ran for half
# an hour in each of two billed hours, so each second that a clock is ahead is missing in one hour
# and too much in the other.
@pytest.mark.parametrize(
    ("ahead", "offset"),
    [
        *((0, 0), (15, 0), (15.2, -15), (20, -20), (21, -20), (22, -25), (300, -300), (305, -300)),
        *((-30, 0), (-31, 30), (-300, 300), (-305, 300)),
    ],
)
def test_a_clock_that_is_apart_is_found_in_steps_of_five_seconds(
    ahead: float, offset: float
) -> None:
    instance = metered((1800 + ahead, 5400 + ahead))
    hours = match_instance(instance, billed((0, 1800), (1, 1800)), [], "demo")
    assert instance.offset == offset
    if (ahead + offset) == 0:
        assert [(hour.own_seconds, hour.explained, hour.rest_seconds) for hour in hours] == [
            (1800, {}, 0)
        ] * 2


@pytest.mark.parametrize(("missing", "offset"), [(20, -40), (21, 0)])
def test_an_offset_counts_only_if_it_explains_four_fifths(missing: float, offset: float) -> None:
    """Of several offsets that explain as much, the smallest is taken."""
    instance = metered((1840, 5440))
    match_instance(instance, billed((0, 1800), (1, 1800 - missing)), [], "demo")
    assert instance.offset == offset


def test_no_offset_is_sought_for_a_bill_that_contradicts_itself() -> None:
    instance = metered((1840, 5440))
    bill = billed((0, 1800), (1, 1800))
    bill.hours[at(0), at(HOUR)].deliveries = {("SpotUsage", "Usage"): {0, 1}}
    match_instance(instance, bill, [], "demo")
    assert instance.offset == 0


def test_the_offset_holds_for_an_instance_that_kept_running() -> None:
    instance = metered((1840, 5440))
    match_instance(instance, billed((0, 1800), (1, 1800), (2, 1300)), [], "demo")
    assert instance.offset == 0, "most of the difference is another one"
    instance = metered((2100, 5700), (9300, 12900))
    bill = billed((0, 1800), (1, 1800), (2, 1800), (3, 2470))
    hours = match_instance(instance, bill, [], "demo")
    assert instance.offset == -300
    assert [hour.own_seconds for hour in hours] == [1800] * 4
    assert [(hour.explained, hour.rest_seconds) for hour in hours] == [
        ({}, 0),
        ({}, 0),
        ({}, 0),
        ({}, 670),
    ]


def test_the_offset_decides_in_which_hours_the_instance_was_metered() -> None:
    """The agent's clock is 300 s ahead: the job began 100 s before the first billed hour, and ended
    within the last.
    """
    instance = metered((HOUR + 200, 2 * HOUR + 2100), (3 * HOUR + 2100, 5 * HOUR + 200))
    bill = billed((1, 3600), (2, 1800), (3, 1800), (4, 3500))
    hours = match_instance(instance, bill, [], "demo")
    assert instance.offset == -300
    assert [(hour.start - WALL, hour.own_seconds) for hour in hours] == [
        (0, 100),
        (HOUR, 3600),
        (2 * HOUR, 1800),
        (3 * HOUR, 1800),
        (4 * HOUR, 3500),
    ]


def hours_elsewhere(
    instance: MeteredInstance, bill: BilledInstance, *others: tuple[float, float]
) -> list[int]:
    """Numbers of the hours that are set aside for other jobs."""
    before = list(bill.hours.items())
    uses = [(at(start), at(end)) for start, end in others]
    match_instance(instance, bill, uses, "demo")
    gone = [(key, hour) for key, hour in before if key not in bill.hours]
    assert bill.elsewhere_usd == sum((hour.usd for _, hour in gone), Decimal(0))
    return [round((start - WALL) / HOUR) for (start, _), _ in gone]


@pytest.mark.parametrize(("start", "elsewhere"), [(299, []), (300, [0]), (301, [0])])
def test_an_hour_near_the_job_is_never_set_aside(start: float, elsewhere: list[int]) -> None:
    """Clocks may be five minutes apart."""
    instance = metered((HOUR + start, 2 * HOUR), uptime=None)
    assert hours_elsewhere(instance, billed((0, 3600), (1, 3600))) == elsewhere
    after = metered((0, 2 * HOUR - start))
    assert hours_elsewhere(after, billed((0, 3600), (2, 3600)), (2 * HOUR, 3 * HOUR)) == [
        2 for _ in elsewhere
    ]


def test_all_hours_of_other_jobs_are_set_aside_and_their_dollars_summed() -> None:
    instance = metered((3 * HOUR, 4 * HOUR), uptime=None)
    bill = billed((0, 100), (1, 200), (3, 3600))
    assert hours_elsewhere(instance, bill) == [0, 1]
    assert bill.elsewhere_usd == Decimal("0.3")
    only_others = billed((0, 100))
    assert match_instance(instance, only_others, [], "demo") == []


@pytest.mark.parametrize(
    ("uptime", "elsewhere"),
    [(None, [0]), (600.0, []), (601.0, [0])],
    ids=["unknown", "booted", "warm"],
)
def test_an_hour_before_a_warm_instance_is_another_jobs(
    uptime: float | None, elsewhere: list[int]
) -> None:
    instance = metered((2 * HOUR, 3 * HOUR), uptime=uptime)
    assert hours_elsewhere(instance, billed((0, 3600), (2, 3600))) == elsewhere


def test_an_hour_after_a_warm_instance_is_not_another_jobs_without_evidence() -> None:
    instance = metered((0, HOUR), uptime=601.0)
    assert hours_elsewhere(instance, billed((0, 3600), (2, 3600))) == []


@pytest.mark.parametrize(("tag", "elsewhere"), [("demo", []), ("other", [2])])
def test_an_hour_with_only_another_jobs_tag_is_set_aside(tag: str, elsewhere: list[int]) -> None:
    assert (
        hours_elsewhere(metered((0, HOUR)), billed((0, 3600), (2, 3600), tags={2: tag}))
        == elsewhere
    )


def test_an_hour_with_the_tags_of_both_jobs_stays() -> None:
    bill = billed((0, 3600), (2, 3600))
    bill.hours[at(2 * HOUR), at(3 * HOUR)].tags = {"demo", "other"}
    assert hours_elsewhere(metered((0, HOUR)), bill) == []


@pytest.mark.parametrize(
    ("others", "elsewhere"),
    [
        ([], []),
        ([(2 * HOUR, 3 * HOUR)], [2]),
        ([(2 * HOUR, 3 * HOUR - 60)], [2]),
        ([(2 * HOUR, 3 * HOUR - 61)], []),
        ([(2 * HOUR + 60, 3 * HOUR)], [2]),
        ([(2 * HOUR + 61, 3 * HOUR)], []),
        ([(2 * HOUR, 2 * HOUR + 1800), (2 * HOUR + 1860, 4 * HOUR)], [2]),
        ([(2 * HOUR, 2 * HOUR + 1800), (2 * HOUR + 1861, 4 * HOUR)], []),
        ([(3 * HOUR, 4 * HOUR), (2 * HOUR, 3 * HOUR - 60)], [2]),
    ],
)
def test_an_hour_that_other_jobs_used_almost_whole_is_set_aside(
    others: list[tuple[float, float]], elsewhere: list[int]
) -> None:
    assert hours_elsewhere(metered((0, HOUR)), billed((0, 3600), (2, 3600)), *others) == elsewhere


def test_an_hour_of_less_than_a_minute_needs_evidence_of_another_job() -> None:
    assert hours_elsewhere(metered((0, HOUR)), billed((0, 3600), (2, 50))) == []


@pytest.mark.parametrize(
    ("end", "explained", "rest"),
    [(HOUR + 1000, {"another job": 1300}, 0), (HOUR + 2300, {}, 0)],
    ids=["before the tag", "at the end"],
)
def test_the_time_before_another_jobs_tag_is_its_time_too(
    end: float, explained: dict[str, float], rest: float
) -> None:
    """AWS copies a tag some time after the other job took the instance."""
    bill = billed((0, 3600), (1, 2300), (2, 3600), tags={2: "other"})
    others: list[tuple[float, float]] = []
    instance = metered((0, end))
    hours = match_instance(instance, bill, others, "demo")
    assert others == [(at(end), at(2 * HOUR))]
    assert [(hour.explained, hour.rest_seconds) for hour in hours] == [({}, 0), (explained, rest)]


def test_an_earlier_jobs_tag_adds_no_time_after_this_job() -> None:
    others: list[tuple[float, float]] = []
    match_instance(
        metered((2 * HOUR, 3 * HOUR)),
        billed((0, 3600), (2, 3600), tags={0: "other"}),
        others,
        "demo",
    )
    assert others == []


def test_seconds_become_decimals_of_a_microsecond() -> None:
    assert to_decimal(0.1 + 0.2) == Decimal("0.3")
    assert to_decimal(1.0000004) == 1
    assert to_decimal(1.0000006) == Decimal("1.000001")


@pytest.mark.parametrize(
    ("record", "frozen"),
    [
        (PaidPiece, True),
        (HourMatch, True),
        (MeteredInstance, False),
        (BilledHour, False),
        (BilledInstance, False),
    ],
)
def test_a_record_of_a_match_takes_names_only(record: type, frozen: bool) -> None:
    assert takes_names_only(record) and is_frozen(record) is frozen
