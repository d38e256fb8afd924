"""Forecast the hours and the interruptions of a job's remaining work in one pool, as means and as
quantiles.

Means: repeating lost work takes time in which further interruptions occur, so the first two
equations are solved together:

    hours per node  = start + work × (1 + stall / τ) + interruptions × (τ / 2 + exposed + detect + restart + reload)
    interruptions   = hazard × hours
    dollars         = price × nodes × hours + storage + requests + transfer

τ is the training time between two checkpoints, and `stall` the time for which a checkpoint stops
training. An interruption undoes τ / 2 of training on average (first order in τ × hazard: Young
1974, Daly 2006). It also costs `exposed`, the time from the staging of a checkpoint until it is
durable, and the times to detect the failure, to restart the job and to reload the checkpoint. Waits
for capacity after a reclaim count towards the deadline, but not towards the bill.

Hazard: the expected interruptions per hour. The AWS spot advisor publishes bands for the share of a
type's spot capacity that was reclaimed in the past month. If this share is taken as the probability
p of losing one instance within a month of 730 hours, the hazard is −ln(1 − p) / 730 per hour. The
band is an average over a month and all zones. It is therefore only the mean of a prior with very
little weight, which measurements of the user's own jobs soon outweigh (`ebbflow.cost.job_history`).
A pool is reclaimed as a whole, so the hazard does not grow with the number of nodes. Machine
failures are independent, so their rate grows with the number of GPUs, in either market.

Quantiles come from a Monte Carlo simulation with a fixed seed, in which three things vary:

- Interruptions are Poisson arrivals at an uncertain hazard (`GammaHazard`; the mixture is a
  negative binomial). Each undoes a uniformly distributed part of the checkpoint interval and costs
  the fixed times above.
- After each reclaim the job waits for capacity. The waits were recorded in 2023 in nine zones, with
  one V100 each, for jobs that stay in their zone. Other instance types and years have other waits.
- The speed differs from its estimate by a lognormal factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.footprint import ModelShape, commit_bytes
from ebbflow.core.reliability import GammaHazard, daly_interval_seconds
from ebbflow.cost.job_history import WAIT_HOURS
from ebbflow.cost.plan.throughput import MemoryFit, Throughput

if TYPE_CHECKING:
    import numpy

HOURS_PER_MONTH = 730.0
# Middle of each of the advisor's bands; the last one is open above ("over 20 %") and counts as 25
# %.
BAND_SHARE = (0.025, 0.075, 0.125, 0.175, 0.25)
# 419 unexpected interruptions in 54 days on 16,384 H100: Grattafiori et al. 2024, "The Llama 3 Herd
# of Models", section 3.3.4.
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
# Weight of the band as a number of observed interruptions. Of 1, 0.01 and 0.001, the last has by
# far the highest likelihood for the reclaims in nine zones (V100, 2023; each day given the days
# before): pools are reclaimed a thousand times as often as their band suggests, or hardly ever.
PRIOR_WEIGHT = 0.001

DRAWS = 1000
_SEED = 20_260_720
_MOST_INTERRUPTIONS = 1e6
_WAITS_DRAWN = 64

# An agent declares a peer lost after this time without a heartbeat (training/launch).
DETECT_SECONDS = 20.0
# Staging to host memory reaches about a third of a memcpy's 6 GB/s; planning the checkpoint comes
# on top.
STAGING_BYTES_PER_SECOND = 2e9
SAVE_OVERHEAD_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class ForecastInputs:
    """Inputs of the forecast of a job in one pool, except prices."""

    start_hours: float  # paid hours of the first start
    work_hours: float  # hours of training and checkpoints without any interruption
    # Paid hours that each interruption costs in addition to the training that must be repeated
    fixed_lost_hours: float
    # training time between checkpoints. Each interruption repeats a uniformly distributed part of
    # it.
    interval_hours: float
    # Distribution of the reclaims per hour; None for on-demand, where only machines fail
    reclaims: GammaHazard | None
    failures_per_hour: float  # expected machine failures per hour of all nodes
    speed_log_deviation: float  # standard deviation of the log of the speed
    wait_hours: float = 0.0  # hours until a reservation begins
    # probability that the first start on Spot is granted at once; None if unknown, which counts as
    # 1
    start_chance: float | None = None
    # possible waits for capacity after a reclaim in hours, all equally likely; None means
    # `WAIT_HOURS`
    waits: tuple[float, ...] | None = None

    @property
    def possible_waits(self) -> tuple[float, ...]:
        if self.waits is None:
            return WAIT_HOURS
        return self.waits

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ForecastInputs:
        known = {"reclaims": data["reclaims"] and GammaHazard(**data["reclaims"])}
        return cls(**{**data, **known, "waits": data.get("waits") and tuple(data["waits"])})


@dataclass(frozen=True, kw_only=True)
class ForecastQuantiles:
    """Median and 90 % quantile of the simulated hours (including waits for capacity) and dollars."""

    p50_hours: float
    p90_hours: float
    p50_usd: float
    p90_usd: float
    # Share of the simulated runs that meet the deadline; None without a deadline
    deadline_probability: float | None


@dataclass(frozen=True)
class SimulatedRuns:
    """Simulated runs of one job."""

    paid_hours: numpy.ndarray  # paid hours per node, [draws]
    hours: numpy.ndarray  # paid hours plus unpaid waits for capacity, [draws]


@dataclass(frozen=True, kw_only=True)
class RemainingWork:
    """A job's remaining work on one instance type and number of nodes, in any region and zone."""

    steps: int  # remaining optimizer steps
    samples: int  # samples per rank and micro-batch
    fit: MemoryFit  # memory that the job needs per GPU, by kind of content
    speed: Throughput
    save_seconds: float  # time for which one checkpoint stops training
    carry_seconds: (
        float  # time to upload one rank's share of a checkpoint to the store, or to download it
    )
    commit_bytes: float  # size of one checkpoint of all ranks
    token_bytes: float  # upper bound on the bytes of tokens that one node reads; 0 if unknown
    restores_first: bool  # whether the job begins by restoring a commit

    @property
    def seconds(self) -> float:
        return self.steps * self.speed.step_seconds


