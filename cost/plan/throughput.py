"""Throughput

All of it is estimated. What each part stands on (`ebbflow.infra.footprint.rank_bytes` has the moments of a step):
- parameters: float32, also under mixed precision, where the float32 shards are themselves the master weights and
  bfloat16 exists only in gathered units (FSDP2's MixedPrecisionPolicy) or autocast copies (DDP).
- optimizer: AdamW's two float32 moments. gradients: float32, as many as there are at the peak.
- parameters, gradients and optimizer are divided by the ranks that share one copy: all with fsdp2, those of a shard or
  node with hsdp; with `fsdp.cpu_offload` they are in host memory instead.
- unsharded: what FSDP2 and HSDP gather, and gradients that they have not reduced (`infra.footprint.gathered_bytes`).
  DDP: autocast's bfloat16 copies, and buckets where gradients are no views of them.
- activations, logits: `infra.footprint`, per sample. Attention is fused and keeps no matrix of length × length. Of
  activations `parallel.recompute` keeps a share. Loss and log-probabilities stay float32.

- compute: flops of the step / (GPUs × dense peak × MFU prior).
- network: bytes that each node exchanges per step / its sustained bandwidth, perfectly overlapped with compute.
- host: with offloading, bytes that each rank moves between host and GPU per step / the bandwidth of PCIe.
- launch: the host must start every kernel; a model too narrow for its GPU is bound by that, however fast the GPU.

Real steps are slower than their largest bound, which the MFU prior makes up for in the usual case. It is a prior:
where jobs of the same store have trained the same configuration, their measured speed takes its place; elsewhere it is
scaled by the ratio of the two estimates, so that what the estimate gets wrong alike in both places cancels.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from ebbflow.cost.catalogue import Catalogue, InstanceType
from ebbflow.cost.job_history import JobHistory, MeasuredSpeed
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.footprint import (
    BFLOAT16_BYTES,
    FLOAT32_BYTES,
    GangShape,
    ModelShape,
    causal_lm_shape,
    gpu_host_bytes,
    rank_bytes,
    reduced_bytes_per_parameter,
    shard_ranks,
    stays_gathered,
)

GIB = 2**30
# The CUDA context with loaded kernels takes about 0.5 GiB on data-centre GPUs, NCCL's channel buffers about as much,
# cuBLAS workspaces some tens of MiB: rounded up.
CONTEXT_BYTES = GIB * 5 // 4
# The caching allocator rounds blocks up and splits them; a tenth on top of the tensors is a customary margin.
FRAGMENTATION_SHARE = 0.10
# Of a host's installed memory the kernel, the platform and the container agent keep some: `cost.capacity.placement`.
HOST_SHARE = 0.925


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """Bytes per GPU at the peak of a step, by what they hold; `total` is their sum."""

    parameters: int
    gradients: int
    optimizer: int
    unsharded: int
    activations: int
    logits: int
    allowance: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def render(self) -> str:
        """One line: the total and its parts, largest kinds named."""
        parts = " + ".join(f"{name} {gib_text(size)}" for name, size in asdict(self).items())
        return f"{gib_text(self.total)} = {parts}"


def gib_text(size: int) -> str:
    """Bytes as text, in the unit that keeps three digits."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / 2**20:.1f} MiB"


def micro_batch(config: RunConfig, world_size: int) -> int | None:
    """Samples per rank and micro-batch: batch_size / (world size × accumulation). None when it does not divide."""
    parts = world_size * config.training.gradient_accumulation_steps
    samples, rest = divmod(config.training.batch_size, parts)
    return samples if rest == 0 and samples > 0 else None


def memory_fit(
    config: RunConfig, world_size: int, shape: ModelShape | None = None, *, ranks_per_node: int | None = None
) -> MemoryFit:
    """Bytes per GPU for `config` on `world_size` ranks. Raises ValueError when the batch does not divide.

    ranks_per_node: what hsdp shards over where no parallel.shard_size says so; None: all ranks.
    """
    samples = micro_batch(config, world_size)
    if samples is None:
        raise ValueError(explain_batch(config, world_size))
    shape = shape or causal_lm_shape(config.model)
    found = rank_bytes(config, shape, ranks=world_size, samples=samples, ranks_per_node=ranks_per_node)
    return MemoryFit(**asdict(found), allowance=CONTEXT_BYTES + int(FRAGMENTATION_SHARE * found.total))


def why_host_too_small(
    config: RunConfig, shape: ModelShape, *, nodes: int, ranks_per_node: int, ram_bytes: int
) -> tuple[str, float] | None:
    """(reason, needed ÷ usable) where a node's main memory does not hold its part of the gang; None where it does."""
    needed = gpu_host_bytes(config, shape, GangShape(nodes=nodes, processes_per_node=ranks_per_node))
    usable = int(HOST_SHARE * ram_bytes)
    if needed <= usable:
        return None
    return (
        f"needs {gib_text(needed)} of main memory per node (processes, staging buffers, offloaded state); "
        f"{gib_text(usable)} of {gib_text(ram_bytes)} are usable"
    ), needed / usable


