"""Spot by a trace, on a virtual clock: the deadline is kept, and on-demand is taken only when slack
runs out.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.core.events import Event
from ebbflow.cost.capacity import choose_placement, read_attempts
from ebbflow.cost.ledger.instances import SCALE_DOWN_SECONDS
from tests.support.capacity import BOTH, batch_config, planned
from tests.support.timelines import WALL
from tests.support.virtual_batch import BEGAN_UTC, HOUR, Course, VirtualBatch

DEADLINE = 8.0
CONFIG = batch_config(f"cost.deadline_hours={DEADLINE}", "batch.runnable_minutes=20")
CASE = planned(CONFIG, WALL).ranked[0].case
# Made up: spells of capacity and of none, alternately, 195 s each, short ones among long ones as in
# recorded zones.
MIXED = (14, 3, 1, 2, 29, 41, 2, 1, 37, 60)


def spells(lengths: tuple[int, ...], *, first: bool = True) -> list[bool]:
    hours = []
    for number, length in enumerate(lengths):
        hours += [bool(number % 2) is not first for _ in range(length)]
    return hours


def assert_on_demand_only_at_the_end(course: Course) -> None:
    """Whenever on-demand was taken, the slack did not bear another start of Spot with all that must
    be in reserve.
    """
    for at, placement, work_hours in course.decisions:
        case = CASE
        slack = DEADLINE - at / HOUR - work_hours
        save = CONFIG.checkpoint.deadline_seconds / HOUR
        undone = CONFIG.survival.hang_floor_seconds / HOUR
        needed = 3 * case.fixed_lost_hours + 20 / 60 + case.interval_hours + undone + save
        if placement.market == "on_demand":
            assert slack < needed + 5 / 60 + 0.02, (
                f"{slack:.2f} h of slack at {at / HOUR:.2f} h, {placement.reason}"
            )
        else:
            assert slack >= needed - 0.01, "a start of Spot that could endanger the deadline"
            assert placement.start_by_utc is not None
            by = (placement.start_by_utc - BEGAN_UTC) / HOUR
            assert by - at / HOUR >= placement.runnable_seconds / HOUR - 0.01
            after = 20 / 60 + case.fixed_lost_hours + work_hours
            assert by + after <= DEADLINE, (
                "a container that is never made there leaves time for one on demand"
            )


@pytest.mark.parametrize(
    ("up", "markets"),
    [
        ([True], {"spot"}),
        ([False], {"spot", "on_demand"}),
        (spells(MIXED), {"spot"}),
        (spells((10, 500)), {"spot", "on_demand"}),
        (spells((1, 1) * 200), {"spot", "on_demand"}),
        (spells((60, 20), first=False), {"spot"}),
    ],
    ids=["always", "never", "mixed", "lost for good", "flapping", "late"],
)
def test_spot_while_slack_lasts(up: list[bool], markets: set[str]) -> None:
    course = VirtualBatch(up).run(CONFIG)
    assert course.finished is not None and course.finished <= DEADLINE * HOUR
    assert_on_demand_only_at_the_end(course)
    assert set(course.markets) == markets
    assert course.markets == sorted(course.markets, reverse=True), "on demand it goes on to the end"
    alone = planned(CONFIG, WALL)
    usual = next(candidate for candidate in alone.ranked if candidate.market == "on_demand")
    if markets == {"spot"}:
        assert course.usd < 0.7 * usual.expected_usd


def test_without_capacity_waiting_costs_nothing_and_the_last_moment_is_late() -> None:
    course = VirtualBatch([False]).run(CONFIG)
    at, last, work_hours = course.decisions[-1]
    assert last.market == "on_demand" and course.markets.count("on_demand") == 1
    assert at / HOUR > DEADLINE - work_hours - 0.7, "not before slack ran out"
    paid_hours = CASE.fixed_lost_hours + work_hours + SCALE_DOWN_SECONDS / 3600
    assert course.usd == pytest.approx(paid_hours * last.price.node_usd_float)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.booleans(), st.integers(0, 1000))
def test_whatever_the_trace_the_deadline_is_kept(
    lengths: list[int], first: bool, seed: int
) -> None:
    course = VirtualBatch(spells(tuple(lengths), first=first), seed=seed).run(CONFIG)
    assert course.finished is not None and course.finished <= DEADLINE * HOUR + 1e-6
    assert_on_demand_only_at_the_end(course)


def test_another_process_decides_alike() -> None:
    """All that a decision knows is in the events: read again, in any order, each decision is made
    again as it was.
    """
    course = VirtualBatch(spells(MIXED)).run(CONFIG)
    assert len(course.decisions) > 2
    whole = course.decisions[0][2]
    spent = course.spent_before
    for number, (at, placement, work_hours) in enumerate(course.decisions):
        events = [
            Event.from_json(event.to_json()) for event in reversed(course.log.events[: 2 * number])
        ]
        history = read_attempts(events)
        assert len(history.attempts) == number
        plan = planned(
            CONFIG, WALL + at, share_done=(whole - work_hours) / whole, spent_usd=spent[number]
        )
        again = choose_placement(CONFIG, plan=plan, history=history, queues=BOTH, now_utc=WALL + at)
        assert again == placement
