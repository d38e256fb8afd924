"""Price of each node at each moment, from a job's events: first the plan's quote, then the recorded
price changes.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import TypedDict, cast

from ebbflow.core.event_payloads import (
    ConfiguredPayload,
    InvalidPayload,
    PlanPayload,
    PricesPayload,
    SlurmJobPayload,
)
from ebbflow.core.events import Event, find_last_event, is_event, select_events
from ebbflow.core.terms import UNPRICED
from ebbflow.cost.errors import LedgerError
from ebbflow.cost.ledger.instances import (
    STATED_FOR_PARTITION,
    BatchJob,
    make_partition_candidate,
)
from ebbflow.cost.ledger.timeline import MICRO, NodeTime
from ebbflow.cost.plan_json import CandidateJson, PlanJson, PriceJson
from ebbflow.cost.prices.quote import PoolPrice

SIMULATED = "simulated"
STATED = "stated in cost.usd_per_node_hour"


class MachineFacts(TypedDict, total=False):
    """Facts about a machine that decide its price (`NodeTime.machine`)."""

    instance_type: str
    market: str
    zone: str
    zone_id: str


@dataclass(frozen=True)
class PriceCurve:
    """Price of one node over time, in dollars per hour."""

    first: Decimal  # the price before the first change
    changes: tuple[
        tuple[int, Decimal], ...
    ] = ()  # (Unix microseconds, dollars per hour from then on), ordered by time

    @classmethod
    def of(cls, first: Decimal, changes: Iterable[tuple[float, Decimal]] = ()) -> PriceCurve:
        """Make a curve from price changes (Unix seconds, dollars per hour) in any order.

        If several changes have the same time, the last of them in the list applies.
        """
        by_time = {round(at * MICRO): usd for at, usd in changes}
        return cls(first, tuple(sorted(by_time.items())))

    def price_at(self, unix_time: float) -> Decimal:
        """Return the dollars per hour at a Unix time in seconds.

        A change applies from its own time on.
        """
        return self._price_at(round(unix_time * MICRO))

    def cost(self, start: int, end: int) -> Decimal:
        """Return the dollars for one node from `start` to `end` (Unix microseconds): the price
        integrated over time.

        Zero if `end` is before `start`.
        """
        total = Decimal(0)
        at = start
        price = self._price_at(start)
        for moment, usd in self._changes_within(start, end):
            total += price * (moment - at)
            at = moment
            price = usd
        return (total + price * max(0, end - at)) / (3600 * MICRO)

    def bounds(self, start: float, end: float) -> tuple[Decimal, Decimal]:
        """Return the lowest and the highest price from `start` to `end` (Unix seconds)."""
        within = self._changes_within(round(start * MICRO), round(end * MICRO))
        prices = [self.price_at(start), *(usd for _, usd in within)]
        return min(prices), max(prices)

    def plus(self, usd_per_hour: Decimal) -> PriceCurve:
        """Return the curve with a constant price added."""
        if not usd_per_hour:
            return self
        changes = tuple((at, usd + usd_per_hour) for at, usd in self.changes)
        return PriceCurve(self.first + usd_per_hour, changes)

    def is_constant(self, start: int, end: int) -> bool:
        """Return whether the price is the same at all times from `start` to `end` (Unix
        microseconds).
        """
        price = self._price_at(start)
        return all(usd == price for _, usd in self._changes_within(start, end))

    def _price_at(self, micros: int) -> Decimal:
        index = bisect_right(self.changes, micros, key=_time_of_change)
        if index:
            return self.changes[index - 1][1]
        return self.first

    def _changes_within(self, start: int, end: int) -> tuple[tuple[int, Decimal], ...]:
        """Return the changes after `start` and before `end` (Unix microseconds)."""
        after = bisect_right(self.changes, start, key=_time_of_change)
        before = bisect_left(self.changes, end, key=_time_of_change)
        return self.changes[after:before]


@dataclass(frozen=True, kw_only=True)
class PoolName:
    """Capacity pool to which a price applies.

    `place` is a zone id, a zone name or a region; empty means any place.
    """

    instance_type: str
    market: str
    place: str

    def __str__(self) -> str:
        return (
            f"{self.instance_type} "
            f"{self.market.replace('_', '-')}{f' in {self.place}' if self.place else ''}"
        )


@dataclass(frozen=True, kw_only=True)
class NodePrice:
    """Price of one node over time, with its source and its pool."""

    curve: PriceCurve
    on_demand_usd_per_hour: Decimal | None  # on-demand price of the instance type; None if unknown
    kind: (
        str  # source of the price: "recorded …", "live …", "estimated …", "simulated" or "unpriced"
    )
    pool: PoolName | None  # the pool whose price applies; None without a plan
    # Dollars per hour of the node's root volume, beside `curve`; 0 in older plans
    volume_usd_per_hour: Decimal = Decimal(0)

    @property
    def volume_curve(self) -> PriceCurve:
        """The price of the node's root volume, which is constant."""
        return PriceCurve(self.volume_usd_per_hour)

    @property
    def node_curve(self) -> PriceCurve:
        """The price of the node with its root volume."""
        return self.curve.plus(self.volume_usd_per_hour)


