"""AWS Batch's API for jobs, and a Kubernetes API without pods, in a thread of the test's own
process.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.local_service import LocalServer


@dataclass
class JobService:
    """The jobs that it knows, and the requests that it got.

    Attributes:
        jobs: Descriptions of each job: one for each look, and the last one for all further looks.
        refused: Whether requests to terminate a job are refused, as for a job that has ended
            meanwhile.
        away: Whether every request is answered with an internal error.
        queues: Market of each job queue, by name.
        slow_seconds: How long each answer of Batch takes.
        owners: Kubernetes objects by the path of their URL. A deleted one is gone.
        requests: (region, operation, content) of each request to Batch, (method, path) of each one
            to Kubernetes.
    """

    endpoint: str = ""
    jobs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    refused: bool = False
    away: bool = False
    queues: dict[str, str] = field(default_factory=dict)
    slow_seconds: float = 0.0
    owners: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[tuple[str, ...]] = field(default_factory=list)

    def looks(self, region: str | None = None) -> int:
        """Number of requests to describe jobs, in one region or in all."""
        asked = [request for request in self.requests if request[1] == "describejobs"]
        return sum(region in (None, request[0]) for request in asked)

    def terminated(self) -> list[tuple[str, str]]:
        """The job and the reason of each request to terminate one."""
        contents = [
            json.loads(request[2]) for request in self.requests if request[1] == "terminatejob"
        ]
        return [(content["jobId"], content["reason"]) for content in contents]

    def answer_batch(self, region: str, operation: str, content: dict[str, Any]) -> tuple[int, Any]:
        self.requests.append((region, operation, json.dumps(content)))
        if self.away:
            return 500, {"message": "internal error"}
        threading.Event().wait(self.slow_seconds)
        if operation == "describejobqueues":
            return 200, {"jobQueues": [_describe_queue(name) for name in self.queues]}
        if operation == "describecomputeenvironments":
            found = [_describe_environment(name, market) for name, market in self.queues.items()]
            return 200, {"computeEnvironments": found}
        if operation == "terminatejob":
            if self.refused:
                return (400, {"message": "it has ended"})
            return (200, {})
        found = []
        for job_id in content["jobs"]:
            descriptions = self.jobs.get(job_id, [])
            if descriptions:
                if len(descriptions) > 1:
                    about = descriptions.pop(0)
                else:
                    about = descriptions[0]
                found.append(
                    {
                        "jobId": job_id,
                        "jobName": "n",
                        "jobQueue": "arn:aws:batch:r:1:job-queue/q",
                        **about,
                    }
                )
        return 200, {"jobs": found}

    def answer_kubernetes(self, method: str, path: str) -> tuple[int, Any]:
        self.requests.append((method, path))
        if self.away:
            return 500, {"message": "internal error"}
        if path.endswith(("/pods", "/events")):
            return 200, {"items": [], "metadata": {"resourceVersion": "1"}}
        if path not in self.owners:
            return 404, {"message": "not found"}
        return 200, self.owners.pop(path) if method == "DELETE" else self.owners[path]


@contextmanager
def serve_jobs() -> Iterator[JobService]:
    service = JobService()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            content = json.loads(self.rfile.read(length) or b"{}")
            region = re.search(
                r"Credential=[^/]+/\d+/([^/]+)/", self.headers.get("Authorization", "")
            )
            self._answer(
                *service.answer_batch(
                    region[1] if region else "", self.path.rpartition("/")[2], content
                )
            )

        def do_GET(self) -> None:
            self._answer(*service.answer_kubernetes("GET", self.path.partition("?")[0]))

        def do_DELETE(self) -> None:
            self._answer(*service.answer_kubernetes("DELETE", self.path.partition("?")[0]))

        def _answer(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = LocalServer(Handler, 0)
    service.endpoint = server.endpoint
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _describe_queue(name: str) -> dict[str, Any]:
    order = [{"order": 1, "computeEnvironment": name}]
    state = {"state": "ENABLED", "status": "VALID", "priority": 1, "computeEnvironmentOrder": order}
    return {
        "jobQueueName": name,
        "jobQueueArn": f"arn:aws:batch:us-east-1:1:job-queue/{name}",
        **state,
    }


def _describe_environment(name: str, market: str) -> dict[str, Any]:
    resources = {
        "type": {"spot": "SPOT", "on_demand": "EC2"}[market],
        "instanceTypes": ["g5"],
        "maxvCpus": 256,
    }
    about = {
        "type": "MANAGED",
        "state": "ENABLED",
        "status": "VALID",
        "computeResources": resources,
    }
    return {"computeEnvironmentName": name, "computeEnvironmentArn": name, **about}
