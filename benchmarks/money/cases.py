"""Simulated jobs as plain data, run over all cores, and the case lists of the policy comparison.

The comparison has four parts: the published cells, single zones, gangs, and the rules that AWS
Batch can enact.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from benchmarks.money.errors import SimulationError
from benchmarks.money.policies import POLICIES
from benchmarks.money.simulator import RULES, Deviations, SimulatedJob, optimum_of, run_job
from benchmarks.money.world import cut_world, read_prices, read_traces, select_zones, world_of
from ebbflow.cost.report.optimum import Distances, World

_PRICES = Path("prices") / "v100_spot_prices.json.gz"
OPTIMUM = "optimum"
GANG_NODES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One job from `start_hours` of a set of traces, under one policy or the optimum.

    Attributes:
        traces: "availability", "availability at recorded prices" or "gang".
        delay_hours: Replaces the rules' stated on-demand delay.
    """

    traces: str
    zones: tuple[str, ...]
    start_hours: float
    job: SimulatedJob
    rules: str
    policy: str
    delay_hours: float | None = None
    reality: Deviations = field(default_factory=Deviations)


@dataclass(frozen=True, slots=True)
class Figure:
    """Result of a case. `refused` names the exceeded limit; all other figures are then 0."""

    usd: float
    missed: bool = False
    over_budget: bool = False
    refused: str | None = None
    late_hours: float = 0.0
    overruled: int = 0
    over_ticks: float = 0.0
    """Dollars beyond the budget, in ticks of on-demand compute; 0 within it."""
    optimum_seconds: float = 0.0
    """Processor time of the optimum."""


