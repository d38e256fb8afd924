"""What a launcher leaves in AWS Batch: the job that it submits is ended with it, and what it left
is told and ended.

Whole runs whose launcher is asked to leave or killed: tests/soak/soak_batch_launcher.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import BATCH_SUBMITTED, read_events
from ebbflow.core.preflight import PreflightContext
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.flows.attempts.settlement import check_left_behind, settle_attempts
from ebbflow.flows.job import Job
from tests.support.batch.fixture import LocalBatch, local_batch
from tests.support.flow import wait_until

QUEUE = "spot-g5"
# The process that submits, as far as it is ours: it listens at the SDK, and ends when it is told
# to.
_SUBMITTER = """
import time
import boto3
from ebbflow.flows.attempts.submission import open_submission

open_submission().listen()
client = boto3.client("batch")
resources = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "1000"}]
properties = {"image": "image", "command": ["sleep", "617"], "resourceRequirements": resources}
made = client.register_job_definition(jobDefinitionName="plain", type="container", containerProperties=properties)
client.submit_job(jobName="train", jobQueue="spot-g5", jobDefinition=made["jobDefinitionArn"])
print("submitted", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBatch]:
    queues = {QUEUE: {"market": "spot", "instance_types": ["g5.xlarge"]}}
    with local_batch(
        tmp_path_factory.mktemp("batch"), queues=queues, start_seconds=0.05
    ) as running:
        yield running


@pytest.fixture
def submitter(
    batch: LocalBatch, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[str]]:
    for name, value in {
        "AWS_ENDPOINT_URL_BATCH": batch.endpoint,
        "AWS_ACCESS_KEY_ID": "local",
        "AWS_SECRET_ACCESS_KEY": "local",
        "AWS_DEFAULT_REGION": batch.region,
    }.items():
        monkeypatch.setenv(name, value)
    process = subprocess.Popen(
        [sys.executable, "-c", _SUBMITTER],
        cwd=PROJECT_ROOT,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait()
    batch.change(rules=[])


def test_a_job_whose_submit_is_not_answered_yet_is_ended_once_its_id_is_known(
    batch: LocalBatch, submitter: subprocess.Popen[str]
) -> None:
    batch.change(rules=[{"operation": "SubmitJob", "kind": "slow", "seconds": 3, "times": 1}])
    before = len(batch.jobs())
    wait_until("the submit", lambda: batch.jobs()[before:])
    submitter.terminate()
    assert submitter.wait(90) == 143
    assert submitter.stdout is not None and submitter.stdout.read() == "", (
        "its submit was not answered"
    )
    [job] = batch.jobs()[before:]
    assert (job["status"], job["statusReason"]) == (
        "FAILED",
        "Ebbflow: ended: the launcher was asked to leave",
    )


def test_preflight_reports_leftover_jobs_and_the_next_run_ends_them(
    batch: LocalBatch, submitter: subprocess.Popen[str], tmp_path: Path
) -> None:
    running = wait_until(
        "its job",
        lambda: [
            batch_job["jobId"] for batch_job in batch.jobs() if batch_job["status"] == "RUNNING"
        ],
    )[0]
    submitter.kill()
    job = Job(name="left", run="1", config=RunConfig(store=str(tmp_path)))
    context = PreflightContext(
        config=job.config, project_root=PROJECT_ROOT, job=job.name, target="batch"
    )
    assert check_left_behind(context).status == "passed", "of which nobody has told"
    with job.events("submit") as log:
        log.emit(BATCH_SUBMITTED, job_id=running, job_name="train", step="train_node", task="5")
    found = check_left_behind(context)
    assert (
        found.status == "failed"
        and f"job {running} of run 1 (RUNNING in {QUEUE}) is running" in found.detail
    )
    said: list[str] = []
    following = replace(job, run="2")
    with following.events("placing") as log:
        assert (
            settle_attempts(following, read_events(job.store), batch.client(), log, say=said.append)
            == []
        )
    assert said == [
        f"job {running} of run 1 (RUNNING in {QUEUE}) was left behind: terminated, since run 2 "
        "goes on with job left"
    ]
    wait_until("its end", lambda: batch.jobs()[-1]["status"] == "FAILED")
    assert check_left_behind(context).status == "passed"
    with following.events("settle") as log:
        [told] = settle_attempts(
            following, read_events(job.store), batch.client(), log, say=said.append
        )
    assert told.data["job_id"] == running and len(said) == 1
