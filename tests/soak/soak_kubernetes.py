"""What a cluster does to a gang of two Spot nodes, one scenario per run, on the local cluster.

Quiet; a pod evicted; a node lost; no capacity; no API server for a minute; a launcher that is
killed. Where training ends, its weights equal those of two ranks on this machine. The last proof
loses a node per minute; `SOAK_MINUTES` (default: 20) sets its length and `SOAK_NODES` (default: 2)
its nodes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch.prepared import paced_settings, with_paced
from tests.support.flow import FlowRun, FlowRunner, processes_with, train_alone, wait_until
from tests.support.kubernetes.flow import KubernetesRunner, cluster
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(3600)]

Start = Callable[..., KubernetesRunner]

SPOT_ONLY = {
    "cluster__market": "spot",
    "cluster__start_deadline_seconds": 20,
    "cost__confidence": 0.1,  # Spot alone, within two hours
}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return with_paced(tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, image: dict[str, str]) -> dict[str, Any]:
    runner = FlowRunner(tmp_path_factory.mktemp("quiet"), environment=image)
    return train_alone(runner, **paced_settings(0.0), ranks=2)


@pytest.fixture
def start(tmp_path: Path, swift: Swift, image: dict[str, str]) -> Iterator[Start]:
    """Make a cluster and a runner whose process has been started."""
    with cluster(tmp_path / "cluster", swift, image=image) as running:

        def begin(
            backend: str = "cloud",
            pace: float = 0.2,
            changes: dict[str, Any] | None = None,
            **settings: Any,
        ):
            running.change(**(changes or {}))
            runner = KubernetesRunner(tmp_path / "launcher", swift, running)
            runner.environment |= image
            options = runner.options(**{**paced_settings(pace), **settings})
            runner.process = runner.start("run", "--with", backend, "--job", "soak", *options)  # type: ignore[attr-defined]
            return runner

        yield begin


def await_pods(runner: KubernetesRunner, count: int = 2) -> list[dict[str, Any]]:
    """Wait for the first commit, and return the training pods, node 0's first."""
    runner.await_commit()
    return wait_until(
        "the pods", lambda: len(found := runner.cluster.training_pods()) == count and found
    )


def finished(runner: KubernetesRunner, timeout: float = 600) -> FlowRun:
    run = runner.finish(runner.process, timeout)  # type: ignore[attr-defined]
    (runner.folder / "pods.txt").write_text(runner.cluster.outputs())
    assert runner.cluster.told()["problems"] == []
    return run


def alive(runner: KubernetesRunner) -> list[str]:
    pods = runner.cluster.items("pods")
    return [
        pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] in ("Pending", "Running")
    ]


def pod_seconds(runner: KubernetesRunner) -> float:
    past = runner.cluster.past()["pods"]
    return sum(
        pod["ended"] - pod["started"] for pod in past if "replicatedjob-name" in str(pod["labels"])
    )


def test_quiet_with_every_step_in_the_cluster(start: Start, quiet: dict[str, Any]) -> None:
    runner = start("kubernetes", pace=0.0)
    run = finished(runner)
    assert run.exit_code == 0, run.output
    assert (
        run.report["weights_sha256"] == quiet["weights_sha256"]
        and run.report["loss_curve"] == quiet["loss_curve"]
    )
    # Whole seconds, twice two pods
    assert run.report["paid_rank_seconds"] == pytest.approx(pod_seconds(runner), abs=4)
    assert runner.cluster.told()["denied"] == []


def test_an_evicted_pod_redoes_no_step(start: Start, quiet: dict[str, Any]) -> None:
    runner = start()
    runner.cluster.ask("evict", {"pod": await_pods(runner)[-1]["metadata"]["name"]})
    run = finished(runner)
    assert run.exit_code == 0, run.output
    assert run.report["redone_steps"] == 0
    assert run.report["weights_sha256"] == quiet["weights_sha256"]


def test_a_node_with_a_notice_redoes_no_step(start: Start, quiet: dict[str, Any]) -> None:
    runner = start()
    runner.cluster.ask("notice", {"node": await_pods(runner)[-1]["spec"]["nodeName"]})
    run = finished(runner)
    assert run.exit_code == 0, run.output
    assert run.report["redone_steps"] == 0
    assert run.report["weights_sha256"] == quiet["weights_sha256"]


