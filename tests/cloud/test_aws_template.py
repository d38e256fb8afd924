"""The stack's template: valid, small enough, as the example configuration and the documentation
say, and no more.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config import load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.layout import TOMBSTONE_TAGS
from ebbflow.cost.catalogue import load_catalogue
from ebbflow.infra.aws.deploy import (
    LARGEST_TEMPLATE,
    TEMPLATE,
    condense_template,
    planned_resources,
    read_template,
)

ROOT = Path(__file__).resolve().parents[2]
# What Batch cancels by itself:
# docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable_time_limit_actions.html
RUNNABLE_REASONS = {
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
}


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    return read_template(TEMPLATE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(
        ROOT / "ebbflow/configs" / "aws.yaml", project_root=ROOT, environment={}
    ).config


def of_type(template: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    return {
        name: resource["Properties"]
        for name, resource in template["Resources"].items()
        if resource["Type"] == kind
    }


def queues(template: dict[str, Any]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The part of a queue's name after the stack's → (queue, compute resources)."""
    found = {}
    for queue in of_type(template, "AWS::Batch::JobQueue").values():
        [order] = queue["ComputeEnvironmentOrder"]
        environment = template["Resources"][order["ComputeEnvironment"]["Ref"]]["Properties"]
        name = queue["JobQueueName"]["Fn::Sub"].removeprefix("${AWS::StackName}-")
        found[name] = queue, environment["ComputeResources"]
    return found


def test_the_template_is_clean_by_cfn_lint_and_fits_into_a_request() -> None:
    from cfnlint.api import ManualArgs, lint  # a second of imports, in one process of tests

    text = TEMPLATE.read_text(encoding="utf-8")
    regions = ["us-east-1", "us-west-2", "eu-west-1"]
    assert [str(match) for match in lint(text, config=ManualArgs(regions=regions))] == []
    assert lint(text.replace("CidrBlock:", "CidrBlok:", 1), config=ManualArgs(regions=regions))
    sent = condense_template(read_template(text))
    assert len(sent.encode()) < LARGEST_TEMPLATE - 2000, "so that the next queue fits"
    whole = read_template(text)
    for part in (*whole["Parameters"].values(), *whole["Outputs"].values()):
        part.pop("Description", None)
    for resource in whole["Resources"].values():
        resource.pop("Metadata", None)
    assert read_template(sent) == whole
    assert [str(match) for match in lint(sent, config=ManualArgs(regions=regions))] == []


def test_every_parameter_has_a_description_and_a_default(template: dict[str, Any]) -> None:
    for name, parameter in template["Parameters"].items():
        assert len(parameter["Description"]) > 20 and "Default" in parameter, name
        assert json.dumps(template["Resources"]).count(name) or json.dumps(
            template["Conditions"]
        ).count(name), name


def test_the_example_configuration_names_the_queues_of_the_template(
    template: dict[str, Any], config: RunConfig
) -> None:
    there = queues(template)
    assert {queue.name for queue in config.batch.queues} == {
        f"ebbflow-{name}" for name in there if name != "light"
    }
    assert config.batch.light_queue == "ebbflow-light"
    for queue in config.batch.queues:
        _, resources = there[queue.name.removeprefix("ebbflow-")]
        assert resources["Type"] == {"spot": "SPOT", "on_demand": "EC2"}[queue.market]
        assert queue.name.endswith(queue.instance_types[0])
        types = json.dumps(resources["InstanceTypes"])
        assert queue.instance_types[0] in re.findall(r'"([a-z0-9]+)"', types), (
            "the family that the name says"
        )
        assert queue.multi_node == ("PlacementGroup" in resources)
    patience = template["Parameters"]["RunnableSeconds"]["Default"]
    assert (
        config.batch.runnable_minutes
        == patience / 60
        == RunConfig(store="runs").batch.runnable_minutes
    )


def test_every_queue_ends_what_cannot_start(template: dict[str, Any]) -> None:
    for name, (queue, _) in queues(template).items():
        actions = queue["JobStateTimeLimitActions"]
        assert {action["Reason"] for action in actions} == RUNNABLE_REASONS, name
        assert {(action["State"], action["Action"]) for action in actions} == {
            ("RUNNABLE", "CANCEL")
        }
        assert all(action["MaxTimeSeconds"] == {"Ref": "RunnableSeconds"} for action in actions)


