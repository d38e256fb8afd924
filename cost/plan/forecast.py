"""Forecast what finishing the remaining work in a pool takes: expected hours, interruptions, and their quantiles.

Expected values, solved together because losses lengthen the exposure:

    hours per node  = start + work × (1 + stall / τ) + interruptions × (τ / 2 + exposed + detect + restart + reload)
    interruptions   = hazard × hours
    dollars         = price × nodes × hours + storage + requests + transfer

τ is the training time between two checkpoints. An interruption falls on average into its middle (first order in
τ × hazard: Young 1974, Daly 2006). `exposed` is the time from the staging of a checkpoint until it is durable. Waits
for capacity after a reclaim count towards the deadline, but not towards the bill.

Hazard. The spot advisor's band is the share of a type's spot capacity that was reclaimed in the trailing month. Read
as the probability p of losing one instance within a month of 730 hours, it gives −ln(1 − p) / 730 per hour. The band
is an average over a month and all zones, so it is only the mean of a prior with very little weight: the history of own
jobs moves it at once (`ebbflow.cost.job_history`). The interruptions of a gang's pool come together and count once, not
once per node. Machine failures are independent, so they grow with the number of GPUs, in either market.

Quantiles come from a Monte Carlo simulation with a fixed seed. Three things vary: interruptions are Poisson arrivals
at an uncertain hazard (`GammaHazard`; the mixture is a negative binomial), each of which loses a uniform part of the
checkpoint interval plus detection, restart and reload; after a reclaim the gang waits for capacity; and the speed is
wrong by a factor. The waits were recorded in nine zones, one V100 each, in 2023, for jobs that stay in their zone.
Other types and years differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ebbflow.cost.plan.throughput import MemoryFit, Throughput
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.footprint import COMMIT_BYTES_PER_PARAMETER, ModelShape
from ebbflow.infra.reliability import GammaHazard, daly_interval_seconds

if TYPE_CHECKING:
    import numpy


HOURS_PER_MONTH = 730.0
# Middle of each of the advisor's bands; the last one is open above ("over 20 %") and counts as 25 %.
BAND_SHARE = (0.025, 0.075, 0.125, 0.175, 0.25)
# 419 unexpected interruptions in 54 days on 16,384 H100: Grattafiori et al. 2024, "The Llama 3 Herd of Models",
# section 3.3.4.
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
# Weight of the band, in observed interruptions. Of 1, 0.01 and 0.001 the last has by far the highest likelihood for
# the losses in nine zones (V100, 2023; each day given the days before): pools are reclaimed a thousand times as often
# as their band says, or hardly ever.
PRIOR_WEIGHT = 0.001


def reclaim_prior(band: int) -> GammaHazard:
    """Return the prior of the reclaim hazard of a spot pool in this band."""
    return GammaHazard.from_prior(reclaim_hazard_per_hour(band), weight=PRIOR_WEIGHT)


def reclaim_hazard_per_hour(band: int) -> float:
    """Return the reclaims per hour of a spot pool in this band. Raises IndexError for an unknown band."""
    return -math.log1p(-BAND_SHARE[band]) / HOURS_PER_MONTH


DRAWS = 1000
_SEED = 20_260_720
# Hours without capacity after each of 1,886 losses in nine zones, V100, 45.5 days from 2023-02-15 (recorded by
# skypilot-org/spot-traces 221da1a): the means of twenty equal groups, sorted.
WAIT_HOURS = (
    *(0.16, 0.16, 0.16, 0.16, 0.19, 0.23, 0.32, 0.33, 0.38, 0.43),
    *(0.54, 0.67, 0.81, 1.12, 1.47, 1.97, 2.75, 3.81, 5.52, 14.58),
)
_MOST_INTERRUPTIONS = 1e6
_WAITS_DRAWN = 64
MEAN_WAIT_HOURS = sum(WAIT_HOURS) / len(WAIT_HOURS)


@dataclass(frozen=True, kw_only=True)
class ForecastInputs:
    """Inputs of the forecast of a job in one pool, except its price.

    Attributes:
        start_hours: Duration of the first start.
        work_hours: Training and checkpoints without interruptions.
        fixed_lost_hours: Paid loss per interruption, without the redone work.
        interval_hours: Checkpoint interval; an interruption redoes a uniform part of it.
        reclaims: None for on-demand, where only machines fail.
        speed_log_deviation: Standard deviation of the log of the speed.
    """

    start_hours: float
    work_hours: float
    fixed_lost_hours: float
    interval_hours: float
    reclaims: GammaHazard | None
    failures_per_hour: float
    speed_log_deviation: float

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ForecastInputs:
        return cls(**{**data, "reclaims": data["reclaims"] and GammaHazard(**data["reclaims"])})


@dataclass(frozen=True, kw_only=True)
class ForecastQuantiles:
    """Simulated quantiles of the job's hours (waits included) and dollars, and the probability of meeting the deadline.

    deadline_probability is None without a deadline.
    """

    p50_hours: float
    p90_hours: float
    p50_usd: float
    p90_usd: float
    deadline_probability: float | None


def forecast_quantiles(
    case: ForecastInputs, *, gang_usd_per_hour: float, other_usd: float, hours_left: float | None
) -> ForecastQuantiles:
    """Simulate the job and return its quantiles.

    Args:
        other_usd: Cost that does not depend on the hours.
        hours_left: Hours to the deadline; None without one.
    """
    drawn = simulate_runs(case)
    return ForecastQuantiles(
        p50_hours=_quantile(drawn.hours, 0.5),
        p90_hours=_quantile(drawn.hours, 0.9),
        p50_usd=gang_usd_per_hour * _quantile(drawn.paid_hours, 0.5) + other_usd,
        p90_usd=gang_usd_per_hour * _quantile(drawn.paid_hours, 0.9) + other_usd,
        deadline_probability=None if hours_left is None else float((drawn.hours <= hours_left).mean()),
    )


def _quantile(draws: numpy.ndarray, share: float) -> float:
    """Return the smallest draw that at least this share of the draws does not exceed."""
    import numpy

    index = math.ceil(share * len(draws)) - 1
    return float(numpy.partition(draws, index)[index])


@dataclass(frozen=True)
class SimulatedRuns:
    """Simulated runs of one job, shape [draws]: paid hours per node, and hours including the waits."""

    paid_hours: numpy.ndarray
    hours: numpy.ndarray


@cache
def _standard_draws() -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return standard normal draws: stratified ones for the speed, independent ones for the losses."""
    from statistics import NormalDist

    import numpy

    chance = numpy.random.default_rng(_SEED)
    normal = NormalDist()
    strata = numpy.array([normal.inv_cdf((index + 0.5) / DRAWS) for index in range(DRAWS)])
    return chance.permutation(strata), chance.standard_normal(DRAWS)


