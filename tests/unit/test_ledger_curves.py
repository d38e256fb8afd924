"""Prices over time: the integral, the share of a node on a shared instance, and the share of each
class of time.
"""

from __future__ import annotations

from decimal import Decimal

import pytest

from ebbflow.core.events import LedgerClass
from ebbflow.cost.ledger.bills import (
    NodeBill,
    compute_bills,
    compute_rank_charges,
    count_machines,
    count_sharers,
    divide_price,
    merge_batch_status,
)
from ebbflow.cost.ledger.generations import RecordedGeneration
from ebbflow.cost.ledger.instances import BatchJob, ExtraTime
from ebbflow.cost.ledger.pricing import NodePrice, PriceCurve
from ebbflow.cost.ledger.timeline import NodeTime, RankTime, Span
from tests.support.timelines import WALL, event, paid_node, plan_event, prices_event

HOUR = 3600 * 1_000_000
MICRO = 1_000_000
START = round(WALL * MICRO)
FREE = NodePrice(
    curve=PriceCurve(Decimal(0)), on_demand_usd_per_hour=None, kind="recorded", pool=None
)


def curve_of(first: str, *changes: tuple[int, str]) -> PriceCurve:
    """Dollars per hour; the changes are in microseconds."""
    return PriceCurve(Decimal(first), tuple((at, Decimal(usd)) for at, usd in changes))


RISING = curve_of("1", (1 * HOUR, "2"), (3 * HOUR, "4"))


@pytest.mark.parametrize(
    ("start", "end", "usd"),
    [
        (0, 1, 1),  # until the change
        (0, 2, 3),
        (1, 2, 2),  # a change applies from its own time on
        (0, 4, 1 + 2 * 2 + 4),
        (2, 3, 2),
        (3, 4, 4),
        (4, 6, 8),
        (2, 2, 0),
        (2, 1, 0),  # never negative
        (4, 1, 0),
        (-2, 0, 2),
    ],
)
def test_cost_of_a_curve_is_the_integral_of_its_price(start: int, end: int, usd: int) -> None:
    assert RISING.cost(start * HOUR, end * HOUR) == usd


@pytest.mark.parametrize(
    ("at", "usd"),
    [(-1, 1), (HOUR - 1, 1), (HOUR, 2), (3 * HOUR - 1, 2), (3 * HOUR, 4), (9 * HOUR, 4)],
)
def test_price_at_a_moment_is_that_of_the_last_change(at: int, usd: int) -> None:
    assert RISING.price_at(at / MICRO) == usd


@pytest.mark.parametrize(
    ("start", "end", "lowest", "highest", "constant"),
    [
        (0, 1, 1, 1, True),  # the change at the end is outside
        (0, 2, 1, 2, False),
        (1, 2, 2, 2, True),  # the change at the start is the price at the start
        (1, 3, 2, 2, True),
        (2, 4, 2, 4, False),
        (0, 9, 1, 4, False),
        (3, 9, 4, 4, True),
        (-3, 0, 1, 1, True),
    ],
)
def test_bounds_of_a_curve_and_whether_it_is_constant(
    start: int, end: int, lowest: int, highest: int, constant: bool
) -> None:
    assert RISING.bounds(start * 3600.0, end * 3600.0) == (lowest, highest)
    assert RISING.is_constant(start * HOUR, end * HOUR) is constant


def test_bounds_of_a_falling_curve_are_ordered() -> None:
    assert curve_of("5", (HOUR, "3")).bounds(0.0, 7200.0) == (3, 5)


def test_a_change_to_the_same_price_leaves_a_curve_constant() -> None:
    assert curve_of("1", (HOUR, "1.0")).is_constant(0, 2 * HOUR)
    assert not curve_of("1", (HOUR, "1"), (2 * HOUR, "2")).is_constant(0, 3 * HOUR)


