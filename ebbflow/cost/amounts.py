"""Dollars and other amounts: rounding, splitting a total into rounded parts that sum to it, and
formatting as text.

Amounts of $10 and more are shown with two decimals. Smaller ones have four, because a short run
often costs less than one cent.
"""

import math
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal, InvalidOperation

# Dollars are kept to six decimals: a rank-second of the cheapest pool costs about a ten-thousandth
# of a dollar.
USD_DECIMALS = 6
NONE = "n/a"
_LARGEST = Decimal("1e18")  # far above anything sensible


def read_decimal(text: str) -> Decimal:
    """Read a number of at most 1e18 in magnitude. Raises ValueError for any other text."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or value.copy_abs().compare(_LARGEST) > 0:
        raise ValueError(f"{text!r} is not a number of at most {_LARGEST:g}")
    return value


def round_amount(amount: Decimal, decimals: int = USD_DECIMALS) -> Decimal:
    """Round to `decimals` decimals; a tie is rounded to the even digit."""
    return _quantize(amount, decimals, ROUND_HALF_EVEN)


def apportion(
    amounts: list[Decimal], decimals: int = USD_DECIMALS, *, total: Decimal | None = None
) -> list[Decimal]:
    """Round each amount so that the rounded amounts sum to the rounded sum of the exact amounts.

    This is the largest-remainder method. Every amount is rounded down. Then the amounts with the
    largest remainders get one unit each, until the rounded amounts sum to the rounded total. Of
    equal remainders, the earlier one comes first. Every result differs from its exact amount by
    less than one unit.

    Args:
        decimals: Number of decimals to round to.
        total: The rounded sum, if it is already known. Pass it if the same total is split in
            several ways. A Decimal sum depends on the order of its amounts in the 28th digit, so a
            total half-way between two units could otherwise round differently each time.
    """
    unit = Decimal(1).scaleb(-decimals)
    floors = [_quantize(amount, decimals, ROUND_FLOOR) for amount in amounts]
    if total is None:
        whole = round_amount(sum(amounts, Decimal(0)), decimals)
    else:
        whole = total
    missing = int((whole - sum(floors, Decimal(0))) / unit)
    by_remainder = sorted(
        range(len(amounts)), key=lambda index: (floors[index] - amounts[index], index)
    )
    for index in by_remainder[:missing]:
        floors[index] += unit
    return floors


def usd_decimals(total: Decimal | float) -> int:
    if abs(Decimal(str(total))) >= 10:
        return 2
    return 4


def format_usd(amount: Decimal | float | None, decimals: int | None = None) -> str:
    """Format dollars, such as "$1,234.50"; "n/a" for None, NaN and infinity."""
    if amount is None or not math.isfinite(amount):
        return NONE
    exact = Decimal(str(amount))
    value = round_amount(exact, usd_decimals(exact) if decimals is None else decimals)
    return f"{'-' if value < 0 else ''}${abs(value):,}"


def format_number(value: float | None, digits: int = 4) -> str:
    """Format a number with `digits` decimals and thousands separators; "n/a" for None, NaN and
    infinity.
    """
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:,.{digits}f}"


def format_percent(share: float | None, digits: int = 1) -> str:
    """Format a share from 0 to 1, such as "41.0 %"; "n/a" for None, NaN and infinity."""
    if share is None or not math.isfinite(share):
        return NONE
    return f"{100 * share:.{digits}f} %"


def format_share(share: float | None, whole: str) -> str:
    """Format a share from 0 to 1 with the name of the total that it refers to, such as "41.0 % of
    measured peak".
    """
    text = format_percent(share)
    if text == NONE:
        return text
    return f"{text} of {whole}"


def format_seconds(value: float | None) -> str:
    """Format seconds with two decimals, rounded half to even like the lines of a ledger; "n/a" for
    None and NaN.
    """
    if value is None or not math.isfinite(value):
        return NONE
    return f"{round_amount(Decimal(str(value)), 2):,}"


def format_duration(value: float | None) -> str:
    """Format seconds of wall time as "42.3 s", "3 min 20 s" or "5 h 12 min"."""
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


def _quantize(amount: Decimal, decimals: int, rounding: str) -> Decimal:
    huge = amount.adjusted() >= 20  # has more digits than Decimal's 28, and no decimals that matter
    if huge:
        return amount
    return amount.quantize(Decimal(1).scaleb(-decimals), rounding)
