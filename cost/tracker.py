"""The two questions that a script asks most, as plain functions, and as methods of a tracker that remembers of what.

tracker = CostTracker(config, job="runs/jobs/demo")
if tracker.get_accumulated_cost() > limit: …
if tracker.get_cheapest_suitable_instance()["savings_percent"] < 50: …
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from ebbflow.cost.errors import PlanError, ReportError
from ebbflow.cost.ledger.bills import NodeBill
from ebbflow.cost.ledger.ledger import fold
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.prices.history import SpotRecord
from ebbflow.cost.prices.quote import PriceSource
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.events import PRICES, Event, read_events
from ebbflow.infra.store import Store

_REQUEST_SECONDS = 10.0


def get_cheapest_suitable_instance(
    config: RunConfig, *, prices: PriceSource | None = None, now_utc: float | None = None
) -> dict[str, Any]:
    """The pool that finishes the job for the fewest expected dollars, among those that fit and meet the deadline.

    instance_type, nodes, market, region, zone, usd_per_hour (of one node), on_demand_usd_per_hour, savings_percent
    (None where no on-demand price of the type and region is on record), price_kind, expected_hours, expected_usd. Cheap
    per hour is not cheap: a slow GPU at half the price may cost more. Raises PlanError when nothing is suitable.
    """
    plan = make_plan(config, now_utc=time.time() if now_utc is None else now_utc, prices=prices)
    best = plan.chosen
    if best is None:
        reason = plan.refusal
        raise PlanError("no instance is suitable" if reason is None else f"{reason.message} ({reason.hint})")
    names = ("instance_type", "nodes", "market", "region", "zone", "usd_per_hour", "on_demand_usd_per_hour")
    known = {name: getattr(best, name) for name in (*names, "price_kind", "expected_hours", "expected_usd")}
    return {**known, "savings_percent": best.savings_percent}


def get_accumulated_cost(job: str | Sequence[Event], *, history: Iterable[SpotRecord] = ()) -> Decimal:
    """What a job's instances have cost so far, in dollars: the integral of the price over the time each was paid.

    job: its events, or the folder or s3:// URI that they lie below. history: change events of spot prices (as
    `cost.prices.recorded.read_recording` reads them), beside those that the events hold; without any, the plan's price.
    The total of the ledger (`cost.ledger.ledger.fold`) of a job that may still be running: by the second, at least a
    minute of each instance. Raises ReportError where there are no events or `history` lacks the pool of a spot node,
    LedgerError for contradictory events, and StoreError.
    """
    events = read_events(Store.open(job, request_timeout_seconds=_REQUEST_SECONDS)) if isinstance(job, str) else job
    if not events:
        raise ReportError(f"no events of job {job!r}")
    pools = _changes(history)
    told = [replace(events[0], name=PRICES, data={"pools": pools})] if pools else []
    ledger = fold([*events, *told], running=True)
    priced = {str(bill.price.pool): bool(bill.price.curve.changes) for bill in ledger.nodes if _is_spot(bill)}
    if pools and not all(priced.values()):
        lacking = ", ".join(sorted(name for name, known in priced.items() if not known))
        raise ReportError(
            f"the history has no price of {lacking}, so that its changes cannot be told; it has {_names(pools)}"
        )
    return ledger.total_usd


def _is_spot(bill: NodeBill) -> bool:
    return bill.price.pool is not None and bill.price.pool.market == "spot"


def _names(pools: Sequence[dict[str, Any]]) -> str:
    return ", ".join(sorted(f"{pool['instance_type']} in {pool['zone']}" for pool in pools))


def _changes(history: Iterable[SpotRecord]) -> list[dict[str, Any]]:
    """The changes of each pool, as a `prices` event holds them, by its zone's id and by its name: plans have either."""
    pools: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for record in history:
        for zone in {record.zone_id, record.zone_name} - {""}:
            place = (record.instance_type, record.region, zone)
            pools.setdefault(place, []).append((record.at, f"{record.usd_per_hour:f}"))
    return [
        {"instance_type": kind, "market": "spot", "region": region, "zone": zone, "changes": changes}
        for (kind, region, zone), changes in pools.items()
    ]


@dataclass(frozen=True, kw_only=True)
class CostTracker:
    """Both questions of one job. job: see `get_accumulated_cost`; None: it has not begun, and has cost nothing."""

    config: RunConfig
    job: str | None = None
    prices: PriceSource | None = None
    history: Sequence[SpotRecord] = ()

    def get_cheapest_suitable_instance(self) -> dict[str, Any]:
        return get_cheapest_suitable_instance(self.config, prices=self.prices)

    def get_accumulated_cost(self) -> Decimal:
        return Decimal(0) if self.job is None else get_accumulated_cost(self.job, history=self.history)
