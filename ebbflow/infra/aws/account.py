"""Read-only queries of an AWS account (quotas, roles, buckets, images), and the Metaflow settings
of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ebbflow.core.errors import CloudRefused
from ebbflow.core.json_values import Json
from ebbflow.infra.aws.answers import (
    BucketLocation,
    ImagesAnswer,
    LifecycleAnswer,
    PublicAccessAnswer,
    QuotaAnswer,
    RoleAnswer,
    SimulationAnswer,
    TrustPolicy,
)
from ebbflow.infra.aws.calls import (
    Answer,
    RequestDeadline,
    aws_client,
    call_aws,
    is_amazons,
    request_name,
    required_field,
)

if TYPE_CHECKING:
    from botocore.client import BaseClient

# Regions for which GetBucketLocation returns another name.
LOCATIONS = {"": "us-east-1", "EU": "eu-west-1"}
# An image in ECR: account.dkr.ecr.region.amazonaws.com/repository[:tag][@digest]
_ECR = re.compile(
    r"(?P<account>[0-9]{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/"
    r"(?P<repository>[^:@]+)(:(?P<tag>[^@]+))?(@(?P<digest>sha256:[0-9a-f]+))?"
)
CONTAINERS = "ecs-tasks.amazonaws.com"  # the service that assumes a Batch container's role

# https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html; vCPUs, per region.
# The codes are those of `aws service-quotas list-service-quotas --service-code ec2`.
_QUOTAS = {
    ("on_demand", "standard"): "L-1216C47A",
    ("on_demand", "g"): "L-DB2E81BA",
    ("on_demand", "p"): "L-417A185B",
    ("spot", "standard"): "L-34B43A08",
    ("spot", "g"): "L-3819A6DF",
    ("spot", "p"): "L-7212CCBC",
    ("spot", "p5"): "L-C4BD4855",
}


@dataclass(frozen=True, kw_only=True)
class Quota:
    """An AWS quota: the maximum number of vCPUs that may run at the same time in a region."""

    code: str  # identifier of the quota in AWS Service Quotas, such as "L-1216C47A"
    name: str  # title of the quota in AWS Service Quotas
    vcpus: float


@dataclass(frozen=True, kw_only=True)
class RoleState:
    """An IAM role and the services that may assume it."""

    arn: str
    trusted: tuple[str, ...]  # service principals, such as "ecs-tasks.amazonaws.com"


@dataclass(frozen=True, kw_only=True)
class BucketState:
    """The properties of a bucket that a job depends on."""

    region: str
    public_access_blocked: bool  # True if all four settings of S3's public access block are on
    abort_days: int | None  # days until S3 deletes parts of an unfinished upload; None: never


def sibling_client(service: str, batch: BaseClient, region: str | None = None) -> BaseClient:
    """Make a client for another AWS service, by default in the region of a Batch client.

    Raises CloudRefused if the Batch client uses an AWS emulator but the new client would send its
    requests to Amazon.
    """
    client = aws_client(service, region or batch.meta.region_name)
    if is_amazons(client) and not is_amazons(batch):
        raise CloudRefused(f"Batch is at {batch.meta.endpoint_url}, but {service} is Amazon's")
    return client


def quota_code(instance_type: str, market: str) -> str | None:
    """Return the code of the vCPU quota that limits an instance type in a market, or None for an
    unknown family.
    """
    family = instance_type.partition(".")[0]
    if re.match(r"p5", family) and market == "spot":
        group = "p5"
    elif re.match(r"p[0-9]", family):
        group = "p"
    elif re.match(r"(g|gr|vt)[0-9]", family):
        group = "g"
    elif re.match(r"(a|c|d|h|i|im|is|m|r|t|z)[0-9]", family):
        group = "standard"
    else:
        return None
    return _QUOTAS[market, group]


def vcpu_quota(code: str, client: BaseClient, deadline: RequestDeadline) -> Quota:
    """Read one vCPU quota. client: botocore client for "service-quotas". Raises CloudError."""
    call = "get_service_quota"
    answer = call_aws(client, call, deadline, shape=QuotaAnswer, ServiceCode="ec2", QuotaCode=code)
    quota = required_field(answer.get("Quota"), "Quota", client, call)
    vcpus = required_field(quota.get("Value"), "Quota.Value", client, call)
    return Quota(code=code, name=quota.get("QuotaName", code), vcpus=float(vcpus))


def role_state(arn: str, client: BaseClient, deadline: RequestDeadline) -> RoleState | None:
    """Read an IAM role, or return None if it does not exist. client: botocore client for "iam".

    Raises CloudError.
    """
    try:
        answer = call_aws(
            client, "get_role", deadline, shape=RoleAnswer, RoleName=arn.rpartition("/")[2]
        )
    except CloudRefused as error:
        if error.code == "NoSuchEntity":
            return None
        raise
    role = required_field(answer.get("Role"), "Role", client, "get_role")
    found = required_field(role.get("Arn"), "Role.Arn", client, "get_role")
    return RoleState(arn=found, trusted=trusted_services(role.get("AssumeRolePolicyDocument")))


def trusted_services(document: str | TrustPolicy | None) -> tuple[str, ...]:
    """Return the services that a trust policy (a dict or URL-encoded JSON) allows to assume its
    role.
    """
    if isinstance(document, str):
        policy: TrustPolicy = json.loads(unquote(document))
    else:
        policy = document or {}
    statements = policy.get("Statement") or []
    found: list[str] = []
    for statement in statements if isinstance(statements, list) else [statements]:
        principal = statement.get("Principal") or {}
        if isinstance(principal, str):
            services = []
        else:
            services = principal.get("Service", [])
        if statement.get("Effect") == "Allow":
            if isinstance(services, str):
                found += [services]
            else:
                found += services
    return tuple(dict.fromkeys(found))


def denied_actions(
    arn: str,
    actions: Sequence[str],
    resources: Sequence[str],
    client: BaseClient,
    deadline: RequestDeadline,
) -> tuple[str, ...]:
    """Return the actions that a role may not perform on at least one of the resources.

    The answer comes from IAM's policy simulator. It ignores bucket policies and the policies of the
    AWS organisation, so a bucket policy may still allow a returned action.

    Args:
        actions: IAM actions, such as "s3:PutObject".
        resources: ARNs.

    Raises:
        CloudError: AWS gave no complete answer.
    """
    request = {
        "PolicySourceArn": arn,
        "ActionNames": list(actions),
        "ResourceArns": list(resources),
    }
    call = "simulate_principal_policy"
    answer = call_aws(client, call, deadline, shape=SimulationAnswer, **request)
    results = required_field(answer.get("EvaluationResults"), "EvaluationResults", client, call)
    decided: dict[str, bool] = {}
    # One denial is enough
    for result in sorted(results, key=lambda result: result.get("EvalDecision") != "allowed"):
        name = required_field(result.get("EvalActionName"), "EvalActionName", client, call)
        decision = required_field(result.get("EvalDecision"), "EvalDecision", client, call)
        decided[name] = decision == "allowed"
    if missing := [action for action in actions if action not in decided]:
        raise CloudRefused(
            f"{request_name(client, call)}: the answer has no decision on {', '.join(missing)}"
        )
    return tuple(action for action, allowed in decided.items() if not allowed)


def bucket_state(bucket: str, client: BaseClient, deadline: RequestDeadline) -> BucketState:
    """Read a bucket's properties. client: botocore client for "s3".

    Raises CloudError if a property cannot be read.
    """
    location = call_aws(
        client, "get_bucket_location", deadline, shape=BucketLocation, Bucket=bucket
    ).get("LocationConstraint")
    block = _call_optional(
        client,
        "get_public_access_block",
        deadline,
        "NoSuchPublicAccessBlockConfiguration",
        shape=PublicAccessAnswer,
        iam_action="s3:GetBucketPublicAccessBlock",
        Bucket=bucket,
    )
    call = "get_bucket_lifecycle_configuration"
    lifecycle = _call_optional(
        client,
        call,
        deadline,
        "NoSuchLifecycleConfiguration",
        shape=LifecycleAnswer,
        iam_action="s3:GetLifecycleConfiguration",
        Bucket=bucket,
    )
    if lifecycle is None:
        rules = []
    else:
        rules = required_field(lifecycle.get("Rules"), "Rules", client, call)
    name = "AbortIncompleteMultipartUpload.DaysAfterInitiation"
    days = [
        required_field(
            rule["AbortIncompleteMultipartUpload"].get("DaysAfterInitiation"), name, client, call
        )
        for rule in rules
        if rule.get("Status") == "Enabled" and "AbortIncompleteMultipartUpload" in rule
    ]
    blocked = "PublicAccessBlockConfiguration"
    if block is None:
        flags = {}
    else:
        flags = required_field(block.get(blocked), blocked, client, "get_public_access_block")
    wanted = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    return BucketState(
        region=LOCATIONS.get(location or "", location or ""),
        public_access_blocked=all(flags.get(name) for name in wanted),
        abort_days=min(days, default=None),
    )


def ecr_region(image: str) -> str | None:
    """Return the AWS region of an image in ECR, or None if the image is in another registry."""
    match = _ECR.fullmatch(image)
    if match is None:
        return None
    return match["region"]


def image_exists(image: str, client: BaseClient, deadline: RequestDeadline) -> bool:
    """Return whether an image exists in ECR. client: botocore client for "ecr" in the image's
    region.

    Raises CloudError, or ValueError if the name does not have the form of an ECR image.
    """
    match = _ECR.fullmatch(image)
    if match is None:
        raise ValueError(f"{image} is not in ECR")
    if match["digest"]:
        wanted = {"imageDigest": match["digest"]}
    else:
        wanted = {"imageTag": match["tag"] or "latest"}
    try:
        answer = call_aws(
            client,
            "describe_images",
            deadline,
            shape=ImagesAnswer,
            registryId=match["account"],
            repositoryName=match["repository"],
            imageIds=[wanted],
        )
    except CloudRefused as error:
        if error.code in ("ImageNotFoundException", "RepositoryNotFoundException"):
            return False
        raise
    images = required_field(answer.get("imageDetails"), "imageDetails", client, "describe_images")
    return bool(images)


def metaflow_settings(environment: Mapping[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """Map the name of each METAFLOW_* setting of this machine to (value, source).

    Environment variables (`environment`, by default os.environ) take precedence over Metaflow's
    configuration file. By default, this file is ~/.metaflowconfig/config.json. METAFLOW_HOME
    replaces the folder, and METAFLOW_PROFILE selects config_<profile>.json. An unreadable file
    counts as empty.
    """
    if environment is None:
        variables = os.environ
    else:
        variables = environment
    folder = Path(variables.get("METAFLOW_HOME") or "~/.metaflowconfig").expanduser()
    profile = variables.get("METAFLOW_PROFILE")
    path = folder / (f"config_{profile}.json" if profile else "config.json")
    document: object = None
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(document, dict):
        known = document
    else:
        known = {}
    found = {
        name: (str(value), str(path))
        for name, value in known.items()
        if name.startswith("METAFLOW_")
    }
    given = {
        name: (value, "the environment")
        for name, value in variables.items()
        if name.startswith("METAFLOW_")
    }
    return found | given


def metaflow_setting(name: str) -> str:
    """Return the value of one Metaflow setting, or "" if it is not set."""
    return metaflow_settings().get(name, ("", ""))[0]


def _call_optional(
    client: BaseClient,
    operation: str,
    deadline: RequestDeadline,
    absent: str,
    *,
    shape: type[Answer],
    iam_action: str,
    **request: Json,
) -> Answer | None:
    try:
        return call_aws(client, operation, deadline, shape=shape, iam_action=iam_action, **request)
    except CloudRefused as error:
        if error.code == absent:
            return None
        raise
