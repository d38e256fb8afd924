"""A job, its nodes and attempts, and how DescribeJobs and ListJobs tell of them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from tests.support.batch.instances import Container, Instance

ENDED = ("SUCCEEDED", "FAILED")


@dataclass
class Node:
    """One node of the present attempt. Times in milliseconds since 1970, by the account's clock."""

    index: int
    properties: dict[str, Any]
    status: str = "RUNNABLE"
    instance: Instance | None = None
    container: Container | None = None
    due: float = 0.0  # by time.monotonic(): when its container starts
    started_at: int | None = None
    stopped_at: int | None = None
    exit_code: int | None = None
    reason: str | None = None
    status_reason: str | None = None

    def detail(self) -> dict[str, Any]:
        """ContainerDetail."""
        told = {**self.properties, **_known(exitCode=self.exit_code, reason=self.reason)}
        if self.instance is not None:
            told["containerInstanceArn"] = (
                f"arn:aws:ecs:us-east-1:000000000000:container-instance/{self.instance.id}"
            )
        return told

    def attempt(self) -> dict[str, Any]:
        """AttemptDetail."""
        container = _known(exitCode=self.exit_code, reason=self.reason)
        return {
            "container": container,
            **_known(
                startedAt=self.started_at,
                stoppedAt=self.stopped_at,
                statusReason=self.status_reason,
            ),
        }


@dataclass
class Job:
    """request: as SubmitJob got it. properties: of each node, definition and overrides together.

    stop_reason: of TerminateJob, or of CancelJob where that was in time: then the job is cancelled.
    """

    request: dict[str, Any]
    queue: str
    queue_arn: str
    definition: dict[str, Any]
    properties: list[dict[str, Any]]
    created_at: int
    multi_node: bool
    timeout_seconds: float | None
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    status: str = "SUBMITTED"
    status_reason: str | None = None
    runnable_since: float | None = None
    timed_out_at: float | None = None
    killed_at: float | None = None
    stop_reason: str | None = None
    cancelled: bool = False
    nodes: list[Node] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.new_attempt()

    @property
    def main(self) -> Node:
        return self.nodes[0]

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def waits(self) -> bool:
        """Before STARTING."""
        return self.status in ("SUBMITTED", "PENDING", "RUNNABLE")

    def new_attempt(self) -> None:
        self.nodes = [
            Node(index, dict(properties)) for index, properties in enumerate(self.properties)
        ]

    def summary(self, node: int | None = None) -> dict[str, Any]:
        """JobSummary, of the job or of one of its nodes."""
        if node is None:
            of = self.main
        else:
            of = self.nodes[node]
        return {
            "jobId": self.id if node is None else f"{self.id}#{node}",
            "jobArn": self._arn(),
            "jobName": self.request["jobName"],
            "createdAt": self.created_at,
            "status": self.status if node is None else of.status,
            "jobDefinition": self.definition["jobDefinitionArn"],
            "container": _known(exitCode=of.exit_code, reason=of.reason),
            **_known(
                statusReason=self.status_reason if node is None else of.status_reason,
                startedAt=of.started_at,
                stoppedAt=of.stopped_at,
            ),
        }

    def detail(self, node: int | None = None) -> dict[str, Any]:
        """JobDetail, of the job or of one of its nodes."""
        told = self.summary(node)
        del told["container"]
        told |= {
            "jobQueue": self.queue_arn,
            "attempts": self.attempts if node is None else [self.nodes[node].attempt()],
            "dependsOn": [],
            "parameters": self.request.get("parameters", {}),
            "tags": self.request.get("tags", {}),
            "propagateTags": bool(self.definition.get("propagateTags")),
            "platformCapabilities": self.definition.get("platformCapabilities", ["EC2"]),
            "isCancelled": self.cancelled,
            "isTerminated": self.stop_reason is not None and not self.cancelled,
        }
        if self.timeout_seconds is not None:
            told["timeout"] = {"attemptDurationSeconds": int(self.timeout_seconds)}
        if "retryStrategy" in self.request:
            told["retryStrategy"] = self.request["retryStrategy"]
        if self.multi_node and node is None:
            ranges = [
                {"targetNodes": f"{node.index}:{node.index}", "container": node.detail()}
                for node in self.nodes
            ]
            told["nodeProperties"] = {
                "numNodes": len(self.nodes),
                "mainNode": 0,
                "nodeRangeProperties": ranges,
            }
        else:
            told["container"] = self.nodes[node or 0].detail()
        if self.multi_node and node is not None:
            told["nodeDetails"] = {"nodeIndex": node, "isMainNode": node == 0}
        return told

    def _arn(self) -> str:
        return self.queue_arn.rpartition(":")[0] + f":job/{self.id}"


def _known(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
