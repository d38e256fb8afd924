"""Check every pool that a configuration allows.

Each becomes a `Candidate` with its expected cost, or a `Rejection`.

A pool is an instance type × number of nodes × market × zone. GPU, memory and batch size are checked
once per instance type and number of nodes. Prices and hazards (expected interruptions per hour) are
checked once per zone or region.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache, partial
from typing import TYPE_CHECKING

from ebbflow.core.config.device_settings import BFLOAT16_CAPABILITY, settle_for_device
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.event_payloads import PlanPayload
from ebbflow.core.events import STEP, Event, select_events
from ebbflow.core.footprint import ModelShape, commit_bytes, shard_ranks
from ebbflow.core.reliability import daly_interval_seconds
from ebbflow.cost.catalogue import (
    Catalogue,
    InstanceType,
    Rates,
    Usage,
    load_rates,
    other_costs,
    volume_usd_per_hour,
)
from ebbflow.cost.job_history import JobHistory
from ebbflow.cost.ledger.generations import read_generations
from ebbflow.cost.ledger.ledger import compute_spent_usd
from ebbflow.cost.plan.forecast import (
    FAILURES_PER_GPU_HOUR,
    ExpectedRun,
    PoolHazard,
    RemainingWork,
    delay_start,
    expect_run,
    save_seconds,
)
from ebbflow.cost.plan.pools import Candidate, Pool, Rejection, why_no_queue
from ebbflow.cost.plan.throughput import (
    FLOAT8_CAPABILITY,
    NETWORK_EFFICIENCY,
    explain_batch,
    gib_text,
    known_throughput,
    matmul_dtype,
    memory_fit,
    micro_batch,
    speed_fingerprint,
    why_host_too_small,
)
from ebbflow.cost.prices.quote import PoolPrice, PriceSource, Quote, is_zone_of
from ebbflow.cost.prices.reservations import CapacityEvidence, Reservation

if TYPE_CHECKING:
    from ebbflow.infra.batch.queues import QueueState


# Bandwidth between one rank and an object store, in either direction. Measured once: 1 GiB from
# shared memory to Swift on the same machine (361 MiB/s). The node's network, which its ranks share,
# may allow less.
TRANSFER_BYTES_PER_SECOND = 361 * 2**20
# Node counts tried for `cluster.nodes: auto`: powers of two divide common batch sizes.
AUTO_NODES = (1, 2, 4, 8)
# Oldest GPUs with kernels in torch's default wheels since CUDA 13 (pytorch/pytorch issues 172352
# and 190385).
OLDEST_COMPUTE_CAPABILITY = 7.5

# Kinds of rejections.
ELSEWHERE = "outside cost.zones"
NO_SPOT_PRICE = "no spot price"
NO_ON_DEMAND_PRICE = "no on-demand price"
MISSES_DEADLINE = "misses the deadline"
NEVER_ENDS = "interrupted too often"
NO_QUEUE = "no queue"
RESERVATION = "reservation"
OVER_BUDGET = "over the budget"
MARKET_EXCLUDED = "market excluded"
BACKEND_CANNOT = "backend cannot"
TOO_FEW_GPUS = "too few GPUs"
GPU_TOO_OLD = "GPU too old"
PEAK_UNKNOWN = "peak unknown"
SHARDS_DO_NOT_DIVIDE = "shards do not divide"
BATCH_NOT_DIVISIBLE = "batch not divisible"
DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """A job's progress at the time of a plan."""

    done_steps: int = 0  # step of the newest commit, from which the job resumes
    spent_usd: float = 0.0  # cost of the job so far
    # Unix time from which the deadline counts (`read_progress`); None if the job has not started
    started_utc: float | None = None


