"""Schema of a job's configuration: typed sections without I/O and without torch.

Rules about several keys are in `ebbflow.infra.config.shape_rules` and `name_rules`; `ebbflow.infra.config.load` reads
files.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of the configuration's sections: immutable, without unknown keys, and without conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


# Old names of keys, which configurations and stored jobs may still have.
RENAMED_KEYS = {"cluster.backend": "cluster.plan_for"}
_RENAMED_IN_CLUSTER = {old.partition(".")[2]: new.partition(".")[2] for old, new in RENAMED_KEYS.items()}

Count = Annotated[int, Field(ge=1)]


class QueueConfig(Section):
    """A job queue for training. `market` is set here: AWS Batch knows the market only of compute environments."""

    name: str = Field(description="the job queue's name or ARN")
    market: Literal["spot", "on_demand"] = Field(description="purchase option of its compute environments")
    instance_types: list[str] = Field(default=[], description="names or prefixes (g5, p4d.24xlarge); empty: any")
    multi_node: bool = Field(
        default=False,
        description="accepts multi-node jobs; Batch runs them on-demand only, in managed EC2 environments",
    )


class BatchConfig(Section):
    """AWS Batch. `ebbflow adopt` writes this section from the queues and roles of an account."""

    queues: list[QueueConfig] = Field(
        default=[], description="queues for training; empty: the account's queues, looked up at launch"
    )
    light_queue: str | None = Field(
        default=None,
        description="queue for the steps around training; null: METAFLOW_BATCH_JOB_QUEUE, else the smallest machines",
    )
    image: str | None = Field(default=None, description="container image; null: METAFLOW_BATCH_CONTAINER_IMAGE")
    region: str | None = Field(default=None, description="region of queues and jobs; null: the AWS SDK's")
    efa_interfaces: int = Field(default=0, ge=0, description="EFA devices of each node of a multi-node job; 0: none")
    shared_memory_mib: Count = Field(
        default=4096, description="size of a container's /dev/shm, for NCCL and data loaders"
    )
    tags: dict[str, str] = Field(default={}, description="tags of every job, for cost allocation")
    runnable_minutes: float = Field(
        default=30.0, gt=0, description="longest wait for capacity before a job is placed elsewhere"
    )
    job_role: str | None = Field(
        default=None, description="ARN of the containers' role; null: METAFLOW_ECS_S3_ACCESS_IAM_ROLE"
    )
    metadata_fixes: Literal["auto", "refuse"] = Field(
        default="auto",
        description="known faults of Metaflow on Batch without a metadata service: fix them, or refuse to run",
    )


class ModelConfig(Section):
    """Shape of the causal language model."""

    hidden_size: int = Field(default=128, ge=1, description="width of the residual stream")
    num_layers: int = Field(default=4, ge=1, description="transformer blocks")
    num_heads: int = Field(default=4, ge=1, description="attention heads; must divide hidden_size")
    sequence_length: int = Field(default=128, ge=2, description="tokens per sample")
    vocab_size: int = Field(default=256, ge=2, description="size of the vocabulary; 256 for bytes")


class SchedulerConfig(Section):
    """Learning rate as a function of the step."""

    type: Literal["constant", "linear_warmup", "cosine", "wsd"] = Field(
        default="cosine",
        description="shape after the warm-up; wsd is constant, then decays over the last fifth of the steps",
    )
    warmup_steps: int = Field(default=20, ge=0, description="steps of linear warm-up from zero")
    final_ratio: float = Field(default=0.1, ge=0, le=1, description="final learning rate as a fraction of the peak")


class TrainingConfig(Section):
    """Optimization. batch_size is the number of sequences per step of all ranks together."""

    batch_size: int = Field(default=32, ge=1, description="sequences per step over all ranks")
    learning_rate: float = Field(default=1e-3, gt=0, description="peak learning rate")
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="micro-batches per step and rank")
    max_steps: int = Field(default=300, ge=1, description="optimizer steps of the job")
    seed: int = Field(default=1234, ge=0, description="seed of the initial weights and the data order")
    micro_batch: Literal["fixed", "auto"] = Field(
        default="fixed",
        description="auto: the fewest micro-batches that fit into memory, at least gradient_accumulation_steps",
    )
    weight_decay: float = Field(default=0.1, ge=0, description="AdamW weight decay on matrices")
    initial_weights: str | None = Field(
        default=None,
        description="safetensors file or folder (Hugging Face layout) to start from; null: random from the seed",
    )
    gradient_clip_norm: float | None = Field(
        default=1.0, gt=0, description="largest global gradient norm; null: no clipping"
    )
    evaluation_interval_steps: int = Field(default=100, ge=1, description="steps between held-out evaluations")
    scheduler: SchedulerConfig = SchedulerConfig()


class DataConfig(Section):
    """Text to train on. Without a path, this is the standard library of the running Python, tests excluded."""

    path: str | None = Field(default=None, description="folder, file or glob; null: the interpreter's standard library")
    suffixes: list[str] = Field(default=[".py"], description="file extensions to read in a folder")
    tokenizer: str = Field(
        default="bytes", description="bytes (one token per byte), or the path of a Hugging Face tokenizer.json"
    )
    held_out_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="fraction of the files kept for evaluation; of a single file, its end"
    )
    held_out_samples: int = Field(default=64, ge=1, description="sequences per evaluation")


class ParallelConfig(Section):
    """Distribution of the model over ranks, and the trade of memory for compute."""

    mode: Literal["ddp", "fsdp2", "hsdp"] = Field(
        default="fsdp2", description="replicate (ddp), shard (fsdp2), or shard within groups that are replicated (hsdp)"
    )
    shard_size: Count | None = Field(
        default=None, description="hsdp: ranks that share one copy of the model; null: cluster.processes_per_node"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="activations recomputed in backward: none, all but matrix products, or all of a unit",
    )
    compile: bool = Field(default=False, description="apply torch.compile to each unit")


class DdpConfig(Section):
    """Options of mode ddp, named as in torch's DistributedDataParallel."""

    find_unused_parameters: bool = Field(
        default=False, description="for models that do not use every parameter in every step"
    )
    static_graph: bool = Field(default=False, description="promise that every step uses the same parameters")
    gradient_as_bucket_view: bool = Field(default=True, description="gradients are views into the buckets")
    bucket_cap_mb: float = Field(default=25.0, gt=0, description="size of a gradient bucket, MiB")
    gradient_compression: Literal["none", "bfloat16", "powersgd"] = Field(
        default="none", description="compression of gradients before the reduction: none, half precision, or low rank"
    )