@dataclass(frozen=True)
class Pricing:
    """All prices that a job's events record."""

    plans: tuple[Event[PlanPayload], ...]  # the `plan` events that chose a pool, ordered by time
    # Price changes (Unix seconds, dollars per hour) by pool
    history: dict[PoolName, tuple[tuple[float, Decimal], ...]]
    # Dollars per hour of a node that the configuration states, for a job without a plan
    stated: Decimal | None = None
    # (Unix seconds, partition as a pool) of each Slurm job's submission, ordered by time; None
    # instead of a partition without a price
    partitions: tuple[tuple[float, CandidateJson | None], ...] = ()

    @classmethod
    def of(cls, events: Sequence[Event]) -> Pricing:
        """Collect the prices from a job's events, which must be ordered by time.

        Raises:
            LedgerError: An event has an invalid price.
        """
        history: dict[PoolName, list[tuple[float, Decimal]]] = {}
        for event in select_events(events, PricesPayload):
            for pool, changes in _read_price_changes(event):
                if changes:
                    history.setdefault(pool, []).extend(changes)
        plans = tuple(select_plans(events))
        changes_by_pool = {pool: tuple(changes) for pool, changes in history.items()}
        return cls(
            plans, changes_by_pool, _find_stated_usd(events), tuple(_find_partitions(events))
        )

    def price_node(self, node: NodeTime, job: BatchJob | None = None) -> NodePrice:
        """Return the price of a node from the last plan before its start.

        If all plans are later, use the first plan.

        If the machine reports a zone, type or market that differs from the plan, the node gets the
        price of the reported pool. This price comes from recorded price changes, else from the
        plan's quotes for other pools. If neither exists, the node gets the planned price, and
        `NodePrice.kind` says so. A simulated run always has the planned price.

        Args:
            job: The node's Batch job; None if unknown. If it is given, the pool in which the job
                was placed counts as the planned pool. The plan is then the last one before the
                job's submission, because the node's wall clock may differ by minutes from the
                planner's.
        """
        placed_wall = node.started_wall if job is None else job.placed_wall
        return self._price(placed_wall, cast(MachineFacts, node.machine), job)

    def price_job(self, job: BatchJob) -> NodePrice:
        """Return the price of a node without events, from the pool in which its Batch job was
        placed.
        """
        return self._price(job.placed_wall, {}, job)

    def price_machine(self, plan: PlanJson, machine: MachineFacts) -> NodePrice:
        """Return the price of a planned node, given the facts about the machine that it got."""
        chosen = plan["chosen"]
        planned = parse_pool(chosen)
        simulated = bool(plan.get("simulated"))
        if simulated:
            kind = SIMULATED
        else:
            kind = str(chosen.get("price_kind", "recorded"))
        first = parse_usd(chosen)
        pool = planned
        if not simulated:
            pool = self._find_recorded_pool(machine, planned)
            if pool != planned:
                first = min(self.history[pool])[1]
            else:
                first, pool, kind = _price_without_changes(machine, plan, kind)
        return NodePrice(
            curve=PriceCurve.of(first, self.history.get(pool, ())),
            on_demand_usd_per_hour=_find_on_demand_usd(plan, pool.instance_type),
            kind=kind,
            pool=pool,
            volume_usd_per_hour=parse_volume_usd(chosen),
        )

    def _price(self, at: float, machine: MachineFacts, job: BatchJob | None) -> NodePrice:
        is_on_slurm = self._is_on_slurm(at, job)
        partition = self._find_partition(at, job) if is_on_slurm else None
        if partition is not None:
            return NodePrice(
                curve=PriceCurve(parse_usd(partition)),
                on_demand_usd_per_hour=None,
                kind=STATED_FOR_PARTITION,
                pool=parse_pool(partition),
            )
        # A plan prices machines of a cloud
        plan = None if is_on_slurm else self._find_plan(at, job)
        if plan is not None:
            return self.price_machine(plan, machine)
        if self.stated is not None:
            return NodePrice(
                curve=PriceCurve(self.stated), on_demand_usd_per_hour=None, kind=STATED, pool=None
            )
        return NodePrice(
            curve=PriceCurve(Decimal(0)), on_demand_usd_per_hour=None, kind=UNPRICED, pool=None
        )

    def _is_on_slurm(self, at: float, job: BatchJob | None) -> bool:
        """Return whether Slurm ran a node.

        If `job` is unknown, this is so if a Slurm job was submitted before `at`, and no plan for a
        cloud was made since then.
        """
        if job is not None:
            return job.by_slurm
        submitted = [time for time, _ in self.partitions if time <= at]
        planned = [event.t_wall for event in self.plans if event.t_wall <= at]
        return bool(submitted) and (not planned or planned[-1] <= submitted[-1])

    def _find_partition(self, at: float, job: BatchJob | None) -> CandidateJson | None:
        """Return the partition in which Slurm ran a node; None if no price is stated for it."""
        if job is not None:
            return job.candidate
        return [candidate for time, candidate in self.partitions if time <= at][-1]

    def _find_plan(self, at: float, job: BatchJob | None) -> PlanJson | None:
        """Return the plan that prices a node: the last plan made at or before `at`, else the first
        plan.
        """
        before = [event for event in self.plans if event.t_wall <= at] or self.plans[:1]
        if before:
            plan = read_plan(before[-1])
        else:
            plan = None
        if job is None or job.candidate is None or job.price is None:
            return plan
        if plan is None:
            return {"chosen": job.candidate}
        chosen = plan["chosen"]
        same_pool = parse_pool(chosen) == parse_pool(job.candidate)
        if same_pool and parse_usd(chosen) == job.price.usd_per_hour:
            return plan
        instance_type = job.candidate["instance_type"]
        if chosen["instance_type"] == instance_type:
            usual = chosen.get("on_demand_usd_per_hour")
        else:
            usual = None
        usual = usual or (plan.get("on_demand") or {}).get(instance_type)
        return {**plan, "chosen": {**chosen, **job.candidate, "on_demand_usd_per_hour": usual}}

    def _find_recorded_pool(self, machine: MachineFacts, planned: PoolName) -> PoolName:
        """Return the pool that the machine reported if its price changes were recorded, else the
        planned pool.
        """
        reported = [place for place in (machine.get("zone_id"), machine.get("zone")) if place]
        for place in [*reported, planned.place]:
            actual = _find_actual_pool(machine, planned, place)
            if self.history.get(actual):
                return actual
        return planned