def explain_batch(config: RunConfig, world_size: int) -> str:
    """Why the batch does not divide, in numbers."""
    size, accumulation = config.training.batch_size, config.training.gradient_accumulation_steps
    parts = world_size * accumulation
    return (
        f"batch_size {size} is no multiple of {world_size} ranks × {accumulation} accumulation = {parts}: "
        f"{size} = {size // parts} × {parts} + {size % parts}"
    )


# Published for tuned runs: 46 % (PaLM 540B, Chowdhery et al. 2022, table 3), 38–43 % (Llama 3 405B, Grattafiori et
# al. 2024, table 4). Ours is not tuned, so below the lowest of them.
MFU_PRIOR = 0.35
# Log standard deviation of MFU between published runs: GPT-3 21.3 %, Gopher 32.5 %, Megatron-Turing NLG 30.2 %, PaLM
# 46.2 % (Chowdhery et al. 2022, table 3): what is not known of a speed that nobody measured.
UNMEASURED_LOG_DEVIATION = 0.32
# GPUs of one node that talk over PCIe instead of NVLink gather their shards more slowly than they compute.
PCIE_FACTOR = 0.7
# Gathering over TCP costs CPU time and latency which EFA's bypass of the kernel saves.
NO_EFA_FACTOR = 0.6
# Share of the listed bandwidth that collectives reach.
NETWORK_EFFICIENCY = 0.7
# About 100 kernels per block, forward and backward, at about 10 µs of host time each in eager mode.
LAUNCH_SECONDS_PER_BLOCK = 1e-3
# Of three passes over the model (forward, and backward for inputs and weights) full recomputation makes it four. What
# selective computes again has hardly any flops.
RECOMPUTE_FACTOR = {"none": 1.0, "selective": 1.0, "full": 4 / 3}
# PCIe 3.0 × 16 moves 15.75 GB/s on paper, copies from pinned memory reach about three quarters of that.
PCIE_BYTES_PER_SECOND = 12e9


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """tokens_per_second: of whatever the shape's weight_unit counts. step_seconds: one optimizer step.

    bound: compute, network, host or launch, by the estimate. mfu: what the speed comes to. kind: measured, scaled or
    prior, in words. log_deviation: of the logarithm of the speed, how far it may be off.
    """

    tokens_per_second: float
    step_seconds: float
    bound: str
    mfu: float
    kind: str = "prior"
    log_deviation: float = UNMEASURED_LOG_DEVIATION


def estimate_throughput(
    config: RunConfig, shape: ModelShape, kind: InstanceType, nodes: int, processes_per_node: int
) -> Throughput | None:
    """None when the GPU's peak for the configured precision is not known."""
    peak = kind.gpu.peak_flops(config.fsdp.use_mixed_precision)
    if peak is None:
        return None
    ranks = nodes * processes_per_node
    flops = shape.flops_per_sample * config.training.batch_size
    again = RECOMPUTE_FACTOR[config.parallel.recompute]
    seconds = {
        "compute": again * flops / (ranks * peak * _mfu_prior(kind, nodes, processes_per_node)),
        "network": _network_bytes(config, shape, nodes, processes_per_node)
        / (kind.network_gbps * 1e9 / 8 * NETWORK_EFFICIENCY),
        "host": _host_bytes(config, shape, ranks, processes_per_node) / PCIE_BYTES_PER_SECOND,
        "launch": again * LAUNCH_SECONDS_PER_BLOCK * shape.units * _micro_steps(config),
    }
    bound = max(seconds, key=seconds.__getitem__)
    step_seconds = seconds[bound]
    return Throughput(
        tokens_per_second=shape.tokens_per_sample * config.training.batch_size / step_seconds,
        step_seconds=step_seconds,
        bound=bound,
        mfu=flops / (step_seconds * ranks * peak),
    )


