"""The policy: learn the spells, ask the tables, choose the pool. Deterministic; knows only what the state shows."""

from __future__ import annotations

import math

import numpy as np

from cost.policy.adaptive.choice import Chooser, home_pools, reference_usd_per_hour, spot_pools
from cost.policy.adaptive.spells import AGE_AT_FIRST_SIGHT_HOURS, DOWN_END_PER_HOUR, Spells, fresh_share
from cost.policy.adaptive.value import (
    LEAVE_OR_STAY,
    SPOT_OR_IDLE,
    SPOT_OR_ON_DEMAND,
    SPOT_OR_STAY,
    WAIT_OR_ON_DEMAND,
    Array,
    Question,
    Table,
    mean_hours,
    solve,
)
from cost.policy.interface import Action, Market, PoolView, Run, State, Wait

PROBE_EVERY_HOURS = 2.0
_LADDER = 1.25


class Adaptive:
    """Spends slack where the expected dollars are least.

    - On spot: stays, moves only to a pool seen up whose saving pays for the move, probes only for that.
    - With nothing: spot if it is worth its changeover; else waits while slack is worth less than on-demand's premium.
    - On on-demand: goes back to spot as soon as its spell has lasted long enough to be worth the slack it costs.
    """

    def __init__(self) -> None:
        self.spells = Spells()
        self.chooser = Chooser()
        self._before: PoolView | None = None
        self._asked: str | None = None
        self._at_hours = 0.0
        self._probed_hours = -math.inf
        self._losses = self._hops = 0
        self._lost = False
        self._seen_hours = 0.0
        self._table_key: Question | None = None
        self._table: Table | None = None

    def decide(self, state: State) -> Action:
        self._observe(state)
        current = state.current_pool
        if not spot_pools(state):
            action: Action = Run(state.on_demand.id)
        elif current is None:
            action = self._from_idle(state)
        elif current.market is Market.SPOT:
            action = self._from_spot(state, current)
        else:
            action = self._from_on_demand(state, current)
        self._before, self._at_hours = current, state.now_hours
        self._asked = action.pool if isinstance(action, Run) else None
        return action

    def expected_usd(self, state: State) -> float:
        """Expected dollars to finish from idle at home, spot being up if it was last seen so. No probes, one pool."""
        up = any(pool.available is True for pool in home_pools(state))
        left, slack = self._clock(state)
        return self._solved(state).expected_cost(left, slack, up, self._models()) * state.on_demand.usd_per_hour

    # What is seen

    def _observe(self, state: State) -> None:
        current, before, passed = state.current_pool, self._before, state.now_hours - self._at_hours
        on_spot = current is not None and current.market is Market.SPOT
        if self._lost:
            self._losses += 1
            self._hops += on_spot or any(state.is_up(pool) for pool in home_pools(state))
            self._lost = False
        if before is not None and before.market is Market.SPOT and before.id == self._asked:
            stays = self.chooser.of(before)
            stays.hours += passed
            if current is None:
                stays.losses += 1
                self._lost = True
        # A pool that was asked for is held at the next decision, unless it refused or was lost within the tick.
        capacity = self._capacity(state)
        if capacity is not None:
            self._seen_hours = state.now_hours
        self.spells.see(capacity, state.now_hours)
        if on_spot and before is not None and before.market is Market.SPOT and current != before:
            moved = current is not None and current.id != before.id
            if moved:
                self.spells.seen_again()

    def _capacity(self, state: State) -> bool | None:
        current = state.current_pool
        if current is not None and current.market is Market.SPOT:
            return True
        home = home_pools(state)
        if any(state.is_up(pool) for pool in home):
            return True
        if any(pool.seen_at_hours == state.now_hours for pool in home):
            return False
        if current is None and state.now_hours > 0:
            return False
        return None

    # What is answered

    def _from_spot(self, state: State, current: PoolView) -> Action:
        others = [pool for pool in spot_pools(state) if pool.id != current.id]
        if not others or state.probe_hours is None or not state.may_switch:
            return Run(current.id)
        better = [pool for pool in others if self.chooser.saving_usd(pool, current, state) > 0]
        since = self._at_hours - 1e-9
        seen = [pool for pool in better if pool.available is True and (pool.seen_at_hours or 0.0) >= since]
        if seen:
            best = min(seen, key=lambda pool: self.chooser.rank(pool, state))
            return Run(best.id, (current.id,))
        if state.now_hours - self._probed_hours < PROBE_EVERY_HOURS:
            return Run(current.id)
        probes = tuple(pool.id for pool in better)
        self._probed_hours = state.now_hours
        return Run(current.id, (), probes)

    def _from_idle(self, state: State) -> Action:
        down = fresh_share(self.spells.age_hours)
        up = any(state.is_up(pool) for pool in home_pools(state))
        tries = [
            pool.id
            for pool in self._startable(state)
            if self._gain(state, pool, SPOT_OR_ON_DEMAND) < 0
            and ((state.is_up(pool) and up) or self._gain(state, pool, SPOT_OR_IDLE) < 0)
        ]
        unseen = self._capacity(state) is None
        waits = self._advantage(state, WAIT_OR_ON_DEMAND, down) < 0
        if state.attempts == 1 and not waits and not unseen:
            tries = [name for name in tries if state.is_up(state.pool(name))]
        order = tries[: max(1, state.attempts)] if waits else [*tries, state.on_demand.id]
        return Run(order[0], tuple(order[1:])) if order else Wait()

    def _from_on_demand(self, state: State, current: PoolView) -> Action:
        if not state.may_switch:
            return Run(current.id)
        if self._blind(state):
            if state.startup_left_hours > 0:
                return Run(current.id)
            pools = self._startable(state)
            down_hours = mean_hours(np.array(DOWN_END_PER_HOUR)) @ np.array(self.spells.down_ends.weights())
            seen = math.exp(-(state.now_hours - self._seen_hours) / float(down_hours))
            if pools and self._advantage(state, LEAVE_OR_STAY, seen) < 0:
                return Run(pools[0].id)
            return Run(current.id)
        pools = [pool for pool in self._startable(state) if state.attempts > 1 or state.is_up(pool)]
        tries = [pool.id for pool in pools if self._gain(state, pool, SPOT_OR_STAY) < 0]
        if tries:
            return Run(tries[0], (*tries[1:], current.id))
        seen_down = self._capacity(state) is False
        if seen_down and self._advantage(state, LEAVE_OR_STAY, fresh_share(self.spells.age_hours)) < 0:
            return Wait()
        return Run(current.id)

    def _startable(self, state: State) -> list[PoolView]:
        """Pools not seen down at this decision, best first; where one start can be tried, the longest unseen first."""
        pools = [p for p in spot_pools(state) if state.is_up(p) or p.seen_at_hours != state.now_hours]
        pools.sort(key=lambda pool: self.chooser.rank(pool, state))
        if state.attempts == 1:
            pools.sort(key=lambda pool: (not state.is_up(pool), pool.seen_at_hours or -1.0))
        return pools

    # What the tables say

    def _gain(self, state: State, pool: PoolView, kind: int) -> float:
        """Dollars (at the on-demand price, in hours) that starting there costs more than the other choice."""
        age = self.spells.age_hours if state.is_up(pool) and self._capacity(state) else AGE_AT_FIRST_SIGHT_HOURS
        extra = self.chooser.extra_usd(pool, state) / state.on_demand.usd_per_hour
        return self._advantage(state, kind, fresh_share(age)) + extra

    def _advantage(self, state: State, kind: int, fresh: float) -> float:
        left, slack = self._clock(state)
        return self._solved(state).advantage(kind, left, slack, fresh, self._models())

    def _models(self) -> Array:
        return np.outer(self.spells.up_ends.weights(), self.spells.down_ends.weights()).ravel()

    def _clock(self, state: State) -> tuple[float, float]:
        left = state.deadline_hours - state.now_hours
        return left, left - state.work_left_hours - state.startup_left_hours

    @staticmethod
    def _blind(state: State) -> bool:
        """On-demand shows nothing of spot where one start at a time may be tried."""
        return state.attempts == 1 and not any(pool.seen_at_hours == state.now_hours for pool in spot_pools(state))

    def _solved(self, state: State) -> Table:
        key = self._question(state)
        if key != self._table_key or self._table is None:
            self._table_key, self._table = key, solve(key)
        return self._table

    def _question(self, state: State) -> Question:
        """The state's question on a ladder of values, so that few tables serve many jobs and all decisions of one."""
        old = self._table_key
        left, slack = self._clock(state)
        ratio = round(reference_usd_per_hour(state) / state.on_demand.usd_per_hour / 0.02) * 0.02
        redone = min(state.tick_hours, state.commit_interval_hours)
        return Question(
            horizon_hours=old.horizon_hours if old else _rung(left),
            slack_hours=old.slack_hours if old else _rung(max(slack, 4 * state.changeover_hours, state.tick_hours)),
            changeover_hours=_up_to_two_digits(state.changeover_hours + state.commit_interval_hours / 2),
            tick_hours=old.tick_hours if old else round(state.tick_hours, 3),
            price_ratio=round(ratio, 2),
            on_demand_delay_hours=_up_to_two_digits(state.on_demand_delay_hours),
            drain_hours=_up_to_two_digits(state.drain_hours),
            reserve_hours=_up_to_two_digits(max(redone, state.drain_hours)),
            again=self._again(state),
            blind=state.attempts == 1,
        )

    def _again(self, state: State) -> float:
        """Chance that another pool at home is up at once after a loss, in quarters; 0 where there is no other."""
        if len(home_pools(state)) < 2:
            return 0.0
        return min(0.75, round(4 * (1 + self._hops) / (3 + self._losses)) / 4)


def _rung(hours: float) -> float:
    """The next value of a geometric ladder at or above `hours`."""
    return _LADDER ** math.ceil(math.log(max(hours, 1e-3)) / math.log(_LADDER) - 1e-9)


def _up_to_two_digits(hours: float) -> float:
    """`hours` rounded up to two significant digits; 0 stays 0."""
    if hours <= 0:
        return 0.0
    scale = 10.0 ** (1 - math.floor(math.log10(hours)))
    return math.ceil(hours * scale - 1e-9) / scale
