"""What AWS says of its GPU instances: hardware from EC2, list prices from the Price List, bands from the advisor.

boto3 is imported when a client is made, and only then. Every question has a deadline (`cost.prices.aws`).
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from cost.errors import PriceError
from cost.prices.aws import Patience, answered

# The Price List's own region; its answers are of all regions.
PRICE_LIST_REGION = "us-east-1"
ADVISOR_URL = "https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json"
_ADVISOR_SECONDS = 30.0
_ADVISOR_MOST_BYTES = 64 * 2**20
# Linux on shared hardware, nothing installed, billed by use: what a training node is.
_LISTED = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "instanceFamily": "GPU instance",
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Of an instance type, as EC2 describes it. gpu: its name there. network_gbps: the baseline of all its cards."""

    name: str
    gpu: str
    gpu_count: int
    gpu_memory_mib: int
    vcpu: int
    ram_gib: float
    network_gbps: float | None
    efa: bool


def gpu_hardware(ec2: Any, region: str, patience: Patience) -> list[Hardware]:
    """All types with NVIDIA GPUs that the region has, by name. Raises Unavailable."""
    found, token = [], ""
    while True:
        request = {"NextToken": token} if token else {}
        page = answered(ec2.describe_instance_types, "ec2:DescribeInstanceTypes", region, patience, **request)
        found += [hardware for entry in page.get("InstanceTypes", []) if (hardware := _hardware(entry)) is not None]
        token = page.get("NextToken") or ""
        if not token:
            return sorted(found, key=lambda hardware: hardware.name)


def on_demand_prices(pricing: Any, region: str, patience: Patience) -> dict[str, Decimal]:
    """Dollars per hour of each GPU type that is listed for the region. Raises Unavailable, PriceError."""
    wanted = [*_LISTED.items(), ("regionCode", region)]
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted]
    prices: dict[str, Decimal] = {}
    token = ""
    while True:
        request = {"ServiceCode": "AmazonEC2", "Filters": filters, **({"NextToken": token} if token else {})}
        page = answered(pricing.get_products, "pricing:GetProducts", PRICE_LIST_REGION, patience, **request)
        for text in page.get("PriceList", []):
            product = json.loads(text) if isinstance(text, str) else text
            name, usd = product["product"]["attributes"]["instanceType"], _usd_per_hour(product)
            if usd is None:
                continue
            if prices.setdefault(name, usd) != usd:
                raise PriceError(f"price list of {region}: {name} costs {prices[name]} and {usd}: which is not known")
        token = page.get("NextToken") or ""
        if not token:
            return prices


def advisor_bands(read: Callable[[], bytes] | None = None) -> dict[tuple[str, str], tuple[int, int]]:
    """(region, type) → (savings in percent, interruption band), Linux. Raises PriceError with what went wrong."""
    try:
        data = json.loads((read or _read_advisor)())
        regions: Mapping[str, Any] = data["spot_advisor"]
        return {
            (region, name): (int(entry["s"]), int(entry["r"]))
            for region, systems in regions.items()
            for name, entry in systems.get("Linux", {}).items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PriceError(f"{ADVISOR_URL}: not the spot advisor's table: {type(error).__name__}: {error}") from error


def _hardware(entry: Mapping[str, Any]) -> Hardware | None:
    """None for a type without NVIDIA GPUs, or with a part of one, which cannot train."""
    gpus = (entry.get("GpuInfo") or {}).get("Gpus") or []
    if len(gpus) != 1 or gpus[0].get("Manufacturer") != "NVIDIA" or not gpus[0].get("Count"):
        return None
    gpu, network = gpus[0], entry.get("NetworkInfo") or {}
    baselines = [card.get("BaselineBandwidthInGbps") for card in network.get("NetworkCards") or []]
    known = bool(baselines) and all(baseline is not None for baseline in baselines)
    return Hardware(
        name=entry["InstanceType"],
        gpu=gpu["Name"],
        gpu_count=int(gpu["Count"]),
        gpu_memory_mib=int(gpu["MemoryInfo"]["SizeInMiB"]),
        vcpu=int(entry["VCpuInfo"]["DefaultVCpus"]),
        ram_gib=entry["MemoryInfo"]["SizeInMiB"] / 1024,
        network_gbps=float(sum(baselines)) if known else None,
        efa=bool(network.get("EfaSupported")),
    )


def _usd_per_hour(product: Mapping[str, Any]) -> Decimal | None:
    """None for what is not sold by the hour, and for the listed zero of capacity blocks."""
    for usd in _hourly(product):
        return usd if usd > 0 else None
    return None


def _hourly(product: Mapping[str, Any]) -> Iterator[Decimal]:
    for offer in (product.get("terms", {}).get("OnDemand") or {}).values():
        for dimension in offer["priceDimensions"].values():
            if dimension.get("unit") in ("Hrs", "Hours"):
                try:
                    yield Decimal(dimension["pricePerUnit"]["USD"])
                except (InvalidOperation, KeyError) as error:
                    raise PriceError(f"price list: not a price in dollars: {dimension}") from error


def _read_advisor() -> bytes:
    with urllib.request.urlopen(ADVISOR_URL, timeout=_ADVISOR_SECONDS) as reply:
        return reply.read(_ADVISOR_MOST_BYTES)
