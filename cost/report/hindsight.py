"""What the same work would have cost with the whole recorded future known: the job's own optimum, and the regret.

The pools are those of the job's own shape (instance type and number of nodes) whose prices its events hold, in every
recorded zone, and on-demand; each is taken to have had capacity all the time, since nobody recorded where it had not.
So the optimum is a lower bound, and the regret an upper one. The work is the time in kept steps, their data,
evaluations and saves; each start costs what the job's first start took. Where prices never changed the cheapest pool
is the optimum; else that of the simulator's dynamic programme (`cost.simulate.optimum`) over the recorded prices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any

from ebbflow.cost.ledger.bills import NodeBill, machines
from ebbflow.cost.ledger.generations import Generation
from ebbflow.cost.ledger.ledger import Ledger
from ebbflow.cost.ledger.price_curve import PriceCurve
from ebbflow.cost.ledger.pricing import PoolName, Pricing, pool_of
from ebbflow.cost.ledger.timeline import MICRO, rank_times
from ebbflow.cost.money import USD_DECIMALS
from ebbflow.infra.events import PLAN, Event
from ebbflow.infra.ledger_classes import LedgerClass

_WORK = (LedgerClass.USEFUL_STEP, LedgerClass.DATA_WAIT, LedgerClass.EVALUATION, LedgerClass.CHECKPOINT_STALL)
_START = (LedgerClass.STARTUP, LedgerClass.SHUTDOWN)
# Ticks of the time from the first node to the deadline (or the end): prices change less often than that.
_TICKS = 240


@dataclass(frozen=True, kw_only=True)
class Hindsight:
    """usd: of the whole gang. pools: how many had a recorded price. Estimated."""

    usd: float
    pools: int
    work_hours: float
    start_hours: float

    def to_json(self, actual_usd: Decimal) -> dict[str, Any]:
        regret = round(float(actual_usd) - self.usd, USD_DECIMALS) + 0.0  # no dust, and no negative nothing
        return {
            "usd": self.usd,
            "regret_usd": regret,
            "regret_share": regret / self.usd if self.usd > 0 else None,
            "pools": self.pools,
            "work_hours": self.work_hours,
            "start_hours": self.start_hours,
            "kind": "estimated",
        }


def hindsight(events: Sequence[Event], generations: dict[int, Generation], ledger: Ledger) -> Hindsight | None:
    """None without a plan, without paid work, or when the recorded prices cannot bear it. events: by time."""
    plan = next((event.data for event in reversed(events) if event.name == PLAN and event.data.get("chosen")), None)
    if plan is None or not ledger.nodes:
        return None
    newest = ledger.nodes[-1].node.generation
    gang = [bill for bill in ledger.nodes if bill.node.generation == newest]
    work, start = _hours(ledger.nodes, generations, ranks=sum(len(bill.node.ranks) for bill in gang))
    if work <= 0:
        return None
    known = recorded_curves(plan, _with_quotes(events, Pricing.of(events).history))
    curves = {pool: curve for pool, curve in known.items() if pool.instance_type == plan["chosen"]["instance_type"]}
    begin = min(bill.node.started_wall for bill in ledger.nodes)
    end = max(bill.node.ended_wall for bill in ledger.nodes)
    if plan.get("deadline_hours"):
        since = plan.get("started_utc") or plan.get("made_utc") or begin
        end = max(end, float(since) + plan["deadline_hours"] * 3600)
    nodes = machines(gang)
    if all(curve.constant(round(begin * MICRO), round(end * MICRO)) for curve in curves.values()):
        usd = min(float(curve.at(begin)) for curve in curves.values()) * nodes * (work + start)
    else:
        usd = _optimum(curves, begin, end, nodes, work, start)
    if usd == math.inf:
        return None
    return Hindsight(usd=usd, pools=len(curves), work_hours=work, start_hours=start)


def _hours(bills: Sequence[NodeBill], generations: dict[int, Generation], *, ranks: int) -> tuple[float, float]:
    """(work, one start with its end) of the gang, from all ranks' time: the start is the first generation's."""
    work, start, first = 0, 0, bills[0].node.generation
    first_ranks = sum(len(bill.node.ranks) for bill in bills if bill.node.generation == first)
    for bill in bills:
        for rank in rank_times(bill.node, generations[bill.node.generation]):
            work += sum(rank.classes.get(kind, 0) for kind in _WORK)
            if bill.node.generation == first:
                start += sum(rank.classes.get(kind, 0) for kind in _START)
        if bill.node.generation == first:
            lead = sum(extra.micros for extra in bill.extras if extra.ledger_class in _START)
            start += lead * len(bill.node.ranks)
    hour = 3600 * MICRO
    return work / hour / max(1, ranks), start / hour / max(1, first_ranks)


def recorded_curves(
    plan: dict[str, Any], history: Mapping[PoolName, Sequence[tuple[float, Decimal]]]
) -> dict[PoolName, PriceCurve]:
    """Prices of every recorded pool of as many nodes as the plan chose, from its candidates and what came since."""
    first = _quotes(plan)
    for pool, changes in history.items():
        if changes:
            first.setdefault(pool, min(changes)[1])
    return {pool: PriceCurve.of(usd, history.get(pool, ())) for pool, usd in first.items()}


def _quotes(plan: dict[str, Any]) -> dict[PoolName, Decimal]:
    chosen = plan["chosen"]
    first: dict[PoolName, Decimal] = {}
    for candidate in [*plan.get("ranked", []), chosen]:
        if candidate["nodes"] == chosen["nodes"]:
            quoted = candidate.get("quoted_usd_per_hour") or str(candidate["usd_per_hour"])
            first[pool_of(candidate)] = Decimal(quoted)
    if chosen.get("on_demand_usd_per_hour") is not None:
        usual = PoolName(instance_type=chosen["instance_type"], market="on_demand", place=chosen.get("region") or "")
        first.setdefault(usual, Decimal(str(chosen["on_demand_usd_per_hour"])))
    return first


def _with_quotes(
    events: Sequence[Event], history: Mapping[PoolName, Sequence[tuple[float, Decimal]]]
) -> dict[PoolName, Sequence[tuple[float, Decimal]]]:
    """The history and, of pools without one, what each plan of the job quoted, from when it was made: the ledger
    charges by them too, and the newest plan's quotes alone would make of dearer days a gain over hindsight.
    """
    quoted: dict[PoolName, list[tuple[float, Decimal]]] = {}
    for event in events:
        if event.name == PLAN and event.data.get("chosen"):
            for pool, usd in _quotes(event.data).items():
                quoted.setdefault(pool, []).append((event.t_wall, usd))
    return {**quoted, **{pool: changes for pool, changes in history.items() if changes}}


def _optimum(
    curves: dict[PoolName, PriceCurve], begin: float, end: float, nodes: int, work: float, start: float
) -> float:
    import numpy as np

    from ebbflow.cost.simulate.optimum import optimum_usd
    from ebbflow.cost.simulate.simulator import Job
    from ebbflow.cost.simulate.world import World

    # The programme counts whole ticks, rounded up: some more than the job took, and what that adds is taken off again.
    hours = (end - begin) / 3600 * (1 + 4 / _TICKS)
    tick = hours / _TICKS
    edges = [round((begin + tick * 3600 * number) * MICRO) for number in range(_TICKS + 1)]
    # Each tick at the mean price while it lasts.
    prices = [
        [float(curve.usd(left, right)) * nodes / tick for left, right in pairwise(edges)] for curve in curves.values()
    ]
    # Within one region a move costs the start alone; what a move between regions costs is not recorded.
    world = World(
        zones=tuple(str(pool) for pool in curves),
        regions=("",) * len(curves),
        available=np.ones((len(curves), _TICKS), dtype=bool),
        usd_per_hour=np.array(prices),
        on_demand_usd_per_hour=math.inf,
        tick_hours=np.full(_TICKS, tick),
    )
    usd = optimum_usd(world, Job(work_hours=work, deadline_hours=hours, changeover_hours=start))
    return usd * (work + start) / (tick * (math.ceil(work / tick) + math.ceil(start / tick)))
