"""Spot price records: which are read, which is in force, how old it is, and how a file of them is
written.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.errors import PriceError
from ebbflow.cost.prices.quote import Quote, describe_on_demand
from ebbflow.cost.prices.recorded import (
    RecordedPrices,
    Recording,
    SpotRecord,
    ZonePrices,
    explain_zone_names,
    prices_at,
    read_record,
    read_recording,
    with_zone_ids,
    write_recording,
)

NOW = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC
HOUR = 3600.0
KIND = load_catalogue()["g5.xlarge"]
RECORD: dict[str, Any] = {
    "AvailabilityZone": "us-east-1a",
    "InstanceType": "g5.xlarge",
    "SpotPrice": "0.41",
    "Timestamp": "2026-09-21T14:13:20Z",
}
SPOT = SpotRecord(
    instance_type="g5.xlarge",
    region="us-east-1",
    zone_name="us-east-1a",
    zone_id="",
    usd_per_hour=Decimal("0.41"),
    at=NOW,
)


def test_a_record_is_read_field_by_field() -> None:
    padded = {
        "AvailabilityZone": " us-east-1a",
        "InstanceType": "g5.xlarge ",
        "SpotPrice": " 0.410",
    }
    record = read_record(RECORD | padded | {"AvailabilityZoneId": "use1-az4"}, "here")
    assert record == replace(SPOT, zone_id="use1-az4")
    assert str(record.usd_per_hour) == "0.410", "as many decimals as were quoted"
    assert (record.zone, SPOT.zone) == ("use1-az4", "us-east-1a")


@pytest.mark.parametrize(
    ("product", "is_read"),
    [
        (None, True),
        ("", True),
        ("Linux/UNIX", True),
        ("Linux/UNIX (Amazon VPC)", True),
        ("Windows", False),
        ("SUSE Linux", False),
    ],
)
def test_only_prices_of_linux_without_a_licence_are_read(
    product: str | None, is_read: bool
) -> None:
    assert (read_record(RECORD | {"ProductDescription": product}, "here") is not None) is is_read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"AvailabilityZone": None}, "here: AvailabilityZone: is missing"),
        ({"AvailabilityZone": "  "}, "here: AvailabilityZone: '  ' is not text"),
        ({"InstanceType": 5}, "here: InstanceType: 5 is not text"),
        (
            {"AvailabilityZoneId": "use2-az1"},
            "here: AvailabilityZoneId: 'use2-az1' is no zone id of us-east-1",
        ),
        ({"AvailabilityZoneId": 4}, "here: AvailabilityZoneId: 4 is no zone id of us-east-1"),
        (
            {"SpotPrice": "0"},
            "here: SpotPrice: '0' is not dollars per hour, above 0 and below 10000",
        ),
        ({"SpotPrice": "-0.1"}, "here: SpotPrice: '-0.1' is not dollars per hour"),
        ({"SpotPrice": "10000"}, "here: SpotPrice: '10000' is not dollars per hour"),
        ({"SpotPrice": "x" * 41}, f"here: SpotPrice: '{'x' * 40}' is not dollars per hour"),
        ({"Timestamp": None}, "here: Timestamp: None is not a time such as"),
        (
            {"Timestamp": "0001-01-01T00:00:00+23:00"},
            "here: Timestamp: '0001-01-01T00:00:00+23:00' is not a time",
        ),
    ],
)
def test_an_invalid_field_of_a_record_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PriceError) as error:
        read_record(RECORD | changes, "here")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("usd", ["0.000001", "9999.999999"])
def test_a_price_just_inside_the_limits_is_read(usd: str) -> None:
    record = read_record(RECORD | {"SpotPrice": usd, "AvailabilityZoneId": ""}, "here")
    assert record is not None and record.usd_per_hour == Decimal(usd)


@pytest.fixture
def far_from_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time is Tokyo's."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("far_from_utc")
@pytest.mark.parametrize(
    "moment",
    [
        "2026-09-21T14:13:20",
        "2026-09-21T16:13:20+02:00",
        datetime(2026, 9, 21, 14, 13, 20),
        datetime(2026, 9, 21, 9, 13, 20, tzinfo=timezone(timedelta(hours=-5))),
    ],
)
def test_a_time_is_in_utc_unless_it_has_a_zone(moment: str | datetime) -> None:
    record = read_record(RECORD | {"Timestamp": moment}, "here")
    assert record is not None and record.at == NOW


def test_missing_zone_ids_are_taken_from_the_given_ones_and_from_other_records() -> None:
    second = replace(SPOT, zone_name="us-east-1b")
    third = replace(SPOT, zone_name="us-east-1c", zone_id="use1-az9")
    records = [
        SPOT,
        replace(SPOT, zone_id="use1-az4"),
        second,
        third,
        replace(second, zone_name="us-east-1d"),
    ]
    given = {"us-east-1b": "use1-az6", "us-east-1c": "use1-az1"}
    assert [record.zone_id for record in with_zone_ids(iter(records), given)] == [
        "use1-az4",
        "use1-az4",
        "use1-az6",
        "use1-az9",  # a record's own id stays
        "",
    ]
    of_third = [third, replace(third, zone_id="")]
    assert [record.zone_id for record in with_zone_ids(of_third, given)] == [
        "use1-az9",
        "use1-az1",
    ], "given ids prevail"


def quotes_of(
    *records: SpotRecord, observed: float = NOW + HOUR, now: float = NOW
) -> dict[tuple[str, str], Any]:
    regions = {record.region: observed for record in records}
    return dict(prices_at(records, now_utc=now, observed=regions, kind="live", source="a test"))


def test_a_quote_holds_its_record_and_where_it_is_from() -> None:
    assert quotes_of(replace(SPOT, zone_id="use1-az4", at=NOW - HOUR)) == {
        ("g5.xlarge", "us-east-1"): (
            Quote(
                instance_type="g5.xlarge",
                region="us-east-1",
                zone="use1-az4",
                zone_name="us-east-1a",
                usd_per_hour=Decimal("0.41"),
                at=NOW - HOUR,
                observed=NOW,  # not later than now
                kind="live",
                source="a test",
            ),
        )
    }
    [[quote]] = quotes_of(SPOT, observed=NOW - 5.0).values()
    assert quote.observed == NOW - 5.0


@pytest.mark.parametrize(
    ("changes", "usd"),
    [
        ([(0.0, "1")], "1"),  # a change of this moment is in force
        ([(0.25, "1")], None),
        ([(-9.0, "1"), (-5.0, "2"), (0.25, "9")], "2"),
        ([(-5.0, "2"), (-9.0, "3")], "2"),
        ([(-5.0, "2"), (-5.0, "3")], "3"),  # the higher of two prices of one moment
        ([(-5.0, "3"), (-5.0, "2")], "3"),
    ],
)
def test_the_last_change_is_in_force(changes: list[tuple[float, str]], usd: str | None) -> None:
    records = [replace(SPOT, at=NOW + at, usd_per_hour=Decimal(price)) for at, price in changes]
    found = []
    for quotes in quotes_of(*records).values():
        for quote in quotes:
            found.append(str(quote.usd_per_hour))
    assert found == ([] if usd is None else [usd])


def test_pools_differ_by_type_region_and_zone_and_are_sorted_by_zone() -> None:
    others = [
        replace(SPOT, zone_name="us-east-1c"),
        replace(SPOT, zone_name="us-east-1b"),
        replace(SPOT, instance_type="g6.xlarge"),
        replace(SPOT, region="us-west-2", zone_name="us-west-2a"),
    ]
    found = quotes_of(*others, SPOT)
    zones = {}
    for place, quotes in found.items():
        zones[place] = [quote.zone for quote in quotes]
    assert zones == {
        ("g5.xlarge", "us-east-1"): ["us-east-1a", "us-east-1b", "us-east-1c"],
        ("g6.xlarge", "us-east-1"): ["us-east-1a"],
        ("g5.xlarge", "us-west-2"): ["us-west-2a"],
    }


def zone_prices(*records: SpotRecord, **known: tuple[str, ...]) -> ZonePrices:
    return ZonePrices(quotes=quotes_of(*records), known_zones={"us-east-1": known.get("zones", ())})


def test_zone_prices_have_on_demand_prices_of_the_table() -> None:
    prices = zone_prices(SPOT)
    on_demand = prices.on_demand(KIND, "us-east-1")
    assert on_demand is not None and on_demand.usd_per_hour == Decimal("1.006")
    assert prices.spot(KIND, "us-west-2") == () and prices.zones("us-west-2") == ()
    assert len(prices.spot(KIND, "us-east-1")) == 1


@pytest.mark.parametrize(
    ("zone", "names"),
    [(None, []), ("use1-az4", []), ("use1-az9", ["us-east-1a", "us-east-1b"])],
)
def test_zones_known_by_name_only_may_have_any_other_id(zone: str | None, names: list[str]) -> None:
    by_id = replace(SPOT, zone_name="us-east-1c", zone_id="use1-az4")
    prices = zone_prices(SPOT, replace(SPOT, zone_name="us-east-1b"), by_id, zones=("use1-az4",))
    assert list(prices.zones_by_name(KIND, "us-east-1", zone)) == names
    [[quote]] = quotes_of(SPOT).values()
    regional = {("g5.xlarge", "us-east-1"): (replace(quote, zone=None, zone_name=None),)}
    assert (
        list(ZonePrices(quotes=regional, known_zones={}).zones_by_name(KIND, "us-east-1", zone))
        == []
    )


def test_prices_of_a_region_were_last_known_to_be_valid_at_the_newest_of_its_quotes() -> None:
    [[older]] = quotes_of(SPOT, observed=NOW - HOUR).values()
    newer = replace(older, observed=NOW - 5.0)
    far = replace(older, region="us-west-2", observed=NOW)
    quotes = {
        ("g5.xlarge", "us-east-1"): (older, newer, older),
        ("g6.xlarge", "us-east-1"): (older,),
        ("g5.xlarge", "us-west-2"): (far,),
    }
    prices = ZonePrices(quotes=quotes, known_zones={})
    assert prices.observed("us-east-1") == NOW - 5.0
    assert prices.observed("us-west-2") == NOW
    assert prices.observed("eu-west-1") is None


def recorded(
    path: Path, *records: SpotRecord, recorded_at: float = NOW, **zone_ids: dict[str, str]
) -> RecordedPrices:
    """Prices as they are read from a file that was written with these records."""
    ids = {"us-east-1": zone_ids.get("ids", {})}
    write_recording(path, Recording(records=records, recorded_at=recorded_at, zone_ids=ids))
    return RecordedPrices.read(path, NOW)


def test_recorded_prices_are_those_in_force_and_as_old_as_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    ids = {"us-east-1a": "use1-az4", "us-east-1b": "use1-az6"}
    records = (replace(SPOT, at=NOW - HOUR), replace(SPOT, usd_per_hour=Decimal(2)))
    far = replace(SPOT, region="us-west-2", zone_name="us-west-2a", at=NOW - 9 * HOUR)
    prices = recorded(path, *records, far, recorded_at=NOW - 60.0, ids=ids)
    [quote] = prices.spot(KIND, "us-east-1")
    assert (quote.usd_per_hour, quote.observed, quote.kind, quote.source) == (
        2,
        NOW - 60.0,
        "recorded",
        "in prices.json",
    )
    assert quote.zone == "use1-az4"
    assert (prices.zones("us-east-1"), prices.zones("us-west-2")) == (
        ("use1-az4", "use1-az6"),
        ("us-west-2a",),
    )
    assert prices.path == path
    assert prices.observed("us-west-2") == NOW - 60.0


def test_prices_of_a_file_without_its_time_are_as_old_as_the_newest_record_of_their_region(
    tmp_path: Path,
) -> None:
    path = tmp_path / "prices.json"
    moments = {
        "us-east-1b": NOW - HOUR,
        "us-east-1a": NOW - 5 * HOUR,
        "us-west-2a": NOW - 3 * HOUR,
        "us-west-2b": NOW + 1,
    }
    times = {zone: datetime.fromtimestamp(at, UTC).isoformat() for zone, at in moments.items()}
    path.write_text(
        json.dumps(
            [RECORD | {"AvailabilityZone": zone, "Timestamp": at} for zone, at in times.items()]
        )
    )
    prices = RecordedPrices.read(path, NOW)
    assert (prices.observed("us-east-1"), prices.observed("us-west-2")) == (
        NOW - HOUR,
        NOW - 3 * HOUR,
    )
    assert prices.zones("us-west-2") == ("us-west-2a",), "a later record is not known yet"


def test_a_file_whose_records_are_all_later_is_refused_and_an_empty_one_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "prices.json"
    later = [RECORD | {"Timestamp": f"2026-09-21T14:13:2{second}Z"} for second in (2, 1)]
    path.write_text(json.dumps(later))
    with pytest.raises(
        PriceError, match="its first record is of 2026-09-21 14:13 UTC, after the time to plan for"
    ):
        RecordedPrices.read(path, NOW)
    assert RecordedPrices.read(path, NOW + 1).observed("us-east-1") == NOW + 1, (
        "the moment of a record is no later one"
    )
    path.write_text("[]")
    assert RecordedPrices.read(path, NOW).quotes == {}


def test_recorded_prices_give_the_reason_for_a_missing_one(tmp_path: Path) -> None:
    by_id = replace(SPOT, zone_name="us-east-1c", zone_id="use1-az1")
    prices = recorded(tmp_path / "prices.json", SPOT, by_id)
    assert (
        prices.why_missing(KIND, "us-west-2", None)
        == "in prices.json: it has no record of the region"
    )
    assert prices.why_missing(KIND, "us-east-1", "use1-az1") == "in prices.json"
    reason = explain_zone_names("the file has no ids of us-east-1a")
    assert prices.why_missing(KIND, "us-east-1", "use1-az9") == f"in prices.json: {reason}"
    assert reason == (
        "zones are known by name only, because the file has no ids of us-east-1a; leave "
        "cost.zones empty"
    )


@pytest.mark.parametrize(
    ("limit", "stale"),
    [
        (10.0, ""),
        (9.75, ": stale, older than cost.max_price_age_hours 9.75, and used all the same"),
    ],
)
def test_recorded_prices_describe_their_regions_with_their_ages(
    limit: float, stale: str, tmp_path: Path
) -> None:
    regions = ["us-east-1", "eu-west-1", "us-west-2"]
    with_id = replace(SPOT, zone_id="use1-az4", at=NOW - 20 * HOUR)
    far = replace(SPOT, region="us-west-2", zone_name="us-west-2a", at=NOW - 20 * HOUR)
    prices = recorded(tmp_path / "prices.json", with_id, recorded_at=NOW - 10 * HOUR)
    ages = "(us-east-1 2026-09-21 04:13 UTC, 10.0 h old; eu-west-1 none)"
    described = prices.describe(now_utc=NOW, regions=regions[:2], max_age_hours=limit)
    on_demand = describe_on_demand(NOW, regions[:2])
    assert described == (f"spot prices: recorded in prices.json {ages}{stale}", on_demand)
    both = recorded(tmp_path / "prices.json", with_id, far, recorded_at=NOW - 10 * HOUR)
    _, names, _ = both.describe(now_utc=NOW, regions=regions, max_age_hours=limit)
    said = "by the names of the account that recorded them, since ids are missing"
    assert names == f"zones of us-west-2: {said}", "and not of us-east-1, whose zone has its id"


def test_a_recording_is_written_in_order_and_unpacked_or_packed_by_its_name(tmp_path: Path) -> None:
    other = replace(
        SPOT, instance_type="a1.large", zone_id="use1-az4", usd_per_hour=Decimal("1E-6")
    )
    far = replace(SPOT, region="eu-west-1", zone_name="eu-west-1a")
    late = replace(SPOT, at=NOW + 0.5, usd_per_hour=Decimal("0.500"))
    second = replace(SPOT, zone_name="us-east-1b")
    ids = {"us-east-1": {"us-east-1b": "use1-az6", "us-east-1a": "use1-az4"}, "eu-west-1": {}}
    recording = Recording(records=[late, second, SPOT, other, far], recorded_at=NOW, zone_ids=ids)
    write_recording(tmp_path / "prices.json", recording)
    text = (tmp_path / "prices.json").read_text()
    data = json.loads(text)
    assert list(data) == ["RecordedAt", "AvailabilityZones", "SpotPriceHistory"] and text.endswith(
        "}\n"
    )
    assert text.startswith('{\n "RecordedAt"'), "one line for each value"
    assert data["RecordedAt"] == "2026-09-21T14:13:20Z"
    assert json.dumps(data["AvailabilityZones"]) == (
        '{"eu-west-1": {}, "us-east-1": {"us-east-1a": "use1-az4", "us-east-1b": "use1-az6"}}'
    )
    usual = {
        "AvailabilityZone": "us-east-1a",
        "InstanceType": "g5.xlarge",
        "ProductDescription": "Linux/UNIX",
    }
    usual |= {"SpotPrice": "0.41", "Timestamp": "2026-09-21T14:13:20Z"}
    assert data["SpotPriceHistory"] == [
        usual | {"AvailabilityZone": "eu-west-1a"},
        usual
        | {"InstanceType": "a1.large", "AvailabilityZoneId": "use1-az4", "SpotPrice": "0.000001"},
        usual,
        usual | {"AvailabilityZone": "us-east-1b"},
        usual | {"SpotPrice": "0.500", "Timestamp": "2026-09-21T14:13:20.500000Z"},
    ]
    write_recording(tmp_path / "prices.json.gz", recording)
    packed = (tmp_path / "prices.json.gz").read_bytes()
    assert gzip.decompress(packed).decode() == text
    assert packed[4:8] == bytes(4), "without the time of packing: equal content makes equal files"


@pytest.mark.parametrize(("seconds", "fits"), [(600, True), (601, False)])
def test_a_record_may_be_ten_minutes_later_than_its_file(
    seconds: int, fits: bool, tmp_path: Path
) -> None:
    path = tmp_path / "prices.json"
    later = datetime.fromtimestamp(NOW + seconds, UTC).isoformat()
    data = {
        "SpotPriceHistory": [RECORD, RECORD | {"Timestamp": later}],
        "RecordedAt": RECORD["Timestamp"],
    }
    path.write_text(json.dumps(data))
    if fits:
        assert len(read_recording(path).records) == 2
        return
    with pytest.raises(PriceError, match=r"record 2: Timestamp: .* is after the file's RecordedAt"):
        read_recording(path)


def test_a_file_fills_in_zone_ids_of_its_own_list_and_leaves_out_other_products(
    tmp_path: Path,
) -> None:
    path = tmp_path / "prices.json"
    windows = RECORD | {"ProductDescription": "Windows", "Timestamp": "2030-01-01T00:00:00Z"}
    other = RECORD | {"AvailabilityZone": "us-east-1b"}
    data = {
        "SpotPriceHistory": [windows, RECORD, other],
        "RecordedAt": RECORD["Timestamp"],
        "AvailabilityZones": {"us-east-1": {"us-east-1a": "use1-az4"}},
    }
    path.write_text(json.dumps(data))
    recording = read_recording(path)
    assert [record.zone for record in recording.records] == ["use1-az4", "us-east-1b"]
    assert (recording.recorded_at, recording.zone_ids) == (NOW, data["AvailabilityZones"])
    path.write_text(f"  \n[{json.dumps(RECORD)}]")
    bare = read_recording(path)
    assert (len(bare.records), bare.recorded_at, bare.zone_ids) == (1, None, {})


@pytest.mark.parametrize(
    ("zones", "message"),
    [
        (["us-east-1a"], "AvailabilityZones: not zone names"),
        (
            {"us-east-1": {"us-east-1a": "use1-az4", "us-east-1b": 6}},
            "AvailabilityZones.us-east-1: not zone names",
        ),
        ({"us-east-1": {}, "us-west-2": None}, "AvailabilityZones.us-west-2: not zone names"),
    ],
)
def test_a_list_of_zones_is_checked(zones: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"SpotPriceHistory": [], "AvailabilityZones": zones}))
    with pytest.raises(PriceError, match=message):
        read_recording(path)


def test_a_csv_file_is_read_without_a_time_of_recording(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    header = "SpotPrice,Timestamp,Extra,AvailabilityZone,InstanceType,ProductDescription,AvailabilityZoneId"
    rows = [
        "1,2026-09-21T14:13:20Z,x,us-east-1a,g5.xlarge,Windows,",
        "0.41,2026-09-21T14:13:20Z,x,us-east-1a,g5.xlarge,,",
    ]
    rows += ["0.42,2026-09-21T14:13:20Z,x,us-east-1a,g6.xlarge,Linux/UNIX,use1-az4"]
    path.write_text("\n".join([header, *rows]))
    recording = read_recording(path)
    assert (recording.recorded_at, recording.zone_ids) == (None, {})
    assert [(str(record.usd_per_hour), record.zone) for record in recording.records] == [
        ("0.41", "use1-az4"),
        ("0.42", "use1-az4"),
    ]


@pytest.mark.parametrize("column", ["Timestamp", "InstanceType", "AvailabilityZone", "SpotPrice"])
def test_a_missing_column_is_named(column: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    columns = [
        name
        for name in ("Timestamp", "InstanceType", "AvailabilityZone", "SpotPrice")
        if name != column
    ]
    path.write_text(",".join(columns))
    named = (
        "neither JSON nor CSV with the columns Timestamp, InstanceType, AvailabilityZone, "
        "SpotPrice: no "
    )
    with pytest.raises(PriceError, match=f"prices.csv:1: {named}{column}$"):
        read_recording(path)


def test_a_damaged_gzipped_file_is_no_price_file(tmp_path: Path) -> None:
    """The data within the file are damaged, its checksum, or its end is missing."""
    path = tmp_path / "prices.json.gz"
    packed = gzip.compress(json.dumps([RECORD]).encode())
    path.write_bytes(packed)
    assert len(read_recording(path).records) == 1
    for damaged in (packed[:10] + b"\xff" * 20 + packed[30:], packed[:-8] + bytes(8), packed[:-4]):
        path.write_bytes(damaged)
        with pytest.raises(PriceError, match="cannot be read"):
            read_recording(path)


def test_a_folder_is_no_price_file(tmp_path: Path) -> None:
    with pytest.raises(PriceError, match="cannot be read"):
        read_recording(tmp_path)
