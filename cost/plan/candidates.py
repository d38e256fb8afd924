"""Every way to run the job: pools of all kinds, sizes, markets and places, each judged on its own.

What does not depend on the place (GPU, memory, batch) is judged once per size; prices and hazards place by place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ebbflow.cost.catalogue import Catalogue, InstanceType
from ebbflow.cost.experience import Experience
from ebbflow.cost.plan.expect import (
    Course,
    Hazard,
    Work,
    bill_of,
    candidate,
    carry_seconds,
    course,
    machine_failures_per_hour,
    save_seconds,
)
from ebbflow.cost.plan.fit import batch_arithmetic, gib, memory_fit, micro_batch, why_host_too_small
from ebbflow.cost.plan.outlook import reclaim_prior
from ebbflow.cost.plan.pools import FROM_THE_START, Candidate, Pool, Progress, Rejection, without_queue
from ebbflow.cost.plan.throughput import known_throughput, speed_fingerprint
from ebbflow.cost.prices.quote import PriceSource, Quote, is_zone_of
from ebbflow.cost.rates import Rates, load_rates
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.footprint import COMMIT_BYTES_PER_PARAMETER, shard_ranks
from ebbflow.infra.model_shape import ModelShape

if TYPE_CHECKING:
    from ebbflow.infra.batch.queues import QueueState

# Node counts tried for `cluster.nodes: auto`: powers of two, so that common batch sizes divide.
AUTO_NODES = (1, 2, 4, 8)
# Oldest GPUs with kernels in torch's default wheels since CUDA 13 (pytorch/pytorch issues 172352 and 190385).
OLDEST_COMPUTE_CAPABILITY = 7.5


# Kinds of rejections that others ask for, in the order in which a pool meets them.
ELSEWHERE = "outside cost.zones"
NO_SPOT_PRICE = "no spot price"
NO_ON_DEMAND_PRICE = "no on-demand price"
HAZARD_UNKNOWN = "hazard unknown"
MISSES_DEADLINE = "misses the deadline"
NEVER_ENDS = "interrupted too often"
NO_QUEUE = "no queue"


@dataclass(frozen=True, kw_only=True)
class Sources:
    """All that a plan is made from, besides the configuration. now_utc: Unix time that prices are judged at.

    experience: what jobs of the same store have shown. progress: of the job itself. queues: of AWS Batch, of which one
    must take a pool; None: nobody knows them, or the job goes elsewhere.
    """

    catalogue: Catalogue
    shape: ModelShape
    prices: PriceSource
    now_utc: float
    experience: Experience = field(default_factory=Experience)
    progress: Progress = FROM_THE_START
    rates: Rates = field(default_factory=load_rates)
    queues: Mapping[str, QueueState] | None = None

    def steps_left(self, config: RunConfig) -> int:
        return max(0, config.training.max_steps - self.progress.done_steps)

    def hours_left(self, config: RunConfig) -> float | None:
        """To the deadline, which counts from the job's first plan; below 0 when it has passed; None: there is none."""
        limit, started = config.cost.deadline_hours, self.progress.started_utc
        passed = 0.0 if started is None else (self.now_utc - started) / 3600
        return None if limit is None else limit - passed


@dataclass
class _Courses:
    """The courses of the job by gang and hazard: many zones share them, and none depends on a price."""

    config: RunConfig
    hours_left: float | None
    known: dict[Any, Course | None] = field(default_factory=dict)

    def of(self, work: Work, hazard: Hazard) -> Course | None:
        key = id(work), hazard.reclaims, hazard.failures_per_hour
        if key not in self.known:
            self.known[key] = course(self.config, work, hazard)
        return self.known[key]


