"""Compare the time that a job's agents metered on an instance with the hours that AWS billed;
explain differences.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from ebbflow.cost.finance.bill import BillLine, normalise_tag
from ebbflow.cost.ledger.bills import NodeBill
from ebbflow.cost.ledger.instances import (
    CLOCKS_APART_SECONDS,
    ESTIMATED_UNTIL_BILLED,
    LONGEST_IDLE_SECONDS,
    MINIMUM_SECONDS,
    group_by_instance,
)
from ebbflow.cost.ledger.pricing import PriceCurve
from ebbflow.cost.ledger.timeline import MICRO

# A node that vanishes loses its newest events: they are stored every 10 s, and heartbeats come
# every second.
LOST_SECONDS = 15.0
# AWS Batch ends an idle instance some minutes after its last job. An instance that runs on for
# longer is a fault.
ENDS_LATER_SECONDS = 600.0
# Largest tolerated difference per hour. It covers clocks, and the time from the last event to the
# instance's end.
HOUR_TOLERANCE_SECONDS = 60.0
_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class PaidPiece:
    """Interval for which the ledger charges the job for one instance, in Unix seconds by the
    agent's clock.

    `usd` is the known total cost of an interval that no agent recorded. If it is None, the cost is
    the price curve integrated over the interval.
    """

    start: float
    end: float
    curve: PriceCurve
    usd: Decimal | None = None

    def usd_between(self, start: float, end: float) -> Decimal:
        low = max(self.start, start)
        high = min(self.end, end)
        if high <= low:
            return Decimal(0)
        if self.usd is not None:
            return self.usd * to_decimal(high - low) / to_decimal(self.end - self.start)
        return self.curve.cost(round(low * MICRO), round(high * MICRO))


@dataclass(kw_only=True)
class MeteredInstance:
    """Use of one instance by a job, according to the job's events."""

    instance_id: str
    # Properties of the machine that the agent recorded, such as its zone and type
    machine: dict[str, Any]
    market: str
    lost_ends: int  # number of nodes on the instance whose end no event records
    # Charged intervals: the time of the nodes, idle pauses and the minimum charge
    pieces: list[PaidPiece]
    offset: float = 0.0  # seconds by which the agent's clock is behind the bill's clock

    @property
    def start(self) -> float:
        return min(piece.start for piece in self.pieces)

    @property
    def end(self) -> float:
        return max(piece.end for piece in self.pieces)

    @property
    def usd(self) -> Decimal:
        return self.usd_between(self.start, self.end)

    @property
    def uptime_seconds(self) -> float | None:
        """Seconds from the instance's boot to the start of the job's first node on it; None if
        unknown.
        """
        known = self.machine.get("uptime_seconds")
        if known is None:
            return None
        return float(known)

    @property
    def was_warm(self) -> bool:
        """Whether another job has probably used the instance before.

        The instance had been up for more than 10 minutes when this job's first node started on it.
        """
        return self.uptime_seconds is not None and self.uptime_seconds > LONGEST_IDLE_SECONDS

    def usd_between(self, start: float, end: float) -> Decimal:
        return sum((piece.usd_between(start, end) for piece in self.pieces), Decimal(0))

    def seconds_between(self, start: float, end: float) -> float:
        """Return the paid seconds from `start` to `end`.

        Time in which several nodes ran counts once.
        """
        total = 0.0
        reached = start
        for piece in sorted(self.pieces, key=lambda piece: piece.start):
            total += max(0.0, min(piece.end, end) - max(piece.start, reached))
            reached = max(reached, piece.end)
        return total

    def price_bounds(self, start: float, end: float) -> tuple[Decimal, Decimal]:
        """Return the lowest and the highest price per hour of the instance between two Unix times."""
        bounds = [piece.curve.bounds(start, end) for piece in self.pieces]
        return min(low for low, _ in bounds), max(high for _, high in bounds)


@dataclass(kw_only=True)
class BilledHour:
    """The bill's lines of one instance for one hour, or one day in a daily report."""

    start: float
    end: float
    seconds: float = 0.0
    usd: Decimal = Decimal(0)
    tags: set[str] = field(default_factory=set)
    # pairs (property, value) that occur in the lines; the property is "zone", "type" or "market"
    seen: set[tuple[str, str]] = field(default_factory=set)
    # for each pair (usage type, line type), the indices of the report files that have such lines
    deliveries: dict[tuple[str, str], set[int]] = field(default_factory=dict)


