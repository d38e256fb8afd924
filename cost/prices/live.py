"""Live prices: what EC2 says now, region by region; the static table, and why, for a region that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cost.catalogue import InstanceType
from cost.errors import PriceError
from cost.prices.aws import Forbidden, Patience, Unavailable, ec2_clients, spot_records, zone_ids
from cost.prices.history import SpotRecord, ZonePrices, by_name_text, prices_at
from cost.prices.quote import Quote, time_text
from cost.prices.static import StaticPrices, on_demand_text, table_text

# For all regions together: a plan is worth waiting this long for, and the table stands in after it.
DEADLINE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a region said: its change events and its zones (names with ids). names_only: why ids could not be had."""

    records: Sequence[SpotRecord]
    zone_ids: Mapping[str, str]
    names_only: str = ""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Of all regions asked: those that answered, and why the others did not. observed: Unix time of the asking."""

    answered: Mapping[str, Answer]
    failed: Mapping[str, str]
    observed: float


@dataclass(frozen=True, kw_only=True)
class LivePrices(ZonePrices):
    """Quotes of the regions that answered; a region of `failed` has the table's, and both say so."""

    failed: Mapping[str, str] = field(default_factory=dict)
    names_only: Mapping[str, str] = field(default_factory=dict)
    asked_at: float

    @classmethod
    def of(cls, answers: Answers) -> LivePrices:
        """The prices that the answers hold for the moment of asking."""
        answered = answers.answered
        records = [record for answer in answered.values() for record in answer.records]
        zones = {
            region: {*answer.zone_ids.values(), *(record.zone for record in answer.records)}
            for region, answer in answered.items()
        }
        observed = dict.fromkeys(answered, answers.observed)
        return cls(
            quotes=prices_at(records, now_utc=answers.observed, observed=observed, kind="live", source="asked of EC2"),
            known_zones={region: tuple(sorted(found)) for region, found in zones.items()},
            failed=answers.failed,
            names_only={region: answer.names_only for region, answer in answered.items() if answer.names_only},
            asked_at=answers.observed,
        )

    def spot(self, kind: InstanceType, region: str) -> Sequence[Quote]:
        return StaticPrices().spot(kind, region) if region in self.failed else super().spot(kind, region)

    def missing(self, kind: InstanceType, region: str, zone: str | None) -> str:
        if region in self.failed:
            return StaticPrices().missing(kind, region, zone)
        if zone is None:
            return "now by EC2: not offered there as Spot"
        if names := self.zones_by_name(kind, region, zone):
            reason = self.names_only.get(region) or f"EC2 gave no ids of {', '.join(names)}"
            return f"now by EC2: {by_name_text(reason)}"
        return f"now by EC2: no price in that zone, but in others of {region}"

    def said(self, *, now_utc: float, regions: Sequence[str], max_age_hours: float) -> tuple[str, ...]:
        lines = []
        answered = [region for region in regions if region not in self.failed]
        empty = [region for region in answered if self.observed(region) is None]
        if answered:
            lines.append(f"spot prices: live, asked {time_text(self.asked_at)} of {', '.join(answered)}")
        if empty:
            lines.append(f"spot prices: no history at all of these instance types in {', '.join(empty)}")
        for region, reason in self.names_only.items():
            lines.append(f"zones of {region}: by this account's names, because {reason}")
        for region in regions:
            if region in self.failed:
                lines.append(f"spot prices of {region}: {table_text(now_utc)}, because {self.failed[region]}")
        return (*lines, on_demand_text(now_utc, regions))


def ask(
    regions: Sequence[str],
    instance_types: Sequence[str],
    *,
    now_utc: float,
    since_utc: float | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    client: Callable[[str], Any] | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Answers:
    """Ask all regions side by side; back after the deadline at the latest, whoever still hangs.

    client: makes a region's EC2 client; None: boto3's. since_utc: also the changes since then, at most 90 days; None:
    the present prices only. The threads are daemons, so that a name server that never answers keeps no process from
    ending.
    """
    started = monotonic()
    make = ec2_clients() if client is None else client
    patience = Patience(deadline=started + deadline_seconds, monotonic=monotonic, sleep=sleep)
    found: dict[str, Answer | str] = {}

    def ask_one(region: str) -> None:
        try:
            found[region] = _ask(make(region), region, instance_types, since_utc or now_utc, patience)
        except (Unavailable, PriceError) as error:
            found[region] = str(error)
        except Exception as error:  # a client that cannot be made: a broken profile, an unknown region
            found[region] = f"{type(error).__name__}: {' '.join(str(error).split())}"

    threads = {region: threading.Thread(target=ask_one, args=(region,), daemon=True) for region in regions}
    for thread in threads.values():
        thread.start()
    limit = time.monotonic() + deadline_seconds
    for thread in threads.values():
        thread.join(max(0.0, limit - time.monotonic()))
    found = dict(found)  # a late answer must not come between what follows
    late = f"did not answer within {deadline_seconds:g} s"
    answered = {region: found[region] for region in regions if isinstance(found.get(region), Answer)}
    return Answers(
        answered=answered,
        failed={region: found.get(region, f"{region} {late}") for region in regions if region not in answered},
        observed=now_utc,
    )


def _ask(client: Any, region: str, instance_types: Sequence[str], since_utc: float, patience: Patience) -> Answer:
    """One region. Without the right to see zones the prices are still good, under the account's zone names."""
    try:
        ids, names_only = zone_ids(client, region, patience), ""
    except Forbidden as error:
        ids, names_only = {}, str(error)
    records = spot_records(client, region, instance_types, ids, since_utc=since_utc, patience=patience)
    if all(record.zone_id for record in records):
        names_only = ""
    return Answer(records=records, zone_ids=ids, names_only=names_only)
