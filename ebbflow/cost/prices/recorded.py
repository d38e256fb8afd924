"""Spot price changes from EC2 or a file, and the spot prices that are in force at a given moment.

A change is in force until the next one of the same type and zone, however old it is. Prices are
kept as exact decimals. A file may be gzipped, and has one of two formats:

- JSON, as `aws ec2 describe-spot-price-history` prints it: {"SpotPriceHistory": [record, …]}. To
  join the files of several regions, put all records into one list. `ebbflow prices record` adds two
  keys: "RecordedAt", the time of the request, and "AvailabilityZones", {region: {zone name: zone
  id}}, which includes zones without a price.
- CSV with the columns Timestamp, InstanceType, AvailabilityZone and SpotPrice in any order; other
  columns are ignored.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

from ebbflow.core.grouping import group_by_key
from ebbflow.core.json_values import Json
from ebbflow.cost.amounts import read_decimal
from ebbflow.cost.catalogue import InstanceType
from ebbflow.cost.errors import PriceError
from ebbflow.cost.prices.quote import (
    Quote,
    QuoteKind,
    StaticPrices,
    describe_on_demand,
    format_age,
    format_time,
    is_zone_of,
    region_of,
)

# Both names of the product whose price includes no software licence.
LINUX = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
# Above any instance's price: a larger number is not dollars per hour.
_HIGHEST_USD_PER_HOUR = 10_000

_COLUMNS = ("Timestamp", "InstanceType", "AvailabilityZone", "SpotPrice")
_GZIP_MAGIC = b"\x1f\x8b"
# The clock that wrote RecordedAt may be behind EC2's by this much.
_CLOCK_SECONDS = 600.0
# A record as DescribeSpotPriceHistory returns it, or a file has it
PriceRecord = dict[str, Json | datetime]
_ISO_SECONDS = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, kw_only=True)
class SpotRecord:
    """One change of a spot price."""

    instance_type: str
    region: str
    zone_name: str
    zone_id: str  # zone id, such as use1-az1; empty if unknown
    usd_per_hour: Decimal
    at: float  # Unix time from which the price is in force

    @property
    def zone(self) -> str:
        return self.zone_id or self.zone_name


@dataclass(frozen=True, kw_only=True)
class ZonePrices:
    """Base class of recorded and live spot prices. On-demand prices come from the static table."""

    # Spot quotes by instance type and region, one per zone
    quotes: Mapping[tuple[str, str], tuple[Quote, ...]]
    known_zones: Mapping[str, tuple[str, ...]]  # zones by region, with or without a price

    def spot(self, kind: InstanceType, region: str) -> Sequence[Quote]:
        return self.quotes.get((kind.name, region), ())

    def on_demand(self, kind: InstanceType, region: str) -> Quote | None:
        return StaticPrices().on_demand(kind, region)

    def zones(self, region: str) -> Sequence[str]:
        return self.known_zones.get(region, ())

    def zones_by_name(self, kind: InstanceType, region: str, zone: str | None) -> Sequence[str]:
        """Return the names of zones that have a price but no known id.

        One of them may have the id `zone`.

        The result is empty if `zone` is None or a known zone of the region.
        """
        if zone is None or zone in self.zones(region):
            return ()
        return [
            quote.zone
            for quote in self.spot(kind, region)
            if quote.zone and quote.zone == quote.zone_name
        ]

    def observed(self, region: str) -> float | None:
        """Return the Unix time at which the region's prices were last known to be valid; None
        without prices.
        """
        return max(
            (
                quote.observed
                for place, found in self.quotes.items()
                if place[1] == region
                for quote in found
            ),
            default=None,
        )


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Content of a price file."""

    records: Sequence[SpotRecord]
    recorded_at: float | None  # Unix time of the recording; None if unknown
    zone_ids: Mapping[str, Mapping[str, str]]  # zone ids by region and zone name


