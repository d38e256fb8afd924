"""Jobs of AWS Batch: make a client, describe and terminate jobs, and classify why a job ended."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ebbflow.core.errors import CloudError
from ebbflow.infra.aws.answers import JobDetail
from ebbflow.infra.aws.calls import RequestDeadline, aws_client, call_aws, describe_in_parts

if TYPE_CHECKING:
    from botocore.client import BaseClient


# Ebbflow's reasons begin with these words, which distinguish its terminations from those of users
# and of Metaflow.
NEVER_STARTED = "Ebbflow: did not start in time"  # it waited for capacity
NOT_MADE = "Ebbflow: its container was not made in time"  # it had capacity
TERMINATED = "Ebbflow: ended"

Cause = Literal[
    "reclaimed", "user_code", "never_started", "not_made", "terminated", "ended", "unknown"
]
"""Why a job ended.

- reclaimed: the machine was reclaimed or lost. Batch reports a Spot reclaim and a broken host alike.
- user_code: the container exited by itself, or its image cannot be pulled; another machine would not help. A drain
  after a notice looks the same to Batch; the job's event log distinguishes them.
- never_started: there was no capacity, a setting was wrong, or a container could not be created.
- not_made: there was capacity, but no container was created in time.
- terminated: a call or the time limit ended the job.
- ended: the job succeeded.
- unknown: the job still runs, or Batch's texts match no known cause.
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)
Terminator = Literal["ebbflow", "limit", "operator", "unknown"]
"""Who ended a job whose cause is "terminated".

- ebbflow: the launcher or the supervisor of the job.
- limit: its own time limit.
- operator: a person or program outside of the run, such as `aws batch terminate-job`.
- unknown: the backend does not tell.
"""
FINISHED = ("SUCCEEDED", "FAILED")

_SECONDS = 20.0
_NODES_SECONDS = 5.0

# AWS's messages, from its user guide and from users' reports.
# https://docs.aws.amazon.com/batch/latest/userguide/job_retries.html
# A lost EC2 machine, as AWS's guide matches it, or an interrupted task of Fargate Spot.
_RECLAIMED = re.compile(r"Host EC2\b|Your Spot Task was interrupted")
_TOO_LONG = re.compile(r"Job attempt duration exceeded timeout")
# Metaflow ends a job both when its own process dies and at `batch kill`.
_ENDED_BY_METAFLOW = re.compile(r"Metaflow initiated job termination", re.IGNORECASE)
_ENDED_BY_OPERATOR = re.compile(r"Operator\b|User (requested|initiated)\b", re.IGNORECASE)
# https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable.html
_NO_PLACE = re.compile(
    r"(Canceled by JobStateTimeLimit action due to reason: )?(CAPACITY|MISCONFIGURATION):|"
    r"Canceled by JobStateTimeLimit|ACTION_REQUIRED"
)
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/stopped-task-error-codes.html
_NO_IMAGE = re.compile(
    r"CannotPull(ECR)?ContainerError.*(not found|manifest unknown|does not exist|access denied|"
    r"invalid reference|no matching manifest|unauthorized)",
    re.IGNORECASE | re.DOTALL,
)
_NO_CONTAINER = re.compile(
    r"(CannotPull(ECR)?Container|CannotStartContainer|CannotCreateContainer|CannotInspectContainer|"
    r"ResourceInitialization|DockerTimeout|CannotCreateVolume)Error|Task failed to start"
)
_EXITED = re.compile(r"Essential container in task exited")
_OUT_OF_MEMORY = re.compile(r"OutOfMemory(Error)?\b")
_KILLED = (137, 143)  # 128 + SIGKILL, SIGTERM; the sender is unknown


@dataclass(frozen=True, kw_only=True)
class BatchAttempt:
    """A job as AWS Batch describes it.

    Times (Unix seconds) are by Batch's clock; None if unknown or in the future.
    """

    job_id: str
    job_name: str
    queue: str  # name of the job queue
    nodes: int
    status: str  # Batch's status, such as "RUNNING" or "FAILED"
    created_utc: float | None
    started_utc: float | None
    stopped_utc: float | None
    exit_code: int | None  # exit code of the main container, None if Batch gives none
    reason: str  # texts of Batch and of the containers, joined by "; "; "" if there are none
    cause: Cause
    node_times: tuple[
        tuple[float | None, float | None], ...
    ] = ()  # (started, stopped) of ended nodes
    terminated_by: Terminator | None = None  # None unless the cause is "terminated"

    @property
    def finished(self) -> bool:
        return self.status in FINISHED


