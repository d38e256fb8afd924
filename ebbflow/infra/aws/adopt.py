"""The command `ebbflow adopt`: write a job's configuration that uses existing resources of an AWS
account.

The command does not change these resources.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import yaml

from ebbflow.core.errors import CloudError, Outcome
from ebbflow.core.json_values import JsonObject
from ebbflow.infra.aws.account import (
    CONTAINERS,
    LOCATIONS,
    metaflow_settings,
    sibling_client,
    trusted_services,
)
from ebbflow.infra.aws.answers import (
    BucketLocation,
    BucketsAnswer,
    CallerIdentity,
    ImageDetail,
    RepositoryDetail,
    RoleDetail,
    StackDetail,
)
from ebbflow.infra.aws.calls import RequestDeadline, call_aws, paginate
from ebbflow.infra.batch import QueueState, batch_client, describe_queues
from ebbflow.infra.batch.queues import AUTO_INSTANCE_TYPES

if TYPE_CHECKING:
    from botocore.client import BaseClient

T = TypeVar("T")

# Outputs of the stacks that users have: those of Metaflow's published template, and our own.
# https://github.com/Netflix/metaflow-tools/blob/master/aws/cloudformation/metaflow-cfn-template.yml
_SETTING_OF_OUTPUT = {
    "MetaflowDataStoreS3Url": "METAFLOW_DATASTORE_SYSROOT_S3",
    "BatchJobQueueArn": "METAFLOW_BATCH_JOB_QUEUE",
    "ECSJobRoleForBatchJobs": "METAFLOW_ECS_S3_ACCESS_IAM_ROLE",
    "ServiceUrl": "METAFLOW_SERVICE_URL",
    "InternalServiceUrl": "METAFLOW_SERVICE_INTERNAL_URL",
    "Image": "METAFLOW_BATCH_CONTAINER_IMAGE",
    "LightQueueName": "METAFLOW_BATCH_JOB_QUEUE",
    "JobRoleArn": "METAFLOW_ECS_S3_ACCESS_IAM_ROLE",
}
_STORE_OUTPUT = "Store"
# Outputs that only these stacks have; other output names are common.
_MARKS = ("MetaflowDataStoreS3Url", "LightQueueName")
_SECRET = "METAFLOW_SERVICE_AUTH_KEY"
# Without it Metaflow makes no job definition for Fargate
_FARGATE_ROLE = "METAFLOW_ECS_FARGATE_EXECUTION_ROLE"
# https://aws.amazon.com/ec2/instance-types/#Accelerated_Computing: families with NVIDIA GPUs and
# x86-64 processors
_GPU_FAMILY = re.compile(r"(p[0-9]|g4dn|g[56](?!g)|gr6)")
_SECONDS = 15.0
_MOST_BUCKETS = 20  # buckets whose region is read if no bucket is named for these tools


def add_adopt_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "adopt", help="write a configuration from what an AWS account already has"
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write it, with FILE.env beside it; else printed",
    )
    command.add_argument(
        "--region", metavar="NAME", help="of queues and bucket; else as every AWS tool finds it"
    )
    command.add_argument(
        "--store",
        metavar="URI",
        help="s3://bucket/prefix of the jobs, if several buckets are possible",
    )
    command.add_argument(
        "--stack",
        metavar="NAME",
        help="CloudFormation stack to take settings from, where there are several",
    )
    command.add_argument("--force", action="store_true", help="overwrite files that exist")
    command.set_defaults(command=adopt)


def adopt(options: argparse.Namespace) -> int:
    """Write a configuration for the queues that an AWS account already has (`ebbflow adopt`).

    Return the exit code.

    The exit code is 0 on success, 1 if the account has no queue for training, and 2 for invalid
    options or an output file that already exists. If AWS reports an error, the error determines the
    exit code.
    """
    out = options.out
    if out is None:
        files = []
    else:
        files = [out, out.with_name(f"{out.name.removesuffix('.yaml')}.env")]
    there = [str(file) for file in files if file.exists()]
    if there and not options.force:
        return _refuse(f"{', '.join(there)} exists; fix: choose another --out, or --force")
    if options.store and not options.store.startswith("s3://"):
        return _refuse(
            f"--store {options.store} is not s3://bucket/prefix, the only store that containers "
            "reach"
        )
    setup = _Setup(
        _Account(options.region), metaflow_settings(), store=options.store, stack=options.stack
    )
    day = time.strftime("%Y-%m-%d", time.gmtime())
    texts = (setup.configuration(day), setup.settings(day))
    if not files:
        print("\n".join(texts), end="")
    try:
        for file, text in zip(files, texts, strict=False):
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
    except OSError as error:
        return _refuse(f"{error}; fix: choose another --out")
    for note in setup.notes:
        print(f"adopt: {note}", file=sys.stderr)
    if not setup.queues:
        fix = "create queues with ebbflow deploy, or name another --region"
        return _refuse(
            f"{setup.account.region} has no queue for training; fix: {fix}", Outcome.FAILED
        )
    return 0


def _is_named_for_this(name: str) -> bool:
    return "ebbflow" in name.lower() or "metaflow" in name.lower()


def _bucket_of(uri: str) -> str:
    return "s3://" + uri.removeprefix("s3://").partition("/")[0]


class _Account:
    """The resources in one region of an AWS account that jobs could use.

    Reading each service takes at most 15 s. If a service other than Batch cannot be read, its
    resources are left out and a note for the user says so.

    Raises:
        CloudError: the Batch queues cannot be read.
    """

    def __init__(self, region: str | None) -> None:
        self._batch = batch_client(region)
        self.region = self._batch.meta.region_name
        self.queues = describe_queues(None, self._batch, deadline_seconds=_SECONDS)
        self.notes: list[str] = []  # one line each, for the user
        self.name = self._tried(
            "sts",
            _account,
            "unknown",
        )
        # Outputs, by name
        self.stacks: Mapping[str, Mapping[str, str]] = self._tried("cloudformation", _stacks, {})
        self.buckets = self._tried("s3", _buckets, [])  # those that may be meant for jobs
        self.roles = self._tried("iam", _roles, [])  # ARNs of roles that containers may assume
        self.images = self._tried("ecr", _images, [])

    def _tried(
        self, service: str, read: Callable[[BaseClient, RequestDeadline], T], otherwise: T
    ) -> T:
        try:
            return read(sibling_client(service, self._batch), RequestDeadline.after(_SECONDS))
        except CloudError as error:
            self.notes.append(f"could not be read: {error}")
            return otherwise

    def only(self, what: str, options: Sequence[str], how: str) -> str | None:
        """Return the only element of `options`, or None if there are none or several.

        If there are several, add a note for the user: `what` describes the options, and `how` says
        how to choose one.
        """
        if len(options) > 1:
            self.notes.append(f"{what}: {', '.join(options)}; {how}")
        if len(options) == 1:
            return options[0]
        return None


def _account(client: BaseClient, deadline: RequestDeadline) -> str:
    return call_aws(client, "get_caller_identity", deadline, shape=CallerIdentity)["Account"]


def _stacks(client: BaseClient, deadline: RequestDeadline) -> dict[str, dict[str, str]]:
    listed = paginate(
        client, "describe_stacks", "Stacks", deadline, shape=StackDetail, token="NextToken"
    )
    stacks = {}
    for stack in listed:
        pairs = stack.get("Outputs") or []
        outputs = {pair["OutputKey"]: pair["OutputValue"] for pair in pairs}
        if not outputs.keys().isdisjoint(_MARKS):
            stacks[stack["StackName"]] = outputs
    return stacks


def _buckets(client: BaseClient, deadline: RequestDeadline) -> list[str]:
    """Return the buckets in the client's region that have "ebbflow" or "metaflow" in their name.

    If no bucket of the account has such a name, return those of the account's first 20 buckets that
    are in the region. Buckets whose region cannot be read are left out.
    """
    answer = call_aws(
        client, "list_buckets", deadline, shape=BucketsAnswer, iam_action="s3:ListAllMyBuckets"
    )
    names = [bucket["Name"] for bucket in answer["Buckets"]]
    here = []
    for name in [name for name in names if _is_named_for_this(name)] or names[:_MOST_BUCKETS]:
        try:
            location = (
                call_aws(
                    client, "get_bucket_location", deadline, shape=BucketLocation, Bucket=name
                ).get("LocationConstraint")
                or ""
            )
        except CloudError:
            continue
        if LOCATIONS.get(location, location) == client.meta.region_name:
            here.append(name)
    return here


def _roles(client: BaseClient, deadline: RequestDeadline) -> list[str]:
    arns = [
        role["Arn"]
        for role in paginate(
            client, "list_roles", "Roles", deadline, shape=RoleDetail, token="Marker"
        )
        if CONTAINERS in trusted_services(role.get("AssumeRolePolicyDocument"))
        and "/aws-service-role/" not in role["Arn"]
    ]
    return sorted(arns, key=lambda arn: not _is_named_for_this(arn))


def _images(client: BaseClient, deadline: RequestDeadline) -> list[str]:
    """Return the newest tagged image of each repository with "ebbflow" or "metaflow" in its name."""
    found = []
    repositories = paginate(
        client, "describe_repositories", "repositories", deadline, shape=RepositoryDetail
    )
    for repository in repositories:
        name = repository["repositoryName"]
        if _is_named_for_this(name):
            images = paginate(
                client,
                "describe_images",
                "imageDetails",
                deadline,
                shape=ImageDetail,
                repositoryName=name,
            )
            tagged = [image for image in images if image.get("imageTags")]
            if tagged:
                newest = max(tagged, key=lambda image: image["imagePushedAt"])
                tag = newest.get("imageTags", [])[0]
                found.append(f"{repository['repositoryUri']}:{tag}")
    return found


class _Setup:
    """The store, queues, image, role and Metaflow settings that a job takes from an account.

    Args:
        given: this machine's Metaflow settings, as (value, source) by name. They take precedence
            over a stack's outputs.
        store: store address that the user chose. None derives an address from the account.
        stack: name of the CloudFormation stack that the user chose. None uses the account's stack
            if there is only one.
    """

    def __init__(
        self,
        account: _Account,
        given: Mapping[str, tuple[str, str]],
        *,
        store: str | None,
        stack: str | None,
    ) -> None:
        self.account = account
        self.notes = account.notes
        outputs = self._outputs(stack)
        self._known = {
            _SETTING_OF_OUTPUT[key]: value
            for key, value in outputs.items()
            if key in _SETTING_OF_OUTPUT
        }
        self._known |= {name: value for name, (value, _) in given.items() if value}
        self.queues, self.light_queue = self._choose_queues()
        self.store = store or self._choose_store(stack)
        self.job_role = self._known.get("METAFLOW_ECS_S3_ACCESS_IAM_ROLE") or account.only(
            "containers may assume several roles",
            account.roles,
            "set batch.job_role to the one of the jobs",
        )
        self.image = self._known.get("METAFLOW_BATCH_CONTAINER_IMAGE") or account.only(
            "several images", account.images, "set batch.image"
        )
        if not self.image:
            self.notes.append(
                "no image: build infra/docker/Dockerfile, push it to ECR, and set batch.image"
            )
        self._metadata = self._find_metadata(given)

    def _outputs(self, wanted: str | None) -> Mapping[str, str]:
        stacks = self.account.stacks
        if wanted is not None and wanted not in stacks:
            there = f"in {self.account.region}; there are: {', '.join(stacks) or 'none'}"
            self.notes.append(f"there is no stack {wanted} of Metaflow or Ebbflow {there}")
        if wanted is None:
            wanted = self.account.only(
                "several stacks set up Metaflow", list(stacks), "choose one with --stack"
            )
        return stacks.get(wanted or "", {})

    def _choose_queues(self) -> tuple[list[QueueState], str | None]:
        """Return the queues for training, and the name (or None) of the queue for the flow's other
        steps.
        """
        training = []
        light = []
        for state in self.account.queues.values():
            if not state.usable:
                self.notes.append(f"left out: {state.problem}")
            elif not state.fargate and (
                not state.instance_types or any(map(_GPU_FAMILY.match, state.instance_types))
            ):
                training.append(state)
            elif state.market == "on_demand":
                light.append(state)
            else:
                kinds = ", ".join(state.instance_types) or "Fargate"
                self.notes.append(
                    f"left out: queue {state.name} is Spot and has no GPUs known here ({kinds})"
                )
        # Fargate suits the steps around training, but it needs a role that may not exist.
        light.sort(key=lambda state: state.fargate != bool(self._known.get(_FARGATE_ROLE)))
        light += [state for state in training if state.market == "on_demand"]
        named = self._known.get("METAFLOW_BATCH_JOB_QUEUE", "").rpartition("/")[2]
        chosen = self.account.queues.get(named)
        if named and chosen is None:
            self.notes.append(
                f"METAFLOW_BATCH_JOB_QUEUE names {named}, which does not exist in "
                f"{self.account.region}"
            )
        if chosen is None or not chosen.usable:
            chosen = next(iter(light), None)
        if chosen is None:
            self.notes.append(
                "no on-demand queue: the steps around training would run on Spot machines"
            )
        elif chosen.fargate and not self._known.get(_FARGATE_ROLE):
            self.notes.append(
                f"{chosen.name} is Fargate: set {_FARGATE_ROLE} to a role that may pull the image"
            )
        return training, None if chosen is None else chosen.name

    def _choose_store(self, stack: str | None) -> str | None:
        stacks = self.account.stacks.items()
        ours = [
            out[_STORE_OUTPUT]
            for name, out in stacks
            if _STORE_OUTPUT in out and stack in (None, name)
        ]
        if len(ours) == 1:
            return ours[0]
        root = self._known.get("METAFLOW_DATASTORE_SYSROOT_S3", "")
        buckets = self.account.buckets
        if root.startswith("s3://"):
            return f"{_bucket_of(root)}/ebbflow"
        choose = "--store s3://bucket/prefix"
        bucket = self.account.only(
            "several buckets are possible", buckets, f"choose one with {choose}"
        )
        if not buckets:
            self.notes.append(f"no bucket found in the region; name one with {choose}")
        elif bucket is not None and not _is_named_for_this(bucket):
            self.notes.append(f"using {bucket}, the region's only bucket; to use another: {choose}")
        if bucket is None:
            return None
        return f"s3://{bucket}/ebbflow"

    def _find_metadata(self, given: Mapping[str, tuple[str, str]]) -> dict[str, str | None]:
        """Return the settings for Metaflow's metadata service, without its secret key."""
        url = self._known.get("METAFLOW_SERVICE_URL")
        if not url:
            local = (
                "no metadata service found: Metaflow's records stay on the launching machine "
                "(docs/aws.md)"
            )
            self.notes.append(local)
            return {}
        if _SECRET in given:
            self.notes.append(f"{_SECRET} is a secret: it stays in {given[_SECRET][1]}")
        internal = "METAFLOW_SERVICE_INTERNAL_URL"
        return {
            "METAFLOW_DEFAULT_METADATA": "service",
            "METAFLOW_SERVICE_URL": url,
            internal: self._known.get(internal),
        }

    def _gang_queues(self) -> list[QueueState]:
        """Return the queues for multi-node jobs, if possible only those that place all nodes in one
        zone.
        """
        able = [state for state in self.queues if state.multi_node]
        near = [state for state in able if state.places_nodes_together]
        if able and not near:
            names = ", ".join(state.name for state in able)
            self.notes.append(
                f"{names}: no placement group and several subnets; nodes of a gang may run in "
                "different zones"
            )
        return near or able

    def configuration(self, day: str) -> str:
        """Render the job's configuration as YAML, without fields that have default values."""
        account = self.account
        gangs = self._gang_queues()
        queues = []
        for state in self.queues:
            entry: JsonObject = {"name": state.name, "market": state.market}
            # An open-ended choice cannot be listed
            if not set(AUTO_INSTANCE_TYPES) & set(state.instance_types):
                if state.instance_types:
                    entry |= {"instance_types": list(state.instance_types)}
                else:
                    entry |= {}
            queues.append(entry | ({"multi_node": True} if state in gangs else {}))
        optional = {"light_queue": self.light_queue, "image": self.image, "job_role": self.job_role}
        if self.store is None:
            document: JsonObject = {}
        else:
            document = {"store": self.store}
        document |= {
            "cluster": {"plan_for": "batch", "nodes": "auto", "processes_per_node": "auto"},
            "cost": {"regions": [account.region]},
            "batch": {"region": account.region, "queues": queues}
            | {name: value for name, value in optional.items() if value},
        }
        head = [
            "# yaml-language-server: $schema=schema.json",
            f"# Read from account {account.name} in {account.region} on {day} by `ebbflow adopt`.",
            "# Add model, training, data and the rest of the job, then: ebbflow preflight "
            "THIS_FILE",
            *(f"# - {note}" for note in self.notes),
            "",
        ]
        return "\n".join(head) + yaml.safe_dump(
            document, sort_keys=False, allow_unicode=True, width=120
        )

    def settings(self, day: str) -> str:
        """Render Metaflow's settings as a shell script of `export` lines, without secrets."""
        root = self._known.get("METAFLOW_DATASTORE_SYSROOT_S3")
        settings = {
            "AWS_DEFAULT_REGION": self.account.region,
            "METAFLOW_DEFAULT_DATASTORE": "s3",
            "METAFLOW_DATASTORE_SYSROOT_S3": root
            or (f"{_bucket_of(self.store)}/metaflow" if self.store else ""),
            "METAFLOW_BATCH_JOB_QUEUE": self.light_queue,
            "METAFLOW_ECS_S3_ACCESS_IAM_ROLE": self.job_role,
            "METAFLOW_BATCH_CONTAINER_IMAGE": self.image,
            _FARGATE_ROLE: self._known.get(_FARGATE_ROLE),
            **self._metadata,
        }
        head = (
            f"# Metaflow's settings for account {self.account.name} in {self.account.region}, "
            f"read on {day}."
        )
        exports = [
            f"export {name}={shlex.quote(value)}" for name, value in settings.items() if value
        ]
        return "\n".join([head, *exports]) + "\n"


def _refuse(text: str, outcome: Outcome = Outcome.CONFIG) -> int:
    print(f"adopt: {text}", file=sys.stderr)
    return outcome.exit_code
