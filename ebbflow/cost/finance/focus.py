"""Export a job's charges by month in the columns of the billing format FOCUS 1.0
(https://focus.finops.org).
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from ebbflow.core.events import CONFIGURED, Event
from ebbflow.core.grouping import sum_by_key
from ebbflow.cost.ledger.ledger import Ledger, fold
from ebbflow.cost.ledger.pricing import SIMULATED, NodePrice, PriceCurve
from ebbflow.cost.ledger.timeline import MICRO

FOCUS_COLUMNS: tuple[str, ...] = (
    "BilledCost",
    "EffectiveCost",
    "ListCost",
    "BillingCurrency",
    "BillingPeriodStart",
    "BillingPeriodEnd",
    "ChargePeriodStart",
    "ChargePeriodEnd",
    "ChargeCategory",
    "ChargeFrequency",
    "ChargeDescription",
    "ConsumedQuantity",
    "ConsumedUnit",
    "PricingQuantity",
    "PricingUnit",
    "PricingCategory",
    "ProviderName",
    "PublisherName",
    "InvoiceIssuerName",
    "ServiceCategory",
    "ServiceName",
    "RegionId",
    "AvailabilityZone",
    "ResourceId",
    "ResourceType",
    "Tags",
    "x_Job",
    "x_Owner",
    "x_Project",
    "x_PriceKind",
    "x_SimulatedCost",
)
_HOUR = Decimal(3600)
_VOLUME = {
    "PricingCategory": "Standard",
    "ServiceCategory": "Storage",
    "ServiceName": "Amazon Elastic Block Store",
    "ResourceId": "",
    "ResourceType": "Volume",
    "x_PriceKind": "estimated at the list price",
}


@lru_cache(maxsize=4096)
def month_of(unix_time: float) -> str:
    """Return the calendar month of a Unix time in UTC, such as "2026-11"."""
    return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m")


@lru_cache(maxsize=4096)
def month_start(month: str) -> float:
    return datetime.strptime(f"{month}+0000", "%Y-%m%z").timestamp()


def next_month(month: str) -> str:
    return month_of(month_start(month) + 32 * 86400)


def focus_rows(events: Sequence[Event]) -> list[dict[str, str]]:
    """Return the charges of a job as FOCUS rows.

    Each row covers the time of one node, or other paid time of its instance such as an idle pause,
    or its root volume during that time, in one month. The sum of `BilledCost` and `x_SimulatedCost` is the ledger's total before
    rounding. The charges are computed from metered time, not taken from an invoice.
    """
    ledger = fold(events)
    if events:
        job = events[0].job
    else:
        job = ""
    tags = {
        **read_tags(events),
        "ebbflow-job": job,
        "owner": ledger.owner,
        "project": ledger.project,
    }
    common = {
        "BillingCurrency": "USD",
        "ChargeCategory": "Usage",
        "ChargeFrequency": "Usage-Based",
        "ConsumedUnit": "Hours",
        "PricingUnit": "Hours",
        "ServiceCategory": "Compute",
        "ServiceName": "Amazon Elastic Compute Cloud",
        "Tags": json.dumps({key: value for key, value in tags.items() if value}),
        "x_Job": job,
        "x_Owner": ledger.owner,
        "x_Project": ledger.project,
    }
    return [{**common, **row} for row in _charges(ledger)]


def read_settings(events: Sequence[Event]) -> dict[str, Any]:
    """Return the newest recorded configuration of a job: values by dotted key."""
    configured = [event for event in events if event.name == CONFIGURED]
    if configured:
        return {row["key"]: row["value"] for row in configured[-1].data.get("settings", [])}
    return {}


def read_tags(events: Sequence[Event]) -> dict[str, str]:
    """Return the `batch.tags` of a job.

    The events may have one setting with all tags, or one setting per tag.
    """
    settings = read_settings(events)
    tags = settings.get("batch.tags")
    single = {
        key.removeprefix("batch.tags."): value
        for key, value in settings.items()
        if key.startswith("batch.tags.")
    }
    return {
        str(key): str(value)
        for key, value in {**(tags if isinstance(tags, dict) else {}), **single}.items()
    }


def spent_by_month(rows: Iterable[dict[str, str]]) -> dict[str, Decimal]:
    return sum_by_key((row["BillingPeriodStart"][:7], Decimal(row["BilledCost"])) for row in rows)


def write_focus(path: Path, rows: Iterable[dict[str, str]]) -> int:
    """Write the rows as CSV, and return their number."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FOCUS_COLUMNS, lineterminator="\n")
        writer.writeheader()
        number = 0
        for row in rows:
            writer.writerow(row)
            number += 1
    return number


