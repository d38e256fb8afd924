"""Prices that `cost.prices` selects (static table, file or EC2), and the commands of
`ebbflow prices`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import CostConfig, RunConfig
from ebbflow.core.grouping import group_by_key
from ebbflow.core.program import DEFAULT_CONFIG
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.catalogue import InstanceType, load_catalogue
from ebbflow.cost.errors import PriceError
from ebbflow.cost.kubernetes_pools import default_prices, uses_pools
from ebbflow.cost.plan_json import PlanJson
from ebbflow.cost.prices.ec2_prices import LivePrices, PriceAnswers, query_spot_prices
from ebbflow.cost.prices.quote import PriceSource, Quote, StaticPrices, format_short_age, is_zone_of
from ebbflow.cost.prices.recorded import (
    RecordedPrices,
    Recording,
    SpotRecord,
    read_recording,
    write_recording,
)

if TYPE_CHECKING:
    from botocore.client import BaseClient

NOT_ASKED = "live prices are asked when the plan is made"

# A history of some weeks has many pages.
_RECORD_SECONDS = 300.0
_LONGEST_HISTORY_HOURS = 90 * 24.0


class PriceChanges(TypedDict):
    """Price changes of a pool, each [Unix time, dollars per hour as text]."""

    instance_type: str
    market: str
    region: str
    zone: str
    kind: str
    changes: list[list[float | str]]


def open_prices(
    config: RunConfig,
    now_utc: float,
    *,
    project_root: Path = Path(),
    network: bool = True,
    client: Callable[[str], BaseClient] | None = None,
) -> PriceSource:
    """Return the prices that `cost.prices` selects, in force at `now_utc` (Unix time).

    If live prices are unavailable, return the static table. Its method `describe` gives the reason.

    Args:
        project_root: Folder to which the path of a price file is relative.
        network: Whether network requests are allowed. If not, the static table replaces live
            prices.
        client: Function that makes the EC2 client of a region. None uses botocore with its usual
            credentials.

    Raises:
        PriceError: The price file is invalid.
        CatalogueError: A shipped table is invalid.
    """
    cost = config.cost
    if uses_pools(config) or cost.prices == "static":
        return default_prices(config, now_utc)
    if cost.prices != "live":
        return RecordedPrices.read(project_root / cost.prices, now_utc)
    if not network:
        return StaticPrices(because=NOT_ASKED)
    names = [kind.name for kind in load_catalogue().matching(config.cluster.instance_types)]
    answers = query_spot_prices(cost.regions, names, now_utc=now_utc, client=client)
    if not answers.answered:
        return StaticPrices(because="; ".join(dict.fromkeys(answers.failed.values())))
    return LivePrices.of(answers)


def read_price_changes(
    cost: CostConfig,
    plan: PlanJson,
    instance_types: Collection[str] = (),
    *,
    now_utc: float,
    project_root: Path = Path(),
    client: Callable[[str], BaseClient] | None = None,
) -> list[PriceChanges]:
    """Return the changes of Spot prices since the plan was made.

    There is one list of changes per instance type and zone.

    Query AWS if the plan used live prices. The result is empty if the plan has no pool or used the
    static table, which has no changes.

    Args:
        plan: Data of the `plan` event.
        instance_types: None given means the type that the plan chose.

    Raises:
        PriceError: The price file is invalid, or EC2 does not answer for the region of the plan's
            pool.
    """
    chosen = plan.get("chosen")
    if not chosen or cost.prices == "static":
        return []
    since = float(plan.get("made_utc") or 0.0)
    kinds = instance_types or [chosen["instance_type"]]
    if cost.prices != "live":
        records: Iterable[SpotRecord] = read_recording(project_root / cost.prices).records
        return _changes_by_zone(records, kinds, since, now_utc, "recorded")
    answers = query_spot_prices(
        cost.regions, list(kinds), now_utc=now_utc, since_utc=since, client=client
    )
    if not answers.answered or chosen.get("region") in answers.failed:
        raise PriceError("; ".join(dict.fromkeys(answers.failed.values())))
    found = []
    for answer in answers.answered.values():
        found.extend(answer.records)
    return _changes_by_zone(found, kinds, since, now_utc, "live")


def add_commands(commands: argparse._SubParsersAction, project_root: Path) -> None:
    prices = commands.add_parser(
        "prices", help="record live spot prices, or show those that a plan would use"
    )
    ways = prices.add_subparsers(required=True, metavar="COMMAND")
    record = ways.add_parser(
        "record", help="write EC2's present prices to a file that cost.prices can name"
    )
    regions = CostConfig.model_validate({}).regions
    record.add_argument(
        "--regions",
        nargs="+",
        default=regions,
        metavar="REGION",
        help=f"default: {' '.join(regions)}",
    )
    record.add_argument(
        "--instance-types",
        nargs="*",
        default=[],
        metavar="PREFIX",
        help="such as g5 p4d; default: all",
    )
    record.add_argument(
        "--hours",
        type=_hours,
        default=0.0,
        help="also record the changes of this many past hours; default: 0",
    )
    record.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON; gzipped if it ends with .gz",
    )
    record.set_defaults(run=record_prices)
    show = ways.add_parser("show", help="show the quotes that a plan would use")
    show.add_argument(
        "config",
        type=Path,
        nargs="?",
        metavar="CONFIG",
        help="a YAML file; default: configs/laptop.yaml",
    )
    show.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key; repeatable",
    )
    show.set_defaults(run=lambda arguments: show_prices(arguments, project_root))


def record_prices(
    arguments: argparse.Namespace, *, client: Callable[[str], BaseClient] | None = None
) -> int:
    """Write EC2's spot prices to a file and print a summary.

    Raises:
        PriceError: EC2 does not answer for a region (then nothing is written), or the file cannot
            be written.
    """
    now = time.time()
    kinds = load_catalogue().matching(arguments.instance_types)
    if not kinds:
        raise PriceError(
            f"no instance type of the catalogue begins with {', '.join(arguments.instance_types)}"
        )
    answers = query_spot_prices(
        arguments.regions,
        [kind.name for kind in kinds],
        now_utc=now,
        since_utc=now - arguments.hours * 3600,
        deadline_seconds=_RECORD_SECONDS,
        client=client,
    )
    if answers.failed:
        raise PriceError(
            f"nothing was written, because {'; '.join(dict.fromkeys(answers.failed.values()))}"
        )
    try:
        write_recording(arguments.output, _recording(answers))
    except OSError as error:
        raise PriceError(f"{arguments.output}: cannot be written: {error.strerror}") from error
    for region, answer in answers.answered.items():
        zones = len({record.zone for record in answer.records})
        if answer.names_only:
            named = f"; zones by name only, because {answer.names_only}"
        else:
            named = ""
        print(
            f"{region}: {len(answer.records):,} records, {zones} of {len(answer.zone_ids)} "
            f"zones{named}"
        )
    print(f"{arguments.output}: use it with --set cost.prices={arguments.output}")
    return 0


def show_prices(arguments: argparse.Namespace, project_root: Path) -> int:
    """Print one line per price of the configured types, regions and zones, cheapest first."""
    config = load_config(
        arguments.config or DEFAULT_CONFIG, arguments.set, project_root=project_root
    ).config
    now = time.time()
    cost = config.cost
    prices = open_prices(config, now, project_root=project_root)
    kinds = load_catalogue().matching(config.cluster.instance_types)
    quotes = sorted(_quotes(prices, config, kinds), key=lambda found: found[1].usd_per_hour)
    for market, quote in quotes:
        print(_line(market, quote, now, cost))
    without = sum(not any(prices.spot(kind, region) for region in cost.regions) for kind in kinds)
    print(f"{len(quotes)} quotes; {without} of {len(kinds)} instance types have no spot price")
    for line in prices.describe(
        now_utc=now, regions=cost.regions, max_age_hours=cost.max_price_age_hours
    ):
        print(one_line(line))
    return 0


def _changes_by_zone(
    records: Iterable[SpotRecord],
    instance_types: Collection[str],
    since: float,
    until: float,
    kind: str,
) -> list[PriceChanges]:
    """Return the price changes of each type and zone from `since` to `until` (Unix times).

    The first change is that to the price in force at `since`.
    """
    wanted = (
        record
        for record in records
        if record.instance_type in instance_types and record.at <= until
    )
    by_zone = group_by_key(
        ((record.instance_type, record.region, record.zone), record) for record in wanted
    )
    pools: list[PriceChanges] = []
    for (instance_type, region, zone), found in sorted(by_zone.items()):
        found.sort(key=lambda record: record.at)
        held = [record for record in found if record.at <= since][-1:]
        later = [record for record in found if record.at > since]
        pools.append(
            {
                "instance_type": instance_type,
                "market": "spot",
                "region": region,
                "zone": zone,
                "kind": kind,
                "changes": [[record.at, f"{record.usd_per_hour:f}"] for record in [*held, *later]],
            }
        )
    return pools


def _quotes(
    prices: PriceSource, config: RunConfig, kinds: tuple[InstanceType, ...]
) -> Iterator[tuple[str, Quote]]:
    cost = config.cost
    for kind in kinds:
        for region in cost.regions:
            wanted = [zone for zone in cost.zones if is_zone_of(zone, region)]
            if cost.zones and not wanted:
                continue
            for quote in prices.spot(kind, region):
                if not wanted or quote.zone is None or quote.zone in wanted:
                    yield "spot", quote
            on_demand = prices.on_demand(kind, region)
            if on_demand:
                yield "on-demand", on_demand


def _line(market: str, quote: Quote, now: float, cost: CostConfig) -> str:
    place = quote.zone or quote.region
    if quote.zone_name != quote.zone:
        name = f" ({quote.zone_name})"
    else:
        name = ""
    age = format_short_age(now - quote.observed)
    known = quote.describe(now, cost.max_price_age_hours)
    price = f"${quote.usd_per_hour:f}/h"
    return one_line(
        f"{quote.instance_type:<17} {market:<9} {place + name:<24} {price:>13} {age:>6}  {known}"
    )


def _recording(answers: PriceAnswers) -> Recording:
    records: list[SpotRecord] = []
    for answer in answers.answered.values():
        records.extend(answer.records)
    return Recording(
        records=records,
        recorded_at=answers.observed,
        zone_ids={region: answer.zone_ids for region, answer in answers.answered.items()},
    )


def _hours(text: str) -> float:
    hours = float(text)
    if not 0 <= hours <= _LONGEST_HISTORY_HOURS:
        raise argparse.ArgumentTypeError(
            f"{text}: EC2 keeps the changes of 90 days, 0 to {_LONGEST_HISTORY_HOURS:g} h"
        )
    return hours
