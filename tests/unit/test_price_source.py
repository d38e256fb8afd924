"""The prices that a configuration selects, what EC2 is asked for them, and the commands that record
and show them.
"""

from __future__ import annotations

import argparse
import json
import threading
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.schema import CostConfig, RunConfig
from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.errors import PriceError
from ebbflow.cost.prices.ec2_prices import LivePrices, PriceAnswers, RegionPrices, query_spot_prices
from ebbflow.cost.prices.quote import StaticPrices, describe_on_demand, describe_static_table
from ebbflow.cost.prices.recorded import RecordedPrices, SpotRecord, read_recording
from ebbflow.cost.prices.source import (
    NOT_ASKED,
    add_commands,
    open_prices,
    read_price_changes,
    record_prices,
    show_prices,
)
from tests.support.fake_ec2 import FakeEc2, record_joins, refusal

NOW = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC
HOUR = 3600.0
ROOT = Path(__file__).parents[2]
KIND = load_catalogue()["g5.xlarge"]
ZONES = {
    "AvailabilityZones": [
        {"ZoneName": "us-east-1a", "ZoneId": "use1-az4"},
        {"ZoneName": "us-east-1b", "ZoneId": "use1-az6"},
    ]
}

PLAN = {"made_utc": NOW, "chosen": {"instance_type": "g5.xlarge", "region": "us-east-1"}}


def entry(
    usd: str, at: float = NOW, zone: str = "us-east-1a", kind: str = "g5.xlarge", **more: str
) -> dict[str, Any]:
    when = datetime.fromtimestamp(at, UTC)
    return {
        "AvailabilityZone": zone,
        "InstanceType": kind,
        "SpotPrice": usd,
        "Timestamp": when,
        **more,
    }


CHANGES = [
    entry("0.7", NOW + 1.0, zone="us-east-1b"),
    entry("0.1", NOW - 9.0),
    entry("0.2", NOW),
    entry("0.300", NOW + 5.0),
    entry("0.4", NOW + 10.0),
    entry("0.5", NOW + 10.25),
    entry("0.6", NOW - 5.0),
    entry("0.8", NOW + 1.0, kind="g6.xlarge"),
]


def history(*entries: dict[str, Any]) -> list[dict[str, Any]]:
    """One page of price changes."""
    return [{"SpotPriceHistory": list(entries)}]


def ec2(*entries: dict[str, Any], region: str = "us-east-1") -> FakeEc2:
    if region == "us-east-1":
        zones = ZONES
    else:
        zones = {}
    return FakeEc2(
        region, describe_availability_zones=[zones], describe_spot_price_history=history(*entries)
    )


def denied(region: str = "us-east-1") -> FakeEc2:
    """EC2 that shows neither zones nor prices."""
    operations = ("describe_availability_zones", "describe_spot_price_history")
    return FakeEc2(region, **{operation: [refusal(operation)] for operation in operations})


def asked(*clients: FakeEc2, types: list[str] | None = None, **options: Any) -> PriceAnswers:
    by_region = {client.meta.region_name: client for client in clients}
    if types is None:
        names = ["g5.xlarge"]
    else:
        names = types
    return query_spot_prices(
        list(by_region), names, now_utc=NOW, client=by_region.__getitem__, **options
    )


def test_ec2_is_asked_for_the_zones_of_the_region_and_for_the_prices_of_linux() -> None:
    client = ec2(entry("0.4"))
    asked(client, since_utc=NOW - HOUR)
    assert client.requests == [
        (
            "describe_availability_zones",
            {
                "Filters": [
                    {"Name": "zone-type", "Values": ["availability-zone"]},
                    {"Name": "region-name", "Values": ["us-east-1"]},
                ]
            },
        ),
        (
            "describe_spot_price_history",
            {
                "Filters": [{"Name": "instance-type", "Values": ["g5.xlarge"]}],
                "ProductDescriptions": ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
                "StartTime": datetime.fromtimestamp(NOW - HOUR, UTC),
                "MaxResults": 1000,
            },
        ),
    ]
    present = ec2()
    asked(present)
    assert present.requests[1][1]["StartTime"] == datetime.fromtimestamp(NOW, UTC), (
        "only the current prices"
    )


