"""Does a model fit a GPU and its host? Sums of named parts, in bytes, so that a refusal can show its arithmetic.

All of it is estimated. What each part stands on (`ebbflow.infra.footprint.rank_bytes` has the moments of a step):
- parameters: float32, also under mixed precision, where the float32 shards are themselves the master weights and
  bfloat16 exists only in gathered units (FSDP2's MixedPrecisionPolicy) or autocast copies (DDP).
- optimizer: AdamW's two float32 moments. gradients: float32, as many as there are at the peak.
- parameters, gradients and optimizer are divided by the ranks that share one copy: all with fsdp2, those of a shard or
  node with hsdp; with `fsdp.cpu_offload` they are in host memory instead.
- unsharded: what FSDP2 and HSDP gather, and gradients that they have not reduced (`infra.footprint.gathered_bytes`).
  DDP: autocast's bfloat16 copies, and buckets where gradients are no views of them.
- activations, logits: `infra.model_shape`, per sample. Attention is fused and keeps no matrix of length × length. Of
  activations `parallel.recompute` keeps a share. Loss and log-probabilities stay float32.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.footprint import Gang, gpu_host_bytes, rank_bytes
from ebbflow.infra.model_shape import ModelShape, causal_lm_shape

GIB = 2**30
# The CUDA context with loaded kernels takes about 0.5 GiB on data-centre GPUs, NCCL's channel buffers about as much,
# cuBLAS workspaces some tens of MiB: rounded up.
CONTEXT_BYTES = GIB * 5 // 4
# The caching allocator rounds blocks up and splits them; a tenth on top of the tensors is a customary margin.
FRAGMENTATION_SHARE = 0.10
# Of a host's installed memory the kernel, the platform and the container agent keep some: `cost.capacity.placement`.
HOST_SHARE = 0.925


@dataclass(frozen=True, kw_only=True)
class Fit:
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
        parts = " + ".join(f"{name} {gib(size)}" for name, size in asdict(self).items())
        return f"{gib(self.total)} = {parts}"


def gib(size: int) -> str:
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
) -> Fit:
    """Bytes per GPU for `config` on `world_size` ranks. Raises ValueError when the batch does not divide.

    ranks_per_node: what hsdp shards over where no parallel.shard_size says so; None: all ranks.
    """
    samples = micro_batch(config, world_size)
    if samples is None:
        raise ValueError(batch_arithmetic(config, world_size))
    shape = shape or causal_lm_shape(config.model)
    found = rank_bytes(config, shape, ranks=world_size, samples=samples, ranks_per_node=ranks_per_node)
    return Fit(**asdict(found), allowance=CONTEXT_BYTES + int(FRAGMENTATION_SHARE * found.total))


def why_host_too_small(
    config: RunConfig, shape: ModelShape, *, nodes: int, ranks_per_node: int, ram_bytes: int
) -> tuple[str, float] | None:
    """(reason, needed ÷ usable) where a node's main memory does not hold its part of the gang; None where it does."""
    needed = gpu_host_bytes(config, shape, Gang(nodes=nodes, processes_per_node=ranks_per_node))
    usable = int(HOST_SHARE * ram_bytes)
    if needed <= usable:
        return None
    return (
        f"needs {gib(needed)} of main memory per node (processes, staging buffers, offloaded state); {gib(usable)} of "
        f"{gib(ram_bytes)} are usable"
    ), needed / usable


def batch_arithmetic(config: RunConfig, world_size: int) -> str:
    """Why the batch does not divide, in numbers."""
    size, accumulation = config.training.batch_size, config.training.gradient_accumulation_steps
    parts = world_size * accumulation
    return (
        f"batch_size {size} is no multiple of {world_size} ranks × {accumulation} accumulation = {parts}: "
        f"{size} = {size // parts} × {parts} + {size % parts}"
    )
