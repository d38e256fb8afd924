"""docs/aws.md: what it says of the template, of commands and of money is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.aws.deploy import TEMPLATE, read_template

ROOT = Path(__file__).resolve().parents[2]
HOURS = 730


@pytest.fixture(scope="module")
def guide() -> str:
    return (ROOT / "docs" / "aws.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    return read_template(TEMPLATE.read_text(encoding="utf-8"))


def section(guide: str, title: str) -> str:
    return guide.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_there_are_eight_commands_and_their_files_exist(guide: str) -> None:
    commands = re.findall(
        r"^ +(\d+)  (\S.*)$", section(guide, "From an empty account to the first run"), re.MULTILINE
    )
    assert [int(number) for number, _ in commands] == list(range(1, 9))
    words = " ".join(command for _, command in commands)
    files = re.findall(r"(?<![\w./])((?:configs|flows|infra)/[\w./-]+)", words)
    assert len(files) >= 2
    for file in files:
        assert (ROOT / file).exists(), file


def test_the_sum_of_what_is_paid_by_the_hour_is_right(guide: str) -> None:
    idle = section(guide, "What it costs when idle")
    rows = []
    for line in idle.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    monthly = {row[0]: row[1] for row in rows[2:]}
    hourly = 0.0
    for name in ("NAT gateway", "its public address"):
        usd, per_hour = re.match(r"\**\$([\d.]+)\** \(\$([\d.]+)/h\)", monthly[name]).groups()
        assert float(usd) == pytest.approx(float(per_hour) * HOURS, abs=0.005)
        hourly += float(usd)
    assert f"saves the ${hourly:.2f} of" in idle
    alarms = float(re.match(r"\$([\d.]+)", monthly["CloudWatch alarms"])[1])
    assert monthly["**sum**"].startswith(f"**${hourly + alarms:.2f}**")


def test_every_kind_of_resource_has_its_line_in_the_table_of_costs(
    guide: str, template: dict[str, Any]
) -> None:
    words = {
        "AWS::EC2::NatGateway": "NAT gateway",
        "AWS::EC2::EIP": "its public address",
        "AWS::S3::Bucket": "S3 bucket",
        "AWS::ECR::Repository": "ECR repository",
        "AWS::CloudWatch::Alarm": "CloudWatch alarms",
        "AWS::Logs::LogGroup": "CloudWatch logs",
        "AWS::EC2::VPC": "VPC",
        "AWS::EC2::Subnet": "subnets",
        "AWS::EC2::VPCEndpoint": "S3 endpoint",
        "AWS::Batch::JobQueue": "queues",
        "AWS::Budgets::Budget": "budget",
        "AWS::Batch::ComputeEnvironment": "compute environments",
        "AWS::EC2::LaunchTemplate": "launch templates",
        "AWS::EC2::PlacementGroup": "placement group",
        "AWS::IAM::Role": "roles",
        "AWS::SNS::Topic": "topic",
        "AWS::Scheduler::Schedule": "schedule",
        "AWS::Events::Rule": "event rule",
    }
    # Parts and properties of those, for which AWS has no price.
    parts = {
        "AWS::Batch::JobDefinition",
        "AWS::EC2::InternetGateway",
        "AWS::EC2::Route",
        "AWS::EC2::RouteTable",
        "AWS::EC2::SecurityGroup",
        "AWS::EC2::SecurityGroupEgress",
        "AWS::EC2::SecurityGroupIngress",
        "AWS::EC2::SubnetRouteTableAssociation",
        "AWS::EC2::VPCGatewayAttachment",
        "AWS::IAM::InstanceProfile",
        "AWS::IAM::ManagedPolicy",
        "AWS::S3::BucketPolicy",
        "AWS::SNS::TopicPolicy",
    }
    kinds = {resource["Type"] for resource in template["Resources"].values()}
    assert kinds == set(words) | parts
    idle = section(guide, "What it costs when idle")
    assert [word for word in words.values() if word not in idle] == []
    [alarms] = re.findall(r"\$([\d.]+) \(two\)", idle)
    assert float(alarms) / 0.10 == sum(
        resource["Type"] == "AWS::CloudWatch::Alarm" for resource in template["Resources"].values()
    )


def test_the_parameters_that_the_guide_names_are_the_templates(
    guide: str, template: dict[str, Any]
) -> None:
    named = set(re.findall(r'--parameter "?(\w+)=', guide)) - {"NAME"}
    assert named and named <= set(template["Parameters"])
    assert not set(re.findall(r"\]\(([\w-]+\.md)", guide)) - {
        path.name for path in (ROOT / "docs").glob("*.md")
    }
