"""The omniscient optimum: what a job would have cost with the whole future known, by dynamic programming.

Exact on the grid of ticks, which is the published definition (SkyNomad, NSDI'27): work, changeover and transfer are
rounded up to whole ticks, whole ticks are billed, one machine is held at a time, and the first start is in any zone
without a transfer. Solved backwards in time; a state is (what is held and where, ticks of start-up left, ticks of work
left), and numpy does all work-left values, start-up values and zones at once:

    hold(t, r, h, w) = min(leave, price(t, r) + hold(t+1, r, h−1, w))            h > 0
                       min(leave, price(t, r) + hold(t+1, r, 0, w−1))            h = 0, spot only if available at t
    idle(t, l, w)    = min(idle(t+1, l, w), min over r of egress(l, r) + start(t, r, H(l, r), w))
    leave            = idle(t, r, w)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ebbflow.cost.simulate.simulator import Job
from ebbflow.cost.simulate.world import World

Values = NDArray[np.float64]


def optimum_usd(world: World, job: Job) -> float:
    """Least cost of finishing by the deadline from the first tick of `world`; `math.inf` if it cannot be done.

    Ticks must be of equal length. Budget, commits and on-demand delays play no part: knowing the future, nothing is
    ever redone, and on-demand is taken to start at once.
    """
    return _Optimum(world, job).solve()


class _Optimum:
    def __init__(self, world: World, job: Job) -> None:
        tick = float(world.tick_hours[0])
        self.ticks = min(world.ticks, math.floor(job.deadline_hours / tick + 1e-9))
        self.work = math.ceil(job.work_hours / tick - 1e-9)
        regions = list(dict.fromkeys(world.regions))
        self.region_of = np.array([regions.index(region) for region in world.regions])
        count = len(regions)
        self.delay = np.zeros((count + 1, count), dtype=int)
        self.egress = np.zeros((count + 1, count))
        for target, to in enumerate(regions):
            for source, name in enumerate([*regions, to]):
                hours = job.changeover_hours + world.distances.transfer_hours(name, to)
                self.delay[source, target] = math.ceil(hours / tick - 1e-9)
                self.egress[source, target] = world.distances.egress_usd(name, to)
        up = world.available[:, : self.ticks]
        # Without capacity a tick costs infinitely much. One on-demand pool per region follows the spot pools.
        spot = np.where(up, world.usd_per_hour[:, : self.ticks] * tick, math.inf)
        on_demand = np.full((count, self.ticks), world.on_demand_usd_per_hour * tick)
        self.price = np.concatenate([spot, on_demand])
        self.place = np.concatenate([self.region_of, np.arange(count)])

    def solve(self) -> float:
        pools, places, deepest = len(self.place), self.egress.shape[0], int(self.delay.max(initial=0))
        shape = self.work + 1
        hold = np.full((pools, deepest + 1, shape), math.inf)
        idle = np.full((places, shape), math.inf)
        hold[:, :, 0] = idle[:, 0] = 0.0
        going = np.empty_like(hold)
        rows = np.arange(pools)
        for t in range(self.ticks - 1, -1, -1):
            price = self.price[:, t]
            # going[p, h]: the tick is held to its end, with h ticks of start-up left at its beginning.
            going[:, 1:] = hold[:, :-1]
            going[:, 0, 1:] = hold[:, 0, :-1]
            going += price[:, None, None]
            going[:, :, 0] = 0.0
            for source in range(places):
                started = going[rows, self.delay[source, self.place]] + self.egress[source, self.place][:, None]
                np.minimum(idle[source], started.min(axis=0), out=idle[source])
            idle[:, 0] = 0.0
            np.minimum(going, idle[self.place][:, None, :], out=hold)
        return float(idle[-1, self.work])
