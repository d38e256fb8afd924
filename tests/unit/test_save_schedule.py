"""When to save, with a clock by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ebbflow.infra.config.schema import CheckpointConfig
from ebbflow.infra.reliability import GammaHazard, daly_interval_seconds
from ebbflow.training.save_controller import SaveSchedule, prior_hazard


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def schedule_of(clock: Clock, hazard: GammaHazard | None = None, **settings: Any) -> SaveSchedule:
    return SaveSchedule(CheckpointConfig(**settings), hazard or GammaHazard.from_prior(0.5, weight=1e9), now=clock)


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
        assert save_schedule.due(step) is (step == 4), "the first save comes early: nothing is known before it"
        save_schedule.record_step(1.0, busy=False)
    save_schedule.saved(4, 2.0)
    save_schedule.committed(4, 5.0)
    save_schedule.committed(4, 500.0)  # heard of before
    assert save_schedule.choice().seconds == pytest.approx(daly_interval_seconds(2.0, 0.5))
    for _ in range(10):
        save_schedule.record_step(1.5, busy=True)
    choice = save_schedule.choice()
    assert choice.slow_down_seconds == pytest.approx(10 * 0.5), "ten steps of a save, half a second each"
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


def test_what_the_job_has_lived_through_corrects_the_plan() -> None:
    hazard = prior_hazard(2.0, interruptions=3)
    save_schedule = SaveSchedule(CheckpointConfig(), hazard, now=Clock())
    assert save_schedule.choice().hazard_per_hour == pytest.approx(hazard.per_hour)
    assert hazard.per_hour > 2.0
    save_schedule.remember(3600 * 1.5)
    assert save_schedule.choice().hazard_per_hour == pytest.approx(hazard.seen(0, 1.5).per_hour, rel=1e-6)
    assert save_schedule.choice().hazard_per_hour == pytest.approx(2.0, rel=0.1), "three in an hour and a half"
    assert save_schedule.exposed_seconds == 3600 * 1.5
    assert 0 < prior_hazard(None, interruptions=0).per_hour < 0.02, "no plan: seldom, but not never"
    assert prior_hazard(0.0, interruptions=0) == prior_hazard(None, interruptions=0)
