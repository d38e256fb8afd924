"""Base classes of the configuration rules, and helpers that show a rule's arithmetic in messages."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from ebbflow.core.config.schema import RunConfig

Breach = tuple[str, str | None] | None  # message and hint of a broken rule; None: the rule holds
Check = Callable[[RunConfig], Breach]

_LARGEST_FACTORED = 10**12  # limits the search to a million trial divisions


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A rule that the configuration breaks, with message and hint."""

    keys: tuple[str, ...]  # dotted keys that the rule is about, the most likely mistake first
    message: str  # what is wrong
    hint: str | None = None  # how to fix it


@dataclass(frozen=True)
class Rule:
    """A check of one or more configuration keys."""

    keys: tuple[str, ...]  # dotted keys that `check` reads, the most likely mistake first
    check: Check


class Rules(list[Rule]):
    """List of rules, in the order in which they are checked."""

    def about(self, *keys: str) -> Callable[[Check], Check]:
        """Return a decorator that adds a check of these keys to the list.

        The key that is most likely wrong comes first.
        """

        def add(check: Check) -> Check:
            self.append(Rule(keys, check))
            return check

        return add


def value_of(config: RunConfig, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def count_ranks(config: RunConfig) -> int | None:
    """Return the number of ranks, or None if the number of nodes or of ranks per node is "auto"."""
    nodes = config.cluster.nodes
    processes = config.cluster.processes_per_node
    if nodes == "auto" or processes == "auto":
        return None
    return nodes * processes


def nearest_divisors(number: int, near: int) -> list[int]:
    """Return the two divisors of `number` closest to `near`, in ascending order; a tie goes to the
    lower one.
    """
    if not 1 <= number <= _LARGEST_FACTORED:
        return []
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    divisors = {*small, *(number // candidate for candidate in small)}
    return sorted(sorted(divisors, key=lambda divisor: (abs(divisor - near), divisor))[:2])


def nearest_multiples(unit: int, near: int) -> list[int]:
    """Return the positive multiples of `unit` just below and just above `near`, which must not be a
    multiple itself.
    """
    below = near // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple > 0]


def division(dividend: int, divisor: int) -> str:
    """Render a division with its remainder, such as "770 = 12 × 64 + 2"."""
    quotient, remainder = divmod(dividend, divisor)
    return f"{dividend} = {divisor} × {quotient} + {remainder}"


def product(factors: Sequence[object]) -> str:
    """Render a product, such as "(2 × 4 × 1)", without parentheses if there is only one factor."""
    text = " × ".join(map(str, factors))
    if len(factors) > 1:
        return f"({text})"
    return text


def suggest_values(*offers: tuple[str, Sequence[object]]) -> str:
    """Render a hint such as "set a to 1 or 2, or b to 3" from (key, values) pairs.

    Pairs without values are skipped.
    """
    return "set " + ", or ".join(
        f"{key} to {' or '.join(map(str, values))}" for key, values in offers if values
    )
