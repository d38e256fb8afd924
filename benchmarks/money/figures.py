"""`ebbflow bench money`: the figures of docs/money.md in one table, with traces, seeds and
intervals. All simulated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.money.errors import SimulationError, TraceError

_SEED = 20261123
_RESAMPLES = 2000
_FINE_TICKS = 5
PARTS = ("limits", "dollars", "regions", "enactable", "tradeoff", "research")
_WORLDS = 60


@dataclass(frozen=True)
class MoneyFigure:
    """A figure, its target, the number of jobs, and where it comes from."""

    name: str
    value: str
    target: str
    jobs: int
    origin: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ebbflow bench money` without a subcommand."""
    parser.add_argument(
        "--data", type=Path, default=None, metavar="DIR", help="traces (docs/money.md)"
    )
    parser.add_argument("--adversarial", type=int, default=2000, help="jobs under the adversary")
    parser.add_argument(
        "--starts", type=int, default=20, help="jobs per zone and deadline, and per world"
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="some of these, with commas; the default is all"
    )
    parser.add_argument("--json", action="store_true", help="the figures for a program")


def run(arguments: argparse.Namespace) -> int:
    figures = []
    wanted = arguments.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        raise SimulationError(f"--parts {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    data = arguments.data
    starts = arguments.starts
    parts: dict[str, Callable[[], Iterator[MoneyFigure]]] = {
        "limits": lambda: live_limits(arguments.adversarial),
        "tradeoff": lambda: tradeoff(starts),
    }
    if data is not None:
        parts["dollars"] = lambda: live_dollars(data, starts)
        parts["regions"] = lambda: several_regions(data, starts)
        parts["enactable"] = lambda: enactable(data, starts)
        parts["research"] = lambda: research(data, max(2, starts // 5))
    began = sum(os.times()[:4])
    for name in (name for name in wanted if name in parts):
        try:
            for figure in parts[name]():
                figures.append(figure)
                if not arguments.json:
                    if len(figures) == 1:
                        print(
                            "| figure | simulated | target | jobs | traces, seed, interval "
                            "|\n|---|---|---|---|---|"
                        )
                    print(f"| {' | '.join(map(str, asdict(figure).values()))} |", flush=True)
        except (
            SimulationError,
            TraceError,
        ) as error:  # other traces may have no gangs, or other zones
            print(f"{name}: left out, because {error}", file=sys.stderr, flush=True)
    if arguments.json:
        print(
            json.dumps({"kind": "simulated", "figures": [asdict(one) for one in figures]}, indent=1)
        )
    elif arguments.data is None:
        print("\nwithout --data DIR: only the figures that need no traces")
    else:
        print(f"\n{sum(os.times()[:4]) - began:.0f} s of processor time")
    if figures:
        return 0
    return 2


def _interval(values: Sequence[float], groups: Sequence[Any]) -> str:
    """Return the 95 % bootstrap interval of the mean, resampling whole groups, because jobs of a
    group are alike.
    """
    chance = np.random.default_rng(_SEED)
    names = sorted(set(groups), key=str)
    sums = np.array(
        [sum(v for v, g in zip(values, groups, strict=True) if g == name) for name in names]
    )
    sizes = np.array([sum(g == name for g in groups) for name in names])
    drawn = chance.integers(0, len(names), size=(_RESAMPLES, len(names)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"[{low:.3f}, {high:.3f}]"


def live_limits(count: int) -> Iterator[MoneyFigure]:
    """Run jobs under the adversary until `count` are admitted."""
    from benchmarks.money.adversary import adversarial_job
    from benchmarks.money.placements import job_config

    config = job_config(8.0, ["checkpoint.interval=seconds", "checkpoint.interval_seconds=900"])
    admitted = []
    refused = 0
    seed = 0
    while len(admitted) < count:
        found = adversarial_job(config, seed)
        seed += 1
        refused += found is None
        if found is not None:
            admitted += [found]
    where = (
        f"made-up capacity, seeds 0–{seed - 1}, {refused} not admitted, "
        f"{sum(one.strikes for one in admitted)} strikes"
    )
    late = sum(one.late_hours > 1e-6 for one in admitted)
    over = sum(one.over_minutes > 1 for one in admitted)
    most = max(one.over_usd for one in admitted)
    yield MoneyFigure("live path: late, adversary", str(late), "0", len(admitted), where)
    yield MoneyFigure(
        "live path: over budget by > 1 min", f"{over} (most ${most:.4f})", "0", len(admitted), where
    )


def live_dollars(data: Path, starts: int) -> Iterator[MoneyFigure]:
    """Compare the planned with the actual dollars of jobs on the virtual Batch."""
    from benchmarks.money.cases import spread
    from benchmarks.money.placements import DEADLINES_HOURS, covered, job_config, placed, read_zones

    traces = read_zones(data, max(DEADLINES_HOURS))
    chance = random.Random(_SEED)
    found = [
        placed(job_config(deadline, []), trace, start, seed=chance.randrange(10**6))
        for deadline in DEADLINES_HOURS
        for trace in traces
        for start in spread(trace.hours - max(DEADLINES_HOURS), starts)
    ]
    where = (
        f"{', '.join(one.name for one in traces)}; seed {_SEED}; each zone forecast from the others"
    )
    zones = [one.zone for one in found]
    late = sum(one.late for one in found)
    yield MoneyFigure("live path: late, recorded capacity", str(late), "0", len(found), where)
    usd, planned = (
        statistics.fmean(getattr(one, name) for one in found) for name in ("usd", "planned_usd")
    )
    errors = [one.planned_usd / usd - one.usd / usd for one in found]
    value = f"{planned / usd - 1:+.1%}"
    note = f"{where}; error as a share {_interval(errors, zones)} over zones"
    yield MoneyFigure("planned ÷ actual dollars − 1, mean", value, "≤ ±10 %", len(found), note)
    inside = [float(0.1 <= one.rank <= 0.9) for one in found]
    ends = {trace.zone: trace.hours / 2 for trace in traces}
    halves = [
        covered([one for one in found if (one.start_hours >= ends[one.zone]) is late])
        for late in (False, True)
    ]
    note = f"{where}; {_interval(inside, zones)} over zones"
    if not any(map(math.isnan, halves)):
        note += f"; first half (chose its width) {halves[0]:.0%}, second {halves[1]:.0%}"
    yield MoneyFigure(
        "jobs within the planned p10–p90 (ties split at random)",
        f"{covered(found):.0%}",
        "80 ± 7 %",
        len(found),
        note,
    )
    ratio = [one.usd / one.optimum_usd for one in found]
    total = usd / statistics.fmean(one.optimum_usd for one in found)
    note = f"{where}; mean of ratios {_interval(ratio, zones)}"
    yield MoneyFigure("live path ÷ optimum", f"{total:.3f}", "-", len(found), note)


def several_regions(data: Path, starts: int) -> Iterator[MoneyFigure]:
    """Compare jobs that may use three regions with the same jobs in each of them alone."""
    from benchmarks.money.cases import CELL_ZONES
    from benchmarks.money.regions import REGIONS, compare_regions

    rows = compare_regions(data, starts)
    blocks = [row["start_hours"] // 168 for row in rows]
    where = f"{', '.join(CELL_ZONES)}; bucket in us-east-1; seed {_SEED}"
    late = int(sum(row["late"] for row in rows))
    yield MoneyFigure("one or three regions: late", str(late), "0", 4 * len(rows), where)
    three = statistics.fmean(row["three"] for row in rows)
    for region in REGIONS:
        alone = statistics.fmean(row[region] for row in rows)
        errors = [(row["three"] - row[region]) / alone for row in rows]
        note = (
            f"{where}; ${three:.2f} against ${alone:.2f}, transfer included "
            f"{_interval(errors, blocks)} over weeks"
        )
        yield MoneyFigure(
            f"three regions ÷ {region} alone − 1", f"{three / alone - 1:+.1%}", "-", len(rows), note
        )


def enactable(data: Path, starts: int) -> Iterator[MoneyFigure]:
    """Compare the live rule, which is greedy, with Uniform Progress and the adaptive policy under
    enactable rules.
    """
    from benchmarks.money import cases
    from benchmarks.money.policy import worst_decile_usd

    made = [
        case
        for case in cases.enactable(data, starts)
        if case.policy in ("greedy", "uniform_progress", "adaptive")
    ]
    figures = cases.run_cases(data, made)
    if refused := next(
        (case for case, figure in zip(made, figures, strict=True) if figure.refused), None
    ):
        raise SimulationError(
            f"ticks of {' '.join(refused.zones)} are too long for 40 h of work by 60 h"
        )
    late = sum(figure.missed for figure in figures)
    suites: dict[str, dict[str, list[float]]] = {}
    for case, figure in zip(made, figures, strict=True):
        suite = f"{case.traces}: {' '.join(case.zones)}"
        suites.setdefault(suite, {}).setdefault(case.policy, []).append(figure.usd)
    yield MoneyFigure(
        "enactable rules: late",
        str(late),
        "0",
        len(made),
        f"{len(suites)} worlds, all three policies",
    )
    blocks = [index * 8 // starts for index in range(starts)]
    for suite, usd in suites.items():
        mean = statistics.fmean(usd["greedy"])
        uniform = usd["uniform_progress"]
        for policy, label in (("greedy", "live rule"), ("adaptive", "adaptive (research)")):
            apart = [
                (one - greedy) / mean
                for one, greedy in zip(usd[policy], usd["greedy"], strict=True)
            ]
            note = f"{suite}; {starts} starts; {_decile_interval(usd[policy], uniform, blocks)}"
            if policy != "greedy":
                note += (
                    f"; mean − greedy's {statistics.fmean(apart):+.1%} {_interval(apart, blocks)}"
                )
            value = f"{worst_decile_usd(usd[policy]) / worst_decile_usd(uniform) - 1:+.1%}"
            yield MoneyFigure(
                f"worst decile, {label} ÷ Uniform Progress − 1", value, "≤ 0 %", len(uniform), note
            )


def _decile_interval(ours: Sequence[float], theirs: Sequence[float], groups: Sequence[Any]) -> str:
    """Return the 95 % bootstrap interval of the ratio of worst deciles minus 1, resampling whole
    groups of starts.
    """
    from benchmarks.money.policy import worst_decile_usd

    chance = np.random.default_rng(_SEED)
    names = sorted(set(groups))
    index = {name: [number for number, one in enumerate(groups) if one == name] for name in names}
    ratios = []
    for drawn in chance.integers(0, len(names), size=(_RESAMPLES, len(names))):
        chosen = [number for name in drawn for number in index[names[name]]]
        pair = ([usd[number] for number in chosen] for usd in (ours, theirs))
        ratios.append(worst_decile_usd(next(pair)) / worst_decile_usd(next(pair)) - 1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return f"[{low:+.1%}, {high:+.1%}]"


def tradeoff(starts: int) -> Iterator[MoneyFigure]:
    """Compare rules that keep slack for returns from on-demand, in worlds that no trace touched."""
    from benchmarks.money.made_up import COMPARED, run_enactable, trade_offs, world_after_outage
    from benchmarks.money.simulator import SimulatedJob

    for row in trade_offs(_WORLDS, starts):
        name = f"{row.policy}: mean ÷ greedy − 1; worst decile ÷ Uniform Progress − 1"
        note = (
            f"{_WORLDS} made-up worlds, seeds 0–{_WORLDS - 1}; mean above greedy by > 0.5 % in "
            f"{row.dearer_share:.0%} "
        )
        note += f"of them, decile above in {row.worse_share:.0%}; {row.late} late"
        yield MoneyFigure(name, f"{row.mean:+.1%}; {row.worst:+.1%}", "-", _WORLDS * starts, note)
    job = SimulatedJob(40.0, 60.0, 0.2)
    for hours in (18.75, 19.0):
        usd = {name: run_enactable(world_after_outage(hours), job, name)[0] for name in COMPARED}
        note = ", ".join(f"{name} ${value:.2f}" for name, value in usd.items() if name != "greedy")
        where = f"no capacity for {hours:g} h, then always; 40 h of work by 60 h; {note}"
        yield MoneyFigure("a pair of worlds: live rule", f"${usd['greedy']:.2f}", "-", 1, where)


def research(data: Path, starts: int) -> Iterator[MoneyFigure]:
    """Compare the adaptive policy on gangs with the optimum on a grid that does not round the
    changeover up.
    """
    from dataclasses import replace

    from benchmarks.money import cases
    from benchmarks.money.simulator import optimum_of
    from benchmarks.money.world import cut_world

    chosen = [case for case in cases.gangs(data, starts) if case.policy == "adaptive"]
    figures = cases.run_cases(data, chosen)
    ratios = []
    groups = []
    for case, figure in zip(chosen, figures, strict=True):
        world = cut_world(
            cases.world_at(data, case.traces, case.zones), case.start_hours, case.job.deadline_hours
        )
        fine = replace(
            world,
            available=np.repeat(world.available, _FINE_TICKS, axis=1),
            usd_per_hour=np.repeat(world.usd_per_hour, _FINE_TICKS, axis=1),
            tick_hours=np.repeat(world.tick_hours / _FINE_TICKS, _FINE_TICKS),
        )
        ratios.append((figure.usd, optimum_of(fine, case.job)))
        groups.append(" ".join(case.zones))
    total = sum(usd for usd, _ in ratios) / sum(best for _, best in ratios)
    each = [usd / best for usd, best in ratios]
    note = (
        "gang traces, constant price, optimum on ticks of 60 s; mean of ratios "
        f"{_interval(each, groups)}"
    )
    yield MoneyFigure(
        "research policy ÷ optimum, gangs of 4", f"{total:.3f}", "≤ 1.05", len(ratios), note
    )
