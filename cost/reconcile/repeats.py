"""Lines that come twice: a report is delivered again and again, and two of its deliveries may be given together.

A line's id is its own in one partition of one delivery, and another in the next delivery (identity/LineItemId in
https://docs.aws.amazon.com/cur/latest/userguide/identity-columns.html). So a line is the same again if it has the id,
time, resource and use of one before, or if another file had one that is alike in all that is read of it: as often as
one file has such a line it is meant.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from cost.errors import BillError
from cost.reconcile.bill import BillLine


class Repeats:
    """Remembers the lines that it is asked about: to be asked of one job's alone, since a bill may have millions."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[str, ...], tuple[Decimal, Decimal]] = {}
        self._alike: dict[tuple[Any, ...], dict[int, int]] = {}

    def again(self, line: BillLine) -> bool:
        """Whether the line was given before. Raises BillError where it was, with another amount or other dollars."""
        use = (line.resource_id, line.usage_type, line.line_type, line.start, line.end)
        name = (line.line_id, *map(str, use))
        if line.line_id and name in self._by_id:
            amount, usd = self._by_id[name]
            if (amount, usd) != (line.amount, line.usd):
                raise BillError(
                    f"{line.where}: this line was given before as {amount} for ${usd}, and is {line.amount} for "
                    f"${line.usd} here: two deliveries of one report that differ; fix: give the newest one alone"
                )
            return True
        self._by_id[name] = line.amount, line.usd
        times = self._alike.setdefault((*use, line.amount, line.usd), {})
        times[line.delivery] = times.get(line.delivery, 0) + 1
        return times[line.delivery] <= max((n for file, n in times.items() if file != line.delivery), default=0)
