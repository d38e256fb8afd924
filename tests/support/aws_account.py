"""An AWS account made up in moto: queues of every kind, a bucket, roles, an image.

Nothing leaves this process.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from moto import mock_aws

from ebbflow.infra.aws.calls import aws_client

REGION = "us-east-1"
ACCOUNT = "123456789012"
BUCKET = "acme-metaflow-data"
JOB_ROLE = f"arn:aws:iam::{ACCOUNT}:role/metaflow-job"
IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/ebbflow:v1"
# name → computeResources.type, instance types
ENVIRONMENTS = {
    "spot-g5": ("SPOT", ["g5"]),
    "gang-p4d": ("EC2", ["p4d.24xlarge"]),
    "light": ("FARGATE", None),
    "cpu-spot": ("SPOT", ["c6i"]),
}


class Account:
    """Made with one queue for each of ENVIRONMENTS."""

    def __init__(self) -> None:
        self.batch = aws_client("batch", REGION)
        iam = aws_client("iam", REGION)
        self._service = iam.create_role(RoleName="batch", AssumeRolePolicyDocument=trust("batch"))[
            "Role"
        ]["Arn"]
        iam.create_role(RoleName="metaflow-job", AssumeRolePolicyDocument=trust("ecs-tasks"))
        iam.create_instance_profile(InstanceProfileName="nodes")
        iam.create_role(RoleName="nodes", AssumeRolePolicyDocument=trust("ec2"))
        iam.add_role_to_instance_profile(InstanceProfileName="nodes", RoleName="nodes")
        ec2 = aws_client("ec2", REGION)
        self._subnets = [subnet["SubnetId"] for subnet in ec2.describe_subnets()["Subnets"]][:1]
        self._groups = [
            group["GroupId"] for group in ec2.describe_security_groups()["SecurityGroups"]
        ][:1]
        for name, (kind, types) in ENVIRONMENTS.items():
            self.add_queue(name, [self.add_environment(name, kind, types)])
        self.s3 = aws_client("s3", REGION)
        self.s3.create_bucket(Bucket=BUCKET)

    def in_region(self, region: str) -> Account:
        """The same account in another region, which has no queues yet."""
        there = copy.copy(self)
        there.batch = aws_client("batch", region)
        ec2 = aws_client("ec2", region)
        there._subnets = [subnet["SubnetId"] for subnet in ec2.describe_subnets()["Subnets"]][:1]
        there._groups = [
            group["GroupId"] for group in ec2.describe_security_groups()["SecurityGroups"]
        ][:1]
        return there

    def add_environment(
        self, name: str, kind: str, types: list[str] | None, *, vcpus: int = 192
    ) -> str:
        resources: dict[str, Any] = {"type": kind, "maxvCpus": vcpus, "subnets": self._subnets}
        resources["securityGroupIds"] = self._groups
        if types is not None:
            resources |= {
                "minvCpus": 0,
                "instanceTypes": types,
                "instanceRole": f"arn:aws:iam::{ACCOUNT}:instance-profile/nodes",
            }
        made = self.batch.create_compute_environment(
            computeEnvironmentName=f"{name}-environment",
            type="MANAGED",
            state="ENABLED",
            serviceRole=self._service,
            computeResources=resources,
        )
        return made["computeEnvironmentArn"]

    def add_queue(self, name: str, environments: list[str], *, state: str = "ENABLED") -> None:
        order = [
            {"order": at, "computeEnvironment": arn} for at, arn in enumerate(environments, start=1)
        ]
        self.batch.create_job_queue(
            jobQueueName=name, state=state, priority=1, computeEnvironmentOrder=order
        )

    def disable(self, queue: str) -> None:
        self.batch.update_job_queue(jobQueue=queue, state="DISABLED")

    def push_image(self) -> None:
        ecr = aws_client("ecr", REGION)
        ecr.create_repository(repositoryName="ebbflow")
        manifest = {
            "schemaVersion": 2,
            "config": {"digest": "sha256:" + "0" * 64, "size": 1},
            "layers": [],
        }
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        ecr.put_image(
            repositoryName="ebbflow",
            imageManifest=json.dumps(manifest),
            imageManifestMediaType=kind,
            imageTag="v1",
        )

    def tidy_bucket(self) -> None:
        """As infra/aws/template.yaml makes it."""
        flags = (
            "BlockPublicAcls",
            "IgnorePublicAcls",
            "BlockPublicPolicy",
            "RestrictPublicBuckets",
        )
        self.s3.put_public_access_block(
            Bucket=BUCKET, PublicAccessBlockConfiguration=dict.fromkeys(flags, True)
        )
        rule = {"ID": "abort", "Status": "Enabled", "Filter": {"Prefix": ""}}
        rule["AbortIncompleteMultipartUpload"] = {"DaysAfterInitiation": 2}
        self.s3.put_bucket_lifecycle_configuration(
            Bucket=BUCKET, LifecycleConfiguration={"Rules": [rule]}
        )

    def add_stack(self, name: str, outputs: dict[str, str]) -> None:
        topic = {"Topic": {"Type": "AWS::SNS::Topic"}}
        template = {
            "Resources": topic,
            "Outputs": {key: {"Value": value} for key, value in outputs.items()},
        }
        aws_client("cloudformation", REGION).create_stack(
            StackName=name, TemplateBody=json.dumps(template)
        )


@contextmanager
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    """The account until the end of the block; the environment has its keys and no other setting of
    AWS or Metaflow.
    """
    import os

    for name in [name for name in os.environ if name.startswith(("AWS_", "METAFLOW_"))]:
        monkeypatch.delenv(name)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("METAFLOW_HOME", "/nonexistent")
    with mock_aws():
        yield Account()


def trust(service: str) -> str:
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": f"{service}.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})
