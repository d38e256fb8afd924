"""Ledger of a job: the use of every paid rank-second, and its cost.

Paid time is the time that agents recorded for their nodes, plus the time that only AWS Batch
reports, times the ranks of each node. The intervals that ranks recorded divide it into classes.
Time before a rank's process started is start-up. Time after its last event is an interruption, or
shutdown if the generation ended as planned. Time in no interval is `unattributed`. The price of the
node at each moment (`cost.ledger.pricing`), divided by its ranks, gives the dollars. The dollars
are exact at those prices, but AWS may invoice a different amount.

The same seconds and dollars are also summed by cause. In that sum, an interruption includes the
start-up and the redone steps that it made necessary.

Root volumes of EC2 nodes are a class without seconds: for all paid time, the price that the plan
states for them. The dollars of a cause include those of its time.

Like the events, the ledger is append-only: later events add to it, and can only turn completed
steps into redone ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from ebbflow.core.event_payloads import (
    BudgetPayload,
    ConfiguredPayload,
    NodeHeartbeatPayload,
)
from ebbflow.core.events import (
    STEP,
    Event,
    LedgerClass,
    find_last_event,
    is_event,
    select_events,
)
from ebbflow.cost.amounts import apportion, round_amount
from ebbflow.cost.ledger.bills import (
    NodeBill,
    UnreportedBill,
    compute_bills,
    compute_rank_charges,
    merge_batch_status,
)
from ebbflow.cost.ledger.generations import RecordedGeneration, read_generations
from ebbflow.cost.ledger.pricing import UNPRICED
from ebbflow.cost.ledger.timeline import MICRO, compute_rank_times

MEASURED = "measured"
ESTIMATED = "estimated"
WORK = "useful work"
_CAUSES = {
    LedgerClass.USEFUL_STEP: WORK,
    LedgerClass.DATA_WAIT: "waiting for data",
    LedgerClass.EVALUATION: "evaluation",
    LedgerClass.PROFILING: "profiling",
    LedgerClass.CHECKPOINT_STALL: "saves",
    LedgerClass.SHUTDOWN: "start and end",
    LedgerClass.SCALE_DOWN: "start and end",
    LedgerClass.SCRIPT: "script",
    LedgerClass.UNATTRIBUTED: "unattributed",
    LedgerClass.MINIMUM_CHARGE: "minimum charge",
    LedgerClass.HANG: "interruption: hang",
    LedgerClass.SKIPPED_STEP: "steps left out",
}


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """Paid time and dollars of one `LedgerClass`.

    `kind` is "estimated" if some time was inferred, else "measured".
    """

    ledger_class: LedgerClass
    rank_microseconds: int
    usd: Decimal
    kind: str

    @property
    def rank_seconds(self) -> float:
        return self.rank_microseconds / MICRO


@dataclass(frozen=True, kw_only=True)
class CauseLine:
    """Paid time and dollars of one cause, such as "saves" or "interruption: hang"."""

    cause: str
    rank_microseconds: int
    usd: Decimal


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Paid time and dollars of a job.

    The seconds and dollars of the lines sum to the totals exactly.

    Attributes:
        lines: One line for each class that has any time or dollars, in the order of `LedgerClass`.
        price_kind: Source of the prices: "recorded …", "estimated …", "simulated" (a local run with
            assumed prices) or "unpriced" (no plan).
        useful_on_demand_usd: Cost of the useful step time at the on-demand price of the same nodes;
            None if unknown.
        same_on_demand_usd: Cost of the same machines on demand: all time at the on-demand price,
            except the time that interruptions and idle pauses added; 0 without useful work, None if
            that price is unknown.
        causes: The same seconds and dollars, divided by cause.
        cells: The same seconds and dollars, divided by cause and class.
        nodes: The cost of each node of each generation.
        unreported: The cost of nodes of Batch jobs that recorded no event.
        owner, project: The configured names; empty if not set.
    """

    lines: tuple[LedgerLine, ...]
    paid_microseconds: int
    total_usd: Decimal
    price_kind: str
    useful_on_demand_usd: Decimal | None
    redone_steps: int
    causes: tuple[CauseLine, ...] = ()
    cells: tuple[
        tuple[str, LedgerClass, int, Decimal], ...
    ] = ()  # cause, class, rank-microseconds, exact dollars
    nodes: tuple[NodeBill, ...] = field(default=(), compare=False)
    unreported: tuple[UnreportedBill, ...] = field(default=(), compare=False)
    owner: str = ""
    project: str = ""
    same_on_demand_usd: Decimal | None = None

    @property
    def paid_rank_seconds(self) -> float:
        return self.paid_microseconds / MICRO

    @property
    def unattributed_share(self) -> float:
        found = sum(
            line.rank_microseconds
            for line in self.lines
            if line.ledger_class == LedgerClass.UNATTRIBUTED
        )
        if self.paid_microseconds:
            return found / self.paid_microseconds
        return 0.0


