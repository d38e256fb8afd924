"""The interface of policies, `decide(state) → UsePool | Wait`, and the simple policies.

A policy chooses where a job runs next. It is asked at each decision (in the simulator at every tick, on AWS Batch
between attempts, see `State.may_switch`) and answers with a pool or with waiting. A policy need not be safe: the net of
`cost/policy/safety_net.py` overrules any policy in time.

All times are hours on the job's clock, which is 0 at the submit. All money is USD for the whole gang, so a gang of four
looks like one expensive machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

MINIMUM_HOURS = 60 / 3600
"""Shortest billed time of a start under per-second billing: Amazon's rule for Linux."""


class Market(StrEnum):
    SPOT = "spot"
    ON_DEMAND = "on_demand"


@dataclass(frozen=True, slots=True)
class PoolView:
    """What the job knows of one capacity pool (instance type × zone × market) at a decision.

    Attributes:
        available: Whether the pool had capacity at `seen_at_hours`; None if it was never observed. An on-demand pool
            is always available: it starts within `State.on_demand_delay_hours`.
        seen_at_hours: Time of that observation; equal to the state's `now_hours` if it is current.
        egress_usd, transfer_hours: Cost of moving the checkpoint to the pool's region, beyond the changeover; 0 in the
            checkpoint's own region.
    """

    id: str
    region: str
    zone: str
    market: Market
    usd_per_hour: float
    available: bool | None
    seen_at_hours: float | None
    egress_usd: float = 0.0
    transfer_hours: float = 0.0


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a policy may know at one decision. Equal histories of states lead to equal answers."""

    now_hours: float
    deadline_hours: float
    work_left_hours: float
    """Remaining useful hours; uncommitted work counts as done."""
    uncommitted_hours: float
    """Useful hours since the last commit, which a preemption or an unannounced move would redo."""
    changeover_hours: float
    """Paid time from a start to the first useful hour: boot, restore, warm-up."""
    on_demand_delay_hours: float
    """Longest unpaid wait for an on-demand start, as stated."""
    tick_hours: float
    """Longest time to the next decision."""
    pools: tuple[PoolView, ...]
    """The same pools in the same order at each decision, at least one of them on-demand."""
    current: str | None
    """The pool whose machines run or start now; None without machines."""
    startup_left_hours: float
    """Hours until the current pool does useful work; without a current pool, the rest of a drain."""
    spent_usd: float
    budget_usd: float
    """`math.inf` without a budget."""
    checkpoint_region: str
    may_switch: bool = True
    """False if the rules forbid a change now: an attempt runs and cannot drain itself."""
    drain_hours: float = 0.0
    """Paid hours without progress that leaving a machine takes before the next start."""
    commit_interval_hours: float = 0.0
    """Useful hours between commits; 0 if all work is committed at once. Leaving on purpose commits first."""
    attempts: int = 1
    """Number of starts that one decision may try (see `UsePool.fallbacks`)."""
    probe_hours: float | None = None
    """Paid hours of one probe, at the pool's price; None if probes are forbidden."""
    probe_interval_hours: float = 0.0
    """A probe of a pool observed more recently than this is neither paid nor answered."""
    # Computed once per state, because net and policies ask for them many times.
    _fallback: PoolView | None = field(default=None, init=False, repr=False, compare=False)
    _spots: tuple[PoolView, ...] | None = field(default=None, init=False, repr=False, compare=False)
    _home: tuple[PoolView, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def slack_hours(self) -> float:
        """Time to the deadline beyond the remaining work."""
        return self.deadline_hours - self.now_hours - self.work_left_hours

    def pool(self, pool_id: str) -> PoolView:
        for pool in self.pools:
            if pool.id == pool_id:
                return pool
        raise KeyError(pool_id)

    @property
    def current_pool(self) -> PoolView | None:
        return None if self.current is None else self.pool(self.current)

    @property
    def on_demand(self) -> PoolView:
        """The on-demand fallback: the running pool, else the one that finishes at the least cost, with transfer."""
        if self._fallback is not None:
            return self._fallback
        pools = [pool for pool in self.pools if pool.market is Market.ON_DEMAND]
        hours = self.work_left_hours + self.changeover_hours
        found = min(
            pools,
            key=lambda p: (p.id != self.current, p.usd_per_hour * (hours + p.transfer_hours) + p.egress_usd, p.id),
        )
        object.__setattr__(self, "_fallback", found)
        return found

    @property
    def spot_pools(self) -> tuple[PoolView, ...]:
        if self._spots is None:
            object.__setattr__(self, "_spots", tuple(pool for pool in self.pools if pool.market is Market.SPOT))
        return self._spots or ()

    @property
    def home_pools(self) -> tuple[PoolView, ...]:
        """Spot pools in the checkpoint's region; all spot pools while there is no checkpoint."""
        if self._home is None:
            home = (pool for pool in self.spot_pools if self.checkpoint_region in ("", pool.region))
            object.__setattr__(self, "_home", tuple(home))
        return self._home or ()

    def is_up(self, pool: PoolView) -> bool:
        """Whether the pool was observed available at this decision. On-demand always is."""
        return pool.market is Market.ON_DEMAND or (pool.available is True and pool.seen_at_hours == self.now_hours)


@dataclass(frozen=True, slots=True)
class UsePool:
    """Run in this pool until the next decision: continue if it is the current pool, else start there.

    A start in a spot pool without capacity is refused: nothing is billed, the tick is lost, and the pool's `available`
    is False in the next state. A start in another pool leaves the current one.
    """

    pool: str
    fallbacks: tuple[str, ...] = ()
    """Pools to try in this order, at the same decision, if `pool` refuses; at most `State.attempts` starts in all.

    If the current pool is among them and `State.attempts` is above 1, it is kept until another pool accepts.
    """
    probes: tuple[str, ...] = ()
    """Spot pools to probe; a probe costs `probe_hours` at the pool's price if it is up, else nothing."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold no machines until the next decision; leave a running pool."""

    probes: tuple[str, ...] = ()


Action = UsePool | Wait


class Policy(Protocol):
    """The policy of one job. It may remember earlier states; it draws no random numbers and reads no clock.

    `decide` is called once per decision, in order. If the net overrules an answer, the policy sees only the result, as
    `current` of the next state.
    """

    def decide(self, state: State) -> Action: ...


PolicyFactory = Callable[[], Policy]
"""Makes a new policy for each job."""


def spot_candidates(state: State) -> list[PoolView]:
    """Return the spot pools worth a start now, without those observed down at this decision.

    Pools observed up come first, cheapest first (transfer included); then unobserved pools, longest unobserved first.
    """

    def rank(pool: PoolView) -> tuple[bool, float, float, str]:
        unseen = not state.is_up(pool)
        age = -1.0 if pool.seen_at_hours is None else pool.seen_at_hours
        usd = pool.usd_per_hour * (state.work_left_hours + pool.transfer_hours) + pool.egress_usd
        return (unseen, age if unseen else 0.0, usd, pool.id)

    spots = [pool for pool in state.pools if pool.market is Market.SPOT]
    return sorted((pool for pool in spots if state.is_up(pool) or pool.seen_at_hours != state.now_hours), key=rank)


class Greedy:
    """Run in the cheapest observed spot pool, else wait. Only the safety net chooses on-demand.

    From on-demand it returns to spot that it observes, or that it can try without leaving its machines.
    """

    def decide(self, state: State) -> Action:
        current = state.current_pool
        if current is not None and current.market is Market.SPOT:
            return UsePool(current.id)
        candidates = [pool.id for pool in spot_candidates(state) if state.is_up(pool) or state.attempts > 1]
        if current is not None:
            return UsePool(candidates[0], (*candidates[1:], current.id)) if candidates else UsePool(current.id)
        # Waiting is free, so a start that may be refused is free too.
        tries = [pool.id for pool in spot_candidates(state)]
        return UsePool(tries[0], tuple(tries[1:])) if tries else Wait()


class OnDemand:
    """Always run on demand."""

    def decide(self, state: State) -> Action:
        return UsePool(state.on_demand.id)


class Adversary:
    """A deliberately bad policy for tests of the net: it hops, overpays, names unknown pools and raises.

    Its answer depends only on the number of the decision.
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
    """Uniform Progress (Wu et al., Can't Be Late, NSDI'24): expected(t) = work × t / deadline.

    While ahead, spot or wait; while behind, spot or on-demand. From on-demand back to spot only if ahead by two
    changeovers: expected(t + 2d) ≤ done.

    Args:
        leaves_at_once: Leave on-demand as soon as spot is observed, if the net allows; the stronger variant.
        failover: Cheapest first, but the last region after all others.
        leaves_blind: When ahead, leave on-demand also for spot that is not observed.
    """

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
            return UsePool(current.id)
        spots = self._spots(state)
        behind = self._ahead(state, 0.0) < 0
        if current is not None:
            return self._from_on_demand(state, current, spots)
        tries = spots
        if behind:
            # With one start per decision, only observed spot is worth it.
            tries = spots if state.attempts > 1 else [pool for pool in spots if state.is_up(pool)]
            order = [*(pool.id for pool in tries), state.on_demand.id]
        else:
            order = [pool.id for pool in tries]
        return UsePool(order[0], tuple(order[1:])) if order else Wait()

    def _from_on_demand(self, state: State, current: PoolView, spots: list[PoolView]) -> Action:
        seen = [pool.id for pool in spots if state.is_up(pool)]
        if self.leaves_at_once and seen:
            return UsePool(seen[0], (*seen[1:], current.id))
        if self._ahead(state, 2 * state.changeover_hours) <= 0:
            return UsePool(current.id)
        # Ahead by two changeovers: leave on-demand; the job waits if there is no spot.
        order = [pool.id for pool in spots] if self.leaves_blind else seen
        return UsePool(order[0], tuple(order[1:])) if order else UsePool(current.id)

    def _ahead(self, state: State, later_hours: float) -> float:
        """Return the useful hours done beyond uniform progress, `later_hours` from now."""
        assert self._work_hours is not None
        expected = (state.now_hours + later_hours) * self._work_hours / state.deadline_hours
        return self._work_hours - state.work_left_hours - expected

    def _spots(self, state: State) -> list[PoolView]:
        candidates = spot_candidates(state)
        if not self.failover:
            return candidates
        return sorted(candidates, key=lambda pool: (pool.region == self._last_region, pool.usd_per_hour))
