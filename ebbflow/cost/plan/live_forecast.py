"""Forecast the dollars and hours of a job that runs on Spot while its deadline is safe, then on
demand.

A Monte Carlo simulation with a fixed seed applies the placement rule of `cost.capacity` to Spot
capacity that comes and goes. It includes waits for capacity, lost and redone work, the reserve for
on-demand, and the fallback to on-demand.

Each simulated run draws the spells of its zone from `spot_belief`, a random moment in them, and then
independent spells. The actual speed differs from its estimate by a random lognormal factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.plan.candidates import PlanInputs
from ebbflow.cost.plan.forecast import Outlook
from ebbflow.cost.plan.guarantee import (
    DEARER,
    DECIDE_HOURS,
    busy_hours,
    delay_hours,
    hours_until_end,
    last_resorts,
    spare_hours,
    spare_usd,
    start_hours,
)
from ebbflow.cost.plan.pools import Candidate
from ebbflow.cost.plan.spot_belief import NOTHING_SEEN, ZONE_SPELLS, ZoneSpells, believe

if TYPE_CHECKING:
    import numpy

# Simulated runs of each job.
DRAWS = 1000
_SEED = 20_261_123
# A run that is not done after so many attempts is taken to go on at its pace so far.
_MOST_ATTEMPTS = 400
# Share of the attempts' time that is work, at least, of a run that is taken to go on.
_LEAST_PACE = 1e-3


class Forecaster:
    """Simulation of a job in each of its pools.

    A job on Spot falls back to an on-demand pool in time for the deadline. Without a deadline it
    stays on Spot.
    """

    def __init__(self, config: RunConfig, sources: PlanInputs, pools: Sequence[Candidate]) -> None:
        self._config = config
        self._now_utc = sources.now_utc
        self._hours_left = sources.hours_left(config)
        budget = config.cost.budget_usd
        if budget is None:
            self._usd_left = math.inf
        else:
            self._usd_left = budget - sources.progress.spent_usd
        resorts = sorted(last_resorts(pools), key=lambda pool: pool.expected_usd)
        # As `cost.capacity.decision` chooses: a faster pool may cost a little more
        self._resorts = [
            pool for pool in resorts if pool.expected_usd <= DEARER * resorts[0].expected_usd
        ]

    def simulate(self, pool: Candidate) -> Candidate:
        """Simulate a job that begins in a pool, and return the pool with the forecast.

        Its hours become the median of the forecast, since waits for Spot have a long tail, and its
        dollars and interruptions the means.
        """
        if pool.market == "spot":
            spot = pool
            last = self._last_resort(pool)
        else:
            spot = None
            last = pool
        ahead = forecast_live(
            self._config,
            spot,
            last,
            hours_left=self._hours_until(last),
            usd_left=self._usd_left,
        )
        if pool.expected_usd:
            usd_per_step = pool.usd_per_step * ahead.mean_usd / pool.expected_usd
        else:
            usd_per_step = 0.0
        return replace(
            pool,
            outlook=ahead,
            interruptions=ahead.interruptions if spot else pool.interruptions,
            expected_hours=ahead.p50_hours,
            compute_usd=ahead.compute_usd,
            expected_usd=ahead.mean_usd,
            usd_per_step=usd_per_step,
        )

    def _last_resort(self, spot: Candidate) -> Candidate | None:
        """Return the on-demand pool that takes over from a Spot pool; None if there is none.

        It is the cheapest pool with which a start on Spot is safe, or else the cheapest one.
        """
        for pool in self._resorts:
            left = self._hours_until(pool)
            if (
                left is None
                or min(
                    spare_hours(self._config, spot, pool, left) - DECIDE_HOURS,
                    spare_usd(self._config, spot, pool, self._usd_left),
                )
                >= 0
            ):
                return pool
        return next(iter(self._resorts), None)

    def _hours_until(self, last_resort: Candidate | None) -> float | None:
        """Return the hours until the deadline or the end of the last resort; None without a
        deadline.
        """
        if self._hours_left is None or last_resort is None:
            return self._hours_left
        return min(self._hours_left, hours_until_end(last_resort, self._now_utc))


class LiveRuns:
    """Simulated runs of one job.

    The arrays have one value per run, [draws]: the remaining hours of work (`work`), the hours and
    dollars so far (`hours`, `usd`), the number of losses of the machines (`losses`), and whether
    the run is done on Spot (`done`).
    """

    def __init__(self, pool: Candidate) -> None:
        import numpy

        self.chance = numpy.random.default_rng(_SEED)
        deviation = pool.case.speed_log_deviation
        normal = NormalDist()
        strata = [normal.inv_cdf((index + 0.5) / DRAWS) for index in range(DRAWS)]
        slower = numpy.exp(deviation * self.chance.permutation(strata))
        # Divided by its mean, the factor keeps the expected hours of the plan
        self.work = pool.case.work_hours * slower / slower.mean()
        self.hours = numpy.zeros(DRAWS)
        self.usd = numpy.zeros(DRAWS)
        self.losses = numpy.zeros(DRAWS)
        self.done = numpy.zeros(DRAWS, dtype=bool)

    def run_on_spot(
        self,
        spot: Candidate,
        zones: Mapping[str, ZoneSpells],
        spare: Callable[[numpy.ndarray], numpy.ndarray],
    ) -> None:
        """Simulate the part of each run on Spot.

        This part ends when the work is done, or when a wait for capacity would exceed the longest
        safe wait, which `spare` returns for the runs with the given indices.
        """
        import numpy

        belief = believe(spot.case.evidence or NOTHING_SEEN, zones)
        particles = self.chance.choice(len(belief.weights), DRAWS, p=belief.weights)
        spells = belief.spells[particles]
        total = self.work.copy()
        groups = spells.shape[2]
        up, rest = self._begin(spells, spot.case.start_chance)
        start = start_hours(spot)
        price = spot.gang_usd_per_hour
        # Machine failures, which leave the capacity, cost a start and half an interval each
        failures = spot.case.failures_per_hour
        slower = 1.0 + failures * (start + spot.case.interval_hours / 2)
        runs = numpy.arange(DRAWS)
        for _ in range(_MOST_ATTEMPTS):
            longest = spare(runs)
            wait = numpy.where(up[runs], 0.0, rest[runs])
            given_up = (longest < DECIDE_HOURS) | (wait > longest)
            left = runs[given_up]
            self.hours[left] += numpy.clip(longest[given_up], 0.0, wait[given_up])
            runs = runs[~given_up]
            if not len(runs):
                return
            drawn = spells[runs, 1, self.chance.integers(groups, size=len(runs))]
            stay = numpy.where(up[runs], rest[runs], drawn)
            needed = start + self.work[runs] * slower
            ends = needed <= stay
            held = numpy.minimum(needed, stay)
            self.hours[runs] += wait[~given_up] + held
            self.usd[runs] += held * price
            self.losses[runs] += failures * held
            redone = spot.case.interval_hours * self.chance.random(len(runs))
            kept = numpy.maximum(0.0, (stay - start) / slower - redone)
            self.done[runs[ends]] = True
            self.work[runs[ends]] = 0.0
            lost = runs[~ends]
            self.losses[lost] += 1
            self.work[lost] = numpy.maximum(self.work[lost] - kept[~ends], 1e-6)
            runs = lost
            if not len(runs):
                return
            up[runs] = False
            rest[runs] = spells[runs, 0, self.chance.integers(groups, size=len(runs))]
        self._go_on(runs, total)

    def finish_on_demand(self, last_resort: Candidate, config: RunConfig, work: float) -> None:
        """Let each run that is not done do the rest of its work on demand.

        Args:
            work: Hours of the whole work on the pool of these runs, as `self.work` counts them.
        """
        import numpy

        case = last_resort.case
        # Starts and repeated work. A run that was on Spot restores its commit.
        overhead = numpy.where(
            self.hours > 0,
            max(start_hours(last_resort), last_resort.paid_hours - case.work_hours),
            last_resort.paid_hours - case.work_hours,
        )
        paid = overhead + self.work / work * case.work_hours
        delay = self.chance.uniform(0, delay_hours(config), DRAWS)
        delay += numpy.maximum(case.wait_hours - self.hours, 0)
        self.hours += ~self.done * (delay + paid)
        self.usd += ~self.done * paid * last_resort.gang_usd_per_hour

    def _begin(
        self, spells: numpy.ndarray, start_chance: float | None
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Draw the moment at which each run begins.

        A run begins at a random moment, so it more often begins within a long spell, at any point
        of it.

        Args:
            spells: [draws, 2, groups], as in `SpotBelief.spells`.
            start_chance: As in `ForecastInputs`.

        Returns:
            Whether there is capacity, and the hours until this changes; both [draws].
        """
        import numpy

        lengths = spells.sum(axis=2)
        if start_chance is None:
            now = lengths[:, 1] / lengths.sum(axis=1)
        else:
            now = numpy.full(DRAWS, start_chance)
        up = self.chance.random(DRAWS) < now
        runs = numpy.arange(DRAWS)
        ends = spells[runs, up.astype(int)].cumsum(axis=1)
        group = (ends < ends[:, -1:] * self.chance.random((DRAWS, 1))).sum(axis=1)
        return up, spells[runs, up.astype(int), group] * self.chance.random(DRAWS)

    def _go_on(self, runs: numpy.ndarray, total: numpy.ndarray) -> None:
        """Finish the work of the runs with these indices at the mean pace that they had so far."""
        import numpy

        done = numpy.maximum(total[runs] - self.work[runs], _LEAST_PACE * self.hours[runs])
        more = self.work[runs] / done
        self.hours[runs] *= 1 + more
        self.usd[runs] *= 1 + more
        self.losses[runs] *= 1 + more
        self.work[runs] = 0.0
        self.done[runs] = True


