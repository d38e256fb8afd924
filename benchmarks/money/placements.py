"""`ebbflow bench money placements`: whole jobs on a virtual AWS Batch over recorded capacity.

Each attempt is planned and placed by the code that a launcher runs before a submit (`cost.plan`,
`cost.capacity.decision`), with the history of the attempts before it; only Batch itself is
simulated (`virtual_batch.py`). Each job's cost is compared with its first plan, with on-demand
alone, and with the optimum under a known future. All costs are compute only, without storage and
transfer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.money.cases import spread
from benchmarks.money.errors import SimulationError

if TYPE_CHECKING:
    from benchmarks.money.world import Trace
    from ebbflow.core.config.schema import RunConfig

_PROJECT_ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/laptop.yaml"
# A language model that takes 3.6 h on one g5.xlarge (estimated, as the plan has it), on Batch.
SETTINGS = (
    *(
        "cluster.plan_for=batch",
        "cluster.nodes=1",
        "cluster.instance_types=[g5.xlarge]",
        "store=s3://bucket/jobs",
    ),
    *(
        "model.hidden_size=768",
        "model.num_heads=12",
        "model.num_layers=12",
        "training.max_steps=120000",
    ),
    *("cost.budget_usd=100", "batch.runnable_minutes=20"),
)
DEADLINES_HOURS = (6.0, 8.0, 12.0)
# Each tick of the trace is divided by this number, because the optimum is exact only on ticks.
_FINER = 3
_MARKETS = ("spot", "on_demand")


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A simulated job. planned_*, p10_usd, p90_usd: forecast of its first plan; rank: share of it
    below `usd`.

    Equal amounts are split at random. optimum_usd: the cost with the whole future known.
    """

    zone: str
    start_hours: float
    deadline_hours: float
    usd: float
    hours: float
    late: bool
    attempts: int
    last_market: str
    planned_usd: float
    planned_hours: float
    p10_usd: float
    p90_usd: float
    rank: float
    on_demand_usd: float
    optimum_usd: float

    @property
    def regret_usd(self) -> float:
        return self.usd - self.optimum_usd


def add_command(benches: Any) -> None:
    parser = benches.add_parser(
        "placements", help="jobs placed attempt by attempt on a virtual AWS Batch, over traces"
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="with availability/: a file per zone",
    )
    parser.add_argument(
        "--deadlines", default=",".join(f"{hours:g}" for hours in DEADLINES_HOURS), metavar="H,H"
    )
    parser.add_argument(
        "--starts", type=int, default=6, help="jobs per zone and deadline, at even distances"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="draws how long each start on demand takes"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the job; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="each job, for a program")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    began = time.process_time()
    deadlines = _deadlines(arguments.deadlines)
    traces = read_zones(arguments.data, max(deadlines))
    if arguments.starts < 1:
        raise SimulationError(
            f"--starts {arguments.starts}: at least one job for each zone and deadline"
        )
    found = []
    for deadline in deadlines:
        for trace in traces:
            for number, start in enumerate(spread(trace.hours - max(deadlines), arguments.starts)):
                found.append(
                    placed(
                        job_config(deadline, arguments.set),
                        trace,
                        start,
                        seed=arguments.seed + number,
                    )
                )
    if arguments.json:
        jobs = [{**asdict(one), "regret_usd": one.regret_usd} for one in found]
        told = {
            "kind": "simulated",
            "seed": arguments.seed,
            "traces": [one.name for one in traces],
            "jobs": jobs,
        }
        print(json.dumps(told, indent=1, allow_nan=False))
        return 0
    print(_text(found, traces))
    print(
        f"{len(found)} jobs, seed {arguments.seed}, {time.process_time() - began:.0f} s of "
        "processor time"
    )
    return 0


