"""The typed configuration of a job. Plain data: no torch, no I/O.

Cross-field rules are in `ebbflow.infra.config.shape_rules` and `name_rules`; files are read in
`ebbflow.infra.config.load`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A frozen section that knows no key beyond its own and converts no type behind the user's back."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


# Old names of keys: configurations and stored jobs may still have them.
RENAMED_KEYS = {"cluster.backend": "cluster.plan_for"}

Count = Annotated[int, Field(ge=1)]


class QueueConfig(Section):
    """A job queue that training may go to. The market is the queue's: Batch knows it of compute environments only."""

    name: str = Field(description="the job queue's name or ARN")
    market: Literal["spot", "on_demand"] = Field(description="what its compute environments are made of")
    instance_types: list[str] = Field([], description="by name or prefix (g5, p4d.24xlarge); empty: any")
    multi_node: bool = Field(
        False, description="takes jobs of several nodes; Batch runs them on-demand only, in managed EC2 environments"
    )


class BatchConfig(Section):
    """AWS Batch. `ebbflow adopt` writes this section from what an account has."""

    queues: list[QueueConfig] = Field(
        [], description="where training may go; empty: the queues of the account, as they are found at launch"
    )
    light_queue: str | None = Field(
        None,
        description="for the steps around training; null: METAFLOW_BATCH_JOB_QUEUE, else the smallest machines",
    )
    image: str | None = Field(None, description="of the containers; null: METAFLOW_BATCH_CONTAINER_IMAGE")
    region: str | None = Field(None, description="of queues and jobs; null: as every AWS tool finds it")
    efa_interfaces: int = Field(0, ge=0, description="EFA devices of each node of a job of several nodes; 0: none")
    shared_memory_mib: Count = Field(4096, description="/dev/shm of a container, which NCCL and loaders use")
    tags: dict[str, str] = Field({}, description="put on every job, for cost allocation")
    runnable_minutes: float = Field(
        30.0, gt=0, description="a job may wait for capacity this long before it is placed elsewhere"
    )
    job_role: str | None = Field(None, description="ARN of the containers' role; null: METAFLOW_ECS_S3_ACCESS_IAM_ROLE")
    metadata_fixes: Literal["auto", "refuse"] = Field(
        "auto",
        description="what Metaflow gets wrong on Batch without a metadata service: mend what is known, or refuse",
    )


class ModelConfig(Section):
    """The shape of the causal language model."""

    hidden_size: int = Field(128, ge=1, description="width of the residual stream")
    num_layers: int = Field(4, ge=1, description="transformer blocks")
    num_heads: int = Field(4, ge=1, description="attention heads; must divide hidden_size")
    sequence_length: int = Field(128, ge=2, description="tokens per sample")
    vocab_size: int = Field(256, ge=2, description="size of the vocabulary; 256 for bytes")


class SchedulerConfig(Section):
    """Learning rate over steps."""

    type: Literal["constant", "linear_warmup", "cosine", "wsd"] = Field(
        "cosine", description="all warm up first; wsd holds, then decays over the last fifth"
    )
    warmup_steps: int = Field(20, ge=0, description="steps of linear warm-up from zero")
    final_ratio: float = Field(0.1, ge=0, le=1, description="last learning rate as a share of the peak")


class TrainingConfig(Section):
    """Optimisation. batch_size counts global sequences per step at any world size."""

    batch_size: int = Field(32, ge=1, description="global sequences per step, whatever the world size")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate")
    gradient_accumulation_steps: int = Field(1, ge=1, description="micro-batches per step and rank")
    max_steps: int = Field(300, ge=1, description="optimizer steps of the job")
    seed: int = Field(1234, ge=0, description="initial weights and data order")
    micro_batch: Literal["fixed", "auto"] = Field(
        "fixed",
        description="auto: the fewest micro-batches that fit into memory, from gradient_accumulation_steps on",
    )
    weight_decay: float = Field(0.1, ge=0, description="AdamW weight decay on matrices")
    initial_weights: str | None = Field(
        None, description="safetensors file, or folder of them (Hugging Face layout), to start from; null: by the seed"
    )
    gradient_clip_norm: float | None = Field(1.0, gt=0, description="global norm limit; null turns clipping off")
    evaluation_interval_steps: int = Field(100, ge=1, description="steps between held-out evaluations")
    scheduler: SchedulerConfig = SchedulerConfig()


class DataConfig(Section):
    """Text to train on. Without a path: the standard library of the running Python, tests excluded."""

    path: str | None = Field(None, description="folder, file or glob; null: the interpreter's standard library")
    suffixes: list[str] = Field([".py"], description="file endings taken from a folder")
    tokenizer: str = Field("bytes", description="bytes (one token per byte), or a tokenizer.json of Hugging Face")
    held_out_fraction: float = Field(
        0.05, gt=0, lt=1, description="share of the files kept for evaluation; of a single file, its last part"
    )
    held_out_samples: int = Field(64, ge=1, description="sequences per evaluation")


