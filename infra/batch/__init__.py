"""AWS Batch as it is asked: queues, what became of attempts, cancelling. botocore is imported when a client is made."""

from __future__ import annotations

from ebbflow.infra.batch.attempts import BatchAttempt, Cause, describe_attempts
from ebbflow.infra.batch.cancel import NEVER_STARTED, NOT_MADE, TERMINATED, cancel_job
from ebbflow.infra.batch.client import batch_client
from ebbflow.infra.batch.marked import MARK, marked_jobs
from ebbflow.infra.batch.queues import (
    ComputeEnvironment,
    QueueState,
    declared_queues,
    describe_queues,
    has_gpus_only,
    in_queues_region,
    lightest_queue,
    training_queues,
)

__all__ = [
    "MARK",
    "NEVER_STARTED",
    "NOT_MADE",
    "TERMINATED",
    "BatchAttempt",
    "Cause",
    "ComputeEnvironment",
    "QueueState",
    "batch_client",
    "cancel_job",
    "declared_queues",
    "describe_attempts",
    "describe_queues",
    "has_gpus_only",
    "in_queues_region",
    "lightest_queue",
    "marked_jobs",
    "training_queues",
]
