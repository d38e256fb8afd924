"""Compare a job's metered instances with the provider's bill, and explain each difference with its dollars."""

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
_HOUR = 3600.0


@dataclass(kw_only=True)
class MeteredInstance:
    """One instance in the job's events. seconds, usd: of its nodes, pauses and minimum charge included; of nodes that
    shared it the seconds count once.

    machine: what the agent knew. start, end: Unix time. lost_ends: nodes whose end was not recorded.
    usd_per_hour: the lowest and the highest price on record from its boot to its end.
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
        """Between its boot and its first node; of an instance that was up for longer the rest was not for this job."""
        return _boot_seconds(self.machine)


@dataclass(kw_only=True)
class BilledInstance:
    """One instance in the bill: the lines of the hours in which it was the job's. spans: seconds by hour; deliveries:
    which of the files have lines of the same use in the same hour.
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
    def too_long_seconds(self) -> float:
        """Billed beyond the length of the hours that they were billed for: nothing lives that long."""
        return sum(max(0.0, seconds - (end - start)) for (start, end), seconds in self.spans.items())

    @property
    def told_differently(self) -> int:
        """Uses in an hour that several files have lines of, which are not the same lines again (`RepeatFilter`)."""
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


@dataclass(kw_only=True)
class JobAndBill:
    """A job's two accounts side by side, before anything is explained.

    orphans: instances that carry the job's tag and are in none of its events. unknown: nodes whose instance nobody
    recorded. shared: instances that nodes of the job shared. other_usd: tagged lines by kind (storage, transfer,
    other). covers_until: end of the bill's newest line. twice: lines that came again, with another delivery of the same
    report, and were counted once.
    """

    job: str
    job_tag: str
    forecast_usd: float | None
    metered_usd: Decimal
    simulated: bool
    synthetic: bool
    metered: dict[str, MeteredInstance]
    billed: dict[str, BilledInstance]
    orphans: dict[str, BilledInstance]
    unknown: list[NodeBill]
    shared: list[str]
    other_usd: dict[str, Decimal]
    covers_until: float
    twice: int = 0


def join_bill(events: Sequence[Event], lines: Iterable[BillLine], *, job_tag: str = JOB_TAG) -> JobAndBill:
    """Join by instance id and hour: tags of a Batch job do not reach the lines of its EC2 instances by themselves.

    events: of one job. lines: of a whole account's report, read once and not kept. Raises LedgerError, and BillError
    for deliveries that contradict each other.
    """
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    ledger = fold(ordered)
    metered = _metered(ledger.nodes)
    job = ordered[0].job if ordered else ""
    plan = next((event.data for event in ordered if event.name == PLAN and event.data.get("chosen")), None)
    account = JobAndBill(
        job=job,
        job_tag=job_tag,
        forecast_usd=None if plan is None else plan["chosen"].get("compute_usd", plan["chosen"].get("expected_usd")),
        metered_usd=ledger.total_usd,
        simulated=ledger.price_kind == SIMULATED,
        synthetic=False,
        metered=metered,
        billed={},
        orphans={},
        unknown=[bill for bill in ledger.nodes if not bill.node.instance_id],
        shared=_shared(ledger.nodes),
        other_usd={},
        covers_until=-math.inf,
    )
    repeats = RepeatFilter()
    for line in lines:
        _take(account, line, repeats)
    return account


def _take(account: JobAndBill, line: BillLine, repeats: RepeatFilter) -> None:
    account.synthetic |= line.synthetic
    account.covers_until = max(account.covers_until, line.end)
    tagged = line.tags.get(normalise_tag(account.job_tag)) == account.job
    mine = account.metered.get(line.resource_id)
    if not tagged and mine is None:
        return
    if repeats.again(line):
        account.twice += 1
    elif line.kind != "instance":
        if tagged:
            account.other_usd[line.kind] = account.other_usd.get(line.kind, Decimal(0)) + line.usd
    elif mine is not None:
        billed = account.billed.setdefault(mine.instance_id, BilledInstance(instance_id=mine.instance_id))
        if _in_its_hours(line, mine):
            billed.add(line, account.job_tag)
        else:
            billed.elsewhere_usd += line.usd
    else:
        found = account.orphans.setdefault(line.resource_id, BilledInstance(instance_id=line.resource_id))
        found.add(line, account.job_tag)