def test_the_loss_of_node_0_ends_bit_equal(start: Start, quiet: dict[str, Any]) -> None:
    runner = start()
    runner.cluster.ask("lose", {"node": await_pods(runner)[0]["spec"]["nodeName"]})
    run = finished(runner)
    assert run.exit_code == 0, run.output
    assert run.report["weights_sha256"] == quiet["weights_sha256"]


def test_a_lost_worker_is_replaced_within_the_attempt(start: Start, quiet: dict[str, Any]) -> None:
    runner = start(kubernetes__node_replacements=1, cluster__expected_start_seconds=60)
    control, worker = await_pods(runner)
    runner.cluster.ask("lose", {"node": worker["spec"]["nodeName"]})
    run = finished(runner)
    assert run.exit_code == 0, run.output
    assert run.report["weights_sha256"] == quiet["weights_sha256"]
    assert [event["name"] for event in runner.events()].count("placed") == 1, "one attempt"
    past = [
        pod["pod"]
        for pod in runner.cluster.past()["pods"]
        if "replicatedjob-name" in str(pod["labels"])
    ]
    assert len(past) == 3 and past.count(control["metadata"]["name"]) == 1


def test_a_gang_that_went_on_with_one_node_grows_back(start: Start) -> None:
    runner = start(
        pace=0.5, kubernetes__node_replacements=1, cluster__min_nodes=1, training__max_steps=160
    )
    runner.cluster.ask("lose", {"node": await_pods(runner)[1]["spec"]["nodeName"]})
    run = finished(runner)
    assert run.exit_code == 0, run.output
    events = runner.events()
    assert [
        event["data"]["nodes"] for event in events if event["name"] == "generation_started"
    ] == [2, 1, 2]
    assert [event["name"] for event in events].count("placed") == 1, "one attempt"


def test_a_cluster_without_capacity_ends_with_5(start: Start) -> None:
    runner = start(changes={"pools": []}, batch__runnable_minutes=0.05)
    run = finished(runner)
    assert run.exit_code == 5, run.output
    assert alive(runner) == [] and runner.cluster.items("jobsets") == []


@pytest.mark.parametrize("arrives", [True, False])
def test_a_machine_that_comes_after_the_start_deadline(
    start: Start, quiet: dict[str, Any], arrives: bool
) -> None:
    pools = [{"name": "spot", "size": 1}]
    runner = start(
        pace=0.0,
        changes={"pools": pools},
        **SPOT_ONLY,
        cluster__expected_start_seconds=120 if arrives else 10,
    )
    if arrives:
        wait_until("node 0", lambda: len(runner.cluster.training_pods()) == 1, timeout=200)
        time.sleep(45)  # the task begins some seconds after its pod
        runner.cluster.change(pools=[{**pools[0], "size": 2}])
    run = finished(runner, 900)
    causes = [
        event["data"]["cause"] for event in runner.events() if event["name"] == "batch_attempt"
    ]
    if arrives:
        assert run.exit_code == 0 and causes == ["ended"], run.output
        assert run.report["weights_sha256"] == quiet["weights_sha256"]
    else:
        assert run.exit_code == 5 and set(causes) == {"never_started"}, run.output
    assert alive(runner) == []


def test_a_quota_of_pods_ends_with_5(start: Start) -> None:
    runner = start(changes={"quota": {"pods": 1}}, batch__runnable_minutes=0.05)
    run = finished(runner)
    assert (
        run.exit_code == 5
        and "fix: end other jobs, or raise the namespace's ResourceQuota" in run.output
    ), run.output
    assert alive(runner) == []


def test_an_image_that_cannot_be_pulled_ends_the_job(start: Start) -> None:
    runner = start(changes={"missing_images": ["ebbflow:local"]}, batch__runnable_minutes=0.05)
    run = finished(runner, 1200)  # twice five minutes
    assert (
        run.exit_code == 1 and "ImagePullBackOff" in run.output and "MF_MASTER" not in run.output
    ), run.output
    assert alive(runner) == []


def test_training_goes_on_without_the_api_server(start: Start, quiet: dict[str, Any]) -> None:
    runner = start(pace=1.0)
    await_pods(runner)
    runner.cluster.change(down=True)
    time.sleep(60)
    runner.cluster.change(down=False)
    run = finished(runner)
    assert run.exit_code == 0, run.output
    assert run.report["weights_sha256"] == quiet["weights_sha256"]
    assert [event["name"] for event in runner.events()].count("placed") == 1, "one attempt"


