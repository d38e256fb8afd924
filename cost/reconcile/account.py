"""The comparison itself: each instance of a job as the events metered it, beside what the bill says of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import pairwise
from typing import Any

from cost.ledger.instances import LONGEST_IDLE_SECONDS, by_instance
from cost.ledger.ledger import NodeBill, fold
from cost.ledger.pricing import SIMULATED
from cost.ledger.timeline import MICRO
from cost.reconcile.bill import BillLine, tag_key
from infra.events import PLAN, Event

JOB_TAG = "ebbflow-job"
_HOUR = 3600.0


@dataclass(kw_only=True)
class Metered:
    """One instance in the job's events. seconds, usd: of its nodes, pauses and minimum charge included.

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
class Billed:
    """One instance in the bill: the lines of the hours in which it was the job's."""

    instance_id: str
    seconds: float = 0.0
    usd: Decimal = Decimal(0)
    zones: set[str] = field(default_factory=set)
    instance_types: set[str] = field(default_factory=set)
    markets: set[str] = field(default_factory=set)
    tags: set[str] = field(default_factory=set)
    elsewhere_usd: Decimal = Decimal(0)

    def add(self, line: BillLine, job_tag: str) -> None:
        self.seconds += line.seconds
        self.usd += line.usd
        self.zones |= {line.zone} - {""}
        self.instance_types |= {line.instance_type} - {""}
        self.markets |= {line.market} - {""}
        self.tags |= {line.tags.get(tag_key(job_tag), "")} - {""}


@dataclass(kw_only=True)
class Account:
    """A job's two accounts side by side, before anything is explained.

    orphans: instances that carry the job's tag and are in none of its events. unknown: nodes whose instance nobody
    recorded. other_usd: tagged lines by kind (storage, transfer, other). covers_until: end of the bill's newest line.
    """

    job: str
    job_tag: str
    forecast_usd: float | None
    metered_usd: Decimal
    simulated: bool
    synthetic: bool
    metered: dict[str, Metered]
    billed: dict[str, Billed]
    orphans: dict[str, Billed]
    unknown: list[NodeBill]
    shared: list[str]
    other_usd: dict[str, Decimal]
    covers_until: float


def compare(events: Sequence[Event], lines: Iterable[BillLine], *, job_tag: str = JOB_TAG) -> Account:
    """Join by instance id and hour: tags of a Batch job do not reach the lines of its EC2 instances by themselves.

    events: of one job. lines: of a whole account's report, read once and not kept. Raises LedgerError.
    """
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    ledger = fold(ordered)
    metered = _metered(ledger.nodes)
    job = ordered[0].job if ordered else ""
    plan = next((event.data for event in ordered if event.name == PLAN and event.data.get("chosen")), None)
    account = Account(
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
    for line in lines:
        _take(account, line)
    return account


def _take(account: Account, line: BillLine) -> None:
    account.synthetic |= line.synthetic
    account.covers_until = max(account.covers_until, line.end)
    tagged = line.tags.get(tag_key(account.job_tag)) == account.job
    mine = account.metered.get(line.resource_id)
    if line.kind != "instance":
        if tagged:
            account.other_usd[line.kind] = account.other_usd.get(line.kind, Decimal(0)) + line.usd
    elif mine is not None:
        billed = account.billed.setdefault(mine.instance_id, Billed(instance_id=mine.instance_id))
        if _in_its_hours(line, mine):
            billed.add(line, account.job_tag)
        else:
            billed.elsewhere_usd += line.usd
    elif tagged:
        found = account.orphans.setdefault(line.resource_id, Billed(instance_id=line.resource_id))
        found.add(line, account.job_tag)


def _in_its_hours(line: BillLine, mine: Metered) -> bool:
    """From the hour of its boot to the one after the job left it: an instance ends a while after its work."""
    born = mine.start - mine.boot_seconds
    return line.end > born and line.start < (math.floor(mine.end / _HOUR) + 2) * _HOUR


def _metered(bills: Sequence[NodeBill]) -> dict[str, Metered]:
    of_node = {id(bill.node): bill for bill in bills}
    found = {}
    for instance_id, nodes in by_instance([bill.node for bill in bills]).items():
        mine = [of_node[id(node)] for node in nodes]
        pool = mine[0].price.pool
        start, end = nodes[0].started_wall, max(node.ended_wall for node in nodes)
        since = start - _boot_seconds(nodes[0].machine)
        bounds = [bill.price.curve.bounds(since, end) for bill in mine]
        found[instance_id] = Metered(
            instance_id=instance_id,
            machine=nodes[0].machine,
            market=str(nodes[0].machine.get("market") or (pool.market if pool else "")),
            start=start,
            end=end,
            seconds=sum(_seconds(bill) for bill in mine),
            usd=sum((bill.usd for bill in mine), Decimal(0)),
            lost_ends=sum(not node.measured for node in nodes),
            usd_per_hour=(min(low for low, _ in bounds), max(high for _, high in bounds)),
        )
    return found


def _boot_seconds(machine: dict[str, Any]) -> float:
    return min(float(machine.get("uptime_seconds") or 0.0), LONGEST_IDLE_SECONDS)


def _seconds(bill: NodeBill) -> float:
    return (bill.node.paid_micros + sum(extra.micros for extra in bill.extras)) / MICRO


def _shared(bills: Sequence[NodeBill]) -> list[str]:
    """Instances on which two nodes of the job ran at once: metered twice, billed once."""
    found = []
    for instance_id, nodes in by_instance([bill.node for bill in bills]).items():
        if any(later.started_wall < earlier.ended_wall - 1.0 for earlier, later in pairwise(nodes)):
            found.append(instance_id)
    return found
