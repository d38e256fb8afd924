"""Recorded availability and prices of pools, as files.

A trace is one zone's JSON file: `{"metadata": {"gap_seconds": 195, "values": "available_count"}, "data": [1, 0, …]}`,
one value per tick of `gap_seconds`. What the values mean is named by `metadata.values`:

- `available_count`: how many machines could be had (0: none). The default of this shape.
- `preempted`: 1 where a machine would have been preempted, 0 where it could run. Public copies of the same recordings
  exist in both polarities, so a file that names neither is read as `available_count` and the reading says so.

Prices are one JSON file, plain or gzip, `{"<name of the trace>": [usd_per_hour, …]}`, on the same ticks.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost.errors import TraceError

POLARITIES = ("available_count", "preempted")
_ZONE = re.compile(r"^(?P<region>[a-z]+(?:-[a-z]+)+-?\d+)-?(?P<letter>[a-z])(?:_|$)")


@dataclass(frozen=True, slots=True)
class Trace:
    """One zone's machines over time. `available` counts them per tick, shape (ticks,), int."""

    name: str
    region: str
    zone: str
    gap_seconds: float
    available: NDArray[np.int64]
    polarity: str
    polarity_named: bool

    @property
    def hours(self) -> float:
        return len(self.available) * self.gap_seconds / 3600


def read_traces(folder: Path, *, values: str | None = None) -> list[Trace]:
    """All traces `*.json` of a folder, sorted by name.

    `values` says the polarity of files that do not name theirs. Raises TraceError with the file and the key.
    """
    paths = sorted(path for path in folder.glob("*.json") if path.is_file())
    if not paths:
        raise TraceError(f"{folder}: no *.json traces here; expected one file per zone, such as us-east-1a_v100_1.json")
    traces = [read_trace(path, values=values) for path in paths]
    gaps = {trace.gap_seconds for trace in traces}
    if len(gaps) > 1:
        raise TraceError(f"{folder}: metadata.gap_seconds differs between files: {sorted(gaps)}; resample them to one")
    return traces


def read_trace(path: Path, *, values: str | None = None) -> Trace:
    """One trace. Zone and region come from the file's name (`us-east-1a_….json`), or from `metadata.zone`."""
    document = _document(path)
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise TraceError(f"{path}: key metadata: expected an object with gap_seconds and values, found {metadata!r}")
    gap = metadata.get("gap_seconds")
    if isinstance(gap, bool) or not isinstance(gap, int | float) or not 0 < gap < math.inf:
        raise TraceError(f"{path}: key metadata.gap_seconds: expected seconds above 0, found {gap!r}")
    polarity, named = _polarity(path, metadata, values)
    counts = _counts(path, document.get("data"))
    if polarity == "preempted":
        if counts.max() > 1:
            tick = int(counts.argmax())
            raise TraceError(
                f"{path}: data[{tick}] is {counts[tick]}, but values are named 'preempted', which are 0 or 1; "
                "counts of machines are 'available_count'"
            )
        counts = 1 - counts
    region, zone = _place(path, metadata)
    return Trace(path.name.removesuffix(".json"), region, zone, float(gap), counts, polarity, named)


def read_prices(path: Path) -> dict[str, NDArray[np.float64]]:
    """Prices per trace name, USD per hour and machine, shape (ticks,)."""
    document = _document(path)
    prices: dict[str, NDArray[np.float64]] = {}
    for name, series in document.items():
        if not isinstance(series, list) or not series:
            raise TraceError(f"{path}: key {name}: expected a list of prices, found {type(series).__name__}")
        try:
            array = np.asarray(series, dtype=np.float64)
        except (TypeError, ValueError):
            raise TraceError(f"{path}: key {name}: not all values are numbers") from None
        wrong = ~(np.isfinite(array) & (array > 0))
        if array.ndim != 1 or wrong.any():
            tick = int(wrong.argmax()) if array.ndim == 1 else 0
            raise TraceError(f"{path}: key {name}: [{tick}] is {series[tick]!r}; a price is above 0")
        prices[name] = array
    return prices


def _document(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
        document = json.loads(text)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise TraceError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise TraceError(f"{path}: expected an object, found {type(document).__name__}")
    return document


def _polarity(path: Path, metadata: dict[str, Any], values: str | None) -> tuple[str, bool]:
    found = metadata.get("values")
    for source, name in (("key metadata.values", found), ("--values", values)):
        if name is not None and name not in POLARITIES:
            raise TraceError(f"{path}: {source}: {name!r} names no polarity; expected {' or '.join(POLARITIES)}")
    if found is not None and values is not None and found != values:
        raise TraceError(f"{path}: key metadata.values says {found!r}, --values says {values!r}; leave one out")
    return found or values or POLARITIES[0], bool(found or values)


def _counts(path: Path, data: object) -> NDArray[np.int64]:
    if not isinstance(data, list) or not data:
        raise TraceError(f"{path}: key data: expected a list of counts, found {type(data).__name__}")
    for tick, value in enumerate(data):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise TraceError(f"{path}: data[{tick}] is {value!r}; expected a whole number of machines, 0 or more")
    return np.asarray(data, dtype=np.int64)


def _place(path: Path, metadata: dict[str, Any]) -> tuple[str, str]:
    zone = metadata.get("zone")
    text = zone if isinstance(zone, str) else path.name
    match = _ZONE.match(text)
    if match is None:
        raise TraceError(
            f"{path}: no zone in {text!r}; name the file like us-east-1a_v100_1.json or set metadata.zone: us-east-1a"
        )
    return match["region"], f"{match['region']}{match['letter']}"
