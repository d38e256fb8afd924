"""A stand-in for Metaflow's metadata service: in memory, over HTTP, with the routes that Metaflow's
provider uses.

As the service does, it numbers runs and tasks itself, each with one series over all flows that
begins at 1, and tells them as numbers; refuses with 409 what is there already; and keeps the
artifacts of every attempt, of which it tells the latest. What it does not know is answered with 404
and noted in `unknown`, since the provider takes some 404 for "none".
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

# Of the service whose routes these are: it has heartbeats, tags, attempts and filtered_tasks
VERSION = "2.5.0"
HEARTBEAT_SECONDS = 10
_OF_PARENTS = ("flow_id", "run_number", "step_name")
# How a kind's own name is called in its record
_NAMES = {"run": "run_number", "step": "step_name", "task": "task_id"}

# Metaflow reads its settings when it is imported, so that its client needs a process of its own.
_CLIENT = """
import json, sys
from metaflow import Run, namespace
from metaflow.cards import get_cards

namespace(None)
run = Run(sys.argv[1])
report = run["report"].task
steps = {step.id: step for step in run}
print(json.dumps({
    "successful": run.successful,
    "outcome": report.data.run_report["outcome"],
    "weights": report.data.run_report["weights_sha256"],
    "train": [task.successful for name in ("train", "train_node") if name in steps for task in steps[name]],
    "cards": len(get_cards(report)),
}))
"""

Answer = tuple[int, Any]
Path = tuple[str, ...]


class MetadataService:
    """objects: by their path, ("TrainFlow", "1", "start", "1"). beats: heartbeats by path. asked:
    requests by route.
    """

    def __init__(self) -> None:
        self.objects: dict[Path, dict[str, Any]] = {}
        self.metadata: dict[Path, list[dict[str, Any]]] = {}
        self.artifacts: dict[Path, dict[tuple[int, str], dict[str, Any]]] = {}
        self.beats: Counter[Path] = Counter()
        self.asked: Counter[str] = Counter()
        self.unknown: list[str] = []
        self._lock = threading.Lock()
        self._numbers = {"run": itertools.count(1), "task": itertools.count(1)}
        self._ids = itertools.count(1)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def environment(self) -> dict[str, str]:
        """For whoever starts a flow."""
        return {"METAFLOW_DEFAULT_METADATA": "service", "METAFLOW_SERVICE_URL": self.url}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, target: str, body: Any) -> Answer:
        """Status and document."""
        parts = urlsplit(target)
        path = [unquote(word) for word in parts.path.strip("/").split("/")]
        with self._lock:
            for verb, pattern, do in self._routes():
                if verb == method:
                    found = re.fullmatch(pattern, "/".join(path))
                else:
                    found = None
                if found is not None:
                    self.asked[f"{method} {do.__name__.strip('_')}"] += 1
                    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
                    return do(
                        _path(found["of"]), found.groupdict(), query if method == "GET" else body
                    )
            self.unknown.append(f"{method} {target}")
        return 404, {"message": f"no such route: {method} {parts.path}"}

    def _routes(self) -> list[tuple[str, str, Any]]:
        flow = r"flows/[^/]+"
        run = rf"{flow}/runs/[^/]+"
        step = rf"{run}/steps/[^/]+"
        task = rf"{step}/tasks/[^/]+"
        some = rf"(?P<of>{flow}|{run}|{step}|{task})"
        return [
            ("POST", rf"(?P<of>{flow})", self._create_flow),
            ("POST", rf"(?P<of>{flow})/(?P<kind>run)", self._create),
            ("POST", rf"(?P<of>{step})/(?P<kind>step|task)", self._create),
            ("POST", rf"(?P<of>{run}|{task})/heartbeat", self._heartbeat),
            ("POST", rf"(?P<of>{task})/metadata", self._add_metadata),
            ("POST", rf"(?P<of>{task})/artifact", self._add_artifacts),
            ("PATCH", rf"(?P<of>{run})/tag/mutate", self._change_tags),
            ("GET", some, self._get),
            ("GET", r"(?P<of>)flows", self._children),
            ("GET", rf"(?P<of>{flow}|{run}|{step})/(?:runs|steps|tasks)", self._children),
            ("GET", rf"(?P<of>{task})/metadata", self._get_metadata),
            ("GET", rf"(?P<of>{task})/artifacts", self._get_artifacts),
            ("GET", rf"(?P<of>{task})/attempt/(?P<attempt>\d+)/artifacts", self._get_artifacts),
            (
                "GET",
                rf"(?P<of>{task})/artifacts/(?P<name>[^/]+)(?:/attempt/(?P<attempt>\d+))?",
                self._get_artifact,
            ),
            ("GET", rf"(?P<of>{step})/filtered_tasks", self._filtered_tasks),
        ]

    def _create_flow(self, path: Path, _: dict, body: Any) -> Answer:
        return self._put(path, {"flow_id": path[0], **body})

    def _create(self, path: Path, words: dict, body: Any) -> Answer:
        """The path of a new step names it; that of a new run or task, whose number may be the
        service's, its parent.
        """
        kind = words["kind"]
        if kind == "step":
            parent = path[:-1]
        else:
            parent = path
        if parent not in self.objects:
            return 404, {"message": f"there is no {'/'.join(parent)}"}
        key = _NAMES[kind]
        if kind == "step":
            name = path[-1]
        else:
            name = body.get(key) or next(self._numbers[kind])
        above = {
            known: self.objects[parent][known]
            for known in _OF_PARENTS
            if known in self.objects[parent]
        }
        return self._put((*parent, str(name)), {**body, **above, key: name})

    def _put(self, path: Path, record: dict[str, Any]) -> Answer:
        if path in self.objects:
            return 409, {"message": f"{'/'.join(path)} is there already"}
        self.objects[path] = {"tags": [], "system_tags": [], "ts_epoch": _now_ms(), **record}
        return 200, self.objects[path]

    def _get(self, path: Path, _: dict, __: Any) -> Answer:
        found = self.objects.get(path)
        if found is not None:
            return (200, found)
        return (404, {"message": f"there is no {'/'.join(path)}"})

    def _children(self, path: Path, _: dict, __: Any) -> Answer:
        return 200, [self.objects[object_] for object_ in self.objects if object_[:-1] == path]

    def _heartbeat(self, path: Path, _: dict, __: Any) -> Answer:
        """A JSON text within JSON, as the service answers."""
        if path not in self.objects:
            return 404, {"message": f"there is no {'/'.join(path)}"}
        self.beats[path] += 1
        self.objects[path]["last_heartbeat_ts"] = _now_ms() // 1000
        return 200, json.dumps({"wait_time_in_seconds": HEARTBEAT_SECONDS})

    def _add_metadata(self, path: Path, _: dict, body: Any) -> Answer:
        for entry in body:
            about = {"id": next(self._ids), "flow_id": path[0], "ts_epoch": _now_ms()}
            self.metadata.setdefault(path, []).append({**entry, **about})
        return 200, {"metadata_created": len(body)}

    def _add_artifacts(self, path: Path, _: dict, body: Any) -> Answer:
        kept = self.artifacts.setdefault(path, {})
        for entry in body:
            key = (int(entry["attempt_id"]), entry["name"])
            kept.setdefault(key, {"ts_epoch": _now_ms(), **entry, "flow_id": path[0]})
        return 200, {"artifacts_created": len(body)}

    def _change_tags(self, path: Path, _: dict, body: Any) -> Answer:
        if path not in self.objects:
            return 404, {"message": f"there is no {'/'.join(path)}"}
        run = self.objects[path]
        run["tags"] = sorted(
            set(run["tags"]) - set(body["tags_to_remove"]) | set(body["tags_to_add"])
        )
        return 200, {"tags": run["tags"]}

    def _get_metadata(self, path: Path, _: dict, __: Any) -> Answer:
        return 200, self.metadata.get(path, [])

    def _get_artifacts(self, path: Path, words: dict, _: Any) -> Answer:
        """Of the attempt that is asked for, else of the latest that has any."""
        kept = self.artifacts.get(path, {})
        attempt = words.get("attempt")
        if attempt is None:
            number = max((kept_attempt for kept_attempt, _ in kept), default=0)
        else:
            number = int(attempt)
        return 200, [entry for (kept_attempt, _), entry in kept.items() if kept_attempt == number]

    def _get_artifact(self, path: Path, words: dict, _: Any) -> Answer:
        named = [
            entry
            for entry in self._get_artifacts(path, words, None)[1]
            if entry["name"] == words["name"]
        ]
        if named:
            return (200, named[0])
        return (404, {"message": f"{'/'.join(path)} has no {words['name']}"})

    def _filtered_tasks(self, path: Path, _: dict, query: Any) -> Answer:
        """Paths of the tasks of a step one of whose metadata matches. Without a pattern: all."""
        pattern = query.get("pattern", "")
        field = query.get("metadata_field_name")
        tasks = [object_ for object_ in self.objects if object_[:-1] == path]
        return 200, [
            "/".join(task)
            for task in tasks
            if not pattern
            or any(
                entry["field_name"] == field and re.search(pattern, str(entry["value"]))
                for entry in self.metadata.get(task, [])
            )
        ]


@contextlib.contextmanager
def metadata_service() -> Iterator[MetadataService]:
    """Runs until the end of the block."""
    service = MetadataService()
    try:
        yield service
    finally:
        service.close()


def seen_by_client(run: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """What Metaflow's own client finds of a run, such as "TrainFlow/1", with these settings."""
    done = subprocess.run(
        [sys.executable, "-c", _CLIENT, run],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _path(text: str) -> Path:
    """flows/F/runs/1 → ("F", "1")."""
    return tuple(text.split("/")[1::2])


def _now_ms() -> int:
    return int(time.time() * 1000)


def _handler(service: MetadataService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if urlsplit(self.path).path.strip("/") == "ping":
                self._send(200, b"pong")
            else:
                self._serve()

        def do_POST(self) -> None:
            self._serve()

        def do_PATCH(self) -> None:
            self._serve()

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                status, document = service.answer(
                    self.command, self.path, json.loads(body or b"{}")
                )
            except (ValueError, KeyError, TypeError) as error:
                status = 400
                document = {"message": repr(error)}
            self._send(status, json.dumps(document).encode())

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("METADATA_SERVICE_VERSION", VERSION)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    return Handler