def fold(events: Sequence[Event], *, running: bool = False) -> Ledger:
    """Compute the ledger of a job from its events, in any order.

    The events may be any prefix of the event log.

    `useful_on_demand_usd` leaves out start-up, saves, evaluation and waiting for data, so that
    savings are never overstated.

    Args:
        running: Whether the job is still running (see `read_generations`).

    Raises:
        LedgerError: The intervals of a rank exceed its paid time by more than 0.5 % and by more
            than 50 ms.
    """
    ordered = _order_by_time(events)
    generations = read_generations(ordered, running=running)
    bills = compute_bills(ordered, generations)
    sums = _Sums(merge_batch_status(generations, bills.nodes))
    for bill in bills.nodes:
        sums.add(bill)
    for bill in bills.unreported:
        sums.add_unreported(bill)
    total_usd = round_amount(sum(sums.usd.values(), Decimal(0)))
    all_bills = [*bills.unreported, *bills.nodes]
    return Ledger(
        lines=_make_lines(sums, total_usd),
        paid_microseconds=sum(sums.micros.values()),
        total_usd=total_usd,
        price_kind=all_bills[-1].price.kind if all_bills else UNPRICED,
        useful_on_demand_usd=None if sums.useful is None else round_amount(sums.useful),
        same_on_demand_usd=None if sums.useful is None else round_amount(sums.same_machines_usd),
        redone_steps=_count_redone_steps(ordered, generations),
        causes=_make_cause_lines(sums, total_usd),
        cells=tuple(
            (*key, sums.cell_micros[key], usd)
            for key, usd in sums.cell_usd.items()
            if sums.cell_micros[key] or usd
        ),
        nodes=bills.nodes,
        unreported=bills.unreported,
        owner=_read_setting(ordered, "cost.owner"),
        project=_read_setting(ordered, "cost.project"),
    )


def compute_spent_usd(events: Sequence[Event]) -> float:
    """Compute the dollars that the job has cost so far, so that its next attempt spends only the
    rest of the budget.

    The result depends only on the paid time of nodes. Therefore overlapping intervals of a rank,
    which `fold` rejects, do not matter here.
    """
    ordered = _order_by_time(events)
    bills = compute_bills(ordered, read_generations(ordered))
    return float(
        round_amount(sum((bill.usd for bill in (*bills.nodes, *bills.unreported)), Decimal(0)))
    )


def last_notified_threshold(events: Sequence[Event], budget_usd: float | None) -> float:
    """Return the highest share of the budget (0 to 1) for which the job sent a notification; 0 if
    it sent none.

    Only `budget` events with the current budget count, so notifications start anew after a change
    of the budget.
    """
    reported = [event.payload for event in select_events(events, BudgetPayload)]
    return max(
        (budget.threshold for budget in reported if budget.budget_usd == budget_usd), default=0.0
    )


def _order_by_time(events: Sequence[Event]) -> list[Event]:
    return sorted(events, key=lambda event: (event.t_wall, event.t_mono))


