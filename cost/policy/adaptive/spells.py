"""How long capacity stays and stays away: what is assumed of spells, and what a job learns of them as it runs.

A spell is a time without change: of capacity (up) or of none (down). In the nine zones of the recorded V100 traces of
2023 half of the spells end within 0.3 to 1.4 hours, while the mean is up to 10 hours: the longer a spell has lasted,
the longer it will go on. So a spell has two phases, a Coxian distribution (Cox 1955, "A use of complex probabilities in
the theory of stochastic processes"; phase-type distributions: Neuts 1981):

    fresh     ends at rate f, settles at rate c                 the same for every pool, up and down
    settled   ends at rate λ (up) or μ (down), unknown

    P(spell > a) = F + G,  F = exp(−(f + c)·a),  G = c · (exp(−λ·a) − F) / (f + c − λ);     density = f·F + λ·G

λ and μ get a discrete prior, geometric in the mean length, and are learnt by these likelihoods: the density of a spell
that ended, P(spell > a) of one that still lasts or was lost sight of. The world is not stationary, so what was learnt
of past spells is forgotten with a half-life of a day.
"""

from __future__ import annotations

import math

FRESH_END_PER_HOUR = 1.5
FRESH_SETTLE_PER_HOUR = 1.2
SETTLED_MEAN_HOURS = (1.5, 3.5, 8.0, 18.0)
PRIOR = (8 / 15, 4 / 15, 2 / 15, 1 / 15)
"""Each mean is half as likely as the next shorter one."""
HALF_LIFE_HOURS = 24.0
AGE_AT_FIRST_SIGHT_HOURS = 1.0
"""A spell met at a random moment is likely a long one (the inspection paradox), so it counts as mostly settled."""
SETTLED_END_PER_HOUR = tuple(1 / hours for hours in SETTLED_MEAN_HOURS)
_OUT = FRESH_END_PER_HOUR + FRESH_SETTLE_PER_HOUR


def phases(age_hours: float, settled_end_per_hour: float) -> tuple[float, float]:
    """Probabilities that a spell lasts longer than `age_hours` and is then (fresh, settled): F and G above."""
    fresh = math.exp(-_OUT * age_hours)
    settled = math.exp(-settled_end_per_hour * age_hours)
    return fresh, FRESH_SETTLE_PER_HOUR * (settled - fresh) / (_OUT - settled_end_per_hour)


def fresh_share(age_hours: float) -> float:
    """Probability that a spell that has lasted `age_hours` is still fresh, however long settled ones last."""
    fresh, settled = phases(age_hours, 0.0)
    return fresh / (fresh + settled)


class RateEvidence:
    """Posterior of the settled rate of one kind of spell, over `SETTLED_END_PER_HOUR`."""

    def __init__(self) -> None:
        self.logs = [0.0] * len(SETTLED_END_PER_HOUR)
        """Log likelihood of the spells that are over, forgotten up to `_at_hours`."""
        self._at_hours = 0.0

    def add(self, began_hours: float, age_hours: float, now_hours: float, *, ended: bool) -> None:
        """A spell that was met at the age of `began_hours`, and at `age_hours` was over or lost sight of."""
        kept = self._kept(now_hours)
        seen = self._of_spell(began_hours, age_hours, ended=ended)
        self.logs = [kept * old + new for old, new in zip(self.logs, seen, strict=True)]
        self._at_hours = now_hours

    def weights(self, now_hours: float, lasting: tuple[float, float] | None = None) -> list[float]:
        """Probability of each rate; they sum to 1. `lasting`: ages at which the present spell was met and is now."""
        kept = self._kept(now_hours)
        logs = [kept * old for old in self.logs]
        if lasting is not None:
            logs = [old + new for old, new in zip(logs, self._of_spell(*lasting, ended=False), strict=True)]
        top = max(logs)
        weights = [prior * math.exp(value - top) for prior, value in zip(PRIOR, logs, strict=True)]
        total = sum(weights)
        return [weight / total for weight in weights]

    def _kept(self, now_hours: float) -> float:
        return 0.5 ** ((now_hours - self._at_hours) / HALF_LIFE_HOURS)

    @staticmethod
    def _of_spell(began_hours: float, age_hours: float, *, ended: bool) -> list[float]:
        found = []
        for rate in SETTLED_END_PER_HOUR:
            # Over exp(−rate·age): a spell of months is too unlikely at a short mean to be told from 0.
            fresh = math.exp(-(_OUT - rate) * age_hours)
            settled = FRESH_SETTLE_PER_HOUR * (1 - fresh) / (_OUT - rate)
            seen = FRESH_END_PER_HOUR * fresh + rate * settled if ended else fresh + settled
            found.append(math.log(seen / sum(phases(began_hours, rate))) - rate * age_hours)
        return found


class Spells:
    """What one job has seen of its pool, or of the pools of its region taken as one.

    `see` is told at each decision whether capacity was up (None: not known). It keeps the present spell's age and the
    evidence of both rates.
    """

    def __init__(self) -> None:
        self.age_hours = AGE_AT_FIRST_SIGHT_HOURS
        self._evidence = {True: RateEvidence(), False: RateEvidence()}
        self._began_hours = AGE_AT_FIRST_SIGHT_HOURS
        self._last: bool | None = None
        self._at_hours = 0.0

    def see(self, up: bool | None, now_hours: float) -> None:
        passed, last = now_hours - self._at_hours, self._last
        self._at_hours = now_hours
        if last is not None and up is last:
            self.age_hours += passed
            return
        if last is not None:
            # It changed at some moment since the last decision: in the middle of that time, in the mean.
            over = self.age_hours + passed / 2 if up is not None else self.age_hours
            self._evidence[last].add(self._began_hours, over, now_hours, ended=up is not None)
        # A change that was seen happening begins a spell; anything else is met at a random moment.
        self._begin(0.0 if last is not None and up is not None else AGE_AT_FIRST_SIGHT_HOURS)
        self._last = up

    def seen_again(self) -> None:
        """The spell is another one now (another pool, met at a random moment)."""
        if self._last is not None:
            self._evidence[self._last].add(self._began_hours, self.age_hours, self._at_hours, ended=False)
        self._begin(AGE_AT_FIRST_SIGHT_HOURS)

    def weights(self, *, up: bool) -> list[float]:
        """Probability of each of `SETTLED_END_PER_HOUR` for spells of capacity (`up`) or of none."""
        lasting = (self._began_hours, self.age_hours) if self._last is up else None
        return self._evidence[up].weights(self._at_hours, lasting)

    def _begin(self, age_hours: float) -> None:
        self.age_hours = self._began_hours = age_hours
