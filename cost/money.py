"""Money that adds up: rounding a whole and its parts so that the parts still sum to the whole."""

from __future__ import annotations

from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal

# Dollars are kept to six decimals: a rank-second of the cheapest pool costs about a ten-thousandth of a dollar.
USD_DECIMALS = 6


def quantum(decimals: int) -> Decimal:
    return Decimal(1).scaleb(-decimals)


def rounded(amount: Decimal, decimals: int = USD_DECIMALS) -> Decimal:
    return amount.quantize(quantum(decimals), ROUND_HALF_EVEN)


def apportion(amounts: list[Decimal], decimals: int = USD_DECIMALS, *, total: Decimal | None = None) -> list[Decimal]:
    """Round each amount so that their sum is exactly the rounded sum of the exact amounts.

    total: that rounded sum, where it is already known. Give it wherever one whole is divided in several ways: Decimal
    sums depend on their order in the 28th digit, and a sum that lies half-way between two units rounds to either.

    Rule of the largest remainder: every amount is rounded down to `decimals`, and the units that are then missing
    from the rounded total go, one each, to the amounts that lost most (to the earlier one when equal). No amount
    moves by a whole unit or more.
    """
    unit = quantum(decimals)
    floors = [amount.quantize(unit, ROUND_FLOOR) for amount in amounts]
    whole = rounded(sum(amounts, Decimal(0)), decimals) if total is None else total
    missing = int((whole - sum(floors, Decimal(0))) / unit)
    by_loss = sorted(range(len(amounts)), key=lambda index: (floors[index] - amounts[index], index))
    for index in by_loss[:missing]:
        floors[index] += unit
    return floors