class _Sums:
    """Microseconds and dollars by class and by cause, added up node by node."""

    def __init__(self, generations: dict[int, RecordedGeneration]) -> None:
        self._generations = generations
        self._start_causes = _find_start_causes(generations)
        self.cause_micros: dict[str, int] = {}
        self.cause_usd: dict[str, Decimal] = {}
        self.cell_micros: dict[tuple[str, LedgerClass], int] = {}
        self.cell_usd: dict[tuple[str, LedgerClass], Decimal] = {}
        self.micros: dict[LedgerClass, int] = {}
        self.usd: dict[LedgerClass, Decimal] = {}
        self.estimated: set[LedgerClass] = set()
        # Useful steps at the on-demand price; None once a price is unknown
        self.useful: Decimal | None = Decimal(0)
        # What interruptions did not cause, at the on-demand price
        self._undisturbed = Decimal(0)

    @property
    def same_machines_usd(self) -> Decimal:
        """Cost of the same machines on demand and without interruptions; 0 without useful work."""
        return self._undisturbed if self.useful else Decimal(0)

    def add(self, bill: NodeBill) -> None:
        node = bill.node
        curve = bill.curve
        volume = bill.volume_curve
        on_demand = bill.on_demand_curve
        generation = self._generations[node.generation]
        start_cause = self._start_causes[generation.number]
        for rank in compute_rank_times(node, generation):
            self.estimated |= rank.estimated
            for kind, usd in compute_rank_charges(node, rank, curve).items():
                self._add(kind, _find_cause(kind, generation, start_cause), rank.classes[kind], usd)
            for kind, usd in compute_rank_charges(node, rank, volume).items():
                self._add_volume(bill, _find_cause(kind, generation, start_cause), usd)
            if on_demand is None:
                self.useful = None
            elif self.useful is not None:
                charges = compute_rank_charges(node, rank, on_demand)
                self.useful += charges.get(LedgerClass.USEFUL_STEP, Decimal(0))
                self._undisturbed += sum(
                    (
                        usd
                        for kind, usd in charges.items()
                        if _is_undisturbed(_find_cause(kind, generation, start_cause))
                    ),
                    Decimal(0),
                )
        for extra in bill.extras:
            kind = extra.ledger_class
            self.estimated.add(kind)
            cause = _find_cause(kind, generation, start_cause)
            if bill.price.on_demand_usd_per_hour is not None and _is_undisturbed(cause):
                hours = Decimal(extra.micros) / (3600 * MICRO)
                self._undisturbed += bill.price.on_demand_usd_per_hour * hours
            self._add(kind, cause, extra.micros * len(node.ranks), bill.extra_usd(extra))
            self._add_volume(bill, cause, bill.extra_volume_usd(extra))

    def add_unreported(self, bill: UnreportedBill) -> None:
        ended = bill.job.cause.replace("_", " ")
        if ended == "ended":
            cause = "start and end"
        else:
            cause = f"interruption: {ended} before the first event"
        self._add(LedgerClass.STARTUP, cause, bill.rank_microseconds, bill.machine_usd)
        self._add_volume_usd(cause, bill.volume_usd)

    def _add_volume(self, bill: NodeBill, cause: str, usd: Decimal) -> None:
        self._add_volume_usd(cause, usd)
        if bill.price.on_demand_usd_per_hour is not None and _is_undisturbed(cause):
            self._undisturbed += usd

    def _add_volume_usd(self, cause: str, usd: Decimal) -> None:
        if usd:
            self.estimated.add(LedgerClass.VOLUMES)
            self._add(LedgerClass.VOLUMES, cause, 0, usd)

    def _add(self, kind: LedgerClass, cause: str, micros: int, usd: Decimal) -> None:
        self.cause_micros[cause] = self.cause_micros.get(cause, 0) + micros
        self.cause_usd[cause] = self.cause_usd.get(cause, Decimal(0)) + usd
        cell = cause, kind
        self.cell_micros[cell] = self.cell_micros.get(cell, 0) + micros
        self.cell_usd[cell] = self.cell_usd.get(cell, Decimal(0)) + usd
        self.micros[kind] = self.micros.get(kind, 0) + micros
        self.usd[kind] = self.usd.get(kind, Decimal(0)) + usd


