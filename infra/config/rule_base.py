"""What a rule of the configuration is, and the arithmetic that its message shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from ebbflow.infra.config.schema import RunConfig

Breach = tuple[str, str | None] | None  # message and hint of a broken rule


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A broken rule. keys: those it is about, the one to blame first."""

    keys: tuple[str, ...]
    message: str
    hint: str | None = None


@dataclass(frozen=True)
class Rule:
    """keys: those that `check` looks at, the one to blame first. check: message and hint, or None when it holds."""

    keys: tuple[str, ...]
    check: Callable[[RunConfig], Breach]


def value_of(config: RunConfig, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def count_ranks(config: RunConfig) -> int | None:
    """The world size, or None where the plan is to choose it."""
    nodes, processes = config.cluster.nodes, config.cluster.processes_per_node
    return None if nodes == "auto" or processes == "auto" else nodes * processes


_LARGEST_FACTORED = 10**12  # a million trial divisions; nobody needs a hint for more


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


def division(dividend: int, divisor: int) -> str:
    """Such as "770 = 12 × 64 + 2"."""
    quotient, remainder = divmod(dividend, divisor)
    return f"{dividend} = {divisor} × {quotient} + {remainder}"


def product(factors: Sequence[object]) -> str:
    """Such as "2 × 4 × 1"; in brackets where there are several."""
    text = " × ".join(map(str, factors))
    return f"({text})" if len(factors) > 1 else text


def suggest_values(*offers: tuple[str, Sequence[object]]) -> str:
    """ "set a to 1 or 2, or b to 3", leaving out keys that have no fitting value."""
    return "set " + ", or ".join(f"{key} to {' or '.join(map(str, values))}" for key, values in offers if values)
