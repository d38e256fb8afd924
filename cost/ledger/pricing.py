"""What each node cost per hour at each moment, as the events say: the plan's quote, and recorded changes since."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from cost.errors import LedgerError
from cost.ledger.price_curve import PriceCurve
from cost.ledger.timeline import NodeTime
from infra.events import PLAN, PRICES, Event

SIMULATED = "simulated"
UNPRICED = "unpriced"


@dataclass(frozen=True, kw_only=True)
class PoolName:
    """What a price belongs to. place: a zone's id, or its name, or a region; empty: anywhere."""

    instance_type: str
    market: str
    place: str

    def __str__(self) -> str:
        return f"{self.instance_type} {self.market.replace('_', '-')}{f' in {self.place}' if self.place else ''}"


@dataclass(frozen=True, kw_only=True)
class NodePrice:
    """Of one node. pool: None without a plan. kind: "recorded …", "live …", "estimated …", "simulated", "unpriced"."""

    curve: PriceCurve
    on_demand_usd_per_hour: Decimal | None
    kind: str
    pool: PoolName | None


@dataclass(frozen=True)
class Pricing:
    """All prices that a job's events hold. history: changes (Unix time, dollars per hour) by pool."""

    plans: tuple[Event, ...]
    history: dict[PoolName, tuple[tuple[float, Decimal], ...]]

    @classmethod
    def of(cls, events: Sequence[Event]) -> Pricing:
        """events: by time. Raises LedgerError for a price that is no price."""
        history: dict[PoolName, list[tuple[float, Decimal]]] = {}
        for event in events:
            if event.name == PRICES:
                for pool, changes in recorded_changes(event):
                    history.setdefault(pool, []).extend(changes)
        plans = tuple(event for event in events if event.name == PLAN and event.data.get("chosen"))
        return cls(plans, {pool: tuple(changes) for pool, changes in history.items()})

    def node(self, node: NodeTime) -> NodePrice:
        """The last plan made before the node started, or the first at all, names its pool and the price to begin with.

        A node whose machine is known to lie in another zone than planned has that zone's price, where one is recorded.
        """
        if not self.plans:
            return NodePrice(curve=PriceCurve(Decimal(0)), on_demand_usd_per_hour=None, kind=UNPRICED, pool=None)
        before = [event for event in self.plans if event.t_wall <= node.started_wall]
        plan = (before or self.plans[:1])[-1].data
        chosen: dict[str, Any] = plan["chosen"]
        on_demand = chosen.get("on_demand_usd_per_hour")
        pool = self._pool_of(node, chosen)
        kind = SIMULATED if plan.get("simulated") else str(chosen.get("price_kind", "recorded"))
        if on_demand is not None and not plan.get("simulated") and _is_on_demand_instead(node, pool):
            # A queue may fall back to on-demand: such a machine is never charged at a spot price.
            curve, pool = PriceCurve(Decimal(str(on_demand))), replace(pool, market="on_demand")
            kind = "recorded: on-demand, as the machine says that it is"
            return NodePrice(curve=curve, on_demand_usd_per_hour=curve.first, kind=kind, pool=pool)
        # As quoted: not through a float, where a plan has it.
        quoted = Decimal(chosen.get("quoted_usd_per_hour") or str(chosen["usd_per_hour"]))
        return NodePrice(
            curve=PriceCurve.of(quoted, self.history.get(pool, ())),
            on_demand_usd_per_hour=None if on_demand is None else Decimal(str(on_demand)),
            kind=kind,
            pool=pool,
        )

    def _pool_of(self, node: NodeTime, chosen: dict[str, Any]) -> PoolName:
        planned = pool_of(chosen)
        machine = node.machine
        for place in (machine.get("zone_id"), machine.get("zone")):
            real = PoolName(
                instance_type=machine.get("instance_type") or planned.instance_type,
                market=machine.get("market") or planned.market,
                place=place or "",
            )
            if place and real in self.history:
                return real
        return planned


def _is_on_demand_instead(node: NodeTime, pool: PoolName) -> bool:
    """Whether the machine is an on-demand one of the type that was planned on spot."""
    same = node.machine.get("instance_type") in (None, pool.instance_type)
    return same and pool.market == "spot" and node.machine.get("market") == "on_demand"


def pool_of(candidate: dict[str, Any]) -> PoolName:
    """The pool of a plan's candidate or of a `prices` event, as JSON."""
    place = candidate.get("zone") or candidate.get("region") or ""
    return PoolName(instance_type=candidate["instance_type"], market=str(candidate["market"]), place=place)


def recorded_changes(event: Event) -> Iterator[tuple[PoolName, list[tuple[float, Decimal]]]]:
    """Each pool of a `prices` event with its changes."""
    for pool in event.data.get("pools", []):
        try:
            changes = [(float(at), Decimal(usd)) for at, usd in pool["changes"]]
            name = pool_of(pool)
        except (KeyError, TypeError, ValueError, InvalidOperation) as error:
            raise LedgerError(f"a prices event that cannot be read: {str(pool)[:200]}: {error!r}") from error
        wrong = [usd for _, usd in changes if not usd.is_finite() or usd < 0]
        if wrong:
            raise LedgerError(f"a prices event of {name}: {wrong[0]} is not dollars per hour")
        yield name, changes
