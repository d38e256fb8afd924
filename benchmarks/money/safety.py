"""`ebbflow bench money safety`: deadlines and budgets under the safety net, within and beyond its
stated conditions.

Within: random jobs over all traces under every policy, including a deliberately bad one; none may
be late or more than one tick over its budget. Beyond: misses as a function of the on-demand delay
and of the error of throughput; and the calibration of the plan's probability of a miss for jobs
that stay on spot (reliability diagram, Brier score).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.money.cases import Case, Figure
from benchmarks.money.errors import SimulationError
from benchmarks.money.simulator import Deviations, SimulatedJob

_SEED = 20230803
_LONGEST_HOURS = 19.0  # of random_cases: three times six hours, and one
_STATED_DELAY_HOURS = 0.5
DELAYS_HOURS = (0.0, 0.25, 0.5, 0.75, 1.0, 2.0, 4.0, math.inf)
PACES = (0.7, 0.8, 0.9, 0.95, 1.0, 1.1, 1.3)
_BEYOND = ("adaptive", "uniform_progress", "greedy")


def add_command(benches: Any) -> None:
    parser = benches.add_parser(
        "safety", help="late jobs and budget overruns under the net, over all traces"
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="with availability/, gang/ and prices/",
    )
    parser.add_argument("--jobs", type=int, default=100_000, help="within the stated conditions")
    parser.add_argument(
        "--beyond-jobs", type=int, default=240, help="for each policy and departure"
    )
    parser.add_argument(
        "--forecasts", type=int, default=4000, help="for the calibration of P(miss); 0: none"
    )
    parser.add_argument(
        "--policies",
        default=None,
        metavar="A,B",
        help=f"default: all; beyond the conditions only {', '.join(_BEYOND)}",
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from benchmarks.money.calibration import calibrate
    from benchmarks.money.cases import run_cases
    from benchmarks.money.policies import POLICIES

    if arguments.policies is None:
        names = tuple(POLICIES)
    else:
        names = tuple(arguments.policies.split(","))
    if missing := [name for name in names if name not in POLICIES]:
        raise SimulationError(f"no policy {', '.join(missing)}; there are {', '.join(POLICIES)}")
    document: dict[str, Any] = {"kind": "simulated", "on": str(arguments.data)}
    began = time.perf_counter()
    cases = list(random_cases(arguments.data, names, arguments.jobs))
    document["within"] = _within(cases, run_cases(arguments.data, cases))
    document["within"]["seconds"] = time.perf_counter() - began
    beyond = list(
        beyond_cases(
            arguments.data, [name for name in _BEYOND if name in names], arguments.beyond_jobs
        )
    )
    document["beyond"] = _beyond(beyond, run_cases(arguments.data, [case for _, case in beyond]))
    if arguments.forecasts:
        document["calibration"] = calibrate(arguments.data, arguments.forecasts)
    print(json.dumps(document, indent=1, allow_nan=False) if arguments.json else _text(document))
    late = sum(row["late"] + row["over_budget"] for row in document["within"]["policies"].values())
    if late:
        return 1
    return 0


def random_cases(data: Path, names: tuple[str, ...], count: int) -> Iterator[Case]:
    """Draw jobs of 0.5–6 h (log-uniform) in every world, with changeovers of 0.02–0.5 h, due in
    1.05–3 times the work.

    Half have a budget of 0.8–1.6 times the on-demand price; half commit each 0.05–0.5 h and redo
    the work after a commit. Each set of rules gets a third. About a fifth is infeasible on demand
    and must be refused.
    """
    from benchmarks.money.cases import (
        CELL_ZONES,
        has_gangs,
        hours_of,
        recorded_or_constant,
        zones_of,
    )
    from benchmarks.money.world import V100_ON_DEMAND_USD_PER_HOUR as PRICE

    chance = random.Random(_SEED)
    recorded = recorded_or_constant(data)
    zones = zones_of(data, recorded)
    if has_gangs(data):
        gang = zones_of(data, "gang")
    else:
        gang = ()
    worlds = [(recorded, (zone,)) for zone in zones] + [("gang", (zone,)) for zone in gang]
    if set(CELL_ZONES) <= set(zones):
        worlds += [(recorded, CELL_ZONES)]
    worlds += [(recorded, zones[:4]), (recorded, zones), *([("gang", gang)] if gang else [])]
    rules = ("published", "sees-all", "enactable")
    rooms = {world: hours_of(data, *world) for world in worlds}
    least = min(rooms.values())
    if least < _LONGEST_HOURS:
        raise SimulationError(
            f"the traces are {least:.1f} h long, and these jobs may need {_LONGEST_HOURS:g} h"
        )
    for number in range(count):
        traces, group = chance.choice(worlds)
        work = math.exp(chance.uniform(math.log(0.5), math.log(6.0)))
        deadline = work * chance.uniform(1.05, 3.0)
        changeover = chance.uniform(0.02, 0.5)
        if traces == "gang":
            nodes = 4
        else:
            nodes = 1
        if chance.random() < 0.5:
            budget = (work + changeover) * PRICE * nodes * chance.uniform(0.8, 1.6)
        else:
            budget = math.inf
        if chance.random() < 0.5:
            commit = chance.uniform(0.05, 0.5)
        else:
            commit = 0.0
        job = SimulatedJob(work, deadline, changeover, budget, commit, seed=number)
        start = chance.uniform(0.0, rooms[traces, group] - deadline - 1.0)
        delay = chance.choice((0.0, 0.1, _STATED_DELAY_HOURS))
        # Every policy meets every set of rules, however many policies there are.
        name = names[number % len(names)]
        allowed = rules[number // len(names) % len(rules)]
        yield Case(traces, group, start, job, allowed, name, delay)


def _within(cases: list[Case], figures: list[Figure]) -> dict[str, Any]:
    rows: dict[str, dict[str, float]] = {}
    for case, figure in zip(cases, figures, strict=True):
        row = rows.setdefault(case.policy, defaultdict(int))
        row["jobs"] += 1
        row["late"] += figure.missed
        row["over_budget"] += figure.over_budget
        row["overruled"] += figure.overruled
        row["most_ticks_over"] = max(row["most_ticks_over"], figure.over_ticks)
        if figure.refused is not None:
            row[f"refused: {figure.refused}"] += 1
    keys = (
        "jobs",
        "late",
        "over_budget",
        "most_ticks_over",
        "refused: deadline",
        "refused: budget",
        "overruled",
    )
    return {
        "policies": {name: {key: row[key] for key in keys} for name, row in rows.items()},
        "jobs": len(cases),
    }


def beyond_cases(
    data: Path, names: list[str], count: int
) -> Iterator[tuple[tuple[str, str, float], Case]]:
    """Return ((deviation, policy, amount), case).

    On-demand is stated to start within half an hour.
    """
    from benchmarks.money.cases import hours_of, zones_of

    zones = zones_of(data, "availability")
    for number in range(count):
        zone = zones[number % len(zones)]
        room = hours_of(data, "availability", (zone,)) - 120.0
        if room < 0:
            raise SimulationError(
                f"{zone}: the trace is {-room:.1f} h shorter than these jobs; --beyond-jobs 0"
            )
        start = room * number / max(1, count - 1)
        job = SimulatedJob(
            24.0, 24.0 * (1.25, 1.5, 2.0)[number // len(zones) % 3], 0.2, seed=number
        )
        for name in names:
            for delay in DELAYS_HOURS:
                real = Deviations(on_demand_delays=(delay,))
                yield ("delay", name, delay), _beyond_case(zone, start, job, name, real)
            for pace in PACES:
                for noticed in (math.inf, 0.5):
                    real = Deviations(useful_per_hour=pace, noticed_after_hours=noticed)
                    if noticed == math.inf:
                        key = "throughput, never noticed"
                    else:
                        key = "throughput, noticed after 0.5 h"
                    yield (key, name, pace), _beyond_case(zone, start, job, name, real)


def _beyond_case(
    zone: str, start: float, job: SimulatedJob, name: str, reality: Deviations
) -> Case:
    return Case(
        "availability", (zone,), start, job, "enactable", name, _STATED_DELAY_HOURS, reality
    )


def _beyond(
    cases: list[tuple[tuple[str, str, float], Case]], figures: list[Figure]
) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str, float], Counter[str]] = {}
    for (key, _), figure in zip(cases, figures, strict=True):
        row = rows.setdefault(key, Counter())
        row["jobs"] += figure.refused is None
        row["late"] += figure.missed
    return [
        {"departs": what, "policy": name, "by": "never" if by == math.inf else by, **row}
        for (what, name, by), row in rows.items()
    ]


def _text(document: dict[str, Any]) -> str:
    within = document["within"]
    lines = [
        f"**Within the stated conditions** ({within['jobs']} jobs; simulated, "
        f"{within['seconds']:.0f} s)",
        "",
        "| policy | jobs | late | over budget by a tick | most over, ticks | refused: deadline | "
        "refused: budget | overruled decisions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in within["policies"].items():
        cells = (
            f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()
        )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if document["beyond"]:
        names = list(dict.fromkeys(row["policy"] for row in document["beyond"]))
        lines += [
            "",
            "**Beyond them**: late jobs of all",
            "",
            f"| departs | by | {' | '.join(names)} |",
        ]
        lines.append("|---|---|" + "---|" * len(names))
    table: dict[tuple[str, Any], dict[str, str]] = {}
    for row in document["beyond"]:
        table.setdefault((row["departs"], row["by"]), {})[row["policy"]] = (
            f"{row['late']} of {row['jobs']}"
        )
    for (what, by), cells in table.items():
        lines.append(f"| {what} | {by} | " + " | ".join(cells.values()) + " |")
    if "calibration" in document:
        found = document["calibration"]
        lines += [
            "",
            f"**P(miss) as the plan prints it, for spot alone** ({found['forecasts']} forecasts)",
            "",
        ]
        lines += ["| printed | forecasts | mean printed | missed |", "|---|---|---|---|"]
        for low, high, number, mean, share in found["bins"]:
            lines.append(f"| {low:.1f}–{high:.1f} | {number} | {mean:.3f} | {share:.3f} |")
        lines.append("")
        lines += [
            "| traces | zone or half | forecasts | mean printed | missed | Brier score | rate of "
            "the other zones |"
        ]
        lines.append("|---|---|---|---|---|---|---|")
        for suite, part, number, said, missed, brier, base in found["parts"]:
            lines.append(
                f"| {suite} | {part} | {number} | {said:.3f} | {missed:.3f} | {brier:.4f} | "
                f"{base:.4f} |"
            )
        lines.append("")
        spread = found["dispersion"]
        lines.append(
            f"Losses per day of a zone: variance over mean {min(spread):.1f}–{max(spread):.1f}; "
            "independent ones: 1"
        )
    return "\n".join(lines)