def _charges(ledger: Ledger) -> Iterator[dict[str, str]]:
    for bill in ledger.nodes:
        machine = bill.node.machine
        start = bill.node.started_wall
        words = f"node {bill.node.node} of start {bill.node.generation}"
        usual = _list_curve(bill.price)
        yield from _months(
            bill.price,
            machine,
            start,
            bill.node.paid_seconds,
            bill.curve,
            bill.on_demand_curve,
            words,
        )
        yield from _volume_months(
            bill.price, machine, start, bill.node.paid_seconds, bill.volume_curve, words
        )
        for extra in bill.extras:
            text = f"{str(extra.ledger_class).replace('_', ' ')} of {words}"
            yield from _months(
                bill.price, machine, extra.start, extra.seconds, bill.price.curve, usual, text
            )
            volume = bill.price.volume_curve
            yield from _volume_months(bill.price, machine, extra.start, extra.seconds, volume, text)
    for lost in ledger.unreported:
        stay = lost.job.stay(lost.node)
        words = f"node {lost.node} of AWS Batch job {lost.job.job_id}, which recorded nothing"
        yield from _months(
            lost.price,
            {},
            stay.started,
            stay.stopped - stay.started,
            lost.price.curve,
            _list_curve(lost.price),
            words,
        )
        volume = lost.price.volume_curve
        yield from _volume_months(
            lost.price, {}, stay.started, stay.stopped - stay.started, volume, words
        )


def _list_curve(price: NodePrice) -> PriceCurve | None:
    """Return the on-demand price of a whole instance; None if it is unknown."""
    if price.on_demand_usd_per_hour is None:
        return None
    return PriceCurve(price.on_demand_usd_per_hour)


def _volume_months(
    price: NodePrice,
    machine: dict[str, Any],
    start: float,
    seconds: float,
    curve: PriceCurve,
    words: str,
) -> Iterator[dict[str, str]]:
    """Yield the rows of a root volume, as of `_months`; none if the node has no volume to pay for."""
    if not price.volume_usd_per_hour:
        return
    for row in _months(price, machine, start, seconds, curve, None, f"root volume of {words}"):
        yield {**row, **_VOLUME}


def _months(
    price: NodePrice,
    machine: dict[str, Any],
    start: float,
    seconds: float,
    curve: PriceCurve,
    usual: PriceCurve | None,
    words: str,
) -> Iterator[dict[str, str]]:
    """Split the charge for an interval at the ends of months (UTC), and yield one row per month.

    A row maps the names of FOCUS columns to their values. A simulated run is not billed: its
    dollars are in `x_SimulatedCost`, and all other costs are 0.
    """
    at = round(start * MICRO)
    end = round(start * MICRO) + round(seconds * MICRO)
    simulated = price.kind == SIMULATED
    if not simulated:
        provider = "AWS"
    else:
        provider = "AWS (simulated: ran elsewhere)"
    pool = price.pool
    market = machine.get("market") or (price.pool.market if price.pool else "")
    while at < end:
        month = month_of(at / MICRO)
        until = min(end, round(month_start(next_month(month)) * MICRO))
        hours = f"{Decimal(until - at) / MICRO / _HOUR:.9f}"
        usd = curve.cost(at, until)
        if simulated:
            billed_usd = Decimal(0)
            list_usd = Decimal(0)
            simulated_usd = usd
        else:
            billed_usd = usd
            list_usd = usual.cost(at, until) if usual else usd
            simulated_usd = Decimal(0)
        yield {
            "BilledCost": f"{billed_usd:f}",
            "EffectiveCost": f"{billed_usd:f}",
            "ListCost": f"{list_usd:f}",
            "x_SimulatedCost": f"{simulated_usd:f}",
            "BillingPeriodStart": _iso(month_start(month)),
            "BillingPeriodEnd": _iso(month_start(next_month(month))),
            "ChargePeriodStart": _iso(at / MICRO),
            "ChargePeriodEnd": _iso(until / MICRO),
            "ChargeDescription": words,
            "ConsumedQuantity": hours,
            "PricingQuantity": hours,
            "PricingCategory": {"spot": "Dynamic", "on_demand": "Standard"}.get(market, "Other"),
            **dict.fromkeys(("ProviderName", "PublisherName", "InvoiceIssuerName"), provider),
            "RegionId": str(machine.get("region") or ""),
            "AvailabilityZone": str(machine.get("zone") or ""),
            "ResourceId": str(machine.get("instance_id") or ""),
            "ResourceType": str(
                machine.get("instance_type") or (pool.instance_type if pool else "")
            ),
            "x_PriceKind": price.kind,
        }
        at = until


def _iso(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