def test_a_curve_orders_its_changes_and_keeps_the_last_of_one_time() -> None:
    changes = [(2.0, Decimal(5)), (1.0000004, Decimal(3)), (1.0, Decimal(4))]
    assert PriceCurve.of(Decimal(1), changes) == curve_of("1", (1_000_000, "4"), (2_000_000, "5"))


@pytest.mark.parametrize(
    ("sharers", "expected"),
    [
        ((), (("8",), ())),
        (((5, 2),), (("8",), ((5, "4"),))),
        (((5, 2), (10, 4)), (("8",), ((5, "4"), (10, "2")))),
        (((20, 2),), (("8",), ((10, "6"), (20, "3")))),
        (((5, 2), (20, 1)), (("8",), ((5, "4"), (10, "3"), (20, "6")))),
    ],
)
def test_a_price_is_divided_by_the_nodes_that_share_the_instance(sharers, expected) -> None:
    if any(at == 20 for at, _ in sharers):
        changes = ((10, Decimal(6)),)
    else:
        changes = ()
    (first,), divided = expected
    assert divide_price(PriceCurve(Decimal(8), changes), sharers) == curve_of(first, *divided)


def test_sharers_are_counted_from_each_start_to_each_end() -> None:
    """The first node is there from 0 to 100 s, the second from 40 s to 60 s, the third begins when
    the first ends.
    """
    first = paid_node(0.0, 100.0, instance_id="i-1")
    second = paid_node(40.0, 20.0, node=1, instance_id="i-1")
    third = paid_node(100.0, 50.0, generation=2, instance_id="i-1")
    other = paid_node(0.0, 100.0, node=2, instance_id="i-2")
    seconds = {
        id(first): ((0, 1), (40, 2), (60, 1)),
        id(second): ((40, 2),),
    }
    expected = {}
    for node, counts in seconds.items():
        expected[node] = tuple((START + at * MICRO, number) for at, number in counts)
    assert count_sharers([third, second, first, other]) == expected, (
        "a node that was always alone is left out"
    )


def test_sharers_are_counted_in_the_order_of_time() -> None:
    nodes = [
        paid_node(number * 17.3 % 60.0, 100.0, node=number, instance_id="i-1")
        for number in range(30)
    ]
    for counts in count_sharers(nodes).values():
        assert counts == tuple(sorted(counts))


def rank_time(paid: int, *spans: Span, **classes: int) -> RankTime:
    return RankTime(
        rank=0,
        paid=paid,
        classes={LedgerClass(kind): n for kind, n in classes.items()},
        spans=spans,
    )


def span(start: int, end: int, **classes: int) -> Span:
    return Span(start, end, {LedgerClass(kind): micros for kind, micros in classes.items()})


def charges(rank: RankTime, curve: PriceCurve, ranks: int = 1) -> dict[str, Decimal]:
    """Dollars by class of a rank whose node started at `WALL`."""
    changes = tuple((START + at, usd) for at, usd in curve.changes)
    found = compute_rank_charges(
        paid_node(0.0, 1.0, ranks=ranks), rank, PriceCurve(curve.first, changes)
    )
    return {str(kind): usd for kind, usd in found.items()}


def test_a_constant_price_is_charged_by_seconds_and_divided_by_the_ranks() -> None:
    rank = rank_time(4 * HOUR, startup=HOUR, useful_step=3 * HOUR)
    assert charges(rank, curve_of("8"), ranks=2) == {"startup": 4, "useful_step": 12}


def test_each_span_is_charged_at_its_own_mean_price_and_gaps_at_theirs() -> None:
    """$1 in the first two hours, then $3; one hour each of start-up, of no interval, of a step, and
    of none again.
    """
    spans = (span(2 * HOUR, 3 * HOUR, useful_step=HOUR), span(0, HOUR, startup=HOUR))
    rank = rank_time(4 * HOUR, *spans, startup=HOUR, useful_step=HOUR, unattributed=2 * HOUR)
    assert charges(rank, curve_of("1", (2 * HOUR, "3"))) == {
        "startup": 1,
        "useful_step": 3,
        "unattributed": 4,
    }


