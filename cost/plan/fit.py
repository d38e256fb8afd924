"""Does a model fit a GPU? A sum of named parts, in bytes, so that a refusal can show its arithmetic.

All of it is estimated. What each part stands on:
- parameters: float32, also under mixed precision, where the float32 shards are themselves the master weights and
  bfloat16 exists only in gathered units (FSDP2's MixedPrecisionPolicy) or autocast copies (DDP).
- optimizer: AdamW's two float32 moments.
- parameters, gradients and optimizer are divided by the ranks that share one copy: all with fsdp2, those of a shard or
  node with hsdp; with `fsdp.cpu_offload` they are in host memory instead.
- unsharded: what FSDP2 and HSDP gather, and gradients that they have not reduced (`infra.footprint.gathered_bytes`).
  DDP: its all-reduce buckets (float32), plus autocast's bfloat16 copies under mixed precision.
- activations, logits: `infra.model_shape`, per sample. Of activations `parallel.recompute` keeps a share.
  Loss and logits stay float32.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from infra.config.schema import RunConfig
from infra.footprint import BFLOAT16_BYTES, FLOAT32_BYTES, gathered_bytes, kept_activations_share, shard_ranks
from infra.model_shape import ModelShape, causal_lm_shape

GIB = 2**30
# The CUDA context with loaded kernels takes about 0.5 GiB on data-centre GPUs, NCCL's channel buffers about as much,
# cuBLAS workspaces some tens of MiB: rounded up.
CONTEXT_BYTES = GIB * 5 // 4
# The caching allocator rounds blocks up and splits them; a tenth on top of the tensors is a customary margin.
FRAGMENTATION_SHARE = 0.10


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
    mixed = config.fsdp.use_mixed_precision
    compute_bytes = BFLOAT16_BYTES if mixed else FLOAT32_BYTES
    per_rank = -(-shape.parameters // min(world_size, shard_ranks(config, world_size, ranks_per_node)))
    if config.fsdp.cpu_offload and config.parallel.mode != "ddp":
        per_rank = 0
    kept = kept_activations_share(config, shape.units)
    parts = {
        "parameters": FLOAT32_BYTES * per_rank,
        "gradients": FLOAT32_BYTES * per_rank,
        "optimizer": 2 * FLOAT32_BYTES * per_rank,
        "unsharded": _unsharded(config, shape, world_size),
        "activations": int(kept * shape.activation_bytes_per_sample * samples * compute_bytes / FLOAT32_BYTES),
        "logits": shape.logits_bytes_per_sample * samples,
    }
    return Fit(**parts, allowance=CONTEXT_BYTES + int(FRAGMENTATION_SHARE * sum(parts.values())))


def batch_arithmetic(config: RunConfig, world_size: int) -> str:
    """Why the batch does not divide, in numbers."""
    size, accumulation = config.training.batch_size, config.training.gradient_accumulation_steps
    parts = world_size * accumulation
    return (
        f"batch_size {size} is no multiple of {world_size} ranks × {accumulation} accumulation = {parts}: "
        f"{size} = {size // parts} × {parts} + {size % parts}"
    )


def _unsharded(config: RunConfig, shape: ModelShape, world_size: int) -> int:
    if config.parallel.mode != "ddp":
        return gathered_bytes(config, shape, world_size)
    buckets = FLOAT32_BYTES if world_size > 1 else 0
    copies = BFLOAT16_BYTES if config.fsdp.use_mixed_precision else 0
    return (buckets + copies) * shape.parameters
