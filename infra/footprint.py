"""What a job takes of the machine it runs on: bytes and processes, all of it estimated."""

from __future__ import annotations

from dataclasses import dataclass

from infra.config.schema import RunConfig
from infra.model_shape import ModelShape, causal_lm_shape

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
# Up to this, FSDP2 keeps parameters gathered from forward to backward, and whole gradients between micro-batches, which
# it then reduces once per step. Above, both go back to shards at once: they are the memory that sharding is to save.
SMALL_MODEL_BYTES = 2**30
# A commit holds what training goes on from: float32 weights (4 bytes) and AdamW's two float32 moments (4 + 4).
COMMIT_BYTES_PER_PARAMETER = 12
GRADIENT_BYTES_PER_PARAMETER = 4
STAGING_SLABS = 2
# A rank before its model: Python, torch, gloo and their buffers. Importing torch 2.13 alone measured 0.21 GiB.
PROCESS_BYTES = 1 << 29
# What of a unit's activations is kept until backward: of the about 18·d floats of a transformer block and token
# (`infra.model_shape`) its input, d; selectively also the outputs of its matrix products and attention, 10·d more.
_KEPT_SHARE = {"none": 1.0, "selective": 11 / 18, "full": 1 / 18}


@dataclass(frozen=True, kw_only=True)
class Gang:
    """The ranks of a job on one machine. On a laptop that is all of them, whatever number of nodes they play."""

    nodes: int
    processes_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes_per_node

    def __str__(self) -> str:
        return f"{self.nodes} × {self.processes_per_node} = {self.ranks} ranks"


def local_gang(config: RunConfig) -> Gang | None:
    """The gang as the configuration gives it, or None where the plan is to choose it."""
    nodes, processes = config.cluster.nodes, config.cluster.processes_per_node
    if nodes == "auto" or processes == "auto":
        return None
    return Gang(nodes=nodes, processes_per_node=processes)


def shard_ranks(config: RunConfig, ranks: int, ranks_per_node: int | None = None) -> int:
    """Ranks that hold one copy of the model between them: 1 is mode ddp, all are fsdp2."""
    if config.parallel.mode == "hsdp":
        return config.parallel.shard_size or ranks_per_node or ranks
    return ranks if config.parallel.mode == "fsdp2" else 1


def stays_gathered(parameters: int) -> bool:
    """Whether a sharded model of so many parameters is small: see SMALL_MODEL_BYTES, of float32 parameters."""
    return FLOAT32_BYTES * parameters <= SMALL_MODEL_BYTES


def reduced_bytes_per_parameter(config: RunConfig) -> int:
    """Of a gradient while the ranks of a sharded mode add it up."""
    halves = config.fsdp.use_mixed_precision and config.fsdp.reduce_dtype == "bfloat16"
    return BFLOAT16_BYTES if halves else FLOAT32_BYTES


def gathered_bytes(config: RunConfig, shape: ModelShape, ranks: int) -> int:
    """What one rank of fsdp2 or hsdp holds beside its shards at the peak of a step, in bytes; 0 with ddp.

    A small model: all its parameters and the newest gradient of one unit, and where a step has several micro-batches
    the whole gradients that wait for the last of them. A larger one: the unit in use, the one that is prefetched, and
    the gradient of one.
    """
    fsdp = config.fsdp
    if config.parallel.mode == "ddp" or (ranks == 1 and not fsdp.use_mixed_precision and not fsdp.cpu_offload):
        return 0
    compute_bytes = BFLOAT16_BYTES if fsdp.use_mixed_precision else FLOAT32_BYTES
    if not stays_gathered(shape.parameters):
        return 3 * compute_bytes * shape.largest_unit_parameters
    waits = config.training.gradient_accumulation_steps > 1
    waiting_bytes = reduced_bytes_per_parameter(config) * shape.parameters if waits else 0
    return compute_bytes * (shape.parameters + shape.largest_unit_parameters) + waiting_bytes


def kept_activations_share(config: RunConfig, units: int) -> float:
    """Share of all activations that lives at the peak of backward: what is kept, and one unit computed again."""
    kept = _KEPT_SHARE[config.parallel.recompute]
    return kept + (1 - kept) / units


def commit_bytes(config: RunConfig) -> int:
    """One commit: weights and optimizer state of the whole model, once, whatever the number of ranks."""
    return COMMIT_BYTES_PER_PARAMETER * causal_lm_shape(config.model).parameters


def staging_bytes(config: RunConfig) -> int:
    """Memory of all ranks together: each keeps two slabs for its share of a commit. /dev/shm does not limit it."""
    return STAGING_SLABS * commit_bytes(config)


def host_memory_bytes(config: RunConfig, gang: Gang) -> int:
    """Main memory of a gang that trains on the CPUs of one machine, at the peak of a step."""
    shape = causal_lm_shape(config.model)
    copies = max(1, gang.ranks // shard_ranks(config, gang.ranks, gang.processes_per_node))
    state = copies * (COMMIT_BYTES_PER_PARAMETER + GRADIENT_BYTES_PER_PARAMETER) * shape.parameters
    gathered = gang.ranks * gathered_bytes(config, shape, gang.ranks)
    at_once = -(-config.training.batch_size // config.training.gradient_accumulation_steps)
    activations = shape.activation_bytes_per_sample * kept_activations_share(config, shape.units)
    samples = at_once * (activations + shape.logits_bytes_per_sample)
    return int(gang.ranks * PROCESS_BYTES + state + gathered + samples + staging_bytes(config))


def open_files_per_rank(gang: Gang) -> int:
    """Descriptors of the busiest process: a floor for Python and torch, and sockets to each other rank."""
    return 256 + 16 * gang.ranks


def size_text(size: float) -> str:
    """Bytes in the binary unit that reads well: ``11.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
