"""Settling Batch jobs: whose end is asked for, how long, where, and what is recorded, ended and
printed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import CloudError, JobIsRunning
from ebbflow.core.events import (
    BATCH_ATTEMPT,
    BATCH_SUBMITTED,
    NODE_STARTED,
    PLACED,
    Event,
    read_events,
)
from ebbflow.core.launchers import RUN_CLAIM_VARIABLE, claim_job
from ebbflow.core.preflight import PreflightContext
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.flows.attempts.settlement import (
    CHECKS,
    check_left_behind,
    end_leftovers,
    find_placement,
    settle_attempts,
    settle_for_report,
    unsettled_jobs,
)
from ebbflow.flows.job import Job
from ebbflow.infra.batch import batch_client
from tests.support.batch_service import JobService, serve_jobs
from tests.support.timelines import event

HOST = "Host EC2 (instance i-0123456789abcdef0) terminated."
PLACEMENT: dict[str, Any] = {
    **{
        "queue": "q",
        "market": "spot",
        "instance_type": "g5.xlarge",
        "region": None,
        "zone": None,
        "nodes": 1,
    },
    **{
        "processes_per_node": 1,
        "cpu": 4,
        "gpu": 1,
        "memory_mib": 1000,
        "wall_seconds": 60,
        "runnable_seconds": 60,
    },
    **{
        "usd_per_hour": 0.4,
        "quoted_usd_per_hour": "0.4",
        "price_kind": "live",
        "expected_hours": 1.0,
    },
    **{"expected_usd": 1.0, "reason": "cheapest"},
}
RUNNING = {"status": "RUNNING", "startedAt": 1000}
WAITING = {"status": "RUNNABLE", "createdAt": 500}
ENDED = {"status": "SUCCEEDED", "startedAt": 1000, "stoppedAt": 9000}
TIMELESS = {"status": "FAILED", "startedAt": 1000, "statusReason": HOST}
REASONLESS = {"status": "FAILED", "startedAt": 1000, "stoppedAt": 9000}
RECLAIMED = {**REASONLESS, "statusReason": HOST}

OWNER = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/space/jobsets/js-1"
POD_ATTEMPT = "space/jobsets/js-1"


@dataclass
class Clock:
    """The monotonic time as settling reads it: it only passes while the code sleeps.

    The deadlines of requests to AWS use the real time. A clock that is behind it leaves them less
    time.
    """

    real: Callable[[], float]
    now: float = 0.0
    slept: float = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds

    def set_behind(self, seconds: float) -> None:
        self.now = self.real() - seconds


@pytest.fixture
def service(_service: JobService, monkeypatch: pytest.MonkeyPatch) -> JobService:
    _service.jobs = {}
    _service.owners = {}
    _service.requests = []
    _service.refused = _service.away = False
    for name, value in (
        ("ACCESS_KEY_ID", "local"),
        ("SECRET_ACCESS_KEY", "local"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", _service.endpoint)
    return _service


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(time.monotonic)
    found.set_behind(0.0)
    monkeypatch.setattr(time, "sleep", found.sleep)
    monkeypatch.setattr(time, "monotonic", lambda: found.now)
    return found


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(name="j", run="1", config=RunConfig(store=str(tmp_path)))


def submit(job: Job, *job_ids: str, **known: Any) -> None:
    with job.events("submit") as log:
        for job_id in job_ids:
            log.emit(
                BATCH_SUBMITTED,
                **{"job_id": job_id, "job_name": "n", "step": "train", "task": "5", **known},
            )


def settled(job: Job, said: list[str] | None = None, **known: Any) -> list[Event]:
    if said is None:
        heard = []
    else:
        heard = said
    with job.events("placing") as log:
        client = batch_client("us-east-1")
        return settle_attempts(job, read_events(job.store), client, log, say=heard.append, **known)


def recorded(job: Job) -> list[dict[str, Any]]:
    return [event.data for event in read_events(job.store) if event.name == BATCH_ATTEMPT]


def test_jobs_are_unsettled_until_their_end_is_recorded() -> None:
    events = [
        event(NODE_STARTED, 1.0, batch_job_id="gang#1"),
        event(BATCH_SUBMITTED, 2.0, job_id="gang"),
        event(BATCH_SUBMITTED, 3.0, job_id="gang", step="again"),
        event(NODE_STARTED, 4.0, batch_job_id="alone#0"),
        event(BATCH_SUBMITTED, 5.0, job_id="ended"),
        event(NODE_STARTED, 6.0, batch_job_id="ended#0"),
        event(BATCH_ATTEMPT, 7.0, job_id="ended"),
        event(NODE_STARTED, 8.0),
        event(BATCH_SUBMITTED, 9.0, job_id=""),
        event("note", 10.0, job_id="unrelated", batch_job_id="unrelated"),
    ]
    assert unsettled_jobs(events) == {"gang": events[1], "alone": events[3]}


def test_a_jobs_placement_is_the_newest_of_its_run_attempt_step_and_task() -> None:
    submitted = event(BATCH_SUBMITTED, 5.0, job_id="x", step="train", task="5")

    def placed(queue: str, *, at: Event = submitted, step: str = "train", **known: Any) -> Event:
        about = {"task": "5", "placement": {**PLACEMENT, "queue": queue}, **known}
        return replace(at, name=PLACED, step=step, data=about)

    first = placed("first")
    newest = placed("newest")
    others = [
        placed("step", step="train_node"),
        placed("task", task="6"),
        placed("run", at=replace(submitted, run="run-2")),
        placed("attempt", at=replace(submitted, attempt=3)),
        replace(placed("name"), name="note"),
    ]
    found = find_placement(submitted, [first, newest, *others])
    assert found is not None and found.queue == "newest"
    assert find_placement(submitted, others) is None
    agent = replace(submitted, name=NODE_STARTED, step=None, data={"batch_job_id": "x"})
    found = find_placement(agent, [placed("step", step="train_node"), *others[2:4]])
    assert found is not None and found.queue == "step", "an agent's event has neither step nor task"
    assert find_placement(submitted, [placed("q", placement={"queue": "q"})]) is None
    assert find_placement(submitted, [replace(first, data={"task": "5"})]) is None


def test_a_settled_job_is_not_asked_for(service: JobService, job: Job) -> None:
    submit(job, "x")
    service.jobs = {"x": [RECLAIMED]}
    [told] = settled(job)
    assert told.name == BATCH_ATTEMPT and told.run == "1"
    about = {
        name: told.data[name]
        for name in ("job_id", "started_utc", "stopped_utc", "cause", "queue", "market")
    }
    assert about == {
        "job_id": "x",
        "started_utc": 1.0,
        "stopped_utc": 9.0,
        "cause": "reclaimed",
        "queue": "q",
        "market": None,
    }
    assert settled(job) == [] and service.looks() == 1


@pytest.mark.parametrize(
    ("answer", "complete"),
    [
        (ENDED, True),
        (RECLAIMED, True),
        ({"status": "FAILED", "createdAt": 500, "statusReason": HOST}, True),  # it never started
        ({"status": "SUCCEEDED", "startedAt": 1000}, False),
        (TIMELESS, False),
        (REASONLESS, False),
        ({"status": "FAILED", "createdAt": 500}, False),
    ],
)
def test_an_end_without_time_or_reason_is_incomplete(
    service: JobService, clock: Clock, job: Job, answer: dict[str, Any], complete: bool
) -> None:
    submit(job, "x")
    service.jobs = {"x": [answer]}
    assert len(settled(job)) == 1
    assert service.looks() == (1 if complete else 11)
    service.requests = []
    assert settled(job) == [] and service.looks() == (0 if complete else 1), (
        "it is asked for again, and not waited for"
    )


@pytest.mark.parametrize(
    ("deadline", "looks"), [(6.0, 4), (20.0, 11), (60.0, 11), (1.0, 1), (2.0, 2)]
)
def test_an_incomplete_end_is_waited_for_up_to_ten_seconds(
    service: JobService, clock: Clock, job: Job, deadline: float, looks: int
) -> None:
    """Or half of the deadline, once per second."""
    submit(job, "x")
    service.jobs = {"x": [TIMELESS]}
    settled(job, deadline_seconds=deadline)
    assert service.looks() == looks and clock.slept == looks - 1


def test_a_wait_ends_with_the_last_ended_job_and_does_not_wait_for_running_ones(
    service: JobService, clock: Clock, job: Job
) -> None:
    submit(job, "late", "later", "running", "deleted")
    service.jobs = {
        "late": [TIMELESS, RECLAIMED],
        "later": [TIMELESS, TIMELESS, ENDED],
        "running": [RUNNING],
    }
    said: list[str] = []
    told = {event.data["job_id"]: event.data["stopped_utc"] for event in settled(job, said)}
    assert told == {"late": 9.0, "later": 9.0} and service.looks() == 3
    assert [job_id for job_id, _ in service.terminated()] == ["running"]


def test_an_incomplete_end_is_completed_later_and_only_then_recorded_again(
    service: JobService, clock: Clock, job: Job
) -> None:
    submit(job, "x")
    service.jobs = {"x": [TIMELESS]}
    settled(job)
    assert settled(job) == [] and len(recorded(job)) == 1
    service.jobs = {"x": [RECLAIMED]}
    assert [event.data["stopped_utc"] for event in settled(job)] == [9.0]
    service.requests = []
    assert settled(job) == [] and service.requests == []


def test_the_newest_record_of_a_batch_job_decides_whether_it_is_complete(
    service: JobService, job: Job
) -> None:
    submit(job, "x")
    with job.events("test") as log:
        log.emit(
            BATCH_ATTEMPT,
            job_id="x",
            status="FAILED",
            started_utc=1.0,
            stopped_utc=2.0,
            reason="why",
        )
        log.emit(
            BATCH_ATTEMPT,
            job_id="x",
            status="FAILED",
            started_utc=1.0,
            stopped_utc=None,
            reason="why",
        )
        log.emit(
            BATCH_ATTEMPT,
            job_id="unknown",
            status="FAILED",
            started_utc=1.0,
            stopped_utc=None,
            reason="",
        )
    service.jobs = {"x": [ENDED]}
    [told] = settled(job)
    assert told.data["status"] == "SUCCEEDED"


@pytest.mark.parametrize(
    ("state", "words"), [(RUNNING, "Ebbflow: ended"), (WAITING, "Ebbflow: did not start in time")]
)
def test_a_running_job_is_terminated_and_its_end_is_not_recorded_yet(
    service: JobService, job: Job, state: dict[str, Any], words: str
) -> None:
    submit(job, "x")
    service.jobs = {"x": [state]}
    said: list[str] = []
    following = replace(job, run="2")
    assert settled(following, said) == []
    assert service.terminated() == [("x", f"{words}: run 2 goes on with job j")]
    left = f"job x of run 1 ({state['status']} in q)"
    assert said == [f"{left} was left behind: terminated, since run 2 goes on with job j"]
    assert unsettled_jobs(read_events(job.store)) != {}


def test_a_job_that_ended_before_it_was_terminated_is_recorded_later(
    service: JobService, job: Job
) -> None:
    submit(job, "x", "y")
    service.jobs = {"x": [RUNNING], "y": [ENDED]}
    service.refused = True
    said: list[str] = []
    assert [event.data["job_id"] for event in settled(job, said)] == ["y"]
    assert said == []


@pytest.mark.parametrize(
    ("job_id", "variables"),
    [
        ("own", {"AWS_BATCH_JOB_ID": "own#0"}),
        (
            POD_ATTEMPT,
            {
                "METAFLOW_KUBERNETES_POD_NAME": "js-1-control-0",
                "METAFLOW_KUBERNETES_JOBSET_NAME": "js-1",
                "METAFLOW_KUBERNETES_POD_NAMESPACE": "space",
            },
        ),
    ],
)
def test_a_process_does_not_end_the_job_that_it_runs_in(
    service: JobService,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    job_id: str,
    variables: dict[str, str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with job.events("node") as log:
        log.emit(NODE_STARTED, batch_job_id=job_id)
        log.emit(NODE_STARTED, batch_job_id="former#0")
    service.jobs = {"own": [RUNNING], "former": [RECLAIMED]}
    settle_for_report(job)
    assert service.terminated() == []
    assert [told["job_id"] for told in recorded(job)] == ["former"]


def test_termination_is_printed_to_stderr_by_default(
    service: JobService, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(job, "x")
    service.jobs = {"x": [RUNNING]}
    with job.events("placing") as log:
        settle_attempts(job, read_events(job.store), batch_client("us-east-1"), log)
    assert capsys.readouterr().err.startswith(
        "batch: job x of run 1 (RUNNING in q) was left behind: terminated"
    )


def test_each_job_is_asked_for_in_the_region_of_its_placement(
    service: JobService, job: Job
) -> None:
    with job.events("placing") as log:
        for task, region in (("5", "us-west-2"), ("6", None), ("7", "us-east-1")):
            log.emit(PLACED, step="train", task=task, placement={**PLACEMENT, "region": region})
    for task, job_id in (("5", "west"), ("6", "any"), ("7", "east"), ("8", "unplaced")):
        submit(job, job_id, task=task)
    service.jobs = {"west": [RUNNING], "any": [ENDED], "east": [ENDED], "unplaced": [ENDED]}
    told = {event.data["job_id"]: event.data["instance_type"] for event in settled(job)}
    assert told == {"any": "g5.xlarge", "east": "g5.xlarge", "unplaced": None}
    asked = [
        (region, operation, json.loads(content)) for region, operation, content in service.requests
    ]
    assert [
        (region, content.get("jobs", content.get("jobId"))) for region, _, content in asked
    ] == [
        ("us-west-2", ["west"]),
        ("us-east-1", ["any", "east", "unplaced"]),
        ("us-west-2", "west"),
    ]


def test_only_the_launcher_that_holds_the_job_settles_it(
    service: JobService, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = claim_job(job.store, "j", "run")
    monkeypatch.setenv(RUN_CLAIM_VARIABLE, "another")
    assert settled(job) == [], "there is nothing to settle"
    submit(job, "x")
    service.jobs = {"x": [RUNNING]}
    with pytest.raises(JobIsRunning):
        settled(job)
    assert service.requests == []
    claim.release()


def test_a_request_to_batch_has_the_given_deadline(
    service: JobService, clock: Clock, job: Job
) -> None:
    submit(job, "x")
    service.jobs = {"x": [RUNNING]}
    clock.set_behind(22.0)
    assert settled(job, deadline_seconds=30.0) == [] and len(service.terminated()) == 1
    clock.set_behind(30.0)
    with pytest.raises(CloudError, match="timed out"):
        settled(job, deadline_seconds=30.0)
    clock.set_behind(11.0)
    assert settled(job) == [], "20 s by default"
    clock.set_behind(20.0)
    with pytest.raises(CloudError, match="timed out"):
        settled(job)


def context(job: Job, name: str | None = "j") -> PreflightContext:
    return PreflightContext(config=job.config, project_root=PROJECT_ROOT, job=name, target="batch")


def test_preflight_finds_running_jobs_that_no_process_waits_for(
    service: JobService, job: Job
) -> None:
    assert check_left_behind(context(job, None)).detail == "a new job has no Batch jobs"
    assert check_left_behind(context(job)).detail == "AWS Batch runs nothing of job j"
    assert service.requests == []
    submit(job, "x", "y", "z")
    service.jobs = {"x": [RUNNING], "y": [ENDED], "z": [WAITING]}
    found = check_left_behind(context(job))
    assert found.status == "failed" and found.detail.splitlines() == [
        f"job {name} of run 1 ({state} in q) is running, but no process of this run waits for it"
        for name, state in (("x", "RUNNING"), ("z", "RUNNABLE"))
    ]
    service.jobs = {"x": [ENDED]}
    assert check_left_behind(context(job)).status == "passed" and service.terminated() == []


def test_preflight_waits_twelve_seconds_for_batch(
    service: JobService, clock: Clock, job: Job
) -> None:
    submit(job, "x")
    service.jobs = {"x": [ENDED]}
    clock.set_behind(7.0)
    assert check_left_behind(context(job)).status == "passed"
    clock.set_behind(12.0)
    assert check_left_behind(context(job)).status == "skipped"
    [check] = CHECKS
    assert (check.id, check.deadline_seconds) == ("aws-left-behind", 25.0), (
        "a request to the store, one to Batch"
    )


def test_preflight_waits_twelve_seconds_for_the_store(
    service: JobService, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    opened = Store.open

    def open_store(uri: str, *, request_timeout_seconds: float) -> Store:
        waits.append(request_timeout_seconds)
        return opened(uri, request_timeout_seconds=request_timeout_seconds)

    monkeypatch.setattr(Store, "open", open_store)
    check_left_behind(context(job))
    assert waits == [12.0]


def test_a_report_settles_all_attempts_within_six_seconds(
    service: JobService, clock: Clock, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    settle_for_report(job)
    assert service.requests == []
    submit(job, "x")
    service.jobs = {"x": [TIMELESS]}
    settle_for_report(job)
    assert service.looks() == 4 and len(recorded(job)) == 1, "three seconds, half of six"
    service.jobs = {"x": [ENDED]}
    settle_for_report(job)
    assert [about["status"] for about in recorded(job)] == ["FAILED", "SUCCEEDED"], (
        "also what was incomplete"
    )
    settled_by = [event for event in read_events(job.store) if event.name == BATCH_ATTEMPT]
    assert {event.run for event in settled_by} == {"1"} and capsys.readouterr().out == ""
    submit(job, "y")
    service.jobs = {"y": [RUNNING]}
    clock.set_behind(3.5)
    settle_for_report(job)
    assert capsys.readouterr().out == "" and len(service.terminated()) == 1
    clock.set_behind(6.0)
    settle_for_report(job)
    text = "the end of the last attempt is unknown yet, so the bill uses its agents' records: "
    assert capsys.readouterr().out.startswith(text)


def test_leftovers_are_ended_and_recorded(service: JobService, clock: Clock, job: Job) -> None:
    said: list[str] = []
    end_leftovers(job, said.append)
    assert service.requests == [] and said == []
    submit(job, "x")
    service.jobs = {"x": [RUNNING, RUNNING, RUNNING, RUNNING, RECLAIMED]}
    end_leftovers(job, said.append)
    assert [about["cause"] for about in recorded(job)] == ["reclaimed"]
    assert [line.partition(" was left behind")[0] for line in said] == []
    assert [job_id for job_id, _ in service.terminated()] == ["x", "x"]
    assert clock.slept == 2.0


@pytest.mark.slow
def test_leftovers_that_do_not_end_are_named_after_ninety_seconds(
    service: JobService, clock: Clock, job: Job
) -> None:
    submit(job, "x", "y", "z")
    service.jobs = {"x": [RUNNING], "y": [RUNNING], "z": [ENDED]}
    said: list[str] = []
    end_leftovers(job, said.append)
    assert said == ["not ended within 90 s and still paid for: x, y"]
    assert clock.slept == 91.0 and [about["job_id"] for about in recorded(job)] == ["z"]


def test_leftover_jobs_of_an_unavailable_batch_are_reported(
    service: JobService, clock: Clock, job: Job
) -> None:
    """Within 90 s for the first look, and 20 s for each further one."""
    submit(job, "x")
    service.jobs = {"x": [RUNNING]}
    clock.set_behind(90.0)
    said: list[str] = []
    end_leftovers(job, said.append)
    assert service.requests == []
    assert len(said) == 1 and said[0].startswith("cannot check for jobs left behind: ")
    clock.set_behind(60.0)
    end_leftovers(job, said.append)
    assert service.looks() == 1 and len(service.terminated()) == 1
    assert len(said) == 2 and said[1].startswith("cannot check for jobs left behind: ")


@pytest.fixture
def cluster(service: JobService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobService:
    kubernetes = pytest.importorskip("kubernetes")
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": service.endpoint}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path = tmp_path / "kubeconfig.json"
    path.write_text(json.dumps(document))
    monkeypatch.setenv("KUBECONFIG", str(path))
    # Read at import
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    return service


@pytest.mark.slow
def test_attempts_in_a_cluster_are_settled_by_the_cluster(
    cluster: JobService, clock: Clock, job: Job
) -> None:
    """A running one is ended and recorded at once, since the cluster keeps no record of what it
    deleted.
    """
    submit(job, POD_ATTEMPT, "space/jobsets/gone")
    cluster.owners = {OWNER: {"metadata": {"name": "js-1"}, "spec": {}, "status": {}}}
    said: list[str] = []
    end_leftovers(job, said.append)
    [about] = recorded(job)
    assert (about["job_id"], about["cause"]) == (POD_ATTEMPT, "terminated")
    assert ("DELETE", OWNER) in cluster.requests and cluster.looks() == 0
    settle_for_report(job)
    assert len(recorded(job)) == 1


def test_a_backend_settles_only_its_own_attempts(
    cluster: JobService, clock: Clock, job: Job
) -> None:
    submit(job, "x")
    cluster.jobs = {"x": [ENDED]}
    submit(job, POD_ATTEMPT)
    assert [event.data["job_id"] for event in settled(job)] == ["x"]
    cluster.requests = []
    settle_for_report(job)
    assert cluster.looks() == 0 and ("GET", OWNER) in cluster.requests


def test_an_incomplete_attempt_in_a_cluster_is_asked_for_there(
    cluster: JobService, clock: Clock, job: Job
) -> None:
    submit(job, POD_ATTEMPT)
    with job.events("test") as log:
        log.emit(
            BATCH_ATTEMPT,
            job_id=POD_ATTEMPT,
            status="FAILED",
            started_utc=1.0,
            stopped_utc=None,
            reason="",
        )
    settle_for_report(job)
    assert ("GET", OWNER) in cluster.requests and cluster.looks() == 0


@pytest.fixture(scope="module")
def _service() -> Iterator[JobService]:
    with serve_jobs() as running:
        yield running
