"""How often to save, as math: against numbers by hand, and against a simulation of interruptions."""

from __future__ import annotations

import math
import random
from dataclasses import FrozenInstanceError

import pytest

from ebbflow.core.reliability import (
    GammaHazard,
    PlannedHazard,
    daly_interval_seconds,
    expected_loss,
)

# The plan is right with probability 1/2 (as if 8 interruptions were seen), or wrong by 3 or 10 (as
# if 2 were seen).
GUESSES = ((1 / 2, 1, 8), (1 / 8, 1 / 10, 2), (1 / 8, 1 / 3, 2), (1 / 8, 3, 2), (1 / 8, 10, 2))


def time_lost(interval: float, save: float, mean: float, *, work: float, seed: int) -> float:
    """Share of the time not spent on `work` seconds of training: saves, and what each interruption
    takes back.
    """
    chance = random.Random(seed)
    clock = 0.0
    done = 0.0
    saved = 0.0
    next_interruption = chance.expovariate(1 / mean)
    while saved < work:
        ready = clock + interval + save
        if ready <= next_interruption:
            clock = ready
            done = done + interval
            saved = done
        else:
            clock = next_interruption
            done = saved
            next_interruption = clock + chance.expovariate(1 / mean)
    return 1.0 - saved / clock


def test_daly_is_young_for_cheap_saves_and_shorter_for_dear_ones() -> None:
    cheap = math.sqrt(2 * 0.01 * 7200)  # Young: √(2 · save · mean time between interruptions)
    assert daly_interval_seconds(0.01, 0.5) == pytest.approx(cheap, rel=2e-3)
    # δ = 600 s, M = 7200 s: √(2·600·7200) · (1 + ⅓·√(1/24) + ⅑·1/24) − 600
    by_hand = math.sqrt(8_640_000) * (1 + math.sqrt(1 / 24) / 3 + 1 / 216) - 600
    assert daly_interval_seconds(600, 0.5) == pytest.approx(by_hand)
    assert daly_interval_seconds(20_000, 0.5) == 7200, (
        "a save longer than twice the mean: one try per interruption"
    )
    assert daly_interval_seconds(1, 0) == math.inf
    with pytest.raises(ValueError, match="must not be negative"):
        daly_interval_seconds(-1, 0.5)


@pytest.mark.parametrize(("save", "mean"), [(1.0, 7200.0), (300.0, 3600.0)])
def test_no_other_interval_loses_less_in_a_simulation(save: float, mean: float) -> None:
    best = daly_interval_seconds(save, 3600 / mean)

    def lost(interval: float) -> float:
        return (
            sum(time_lost(interval, save, mean, work=200 * mean, seed=seed) for seed in range(4))
            / 4
        )

    at_best = lost(best)
    assert at_best < lost(best / 3) and at_best < lost(best * 3)
    assert expected_loss(best, save, 3600 / mean) == pytest.approx(at_best, rel=0.15)


def test_the_hazard_moves_from_the_plan_to_what_was_seen() -> None:
    belief = GammaHazard.from_prior(0.5)
    assert belief.per_hour == pytest.approx(0.5) and belief.shape == 1.0
    assert belief.seen(0, 8).per_hour == pytest.approx(0.1), "eight quiet hours: 1 in 2 + 8"
    chance = random.Random(1)
    hours = 0.0
    seen = 0
    while seen < 300:
        hours = hours + chance.expovariate(3.0)
        seen = seen + 1
    assert belief.seen(seen, hours).per_hour == pytest.approx(3.0, rel=0.15)
    assert belief.seen(seen, hours).shape ** -0.5 < 0.06
    with pytest.raises(ValueError, match="must be positive"):
        GammaHazard.from_prior(0.0)


@pytest.mark.parametrize("wrong", [1 / 8, 1.0, 8.0])
def test_a_plan_is_kept_while_it_may_be_right_and_let_go_of_when_it_is_not(wrong: float) -> None:
    """Against the posterior over a fine grid of rates, with the mixture's own density as its prior."""
    actual = 0.5
    planned = 0.5 * wrong
    plan = PlannedHazard(planned)
    one = GammaHazard.from_prior(planned)
    guesses = (
        (0.5, 1.0, 8.0),
        (0.125, 0.1, 2.0),
        (0.125, 1 / 3, 2.0),
        (0.125, 3.0, 2.0),
        (0.125, 10.0, 2.0),
    )
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