NO_PROGRESS = JobProgress()


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """Everything that a plan depends on, except the configuration."""

    catalogue: Catalogue
    shape: ModelShape
    prices: PriceSource
    now_utc: float  # Unix time of the plan and of its prices
    history: JobHistory = field(default_factory=JobHistory)
    progress: JobProgress = NO_PROGRESS
    rates: Rates = field(default_factory=load_rates)
    # AWS Batch queues by name. A pool that none of them can run is rejected. None means that the
    # job uses no queues or that they are unknown; then no pool is rejected for lack of a queue.
    queues: Mapping[str, QueueState] | None = None
    simulated: bool = False  # the job runs on this machine as if it ran in the chosen pool
    # reservations of the account, Capacity Blocks for sale, and Spot placement scores
    evidence: CapacityEvidence = field(default_factory=CapacityEvidence)

    def held(self, pool: Pool) -> list[Reservation]:
        """Return the account's reservations that the pool could use; none for a Spot pool.

        They have the pool's instance type and, if it is set, its region.
        """
        if pool.market != "on_demand":
            return []
        return [
            reservation
            for reservation in self.evidence.held
            if reservation.instance_type == pool.instance_type
            and pool.region in (None, reservation.region)
        ]

    def runs_here(self, config: RunConfig) -> bool:
        """Return whether the job runs on this machine, also if the user states its price."""
        return self.simulated or config.cluster.plan_for == "local"

    def steps_left(self, config: RunConfig) -> int:
        return max(0, config.training.max_steps - self.progress.done_steps)

    def hours_left(self, config: RunConfig) -> float | None:
        """Return the hours until the deadline, negative if it has passed; None if the job has no
        deadline.
        """
        limit = config.cost.deadline_hours
        started = self.progress.started_utc
        if limit is None or started is None:
            return limit
        return limit - (self.now_utc - started) / 3600


def read_progress(events: Sequence[Event], *, run: str = "") -> JobProgress:
    """Compute a job's progress from its events, in any order.

    Raises LedgerError if they contradict each other.

    The deadline counts from the first plan of the run whose ranks started first. If no ranks have
    started yet, it counts from the first plan of `run`.
    """
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    generations = read_generations(ordered)
    made: dict[str, float] = {}
    for event in select_events(ordered, PlanPayload):
        if event.payload.chosen is None and event.data.get("backend") != "slurm":
            continue  # a refusal
        made[event.run] = min(
            made.get(event.run, math.inf), float(event.payload.made_utc or event.t_wall)
        )
    if not generations:
        return JobProgress(started_utc=made.get(run))
    kept = generations[max(generations)].kept[1]
    taken = max(
        (event.step for event in ordered if event.name == STEP and event.step is not None),
        default=0,
    )
    # Runs are compared, not times: the launcher's clock may be ahead of those of the machines.
    first = generations[min(generations)]
    began = next(event.run for event in ordered if event.generation == first.number)
    return JobProgress(
        done_steps=int(min(kept, taken)),
        spent_usd=compute_spent_usd(ordered),
        started_utc=made.get(began, first.started_wall),
    )


def judge_pools(config: RunConfig, sources: PlanInputs) -> Iterator[Candidate | Rejection]:
    """Check every pool that the configuration allows, and yield a `Candidate` or a `Rejection` for
    each.

    On Spot, each zone with a price is a pool. On demand, each region is a pool, or each zone if
    `cost.zones` is set.
    """
    fingerprint = speed_fingerprint(config)
    for pool, kind in _sizes(config, sources.catalogue):
        settled = settle_for_device(config, kind.gpu.compute_capability)
        flaw = _why_unable(settled, pool, kind) or _why_too_large(
            settled, sources.shape, pool, kind
        )
        if flaw:
            yield _reject(pool, flaw)
            continue
        # A reservation may have a queue of its own, so its queue is checked with the reservation.
        if not sources.held(pool):
            no_queue = _why_no_queue(sources, pool)
            if no_queue:
                yield _reject(pool, no_queue)
                continue
        work = _estimate_work(config, sources, pool, kind, fingerprint)
        job = _SizedJob(
            config=settled,
            sources=sources,
            kind=kind,
            work=work,
            run_at=cache(partial(expect_run, settled, work)),
        )
        if sources.catalogue.are_pools:  # their places are their own
            for judged in _judge_region(job, replace(pool, region=config.cost.regions[0])):
                yield replace(judged, region=None, zone=None)
            continue
        for region in config.cost.regions:
            yield from _judge_region(job, replace(pool, region=region))


