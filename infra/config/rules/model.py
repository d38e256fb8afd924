"""Rules of the model, its training and its data."""

from __future__ import annotations

from ebbflow.infra.config.rules.arithmetic import division, nearest_divisors, nearest_multiples, set_to
from ebbflow.infra.config.rules.rule import Answer, Rule, ranks
from ebbflow.infra.config.schema import RunConfig


def _heads_divide_width(config: RunConfig) -> Answer:
    width, heads = config.model.hidden_size, config.model.num_heads
    if width % heads == 0 or width < heads:  # the latter is a derived quantity of less than 1
        return None
    message = f"model.hidden_size must be divisible by model.num_heads: {division(width, heads)}"
    return message, set_to(
        ("model.num_heads", nearest_divisors(width, heads)), ("model.hidden_size", nearest_multiples(heads, width))
    )


def _batch_divides_evenly(config: RunConfig) -> Answer:
    world_size = ranks(config)
    if world_size is None:
        return None
    nodes, processes = config.cluster.nodes, config.cluster.processes_per_node
    batch, parts = config.training.batch_size, config.training.gradient_accumulation_steps
    unit = world_size * parts
    if batch % unit == 0 or batch < unit:  # the latter is a derived quantity of less than 1
        return None
    message = (
        "training.batch_size must be a multiple of cluster.nodes × cluster.processes_per_node × "
        f"training.gradient_accumulation_steps = {nodes} × {processes} × {parts} = {unit}: {division(batch, unit)}"
    )
    fitting_parts = nearest_divisors(batch // world_size, parts) if batch % world_size == 0 else []
    return message, set_to(
        ("training.batch_size", nearest_multiples(unit, batch)),
        ("training.gradient_accumulation_steps", fitting_parts),
    )


def _warm_up_fits(config: RunConfig) -> Answer:
    warmup, steps = config.training.scheduler.warmup_steps, config.training.max_steps
    if warmup <= steps:
        return None
    message = f"training.scheduler.warmup_steps must not exceed training.max_steps: {warmup} > {steps}"
    return message, set_to(
        ("training.scheduler.warmup_steps", [max(1, steps // 10)]), ("training.max_steps", [warmup * 10])
    )


def _bytes_have_tokens(config: RunConfig) -> Answer:
    size = config.model.vocab_size
    if config.data.tokenizer != "bytes" or size >= 256:
        return None
    return f"model.vocab_size must be at least 256, one for each byte of the text: {size} < 256", set_to(
        ("model.vocab_size", [256])
    )


def _suffixes_are_endings(config: RunConfig) -> Answer:
    suffixes = config.data.suffixes
    if not suffixes:
        return "data.suffixes must name at least one file ending, or no file is taken", "for example [.py, .txt]"
    bare = [suffix for suffix in suffixes if not suffix.startswith(".") or suffix == "."]
    if not bare:
        return None
    mended = ", ".join(f".{suffix.lstrip('*').strip('.')}" for suffix in bare)
    return f"data.suffixes must be file endings with their dot, not {', '.join(map(repr, bare))}", f"write {mended}"


RULES = (
    Rule(("model.hidden_size", "model.num_heads"), _heads_divide_width),
    Rule(
        (
            "training.batch_size",
            "training.gradient_accumulation_steps",
            "cluster.nodes",
            "cluster.processes_per_node",
        ),
        _batch_divides_evenly,
    ),
    Rule(("training.scheduler.warmup_steps", "training.max_steps"), _warm_up_fits),
    Rule(("model.vocab_size", "data.tokenizer"), _bytes_have_tokens),
    Rule(("data.suffixes",), _suffixes_are_endings),
)
