"""The comparison itself: each instance of a job as the events metered it, beside what the bill says of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from cost.ledger.bills import NodeBill
from cost.ledger.instances import LONGEST_IDLE_SECONDS, by_instance
from cost.ledger.ledger import fold
from cost.ledger.pricing import SIMULATED
from cost.ledger.sharing import seconds_together
from cost.reconcile.bill import BillLine, tag_key
from cost.reconcile.repeats import Repeats
from infra.events import PLAN, Event

JOB_TAG = "ebbflow-job"
_HOUR = 3600.0


@dataclass(kw_only=True)
class Metered:
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
class Billed:
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
        """Uses in an hour that several files have lines of, which are not the same lines again (`Repeats`)."""
        return sum(len(files) > 1 for files in self.deliveries.values())

    def add(self, line: BillLine, job_tag: str) -> None:
        self.seconds += line.seconds
        self.deliveries.setdefault((line.start, line.end, line.usage_type, line.line_type), set()).add(line.delivery)
        self.spans[line.start, line.end] = self.spans.get((line.start, line.end), 0.0) + line.seconds
        self.usd += line.usd
        self.zones |= {line.zone} - {""}
        self.instance_types |= {line.instance_type} - {""}
        self.markets |= {line.market} - {""}
        self.tags |= {line.tags.get(tag_key(job_tag), "")} - {""}


@dataclass(kw_only=True)
class Account:
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
    metered: dict[str, Metered]
    billed: dict[str, Billed]
    orphans: dict[str, Billed]
    unknown: list[NodeBill]
    shared: list[str]
    other_usd: dict[str, Decimal]
    covers_until: float
    twice: int = 0


def compare(events: Sequence[Event], lines: Iterable[BillLine], *, job_tag: str = JOB_TAG) -> Account:
    """Join by instance id and hour: tags of a Batch job do not reach the lines of its EC2 instances by themselves.

    events: of one job. lines: of a whole account's report, read once and not kept. Raises LedgerError, and BillError
    for deliveries that contradict each other.
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
    repeats = Repeats()
    for line in lines:
        _take(account, line, repeats)
    return account


def _take(account: Account, line: BillLine, repeats: Repeats) -> None:
    account.synthetic |= line.synthetic
    account.covers_until = max(account.covers_until, line.end)
    tagged = line.tags.get(tag_key(account.job_tag)) == account.job
    mine = account.metered.get(line.resource_id)
    if not tagged and mine is None:
        return
    if repeats.again(line):
        account.twice += 1
    elif line.kind != "instance":
        if tagged:
            account.other_usd[line.kind] = account.other_usd.get(line.kind, Decimal(0)) + line.usd
    elif mine is not None:
        billed = account.billed.setdefault(mine.instance_id, Billed(instance_id=mine.instance_id))
        if _in_its_hours(line, mine):
            billed.add(line, account.job_tag)
        else:
            billed.elsewhere_usd += line.usd
    else:
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
            seconds=seconds_together(nodes) + sum(extra.seconds for bill in mine for extra in bill.extras),
            usd=sum((bill.usd for bill in mine), Decimal(0)),
            lost_ends=sum(not node.measured for node in nodes),
            usd_per_hour=(min(low for low, _ in bounds), max(high for _, high in bounds)),
        )
    return found


def _boot_seconds(machine: dict[str, Any]) -> float:
    return min(float(machine.get("uptime_seconds") or 0.0), LONGEST_IDLE_SECONDS)


def _shared(bills: Sequence[NodeBill]) -> list[str]:
    """Instances on which nodes of the job ran at once and divided its price."""
    of = {bill.node.instance_id for bill in bills if any(number > 1 for _, number in bill.parts)}
    return sorted(instance_id for instance_id in of if instance_id)