def test_a_queue_admits_the_gang_and_the_wait_is_not_paid(start: Start) -> None:
    runner = start(changes={"kueue": True, "kueue_pods": 0}, kubernetes__queue="team")
    wait_until(
        "the wait is shown",
        lambda: "waiting for admission to queue team" in runner.log.read_text(),
        timeout=200,
    )
    time.sleep(10)
    runner.cluster.change(kueue_pods=2)
    run = finished(runner)
    assert run.exit_code == 0, run.output
    assert run.report["paid_rank_seconds"] == pytest.approx(pod_seconds(runner), abs=4)


def test_a_gang_that_its_queue_preempts_redoes_no_step(start: Start, quiet: dict[str, Any]) -> None:
    runner = start(changes={"kueue": True, "kueue_pods": 2}, kubernetes__queue="team")
    pods = await_pods(runner)
    runner.cluster.change(kueue_pods=0)
    runner.cluster.ask(
        "preempt", {"jobset": pods[0]["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"]}
    )
    wait_until("no pod runs", lambda: not alive(runner), timeout=60)
    time.sleep(5)
    runner.cluster.change(kueue_pods=2)
    run = finished(runner)
    assert run.exit_code == 0, run.output
    assert (
        run.report["redone_steps"] == 0 and run.report["weights_sha256"] == quiet["weights_sha256"]
    )
    assert run.report["paid_rank_seconds"] == pytest.approx(pod_seconds(runner), abs=6)


def test_a_killed_launcher_leaves_nothing_and_the_next_one_goes_on(
    start: Start, quiet: dict[str, Any]
) -> None:
    runner = start()
    await_pods(runner)
    runner.process.send_signal(signal.SIGKILL)  # type: ignore[attr-defined]
    wait_until("the cluster is empty", lambda: not alive(runner), timeout=120)
    wait_until("no process is left", lambda: not processes_with("kubernetes step"), timeout=120)
    options = runner.options(**paced_settings(0.2))
    run = runner.run("run", "--with", "cloud", "--job", "soak", "--take-over", *options)
    assert run.exit_code == 0, run.output
    assert run.report["weights_sha256"] == quiet["weights_sha256"]


def test_a_node_lost_per_minute(start: Start, image: dict[str, str], tmp_path: Path) -> None:
    """The longest proof: each lost worker is replaced within the attempt. Prints its goodput."""
    minutes = float(os.environ.get("SOAK_MINUTES") or 20)
    nodes = int(os.environ.get("SOAK_NODES") or 2)
    settings = {"training__max_steps": round(minutes * 60 / 0.5), "checkpoint__interval_steps": 10}
    pools = [
        {"name": "spot", "size": 2 * nodes},
        {"name": "on-demand", "market": "on-demand", "size": 2 * nodes},
    ]
    replaced = {"kubernetes__node_replacements": 100, "cluster__expected_start_seconds": 60}
    runner = start(pace=0.5, changes={"pools": pools}, cluster__nodes=nodes, **replaced, **settings)
    await_pods(runner, nodes)
    began = time.monotonic()
    lost = 0
    while time.monotonic() < began + minutes * 60 and runner.process.poll() is None:  # type: ignore[attr-defined]
        time.sleep(60)
        pods = runner.cluster.training_pods()
        if len(pods) == nodes:
            runner.cluster.ask("lose", {"node": pods[1 + lost % (nodes - 1)]["spec"]["nodeName"]})
            lost += 1
    run = finished(runner, 3 * minutes * 60)
    assert run.exit_code == 0, run.output
    assert [event["name"] for event in runner.events()].count("placed") == 1, "one attempt"
    report = run.report
    seconds = pod_seconds(runner)
    quiet = FlowRunner(tmp_path / "alone", environment=image)
    alone = train_alone(quiet, **settings, **paced_settings(0.0), ranks=nodes)
    useful = sum(
        line["rank_seconds"] for line in report["ledger"] if line["class"] == "useful_step"
    )
    paid = report["paid_rank_seconds"]
    print(
        f"{nodes} nodes, {lost} lost, goodput {useful / paid:.3f}, {report['redone_steps']} "
        "redone steps"
    )
    print(f"{seconds:.1f} s of pods, {paid:.1f} rank-seconds in the ledger")
    assert report["weights_sha256"] == alone["weights_sha256"]
