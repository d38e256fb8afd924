"""Tables of instance types, GPUs, prices and rates. Reading a table validates every line.

An unknown figure is None, never a guess: a pool that needs it is rejected with the reason.
`other_costs` prices storage, requests and transfer:

- storage: number of stored commits × size of a commit × time.
- requests: PUT requests for the parts, indexes and manifests of every commit, and for the events
  and log lines of every rank; GET requests for a restore.
- transfer: if store and pool are in different regions, every commit is sent to the store's region,
  and every start fetches tokens and the newest commit from there. Transfer within a region is free,
  through a gateway endpoint.
"""

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar, overload

from ebbflow.core.config.device_settings import BFLOAT16_CAPABILITY
from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.errors import CatalogueError

T = TypeVar("T")
N = TypeVar("N", int, float)
NamedT = TypeVar("NamedT", bound="_Named")
# The region of the shipped prices; `ebbflow catalogue refresh` adds others.
ON_DEMAND_REGION = "us-east-1"

_HERE = Path(__file__).parent
INSTANCES = _HERE / "instances.csv"
GPUS = _HERE / "gpus.csv"
ADVISOR = _HERE / "spot_advisor.csv"
ON_DEMAND = _HERE / "on_demand.csv"
INSTANCE_COLUMNS = (
    "name",
    "gpu",
    "gpu_count",
    "gpu_memory_mib",
    "vcpu",
    "ram_gib",
    "network_gbps",
    "efa",
)
_GPU_FIGURES = (
    "compute_capability",
    "nvlink",
    "bf16_tflops",
    "fp16_tflops",
    "fp32_tflops",
    "memory_gbps",
    "fitted_runs",
    "fit_deviation",
)
GPU_COLUMNS = ("gpu", *_GPU_FIGURES, "source", "fit_source", "note")
ADVISOR_COLUMNS = ("region", "name", "savings_percent", "interruption_band")
ON_DEMAND_COLUMNS = ("region", "name", "usd_per_hour", "recorded")
_RECORDED = re.compile(r"\brecorded (\d{4}-\d{2}(?:-\d{2})?)")

_YES_NO = {"yes": True, "no": False}
RATES_RECORDED = "2026-11"
# Origin of the rates, as plans and reports describe it.
RATES_KIND = f"list prices, recorded {RATES_RECORDED}"

