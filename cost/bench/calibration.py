"""Is the printed probability of a miss right? Forecasts as the plan makes them, against what the traces then did.

A forecast is made at a moment at which the zone has capacity, for a job that stays on spot in that zone and waits when
it loses it; the hazard is believed from the zone's own last week, as after runs of our own. The waits are the plan's
built-in ones, which are those of the same nine zones, all together: the calibration is therefore kind in that respect.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np

from cost.bench.jobs import world_at, zones_of
from cost.plan.chance import Case as Course
from cost.plan.chance import outlook
from cost.policy.greedy import Greedy
from cost.simulate.engine import simulate
from cost.simulate.job import Job
from cost.simulate.rules import PUBLISHED
from infra.reliability import GammaHazard

_SEED = 20230216
_WEEK_HOURS = 168.0
_BINS = 10


def calibrate(data: Path, count: int) -> dict[str, Any]:
    """`bins`: (from, to, forecasts, mean printed, share missed); `brier` beside that of the mean rate."""
    chance = random.Random(_SEED)
    zones = zones_of(data, "availability")
    printed, missed = [], []
    while len(printed) < count:
        forecast = _forecast(data, chance, zones[len(printed) % len(zones)])
        if forecast is not None:
            printed.append(forecast[0])
            missed.append(forecast[1])
    said, came = np.asarray(printed), np.asarray(missed, dtype=float)
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
    }


def _forecast(data: Path, chance: random.Random, zone: str) -> tuple[float, bool] | None:
    """(printed P(miss), whether it was missed), or None where the zone has no capacity at the drawn moment."""
    world = world_at(data, "availability", (zone,))
    work = math.exp(chance.uniform(math.log(2.0), math.log(48.0)))
    deadline, changeover = work * chance.uniform(1.05, 3.0), chance.uniform(0.02, 0.5)
    start = chance.uniform(_WEEK_HOURS, world.hours - deadline - 1.0)
    window = world.window(start, deadline)
    if not window.available[0, 0]:
        return None
    before = world.window(start - _WEEK_HOURS, _WEEK_HOURS).available[0]
    losses = int((before[:-1] & ~before[1:]).sum())
    up_hours = float(before.sum() * world.tick_hours[0])
    course = Course(
        start_hours=changeover,
        work_hours=work,
        fixed_lost_hours=changeover,
        interval_hours=0.0,
        reclaims=GammaHazard(losses + 0.5, up_hours + 1.0),
        failures_per_hour=0.0,
        speed_log_deviation=0.0,
    )
    found = outlook(course, gang_usd_per_hour=1.0, other_usd=0.0, hours_left=deadline)
    assert found.deadline_probability is not None
    outcome = simulate(window, Job(work, deadline, changeover), PUBLISHED, Greedy())
    return 1.0 - found.deadline_probability, outcome.missed