def speed_fingerprint(config: RunConfig) -> str:
    """What decides the speed on given hardware, as a name: with two equal ones a measured speed serves for both."""
    sections = config.model_dump(
        mode="json", include={"model", "parallel", "ddp", "fsdp", "workload", "workload_options"}
    )
    batch = config.training.batch_size, config.training.gradient_accumulation_steps
    text = json.dumps([sections, batch], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def known_throughput(
    config: RunConfig,
    shape: ModelShape,
    kind: InstanceType,
    nodes: int,
    processes_per_node: int,
    *,
    catalogue: Catalogue,
    history: JobHistory,
    fingerprint: str,
) -> Throughput | None:
    """Measured by a job of this configuration on this gang; else scaled from another gang; else the estimate.

    None when the GPU's peak is not known, since then nothing says what the model needs there.
    """
    estimate = estimate_throughput(config, shape, kind, nodes, processes_per_node)
    if estimate is None:
        return None
    seen = history.speed(kind.name, nodes, processes_per_node, fingerprint)
    if seen is not None:
        ratio = seen.tokens_per_second / estimate.tokens_per_second
        return _faster(estimate, ratio, "measured", seen.log_deviation)
    seen = history.nearest_speed(kind.name, nodes, fingerprint)
    there = None if seen is None else _estimate_there(config, shape, seen, catalogue)
    if seen is None or there is None:
        return estimate
    scaled = f"scaled from {seen.nodes} × {seen.instance_type}"
    return _faster(estimate, seen.tokens_per_second / there.tokens_per_second, scaled, estimate.log_deviation)


def _estimate_there(
    config: RunConfig, shape: ModelShape, seen: MeasuredSpeed, catalogue: Catalogue
) -> Throughput | None:
    try:
        kind = catalogue[seen.instance_type]
    except KeyError:  # measured on a type that this catalogue does not have
        return None
    return estimate_throughput(config, shape, kind, seen.nodes, seen.processes_per_node)


def _faster(estimate: Throughput, ratio: float, kind: str, log_deviation: float) -> Throughput:
    return replace(
        estimate,
        tokens_per_second=estimate.tokens_per_second * ratio,
        step_seconds=estimate.step_seconds / ratio,
        mfu=estimate.mfu * ratio,
        kind=kind,
        log_deviation=log_deviation,
    )


def _mfu_prior(kind: InstanceType, nodes: int, processes_per_node: int) -> float:
    prior = MFU_PRIOR
    if processes_per_node > 1 and not kind.gpu.nvlink:
        prior *= PCIE_FACTOR
    if nodes > 1 and not kind.efa:
        prior *= NO_EFA_FACTOR
    return prior


def _micro_steps(config: RunConfig) -> int:
    return config.training.gradient_accumulation_steps


def _gatherings(config: RunConfig, shape: ModelShape) -> int:
    """Of all parameters per step: for forward, and of a larger model again for backward, of every micro-batch."""
    return _micro_steps(config) * (1 if stays_gathered(shape.parameters) else 2)


def _reductions(config: RunConfig, shape: ModelShape) -> int:
    """Of all gradients per step, among the ranks of one copy: of a small model with the last micro-batch only."""
    return 1 if stays_gathered(shape.parameters) else _micro_steps(config)


def _network_bytes(config: RunConfig, shape: ModelShape, nodes: int, ranks_per_node: int) -> float:
    """Bytes that one node receives from the others per optimizer step.

    FSDP2 gathers parameters and reduces gradients, how often is a question of size (`infra.footprint`). DDP's ring
    all-reduce moves the gradients twice, once per step, or with a static graph after every micro-batch. HSDP does the
    former among the nodes of one copy of the model, and the latter, once, between copies, for the share of the
    gradients that is a node's.
    """
    if config.parallel.mode == "ddp":
        moved = BFLOAT16_BYTES if config.ddp.gradient_compression == "bfloat16" else FLOAT32_BYTES
        all_reductions = _micro_steps(config) if config.ddp.static_graph else 1
        return 2 * all_reductions * moved * (nodes - 1) / nodes * shape.parameters
    gathered = BFLOAT16_BYTES if config.fsdp.use_mixed_precision else FLOAT32_BYTES
    reduced = reduced_bytes_per_parameter(config)
    nodes_per_copy = max(1, shard_ranks(config, nodes * ranks_per_node, ranks_per_node) // ranks_per_node)
    within = _gatherings(config, shape) * gathered + _reductions(config, shape) * reduced
    within *= (nodes_per_copy - 1) / nodes_per_copy
    copies_apart = nodes / nodes_per_copy
    between = 2 * reduced / nodes_per_copy * (copies_apart - 1) / copies_apart
    return (within + between) * shape.parameters


def _host_bytes(config: RunConfig, shape: ModelShape, ranks: int, ranks_per_node: int) -> float:
    """Bytes between one rank's GPU and host memory: its float32 shard up for each gathering, its gradient down.

    Between copies of hsdp gradients are added up once per step, and wait for that on the GPU.
    """
    if not config.fsdp.cpu_offload or config.parallel.mode == "ddp":
        return 0.0
    shard = shard_ranks(config, ranks, ranks_per_node)
    downs = _reductions(config, shape) if shard == ranks else 1
    return (_gatherings(config, shape) + downs) * FLOAT32_BYTES * shape.parameters / shard
