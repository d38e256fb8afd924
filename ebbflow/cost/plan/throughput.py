"""Estimate the memory per GPU and the tokens per second of a gang (all ranks of a job).

Memory is a sum of named parts in bytes, so that a refusal can show its arithmetic.
`ebbflow.core.footprint.rank_bytes` computes the parts at the peak of a step:

- parameters: float32, also under mixed precision, where the float32 shards are the master weights.
  bfloat16 exists only in gathered units (FSDP2's MixedPrecisionPolicy) or autocast copies (DDP).
- optimizer: the two moments of AdamW, in float32.
- gradients: float32, at their peak.
- Parameters, gradients and optimizer state are divided by the number of ranks that share one copy
  of the model: all ranks with fsdp2, the ranks of one shard group or node with hsdp.
  `fsdp.cpu_offload` keeps them in host memory.
- unsharded: with FSDP2 and HSDP, gathered parameters and gradients that are not yet reduced
  (`ebbflow.core.footprint.gathered_bytes`). With DDP, autocast's bfloat16 copies, and gradient buckets
  (unless gradients are views into them).
- activations, logits: per sample, from `ebbflow.core.footprint`. Attention is fused and stores no matrix
  of length × length. With `parallel.recompute` only a share of the activations is stored. Loss and
  log-probabilities stay float32.

The duration of a step is the longest of five lower bounds:

- compute: (FLOPs of the step / dense peak) × (a + b × peak / memory bandwidth) + bytes that other
  operations move / memory bandwidth, per GPU: a roofline without overlap (`Roofline`).
- network: bytes that each node exchanges per step / its sustained bandwidth, perfectly overlapped
  with compute.
- host: with offloading, bytes that each rank moves between host and GPU per step / the bandwidth of
  PCIe.
- pcie: for several GPUs per node without NVLink, bytes that each rank receives from others / the
  bandwidth of PCIe.
- launch: host time to launch all kernels, which limits a narrow model on a fast GPU.

Real steps are slower than their longest bound; a and b, fitted to published runs, account for
this. A speed that the job history measured for the same configuration replaces the estimate. A speed measured on
another gang is multiplied by the ratio of the two gangs' estimates, so that errors common to both
estimates cancel.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace

from ebbflow.core import footprint
from ebbflow.core.config.device_settings import settle_for_device
from ebbflow.core.config.schema import ModelConfig, RunConfig
from ebbflow.cost.catalogue import Catalogue, Gpu, InstanceType
from ebbflow.cost.job_history import JobHistory, MeasuredSpeed

GIB = 2**30
# The CUDA context with loaded kernels takes about 0.5 GiB on data-centre GPUs, NCCL's channel
# buffers about as much, cuBLAS workspaces some tens of MiB: rounded up.
CONTEXT_BYTES = GIB * 5 // 4
# The caching allocator rounds blocks up and splits them; a tenth on top of the tensors is a
# customary margin.
FRAGMENTATION_SHARE = 0.10
# Usable share of a host's memory: the kernel, the platform and the container agent keep the rest
# (`cost.capacity.placement`).
HOST_SHARE = 0.925

# MFU in float32 and on GPUs of unknown memory bandwidth. Published for tuned runs: 46 % (PaLM 540B,
# Chowdhery et al. 2022, table 3), 38–43 % (Llama 3 405B, Grattafiori et al. 2024, table 4).
MFU_PRIOR = 0.35
# Time of a matrix product in half precision: (FLOPs / peak) × (a + b × peak / bandwidth), which is
# 1 / MFU = a + b × peak / bandwidth. Least squares of log errors over the 78 runs that gpus.csv
# counts, by `ebbflow bench published`. They are of two GPUs, so no run tests the relation itself.
PEAK_SHARE = 1.05  # a
BYTES_PER_FLOP = 0.0037  # b: memory traffic of matrix products
# Bytes moved per byte of activations: written, read by the next operation, read in the backward
# pass, and their gradient written and read. Recomputation writes and reads them once more.
_ACTIVATION_PASSES = 5
_RECOMPUTE_PASSES = 2
# Each float32 tensor of the loss is written and read.
_LOGITS_PASSES = 2
# Weights in half precision are read in forward and twice in backward (gradients of inputs and of
# weights write as much), and their gradient is written, read and added to in float32.
_WEIGHT_READS = 3
_GRADIENT_BYTES = 6
# AdamW reads weight, gradient and two moments, and writes all but the gradient, in float32.
_OPTIMIZER_BYTES = 28
# Speed per GPU after each doubling of the nodes: geometric mean from 8 to 64 GPUs of eight models
# on A100 and H100 with 1,600 Gbit/s per node (0.972 to 1.001; mosaicml/llm-foundry,
# scripts/train/benchmarking/README.md, 2024-04-22).
DOUBLING_EFFICIENCY = 0.99
# Log standard deviation of MFU between published runs: GPT-3 21.3 %, Gopher 32.5 %, Megatron-Turing
# NLG 30.2 %, PaLM 46.2 % (Chowdhery et al. 2022, table 3). The uncertainty of a speed that was not
# measured.
UNMEASURED_LOG_DEVIATION = 0.32
# In addition for a GPU without fitted runs: the error if the runs of the A100 and of the H100 are
# each predicted with the other's mean MFU.
UNCALIBRATED_LOG_DEVIATION = 0.33
# Gathering over TCP costs CPU time and latency; EFA bypasses the kernel.
NO_EFA_FACTOR = 0.6
# Bandwidth of one network card, which TCP uses if no EFA interfaces are requested (p4d: 4 cards for
# 400 Gbit/s; p5: 32 cards, of which the first has 100 Gbit/s for TCP).
TCP_GBPS = 100.0
# Float32 tensors of the size of the logits at the peak of the loss, as `footprint` counts them.
_LOSS_COPIES = 3
# Source of a speed on a GPU of which gpus.csv counts no fitted run
UNCALIBRATED = "prior, uncalibrated"
# Source of a speed in float32 on another GPU: its fitted runs are in half precision
FLOAT32_PRIOR = "prior, float32"
# Share of the listed bandwidth that collectives reach.
NETWORK_EFFICIENCY = 0.7
# About 100 kernels per block, forward and backward, at about 10 µs of host time each in eager mode.
LAUNCH_SECONDS_PER_BLOCK = 1e-3
# Duration of a step relative to one without recomputation. Full recomputation adds a fourth pass
# over the model to three, but its memory allows larger micro-batches, whose products are faster: in
# the table of gpus.csv, of models from 0.76 billion parameters on one node, the median MFU without
# it is 1.10 (A100, 22 and 20 runs) and 1.11 (H100, 21 and 16 runs) times that with it. Selective
# recomputation has hardly any flops.
RECOMPUTE_FACTOR = {"none": 1.0, "selective": 1.0, "full": 1.1}
# Oldest GPUs that multiply fp8 numbers.
FLOAT8_CAPABILITY = 8.9
# Tokens per second with fp8 relative to bfloat16, both compiled: Llama 3.1 8B on 8 and 128 H100
# (8,532 / 6,667 and 8,380 / 6,514; torchtitan, benchmarks/llama3_h100_202412_torchtitan.md). Without
# compilation, scaling takes the time that the products save.
FLOAT8_SPEEDUP = 1.28
# PCIe 3.0 × 16 moves 15.75 GB/s on paper; copies from pinned memory reach about three quarters of
# that. The value is also used for copies between GPUs without NVLink, which pass through host
# memory. PCIe 4.0 may be faster (unmeasured).
PCIE_BYTES_PER_SECOND = 12e9


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """Memory per GPU at the peak of a step, in bytes for each kind of content."""

    parameters: int
    gradients: int
    optimizer: int
    unsharded: int  # gathered parameters and gradients that are not yet reduced
    activations: int
    logits: int
    allowance: int  # CUDA context, library buffers and fragmentation

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def render(self) -> str:
        """Render the total memory and its parts on one line."""
        parts = " + ".join(f"{name} {gib_text(size)}" for name, size in asdict(self).items())
        return f"{gib_text(self.total)} = {parts}"


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Speed of a gang (all ranks of a job)."""

    # Tokens per second of all ranks together, or other units of the model (`weight_unit`)
    tokens_per_second: float
    step_seconds: float  # duration of one optimizer step
    bound: str  # the resource that limits the speed: compute, network, host, pcie or launch
    mfu: float  # model FLOPs utilisation at this speed
    # source of the speed: "measured", "scaled from …", "prior" (estimated), `FLOAT32_PRIOR` or
    # `UNCALIBRATED`
    kind: str = "prior"
    # Uncertainty of the speed: the standard deviation of its logarithm
    log_deviation: float = UNMEASURED_LOG_DEVIATION


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Parts of the time that one GPU needs for the operations of a step in half precision."""

    peak_seconds: float  # of the matrix products at the GPU's peak
    flops_per_byte: float  # peak / memory bandwidth
    moved_seconds: float  # of what other operations move, at the memory bandwidth

    def seconds(
        self, peak_share: float = PEAK_SHARE, bytes_per_flop: float = BYTES_PER_FLOP
    ) -> float:
        products = self.peak_seconds * (peak_share + bytes_per_flop * self.flops_per_byte)
        return products + self.moved_seconds


def gib_text(size: int) -> str:
    """Format bytes in GiB, or in MiB below 1 GiB."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / 2**20:.1f} MiB"


