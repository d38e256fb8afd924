"""The objects of the cluster, their versions, and what watches are told."""

from __future__ import annotations

import marshal
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str, str]  # resource, namespace, name


class ApiError(Exception):
    """Refused by the API server: an HTTP status and a reason as in metav1.Status."""

    def __init__(self, status: int, reason: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.headers = headers


class ObjectStore:
    """Objects with optimistic concurrency.

    `lock` guards all; `changed` is notified after each change.
    """

    def __init__(self, history: Callable[[], int]) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._objects: dict[Key, Object] = {}
        self._version = 100
        # Version, type of change, resource, object
        self._log: deque[tuple[int, str, str, Object]] = deque()
        self._history = history
        self.dropped = 100  # newest version that a watch can no longer start from

    @property
    def version(self) -> int:
        return self._version

    def create(self, resource: str, namespace: str, document: Object) -> Object:
        with self.lock:
            document = copied(document)
            metadata = document.setdefault("metadata", {})
            if not metadata.get("name"):
                if not metadata.get("generateName"):
                    raise ApiError(
                        422,
                        "Invalid",
                        "metadata.name: Required value: name or generateName is required",
                    )
                metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
            key = (resource, namespace, metadata["name"])
            if key in self._objects:
                raise ApiError(
                    409, "AlreadyExists", f'{resource} "{metadata["name"]}" already exists'
                )
            metadata |= {
                "uid": str(uuid.uuid4()),
                "creationTimestamp": timestamp(),
                "generation": 1,
            }
            if namespace:
                metadata["namespace"] = namespace
            return self._put(key, document, "ADDED")

    def get(self, resource: str, namespace: str, name: str) -> Object:
        with self.lock:
            try:
                return copied(self._objects[resource, namespace, name])
            except KeyError:
                raise ApiError(404, "NotFound", f'{resource} "{name}" not found') from None

    def find(self, resource: str, namespace: str, name: str) -> Object | None:
        with self.lock:
            found = self._objects.get((resource, namespace, name))
            if found is not None:
                return copied(found)
            return None

    def all(self, resource: str, namespace: str = "") -> list[Object]:
        with self.lock:
            return [
                copied(document)
                for (kind, space, _), document in self._objects.items()
                if kind == resource and (not namespace or space == namespace)
            ]

    def replace(self, resource: str, document: Object, *, status: bool = False) -> Object:
        """409 if the document was read before its newest change."""
        with self.lock:
            metadata = document["metadata"]
            key = (resource, metadata.get("namespace", ""), metadata["name"])
            old = self.get(*key)
            given = metadata.get("resourceVersion")
            if given and given != old["metadata"]["resourceVersion"]:
                raise ApiError(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on {resource} "{metadata["name"]}": the object has been modified; '
                    "please apply your changes to the latest version and try again",
                )
            new = copied(document)
            if status:
                new = {**old, "status": new.get("status")}
            if new.get("spec") != old.get("spec"):
                new["metadata"]["generation"] = old["metadata"]["generation"] + 1
            if new == old:
                return old
            return self._put(key, new, "MODIFIED")

    def edit(
        self, resource: str, namespace: str, name: str, change: Callable[[Object], object]
    ) -> Object | None:
        """A controller's change; None if the object is gone."""
        with self.lock:
            document = self.find(resource, namespace, name)
            if document is None:
                return None
            change(document)
            return self.replace(resource, document)

    def remove(self, resource: str, namespace: str, name: str) -> None:
        with self.lock:
            document = self._objects.pop((resource, namespace, name), None)
            if document is not None:
                self._version += 1
                document["metadata"]["resourceVersion"] = str(self._version)
                self._record("DELETED", resource, document)

    def _put(self, key: Key, document: Object, what: str) -> Object:
        self._version += 1
        document["metadata"]["resourceVersion"] = str(self._version)
        self._objects[key] = document
        self._record(what, key[0], document)
        return copied(document)

    def _record(self, what: str, resource: str, document: Object) -> None:
        self._log.append((self._version, what, resource, copied(document)))
        while len(self._log) > self._history():
            self.dropped = self._log.popleft()[0]
        self.changed.notify_all()

    def changes_after(self, version: int, resource: str) -> Iterator[tuple[int, str, Object]]:
        with self.lock:
            if version < self.dropped:
                raise ApiError(
                    410, "Expired", f"too old resource version: {version} ({self.dropped + 1})"
                )
            found = [
                change for change in self._log if change[0] > version and change[2] == resource
            ]
        for number, what, _, document in found:
            yield number, what, document


def copied(document: Any) -> Any:
    """A copy of what JSON can hold, in a seventh of the time of `copy.deepcopy`: the controllers do
    it all the time.
    """
    return marshal.loads(marshal.dumps(document))


def timestamp(seconds: float | None = None) -> str:
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
