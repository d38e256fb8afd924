"""Preflight checks of whether a Kubernetes cluster can run the job, also used by
`ebbflow kubernetes check`.
"""

import argparse
import os
from collections.abc import Callable

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
from ebbflow.infra.kubernetes.answers import JobManifest
from ebbflow.infra.kubernetes.cluster import (
    JOBSET_GROUP,
    QUOTA,
    QUOTA_FIX,
    Cluster,
    namespace,
    open_cluster,
)

_SECONDS = 4.0
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
            return failed(str(error), login if "(401)" in str(error) else _RBAC)
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
    """Check, with a dry run, that the API server accepts a JobSet (for one node, a Job) similar to
    the job's.

    This covers permissions, the namespace, its quota, and the installed JobSet definition.
    """
    body = _example(context)
    try:
        cluster.try_create(body)
    except CloudRefused as error:
        text = str(error)
        if "namespaces" in text:
            return failed(
                text,
                "kubectl apply -f infra/kubernetes/namespace.yaml; set "
                "METAFLOW_KUBERNETES_NAMESPACE",
            )
        if error.code == "404":
            release = (
                "https://github.com/kubernetes-sigs/jobset/releases/latest/download/manifests.yaml"
            )
            return failed(
                f"the cluster has no JobSet, which several nodes need: {text}",
                f"kubectl apply --server-side -f {release}",
            )
        if QUOTA in text:
            return failed(text, QUOTA_FIX)
        return failed(text, "the API server's message names the field")
    return passed(f"a {body['kind']} would be accepted in namespace {namespace()}")


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
    """Check that existing nodes of the configured types show the required GPUs and EFA devices.

    Nodes that Karpenter creates later are not checked.
    """
    try:
        nodes = cluster.nodes()
    except CloudForbidden:
        return skipped(
            "this account may not list nodes; infra/kubernetes/rbac.yaml has the ClusterRole"
        )
    types = context.config.cluster.instance_types
    label = "node.kubernetes.io/instance-type"
    kinds = [(node["metadata"].get("labels") or {}).get(label, "") for node in nodes]
    found = [node for node, kind in zip(nodes, kinds, strict=True) if kind.startswith(tuple(types))]
    if context.config.cluster.device == "cpu":
        wanted = []
    else:
        wanted = ["nvidia.com/gpu"]
    if context.config.batch.efa_interfaces:
        wanted += ["vpc.amazonaws.com/efa"]
    for resource in wanted:
        without = [
            node["metadata"]["name"]
            for node in found
            if resource not in node["status"].get("allocatable", {})
        ]
        if without:
            return failed(
                f"{len(without)} of {len(found)} nodes of {', '.join(types)} show no {resource}: "
                f"{without[0]}",
                "install the NVIDIA (or EFA) device plugin with a toleration of "
                "ebbflow/training, or correct the pool",
            )
    return passed(
        f"{len(nodes)} nodes, {len(found)} of the wanted types; "
        f"{', '.join(wanted) or 'no device'} needed"
    )


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
        "warning",
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


def _example(context: PreflightContext) -> JobManifest:
    """Return a minimal Job or, unless the job has one node, JobSet with a control job and a worker
    job.
    """
    image = (
        context.config.batch.image
        or os.environ.get("METAFLOW_KUBERNETES_CONTAINER_IMAGE")
        or "python"
    )
    pod: JsonObject = {"restartPolicy": "Never", "containers": [{"name": "check", "image": image}]}
    job_spec: JsonObject = {"backoffLimit": 0, "template": {"spec": pod}}
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
