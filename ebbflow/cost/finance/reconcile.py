"""Compare a job's metered instances with the provider's bill, and explain each difference in
dollars.
"""

import argparse
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from ebbflow.core.event_payloads import PlanPayload
from ebbflow.core.events import Event, LedgerClass
from ebbflow.core.grouping import group_by_key
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.amounts import format_percent, format_usd
from ebbflow.cost.finance.allocation import (
    compare_allocations,
    is_allocation,
    read_allocations,
    render_allocations,
)
from ebbflow.cost.finance.bill import BillLine, RepeatFilter, normalise_tag, read_bill
from ebbflow.cost.finance.bill_matching import (
    ENDS_LATER_SECONDS,
    HOUR_TOLERANCE_SECONDS,
    BilledInstance,
    HourMatch,
    MeteredInstance,
    PaidPiece,
    match_instance,
    meter_instances,
    to_decimal,
)
from ebbflow.cost.finance.daily_costs import (
    compare_days,
    is_daily_costs,
    read_daily_costs,
    render_days,
)
from ebbflow.cost.jobs import read_job
from ebbflow.cost.ledger.bills import NodeBill, UnreportedBill
from ebbflow.cost.ledger.instances import (
    CLOCKS_APART_SECONDS,
    ESTIMATED_UNTIL_BILLED,
    LONGEST_IDLE_SECONDS,
)
from ebbflow.cost.ledger.ledger import Ledger, fold
from ebbflow.cost.ledger.pricing import SIMULATED, select_plans
from ebbflow.cost.ledger.timeline import read_paid_nodes

JOB_TAG = "ebbflow-job"
UNEXPLAINED = "unexplained"
# Ledger and bill agree if at most this share of the bill is unexplained.
AGREED_SHARE = 0.01
SCHEMA = 1
_WIDTH = 100
# Tags (`normalise_tag`) that AWS, and the template of `ebbflow deploy`, put on the instances of a
# compute environment.
_ENVIRONMENT_TAGS = frozenset(
    {
        "batchcomputeenvironment",
        "autoscalinggroupname",
        "ec2fleetid",
        "ec2launchtemplateid",
        "ebbflowqueue",
    }
)

_WORDS = {
    "boot time": "from the instance's boot to the first agent",
    "warm instance": "before the first agent, on an instance that another job had started",
    "another job": "while another job used the instance",
    "minimum charge": "to fill the minimum of one minute",
    "end not recorded": "after the last event of a lost node",
    "ended later": "from the last agent's end to the end of the instance",
}


@dataclass(frozen=True, kw_only=True)
class GapPart:
    """One part of an instance's gap (billed less metered dollars), and its explanation in words.

    `cause` is "price", "boot time", "warm instance" (another job had started the instance),
    "another job", "minimum charge", "end not recorded", "ended later" or "unexplained". If bill and
    events differ in a property, the cause is "other" plus the property, such as "other zone".
    """

    cause: str
    instance_id: str
    usd: Decimal
    words: str


@dataclass(frozen=True, kw_only=True)
class BillingFinding:
    """Fault found in the bill, such as an orphan instance, a wrong zone or a missing tag, with the
    dollars involved.
    """

    kind: str
    resource: str
    usd: Decimal
    words: str


@dataclass(kw_only=True)
class Neighbour:
    """An instance that was billed while the job ran, but that no event or tag of the job mentions.

    It belongs to a compute environment, possibly one of the job's.
    """

    usd: Decimal = Decimal(0)
    # tags that AWS puts on the instances of a compute environment: (key, value)
    environments: set[tuple[str, str]] = field(default_factory=set)


