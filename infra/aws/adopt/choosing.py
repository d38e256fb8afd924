"""From what an account has to what a job is configured with. What is ambiguous is left open and said."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from infra.aws.adopt.reading import SETTING_OF_OUTPUT, STORE_OUTPUT, AccountFacts, Stack, named_for_this
from infra.batch import QueueState

# https://aws.amazon.com/ec2/instance-types/#Accelerated_Computing: families with NVIDIA GPUs and x86-64 processors
_GPU_FAMILY = re.compile(r"(p[0-9]|g4dn|g[56](?!g)|gr6)")
_SECRET = "METAFLOW_SERVICE_AUTH_KEY"
_FARGATE_ROLE = "METAFLOW_ECS_FARGATE_EXECUTION_ROLE"  # without it Metaflow makes no job definition for Fargate


@dataclass(frozen=True, kw_only=True)
class Choice:
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
class _Open:
    notes: list[str] = field(default_factory=list)

    def only(self, what: str, options: tuple[str, ...], how: str) -> str | None:
        """The only one there is; none of several, which are told."""
        if len(options) > 1:
            self.notes.append(f"{what}: {', '.join(options)}; {how}")
        return options[0] if len(options) == 1 else None


def choose(
    facts: AccountFacts, given: Mapping[str, tuple[str, str]], *, store: str | None = None, stack: str | None = None
) -> Choice:
    """given: Metaflow's settings on this machine as (value, where). store, stack: what the user has said."""
    open_ = _Open([f"could not be read: {said}" for said in facts.unread])
    known = _settings(facts, given, stack, open_)
    queues, light = _queues(facts, known, open_)
    store = store or _store(facts, known, stack, open_)
    role = known.get("METAFLOW_ECS_S3_ACCESS_IAM_ROLE") or open_.only(
        "several roles can be taken on by containers", facts.roles, "set batch.job_role to the one of the jobs"
    )
    image = known.get("METAFLOW_BATCH_CONTAINER_IMAGE") or open_.only("several images", facts.images, "set batch.image")
    if not image:
        open_.notes.append("no image: build infra/docker/Dockerfile, push it to ECR, and set batch.image")
    settings = {"AWS_DEFAULT_REGION": facts.region, "METAFLOW_DEFAULT_DATASTORE": "s3"}
    root = known.get("METAFLOW_DATASTORE_SYSROOT_S3") or (f"{_bucket(store)}/metaflow" if store else "")
    settings |= {"METAFLOW_DATASTORE_SYSROOT_S3": root} if root else {}
    settings |= {"METAFLOW_BATCH_JOB_QUEUE": light} if light else {}
    settings |= {"METAFLOW_ECS_S3_ACCESS_IAM_ROLE": role} if role else {}
    settings |= {"METAFLOW_BATCH_CONTAINER_IMAGE": image} if image else {}
    settings |= {_FARGATE_ROLE: known[_FARGATE_ROLE]} if known.get(_FARGATE_ROLE) else {}
    settings |= _metadata(known, given, open_)
    return Choice(
        region=facts.region,
        account=facts.account,
        store=store,
        queues=queues,
        gang_queues=_gangs(queues, open_),
        light_queue=light,
        image=image,
        job_role=role,
        settings=settings,
        notes=tuple(open_.notes),
    )


def _settings(
    facts: AccountFacts, given: Mapping[str, tuple[str, str]], stack: str | None, open_: _Open
) -> dict[str, str]:
    """Metaflow's settings by name: of this machine, else of the one stack that has them."""
    chosen = _stack(facts, stack, open_)
    outputs = {} if chosen is None else chosen.outputs
    found = {SETTING_OF_OUTPUT[key]: value for key, value in outputs.items() if key in SETTING_OF_OUTPUT}
    return found | {name: value for name, (value, _) in given.items() if value}


def _stack(facts: AccountFacts, wanted: str | None, open_: _Open) -> Stack | None:
    stacks = {one.name: one for one in facts.stacks}
    if wanted is not None:
        if wanted not in stacks:
            there = ", ".join(stacks) or "none"
            open_.notes.append(
                f"there is no stack {wanted} of Metaflow or Ebbflow in {facts.region}; there are: {there}"
            )
        return stacks.get(wanted)
    name = open_.only("several stacks set Metaflow up", tuple(stacks), "choose one with --stack")
    return stacks.get(name or "")


