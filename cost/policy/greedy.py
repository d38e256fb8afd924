"""The simple ones: spot whenever there is any; on demand only; and one that does everything wrong, for the tests."""

from __future__ import annotations

from cost.policy.interface import Action, Market, PoolView, Run, State, Wait


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
