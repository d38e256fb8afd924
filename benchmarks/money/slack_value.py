"""The value of slack, from a Markov decision process over slack and spot capacity, and the model of
that capacity.

Slack is the time to the deadline beyond the remaining work. A spell is a period with spot capacity
(up) or without (down). In nine zones of recorded V100 traces of 2023, half of the spells end within
0.3 to 1.4 hours, but their mean is up to 10 hours: the longer a spell has lasted, the longer it
will still last. So a spell has two phases, which make its length a Coxian distribution (Cox 1955,
"A use of complex probabilities in the theory of stochastic processes"; phase-type distributions:
Neuts 1981):

    fresh     ends at rate f, becomes settled at rate c         the same for every pool, up and down
    settled   ends at rate λ (up) or μ (down)                   estimated from observed spells

    P(spell > a) = F + G,  F = exp(−(f + c)·a),  G = c · (exp(−λ·a) − F) / (f + c − λ);     density = f·F + λ·G

λ and μ have a discrete prior, geometric in the mean length. The posterior uses the density for
spells that ended, and P(spell > a) for spells that still last or are no longer observed. Capacity
is not stationary, so evidence decays with a half-life of a day.

The state of the decision process is the time T to the deadline, the slack σ, the machine held,
whether spot is up, and the phase of its spell. An hour with a machine does an hour of work, minus
the changeover d of each start. Slack falls only by waiting and by starts. Prices are relative to
on-demand, s for spot; h is the time step; U, D, S, O and P are expected costs:

    on spot       S = s·h + E[S, or on loss: q·U + (1−q)·D]                        at (T−h, σ)
    idle, down    D = min(wait: E[D or U] at (T−h, σ−h);  start on-demand: O at σ−d−δ/2)
    idle, up      U = min(start spot: S at σ−d;  start on-demand: P at σ−d−δ/2)
    on-demand     O = min(stay: h + E[O or P] at (T−h, σ);  leave: D)              down
                  P = min(stay: h + E[P or O] at (T−h, σ);  start spot: x + S at σ−x−d)   up

d includes half a commit interval (the mean work that is redone), δ is the longest on-demand delay,
x the drain, and q the probability that another pool is up when one is lost. If other regions have
capacity, which has probability a, D and O may also start spot there, at e more than a start in the
checkpoint's region. The advantage of such a move is relative to D and O without a move in this step
but with moves in later steps; otherwise waiting, after which the move is still possible, would look
too expensive.

The rules of the safety net apply: waiting needs σ ≥ d + δ afterwards, a spot start needs σ ≥ 2d +
one tick + a reserve. With less slack, spot is closed for good and the value jumps; the grid has a
point on either side of each jump. If spot is not observed while on-demand runs (`blind`), O has the
phase that was last observed, or an unknown one after the mean length of a down spell. A spot start
then succeeds with the long-run share of up.

The optimal rule of the stationary process is a threshold on slack. Greedy and Uniform Progress (Wu
et al., Can't Be Late, NSDI'24) are its extremes: one waits as long as it can, the other never
borrows slack. Here the threshold depends on rates, phase and horizon.

One table solves all combinations of rates (models). The policy weighs their advantages by its
posterior (QMDP: Littman, Cassandra and Kaelbling 1995), times exp(κ · expected cost): the weights
of the gradient of the entropic risk log E[exp(κ·cost)] / κ relative to the mean (Föllmer and Schied
2002), so that expensive models weigh more. The tables do not depend on the observations, so they
are cached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

FRESH_END_PER_HOUR = 1.5
FRESH_SETTLE_PER_HOUR = 1.2
SETTLED_MEAN_HOURS = (1.5, 3.5, 8.0, 18.0)
PRIOR = (8 / 15, 4 / 15, 2 / 15, 1 / 15)
"""Prior probabilities of `SETTLED_MEAN_HOURS`. Each mean length is half as likely as the next shorter one."""
HALF_LIFE_HOURS = 24.0
AGE_AT_FIRST_SIGHT_HOURS = 1.0
"""Assumed age of a spell that is first observed at a random moment.