GB = 2**30
HOURS_PER_MONTH = 730.0
_VOLUME_QUANTUM = Decimal("1e-9")
# A checkpoint is uploaded in parts of this size; each rank adds an index (training/checkpoint).
PART_BYTES = 32 * 2**20
# Every rank flushes its event log each 10 s and its log lines each 15 s.
SMALL_PUTS_PER_RANK_HOUR = 3600 / 10 + 3600 / 15


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU model."""

    name: str
    compute_capability: float
    nvlink: bool  # whether the GPUs of a node are connected by NVLink
    # bf16_tflops, fp16_tflops, fp32_tflops: dense peak in TFLOP/s; None if the vendor publishes
    # none (see `note`)
    bf16_tflops: float | None
    fp16_tflops: float | None  # only of GPUs without bfloat16
    fp32_tflops: float | None
    memory_gbps: float | None  # memory bandwidth in GB/s
    # Number of published runs to which the plan's speed was fitted, and the standard deviation of
    # log(published / fitted) among them; None: no run
    fitted_runs: int | None
    fit_deviation: float | None
    # source, fit_source: publications of the peaks and of the fitted runs
    source: str
    fit_source: str
    note: str

    def peak_flops(self, dtype: str) -> float | None:
        """Return the dense peak in FLOP/s for bfloat16, float16, float32 or tf32; None if unknown.

        TF32 has half the peak of bfloat16 in each data sheet that names both (A100, A10G, L4, L40S,
        H100, H200, B200). A card without tensor cores for TF32 computes in float32. Where no sheet
        names the peak of a card with bfloat16, that of float32 is a lower bound.
        """
        has_bfloat16 = self.compute_capability >= BFLOAT16_CAPABILITY
        if dtype == "float32":
            tflops = self.fp32_tflops
        elif dtype == "tf32" and self.bf16_tflops is not None:
            tflops = self.bf16_tflops / 2
        elif dtype == "tf32" or (self.bf16_tflops is None and has_bfloat16):
            tflops = self.fp32_tflops
        else:
            tflops = self.bf16_tflops
        if dtype == "float16" and tflops is None:
            tflops = self.fp16_tflops
        if tflops is None:
            return None
        return tflops * 1e12


@dataclass(frozen=True, kw_only=True)
class SpotAdvice:
    """Entry of the AWS Spot Instance Advisor for an instance type in a region."""

    savings_percent: float  # savings against the on-demand price
    # band number for the share of Spot capacity that AWS reclaims in a month, from 0 (less than 5
    # %) to 4 (more than 20 %)
    interruption_band: int


@dataclass(frozen=True, kw_only=True)
class OnDemandPrice:
    """On-demand price of an instance type in a region, exactly as listed."""

    usd_per_hour: Decimal
    recorded: str  # day on which AWS listed this price, such as 2026-07-20


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """An AWS instance type."""

    name: str
    gpu: Gpu
    gpu_count: int
    gpu_memory_mib: int  # memory of one GPU
    vcpu: int
    ram_gib: float
    network_gbps: float  # sustained bandwidth of the node, in Gbit/s
    efa: int  # the most interfaces with the Elastic Fabric Adapter; 0: none
    # on_demand, advice: on-demand price and line of the Spot Instance Advisor, each by region
    on_demand: Mapping[str, OnDemandPrice] = field(default_factory=dict)
    advice: Mapping[str, SpotAdvice] = field(default_factory=dict)

    @property
    def gpu_memory_bytes(self) -> int:
        return self.gpu_memory_mib * 2**20

    def interruption_band(self, region: str) -> int | None:
        """Return the spot advisor's interruption band for the region (0 to 4); None if the advisor
        does not list it.
        """
        advice = self.advice.get(region)
        if advice is None:
            return None
        return advice.interruption_band


@dataclass(frozen=True)
class Catalogue:
    """All instance types, in the order of the table.

    `catalogue[name]` is the type with that name.
    """

    types: tuple[InstanceType, ...]
    # The types are pools of the configuration, which `cluster.instance_types` does not name
    are_pools: bool = False

    def __getitem__(self, name: str) -> InstanceType:
        for kind in self.types:
            if kind.name == name:
                return kind
        raise KeyError(name)

    def matching(self, prefixes: list[str]) -> tuple[InstanceType, ...]:
        """Return the types whose names begin with any of the prefixes; all types if there are no
        prefixes.
        """
        if self.are_pools:
            return self.types
        return tuple(
            kind for kind in self.types if not prefixes or kind.name.startswith(tuple(prefixes))
        )


@dataclass(frozen=True, kw_only=True)
class RegionRates:
    """List prices of storage and requests in one region, in USD."""

    # storage_usd, volume_usd: S3 storage and disk volumes, per GB (2^30 bytes) and month
    storage_usd: float
    # put_usd, get_usd: per 1,000 requests
    put_usd: float
    get_usd: float
    volume_usd: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """List prices of storage, requests and transfer. A missing key means an unrecorded price."""

    regions: Mapping[str, RegionRates]  # prices of storage and requests by region
    # Price of transfer by (from region, to region), in USD per GB
    egress: Mapping[tuple[str, str], float]

    def egress_usd_per_gb(self, source: str, target: str) -> float | None:
        """Return the price of transfer between two regions in USD per GB; 0 within a region, None
        if not on record.
        """
        if source == target:
            return 0.0
        return self.egress.get((source, target))


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Quantities from which the cost of storage and transfer for the remaining work is computed."""

    nodes: int
    ranks: int
    hours: float  # paid hours per node
    commit_bytes: float  # size of one commit of all ranks
    commits: float  # number of commits written
    starts: float  # number of starts of the job, including the first one
    restores: float  # number of starts that load a commit
    token_bytes: float  # upper bound on the bytes of tokens that one node reads per start


@dataclass(frozen=True, kw_only=True)
class Bill:
    """Cost of storage, requests and transfer in dollars."""

    storage_usd: float
    transfer_usd: float
    # messages about prices that are not on record. Costs that depend on such a price count as 0.
    lacking: tuple[str, ...] = ()


