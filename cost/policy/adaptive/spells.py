"""How long capacity stays and stays away: what is assumed of spells, and what a job learns of them as it runs.

A spell is a time without change: of capacity (up) or of none (down). In the nine zones of the recorded V100 traces of
2023 half of the spells end within 0.3 to 1.4 hours, while the mean is up to 10 hours: the longer a spell has lasted,
the longer it will go on. So a spell has two phases, a Coxian distribution (Cox 1955, "A use of complex probabilities in
the theory of stochastic processes"; phase-type distributions: Neuts 1981):

    fresh     ends at rate a, settles at rate c                 a = c = 1.1 per hour for every pool
    settled   ends at rate λ (up) or μ (down), unknown

Rates λ and μ get a discrete prior over a logarithmic grid (absences of days are rarer than of hours) and are learnt by
the Gamma-Poisson likelihood of settled time, L(λ) = λ^n · exp(−λ · exposure), with n settled spells that ended in
`exposure` settled hours. Two corrections guard against trusting a stationary world that is none: evidence is forgotten
with a half-life of a day, and counts half (a power posterior: Grünwald 2012, "The safe Bayesian").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FRESH_END_PER_HOUR = 1.1
FRESH_SETTLE_PER_HOUR = 1.1
SETTLED_AFTER_HOURS = 0.5
"""A spell is counted as settled from this age on: about the mean time in the fresh phase."""
UP_END_PER_HOUR = (1 / 1.5, 1 / 5, 1 / 15, 1 / 50)
DOWN_END_PER_HOUR = (1 / 1.2, 1 / 4, 1 / 12, 1 / 40)
UP_PRIOR = (0.25, 0.25, 0.25, 0.25)
DOWN_PRIOR = (0.3, 0.4, 0.2, 0.1)
HALF_LIFE_HOURS = 24.0
EVIDENCE_POWER = 0.5
AGE_AT_FIRST_SIGHT_HOURS = 1.0
"""A spell met at a random moment is likely a long one (the inspection paradox), so it counts as settled."""


def fresh_share(age_hours: float, settled_end_per_hour: float = 0.0) -> float:
    """Probability that a spell that has lasted `age_hours` is still fresh.

    `settled_end_per_hour` is small against the fresh rates and may be left out: it makes the settled ones rarer.
    """
    out = FRESH_END_PER_HOUR + FRESH_SETTLE_PER_HOUR
    fresh = math.exp(-out * age_hours)
    gap = out - settled_end_per_hour
    settled = FRESH_SETTLE_PER_HOUR * (math.exp(-settled_end_per_hour * age_hours) - fresh) / gap
    return fresh / (fresh + settled)


@dataclass(slots=True)
class RateEvidence:
    """Posterior of one settled rate over `rates_per_hour`."""

    rates_per_hour: tuple[float, ...]
    prior: tuple[float, ...]
    ends: float = 0.0
    hours: float = 0.0

    def forget(self, hours: float) -> None:
        kept = 0.5 ** (hours / HALF_LIFE_HOURS)
        self.ends *= kept
        self.hours *= kept

    def weights(self) -> list[float]:
        """Probability of each rate; they sum to 1."""
        logs = [EVIDENCE_POWER * (self.ends * math.log(rate) - rate * self.hours) for rate in self.rates_per_hour]
        top = max(logs)
        weights = [prior * math.exp(value - top) for prior, value in zip(self.prior, logs, strict=True)]
        total = sum(weights)
        return [weight / total for weight in weights]


class Spells:
    """What one job has seen of its pool, or of the pools of its region taken as one.

    `see` is told at each decision whether capacity was up (None: not known). It keeps the current spell's age and the
    evidence of both rates.
    """

    def __init__(self) -> None:
        self.up_ends = RateEvidence(UP_END_PER_HOUR, UP_PRIOR)
        self.down_ends = RateEvidence(DOWN_END_PER_HOUR, DOWN_PRIOR)
        self.age_hours = AGE_AT_FIRST_SIGHT_HOURS
        self._last: bool | None = None
        self._at_hours: float | None = None

    def see(self, up: bool | None, now_hours: float) -> None:
        passed = 0.0 if self._at_hours is None else now_hours - self._at_hours
        self._at_hours = now_hours
        self.up_ends.forget(passed)
        self.down_ends.forget(passed)
        if up is None:
            self._last, self.age_hours = None, AGE_AT_FIRST_SIGHT_HOURS
            return
        settled = self.age_hours > SETTLED_AFTER_HOURS
        if self._last is not None and self._last is not up:
            ended = self.up_ends if self._last else self.down_ends
            ended.ends += settled
            self.age_hours = 0.0
        elif self._last is not None:
            self.age_hours += passed
            lasting = self.up_ends if up else self.down_ends
            lasting.hours += passed if self.age_hours > SETTLED_AFTER_HOURS else 0.0
        self._last = up

    def seen_again(self) -> None:
        """The spell is another one now (another pool, met at a random moment)."""
        self.age_hours = AGE_AT_FIRST_SIGHT_HOURS
