"""Preflight checks of an AWS account for a job on AWS Batch; other jobs skip them."""

import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ebbflow.core.errors import CloudError, InfraError, StoreError
from ebbflow.core.preflight import CheckFinding, PreflightContext, failed, passed, skipped
from ebbflow.core.store.s3 import split_uri
from ebbflow.infra.aws.account import (
    CONTAINERS,
    bucket_state,
    denied_actions,
    ecr_region,
    image_exists,
    metaflow_setting,
    role_state,
    sibling_client,
)
from ebbflow.infra.aws.calls import RequestDeadline, aws_client, is_amazons
from ebbflow.infra.batch import batch_client, describe_queues, has_gpus_only, training_queues
from ebbflow.infra.batch.queues import QueueState
from ebbflow.infra.checks.store import compare_clock

# "A request must reach AWS within five minutes of the time stamp in the request":
# https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv.html
_AWS_REFUSES_SECONDS = 300.0
# Rights that a node needs in the store, on objects and on the bucket.
_OBJECT_ACTIONS = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")
_BUCKET_ACTIONS = ("s3:ListBucket", "s3:ListBucketMultipartUploads")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/.+")
# For all requests of one check; the check's own deadline is a little longer.
ANSWER_SECONDS = 12.0
_ADOPT = "ebbflow adopt shows what there is"


def for_batch(
    check: Callable[[PreflightContext], CheckFinding],
) -> Callable[[PreflightContext], CheckFinding]:
    """Decorate a check so that it is skipped for jobs outside AWS Batch, and if AWS or the store
    cannot be read.
    """

    @functools.wraps(check)
    def run(context: PreflightContext) -> CheckFinding:
        if reason := skip_reason(context):
            return skipped(reason)
        try:
            return check(context)
        except (_Skip, InfraError) as error:
            return skipped(str(error))

    return run


class _Skip(Exception):
    """Exception for a check that does not apply. The message is the reason."""


@for_batch
def check_batch_role(context: PreflightContext) -> CheckFinding:
    """Check that the containers' IAM role exists, and that its trust policy lets containers assume
    it.
    """
    arn = _role(context)
    client = _client("iam", context)
    role = role_state(arn, client, _patience())
    if role is None:
        _skip_if_stand_in(client, f"role {arn}")
        return failed(
            f"there is no role {arn}", "correct batch.job_role or METAFLOW_ECS_S3_ACCESS_IAM_ROLE"
        )
    if CONTAINERS not in role.trusted:
        trusted = ", ".join(role.trusted) or "no service"
        return failed(
            f"{arn} trusts {trusted}", f"let its trust policy allow sts:AssumeRole to {CONTAINERS}"
        )
    return passed(f"{arn} can be assumed by containers")


@for_batch
def check_batch_rights(context: PreflightContext) -> CheckFinding:
    """Check with IAM's policy simulator that the role's policies allow every operation of a node on
    the store.
    """
    arn = _role(context)
    store = context.config.store
    bucket, prefix = _bucket(context)
    objects = f"arn:aws:s3:::{bucket}/{prefix + '/' if prefix else ''}*"
    client = _client("iam", context)
    deadline = _patience()
    denied = denied_actions(arn, _OBJECT_ACTIONS, [objects], client, deadline)
    denied += denied_actions(arn, _BUCKET_ACTIONS, [f"arn:aws:s3:::{bucket}"], client, deadline)
    if denied:
        detail = (
            f"{arn} is denied {', '.join(denied)} on {store}, unless the bucket's own policy "
            "allows it"
        )
        return failed(detail, f"allow {', '.join(denied)} on {objects} and its bucket")
    return passed(f"{arn} may read, write, list and delete in {store}")


@for_batch
def check_batch_bucket(context: PreflightContext) -> CheckFinding:
    """Check that the bucket is in the queues' region, blocks public access, and deletes parts of
    unfinished uploads.
    """
    bucket, _ = _bucket(context)
    client = _client("s3", context)
    state = bucket_state(bucket, client, _patience())
    region = client.meta.region_name
    wrong = []
    fixes = []
    if state.region != region:
        wrong.append(
            f"it is in {state.region}, the queues in {region}: transfer between them is billed"
        )
        fixes.append(f"use a bucket of {region}")
    if not state.public_access_blocked:
        wrong.append("public access is not blocked")
        fixes.append(
            f"aws s3api put-public-access-block --bucket {bucket} "
            "--public-access-block-configuration "
            "BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true"
        )
    if state.abort_days is None:
        wrong.append("parts of unfinished uploads stay, and are paid for, for ever")
        fixes.append(
            "add a lifecycle rule with AbortIncompleteMultipartUpload, as "
            "infra/aws/template.yaml has it"
        )
    if wrong:
        return failed(f"{bucket}: {'; '.join(wrong)}", "\n".join(fixes))
    return passed(
        f"{bucket}: in {region}, not public, unfinished uploads deleted after {state.abort_days} "
        "days"
    )


