"""Schema of a job's configuration: typed sections, free of I/O and of torch imports.

Rules about several keys are in `ebbflow.core.config.shape_rules` and `name_rules`;
`ebbflow.core.config.load` reads the files.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Old names of keys, which configurations and stored jobs may still have.
RENAMED_KEYS = {"cluster.backend": "cluster.plan_for"}
_SHORTEST_DRAIN_SECONDS = 60.0
_RENAMED_IN_CLUSTER = {
    old.partition(".")[2]: new.partition(".")[2] for old, new in RENAMED_KEYS.items()
}

Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base class of the configuration's sections.

    A section is immutable, rejects unknown keys, and does not convert types.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def key(default: Any, description: str, **limits: float) -> Any:
    """Declare a configuration key with its default and description.

    Args:
        default: `...` makes the key required.
        limits: pydantic limits such as ge=1.
    """
    return Field(default=default, description=description, **limits)  # type: ignore[arg-type]


class QueueConfig(Section):
    """A job queue for training. `market` is the market of the queue's compute environments."""

    name: str = key(..., "the job queue's name or ARN")
    market: Literal["spot", "on_demand"] = key(..., "purchase option of its compute environments")
    instance_types: list[str] = key([], "names or prefixes (g5, p4d.24xlarge); empty: any")
    multi_node: bool = key(
        False,
        "accepts multi-node jobs; Batch runs them on-demand only, in managed EC2 environments",
    )
    region: str | None = key(None, "region of the queue; null: that of its ARN, else batch.region")
    reservation: str | None = key(
        None,
        "id in cost.reservations of the capacity that the queue's launch template targets; null: "
        "none",
    )


class BatchConfig(Section):
    """Settings of AWS Batch. `ebbflow adopt` writes this section from an account's queues and
    roles.
    """

    queues: list[QueueConfig] = key(
        [], "queues for training; empty: the account's queues, looked up at launch"
    )
    light_queue: str | None = key(
        None,
        "queue for the steps around training; null: METAFLOW_BATCH_JOB_QUEUE, else the smallest "
        "machines",
    )
    image: str | None = key(None, "container image; null: METAFLOW_BATCH_CONTAINER_IMAGE")
    region: str | None = key(None, "region of queues and jobs; null: the AWS SDK's")
    efa_interfaces: int = key(
        0,
        "most EFA devices of each node of a multi-node job, of those that its type has; 0: none",
        ge=0,
    )
    shared_memory_mib: Count = key(
        4096, "size of a container's /dev/shm, for NCCL and data loaders"
    )
    tags: dict[str, str] = key({}, "tags of every job, for cost allocation")
    runnable_minutes: float = key(
        30.0, "longest wait for capacity before a job is placed elsewhere", gt=0
    )
    job_role: str | None = key(
        None, "ARN of the containers' role; null: METAFLOW_ECS_S3_ACCESS_IAM_ROLE"
    )
    metadata_fixes: Literal["auto", "refuse"] = key(
        "auto",
        "known faults of Metaflow on Batch without a metadata service: fix them, or refuse to run",
    )


class KubernetesPoolConfig(Section):
    """Nodes of a Kubernetes cluster that a plan may choose, on any cloud or premises."""

    name: str = key(..., "the pool's name in plans and reports", min_length=1)
    gpu: str = key(
        ...,
        "GPU model of cost/gpus.csv and number on each node, such as H100:8; one without number",
    )
    node_selector: dict[str, str] = key(
        ...,
        "labels of the pool's nodes, such as {cloud.google.com/gke-nodepool: h100}",
        min_length=1,
    )
    usd_per_node_hour: float = key(..., "price of a node in US dollars per hour", ge=0)
    preemptible: bool = key(False, "its nodes are taken away at short notice, as on Spot")
    gpu_memory_gib: float | None = key(
        None, "memory of one GPU; null: the smallest of the model's in cost/instances.csv", gt=0
    )
    cpus: Count | None = key(None, "processors that a pod may request; null: 4 for each GPU")
    memory_gib: float | None = key(
        None, "memory that a pod may request; null: 16 for each GPU", gt=0
    )


