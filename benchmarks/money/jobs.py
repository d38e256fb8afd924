"""Many simulated jobs at once, over all cores. A case is plain data, so that any process can run it."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from ebbflow.cost.errors import SimulationError
from ebbflow.cost.policy import policies
from ebbflow.cost.simulate.simulator import RULES, Deviations, SimulatedJob, optimum_usd, run_job
from ebbflow.cost.simulate.world import Distances, World, read_prices, read_traces, world_of

OPTIMUM = "optimum"
GANG_NODES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One job from `start_hours` of a set of traces, under one policy (or the optimum).

    `traces`: "availability", "availability at recorded prices" or "gang". `delay_hours` replaces the rules' stated
    on-demand delay.
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
    """What came of a case. `refused` names the binding constraint; all else is then 0."""

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
    """Every case's figure, in order. One process per core."""
    cores = os.cpu_count() or 1
    if cores == 1 or len(cases) < 8:
        return [run_case(data, case) for case in cases]
    chunk = max(1, min(200, len(cases) // (cores * 8)))
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        return pool.starmap(run_case, ((data, case) for case in cases), chunksize=chunk)


def run_case(data: Path, case: Case) -> Figure:
    world, job = world_at(data, case.traces, case.zones), case.job
    room = world.hours - case.start_hours
    # Beyond the deadline a late job goes on, for at most as long again; a trace that ends is no reason to stop it.
    window = world.window(case.start_hours, min(room, 2 * job.deadline_hours + 4))
    if case.policy == OPTIMUM:
        began = time.process_time()
        usd = optimum_usd(window, job)
        return Figure(usd, optimum_seconds=time.process_time() - began)
    rules = RULES[case.rules]
    if case.delay_hours is not None:
        rules = replace(rules, on_demand_delay_hours=case.delay_hours)
    result = run_job(window, job, rules, policies()[case.policy], reality=case.reality)
    if result.outcome is None:
        assert result.refusal is not None
        return Figure(0.0, refused=result.refusal.binding)
    outcome = result.outcome
    late = math.inf if outcome.finished_hours is None else max(0.0, outcome.finished_hours - job.deadline_hours)
    over, ticks = outcome.over_budget(job.budget_usd), max(0.0, outcome.usd - job.budget_usd) / outcome.tick_usd
    return Figure(outcome.usd, outcome.missed, over, None, late, outcome.overruled, ticks)


def hours_of(data: Path, traces: str, zones: tuple[str, ...]) -> float:
    return world_at(data, traces, zones).hours


def zones_of(data: Path, traces: str) -> tuple[str, ...]:
    return _everything(data, traces).zones


@lru_cache(maxsize=32)
def world_at(data: Path, traces: str, zones: tuple[str, ...]) -> World:
    world = _everything(data, traces) if traces != "gang" else _everything(data, traces, zones)
    return world.only(zones)


@lru_cache(maxsize=8)
def _everything(data: Path, traces: str, zones: tuple[str, ...] | None = None) -> World:
    """The folder's traces: in `data` the values are the number of available machines, as its SOURCE.md says."""
    distances = Distances(50.0)
    if traces == "gang":
        read = read_traces(data / "gang", values="available_count")
        chosen = [trace for trace in read if zones is None or trace.zone in zones]
        return world_of(chosen, nodes=GANG_NODES, distances=distances)
    folder = data / "availability"
    if not folder.is_dir():
        raise SimulationError(f"{folder}: no such folder; --data takes one with availability/, gang/ and prices/")
    recorded = traces.endswith("recorded prices")
    prices = read_prices(data / "prices" / "v100_spot_prices.json.gz") if recorded else None
    return world_of(read_traces(folder, values="available_count"), prices=prices, distances=distances)