@for_batch
def check_batch_image(context: PreflightContext) -> CheckFinding:
    """Check that the container image exists, if it is in ECR."""
    image = context.config.batch.image or _metaflow_image()
    if not image:
        return skipped("no image is named: Metaflow's default has no torch; set batch.image")
    region = ecr_region(image)
    if region is None:
        return skipped(f"{image} is not in ECR: its registry is not checked")
    client = _client("ecr", context, region)
    if image_exists(image, client, _patience()):
        return passed(f"{image} is there")
    _skip_if_stand_in(client, f"image {image}")
    return failed(f"there is no image {image}", "push it (docs/aws.md), or correct batch.image")


def skip_reason(context: PreflightContext) -> str:
    """Return why the checks of the AWS account are skipped for this job, or "" if they run."""
    cluster = context.config.cluster
    if context.target not in (None, "batch"):
        return "the job does not go to AWS Batch"
    if context.target is None and cluster.plan_for != "batch":
        return f"cluster.plan_for is {cluster.plan_for}: the job does not go to AWS Batch"
    if context.target is None and not context.config.store.startswith("s3://"):
        return "the store is a folder, which containers cannot reach: the job stays on this machine"
    return ""


@for_batch
def check_batch_queues(context: PreflightContext) -> CheckFinding:
    """Check that all queues exist, accept jobs and have the right market, and that at least one
    accepts jobs of cluster.nodes nodes.
    """
    batch = context.config.batch
    try:
        client = batch_client(batch.region)
        queues = training_queues(batch, client, deadline_seconds=ANSWER_SECONDS)
        light = batch.light_queue or metaflow_setting("METAFLOW_BATCH_JOB_QUEUE")
        if light:
            others = describe_queues([light], client, deadline_seconds=ANSWER_SECONDS)
        else:
            others = {}
    except (CloudError, StoreError) as error:
        return _unanswered(str(error))
    problems = [state.problem for state in queues.values() if not state.usable]
    usable = {name: state for name, state in queues.items() if state.usable}
    if problems and (batch.queues or not usable):
        return failed("\n".join(problems), f"correct batch.queues, or enable the queue; {_ADOPT}")
    if not usable:
        where = client.meta.region_name
        return failed(
            f"{where} has no queue for training", f"ebbflow deploy creates them; {_ADOPT}"
        )
    refused = [state.problem for state in others.values() if not state.usable]
    if refused:
        fix = "set batch.light_queue (or METAFLOW_BATCH_JOB_QUEUE) to a queue that takes jobs"
        return failed(f"for the steps around training: {refused[0]}", fix)
    nodes = context.config.cluster.nodes
    if nodes not in ("auto", 1) and not any(state.multi_node for state in usable.values()):
        kinds = "; ".join(f"{name}: {_kinds(state)}" for name, state in usable.items())
        detail = f"cluster.nodes is {nodes}, and no queue takes several nodes ({kinds})"
        fix = (
            "add an on-demand queue of a managed EC2 environment with multi_node: true, or set "
            "cluster.nodes to 1 or"
        )
        return failed(detail, f"{fix} auto")
    return passed("\n".join([*_describe_training(usable), *_describe_light(others)]))


@for_batch
def check_batch_metaflow(context: PreflightContext) -> CheckFinding:
    """Check that Metaflow keeps its data in S3, where containers can read it, and that the
    containers have a role.
    """
    lacks = []
    fixes = []
    datastore = metaflow_setting("METAFLOW_DEFAULT_DATASTORE") or "local"
    root = metaflow_setting("METAFLOW_DATASTORE_SYSROOT_S3")
    if datastore != "s3":
        lacks.append(f"Metaflow's datastore is {datastore}, and @batch needs s3")
        fixes.append("export METAFLOW_DEFAULT_DATASTORE=s3, or give --datastore=s3 before run")
    if not root.startswith("s3://"):
        lacks.append(f"METAFLOW_DATASTORE_SYSROOT_S3 is {root or 'not set'}")
        fixes.append(
            f"export METAFLOW_DATASTORE_SYSROOT_S3={context.config.store.rstrip('/')}/metaflow"
        )
    if not (context.config.batch.job_role or metaflow_setting("METAFLOW_ECS_S3_ACCESS_IAM_ROLE")):
        lacks.append("no role is named for the containers")
        fixes.append("set batch.job_role or METAFLOW_ECS_S3_ACCESS_IAM_ROLE")
    if lacks:
        return failed("; ".join(lacks), "\n".join(fixes))
    kind = metaflow_setting("METAFLOW_DEFAULT_METADATA") or "local"
    service = metaflow_setting("METAFLOW_SERVICE_URL")
    if kind == "service" and not service:
        return failed(
            "METAFLOW_DEFAULT_METADATA is service, and no address is given",
            "set METAFLOW_SERVICE_URL",
        )
    if kind == "service":
        metadata = f"metadata by {service}"
    else:
        metadata = f"metadata {kind}"
    return passed(f"datastore {root}; {metadata}")