def _in_its_hours(line: BillLine, mine: MeteredInstance) -> bool:
    """From the hour of its boot to the one after the job left it: an instance ends a while after its work."""
    born = mine.start - mine.boot_seconds
    return line.end > born and line.start < (math.floor(mine.end / _HOUR) + 2) * _HOUR


def _metered(bills: Sequence[NodeBill]) -> dict[str, MeteredInstance]:
    of_node = {id(bill.node): bill for bill in bills}
    found = {}
    for instance_id, nodes in group_by_instance([bill.node for bill in bills]).items():
        mine = [of_node[id(node)] for node in nodes]
        pool = mine[0].price.pool
        start, end = nodes[0].started_wall, max(node.ended_wall for node in nodes)
        since = start - _boot_seconds(nodes[0].machine)
        bounds = [bill.price.curve.bounds(since, end) for bill in mine]
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


def _shared(bills: Sequence[NodeBill]) -> list[str]:
    """Instances on which nodes of the job ran at once and divided its price."""
    of = {bill.node.instance_id for bill in bills if any(number > 1 for _, number in bill.sharers)}
    return sorted(instance_id for instance_id in of if instance_id)


# What is left unexplained up to here counts as agreement.
AGREED_SHARE = Decimal("0.01")
# Of a node that vanishes, events of its last seconds are missing: they are put each 10 s, its heart beats each second.
LOST_SECONDS = 15.0
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class GapPart:
    """A piece of the gap, billed less metered. cause: boot time, minimum charge, price, other zone … or unexplained."""

    cause: str
    instance_id: str
    usd: Decimal
    words: str


@dataclass(frozen=True, kw_only=True)
class BillingFinding:
    """Something wrong. kind: orphan instance, wrong zone, missed tag …; usd: of the lines that it concerns."""

    kind: str
    resource: str
    usd: Decimal
    words: str


@dataclass(frozen=True, kw_only=True)
class Reconciliation:
    """forecast, metered and billed dollars of a job's instances, with the gap in parts that sum to it exactly."""

    account: JobAndBill
    parts: tuple[GapPart, ...]
    findings: tuple[BillingFinding, ...]

    @property
    def billed_usd(self) -> Decimal:
        """Of the instances that the events know, in their hours."""
        return sum((billed.usd for billed in self.account.billed.values()), Decimal(0))

    @property
    def joined_usd(self) -> Decimal:
        """What was metered on instances that can be joined with a bill."""
        return sum((metered.usd for metered in self.account.metered.values()), Decimal(0))

    @property
    def gap_usd(self) -> Decimal:
        return self.billed_usd - self.joined_usd

    @property
    def unexplained_usd(self) -> Decimal:
        return sum((part.usd for part in self.parts if part.cause == UNEXPLAINED), Decimal(0))

    @property
    def unexplained_share(self) -> float | None:
        """Of the billed dollars, as the sum of what is unexplained of each instance without regard to sign."""
        if not self.billed_usd:
            return None
        apart = sum((abs(part.usd) for part in self.parts if part.cause == UNEXPLAINED), Decimal(0))
        return float(apart / self.billed_usd)

    @property
    def agrees(self) -> bool:
        share = self.unexplained_share
        return share is not None and Decimal(share) <= AGREED_SHARE and not self.findings and not self.account.unknown

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; dollars as decimal strings, exactly."""
        account = self.account
        return {
            "schema": SCHEMA,
            "job": account.job,
            "bill": "synthetic bill" if account.synthetic else "bill",
            "forecast_usd": account.forecast_usd,
            "metered_usd": str(account.metered_usd),
            "joined_usd": str(self.joined_usd),
            "billed_usd": str(self.billed_usd),
            "gap_usd": str(self.gap_usd),
            "unexplained_usd": str(self.unexplained_usd),
            "unexplained_share": self.unexplained_share,
            "agrees": self.agrees,
            "parts": [{**vars(part), "usd": str(part.usd)} for part in self.parts],
            "findings": [{**vars(finding), "usd": str(finding.usd)} for finding in self.findings],
            "repeated_lines": account.twice,
            "other_usd": {kind: str(usd) for kind, usd in sorted(account.other_usd.items())},
        }


UNEXPLAINED = "unexplained"


def explain_gap(account: JobAndBill) -> Reconciliation:
    """Split each instance's gap: first by price, then by time, and what evidence does not cover stays unexplained."""
    parts: list[GapPart] = []
    for instance_id, metered in sorted(account.metered.items()):
        billed = account.billed.get(instance_id)
        if billed is None or not billed.seconds:
            words = "metered and not billed"
            parts.append(GapPart(cause=UNEXPLAINED, instance_id=instance_id, usd=-metered.usd, words=words))
            continue
        parts += [part for part in _parts(metered, billed) if part.usd]
    return Reconciliation(account=account, parts=tuple(parts), findings=tuple(_findings(account)))


