"""The template's head job on the local Batch, submitted as the schedule submits it: it runs the
flow, or the supervisor, which sends every step to Batch; when its machine goes, Batch starts it
again and the job goes on. Minutes, so not in CI:

    python -m pytest -s tests/soak/soak_head_job.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.aws.deploy import TEMPLATE, read_template
from tests.support.batch.fixture import LocalBatch
from tests.support.batch.flow import LIGHT, PREFIX, BatchRunner, account
from tests.support.batch.prepared import paced_settings, with_paced
from tests.support.flow import ROOT, assert_ledger_adds_up, wait_until
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(3000)]

PATIENCE_SECONDS = 1200.0
# Slow enough that training is not done before the second start of the head job has come so far:
# five light steps.
STEPS = 120
SECONDS_PER_STEP = 2.0
SETTINGS = {
    **paced_settings(SECONDS_PER_STEP),
    "training__max_steps": STEPS,
    "training__evaluation_interval_steps": STEPS,
}
# As docs/aws.md has it.
SUPERVISOR = (
    "python flows/supervise.py configs/aws.yaml --job scheduled-$EBBFLOW_EXECUTION --with batch"
)


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory, swift: Swift) -> Iterator[LocalBatch]:
    folder = tmp_path_factory.mktemp("batch")
    with account(folder, swift, image=with_paced(folder)) as running:
        yield running


@pytest.fixture
def runner(tmp_path: Path, swift: Swift, batch: LocalBatch) -> BatchRunner:
    found = BatchRunner(tmp_path, swift, batch)
    found.environment |= with_paced(batch.folder)
    return found


def camel(value: Any) -> Any:
    """CloudFormation's and the scheduler's JobName as Batch's own jobName; values of the user's
    stay.
    """
    if isinstance(value, list):
        return [camel(entry) for entry in value]
    if isinstance(value, dict):
        return {name[0].lower() + name[1:]: camel(entry) for name, entry in value.items()}
    return value


def head_definition(runner: BatchRunner, said: str | None) -> dict[str, Any]:
    """The template's, with this machine in the place of the image and the store's address in that
    of Amazon's.

    said: HeadCommand; None: the template's own.
    """
    template = read_template(TEMPLATE.read_text(encoding="utf-8"))
    properties = template["Resources"]["HeadJob"]["Properties"]
    container = properties["ContainerProperties"]
    here = {**runner.environment, "EBBFLOW__STORE": runner.store, "METAFLOW_BATCH_JOB_QUEUE": LIGHT}
    known = {entry["Name"]: entry["Value"] for entry in container["Environment"]}
    values = {
        name: value if isinstance(value, str) else here.get(name, "")
        for name, value in known.items()
    }
    values |= {"AWS_DEFAULT_REGION": "us-east-1", "METAFLOW_DEFAULT_METADATA": "local"}
    elsewhere = {
        name: here[name] for name in here if name not in known and not name.startswith("AWS_EC2")
    }
    command = said or template["Parameters"]["HeadCommand"]["Default"]
    command = command.replace("configs/aws.yaml", "configs/laptop.yaml")
    options = " ".join(f"'{word}'" for word in runner.options(**SETTINGS))
    return {
        "jobDefinitionName": "ebbflow-head",
        "type": properties["Type"],
        "retryStrategy": camel(properties["RetryStrategy"]),
        "timeout": {"attemptDurationSeconds": template["Parameters"]["HeadSeconds"]["Default"]},
        "containerProperties": {
            "image": "ebbflow:local",
            "command": [
                "bash",
                "-c",
                f"cd {ROOT} && EBBFLOW_RUNS={runner.runs} {command} {options}",
            ],
            "jobRoleArn": "arn:aws:iam::000000000000:role/head",
            "resourceRequirements": camel(container["ResourceRequirements"]),
            "environment": [
                {"name": name, "value": value} for name, value in (values | elsewhere).items()
            ],
        },
    }


def submitted_by_the_schedule(runner: BatchRunner, execution: str, said: str | None) -> str:
    """Returns the id of the head job."""
    client = runner.batch.client()
    definition = client.register_job_definition(**head_definition(runner, said))["jobDefinitionArn"]
    target = read_template(TEMPLATE.read_text(encoding="utf-8"))["Resources"]["Schedule"][
        "Properties"
    ]["Target"]
    text = target["Input"]["Fn::Sub"].replace("<aws.scheduler.execution-id>", execution)
    for name, value in {
        "LightQueue": LIGHT,
        "HeadJob": definition,
        "AWS::StackName": "ebbflow",
    }.items():
        text = text.replace(f"${{{name}}}", value)
    return client.submit_job(**camel(json.loads(text)))["jobId"]


def ended(runner: BatchRunner, job_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        [job] = runner.batch.client().describe_jobs(jobs=[job_id])["jobs"]
        if job["status"] in ("SUCCEEDED", "FAILED"):
            return job
        return None

    return wait_until("the head job's end", look, timeout=PATIENCE_SECONDS)


def report(runner: BatchRunner, job: str) -> dict[str, Any]:
    return json.loads(runner.content(f"{PREFIX}/jobs/{job}/report.json"))


@pytest.mark.parametrize("said", [None, SUPERVISOR], ids=["flow", "supervisor"])
def test_a_head_job_whose_machine_goes_is_started_again_and_goes_on(
    said: str | None, runner: BatchRunner, request: pytest.FixtureRequest
) -> None:
    before = len(runner.batch.jobs())
    execution = request.node.callspec.id
    head = submitted_by_the_schedule(runner, execution, said)
    there = f"{PREFIX}/jobs/scheduled-{execution}/"
    wait_until(
        "a commit",
        lambda: [key for key in runner.keys(there) if "/commits/" in key],
        timeout=PATIENCE_SECONDS,
    )
    runner.batch.reclaim(head, notice=False)
    job = ended(runner, head)
    assert job["status"] == "SUCCEEDED", runner.batch.output(head, attempt=2)[-6000:]
    assert len(job["attempts"]) == 2 and job["attempts"][0]["statusReason"].startswith("Host EC2")
    found = report(runner, f"scheduled-{execution}")
    assert found["outcome"] == "completed"
    assert [step for step, _ in found["loss_curve"]] == list(range(1, STEPS + 1))
    assert_ledger_adds_up(found)
    trained = runner.training_jobs(before=before)
    print(
        execution, [(job["status"], job["statusReason"]) for job in trained], found["redone_steps"]
    )
    assert len(trained) >= 2 and len(runner.batch.jobs()[before:]) > 7, "light steps are jobs too"
    assert trained[0]["statusReason"].startswith("Ebbflow: ended"), (
        "nobody waits for what the first start sent"
    )
    assert [
        job["status"] for job in runner.batch.jobs() if job["status"] not in ("SUCCEEDED", "FAILED")
    ] == []