@for_batch
def check_batch_clock(context: PreflightContext) -> CheckFinding:
    """Check that this machine's clock agrees with AWS's.

    Batch rejects requests if they differ by over 5 minutes.
    """
    url = aws_client("batch", context.config.batch.region).meta.endpoint_url
    return compare_clock(url, warned=_AWS_REFUSES_SECONDS, refused=_AWS_REFUSES_SECONDS)


def _metaflow_image() -> str:
    """Return the container image that Metaflow is configured to use.

    If the image's name has no registry, the configured registry is put before it.
    """
    image, registry = (
        metaflow_setting(f"METAFLOW_BATCH_CONTAINER_{part}") for part in ("IMAGE", "REGISTRY")
    )
    host, slash, _ = image.partition("/")
    named = bool(slash) and ("." in host or ":" in host or host == "localhost")
    if named or not registry or not image:
        return image
    return f"{registry.rstrip('/')}/{image}"


def _skip_if_stand_in(client: Any, what: str) -> None:
    if not is_amazons(client):
        raise _Skip(f"{client.meta.endpoint_url} has no {what}, and is not Amazon's")


def _bucket(context: PreflightContext) -> tuple[str, str]:
    if not context.config.store.startswith("s3://"):
        raise _Skip("the store is a folder")
    return split_uri(context.config.store)


def _role(context: PreflightContext) -> str:
    arn = context.config.batch.job_role or metaflow_setting("METAFLOW_ECS_S3_ACCESS_IAM_ROLE")
    if not _ROLE.fullmatch(arn):
        raise _Skip(
            f"{arn} is no role's ARN"
            if arn
            else "no role is named; the check aws-metaflow says more"
        )
    return arn


def _client(service: str, context: PreflightContext, region: str | None = None) -> Any:
    return sibling_client(service, batch_client(context.config.batch.region), region)


def _patience() -> RequestDeadline:
    return RequestDeadline.after(ANSWER_SECONDS)


def _describe_training(usable: Mapping[str, QueueState]) -> list[str]:
    lines = []
    for name, state in usable.items():
        if state.multi_node:
            nodes = ", several nodes"
        else:
            nodes = ""
        lines.append(
            f"{name}: {_kinds(state)} ({', '.join(state.instance_types) or 'any type'}){nodes}"
        )
    waiting = ", ".join(name for name, state in usable.items() if not state.cancels_after_seconds)
    if waiting:
        lines.append(
            f"no jobStateTimeLimitActions on {waiting}: a job that waits there is ended by "
            "Ebbflow only"
        )
    wide = [
        name
        for name, state in usable.items()
        if state.multi_node and not state.places_nodes_together
    ]
    if wide:
        lines.append(
            f"no placement group and several subnets on {', '.join(wide)}: nodes may lie in "
            "different zones"
        )
    return lines


def _describe_light(light: Mapping[str, QueueState]) -> list[str]:
    """Return warnings about the queues for the steps before and after training.

    A warning names a queue that Metaflow cannot use or that wastes accelerators. Such queues do not
    fail the check, because `--with cloud` sends no step to them.
    """
    role = "METAFLOW_ECS_FARGATE_EXECUTION_ROLE"
    notes = []
    for name, state in light.items():
        if state.fargate and not metaflow_setting(role):
            notes.append(
                f"{name}, for the steps around training, is Fargate: Metaflow runs none there "
                f"without {role}"
            )
        if has_gpus_only(state):
            notes.append(
                f"{name}, for the steps around training: all of its machines that hold one have "
                "GPUs or other accelerators, paid for and not used "
                f"({', '.join(state.instance_types)}); set batch.light_queue to a queue of small "
                "machines"
            )
    return notes


def _kinds(state: QueueState) -> str:
    return ", ".join(
        dict.fromkeys(
            environment.kind or "unmanaged"
            for environment in state.compute_environments
            if environment.usable
        )
    )


def _unanswered(said: str) -> CheckFinding:
    """Return the finding for a failed request to list the queues. `said` is the error message.

    On the launching machine the check fails, because Metaflow makes the same request before each
    job. In a Batch container the check is skipped, because a container submits no jobs and its role
    may lack the permission.
    """
    if "AWS_BATCH_JOB_ID" in os.environ:
        return skipped(f"{said}; the launching machine has checked the queues")
    detail, _, fix = said.partition("; fix: ")
    return failed(detail, fix or "check batch.region, and that AWS Batch can be reached from here")