@dataclass(frozen=True, kw_only=True)
class RecordedPrices(ZonePrices):
    """Prices from a file that were in force at a given moment."""

    path: Path

    @classmethod
    def read(cls, path: Path, now_utc: float) -> RecordedPrices:
        """Read the prices in force at `now_utc` (Unix time) from a file.

        Raises PriceError if the file is invalid.

        Later records are ignored. The age of a price counts from the time of the recording or, if
        that is unknown, from the region's newest record.
        """
        recording = read_recording(path)
        records = [record for record in recording.records if record.at <= now_utc]
        if recording.records and not records:
            first = format_time(min(record.at for record in recording.records))
            raise PriceError(
                f"{path}: its first record is of {first}, after the time to plan for, "
                f"{format_time(now_utc)}"
            )
        times = group_by_key((record.region, record.at) for record in records)
        observed = {
            region: max(found) if recording.recorded_at is None else recording.recorded_at
            for region, found in times.items()
        }
        zones: dict[str, set[str]] = {
            region: set(ids.values()) for region, ids in recording.zone_ids.items()
        }
        for record in records:
            zones.setdefault(record.region, set()).add(record.zone)
        return cls(
            quotes=prices_at(
                records,
                now_utc=now_utc,
                observed=observed,
                kind="recorded",
                source=f"in {path.name}",
            ),
            known_zones={region: tuple(sorted(found)) for region, found in zones.items()},
            path=path,
        )

    def why_missing(self, kind: InstanceType, region: str, zone: str | None) -> str:
        if self.observed(region) is None:
            return f"in {self.path.name}: it has no record of the region"
        names = self.zones_by_name(kind, region, zone)
        if names:
            reason = f"the file has no ids of {', '.join(names)}"
            return f"in {self.path.name}: {explain_zone_names(reason)}"
        return f"in {self.path.name}"

    def describe(
        self, *, now_utc: float, regions: Sequence[str], max_age_hours: float
    ) -> tuple[str, ...]:
        times = group_by_key((self.observed(region), region) for region in regions)
        parts = [
            f"{', '.join(found)} "
            f"{f'{format_time(at)}, {format_age(now_utc - at)} old' if at is not None else 'none'}"
            for at, found in times.items()
        ]
        stale = any(at is not None and now_utc - at > max_age_hours * 3600 for at in times)
        if stale:
            older = (
                f": stale, older than cost.max_price_age_hours {max_age_hours:g}, and used all "
                "the same"
            )
        else:
            older = ""
        spot = f"spot prices: recorded in {self.path.name} ({'; '.join(parts)}){older}"
        nameless = [
            region
            for region in regions
            if any(not is_zone_of(zone, region) for zone in self.zones(region))
        ]
        names = (
            f"zones of {', '.join(nameless)}: by the names of the account that recorded them, "
            "since ids are missing"
        )
        return (spot, *([names] if nameless else []), describe_on_demand(now_utc, regions))


def read_record(record: PriceRecord, where: str) -> SpotRecord | None:
    """Parse one record of DescribeSpotPriceHistory.

    Return None for a price of an operating system other than Linux.

    Args:
        record: The record; `Timestamp` is a datetime or ISO 8601 text, in UTC unless it has a time
            zone.
        where: File and position of the record, for messages.

    Raises:
        PriceError: A field is missing or invalid.
    """
    if record.get("ProductDescription") not in (None, "", *LINUX):
        return None
    zone_name = _text(record, "AvailabilityZone", where)
    region = region_of(zone_name)
    if region is None:
        raise PriceError(
            f"{where}: AvailabilityZone: {zone_name!r} is no zone's name, such as us-east-1a"
        )
    zone_id = record.get("AvailabilityZoneId") or ""
    if not isinstance(zone_id, str) or (zone_id and not is_zone_of(zone_id, region)):
        raise PriceError(f"{where}: AvailabilityZoneId: {zone_id!r} is no zone id of {region}")
    return SpotRecord(
        instance_type=_text(record, "InstanceType", where),
        region=region,
        zone_name=zone_name,
        zone_id=zone_id,
        usd_per_hour=_usd(_text(record, "SpotPrice", where), where),
        at=_parse_time(record.get("Timestamp"), f"{where}: Timestamp"),
    )


