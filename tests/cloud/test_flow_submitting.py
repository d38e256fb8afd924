"""The process that submits, on the SDK and the local Batch: throttled, without capacity, stuck
while starting.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.events import BATCH_SUBMITTED, OUTCOME, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.infra.batch import batch_client, describe_attempts
from tests.support.batch.fixture import LocalBatch, job_when, local_batch
from tests.support.flow import wait_until

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).resolve().parents[2]
# What Metaflow's `batch step` does, as far as the SDK sees it: a submit, and then waiting for the
# job's end.
SUBMITTER = """
import sys, time
import boto3
from ebbflow.flows.attempts.submission import open_submission
open_submission().listen()
client = boto3.client("batch")
job = client.submit_job(jobName=sys.argv[1], jobQueue=sys.argv[2], jobDefinition="plain")["jobId"]
while client.describe_jobs(jobs=[job])["jobs"][0]["status"] not in ("SUCCEEDED", "FAILED"):
    time.sleep(0.2)
print(job, flush=True)
"""


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBatch]:
    queues = {"full": {"capacity": [[0, 0]]}, "free": {}}
    with local_batch(tmp_path_factory.mktemp("batch"), queues=queues) as running:
        needs = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "1000"}]
        container = {"image": "image", "command": ["true"], "resourceRequirements": needs}
        running.client().register_job_definition(
            jobDefinitionName="plain", type="container", containerProperties=container
        )
        yield running


def submit(
    batch: LocalBatch, store: Path, name: str, queue: str, **limits: float
) -> subprocess.CompletedProcess[str]:
    """limits: of the submission. The SDK itself tries twice."""
    process = submitting(batch, store, name, queue, **limits)
    output, said = process.communicate(timeout=150)
    return subprocess.CompletedProcess(process.args, process.returncode, output, said)


def submitting(
    batch: LocalBatch, store: Path, name: str, queue: str, **limits: float
) -> subprocess.Popen[str]:
    of_job = {
        "job": "j",
        "store": str(store),
        "region": batch.region,
        "run": "1",
        "step": "train",
        "task": "3",
    }
    variables = {
        "AWS_ENDPOINT_URL_BATCH": batch.endpoint,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": batch.region,
        "AWS_RETRY_MODE": "standard",
        "AWS_MAX_ATTEMPTS": "2",
        "EBBFLOW_SUBMIT": json.dumps({**of_job, "attempt": 0, **limits}),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", SUBMITTER, name, queue]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **variables}, cwd=ROOT, **pipes)


def submitted(store: Path) -> list[dict[str, Any]]:
    """What the job's events tell of submits."""
    job = Store.open(str(store), request_timeout_seconds=10.0).sub(job_prefix("j"))
    return [event.data for event in read_events(job) if event.name == BATCH_SUBMITTED]


def outcomes(store: Path) -> list[tuple[str, str]]:
    """That the job's events tell, each with its words."""
    job = Store.open(str(store), request_timeout_seconds=10.0).sub(job_prefix("j"))
    told = [event.data for event in read_events(job) if event.name == OUTCOME]
    return [(data["outcome"], data["message"]) for data in told]