def judged(config: RunConfig, sources: Sources) -> Iterator[Candidate | Rejection]:
    """Every pool that the configuration names: one that can run the job with what it takes, any other with the reason.

    A spot pool is one zone that has a price; an on-demand pool is a region, or each zone of `cost.zones`.
    """
    courses = _Courses(config, sources.hours_left(config))
    fingerprint = speed_fingerprint(config)
    works = []  # kept alive, since courses are known by them
    for pool, kind in _sizes(config, sources.catalogue):
        found = _cannot_run(config, pool, kind) or _does_not_fit(config, sources.shape, pool, kind)
        found = found or _has_no_queue(sources, pool)
        if found:
            yield _rejection(pool, *found)
            continue
        works.append(_work(config, sources, pool, kind, fingerprint))
        for region in config.cost.regions:
            yield from _in_region(config, sources, replace(pool, region=region), kind, works[-1], courses)


def candidates(config: RunConfig, sources: Sources) -> Iterator[Candidate]:
    """The pools that can run the job."""
    return (one for one in judged(config, sources) if isinstance(one, Candidate))


def _sizes(config: RunConfig, catalogue: Catalogue) -> Iterator[tuple[Pool, InstanceType]]:
    """Types, sizes and markets that the configuration names, without a place."""
    cluster = config.cluster
    most = max(AUTO_NODES) if cluster.max_nodes is None else cluster.max_nodes
    tried = [nodes for nodes in AUTO_NODES if nodes <= most]
    node_counts = tried if cluster.nodes == "auto" else [cluster.nodes]
    for kind in catalogue.matching(cluster.instance_types):
        ranks = kind.gpu_count if cluster.processes_per_node == "auto" else cluster.processes_per_node
        for nodes in node_counts:
            for market in ("spot", "on_demand"):
                yield Pool(instance_type=kind.name, nodes=nodes, processes_per_node=ranks, market=market), kind


def _rejection(pool: Pool, kind: str, reason: str, excess: float = 0.0) -> Rejection:
    return Rejection(**vars(pool), kind=kind, reason=reason, excess=excess)


def _in_region(
    config: RunConfig, sources: Sources, pool: Pool, kind: InstanceType, work: Work, courses: _Courses
) -> Iterator[Candidate | Rejection]:
    region = pool.region or ""
    wanted = [zone for zone in config.cost.zones if is_zone_of(zone, region)]
    if config.cost.zones and not wanted:
        yield _rejection(pool, ELSEWHERE, f"none of cost.zones ({', '.join(config.cost.zones)}) lies in {region}")
        return
    for zone, quote in _quotes(sources.prices, kind, pool.market, region, wanted):
        here = Pool(**{**vars(pool), "zone": zone})
        if quote is None:
            without = NO_SPOT_PRICE if pool.market == "spot" else NO_ON_DEMAND_PRICE
            why = "on record" if pool.market == "on_demand" else sources.prices.missing(kind, region, zone)
            yield _rejection(here, without, f"{without} of {kind.name} in {here.place} {why}")
            continue
        hazard = _hazard(sources, here, kind)
        if hazard is None:
            yield _rejection(here, HAZARD_UNKNOWN, f"no interruption band of {kind.name} in {region} on record")
            continue
        yield _expect(config, sources, here, kind, work, quote, hazard, courses)


def _hazard(sources: Sources, pool: Pool, kind: InstanceType) -> Hazard | None:
    """None for a spot pool without a band: without a prior nothing is believed of it."""
    failures = machine_failures_per_hour(pool.ranks)
    if pool.market != "spot":
        return Hazard(reclaims=None, failures_per_hour=failures, kind="estimated: machine failures as published")
    band = kind.interruption_band(pool.region or "")
    if band is None:
        return None
    belief, stays = sources.experience.reclaims(reclaim_prior(band), kind.name, pool.region, pool.zone, sources.now_utc)
    own = f", updated by {stays} stays of own jobs" if stays else ""
    return Hazard(reclaims=belief, failures_per_hour=failures, kind=f"estimated: advisor's band {band}{own}")


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