def micro_batch(config: RunConfig, world_size: int) -> int | None:
    """Return the samples per rank and micro-batch; None if the batch does not divide evenly.

    They are batch_size / (ranks × accumulation steps).
    """
    parts = footprint.data_ranks(config, world_size) * config.training.gradient_accumulation_steps
    samples, rest = divmod(config.training.batch_size, parts)
    if rest == 0 and samples > 0:
        return samples
    return None


def memory_fit(
    config: RunConfig,
    world_size: int,
    shape: footprint.ModelShape | None = None,
    *,
    ranks_per_node: int | None = None,
) -> MemoryFit:
    """Estimate the peak memory per GPU.

    Args:
        world_size: Number of ranks.
        shape: Size of the model. None means the built-in model.
        ranks_per_node: Shard size of hsdp if `parallel.shard_size` is not set. None means all
            ranks.

    Raises:
        ValueError: The batch cannot be divided evenly among the ranks.
    """
    samples = micro_batch(config, world_size)
    if samples is None:
        raise ValueError(explain_batch(config, world_size))
    shape = shape or footprint.causal_lm_shape(config.model)
    found = footprint.rank_bytes(
        config, shape, ranks=world_size, samples=samples, ranks_per_node=ranks_per_node
    )
    reserved = int(FRAGMENTATION_SHARE * found.total) + _freed_logits_bytes(config, shape, found)
    return MemoryFit(**asdict(found), allowance=CONTEXT_BYTES + reserved)


