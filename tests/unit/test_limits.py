"""The limits of a rank (`training.limits`): what stops it, what a step costs, what it tells, and
how long it has.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.errors import Outcome
from ebbflow.core.terms import Fallback, Terms
from ebbflow.training import limits as limits_module
from ebbflow.training.launch.messages import NewTerms, OrderRecord, RankOrder
from ebbflow.training.limits import Limits, LoopResult, Position, Stop

NOW = 1_000_000.0

TERMS = Terms(usd_per_rank_second=0.25, budget_usd=100.0, reserve_usd=20.0)

RESERVE = Fallback(
    seconds=100.0, restart_seconds=0.0, restart_usd=0.0, step_seconds=2.0, usd=1.0, step_usd=0.5
)
ON_SPOT = Terms(
    usd_per_rank_second=0.25, deadline_utc=NOW + 120, step_seconds=1.0, fallback=RESERVE
)


class Clock:
    """The clocks of a rank, set by hand. It stands for the module `time`."""

    def __init__(self) -> None:
        self.utc = NOW
        self.at = 500.0
        self.slept: list[float] = []

    def time(self) -> float:
        return self.utc

    def monotonic(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds


class Elapsed:
    """Seconds since the start of an attempt."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(limits_module, "time", clock)
    return clock


def make_limits(terms: Terms | None, elapsed: Elapsed | None = None, **more: Any) -> Limits:
    return Limits(terms, world_size=2, elapsed_seconds=elapsed or Elapsed(), **more)


def take_steps(
    limits: Limits, elapsed: Elapsed, durations: list[float], *, steps_left: int = 0
) -> Stop:
    """Call `stop` after each of the durations. Return the last answer."""
    stop = Stop.NONE
    for seconds in durations:
        elapsed.seconds += seconds
        stop = limits.stop(steps_left)
    return stop


def test_a_position_counts_steps_and_samples() -> None:
    assert Position() == Position(step=0, cursor=0)
    assert Position(3, 40).next(16) == Position(4, 56)
    with pytest.raises(FrozenInstanceError):
        Position().step = 1  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        LoopResult(Outcome.COMPLETED, 1).step = 2  # type: ignore[misc]


def test_a_stop_has_an_outcome_and_the_more_urgent_one_is_larger() -> None:
    assert [stop.value for stop in Stop] == [0, 1, 2, 3]
    assert Stop.NONE < Stop.DEADLINE < Stop.BUDGET < Stop.INTERRUPTED
    assert Stop.DEADLINE.outcome is Outcome.DEADLINE
    assert Stop.BUDGET.outcome is Outcome.BUDGET
    assert Stop.INTERRUPTED.outcome is Outcome.INTERRUPTED


def test_an_attempt_has_spent_its_price_times_its_ranks_and_seconds_beyond_earlier_attempts() -> (
    None
):
    elapsed = Elapsed()
    limits = make_limits(replace(TERMS, spent_usd=3.0), elapsed)
    elapsed.seconds = 10.0
    assert limits.usd_per_second == 0.5
    assert limits.spent_usd == 3.0 + 0.25 * 2 * 10
    free = make_limits(None, elapsed)
    assert (free.usd_per_second, free.spent_usd, free.next_step_usd) == (0.0, 0.0, 0.0)


def test_new_terms_of_the_agent_count_from_their_time_on(tmp_path: Path, clock: Clock) -> None:
    elapsed = Elapsed()
    record = OrderRecord.create(tmp_path / "node-0.control")
    watched = replace(TERMS, price_look_seconds=10.0)
    limits = make_limits(watched, elapsed, control=record)
    elapsed.seconds = 20.0
    assert limits.spent_usd == 10.0
    # A second ago, $12 were spent, since the price had tripled 2 s before
    record.write_terms(NewTerms(terms=watched.at_price(0.75, spent_usd=12.0), at=clock.at - 1.0))
    assert (limits.spent_usd, limits.usd_per_second) == (13.5, 1.5)
    assert limits.terms is not None and limits.terms.reserve_usd == 60.0
    elapsed.seconds = 30.0
    assert limits.spent_usd == 28.5
    assert take_steps(limits, elapsed, [0.0, 1.0]) is Stop.NONE, "30 + 3 × 1.5 < 100 − 60"
    assert take_steps(limits, elapsed, [2.0]) is Stop.BUDGET, "33 + 3 × 3 > 100 − 60"


def test_the_next_step_costs_as_much_as_the_longest_recent_one() -> None:
    elapsed = Elapsed()
    limits = make_limits(replace(TERMS, step_seconds=8.0), elapsed)
    elapsed.seconds = 5.0
    limits.stop()
    assert limits.next_step_usd == 4.0, "as planned: no step was measured yet"
    take_steps(limits, elapsed, [6.0, 2.0])
    assert limits.next_step_usd == 3.0
    take_steps(limits, elapsed, [1.0] * 30)
    assert limits.next_step_usd == 3.0, "the longest of 32"
    take_steps(limits, elapsed, [1.0])
    assert limits.next_step_usd == 1.0, "forgotten after 32"