def _parts(metered: MeteredInstance, billed: BilledInstance) -> Iterator[GapPart]:
    """billed − metered = (billed price − metered price) × common seconds + other seconds × their price."""

    def part(cause: str, usd: Decimal, words: str) -> GapPart:
        return GapPart(cause=cause, instance_id=metered.instance_id, usd=usd, words=words)

    rate = billed.usd / _decimal(billed.seconds)
    own_rate = metered.usd / _decimal(metered.seconds) if metered.seconds else rate
    common = min(metered.seconds, billed.seconds)
    cause = _price_cause(metered, billed)
    words = f"{common:,.0f} s billed at ${rate * 3600:.6f}/h, metered at ${own_rate * 3600:.6f}/h"
    yield part(cause, (rate - own_rate) * _decimal(common), words)
    beyond = billed.seconds - metered.seconds
    if beyond < 0:
        yield part(UNEXPLAINED, own_rate * _decimal(beyond), f"{-beyond:,.0f} s metered and not billed")
        return
    boot = min(beyond, metered.boot_seconds)
    yield part("boot time", rate * _decimal(boot), f"{boot:,.0f} s from the instance's boot to the first agent")
    beyond -= boot
    # Where the events know no uptime, the ledger may have counted too little to see the minimum.
    short = billed.seconds <= MINIMUM_SECONDS
    least = min(beyond, max(0.0, MINIMUM_SECONDS - metered.seconds - boot)) if short else 0.0
    yield part("minimum charge", rate * _decimal(least), f"{least:,.0f} s to make up a minute")
    beyond -= least
    lost = min(beyond, metered.lost_ends * LOST_SECONDS)
    yield part("end not recorded", rate * _decimal(lost), f"{lost:,.0f} s after the last sign of life of a lost node")
    rest = beyond - lost
    yield part(UNEXPLAINED, rate * _decimal(rest), f"{rest:,.0f} s billed while no agent of the job was there")


def _price_cause(metered: MeteredInstance, billed: BilledInstance) -> str:
    machine = metered.machine
    if billed.zones and machine.get("zone") and machine["zone"] not in billed.zones:
        return "other zone"
    if billed.instance_types and machine.get("instance_type") and machine["instance_type"] not in billed.instance_types:
        return "other type"
    if billed.markets and metered.market and metered.market not in billed.markets:
        return "other market"
    return "price"