def test_compute_environments_are_of_one_market_and_cost_nothing_when_idle(
    template: dict[str, Any],
) -> None:
    for name, (_, resources) in queues(template).items():
        spot = name.startswith("spot-")
        assert resources["Type"] == ("SPOT" if spot else "EC2")
        if spot:
            strategy = "SPOT_PRICE_CAPACITY_OPTIMIZED"
        else:
            strategy = "BEST_FIT_PROGRESSIVE"
        assert (resources["AllocationStrategy"], resources["MinvCpus"]) == (strategy, 0)
        assert resources["Tags"]["ebbflow-queue"] == name
        many = name.startswith("gang-")
        assert [subnet["Ref"] for subnet in resources["Subnets"]] == (
            ["Gang"] if many else ["NodesA", "NodesB", "NodesC"]
        )
    assert of_type(template, "AWS::EC2::PlacementGroup")["GangGroup"] == {"Strategy": "cluster"}


def test_with_efa_only_types_with_all_adapters_of_their_launch_template_are_taken(
    template: dict[str, Any],
) -> None:
    types = load_catalogue().types
    adapters = {}
    for name, (_, resources) in queues(template).items():
        if not name.startswith("gang-"):
            continue
        family = name.removeprefix("gang-")
        taken = resources["InstanceTypes"]
        launch = resources["LaunchTemplate"]
        own = [
            kind
            for kind in types
            if kind.name.split(".")[0] == family and not kind.name.endswith(".metal")
        ]
        if taken == [family]:
            taken = {"Fn::If": ["HasEfa", [kind.name for kind in own], [family]]}
        if "Fn::If" in launch:
            launch = launch["Fn::If"][1]
        interfaces = template["Resources"][launch["LaunchTemplateId"]["Ref"]]["Properties"][
            "LaunchTemplateData"
        ]
        cards = [interface["NetworkCardIndex"] for interface in interfaces["NetworkInterfaces"]]
        adapters[family] = len(cards)
        assert taken["Fn::If"] == ["HasEfa", taken["Fn::If"][1], [family]]
        assert set(taken["Fn::If"][1]) == {kind.name for kind in own if kind.efa == len(cards)}, (
            "see cost/instances.csv"
        )
        assert cards == list(range(len(cards))), "one on each card"
        for interface in interfaces["NetworkInterfaces"]:
            first = interface["NetworkCardIndex"] == 0
            assert interface["DeviceIndex"] == (0 if first else 1) and interface["Groups"] == [
                {"Ref": "Nodes"}
            ]
            assert (
                interface["InterfaceType"] in ("efa", {"Fn::If": ["HasEfa", "efa", "interface"]})
                if first
                else "efa-only"
            )
            assert interface["DeleteOnTermination"] is True
    assert adapters == {"g5": 1, "g6e": 1, "p4d": 4, "p5": 32}


def test_nodes_allow_only_imdsv2_with_one_hop(template: dict[str, Any]) -> None:
    templates = of_type(template, "AWS::EC2::LaunchTemplate")
    assert len(templates) == 4
    for launch in templates.values():
        data = launch["LaunchTemplateData"]
        assert data["MetadataOptions"] == {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            # Jobs run in the host's network, or have an interface each
            "HttpPutResponseHopLimit": 1,
        }
        [disk] = data["BlockDeviceMappings"]
        assert disk["Ebs"]["Encrypted"] is True and disk["Ebs"]["DeleteOnTermination"] is True
        assert data["UserData"] == {"Fn::Base64": {"Fn::FindInMap": ["Node", "UserData", "Text"]}}
    assert "memlock=-1:-1" in template["Mappings"]["Node"]["UserData"]["Text"]


