"""The tables renewed from what AWS answers: recorded answers, from botocore's own stubs, which
check the questions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import boto3
import pytest
from botocore.stub import ANY, Stubber

from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.catalogue_refresh import advisor_bands, parse_hardware, refresh_catalogue, reread
from ebbflow.cost.errors import PriceError
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.prices.quote import StaticPrices

REGIONS = ["us-east-1", "us-west-2"]

ADVISOR = json.dumps(
    {
        "spot_advisor": {
            "us-west-2": {"Linux": {"g5.xlarge": {"s": 55, "r": 1}, "m5.large": {"s": 70, "r": 0}}}
        }
    }
).encode()


class Aws:
    """Clients that answer what was recorded, one page after the other, and refuse a question of
    another shape.
    """

    def __init__(self, prices: dict[str, list[list[str]]], types: dict[str, list[dict]]) -> None:
        self.prices = prices
        self.types = types
        self.stubs: list[Stubber] = []

    def __call__(self, service: str, region: str):
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        client = boto3.client(service, region_name=region, **keys)
        stub = Stubber(client)
        if service == "ec2":
            stub.add_response("describe_instance_types", {"InstanceTypes": self.types[region]}, {})
        else:
            for pages in self.prices.values():
                for number, page in enumerate(pages):
                    more = number + 1 < len(pages)
                    asked = {"ServiceCode": "AmazonEC2", "Filters": ANY} | (
                        {"NextToken": "more"} if number else {}
                    )
                    answer = {"PriceList": page, "FormatVersion": "aws_v1"} | (
                        {"NextToken": "more"} if more else {}
                    )
                    stub.add_response("get_products", answer, asked)
        stub.activate()
        self.stubs.append(stub)
        return client


def product(name: str, usd: str, unit: str = "Hrs") -> str:
    """As the price list answers: JSON in a string, the price below two keys of its own."""
    dimension = {
        "unit": unit,
        "pricePerUnit": {"USD": usd},
        "description": f"${usd} per On Demand Linux {name}",
    }
    terms = {
        "OnDemand": {
            "SKU.JRTCKXETXF": {"priceDimensions": {"SKU.JRTCKXETXF.6YS6EN2CT7": dimension}}
        }
    }
    return json.dumps(
        {
            "product": {"attributes": {"instanceType": name}},
            "terms": terms,
            "serviceCode": "AmazonEC2",
        }
    )


ANSWERS = {
    "us-east-1": [
        [product("g5.xlarge", "1.1000000000")],
        [product("p5.48xlarge", "0.0000000000", "Quantity")],
    ],
    "us-west-2": [[product("g5.xlarge", "1.0060000000"), product("x9.huge", "9.0000000000")]],
}


def described(
    name: str, gpu: str, *, count: int = 1, baseline: float | None = 10.0, efa: int = 0
) -> dict:
    card = {"NetworkCardIndex": 0} | (
        {} if baseline is None else {"BaselineBandwidthInGbps": baseline}
    )
    if efa:
        has_efa = {"EfaInfo": {"MaximumEfaInterfaces": efa}}
    else:
        has_efa = {}
    return {
        "InstanceType": name,
        "VCpuInfo": {"DefaultVCpus": 4},
        "MemoryInfo": {"SizeInMiB": 16384},
        "NetworkInfo": {"EfaSupported": efa > 0, "NetworkCards": [card]} | has_efa,
        "GpuInfo": {
            "Gpus": [
                {
                    "Name": gpu,
                    "Manufacturer": "NVIDIA",
                    "Count": count,
                    "MemoryInfo": {"SizeInMiB": 24576},
                }
            ]
        },
    }


TYPES = {
    "us-east-1": [
        described("g5.xlarge", "A10G"),
        described("g9.xlarge", "L4"),
        described("g9.2xlarge", "Z100"),
    ],
    "us-west-2": [
        described("g9.4xlarge", "L4", baseline=None),
        described("p9.xlarge", "H100", count=8, efa=32),
    ],
}


def refresh(tmp_path: Path, aws: Aws, *, advisor: bytes = b"", bands: bool = True) -> Path:
    arguments = argparse.Namespace(regions=REGIONS, output=tmp_path, no_advisor=not bands)
    assert refresh_catalogue(arguments, client=aws, read_advisor=lambda: advisor) == 0
    for stub in aws.stubs:
        stub.assert_no_pending_responses()
    return tmp_path


def test_prices_of_more_regions_are_taken_in_and_old_ones_keep_their_day(tmp_path: Path, capsys):
    folder = refresh(tmp_path, Aws(ANSWERS, TYPES), advisor=ADVISOR)
    before = load_catalogue()
    after = reread(folder)
    g5 = after["g5.xlarge"]
    assert {region: str(price.usd_per_hour) for region, price in g5.on_demand.items()} == {
        "us-east-1": "1.1",
        "us-west-2": "1.006",
    }
    assert g5.on_demand["us-west-2"].recorded > before["g5.xlarge"].on_demand["us-east-1"].recorded
    assert after["p5.48xlarge"].on_demand == before["p5.48xlarge"].on_demand, (
        "no longer listed by the hour"
    )
    assert StaticPrices().on_demand(g5, "us-west-2").describe(2e9, 24).startswith("recorded 20")
    (spot,) = StaticPrices().spot(g5, "us-west-2")
    assert str(spot.usd_per_hour) == "0.4527", "1.006 less 55 %"
    assert g5.interruption_band("us-west-2") == 1 and g5.interruption_band("us-east-1") is None
    said = capsys.readouterr().out
    assert "g5.xlarge in us-east-1: $1.006 of 2026-07-20 is now $1.1" in said
    assert "p5.48xlarge in us-east-1: no longer listed" in said


def test_a_region_without_prices_is_rejected_until_a_refresh(tmp_path: Path):
    cost = {"regions": ["us-west-2"], "deadline_hours": None}
    wanted = {"cluster": {"instance_types": ["g5.xlarge"], "plan_for": "kubernetes"}, "cost": cost}
    config = RunConfig.model_validate(wanted)
    before = make_plan(config, now_utc=1_790_000_000.0)
    assert before.refusal.outcome == "no_capacity" and not before.ranked
    assert {rejection.kind for rejection in before.rejected} == {
        "no spot price",
        "no on-demand price",
    }
    assert all("us-west-2" in rejection.reason for rejection in before.rejected)
    brings = "ebbflow catalogue refresh --regions us-west-2"
    assert brings in before.refusal.hint and any(brings in line for line in before.prices)
    folder = refresh(tmp_path, Aws(ANSWERS, TYPES), advisor=ADVISOR)
    after = make_plan(config, now_utc=1_790_000_000.0, catalogue=reread(folder))
    assert {
        (candidate.market, f"{candidate.price.usd_per_hour:f}") for candidate in after.ranked
    } == {
        ("spot", "0.4527"),
        ("on_demand", "1.006"),
    }
    assert after.refusal is None and after.on_demand == {"g5.xlarge": "1.006"}


def test_new_types_are_added_and_what_is_not_known_is_left_out_by_name(tmp_path: Path, capsys):
    after = reread(refresh(tmp_path, Aws(ANSWERS, TYPES), bands=False))
    assert (after["g9.xlarge"].gpu.name, after["p9.xlarge"].gpu_count) == ("L4", 8)
    assert len(after.types) == len(load_catalogue().types) + 2
    said = capsys.readouterr().out
    assert "g9.2xlarge: left out, because gpus.csv has no Z100" in said
    assert "g9.4xlarge: left out, because EC2 states no baseline of its network" in said
    assert "g5.xlarge: network_gbps is 2.5 here, 10.0 by EC2; the table's stays" in said
    assert after["g5.xlarge"].advice == load_catalogue()["g5.xlarge"].advice


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (
            {"us-east-1": [[product("g5.xlarge", "1.0"), product("g5.xlarge", "2.0")]]},
            "costs 1.0 and 2.0",
        ),
        ({**ANSWERS, "us-west-2": [[]]}, "the price list has no GPU instance in us-west-2"),
    ],
)
def test_nothing_is_written_when_an_answer_cannot_be_right(
    answers: dict, reason: str, tmp_path: Path
):
    arguments = argparse.Namespace(regions=REGIONS, output=tmp_path / "new", no_advisor=True)
    with pytest.raises(PriceError, match=reason):
        refresh_catalogue(arguments, client=Aws(answers, TYPES))
    assert not (tmp_path / "new").exists()


def test_a_refresh_without_permission_names_the_missing_action(tmp_path: Path):
    def denied(service: str, region: str):
        client = boto3.client(
            service, region_name=region, aws_access_key_id="test", aws_secret_access_key="test"
        )
        stub = Stubber(client)
        stub.add_client_error("get_products", "AccessDeniedException", "no")
        stub.activate()
        return client

    arguments = argparse.Namespace(regions=REGIONS, output=tmp_path / "new", no_advisor=True)
    with pytest.raises(PriceError, match=r"nothing was written, .* allow pricing:GetProducts for"):
        refresh_catalogue(arguments, client=denied)


def test_an_advisor_that_is_no_advisor_is_refused():
    with pytest.raises(PriceError, match="not the spot advisor's table"):
        advisor_bands(lambda: b"<html>")


@pytest.mark.parametrize(
    ("cards", "words", "gbps"),
    [
        ([400.0] * 4, "400 Gigabit", 400.0),  # g6e.48xlarge: four cards share one limit
        ([100.0] * 32, "3200 Gigabit", 3200.0),
        ([10.0], "Up to 25 Gigabit", 10.0),
        ([100.0] * 4, "4x 100 Gigabit", 400.0),  # p4d.24xlarge
        ([100.0, 100.0], None, 200.0),
        ([100.0, None], "200 Gigabit", None),
    ],
)
def test_cards_that_share_a_limit_are_not_added_up(
    cards: list[float | None], words: str | None, gbps: float | None
) -> None:
    entry = described("g6e.48xlarge", "L40S", count=8)
    entry["NetworkInfo"] = {
        "NetworkPerformance": words,
        "NetworkCards": [
            {} if baseline is None else {"BaselineBandwidthInGbps": baseline} for baseline in cards
        ],
    }
    hardware = parse_hardware(entry)
    assert hardware is not None and hardware.network_gbps == gbps
