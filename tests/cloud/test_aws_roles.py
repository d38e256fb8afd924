"""Every action of every role with the code that needs it: none that nobody needs, and no call that
nobody may make.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import metaflow
import pytest

from ebbflow.infra.aws.deploy import TEMPLATE, read_template
from tests.support.aws.calls import calls, longest_match
from tests.support.aws.policies import actions, broad_actions, listed, roles, statements

ROOT = Path(__file__).resolve().parents[2]
METAFLOW = Path(metaflow.__file__).parent
THEIRS = "metaflow:"  # how the paths of Metaflow's files begin here

# What needs an action: a file, and the text in it that makes, or leads to, the call.
BUCKET = {
    "s3:GetObject": ("ebbflow/core/store/objects.py", "obstore.get("),
    "s3:PutObject": ("ebbflow/core/store/multipart/sinks.py", 'query={"uploads": ""}'),
    "s3:PutObjectTagging": ("training/checkpoint/retention.py", "tags=layout.TOMBSTONE_TAGS"),
    "s3:DeleteObject": ("ebbflow/core/store/objects.py", "obstore.delete("),
    "s3:AbortMultipartUpload": ("ebbflow/core/store/multipart/sinks.py", '"DELETE", begun.key'),
    "s3:ListBucket": ("ebbflow/core/store/objects.py", "obstore.list("),
    "s3:ListBucketMultipartUploads": (
        "ebbflow/core/store/multipart/sinks.py",
        '{"uploads": "", "prefix": prefix',
    ),
}
STEP = BUCKET | {
    "ec2:DescribeSpotPriceHistory": ("cost/prices/ec2_prices.py", '"describe_spot_price_history"'),
    "ec2:DescribeAvailabilityZones": ("cost/prices/ec2_prices.py", '"describe_availability_zones"'),
    "ec2:DescribeCapacityReservations": (
        "cost/prices/reservations.py",
        '"describe_capacity_reservations"',
    ),
    "ec2:DescribeCapacityBlockOfferings": (
        "cost/prices/reservations.py",
        '"describe_capacity_block_offerings"',
    ),
    "ec2:GetSpotPlacementScores": ("cost/prices/reservations.py", '"get_spot_placement_scores"'),
    "batch:DescribeJobs": ("infra/batch/jobs.py", "describe_jobs"),
    "batch:TerminateJob": ("infra/batch/jobs.py", "terminate_job"),
}
BATCH_CLIENT = f"{THEIRS}plugins/aws/batch/batch_client.py"
NEEDS: dict[str, dict[str, tuple[str, str]]] = {
    "JobRole": STEP,
    "HeadRole": STEP
    | {
        "batch:DescribeJobQueues": ("infra/batch/queues.py", '"describe_job_queues"'),
        "batch:DescribeComputeEnvironments": (
            "infra/batch/queues.py",
            '"describe_compute_environments"',
        ),
        "batch:DescribeJobDefinitions": (BATCH_CLIENT, "describe_job_definitions("),
        "batch:ListJobs": ("infra/batch/queues.py", '"list_jobs"'),
        "batch:RegisterJobDefinition": (BATCH_CLIENT, "register_job_definition("),
        "batch:SubmitJob": (BATCH_CLIENT, "submit_job("),
        "batch:TagResource": (BATCH_CLIENT, 'self.payload["tags"]'),
        "iam:PassRole": (BATCH_CLIENT, '"jobRoleArn": job_role'),
    },
    # What AWS itself calls, on account of these lines of the template.
    "ExecutionRole": {
        "ecr:GetAuthorizationToken": (
            "infra/aws/template.yaml",
            "Image: !Sub ${Repository.RepositoryUri}",
        ),
        "ecr:BatchCheckLayerAvailability": (
            "infra/aws/template.yaml",
            "Image: !Sub ${Repository.RepositoryUri}",
        ),
        "ecr:GetDownloadUrlForLayer": (
            "infra/aws/template.yaml",
            "Image: !Sub ${Repository.RepositoryUri}",
        ),
        "ecr:BatchGetImage": ("infra/aws/template.yaml", "Image: !Sub ${Repository.RepositoryUri}"),
        "logs:CreateLogStream": ("infra/aws/template.yaml", "awslogs-group: !Ref HeadLogs"),
        "logs:PutLogEvents": ("infra/aws/template.yaml", "awslogs-group: !Ref HeadLogs"),
    },
    "SchedulerRole": {"batch:SubmitJob": ("infra/aws/template.yaml", "aws-sdk:batch:submitJob")},
    # AWS's own policies for its own agents: nothing of ours.
    "InstanceRole": {},
    "BatchRole": {},
}
# Who runs a file that calls AWS: steps in containers, the head job, or a person with rights of
# their own. Preflight within a container asks the account as well, and says "skipped, because …"
# where its role may not: that needs no right.
PERSON = "person"
STEPS = "JobRole"
HEAD = "HeadRole"
RUN_BY: dict[str, set[str]] = {
    "cost/prices": {STEPS, HEAD},
    "cost/catalogue_refresh.py": {PERSON},
    "infra/aws": {PERSON},
    "infra/batch/jobs.py": {STEPS, HEAD},
    "infra/batch/queues.py": {HEAD},
    "infra/checks/store.py": {STEPS, HEAD},
    f"{THEIRS}plugins/aws/batch/batch_client.py": {HEAD},
    f"{THEIRS}plugins/aws/batch/batch.py": {HEAD},
    f"{THEIRS}plugins/aws/batch/batch_cli.py": {PERSON},  # `batch list` and `batch kill`
    f"{THEIRS}plugins/datatools/s3": {STEPS, HEAD},
}
# IAM cannot narrow these: docs.aws.amazon.com/service-authorization.
ANY_RESOURCE = {
    "batch:DescribeComputeEnvironments",
    "batch:DescribeJobDefinitions",
    "batch:DescribeJobQueues",
    "batch:DescribeJobs",
    "batch:ListJobs",
    "ec2:DescribeAvailabilityZones",
    "ec2:DescribeCapacityBlockOfferings",
    "ec2:DescribeCapacityReservations",
    "ec2:DescribeSpotPriceHistory",
    "ec2:GetSpotPlacementScores",
    "ecr:GetAuthorizationToken",
}


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    return read_template(TEMPLATE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def made() -> dict[str, set[str]]:
    """All calls of the project, and of what it uses of Metaflow."""
    ours = calls(ROOT, ["flows", "cost", "infra", "ebbflow/core", "ebbflow/observe"])
    theirs = calls(METAFLOW, ["plugins/aws/batch", "plugins/datatools/s3", "plugins/datastores"])
    return ours | {f"{THEIRS}{path}": rights for path, rights in theirs.items()}


def unneeded(template: Mapping[str, Any]) -> list[str]:
    """Actions of roles that no code is named for, and named code whose role lacks the action."""
    found = []
    for role in roles(template):
        have = actions(template, role)
        need = set(NEEDS[role])
        found += [f"{role}: nobody needs {action}" for action in sorted(have - need)]
        found += [f"{role}: {action} is missing" for action in sorted(need - have)]
    return found


def forbidden(template: Mapping[str, Any], made: Mapping[str, set[str]]) -> list[str]:
    """Calls that whoever runs their file may not make."""
    found = []
    for path, rights in made.items():
        runner = longest_match(path, list(RUN_BY))
        if runner is None:
            found.append(f"{path} calls {', '.join(sorted(rights))}: say in RUN_BY who runs it")
            continue
        for role in RUN_BY[runner] - {PERSON}:
            found += [
                f"{path}: {role} may not {right}"
                for right in sorted(rights - actions(template, role))
            ]
    return found


def test_every_action_is_needed_by_code_that_is_there(template: dict[str, Any]) -> None:
    assert unneeded(template) == []
    for role, needs in NEEDS.items():
        for action, (path, text) in needs.items():
            if path.startswith(THEIRS):
                file = METAFLOW / path.removeprefix(THEIRS)
            else:
                file = ROOT / path
            assert text in file.read_text(encoding="utf-8"), (
                f"{role} {action}: {path} no longer has {text!r}"
            )


def test_every_role_allows_the_calls_of_its_code(
    template: dict[str, Any], made: dict[str, set[str]]
) -> None:
    assert forbidden(template, made) == []
    assert sum(len(rights) for rights in made.values()) > 20, "the calls are no longer found"


def test_an_action_too_many_and_one_too_few_are_found(
    template: dict[str, Any], made: dict[str, set[str]]
) -> None:
    wider = copy.deepcopy(template)
    statements(wider, "JobRole")[0]["Action"].append("s3:DeleteBucket")
    assert unneeded(wider) == [
        f"{role}: nobody needs s3:DeleteBucket" for role in ("JobRole", "HeadRole")
    ]
    narrower = copy.deepcopy(template)
    statements(narrower, "JobRole")[0]["Action"].remove("s3:GetObject")
    assert any("may not s3:GetObject" in line for line in forbidden(narrower, made))
    assert forbidden(template, {"flows/new.py": {"ec2:RunInstances"}}) != []


def test_no_role_may_do_everything_or_anything_to_everything_that_could_be_named(
    template: dict[str, Any],
) -> None:
    for role in roles(template):
        assert not [action for action in actions(template, role) if "*" in action]
    assert {action for _, action in broad_actions(template)} <= ANY_RESOURCE


def test_each_role_is_taken_on_only_by_the_service_that_it_is_for(template: dict[str, Any]) -> None:
    expected = {
        "JobRole": "ecs-tasks",
        "ExecutionRole": "ecs-tasks",
        "HeadRole": "ecs-tasks",
        "SchedulerRole": "scheduler",
        "InstanceRole": "ec2",
        "BatchRole": "batch",
    }
    assert set(roles(template)) == set(expected)
    for role, service in expected.items():
        [statement] = template["Resources"][role]["Properties"]["AssumeRolePolicyDocument"][
            "Statement"
        ]
        assert listed(statement["Principal"]["Service"]) == [f"{service}.amazonaws.com"]
        # EC2 takes on an instance's role without a SourceAccount.
        own_account = {"StringEquals": {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}}
        assert statement.get("Condition") == (None if service == "ec2" else own_account), role


def test_a_head_job_passes_the_role_of_steps_to_containers_and_to_nothing_else(
    template: dict[str, Any],
) -> None:
    [passing] = [
        statement
        for statement in statements(template, "HeadRole")
        if "iam:PassRole" in listed(statement["Action"])
    ]
    assert passing["Resource"] == {"Fn::GetAtt": ["JobRole", "Arn"]}
    assert passing["Condition"] == {
        "StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}
    }


@pytest.mark.parametrize(
    ("role", "action", "key"),
    [
        ("JobRole", "batch:TerminateJob", "aws:ResourceTag/ebbflow-stack"),
        ("HeadRole", "batch:TerminateJob", "aws:ResourceTag/ebbflow-stack"),
        ("HeadRole", "batch:TagResource", "aws:RequestTag/ebbflow-stack"),
    ],
)
def test_only_jobs_of_this_stack_are_ended_and_tagged(
    template: dict[str, Any], role: str, action: str, key: str
) -> None:
    [one] = [
        statement
        for statement in statements(template, role)
        if action in listed(statement["Action"])
    ]
    assert one["Condition"] == {"StringEquals": {key: {"Ref": "AWS::StackName"}}}
    environment = template["Resources"]["HeadJob"]["Properties"]["ContainerProperties"][
        "Environment"
    ]
    [tags] = [
        variable["Value"]
        for variable in environment
        if variable["Name"] == "METAFLOW_BATCH_DEFAULT_TAGS"
    ]
    assert json.loads(tags["Fn::Sub"]) == {"ebbflow-stack": "${AWS::StackName}"}, (
        "what the jobs are tagged with"
    )


def test_jobs_go_to_the_queues_of_this_stack_alone(template: dict[str, Any]) -> None:
    """By reference: a pattern of the stack's name would match the queues of a stack whose name
    begins with it.
    """
    [one] = [
        statement
        for statement in statements(template, "HeadRole")
        if "batch:SubmitJob" in listed(statement["Action"])
    ]
    definition, *queues = one["Resource"]
    assert definition["Fn::Sub"].endswith(":job-definition/metaflow_*"), (
        "the name that Metaflow gives to all of its own"
    )
    named = [queue["Fn::If"][1]["Ref"] if "Fn::If" in queue else queue["Ref"] for queue in queues]
    there = {
        name
        for name, resource in template["Resources"].items()
        if resource["Type"] == "AWS::Batch::JobQueue"
    }
    assert set(named) == there and len(named) == len(there)


def test_jobs_can_neither_delete_old_versions_nor_the_rule_that_keeps_them(
    template: dict[str, Any],
) -> None:
    for role in ("JobRole", "HeadRole"):
        assert not {
            action
            for action in actions(template, role)
            if "Version" in action or action.startswith("s3:PutBucket")
        }
    [policy] = [
        resource
        for resource in template["Resources"].values()
        if resource["Type"] == "AWS::S3::BucketPolicy"
    ]
    [keep] = [
        statement
        for statement in policy["Properties"]["PolicyDocument"]["Statement"]
        if statement["Sid"] == "KeepVersions"
    ]
    denied = {
        "s3:DeleteObjectVersion",
        "s3:PutBucketVersioning",
        "s3:PutLifecycleConfiguration",
        "s3:*BucketPolicy",
    }
    assert keep["Effect"] == "Deny" and set(keep["Action"]) == denied
