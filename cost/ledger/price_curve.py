"""A price that changes while it is being paid: exact integrals over wall time, in Decimal."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

_MICRO = 1_000_000
_MICROS_PER_HOUR = Decimal(3600 * _MICRO)


@dataclass(frozen=True)
class PriceCurve:
    """Dollars per hour of one node. first: until the first change; changes: (Unix microseconds since when, dollars)."""

    first: Decimal
    changes: tuple[tuple[int, Decimal], ...] = ()

    @classmethod
    def of(cls, first: Decimal, changes: Iterable[tuple[float, Decimal]] = ()) -> PriceCurve:
        """changes: (Unix time, dollars per hour) in any order; of several at one moment the last one given holds."""
        ordered = sorted(((round(at * _MICRO), usd) for at, usd in changes), key=lambda change: change[0])
        kept: list[tuple[int, Decimal]] = []
        for at, usd in ordered:
            if kept and kept[-1][0] == at:
                kept.pop()
            kept.append((at, usd))
        return cls(first, tuple(kept))

    def at(self, unix_time: float) -> Decimal:
        """The price that holds at a moment; a change holds from its own moment on."""
        index = bisect_right(self.changes, round(unix_time * _MICRO), key=lambda change: change[0])
        return self.changes[index - 1][1] if index else self.first

    def usd(self, start: int, end: int) -> Decimal:
        """What one node costs from `start` to `end`, Unix microseconds: ∫ price dt, billed by the microsecond."""
        if end <= start:
            return Decimal(0)
        total, at, price = Decimal(0), start, self.first
        for moment, usd in self.changes:
            if moment >= end:
                break
            if moment > at:
                total += price * (moment - at)
                at = moment
            price = usd
        return (total + price * (end - at)) / _MICROS_PER_HOUR

    def bounds(self, start: float, end: float) -> tuple[Decimal, Decimal]:
        """(lowest, highest) price that holds at any moment from `start` to `end`, Unix seconds."""
        held = [self.at(start), *(usd for at, usd in self.changes if start * _MICRO < at < end * _MICRO)]
        return min(held), max(held)

    def constant(self, start: int, end: int) -> bool:
        """Whether one price holds from `start` to `end`, Unix microseconds."""
        inside = {usd for at, usd in self.changes if start < at < end}
        return inside <= {self.at(start / _MICRO)}
