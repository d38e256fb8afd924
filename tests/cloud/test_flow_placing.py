"""Placing an attempt through its door, without a flow: on queues that answer, that do not, and that
hang.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import BATCH_ATTEMPT, BATCH_SUBMITTED, NODE_STARTED, PLACED, read_events
from ebbflow.cost.plan.plan import make_plan
from ebbflow.flows.attempts.order import AttemptName, AttemptOrder
from ebbflow.flows.attempts.placement import PlacementRequest, place_attempt
from ebbflow.flows.attempts.settlement import unsettled_jobs
from ebbflow.flows.job import Job
from ebbflow.flows.remote import set_environment
from ebbflow.infra.batch import lightest_queue
from tests.support.batch.fixture import LocalBatch, job_when, local_batch
from tests.support.capacity import queue, queues

pytestmark = pytest.mark.timeout(120)
NAME = AttemptName(run="1733", step="train_node", task="5", attempt=0)


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBatch]:
    there = {"spot-g5": {"market": "spot"}, "od-g5": {}}
    with local_batch(tmp_path_factory.mktemp("batch"), queues=there) as running:
        yield running


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a step finds of the steps before it.

    The store is a folder: who places an attempt is where the store is.
    """
    for name, value in (
        ("ACCESS_KEY_ID", "local"),
        ("SECRET_ACCESS_KEY", "local"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    document = {
        "store": str(tmp_path / "store"),
        "cluster": {"nodes": 1, "instance_types": ["g5.xlarge"]},
        "batch": {
            "queues": [
                {"name": "spot-g5", "market": "spot"},
                {"name": "od-g5", "market": "on_demand"},
            ]
        },
    }
    config = RunConfig.model_validate_json(json.dumps(document))
    settings = {"config": config.model_dump(mode="json"), "sources": {}}
    plan = make_plan(config, now_utc=time.time()).brief().to_json()
    return SimpleNamespace(
        job="j", settings=settings, capacity=plan, examined=None, rounds=0, num_nodes=1
    )


def ask(flow: SimpleNamespace, name: AttemptName = NAME, *, last: bool = False) -> PlacementRequest:
    return PlacementRequest(flow=flow, name=name, round=1, one_node=True, last=last)


def submit(batch: LocalBatch, name: str) -> str:
    """Submit a job that sleeps, and return its id."""
    aws = batch.client()
    aws.update_job_queue(jobQueue="od-g5", state="ENABLED")
    needs = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "1000"}]
    container = {"image": "local", "command": ["sleep", "600"], "resourceRequirements": needs}
    aws.register_job_definition(
        jobDefinitionName=name, type="container", containerProperties=container
    )
    return aws.submit_job(jobName=name, jobQueue="od-g5", jobDefinition=name)["jobId"]