def feasible_pools(config: RunConfig, sources: PlanInputs) -> Iterator[Candidate]:
    return (pool for pool in judge_pools(config, sources) if isinstance(pool, Candidate))


def judge_blocks(config: RunConfig, sources: PlanInputs) -> Iterator[Candidate]:
    """Yield one candidate per Capacity Block for sale that can run the job, at the price of the
    whole block.
    """
    free = config.changed("cluster", plan_for="batch")
    # Judged as reservations that the user holds; a block for sale has no queue yet
    sale = replace(
        sources, evidence=replace(sources.evidence, held=sources.evidence.blocks), queues=None
    )
    if sources.evidence.blocks:
        yield from (
            pool
            for pool in judge_pools(free, sale)
            if isinstance(pool, Candidate) and pool.reservation
        )


@dataclass(frozen=True, kw_only=True)
class _Flaw:
    """The reason why a pool cannot run the job."""

    kind: str
    reason: str
    excess: float = 0.0  # as in `Rejection`


@dataclass(frozen=True, kw_only=True)
class _SizedJob:
    """The job on one instance type and number of nodes, in any region and zone."""

    config: RunConfig
    sources: PlanInputs
    kind: InstanceType
    work: RemainingWork
    # Computes the expected run from a hazard; None if interruptions undo the work faster than it is
    # done. Many zones have the same hazard, so the results are kept.
    run_at: Callable[[PoolHazard], ExpectedRun | None]


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """Price, hazard and expected run of a job in one pool."""

    quote: Quote
    hazard: PoolHazard
    expected: ExpectedRun | None  # None if the job would never finish


def _sizes(config: RunConfig, catalogue: Catalogue) -> Iterator[tuple[Pool, InstanceType]]:
    """Yield one (pool, instance type) pair per allowed type, number of nodes and market.

    Pools have no region yet.
    """
    cluster = config.cluster
    if cluster.max_nodes is None:
        most = max(AUTO_NODES)
    else:
        most = cluster.max_nodes
    tried = [nodes for nodes in AUTO_NODES if nodes <= most]
    if cluster.nodes == "auto":
        node_counts = tried
    else:
        node_counts = [cluster.nodes]
    for kind in catalogue.matching(cluster.instance_types):
        if cluster.processes_per_node == "auto":
            ranks = kind.gpu_count
        else:
            ranks = cluster.processes_per_node
        for nodes in node_counts:
            for market in ("spot", "on_demand"):
                yield (
                    Pool(
                        instance_type=kind.name,
                        nodes=nodes,
                        processes_per_node=ranks,
                        market=market,
                    ),
                    kind,
                )


def _reject(pool: Pool, flaw: _Flaw) -> Rejection:
    return Rejection(
        instance_type=pool.instance_type,
        nodes=pool.nodes,
        processes_per_node=pool.processes_per_node,
        market=pool.market,
        region=pool.region,
        zone=pool.zone,
        reservation=pool.reservation,
        kind=flaw.kind,
        reason=flaw.reason,
        excess=flaw.excess,
    )


def _judge_region(job: _SizedJob, pool: Pool) -> Iterator[Candidate | Rejection]:
    """Check the account's reservations in the pool's region, then the zones of the region."""
    cost = job.config.cost
    region = pool.region or ""
    if job.config.cluster.plan_for == "batch":
        for held in job.sources.held(pool):
            here = replace(pool, zone=held.zone, reservation=held.id)
            yield _judge_reservation(job, here, held)
    flaw = _why_no_queue(job.sources, pool)
    if flaw:
        yield _reject(pool, flaw)
        return
    wanted = [zone for zone in cost.zones if is_zone_of(zone, region)]
    if cost.zones and not wanted:
        reason = f"none of cost.zones ({', '.join(cost.zones)}) lies in {region}"
        yield _reject(pool, _Flaw(kind=ELSEWHERE, reason=reason))
        return
    for zone, quote in _quotes(job.sources.prices, job.kind, pool.market, region, wanted):
        yield _judge_zone(job, replace(pool, zone=zone), quote)


