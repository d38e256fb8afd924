"""The controllers of Jobs, JobSets and Kueue: each takes one step towards what the objects ask for."""

from __future__ import annotations

import copy
import itertools
import random
import string
from typing import Any

from tests.support.kubernetes.nodes import requests_of
from tests.support.kubernetes.settings import Settings
from tests.support.kubernetes.store import ApiError, Object, ObjectStore, timestamp

JOBSET = "jobset.sigs.k8s.io"
# https://kubernetes.io/docs/concepts/security/pod-security-standards/#baseline
_BASELINE_CAPABILITIES = frozenset(
    [
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    ]
)
KUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_TRACKING = "batch.kubernetes.io/job-tracking"


class Controllers:
    """delete_pod: begins a pod's graceful end."""

    def __init__(self, settings: Settings, store: ObjectStore, delete_pod: Any) -> None:
        self._settings = settings
        self._store = store
        self._delete_pod = delete_pod
        self._failed: dict[
            str, set[str]
        ] = {}  # by the Job's uid: uids of pods that count as failed
        self._succeeded: dict[str, set[str]] = {}
        self._random = random.Random(5)
        self._addresses = itertools.count(2)

    def turn(self) -> None:
        self._collect()
        if self._settings.kueue:
            self._queue()
        for jobset in self._store.all("jobsets"):
            self._jobset(jobset)
        for job in self._store.all("jobs"):
            self._job(job)

    # -- garbage

    def _collect(self) -> None:
        """End what belongs to an owner that is gone, and owners that wait for the end of what they
        own.
        """
        self._end_orphans()
        for jobset in self._store.all("jobsets"):
            if "deletionTimestamp" in jobset["metadata"]:
                self._delete_below("jobsets", jobset, "jobs")
        for job in self._store.all("jobs"):
            if "deletionTimestamp" in job["metadata"]:
                self._delete_below("jobs", job, "pods")

    def _end_orphans(self) -> None:
        alive = {uid_of(job) for job in self._store.all("jobs")}
        alive |= {uid_of(jobset) for jobset in self._store.all("jobsets")}
        for kind in ("jobs", "pods", "services", "workloads"):
            for document in self._store.all(kind):
                metadata = document["metadata"]
                owners = metadata.get("ownerReferences") or []
                if not owners or any(owner["uid"] in alive for owner in owners):
                    continue
                if kind == "pods":
                    self._delete_pod(document)
                else:
                    self._store.remove(kind, metadata["namespace"], metadata["name"])

    def _delete_below(self, kind: str, document: Object, below: str) -> None:
        """Delete what a document owns, and the document once it owns nothing."""
        metadata = document["metadata"]
        children = owned(self._store.all(below), document)
        for child in children:
            if below == "pods":
                self._delete_pod(child)
            else:
                self.delete_in_foreground(below, child)
        if not children:
            self._store.remove(kind, metadata["namespace"], metadata["name"])

    def delete_in_foreground(self, kind: str, document: Object) -> None:
        metadata = document["metadata"]
        if "deletionTimestamp" not in metadata:
            self._store.edit(
                kind,
                metadata["namespace"],
                metadata["name"],
                lambda one: one["metadata"].update(
                    deletionTimestamp=timestamp(), finalizers=["foregroundDeletion"]
                ),
            )

    # -- Jobs

    def _job(self, job: Object) -> None:
        metadata = job["metadata"]
        spec = job["spec"]
        if has_ended(job) or "deletionTimestamp" in metadata:
            return
        failed = self._failed.setdefault(metadata["uid"], set())
        succeeded = self._succeeded.setdefault(metadata["uid"], set())
        # Of pod failure policies, the one that this project writes: only disrupted pods are
        # replaced, once they ended.
        strict = "podFailurePolicy" in spec
        pods = owned(self._store.all("pods", metadata["namespace"]), job)
        succeeded |= {uid_of(pod) for pod in pods if pod["status"].get("phase") == "Succeeded"}
        failing = [pod for pod in pods if has_failed(pod, strict=strict)]
        failed |= {uid_of(pod) for pod in failing}
        failed_alone = any(not condition(pod, "DisruptionTarget") for pod in failing)
        at_fault = condition(job, "FailureTarget") or (strict and failed_alone)
        ended = failed | succeeded
        terminating = [pod for pod in pods if "deletionTimestamp" in pod["metadata"]]
        active = [pod for pod in pods if uid_of(pod) not in ended and pod not in terminating]
        status = copy.deepcopy(job.get("status") or {})
        status.setdefault("startTime", timestamp())
        if spec.get("suspend"):
            wanted = 0
        else:
            wanted = min(spec.get("parallelism", 1), spec.get("completions", 1))
        if len(succeeded) >= spec.get("completions", 1):
            set_condition(
                status,
                "Complete",
                "CompletionsReached",
                "Reached expected number of succeeded pods",
            )
            status["completionTime"] = timestamp()
            active = []
        elif len(failed) > spec.get("backoffLimit", 6) or at_fault:
            reason = "BackoffLimitExceeded"
            message = "Job has reached the specified backoff limit"
            if strict and at_fault:
                reason = "PodFailurePolicy"
                message = "Container main failed with an exit code that rule 1 (FailJob) names"
            set_condition(status, "FailureTarget", reason, message)
            if not terminating and not active:
                set_condition(status, "Failed", reason, message)
            for pod in active:
                self._delete_pod(pod)
        elif spec.get("suspend") or len(active) > wanted:
            for pod in active[wanted:]:
                self._delete_pod(pod)
                failed.discard(pod["metadata"]["uid"])
        elif len(active) < wanted and not (strict and terminating):
            self._make_pod(job, status)
        ready = [pod for pod in active if condition(pod, "Ready")]
        status |= {
            "active": len(active),
            "ready": len(ready),
            "succeeded": len(succeeded),
            "failed": len(failed),
            "terminating": len(terminating),
        }
        self._store.edit(
            "jobs", metadata["namespace"], metadata["name"], lambda one: one.update(status=status)
        )

    def _make_pod(self, job: Object, status: dict[str, Any]) -> None:
        namespace = job["metadata"]["namespace"]
        template = job["spec"]["template"]
        pods = self._store.all("pods", namespace)
        used = {
            "pods": float(len(pods)),
            "requests.cpu": sum(requests_of(owned_pod).get("cpu", 0.0) for owned_pod in pods),
        }
        asked = {"pods": 1.0, "requests.cpu": requests_of(template).get("cpu", 0.0)}
        for name in used.keys() & self._settings.quota.keys():
            most = self._settings.quota[name]
            if used[name] + asked[name] > most:
                self._event(
                    job,
                    "FailedCreate",
                    (
                        f'Error creating: pods "{job["metadata"]["name"]}-x" is forbidden: exceeded quota: compute, '
                        f"requested: {name}={asked[name]:g}, used: {name}={used[name]:g}, limited: {name}={most}"
                    ),
                )
                return
        indexed = job["spec"].get("completionMode") == "Indexed"
        name = (
            job["metadata"]["name"]
            + ("-0-" if indexed else "-")
            + "".join(self._random.choices(string.ascii_lowercase + string.digits, k=5))
        )
        labels = {
            **((template.get("metadata") or {}).get("labels") or {}),
            "job-name": job["metadata"]["name"],
            "batch.kubernetes.io/job-name": job["metadata"]["name"],
            "controller-uid": job["metadata"]["uid"],
        }
        number = next(self._addresses)
        pod: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": labels,
                "annotations": {**((template.get("metadata") or {}).get("annotations") or {})},
                "ownerReferences": [owner_reference(job)],
                "finalizers": [_TRACKING],
            },
            "spec": {
                **copy.deepcopy(template["spec"]),
                "serviceAccount": template["spec"].get("serviceAccountName"),
            },
            "status": {
                "phase": "Pending",
                "conditions": [],
                # Taken when it runs
                "podIPs": [{"ip": f"127.10.{number // 250}.{number % 250 + 1}"}],
            },
        }
        if indexed:
            pod["spec"]["hostname"] = f"{job['metadata']['name']}-0"
        self._store.create("pods", namespace, pod)

    def _event(self, about: Object, reason: str, message: str) -> None:
        name = f"{about['metadata']['name']}.{reason.lower()}"
        if self._store.find("events", about["metadata"]["namespace"], name) is None:
            self._store.create(
                "events",
                about["metadata"]["namespace"],
                {
                    "apiVersion": "v1",
                    "kind": "Event",
                    "metadata": {"name": name},
                    "reason": reason,
                    "type": "Warning",
                    "message": message,
                    "involvedObject": {
                        "kind": about["kind"],
                        "name": about["metadata"]["name"],
                        "namespace": about["metadata"]["namespace"],
                        "uid": about["metadata"]["uid"],
                    },
                },
            )

    # -- JobSets

    def _jobset(self, jobset: Object) -> None:
        metadata = jobset["metadata"]
        spec = jobset["spec"]
        if "deletionTimestamp" in metadata:
            return
        namespace = metadata["namespace"]
        name = metadata["name"]
        jobs = owned(self._store.all("jobs", namespace), jobset)
        status = copy.deepcopy(jobset.get("status") or {})
        restarts = status.setdefault("restarts", 0)
        if condition(jobset, "Completed") or condition(jobset, "Failed"):
            for job in jobs:
                if not has_ended(job):
                    self.delete_in_foreground("jobs", job)
            return
        self._make_service(jobset)
        current = [job for job in jobs if restart_of(job) >= restarts]
        for job in jobs:
            if restart_of(job) < restarts:
                self.delete_in_foreground("jobs", job)
        blocked = len(current) < len(jobs) and (
            (spec.get("failurePolicy") or {}).get("restartStrategy") == "BlockingRecreate"
        )
        in_order = (spec.get("startupPolicy") or {}).get("startupPolicyOrder") == "InOrder"
        replicated_jobs = spec.get("replicatedJobs") or []
        lines = [self._line(replicated, current) for replicated in replicated_jobs]
        for replicated, line in zip(replicated_jobs, lines, strict=True):
            if not blocked:
                self._make_jobs(jobset, replicated, jobs, restarts)
            if in_order and line["ready"] + line["succeeded"] < replicated.get("replicas", 1):
                break
        status["replicatedJobsStatus"] = lines
        kept = [job for job in current if "deletionTimestamp" not in job["metadata"]]
        failed = [job for job in kept if condition(job, "Failed")]
        completed = [job for job in current if condition(job, "Complete")]
        total = sum(replicated.get("replicas", 1) for replicated in replicated_jobs)
        if failed:
            self._on_failure(jobset, status, failed)
        elif len(completed) == total:
            set_condition(status, "Completed", "AllJobsCompleted", "jobset completed successfully")
            status["terminalState"] = "Completed"
        self._store.edit("jobsets", namespace, name, lambda one: one.update(status=status))
        self._suspend(current, suspend=bool(spec.get("suspend")))

    def _make_service(self, jobset: Object) -> None:
        """Make the headless service that names the pods of a JobSet, unless it is there."""
        namespace = jobset["metadata"]["namespace"]
        name = jobset["metadata"]["name"]
        if self._store.find("services", namespace, name) is not None:
            return
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "spec": {"clusterIP": "None"},
            "metadata": {"name": name, "ownerReferences": [owner_reference(jobset)]},
        }
        self._store.create("services", namespace, service)

    def _suspend(self, jobs: list[Object], *, suspend: bool) -> None:
        """Suspend jobs that are not complete, or resume them."""

        def change(job: Object) -> None:
            job["spec"]["suspend"] = suspend

        for job in jobs:
            metadata = job["metadata"]
            is_suspended = bool(job["spec"].get("suspend"))
            if is_suspended != suspend and not condition(job, "Complete"):
                self._store.edit("jobs", metadata["namespace"], metadata["name"], change)

    def _line(self, replicated: Object, current: list[Object]) -> dict[str, Any]:
        label = f"{JOBSET}/replicatedjob-name"
        jobs = [job for job in current if job["metadata"]["labels"][label] == replicated["name"]]
        counts = [job.get("status") or {} for job in jobs]
        return {
            "name": replicated["name"],
            "ready": sum(
                count.get("ready", 0) + count.get("succeeded", 0) >= 1 for count in counts
            ),
            "succeeded": sum(condition(job, "Complete") for job in jobs),
            "failed": sum(condition(job, "Failed") for job in jobs),
            "active": sum(count.get("active", 0) > 0 for count in counts),
            "suspended": sum(bool(job["spec"].get("suspend")) for job in jobs),
        }

    def _make_jobs(
        self, jobset: Object, replicated: Object, jobs: list[Object], restarts: int
    ) -> None:
        present = {job["metadata"]["name"] for job in jobs}
        base = jobset["metadata"]["name"]
        namespace = jobset["metadata"]["namespace"]
        for index in range(replicated.get("replicas", 1)):
            name = f"{base}-{replicated['name']}-{index}"
            if name in present:
                continue
            template = copy.deepcopy(replicated["template"])
            marks = {
                f"{JOBSET}/jobset-name": base,
                f"{JOBSET}/replicatedjob-name": replicated["name"],
                f"{JOBSET}/job-index": str(index),
                f"{JOBSET}/restart-attempt": str(restarts),
                f"{JOBSET}/replicatedjob-replicas": str(replicated.get("replicas", 1)),
            }
            pod = template["spec"]["template"].setdefault("metadata", {})
            pod.pop("namespace", None)
            for kind in ("labels", "annotations"):
                pod[kind] = {**(pod.get(kind) or {}), **marks}
            spec = {
                **template["spec"],
                "completionMode": "Indexed",
                "suspend": bool(jobset["spec"].get("suspend")),
            }
            metadata = {"name": name, "labels": marks, "annotations": marks}
            metadata["ownerReferences"] = [owner_reference(jobset)]
            document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
            self._store.create("jobs", namespace, document)

    def _on_failure(self, jobset: Object, status: dict[str, Any], failed: list[Object]) -> None:
        policy = jobset["spec"].get("failurePolicy")
        job = failed[0]
        name = job["metadata"]["name"]
        mark = f"{JOBSET}/replicatedjob-name"
        if policy is None:
            return self._fail(
                status,
                "FailedJobs",
                f"jobset failed due to one or more job failures (first: {name})",
            )
        group = job["metadata"]["labels"][mark]
        rule = next(
            (
                candidate
                for candidate in policy.get("rules") or []
                if group in (candidate.get("targetReplicatedJobs") or [group])
                and "BackoffLimitExceeded"
                in (candidate.get("onJobFailureReasons") or ["BackoffLimitExceeded"])
            ),
            {"action": "RestartJobSet"},
        )
        action = rule["action"]
        used = status.get("restartsCountTowardsMax", 0)
        if action == "FailJobSet":
            return self._fail(
                status, "FailJobSetActionExecuted", f"applying FailJobSet, first failed job: {name}"
            )
        if used >= policy.get("maxRestarts", 0):
            return self._fail(
                status,
                "ReachedMaxRestarts",
                f"jobset failed due to reaching max number of restarts ({name})",
            )
        status["restarts"] += 1
        status["restartsCountTowardsMax"] = status.get("restartsCountTowardsMax", 0) + 1
        return None

    def _fail(self, status: dict[str, Any], reason: str, message: str) -> None:
        set_condition(status, "Failed", reason, message)
        status["terminalState"] = "Failed"

    # -- Kueue

    def _queue(self) -> None:
        """Admit workloads in the order of their creation, as far as the quota of pods goes."""
        used = 0
        waiting = []
        for kind in ("jobs", "jobsets"):
            for document in self._store.all(kind):
                queue = (document["metadata"].get("labels") or {}).get(KUEUE_LABEL)
                if (
                    not queue
                    or owned([document], {"metadata": {"uid": ""}})
                    or condition(document, "Completed")
                ):
                    continue
                if (
                    any(condition(document, end) for end in ("Complete", "Failed"))
                    or "ownerReferences" in document["metadata"]
                ):
                    continue
                pods = sum(
                    replicated_job.get("replicas", 1)
                    for replicated_job in document["spec"].get("replicatedJobs") or [{}]
                )
                if document["spec"].get("suspend"):
                    waiting.append(
                        (document["metadata"]["creationTimestamp"], kind, document, pods, queue)
                    )
                else:
                    used += pods
        for _, kind, entry, pods, queue in sorted(waiting, key=lambda each: each[0]):
            metadata = entry["metadata"]
            workload = f"{kind[:-1]}-{metadata['name']}"
            if self._store.find("workloads", metadata["namespace"], workload) is None:
                self._store.create(
                    "workloads",
                    metadata["namespace"],
                    {
                        "apiVersion": "kueue.x-k8s.io/v1beta1",
                        "kind": "Workload",
                        "spec": {"queueName": queue},
                        "metadata": {"name": workload, "ownerReferences": [owner_reference(entry)]},
                        "status": {},
                    },
                )
            if used + pods <= self._settings.kueue_pods:
                used += pods
                self._store.edit(
                    kind,
                    metadata["namespace"],
                    metadata["name"],
                    lambda each: each["spec"].update(suspend=False),
                )

    def pending_workloads(self, namespace: str, queue: str) -> list[dict[str, Any]]:
        found = []
        for kind in ("jobs", "jobsets"):
            found += [
                document
                for document in self._store.all(kind, namespace)
                if (document["metadata"].get("labels") or {}).get(KUEUE_LABEL) == queue
                and document["spec"].get("suspend")
            ]
        found.sort(key=lambda one: one["metadata"]["creationTimestamp"])
        return [
            {
                "metadata": {
                    "name": f"{document['kind'].lower()}-{document['metadata']['name']}",
                    "namespace": namespace,
                    "ownerReferences": [owner_reference(document)],
                },
                "localQueueName": queue,
                "positionInLocalQueue": at,
                "positionInClusterQueue": at,
                "priority": 0,
            }
            for at, document in enumerate(found)
        ]


