"""Where every paid rank-second went, and what it cost: `fold` turns a job's events into a `Ledger` that adds up.

The identity: paid time is what the agents say their nodes lived, times the node's ranks. The ranks' own intervals
divide it into classes; a rank's time before its process began is start-up, after its last sign of life it is an
interruption (or shutdown, when the generation ended as meant), and what no interval covers is `unattributed`.
Dollars are the plan's price of a node, shared by its ranks: exact at that price, and no invoice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from cost.generations import Generation, read_generations
from cost.money import apportion, rounded
from cost.timeline import MICRO, NodeTime, paid_nodes, rank_times
from infra.events import PLAN, STEP, Event
from infra.ledger_classes import LedgerClass

MEASURED = "measured"
ESTIMATED = "estimated"
SIMULATED = "simulated"
UNPRICED = "unpriced"


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
    clean_on_demand_usd: the useful work alone at the on-demand price of the same nodes, see `fold`; None: no price.
    """

    lines: tuple[LedgerLine, ...]
    paid_microseconds: int
    total_usd: Decimal
    price_kind: str
    clean_on_demand_usd: Decimal | None
    redone_steps: int

    @property
    def paid_rank_seconds(self) -> float:
        return self.paid_microseconds / MICRO

    @property
    def unattributed_share(self) -> float:
        """Of the paid rank-seconds, 0 to 1."""
        found = sum(line.rank_microseconds for line in self.lines if line.ledger_class == LedgerClass.UNATTRIBUTED)
        return found / self.paid_microseconds if self.paid_microseconds else 0.0


@dataclass(frozen=True)
class _Price:
    """Dollars per node and hour, as the plan in force gave them."""

    usd_per_hour: Decimal
    on_demand_usd_per_hour: Decimal | None
    kind: str


# What on-demand capacity without interruptions would not have needed. Start-ups count once, in `_clean`.
_ONLY_INTERRUPTED = frozenset(
    {LedgerClass.REDONE_STEP, LedgerClass.INTERRUPTION, LedgerClass.HANG, LedgerClass.RESTORE, LedgerClass.UNATTRIBUTED}
)


def fold(events: Sequence[Event], *, running: bool = False) -> Ledger:
    """The ledger of a job from its events, in any order. Works for any part of a log that begins at its beginning.

    `clean_on_demand_usd` is what the same useful work would have cost on-demand without any interruption: all classes
    but redone steps, interruptions, hangs, restores and unattributed time, and start-up and shutdown of the newest
    generation only. Leaving them out makes savings smaller, never larger.

    running: the job is still going on (see `read_generations`). Raises LedgerError when a rank's intervals overlap by
    more than 0.5 % of its paid time and 50 ms.
    """
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    generations = read_generations(ordered, running=running)
    newest = max(generations, default=0)
    micros: dict[LedgerClass, int] = {}
    usd: dict[LedgerClass, Decimal] = {}
    estimated: set[LedgerClass] = set()
    clean: Decimal | None = Decimal(0)
    paid = 0
    nodes = paid_nodes(ordered)
    plans = [event for event in ordered if event.name == PLAN and event.data.get("chosen")]
    for node in nodes:
        price = _price(plans, node)
        per_rank = Decimal(3600) * len(node.ranks) * MICRO
        for rank in rank_times(node, generations[node.generation]):
            paid += rank.paid
            estimated |= rank.estimated
            for kind, spent in rank.classes.items():
                micros[kind] = micros.get(kind, 0) + spent
                usd[kind] = usd.get(kind, Decimal(0)) + price.usd_per_hour * spent / per_rank
            clean = _clean(clean, price, rank.classes, per_rank, node.generation == newest)
    return Ledger(
        lines=_lines(micros, usd, estimated),
        paid_microseconds=paid,
        total_usd=rounded(sum(usd.values(), Decimal(0))),
        price_kind=_price(plans, nodes[-1]).kind if nodes else UNPRICED,
        clean_on_demand_usd=None if clean is None else rounded(clean),
        redone_steps=_redone_steps(ordered, generations),
    )


def _lines(
    micros: dict[LedgerClass, int], usd: dict[LedgerClass, Decimal], estimated: set[LedgerClass]
) -> tuple[LedgerLine, ...]:
    kinds = [kind for kind in LedgerClass if micros.get(kind)]
    amounts = apportion([usd[kind] for kind in kinds])
    return tuple(
        LedgerLine(
            ledger_class=kind,
            rank_microseconds=micros[kind],
            usd=amount,
            kind=ESTIMATED if kind in estimated else MEASURED,
        )
        for kind, amount in zip(kinds, amounts, strict=True)
    )


def _price(plans: list[Event], node: NodeTime) -> _Price:
    """The price of the last plan made before the node started, or of the first plan at all."""
    if not plans:
        return _Price(Decimal(0), None, UNPRICED)
    before = [event for event in plans if event.t_wall <= node.started_wall]
    plan = (before or plans[:1])[-1].data
    chosen: dict[str, Any] = plan["chosen"]
    on_demand = chosen.get("on_demand_usd_per_hour")
    return _Price(
        # As quoted: not through a float, where a plan has it.
        usd_per_hour=Decimal(chosen.get("quoted_usd_per_hour") or str(chosen["usd_per_hour"])),
        on_demand_usd_per_hour=None if on_demand is None else Decimal(str(on_demand)),
        kind=SIMULATED if plan.get("simulated") else str(chosen.get("price_kind", "recorded")),
    )


def _clean(
    so_far: Decimal | None, price: _Price, classes: dict[LedgerClass, int], per_rank: Decimal, newest: bool
) -> Decimal | None:
    if so_far is None or price.on_demand_usd_per_hour is None:
        return None
    left_out = set(_ONLY_INTERRUPTED)
    if not newest:
        left_out |= {LedgerClass.STARTUP, LedgerClass.SHUTDOWN}
    spent = sum(micros for kind, micros in classes.items() if kind not in left_out)
    return so_far + price.on_demand_usd_per_hour * spent / per_rank


def _redone_steps(events: Sequence[Event], generations: dict[int, Generation]) -> int:
    """Step executions that were thrown away. All ranks execute a step together, so each (generation, step) is one."""
    executed = {(event.generation, event.step) for event in events if event.name == STEP and event.step is not None}
    return sum(not generations[generation].keeps(step) for generation, step in executed)


def spent_usd(events: Sequence[Event]) -> float:
    """What the job has cost so far, in dollars: the `spent_usd` of the next attempt's terms."""
    return float(fold(events).total_usd)
