"""The adaptive policy: it learns how long spot capacity lasts, and decides whether a start is worth
the slack it uses.

Slack is the time to the deadline beyond the remaining work. A spell is a period with or without
spot capacity; a stay is the time for which the job holds machines of one pool. `slack_value`
computes the value of slack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benchmarks.money.interface import Action, Market, PoolView, State, UsePool, Wait
from benchmarks.money.slack_value import (
    AGE_AT_FIRST_SIGHT_HOURS,
    AWAY_OR_IDLE,
    AWAY_OR_STAY,
    LEAVE_OR_STAY,
    SETTLED_END_PER_HOUR,
    SPOT_OR_ON_DEMAND,
    SPOT_OR_STAY,
    WAIT_OR_ON_DEMAND,
    Array,
    SlackProblem,
    SlackTable,
    SpellTracker,
    fresh_share,
    mean_hours,
    solve,
)

PRIOR_STAY_HOURS = 4.0
PRIOR_STAYS = 2.0
"""Prior of a pool without observed stays: two stays of four hours. Recorded zones have means of 0.7 to 10 hours."""


@dataclass(slots=True)
class StayStatistics:
    """Observed stays of a job in one spot pool: the times between getting machines there and losing
    or leaving them.

    Attributes:
        hours: Total duration of all stays.
        losses: Number of stays that ended because the machines were taken away.
    """

    hours: float = 0.0
    losses: int = 0

    @property
    def expected_hours(self) -> float:
        """Expected duration of the next stay: the posterior mean of a Gamma-Poisson model."""
        return (PRIOR_STAYS * PRIOR_STAY_HOURS + self.hours) / (PRIOR_STAYS + self.losses)


def reference_usd_per_hour(state: State) -> float:
    """Return the hourly price of all nodes together in the cheapest spot pool of the checkpoint's
    region.

    If that region has no spot pool, return the price in the cheapest spot pool of any region. The
    tables of `SlackTable` are computed for this one spot price; the extra price of a dearer pool is
    added afterwards.
    """
    return min(pool.usd_per_hour for pool in state.home_pools or state.spot_pools)


class PoolRanking:
    """Ranking of spot pools by dollars per hour of an expected stay, with the cost of moving and
    starting there.
    """

    def __init__(self) -> None:
        self.stays: dict[str, StayStatistics] = {}

    def of(self, pool: PoolView) -> StayStatistics:
        return self.stays.setdefault(pool.id, StayStatistics())

    def stay_hours(self, pool: PoolView, state: State) -> float:
        return max(state.tick_hours, min(self.of(pool).expected_hours, state.work_left_hours))

    def entry_usd(self, pool: PoolView, state: State) -> float:
        """Return the dollars for moving the checkpoint to the pool: the transfer fee, and the
        machines meanwhile.
        """
        return pool.egress_usd + pool.usd_per_hour * pool.transfer_hours

    def rank(self, pool: PoolView, state: State) -> tuple[float, str]:
        entry = self.entry_usd(pool, state) + pool.usd_per_hour * state.changeover_hours
        return pool.usd_per_hour + entry / self.stay_hours(pool, state), pool.id

    def extra_usd(self, pool: PoolView, state: State) -> float:
        """Return the extra dollars of one expected stay in this pool, compared with a stay at
        `reference_usd_per_hour`.

        A stay is the time for which the job holds machines of one pool. The dollars include the
        transfer of the checkpoint to this pool. The result is negative if the pool is cheaper.
        """
        dearer = pool.usd_per_hour - reference_usd_per_hour(state)
        return dearer * self.stay_hours(pool, state) + self.entry_usd(pool, state)

    def saving_usd(self, pool: PoolView, current: PoolView, state: State) -> float:
        """Return the dollars saved by moving from `current` to `pool` for one expected stay;
        negative for a loss.
        """
        hours = state.changeover_hours + pool.transfer_hours
        leaving = (
            state.drain_hours * current.usd_per_hour + pool.usd_per_hour * hours + pool.egress_usd
        )
        return (current.usd_per_hour - pool.usd_per_hour) * self.stay_hours(pool, state) - leaving


PROBE_EVERY_HOURS = 2.0
_HAS_CAPACITY = 0.5
"""Assumed probability that an unobserved pool has capacity. The recorded median is 0.68; pools run out together."""
_LADDER = 1.1
_NEAR = 1.5
"""A table is reused while the cost of moving to a new region is within this factor of the table's."""
_LEAST_AWAY_HOURS = 0.1


