"""Made-up worlds, which no recorded trace touched: what a reserve for returns from on-demand costs
and saves.

`returns_late` and `returns_just_in_time` are a pair of worlds that no rule can tell apart in time.
They show that no rule that is never late can keep both its mean at greedy's and its worst decile at
Uniform Progress's on all traces.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import statistics
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.money.policies import POLICIES, GreedyWithReserve
from benchmarks.money.policy import worst_decile_usd
from benchmarks.money.simulator import RULES, SimulatedJob, run_job
from benchmarks.money.world import cut_world
from ebbflow.cost.report.optimum import Distances, World

_HOURS = 45 * 24.0
_ON_DEMAND_USD = 3.06
_RULES = {
    **{name: POLICIES[name] for name in ("greedy", "uniform_progress", "adaptive")},
    **{
        f"greedy with {share:.0%} of its slack kept": partial(GreedyWithReserve, share)
        for share in (0.25, 0.5, 0.75)
    },
}
COMPARED = tuple(_RULES)


def made_up_world(seed: int) -> World:
    """Make a region of one to four zones with lognormal spells, whose share and lengths the seed
    draws.
    """
    draw = np.random.default_rng(seed)
    gap = float(draw.choice([195, 300, 600]))
    zones = int(draw.choice([1, 1, 2, 3, 4]))
    ticks = int(_HOURS * 3600 / gap)
    share = draw.uniform(0.05, 0.97)
    length = math.exp(draw.uniform(math.log(0.7), math.log(15)))
    spread = draw.uniform(1.0, 2.2)
    rows = [_spells(draw, gap, ticks, share, length, spread) for _ in range(zones)]
    together = draw.choice([0.0, 0.5])
    for row in rows[1:]:
        # Blocks in which the zone follows the first one: zones run out of capacity together.
        row[:] = np.where(
            np.repeat(draw.random(ticks // 200 + 1) < together, 200)[:ticks], rows[0], row
        )
    price = float(draw.choice([0.32, 0.32, 0.45, 0.6])) * _ON_DEMAND_USD
    return _world(np.stack(rows), gap, price)


def _spells(
    draw: np.random.Generator, gap: float, ticks: int, share: float, length: float, spread: float
):
    share = min(0.98, max(0.03, share + draw.normal() * 0.15))
    means = {True: length * math.exp(draw.normal() * 0.3)}
    means[False] = means[True] * (1 - share) / share
    row = np.zeros(ticks, dtype=bool)
    up = bool(draw.random() < share)
    hour = -0.3 * _HOURS
    while hour < _HOURS:
        lasts = max(
            gap / 3600, means[up] * math.exp(spread * draw.standard_normal() - spread**2 / 2)
        )
        row[int(max(0.0, hour) * 3600 / gap) : int(max(0.0, hour + lasts) * 3600 / gap)] = up
        hour = hour + lasts
        up = not up
    return row


def _world(available: np.ndarray, gap: float, usd_per_hour: float) -> World:
    zones = tuple(f"us-east-1{'abcd'[number]}" for number in range(len(available)))
    return World(
        zones=zones,
        regions=("us-east-1",) * len(zones),
        available=available,
        usd_per_hour=np.full(available.shape, usd_per_hour),
        on_demand_usd_per_hour=_ON_DEMAND_USD,
        tick_hours=np.full(available.shape[1], gap / 3600),
        distances=Distances(50.0),
    )


def world_after_outage(hours: float) -> World:
    """Make a zone without capacity for the first `hours`, and with capacity ever after.

    Ticks of 300 s.
    """
    available = np.arange(130 * 12) >= round(hours * 12)
    return _world(available[np.newaxis], 300.0, 0.32 * _ON_DEMAND_USD)


@dataclass(frozen=True)
class Tradeoff:
    """A policy over all made-up worlds, each beside greedy's mean or Uniform Progress's worst
    decile in that world.
    """

    policy: str
    mean: float
    dearer_share: float
    """Share of the worlds whose mean is more than 0.5 % above greedy's."""
    worst: float
    worse_share: float
    late: int


def trade_offs(worlds: int, starts: int) -> list[Tradeoff]:
    """Run all compared policies in the worlds of seeds 0 to `worlds` - 1, with one process per
    core.
    """
    with multiprocessing.get_context("spawn").Pool(os.cpu_count() or 1) as pool:
        found = pool.map(partial(_one_world, starts), range(worlds), chunksize=1)
    rows = []
    for name in COMPARED:
        means = [
            statistics.fmean(usd[name]) / statistics.fmean(usd["greedy"]) - 1 for usd, _ in found
        ]
        worst = [
            worst_decile_usd(usd[name]) / worst_decile_usd(usd["uniform_progress"]) - 1
            for usd, _ in found
        ]
        dearer, worse = (
            statistics.fmean(value > limit for value in values)
            for values, limit in ((means, 0.005), (worst, 0.0))
        )
        late = sum(missed[name] for _, missed in found)
        rows.append(
            Tradeoff(name, statistics.fmean(means), dearer, statistics.fmean(worst), worse, late)
        )
    return rows


def _one_world(starts: int, seed: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    world = made_up_world(seed)
    draw = random.Random(seed)
    work = draw.choice([20.0, 40.0])
    slack = draw.choice([1.2, 1.5, 1.5, 2.0])
    deadline = work * slack
    changeover = draw.choice([0.1, 0.2, 0.4])
    usd: dict[str, list[float]] = {name: [] for name in COMPARED}
    late = dict.fromkeys(COMPARED, 0)
    room = world.hours - 2 * deadline - 8
    for number in range(starts):
        window = cut_world(world, room * number / max(1, starts - 1), 2 * deadline + 4)
        for name in COMPARED:
            spent, missed = run_enactable(
                window, SimulatedJob(work, deadline, changeover, seed=number), name
            )
            usd[name].append(spent)
            late[name] += missed
    return usd, late


def run_enactable(world: World, job: SimulatedJob, policy: str) -> tuple[float, bool]:
    """Return the dollars of a job under the enactable rules, and whether it was late."""
    outcome = run_job(world, job, RULES["enactable"], _RULES[policy]).outcome
    assert outcome is not None
    return outcome.usd, outcome.missed
