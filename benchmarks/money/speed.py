"""`ebbflow bench money speed`: time of a decision, of a simulated job and of the optimum, by pools
and ticks.

The traces are synthetic (capacity comes and goes at fixed rates, with a fixed seed): only the time
is a result. It is processor time, which other load on the machine disturbs least. A policy computes
its tables at its first decisions, so each job runs twice: cold, and then warm with the cached
tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.money.errors import SimulationError

_SEED = 5
_POOLS = (1, 3, 9, 30)
# With more pools the optimum takes longer than everything else, and no decision waits for it.
_OPTIMUM_POOLS = 9
_WORK_HOURS = 48.0
_DEADLINE_HOURS = 72.0
_TICK_SECONDS = (60.0, 195.0, 600.0)


def add_command(benches: Any) -> None:
    parser = benches.add_parser(
        "speed", help="time of a decision, of a simulated job, of the optimum"
    )
    parser.add_argument("--policies", default="adaptive,uniform_progress,greedy", metavar="A,B")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from benchmarks.money.policies import POLICIES

    names = arguments.policies.split(",")
    if missing := [name for name in names if name not in POLICIES]:
        raise SimulationError(f"no policy {', '.join(missing)}; there are {', '.join(POLICIES)}")
    rows = []
    for name in names:
        rows += [measure(name, pools, 195.0) for pools in _POOLS]
        rows += [measure(name, 3, seconds) for seconds in _TICK_SECONDS if seconds != 195.0]
    print(
        "| policy | pools | tick (s) | ticks | warm decision: median ms | worst ms | cold: worst "
        "ms | job (s): cold | warm | optimum (s) |"
    )
    print("|" + "---|" * 10)
    for row in rows:
        print(
            "| "
            + " | ".join(cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row.values())
            + " |"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 0


def measure(name: str, pools: int, tick_seconds: float) -> dict[str, Any]:
    """Time a 48 h job with a deadline of 72 h under the published rules."""
    from benchmarks.money.policies import POLICIES
    from benchmarks.money.safety_net import SafetyNet
    from benchmarks.money.simulator import PUBLISHED, SimulatedJob, optimum_of, simulate

    world = synthetic_world(pools, tick_seconds)
    job = SimulatedJob(_WORK_HOURS, _DEADLINE_HOURS, 0.2)
    runs = []
    for _ in ("cold", "warm"):
        timed = _Timed(SafetyNet(POLICIES[name]()))
        began = time.process_time()
        simulate(world, job, PUBLISHED, timed)
        runs.append((timed.seconds, time.process_time() - began))
    (cold, cold_job), (warm, warm_job) = runs
    measured = name == "greedy" and pools <= _OPTIMUM_POOLS
    began = time.process_time()
    if measured:
        optimum_of(world, job)
    return {
        "policy": name,
        "pools": pools,
        "tick_seconds": tick_seconds,
        "ticks": len(warm),
        "decision_median_ms": statistics.median(warm) * 1e3,
        "decision_worst_ms": max(warm) * 1e3,
        "cold_worst_ms": max(cold) * 1e3,
        "cold_job_seconds": cold_job,
        "warm_job_seconds": warm_job,
        "optimum_seconds": time.process_time() - began if measured else "-",
    }


class _Timed:
    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.seconds = list[float]()

    def decide(self, state: Any) -> Any:
        began = time.process_time()
        action = self.policy.decide(state)
        self.seconds.append(time.process_time() - began)
        return action


def synthetic_world(pools: int, tick_seconds: float) -> Any:
    """Make zones that have capacity for 4 h and none for 3 h on average, at prices of $0.9–1.8/h."""
    import numpy as np

    from ebbflow.cost.report.optimum import Distances, World

    chance = np.random.default_rng(_SEED)
    tick = tick_seconds / 3600
    ticks = int(_DEADLINE_HOURS / tick) + 2
    up = np.empty((pools, ticks), dtype=bool)
    up[:, 0] = chance.random(pools) < 4 / 7
    for index in range(1, ticks):
        flips = chance.random(pools) < np.where(up[:, index - 1], tick / 4, tick / 3)
        up[:, index] = up[:, index - 1] ^ flips
    regions = tuple(f"us-region-{number // 4}" for number in range(pools))
    zones = tuple(f"{region}{'abcd'[number % 4]}" for number, region in enumerate(regions))
    prices = np.repeat(chance.uniform(0.9, 1.8, size=(pools, 1)), ticks, axis=1)
    return World(zones, regions, up, prices, 3.06, np.full(ticks, tick), Distances(50.0))