def _queues(facts: AccountFacts, known: Mapping[str, str], open_: _Open) -> tuple[tuple[QueueState, ...], str | None]:
    """Where training may go, and the queue for the steps around it."""
    training, light = [], []
    for state in facts.queues.values():
        if not state.usable:
            open_.notes.append(f"left out: {state.problem}")
        elif not state.fargate and (not state.instance_types or any(map(_GPU_FAMILY.match, state.instance_types))):
            training.append(state)
        elif state.market == "on_demand":
            light.append(state)
        else:
            kinds = ", ".join(state.instance_types) or "Fargate"
            open_.notes.append(f"left out: queue {state.name} is Spot and has no GPUs known here ({kinds})")
    return tuple(training), _light_queue(facts, known, light, training, open_)


def _light_queue(
    facts: AccountFacts, known: Mapping[str, str], light: list[QueueState], training: list[QueueState], open_: _Open
) -> str | None:
    """light: on-demand queues without GPUs. training: what is taken where there are none."""
    named = known.get("METAFLOW_BATCH_JOB_QUEUE", "")
    name = named.rpartition("/")[2]
    chosen = facts.queues.get(name)
    if named and chosen is None:
        open_.notes.append(f"METAFLOW_BATCH_JOB_QUEUE names {name}, which is no queue of {facts.region}")
    if chosen is None or not chosen.usable:
        # The steps around training need no machine of their own, but Fargate needs a role that nobody may have made.
        light = sorted(light, key=lambda state: state.fargate != bool(known.get(_FARGATE_ROLE)))
        chosen = next(iter([*light, *(state for state in training if state.market == "on_demand")]), None)
    if chosen is None:
        open_.notes.append("no on-demand queue: the steps around training have no place that is not taken away")
        return None
    if chosen.fargate and not known.get(_FARGATE_ROLE):
        open_.notes.append(f"{chosen.name} is Fargate: set {_FARGATE_ROLE} to a role that may pull the image")
    return chosen.name


def _gangs(queues: tuple[QueueState, ...], open_: _Open) -> frozenset[str]:
    """The queues for several nodes. Where some keep them close together the others are not for gangs."""
    able = [state for state in queues if state.multi_node]
    near = [state for state in able if state.keeps_nodes_near]
    if able and not near:
        names = ", ".join(state.name for state in able)
        open_.notes.append(
            f"{names}: no placement group and several subnets; nodes of a gang may lie in different zones"
        )
    return frozenset(state.name for state in near or able)


def _store(facts: AccountFacts, known: Mapping[str, str], stack: str | None, open_: _Open) -> str | None:
    ours = [
        one.outputs[STORE_OUTPUT] for one in facts.stacks if STORE_OUTPUT in one.outputs and stack in (None, one.name)
    ]
    if len(ours) == 1:
        return ours[0]
    root = known.get("METAFLOW_DATASTORE_SYSROOT_S3", "")
    if root.startswith("s3://"):
        return f"{_bucket(root)}/ebbflow"
    bucket = open_.only("several buckets could be meant", facts.buckets, "choose one with --store s3://bucket/prefix")
    if bucket is None and not facts.buckets:
        open_.notes.append("no bucket of the region is known; give one with --store s3://bucket/prefix")
    elif bucket is not None and not named_for_this(bucket):
        open_.notes.append(f"{bucket} is taken as the region's only bucket; another: --store s3://bucket/prefix")
    return None if bucket is None else f"s3://{bucket}/ebbflow"


def _metadata(known: Mapping[str, str], given: Mapping[str, tuple[str, str]], open_: _Open) -> dict[str, str]:
    """Of Metaflow's metadata service; its key is a secret, which is named and never written."""
    url = known.get("METAFLOW_SERVICE_URL")
    if not url:
        open_.notes.append(
            "no metadata service is known: Metaflow's records stay on the launching machine (docs/aws.md)"
        )
        return {}
    if _SECRET in given:
        open_.notes.append(f"{_SECRET} is a secret: it stays in {given[_SECRET][1]}")
    internal = known.get("METAFLOW_SERVICE_INTERNAL_URL")
    found = {"METAFLOW_DEFAULT_METADATA": "service", "METAFLOW_SERVICE_URL": url}
    return found | ({"METAFLOW_SERVICE_INTERNAL_URL": internal} if internal else {})


def _bucket(uri: str) -> str:
    """s3://bucket of an address in it."""
    return "s3://" + uri.removeprefix("s3://").partition("/")[0]
