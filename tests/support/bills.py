"""Synthetic Cost and Usage Reports: hourly lines of instances that lived as a test says, billed as
EC2 bills.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

MINIMUM_SECONDS = 60
HOUR = 3600


@dataclass(frozen=True, kw_only=True)
class Instance:
    """start, end: Unix seconds of its life. usd_per_hour: at a moment."""

    instance_id: str
    start: float
    end: float
    usd_per_hour: Callable[[float], float]
    instance_type: str = "g5.xlarge"
    zone: str = "us-east-1a"
    market: str = "spot"
    tags: dict[str, str] = field(default_factory=dict)


def rows_of(instance: Instance, *, tick: float = 1.0) -> Iterator[dict[str, str]]:
    """One line for each hour of its life, charged second by second at the price of each, a minute
    at the least.
    """
    end = max(instance.end, instance.start + MINIMUM_SECONDS)
    use = {"spot": "SpotUsage", "on_demand": "BoxUsage"}[instance.market]
    hour = math.floor(instance.start / HOUR)
    while hour * HOUR < end:
        left = max(instance.start, hour * HOUR)
        right = min(end, (hour + 1) * HOUR)
        usd = 0.0
        at = left
        while at < right:
            step = min(tick, right - at)
            usd += instance.usd_per_hour(at) * step / HOUR
            at += step
        yield {
            "identity/LineItemId": f"{instance.instance_id}-{hour}",
            "bill/InvoiceId": "synthetic",
            "lineItem/LineItemType": "Usage",
            "lineItem/UsageStartDate": _iso(hour * HOUR),
            "lineItem/UsageEndDate": _iso((hour + 1) * HOUR),
            "lineItem/ProductCode": "AmazonEC2",
            "lineItem/UsageType": f"{use}:{instance.instance_type}",
            "lineItem/Operation": "RunInstances:SV001"
            if instance.market == "spot"
            else "RunInstances",
            "lineItem/AvailabilityZone": instance.zone,
            "lineItem/ResourceId": instance.instance_id,
            "lineItem/UsageAmount": f"{(right - left) / HOUR:.10f}",
            "lineItem/CurrencyCode": "USD",
            "lineItem/UnblendedCost": f"{usd:.10f}",
            "product/instanceType": instance.instance_type,
            "pricing/unit": "Hrs",
            **{tag_column(key): value for key, value in instance.tags.items()},
        }
        hour += 1


def tag_column(key: str) -> str:
    """Return the column of a tag: AWS's own keys begin with "aws:", all others with "user:"."""
    if key.startswith("aws:"):
        return f"resourceTags/{key}"
    return f"resourceTags/user:{key}"


def storage_row(resource: str, usage_type: str, usd: str, at: float, **tags: str) -> dict[str, str]:
    """A line that is no instance's: a volume, a bucket, a transfer."""
    hour = math.floor(at / HOUR) * HOUR
    return {
        "bill/InvoiceId": "synthetic",
        "lineItem/LineItemType": "Usage",
        "lineItem/UsageStartDate": _iso(hour),
        "lineItem/UsageEndDate": _iso(hour + HOUR),
        "lineItem/ProductCode": "AmazonS3" if "Timed" in usage_type else "AmazonEC2",
        "lineItem/UsageType": usage_type,
        "lineItem/ResourceId": resource,
        "lineItem/UsageAmount": "1.0",
        "lineItem/UnblendedCost": usd,
        **{f"resourceTags/user:{key.replace('_', '-')}": value for key, value in tags.items()},
    }


def write_report(
    path: Path, rows: Iterable[dict[str, str]], *, second_generation: bool = False
) -> Path:
    """As CSV. second_generation: with the column names of Data Exports, tags as one map."""
    listed = [_renamed(row) if second_generation else row for row in rows]
    columns = []
    for row in listed:
        columns += row
    names = list(dict.fromkeys(columns))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(listed)
    return path


def total_usd(rows: Iterable[dict[str, str]]) -> Decimal:
    return sum((Decimal(row["lineItem/UnblendedCost"]) for row in rows), Decimal(0))


def _renamed(row: dict[str, str]) -> dict[str, str]:
    plain = {
        "lineItem/LineItemType": "line_item_line_item_type",
        "lineItem/UsageStartDate": "line_item_usage_start_date",
        "lineItem/UsageEndDate": "line_item_usage_end_date",
        "lineItem/ProductCode": "line_item_product_code",
        "lineItem/UsageType": "line_item_usage_type",
        "lineItem/AvailabilityZone": "line_item_availability_zone",
        "lineItem/ResourceId": "line_item_resource_id",
        "lineItem/UsageAmount": "line_item_usage_amount",
        "lineItem/UnblendedCost": "line_item_unblended_cost",
        "product/instanceType": "product_instance_type",
        "bill/InvoiceId": "bill_invoice_id",
    }
    tags = {
        f"user_{name.partition(':')[2]}": value
        for name, value in row.items()
        if name.startswith("resourceTags")
    }
    pairs = ", ".join(f'"{key}": "{value}"' for key, value in tags.items())
    return {plain[name]: value for name, value in row.items() if name in plain} | {
        "resource_tags": f"{{{pairs}}}"
    }


def _iso(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
