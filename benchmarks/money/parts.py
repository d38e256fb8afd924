"""The four comparisons of policies: the published cells, single zones, gangs, and the rules that Batch can enact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.money.jobs import OPTIMUM, Case, hours_of, zones_of
from ebbflow.cost.simulate.simulator import SimulatedJob

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
POLICIES = (
    "adaptive",
    "uniform_progress",
    "uniform_progress_leaving",
    "uniform_progress_regions",
    "greedy",
    "on_demand",
)


def published_cells(_data: Path, _starts: int) -> list[Case]:
    """Acceptance of the simulator: three zones, five windows, recorded prices, SkyNomad's information."""
    names = (OPTIMUM, *POLICIES)
    return [Case(RECORDED, CELL_ZONES, start, CELL_JOB, "published", name) for name in names for start in CELL_STARTS]


def single_zones(data: Path, starts: int) -> list[Case]:
    """One zone each, constant price, deadlines and changeovers of Can't Be Late."""
    names = (OPTIMUM, *(name for name in POLICIES if name != "uniform_progress_regions"))
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
    """Four nodes at once: three zones together (the cells' job), then each zone alone; constant price."""
    zones = zones_of(data, "gang")
    cases = []
    for name in (OPTIMUM, *POLICIES):
        for group in (zones, *((zone,) for zone in zones)):
            hours = hours_of(data, "gang", group)
            for start in spread(hours - CELL_JOB.deadline_hours, starts):
                cases.append(Case("gang", group, start, CELL_JOB, "published", name))
    return cases


def enactable(data: Path, starts: int) -> list[Case]:
    """What AWS Batch can do: one region at a time, recorded prices; and the gang traces, one zone each."""
    regions: dict[str, tuple[str, ...]] = {}
    for zone in zones_of(data, RECORDED):
        regions[zone[:-1]] = (*regions.get(zone[:-1], ()), zone)
    worlds = [(RECORDED, group) for group in regions.values()]
    worlds += [("gang", (zone,)) for zone in zones_of(data, "gang")]
    cases = []
    for name in ("adaptive", "uniform_progress", "uniform_progress_staying", "greedy", "on_demand"):
        for traces, group in worlds:
            room = hours_of(data, traces, group) - CELL_JOB.deadline_hours
            for number, start in enumerate(spread(room, starts)):
                job = SimulatedJob(CELL_JOB.work_hours, CELL_JOB.deadline_hours, CELL_JOB.changeover_hours, seed=number)
                cases.append(Case(traces, group, start, job, "enactable", name))
    return cases


def spread(room_hours: float, count: int) -> Sequence[float]:
    """`count` starts at even distances from hour 0 to `room_hours`."""
    return [room_hours * number / max(1, count - 1) for number in range(count)]
