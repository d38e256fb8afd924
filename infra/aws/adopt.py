"""The command `ebbflow adopt`: write a job's configuration from an AWS account's resources. It changes none of them."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ebbflow.infra.aws.account import CONTAINERS, metaflow_settings, sibling_client, trusted_services
from ebbflow.infra.aws.calls import RequestDeadline, call_aws, paginate
from ebbflow.infra.batch import QueueState, batch_client, describe_queues
from ebbflow.infra.batch.queues import AUTO_INSTANCE_TYPES
from ebbflow.infra.errors import CloudError, InfraError, Outcome

T = TypeVar("T")

# Outputs of the stacks that users have: those of Metaflow's published template, and our own.
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
# Outputs that only these stacks have; other output names are common.
_MARKS = ("MetaflowDataStoreS3Url", "LightQueueName")
# Words in the names of buckets, repositories and roles that belong to these tools.
_OURS = ("ebbflow", "metaflow")
_SECONDS = 15.0
_MOST_BUCKETS = 20  # buckets whose region is read if no bucket's name contains one of `_OURS`


@dataclass(frozen=True, kw_only=True)
class StackOutputs:
    """The outputs of a CloudFormation stack that set up Metaflow or Ebbflow."""

    name: str
    outputs: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class AccountFacts:
    """The resources of an AWS account in one region that jobs could use."""

    region: str
    account: str
    queues: Mapping[str, QueueState]  # all job queues, by name
    stacks: tuple[StackOutputs, ...]
    buckets: tuple[str, ...]  # names of buckets that may be meant for jobs
    roles: tuple[str, ...]  # ARNs of roles that containers may assume
    images: tuple[str, ...]  # newest tagged image of each repository with "ebbflow" or "metaflow" in its name
    unread: tuple[str, ...]  # one error message for each service that could not be read


def read_account(region: str | None, *, seconds: float = _SECONDS) -> AccountFacts:
    """Read the queues, stacks, buckets, roles and images of an account, each service within `seconds`.

    If a service other than Batch cannot be read, its resources are left out and its error is added to `unread`. Raises
    CloudError if Batch does not describe its queues.
    """
    batch = batch_client(region)
    queues = describe_queues(None, batch, deadline_seconds=seconds)
    unread: list[str] = []

    def tried(service: str, read: Callable[[Any, RequestDeadline], T], otherwise: T) -> T:
        try:
            return read(sibling_client(service, batch), RequestDeadline.after(seconds))
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


def is_named_for_this(name: str) -> bool:
    return any(word in name.lower() for word in _OURS)


def _account(client: Any, deadline: RequestDeadline) -> str:
    return call_aws(client, "get_caller_identity", deadline)["Account"]


def _stacks(client: Any, deadline: RequestDeadline) -> tuple[StackOutputs, ...]:
    found = []
    for stack in paginate(client, "describe_stacks", "Stacks", deadline, token="NextToken"):
        outputs = {one["OutputKey"]: one["OutputValue"] for one in stack.get("Outputs") or []}
        if any(mark in outputs for mark in _MARKS):
            found.append(StackOutputs(name=stack["StackName"], outputs=outputs))
    return tuple(found)


def _buckets(client: Any, deadline: RequestDeadline) -> tuple[str, ...]:
    """Return the buckets in the client's region with "ebbflow" or "metaflow" in their name.

    If the account has none, its first 20 buckets are considered. A bucket whose region cannot be read is left out.
    """
    names = [
        bucket["Name"]
        for bucket in call_aws(client, "list_buckets", deadline, iam_action="s3:ListAllMyBuckets")["Buckets"]
    ]
    here = []
    for name in [name for name in names if is_named_for_this(name)] or names[:_MOST_BUCKETS]:
        try:
            location = call_aws(client, "get_bucket_location", deadline, Bucket=name).get("LocationConstraint")
        except CloudError:
            continue
        if ({None: "us-east-1", "EU": "eu-west-1"}).get(location, location) == client.meta.region_name:
            here.append(name)
    return tuple(here)


def _roles(client: Any, deadline: RequestDeadline) -> tuple[str, ...]:
    """Return the ARNs of roles that containers may assume; names with "ebbflow" or "metaflow" come first."""
    arns = [
        role["Arn"]
        for role in paginate(client, "list_roles", "Roles", deadline, token="Marker")
        if CONTAINERS in trusted_services(role.get("AssumeRolePolicyDocument"))
        and "/aws-service-role/" not in role["Arn"]
    ]
    return tuple(sorted(arns, key=lambda arn: not is_named_for_this(arn)))


def _images(client: Any, deadline: RequestDeadline) -> tuple[str, ...]:
    found = []
    for repository in paginate(client, "describe_repositories", "repositories", deadline):
        name = repository["repositoryName"]
        if not is_named_for_this(name):
            continue
        images = list(paginate(client, "describe_images", "imageDetails", deadline, repositoryName=name))
        tagged = [image for image in images if image.get("imageTags")]
        if tagged:
            newest = max(tagged, key=lambda image: image["imagePushedAt"])
            found.append(f"{repository['repositoryUri']}:{newest['imageTags'][0]}")
    return tuple(found)


# https://aws.amazon.com/ec2/instance-types/#Accelerated_Computing: families with NVIDIA GPUs and x86-64 processors
_GPU_FAMILY = re.compile(r"(p[0-9]|g4dn|g[56](?!g)|gr6)")
_SECRET = "METAFLOW_SERVICE_AUTH_KEY"
_FARGATE_ROLE = "METAFLOW_ECS_FARGATE_EXECUTION_ROLE"  # without it Metaflow makes no job definition for Fargate


@dataclass(frozen=True, kw_only=True)
class AdoptedSetup:
    """The resources and settings that the written configuration names."""

    region: str
    account: str
    store: str | None
    queues: tuple[QueueState, ...]  # queues for training
    gang_queues: frozenset[str]  # names of the queues for jobs of several nodes
    light_queue: str | None  # name of the queue for the steps around training, None if there is none
    image: str | None
    job_role: str | None
    settings: Mapping[str, str]  # Metaflow's settings, by name
    notes: tuple[str, ...]  # one line each, for the user


@dataclass
class _Notes:
    notes: list[str] = field(default_factory=list)

    def only(self, what: str, options: tuple[str, ...], how: str) -> str | None:
        """Return the option if there is exactly one, else None. If there are several, add the note "what: options;
        how".
        """
        if len(options) > 1:
            self.notes.append(f"{what}: {', '.join(options)}; {how}")
        return options[0] if len(options) == 1 else None


def choose_setup(
    facts: AccountFacts, given: Mapping[str, tuple[str, str]], *, store: str | None = None, stack: str | None = None
) -> AdoptedSetup:
    """Choose the store, queues, image, role and Metaflow settings of a job.

    given: Metaflow's settings on this machine, as (value, source) by name, which override a stack's outputs. stack:
    name of the stack that the user chose; None uses the only one, if there is exactly one.
    """
    notes = _Notes([f"could not be read: {problem}" for problem in facts.unread])
    known = _settings(facts, given, stack, notes)
    queues, light = _queues(facts, known, notes)
    store = store or _store(facts, known, stack, notes)
    role = known.get("METAFLOW_ECS_S3_ACCESS_IAM_ROLE") or notes.only(
        "containers may assume several roles", facts.roles, "set batch.job_role to the one of the jobs"
    )
    image = known.get("METAFLOW_BATCH_CONTAINER_IMAGE") or notes.only("several images", facts.images, "set batch.image")
    if not image:
        notes.notes.append("no image: build infra/docker/Dockerfile, push it to ECR, and set batch.image")
    settings = {"AWS_DEFAULT_REGION": facts.region, "METAFLOW_DEFAULT_DATASTORE": "s3"}
    root = known.get("METAFLOW_DATASTORE_SYSROOT_S3") or (f"{_bucket(store)}/metaflow" if store else "")
    settings |= {"METAFLOW_DATASTORE_SYSROOT_S3": root} if root else {}
    settings |= {"METAFLOW_BATCH_JOB_QUEUE": light} if light else {}
    settings |= {"METAFLOW_ECS_S3_ACCESS_IAM_ROLE": role} if role else {}
    settings |= {"METAFLOW_BATCH_CONTAINER_IMAGE": image} if image else {}
    settings |= {_FARGATE_ROLE: known[_FARGATE_ROLE]} if known.get(_FARGATE_ROLE) else {}
    settings |= _metadata(known, given, notes)
    return AdoptedSetup(
        region=facts.region,
        account=facts.account,
        store=store,
        queues=queues,
        gang_queues=_gangs(queues, notes),
        light_queue=light,
        image=image,
        job_role=role,
        settings=settings,
        notes=tuple(notes.notes),
    )


def _settings(
    facts: AccountFacts, given: Mapping[str, tuple[str, str]], stack: str | None, notes: _Notes
) -> dict[str, str]:
    """Return the Metaflow settings of this machine, completed from the outputs of the chosen stack."""
    chosen = _stack(facts, stack, notes)
    outputs = {} if chosen is None else chosen.outputs
    found = {SETTING_OF_OUTPUT[key]: value for key, value in outputs.items() if key in SETTING_OF_OUTPUT}
    return found | {name: value for name, (value, _) in given.items() if value}


def _stack(facts: AccountFacts, wanted: str | None, notes: _Notes) -> StackOutputs | None:
    stacks = {one.name: one for one in facts.stacks}
    if wanted is not None:
        if wanted not in stacks:
            there = ", ".join(stacks) or "none"
            notes.notes.append(
                f"there is no stack {wanted} of Metaflow or Ebbflow in {facts.region}; there are: {there}"
            )
        return stacks.get(wanted)
    name = notes.only("several stacks set up Metaflow", tuple(stacks), "choose one with --stack")
    return stacks.get(name or "")


def _queues(facts: AccountFacts, known: Mapping[str, str], notes: _Notes) -> tuple[tuple[QueueState, ...], str | None]:
    """Return (training, light): the queues for training, and the name of the queue for the steps around it or None."""
    training, light = [], []
    for state in facts.queues.values():
        if not state.usable:
            notes.notes.append(f"left out: {state.problem}")
        elif not state.fargate and (not state.instance_types or any(map(_GPU_FAMILY.match, state.instance_types))):
            training.append(state)
        elif state.market == "on_demand":
            light.append(state)
        else:
            kinds = ", ".join(state.instance_types) or "Fargate"
            notes.notes.append(f"left out: queue {state.name} is Spot and has no GPUs known here ({kinds})")
    return tuple(training), _light_queue(facts, known, light, training, notes)


def _light_queue(
    facts: AccountFacts, known: Mapping[str, str], light: list[QueueState], training: list[QueueState], notes: _Notes
) -> str | None:
    """Return the name of the queue for the steps around training, or None if there is no on-demand queue.

    light: on-demand queues without GPUs; if there are none, an on-demand one for training is used.
    """
    named = known.get("METAFLOW_BATCH_JOB_QUEUE", "")
    name = named.rpartition("/")[2]
    chosen = facts.queues.get(name)
    if named and chosen is None:
        notes.notes.append(f"METAFLOW_BATCH_JOB_QUEUE names {name}, which does not exist in {facts.region}")
    if chosen is None or not chosen.usable:
        # Fargate suits the steps around training, but it needs a role that may not exist.
        light = sorted(light, key=lambda state: state.fargate != bool(known.get(_FARGATE_ROLE)))
        chosen = next(iter([*light, *(state for state in training if state.market == "on_demand")]), None)
    if chosen is None:
        notes.notes.append("no on-demand queue: the steps around training would run on Spot machines")
        return None
    if chosen.fargate and not known.get(_FARGATE_ROLE):
        notes.notes.append(f"{chosen.name} is Fargate: set {_FARGATE_ROLE} to a role that may pull the image")
    return chosen.name


def _gangs(queues: tuple[QueueState, ...], notes: _Notes) -> frozenset[str]:
    """Return the names of the queues for jobs of several nodes: those that place all nodes in one zone, if there are
    any.
    """
    able = [state for state in queues if state.multi_node]
    near = [state for state in able if state.places_nodes_together]
    if able and not near:
        names = ", ".join(state.name for state in able)
        notes.notes.append(
            f"{names}: no placement group and several subnets; nodes of a gang may run in different zones"
        )
    return frozenset(state.name for state in near or able)


def _store(facts: AccountFacts, known: Mapping[str, str], stack: str | None, notes: _Notes) -> str | None:
    ours = [
        one.outputs[STORE_OUTPUT] for one in facts.stacks if STORE_OUTPUT in one.outputs and stack in (None, one.name)
    ]
    if len(ours) == 1:
        return ours[0]
    root = known.get("METAFLOW_DATASTORE_SYSROOT_S3", "")
    if root.startswith("s3://"):
        return f"{_bucket(root)}/ebbflow"
    bucket = notes.only("several buckets are possible", facts.buckets, "choose one with --store s3://bucket/prefix")
    if bucket is None and not facts.buckets:
        notes.notes.append("no bucket found in the region; name one with --store s3://bucket/prefix")
    elif bucket is not None and not is_named_for_this(bucket):
        notes.notes.append(f"using {bucket}, the region's only bucket; to use another: --store s3://bucket/prefix")
    return None if bucket is None else f"s3://{bucket}/ebbflow"


def _metadata(known: Mapping[str, str], given: Mapping[str, tuple[str, str]], notes: _Notes) -> dict[str, str]:
    """Return the settings for Metaflow's metadata service, without the service's key because it is a secret."""
    url = known.get("METAFLOW_SERVICE_URL")
    if not url:
        notes.notes.append("no metadata service found: Metaflow's records stay on the launching machine (docs/aws.md)")
        return {}
    if _SECRET in given:
        notes.notes.append(f"{_SECRET} is a secret: it stays in {given[_SECRET][1]}")
    internal = known.get("METAFLOW_SERVICE_INTERNAL_URL")
    found = {"METAFLOW_DEFAULT_METADATA": "service", "METAFLOW_SERVICE_URL": url}
    return found | ({"METAFLOW_SERVICE_INTERNAL_URL": internal} if internal else {})


def _bucket(uri: str) -> str:
    return "s3://" + uri.removeprefix("s3://").partition("/")[0]


def configuration_text(choice: AdoptedSetup, now_utc: float) -> str:
    document: dict[str, Any] = {} if choice.store is None else {"store": choice.store}
    document |= {"cluster": {"plan_for": "batch", "nodes": "auto", "processes_per_node": "auto"}}
    document |= {"cost": {"regions": [choice.region]}}
    batch: dict[str, Any] = {"region": choice.region, "queues": [_queue(state, choice) for state in choice.queues]}
    optional = {"light_queue": choice.light_queue, "image": choice.image, "job_role": choice.job_role}
    document["batch"] = batch | {name: value for name, value in optional.items() if value}
    head = [
        "# yaml-language-server: $schema=schema.json",
        f"# Read from account {choice.account} in {choice.region} on {_day(now_utc)} by `ebbflow adopt`.",
        "# Add model, training, data and the rest of the job, then: ebbflow preflight THIS_FILE",
        *_notes(choice),
        "",
    ]
    return "\n".join(head) + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)


def settings_text(choice: AdoptedSetup, now_utc: float) -> str:
    head = f"# Metaflow's settings for account {choice.account} in {choice.region}, read on {_day(now_utc)}."
    return "\n".join([head, *_exports(choice.settings)]) + "\n"


def notes_text(choice: AdoptedSetup) -> str:
    return "\n".join(f"adopt: {note}" for note in choice.notes)


def _queue(state: QueueState, choice: AdoptedSetup) -> dict[str, Any]:
    """Return a queue's entry in the configuration; fields with default values are left out."""
    entry: dict[str, Any] = {"name": state.name, "market": state.market}
    if state.instance_types and not set(AUTO_INSTANCE_TYPES) & set(
        state.instance_types
    ):  # an open-ended choice cannot be listed
        entry["instance_types"] = list(state.instance_types)
    return entry | ({"multi_node": True} if state.name in choice.gang_queues else {})