class ParallelConfig(Section):
    """How the model is spread over ranks, and what its units trade: memory against compute, start-up against speed."""

    mode: Literal["ddp", "fsdp2", "hsdp"] = Field(
        "fsdp2", description="replicate (ddp), shard (fsdp2), or shard within groups that are replicated (hsdp)"
    )
    shard_size: Count | None = Field(
        None, description="hsdp: ranks that share one copy of the model; null: cluster.processes_per_node"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations computed again in backward: none, all but matrix products, or all of a unit"
    )
    compile: bool = Field(False, description="torch.compile of each unit")


class DdpConfig(Section):
    """Options of mode ddp, as torch's DistributedDataParallel has them."""

    find_unused_parameters: bool = Field(False, description="for models that leave parameters out of some steps")
    static_graph: bool = Field(False, description="promise that every step uses the same parameters")
    gradient_as_bucket_view: bool = Field(True, description="gradients share the memory of the buckets")
    bucket_cap_mb: float = Field(25.0, gt=0, description="MiB of gradients reduced together")
    gradient_compression: Literal["none", "bfloat16", "powersgd"] = Field(
        "none", description="what is sent of the gradients: all, halves, or a low-rank approximation"
    )


class FsdpConfig(Section):
    """Options of the sharded modes; mixed precision holds for ddp as well, by autocast."""

    use_mixed_precision: bool = Field(False, description="compute in param_dtype; master weights stay float32")
    param_dtype: Literal["bfloat16", "float16"] = Field("bfloat16", description="with mixed precision: of the compute")
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="with mixed precision: in which gradients are added up over ranks"
    )
    cpu_offload: bool = Field(False, description="shards, gradients and optimizer state stay in host memory")


class ClusterConfig(Section):
    """The gang: how many nodes and ranks, and how long its parts may keep each other waiting."""

    nodes: Count | Literal["auto"] = Field(2, description="nodes, or auto: as the plan says")
    processes_per_node: Count | Literal["auto"] = Field(1, description="ranks per node, or auto: one per GPU")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="auto: a GPU for each rank where there are enough, else the CPU for all; GPUs that do not work are "
        "refused; cpu: never a GPU; cuda: refuse to train without a GPU for each rank",
    )
    max_nodes: Count | None = Field(None, description="with nodes: auto, at most so many; null: 8")
    min_nodes: Count | None = Field(
        None, description="go on with so many when nodes are lost, node 0 not among them; null: only with all of them"
    )
    instance_types: list[str] = Field([], description="candidates by name or prefix (g5, p4d); empty: all")
    market: Literal["auto", "spot", "on_demand"] = Field("auto", description="which markets the plan may choose")
    plan_for: Literal["local", "batch", "kubernetes"] = Field(
        "batch",
        description="backend whose prices and limits the plan uses, wherever the run is; AWS Batch runs several nodes "
        "on-demand only, Kubernetes on Spot too; local: simulated",
    )
    expected_start_seconds: float = Field(
        240.0,
        gt=0,
        description="by the plan, from asking for a node to its first step: boot, image, model",
    )
    start_deadline_seconds: float = Field(120.0, gt=0, description="for all nodes and ranks to have joined")
    step_deadline_seconds: float = Field(300.0, gt=0, description="without progress of a rank")

    @model_validator(mode="before")
    @classmethod
    def _accept_old_names(cls, data: Any) -> Any:
        """Load configurations that jobs stored before a key was renamed."""
        if not isinstance(data, dict):
            return data
        return {RENAMED_KEYS.get(f"cluster.{name}", name).rpartition(".")[2]: value for name, value in data.items()}


class CheckpointConfig(Section):
    """Commits: how often and how many."""

    interval: Literal["steps", "seconds", "auto"] = Field(
        "steps", description="what decides when to save: interval_steps, interval_seconds, or measured cost and hazard"
    )
    interval_steps: int = Field(50, ge=1, description="steps between commits; auto: before the first, at most")
    interval_seconds: float = Field(600.0, gt=0, description="with interval: seconds")
    when_busy: Literal["wait", "skip"] = Field(
        "wait", description="a save that is due while the last one is still uploaded: wait for it, or leave it out"
    )
    upload_mib_per_second: float | None = Field(None, gt=0, description="cap of each rank's upload; null: none")
    stop_seconds: float = Field(
        30.0, gt=0, description="from SIGTERM until the process is killed: the container's stop time-out"
    )
    keep_last: int = Field(3, ge=1, description="commits kept: the newest so many")
    keep_every_steps: int | None = Field(
        None, ge=1, description="also keep the first commit at or after each multiple of so many steps; null: none"
    )
    keep_best: int = Field(0, ge=0, description="also keep so many commits of the lowest held_out_loss")
    max_total_gib: float | None = Field(
        None, gt=0, description="of all kept commits; the least valued go, the newest and pinned stay; null: no limit"
    )
    orphan_hours: float = Field(
        24.0, gt=0, description="data of saves that never came to a commit, and commits that do not count, are kept"
    )
    deadline_seconds: float = Field(120.0, gt=0, description="for one save to be durable")
    signing_key_env: str | None = Field(
        None, description="environment variable with the key that signs commits; unsigned ones are refused; null: off"
    )


