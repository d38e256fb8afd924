"""The `money` part of a report: who pays, what was forecast, what each cause cost, what hindsight would have paid."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from ebbflow.cost.ledger.bills import NodeBill, SilentBill
from ebbflow.cost.ledger.generations import Generation
from ebbflow.cost.ledger.ledger import Ledger
from ebbflow.cost.ledger.timeline import MICRO
from ebbflow.cost.money import apportion
from ebbflow.cost.report.attempts import attempt_figures
from ebbflow.cost.report.hindsight import hindsight
from ebbflow.infra.events import BUDGET, PLAN, PREFLIGHT, Event


def money_figures(events: Sequence[Event], generations: dict[int, Generation], ledger: Ledger) -> dict[str, Any]:
    """Plain JSON. events: by time.

    forecast: of the first plan, for the whole job; later plans are for what was left. compute_usd leaves storage and
    transfer out, which the ledger does not meter. causes: dollars with six places
    that sum to the total. hindsight: None where it cannot be told. thresholds: shares of the budget that were reached.
    prices: of each kind of machine that nodes really ran on, how its price is known, and its dollars.
    attempts: on AWS Batch, planned against actual (`ebbflow.cost.report.attempts`).
    light_steps_away: the steps around training were sent to other machines as well, which the ledger does not meter.
    """
    found = hindsight(events, generations, ledger)
    return {
        "owner": ledger.owner,
        "project": ledger.project,
        "forecast": _forecast(events),
        "causes": [
            {"cause": line.cause, "rank_seconds": line.rank_microseconds / MICRO, "usd": float(line.usd)}
            for line in ledger.causes
        ],
        "hindsight": None if found is None else found.to_json(ledger.total_usd),
        "thresholds": sorted({event.data["threshold"] for event in events if event.name == BUDGET}),
        "instances": sorted({bill.node.instance_id for bill in ledger.nodes if bill.node.instance_id}),
        "unknown_nodes": sum(bill.node.instance_id is None for bill in ledger.nodes),
        "price_changes": _price_changes(ledger),
        "prices": _prices(ledger),
        "attempts": attempt_figures(events, ledger),
        "light_steps_away": any(event.data.get("sent_away") for event in events if event.name == PREFLIGHT),
    }


def _forecast(events: Sequence[Event]) -> dict[str, Any] | None:
    plan = next((event.data for event in events if event.name == PLAN and event.data.get("chosen")), None)
    if plan is None:
        return None
    chosen = plan["chosen"]
    expected = chosen.get("expected_usd")
    return {
        "usd": expected,
        "compute_usd": chosen.get("compute_usd", expected),
        "hours": chosen.get("expected_hours"),
        "interruptions": chosen.get("interruptions"),
        "kind": "estimated",
    }


def _price_changes(ledger: Ledger) -> int:
    """Changes of price while a node was being paid for."""
    return sum(
        bill.node.started_wall < at / MICRO < bill.node.ended_wall
        for bill in ledger.nodes
        for at, _ in bill.price.curve.changes
    )


def _prices(ledger: Ledger) -> list[dict[str, Any]]:
    """Dollars sum to the total."""
    grouped: dict[tuple[str, str], list[NodeBill | SilentBill]] = {}
    for bill in (*ledger.nodes, *ledger.silent):
        pool = "" if bill.price.pool is None else str(bill.price.pool)
        grouped.setdefault((pool, bill.price.kind), []).append(bill)
    spent = [sum((bill.usd for bill in bills), Decimal(0)) for bills in grouped.values()]
    return [
        {"pool": pool, "kind": kind, "nodes": len(bills), "usd": float(usd)}
        for ((pool, kind), bills), usd in zip(grouped.items(), apportion(spent, total=ledger.total_usd), strict=True)
    ]