def test_a_rank_stops_when_a_step_would_use_up_what_is_spendable() -> None:
    # 80 of the $100 are spendable, and a step costs $4.
    for spent, stop in ((75.99, Stop.NONE), (76.0, Stop.BUDGET)):
        terms = replace(TERMS, step_seconds=8.0, spent_usd=spent)
        assert make_limits(terms).stop() is stop
        assert make_limits(replace(terms, budget_usd=None)).stop() is Stop.NONE


def test_a_rank_stops_before_its_deadline_with_time_for_a_last_save(clock: Clock) -> None:
    terms = Terms(usd_per_rank_second=0.0, deadline_utc=NOW + 100, reserve_seconds=30.0)
    clock.utc = NOW + 69
    assert make_limits(terms).stop() is Stop.NONE
    clock.utc = NOW + 70
    assert make_limits(terms).stop() is Stop.DEADLINE
    assert make_limits(replace(terms, deadline_utc=None)).stop() is Stop.NONE
    assert make_limits(None).stop() is Stop.NONE
    dear = replace(terms, budget_usd=0.0, usd_per_rank_second=1.0)
    assert make_limits(dear).stop() is Stop.BUDGET, "the more urgent reason"


def test_a_rank_leaves_spot_when_the_steps_after_this_one_need_the_reserve(clock: Clock) -> None:
    assert make_limits(ON_SPOT).stop(10) is Stop.NONE
    assert make_limits(ON_SPOT).stop(11) is Stop.INTERRUPTED
    late = replace(ON_SPOT, deadline_utc=NOW + 50)
    assert make_limits(late).stop(1) is Stop.INTERRUPTED
    assert make_limits(late).stop(0) is Stop.NONE, "the last step is worth no other machine"
    assert make_limits(late).stop() is Stop.NONE


def test_a_rank_on_spot_counts_what_it_has_spent_so_far() -> None:
    elapsed = Elapsed()
    terms = replace(ON_SPOT, deadline_utc=None, budget_usd=10.0, spent_usd=3.0)
    limits = make_limits(terms, elapsed)
    elapsed.seconds = 2.0  # $1 on Spot, and $6 for the rest
    assert limits.stop(10) is Stop.NONE
    assert limits.stop(11) is Stop.INTERRUPTED


def test_slow_steps_lengthen_the_rest_once_32_of_them_were_measured(clock: Clock) -> None:
    """The median counts: 10 steps of 2 s and 100 s fit into 120 s, at 3/2 of the planned step they
    do not.
    """
    for durations, stop in (
        ([1.5] * 31, Stop.NONE),
        ([1.5] * 32, Stop.INTERRUPTED),
        ([1.0] * 32, Stop.NONE),
        ([0.5] * 32, Stop.NONE),
        ([1.0] * 20 + [9.0] * 12, Stop.NONE),
        ([9.0] * 20 + [1.5] * 12 + [1.0] * 32, Stop.NONE),
    ):
        elapsed = Elapsed()
        limits = make_limits(ON_SPOT, elapsed)
        limits.stop()
        take_steps(limits, elapsed, durations[:-1])
        assert take_steps(limits, elapsed, durations[-1:], steps_left=10) is stop


def test_fast_steps_do_not_shorten_the_rest(clock: Clock) -> None:
    elapsed = Elapsed()
    limits = make_limits(ON_SPOT, elapsed)
    take_steps(limits, elapsed, [0.5] * 40)
    assert take_steps(limits, elapsed, [0.5], steps_left=11) is Stop.INTERRUPTED


def test_a_measured_step_of_a_plan_without_a_step_time_changes_nothing(clock: Clock) -> None:
    elapsed = Elapsed()
    limits = make_limits(replace(ON_SPOT, step_seconds=0.0), elapsed)
    assert take_steps(limits, elapsed, [9.0] * 40, steps_left=10) is Stop.NONE
    slow = make_limits(replace(ON_SPOT, step_seconds=0.5), elapsed)
    assert take_steps(slow, elapsed, [1.5] * 40, steps_left=3) is Stop.NONE
    assert take_steps(slow, elapsed, [1.5], steps_left=4) is Stop.INTERRUPTED, (
        "a planned half second counts too"
    )


def told(limits: Limits, stop: Stop = Stop.NONE) -> list[float]:
    return [news["threshold"] for news in limits.new_budget_thresholds(stop)]


def test_each_budget_threshold_is_reported_once_and_the_last_with_the_stop() -> None:
    elapsed = Elapsed()
    limits = make_limits(TERMS, elapsed)
    elapsed.seconds = 99.0
    assert told(limits) == []
    elapsed.seconds = 100.0
    assert limits.new_budget_thresholds(Stop.NONE) == [
        {"threshold": 0.5, "spent_usd": 50.0, "budget_usd": 100.0, "reserve_usd": 20.0}
    ]
    assert told(limits) == []
    elapsed.seconds = 170.0
    assert told(limits, Stop.DEADLINE) == [0.8], (
        "all that is spendable is spent, but not all ranks agreed to stop"
    )
    assert told(limits, Stop.BUDGET) == [1.0]
    assert told(limits, Stop.BUDGET) == []


