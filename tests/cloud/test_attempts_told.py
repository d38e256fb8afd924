"""What Batch tells of a job, and what it means: AWS's own texts, and jobs of the local Batch that
really ran.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.stub import Stubber

from ebbflow.core.errors import CloudForbidden, CloudRefused, CloudUnavailable
from ebbflow.infra.batch import (
    BatchAttempt,
    batch_client,
    cancel_job,
    describe_attempts,
    describe_queues,
)
from ebbflow.infra.batch.jobs import classify_cause, find_terminator
from tests.support.batch.fixture import LocalBatch, local_batch

_RESOURCES = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "1000"}]
_EXITED = "Essential container in task exited"
_PULL = "CannotPullContainerError: Error response from daemon: "


@pytest.mark.parametrize(
    ("reasons", "exit_code", "cause"),
    [
        (["Host EC2 (instance i-0123456789abcdef0) terminated."], None, "reclaimed"),
        ([_EXITED, "Host EC2 (instance i-0123456789abcdef0) terminated."], 143, "reclaimed"),
        (["Your Spot Task was interrupted."], None, "reclaimed"),
        ([_EXITED], 1, "user_code"),
        ([_EXITED], 139, "user_code"),
        ([_EXITED], 137, "unknown"),  # killed, and nobody says by whom
        ([_EXITED, "OutOfMemoryError: Container killed due to memory usage"], 137, "user_code"),
        (["Job attempt duration exceeded timeout"], 143, "terminated"),
        (["Metaflow initiated job termination."], 143, "terminated"),
        (["Operator initiated termination"], None, "terminated"),
        (
            [_PULL + "manifest for 1.dkr.ecr.us-east-1.amazonaws.com/a:b not found"],
            None,
            "user_code",
        ),
        (
            [_PULL + "Get https://registry/v2/: net/http: request canceled while waiting"],
            None,
            "never_started",
        ),
        (
            ["ResourceInitializationError: failed to configure the log driver"],
            None,
            "never_started",
        ),
        (["something that AWS has not said before"], 1, "unknown"),
        ([], None, "unknown"),
    ],
)
def test_a_failed_batch_job_has_the_cause_that_batch_reports(
    reasons: list[str], exit_code: int | None, cause: str
) -> None:
    assert classify_cause("FAILED", reasons, exit_code, started=exit_code is not None) == cause


@pytest.mark.parametrize(
    "reason",
    [
        "Canceled by JobStateTimeLimit action due to reason: "
        "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
        "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job resource requirement "
        "(vCPU/memory/GPU) is higher",
        "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
        "Ebbflow: did not start in time: 31 minutes in RUNNABLE",
    ],
)
def test_batch_jobs_that_never_ran_differ_from_ended_ones(reason: str) -> None:
    assert (
        classify_cause("FAILED", [reason], None, started=False, ended_by_call=True)
        == "never_started"
    )
    assert (
        classify_cause("FAILED", ["stopped by hand"], None, started=True, ended_by_call=True)
        == "terminated"
    )
    late = [
        "Ebbflow: its container was not made in time: had capacity, and no container after 45.0 "
        "minutes"
    ]
    assert classify_cause("FAILED", late, None, started=False, ended_by_call=True) == "not_made"
    assert classify_cause("RUNNABLE", [reason], None, started=False) == "unknown"
    assert classify_cause("SUCCEEDED", [_EXITED], 0, started=True) == "ended"


@pytest.mark.parametrize(
    ("reason", "author"),
    [
        ("stop, Ann", "operator"),
        ("User initiated termination", "operator"),
        ("Ebbflow: ended: the launcher was asked to leave", "ebbflow"),
        ("Ebbflow: its container was not made in time: 45.0 minutes", "ebbflow"),
        ("Job attempt duration exceeded timeout", "limit"),
        ("Metaflow initiated job termination.", "unknown"),
    ],
)
def test_a_terminated_batch_job_has_its_author(reason: str, author: str) -> None:
    assert find_terminator([_EXITED, reason]) == author


def test_a_gang_whose_nodes_are_not_known_may_have_lost_one() -> None:
    assert classify_cause("FAILED", [_EXITED], 1, started=True, main_alone=True) == "unknown"


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBatch]:
    queues = {
        "spot": {"market": "spot", "instance_types": ["g5.xlarge"]},
        "gang": {"instance_types": ["p4d.24xlarge"]},
        "full": {"market": "spot", "capacity": [[0, 0]]},
        "off": {"state": "DISABLED"},
        "ill": {"environment_status": "INVALID"},
    }
    with local_batch(
        tmp_path_factory.mktemp("batch"), queues=queues, time_scale=600, start_seconds=0.0
    ) as running:
        yield running


@pytest.fixture
def client(batch: LocalBatch, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in {
        "AWS_ENDPOINT_URL_BATCH": batch.endpoint,
        "AWS_ACCESS_KEY_ID": "local",
        "AWS_SECRET_ACCESS_KEY": "local",
        "AWS_DEFAULT_REGION": batch.region,
    }.items():
        monkeypatch.setenv(name, value)
    yield batch_client()
    batch.change(rules=[], clock_ahead_seconds=0)


def submit(batch: LocalBatch, command: str, queue: str) -> str:
    aws = batch.client()
    properties = {
        "image": "image",
        "command": ["bash", "-c", command],
        "resourceRequirements": _RESOURCES,
    }
    made = aws.register_job_definition(
        jobDefinitionName="plain", type="container", containerProperties=properties
    )
    return aws.submit_job(jobName="told", jobQueue=queue, jobDefinition=made["jobDefinitionArn"])[
        "jobId"
    ]


def submit_gang(batch: LocalBatch, main: str) -> str:
    """Two nodes, of which the second sleeps."""
    aws = batch.client()
    ranges = [
        {
            "targetNodes": f"{node}:{node}",
            "container": {
                "image": "image",
                "command": ["bash", "-c", command],
                "resourceRequirements": _RESOURCES,
            },
        }
        for node, command in enumerate((main, "sleep 600"))
    ]
    properties = {"numNodes": 2, "mainNode": 0, "nodeRangeProperties": ranges}
    made = aws.register_job_definition(
        jobDefinitionName="gang", type="multinode", nodeProperties=properties
    )
    return aws.submit_job(jobName="gang", jobQueue="gang", jobDefinition=made["jobDefinitionArn"])[
        "jobId"
    ]


def told(job: str, client: Any, *statuses: str) -> BatchAttempt:
    """What is told of the job once it has one of the statuses."""
    limit = time.monotonic() + 200
    while time.monotonic() < limit:
        attempt = describe_attempts([job], client)[job]
        if attempt.status in statuses:
            return attempt
        time.sleep(0.1)
    raise AssertionError(f"{job} was never {statuses}: {attempt}")


def test_finished_batch_jobs_have_times_and_causes(
    batch: LocalBatch, client: Any, tmp_path: Path
) -> None:
    bug = submit(batch, "exit 3", "spot")
    sleeper = submit(batch, "sleep 600", "spot")
    stuck = submit(batch, "true", "full")
    lost = tmp_path / "lost"
    gang = submit_gang(batch, f"while [ ! -e {lost} ]; do sleep 0.1; done; exit 1")
    told(sleeper, client, "RUNNING")
    told(gang, client, "RUNNING")
    batch.reclaim(sleeper, notice=False)
    batch.reclaim(gang, node=1, notice=False)
    lost.touch()  # the main node leaves with an error of its own: only the other one tells why
    found = told(bug, client, "FAILED")
    assert (found.cause, found.exit_code, found.queue, found.nodes, found.finished) == (
        "user_code",
        3,
        "spot",
        1,
        True,
    )
    assert found.created_utc <= found.started_utc <= found.stopped_utc
    reclaimed = told(sleeper, client, "FAILED")
    assert reclaimed.cause == "reclaimed" and "Host EC2" in reclaimed.reason
    ended = told(gang, client, "FAILED")
    assert (ended.cause, ended.nodes, ended.exit_code) == ("reclaimed", 2, 1), ended
    main, other = ended.node_times
    assert main == (ended.started_utc, ended.stopped_utc)
    assert main[0] <= other[1] and other[0] <= other[1], (
        "which of the two ends first is anybody's guess"
    )
    waiting = told(stuck, client, "RUNNABLE", "SUBMITTED", "PENDING")
    assert (waiting.started_utc, waiting.cause, waiting.finished) == (None, "unknown", False)
    cancel_job(stuck, "31 minutes in RUNNABLE", client)
    assert told(stuck, client, "FAILED").cause == "never_started"
    cancel_job(stuck, "again", client)  # what has ended stays as it is
    assert describe_attempts(["00000000-0000-0000-0000-000000000000"], client) == {}


def test_nodes_of_a_gang_that_succeeded_have_times_of_their_own(
    batch: LocalBatch, client: Any, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    gang = submit_gang(batch, f"while [ ! -e {go} ]; do sleep 0.1; done")
    told(gang, client, "RUNNING")
    assert describe_attempts([gang], client)[gang].node_times == ()
    go.touch()
    found = told(gang, client, "SUCCEEDED")
    assert found.cause == "ended" and len(found.node_times) == 2
    assert found.node_times[0] == (found.started_utc, found.stopped_utc)


@pytest.mark.parametrize("told_by_job", [True, False])
def test_a_gang_job_without_times_takes_those_of_its_nodes(client: Any, told_by_job: bool) -> None:
    """Each of the fields may be missing in an answer; the bill is then by those that are there."""
    job = {
        "jobId": "j",
        "jobName": "gang",
        "jobQueue": "q",
        "jobDefinition": "d",
        "status": "FAILED",
    }
    nodes = [
        job | {"jobId": "j#0", "startedAt": 2000, "stoppedAt": 9000},
        job | {"jobId": "j#1", "startedAt": 3000},
    ]
    job["nodeProperties"] = {"numNodes": 2, "mainNode": 0, "nodeRangeProperties": []}
    with Stubber(client) as batch:
        batch.add_response(
            "describe_jobs", {"jobs": [job | {"startedAt": 1000 if told_by_job else 0}]}
        )
        batch.add_response("describe_jobs", {"jobs": nodes})
        found = describe_attempts(["j"], client)["j"]
    assert (found.started_utc, found.stopped_utc) == (1.0 if told_by_job else 2.0, 9.0)
    assert found.node_times == ((2.0, 9.0), (3.0, None))


def test_disabled_batch_queues_report_the_reason(client: Any) -> None:
    found = describe_queues(["spot", "gang", "off", "ill", "none"], client)
    assert (found["spot"].market, found["spot"].multi_node, found["spot"].usable) == (
        "spot",
        False,
        True,
    )
    assert (found["gang"].market, found["gang"].multi_node) == ("on_demand", True)
    assert found["off"].problem == "queue off is DISABLED and accepts no jobs"
    assert not found["ill"].usable and "is INVALID" in found["ill"].problem
    assert found["none"].problem == "there is no job queue none in us-east-1"
    assert sorted(describe_queues(None, client)) == ["full", "gang", "ill", "off", "spot"]


def test_a_throttled_question_is_asked_again_until_the_deadline(
    batch: LocalBatch, client: Any
) -> None:
    batch.change(rules=[{"operation": "DescribeJobQueues", "kind": "throttle", "times": 3}])
    assert describe_queues(["spot"], client, deadline_seconds=60)["spot"].usable
    assert batch.told()["met"]["throttle"] == 3
    batch.change(rules=[{"operation": "DescribeJobQueues", "kind": "throttle", "times": 10_000}])
    with pytest.raises(
        CloudUnavailable, match=r"batch:DescribeJobQueues in us-east-1: throttled \(TooManyRequests"
    ):
        describe_queues(["spot"], client, deadline_seconds=1.5)


def test_a_permanent_batch_error_is_raised_without_a_retry(batch: LocalBatch, client: Any) -> None:
    batch.change(rules=[{"operation": "DescribeJobQueues", "kind": "forbid", "times": 1}])
    with pytest.raises(CloudForbidden, match="fix: allow batch:DescribeJobQueues"):
        describe_queues(["spot"], client)
    batch.change(rules=[{"operation": "TerminateJob", "kind": "refuse", "times": 1}])
    with pytest.raises(
        CloudRefused, match="batch:TerminateJob in us-east-1: refused: ClientException"
    ):
        cancel_job("00000000-0000-0000-0000-000000000000", "why", client)
    batch.change(rules=[], clock_ahead_seconds=400)
    with pytest.raises(CloudForbidden, match="set the clock"):
        describe_queues(["spot"], client)


def test_a_batch_service_without_answer_is_given_up_at_the_deadline(
    batch: LocalBatch, client: Any
) -> None:
    batch.change(
        rules=[{"operation": "DescribeJobQueues", "kind": "slow", "seconds": 120, "times": 10_000}]
    )
    with pytest.raises(CloudUnavailable, match="timed out after"):
        describe_queues(["spot"], client, deadline_seconds=1.0)