def batch_client(region: str | None = None) -> BaseClient:
    """Make a client for AWS Batch (see `aws_client`). Raises CloudRefused."""
    return aws_client("batch", region)


def cancel_job(
    job_id: str,
    reason: str,
    client: BaseClient,
    *,
    words: str = NEVER_STARTED,
    deadline_seconds: float = 20.0,
) -> None:
    """Terminate a Batch job in any state. A job that has already ended is not changed.

    words: NEVER_STARTED, NOT_MADE or TERMINATED. Batch records these words, followed by `reason`,
    as the job's status reason. `describe_attempts` derives the job's `Cause` from them. Raises
    CloudError if Batch rejects the request.
    """
    text = f"{words}: {reason}"
    # TerminateJob also cancels a job before STARTING; CancelJob silently ignores later states:
    # https://docs.aws.amazon.com/batch/latest/APIReference/API_CancelJob.html
    call_aws(
        client,
        "terminate_job",
        RequestDeadline.after(deadline_seconds),
        jobId=job_id,
        reason=text[:1024],
    )


def describe_attempts(
    job_ids: Sequence[str], client: BaseClient, *, deadline_seconds: float = _SECONDS
) -> dict[str, BatchAttempt]:
    """Return descriptions of Batch jobs by job id, each with the cause of the job's end.

    Raises CloudError.

    Batch deletes a job some days after its end. The result lacks deleted jobs. The nodes of an
    ended multi-node job are read too, because only their descriptions show a lost machine and each
    node's times.
    """
    deadline = RequestDeadline.after(deadline_seconds)
    jobs = _describe(list(dict.fromkeys(job_ids)), client, deadline)
    gangs = [job for job in jobs.values() if job.get("status") in FINISHED and _nodes(job) > 1]
    children = []
    for job in gangs:
        children += _child_ids(job)
    parts: dict[str, JobDetail] = {}
    with contextlib.suppress(CloudError):  # the job's own description is enough
        parts = _describe(
            children, client, RequestDeadline.after(min(_NODES_SECONDS, deadline.left()))
        )
    found = {}
    for job_id, job in jobs.items():
        own = [parts[name] for name in _child_ids(job) if name in parts]
        found[job_id] = _attempt(job, own)
    return found


def _child_ids(job: JobDetail) -> list[str]:
    """Return the ids of a multi-node job's nodes, which are jobs of their own in Batch."""
    return [f"{job['jobId']}#{index}" for index in range(_nodes(job))]


def classify_cause(  # noqa: PLR0911 (one return for each cause, in the order of their precedence)
    status: str,
    reasons: Sequence[str],
    exit_code: int | None,
    *,
    started: bool,
    ended_by_call: bool = False,
    main_alone: bool = False,
) -> Cause:
    """Return why a job ended, as far as Batch's status and messages show it.

    Args:
        reasons: Batch's messages about the job, its containers and its nodes.
        started: the job reached a machine and started there.
        ended_by_call: a call of TerminateJob or CancelJob ended the job.
        main_alone: the job has several nodes, and only the main node's end is known. Another node
            may have been lost.
    """
    text = "\n".join(reasons)
    if status != "FAILED":
        if status == "SUCCEEDED":
            return "ended"
        return "unknown"
    if _RECLAIMED.search(text):
        return "reclaimed"
    if NEVER_STARTED in text or (_NO_PLACE.search(text) and not started):
        return "never_started"
    if NOT_MADE in text and not started:
        return "not_made"
    if TERMINATED in text or _TOO_LONG.search(text) or _ENDED_BY_METAFLOW.search(text):
        return "terminated"
    if ended_by_call or _ENDED_BY_OPERATOR.search(text):
        return "terminated"
    if _NO_IMAGE.search(text):
        return "user_code"
    if _NO_CONTAINER.search(text):
        return "never_started"
    if _OUT_OF_MEMORY.search(text):
        return "user_code"
    if _EXITED.search(text) and exit_code not in _KILLED and not main_alone:
        return "user_code"
    return "unknown"


