"""Lowest possible cost of a job if all capacity and prices had been known in advance.

Time is divided into ticks, and the optimum is exact on this grid. The rules are those of the
SkyNomad paper (NSDI'27): work, changeover and transfer are rounded up to whole ticks, whole ticks
are billed, the job holds one machine at a time, and the first start may be in any zone without a
transfer. Dynamic programming computes the lowest remaining cost backwards in time: `hold` with a
machine, `idle` without one, and `start` like `hold` but without the option to leave. t is the tick,
r the place of the machine, l the place of the checkpoint, h the remaining ticks of start-up (H when
the machine starts), and w the remaining ticks of work:

    hold(t, r, h, w) = min(leave, price(t, r) + hold(t+1, r, h−1, w))            h > 0
                       min(leave, price(t, r) + hold(t+1, r, 0, w−1))            h = 0, spot only if available at t
    idle(t, l, w)    = min(idle(t+1, l, w), min over r of egress(l, r) + start(t, r, H(l, r), w))
    leave            = idle(t, r, w)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Distances:
    """Cost and time of moving the checkpoint from one region to another.

    The speeds are those measured in the SkyNomad paper: 9.72 Gbit/s within a region, 8.20 between
    regions of a continent, and 3.59 between continents. A gigabyte is 1024 × 8 Mbit, as in the
    paper. The time for a change of machines is charged separately and includes a transfer within a
    region, so only the additional time counts here. The fees are Amazon's list prices for transfer
    between regions: $0.02 per GB from most regions of North America, $0.01 between us-east-1 and
    us-east-2.
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
        if source.split("-")[0] == target.split("-")[0]:
            gbit_per_s = 8.20
        else:
            gbit_per_s = 3.59
        megabits = self.checkpoint_gb * 8 * 1024
        return max(0.0, megabits / (gbit_per_s * 1000) - megabits / 9720) / 3600


@dataclass(frozen=True)
class World:
    """Capacity and prices of all pools over time.

    Spot pool i is in zone `zones[i]` and region `regions[i]`. Each region also has one on-demand
    pool, in its first zone.
    """

    zones: tuple[str, ...]
    regions: tuple[str, ...]
    available: NDArray[np.bool_]  # whether all nodes of the job could run, [pools, ticks]
    usd_per_hour: NDArray[np.float64]  # spot price of all nodes, [pools, ticks]
    on_demand_usd_per_hour: float
    tick_hours: NDArray[np.float64]  # duration of each tick, [ticks]; equal in a recorded trace
    distances: Distances = field(default_factory=Distances)

    @property
    def ticks(self) -> int:
        return self.available.shape[1]

    @property
    def hours(self) -> float:
        return float(self.tick_hours.sum())


def optimum_usd(
    world: World, *, work_hours: float, deadline_hours: float, changeover_hours: float
) -> float:
    """Return the lowest cost in dollars of finishing by the deadline if the future is known;
    infinity if impossible.

    Ticks must have equal length. The budget and the time of checkpoints are ignored. With the
    future known, no work is redone. On-demand machines are assumed to start at once.
    """
    return _Optimum(world, work_hours, deadline_hours, changeover_hours).solve()


class _Optimum:
    def __init__(
        self, world: World, work_hours: float, deadline_hours: float, changeover_hours: float
    ) -> None:
        tick = float(world.tick_hours[0])
        self.ticks = min(world.ticks, math.floor(deadline_hours / tick + 1e-9))
        self.work = math.ceil(work_hours / tick - 1e-9)
        regions = list(dict.fromkeys(world.regions))
        self.region_of = np.array([regions.index(region) for region in world.regions])
        count = len(regions)
        self.delay = np.zeros((count + 1, count), dtype=int)
        self.egress = np.zeros((count + 1, count))
        for target, to in enumerate(regions):
            for source, name in enumerate([*regions, to]):
                hours = changeover_hours + world.distances.transfer_hours(name, to)
                self.delay[source, target] = math.ceil(hours / tick - 1e-9)
                self.egress[source, target] = world.distances.egress_usd(name, to)
        up = world.available[:, : self.ticks]
        # A tick without capacity has infinite cost. One on-demand pool per region follows the spot
        # pools.
        spot = np.where(up, world.usd_per_hour[:, : self.ticks] * tick, math.inf)
        on_demand = np.full((count, self.ticks), world.on_demand_usd_per_hour * tick)
        self.price = np.concatenate([spot, on_demand])
        self.place = np.concatenate([self.region_of, np.arange(count)])

    def solve(self) -> float:
        pools = len(self.place)
        places = self.egress.shape[0]
        deepest = int(self.delay.max(initial=0))
        shape = self.work + 1
        hold = np.full((pools, deepest + 1, shape), math.inf)
        idle = np.full((places, shape), math.inf)
        hold[:, :, 0] = idle[:, 0] = 0.0
        going = np.empty_like(hold)
        rows = np.arange(pools)
        for t in range(self.ticks - 1, -1, -1):
            price = self.price[:, t]
            # going[p, h]: hold the machine for the tick, with h ticks of start-up left at its
            # beginning.
            going[:, 1:] = hold[:, :-1]
            going[:, 0, 1:] = hold[:, 0, :-1]
            going += price[:, None, None]
            going[:, :, 0] = 0.0
            for source in range(places):
                started = (
                    going[rows, self.delay[source, self.place]]
                    + self.egress[source, self.place][:, None]
                )
                np.minimum(idle[source], started.min(axis=0), out=idle[source])
            idle[:, 0] = 0.0
            np.minimum(going, idle[self.place][:, None, :], out=hold)
        return float(idle[-1, self.work])
