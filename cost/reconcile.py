"""Compare a job's metered instances with the provider's bill, and explain each difference in dollars."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from ebbflow.cost.amounts import format_percent, format_usd
from ebbflow.cost.bill import BillLine, RepeatFilter, normalise_tag, read_bill
from ebbflow.cost.jobs import read_job
from ebbflow.cost.ledger.bills import NodeBill, covered_seconds
from ebbflow.cost.ledger.instances import LONGEST_IDLE_SECONDS, MINIMUM_SECONDS, group_by_instance
from ebbflow.cost.ledger.ledger import fold
from ebbflow.cost.ledger.pricing import SIMULATED
from ebbflow.infra.events import PLAN, Event
from ebbflow.infra.untrusted_text import one_line

JOB_TAG = "ebbflow-job"
UNEXPLAINED = "unexplained"
# Ledger and bill agree if at most this share of the bill is unexplained.
AGREED_SHARE = Decimal("0.01")
# A node that vanishes loses its newest events: they are stored every 10 s, and heartbeats come every second.
LOST_SECONDS = 15.0
SCHEMA = 1
_HOUR = 3600.0
_WIDTH = 100


@dataclass(kw_only=True)
class MeteredInstance:
    """One instance, as the job's events record it.

    Attributes:
        machine: Facts that the agent recorded about the machine.
        start, end: Unix time of the start of its first node and the end of its last one.
        seconds: Paid seconds of its nodes, with pauses and minimum charge. Time in which several nodes overlap counts
            once.
        usd: Dollars for these seconds.
        lost_ends: Number of nodes whose end was not recorded.
        usd_per_hour: The lowest and the highest recorded price from the instance's boot to its end.
    """

    instance_id: str
    machine: dict[str, Any]
    market: str
    start: float
    end: float
    seconds: float
    usd: Decimal
    lost_ends: int
    usd_per_hour: tuple[Decimal, Decimal]

    @property
    def boot_seconds(self) -> float:
        """Seconds from the boot of the instance to the start of this job's first node on it.

        The value is at most `LONGEST_IDLE_SECONDS`: an instance that ran for longer is assumed to have served another
        job before.
        """
        return _boot_seconds(self.machine)


@dataclass(kw_only=True)
class BilledInstance:
    """One instance, as the bill has it: sums of its lines for the hours in which it ran the job.

    Attributes:
        elsewhere_usd: Dollars of its lines for other hours, which are not in `usd`.
        spans: Billed seconds by (start, end) of the hour, Unix time.
        deliveries: Indices of the files with lines for a use in an hour, by (start, end, usage type, line type).
    """

    instance_id: str
    seconds: float = 0.0
    usd: Decimal = Decimal(0)
    zones: set[str] = field(default_factory=set)
    instance_types: set[str] = field(default_factory=set)
    markets: set[str] = field(default_factory=set)
    tags: set[str] = field(default_factory=set)
    elsewhere_usd: Decimal = Decimal(0)
    spans: dict[tuple[float, float], float] = field(default_factory=dict)
    deliveries: dict[tuple[float, float, str, str], set[int]] = field(default_factory=dict)

    @property
    def excess_seconds(self) -> float:
        """Seconds by which the billed time exceeds the length of its hours; 0 in a correct bill."""
        return sum(max(0.0, seconds - (end - start)) for (start, end), seconds in self.spans.items())

    @property
    def conflicting_uses(self) -> int:
        """Number of entries of `deliveries` that name several files.

        Repeated lines are left out before, so the lines of these files differ.
        """
        return sum(len(files) > 1 for files in self.deliveries.values())

    def add(self, line: BillLine, job_tag: str) -> None:
        self.seconds += line.seconds
        self.deliveries.setdefault((line.start, line.end, line.usage_type, line.line_type), set()).add(line.delivery)
        self.spans[line.start, line.end] = self.spans.get((line.start, line.end), 0.0) + line.seconds
        self.usd += line.usd
        self.zones |= {line.zone} - {""}
        self.instance_types |= {line.instance_type} - {""}
        self.markets |= {line.market} - {""}
        self.tags |= {line.tags.get(normalise_tag(job_tag), "")} - {""}


@dataclass(frozen=True, kw_only=True)
class GapPart:
    """One part of an instance's gap (billed less metered dollars), and its explanation in words.

    `cause` is "price", "boot time", "minimum charge", "end not recorded", "unexplained" or "other" with a property of
    the instance, such as "other zone".
    """

    cause: str
    instance_id: str
    usd: Decimal
    words: str


@dataclass(frozen=True, kw_only=True)
class BillingFinding:
    """One fault, such as an orphan instance, a wrong zone or a missing tag, with the dollars of the instance."""

    kind: str
    resource: str
    usd: Decimal
    words: str


@dataclass(kw_only=True)
class Reconciliation:
    """Comparison of a job's forecast, ledger and bill. Its parts sum exactly to the gap (billed less metered dollars).

    Attributes:
        metered, billed: The job's instances in the events, and those of them in the bill, by instance id.
        simulated: Whether the job's prices were assumed, so that no provider billed them.
        synthetic: Whether the bill marks itself as generated.
        orphans: Instances with the job's tag that are in none of its events.
        unknown: Nodes whose instance was not recorded.
        shared: Instances that several nodes of the job used at once.
        other_usd: Dollars of tagged lines by kind: storage, transfer, other.
        covers_until: Unix time of the end of the bill's newest line.
        repeated_lines: Number of lines that another delivery of the same report repeats. They count once.
    """

    job: str
    job_tag: str
    forecast_usd: float | None
    metered_usd: Decimal
    simulated: bool
    metered: dict[str, MeteredInstance]
    unknown: list[NodeBill]
    shared: list[str]
    synthetic: bool = False
    billed: dict[str, BilledInstance] = field(default_factory=dict)
    orphans: dict[str, BilledInstance] = field(default_factory=dict)
    other_usd: dict[str, Decimal] = field(default_factory=dict)
    covers_until: float = -math.inf
    repeated_lines: int = 0
    parts: tuple[GapPart, ...] = ()
    findings: tuple[BillingFinding, ...] = ()

    @property
    def billed_usd(self) -> Decimal:
        """Dollars billed for the instances in the events, for the hours in which they ran the job."""
        return sum((billed.usd for billed in self.billed.values()), Decimal(0))

    @property
    def joined_usd(self) -> Decimal:
        """Dollars metered on instances with a known id. Only these can be compared with a bill."""
        return sum((metered.usd for metered in self.metered.values()), Decimal(0))

    @property
    def gap_usd(self) -> Decimal:
        return self.billed_usd - self.joined_usd

    @property
    def unexplained_share(self) -> float | None:
        """Unexplained share of the billed dollars; None if nothing was billed.

        The unexplained amount of each instance counts by its absolute value, so that positive and negative ones do not
        cancel.
        """
        if not self.billed_usd:
            return None
        apart = sum((abs(part.usd) for part in self.parts if part.cause == UNEXPLAINED), Decimal(0))
        return float(apart / self.billed_usd)

    @property
    def agrees(self) -> bool:
        share = self.unexplained_share
        return share is not None and Decimal(share) <= AGREED_SHARE and not self.findings and not self.unknown

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values. Dollars are decimal strings, which are exact."""
        unexplained = sum((part.usd for part in self.parts if part.cause == UNEXPLAINED), Decimal(0))
        return {
            "schema": SCHEMA,
            "job": self.job,
            "bill": "synthetic bill" if self.synthetic else "bill",
            "forecast_usd": self.forecast_usd,
            "metered_usd": str(self.metered_usd),
            "joined_usd": str(self.joined_usd),
            "billed_usd": str(self.billed_usd),
            "gap_usd": str(self.gap_usd),
            "unexplained_usd": str(unexplained),
            "unexplained_share": self.unexplained_share,
            "agrees": self.agrees,
            "parts": [{**vars(part), "usd": str(part.usd)} for part in self.parts],
            "findings": [{**vars(finding), "usd": str(finding.usd)} for finding in self.findings],
            "repeated_lines": self.repeated_lines,
            "other_usd": {kind: str(usd) for kind, usd in sorted(self.other_usd.items())},
        }


