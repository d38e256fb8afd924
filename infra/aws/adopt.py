"""`ebbflow adopt`: write a job's configuration from what an AWS account already has. Reads only."""

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
class StackOutputs:
    """A CloudFormation stack that set Metaflow or Ebbflow up. outputs: by their keys."""

    name: str
    outputs: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class AccountFacts:
    """What was read. buckets, roles, images: those that could be meant. unread: what could not be read, and why."""

    region: str
    account: str
    queues: Mapping[str, QueueState]
    stacks: tuple[StackOutputs, ...]
    buckets: tuple[str, ...]
    roles: tuple[str, ...]
    images: tuple[str, ...]
    unread: tuple[str, ...]


def read_account(region: str | None, *, seconds: float = _SECONDS) -> AccountFacts:
    """Ask the account, each service within `seconds`. Raises CloudError when Batch says nothing of its queues."""
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
    """Whether a bucket, repository or role says by its name that it is Ebbflow's or Metaflow's."""
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
    """Of the region: those that are named for this, else all. A bucket whose region may not be asked is left out."""
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
    """Those that containers may take on, the ones named for this first."""
    arns = [
        role["Arn"]
        for role in paginate(client, "list_roles", "Roles", deadline, token="Marker")
        if CONTAINERS in trusted_services(role.get("AssumeRolePolicyDocument"))
        and "/aws-service-role/" not in role["Arn"]
    ]
    return tuple(sorted(arns, key=lambda arn: not is_named_for_this(arn)))


def _images(client: Any, deadline: RequestDeadline) -> tuple[str, ...]:
    """The newest tagged image of each repository that is named for this."""
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
    """What is to be written. queues: where training may go; gang_queues: those of them for several nodes, by name.

    settings: Metaflow's. notes: what a person should know.
    """

    region: str
    account: str
    store: str | None
    queues: tuple[QueueState, ...]
    gang_queues: frozenset[str]
    light_queue: str | None
    image: str | None
    job_role: str | None
    settings: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass
class _Notes:
    notes: list[str] = field(default_factory=list)

    def only(self, what: str, options: tuple[str, ...], how: str) -> str | None:
        """The only one there is; none of several, which are told."""
        if len(options) > 1:
            self.notes.append(f"{what}: {', '.join(options)}; {how}")
        return options[0] if len(options) == 1 else None