@pytest.mark.parametrize(("count", "parts"), [(200, [200]), (201, [200, 1]), (401, [200, 200, 1])])
def test_ec2_is_asked_for_at_most_200_types_at_once(count: int, parts: list[int]) -> None:
    types = [f"g5.{number}" for number in range(count)]
    pages = [{"SpotPriceHistory": [entry("0.4", kind=f"g5.{part}")]} for part in range(len(parts))]
    client = FakeEc2(describe_availability_zones=[ZONES], describe_spot_price_history=pages)
    answers = asked(client, types=types)
    values = [request["Filters"][0]["Values"] for _, request in client.requests[1:]]
    assert [len(part) for part in values] == parts
    asked_types = []
    for part in values:
        asked_types += part
    assert asked_types == types
    assert len(answers.answered["us-east-1"].records) == len(parts)


def test_pages_of_prices_are_followed_by_their_token() -> None:
    pages = [
        {"SpotPriceHistory": [entry("0.4")], "NextToken": "more"},
        *history(entry("0.5", kind="g6.xlarge")),
    ]
    client = FakeEc2(describe_availability_zones=[ZONES], describe_spot_price_history=pages)
    assert len(asked(client).answered["us-east-1"].records) == 2
    assert client.requests[2][1]["NextToken"] == "more"


def test_each_region_answers_or_fails_for_itself() -> None:
    clients = {"us-east-1": ec2(entry("0.4")), "us-west-2": denied("us-west-2")}

    def make(region: str) -> FakeEc2:
        if region == "mars-1":
            raise RuntimeError("no  such\nregion")
        return clients[region]

    regions = ["mars-1", "us-east-1", "us-west-2"]
    answers = query_spot_prices(regions, ["g5.xlarge"], now_utc=NOW, client=make)
    assert list(answers.answered) == ["us-east-1"] and answers.observed == NOW
    assert list(answers.failed) == ["mars-1", "us-west-2"]
    assert answers.failed["mars-1"] == "RuntimeError: no such region"
    assert "ec2:DescribeSpotPriceHistory in us-west-2: denied" in answers.failed["us-west-2"]
    bad = asked(ec2(entry("free")))
    assert bad.failed == {
        "us-east-1": "EC2 in us-east-1: SpotPrice: 'free' is not dollars per hour, above 0 and below 10000"
    }


def test_zones_have_names_only_if_ec2_shows_no_ids() -> None:
    refused = refusal("describe_availability_zones")
    found = asked(
        FakeEc2(
            describe_availability_zones=[refused], describe_spot_price_history=history(entry("0.4"))
        )
    )
    assert (
        "ec2:DescribeAvailabilityZones in us-east-1: denied"
        in found.answered["us-east-1"].names_only
    )
    with_id = history(entry("0.4", AvailabilityZoneId="use1-az4"))
    found = asked(
        FakeEc2(describe_availability_zones=[refused], describe_spot_price_history=with_id)
    )
    assert found.answered["us-east-1"].names_only == "", "each record has its id"
    known = asked(ec2(entry("0.4"), entry("1", ProductDescription="Windows"))).answered["us-east-1"]
    assert (known.names_only, known.zone_ids) == (
        "",
        {"us-east-1a": "use1-az4", "us-east-1b": "use1-az6"},
    )
    assert [record.zone for record in known.records] == ["use1-az4"]