def why_host_too_small(
    config: RunConfig,
    shape: footprint.ModelShape,
    *,
    nodes: int,
    ranks_per_node: int,
    ram_bytes: int,
) -> tuple[str, float] | None:
    """Return why a node's main memory is too small for its ranks.

    Returns:
        An explanation and the ratio of needed to usable memory; None if the memory is large enough.
    """
    needed = footprint.gpu_host_bytes(
        config, shape, footprint.HostGang(nodes=nodes, processes_per_node=ranks_per_node)
    )
    usable = int(HOST_SHARE * ram_bytes)
    if needed <= usable:
        return None
    return (
        f"needs {gib_text(needed)} of main memory per node (processes, staging buffers, "
        f"offloaded state); {gib_text(usable)} of {gib_text(ram_bytes)} are usable"
    ), needed / usable


def explain_batch(config: RunConfig, world_size: int) -> str:
    """Explain in numbers why the batch cannot be divided evenly among `world_size` ranks."""
    size = config.training.batch_size
    accumulation = config.training.gradient_accumulation_steps
    groups = footprint.data_ranks(config, world_size)
    tensor = config.parallel.tensor_size
    parts = groups * accumulation
    if tensor == 1:
        ranks = f"{world_size} ranks"
    else:
        ranks = f"{world_size} / {tensor} groups of ranks"
    return (
        f"batch_size {size} is no multiple of {ranks} × {accumulation} accumulation = {parts}: "
        f"{size} = {size // parts} × {parts} + {size % parts}"
    )