class KubernetesConfig(Section):
    """Settings for `--with kubernetes`.

    The image, shared memory and waiting time are set in the section `batch`.
    """

    queue: str | None = key(None, "Kueue's local queue, which admits the job's pods; null: none")
    nodes: Literal["karpenter", "eks"] = key(
        "karpenter", "labels that select nodes: Karpenter's, or those of EKS managed node groups"
    )
    pools: list[KubernetesPoolConfig] = key(
        [], "pools of nodes to choose from; empty: Amazon's instance types, by their node labels"
    )
    node_replacements: int = key(
        0,
        "lost nodes (not node 0) that are replaced within an attempt; 0: the gang restarts as a "
        "whole",
        ge=0,
    )


class PartitionConfig(Section):
    """A partition of a Slurm cluster, as a pool in which attempts can be placed."""

    name: str = key(..., "the partition's name, as in sinfo")
    usd_per_node_hour: float | None = key(
        None, "dollars for one hour of one node; null: not known, and node-hours are counted", gt=0
    )
    preemptible: bool = key(False, "jobs in it are preempted by those of other partitions")
    gres: str | None = key(
        None, "devices of each node for sbatch --gres, such as gpu:8; null: none"
    )
    constraint: str | None = key(None, "features of the nodes for --constraint; null: any")
    qos: str | None = key(None, "quality of service for --qos; null: the default")
    account: str | None = key(None, "account for --account; null: the default")
    max_hours: float | None = key(
        None, "time limit of each Slurm job in hours; null: the partition's default", gt=0
    )


class SlurmConfig(Section):
    """Settings of Slurm, for `--with slurm` and `ebbflow export slurm`."""

    partitions: list[PartitionConfig] = key(
        [],
        "partitions for training: the cheapest first if all have prices, else the preferred one "
        "first; empty: the cluster's default",
    )
    budget_node_hours: float | None = key(
        None, "node-hours that the job may use, by Slurm's clock; null: no limit", gt=0
    )
    activate: str | None = key(
        None, "shell line before the job, such as source /path/venv/bin/activate; null: none"
    )
    container_image: str | None = key(
        None, "image for srun --container-image, where the site has pyxis; null: no container"
    )
    options: list[str] = key([], "further options of sbatch, such as --reservation=course")
    probe: bool = key(
        False,
        "preflight sends a job of a minute to the nodes, which tries store, clocks and ports there",
    )
    queue_minutes: float = key(
        1440.0, "longest wait in the queue before a Slurm job is cancelled", gt=0
    )


