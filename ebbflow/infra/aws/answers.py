"""Shapes of AWS's answers, and of the request SubmitJob, with the fields that are read.

A field that AWS always sends is required. `ebbflow.infra.aws.calls` returns answers of these types
unchecked; `required_field` is for fields that an emulator or proxy is known to leave out.
"""

from datetime import datetime
from typing import Required, TypedDict

from ebbflow.core.json_values import Json


class CallerIdentity(TypedDict):
    """Answer to sts:GetCallerIdentity, with the fields that are read."""

    Account: str


class QuotaDetail(TypedDict, total=False):
    """Quota in the answer of servicequotas:GetServiceQuota."""

    Value: float
    QuotaName: str


class QuotaAnswer(TypedDict, total=False):
    """Answer to servicequotas:GetServiceQuota, with the fields that are read."""

    Quota: QuotaDetail


class TrustedPrincipals(TypedDict, total=False):
    """Who may assume a role."""

    Service: str | list[str]


class TrustStatement(TypedDict, total=False):
    """Statement of a trust policy."""

    Effect: str
    Principal: TrustedPrincipals | str | None


class TrustPolicy(TypedDict, total=False):
    """Trust policy of a role."""

    Statement: list[TrustStatement] | TrustStatement


class RoleDetail(TypedDict, total=False):
    """Role of IAM. Its trust policy may be URL-encoded JSON."""

    Arn: Required[str]
    AssumeRolePolicyDocument: str | TrustPolicy


class RoleAnswer(TypedDict, total=False):
    """Answer to iam:GetRole, with the fields that are read."""

    Role: RoleDetail


class SimulatedAction(TypedDict, total=False):
    """Decision on one action."""

    EvalActionName: str
    EvalDecision: str


class SimulationAnswer(TypedDict, total=False):
    """Answer to iam:SimulatePrincipalPolicy, with the fields that are read."""

    EvaluationResults: list[SimulatedAction]


class BucketLocation(TypedDict, total=False):
    """Answer to s3:GetBucketLocation, with the fields that are read."""

    LocationConstraint: str | None


class BucketName(TypedDict):
    """Bucket in the answer of s3:ListBuckets."""

    Name: str


class BucketsAnswer(TypedDict):
    """Answer to s3:ListBuckets, with the fields that are read."""

    Buckets: list[BucketName]


class PublicAccessAnswer(TypedDict, total=False):
    """Answer to s3:GetPublicAccessBlock, with the fields that are read."""

    PublicAccessBlockConfiguration: dict[str, bool]


class AbortRule(TypedDict, total=False):
    """When S3 deletes the parts of an unfinished upload."""

    DaysAfterInitiation: int


class LifecycleRule(TypedDict, total=False):
    """Rule of a bucket's lifecycle."""

    Status: str
    AbortIncompleteMultipartUpload: AbortRule


class LifecycleAnswer(TypedDict, total=False):
    """Answer to s3:GetBucketLifecycleConfiguration, with the fields that are read."""

    Rules: list[LifecycleRule]


class ImageDetail(TypedDict, total=False):
    """Image in ECR."""

    imageTags: list[str]
    imagePushedAt: Required[datetime]


class ImagesAnswer(TypedDict, total=False):
    """Answer to ecr:DescribeImages, with the fields that are read."""

    imageDetails: list[ImageDetail]


class RepositoryDetail(TypedDict):
    """Repository in ECR."""

    repositoryName: str
    repositoryUri: str


class StackParameter(TypedDict):
    """Parameter of a CloudFormation stack."""

    ParameterKey: str
    ParameterValue: str


class StackOutput(TypedDict):
    """Output of a CloudFormation stack."""

    OutputKey: str
    OutputValue: str


class StackDetail(TypedDict, total=False):
    """CloudFormation stack."""

    StackName: Required[str]
    StackStatus: Required[str]
    StackStatusReason: str
    Parameters: list[StackParameter]
    Outputs: list[StackOutput]


class StacksAnswer(TypedDict):
    """Answer to cloudformation:DescribeStacks, with the fields that are read."""

    Stacks: list[StackDetail]


class ChangedProperty(TypedDict, total=False):
    """Property of a resource that changes."""

    Name: str


class ChangeDetail(TypedDict, total=False):
    """Detail of a resource's change."""

    Target: ChangedProperty


class ResourceChangeDetail(TypedDict, total=False):
    """Change of a resource."""

    Action: Required[str]
    LogicalResourceId: Required[str]
    ResourceType: Required[str]
    Replacement: str
    Details: list[ChangeDetail]


class StackChange(TypedDict, total=False):
    """Change in a change set."""

    ResourceChange: ResourceChangeDetail


class ChangeSetAnswer(TypedDict, total=False):
    """Answer to cloudformation:DescribeChangeSet, with the fields that are read."""

    Status: Required[str]
    StatusReason: str


class StackEvent(TypedDict, total=False):
    """Event of a stack."""

    EventId: Required[str]
    LogicalResourceId: str
    ResourceType: str
    ResourceStatus: str
    ResourceStatusReason: str | None


class ContainerDetail(TypedDict, total=False):
    """Container of a Batch job."""

    reason: str | None
    exitCode: int | None


