"""Interface of policies, whose `decide(state)` returns `UsePool` or `Wait`, and the simple
policies.

A policy chooses where a job runs next. It is called once per decision: in the simulator at every
tick, on AWS Batch between attempts (see `State.may_switch`). A policy need not be safe: the safety
net (`cost/policy/safety_net.py`) replaces any answer that endangers the deadline or the budget.

All times are hours since the job was submitted. All dollars are for the whole gang (all nodes of
the job), so a gang of four nodes looks like one expensive machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

MINIMUM_HOURS = 60 / 3600
"""Shortest billed time of a started machine under per-second billing: Amazon's rule for Linux."""


class Market(StrEnum):
    SPOT = "spot"
    ON_DEMAND = "on_demand"


@dataclass(frozen=True, slots=True)
class PoolView:
    """What a policy knows about one pool (instance type × zone × market) at a decision.

    Attributes:
        usd_per_hour: Price of the whole gang.
        available: Whether the pool had capacity when it was last observed; None if it never was.
            Always True for an on-demand pool, which starts within `State.on_demand_delay_hours`.
        seen_at_hours: Time of the last observation; equal to `State.now_hours` if the pool was
            observed at this decision.
        egress_usd: Fee for moving the checkpoint to the pool's region; 0 in the checkpoint's own
            region.
        transfer_hours: Duration of that move, in addition to the changeover; 0 in the checkpoint's
            own region.
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
    """Everything that a policy knows at one decision.

    A policy answers equal sequences of states alike.
    """

    now_hours: float
    deadline_hours: float
    work_left_hours: float
    """Hours of useful work that remain; uncommitted work counts as done."""
    uncommitted_hours: float
    """Hours of useful work since the last commit, which must be redone after a preemption."""
    changeover_hours: float
    """Paid hours from the start of machines to their first useful work: boot, restore, warm-up."""
    on_demand_delay_hours: float
    """Longest unpaid wait until on-demand machines start, as the job assumes it."""
    tick_hours: float
    """Longest time until the next decision."""
    pools: tuple[PoolView, ...]
    """All pools, the same in the same order at each decision. At least one of them is on-demand."""
    current: str | None
    """Id of the pool whose machines run or start now; None without machines."""
    startup_left_hours: float
    """Hours until the current machines do useful work. Without machines: hours until the last ones have drained."""
    spent_usd: float
    budget_usd: float
    """`math.inf` without a budget."""
    checkpoint_region: str
    may_switch: bool = True
    """False while the current machines cannot be left, because an attempt runs that cannot drain on request."""
    drain_hours: float = 0.0
    """Paid hours without progress that it takes to leave a machine on purpose."""
    commit_interval_hours: float = 0.0
    """Hours of useful work between commits; 0 if all work is committed at once. Leaving on purpose commits first."""
    attempts: int = 1
    """Number of starts that one decision may try, one after the other (see `UsePool.fallbacks`)."""
    probe_hours: float | None = None
    """Paid hours of a probe, a short start that only tests for capacity; None if probes are not allowed."""
    probe_interval_hours: float = 0.0
    """A pool that was observed more recently than this is not probed."""
    # Computed once per state, because the safety net and the policies use them many times.
    _fallback: PoolView | None = field(default=None, init=False, repr=False, compare=False)
    _spots: tuple[PoolView, ...] | None = field(default=None, init=False, repr=False, compare=False)
    _home: tuple[PoolView, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def slack_hours(self) -> float:
        """Hours to the deadline beyond the remaining work."""
        return self.deadline_hours - self.now_hours - self.work_left_hours

    def pool(self, pool_id: str) -> PoolView:
        for pool in self.pools:
            if pool.id == pool_id:
                return pool
        raise KeyError(pool_id)

    @property
    def current_pool(self) -> PoolView | None:
        if self.current is None:
            return None
        return self.pool(self.current)

    @property
    def on_demand(self) -> PoolView:
        """The on-demand pool to fall back on: the current one, else that where finishing costs
        least with transfer.
        """
        if self._fallback is not None:
            return self._fallback
        pools = [pool for pool in self.pools if pool.market is Market.ON_DEMAND]
        hours = self.work_left_hours + self.changeover_hours
        found = min(
            pools,
            key=lambda p: (
                p.id != self.current,
                p.usd_per_hour * (hours + p.transfer_hours) + p.egress_usd,
                p.id,
            ),
        )
        object.__setattr__(self, "_fallback", found)
        return found

    @property
    def spot_pools(self) -> tuple[PoolView, ...]:
        if self._spots is None:
            object.__setattr__(
                self, "_spots", tuple(pool for pool in self.pools if pool.market is Market.SPOT)
            )
        return self._spots or ()

    @property
    def home_pools(self) -> tuple[PoolView, ...]:
        """Spot pools in the checkpoint's region; all spot pools if there is no checkpoint yet."""
        if self._home is None:
            home = (pool for pool in self.spot_pools if self.checkpoint_region in ("", pool.region))
            object.__setattr__(self, "_home", tuple(home))
        return self._home or ()

    def is_up(self, pool: PoolView) -> bool:
        """Return whether the pool was observed with capacity at this decision; always true for an
        on-demand pool.
        """
        return pool.market is Market.ON_DEMAND or (
            pool.available is True and pool.seen_at_hours == self.now_hours
        )


