"""Baseline policies: greedy, on-demand only, a deliberately bad one for the tests, and Uniform Progress.

The job should be done in proportion to the time: expected(t) = work × t / deadline. While ahead, spot or wait; while
behind, spot or on-demand. From on-demand back to spot only when ahead by two changeovers, expected(t + 2d) ≤ done.
"""

from __future__ import annotations

from ebbflow.cost.policy.interface import Action, Market, PoolView, Run, State, Wait


def spot_candidates(state: State) -> list[PoolView]:
    """Spot pools worth a start now: those seen up at this decision, cheapest first; then those not seen at this
    decision, longest unseen first. Pools seen down now are left out. Cheapest counts the transfer."""

    def rank(pool: PoolView) -> tuple[bool, float, float, str]:
        unseen = not state.is_up(pool)
        age = -1.0 if pool.seen_at_hours is None else pool.seen_at_hours
        usd = pool.usd_per_hour * (state.work_left_hours + pool.transfer_hours) + pool.egress_usd
        return (unseen, age if unseen else 0.0, usd, pool.id)

    spots = [pool for pool in state.pools if pool.market is Market.SPOT]
    return sorted((pool for pool in spots if state.is_up(pool) or pool.seen_at_hours != state.now_hours), key=rank)


class Greedy:
    """Spot when there is any, the cheapest that is seen; otherwise wait. On-demand comes from the net alone.

    From on-demand it goes back to spot that it sees, or can try without letting go of what it has.
    """

    def decide(self, state: State) -> Action:
        current = state.current_pool
        if current is not None and current.market is Market.SPOT:
            return Run(current.id)
        candidates = [pool.id for pool in spot_candidates(state) if state.is_up(pool) or state.attempts > 1]
        if current is not None:
            return Run(candidates[0], (*candidates[1:], current.id)) if candidates else Run(current.id)
        # Waiting costs nothing, so a start that may be refused costs nothing either.
        tries = [pool.id for pool in spot_candidates(state)]
        return Run(tries[0], tuple(tries[1:])) if tries else Wait()


class OnDemand:
    """On demand from the first moment."""

    def decide(self, state: State) -> Action:
        return Run(state.on_demand.id)


class Adversary:
    """Deliberately bad: waits, hops, runs in the dearest pool, leaves what works, names what does not exist, raises.

    For the tests of the net only. What it does depends on the decision's number alone.
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
            return Run("no-such-pool")
        if turn < 5:
            return Wait(everything)
        if turn < 9 and spots:
            return Run(spots[self.asked % len(spots)].id, (), everything)
        return Run(pools[self.asked % len(pools)].id)


class UniformProgress:
    """`leaves_at_once`: from on-demand to spot as soon as spot is seen (and the net lets it): the stronger variant.
    `failover`: cheapest first, but the region that ran last comes after all others.
    `leaves_blind`: from on-demand, when ahead, also for spot that is not seen; without it, on-demand is kept then."""

    def __init__(self, *, leaves_at_once: bool = False, failover: bool = False, leaves_blind: bool = True) -> None:
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
            return Run(current.id)
        spots = self._spots(state)
        behind = self._ahead(state, 0.0) < 0
        if current is not None:
            return self._from_on_demand(state, current, spots)
        tries = spots
        if behind:
            # One start per decision: behind, only a spot that is seen is worth it.
            tries = spots if state.attempts > 1 else [pool for pool in spots if state.is_up(pool)]
            order = [*(pool.id for pool in tries), state.on_demand.id]
        else:
            order = [pool.id for pool in tries]
        return Run(order[0], tuple(order[1:])) if order else Wait()

    def _from_on_demand(self, state: State, current: PoolView, spots: list[PoolView]) -> Action:
        seen = [pool.id for pool in spots if state.is_up(pool)]
        if self.leaves_at_once and seen:
            return Run(seen[0], (*seen[1:], current.id))
        if self._ahead(state, 2 * state.changeover_hours) <= 0:
            return Run(current.id)
        # Ahead by two changeovers: on-demand is let go of, and if no spot is to be had the job waits.
        order = [pool.id for pool in spots] if self.leaves_blind else seen
        return Run(order[0], tuple(order[1:])) if order else Run(current.id)

    def _ahead(self, state: State, later_hours: float) -> float:
        """Useful hours done beyond what uniform progress asks for, `later_hours` from now."""
        assert self._work_hours is not None
        expected = (state.now_hours + later_hours) * self._work_hours / state.deadline_hours
        return self._work_hours - state.work_left_hours - expected

    def _spots(self, state: State) -> list[PoolView]:
        candidates = spot_candidates(state)
        if not self.failover:
            return candidates
        return sorted(candidates, key=lambda pool: (pool.region == self._last_region, pool.usd_per_hour))
