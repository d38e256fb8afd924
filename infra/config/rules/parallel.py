"""Rules of how the model is spread over ranks: sizes that divide, and no option that would silently do nothing."""

from __future__ import annotations

from ebbflow.infra.config.rules.arithmetic import division, nearest_divisors, set_to
from ebbflow.infra.config.rules.rule import Answer, Rule, ranks, value_of
from ebbflow.infra.config.schema import DdpConfig, FsdpConfig, RunConfig

_SHARDED = ("fsdp2", "hsdp")


def _shards_divide_ranks(config: RunConfig) -> Answer:
    shard, world_size = config.parallel.shard_size, ranks(config)
    if config.parallel.mode != "hsdp" or shard is None or world_size is None:
        return None
    if world_size % shard == 0 or world_size < shard:  # the latter is a derived quantity of less than 1
        return None
    nodes, processes = config.cluster.nodes, config.cluster.processes_per_node
    message = (
        "parallel.shard_size must divide the ranks, cluster.nodes × cluster.processes_per_node = "
        f"{nodes} × {processes} = {world_size}: {division(world_size, shard)}"
    )
    return message, set_to(("parallel.shard_size", nearest_divisors(world_size, shard)))


def _shard_size_is_of_hsdp(config: RunConfig) -> Answer:
    if config.parallel.shard_size is None or config.parallel.mode == "hsdp":
        return None
    message = f"parallel.shard_size has no effect with parallel.mode {config.parallel.mode}: it is of mode hsdp"
    return message, set_to(("parallel.mode", ["hsdp"]), ("parallel.shard_size", ["null"]))


def _no_float16(config: RunConfig) -> Answer:
    if config.fsdp.param_dtype != "float16":
        return None
    message = (
        "fsdp.param_dtype float16 is refused: on a CPU it is hundreds of times slower than bfloat16, and on a GPU its "
        "range, 6e-8 to 65504, needs loss scaling, which the engine does not do; bfloat16 has the range of float32"
    )
    return message, set_to(("fsdp.param_dtype", ["bfloat16"]))


def _dtypes_need_mixed_precision(config: RunConfig) -> Answer:
    sharded = config.parallel.mode in _SHARDED
    if not sharded or config.fsdp.use_mixed_precision or config.fsdp.reduce_dtype == "float32":
        return None
    message = (
        f"fsdp.reduce_dtype {config.fsdp.reduce_dtype} has no effect without fsdp.use_mixed_precision: "
        "gradients of float32 parameters are added up in float32"
    )
    return message, set_to(("fsdp.use_mixed_precision", ["true"]), ("fsdp.reduce_dtype", ["float32"]))


def _static_graph_finds_unused(config: RunConfig) -> Answer:
    if not (config.parallel.mode == "ddp" and config.ddp.static_graph and config.ddp.find_unused_parameters):
        return None
    message = (
        "ddp.find_unused_parameters has no effect with ddp.static_graph: torch finds them once, in the first step, and "
        "takes them to be the same in every step"
    )
    return message, set_to(("ddp.find_unused_parameters", ["false"]), ("ddp.static_graph", ["false"]))


def _compressed_once(config: RunConfig) -> Answer:
    ddp, parts = config.ddp, config.training.gradient_accumulation_steps
    if config.parallel.mode != "ddp" or ddp.gradient_compression == "none" or not ddp.static_graph or parts == 1:
        return None
    message = (
        f"ddp.static_graph with training.gradient_accumulation_steps {parts} reduces gradients {parts} times per step, "
        f"and ddp.gradient_compression {ddp.gradient_compression} would compress what was compressed before"
    )
    return message, set_to(("ddp.static_graph", ["false"]), ("training.gradient_accumulation_steps", [1]))


def _only_with_modes(key: str, default: object, modes: tuple[str, ...]) -> Rule:
    """An option that another mode would not look at must be left at its default there."""

    def check(config: RunConfig) -> Answer:
        mode, value = config.parallel.mode, value_of(config, key)
        if mode in modes or value == default:
            return None
        allowed = " and ".join(modes)
        shown = str(default).lower() if isinstance(default, bool) else default
        message = f"{key} has no effect with parallel.mode {mode}: it is an option of {allowed}"
        return message, set_to(("parallel.mode", modes), (key, [f"{shown}, the default"]))

    return Rule((key, "parallel.mode"), check)


RULES = (
    Rule(("parallel.shard_size", "parallel.mode", "cluster.nodes", "cluster.processes_per_node"), _shards_divide_ranks),
    Rule(("parallel.shard_size", "parallel.mode"), _shard_size_is_of_hsdp),
    Rule(("fsdp.param_dtype",), _no_float16),
    Rule(("fsdp.reduce_dtype", "fsdp.use_mixed_precision", "parallel.mode"), _dtypes_need_mixed_precision),
    Rule(
        (
            "ddp.static_graph",
            "ddp.gradient_compression",
            "training.gradient_accumulation_steps",
            "parallel.mode",
        ),
        _compressed_once,
    ),
    Rule(("ddp.find_unused_parameters", "ddp.static_graph", "parallel.mode"), _static_graph_finds_unused),
    *(_only_with_modes(f"ddp.{name}", field.default, ("ddp",)) for name, field in DdpConfig.model_fields.items()),
    *(
        _only_with_modes(f"fsdp.{name}", FsdpConfig.model_fields[name].default, _SHARDED)
        for name in ("reduce_dtype", "cpu_offload")
    ),
)