def with_zone_ids(records: Iterable[SpotRecord], ids: Mapping[str, str]) -> list[SpotRecord]:
    """Return the records with missing zone ids filled in from `ids` (zone name to id) or other
    records.
    """
    listed = list(records)
    known = {record.zone_name: record.zone_id for record in listed if record.zone_id} | dict(ids)
    return [
        record if record.zone_id else replace(record, zone_id=known.get(record.zone_name, ""))
        for record in listed
    ]


def prices_at(
    records: Iterable[SpotRecord],
    *,
    now_utc: float,
    observed: Mapping[str, float],
    kind: QuoteKind,
    source: str,
) -> dict[tuple[str, str], tuple[Quote, ...]]:
    """Return the spot quotes in force at `now_utc` (Unix time) by instance type and region, sorted
    by zone.

    Args:
        observed: Unix time at which the prices of each region were last known to be valid.
    """
    in_force = [record for record in records if record.at <= now_utc]
    by_place = group_by_key(
        ((record.instance_type, record.region, record.zone), record) for record in in_force
    )
    # Take the higher of two prices of the same moment: the job may cost less than planned, not
    # more.
    latest = {
        place: max(found, key=lambda record: (record.at, record.usd_per_hour))
        for place, found in by_place.items()
    }
    quotes: dict[tuple[str, str], list[Quote]] = {}
    for instance_type, region, zone in sorted(latest):
        record = latest[instance_type, region, zone]
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


def explain_zone_names(reason: str) -> str:
    """Explain why a configured zone has no price when zone ids are unknown, and how to fix this.

    Args:
        reason: Reason why the ids are unknown.
    """
    return f"zones are known by name only, because {reason}; leave cost.zones empty"


