"""Compare a job with Cost Explorer's CSV of daily costs.

Cost Explorer's console exports one column per group (service, usage type, instance type or value of
a tag) and one row per day:

    "Usage type","USE1-SpotUsage:g5.xlarge($)","Total costs($)"
    "Usage type total","12.3","12.3"
    "2026-11-20","4.1","4.1"

It has no resources, so that it cannot tell the job's instances from those of others. It can only
show a day whose bill is smaller than the job's metered dollars or, if it is grouped by the job's
tag, a day whose bill is too large.
"""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

from ebbflow.core.events import Event
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.amounts import format_usd, read_decimal
from ebbflow.cost.errors import BillError
from ebbflow.cost.ledger.instances import ESTIMATED_UNTIL_BILLED
from ebbflow.cost.ledger.ledger import Ledger, fold
from ebbflow.cost.ledger.pricing import PriceCurve
from ebbflow.cost.ledger.timeline import MICRO

_DAY_MICROS = 86_400 * MICRO
_USAGE = re.compile(r"(?:^|-)(BoxUsage|SpotUsage):(.+)$")
_INSTANCE_TYPE = re.compile(r"^[a-z][a-z0-9-]*\.[a-z0-9-]+$")
# Cost Explorer's names of EC2 instances, as a service.
_EC2 = frozenset({"EC2-Instances", "Amazon Elastic Compute Cloud - Compute"})
_TOTAL = "Total costs"
# Cost Explorer rounds, and boot and idle time are only on the bill.
_AGREED_SHARE = Decimal("0.01")
_AGREED_USD = Decimal("0.01")
# Most time that AWS bills for an instance beside the metered time: boot and idle tail, as in
# `bill_matching`.
_UNMETERED_SECONDS = 1200


@dataclass(frozen=True, kw_only=True)
class DailyCosts:
    """Daily costs from a Cost Explorer CSV: the dollars of each group on each UTC day."""

    path: Path
    grouped_by: str  # such as "Usage type"
    groups: list[str]
    usd: dict[date, dict[str, Decimal]]  # by group

    def covers(self, day: date) -> bool:
        """Whether the day is from the first to the last day of the file."""
        return bool(self.usd) and min(self.usd) <= day <= max(self.usd)


@dataclass(frozen=True, kw_only=True)
class DayComparison:
    """The metered and the billed dollars of one day."""

    day: date
    metered_usd: Decimal
    billed_usd: Decimal | None  # None: the file does not cover the day
    most_usd: Decimal | None  # more than this is not the job's; None: others are on the bill too

    @property
    def fault(self) -> str | None:
        """Description of what is wrong with the day; None if nothing is."""
        if self.billed_usd is None:
            return None
        least = self.metered_usd * (1 - _AGREED_SHARE) - _AGREED_USD
        if self.billed_usd < least:
            return "less was billed than the job metered"
        if self.most_usd is not None and self.billed_usd > self.most_usd:
            return "more was billed under the job's tag than its instances, volumes, boot and idle time"
        return None


def is_daily_costs(path: Path) -> bool:
    """Return whether a file is Cost Explorer's CSV: its second row is a total."""
    if path.suffix != ".csv":
        return False
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            head = next(reader, [])
            total = next(reader, [])
    except (OSError, ValueError, csv.Error):
        return False  # the reader of bills reports it
    return bool(head and total) and total[0].strip().lower() == f"{head[0].strip().lower()} total"