@dataclass(frozen=True, kw_only=True)
class PoolHazard:
    """Expected interruptions per hour of a job in one pool."""

    reclaims: GammaHazard | None  # distribution of the reclaims per hour; None for on-demand
    failures_per_hour: float  # expected machine failures per hour of all nodes
    kind: str  # source of the estimate, as text
    # Possible waits for capacity after a reclaim, as in `ForecastInputs`
    waits: tuple[float, ...] | None = None

    @property
    def per_hour(self) -> float:
        return self.failures_per_hour + (0.0 if self.reclaims is None else self.reclaims.per_hour)


@dataclass(frozen=True, kw_only=True)
class ExpectedRun:
    """Expected hours and interruptions of a job's remaining work in a pool with a given hazard."""

    case: ForecastInputs  # inputs of the Monte Carlo forecast
    interval_seconds: float  # training time between two checkpoints
    interruptions: float  # expected number of interruptions
    paid_hours: float  # expected paid hours per node
    expected_hours: float  # `paid_hours` plus expected waits for capacity


def reclaim_prior(band: int) -> GammaHazard:
    """Return the prior distribution of a spot pool's reclaims per hour, given its spot advisor band
    (0 to 4).
    """
    return GammaHazard.from_prior(reclaim_hazard_per_hour(band), weight=PRIOR_WEIGHT)


def reclaim_hazard_per_hour(band: int) -> float:
    """Convert a spot advisor band (0 to 4) to expected reclaims per hour.

    Raises IndexError for an unknown band.
    """
    return -math.log1p(-BAND_SHARE[band]) / HOURS_PER_MONTH