def chance_in_time(pool: Candidate) -> float:
    """Return the simulated probability that the job meets its deadline and budget; 1 without a
    deadline or a forecast.
    """
    if pool.outlook is None or pool.outlook.deadline_probability is None:
        return 1.0
    return pool.outlook.deadline_probability


def simulate_live(
    config: RunConfig,
    spot: Candidate | None,
    last_resort: Candidate | None,
    *,
    hours_left: float | None,
    usd_left: float,
    zones: Mapping[str, ZoneSpells] = ZONE_SPELLS,
) -> LiveRuns:
    """Simulate `DRAWS` runs of the job. Equal inputs give equal results.

    The dollars are those of machines alone.

    Args:
        spot, last_resort: Spot and on-demand pool. One of them may be None: the job has no pool of
            that market.
        hours_left: Hours until the deadline. None means that there is no deadline, and the job
            waits for Spot for as long as necessary.
        usd_left: Dollars left of the budget; infinite without a budget.
        zones: Recorded zones to draw from.
    """
    import numpy

    pool = spot or last_resort
    assert pool is not None
    runs = LiveRuns(pool)
    if hours_left is None:
        left = math.inf
    else:
        left = hours_left

    def spare(indices: numpy.ndarray) -> numpy.ndarray:
        """Return the longest safe wait of each run in hours, given the run's remaining work and
        spending.
        """
        if last_resort is None or hours_left is None or spot is None:
            return numpy.full(len(indices), math.inf)
        slower = runs.work[indices] / pool.case.work_hours - 1
        # A wait for a reservation becomes shorter
        begins = numpy.minimum(runs.hours[indices], last_resort.case.wait_hours)
        hours = (
            spare_hours(config, spot, last_resort, left)
            + begins
            - runs.hours[indices]
            - slower * _work_hours(last_resort)
        )
        usd = spare_usd(config, spot, last_resort, usd_left) - runs.usd[indices]
        usd = usd - slower * _work_hours(last_resort) * last_resort.gang_usd_per_hour
        return numpy.where(usd >= 0, hours, -1.0)

    if spot is not None:
        runs.run_on_spot(spot, zones, spare)
    if last_resort is not None:
        runs.finish_on_demand(last_resort, config, pool.case.work_hours)
    return runs