def test_the_bucket_is_encrypted_private_and_has_expiry_rules(
    template: dict[str, Any],
) -> None:
    [bucket] = of_type(template, "AWS::S3::Bucket").values()
    assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
    assert len(bucket["PublicAccessBlockConfiguration"]) == 4
    assert "AES256" in json.dumps(bucket["BucketEncryption"])
    assert bucket["VersioningConfiguration"] == {"Status": "Enabled"}
    rules = {rule["Id"]: rule for rule in bucket["LifecycleConfiguration"]["Rules"]}
    assert all(rule["Status"] == "Enabled" for rule in rules.values())
    assert rules["abort-multipart"]["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] <= 7
    [tag] = rules["expire-tombstones"]["TagFilters"]
    assert {tag["Key"]: tag["Value"]} == TOMBSTONE_TAGS
    kept = rules["expire-deleted"]
    assert kept["NoncurrentVersionExpiration"] == {"NoncurrentDays": {"Ref": "KeepDeletedDays"}}
    assert kept["ExpiredObjectDeleteMarker"] is True
    for rule in rules.values():  # nothing that a job still wants may expire: only what is tagged
        assert "ExpirationInDays" not in rule or rule.get("TagFilters")
    [policy] = of_type(template, "AWS::S3::BucketPolicy").values()
    plain, keep = policy["PolicyDocument"]["Statement"]
    assert plain["Effect"] == "Deny" and plain["Condition"] == {
        "Bool": {"aws:SecureTransport": "false"}
    }
    assert keep["Effect"] == "Deny" and {"s3:DeleteObjectVersion", "s3:PutBucketVersioning"} <= set(
        keep["Action"]
    )
    assert keep["Principal"] == {
        "AWS": [{"Fn::GetAtt": [role, "Arn"]} for role in ("JobRole", "HeadRole")]
    }
    logs = of_type(template, "AWS::Logs::LogGroup").values()
    assert len(logs) >= 2
    for log in logs:
        assert log["RetentionInDays"] == {"Ref": "LogRetentionDays"}
    [repository] = of_type(template, "AWS::ECR::Repository").values()
    images = json.loads(repository["LifecyclePolicy"]["LifecyclePolicyText"])["rules"]
    assert {rule["action"]["type"] for rule in images} == {"expire"} and repository[
        "ImageTagMutability"
    ] == "IMMUTABLE"


def test_the_bucket_outlives_the_stack_and_nothing_else_that_costs(
    template: dict[str, Any],
) -> None:
    kept = {
        name
        for name, resource in template["Resources"].items()
        if "Retain" in resource.get("DeletionPolicy", "")
    }
    assert kept == {"Bucket", "BatchLogs"}
    assert of_type(template, "AWS::ECR::Repository")["Repository"]["EmptyOnDelete"] is True


def test_budget_and_failure_alarms_have_subscribers(template: dict[str, Any]) -> None:
    [budget] = of_type(template, "AWS::Budgets::Budget").values()
    told = {
        (
            notification["Notification"]["NotificationType"],
            notification["Notification"]["Threshold"],
        )
        for notification in budget["NotificationsWithSubscribers"]
        if notification["Subscribers"] == [{"SubscriptionType": "SNS", "Address": {"Ref": "Topic"}}]
    }
    assert told == {("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100)}
    alarms = of_type(template, "AWS::CloudWatch::Alarm")
    assert {alarm["MetricName"] for alarm in alarms.values()} == {
        "EstimatedCharges",
        "BytesOutToDestination",
    }
    assert all(alarm["AlarmActions"] == [{"Ref": "Topic"}] for alarm in alarms.values())
    [rule] = of_type(template, "AWS::Events::Rule").values()
    assert rule["EventPattern"]["detail"]["status"] == ["FAILED"] and rule["Targets"][0]["Arn"] == {
        "Ref": "Topic"
    }
    [policy] = of_type(template, "AWS::SNS::TopicPolicy").values()
    allow, event_bridge = policy["PolicyDocument"]["Statement"]
    assert allow["Principal"]["Service"] == ["budgets.amazonaws.com", "cloudwatch.amazonaws.com"]
    # "EventBridge does not support the use of Condition blocks in Amazon SNS topic policies":
    # docs.aws.amazon.com/eventbridge/latest/userguide/eb-use-resource-based.html
    assert event_bridge == {
        "Effect": "Allow",
        "Principal": {"Service": "events.amazonaws.com"},
        "Action": "sns:Publish",
        "Resource": {"Ref": "Topic"},
    }


def test_images_are_counted_by_tag_and_nodes_are_reached_by_session_manager(
    template: dict[str, Any],
) -> None:
    [repository] = of_type(template, "AWS::ECR::Repository").values()
    rules = json.loads(repository["LifecyclePolicy"]["LifecyclePolicyText"])["rules"]
    counted = [
        rule["selection"] for rule in rules if "imageCount" in rule["selection"]["countType"]
    ]
    # An image with an attestation, or of two platforms, has untagged manifests besides its own
    assert [(rule["tagStatus"], rule["tagPatternList"]) for rule in counted] == [("tagged", ["*"])]
    policies = of_type(template, "AWS::IAM::Role")["InstanceRole"]["ManagedPolicyArns"]
    assert any("AmazonSSMManagedInstanceCore" in json.dumps(policy) for policy in policies)


@pytest.mark.parametrize(
    ("disks", "mounted"),
    [
        ("/dev/nvme0n1 Amazon Elastic Block Store", False),
        (
            "/dev/nvme0n1 Amazon Elastic Block Store\n"
            "/dev/nvme1n1 Amazon EC2 NVMe Instance Storage\n"
            "/dev/nvme2n1 Amazon EC2 NVMe Instance Storage",
            True,
        ),
    ],
)
def test_dockers_folder_is_on_local_nvme_where_a_type_has_it(
    template: dict[str, Any], tmp_path: Path, disks: str, mounted: bool
) -> None:
    """The node's own script runs, in a folder, with commands that record what they are asked."""
    text = template["Mappings"]["Node"]["UserData"]["Text"]
    script = text.split("#!/bin/bash\n")[1].split("--ebbflow--")[0].replace("/etc/", f"{tmp_path}/")
    script = script.replace("/var/lib", str(tmp_path))
    (tmp_path / "sysconfig").mkdir()
    for name in ("mkfs.xfs", "mount"):
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/asked\n')
    (tmp_path / "lsblk").write_text(f"#!/bin/bash\nprintf '%s\\n' '{disks}'\n")
    for name in ("mkfs.xfs", "mount", "lsblk"):
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", "-euc", script], env={"PATH": path}, check=True)
    asked = tmp_path / "asked"
    lines = asked.read_text().splitlines() if asked.exists() else []
    assert lines == (
        ["mkfs.xfs -f /dev/nvme1n1", f"mount /dev/nvme1n1 {tmp_path}/docker"] if mounted else []
    )
    assert "prefer-cached" in (tmp_path / "ecs/ecs.config").read_text()


def test_the_schedule_starts_the_head_job_once_it_is_switched_on(template: dict[str, Any]) -> None:
    [schedule] = of_type(template, "AWS::Scheduler::Schedule").values()
    assert template["Parameters"]["ScheduleState"]["Default"] == "DISABLED"
    asked = json.loads(schedule["Target"]["Input"]["Fn::Sub"])
    assert (asked["JobQueue"], asked["JobDefinition"]) == ("${LightQueue}", "${HeadJob}")
    head = template["Resources"]["HeadJob"]["Properties"]
    command = template["Parameters"]["HeadCommand"]["Default"]
    names = {
        variable["Name"]
        for variable in head["ContainerProperties"]["Environment"]
        if "Name" in variable
    }
    assert set(re.findall(r"\$(\w+)", command)) <= names, "the command's variables are set"
    assert (head["ContainerProperties"]["User"], head["ContainerProperties"]["Privileged"]) == (
        "ebbflow",
        False,
    )
    assert "run --with batch" in command and "--job" in command, (
        "a head job that starts again goes on with its job"
    )
    assert {rule["Action"] for rule in head["RetryStrategy"]["EvaluateOnExit"]} == {"RETRY", "EXIT"}
    assert (ROOT / re.search(r"--config (\S+)", command)[1]).exists()


def test_without_a_nat_gateway_nothing_is_left_that_is_paid_by_the_hour(
    template: dict[str, Any],
) -> None:
    region = "eu-west-1"
    everything = {
        resource.name: resource.kind for resource in planned_resources(template, {}, region=region)
    }
    without = {
        resource.name: resource.kind
        for resource in planned_resources(template, {"Nat": "no"}, region=region)
    }
    gone = {name for name in everything if name not in without}
    assert {"NatGateway", "NatAddress", "NatAlarm", "GangG5Queue", "GangTemplate"} <= gone
    assert not {"AWS::EC2::NatGateway", "AWS::EC2::EIP"} & set(without.values())
    assert "NodeRouteDirect" in without and "NodeRouteDirect" not in everything
    for name in without:  # what is made refers to nothing that is not
        text = re.sub(r'"HasNat", \{"Ref": "\w+"\}', "", json.dumps(template["Resources"][name]))
        refers = set(re.findall(r'"(?:Ref|Fn::GetAtt)": \[?"(\w+)"', text))
        assert not refers & gone - {"NatGateway"}, name


@pytest.mark.parametrize(
    ("region", "published", "made"),
    [("us-east-1", "yes", True), ("us-east-1", "no", False), ("eu-west-1", "yes", False)],
)
def test_there_is_an_alarm_on_the_bill_only_where_the_bill_is_published(
    template: dict[str, Any], region: str, published: str, made: bool
) -> None:
    names = {
        resource.name
        for resource in planned_resources(template, {"BillingAlerts": published}, region=region)
    }
    assert ("BillAlarm" in names) is made
    assert template["Parameters"]["BillingAlerts"]["Default"] == "no", (
        "an alarm without data never warns"
    )


def test_the_template_has_no_secrets() -> None:
    text = TEMPLATE.read_text(encoding="utf-8")
    assert not re.findall(
        r"AKIA[0-9A-Z]{16}|(?i:secret_?access_?key|password)|\b[0-9]{12}\b(?!\n)",
        text.replace("107374182400", ""),
    )
