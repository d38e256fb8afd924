"""Model sizes, and estimates of the memory needed by a rank, a machine and a commit.

Tests of `training` compare the estimates with real modules. `cost` uses them to check whether a job
fits into memory, and to estimate its throughput.
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

from ebbflow.core.config.schema import ModelConfig, RunConfig
from ebbflow.core.json_values import JsonObject

# Activations of a block in the residual stream, per token and unit of width: inputs of both norms
STREAM_FLOATS = 2
NORM_FLOATS = 2  # in addition, if norms are not fused (CPUs): their normalized inputs

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
# Up to this size, FSDP2 keeps parameters gathered until backward and whole gradients between
# micro-batches, and reduces once per step. Above it, both are sharded again at once, which is the
# memory that sharding saves.
SMALL_MODEL_BYTES = 2**30
GRADIENT_BYTES_PER_PARAMETER = 4
STAGING_SLABS = 2
# A rank without its model: Python, torch, gloo and their buffers. Importing torch 2.13 alone
# measured 0.21 GiB.
PROCESS_BYTES = 1 << 29
# Main memory of processes, in bytes. A rank with CUDA maps its libraries and keeps pinned buffers
# (estimated; not measured on a GPU). An uploader imports no torch; an agent and its standby are one
# process without and one with torch.
CUDA_PROCESS_BYTES = 2 << 30
UPLOADER_BYTES = 1 << 27
NODE_PROCESSES_BYTES = 3 << 28


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model's number of parameters, and its memory and floating point operations per sample."""

    parameters: int  # number of all parameters
    largest_unit_parameters: int  # parameters of the largest unit that FSDP gathers at once
    activation_bytes_per_sample: int  # activations kept for backward, of one sequence in float32
    logits_bytes_per_sample: (
        int  # peak of log-probabilities, their gradient and the logits' gradient in float32
    )
    flops_per_sample: (
        float  # forward and backward of one sequence; a multiplication and an addition count as two
    )
    # Sequence length; with a workload of the user, the weight of a sample in `weight_unit`
    tokens_per_sample: float
    # Number of modules that are sharded as one: blocks, embeddings and head of the built-in model
    units: int
    # Gradients of activations inside one unit; 0: included, or unknown
    backward_bytes_per_sample: int = 0
    frozen_parameters: int = 0  # parameters that are not trained, such as all but LoRA's matrices
    # of a rank, beside the model: such as a reference model, or an inference engine's copy of the
    # weights
    other_bytes: int = 0
    optimizer_in_host_memory: bool = False
    # Those that training.optimizer: muon trains with one momentum instead of two moments
    hidden_parameters: int = 0
    weight_unit: str = "tokens"  # unit in which the weight of a sample is counted
    # Activations of a block, per token and unit of width: all that backward needs, and the part
    # that parallel.recompute: selective keeps. The defaults are those of architecture gpt.
    block_floats: float = 16.0
    product_floats: float = 11.0
    # "computed" from the formulas below, "measured", or "unknown" (of a script)
    kind: str = "computed"
    steps: int = 0  # steps of a script; 0: training.max_steps
    samples_per_step: int = 0  # of a script on all ranks; 0: training.batch_size

    @property
    def trained_parameters(self) -> int:
        return self.parameters - self.frozen_parameters

    def to_json(self) -> JsonObject:
        return asdict(self)

    def applied_to(self, config: RunConfig) -> RunConfig:
        """Return the configuration with the script's number of steps and batch size, if they are
        known.
        """
        if not self.steps:
            return config
        own = {
            "max_steps": self.steps,
            "batch_size": self.samples_per_step,
            "gradient_accumulation_steps": 1,
        }
        return config.changed("training", **own)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class HostGang:
    """Number of nodes, and of ranks per node."""

    nodes: int
    processes_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes_per_node

    def __str__(self) -> str:
        return f"{self.nodes} × {self.processes_per_node} = {self.ranks} ranks"


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Bytes of one rank's tensors at the peak of a step, by kind of tensor."""

    parameters: int
    gradients: int
    optimizer: int
    # Gathered parameters and unreduced gradients (sharded), buckets and copies (ddp), other models
    unsharded: int
    activations: int
    logits: int  # the logits and what the loss computes from them

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def causal_lm_shape(model: ModelConfig, tensor_size: int = 1) -> ModelShape:
    """Compute the size of the built-in model, `ebbflow.workloads.language.language_model.CausalLM`.

    With `tensor_size`, activations are those of one rank of a tensor group: of the residual stream,
    which includes inputs and outputs of the norms, each rank has all, of everything else a part.
    All other figures are of the whole.

    The formulas use L for layers, T for tokens per sequence, d for width, q for the width of all
    query heads, k for that of all key heads, and m for the width of the MLP. Architecture gpt has q
    = k = d and m = 4·d.

    Floating point operations: 6 per matmul parameter and token, plus 12·L·T·q per token for
    attention scores and values (Chowdhery et al. 2022, PaLM, appendix B). Tied embeddings are
    multiplied in the head all the same.

    Activations that autograd keeps without recomputation, in floats per block and token: input and
    output of each of two norms (4·d), queries, keys and values (q + 2·k), attention output (q), and
    the MLP's hidden layer before and after its activation function (2·m), in total 16·d for gpt.
    SwiGLU keeps 4·m, and norms of queries and keys keep their inputs (q + k).
    `scaled_dot_product_attention` adds one float per head (its log-sum-exp) and stores no T × T
    matrix. Norms are assumed to be fused, as on CUDA; see `NORM_FLOATS`.

    Kept with recompute selective: the block's input and the outputs of its matrix products and of
    attention.

    Backward pass: the gradients of the residual stream and of the MLP's hidden layer take 5·d, or
    6·d with temporaries; with SwiGLU 2·d + 3·m.
    """
    d = model.hidden_size
    layers = model.num_layers
    heads = model.num_heads
    m = model.mlp_width
    length = model.sequence_length
    vocab = model.vocab_size
    gated = model.architecture == "llama"
    masked = model.end_of_document is not None  # with one mask for all blocks
    q = d
    k = d
    if gated:
        q = heads * model.head_width
        k = model.kv_heads * model.head_width
    matrices = 2 * d * (q + k) + (3 if gated else 2) * d * m
    biases = (q + 2 * k if model.qkv_bias else 0) + (2 * model.head_width if model.qk_norm else 0)
    block = matrices + 2 * d + biases  # with the weights of two RMSNorms
    embeddings = vocab * d + (0 if gated else length * d)
    head = vocab * d
    # With tied weights, FSDP2 shards embeddings, norm and head as one unit.
    if model.tied_embeddings:
        outer = [embeddings + d]
    else:
        outer = [embeddings, head + d]
    block_floats = (
        4 * d
        + (2 * q + 2 * k + (4 if gated else 2) * m + (q + k if model.qk_norm else 0)) // tensor_size
    )
    product_floats = 3 * d + (2 * q + 2 * k + (2 if gated else 1) * m) // tensor_size
    rows = 2 + (heads + (heads + model.kv_heads if model.qk_norm else 0)) // tensor_size
    return ModelShape(
        parameters=layers * block + sum(outer),
        largest_unit_parameters=max(block, *outer),
        activation_bytes_per_sample=4
        * length
        * (layers * (block_floats + rows) + 3 * d + masked * length),
        logits_bytes_per_sample=3 * 4 * length * vocab,
        flops_per_sample=float(length)
        * (6.0 * (layers * matrices + head) + 12.0 * layers * length * q),
        tokens_per_sample=length,
        units=layers + 2,
        backward_bytes_per_sample=4 * length * (2 * d + (3 * m if gated else 4 * d) // tensor_size),
        block_floats=block_floats / d,
        product_floats=product_floats / d,
        hidden_parameters=layers * matrices,
    )


def local_gang(config: RunConfig) -> HostGang | None:
    """Return the configured number of nodes and of ranks per node.

    Return None if either is "auto", because the plan then chooses it.
    """
    nodes = config.cluster.nodes
    processes = config.cluster.processes_per_node
    if nodes == "auto" or processes == "auto":
        return None
    return HostGang(nodes=nodes, processes_per_node=processes)


def shard_ranks(config: RunConfig, ranks: int, ranks_per_node: int | None = None) -> int:
    """Return the number of ranks over which one copy of the model is sharded.

    In mode ddp this is 1, in fsdp2 all ranks. In hsdp it is parallel.shard_size if that is set,
    else `ranks_per_node`, else all `ranks`.
    """
    if config.parallel.mode == "hsdp":
        return config.parallel.shard_size or ranks_per_node or ranks
    if config.parallel.mode == "fsdp2":
        return ranks
    return 1


def data_ranks(config: RunConfig, ranks: int) -> int:
    """Return the number of ranks that read different samples, at least 1.

    The ranks of a tensor group read the same samples, and count as one.
    """
    return max(1, ranks // config.parallel.tensor_size)


def stays_gathered(parameters: int) -> bool:
    """Return whether FSDP2 keeps all parameters gathered between forward and backward.

    This is the case if the float32 parameters take at most SMALL_MODEL_BYTES.
    """
    return FLOAT32_BYTES * parameters <= SMALL_MODEL_BYTES


def reduced_bytes_per_parameter(config: RunConfig) -> int:
    """Return the bytes per gradient element that reduce-scatter sends: 4, or 2 with bfloat16."""
    halves = config.fsdp.mixes_precision and config.fsdp.reduce_dtype == "bfloat16"
    if halves:
        return BFLOAT16_BYTES
    return FLOAT32_BYTES


def gathered_bytes(config: RunConfig, shape: ModelShape, ranks: int) -> int:
    """Return the bytes that a rank holds besides its shards at the peak of a step.

    The result is 0 in mode ddp, and for a single rank without mixed precision and offloading.

    A small model (`stays_gathered`) needs all parameters, one FSDP unit's newest gradient and, with
    several micro-batches per step, the accumulated gradients. A larger model needs the unit in use,
    the prefetched unit, and one unit's gradient.
    """
    fsdp = config.fsdp
    if config.parallel.mode == "ddp" or (
        ranks == 1 and not fsdp.mixes_precision and not fsdp.cpu_offload
    ):
        return 0
    if fsdp.mixes_precision:
        compute_bytes = BFLOAT16_BYTES
    else:
        compute_bytes = FLOAT32_BYTES
    tensor = config.parallel.tensor_size
    if not stays_gathered(shape.parameters):
        return 3 * compute_bytes * shape.largest_unit_parameters // tensor
    waits = config.training.gradient_accumulation_steps > 1
    if waits:
        waiting_bytes = reduced_bytes_per_parameter(config) * shape.trained_parameters
    else:
        waiting_bytes = 0
    return (
        compute_bytes * (shape.parameters + shape.largest_unit_parameters) + waiting_bytes
    ) // tensor


def rank_bytes(  # noqa: C901, PLR0912, PLR0915 - one sum whose terms a reader checks against each other
    config: RunConfig,
    shape: ModelShape,
    *,
    ranks: int,
    samples: int,
    ranks_per_node: int | None = None,
    fused_norms: bool = True,
) -> RankBytes:
    """Estimate the bytes of one rank's tensors at the peak of a step.

    The peak is at one of three moments: at the loss (all activations and the logits), in the
    backward pass of the last block (all activations but no logits), or at the end of the backward
    pass (all gradients, one block's activations). Between two of these moments, one kind of tensor
    shrinks evenly while another grows. Parameters, gradients and AdamW's two moments are float32,
    with 4, 4 and 8 bytes per parameter; `training.ema` adds 4. Frozen parameters have no gradients,
    moments or averages.

    Args:
        samples: number of samples of one rank in one micro-batch.
        ranks_per_node: as in `shard_ranks`.
        fused_norms: whether each norm is a single kernel, as on CUDA.
    """
    mode = config.parallel.mode
    several = config.training.gradient_accumulation_steps > 1
    if config.parallel.tensor_size > 1 and shape.kind == "computed":
        shape = causal_lm_shape(config.model, config.parallel.tensor_size)
    parts = min(ranks, shard_ranks(config, ranks, ranks_per_node))
    if shape.optimizer_in_host_memory:
        optimizer = 0
    else:
        optimizer = optimizer_bytes(config, shape)
    state = -(-shape.parameters // parts)
    trained = -(-shape.trained_parameters // parts)
    if config.fsdp.cpu_offload and mode != "ddp":
        state = trained = 0
    gradients = FLOAT32_BYTES * trained
    buckets = mode == "ddp" and ranks > 1
    if buckets or several:
        early = gradients  # allocated before backward ends
    else:
        early = 0
    unsharded = gathered_bytes(config, shape, ranks)
    if mode == "ddp":
        # With gradient_as_bucket_view gradients are views of the buckets that are all-reduced.
        apart = buckets and not config.ddp.gradient_as_bucket_view
        if config.fsdp.mixes_precision:
            copies = BFLOAT16_BYTES
        else:
            copies = 0
        unsharded = FLOAT32_BYTES * apart * shape.trained_parameters + copies * shape.parameters
    whole = _activation_bytes(config, shape, fused_norms=fused_norms)
    backward = shape.backward_bytes_per_sample * (1.0 if mode == "ddp" else _compute_share(config))
    if shape.kind == "computed":
        blocks = max(1, shape.units - 2)
    else:
        blocks = shape.units
    # recompute full keeps the block's input only
    kept_floats = {"none": shape.block_floats, "selective": shape.product_floats, "full": 1.0}
    kept = whole * kept_floats[config.parallel.recompute] / shape.block_floats
    block_bytes = whole / blocks
    again = block_bytes - kept / blocks  # activations of the recomputed block
    if config.parallel.recompute != "none":
        # The inputs of the head and of the recomputed block
        kept += block_bytes * STREAM_FLOATS / shape.block_floats
    logits = shape.logits_bytes_per_sample
    chunk = config.training.loss_chunk
    first = early
    if chunk is not None:
        if parts == 1:  # the gradient of the output layer grows from the first chunk on
            first = max(early, FLOAT32_BYTES * config.model.vocab_size * config.model.hidden_size)
        logits = min(logits, logits * chunk / (shape.tokens_per_sample * max(1, samples)))
    elif config.parallel.recompute == "selective" and logits:
        # The output of the head's matrix product is kept too
        logits += int(logits / 3 * _compute_share(config))
    moments = [
        (first, samples * kept, float(samples * logits)),
        (early, samples * (kept + again + backward), 0.0),
        (gradients, samples * (block_bytes + backward), 0.0),
    ]
    # Its activations include the loss; the parts of backward are unknown
    if shape.kind == "measured":
        moments = [(gradients, samples * (kept + again), float(samples * logits))]
    held, activations, logits_held = max(moments, key=sum)
    return RankBytes(
        parameters=FLOAT32_BYTES * state,
        gradients=held,
        optimizer=optimizer * trained // max(1, shape.trained_parameters),
        unsharded=unsharded + shape.other_bytes,
        activations=int(activations),
        logits=int(logits_held),
    )


def optimizer_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of the whole model's optimizer state, including averages with
    `training.ema`.

    AdamW keeps two float32 moments of a trained parameter. Muon keeps one momentum of a hidden
    matrix.
    """
    if config.training.optimizer == "muon":
        spared = shape.hidden_parameters
    else:
        spared = 0
    return FLOAT32_BYTES * (
        (2 if config.training.ema is None else 3) * shape.trained_parameters - spared
    )


def commit_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of one commit: weights and optimizer state of the whole model."""
    return FLOAT32_BYTES * shape.parameters + optimizer_bytes(config, shape)


def staging_bytes(config: RunConfig) -> int:
    """Return the bytes of all ranks' staging buffers, two per rank.

    They may exceed the size of /dev/shm.
    """
    return STAGING_SLABS * commit_bytes(config, causal_lm_shape(config.model))


def host_memory_bytes(config: RunConfig, gang: HostGang) -> int:
    """Estimate the peak main memory, in bytes, of a gang that trains on the CPUs of one machine."""
    shape = causal_lm_shape(config.model)
    parts = data_ranks(config, gang.ranks) * config.training.gradient_accumulation_steps
    here = config.changed("fsdp", cpu_offload=False)
    each = rank_bytes(
        here,
        shape,
        ranks=gang.ranks,
        samples=-(-config.training.batch_size // parts),
        ranks_per_node=gang.processes_per_node,
        fused_norms=False,
    )
    return int(gang.ranks * (PROCESS_BYTES + each.total) + staging_bytes(config))


def gpu_host_bytes(config: RunConfig, shape: ModelShape, gang: HostGang) -> int:
    """Estimate the main memory in bytes of one GPU node: processes, staging buffers, offloaded
    tensors.

    Each rank keeps STAGING_SLABS page-locked buffers for its share of a commit. The built-in data
    pipeline maps its token files into memory and has no worker processes. Data workers of other
    workloads are not counted, because their memory is unknown.
    """
    here = gang.processes_per_node
    stored = commit_bytes(config, shape)
    staged = STAGING_SLABS * stored * here // gang.ranks
    processes = NODE_PROCESSES_BYTES + here * (CUDA_PROCESS_BYTES + UPLOADER_BYTES)
    if shape.optimizer_in_host_memory:
        state = stored - FLOAT32_BYTES * shape.parameters
    else:
        state = 0
    if config.fsdp.cpu_offload and config.parallel.mode != "ddp":
        state = stored + GRADIENT_BYTES_PER_PARAMETER * shape.trained_parameters
    return (
        processes + staged + state * here // min(gang.ranks, shard_ranks(config, gang.ranks, here))
    )


def open_files_per_rank(gang: HostGang) -> int:
    """Estimate the number of open file descriptors of the busiest process.

    The estimate is a base for Python and torch, plus sockets for each rank.
    """
    return 256 + 16 * gang.ranks


def size_text(size: float) -> str:
    """Render a number of bytes in a binary unit, such as ``11.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            if unit == "B":
                return f"{size:.0f} {unit}"
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _compute_share(config: RunConfig) -> float:
    if config.fsdp.mixes_precision:
        return BFLOAT16_BYTES / FLOAT32_BYTES
    return 1.0


def _activation_bytes(config: RunConfig, shape: ModelShape, *, fused_norms: bool) -> float:
    """Return the bytes of the whole model's activations per sample, without recomputation.

    With mixed precision, FSDP2 computes everything in bfloat16, whereas under autocast (ddp) the
    residual stream stays float32. A norm that is not fused also keeps its normalized input and,
    with bfloat16, a float32 copy of its input.
    """
    mixed = config.fsdp.mixes_precision
    if mixed:
        narrow = BFLOAT16_BYTES
    else:
        narrow = FLOAT32_BYTES
    if config.parallel.mode == "ddp":
        stream = FLOAT32_BYTES
    else:
        stream = narrow
    block = narrow * (shape.block_floats - STREAM_FLOATS) + stream * STREAM_FLOATS
    if not fused_norms:
        block += stream * NORM_FLOATS + (FLOAT32_BYTES - stream) * STREAM_FLOATS
    if shape.kind == "measured":
        return shape.activation_bytes_per_sample * narrow / FLOAT32_BYTES
    return shape.activation_bytes_per_sample * block / (FLOAT32_BYTES * shape.block_floats)