def reconcile(events: Sequence[Event], lines: Iterable[BillLine], *, job_tag: str = JOB_TAG) -> Reconciliation:
    """Compare a job's events with a bill, and split the gap (billed less metered dollars) of each instance by cause.

    Lines of the bill are matched with the job by instance id and hour, because the tags of a Batch job are not copied
    to its EC2 instances. The gap is split first by price, then by time. An amount without evidence for its cause is
    unexplained.

    Args:
        lines: The lines of a whole account's report. They are read once and not kept in memory.

    Raises:
        LedgerError: The events contradict each other.
        BillError: Two deliveries of the report contradict each other.
    """
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    ledger = fold(ordered)
    plan = next((event.data for event in ordered if event.name == PLAN and event.data.get("chosen")), None)
    shared = {bill.node.instance_id for bill in ledger.nodes if any(number > 1 for _, number in bill.sharers)}
    found = Reconciliation(
        job=ordered[0].job if ordered else "",
        job_tag=job_tag,
        forecast_usd=None if plan is None else plan["chosen"].get("compute_usd", plan["chosen"].get("expected_usd")),
        metered_usd=ledger.total_usd,
        simulated=ledger.price_kind == SIMULATED,
        metered=_meter_instances(ledger.nodes),
        unknown=[bill for bill in ledger.nodes if not bill.node.instance_id],
        shared=sorted(instance_id for instance_id in shared if instance_id),
    )
    repeats = RepeatFilter()
    for line in lines:
        _add_line(found, line, repeats)
    found.parts = tuple(part for metered in found.metered.values() for part in _split_gap(found, metered) if part.usd)
    found.findings = tuple(_find_faults(found))
    return found


