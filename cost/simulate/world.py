"""A world for the simulator: which pools there are, when they have capacity, what they cost, how far apart they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cost.errors import SimulationError
from cost.simulate.traces import Trace

# Amazon's price of p3.2xlarge (one V100) on demand, us-east-1, and its lowest spot price in 2023: the setting of Can't
# Be Late (Wu et al., NSDI'24) and of the traces of 2023.
V100_ON_DEMAND_USD_PER_HOUR = 3.06
V100_SPOT_USD_PER_HOUR = 0.9731


@dataclass(frozen=True)
class Distances:
    """What a move of the checkpoint from one region to another costs.

    Throughput between regions as measured for SkyNomad (9.72 Gbit/s within a region, 8.20 between regions of a
    continent, 3.59 between continents); the time within a region is part of the changeover, so only what is beyond it
    counts. Gigabytes are 1024 Mbit × 8, as there. USD per GB: Amazon's list prices of transfer between regions, 0.02
    from most regions of North America, 0.01 between us-east-1 and us-east-2.
    """

    checkpoint_gb: float = 0.0
    usd_per_gb: Mapping[tuple[str, str], float] = field(default_factory=dict)
    default_usd_per_gb: float = 0.02

    def egress_usd(self, source: str, target: str) -> float:
        if source == target:
            return 0.0
        near = {source, target} == {"us-east-1", "us-east-2"}
        price = self.usd_per_gb.get((source, target), 0.01 if near else self.default_usd_per_gb)
        return price * self.checkpoint_gb

    def transfer_hours(self, source: str, target: str) -> float:
        if source == target:
            return 0.0
        gbit_per_s = 8.20 if source.split("-")[0] == target.split("-")[0] else 3.59
        megabits = self.checkpoint_gb * 8 * 1024
        return max(0.0, megabits / (gbit_per_s * 1000) - megabits / 9720) / 3600


@dataclass(frozen=True)
class World:
    """Pools over ticks. Spot pool i is `zones[i]`; each region has one on-demand pool, in the zone that comes first.

    `available` (pools, ticks) bool: the whole gang could run. `usd_per_hour` (pools, ticks): of the whole gang.
    `tick_hours` (ticks,): how long each lasts; all equal in a recorded trace.
    """

    zones: tuple[str, ...]
    regions: tuple[str, ...]
    available: NDArray[np.bool_]
    usd_per_hour: NDArray[np.float64]
    on_demand_usd_per_hour: float
    tick_hours: NDArray[np.float64]
    distances: Distances = field(default_factory=Distances)

    @property
    def ticks(self) -> int:
        return self.available.shape[1]

    @property
    def hours(self) -> float:
        return float(self.tick_hours.sum())

    def window(self, start_hours: float, hours: float) -> World:
        """The part from `start_hours` on that covers `hours`. Raises SimulationError if the world ends before."""
        ends = np.cumsum(self.tick_hours)
        first = int(np.searchsorted(ends, start_hours + 1e-9, side="right"))
        last = int(np.searchsorted(ends, start_hours + hours - 1e-9)) + 1
        if last > self.ticks:
            raise SimulationError(f"{hours:.1f} h from hour {start_hours:.1f} end after the trace's {self.hours:.1f} h")
        return self.slice(first, last)

    def slice(self, first: int, last: int) -> World:
        return replace(
            self,
            available=self.available[:, first:last],
            usd_per_hour=self.usd_per_hour[:, first:last],
            tick_hours=self.tick_hours[first:last],
        )

    def only(self, zones: Sequence[str]) -> World:
        """The same world with these zones alone, in this order. Raises SimulationError for a zone it does not have."""
        _distinct(zones)
        missing = [zone for zone in zones if zone not in self.zones]
        if missing:
            raise SimulationError(f"no trace of zone {', '.join(missing)}; there are {', '.join(self.zones)}")
        rows = [self.zones.index(zone) for zone in zones]
        return replace(
            self,
            zones=tuple(zones),
            regions=tuple(self.regions[row] for row in rows),
            available=self.available[rows],
            usd_per_hour=self.usd_per_hour[rows],
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
    """Traces side by side, cut to the shortest. A gang of `nodes` can run where at least as many are available.

    Prices are per machine here and per gang in the world; without `prices` every spot machine costs
    `spot_usd_per_hour` at all times.
    """
    if not traces:
        raise SimulationError("no traces, so there is no world to simulate")
    _distinct([trace.zone for trace in traces])
    if nodes < 1:
        raise SimulationError(f"a gang of {nodes} machines: expected at least 1")
    uncounted = [trace.name for trace in traces if trace.polarity == "preempted"]
    if nodes > 1 and uncounted:
        raise SimulationError(
            f"a gang of {nodes} needs counts of machines; {', '.join(uncounted)}: 'preempted' has none"
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
    """Raises SimulationError for two pools of one name: what a policy chose would not be what it gets."""
    twice = sorted({zone for zone in zones if zones.count(zone) > 1})
    if twice:
        raise SimulationError(f"zone {', '.join(twice)} is there more than once; one trace for each zone")


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
    """The event variant: (hour, zone, has capacity) changes, in any order; a zone has none before its first.

    Every change is a decision, and so is every `decision_hours` without one: ticks as long as the time between them.
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
