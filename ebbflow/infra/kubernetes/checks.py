"""Preflight checks of whether a Kubernetes cluster can run the job, also used by
`ebbflow kubernetes check`.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from ebbflow.core.errors import CloudError, CloudForbidden, CloudRefused, CloudUnavailable, Outcome
from ebbflow.core.json_values import JsonObject
from ebbflow.core.preflight import (
    Check,
    CheckFinding,
    PreflightContext,
    failed,
    passed,
    render_results,
    skipped,
)
from ebbflow.infra.aws.account import metaflow_setting
from ebbflow.infra.kubernetes.answers import JobManifest, Node
from ebbflow.infra.kubernetes.cluster import (
    JOBSET_GROUP,
    QUOTA,
    QUOTA_FIX,
    Cluster,
    namespace,
    open_cluster,
)
from ebbflow.infra.kubernetes.pod_shape import (
    EFA,
    GPU,
    GPU_TAINT,
    make_security_context,
    make_tolerations,
)

_SECONDS = 4.0
_SETTLE_SECONDS = 600.0
# Defaults of the chart of NVIDIA's device plugin, release 0.17: tolerations and node affinity
# (deployments/helm/nvidia-device-plugin/values.yaml in NVIDIA/k8s-device-plugin)
_PLUGIN_TOLERATES = ("CriticalAddonsOnly", GPU_TAINT)
_PLUGIN_LABELS = ("feature.node.kubernetes.io/pci-10de.present", "nvidia.com/gpu.present")
_NEEDED = (
    *[(verb, "batch", "jobs") for verb in ("create", "get", "delete", "patch")],
    *[(verb, JOBSET_GROUP, "jobsets") for verb in ("create", "get", "delete")],
    *[(verb, "", "pods") for verb in ("get", "list")],
)
_RBAC = "kubectl apply -f infra/kubernetes/rbac.yaml"


def _for_cluster(
    check: Callable[[PreflightContext, Cluster], CheckFinding],
) -> Callable[..., CheckFinding]:
    def run(context: PreflightContext) -> CheckFinding:
        config = context.config
        # Pods cannot read a folder
        planned = config.cluster.plan_for == "kubernetes" and "://" in config.store
        if context.target != "kubernetes" and (context.target is not None or not planned):
            return skipped("the job does not run on Kubernetes")
        if "METAFLOW_KUBERNETES_WORKLOAD" in os.environ:
            return skipped("the launcher checked the cluster, whose API this pod may not use")
        try:
            return check(context, open_cluster(_SECONDS))
        except CloudForbidden as error:
            login = (
                "log in to the cluster again: the kubeconfig's credentials are missing, wrong or "
                "expired"
            )
            unknown = "(401)" in str(error) or "system:anonymous" in str(error)
            return failed(str(error), login if unknown else _RBAC)
        except CloudUnavailable as error:
            return failed(
                f"the API server does not answer: {error}",
                "kubectl cluster-info; check KUBECONFIG and VPN",
            )
        except CloudError as error:
            return failed(str(error), "correct KUBECONFIG, or METAFLOW_KUBERNETES_NAMESPACE")

    run.__doc__ = check.__doc__
    return run


@_for_cluster
def check_create(context: PreflightContext, cluster: Cluster) -> CheckFinding:
    """Check with dry runs that the API server accepts a JobSet and a pod like the job's. For one
    node, it is a Job instead of a JobSet.

    This covers permissions, the namespace, its quota, its Pod Security profile, and the installed
    JobSet definition.
    """
    pod = _make_pod(context)
    body = _make_job(context, pod)
    try:
        cluster.try_create(body)
        cluster.try_create_pod({"apiVersion": "v1", "kind": "Pod", **pod})
    except CloudForbidden as error:
        if "create pods (dry run)" not in str(error):
            raise
        return passed(
            f"a {body['kind']} would be accepted in namespace {namespace()}; whether its pods are "
            f"is unknown, since this account may not try: {_RBAC}"
        )
    except CloudRefused as error:
        return failed(str(error), describe_refusal_fix(error))
    return passed(
        f"a {body['kind']} would be accepted and its pod admitted in namespace {namespace()}"
    )


@_for_cluster
def check_access(context: PreflightContext, cluster: Cluster) -> CheckFinding:  # noqa: ARG001 (each check takes the context)
    """Check that this account may create, read and delete Jobs, JobSets and pods
    (SelfSubjectAccessReview).
    """
    lacking = [
        f"{verb} {resource}"
        for verb, group, resource in _NEEDED
        if not cluster.may(verb, group, resource)
    ]
    if lacking:
        return failed(
            f"this account may not {', '.join(lacking)} in namespace {namespace()}", _RBAC
        )
    return passed(f"all {len(_NEEDED)} rights in namespace {namespace()}")


@_for_cluster
def check_queue(context: PreflightContext, cluster: Cluster) -> CheckFinding:
    """Check that the Kueue queue named in `kubernetes.queue` exists."""
    queue = context.config.kubernetes.queue
    if queue is None:
        return skipped("kubernetes.queue is not set")
    if not cluster.queue_exists(queue):
        fix = "create the LocalQueue in this namespace, correct kubernetes.queue, or install Kueue"
        return failed(f"namespace {namespace()} has no Kueue queue {queue}", fix)
    return passed(f"queue {queue} exists")


@_for_cluster
def check_nodes(context: PreflightContext, cluster: Cluster) -> CheckFinding:
    """Check that nodes of the configured types have allocatable GPUs and EFA devices.

    Nodes that Karpenter creates later, and those younger than ten minutes, are not checked.
    """
    try:
        nodes = cluster.nodes()
    except CloudForbidden:
        return skipped(
            "this account may not list nodes; infra/kubernetes/rbac.yaml has the ClusterRole"
        )
    config = context.config
    selectors = [pool.node_selector for pool in config.kubernetes.pools]
    if selectors:
        named = [pool.name for pool in config.kubernetes.pools]
        wanted = [node for node in nodes if _has_labels(node, selectors)]
    else:
        named = config.cluster.instance_types
        wanted = [node for node in nodes if _instance_type(node).startswith(tuple(named))]
    if config.cluster.device == "cpu":
        devices = {}
    else:
        ranks = config.cluster.processes_per_node
        devices = {GPU: 1 if ranks == "auto" else ranks}
    if config.batch.efa_interfaces:
        devices[EFA] = 1
    settled = [node for node in wanted if _has_settled(node)]
    for device, least in devices.items():
        lacking = [node for node in settled if _allocatable(node, device) < least]
        if lacking and len(lacking) == len(settled):
            first = lacking[0]
            return failed(
                f"none of {len(settled)} nodes of {', '.join(named)} has {least} allocatable "
                f"{device}: {first['metadata']['name']} has {_allocatable(first, device)}"
                f"{_why_unregistered(first)}",
                "install the device plugin, and give the nodes the taint and label that it expects "
                "(infra/kubernetes/nodepools.yaml, docs/kubernetes.md)",
            )
    needed = ", ".join(devices) or "no device"
    return passed(f"{len(nodes)} nodes, {len(wanted)} of the wanted kinds; {needed} needed")


CHECKS = [
    Check(
        "kubernetes-cluster",
        "cluster accepts the job",
        "error",
        "quick",
        30.0,
        ("A18", "I04"),
        check_create,
    ),
    Check(
        "kubernetes-rights",
        "account has its rights",
        "error",
        "quick",
        30.0,
        ("A19",),
        check_access,
    ),
    Check("kubernetes-queue", "Kueue queue exists", "error", "quick", 30.0, ("I04",), check_queue),
    Check(
        "kubernetes-devices",
        "nodes show their devices",
        "error",
        "quick",
        30.0,
        ("A04",),
        check_nodes,
    ),
]


def add_kubernetes_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "kubernetes", help="check whether a Kubernetes cluster can run a job"
    )
    command.add_argument(
        "what", choices=["check"], help="check: what the cluster has, each problem with its fix"
    )
    command.add_argument("config", nargs="?", metavar="CONFIG")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key"
    )
    command.set_defaults(command=_check)


def describe_refusal_fix(error: CloudRefused) -> str:
    """Return the fix for a Job, JobSet or pod that the API server refused."""
    text = str(error)
    if "namespaces" in text and error.code == "404":
        return "kubectl apply -f infra/kubernetes/namespace.yaml; set METAFLOW_KUBERNETES_NAMESPACE"
    if error.code == "404":
        return (
            "several nodes need JobSet: kubectl apply --server-side -f "
            "https://github.com/kubernetes-sigs/jobset/releases/latest/download/manifests.yaml"
        )
    if QUOTA in text:
        return QUOTA_FIX
    if "IPC_LOCK" in text:
        return (
            f"EFA pins memory: kubectl label --overwrite namespace {namespace()} "
            "pod-security.kubernetes.io/enforce=privileged, or batch.efa_interfaces: 0"
        )
    return "change the pod's settings or the cluster's policy, as the API server's message says"


def _has_labels(node: Node, selectors: Sequence[Mapping[str, str]]) -> bool:
    labels = node["metadata"].get("labels") or {}
    return any(selector.items() <= labels.items() for selector in selectors)


def _instance_type(node: Node) -> str:
    return (node["metadata"].get("labels") or {}).get("node.kubernetes.io/instance-type", "")


def _has_settled(node: Node) -> bool:
    """Return whether a node has been up for long enough that its device plugins have registered."""
    ready = any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in node["status"].get("conditions") or []
    )
    created = node["metadata"].get("creationTimestamp")
    if created is None:
        return ready
    age = time.time() - datetime.fromisoformat(created.replace("Z", "+00:00")).timestamp()
    return ready and age > _SETTLE_SECONDS


def _allocatable(node: Node, device: str) -> int:
    return int(node["status"].get("allocatable", {}).get(device) or 0)


def _why_unregistered(node: Node) -> str:
    """Return why NVIDIA's device plugin does not run on a node, or "" if it does.

    The defaults of the plugin's Helm chart are assumed.
    """
    taints = [taint["key"] for taint in (node.get("spec") or {}).get("taints") or []]
    foreign = [key for key in taints if key not in _PLUGIN_TOLERATES]
    if foreign:
        return f"; the NVIDIA plugin's chart does not tolerate its taint {', '.join(foreign)}"
    labels = node["metadata"].get("labels") or {}
    if not any(labels.get(name) == "true" for name in _PLUGIN_LABELS):
        return f"; the NVIDIA plugin's chart wants the label {_PLUGIN_LABELS[-1]}=true"
    return ""


def _make_pod(context: PreflightContext) -> JsonObject:
    """Return a pod like the job's, with the fields on which admission and scheduling depend."""
    config = context.config
    efa = config.batch.efa_interfaces > 0 and config.cluster.nodes != 1
    gpu = config.cluster.device != "cpu"
    devices: JsonObject = {}
    if gpu:
        devices[GPU] = "1"
    if efa:
        devices[EFA] = str(config.batch.efa_interfaces)
    size = f"{config.batch.shared_memory_mib}Mi"
    container: JsonObject = {
        "name": "main",
        "image": config.batch.image
        or metaflow_setting("METAFLOW_KUBERNETES_CONTAINER_IMAGE")
        or "python",
        "resources": {"requests": {"cpu": "1", "memory": size, **devices}, "limits": devices},
        "securityContext": make_security_context(efa=efa),
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    spec: JsonObject = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "containers": [container],
        "tolerations": [{**toleration} for toleration in make_tolerations(gpu=gpu)],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}}],
    }
    account = metaflow_setting("METAFLOW_KUBERNETES_SERVICE_ACCOUNT")
    if account:
        spec["serviceAccountName"] = account
    return {
        "metadata": {"name": "ebbflow-check", "labels": {"ebbflow/training": "true"}},
        "spec": spec,
    }


