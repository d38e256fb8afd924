"""The section `batch`: what an account's AWS Batch offers a job, and how a job is sent there."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ebbflow.infra.config.section import Count, Section


class QueueConfig(Section):
    """A job queue that training may go to. The market is the queue's: Batch knows it of compute environments only."""

    name: str = Field(description="the job queue's name or ARN")
    market: Literal["spot", "on_demand"] = Field(description="what its compute environments are made of")
    instance_types: list[str] = Field([], description="by name or prefix (g5, p4d.24xlarge); empty: any")
    multi_node: bool = Field(
        False, description="takes jobs of several nodes; Batch runs them on-demand only, in managed EC2 environments"
    )


class BatchConfig(Section):
    """AWS Batch. `ebbflow adopt` writes this section from what an account has."""

    queues: list[QueueConfig] = Field(
        [], description="where training may go; empty: the queues of the account, as they are found at launch"
    )
    light_queue: str | None = Field(
        None,
        description="for the steps around training; null: METAFLOW_BATCH_JOB_QUEUE, else the smallest machines",
    )
    image: str | None = Field(None, description="of the containers; null: METAFLOW_BATCH_CONTAINER_IMAGE")
    region: str | None = Field(None, description="of queues and jobs; null: as every AWS tool finds it")
    efa_interfaces: int = Field(0, ge=0, description="EFA devices of each node of a job of several nodes; 0: none")
    shared_memory_mib: Count = Field(4096, description="/dev/shm of a container, which NCCL and loaders use")
    tags: dict[str, str] = Field({}, description="put on every job, for cost allocation")
    runnable_minutes: float = Field(
        30.0, gt=0, description="a job may wait for capacity this long before it is placed elsewhere"
    )
    job_role: str | None = Field(None, description="ARN of the containers' role; null: METAFLOW_ECS_S3_ACCESS_IAM_ROLE")
    metadata_fixes: Literal["auto", "refuse"] = Field(
        "auto",
        description="what Metaflow gets wrong on Batch without a metadata service: mend what is known, or refuse",
    )
