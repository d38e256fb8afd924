"""When to save, with a clock by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ebbflow.core.config.schema import CheckpointConfig
from ebbflow.core.reliability import (
    GammaHazard,
    PlannedHazard,
    daly_interval_seconds,
    expected_loss,
)
from ebbflow.training.save_controller import SaveSchedule, prior_hazard


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def schedule_of(clock: Clock, hazard: GammaHazard | None = None, **settings: Any) -> SaveSchedule:
    return SaveSchedule(
        CheckpointConfig(**settings), hazard or GammaHazard.from_prior(0.5, weight=1e9), now=clock
    )


def test_steps_and_seconds() -> None:
    clock = Clock()
    by_steps = schedule_of(clock, interval_steps=3)
    assert [step for step in range(1, 8) if by_steps.due(step)] == [3, 6]
    by_seconds = schedule_of(clock, interval="seconds", interval_seconds=10)
    assert not by_seconds.due(1)
    clock.seconds += 10
    assert by_seconds.due(2)
    by_seconds.saved(2, 0.5)
    assert not by_seconds.due(3)


def test_auto_follows_what_a_save_costs_and_is_never_shorter_than_an_upload() -> None:
    clock = Clock()
    save_schedule = schedule_of(clock, interval="auto", interval_steps=4)
    for step in range(1, 5):
        assert save_schedule.due(step) is (step == 4), (
            "the first save comes early: nothing is known before it"
        )
        save_schedule.record_step(1.0, busy=False)
    save_schedule.saved(4, 2.0)
    save_schedule.committed(4, 5.0)
    save_schedule.committed(4, 500.0)  # heard of before
    assert save_schedule.choice().seconds == pytest.approx(daly_interval_seconds(2.0, 0.5))
    for _ in range(10):
        save_schedule.record_step(1.5, busy=True)
    choice = save_schedule.choice()
    assert choice.slow_down_seconds == pytest.approx(10 * 0.5), (
        "ten steps of a save, half a second each"
    )
    assert choice.seconds == pytest.approx(daly_interval_seconds(7.0, 0.5))
    assert 0 < choice.predicted_loss < 0.1
    clock.seconds += choice.seconds - 1
    assert not save_schedule.due(15)
    clock.seconds += 2
    assert save_schedule.due(16)
    save_schedule.saved(16, 2.0)
    save_schedule.committed(16, 3000.0)
    assert save_schedule.choice().seconds == 3000.0


def test_money_is_at_risk_since_the_state_that_became_a_commit() -> None:
    clock = Clock()
    save_schedule = schedule_of(clock)
    clock.seconds += 30
    assert save_schedule.seconds_at_risk == 30
    save_schedule.saved(1, 2.0)
    clock.seconds += 5
    assert save_schedule.seconds_at_risk == 35, "not yet durable"
    save_schedule.committed(1, 7.0)
    assert save_schedule.seconds_at_risk == 7


def test_the_jobs_measurements_correct_the_save_schedule() -> None:
    hazard = prior_hazard(2.0, interruptions=3)
    save_schedule = SaveSchedule(CheckpointConfig(), hazard, now=Clock())
    assert save_schedule.choice().hazard_per_hour == pytest.approx(hazard.per_hour)
    assert hazard.per_hour > 2.0
    save_schedule.remember(3600 * 1.5)
    assert save_schedule.choice().hazard_per_hour == pytest.approx(
        hazard.seen(0, 1.5).per_hour, rel=1e-6
    )
    assert save_schedule.choice().hazard_per_hour == pytest.approx(2.0, rel=0.1), (
        "three in an hour and a half"
    )
    assert save_schedule.exposed_seconds == 3600 * 1.5
    assert 0 < prior_hazard(None, interruptions=0).per_hour < 0.02, "no plan: seldom, but not never"
    assert prior_hazard(0.0, interruptions=0) == prior_hazard(None, interruptions=0)


@pytest.mark.parametrize(
    ("settings", "edge"),
    [
        ({"interval": "seconds", "interval_seconds": 10}, 10.0),
        ({"interval": "auto", "interval_steps": 1000}, 60.0),  # the first save
    ],
)
def test_a_schedule_is_due_from_its_interval_on(settings: dict[str, Any], edge: float) -> None:
    clock = Clock()
    schedule = schedule_of(clock, **settings)
    clock.seconds += edge - 2**-10
    assert not schedule.due(1)
    clock.seconds += 2**-10
    assert schedule.due(1)


def test_a_first_save_at_a_number_of_steps_comes_no_later_than_the_measured_ones() -> None:
    schedule = schedule_of(Clock(), interval="auto", interval_steps=3)
    due = []
    for step in range(1, 5):
        due.append(schedule.due(step))
        schedule.record_step(1.0, busy=False)
    assert due == [False, False, True, True]


def test_an_automatic_schedule_is_due_once_its_interval_has_passed() -> None:
    clock = Clock()
    schedule = schedule_of(clock, interval="auto")
    schedule.saved(1, 0.0)
    schedule.committed(1, 512.0)  # longer than the optimal interval of free saves
    assert schedule.choice().seconds == 512.0
    clock.seconds += 512.0 - 2**-10
    assert not schedule.due(2)
    clock.seconds += 2**-10
    assert schedule.due(2)


def test_an_automatic_interval_is_at_most_an_hour() -> None:
    schedule = schedule_of(Clock(), GammaHazard.from_prior(1e-9), interval="auto")
    schedule.saved(1, 50.0)
    assert schedule.choice().seconds == 3600.0


def test_the_cost_of_a_save_is_the_median_stall_of_the_last_eight() -> None:
    schedule = schedule_of(Clock())
    assert schedule.choice().stall_seconds == schedule.choice().upload_seconds == 0.0
    schedule.saved(1, 100.0)
    schedule.committed(1, 900.0)
    for step, seconds in enumerate((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), start=2):
        schedule.saved(step, seconds)
        schedule.committed(step, 10.0 * seconds)
    assert schedule.choice().stall_seconds == 4.5
    assert schedule.choice().upload_seconds == 900.0
    schedule.saved(9, 7.0)
    schedule.committed(9, 70.0)
    assert schedule.choice().stall_seconds == 4.5, "the first save is forgotten"
    assert schedule.choice().upload_seconds == 80.0


@pytest.mark.parametrize("last_is_busy", [True, False])
def test_the_slowdown_of_a_save_is_measured_once_three_steps_of_each_kind_are_known(
    last_is_busy: bool,
) -> None:
    schedule = schedule_of(Clock())
    schedule.saved(1, 0.0)
    schedule.saved(2, 0.0)
    seconds_of = {False: [1.0, 2.0, 3.0], True: [4.0, 5.0, 6.0]}
    last_seconds = seconds_of[last_is_busy].pop()
    for busy, durations in seconds_of.items():
        for seconds in durations:
            schedule.record_step(seconds, busy=busy)
            assert schedule.choice().slow_down_seconds == 0.0
    schedule.record_step(last_seconds, busy=last_is_busy)
    assert schedule.choice().slow_down_seconds == (5.0 - 2.0) * 3 / 2, (
        "three busy steps of two saves"
    )


def test_steps_without_a_save_have_no_slowdown() -> None:
    schedule = schedule_of(Clock())
    for _ in range(3):
        schedule.record_step(1.0, busy=False)
        schedule.record_step(2.0, busy=True)
    assert schedule.choice().slow_down_seconds == 0.0
    faster = schedule_of(Clock())
    faster.saved(1, 0.0)
    for _ in range(3):
        faster.record_step(2.0, busy=False)
        faster.record_step(1.0, busy=True)
    assert faster.choice().slow_down_seconds == 0.0, "an upload makes no step faster"


def test_the_slowdown_forgets_all_but_the_last_64_steps() -> None:
    schedule = schedule_of(Clock())
    schedule.saved(1, 0.0)
    for _ in range(65):
        schedule.record_step(9.0, busy=False)
        schedule.record_step(99.0, busy=True)
    for _ in range(32):
        schedule.record_step(1.0, busy=False)
        schedule.record_step(11.0, busy=True)
    assert schedule.choice().slow_down_seconds == (55.0 - 5.0) * 97
    schedule.record_step(1.0, busy=False)
    schedule.record_step(11.0, busy=True)
    assert schedule.choice().slow_down_seconds == (11.0 - 1.0) * 98


@pytest.mark.parametrize("interval", ["auto", "seconds"])
def test_the_predicted_loss_is_that_of_the_interval_in_use(interval: str) -> None:
    """With "auto" it is the optimal interval; else it is the mean interval of the saves so far."""
    clock = Clock()
    schedule = schedule_of(clock, interval=interval)
    optimum = daly_interval_seconds(0.0, 0.5)
    assert schedule.choice().predicted_loss == pytest.approx(
        expected_loss(max(optimum, 1e-3), 0.0, 0.5)
    )
    for step in (1, 2):
        clock.seconds += 300.0
        schedule.saved(step, 3.0)
        schedule.committed(step, 20.0)
    clock.seconds += 500.0
    for _ in range(3):
        schedule.record_step(1.0, busy=False)
        schedule.record_step(2.0, busy=True)
    cost = 3.0 + 1.0 * 3 / 2
    if interval == "auto":
        used = daly_interval_seconds(cost, 0.5)
    else:
        used = 300.0
    choice = schedule.choice()
    assert choice.seconds == pytest.approx(daly_interval_seconds(cost, 0.5), rel=1e-6)
    assert choice.predicted_loss == pytest.approx(
        expected_loss(used, cost, 0.5, exposed_seconds=20.0), rel=1e-6
    )


def test_the_predicted_loss_of_saves_without_a_pause_is_that_of_a_millisecond() -> None:
    schedule = schedule_of(Clock())
    schedule.saved(1, 0.001)
    assert schedule.choice().predicted_loss == pytest.approx(0.5, rel=1e-6)


def test_the_hazard_falls_while_nothing_happens() -> None:
    clock = Clock()
    schedule = SaveSchedule(CheckpointConfig(), GammaHazard.from_prior(2.0), now=clock)
    assert schedule.exposed_seconds == 0.0
    schedule.remember(3600.0)
    assert schedule.exposed_seconds == 3600.0
    clock.seconds += 1800.0
    assert schedule.choice().hazard_per_hour == pytest.approx(1 / (0.5 + 1.0 + 0.5))
    assert schedule.exposed_seconds == 3600.0 + 1800.0


def test_a_commit_of_an_unknown_save_leaves_the_time_at_risk() -> None:
    clock = Clock()
    schedule = schedule_of(clock)
    clock.seconds += 30.0
    schedule.committed(7, 2.0)
    assert schedule.seconds_at_risk == 30.0 and schedule.choice().upload_seconds == 2.0


def test_the_prior_hazard_is_at_least_one_a_week() -> None:
    weekly = 1 / (24 * 7)
    assert prior_hazard(None, interruptions=0) == PlannedHazard(weekly)
    assert prior_hazard(weekly / 2, interruptions=2) == PlannedHazard(weekly, interruptions=2)
    assert prior_hazard(2 * weekly, interruptions=0) == PlannedHazard(2 * weekly)