class FsdpConfig(Section):
    """Options of the sharded modes; mixed precision applies to ddp as well, through autocast."""

    use_mixed_precision: bool = Field(default=False, description="compute in param_dtype; master weights stay float32")
    param_dtype: Literal["bfloat16", "float16"] = Field(
        default="bfloat16", description="dtype of the compute with mixed precision"
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of the gradient reduction with mixed precision"
    )
    cpu_offload: bool = Field(default=False, description="keep shards, gradients and optimizer state in host memory")


class ClusterConfig(Section):
    """Number of nodes and ranks, machine types, and deadlines for joining and for a step."""

    nodes: Count | Literal["auto"] = Field(default=2, description="number of nodes; auto: chosen by the plan")
    processes_per_node: Count | Literal["auto"] = Field(default=1, description="ranks per node; auto: one per GPU")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="auto: one GPU per rank if there are enough, else the CPU for all; GPUs that do not work are "
        "refused; cpu: never a GPU; cuda: refuse to train without a GPU for each rank",
    )
    max_nodes: Count | None = Field(default=None, description="largest number of nodes with nodes: auto; null: 8")
    min_nodes: Count | None = Field(
        default=None, description="continue with this many nodes when others are lost (not node 0); null: only with all"
    )
    instance_types: list[str] = Field(default=[], description="candidates by name or prefix (g5, p4d); empty: all")
    market: Literal["auto", "spot", "on_demand"] = Field(default="auto", description="markets that the plan may choose")
    plan_for: Literal["local", "batch", "kubernetes"] = Field(
        default="batch",
        description="backend whose prices and limits the plan uses, wherever the run is; AWS Batch runs several nodes "
        "on-demand only, Kubernetes on Spot too; local: simulated",
    )
    expected_start_seconds: float = Field(
        default=240.0,
        gt=0,
        description="expected time from requesting a node to its first step: boot, image, model",
    )
    start_deadline_seconds: float = Field(default=120.0, gt=0, description="time limit for all nodes and ranks to join")
    step_deadline_seconds: float = Field(default=300.0, gt=0, description="time limit without progress of a rank")

    @model_validator(mode="before")
    @classmethod
    def _accept_old_names(cls, data: Any) -> Any:
        """Accept the old names of keys in configurations that jobs have stored."""
        if not isinstance(data, dict):
            return data
        return {_RENAMED_IN_CLUSTER.get(name, name): value for name, value in data.items()}