def _add_line(found: Reconciliation, line: BillLine, repeats: RepeatFilter) -> None:
    found.synthetic |= line.synthetic
    found.covers_until = max(found.covers_until, line.end)
    tagged = line.tags.get(normalise_tag(found.job_tag)) == found.job
    metered = found.metered.get(line.resource_id)
    if not tagged and metered is None:
        return
    if repeats.is_repeat(line):
        found.repeated_lines += 1
    elif line.kind != "instance":
        if tagged:
            found.other_usd[line.kind] = found.other_usd.get(line.kind, Decimal(0)) + line.usd
    elif metered is not None:
        billed = found.billed.setdefault(line.resource_id, BilledInstance(instance_id=line.resource_id))
        # The hours from boot to one hour after the job's end count: an instance ends some time after its work.
        born = metered.start - metered.boot_seconds
        if line.end > born and line.start < (math.floor(metered.end / _HOUR) + 2) * _HOUR:
            billed.add(line, found.job_tag)
        else:
            billed.elsewhere_usd += line.usd
    else:
        orphan = found.orphans.setdefault(line.resource_id, BilledInstance(instance_id=line.resource_id))
        orphan.add(line, found.job_tag)


def _meter_instances(bills: Sequence[NodeBill]) -> dict[str, MeteredInstance]:
    of_node = {id(bill.node): bill for bill in bills}
    found = {}
    for instance_id, nodes in sorted(group_by_instance([bill.node for bill in bills]).items()):
        mine = [of_node[id(node)] for node in nodes]
        pool = mine[0].price.pool
        start, end = nodes[0].started_wall, max(node.ended_wall for node in nodes)
        bounds = [bill.price.curve.bounds(start - _boot_seconds(nodes[0].machine), end) for bill in mine]
        found[instance_id] = MeteredInstance(
            instance_id=instance_id,
            machine=nodes[0].machine,
            market=str(nodes[0].machine.get("market") or (pool.market if pool else "")),
            start=start,
            end=end,
            seconds=covered_seconds(nodes) + sum(extra.seconds for bill in mine for extra in bill.extras),
            usd=sum((bill.usd for bill in mine), Decimal(0)),
            lost_ends=sum(not node.measured for node in nodes),
            usd_per_hour=(min(low for low, _ in bounds), max(high for _, high in bounds)),
        )
    return found


def _boot_seconds(machine: dict[str, Any]) -> float:
    return min(float(machine.get("uptime_seconds") or 0.0), LONGEST_IDLE_SECONDS)