def estimate_throughput(
    config: RunConfig,
    shape: footprint.ModelShape,
    kind: InstanceType,
    nodes: int,
    processes_per_node: int,
) -> Throughput | None:
    """Estimate the speed of a gang from the bounds in this module's docstring.

    Returns:
        None if the GPU's peak at the configured precision is unknown.
    """
    peak = kind.gpu.peak_flops(matmul_dtype(config))
    if peak is None:
        return None
    ranks = nodes * processes_per_node
    flops = shape.flops_per_sample * config.training.batch_size
    again = _repeated_compute_factor(config, shape, ranks)
    roofline = estimate_roofline(config, shape, kind.gpu, ranks, processes_per_node)
    if roofline is None:
        compute = again * flops / (ranks * peak * MFU_PRIOR)
    else:
        compute = roofline.seconds()
    compute /= _float8_speedup(config, kind.gpu)
    shard = footprint.shard_ranks(config, ranks, processes_per_node)
    # By one node from the others
    received = _exchanged_bytes(config, shape, nodes, processes_per_node, shard)
    # Of a group's ring, one rank receives for all
    if nodes > 1 and processes_per_node % config.parallel.tensor_size:
        received += _tensor_bytes(config, shape, ranks)
    seconds = {
        "compute": compute / _scaling_efficiency(config, kind, nodes),
        "network": received / (_network_gbps(config, kind) * 1e9 / 8 * NETWORK_EFFICIENCY),
        "host": _host_bytes(config, shape, ranks, processes_per_node) / PCIE_BYTES_PER_SECOND,
        "pcie": _pcie_bytes(config, shape, kind, ranks, processes_per_node) / PCIE_BYTES_PER_SECOND,
        "launch": again * LAUNCH_SECONDS_PER_BLOCK * shape.units * _micro_steps(config),
    }
    bound = max(seconds, key=seconds.__getitem__)
    step_seconds = seconds[bound]
    return Throughput(
        tokens_per_second=shape.tokens_per_sample * config.training.batch_size / step_seconds,
        step_seconds=step_seconds,
        bound=bound,
        mfu=flops / (step_seconds * ranks * peak),
        kind=_prior_kind(config, kind.gpu),
        log_deviation=math.hypot(UNMEASURED_LOG_DEVIATION, _gpu_log_deviation(config, kind.gpu)),
    )


def estimate_roofline(
    config: RunConfig, shape: footprint.ModelShape, gpu: Gpu, ranks: int, ranks_per_node: int
) -> Roofline | None:
    """Estimate the parts of a step's time on one GPU, without communication.

    None in float32, and if peak or memory bandwidth of the GPU is unknown.
    """
    peak = gpu.peak_flops(matmul_dtype(config))
    if peak is None or gpu.memory_gbps is None or not config.fsdp.mixes_precision:
        return None
    again = _repeated_compute_factor(config, shape, ranks)
    flops = again * shape.flops_per_sample * config.training.batch_size / ranks
    bandwidth = gpu.memory_gbps * 1e9
    moved = count_moved_bytes(config, shape, ranks, ranks_per_node)
    return Roofline(
        peak_seconds=flops / peak, flops_per_byte=peak / bandwidth, moved_seconds=moved / bandwidth
    )


def large_model_mfu(gpu: Gpu, peak: float) -> float:
    """Return the MFU of a model so large that its matrix products take all of the step.

    Args:
        peak: FLOP/s at the precision of the products.
    """
    if gpu.memory_gbps is None:
        return MFU_PRIOR
    return 1 / (PEAK_SHARE + BYTES_PER_FLOP * peak / (gpu.memory_gbps * 1e9))


def count_moved_bytes(
    config: RunConfig, shape: footprint.ModelShape, ranks: int, ranks_per_node: int
) -> float:
    """Return the bytes that a rank reads and writes in GPU memory per step in mixed precision.

    These are activations between operations, logits, weights once per pass, gradients and the
    optimizer's state. Operands of matrix products that a cache may hold do not count.
    """
    tensor = config.parallel.tensor_size
    repeats = config.parallel.recompute == "full"
    samples = config.training.batch_size / footprint.data_ranks(config, ranks)
    share = footprint.BFLOAT16_BYTES / footprint.FLOAT32_BYTES
    passes = _ACTIVATION_PASSES + _RECOMPUTE_PASSES * repeats
    activations = passes * share * shape.activation_bytes_per_sample
    logits = _LOGITS_PASSES * shape.logits_bytes_per_sample
    weights = footprint.BFLOAT16_BYTES * (_WEIGHT_READS + repeats) * shape.parameters
    gradients = _GRADIENT_BYTES * shape.trained_parameters
    shard = footprint.shard_ranks(config, ranks, ranks_per_node)
    optimizer = 0.0 if config.fsdp.cpu_offload else _OPTIMIZER_BYTES * shape.trained_parameters
    per_micro_batch = _micro_steps(config) * (weights + gradients)
    return (samples * (activations + logits) + per_micro_batch) / tensor + optimizer / shard