def _findings(account: JobAndBill) -> Iterator[BillingFinding]:
    for instance_id, orphan in sorted(account.orphans.items()):
        words = (
            f"carries the tag {account.job_tag}={account.job}, and no event of the job knows it: is it still running?"
        )
        yield BillingFinding(kind="orphan instance", resource=instance_id, usd=orphan.usd, words=words)
    for instance_id, metered in sorted(account.metered.items()):
        billed = account.billed.get(instance_id)
        if billed is None or not billed.seconds:
            yield _not_billed(account, metered)
            continue
        contradictions = list(_contradictions(metered, billed))
        # Nobody was to pay the prices of a simulated run, so that none of them is wrong.
        yield from contradictions or (() if account.simulated else _wrong_price(metered, billed))
        yield from _twice(billed)
        if account.job not in billed.tags:
            found = f"the value {', '.join(sorted(billed.tags))}" if billed.tags else "no value"
            words = f"its tag {account.job_tag} has {found}: cost allocation by tag misses it"
            yield BillingFinding(kind="missed tag", resource=instance_id, usd=billed.usd, words=words)


def _twice(billed: BilledInstance) -> Iterator[BillingFinding]:
    """Deliveries have ids of their own, so that one that corrects another is told by its times alone."""
    reasons = []
    if billed.told_differently:
        reasons.append(f"{billed.told_differently} of its hours are in two files that differ")
    if billed.too_long_seconds > 1.0:
        reasons.append(f"{billed.too_long_seconds:,.0f} s billed beyond the length of their hours")
    if reasons:
        words = f"{', '.join(reasons)}: two deliveries together? fix: give the newest one alone"
        yield BillingFinding(kind="billed twice", resource=billed.instance_id, usd=billed.usd, words=words)


def _contradictions(metered: MeteredInstance, billed: BilledInstance) -> Iterator[BillingFinding]:
    machine = metered.machine
    for kind, known, said in (
        ("wrong zone", machine.get("zone"), billed.zones),
        ("wrong type", machine.get("instance_type"), billed.instance_types),
        ("wrong market", metered.market, billed.markets),
    ):
        if known and said and known not in said:
            words = f"billed in {', '.join(sorted(said))}, the events say {known}"
            yield BillingFinding(kind=kind, resource=metered.instance_id, usd=billed.usd, words=words)


def _wrong_price(metered: MeteredInstance, billed: BilledInstance) -> Iterator[BillingFinding]:
    """Where no price on record makes the ledger's dollars those of the bill, for its other seconds."""
    beyond = _decimal(billed.seconds - metered.seconds) / 3600
    low, high = sorted(metered.usd + beyond * usd for usd in metered.usd_per_hour)
    apart = max(low - billed.usd, billed.usd - high)
    if apart > AGREED_SHARE * billed.usd:
        words = (
            f"${billed.usd:.4f} billed for {billed.seconds:,.0f} s; at the prices on record it would be ${low:.4f}"
            + (f" to ${high:.4f}" if high > low else "")
        )
        yield BillingFinding(kind="wrong price", resource=metered.instance_id, usd=billed.usd, words=words)


def _not_billed(account: JobAndBill, metered: MeteredInstance) -> BillingFinding:
    early = account.covers_until < metered.end
    why = (
        "the bill ends before it did: try a later report" if early else "not in this bill: another account's, or daily?"
    )
    return BillingFinding(kind="not billed", resource=metered.instance_id, usd=metered.usd, words=why)


def _decimal(seconds: float) -> Decimal:
    return Decimal(str(round(seconds, 6)))


_WIDTH = 100


def render(found: Reconciliation) -> str:
    """Forecast, metered, billed; the gap in parts; what is wrong; what could not be joined."""
    lines = list(_text_lines(found))
    return "\n".join(piece for line in lines for piece in _wrapped(line))


