"""The template's head job on the local Batch, submitted as the schedule submits it: it runs the flow, which sends every
step to Batch; when its machine goes, Batch starts it again and the run goes on. Minutes, so not in CI:

    python -m pytest tests/soak_head_job.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.aws.template import TEMPLATE, read_template
from tests.support.batch.fixture import LocalBatch
from tests.support.batch.flow import LIGHT, PREFIX, BatchRunner, account
from tests.support.flow import ROOT, wait_until
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1500)]

PATIENCE_SECONDS = 900.0


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory, swift: Swift) -> Iterator[LocalBatch]:
    with account(tmp_path_factory.mktemp("batch"), swift) as running:
        yield running


@pytest.fixture
def runner(tmp_path: Path, swift: Swift, batch: LocalBatch) -> BatchRunner:
    return BatchRunner(tmp_path, swift, batch)


def camel(value: Any) -> Any:
    """CloudFormation's and the scheduler's JobName as Batch's own jobName; values of the user's stay."""
    if isinstance(value, list):
        return [camel(one) for one in value]
    if isinstance(value, dict):
        return {name[0].lower() + name[1:]: camel(one) for name, one in value.items()}
    return value


def head_definition(runner: BatchRunner, **settings: Any) -> dict[str, Any]:
    """The template's, with this machine in the place of the image and the store's address in that of Amazon's."""
    template = read_template(TEMPLATE.read_text(encoding="utf-8"))
    properties = template["Resources"]["HeadJob"]["Properties"]
    container = properties["ContainerProperties"]
    here = {**runner.environment, "EBBFLOW__STORE": runner.store, "METAFLOW_BATCH_JOB_QUEUE": LIGHT}
    known = {one["Name"]: one["Value"] for one in container["Environment"]}
    values = {name: value if isinstance(value, str) else here.get(name, "") for name, value in known.items()}
    values |= {"AWS_DEFAULT_REGION": "us-east-1", "METAFLOW_DEFAULT_METADATA": "local"}
    elsewhere = {name: here[name] for name in here if name not in known and not name.startswith("AWS_EC2")}
    command = template["Parameters"]["HeadCommand"]["Default"].replace("configs/aws.yaml", "configs/laptop.yaml")
    options = " ".join(f"'{word}'" for word in runner.options(**settings))
    return {
        "jobDefinitionName": "ebbflow-head",
        "type": properties["Type"],
        "retryStrategy": camel(properties["RetryStrategy"]),
        "timeout": {"attemptDurationSeconds": template["Parameters"]["HeadSeconds"]["Default"]},
        "containerProperties": {
            "image": "ebbflow:local",
            "command": ["bash", "-c", f"cd {ROOT} && EBBFLOW_RUNS={runner.runs} {command} {options}"],
            "jobRoleArn": "arn:aws:iam::000000000000:role/head",
            "resourceRequirements": camel(container["ResourceRequirements"]),
            "environment": [{"name": name, "value": value} for name, value in (values | elsewhere).items()],
        },
    }


def submitted_by_the_schedule(runner: BatchRunner, execution: str, **settings: Any) -> str:
    """Returns the id of the head job."""
    client = runner.batch.client()
    definition = client.register_job_definition(**head_definition(runner, **settings))["jobDefinitionArn"]
    target = read_template(TEMPLATE.read_text(encoding="utf-8"))["Resources"]["Schedule"]["Properties"]["Target"]
    text = target["Input"]["Fn::Sub"].replace("<aws.scheduler.execution-id>", execution)
    for name, value in {"LightQueue": LIGHT, "HeadJob": definition, "AWS::StackName": "ebbflow"}.items():
        text = text.replace(f"${{{name}}}", value)
    return client.submit_job(**camel(json.loads(text)))["jobId"]


def ended(runner: BatchRunner, job_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        [job] = runner.batch.client().describe_jobs(jobs=[job_id])["jobs"]
        return job if job["status"] in ("SUCCEEDED", "FAILED") else None

    return wait_until("the head job's end", look, timeout=PATIENCE_SECONDS)


def report(runner: BatchRunner, job: str) -> dict[str, Any]:
    return json.loads(runner.content(f"{PREFIX}/jobs/{job}/report.json"))


def test_a_head_job_runs_the_flow_whose_steps_are_jobs_of_their_own(runner: BatchRunner) -> None:
    head = submitted_by_the_schedule(runner, "e1")
    job = ended(runner, head)
    assert job["status"] == "SUCCEEDED", runner.batch.output(head)[-6000:]
    assert report(runner, "scheduled-e1")["outcome"] == "completed"
    assert len(runner.training_jobs()) == 1 and len(runner.batch.jobs()) > 5, "light steps are jobs too"


def test_a_head_job_whose_machine_goes_is_started_again_and_goes_on(runner: BatchRunner) -> None:
    before = len(runner.batch.jobs())
    head = submitted_by_the_schedule(runner, "e2", training__max_steps=120)
    there = f"{PREFIX}/jobs/scheduled-e2/"
    wait_until("a commit", lambda: [key for key in runner.keys(there) if "/commits/" in key], timeout=PATIENCE_SECONDS)
    runner.batch.reclaim(head, notice=False)
    job = ended(runner, head)
    assert job["status"] == "SUCCEEDED", runner.batch.output(head, attempt=2)[-6000:]
    assert len(job["attempts"]) == 2
    found = report(runner, "scheduled-e2")
    assert found["outcome"] == "completed"
    assert len(runner.training_jobs(before=before)) >= 2
    assert [job["status"] for job in runner.batch.jobs() if job["status"] not in ("SUCCEEDED", "FAILED")] == []
