"""Where every paid rank-second went, and what it cost: `fold` turns a job's events into a `Ledger`.

The identity: paid time is what the agents say their nodes lived, and what AWS Batch says beyond that of its jobs, times
the node's ranks. The ranks' own intervals
divide it into classes; a rank's time before its process began is start-up, after its last sign of life it is an
interruption (or shutdown, when the generation ended as meant), and what no interval covers is `unattributed`.
Dollars are the node's price at each moment (`cost.ledger.pricing`), shared by its ranks: exact at those prices, and
no invoice.
The ledger is append-only as the events are: a later event adds to it, and only ever turns steps into redone ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from ebbflow.cost.amounts import apportion, round_amount
from ebbflow.cost.ledger.bills import (
    Bills,
    NodeBill,
    UnreportedBill,
    compute_bills,
    compute_rank_charges,
    merge_batch_status,
)
from ebbflow.cost.ledger.generations import RecordedGeneration, read_generations
from ebbflow.cost.ledger.pricing import SIMULATED as SIMULATED
from ebbflow.cost.ledger.pricing import UNPRICED
from ebbflow.cost.ledger.timeline import MICRO, compute_rank_times
from ebbflow.infra.events import BUDGET, CONFIGURED, STEP, Event, LedgerClass

MEASURED = "measured"
ESTIMATED = "estimated"


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """One class. kind: whether its seconds were measured or are partly estimated."""

    ledger_class: LedgerClass
    rank_microseconds: int
    usd: Decimal
    kind: str

    @property
    def rank_seconds(self) -> float:
        return self.rank_microseconds / MICRO


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """All classes with any time, in the order of `LedgerClass`. Their seconds and dollars sum to the totals exactly.

    price_kind: "recorded …", "estimated …", "simulated" (a local run, priced as if) or "unpriced" (no plan is known).
    useful_on_demand_usd: the useful work alone at the on-demand price of the same nodes, see `fold`; None: no price.
    causes: the same seconds and dollars by what they were paid for (`ebbflow.cost.ledger.ledger`).
    nodes: what each node of each generation cost; silent: the nodes of Batch jobs that never spoke.
    owner, project: who pays, as configured; empty: nobody said.
    """

    lines: tuple[LedgerLine, ...]
    paid_microseconds: int
    total_usd: Decimal
    price_kind: str
    useful_on_demand_usd: Decimal | None
    redone_steps: int
    causes: tuple[CauseLine, ...] = ()
    nodes: tuple[NodeBill, ...] = field(default=(), compare=False)
    silent: tuple[UnreportedBill, ...] = field(default=(), compare=False)
    owner: str = ""
    project: str = ""

    @property
    def paid_rank_seconds(self) -> float:
        return self.paid_microseconds / MICRO

    @property
    def unattributed_share(self) -> float:
        """Of the paid rank-seconds, 0 to 1."""
        found = sum(line.rank_microseconds for line in self.lines if line.ledger_class == LedgerClass.UNATTRIBUTED)
        return found / self.paid_microseconds if self.paid_microseconds else 0.0


def fold(events: Sequence[Event], *, running: bool = False) -> Ledger:
    """The ledger of a job from its events, in any order. Works for any part of a log that begins at its beginning.

    `useful_on_demand_usd` is the useful step time alone at the on-demand price of the same nodes. Start-up, saves,
    evaluation and waiting for data are left out, so that savings are understated and never overstated.

    running: the job is still going on (see `read_generations`). Raises LedgerError when a rank's intervals overlap by
    more than 0.5 % of its paid time and 50 ms.
    """
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    generations = read_generations(ordered, running=running)
    bills = compute_bills(ordered, generations)
    sums = _Sums(merge_batch_status(generations, bills.nodes))
    for bill in bills.nodes:
        sums.add(bill)
    for silent in bills.silent:
        sums.add_silent(silent)
    total_usd = round_amount(sum(sums.usd.values(), Decimal(0)))
    return Ledger(
        lines=_lines(sums, total_usd),
        paid_microseconds=sum(sums.micros.values()),
        total_usd=total_usd,
        price_kind=_price_kind(bills),
        useful_on_demand_usd=None if sums.useful is None else round_amount(sums.useful),
        redone_steps=_redone_steps(ordered, generations),
        causes=build_cause_lines(sums.cause_micros, sums.cause_usd, total_usd),
        nodes=bills.nodes,
        silent=bills.silent,
        owner=read_setting(ordered, "cost.owner"),
        project=read_setting(ordered, "cost.project"),
    )


def read_setting(events: Sequence[Event], key: str) -> str:
    """A value of the newest recorded configuration, as text; empty when it was not set or nobody recorded it."""
    configured = next((event for event in reversed(events) if event.name == CONFIGURED), None)
    rows = [] if configured is None else configured.data.get("settings", [])
    return next((str(row["value"]) for row in rows if row["key"] == key and row["value"] is not None), "")


def _price_kind(bills: Bills) -> str:
    known = [*bills.silent, *bills.nodes]
    return known[-1].price.kind if known else UNPRICED


class _Sums:
    """Microseconds and dollars by class and by cause, added up node by node."""

    def __init__(self, generations: dict[int, RecordedGeneration]) -> None:
        self._generations = generations
        self._started_by = find_start_causes(generations)
        self.cause_micros: dict[str, int] = {}
        self.cause_usd: dict[str, Decimal] = {}
        self.micros: dict[LedgerClass, int] = {}
        self.usd: dict[LedgerClass, Decimal] = {}
        self.estimated: set[LedgerClass] = set()
        self.useful: Decimal | None = Decimal(0)

    def add(self, bill: NodeBill) -> None:
        node, curve, on_demand = bill.node, bill.curve, bill.on_demand_curve
        generation = self._generations[node.generation]
        for rank in compute_rank_times(node, generation):
            self.estimated |= rank.estimated
            for kind, usd in compute_rank_charges(node, rank, curve).items():
                self._spend(generation, kind, rank.classes[kind], usd)
            usual = None if on_demand is None else compute_rank_charges(node, rank, on_demand)
            self.useful = _useful(self.useful, usual)
        for extra in bill.extras:
            self.estimated.add(extra.ledger_class)
            spent = extra.micros * len(node.ranks)
            self._spend(generation, extra.ledger_class, spent, bill.extra_usd(extra))

    def add_silent(self, bill: UnreportedBill) -> None:
        self._add(LedgerClass.STARTUP, find_batch_cause(bill.job.cause), bill.rank_microseconds, bill.usd)

    def _spend(self, generation: RecordedGeneration, kind: LedgerClass, micros: int, usd: Decimal) -> None:
        self._add(kind, find_cause(kind, generation, self._started_by[generation.number]), micros, usd)

    def _add(self, kind: LedgerClass, cause: str, micros: int, usd: Decimal) -> None:
        self.cause_micros[cause] = self.cause_micros.get(cause, 0) + micros
        self.cause_usd[cause] = self.cause_usd.get(cause, Decimal(0)) + usd
        self.micros[kind] = self.micros.get(kind, 0) + micros
        self.usd[kind] = self.usd.get(kind, Decimal(0)) + usd


def _lines(sums: _Sums, total_usd: Decimal) -> tuple[LedgerLine, ...]:
    kinds = [kind for kind in LedgerClass if sums.micros.get(kind)]
    amounts = apportion([sums.usd[kind] for kind in kinds], total=total_usd)
    return tuple(
        LedgerLine(
            ledger_class=kind,
            rank_microseconds=sums.micros[kind],
            usd=amount,
            kind=ESTIMATED if kind in sums.estimated else MEASURED,
        )
        for kind, amount in zip(kinds, amounts, strict=True)
    )


def _useful(so_far: Decimal | None, usual: dict[LedgerClass, Decimal] | None) -> Decimal | None:
    """usual: dollars of one rank by class at the on-demand price; None: not on record."""
    if so_far is None or usual is None:
        return None
    return so_far + usual.get(LedgerClass.USEFUL_STEP, Decimal(0))


def _redone_steps(events: Sequence[Event], generations: dict[int, RecordedGeneration]) -> int:
    """Step executions that were thrown away. All ranks execute a step together, so each (generation, step) is one."""
    executed = {(event.generation, event.step) for event in events if event.name == STEP and event.step is not None}
    return sum(not generations[generation].keeps(step) for generation, step in executed)


def compute_spent_usd(events: Sequence[Event]) -> float:
    """What the job has cost so far, in dollars: the `compute_spent_usd` of the next attempt's terms.

    From the nodes' paid time alone, so that a rank's contradictory intervals cannot hide what was spent.
    """
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    return float(round_amount(compute_bills(ordered, read_generations(ordered)).usd))


def last_notified_threshold(events: Sequence[Event], budget_usd: float | None) -> float:
    """The highest share of this very budget that was already told of as reached; another budget begins anew."""
    told = [event.data for event in events if event.name == BUDGET]
    return max((data["threshold"] for data in told if data.get("budget_usd") == budget_usd), default=0.0)


WORK = "useful work"
_OWN = {
    LedgerClass.USEFUL_STEP: WORK,
    LedgerClass.DATA_WAIT: "waiting for data",
    LedgerClass.EVALUATION: "evaluation",
    LedgerClass.CHECKPOINT_STALL: "saves",
    LedgerClass.SHUTDOWN: "start and end",
    LedgerClass.UNATTRIBUTED: "unattributed",
    LedgerClass.MINIMUM_CHARGE: "minimum charge",
    LedgerClass.HANG: "interruption: hang",
    LedgerClass.SKIPPED_STEP: "steps left out",
}
# What only a generation's end has made necessary: its own end for the first two, the end before it for the others.
_OF_ITS_END = (LedgerClass.REDONE_STEP, LedgerClass.INTERRUPTION)
_OF_THE_END_BEFORE = (LedgerClass.STARTUP, LedgerClass.RESTORE, LedgerClass.IDLE)
_NOT_RECORDED = "lost without a word"


@dataclass(frozen=True, kw_only=True)
class CauseLine:
    """One cause with its paid time and dollars, as the ledger's lines have them by class."""

    cause: str
    rank_microseconds: int
    usd: Decimal