@dataclass(kw_only=True)
class BilledInstance:
    """Bill of one instance for the hours in which it ran the job."""

    instance_id: str
    # billed hours by (start, end) in Unix seconds
    hours: dict[tuple[float, float], BilledHour] = field(default_factory=dict)
    # dollars billed for the instance in hours of other jobs, which are not in `hours`
    elsewhere_usd: Decimal = Decimal(0)

    @property
    def seconds(self) -> float:
        return sum(hour.seconds for hour in self.hours.values())

    @property
    def usd(self) -> Decimal:
        return sum((hour.usd for hour in self.hours.values()), Decimal(0))

    @property
    def tags(self) -> set[str]:
        return {tag for hour in self.hours.values() for tag in hour.tags}

    @property
    def excess_seconds(self) -> float:
        """Billed seconds that exceed the length of the billed hours; 0 in a correct bill."""
        return sum(max(0.0, hour.seconds - (hour.end - hour.start)) for hour in self.hours.values())

    @property
    def conflicting_uses(self) -> int:
        """Number of usage records that appear in several report files with different content."""
        return sum(
            len(files) > 1 for hour in self.hours.values() for files in hour.deliveries.values()
        )

    def values(self, name: str) -> set[str]:
        """Return the distinct values of a property ("zone", "type" or "market") in the bill."""
        return {
            value
            for hour in self.hours.values()
            for key, value in hour.seen
            if key == name and value
        }

    def add(self, line: BillLine, job_tag: str) -> None:
        hour = self.hours.setdefault(
            (line.start, line.end), BilledHour(start=line.start, end=line.end)
        )
        hour.seconds += line.seconds
        hour.usd += line.usd
        hour.deliveries.setdefault((line.usage_type, line.line_type), set()).add(line.delivery)
        hour.seen |= {("zone", line.zone), ("type", line.instance_type), ("market", line.market)}
        hour.tags |= {line.tags.get(normalise_tag(job_tag), "")} - {""}


@dataclass(frozen=True, kw_only=True)
class HourMatch:
    """Comparison of the billed and the metered time of one instance in one hour."""

    # start, end: Unix seconds by the bill's clock
    start: float
    end: float
    billed: BilledHour
    # own_seconds, own_usd: metered time and dollars of this job in this hour
    own_seconds: float
    own_usd: Decimal
    explained: dict[str, float]  # billed but unmetered seconds with a known cause, by cause
    rest_seconds: float  # billed but unmetered seconds without a known cause

    @property
    def missing_seconds(self) -> float:
        """Seconds that the job's agents metered but AWS did not bill."""
        return max(0.0, self.own_seconds - self.billed.seconds)

    @property
    def name(self) -> str:
        return datetime.fromtimestamp(self.start, UTC).strftime("%Y-%m-%d %H:%M UTC")


def meter_instances(bills: Sequence[NodeBill]) -> dict[str, MeteredInstance]:
    of_node = {id(bill.node): bill for bill in bills}
    found = {}
    for instance_id, nodes in sorted(group_by_instance([bill.node for bill in bills]).items()):
        mine = [of_node[id(node)] for node in nodes]
        pool = mine[0].price.pool
        pieces = []
        for bill in mine:
            start = bill.node.started_wall
            end = bill.node.ended_wall
            pieces.append(PaidPiece(start=start, end=end, curve=bill.curve))
            for extra in bill.extras:  # placed by two clocks, but it cannot overlap the node
                if extra.ledger_class in ESTIMATED_UNTIL_BILLED:
                    continue  # the bill shows it as `boot time` or `ended later`
                if extra.start < start:
                    at = start - extra.seconds
                else:
                    at = max(end, extra.start)
                usd = bill.extra_usd(extra)
                pieces.append(
                    PaidPiece(start=at, end=at + extra.seconds, curve=bill.price.curve, usd=usd)
                )
        found[instance_id] = MeteredInstance(
            instance_id=instance_id,
            machine=nodes[0].machine,
            market=str(nodes[0].machine.get("market") or (pool.market if pool else "")),
            lost_ends=sum(not node.measured for node in nodes),
            pieces=pieces,
        )
    return found