def test_a_span_over_a_change_divides_its_dollars_by_the_seconds_of_its_classes() -> None:
    rank = rank_time(
        4 * HOUR,
        span(0, 4 * HOUR, useful_step=3 * HOUR, data_wait=HOUR),
        useful_step=3 * HOUR,
        data_wait=HOUR,
    )
    assert charges(rank, curve_of("1", (HOUR, "5"))) == {"useful_step": 12, "data_wait": 4}


def test_a_span_over_a_change_has_the_mean_of_its_own_time() -> None:
    """$1 for an hour and $5 from then on: of the first two hours the mean is $3, of the other two
    it is $5.
    """
    spans = (span(0, 2 * HOUR, startup=2 * HOUR), span(2 * HOUR, 4 * HOUR, useful_step=2 * HOUR))
    rank = rank_time(4 * HOUR, *spans, startup=2 * HOUR, useful_step=2 * HOUR)
    assert charges(rank, curve_of("1", (HOUR, "5"))) == {"startup": 6, "useful_step": 10}


def test_a_class_in_two_spans_is_charged_at_the_mean_of_both() -> None:
    """One hour at $1 and three at $5: $4 on average, for the two hours that are left of it."""
    spans = (span(0, HOUR, useful_step=HOUR), span(HOUR, 4 * HOUR, useful_step=3 * HOUR))
    rank = rank_time(4 * HOUR, *spans, useful_step=2 * HOUR, evaluation=2 * HOUR)
    # Evaluation is in no span, and has the mean price of all the time, which is $4 as well.
    assert charges(rank, curve_of("1", (HOUR, "5"))) == {"useful_step": 8, "evaluation": 8}
    early = rank_time(4 * HOUR, *spans[:1], useful_step=HOUR, evaluation=3 * HOUR)
    # The weights are $1 × 1 h and $4 × 3 h, of $16 in all.
    assert charges(early, curve_of("1", (HOUR, "5"))) == {
        "useful_step": Decimal(16) / 13,
        "evaluation": Decimal(16) * 12 / 13,
    }


def test_overlapping_spans_leave_no_gap_between_them() -> None:
    """The long span covers the short one, so that only the last hour is in no span; its mean price
    is $6.
    """
    spans = (span(0, 3 * HOUR, startup=3 * HOUR), span(HOUR, 2 * HOUR, restore=HOUR))
    rank = rank_time(4 * HOUR, *spans, startup=2 * HOUR, restore=HOUR, unattributed=HOUR)
    later = HOUR // 2 * 7
    assert charges(rank, curve_of("2", (later, "10"))) == {
        "startup": 4,
        "restore": 2,
        "unattributed": 6,
    }


def test_a_gap_has_the_mean_price_from_its_first_to_its_last_microsecond() -> None:
    """4 µs of no span at $1 for one of them and $5 for the others, then a span of 4 µs at $10."""
    rank = rank_time(8, span(4, 8, startup=4), unattributed=4, startup=4)
    curve = curve_of("1", (1, "5"), (4, "10"))
    found = charges(rank, curve)
    assert [round(found[kind] * HOUR, 20) for kind in ("unattributed", "startup")] == [16, 40]


def test_an_empty_span_has_the_price_of_its_moment() -> None:
    rank = rank_time(
        2 * HOUR, span(HOUR, HOUR), span(0, 2 * HOUR, startup=2 * HOUR), startup=2 * HOUR
    )
    assert charges(rank, curve_of("1", (HOUR, "3"))) == {"startup": 4}


def test_a_rank_without_paid_time_is_charged_nothing() -> None:
    assert charges(rank_time(0, startup=0), curve_of("1")) == {}
    assert charges(rank_time(1, startup=1), curve_of("3600")) == {"startup": Decimal("0.000001")}