def load_catalogue(
    instances: Path = INSTANCES,
    gpus: Path = GPUS,
    advisor: Path = ADVISOR,
    on_demand: Path = ON_DEMAND,
) -> Catalogue:
    """Load the catalogue from its four tables.

    Raises CatalogueError with file:line:column for an invalid value.
    """
    models = {gpu.name: gpu for gpu in _unique(_read_gpus(gpus), gpus)}
    advice = _read_advice(advisor)
    prices = _read_on_demand(on_demand)
    types = _unique(_read_instances(instances, models), instances)
    return Catalogue(
        tuple(
            replace(kind, advice=advice.get(kind.name, {}), on_demand=prices.get(kind.name, {}))
            for kind in types
        )
    )


def efa_interfaces(instance_type: str, most: int) -> int:
    """Return the number of EFA interfaces that a node of the job requests.

    It is `most`, or fewer if the instance type is known to have fewer.
    """
    return min([most, *(kind.efa for kind in load_catalogue().types if kind.name == instance_type)])


@cache
def advisor_recorded() -> str:
    """Return the day or month when the spot advisor's table was recorded.

    Raises CatalogueError if it has no date.
    """
    found = _RECORDED.search(ADVISOR.read_text(encoding="utf-8")[:1000])
    if found is None:
        raise CatalogueError(f'{ADVISOR}:1:1: no "recorded 2025-07" in the first line')
    return found[1]


@cache
def on_demand_recorded() -> Mapping[str, str]:
    """Return the day on which the oldest on-demand price was recorded, by region.

    Omit regions without prices.
    """
    oldest: dict[str, str] = {}
    for regions in _read_on_demand(ON_DEMAND).values():
        for region, price in regions.items():
            oldest[region] = min(price.recorded, oldest.get(region, price.recorded))
    return oldest


@cache
def load_rates() -> Rates:
    """Read the tables of list prices and of transfer prices.

    Raises CatalogueError with file:line:column for an invalid price.
    """
    prices = [field.name for field in fields(RegionRates)]
    return Rates(
        regions={
            row.parse("region", *_REGION): RegionRates(
                **{name: row.parse(name, *_LIST_PRICE) for name in prices}
            )
            for row in _rows(_HERE / "list_prices.csv", ["region", *prices])
        },
        egress={
            (row.parse("from_region", *_REGION), target): row.parse(
                "price_usd_per_gb", *_LIST_PRICE
            )
            for row in _rows(
                _HERE / "egress.csv", ["from_region", "price_usd_per_gb", "to_regions"]
            )
            for target in row.parse("to_regions", str.split, "region names separated by spaces")
        },
    )


def other_costs(config: RunConfig, usage: Usage, region: str, rates: Rates) -> Bill:
    """Return the cost of storage, requests and transfer in `region`; 0 without S3.

    The volumes of nodes are part of their price (`volume_usd_per_hour`).
    """
    lacking: list[str] = []
    months = usage.hours / HOURS_PER_MONTH
    storage = 0.0
    if not config.store.startswith("s3://"):
        return Bill(storage_usd=storage, transfer_usd=0.0)
    store_region = config.cost.store_region or region
    there = rates.regions.get(store_region)
    if there is None:
        lacking.append(f"no list price of S3 in {store_region} on record")
    else:
        storage += kept_commits(config) * usage.commit_bytes / GB * months * there.storage_usd
        storage += _puts(usage) / 1000 * there.put_usd + _gets(usage) / 1000 * there.get_usd
    transfer, missing = _transfer(usage, region, store_region, rates)
    return Bill(storage_usd=storage, transfer_usd=transfer, lacking=(*lacking, *missing))


def volume_usd_per_hour(config: RunConfig, region: str, rates: Rates) -> Decimal:
    """Return the dollars per hour of the EBS volume of one node; 0 without a list price."""
    here = rates.regions.get(region)
    if here is None:
        return Decimal(0)
    usd_per_month = config.cost.volume_gib_per_node * here.volume_usd
    return Decimal(str(usd_per_month / HOURS_PER_MONTH)).quantize(_VOLUME_QUANTUM)