def _make_job(context: PreflightContext, pod: JsonObject) -> JobManifest:
    """Return a Job for a single node, or else a JobSet with a control job and a worker job."""
    job_spec: JsonObject = {"backoffLimit": 0, "template": {"spec": pod["spec"]}}
    metadata: JsonObject = {"name": "ebbflow-check"}
    if context.config.cluster.nodes == 1:
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job_spec}
    spec: JsonObject = {
        "replicatedJobs": [
            {"name": name, "replicas": 1, "template": {"spec": job_spec}}
            for name in ("control", "worker")
        ]
    }
    return {
        "apiVersion": f"{JOBSET_GROUP}/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": spec,
    }


def _check(options: argparse.Namespace) -> int:
    from ebbflow.core.config import load_config
    from ebbflow.core.preflight import failed_results, run_checks
    from ebbflow.core.program import DEFAULT_CONFIG, PROJECT_ROOT

    loaded = load_config(options.config or DEFAULT_CONFIG, options.set, project_root=PROJECT_ROOT)
    context = PreflightContext(config=loaded.config, project_root=PROJECT_ROOT, target="kubernetes")
    results = run_checks(CHECKS, context)
    print(render_results(results))
    return (Outcome.PREFLIGHT if failed_results(results) else Outcome.COMPLETED).exit_code
