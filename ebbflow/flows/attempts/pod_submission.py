"""Submission of one step to Kubernetes, and the wait for its pods, in a process on the launching
machine.

Metaflow starts this process for each step (`kubernetes step`). This module patches the Kubernetes
client of that process, and no internals of Metaflow:

- It retries requests after temporary failures (429, 5xx, no connection), so that training continues
  while the API server is down. If Kubernetes refuses to create the Job or JobSet, the run ends with
  a one-line message.
- It lets the Jobs of a JobSet's workers replace lost pods, and adds a Kueue queue if one is
  configured. It gives each Job and JobSet a fixed name, so that a repeated create request does not
  create a second one.
- It watches the pods. It deletes a Job or JobSet that does not start in time, so that Metaflow
  retries the attempt with a new placement. It evicts pods whose node is about to be taken away. It
  records the attempt's times and its end for the bill.
- When the process ends, it deletes the Job or JobSet, so that the pods save a checkpoint and exit.
  Metaflow itself would run a command in node 0's pod.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ebbflow.core.errors import CloudError, CloudForbidden, CloudRefused, Outcome
from ebbflow.core.events import BATCH_ATTEMPT, BATCH_SUBMITTED, OUTCOME
from ebbflow.core.json_values import JsonObject
from ebbflow.cost.capacity import batch_attempt_data
from ebbflow.flows.attempts.order import StopOrder, SubmitLimits, SubmitOrder
from ebbflow.flows.attempts.submission import StartLimits, longest_wait_seconds, submit_events
from ebbflow.flows.pods import was_asked_to_leave
from ebbflow.infra.batch.jobs import NEVER_STARTED, Cause
from ebbflow.infra.kubernetes.checks import describe_refusal_fix
from ebbflow.infra.kubernetes.cluster import (
    QUEUE_LABEL,
    QUOTA,
    QUOTA_FIX,
    AttemptWatch,
    Cluster,
    open_cluster,
)

if TYPE_CHECKING:
    from kubernetes.client.exceptions import ApiException

_NO_RETRY = 202  # Metaflow's exit code of a task that must not be retried
_TRANSIENT = (429, 500, 502, 503, 504)
_OUTAGE_SECONDS = 900.0  # without an API server; then the attempt counts as failed
# In which a cluster notices that a node is lost; the gang has ended long before
_NOTICED_SECONDS = 90.0
_NODES_SECONDS = 5.0  # between two looks at the taints of the nodes
_LONGEST_PAUSE_SECONDS = 15.0
_LOOK_SECONDS = 1.0
_KEPT_SECONDS = 86400  # for which the cluster keeps a JobSet that has ended
_PATIENCE_SECONDS = 60.0  # for a node to be made, before a message says why a pod waits


class PodSubmission:
    """Submission and observation of the only Job or JobSet that this process creates.

    Args:
        order: The scheduler's order about this attempt; None for a step that does not train.
    """

    def __init__(self, order: SubmitOrder | None) -> None:
        self._order = order
        self._limits = SubmitLimits() if order is None else order
        self._kueue = None if order is None else order.kueue
        self._roll_call_seconds = math.inf
        if order is not None and order.roll_call_seconds:
            self._roll_call_seconds = order.roll_call_seconds
        self._watch: AttemptWatch | None = None
        self._ended_by: Cause | None = None
        self._why = ""
        self._lock = threading.Lock()
        self._recorded = False
        self._limit = _OUTAGE_SECONDS
        self._shown = ""
        self._follower: threading.Thread | None = None
        self._leaving = threading.Event()

    def listen(self) -> None:
        """Patch the Kubernetes client, and delete the pods at exit.

        Raises SystemExit if the order is to stop.
        """
        if self._order is not None and self._order.stop is not None:
            raise SystemExit(self._record_outcome(self._order.stop))
        from kubernetes import client, stream
        from kubernetes.client.rest import RESTClientObject

        def no_exec(*_: object, **__: object) -> None:
            raise RuntimeError("pods are ended by deletion")

        # Metaflow then deletes the JobSet, or ends the Job by its parallelism
        stream.stream = no_exec
        RESTClientObject.request = self._persistent(RESTClientObject.request)
        custom = client.CustomObjectsApi
        batch = client.BatchV1Api
        custom.create_namespaced_custom_object = self._creating(
            custom.create_namespaced_custom_object, "jobsets"
        )
        custom.get_namespaced_custom_object = self._reading(custom.get_namespaced_custom_object)
        batch.create_namespaced_job = self._creating(batch.create_namespaced_job, "jobs")
        atexit.register(self._leave)

    def _persistent(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the REST client's `request` so that it retries while the API server does not answer
        or is overloaded.
        """
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        def request(client: Any, method: str, url: str, *args: Any, **options: Any) -> Any:
            began = time.monotonic()
            pause = 0.5
            told = False
            options["_request_timeout"] = options.get("_request_timeout") or 30.0
            while True:
                try:
                    answer = send(client, method, url, *args, **options)
                    status = answer.status
                    after = (answer.headers or {}).get("Retry-After")
                    # 429: a disruption budget forbids it
                    if status not in _TRANSIENT or url.endswith("/eviction"):
                        return answer
                    problem = f"HTTP {status}"
                except ApiException as error:  # releases of the client that raise here
                    if error.status not in _TRANSIENT:
                        raise
                    answer = error
                    problem = str(error)
                    after = (error.headers or {}).get("Retry-After")
                except (HTTPError, OSError) as error:
                    answer = error
                    problem = str(error)
                    after = None
                if time.monotonic() - began > self._limit:
                    if isinstance(answer, Exception):
                        raise answer
                    return answer
                if not told:
                    _say(
                        f"the API server does not answer ({problem[:200]}); training "
                        "continues; retrying"
                    )
                    told = True
                time.sleep(
                    min(
                        float(after) if after and after.isdigit() else pause, _LONGEST_PAUSE_SECONDS
                    )
                )
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

        return request

    def _creating(self, create: Callable[..., Any], kind: str) -> Callable[..., Any]:
        from kubernetes.client.exceptions import ApiException

        def make(api: Any, *args: Any, **options: Any) -> Any:
            body = options["body"]
            if not isinstance(body, dict):
                body = api.api_client.sanitize_for_serialization(body)
            self._complete(body, kind)
            name = body["metadata"]["name"]
            groups = body["spec"].get("replicatedJobs") or [{}]
            nodes = sum(group.get("replicas", 1) for group in groups)
            refusal = self._refused_pod(body, kind)
            if refusal is not None:
                raise SystemExit(self._record_outcome(refusal))
            job_id = f"{options['namespace']}/{kind}/{name}"
            self._watch = AttemptWatch(job_id, nodes, self._roll_call_seconds)
            _report_errors(lambda: self._note(job_id))
            try:
                answer = create(api, *args, **{**options, "body": body})
            except ApiException as error:
                if error.status != 409:
                    raise SystemExit(self._record_outcome(self._refusal(error))) from None
                # Made by a create whose answer was lost
                answer = self._existing(api, kind, options, name)
            self._follower = threading.Thread(
                target=_report_errors, args=(self._follow,), daemon=True
            )
            self._follower.start()
            return answer

        return make

    def _reading(self, get: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `get` so that it hides states of a JobSet that Metaflow would misread.

        Metaflow would treat any failed Job as the end of the gang before JobSet has decided. It
        would treat a gang without an active Job (preempted by Kueue, or between two pods) as
        succeeded. It would treat a condition with the status False as true.
        """

        def read(*args: Any, **options: Any) -> Any:
            found = get(*args, **options)
            if not isinstance(found, dict) or found.get("kind") != "JobSet":
                return found
            status = found.get("status") or {}
            conditions = status.get("conditions") or []
            status["conditions"] = [
                condition for condition in conditions if condition["status"] == "True"
            ]
            types = {condition["type"] for condition in status["conditions"]}
            if types & {"Failed", "Completed"}:
                return found
            for group in status.get("replicatedJobsStatus") or []:
                group["failed"] = 0
                if self._watch is not None and self._watch.started:
                    group["active"] = max(group["active"], 1)
            return found

        return read

    def _existing(self, api: Any, kind: str, options: dict[str, Any], name: str) -> Any:
        if kind == "jobs":
            return api.read_namespaced_job(name=name, namespace=options["namespace"])
        return api.get_namespaced_custom_object(
            name=name, **{key: options[key] for key in options if key != "body"}
        )

    def _complete(self, body: dict[str, Any], kind: str) -> None:
        """Add settings that Metaflow does not support to a Job or JobSet: name, queue, failure
        policy and lifetime.
        """
        metadata = body["metadata"]
        if not metadata.get("name"):
            metadata["name"] = f"{metadata.pop('generateName')}{os.urandom(3).hex()}"
        if self._kueue:
            metadata["labels"] = {**(metadata.get("labels") or {}), QUEUE_LABEL: self._kueue}
        if kind == "jobs":
            jobs = [body]
        else:
            jobs = [group["template"] for group in body["spec"]["replicatedJobs"]]
        for job in jobs:
            # Otherwise a pod that is asked to end counts as failed at once, while it saves
            job["spec"]["podReplacementPolicy"] = "Failed"
        if kind == "jobsets":
            for name in [name for name, value in body["spec"].items() if value is None]:
                del body["spec"][name]
            body.pop("status", None)
            body["spec"]["ttlSecondsAfterFinished"] = _KEPT_SECONDS
            # With Metaflow's InOrder, the workers' machines are requested only when node 0 runs and
            # is paid for.
            body["spec"]["startupPolicy"] = {"startupPolicyOrder": "AnyOrder"}
            replacements = 0 if self._order is None else self._order.node_replacements
            for group in body["spec"]["replicatedJobs"]:
                if replacements and group["name"] == "worker":
                    group["template"]["spec"] |= replacement_policy(replacements)

    def _refused_pod(self, body: dict[str, Any], kind: str) -> StopOrder | None:
        """Try each pod in a dry run, and return an order that stops the job if the cluster refuses
        one.

        A Job whose pods are refused waits for them for ever, and a gang's other machines are paid
        for meanwhile.
        """
        if kind == "jobs":
            templates = [body["spec"]["template"]]
        else:
            groups = body["spec"]["replicatedJobs"]
            templates = [group["template"]["spec"]["template"] for group in groups]
        for template in templates:
            labels = (template.get("metadata") or {}).get("labels") or {}
            metadata = {"generateName": "ebbflow-check-", "labels": labels}
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": metadata,
                "spec": template["spec"],
            }
            try:
                open_cluster().try_create_pod(pod)
            except CloudRefused as error:
                # A quota is full for now; other codes are of servers that cannot try a pod, or of
                # webhooks, which choose their code: Kyverno's is 400
                refused = error.code in ("403", "422") or "denied the request" in str(error)
                if refused and QUOTA not in str(error):
                    step = "a step" if self._order is None else self._order.step
                    message = (
                        f"the cluster refuses the pods of {step}: {error}; fix: "
                        f"{describe_refusal_fix(error)}"
                    )
                    return StopOrder(outcome=Outcome.FAILED, message=message)
            except CloudError:  # the create itself meets it, or this account may not try
                pass
        return None

    def _refusal(self, error: ApiException) -> StopOrder:
        """Return an order that stops the job, for a Job or JobSet that Kubernetes refused."""
        step = "a step" if self._order is None else self._order.step
        message = f"Kubernetes refused {step}: {_reason(error)}"
        if QUOTA in message:
            return StopOrder(outcome=Outcome.NO_CAPACITY, message=f"{message}; fix: {QUOTA_FIX}")
        return StopOrder(outcome=Outcome.FAILED, message=message)

    def _record_outcome(self, stop: StopOrder) -> int:
        """Record the job's outcome, and return the exit code after which Metaflow does not retry
        the task.
        """
        _say(stop.message)
        if self._order is not None:
            with submit_events(self._order) as log:
                log.emit(OUTCOME, flush=True, outcome=stop.outcome.value, message=stop.message)
        self._recorded = True
        return _NO_RETRY

    def _note(self, job_id: str) -> None:
        """Record the id of the Job or JobSet before it is created, so that the next launcher finds
        pods left behind by this process.
        """
        order = self._order
        if order is None:
            return
        name = job_id.rpartition("/")[2]
        with submit_events(order) as log:
            log.emit(
                BATCH_SUBMITTED, step=order.step, task=order.task, job_id=job_id, job_name=name
            )

    def _follow(self) -> None:
        """Watch the pods until they have ended.

        If they do not start in time, delete the Job or JobSet.
        """
        watch = self._watch
        assert watch is not None
        cluster = open_cluster()
        limits = StartLimits(
            runnable_seconds=longest_wait_seconds(self._limits),
            starting_seconds=self._limits.image_seconds,
            start_by_utc=self._limits.start_by_utc,
        )
        began = nodes_seen = time.monotonic()
        while not watch.over and not self._leaving.is_set():
            with self._lock:
                try:
                    watch.look(cluster, time.time())
                except CloudError as error:
                    self._show(f"cannot look at the pods: {error}")
            if watch.started and time.monotonic() > nodes_seen + _NODES_SECONDS:
                nodes_seen = time.monotonic()
                self._evict_announced(cluster)
            if watch.suspended and self._kueue:
                self._show_queue_position(cluster, watch, self._kueue)
                limits.restart()  # the queue's own limits apply
            elif not watch.lacking:
                limits.restart()
            elif not watch.ended:
                if time.monotonic() - began > _PATIENCE_SECONDS:
                    self._show(watch.waiting)
                if self._delete_if_late(cluster, watch, limits):
                    return
            self._leaving.wait(_LOOK_SECONDS)

    def _show_queue_position(self, cluster: Cluster, watch: AttemptWatch, queue: str) -> None:
        ahead = cluster.queue_position(watch.job_id, queue)
        if ahead is None:
            place = ""
        else:
            place = f", position {ahead + 1}"
        self._show(f"waiting for admission to queue {queue}{place}; not paid for")

    def _delete_if_late(self, cluster: Cluster, watch: AttemptWatch, limits: StartLimits) -> bool:
        """Delete the Job or JobSet if its pods did not start in time. Return whether it was
        deleted.
        """
        lacks_image = any(pod.no_image for pod in watch.pods.values())
        exceeded = limits.exhausted("STARTING" if lacks_image else "PENDING")
        if exceeded is None:
            return False
        words, why = exceeded
        if any(pod.node == 0 and pod.exit_code == 0 for pod in watch.pods.values()):
            self._ended_by = "terminated"
        elif words == NEVER_STARTED and not lacks_image:
            self._ended_by = "never_started"
        else:
            self._ended_by = "not_made"
        if watch.waiting:
            self._why = f"{why} ({watch.waiting})"
        else:
            self._why = why
        _say(f"{watch.job_id} {self._why}: deleted, to be placed anew")
        cluster.delete(watch.job_id)
        return True

    def _evict_announced(self, cluster: Cluster) -> None:
        """Evict pods whose node will soon be taken away, according to its taints, so that they save
        and exit in time.

        Karpenter evicts protected pods only at the end of its grace period, and some interruption
        handlers only taint the node. Without the permission to evict, pods get only SIGTERM or the
        notice in the instance's metadata.
        """
        assert self._watch is not None
        try:
            for pod, taint in self._watch.announced(cluster):
                self._show(
                    f"node {pod.machine} is about to be taken away ({taint}): {pod.name} saves "
                    "and leaves"
                )
                cluster.evict(self._watch.job_id, pod.name)
                self._watch.evicted.add(pod.name)
        except CloudForbidden as error:
            self._show(
                f"a node's end is announced, but {error}; fix: kubectl apply -f "
                "infra/kubernetes/rbac.yaml"
            )
        except CloudError:
            pass

    def _show(self, text: str) -> None:
        if text and text != self._shown:
            self._shown = text
            _say(text)

    def _leave(self) -> None:
        """Delete pods that still run, wait until they have ended, and record the end.

        Called when the process exits.
        """
        began = time.monotonic()
        watch = self._watch
        leave_seconds = self._limits.leave_seconds
        self._limit = leave_seconds / 2
        self._leaving.set()
        if self._follower is not None:  # a thread that still runs can abort the interpreter's end
            self._follower.join(leave_seconds / 2)
        if watch is None or self._recorded:
            return
        with self._lock:
            try:
                cluster = open_cluster()
                watch.look(cluster, time.time())
                # Metaflow may have deleted it already
                asked = was_asked_to_leave()
                if (not watch.ended or (watch.gone and asked)) and not watch.disrupted:
                    self._ended_by = self._ended_by or "terminated"
                    self._why = self._why or "the launcher was asked to leave"
                elif watch.gone and not watch.disrupted:
                    self._why = self._why or "it was deleted from outside of this run"
                watch.end(cluster, began + (_NOTICED_SECONDS if watch.failed else leave_seconds))
            except CloudError as error:
                _say(f"the end of {watch.job_id} is unknown: {error}")
                if not watch.ended:
                    return  # the next launcher deletes and records it
            _report_errors(self._record)

    def _record(self) -> None:
        assert self._watch is not None
        self._recorded = True
        order = self._order
        if order is None or order.placement is None:
            return
        attempt = self._watch.attempt(now=time.time(), ended_by=self._ended_by, reason=self._why)
        data = batch_attempt_data(attempt, order.placement)
        if order.placement.node_selector is None:  # else the machine is the configured pool's
            data.update(self._watch.given())
        with submit_events(order) as log:
            log.emit(BATCH_ATTEMPT, **data)
            if order.last and attempt.cause in ("never_started", "not_made"):
                if attempt.cause == "never_started":
                    outcome = Outcome.NO_CAPACITY
                else:
                    outcome = Outcome.FAILED
                why = self._why or attempt.reason or "never started"
                message = f"no attempt of {order.step} is left; the last one {why}"
                log.emit(OUTCOME, outcome=outcome.value, message=message)


def replacement_policy(times: int) -> JsonObject:
    """Return Job fields that let Kubernetes replace a worker's pod after the loss of its node, but
    not after a failure.

    JobSet's own RestartJob is an alpha feature that is switched off by default.
    """
    lost = {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    failed = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}}
    return {"backoffLimit": times, "podFailurePolicy": {"rules": [lost, failed]}}


def open_pod_submission() -> PodSubmission:
    return PodSubmission(SubmitOrder.of_environment())


def _reason(error: ApiException) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return f"{json.loads(error.body or '')['message']} ({error.status})"
    return f"{error.reason} ({error.status})"


def _report_errors(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        _say(f"{type(error).__name__}: {error}")


def _say(text: str) -> None:
    print(f"kubernetes: {text}", file=sys.stderr, flush=True)