def forecast_quantiles(
    case: ForecastInputs, *, gang_usd_per_hour: float, other_usd: float, hours_left: float | None
) -> ForecastQuantiles:
    """Simulate the remaining work of a job in one pool, and return the quantiles of its hours and
    dollars.

    Args:
        gang_usd_per_hour: Price of all nodes.
        other_usd: Cost of storage and transfer, the same in every simulated run.
        hours_left: Hours until the deadline; None without a deadline.
    """
    drawn = simulate_runs(case)
    return ForecastQuantiles(
        p50_hours=_quantile(drawn.hours, 0.5),
        p90_hours=_quantile(drawn.hours, 0.9),
        p50_usd=gang_usd_per_hour * _quantile(drawn.paid_hours, 0.5) + other_usd,
        p90_usd=gang_usd_per_hour * _quantile(drawn.paid_hours, 0.9) + other_usd,
        deadline_probability=None
        if hours_left is None
        else float((drawn.hours <= hours_left).mean()),
    )


def simulate_runs(case: ForecastInputs) -> SimulatedRuns:
    """Simulate `DRAWS` runs of a job.

    Equal inputs give equal results, because the seed is fixed.
    """
    import numpy

    speeds, losses = _standard_draws()
    # A lognormal factor with mean 1 keeps the expected hours of the plan.
    deviation = case.speed_log_deviation
    slower = numpy.exp(deviation * speeds - deviation**2 / 2)
    undisturbed = case.start_hours + case.work_hours * slower
    chance = numpy.random.default_rng(_SEED + 1)
    reclaims = _counts(chance, undisturbed, case, case.reclaims)
    failures = chance.poisson(case.failures_per_hour * undisturbed)
    number = reclaims + failures
    mean = case.fixed_lost_hours + case.interval_hours / 2
    spread = case.interval_hours / math.sqrt(12.0)
    lost = number * mean + numpy.sqrt(number) * spread * losses
    paid = undisturbed + numpy.maximum(lost, number * case.fixed_lost_hours)
    hours = paid + case.wait_hours + _waits(chance, reclaims, case.possible_waits)
    if case.start_chance is not None:
        refused = chance.random(DRAWS) >= case.start_chance
        hours += refused * chance.choice(numpy.array(case.possible_waits), size=DRAWS)
    return SimulatedRuns(paid_hours=paid, hours=hours)


def save_seconds(config: RunConfig, shape: ModelShape, ranks: int) -> float:
    staged = commit_bytes(config, shape) / ranks
    return SAVE_OVERHEAD_SECONDS + staged / STAGING_BYTES_PER_SECOND


def expect_run(config: RunConfig, work: RemainingWork, hazard: PoolHazard) -> ExpectedRun | None:
    """Compute the expected hours and interruptions with the equations in this module's docstring.

    Returns:
        None if the job would never finish, because interruptions undo work faster than it is done.
    """
    interval = interval_seconds(config, work, hazard.per_hour)
    undisturbed = work.seconds * (1 + work.save_seconds / interval) / 3600
    start_seconds = config.cluster.expected_start_seconds
    fixed_lost = (work.carry_seconds + DETECT_SECONDS + start_seconds + work.carry_seconds) / 3600
    each = interval / 2 / 3600 + fixed_lost
    if hazard.per_hour * each >= 1:
        return None
    start = (start_seconds + (work.carry_seconds if work.restores_first else 0.0)) / 3600
    paid = (start + undisturbed) / (1 - hazard.per_hour * each)
    reclaims = paid * (hazard.reclaims.per_hour if hazard.reclaims else 0.0)
    case = ForecastInputs(
        start_hours=start,
        work_hours=undisturbed,
        fixed_lost_hours=fixed_lost,
        interval_hours=interval / 3600,
        reclaims=hazard.reclaims,
        failures_per_hour=hazard.failures_per_hour,
        speed_log_deviation=work.speed.log_deviation,
        waits=hazard.waits,
    )
    return ExpectedRun(
        case=case,
        interval_seconds=interval,
        interruptions=hazard.per_hour * paid,
        paid_hours=paid,
        expected_hours=paid + reclaims * fmean(case.possible_waits),
    )


