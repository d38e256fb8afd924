"""One region against three on the virtual AWS Batch: recorded capacity, equal prices, and the
transfer of commits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.money.cases import CELL_ZONES, spread
from benchmarks.money.errors import SimulationError
from benchmarks.money.placements import DEADLINES_HOURS, job_config, read_zones
from benchmarks.money.virtual_batch import VirtualBatch, queue, queues
from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.prices.quote import Quote, StaticPrices
from ebbflow.infra.batch import limit_to_queue_region
from ebbflow.infra.batch.queues import Market

HOME = "us-east-1"
REGIONS = tuple(zone[:-1] for zone in CELL_ZONES)
_SEED = 20261123
_MARKETS: tuple[tuple[str, Market], ...] = (("spot", "spot"), ("on-demand", "on_demand"))


class EqualPrices(StaticPrices):
    """The static table of us-east-1 for every region, because it has no other."""

    def spot(self, kind: Any, region: str) -> Sequence[Quote]:
        return [replace(quote, region=region) for quote in super().spot(kind, HOME)]

    def on_demand(self, kind: Any, region: str) -> Quote | None:
        quote = super().on_demand(kind, HOME)
        return quote and replace(quote, region=region)


def compare_regions(data: Path, starts: int) -> list[dict[str, float]]:
    """Return the dollars of each job by region alone (bucket there), and under "three" (bucket in
    us-east-1).

    A region has the capacity of one zone, those of the published cells. Jobs are those of
    `placements`, with a commit each half hour, and `late` counts the late ones of all four runs.
    Dollars contain transfer.
    """
    traces = {trace.zone: trace for trace in read_zones(data, max(DEADLINES_HOURS))}
    if missing := set(CELL_ZONES) - set(traces):
        raise SimulationError(
            f"no trace of {', '.join(sorted(missing))}, one of the three zones that are compared"
        )
    chance = random.Random(_SEED)
    found = []
    room = min(trace.hours for trace in traces.values()) - max(DEADLINES_HOURS)
    for deadline in DEADLINES_HOURS:
        for start in spread(room, starts):
            capacity = {}
            for zone in CELL_ZONES:
                trace = traces[zone]
                first = int(start * 3600 // trace.gap_seconds)
                capacity[f"spot-{zone[:-1]}"] = [bool(count) for count in trace.available[first:]]
            seed = chance.randrange(10**6)
            row = {"late": 0.0, "start_hours": start, "deadline_hours": deadline}
            for name, regions in (*((region, (region,)) for region in REGIONS), ("three", REGIONS)):
                course = _batch(capacity, regions, seed).run(_config(deadline, regions))
                row[name] = course.usd
                row["late"] += course.finished is None or course.finished > deadline * 3600 + 1e-6
            found.append(row)
    return found


def _batch(capacity: dict[str, list[bool]], regions: Sequence[str], seed: int) -> VirtualBatch:
    there = []
    for region in regions:
        for name, market in _MARKETS:
            there.append(
                queue(
                    f"{name}-{region}",
                    market,
                    ["g5"],
                    arn=f"arn:aws:batch:{region}:123456789012:job-queue/{name}-{region}",
                )
            )
    return VirtualBatch(
        [False], seed=seed, queues=queues(*there), prices=EqualPrices(), capacity=capacity
    )


def _config(deadline: float, regions: Sequence[str]) -> RunConfig:
    named = ", ".join(
        f"{{name: {name}-{region}, market: {market}, region: {region}}}"
        for region in regions
        for name, market in _MARKETS
    )
    if HOME in regions:
        home = HOME
    else:
        home = regions[0]
    settings = [f"batch.queues=[{named}]", f"batch.region={home}", f"cost.store_region={home}"]
    settings += ["checkpoint.interval=seconds", "checkpoint.interval_seconds=1800"]
    return limit_to_queue_region(job_config(deadline, settings))
