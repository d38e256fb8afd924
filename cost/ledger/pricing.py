"""The price of each node at each moment, from the events: the plan's quote, and recorded changes since."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from ebbflow.cost.errors import LedgerError
from ebbflow.cost.ledger.instances import BatchJob
from ebbflow.cost.ledger.timeline import NodeTime
from ebbflow.infra.events import PLAN, PRICES, Event

_MICRO = 1_000_000
_MICROS_PER_HOUR = Decimal(3600 * _MICRO)


@dataclass(frozen=True)
class PriceCurve:
    """Dollars per hour of one node. first: until the first change; changes: (Unix microseconds since when, dollars)."""

    first: Decimal
    changes: tuple[tuple[int, Decimal], ...] = ()

    @classmethod
    def of(cls, first: Decimal, changes: Iterable[tuple[float, Decimal]] = ()) -> PriceCurve:
        """changes: (Unix time, dollars per hour) in any order; of several at one moment the last one given holds."""
        ordered = sorted(((round(at * _MICRO), usd) for at, usd in changes), key=lambda change: change[0])
        kept: list[tuple[int, Decimal]] = []
        for at, usd in ordered:
            if kept and kept[-1][0] == at:
                kept.pop()
            kept.append((at, usd))
        return cls(first, tuple(kept))

    def at(self, unix_time: float) -> Decimal:
        """The price that holds at a moment; a change holds from its own moment on."""
        index = bisect_right(self.changes, round(unix_time * _MICRO), key=lambda change: change[0])
        return self.changes[index - 1][1] if index else self.first

    def usd(self, start: int, end: int) -> Decimal:
        """What one node costs from `start` to `end`, Unix microseconds: ∫ price dt, billed by the microsecond."""
        if end <= start:
            return Decimal(0)
        total, at, price = Decimal(0), start, self.first
        for moment, usd in self.changes:
            if moment >= end:
                break
            if moment > at:
                total += price * (moment - at)
                at = moment
            price = usd
        return (total + price * (end - at)) / _MICROS_PER_HOUR

    def bounds(self, start: float, end: float) -> tuple[Decimal, Decimal]:
        """(lowest, highest) price that holds at any moment from `start` to `end`, Unix seconds."""
        held = [self.at(start), *(usd for at, usd in self.changes if start * _MICRO < at < end * _MICRO)]
        return min(held), max(held)

    def constant(self, start: int, end: int) -> bool:
        """Whether one price holds from `start` to `end`, Unix microseconds."""
        inside = {usd for at, usd in self.changes if start < at < end}
        return inside <= {self.at(start / _MICRO)}


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
                for pool, changes in read_price_changes(event):
                    history.setdefault(pool, []).extend(changes)
        plans = tuple(event for event in events if event.name == PLAN and event.data.get("chosen"))
        return cls(plans, {pool: tuple(changes) for pool, changes in history.items()})

    def node(self, node: NodeTime, job: BatchJob | None = None) -> NodePrice:
        """The last plan made before the node started, or the first at all, names its pool and the price to begin with.

        A machine that says that it is of another zone, type or market than planned has the price that is on record of
        such machines: recorded changes first, then what the plan quoted of other pools. Where there is none the planned
        price stands, and `kind` says so. A simulated run stays as planned, whatever this machine is.

        job: of AWS Batch that the node was part of. Its own placement is then what was planned, and the plan is that
        before its submit: the node's wall clock may be minutes from that of the machine that planned.
        """
        return self._priced(node.started_wall if job is None else job.placed_wall, node.machine, job)

    def job(self, job: BatchJob) -> NodePrice:
        """Of a node of the job that never said a word."""
        return self._priced(job.placed_wall, {}, job)

    def _priced(self, at: float, machine: Mapping[str, Any], job: BatchJob | None) -> NodePrice:
        plan = self._plan(at, job)
        if plan is None:
            return NodePrice(curve=PriceCurve(Decimal(0)), on_demand_usd_per_hour=None, kind=UNPRICED, pool=None)
        chosen: dict[str, Any] = plan["chosen"]
        planned, simulated = parse_pool(chosen), bool(plan.get("simulated"))
        kind = SIMULATED if simulated else str(chosen.get("price_kind", "recorded"))
        first, pool = parse_quote(chosen), planned
        if not simulated:
            pool = self._recorded_pool(machine, planned)
            if pool != planned:
                first = min(self.history[pool])[1]
            else:
                first, pool, kind = _unrecorded(machine, plan, kind)
        return NodePrice(
            curve=PriceCurve.of(first, self.history.get(pool, ())),
            on_demand_usd_per_hour=find_on_demand_usd(plan, pool.instance_type),
            kind=kind,
            pool=pool,
        )

    def _plan(self, at: float, job: BatchJob | None) -> dict[str, Any] | None:
        """The plan in force at a moment, with the job's own placement as the chosen pool; None: nothing has a price."""
        before = [event for event in self.plans if event.t_wall <= at] or self.plans[:1]
        plan = before[-1].data if before else None
        if job is None or job.quote is None:
            return plan
        if plan is None:
            return {"chosen": dict(job.candidate)}
        chosen = plan["chosen"]
        if parse_pool(chosen) == parse_pool(job.candidate) and parse_quote(chosen) == job.quote:
            return plan
        same = chosen["instance_type"] == job.candidate["instance_type"]
        usual = chosen.get("on_demand_usd_per_hour") if same else None
        usual = usual or (plan.get("on_demand") or {}).get(job.candidate["instance_type"])
        return {**plan, "chosen": {**chosen, **job.candidate, "on_demand_usd_per_hour": usual}}

    def _recorded_pool(self, machine: Mapping[str, Any], planned: PoolName) -> PoolName:
        """Where the machine really is, if changes of its price are on record; else the planned one."""
        for place in (machine.get("zone_id"), machine.get("zone"), planned.place):
            real = _real(machine, planned, place or "")
            if self.history.get(real):
                return real
        return planned