def _is_undisturbed(cause: str) -> bool:
    """Return whether time of this cause would also be paid without interruptions and pauses."""
    return cause != "idle" and not cause.startswith("interruption")


def _find_start_causes(generations: Mapping[int, RecordedGeneration]) -> dict[int, str]:
    """Name the interruption that made each generation's start necessary, by generation number.

    The text is empty for the first generation, and after a generation that ended as planned.
    """
    found = {}
    before = ""
    for number in sorted(generations):
        found[number] = before
        if generations[number].unplanned:
            before = _describe_interruption(generations[number])
        else:
            before = ""
    return found


def _describe_interruption(generation: RecordedGeneration) -> str:
    return f"interruption: {str(generation.reason or 'no end recorded').replace('_', ' ')}"


def _find_cause(kind: LedgerClass, generation: RecordedGeneration, start_cause: str) -> str:
    """Return the cause to which a generation's time of the class `kind` is charged.

    Redone steps and cut-off time are charged to the interruption that ended the generation.
    Start-up and restore are charged to the interruption before the generation (`start_cause`).
    """
    if kind in (LedgerClass.REDONE_STEP, LedgerClass.INTERRUPTION):
        return _describe_interruption(generation)
    if kind is LedgerClass.IDLE:
        if generation.unplanned:
            return _describe_interruption(generation)
        return "idle"
    if kind is LedgerClass.SCALE_DOWN and generation.unplanned:
        return _describe_interruption(generation)
    if kind in (LedgerClass.BOOT, LedgerClass.STARTUP, LedgerClass.RESTORE):
        return start_cause or "start and end"
    return _CAUSES[kind]


def _make_lines(sums: _Sums, total_usd: Decimal) -> tuple[LedgerLine, ...]:
    kinds = [kind for kind in LedgerClass if sums.micros.get(kind) or sums.usd.get(kind)]
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


def _make_cause_lines(sums: _Sums, total_usd: Decimal) -> tuple[CauseLine, ...]:
    """Make a line for each cause: useful work first, then the other causes by dollars, highest
    first.

    The dollars of the lines sum to the rounded total.
    """
    names = sorted(sums.cause_micros, key=lambda name: (name != WORK, -sums.cause_usd[name], name))
    amounts = apportion([sums.cause_usd[name] for name in names], total=total_usd)
    return tuple(
        CauseLine(cause=name, rank_microseconds=sums.cause_micros[name], usd=amount)
        for name, amount in zip(names, amounts, strict=True)
        if sums.cause_micros[name]
    )


def _count_redone_steps(events: Sequence[Event], generations: dict[int, RecordedGeneration]) -> int:
    """Count the discarded step executions.

    A step counts once per generation, because all ranks execute it together.

    A killed rank has not recorded its last steps, but its agent knows which was the last one. All
    steps up to it were executed.
    """
    executed = {
        (event.generation, event.step)
        for event in events
        if event.name == STEP and event.step is not None
    }
    for event in events:
        if is_event(event, NodeHeartbeatPayload):
            last = event.payload.trained
        else:
            last = None
        generation = generations.get(event.generation)
        if last is not None and generation is not None:
            executed |= {
                (generation.number, step) for step in range(generation.parent_step + 1, last + 1)
            }
    return sum(not generations[number].keeps(step) for number, step in executed)


def _read_setting(events: Sequence[Event], key: str) -> str:
    """Return a value of the newest recorded configuration as text; empty if it was not set or not
    recorded.
    """
    configured = find_last_event(events, ConfiguredPayload)
    if configured is None:
        return ""
    return next(
        (
            str(setting.value)
            for setting in configured.payload.settings
            if setting.key == key and setting.value is not None
        ),
        "",
    )
