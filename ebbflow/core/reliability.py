"""Formulas for interruption rates, optimal save intervals, and the expected loss of an interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

# (weight, multiple of the plan's hazard, prior interruptions): the plan is right, or wrong by 3 or
# by 10.
_GUESSES = (
    (0.5, 1.0, 8.0),
    (0.125, 0.1, 2.0),
    (0.125, 1 / 3, 2.0),
    (0.125, 3.0, 2.0),
    (0.125, 10.0, 2.0),
)


@dataclass(frozen=True)
class GammaHazard:
    """Gamma-distributed estimate of interruptions per hour, the conjugate prior of Poisson
    arrivals.
    """

    # Number of interruptions: those observed plus those that the prior counts as observed
    shape: float
    hours: float  # hours in which they occurred

    @classmethod
    def from_prior(cls, hazard_per_hour: float, *, weight: float = 1.0) -> GammaHazard:
        """Make a prior with mean `hazard_per_hour` and the weight of `weight` observed
        interruptions.
        """
        if hazard_per_hour <= 0 or weight <= 0:
            raise ValueError(
                f"hazard_per_hour {hazard_per_hour} and weight {weight} must be positive"
            )
        return cls(weight, weight / hazard_per_hour)

    def seen(self, interruptions: float, hours: float) -> GammaHazard:
        """Return the posterior after `interruptions` more interruptions in `hours` more hours."""
        if interruptions < 0 or hours < 0:
            raise ValueError(
                f"interruptions {interruptions} and hours {hours} must not be negative"
            )
        return GammaHazard(self.shape + interruptions, self.hours + hours)

    @property
    def per_hour(self) -> float:
        return self.shape / self.hours


@dataclass(frozen=True)
class PlannedHazard:
    """Estimate of interruptions per hour, from a planned rate that may be several times too high or
    low.

    The estimate is a mixture of Gamma distributions. While observations agree with the plan, the
    plan counts as much as eight observed interruptions. Once they contradict the plan, it loses its
    weight; a single Gamma prior could not. Each component is weighted by the marginal likelihood of
    n interruptions in T hours, Γ(a + n) / Γ(a) · b^a / (b + T)^(a + n), where a and b are the
    component's shape and hours.
    """

    planned_per_hour: float  # interruptions per hour in the plan
    interruptions: float = 0.0  # number observed
    hours: float = 0.0  # hours of observation

    def __post_init__(self) -> None:
        if self.planned_per_hour <= 0 or self.interruptions < 0 or self.hours < 0:
            raise ValueError(f"the plan must be positive, what was seen not negative: {self}")

    def seen(self, interruptions: float, hours: float) -> PlannedHazard:
        return PlannedHazard(
            self.planned_per_hour, self.interruptions + interruptions, self.hours + hours
        )

    @property
    def per_hour(self) -> float:
        logs = []
        means = []
        for share, factor, worth in _GUESSES:
            hours = worth / (factor * self.planned_per_hour)
            shape = worth + self.interruptions
            later = hours + self.hours
            gammas = math.lgamma(shape) - math.lgamma(worth)
            logs.append(
                math.log(share) + gammas + worth * math.log(hours) - shape * math.log(later)
            )
            means.append(shape / later)
        likeliest = max(logs)
        weights = [math.exp(log - likeliest) for log in logs]
        return sum(weight * mean for weight, mean in zip(weights, means, strict=True)) / sum(
            weights
        )


def daly_interval_seconds(save_seconds: float, hazard_per_hour: float) -> float:
    """Return Daly's optimal training time between two saves, in seconds.

    It adds higher-order terms to Young's interval. With the save cost δ and the mean time between
    interruptions M, it is √(2δM) · (1 + ⅓·√(δ/2M) + ⅑·δ/2M) − δ if δ is below 2M, else M. For δ
    much smaller than M it equals Young's interval. Arguments, errors and the result for a hazard of
    0 are as in `young_interval_seconds`.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", Future Generation Computer Systems 22(3), 2006, equation 37.
    """
    _check(save_seconds, hazard_per_hour)
    if hazard_per_hour == 0:
        return math.inf
    mean = 3600.0 / hazard_per_hour
    if save_seconds >= 2.0 * mean:
        return mean
    ratio = save_seconds / (2.0 * mean)
    return (
        math.sqrt(2.0 * save_seconds * mean) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0)
        - save_seconds
    )


def expected_loss(
    interval_seconds: float,
    save_seconds: float,
    hazard_per_hour: float,
    *,
    exposed_seconds: float = 0.0,
) -> float:
    """Return the expected fraction of time lost to saves and interruptions, at most 1.

    Each interval costs one save. Each interruption loses half an interval on average, plus
    `exposed_seconds`: the time from the staging of a save to its commit. During this time the
    previous save is still the newest commit, so an interruption loses one interval more. The result
    is a first-order approximation for small interval × hazard.
    """
    _check(save_seconds, hazard_per_hour)
    if interval_seconds <= 0:
        raise ValueError(f"interval_seconds must be positive: {interval_seconds}")
    saving = save_seconds / (interval_seconds + save_seconds)
    lost_per_interruption = interval_seconds / 2.0 + exposed_seconds
    return min(1.0, saving + lost_per_interruption * hazard_per_hour / 3600.0)


def _check(save_seconds: float, hazard_per_hour: float) -> None:
    if save_seconds < 0 or hazard_per_hour < 0:
        raise ValueError(
            f"save_seconds {save_seconds} and hazard_per_hour {hazard_per_hour} must not be "
            "negative"
        )