def kept_commits(config: RunConfig) -> int:
    """Count the stored commits: the newest, the best, one per `keep_every_steps`, and the one being
    written.
    """
    saves = config.checkpoint
    if saves.keep_every_steps:
        every = config.training.max_steps // saves.keep_every_steps
    else:
        every = 0
    return saves.keep_last + saves.keep_best.count + every + 1


class _Row:
    """One line of a table. The message of a parsing error has the file, the line and the column."""

    def __init__(self, path: Path, number: int, line: str, header: list[str]) -> None:
        self.path = path
        self.number = number
        self.cells = next(csv.reader([line]))
        self.header = header
        if len(self.cells) != len(header):
            raise CatalogueError(
                f"{path}:{number}:1: {len(self.cells)} cells, expected {len(header)}: {line!r}"
            )

    @overload
    def parse(self, key: str, convert: Callable[[str], T], expected: str) -> T: ...
    @overload
    def parse(
        self, key: str, convert: Callable[[str], T], expected: str, *, optional: bool
    ) -> T | None: ...
    def parse(
        self, key: str, convert: Callable[[str], T], expected: str, *, optional: bool = False
    ) -> T | None:
        index = self.header.index(key)
        text = self.cells[index]
        if text == "" and optional:
            return None
        try:
            return convert(text)
        except (ValueError, KeyError) as error:
            column = sum(len(cell) + 1 for cell in self.cells[:index]) + 1
            where = f"{self.path}:{self.number}:{column}"
            raise CatalogueError(f"{where}: {key}: {text!r} is not {expected}") from error


def _rows(path: Path, columns: list[str]) -> Iterator[_Row]:
    header: list[str] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if header is not None:
            yield _Row(path, number, line, header)
            continue
        header = next(csv.reader([line]))
        if header != columns:
            raise CatalogueError(f"{path}:{number}:1: columns {header}, expected {columns}")
    if header is None:
        raise CatalogueError(f"{path}:1:1: no header line, expected {','.join(columns)}")


def _read_gpus(path: Path) -> Iterator[Gpu]:
    for row in _rows(path, list(GPU_COLUMNS)):
        yield Gpu(
            name=row.parse("gpu", _text, "a name"),
            compute_capability=row.parse(
                "compute_capability", _number(1, 100), "a compute capability"
            ),
            nvlink=row.parse("nvlink", _YES_NO.__getitem__, "yes or no"),
            bf16_tflops=row.parse(
                "bf16_tflops", _number(1, 1e5), "TFLOP/s in 1 … 100000", optional=True
            ),
            fp16_tflops=row.parse(
                "fp16_tflops", _number(1, 1e5), "TFLOP/s in 1 … 100000", optional=True
            ),
            fp32_tflops=row.parse(
                "fp32_tflops", _number(1, 1e4), "TFLOP/s in 1 … 10000", optional=True
            ),
            memory_gbps=row.parse(
                "memory_gbps", _number(1, 1e5), "GB/s in 1 … 100000", optional=True
            ),
            fitted_runs=row.parse("fitted_runs", int, "a number of runs", optional=True),
            fit_deviation=row.parse(
                "fit_deviation", _number(0, 10), "a deviation in 0 … 10", optional=True
            ),
            source=row.parse("source", _text, "a source"),
            fit_source=row.parse("fit_source", str, "text"),
            note=row.parse("note", str, "text"),
        )


def _read_instances(path: Path, gpus: dict[str, Gpu]) -> Iterator[InstanceType]:
    for row in _rows(path, list(INSTANCE_COLUMNS)):
        yield InstanceType(
            name=row.parse("name", _text, "a name"),
            gpu=row.parse("gpu", gpus.__getitem__, f"a GPU of gpus.csv ({', '.join(gpus)})"),
            gpu_count=row.parse("gpu_count", _whole(1, 128), "a count in 1 … 128"),
            gpu_memory_mib=row.parse(
                "gpu_memory_mib", _whole(1024, 2**20), "MiB in 1024 … 1048576"
            ),
            vcpu=row.parse("vcpu", _whole(1, 1024), "a count in 1 … 1024"),
            ram_gib=row.parse("ram_gib", _number(1, 65536), "GiB in 1 … 65536"),
            network_gbps=row.parse("network_gbps", _number(0.1, 10000), "Gbit/s in 0.1 … 10000"),
            efa=row.parse("efa", _whole(0, 64), "a count in 0 … 64"),
        )


