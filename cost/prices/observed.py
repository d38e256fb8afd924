"""How the prices of a job's pools went while it ran: what a `prices` event records, for ledger and hindsight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cost.errors import PriceError
from cost.prices.history import SpotRecord
from cost.prices.recorded import read_recording
from infra.config.schema import CostConfig


def observed_pools(
    cost: CostConfig,
    plan: dict[str, Any],
    instance_type: str | None = None,
    *,
    now_utc: float,
    project_root: Path = Path(),
    client: Callable[[str], Any] | None = None,
) -> list[dict[str, Any]]:
    """The spot price changes since the plan was made, of a type in each zone of the regions that may be used.

    instance_type: None: the one that the plan chose. plan: as in the `plan` event. Empty for the static table, which
    knows of no change, and for a plan without a pool. Asks AWS, within the deadline of live prices, where `cost.prices`
    is live. Raises PriceError for a bad file, and where the region of the plan's pool does not answer.
    """
    chosen = plan.get("chosen")
    if not chosen or cost.prices == "static":
        return []
    since, kind = float(plan["made_utc"]), instance_type or chosen["instance_type"]
    if cost.prices != "live":
        records: Iterable[SpotRecord] = read_recording(project_root / cost.prices).records
        return _pools(records, kind, since, now_utc, "recorded")
    from cost.prices.live import ask

    answers = ask(cost.regions, [kind], now_utc=now_utc, since_utc=since, client=client)
    if not answers.answered or chosen.get("region") in answers.failed:
        raise PriceError("; ".join(dict.fromkeys(answers.failed.values())))
    found = [record for answer in answers.answered.values() for record in answer.records]
    return _pools(found, kind, since, now_utc, "live")


def _pools(
    records: Iterable[SpotRecord], instance_type: str, since: float, until: float, kind: str
) -> list[dict[str, Any]]:
    """Each zone with its changes, and before them the price that held at `since`."""
    by_zone: dict[tuple[str, str], list[SpotRecord]] = {}
    for record in records:
        if record.instance_type == instance_type and record.at <= until:
            by_zone.setdefault((record.region, record.zone), []).append(record)
    pools = []
    for (region, zone), found in sorted(by_zone.items()):
        found.sort(key=lambda record: record.at)
        held = [record for record in found if record.at <= since][-1:]
        later = [record for record in found if record.at > since]
        changes = [[record.at, f"{record.usd_per_hour:f}"] for record in [*held, *later]]
        where = {"instance_type": instance_type, "market": "spot", "region": region, "zone": zone}
        pools.append({**where, "kind": kind, "changes": changes})
    return pools