def _exports(settings: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]


def _notes(choice: AdoptedSetup) -> list[str]:
    return [f"# - {note}" for note in choice.notes]


def _day(now_utc: float) -> str:
    return datetime.fromtimestamp(now_utc, UTC).strftime("%Y-%m-%d")


_SETTINGS_SUFFIX = ".env"


def add_adopt_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("adopt", help="write a configuration from what an AWS account already has")
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write it, with FILE.env beside it; else printed"
    )
    command.add_argument("--region", metavar="NAME", help="of queues and bucket; else as every AWS tool finds it")
    command.add_argument(
        "--store", metavar="URI", help="s3://bucket/prefix of the jobs, if several buckets are possible"
    )
    command.add_argument(
        "--stack", metavar="NAME", help="CloudFormation stack to take settings from, where there are several"
    )
    command.add_argument("--force", action="store_true", help="overwrite files that exist")
    command.set_defaults(command=adopt)


def adopt(options: argparse.Namespace) -> int:
    """Run `ebbflow adopt`, and return its exit code.

    The code is 0, 1 if there is no queue for training, 2 for a bad request or a file that exists, or that of an AWS
    error.
    """
    files = _files(options.out)
    there = [str(file) for file in files if file.exists()]
    if there and not options.force:
        print(f"adopt: {', '.join(there)} exists; fix: choose another --out, or --force", file=sys.stderr)
        return Outcome.CONFIG.exit_code
    if options.store and not options.store.startswith("s3://"):
        print(
            f"adopt: --store {options.store} is not s3://bucket/prefix, the only store that containers reach",
            file=sys.stderr,
        )
        return Outcome.CONFIG.exit_code
    try:
        facts = read_account(options.region)
    except InfraError as error:
        print(f"adopt: {error}", file=sys.stderr)
        return error.outcome.exit_code
    choice = choose_setup(facts, metaflow_settings(), store=options.store, stack=options.stack)
    now = time.time()
    texts = (configuration_text(choice, now), settings_text(choice, now))
    if not files:
        print("\n".join(texts), end="")
    try:
        for file, text in zip(files, texts, strict=False):
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
    except OSError as error:
        print(f"adopt: {error}; fix: choose another --out", file=sys.stderr)
        return Outcome.CONFIG.exit_code
    if choice.notes:
        print(notes_text(choice), file=sys.stderr)
    if not choice.queues:
        fix = "create queues with ebbflow deploy, or name another --region"
        print(f"adopt: {facts.region} has no queue for training; fix: {fix}", file=sys.stderr)
        return Outcome.FAILED.exit_code
    return 0


def _files(out: Path | None) -> tuple[Path, ...]:
    return () if out is None else (out, out.with_name(f"{out.name.removesuffix('.yaml')}{_SETTINGS_SUFFIX}"))
