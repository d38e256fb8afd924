"""The sums that messages show, and the nearest values that would do."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

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


def set_to(*offers: tuple[str, Sequence[object]]) -> str:
    """ "set a to 1 or 2, or b to 3", leaving out keys that have no fitting value."""
    return "set " + ", or ".join(f"{key} to {' or '.join(map(str, values))}" for key, values in offers if values)