def test_dollars_of_a_gap_without_seconds_are_divided_by_the_seconds_of_all_classes() -> None:
    """Intervals that exceed the paid time hide a gap; here it is the only time that costs anything."""
    rank = rank_time(4 * HOUR, span(0, 3 * HOUR, startup=3 * HOUR), startup=3 * HOUR, restore=HOUR)
    free_until_the_gap = curve_of("0", (3 * HOUR, "8"))
    assert sum(charges(rank, free_until_the_gap).values()) == 8
    without = rank_time(4 * HOUR, span(0, 3 * HOUR, startup=3 * HOUR), startup=4 * HOUR)
    assert charges(without, free_until_the_gap) == {"startup": 8}


def bill_of(
    node: NodeTime, *extras: ExtraTime, usd: str = "3.6", sharers=(), job: BatchJob | None = None
) -> NodeBill:
    price = NodePrice(
        curve=PriceCurve(Decimal(usd), ((START + 50 * MICRO, Decimal(36)),)),
        on_demand_usd_per_hour=Decimal("7.2"),
        kind="recorded",
        pool=None,
    )
    return NodeBill(node=node, price=price, sharers=sharers, extras=extras, job=job)


def extra_of(node: NodeTime, start: float, seconds: float) -> ExtraTime:
    return ExtraTime(node=node, ledger_class=LedgerClass.IDLE, start=WALL + start, seconds=seconds)


def test_a_bill_is_the_sum_of_its_share_and_of_its_extras_at_the_full_price() -> None:
    """$0.001 a second until 50 s, and $0.01 from then on; the node shares its instance from 0 s."""
    node = paid_node(0.0, 40.0, ranks=2)
    extras = (extra_of(node, 40.0, 12.0), extra_of(node, 70.0, 3.0))
    bill = bill_of(node, *extras, sharers=((START, 4),))
    assert bill.extra_usd(extras[0]) == Decimal("0.03") and bill.extra_usd(extras[1]) == Decimal(
        "0.03"
    )
    assert bill.usd == Decimal("0.01") + Decimal("0.06")
    assert bill.rank_microseconds == 2 * (40 + 12 + 3) * MICRO
    assert bill.on_demand_curve.price_at(WALL) == Decimal("1.8")


def test_an_unknown_on_demand_price_has_no_curve() -> None:
    assert (
        NodeBill(node=paid_node(0.0, 1.0), price=FREE, sharers=(), extras=()).on_demand_curve
        is None
    )


def test_nodes_that_share_an_instance_are_one_machine() -> None:
    known = {"instance_id": "i-1"}
    together = [
        bill_of(paid_node(0.0, 1.0, node=node, **known), sharers=((START, 2),)) for node in range(2)
    ]
    apart = [bill_of(paid_node(0.0, 1.0, node=node, **known)) for node in range(3)]
    assert count_machines([*together, *apart]) == 1 + 3
    assert count_machines([]) == 0


def batch_job(job_id: str = "j", cause: str = "reclaimed", nodes: int = 1) -> BatchJob:
    return BatchJob(
        job_id=job_id,
        nodes=nodes,
        ranks=1,
        started=WALL,
        stopped=WALL + 50,
        cause=cause,
        placed_wall=WALL,
        candidate={},
    )


def generation(number: int, reason: str | None) -> RecordedGeneration:
    return RecordedGeneration(
        number=number,
        parent_step=0,
        started_wall=WALL,
        ended_wall=WALL,
        reason=reason,
        culprit="",
        user_code=False,
        planned=False,
        running=False,
        kept=(0.0, 0.0),
    )


