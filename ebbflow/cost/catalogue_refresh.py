"""`ebbflow catalogue refresh`: update the shipped tables of instances, prices and interruptions
from AWS.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Required, TypedDict

from ebbflow.core.config.schema import CostConfig
from ebbflow.core.errors import CloudError
from ebbflow.cost.catalogue import (
    ADVISOR,
    ADVISOR_COLUMNS,
    GPUS,
    INSTANCE_COLUMNS,
    INSTANCES,
    ON_DEMAND,
    ON_DEMAND_COLUMNS,
    Catalogue,
    InstanceType,
    load_catalogue,
)
from ebbflow.cost.errors import PriceError
from ebbflow.cost.prices.quote import STALE_DAYS, format_age, table_ages
from ebbflow.infra.aws.answers import InstanceTypeDetail, NetworkDetail
from ebbflow.infra.aws.calls import RequestDeadline, aws_client, paginate

if TYPE_CHECKING:
    from botocore.client import BaseClient

# The region of the Price List, which has the prices of all regions.
PRICE_LIST_REGION = "us-east-1"
AdvisorTable = dict[str, dict[str, dict[str, dict[str, int]]]]
ADVISOR_URL = "https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json"
_ADVISOR_SECONDS = 30.0
_ADVISOR_MOST_BYTES = 64 * 2**20
# A training node: Linux on shared hardware, without licensed software, billed by use.
_LISTED = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "instanceFamily": "GPU instance",
}

_PRICES_HEAD = (
    "# AWS on-demand prices of GPU instance types, Linux, shared tenancy, from the public price "
    "list. recorded: the day of each.\n# A type that is not listed for a region has no price on "
    "record there; another region's never stands in for it.\n"
)

# The price list has many pages and is slow.
_SECONDS = 300.0
_GIGABIT = re.compile(r"(?:(\d+)x )?([0-9.]+) Gigabit$")  # such as "4x 100 Gigabit"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Hardware of an instance type as EC2 describes it."""

    name: str
    gpu: str
    gpu_count: int
    gpu_memory_mib: int  # memory of one GPU
    vcpu: int
    ram_gib: float
    # Baseline bandwidth of all network cards together; None if EC2 states none
    network_gbps: float | None
    efa: int


class ProductAttributes(TypedDict):
    """Attributes of a product in AWS's price list."""

    instanceType: str


class ProductDetail(TypedDict):
    """Description of a product in AWS's price list."""

    attributes: ProductAttributes


class PriceDimension(TypedDict, total=False):
    """Price of a product per unit, as text by currency."""

    unit: str
    pricePerUnit: Required[dict[str, str]]


class ProductOffer(TypedDict):
    """One offer for a product in AWS's price list."""

    priceDimensions: dict[str, PriceDimension]


class ProductTerms(TypedDict, total=False):
    """Offers for a product by terms of payment. Only the on-demand offers are read."""

    OnDemand: dict[str, ProductOffer] | None


class Product(TypedDict, total=False):
    """Entry for a product in AWS's price list."""

    product: Required[ProductDetail]
    terms: ProductTerms


@dataclass(frozen=True, kw_only=True)
class TableChange:
    """Summary of the update of one table."""

    lines: int  # number of lines in the written table
    notes: tuple[str, ...]  # messages about new, changed and omitted lines


def gpu_hardware(ec2: BaseClient, deadline: RequestDeadline) -> list[Hardware]:
    """Return the hardware of all types with NVIDIA GPUs in the region, sorted by name.

    Raises CloudError.
    """
    entries = paginate(
        ec2,
        "describe_instance_types",
        "InstanceTypes",
        deadline,
        shape=InstanceTypeDetail,
        token="NextToken",
    )
    found = [hardware for entry in entries if (hardware := parse_hardware(entry)) is not None]
    return sorted(found, key=lambda hardware: hardware.name)


