"""What an account has that a job can use. Each question may be refused: what could not be read is told, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from infra.aws.account import CONTAINERS, companion, trusted_services
from infra.aws.calls import Patience, ask, pages
from infra.batch import QueueState, batch_client, describe_queues
from infra.errors import CloudError

T = TypeVar("T")

# Outputs of the stacks that people have: Metaflow's published template, and our own.
# https://github.com/Netflix/metaflow-tools/blob/master/aws/cloudformation/metaflow-cfn-template.yml
SETTING_OF_OUTPUT = {
    "MetaflowDataStoreS3Url": "METAFLOW_DATASTORE_SYSROOT_S3",
    "BatchJobQueueArn": "METAFLOW_BATCH_JOB_QUEUE",
    "ECSJobRoleForBatchJobs": "METAFLOW_ECS_S3_ACCESS_IAM_ROLE",
    "ServiceUrl": "METAFLOW_SERVICE_URL",
    "InternalServiceUrl": "METAFLOW_SERVICE_INTERNAL_URL",
    "Image": "METAFLOW_BATCH_CONTAINER_IMAGE",
    "LightQueueName": "METAFLOW_BATCH_JOB_QUEUE",
    "JobRoleArn": "METAFLOW_ECS_S3_ACCESS_IAM_ROLE",
}
STORE_OUTPUT = "Store"
# What names a stack as one of those: other stacks have outputs of the same common names.
_MARKS = ("MetaflowDataStoreS3Url", "LightQueueName")
# Names by which a bucket, a repository or a role tells that it is meant for this.
_OURS = ("ebbflow", "metaflow")
_SECONDS = 15.0
_MOST_BUCKETS = 20  # of which the region is asked, where none has a name that tells


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A CloudFormation stack that set Metaflow or Ebbflow up. outputs: by their keys."""

    name: str
    outputs: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class AccountFacts:
    """What was read. buckets, roles, images: those that could be meant. unread: what could not be read, and why."""

    region: str
    account: str
    queues: Mapping[str, QueueState]
    stacks: tuple[Stack, ...]
    buckets: tuple[str, ...]
    roles: tuple[str, ...]
    images: tuple[str, ...]
    unread: tuple[str, ...]


def read_account(region: str | None, *, seconds: float = _SECONDS) -> AccountFacts:
    """Ask the account, each service within `seconds`. Raises CloudError when Batch says nothing of its queues."""
    batch = batch_client(region)
    queues = describe_queues(None, batch, deadline_seconds=seconds)
    unread: list[str] = []

    def tried(service: str, read: Callable[[Any, Patience], T], otherwise: T) -> T:
        try:
            return read(companion(service, batch), Patience.of(seconds))
        except CloudError as error:
            unread.append(str(error))
            return otherwise

    return AccountFacts(
        region=batch.meta.region_name,
        account=tried("sts", _account, "unknown"),
        queues=queues,
        stacks=tried("cloudformation", _stacks, ()),
        buckets=tried("s3", _buckets, ()),
        roles=tried("iam", _roles, ()),
        images=tried("ecr", _images, ()),
        unread=tuple(unread),
    )


def named_for_this(name: str) -> bool:
    """Whether a bucket, repository or role says by its name that it is Ebbflow's or Metaflow's."""
    return any(word in name.lower() for word in _OURS)


def _account(client: Any, patience: Patience) -> str:
    return ask(client, "get_caller_identity", patience)["Account"]


def _stacks(client: Any, patience: Patience) -> tuple[Stack, ...]:
    found = []
    for stack in pages(client, "describe_stacks", "Stacks", patience, token="NextToken"):
        outputs = {one["OutputKey"]: one["OutputValue"] for one in stack.get("Outputs") or []}
        if any(mark in outputs for mark in _MARKS):
            found.append(Stack(name=stack["StackName"], outputs=outputs))
    return tuple(found)


def _buckets(client: Any, patience: Patience) -> tuple[str, ...]:
    """Of the region: those that are named for this, else all. A bucket whose region may not be asked is left out."""
    names = [bucket["Name"] for bucket in ask(client, "list_buckets", patience, right="s3:ListAllMyBuckets")["Buckets"]]
    here = []
    for name in [name for name in names if named_for_this(name)] or names[:_MOST_BUCKETS]:
        try:
            location = ask(client, "get_bucket_location", patience, Bucket=name).get("LocationConstraint")
        except CloudError:
            continue
        if ({None: "us-east-1", "EU": "eu-west-1"}).get(location, location) == client.meta.region_name:
            here.append(name)
    return tuple(here)


def _roles(client: Any, patience: Patience) -> tuple[str, ...]:
    """Those that containers may take on, the ones named for this first."""
    arns = [
        role["Arn"]
        for role in pages(client, "list_roles", "Roles", patience, token="Marker")
        if CONTAINERS in trusted_services(role.get("AssumeRolePolicyDocument"))
        and "/aws-service-role/" not in role["Arn"]
    ]
    return tuple(sorted(arns, key=lambda arn: not named_for_this(arn)))


def _images(client: Any, patience: Patience) -> tuple[str, ...]:
    """The newest tagged image of each repository that is named for this."""
    found = []
    for repository in pages(client, "describe_repositories", "repositories", patience):
        name = repository["repositoryName"]
        if not named_for_this(name):
            continue
        images = list(pages(client, "describe_images", "imageDetails", patience, repositoryName=name))
        tagged = [image for image in images if image.get("imageTags")]
        if tagged:
            newest = max(tagged, key=lambda image: image["imagePushedAt"])
            found.append(f"{repository['repositoryUri']}:{newest['imageTags'][0]}")
    return tuple(found)
