"""Checks of a cluster before anything is paid for, on the local cluster: what admission, device
plugins and missing settings would make of a job.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.preflight import CheckResult, PreflightContext, run_checks
from ebbflow.flows.remote import refusal_reason
from ebbflow.infra.kubernetes import checks
from ebbflow.infra.kubernetes.cluster import open_cluster
from tests.support.flow import wait_until
from tests.support.kubernetes.attempt import Submitted
from tests.support.kubernetes.fixture import LocalCluster, local_cluster

BatchV1Api = pytest.importorskip("kubernetes.client").BatchV1Api
ROOT = Path(__file__).resolve().parents[2]
EFA = {"efa_interfaces": 1}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with local_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def login(running: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig()))
    monkeypatch.setenv("METAFLOW_KUBERNETES_NAMESPACE", "ebbflow")


def check(name: str, **sections: dict[str, Any]) -> CheckResult:
    document = {
        "store": "s3://bucket/prefix",
        "cluster": {"nodes": 2, "plan_for": "kubernetes", "instance_types": ["g5.xlarge"]},
        "batch": {"image": "ebbflow:1"},
    }
    for section, values in sections.items():
        document[section] = {**document[section], **values}
    context = PreflightContext(
        config=RunConfig.model_validate(document), project_root=ROOT, target="kubernetes"
    )
    [wanted] = [known for known in checks.CHECKS if known.id == f"kubernetes-{name}"]
    [result] = run_checks([wanted], context)
    return result


def test_a_pod_that_the_namespace_refuses_is_found_before_it_is_submitted(
    running: LocalCluster,
) -> None:
    assert check("cluster").status == "passed"
    refused = check("cluster", batch=EFA)
    assert refused.status == "failed" and "IPC_LOCK" in refused.detail
    assert "enforce=privileged" in (refused.fix or "")
    assert check("cluster", batch=EFA, cluster={"nodes": 1}).status == "passed", "no gang, no EFA"
    running.change(pod_security="privileged")
    try:
        assert check("cluster", batch=EFA).status == "passed"
    finally:
        running.change(pod_security="baseline")


def test_an_account_that_may_not_try_pods_says_so(running: LocalCluster) -> None:
    running.change(forbidden=["create pods"])
    try:
        found = check("cluster", batch=EFA)
    finally:
        running.change(forbidden=[])
    assert found.status == "passed" and "unknown, since this account may not try" in found.detail


def test_a_missing_definition_and_a_foreign_login_are_one_line(
    running: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.change(jobset=False)
    try:
        assert "jobset/releases" in (check("cluster").fix or "")
    finally:
        running.change(jobset=True)
    monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig(token="expired")))
    expired = check("cluster")
    assert expired.status == "failed" and "log in to the cluster again" in (expired.fix or "")


@pytest.mark.parametrize(
    ("name", "pool", "why"),
    [
        ("own", {"taint": "ebbflow/training"}, "does not tolerate its taint ebbflow/training"),
        ("bare", {"labels": {"nvidia.com/gpu.present": "no"}}, "wants the label nvidia.com/gpu."),
        ("fine", {}, ""),
    ],
)
def test_nodes_on_which_no_device_plugin_runs_are_named_with_the_reason(
    running: LocalCluster,
    name: str,
    pool: dict[str, Any],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_SETTLE_SECONDS", -1.0)
    kind = f"g5.{name}"
    running.change(pools=[{"name": name, "instance_type": kind, **pool}])
    pod = {
        "restartPolicy": "Never",
        "containers": [{"name": "main", "image": "ebbflow:local", "command": ["sleep", "60"]}],
        "nodeSelector": {"karpenter.sh/nodepool": name},
        "tolerations": [{"operator": "Exists"}],
    }
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
    batch = BatchV1Api(open_cluster()._core.api_client)
    batch.create_namespaced_job(
        "ebbflow", {**job, "spec": {"parallelism": 1, "template": {"spec": pod}}}
    )
    wait_until("the node", lambda: kind in str(running.items("nodes")), timeout=60)
    found = check("devices", cluster={"instance_types": [kind]})
    batch.delete_namespaced_job(name, "ebbflow", propagation_policy="Background")
    assert found.status == ("failed" if why else "passed"), found
    assert why in found.detail


def test_the_very_pod_is_tried_before_a_gang_is_submitted(
    running: LocalCluster, tmp_path: Path
) -> None:
    submitted = Submitted(running, tmp_path, 2, "true", efa=True)
    code, output = submitted.finish()
    assert code == 202, output
    [outcome] = submitted.events("outcome")
    assert outcome["outcome"] == "failed" and "IPC_LOCK" in outcome["message"]
    assert "enforce=privileged" in outcome["message"] and len(output.splitlines()) == 1
    assert submitted.events("batch_submitted") == []


@pytest.mark.parametrize("backend", ["batch", "kubernetes"])
@pytest.mark.parametrize("given", ["batch.image", "variable", "option", "nothing"])
def test_containers_without_an_image_are_refused_before_anything_starts(
    backend: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BATCH", "KUBERNETES", "DEFAULT"):
        monkeypatch.delenv(f"METAFLOW_{name}_CONTAINER_IMAGE", raising=False)
    batch: dict[str, Any] = {"job_role": "arn:aws:iam::1:role/r"}
    if given == "batch.image":
        batch["image"] = "ebbflow:1"
    if given == "variable":
        monkeypatch.setenv(f"METAFLOW_{backend.upper()}_CONTAINER_IMAGE", "ebbflow:1")
    words = ["--with", f"{backend}:image=ebbflow:1" if given == "option" else backend]
    config = RunConfig.model_validate({"store": "s3://bucket/prefix", "batch": batch})
    reason = refusal_reason(config, backend, words)
    assert (reason is None) is (given != "nothing")
    assert reason is None or ("no container image" in reason and "batch.image" in reason)
