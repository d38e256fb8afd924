"""The template applied to an account that moto makes up, by the command that users have. What moto
leaves out (lifecycle, policies of the bucket, budget, alarms, schedule) is looked at in the
template itself: test_aws_template.py.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber
from moto import mock_aws

from ebbflow.core.config import load_config
from ebbflow.core.errors import CloudError, CloudForbidden, CloudUnavailable
from ebbflow.infra.__main__ import main
from ebbflow.infra.aws.calls import RequestDeadline, aws_client, call_aws
from ebbflow.infra.aws.deploy import Stack
from ebbflow.infra.batch import batch_client, describe_queues

ROOT = Path(__file__).resolve().parents[2]
REGION = "us-east-1"
SERVICE = "http://metadata.internal:8080"
BODY = "Parameters:\n  Nat:\n    Type: String\n"


KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": REGION,
}


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields the file of settings that the command writes."""
    settings = tmp_path_factory.mktemp("deploy") / "ebbflow.env"
    with mock_aws(), pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        service = ["--parameter", f"MetadataServiceUrl={SERVICE}"]
        assert main(["deploy", "--apply", "--minutes", "5", "--env", str(settings), *service]) == 0
        yield settings


@pytest.fixture
def keys(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def applied(account: Path, keys: None) -> Path:
    """An account with the stack in it; returns the file of settings."""
    return account


def test_the_queues_of_the_account_are_those_of_the_example_configuration(applied: Path) -> None:
    config = load_config(
        ROOT / "ebbflow/configs" / "aws.yaml", project_root=ROOT, environment={}
    ).config
    there = describe_queues(None, batch_client(REGION))
    assert set(there) == {queue.name for queue in config.batch.queues} | {config.batch.light_queue}
    assert [state.problem for state in there.values() if not state.usable] == []
    for queue in config.batch.queues:
        state = there[queue.name]
        assert (state.market, list(state.instance_types)) == (queue.market, queue.instance_types)
        assert state.multi_node or not queue.multi_node


def test_bucket_roles_and_head_job_are_there_and_name_each_other(applied: Path) -> None:
    stack = boto3.client("cloudformation").describe_stacks(StackName="ebbflow")["Stacks"][0]
    outputs = {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}
    s3 = boto3.client("s3")
    assert "AES256" in str(s3.get_bucket_encryption(Bucket=outputs["BucketName"]))
    iam = boto3.client("iam")
    for name in ("JobRoleArn", "HeadRoleArn"):
        role = iam.get_role(RoleName=outputs[name].rpartition("/")[2])["Role"]
        assert "ecs-tasks.amazonaws.com" in str(role["AssumeRolePolicyDocument"])
    [head] = boto3.client("batch").describe_job_definitions(jobDefinitionName="ebbflow-head")[
        "jobDefinitions"
    ]
    environment = {
        variable["name"]: variable["value"]
        for variable in head["containerProperties"]["environment"]
    }
    assert environment["METAFLOW_ECS_S3_ACCESS_IAM_ROLE"] == outputs["JobRoleArn"]
    assert (
        environment["EBBFLOW__STORE"] == outputs["Store"] == f"s3://{outputs['BucketName']}/ebbflow"
    )
    assert environment["METAFLOW_BATCH_JOB_QUEUE"] == outputs["LightQueueName"] == "ebbflow-light"
    assert head["containerProperties"]["image"] == outputs["Image"]
    lines = [shlex.split(line)[1].partition("=") for line in applied.read_text().splitlines()]
    settings = {name: value for name, _, value in lines}
    assert all(settings.values()) and settings == {name: environment[name] for name in settings}, (
        "as the head job has"
    )
    assert (settings["METAFLOW_DEFAULT_METADATA"], settings["METAFLOW_SERVICE_URL"]) == (
        "service",
        SERVICE,
    )


def test_a_second_stack_leaves_the_log_group_of_all_jobs_to_the_first(
    applied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its creation would fail otherwise: a log group has one maker.

    The stack that made it keeps it.
    """
    assert [
        group["logGroupName"] for group in boto3.client("logs").describe_log_groups()["logGroups"]
    ].count("/aws/batch/job")
    assert main(["deploy", "--dry-run", "--stack", "second"]) == 0
    said = capsys.readouterr().out
    assert "/aws/batch/job exists and stays as it is" in said
    assert "+ HeadLogs " in said and "+ BatchLogs " not in said
    assert (
        main(["deploy", "--dry-run", "--stack", "second", "--parameter", "CreateBatchLogGroup=yes"])
        == 0
    )
    assert "+ BatchLogs " in capsys.readouterr().out, "what is given holds"
    assert main(["deploy", "--dry-run", "--parameter", "Nat=no"]) == 0
    assert "/aws/batch/job" not in capsys.readouterr().out


def test_an_alarm_on_the_bill_is_made_where_the_account_publishes_its_bill(
    applied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "--dry-run", "--stack", "second"]) == 0
    said = capsys.readouterr().out
    assert "+ BillAlarm " not in said and "the account does not publish it" in said
    spent = {
        "MetricName": "EstimatedCharges",
        "Value": 1.0,
        "Dimensions": [{"Name": "Currency", "Value": "USD"}],
    }
    boto3.client("cloudwatch").put_metric_data(Namespace="AWS/Billing", MetricData=[spent])
    assert main(["deploy", "--dry-run", "--stack", "second"]) == 0
    assert "+ BillAlarm " in capsys.readouterr().out


def test_deploy_leaves_unknown_account_values_to_the_caller(
    applied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(
        client: Any, operation: str, deadline: RequestDeadline, **request: Any
    ) -> Mapping[str, Any]:
        if operation in ("describe_stacks", "validate_template"):
            return call_aws(client, operation, deadline, **request)
        raise CloudForbidden(f"{operation}: denied")

    monkeypatch.setattr("ebbflow.infra.aws.deploy.call_aws", denied)
    assert main(["deploy", "--dry-run", "--stack", "second"]) == 0
    said = capsys.readouterr().out
    assert (
        "whether /aws/batch/job is there is unknown; --parameter CreateBatchLogGroup=no if it is"
        in said
    )
    assert "+ BatchLogs " in said


def test_a_dry_run_leaves_no_change_set_behind(
    applied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "--dry-run", "--parameter", "Nat=no"]) == 0
    assert "to modify" in capsys.readouterr().out, (
        "moto's change sets are incomplete; what they say is not looked at"
    )
    client = boto3.client("cloudformation")
    assert client.list_change_sets(StackName="ebbflow")["Summaries"] == []
    assert [stack["StackName"] for stack in client.describe_stacks()["Stacks"]] == ["ebbflow"]


def test_a_dry_run_without_an_account_lists_the_template(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert main(["deploy", "--dry-run", "--region", "eu-west-1"]) == 0
    said = capsys.readouterr().out
    assert "+ SpotG5Queue " in said and "no AWS credentials" in said and "BillAlarm" not in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--parameter", "Nate=no"], "--parameter Nate: unknown; the template has"),
        (["--parameter", "Nat=maybe"], "one of yes, no is allowed"),
        (["--parameter", "RunnableSeconds=60"], "must be at least 600 and at most 86400"),
        (["--parameter", "VolumeGib=many"], "must be a whole number"),
        (["--parameter", "Nat"], "must be NAME=VALUE"),
        (["--stack", "Ebbflow"], "lower-case letters"),
        (["--env", "/nowhere/at/all.env"], "there is no folder"),
    ],
)
def test_deploy_refuses_invalid_parameters_before_any_request(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "--apply", *words]) == 2
    assert told in capsys.readouterr().err


def event(number: int, name: str, status: str, reason: str = "") -> dict[str, Any]:
    return {
        "StackId": "s",
        "StackName": "ebbflow",
        "EventId": str(number),
        "LogicalResourceId": name,
        "Timestamp": 0,
        "ResourceType": "AWS::Batch::JobQueue",
        "ResourceStatus": status,
        "ResourceStatusReason": reason,
    }


def stack(status: str) -> dict[str, Any]:
    return {"Stacks": [{"StackName": "ebbflow", "CreationTime": 0, "StackStatus": status}]}


def no_sleep(seconds: float) -> RequestDeadline:
    """Time goes on by what is slept, and by nothing else."""
    now = [0.0]
    return RequestDeadline(
        seconds, lambda: now[0], lambda slept: now.__setitem__(0, now[0] + slept)
    )


def test_deploy_reports_a_failed_resource_by_name_and_reason(keys: None) -> None:
    client = aws_client("cloudformation", REGION)
    told = []
    with Stubber(client) as stub:
        stub.add_response("create_stack", {"StackId": "s"})
        stub.add_response("describe_stacks", stack("ROLLBACK_IN_PROGRESS"))
        failed = event(1, "SpotG5", "CREATE_FAILED", "You have reached your quota")
        second = event(2, "Bucket", "CREATE_FAILED", "Resource creation cancelled")
        stub.add_response("describe_stack_events", {"StackEvents": [second, failed]})
        stub.add_response("describe_stacks", stack("ROLLBACK_COMPLETE"))
        stub.add_response(
            "describe_stack_events",
            {"StackEvents": [event(3, "x", "DELETE_COMPLETE"), second, failed]},
        )
        with pytest.raises(CloudError) as raised:
            Stack(client, "ebbflow", told.append).apply(BODY, {}, None, no_sleep(60))
    lines = str(raised.value).splitlines()
    assert lines[0] == "stack ebbflow: ROLLBACK_COMPLETE" and len(lines) == 2, (
        "what was only cancelled is no cause"
    )
    assert "SpotG5 (AWS::Batch::JobQueue): CREATE_FAILED: You have reached your quota" in lines[1]
    assert len(told) == 3, "each event is told once"


def test_a_wait_for_the_stack_ends_and_reports_that_it_continues(keys: None) -> None:
    client = aws_client("cloudformation", REGION)
    with Stubber(client) as stub:
        stub.add_response("create_stack", {"StackId": "s"})
        for _ in range(5):
            stub.add_response("describe_stacks", stack("CREATE_IN_PROGRESS"))
            stub.add_response("describe_stack_events", {"StackEvents": []})
        with pytest.raises(
            CloudUnavailable,
            match=r"it is CREATE_IN_PROGRESS and the deadline has passed.*describe-stack-events",
        ):
            Stack(client, "ebbflow", print).apply(BODY, {}, None, no_sleep(24))


@pytest.mark.parametrize(
    ("status", "fix"),
    [
        ("ROLLBACK_COMPLETE", "aws cloudformation delete-stack --stack-name ebbflow"),
        ("UPDATE_IN_PROGRESS", "wait until it is done"),
        ("UPDATE_ROLLBACK_FAILED", "aws cloudformation continue-update-rollback"),
    ],
)
def test_a_stack_that_cannot_be_changed_is_left_alone_with_what_to_do(
    keys: None, status: str, fix: str
) -> None:
    client = aws_client("cloudformation", REGION)
    with Stubber(client) as stub:
        stub.add_response("describe_stacks", stack(status))
        one = Stack(client, "ebbflow", print)
        with pytest.raises(CloudError, match=fix):
            one.apply(BODY, {}, one.state(no_sleep(60)), no_sleep(60))


def test_a_change_set_is_read_to_its_end_and_deleted_also_when_it_fails(keys: None) -> None:
    client = aws_client("cloudformation", REGION)
    name = {"StackName": "ebbflow", "ChangeSetName": ANY}
    change = {
        "Action": "Modify",
        "LogicalResourceId": "SpotG5",
        "ResourceType": "AWS::Batch::ComputeEnvironment",
        "Replacement": "True",
        "Details": [{"Target": {"Attribute": "Properties", "Name": "ComputeResources"}}],
    }
    removed = {
        "Action": "Remove",
        "LogicalResourceId": "NatGateway",
        "ResourceType": "AWS::EC2::NatGateway",
    }
    first = {
        "Status": "CREATE_COMPLETE",
        "Changes": [{"ResourceChange": change}],
        "NextToken": "more",
    }
    with Stubber(client) as stub:
        stub.add_response("describe_stacks", stack("CREATE_COMPLETE"))
        stub.add_response("create_change_set", {})
        stub.add_response("describe_change_set", {"Status": "CREATE_IN_PROGRESS"}, name)
        stub.add_response("describe_change_set", first, name)
        stub.add_response("describe_change_set", first, name)
        second = {"Status": "CREATE_COMPLETE", "Changes": [{"ResourceChange": removed}]}
        stub.add_response("describe_change_set", second, {**name, "NextToken": "more"})
        stub.add_response("delete_change_set", {}, name)
        one = Stack(client, "ebbflow", print)
        changes = one.changes(BODY, {}, one.state(no_sleep(60)), no_sleep(60))
        assert [(change.action, change.replacement, change.because) for change in changes] == [
            ("Modify", "True", ("ComputeResources",)),
            ("Remove", "", ()),
        ]
        stub.add_response("describe_stacks", stack("CREATE_COMPLETE"))
        stub.add_response("create_change_set", {})
        stub.add_response(
            "describe_change_set", {"Status": "FAILED", "StatusReason": "bad subnet"}, name
        )
        stub.add_response("delete_change_set", {}, name)
        with pytest.raises(CloudError, match="bad subnet"):
            one.changes(BODY, {}, one.state(no_sleep(60)), no_sleep(60))
        stub.assert_no_pending_responses()


def test_an_update_keeps_the_parameters_that_are_not_given(keys: None) -> None:
    client = aws_client("cloudformation", REGION)
    before = stack("CREATE_COMPLETE")
    given = [{"ParameterKey": name, "ParameterValue": "x"} for name in ("Nat", "LongGone")]
    before["Stacks"][0]["Parameters"] = given
    with Stubber(client) as stub:
        stub.add_response("describe_stacks", before)
        stub.add_response("describe_stack_events", {"StackEvents": []})
        stub.add_client_error(
            "update_stack",
            "ValidationError",
            "No updates are to be performed.",
            expected_params={
                "StackName": "ebbflow",
                "ClientRequestToken": ANY,
                "TemplateBody": BODY,
                "Capabilities": ["CAPABILITY_IAM"],
                "Parameters": [{"ParameterKey": "Nat", "UsePreviousValue": True}],
                "Tags": ANY,
            },
        )
        told: list[str] = []
        one = Stack(client, "ebbflow", told.append)
        assert (
            one.apply(BODY, {}, one.state(no_sleep(60)), no_sleep(60)).status == "CREATE_COMPLETE"
        )
    assert told == ["stack ebbflow: nothing to change"]
