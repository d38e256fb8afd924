"""`python -m cost catalogue refresh`: ask AWS, write the tables anew, and say what became other."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from cost.catalogue import ADVISOR, GPUS, INSTANCES, ON_DEMAND
from cost.errors import PriceError
from cost.prices.aws import Patience, Unavailable, aws_clients
from cost.refresh.aws import PRICE_LIST_REGION, advisor_bands, gpu_hardware, on_demand_prices
from cost.refresh.tables import Change, reread, write_advisor, write_instances, write_on_demand
from infra.config.schema import CostConfig

# The price list has many pages and is slow; nobody waits for a plan.
_SECONDS = 300.0


def add_commands(commands: Any) -> None:
    """Add `catalogue` with its command to argparse's subparsers."""
    catalogue = commands.add_parser("catalogue", help="renew the shipped tables of types, prices and bands")
    ways = catalogue.add_subparsers(required=True, metavar="COMMAND")
    refresh = ways.add_parser("refresh", help="ask the price list, EC2 and the spot advisor")
    regions = CostConfig().regions
    refresh.add_argument(
        "--regions", nargs="+", default=regions, metavar="REGION", help=f"default: {' '.join(regions)}"
    )
    refresh.add_argument(
        "--output", type=Path, default=INSTANCES.parent, metavar="FOLDER", help="default: where the shipped tables lie"
    )
    refresh.add_argument("--no-advisor", action="store_true", help="leave savings and bands as they are")
    refresh.set_defaults(run=refresh_catalogue)


def refresh_catalogue(
    arguments: argparse.Namespace,
    *,
    client: Callable[[str, str], Any] | None = None,
    read_advisor: Callable[[], bytes] | None = None,
) -> int:
    """Ask everything first, and only then write. Raises PriceError, with nothing written, when an answer is missing.

    client: makes a client of (service, region); None: boto3's, by the usual chain of credentials.
    """
    make, patience = client or aws_clients(), Patience(deadline=monotonic() + _SECONDS)
    try:
        pricing = make("pricing", PRICE_LIST_REGION)
        listed = {region: on_demand_prices(pricing, region, patience) for region in arguments.regions}
        hardware = {
            one.name: one for region in arguments.regions for one in gpu_hardware(make("ec2", region), region, patience)
        }
    except Unavailable as error:
        raise PriceError(f"nothing was written, because {error}") from error
    empty = [region for region, prices in listed.items() if not prices]
    if empty:
        raise PriceError(f"nothing was written, because the price list has no GPU instance in {', '.join(empty)}")
    bands = None if arguments.no_advisor else advisor_bands(read_advisor)
    folder, today = arguments.output, datetime.now(UTC).date().isoformat()
    for table in (INSTANCES, GPUS, ON_DEMAND, ADVISOR):
        _seed(table, folder)
    before = reread(folder)
    gpus = {line.split(",")[0] for line in (folder / GPUS.name).read_text(encoding="utf-8").splitlines()}
    found = [hardware[name] for name in sorted(hardware)]
    _tell(folder / INSTANCES.name, write_instances(folder / INSTANCES.name, before, found, gpus))
    catalogue = reread(folder)
    _tell(folder / ON_DEMAND.name, write_on_demand(folder / ON_DEMAND.name, catalogue, listed, today))
    if bands is not None:
        _tell(folder / ADVISOR.name, write_advisor(folder / ADVISOR.name, catalogue, bands, today))
    reread(folder)
    return 0


def _seed(table: Path, folder: Path) -> None:
    """Another folder begins with the shipped tables."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / table.name).exists():
        shutil.copy(table, folder / table.name)


def _tell(path: Path, change: Change) -> None:
    print(f"{path}: {change.lines} lines")
    for line in change.said:
        print(f"  · {line}")