class JobTry(TypedDict, total=False):
    """Attempt of a Batch job, as Batch describes it."""

    statusReason: str | None
    container: ContainerDetail | None


class NodeProperties(TypedDict, total=False):
    """Nodes of a multi-node Batch job."""

    mainNode: int
    numNodes: int


class JobDetail(TypedDict, total=False):
    """Batch job. Times are Unix milliseconds."""

    jobId: Required[str]
    jobName: str
    jobQueue: str
    status: str
    statusReason: str | None
    container: ContainerDetail | None
    attempts: list[JobTry] | None
    nodeProperties: NodeProperties | None
    parameters: dict[str, str] | None
    createdAt: int | None
    startedAt: int | None
    stoppedAt: int | None
    isTerminated: bool | None
    isCancelled: bool | None


class JobsAnswer(TypedDict, total=False):
    """Answer to batch:DescribeJobs, with the fields that are read."""

    jobs: list[JobDetail]


class ComputeResources(TypedDict, total=False):
    """Machines of a compute environment of Batch."""

    type: str
    instanceTypes: list[str] | None
    maxvCpus: int | None
    subnets: list[str] | None
    placementGroup: str | None


class EnvironmentDetail(TypedDict, total=False):
    """Compute environment of Batch."""

    computeEnvironmentName: Required[str]
    computeEnvironmentArn: str
    type: str
    state: str
    status: str
    statusReason: str | None
    computeResources: ComputeResources | None


class EnvironmentOrder(TypedDict, total=False):
    """Compute environment of a queue, with its place in the queue's order."""

    computeEnvironment: Required[str]
    order: int


class TimeLimitAction(TypedDict):
    """Time after which Batch cancels the first job of a queue."""

    reason: str
    maxTimeSeconds: int


class QueueDetail(TypedDict, total=False):
    """Job queue of Batch."""

    jobQueueName: Required[str]
    jobQueueArn: str
    state: str
    status: str
    statusReason: str | None
    computeEnvironmentOrder: list[EnvironmentOrder] | None
    jobStateTimeLimitActions: list[TimeLimitAction] | None


class ZoneDetail(TypedDict):
    """Availability zone."""

    ZoneName: str
    ZoneId: str


class ZonesAnswer(TypedDict, total=False):
    """Answer to ec2:DescribeAvailabilityZones, with the fields that are read."""

    AvailabilityZones: list[ZoneDetail]


class TypeOffering(TypedDict):
    """Instance type that a zone offers."""

    InstanceType: str
    Location: str


class ReservationDetail(TypedDict, total=False):
    """Capacity reservation."""

    State: str
    StartDate: datetime
    EndDate: datetime
    ReservationType: str
    TotalInstanceCount: Required[int]
    AvailableInstanceCount: Required[int]
    InstanceType: Required[str]
    AvailabilityZoneId: str


class ReservationsAnswer(TypedDict, total=False):
    """Answer to ec2:DescribeCapacityReservations, with the fields that are read."""

    CapacityReservations: list[ReservationDetail]


class BlockOffering(TypedDict, total=False):
    """Capacity Block for sale."""

    CapacityBlockOfferingId: Required[str]
    InstanceType: Required[str]
    InstanceCount: Required[int]
    AvailabilityZone: str
    StartDate: Required[datetime]
    EndDate: Required[datetime]
    UpfrontFee: Required[str]
    CapacityBlockDurationHours: Required[int]
    CurrencyCode: str


class PlacementScore(TypedDict):
    """Spot placement score of a zone."""

    Region: str
    AvailabilityZoneId: str
    Score: int


class MemorySize(TypedDict):
    """Size of a memory."""

    SizeInMiB: int


class GpuDetail(TypedDict, total=False):
    """GPUs of an instance type."""

    Manufacturer: str
    Count: Required[int]
    Name: Required[str]
    MemoryInfo: Required[MemorySize]


class GpusDetail(TypedDict, total=False):
    """All GPUs of an instance type."""

    Gpus: list[GpuDetail]


class NetworkCard(TypedDict, total=False):
    """Network card of an instance type."""

    BaselineBandwidthInGbps: float


class EfaDetail(TypedDict, total=False):
    """Elastic Fabric Adapters of an instance type."""

    MaximumEfaInterfaces: int


class NetworkDetail(TypedDict, total=False):
    """Network of an instance type."""

    NetworkCards: list[NetworkCard]
    NetworkPerformance: str
    EfaInfo: EfaDetail | None


class ProcessorDetail(TypedDict):
    """Processors of an instance type."""

    DefaultVCpus: int


class InstanceTypeDetail(TypedDict, total=False):
    """Instance type of EC2."""

    InstanceType: Required[str]
    GpuInfo: GpusDetail | None
    NetworkInfo: NetworkDetail | None
    VCpuInfo: Required[ProcessorDetail]
    MemoryInfo: Required[MemorySize]


class LogGroupDetail(TypedDict, total=False):
    """Log group of CloudWatch."""

    logGroupName: str


class LogGroupsAnswer(TypedDict, total=False):
    """Answer to logs:DescribeLogGroups, with the fields that are read."""

    logGroups: list[LogGroupDetail]


class MetricsAnswer(TypedDict, total=False):
    """Answer to cloudwatch:ListMetrics, with the fields that are read."""

    Metrics: list[dict[str, Json]]


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