def parse_usd(candidate: PriceJson) -> Decimal:
    """Read a candidate's dollars per hour of one node, exactly as quoted."""
    return PoolPrice.from_json(candidate).usd_per_hour


def parse_volume_usd(candidate: PriceJson) -> Decimal:
    """Read a candidate's dollars per hour of the root volume of one node; 0 in older plans."""
    return PoolPrice.from_json(candidate).volume_usd_per_hour


def read_plan(event: Event[PlanPayload]) -> PlanJson:
    """Return the plan of an event that `select_plans` found, as it was recorded."""
    return cast(PlanJson, event.data)


def select_plans(events: Sequence[Event]) -> list[Event[PlanPayload]]:
    """Return the `plan` events that chose a pool, in the same order."""
    return [
        event
        for event in events
        if is_event(event, PlanPayload) and event.payload.chosen is not None
    ]


def parse_pool(candidate: CandidateJson) -> PoolName:
    """Read the pool from a candidate of a plan."""
    place = candidate.get("zone") or candidate.get("region") or ""
    return PoolName(
        instance_type=candidate["instance_type"], market=str(candidate["market"]), place=place
    )


def _find_stated_usd(events: Sequence[Event]) -> Decimal | None:
    configured = find_last_event(events, ConfiguredPayload)
    if configured is None:
        return None
    for setting in configured.payload.settings:
        if setting.key == "cost.usd_per_node_hour" and isinstance(setting.value, int | float):
            return Decimal(str(setting.value))
    return None


def _find_partitions(events: Sequence[Event]) -> Iterator[tuple[float, CandidateJson | None]]:
    for event in select_events(events, SlurmJobPayload):
        if event.payload.does == "submitted":
            yield event.t_wall, make_partition_candidate(event.payload)


def _time_of_change(change: tuple[int, Decimal]) -> int:
    return change[0]


def _find_actual_pool(machine: MachineFacts, planned: PoolName, place: str) -> PoolName:
    instance_type = machine.get("instance_type") or planned.instance_type
    return PoolName(
        instance_type=instance_type, market=machine.get("market") or planned.market, place=place
    )


