"""Typed dictionaries for Kubernetes' answers, limited to the fields that Ebbflow reads.

`ebbflow.infra.kubernetes.cluster` returns answers of these types unchecked. The API server leaves
out empty fields.
"""

from typing import Required, TypedDict

from ebbflow.core.json_values import Json


class OwnerReference(TypedDict, total=False):
    """Reference from a Kubernetes object to its owner."""

    name: str


class Metadata(TypedDict, total=False):
    """Metadata of a Kubernetes object. Times are ISO 8601 text."""

    name: Required[str]
    labels: dict[str, str] | None
    creationTimestamp: str | None
    deletionTimestamp: str
    ownerReferences: list[OwnerReference] | None


class ListMetadata(TypedDict, total=False):
    """Metadata of a list of Kubernetes objects."""

    resourceVersion: str


class StatusCondition(TypedDict, total=False):
    """Condition in a Kubernetes object's status, such as a pod's PodScheduled."""

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
    """State of a container. Only the field of the current phase is set."""

    terminated: ContainerPhase | None
    running: ContainerPhase | None
    waiting: ContainerPhase | None


class ContainerStatus(TypedDict, total=False):
    """Status of a container in a pod."""

    state: ContainerState | None


class PodStatus(TypedDict, total=False):
    """Status of a pod: its phase, its conditions and its containers."""

    phase: str | None
    reason: str | None
    conditions: list[StatusCondition] | None
    containerStatuses: list[ContainerStatus] | None


class PodSpec(TypedDict, total=False):
    """Specification of a pod, with the node that runs it."""

    nodeName: str | None


class Pod(TypedDict, total=False):
    """Pod as the Kubernetes API describes it, limited to the fields that Ebbflow reads."""

    metadata: Required[Metadata]
    spec: PodSpec | None
    status: PodStatus | None


class PodList(TypedDict, total=False):
    """List of pods, with its version in the metadata."""

    metadata: ListMetadata | None
    items: Required[list[Pod]]


class PodChange(TypedDict):
    """Event of a watch on pods: the type of the change, and the pod's state."""

    type: str
    object: Pod


class PodChanges(TypedDict):
    """Events of a watch on pods, in order."""

    items: list[PodChange]


class EventObject(TypedDict, total=False):
    """Object that a Kubernetes event is about."""

    name: str | None


class ClusterEvent(TypedDict, total=False):
    """Kubernetes event, with its object and message."""

    involvedObject: Required[EventObject]
    message: str | None


class EventList(TypedDict):
    """List of Kubernetes events."""

    items: list[ClusterEvent]


class ReviewStatus(TypedDict, total=False):
    """Result of an access review: whether the permission is granted."""

    allowed: bool


class AccessReview(TypedDict, total=False):
    """Answer to the question whether this account has a permission (SelfSubjectAccessReview)."""

    status: ReviewStatus


class ReplicatedJob(TypedDict, total=False):
    """Group of identical Jobs in a JobSet."""

    replicas: int


class OwnerSpec(TypedDict, total=False):
    """Specification of a Job or JobSet."""

    suspend: bool | None
    replicatedJobs: list[ReplicatedJob] | None


class OwnerStatus(TypedDict, total=False):
    """Status of a Job or JobSet."""

    conditions: list[StatusCondition] | None


class Owner(TypedDict, total=False):
    """Job or JobSet that owns the pods of an attempt."""

    metadata: Required[Metadata]
    spec: OwnerSpec | None
    status: OwnerStatus | None


class PendingWorkload(TypedDict, total=False):
    """Workload that waits in a Kueue queue, with its position."""

    metadata: Required[Metadata]
    positionInLocalQueue: int | None


class PendingWorkloads(TypedDict, total=False):
    """Answer to a request for a Kueue queue, or for the workloads that wait in it."""

    items: list[PendingWorkload] | None


class Taint(TypedDict):
    """Taint of a Kubernetes node."""

    key: str


class NodeSpec(TypedDict, total=False):
    """Specification of a Kubernetes node."""

    taints: list[Taint] | None


class NodeStatus(TypedDict, total=False):
    """Status of a Kubernetes node, with its allocatable devices."""

    conditions: list[StatusCondition] | None
    allocatable: dict[str, str]


class Node(TypedDict, total=False):
    """Node of a Kubernetes cluster."""

    metadata: Required[Metadata]
    spec: NodeSpec | None
    status: Required[NodeStatus]


class NodeList(TypedDict):
    """Answer to a request for the cluster's nodes."""

    items: list[Node]


class JobManifest(TypedDict, total=False):
    """Manifest of a Job or JobSet to create."""

    kind: Required[str]
    apiVersion: Required[str]
    metadata: dict[str, Json]
    spec: dict[str, Json]
