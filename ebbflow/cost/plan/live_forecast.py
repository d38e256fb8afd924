"""Forecast the dollars and hours of a job that runs on Spot while its deadline is safe, then on
demand.

A Monte Carlo simulation with a fixed seed applies the placement rule of `cost.capacity` to Spot
capacity that comes and goes. It includes waits for capacity, lost and redone work, the reserve for
on-demand, and the fallback to on-demand.

Spot capacity alternates between spells (periods) with and without capacity, as recorded in nine
zones in 2023 for one V100 each. Each simulated run draws one of these zones, a random moment in its
recording, and then independent spells of that zone. The job's zone is none of the nine, so a random
factor makes the spells longer or shorter. For a new job the nine zones are equally likely. Once the
user's jobs have run in the pool, the zones are weighted by the likelihood of the machine losses in
those jobs. Other instance types and years may behave differently, and prices do not show this. The
actual speed differs from its estimate by a random lognormal factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.plan.forecast import DRAWS, PRIOR_WEIGHT
from ebbflow.cost.plan.guarantee import (
    DECIDE_HOURS,
    busy_hours,
    delay_hours,
    spare_hours,
    spare_usd,
    start_hours,
)
from ebbflow.cost.plan.pools import Candidate

if TYPE_CHECKING:
    import numpy

# Log deviation of the actual zone from a recorded one, in standard deviations between the recorded
# zones: of 0, 0.5, 1, 1.5 and 2 the one with which nearest to 80 % of the jobs in the first half of
# the recordings cost p10 to p90.
ZONE_DEVIATIONS = 2.0
_SEED = 20_261_123
_MOST_ATTEMPTS = 400


class ZoneSpells(NamedTuple):
    """Recorded periods with and without Spot capacity in one zone."""

    share_up: float  # share of the time with capacity
    # up_hours, down_hours: hours of the periods with and without capacity. The sorted periods are
    # split into six groups of equal size, and each value is the mean of one group.
    up_hours: tuple[float, ...]
    down_hours: tuple[float, ...]

    @property
    def losses_per_hour(self) -> float:
        return len(self.up_hours) / sum(self.up_hours)


# V100, 45.5 days from 2023-02-15, one tick per 195 s (recorded by skypilot-org/spot-traces
# 221da1a).
ZONE_SPELLS = {
    "us-east-1a": ZoneSpells(
        0.167, (0.16, 0.17, 0.28, 0.44, 0.77, 2.50), (0.16, 0.19, 0.37, 0.94, 2.78, 17.21)
    ),
    "us-east-1c": ZoneSpells(
        0.467, (0.16, 0.20, 0.38, 0.62, 1.30, 6.27), (0.16, 0.22, 0.43, 0.88, 2.02, 6.51)
    ),
    "us-east-1d": ZoneSpells(
        0.447, (0.16, 0.24, 0.41, 0.69, 1.34, 7.12), (0.16, 0.27, 0.47, 1.01, 2.12, 8.29)
    ),
    "us-east-1f": ZoneSpells(
        0.591, (0.16, 0.19, 0.42, 0.77, 2.12, 10.04), (0.16, 0.18, 0.32, 0.63, 1.53, 6.65)
    ),
    "us-east-2a": ZoneSpells(
        0.759, (0.17, 0.31, 0.67, 1.74, 5.00, 26.63), (0.16, 0.23, 0.37, 0.68, 2.19, 7.31)
    ),
    "us-east-2b": ZoneSpells(
        0.682, (0.18, 0.33, 0.71, 1.91, 4.79, 17.76), (0.16, 0.26, 0.47, 1.14, 2.87, 7.05)
    ),
    "us-west-2a": ZoneSpells(
        0.883, (0.16, 0.33, 0.69, 1.87, 4.67, 29.32), (0.17, 0.30, 0.35, 0.46, 0.84, 2.77)
    ),
    "us-west-2b": ZoneSpells(
        0.905, (0.16, 0.26, 0.81, 2.41, 7.62, 53.86), (0.16, 0.30, 0.37, 0.62, 1.36, 4.02)
    ),
    "us-west-2c": ZoneSpells(
        0.891, (0.16, 0.31, 0.67, 1.80, 4.41, 34.64), (0.16, 0.23, 0.34, 0.46, 0.82, 3.08)
    ),
}


@dataclass(frozen=True, kw_only=True)
class LiveForecast:
    """Forecast of a job that may move from Spot to on-demand.

    Dollars include storage and transfer. Hours include waits for capacity.
    """

    mean_usd: float
    p10_usd: float
    p50_usd: float
    p90_usd: float
    mean_hours: float
    p90_hours: float
    on_demand_share: float  # share of the simulated runs that ended on demand
    # share of the simulated runs that met deadline and budget; None without a deadline
    deadline_probability: float | None


class LiveRuns:
    """Simulated runs of one job.

    The arrays `work`, `hours`, `usd` and `done` have one value per run, [draws]: the remaining
    hours of work, the hours and dollars so far, and whether the run is done.
    """

    def __init__(self, pool: Candidate) -> None:
        import numpy

        self.chance = numpy.random.default_rng(_SEED)
        deviation = pool.case.speed_log_deviation
        speeds = self.chance.standard_normal(DRAWS)
        self.slower = numpy.exp(deviation * speeds - deviation**2 / 2)
        self.work = pool.case.work_hours * self.slower
        self.hours = numpy.zeros(DRAWS)
        self.usd = numpy.zeros(DRAWS)
        self.done = numpy.zeros(DRAWS, dtype=bool)
        self.waits = numpy.ones(DRAWS, dtype=bool)

    def run_on_spot(
        self,
        spot: Candidate,
        zones: Mapping[str, ZoneSpells],
        spare: Callable[[LiveRuns], numpy.ndarray],
    ) -> None:
        """Simulate the part of each run on Spot.

        This part ends when the work is done, or when a wait for capacity would exceed the longest
        safe wait, which `spare` returns.
        """
        import numpy

        known = list(zones.values())
        table = numpy.array([[zone.down_hours, zone.up_hours] for zone in known])
        runs = numpy.arange(DRAWS)
        zone = self.chance.choice(len(known), DRAWS, p=_weights(spot, known))
        scale = self._zone_factors(table)
        spells = table[zone] * scale[..., numpy.newaxis]
        odds = (
            numpy.array([recorded.share_up / (1 - recorded.share_up) for recorded in known])[zone]
            * scale[:, 1]
            / scale[:, 0]
        )
        # A placement score, where there is one, says more of this moment than the recorded zones.
        if spot.case.start_chance is None:
            now = odds / (1 + odds)
        else:
            now = spot.case.start_chance
        up = self.chance.random(DRAWS) < now
        # A run starts at a random moment, so it more often starts within a long spell, at any point
        # of it.
        groups = spells[runs, up.astype(int)].cumsum(axis=1)
        first = (groups < groups[:, -1:] * self.chance.random((DRAWS, 1))).sum(axis=1)
        rest = spells[runs, up.astype(int), first] * self.chance.random(DRAWS)
        start = start_hours(spot)
        interval = spot.case.interval_hours
        price = spot.gang_usd_per_hour
        for _ in range(_MOST_ATTEMPTS):
            active = self.waits & ~self.done
            if not active.any():
                break
            longest = spare(self)
            wait = numpy.where(up, 0.0, rest)
            given_up = active & ((longest < DECIDE_HOURS) | (wait > longest))
            self.hours += given_up * numpy.where(up, 0.0, numpy.clip(longest, 0.0, wait))
            self.waits &= ~given_up
            active &= ~given_up
            drawn = spells[runs, 1, self.chance.integers(spells.shape[2], size=DRAWS)]
            stay = numpy.where(up, rest, drawn)
            needed = start + self.work
            ends = active & (needed <= stay)
            held = numpy.minimum(needed, stay)
            self.hours += active * (wait + held)
            self.usd += active * held * price
            kept = numpy.maximum(0.0, stay - start - interval * self.chance.random(DRAWS))
            self.work = numpy.where(
                active & ~ends, numpy.maximum(self.work - kept, 1e-6), self.work
            )
            self.done |= ends
            up = numpy.zeros(DRAWS, dtype=bool)
            rest = spells[runs, 0, self.chance.integers(spells.shape[2], size=DRAWS)]

    def _zone_factors(self, table: numpy.ndarray) -> numpy.ndarray:
        """Draw the random factors between the periods of the actual zone and those of a recorded
        zone.

        Returns one factor per run for periods without capacity and one for periods with capacity,
        [draws, 2].

        Args:
            table: Hours of the recorded periods, [zones, 2, groups], first without capacity, then
                with capacity.
        """
        import numpy

        deviation = numpy.log(table.sum(axis=2)).std(axis=0) * ZONE_DEVIATIONS
        # One draw for both: where capacity is missing for long, it stays for short (their logs
        # correlate by -0.79).
        return numpy.exp(self.chance.standard_normal((DRAWS, 1)) * deviation * [1.0, -1.0])


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

    def spare(now: LiveRuns) -> numpy.ndarray:
        """Return the longest safe wait of each run in hours, given the run's remaining work and
        spending.
        """
        if last_resort is None or hours_left is None or spot is None:
            return numpy.full(DRAWS, math.inf)
        slower = now.work / pool.case.work_hours - 1
        # A wait for a reservation becomes shorter
        begins = numpy.minimum(now.hours, last_resort.case.wait_hours)
        hours = (
            spare_hours(config, spot, last_resort, left)
            + begins
            - now.hours
            - slower * _work_hours(last_resort)
        )
        usd = spare_usd(config, spot, last_resort, usd_left) - now.usd
        usd = usd - slower * _work_hours(last_resort) * last_resort.gang_usd_per_hour
        return numpy.where(usd >= 0, hours, -1.0)

    if spot is not None:
        runs.run_on_spot(spot, zones, spare)
    on_demand = ~runs.done
    if last_resort is not None:
        paid = start_hours(last_resort) + runs.work / pool.case.work_hours * _work_hours(
            last_resort
        )
        delay = runs.chance.uniform(0, delay_hours(config), DRAWS)
        delay += numpy.maximum(last_resort.case.wait_hours - runs.hours, 0)
        runs.hours += on_demand * (delay + paid)
        runs.usd += on_demand * paid * last_resort.gang_usd_per_hour
    runs.usd += pool.storage_usd + pool.transfer_usd
    return runs


def forecast_live(
    config: RunConfig,
    spot: Candidate | None,
    last_resort: Candidate | None,
    *,
    hours_left: float | None,
    usd_left: float,
) -> LiveForecast:
    """Simulate the job with `simulate_live`, which explains the arguments, and summarize the runs."""
    import numpy

    runs = simulate_live(config, spot, last_resort, hours_left=hours_left, usd_left=usd_left)
    met = (runs.hours <= (math.inf if hours_left is None else hours_left)) & (runs.usd <= usd_left)
    low, middle, high = numpy.quantile(runs.usd, [0.1, 0.5, 0.9])
    return LiveForecast(
        mean_usd=float(runs.usd.mean()),
        p10_usd=float(low),
        p50_usd=float(middle),
        p90_usd=float(high),
        mean_hours=float(runs.hours.mean()),
        p90_hours=float(numpy.quantile(runs.hours, 0.9)),
        on_demand_share=float((~runs.done).mean()),
        deadline_probability=None if hours_left is None else float(met.mean()),
    )


def _weights(spot: Candidate, zones: Sequence[ZoneSpells]) -> numpy.ndarray:
    """Return the posterior probability of each zone given the user's Spot losses (Poisson, equal
    priors).
    """
    import numpy

    known = spot.case.reclaims
    logs = numpy.zeros(len(zones))
    if known is not None and known.shape != PRIOR_WEIGHT:
        rates = numpy.array([zone.losses_per_hour for zone in zones])
        logs = known.shape * numpy.log(rates) - known.hours * rates
    likely = numpy.exp(logs - logs.max())
    return likely / likely.sum()


def _work_hours(last_resort: Candidate) -> float:
    return busy_hours(last_resort) - start_hours(last_resort)