def find_start_causes(generations: Mapping[int, RecordedGeneration]) -> dict[int, str]:
    """For each generation, the cause of its having to start: the unplanned end before it, or none."""
    found, before = {}, ""
    for number in sorted(generations):
        found[number] = before
        before = describe_interruption(generations[number]) if generations[number].unplanned else ""
    return found


def describe_interruption(generation: RecordedGeneration) -> str:
    return f"interruption: {str(generation.reason or _NOT_RECORDED).replace('_', ' ')}"


def find_cause(kind: LedgerClass, generation: RecordedGeneration, started_by: str) -> str:
    """started_by: as `find_start_causes` has it. A step redone after a planned end (a budget) was lost to that end."""
    if kind in _OF_ITS_END:
        return describe_interruption(generation)
    if kind is LedgerClass.IDLE:
        return describe_interruption(generation) if generation.unplanned else "idle"
    if kind in _OF_THE_END_BEFORE:
        return started_by or "start and end"
    return _OWN[kind]


def find_batch_cause(cause: str) -> str:
    """Of a Batch job that ended, as Batch tells it, before its agents said a word."""
    return "start and end" if cause == "ended" else f"interruption: {cause.replace('_', ' ')} before the first word"


def build_cause_lines(
    micros: Mapping[str, int], usd: Mapping[str, Decimal], total_usd: Decimal
) -> tuple[CauseLine, ...]:
    """Work first, then the dearest; their dollars sum to the rounded total."""
    names = sorted(micros, key=lambda name: (name != WORK, -usd[name], name))
    amounts = apportion([usd[name] for name in names], total=total_usd)
    return tuple(
        CauseLine(cause=name, rank_microseconds=micros[name], usd=amount)
        for name, amount in zip(names, amounts, strict=True)
        if micros[name]
    )