@dataclass(frozen=True, slots=True)
class UsePool:
    """Decision to run in a pool until the next decision: continue there, or leave the current pool
    and start there.

    A start in a spot pool without capacity is refused. It costs nothing, but the time until the
    next decision is lost. The next state then shows the pool as not available.
    """

    pool: str
    fallbacks: tuple[str, ...] = ()
    """Pools to try in this order if `pool` has no capacity. One decision tries at most `State.attempts` starts in all.

    If `State.attempts` is above 1 and the current pool is listed, its machines are kept until another start succeeds.
    """
    probes: tuple[str, ...] = ()
    """Spot pools to probe. A probe costs `State.probe_hours` at the pool's price if it has capacity, else nothing."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Decision to hold no machines until the next decision; current machines are left."""

    probes: tuple[str, ...] = ()


Action = UsePool | Wait


class Policy(Protocol):
    """A policy for one job.

    It may remember earlier states, but it uses no random numbers and no clock.

    `decide` is called once per decision, in the order of time. If the safety net replaces an
    answer, the policy is not notified: only `current` of the next state shows the result.
    """

    def decide(self, state: State) -> Action: ...


PolicyFactory = Callable[[], Policy]
"""Function that makes a new policy for a job."""


def spot_candidates(state: State) -> list[PoolView]:
    """Return the spot pools that are worth a try at this decision, best first.

    Pools observed without capacity at this decision are left out. Pools observed with capacity come
    first, in the order of their cost with transfer. The others follow, those unobserved for longest
    first.
    """

    def rank(pool: PoolView) -> tuple[bool, float, float, str]:
        unseen = not state.is_up(pool)
        if pool.seen_at_hours is None:
            age = -1.0
        else:
            age = pool.seen_at_hours
        usd = pool.usd_per_hour * (state.work_left_hours + pool.transfer_hours) + pool.egress_usd
        return (unseen, age if unseen else 0.0, usd, pool.id)

    spots = [pool for pool in state.pools if pool.market is Market.SPOT]
    return sorted(
        (pool for pool in spots if state.is_up(pool) or pool.seen_at_hours != state.now_hours),
        key=rank,
    )


class Greedy:
    """Policy that runs in the cheapest spot pool observed with capacity, and otherwise waits.

    Only the safety net puts the job on demand. From there, this policy returns to a spot pool
    observed with capacity, or to any spot pool if its start can be tried while the on-demand
    machines are kept.
    """

    def decide(self, state: State) -> Action:
        current = state.current_pool
        if current is not None and current.market is Market.SPOT:
            return UsePool(current.id)
        candidates = [
            pool.id for pool in spot_candidates(state) if state.is_up(pool) or state.attempts > 1
        ]
        if current is not None:
            if candidates:
                return UsePool(candidates[0], (*candidates[1:], current.id))
            return UsePool(current.id)
        # Waiting costs nothing, and neither does a start that may be refused.
        tries = [pool.id for pool in spot_candidates(state)]
        if tries:
            return UsePool(tries[0], tuple(tries[1:]))
        return Wait()
