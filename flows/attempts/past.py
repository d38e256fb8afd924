"""What became of the attempts that went to AWS Batch: asked of Batch itself, and written into the job's events.

A machine that is taken away tells nobody what it cost, and Batch does: when the job began, when it stopped, and why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from cost.capacity import Placement, attempt_record
from flows.job import Job
from infra.batch import NEVER_STARTED, TERMINATED, batch_client, cancel_job, describe_attempts
from infra.errors import CloudRefused, InfraError
from infra.event_log import EventLog
from infra.events import BATCH_ATTEMPT, BATCH_SUBMITTED, NODE_STARTED, PLACED, Event, read_events

# A report should not wait long for a service that its container may not reach; the launcher asks again.
_REPORT_SECONDS = 6.0


def settle(
    job: Job, events: Sequence[Event], client: Any, log: EventLog, *, deadline_seconds: float = 20.0
) -> list[Event]:
    """The new `batch_attempt` events, in the order of their jobs: of all that have ended and that nobody has told of.

    To be asked where none of the job's attempts runs: one that still does was left behind by its submitter, in this run
    or before, and is ended, since two would spend for one. Raises CloudError.
    """
    submitted = unsettled_jobs(events)
    if not submitted:
        return []
    found = describe_attempts(list(submitted), client, deadline_seconds=deadline_seconds)
    told = []
    for job_id, attempt in found.items():
        event = submitted[job_id]
        if attempt.finished:
            told.append(log.emit(BATCH_ATTEMPT, **attempt_record(attempt, placement_of(event, events))))
        else:
            with contextlib.suppress(CloudRefused):  # it has ended in the meantime, and is told of next time
                why = f"run {job.run} goes on with job {job.name}"
                words = NEVER_STARTED if attempt.started_utc is None else TERMINATED
                cancel_job(job_id, why, client, words=words, deadline_seconds=deadline_seconds)
    return told


def unsettled_jobs(events: Sequence[Event]) -> dict[str, Event]:
    """Ids of Batch jobs that were submitted for the job and of whose end nothing is told, with who told of them: the
    submitter, else the agent within.
    """
    told = {event.data.get("job_id") for event in events if event.name == BATCH_ATTEMPT}
    found: dict[str, Event] = {}
    for name, key in ((BATCH_SUBMITTED, "job_id"), (NODE_STARTED, "batch_job_id")):
        for event in events:
            job_id = str(event.data.get(key) or "").partition("#")[0]  # of a node: ID#INDEX
            if event.name == name and job_id and job_id not in told:
                found.setdefault(job_id, event)
    return found


def placement_of(told: Event, events: Sequence[Event]) -> Placement | None:
    """Of the job that `told` is about: the last one of its run, step and task, as far as the teller knows these.

    Their clocks are not compared: an agent's machine may be minutes ahead.
    """
    known = () if told.name == NODE_STARTED else ("step", "task")
    placed = [
        event
        for event in events
        if event.name == PLACED
        and (event.run, event.attempt) == (told.run, told.attempt)
        and all(event.data.get(key) == told.data.get(key) for key in known)
    ]
    try:
        return Placement.from_json(placed[-1].data["placement"]) if placed else None
    except (KeyError, TypeError):
        return None


def settle_all(job: Job) -> None:
    """Whatever is still untold when the job's report is written. What Batch cannot tell now is said, and left out."""
    events = read_events(job.store)
    if not unsettled_jobs(events):
        return
    try:
        client = batch_client(job.config.batch.region)
        with job.events("settle") as log:
            settle(job, events, client, log, deadline_seconds=_REPORT_SECONDS)
    except InfraError as error:
        print(f"what became of the last Batch job is not known yet, so the bill has its agents' word only: {error}")
