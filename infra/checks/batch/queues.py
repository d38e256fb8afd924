"""Checks of AWS Batch itself, for a job that is to go there: its queues, and what Metaflow is told of it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ebbflow.infra.aws.account import metaflow_setting
from ebbflow.infra.batch import batch_client, describe_queues, has_gpus_only, training_queues
from ebbflow.infra.batch.queues import QueueState
from ebbflow.infra.errors import CloudError, StoreError
from ebbflow.infra.preflight import Finding, PreflightContext

# For all answers of one check; its own deadline is a little longer.
ANSWER_SECONDS = 12.0
_ADOPT = "ebbflow adopt shows what there is"


def why_not_asked(context: PreflightContext) -> str:
    """Why nothing is asked of an AWS account for this job; "" when it is to run there."""
    cluster = context.config.cluster
    if context.target not in (None, "batch"):
        return "the job does not go to AWS Batch"
    if context.target is None and cluster.backend != "batch":
        return f"cluster.backend is {cluster.backend}: the job does not go to AWS Batch"
    if context.target is None and not context.config.store.startswith("s3://"):
        return "the store is a folder, which containers cannot reach: the job stays on this machine"
    return ""


def check_batch_queues(context: PreflightContext) -> Finding:
    """The queues exist, take jobs, are of the declared market, and one of them takes the job's number of nodes."""
    if reason := why_not_asked(context):
        return Finding.skipped(reason)
    batch = context.config.batch
    try:
        client = batch_client(batch.region)
        queues = training_queues(batch, client, deadline_seconds=ANSWER_SECONDS)
        light = batch.light_queue or metaflow_setting("METAFLOW_BATCH_JOB_QUEUE")
        others = describe_queues([light], client, deadline_seconds=ANSWER_SECONDS) if light else {}
    except (CloudError, StoreError) as error:
        return _unanswered(str(error))
    problems = [state.problem for state in queues.values() if not state.usable]
    usable = {name: state for name, state in queues.items() if state.usable}
    if problems and (batch.queues or not usable):
        return Finding.failed("\n".join(problems), f"correct batch.queues, or enable the queue; {_ADOPT}")
    if not usable:
        where = client.meta.region_name
        return Finding.failed(f"{where} has no queue that training may go to", f"ebbflow deploy makes them; {_ADOPT}")
    refused = [state.problem for state in others.values() if not state.usable]
    if refused:
        fix = "set batch.light_queue (or METAFLOW_BATCH_JOB_QUEUE) to a queue that takes jobs"
        return Finding.failed(f"for the steps around training: {refused[0]}", fix)
    return _nodes_have_a_queue(context, usable) or Finding.passed(
        "\n".join([_told(usable), *_fargate(others), *_gpus_unused(others)])
    )


def check_batch_metaflow(context: PreflightContext) -> Finding:
    """Metaflow's own records lie where containers reach them, and its containers have a role."""
    if reason := why_not_asked(context):
        return Finding.skipped(reason)
    lacks, fixes = [], []
    datastore = metaflow_setting("METAFLOW_DEFAULT_DATASTORE") or "local"
    root = metaflow_setting("METAFLOW_DATASTORE_SYSROOT_S3")
    if datastore != "s3":
        lacks.append(f"Metaflow's datastore is {datastore}, and @batch needs s3")
        fixes.append("export METAFLOW_DEFAULT_DATASTORE=s3, or give --datastore=s3 before run")
    if not root.startswith("s3://"):
        lacks.append(f"METAFLOW_DATASTORE_SYSROOT_S3 is {root or 'not set'}")
        fixes.append(f"export METAFLOW_DATASTORE_SYSROOT_S3={context.config.store.rstrip('/')}/metaflow")
    if not (context.config.batch.job_role or metaflow_setting("METAFLOW_ECS_S3_ACCESS_IAM_ROLE")):
        lacks.append("no role is named for the containers")
        fixes.append("set batch.job_role or METAFLOW_ECS_S3_ACCESS_IAM_ROLE")
    if lacks:
        return Finding.failed("; ".join(lacks), "\n".join(fixes))
    kind = metaflow_setting("METAFLOW_DEFAULT_METADATA") or "local"
    service = metaflow_setting("METAFLOW_SERVICE_URL")
    if kind == "service" and not service:
        return Finding.failed(
            "METAFLOW_DEFAULT_METADATA is service, and no address is given", "set METAFLOW_SERVICE_URL"
        )
    metadata = f"metadata by {service}" if kind == "service" else f"metadata {kind}"
    return Finding.passed(f"datastore {root}; {metadata}")


def _nodes_have_a_queue(context: PreflightContext, usable: Mapping[str, QueueState]) -> Finding | None:
    """The finding when none of the queues takes the job's nodes."""
    cluster = context.config.cluster
    if cluster.nodes == "auto" or cluster.nodes == 1 or any(state.multi_node for state in usable.values()):
        return None
    kinds = "; ".join(f"{name}: {_kinds(state)}" for name, state in usable.items())
    detail = f"cluster.nodes is {cluster.nodes}, and no queue takes several nodes ({kinds})"
    fix = "add an on-demand queue of a managed EC2 environment with multi_node: true, or set cluster.nodes to 1 or auto"
    return Finding.failed(detail, fix)


def _told(usable: Mapping[str, QueueState]) -> str:
    lines = []
    for name, state in usable.items():
        nodes = ", several nodes" if state.multi_node else ""
        lines.append(f"{name}: {_kinds(state)} ({', '.join(state.instance_types) or 'any type'}){nodes}")
    waiting = [name for name, state in usable.items() if not state.cancels_after_seconds]
    if waiting:
        lines.append(
            f"no jobStateTimeLimitActions on {', '.join(waiting)}: a job that waits there is ended by Ebbflow only"
        )
    wide = [name for name, state in usable.items() if state.multi_node and not state.keeps_nodes_near]
    if wide:
        lines.append(f"no placement group and several subnets on {', '.join(wide)}: nodes may lie in different zones")
    return "\n".join(lines)


def _fargate(light: Mapping[str, QueueState]) -> list[str]:
    """`--with cloud` sends no step there, so that this refuses nothing."""
    role = "METAFLOW_ECS_FARGATE_EXECUTION_ROLE"
    found = [name for name, state in light.items() if state.fargate and not metaflow_setting(role)]
    return [
        f"{name}, for the steps around training, is Fargate: Metaflow runs none there without {role}" for name in found
    ]


def _gpus_unused(light: Mapping[str, QueueState]) -> list[str]:
    return [
        f"{name}, for the steps around training: all of its machines that hold one have GPUs or other accelerators, "
        f"paid for and not used ({', '.join(state.instance_types)}); set batch.light_queue to a queue of small machines"
        for name, state in light.items()
        if has_gpus_only(state)
    ]


def _kinds(state: QueueState) -> str:
    return ", ".join(dict.fromkeys(one.kind or "unmanaged" for one in state.compute_environments if one.usable))


def _unanswered(said: str) -> Finding:
    """Without an answer of Batch there is no submit either: Metaflow asks the same before each job.

    But a container submits nothing, and its role need not have the right to ask.
    """
    if "AWS_BATCH_JOB_ID" in os.environ:
        return Finding.skipped(f"{said}; whoever launched the run has asked before")
    detail, _, fix = said.partition("; fix: ")
    return Finding.failed(detail, fix or "see whether AWS Batch can be reached from here, and batch.region")
