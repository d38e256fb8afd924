"""The world of a simulation: pools with recorded capacity and prices, read from files.

A trace is the JSON file of one zone: `{"metadata": {"gap_seconds": 195, "values":
"available_count"}, "data": [1, 0,
…]}`. It has one value per tick of `gap_seconds`. `metadata.values` (the polarity) names the meaning
of the values:

- `available_count`: number of available machines. The default.
- `preempted`: 1 if a machine would have been preempted, 0 if it could run. Public copies of the
  same recordings exist with both meanings, so a file without this key is marked as assumed.

Prices are one JSON file, plain or gzip, `{"<name of the trace>": [usd_per_hour, …]}`, on the same
ticks.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.money.errors import SimulationError, TraceError
from ebbflow.cost.report.optimum import Distances, World

_MOST_MACHINES = 10**9
POLARITIES = ("available_count", "preempted")
_ZONE = re.compile(r"^(?P<region>[a-z]+(?:-[a-z]+)+-?\d+)-?(?P<letter>[a-z])(?:_|$)")


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded machines of one zone.

    Attributes:
        gap_seconds: Length of a tick.
        available: Number of available machines, [ticks].
        polarity: Meaning of the values in the file, "available_count" or "preempted".
        polarity_named: Whether the file or the caller named the polarity; otherwise the default is
            assumed.
    """

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
    """Read all traces `*.json` of a folder, sorted by name.

    Raises TraceError, which names the file and the key.

    Args:
        values: Polarity of the files that do not name it: "available_count" or "preempted".
    """
    paths = sorted(path for path in folder.glob("*.json") if path.is_file())
    if not paths:
        raise TraceError(
            f"{folder}: no *.json traces here; expected one file per zone, such as "
            "us-east-1a_v100_1.json"
        )
    traces = [read_trace(path, values=values) for path in paths]
    gaps = {trace.gap_seconds for trace in traces}
    if len(gaps) > 1:
        raise TraceError(
            f"{folder}: metadata.gap_seconds differs between files: {sorted(gaps)}; resample "
            "them to one"
        )
    return traces


def read_trace(path: Path, *, values: str | None = None) -> Trace:
    """Read one trace.

    Zone and region come from `metadata.zone`, or else from the file's name (`us-east-1a_….json`).
    """
    document = _document(path)
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise TraceError(
            f"{path}: key metadata: expected an object with gap_seconds and values, found "
            f"{metadata!r}"
        )
    gap = metadata.get("gap_seconds")
    if isinstance(gap, bool) or not isinstance(gap, int | float) or not 0 < gap < math.inf:
        raise TraceError(
            f"{path}: key metadata.gap_seconds: expected seconds above 0, found {gap!r}"
        )
    polarity, named = _polarity(path, metadata, values)
    counts = _counts(path, document.get("data"))
    if polarity == "preempted":
        if counts.max() > 1:
            tick = int(counts.argmax())
            raise TraceError(
                f"{path}: data[{tick}] is {counts[tick]}, but values are named 'preempted', "
                "which are 0 or 1; counts of machines are 'available_count'"
            )
        counts = 1 - counts
    region, zone = _place(path, metadata)
    return Trace(path.name.removesuffix(".json"), region, zone, float(gap), counts, polarity, named)


def read_prices(path: Path) -> dict[str, NDArray[np.float64]]:
    """Read prices in USD per hour and machine, [ticks], by the name of the trace."""
    document = _document(path)
    prices: dict[str, NDArray[np.float64]] = {}
    for name, series in document.items():
        if not isinstance(series, list) or not series:
            raise TraceError(
                f"{path}: key {name}: expected a list of prices, found {type(series).__name__}"
            )
        try:
            array = np.asarray(series, dtype=np.float64)
        except (TypeError, ValueError):
            raise TraceError(f"{path}: key {name}: not all values are numbers") from None
        wrong = ~(np.isfinite(array) & (array > 0))
        if array.ndim != 1 or wrong.any():
            if array.ndim == 1:
                tick = int(wrong.argmax())
            else:
                tick = 0
            raise TraceError(
                f"{path}: key {name}: [{tick}] is {series[tick]!r}; a price is above 0"
            )
        prices[name] = array
    return prices


