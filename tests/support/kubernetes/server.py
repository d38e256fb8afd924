"""The API server over HTTP, and a door for tests: `/_control/…` changes settings, takes nodes away,
tells what was.
"""

from __future__ import annotations

import copy
import json
import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.support.kubernetes import schema
from tests.support.kubernetes.controllers import (
    KUEUE_LABEL,
    Controllers,
    refuse_by_pod_security,
    refuse_over_quota,
)
from tests.support.kubernetes.kubelet import Kubelet
from tests.support.kubernetes.nodes import Nodes
from tests.support.kubernetes.settings import Settings
from tests.support.kubernetes.store import ApiError, Object, ObjectStore, timestamp
from tests.support.local_service import LocalServer

_RBAC = Path(__file__).resolve().parents[3] / "infra" / "kubernetes" / "rbac.yaml"
_TURN_SECONDS = 0.05
HEAD = "head-token"
JOB = "job-token"
ADMIN = "admin-token"
# Resources by group and version: (name, kind, namespaced).
_GROUPS = {
    "/api/v1": [
        ("pods", "Pod", True),
        ("nodes", "Node", False),
        ("namespaces", "Namespace", False),
        ("events", "Event", True),
        ("services", "Service", True),
        ("resourcequotas", "ResourceQuota", True),
    ],
    "/apis/batch/v1": [("jobs", "Job", True)],
    "/apis/jobset.x-k8s.io/v1alpha2": [("jobsets", "JobSet", True)],
    "/apis/kueue.x-k8s.io/v1beta1": [
        ("workloads", "Workload", True),
        ("localqueues", "LocalQueue", True),
    ],
}
_PATH = re.compile(
    r"(?P<root>/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<resource>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?$"
)


