"""Simulate one job under one policy, tick by tick.

A tick begins with the loss of a spot machine whose pool has no capacity. Then pools are observed as
far as the rules allow, the policy answers, its starts are tried in order, and the tick is billed
and its useful part counted as work. `Rules` define the observations and the billing; the published
definition is one of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from benchmarks.money.errors import SimulationError
from benchmarks.money.interface import (
    MINIMUM_HOURS,
    Greedy,
    Market,
    Policy,
    PolicyFactory,
    PoolView,
    State,
    UsePool,
)
from benchmarks.money.safety_net import AdmissionRefusal, SafetyNet, admission
from ebbflow.cost.report.optimum import World, optimum_usd


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A simulated job: `work_hours` of useful work by all its nodes, due `deadline_hours` after the
    submit.

    Attributes:
        changeover_hours: Paid hours from a start to the first useful work.
        commit_interval_hours: Hours of useful work between commits; a preemption undoes the work
            since the last commit. 0 means that nothing is undone, as in the published definition.
        seed: Seed of the random on-demand delays.
    """

    work_hours: float
    deadline_hours: float
    changeover_hours: float
    budget_usd: float = math.inf
    commit_interval_hours: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Deviations:
    """Differences between the simulated reality and the job's assumptions.

    Attributes:
        useful_per_hour: Real speed divided by the assumed speed.
        noticed_after_hours: Useful hours after which the job knows the real speed; infinite means
            never.
        on_demand_delays: Delays in hours of the on-demand starts, in order; the last one also holds
            for all further starts. None means random delays within the rules.
    """

    useful_per_hour: float = 1.0
    noticed_after_hours: float = math.inf
    on_demand_delays: tuple[float, ...] | None = None


@dataclass(slots=True)
class SimulationOutcome:
    """Costs and events of a simulated job.

    Dollars are for all nodes; hours count from the submit.
    """

    finished_hours: float | None = None
    deadline_hours: float = 0.0
    spot_usd: float = 0.0
    on_demand_usd: float = 0.0
    egress_usd: float = 0.0
    probe_usd: float = 0.0
    redone_hours: float = 0.0
    waited_hours: float = 0.0
    on_demand_hours: float = 0.0
    starts: int = 0
    refused_starts: int = 0
    preemptions: int = 0
    decisions: int = 0
    overruled: int = 0
    tick_usd: float = 0.0
    """On-demand price of the longest tick."""
    timeline: list[tuple[float, str | None]] = field(default_factory=list)
    """(hour, pool or None) at each change of pool."""

    @property
    def usd(self) -> float:
        return self.spot_usd + self.on_demand_usd + self.egress_usd + self.probe_usd

    @property
    def missed(self) -> bool:
        return self.finished_hours is None or self.finished_hours > self.deadline_hours + 1e-9

    def over_budget(self, budget_usd: float) -> bool:
        """Return whether the cost exceeds the budget by more than one tick of on-demand compute."""
        return self.usd > budget_usd + self.tick_usd + 1e-9


class Billing(StrEnum):
    WHOLE_TICK = "whole_tick"
    """Every tick in which a machine is held is billed in full, as in the published figures."""
    PER_SECOND = "per_second"
    """A machine is billed by the second, at least 60 s per start: Amazon's rule for Linux."""