@pytest.mark.parametrize(
    ("save", "hazard", "seconds"),
    [
        # √(2δM) · (1 + ⅓·√(δ/2M) + ⅑·δ/2M) − δ with M = 3600 s / hazard
        (
            450.0,
            0.5,
            math.sqrt(2 * 450 * 7200) * (1 + math.sqrt(450 / 14_400) / 3 + 450 / 14_400 / 9) - 450,
        ),
        (
            450.0,
            2.0,
            math.sqrt(2 * 450 * 1800) * (1 + math.sqrt(450 / 3600) / 3 + 450 / 3600 / 9) - 450,
        ),
        (0.0, 2.0, 0.0),
        # a save that takes twice the mean, and almost
        (7200.0, 1.0, 3600.0),
        (
            7199.0,
            1.0,
            math.sqrt(2 * 7199 * 3600) * (1 + math.sqrt(7199 / 7200) / 3 + 7199 / 7200 / 9) - 7199,
        ),
        (7201.0, 1.0, 3600.0),
        (0.0, 0.0, math.inf),
    ],
)
def test_dalys_interval_is_equation_37_up_to_a_save_of_twice_the_mean(
    save: float, hazard: float, seconds: float
) -> None:
    assert daly_interval_seconds(save, hazard) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("values", "loss"),
    [
        ((900.0, 100.0, 0.5, 0.0), 100 / 1000 + 450 * 0.5 / 3600),
        ((900.0, 100.0, 0.5, 90.0), 100 / 1000 + 540 * 0.5 / 3600),
        ((900.0, 100.0, 1.0, 0.0), 100 / 1000 + 450 / 3600),
        ((1900.0, 100.0, 0.5, 0.0), 100 / 2000 + 950 * 0.5 / 3600),
        ((900.0, 300.0, 0.5, 0.0), 300 / 1200 + 450 * 0.5 / 3600),
        ((900.0, 0.0, 0.0, 90.0), 0.0),
        ((900.0, 100.0, 7.2, 0.0), 1.0),
        ((900.0, 100.0, 20.0, 0.0), 1.0),
        ((900.0, 100.0, 7.19, 0.0), 0.1 + 450 * 7.19 / 3600),
        ((0.5, 0.0, 1.0, 0.0), 0.25 / 3600),
    ],
)
def test_the_expected_loss_is_a_save_per_interval_and_half_an_interval_per_interruption(
    values: tuple[float, float, float, float], loss: float
) -> None:
    interval, save, hazard, exposed = values
    assert expected_loss(interval, save, hazard, exposed_seconds=exposed) == pytest.approx(
        loss, rel=1e-12
    )
    if exposed == 0.0:
        assert expected_loss(interval, save, hazard) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(("save", "hazard"), [(-1e-9, 0.5), (1.0, -1e-9)])
def test_neither_a_save_nor_a_hazard_is_negative(save: float, hazard: float) -> None:
    message = f"save_seconds {save} and hazard_per_hour {hazard} must not be negative"
    for compute in (daly_interval_seconds, lambda *values: expected_loss(9.0, *values)):
        with pytest.raises(ValueError, match=message):
            compute(save, hazard)


@pytest.mark.parametrize("interval", [0.0, -1.0])
def test_an_interval_without_training_has_no_measurable_loss(interval: float) -> None:
    with pytest.raises(ValueError, match="interval_seconds must be positive"):
        expected_loss(interval, 1.0, 0.5)


def test_a_prior_counts_as_the_interruptions_of_its_weight() -> None:
    prior = GammaHazard.from_prior(0.5, weight=3.0)
    assert (prior.shape, prior.hours, prior.per_hour) == (3.0, 6.0, 0.5)
    seen = prior.seen(2, 4.0)
    assert (seen.shape, seen.hours, seen.per_hour) == (5.0, 10.0, 0.5)
    assert prior.seen(0, 0.0) == prior
    assert prior.seen(1, 2.0).seen(3, 4.0) == prior.seen(4, 6.0)
    for wrong in ((-1, 1.0), (1, -1.0)):
        with pytest.raises(ValueError, match="must not be negative"):
            prior.seen(*wrong)
    for hazard, weight in ((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, -1.0)):
        with pytest.raises(ValueError, match="must be positive"):
            GammaHazard.from_prior(hazard, weight=weight)
    assert GammaHazard.from_prior(0.25, weight=0.5).hours == 2.0
    with pytest.raises(FrozenInstanceError):
        prior.shape = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("planned", [0.2, 3.0])
@pytest.mark.parametrize(
    ("seen", "hours"), [(0, 0.0), (0, 7.0), (1, 0.5), (4, 20.0), (4, 0.5), (12, 3.0), (30, 150.0)]
)
def test_the_estimate_is_the_mean_of_the_posterior_mixture(
    planned: float, seen: int, hours: float
) -> None:
    """By Γ(a + n) / Γ(a) · bᵃ / (b + T)ᵃ⁺ⁿ, which is the likelihood of n interruptions in T hours
    but for a factor.
    """
    weights = []
    means = []
    for share, factor, worth in GUESSES:
        scale = worth / (factor * planned)
        likelihood = (
            math.gamma(worth + seen)
            / math.gamma(worth)
            * scale**worth
            / (scale + hours) ** (worth + seen)
        )
        weights.append(share * likelihood)
        means.append((worth + seen) / (scale + hours))
    expected = sum(weight * mean for weight, mean in zip(weights, means, strict=True)) / sum(
        weights
    )
    assert PlannedHazard(planned, seen, hours).per_hour == pytest.approx(expected, rel=1e-9)
    assert PlannedHazard(planned).seen(seen, hours).per_hour == pytest.approx(expected, rel=1e-9)


def test_observations_add_up_and_many_of_them_overflow_nothing() -> None:
    plan = PlannedHazard(0.5)
    assert (plan.interruptions, plan.hours) == (0.0, 0.0)
    assert plan.seen(1, 2.0).seen(3, 4.0) == plan.seen(4, 6.0) == PlannedHazard(0.5, 4, 6.0)
    assert plan.seen(20_000, 10_000.0).per_hour == pytest.approx(2.0, rel=1e-3)
    assert plan.seen(20_000, 10.0).per_hour == pytest.approx(20_002 / 10.4, rel=1e-9)
    for wrong in ((0.0, 1, 1.0), (-1.0, 1, 1.0), (1.0, -1, 1.0), (1.0, 1, -1.0)):
        with pytest.raises(ValueError, match="must be positive"):
            PlannedHazard(*wrong)
    assert PlannedHazard(0.001, 0, 0.0).per_hour > 0
    with pytest.raises(FrozenInstanceError):
        plan.hours = 1.0  # type: ignore[misc]