def _judge_zone(job: _SizedJob, pool: Pool, quote: Quote | None) -> Candidate | Rejection:
    """Check a pool of one zone, or of a whole region if the pool has no zone."""
    sources = job.sources
    region = pool.region or ""
    if quote is None:
        return _reject(pool, _explain_missing_price(job, pool))
    hazard = _hazard(sources, pool, job.kind)
    expected = job.run_at(hazard)
    score = sources.evidence.score(region, pool.zone)
    if expected is not None and score is not None and pool.market == "spot":
        hazard = replace(hazard, kind=f"{hazard.kind}; Spot placement score {score} of 10")
        # AWS gives no probabilities: an assumption
        expected = delay_start(expected, start_chance=score / 10)
    return _judge_offer(job, pool, _Offer(quote=quote, hazard=hazard, expected=expected))


def _explain_missing_price(job: _SizedJob, pool: Pool) -> _Flaw:
    name = job.kind.name
    if pool.market == "on_demand":
        reason = f"{NO_ON_DEMAND_PRICE} of {name} in {pool.place} on record"
        return _Flaw(kind=NO_ON_DEMAND_PRICE, reason=reason)
    why = job.sources.prices.why_missing(job.kind, pool.region or "", pool.zone)
    return _Flaw(kind=NO_SPOT_PRICE, reason=f"{NO_SPOT_PRICE} of {name} in {pool.place} {why}")


def _judge_reservation(job: _SizedJob, pool: Pool, held: Reservation) -> Candidate | Rejection:
    """Check a capacity reservation or a Capacity Block. A block costs its fee."""
    sources = job.sources
    now = sources.now_utc
    unusable = held.why_unusable(pool.nodes, now)
    if unusable:
        return _reject(pool, _Flaw(kind=RESERVATION, reason=f"reservation {held.id} {unusable}"))
    flaw = _why_no_queue(sources, pool)
    if flaw and held.fee_usd is None:
        return _reject(pool, flaw)
    quote = held.quote(sources.prices.on_demand(job.kind, held.region), now)
    if quote is None:
        reason = f"no on-demand price of {job.kind.name} on record, nor usd_per_hour"
        return _reject(pool, _Flaw(kind=NO_ON_DEMAND_PRICE, reason=reason))
    hazard = _hazard(sources, pool, job.kind)
    expected = job.run_at(hazard)
    if expected is not None:
        expected = delay_start(expected, wait_hours=held.wait_hours(now))
        flaw = _why_reservation_ends_first(job, held, expected)
        if flaw:
            return _reject(pool, flaw)
    found = _judge_offer(job, pool, _Offer(quote=quote, hazard=hazard, expected=expected))
    if isinstance(found, Rejection):
        return found
    compute_usd = found.compute_usd
    if held.fee_usd is not None:
        # The fee of a Capacity Block pays for all of its hours, whether used or not, and for no
        # volume.
        volume_usd = float(found.price.volume_usd_per_hour)
        compute_usd = float(held.fee_usd) + volume_usd * found.nodes * found.paid_hours
    total = found.expected_usd - found.compute_usd + compute_usd
    return replace(
        found,
        ends_utc=held.end_utc,
        compute_usd=compute_usd,
        expected_usd=total,
        usd_per_step=total / max(1, job.work.steps),
    )


def _why_reservation_ends_first(
    job: _SizedJob, held: Reservation, expected: ExpectedRun
) -> _Flaw | None:
    if held.end_utc is None:
        return None
    # The attempt leaves so long before the end, to save.
    save = job.config.checkpoint.deadline_seconds / 3600
    ends = (held.end_utc - job.sources.now_utc) / 3600 - save
    if expected.expected_hours <= ends:
        return None
    needed = expected.expected_hours + save
    reason = f"needs {needed:.4g} h from now, and reservation {held.id} ends in {ends + save:.4g} h"
    return _Flaw(kind=RESERVATION, reason=reason, excess=needed / (ends + save))


