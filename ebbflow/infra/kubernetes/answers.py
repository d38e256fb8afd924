"""Shapes of Kubernetes' answers, with the fields that are read.

`ebbflow.infra.kubernetes.cluster` returns answers of these types unchecked. The API server leaves
out empty fields.
"""

from typing import Required, TypedDict

from ebbflow.core.json_values import Json


class OwnerReference(TypedDict, total=False):
    """Owner of an object."""

    name: str


class Metadata(TypedDict, total=False):
    """Metadata of an object. Times are ISO 8601 text."""

    name: Required[str]
    labels: dict[str, str] | None
    creationTimestamp: str | None
    deletionTimestamp: str
    ownerReferences: list[OwnerReference] | None


class ListMetadata(TypedDict, total=False):
    """Metadata of a list."""

    resourceVersion: str


class StatusCondition(TypedDict, total=False):
    """Condition in an object's status."""

    type: Required[str]
    status: Required[str]
    reason: str | None
    message: str | None


class ContainerPhase(TypedDict, total=False):
    """State of a container: why it waits, or when it started and ended."""

    reason: str | None
    message: str | None
    startedAt: str | None
    finishedAt: str | None
    exitCode: int | None


class ContainerState(TypedDict, total=False):
    """State of a container by phase; only the present phase is there."""

    terminated: ContainerPhase | None
    running: ContainerPhase | None
    waiting: ContainerPhase | None


class ContainerStatus(TypedDict, total=False):
    """Status of a container."""

    state: ContainerState | None


class PodStatus(TypedDict, total=False):
    """Status of a pod."""

    phase: str | None
    reason: str | None
    conditions: list[StatusCondition] | None
    containerStatuses: list[ContainerStatus] | None


class PodSpec(TypedDict, total=False):
    """Specification of a pod."""

    nodeName: str | None


class Pod(TypedDict, total=False):
    """Pod as the Kubernetes API describes it, with the fields that are read."""

    metadata: Required[Metadata]
    spec: PodSpec | None
    status: PodStatus | None


class PodList(TypedDict, total=False):
    """List of pods."""

    metadata: ListMetadata | None
    items: Required[list[Pod]]


class PodChange(TypedDict):
    """Change of a pod."""

    type: str
    object: Pod


class PodChanges(TypedDict):
    """Changes of pods since a list."""

    items: list[PodChange]


class EventObject(TypedDict, total=False):
    """Object that an event is about."""

    name: str | None


class ClusterEvent(TypedDict, total=False):
    """Event of the cluster."""

    involvedObject: Required[EventObject]
    message: str | None


class EventList(TypedDict):
    """List of events."""

    items: list[ClusterEvent]


class ReviewStatus(TypedDict, total=False):
    """Answer to a review of access."""

    allowed: bool


class AccessReview(TypedDict, total=False):
    """Review of access."""

    status: ReviewStatus


class ReplicatedJob(TypedDict, total=False):
    """Part of a JobSet."""

    replicas: int


class OwnerSpec(TypedDict, total=False):
    """Specification of a Job or JobSet."""

    suspend: bool | None
    replicatedJobs: list[ReplicatedJob] | None


class OwnerStatus(TypedDict, total=False):
    """Status of a Job or JobSet."""

    conditions: list[StatusCondition] | None


class Owner(TypedDict, total=False):
    """Job or JobSet."""

    metadata: Required[Metadata]
    spec: OwnerSpec | None
    status: OwnerStatus | None


class PendingWorkload(TypedDict, total=False):
    """Workload that waits in a Kueue queue."""

    metadata: Required[Metadata]
    positionInLocalQueue: int | None


class PendingWorkloads(TypedDict, total=False):
    """Workloads that wait in a Kueue queue, or the queue itself."""

    items: list[PendingWorkload] | None


class Taint(TypedDict):
    """Taint of a node."""

    key: str


class NodeSpec(TypedDict, total=False):
    """Specification of a node."""

    taints: list[Taint] | None


class NodeStatus(TypedDict, total=False):
    """Status of a node."""

    conditions: list[StatusCondition] | None
    allocatable: dict[str, str]


class Node(TypedDict, total=False):
    """Node of the cluster."""

    metadata: Required[Metadata]
    spec: NodeSpec | None
    status: Required[NodeStatus]


class NodeList(TypedDict):
    """Answer to a request for the cluster's nodes."""

    items: list[Node]


class JobManifest(TypedDict, total=False):
    """Job or JobSet to create."""

    kind: Required[str]
    apiVersion: Required[str]
    metadata: dict[str, Json]
    spec: dict[str, Json]
