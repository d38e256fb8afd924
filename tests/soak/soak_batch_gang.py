"""One node on Spot, then two nodes on demand, in one run on the local Batch: the same training as
one rank's.

Why two: earlier jobs of the store have shown that a single machine of the on-demand queue's type
misses the deadline. The clock of AWS is almost five minutes ahead of this machine's, which no
figure may notice, and the store answers every thirtieth request with 503, Metaflow's own too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest

from tests.support.batch.flow import ON_DEMAND, SPOT, BatchRunner, account
from tests.support.batch.prepared import paced_settings, remember_speeds, with_paced
from tests.support.flow import FlowRun, FlowRunner, assert_ledger_adds_up, metered_rank_seconds
from tests.support.s3.fixture import FailingServer, failing_s3
from tests.support.swift import Swift

__all__ = ["failing_s3"]  # a fixture

pytestmark = [pytest.mark.flow, pytest.mark.timeout(3600)]

FAST = "g5.xlarge"
SLOW = "g4dn.xlarge"
_STEPS = 60
# Slow enough that the notice comes in mid-training on any machine.
_SETTINGS = {
    **paced_settings(0.25),
    "training__max_steps": _STEPS,
    "cluster__instance_types": json.dumps([FAST, SLOW]),
    "batch__runnable_minutes": 5,
    "batch__queues": json.dumps(
        [
            {"name": SPOT, "market": "spot", "instance_types": [FAST]},
            {
                "name": ON_DEMAND,
                "market": "on_demand",
                "instance_types": [SLOW],
                "multi_node": True,
            },
        ]
    ),
}
# Tokens per second by type and nodes. 60 steps of 1,024 tokens: 0.6 h on FAST, 5.7 h on SLOW, 1.1 h
# on two of them. So the deadline bears Spot first, and on demand only two nodes, however much is
# done before.
_SPEEDS = {(FAST, 1): 30.0, (SLOW, 1): 3.0, (SLOW, 2): 15.0}
_DEADLINE_HOURS = 2.3


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> FlowRun:
    folder = tmp_path_factory.mktemp("quiet")
    runner = FlowRunner(folder, environment=with_paced(folder))
    options = runner.options(**paced_settings(0.0), cluster__nodes=1, training__max_steps=_STEPS)
    run = runner.run("run", *options, timeout=1200)
    assert run.exit_code == 0, run.output
    return run


@pytest.fixture(scope="module")
def moved(
    tmp_path_factory: pytest.TempPathFactory, failing_s3: FailingServer
) -> Iterator[tuple[BatchRunner, FlowRun]]:
    """Its Spot capacity goes in mid-training and does not come back."""
    folder = tmp_path_factory.mktemp("moved")
    store = Swift(failing_s3.endpoint, failing_s3.access_key, failing_s3.secret_key)
    queues = {
        "light-m5": {"instance_types": ["m5.large"]},
        SPOT: {"market": "spot", "instance_types": [FAST]},
        ON_DEMAND: {"instance_types": [SLOW]},
    }
    about = {
        "queues": queues,
        "time_scale": 3.0,
        "clock_ahead_seconds": 290,
        "image": with_paced(folder),
    }
    with account(folder / "batch", store, **about) as batch:
        runner = BatchRunner(folder, store, batch)
        runner.environment |= with_paced(folder)
        options = runner.options(
            **_SETTINGS, cluster__nodes="auto", cost__deadline_hours=_DEADLINE_HOURS
        )
        remember_speeds(runner, options, _SPEEDS)
        failing_s3.behave(runner.bucket, rates={"slow_down": 0.03})
        process = runner.start("run", "--with", "cloud", *options)
        runner.await_commit()
        batch.change(queues={SPOT: {"capacity": [[0, 0]]}})
        batch.begin_traces()
        batch.client().update_job_queue(jobQueue=SPOT, state="DISABLED")
        yield runner, runner.finish(process, 1200)


def test_one_node_on_spot_is_followed_by_two_on_demand(moved: tuple[BatchRunner, FlowRun]) -> None:
    runner, run = moved
    assert run.exit_code == 0, run.output
    jobs = runner.training_jobs()
    assert [job["jobQueue"].rpartition("/")[2] for job in jobs] == [SPOT, ON_DEMAND]
    assert [job.get("nodeProperties", {}).get("numNodes") for job in jobs] == [None, 2]
    assert run.report["outcome"] == "completed" and run.report["redone_steps"] == 0


def test_a_store_that_often_says_503_costs_nothing_but_time(
    moved: tuple[BatchRunner, FlowRun], failing_s3: FailingServer
) -> None:
    assert failing_s3.told(moved[0].bucket)["met"]["slow_down"] > 10
    assert moved[1].report["failures"] == 0


def test_every_step_has_the_loss_of_one_undisturbed_rank(
    moved: tuple[BatchRunner, FlowRun], quiet: FlowRun
) -> None:
    """Of other samples, or in another order, the losses would differ in the second digit."""
    curve = moved[1].report["loss_curve"]
    expected = quiet.report["loss_curve"]
    assert (
        [step for step, _ in curve] == [step for step, _ in expected] == list(range(1, _STEPS + 1))
    )
    assert (
        max(abs(loss - other) for (_, loss), (_, other) in zip(curve, expected, strict=True)) < 1e-5
    )
    neighbours = itertools.pairwise(expected)
    assert min(abs(loss - other) for (_, loss), (_, other) in neighbours) > 1e-4


def test_every_machine_is_billed_once_whatever_the_clock_of_aws_says(
    moved: tuple[BatchRunner, FlowRun],
) -> None:
    runner, run = moved
    assert_ledger_adds_up(run.report)
    client = runner.batch.client()
    machines = []
    for job in runner.training_jobs():
        nodes = job.get("nodeProperties", {}).get("numNodes", 1)
        # Each node of a gang ends at a time of its own
        names = [f"{job['jobId']}#{node}" for node in range(nodes)]
        if nodes == 1:
            machines += [job]
        else:
            machines += client.describe_jobs(jobs=names)["jobs"]
    seconds = sum(machine["stoppedAt"] - machine["startedAt"] for machine in machines) / 1000
    assert len(machines) == 3
    assert metered_rank_seconds(run.report) == pytest.approx(seconds, abs=0.5)