def _text_lines(found: Reconciliation) -> Iterator[str]:
    account = found.account
    bill = "synthetic bill" if account.synthetic else "bill"
    decimals = 2 if max(found.billed_usd, account.metered_usd) >= 10 else 4
    yield f"reconciliation of job {one_line(account.job)} with the {bill}"
    yield f"  forecast  {format_usd(account.forecast_usd, decimals)}  (estimated by the plan)"
    simulated = ", SIMULATED: the job was priced as if, and no provider billed it" if account.simulated else ""
    yield f"  metered   {format_usd(account.metered_usd, decimals)}  (from the job's events{simulated})"
    unjoined = account.metered_usd - found.joined_usd
    if account.unknown:
        yield f"    of it {format_usd(unjoined, decimals)} on {len(account.unknown)} nodes whose instance is unknown"
    instances = len(account.billed)
    billed_usd = format_usd(found.billed_usd, decimals)
    yield f"  billed    {billed_usd}  ({instances} of {len(account.metered)} instances found)"
    yield f"  gap       {format_usd(found.gap_usd, decimals)}  billed less metered on joined instances, of which"
    for cause, amount, count in _by_cause(found):
        yield f"    {cause:<18} {format_usd(amount, decimals):>12}  ({count} instance{'s' if count > 1 else ''})"
    share = found.unexplained_share
    if share is not None:
        limit = (
            f"{'within' if Decimal(share) <= AGREED_SHARE else 'more than'} {format_percent(float(AGREED_SHARE), 0)}"
        )
        yield f"  unexplained: {format_percent(share, 2)} of the bill, {limit}"
    for part in found.parts:
        yield f"  · {part.instance_id}: {part.cause} {format_usd(part.usd, decimals)}: {part.words}"
    for finding in found.findings:
        amount = format_usd(finding.usd, decimals)
        yield f"  ! {finding.kind}: {one_line(finding.resource)} ({amount}): {one_line(finding.words)}"
    for instance_id, billed in sorted(account.billed.items()):
        if billed.elsewhere_usd:
            yield f"  · {instance_id}: {format_usd(billed.elsewhere_usd, decimals)} more at other times, not this job's"
    for instance_id in account.shared:
        yield f"  · {instance_id}: nodes of the job ran on it at once and divided its price"
    if account.twice:
        lines = f"{account.twice} lines were" if account.twice > 1 else "1 line was"
        yield f"  · {lines} given twice, as deliveries of one report repeat them, and counted once"
    for kind, amount in sorted(account.other_usd.items()):
        yield f"  · {kind}: {format_usd(amount, decimals)} in lines with the job's tag, which the ledger does not count"
    if account.unknown:
        yield (
            "  ! unknown instances cannot be joined with a bill; fix: let containers reach the metadata service "
            "(HttpPutResponseHopLimit 2), or set EBBFLOW_INSTANCE_ID, EBBFLOW_INSTANCE_TYPE and EBBFLOW_ZONE"
        )


def _by_cause(found: Reconciliation) -> list[tuple[str, Decimal, int]]:
    amounts: dict[str, list[Decimal]] = {}
    for part in found.parts:
        amounts.setdefault(part.cause, []).append(part.usd)
    return [(cause, sum(usd, Decimal(0)), len(usd)) for cause, usd in sorted(amounts.items())]


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, drop_whitespace=True, break_on_hyphens=False) or [""]


def add_command(commands: Any) -> None:
    parser = commands.add_parser("reconcile", help="compare a job's forecast and ledger with what was billed")
    parser.add_argument("job", metavar="RUN", help="a job's name, 'latest', or the folder or s3:// URI of a job")
    parser.add_argument("bill", type=Path, nargs="+", metavar="CUR_FILE", help="Cost and Usage Report: CSV or Parquet")
    parser.add_argument("--store", default=None, metavar="URI", help="where the job lies, if not as this machine knows")
    parser.add_argument("--tag", default=JOB_TAG, metavar="KEY", help=f"cost allocation tag of a job ({JOB_TAG})")
    parser.add_argument("--json", action="store_true", help="as JSON, dollars as exact strings")
    parser.set_defaults(run=_reconcile)


def _reconcile(arguments: argparse.Namespace) -> int:
    """Exit code 0 when both agree within the stated share and nothing is wrong, else 1."""
    found = explain_gap(
        join_bill(read_job(arguments.job, arguments.store), _read_bill_lines(arguments.bill), job_tag=arguments.tag)
    )
    print(json.dumps(found.to_json(), indent=1, allow_nan=False) if arguments.json else render(found))
    return 0 if found.agrees else 1


def _read_bill_lines(paths: list[Path]) -> Iterator[BillLine]:
    for number, path in enumerate(paths):
        yield from read_bill(path, delivery=number)
