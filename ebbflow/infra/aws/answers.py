"""Typed dictionaries for AWS's answers and for the request SubmitJob, limited to the fields that
Ebbflow uses.

A field that AWS always sends is required. `ebbflow.infra.aws.calls` returns answers of these types
unchecked; `required_field` is for fields that an emulator or proxy is known to leave out.
"""

from datetime import datetime
from typing import Required, TypedDict

from ebbflow.core.json_values import Json


class CallerIdentity(TypedDict):
    """Answer to sts:GetCallerIdentity, limited to the fields that Ebbflow reads."""

    Account: str


class QuotaDetail(TypedDict, total=False):
    """Quota in the answer to servicequotas:GetServiceQuota."""

    Value: float
    QuotaName: str


class QuotaAnswer(TypedDict, total=False):
    """Answer to servicequotas:GetServiceQuota, limited to the fields that Ebbflow reads."""

    Quota: QuotaDetail


class TrustedPrincipals(TypedDict, total=False):
    """AWS services that a statement of a trust policy names."""

    Service: str | list[str]


class TrustStatement(TypedDict, total=False):
    """Statement of a trust policy: whether the named services may assume the role."""

    Effect: str
    Principal: TrustedPrincipals | str | None


class TrustPolicy(TypedDict, total=False):
    """Trust policy of an IAM role."""

    Statement: list[TrustStatement] | TrustStatement


class RoleDetail(TypedDict, total=False):
    """IAM role. Its trust policy may be URL-encoded JSON."""

    Arn: Required[str]
    AssumeRolePolicyDocument: str | TrustPolicy


class RoleAnswer(TypedDict, total=False):
    """Answer to iam:GetRole, limited to the fields that Ebbflow reads."""

    Role: RoleDetail


class SimulatedAction(TypedDict, total=False):
    """Decision of IAM's policy simulator on one action."""

    EvalActionName: str
    EvalDecision: str


class SimulationAnswer(TypedDict, total=False):
    """Answer to iam:SimulatePrincipalPolicy, limited to the fields that Ebbflow reads."""

    EvaluationResults: list[SimulatedAction]


class BucketLocation(TypedDict, total=False):
    """Answer to s3:GetBucketLocation, limited to the fields that Ebbflow reads."""

    LocationConstraint: str | None


class BucketName(TypedDict):
    """Bucket in the answer to s3:ListBuckets."""

    Name: str


class BucketsAnswer(TypedDict):
    """Answer to s3:ListBuckets, limited to the fields that Ebbflow reads."""

    Buckets: list[BucketName]


class PublicAccessAnswer(TypedDict, total=False):
    """Answer to s3:GetPublicAccessBlock, limited to the fields that Ebbflow reads."""

    PublicAccessBlockConfiguration: dict[str, bool]


class AbortRule(TypedDict, total=False):
    """Number of days after which S3 deletes the parts of an unfinished upload."""

    DaysAfterInitiation: int


class LifecycleRule(TypedDict, total=False):
    """Lifecycle rule of an S3 bucket."""

    Status: str
    AbortIncompleteMultipartUpload: AbortRule


class LifecycleAnswer(TypedDict, total=False):
    """Answer to s3:GetBucketLifecycleConfiguration, limited to the fields that Ebbflow reads."""

    Rules: list[LifecycleRule]


class ImageDetail(TypedDict, total=False):
    """Container image in an ECR repository."""

    imageTags: list[str]
    imagePushedAt: Required[datetime]


class ImagesAnswer(TypedDict, total=False):
    """Answer to ecr:DescribeImages, limited to the fields that Ebbflow reads."""

    imageDetails: list[ImageDetail]


class RepositoryDetail(TypedDict):
    """ECR repository, with its name and URI."""

    repositoryName: str
    repositoryUri: str


class StackParameter(TypedDict):
    """Parameter of a CloudFormation stack, with its value."""

    ParameterKey: str
    ParameterValue: str


class StackOutput(TypedDict):
    """Output of a CloudFormation stack, with its value."""

    OutputKey: str
    OutputValue: str


