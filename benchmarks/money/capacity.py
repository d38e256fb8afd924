"""`ebbflow bench money plan`: time of a plan by the number of pools, from one region to ten with
six zones each.

The prices are synthetic (drawn per zone with a fixed seed): only the time is a result.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path

from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.prices.recorded import RecordedPrices, SpotRecord, prices_at

REGIONS = (
    *("us-east-1", "us-east-2", "us-west-2", "eu-west-1", "eu-central-1"),
    *("us-west-1", "eu-west-2", "ap-northeast-1", "ap-southeast-1", "ap-southeast-2"),
)
_NOW = 1_790_000_000.0
_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Timing of a plan. seconds: median of five plans. event_bytes: size of the abridged plan as
    JSON.
    """

    regions: int
    zones_per_region: int
    pools: int
    ranked: int
    seconds: float
    event_bytes: int


def measure(regions: int, zones: int) -> Timing:
    """Plan over the whole catalogue with nodes and ranks `auto`, offline."""
    names = list(REGIONS[:regions])
    config = RunConfig.model_validate(
        {
            "training": {"max_steps": 100_000, "batch_size": 512},
            "cluster": {"nodes": "auto", "processes_per_node": "auto", "plan_for": "kubernetes"},
            "cost": {"regions": names, "prices": "synthetic.json", "deadline_hours": 500.0},
        }
    )
    prices = synthetic_prices(names, zones)
    times = []
    plans = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        plans.append(make_plan(config, now_utc=_NOW, prices=prices))
        times.append(time.perf_counter() - started)
    plan = plans[-1]
    return Timing(
        regions=regions,
        zones_per_region=zones,
        pools=sum(plan.counts.values()),
        ranked=len(plan.ranked),
        seconds=statistics.median(times),
        event_bytes=len(json.dumps(plan.brief().to_json())),
    )


def synthetic_prices(regions: list[str], zones: int) -> RecordedPrices:
    """Draw a price for each type of the catalogue in each zone of each region."""
    chance = random.Random(1)
    places = [
        (region, f"{region}{'abcdefgh'[zone]}") for region in regions for zone in range(zones)
    ]
    records = [
        SpotRecord(
            instance_type=kind.name,
            region=region,
            zone_name=zone,
            zone_id="",
            usd_per_hour=Decimal(str(round(chance.uniform(0.2, 2.0) * kind.gpu_count, 4))),
            at=_NOW - chance.uniform(0, 1e6),
        )
        for kind in load_catalogue().types
        for region, zone in places
    ]
    return RecordedPrices(
        quotes=prices_at(
            records,
            now_utc=_NOW,
            observed=dict.fromkeys(regions, _NOW),
            kind="recorded",
            source="synthetic",
        ),
        known_zones={
            region: tuple(zone for of, zone in places if of == region) for region in regions
        },
        path=Path("synthetic.json"),
    )


def add_command(benches: argparse._SubParsersAction) -> None:
    """Add `plan` to the subparsers of `bench`."""
    command = benches.add_parser("plan", help="the time of a plan against the number of pools")
    command.add_argument("--json", action="store_true", help="print the results for a program")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    results = [
        measure(regions, zones)
        for regions, zones in ((1, 1), (1, 6), (2, 6), (5, 6), (10, 3), (10, 6))
    ]
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return 0
    print(f"measured, median of {_REPEATS}; synthetic prices, whole catalogue, nodes auto")
    print(
        f"{'regions':>7} {'zones each':>10} {'pools':>7} {'ranked':>7} {'seconds':>8} {'event':>9}"
    )
    for one in results:
        size = f"{one.event_bytes / 1024:.0f} KiB"
        row = f"{one.regions:>7} {one.zones_per_region:>10} {one.pools:>7} {one.ranked:>7}"
        print(f"{row} {one.seconds:>8.3f} {size:>9}")
    return 0
