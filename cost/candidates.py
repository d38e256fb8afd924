"""Every way to run the job: pools of all kinds, sizes, markets and places, each judged on its own.

What does not depend on the place (GPU, memory, batch) is judged once per size; prices and hazards place by place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cost.catalogue import Catalogue, InstanceType
from cost.fit import Fit, batch_arithmetic, gib, memory_fit, micro_batch
from cost.hazard import gang_hazard_per_hour
from cost.pools import Candidate, Pool, Rejection
from cost.prices.quote import PriceSource, Quote, is_zone_of
from cost.throughput import Throughput, estimate_throughput
from infra.config.schema import RunConfig
from infra.footprint import COMMIT_BYTES_PER_PARAMETER, shard_ranks
from infra.model_shape import ModelShape
from infra.reliability import daly_interval_seconds

# Node counts tried for `cluster.nodes: auto`: powers of two, so that common batch sizes divide.
AUTO_NODES = (1, 2, 4, 8)
# From asking for a node to its first step: boot and image pull some minutes, rendezvous and model some seconds.
START_SECONDS = 240.0
# A save stages to host memory at about a third of a memcpy's 6 GB/s, plus planning.
STAGING_BYTES_PER_SECOND = 2e9
SAVE_OVERHEAD_SECONDS = 0.05
# Oldest GPUs with kernels in torch's default wheels since CUDA 13 (pytorch/pytorch issues 172352 and 190385).
OLDEST_COMPUTE_CAPABILITY = 7.5


# Kinds of rejections that others ask for, in the order in which a pool meets them.
ELSEWHERE = "outside cost.zones"
NO_SPOT_PRICE = "no spot price"
NO_ON_DEMAND_PRICE = "no on-demand price"
HAZARD_UNKNOWN = "hazard unknown"
MISSES_DEADLINE = "misses the deadline"


@dataclass(frozen=True, kw_only=True)
class Sources:
    """All that a plan is made from, besides the configuration. now_utc: Unix time that prices are judged at."""

    catalogue: Catalogue
    shape: ModelShape
    prices: PriceSource
    now_utc: float


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What the job needs on a pool, wherever it lies."""

    samples: int
    fit: Fit
    speed: Throughput
    save_seconds: float


def judged(config: RunConfig, sources: Sources) -> Iterator[Candidate | Rejection]:
    """Every pool that the configuration names: one that can run the job with what it takes, any other with the reason.

    A spot pool is one zone that has a price; an on-demand pool is a region, or each zone of `cost.zones`.
    """
    for pool, kind in _sizes(config, sources.catalogue):
        found = _cannot_run(config, pool, kind) or _does_not_fit(config, sources.shape, pool, kind)
        if found:
            yield _rejection(pool, *found)
            continue
        work = _work(config, sources.shape, pool, kind)
        for region in config.cost.regions:
            yield from _in_region(config, sources, replace(pool, region=region), kind, work)


def candidates(config: RunConfig, sources: Sources) -> Iterator[Candidate]:
    """The pools that can run the job."""
    return (one for one in judged(config, sources) if isinstance(one, Candidate))


def _sizes(config: RunConfig, catalogue: Catalogue) -> Iterator[tuple[Pool, InstanceType]]:
    """Types, sizes and markets that the configuration names, without a place."""
    cluster = config.cluster
    node_counts = AUTO_NODES if cluster.nodes == "auto" else (cluster.nodes,)
    for kind in catalogue.matching(cluster.instance_types):
        ranks = kind.gpu_count if cluster.processes_per_node == "auto" else cluster.processes_per_node
        for nodes in node_counts:
            for market in ("spot", "on_demand"):
                yield Pool(instance_type=kind.name, nodes=nodes, processes_per_node=ranks, market=market), kind


def _rejection(pool: Pool, kind: str, reason: str, excess: float = 0.0) -> Rejection:
    return Rejection(**asdict(pool), kind=kind, reason=reason, excess=excess)