def _hazard(sources: PlanInputs, pool: Pool, kind: InstanceType) -> PoolHazard:
    """Estimate the pool's interruptions per hour."""
    failures = FAILURES_PER_GPU_HOUR * pool.ranks
    if pool.market != "spot":
        return PoolHazard(
            evidence=None,
            failures_per_hour=failures,
            kind="estimated: machine failures as published",
        )
    evidence, stays = sources.history.spot_evidence(
        kind.name, pool.region, pool.zone, sources.now_utc
    )
    if stays:
        own = f", updated by {stays} stays of own jobs"
    else:
        own = ""
    return PoolHazard(
        evidence=evidence,
        failures_per_hour=failures,
        kind=f"estimated: nine zones recorded with V100 in 2023{own}",
    )


def _quotes(
    prices: PriceSource, kind: InstanceType, market: str, region: str, wanted: Sequence[str]
) -> list[tuple[str | None, Quote | None]]:
    """Return (zone, quote) pairs, one for each zone of the region.

    The quote of a zone without a price is None. A single pair (None, None) means that no price is
    known in the whole region.
    """
    if market == "on_demand":
        quote = prices.on_demand(kind, region)
        if quote is None or not wanted:
            return [(None, quote)]
        return [(zone, quote) for zone in wanted]
    quotes = prices.spot(kind, region)
    if not quotes:
        return [(None, None)]
    if quotes[0].zone is None:  # a price of the region serves for each of its zones
        return [(zone, quotes[0]) for zone in wanted or [None]]
    priced = [(quote.zone, quote) for quote in quotes if not wanted or quote.zone in wanted]
    seen = {quote.zone for quote in quotes}
    without = [zone for zone in wanted or prices.zones(region) if zone not in seen]
    return [*priced, *((zone, None) for zone in without)]


def _why_unable(config: RunConfig, pool: Pool, kind: InstanceType) -> _Flaw | None:
    """Check market, backend and number of GPUs of a pool, then its GPU."""
    cluster = config.cluster
    if cluster.market not in ("auto", pool.market):
        return _Flaw(kind=MARKET_EXCLUDED, reason=f"cluster.market is {cluster.market}")
    if cluster.plan_for == "batch" and pool.market == "spot" and pool.nodes > 1:
        reason = "AWS Batch runs no multi-node job on Spot; one node, or backend kubernetes, can"
        return _Flaw(kind=BACKEND_CANNOT, reason=reason)
    if kind.gpu_count < pool.processes_per_node:
        reason = f"{kind.gpu_count} GPUs, cluster.processes_per_node is {pool.processes_per_node}"
        return _Flaw(kind=TOO_FEW_GPUS, reason=reason)
    return _why_gpu_unsuitable(config, kind)


def _why_gpu_unsuitable(config: RunConfig, kind: InstanceType) -> _Flaw | None:
    gpu = kind.gpu
    dtype = matmul_dtype(config)
    has = f"{gpu.name} has capability {gpu.compute_capability}"
    if gpu.compute_capability < OLDEST_COMPUTE_CAPABILITY:
        return _Flaw(kind=GPU_TOO_OLD, reason=f"{has}; torch's default wheels begin at 7.5")
    if config.fsdp.float8 == "on" and gpu.compute_capability < FLOAT8_CAPABILITY:
        return _Flaw(kind=GPU_TOO_OLD, reason=f"{has}; fsdp.float8 needs 8.9")
    if dtype == "bfloat16" and gpu.compute_capability < BFLOAT16_CAPABILITY:
        fix = f"bfloat16 needs {BFLOAT16_CAPABILITY}; set fsdp.param_dtype to auto or float16"
        return _Flaw(kind=GPU_TOO_OLD, reason=f"{has}; {fix}")
    if gpu.peak_flops(dtype) is None:
        why = gpu.note or "not published"
        return _Flaw(kind=PEAK_UNKNOWN, reason=f"no {dtype} peak of {gpu.name}: {why}")
    return None


def _why_no_queue(sources: PlanInputs, pool: Pool) -> _Flaw | None:
    if sources.queues is None:
        return None
    reason = why_no_queue(sources.queues, pool, sources.catalogue)
    if reason is None:
        return None
    return _Flaw(kind=NO_QUEUE, reason=reason)