class CheckpointConfig(Section):
    """Save schedule, and the commits to keep."""

    interval: Literal["steps", "seconds", "auto"] = Field(
        default="steps", description="save every interval_steps, every interval_seconds, or by measured cost and hazard"
    )
    interval_steps: int = Field(
        default=50, ge=1, description="steps between commits; with auto, at most this many before the first"
    )
    interval_seconds: float = Field(default=600.0, gt=0, description="seconds between commits with interval: seconds")
    when_busy: Literal["wait", "skip"] = Field(
        default="wait",
        description="when a save is due while the last one is still uploading: wait for it, or skip the new one",
    )
    upload_mib_per_second: float | None = Field(default=None, gt=0, description="upload limit of each rank; null: none")
    stop_seconds: float = Field(
        default=30.0, gt=0, description="time from SIGTERM to SIGKILL: the container's stop timeout"
    )
    keep_last: int = Field(default=3, ge=1, description="number of newest commits to keep")
    keep_every_steps: int | None = Field(
        default=None,
        ge=1,
        description="also keep the first commit at or after each multiple of this many steps; null: none",
    )
    keep_best: int = Field(default=0, ge=0, description="also keep this many commits with the lowest held_out_loss")
    max_total_gib: float | None = Field(
        default=None,
        gt=0,
        description="limit for all kept commits; the newest and pinned ones always stay; null: none",
    )
    orphan_hours: float = Field(
        default=24.0,
        gt=0,
        description="data of saves without a commit, and invalid commits, are deleted after this time",
    )
    deadline_seconds: float = Field(default=120.0, gt=0, description="time limit for one save to be durable")
    signing_key_env: str | None = Field(
        default=None,
        description="environment variable with the key that signs commits; unsigned commits are rejected; null: off",
    )


class CostConfig(Section):
    """Budget and deadline, and the source of prices."""

    budget_usd: float | None = Field(default=None, gt=0, description="spending limit of the job")
    owner: str | None = Field(default=None, description="owner of the cost, shown in the ledger and the reports")
    project: str | None = Field(default=None, description="project of the cost, shown in the ledger and the reports")
    deadline_hours: float | None = Field(default=None, gt=0, description="time limit from start to finish")
    confidence: float = Field(
        default=0.9,
        gt=0,
        lt=1,
        description="least probability to meet the deadline at which the plan ranks a pool by its dollars alone",
    )
    prices: str = Field(
        default="static",
        description="static (shipped, dated), live (DescribeSpotPriceHistory), or a file of recorded prices",
    )
    regions: list[str] = Field(default=["us-east-1"], description="AWS regions whose pools are candidates")
    zones: list[str] = Field(
        default=[], description="zone ids (use1-az1) to choose from; empty: all zones of the regions"
    )
    max_price_age_hours: float = Field(
        default=24.0, gt=0, description="age from which spot prices are reported as stale; they are still used"
    )
    store_region: str | None = Field(
        default=None, description="region of an s3:// store, for the cost of transfer; null: the pool's region"
    )
    volume_gib_per_node: float = Field(
        default=100.0, ge=0, description="EBS gp3 volume of each node, for the cost of storage"
    )