def forecast_live(
    config: RunConfig,
    spot: Candidate | None,
    last_resort: Candidate | None,
    *,
    hours_left: float | None,
    usd_left: float,
) -> Outlook:
    """Simulate the job with `simulate_live`, which explains the arguments, and summarize the runs."""
    import numpy

    runs = simulate_live(config, spot, last_resort, hours_left=hours_left, usd_left=usd_left)
    pool = spot or last_resort
    assert pool is not None
    compute_usd = float(runs.usd.mean())
    other_usd = pool.storage_usd + pool.transfer_usd
    runs.usd += other_usd
    met = (runs.hours <= (math.inf if hours_left is None else hours_left)) & (runs.usd <= usd_left)
    low_usd, middle_usd, high_usd = numpy.quantile(runs.usd, [0.1, 0.5, 0.9])
    low, middle, high = numpy.quantile(runs.hours, [0.1, 0.5, 0.9])
    return Outlook(
        compute_usd=compute_usd,
        mean_usd=compute_usd + other_usd,
        p10_usd=float(low_usd),
        p50_usd=float(middle_usd),
        p90_usd=float(high_usd),
        mean_hours=float(runs.hours.mean()),
        p10_hours=float(low),
        p50_hours=float(middle),
        p90_hours=float(high),
        interruptions=float(runs.losses.mean()),
        on_demand_share=float((~runs.done).mean()),
        deadline_probability=None if hours_left is None else float(met.mean()),
    )


def _work_hours(last_resort: Candidate) -> float:
    return busy_hours(last_resort) - start_hours(last_resort)
