"""`ebbflow simulate`: run one policy on recorded traces and compare it with the optimum, as a table
or as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.money.errors import SimulationError

if TYPE_CHECKING:
    from benchmarks.money.world import Trace
    from ebbflow.cost.report.optimum import World


_NOT_BELOW_0 = (
    *(
        "work_hours",
        "deadline_hours",
        "changeover_hours",
        "probe_hours",
        "start_hours",
        "checkpoint_gb",
    ),
    *("budget_usd", "spot_usd_per_hour", "on_demand_usd_per_hour"),
)


def add_command(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser(
        "simulate", help="run a policy over recorded availability, beside the optimum"
    )
    parser.add_argument(
        "--traces", type=Path, required=True, metavar="DIR", help="one JSON file per zone"
    )
    parser.add_argument(
        "--values",
        default=None,
        metavar="POLARITY",
        help="available_count or preempted, where unnamed",
    )
    parser.add_argument(
        "--prices", type=Path, default=None, metavar="FILE", help="spot prices per trace and tick"
    )
    parser.add_argument("--policy", required=True, metavar="NAME")
    parser.add_argument(
        "--zones", default=None, metavar="A,B", help="these zones only (default: all)"
    )
    parser.add_argument("--work-hours", type=float, required=True)
    parser.add_argument("--deadline-hours", type=float, required=True)
    parser.add_argument("--changeover-hours", type=float, required=True)
    parser.add_argument("--budget-usd", type=float, default=None)
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        help="machines of the gang; it runs where as many are available",
    )
    parser.add_argument("--checkpoint-gb", type=float, default=50.0)
    parser.add_argument(
        "--spot-usd-per-hour", type=float, default=None, help="per machine, without --prices"
    )
    parser.add_argument("--on-demand-usd-per-hour", type=float, default=None, help="per machine")
    parser.add_argument("--rules", default="published", help="published, sees-all or enactable")
    parser.add_argument(
        "--probe-hours",
        type=float,
        default=2.0,
        help="hours between probes of a zone; 0: no probes",
    )
    parser.add_argument(
        "--start-hours", type=float, default=None, help="one job from this hour of the traces"
    )
    parser.add_argument(
        "--starts", type=int, default=10, help="jobs at even distances over the traces"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the on-demand delays")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_simulate)


def _simulate(arguments: argparse.Namespace) -> int:
    from benchmarks.money.policies import POLICIES
    from benchmarks.money.simulator import RULES

    known = POLICIES
    if arguments.policy not in known:
        raise SimulationError(f"no policy {arguments.policy!r}; there are {', '.join(known)}")
    if arguments.rules not in RULES:
        raise SimulationError(f"no rules {arguments.rules!r}; there are {', '.join(RULES)}")
    for name in _NOT_BELOW_0:
        value = getattr(arguments, name)
        if value is not None and not 0 <= value < math.inf:
            raise SimulationError(
                f"--{name.replace('_', '-')} {value}: expected a number from 0 on"
            )
    traces, world = _world(arguments)
    rules = RULES[arguments.rules]
    if rules.probe_hours is not None:
        if arguments.probe_hours:
            length = rules.probe_hours
        else:
            length = None
        rules = replace(rules, probe_hours=length, probe_interval_hours=arguments.probe_hours)
    rows = _rows(arguments, world, rules, known[arguments.policy])
    document = _document(arguments, traces, world, rules.name, rows)
    print(json.dumps(document, indent=1, allow_nan=False) if arguments.json else _text(document))
    return 0


def _world(arguments: argparse.Namespace) -> tuple[list[Trace], World]:
    from benchmarks.money import world as worlds
    from benchmarks.money.world import read_prices, read_traces, select_zones
    from ebbflow.cost.report.optimum import Distances

    traces = read_traces(arguments.traces, values=arguments.values)
    world = worlds.world_of(
        traces,
        prices=None if arguments.prices is None else read_prices(arguments.prices),
        nodes=arguments.nodes,
        spot_usd_per_hour=_stated(arguments.spot_usd_per_hour, worlds.V100_SPOT_USD_PER_HOUR),
        on_demand_usd_per_hour=_stated(
            arguments.on_demand_usd_per_hour, worlds.V100_ON_DEMAND_USD_PER_HOUR
        ),
        distances=Distances(arguments.checkpoint_gb),
    )
    return traces, world if arguments.zones is None else select_zones(
        world, arguments.zones.split(",")
    )


def _stated(usd_per_hour: float | None, otherwise: float) -> float:
    if usd_per_hour is None:
        return otherwise
    return usd_per_hour


def _prices(arguments: argparse.Namespace) -> str:
    """Describe the origin of the prices. Without an option, they are those of a V100 in 2023."""
    usual = "list price of a V100, 2023"
    if arguments.spot_usd_per_hour is not None:
        spot = "as stated"
    else:
        spot = usual
    if arguments.on_demand_usd_per_hour is not None:
        demand = "as stated"
    else:
        demand = usual
    return f"spot {'recorded' if arguments.prices else f'constant ({spot})'}, on-demand {demand}"


def _rows(
    arguments: argparse.Namespace, world: World, rules: Any, factory: Any
) -> list[dict[str, Any]]:
    from benchmarks.money.simulator import SimulatedJob, optimum_of, run_job
    from benchmarks.money.world import cut_world

    room = world.hours - arguments.deadline_hours
    if room < 0:
        raise SimulationError(
            f"a deadline of {arguments.deadline_hours:.1f} h is beyond the traces' "
            f"{world.hours:.1f} h"
        )
    count = max(1, arguments.starts)
    starts = [room * index / max(1, count - 1) for index in range(count)]
    rows = []
    for number, start in enumerate(
        starts if arguments.start_hours is None else [arguments.start_hours]
    ):
        job = SimulatedJob(
            arguments.work_hours,
            arguments.deadline_hours,
            arguments.changeover_hours,
            math.inf if arguments.budget_usd is None else arguments.budget_usd,
            seed=arguments.seed + number,
        )
        window = cut_world(world, start, arguments.deadline_hours)
        result = run_job(window, job, rules, factory)
        if result.outcome is None:
            assert result.refusal is not None
            rows.append(
                {
                    "start_hours": start,
                    "refused": result.refusal.binding,
                    "why": result.refusal.message,
                }
            )
            continue
        best = optimum_of(window, job)
        outcome = result.outcome
        rows.append(
            {
                "start_hours": start,
                "usd": outcome.usd,
                "optimum_usd": best if math.isfinite(best) else None,
                "ratio": outcome.usd / best if 0 < best < math.inf else None,
                "finished_hours": outcome.finished_hours,
                "missed": outcome.missed,
                "over_budget": outcome.over_budget(job.budget_usd),
                "spot_usd": outcome.spot_usd,
                "on_demand_usd": outcome.on_demand_usd,
                "egress_usd": outcome.egress_usd,
                "probe_usd": outcome.probe_usd,
                "starts": outcome.starts,
                "preemptions": outcome.preemptions,
                "overruled": outcome.overruled,
                "timeline": [list(change) for change in outcome.timeline],
            }
        )
    return rows


def _document(
    arguments: argparse.Namespace,
    traces: list[Trace],
    world: World,
    rules: str,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    done = [row for row in rows if "usd" in row]
    polarity = sorted(
        {
            trace.polarity + ("" if trace.polarity_named else " (assumed: not named)")
            for trace in traces
        }
    )
    return {
        "kind": "simulated",
        "policy": arguments.policy,
        "rules": rules,
        "zones": list(world.zones),
        "values": ", ".join(polarity),
        "prices": _prices(arguments),
        "jobs": len(rows),
        "refused": len(rows) - len(done),
        "missed": sum(row["missed"] for row in done),
        "over_budget": sum(row["over_budget"] for row in done),
        "mean_usd": statistics.fmean(row["usd"] for row in done) if done else None,
        "mean_optimum_usd": _mean([row["optimum_usd"] for row in done]),
        "rows": rows,
    }


def _mean(usd: list[float | None]) -> float | None:
    """Return the mean; None if a value is unknown, because a mean of fewer jobs cannot be compared
    with the others.
    """
    known = [value for value in usd if value is not None]
    if known and len(known) == len(usd):
        return statistics.fmean(known)
    return None


def _text(document: dict[str, Any]) -> str:
    lines = [
        f"{document['policy']} · {document['rules']} · simulated",
        f"zones {', '.join(document['zones'])} · values {document['values']} · prices "
        f"{document['prices']}",
        f"{'start':>8}  {'usd':>9}  {'optimum':>9}  {'ratio':>6}  {'done at':>8}  {'starts':>6}  "
        f"{'lost':>5}  late",
    ]
    for row in document["rows"]:
        if "usd" not in row:
            lines.append(f"{row['start_hours']:7.1f}h  refused, {row['refused']}: {row['why']}")
            continue
        if row["optimum_usd"] is None:
            best = "-"
        else:
            best = f"{row['optimum_usd']:.2f}"
        if row["ratio"] is None:
            ratio = "-"
        else:
            ratio = f"{row['ratio']:.3f}"
        if row["finished_hours"] is None:
            end = "never"
        else:
            end = f"{row['finished_hours']:.2f}h"
        lines.append(
            f"{row['start_hours']:7.1f}h  {row['usd']:9.2f}  {best:>9}  {ratio:>6}  {end:>8}  "
            f"{row['starts']:6d}  {row['preemptions']:5d}  {'LATE' if row['missed'] else 'no'}"
        )
    if document["mean_usd"] is not None:
        best = document["mean_optimum_usd"]
        lines.append(
            f"{'mean':>8}  {document['mean_usd']:9.2f}  {'-' if best is None else f'{best:.2f}':>9}"
        )
    lines.append(
        f"{document['jobs']} jobs, {document['refused']} refused, {document['missed']} late"
    )
    return "\n".join(lines)