Such a spell is probably a long one (inspection paradox), so it counts as mostly settled.
"""
SETTLED_END_PER_HOUR = tuple(1 / hours for hours in SETTLED_MEAN_HOURS)
_OUT = FRESH_END_PER_HOUR + FRESH_SETTLE_PER_HOUR


def phases(age_hours: float, settled_end_per_hour: float) -> tuple[float, float]:
    """Return two probabilities: that a spell still lasts at this age and is fresh, and that it
    lasts and is settled.

    A spell is a period with or without spot capacity. The formulas are F and G of the module's
    docstring.
    """
    fresh = math.exp(-_OUT * age_hours)
    settled = math.exp(-settled_end_per_hour * age_hours)
    return fresh, FRESH_SETTLE_PER_HOUR * (settled - fresh) / (_OUT - settled_end_per_hour)


def fresh_share(age_hours: float) -> float:
    """Return the probability that a spell of this age in hours is still in its fresh phase, not yet
    in its settled one.

    A spell is a period with or without spot capacity. Settled spells are assumed never to end.
    """
    fresh, settled = phases(age_hours, 0.0)
    return fresh / (fresh + settled)


class RateEvidence:
    """Posterior distribution of the rate at which settled spells end, over the rates
    `SETTLED_END_PER_HOUR`.

    A spell is a period with or without spot capacity. It is settled once it has outlived its first,
    less stable phase. One object covers the spells with spot capacity, another one those without.
    """

    def __init__(self) -> None:
        self.logs = [0.0] * len(SETTLED_END_PER_HOUR)
        """Log likelihood of past spells under each rate, decayed up to `_at_hours`."""
        self._at_hours = 0.0

    def add(self, began_hours: float, age_hours: float, now_hours: float, *, ended: bool) -> None:
        """Add a spell that was observed from the age `began_hours` to the age `age_hours`.

        Args:
            ended: True if the spell ended at that age; False if it was no longer observed.
        """
        kept = self._kept(now_hours)
        seen = self._of_spell(began_hours, age_hours, ended=ended)
        self.logs = [kept * old + new for old, new in zip(self.logs, seen, strict=True)]
        self._at_hours = now_hours

    def weights(self, now_hours: float, lasting: tuple[float, float] | None = None) -> list[float]:
        """Return the probability of each rate in `SETTLED_END_PER_HOUR`.

        Args:
            lasting: Age in hours of the present spell when it was first observed, and its age now.
                None if the present spell is not of the kind (with or without capacity) that this
                object covers.
        """
        kept = self._kept(now_hours)
        logs = [kept * old for old in self.logs]
        if lasting is not None:
            logs = [
                old + new
                for old, new in zip(logs, self._of_spell(*lasting, ended=False), strict=True)
            ]
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
            # Divided by exp(−rate·age), because a spell of months underflows at a short mean.
            fresh = math.exp(-(_OUT - rate) * age_hours)
            settled = FRESH_SETTLE_PER_HOUR * (1 - fresh) / (_OUT - rate)
            if ended:
                seen = FRESH_END_PER_HOUR * fresh + rate * settled
            else:
                seen = fresh + settled
            found.append(math.log(seen / sum(phases(began_hours, rate))) - rate * age_hours)
        return found


class SpellTracker:
    """Age of the present spell, and the evidence about the rates at which spells end.

    A spell is a period with or without spot capacity, in one pool or in all pools of a region taken
    as one.
    """

    def __init__(self) -> None:
        self.age_hours = AGE_AT_FIRST_SIGHT_HOURS
        self._evidence = {True: RateEvidence(), False: RateEvidence()}
        self._began_hours = AGE_AT_FIRST_SIGHT_HOURS
        self._last: bool | None = None
        self._at_hours = 0.0

    def observe(self, up: bool | None, now_hours: float) -> None:
        """Record whether there is spot capacity at `now_hours`. `up` is None if this is unknown."""
        passed = now_hours - self._at_hours
        last = self._last
        self._at_hours = now_hours
        if last is not None and up is last:
            self.age_hours += passed
            return
        if last is not None:
            # It changed since the last decision, on average in the middle of that time.
            if up is not None:
                over = self.age_hours + passed / 2
            else:
                over = self.age_hours
            self._evidence[last].add(self._began_hours, over, now_hours, ended=up is not None)
        # An observed change begins a new spell; any other spell is first observed at a random
        # moment.
        self._begin(0.0 if last is not None and up is not None else AGE_AT_FIRST_SIGHT_HOURS)
        self._last = up

    def switch_pool(self) -> None:
        """Begin a new spell, because the job moved to another pool.

        Its age is assumed: `AGE_AT_FIRST_SIGHT_HOURS`.
        """
        if self._last is not None:
            self._evidence[self._last].add(
                self._began_hours, self.age_hours, self._at_hours, ended=False
            )
        self._begin(AGE_AT_FIRST_SIGHT_HOURS)

    def weights(self, *, up: bool) -> list[float]:
        """Return the probability of each rate in `SETTLED_END_PER_HOUR`, for spells with capacity
        (`up`) or without.
        """
        if self._last is up:
            lasting = (self._began_hours, self.age_hours)
        else:
            lasting = None
        return self._evidence[up].weights(self._at_hours, lasting)

    def _begin(self, age_hours: float) -> None:
        self.age_hours = self._began_hours = age_hours


Array = NDArray[np.float64]
STEPS = 240
LONGEST_USEFUL_STEP_HOURS = 0.25
RISK_AVERSION_PER_HOUR = 0.05
"""κ above, per hour at the on-demand price: a model that costs 14 hours more has twice the weight."""
_EPSILON = 1e-6
_FORBIDDEN = 1e6
_CLIP = 200.0
WAIT_OR_ON_DEMAND, LEAVE_OR_STAY, SPOT_OR_STAY, SPOT_OR_ON_DEMAND, AWAY_OR_IDLE, AWAY_OR_STAY = (
    range(6)
)
"""Pairs of options. Their advantage is the cost of the first minus the second, in hours at the on-demand price."""


@dataclass(frozen=True, slots=True)
class SlackProblem:
    """Parameters of a value table. Letters refer to the formulas in the module's docstring.

    Attributes:
        horizon_hours: Longest time to the deadline in the table.
        slack_hours: Largest slack in the table.
        price_ratio: Spot price divided by on-demand price (s).
        reserve_hours: Slack kept for redone work or a drain.
        again: Probability that another pool has capacity when one is lost (q).
        blind: Whether spot is not observed while on-demand runs.
        away_cost_hours: Extra cost of a start in another region, in hours at the on-demand price
            (e).
        away_chance: Probability that another region has capacity (a).
        up_end_per_hour, down_end_per_hour: Rates at which settled spells with and without capacity
            may end (λ, μ).
    """

    horizon_hours: float
    slack_hours: float
    changeover_hours: float
    tick_hours: float
    price_ratio: float
    on_demand_delay_hours: float = 0.0
    drain_hours: float = 0.0
    reserve_hours: float = 0.0
    again: float = 0.0
    blind: bool = False
    away_cost_hours: float = math.inf
    away_chance: float = 0.0
    up_end_per_hour: tuple[float, ...] = SETTLED_END_PER_HOUR
    down_end_per_hour: tuple[float, ...] = SETTLED_END_PER_HOUR

    @property
    def spot_slack_hours(self) -> float:
        """Smallest slack with which the safety net allows a spot start."""
        reserve = self.on_demand_delay_hours + self.reserve_hours
        return 2 * self.changeover_hours + self.tick_hours + reserve

    @property
    def step_hours(self) -> float:
        """Time step of the table.

        If a changeover is longer than a step, it is a whole number of steps, at most 8.
        """
        step = max(self.tick_hours / 2, min(LONGEST_USEFUL_STEP_HOURS, self.horizon_hours / STEPS))
        step = max(step, self.horizon_hours / (1.5 * STEPS))
        if self.changeover_hours <= step:
            return step
        return self.changeover_hours / min(8, round(self.changeover_hours / step))


@dataclass(frozen=True)
class SlackTable:
    """Costs of all options of an `Adaptive` policy by time to the deadline and slack: the solution
    of a `SlackProblem`.

    A model is a pair of rates from `up_end_per_hour` and `down_end_per_hour`. Models are ordered by
    the first rate, then by the second.

    Attributes:
        slack_hours: Slack values of the grid, [slack].
        advantages: Cost of one option minus cost of another, [kind, step, model, phase, slack].
            Hours at the on-demand price.
        cost_up, cost_down: Lowest expected cost of finishing if no machine is held yet and spot is
            up or down, [step, model, slack]. Hours at the on-demand price.
    """

    step_hours: float
    slack_hours: Array
    advantages: NDArray[np.float32]
    cost_up: NDArray[np.float32]
    cost_down: NDArray[np.float32]

    def corners(self, left_hours: float, slack_hours: float) -> tuple[slice, slice, Array]:
        """Find the four grid points around a state, for interpolation.

        Returns:
            Slice of two steps, slice of two slack values, and the weights of the four points,
            [step, slack].
        """
        steps = self.advantages.shape[1]
        grid = self.slack_hours
        row = min(max(left_hours / self.step_hours, 1.0), steps - 1.0)
        n = min(int(row), steps - 2)
        slack = min(max(slack_hours, 0.0), float(grid[-1]))
        i = min(max(int(np.searchsorted(grid, slack, side="right")) - 1, 0), len(grid) - 2)
        high = row - n
        right = (slack - float(grid[i])) / float(grid[i + 1] - grid[i])
        weights = np.array(
            [[(1 - high) * (1 - right), (1 - high) * right], [high * (1 - right), high * right]]
        )
        return slice(n, n + 2), slice(i, i + 2), weights

    def advantage(
        self, kind: int, left_hours: float, slack_hours: float, fresh: float, models: Array
    ) -> float:
        """Return the expected cost of one option minus that of another, in hours at the on-demand
        price.

        It is a mean over the models and over the two phases of the present spell. A spell is a
        period with or without spot capacity; it begins as "fresh" and may become "settled", and
        then usually lasts longer. A model is a pair of rates at which settled spells with and
        without capacity end. Models in which finishing costs more have more weight.

        Args:
            kind: The pair of options, such as `WAIT_OR_ON_DEMAND`.
            left_hours: Time to the deadline.
            slack_hours: Time to the deadline beyond the remaining work.
            fresh: Probability that the present spell is in its fresh phase.
            models: Probability of each model, [model].
        """
        rows, columns, weights = self.corners(left_hours, slack_hours)
        found = self.advantages[kind, rows, :, :, columns]
        by_model = np.einsum("nmpk,nk->mp", found, weights)
        if kind in (SPOT_OR_STAY, SPOT_OR_ON_DEMAND):
            cost = self.cost_up
        else:
            cost = self.cost_down
        dear = RISK_AVERSION_PER_HOUR * np.einsum("nmk,nk->m", cost[rows, :, columns], weights)
        feared = models * np.exp(dear - dear.max())
        return float(feared @ (by_model @ np.array([fresh, 1 - fresh]))) / float(feared.sum())

    def expected_cost(
        self, left_hours: float, slack_hours: float, up: bool, models: Array
    ) -> float:
        """Return the expected cost of finishing if no machine is held yet, in hours at the
        on-demand price.

        Args:
            up: Whether there is spot capacity now.
            models: Probability of each model, [model].
        """
        rows, columns, weights = self.corners(left_hours, slack_hours)
        found = (self.cost_up if up else self.cost_down)[rows, :, columns]
        return float(models @ np.einsum("nmk,nk->m", found, weights))


@lru_cache(maxsize=24)
def solve(question: SlackProblem) -> SlackTable:
    """Compute the value table of a problem for every model, in about 0.1 s.

    The last 24 tables are cached.
    """
    return _Induction(question).run()


def slack_grid(question: SlackProblem, step_hours: float) -> Array:
    """Return the slack values of the table in hours, in increasing order.

    The value of slack jumps at `spot_slack_hours` and at each further multiple of a changeover
    above it, where the slack suffices for one more start. Around these jumps the values are evenly
    spaced, and one is just below each jump. Further up, the distances grow.
    """
    base = question.spot_slack_hours
    changeover = question.changeover_hours
    closed = changeover + question.on_demand_delay_hours
    below = math.floor(max(0.0, base - closed) / step_hours)
    above = math.ceil(max(4 * changeover, 8 * step_hours) / step_hours)
    points = {0.0, closed - _EPSILON, *(base + k * step_hours for k in range(-below, above + 1))}
    points |= {base + k * changeover - _EPSILON for k in range(4)}
    top = max(points)
    width = step_hours
    while top < question.slack_hours:
        width *= 1.15
        top += width
        points.add(top)
    grid: Array = np.unique(
        np.round(np.array([point for point in points if point >= 0], dtype=np.float64), 9)
    )
    return grid[np.r_[True, np.diff(grid) > _EPSILON / 10]]


def mean_hours(settled_end: Array) -> Array:
    """Return the mean length, in hours, of periods with or without spot capacity.

    Such a period is first "fresh", with the same rates for all pools, and then may become
    "settled".

    Args:
        settled_end: Rates per hour at which settled periods end.
    """
    return (1 + FRESH_SETTLE_PER_HOUR / settled_end) / (FRESH_END_PER_HOUR + FRESH_SETTLE_PER_HOUR)


def _phase_steps(settled_end: Array, hours: float) -> tuple[Array, Array]:
    """Compute the probabilities of a spell's phases after `hours`.

    Returns:
        The probabilities that it lasts, by phase before and after, [model, phase, phase]; and that
        it ends, [model, phase, 1].
    """
    out = FRESH_END_PER_HOUR + FRESH_SETTLE_PER_HOUR
    fresh = math.exp(-out * hours)
    settled = np.exp(-settled_end * hours)
    gap = np.where(np.abs(out - settled_end) < 1e-6, 1e-6, out - settled_end)
    moved = FRESH_SETTLE_PER_HOUR * (settled - fresh) / gap
    stay = np.zeros((len(settled_end), 2, 2))
    stay[:, 0, 0] = fresh
    stay[:, 0, 1] = moved
    stay[:, 1, 1] = settled
    return stay, 1 - stay.sum(axis=2, keepdims=True)


class _Shift:
    """Linear interpolation of values [..., slack] at the slack minus `hours`; negative slack counts
    as 0.
    """

    def __init__(self, grid: Array, hours: float) -> None:
        at = np.clip(grid - hours, 0.0, None)
        self.left = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
        self.share = (at - grid[self.left]) / (grid[self.left + 1] - grid[self.left])

    def __call__(self, values: Array) -> Array:
        left = values[..., self.left]
        return left + (values[..., self.left + 1] - left) * self.share


class _Induction:
    """Backward induction over time steps for a `SlackProblem`.

    Values have shape [state, step, model, phase, slack].
    """

    def __init__(self, question: SlackProblem) -> None:
        self.q = question
        self.step = question.step_hours
        self.grid = slack_grid(question, self.step)
        self.steps = math.ceil(question.horizon_hours / self.step) + 1
        up = np.array(question.up_end_per_hour)
        down = np.array(question.down_end_per_hour)
        self.up_end = np.repeat(up, len(down))
        self.down_end = np.tile(down, len(up))
        half_delay = question.on_demand_delay_hours / 2
        self.spot_start = max(self.step, question.changeover_hours)
        self.demand_start = max(self.step, question.changeover_hours + half_delay)
        self.unpaid = half_delay
        self.up = {
            t: _phase_steps(self.up_end, t) for t in {self.step, self.spot_start, self.demand_start}
        }
        self.down = {t: _phase_steps(self.down_end, t) for t in {self.step, self.demand_start}}
        self.wait = _Shift(self.grid, self.step)
        self.to_spot = _Shift(self.grid, question.changeover_hours)
        self.to_demand = _Shift(self.grid, question.changeover_hours + half_delay)
        # The grid ends at slack 0; work beyond it is done on demand and added here.
        self.too_late = np.clip(question.changeover_hours + half_delay - self.grid, 0.0, None)
        self.drained = _Shift(self.grid, question.drain_hours)
        self.may_spot = self.grid >= question.spot_slack_hours - _EPSILON / 2
        closed = question.changeover_hours + question.on_demand_delay_hours
        self.may_wait = self.grid - self.step >= closed - 2 * _EPSILON
        mean_up = mean_hours(self.up_end)
        mean_down = mean_hours(self.down_end)
        self.may_leave = self.grid >= closed + question.tick_hours + question.drain_hours
        self.share_up = (mean_up / (mean_up + mean_down))[:, None]
        self.still_down = np.exp(-self.step / mean_down)[:, None]
        shape = (self.steps, len(self.up_end), 2, len(self.grid))
        self.values = np.zeros((5, *shape))
        self.advantages = np.zeros((6, *shape), dtype=np.float32)

    def run(self) -> SlackTable:
        for row in range(1, self.steps):
            self._step(row)
        cost = self.values[:, :, :, 1, :].astype(np.float32)
        return SlackTable(self.step, self.grid, self.advantages, cost[4], cost[1])

    def _rows_before(self, row: int, hours: float, states: slice) -> Array:
        values = self.values[states]
        back = row - hours / self.step
        low = math.floor(back + 1e-9)
        if low < 0:
            return values[:, 0]
        share = max(0.0, back - low)
        if share < 1e-9:
            return values[:, low]
        return values[:, low] * (1 - share) + values[:, min(low + 1, row - 1)] * share

    def _step(self, row: int) -> None:
        work = np.maximum(row * self.step - self.grid, 0.0)
        before = self.values[:, row - 1]
        hours = np.minimum(self.step, work)
        ratio = self.q.price_ratio
        changeover = self.q.changeover_hours
        demand_hours = (
            np.minimum(self.demand_start - self.unpaid, work + changeover) + self.too_late
        )
        spot, idle, demand, seen, _ = before
        late_down, late_up = self.to_demand(self._rows_before(row, self.demand_start, slice(2, 4)))
        start_down = demand_hours + self._next(self.down[self.demand_start], late_down, late_up)
        start_up = demand_hours + self._next(
            self.up[self.demand_start], late_up, self._lost(late_up, late_down)
        )
        soon_spot, soon_idle = self.to_spot(self._rows_before(row, self.spot_start, slice(0, 2)))
        if self.q.again:
            soon_up = self.to_spot(self._rows_before(row, self.spot_start, slice(4, 5))[0])
        else:
            soon_up = soon_spot
        start_spot = ratio * np.minimum(self.spot_start, work + changeover)
        start_spot = start_spot + self._next(
            self.up[self.spot_start], soon_spot, self._lost(soon_up, soon_idle)
        )
        start_spot = np.where(self.may_spot, start_spot, _FORBIDDEN)
        waited, waited_up = self.wait(before[1::3])
        wait = np.where(
            self.may_wait, self._next(self.down[self.step], waited, waited_up), _FORBIDDEN
        )
        stay_up = hours + self._next(self.up[self.step], seen, self._lost(seen, demand))
        leave = self.q.drain_hours + self.drained(start_spot)
        if self.q.blind:
            start_down = demand_hours + np.repeat(late_down[:, :1], 2, axis=1)
        stay = np.minimum(wait, start_down)
        down = self._or_away(stay, start_spot)
        up = np.minimum(start_spot, start_up)
        if self.q.blind:
            stay_down, let_go = self._blind(hours, demand, self.drained(down), self.drained(up))
        else:
            stay_down = hours + self._next(self.down[self.step], demand, seen)
            let_go = self.q.drain_hours + self.drained(down)
        let_go = np.where(self.may_leave, let_go, _FORBIDDEN)
        on_spot = ratio * hours + self._next(self.up[self.step], spot, self._lost(before[4], idle))
        on_demand = np.minimum(self._or_away(stay_down, leave), let_go)
        for state, now in enumerate((on_spot, down, on_demand, np.minimum(leave, stay_up), up)):
            np.multiply(now, work > 0, out=self.values[state, row])
        away = start_spot[:, 1:] - stay
        left = leave[:, 1:] - stay_down
        kinds = (
            wait - start_down,
            let_go - stay_down,
            leave - stay_up,
            start_spot - start_up,
            away,
            left,
        )
        for kind, found in enumerate(kinds):
            np.clip(found, -_CLIP, _CLIP, out=self.advantages[kind, row], casting="same_kind")

    def _or_away(self, here: Array, start: Array) -> Array:
        """Return the expected cost with the option of a start in another region, which is taken if
        it is cheaper.
        """
        if self.q.away_chance <= 0:
            return here
        away = np.minimum(here, start[:, 1:] + self.q.away_cost_hours)
        return here + self.q.away_chance * (away - here)

    def _blind(self, hours: Array, demand: Array, down: Array, up: Array) -> tuple[Array, Array]:
        """Return the values of keeping and of leaving on-demand machines while spot is not
        observed.

        Two phases are distinguished: that of the last observation (down), and unknown.
        """
        seen = demand[:, 0]
        forgotten = demand[:, 1]
        stay = np.stack(
            [self.still_down * seen + (1 - self.still_down) * forgotten, forgotten], axis=1
        )
        tried = self.share_up * up[:, 1] + (1 - self.share_up) * down[:, 1]
        return hours + stay, self.q.drain_hours + np.stack([down[:, 1], tried], axis=1)

    def _lost(self, another: Array, nothing: Array) -> Array:
        if self.q.again:
            return self.q.again * another + (1 - self.q.again) * nothing
        return nothing

    @staticmethod
    def _next(phases: tuple[Array, Array], same: Array, other: Array) -> Array:
        """Return the expected cost after a step, in which the spell lasts, or ends and the opposite
        one begins.
        """
        stay, end = phases
        return stay @ same + end * other[:, :1]
