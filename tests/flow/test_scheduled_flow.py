"""Flows that production schedulers take: compiled for Argo Workflows and Step Functions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from ebbflow.flows.supervising.scheduled import (
    ScheduleError,
    check_deployment,
    parse_settings,
    read_starts,
    supervise_job,
)
from tests.support.batch.fixture import local_batch
from tests.support.local_service import LocalServer
from tests.support.own_flow import ROOT, SOURCES
from tests.support.s3.fixture import FailingServer, failing_s3  # noqa: F401 - a fixture

FLOW = ROOT / "ebbflow" / "flows" / "scheduled_flow.py"
SETTINGS = """
store: s3://bucket/ebbflow
model: {hidden_size: 16, num_layers: 1, num_heads: 2, sequence_length: 16}
training: {batch_size: 4, max_steps: 4, scheduler: {warmup_steps: 1}}
cluster: {nodes: 1, processes_per_node: 1}
"""
REFUSED = "@ebbflow(budget=0.0001)\n    @step\n    def job"
pytestmark = pytest.mark.flow


class NoStateMachines(BaseHTTPRequestHandler):
    """Step Functions of an account without state machines, which `create` asks for an old one."""

    def do_POST(self) -> None:
        answer = b'{"stateMachines": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def step_functions() -> Iterator[str]:
    """Address of a Step Functions without state machines."""
    server = LocalServer(NoStateMachines, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.endpoint
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def environment(failing_s3: FailingServer) -> dict[str, str]:  # noqa: F811 - the fixture
    bucket = failing_s3.new_bucket()
    return {
        **os.environ,
        **failing_s3.environment,
        "PYTHONPATH": str(ROOT),
        "METAFLOW_USER": "tester",
        "AWS_DEFAULT_REGION": failing_s3.region,
        "METAFLOW_DEFAULT_DATASTORE": "s3",
        "METAFLOW_DATASTORE_SYSROOT_S3": f"s3://{bucket}/metaflow",
        "METAFLOW_S3_ENDPOINT_URL": failing_s3.endpoint,
        "METAFLOW_S3_WORKER_COUNT": "2",
        "METAFLOW_KUBERNETES_NAMESPACE": "training",
        "METAFLOW_ARGO_EVENTS_EVENT": "metaflow",
        "METAFLOW_ARGO_EVENTS_EVENT_BUS": "default",
        "METAFLOW_ARGO_EVENTS_EVENT_SOURCE": "metaflow-webhook",
        "METAFLOW_ARGO_EVENTS_SERVICE_ACCOUNT": "events",
        "METAFLOW_ARGO_EVENTS_WEBHOOK_URL": "http://events.example",
        "METAFLOW_SFN_IAM_ROLE": "arn:aws:iam::123456789012:role/sfn",
        "METAFLOW_EVENTS_SFN_ACCESS_IAM_ROLE": "arn:aws:iam::123456789012:role/events",
        "METAFLOW_BATCH_JOB_QUEUE": "queue",
        "METAFLOW_BATCH_CONTAINER_IMAGE": "ebbflow:local",
        "METAFLOW_ECS_S3_ACCESS_IAM_ROLE": "arn:aws:iam::123456789012:role/task",
        "METAFLOW_SERVICE_URL": "",
    }


def compile_flow(
    file: Path, environment: dict[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, file.name, *words],
        cwd=file.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def read_document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    text = done.stdout
    assert done.returncode == 0, text + done.stderr
    document, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    return document


def test_the_scheduled_flow_compiles_for_argo_with_its_schedule_trigger_and_retries(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(SETTINGS)
    when = '{"schedule": {"cron": "0 3 * * *"}, "trigger": {"event": "data-ready"}}'
    document = read_document(
        compile_flow(
            FLOW,
            environment,
            *("--config", "settings", str(tmp_path / "job.yaml"), "--config-value", "when", when),
            *("argo-workflows", "create", "--only-json"),
        )
    )
    text = json.dumps(document)
    assert document["kind"] == "WorkflowTemplate"
    assert "ebbflow.user.tester.scheduledflow" in document["metadata"]["name"]
    assert "0 3 * * *" in text
    assert "data-ready" in text
    templates = {template["name"]: template for template in document["spec"]["templates"]}
    assert {"start", "supervise", "end"} <= templates.keys()
    assert str(templates["supervise"]["retryStrategy"]["limit"]) == "4"


def test_the_scheduled_flow_compiles_for_step_functions_and_eventbridge(
    environment: dict[str, str], step_functions: str, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(SETTINGS)
    with local_batch(tmp_path / "batch", queues={"queue": {}}) as batch:
        endpoints = {
            "AWS_ENDPOINT_URL_SFN": step_functions,
            "AWS_ENDPOINT_URL_BATCH": batch.endpoint,
        }
        done = compile_flow(
            FLOW,
            environment | endpoints,
            *("--config", "settings", str(tmp_path / "job.yaml")),
            *("step-functions", "create", "--only-json"),
        )
    document = read_document(done)
    assert {"start", "supervise", "end"} <= document["States"].keys()
    assert document["States"]["supervise"]["Retry"]
    assert "supervise" in json.dumps(document["States"]["supervise"]["Parameters"])


@pytest.mark.parametrize("name", ["single", "gang"])
def test_a_users_flow_with_the_decorator_compiles_for_argo(
    name: str, environment: dict[str, str], tmp_path: Path
) -> None:
    for path in SOURCES.glob("*.*"):
        (tmp_path / path.name).write_text(path.read_text())
    done = compile_flow(
        tmp_path / f"{name}.py", environment, "argo-workflows", "create", "--only-json"
    )
    templates = {
        template["name"]: template for template in read_document(done)["spec"]["templates"]
    }
    assert {"start", "train", "end"} <= templates.keys()
    nodes = (
        "2 nodes at $36.0000" if name == "gang" else "1 × g4dn.xlarge spot in us-east-1 at $0.1894"
    )
    [plan] = [line for line in done.stderr.splitlines() if line.startswith("@ebbflow: ")]
    assert plan.startswith(f"@ebbflow: step train, train.py: {nodes} per node-hour ("), plan
    assert plan.endswith("no budget, no deadline; each attempt runs where @kubernetes sends it")


def test_a_users_flow_with_the_decorator_compiles_for_step_functions(
    environment: dict[str, str], step_functions: str, tmp_path: Path
) -> None:
    for path in SOURCES.glob("*.*"):
        (tmp_path / path.name).write_text(path.read_text())
    with local_batch(tmp_path / "batch", queues={"queue": {}}) as batch:
        endpoints = {
            "AWS_ENDPOINT_URL_SFN": step_functions,
            "AWS_ENDPOINT_URL_BATCH": batch.endpoint,
        }
        done = compile_flow(
            tmp_path / "single.py",
            environment | endpoints,
            *("step-functions", "create", "--only-json"),
        )
    assert {"start", "train", "end"} <= read_document(done)["States"].keys()
    assert done.stderr.count("each attempt runs where @batch sends it") == 1, done.stderr


def test_a_users_flow_whose_plan_is_refused_is_not_created(
    environment: dict[str, str], tmp_path: Path
) -> None:
    for path in SOURCES.glob("*.*"):
        text = path.read_text().replace("@ebbflow\n    @step\n    def job", REFUSED)
        (tmp_path / path.name).write_text(text)
    words = ("argo-workflows", "create", "--only-json")
    done = compile_flow(tmp_path / "branches.py", environment, *words)
    assert done.returncode == 1
    output = " ".join((done.stdout + done.stderr).split())
    assert re.search(r"branches.py:\d+: step job, job.yaml: budget: .*\$0.0001.* \(.*\)", output), (
        output
    )
    assert "Traceback" not in output and "WorkflowTemplate" not in output


def test_a_job_whose_store_is_a_folder_is_not_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["scheduled_flow.py", "argo-workflows", "create"]
    monkeypatch.delenv("EBBFLOW__STORE", raising=False)
    with pytest.raises(ScheduleError, match=r"store runs is a folder, .*; fix: store: s3://"):
        check_deployment(arguments, parse_settings("model: {}\n"))
    check_deployment(arguments, parse_settings(SETTINGS))
    check_deployment(["scheduled_flow.py", "run"], parse_settings(""))
    monkeypatch.setenv("EBBFLOW__STORE", "s3://bucket/other")
    check_deployment(arguments, parse_settings("model: {}\n"))
    monkeypatch.setenv("EBBFLOW__STORE", "here")
    with pytest.raises(ScheduleError, match="EBBFLOW__STORE: store here is a folder"):
        check_deployment(arguments, parse_settings(SETTINGS))


def test_the_store_of_the_deploying_shell_is_the_jobs_in_the_container(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EBBFLOW__STORE", "nothing://bucket")
    settings = parse_settings(SETTINGS)
    monkeypatch.delenv("EBBFLOW__STORE")
    with pytest.raises(SystemExit):
        supervise_job(settings, "job", "")
    printed = capfd.readouterr()
    assert "nothing://bucket" in printed.out + printed.err


def test_bad_input_of_the_scheduled_flow_is_named() -> None:
    with pytest.raises(ScheduleError, match="when: every is no way to start a flow; fix: "):
        read_starts({"every": "day"})
    with pytest.raises(ScheduleError, match="settings: no YAML: "):
        parse_settings("a: [")
    with pytest.raises(ScheduleError, match="settings: the file has no keys"):
        parse_settings("text")


def test_a_job_with_a_wrong_setting_fails_the_step_for_good(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        supervise_job(parse_settings("training: {max_step: 4}\n"), "job", f"--set store={tmp_path}")
    assert end.value.code not in (0, 1)
    printed = capfd.readouterr()
    assert "training.max_step" in printed.out + printed.err
    assert "job job: config (exit code 2), as printed above" in printed.err
