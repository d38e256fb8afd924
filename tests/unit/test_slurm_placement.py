"""The partition of the next attempt on Slurm, and what Slurm's answers mean."""

from __future__ import annotations

import pytest

from ebbflow.core.config.schema import CheckpointConfig, PartitionConfig, RunConfig, SlurmConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.event_payloads import SlurmJobPayload
from ebbflow.flows.slurm.attempt import JobEnd
from ebbflow.flows.slurm.placement import choose_partition
from ebbflow.infra.slurm.commands import Cause, SlurmJob, parse_job
from ebbflow.infra.slurm.script import gpus_per_node, partition_options, warning_seconds
from ebbflow.training.launch.slurm_node import NodeResult

SPOT = PartitionConfig(name="spot", preemptible=True)
SAFE = PartitionConfig(name="safe")
CONFIG = RunConfig(slurm=SlurmConfig(partitions=[SPOT, SAFE]))
SHOWN = (
    "JobId=1 JobName=who UserId=root(0) JobState=FAILED Reason=NonZeroExitCode Requeue=1 "
    "Restarts=0 StartTime=2026-11-29T09:32:45 EndTime=2026-11-29T09:32:53 Partition=spot "
    "PreemptEligibleTime=2026-11-29T09:32:45 PreemptTime=2026-11-29T09:32:47 NodeList=n[1-2]"
)


def ended(cause: Cause, partition: str = "spot", commits: int = 0) -> SlurmJobPayload:
    return SlurmJobPayload(
        job_id="1", does="ended", cause=cause.value, partition=partition, commits=commits
    )


@pytest.mark.parametrize(
    ("ends", "name", "reason"),
    [
        ([], "spot", "preferred"),
        ([ended(Cause.PREEMPTED, commits=3)], "spot", "preferred"),
        ([ended(Cause.PREEMPTED), ended(Cause.PREEMPTED)], "safe", "2 attempts in a row"),
        (
            [ended(Cause.PREEMPTED, commits=2), ended(Cause.PREEMPTED, commits=5)],
            "spot",
            "preferred",
        ),
        ([ended(Cause.REFUSED)], "safe", "spot granted no nodes within 1440 min"),
        ([ended(Cause.REFUSED), ended(Cause.PREEMPTED, "safe", 3)], "spot", "preferred"),
    ],
)
def test_the_preferred_partition_is_left_when_it_does_not_work(
    ends: list[SlurmJobPayload], name: str, reason: str
) -> None:
    choice = choose_partition(CONFIG, ends, hours_left=None, hours_needed=None)
    assert choice.partition is not None
    assert choice.partition.name == name and reason in choice.reason


@pytest.mark.parametrize(("hours_left", "name"), [(1.3, "safe"), (1.5, "spot"), (None, "spot")])
def test_a_near_deadline_leaves_preemptible_partitions(hours_left: float | None, name: str) -> None:
    """One measured hour, a quarter of it as slack, and two starts of 4 min: 1.38 h."""
    choice = choose_partition(CONFIG, [], hours_left=hours_left, hours_needed=1.0)
    assert choice.partition is not None and choice.partition.name == name


def test_without_partitions_the_cluster_chooses() -> None:
    choice = choose_partition(RunConfig(), [], hours_left=None, hours_needed=None)
    assert choice.partition is None and partition_options(None) == []


def test_a_preempted_job_that_left_in_time_counts_as_preempted() -> None:
    job = parse_job("1", SHOWN)
    assert (job.state, job.cause, job.ended) == ("FAILED", Cause.PREEMPTED, True)
    assert job.describe() == "FAILED, preempted"
    assert job.ended_utc is not None and job.started_utc is not None
    assert job.ended_utc - job.started_utc == 8


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("NODE_FAIL", Cause.NODE_FAILED),
        ("BOOT_FAIL", Cause.NODE_FAILED),
        ("OUT_OF_MEMORY", Cause.OUT_OF_MEMORY),
        ("TIMEOUT", Cause.TIME_LIMIT),
        ("CANCELLED", Cause.CANCELLED),
        ("", Cause.UNKNOWN),
    ],
)
def test_states_of_slurm_have_causes(state: str, cause: Cause) -> None:
    assert SlurmJob(job_id="1", state=state).cause is cause


def test_a_drain_that_nothing_else_explains_is_the_time_limit() -> None:
    result = NodeResult(job_id="1", outcome=Outcome.INTERRUPTED, step=7)
    failed = SlurmJob(job_id="1", state="FAILED", reason="NonZeroExitCode")
    assert JobEnd(slurm=failed, result=result, asked=False).cause is Cause.TIME_LIMIT
    assert JobEnd(slurm=failed, result=None, asked=False).cause is Cause.FAILED


def test_a_requeued_job_that_the_launcher_has_cancelled_is_no_users_cancel() -> None:
    requeued = SlurmJob(job_id="1", state="CANCELLED", restarts=1)
    assert JobEnd(slurm=requeued, result=None, asked=False).cause is Cause.REQUEUED


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [(None, 1), ("gpu:8", 8), ("gpu:a100:4", 4), ("gpu:a100_3g.20gb:2", 2), ("craynetwork:1", 1)],
)
def test_gres_names_the_gpus_of_a_node(gres: str | None, gpus: int) -> None:
    partition = PartitionConfig(name="p", gres=gres)
    assert gpus_per_node(SlurmConfig(partitions=[partition])) == gpus


def test_slurm_warns_before_the_last_save_must_begin() -> None:
    config = RunConfig(checkpoint=CheckpointConfig(stop_seconds=90.5))
    assert warning_seconds(config) == 121
