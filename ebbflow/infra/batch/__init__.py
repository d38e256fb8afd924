"""Queues and jobs of AWS Batch, and why a job ended. botocore is imported only when a client is
made.
"""

from ebbflow.infra.batch.jobs import (
    NEVER_STARTED,
    NOT_MADE,
    TERMINATED,
    BatchAttempt,
    Cause,
    batch_client,
    cancel_job,
    describe_attempts,
)
from ebbflow.infra.batch.queues import (
    MARK,
    ComputeEnvironment,
    QueueState,
    declared_queues,
    describe_queues,
    find_marked_jobs,
    has_foreign_queues,
    has_gpus_only,
    lightest_queue,
    limit_to_queue_region,
    queues_to_plan,
    training_queues,
)