def _price_without_changes(
    machine: MachineFacts, plan: PlanJson, kind: str
) -> tuple[Decimal, PoolName, str]:
    """Return (price, pool, price kind) of a machine whose pool has no recorded price changes.

    The price is one of the plan's quotes. An on-demand machine never gets a spot price, nor a spot
    machine an on-demand price.
    """
    planned = parse_pool(plan["chosen"])
    actual = _find_actual_pool(machine, planned, planned.place)
    quoted = parse_usd(plan["chosen"])
    alike = [
        candidate for candidate in plan.get("ranked") or [] if _is_alike(candidate, actual, plan)
    ]
    if (actual.instance_type, actual.market) == (planned.instance_type, planned.market):
        zone = _find_other_zone(machine, plan["chosen"])
        if zone is None:
            return quoted, planned, kind
        there = next(
            (candidate for candidate in alike if parse_pool(candidate).place == zone), None
        )
        if there is None:
            return (
                quoted,
                planned,
                f"{kind}, of the planned {planned}: the machine is in {zone}, no price is on "
                "record",
            )
        return parse_usd(there), parse_pool(there), _describe_quote(there)
    if actual.market == "on_demand":
        usd = _find_on_demand_usd(plan, actual.instance_type)
        if usd is not None:
            return (
                usd,
                actual,
                f"recorded: on-demand, of {actual.instance_type}, as reported by the machine",
            )
    places = {machine.get("zone_id"), machine.get("zone")} - {None} or {planned.place}
    for candidate in sorted(alike, key=lambda priced: parse_pool(priced).place not in places):
        return parse_usd(candidate), parse_pool(candidate), _describe_quote(candidate)
    if actual.market == "on_demand":
        usual = _find_on_demand_usd(plan, planned.instance_type)
    else:
        usual = None
    if usual is not None:
        applied = replace(planned, market=actual.market)
    else:
        applied = planned
    market = actual.market.replace("_", "-")
    why = f"the machine is {actual.instance_type} {market}, of which no price is on record"
    return quoted if usual is None else usual, actual, f"{kind}, of the planned {applied}: {why}"


def _describe_quote(candidate: CandidateJson) -> str:
    return (
        f"{candidate.get('price_kind', '')}; of {parse_pool(candidate)}, as reported by the machine"
    )


def _find_other_zone(machine: MachineFacts, chosen: CandidateJson) -> str | None:
    """Return the machine's zone if it differs from the planned zone; None if it is the same or
    unknown.

    A zone id is compared with a zone id, and a zone name with a zone name.
    """
    planned = chosen.get("zone") or ""
    actual = machine.get("zone_id" if re.search(r"-az\d+$", planned) else "zone")
    if planned and actual != planned:
        return actual
    return None


def _is_alike(candidate: CandidateJson, pool: PoolName, plan: PlanJson) -> bool:
    """Return whether a candidate has the type and market of `pool`, and is in the region of the
    plan's chosen pool.
    """
    other = parse_pool(candidate)
    same = (other.instance_type, other.market) == (pool.instance_type, pool.market)
    return same and candidate.get("region") == plan["chosen"].get("region")


def _find_on_demand_usd(plan: PlanJson, instance_type: str) -> Decimal | None:
    """Return an instance type's on-demand dollars per hour in the region of the plan's pool.

    Return None if this price is not recorded.
    """
    chosen = plan["chosen"]
    same = instance_type == chosen["instance_type"]
    if same:
        known = chosen.get("on_demand_usd_per_hour")
    else:
        known = (plan.get("on_demand") or {}).get(instance_type)
    if known is None:
        return None
    return Decimal(str(known))


def _read_price_changes(
    event: Event[PricesPayload],
) -> Iterator[tuple[PoolName, list[tuple[float, Decimal]]]]:
    """Yield each pool of a `prices` event with its changes (Unix seconds, dollars per hour)."""
    try:
        pools = event.payload.pools or []
    except InvalidPayload as error:
        raise LedgerError(f"a prices event is invalid: {error}") from error
    for pool in pools:
        name = PoolName(
            instance_type=pool.instance_type,
            market=pool.market,
            place=pool.zone or pool.region or "",
        )
        try:
            changes = [(float(at), Decimal(usd)) for at, usd in pool.changes]
        except (TypeError, ValueError, InvalidOperation) as error:
            raise LedgerError(f"a prices event is invalid: {str(pool)[:200]}: {error!r}") from error
        invalid = [usd for _, usd in changes if not usd.is_finite() or usd < 0]
        if invalid:
            raise LedgerError(f"a prices event of {name}: {invalid[0]} is not dollars per hour")
        yield name, changes