def simulate_runs(case: ForecastInputs) -> SimulatedRuns:
    """Simulate `DRAWS` runs of the job. The same inputs give the same draws."""
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
    return SimulatedRuns(paid_hours=paid, hours=paid + _waits(chance, reclaims))


def _counts(
    chance: numpy.random.Generator, undisturbed: numpy.ndarray, case: ForecastInputs, belief: GammaHazard | None
) -> numpy.ndarray:
    """Draw reclaims: Poisson at a hazard drawn from its distribution, over a time that the reclaims lengthen."""
    import numpy

    if belief is None:
        return numpy.zeros(len(undisturbed), dtype=numpy.int64)
    hazard = chance.gamma(belief.shape, 1.0 / belief.hours, size=len(undisturbed))
    each = case.fixed_lost_hours + case.interval_hours / 2
    # A hazard that leaves less than a tenth of the time for work: cap the stretch at ten times.
    stretch = 1.0 / numpy.maximum(0.1, 1.0 - hazard * each)
    return chance.poisson(numpy.minimum(hazard * undisturbed * stretch, _MOST_INTERRUPTIONS))


def _waits(chance: numpy.random.Generator, reclaims: numpy.ndarray) -> numpy.ndarray:
    """Draw the sum of the waits after each draw's reclaims. Beyond 64 reclaims, 64 drawn waits are scaled up."""
    import numpy

    some = numpy.minimum(reclaims, _WAITS_DRAWN)
    if not some.any():
        return numpy.zeros(len(reclaims))
    drawn = chance.choice(numpy.array(WAIT_HOURS), size=int(some.sum()))
    sums = numpy.bincount(numpy.repeat(numpy.arange(len(some)), some), weights=drawn, minlength=len(some))
    return sums * reclaims / numpy.maximum(some, 1)


# An agent declares a peer lost after this time without a heartbeat (training/launch).
DETECT_SECONDS = 20.0
# Staging to host memory reaches about a third of a memcpy's 6 GB/s; planning the checkpoint comes on top.
STAGING_BYTES_PER_SECOND = 2e9
SAVE_OVERHEAD_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class RemainingWork:
    """Remaining work of the job on a gang of one type and size, in any place.

    Attributes:
        samples: Samples per rank and micro-batch.
        save_seconds: Stall of training per checkpoint.
        carry_seconds: Time until a checkpoint is durable, or restored.
        restores_first: The job resumes from a commit.
    """

    steps: int
    samples: int
    fit: MemoryFit
    speed: Throughput
    save_seconds: float
    carry_seconds: float
    commit_bytes: float
    token_bytes: float
    restores_first: bool

    @property
    def seconds(self) -> float:
        return self.steps * self.speed.step_seconds


@dataclass(frozen=True, kw_only=True)
class PoolHazard:
    """Hazard of a gang in one pool. reclaims is None for on-demand; kind says how the hazard is known."""

    reclaims: GammaHazard | None
    failures_per_hour: float
    kind: str

    @property
    def per_hour(self) -> float:
        return self.failures_per_hour + (0.0 if self.reclaims is None else self.reclaims.per_hour)


@dataclass(frozen=True, kw_only=True)
class ExpectedRun:
    """Expected run of the job at one hazard: interruptions and hours, without money. paid_hours is per node."""

    case: ForecastInputs
    interval_seconds: float
    interruptions: float
    paid_hours: float
    expected_hours: float


def save_seconds(shape: ModelShape, ranks: int) -> float:
    return SAVE_OVERHEAD_SECONDS + COMMIT_BYTES_PER_PARAMETER * shape.parameters / ranks / STAGING_BYTES_PER_SECOND


def expect_run(config: RunConfig, work: RemainingWork, hazard: PoolHazard) -> ExpectedRun | None:
    """Solve the equations of the module. Return None if interruptions undo work faster than it is done."""
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
    )
    return ExpectedRun(
        case=case,
        interval_seconds=interval,
        interruptions=hazard.per_hour * paid,
        paid_hours=paid,
        expected_hours=paid + reclaims * MEAN_WAIT_HOURS,
    )


def interval_seconds(config: RunConfig, work: RemainingWork, hazard_per_hour: float) -> float:
    """Return the training time between checkpoints by `checkpoint.interval`: at least one step, at most all work."""
    saves, step = config.checkpoint, work.speed.step_seconds
    wanted = {
        "steps": saves.interval_steps * step,
        "seconds": saves.interval_seconds,
        "auto": daly_interval_seconds(work.save_seconds, hazard_per_hour),
    }[saves.interval]
    return max(step, min(wanted, work.seconds))
