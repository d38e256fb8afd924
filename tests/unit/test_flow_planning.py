"""What surrounds a plan in the flow: whose capacity it is, and a store that does not tell of
earlier jobs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from metaflow import FlowSpec, batch, kubernetes, step

from ebbflow.core.config.schema import CostConfig, RunConfig
from ebbflow.core.errors import Outcome, StoreUnavailable
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import NODE_STARTED, OUTCOME, PLAN, PRICES, Origin, read_events
from ebbflow.core.store import Store
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.plan.plan_text import render_plan
from ebbflow.flows import reporting, steps
from ebbflow.flows.job import Job
from tests.support.batch.fixture import local_batch
from tests.support.capacity import batch_config
from tests.support.timelines import WALL


class Here(FlowSpec):
    @step
    def train(self) -> None: ...

    @step
    def train_node(self) -> None: ...


class OnBatch(FlowSpec):
    @batch
    @step
    def train(self) -> None: ...

    @step
    def train_node(self) -> None: ...


class OnKubernetes(FlowSpec):
    @kubernetes
    @step
    def train(self) -> None: ...

    @step
    def train_node(self) -> None: ...


def test_only_what_stays_on_this_machine_is_simulated() -> None:
    assert [steps.is_local(flow) for flow in (Here, OnBatch, OnKubernetes)] == [True, False, False]


@pytest.mark.slow
def test_on_batch_only_what_a_queue_takes_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the queue is switched off for now: attempts see to that.

    What nobody can run is no plan.
    """
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "local")
    config = batch_config("cluster.instance_types=[]")
    there = {"spot-g6": {"market": "spot", "instance_types": ["g6.xlarge"]}}
    with local_batch(tmp_path, queues=there) as batch:
        monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", batch.endpoint)
        batch.client().update_job_queue(jobQueue="spot-g6", state="DISABLED")
        found = steps.available_queues(OnBatch, config)
        assert steps.available_queues(Here, config) is None
    free = make_plan(config, now_utc=WALL)
    bound = make_plan(config, now_utc=WALL, queues=found)
    assert free.chosen is not None and free.chosen.instance_type != "g6.xlarge"
    assert {
        (candidate.instance_type, candidate.market, candidate.nodes) for candidate in bound.ranked
    } == {("g6.xlarge", "spot", 1)}
    text = " ".join(render_plan(bound).replace("│", " ").split())
    assert "no queue is on-demand" in {rejection.reason for rejection in bound.rejected}
    assert (
        "× no queue, such as" in text
        and "only pools that one of these queues takes: spot-g6" in text
    )
    none = make_plan(batch_config(), now_utc=WALL, queues=found)
    assert none.refusal is not None and none.refusal.outcome is Outcome.NO_CAPACITY
    assert (
        "spot-g6: has g6.xlarge" in none.refusal.message
        and "cluster.instance_types" in none.refusal.hint
    )
    assert steps.available_queues(OnBatch, config) is None, (
        "Batch is away, and no queue is configured"
    )
    assert "planning with all instance types" in capsys.readouterr().out


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr("ebbflow.flows.job.RUNS", tmp_path / "runs")
    return Job(name="demo", run="1", config=RunConfig(store=str(tmp_path / "store")))


def test_planning_ends_no_jobs_when_the_store_is_unreadable(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert steps.read_job_history(job).stays == {}

    def away(*_: object) -> None:
        raise StoreUnavailable("the store does not answer")

    monkeypatch.setattr(Store, "list", away)
    assert steps.read_job_history(job).stays == {}
    assert (
        "job history unavailable; using priors for pools and throughput: the store does"
        in capsys.readouterr().out
    )


def test_a_report_is_written_where_experience_cannot_be_kept(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with job.events("end") as log:
        log.emit(OUTCOME, outcome="completed", message="")

    def forbidden(*_: object) -> None:
        raise StoreUnavailable("experience/: access denied")

    monkeypatch.setattr(reporting, "save_job_record", forbidden)
    assert reporting.write_report(job)[0].outcome == "completed"
    assert (job.folder / "report.json").is_file() and job.store.get("report.json")
    assert "was not stored: experience/: access denied" in capsys.readouterr().out


def test_prices_are_recorded_of_the_types_that_machines_turned_out_to_be(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    place = {
        "AvailabilityZone": "us-east-1a",
        "AvailabilityZoneId": "use1-az4",
        "Timestamp": "2026-01-15T08:30:00Z",
    }
    types = ("g5.xlarge", "g6.xlarge", "p3.2xlarge")
    path.write_text(
        json.dumps([{**place, "InstanceType": kind, "SpotPrice": "1.0"} for kind in types])
    )
    job = Job(
        name="demo",
        run="1",
        config=RunConfig(store=str(tmp_path), cost=CostConfig(prices=str(path))),
    )
    with EventLog(job.store, Origin(job="demo", run="1", process="plan")) as log:
        chosen = {"instance_type": "g5.xlarge", "market": "spot", "usd_per_hour": 1.0}
        log.emit(PLAN, made_utc=1_760_000_000.0, chosen=chosen, simulated=False)
        log.emit(NODE_STARTED, instance_type="g6.xlarge", ranks=[0])
    reporting.record_prices(job)
    [told] = [event for event in read_events(job.store) if event.name == PRICES]
    assert sorted(pool["instance_type"] for pool in told.data["pools"]) == [
        "g5.xlarge",
        "g6.xlarge",
    ]