def _why_too_large(
    config: RunConfig, shape: ModelShape, pool: Pool, kind: InstanceType
) -> _Flaw | None:
    """Check that shards and batch divide among the ranks, and that they fit into the memory."""
    ranks = pool.ranks
    shard = shard_ranks(config, ranks, pool.processes_per_node)
    tensor = config.parallel.tensor_size
    if shard % tensor:
        reason = (
            f"the {shard} ranks that hold one copy of the model are no multiple of "
            f"parallel.tensor_size {tensor}"
        )
        return _Flaw(kind=SHARDS_DO_NOT_DIVIDE, reason=reason)
    if micro_batch(config, ranks) is None:
        return _Flaw(kind=BATCH_NOT_DIVISIBLE, reason=explain_batch(config, ranks))
    if ranks % shard:
        reason = f"{ranks} ranks are no multiple of parallel.shard_size {shard}"
        return _Flaw(kind=SHARDS_DO_NOT_DIVIDE, reason=reason)
    fit = memory_fit(config, ranks, shape, ranks_per_node=pool.processes_per_node)
    if fit.total > kind.gpu_memory_bytes:
        reason = f"needs {fit.render()}; {kind.gpu.name} has {gib_text(kind.gpu_memory_bytes)}"
        excess = fit.total / kind.gpu_memory_bytes
        return _Flaw(kind=DOES_NOT_FIT, reason=reason, excess=excess)
    host = why_host_too_small(
        config,
        shape,
        nodes=pool.nodes,
        ranks_per_node=pool.processes_per_node,
        ram_bytes=int(kind.ram_gib * 2**30),
    )
    if host is None:
        return None
    reason, excess = host
    return _Flaw(kind=DOES_NOT_FIT, reason=reason, excess=excess)


def _estimate_work(
    config: RunConfig, sources: PlanInputs, pool: Pool, kind: InstanceType, fingerprint: str
) -> RemainingWork:
    shape = sources.shape
    progress = sources.progress
    settled = settle_for_device(config, kind.gpu.compute_capability)
    speed = known_throughput(
        config,
        shape,
        kind,
        pool.nodes,
        pool.processes_per_node,
        catalogue=sources.catalogue,
        history=sources.history,
        fingerprint=fingerprint,
    )
    samples = micro_batch(config, pool.ranks)
    assert speed is not None and samples is not None  # checked by _why_unable and _why_too_large
    steps = sources.steps_left(config)
    return RemainingWork(
        steps=steps,
        samples=samples,
        fit=memory_fit(settled, pool.ranks, shape, ranks_per_node=pool.processes_per_node),
        speed=speed,
        save_seconds=save_seconds(config, shape, pool.ranks),
        carry_seconds=_carry_seconds(config, shape, kind, pool),
        commit_bytes=commit_bytes(config, shape),
        token_bytes=_token_bytes(config, shape, steps),
        restores_first=progress.done_steps > 0,
    )


def _carry_seconds(config: RunConfig, shape: ModelShape, kind: InstanceType, pool: Pool) -> float:
    """Return the seconds that one rank needs to upload or download its share of a checkpoint."""
    network = kind.network_gbps * 1e9 / 8 * NETWORK_EFFICIENCY / pool.processes_per_node
    rate = min(TRANSFER_BYTES_PER_SECOND, network)
    if config.checkpoint.upload_mib_per_second is not None:
        rate = min(rate, config.checkpoint.upload_mib_per_second * 2**20)
    return commit_bytes(config, shape) / pool.ranks / rate


def _token_bytes(config: RunConfig, shape: ModelShape, steps: int) -> float:
    """Return an upper bound on the bytes of tokens that one node will read; 0 if unknown (a user's
    own workload).
    """
    if config.user_code is not None:
        return 0.0
    if config.model.vocab_size <= 2**8:
        width = 1
    elif config.model.vocab_size <= 2**16:
        width = 2
    else:
        width = 4
    return steps * config.training.batch_size * shape.tokens_per_sample * width


