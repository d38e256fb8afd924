"""Forecast the hours and the interruptions of a job's remaining work in one pool, as means.

Repeating lost work takes time in which further interruptions occur, so the first two equations are
solved together:

    hours per node  = start + work × (1 + stall / τ) + interruptions × (τ / 2 + exposed + detect + restart + reload)
    interruptions   = hazard × hours
    dollars         = price × nodes × hours + storage + requests + transfer

τ is the training time between two checkpoints, and `stall` the time for which a checkpoint stops
training. An interruption undoes τ / 2 of training on average (first order in τ × hazard: Young
1974, Daly 2006). It also costs `exposed`, the time from the staging of a checkpoint until it is
durable, and the times to detect the failure, to restart the job and to reload the checkpoint. Waits
for capacity after a reclaim count towards the deadline, but not towards the bill.

Hazard: the expected interruptions per hour, from `ebbflow.cost.plan.spot_belief`. A pool is
reclaimed as a whole, so the hazard does not grow with the number of nodes. Machine failures are
independent, so their rate grows with the number of GPUs, in either market.

These means order the pools. The best of them are then simulated (`live_forecast`), with the same
belief, and the plan prints what the simulation gives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.footprint import ModelShape, commit_bytes
from ebbflow.core.reliability import daly_interval_seconds
from ebbflow.cost.plan.spot_belief import SpotEvidence, believe
from ebbflow.cost.plan.throughput import MemoryFit, Throughput

# 419 unexpected interruptions in 54 days on 16,384 H100: Grattafiori et al. 2024, "The Llama 3 Herd
# of Models", section 3.3.4.
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
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
    # Own jobs' observations of a Spot pool; None for on-demand, where only machines fail
    evidence: SpotEvidence | None
    failures_per_hour: float  # expected machine failures per hour of all nodes
    speed_log_deviation: float  # standard deviation of the log of the speed
    wait_hours: float = 0.0  # hours until a reservation begins
    # probability that the first start on Spot is granted at once, by a Spot placement score; None
    # if unknown: then the recorded zones say it
    start_chance: float | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ForecastInputs:
        """Read the result of `asdict`. Plans of earlier versions have other fields for the
        observations, which are left out.
        """
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        evidence = data.get("evidence")
        if evidence is not None:
            evidence = SpotEvidence.from_json(evidence)
        return cls(**{**known, "evidence": evidence})


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Summary of the simulated runs of a job that begins in a given pool.

    Dollars include storage and transfer. Hours include waits for capacity.
    """

    compute_usd: float  # mean, without storage and transfer
    mean_usd: float
    p10_usd: float
    p50_usd: float
    p90_usd: float
    mean_hours: float
    p10_hours: float
    p50_hours: float
    p90_hours: float
    interruptions: float  # mean number of losses of Spot machines
    on_demand_share: float  # share of the runs that ended on demand
    # share of the runs that met deadline and budget; None without a deadline
    deadline_probability: float | None

    @classmethod
    def from_json(cls, data: dict[str, Any] | None) -> Outlook | None:
        """Read the result of `asdict`. Return None if an earlier version wrote it with fewer
        fields.
        """
        if data is None or not set(cls.__dataclass_fields__) <= set(data):
            return None
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})


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

    evidence: SpotEvidence | None  # own jobs' observations of a Spot pool; None for on-demand
    failures_per_hour: float  # expected machine failures per hour of all nodes
    kind: str  # source of the estimate, as text

    @property
    def reclaims_per_hour(self) -> float:
        if self.evidence is None:
            return 0.0
        return believe(self.evidence).hazard_per_hour

    @property
    def wait_hours(self) -> float:
        """Expected hours without capacity after a reclaim."""
        if self.evidence is None:
            return 0.0
        return believe(self.evidence).wait_hours

    @property
    def per_hour(self) -> float:
        return self.failures_per_hour + self.reclaims_per_hour


@dataclass(frozen=True, kw_only=True)
class ExpectedRun:
    """Expected hours and interruptions of a job's remaining work in a pool with a given hazard."""

    case: ForecastInputs  # inputs of the simulation
    interval_seconds: float  # training time between two checkpoints
    interruptions: float  # expected number of interruptions
    paid_hours: float  # expected paid hours per node
    expected_hours: float  # `paid_hours` plus expected waits for capacity


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
    reclaims = paid * hazard.reclaims_per_hour
    case = ForecastInputs(
        start_hours=start,
        work_hours=undisturbed,
        fixed_lost_hours=fixed_lost,
        interval_hours=interval / 3600,
        evidence=hazard.evidence,
        failures_per_hour=hazard.failures_per_hour,
        speed_log_deviation=work.speed.log_deviation,
    )
    return ExpectedRun(
        case=case,
        interval_seconds=interval,
        interruptions=hazard.per_hour * paid,
        paid_hours=paid,
        expected_hours=paid + reclaims * hazard.wait_hours,
    )


def delay_start(
    expected: ExpectedRun, *, wait_hours: float = 0.0, start_chance: float | None = None
) -> ExpectedRun:
    """Return the run with a delayed first start.

    The job waits `wait_hours` for a reservation. With probability 1 − `start_chance` it also waits
    for Spot capacity.
    """
    evidence = expected.case.evidence
    if start_chance is None or evidence is None:
        refused_hours = 0.0
    else:
        refused_hours = (1 - start_chance) * believe(evidence).wait_hours
    return replace(
        expected,
        case=replace(expected.case, wait_hours=wait_hours, start_chance=start_chance),
        expected_hours=expected.expected_hours + wait_hours + refused_hours,
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