def _has_no_queue(sources: Sources, pool: Pool) -> tuple[Any, ...] | None:
    why = None if sources.queues is None else without_queue(sources.queues, pool, sources.catalogue)
    return None if why is None else (NO_QUEUE, why)


def _does_not_fit(config: RunConfig, shape: ModelShape, pool: Pool, kind: InstanceType) -> tuple[Any, ...] | None:
    if micro_batch(config, pool.ranks) is None:
        return "batch not divisible", batch_arithmetic(config, pool.ranks)
    shard = shard_ranks(config, pool.ranks, pool.processes_per_node)
    if pool.ranks % shard:
        return "shards do not divide", f"{pool.ranks} ranks are no multiple of parallel.shard_size {shard}"
    fit = memory_fit(config, pool.ranks, shape, ranks_per_node=pool.processes_per_node)
    if fit.total <= kind.gpu_memory_bytes:
        host = why_host_too_small(
            config,
            shape,
            nodes=pool.nodes,
            ranks_per_node=pool.processes_per_node,
            ram_bytes=int(kind.ram_gib * 2**30),
        )
        return None if host is None else ("does not fit", *host)
    reason = f"needs {fit.render()}; {kind.gpu.name} has {gib(kind.gpu_memory_bytes)}"
    return "does not fit", reason, fit.total / kind.gpu_memory_bytes


def _work(config: RunConfig, sources: Sources, pool: Pool, kind: InstanceType, fingerprint: str) -> Work:
    shape, progress = sources.shape, sources.progress
    speed = known_throughput(
        config,
        shape,
        kind,
        pool.nodes,
        pool.processes_per_node,
        catalogue=sources.catalogue,
        experience=sources.experience,
        fingerprint=fingerprint,
    )
    samples = micro_batch(config, pool.ranks)
    assert speed is not None and samples is not None  # _cannot_run and _does_not_fit saw to it
    steps = sources.steps_left(config)
    return Work(
        steps=steps,
        samples=samples,
        fit=memory_fit(config, pool.ranks, shape, ranks_per_node=pool.processes_per_node),
        speed=speed,
        save_seconds=save_seconds(shape, pool.ranks),
        carry_seconds=carry_seconds(config, shape, kind, pool),
        commit_bytes=COMMIT_BYTES_PER_PARAMETER * shape.parameters,
        token_bytes=_token_bytes(config, shape, steps),
        restores_first=progress.done_steps > 0,
    )


def _token_bytes(config: RunConfig, shape: ModelShape, steps: int) -> float:
    """That a node reads at most: all tokens of the remaining work once. Of a workload of one's own nothing is known."""
    if config.workload is not None:
        return 0.0
    width = 1 if config.model.vocab_size <= 2**8 else 2 if config.model.vocab_size <= 2**16 else 4
    return steps * config.training.batch_size * shape.tokens_per_sample * width


def _expect(
    config: RunConfig,
    sources: Sources,
    pool: Pool,
    kind: InstanceType,
    work: Work,
    quote: Quote,
    hazard: Hazard,
    courses: _Courses,
) -> Candidate | Rejection:
    """The pool with what it takes, or why it would not do in time."""
    expected = courses.of(work, hazard)
    if expected is None:
        reason = f"{hazard.per_hour:.3g} interruptions per hour ({hazard.kind}) undo more than an hour's work"
        return _rejection(pool, NEVER_ENDS, reason)
    left, hours = courses.hours_left, expected.expected_hours
    if left is not None and hours > left:
        limit = config.cost.deadline_hours
        passed = f", of which {left:.4g} h are left" if left != limit else ""
        reason = f"needs {hours:.4g} h, cost.deadline_hours is {limit:.4g}{passed}"
        return _rejection(pool, MISSES_DEADLINE, reason, hours / left if left > 0 else hours)
    bill = bill_of(config, pool, work, expected, sources.rates)
    on_demand = sources.prices.on_demand(kind, quote.region)
    return candidate(config, pool, kind, work, hazard, expected, quote, on_demand, bill, sources.now_utc)