def read_daily_costs(path: Path) -> DailyCosts:
    """Read Cost Explorer's CSV. Raises BillError with file, line and column."""
    usd: dict[date, dict[str, Decimal]] = {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        head = next(reader)
        groups = [name.strip() for name in head[1:]]
        other = next((name for name in groups if not name.endswith("($)")), None)
        if other is not None:
            raise BillError(
                f"{path}:1: column {other!r} is not in dollars, such as 'EC2-Instances($)'; fix: "
                "export costs, not usage"
            )
        names = [name.removesuffix("($)") for name in groups]
        next(reader)
        for row in reader:
            if not row:
                continue
            try:
                day = date.fromisoformat(row[0].strip())
                cells = [read_decimal(cell.strip() or "0") for cell in row[1:]]
            except ValueError as error:
                raise BillError(
                    f"{path}:{reader.line_num}: {error}; a row is a day and its dollars; fix: "
                    "export with daily granularity"
                ) from None
            usd[day] = dict(zip(names, cells, strict=False))
    return DailyCosts(path=path, grouped_by=head[0].strip(), groups=names, usd=usd)


def compare_days(
    events: Sequence[Event], costs: DailyCosts, *, job_tag: str
) -> list[DayComparison]:
    """Compare the metered and the billed dollars of each day on which the job was metered.

    Only those groups of the bill count that can hold the job's instances.

    Raises:
        BillError: No group can hold the job's instances, or the file covers none of the job's days.
        LedgerError: The events contradict each other.
    """
    ledger = fold(events)
    metered = _metered_by_day(ledger)
    if events:
        job = events[0].job
    else:
        job = ""
    mine = _groups_of(ledger, costs, job, job_tag)
    tagged = bool(mine) and all(name.endswith(f"${job}") for name in mine)
    instances = len({bill.node.instance_id for bill in ledger.nodes})
    rates = [bill.price.node_curve.first for bill in ledger.nodes]
    extra = max(rates, default=Decimal(0)) * instances * _UNMETERED_SECONDS / 3600
    volumes = _volumes_by_day(ledger)  # the tag may be on the volumes too
    found = []
    for day, usd in sorted(metered.items()):
        row = costs.usd.get(day, {})
        billed = None
        if costs.covers(day):
            billed = sum((row.get(name, Decimal(0)) for name in mine), Decimal(0))
        most = usd * (1 + _AGREED_SHARE) + volumes.get(day, Decimal(0)) + extra + _AGREED_USD
        found.append(
            DayComparison(
                day=day,
                metered_usd=usd,
                billed_usd=billed,
                most_usd=most if tagged else None,
            )
        )
    if found and all(day.billed_usd is None for day in found):
        raise BillError(
            f"{costs.path}: covers {_describe_period(costs)}, and the job was metered from "
            f"{found[0].day} to {found[-1].day}; fix: export these days"
        )
    return found


def render_days(job: str, costs: DailyCosts, days: Sequence[DayComparison]) -> str:
    lines = [
        f"job {one_line(job)} beside Cost Explorer by {one_line(costs.grouped_by)}, days in UTC"
    ]
    for day in days:
        if day.billed_usd is None:
            billed = f"not in the export, which covers {_describe_period(costs)}"
        else:
            billed = f"billed {format_usd(day.billed_usd, 2)}"
        words = f"{day.day}  metered {format_usd(day.metered_usd, 2)}  {billed}"
        if day.fault is None:
            lines.append(f"  · {words}")
        else:
            lines.append(f"  ! {words}: {day.fault}")
    if any(day.most_usd is None for day in days):
        lines.append(
            "  · Cost Explorer has no resources: what exceeds the metered dollars may be anyone's; "
            "a Cost and Usage Report with resource ids tells"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class _PaidSpan:
    """Paid time of one node or of its instance, with the prices that apply to it."""

    start: int  # Unix microseconds
    end: int
    machine: PriceCurve
    volume: PriceCurve  # of the root volume
    is_metered: bool  # False if the time is estimated until the bill shows it


def _describe_period(costs: DailyCosts) -> str:
    if not costs.usd:
        return "no day"
    return f"{min(costs.usd)} to {max(costs.usd)}"


def _groups_of(ledger: Ledger, costs: DailyCosts, job: str, job_tag: str) -> list[str]:
    """Return the names of the bill's groups that can hold the job's instances."""
    known = costs.groups
    kinds = set()
    for bill in ledger.nodes:
        pool = bill.price.pool
        kind = bill.node.machine.get("instance_type") or (pool.instance_type if pool else "")
        market = bill.node.machine.get("market") or (pool.market if pool else "")
        kinds.add((str(kind), str(market)))
    kinds |= {
        (bill.price.pool.instance_type, bill.price.pool.market)
        for bill in ledger.unreported
        if bill.price.pool
    }
    types = {kind for kind, _ in kinds}
    uses = {(kind, "SpotUsage" if market == "spot" else "BoxUsage") for kind, market in kinds}
    tagged = [name for name in known if job and name == f"{job_tag}${job}"]
    if tagged:
        return tagged
    found = []
    for name in known:
        usage = _USAGE.search(name)
        if usage is not None:
            holds = (usage.group(2), usage.group(1)) in uses
        elif _INSTANCE_TYPE.match(name):
            holds = name in types
        else:
            holds = name in _EC2
        if holds:
            found.append(name)
    if found:
        return found
    if known == [_TOTAL]:
        return known
    wanted = ", ".join(sorted(f"{use}:{kind}" for kind, use in uses))
    raise BillError(
        f"{costs.path}: none of its {len(known)} groups by {costs.grouped_by} can hold the job's "
        f"instances ({wanted}); fix: group by usage type, instance type, service or the tag "
        f"{job_tag}"
    )


def _metered_by_day(ledger: Ledger) -> dict[date, Decimal]:
    """Return the metered dollars of machines by day in UTC."""
    days: dict[date, Decimal] = {}
    for span in _list_paid_spans(ledger):
        if span.is_metered:
            _add_days(days, span.start, span.end, span.machine.cost)
    return days


def _volumes_by_day(ledger: Ledger) -> dict[date, Decimal]:
    """Return the estimated dollars of root volumes by day in UTC."""
    days: dict[date, Decimal] = {}
    for span in _list_paid_spans(ledger):
        _add_days(days, span.start, span.end, span.volume.cost)
    return days


def _list_paid_spans(ledger: Ledger) -> Iterator[_PaidSpan]:
    for bill in ledger.nodes:
        start = round(bill.node.started_wall * MICRO)
        end = start + bill.node.paid_micros
        yield _PaidSpan(start, end, bill.curve, bill.volume_curve, is_metered=True)
        for extra in bill.extras:
            start = round(extra.start * MICRO)
            yield _PaidSpan(
                start,
                start + extra.micros,
                bill.price.curve,
                bill.price.volume_curve,
                is_metered=extra.ledger_class not in ESTIMATED_UNTIL_BILLED,
            )
    for lost in ledger.unreported:
        stay = lost.job.stay(lost.node)
        start = round(stay.started * MICRO)
        yield _PaidSpan(
            start,
            start + stay.micros,
            lost.price.curve,
            lost.price.volume_curve,
            is_metered=True,
        )


def _add_days(
    days: dict[date, Decimal], start: int, end: int, cost: Callable[[int, int], Decimal]
) -> None:
    """Add the dollars of an interval (Unix microseconds) to each of its days."""
    at = start
    while at < end:
        until = min(end, (at // _DAY_MICROS + 1) * _DAY_MICROS)
        day = datetime.fromtimestamp(at / MICRO, UTC).date()
        days[day] = days.get(day, Decimal(0)) + cost(at, until)
        at = until