def matmul_dtype(config: RunConfig) -> str:
    """Return the number format of matrix products: tf32, float32 or a half precision."""
    dtype = config.fsdp.compute_dtype
    if dtype == "float32" and config.training.tf32 and config.script is None:
        return "tf32"
    return dtype


def speed_fingerprint(config: RunConfig) -> str:
    """Return a hash of the settings that decide the speed on given hardware.

    A speed measured with one configuration applies to every configuration with the same
    fingerprint.
    """
    names = {"model", "parallel", "ddp", "fsdp", "workload", "workload_options"}
    if config.script:
        names |= {"script", "script_args"}
    else:
        names |= set()
    sections = config.model_dump(mode="json", include=names)
    # Speeds were recorded before the keys behind vocab_size existed: those count only if they are
    # set.
    for name in [*ModelConfig.model_fields][5:]:
        if getattr(config.model, name) == ModelConfig.model_fields[name].default:
            del sections["model"][name]
    if config.parallel.tensor_size == 1:
        del sections["parallel"]["tensor_size"]
    if sections["fsdp"]["param_dtype"] == "auto":  # the default's name when speeds were recorded
        sections["fsdp"]["param_dtype"] = "bfloat16"
    if config.training.tf32:  # speeds were recorded before it counted
        sections["training"] = {"tf32": True}
    batch = config.training.batch_size, config.training.gradient_accumulation_steps
    text = json.dumps([sections, batch], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# The gang and the sources of its speed, which the caller looks up once for many gangs.
def known_throughput(  # noqa: PLR0913
    config: RunConfig,
    shape: footprint.ModelShape,
    kind: InstanceType,
    nodes: int,
    processes_per_node: int,
    *,
    catalogue: Catalogue,
    history: JobHistory,
    fingerprint: str,
) -> Throughput | None:
    """Return the measured speed of a gang, else a speed scaled from another gang's measurement,
    else the estimate.

    Args:
        config: the configuration as written; its "auto" keys differ between GPUs.
        fingerprint: `speed_fingerprint` of `config`.

    Returns:
        None if the GPU's peak at the configured precision is unknown.
    """
    settled = settle_for_device(config, kind.gpu.compute_capability)
    estimate = estimate_throughput(settled, shape, kind, nodes, processes_per_node)
    if estimate is None:
        return None
    seen = history.speed(kind.name, nodes, processes_per_node, fingerprint)
    if seen is not None:
        ratio = seen.tokens_per_second / estimate.tokens_per_second
        return _faster(estimate, ratio, "measured", seen.log_deviation)
    seen = history.nearest_speed(kind.name, nodes, fingerprint)
    if seen is None:
        there = None
    else:
        there = _estimate_there(config, shape, seen, catalogue)
    if seen is None or there is None:
        return estimate
    scaled = f"scaled from {seen.nodes} × {seen.instance_type}"
    return _faster(
        estimate, seen.tokens_per_second / there.tokens_per_second, scaled, estimate.log_deviation
    )


def _estimate_there(
    config: RunConfig, shape: footprint.ModelShape, seen: MeasuredSpeed, catalogue: Catalogue
) -> Throughput | None:
    try:
        kind = catalogue[seen.instance_type]
    except KeyError:  # measured on a type that is not in this catalogue
        return None
    settled = settle_for_device(config, kind.gpu.compute_capability)
    return estimate_throughput(settled, shape, kind, seen.nodes, seen.processes_per_node)


def _faster(estimate: Throughput, ratio: float, kind: str, log_deviation: float) -> Throughput:
    return replace(
        estimate,
        tokens_per_second=estimate.tokens_per_second * ratio,
        step_seconds=estimate.step_seconds / ratio,
        mfu=estimate.mfu * ratio,
        kind=kind,
        log_deviation=log_deviation,
    )


def _scaling_efficiency(config: RunConfig, kind: InstanceType, nodes: int) -> float:
    """Return the speed per GPU on `nodes` nodes, relative to that on one node."""
    efficiency = DOUBLING_EFFICIENCY ** math.log2(nodes)
    if nodes > 1 and not _efa_interfaces(config, kind):
        return efficiency * NO_EFA_FACTOR
    return efficiency


def _prior_kind(config: RunConfig, gpu: Gpu) -> str:
    """Return the source of an estimated speed. The fitted runs, all published, are in half precision."""
    if not gpu.fitted_runs:
        return UNCALIBRATED
    if not config.fsdp.mixes_precision:
        return FLOAT32_PRIOR
    return "prior"


def _gpu_log_deviation(config: RunConfig, gpu: Gpu) -> float:
    if not config.fsdp.mixes_precision:
        return 0.0  # the spread of MFU_PRIOR is that between published runs
    if gpu.fit_deviation is None:
        return UNCALIBRATED_LOG_DEVIATION
    return gpu.fit_deviation


def _freed_logits_bytes(
    config: RunConfig, shape: footprint.ModelShape, found: footprint.RankBytes
) -> int:
    """Return the bytes of the half-precision logits that are freed after conversion to float32.

    No float32 tensor of the loss, twice their size, fits into the block that they leave in the
    allocator. Chunks of a loss use it again, and selective recomputation keeps these logits.
    """
    at_once = config.training.loss_chunk is None and config.parallel.recompute != "selective"
    if not config.fsdp.mixes_precision or not at_once or shape.kind != "computed":
        return 0
    share = footprint.BFLOAT16_BYTES / (_LOSS_COPIES * footprint.FLOAT32_BYTES)
    return int(share * found.logits)


def _efa_interfaces(config: RunConfig, kind: InstanceType) -> int:
    """Return the number of EFA interfaces that a node of the job will have.

    These are the interfaces that the job requests or, on Slurm, all of the node.
    """
    if config.cluster.plan_for == "slurm":  # the nodes' own
        return kind.efa
    return min(kind.efa, config.batch.efa_interfaces)


def _network_gbps(config: RunConfig, kind: InstanceType) -> float:
    """Return the bandwidth of a node, in Gbit/s, over the interfaces that the job requests.

    A type with EFA has one network card per interface. Without EFA, TCP uses the first card alone.
    """
    if not kind.efa:
        return kind.network_gbps
    used = _efa_interfaces(config, kind)
    if not used:
        return min(kind.network_gbps, TCP_GBPS)
    return kind.network_gbps * used / kind.efa


def _float8_speedup(config: RunConfig, gpu: Gpu) -> float:
    has_float8 = gpu.compute_capability >= FLOAT8_CAPABILITY
    if config.fsdp.float8 == "on" and config.parallel.compile and has_float8:
        return FLOAT8_SPEEDUP
    return 1.0


def _repeated_compute_factor(config: RunConfig, shape: footprint.ModelShape, ranks: int) -> float:
    """Return the factor by which recomputation and a loss in chunks lengthen the compute."""
    factor = RECOMPUTE_FACTOR[config.parallel.recompute]
    chunk = config.training.loss_chunk
    tokens = (micro_batch(config, ranks) or 1) * shape.tokens_per_sample
    if chunk is not None and config.user_code is None and tokens > chunk:
        # The output layer's product, 2 of its 6 FLOPs per parameter and token, is computed again
        again = 2.0 * config.model.vocab_size * config.model.hidden_size
        factor += again * shape.tokens_per_sample / shape.flops_per_sample
    return factor


def _micro_steps(config: RunConfig) -> int:
    return config.training.gradient_accumulation_steps


def _gatherings(config: RunConfig, shape: footprint.ModelShape) -> int:
    """Count the all-gathers of the parameters per step: one per micro-batch for a small model, two
    for a large one.
    """
    return _micro_steps(config) * (1 if footprint.stays_gathered(shape.parameters) else 2)


def _reductions(config: RunConfig, shape: footprint.ModelShape) -> int:
    """Count the gradient reductions per step among the ranks that share one copy of the model.

    A small model needs one per step. A large model needs one per micro-batch, so that no rank holds
    all gradients.
    """
    if footprint.stays_gathered(shape.parameters):
        return 1
    return _micro_steps(config)


def _pcie_bytes(
    config: RunConfig,
    shape: footprint.ModelShape,
    kind: InstanceType,
    ranks: int,
    ranks_per_node: int,
) -> float:
    """Return the bytes that one rank receives over PCIe per step; 0 with NVLink or with one rank
    per node.

    In a ring every member receives the same number of bytes, so the formula for a ring of nodes
    holds for its ranks.
    """
    if kind.gpu.nvlink or ranks_per_node == 1:
        return 0.0
    tensor = config.parallel.tensor_size
    shard = footprint.shard_ranks(config, ranks, ranks_per_node)
    # A rank exchanges its part of the layers with one rank of each other tensor group.
    parts = _exchanged_bytes(config, shape, ranks // tensor, 1, shard // tensor) / tensor
    return parts + _tensor_bytes(config, shape, ranks)


def _tensor_bytes(config: RunConfig, shape: footprint.ModelShape, ranks: int) -> float:
    """Return the bytes that a rank receives from its tensor group per step.

    A ring all-reduce moves its tensor twice. Each block has two in the forward pass (again with
    `recompute` full) and two in the backward pass, of one hidden vector per token. The embeddings
    gather a vector, the head adds up logits and gathers a gradient.
    """
    tensor = config.parallel.tensor_size
    width = config.model.hidden_size
    if config.parallel.recompute == "full":
        passes = 3
    else:
        passes = 2
    floats = 2 * passes * 2 * (shape.units - 2) * width + 2 * width + 2 * config.model.vocab_size
    tokens = (
        shape.tokens_per_sample * config.training.batch_size / footprint.data_ranks(config, ranks)
    )
    if config.fsdp.mixes_precision:
        each = footprint.BFLOAT16_BYTES
    else:
        each = footprint.FLOAT32_BYTES
    return tokens * floats * each * (tensor - 1) / tensor


def _exchanged_bytes(
    config: RunConfig, shape: footprint.ModelShape, members: int, ranks_each: int, shard: int
) -> float:
    """Return the bytes that one group of ranks receives from all other groups per optimizer step.

    DDP's ring all-reduce moves the gradients twice, after each step or, with a static graph, after
    every micro-batch. FSDP2 gathers parameters and reduces gradients; how often depends on the
    model's size (`ebbflow.core.footprint`). HSDP gathers and reduces within one model copy, and
    all-reduces shares of the gradients between copies.

    Args:
        members: Number of groups that exchange data.
        ranks_each: Number of ranks per group.
        shard: Number of ranks that share one copy of the model.
    """
    if config.parallel.mode == "ddp":
        if config.ddp.gradient_compression == "bfloat16":
            moved = footprint.BFLOAT16_BYTES
        else:
            moved = footprint.FLOAT32_BYTES
        if config.ddp.static_graph:
            all_reductions = _micro_steps(config)
        else:
            all_reductions = 1
        return 2 * all_reductions * moved * (members - 1) / members * shape.trained_parameters
    if config.fsdp.mixes_precision:
        gathered = footprint.BFLOAT16_BYTES
    else:
        gathered = footprint.FLOAT32_BYTES
    reduced = footprint.reduced_bytes_per_parameter(config)
    per_copy = max(1, shard // ranks_each)
    within = _gatherings(config, shape) * gathered * shape.parameters
    within += _reductions(config, shape) * reduced * shape.trained_parameters
    within *= (per_copy - 1) / per_copy
    copies_apart = members / per_copy
    return (
        within
        + 2 * reduced / per_copy * (copies_apart - 1) / copies_apart * shape.trained_parameters
    )


def _host_bytes(
    config: RunConfig, shape: footprint.ModelShape, ranks: int, ranks_per_node: int
) -> float:
    """Return the bytes that one rank moves between GPU and host memory per step; 0 without
    offloading.

    Each gather moves the rank's shard of the parameters to the GPU, and each reduction its shard of
    the gradients to the host. With several copies of the model (hsdp), gradients stay on the GPU
    until they are summed between copies, once per step.
    """
    if not config.fsdp.cpu_offload or config.parallel.mode == "ddp":
        return 0.0
    shard = footprint.shard_ranks(config, ranks, ranks_per_node)
    if shard == ranks:
        downs = _reductions(config, shape)
    else:
        downs = 1
    moved = _gatherings(config, shape) * shape.parameters + downs * shape.trained_parameters
    return footprint.FLOAT32_BYTES * moved / shard
