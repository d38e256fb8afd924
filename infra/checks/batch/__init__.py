"""Checks of an AWS account, for a job that is to go to AWS Batch; skipped for every other."""

from __future__ import annotations

from ebbflow.infra.checks.batch.account import (
    check_batch_bucket,
    check_batch_image,
    check_batch_rights,
    check_batch_role,
)
from ebbflow.infra.checks.batch.queues import ANSWER_SECONDS, check_batch_metaflow, check_batch_queues
from ebbflow.infra.checks.clock import check_batch_clock
from ebbflow.infra.preflight import Check

_DEADLINE_SECONDS = ANSWER_SECONDS + 3.0  # boto3 is imported and its descriptions are read meanwhile

CHECKS: list[Check] = [
    Check(
        id="aws-queues",
        title="queues take the job",
        severity="error",
        tier="full",
        deadline_seconds=2 * _DEADLINE_SECONDS,
        symptoms=("I04",),
        run=check_batch_queues,
    ),
    Check(
        id="aws-metaflow",
        title="Metaflow is set up for AWS Batch",
        severity="warning",
        tier="full",
        deadline_seconds=10.0,
        symptoms=("A18", "A19"),
        run=check_batch_metaflow,
    ),
    Check(
        id="aws-role",
        title="containers have a role",
        severity="error",
        tier="full",
        deadline_seconds=_DEADLINE_SECONDS,
        symptoms=("A19",),
        run=check_batch_role,
    ),
    Check(
        id="aws-rights",
        title="role may use the store",
        severity="warning",
        tier="full",
        deadline_seconds=2 * _DEADLINE_SECONDS,
        symptoms=("A19",),
        run=check_batch_rights,
    ),
    Check(
        id="aws-bucket",
        title="bucket is near, closed and tidy",
        severity="warning",
        tier="full",
        deadline_seconds=_DEADLINE_SECONDS,
        symptoms=("A19", "H11"),
        run=check_batch_bucket,
    ),
    Check(
        id="aws-image",
        title="image of the containers exists",
        severity="error",
        tier="full",
        deadline_seconds=_DEADLINE_SECONDS,
        symptoms=("A01", "A18"),
        run=check_batch_image,
    ),
    Check(
        id="aws-clock",
        title="clock agrees with AWS's",
        severity="error",
        tier="full",
        deadline_seconds=10.0,
        symptoms=("A19",),
        run=check_batch_clock,
    ),
]