@pytest.mark.parametrize(
    ("reason", "cause", "merged"),
    [
        (None, "reclaimed", "reclaimed"),
        (None, "terminated", "terminated"),
        (None, "user_code", None),
        (None, None, None),
        ("node_lost", "reclaimed", "node_lost"),
    ],
)
def test_batch_names_the_reason_of_an_end_that_no_event_names(reason, cause, merged) -> None:
    if cause is None:
        job = None
    else:
        job = batch_job(cause=cause)
    bills = [
        bill_of(paid_node(0.0, 1.0, generation=1), job=job),
        bill_of(paid_node(0.0, 1.0, generation=2)),
    ]
    found = merge_batch_status({1: generation(1, reason), 2: generation(2, None)}, bills)
    assert found == {1: generation(1, merged), 2: generation(2, None)}


def attempt(job_id: str, nodes: int = 1, started: float = 0.0, stopped: float = 40.0, **data):
    times = {"started_utc": WALL + started, "stopped_utc": WALL + stopped}
    return event(
        "batch_attempt", 1e6, job_id=job_id, nodes=nodes, cause="reclaimed", **times, **data
    )


def started(node: int, seconds: float, **machine) -> list:
    return [
        event(
            "node_started", 0.0, generation=1, node=node, ranks=[node], instance_id="i-1", **machine
        ),
        event("node_ended", seconds, generation=1, node=node, seconds=seconds),
    ]


@pytest.mark.parametrize(
    ("machines", "nodes", "shares"),
    [
        ([{}, {}], 0, 2),  # pods that a scheduler packed onto one machine
        # Two jobs of one node each may share one
        ([{"batch_job_id": "j"}, {"batch_job_id": "k"}], 1, 2),
        ([{"batch_job_id": "j"}, {"batch_job_id": "j"}], 2, 1),  # the nodes of one job never do
    ],
)
def test_only_nodes_of_a_multi_node_job_have_an_instance_of_their_own(
    machines, nodes: int, shares: int
) -> None:
    events = [plan_event(), *started(0, 80.0, **machines[0]), *started(1, 80.0, **machines[1])]
    if nodes:
        events += [
            attempt(job_id, nodes, stopped=80.0) for job_id in {"j", machines[1]["batch_job_id"]}
        ]
    bills = compute_bills(events, {1: generation(1, "node_lost")}).nodes
    assert [bill.usd for bill in bills] == [Decimal("0.08") / shares] * 2
    known = [None if bill.job is None else bill.job.job_id for bill in bills]
    assert known == [machine.get("batch_job_id") for machine in machines]


def test_a_simulated_run_has_no_sharers_and_no_extras() -> None:
    events = [plan_event(simulated=True), *started(0, 20.0), *started(1, 20.0)]
    for bill in compute_bills(
        [*events, attempt("j", stopped=20.0)], {1: generation(1, None)}
    ).nodes:
        assert (bill.sharers, bill.extras, bill.usd) == ((), (), Decimal("0.02"))
        assert (bill.job is not None) is (bill.node.node == 0), "the job has one node"


def test_each_extra_is_on_the_bill_of_its_own_node_alone() -> None:
    events = [plan_event(), *started(0, 20.0), *started(1, 30.0)]
    bills = compute_bills(events, {1: generation(1, None)}).nodes
    extra_seconds = []
    for bill in bills:
        extra_seconds.append(sum(extra.seconds for extra in bill.extras))
    assert extra_seconds == [0.0, 30.0]


def test_an_unreported_node_is_billed_from_its_own_start_at_the_price_of_each_moment() -> None:
    """$0.001 a second until 10 s, then ten times that; node 1 ran from 5 s to 25 s with three
    ranks.
    """
    own = [[None, None], [WALL + 5, WALL + 25]]
    job = attempt("j", 2, node_times=own, processes_per_node=3)
    events = [plan_event(), prices_event([(10.0, "36")], t=0.0), job]
    first, second = compute_bills(events, {}).unreported
    assert second.usd == Decimal("0.005") + Decimal("0.15")
    assert second.rank_microseconds == 3 * 20 * MICRO
    assert (first.node, first.rank_microseconds) == (0, 3 * 40 * MICRO)