@dataclass(kw_only=True)
class Reconciliation:
    """Comparison of a job's forecast, ledger and bill.

    `parts` sum exactly to the gap (billed less metered dollars).
    """

    job: str
    job_tag: str
    forecast_usd: float | None
    # the ledger's dollars for machines, without those that are estimated until the bill shows them
    metered_usd: Decimal
    volumes_usd: Decimal  # the ledger's estimate for root volumes
    simulated: bool  # whether the job's prices were only assumed, so that no provider sends a bill
    metered: dict[str, MeteredInstance]  # instances that the job's events mention, by instance id
    unknown: list[NodeBill]  # bills of the nodes whose instance id was not recorded
    shared: list[str]  # ids of the instances that several nodes of the job used at once
    synthetic: bool = False  # whether the bill is marked as synthetic, that is, not from a provider
    # bills of the instances in `metered`, by instance id. Instances that the bill does not mention
    # are left out.
    billed: dict[str, BilledInstance] = field(default_factory=dict)
    # billed instances with the job's tag that its events do not mention
    orphans: dict[str, BilledInstance] = field(default_factory=dict)
    # billed instances without the job's tag that may be its nodes without events
    candidates: dict[str, BilledInstance] = field(default_factory=dict)
    neighbours: dict[str, Neighbour] = field(default_factory=dict)
    environments: set[tuple[str, str]] = field(default_factory=set)  # of the job's instances
    # dollars of other bill lines of the job's instances or with its tag, by kind: storage, transfer,
    # other
    other_usd: dict[str, Decimal] = field(default_factory=dict)
    billed_volumes_usd: Decimal = Decimal(0)  # part of the storage that is of EBS
    covers_until: float = -math.inf  # Unix time at which the newest line of the bill ends
    # number of repeats of lines in other deliveries of the same report. Repeats are not added to
    # the bill.
    repeated_lines: int = 0
    notes: tuple[str, ...] = ()  # sentences about observations that are not faults
    parts: tuple[GapPart, ...] = ()
    findings: tuple[BillingFinding, ...] = ()

    @property
    def billed_usd(self) -> Decimal:
        """Dollars billed for the job's instances, for the hours in which they ran the job."""
        return sum((billed.usd for billed in self.billed.values()), Decimal(0))

    @property
    def joined_usd(self) -> Decimal:
        """Dollars metered on instances with a known id.

        Only these dollars can be compared with a bill.
        """
        return sum((metered.usd for metered in self.metered.values()), Decimal(0))

    @property
    def gap_usd(self) -> Decimal:
        return self.billed_usd - self.joined_usd

    @property
    def unexplained_share(self) -> float | None:
        """Unexplained share of the billed dollars; None if nothing was billed.

        The absolute unexplained amounts are summed, so that positive and negative amounts do not
        cancel out.
        """
        if not self.billed_usd:
            return None
        apart = sum((abs(part.usd) for part in self.parts if part.cause == UNEXPLAINED), Decimal(0))
        return float(apart / self.billed_usd)

    @property
    def agrees(self) -> bool:
        share = self.unexplained_share
        return (
            share is not None and share <= AGREED_SHARE and not self.findings and not self.unknown
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values. Dollars are decimal strings, which are exact."""
        unexplained = sum(
            (part.usd for part in self.parts if part.cause == UNEXPLAINED), Decimal(0)
        )
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
            "notes": list(self.notes),
            "repeated_lines": self.repeated_lines,
            "other_usd": {kind: str(usd) for kind, usd in sorted(self.other_usd.items())},
            "volumes_usd": str(self.volumes_usd),
            "billed_volumes_usd": str(self.billed_volumes_usd),
        }


def reconcile(
    events: Sequence[Event],
    lines: Iterable[BillLine],
    *,
    job_tag: str = JOB_TAG,
    others: Sequence[Sequence[Event]] = (),
) -> Reconciliation:
    """Compare a job's events with a bill, and split the gap (billed less metered dollars) of each
    instance by cause.

    Bill lines are matched with the job by instance id and hour, because AWS does not copy the tags
    of a Batch job to its EC2 instances. Within an hour the gap is split first by price, then by
    time. Amounts without evidence of a cause are reported as unexplained.

    Args:
        lines: All lines of the account's bill. They are read once and not stored in memory.
        others: Events of other jobs, which may have used the same instances before or after this
            one.

    Raises:
        LedgerError: The events contradict each other.
        BillError: Two deliveries of the report contradict each other.
    """
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    ledger = fold(ordered)
    plans = select_plans(ordered)
    if plans:
        forecast_usd = _forecast_usd(plans[0].payload)
    else:
        forecast_usd = None
    estimated_usd = sum(
        (line.usd for line in ledger.lines if line.ledger_class in ESTIMATED_UNTIL_BILLED),
        Decimal(0),
    )
    found = Reconciliation(
        job=ordered[0].job if ordered else "",
        job_tag=job_tag,
        forecast_usd=forecast_usd,
        metered_usd=ledger.total_usd - estimated_usd,
        volumes_usd=sum(
            (line.usd for line in ledger.lines if line.ledger_class is LedgerClass.VOLUMES),
            Decimal(0),
        ),
        simulated=ledger.price_kind == SIMULATED,
        metered=meter_instances(ledger.nodes),
        unknown=[bill for bill in ledger.nodes if not bill.node.instance_id],
        shared=sorted({str(bill.node.instance_id) for bill in ledger.nodes if bill.sharers}),
    )
    repeats = RepeatFilter()
    since = min((metered.start for metered in found.metered.values()), default=math.inf)
    until = max((metered.end for metered in found.metered.values()), default=-math.inf)
    for line in lines:
        _add_line(found, line, repeats, ledger.unreported)
        if line.start < until and line.end > since:
            _add_neighbour(found, line)
    _join_unreported(found, ledger)
    used = [node for other in others for node in read_paid_nodes(other)]
    uses = [
        (node.instance_id, node.started_wall, node.ended_wall) for node in used if node.instance_id
    ]
    parts = []
    faults = []
    notes = []
    for instance_id, metered in found.metered.items():
        mine = [(start, end) for of, start, end in uses if of == instance_id]
        billed = found.billed.get(instance_id)
        if billed is None:
            hours = []
        else:
            hours = match_instance(metered, billed, mine, found.job)
        if metered.offset:
            if metered.offset > 0:
                behind = "behind"
            else:
                behind = "ahead of"
            notes.append(
                f"{instance_id}: its clock was about {abs(metered.offset):.0f} s {behind} the "
                "bill's"
            )
        parts += [part for part in _split_gap(found, metered, hours) if part.usd]
        faults += _find_instance_faults(found, metered, hours)
    found.parts = tuple(parts)
    found.notes = (*notes, *_note_absent_tags(found), *_note_neighbours(found))
    found.findings = (*_find_orphans(found), *faults)
    return found


def render(found: Reconciliation) -> str:
    return "\n".join(piece for line in _render_lines(found) for piece in _wrap(line))


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "reconcile", help="compare a job's forecast and ledger with what was billed"
    )
    parser.add_argument(
        "job", metavar="RUN", help="a job's name, 'latest', or the folder or s3:// URI of a job"
    )
    kinds = (
        "Cost and Usage Report or FOCUS bill (CSV or Parquet), Cost Explorer's daily costs (CSV), "
        "or allocations of OpenCost or Kubecost (JSON or CSV)"
    )
    parser.add_argument("bill", type=Path, nargs="+", metavar="FILE", help=kinds)
    parser.add_argument(
        "--store", default=None, metavar="URI", help="the job's store, if not known to this machine"
    )
    parser.add_argument(
        "--tag", default=JOB_TAG, metavar="KEY", help=f"cost allocation tag of a job ({JOB_TAG})"
    )
    also = "another job that may have used the same instances; repeatable"
    parser.add_argument("--also", action="append", default=[], metavar="RUN", help=also)
    parser.add_argument("--json", action="store_true", help="as JSON, dollars as exact strings")
    parser.set_defaults(run=_reconcile)


def _forecast_usd(plan: PlanPayload) -> float | None:
    """Return the forecast dollars for machines. In older plans, these are all forecast dollars."""
    if plan.chosen is None:
        return None
    if plan.chosen.compute_usd is None:
        return plan.chosen.expected_usd
    volume_usd = float(plan.chosen.volume_usd_per_hour or 0)
    node_hours = (plan.chosen.nodes or 0) * (plan.chosen.paid_hours or 0)
    return plan.chosen.compute_usd - volume_usd * node_hours


def _add_line(
    found: Reconciliation,
    line: BillLine,
    repeats: RepeatFilter,
    unreported: Sequence[UnreportedBill],
) -> None:
    """Add a line of the bill to the instance or the kind of cost to which it belongs."""
    found.synthetic |= line.synthetic
    found.covers_until = max(found.covers_until, line.end)
    tag = line.tags.get(normalise_tag(found.job_tag), "")
    tagged = tag == found.job
    metered = found.metered.get(line.resource_id)
    if not tagged and metered is None:
        silent = any(_may_be_silent(line, bill) for bill in unreported)
        if line.kind != "instance" or tag or not silent:
            return
    if repeats.is_repeat(line):
        found.repeated_lines += tagged or metered is not None
        return
    if line.kind != "instance":
        found.other_usd[line.kind] = found.other_usd.get(line.kind, Decimal(0)) + line.usd
        if line.is_volume:
            found.billed_volumes_usd += line.usd
        return
    if metered is not None:
        found.environments |= _environments(line)
        place = found.billed
    elif tagged:
        place = found.orphans
    else:
        place = found.candidates
    place.setdefault(line.resource_id, BilledInstance(instance_id=line.resource_id)).add(
        line, found.job_tag
    )


def _add_neighbour(found: Reconciliation, line: BillLine) -> None:
    """Add a bill line for an instance of a compute environment that is not the job's.

    The line is ignored if it is of another kind.

    Only the first of several files counts, since they may repeat each other.
    """
    environments = _environments(line)
    known = line.resource_id in found.metered or normalise_tag(found.job_tag) in line.tags
    if line.kind != "instance" or not environments or known or line.delivery:
        return
    neighbour = found.neighbours.setdefault(line.resource_id, Neighbour())
    neighbour.usd += line.usd
    neighbour.environments |= environments


def _environments(line: BillLine) -> set[tuple[str, str]]:
    return {(key, value) for key, value in line.tags.items() if key in _ENVIRONMENT_TAGS}


def _may_be_silent(line: BillLine, bill: UnreportedBill) -> bool:
    """Return whether a line may be of the AWS Batch node of `bill`, which recorded no event."""
    pool = bill.price.pool
    stay = bill.job.stay(bill.node)
    return (
        pool is not None
        and line.instance_type == pool.instance_type
        and line.start < stay.stopped + ENDS_LATER_SECONDS + CLOCKS_APART_SECONDS
        and line.end > stay.started - LONGEST_IDLE_SECONDS - CLOCKS_APART_SECONDS
    )


def _join_unreported(found: Reconciliation, ledger: Ledger) -> None:
    """Match Batch nodes that recorded no event with billed instances of the same type and hours."""
    for bill in ledger.unreported:
        stay = bill.job.stay(bill.node)
        pool = bill.price.pool
        for instance_id, orphan in sorted({**found.candidates, **found.orphans}.items()):
            first = min(orphan.hours)[0]
            last = max(orphan.hours)[1]
            longer = orphan.seconds - (stay.stopped - stay.started)
            near = (
                first - CLOCKS_APART_SECONDS <= stay.started
                and stay.stopped <= last + CLOCKS_APART_SECONDS
            )
            fits = -HOUR_TOLERANCE_SECONDS <= longer <= LONGEST_IDLE_SECONDS + ENDS_LATER_SECONDS
            if (
                pool is None
                or not near
                or not fits
                or pool.instance_type not in orphan.values("type")
            ):
                continue
            piece = PaidPiece(
                start=stay.started, end=stay.stopped, curve=bill.price.curve, usd=bill.machine_usd
            )
            boot = {"uptime_seconds": max(0.0, min(longer, LONGEST_IDLE_SECONDS))}
            found.metered[instance_id] = MeteredInstance(
                instance_id=instance_id,
                machine=boot,
                market=pool.market,
                lost_ends=0,
                pieces=[piece],
            )
            found.billed[instance_id] = orphan
            found.orphans.pop(instance_id, None)
            found.candidates.pop(instance_id, None)
            found.neighbours.pop(instance_id, None)
            break


def _note_absent_tags(found: Reconciliation) -> Iterator[str]:
    """Yield a note if instances of the job have no tag that names a job.

    AWS Batch gives an instance the tags of its compute environment, not those of a job.
    """
    bare = [billed for billed in found.billed.values() if not billed.tags]
    if bare:
        usd = sum((billed.usd for billed in bare), Decimal(0))
        yield (
            f"{len(bare)} of {len(found.billed)} instances (${usd:.2f}) have no tag "
            f"{found.job_tag}, as AWS Batch puts no tags of a job on instances; cost allocation by "
            "this tag leaves them out"
        )


def _note_neighbours(found: Reconciliation) -> Iterator[str]:
    """Yield a note about other instances of the job's compute environments that ran meanwhile."""
    beside = {
        name: neighbour.usd
        for name, neighbour in sorted(found.neighbours.items())
        if neighbour.environments & found.environments
    }
    if beside:
        usd = sum(beside.values(), Decimal(0))
        names = ", ".join(list(beside)[:3])
        if len(beside) > 3:
            more = f" and {len(beside) - 3} more"
        else:
            more = ""
        yield (
            f"{names}{more} (${usd:.2f}) ran in the job's compute environment at its time, without "
            "an event or a tag of this job: another job's, as far as the bill shows"
        )


def _split_gap(
    found: Reconciliation, metered: MeteredInstance, hours: list[HourMatch]
) -> Iterator[GapPart]:
    """Split one instance's gap (billed less metered dollars) by cause, and yield the parts.

    In each hour, the common seconds are the smaller of the metered and the billed seconds. The gap
    of the hour is (billed price − metered price) × common seconds, plus the cost of the seconds
    that are only billed, less the cost of the seconds that are only metered. Prices are per second.
    """

    def part(cause: str, usd: Decimal, words: str) -> GapPart:
        return GapPart(cause=cause, instance_id=metered.instance_id, usd=usd, words=words)

    if not hours:
        yield part(UNEXPLAINED, -metered.usd, "metered and not billed")
        return
    common = 0.0
    priced = Decimal(0)
    missing = 0.0
    missing_usd = Decimal(0)
    seconds: dict[str, float] = {}
    usd: dict[str, Decimal] = {}
    for hour in hours:
        billed = hour.billed
        if hour.own_seconds:
            own_rate = hour.own_usd / to_decimal(hour.own_seconds)
        else:
            own_rate = Decimal(0)
        if billed.seconds:
            rate = billed.usd / to_decimal(billed.seconds)
        else:
            rate = own_rate
        both = min(hour.own_seconds, billed.seconds)
        common += both
        priced += (rate - own_rate) * to_decimal(both)
        missing += hour.missing_seconds
        missing_usd += hour.own_usd - own_rate * to_decimal(both)
        beyond = {**hour.explained, UNEXPLAINED: hour.rest_seconds}
        unmetered = to_decimal(sum(beyond.values()))
        left = billed.usd - rate * to_decimal(both)
        for cause, spent in beyond.items():
            seconds[cause] = seconds.get(cause, 0.0) + spent
            if unmetered:
                usd[cause] = usd.get(cause, Decimal(0)) + left * to_decimal(spent) / unmetered
        if not billed.seconds:  # dollars without seconds, such as a fee
            usd[UNEXPLAINED] = usd.get(UNEXPLAINED, Decimal(0)) + billed.usd
    if priced:
        paid = found.billed[metered.instance_id]
        cause = _name_price_difference(metered, paid)
        metered_seconds = metered.seconds_between(metered.start, metered.end)
        rates = (
            f"{common:,.0f} s billed at ${paid.usd / to_decimal(paid.seconds) * 3600:.6f}/h, "
            f"metered at ${metered.usd / to_decimal(metered_seconds) * 3600:.6f}/h"
        )
        yield part(cause, priced, rates)
    yield part(UNEXPLAINED, -missing_usd, f"{missing:,.0f} s metered and not billed")
    for cause, amount in usd.items():
        words = _WORDS.get(cause, "billed while no agent of the job was there")
        yield part(cause, amount, f"{seconds[cause]:,.0f} s {words}")


def _name_price_difference(metered: MeteredInstance, paid: BilledInstance) -> str:
    for kind, _ in _find_contradictions(metered, paid):
        return f"other {kind}"
    return "price"


def _find_contradictions(
    metered: MeteredInstance, billed: BilledInstance
) -> Iterator[tuple[str, str]]:
    """Yield (property, explanation) for each property in which bill and events differ."""
    machine = metered.machine
    known = {
        "zone": machine.get("zone"),
        "type": machine.get("instance_type"),
        "market": metered.market,
    }
    for kind, value in known.items():
        in_bill = billed.values(kind)
        if value and in_bill and value not in in_bill:
            yield kind, f"billed in {', '.join(sorted(in_bill))}, the events have {value}"


def _find_orphans(found: Reconciliation) -> Iterator[BillingFinding]:
    for instance_id, orphan in sorted(found.orphans.items()):
        words = (
            f"has the tag {found.job_tag}={found.job}, and is in no event of the job: is it still "
            "running?"
        )
        yield BillingFinding(
            kind="orphan instance", resource=instance_id, usd=orphan.usd, words=words
        )


def _find_instance_faults(
    found: Reconciliation, metered: MeteredInstance, hours: list[HourMatch]
) -> Iterator[BillingFinding]:
    billed = found.billed.get(metered.instance_id)

    def fault(kind: str, instance: MeteredInstance | BilledInstance, words: str) -> BillingFinding:
        return BillingFinding(
            kind=kind, resource=instance.instance_id, usd=instance.usd, words=words
        )

    if billed is None or not billed.seconds:
        early = found.covers_until < metered.end
        why = "the bill ends before it did: try a later report"
        yield fault(
            "not billed",
            metered,
            why if early else "not in this bill: another account's, or daily?",
        )
        return
    contradictions = [
        fault(f"wrong {kind}", billed, words)
        for kind, words in _find_contradictions(metered, billed)
    ]
    yield from contradictions
    # A simulated run has assumed prices, which need not agree with the bill.
    if not contradictions and not found.simulated and (words := _check_price(metered, hours)):
        yield fault("wrong price", billed, words)
    # Line ids differ between deliveries, so a correction shows only as conflicting lines or as
    # excess seconds.
    reasons = []
    if billed.conflicting_uses:
        reasons.append(f"{billed.conflicting_uses} of its hours are in two files that differ")
    if billed.excess_seconds > 1.0:
        reasons.append(f"{billed.excess_seconds:,.0f} s billed beyond the length of their hours")
    if reasons:
        words = f"{', '.join(reasons)}: two deliveries together? fix: pass only the newest one"
        yield fault("billed twice", billed, words)
    else:
        yield from _find_wrong_hours(found, metered, hours)
    # A warm instance keeps the tag of the job that started it. No tag at all is no fault
    # (`_note_absent_tags`).
    if billed.tags and found.job not in billed.tags and not metered.was_warm:
        value = ", ".join(sorted(billed.tags))
        yield fault(
            "missed tag",
            billed,
            f"its tag {found.job_tag} has the value {value}: cost allocation by tag misses it",
        )


def _find_wrong_hours(
    found: Reconciliation, metered: MeteredInstance, hours: list[HourMatch]
) -> Iterator[BillingFinding]:
    """Yield findings about hours that were metered but not billed, or billed but not used."""
    late = [hour for hour in hours if hour.start >= found.covers_until]
    missing = [
        hour for hour in hours if hour.missing_seconds > HOUR_TOLERANCE_SECONDS and hour not in late
    ]
    unused = [hour for hour in hours if hour.rest_seconds > HOUR_TOLERANCE_SECONDS]
    after = "is it still running, or did another job use it (--also JOB)?"
    for kind, wrong, seconds, words in (
        (
            "not billed",
            late,
            sum(hour.missing_seconds for hour in late),
            "the bill ends before: try a later report",
        ),
        (
            "hour not billed",
            missing,
            sum(hour.missing_seconds for hour in missing),
            "metered, and not in this bill",
        ),
        (
            "billed without use",
            unused,
            sum(hour.rest_seconds for hour in unused),
            f"no agent of the job was there: {after}",
        ),
    ):
        if wrong:
            usd = sum((hour.billed.usd or hour.own_usd for hour in wrong), Decimal(0))
            names = ", ".join(hour.name for hour in wrong[:3]) + (
                f" and {len(wrong) - 3} more" if wrong[3:] else ""
            )
            text = f"{seconds:,.0f} s in the hour{'s' if wrong[1:] else ''} from {names}: {words}"
            yield BillingFinding(kind=kind, resource=metered.instance_id, usd=usd, words=text)


def _check_price(metered: MeteredInstance, hours: list[HourMatch]) -> str | None:
    """Explain the hours whose billed dollars do not match the recorded prices.

    Return None if all match.
    """
    wrong = []
    for hour in hours:
        billed = hour.billed
        low, high = metered.price_bounds(hour.start - metered.offset, hour.end - metered.offset)
        beyond = to_decimal(billed.seconds - hour.own_seconds) / 3600
        least, most = sorted(hour.own_usd + beyond * usd for usd in (low, high))
        slack = (
            to_decimal(AGREED_SHARE) * billed.usd
            + (high - low) * to_decimal(CLOCKS_APART_SECONDS) / 3600
        )
        if billed.seconds and max(least - billed.usd, billed.usd - most) > slack:
            wrong.append((hour, least, most))
    if not wrong:
        return None
    least = sum(row[1] for row in wrong)
    most = sum(row[2] for row in wrong)
    expected = f"${least:.4f}" + (f" to ${most:.4f}" if most > least else "")
    seconds = sum(row[0].billed.seconds for row in wrong)
    usd = sum(row[0].billed.usd for row in wrong)
    where = f"{len(wrong)} hour{'s' if wrong[1:] else ''} from {wrong[0][0].name}"
    return (
        f"${usd:.4f} billed for {seconds:,.0f} s in {where}; at the prices on record it would be "
        f"{expected}"
    )


def _render_lines(found: Reconciliation) -> Iterator[str]:
    if max(found.billed_usd, found.metered_usd) >= 10:
        dollars = partial(format_usd, decimals=2)
    else:
        dollars = partial(format_usd, decimals=4)
    yield from _render_totals(found, dollars)
    for part in found.parts:
        yield f"  · {part.instance_id}: {part.cause} {dollars(part.usd)}: {part.words}"
    for finding in found.findings:
        yield (
            f"  ! {finding.kind}: {one_line(finding.resource)} ({dollars(finding.usd)}): "
            f"{one_line(finding.words)}"
        )
    yield from _render_remarks(found, dollars)


def _render_totals(
    found: Reconciliation, dollars: Callable[[Decimal | float | None], str]
) -> Iterator[str]:
    yield (
        f"reconciliation of job {one_line(found.job)} with the "
        f"{'synthetic bill' if found.synthetic else 'bill'}"
    )
    yield f"  forecast  {dollars(found.forecast_usd)}  (estimated by the plan)"
    if found.simulated:
        simulated = ", SIMULATED: the job was priced as if, and no provider billed it"
    else:
        simulated = ""
    yield f"  metered   {dollars(found.metered_usd)}  (from the job's events{simulated})"
    if found.unknown:
        unjoined = dollars(found.metered_usd - found.joined_usd)
        yield f"    of it {unjoined} on {len(found.unknown)} nodes whose instance is unknown"
    joined = f"{len(found.billed)} of {len(found.metered)} instances found"
    yield f"  billed    {dollars(found.billed_usd)}  ({joined})"
    yield f"  gap       {dollars(found.gap_usd)}  billed less metered on joined instances, of which"
    amounts = group_by_key((part.cause, part.usd) for part in found.parts)
    for cause, parts in sorted(amounts.items()):
        instances = f"{len(parts)} instance{'s' if len(parts) > 1 else ''}"
        yield f"    {cause:<18} {dollars(sum(parts, Decimal(0))):>12}  ({instances})"
    share = found.unexplained_share
    if share is not None:
        limit = (
            f"{'within' if share <= AGREED_SHARE else 'more than'} "
            f"{format_percent(AGREED_SHARE, 0)}"
        )
        yield f"  unexplained: {format_percent(share, 2)} of the bill, {limit}"


def _render_remarks(
    found: Reconciliation, dollars: Callable[[Decimal | float | None], str]
) -> Iterator[str]:
    for instance_id, billed in sorted(found.billed.items()):
        if billed.elsewhere_usd:
            yield (
                f"  · {instance_id}: {dollars(billed.elsewhere_usd)} more at other times, not "
                "for this job"
            )
    yield from (f"  · {note}" for note in found.notes)
    for instance_id in found.shared:
        yield f"  · {instance_id}: nodes of the job ran on it at once and divided its price"
    if found.repeated_lines:
        if found.repeated_lines > 1:
            lines = f"{found.repeated_lines} lines were"
        else:
            lines = "1 line was"
        yield f"  · {lines} given twice, as deliveries of one report repeat them, and counted once"
    for kind, amount in sorted(found.other_usd.items()):
        counted = "which the ledger does not count"
        if kind == "storage" and found.billed_volumes_usd and found.volumes_usd:
            counted = (
                f"{dollars(found.billed_volumes_usd)} of them of EBS, for which the ledger "
                f"estimates {dollars(found.volumes_usd)}"
            )
        yield f"  · {kind}: {dollars(amount)} in lines of its instances or with its tag, {counted}"
    if found.volumes_usd and not found.billed_volumes_usd:
        yield (
            f"  · volumes: {dollars(found.volumes_usd)} in the ledger, estimated: no EBS line has "
            f"the tag {found.job_tag}, as AWS Batch puts no tags of a job on volumes"
        )
    if found.unknown:
        yield (
            "  ! unknown instances cannot be joined with a bill; fix: let containers reach the "
            "metadata service (HttpPutResponseHopLimit 2), or set EBBFLOW_INSTANCE_ID, "
            "EBBFLOW_INSTANCE_TYPE and EBBFLOW_ZONE"
        )


def _wrap(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _reconcile(arguments: argparse.Namespace) -> int:
    """Print the reconciliation.

    Return exit code 0 if ledger and bill agree and there are no faults, else 1.
    """
    if all(map(is_allocation, arguments.bill)):
        events = read_job(arguments.job, arguments.store)
        allocations = [
            allocation for path in arguments.bill for allocation in read_allocations(path)
        ]
        attempts = compare_allocations(events, allocations)
        print(render_allocations(events, attempts))
        if attempts and all(attempt.agrees for attempt in attempts):
            return 0
        return 1
    if all(map(is_daily_costs, arguments.bill)):
        return _reconcile_days(arguments)
    lines = (
        line
        for number, path in enumerate(arguments.bill)
        for line in read_bill(path, delivery=number)
    )
    others = [read_job(job, arguments.store) for job in arguments.also]
    found = reconcile(
        read_job(arguments.job, arguments.store), lines, job_tag=arguments.tag, others=others
    )
    print(
        json.dumps(found.to_json(), indent=1, allow_nan=False) if arguments.json else render(found)
    )
    if found.agrees:
        return 0
    return 1


def _reconcile_days(arguments: argparse.Namespace) -> int:
    """Compare the job with Cost Explorer's daily costs, and return the exit code."""
    events = read_job(arguments.job, arguments.store)
    code = 0
    for path in arguments.bill:
        costs = read_daily_costs(path)
        days = compare_days(events, costs, job_tag=arguments.tag)
        print(render_days(events[0].job if events else "", costs, days))
        if not days or any(day.fault for day in days):
            code = 1
    return code
