"""Steps with `@ebbflow` on Kubernetes, on the local cluster: pods are evicted, a node is lost, and retries
continue.

The jobs, their commits and their results are in the bucket; the flows' other steps run on this
machine.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.store import Store
from tests.support.kubernetes.fixture import LocalCluster
from tests.support.kubernetes.flow import KubernetesRunner, cluster
from tests.support.long_tests import mark_long
from tests.support.own_flow import SOURCES, OwnFlow
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1500)]
_WAIT_SECONDS = 600.0  # on a machine with other work
_STEP_SECONDS = {"STEP_SECONDS": "0.5"}
_RETRIED = ("--with", "retry:times=2,minutes_between_retries=0")  # for steps without @retry
_IMAGE = {
    **_STEP_SECONDS,
    "EBBFLOW__CHECKPOINT__INTERVAL_STEPS": "4",
    "EBBFLOW__CHECKPOINT__STOP_SECONDS": "5",
}


def on_kubernetes(folder: Path, name: str, environment: dict[str, str]) -> OwnFlow:
    where = '    @kubernetes(cpu=3, memory=1000, node_selector="karpenter.sh/nodepool=spot")\n'
    text = (SOURCES / f"{name}.py").read_text()
    text = text.replace("from metaflow import ", "from metaflow import kubernetes, ", 1)
    text = text.replace("    @ebbflow", f"{where}    @ebbflow", 1)
    return OwnFlow(folder, name, text=text, **environment)


def await_commit(store: Store, launcher: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + _WAIT_SECONDS
    while not any("/commits/" in meta.key for meta in store.list("jobs")):
        assert launcher.poll() is None and time.monotonic() < limit, log.read_text()
        time.sleep(0.5)


def find_pod(running: LocalCluster) -> dict[str, Any]:
    """Return the pod of the training step that runs now; of a gang, a worker's."""
    pods = [
        pod
        for pod in running.items("pods")
        if pod["status"]["phase"] == "Running" and "ip-" in pod["spec"].get("nodeName", "")
    ]
    return max(pods, key=lambda pod: "worker" in pod["metadata"]["name"])


@pytest.mark.parametrize(
    "name", mark_long(["single", "gang", "configured"], ["gang", "configured"])
)
def test_an_own_flow_loses_a_pod_or_a_node_of_the_cluster_and_ends_equal(
    name: str, tmp_path: Path, swift: Swift, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = OwnFlow(tmp_path / "undisturbed", name)
    clean = undisturbed.model(undisturbed.succeed("run"))
    for variable, value in swift.environment().items():
        monkeypatch.setenv(variable, value)
    pools = [{"name": "spot", "tainted": False}]
    with cluster(tmp_path / "cluster", swift, image=_IMAGE, pools=pools) as running:
        runner = KubernetesRunner(tmp_path / "launcher", swift, running)
        flow = on_kubernetes(tmp_path / "flow", name, runner.environment)
        launcher = flow.start("run", *_RETRIED, **_STEP_SECONDS)
        await_commit(Store.open(f"s3://{runner.bucket}/metaflow/ebbflow"), launcher, flow.log)
        pod = find_pod(running)
        if name == "gang":
            running.ask("lose", {"node": pod["spec"]["nodeName"]})
        else:
            running.ask("evict", {"pod": pod["metadata"]["name"]})
        done = flow.finish(launcher, seconds=_WAIT_SECONDS)
        assert done.exit_code == 0, f"{done.output}\n{running.outputs()}"
        model = flow.model(done)
        if name == "configured":
            assert flow.artifacts(done, "train", "plain")[0][0].outcome == "completed"
        told = running.told()
    assert (model.outcome, model.steps, model.interruptions) == ("completed", clean.steps, 1)
    assert model.weights_sha256 == clean.weights_sha256
    assert model.store == f"s3://{runner.bucket}/metaflow/ebbflow"
    assert model.usd > 0 and not model.price_kind.startswith("simulated")
    assert told["problems"] == []
