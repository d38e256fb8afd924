"""Policies of the comparison: Uniform Progress in variants, always on-demand, and an adversary of
the safety net.
"""

from __future__ import annotations

import math
from functools import partial

from benchmarks.money.adaptive import Adaptive
from benchmarks.money.interface import (
    Action,
    Greedy,
    Market,
    PolicyFactory,
    PoolView,
    State,
    UsePool,
    Wait,
    spot_candidates,
)


class OnDemand:
    """Policy that always runs on demand."""

    def decide(self, state: State) -> Action:
        return UsePool(state.on_demand.id)


class Adversary:
    """Deliberately bad policy to test the safety net: it moves needlessly, overpays, names unknown
    pools and raises.

    Its answers depend only on the number of decisions so far.
    """

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, state: State) -> Action:
        self.asked += 1
        pools = sorted(state.pools, key=lambda pool: (-pool.usd_per_hour, pool.id))
        spots = [pool for pool in pools if pool.market is Market.SPOT]
        everything = tuple(pool.id for pool in spots)
        turn = self.asked * 7 % 11
        if turn == 0:
            raise RuntimeError("a policy with a bug")
        if turn == 1:
            return UsePool("no-such-pool")
        if turn < 5:
            return Wait(everything)
        if turn < 9 and spots:
            return UsePool(spots[self.asked % len(spots)].id, (), everything)
        return UsePool(pools[self.asked % len(pools)].id)


class UniformProgress:
    """Uniform Progress, the policy of "Can't Be Late" (Wu et al., NSDI'24).

    The job is ahead if it has done more than the share of its work that equals the elapsed share of
    its time. While ahead, it uses spot or waits; while behind, it uses spot or on-demand. It
    returns from on-demand to spot only if it would still be ahead after two changeovers without
    work.

    Args:
        leaves_at_once: Leave on-demand as soon as spot capacity is observed, which is stronger than
            the published rule.
        failover: Try the cheapest spot pools first, and those in the region used last only after
            all others.
        leaves_blind: When ahead, leave on-demand even if no spot capacity is observed.
    """

    def __init__(
        self, *, leaves_at_once: bool = False, failover: bool = False, leaves_blind: bool = True
    ) -> None:
        self.leaves_at_once = leaves_at_once
        self.leaves_blind = leaves_blind
        self.failover = failover
        self._work_hours: float | None = None
        self._last_region: str | None = None

    def decide(self, state: State) -> Action:
        if self._work_hours is None:
            self._work_hours = state.work_left_hours
        current = state.current_pool
        if current is not None:
            self._last_region = current.region
        if current is not None and current.market is Market.SPOT:
            return UsePool(current.id)
        spots = self._spots(state)
        behind = self._ahead(state, 0.0) < 0
        if current is not None:
            return self._from_on_demand(state, current, spots)
        tries = spots
        if behind:
            # With one start per decision, only observed spot is worth it.
            if state.attempts > 1:
                tries = spots
            else:
                tries = [pool for pool in spots if state.is_up(pool)]
            order = [*(pool.id for pool in tries), state.on_demand.id]
        else:
            order = [pool.id for pool in tries]
        if order:
            return UsePool(order[0], tuple(order[1:]))
        return Wait()

    def _from_on_demand(self, state: State, current: PoolView, spots: list[PoolView]) -> Action:
        seen = [pool.id for pool in spots if state.is_up(pool)]
        if self.leaves_at_once and seen:
            return UsePool(seen[0], (*seen[1:], current.id))
        if self._ahead(state, 2 * state.changeover_hours) <= 0:
            return UsePool(current.id)
        # Ahead by two changeovers: leave on-demand; the job waits if there is no spot.
        if self.leaves_blind:
            order = [pool.id for pool in spots]
        else:
            order = seen
        if order:
            return UsePool(order[0], tuple(order[1:]))
        return UsePool(current.id)

    def _ahead(self, state: State, later_hours: float) -> float:
        """Return the useful hours done so far minus those that uniform progress requires
        `later_hours` from now.
        """
        assert self._work_hours is not None
        expected = (state.now_hours + later_hours) * self._work_hours / state.deadline_hours
        return self._work_hours - state.work_left_hours - expected

    def _spots(self, state: State) -> list[PoolView]:
        candidates = spot_candidates(state)
        if not self.failover:
            return candidates
        return sorted(
            candidates, key=lambda pool: (pool.region == self._last_region, pool.usd_per_hour)
        )


class GreedyWithReserve:
    """Greedy that keeps a share of its slack for returns from on-demand, in proportion to the
    remaining work.

    With a share of 0 it would be greedy; with 1 it spends slack as evenly as Uniform Progress.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._first: State | None = None

    def decide(self, state: State) -> Action:
        self._first = self._first or state
        current = state.current_pool
        if current is not None and current.market is Market.SPOT:
            return UsePool(current.id)
        start = state.changeover_hours + state.on_demand_delay_hours
        kept = (
            self.share
            * (self._first.slack_hours - start)
            * state.work_left_hours
            / self._first.work_left_hours
        )
        extra = state.slack_hours - start - kept
        tries = [pool.id for pool in spot_candidates(state)]
        if current is None:
            if extra <= 0:
                return UsePool(state.on_demand.id)
            if tries:
                return UsePool(tries[0], tuple(tries[1:]))
            return Wait()
        # A return that is refused uses up to this much slack, and pays for a drain and another
        # start.
        trip = state.drain_hours + start + state.changeover_hours + 2 * state.tick_hours
        lost_usd = (state.drain_hours + state.changeover_hours) * current.usd_per_hour
        cheapest = min((pool.usd_per_hour for pool in state.spot_pools), default=math.inf)
        pays = (current.usd_per_hour - cheapest) * state.work_left_hours > 2 * lost_usd
        if tries and pays and extra >= trip:
            return UsePool(tries[0], tuple(tries[1:]))
        return UsePool(current.id)


POLICIES: dict[str, PolicyFactory] = {
    "adaptive": Adaptive,
    "greedy": Greedy,
    "uniform_progress": UniformProgress,
    "uniform_progress_leaving": partial(UniformProgress, leaves_at_once=True),
    "uniform_progress_regions": partial(UniformProgress, failover=True),
    "uniform_progress_staying": partial(UniformProgress, leaves_blind=False),
    "on_demand": OnDemand,
    "adversary": Adversary,
}