def delay_start(
    expected: ExpectedRun, *, wait_hours: float = 0.0, start_chance: float | None = None
) -> ExpectedRun:
    """Return the run with a delayed first start.

    The job waits `wait_hours` for a reservation. With probability 1 − `start_chance` it also waits
    for Spot capacity.
    """
    if start_chance is None:
        refused = 0.0
    else:
        refused = 1 - start_chance
    return replace(
        expected,
        case=replace(expected.case, wait_hours=wait_hours, start_chance=start_chance),
        expected_hours=expected.expected_hours
        + wait_hours
        + refused * fmean(expected.case.possible_waits),
    )


def interval_seconds(config: RunConfig, work: RemainingWork, hazard_per_hour: float) -> float:
    """Return the training time between two checkpoints for the configured `checkpoint.interval`.

    The result is at least one step and at most all remaining work.
    """
    saves = config.checkpoint
    step = work.speed.step_seconds
    wanted = {
        "steps": saves.interval_steps * step,
        "seconds": saves.interval_seconds,
        "auto": daly_interval_seconds(work.save_seconds, hazard_per_hour),
    }[saves.interval]
    return max(step, min(wanted, work.seconds))


def _quantile(draws: numpy.ndarray, share: float) -> float:
    """Return the `share` quantile of the draws: at least this share of the draws are less than or
    equal to it.
    """
    import numpy

    index = math.ceil(share * len(draws)) - 1
    return float(numpy.partition(draws, index)[index])


@cache
def _standard_draws() -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return standard normal draws for the speed and for the lost time: two arrays [draws].

    The draws for the speed are stratified; those for the lost time are independent.
    """
    from statistics import NormalDist

    import numpy

    chance = numpy.random.default_rng(_SEED)
    normal = NormalDist()
    strata = numpy.array([normal.inv_cdf((index + 0.5) / DRAWS) for index in range(DRAWS)])
    return chance.permutation(strata), chance.standard_normal(DRAWS)


def _counts(
    chance: numpy.random.Generator,
    undisturbed: numpy.ndarray,
    case: ForecastInputs,
    belief: GammaHazard | None,
) -> numpy.ndarray:
    """Draw the number of reclaims of each simulated run, [draws].

    Each run draws a hazard from `belief`, and then a Poisson number of reclaims. Reclaims make the
    run longer, and more reclaims occur in the added time.

    Args:
        undisturbed: Hours of each run without interruptions, [draws].
        belief: Distribution of the reclaims per hour; None for on-demand, which has no reclaims.
    """
    import numpy

    if belief is None:
        return numpy.zeros(len(undisturbed), dtype=numpy.int64)
    hazard = chance.gamma(belief.shape, 1.0 / belief.hours, size=len(undisturbed))
    each = case.fixed_lost_hours + case.interval_hours / 2
    # Where interruptions leave less than a tenth of the time for work, count the run as ten times
    # as long.
    stretch = 1.0 / numpy.maximum(0.1, 1.0 - hazard * each)
    return chance.poisson(numpy.minimum(hazard * undisturbed * stretch, _MOST_INTERRUPTIONS))


def _waits(
    chance: numpy.random.Generator, reclaims: numpy.ndarray, waits: Sequence[float]
) -> numpy.ndarray:
    """Draw the hours that each simulated run waits for capacity after its reclaims, [draws].

    For a run with more than 64 reclaims, 64 waits are drawn, and their sum is scaled up.
    """
    import numpy

    some = numpy.minimum(reclaims, _WAITS_DRAWN)
    if not some.any():
        return numpy.zeros(len(reclaims))
    drawn = chance.choice(numpy.array(waits), size=int(some.sum()))
    sums = numpy.bincount(
        numpy.repeat(numpy.arange(len(some)), some), weights=drawn, minlength=len(some)
    )
    return sums * reclaims / numpy.maximum(some, 1)
