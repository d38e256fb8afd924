"""Live prices against botocore's Stubber: what is asked, what the answers come to, and what stands
in for none.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import NoCredentialsError
from botocore.stub import Stubber

from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.catalogue import Catalogue, load_catalogue
from ebbflow.cost.errors import PriceError
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.plan.plan_text import render_plan
from ebbflow.cost.prices.ec2_prices import LivePrices, PriceAnswers, query_spot_prices
from ebbflow.cost.prices.recorded import RecordedPrices
from ebbflow.cost.prices.source import open_prices, record_prices
from ebbflow.infra.aws.calls import RequestDeadline

NOW = 1_790_000_000.0
TYPES = ["g5.xlarge", "g6.xlarge"]
ZONES = {"us-east-1a": "use1-az4", "us-east-1b": "use1-az6"}


class Region:
    """One region's stubbed client. Every request is compared with what must be asked."""

    def __init__(self, name: str = "us-east-1", zones: dict[str, str] | None = None) -> None:
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        self.name = name
        self.client = session().client("ec2", region_name=name, **keys)
        self.stub = Stubber(self.client)
        self.stub.activate()
        if zones is not None:
            filters = {"zone-type": "availability-zone", "region-name": name}
            listed = [{"ZoneName": zone, "ZoneId": zone_id} for zone, zone_id in zones.items()]
            asked = {
                "Filters": [{"Name": key, "Values": [value]} for key, value in filters.items()]
            }
            self.stub.add_response(
                "describe_availability_zones", {"AvailabilityZones": listed}, asked
            )

    def page(
        self, records: list[dict[str, Any]], token: str | None = None, following: str = ""
    ) -> None:
        asked = {
            "Filters": [{"Name": "instance-type", "Values": TYPES}],
            "ProductDescriptions": ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
            "StartTime": datetime.fromtimestamp(NOW, UTC),
            "MaxResults": 1000,
            **({"NextToken": token} if token else {}),
        }
        self.stub.add_response(
            "describe_spot_price_history",
            {"SpotPriceHistory": records, "NextToken": following},
            asked,
        )

    def refuse(
        self, code: str, times: int = 1, operation: str = "describe_spot_price_history"
    ) -> None:
        if code in ("RequestLimitExceeded", "InternalError"):
            status = 503
        else:
            status = 400
        for _ in range(times):
            self.stub.add_client_error(operation, code, f"{code}: no.", http_status_code=status)


class Clock:
    """Time that only sleeping makes pass."""

    def __init__(self) -> None:
        self.time = 0.0
        self.pauses = []

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds


@cache
def session() -> boto3.session.Session:
    """One for all tests: it keeps EC2's large description, which takes most of a second to read."""
    return boto3.session.Session()


def record(
    zone: str, price: str, hours_ago: float, kind: str = "g5.xlarge", **more: str
) -> dict[str, Any]:
    at = datetime.fromtimestamp(NOW, UTC) - timedelta(hours=hours_ago)
    product = {"ProductDescription": "Linux/UNIX"}
    return {
        "AvailabilityZone": zone,
        "InstanceType": kind,
        "SpotPrice": price,
        "Timestamp": at,
        **product,
        **more,
    }


def asked(*regions: Region, clock: Clock | None = None, **options: Any) -> PriceAnswers:
    clients = {region.name: region.client for region in regions}
    clock = clock or Clock()
    until = clock.time + options.get("deadline_seconds", 30.0)
    deadline = RequestDeadline(until, clock.monotonic, clock.sleep)
    return query_spot_prices(
        list(clients), TYPES, now_utc=NOW, client=clients.__getitem__, deadline=deadline, **options
    )


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def test_pages_are_followed_and_the_last_change_before_the_window_holds(catalogue: Catalogue):
    region = Region(zones=ZONES)
    region.page(
        [record("us-east-1a", "0.431700", 3.0), record("us-east-1b", "0.500100", 900.0)],
        following="page 2",
    )
    region.page([record("us-east-1a", "0.418200", 0.5)], token="page 2", following="page 3")
    region.page([record("us-east-1a", "0.402400", 30.0, "g6.xlarge")], token="page 3")
    prices = LivePrices.of(asked(region))
    region.stub.assert_no_pending_responses()
    first, second = prices.spot(catalogue["g5.xlarge"], "us-east-1")
    assert (first.zone, first.zone_name, first.usd_per_hour) == (
        "use1-az4",
        "us-east-1a",
        Decimal("0.418200"),
    )
    assert str(second.usd_per_hour) == "0.500100", "the decimals stay as they were sent"
    assert second.at == NOW - 900 * 3600 and second.age_hours(NOW) == 0, (
        "an old change is no old price"
    )
    assert (
        second.describe(NOW, 24.0)
        == "live 2026-09-21 14:13 UTC, unchanged since 2026-08-15 02:13 UTC"
    )
    assert prices.zones("us-east-1") == ("use1-az4", "use1-az6")
    on_demand = prices.on_demand(catalogue["g5.xlarge"], "us-east-1")
    assert (on_demand.kind, on_demand.usd_per_hour) == ("recorded", Decimal("1.006"))


