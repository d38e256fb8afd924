"""The step sync: what all ranks conclude from their rows, and when a slowdown is reported."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from ebbflow.core.events import GuardAction
from ebbflow.training.errors import DivergenceError
from ebbflow.training.limits import Position, Stop
from ebbflow.training.step_sync import (
    PaceMonitor,
    Row,
    Slowdown,
    Slowest,
    StepSync,
    exchange,
    find_slowest,
)
from tests.support.rank_threads import call_on_ranks

STEP = {
    "step": 5.0,
    "cursor": 32.0,
    "loss_sum": 6.0,
    "weight": 3.0,
    "square_sum": 9.0,
    "flops": 1.0,
    "compute_seconds": 0.5,
    "data_seconds": 0.25,
    "stop": 0.0,
}

FIX = "fix: restart from the last commit, and give every rank the same configuration and code"

EVEN = [0.0, 0.0]


def row(**changes: float) -> Row:
    return Row(**(STEP | changes))


def sync_of(*changes: dict[str, float]) -> StepSync:
    return StepSync([row(**change) for change in changes])


def test_a_row_without_requests_requests_nothing() -> None:
    sync = sync_of({})
    assert sync.stop is Stop.NONE and not sync.save_due and sync.saving == [] and sync.renew == []
    assert sync.last_save == (0.0, math.inf) and sync.save_limit_seconds == 0.0
    assert sync.failed_save == 0 and sync.settled and sync.own_seconds == [0.0]
    assert sync.rows[0].weights_checksum == 0.0 and sync.non_finite == ""


def test_a_sync_without_rows_requests_nothing() -> None:
    sync = StepSync([])
    assert sync.stop is Stop.NONE and not sync.save_due and sync.saving == [] and sync.renew == []
    assert sync.failed_save == 0 and sync.settled and sync.save_limit_seconds == 0.0


def test_the_position_of_a_sync_is_the_one_before_its_step() -> None:
    assert sync_of({"step": 8.0, "cursor": 56.0}).at == Position(7, 56)


@pytest.mark.parametrize("name", ["stop", "save_due", "renew"])
@pytest.mark.parametrize("older_first", [True, False])
def test_a_merged_sync_has_the_requests_of_both_steps(name: str, older_first: bool) -> None:
    asked = sync_of({}, {name: 2.0})
    silent = sync_of({"loss_sum": 1.0}, {"loss_sum": 2.0})
    if older_first:
        older, newer = (asked, silent)
    else:
        older, newer = (silent, asked)
    merged = newer.merge(older)
    assert [getattr(row, name) for row in merged.rows] == [0.0, 2.0]
    assert [row.loss_sum for row in merged.rows] == [row.loss_sum for row in newer.rows]


def test_a_merged_sync_takes_only_requests_of_the_older_step() -> None:
    requests = {"stop", "save_due", "renew"}
    older = StepSync([Row(*[9.0] * len(Row._fields))])
    newer = StepSync([Row(*[1.0] * len(Row._fields))])
    (merged,) = newer.merge(older).rows
    assert {name for name, value in merged._asdict().items() if value == 9.0} == requests
    assert newer.merge(StepSync([])) is newer
    with pytest.raises(ValueError, match="argument"):
        newer.merge(StepSync([*older.rows, *older.rows]))


def test_loss_scale_and_norm_of_a_sync_are_those_of_the_whole_batch() -> None:
    sync = sync_of(
        {"loss_sum": 6.0, "weight": 3.0, "square_sum": 9.0},
        {"loss_sum": 4.0, "weight": 1.0, "square_sum": 16.0},
        {"loss_sum": 2.0, "weight": 4.0, "square_sum": 144.0},
    )
    assert sync.weight == 8.0
    assert sync.loss == 12.0 / 8.0
    assert sync.scale == 3 / 8.0
    assert sync.gradient_norm == pytest.approx(3 / 8.0 * 13.0, rel=1e-15)


def test_a_sync_stops_for_the_most_urgent_reason_of_any_rank() -> None:
    for order in ((0.0, 3.0, 1.0), (3.0, 1.0, 0.0), (0.0, 1.0, 3.0)):
        assert sync_of(*({"stop": stop} for stop in order)).stop is Stop.INTERRUPTED
    assert sync_of({}, {"stop": 1.0}).stop is Stop.DEADLINE


def test_rank_0_alone_decides_that_a_sync_saves() -> None:
    assert sync_of({"save_due": 1.0}, {}).save_due is True
    assert sync_of({}, {"save_due": 1.0}).save_due is False


def test_a_sync_names_the_ranks_that_save_or_run_out_of_memory() -> None:
    sync = sync_of({"saving": 1.0}, {"renew": 1.0}, {"saving": 1.0}, {"renew": 1.0})
    assert sync.saving == [0, 2] and sync.renew == [1, 3]


def test_a_sync_has_the_newest_failed_save() -> None:
    assert sync_of({"failed_save": 4.0}, {"failed_save": 8.0}, {}).failed_save == 8


def test_one_rank_with_unused_gradients_leaves_a_sync_unsettled() -> None:
    assert not sync_of({}, {"unsettled": 1.0}).settled
    assert not sync_of({"unsettled": 1.0}, {}).settled


def test_the_slowest_saver_and_the_shortest_time_limit_the_last_save() -> None:
    sync = sync_of(
        {"save_seconds": 5.0, "stop_seconds": 30.0, "save_limit_seconds": 90.0},
        {"save_seconds": 9.0, "stop_seconds": 40.0, "save_limit_seconds": 300.0},
        {"save_seconds": 7.0, "stop_seconds": 20.0, "save_limit_seconds": 120.0},
    )
    assert sync.last_save == (9.0, 20.0)
    assert sync.save_limit_seconds == 300.0


def test_the_step_takes_as_long_as_the_slowest_rank() -> None:
    sync = sync_of(
        {"compute_seconds": 0.5, "data_seconds": 0.25, "own_seconds": 0.3},
        {"compute_seconds": 0.75, "data_seconds": 0.5, "own_seconds": 0.6},
        {"compute_seconds": 0.125, "data_seconds": 0.75, "own_seconds": 0.1},
    )
    assert sync.step_seconds == 1.25
    assert sync.own_seconds == [0.3, 0.6, 0.1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (({}, {}), ""),
        (({}, {"loss_sum": math.nan}, {"loss_sum": math.inf}), "loss is not finite on rank 1, 2"),
        (
            ({"square_sum": math.nan}, {}, {"square_sum": math.inf}),
            "gradient is not finite on rank 0, 2, though every loss is",
        ),
        (({"square_sum": math.nan}, {"loss_sum": -math.inf}), "loss is not finite on rank 1"),
    ],
)
def test_a_sync_names_the_ranks_with_a_non_finite_loss_or_gradient(
    changes: Any, message: str
) -> None:
    assert sync_of(*changes).non_finite == message


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(5, 32), (6, 32)], "rank 1 at step 6, sample 32; the others at step 5, sample 32"),
        ([(5, 32), (5, 40)], "rank 1 at step 5, sample 40; the others at step 5, sample 32"),
        (
            [(5, 32), (6, 40), (6, 40)],
            "rank 0 at step 5, sample 32; the others at step 6, sample 40",
        ),
        (
            [(7, 1), (5, 2), (5, 2), (6, 3)],
            "rank 0 at step 7, sample 1; rank 3 at step 6, sample 3; the others at step 5, "
            "sample 2",
        ),
        (
            [(5, 2), (7, 1), (7, 1), (5, 2)],
            "rank 1 at step 7, sample 1; rank 2 at step 7, sample 1; the others at step 5, "
            "sample 2",
        ),
    ],
)
def test_a_sync_of_ranks_at_different_places_names_the_minority(
    places: list[tuple[int, int]], message: str
) -> None:
    sync = sync_of(*({"step": float(step), "cursor": float(cursor)} for step, cursor in places))
    with pytest.raises(DivergenceError) as caught:
        sync.check()
    assert str(caught.value) == f"ranks have gone apart: {message}; {FIX}"


@pytest.mark.parametrize("weights", [(0.0, 0.0), (1.0, -2.0)])
def test_a_sync_without_weight_is_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(DivergenceError) as caught:
        sync_of(*({"weight": weight} for weight in weights)).check()
    assert (
        str(caught.value)
        == f"step 5: the batch has weight {sum(weights):g}; there is nothing to average"
    )
    sync_of({"weight": 0.0}, {"weight": 1e-9}).check()


def test_an_exchange_gives_every_rank_the_rows_of_all_and_checks_them() -> None:
    def send(gang: Any) -> StepSync:
        return exchange(gang, row(loss_sum=float(gang.rank), stop_seconds=math.inf))

    expected = StepSync([row(loss_sum=0.0), row(loss_sum=1.0), row(loss_sum=2.0)])
    assert call_on_ranks(3, send) == [expected] * 3
    for error in call_on_ranks(2, lambda gang: exchange(gang, row(step=float(gang.rank)))):
        assert isinstance(error, DivergenceError)


@pytest.mark.parametrize(
    ("own_seconds", "slowest"),
    [
        ([0.4, 0.1, 0.3], Slowest(0, 0.4 / 0.2, 0.4 - 0.2)),
        ([0.1, 0.2, 0.3, 0.8], Slowest(3, 0.8 / 0.2, 0.8 - 0.2)),
        ([0.2, 0.5], Slowest(1, 2.5, 0.3)),
        ([0.7], Slowest(0, 1.0, 0.0)),
        ([0.5, 0.5], Slowest(0, 1.0, 0.0)),
        ([0.0, 3.0], Slowest(1, 3e9, 3.0)),
    ],
)
def test_the_slowest_rank_is_compared_with_the_median_of_the_others(
    own_seconds: list[float], slowest: Slowest
) -> None:
    found = find_slowest(own_seconds)
    assert found.rank == slowest.rank
    assert found[1:] == pytest.approx(slowest[1:], rel=1e-12)


def reported(monitor: PaceMonitor, steps: int, *step: Any) -> list[tuple[int, Slowdown]]:
    """Note equal steps, and return each reported slowdown with the number of its step, from 1."""
    found = []
    for number in range(1, steps + 1):
        found += [(number, slowdown) for slowdown in monitor.note(*step)]
    return found


@pytest.mark.parametrize(
    ("own_seconds", "data_seconds", "step_seconds", "action"),
    [
        ([1.0, 1.3], EVEN, 1.3, None),  # 1.3 times as long as the others
        ([1.0, 1.3125], EVEN, 1.3125, GuardAction.SLOW_RANK),
        ([1.0, 2.0], EVEN, 20.0, None),  # 5 % of the step
        ([1.0, 2.0], EVEN, 19.75, GuardAction.SLOW_RANK),
        ([0.001, 0.003], EVEN, 0.008, None),  # 2 ms
        ([0.001, 0.00325], EVEN, 0.008, GuardAction.SLOW_RANK),
        ([0.001, 0.003], EVEN, 0.0, None),  # a step without a duration has no share
        ([1.0, 1.0], [0.0, 0.15], 1.0, None),  # 15 % of the step
        ([1.0, 1.0], [0.0, 0.1875], 1.0, GuardAction.DATA_BOUND),
        ([0.001, 0.001], [0.0, 0.002], 0.004, None),  # 2 ms
        ([0.001, 0.001], [0.0, 0.00225], 0.004, GuardAction.DATA_BOUND),
    ],
)
def test_a_slowdown_is_reported_from_its_limits_on(
    own_seconds: list[float],
    data_seconds: list[float],
    step_seconds: float,
    action: GuardAction | None,
) -> None:
    found = reported(PaceMonitor(), 60, own_seconds, data_seconds, step_seconds)
    assert [(number, slowdown.action) for number, slowdown in found] == (
        [] if action is None else [(20, action)]
    )


def test_a_reported_slowdown_is_the_mean_of_twenty_steps() -> None:
    monitor = PaceMonitor()
    slowdowns = []
    numbers = range(1, 21)
    for number in numbers:
        slowdowns += monitor.note(
            [2.0, 3.0 + number, 2.0], [0.0, 1.0 + number, 0.0], 4.0, 0.25 * number
        )
    slow, bound = slowdowns
    lost_seconds = [1.0 + number for number in numbers]
    shares = [seconds / 4.0 for seconds in lost_seconds]
    prices = [3600 * 0.25 * number for number in numbers]
    mean_price = math.fsum(share * price for share, price in zip(shares, prices, strict=True)) / 20
    assert (slow.action, slow.rank) == (GuardAction.SLOW_RANK, 1)
    assert slow.share == pytest.approx(math.fsum(shares) / 20, rel=1e-12)
    assert slow.usd_per_hour == pytest.approx(mean_price, rel=1e-12)
    assert slow.ratio == pytest.approx(
        math.fsum((3.0 + number) / 2.0 for number in numbers) / 20, rel=1e-12
    )
    assert slow.seconds == pytest.approx(math.fsum(lost_seconds) / 20, rel=1e-12)
    assert (bound.action, bound.rank, bound.ratio, bound.seconds) == (
        GuardAction.DATA_BOUND,
        1,
        0.0,
        0.0,
    )
    assert (bound.share, bound.usd_per_hour) == (
        pytest.approx(slow.share),
        pytest.approx(mean_price),
    )


def test_a_step_without_a_duration_counts_as_a_nanosecond() -> None:
    ((_, slowdown),) = reported(PaceMonitor(), 20, [0.001, 0.005], EVEN, 0.0)
    assert slowdown.share == pytest.approx(0.004 / 1e-9)


def test_a_slowdown_and_a_sync_cannot_be_changed() -> None:
    ((_, slowdown),) = reported(PaceMonitor(), 20, [1.0, 2.0], EVEN, 2.0)
    for value in (slowdown, sync_of({})):
        with pytest.raises(FrozenInstanceError):
            value.rank = 1  # type: ignore[misc,union-attr]
    with pytest.raises(TypeError):
        Slowdown(*vars(slowdown).values())


def test_a_slowdown_without_prices_costs_nothing() -> None:
    ((_, slowdown),) = reported(PaceMonitor(), 20, [1.0, 2.0], EVEN, 2.0)
    assert slowdown.usd_per_hour == 0.0


def test_a_slowdown_is_reported_again_only_after_a_normal_step() -> None:
    monitor = PaceMonitor()
    slow = [1.0, 2.0]
    even = [1.0, 1.0]
    assert [number for number, _ in reported(monitor, 100, slow, EVEN, 2.0)] == [20]
    assert reported(monitor, 1, even, EVEN, 2.0) == []
    assert [number for number, _ in reported(monitor, 19, slow, EVEN, 2.0)] == []
    assert reported(monitor, 1, even, EVEN, 2.0) == []
    assert [number for number, _ in reported(monitor, 100, slow, EVEN, 2.0)] == [20]


def test_another_straggler_starts_a_new_count() -> None:
    monitor = PaceMonitor()
    first = [2.0, 1.0, 1.0]
    second = [1.0, 1.0, 2.0]
    assert reported(monitor, 19, first, EVEN, 2.0) == []
    assert reported(monitor, 19, second, EVEN, 2.0) == []
    ((number, slowdown),) = reported(monitor, 20, first, EVEN, 2.0)
    assert (number, slowdown.rank) == (20, 0)
    ((number, slowdown),) = reported(monitor, 30, second, EVEN, 2.0)
    assert (number, slowdown.rank) == (20, 2)


def test_ranks_may_take_turns_in_waiting_for_data() -> None:
    monitor = PaceMonitor()
    found = []
    for number in range(1, 21):
        if number % 2:
            waits = [0.5, 0.0]
        else:
            waits = [0.0, 0.5]
        found += [(number, slowdown.rank) for slowdown in monitor.note([1.0, 1.0], waits, 1.0)]
    assert found == [(20, 1)]


def test_the_progress_line_describes_all_current_slowdowns() -> None:
    monitor = PaceMonitor()
    reported(monitor, 19, [1.0, 2.0], [0.5, 0.0], 2.0)
    assert monitor.now == ""
    reported(monitor, 5, [1.0, 2.0], [0.5, 0.0], 2.0)
    slow = "rank 1 takes 2.0 times as long as the others: 1000 ms (50%) of each step"
    assert monitor.now == f"{slow}, rank 0 waits for data in 25% of the step"
    reported(monitor, 1, [1.0, 2.0], EVEN, 2.0)
    assert monitor.now == slow


@pytest.mark.parametrize(
    ("usd_per_hour", "price"),
    [(0.0, ""), (0.25, ", $0.2500 an hour"), (1.23456, ", $1.2346 an hour")],
)
def test_the_reason_of_a_slowdown_has_its_figures(usd_per_hour: float, price: str) -> None:
    shared: dict[str, Any] = {"rank": 3, "share": 0.125, "usd_per_hour": usd_per_hour}
    slow = Slowdown(action=GuardAction.SLOW_RANK, ratio=1.75, seconds=0.0415, **shared)
    assert (
        slow.reason
        == f"rank 3 takes 1.8 times as long as the others: 42 ms (12%) of each step{price}"
    )
    bound = Slowdown(action=GuardAction.DATA_BOUND, **shared)
    assert bound.reason == f"rank 3 waits for data in 12% of the step{price}"
    assert (bound.ratio, bound.seconds) == (0.0, 0.0)
