"""Interface

A policy chooses where a job runs next. It is asked at each decision (in the simulator at every tick, on AWS Batch at an
attempt's boundary, see `State.may_switch`) and answers with a pool to run in, or with waiting. Whether the answer is
safe is not its business: the net of `cost/policy/safety_net.py` stands outside and overrules any policy in time.

All times are hours on the clock of the job, which is 0 when the job was submitted; all money is USD for the whole gang
(all nodes of it), so that a gang of four looks to a policy like one dear machine.

The job should be done in proportion to the time: expected(t) = work × t / deadline. While ahead, spot or wait; while
behind, spot or on-demand. From on-demand back to spot only when ahead by two changeovers, expected(t + 2d) ≤ done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

MINIMUM_HOURS = 60 / 3600
"""Paid of each start at least, where seconds are billed: Amazon's rule for Linux."""


class Market(StrEnum):
    SPOT = "spot"
    ON_DEMAND = "on_demand"


@dataclass(frozen=True, slots=True)
class PoolView:
    """One capacity pool (instance type × zone × market) as the job can know it now.

    `available` is what was last seen, at `seen_at_hours`: True, False, or None if it was never seen. It is current if
    `seen_at_hours` is the state's `now_hours`. An on-demand pool is always available (it starts within
    `State.on_demand_delay_hours`). `egress_usd` and `transfer_hours` are what moving there costs from where the
    checkpoint lies now, beyond the changeover; both are 0 in the checkpoint's own region.
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
    """Everything a policy may know at one decision. Two equal histories of states get equal answers."""

    now_hours: float
    deadline_hours: float
    work_left_hours: float
    """Useful hours still to do, uncommitted work counted as done."""
    uncommitted_hours: float
    """Useful hours since the last commit: what a preemption or an unannounced move would redo."""
    changeover_hours: float
    """From a start to the first useful hour, paid: boot, restore, warm-up."""
    on_demand_delay_hours: float
    """Stated longest unpaid wait for an on-demand start."""
    tick_hours: float
    """Longest time to the next decision."""
    pools: tuple[PoolView, ...]
    """The same pools in the same order at each decision; at least one is on-demand."""
    current: str | None
    """The pool whose machines run (or start up) now; None if there are none."""
    startup_left_hours: float
    """Of the current pool: hours until it does useful work; without one, what is left of a drain."""
    spent_usd: float
    budget_usd: float
    """`math.inf` without a budget."""
    checkpoint_region: str
    may_switch: bool = True
    """False where the rules forbid a change now (an attempt is running and no self-drain is offered)."""
    drain_hours: float = 0.0
    """Paid hours, without progress, that a self-drain takes before the next start can begin."""
    commit_interval_hours: float = 0.0
    """Useful hours between commits; 0 where everything done is committed at once. Leaving on purpose commits first."""
    attempts: int = 1
    """Starts that can be tried one after another at one decision (see `Run.fallbacks`)."""
    probe_hours: float | None = None
    """Paid hours of one probe at the pool's price; None where probes are forbidden."""
    probe_interval_hours: float = 0.0
    """A pool seen more recently than this is not probed: such a probe is neither paid nor answered."""
    # Asked many times of one state, by the net and by policies: kept once worked out.
    _fallback: PoolView | None = field(default=None, init=False, repr=False, compare=False)
    _spots: tuple[PoolView, ...] | None = field(default=None, init=False, repr=False, compare=False)
    _home: tuple[PoolView, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def slack_hours(self) -> float:
        """Time to the deadline beyond the work that is left."""
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
        """The on-demand pool to fall back to: the running one, else the cheapest to finish in, transfer included."""
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
        """Spot pools that a move to costs no transfer; all of them while there is no checkpoint."""
        if self._home is None:
            home = (pool for pool in self.spot_pools if self.checkpoint_region in ("", pool.region))
            object.__setattr__(self, "_home", tuple(home))
        return self._home or ()

    def is_up(self, pool: PoolView) -> bool:
        """Seen available at this very decision (on-demand always is)."""
        return pool.market is Market.ON_DEMAND or (pool.available is True and pool.seen_at_hours == self.now_hours)


@dataclass(frozen=True, slots=True)
class UsePool:
    """Run in this pool until the next decision: go on there if it is the current one, else start there.

    A start in a spot pool that has no capacity is refused: nothing is billed and the tick is lost (the refusal is seen:
    the pool's `available` is False in the next state). A start elsewhere leaves the current pool, on purpose.
    """

    pool: str
    fallbacks: tuple[str, ...] = ()
    """Tried in this order, at the same decision, if `pool` refuses; at most `State.attempts` starts in all. Naming the
    current pool here keeps it until another has accepted (only where `State.attempts` is above 1)."""
    probes: tuple[str, ...] = ()
    """Spot pools to look at meanwhile; each costs `probe_hours` at its price if it is up, nothing if it is not."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold nothing until the next decision; a running pool is left."""

    probes: tuple[str, ...] = ()


Action = UsePool | Wait


class Policy(Protocol):
    """One job's policy. It may keep a memory of the states it was shown; it draws no random numbers and reads no clock.

    `decide` is called once per decision, in order. If the net overrules an answer, the policy sees what came of it in
    the next state (`current`), never more.
    """

    def decide(self, state: State) -> Action: ...


PolicyFactory = Callable[[], Policy]
"""A policy is made anew for each job."""


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
            return UsePool(current.id)
        candidates = [pool.id for pool in spot_candidates(state) if state.is_up(pool) or state.attempts > 1]
        if current is not None:
            return UsePool(candidates[0], (*candidates[1:], current.id)) if candidates else UsePool(current.id)
        # Waiting costs nothing, so a start that may be refused costs nothing either.
        tries = [pool.id for pool in spot_candidates(state)]
        return UsePool(tries[0], tuple(tries[1:])) if tries else Wait()


class OnDemand:
    """On demand from the first moment."""

    def decide(self, state: State) -> Action:
        return UsePool(state.on_demand.id)


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
            return UsePool("no-such-pool")
        if turn < 5:
            return Wait(everything)
        if turn < 9 and spots:
            return UsePool(spots[self.asked % len(spots)].id, (), everything)
        return UsePool(pools[self.asked % len(pools)].id)


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
            return UsePool(current.id)
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
        return UsePool(order[0], tuple(order[1:])) if order else Wait()

    def _from_on_demand(self, state: State, current: PoolView, spots: list[PoolView]) -> Action:
        seen = [pool.id for pool in spots if state.is_up(pool)]
        if self.leaves_at_once and seen:
            return UsePool(seen[0], (*seen[1:], current.id))
        if self._ahead(state, 2 * state.changeover_hours) <= 0:
            return UsePool(current.id)
        # Ahead by two changeovers: on-demand is let go of, and if no spot is to be had the job waits.
        order = [pool.id for pool in spots] if self.leaves_blind else seen
        return UsePool(order[0], tuple(order[1:])) if order else UsePool(current.id)

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
