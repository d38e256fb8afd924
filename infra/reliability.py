"""Interruptions as pure math: how often they come, how often to save because of them, and what that costs."""

from __future__ import annotations

import math
from dataclasses import dataclass


def young_interval_seconds(save_seconds: float, hazard_per_hour: float) -> float:
    """The time between saves that loses least: √(2 · save cost · mean time between interruptions).

    save_seconds: time that training loses per save. hazard_per_hour: interruptions per hour of the whole gang.
    Returns infinity without a hazard. Raises ValueError for a negative argument.
    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. It holds
    while a save is short against the mean time between interruptions.
    """
    _check(save_seconds, hazard_per_hour)
    if hazard_per_hour == 0:
        return math.inf
    return math.sqrt(2.0 * save_seconds * 3600.0 / hazard_per_hour)


def daly_interval_seconds(save_seconds: float, hazard_per_hour: float) -> float:
    """Training time between two saves that loses least, with the higher-order terms that Young leaves out.

    √(2δM) · (1 + ⅓·√(δ/2M) + ⅑·δ/2M) − δ for a save cost δ below 2M, else M: so never below zero. With δ small
    against M it is Young's. Arguments and infinity as in `young_interval_seconds`.
    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3), 2006, equation 37.
    """
    _check(save_seconds, hazard_per_hour)
    if hazard_per_hour == 0:
        return math.inf
    mean = 3600.0 / hazard_per_hour
    if save_seconds >= 2.0 * mean:
        return mean
    ratio = save_seconds / (2.0 * mean)
    return math.sqrt(2.0 * save_seconds * mean) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_seconds


def expected_loss(
    interval_seconds: float, save_seconds: float, hazard_per_hour: float, *, exposed_seconds: float = 0.0
) -> float:
    """Share of the time that saves and redone work take: save cost per interval, and half an interval per interruption.

    exposed_seconds: from the staging of a save until its commit; work since the save before is lost with it. First
    order in interval × hazard, which is what an interval near the best one makes small; at most 1.
    """
    _check(save_seconds, hazard_per_hour)
    if interval_seconds <= 0:
        raise ValueError(f"interval_seconds must be positive: {interval_seconds}")
    saving = save_seconds / (interval_seconds + save_seconds)
    lost_per_interruption = interval_seconds / 2.0 + exposed_seconds
    return min(1.0, saving + lost_per_interruption * hazard_per_hour / 3600.0)


@dataclass(frozen=True)
class GammaHazard:
    """Interruptions per hour as a Gamma distribution, which counting Poisson arrivals keeps one: what is believed now.

    shape: interruptions, seen and believed. hours: in which they were seen.
    """

    shape: float
    hours: float

    @classmethod
    def from_prior(cls, hazard_per_hour: float, *, weight: float = 1.0) -> GammaHazard:
        """A belief in `hazard_per_hour` that counts as much as `weight` interruptions seen."""
        if hazard_per_hour <= 0 or weight <= 0:
            raise ValueError(f"hazard_per_hour {hazard_per_hour} and weight {weight} must be positive")
        return cls(weight, weight / hazard_per_hour)

    def seen(self, interruptions: float, hours: float) -> GammaHazard:
        """The belief after `hours` more with so many interruptions in them."""
        if interruptions < 0 or hours < 0:
            raise ValueError(f"interruptions {interruptions} and hours {hours} must not be negative")
        return GammaHazard(self.shape + interruptions, self.hours + hours)

    @property
    def per_hour(self) -> float:
        """The mean."""
        return self.shape / self.hours

    @property
    def relative_deviation(self) -> float:
        """Standard deviation over mean: how little is known."""
        return 1.0 / math.sqrt(self.shape)


# (share, times the plan's hazard, interruptions that it is worth): the plan is right, or wrong by 3 or by 10.
_GUESSES = ((0.5, 1.0, 8.0), (0.125, 0.1, 2.0), (0.125, 1 / 3, 2.0), (0.125, 3.0, 2.0), (0.125, 10.0, 2.0))


@dataclass(frozen=True)
class PlannedHazard:
    """Interruptions per hour as a plan believes them, which may be right or wrong by a factor: a mixture of Gammas.

    As long as the plan holds it counts like eight interruptions; once what is seen speaks against it, it is let go of,
    which one Gamma of any weight cannot do both. Guesses are weighed by the chance of what was seen: the marginal
    likelihood of Poisson arrivals, Γ(a + n) / Γ(a) · b^a / (b + T)^(a + n), for n in T hours and a Gamma of shape a
    and b hours. `ebbflow bench money interval` says what it is worth.
    """

    planned_per_hour: float
    interruptions: float = 0.0
    hours: float = 0.0

    def __post_init__(self) -> None:
        if self.planned_per_hour <= 0 or self.interruptions < 0 or self.hours < 0:
            raise ValueError(f"the plan must be positive, what was seen not negative: {self}")

    def seen(self, interruptions: float, hours: float) -> PlannedHazard:
        """The belief after `hours` more with so many interruptions in them."""
        return PlannedHazard(self.planned_per_hour, self.interruptions + interruptions, self.hours + hours)

    @property
    def per_hour(self) -> float:
        """The mean."""
        logs, means = [], []
        for share, factor, worth in _GUESSES:
            hours = worth / (factor * self.planned_per_hour)
            shape, later = worth + self.interruptions, hours + self.hours
            gammas = math.lgamma(shape) - math.lgamma(worth)
            logs.append(math.log(share) + gammas + worth * math.log(hours) - shape * math.log(later))
            means.append(shape / later)
        likeliest = max(logs)
        weights = [math.exp(log - likeliest) for log in logs]
        return sum(weight * mean for weight, mean in zip(weights, means, strict=True)) / sum(weights)


def _check(save_seconds: float, hazard_per_hour: float) -> None:
    if save_seconds < 0 or hazard_per_hour < 0:
        raise ValueError(f"save_seconds {save_seconds} and hazard_per_hour {hazard_per_hour} must not be negative")
