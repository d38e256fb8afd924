"""Configuration rules about sizes, such as batches, heads, ranks, shards and values derived from
them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from ebbflow.core.config.rule_base import (
    Breach,
    Rules,
    count_ranks,
    division,
    nearest_divisors,
    nearest_multiples,
    product,
    suggest_values,
    value_of,
)
from ebbflow.core.config.schema import DdpConfig, FsdpConfig, ModelConfig, RunConfig

RULES = Rules()


@RULES.about("model.hidden_size", "model.num_heads", "model.head_size")
def _heads_divide_width(config: RunConfig) -> Breach:
    width = config.model.hidden_size
    heads = config.model.num_heads
    # Less than 1: reported as a derived quantity
    if width % heads == 0 or width < heads or config.model.head_size:
        return None
    message = f"model.hidden_size must be divisible by model.num_heads: {division(width, heads)}"
    return message, suggest_values(
        ("model.num_heads", nearest_divisors(width, heads)),
        ("model.hidden_size", nearest_multiples(heads, width)),
    )


@RULES.about("model.num_kv_heads", "model.num_heads")
def _kv_heads_divide_heads(config: RunConfig) -> Breach:
    heads = config.model.num_heads
    kv_heads = config.model.kv_heads
    if heads % kv_heads == 0:
        return None
    message = (
        f"model.num_heads must be a multiple of model.num_kv_heads: {division(heads, kv_heads)}"
    )
    return message, suggest_values(("model.num_kv_heads", nearest_divisors(heads, kv_heads)))


@RULES.about("model.head_size", "model.hidden_size", "model.num_heads", "model.architecture")
def _rotated_heads_are_even(config: RunConfig) -> Breach:
    model = config.model
    if model.architecture != "llama" or model.head_width % 2 == 0:
        return None
    own = model.head_size is not None
    if own:
        computed = ""
    else:
        computed = (
            f" = model.hidden_size / model.num_heads = {model.hidden_size} / {model.num_heads}"
        )
    message = (
        "the width of an attention head must be even for rotary positions: "
        f"{model.head_width}{computed}"
    )
    return message, suggest_values(("model.head_size", [model.head_width + 1]))


@RULES.about(
    "training.batch_size",
    "training.gradient_accumulation_steps",
    "cluster.nodes",
    "cluster.processes_per_node",
    "parallel.tensor_size",
)
def _batch_divides_evenly(config: RunConfig) -> Breach:
    world_size = count_ranks(config)
    if world_size is None or config.script is not None:  # a script has batches of its own
        return None
    nodes = config.cluster.nodes
    processes = config.cluster.processes_per_node
    batch = config.training.batch_size
    parts = config.training.gradient_accumulation_steps
    tensor = config.parallel.tensor_size
    over = ""
    value = ""
    if tensor > 1:
        over = " / parallel.tensor_size"
        value = f" / {tensor}"
    world_size = max(1, world_size // tensor)
    unit = world_size * parts
    if batch % unit == 0 or batch < unit:  # less than 1: reported as a derived quantity
        return None
    message = (
        "training.batch_size must be a multiple of cluster.nodes × cluster.processes_per_node × "
        f"training.gradient_accumulation_steps{over} = {nodes} × {processes} × {parts}{value} = "
        f"{unit}: {division(batch, unit)}"
    )
    if batch % world_size == 0:
        fitting_parts = nearest_divisors(batch // world_size, parts)
    else:
        fitting_parts = []
    return message, suggest_values(
        ("training.batch_size", nearest_multiples(unit, batch)),
        ("training.gradient_accumulation_steps", fitting_parts),
    )


@RULES.about("training.scheduler.warmup_steps", "training.max_steps")
def _warm_up_fits(config: RunConfig) -> Breach:
    warmup = config.training.scheduler.warmup_steps
    steps = config.training.max_steps
    if warmup <= steps:
        return None
    message = (
        f"training.scheduler.warmup_steps must not exceed training.max_steps: {warmup} > {steps}"
    )
    return message, suggest_values(
        ("training.scheduler.warmup_steps", [max(1, steps // 10)]),
        ("training.max_steps", [warmup * 10]),
    )


@RULES.about("model.vocab_size", "data.tokenizer")
def _bytes_have_tokens(config: RunConfig) -> Breach:
    size = config.model.vocab_size
    if config.data.tokenizer != "bytes" or size >= 256:
        return None
    return (
        f"model.vocab_size must be at least 256, one for each byte of the text: {size} < 256",
        suggest_values(("model.vocab_size", [256])),
    )


@RULES.about("model.end_of_document", "model.vocab_size")
def _end_of_document_is_a_token(config: RunConfig) -> Breach:
    end = config.model.end_of_document
    size = config.model.vocab_size
    if end is None or end < size:
        return None
    return (
        f"model.end_of_document {end} is no token: model.vocab_size {size} has tokens 0 to "
        f"{size - 1}",
        suggest_values(("model.end_of_document", [0, size - 1]), ("model.vocab_size", [end + 1])),
    )


@RULES.about("data.suffixes")
def _suffixes_are_endings(config: RunConfig) -> Breach:
    suffixes = config.data.suffixes
    if not suffixes:
        return (
            "data.suffixes must name at least one file ending, or no file is taken",
            "for example [.py, .txt]",
        )
    bare = [suffix for suffix in suffixes if not suffix.startswith(".") or suffix == "."]
    if not bare:
        return None
    mended = ", ".join(f".{suffix.lstrip('*').strip('.')}" for suffix in bare)
    return (
        f"data.suffixes must be file endings with their dot, not {', '.join(map(repr, bare))}",
        f"write {mended}",
    )


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A quantity computed from several keys that must be at least 1, such as samples per
    micro-batch.

    It is the product of the keys `top` divided by the product of the keys `bottom`, rounded down.
    Keys set to "auto" are left out, as is a parallel.tensor_size of 1.
    """

    name: str  # name of the quantity in messages
    top: tuple[str, ...]  # dotted keys of the numerator
    bottom: tuple[str, ...]  # dotted keys of the denominator
    why: str  # consequence if the quantity is 0
    spare: int = 1  # quantity that results from the values in the hint, such as 4 commits of a job
    # Returns whether the quantity exists in a configuration
    applies: Callable[[RunConfig], bool] = lambda config: True  # noqa: ARG005 (takes the configuration, as others do)

    def value(self, config: RunConfig) -> int:
        return self._product(config, self.top) // self._product(config, self.bottom)

    def formula(self, config: RunConfig) -> str:
        """Render the calculation, such as "training.batch_size / (cluster.nodes × …) = 4 / (2 × 4)
        = 0.5".
        """
        top = self._known(config, self.top)
        bottom = self._known(config, self.bottom)
        top_values = product([value_of(config, key) for key in top])
        bottom_values = product([value_of(config, key) for key in bottom])
        exact = self._product(config, self.top) / self._product(config, self.bottom)
        return f"{product(top)} / {product(bottom)} = {top_values} / {bottom_values} = {exact:.4g}"

    def check(self, config: RunConfig) -> Breach:
        if not self.applies(config) or self.value(config) >= 1:
            return None
        return f"{self.name} must be at least 1, or {self.why}: {self.formula(config)}", self._hint(
            config
        )

    def _hint(self, config: RunConfig) -> str:
        whole = self._product(config, self.top)
        unit = self._product(config, self.bottom)
        offers: list[tuple[str, list[int]]] = []
        known = self._known(config, self.top)
        if len(known) == 1:
            offers.append((known[0], [unit * self.spare]))
        for key in self._known(config, self.bottom):
            own = value_of(config, key)
            largest = whole * own // unit  # largest value of this divisor if the others stay
            if self.spare > 1:
                offers.append((key, [max(1, largest // self.spare)]))
            elif whole % (unit // own) == 0:
                offers.append((key, [largest]))
        return suggest_values(*offers)

    @staticmethod
    def _known(config: RunConfig, keys: tuple[str, ...]) -> list[str]:
        numbers = [key for key in keys if isinstance(value_of(config, key), int)]
        return [
            key for key in numbers if key != "parallel.tensor_size" or value_of(config, key) > 1
        ]

    def _product(self, config: RunConfig, keys: tuple[str, ...]) -> int:
        return prod(value_of(config, key) for key in self._known(config, keys))


DERIVED = (
    Derived(
        name="samples per micro-batch",
        top=("training.batch_size", "parallel.tensor_size"),
        bottom=(
            "training.gradient_accumulation_steps",
            "cluster.nodes",
            "cluster.processes_per_node",
        ),
        why="ranks have nothing to compute",
        applies=lambda config: config.script is None,
    ),
    Derived(
        name="commits of the job",
        top=("training.max_steps",),
        bottom=("checkpoint.interval_steps",),
        why="an interruption loses everything",
        spare=4,
        applies=lambda config: config.checkpoint.interval == "steps" and config.script is None,
    ),
    Derived(
        name="copies of the model",
        top=("cluster.nodes", "cluster.processes_per_node"),
        bottom=("parallel.shard_size",),
        why="no group of ranks holds the whole of it",
        applies=lambda config: config.parallel.mode == "hsdp" and count_ranks(config) is not None,
    ),
    Derived(
        name="width of an attention head",
        top=("model.hidden_size",),
        bottom=("model.num_heads",),
        why="a head sees nothing",
        applies=lambda config: config.user_code is None and config.model.head_size is None,
    ),
)

for _one in DERIVED:
    RULES.about(*_one.top, *_one.bottom)(_one.check)


_SHARDED = ("fsdp2", "hsdp")


@RULES.about("parallel.shard_size", "parallel.mode", "cluster.nodes", "cluster.processes_per_node")
def _shards_divide_ranks(config: RunConfig) -> Breach:
    shard = config.parallel.shard_size
    world_size = count_ranks(config)
    if config.parallel.mode != "hsdp" or shard is None or world_size is None:
        return None
    if world_size % shard == 0 or world_size < shard:  # less than 1: reported as a derived quantity
        return None
    nodes = config.cluster.nodes
    processes = config.cluster.processes_per_node
    message = (
        "parallel.shard_size must divide the ranks, cluster.nodes × cluster.processes_per_node = "
        f"{nodes} × {processes} = {world_size}: {division(world_size, shard)}"
    )
    return message, suggest_values(("parallel.shard_size", nearest_divisors(world_size, shard)))


@RULES.about(
    "ddp.static_graph",
    "ddp.gradient_compression",
    "training.gradient_accumulation_steps",
    "parallel.mode",
)
def _compressed_once(config: RunConfig) -> Breach:
    ddp = config.ddp
    parts = config.training.gradient_accumulation_steps
    if (
        config.parallel.mode != "ddp"
        or ddp.gradient_compression == "none"
        or not ddp.static_graph
        or parts == 1
    ):
        return None
    message = (
        f"ddp.static_graph with training.gradient_accumulation_steps {parts} reduces gradients "
        f"{parts} times per step, and ddp.gradient_compression {ddp.gradient_compression} would "
        "compress what was compressed before"
    )
    return message, suggest_values(
        ("ddp.static_graph", ["false"]), ("training.gradient_accumulation_steps", [1])
    )


def _only_with(
    key: str, default: object, selector: str, values: tuple[object, ...], why: str = ""
) -> None:
    """Add a rule: `key` must keep its default unless the key `selector` has one of `values`.

    Args:
        why: the reason, for the message.
    """

    @RULES.about(key, selector)
    def check(config: RunConfig) -> Breach:
        selected = value_of(config, selector)
        value = value_of(config, key)
        if selected in values or value == default:
            return None
        shown, given, *others = (_write(value) for value in (default, selected, *values))
        condition = f"with {selector} {given}"
        message = (
            f"{key} has no effect {condition}: "
            f"{why or 'it is an option of ' + ' and '.join(others)}"
        )
        return message, suggest_values((selector, others), (key, [f"{shown}, the default"]))


def _write(value: object) -> str:
    """Render a value as YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


for _name, _field in DdpConfig.model_fields.items():
    _only_with(f"ddp.{_name}", _field.default, "parallel.mode", ("ddp",))
_in_float32 = "gradients of float32 parameters are added up in float32"
_only_with("fsdp.reduce_dtype", "float32", "fsdp.use_mixed_precision", ("auto", True), _in_float32)
_once = "torch finds them once, in the first step, and takes them to be the same in every step"
_only_with("ddp.find_unused_parameters", False, "ddp.static_graph", (False,), _once)
_only_with("parallel.shard_size", None, "parallel.mode", ("hsdp",))
_only_with(
    "guards.repeat_interval_steps",
    None,
    "training.deterministic",
    ("strict",),
    "a step that is computed twice is compared bit for bit",
)
_only_with(
    "guards.repeat_interval_steps",
    None,
    "ddp.gradient_compression",
    ("none", "bfloat16"),
    "the second computation would begin with what the first has left to send",
)
_only_with(
    "guards.repeat_interval_steps",
    None,
    "fsdp.param_dtype",
    ("auto", "bfloat16"),  # ranks refuse it where "auto" is float16
    "the loss scale of float16 may change between the two computations",
)
for _name in ("reduce_dtype", "cpu_offload"):
    _only_with(f"fsdp.{_name}", FsdpConfig.model_fields[_name].default, "parallel.mode", _SHARDED)
for _name, _field in ModelConfig.model_fields.items():
    if (_field.description or "").startswith("llama: "):
        _only_with(f"model.{_name}", _field.default, "model.architecture", ("llama",))


def _at_most(low: str, high: str, *others: object) -> None:
    """Add a rule: the value of `low` must not exceed the value of `high`.

    The hint also offers the values `others` for `low`.
    """

    @RULES.about(low, high)
    def check(config: RunConfig) -> Breach:
        value = value_of(config, low)
        limit = value_of(config, high)
        # Auto or null
        if not (isinstance(value, int) and isinstance(limit, int)) or value <= limit:
            return None
        return f"{low} {value} is more than {high} {limit}", suggest_values(
            (low, [limit, *others]), (high, [value])
        )


_at_most("cluster.min_nodes", "cluster.nodes")
_at_most("cluster.nodes", "cluster.max_nodes", "auto")
_at_most("cluster.min_nodes", "cluster.max_nodes")


@RULES.about(
    "parallel.shard_size",
    "parallel.mode",
    "cluster.processes_per_node",
    "cluster.min_nodes",
    "cluster.nodes",
)
def _shards_stay_on_a_node(config: RunConfig) -> Breach:
    """Check that each hsdp shard group fits within one node if the job may continue with fewer
    nodes.
    """
    shard = config.parallel.shard_size
    processes = config.cluster.processes_per_node
    if (
        config.cluster.min_nodes is None
        or config.parallel.mode != "hsdp"
        or shard is None
        or processes == "auto"
    ):
        return None
    if config.cluster.min_nodes == config.cluster.nodes or processes % shard == 0:
        return None
    message = (
        "parallel.shard_size must divide cluster.processes_per_node where cluster.min_nodes lets "
        f"nodes be lost: {division(processes, shard)}"
    )
    return message, suggest_values(
        ("parallel.shard_size", nearest_divisors(processes, shard)), ("cluster.min_nodes", ["null"])
    )
