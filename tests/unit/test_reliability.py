"""How often to save, as math: against numbers by hand, and against a simulation of interruptions."""

from __future__ import annotations

import math
import random

import pytest

from ebbflow.infra.reliability import (
    GammaHazard,
    PlannedHazard,
    daly_interval_seconds,
    expected_loss,
)


def time_lost(interval: float, save: float, mean: float, *, work: float, seed: int) -> float:
    """Share of the time not spent on `work` seconds of training: saves, and what each interruption takes back."""
    chance = random.Random(seed)
    clock, done, saved, next_interruption = 0.0, 0.0, 0.0, chance.expovariate(1 / mean)
    while saved < work:
        ready = clock + interval + save
        if ready <= next_interruption:
            clock, done = ready, done + interval
            saved = done
        else:
            clock, done = next_interruption, saved
            next_interruption = clock + chance.expovariate(1 / mean)
    return 1.0 - saved / clock


def test_daly_is_young_for_cheap_saves_and_shorter_for_dear_ones() -> None:
    cheap = math.sqrt(2 * 0.01 * 7200)  # Young: √(2 · save · mean time between interruptions)
    assert daly_interval_seconds(0.01, 0.5) == pytest.approx(cheap, rel=2e-3)
    # δ = 600 s, M = 7200 s: √(2·600·7200) · (1 + ⅓·√(1/24) + ⅑·1/24) − 600
    by_hand = math.sqrt(8_640_000) * (1 + math.sqrt(1 / 24) / 3 + 1 / 216) - 600
    assert daly_interval_seconds(600, 0.5) == pytest.approx(by_hand)
    assert daly_interval_seconds(20_000, 0.5) == 7200, "a save longer than twice the mean: one try per interruption"
    assert daly_interval_seconds(1, 0) == math.inf
    with pytest.raises(ValueError, match="must not be negative"):
        daly_interval_seconds(-1, 0.5)


@pytest.mark.parametrize(("save", "mean"), [(1.0, 7200.0), (300.0, 3600.0)])
def test_no_other_interval_loses_less_in_a_simulation(save: float, mean: float) -> None:
    best = daly_interval_seconds(save, 3600 / mean)

    def lost(interval: float) -> float:
        return sum(time_lost(interval, save, mean, work=200 * mean, seed=seed) for seed in range(4)) / 4

    at_best = lost(best)
    assert at_best < lost(best / 3) and at_best < lost(best * 3)
    assert expected_loss(best, save, 3600 / mean) == pytest.approx(at_best, rel=0.15)


def test_the_hazard_moves_from_the_plan_to_what_was_seen() -> None:
    belief = GammaHazard.from_prior(0.5)
    assert belief.per_hour == pytest.approx(0.5) and belief.shape == 1.0
    assert belief.seen(0, 8).per_hour == pytest.approx(0.1), "eight quiet hours: 1 in 2 + 8"
    chance, hours, seen = random.Random(1), 0.0, 0
    while seen < 300:
        hours, seen = hours + chance.expovariate(3.0), seen + 1
    assert belief.seen(seen, hours).per_hour == pytest.approx(3.0, rel=0.15)
    assert belief.seen(seen, hours).shape ** -0.5 < 0.06
    with pytest.raises(ValueError, match="must be positive"):
        GammaHazard.from_prior(0.0)


@pytest.mark.parametrize("wrong", [1 / 8, 1.0, 8.0])
def test_a_plan_is_kept_while_it_may_be_right_and_let_go_of_when_it_is_not(wrong: float) -> None:
    """Against the posterior over a fine grid of rates, with the mixture's own density as its prior."""
    actual, planned = 0.5, 0.5 * wrong
    plan, one = PlannedHazard(planned), GammaHazard.from_prior(planned)
    guesses = ((0.5, 1.0, 8.0), (0.125, 0.1, 2.0), (0.125, 1 / 3, 2.0), (0.125, 3.0, 2.0), (0.125, 10.0, 2.0))
    rates = [planned * 1.01**power for power in range(-1500, 800)]

    def density(rate: float) -> float:
        scales = ((share, worth, worth / (factor * planned)) for share, factor, worth in guesses)
        return sum(q * b**a * rate**a / math.gamma(a) * math.exp(-b * rate) for q, a, b in scales)

    weights = [density(rate) * rate**5 * math.exp(-rate * 10) for rate in rates]
    expected = sum(w * rate for w, rate in zip(weights, rates, strict=True)) / sum(weights)
    assert plan.seen(5, 10).per_hour == pytest.approx(expected, rel=1e-3)
    ours, theirs = (abs(math.log(belief.seen(5, 10).per_hour / actual)) for belief in (plan, one))
    assert ours < 0.2, "five in ten hours"
    assert wrong > 1 / 8 or ours < theirs / 2, "quiet hours that a plan promises weigh less"
    with pytest.raises(ValueError, match="must be positive"):
        PlannedHazard(0.0)