def condition(document: Object, kind: str) -> bool:
    return any(
        entry["type"] == kind and entry["status"] == "True"
        for entry in (document.get("status") or {}).get("conditions") or []
    )


def set_condition(
    status: dict[str, Any], kind: str, reason: str, message: str, *, true: bool = True
) -> None:
    conditions = status.setdefault("conditions", [])
    if true:
        value = "True"
    else:
        value = "False"
    known = next((condition for condition in conditions if condition["type"] == kind), None)
    if known is not None and known["status"] == value:
        return
    if known is not None:
        conditions.remove(known)
    conditions.append(
        {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": message,
            "lastTransitionTime": timestamp(),
        }
    )


def uid_of(document: Object) -> str:
    return document["metadata"]["uid"]


def has_failed(pod: Object, *, strict: bool) -> bool:
    """Under a pod failure policy (strict), a pod that is being deleted has not failed yet."""
    phase = pod["status"].get("phase")
    is_leaving = "deletionTimestamp" in pod["metadata"] and phase != "Succeeded"
    return phase == "Failed" or (is_leaving and not strict)


def has_ended(job: Object) -> bool:
    return condition(job, "Complete") or condition(job, "Failed")


def restart_of(job: Object) -> int:
    return int(job["metadata"]["labels"][f"{JOBSET}/restart-attempt"])