def _in_region(
    config: RunConfig, sources: Sources, pool: Pool, kind: InstanceType, work: _Work
) -> Iterator[Candidate | Rejection]:
    region = pool.region or ""
    wanted = [zone for zone in config.cost.zones if is_zone_of(zone, region)]
    if config.cost.zones and not wanted:
        yield _rejection(pool, ELSEWHERE, f"none of cost.zones ({', '.join(config.cost.zones)}) lies in {region}")
        return
    hazard = gang_hazard_per_hour(pool.market, kind.interruption_band(region), pool.ranks)
    for zone, quote in _quotes(sources.prices, kind, pool.market, region, wanted):
        here = replace(pool, zone=zone)
        if quote is None:
            without = NO_SPOT_PRICE if pool.market == "spot" else NO_ON_DEMAND_PRICE
            why = "on record" if pool.market == "on_demand" else sources.prices.missing(kind, region, zone)
            yield _rejection(here, without, f"{without} of {kind.name} in {here.place} {why}")
        elif hazard is None:
            yield _rejection(here, HAZARD_UNKNOWN, f"no interruption band of {kind.name} in {region} on record")
        else:
            yield _within_deadline(config, _expect(config, sources, here, kind, work, quote, hazard))


def _quotes(
    prices: PriceSource, kind: InstanceType, market: str, region: str, wanted: Sequence[str]
) -> list[tuple[str | None, Quote | None]]:
    """(zone, quote) of the type in the region; a quote of None: that zone, or without a zone all of it, has none."""
    if market == "on_demand":
        quote = prices.on_demand(kind, region)
        return [(zone, quote) for zone in (wanted if quote else []) or [None]]
    quotes = prices.spot(kind, region)
    if not quotes:
        return [(None, None)]
    if quotes[0].zone is None:  # a price of the region serves for each of its zones
        return [(zone, quotes[0]) for zone in wanted or [None]]
    priced = [(quote.zone, quote) for quote in quotes if not wanted or quote.zone in wanted]
    seen = {quote.zone for quote in quotes}
    without = [zone for zone in wanted or prices.zones(region) if zone not in seen]
    return [*priced, *((zone, None) for zone in without)]


def _within_deadline(config: RunConfig, candidate: Candidate) -> Candidate | Rejection:
    limit = config.cost.deadline_hours
    if limit is None or candidate.expected_hours <= limit:
        return candidate
    reason = f"needs {candidate.expected_hours:.4g} h, cost.deadline_hours is {limit:.4g}"
    pool = Pool(**{name: getattr(candidate, name) for name in Pool.__dataclass_fields__})
    return _rejection(pool, MISSES_DEADLINE, reason, candidate.expected_hours / limit)


def _cannot_run(config: RunConfig, pool: Pool, kind: InstanceType) -> tuple[Any, ...] | None:
    """(kind, reason) of what rules the pool out before any arithmetic on the model."""
    cluster, gpu = config.cluster, kind.gpu
    mixed = config.fsdp.use_mixed_precision
    if cluster.market not in ("auto", pool.market):
        return "market excluded", f"cluster.market is {cluster.market}"
    if cluster.backend == "batch" and pool.market == "spot" and pool.nodes > 1:
        return "backend cannot", "AWS Batch runs no multi-node job on Spot; one node, or backend kubernetes, can"
    if kind.gpu_count < pool.processes_per_node:
        return "too few GPUs", f"{kind.gpu_count} GPUs, cluster.processes_per_node is {pool.processes_per_node}"
    if gpu.compute_capability < OLDEST_COMPUTE_CAPABILITY:
        reason = f"{gpu.name} has capability {gpu.compute_capability}; torch's default wheels begin at 7.5"
        return "GPU too old", reason
    if gpu.peak_flops(mixed) is None:
        precision = "bfloat16" if mixed else "float32"
        return "peak unknown", f"no {precision} peak of {gpu.name}: {gpu.note or 'not published'}"
    return None