def match_instance(
    metered: MeteredInstance, billed: BilledInstance, others: list[tuple[float, float]], job: str
) -> list[HourMatch]:
    """Compare an instance's billed hours with its metered time.

    Store the clock difference in `metered.offset`.

    The hours in which another job used the instance are first moved from `billed.hours` to
    `billed.elsewhere_usd`.

    Args:
        others: (start, end) in Unix seconds of each use of the instance by another job. The
            function extends this list by the uses that it finds in the bill's tags.
    """
    _set_aside(metered, billed, others, job)
    if not billed.hours:
        return []
    explained = list(_explanations(metered, billed, others))
    hours = _match_hours(metered, billed, explained, 0.0)
    if _residual(hours) > HOUR_TOLERANCE_SECONDS / 2 and not billed.conflicting_uses:
        steps = [
            5.0 * step
            for step in range(-int(CLOCKS_APART_SECONDS // 5), int(CLOCKS_APART_SECONDS // 5) + 1)
        ]
        found_offsets = (
            (_residual(_match_hours(metered, billed, explained, at)), abs(at), at) for at in steps
        )
        residual, _, offset = min(found_offsets)
        if residual <= 0.2 * _residual(hours):
            hours = _match_hours(metered, billed, explained, offset)
            metered.offset = offset
    if any(hour.rest_seconds > HOUR_TOLERANCE_SECONDS for hour in hours):
        # The instance kept running, so it did not end late
        certain = [cause for cause in explained if cause[0] != "ended later"]
        hours = _match_hours(metered, billed, certain, metered.offset)
    return hours


def to_decimal(seconds: float) -> Decimal:
    return Decimal(str(round(seconds, 6)))


def _set_aside(
    metered: MeteredInstance, billed: BilledInstance, others: list[tuple[float, float]], job: str
) -> None:
    """Remove hours in which another job used the instance from `billed.hours`, and add them to
    `billed.elsewhere_usd`.

    An hour is removed if this job did not run in it and there is evidence of another job: the tag
    of another job, an interval in `others`, or a boot of the instance well before this job started
    on it. If a tag shows that another job used the instance after this one, the time between the
    two jobs is added to `others`.
    """
    for (start, end), hour in list(billed.hours.items()):
        if metered.seconds_between(start - CLOCKS_APART_SECONDS, end + CLOCKS_APART_SECONDS):
            continue
        early = end <= metered.start and (metered.was_warm or metered.uptime_seconds is None)
        theirs = bool(hour.tags) and job not in hour.tags
        used = sum(max(0.0, min(b, end) - max(a, start)) for a, b in others)
        # The other job kept it running, also before the tag changed
        if theirs and start >= metered.end:
            others.append((metered.end, start))
        if early or theirs or (used and used + HOUR_TOLERANCE_SECONDS >= hour.seconds):
            billed.elsewhere_usd += hour.usd
            del billed.hours[start, end]


def _explanations(
    metered: MeteredInstance, billed: BilledInstance, others: list[tuple[float, float]]
) -> Iterator[tuple[str, float, float]]:
    """Yield (cause, start, end) for each interval that AWS may bill although no agent metered it.

    Such an interval is, for example, the boot of the instance or its use by another job.
    """
    uptime = metered.uptime_seconds or 0.0
    end = metered.end
    yield (
        ("warm instance" if metered.was_warm else "boot time"),
        metered.start - uptime,
        metered.start,
    )
    yield from (("another job", *interval) for interval in others)
    # The uptime was not recorded, so the ledger may have missed a minimum charge
    if billed.seconds <= MINIMUM_SECONDS:
        seconds = metered.seconds_between(metered.start, end)
        yield "minimum charge", end, end + max(0.0, MINIMUM_SECONDS - seconds - uptime)
    lost = metered.lost_ends * LOST_SECONDS
    yield "end not recorded", end, end + lost
    yield "ended later", end + lost, end + ENDS_LATER_SECONDS


def _match_hours(
    metered: MeteredInstance,
    billed: BilledInstance,
    explained: list[tuple[str, float, float]],
    offset: float,
) -> list[HourMatch]:
    """Compare billed and metered time hour by hour, after adding `offset` seconds to the agent's
    times.
    """
    spans = set(billed.hours)
    for number in range(
        math.floor((metered.start + offset) / _HOUR), math.ceil((metered.end + offset) / _HOUR)
    ):
        start = number * _HOUR
        end = (number + 1) * _HOUR
        if not any(first < end and last > start for first, last in billed.hours):
            spans.add((start, end))
    found = []
    for start, end in sorted(spans):
        low = start - offset
        high = end - offset
        hour = billed.hours.get((start, end)) or BilledHour(start=start, end=end)
        own = metered.seconds_between(low, high)
        rest = max(0.0, hour.seconds - own)
        taken = {}
        for cause, first, last in explained:
            seconds = min(rest, min(last, high) - max(first, low))
            if seconds > 0:
                taken[cause] = taken.get(cause, 0.0) + seconds
                rest -= seconds
        found.append(
            HourMatch(
                start=start,
                end=end,
                billed=hour,
                own_seconds=own,
                own_usd=metered.usd_between(low, high),
                explained=taken,
                rest_seconds=rest,
            )
        )
    return found


def _residual(hours: Iterable[HourMatch]) -> float:
    return sum(hour.rest_seconds + hour.missing_seconds for hour in hours)