def owned(documents: list[Object], owner: Object) -> list[Object]:
    uid = owner["metadata"]["uid"]
    return [
        document
        for document in documents
        if any(
            reference["uid"] == uid
            for reference in document["metadata"].get("ownerReferences") or []
        )
    ]


def owner_reference(owner: Object) -> dict[str, Any]:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def refuse_over_quota(
    settings: Settings, store: ObjectStore, resource: str, group: str, namespace: str
) -> None:
    """Raises ApiError."""
    if group:
        name = f"count/{resource}.{group}"
    else:
        name = f"count/{resource}"
    most = settings.quota.get(name)
    if most is not None and len(store.all(resource, namespace)) >= most:
        message = (
            f"exceeded quota: compute, requested: {name}=1, used: {name}={most}, limited: "
            f"{name}={most}"
        )
        raise ApiError(403, "Forbidden", message)


def refuse_by_pod_security(settings: Settings, pod: Object) -> None:
    """Raises ApiError for a pod that adds capabilities which the profile "baseline" does not have."""
    if settings.pod_security == "privileged":
        return
    for container in pod["spec"]["containers"]:
        added = (container.get("securityContext") or {}).get("capabilities") or {}
        for name in added.get("add") or []:
            if name not in _BASELINE_CAPABILITIES:
                pod_name = pod["metadata"].get("name") or f"{pod['metadata']['generateName']}x"
                raise ApiError(
                    403,
                    "Forbidden",
                    f'pods "{pod_name}" is forbidden: violates PodSecurity "baseline:latest": '
                    f'non-default capabilities (container "{container["name"]}" must not include '
                    f'"{name}" in securityContext.capabilities.add)',
                )
