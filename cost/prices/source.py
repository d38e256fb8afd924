"""From the configuration to an opened price source. The only place that chooses between table, file and cloud."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.prices.quote import PriceSource, StaticPrices
from ebbflow.cost.prices.recorded import RecordedPrices
from ebbflow.infra.config.schema import RunConfig

NOT_ASKED = "live prices are asked when the plan is made"


def open_prices(
    config: RunConfig,
    now_utc: float,
    *,
    project_root: Path = Path(),
    network: bool = True,
    client: Callable[[str], Any] | None = None,
) -> PriceSource:
    """The prices that `cost.prices` names, as they stand at `now_utc` (Unix time).

    A relative file counts from `project_root`. network: False asks nobody, and the static table stands in for live
    prices. client: what makes an EC2 client of a region; None: boto3, by the usual chain of credentials. Live prices
    that cannot be had are the table's, which says why; so this raises only PriceError, for a bad file, and
    CatalogueError.
    """
    cost = config.cost
    if cost.prices == "static":
        return StaticPrices()
    if cost.prices != "live":
        return RecordedPrices.read(project_root / cost.prices, now_utc)
    if not network:
        return StaticPrices(because=NOT_ASKED)
    from ebbflow.cost.prices.ec2_prices import LivePrices, ask

    names = [kind.name for kind in load_catalogue().matching(config.cluster.instance_types)]
    answers = ask(cost.regions, names, now_utc=now_utc, client=client)
    if not answers.answered:
        return StaticPrices(because="; ".join(dict.fromkeys(answers.failed.values())))
    return LivePrices.of(answers)
