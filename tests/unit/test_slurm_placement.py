"""The partition of the next attempt on Slurm, and what Slurm's answers mean."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbflow.core.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    PartitionConfig,
    RunConfig,
    SlurmConfig,
)
from ebbflow.core.errors import Outcome
from ebbflow.core.event_payloads import SlurmJobPayload
from ebbflow.flows.slurm.attempt import JobEnd
from ebbflow.flows.slurm.placement import JobOutlook, choose_partition, limit_minutes
from ebbflow.infra.slurm.commands import Cause, SlurmJob, parse_accounting, parse_job
from ebbflow.infra.slurm.partitions import explain_fewest_gpus, gpus_per_node
from ebbflow.infra.slurm.script import partition_options, warning_seconds
from ebbflow.training.launch.slurm_node import NodeResult

SPOT = PartitionConfig(name="spot", preemptible=True)
SAFE = PartitionConfig(name="safe")
CONFIG = RunConfig(slurm=SlurmConfig(partitions=[SPOT, SAFE]))
SHOWN = (
    "JobId=1 JobName=who UserId=root(0) JobState=FAILED Reason=NonZeroExitCode Requeue=1 "
    "Restarts=0 StartTime=2026-11-29T09:32:45 EndTime=2026-11-29T09:32:53 Partition=spot "
    "PreemptEligibleTime=2026-11-29T09:32:45 PreemptTime=2026-11-29T09:32:47 NodeList=n[1-2]"
)


# Written after sacct(1) of 22.05 ("JOB STATE CODES", --parsable2); no slurmdbd was at hand to record it
ACCOUNTED = {
    "PREEMPTED|None|spot|n[1-2]|2026-11-29T09:00:00|2026-11-29T09:10:00|j": "PREEMPTED, preempted",
    "CANCELLED by 1000|None|safe|n1|2026-11-29T09:00:00|2026-11-29T09:10:00|j": (
        "CANCELLED by uid 1000"
    ),
    "OUT_OF_MEMORY|None|safe|n1|2026-11-29T09:00:00|2026-11-29T09:10:00|j": "OUT_OF_MEMORY",
    "BOOT_FAIL|None|safe|None assigned|Unknown|Unknown|j": "BOOT_FAIL",
}


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
    choice = choose_partition(CONFIG, ends, JobOutlook())
    assert choice.partition is not None
    assert choice.partition.name == name and reason in choice.reason


@pytest.mark.parametrize(("hours_left", "name"), [(1.3, "safe"), (1.5, "spot"), (None, "spot")])
def test_a_near_deadline_leaves_preemptible_partitions(hours_left: float | None, name: str) -> None:
    """One measured hour, a quarter of it as slack, and two starts of 4 min: 1.38 h."""
    choice = choose_partition(CONFIG, [], JobOutlook(hours_left=hours_left, hours_needed=1.0))
    assert choice.partition is not None and choice.partition.name == name


@pytest.mark.parametrize(
    ("usd_left", "name", "reason"),
    [
        (None, "spot", "the cheapest, $12 per node and hour"),
        # An hour on two nodes is $40 in safe; with slack and two starts of 4 min in spot $53.20
        (60.0, "spot", "the cheapest"),
        (53.0, "safe", "$53.0000 of the budget is left, and finishing in safe after a preemption"),
        (40.0, "safe", "may take $53.2000"),
        (39.0, "spot", "the cheapest"),  # only spot can finish within the budget
    ],
)
def test_prices_order_partitions_and_a_small_budget_leaves_preemptible_ones(
    usd_left: float | None, name: str, reason: str
) -> None:
    priced = [
        SAFE.model_copy(update={"usd_per_node_hour": 20.0}),
        SPOT.model_copy(update={"usd_per_node_hour": 12.0}),
    ]
    config = RunConfig(slurm=SlurmConfig(partitions=priced), cluster=ClusterConfig(nodes=2))
    choice = choose_partition(config, [], JobOutlook(hours_needed=1.0, usd_left=usd_left))
    assert choice.partition is not None
    assert choice.partition.name == name and reason in choice.reason


@pytest.mark.parametrize(
    ("used", "usual", "minutes"),
    [(0.0, 60.0, 30), (0.5, 60.0, 15), (1.2, 60.0, 0), (0.0, 20.0, None), (0.0, None, 30)],
)
def test_a_budget_of_node_hours_limits_the_next_slurm_job(
    used: float, usual: float | None, minutes: int | None
) -> None:
    """One node-hour is 30 minutes of two nodes."""
    config = RunConfig(slurm=SlurmConfig(budget_node_hours=1.0), cluster=ClusterConfig(nodes=2))
    assert limit_minutes(config, node_hours_used=used, usual_minutes=usual) == minutes


def test_a_time_limit_of_the_budget_replaces_that_of_the_partition() -> None:
    limited = PartitionConfig(name="spot", max_hours=2.0)
    assert partition_options(limited)[-1] == "--time=120"
    assert partition_options(limited, most_minutes=7) == ["--partition=spot", "--time=7"]
    assert partition_options(None, most_minutes=7) == ["--time=7"]


def test_without_partitions_the_cluster_chooses() -> None:
    choice = choose_partition(RunConfig(), [], JobOutlook())
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


@pytest.mark.parametrize("line", ACCOUNTED)
def test_accounting_tells_how_a_job_ended(line: str) -> None:
    requeued = "NODE_FAIL|None|spot|n[1-2]|2026-11-29T08:00:00|2026-11-29T08:10:00|j"
    job = parse_accounting("1", f"{requeued}\n{line}\n")
    assert job is not None and job.describe() == ACCOUNTED[line]
    assert (job.ended_utc is None) is ("Unknown" in line)
    assert (job.name, job.never_started) == ("j", "None assigned" in line)
    assert parse_accounting("1", "") is None


def test_a_drain_that_nothing_else_explains_is_the_time_limit() -> None:
    result = NodeResult(job_id="1", outcome=Outcome.INTERRUPTED, step=7)
    failed = SlurmJob(job_id="1", state="FAILED", reason="NonZeroExitCode")
    assert JobEnd(slurm=failed, result=result, asked=False).cause is Cause.TIME_LIMIT
    assert JobEnd(slurm=failed, result=None, asked=False).cause is Cause.FAILED
    asked = JobEnd(slurm=failed, result=result, asked=True)
    assert asked.cause is Cause.CANCELLED
    assert asked.describe() == "FAILED, asked by its launcher to leave"


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


def test_automatic_ranks_fit_every_partition_that_an_attempt_may_get() -> None:
    partitions = [
        PartitionConfig(name="a", gres="gpu:8", usd_per_node_hour=24.0),
        PartitionConfig(name="b", gres="gpu:4", usd_per_node_hour=10.0),
    ]
    cluster = ClusterConfig(processes_per_node="auto")
    config = RunConfig(slurm=SlurmConfig(partitions=partitions), cluster=cluster)
    assert gpus_per_node(config.slurm) == 4
    assert explain_fewest_gpus(config) == (
        "cluster.processes_per_node is auto: 4 ranks on each node, the fewest GPUs of gres (8 in a, "
        "4 in b)"
    )
    alike = SlurmConfig(partitions=[partitions[1], PartitionConfig(name="c", gres="gpu:4")])
    assert explain_fewest_gpus(RunConfig(slurm=alike, cluster=cluster)) == ""
    assert explain_fewest_gpus(RunConfig(slurm=config.slurm)) == ""


@pytest.mark.parametrize(("save_seconds", "warning"), [(None, 121), (4.0, 42), (300.0, 121)])
def test_slurm_warns_before_the_last_saves_must_begin(
    save_seconds: float | None, warning: int
) -> None:
    """Three measured saves, at most checkpoint.stop_seconds, and 30 s."""
    config = RunConfig(checkpoint=CheckpointConfig(stop_seconds=90.5))
    assert warning_seconds(config, save_seconds) == warning


def test_a_job_that_leaves_a_drained_node_says_so_and_continues() -> None:
    result = NodeResult(job_id="1", outcome=Outcome.INTERRUPTED, step=7)
    failed = SlurmJob(job_id="1", state="FAILED", reason="NonZeroExitCode")
    end = JobEnd(slurm=failed, result=result, asked=False, drained="n1 drained (new fan)")
    assert end.cause is Cause.NODE_DRAINED and end.describe() == "FAILED, n1 drained (new fan)"


def test_a_waiting_job_has_an_expected_start_and_no_start() -> None:
    waiting = parse_job("1", "JobState=PENDING Reason=Resources StartTime=2026-11-29T10:00:00")
    assert (waiting.started_utc, waiting.reason) == (None, "Resources")
    assert waiting.expected_start_utc is not None


def test_a_cancelled_job_names_who_cancelled_it_or_why_that_is_unknown() -> None:
    seen = SlurmJob(job_id="1", state="CANCELLED")
    unknown = JobEnd(slurm=seen, result=None, asked=False)
    assert unknown.describe() == "CANCELLED, by whom is not known without sacct"
    by_user = JobEnd(slurm=replace(seen, cancelled_by="1000"), result=None, asked=False)
    assert by_user.describe() == "CANCELLED by uid 1000"
    expired = JobEnd(slurm=seen, result=None, asked=False, queue_expired=True)
    assert expired.describe() == "CANCELLED by this launcher, no nodes in time"
