"""Rules about several keys at once. Each shows its arithmetic and computes the nearest values that would do."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import isqrt

from infra.config.schema import RunConfig

_LARGEST_FACTORED = 10**12  # a million trial divisions; nobody needs a hint for more


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A broken rule. keys: those it is about, the one to blame first."""

    keys: tuple[str, ...]
    message: str
    hint: str | None = None


@dataclass(frozen=True)
class _Rule:
    keys: tuple[str, ...]
    check: Callable[[RunConfig], tuple[str, str | None] | None]


def violations(config: RunConfig, *, without: Collection[str] = ()) -> list[Violation]:
    """The rules that a configuration breaks. Rules about a key in `without` are left out."""
    broken = []
    for rule in _RULES:
        if any(key in without for key in rule.keys):
            continue
        found = rule.check(config)
        if found is not None:
            broken.append(Violation(keys=rule.keys, message=found[0], hint=found[1]))
    return broken


def nearest_divisors(number: int, near: int) -> list[int]:
    """The two divisors of `number` that are nearest to `near` (the lower one where two are as near), ascending."""
    if not 1 <= number <= _LARGEST_FACTORED:
        return []
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    divisors = {*small, *(number // candidate for candidate in small)}
    return sorted(sorted(divisors, key=lambda divisor: (abs(divisor - near), divisor))[:2])


def nearest_multiples(unit: int, near: int) -> list[int]:
    """The positive multiples of `unit` just below and just above `near`, which is not one itself."""
    below = near // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple > 0]


def _heads_divide_width(config: RunConfig) -> tuple[str, str | None] | None:
    width, heads = config.model.hidden_size, config.model.num_heads
    if width % heads == 0:
        return None
    message = f"model.hidden_size must be divisible by model.num_heads: {_division(width, heads)}"
    return message, _set(
        ("model.num_heads", nearest_divisors(width, heads)), ("model.hidden_size", nearest_multiples(heads, width))
    )


def _batch_divides_evenly(config: RunConfig) -> tuple[str, str | None] | None:
    nodes, processes = config.cluster.nodes, config.cluster.processes_per_node
    if nodes == "auto" or processes == "auto":
        return None
    batch, parts = config.training.batch_size, config.training.gradient_accumulation_steps
    ranks = nodes * processes
    unit = ranks * parts
    if batch % unit == 0:
        return None
    message = (
        "training.batch_size must be a multiple of cluster.nodes × cluster.processes_per_node × "
        f"training.gradient_accumulation_steps = {nodes} × {processes} × {parts} = {unit}: {_division(batch, unit)}"
    )
    fitting_parts = nearest_divisors(batch // ranks, parts) if batch % ranks == 0 else []
    return message, _set(
        ("training.batch_size", nearest_multiples(unit, batch)),
        ("training.gradient_accumulation_steps", fitting_parts),
    )


def _warm_up_fits(config: RunConfig) -> tuple[str, str | None] | None:
    warmup, steps = config.training.scheduler.warmup_steps, config.training.max_steps
    if warmup <= steps:
        return None
    message = f"training.scheduler.warmup_steps must not exceed training.max_steps: {warmup} > {steps}"
    return message, _set(
        ("training.scheduler.warmup_steps", [max(1, steps // 10)]), ("training.max_steps", [warmup * 10])
    )


def _commits_before_the_end(config: RunConfig) -> tuple[str, str | None] | None:
    interval, steps = config.checkpoint.interval_steps, config.training.max_steps
    if interval <= steps or config.checkpoint.interval != "steps":
        return None
    message = (
        "checkpoint.interval_steps must not exceed training.max_steps, or an interruption loses everything: "
        f"{interval} > {steps}"
    )
    return message, _set(("checkpoint.interval_steps", [max(1, steps // 4)]), ("training.max_steps", [interval * 4]))


def _bytes_have_tokens(config: RunConfig) -> tuple[str, str | None] | None:
    size = config.model.vocab_size
    if config.data.tokenizer != "bytes" or size >= 256:
        return None
    return f"model.vocab_size must be at least 256, one for each byte of the text: {size} < 256", _set(
        ("model.vocab_size", [256])
    )


def _store_is_known(config: RunConfig) -> tuple[str, str | None] | None:
    store = config.store
    hint = "use a folder, or s3://bucket/prefix"
    if not store.strip():
        return "store must not be empty", hint
    if store.startswith("s3://") and not store.removeprefix("s3://").partition("/")[0]:
        return f"store {store!r} names no bucket", hint
    if "://" in store and not store.startswith(("s3://", "file://")):
        return f"store {store!r} is of an unknown kind", hint
    return None


def _data_path_is_something(config: RunConfig) -> tuple[str, str | None] | None:
    if config.data.path is None or config.data.path.strip():
        return None
    return "data.path must not be empty", "name a folder, file or glob, or write null for the standard library"


def _suffixes_are_endings(config: RunConfig) -> tuple[str, str | None] | None:
    suffixes = config.data.suffixes
    if not suffixes:
        return "data.suffixes must name at least one file ending, or no file is taken", "for example [.py, .txt]"
    bare = [suffix for suffix in suffixes if not suffix.startswith(".") or suffix == "."]
    if not bare:
        return None
    mended = ", ".join(f".{suffix.lstrip('*').strip('.')}" for suffix in bare)
    return f"data.suffixes must be file endings with their dot, not {', '.join(map(repr, bare))}", f"write {mended}"


_RULES = (
    _Rule(("model.hidden_size", "model.num_heads"), _heads_divide_width),
    _Rule(
        (
            "training.batch_size",
            "training.gradient_accumulation_steps",
            "cluster.nodes",
            "cluster.processes_per_node",
        ),
        _batch_divides_evenly,
    ),
    _Rule(("training.scheduler.warmup_steps", "training.max_steps"), _warm_up_fits),
    _Rule(("checkpoint.interval_steps", "training.max_steps"), _commits_before_the_end),
    _Rule(("model.vocab_size", "data.tokenizer"), _bytes_have_tokens),
    _Rule(("store",), _store_is_known),
    _Rule(("data.path",), _data_path_is_something),
    _Rule(("data.suffixes",), _suffixes_are_endings),
)


def _division(dividend: int, divisor: int) -> str:
    quotient, remainder = divmod(dividend, divisor)
    return f"{dividend} = {divisor} × {quotient} + {remainder}"


def _set(*offers: tuple[str, list[int]]) -> str:
    """ "set a to 1 or 2, or b to 3", leaving out keys that have no fitting value."""
    return "set " + ", or ".join(f"{key} to {' or '.join(map(str, values))}" for key, values in offers if values)
