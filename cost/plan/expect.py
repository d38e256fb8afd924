"""What finishing the remaining work in a pool is expected to take: hours, interruptions, dollars.

    hours per node  = start + work × (1 + stall / τ) + interruptions × (τ / 2 + exposed + detect + restart + reload)
    interruptions   = hazard × hours                                  (solved together: losses lengthen the exposure)
    dollars         = price × nodes × hours + storage + requests + transfer

τ is the training time between two saves; an interruption falls on average into its middle (first order in τ × hazard:
Young 1974, Daly 2006). exposed: from the staging of a save until it is durable. Waits for capacity after a reclaim
count towards the deadline, not the bill.
"""

from __future__ import annotations

from dataclasses import dataclass

from ebbflow.cost.catalogue import InstanceType
from ebbflow.cost.plan.fit import Fit
from ebbflow.cost.plan.outlook import FAILURES_PER_GPU_HOUR, MEAN_WAIT_HOURS, Case
from ebbflow.cost.plan.pools import Candidate, Pool
from ebbflow.cost.plan.throughput import Throughput
from ebbflow.cost.prices.quote import Quote
from ebbflow.cost.rates import Bill, Rates, Usage, other_costs
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.footprint import COMMIT_BYTES_PER_PARAMETER
from ebbflow.infra.model_shape import ModelShape
from ebbflow.infra.reliability import GammaHazard, daly_interval_seconds

# After so much silence an agent takes a peer for lost (training/launch/channel.py).
DETECT_SECONDS = 20.0
# A save stages to host memory at about a third of a memcpy's 6 GB/s, plus planning.
STAGING_BYTES_PER_SECOND = 2e9
SAVE_OVERHEAD_SECONDS = 0.05
# Of one rank to an object store and back: measured once, 1 GiB from shared memory to Swift on the same machine (361
# MiB/s); the node's network, shared by its ranks, may allow less.
TRANSFER_BYTES_PER_SECOND = 361 * 2**20
NETWORK_EFFICIENCY = 0.7


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the job needs on gangs of a type and size, wherever they lie. steps: those that remain.

    save_seconds: training stands still per save. carry_seconds: until a save is durable, or restored.
    """

    steps: int
    samples: int
    fit: Fit
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
class Hazard:
    """Of a gang in one pool. reclaims: None on-demand. kind: in words."""

    reclaims: GammaHazard | None
    failures_per_hour: float
    kind: str

    @property
    def per_hour(self) -> float:
        return self.failures_per_hour + (0.0 if self.reclaims is None else self.reclaims.per_hour)


@dataclass(frozen=True, kw_only=True)
class Course:
    """The expected course of the job at a hazard: all of a candidate but money. paid_hours: of each node."""

    case: Case
    interval_seconds: float
    interruptions: float
    paid_hours: float
    expected_hours: float


def save_seconds(shape: ModelShape, ranks: int) -> float:
    return SAVE_OVERHEAD_SECONDS + COMMIT_BYTES_PER_PARAMETER * shape.parameters / ranks / STAGING_BYTES_PER_SECOND


def carry_seconds(config: RunConfig, shape: ModelShape, kind: InstanceType, pool: Pool) -> float:
    """To bring one rank's share of a commit to the store, or back."""
    network = kind.network_gbps * 1e9 / 8 * NETWORK_EFFICIENCY / pool.processes_per_node
    rate = min(TRANSFER_BYTES_PER_SECOND, network)
    if config.checkpoint.upload_mib_per_second is not None:
        rate = min(rate, config.checkpoint.upload_mib_per_second * 2**20)
    return COMMIT_BYTES_PER_PARAMETER * shape.parameters / pool.ranks / rate


def machine_failures_per_hour(ranks: int) -> float:
    return FAILURES_PER_GPU_HOUR * ranks