def _judge_offer(job: _SizedJob, pool: Pool, offer: _Offer) -> Candidate | Rejection:
    """Compute the pool's expected cost, or reject it if the job would never finish or would miss
    the deadline.
    """
    expected = offer.expected
    if expected is None:
        hazard = offer.hazard
        reason = (
            f"{hazard.per_hour:.3g} interruptions per hour ({hazard.kind}) undo more than an "
            "hour's work"
        )
        return _reject(pool, _Flaw(kind=NEVER_ENDS, reason=reason))
    late = _why_late(job, pool, expected)
    if late:
        return _reject(pool, late)
    return _make_candidate(job, pool, offer, expected)


def _why_late(job: _SizedJob, pool: Pool, expected: ExpectedRun) -> _Flaw | None:
    """Check that the pool can meet the deadline. On Spot, assume that nothing interrupts the job.

    How likely a Spot pool meets it, with its interruptions and waits, and with on-demand capacity
    after it, is simulated later.
    """
    limit = job.config.cost.deadline_hours
    left = job.sources.hours_left(job.config)
    if pool.market == "spot":
        hours = expected.case.start_hours + expected.case.work_hours
    else:
        hours = expected.expected_hours
    if left is None or hours <= left:
        return None
    reason = f"needs {hours:.4g} h, cost.deadline_hours is {limit:.4g}"
    if left != limit:
        reason += f", of which {left:.4g} h are left"
    if left > 0:
        excess = hours / left
    else:
        excess = hours
    return _Flaw(kind=MISSES_DEADLINE, reason=reason, excess=excess)


def _make_candidate(job: _SizedJob, pool: Pool, offer: _Offer, expected: ExpectedRun) -> Candidate:
    kind = job.kind
    work = job.work
    sources = job.sources
    quote = offer.quote
    hazard = offer.hazard
    usage = Usage(
        nodes=pool.nodes,
        ranks=pool.ranks,
        hours=expected.paid_hours,
        commit_bytes=work.commit_bytes,
        commits=work.seconds / expected.interval_seconds,
        starts=1 + expected.interruptions,
        restores=expected.interruptions + work.restores_first,
        token_bytes=work.token_bytes,
    )
    bill = other_costs(job.config, usage, pool.region or "", sources.rates)
    on_demand = sources.prices.on_demand(kind, quote.region)
    now = sources.now_utc
    limit = job.config.cost.max_price_age_hours
    if quote.has_volume:
        volume_usd = volume_usd_per_hour(job.config, quote.region, sources.rates)
    else:
        volume_usd = Decimal(0)
    price = PoolPrice(
        usd_per_hour=quote.usd_per_hour,
        volume_usd_per_hour=volume_usd,
        kind=quote.describe(now, limit),
        age_hours=quote.age_hours(now),
        is_stale=pool.market == "spot" and quote.is_stale(now, limit),
    )
    compute = price.node_usd_float * pool.nodes * expected.paid_hours
    total = compute + (bill.storage_usd + bill.transfer_usd)
    return Candidate(
        instance_type=pool.instance_type,
        nodes=pool.nodes,
        processes_per_node=pool.processes_per_node,
        market=pool.market,
        region=pool.region,
        zone=pool.zone,
        reservation=pool.reservation,
        gpu=kind.gpu.name,
        gpu_count=kind.gpu_count,
        gpu_memory_bytes=kind.gpu_memory_bytes,
        price=price,
        on_demand_usd_per_hour=None if on_demand is None else float(on_demand.usd_per_hour),
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
        compute_usd=compute,
        storage_usd=bill.storage_usd,
        transfer_usd=bill.transfer_usd,
        expected_usd=total,
        usd_per_step=total / max(1, work.steps),
        case=expected.case,
    )


def _daly_steps(work: RemainingWork, hazard: PoolHazard) -> int:
    """Return Daly's optimal number of steps between checkpoints: at least one, at most all
    remaining steps.
    """
    steps = daly_interval_seconds(work.save_seconds, hazard.per_hour) / work.speed.step_seconds
    return max(1, round(min(steps, max(1, work.steps))))