class Adaptive:
    """Policy that uses slack (time to the deadline beyond the remaining work) only where this pays.

    - On spot: stay. Move only to a pool that was observed with capacity and saves more than the
      move costs. Probe other pools for capacity only if they would save that much.
    - Without machines: start on spot if this is worth its start-up time. Otherwise wait, as long as
      the slack that waiting uses is worth less than the extra cost of on-demand or of a move to
      another region.
    - On demand: return to spot once its capacity has lasted long enough for the return to be worth
      its slack.
    """

    def __init__(self) -> None:
        self.spells = SpellTracker()
        self.chooser = PoolRanking()
        self._before: PoolView | None = None
        self._asked: str | None = None
        self._at_hours = 0.0
        # Advantages looked up at the present decision, by pair of options and probability of the
        # fresh phase.
        self._advantages: dict[tuple[int, float], float] = {}
        self._probed_hours = -math.inf
        self._seen_hours = 0.0
        self._idle_since_hours = 0.0
        self._table_key: SlackProblem | None = None
        self._table: SlackTable | None = None
        self._asked_state: State | None = None
        self._answer: tuple[SlackTable, Array]

    def decide(self, state: State) -> Action:
        self._observe(state)
        self._advantages.clear()
        current = state.current_pool
        if not state.spot_pools:
            action: Action = UsePool(state.on_demand.id)
        elif current is None:
            action = self._from_idle(state)
        elif current.market is Market.SPOT:
            action = self._from_spot(state, current)
        else:
            action = self._from_on_demand(state, current)
        self._before = current
        self._at_hours = state.now_hours
        if isinstance(action, UsePool):
            self._asked = action.pool
        else:
            self._asked = None
        return action

    # Observations

    def _observe(self, state: State) -> None:
        current = state.current_pool
        before = self._before
        passed = state.now_hours - self._at_hours
        on_spot = current is not None and current.market is Market.SPOT
        if before is not None and before.market is Market.SPOT and before.id == self._asked:
            stays = self.chooser.of(before)
            stays.hours += passed
            stays.losses += current is None
        if current is None and before is not None:
            self._idle_since_hours = state.now_hours
        # A requested pool is held at the next decision, unless it refused or was lost within the
        # tick.
        capacity = self._capacity(state)
        if capacity is not None:
            self._seen_hours = state.now_hours
        self.spells.observe(capacity, state.now_hours)
        if on_spot and before is not None and before.market is Market.SPOT and current != before:
            moved = current is not None and current.id != before.id
            if moved:
                self.spells.switch_pool()

    def _capacity(self, state: State) -> bool | None:
        current = state.current_pool
        if current is not None and current.market is Market.SPOT:
            return True
        home = state.home_pools
        if any(state.is_up(pool) for pool in home):
            return True
        if any(pool.seen_at_hours == state.now_hours for pool in home):
            return False
        if current is None and state.now_hours > 0:
            return False
        return None

    # Answers

    def _from_spot(self, state: State, current: PoolView) -> Action:
        others = [pool for pool in state.spot_pools if pool.id != current.id]
        if not others or state.probe_hours is None or not state.may_switch:
            return UsePool(current.id)
        better = [pool for pool in others if self.chooser.saving_usd(pool, current, state) > 0]
        since = self._at_hours - 1e-9
        seen = [
            pool
            for pool in better
            if pool.available is True and (pool.seen_at_hours or 0.0) >= since
        ]
        if seen:
            best = min(seen, key=lambda pool: self.chooser.rank(pool, state))
            return UsePool(best.id, (current.id,))
        if state.now_hours - self._probed_hours < PROBE_EVERY_HOURS:
            return UsePool(current.id)
        probes = tuple(pool.id for pool in better)
        self._probed_hours = state.now_hours
        return UsePool(current.id, (), probes)

    def _from_idle(self, state: State) -> Action:
        down = fresh_share(self.spells.age_hours)
        tries = [pool.id for pool in self._startable(state) if self._gain(state, pool) < 0]
        unseen = self._capacity(state) is None
        waits = self._advantage(state, WAIT_OR_ON_DEMAND, down) < 0
        if state.attempts == 1 and not waits and not unseen:
            # A pool that has not refused since the last loss is unknown, not down.
            tries = [name for name in tries if not self._refused(state, state.pool(name))]
        if waits:
            order = tries[: max(1, state.attempts)]
        else:
            order = [*tries, state.on_demand.id]
        if order:
            return UsePool(order[0], tuple(order[1:]))
        return Wait()

    def _from_on_demand(self, state: State, current: PoolView) -> Action:
        if not state.may_switch:
            return UsePool(current.id)
        if self._blind(state):
            if state.startup_left_hours > 0:
                return UsePool(current.id)
            pools = self._startable(state)
            down_hours = mean_hours(np.array(SETTLED_END_PER_HOUR)) @ np.array(
                self.spells.weights(up=False)
            )
            seen = math.exp(-(state.now_hours - self._seen_hours) / float(down_hours))
            if pools and self._advantage(state, LEAVE_OR_STAY, seen) < 0:
                return UsePool(pools[0].id)
            return UsePool(current.id)
        pools = [pool for pool in self._startable(state) if state.attempts > 1 or state.is_up(pool)]
        tries = [pool.id for pool in pools if self._gain(state, pool) < 0]
        if tries:
            return UsePool(tries[0], (*tries[1:], current.id))
        seen_down = self._capacity(state) is False
        if (
            seen_down
            and self._advantage(state, LEAVE_OR_STAY, fresh_share(self.spells.age_hours)) < 0
        ):
            return Wait()
        return UsePool(current.id)

    def _refused(self, state: State, pool: PoolView) -> bool:
        seen = pool.seen_at_hours
        return not state.is_up(pool) and seen is not None and seen >= self._idle_since_hours

    def _startable(self, state: State) -> list[PoolView]:
        """Return the spot pools that may be tried, best first: all except those just observed
        without capacity.

        If only one start per decision is allowed, pools observed with capacity come first. The
        others follow, the longest unobserved first.
        """
        pools = [
            p for p in state.spot_pools if state.is_up(p) or p.seen_at_hours != state.now_hours
        ]
        pools.sort(key=lambda pool: self.chooser.rank(pool, state))
        if state.attempts == 1:
            pools.sort(key=lambda pool: (not state.is_up(pool), pool.seen_at_hours or -1.0))
        return pools

    # Value of slack

    def _gain(self, state: State, pool: PoolView) -> float:
        """Return the cost of a start in the pool minus that of the best alternative, in hours at
        the on-demand price.

        A negative result means that the start is better. If the checkpoint's region has spot
        capacity, the alternative is on-demand, and a pool that was not observed at this decision is
        assumed to have had capacity for `AGE_AT_FIRST_SIGHT_HOURS`. Otherwise the alternative is
        waiting or on-demand.
        """
        held = state.current is not None
        age = self.spells.age_hours
        if self._capacity(state):
            if held:
                kind = SPOT_OR_STAY
            else:
                kind = SPOT_OR_ON_DEMAND
            if not state.is_up(pool):
                age = AGE_AT_FIRST_SIGHT_HOURS
        else:
            if held:
                kind = AWAY_OR_STAY
            else:
                kind = AWAY_OR_IDLE
        extra = self.chooser.extra_usd(pool, state) / state.on_demand.usd_per_hour
        return self._advantage(state, kind, fresh_share(age)) + extra

    def _advantage(self, state: State, kind: int, fresh: float) -> float:
        if (kind, fresh) not in self._advantages:
            left, slack = self._clock(state)
            table, models = self._asks(state)
            self._advantages[kind, fresh] = table.advantage(kind, left, slack, fresh, models)
        return self._advantages[kind, fresh]

    def _models(self) -> Array:
        return np.outer(self.spells.weights(up=True), self.spells.weights(up=False)).ravel()

    def _asks(self, state: State) -> tuple[SlackTable, Array]:
        """Return the value table and the probabilities of its models, computed once per decision."""
        if self._asked_state is not state:
            self._answer = (self._solved(state), self._models())
            self._asked_state = state
        return self._answer

    def _clock(self, state: State) -> tuple[float, float]:
        left = state.deadline_hours - state.now_hours
        return left, left - state.work_left_hours - state.startup_left_hours

    @staticmethod
    def _blind(state: State) -> bool:
        """Return whether only one start per decision is allowed and no spot pool was observed at
        this decision.
        """
        return state.attempts == 1 and not any(
            pool.seen_at_hours == state.now_hours for pool in state.spot_pools
        )

    def _solved(self, state: State) -> SlackTable:
        key = self._question(state)
        if key != self._table_key or self._table is None:
            table = solve(key)
            self._table_key = key
            self._table = table
        return self._table

    def _question(self, state: State) -> SlackProblem:
        """Return the problem whose value table this decision needs.

        Rounding lets one table serve many decisions.
        """
        old = self._table_key
        left, slack = self._clock(state)
        ratio = round(reference_usd_per_hour(state) / state.on_demand.usd_per_hour / 0.02) * 0.02
        redone = min(state.tick_hours, state.commit_interval_hours)
        return SlackProblem(
            horizon_hours=old.horizon_hours if old else _rung(left),
            slack_hours=old.slack_hours
            if old
            else _rung(max(slack, 4 * state.changeover_hours, state.tick_hours)),
            changeover_hours=_up_to_two_digits(
                state.changeover_hours + state.commit_interval_hours / 2
            ),
            tick_hours=old.tick_hours if old else round(state.tick_hours, 3),
            price_ratio=round(ratio, 2),
            on_demand_delay_hours=_up_to_two_digits(state.on_demand_delay_hours),
            drain_hours=_up_to_two_digits(state.drain_hours),
            reserve_hours=_up_to_two_digits(max(redone, state.drain_hours)),
            again=_HAS_CAPACITY if len(state.home_pools) > 1 else 0.0,
            blind=state.attempts == 1,
            away_cost_hours=self._away_cost_hours(state),
            away_chance=self._away_chance(state),
        )

    def _away(self, state: State) -> list[PoolView]:
        """Return the spot pools of other regions, if they can be tried while the current machines
        are kept.
        """
        if state.attempts == 1 or not state.checkpoint_region:
            return []
        return [pool for pool in state.spot_pools if pool.region != state.checkpoint_region]

    def _away_chance(self, state: State) -> float:
        """Return the probability that a spot pool of another region has capacity; more than two
        pools count as two.
        """
        return 1 - (1 - _HAS_CAPACITY) ** min(2, len(self._away(state)))

    def _away_cost_hours(self, state: State) -> float:
        """Return the extra cost of the cheapest start in another region, in hours at the on-demand
        price.

        The result is infinite without such a pool. It is rounded up, and the previous result is
        reused while it differs by less than the factor `_NEAR`.
        """
        extra = [self.chooser.extra_usd(pool, state) for pool in self._away(state)]
        if not extra:
            return math.inf
        hours = max(min(extra) / state.on_demand.usd_per_hour, _LEAST_AWAY_HOURS)
        if self._table_key:
            old = self._table_key.away_cost_hours
        else:
            old = math.inf
        if 1 / _NEAR < hours / old < _NEAR:
            return old
        return _rung(hours)


def _rung(hours: float) -> float:
    """Round up to the next power of `_LADDER`."""
    return _LADDER ** math.ceil(math.log(max(hours, 1e-3)) / math.log(_LADDER) - 1e-9)


def _up_to_two_digits(hours: float) -> float:
    """Round up to two significant digits; 0 stays 0."""
    if hours <= 0:
        return 0.0
    scale = 10.0 ** (1 - math.floor(math.log10(hours)))
    return math.ceil(hours * scale - 1e-9) / scale