def test_thresholds_reported_by_an_earlier_attempt_are_not_repeated() -> None:
    for last, fresh in ((0.0, [0.5, 0.8, 1.0]), (0.5, [0.8, 1.0]), (0.8, [1.0]), (1.0, [])):
        assert told(make_limits(replace(TERMS, last_notified_threshold=last)), Stop.BUDGET) == fresh
    assert told(make_limits(None), Stop.BUDGET) == []
    assert told(make_limits(replace(TERMS, budget_usd=None)), Stop.BUDGET) == []


def test_the_reason_of_a_stop_is_described_with_its_numbers(clock: Clock) -> None:
    limits = make_limits(replace(TERMS, spent_usd=79.0, step_seconds=4.0, deadline_utc=NOW - 5))
    assert limits.describe(Stop.BUDGET) == (
        "budget: $79.0000 spent of $100.0000, of which $20.0000 is kept in reserve (a "
        "step costs up to $2.0000); fix: run the job again with a larger cost.budget_usd"
    )
    assert limits.describe(Stop.DEADLINE) == (
        "deadline: now is +5 s from it; fix: run the job again with a later cost.deadline_hours"
    )
    assert limits.describe(Stop.NONE) == ""
    assert limits.describe(Stop.INTERRUPTED) == "asked to leave (SIGTERM)"
    without = make_limits(Terms(usd_per_rank_second=1.0))
    assert without.describe(Stop.BUDGET) == without.describe(Stop.DEADLINE) == ""
    free = make_limits(None)
    assert (
        free.describe(Stop.BUDGET) == free.describe(Stop.DEADLINE) == free.describe(Stop.NONE) == ""
    )


def test_a_rank_that_leaves_spot_reports_why_unless_it_was_preempted(clock: Clock) -> None:
    limits = make_limits(ON_SPOT)
    assert limits.stop(11) is Stop.INTERRUPTED
    assert limits.describe(Stop.INTERRUPTED).startswith(
        "leaves Spot for on-demand: 0.03 h are left"
    )
    limits.request_drain(5.0)
    assert limits.describe(Stop.INTERRUPTED) == "asked to leave (SIGTERM)"


def test_a_requested_drain_stops_at_once_and_the_earliest_end_counts(clock: Clock) -> None:
    limits = make_limits(replace(TERMS, spent_usd=99.0))
    assert limits.stop_seconds == math.inf
    assert not limits.drain_requested
    limits.request_drain(30.0)
    assert limits.stop_seconds == 30.0
    limits.request_drain(60.0)
    assert limits.stop_seconds == 30.0
    limits.request_drain(20.0)
    clock.at += 5
    assert limits.stop_seconds == 15.0
    assert limits.stop() is Stop.INTERRUPTED, "more urgent than the budget"
    clock.at += 15.5
    assert limits.stop_seconds == 0.0


@pytest.fixture
def sigterm_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_requests_a_drain_that_ends_two_seconds_before_the_kill(
    clock: Clock, sigterm_handler: None
) -> None:
    limits = make_limits(None, stop_seconds=30.0)
    limits.watch_signals()
    signal.raise_signal(signal.SIGTERM)
    assert limits.drain_requested
    assert limits.stop_seconds == 28.0
    assert limits.stop() is Stop.INTERRUPTED


def test_an_agents_order_to_leave_ends_two_seconds_before_its_time(
    clock: Clock, tmp_path: Path
) -> None:
    control = OrderRecord.create(tmp_path / "orders")
    limits = make_limits(None, control=control)
    assert not limits.drain_requested
    assert limits.stop() is Stop.NONE
    control.write(RankOrder(seconds=40.0, cause="rehearsed notice", node=3))
    clock.at = control.leave_at - 10
    assert limits.stop() is Stop.INTERRUPTED
    assert limits.stop_seconds == pytest.approx(8.0)
    assert limits.describe(Stop.INTERRUPTED) == "asked to leave (rehearsed notice to node 3)"
    limits.request_drain(5.0)
    assert limits.drain_requested
    assert limits.stop_seconds == pytest.approx(5.0), "the earlier of both"


def test_each_order_to_save_is_answered_once(tmp_path: Path) -> None:
    control = OrderRecord.create(tmp_path / "orders")
    limits = make_limits(None, control=control)
    assert not limits.save_wanted()
    for _ in range(2):
        control.write(RankOrder(seconds=math.inf, cause="rebalance recommendation", node=0))
        assert limits.save_wanted()
        assert not limits.save_wanted()
    late = make_limits(None, control=control)
    assert late.save_wanted(), "an order that was there before"
    assert not limits.drain_requested, "an order to save is none to leave"
    assert not make_limits(None).save_wanted()


def test_a_wait_for_a_drain_ends_with_the_drain_or_its_time(clock: Clock, tmp_path: Path) -> None:
    make_limits(None).wait_for_drain(0.0)
    assert clock.slept == []
    make_limits(None).wait_for_drain(0.055)
    assert clock.slept == [0.01] * 6
    clock.slept.clear()
    asked = make_limits(None)
    asked.request_drain(9.0)
    asked.wait_for_drain(0.05)
    assert clock.slept == []
