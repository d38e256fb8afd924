"""List prices of storage, requests, volumes and transfer, and what a job uses of them.

- storage: the commits that are kept at once × their size × the time; each node's volume × the time it is paid.
- requests: puts of parts, indexes and manifests of every commit, and of the events and log lines of every rank while it
  runs; gets of a restore.
- transfer (data gravity): with the store in another region than the pool, every commit leaves the pool's region, and
  every start brings tokens and the newest commit from the store's. Within a region nothing, through a gateway endpoint.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ebbflow.cost.errors import CatalogueError
from ebbflow.infra.config.schema import RunConfig

RATES_RECORDED = "2026-11"
# What every place that shows such a figure says of it.
RATES_KIND = f"list prices, recorded {RATES_RECORDED}"
_HERE = Path(__file__).parent
# No list price of a gigabyte, or of a thousand requests, is above; what is, is no such price.
_HIGHEST_USD = 10.0


@dataclass(frozen=True, kw_only=True)
class RegionRates:
    """List prices of one region, USD. storage and volume: per GB (2^30 bytes) and month; put, get: per 1,000."""

    storage_usd: float
    put_usd: float
    get_usd: float
    volume_usd: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """regions: by name; one that is missing has no price on record. egress: (from, to) → USD per GB."""

    regions: Mapping[str, RegionRates]
    egress: Mapping[tuple[str, str], float]

    def egress_usd_per_gb(self, source: str, target: str) -> float | None:
        """Of data that leave `source` for `target`; 0 within a region; None: not on record."""
        return 0.0 if source == target else self.egress.get((source, target))


@cache
def load_rates(list_prices: Path = _HERE / "list_prices.csv", egress: Path = _HERE / "egress.csv") -> Rates:
    """Both tables. Raises CatalogueError naming file:line for what cannot be a price."""
    names = list(RegionRates.__dataclass_fields__)
    regions = {key[0]: RegionRates(**dict(zip(names, usd, strict=True))) for key, usd in _rows(list_prices, 1, names)}
    pairs = {(key[0], key[1]): usd[0] for key, usd in _rows(egress, 2, ["price_usd_per_gb"])}
    return Rates(regions=regions, egress=pairs)


def _rows(path: Path, keys: int, names: list[str]) -> Iterator[tuple[list[str], list[float]]]:
    """(keys, prices) of each line after the header, whose last columns must be `names`."""
    header: list[str] | None = None
    with path.open(encoding="utf-8", newline="") as file:
        for number, line in enumerate(file, start=1):
            if line.startswith("#") or not line.strip():
                continue
            cells = next(csv.reader([line.strip()]))
            if header is None:
                header = cells
                if header[keys:] != names:
                    raise CatalogueError(f"{path}:{number}: columns {header}, expected {names} after {keys}")
                continue
            yield cells[:keys], _prices(cells[keys:], f"{path}:{number}", names)


def _prices(cells: list[str], where: str, names: list[str]) -> list[float]:
    try:
        prices = [float(cell) for cell in cells]
    except ValueError as error:
        raise CatalogueError(f"{where}: {cells} are not the prices {', '.join(names)}") from error
    if len(prices) != len(names) or not all(0 <= usd <= _HIGHEST_USD for usd in prices):
        raise CatalogueError(f"{where}: {cells} are not the prices {', '.join(names)}, 0 to {_HIGHEST_USD:g} dollars")
    return prices


GB = 2**30
HOURS_PER_MONTH = 730.0
# A commit's data go up in parts of this size, and a rank adds an index (training/checkpoint).
PART_BYTES = 32 * 2**20
# A remote event log is flushed each 10 s, shipped log lines each 15 s, by every rank.
SMALL_PUTS_PER_RANK_HOUR = 3600 / 10 + 3600 / 15


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the remaining work takes, whatever the pool's place. commit_bytes: of one commit, all ranks together.

    commits: written in all. starts: of the gang, the first one included. token_bytes: that one node reads per start,
    at most. hours: paid.
    """

    nodes: int
    ranks: int
    hours: float
    commit_bytes: float
    commits: float
    starts: float
    restores: float
    token_bytes: float


@dataclass(frozen=True, kw_only=True)
class Bill:
    """Dollars. lacking: what could not be priced, and why; such parts count as nothing."""

    storage_usd: float
    transfer_usd: float
    lacking: tuple[str, ...] = ()


def other_costs(config: RunConfig, usage: Usage, region: str, rates: Rates) -> Bill:
    """Storage with requests, and transfer, of a pool in `region`. Without an s3:// store only the volumes."""
    lacking: list[str] = []
    months = usage.hours / HOURS_PER_MONTH
    here = rates.regions.get(region)
    storage = 0.0
    if here is None:
        lacking.append(f"no list price of volumes in {region} on record")
    else:
        storage += usage.nodes * config.cost.volume_gib_per_node * months * here.volume_usd
    if not config.store.startswith("s3://"):
        return Bill(storage_usd=storage, transfer_usd=0.0, lacking=tuple(lacking))
    store_region = config.cost.store_region or region
    there = rates.regions.get(store_region)
    if there is None:
        lacking.append(f"no list price of S3 in {store_region} on record")
    else:
        storage += kept_commits(config) * usage.commit_bytes / GB * months * there.storage_usd
        storage += _puts(usage) / 1000 * there.put_usd + _gets(usage) / 1000 * there.get_usd
    transfer, missing = _transfer(usage, region, store_region, rates)
    return Bill(storage_usd=storage, transfer_usd=transfer, lacking=(*lacking, *missing))


def kept_commits(config: RunConfig) -> int:
    """At once: the newest and the best, and the one that is being written. Those of keep_every_steps come on top."""
    saves = config.checkpoint
    every = config.training.max_steps // saves.keep_every_steps if saves.keep_every_steps else 0
    return saves.keep_last + saves.keep_best + every + 1


def _puts(usage: Usage) -> float:
    parts = math.ceil(usage.commit_bytes / usage.ranks / PART_BYTES)
    begin_and_end = 2 if parts > 1 else 0
    per_commit = usage.ranks * (parts + begin_and_end + 1) + 1
    return usage.commits * per_commit + SMALL_PUTS_PER_RANK_HOUR * usage.ranks * usage.hours


def _gets(usage: Usage) -> float:
    per_restore = usage.ranks * (math.ceil(usage.commit_bytes / usage.ranks / PART_BYTES) + 2)
    return usage.restores * per_restore + usage.starts * usage.nodes * math.ceil(usage.token_bytes / PART_BYTES)


def _transfer(usage: Usage, region: str, store_region: str, rates: Rates) -> tuple[float, list[str]]:
    if region == store_region:
        return 0.0, []
    out, back = rates.egress_usd_per_gb(region, store_region), rates.egress_usd_per_gb(store_region, region)
    if out is None or back is None:
        return 0.0, [f"no price of transfer between {region} and {store_region} on record"]
    leaves = usage.commits * usage.commit_bytes
    enters = usage.restores * usage.commit_bytes + usage.starts * usage.nodes * usage.token_bytes
    return (leaves * out + enters * back) / GB, []
