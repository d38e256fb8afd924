"""`ebbflow prices record` and `… show`: what EC2 says, as a file; the quotes of a plan, with their age."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ebbflow.cost.amounts import plain
from ebbflow.cost.catalogue import InstanceType, load_catalogue
from ebbflow.cost.errors import PriceError
from ebbflow.cost.prices.ec2_prices import Answers, ask
from ebbflow.cost.prices.quote import PriceSource, Quote, is_zone_of, short_age_text
from ebbflow.cost.prices.recorded import Recording, write_recording
from ebbflow.cost.prices.source import open_prices
from ebbflow.infra.config.load import load_config
from ebbflow.infra.config.problems import ConfigError
from ebbflow.infra.config.schema import CostConfig, RunConfig
from ebbflow.infra.outcome import Outcome
from ebbflow.infra.program import DEFAULT_CONFIG

# A history of some weeks has many pages, and nobody waits for a plan.
_RECORD_SECONDS = 300.0
_LONGEST_HISTORY_HOURS = 90 * 24.0


def add_commands(commands: Any, project_root: Path) -> None:
    """Add `prices` with its two commands to argparse's subparsers."""
    prices = commands.add_parser("prices", help="record live spot prices, or show those that a plan would use")
    ways = prices.add_subparsers(required=True, metavar="COMMAND")
    record = ways.add_parser("record", help="write what EC2 says now to a file that cost.prices can name")
    regions = CostConfig().regions
    record.add_argument("--regions", nargs="+", default=regions, metavar="REGION", help=f"default: {' '.join(regions)}")
    record.add_argument(
        "--instance-types", nargs="*", default=[], metavar="PREFIX", help="such as g5 p4d; default: all"
    )
    record.add_argument(
        "--hours", type=_hours, default=0.0, help="also the changes of so many hours before; default: 0"
    )
    record.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON; gzipped if it ends with .gz")
    record.set_defaults(run=record_prices)
    show = ways.add_parser("show", help="the quotes that a plan of a configuration would use")
    show.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG", help="a YAML file; default: configs/laptop.yaml"
    )
    show.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; repeatable")
    show.set_defaults(run=lambda arguments: show_prices(arguments, project_root))


def record_prices(arguments: argparse.Namespace, *, client: Callable[[str], Any] | None = None) -> int:
    """Write the file, and say what is in it. Raises PriceError when a region does not answer: half a file misleads."""
    now = time.time()
    kinds = load_catalogue().matching(arguments.instance_types)
    if not kinds:
        raise PriceError(f"no instance type of the catalogue begins with {', '.join(arguments.instance_types)}")
    answers = ask(
        arguments.regions,
        [kind.name for kind in kinds],
        now_utc=now,
        since_utc=now - arguments.hours * 3600,
        deadline_seconds=_RECORD_SECONDS,
        client=client,
    )
    if answers.failed:
        raise PriceError(f"nothing was written, because {'; '.join(dict.fromkeys(answers.failed.values()))}")
    try:
        write_recording(arguments.output, _recording(answers))
    except OSError as error:
        raise PriceError(f"{arguments.output}: cannot be written: {error.strerror}") from error
    for region, answer in answers.answered.items():
        zones = len({record.zone for record in answer.records})
        named = f"; zones by name only, because {answer.names_only}" if answer.names_only else ""
        print(f"{region}: {len(answer.records):,} records, {zones} of {len(answer.zone_ids)} zones{named}")
    print(f"{arguments.output}: use it with --set cost.prices={arguments.output}")
    return 0


def show_prices(arguments: argparse.Namespace, project_root: Path) -> int:
    """Print a line for each quote of the configuration's types, regions and zones, cheapest first."""
    path = arguments.config or DEFAULT_CONFIG
    try:
        config = load_config(path, arguments.set, project_root=project_root).config
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Outcome.CONFIG.exit_code
    now, cost = time.time(), config.cost
    prices = open_prices(config, now, project_root=project_root)
    kinds = load_catalogue().matching(config.cluster.instance_types)
    quotes = sorted(_quotes(prices, config, kinds), key=lambda found: (found[1].usd_per_hour, found[1].instance_type))
    for market, quote in quotes:
        print(_line(market, quote, now, cost))
    without = sum(not any(prices.spot(kind, region) for region in cost.regions) for kind in kinds)
    print(f"{len(quotes)} quotes; {without} of {len(kinds)} instance types have no spot price")
    for line in prices.said(now_utc=now, regions=cost.regions, max_age_hours=cost.max_price_age_hours):
        print(plain(line))
    return 0


def _quotes(prices: PriceSource, config: RunConfig, kinds: tuple[InstanceType, ...]) -> Iterator[tuple[str, Quote]]:
    cost = config.cost
    for kind in kinds:
        for region in cost.regions:
            wanted = [zone for zone in cost.zones if is_zone_of(zone, region)]
            if cost.zones and not wanted:
                continue
            for quote in prices.spot(kind, region):
                if not wanted or quote.zone is None or quote.zone in wanted:
                    yield "spot", quote
            if on_demand := prices.on_demand(kind, region):
                yield "on-demand", on_demand


def _line(market: str, quote: Quote, now: float, cost: CostConfig) -> str:
    place = quote.zone or quote.region
    name = f" ({quote.zone_name})" if quote.zone_name and quote.zone_name != quote.zone else ""
    age = short_age_text(now - quote.observed)
    known = quote.describe(now, cost.max_price_age_hours)
    price = f"${quote.usd_per_hour:f}/h"
    return plain(f"{quote.instance_type:<17} {market:<9} {place + name:<24} {price:>13} {age:>6}  {known}")


def _recording(answers: Answers) -> Recording:
    return Recording(
        records=[record for answer in answers.answered.values() for record in answer.records],
        recorded_at=answers.observed,
        zone_ids={region: answer.zone_ids for region, answer in answers.answered.items()},
    )


def _hours(text: str) -> float:
    hours = float(text)
    if not 0 <= hours <= _LONGEST_HISTORY_HOURS:
        raise argparse.ArgumentTypeError(f"{text}: EC2 keeps the changes of 90 days, 0 to {_LONGEST_HISTORY_HOURS:g} h")
    return hours
