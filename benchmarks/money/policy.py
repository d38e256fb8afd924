"""`ebbflow bench money policy`: compare policies on published cells, single zones, gangs and the
rules of AWS Batch.

Policies are compared in pairs on the same starts: mean difference with a 95 % interval, and the
worst decile.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.money.errors import SimulationError, TraceError

PARTS = ("published", "zones", "gangs", "enactable")
_AGAINST = ("uniform_progress", "uniform_progress_staying", "greedy")
_STARTS = {"published": 5, "zones": 8, "gangs": 8, "enactable": 200}


def add_command(benches: Any) -> None:
    parser = benches.add_parser(
        "policy", help="policies beside the optimum and the published figures, over traces"
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="with availability/, gang/ and prices/",
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--starts", type=int, default=None, help="jobs per world (default 8; enactable 200)"
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from benchmarks.money import cases

    makers: dict[str, Callable[..., list[Any]]] = {
        "published": cases.published_cells,
        "zones": cases.single_zones,
        "gangs": cases.gangs,
        "enactable": cases.enactable,
    }
    documents = {}
    for part in arguments.parts.split(","):
        if part not in makers:
            raise SimulationError(f"no part {part!r}; there are {', '.join(PARTS)}")
        began = time.perf_counter()
        try:
            found = makers[part](arguments.data, arguments.starts or _STARTS[part])
            figures = cases.run_cases(arguments.data, found)
        except (SimulationError, TraceError) as error:
            print(f"{part}: left out, because {error}", file=sys.stderr)
            continue
        table = _TABLES[part](list(zip(found, figures, strict=True)))
        table["jobs"] = sum(case.policy != "optimum" for case in found)
        table["missed"] = sum(figure.missed for figure in figures)
        table["refused"] = sum(figure.refused is not None for figure in figures)
        table["seconds"] = time.perf_counter() - began
        documents[part] = table
        if not arguments.json:
            print(_text(part, table), end="\n\n", flush=True)
    if arguments.json:
        print(
            json.dumps(
                {"kind": "simulated", "on": str(arguments.data), "parts": documents},
                indent=1,
                allow_nan=False,
            )
        )
    if documents:
        return 0
    return 2


def _by_policy(
    rows: Sequence[Any], *, world: Callable[[Any], Any] = lambda case: None
) -> dict[Any, dict[str, list]]:
    """Return world → policy → dollars, in the order of the starts."""
    found: dict[Any, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for case, figure in rows:
        found[world(case)][case.policy].append(figure.usd)
    return found


def _published(rows: Sequence[Any]) -> dict[str, Any]:
    from benchmarks.money.cases import PUBLISHED_USD

    usd = _by_policy(rows)[None]
    best = usd["optimum"]
    lines = [
        [name, *values, statistics.fmean(values), *_ratios(values, best)]
        for name, values in usd.items()
    ]
    for name, values in PUBLISHED_USD.items():
        ratios = _ratios(values, PUBLISHED_USD["optimum"])
        lines.append([f"{name} (as published)", *values, statistics.fmean(values), *ratios])
    worst = max(
        abs(ours / theirs - 1) for ours, theirs in zip(best, PUBLISHED_USD["optimum"], strict=True)
    )
    return {
        "title": (
            "Published cells: three zones, sees its own, pays one-minute probes, recorded "
            "prices. USD per cell"
        ),
        "columns": [
            "policy",
            "1",
            "2",
            "3",
            "4",
            "5",
            "mean",
            "mean ÷ optimum",
            "median ÷ optimum",
        ],
        "rows": lines,
        "notes": [
            f"optimum within {worst:.2%} of the published one in each cell, computed in at most "
            f"{max(figure.optimum_seconds for _, figure in rows):.2f} s of processor time a cell"
        ],
    }


def _ratios(values: Sequence[float], best: Sequence[float]) -> tuple[float, float]:
    each = [value / least for value, least in zip(values, best, strict=True)]
    return statistics.fmean(values) / statistics.fmean(best), statistics.median(each)


def _zones(rows: Sequence[Any]) -> dict[str, Any]:
    worlds = _by_policy(rows, world=lambda case: case.zones[0])
    lines = []
    everything = defaultdict(list)
    for zone, usd in worlds.items():
        for name, values in usd.items():
            if name == "optimum":
                continue
            regret = [value - best for value, best in zip(values, usd["optimum"], strict=True)]
            everything[name] += regret
            lines.append(
                [zone, name, statistics.fmean(values), statistics.fmean(regret), max(regret)]
            )
    for name, regret in everything.items():
        lines.append(["all", name, math.nan, statistics.fmean(regret), max(regret)])
    theirs = statistics.fmean(everything["uniform_progress"])
    notes = [
        f"mean regret ÷ Uniform Progress's: {name} {_divided(statistics.fmean(regret), theirs)}"
        for name, regret in everything.items()
    ]
    notes += [
        f"adaptive by zone: {', '.join(_beside_uniform(zone, usd) for zone, usd in worlds.items())}"
    ]
    return {
        "title": (
            "One zone (the setting of Can't Be Late): 48 h, deadlines 52/60/70/92 h, changeovers "
            "0.02–0.5 h. USD"
        ),
        "columns": ["zone", "policy", "mean cost", "mean regret", "worst regret"],
        "rows": [
            [None if isinstance(cell, float) and math.isnan(cell) else cell for cell in line]
            for line in lines
        ],
        "notes": notes,
    }


def _beside_uniform(zone: str, usd: dict[str, list]) -> str:
    """Compare adaptive with Uniform Progress in one zone: ratio of mean regrets, and whether the
    worst is higher.
    """
    ours, theirs = (
        [value - best for value, best in zip(usd[name], usd["optimum"], strict=True)]
        for name in ("adaptive", "uniform_progress")
    )
    if max(ours) > max(theirs):
        above = " (worst regret above)"
    else:
        above = ""
    return f"{zone} {_divided(sum(ours), sum(theirs))}{above}"


def _divided(ours: float, theirs: float) -> str:
    if theirs > 0:
        return f"{ours / theirs:.3f}"
    return "- (Uniform Progress has none)"


def _gangs(rows: Sequence[Any]) -> dict[str, Any]:
    worlds = _by_policy(rows, world=lambda case: " ".join(case.zones))
    lines = []
    for zones, usd in worlds.items():
        for name, values in usd.items():
            regret = [value - best for value, best in zip(values, usd["optimum"], strict=True)]
            lines.append(
                [
                    zones,
                    name,
                    statistics.fmean(values),
                    *_ratios(values, usd["optimum"]),
                    max(regret),
                ]
            )
    return {
        "title": (
            "Gangs of four nodes, 40 h by 60 h, changeover 0.2 h, constant price. USD for the gang"
        ),
        "columns": [
            "zones",
            "policy",
            "mean",
            "mean ÷ optimum",
            "median ÷ optimum",
            "worst regret",
        ],
        "rows": lines,
        "notes": [],
    }


def _enactable(rows: Sequence[Any]) -> dict[str, Any]:
    lines = []
    notes = []
    for kind in ("availability", "gang"):
        worlds = _by_policy(
            [row for row in rows if row[0].traces.startswith(kind)],
            world=lambda case: " ".join(case.zones),
        )
        if not worlds:
            continue
        starts = len(next(iter(worlds.values()))["adaptive"])
        starts_of = [case.start_hours for case, _ in rows if case.traces.startswith(kind)]
        block = max(
            1, round(60 / max(1e-9, (max(starts_of) - min(starts_of)) / max(1, starts - 1)))
        )
        for name in next(iter(worlds.values())):
            usd = []
            for world in worlds.values():
                usd.extend(world[name])
            cells = [kind, name, statistics.fmean(usd), worst_decile_usd(usd)]
            for other in _AGAINST:
                found = paired(
                    [w[name] for w in worlds.values()], [w[other] for w in worlds.values()], block
                )
                same = name == other
                cells.append(
                    "-"
                    if same
                    else f"{found.mean_usd:+.2f} [{found.low_usd:+.2f}, {found.high_usd:+.2f}]"
                )
            lines.append(cells)
        for zones, usd_of in worlds.items():
            each = ", ".join(
                f"{name} {statistics.fmean(values):.2f}" for name, values in usd_of.items()
            )
            notes.append(f"{kind}, {zones}: {each}")
    return {
        "title": (
            "Enactable on AWS Batch: one region, one start a decision, no probes, paid drains, "
            "on-demand 0–30 min"
        ),
        "columns": [
            "traces",
            "policy",
            "mean",
            "worst decile",
            *(f"minus {other} [95 %]" for other in _AGAINST),
        ],
        "rows": lines,
        "notes": notes,
    }


_RESAMPLES = 4000
_SEED = 20230215


@dataclass(frozen=True, slots=True)
class Paired:
    """Mean difference (first minus second) with a 95 % interval.

    The interval is a bootstrap of blocks of neighbouring starts, because jobs that overlap in time
    have the same interruptions and are not independent.
    """

    mean_usd: float
    low_usd: float
    high_usd: float


def paired(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], block: int
) -> Paired:
    """Compare dollars per start, in order of time, one sequence per world.

    Args:
        block: Number of starts within one deadline, at least 1.
    """
    generator = np.random.default_rng(_SEED)
    differences = [np.asarray(a) - np.asarray(b) for a, b in zip(first, second, strict=True)]
    sums = np.zeros(_RESAMPLES)
    for row in differences:
        length = len(row)
        width = min(max(1, block), length)
        blocks = -(-length // width)
        begins = generator.integers(0, length, size=(_RESAMPLES, blocks))
        index = (begins[:, :, None] + np.arange(width)[None, None, :]).reshape(_RESAMPLES, -1)[
            :, :length
        ]
        sums += row[index % length].sum(axis=1)
    means = sums / sum(len(row) for row in differences)
    low, high = np.quantile(means, [0.025, 0.975])
    return Paired(float(np.concatenate(differences).mean()), float(low), float(high))


def worst_decile_usd(usd: Sequence[float]) -> float:
    """Return the mean of the most expensive tenth."""
    ordered = np.sort(np.asarray(usd))
    return float(ordered[-max(1, len(ordered) // 10) :].mean())


_TABLES = {"published": _published, "zones": _zones, "gangs": _gangs, "enactable": _enactable}


def _text(part: str, table: dict[str, Any]) -> str:
    lines = [f"**{table['title']}** (prices of a V100, 2023, unless recorded; simulated)", ""]
    lines.append("| " + " | ".join(table["columns"]) + " |")
    lines.append("|" + "---|" * len(table["columns"]))
    for row in table["rows"]:
        cells = [
            "-" if cell is None else cell if isinstance(cell, str) else f"{cell:.3f}"
            for cell in row
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *table["notes"]]
    lines.append(
        f"{part}: {table['jobs']} jobs, {table['missed']} late, {table['refused']} refused, "
        f"{table['seconds']:.0f} s"
    )
    return "\n".join(lines)