def _document(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            text = gzip.decompress(raw)
        else:
            text = raw
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
            raise TraceError(
                f"{path}: {source}: {name!r} names no polarity; expected {' or '.join(POLARITIES)}"
            )
    if found is not None and values is not None and found != values:
        raise TraceError(
            f"{path}: key metadata.values says {found!r}, --values says {values!r}; leave one out"
        )
    return found or values or POLARITIES[0], bool(found or values)


def _counts(path: Path, data: object) -> NDArray[np.int64]:
    if not isinstance(data, list) or not data:
        raise TraceError(
            f"{path}: key data: expected a list of counts, found {type(data).__name__}"
        )
    for tick, value in enumerate(data):
        if value is None:
            raise TraceError(
                f"{path}: data[{tick}] is null, a gap in the recording; cut the file there, or "
                "fill it"
            )
        # 1.0 and true are what tables and scripts write for 1.
        if (
            not isinstance(value, int | float)
            or not 0 <= value <= _MOST_MACHINES
            or value != int(value)
        ):
            raise TraceError(
                f"{path}: data[{tick}] is {value!r}; expected a whole number of machines, 0 or more"
            )
    return np.asarray(data, dtype=np.int64)


def _place(path: Path, metadata: dict[str, Any]) -> tuple[str, str]:
    zone = metadata.get("zone")
    if isinstance(zone, str):
        text = zone
    else:
        text = path.name
    match = _ZONE.match(text)
    if match is None:
        raise TraceError(
            f"{path}: no zone in {text!r}; name the file like us-east-1a_v100_1.json or set "
            "metadata.zone: us-east-1a"
        )
    return match["region"], f"{match['region']}{match['letter']}"


# Amazon's price of p3.2xlarge (one V100) on demand, us-east-1, and its lowest spot price in 2023:
# the setting of Can't Be Late (Wu et al., NSDI'24) and of the traces of 2023.
V100_ON_DEMAND_USD_PER_HOUR = 3.06
V100_SPOT_USD_PER_HOUR = 0.9731


def cut_world(world: World, start_hours: float, hours: float) -> World:
    """Return the part of `world` that begins at `start_hours` and lasts `hours`, as a world of its
    own.

    Raises SimulationError if `world` ends earlier.
    """
    ends = np.cumsum(world.tick_hours)
    first = int(np.searchsorted(ends, start_hours + 1e-9, side="right"))
    last = int(np.searchsorted(ends, start_hours + hours - 1e-9)) + 1
    if last > world.ticks:
        raise SimulationError(
            f"{hours:.1f} h from hour {start_hours:.1f} end after the trace's {world.hours:.1f} h"
        )
    return replace(
        world,
        available=world.available[:, first:last],
        usd_per_hour=world.usd_per_hour[:, first:last],
        tick_hours=world.tick_hours[first:last],
    )


def select_zones(world: World, zones: Sequence[str]) -> World:
    """Return the world with these zones only, in this order.

    Raises SimulationError for an unknown zone.
    """
    _distinct(zones)
    missing = [zone for zone in zones if zone not in world.zones]
    if missing:
        raise SimulationError(
            f"no trace of zone {', '.join(missing)}; there are {', '.join(world.zones)}"
        )
    rows = [world.zones.index(zone) for zone in zones]
    return replace(
        world,
        zones=tuple(zones),
        regions=tuple(world.regions[row] for row in rows),
        available=world.available[rows],
        usd_per_hour=world.usd_per_hour[rows],
    )


def world_of(
    traces: Sequence[Trace],
    *,
    prices: Mapping[str, NDArray[np.float64]] | None = None,
    nodes: int = 1,
    spot_usd_per_hour: float = V100_SPOT_USD_PER_HOUR,
    on_demand_usd_per_hour: float = V100_ON_DEMAND_USD_PER_HOUR,
    distances: Distances | None = None,
) -> World:
    """Build a world from traces, cut to the shortest.

    The job runs where at least `nodes` machines are available.

    Args:
        prices: USD per hour and machine, [ticks], by the name of the trace. None: every spot
            machine costs `spot_usd_per_hour`.
    """
    if not traces:
        raise SimulationError("no traces, so there is no world to simulate")
    _distinct([trace.zone for trace in traces])
    if nodes < 1:
        raise SimulationError(f"a gang of {nodes} machines: expected at least 1")
    uncounted = [trace.name for trace in traces if trace.polarity == "preempted"]
    if nodes > 1 and uncounted:
        raise SimulationError(
            f"a gang of {nodes} needs counts of machines; {', '.join(uncounted)}: 'preempted' "
            "has none"
        )
    ticks = min(len(trace.available) for trace in traces)
    price = np.full((len(traces), ticks), spot_usd_per_hour * nodes)
    for row, trace in enumerate(traces):
        if prices is None:
            continue
        if trace.name not in prices or len(prices[trace.name]) < ticks:
            found = len(prices.get(trace.name, ()))
            raise SimulationError(f"prices of {trace.name}: {found} ticks, the trace has {ticks}")
        price[row] = prices[trace.name][:ticks] * nodes
    return World(
        zones=tuple(trace.zone for trace in traces),
        regions=tuple(trace.region for trace in traces),
        available=np.stack([trace.available[:ticks] >= nodes for trace in traces]),
        usd_per_hour=price,
        on_demand_usd_per_hour=on_demand_usd_per_hour * nodes,
        tick_hours=np.full(ticks, traces[0].gap_seconds / 3600),
        distances=distances or Distances(),
    )


def _distinct(zones: Sequence[str]) -> None:
    """Raise SimulationError if a zone occurs twice, because a policy could not distinguish its two
    pools.
    """
    twice = sorted({zone for zone in zones if zones.count(zone) > 1})
    if twice:
        raise SimulationError(
            f"zone {', '.join(twice)} is there more than once; one trace for each zone"
        )


def world_of_events(
    changes: Sequence[tuple[float, str, bool]],
    *,
    regions: Mapping[str, str],
    hours: float,
    decision_hours: float,
    spot_usd_per_hour: float,
    on_demand_usd_per_hour: float,
    distances: Distances | None = None,
) -> World:
    """Build a world from changes of capacity: (hour, zone, whether it has capacity from then on),
    in any order.

    A zone has no capacity before its first change. A tick begins at every change and every
    `decision_hours`.

    Args:
        regions: Region of each zone.
    """
    edges = {0.0, hours, *(hour for hour, _, _ in changes if 0 < hour < hours)}
    edges |= set(np.arange(0.0, hours, decision_hours).tolist())
    starts = np.array(sorted(edges))
    zones = tuple(regions)
    available = np.zeros((len(zones), len(starts) - 1), dtype=bool)
    for hour, zone, up in sorted(changes):
        available[zones.index(zone), int(np.searchsorted(starts, max(0.0, hour))) :] = up
    return World(
        zones=zones,
        regions=tuple(regions.values()),
        available=available,
        usd_per_hour=np.full(available.shape, spot_usd_per_hour),
        on_demand_usd_per_hour=on_demand_usd_per_hour,
        tick_hours=np.diff(starts),
        distances=distances or Distances(),
    )
