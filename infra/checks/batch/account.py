"""Checks of the account that a job is to run in: role, rights, bucket and image. All of them only read."""

from __future__ import annotations

import re
from typing import Any

from ebbflow.infra.aws.account import (
    CONTAINERS,
    bucket_state,
    companion,
    denied_actions,
    ecr_region,
    image_exists,
    metaflow_setting,
    role_state,
)
from ebbflow.infra.aws.calls import Patience, is_amazons
from ebbflow.infra.batch import batch_client
from ebbflow.infra.checks.batch.queues import ANSWER_SECONDS, why_not_asked
from ebbflow.infra.errors import CloudError, StoreError
from ebbflow.infra.preflight import Finding, PreflightContext
from ebbflow.infra.store.s3 import split_uri

# What a node does in the store, by action and what it is done to.
_OBJECT_ACTIONS = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")
_BUCKET_ACTIONS = ("s3:ListBucket", "s3:ListBucketMultipartUploads")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/.+")


def check_batch_role(context: PreflightContext) -> Finding:
    """The role of the containers exists, and containers may take it on."""
    if reason := why_not_asked(context):
        return Finding.skipped(reason)
    arn = _role(context)
    if not _ROLE.fullmatch(arn):
        return Finding.skipped(_no_role(arn))
    try:
        client = _client("iam", context)
        role = role_state(arn, client, _patience())
    except (CloudError, StoreError) as error:
        return Finding.skipped(str(error))
    if role is None and not is_amazons(client):
        return Finding.skipped(f"{client.meta.endpoint_url} knows no role {arn}, and need not: it is not Amazon's")
    if role is None:
        return Finding.failed(f"there is no role {arn}", "correct batch.job_role or METAFLOW_ECS_S3_ACCESS_IAM_ROLE")
    if CONTAINERS not in role.trusted:
        trusted = ", ".join(role.trusted) or "no service"
        return Finding.failed(f"{arn} trusts {trusted}", f"let its trust policy allow sts:AssumeRole to {CONTAINERS}")
    return Finding.passed(f"{arn} can be taken on by containers")


def check_batch_rights(context: PreflightContext) -> Finding:
    """The role may do in the store what a node does there, by IAM's simulation of its own policies."""
    if reason := why_not_asked(context):
        return Finding.skipped(reason)
    arn = _role(context)
    if not _ROLE.fullmatch(arn):
        return Finding.skipped(_no_role(arn))
    if not context.config.store.startswith("s3://"):
        return Finding.skipped("the store is a folder")
    bucket, prefix = split_uri(context.config.store)
    objects = f"arn:aws:s3:::{bucket}/{prefix + '/' if prefix else ''}*"
    try:
        client, patience = _client("iam", context), _patience()
        denied = denied_actions(arn, _OBJECT_ACTIONS, [objects], client, patience)
        denied += denied_actions(arn, _BUCKET_ACTIONS, [f"arn:aws:s3:::{bucket}"], client, patience)
    except (CloudError, StoreError) as error:
        return Finding.skipped(str(error))
    if denied:
        detail = (
            f"{arn} is denied {', '.join(denied)} on {context.config.store}, unless the bucket's own policy allows it"
        )
        return Finding.failed(detail, f"allow {', '.join(denied)} on {objects} and its bucket")
    return Finding.passed(f"{arn} may read, write, list and delete in {context.config.store}")


def check_batch_bucket(context: PreflightContext) -> Finding:
    """The bucket lies in the queues' region, is closed to the public, and drops parts of unfinished uploads."""
    if reason := why_not_asked(context):
        return Finding.skipped(reason)
    if not context.config.store.startswith("s3://"):
        return Finding.skipped("the store is a folder")
    bucket, _ = split_uri(context.config.store)
    try:
        client = _client("s3", context)
        state = bucket_state(bucket, client, _patience())
    except (CloudError, StoreError) as error:
        return Finding.skipped(str(error))
    region, wrong, fixes = client.meta.region_name, [], []
    if state.region != region:
        wrong.append(f"it lies in {state.region}, the queues in {region}: each byte between them is paid for")
        fixes.append(f"use a bucket of {region}")
    if not state.public_access_blocked:
        wrong.append("public access is not blocked")
        fixes.append(
            f"aws s3api put-public-access-block --bucket {bucket} --public-access-block-configuration "
            "BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true"
        )
    if state.abort_days is None:
        wrong.append("parts of unfinished uploads stay, and are paid for, for ever")
        fixes.append("add a lifecycle rule with AbortIncompleteMultipartUpload, as infra/aws/template.yaml has it")
    if wrong:
        return Finding.failed(f"{bucket}: {'; '.join(wrong)}", "\n".join(fixes))
    return Finding.passed(
        f"{bucket}: in {region}, not public, unfinished uploads dropped after {state.abort_days} days"
    )


def check_batch_image(context: PreflightContext) -> Finding:
    """The image of the containers exists, where it is one of ECR."""
    if reason := why_not_asked(context):
        return Finding.skipped(reason)
    image = context.config.batch.image or _metaflow_image()
    if not image:
        return Finding.skipped("no image is named: Metaflow's default holds no torch; set batch.image")
    region = ecr_region(image)
    if region is None:
        return Finding.skipped(f"{image} is not in ECR: its registry is not asked")
    try:
        client = _client("ecr", context, region)
        there = image_exists(image, client, _patience())
    except (CloudError, StoreError) as error:
        return Finding.skipped(str(error))
    if not there and not is_amazons(client):
        return Finding.skipped(f"{client.meta.endpoint_url} has no image {image}, and need not: it is not Amazon's")
    if not there:
        return Finding.failed(f"there is no image {image}", "push it (docs/aws.md), or correct batch.image")
    return Finding.passed(f"{image} is there")


def _metaflow_image() -> str:
    """As Metaflow puts it together: an image that names no registry gets the one of its setting."""
    image, registry = (metaflow_setting(f"METAFLOW_BATCH_CONTAINER_{part}") for part in ("IMAGE", "REGISTRY"))
    host, slash, _ = image.partition("/")
    named = bool(slash) and ("." in host or ":" in host or host == "localhost")
    return image if named or not registry or not image else f"{registry.rstrip('/')}/{image}"


def _no_role(arn: str) -> str:
    return f"{arn} is no role's ARN" if arn else "no role is named; the check aws-metaflow says more"


def _role(context: PreflightContext) -> str:
    return context.config.batch.job_role or metaflow_setting("METAFLOW_ECS_S3_ACCESS_IAM_ROLE")


def _client(service: str, context: PreflightContext, region: str | None = None) -> Any:
    return companion(service, batch_client(context.config.batch.region), region)


def _patience() -> Patience:
    return Patience.of(ANSWER_SECONDS)
