"""What became of the attempts that went to AWS Batch.

A machine that is taken away tells nobody what it cost, and Batch does: when the job began, when it stopped, and why.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ebbflow.cost.capacity import Placement, batch_attempt_data
from ebbflow.flows.job import Job
from ebbflow.infra.batch import NEVER_STARTED, TERMINATED, BatchAttempt, batch_client, cancel_job, describe_attempts
from ebbflow.infra.checks.batch import ANSWER_SECONDS, skip_reason
from ebbflow.infra.errors import CloudRefused, InfraError
from ebbflow.infra.event_log import EventLog
from ebbflow.infra.events import BATCH_ATTEMPT, BATCH_SUBMITTED, NODE_STARTED, PLACED, Event, read_events
from ebbflow.infra.launchers import check_run_claim
from ebbflow.infra.preflight import Check, CheckFinding, PreflightContext

# A report should not wait long for a service that its container may not reach; the launcher asks again.
_REPORT_SECONDS = 6.0
# Batch may tell that a job has ended some seconds before it tells when, and why.
_WHOLE_SECONDS = 10.0
_LOOK_SECONDS = 1.0


def _say(text: str) -> None:
    print(f"batch: {text}", file=sys.stderr, flush=True)


def settle_attempts(
    job: Job,
    events: Sequence[Event],
    client: Any,
    log: EventLog,
    *,
    deadline_seconds: float = 20.0,
    say: Callable[[str], None] = _say,
) -> list[Event]:
    """The new `batch_attempt` events, in the order of their jobs: of all that have ended and that nobody has told of.
    Of a job that was told of before Batch knew when or why it ended there is another one as soon as Batch does.

    To be asked where none of the job's attempts runs: one that still does was left behind by its submitter, in this run
    or before, and is ended, since two would spend for one; that is said.

    Raises: CloudError; JobIsRunning where another launcher has taken the job over, whose attempt this may be.
    """
    unsettled, half_told = unsettled_jobs(events), _incomplete_jobs(events)
    submitted = {**half_told, **unsettled}
    if not submitted:
        return []
    check_run_claim(job.store, job.name)
    found = _describe_when_complete(list(submitted), list(unsettled), client, deadline_seconds)
    told = []
    for job_id, attempt in found.items():
        event = submitted[job_id]
        if attempt.finished:
            if job_id in half_told and not _is_complete(attempt.to_json()):
                continue
            told.append(log.emit(BATCH_ATTEMPT, **batch_attempt_data(attempt, find_placement(event, events))))
        else:
            with contextlib.suppress(CloudRefused):  # it has ended in the meantime, and is told of next time
                why = f"run {job.run} goes on with job {job.name}"
                words = NEVER_STARTED if attempt.started_utc is None else TERMINATED
                cancel_job(job_id, why, client, words=words, deadline_seconds=deadline_seconds)
                say(f"{_describe_left_behind(attempt, event)} was left behind: ended, since {why}")
    return told


def _describe_when_complete(
    job_ids: Sequence[str], wanted: Sequence[str], client: Any, deadline_seconds: float
) -> dict[str, BatchAttempt]:
    """What Batch tells of the jobs, asked again for a while as long as it does not tell all of one of `wanted`."""
    limit = time.monotonic() + min(_WHOLE_SECONDS, deadline_seconds / 2)
    while True:
        found = describe_attempts(job_ids, client, deadline_seconds=deadline_seconds)
        ended = [found[one] for one in wanted if one in found and found[one].finished]
        if all(_is_complete(attempt.to_json()) for attempt in ended) or time.monotonic() + _LOOK_SECONDS > limit:
            return found
        time.sleep(_LOOK_SECONDS)


def _is_complete(told: Mapping[str, Any]) -> bool:
    """Whether it is told of a job that has ended when it ended, where it ever began, and why, where it failed."""
    is_timed = told.get("started_utc") is None or told.get("stopped_utc") is not None
    return is_timed and (told.get("status") != "FAILED" or bool(told.get("reason")))


def unsettled_jobs(events: Sequence[Event]) -> dict[str, Event]:
    """Ids of Batch jobs that were submitted for the job and of whose end nothing is told, with who told of them: the
    submitter, else the agent within.
    """
    told = {event.data.get("job_id") for event in events if event.name == BATCH_ATTEMPT}
    return {job_id: event for job_id, event in _submitted_jobs(events).items() if job_id not in told}


def _incomplete_jobs(events: Sequence[Event]) -> dict[str, Event]:
    """The same of those that are told of, but not when or why they ended. events: by time."""
    last = {event.data.get("job_id"): event.data for event in events if event.name == BATCH_ATTEMPT}
    known = _submitted_jobs(events)
    return {job_id: event for job_id, event in known.items() if job_id in last and not _is_complete(last[job_id])}


def _submitted_jobs(events: Sequence[Event]) -> dict[str, Event]:
    found: dict[str, Event] = {}
    for name, key in ((BATCH_SUBMITTED, "job_id"), (NODE_STARTED, "batch_job_id")):
        for event in events:
            job_id = str(event.data.get(key) or "").partition("#")[0]  # of a node: ID#INDEX
            if event.name == name and job_id:
                found.setdefault(job_id, event)
    return found


def _describe_left_behind(attempt: BatchAttempt, told: Event) -> str:
    return f"job {attempt.job_id} of run {told.run} ({attempt.status} in {attempt.queue})"


def check_left_behind(context: PreflightContext) -> CheckFinding:
    """What a launcher left behind that was killed with all that it had started runs on, and is paid for."""
    if reason := skip_reason(context):
        return CheckFinding.skipped(reason)
    if context.job is None:
        return CheckFinding.passed("a new job has left nothing behind")
    job = Job(name=context.job, run="", config=context.config, request_seconds=ANSWER_SECONDS)
    try:
        submitted = unsettled_jobs(read_events(job.store))
        client = batch_client(context.config.batch.region) if submitted else None
        found = describe_attempts(list(submitted), client, deadline_seconds=ANSWER_SECONDS) if submitted else {}
    except InfraError as error:
        return CheckFinding.skipped(str(error))
    left = [one for one in found.values() if not one.finished]
    if not left:
        return CheckFinding.passed(f"AWS Batch runs nothing of job {context.job}")
    return CheckFinding.failed(
        "\n".join(
            f"{_describe_left_behind(one, submitted[one.job_id])} runs, and nobody of this run waits for it"
            for one in left
        ),
        "none is needed: it is ended before the next attempt is placed. If another launcher is at this job, stop one",
    )


CHECKS = [
    Check(
        id="aws-left-behind",
        title="nothing of the job runs in AWS Batch that nobody waits for",
        severity="warning",
        tier="full",
        deadline_seconds=2 * ANSWER_SECONDS + 1.0,
        symptoms=(),
        run=check_left_behind,
    )
]


def find_placement(told: Event, events: Sequence[Event]) -> Placement | None:
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


def settle_for_report(job: Job) -> None:
    """Whatever is still untold when the job's report is written. What Batch cannot tell now is said, and left out."""
    events = read_events(job.store)
    if not {**unsettled_jobs(events), **_incomplete_jobs(events)}:
        return
    try:
        client = batch_client(job.config.batch.region)
        with job.events("settle") as log:
            settle_attempts(job, events, client, log, deadline_seconds=_REPORT_SECONDS)
    except InfraError as error:
        print(f"what became of the last Batch job is not known yet, so the bill has its agents' word only: {error}")


_LEFTOVER_SECONDS = 90.0


def end_leftovers(job: Job, say: Callable[[str], None]) -> None:
    """End them and write down what they were, for the bill. job: with the run that its events are to name. Only where
    no launcher of the job is alive. Takes 90 s at most, also when the supervisor was asked to leave.

    Batch not answering is said, and no reason to stop: the next attempt that is placed asks again. Raises StoreError.
    """
    events = read_events(job.store)
    if not unsettled_jobs(events):
        return
    limit = time.monotonic() + _LEFTOVER_SECONDS
    try:
        client = batch_client(job.config.batch.region)
        with job.events("leftovers") as log:
            while True:
                events += settle_attempts(job, events, client, log)
                known = describe_attempts(list(unsettled_jobs(events)), client)
                left = [job_id for job_id, attempt in known.items() if not attempt.finished]
                if not left or time.monotonic() > limit:
                    break
                time.sleep(_LOOK_SECONDS)
            events += settle_attempts(job, events, client, log)
        if left:
            say(f"not ended within {_LEFTOVER_SECONDS:g} s, and still to be paid for: {', '.join(left)}")
    except InfraError as error:
        say(f"whether AWS Batch still runs something of this job is not known: {error}")
