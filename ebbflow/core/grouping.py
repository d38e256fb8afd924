"""Collect or sum values by key, in the order in which the keys first occur."""

from collections.abc import Hashable, Iterable
from decimal import Decimal
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
N = TypeVar("N", int, float, Decimal)


def group_by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Collect the values of each key in a list, from pairs of (key, value)."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def sum_by_key(pairs: Iterable[tuple[K, N]]) -> dict[K, N]:
    """Sum the values of each key, from pairs of (key, number)."""
    found: dict[K, N] = {}
    for key, number in pairs:
        if key in found:
            found[key] = found[key] + number
        else:
            found[key] = number
    return found