def _read_on_demand(path: Path) -> dict[str, dict[str, OnDemandPrice]]:
    """Read on-demand prices by type and region.

    The table may have types that are not in the catalogue.
    """

    def price(row: _Row) -> OnDemandPrice:
        row.parse("usd_per_hour", _number(0.01, 1000), "$/h in 0.01 … 1000")
        return OnDemandPrice(
            usd_per_hour=row.parse("usd_per_hour", Decimal, "a decimal"),
            recorded=row.parse(
                "recorded", lambda text: date.fromisoformat(text).isoformat(), "a day, 2026-07-20"
            ),
        )

    return _by_type_and_region(path, ON_DEMAND_COLUMNS, price)


def _read_advice(path: Path) -> dict[str, dict[str, SpotAdvice]]:
    """Read the spot advisor's entries by type and region.

    The table may have types that are not in the catalogue.
    """

    def advice(row: _Row) -> SpotAdvice:
        return SpotAdvice(
            savings_percent=row.parse("savings_percent", _number(-100, 99), "percent in -100 … 99"),
            interruption_band=row.parse("interruption_band", _whole(0, 4), "a band in 0 … 4"),
        )

    return _by_type_and_region(path, ADVISOR_COLUMNS, advice)


def _by_type_and_region(
    path: Path, columns: Sequence[str], read: Callable[[_Row], T]
) -> dict[str, dict[str, T]]:
    found: dict[str, dict[str, T]] = {}
    for row in _rows(path, list(columns)):
        region = row.parse("region", *_REGION)
        name = row.parse("name", _text, "a name")
        regions = found.setdefault(name, {})
        if region in regions:
            raise CatalogueError(f"{path}:{row.number}:1: {name} is listed twice for {region}")
        regions[region] = read(row)
    return found


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("empty")
    return text


_REGION = _text, "a region"


def _number(low: float, high: float) -> Callable[[str], float]:
    return _within(float, low, high)


def _whole(low: float, high: float) -> Callable[[str], int]:
    return _within(int, low, high)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def _within(kind: Callable[[str], N], low: float, high: float) -> Callable[[str], N]:
    def convert(text: str) -> N:
        value = kind(text)
        if not low <= value <= high:  # also false for NaN
            raise ValueError(text)
        return value

    return convert


# No list price of a gigabyte, or of a thousand requests, is above $10.
_LIST_PRICE = _number(0, 10), "dollars in 0 … 10"


def _unique(items: Iterator[NamedT], path: Path) -> Iterator[NamedT]:
    seen: set[str] = set()
    for item in items:
        if item.name in seen:
            raise CatalogueError(f"{path}: {item.name} is listed twice")
        seen.add(item.name)
        yield item


def _puts(usage: Usage) -> float:
    parts = math.ceil(usage.commit_bytes / usage.ranks / PART_BYTES)
    if parts > 1:
        begin_and_end = 2
    else:
        begin_and_end = 0
    per_commit = usage.ranks * (parts + begin_and_end + 1) + 1
    return usage.commits * per_commit + SMALL_PUTS_PER_RANK_HOUR * usage.ranks * usage.hours


def _gets(usage: Usage) -> float:
    per_restore = usage.ranks * (math.ceil(usage.commit_bytes / usage.ranks / PART_BYTES) + 2)
    return usage.restores * per_restore + usage.starts * usage.nodes * math.ceil(
        usage.token_bytes / PART_BYTES
    )


def _transfer(
    usage: Usage, region: str, store_region: str, rates: Rates
) -> tuple[float, list[str]]:
    if region == store_region:
        return 0.0, []
    out = rates.egress_usd_per_gb(region, store_region)
    back = rates.egress_usd_per_gb(store_region, region)
    if out is None or back is None:
        return 0.0, [f"no price of transfer between {region} and {store_region} on record"]
    leaves = usage.commits * usage.commit_bytes
    enters = usage.restores * usage.commit_bytes + usage.starts * usage.nodes * usage.token_bytes
    return (leaves * out + enters * back) / GB, []
