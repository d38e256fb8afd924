"""Batch tells that a job has ended before it tells when and why: that is waited for, and else told
as soon as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from botocore import handlers
from botocore.stub import Stubber
from metaflow.plugins.aws.batch.batch_client import RunningJob

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import BATCH_ATTEMPT, BATCH_SUBMITTED, Event, read_events
from ebbflow.cost.report.report import list_failures
from ebbflow.flows import metaflow_fixes
from ebbflow.flows.attempts.settlement import settle_attempts
from ebbflow.flows.job import Job
from ebbflow.infra.batch import batch_client

_EARLY = {
    "jobId": "j",
    "jobName": "n",
    "jobQueue": "q",
    "jobDefinition": "d",
    "status": "FAILED",
    "startedAt": 1000,
}
_WHOLE = {
    **_EARLY,
    "stoppedAt": 9000,
    "statusReason": "Host EC2 (instance i-0123456789abcdef0) terminated.",
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    job = Job(name="late", run="1", config=RunConfig(store=str(tmp_path)))
    with job.events("submit") as log:
        log.emit(BATCH_SUBMITTED, job_id="j", job_name="n", step="train_node", task="5")
    return job


def settled(job: Job, *answers: dict[str, Any], deadline_seconds: float) -> list[Event]:
    client = batch_client("us-east-1")
    with Stubber(client) as batch, job.events("placing") as log:
        for answer in answers:
            batch.add_response("describe_jobs", {"jobs": [answer]})
        told = settle_attempts(
            job, read_events(job.store), client, log, deadline_seconds=deadline_seconds
        )
        batch.assert_no_pending_responses()
    return told


def test_settlement_waits_for_late_batch_records(job: Job) -> None:
    [told] = settled(job, _EARLY, {**_EARLY, "stoppedAt": 9000}, _WHOLE, deadline_seconds=60)
    assert (told.data["stopped_utc"], told.data["cause"]) == (9.0, "reclaimed")
    assert settled(job, deadline_seconds=60) == [], "Batch is not asked any more"


def test_late_batch_records_are_settled_afterwards_and_count_once(job: Job) -> None:
    [first] = settled(job, _EARLY, deadline_seconds=1)
    assert (first.data["stopped_utc"], first.data["cause"]) == (None, "unknown")
    assert settled(job, _EARLY, deadline_seconds=1) == [], "nothing new"
    [second] = settled(job, _WHOLE, deadline_seconds=1)
    assert (second.data["stopped_utc"], second.data["cause"]) == (9.0, "reclaimed")
    assert settled(job, deadline_seconds=1) == []
    events = read_events(job.store)
    assert [event.name for event in events].count(BATCH_ATTEMPT) == 2
    [failure] = list_failures(events, {})
    assert failure["what"] == "Batch job in queue q: reclaimed"


@pytest.mark.parametrize("status", ["SUCCEEDED", "FAILED"])
def test_metaflow_accepts_a_gang_whose_end_is_its_only_status(
    job: Job, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """It would count as failed, and all of its nodes would be started again."""
    monkeypatch.setattr(handlers, "BUILTIN_HANDLERS", list(handlers.BUILTIN_HANDLERS))
    metaflow_fixes.fix_batch_requests()
    client = batch_client("us-east-1")
    gang = {**_EARLY, "status": status, "stoppedAt": 9000}
    gang["nodeProperties"] = {"numNodes": 2, "mainNode": 0, "nodeRangeProperties": []}
    with Stubber(client) as batch:
        batch.add_response("describe_jobs", {"jobs": [gang]})
        ended = RunningJob("j", client).update()
        assert (ended.status, ended.status_code, ended.reason) == (status, None, None)
