"""The local Batch behaves as AWS documents it, seen through boto3: what other tests build on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.batch.fixture import LocalBatch, local_batch
from tests.support.flow import processes_with, wait_until

_RESOURCES = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "1000"}]
# A node that sleeps in a child of its own session, which a signal to the process group would not
# reach.
_ENDLESS = (
    f"{sys.executable} -c \"import subprocess; subprocess.run(['sleep', '613'], "
    'start_new_session=True)"'
)
_NO_CAPACITY = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
_AWAITS_NOTICE = """
import time
from ebbflow.infra.instance import identify_machine
from ebbflow.infra.notices import MetadataSource
machine = identify_machine()
source = MetadataSource(poll_seconds=0.1)
print(machine.instance_id, machine.instance_type, machine.zone, machine.market, repr(source.begin()), flush=True)
while not (found := source.look()):
    time.sleep(0.1)
print(found[0].action, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBatch]:
    queues = {
        "light": {"instance_types": ["m5.large"]},
        "spot": {"market": "spot", "instance_types": ["g5.xlarge"], "zone": "us-west-2b"},
        "gang": {"instance_types": ["g5.xlarge"]},
    }
    with local_batch(
        tmp_path_factory.mktemp("batch"), queues=queues, time_scale=60, start_seconds=0.05
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def usual(batch: LocalBatch) -> Iterator[None]:
    yield
    batch.change(rules=[], clock_ahead_seconds=0, attempt_scale=1, time_scale=60, stop_seconds=1)


def submit(
    batch: LocalBatch, command: str, *, queue: str = "light", name: str = "job", **request: Any
) -> str:
    """The id of a plain job that runs `command` in a shell."""
    client = batch.client()
    properties = {
        "image": "image",
        "command": ["bash", "-c", command],
        "resourceRequirements": _RESOURCES,
    }
    definition = client.register_job_definition(
        jobDefinitionName="plain", type="container", containerProperties=properties
    )
    named = definition["jobDefinitionArn"]
    return client.submit_job(jobName=name, jobQueue=queue, jobDefinition=named, **request)["jobId"]


def submit_gang(batch: LocalBatch, main: str, child: str, *, queue: str = "gang") -> str:
    client = batch.client()
    ranges = [
        {
            "targetNodes": nodes,
            "container": {
                "image": "image",
                "command": ["true"],
                "resourceRequirements": _RESOURCES,
            },
        }
        for nodes in ("0:0", "1:2")
    ]
    properties = {"numNodes": 3, "mainNode": 0, "nodeRangeProperties": ranges}
    definition = client.register_job_definition(
        jobDefinitionName="gang", type="multinode", nodeProperties=properties
    )["jobDefinitionArn"]
    overrides = [
        {"targetNodes": nodes, "containerOverrides": {"command": ["bash", "-c", command]}}
        for nodes, command in (("0:0", main), ("1:", child))
    ]
    request = {"jobName": "gang", "jobQueue": queue, "jobDefinition": definition}
    return client.submit_job(**request, nodeOverrides={"nodePropertyOverrides": overrides})["jobId"]


def described(batch: LocalBatch, job: str) -> dict[str, Any]:
    return batch.client().describe_jobs(jobs=[job])["jobs"][0]


def ended(batch: LocalBatch, job: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = described(batch, job)
        if found["status"] in ("SUCCEEDED", "FAILED"):
            return found
        return None

    return wait_until(f"the end of {job}", look)


def started(batch: LocalBatch, job: str) -> bool:
    return described(batch, job)["status"] == "RUNNING"


def test_a_job_runs_in_its_own_folder_with_batchs_variables_and_reports_its_times(
    batch: LocalBatch,
) -> None:
    before = 1000 * time.time()
    own = {"environment": [{"name": "GREETING", "value": "hello"}]}
    job = submit(
        batch,
        "echo $GREETING $AWS_BATCH_JOB_ID $AWS_BATCH_JQ_NAME $PWD; exit 3",
        containerOverrides=own,
    )
    told = ended(batch, job)
    assert (
        told["status"] == "FAILED" and told["statusReason"] == "Essential container in task exited"
    )
    assert told["container"]["exitCode"] == told["attempts"][0]["container"]["exitCode"] == 3
    assert (
        before - 1
        <= told["createdAt"]
        <= told["startedAt"]
        <= told["stoppedAt"]
        <= 1000 * time.time() + 1
    )
    assert batch.output(job).split() == ["hello", job, "light", str(batch.folder / job / "1-0")]
    job = submit(batch, "env")
    assert ended(batch, job)["status"] == "SUCCEEDED"
    assert "AWS_BATCH_JOB_NUM_NODES" not in batch.output(job)


def test_the_main_nodes_end_is_the_gangs_and_a_childs_is_nobodys(batch: LocalBatch) -> None:
    place = "$AWS_BATCH_JOB_NODE_INDEX/$AWS_BATCH_JOB_NUM_NODES"
    variables = f"echo {place} ${{AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-main}}"
    child = f"{variables}; [ $AWS_BATCH_JOB_NODE_INDEX = 1 ] && exit 4; sleep 600"
    job = submit_gang(batch, f"{variables}; until [ -e leave ]; do sleep 0.05; done", child)
    wait_until("the first child's end", lambda: described(batch, f"{job}#1")["status"] == "FAILED")
    assert described(batch, f"{job}#1")["container"]["exitCode"] == 4
    wait_until("the second child", lambda: described(batch, f"{job}#2")["status"] == "RUNNING")
    assert described(batch, job)["status"] == "RUNNING"
    (batch.folder / job / "1-0" / "leave").touch()
    assert ended(batch, job)["status"] == "SUCCEEDED"
    assert described(batch, f"{job}#2")["status"] == "FAILED"
    assert batch.output(job).split() == ["0/3", "main"]
    assert (
        batch.output(job, node=2).split()[0] == "2/3"
        and batch.output(job, node=2).split()[1] != "main"
    )
    listed = batch.client().list_jobs(multiNodeJobId=job, jobStatus="FAILED")["jobSummaryList"]
    assert [summary["jobId"] for summary in listed] == [f"{job}#1", f"{job}#2"]


def test_a_gang_on_spot_is_refused(batch: LocalBatch) -> None:
    with pytest.raises(ClientError, match=r"Multi-node parallel jobs aren't supported .* Spot"):
        submit_gang(batch, "true", "true", queue="spot")


def test_a_reclaim_notifies_the_instance_and_ends_everything_on_it(batch: LocalBatch) -> None:
    root = Path(__file__).resolve().parents[2]
    job = submit(
        batch, f"{_ENDLESS} & cd {root} && {sys.executable} -c '{_AWAITS_NOTICE}'", queue="spot"
    )
    wait_until(
        "its instance's identity",
        lambda: "us-west-2b" in batch.output(job) if started(batch, job) else "",
    )
    assert processes_with(job)
    batch.reclaim(job)
    told = ended(batch, job)
    instance, *identity = batch.output(job).split()
    assert identity == ["g5.xlarge", "us-west-2b", "spot", "''", "terminate"]
    assert told["statusReason"] == f"Host EC2 (instance {instance}) terminated."
    assert "exitCode" not in told["container"]
    wait_until("the end of all its processes", lambda: not processes_with(job))


def test_capacity_follows_a_trace(batch: LocalBatch) -> None:
    batch.change(
        queues={"traced": {"market": "spot", "capacity": [[0, 1], [300, 0]]}}, time_scale=300
    )
    batch.begin_traces()
    first = submit(batch, "sleep 600", queue="traced")
    second = submit(batch, "true", queue="traced")
    reason = wait_until(
        "why the second waits", lambda: described(batch, second).get("statusReason")
    )
    assert described(batch, second)["status"] == "RUNNABLE"
    assert reason.startswith(
        f"{_NO_CAPACITY} - Service cannot fulfill the capacity requested for instance type"
    )
    assert ended(batch, first)["statusReason"].startswith("Host EC2 (instance i-")
    limit = {"reason": _NO_CAPACITY, "state": "RUNNABLE", "maxTimeSeconds": 600, "action": "CANCEL"}
    batch.client().update_job_queue(jobQueue="traced", jobStateTimeLimitActions=[limit])
    told = ended(batch, second)
    assert (
        told["statusReason"]
        == f"Canceled by JobStateTimeLimit action due to reason: {_NO_CAPACITY}"
    )
    assert "startedAt" not in told


def test_a_job_that_no_instance_can_hold_waits_and_reports_why(batch: LocalBatch) -> None:
    more = {"resourceRequirements": [{"type": "GPU", "value": "2"}]}
    job = submit(batch, "true", queue="spot", containerOverrides=more)
    reason = wait_until("why it waits", lambda: described(batch, job).get("statusReason"))
    assert reason.startswith("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT")
    batch.client().cancel_job(jobId=job, reason="it never fits")
    told = ended(batch, job)
    assert (told["status"], told["statusReason"]) == (
        "FAILED",
        "it never fits",
    ) and "startedAt" not in told
    assert (told["isCancelled"], told["isTerminated"]) == (True, False)
    batch.client().terminate_job(jobId=job, reason="again")
    assert described(batch, job)["statusReason"] == "it never fits", "what has ended stays as it is"


def test_no_more_vcpus_run_than_the_environment_may_have(batch: LocalBatch) -> None:
    """4 of each g5.xlarge: a second job waits for the first to end, one of three nodes for ever."""
    batch.change(queues={"small": {"instance_types": ["g5.xlarge"], "max_vcpus": 7}})
    [environment] = batch.client().describe_compute_environments(
        computeEnvironments=["small-environment"]
    )["computeEnvironments"]
    assert environment["computeResources"]["maxvCpus"] == 7
    first = submit(batch, "until [ -e leave ]; do sleep 0.05; done", queue="small")
    wait_until("its start", lambda: started(batch, first))
    second = submit(batch, "true", queue="small")
    wait_until("it waits", lambda: described(batch, second)["status"] == "RUNNABLE")
    assert "statusReason" not in described(batch, second), "it waits its turn, and nothing is wrong"
    (batch.folder / first / "1-0" / "leave").touch()
    assert ended(batch, second)["startedAt"] >= ended(batch, first)["stoppedAt"]

    gang = submit_gang(batch, "true", "true", queue="small")
    reason = wait_until("why it waits", lambda: described(batch, gang).get("statusReason"))
    assert reason.startswith(
        "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE - CE(s) associated with the job queue"
    )
    limit = {
        "reason": reason.partition(" ")[0],
        "state": "RUNNABLE",
        "maxTimeSeconds": 600,
        "action": "CANCEL",
    }
    batch.client().update_job_queue(jobQueue="small", jobStateTimeLimitActions=[limit])
    batch.change(time_scale=6000)
    assert ended(batch, gang)["statusReason"].startswith("Canceled by JobStateTimeLimit action")


def test_an_attempt_ends_after_its_duration_and_when_it_is_terminated(batch: LocalBatch) -> None:
    batch.change(attempt_scale=60)
    late = ended(batch, submit(batch, "sleep 600", timeout={"attemptDurationSeconds": 60}))
    assert (
        late["statusReason"] == "Job attempt duration exceeded timeout"
        and late["container"]["exitCode"] == 137
    )
    job = submit(batch, _ENDLESS)
    wait_until("its start", lambda: started(batch, job))
    batch.client().cancel_job(jobId=job, reason="too late to cancel")
    assert described(batch, job)["status"] == "RUNNING" and not described(batch, job)["isCancelled"]
    batch.client().terminate_job(jobId=job, reason="enough")
    told = ended(batch, job)
    assert (told["statusReason"], told["isTerminated"], told["isCancelled"]) == (
        "enough",
        True,
        False,
    )
    wait_until("the end of all its processes", lambda: not processes_with(job))
    batch.change(stop_seconds=60)
    job = submit(batch, "trap 'exit 0' TERM; echo up; while :; do sleep 0.1; done")
    wait_until("its start", lambda: started(batch, job) and "up" in batch.output(job))
    batch.client().terminate_job(jobId=job, reason="enough")
    told = ended(batch, job)
    assert (told["status"], told["statusReason"], told["container"]["exitCode"]) == (
        "FAILED",
        "enough",
        0,
    )


def test_a_retry_strategy_starts_a_job_again_for_what_it_names(batch: LocalBatch) -> None:
    hosts = {"onStatusReason": "Host EC2*", "action": "RETRY"}
    strategy = {"attempts": 3, "evaluateOnExit": [hosts, {"onReason": "*", "action": "EXIT"}]}
    job = submit(
        batch,
        "[ $AWS_BATCH_JOB_ATTEMPT = 1 ] && sleep 600; exit 7",
        queue="spot",
        retryStrategy=strategy,
    )
    wait_until("its start", lambda: started(batch, job))
    batch.reclaim(job, notice=False)
    attempts = ended(batch, job)["attempts"]
    assert [attempt["container"].get("exitCode") for attempt in attempts] == [None, 7]
    assert attempts[0]["stoppedAt"] <= attempts[1]["startedAt"]


def test_requests_that_aws_refuses(batch: LocalBatch) -> None:
    client = batch.client(config=Config(retries={"total_max_attempts": 1}))
    with pytest.raises(ClientError, match="JobQueue nowhere not found"):
        submit(batch, "true", queue="nowhere")
    client.update_job_queue(jobQueue="gang", state="DISABLED")
    with pytest.raises(ClientError, match="DISABLED"):
        submit(batch, "true", queue="gang")
    client.update_job_queue(jobQueue="gang", state="ENABLED")
    with pytest.raises(ClientError, match="at least 60"):
        submit(batch, "true", timeout={"attemptDurationSeconds": 59})
    unchecked = batch.client(config=Config(parameter_validation=False))
    with pytest.raises(ClientError, match='Missing required parameter in input: "jobs"'):
        unchecked.describe_jobs()
    batch.change(rules=[{"operation": "SubmitJob", "kind": "throttle", "times": 2}])
    submit(batch, "true")  # as boto3 tries again by itself
    assert batch.told()["met"]["throttle"] == 2
    batch.change(rules=[{"operation": "DescribeJobs", "kind": "throttle"}])
    with pytest.raises(client.exceptions.ClientError, match="TooManyRequestsException"):
        client.describe_jobs(jobs=["x"])
    batch.change(missing_images=["^image$"])
    told = ended(batch, submit(batch, "true"))
    batch.change(missing_images=[])
    assert (
        told["container"]["reason"].startswith("CannotPullContainerError")
        and "startedAt" not in told
    )


def test_a_clock_that_differs_shows_in_all_times_and_beyond_five_minutes_in_signatures(
    batch: LocalBatch,
) -> None:
    batch.change(clock_ahead_seconds=290)
    job = submit(batch, "true")
    assert ended(batch, job)["createdAt"] > 1000 * (time.time() + 280)
    batch.change(clock_ahead_seconds=310)
    with pytest.raises(ClientError, match="InvalidSignatureException"):
        described(batch, job)


def test_nothing_outlives_the_server(tmp_path: Path) -> None:
    with local_batch(tmp_path, queues={"light": {}}) as batch:
        job = submit(batch, _ENDLESS)
        wait_until("its start", lambda: started(batch, job))
        assert processes_with(job)
    wait_until("the end of all its processes", lambda: not processes_with(job))
