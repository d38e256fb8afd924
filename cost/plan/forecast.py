"""Forecast

The advisor's band is the share of a type's spot capacity that was reclaimed in the trailing month. Reading it as the
chance p that one instance is lost within a month of 730 hours gives the hazard −ln(1 − p) / 730 per hour. It is an
average over a month and all zones: a pool that is running dry is far worse than its band. So the band is only the mean
of a prior with very little weight, and what own jobs saw of a pool moves it at once (`ebbflow.cost.job_history`).

A gang lies in one pool, whose interruptions come together: it counts once, not once per node. Failures of machines
are independent, so they grow with the GPUs, on either market.

Three things vary. Interruptions come as Poisson arrivals at a hazard that is itself only believed (`GammaHazard`: the
mixture is a negative binomial). Each takes a uniform part of an interval between saves, and what detecting, starting
and reloading take. After a reclaim the gang waits for capacity, unpaid. And the speed is wrong by a factor.

The waits are those of nine zones, one V100 each, as recorded in 2023: how long a zone that had just lost its capacity
was without. Other types and years differ; a job that may move to another pool or to on-demand waits less.

    hours per node  = start + work × (1 + stall / τ) + interruptions × (τ / 2 + exposed + detect + restart + reload)
    interruptions   = hazard × hours                                  (solved together: losses lengthen the exposure)
    dollars         = price × nodes × hours + storage + requests + transfer

τ is the training time between two saves; an interruption falls on average into its middle (first order in τ × hazard:
Young 1974, Daly 2006). exposed: from the staging of a save until it is durable. Waits for capacity after a reclaim
count towards the deadline, not the bill.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ebbflow.cost.plan.throughput import MemoryFit, Throughput
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.footprint import COMMIT_BYTES_PER_PARAMETER, ModelShape
from ebbflow.infra.reliability import GammaHazard, daly_interval_seconds

if TYPE_CHECKING:
    import numpy


HOURS_PER_MONTH = 730.0
# Middle of each band of the advisor; the last band is open above ("over 20 %") and taken as 25 %.
BAND_SHARE = (0.025, 0.075, 0.125, 0.175, 0.25)
# 419 unexpected interruptions in 54 days on 16,384 H100: Grattafiori et al. 2024, "The Llama 3 Herd of Models",
# section 3.3.4.
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
# How many interruptions seen the band is worth. Of 1, 0.01 and 0.001 the last makes the losses in nine zones (V100,
# 2023; on another day each, given those before) the likeliest by far: pools are reclaimed a thousand times as often as
# their band says, or hardly ever.
PRIOR_WEIGHT = 0.001


def reclaim_prior(band: int) -> GammaHazard:
    """What is believed of the reclaims of a spot pool of this band before any job has been there."""
    return GammaHazard.from_prior(reclaim_hazard_per_hour(band), weight=PRIOR_WEIGHT)


def reclaim_hazard_per_hour(band: int) -> float:
    """Interruptions per hour of a spot pool of this advisor band. Raises IndexError for an unknown band."""
    return -math.log1p(-BAND_SHARE[band]) / HOURS_PER_MONTH


def gang_hazard_per_hour(market: str, band: int | None, gpus: int) -> float | None:
    """Expected interruptions per hour of a gang of `gpus` GPUs in one pool; None when the band is not known."""
    failures = FAILURES_PER_GPU_HOUR * gpus
    if market != "spot":
        return failures
    return None if band is None else reclaim_hazard_per_hour(band) + failures


DRAWS = 1000
_SEED = 20_260_720
# Hours without capacity after each of 1,886 losses in nine zones, V100, 45.5 days from 2023-02-15 (recorded by
# skypilot-org/spot-traces 221da1a): sorted, the mean of each twentieth.
WAIT_HOURS = (
    *(0.16, 0.16, 0.16, 0.16, 0.19, 0.23, 0.32, 0.33, 0.38, 0.43),
    *(0.54, 0.67, 0.81, 1.12, 1.47, 1.97, 2.75, 3.81, 5.52, 14.58),
)
_MOST_INTERRUPTIONS = 1e6
_WAITS_DRAWN = 64
MEAN_WAIT_HOURS = sum(WAIT_HOURS) / len(WAIT_HOURS)


@dataclass(frozen=True, kw_only=True)
class ForecastInputs:
    """What the course of a job in one pool depends on, but its price.

    start_hours: of the first start. work_hours: training and saves, undisturbed. fixed_lost_hours: of each
    interruption, paid; interval_hours: the part of it that is uniform. reclaims: None on-demand, where only machines
    fail. speed_log_deviation: of the factor by which the speed is wrong.
    """

    start_hours: float
    work_hours: float
    fixed_lost_hours: float
    interval_hours: float
    reclaims: GammaHazard | None
    failures_per_hour: float
    speed_log_deviation: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ForecastInputs:
        return cls(**{**data, "reclaims": data["reclaims"] and GammaHazard(**data["reclaims"])})


@dataclass(frozen=True, kw_only=True)
class ForecastQuantiles:
    """Quantiles of the job's hours, waits included, and of its dollars; deadline_probability: of being done in time,
    None without a deadline. Simulated.
    """

    p50_hours: float
    p90_hours: float
    p50_usd: float
    p90_usd: float
    deadline_probability: float | None


def forecast_quantiles(
    case: ForecastInputs, *, gang_usd_per_hour: float, other_usd: float, hours_left: float | None
) -> ForecastQuantiles:
    """other_usd: what does not depend on the hours. hours_left: to the deadline."""
    drawn = simulate_runs(case)
    return ForecastQuantiles(
        p50_hours=_quantile(drawn.hours, 0.5),
        p90_hours=_quantile(drawn.hours, 0.9),
        p50_usd=gang_usd_per_hour * _quantile(drawn.paid_hours, 0.5) + other_usd,
        p90_usd=gang_usd_per_hour * _quantile(drawn.paid_hours, 0.9) + other_usd,
        deadline_probability=None if hours_left is None else float((drawn.hours <= hours_left).mean()),
    )


def _quantile(draws: numpy.ndarray, share: float) -> float:
    """The least of the draws that so large a share of them does not exceed."""
    import numpy

    index = math.ceil(share * len(draws)) - 1
    return float(numpy.partition(draws, index)[index])


@dataclass(frozen=True)
class SimulatedRuns:
    """Draws of the same jobs: paid hours per node, and hours with the waits."""

    paid_hours: numpy.ndarray
    hours: numpy.ndarray


@cache
def _standard_draws() -> tuple[numpy.ndarray, numpy.ndarray]:
    """For the speed, one of each stratum of a standard normal distribution; for the losses, normal draws."""
    from statistics import NormalDist

    import numpy

    chance = numpy.random.default_rng(_SEED)
    normal = NormalDist()
    strata = numpy.array([normal.inv_cdf((index + 0.5) / DRAWS) for index in range(DRAWS)])
    return chance.permutation(strata), chance.standard_normal(DRAWS)


def simulate_runs(case: ForecastInputs) -> SimulatedRuns:
    """`DRAWS` courses of the job. Pure: the same case gives the same draws."""
    import numpy

    speeds, losses = _standard_draws()
    # A lognormal factor with mean 1, so that the expected hours are the ones that the plan prints.
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
    """Reclaims of each draw: Poisson at a hazard drawn from the belief, over a time that they make longer."""
    import numpy

    if belief is None:
        return numpy.zeros(len(undisturbed), dtype=numpy.int64)
    hazard = chance.gamma(belief.shape, 1.0 / belief.hours, size=len(undisturbed))
    each = case.fixed_lost_hours + case.interval_hours / 2
    # At a hazard that leaves less than a tenth of the time for work the job will not end: ten times is late enough.
    stretch = 1.0 / numpy.maximum(0.1, 1.0 - hazard * each)
    return chance.poisson(numpy.minimum(hazard * undisturbed * stretch, _MOST_INTERRUPTIONS))


def _waits(chance: numpy.random.Generator, reclaims: numpy.ndarray) -> numpy.ndarray:
    """Sum of so many recorded waits, for each draw; of a great many, some stand for all."""
    import numpy

    some = numpy.minimum(reclaims, _WAITS_DRAWN)
    if not some.any():
        return numpy.zeros(len(reclaims))
    drawn = chance.choice(numpy.array(WAIT_HOURS), size=int(some.sum()))
    sums = numpy.bincount(numpy.repeat(numpy.arange(len(some)), some), weights=drawn, minlength=len(some))
    return sums * reclaims / numpy.maximum(some, 1)


# After so much silence an agent takes a peer for lost (training/launch/transport.py).
DETECT_SECONDS = 20.0
# A save stages to host memory at about a third of a memcpy's 6 GB/s, plus planning.
STAGING_BYTES_PER_SECOND = 2e9
SAVE_OVERHEAD_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class RemainingWork:
    """What the job needs on gangs of a type and size, wherever they lie. steps: those that remain.

    save_seconds: training stands still per save. carry_seconds: until a save is durable, or restored.
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
    """Of a gang in one pool. reclaims: None on-demand. kind: in words."""

    reclaims: GammaHazard | None
    failures_per_hour: float
    kind: str

    @property
    def per_hour(self) -> float:
        return self.failures_per_hour + (0.0 if self.reclaims is None else self.reclaims.per_hour)


@dataclass(frozen=True, kw_only=True)
class ExpectedRun:
    """The expected course of the job at a hazard: all of a candidate but money. paid_hours: of each node."""

    case: ForecastInputs
    interval_seconds: float
    interruptions: float
    paid_hours: float
    expected_hours: float


def save_seconds(shape: ModelShape, ranks: int) -> float:
    return SAVE_OVERHEAD_SECONDS + COMMIT_BYTES_PER_PARAMETER * shape.parameters / ranks / STAGING_BYTES_PER_SECOND


def machine_failures_per_hour(ranks: int) -> float:
    return FAILURES_PER_GPU_HOUR * ranks


def expect_run(config: RunConfig, work: RemainingWork, hazard: PoolHazard) -> ExpectedRun | None:
    """None: interruptions come faster than work gets done, so that the job would not end."""
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
    """Training time between saves as `checkpoint.interval` has it; at most all the work, at least one step."""
    saves, step = config.checkpoint, work.speed.step_seconds
    wanted = {
        "steps": saves.interval_steps * step,
        "seconds": saves.interval_seconds,
        "auto": daly_interval_seconds(work.save_seconds, hazard_per_hour),
    }[saves.interval]
    return max(step, min(wanted, work.seconds))
