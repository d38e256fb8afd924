"""One way to run the job: a capacity pool and a gang size, judged on its own. Either a `Candidate` or a `Rejection`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cost.catalogue import Catalogue, InstanceType
from cost.fit import Fit, batch_arithmetic, gib, memory_fit, micro_batch
from cost.hazard import gang_hazard_per_hour
from cost.throughput import Throughput, estimate_throughput
from infra.config.schema import RunConfig
from infra.footprint import COMMIT_BYTES_PER_PARAMETER
from infra.model_shape import ModelShape
from infra.reliability import young_interval_seconds

# Node counts tried for `cluster.nodes: auto`: powers of two, so that common batch sizes divide.
AUTO_NODES = (1, 2, 4, 8)
# From asking for a node to its first step: boot and image pull some minutes, rendezvous and model some seconds.
START_SECONDS = 240.0
# A save stages to host memory at about a third of a memcpy's 6 GB/s, plus planning.
STAGING_BYTES_PER_SECOND = 2e9
SAVE_OVERHEAD_SECONDS = 0.05
# Oldest GPUs with kernels in torch's default wheels since CUDA 13 (pytorch/pytorch issues 172352 and 190385).
OLDEST_COMPUTE_CAPABILITY = 7.5


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Where and how large: instance type × nodes × ranks per node × market."""

    instance_type: str
    nodes: int
    processes_per_node: int
    market: str

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes_per_node

    def __str__(self) -> str:
        return f"{self.nodes} × {self.instance_type} {self.market.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class Candidate(Pool):
    """A pool that can run the job, with what it is expected to take. usd_per_hour per node; all else estimated."""

    gpu: str
    gpu_count: int
    gpu_memory_bytes: int
    usd_per_hour: float
    on_demand_usd_per_hour: float
    price_kind: str
    micro_batch: int
    fit: Fit
    tokens_per_second: float
    step_seconds: float
    bound: str
    mfu: float
    save_seconds: float
    hazard_per_hour: float
    young_interval_steps: int
    interruptions: float
    expected_hours: float
    expected_usd: float

    @property
    def gang_usd_per_hour(self) -> float:
        return self.usd_per_hour * self.nodes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Candidate:
        return cls(**{**data, "fit": Fit(**data["fit"])})


@dataclass(frozen=True, kw_only=True)
class Rejection(Pool):
    """A pool that cannot run the job. kind groups like reasons; excess: how much too large, where that has a size."""

    kind: str
    reason: str
    excess: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Rejection:
        return cls(**data)


def pools(config: RunConfig, catalogue: Catalogue) -> Iterator[tuple[Pool, InstanceType]]:
    """All pools that the configuration names, possible or not."""
    cluster = config.cluster
    node_counts = AUTO_NODES if cluster.nodes == "auto" else (cluster.nodes,)
    for kind in catalogue.matching(cluster.instance_types):
        ranks = kind.gpu_count if cluster.processes_per_node == "auto" else cluster.processes_per_node
        for nodes in node_counts:
            for market in ("spot", "on_demand"):
                yield Pool(instance_type=kind.name, nodes=nodes, processes_per_node=ranks, market=market), kind


def judge(config: RunConfig, shape: ModelShape, pool: Pool, kind: InstanceType) -> Candidate | Rejection:
    """Whether the pool can run the job, and at what expected cost."""
    found = _cannot_run(config, pool, kind) or _does_not_fit(config, shape, pool, kind)
    if found:
        return Rejection(**asdict(pool), kind=found[0], reason=found[1], excess=found[2] if len(found) > 2 else 0.0)
    candidate = _expect(config, shape, pool, kind)
    limit = config.cost.deadline_hours
    if limit is not None and candidate.expected_hours > limit:
        reason = f"needs {candidate.expected_hours:.4g} h, cost.deadline_hours is {limit:.4g}"
        excess = candidate.expected_hours / limit
        return Rejection(**asdict(pool), kind="misses the deadline", reason=reason, excess=excess)
    return candidate


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
    if kind.usd_per_hour(pool.market) is None or kind.on_demand_usd_per_hour is None:
        return "no price", f"no {pool.market.replace('_', '-')} price of {kind.name} on record"
    if gang_hazard_per_hour(pool.market, kind.interruption_band, pool.ranks) is None:
        return "hazard unknown", f"no interruption band of {kind.name} on record"
    return None


def _does_not_fit(config: RunConfig, shape: ModelShape, pool: Pool, kind: InstanceType) -> tuple[Any, ...] | None:
    if micro_batch(config, pool.ranks) is None:
        return "batch not divisible", batch_arithmetic(config, pool.ranks)
    fit = memory_fit(config, pool.ranks, shape)
    if fit.total <= kind.gpu_memory_bytes:
        return None
    reason = f"needs {fit.render()}; {kind.gpu.name} has {gib(kind.gpu_memory_bytes)}"
    return "does not fit", reason, fit.total / kind.gpu_memory_bytes


def _expect(config: RunConfig, shape: ModelShape, pool: Pool, kind: InstanceType) -> Candidate:
    """The expected hours and dollars of a pool that can run the job.

    hours = start + steps × step time × (1 + save share) + interruptions × (half an interval redone + a new start)
    """
    speed = estimate_throughput(config, shape, kind, pool.nodes, pool.processes_per_node)
    usd_per_hour = kind.usd_per_hour(pool.market)
    hazard = gang_hazard_per_hour(pool.market, kind.interruption_band, pool.ranks)
    assert speed is not None and usd_per_hour is not None and hazard is not None  # _cannot_run saw to it
    save_seconds = _save_seconds(shape, pool.ranks)
    hours, interruptions = _expected_hours(config, speed, save_seconds, hazard)
    interval = young_interval_seconds(save_seconds, hazard) / speed.step_seconds
    return Candidate(
        **asdict(pool),
        gpu=kind.gpu.name,
        gpu_count=kind.gpu_count,
        gpu_memory_bytes=kind.gpu_memory_bytes,
        usd_per_hour=usd_per_hour,
        on_demand_usd_per_hour=kind.on_demand_usd_per_hour or usd_per_hour,
        price_kind=kind.price_kind(pool.market),
        micro_batch=micro_batch(config, pool.ranks) or 0,
        fit=memory_fit(config, pool.ranks, shape),
        tokens_per_second=speed.tokens_per_second,
        step_seconds=speed.step_seconds,
        bound=speed.bound,
        mfu=speed.mfu,
        save_seconds=save_seconds,
        hazard_per_hour=hazard,
        young_interval_steps=max(1, round(interval)),
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
