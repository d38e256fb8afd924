"""Dollars and other amounts: round them, divide them so that the parts sum to the whole, format them as text.

Dollars: cents from $10 on, else four decimals, since a laptop's whole run costs less than a cent's worth of any GPU.
"""

from __future__ import annotations

import math
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal

from ebbflow.infra.untrusted_text import one_line

# Dollars are kept to six decimals: a rank-second of the cheapest pool costs about a ten-thousandth of a dollar.
USD_DECIMALS = 6


def smallest_unit(decimals: int) -> Decimal:
    return Decimal(1).scaleb(-decimals)


def round_amount(amount: Decimal, decimals: int = USD_DECIMALS) -> Decimal:
    return amount.quantize(smallest_unit(decimals), ROUND_HALF_EVEN)


def apportion(amounts: list[Decimal], decimals: int = USD_DECIMALS, *, total: Decimal | None = None) -> list[Decimal]:
    """Round each amount so that their sum is exactly the rounded sum of the exact amounts.

    total: that rounded sum, where it is already known. Give it wherever one whole is divided in several ways: Decimal
    sums depend on their order in the 28th digit, and a sum that lies half-way between two units rounds to either.

    Rule of the largest remainder: every amount is rounded down to `decimals`, and the units that are then missing
    from the rounded total go, one each, to the amounts that lost most (to the earlier one when equal). No amount
    moves by a whole unit or more.
    """
    unit = smallest_unit(decimals)
    floors = [amount.quantize(unit, ROUND_FLOOR) for amount in amounts]
    whole = round_amount(sum(amounts, Decimal(0)), decimals) if total is None else total
    missing = int((whole - sum(floors, Decimal(0))) / unit)
    by_loss = sorted(range(len(amounts)), key=lambda index: (floors[index] - amounts[index], index))
    for index in by_loss[:missing]:
        floors[index] += unit
    return floors


NONE = "n/a"
_CENTS_FROM = Decimal(10)


def plain(text: object) -> str:
    """Foreign text on one line, with control characters as visible escapes."""
    return one_line(text)


def usd_decimals(total: Decimal | float) -> int:
    return 2 if abs(Decimal(str(total))) >= _CENTS_FROM else 4


def format_usd(amount: Decimal | float | None, decimals: int | None = None) -> str:
    """Dollars; n/a for None and for what is no number."""
    if amount is None or not math.isfinite(amount):
        return NONE
    exact = amount if isinstance(amount, Decimal) else Decimal(str(amount))
    value = round_amount(exact, usd_decimals(exact) if decimals is None else decimals)
    return f"{'-' if value < 0 else ''}${abs(value):,}"


def format_number(value: float | None, digits: int = 4) -> str:
    """A number to `digits` decimals, with commas; n/a for None, NaN and infinity."""
    return NONE if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def format_percent(share: float | None, digits: int = 1) -> str:
    return NONE if share is None or not math.isfinite(share) else f"{100 * share:.{digits}f} %"


def format_share(share: float | None, whole: str) -> str:
    """A percentage that says what it is a share of; n/a for no number."""
    text = format_percent(share)
    return text if text == NONE else f"{text} of {whole}"


def format_seconds(value: float | None) -> str:
    """Rank-seconds, always in seconds and rounded as the lines of a ledger are, so that they add up."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{round_amount(Decimal(str(value)), 2):,}"


def format_duration(value: float | None) -> str:
    """Wall time as people say it: 42.3 s, 3 min 20 s, 5 h 12 min."""
    if value is None or not math.isfinite(value):
        return NONE
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def format_count(value: int, noun: str) -> str:
    return f"{value:,} {noun}{'' if value == 1 else 's'}"
