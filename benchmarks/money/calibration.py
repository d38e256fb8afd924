"""Calibration of the plan's probability of missing the deadline, against what the traces then did.

A forecast is made at a moment at which the zone has capacity, for a job that stays on spot in that zone and waits after
a loss. The hazard is estimated from the stays of one job per day in that zone over the last week
(`cost.job_history`, half-life of a day). The waits are the plan's built-in ones, from the same nine zones together, so
the calibration is favourable in that respect.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.money.cases import world_at, zones_of
from benchmarks.money.interface import Greedy
from benchmarks.money.simulator import PUBLISHED, SimulatedJob, simulate
from benchmarks.money.world import World, cut_world
from ebbflow.cost.errors import SimulationError
from ebbflow.cost.job_history import JobHistory, JobMeasurements, PoolStay
from ebbflow.cost.plan.forecast import ForecastInputs as Course
from ebbflow.cost.plan.forecast import forecast_quantiles, reclaim_prior

_SEED = 20230216
_WEEK_HOURS = 168.0
_DAY_HOURS = 24.0
_BINS = 10
_LONGEST_DEADLINE_HOURS = 48.0 * 3
_BAND = 2
# Moments drawn to find capacity in a zone; a zone without capacity at all of them is an error.
_DRAWS = 1000


def calibrate(data: Path, count: int) -> dict[str, Any]:
    """Compare forecasts with outcomes. Raises SimulationError if nothing can be forecast.

    Returns:
        `bins`: (from, to, forecasts, mean forecast, share missed); `brier` and `base_brier` (always the mean rate);
        `dispersion`: variance over mean of the losses of a day (1: independent).
    """
    chance = random.Random(_SEED)
    worlds = {zone: world_at(data, "availability", (zone,)) for zone in zones_of(data, "availability")}
    least = _WEEK_HOURS + _LONGEST_DEADLINE_HOURS + 1.0
    if short := [zone for zone, world in worlds.items() if world.hours < least]:
        raise SimulationError(
            f"traces of {', '.join(short)}: shorter than {least:.0f} h, a week and the longest deadline; --forecasts 0"
        )
    zones = list(worlds)
    made = [_forecast(worlds[zone], chance, zone) for zone in (zones[index % len(zones)] for index in range(count))]
    said, came = np.asarray([one[0] for one in made]), np.asarray([one[1] for one in made], dtype=float)
    bins = []
    for index in range(_BINS):
        low, high = index / _BINS, (index + 1) / _BINS
        inside = (said >= low) & ((said < high) | (index == _BINS - 1))
        if inside.any():
            bins.append((low, high, int(inside.sum()), float(said[inside].mean()), float(came[inside].mean())))
    return {
        "forecasts": count,
        "bins": bins,
        "brier": float(((said - came) ** 2).mean()),
        "base_brier": float(((came.mean() - came) ** 2).mean()),
        "dispersion": [_dispersion(world) for world in worlds.values()],
    }


def _forecast(world: World, chance: random.Random, zone: str) -> tuple[float, bool]:
    """Return (forecast P(miss), whether the job missed), at a random moment at which the zone has capacity."""
    work = math.exp(chance.uniform(math.log(2.0), math.log(48.0)))
    deadline, changeover = work * chance.uniform(1.05, 3.0), chance.uniform(0.02, 0.5)
    for _ in range(_DRAWS):
        start = chance.uniform(_WEEK_HOURS, world.hours - deadline - 1.0)
        window = cut_world(world, start, deadline)
        if window.available[0, 0]:
            break
    else:
        raise SimulationError(f"zone {zone}: no capacity at any of {_DRAWS} moments, nothing to forecast")
    before = cut_world(world, start - _WEEK_HOURS, _WEEK_HOURS)
    history = JobHistory.of([JobMeasurements(job="week", stays=tuple(_stays(before, zone)))])
    belief, _ = history.reclaim_hazard(reclaim_prior(_BAND), "", zone[:-1], zone, _WEEK_HOURS * 3600)
    course = Course(
        start_hours=changeover,
        work_hours=work,
        fixed_lost_hours=changeover,
        interval_hours=0.0,
        reclaims=belief,
        failures_per_hour=0.0,
        speed_log_deviation=0.0,
    )
    found = forecast_quantiles(course, gang_usd_per_hour=1.0, other_usd=0.0, hours_left=deadline)
    assert found.deadline_probability is not None
    outcome = simulate(window, SimulatedJob(work, deadline, changeover), PUBLISHED, Greedy())
    return 1.0 - found.deadline_probability, outcome.missed


def _stays(before: World, zone: str) -> Iterator[PoolStay]:
    """Yield the stays that jobs using all capacity would have recorded; `ended_utc` on the clock of `before`."""
    up, tick = before.available[0], float(before.tick_hours[0])
    day = max(1, round(_DAY_HOURS / tick))
    changes = np.flatnonzero(up[1:] != up[:-1]) + 1
    edges = sorted({0, len(up), *changes.tolist(), *range(day, len(up), day)})
    for first, last in pairwise(edges):
        if up[first]:
            lost = last < len(up) and not up[last]
            yield PoolStay(
                instance_type="",
                nodes=1,
                market="spot",
                region=zone[:-1],
                zone=zone,
                ended_utc=last * tick * 3600,
                hours=(last - first) * tick,
                reclaimed=lost,
            )


def _dispersion(world: World) -> float:
    """Return the dispersion of losses per day around hours with capacity × mean hazard: Pearson's chi-squared."""
    up, tick = world.available[0], float(world.tick_hours[0])
    day = (np.arange(len(up)) * tick // _DAY_HOURS).astype(int)
    losses = np.bincount(day[1:], weights=up[:-1] & ~up[1:], minlength=day[-1] + 1)
    hours = np.bincount(day, weights=up) * tick
    expected = losses.sum() / max(tick, hours.sum()) * hours
    seen = expected > 0
    return float(((losses - expected)[seen] ** 2 / expected[seen]).sum() / max(1, seen.sum() - 1))