def choose_setup(
    facts: AccountFacts, given: Mapping[str, tuple[str, str]], *, store: str | None = None, stack: str | None = None
) -> AdoptedSetup:
    """given: Metaflow's settings on this machine as (value, where). store, stack: what the user has said."""
    notes = _Notes([f"could not be read: {said}" for said in facts.unread])
    known = _settings(facts, given, stack, notes)
    queues, light = _queues(facts, known, notes)
    store = store or _store(facts, known, stack, notes)
    role = known.get("METAFLOW_ECS_S3_ACCESS_IAM_ROLE") or notes.only(
        "several roles can be taken on by containers", facts.roles, "set batch.job_role to the one of the jobs"
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
    """Metaflow's settings by name: of this machine, else of the one stack that has them."""
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
    name = notes.only("several stacks set Metaflow up", tuple(stacks), "choose one with --stack")
    return stacks.get(name or "")


def _queues(facts: AccountFacts, known: Mapping[str, str], notes: _Notes) -> tuple[tuple[QueueState, ...], str | None]:
    """Where training may go, and the queue for the steps around it."""
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
    """light: on-demand queues without GPUs. training: what is taken where there are none."""
    named = known.get("METAFLOW_BATCH_JOB_QUEUE", "")
    name = named.rpartition("/")[2]
    chosen = facts.queues.get(name)
    if named and chosen is None:
        notes.notes.append(f"METAFLOW_BATCH_JOB_QUEUE names {name}, which is no queue of {facts.region}")
    if chosen is None or not chosen.usable:
        # The steps around training need no machine of their own, but Fargate needs a role that nobody may have made.
        light = sorted(light, key=lambda state: state.fargate != bool(known.get(_FARGATE_ROLE)))
        chosen = next(iter([*light, *(state for state in training if state.market == "on_demand")]), None)
    if chosen is None:
        notes.notes.append("no on-demand queue: the steps around training have no place that is not taken away")
        return None
    if chosen.fargate and not known.get(_FARGATE_ROLE):
        notes.notes.append(f"{chosen.name} is Fargate: set {_FARGATE_ROLE} to a role that may pull the image")
    return chosen.name


def _gangs(queues: tuple[QueueState, ...], notes: _Notes) -> frozenset[str]:
    """The queues for several nodes. Where some keep them close together the others are not for gangs."""
    able = [state for state in queues if state.multi_node]
    near = [state for state in able if state.places_nodes_together]
    if able and not near:
        names = ", ".join(state.name for state in able)
        notes.notes.append(
            f"{names}: no placement group and several subnets; nodes of a gang may lie in different zones"
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
    bucket = notes.only("several buckets could be meant", facts.buckets, "choose one with --store s3://bucket/prefix")
    if bucket is None and not facts.buckets:
        notes.notes.append("no bucket of the region is known; give one with --store s3://bucket/prefix")
    elif bucket is not None and not is_named_for_this(bucket):
        notes.notes.append(f"{bucket} is taken as the region's only bucket; another: --store s3://bucket/prefix")
    return None if bucket is None else f"s3://{bucket}/ebbflow"


def _metadata(known: Mapping[str, str], given: Mapping[str, tuple[str, str]], notes: _Notes) -> dict[str, str]:
    """Of Metaflow's metadata service; its key is a secret, which is named and never written."""
    url = known.get("METAFLOW_SERVICE_URL")
    if not url:
        notes.notes.append(
            "no metadata service is known: Metaflow's records stay on the launching machine (docs/aws.md)"
        )
        return {}
    if _SECRET in given:
        notes.notes.append(f"{_SECRET} is a secret: it stays in {given[_SECRET][1]}")
    internal = known.get("METAFLOW_SERVICE_INTERNAL_URL")
    found = {"METAFLOW_DEFAULT_METADATA": "service", "METAFLOW_SERVICE_URL": url}
    return found | ({"METAFLOW_SERVICE_INTERNAL_URL": internal} if internal else {})


def _bucket(uri: str) -> str:
    """s3://bucket of an address in it."""
    return "s3://" + uri.removeprefix("s3://").partition("/")[0]


def configuration_text(choice: AdoptedSetup, now_utc: float) -> str:
    """YAML that the loader takes as it is: store, cluster.plan_for, cost.regions and the section batch."""
    document: dict[str, Any] = {} if choice.store is None else {"store": choice.store}
    document |= {"cluster": {"plan_for": "batch", "nodes": "auto", "processes_per_node": "auto"}}
    document |= {"cost": {"regions": [choice.region]}}
    batch: dict[str, Any] = {"region": choice.region, "queues": [_queue(state, choice) for state in choice.queues]}
    optional = {"light_queue": choice.light_queue, "image": choice.image, "job_role": choice.job_role}
    document["batch"] = batch | {name: value for name, value in optional.items() if value}
    head = [
        "# yaml-language-server: $schema=schema.json",
        f"# Read from account {choice.account} in {choice.region} on {_day(now_utc)} by `ebbflow adopt`.",
        "# Add what is to be trained (model, training, data …), then: ebbflow preflight THIS_FILE",
        *_notes(choice),
        "",
    ]
    return "\n".join(head) + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)


def settings_text(choice: AdoptedSetup, now_utc: float) -> str:
    """Lines for a shell: `. FILE`. No secret is among them."""
    head = f"# Metaflow's settings for account {choice.account} in {choice.region}, read on {_day(now_utc)}."
    return "\n".join([head, *_exports(choice.settings)]) + "\n"


def notes_text(choice: AdoptedSetup) -> str:
    """What a person should know, one line each."""
    return "\n".join(f"adopt: {note}" for note in choice.notes)


def _queue(state: QueueState, choice: AdoptedSetup) -> dict[str, Any]:
    """As the configuration has it; what is its default is left out."""
    entry: dict[str, Any] = {"name": state.name, "market": state.market}
    if state.instance_types and not set(AUTO_INSTANCE_TYPES) & set(state.instance_types):  # those nobody can list
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
    """`adopt` and its options."""
    command = commands.add_parser("adopt", help="write a configuration from what an AWS account already has")
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write it, with FILE.env beside it; else printed"
    )
    command.add_argument("--region", metavar="NAME", help="of queues and bucket; else as every AWS tool finds it")
    command.add_argument(
        "--store", metavar="URI", help="s3://bucket/prefix of the jobs, where several buckets could be meant"
    )
    command.add_argument(
        "--stack", metavar="NAME", help="CloudFormation stack to take settings from, where there are several"
    )
    command.add_argument("--force", action="store_true", help="overwrite files that exist")
    command.set_defaults(command=adopt)


def adopt(options: argparse.Namespace) -> int:
    """Exit code 0, 1 when there is no queue that training may go to, 2 for a file in the way or a bad request."""
    files = _files(options.out)
    there = [str(file) for file in files if file.exists()]
    if there and not options.force:
        print(f"adopt: {', '.join(there)} exists; fix: choose another --out, or --force", file=sys.stderr)
        return Outcome.CONFIG.exit_code
    if options.store and not options.store.startswith("s3://"):
        print(
            f"adopt: --store {options.store} is no s3://bucket/prefix: containers reach nothing else", file=sys.stderr
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
        fix = "make some with ebbflow deploy, or name another --region"
        print(f"adopt: {facts.region} has no queue that training may go to; fix: {fix}", file=sys.stderr)
        return Outcome.FAILED.exit_code
    return 0


def _files(out: Path | None) -> tuple[Path, ...]:
    return () if out is None else (out, out.with_name(f"{out.name.removesuffix('.yaml')}{_SETTINGS_SUFFIX}"))