class Visibility(StrEnum):
    OWN_ZONE = "own_zone"
    """The zone of the last start is observed at each decision, other zones only by probes and starts."""
    OWN_POOL = "own_pool"
    """Only the pool of the running machine is observed; a waiting job observes capacity only by starts."""
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a simulation.

    Attributes:
        information: The pools whose capacity the policy observes.
        attempts: Starts that may be tried per decision; 0 means as many as there are pools.
        probe_hours: Paid hours of a probe, a short start that only tests for capacity. None means
            no probes.
        drain_hours: Paid hours that it takes to leave a machine on purpose.
        on_demand_delay_hours: Longest unpaid wait for on-demand machines. The wait of each start is
            uniformly distributed from 0 to this value.
        probe_interval_hours: Shortest time between two probes of a pool.
    """

    name: str
    information: Visibility
    billing: Billing
    attempts: int
    probe_hours: float | None
    drain_hours: float = 0.0
    on_demand_delay_hours: float = 0.0
    probe_interval_hours: float = 0.0


PUBLISHED = Rules(
    "published: sees its own zone, pays one-minute probes of others every 2 h",
    Visibility.OWN_ZONE,
    Billing.WHOLE_TICK,
    0,
    1 / 60,
    probe_interval_hours=2.0,
)
SEES_ALL = Rules("sees all zones", Visibility.ALL, Billing.WHOLE_TICK, 0, None)
ENACTABLE = Rules(
    "enactable on AWS Batch: one region, one start per decision, no probes, priced self-drain",
    Visibility.OWN_POOL,
    Billing.PER_SECOND,
    1,
    None,
    drain_hours=2 / 60,
    on_demand_delay_hours=0.5,
)
RULES = {"published": PUBLISHED, "sees-all": SEES_ALL, "enactable": ENACTABLE}


_DONE = 1e-9


def simulate(
    world: World,
    job: SimulatedJob,
    rules: Rules,
    policy: Policy,
    *,
    reality: Deviations | None = None,
) -> SimulationOutcome:
    """Run the job from the first tick of `world` until it is done or the world ends.

    A bare policy may miss the deadline; wrap it in `benchmarks.money.safety_net.SafetyNet` to
    prevent that.

    Args:
        reality: None means no deviation from the job's assumptions.
    """
    return _Simulation(world, job, rules, policy, reality or Deviations()).run()


def first_state(world: World, job: SimulatedJob, rules: Rules) -> State:
    """Return the state before any start, for the admission of the job."""
    simulation = _Simulation(world, job, rules, Greedy(), Deviations())
    simulation.look_at_all(0)
    return simulation.state(0.0)


class _Simulation:
    def __init__(
        self, world: World, job: SimulatedJob, rules: Rules, policy: Policy, reality: Deviations
    ) -> None:
        self.world = world
        self.job = job
        self.rules = rules
        self.policy = policy
        self.reality = reality
        self.spots = len(world.zones)
        self.up: list[list[bool]] = world.available.tolist()
        self.prices: list[list[float]] = world.usd_per_hour.tolist()
        # Prices rarely change, so only their changes are processed.
        self.moved: dict[int, list[int]] = {}
        for tick, pool in np.argwhere(np.diff(world.usd_per_hour, axis=1).T != 0).tolist():
            self.moved.setdefault(tick + 1, []).append(pool)
        self.places: list[str] = [*world.regions, *dict.fromkeys(world.regions)]
        first = dict(zip(reversed(world.regions), reversed(world.zones), strict=True))
        self.names = [f"{zone}/spot" for zone in world.zones]
        self.names += [f"{first[region]}/on-demand" for region in self.places[self.spots :]]
        self.zones = [*world.zones, *(first[region] for region in self.places[self.spots :])]
        self.index = {name: position for position, name in enumerate(self.names)}
        self.attempts = rules.attempts or len(self.names)
        # The policy may only rely on the longest tick, because the time of the next change is
        # unknown to it.
        self.longest_tick = float(world.tick_hours.max())
        self.delays = random.Random(job.seed)
        one_tick = world.on_demand_usd_per_hour * self.longest_tick
        self.outcome = SimulationOutcome(deadline_hours=job.deadline_hours, tick_usd=one_tick)
        self.views: list[PoolView] = []
        self.home: str | None = None
        self.own = 0
        self.current: int | None = None
        self.work_left = job.work_hours
        self.uncommitted = 0.0
        self.useful = 0.0
        self.startup_left = self.delay_left = self.stated_left = self.held = 0.0
        # Rest of a drain that is longer than its tick.
        self.draining = 0.0

    def run(self) -> SimulationOutcome:
        self.look_at_all(0)
        now = 0.0
        for tick, hours in enumerate(self.world.tick_hours.tolist()):
            if (
                self.current is not None
                and self.current < self.spots
                and not self.up[self.current][tick]
            ):
                self._preempted(tick, now)
            self._observe(tick, now)
            action = self.policy.decide(self.state(now))
            self.outcome.decisions += 1
            before = self.current
            used = self._act(action, tick, now)
            if self.current != before:
                self.outcome.timeline.append(
                    (now, None if self.current is None else self.names[self.current])
                )
            self._probe(action.probes, tick, now)
            done_at = self._work(tick, hours, used)
            if done_at is not None:
                self.outcome.finished_hours = now + done_at
                break
            now += hours
        return self.outcome

    # Observations

    def _view(self, pool: int, tick: int, available: bool | None, seen: float | None) -> PoolView:
        spot = pool < self.spots
        here = self.home or self.places[pool]
        there = self.places[pool]
        far = here != there
        return PoolView(
            self.names[pool],
            there,
            self.zones[pool],
            Market.SPOT if spot else Market.ON_DEMAND,
            self.prices[pool][tick] if spot else self.world.on_demand_usd_per_hour,
            available,
            seen,
            self.world.distances.egress_usd(here, there) if far else 0.0,
            self.world.distances.transfer_hours(here, there) if far else 0.0,
        )

    def look_at_all(self, tick: int) -> None:
        """Update the views of all pools after a move of the checkpoint.

        Earlier observations of capacity are kept.
        """
        old = self.views or [None] * len(self.names)
        self.views = [
            self._view(
                pool,
                tick,
                None if view is None else view.available,
                None if view is None else view.seen_at_hours,
            )
            for pool, view in enumerate(old)
        ]
        for pool in range(self.spots, len(self.names)):
            self.views[pool] = self._view(pool, tick, True, 0.0)

    def _observe(self, tick: int, now: float) -> None:
        information = self.rules.information
        for pool in self.moved.get(tick, ()):
            view = self.views[pool]
            self.views[pool] = self._view(pool, tick, view.available, view.seen_at_hours)
        if information is Visibility.ALL:
            seen: Iterable[int] = range(self.spots)
        else:
            if information is Visibility.OWN_ZONE:
                own = self.own
            else:
                own = self.current
            if own is None or own >= self.spots:
                seen = ()
            else:
                seen = (own,)
        for pool in seen:
            self.views[pool] = self._view(pool, tick, self.up[pool][tick], now)

    def state(self, now: float) -> State:
        known = self.useful >= self.reality.noticed_after_hours
        if known:
            pace = self.reality.useful_per_hour
        else:
            pace = 1.0
        return State(
            now_hours=now,
            deadline_hours=self.job.deadline_hours,
            work_left_hours=self.work_left / pace,
            uncommitted_hours=self.uncommitted / pace,
            changeover_hours=self.job.changeover_hours,
            on_demand_delay_hours=self.rules.on_demand_delay_hours,
            tick_hours=self.longest_tick,
            pools=tuple(self.views),
            current=None if self.current is None else self.names[self.current],
            startup_left_hours=self.startup_left + self.stated_left + self.draining,
            spent_usd=self.outcome.usd,
            budget_usd=self.job.budget_usd,
            checkpoint_region=self.home or "",
            may_switch=True,
            drain_hours=self.rules.drain_hours,
            commit_interval_hours=self.job.commit_interval_hours,
            attempts=self.attempts,
            probe_hours=self.rules.probe_hours,
            probe_interval_hours=self.rules.probe_interval_hours,
        )

    # Actions

    def _preempted(self, tick: int, now: float) -> None:
        assert self.current is not None
        self.views[self.current] = self._view(self.current, tick, False, now)
        self.outcome.preemptions += 1
        self.outcome.redone_hours += self.uncommitted
        self.work_left += self.uncommitted
        self._release()

    def _release(self) -> None:
        """Give up the machine. Bill the one-minute minimum if it was held for less."""
        if (
            self.rules.billing is Billing.PER_SECOND
            and 0 < self.held < MINIMUM_HOURS
            and self.current is not None
        ):
            self._pay(
                self.current, (MINIMUM_HOURS - self.held) * self.views[self.current].usd_per_hour
            )
        self.current = None
        self.uncommitted = 0.0
        self.held = 0.0
        self.startup_left = self.delay_left = self.stated_left = 0.0

    def _act(self, action: object, tick: int, now: float) -> float:
        """Carry out the policy's answer.

        Return the hours of the tick that it took to leave a machine.
        """
        if not isinstance(action, UsePool):
            return self._leave()
        used = 0.0
        for tried, name in enumerate((action.pool, *action.fallbacks)):
            if name not in self.index:
                raise SimulationError(
                    f"the policy chose pool {name!r}; there are {', '.join(self.names)}"
                )
            pool = self.index[name]
            if pool == self.current:
                return used
            if tried == self.attempts:
                break
            if self.attempts == 1:
                used += self._leave()
            if pool >= self.spots or self.up[pool][tick]:
                used += self._leave()
                self._start(pool, tick)
                return used
            self.outcome.refused_starts += 1
            self.views[pool] = self._view(pool, tick, False, now)
        return used + self._leave()

    def _leave(self) -> float:
        if self.current is None:
            return 0.0
        if self.held > 0:
            drain = self.rules.drain_hours
        else:
            drain = 0.0
        self.held += drain
        self._pay(self.current, drain * self.views[self.current].usd_per_hour)
        self._release()
        return drain

    def _start(self, pool: int, tick: int) -> None:
        self.own = min(pool, self._spot_in_zone(pool))
        self.current = pool
        view = self.views[pool]
        self.outcome.starts += 1
        self.outcome.egress_usd += view.egress_usd
        self.startup_left = self.job.changeover_hours + view.transfer_hours
        if pool >= self.spots:
            self.delay_left = self._delay()
            self.stated_left = self.rules.on_demand_delay_hours
        if self.home != self.places[pool]:
            self.home = self.places[pool]
            self.look_at_all(tick)

    def _spot_in_zone(self, pool: int) -> int:
        return self.zones.index(self.zones[pool])

    def _delay(self) -> float:
        given = self.reality.on_demand_delays
        if given is None:
            return self.delays.uniform(0.0, self.rules.on_demand_delay_hours)
        drawn = sum(
            1
            for _, name in self.outcome.timeline
            if name is not None and name.endswith("/on-demand")
        )
        return given[min(drawn, len(given) - 1)]

    def _probe(self, probes: tuple[str, ...], tick: int, now: float) -> None:
        if self.rules.probe_hours is None:
            return
        for name in probes:
            pool = self.index.get(name, self.spots)
            if pool >= self.spots:
                seen = None
            else:
                seen = self.views[pool].seen_at_hours
            recent = seen is not None and now - seen < self.rules.probe_interval_hours - _DONE
            if pool >= self.spots or pool == self.current or recent:
                continue
            up = self.up[pool][tick]
            self.views[pool] = self._view(pool, tick, up, now)
            self.outcome.probe_usd += self.rules.probe_hours * self.prices[pool][tick] * up

    def _work(self, tick: int, hours: float, used: float) -> float | None:
        """Bill a tick and do its useful work.

        Return the hour within the tick at which the job was done, or None.
        """
        used += self.draining
        self.draining = max(0.0, used - hours)
        used = min(used, hours)
        if self.current is None:
            self.outcome.waited_hours += hours - used
            return None
        waited = min(self.delay_left, max(0.0, hours - used))
        self.delay_left -= waited
        if self.delay_left > 0:
            self.stated_left = max(0.0, self.stated_left - waited)
        else:
            self.stated_left = 0.0
        self.outcome.waited_hours += waited
        begin = used + waited
        starting = min(self.startup_left, max(0.0, hours - begin))
        self.startup_left -= starting
        pace = self.reality.useful_per_hour
        able = max(0.0, hours - begin - starting)
        done = min(able * pace, self.work_left)
        self.work_left -= done
        self.useful += done
        self._commit(done)
        finished = self.work_left <= _DONE and self.startup_left <= _DONE
        if finished:
            end = begin + starting + done / pace
        else:
            end = hours
        self._bill(hours, end - begin)
        if not finished:
            return None
        self._release()
        return end

    def _commit(self, done: float) -> None:
        interval = self.job.commit_interval_hours
        if interval <= 0:
            self.uncommitted = 0.0
        else:
            self.uncommitted = (self.uncommitted + done) % interval

    def _bill(self, hours: float, held: float) -> None:
        assert self.current is not None
        if held <= 0:
            return
        self.held += held
        if self.rules.billing is Billing.WHOLE_TICK:
            paid = hours
        else:
            paid = held
        self._pay(self.current, paid * self.views[self.current].usd_per_hour)
        if self.current >= self.spots:
            self.outcome.on_demand_hours += held

    def _pay(self, pool: int, usd: float) -> None:
        if pool < self.spots:
            self.outcome.spot_usd += usd
        else:
            self.outcome.on_demand_usd += usd


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The outcome of a simulated job, or the refusal of its admission. One of the two is None."""

    outcome: SimulationOutcome | None
    refusal: AdmissionRefusal | None


def run_job(
    world: World,
    job: SimulatedJob,
    rules: Rules,
    factory: PolicyFactory,
    *,
    reality: Deviations | None = None,
) -> SimulationResult:
    """Check the admission of a job, and run it under the policy with its safety net."""
    refusal = admission(first_state(world, job, rules))
    if refusal is not None:
        return SimulationResult(None, refusal)
    net = SafetyNet(factory())
    outcome = simulate(world, job, rules, net, reality=reality)
    outcome.overruled = net.overruled
    return SimulationResult(outcome, None)


def optimum_of(world: World, job: SimulatedJob) -> float:
    return optimum_usd(
        world,
        work_hours=job.work_hours,
        deadline_hours=job.deadline_hours,
        changeover_hours=job.changeover_hours,
    )