def _real(machine: Mapping[str, Any], planned: PoolName, place: str) -> PoolName:
    kind, market = machine.get("instance_type"), machine.get("market")
    return PoolName(instance_type=kind or planned.instance_type, market=market or planned.market, place=place)


def _unrecorded(machine: Mapping[str, Any], plan: Mapping[str, Any], kind: str) -> tuple[Decimal, PoolName, str]:
    """(dollars per hour, pool, kind) of a machine without recorded changes, from what the plan quoted.

    An on-demand machine is never charged at a spot price, nor a spot machine at the on-demand price.
    """
    planned = parse_pool(plan["chosen"])
    real, quoted = _real(machine, planned, planned.place), parse_quote(plan["chosen"])
    alike = [candidate for candidate in plan.get("ranked") or [] if _is_like(candidate, real, plan)]
    if (real.instance_type, real.market) == (planned.instance_type, planned.market):
        zone = _other_zone(machine, plan["chosen"])
        if zone is None:
            return quoted, planned, kind
        there = next((candidate for candidate in alike if parse_pool(candidate).place == zone), None)
        if there is None:
            lacking = f"the machine is in {zone}, of which no price is on record"
            return quoted, planned, f"{kind}, of the planned {planned}: {lacking}"
        return parse_quote(there), parse_pool(there), _as_told(there)
    if real.market == "on_demand":
        usd = find_on_demand_usd(plan, real.instance_type)
        if usd is not None:
            return usd, real, f"recorded: on-demand, of {real.instance_type}, as the machine says that it is"
    places = {machine.get("zone_id"), machine.get("zone")} - {None} or {planned.place}
    for candidate in sorted(alike, key=lambda one: parse_pool(one).place not in places):
        return parse_quote(candidate), parse_pool(candidate), _as_told(candidate)
    usual = find_on_demand_usd(plan, planned.instance_type) if real.market == "on_demand" else None
    stands = replace(planned, market=real.market) if usual is not None else planned
    lacking = f"the machine is {real.instance_type} {real.market.replace('_', '-')}, of which no price is on record"
    return quoted if usual is None else usual, real, f"{kind}, of the planned {stands}: {lacking}"


def _as_told(candidate: Mapping[str, Any]) -> str:
    return f"{candidate['price_kind']}; of {parse_pool(candidate)}, as the machine says that it is"


def _other_zone(machine: Mapping[str, Any], chosen: Mapping[str, Any]) -> str | None:
    """The machine's zone if it is not the planned one; None: it is, or nobody knows. Ids are held against ids."""
    planned = chosen.get("zone") or ""
    told = machine.get("zone_id" if re.search(r"-az\d+$", planned) else "zone")
    return told if planned and told and told != planned else None


def _is_like(candidate: Mapping[str, Any], real: PoolName, plan: Mapping[str, Any]) -> bool:
    """Whether the plan's candidate is of the machine's type and market, in the region of the chosen pool."""
    other = parse_pool(candidate)
    same = (other.instance_type, other.market) == (real.instance_type, real.market)
    return same and candidate.get("region") == plan["chosen"].get("region")


def parse_quote(candidate: Mapping[str, Any]) -> Decimal:
    """Dollars per hour of one node, as quoted: not through a float, where a plan has it."""
    return Decimal(candidate.get("quoted_usd_per_hour") or str(candidate["usd_per_hour"]))


def find_on_demand_usd(plan: Mapping[str, Any], instance_type: str) -> Decimal | None:
    """Of a type in the region of the plan's pool; None: not on record."""
    chosen = plan["chosen"]
    same = instance_type == chosen["instance_type"]
    known = chosen.get("on_demand_usd_per_hour") if same else (plan.get("on_demand") or {}).get(instance_type)
    return None if known is None else Decimal(str(known))


def parse_pool(candidate: Mapping[str, Any]) -> PoolName:
    """The pool of a plan's candidate or of a `prices` event, as JSON."""
    place = candidate.get("zone") or candidate.get("region") or ""
    return PoolName(instance_type=candidate["instance_type"], market=str(candidate["market"]), place=place)


def read_price_changes(event: Event) -> Iterator[tuple[PoolName, list[tuple[float, Decimal]]]]:
    """Each pool of a `prices` event with its changes."""
    for pool in event.data.get("pools", []):
        try:
            changes = [(float(at), Decimal(usd)) for at, usd in pool["changes"]]
            name = parse_pool(pool)
        except (KeyError, TypeError, ValueError, InvalidOperation) as error:
            raise LedgerError(f"a prices event that cannot be read: {str(pool)[:200]}: {error!r}") from error
        wrong = [usd for _, usd in changes if not usd.is_finite() or usd < 0]
        if wrong:
            raise LedgerError(f"a prices event of {name}: {wrong[0]} is not dollars per hour")
        yield name, changes