def find_terminator(reasons: Sequence[str]) -> Terminator:
    """Return who ended a terminated job.

    TerminateJob's reason becomes the job's status reason
    (https://docs.aws.amazon.com/batch/latest/APIReference/API_TerminateJob.html). Calls of Ebbflow,
    of Metaflow and of Batch's timeout have texts of their own; any other is an operator's.
    """
    text = "\n".join(reasons)
    if TERMINATED in text or NOT_MADE in text:  # of a gang, another node may have started
        return "ebbflow"
    if _TOO_LONG.search(text):
        return "limit"
    if _ENDED_BY_METAFLOW.search(text):
        return "unknown"
    return "operator"


def _describe(
    job_ids: Sequence[str], client: BaseClient, deadline: RequestDeadline
) -> dict[str, JobDetail]:
    jobs = describe_in_parts(client, "describe_jobs", "jobs", job_ids, deadline, shape=JobDetail)
    found = {job["jobId"]: job for job in jobs}
    return {job_id: found[job_id] for job_id in job_ids if job_id in found}


def _attempt(job: JobDetail, parts: Sequence[JobDetail]) -> BatchAttempt:
    reasons = _reasons(job)
    for part in parts:
        reasons += _reasons(part)
    reasons = list(dict.fromkeys(reasons))
    code = _exit_code(job)
    if code is None and parts:  # the exit code of the main node is the job's
        main = (job.get("nodeProperties") or {}).get("mainNode", 0)
        code = next(
            (_exit_code(part) for part in parts if part["jobId"].endswith(f"#{main}")), None
        )
    known = {
        part["jobId"]: (_seconds(part.get("startedAt")), _seconds(part.get("stoppedAt")))
        for part in parts
    }
    nodes = range(_nodes(job) if parts else 0)
    times = tuple(known.get(f"{job['jobId']}#{index}", (None, None)) for index in nodes)
    # A missing time is the first start or the last stop of the job's nodes.
    first = min((start for start, _ in times if start is not None), default=None)
    last = max((stop for _, stop in times if stop is not None), default=None)
    started = _seconds(job.get("startedAt")) or first
    stopped = _seconds(job.get("stoppedAt")) or last
    status = str(job.get("status", ""))
    cause = classify_cause(
        status,
        reasons,
        code,
        started=started is not None,
        ended_by_call=bool(job.get("isTerminated") or job.get("isCancelled")),
        main_alone=_nodes(job) > 1 and not parts,
    )
    return BatchAttempt(
        job_id=job["jobId"],
        job_name=job.get("jobName", ""),
        queue=str(job.get("jobQueue", "")).rpartition("/")[2],
        nodes=_nodes(job),
        status=status,
        created_utc=_seconds(job.get("createdAt")),
        started_utc=started,
        stopped_utc=stopped,
        exit_code=code,
        reason="; ".join(" ".join(text.split()) for text in reasons),
        cause=cause,
        node_times=times,
        terminated_by=find_terminator(reasons) if cause == "terminated" else None,
    )


def _reasons(job: JobDetail) -> list[str]:
    last = (job.get("attempts") or [{}])[-1]
    reasons = []
    for description in (job, last):
        reasons.append(description.get("statusReason"))
        reasons.append((description.get("container") or {}).get("reason"))
    return [reason for reason in reasons if reason]


def _exit_code(job: JobDetail) -> int | None:
    last = (job.get("attempts") or [{}])[-1]
    codes = [(state.get("container") or {}).get("exitCode") for state in (job, last)]
    return next((code for code in codes if code is not None), None)


def _nodes(job: JobDetail) -> int:
    return int((job.get("nodeProperties") or {}).get("numNodes") or 1)


def _seconds(milliseconds: int | None) -> float | None:
    if not milliseconds:
        return None
    return milliseconds / 1000