def _split_gap(found: Reconciliation, metered: MeteredInstance) -> Iterator[GapPart]:
    """Yield the parts of one instance's gap.

    The common seconds are the smaller of metered and billed seconds. The gap is then (billed price − metered price) ×
    common seconds + the other seconds × their price.
    """

    def part(cause: str, usd: Decimal, words: str) -> GapPart:
        return GapPart(cause=cause, instance_id=metered.instance_id, usd=usd, words=words)

    billed = found.billed.get(metered.instance_id)
    if billed is None or not billed.seconds:
        yield part(UNEXPLAINED, -metered.usd, "metered and not billed")
        return
    rate = billed.usd / _decimal(billed.seconds)
    own_rate = metered.usd / _decimal(metered.seconds) if metered.seconds else rate
    common = min(metered.seconds, billed.seconds)
    contradiction = next((kind for kind, _ in _find_contradictions(metered, billed)), None)
    cause = "price" if contradiction is None else f"other {contradiction}"
    words = f"{common:,.0f} s billed at ${rate * 3600:.6f}/h, metered at ${own_rate * 3600:.6f}/h"
    yield part(cause, (rate - own_rate) * _decimal(common), words)
    beyond = billed.seconds - metered.seconds
    if beyond < 0:
        yield part(UNEXPLAINED, own_rate * _decimal(beyond), f"{-beyond:,.0f} s metered and not billed")
        return
    boot = min(beyond, metered.boot_seconds)
    yield part("boot time", rate * _decimal(boot), f"{boot:,.0f} s from the instance's boot to the first agent")
    beyond -= boot
    # If the uptime was not recorded, the ledger may have missed a minimum charge.
    short = billed.seconds <= MINIMUM_SECONDS
    least = min(beyond, max(0.0, MINIMUM_SECONDS - metered.seconds - boot)) if short else 0.0
    yield part("minimum charge", rate * _decimal(least), f"{least:,.0f} s to fill the minimum of one minute")
    beyond -= least
    lost = min(beyond, metered.lost_ends * LOST_SECONDS)
    yield part("end not recorded", rate * _decimal(lost), f"{lost:,.0f} s after the last event of a lost node")
    rest = beyond - lost
    yield part(UNEXPLAINED, rate * _decimal(rest), f"{rest:,.0f} s billed while no agent of the job was there")


def _find_contradictions(metered: MeteredInstance, billed: BilledInstance) -> Iterator[tuple[str, str]]:
    """Yield (property, explanation) for each property of the instance that differs between bill and events.

    The properties are "zone", "type" and "market".
    """
    machine = metered.machine
    for kind, known, in_bill in (
        ("zone", machine.get("zone"), billed.zones),
        ("type", machine.get("instance_type"), billed.instance_types),
        ("market", metered.market, billed.markets),
    ):
        if known and in_bill and known not in in_bill:
            yield kind, f"billed in {', '.join(sorted(in_bill))}, the events have {known}"


def _find_faults(found: Reconciliation) -> Iterator[BillingFinding]:
    def fault(kind: str, instance: MeteredInstance | BilledInstance, words: str) -> BillingFinding:
        return BillingFinding(kind=kind, resource=instance.instance_id, usd=instance.usd, words=words)

    for _, orphan in sorted(found.orphans.items()):
        words = f"has the tag {found.job_tag}={found.job}, and is in no event of the job: is it still running?"
        yield fault("orphan instance", orphan, words)
    for instance_id, metered in found.metered.items():
        billed = found.billed.get(instance_id)
        if billed is None or not billed.seconds:
            early = found.covers_until < metered.end
            why = "the bill ends before it did: try a later report"
            yield fault("not billed", metered, why if early else "not in this bill: another account's, or daily?")
            continue
        contradictions = [
            fault(f"wrong {kind}", billed, words) for kind, words in _find_contradictions(metered, billed)
        ]
        yield from contradictions
        # A simulated run has assumed prices, which need not agree with the bill.
        if not contradictions and not found.simulated and (words := _check_price(metered, billed)):
            yield fault("wrong price", billed, words)
        # Line ids differ between deliveries, so a correction shows only as conflicting lines or as excess seconds.
        reasons = []
        if billed.conflicting_uses:
            reasons.append(f"{billed.conflicting_uses} of its hours are in two files that differ")
        if billed.excess_seconds > 1.0:
            reasons.append(f"{billed.excess_seconds:,.0f} s billed beyond the length of their hours")
        if reasons:
            words = f"{', '.join(reasons)}: two deliveries together? fix: pass only the newest one"
            yield fault("billed twice", billed, words)
        if found.job not in billed.tags:
            value = f"the value {', '.join(sorted(billed.tags))}" if billed.tags else "no value"
            yield fault("missed tag", billed, f"its tag {found.job_tag} has {value}: cost allocation by tag misses it")


def _check_price(metered: MeteredInstance, billed: BilledInstance) -> str | None:
    """Return an explanation if the billed dollars do not match the recorded prices of the instance, else None."""
    beyond = _decimal(billed.seconds - metered.seconds) / 3600
    low, high = sorted(metered.usd + beyond * usd for usd in metered.usd_per_hour)
    if max(low - billed.usd, billed.usd - high) <= AGREED_SHARE * billed.usd:
        return None
    expected = f"${low:.4f}" + (f" to ${high:.4f}" if high > low else "")
    return f"${billed.usd:.4f} billed for {billed.seconds:,.0f} s; at the prices on record it would be {expected}"


def _decimal(seconds: float) -> Decimal:
    return Decimal(str(round(seconds, 6)))


def render(found: Reconciliation) -> str:
    return "\n".join(piece for line in _render_lines(found) for piece in _wrap(line))