def cause(
    batch: LocalBatch, done: subprocess.CompletedProcess[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Of the job that was submitted, as the next attempt is told it."""
    for name, value in (
        ("ENDPOINT_URL_BATCH", batch.endpoint),
        ("ACCESS_KEY_ID", "a"),
        ("SECRET_ACCESS_KEY", "b"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    job = done.stdout.split()[-1]
    return describe_attempts([job], batch_client(batch.region))[job].cause


def test_a_job_that_waits_too_long_for_capacity_is_ended(
    batch: LocalBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = submit(batch, tmp_path, "waits", "full", runnable_seconds=1.0, starting_seconds=600.0)
    assert done.returncode == 0, done.stderr
    assert "waits waited 0.0 minutes for capacity in queue full" in done.stderr
    assert cause(batch, done, monkeypatch) == "never_started"


def test_a_job_that_is_starting_has_capacity_and_a_limit_of_its_own(
    batch: LocalBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its image takes longer than anybody waits. As long as it may start, the limit of waiting is
    not its own: it has that long to be seen starting, and is ended after it."""
    limits = {"runnable_seconds": 8.0, "starting_seconds": 8.2, "look_seconds": 0.2}
    batch.change(start_seconds=600.0)
    try:
        done = submit(batch, tmp_path, "pulls", "free", **limits)
    finally:
        batch.change(start_seconds=0.2)
    assert done.returncode == 0, done.stderr
    assert (
        "pulls had capacity but no container after 0.1 minutes of starting (an image too large"
        in done.stderr
    )
    assert "for capacity" not in done.stderr
    assert cause(batch, done, monkeypatch) == "not_made"


def test_a_job_that_is_starting_is_left_while_on_demand_would_still_be_in_time(
    batch: LocalBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not made there in time, it is placed elsewhere as if there had been no capacity."""
    batch.change(start_seconds=600.0)
    try:
        done = submit(
            batch, tmp_path, "slow", "free", runnable_seconds=600.0, start_by_utc=time.time() + 12
        )
    finally:
        batch.change(start_seconds=0.2)
    assert done.returncode == 0, done.stderr
    assert (
        re.search(r"slow (was starting for|waited) .* minutes", done.stderr)
        and "to be placed anew" in done.stderr
    )
    assert cause(batch, done, monkeypatch) == "never_started"


def test_a_throttled_submit_is_made_again_beyond_what_the_sdk_tries(
    batch: LocalBatch, tmp_path: Path
) -> None:
    batch.change(rules=[{"operation": "SubmitJob", "kind": "throttle", "times": 3}])
    done = submit(batch, tmp_path, "late", "free", submit_seconds=120.0)
    assert done.returncode == 0, done.stderr
    assert (
        "SubmitJob: throttled (TooManyRequestsException); retrying for at most 2.0 min"
        in done.stderr
    )
    assert job_when(batch, "late", "SUCCEEDED")["status"] == "SUCCEEDED"
    assert len([job for job in batch.jobs() if job["jobName"] == "late"]) == 1


def test_a_submit_that_is_throttled_for_too_long_ends_with_one_clear_line(
    batch: LocalBatch, tmp_path: Path
) -> None:
    batch.change(rules=[{"operation": "SubmitJob", "kind": "throttle", "times": 1000}])
    try:
        done = submit(batch, tmp_path, "never", "free", submit_seconds=2.0)
    finally:
        batch.change(rules=[])
    assert done.returncode != 0 and "TooManyRequestsException" in done.stderr.splitlines()[-1]
    told = [line for line in done.stderr.splitlines() if "given up" in line]
    assert (
        len(told) == 1 and "Nothing of the job is lost" in told[0] and "batch:SubmitJob" in told[0]
    )
    assert not [job for job in batch.jobs() if job["jobName"] == "never"]
    assert outcomes(tmp_path) == [], "it may be taken another time"


def test_other_refusals_are_left_to_the_sdk_and_end_the_job_as_failed(
    batch: LocalBatch, tmp_path: Path
) -> None:
    """Told nothing, a report would take the run for one that was interrupted, and a script would
    start it again.
    """
    batch.change(rules=[{"operation": "SubmitJob", "kind": "forbid", "times": 9}])
    try:
        done = submit(batch, tmp_path, "denied", "free", submit_seconds=120.0)
    finally:
        batch.change(rules=[])
    assert done.returncode != 0 and "retrying" not in done.stderr and "AccessDenied" in done.stderr
    [(outcome, why)] = outcomes(tmp_path)
    assert (
        outcome == "failed"
        and why.startswith("AWS Batch refused the submit of train: ")
        and "AccessDenied" in why
    )


def test_a_submit_whose_answer_is_lost_makes_one_job(batch: LocalBatch, tmp_path: Path) -> None:
    """Found by its mark; as long as nobody can look for it, no other is made."""
    rules = [
        {"operation": "SubmitJob", "kind": "lost"},
        {"operation": "ListJobs", "kind": "error", "times": 60},
    ]
    before = batch.told()["requests"]
    batch.change(rules=rules)

    def asked(operation: str) -> int:
        return batch.told()["requests"].get(operation, 0) - before.get(operation, 0)

    try:
        process = submitting(batch, tmp_path, "lost", "free", submit_seconds=120.0)
        wait_until("a second look, since the first came to nothing", lambda: asked("ListJobs") > 6)
        assert asked("SubmitJob") == 1
    finally:
        batch.change(rules=[])
    output, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    [job] = [job for job in batch.jobs() if job["jobName"] == "lost"]
    assert (
        output.split()[-1] == job["jobId"]
        and job["status"] == "SUCCEEDED"
        and asked("SubmitJob") == 1
    )
    assert "SubmitJob: no answer, so the job may exist" in said
    assert f"an unanswered submit created job {job['jobId']}" in said


def test_a_late_job_of_an_unanswered_submit_is_ended_and_recorded(
    batch: LocalBatch, tmp_path: Path
) -> None:
    batch.change(rules=[{"operation": "SubmitJob", "kind": "late"}])
    process = submitting(
        batch, tmp_path, "twice", "full", submit_seconds=120.0, runnable_seconds=600.0
    )
    try:
        job_when(batch, "twice", "FAILED")  # the newest, which came late
        told = wait_until("both in the events", lambda: (two := submitted(tmp_path))[1:] and two)
        process.terminate()
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.communicate()
    own, twin = [job for job in batch.jobs() if job["jobName"] == "twice"]
    assert (
        "was asked to leave" in own["statusReason"]
        and f"{own['jobId']} is used" in twin["statusReason"]
    )
    assert {job["job_id"]: job.get("twin_of") for job in told} == {
        own["jobId"]: None,
        twin["jobId"]: own["jobId"],
    }


def test_a_job_of_an_unanswered_submit_is_ended_with_its_submitter(
    batch: LocalBatch, tmp_path: Path
) -> None:
    rules = [
        {"operation": "SubmitJob", "kind": "lost"},
        {"operation": "ListJobs", "kind": "error", "times": 60},
    ]
    batch.change(rules=rules)
    before = batch.told()["requests"].get("ListJobs", 0)
    process = submitting(batch, tmp_path, "orphan", "full", submit_seconds=120.0)
    try:
        wait_until("a look", lambda: batch.told()["requests"].get("ListJobs", 0) > before)
        process.terminate()
    finally:
        batch.change(rules=[])
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    [job] = [job for job in batch.jobs() if job["jobName"] == "orphan"]
    assert job["status"] == "FAILED" and "Ebbflow: ended" in job["statusReason"]


def test_a_job_of_an_abandoned_submit_is_ended_and_recorded(
    batch: LocalBatch, tmp_path: Path
) -> None:
    """It may have begun while nobody could look for it, and cost something."""
    rules = [
        {"operation": "SubmitJob", "kind": "lost"},
        {"operation": "ListJobs", "kind": "error", "times": 7},
    ]
    batch.change(rules=rules)
    try:
        done = submit(batch, tmp_path, "given-up", "full", submit_seconds=0.1)
    finally:
        batch.change(rules=[])
    assert done.returncode == 1 and "given up" in done.stderr, done.stderr
    [job] = [job for job in batch.jobs() if job["jobName"] == "given-up"]
    assert job["status"] == "FAILED" and "no process waits for it" in job["statusReason"]
    assert [(job["job_id"], job["twin_of"]) for job in submitted(tmp_path)] == [
        (job["jobId"], None)
    ]


def test_without_permission_to_list_jobs_a_submit_is_repeated_with_a_warning(
    batch: LocalBatch, tmp_path: Path
) -> None:
    rules = [
        {"operation": "SubmitJob", "kind": "lost"},
        {"operation": "ListJobs", "kind": "forbid", "times": 9},
    ]
    batch.change(rules=rules)
    try:
        done = submit(batch, tmp_path, "blind", "free", submit_seconds=120.0)
    finally:
        batch.change(rules=[])
    assert done.returncode == 0, done.stderr
    assert (
        "submitted again without a search" in done.stderr and "allow batch:ListJobs" in done.stderr
    )