class Cluster:
    """The store, and one thread that turns all controllers."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.store = ObjectStore(lambda: settings.history)
        for name in settings.namespaces:
            document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            self.store.create("namespaces", "", document)
        queue = {
            "apiVersion": "kueue.x-k8s.io/v1beta1",
            "kind": "LocalQueue",
            "metadata": {"name": "team"},
        }
        self.store.create("localqueues", "ebbflow", queue)
        self.nodes = Nodes(settings, self.store)
        self.kubelet = Kubelet(settings, self.store, self.nodes, folder)
        self.controllers = Controllers(settings, self.store, self.kubelet.delete)
        self.requests: Counter[str] = Counter()
        self.denied: list[str] = []
        self.problems: list[str] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controllers", daemon=True)
        self._thread.start()
        rules = [
            role
            for role in yaml.safe_load_all(_RBAC.read_text())
            if role["kind"] in ("Role", "ClusterRole")
        ]
        self._rules = []
        for role in rules:
            self._rules += role["rules"]

    def close(self) -> None:
        self._closing.set()
        self._thread.join(30)
        self.kubelet.close()
        for name in list(self.nodes.machines):
            self.nodes.retire(name)

    def may(self, user: str, verb: str, group: str, resource: str) -> bool:
        if user == "admin":
            return True
        if user != "head" or f"{verb} {resource}" in self.settings.forbidden:
            return False
        return any(
            group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
            for rule in self._rules
        )

    def _run(self) -> None:
        while not self._closing.wait(_TURN_SECONDS):
            try:
                with self.store.lock:
                    self.controllers.turn()
                    self.kubelet.turn()
            except (
                Exception
            ) as error:  # told by the control, so that no test waits without a reason
                import traceback

                self.problems.append("".join(traceback.format_exception(error)))


class Server(LocalServer):
    def __init__(self, settings: Settings, folder: Path, port: int = 0) -> None:
        super().__init__(_Handler, port)
        self.cluster = Cluster(settings, folder)

    def server_close(self) -> None:
        self.cluster.close()
        super().server_close()


def matches(document: Object, selector: str) -> bool:
    """Of the label selectors: equality, inequality and existence."""
    labels = document["metadata"].get("labels") or {}
    for part in filter(None, (requirement.strip() for requirement in selector.split(","))):
        name, operator, value = re.fullmatch(r"([^=!]+?)\s*(?:(==|=|!=)\s*(.*))?", part).groups()  # type: ignore[union-attr]
        if operator is None and name not in labels:
            return False
        if operator in ("=", "==") and labels.get(name) != value:
            return False
        if operator == "!=" and labels.get(name) == value:
            return False
    return True


def field_matches(document: Object, selector: str) -> bool:
    for part in filter(None, selector.split(",")):
        path, operator, value = re.fullmatch(r"([\w.]+)(==|=|!=)(.*)", part).groups()  # type: ignore[union-attr]
        found: Any = document
        for name in path.split("."):
            found = (found or {}).get(name)
        if (str(found or "") == value) == (operator == "!="):
            return False
    return True


def merged(old: Any, patch: Any) -> Any:
    """RFC 7396.

    Lists of a strategic merge are replaced here, which no client of this project relies on.
    """
    if not isinstance(patch, dict):
        return patch
    if isinstance(old, dict):
        new = dict(old)
    else:
        new = {}
    for name, value in patch.items():
        if value is None:
            new.pop(name, None)
        else:
            new[name] = merged(new.get(name), value)
    return new


# One answer for each path.
def control(cluster: Cluster, path: str, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: PLR0911 - one return for each route
    """settings: change them. nodes, pods, jobsets, jobs: what there is. past: pods and nodes that
    were. notice, lose: {node}. evict: {pod}. preempt: {jobset}, as Kueue does. told: requests,
    denials and problems so far."""
    with cluster.store.lock:
        if path == "settings":
            cluster.settings.change(asked)
            return {}
        if path == "notice":
            cluster.nodes.notice(asked["node"])
            return {"at": timestamp()}
        if path == "lose":
            cluster.kubelet.lose(asked["node"])
            return {}
        if path == "evict":
            pod = next(
                candidate
                for candidate in cluster.store.all("pods")
                if candidate["metadata"]["name"] == asked["pod"]
            )
            cluster.kubelet.evict(pod)
            return {}
        if path == "preempt":
            for jobset in cluster.store.all("jobsets"):
                if jobset["metadata"]["name"] == asked["jobset"]:
                    cluster.store.edit(
                        "jobsets",
                        jobset["metadata"]["namespace"],
                        asked["jobset"],
                        lambda one: one["spec"].update(suspend=True),
                    )
            return {}
        if path == "past":
            return {"pods": cluster.kubelet.past, "nodes": cluster.nodes.past}
        if path == "told":
            return {
                "requests": dict(cluster.requests),
                "denied": cluster.denied,
                "problems": cluster.problems,
            }
        if path in ("nodes", "pods", "jobsets", "jobs", "workloads"):
            return {"items": cluster.store.all(path)}
    raise ValueError(f"no such control: {path}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_PUT(self) -> None:
        self._handle("PUT")

    def do_PATCH(self) -> None:
        self._handle("PATCH")

    def do_DELETE(self) -> None:
        self._handle("DELETE")

    def _handle(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(unquote(self.path))  # Go routes by the decoded path
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        cluster = self.server.cluster
        try:
            if parts.path.startswith("/_control/"):
                asked = json.loads(body or b"{}")
                self._answer(200, control(cluster, parts.path.removeprefix("/_control/"), asked))
                return
            if cluster.settings.down:
                self.close_connection = True
                return
            cluster.requests[f"{method} {parts.path}"] += 1
            for fault in cluster.settings.faults:
                if fault.get("times", 1) > 0 and re.search(fault["path"], f"{method} {parts.path}"):
                    fault["times"] = fault.get("times", 1) - 1
                    if fault["status"] == 429:
                        headers = {"Retry-After": "1"}
                    else:
                        headers = {}
                    raise ApiError(
                        fault["status"],
                        fault.get("reason", ""),
                        fault.get("message", "asked for by a test"),
                        **headers,
                    )
            self._serve(method, parts.path, query, body)
        except ApiError as error:
            self._answer(
                error.status,
                {
                    "kind": "Status",
                    "apiVersion": "v1",
                    "metadata": {},
                    "status": "Failure",
                    "message": str(error),
                    "reason": error.reason,
                    "code": error.status,
                },
                error.headers,
            )
        except (ValueError, KeyError, TypeError) as error:
            self._answer(
                400, {"kind": "Status", "status": "Failure", "message": repr(error), "code": 400}
            )

    def _user(self) -> str:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        user = {HEAD: "head", JOB: "job", ADMIN: "admin"}.get(token)
        if user is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return user

    def _serve(self, method: str, path: str, query: dict[str, str], body: bytes) -> None:
        cluster = self.server.cluster
        user = self._user()
        groups = {
            root: resources
            for root, resources in _GROUPS.items()
            if ("jobset" not in root or cluster.settings.jobset)
            and ("kueue" not in root or cluster.settings.kueue)
        }
        if path in ("/version", "/version/"):
            return self._answer(
                200,
                {"major": "1", "minor": "34", "gitVersion": "v1.34.0", "platform": "linux/amd64"},
            )
        if path in groups:
            resources = [
                {
                    "name": name,
                    "kind": kind,
                    "namespaced": spaced,
                    "singularName": "",
                    "verbs": ["get", "list", "create"],
                }
                for name, kind, spaced in groups[path]
            ]
            version = path.removeprefix("/apis/").removeprefix("/api/")
            return self._answer(
                200,
                {
                    "kind": "APIResourceList",
                    "apiVersion": "v1",
                    "groupVersion": version,
                    "resources": resources,
                },
            )
        if path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews" and method == "POST":
            asked = json.loads(body)["spec"]["resourceAttributes"]
            resource = asked["resource"] + (
                f"/{asked['subresource']}" if asked.get("subresource") else ""
            )
            allowed = cluster.may(user, asked["verb"], asked.get("group", ""), resource)
            document = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
            return self._answer(
                201,
                {**document, "spec": {"resourceAttributes": asked}, "status": {"allowed": allowed}},
            )
        pending = re.fullmatch(
            r"/apis/visibility\.kueue\.x-k8s\.io/v1beta1/namespaces/([^/]+)/localqueues/([^/]+)/pendingworkloads",
            path,
        )
        if pending and cluster.settings.kueue:
            self._authorize(
                user, "get", "visibility.kueue.x-k8s.io", "localqueues/pendingworkloads"
            )
            items = cluster.controllers.pending_workloads(*pending.groups())
            return self._answer(200, {"kind": "PendingWorkloadsSummary", "items": items})
        found = _PATH.fullmatch(path)
        if found:
            kinds = {name: (kind, spaced) for name, kind, spaced in groups.get(found["root"], ())}
        else:
            kinds = {}
        if found is None or found["resource"] not in kinds:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        kind, _ = kinds[found["resource"]]
        return self._resource(method, found, kind, query, body, user)

    def _authorize(
        self, user: str, verb: str, group: str, resource: str, namespace: str | None = None
    ) -> None:
        if not self.server.cluster.may(user, verb, group, resource):
            self.server.cluster.denied.append(f"{user}: {verb} {resource}")
            if namespace:
                place = f' in the namespace "{namespace}"'
            else:
                place = " at the cluster scope"
            raise ApiError(
                403,
                "Forbidden",
                f"{resource}.{group} is forbidden: User "
                f'"system:serviceaccount:ebbflow:ebbflow-{user}" cannot {verb} resource '
                f'"{resource}" in API group "{group}"{place}',
            )

    # One answer for each method and subresource.
    def _resource(  # noqa: PLR0911
        self,
        method: str,
        found: re.Match[str],
        kind: str,
        query: dict[str, str],
        body: bytes,
        user: str,
    ) -> None:
        cluster = self.server.cluster
        store = self.server.cluster.store
        resource = found["resource"]
        name = found["name"]
        sub = found["sub"]
        namespace = found["namespace"] or ""
        if resource == "namespaces" and found["namespace"] is None and sub is None:
            namespace = ""
        if found["root"] == "/api/v1":
            group = ""
        else:
            group = found["root"].split("/")[2]
        watch = method == "GET" and query.get("watch") in ("1", "true")
        verb = "watch" if watch else _verb(method, name)
        self._authorize(user, verb, group, f"{resource}/{sub}" if sub else resource, namespace)
        if sub == "exec":
            raise ApiError(501, "NotImplemented", "this cluster has no exec")
        if namespace and method == "POST" and store.find("namespaces", "", namespace) is None:
            raise ApiError(404, "NotFound", f'namespaces "{namespace}" not found')
        if sub == "eviction" and method == "POST":
            cluster.kubelet.evict(store.get("pods", namespace, name))
            return self._answer(201, {"kind": "Status", "status": "Success"})
        if watch:
            return self._watch(resource, namespace, query)
        with store.lock:
            if method == "GET" and name:
                return self._answer(200, store.get(resource, namespace, name))
            if method == "GET":
                return self._list(resource, kind, found["root"], namespace, query)
            if method == "POST":
                return self._create(resource, kind, group, namespace, json.loads(body), query)
            if method == "DELETE":
                return self._delete(resource, namespace, name, query, json.loads(body or b"{}"))
            new = json.loads(body)
            if method == "PATCH":
                new = self._patched(store.get(resource, namespace, name), new)
            plain = copy.deepcopy(new)
            plain["metadata"].pop("finalizers", None)
            self._check(plain)
            return self._answer(200, store.replace(resource, new, status=sub == "status"))

    def _patched(self, old: Object, patch: Any) -> Object:
        if "json-patch" in self.headers.get("Content-Type", ""):
            raise ApiError(415, "UnsupportedMediaType", "only merge patches")
        return merged(old, patch)

    def _check(self, document: Object) -> None:
        try:
            schema.check(document)
        except schema.Invalid as error:
            raise ApiError(422, "Invalid", f"{document.get('kind')} is invalid: {error}") from None

    def _list(
        self, resource: str, kind: str, root: str, namespace: str, query: dict[str, str]
    ) -> None:
        store = self.server.cluster.store
        items = [
            entry
            for entry in store.all(resource, namespace)
            if matches(entry, query.get("labelSelector", ""))
            and field_matches(entry, query.get("fieldSelector", ""))
        ]
        start = int(query.get("continue") or 0)
        most = int(query.get("limit") or 0) or len(items)
        metadata = {"resourceVersion": str(store.version)}
        if start + most < len(items):
            metadata["continue"] = str(start + most)
        version = root.removeprefix("/apis/").removeprefix("/api/")
        document = {"kind": f"{kind}List", "apiVersion": version, "metadata": metadata}
        self._answer(200, {**document, "items": items[start : start + most]})

    def _create(
        self,
        resource: str,
        kind: str,
        group: str,
        namespace: str,
        document: Object,
        query: dict[str, str],
    ) -> None:
        cluster = self.server.cluster
        if document.get("kind") != kind:
            raise ApiError(400, "BadRequest", f"{document.get('kind')} in the list of {kind}")
        given = (document.get("metadata") or {}).get("namespace")
        if given and given != namespace:
            raise ApiError(
                400,
                "BadRequest",
                f"the namespace of the object ({given}) does not match ({namespace})",
            )
        self._check(document)
        refuse_over_quota(cluster.settings, cluster.store, resource, group, namespace)
        if resource == "pods":
            refuse_by_pod_security(cluster.settings, document)
        document.pop("status", None)
        if query.get("dryRun") == "All":
            return self._answer(201, document)
        if cluster.settings.kueue and (document["metadata"].get("labels") or {}).get(KUEUE_LABEL):
            document["spec"]["suspend"] = True  # as Kueue's webhook does
        if resource == "pods":
            document["status"] = {"phase": "Pending"}
        if resource in ("jobs", "jobsets"):
            document["status"] = {}
        return self._answer(201, cluster.store.create(resource, namespace, document))

    def _delete(
        self,
        resource: str,
        namespace: str,
        name: str,
        query: dict[str, str],
        options: dict[str, Any],
    ) -> None:
        cluster = self.server.cluster
        document = cluster.store.get(resource, namespace, name)
        # A Job's pods are left alone by default ("for backward compatibility"); a custom resource's
        # dependents are not.
        policy = query.get("propagationPolicy") or options.get("propagationPolicy")
        policy = policy or ("Orphan" if resource == "jobs" else "Background")
        if resource == "pods":
            cluster.kubelet.delete(document)
        elif policy == "Foreground":
            cluster.controllers.delete_in_foreground(resource, document)
        else:
            if policy == "Orphan":
                for pod in cluster.store.all("pods", namespace):
                    owners = pod["metadata"].get("ownerReferences") or []
                    if any(owner["uid"] == document["metadata"]["uid"] for owner in owners):
                        cluster.store.edit(
                            "pods",
                            namespace,
                            pod["metadata"]["name"],
                            lambda one: one["metadata"].pop("ownerReferences"),
                        )
            cluster.store.remove(resource, namespace, name)
        self._answer(
            200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        )

    def _watch(self, resource: str, namespace: str, query: dict[str, str]) -> None:
        store = self.server.cluster.store
        version = int(query.get("resourceVersion") or store.version)
        limit = time.monotonic() + float(query.get("timeoutSeconds") or 60)
        # Raises 410 before the answer begins
        expired = next(store.changes_after(version, resource), None)
        del expired
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        while time.monotonic() < limit and not self.server.cluster.settings.down:
            try:
                changes = list(store.changes_after(version, resource))
            except ApiError as error:
                self._write(
                    {
                        "type": "ERROR",
                        "object": {"kind": "Status", "code": 410, "reason": str(error)},
                    }
                )
                return
            for number, what, document in changes:
                version = number
                if namespace and document["metadata"].get("namespace") != namespace:
                    continue
                if matches(document, query.get("labelSelector", "")):
                    self._write({"type": what, "object": document})
            with store.changed:
                store.changed.wait(min(1.0, max(limit - time.monotonic(), 0.01)))

    def _write(self, document: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(document).encode() + b"\n")
        self.wfile.flush()

    def _answer(
        self, status: int, document: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


def _verb(method: str, name: str | None) -> str:
    """The verb that a role has to allow for a request."""
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    if method == "GET":
        return "get" if name else "list"
    return verbs[method]