class StackDetail(TypedDict, total=False):
    """CloudFormation stack, with its status, parameters and outputs."""

    StackName: Required[str]
    StackStatus: Required[str]
    StackStatusReason: str
    Parameters: list[StackParameter]
    Outputs: list[StackOutput]


class StacksAnswer(TypedDict):
    """Answer to cloudformation:DescribeStacks, limited to the fields that Ebbflow reads."""

    Stacks: list[StackDetail]


class ChangedProperty(TypedDict, total=False):
    """Property of a stack resource that an update changes."""

    Name: str


class ChangeDetail(TypedDict, total=False):
    """Part of a stack resource's change that concerns one property."""

    Target: ChangedProperty


class ResourceChangeDetail(TypedDict, total=False):
    """Change that an update makes to one resource of a stack."""

    Action: Required[str]
    LogicalResourceId: Required[str]
    ResourceType: Required[str]
    Replacement: str
    Details: list[ChangeDetail]


class StackChange(TypedDict, total=False):
    """Entry of a CloudFormation change set."""

    ResourceChange: ResourceChangeDetail


class ChangeSetAnswer(TypedDict, total=False):
    """Answer to cloudformation:DescribeChangeSet, limited to the fields that Ebbflow reads."""

    Status: Required[str]
    StatusReason: str


class StackEvent(TypedDict, total=False):
    """Event of a CloudFormation stack, such as a resource's new status."""

    EventId: Required[str]
    LogicalResourceId: str
    ResourceType: str
    ResourceStatus: str
    ResourceStatusReason: str | None


class ContainerDetail(TypedDict, total=False):
    """Container of a Batch job, with its exit code."""

    reason: str | None
    exitCode: int | None


class JobTry(TypedDict, total=False):
    """One of a Batch job's attempts, as listed in the job's description."""

    statusReason: str | None
    container: ContainerDetail | None


class NodeProperties(TypedDict, total=False):
    """Number of nodes of a multi-node Batch job, and the index of its main node."""

    mainNode: int
    numNodes: int


class JobDetail(TypedDict, total=False):
    """Batch job in the answer to DescribeJobs or ListJobs. Times are Unix milliseconds."""

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
    """Answer to batch:DescribeJobs, limited to the fields that Ebbflow reads."""

    jobs: list[JobDetail]


class ComputeResources(TypedDict, total=False):
    """Machines of a Batch compute environment: their types, limits and network."""

    type: str
    instanceTypes: list[str] | None
    maxvCpus: int | None
    subnets: list[str] | None
    placementGroup: str | None


class EnvironmentDetail(TypedDict, total=False):
    """Compute environment of AWS Batch, with its state and machines."""

    computeEnvironmentName: Required[str]
    computeEnvironmentArn: str
    type: str
    state: str
    status: str
    statusReason: str | None
    computeResources: ComputeResources | None


class EnvironmentOrder(TypedDict, total=False):
    """Compute environment of a Batch queue, with its position in the queue's order of use."""

    computeEnvironment: Required[str]
    order: int


class TimeLimitAction(TypedDict):
    """Time limit after which Batch cancels a queue's first job if it waits for the given reason."""

    reason: str
    maxTimeSeconds: int


class QueueDetail(TypedDict, total=False):
    """Job queue of AWS Batch, with its state and compute environments."""

    jobQueueName: Required[str]
    jobQueueArn: str
    state: str
    status: str
    statusReason: str | None
    computeEnvironmentOrder: list[EnvironmentOrder] | None
    jobStateTimeLimitActions: list[TimeLimitAction] | None


class ZoneDetail(TypedDict):
    """Availability zone, with its name and ID."""

    ZoneName: str
    ZoneId: str


class ZonesAnswer(TypedDict, total=False):
    """Answer to ec2:DescribeAvailabilityZones, limited to the fields that Ebbflow reads."""

    AvailabilityZones: list[ZoneDetail]


class TypeOffering(TypedDict):
    """Instance type that EC2 offers in a zone."""

    InstanceType: str
    Location: str