def _render_lines(found: Reconciliation) -> Iterator[str]:
    decimals = 2 if max(found.billed_usd, found.metered_usd) >= 10 else 4

    def dollars(amount: Decimal | float | None) -> str:
        return format_usd(amount, decimals)

    yield f"reconciliation of job {one_line(found.job)} with the {'synthetic bill' if found.synthetic else 'bill'}"
    yield f"  forecast  {dollars(found.forecast_usd)}  (estimated by the plan)"
    simulated = ", SIMULATED: the job was priced as if, and no provider billed it" if found.simulated else ""
    yield f"  metered   {dollars(found.metered_usd)}  (from the job's events{simulated})"
    if found.unknown:
        unjoined = dollars(found.metered_usd - found.joined_usd)
        yield f"    of it {unjoined} on {len(found.unknown)} nodes whose instance is unknown"
    joined = f"{len(found.billed)} of {len(found.metered)} instances found"
    yield f"  billed    {dollars(found.billed_usd)}  ({joined})"
    yield f"  gap       {dollars(found.gap_usd)}  billed less metered on joined instances, of which"
    amounts: dict[str, list[Decimal]] = {}
    for part in found.parts:
        amounts.setdefault(part.cause, []).append(part.usd)
    for cause, parts in sorted(amounts.items()):
        instances = f"{len(parts)} instance{'s' if len(parts) > 1 else ''}"
        yield f"    {cause:<18} {dollars(sum(parts, Decimal(0))):>12}  ({instances})"
    share = found.unexplained_share
    if share is not None:
        limit = (
            f"{'within' if Decimal(share) <= AGREED_SHARE else 'more than'} {format_percent(float(AGREED_SHARE), 0)}"
        )
        yield f"  unexplained: {format_percent(share, 2)} of the bill, {limit}"
    for part in found.parts:
        yield f"  · {part.instance_id}: {part.cause} {dollars(part.usd)}: {part.words}"
    for finding in found.findings:
        yield f"  ! {finding.kind}: {one_line(finding.resource)} ({dollars(finding.usd)}): {one_line(finding.words)}"
    for instance_id, billed in sorted(found.billed.items()):
        if billed.elsewhere_usd:
            yield f"  · {instance_id}: {dollars(billed.elsewhere_usd)} more at other times, not for this job"
    for instance_id in found.shared:
        yield f"  · {instance_id}: nodes of the job ran on it at once and divided its price"
    if found.repeated_lines:
        lines = f"{found.repeated_lines} lines were" if found.repeated_lines > 1 else "1 line was"
        yield f"  · {lines} given twice, as deliveries of one report repeat them, and counted once"
    for kind, amount in sorted(found.other_usd.items()):
        yield f"  · {kind}: {dollars(amount)} in lines with the job's tag, which the ledger does not count"
    if found.unknown:
        yield (
            "  ! unknown instances cannot be joined with a bill; fix: let containers reach the metadata service "
            "(HttpPutResponseHopLimit 2), or set EBBFLOW_INSTANCE_ID, EBBFLOW_INSTANCE_TYPE and EBBFLOW_ZONE"
        )


def _wrap(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, drop_whitespace=True, break_on_hyphens=False) or [""]


def add_command(commands: Any) -> None:
    parser = commands.add_parser("reconcile", help="compare a job's forecast and ledger with what was billed")
    parser.add_argument("job", metavar="RUN", help="a job's name, 'latest', or the folder or s3:// URI of a job")
    parser.add_argument("bill", type=Path, nargs="+", metavar="CUR_FILE", help="Cost and Usage Report: CSV or Parquet")
    parser.add_argument("--store", default=None, metavar="URI", help="the job's store, if not known to this machine")
    parser.add_argument("--tag", default=JOB_TAG, metavar="KEY", help=f"cost allocation tag of a job ({JOB_TAG})")
    parser.add_argument("--json", action="store_true", help="as JSON, dollars as exact strings")
    parser.set_defaults(run=_reconcile)


def _reconcile(arguments: argparse.Namespace) -> int:
    """Print the reconciliation. Return exit code 0 if ledger and bill agree and there are no faults, else 1."""
    lines = (line for number, path in enumerate(arguments.bill) for line in read_bill(path, delivery=number))
    found = reconcile(read_job(arguments.job, arguments.store), lines, job_tag=arguments.tag)
    print(json.dumps(found.to_json(), indent=1, allow_nan=False) if arguments.json else render(found))
    return 0 if found.agrees else 1