def course(config: RunConfig, work: Work, hazard: Hazard) -> Course | None:
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
    case = Case(
        start_hours=start,
        work_hours=undisturbed,
        fixed_lost_hours=fixed_lost,
        interval_hours=interval / 3600,
        reclaims=hazard.reclaims,
        failures_per_hour=hazard.failures_per_hour,
        speed_log_deviation=work.speed.log_deviation,
    )
    return Course(
        case=case,
        interval_seconds=interval,
        interruptions=hazard.per_hour * paid,
        paid_hours=paid,
        expected_hours=paid + reclaims * MEAN_WAIT_HOURS,
    )


def interval_seconds(config: RunConfig, work: Work, hazard_per_hour: float) -> float:
    """Training time between saves as `checkpoint.interval` has it; at most all the work, at least one step."""
    saves, step = config.checkpoint, work.speed.step_seconds
    wanted = {
        "steps": saves.interval_steps * step,
        "seconds": saves.interval_seconds,
        "auto": daly_interval_seconds(work.save_seconds, hazard_per_hour),
    }[saves.interval]
    return max(step, min(wanted, work.seconds))


def usage(pool: Pool, work: Work, expected: Course) -> Usage:
    """What of it is stored, asked for and moved."""
    return Usage(
        nodes=pool.nodes,
        ranks=pool.ranks,
        hours=expected.paid_hours,
        commit_bytes=work.commit_bytes,
        commits=work.seconds / expected.interval_seconds,
        starts=1 + expected.interruptions,
        restores=expected.interruptions + work.restores_first,
        token_bytes=work.token_bytes,
    )


def candidate(
    config: RunConfig,
    pool: Pool,
    kind: InstanceType,
    work: Work,
    hazard: Hazard,
    expected: Course,
    quote: Quote,
    on_demand: Quote | None,
    bill: Bill,
    now_utc: float,
) -> Candidate:
    """The pool with all that is known and expected of it."""
    limit = config.cost.max_price_age_hours
    usd_per_hour = float(quote.usd_per_hour)
    gang, other = usd_per_hour * pool.nodes, bill.storage_usd + bill.transfer_usd
    total = gang * expected.paid_hours + other
    return Candidate(
        **vars(pool),
        gpu=kind.gpu.name,
        gpu_count=kind.gpu_count,
        gpu_memory_bytes=kind.gpu_memory_bytes,
        usd_per_hour=usd_per_hour,
        quoted_usd_per_hour=f"{quote.usd_per_hour:f}",
        on_demand_usd_per_hour=None if on_demand is None else float(on_demand.usd_per_hour),
        price_kind=quote.describe(now_utc, limit),
        price_age_hours=quote.age_hours(now_utc),
        price_stale=pool.market == "spot" and quote.is_stale(now_utc, limit),
        micro_batch=work.samples,
        fit=work.fit,
        tokens_per_second=work.speed.tokens_per_second,
        step_seconds=work.speed.step_seconds,
        bound=work.speed.bound,
        mfu=work.speed.mfu,
        speed_kind=work.speed.kind,
        save_seconds=work.save_seconds,
        interval_seconds=expected.interval_seconds,
        hazard_per_hour=hazard.per_hour,
        hazard_kind=hazard.kind,
        daly_interval_steps=_daly_steps(work, hazard),
        interruptions=expected.interruptions,
        paid_hours=expected.paid_hours,
        expected_hours=expected.expected_hours,
        compute_usd=gang * expected.paid_hours,
        storage_usd=bill.storage_usd,
        transfer_usd=bill.transfer_usd,
        expected_usd=total,
        usd_per_step=total / max(1, work.steps),
        case=expected.case,
    )


def _daly_steps(work: Work, hazard: Hazard) -> int:
    """Daly's interval in steps: at least one, at most all that are left."""
    steps = daly_interval_seconds(work.save_seconds, hazard.per_hour) / work.speed.step_seconds
    return max(1, round(min(steps, max(1, work.steps))))


def bill_of(config: RunConfig, pool: Pool, work: Work, expected: Course, rates: Rates) -> Bill:
    return other_costs(config, usage(pool, work, expected), pool.region or "", rates)