class CostConfig(Section):
    """The limits the plan and the run must keep, and where its prices come from."""

    budget_usd: float | None = Field(None, gt=0, description="the most the job may cost")
    owner: str | None = Field(None, description="who answers for the cost; stands in the ledger and the reports")
    project: str | None = Field(None, description="what the cost is booked on; stands in the ledger and the reports")
    deadline_hours: float | None = Field(None, gt=0, description="hours from the start to the finish")
    prices: str = Field(
        "static", description="static (shipped, dated), live (DescribeSpotPriceHistory), or a file of recorded prices"
    )
    regions: list[str] = Field(["us-east-1"], description="AWS regions whose pools are candidates")
    zones: list[str] = Field([], description="zone ids (use1-az1) to choose from; empty: all of the regions")
    max_price_age_hours: float = Field(24.0, gt=0, description="older spot prices are used, and said to be stale")
    store_region: str | None = Field(
        None, description="where an s3:// store lies, for what transfer costs; null: with the pool, wherever that is"
    )
    volume_gib_per_node: float = Field(100.0, ge=0, description="EBS gp3 of each node, for what storage costs")


class SurvivalConfig(Section):
    """When a gang is watched closely, and what is done when a part of it fails."""

    hang_floor_seconds: float = Field(
        60.0, ge=3, description="a rank that is only slow is ended after this, or 10 × the p99 of its phase if longer"
    )
    standby: bool = Field(
        True, description="each node keeps a process that has imported everything: ranks start from it in no time"
    )
    on_rebalance: Literal["save", "leave", "nothing"] = Field(
        "save", description="what EC2's recommendation to rebalance leads to, which is no notice yet"
    )
    notice_margin_seconds: float = Field(
        10.0, ge=0, description="kept back from a spot notice's time: the save must be durable before the machine goes"
    )
    notice_file: str = Field(
        "/tmp/spot_termination_notice", description="where Metaflow's spot monitor writes the time of termination"
    )
    rank_log_mib: int = Field(
        64, ge=1, description="of what a rank prints in a generation, this much is kept: the first part and the last"
    )


class GuardsConfig(Section):
    """What is done when numbers, weights or memory go wrong (docs/survival.md)."""

    non_finite: Literal["stop", "skip", "rewind"] = Field(
        "stop", description="a loss or gradient that is not finite: end the job, leave the step out, or go back"
    )
    spike: Literal["off", "skip", "rewind"] = Field(
        "off", description="a loss or gradient norm far above those before: leave the step out, or go back"
    )
    spike_z: float = Field(8.0, gt=0, description="how far: in robust standard deviations (median, MAD)")
    spike_window_steps: int = Field(100, ge=10, description="steps that are compared with; none is judged before half")
    skips_in_a_row: int = Field(3, ge=1, description="steps left out one after the other before going back")
    rewind_margin_steps: int = Field(0, ge=0, description="at least so far before the first bad step")
    max_rewinds: int = Field(3, ge=0, description="of the whole job; then it ends")
    hash_interval_steps: int | None = Field(
        100, ge=1, description="steps between comparisons of the weights of equal ranks; null: never"
    )
    out_of_memory: Literal["split", "stop"] = Field(
        "split", description="a micro-batch that does not fit: start again with smaller ones, or end"
    )
    memory_growth: Literal["renew", "off"] = Field(
        "renew", description="memory that will run out within minutes: save, and go on in new processes"
    )


class MetricsConfig(Section):
    """Prometheus metrics. metrics.prom is written with every report in any case."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="each node serves /metrics here while it trains; null: it does not"
    )
    address: str | None = Field(
        None, description="IP address that /metrics listens on; null: 127.0.0.1 for a gang on this machine, else all"
    )
    push_url: str | None = Field(None, description="Pushgateway that the nodes push to; null: none")
    interval_seconds: float = Field(15.0, ge=1, description="between pushes")


class RunConfig(Section):
    """All of a job's configuration."""

    store: str = Field("runs", description="folder or s3://bucket/prefix; relative: from the project's root")
    workload: str | None = Field(
        None, description="what is trained, as package.module:Class; null: the built-in language model on text"
    )
    workload_options: dict[str, bool | int | float | str] = Field(
        {}, description="options of a workload of your own, any names"
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
