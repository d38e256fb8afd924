"""What trackers keep of a job, read back by each library's own reader."""

from __future__ import annotations

import gzip
import json
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Series = list[tuple[int, float]]


class WandbRun:
    """The only run of a W&B server: the rows of its history and its summary."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}

    def series(self, name: str) -> Series:
        return [(row["_step"], row[name]) for row in self.history if name in row]

    def resume_status(self) -> dict[str, Any] | None:
        """Answer for a run that is resumed; None before it is created."""
        if not self.ids:
            return None
        tail = json.dumps([json.dumps(row) for row in self.history[-1:]])
        about = json.dumps(self.summary)
        bucket = {
            "id": "b",
            "name": min(self.ids),
            "displayName": "run",
            "tags": [],
            "notes": "",
            "config": "{}",
        }
        bucket |= {
            "summaryMetrics": about,
            "historyTail": tail,
            "historyLineCount": len(self.history),
        }
        bucket |= {"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "wandbConfig": "{}"}
        return {"id": "p", "name": "project", "entity": {"id": "e", "name": "me"}, "bucket": bucket}


class WandbServer(ThreadingHTTPServer):
    """The requests of W&B's API that `wandb sync` makes.

    The library reads its files; the server keeps what it gets.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _WandbRequest)
        self.run = WandbRun()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: the client closes its connections at the end."""


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def read_jsonl(folder: Path, name: str) -> Series:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[name]) for line in lines if name in line]


def read_tensorboard(folder: Path, name: str) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return [(Scalar.step, Scalar.value) for Scalar in reader.Scalars(name)]


def read_mlflow(database: Path, name: str) -> Series:
    """Return a metric of the only run of a database."""
    client, run = mlflow_run(database)
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]


def mlflow_run(database: Path) -> tuple[Any, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    experiment = client.get_experiment_by_name("ebbflow")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def sync_wandb(folder: Path) -> WandbRun:
    """Send the offline runs below a folder to a server by `wandb sync`, and return the run that
    they make.
    """
    server = WandbServer()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("WANDB_")
    }
    environment |= {
        "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
        "WANDB_API_KEY": "a" * 40,
    }
    command = [str(Path(sys.executable).with_name("wandb")), "sync", str(folder)]
    with serving(server):
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(server.run.ids) == 1, server.run.ids
    return server.run


class _WandbRequest(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer: dict[str, Any] = {}
        if self.path == "/graphql":
            answer = {"data": self._answer(json.loads(body))}
        elif self.path.endswith("/file_stream"):
            self._keep(json.loads(body).get("files") or {})
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST  # noqa: N815

    def _answer(self, query: dict[str, Any]) -> dict[str, Any]:
        given = query.get("variables") or {}
        run = self.server.run
        match query.get("operationName"):
            case "RunResumeStatus":
                return {"model": run.resume_status()}
            case "UpsertBucket":
                inserted = not run.ids
                run.ids.add(given["name"])
                project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "me"}}
                bucket = {
                    "id": "b",
                    "name": given["name"],
                    "displayName": "run",
                    "config": "{}",
                    "project": project,
                }
                bucket["historyLineCount"] = len(run.history)
                return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}
            case "CreateRunFiles":
                files = [
                    {"name": name, "uploadUrl": f"http://{self.headers['Host']}/x"}
                    for name in given["files"]
                ]
                return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {
            "viewer": {
                "id": "u",
                "entity": "me",
                "username": "me",
                "flags": "{}",
                "teams": {"edges": []},
            },
            "serverInfo": {"features": []},
        }

    def _keep(self, files: dict[str, Any]) -> None:
        run = self.server.run
        rows = files.get("wandb-history.jsonl")
        if rows is not None:
            run.history[rows["offset"] :] = [json.loads(row) for row in rows["content"]]
        about = files.get("wandb-summary.json")
        if about is not None:
            run.summary = json.loads(about["content"][-1])

    def log_message(self, format: str, *arguments: object) -> None:
        pass