class SurvivalConfig(Section):
    """Hang detection, spot interruption notices and logs of a gang."""

    hang_floor_seconds: float = Field(
        default=60.0, ge=3, description="hang threshold of a rank: this, or 10 × the p99 of its phase if longer"
    )
    standby: bool = Field(
        default=True,
        description="keep a process on each node that has imported everything; restarted ranks fork from it",
    )
    on_rebalance: Literal["save", "leave", "nothing"] = Field(
        default="save", description="response to EC2's rebalance recommendation, which comes before a notice"
    )
    notice_margin_seconds: float = Field(
        default=10.0,
        ge=0,
        description="time between the last durable save and the termination that a spot notice announces",
    )
    notice_file: str = Field(
        default="/tmp/spot_termination_notice",
        description="file to which Metaflow's spot monitor writes the time of termination",
    )
    rank_log_mib: int = Field(
        default=64, ge=1, description="limit of a rank's output in a generation; the first and the last part are kept"
    )


class GuardsConfig(Section):
    """Responses to non-finite losses, spikes, diverged weights and out-of-memory errors (docs/survival.md)."""

    non_finite: Literal["stop", "skip", "rewind"] = Field(
        default="stop",
        description="response to a non-finite loss or gradient: stop the job, skip the step, or rewind to a commit",
    )
    spike: Literal["off", "skip", "rewind"] = Field(
        default="off", description="response to a spike of loss or gradient norm: skip the step, or rewind to a commit"
    )
    spike_z: float = Field(default=8.0, gt=0, description="size of a spike in robust standard deviations (median, MAD)")
    spike_window_steps: int = Field(
        default=100, ge=10, description="steps to compare with; no step is judged before half of them"
    )
    skips_in_a_row: int = Field(default=3, ge=1, description="consecutive skipped steps before a rewind")
    rewind_margin_steps: int = Field(
        default=0, ge=0, description="smallest distance of a rewind before the first bad step"
    )
    max_rewinds: int = Field(default=3, ge=0, description="rewinds of the whole job before it ends")
    hash_interval_steps: int | None = Field(
        default=100, ge=1, description="steps between comparisons of the weights of replicas; null: never"
    )
    out_of_memory: Literal["split", "stop"] = Field(
        default="split", description="response to out of memory: restart with smaller micro-batches, or stop"
    )
    memory_growth: Literal["renew", "off"] = Field(
        default="renew",
        description="response to memory that will run out within minutes: save and restart the processes",
    )


class MetricsConfig(Section):
    """Prometheus metrics. Every report also writes the file metrics.prom, whatever is set here."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="port on which each node serves /metrics while it trains; null: none"
    )
    address: str | None = Field(
        default=None, description="IP address of /metrics; null: 127.0.0.1 for a gang on this machine, else all"
    )
    push_url: str | None = Field(default=None, description="URL of a Pushgateway that the nodes push to; null: none")
    interval_seconds: float = Field(default=15.0, ge=1, description="time between pushes")


class RunConfig(Section):
    """The whole configuration of a job."""

    store: str = Field(
        default="runs", description="folder or s3://bucket/prefix; a relative path starts at the project root"
    )
    workload: str | None = Field(
        default=None, description="the workload as package.module:Class; null: the built-in language model"
    )
    workload_options: dict[str, bool | int | float | str] = Field(
        default={}, description="options of the workload; any names"
    )
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    ddp: DdpConfig = DdpConfig()
    fsdp: FsdpConfig = FsdpConfig()
    cluster: ClusterConfig = ClusterConfig()
    batch: BatchConfig = BatchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cost: CostConfig = CostConfig()
    metrics: MetricsConfig = MetricsConfig()
    survival: SurvivalConfig = SurvivalConfig()
    guards: GuardsConfig = GuardsConfig()

    @property
    def tokens_per_step(self) -> int:
        return self.training.batch_size * self.model.sequence_length