def on_demand_prices(
    pricing: BaseClient, region: str, deadline: RequestDeadline
) -> dict[str, Decimal]:
    """Return the on-demand price in USD per hour of each GPU type in the region.

    Raises CloudError or PriceError.
    """
    wanted = [*_LISTED.items(), ("regionCode", region)]
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted]
    prices: dict[str, Decimal] = {}
    listed = paginate(
        pricing,
        "get_products",
        "PriceList",
        deadline,
        shape=Product,
        token="NextToken",
        ServiceCode="AmazonEC2",
        Filters=filters,
    )
    for listing in listed:
        product = listing
        if isinstance(listing, str):  # some releases of botocore leave it as JSON text
            product: Product = json.loads(listing)
        name = product["product"]["attributes"]["instanceType"]
        usd = next(_hourly(product), None)
        if usd and prices.setdefault(name, usd) != usd:
            raise PriceError(
                f"price list of {region}: {name} costs {prices[name]} and {usd}, which is ambiguous"
            )
    return prices


def advisor_bands(
    read: Callable[[], bytes] | None = None,
) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the spot advisor's (savings in percent, interruption band) for Linux, by (region,
    instance type).

    Raises:
        PriceError: The advisor does not answer, or its answer cannot be read.
    """
    try:
        data = json.loads((read or _read_advisor)())
        regions: AdvisorTable = data["spot_advisor"]
        bands = {}
        for region, systems in regions.items():
            for name, entry in systems.get("Linux", {}).items():
                bands[(region, name)] = (int(entry["s"]), int(entry["r"]))
        return bands
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PriceError(
            f"{ADVISOR_URL}: not the spot advisor's table: {type(error).__name__}: {error}"
        ) from error


def write_on_demand(
    path: Path, catalogue: Catalogue, listed: Mapping[str, Mapping[str, Decimal]], today: str
) -> TableChange:
    """Update the table of on-demand prices.

    The table keeps prices of other regions and of delisted types.

    Args:
        listed: New prices by region and instance type.
        today: Day of the new prices, such as 2026-07-20.
    """
    lines = {}
    notes = []
    known = {
        (region, kind.name): price
        for kind in catalogue.types
        for region, price in kind.on_demand.items()
    }
    for key, price in known.items():
        lines[key] = f"{key[0]},{key[1]},{price.usd_per_hour:f},{price.recorded}"
    names = {kind.name for kind in catalogue.types}
    for region, prices in listed.items():
        for name, usd in sorted(prices.items()):
            if name not in names:
                continue
            usd = usd.normalize()
            lines[region, name] = f"{region},{name},{usd:f},{today}"
            old = known.get((region, name))
            if old is not None and old.usd_per_hour != usd:
                notes.append(
                    f"{name} in {region}: ${old.usd_per_hour:f} of {old.recorded} is now ${usd:f}"
                )
        gone = [name for of, name in known if of == region and name not in prices]
        notes += [
            f"{name} in {region}: no longer listed; its price of the day it was recorded stays"
            for name in gone
        ]
    _write(path, _PRICES_HEAD, ON_DEMAND_COLUMNS, [lines[key] for key in sorted(lines)])
    return TableChange(lines=len(lines), notes=tuple(notes))


def write_advisor(
    path: Path, catalogue: Catalogue, bands: Mapping[tuple[str, str], tuple[int, int]], today: str
) -> TableChange:
    """Write the spot advisor's table, with only the instance types of the catalogue.

    Args:
        bands: (savings in percent, interruption band) by (region, instance type).
    """
    names = {kind.name for kind in catalogue.types}
    rows = [
        f"{region},{name},{savings},{band}"
        for (region, name), (savings, band) in sorted(bands.items())
        if name in names
    ]
    head = (
        f"# AWS Spot Instance Advisor, all regions, Linux, recorded {today} ({ADVISOR_URL}).\n# "
        "Only the types of instances.csv; a type that is not listed for a region was not advised "
        "on there.\n# savings_percent: against the on-demand price of the region. "
        "interruption_band: share of spot capacity reclaimed in the trailing month: 0 below 5 %, "
        "1 5-10 %, 2 10-15 %, 3 15-20 %, 4 above 20 %.\n"
    )
    _write(path, head, ADVISOR_COLUMNS, rows)
    return TableChange(lines=len(rows), notes=())


def write_instances(
    path: Path, catalogue: Catalogue, found: Sequence[Hardware], gpus: Iterable[str]
) -> TableChange:
    """Add new instance types whose GPU is in `gpus`.

    If EC2's figures for a recorded type differ, only add a note.
    """
    known = {kind.name: kind for kind in catalogue.types}
    lines = {kind.name: _line(kind.name, kind.gpu.name, kind) for kind in catalogue.types}
    notes = []
    for hardware in found:
        if hardware.name in known:
            notes += _differences(hardware, known[hardware.name])
        elif hardware.gpu not in set(gpus):
            notes.append(
                f"{hardware.name}: left out, because gpus.csv has no {hardware.gpu}; add its "
                "peaks with their source"
            )
        elif hardware.network_gbps is None:
            notes.append(
                f"{hardware.name}: left out, because EC2 states no baseline of its network"
            )
        else:
            lines[hardware.name] = _line(hardware.name, hardware.gpu, hardware)
            notes.append(f"{hardware.name}: new, {hardware.gpu_count} × {hardware.gpu}")
    head = "".join(
        f"{line}\n"
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    )
    _write(path, head, INSTANCE_COLUMNS, [lines[name] for name in sorted(lines)])
    return TableChange(lines=len(lines), notes=tuple(notes))


def reread(folder: Path) -> Catalogue:
    return load_catalogue(
        folder / "instances.csv",
        folder / "gpus.csv",
        folder / "spot_advisor.csv",
        folder / "on_demand.csv",
    )


def add_commands(commands: argparse._SubParsersAction) -> None:
    catalogue = commands.add_parser(
        "catalogue", help="renew the shipped tables of types, prices and bands"
    )
    ways = catalogue.add_subparsers(required=True, metavar="COMMAND")
    refresh = ways.add_parser("refresh", help="ask the price list, EC2 and the spot advisor")
    regions = CostConfig.model_validate({}).regions
    refresh.add_argument(
        "--regions",
        nargs="+",
        default=regions,
        metavar="REGION",
        help=f"default: {' '.join(regions)}",
    )
    refresh.add_argument(
        "--output",
        type=Path,
        default=INSTANCES.parent,
        metavar="FOLDER",
        help="default: where the shipped tables lie",
    )
    refresh.add_argument(
        "--no-advisor", action="store_true", help="leave savings and bands as they are"
    )
    refresh.set_defaults(run=refresh_catalogue)
    ways.add_parser("ages", help="the age of each shipped table").set_defaults(run=_print_ages)


def refresh_catalogue(
    arguments: argparse.Namespace,
    *,
    client: Callable[[str, str], BaseClient] | None = None,
    read_advisor: Callable[[], bytes] | None = None,
) -> int:
    """Update all tables from AWS. Write them only after all answers have arrived.

    Args:
        client: Function that creates the client for (service, region). None means a botocore client
            with its usual credentials.
        read_advisor: Function that returns the spot advisor's JSON. None means a download from AWS.

    Raises:
        PriceError: An answer is missing; nothing is written.
    """
    make = client or aws_client
    deadline = RequestDeadline.after(_SECONDS)
    try:
        pricing = make("pricing", PRICE_LIST_REGION)
        listed = {
            region: on_demand_prices(pricing, region, deadline) for region in arguments.regions
        }
        hardware = {
            hardware.name: hardware
            for region in arguments.regions
            for hardware in gpu_hardware(make("ec2", region), deadline)
        }
    except CloudError as error:
        raise PriceError(f"nothing was written, because {error}") from error
    empty = [region for region, prices in listed.items() if not prices]
    if empty:
        raise PriceError(
            f"nothing was written, because the price list has no GPU instance in {', '.join(empty)}"
        )
    if arguments.no_advisor:
        bands = None
    else:
        bands = advisor_bands(read_advisor)
    folder = arguments.output
    today = datetime.now(UTC).date().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    for table in (INSTANCES, GPUS, ON_DEMAND, ADVISOR):
        if not (folder / table.name).exists():
            shutil.copy(table, folder / table.name)
    before = reread(folder)
    gpus = {
        line.split(",")[0] for line in (folder / GPUS.name).read_text(encoding="utf-8").splitlines()
    }
    found = [hardware[name] for name in sorted(hardware)]
    _print_change(
        folder / INSTANCES.name, write_instances(folder / INSTANCES.name, before, found, gpus)
    )
    catalogue = reread(folder)
    _print_change(
        folder / ON_DEMAND.name, write_on_demand(folder / ON_DEMAND.name, catalogue, listed, today)
    )
    if bands is not None:
        _print_change(
            folder / ADVISOR.name, write_advisor(folder / ADVISOR.name, catalogue, bands, today)
        )
    reread(folder)
    return 0


def parse_hardware(entry: InstanceTypeDetail) -> Hardware | None:
    """Parse EC2's description of an instance type.

    Return None for a type with no NVIDIA GPU or a fraction of one.
    """
    gpus = (entry.get("GpuInfo") or {}).get("Gpus") or []
    if len(gpus) != 1 or gpus[0].get("Manufacturer") != "NVIDIA" or not gpus[0].get("Count"):
        return None
    gpu = gpus[0]
    network = entry.get("NetworkInfo") or {}
    baselines = [card.get("BaselineBandwidthInGbps") for card in network.get("NetworkCards") or []]
    known = [baseline for baseline in baselines if baseline is not None]
    network_gbps = None
    if baselines and len(known) == len(baselines):
        network_gbps = min(float(sum(known)), _stated_gbps(network))
    return Hardware(
        name=entry["InstanceType"],
        gpu=gpu["Name"],
        gpu_count=int(gpu["Count"]),
        gpu_memory_mib=int(gpu["MemoryInfo"]["SizeInMiB"]),
        vcpu=int(entry["VCpuInfo"]["DefaultVCpus"]),
        ram_gib=entry["MemoryInfo"]["SizeInMiB"] / 1024,
        network_gbps=network_gbps,
        efa=int((network.get("EfaInfo") or {}).get("MaximumEfaInterfaces", 0)),
    )


def _stated_gbps(network: NetworkDetail) -> float:
    """Return the bandwidth of the whole instance in Gbit/s, as EC2 states it in words.

    The words are, for example, "400 Gigabit" or "Up to 10 Gigabit". The result is infinite if there
    are none. Where cards share one limit, their baselines sum to more: those of g6e.48xlarge to
    1,600.
    """
    stated = _GIGABIT.search(str(network.get("NetworkPerformance") or ""))
    if stated is None:
        return math.inf
    cards, gbps = stated.groups()
    return int(cards or 1) * float(gbps)


def _hourly(product: Product) -> Iterator[Decimal]:
    """Yield the hourly prices of a product in USD. The price of a capacity block is 0."""
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


def _line(name: str, gpu: str, hardware: Hardware | InstanceType) -> str:
    numbers = (
        hardware.gpu_count,
        hardware.gpu_memory_mib,
        hardware.vcpu,
        f"{hardware.ram_gib:g}",
        f"{hardware.network_gbps:g}",
    )
    return ",".join(map(str, (name, gpu, *numbers, hardware.efa)))


def _differences(hardware: Hardware, known: InstanceType) -> list[str]:
    """Return a note for each figure that differs between EC2 and the table.

    The figure in the table stays as it is, because it may be more accurate. For example, the table
    has the sustained bandwidth, while EC2 states the nominal bandwidth.
    """
    pairs = {
        "gpu_count": (hardware.gpu_count, known.gpu_count),
        "vcpu": (hardware.vcpu, known.vcpu),
        "efa": (hardware.efa, known.efa),
    }
    pairs |= {
        "network_gbps": (hardware.network_gbps, known.network_gbps),
        "ram_gib": (hardware.ram_gib, known.ram_gib),
    }
    return [
        f"{hardware.name}: {key} is {ours} here, {theirs} by EC2; the table's stays"
        for key, (theirs, ours) in pairs.items()
        if theirs is not None and theirs != ours
    ]


def _write(path: Path, head: str, columns: Sequence[str], rows: Sequence[str]) -> None:
    path.write_text(
        head + ",".join(columns) + "\n" + "".join(f"{row}\n" for row in rows), encoding="utf-8"
    )


def _print_ages(_: argparse.Namespace) -> int:
    now = time.time()
    for name, day, at in table_ages():
        if now - at > STALE_DAYS * 86400:
            old = f", older than {STALE_DAYS} days"
        else:
            old = ""
        print(f"{name}: {day}, {format_age(now - at)} old{old}")
    return 0


def _print_change(path: Path, change: TableChange) -> None:
    print(f"{path}: {change.lines} lines")
    for line in change.notes:
        print(f"  · {line}")
