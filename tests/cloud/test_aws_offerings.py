"""A new stack takes what its region offers: families, the zone of gangs, room for queues."""

from __future__ import annotations

import json
from typing import Any

import boto3
import pytest
from moto import mock_aws

from ebbflow.core.errors import CloudError, CloudRefused
from ebbflow.infra.aws import offerings
from ebbflow.infra.aws.deploy import TEMPLATE, Stack, Template, condense_template, read_template
from ebbflow.infra.aws.offerings import choose_families, keep_families, refuse_too_many_queues

ZONES = ["x-1a", "x-1b", "x-1c"]
EVERYWHERE = set(ZONES)
# As DescribeInstanceTypeOfferings answers by zone: one family in a Local Zone alone, which has no
# subnet of the stack, one not where the others are
OFFERED = {
    "g4dn": EVERYWHERE,
    "g5": {"x-1-lax-1a", "x-1b", "x-1c"},
    "g6": EVERYWHERE,
    "g6e": {"x-1c"},
    "p4d": {"x-1b"},
    "p5": {"x-1-lax-1a"},
}


@pytest.fixture
def template() -> Template:
    return read_template(TEMPLATE.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def region(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(families: list[str], _region: str) -> dict[str, set[str]]:
        return {family: OFFERED[family] for family in families}

    monkeypatch.setattr(offerings, "_ask_offerings", ask)
    monkeypatch.setattr(offerings, "_ask_zones", lambda _region: ZONES)


def test_what_a_region_does_not_offer_is_left_out_with_a_line(template: Template) -> None:
    said: list[str] = []
    chosen = choose_families(template, {}, None, "x-1", said.append)
    assert chosen == {
        "Families": "g4dn,g5,g6,g6e,p4d",
        "GangFamilies": "g5,p4d",
        "GangZone": "x-1b",
    }
    assert said == [
        "x-1 offers no p5: its queues are left out",
        "x-1b offers no g6e: its queue for several nodes is left out",
        "jobs of several nodes go to x-1b, which offers g5, p4d",
    ]
    kept = keep_families(template, chosen["Families"].split(","), chosen["GangFamilies"].split(","))
    queues = {
        name
        for name, resource in kept["Resources"].items()
        if resource["Type"] == "AWS::Batch::JobQueue"
    }
    assert "SpotG6eQueue" in queues and "GangG5Queue" in queues
    assert not queues & {"SpotP5Queue", "OnDemandP5Queue", "GangP5Queue", "GangG6eQueue"}
    sent = json.dumps(read_template(condense_template(kept)))
    for name in set(template["Resources"]) - set(kept["Resources"]):
        assert f'"{name}"' not in sent, "nothing refers to it"


def test_parameters_that_are_given_or_kept_hold(template: Template) -> None:
    said: list[str] = []
    known = {"Families": "g5", "GangFamilies": "g5", "GangZone": "x-1c"}
    assert choose_families(template, {"Nat": "no"}, known, "x-1", said.append) == {"Nat": "no"}
    given = {"Families": "g5,g6e", "GangZone": "x-1c"}
    chosen = choose_families(template, given, None, "x-1", said.append)
    assert chosen == {**given, "GangFamilies": "g5,g6e"}
    assert said == ["jobs of several nodes go to x-1c, which offers g5, g6e"]


def test_an_existing_stack_keeps_the_zone_of_its_subnets(template: Template) -> None:
    said: list[str] = []
    chosen = choose_families(template, {}, {"Nat": "yes", "GangZone": ""}, "x-1", said.append)
    assert chosen == {"Families": "g4dn,g5,g6,g6e,p4d", "GangFamilies": ""}
    assert "x-1a offers no g5: its queue for several nodes is left out" in said
    assert not [line for line in said if "jobs of several nodes" in line]


def test_an_existing_stack_keeps_its_families_for_several_nodes(template: Template) -> None:
    known = {"Families": "g5,g6e", "GangFamilies": "g5", "GangZone": "x-1c"}
    said: list[str] = []
    chosen = choose_families(template, {"Families": "g5,g6,g6e"}, known, "x-1", said.append)
    assert chosen == {"Families": "g5,g6,g6e", "GangFamilies": "g5", "GangZone": "x-1c"}
    assert said == ["jobs of several nodes go to x-1c, which offers g5"]


def test_a_family_that_is_added_to_a_stack_gets_its_queue_for_several_nodes(
    template: Template,
) -> None:
    known = {"Families": "g5,g6", "GangFamilies": "", "GangZone": "x-1c"}
    said: list[str] = []
    grown = {"Families": "g5,g6,g6e,p4d"}
    chosen = choose_families(template, grown, known, "x-1", said.append)
    assert chosen["GangFamilies"] == "g6e", "g5 had none before; x-1c, the stack's zone, has no p4d"
    assert said == [
        "x-1c offers no p4d: its queue for several nodes is left out",
        "jobs of several nodes go to x-1c, which offers g6e",
    ]
    given = {**grown, "GangFamilies": ""}
    assert choose_families(template, given, known, "x-1", said.append)["GangFamilies"] == ""


def test_without_families_for_several_nodes_no_line_names_their_zone(template: Template) -> None:
    said: list[str] = []
    chosen = choose_families(template, {"Families": "g4dn"}, None, "x-1", said.append)
    assert chosen == {"Families": "g4dn", "GangFamilies": "", "GangZone": ""}
    assert said == []


@pytest.mark.parametrize(
    ("given", "zones", "message"),
    [
        ({"Families": "g5,p5"}, ZONES, "--parameter Families=g5,p5: x-1 offers no p5"),
        ({}, ZONES[:2], "x-1 has 2 availability zones and the stack needs 3; fix: --region"),
    ],
)
def test_a_region_that_cannot_have_the_stack_is_one_line(
    template: Template,
    given: dict[str, str],
    zones: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offerings, "_ask_zones", lambda _region: zones)
    with pytest.raises(CloudRefused, match=message):
        choose_families(template, given, None, "x-1", print)


def test_without_an_answer_all_families_stay(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise CloudError("denied")

    monkeypatch.setattr(offerings, "_ask_offerings", fail)
    said: list[str] = []
    assert choose_families(template, {}, None, "x-1", said.append) == {}
    assert "is unknown; --parameter Families=g4dn asks for fewer: denied" in said[0]


@mock_aws
def test_an_account_without_room_for_the_queues_says_so_beforehand(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    batch = boto3.client("batch", "us-east-1")
    role = boto3.client("iam").create_role(RoleName="r", AssumeRolePolicyDocument="{}")["Role"]
    batch.create_compute_environment(
        computeEnvironmentName="environment", type="UNMANAGED", serviceRole=role["Arn"]
    )
    for number in range(34):
        batch.create_job_queue(
            jobQueueName=f"queue-{number}",
            state="ENABLED",
            priority=1,
            computeEnvironmentOrder=[{"order": 1, "computeEnvironment": "environment"}],
        )
    with pytest.raises(
        CloudRefused,
        match=r"34 job queues in us-east-1, this stack adds 17, and AWS Batch allows 50",
    ):
        refuse_too_many_queues(template, "us-east-1", print)
    refuse_too_many_queues(keep_families(template, ["g5"], ["g5"]), "us-east-1", print)


@mock_aws
def test_a_template_too_large_for_a_request_goes_to_a_bucket_or_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    body = "#" * 51_201
    client = boto3.client("cloudformation", "us-east-1")
    with pytest.raises(CloudRefused, match=r"has 51,201 bytes, and a request takes 51,200; fix"):
        Stack(client, "s", print).template_request(body)
    boto3.client("s3", "us-east-1").create_bucket(Bucket="mine")
    [url] = Stack(client, "s", print, template_bucket="mine").template_request(body).values()
    key = url.partition("mine.s3.us-east-1.amazonaws.com/")[2]
    stored = boto3.client("s3", "us-east-1").get_object(Bucket="mine", Key=key)["Body"].read()
    assert stored.decode() == body