def placed(config: RunConfig, trace: Trace, start_hours: float, *, seed: int) -> Placed:
    """Simulate one job from `start_hours` of the trace.

    Raises SimulationError if the job is refused at the start.
    """
    from benchmarks.money.virtual_batch import BEGAN_UTC, HOUR, VirtualBatch, planned
    from ebbflow.cost.plan.live_forecast import ZONE_SPELLS, simulate_live

    first = planned(config, BEGAN_UTC)
    if first.refusal is not None or first.chosen is None or config.cost.deadline_hours is None:
        if first.refusal is None:
            why = "it has no deadline"
        else:
            why = first.refusal.message
        raise SimulationError(f"the job cannot be placed: {why}; fix: --deadlines, or --set")
    if {one.market for one in first.ranked} != set(_MARKETS):
        raise SimulationError(
            "the job cannot be placed on both markets; fix: leave cluster.market as it is"
        )
    up = [bool(count) for count in trace.available[int(start_hours * 3600 // trace.gap_seconds) :]]
    course = VirtualBatch(up, gap_seconds=trace.gap_seconds, seed=seed).run(config)
    if course.finished is None:
        hours = math.inf
    else:
        hours = course.finished / HOUR
    best = {one.market: one for one in reversed(first.ranked)}
    # Virtual machines run at the planned speed. The zone itself is left out of the forecast
    # (cross-validation).
    spot = replace(
        best["spot"],
        case=replace(best["spot"].case, speed_log_deviation=0.0),
        storage_usd=0,
        transfer_usd=0,
    )
    others = {name: spells for name, spells in ZONE_SPELLS.items() if name != trace.zone}
    limits = {
        "hours_left": config.cost.deadline_hours,
        "usd_left": config.cost.budget_usd or math.inf,
    }
    runs = simulate_live(config, spot, best["on_demand"], zones=others, **limits)
    same = (abs(runs.usd - course.usd) <= 0.01).mean()
    alone = min(
        (one.case.work_hours + one.case.fixed_lost_hours) * one.gang_usd_per_hour
        for one in first.ranked
        if one.market == "on_demand"
    )
    return Placed(
        zone=trace.zone,
        start_hours=start_hours,
        deadline_hours=config.cost.deadline_hours,
        usd=course.usd,
        hours=hours,
        late=hours > config.cost.deadline_hours + 1e-6,
        attempts=len(course.decisions),
        last_market=course.markets[-1],
        planned_usd=float(runs.usd.mean()),
        planned_hours=float(runs.hours.mean()),
        p10_usd=float(np.quantile(runs.usd, 0.1)),
        p90_usd=float(np.quantile(runs.usd, 0.9)),
        rank=float((runs.usd < course.usd - 0.01).mean() + random.Random(seed).random() * same),
        on_demand_usd=alone,
        optimum_usd=_optimum_of(config, trace, up),
    )


def _optimum_of(config: RunConfig, trace: Trace, up: Sequence[bool]) -> float:
    """Return a lower bound: work and changeover rounded down to ticks, no redone work, immediate
    on-demand starts.
    """
    import numpy as np

    from benchmarks.money.simulator import SimulatedJob, optimum_of
    from benchmarks.money.virtual_batch import BEGAN_UTC, planned
    from ebbflow.cost.report.optimum import World

    ranked = planned(config, BEGAN_UTC).ranked
    cheapest = {
        market: min(one.usd_per_hour for one in ranked if one.market == market)
        for market in _MARKETS
    }
    tick = trace.gap_seconds / 3600 / _FINER
    deadline = config.cost.deadline_hours or math.inf
    count = math.floor(deadline / tick)
    available = np.repeat(np.array(up[: math.ceil(count / _FINER)], dtype=bool), _FINER)[:count]
    case = ranked[0].case
    world = World(
        zones=(trace.zone,),
        regions=(trace.region,),
        available=available[np.newaxis],
        usd_per_hour=np.full((1, len(available)), cheapest["spot"]),
        on_demand_usd_per_hour=cheapest["on_demand"],
        tick_hours=np.full(len(available), tick),
    )
    job = SimulatedJob(
        work_hours=tick * math.floor(case.work_hours / tick),
        deadline_hours=deadline,
        changeover_hours=tick * math.floor(case.fixed_lost_hours / tick),
    )
    return optimum_of(world, job)


def job_config(deadline_hours: float, overrides: Sequence[str]) -> RunConfig:
    from ebbflow.core.config.load import load_config
    from ebbflow.core.config.problems import ConfigError

    chosen = [*SETTINGS, f"cost.deadline_hours={deadline_hours}", *overrides]
    try:
        path = str(_PROJECT_ROOT / CONFIG)
        return load_config(
            path, chosen, project_root=_PROJECT_ROOT, cwd=_PROJECT_ROOT, environment={}
        ).config
    except ConfigError as error:
        raise SimulationError(f"the job of --set: {error}") from error


def _deadlines(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < hours < math.inf for hours in found):
        raise SimulationError(f"--deadlines {text}: hours above 0, such as 6,8,12")
    return found


def read_zones(data: Path, hours: float) -> list[Trace]:
    """Read all zones. Values of files that do not name their polarity count available machines."""

    from benchmarks.money.world import read_traces

    folder = data / "availability"
    if not folder.is_dir():
        raise SimulationError(f"{folder}: no such folder; --data takes one with availability/")
    traces = read_traces(folder)
    for trace in traces:
        if trace.hours < hours:
            raise SimulationError(
                f"{trace.name}: {trace.hours:.1f} h long, and a job may take {hours:g} h"
            )
    return traces


def _text(found: Sequence[Placed], traces: Sequence[Trace]) -> str:
    columns = (
        *(
            "deadline h",
            "jobs",
            "late",
            "attempts",
            "ended on demand",
            "planned h",
            "actual h",
            "planned $",
            "actual $",
            "within p10–p90",
        ),
        *("on demand alone $", "optimum $", "regret $", "worst regret $"),
    )
    capacity = ", ".join(trace.name for trace in traces)
    lines = [
        f"**Placed attempt by attempt** (virtual Batch, capacity of {capacity}, static prices; "
        "simulated)",
        "",
    ]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for deadline in dict.fromkeys(placed.deadline_hours for placed in found):
        rows = [placed for placed in found if placed.deadline_hours == deadline]
        counts = (len(rows), sum(row.late for row in rows), f"{_mean(rows, 'attempts'):.1f}")
        ended = sum(row.last_market == "on_demand" for row in rows)
        names = (
            "planned_hours",
            "hours",
            "planned_usd",
            "usd",
            "on_demand_usd",
            "optimum_usd",
            "regret_usd",
        )
        means = [f"{_mean(rows, name):.2f}" for name in names]
        means.insert(4, f"{covered(rows):.0%}")
        worst = f"{max(row.regret_usd for row in rows):.2f}"
        lines.append(
            "| " + " | ".join(map(str, (f"{deadline:g}", *counts, ended, *means, worst))) + " |"
        )
    return "\n".join(lines) + "\n"


def covered(rows: Sequence[Placed]) -> float:
    """Return the share of the jobs whose rank in their forecast is from 10 to 90 %.

    Half of all jobs cost the least or the most possible, to a cent. So ranks are compared, not the
    amounts.
    """
    if rows:
        return statistics.fmean(0.1 <= placed.rank <= 0.9 for placed in rows)
    return math.nan


def _mean(rows: Sequence[Placed], name: str) -> float:
    return statistics.fmean(getattr(placed, name) for placed in rows)