def test_regions_are_asked_in_parallel_by_daemon_threads_with_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each region answers only once the other one is asked as well."""
    limits = record_joins(monkeypatch)
    together = threading.Barrier(2, timeout=20.0)
    threads = []

    def make(region: str) -> FakeEc2:
        threads.append(threading.current_thread())
        together.wait()
        return ec2(region=region)

    answers = query_spot_prices(["us-east-1", "us-west-2"], [], now_utc=NOW, client=make)
    assert set(answers.answered) == {"us-east-1", "us-west-2"}
    assert all(thread.daemon for thread in threads), (
        "a request that hangs does not keep the process alive"
    )
    assert len(limits) >= 2 and all(20.0 < limit <= 30.0 for limit in limits)


def spot(
    usd: str,
    at: float = NOW,
    zone: str = "us-east-1a",
    zone_id: str = "",
    region: str = "us-east-1",
) -> SpotRecord:
    return SpotRecord(
        instance_type="g5.xlarge",
        region=region,
        zone_name=zone,
        zone_id=zone_id,
        usd_per_hour=Decimal(usd),
        at=at,
    )


def live(
    *records: SpotRecord, failed: dict[str, str] | None = None, names_only: str = "", **ids: str
) -> LivePrices:
    region = RegionPrices(records=records, zone_ids=ids, names_only=names_only)
    return LivePrices.of(
        PriceAnswers(answered={"us-east-1": region}, failed=failed or {}, observed=NOW)
    )


def test_live_prices_are_the_last_changes_observed_now() -> None:
    prices = live(
        spot("0.4", NOW - 5.0, zone_id="use1-az4"),
        spot("0.3", NOW - 9.0, zone_id="use1-az4"),
        b="use1-az6",
    )
    [quote] = prices.spot(KIND, "us-east-1")
    assert (quote.usd_per_hour, quote.observed, quote.kind, quote.source) == (
        Decimal("0.4"),
        NOW,
        "live",
        "asked of EC2",
    )
    assert prices.zones("us-east-1") == ("use1-az4", "use1-az6"), (
        "with a price, or known by their ids"
    )
    assert (prices.asked_at, prices.names_only, dict(prices.failed)) == (NOW, {}, {})


def test_a_region_that_failed_has_the_prices_of_the_table() -> None:
    prices = live(spot("0.4"), failed={"us-west-2": "no answer"})
    assert prices.spot(KIND, "us-west-2") == StaticPrices().spot(KIND, "us-west-2")
    assert live(failed={"us-east-1": "none"}).spot(KIND, "us-east-1")[0].kind == "estimated"
    assert prices.why_missing(KIND, "us-west-2", None) == StaticPrices().why_missing(
        KIND, "us-west-2", None
    )


@pytest.mark.parametrize(
    ("prices", "zone", "why"),
    [
        (live(), None, "not offered there as Spot"),
        (
            live(spot("1")),
            "use1-az4",
            "zones are known by name only, because EC2 gave no ids of us-east-1a; leave "
            "cost.zones empty",
        ),
        (
            live(spot("1"), names_only="it is forbidden"),
            "use1-az4",
            "zones are known by name only, because it is forbidden; leave cost.zones empty",
        ),
        (
            live(spot("1", zone_id="use1-az6")),
            "use1-az4",
            "no price in that zone, but in others of us-east-1",
        ),
    ],
)
def test_live_prices_give_the_reason_for_a_missing_one(
    prices: LivePrices, zone: str | None, why: str
) -> None:
    assert prices.why_missing(KIND, "us-east-1", zone) == f"now by EC2: {why}"


def test_live_prices_describe_what_each_region_has() -> None:
    regions = ["us-east-1", "eu-west-1", "us-west-2"]
    prices = live(spot("1"), failed={"us-west-2": "no answer"}, names_only="it is forbidden")
    assert prices.describe(now_utc=NOW, regions=regions, max_age_hours=1.0) == (
        "spot prices: live, asked 2026-09-21 14:13 UTC of us-east-1, eu-west-1",
        "spot prices: no history at all of these instance types in eu-west-1",
        "zones of us-east-1: by this account's names, because it is forbidden",
        f"spot prices of us-west-2: {describe_static_table(NOW)}, because no answer",
        describe_on_demand(NOW, regions),
    )
    assert prices.describe(now_utc=NOW, regions=["us-west-2"], max_age_hours=1.0)[0].startswith(
        "zones of us-east-1"
    )


def configuration(**cost: Any) -> RunConfig:
    cluster = {"nodes": 1, "plan_for": "kubernetes", "instance_types": ["g5.xlarge"]}
    return RunConfig.model_validate({"cluster": cluster, "cost": cost})


def write_prices(path: Path, *entries: dict[str, Any]) -> None:
    texts = [entry | {"Timestamp": entry["Timestamp"].isoformat()} for entry in entries]
    path.write_text(json.dumps(texts))


def test_the_configuration_selects_the_source_of_prices(tmp_path: Path) -> None:
    write_prices(tmp_path / "prices.json", entry("0.4"))
    assert open_prices(configuration(), NOW) == StaticPrices()
    recorded = open_prices(configuration(prices="prices.json"), NOW, project_root=tmp_path)
    assert isinstance(recorded, RecordedPrices) and recorded.spot(KIND, "us-east-1")
    assert open_prices(configuration(prices="live"), NOW, network=False) == StaticPrices(
        because=NOT_ASKED
    )
    client = ec2(entry("0.4"))
    answered = open_prices(configuration(prices="live"), NOW, client=lambda region: client)
    assert isinstance(answered, LivePrices) and answered.spot(KIND, "us-east-1")[
        0
    ].usd_per_hour == Decimal("0.4")
    assert client.requests[1][1]["Filters"] == [{"Name": "instance-type", "Values": ["g5.xlarge"]}]


def test_without_any_live_answer_the_table_gives_each_reason_once() -> None:
    def make(region: str) -> FakeEc2:
        raise RuntimeError("us is closed" if region.startswith("us") else "eu is closed")

    config = configuration(prices="live", regions=["us-east-1", "us-west-2", "eu-west-1"])
    prices = open_prices(config, NOW, client=make)
    assert prices == StaticPrices(because="RuntimeError: us is closed; RuntimeError: eu is closed")


def cost_config(**cost: Any) -> CostConfig:
    return configuration(**cost).cost


@pytest.mark.parametrize(("prices", "kind"), [("prices.json", "recorded"), ("live", "live")])
def test_price_changes_since_the_plan_are_listed_by_zone(
    prices: str, kind: str, tmp_path: Path
) -> None:
    """The price in force when the plan was made, and each change up to now; nothing later."""
    write_prices(tmp_path / "prices.json", *CHANGES)
    client = ec2(*CHANGES)
    options = {"now_utc": NOW + 10.0, "project_root": tmp_path, "client": lambda region: client}
    if kind == "recorded":
        first, second = ("us-east-1a", "us-east-1b")
    else:
        first, second = ("use1-az4", "use1-az6")
    pool = {"instance_type": "g5.xlarge", "market": "spot", "region": "us-east-1", "kind": kind}
    assert read_price_changes(cost_config(prices=prices), PLAN, **options) == [
        pool
        | {"zone": first, "changes": [[NOW, "0.2"], [NOW + 5.0, "0.300"], [NOW + 10.0, "0.4"]]},
        pool | {"zone": second, "changes": [[NOW + 1.0, "0.7"]]},
    ]
    if kind == "live":
        assert client.requests[1][1]["StartTime"] == datetime.fromtimestamp(NOW, UTC), (
            "since the plan"
        )
        client = ec2(*CHANGES)
    [other] = read_price_changes(cost_config(prices=prices), PLAN, ["g6.xlarge"], **options)
    assert (other["instance_type"], other["changes"]) == ("g6.xlarge", [[NOW + 1.0, "0.8"]])


def test_a_plan_without_a_pool_or_with_the_static_table_has_no_price_changes() -> None:
    assert read_price_changes(cost_config(prices="static"), PLAN, now_utc=NOW) == []
    assert read_price_changes(cost_config(prices="live"), {"chosen": None}, now_utc=NOW) == []


def test_price_changes_need_an_answer_of_the_region_of_the_plan() -> None:
    clients = {"us-east-1": ec2(*CHANGES), "us-west-2": denied("us-west-2")}
    both = cost_config(prices="live", regions=["us-east-1", "us-west-2"])
    options = {"now_utc": NOW + 10.0, "client": clients.__getitem__}
    assert len(read_price_changes(both, PLAN, **options)) == 2
    clients |= {"us-east-1": ec2(*CHANGES), "us-west-2": denied("us-west-2")}
    far = PLAN | {"chosen": {"instance_type": "g5.xlarge", "region": "us-west-2"}}
    with pytest.raises(PriceError, match="us-west-2: denied"):
        read_price_changes(both, far, **options)
    nowhere = PLAN | {"chosen": {"instance_type": "g5.xlarge", "region": None}}
    with pytest.raises(PriceError, match="us-east-1: denied"):
        read_price_changes(
            cost_config(prices="live"), nowhere, now_utc=NOW, client=lambda region: denied()
        )


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True), Path())
    return parser


def parsed(*arguments: str) -> argparse.Namespace:
    return command_parser().parse_args(["prices", *arguments])


def test_the_command_that_records_has_defaults() -> None:
    arguments = parsed("record", "--output", "x.json")
    assert (arguments.regions, arguments.instance_types, arguments.hours) == (
        CostConfig().regions,
        [],
        0.0,
    )
    assert (arguments.output, arguments.run) == (Path("x.json"), record_prices)
    some = parsed(
        "record", "--output", "x", "--regions", "a", "b", "--instance-types", "g5", "--hours", "1.5"
    )
    assert (some.regions, some.instance_types, some.hours) == (["a", "b"], ["g5"], 1.5)
    assert parsed("record", "--output", "x", "--instance-types").instance_types == []


def test_the_command_that_shows_takes_a_configuration_and_its_overrides() -> None:
    assert (parsed("show").config, parsed("show").set) == (None, [])
    arguments = parsed("show", "a.yaml", "--set", "cost.prices=live", "--set", "cost.zones=[]")
    assert (arguments.config, arguments.set) == (
        Path("a.yaml"),
        ["cost.prices=live", "cost.zones=[]"],
    )


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        (
            (),
            [
                "COMMAND",
                "write EC2's present prices to a file",
                "show the quotes that a plan would use",
            ],
        ),
        (
            ("record",),
            [
                "--regions REGION",
                "default: us-east-1",
                "--instance-types [PREFIX",
                "such as g5 p4d; default: all",
            ],
        ),
        (
            ("record",),
            [
                "--hours HOURS",
                "also record the changes of this many past hours",
                "--output FILE",
                "JSON; gzip",
            ],
        ),
        (
            ("show",),
            [
                "[CONFIG]",
                "default: configs/laptop.yaml",
                "--set KEY=VALUE",
                "override one key; repeatable",
            ],
        ),
    ],
)
def test_commands_explain_their_arguments(
    command: tuple[str, ...], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*command, "--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "record live spot prices, or show those" in command_parser().format_help()
    assert [text for text in texts if text not in said] == []


@pytest.mark.parametrize(
    "arguments",
    [[], ["record"], ["record", "--output", "x", "--regions"], ["show", "a.yaml", "b.yaml"]],
)
def test_commands_that_lack_something_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*arguments)
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hours", "fits"),
    [("0", True), ("2160", True), ("2160.5", False), ("-0.5", False), ("nan", False)],
)
def test_recorded_hours_are_those_that_ec2_keeps(
    hours: str, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("record", "--output", "x.json", f"--hours={hours}")
    if fits:
        assert parsed(*command).hours == float(hours)
        return
    with pytest.raises(SystemExit):
        parsed(*command)
    assert f"{hours}: EC2 keeps the changes of 90 days, 0 to 2160 h" in capsys.readouterr().err


def test_recording_writes_each_regions_prices_and_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = record_joins(monkeypatch)
    monkeypatch.setattr("time.time", lambda: NOW)
    refused = FakeEc2(
        "us-west-2",
        describe_availability_zones=[refusal("describe_availability_zones")],
        describe_spot_price_history=history(entry("2", NOW - HOUR, zone="us-west-2a")),
    )
    clients = {
        "us-east-1": ec2(entry("0.4"), entry("0.5", NOW - 9.0), entry("3", zone="us-east-1b")),
        "us-west-2": refused,
    }
    output = tmp_path / "prices.json"
    regions = ["us-east-1", "us-west-2"]
    arguments = argparse.Namespace(
        regions=regions, instance_types=["g5.xlarge"], hours=2.0, output=output
    )
    assert record_prices(arguments, client=clients.__getitem__) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "us-east-1: 3 records, 2 of 2 zones"
    assert said[1].startswith(
        "us-west-2: 1 records, 1 of 0 zones; zones by name only, because ec2:DescribeAvail"
    )
    assert said[2:] == [f"{output}: use it with --set cost.prices={output}"]
    recording = read_recording(output)
    assert len(recording.records) == 4 and recording.recorded_at == NOW
    ids = {zone["ZoneName"]: zone["ZoneId"] for zone in ZONES["AvailabilityZones"]}
    assert recording.zone_ids == {"us-east-1": ids, "us-west-2": {}}
    request = clients["us-east-1"].requests[1][1]
    assert request["StartTime"] == datetime.fromtimestamp(NOW - 2 * HOUR, UTC)
    assert request["Filters"][0]["Values"] == ["g5.xlarge"]
    assert limits and all(280.0 < limit <= 300.0 for limit in limits), (
        "a history of some weeks has many pages"
    )


def test_recording_no_prices_is_an_error_with_a_reason(tmp_path: Path) -> None:
    arguments = argparse.Namespace(
        regions=["us-east-1"], instance_types=["z9"], hours=0.0, output=tmp_path / "x.json"
    )
    with pytest.raises(PriceError, match="no instance type of the catalogue begins with z9"):
        record_prices(arguments)
    arguments.instance_types = ["g5.xlarge"]
    arguments.regions = ["us-east-1", "us-west-2"]
    clients = {"us-east-1": ec2(entry("0.4")), "us-west-2": denied("us-west-2")}
    with pytest.raises(
        PriceError,
        match="nothing was written, because ec2:DescribeSpotPriceHistory in us-west-2: denied",
    ):
        record_prices(arguments, client=clients.__getitem__)
    assert not arguments.output.exists()
    arguments.regions = ["us-east-1"]
    arguments.output = tmp_path / "missing" / "x.json"
    with pytest.raises(PriceError, match=r"x\.json: cannot be written: No such file"):
        record_prices(arguments, client=lambda region: ec2(entry("0.4")))


def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], *settings: str) -> list[str]:
    types = "cluster.instance_types=[g5.xlarge,g6.xlarge,p5.48xlarge]"
    chosen = [
        "cluster.plan_for=kubernetes",
        types,
        f"cost.prices={tmp_path}/prices.json",
        *settings,
    ]
    (tmp_path / "config.yaml").write_text("cost:\n  max_price_age_hours: 1.25\n")
    arguments = argparse.Namespace(config=tmp_path / "config.yaml", set=chosen)
    assert show_prices(arguments, tmp_path) == 0
    return capsys.readouterr().out.splitlines()


def test_quotes_are_shown_cheapest_first_with_their_place_and_age(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    with_id = entry("0.5", NOW - 2 * HOUR, AvailabilityZoneId="use1-az4")
    named = entry("0.4", NOW - 5 * HOUR, zone="us-east-1b", kind="g6.xlarge")
    same = entry("0.4", NOW - 5 * HOUR, zone="us-east-1b")
    write_prices(tmp_path / "prices.json", with_id, named, same)
    quotes = shown(tmp_path, capsys)[:6]
    place = "g5.xlarge         spot      us-east-1b                      $0.4/h   2.0h"
    assert quotes[0] == f"{place}  recorded 2026-09-21 12:13 UTC, 2.0 h old: stale"
    assert [line.split()[:4] for line in quotes] == [
        ["g5.xlarge", "spot", "us-east-1b", "$0.4/h"],
        ["g6.xlarge", "spot", "us-east-1b", "$0.4/h"],
        ["g5.xlarge", "spot", "use1-az4", "(us-east-1a)"],
        ["g6.xlarge", "on-demand", "us-east-1", "$0.8048/h"],
        ["g5.xlarge", "on-demand", "us-east-1", "$1.006/h"],
        ["p5.48xlarge", "on-demand", "us-east-1", "$55.04/h"],
    ]
    count, source, *_ = shown(tmp_path, capsys)[6:]
    assert count == "6 quotes; 1 of 3 instance types have no spot price"
    assert source.startswith(
        "spot prices: recorded in prices.json (us-east-1 2026-09-21 12:13 UTC, 2.0 h old): stale"
    )


def test_only_quotes_of_the_configured_zones_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    east = entry("0.5", NOW - HOUR, AvailabilityZoneId="use1-az4")
    other = entry("0.6", NOW - HOUR, zone="us-east-1b", AvailabilityZoneId="use1-az6")
    west = entry("0.7", NOW - HOUR, zone="us-west-2a", AvailabilityZoneId="usw2-az1")
    write_prices(tmp_path / "prices.json", east, other, west)
    both = "cost.regions=[us-east-1,us-west-2]"
    one_type = "cluster.instance_types=[g5.xlarge]"
    lines = shown(tmp_path, capsys, both, one_type, "cost.zones=[use1-az6]")
    assert [line.split()[1:3] for line in lines[:2]] == [
        ["spot", "use1-az6"],
        ["on-demand", "us-east-1"],
    ]
    assert lines[2] == "2 quotes; 0 of 1 instance types have no spot price"
    lines = shown(tmp_path, capsys, both, one_type)
    assert [line.split()[2] for line in lines[:4]] == [
        "use1-az4",
        "use1-az6",
        "usw2-az1",
        "us-east-1",
    ]
    lines = shown(tmp_path, capsys, both, one_type, "cost.zones=[usw2-az1]")
    assert [line.split()[1:3] for line in lines[:1]] == [["spot", "usw2-az1"]], (
        "no zone of the first region"
    )
    write_prices(
        tmp_path / "prices.json",
        east,
        west,
        entry("0.6", NOW - HOUR, zone="us-west-2a", kind="g6.xlarge"),
    )
    partly = shown(tmp_path, capsys, both)
    assert "6 quotes; 1 of 3 instance types have no spot price" in partly, (
        "one region with a price is enough"
    )
    static = shown(tmp_path, capsys, one_type, "cost.prices=static", "cost.zones=[use1-az6]")
    assert [line.split()[1:3] for line in static[:2]] == [
        ["spot", "us-east-1"],
        ["on-demand", "us-east-1"],
    ]


def test_quotes_of_the_default_configuration_are_shown_without_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = argparse.Namespace(
        config=None, set=["cluster.instance_types=[g5.xlarge]", "cost.prices=static"]
    )
    assert show_prices(arguments, ROOT) == 0
    assert "2 quotes; 0 of 1 instance types have no spot price" in capsys.readouterr().out