def test_a_request_that_was_throttled_is_made_again_after_growing_pauses(catalogue: Catalogue):
    region = Region(zones=ZONES)
    clock = Clock()
    region.refuse("RequestLimitExceeded", times=2)
    region.refuse("InternalError")
    region.page([record("us-east-1a", "0.4", 1.0)])
    answers = asked(region, clock=clock)
    assert not answers.failed and len(answers.answered["us-east-1"].records) == 1
    assert len(clock.pauses) == 3
    limits = (0.3, 0.6, 1.2)
    assert all(0.15 <= pause <= limit for pause, limit in zip(clock.pauses, limits, strict=True)), (
        "limits grow"
    )


def configuration(**cost: Any) -> RunConfig:
    cluster = {"nodes": 1, "plan_for": "kubernetes", "instance_types": TYPES}
    return RunConfig.model_validate({"cluster": cluster, "cost": {"prices": "live", **cost}})


def test_permanent_throttling_falls_back_to_the_price_table_with_a_note():
    region = Region()
    region.refuse("RequestLimitExceeded", times=99, operation="describe_availability_zones")
    clock = Clock()
    answers = asked(region, clock=clock)
    assert "throttled" in answers.failed["us-east-1"] and clock.time < 30
    prices = LivePrices.of(answers)
    plan = make_plan(configuration(), now_utc=NOW, prices=prices)
    assert plan.chosen.price.kind.startswith("estimated from on-demand recorded 2026-07-20")
    asked_again = (
        "because ec2:DescribeAvailabilityZones in us-east-1: throttled (RequestLimitExceeded) ("
    )
    assert asked_again in plan.prices[0]
    assert "2 months old" in plan.prices[0]

    impatient = Clock()
    region.refuse("RequestLimitExceeded", times=99, operation="describe_availability_zones")
    answers = asked(region, clock=impatient, deadline_seconds=1.0)
    assert answers.failed and impatient.time <= 1.0, "no pause beyond the deadline"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "UnauthorizedOperation",
            "denied (UnauthorizedOperation); fix: allow ec2:DescribeSpotPriceHistory for",
        ),
        ("AuthFailure", "the credentials are not accepted (AuthFailure); fix: renew them"),
        (
            "InvalidParameterValue",
            "ec2:DescribeSpotPriceHistory in us-east-1: refused: InvalidParameterValue",
        ),
    ],
)
def test_a_refusal_is_not_repeated_and_names_what_is_missing(code: str, words: str):
    region = Region(zones=ZONES)
    clock = Clock()
    region.refuse(code)
    answers = asked(region, clock=clock)
    assert words in answers.failed["us-east-1"] and not clock.pauses


def test_without_the_right_to_see_zones_their_names_must_do(catalogue: Catalogue):
    region = Region()
    region.refuse("UnauthorizedOperation", operation="describe_availability_zones")
    region.page([record("us-east-1a", "0.4", 1.0)])
    prices = LivePrices.of(asked(region))
    (quote,) = prices.spot(catalogue["g5.xlarge"], "us-east-1")
    assert quote.zone == "us-east-1a"
    said = " ".join(prices.describe(now_utc=NOW, regions=["us-east-1"], max_age_hours=24.0))
    assert (
        "zones of us-east-1: by this account's names, because" in said
        and "DescribeAvailabilityZones" in said
    )
    plan = make_plan(configuration(zones=["use1-az4"]), now_utc=NOW, prices=prices)
    reasons = {r.instance_type: r.reason for r in plan.rejected if r.kind == "no spot price"}
    said = (
        "no spot price of g5.xlarge in use1-az4 now by EC2: zones are known by name only, "
        "because ec2:Describe"
    )
    assert reasons["g5.xlarge"].startswith(said) and reasons["g5.xlarge"].endswith(
        "; leave cost.zones empty"
    )
    assert reasons["g6.xlarge"].endswith("in us-east-1 now by EC2: not offered there as Spot")

    region.refuse("UnauthorizedOperation", operation="describe_availability_zones")
    # Newer answers hold the id
    region.page([record("us-east-1a", "0.4", 1.0, AvailabilityZoneId="use1-az4")])
    prices = LivePrices.of(asked(region))
    assert prices.spot(catalogue["g5.xlarge"], "us-east-1")[0].zone == "use1-az4"
    assert "names" not in " ".join(
        prices.describe(now_utc=NOW, regions=["us-east-1"], max_age_hours=24.0)
    )


