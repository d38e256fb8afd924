"""Parts of Batch's SubmitJob request and answers that the AWS SDK hands to its event handlers."""

from typing import Required, TypedDict


class ContainerOverrides(TypedDict, total=False):
    """Settings of a job's container."""

    command: list[str]


class NodeOverride(TypedDict, total=False):
    """Settings of some nodes of a multi-node job."""

    containerOverrides: Required[ContainerOverrides]


class NodeOverrides(TypedDict, total=False):
    """Settings of a multi-node job's nodes."""

    nodePropertyOverrides: list[NodeOverride]


class SubmitRequest(TypedDict, total=False):
    """Parameters of SubmitJob."""

    jobName: str
    jobQueue: str
    parameters: dict[str, str] | None
    containerOverrides: ContainerOverrides | None
    nodeOverrides: NodeOverrides | None


class ServiceError(TypedDict, total=False):
    """Error that Batch returns."""

    Code: str
    Message: str


class ResponseMetadata(TypedDict, total=False):
    """Metadata of an answer."""

    HTTPStatusCode: int


class SubmitAnswer(TypedDict, total=False):
    """Answer to SubmitJob."""

    jobId: str
    jobName: str
    Error: ServiceError | None
    ResponseMetadata: ResponseMetadata | None