def test_a_placed_attempt_leaves_its_order_and_events(
    flow: SimpleNamespace, batch: LocalBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", batch.endpoint)
    answer = place_attempt(ask(flow))
    assert answer.trouble == "" and answer.order is not None
    assert answer.order.does == "train" and answer.order.placement.queue == "spot-g5"
    store = Job.of(flow, NAME.run).store
    assert AttemptOrder.get(store, NAME) == answer.order
    placed = [event for event in read_events(store) if event.name == PLACED]
    assert [(event.run, event.attempt, event.data["task"]) for event in placed] == [
        ("1733", 0, "5")
    ]

    batch.client().update_job_queue(jobQueue="spot-g5", state="DISABLED")
    batch.client().update_job_queue(jobQueue="od-g5", state="DISABLED")
    stopped = place_attempt(ask(flow)).order
    assert stopped is not None and (stopped.does, stopped.outcome) == ("stop", "no_capacity")
    assert "spot-g5 is DISABLED" in stopped.message and "od-g5 is DISABLED" in stopped.message
    batch.client().update_job_queue(jobQueue="spot-g5", state="ENABLED")
    last = place_attempt(ask(flow, last=True)).order
    assert last is not None and (last.does, last.nodes) == ("next", 1)


def test_prices_are_those_of_the_queues_region_whatever_the_configuration_names(
    flow: SimpleNamespace, batch: LocalBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", batch.endpoint)
    flow.settings["config"]["cost"]["regions"] = ["us-west-2"]
    answer = place_attempt(ask(flow, replace(NAME, attempt=3)))
    assert answer.trouble == "" and answer.order is not None and answer.order.does == "train"
    assert answer.order.placement.region == batch.region == "us-east-1"


def test_light_steps_go_to_the_smallest_machines_on_demand_unless_a_queue_is_named(
    batch: LocalBatch,
    flow: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And Metaflow's records beside the job, where nobody has said otherwise."""
    named = "METAFLOW_BATCH_JOB_QUEUE"
    root = "METAFLOW_DATASTORE_SYSROOT_S3"
    for name in (
        named,
        root,
        "METAFLOW_DEFAULT_DATASTORE",
        "METAFLOW_S3_ENDPOINT_URL",
        "AWS_RETRY_MODE",
        "AWS_MAX_ATTEMPTS",
        "EBBFLOW_RUNNABLE_SECONDS",
    ):
        monkeypatch.setenv(name, "")  # what the function sets is undone with it
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", batch.endpoint)
    batch.client().update_job_queue(jobQueue="od-g5", state="ENABLED")
    # The account's queues, Spot among them
    set_environment(RunConfig(store="s3://bucket/x"), "batch")
    assert os.environ[named] == "od-g5" and os.environ[root] == "s3://bucket/x/metaflow"
    assert (
        "to queue od-g5: whose machines all have unused GPUs or other accelerators"
        in capsys.readouterr().out
    )
    batch.change(
        queues={
            "any-m5": {"instance_types": ["m5.2xlarge"]},
            "small": {"instance_types": ["m5.large"]},
        }
    )
    monkeypatch.delenv(named)
    set_environment(RunConfig(store="s3://bucket/x"), "batch")
    assert (
        os.environ[named] == "small"
        and "the smallest of 3 on demand (m5.large)" in capsys.readouterr().out
    )
    told = RunConfig.model_validate_json(
        '{"store": "s3://other", "batch": {"light_queue": "light"}}'
    )
    set_environment(told, "batch")
    assert os.environ[named] == "light" and os.environ[root] == "s3://bucket/x/metaflow"


@pytest.mark.parametrize(
    ("types", "chosen"),
    [
        ({"gpu": ["g5.xlarge"], "cpu": ["c6i.4xlarge"]}, "cpu"),
        ({"large": ["m5.4xlarge"], "family": ["m5"], "p": ["p4d"]}, "family"),
        (
            {
                "tiny": ["t3.micro"],
                "four-gib": ["c5.large"],
                "gpu": ["g4dn.xlarge"],
                "enough": ["m5.metal"],
            },
            "enough",
        ),
        ({"gpu": ["trn1.2xlarge"], "unnamed": [], "batchs": ["optimal"]}, "batchs"),
        ({"gpu": ["g5"], "unnamed": []}, "unnamed"),
        ({"tiny": ["t3.micro"], "gpu": ["g5"]}, "gpu"),
        (
            {
                "arm": ["m6g.large"],
                "arms": ["default_arm64"],
                "nitro": ["c7gn"],
                "cpu": ["m5dn.24xlarge"],
            },
            "cpu",
        ),
    ],
)
def test_the_smallest_machine_that_holds_a_light_step_is_taken(
    types: dict[str, list[str]], chosen: str
) -> None:
    known = queues(
        *(queue(name, "on_demand", kinds) for name, kinds in types.items()),
        queue("spot", "spot", ["m5"]),
    )
    found = lightest_queue(known)
    assert found is not None and found[0] == chosen
    assert ("batch.light_queue" in found[1]) is (chosen in ("gpu", "unnamed")), (
        "a choice that may be dear is told"
    )
    assert lightest_queue(queues(queue("spot", "spot", ["m5"]))) is None


def test_fargate_has_no_gpus_and_comes_behind_small_machines() -> None:
    fargate = queue("far", "on_demand", fargate=True)
    gpu = queue("gpu", "on_demand", ["g5"])
    found = lightest_queue(queues(gpu, fargate, queue("unnamed", "on_demand")))
    assert (
        found is not None
        and found[0] == "far"
        and "may have GPUs" not in found[1]
        and "FARGATE" in found[1]
    )
    assert lightest_queue(queues(fargate, queue("cpu", "on_demand", ["m5"])))[0] == "cpu"


def test_where_batch_cannot_be_asked_the_plan_of_the_run_decides(
    flow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", f"http://127.0.0.1:{taken.getsockname()[1]}")
        answer = place_attempt(ask(flow))
    assert "CloudUnavailable" in answer.trouble
    assert answer.order is not None and answer.order.placement.queue == "spot-g5"


def test_a_hanging_batch_service_delays_no_placement(
    flow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and says nothing
        monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", f"http://127.0.0.1:{silent.getsockname()[1]}")
        answer = place_attempt(ask(flow), deadline_seconds=0.5)
        assert answer.order is not None and "0.5 s" in answer.trouble, "then by the plan of the run"
        flow.settings["config"]["batch"]["queues"] = []
        name = replace(NAME, attempt=1)
        nowhere = place_attempt(ask(flow, name), deadline_seconds=0.5)
    assert nowhere.order is None and "no queue" in nowhere.trouble
    assert AttemptOrder.get(Job.of(flow, NAME.run).store, name) is None, (
        "no container may take it for a word to stop"
    )


def test_jobs_of_a_dead_submitter_are_ended_before_the_next_attempt(
    flow: SimpleNamespace, batch: LocalBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the same run: a submitter that is killed ends nothing."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", batch.endpoint)
    job_id = submit(batch, "left")
    with Job.of(flow, NAME.run).events("test") as log:
        log.emit(BATCH_SUBMITTED, job_id=job_id, step=NAME.step, task=NAME.task)
    assert place_attempt(ask(flow, replace(NAME, attempt=1))).trouble == ""
    assert job_when(batch, "left", "FAILED")["status"] == "FAILED"


def test_a_run_whose_job_an_operator_terminates_places_no_further_attempt(
    flow: SimpleNamespace, batch: LocalBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", batch.endpoint)
    assert place_attempt(ask(flow)).trouble == ""
    job_id = submit(batch, "by-ann")
    with Job.of(flow, NAME.run).events("test") as log:
        log.emit(BATCH_SUBMITTED, job_id=job_id, step=NAME.step, task=NAME.task)
    batch.client().terminate_job(jobId=job_id, reason="stop, Ann")
    order = place_attempt(ask(flow, replace(NAME, attempt=1))).order
    assert order is not None and (order.does, order.outcome) == ("stop", Outcome.INTERRUPTED)
    assert order.message == f"{job_id} was terminated by an operator (stop, Ann)"
    again = AttemptName(run="1734", step=NAME.step, task=NAME.task, attempt=0)
    order = place_attempt(ask(flow, again)).order
    assert order is not None and order.does == "train", "another run goes on"


def test_jobs_whose_end_is_untold_are_known_by_their_submit_or_by_their_agent(
    flow: SimpleNamespace,
) -> None:
    with Job.of(flow, "1733").events("test") as log:
        log.emit(NODE_STARTED, batch_job_id="gang#1")
        log.emit(BATCH_SUBMITTED, job_id="gang", step="train", task="6")
        log.emit(BATCH_SUBMITTED, job_id="ended", step="train_node", task="5")
        log.emit(BATCH_ATTEMPT, job_id="ended")
        log.emit(NODE_STARTED, batch_job_id="alone")
        log.emit(NODE_STARTED)
    found = unsettled_jobs(read_events(Job.of(flow, "1733").store))
    assert {job_id: event.name for job_id, event in found.items()} == {
        "gang": BATCH_SUBMITTED,
        "alone": NODE_STARTED,
    }
