"""Requests to a Kubernetes API server: read the pods of an attempt, find out why they ended, and
end an attempt.

An attempt is a JobSet (several nodes) or a Job (one node). Its id is NAMESPACE/KIND/NAME, such as
ebbflow/jobsets/js-1a2b3c; AWS Batch's ids contain no slash. The `kubernetes` package is imported
only when needed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar, cast

from ebbflow.core.errors import CloudError, CloudForbidden, CloudRefused, CloudUnavailable
from ebbflow.core.json_values import Json, JsonObject
from ebbflow.core.retry import retry
from ebbflow.infra.batch.jobs import BatchAttempt, Cause, Terminator
from ebbflow.infra.kubernetes.answers import (
    AccessReview,
    EventList,
    JobManifest,
    Node,
    NodeList,
    Owner,
    PendingWorkloads,
    Pod,
    PodChanges,
    PodList,
)

if TYPE_CHECKING:
    from kubernetes.client import ApiClient
    from urllib3 import HTTPResponse

JOBSET_GROUP = "jobset.x-k8s.io"
JOBSET_VERSION = "v1alpha2"
QUOTA = "exceeded quota"
QUOTA_FIX = "end other jobs, or raise the namespace's ResourceQuota"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
_INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_ZONE = "topology.kubernetes.io/zone"
_MARKETS = {"spot": "spot", "SPOT": "spot", "on-demand": "on_demand", "ON_DEMAND": "on_demand"}
# Reasons of a pod whose node was taken away or drained:
# https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
_LOST = (
    "NodeLost",
    "Evicted",
    "Terminated",
    "NodeShutdown",
    "Shutdown",
    "Preempting",
    "NodeAffinity",
)
_NO_IMAGE = (
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "ImageInspectError",
    "InvalidImageName",
    "SignatureValidationFailed",
    "CreateContainerConfigError",
    "CreateContainerError",
)
# Taints that announce the end of a node, before or while it is drained: Karpenter's, the AWS node
# termination handler's, GKE's and the cluster autoscaler's.
_ENDING = (
    "karpenter.sh/disrupted",
    "aws-node-termination-handler/",
    "cloud.google.com/impending-node-termination",
    "ToBeDeletedByClusterAutoscaler",
)
_ADMISSION = re.compile(r'"[^"]+" is forbidden|denied the request')
_NO_RIGHT = re.compile(r"\bcannot \w+ resource\b")
Answer = TypeVar("Answer")
# Method of the client. Without preloaded content it returns the HTTP response.
ApiMethod = Callable[..., object]
_SECONDS = 10.0
_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class PodState:
    """State of one pod of an attempt.

    Times (Unix seconds) are by the cluster's clock; None if unknown or in the future.
    """

    name: str
    node: int  # number of the node in the gang
    machine: str  # name of the cluster's node, or ""
    phase: str
    created: float | None
    started: float | None = None  # when its container started
    ended: float | None = None
    # `ended` is the container's own; otherwise it is when its end was noticed
    ended_by_cluster: bool = False
    exit_code: int | None = None
    exit_reason: str = ""  # the cluster's word for the container's end, such as OOMKilled
    waiting: str = ""  # why it does not run yet
    no_image: bool = False
    lost: bool = False  # its node is gone or was drained
    late: bool = False  # it ran longer than its limit
    leaving: bool = False  # it was asked to end
    labels: Mapping[str, str] = field(default_factory=dict)  # of its node, if they may be read


class Cluster:
    """Client of a Kubernetes API server (see `open_cluster`). Each request has a deadline."""

    def __init__(self, api_client: ApiClient, seconds: float = _SECONDS) -> None:
        from kubernetes import client

        self._core = client.CoreV1Api(api_client)
        self._custom = client.CustomObjectsApi(api_client)
        self._access = client.AuthorizationV1Api(api_client)
        self._seconds = seconds
        self._labels: dict[str, dict[str, str]] = {}  # by node; {} if they may not be read

    def ask(
        self,
        what: str,
        call: ApiMethod,
        *args: Json,
        shape: type[Answer],
        **options: Json,
    ) -> Answer:
        """Send a request, retry it for some seconds if needed, and return the parsed JSON answer.

        Raises CloudError.

        Args:
            what: name of the request in error messages.
            shape: type of the answer, which is not checked.
        """
        limit = time.monotonic() + self._seconds
        return retry(
            lambda: self._ask(what, call, *args, shape=shape, **options),
            left=lambda: limit - time.monotonic(),
            curable=lambda error, _: isinstance(error, CloudUnavailable),
            pauses=itertools.repeat(_PAUSE_SECONDS),
        )

    def _find(
        self,
        what: str,
        call: ApiMethod,
        *args: Json,
        shape: type[Answer],
        **options: Json,
    ) -> Answer | None:
        """Send a request with `ask`, but return None if the object does not exist.

        Raises CloudError.
        """
        try:
            return self.ask(what, call, *args, shape=shape, **options)
        except CloudRefused as error:
            if error.code == "404":
                return None
            raise

    def _ask(
        self,
        what: str,
        call: ApiMethod,
        *args: Json,
        shape: type[Answer],  # noqa: ARG002 (for the type checker)
        **options: Json,
    ) -> Answer:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            answer = cast(
                "HTTPResponse",
                call(*args, **options, _preload_content=False, _request_timeout=self._seconds),
            )
            if answer.status >= 400:
                raise _api_error(what, answer.status, _json(answer.data))
            if options.get("watch"):
                changes = [json.loads(line) for line in answer.data.splitlines()]
                return cast(Answer, {"items": changes})
            return json.loads(answer.data or b"{}")
        except ApiException as error:
            raise _api_error(what, error.status or 0, _json(error.body)) from None
        except (HTTPError, OSError, ValueError) as error:
            raise CloudUnavailable(f"Kubernetes: {what}: {str(error)[:300]}") from None

    def owner(self, job_id: str) -> Owner | None:
        """Return the Job or JobSet of an attempt, or None if it no longer exists.

        Raises CloudError.
        """
        _, kind, name = job_id.split("/")
        return self._find(
            f"get {kind} {name}",
            self._custom.get_namespaced_custom_object,
            *_path(job_id),
            shape=Owner,
        )

    def pods(self, job_id: str) -> tuple[list[PodState], str]:
        """Return the attempt's pods that currently exist, and the version of this list.

        Raises CloudError.
        """
        found = self._list_pods("list pods", job_id, shape=PodList)
        pods = [
            replace(pod, labels=self._node_labels(pod.machine))
            for pod in map(_pod_state, found["items"])
        ]
        return pods, (found.get("metadata") or {}).get("resourceVersion") or ""

    def removed_pods(self, job_id: str, version: str) -> list[PodState]:
        """Return the last states of the pods that were removed since the given version of the list
        of pods.

        Raises CloudError.
        """
        found = self._list_pods(
            "watch pods",
            job_id,
            shape=PodChanges,
            resource_version=version,
            watch=True,
            timeout_seconds=1,
        )["items"]
        return [_pod_state(change["object"]) for change in found if change["type"] == "DELETED"]

    def _list_pods(self, what: str, job_id: str, *, shape: type[Answer], **options: Json) -> Answer:
        space, kind, name = job_id.split("/")
        if kind == "jobs":
            label = "job-name"
        else:
            label = _JOBSET_LABEL
        return self.ask(
            what,
            self._core.list_namespaced_pod,
            space,
            shape=shape,
            label_selector=f"{label}={name}",
            **options,
        )

    def refused_pods(self, job_id: str) -> str:
        """Return why the cluster refused to create a pod of the attempt, or "" if it refused none.

        Raises CloudError.
        """
        space, _, name = job_id.split("/")
        found = self.ask(
            "list events",
            self._core.list_namespaced_event,
            space,
            shape=EventList,
            field_selector="reason=FailedCreate,involvedObject.kind=Job",
        )["items"]
        mine = [
            event for event in found if str(event["involvedObject"].get("name")).startswith(name)
        ]
        if mine:
            return str(mine[-1].get("message") or "")
        return ""

    def delete(self, job_id: str) -> None:
        """Delete the Job or JobSet of an attempt.

        Its pods get SIGTERM and run at most for their grace period. Raises CloudError.
        """
        _, kind, name = job_id.split("/")
        call = self._custom.delete_namespaced_custom_object
        self._find(
            f"delete {kind} {name}",
            call,
            *_path(job_id),
            shape=JsonObject,
            propagation_policy="Foreground",
        )

    def evict(self, job_id: str, pod: str) -> None:
        """Evict a pod of an attempt from its node.

        It gets SIGTERM, and may run until its grace period ends. Raises CloudError.
        """
        space = job_id.split("/")[0]
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": space},
        }
        self.ask(
            f"evict pod {pod}",
            self._core.create_namespaced_pod_eviction,
            pod,
            space,
            body,
            shape=JsonObject,
        )

    def may(self, verb: str, group: str, resource: str) -> bool:
        """Return whether the current account has a permission in the namespace.

        Raises CloudError.
        """
        name, _, sub = resource.partition("/")
        about = {
            "namespace": namespace(),
            "verb": verb,
            "group": group,
            "resource": name,
            "subresource": sub,
        }
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": about},
        }
        answer = self.ask(
            "review access",
            self._access.create_self_subject_access_review,
            body,
            shape=AccessReview,
        )
        return bool(answer.get("status", {}).get("allowed"))

    def try_create(self, body: JobManifest) -> None:
        """Let the API server check a Job or JobSet without creating it. Raises CloudError."""
        kind = f"{body['kind'].lower()}s"
        where = (*body["apiVersion"].split("/"), namespace(), kind)
        self.ask(
            f"create {kind} (dry run)",
            self._custom.create_namespaced_custom_object,
            *where,
            cast(JsonObject, body),
            shape=JsonObject,
            dry_run="All",
        )

    def try_create_pod(self, pod: JsonObject) -> None:
        """Let the API server admit a pod without creating it. Raises CloudError.

        Pod Security is enforced on pods only; a Job or JobSet that makes them is accepted
        (https://kubernetes.io/docs/concepts/security/pod-security-admission).
        """
        self.ask(
            "create pods (dry run)",
            self._core.create_namespaced_pod,
            namespace(),
            pod,
            shape=JsonObject,
            dry_run="All",
        )

    def queue_position(self, job_id: str, queue: str) -> int | None:
        """Return how many workloads are before this attempt in the Kueue queue, or None if this is
        unknown.
        """
        space, _, name = job_id.split("/")
        try:
            found = self._of_kueue("visibility.kueue.x-k8s.io", space, f"{queue}/pendingworkloads")
        except CloudError:
            return None
        for workload in (found or {}).get("items") or []:
            if any(
                owner.get("name") == name
                for owner in workload["metadata"].get("ownerReferences") or []
            ):
                return int(workload.get("positionInLocalQueue") or 0)
        return None

    def queue_exists(self, queue: str) -> bool:
        """Return whether the namespace has this Kueue queue (LocalQueue). Raises CloudError."""
        return self._of_kueue("kueue.x-k8s.io", namespace(), queue) is not None

    def _of_kueue(self, group: str, space: str, name: str) -> PendingWorkloads | None:
        what = f"get localqueues {name}"
        call = self._custom.get_namespaced_custom_object
        versions = ("v1beta2", "v1beta1")  # releases serve one or both
        answers = (
            self._find(
                what, call, group, version, space, "localqueues", name, shape=PendingWorkloads
            )
            for version in versions
        )
        return next((answer for answer in answers if answer is not None), None)

    def nodes(self) -> list[Node]:
        """Return all nodes of the cluster.

        Raises CloudError, for example if this account may not list nodes.
        """
        return self.ask("list nodes", self._core.list_node, shape=NodeList)["items"]

    def _node(self, name: str) -> Node | None:
        """Return the cluster's node `name`, or None if it no longer exists.

        If the request fails, nothing is known of the node but its name.
        """
        try:
            return self._find(f"get node {name}", self._core.read_node, name, shape=Node)
        except CloudError:
            return {"metadata": {"name": name}, "status": {}}

    def has_lost(self, name: str) -> bool:
        """Return whether a node is gone or its kubelet no longer reports.

        Return False if nodes cannot be read.
        """
        node = self._node(name)
        return node is None or any(
            condition["type"] == "Ready" and condition["status"] == "Unknown"
            for condition in node["status"].get("conditions") or []
        )

    def announced_end(self, name: str) -> str:
        """Return the taint that announces that a node will be taken away, or "" if the node has no
        such taint.
        """
        node = self._node(name)
        if node is None:
            return ""
        taints = (node.get("spec") or {}).get("taints") or []
        return next((taint["key"] for taint in taints if taint["key"].startswith(_ENDING)), "")

    def _node_labels(self, name: str) -> dict[str, str]:
        if name and name not in self._labels:
            node = self._node(name)
            self._labels[name] = {} if node is None else node["metadata"].get("labels") or {}
        return self._labels.get(name, {})


def namespace() -> str:
    return os.environ.get("METAFLOW_KUBERNETES_NAMESPACE") or "default"


def _path(job_id: str) -> tuple[str, ...]:
    space, kind, name = job_id.split("/")
    if kind == "jobs":
        return ("batch", "v1", space, kind, name)
    return (JOBSET_GROUP, JOBSET_VERSION, space, kind, name)


def _json(body: str | bytes | None) -> JsonObject:
    try:
        found = json.loads(body or b"{}")
    except (ValueError, TypeError):
        found = {}
    if isinstance(found, dict):
        return found
    return {}


def _api_error(what: str, status: int, body: JsonObject) -> CloudError:
    text = f"Kubernetes: {what}: {str(body.get('message') or 'no reason given')[:500]} ({status})"
    # A plugin of admission names the object that it refuses; a lack of rights does not.
    by_admission = status == 403 and _ADMISSION.search(text) and not _NO_RIGHT.search(text)
    if by_admission:
        return CloudRefused(text, str(status))
    if status in (401, 403) and QUOTA not in text:
        return CloudForbidden(text)
    if status == 429 or status >= 500 or not status:
        return CloudUnavailable(text)
    return CloudRefused(text, str(status))


def _unix(text: str | None) -> float | None:
    if text:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    return None


def _pod_state(pod: Pod) -> PodState:
    metadata = pod["metadata"]
    status = pod.get("status") or {}
    labels = pod["metadata"].get("labels") or {}
    worker = labels.get("jobset.sigs.k8s.io/replicatedjob-name") == "worker"
    lines = status.get("containerStatuses") or []
    if lines:
        state = lines[0].get("state") or {}
    else:
        state = {}
    ended, running, waits = (state.get(name) or {} for name in ("terminated", "running", "waiting"))
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    disrupted = conditions.get("DisruptionTarget", {}).get("status") == "True"
    unscheduled = conditions.get("PodScheduled", {})
    reason = str(waits.get("reason") or "")
    waiting = ": ".join(filter(None, (reason, str(waits.get("message") or ""))))
    if unscheduled.get("status") == "False":
        waiting = (
            f"{unscheduled.get('reason') or 'Unschedulable'}: {unscheduled.get('message') or ''}"
        )
    return PodState(
        name=metadata["name"],
        node=1 + int(labels.get("jobset.sigs.k8s.io/job-index") or 0) if worker else 0,
        machine=(pod.get("spec") or {}).get("nodeName") or "",
        phase=status.get("phase") or "Pending",
        created=_unix(metadata.get("creationTimestamp")),
        started=_unix(ended.get("startedAt") or running.get("startedAt")),
        ended=_unix(ended.get("finishedAt")),
        ended_by_cluster=bool(ended.get("finishedAt")),
        exit_code=ended.get("exitCode"),
        exit_reason=str(ended.get("reason") or ""),
        waiting=waiting,
        no_image=reason in _NO_IMAGE,
        lost=disrupted or status.get("reason") in _LOST,
        late=status.get("reason") == "DeadlineExceeded",
        leaving="deletionTimestamp" in metadata,
    )


class AttemptWatch:
    """Observed state of one attempt, built from repeated readings of the cluster.

    It keeps pods that no longer exist. Not thread-safe.
    """

    def __init__(self, job_id: str, nodes: int = 1, roll_call_seconds: float = math.inf) -> None:
        self.job_id = job_id
        self.nodes = nodes
        # For which a node waits for the others before it fails
        self._roll_call_seconds = roll_call_seconds
        self.pods: dict[str, PodState] = {}
        # By the caller; such a pod can be gone before a reading shows why
        self.evicted: set[str] = set()
        self.succeeded = self.failed = self.suspended = self.gone = False
        self.reason = self._version = self._refused = ""

    def look(self, cluster: Cluster, now: float) -> None:
        """Read the attempt's current state and update this record.

        `now` is Unix time. Raises CloudError.
        """
        leaving = {name for name, pod in self.pods.items() if pod.leaving}
        # Read before the owner, whose deletion removes the pods
        found, version = cluster.pods(self.job_id)
        owner = cluster.owner(self.job_id)
        present = {pod.name for pod in found}
        if self._version and any(
            pod.ended is None and name not in present for name, pod in self.pods.items()
        ):
            # Such as 410: the cluster no longer has these changes
            with contextlib.suppress(CloudError):
                found += [
                    pod
                    for pod in cluster.removed_pods(self.job_id, self._version)
                    if pod.name not in present
                ]
        self._version = version
        was_gone = self.gone
        self.gone = owner is None or "deletionTimestamp" in owner["metadata"]
        if owner is not None:
            self._read_owner(owner)
        if len({pod.node for pod in (*self.pods.values(), *found)}) < self.nodes and not (
            self.suspended or self.ended
        ):
            with contextlib.suppress(CloudError):  # such as 403: this account may not list events
                self._refused = cluster.refused_pods(self.job_id)
        for pod in found:
            old = self.pods.get(pod.name) or pod
            self.pods[pod.name] = replace(
                pod,
                started=pod.started or old.started,
                ended=pod.ended or old.ended,
                labels=pod.labels or old.labels,
                ended_by_cluster=pod.ended_by_cluster or old.ended_by_cluster,
                lost=pod.lost or old.lost or (pod.leaving and not self.ended),  # deleted by a drain
            )
        for name, pod in self.pods.items():
            if pod.ended is None:
                # A container that is asked to end is paid for until it ends. A lost node's pod may
                # stay for minutes. A pod that was deleted may leave an empty node behind, which the
                # cluster removes as well.
                # After a deletion from outside, a node that its pods have left may go as well.
                emptied = self.gone and not self.failed and name in leaving
                # Deleted after its pods were read, whose nodes may be gone since: the next reading
                # tells
                is_outdated = self.gone and not was_gone and not pod.leaving
                node_lost = (
                    self.ended
                    and not emptied
                    and not is_outdated
                    and name in present
                    and bool(pod.machine)
                    and cluster.has_lost(pod.machine)
                )
                if name not in present or pod.phase == "Failed" or node_lost:
                    lost = pod.lost or node_lost or (name not in present and not self.ended)
                    self.pods[name] = replace(pod, ended=now, lost=lost)

    def end(self, cluster: Cluster, limit: float) -> None:
        """Delete the attempt if it has not ended, and wait until its pods have ended.

        The wait ends at `limit` (monotonic time) at the latest.
        """
        if not self.ended or self.gone:
            cluster.delete(self.job_id)
        while any(pod.ended is None for pod in self.pods.values()) and time.monotonic() < limit:
            time.sleep(0.3)
            self.look(cluster, time.time())

    def _read_owner(self, owner: Owner) -> None:
        spec = owner.get("spec") or {}
        status = owner.get("status") or {}
        conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
        self.succeeded = any(
            conditions.get(name, {}).get("status") == "True" for name in ("Completed", "Complete")
        )
        failed = conditions.get("Failed") or {}
        self.failed = failed.get("status") == "True"
        self.reason = str(failed.get("message") or "")
        self.suspended = bool(spec.get("suspend"))
        self.nodes = sum(
            replicated.get("replicas", 1) for replicated in spec.get("replicatedJobs") or [{}]
        )

    @property
    def ended(self) -> bool:
        return self.succeeded or self.failed or self.gone

    @property
    def over(self) -> bool:
        """Whether the attempt has ended and the end time of every pod is known."""
        return self.ended and all(pod.ended is not None for pod in self.pods.values())

    @property
    def waiting(self) -> str:
        """Why a node of the attempt does not run yet, or "" if all run.

        The reason is the one in the node's pod, or that the node has no pod.
        """
        for pod in self.pods.values():
            if pod.waiting:
                return f"{pod.name}: {pod.waiting}"
        if not self.lacking or len({pod.node for pod in self.pods.values()}) >= self.nodes:
            return ""
        if QUOTA in self._refused:
            fix = f"; fix: {QUOTA_FIX}"
        else:
            fix = ""
        why = self._refused or f"kubectl -n {self.job_id.split('/')[0]} describe jobs tells why"
        return f"a pod was not made; {why}{fix}"

    @property
    def started(self) -> bool:
        return any(pod.started is not None for pod in self.pods.values())

    @property
    def disrupted(self) -> bool:
        """Whether a pod was evicted, or was lost with its machine."""
        return bool(self.evicted) or any(pod.lost for pod in self.pods.values())

    @property
    def lacking(self) -> bool:
        """Whether a node of the attempt has no started pod, so that the attempt can neither
        continue nor end.

        A lost pod counts as started until node 0 has succeeded: before that, its replacement may
        start at any time.
        """
        begun = [pod for pod in self.pods.values() if pod.started is not None]
        finished = any(pod.node == 0 and pod.exit_code == 0 for pod in begun)
        return len({pod.node for pod in begun if not (finished and pod.lost)}) < self.nodes

    def announced(self, cluster: Cluster) -> list[tuple[PodState, str]]:
        """Return the running pods whose node is about to be taken away, each with the node's taint."""
        running = [
            pod for pod in self.pods.values() if pod.phase == "Running" and pod.ended is None
        ]
        found = [
            (pod, cluster.announced_end(pod.machine))
            for pod in running
            if pod.machine and not pod.leaving
        ]
        return [(pod, taint) for pod, taint in found if taint]

    def cause(self, ended_by: Cause | None) -> Cause:  # noqa: PLR0911 (one return for each cause, in the order of their precedence)
        """Return why the attempt ended.

        If this process ended the attempt, `ended_by` is the cause.
        """
        pods = list(self.pods.values())
        if self.succeeded:
            return "ended"
        if ended_by is not None:
            return ended_by
        if self.disrupted:
            return "reclaimed"
        if any(pod.late for pod in pods) or (self.gone and not self.failed):
            return "terminated"
        ran = [
            (pod.ended - pod.started, pod.ended)
            for pod in pods
            if pod.exit_code and pod.ended and pod.started
        ]
        if ran:
            # A missing pod may start on the machine that the failed one leaves
            longest, end = max(ran)
            present = {pod.node for pod in pods if pod.started is not None and pod.started < end}
            if len(present) < self.nodes and longest >= self._roll_call_seconds:
                # A machine was missing at the roll-call, before any code of the user
                return "never_started"
            # A gang fails as a whole long before the cluster notices the loss of a node.
            known = all(pod.exit_code is not None for pod in pods if pod.started is not None)
            if known:
                return "user_code"
            return "unknown"
        if any(pod.no_image for pod in pods):
            return "not_made"
        if self.started:
            return "unknown"
        return "never_started"

    def _terminator(self, ended_by: Cause | None) -> Terminator:
        """Return who terminated the attempt. The API does not tell who deleted an object."""
        if ended_by is not None:
            return "ebbflow"
        if any(pod.late for pod in self.pods.values()):
            return "limit"
        return "unknown"

    def attempt(
        self, *, now: float, ended_by: Cause | None = None, reason: str = ""
    ) -> BatchAttempt:
        """Return a description of the attempt: its status, its times and the cause of its end.

        A node's time includes only the time in which one of its pods ran.
        """
        main = [pod for pod in self.pods.values() if pod.node == 0]
        texts = [
            reason or self.reason,
            *(f"{pod.name}: {_why(pod)}" for pod in self.pods.values() if _why(pod)),
        ]
        times = tuple(self._times(node, now) for node in range(self.nodes))
        begun = [start for start, _ in times if start is not None]
        over = [stop for _, stop in times if stop is not None]
        cause: Cause = "unknown"
        status = "RUNNING"
        if self.ended or ended_by:
            cause = self.cause(ended_by)
            status = "SUCCEEDED" if self.succeeded else "FAILED"
        return BatchAttempt(
            job_id=self.job_id,
            job_name=self.job_id.rpartition("/")[2],
            queue="kubernetes",
            nodes=self.nodes,
            status=status,
            created_utc=min(
                (pod.created for pod in self.pods.values() if pod.created), default=None
            ),
            started_utc=min(begun, default=None),
            stopped_utc=max(over, default=None),
            exit_code=next(
                (pod.exit_code for pod in reversed(main) if pod.exit_code is not None), None
            ),
            reason="; ".join(filter(None, texts))[:1000],
            cause=cause,
            node_times=times if begun else (),
            terminated_by=self._terminator(ended_by) if cause == "terminated" else None,
        )

    def _times(self, node: int, now: float) -> tuple[float | None, float | None]:
        mine = [pod for pod in self.pods.values() if pod.node == node and pod.started is not None]
        if not mine:
            return None, None
        # A lost pod has no end time. Its gang ends within seconds, long before the cluster notices
        # the loss.
        known = [pod.ended for pod in self.pods.values() if pod.ended and pod.ended_by_cluster]
        start = min(pod.started or now for pod in mine)
        seconds = 0.0
        for pod in mine:
            if pod.ended is None:
                end = now
            elif pod.ended_by_cluster:
                end = pod.ended
            else:
                later = [other for other in known if other >= (pod.started or other)]
                end = min(pod.ended, max(later, default=now))
            seconds += end - (pod.started or end)
        return start, start + seconds

    def given(self) -> dict[str, str]:
        """Return the machines' instance type, market and zone, from node labels.

        Omit values in which they differ.
        """
        found: dict[str, set[str]] = {}
        for pod in self.pods.values():
            market = _MARKETS.get(
                pod.labels.get("karpenter.sh/capacity-type")
                or pod.labels.get("eks.amazonaws.com/capacityType")
                or ""
            )
            facts = {
                "instance_type": pod.labels.get(_INSTANCE_TYPE),
                "market": market,
                "zone": pod.labels.get(_ZONE),
            }
            for name, value in facts.items():
                if value:
                    found.setdefault(name, set()).add(value)
        return {name: next(iter(values)) for name, values in found.items() if len(values) == 1}


def open_cluster(seconds: float = _SECONDS) -> Cluster:
    """Make a client for the cluster that Metaflow would use.

    The configuration is that of KUBECONFIG, else of the pod's service account, else ~/.kube/config.
    No request is sent.

    Raises CloudRefused if there is no configuration.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        raise CloudRefused(
            "--with kubernetes needs a package; fix: pip install kubernetes"
        ) from None
    try:
        made = client.Configuration()
        if not os.environ.get("KUBECONFIG") and os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(made)
        else:
            # The package reads the variable only when it is imported
            path = os.environ.get("KUBECONFIG") or None
            config.load_kube_config(config_file=path, client_configuration=made)
    except (config.ConfigException, OSError, ValueError, TypeError) as error:
        raise CloudRefused(
            f"no usable kubeconfig: {error}; fix: set KUBECONFIG, or run in a pod"
        ) from None
    made.retries = False
    return Cluster(client.ApiClient(made), seconds)


def describe_attempts(
    job_ids: Sequence[str], cluster: Cluster, *, now: float
) -> dict[str, BatchAttempt]:
    """Return the states of attempts by job id. Jobs that the cluster has deleted are left out.

    Raises CloudError.
    """
    found = {}
    for job_id in job_ids:
        watch = AttemptWatch(job_id)
        watch.look(cluster, now)
        if watch.pods or not watch.gone:
            attempt = watch.attempt(now=now)
            if watch.over:
                found[job_id] = attempt
            else:
                found[job_id] = replace(attempt, status="RUNNING", cause="unknown")
    return found


def end_attempt(job_id: str, cluster: Cluster, seconds: float) -> BatchAttempt:
    """End an attempt, wait up to `seconds` for the end of its pods, and return its description.

    Raises CloudError.
    """
    watch = AttemptWatch(job_id)
    watch.look(cluster, time.time())
    if watch.ended and not watch.gone:
        ended_by: Cause | None = None
    else:
        ended_by = "terminated"
    watch.end(cluster, time.monotonic() + seconds)
    return watch.attempt(now=time.time(), ended_by=ended_by)


def _why(pod: PodState) -> str:
    if pod.lost and pod.started:
        return "its node was lost or drained"
    if pod.waiting:
        return pod.waiting
    if pod.exit_code and pod.exit_reason not in ("", "Error"):
        return f"exit code {pod.exit_code} ({pod.exit_reason})"
    if pod.exit_code:
        return f"exit code {pod.exit_code}"
    return ""