class ReservationDetail(TypedDict, total=False):
    """Capacity reservation of EC2."""

    State: str
    StartDate: datetime
    EndDate: datetime
    ReservationType: str
    TotalInstanceCount: Required[int]
    AvailableInstanceCount: Required[int]
    InstanceType: Required[str]
    AvailabilityZoneId: str


class ReservationsAnswer(TypedDict, total=False):
    """Answer to ec2:DescribeCapacityReservations, limited to the fields that Ebbflow reads."""

    CapacityReservations: list[ReservationDetail]


class BlockOffering(TypedDict, total=False):
    """Offer of an EC2 Capacity Block, with its times and price."""

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
    """Spot placement score of an availability zone."""

    Region: str
    AvailabilityZoneId: str
    Score: int


class MemorySize(TypedDict):
    """Amount of memory in MiB."""

    SizeInMiB: int


class GpuDetail(TypedDict, total=False):
    """GPUs of one model in an instance type."""

    Manufacturer: str
    Count: Required[int]
    Name: Required[str]
    MemoryInfo: Required[MemorySize]


class GpusDetail(TypedDict, total=False):
    """All GPUs of an instance type."""

    Gpus: list[GpuDetail]


class NetworkCard(TypedDict, total=False):
    """Network card of an instance type, with its bandwidth."""

    BaselineBandwidthInGbps: float


class EfaDetail(TypedDict, total=False):
    """Number of Elastic Fabric Adapters that an instance type supports."""

    MaximumEfaInterfaces: int


class NetworkDetail(TypedDict, total=False):
    """Network cards and EFA support of an instance type."""

    NetworkCards: list[NetworkCard]
    NetworkPerformance: str
    EfaInfo: EfaDetail | None


class ProcessorDetail(TypedDict):
    """Number of vCPUs of an instance type."""

    DefaultVCpus: int


class InstanceTypeDetail(TypedDict, total=False):
    """EC2 instance type, with its GPUs, network, vCPUs and memory."""

    InstanceType: Required[str]
    GpuInfo: GpusDetail | None
    NetworkInfo: NetworkDetail | None
    VCpuInfo: Required[ProcessorDetail]
    MemoryInfo: Required[MemorySize]


class LogGroupDetail(TypedDict, total=False):
    """Log group of CloudWatch Logs."""

    logGroupName: str


class LogGroupsAnswer(TypedDict, total=False):
    """Answer to logs:DescribeLogGroups, limited to the fields that Ebbflow reads."""

    logGroups: list[LogGroupDetail]


class MetricsAnswer(TypedDict, total=False):
    """Answer to cloudwatch:ListMetrics, limited to the fields that Ebbflow reads."""

    Metrics: list[dict[str, Json]]


class ContainerOverrides(TypedDict, total=False):
    """Settings of a job's container that replace those of the job definition."""

    command: list[str]


class NodeOverride(TypedDict, total=False):
    """Settings for some nodes of a multi-node job that replace those of the job definition."""

    containerOverrides: Required[ContainerOverrides]


class NodeOverrides(TypedDict, total=False):
    """Settings for the nodes of a multi-node job that replace those of the job definition."""

    nodePropertyOverrides: list[NodeOverride]


class SubmitRequest(TypedDict, total=False):
    """Parameters of the request batch:SubmitJob."""

    jobName: str
    jobQueue: str
    parameters: dict[str, str] | None
    containerOverrides: ContainerOverrides | None
    nodeOverrides: NodeOverrides | None


class ServiceError(TypedDict, total=False):
    """Code and message of an error that Batch returned."""

    Code: str
    Message: str


class ResponseMetadata(TypedDict, total=False):
    """Metadata that botocore adds to an answer, such as the HTTP status."""

    HTTPStatusCode: int


class SubmitAnswer(TypedDict, total=False):
    """Answer to batch:SubmitJob: the new job's ID, or an error."""

    jobId: str
    jobName: str
    Error: ServiceError | None
    ResponseMetadata: ResponseMetadata | None