def _does_not_fit(config: RunConfig, shape: ModelShape, pool: Pool, kind: InstanceType) -> tuple[Any, ...] | None:
    if micro_batch(config, pool.ranks) is None:
        return "batch not divisible", batch_arithmetic(config, pool.ranks)
    shard = shard_ranks(config, pool.ranks, pool.processes_per_node)
    if pool.ranks % shard:
        return "shards do not divide", f"{pool.ranks} ranks are no multiple of parallel.shard_size {shard}"
    fit = memory_fit(config, pool.ranks, shape, ranks_per_node=pool.processes_per_node)
    if fit.total <= kind.gpu_memory_bytes:
        return None
    reason = f"needs {fit.render()}; {kind.gpu.name} has {gib(kind.gpu_memory_bytes)}"
    return "does not fit", reason, fit.total / kind.gpu_memory_bytes


def _work(config: RunConfig, shape: ModelShape, pool: Pool, kind: InstanceType) -> _Work:
    speed = estimate_throughput(config, shape, kind, pool.nodes, pool.processes_per_node)
    samples = micro_batch(config, pool.ranks)
    assert speed is not None and samples is not None  # _cannot_run and _does_not_fit saw to it
    return _Work(
        samples=samples,
        fit=memory_fit(config, pool.ranks, shape, ranks_per_node=pool.processes_per_node),
        speed=speed,
        save_seconds=_save_seconds(shape, pool.ranks),
    )


def _expect(
    config: RunConfig, sources: Sources, pool: Pool, kind: InstanceType, work: _Work, quote: Quote, hazard: float
) -> Candidate:
    """The expected hours and dollars of a pool that can run the job.

    hours = start + steps × step time × (1 + save share) + interruptions × (half an interval redone + a new start)
    """
    speed, limit = work.speed, config.cost.max_price_age_hours
    hours, interruptions = _expected_hours(config, speed, work.save_seconds, hazard)
    interval = daly_interval_seconds(work.save_seconds, hazard) / speed.step_seconds
    on_demand = sources.prices.on_demand(kind, quote.region)
    usd_per_hour = float(quote.usd_per_hour)
    return Candidate(
        **asdict(pool),
        gpu=kind.gpu.name,
        gpu_count=kind.gpu_count,
        gpu_memory_bytes=kind.gpu_memory_bytes,
        usd_per_hour=usd_per_hour,
        quoted_usd_per_hour=f"{quote.usd_per_hour:f}",
        on_demand_usd_per_hour=None if on_demand is None else float(on_demand.usd_per_hour),
        price_kind=quote.describe(sources.now_utc, limit),
        price_age_hours=quote.age_hours(sources.now_utc),
        price_stale=pool.market == "spot" and quote.is_stale(sources.now_utc, limit),
        micro_batch=work.samples,
        fit=work.fit,
        tokens_per_second=speed.tokens_per_second,
        step_seconds=speed.step_seconds,
        bound=speed.bound,
        mfu=speed.mfu,
        save_seconds=work.save_seconds,
        hazard_per_hour=hazard,
        daly_interval_steps=max(1, round(interval)),
        interruptions=interruptions,
        expected_hours=hours,
        expected_usd=hours * usd_per_hour * pool.nodes,
    )


def _save_seconds(shape: ModelShape, ranks: int) -> float:
    return SAVE_OVERHEAD_SECONDS + COMMIT_BYTES_PER_PARAMETER * shape.parameters / ranks / STAGING_BYTES_PER_SECOND


def _expected_hours(config: RunConfig, speed: Throughput, save_seconds: float, hazard: float) -> tuple[float, float]:
    steps = config.training.max_steps
    interval_seconds = min(config.checkpoint.interval_steps, steps) * speed.step_seconds
    save_share = save_seconds / interval_seconds
    undisturbed = (START_SECONDS + steps * speed.step_seconds * (1 + save_share)) / 3600
    interruptions = hazard * undisturbed
    return undisturbed + interruptions * (interval_seconds / 2 + START_SECONDS) / 3600, interruptions
