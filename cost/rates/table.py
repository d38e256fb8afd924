"""The tables of list prices, read once: storage, requests and volumes by region, transfer by pair of regions."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cost.errors import CatalogueError

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
