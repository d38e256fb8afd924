"""Settlement of attempts on AWS Batch: record in the job's events how and when each Batch job
ended.

A reclaimed machine cannot record its own end, so the bill would miss part of its cost. Batch knows
when each of its jobs started and stopped, and why it stopped.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Union

from ebbflow.core.errors import CloudRefused, InfraError
from ebbflow.core.event_log import EventLog
from ebbflow.core.event_payloads import (
    BatchAttemptPayload,
    BatchSubmittedPayload,
    NodeStartedPayload,
    PlacedPayload,
)
from ebbflow.core.events import (
    BATCH_ATTEMPT,
    Event,
    is_event,
    read_events,
    select_events,
)
from ebbflow.core.launchers import check_run_claim
from ebbflow.core.preflight import Check, CheckFinding, PreflightContext, failed, passed
from ebbflow.cost.capacity import Placement, batch_attempt_data
from ebbflow.cost.capacity.placement import read_placement
from ebbflow.flows.job import Job
from ebbflow.infra.batch import (
    NEVER_STARTED,
    TERMINATED,
    BatchAttempt,
    batch_client,
    cancel_job,
    describe_attempts,
)
from ebbflow.infra.checks.batch import ANSWER_SECONDS, for_batch
from ebbflow.infra.instance import find_own_job, is_cluster_id
from ebbflow.infra.kubernetes import cluster as kubernetes

if TYPE_CHECKING:
    from botocore.client import BaseClient

# Client of AWS Batch, or of a Kubernetes cluster
Backend = Union["BaseClient", kubernetes.Cluster]
# Short, because the container of the step `report` may not reach Batch. The launcher tries again.
_REPORT_SECONDS = 6.0
# Batch may report a job's end some seconds before its time and reason.
_WHOLE_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_LOOK_ALL_SECONDS = 20.0

_CHECK_SECONDS = 2 * ANSWER_SECONDS + 1.0
_TITLE = "no job was left behind in AWS Batch"

_LEFTOVER_SECONDS = 90.0


def _say(text: str) -> None:
    print(f"batch: {text}", file=sys.stderr, flush=True)


def settle_attempts(
    job: Job,
    events: Sequence[Event],
    client: Backend,
    log: EventLog,
    *,
    deadline_seconds: float = 20.0,
    say: Callable[[str], None] = _say,
) -> list[Event]:
    """Record the end of every Batch job of this training job, terminate those that still run, and
    return the new events.

    Each end becomes a `batch_attempt` event. If Batch has no end time or reason yet, the event is
    incomplete, and a later call adds a complete event. Call this only while no attempt should run.
    A Batch job that still runs was then left behind by its submitter, and would cost money while
    the next attempt runs.

    Raises:
        CloudError: Batch does not answer.
        JobIsRunning: Another launcher has taken over the job, and running Batch jobs may belong to
            it.
    """
    unsettled = unsettled_jobs(events)
    half_told = _incomplete_jobs(events)
    submitted = half_told | unsettled
    if not submitted:
        return []
    check_run_claim(job.store, job.name)
    settled = []
    found: dict[str, tuple[BatchAttempt, Backend]] = {}
    for there, known in _by_region(submitted, events, client):
        wanted = [job_id for job_id in known if job_id in unsettled]
        told = _describe_when_complete(list(known), wanted, there, deadline_seconds)
        found |= {job_id: (attempt, there) for job_id, attempt in told.items()}
    for job_id, (attempt, there) in found.items():
        event = submitted[job_id]
        if attempt.finished:
            if job_id in half_told and not _is_complete(attempt):
                continue
            placement = find_placement(event, events)
            settled.append(log.emit(BATCH_ATTEMPT, **batch_attempt_data(attempt, placement)))
        else:
            # The job ended meanwhile; the next call records it
            with contextlib.suppress(CloudRefused):
                why = f"run {job.run} goes on with job {job.name}"
                if attempt.started_utc is None:
                    words = NEVER_STARTED
                else:
                    words = TERMINATED
                # It keeps no record of pods that it deleted
                if isinstance(there, kubernetes.Cluster):
                    ended = kubernetes.end_attempt(job_id, there, deadline_seconds)
                    data = batch_attempt_data(ended, find_placement(event, events))
                    settled.append(log.emit(BATCH_ATTEMPT, **data))
                else:
                    cancel_job(job_id, why, there, words=words, deadline_seconds=deadline_seconds)
                say(
                    f"{_describe_left_behind(attempt, event)} was left behind: terminated, since "
                    f"{why}"
                )
    return settled


def unsettled_jobs(events: Sequence[Event]) -> dict[str, Event]:
    """Return {job id: event} for all Batch jobs whose end is not recorded.

    The event is the one that recorded the submission. If no such event exists, it is the agent's
    NODE_STARTED event.
    """
    settled = {event.payload.job_id for event in select_events(events, BatchAttemptPayload)}
    return {
        job_id: event for job_id, event in _submitted_jobs(events).items() if job_id not in settled
    }


@for_batch
def check_left_behind(context: PreflightContext) -> CheckFinding:
    """Check that no Batch job of a killed launcher is still running and costing money."""
    if context.job is None:
        return passed("a new job has no Batch jobs")
    job = Job(name=context.job, run="", config=context.config, request_seconds=ANSWER_SECONDS)
    events = read_events(job.store)
    submitted = unsettled_jobs(events)
    found: dict[str, BatchAttempt] = {}
    if submitted:
        client = batch_client(context.config.batch.region)
        found = _describe_all(submitted, events, client, ANSWER_SECONDS)
    left = [
        _describe_left_behind(attempt, submitted[attempt.job_id])
        for attempt in found.values()
        if not attempt.finished
    ]
    if not left:
        return passed(f"AWS Batch runs nothing of job {context.job}")
    return failed(
        "\n".join(
            f"{attempt} is running, but no process of this run waits for it" for attempt in left
        ),
        "nothing to do: it is terminated before the next attempt. If another launcher runs this "
        "job, stop one",
    )


def find_placement(submitted: Event, events: Sequence[Event]) -> Placement | None:
    """Return the newest placement recorded for the run, attempt, step and task of a Batch job, or
    None.

    Times are not compared, because the clock of an agent's machine may be minutes ahead. Step and
    task are not compared for an agent's event, which has neither.
    """
    placed = [
        event
        for event in select_events(events, PlacedPayload)
        if (event.run, event.attempt) == (submitted.run, submitted.attempt)
    ]
    if is_event(submitted, BatchSubmittedPayload):
        task = (submitted.step, submitted.payload.task)
        placed = [event for event in placed if (event.step, event.payload.task) == task]
    if placed:
        return read_placement(placed[-1].payload)
    return None


def settle_for_report(job: Job) -> None:
    """Record how all attempts ended, for the job's report.

    If Batch does not answer, only print a message.
    """
    events = read_events(job.store)
    if not {**unsettled_jobs(events), **_incomplete_jobs(events)}:
        return
    try:
        client = _client(job, unsettled_jobs(events) or _incomplete_jobs(events))
        with job.events("settle") as log:
            settle_attempts(job, events, client, log, deadline_seconds=_REPORT_SECONDS)
    except InfraError as error:
        print(
            "the end of the last attempt is unknown yet, so the bill uses its agents' records: "
            f"{error}"
        )


def end_leftovers(job: Job, say: Callable[[str], None]) -> None:
    """Terminate Batch jobs that a run left behind, and record their ends for the bill, within 90 s.

    Call this only while no launcher of the job is alive. New events have the run id of `job`. If
    Batch does not answer, print a message. The next placement then terminates these jobs. Raises
    StoreError if the events cannot be read.
    """
    events = read_events(job.store)
    if not unsettled_jobs(events):
        return
    limit = time.monotonic() + _LEFTOVER_SECONDS
    try:
        client = _client(job, unsettled_jobs(events))
        with job.events("leftovers") as log:
            while True:
                seconds = max(limit - time.monotonic(), _LOOK_ALL_SECONDS)
                events += settle_attempts(job, events, client, log, deadline_seconds=seconds)
                known = _describe_all(unsettled_jobs(events), events, client, _LOOK_ALL_SECONDS)
                left = [job_id for job_id, attempt in known.items() if not attempt.finished]
                if not left or time.monotonic() > limit:
                    break
                time.sleep(_LOOK_SECONDS)
            events += settle_attempts(job, events, client, log)
        if left:
            say(f"not ended within {_LEFTOVER_SECONDS:g} s and still paid for: {', '.join(left)}")
    except InfraError as error:
        say(f"cannot check for jobs left behind: {error}")


def _by_region(
    submitted: Mapping[str, Event], events: Sequence[Event], client: Backend
) -> list[tuple[Backend, dict[str, Event]]]:
    """Group the Batch jobs by region, and return each region's client with its jobs.

    `client` is a Kubernetes cluster, or a Batch client whose region applies to jobs without a known
    region.
    """
    submitted = {
        job_id: event
        for job_id, event in submitted.items()
        if is_cluster_id(job_id) is isinstance(client, kubernetes.Cluster)
    }
    if isinstance(client, kubernetes.Cluster):
        return [(client, dict(submitted))]
    found: dict[str, dict[str, Event]] = {}
    for job_id, event in submitted.items():
        region = getattr(find_placement(event, events), "region", None) or client.meta.region_name
        found.setdefault(region, {})[job_id] = event
    return [
        (client if region == client.meta.region_name else batch_client(region), known)
        for region, known in found.items()
    ]


def _describe_all(
    submitted: Mapping[str, Event], events: Sequence[Event], client: Backend, seconds: float
) -> dict[str, BatchAttempt]:
    found: dict[str, BatchAttempt] = {}
    for there, known in _by_region(submitted, events, client):
        found |= _describe(list(known), there, seconds)
    return found


def _describe_when_complete(
    job_ids: Sequence[str], wanted: Sequence[str], client: Backend, deadline_seconds: float
) -> dict[str, BatchAttempt]:
    """Return descriptions of Batch jobs, after waiting up to 10 s for complete descriptions.

    The wait ends when all ended jobs in `wanted` have an end time and a reason.
    """
    limit = time.monotonic() + min(_WHOLE_SECONDS, deadline_seconds / 2)
    while True:
        found = _describe(job_ids, client, deadline_seconds)
        ended = [found[job_id] for job_id in wanted if job_id in found and found[job_id].finished]
        if (
            all(_is_complete(attempt) for attempt in ended)
            or time.monotonic() + _LOOK_SECONDS > limit
        ):
            return found
        time.sleep(_LOOK_SECONDS)


def _client(job: Job, job_ids: Iterable[str]) -> Backend:
    """Return a client for the backend of these attempts. Raises CloudError."""
    pods = any(is_cluster_id(identity) for identity in job_ids)
    if pods:
        return kubernetes.open_cluster()
    return batch_client(job.config.batch.region)


def _describe(
    job_ids: Sequence[str], client: Backend, deadline_seconds: float
) -> dict[str, BatchAttempt]:
    if isinstance(client, kubernetes.Cluster):
        return kubernetes.describe_attempts(job_ids, client, now=time.time())
    return describe_attempts(job_ids, client, deadline_seconds=deadline_seconds)


def _is_complete(record: BatchAttempt | BatchAttemptPayload) -> bool:
    """Return whether the record of an ended job has its end time (if it ever ran) and its reason
    (if it failed).
    """
    is_timed = record.started_utc is None or record.stopped_utc is not None
    return is_timed and (record.status != "FAILED" or bool(record.reason))


def _incomplete_jobs(events: Sequence[Event]) -> dict[str, Event]:
    """Return {job id: event} for all Batch jobs whose end is recorded without time or reason.

    Needs events ordered by time.
    """
    last = {
        event.payload.job_id: event.payload for event in select_events(events, BatchAttemptPayload)
    }
    known = _submitted_jobs(events)
    return {
        job_id: event
        for job_id, event in known.items()
        if job_id in last and not _is_complete(last[job_id])
    }


def _submitted_jobs(events: Sequence[Event]) -> dict[str, Event]:
    """Return {job id: event} for all submitted AWS Batch and Kubernetes jobs except this process's
    own.
    """
    found: dict[str, Event] = {}
    for event in select_events(events, BatchSubmittedPayload):
        if event.payload.job_id:
            found.setdefault(_without_index(event.payload.job_id), event)
    for event in select_events(events, NodeStartedPayload):
        if event.payload.batch_job_id:
            found.setdefault(_without_index(event.payload.batch_job_id), event)
    own_job = find_own_job()
    if own_job is not None:
        # It runs, and must not be ended: a step of a user's flow trains and reports in one job
        found.pop(own_job, None)
    return found


def _without_index(job_id: str) -> str:
    # The id of a node is ID#INDEX
    return job_id.partition("#")[0]


def _describe_left_behind(attempt: BatchAttempt, submitted: Event) -> str:
    return f"job {attempt.job_id} of run {submitted.run} ({attempt.status} in {attempt.queue})"


CHECKS = [
    Check("aws-left-behind", _TITLE, "warning", "full", _CHECK_SECONDS, ("D15",), check_left_behind)
]