def run_cases(data: Path, cases: Sequence[Case]) -> list[Figure]:
    """Run all cases, with one process per core, and return their figures in order."""
    cores = os.cpu_count() or 1
    if cores == 1 or len(cases) < 8:
        return [run_case(data, case) for case in cases]
    chunk = max(1, min(200, len(cases) // (cores * 8)))
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        return pool.starmap(run_case, ((data, case) for case in cases), chunksize=chunk)


def run_case(data: Path, case: Case) -> Figure:
    world = world_at(data, case.traces, case.zones)
    job = case.job
    room = world.hours - case.start_hours
    # A late job continues beyond its deadline for at most the same time again.
    window = cut_world(world, case.start_hours, min(room, 2 * job.deadline_hours + 4))
    if case.policy == OPTIMUM:
        began = time.process_time()
        usd = optimum_of(window, job)
        return Figure(usd, optimum_seconds=time.process_time() - began)
    rules = RULES[case.rules]
    if case.delay_hours is not None:
        rules = replace(rules, on_demand_delay_hours=case.delay_hours)
    result = run_job(window, job, rules, POLICIES[case.policy], reality=case.reality)
    if result.outcome is None:
        assert result.refusal is not None
        return Figure(0.0, refused=result.refusal.binding)
    outcome = result.outcome
    if outcome.finished_hours is None:
        late = math.inf
    else:
        late = max(0.0, outcome.finished_hours - job.deadline_hours)
    over = outcome.over_budget(job.budget_usd)
    ticks = max(0.0, outcome.usd - job.budget_usd) / outcome.tick_usd
    return Figure(outcome.usd, outcome.missed, over, None, late, outcome.overruled, ticks)


def hours_of(data: Path, traces: str, zones: tuple[str, ...]) -> float:
    return world_at(data, traces, zones).hours


def has_gangs(data: Path) -> bool:
    return any((data / "gang").glob("*.json"))


def recorded_or_constant(data: Path) -> str:
    """Return the traces at recorded prices, or at a constant price if the folder has no prices."""
    if (data / _PRICES).is_file():
        return RECORDED
    return "availability"


def zones_of(data: Path, traces: str) -> tuple[str, ...]:
    return _everything(data, traces).zones


@lru_cache(maxsize=32)
def world_at(data: Path, traces: str, zones: tuple[str, ...]) -> World:
    if traces != "gang":
        world = _everything(data, traces)
    else:
        world = _everything(data, traces, zones)
    return select_zones(world, zones)


@lru_cache(maxsize=8)
def _everything(data: Path, traces: str, zones: tuple[str, ...] | None = None) -> World:
    """Read the folder's traces.

    Values of files that do not name their polarity count available machines.
    """
    distances = Distances(50.0)
    if traces == "gang":
        read = read_traces(data / "gang")
        chosen = [trace for trace in read if zones is None or trace.zone in zones]
        return world_of(chosen, nodes=GANG_NODES, distances=distances)
    folder = data / "availability"
    if not folder.is_dir():
        raise SimulationError(
            f"{folder}: no such folder; --data takes one with availability/, gang/ and prices/"
        )
    recorded = traces.endswith("recorded prices")
    if recorded:
        prices = read_prices(data / _PRICES)
    else:
        prices = None
    return world_of(read_traces(folder), prices=prices, distances=distances)


CELL_ZONES = ("us-east-1c", "us-east-2b", "us-west-2a")
CELL_STARTS = (179.725, 299.542, 419.358, 479.267, 838.717)
CELL_JOB = SimulatedJob(39.9389, 59.9083, 0.2)
# SkyNomad (NSDI'27), figure 9b: dollars per cell.
PUBLISHED_USD = {
    "optimum": (37.74, 37.54, 37.00, 37.19, 37.39),
    "SkyNomad": (42.99, 45.19, 37.05, 40.49, 42.93),
    "Uniform Progress over regions": (44.53, 58.11, 38.00, 49.62, 44.84),
}
RECORDED = "availability at recorded prices"
# Can't Be Late (NSDI'24).
ZONE_WORK_HOURS = 48.0
ZONE_DEADLINES = (52.0, 60.0, 70.0, 92.0)
ZONE_CHANGEOVERS = (0.02, 0.2, 0.5)
COMPARED = (
    "adaptive",
    "uniform_progress",
    "uniform_progress_leaving",
    "uniform_progress_regions",
    "greedy",
    "on_demand",
)


def published_cells(_data: Path, _starts: int) -> list[Case]:
    """Return the published cells: three zones, five windows, recorded prices, SkyNomad's
    information.
    """
    names = (OPTIMUM, *COMPARED)
    cells = []
    for name in names:
        for start in CELL_STARTS:
            cells.append(Case(RECORDED, CELL_ZONES, start, CELL_JOB, "published", name))
    return cells


def single_zones(data: Path, starts: int) -> list[Case]:
    """Return cases of one zone each: constant price, deadlines and changeovers of Can't Be Late."""
    names = (OPTIMUM, *(name for name in COMPARED if name != "uniform_progress_regions"))
    cases = []
    for name in names:
        for zone in zones_of(data, "availability"):
            hours = hours_of(data, "availability", (zone,))
            for deadline in ZONE_DEADLINES:
                for changeover in ZONE_CHANGEOVERS:
                    job = SimulatedJob(ZONE_WORK_HOURS, deadline, changeover)
                    for start in spread(hours - max(ZONE_DEADLINES), starts):
                        cases.append(Case("availability", (zone,), start, job, "published", name))
    return cases


def gangs(data: Path, starts: int) -> list[Case]:
    """Return gangs of four nodes: three zones together (the cells' job), then each zone alone;
    constant price.
    """
    zones = zones_of(data, "gang")
    cases = []
    for name in (OPTIMUM, *COMPARED):
        for group in (zones, *((zone,) for zone in zones)):
            hours = hours_of(data, "gang", group)
            for start in spread(hours - CELL_JOB.deadline_hours, starts):
                cases.append(Case("gang", group, start, CELL_JOB, "published", name))
    return cases


def enactable(data: Path, starts: int) -> list[Case]:
    """Return cases under the rules of AWS Batch: one region at a time; gang traces, if there are
    any, one zone each.
    """
    regions: dict[str, tuple[str, ...]] = {}
    recorded = recorded_or_constant(data)
    world = _everything(data, recorded)
    for zone, region in zip(world.zones, world.regions, strict=True):
        regions[region] = (*regions.get(region, ()), zone)
    worlds = [(recorded, group) for group in regions.values()]
    if has_gangs(data):
        worlds += [("gang", (zone,)) for zone in zones_of(data, "gang")]
    cases = []
    for name in ("adaptive", "uniform_progress", "uniform_progress_staying", "greedy", "on_demand"):
        for traces, group in worlds:
            room = hours_of(data, traces, group) - CELL_JOB.deadline_hours
            for number, start in enumerate(spread(room, starts)):
                job = SimulatedJob(
                    CELL_JOB.work_hours,
                    CELL_JOB.deadline_hours,
                    CELL_JOB.changeover_hours,
                    seed=number,
                )
                cases.append(Case(traces, group, start, job, "enactable", name))
    return cases


def spread(room_hours: float, count: int) -> Sequence[float]:
    """Return `count` evenly spaced starts from hour 0 to `room_hours`.

    Raises SimulationError if that is negative.
    """
    if room_hours < 0:
        raise SimulationError(
            f"the traces are {-room_hours:.1f} h shorter than the longest deadline of these jobs"
        )
    return [room_hours * number / max(1, count - 1) for number in range(count)]