class ModelConfig(Section):
    """Shape of the causal language model. docs/your-model.md has the settings of Llama and Qwen
    models.
    """

    hidden_size: int = key(128, "width of the residual stream", ge=1)
    num_layers: int = key(4, "transformer blocks", ge=1)
    num_heads: int = key(
        4, "attention heads; must divide hidden_size, unless head_size is set", ge=1
    )
    sequence_length: int = key(128, "tokens per sample", ge=2)
    vocab_size: int = key(256, "size of the vocabulary; 256 for bytes", ge=2)
    architecture: Literal["gpt", "llama"] = key(
        "gpt",
        "gpt: learned positions, GELU; llama: rotary positions (RoPE), gated MLP (SwiGLU), as in "
        "Llama and Qwen. Both have RMSNorm",
    )
    end_of_document: int | None = key(
        None,
        "token that ends a document: attention stays in it, and positions start anew; null: no "
        "documents",
        ge=0,
    )
    tied_embeddings: bool = key(False, "the head has the same weights as the token embedding")
    norm_epsilon: float | None = key(
        None,
        "added to the mean square in norms; null: 1e-5 (llama), the precision of the dtype (gpt)",
        gt=0,
    )
    num_kv_heads: Count | None = key(
        None, "llama: heads of keys and values (GQA); must divide num_heads; null: num_heads"
    )
    head_size: Count | None = key(
        None, "llama: width of an attention head, even; null: hidden_size / num_heads"
    )
    intermediate_size: Count | None = key(
        None, "llama: width of the MLP; null: 8/3 of hidden_size, rounded up to a multiple of 64"
    )
    qkv_bias: bool = key(False, "llama: queries, keys and values have a bias (Qwen2)")
    qk_norm: bool = key(False, "llama: queries and keys are normalised per head (Qwen3)")
    rope_theta: float = key(10000.0, "llama: base of the rotary frequencies", gt=0)
    rope_factor: float = key(
        1.0,
        "llama: factor by which Llama 3.1 stretches low rotary frequencies; 1: not stretched",
        ge=1,
    )
    rope_original_length: int = key(
        8192, "llama: sequence length before rope_factor stretched it", ge=1
    )

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def mlp_width(self) -> int:
        if self.architecture == "gpt":
            return 4 * self.hidden_size
        return self.intermediate_size or -(-8 * self.hidden_size // (3 * 64)) * 64


class SchedulerConfig(Section):
    """Learning rate as a function of the step."""

    type: Literal["constant", "linear_warmup", "cosine", "wsd"] = key(
        "cosine",
        "shape after the warm-up; wsd is constant, then decays over the last fifth of the steps",
    )
    warmup_steps: int = key(20, "steps of linear warm-up from zero", ge=0)
    final_ratio: float = key(0.1, "final learning rate as a fraction of the peak", ge=0, le=1)


class TrainingConfig(Section):
    """Settings of the optimization. batch_size is the number of sequences per step of all ranks
    together.
    """

    batch_size: int = key(32, "sequences per step over all ranks", ge=1)
    learning_rate: float = key(1e-3, "peak learning rate", gt=0)
    optimizer: Literal["adamw", "muon"] = key(
        "adamw",
        "muon: weights of linear layers but the last by orthogonalised momentum, the others by "
        "AdamW",
    )
    gradient_accumulation_steps: int = key(1, "micro-batches per step and rank", ge=1)
    max_steps: int = key(300, "optimizer steps of the job", ge=1)
    seed: int = key(1234, "seed of the initial weights and the data order", ge=0)
    deterministic: Literal["auto", "strict", "off"] = key(
        "auto",
        "equal runs give equal bits. auto: on a CPU, and on a GPU where it is cheap; strict: on "
        "a GPU too, or an error names the operation that cannot; off: nowhere promised",
    )
    tf32: bool = key(
        False,
        "float32 matrix products on NVIDIA GPUs in TF32: a 10-bit mantissa for a multiple of the "
        "speed",
    )
    micro_batch: Literal["fixed", "auto"] = key(
        "fixed",
        "auto: the fewest micro-batches that fit into memory, at least gradient_accumulation_steps",
    )
    loss_chunk_tokens: Count | Literal["auto"] | None = key(
        "auto",
        "language models: tokens whose logits exist at once, instead of those of a micro-batch; "
        "auto: on a GPU as many as take 1 GiB, on a CPU all; null: all",
    )
    ema: float | None = key(
        None,
        "decay of an average of the weights, which is then evaluated and can be exported; null: "
        "none",
        gt=0,
        lt=1,
    )
    weight_decay: float = key(0.1, "weight decay on matrices", ge=0)
    initial_weights: str | None = key(
        None,
        "safetensors file or folder (Hugging Face layout) to start from; null: random from the "
        "seed",
    )
    gradient_clip_norm: float | None = key(
        1.0, "largest global gradient norm; null: no clipping", gt=0
    )
    evaluation_interval_steps: int = key(100, "steps between held-out evaluations", ge=1)
    profile_from: int | None = key(
        None, "first step to profile with torch's profiler; null: none", ge=1
    )
    profile_steps: int = key(6, "steps to profile, from profile_from on", ge=1)
    memory_snapshot_step: int | None = key(
        None, "step whose GPU memory is recorded for pytorch.org/memory_viz; null: none", ge=1
    )
    scheduler: SchedulerConfig = SchedulerConfig()

    @property
    def loss_chunk(self) -> int | None:
        """Number of tokens in a chunk of the loss, or None if the loss is computed at once."""
        if self.loss_chunk_tokens == "auto":
            return None
        return self.loss_chunk_tokens


class DataConfig(Section):
    """Text to train on.

    The default is the source code of Python's standard library, without its tests.
    """

    path: str | None = key(None, "folder, file or glob; null: the interpreter's standard library")
    suffixes: list[str] = key([".py"], "file extensions to read in a folder")
    tokenizer: str = key(
        "bytes", "bytes (one token per byte), or the path of a Hugging Face tokenizer.json"
    )
    held_out_fraction: float = key(
        0.05, "fraction of the files kept for evaluation; of a single file, its end", gt=0, lt=1
    )
    held_out_samples: int = key(64, "sequences per evaluation", ge=1)
    cache_gib: float | None = key(
        None,
        "disk of a node for tokens of a remote store; a larger set is streamed; null: 80 % of "
        "free space",
        ge=0,
    )


class ParallelConfig(Section):
    """Distribution of the model over ranks, and options that trade compute for memory."""

    mode: Literal["ddp", "fsdp2", "hsdp"] = key(
        "fsdp2", "replicate (ddp), shard (fsdp2), or shard within groups that are replicated (hsdp)"
    )
    shard_size: Count | None = key(
        None, "hsdp: ranks that share one copy of the model; null: cluster.processes_per_node"
    )
    tensor_size: int = key(
        1,
        "consecutive ranks that compute each layer together (tensor parallelism), of built-in "
        "models only",
        ge=1,
    )
    recompute: Literal["none", "selective", "full"] = key(
        "none",
        "activations recomputed in backward: none, all but matrix products, or all of a unit",
    )
    compile: bool = key(False, "apply torch.compile to each unit")
    compile_cache: bool = key(
        True, "keep compiled code in the store for later starts; not if commits are signed"
    )


class DdpConfig(Section):
    """Options of mode ddp, named as in torch's DistributedDataParallel."""

    find_unused_parameters: bool = key(
        False, "for models that do not use every parameter in every step"
    )
    static_graph: bool = key(False, "promise that every step uses the same parameters")
    gradient_as_bucket_view: bool = key(True, "gradients are views into the buckets")
    bucket_cap_mb: float = key(25.0, "size of a gradient bucket, MiB", gt=0)
    gradient_compression: Literal["none", "bfloat16", "powersgd"] = key(
        "none", "compression of gradients before the reduction: none, half precision, or low rank"
    )


class FsdpConfig(Section):
    """Options of the sharded modes; mixed precision applies to ddp as well, through autocast."""

    use_mixed_precision: bool | Literal["auto"] = key(
        "auto",
        "compute in param_dtype; master weights stay float32. auto: on GPUs, not on a CPU; false: "
        "float32",
    )
    param_dtype: Literal["auto", "bfloat16", "float16"] = key(
        "auto",
        "dtype of the compute with mixed precision. auto: bfloat16, on GPUs without it float16, "
        "with loss scaling",
    )
    float8: Literal["off", "on", "emulate"] = key(
        "off",
        "linear layers of the units compute in fp8 by torchao; emulate: rounded as in fp8, on "
        "any device",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "dtype of the gradient reduction with mixed precision"
    )
    cpu_offload: bool = key(False, "keep shards, gradients and optimizer state in host memory")

    @property
    def mixes_precision(self) -> bool:
        """Whether the model computes in half precision; an unresolved "auto" counts as no."""
        return self.use_mixed_precision is True

    @property
    def compute_dtype(self) -> str:
        if not self.mixes_precision:
            return "float32"
        if self.param_dtype == "auto":
            return "bfloat16"
        return self.param_dtype


class ClusterConfig(Section):
    """Number of nodes and ranks, machine types, and deadlines for joining and for a step."""

    nodes: Count | Literal["auto"] = key(2, "number of nodes; auto: chosen by the plan")
    processes_per_node: Count | Literal["auto"] = key(1, "ranks per node; auto: one per GPU")
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto",
        "auto: one GPU per rank if there are enough, else the CPU for all; GPUs that do not work "
        "are refused; cpu: never a GPU; cuda: refuse to train without a GPU for each rank",
    )
    max_nodes: Count | None = key(None, "largest number of nodes with nodes: auto; null: 8")
    min_nodes: Count | None = key(
        None, "continue with this many nodes when others are lost (not node 0); null: only with all"
    )
    instance_types: list[str] = key([], "candidates by name or prefix (g5, p4d); empty: all")
    market: Literal["auto", "spot", "on_demand"] = key("auto", "markets that the plan may choose")
    plan_for: Literal["local", "batch", "kubernetes", "slurm"] = key(
        "batch",
        "backend whose prices and limits the plan uses, wherever the run is; AWS Batch runs "
        "several nodes on-demand only, Kubernetes on Spot too; slurm: slurm.partitions; local: "
        "simulated, unless a step of your own flow states its price",
    )
    expected_start_seconds: float = key(
        240.0, "expected time from requesting a node to its first step: boot, image, model", gt=0
    )
    start_deadline_seconds: float = key(120.0, "time limit for all nodes and ranks to join", gt=0)
    step_deadline_seconds: float = key(300.0, "time limit without progress of a rank", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _accept_old_names(cls, data: Any) -> Any:
        """Rename keys that configurations of earlier jobs contain under their old names."""
        if not isinstance(data, dict):
            return data
        return {_RENAMED_IN_CLUSTER.get(name, name): value for name, value in data.items()}

    @property
    def replacement_deadline_seconds(self) -> float:
        """Time limit for joining of a node whose machine must first be requested from the
        scheduler.
        """
        return self.expected_start_seconds + self.start_deadline_seconds


class BestConfig(Section):
    """Commits with the best value of an evaluation metric, which are also kept. A plain number in
    YAML sets `count`.
    """

    SHORT_FORM: ClassVar = "count"
    model_config = ConfigDict(json_schema_extra={"type": ["object", "integer"], "minimum": 0})

    count: int = key(
        0,
        "also keep this many commits with the best metric; 1 if only metric or mode is given",
        ge=0,
    )
    metric: str | None = key(
        None,
        "metric of the evaluation; one that it lacks is an error; null: held_out_loss, where "
        "there is one",
    )
    mode: Literal["min", "max"] = key("min", "whether the lowest or the highest value is the best")

    @model_validator(mode="before")
    @classmethod
    def _accept_a_number(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if data:
                return {"count": 1, **data}
            return data
        if isinstance(data, int):
            return {"count": data}
        return data


class CheckpointConfig(Section):
    """Settings of checkpoints: when to save, and which commits to keep."""

    interval: Literal["steps", "seconds", "auto"] = key(
        "steps", "save every interval_steps, every interval_seconds, or by measured cost and hazard"
    )
    interval_steps: int = key(
        50, "steps between commits; with auto, at most this many before the first", ge=1
    )
    interval_seconds: float = key(600.0, "seconds between commits with interval: seconds", gt=0)
    when_busy: Literal["wait", "skip"] = key(
        "wait",
        "when a save is due while the last one is still uploading: wait for it, or skip the new "
        "one",
    )
    upload_mib_per_second: float | None = key(None, "upload limit of each rank; null: none", gt=0)
    stop_seconds: float = key(
        30.0, "time from SIGTERM to SIGKILL: the container's stop timeout", gt=0
    )
    keep_last: int = key(3, "number of newest commits to keep", ge=1)
    keep_every_steps: int | None = key(
        None,
        "also keep the first commit at or after each multiple of this many steps; null: none",
        ge=1,
    )
    keep_best: BestConfig = BestConfig()
    max_total_gib: float | None = key(
        None, "limit for all kept commits; the newest and pinned ones always stay; null: none", gt=0
    )
    orphan_hours: float = key(
        24.0,
        "data of saves without a commit, and invalid commits, are deleted after this time",
        gt=0,
    )
    deadline_seconds: float = key(
        120.0,
        "time limit for one save to be durable; a save that needs longer at 10 MiB/s per rank "
        "gets longer",
        gt=0,
    )
    signing_key_env: str | None = key(
        None,
        "environment variable with the key that signs commits; unsigned commits are rejected; "
        "null: off",
    )

    @property
    def drain_seconds(self) -> float:
        """Seconds that a stopped launcher gives its tasks to save and exit.

        This covers the save, and 30 s in which an agent's ranks exit.
        """
        return max(_SHORTEST_DRAIN_SECONDS, self.stop_seconds + 35.0)


class ReservationConfig(Section):
    """A capacity reservation (ODCR) or Capacity Block in the AWS account.

    A queue in `batch.queues` names its id.
    """

    id: str = key(..., "id of the reservation, such as cr-0123456789abcdef0")
    instance_type: str = key(..., "its instance type")
    instances: Count = key(1, "its number of instances")
    region: str = key(..., "its region")
    zone: str | None = key(None, "its zone id; null: unknown")
    start: str | None = key(None, "begin in UTC, such as 2026-12-01T11:30:00Z; null: it has begun")
    end: str | None = key(None, "end in UTC, as for start; null: none")
    usd_per_hour: float | None = key(
        None,
        "price of an instance in use; 0: it is paid in any case; null: the on-demand price",
        ge=0,
    )


class CostConfig(Section):
    """Budget and deadline, and the source of prices."""

    budget_usd: float | None = key(None, "spending limit of the job", gt=0)
    owner: str | None = key(None, "owner of the cost, shown in the ledger and the reports")
    project: str | None = key(None, "project of the cost, shown in the ledger and the reports")
    deadline_hours: float | None = key(None, "time limit from start to finish", gt=0)
    confidence: float = key(
        0.9,
        "least probability to meet the deadline: pools below it come later in the plan, and a job "
        "with Spot alone is refused",
        gt=0,
        lt=1,
    )
    team_file: str | None = key(
        None,
        "YAML file with the team's dollars per project and month, or store: the one that ebbflow jobs "
        "--publish has put into the store; a job that exceeds them does not start",
    )
    prices: str = key(
        "static",
        "static (shipped, dated), live (DescribeSpotPriceHistory), or a file of recorded prices",
    )
    price_seconds: float = key(
        180.0,
        "time between two looks at EC2's Spot prices while a job runs, shorter with a small budget; "
        "prices: static are not watched",
        ge=1,
    )
    regions: list[str] = key(["us-east-1"], "AWS regions whose pools are candidates")
    zones: list[str] = key(
        [], "zone ids (use1-az1) to choose from; empty: all zones of the regions"
    )
    usd_per_node_hour: float | None = key(
        None,
        "dollars for one hour of one node, for a job without a plan, such as a script on a machine of "
        "your own; null: the report shows time only",
        gt=0,
    )
    max_price_age_hours: float = key(
        24.0, "age from which spot prices are reported as stale; they are still used", gt=0
    )
    store_region: str | None = key(
        None, "region of an s3:// store, for the cost of transfer; null: the pool's region"
    )
    reservations: list[ReservationConfig] = key(
        [], "capacity reservations and Capacity Blocks that the account holds"
    )
    capacity_block_days: int | None = key(
        None,
        "with prices: live, the plan lists Capacity Blocks of this many days that AWS sells; "
        "null: none",
        ge=1,
    )
    volume_gib_per_node: float = key(100.0, "EBS gp3 volume of each node, part of its price", ge=0)


class SurvivalConfig(Section):
    """Hang detection, spot interruption notices and logs of a gang."""

    hang_floor_seconds: float = key(
        60.0, "hang threshold of a rank: this, or 10 × the p99 of its phase if longer", ge=3
    )
    standby: bool = key(
        True,
        "keep a process on each node that has imported everything; restarted ranks fork from it",
    )
    on_rebalance: Literal["save", "leave", "nothing"] = key(
        "save", "response to EC2's rebalance recommendation, which comes before a notice"
    )
    notice_margin_seconds: float = key(
        10.0,
        "time between the last durable save and the termination that a spot notice announces",
        ge=0,
    )
    notice_file: str = key(
        "/tmp/spot_termination_notice",
        "file to which Metaflow's spot monitor writes the time of termination",
    )
    no_progress_hours: float | None = key(
        24.0,
        "most hours of starts without a new commit, before the job ends as a crash loop; null: no "
        "limit",
        gt=0,
    )
    no_progress_usd: float | None = key(
        1000.0,
        "most dollars of starts without a new commit, before the job ends as a crash loop; null: "
        "no limit",
        gt=0,
    )
    rank_log_mib: int = key(
        64, "limit of a rank's output in a generation; the first and the last part are kept", ge=1
    )


class GuardsConfig(Section):
    """Responses to non-finite losses, spikes, diverged weights and out-of-memory errors
    (docs/survival.md).
    """

    non_finite: Literal["stop", "skip", "rewind"] = key(
        "stop",
        "response to a non-finite loss or gradient: stop the job, skip the step, or rewind to a "
        "commit",
    )
    spike: Literal["off", "skip", "rewind"] = key(
        "off", "response to a spike of loss or gradient norm: skip the step, or rewind to a commit"
    )
    spike_z: float = key(8.0, "size of a spike in robust standard deviations (median, MAD)", gt=0)
    spike_window_steps: int = key(
        100, "steps to compare with; no step is judged before half of them", ge=10
    )
    skips_in_a_row: int = key(3, "consecutive skipped steps before a rewind", ge=1)
    rewind_margin_steps: int = key(
        0, "smallest distance of a rewind before the first bad step", ge=0
    )
    max_rewinds: int = key(3, "rewinds of the whole job before it ends", ge=0)
    hash_interval_steps: int | None = key(
        100, "steps between comparisons of the weights of replicas; null: never", ge=1
    )
    check_at_rest: bool = key(
        False,
        "compare the bits of each rank's weights and optimizer state before a step with those after "
        "the step before",
    )
    repeat_interval_steps: int | None = key(
        None,
        "steps between steps that each rank computes twice and compares bit for bit; needs "
        "training.deterministic: strict; null: never",
        ge=1,
    )
    out_of_memory: Literal["split", "stop"] = key(
        "split", "response to out of memory: restart with smaller micro-batches, or stop"
    )
    memory_history: int = key(
        20_000,
        "on a GPU, newest allocations that are recorded once memory has run out, for the next "
        "snapshot; 0: no snapshot",
        ge=0,
    )
    memory_growth: Literal["renew", "off"] = key(
        "renew",
        "response to memory that will run out within minutes: save and restart the processes",
    )


class MetricsConfig(Section):
    """Settings of Prometheus metrics.

    The file metrics.prom is written with every report, regardless of these settings.
    """

    port: Annotated[int, Field(ge=1, le=65535)] | None = key(
        None, "port on which each node serves /metrics while it trains; null: none"
    )
    address: str | None = key(
        None, "IP address of /metrics; null: 127.0.0.1 for a gang on this machine, else all"
    )
    push_url: str | None = key(None, "URL of a Pushgateway that the nodes push to; null: none")
    interval_seconds: float = key(15.0, "time between pushes", ge=1)


class TrackerConfig(Section):
    """A tracker that shows the job's metrics as one run (docs/trackers.md)."""

    type: Literal["wandb", "mlflow", "tensorboard", "jsonl"] = key(..., "kind of tracker")
    project: str = key("ebbflow", "wandb: project; mlflow: experiment")
    url: str | None = key(
        None, "wandb: server; mlflow: tracking URI; null: the library's own environment variables"
    )
    key_env: str | None = key(
        None,
        "environment variable with the API key (wandb) or token (mlflow); null: the library's own",
    )
    folder: str | None = key(
        None, "folder for the files of wandb, tensorboard and jsonl; null: runs/<job>"
    )
    live: bool = key(
        False, "send each step at once, not only those that a commit covers; see docs/trackers.md"
    )


class NotificationsConfig(Section):
    """Channels for one-line messages about start, notices, failures, budget, silence and end
    (docs/trackers.md).
    """

    webhook_env: str | None = key(
        None, "environment variable with the URL of a Slack-compatible webhook; null: none"
    )
    command: list[str] = key(
        [], "command and its arguments; the message becomes the last argument; empty: none"
    )
    smtp_server: str | None = key(None, "host:port of a mail server; null: no e-mail")
    smtp_user: str | None = key(None, "user name at the mail server; null: no login")
    smtp_password_env: str | None = key(None, "environment variable with the password of smtp_user")
    mail_from: str | None = key(None, "sender of the e-mail")
    mail_to: list[str] = key([], "recipients of the e-mail")
    silence_minutes: float = key(
        10.0, "time without a sign of the ranks after which a message is sent", gt=0
    )


class RunConfig(Section):
    """The whole configuration of a job."""

    store: str = key(
        "runs", "folder or s3://bucket/prefix; a relative path starts at the project root"
    )
    script: str | None = key(
        None, "a training script of your own, which keeps its loop (docs/attach.md); null: none"
    )
    script_args: list[str] = key([], "arguments of the script")
    workload: str | None = key(
        None, "the workload as package.module:Class; null: the built-in language model"
    )
    workload_options: dict[str, bool | int | float | str] = key(
        {}, "options of the workload; any names"
    )
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    ddp: DdpConfig = DdpConfig()
    fsdp: FsdpConfig = FsdpConfig()
    cluster: ClusterConfig = ClusterConfig()
    batch: BatchConfig = BatchConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    slurm: SlurmConfig = SlurmConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cost: CostConfig = CostConfig()
    metrics: MetricsConfig = MetricsConfig()
    trackers: list[TrackerConfig] = key(
        [], "W&B, MLflow, TensorBoard or JSON Lines files that get the job's metrics"
    )
    notifications: NotificationsConfig = NotificationsConfig()
    survival: SurvivalConfig = SurvivalConfig()
    guards: GuardsConfig = GuardsConfig()

    @property
    def user_code(self) -> str | None:
        """The user's script or workload, which has its own model and data, or None for the built-in
        model.
        """
        return self.script or self.workload

    def changed(self, section: str, **values: object) -> RunConfig:
        """Return a copy of the configuration with new `values` in one section.

        The values are not validated.
        """
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})
