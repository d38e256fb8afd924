"""A gang of two Spot nodes on the local cluster: a pod is evicted, a node is lost, and the last
attempt ends bit-equal.

The eviction redoes no step. Weights and losses equal those of two ranks on this machine. The bill
is of the pods' own times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.batch.prepared import paced_settings, with_paced
from tests.support.flow import FlowRun, FlowRunner, train_alone, wait_until
from tests.support.kubernetes.flow import KubernetesRunner, cluster
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]

_SETTINGS: dict[str, object] = {
    "training__max_steps": 24,
    "training__evaluation_interval_steps": 12,
}


@dataclass(frozen=True)
class Ran:
    runner: KubernetesRunner
    run: FlowRun


def generations(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == "generation_started"]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("quiet")
    runner = FlowRunner(folder, environment=with_paced(folder))
    return train_alone(runner, **_SETTINGS, **paced_settings(0.0), ranks=2)


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory, swift: Swift) -> Iterator[Ran]:
    """Only the training steps go to the cluster."""
    folder = tmp_path_factory.mktemp("kubernetes")
    image = with_paced(folder)
    with cluster(folder / "cluster", swift, image=image) as running:
        runner = KubernetesRunner(folder / "launcher", swift, running)
        runner.environment |= image
        process = runner.start(
            "run", "--with", "cloud", *runner.options(**_SETTINGS, **paced_settings(0.3))
        )
        runner.await_commit()
        worker = running.training_pods()[-1]["metadata"]["name"]
        running.ask("evict", {"pod": worker})
        wait_until("the second attempt", lambda: len(generations(runner.events())) == 2, pause=0.5)
        pods = running.training_pods()
        assert worker not in [pod["metadata"]["name"] for pod in pods]
        running.ask("lose", {"node": pods[-1]["spec"]["nodeName"]})
        run = runner.finish(process, 400)
        if run.exit_code:
            print(running.outputs())
        yield Ran(runner, run)


def test_a_gang_that_loses_a_node_ends_with_the_weights_of_a_quiet_run(
    lost: Ran, quiet: dict[str, Any]
) -> None:
    assert lost.run.exit_code == 0, lost.run.output
    assert lost.run.report["weights_sha256"] == quiet["weights_sha256"]
    assert lost.run.report["loss_curve"] == quiet["loss_curve"]


def test_the_eviction_redoes_no_step(lost: Ran) -> None:
    events = lost.runner.events()
    steps = [
        event["step"] for event in events if event["name"] == "step" and event["generation"] == 1
    ]
    assert generations(events)[1]["data"]["parent_step"] == max(steps)


def test_every_attempt_is_billed_by_its_pods_own_times(lost: Ran) -> None:
    past = [
        pod
        for pod in lost.runner.cluster.past()["pods"]
        if "replicatedjob-name" in str(pod["labels"])
    ]
    assert len(past) == 6 and [pod["exit_code"] for pod in past].count(None) == 1
    ended = [event["data"] for event in lost.runner.events() if event["name"] == "batch_attempt"]
    assert [attempt_end["cause"] for attempt_end in ended] == ["reclaimed", "reclaimed", "ended"]
    for attempt in ended:
        mine = sorted(
            (pod for pod in past if pod["pod"].startswith(attempt["job_name"])),
            key=lambda one: one["pod"],
        )
        for (start, stop), pod in zip(attempt["node_times"], mine, strict=True):
            if pod["exit_code"] is None:
                late = 8  # the cluster notices the loss of a node late
            else:
                late = 1
            assert start == pytest.approx(pod["started"], abs=1) and stop == pytest.approx(
                pod["ended"], abs=late
            )
    seconds = sum(
        stop - start for attempt_end in ended for start, stop in attempt_end["node_times"]
    )
    assert lost.run.report["paid_rank_seconds"] == pytest.approx(seconds, abs=0.1)
    assert {attempt_end["market"] for attempt_end in ended} == {"spot"} and {
        attempt_end["instance_type"] for attempt_end in ended
    } == {"g5.xlarge"}


def test_nothing_stays_in_the_cluster_and_no_right_was_missing(lost: Ran) -> None:
    told = lost.runner.cluster.told()
    assert told["denied"] == [] and told["problems"] == []
    assert [
        pod
        for pod in lost.runner.cluster.items("pods")
        if pod["status"]["phase"] in ("Pending", "Running")
    ] == []