def read_recording(path: Path) -> Recording:
    """Read a JSON or CSV price file, gzipped or not.

    A PriceError names the file and the invalid line or record.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if content.startswith(_GZIP_MAGIC) else content).decode(
            "utf-8-sig"
        )
    except FileNotFoundError as error:
        raise PriceError(
            f"{path}: no such file; cost.prices is static, live or a file of recorded prices, "
            f"which `ebbflow prices record --output {path}` writes"
        ) from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise PriceError(f"{path}: cannot be read: {error}") from error
    if text.lstrip()[:1] in ("{", "["):
        return _read_json(text, path)
    return _read_csv(text, path)


def write_recording(path: Path, recording: Recording) -> None:
    """Write a price file that `read_recording` can read, oldest record first; gzipped if the name
    ends with .gz.
    """
    assert recording.recorded_at is not None
    ordered = sorted(
        recording.records,
        key=lambda record: (record.at, record.region, record.instance_type, record.zone),
    )
    data = {
        "RecordedAt": datetime.fromtimestamp(recording.recorded_at, UTC).strftime(_ISO_SECONDS),
        "AvailabilityZones": {
            region: dict(sorted(ids.items())) for region, ids in sorted(recording.zone_ids.items())
        },
        "SpotPriceHistory": [_to_json(record) for record in ordered],
    }
    content = (json.dumps(data, indent=1) + "\n").encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def _text(record: PriceRecord, key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise PriceError(
            f"{where}: {key}: {'is missing' if value in (None, '') else f'{value!r} is not text'}"
        )
    return value.strip()


def _usd(text: str, where: str) -> Decimal:
    with contextlib.suppress(ValueError):
        if 0 < (usd := read_decimal(text)) < _HIGHEST_USD_PER_HOUR:
            return usd
    limits = f"above 0 and below {_HIGHEST_USD_PER_HOUR}"
    raise PriceError(f"{where}: SpotPrice: {text[:40]!r} is not dollars per hour, {limits}")


def _parse_time(value: Json | datetime, where: str) -> float:
    try:
        if isinstance(value, datetime):
            moment = value
        else:
            moment = datetime.fromisoformat(str(value))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC).timestamp()
    except (TypeError, ValueError, OverflowError) as error:
        expected = "a time such as 2026-11-20T10:00:00Z"
        raise PriceError(f"{where}: {value!r} is not {expected}") from error


def _to_json(record: SpotRecord) -> dict[str, str]:
    return {
        "AvailabilityZone": record.zone_name,
        **({"AvailabilityZoneId": record.zone_id} if record.zone_id else {}),
        "InstanceType": record.instance_type,
        "ProductDescription": LINUX[0],
        "SpotPrice": f"{record.usd_per_hour:f}",
        "Timestamp": datetime.fromtimestamp(record.at, UTC).isoformat().replace("+00:00", "Z"),
    }


def _read_json(text: str, path: Path) -> Recording:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PriceError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # an integer of 5,000 digits, or a hundred thousand brackets
        raise PriceError(f"{path}: not a price file: {error}") from None
    if isinstance(data, list):
        data = {"SpotPriceHistory": data}
    listed = data.get("SpotPriceHistory")
    if not isinstance(listed, list):
        raise PriceError(
            f'{path}: no list "SpotPriceHistory", as describe-spot-price-history prints it'
        )
    zone_ids = _zone_ids(data.get("AvailabilityZones", {}), path)
    recorded_at = data.get("RecordedAt")
    if recorded_at is None:
        recorded_at = None
    else:
        recorded_at = _parse_time(recorded_at, f"{path}: RecordedAt")
    records = []
    for number, entry in enumerate(listed, start=1):
        where = f"{path}: record {number}"
        if not isinstance(entry, dict):
            raise PriceError(f"{where}: {entry!r} is not a record")
        records.append(read_record(entry, where))
        if (
            records[-1] is not None
            and recorded_at is not None
            and records[-1].at > recorded_at + _CLOCK_SECONDS
        ):
            raise PriceError(
                f"{where}: Timestamp: {entry['Timestamp']!r} is after the file's RecordedAt"
            )
    by_name = {}
    for ids in zone_ids.values():
        for name, zone in ids.items():
            by_name[name] = zone
    return Recording(
        records=with_zone_ids([record for record in records if record is not None], by_name),
        recorded_at=recorded_at,
        zone_ids=zone_ids,
    )


def _read_csv(text: str, path: Path) -> Recording:
    lines = csv.DictReader(text.splitlines())
    try:
        missing = [name for name in _COLUMNS if name not in (lines.fieldnames or [])]
        if missing:
            raise PriceError(
                f"{path}:1: neither JSON nor CSV with the columns {', '.join(_COLUMNS)}: no "
                f"{missing[0]}"
            )
        records = [read_record(line, f"{path}:{lines.line_num}") for line in lines]
    except csv.Error as error:
        raise PriceError(f"{path}:{lines.line_num + 1}: not CSV: {error}") from None
    found = with_zone_ids([record for record in records if record is not None], {})
    return Recording(records=found, recorded_at=None, zone_ids={})


def _zone_ids(value: Json, path: Path) -> dict[str, dict[str, str]]:
    if not isinstance(value, dict):
        raise PriceError(f"{path}: AvailabilityZones: not zone names with their ids")
    zone_ids: dict[str, dict[str, str]] = {}
    for region, ids in value.items():
        known: dict[str, str] = {}
        if isinstance(ids, dict):
            known = {zone: text for zone, text in ids.items() if isinstance(text, str)}
        if not isinstance(ids, dict) or len(known) < len(ids):
            raise PriceError(f"{path}: AvailabilityZones.{region}: not zone names with their ids")
        zone_ids[region] = known
    return zone_ids
