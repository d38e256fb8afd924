"""Spot price change events, as DescribeSpotPriceHistory gives them, and what they say of one moment.

An event holds until the next one of the same type and zone, however old it is: the last one at or before the moment is
the price then (carry-forward). Prices stay the decimals that they are written as.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from ebbflow.cost.catalogue import InstanceType
from ebbflow.cost.errors import PriceError
from ebbflow.cost.prices.quote import Quote, QuoteKind, StaticPrices, region_of

# Of the products that share a pool, the one without a licence in its price. The second name is EC2-Classic's successor.
LINUX = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
# No instance has cost as much; what is above is no price in dollars per hour.
_HIGHEST_USD_PER_HOUR = 10_000


@dataclass(frozen=True, kw_only=True)
class SpotRecord:
    """One change of a spot price. at: Unix time since when it holds. zone_id: empty when the record has none."""

    instance_type: str
    region: str
    zone_name: str
    zone_id: str
    usd_per_hour: Decimal
    at: float

    @property
    def zone(self) -> str:
        return self.zone_id or self.zone_name


def read_record(record: Mapping[str, Any], where: str) -> SpotRecord | None:
    """A record in the shape of DescribeSpotPriceHistory; None for another operating system's price.

    where: place of the record, for messages. Timestamp: ISO 8601, UTC where it names no zone, or a datetime. Raises
    PriceError for what cannot be a price.
    """
    if record.get("ProductDescription") not in (None, "", *LINUX):
        return None
    zone_name = _text(record, "AvailabilityZone", where)
    region = region_of(zone_name)
    if region is None:
        raise PriceError(f"{where}: AvailabilityZone: {zone_name!r} is no zone's name, such as us-east-1a")
    return SpotRecord(
        instance_type=_text(record, "InstanceType", where),
        region=region,
        zone_name=zone_name,
        zone_id=str(record.get("AvailabilityZoneId") or ""),
        usd_per_hour=_usd(_text(record, "SpotPrice", where), where),
        at=_time(record.get("Timestamp"), where),
    )


def with_zone_ids(records: Iterable[SpotRecord], ids: Mapping[str, str]) -> list[SpotRecord]:
    """The records with the ids of their zones, as far as `ids` (by zone name) or other records tell them."""
    listed = list(records)
    known = {record.zone_name: record.zone_id for record in listed if record.zone_id} | dict(ids)
    return [record if record.zone_id else replace(record, zone_id=known.get(record.zone_name, "")) for record in listed]


def prices_at(
    records: Iterable[SpotRecord], *, now_utc: float, observed: Mapping[str, float], kind: QuoteKind, source: str
) -> dict[tuple[str, str], tuple[Quote, ...]]:
    """The quotes that hold at `now_utc`, by type and region, zones in order. observed: Unix time by region."""
    latest: dict[tuple[str, str, str], SpotRecord] = {}
    for record in records:
        place = (record.instance_type, record.region, record.zone)
        if record.at > now_utc:
            continue
        known = latest.get(place)
        # Of two prices of the same moment the higher one: a plan may turn out cheaper, not dearer.
        if known is None or (known.at, known.usd_per_hour) < (record.at, record.usd_per_hour):
            latest[place] = record
    quotes: dict[tuple[str, str], list[Quote]] = {}
    for (instance_type, region, zone), record in sorted(latest.items(), key=lambda item: item[0]):
        quotes.setdefault((instance_type, region), []).append(
            Quote(
                instance_type=instance_type,
                region=region,
                zone=zone,
                zone_name=record.zone_name,
                usd_per_hour=record.usd_per_hour,
                at=record.at,
                observed=min(now_utc, observed[region]),
                kind=kind,
                source=source,
            )
        )
    return {place: tuple(found) for place, found in quotes.items()}


@dataclass(frozen=True, kw_only=True)
class ZonePrices:
    """What recorded and live prices share: quotes by (type, region), zones by region; on-demand is the table's."""

    quotes: Mapping[tuple[str, str], tuple[Quote, ...]]
    known_zones: Mapping[str, tuple[str, ...]]

    def spot(self, kind: InstanceType, region: str) -> Sequence[Quote]:
        return self.quotes.get((kind.name, region), ())

    def on_demand(self, kind: InstanceType, region: str) -> Quote | None:
        return StaticPrices().on_demand(kind, region)

    def zones(self, region: str) -> Sequence[str]:
        return self.known_zones.get(region, ())

    def zones_by_name(self, kind: InstanceType, region: str, zone: str | None) -> Sequence[str]:
        """Names of zones that have a price of the type and no known id: `zone`, an id, may be any of them."""
        if zone is None or zone in self.zones(region):
            return ()
        return [quote.zone for quote in self.spot(kind, region) if quote.zone and quote.zone == quote.zone_name]

    def observed(self, region: str) -> float | None:
        """When the region's prices were last known to hold; None when it has none."""
        return max(
            (quote.observed for place, found in self.quotes.items() if place[1] == region for quote in found),
            default=None,
        )


def by_name_text(reason: str) -> str:
    """Why a zone of the configuration has no price where zones have no ids, and what to do."""
    return f"zones are known by name only, because {reason}; leave cost.zones empty"


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise PriceError(f"{where}: {key}: {'is missing' if value in (None, '') else f'{value!r} is not text'}")
    return value.strip()


def _usd(text: str, where: str) -> Decimal:
    try:
        usd = Decimal(text)
    except InvalidOperation:
        usd = Decimal("NaN")
    if not usd.is_finite() or not 0 < usd < _HIGHEST_USD_PER_HOUR:
        raise PriceError(
            f"{where}: SpotPrice: {text!r} is not dollars per hour, above 0 and below {_HIGHEST_USD_PER_HOUR}"
        )
    return usd


def _time(value: Any, where: str) -> float:
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError) as error:
        expected = "a time such as 2026-11-20T10:00:00Z"
        raise PriceError(f"{where}: Timestamp: {value!r} is not {expected}") from error
