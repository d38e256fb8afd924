"""Calibration of the plan's probability of missing the deadline, against what the traces then did,
cross-validated.

A forecast is made at a moment at which the zone has capacity, for a job that stays on spot in that
zone and waits after a loss. The hazard is estimated from the stays of one job per day in that zone
before that moment (`cost.job_history`, half-life of a day).

The waits are those of all zones but the forecast one, so that no figure of a zone is used to
forecast it; likewise the base rate is that of the other zones. Each suite is also split into the
two halves of its time. The half-life and the worth of observations were chosen on all nine zones,
by the losses of each next day and by this score.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.money.cases import world_at, zones_of
from benchmarks.money.errors import SimulationError
from benchmarks.money.interface import Greedy
from benchmarks.money.simulator import PUBLISHED, SimulatedJob, simulate
from benchmarks.money.world import World, cut_world
from ebbflow.cost.job_history import JobHistory, JobMeasurements, PoolStay
from ebbflow.cost.plan.forecast import WAIT_HOURS, forecast_quantiles, reclaim_prior
from ebbflow.cost.plan.forecast import ForecastInputs as Course

_SEED = 20230216
_DAY_HOURS = 24.0
_BINS = 10
_BAND = 2
# Moments drawn to find capacity in a zone; a zone without capacity at all of them is an error.
_DRAWS = 1000
# Traces: hours of history before a forecast, and most hours of work. The traces of gangs last 13 to
# 18 days.
SUITES = {"availability": (168.0, 48.0), "gang": (72.0, 24.0)}
_LONGEST_DEADLINE = 3.0


@dataclass(frozen=True, kw_only=True)
class JudgedForecast:
    """A forecast P(miss), and whether the job missed.

    `late` tells that it is of the second half of the traces.
    """

    zone: str
    late: bool
    said: float
    missed: bool


def calibrate(data: Path, count: int) -> dict[str, Any]:
    """Compare forecasts with outcomes. Raises SimulationError if nothing can be forecast.

    Returns:
        `bins`: (from, to, forecasts, mean forecast, share missed) in `availability`; `brier` and
        `base_brier` (always the rate of the other zones); `dispersion`: variance over mean of the
        losses of a day (1: independent);
        `parts`: (suite, zone or half, forecasts, mean forecast, share missed, Brier score, that of
            the base rate).
    """
    made = {suite: _forecast_suite(data, suite, count) for suite in SUITES}
    first = made["availability"]
    bins = []
    for index in range(_BINS):
        low = index / _BINS
        high = (index + 1) / _BINS
        inside = [
            one for one in first if low <= one.said and (one.said < high or index == _BINS - 1)
        ]
        if inside:
            bins.append(
                (
                    low,
                    high,
                    len(inside),
                    fmean(one.said for one in inside),
                    fmean(one.missed for one in inside),
                )
            )
    parts = []
    for suite, every in made.items():
        groups = {"all": every} | {
            zone: [one for one in every if one.zone == zone] for zone in _zones(every)
        }
        groups |= {
            name: [one for one in every if one.late == late]
            for late, name in enumerate(("first half", "second half"))
        }
        parts += [(suite, name, *score(group, every)) for name, group in groups.items() if group]
    worlds = [world_at(data, "availability", (zone,)) for zone in zones_of(data, "availability")]
    return {
        "forecasts": count,
        "bins": bins,
        "brier": parts[0][-2],
        "base_brier": parts[0][-1],
        "parts": parts,
        "dispersion": [_dispersion(world) for world in worlds],
    }


def _zones(made: list[JudgedForecast]) -> list[str]:
    return sorted({forecast.zone for forecast in made})


def score(
    group: list[JudgedForecast], every: list[JudgedForecast]
) -> tuple[int, float, float, float, float]:
    """Return forecasts, mean forecast, share missed, Brier score, and that of the other zones' rate
    in `every`.
    """
    rates = {}
    for zone in _zones(group):
        others = [forecast.missed for forecast in every if forecast.zone != zone]
        if others:
            rates[zone] = fmean(others)
        else:
            rates[zone] = 0.0
    brier = fmean((forecast.said - forecast.missed) ** 2 for forecast in group)
    base = fmean((rates[forecast.zone] - forecast.missed) ** 2 for forecast in group)
    return (
        len(group),
        fmean(forecast.said for forecast in group),
        fmean(forecast.missed for forecast in group),
        brier,
        base,
    )


def _forecast_suite(data: Path, suite: str, count: int) -> list[JudgedForecast]:
    chance = random.Random(_SEED)
    (history, work) = SUITES[suite]
    zones = zones_of(data, suite)
    worlds = {zone: world_at(data, suite, (zone,)) for zone in zones}
    least = history + work * _LONGEST_DEADLINE + 1.0
    if short := [zone for zone, world in worlds.items() if world.hours < least]:
        raise SimulationError(
            f"traces of {', '.join(short)}: shorter than {least:.0f} h, history and the longest "
            "deadline; --forecasts 0"
        )
    waits = {zone: other_waits(worlds, zone) for zone in zones}
    drawn = (zones[index % len(zones)] for index in range(count))
    return [_forecast(worlds[zone], chance, zone, waits[zone], history, work) for zone in drawn]


def other_waits(worlds: dict[str, World], zone: str) -> tuple[float, ...]:
    """Return the hours without capacity after losses in all zones but `zone`: sorted means of
    twenty equal groups.
    """
    hours = []
    for world in (one for name, one in worlds.items() if name != zone):
        up = world.available[0]
        tick = float(world.tick_hours[0])
        edges = [0, *(np.flatnonzero(up[1:] != up[:-1]) + 1).tolist(), len(up)]
        hours += [
            (last - first) * tick
            for first, last in pairwise(edges)
            if first and last < len(up) and not up[first]
        ]
    return (
        tuple(float(group.mean()) for group in np.array_split(np.sort(hours), 20) if len(group))
        or WAIT_HOURS
    )


def _forecast(
    world: World,
    chance: random.Random,
    zone: str,
    waits: tuple[float, ...],
    history: float,
    most_work: float,
) -> JudgedForecast:
    """Forecast a job at a random moment at which the zone has capacity, and simulate it."""
    work = math.exp(chance.uniform(math.log(2.0), math.log(most_work)))
    deadline = work * chance.uniform(1.05, _LONGEST_DEADLINE)
    changeover = chance.uniform(0.02, 0.5)
    for _ in range(_DRAWS):
        start = chance.uniform(history, world.hours - deadline - 1.0)
        window = cut_world(world, start, deadline)
        if window.available[0, 0]:
            break
    else:
        raise SimulationError(
            f"zone {zone}: no capacity at any of {_DRAWS} moments, nothing to forecast"
        )
    before = cut_world(world, start - history, history)
    seen = JobHistory.of([JobMeasurements(job="before", stays=tuple(_stays(before, zone)))])
    belief, _ = seen.reclaim_hazard(reclaim_prior(_BAND), "", zone[:-1], zone, history * 3600)
    course = Course(
        start_hours=changeover,
        work_hours=work,
        fixed_lost_hours=changeover,
        interval_hours=0.0,
        reclaims=belief,
        failures_per_hour=0.0,
        speed_log_deviation=0.0,
        waits=seen.waits("", zone[:-1], zone, waits) or waits,
    )
    found = forecast_quantiles(course, gang_usd_per_hour=1.0, other_usd=0.0, hours_left=deadline)
    assert found.deadline_probability is not None
    outcome = simulate(window, SimulatedJob(work, deadline, changeover), PUBLISHED, Greedy())
    said = 1.0 - found.deadline_probability
    return JudgedForecast(zone=zone, late=2 * start > world.hours, said=said, missed=outcome.missed)


def _stays(before: World, zone: str) -> Iterator[PoolStay]:
    """Yield the stays that jobs using all capacity would have recorded; `ended_utc` on the clock of
    `before`.
    """
    up = before.available[0]
    tick = float(before.tick_hours[0])
    day = max(1, round(_DAY_HOURS / tick))
    changes = np.flatnonzero(up[1:] != up[:-1]) + 1
    edges = sorted({0, len(up), *changes.tolist(), *range(day, len(up), day)})
    for first, last in pairwise(edges):
        if up[first]:
            lost = last < len(up) and not up[last]
            back = np.flatnonzero(up[last:])
            if lost and len(back):
                gone = float(back[0]) * tick
            else:
                gone = None
            yield PoolStay(
                instance_type="",
                nodes=1,
                market="spot",
                region=zone[:-1],
                zone=zone,
                ended_utc=last * tick * 3600,
                hours=(last - first) * tick,
                reclaimed=lost,
                gone_hours=gone,
            )


def _dispersion(world: World) -> float:
    """Return the dispersion of losses per day around hours with capacity × mean hazard: Pearson's
    chi-squared.
    """
    up = world.available[0]
    tick = float(world.tick_hours[0])
    day = (np.arange(len(up)) * tick // _DAY_HOURS).astype(int)
    losses = np.bincount(day[1:], weights=up[:-1] & ~up[1:], minlength=day[-1] + 1)
    hours = np.bincount(day, weights=up) * tick
    expected = losses.sum() / max(tick, hours.sum()) * hours
    seen = expected > 0
    return float(((losses - expected)[seen] ** 2 / expected[seen]).sum() / max(1, seen.sum() - 1))
