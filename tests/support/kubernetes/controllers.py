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
KUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_TRACKING = "batch.kubernetes.io/job-tracking"


def condition(document: Object, kind: str) -> bool:
    return any(
        one["type"] == kind and one["status"] == "True"
        for one in (document.get("status") or {}).get("conditions") or []
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


def owned(documents: list[Object], owner: Object) -> list[Object]:
    uid = owner["metadata"]["uid"]
    return [
        one
        for one in documents
        if any(each["uid"] == uid for each in one["metadata"].get("ownerReferences") or [])
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
        alive = {
            one["metadata"]["uid"] for kind in ("jobs", "jobsets") for one in self._store.all(kind)
        }
        for kind in ("jobs", "pods", "services", "workloads"):
            for one in self._store.all(kind):
                owners = one["metadata"].get("ownerReferences") or []
                if owners and not any(each["uid"] in alive for each in owners):
                    if kind == "pods":
                        self._delete_pod(one)
                    else:
                        self._store.remove(
                            kind, one["metadata"]["namespace"], one["metadata"]["name"]
                        )
        for kind, below in (("jobsets", "jobs"), ("jobs", "pods")):
            for one in self._store.all(kind):
                if "deletionTimestamp" not in one["metadata"]:
                    continue
                children = owned(self._store.all(below), one)
                for child in children:
                    if below == "pods":
                        self._delete_pod(child)
                    else:
                        self.delete_in_foreground(below, child)
                if not children:
                    self._store.remove(kind, one["metadata"]["namespace"], one["metadata"]["name"])

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
        if (
            condition(job, "Complete")
            or condition(job, "Failed")
            or "deletionTimestamp" in metadata
        ):
            return
        failed = self._failed.setdefault(metadata["uid"], set())
        succeeded = self._succeeded.setdefault(metadata["uid"], set())
        # Of pod failure policies, the one that this project writes: only disrupted pods are
        # replaced, once they ended.
        strict = "podFailurePolicy" in spec
        at_fault = condition(job, "FailureTarget")
        pods = owned(self._store.all("pods", metadata["namespace"]), job)
        for pod in pods:
            uid = pod["metadata"]["uid"]
            phase = pod["status"].get("phase")
            if phase == "Succeeded":
                succeeded.add(uid)
            elif phase == "Failed" or ("deletionTimestamp" in pod["metadata"] and not strict):
                failed.add(uid)
                at_fault = at_fault or (strict and not condition(pod, "DisruptionTarget"))
        ended = failed | succeeded
        terminating = [pod for pod in pods if "deletionTimestamp" in pod["metadata"]]
        active = [
            pod for pod in pods if pod["metadata"]["uid"] not in ended and pod not in terminating
        ]
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
            words = ("BackoffLimitExceeded", "Job has reached the specified backoff limit")
            if strict and at_fault:
                words = (
                    "PodFailurePolicy",
                    "Container main failed with an exit code that rule 1 (FailJob) names",
                )
            set_condition(status, "FailureTarget", *words)
            if not terminating and not active:
                set_condition(status, "Failed", *words)
            for pod in active:
                self._delete_pod(pod)
        elif spec.get("suspend") or len(active) > wanted:
            for pod in active[wanted:]:
                self._delete_pod(pod)
                failed.discard(pod["metadata"]["uid"])
        elif len(active) < wanted and not (strict and terminating):
            self._make_pod(job, status)
        ready = [
            pod
            for pod in active
            if any(
                one["type"] == "Ready" and one["status"] == "True"
                for one in pod["status"].get("conditions") or []
            )
        ]
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
            "requests.cpu": sum(requests_of(one).get("cpu", 0.0) for one in pods),
        }
        asked = {"pods": 1.0, "requests.cpu": requests_of(template).get("cpu", 0.0)}
        for name in used.keys() & self._settings.quota.keys():
            if used[name] + asked[name] > (most := self._settings.quota[name]):
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
                if not condition(job, "Complete") and not condition(job, "Failed"):
                    self.delete_in_foreground("jobs", job)
            return
        if self._store.find("services", namespace, name) is None:
            self._store.create(
                "services",
                namespace,
                {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "spec": {"clusterIP": "None"},
                    "metadata": {"name": name, "ownerReferences": [owner_reference(jobset)]},
                },
            )
        current = []
        for job in jobs:
            if int(job["metadata"]["labels"][f"{JOBSET}/restart-attempt"]) < restarts:
                self.delete_in_foreground("jobs", job)
            else:
                current.append(job)
        blocked = len(current) < len(jobs) and (
            (spec.get("failurePolicy") or {}).get("restartStrategy") == "BlockingRecreate"
        )
        in_order = (spec.get("startupPolicy") or {}).get("startupPolicyOrder") == "InOrder"
        lines = []
        for replicated in spec.get("replicatedJobs") or []:
            own = [
                one
                for one in current
                if one["metadata"]["labels"][f"{JOBSET}/replicatedjob-name"] == replicated["name"]
            ]
            line = self._line(replicated, own)
            lines.append(line)
            if not blocked:
                self._make_jobs(jobset, replicated, jobs, restarts)
            if in_order and line["ready"] + line["succeeded"] < replicated.get("replicas", 1):
                lines += [
                    self._line(
                        later,
                        [
                            one
                            for one in current
                            if one["metadata"]["labels"][f"{JOBSET}/replicatedjob-name"]
                            == later["name"]
                        ],
                    )
                    for later in spec["replicatedJobs"][len(lines) :]
                ]
                break
        status["replicatedJobsStatus"] = lines
        total = sum(one.get("replicas", 1) for one in spec.get("replicatedJobs") or [])
        failed = [
            one
            for one in current
            if condition(one, "Failed") and "deletionTimestamp" not in one["metadata"]
        ]
        if failed:
            self._on_failure(jobset, status, failed)
        elif sum(condition(one, "Complete") for one in current) == total:
            set_condition(status, "Completed", "AllJobsCompleted", "jobset completed successfully")
            status["terminalState"] = "Completed"
        self._store.edit("jobsets", namespace, name, lambda one: one.update(status=status))
        for job in current:
            if bool(job["spec"].get("suspend")) != bool(spec.get("suspend")) and not condition(
                job, "Complete"
            ):
                self._store.edit(
                    "jobs",
                    namespace,
                    job["metadata"]["name"],
                    lambda one: one["spec"].update(suspend=bool(spec.get("suspend"))),
                )

    def _line(self, replicated: Object, jobs: list[Object]) -> dict[str, Any]:
        counts = [one.get("status") or {} for one in jobs]
        return {
            "name": replicated["name"],
            "ready": sum(
                count.get("ready", 0) + count.get("succeeded", 0) >= 1 for count in counts
            ),
            "succeeded": sum(condition(one, "Complete") for one in jobs),
            "failed": sum(condition(one, "Failed") for one in jobs),
            "active": sum(count.get("active", 0) > 0 for count in counts),
            "suspended": sum(bool(one["spec"].get("suspend")) for one in jobs),
        }

    def _make_jobs(
        self, jobset: Object, replicated: Object, jobs: list[Object], restarts: int
    ) -> None:
        present = {one["metadata"]["name"] for one in jobs}
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
                one
                for one in policy.get("rules") or []
                if group in (one.get("targetReplicatedJobs") or [group])
                and "BackoffLimitExceeded"
                in (one.get("onJobFailureReasons") or ["BackoffLimitExceeded"])
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
            for one in self._store.all(kind):
                queue = (one["metadata"].get("labels") or {}).get(KUEUE_LABEL)
                if (
                    not queue
                    or owned([one], {"metadata": {"uid": ""}})
                    or condition(one, "Completed")
                ):
                    continue
                if (
                    any(condition(one, end) for end in ("Complete", "Failed"))
                    or "ownerReferences" in one["metadata"]
                ):
                    continue
                pods = sum(
                    each.get("replicas", 1) for each in one["spec"].get("replicatedJobs") or [{}]
                )
                if one["spec"].get("suspend"):
                    waiting.append((one["metadata"]["creationTimestamp"], kind, one, pods, queue))
                else:
                    used += pods
        for _, kind, one, pods, queue in sorted(waiting, key=lambda each: each[0]):
            metadata = one["metadata"]
            workload = f"{kind[:-1]}-{metadata['name']}"
            if self._store.find("workloads", metadata["namespace"], workload) is None:
                self._store.create(
                    "workloads",
                    metadata["namespace"],
                    {
                        "apiVersion": "kueue.x-k8s.io/v1beta1",
                        "kind": "Workload",
                        "spec": {"queueName": queue},
                        "metadata": {"name": workload, "ownerReferences": [owner_reference(one)]},
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
        found = [
            one
            for kind in ("jobs", "jobsets")
            for one in self._store.all(kind, namespace)
            if (one["metadata"].get("labels") or {}).get(KUEUE_LABEL) == queue
            and one["spec"].get("suspend")
        ]
        found.sort(key=lambda one: one["metadata"]["creationTimestamp"])
        return [
            {
                "metadata": {
                    "name": f"{one['kind'].lower()}-{one['metadata']['name']}",
                    "namespace": namespace,
                    "ownerReferences": [owner_reference(one)],
                },
                "localQueueName": queue,
                "positionInLocalQueue": at,
                "positionInClusterQueue": at,
                "priority": 0,
            }
            for at, one in enumerate(found)
        ]


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