def test_an_empty_history_and_a_zone_without_a_price_are_answers():
    east = Region(zones=ZONES)
    west = Region("us-west-2", zones={"us-west-2a": "usw2-az2"})
    east.page([record("us-east-1a", "0.4", 1.0)])
    west.page([])
    config = configuration(regions=["us-east-1", "us-west-2"])
    plan = make_plan(config, now_utc=NOW, prices=LivePrices.of(asked(east, west)))
    assert {(c.market, c.place) for c in plan.ranked} == {
        ("spot", "use1-az4"),
        ("on_demand", "us-east-1"),
    }
    reasons = [rejection.reason for rejection in plan.rejected if rejection.market == "spot"]
    elsewhere = "no price in that zone, but in others of us-east-1"
    assert f"no spot price of g5.xlarge in use1-az6 now by EC2: {elsewhere}" in reasons
    assert (
        "no spot price of g5.xlarge in us-west-2 now by EC2: not offered there as Spot" in reasons
    )
    assert "spot prices: no history at all of these instance types in us-west-2" in plan.prices
    assert plan.chosen.price.kind.startswith("live ") and " l" in render_plan(plan)


def test_one_region_that_fails_takes_the_table_and_the_others_stay_live():
    east = Region(zones=ZONES)
    west = Region("us-west-2", zones={"us-west-2a": "usw2-az2"})
    east.refuse("UnauthorizedOperation")
    west.page([record("us-west-2a", "0.2", 1.0)])
    config = configuration(regions=["us-east-1", "us-west-2"])
    plan = make_plan(config, now_utc=NOW, prices=LivePrices.of(asked(east, west)))
    assert (plan.chosen.place, plan.chosen.price.usd_float) == ("usw2-az2", 0.2)
    kinds = {c.place: c.price.kind.split()[0] for c in plan.ranked if c.market == "spot"}
    assert kinds == {"usw2-az2": "live", "us-east-1": "estimated"}
    assert any(line.startswith("spot prices of us-east-1: static table") for line in plan.prices)


def unreachable(region: str) -> Any:
    """A client without a network."""
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    return session().client("ec2", region_name=region, endpoint_url="http://127.0.0.1:9", **keys)


def without_credentials(region: str) -> Any:
    raise NoCredentialsError


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (without_credentials, "Unable to locate credentials"),
        (unreachable, "ec2:DescribeAvailabilityZones in us-east-1: unreachable: "),
    ],
)
def test_without_credentials_or_network_the_source_is_the_table(
    client: Callable[[str], Any], words: str
):
    prices = open_prices(configuration(), NOW, client=client)
    (line,) = prices.describe(now_utc=NOW, regions=["us-east-1"], max_age_hours=24.0)
    assert line.startswith("spot prices: static table") and words in line and "2 months old" in line


def test_a_region_that_hangs_is_left_behind_at_the_deadline():
    never = threading.Event()
    region = Region(zones=ZONES)
    region.page([record("us-east-1a", "0.4", 1.0)])
    clients = {"us-east-1": lambda: region.client, "eu-west-1": never.wait}
    answers = query_spot_prices(
        list(clients), TYPES, now_utc=NOW, client=lambda name: clients[name](), deadline_seconds=0.5
    )
    never.set()
    assert set(answers.answered) == {"us-east-1"}
    assert answers.failed == {"eu-west-1": "eu-west-1 did not answer within 0.5 s"}


def test_live_prices_can_be_recorded_and_used_by_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    region = Region(zones=ZONES)
    region.stub.add_response(
        "describe_spot_price_history",
        {
            "SpotPriceHistory": [
                record("us-east-1b", "0.500100", 9e4),
                record("us-east-1b", "0.400100", 8e4),
            ]
        },
    )
    output = tmp_path / "prices.json.gz"
    arguments = argparse.Namespace(
        regions=["us-east-1"], instance_types=["g5.xlarge"], hours=24.0, output=output
    )
    assert record_prices(arguments, client=lambda name: region.client) == 0
    said = capsys.readouterr().out
    assert "us-east-1: 2 records, 1 of 2 zones" in said and f"--set cost.prices={output}" in said
    prices = RecordedPrices.read(output, 2e9)
    (quote,) = prices.spot(load_catalogue()["g5.xlarge"], "us-east-1")
    assert (quote.zone, str(quote.usd_per_hour), quote.kind) == ("use1-az6", "0.400100", "recorded")
    assert prices.zones("us-east-1") == ("use1-az4", "use1-az6")

    region.refuse("UnauthorizedOperation", operation="describe_availability_zones")
    region.refuse("UnauthorizedOperation")
    with pytest.raises(
        PriceError,
        match="nothing was written, because ec2:DescribeSpotPriceHistory in us-east-1: denied",
    ):
        record_prices(arguments, client=lambda name: region.client)
