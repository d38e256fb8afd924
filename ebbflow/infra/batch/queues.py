"""Job queues of AWS Batch: their market, machines and state, and the queues that a configuration
declares.

Instance families: https://docs.aws.amazon.com/ec2/latest/instancetypes/instance-type-names.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ebbflow.core.config.schema import BatchConfig, QueueConfig, RunConfig
from ebbflow.core.errors import CloudError, InfraError
from ebbflow.core.store.s3 import aws_settings
from ebbflow.infra.aws.answers import EnvironmentDetail, JobDetail, QueueDetail
from ebbflow.infra.aws.calls import (
    RequestDeadline,
    aws_client,
    describe_in_parts,
    is_amazons,
    paginate,
)

if TYPE_CHECKING:
    from botocore.client import BaseClient

# Batch chooses from the families c6i, c7i, m6i and r6i, or their Arm variants; none has a GPU.
# https://docs.aws.amazon.com/batch/latest/userguide/instance-type-compute-table.html
AUTO_INSTANCE_TYPES = ("optimal", "default_x86_64", "default_arm64")
_ARM_CHOICE = "default_arm64"
# Graviton's families have a g behind their generation: m6g, c7gn, g5g
_ARM = re.compile(r"a1\b|[a-z]+[0-9]+[a-z]*g")
_ACCELERATED = re.compile(r"(p|g|gr|vt|inf|trn|dl|f)[0-9]")

Market = Literal["spot", "on_demand"]

_SECONDS = 20.0

# computeResources.type → the market; there are no prices for others (SageMaker, ECS managed
# instances).
_MARKETS: dict[str, Market] = {
    "SPOT": "spot",
    "FARGATE_SPOT": "spot",
    "EC2": "on_demand",
    "FARGATE": "on_demand",
}

# Without @resources Metaflow requests 4,096 MiB, more than a machine with 4 GiB has free.
_LEAST_GIB = 5.0
_GIB_PER_VCPU = {"c": 2.0, "r": 8.0, "x": 16.0, "z": 8.0}  # others: 4
_VCPUS = {"nano": 0.5, "micro": 0.5, "small": 0.5, "medium": 1.0, "large": 2.0, "xlarge": 4.0}
_ANY_SIZE_VCPUS = 2.0  # for a family or for Batch's own choice, where Batch takes a size that fits
_METAL_VCPUS = 96.0
_CPU, _FARGATE, _UNKNOWN, _GPU, _UNFIT = range(5)

# A parameter that each submit sets. No job definition uses it, and Batch returns it with the job.
MARK = "ebbflow_submit"


@dataclass(frozen=True, kw_only=True)
class ComputeEnvironment:
    """A compute environment of Batch: the machines on which the jobs of a queue run."""

    name: str
    kind: str  # computeResources.type (SPOT, EC2, FARGATE …), "" if the environment is unmanaged
    managed: bool
    usable: bool  # True if it is enabled and valid
    problem: str  # why it is not usable, "" if it is
    instance_types: tuple[str, ...] = ()  # types, families or "optimal", as configured in Batch
    # The most vCPUs that run at the same time, None if there is no limit
    max_vcpus: int | None = None
    subnets: tuple[str, ...] = ()
    placement_group: str | None = None

    @property
    def fargate(self) -> bool:
        return self.kind.startswith("FARGATE")

    @property
    def places_nodes_together(self) -> bool:
        """True if all nodes of a job run in one zone, because of a placement group or a single
        subnet.
        """
        return self.placement_group is not None or len(self.subnets) == 1


@dataclass(frozen=True, kw_only=True)
class QueueState:
    """A job queue as Batch describes it."""

    name: str
    arn: str
    # None if the compute environments have different markets or it is unknown
    market: Market | None
    # Types of all usable compute environments; () if Batch names none
    instance_types: tuple[str, ...]
    multi_node: bool  # the queue runs multi-node jobs
    usable: bool  # the queue accepts jobs and can run them
    problem: str  # why it is not usable, "" if it is
    fargate: bool = False
    # Largest limit of a compute environment; None: no limit, or unknown
    max_vcpus: int | None = None
    compute_environments: tuple[ComputeEnvironment, ...] = ()
    # Limits in seconds by reason (jobStateTimeLimitActions)
    cancels_after_seconds: Mapping[str, int] | None = None
    configured_region: str | None = None
    reservation: str | None = None  # id of the reservation on whose machines alone it runs jobs

    @property
    def region(self) -> str | None:
        """The region in the queue's ARN or, by default, in the configuration; None if both lack
        one.
        """
        return region_of_arn(self.arn) or self.configured_region

    @property
    def places_nodes_together(self) -> bool:
        return all(
            environment.places_nodes_together
            for environment in self.compute_environments
            if environment.usable
        )


def has_accelerator(instance_type: str) -> bool:
    """Return whether an instance type or family has GPUs or other accelerators."""
    return _ACCELERATED.match(instance_type) is not None


def is_arm(instance_type: str) -> bool:
    """Return whether an instance type or family has Arm processors, which run no x86-64 image."""
    return instance_type == _ARM_CHOICE or _ARM.match(instance_type.partition(".")[0]) is not None


def describe_queues(
    names: Sequence[str] | None, client: BaseClient, *, deadline_seconds: float = _SECONDS
) -> dict[str, QueueState]:
    """Return queues with their compute environments, by name or ARN.

    `names` None means all queues of the region.

    A queue that does not exist is included with `usable` False. Raises CloudError if Batch does not
    answer or refuses the request.
    """
    deadline = RequestDeadline.after(deadline_seconds)
    if names is None:
        wanted = None
    else:
        wanted = list(dict.fromkeys(names))
    details = _queues(wanted, client, deadline)
    arns: dict[str, None] = {}  # in order, each once
    for detail in details:
        arns.update(dict.fromkeys(_environment_arns(detail)))
    environments = _environments(list(arns), client, deadline)
    states = [_state(detail, environments) for detail in details]
    if wanted is None:
        return {state.name: state for state in sorted(states, key=lambda state: state.name)}
    known = {state.name: state for state in states}
    known |= {state.arn: state for state in states}
    region = client.meta.region_name
    missing = {
        name: _unseen(
            name.rpartition("/")[2],
            arn=name if name.startswith("arn:") else "",
            problem=f"there is no job queue {name} in {region}",
        )
        for name in wanted
        if name not in known
    }
    return {name: known.get(name) or missing[name] for name in wanted}


def parse_environment(detail: EnvironmentDetail) -> ComputeEnvironment:
    """Parse one entry of Batch's DescribeComputeEnvironments.

    The entry may lack state, status and type.
    """
    resources = detail.get("computeResources") or {}
    state = detail.get("state") or "ENABLED"
    status = detail.get("status") or "VALID"
    problem = ""
    if state != "ENABLED":
        problem = f"compute environment {detail['computeEnvironmentName']} is {state}"
    elif status not in ("VALID", "UPDATING"):
        why = " ".join(str(detail.get("statusReason") or "").split())
        problem = (
            f"compute environment {detail['computeEnvironmentName']} is "
            f"{status}{': ' + why if why else ''}"
        )
    return ComputeEnvironment(
        name=detail["computeEnvironmentName"],
        kind=resources.get("type", ""),
        managed=detail.get("type", "MANAGED" if resources else "") == "MANAGED",
        usable=not problem,
        problem=problem,
        instance_types=tuple(resources.get("instanceTypes") or ()),
        max_vcpus=resources.get("maxvCpus"),
        subnets=tuple(resources.get("subnets") or ()),
        placement_group=resources.get("placementGroup") or None,
    )


def region_of_arn(arn: str) -> str | None:
    """Return the region in an ARN (arn:aws:batch:REGION:…), or None if `arn` is a plain name or has
    no region.
    """
    if arn.count(":") > 3:
        return arn.split(":")[3] or None
    return None


def declared_queues(batch: BatchConfig) -> dict[str, QueueState]:
    """Return the configuration's queues by name, all marked usable.

    They are the fallback if Batch does not answer.
    """
    return {
        queue.name: replace(
            _unseen(queue.name, configured_region=queue_region(queue, batch)),
            market=queue.market,
            instance_types=tuple(queue.instance_types),
            multi_node=queue.multi_node,
            reservation=queue.reservation,
        )
        for queue in batch.queues
    }


def training_queues(
    batch: BatchConfig, client: BaseClient, *, deadline_seconds: float = 20.0
) -> dict[str, QueueState]:
    """Return the training queues by name: the configured ones or, by default, all EC2 queues of the
    region.

    A queue's entry in the configuration may narrow its instance types and exclude multi-node jobs.
    If an entry contradicts Batch, the queue is not usable, and its `problem` says why. Raises
    CloudError.
    """
    if not batch.queues:
        found = describe_queues(None, client, deadline_seconds=deadline_seconds)
        # Fargate has no GPUs
        return {name: state for name, state in found.items() if not state.fargate}
    home = client.meta.region_name
    found = {}
    for region in dict.fromkeys(queue_region(queue, batch) or home for queue in batch.queues):
        names = [
            queue.name for queue in batch.queues if (queue_region(queue, batch) or home) == region
        ]
        try:
            if region == home:
                there = client
            else:
                there = aws_client("batch", region)
            found |= describe_queues(names, there, deadline_seconds=deadline_seconds)
        except CloudError as error:  # the other regions still run the job
            if region == home:
                raise
            found |= {
                name: _unseen(name, configured_region=region, problem=str(error)) for name in names
            }
    return {queue.name: _narrowed(found[queue.name], queue) for queue in batch.queues}


def queues_to_plan(
    batch: BatchConfig, *, ask: bool, notify: Callable[[str], None]
) -> dict[str, QueueState] | None:
    """Return the queues that a plan may use, or None if no queue is known.

    Queues without a known market are left out. All others are marked usable, even if they are not
    usable now.

    Args:
        ask: Whether to query Batch. If Batch is not queried or does not answer, the configured
            queues are used.
        notify: Called with a message if Batch does not answer.
    """
    found = declared_queues(batch)
    if ask:
        try:
            found = training_queues(batch, aws_client("batch", batch.region))
        except InfraError as error:
            if found:
                known = "batch.queues alone"
            else:
                known = "all instance types, whatever queues there are"
            notify(f"planning with {known}, because AWS Batch does not list its queues: {error}")
    return {
        name: replace(queue, usable=True)
        for name, queue in found.items()
        if queue.market is not None
    } or None


def queue_region(queue: QueueConfig, batch: BatchConfig) -> str | None:
    """Return the region of a configured queue, or None if the configuration does not name one."""
    return queue.region or region_of_arn(queue.name) or batch.region


def has_foreign_queues(batch: BatchConfig) -> bool:
    """Return whether a configured queue is in a region other than `batch.region`."""
    return any(queue_region(queue, batch) != batch.region for queue in batch.queues)


def limit_to_queue_region(config: RunConfig, *, only_if_set: bool = True) -> RunConfig:
    """Return the configuration with `batch.region` set and with prices limited to the queues'
    regions.

    If neither the configuration nor the AWS settings name a region, the result depends on
    `only_if_set`. If True, the configuration is returned unchanged, because a container may not
    know the region. If False, the default region is used, as AWS clients do. Raises StoreError.
    """
    region = config.batch.region
    if region is None:
        settings = aws_settings()
        if only_if_set and not settings.region_is_set:
            return config
        region = settings.region
    config = config.changed("batch", region=region)
    regions = list(
        dict.fromkeys(queue_region(queue, config.batch) or region for queue in config.batch.queues)
    ) or [region]
    return config.changed("cost", regions=regions)


def declaration_conflict(state: QueueState, declared: QueueConfig) -> str:
    """Return a message if a queue's entry in the configuration contradicts Batch, or "" if they
    agree.

    The message includes a fix.
    """
    if state.market is not None and state.market != declared.market:
        kinds = ", ".join(
            dict.fromkeys(environment.kind for environment in state.compute_environments)
        )
        conflict = (
            f"queue {state.name} is declared {declared.market}, but its compute environments are "
            f"{kinds}"
        )
        return f"{conflict}; fix: set its market to {state.market} in batch.queues"
    if declared.multi_node and not state.multi_node:
        conflict = (
            f"queue {state.name} is declared multi_node, but only managed EC2 environments run it"
        )
        return f"{conflict}; fix: set its multi_node to false in batch.queues"
    if declared.instance_types and state.instance_types:
        lost = [
            kind for kind in declared.instance_types if not _offered(kind, state.instance_types)
        ]
        if lost:
            conflict = (
                f"queue {state.name} is declared to have {', '.join(lost)}, but has "
                f"{', '.join(state.instance_types)}"
            )
            return f"{conflict}; fix: correct its instance_types in batch.queues"
    return ""


def accepts_type(listed: Sequence[str], instance_type: str) -> bool:
    """Return whether a compute environment that lists the instance types `listed` can start
    `instance_type`.

    An empty list accepts every type. An entry is a type (g5.xlarge), a family (g5), or a family
    with the beginning of a size (p4d.24, p4d.24*). The entry "optimal" matches no type: AWS Batch
    then chooses types without GPUs.
    """
    return not listed or any(
        instance_type == entry
        or instance_type.startswith(f"{entry}.")
        or ("." in entry and instance_type.startswith(entry.removesuffix("*")))
        for entry in listed
    )


def most_vcpus(queue: QueueState, instance_type: str) -> int | None:
    """Return the largest vCPU limit of a queue's compute environments that offer the type, or None
    if a limit is unknown.

    AWS Batch runs a job in one compute environment. A job that needs more vCPUs than the limit
    stays RUNNABLE forever.
    """
    able = [
        environment
        for environment in queue.compute_environments
        if environment.usable and accepts_type(environment.instance_types, instance_type)
    ]
    limits = [environment.max_vcpus for environment in able] or [queue.max_vcpus]
    if None in limits:
        return None
    return max(limit for limit in limits if limit is not None)


def lightest_queue(queues: Mapping[str, QueueState]) -> tuple[str, str] | None:
    """Choose the on-demand queue with the smallest sufficient machine for the steps before and
    after training.

    A machine is sufficient if its instance type has at least 5 GiB of memory and an x86-64
    processor. Queues are preferred in this order: CPU machines, Fargate (for which Metaflow needs
    another IAM role), unknown machines, and machines with GPUs. A queue with only insufficient
    machines is the last resort. Returns (name, reason for the user), or None if there is no
    on-demand queue.
    """
    able = [
        (name, queue)
        for name, queue in queues.items()
        if queue.usable and queue.market == "on_demand"
    ]
    if not able:
        return None
    name, queue = min(able, key=lambda one: _rank_of(one[1]))  # ties: the first one
    kind, _ = _rank_of(queue)
    types = ", ".join(queue.instance_types) or "unknown machines"
    fix = "fix: name a queue of small machines in batch.light_queue"
    why = {
        _CPU: f"the smallest of {len(able)} on demand ({types})"
        if len(able) > 1
        else f"the only one on demand ({types})",
        _FARGATE: "of Fargate, without GPUs; Metaflow needs METAFLOW_ECS_FARGATE_EXECUTION_ROLE for it",
        _UNKNOWN: f"of {types}, which may have GPUs; {fix}",
        _GPU: f"whose machines all have unused GPUs or other accelerators ({types}); {fix}",
        _UNFIT: (
            f"whose machines may have less than {_LEAST_GIB:g} GiB, or run no image for x86-64 "
            f"({types}); {fix}"
        ),
    }
    return name, why[kind]


def has_gpus_only(queue: QueueState) -> bool:
    """Return whether all machines of a queue have accelerators, which the steps before and after
    training leave idle.

    Machines that are too small for these steps do not count.
    """
    return bool(queue.instance_types) and _rank(queue.instance_types)[0] == _GPU


def find_marked_jobs(
    queue: str, job_name: str, mark: str, client: BaseClient, *, deadline_seconds: float = 20.0
) -> list[str]:
    """Return the ids of the queue's jobs that have this name and mark, in any state, oldest first.

    Raises CloudError.

    mark: value of the job's parameter `MARK`, which is unique to one submission.
    """
    deadline = RequestDeadline.after(deadline_seconds)
    by_name = [{"name": "JOB_NAME", "values": [job_name]}]
    listed = paginate(
        client,
        "list_jobs",
        "jobSummaryList",
        deadline,
        shape=JobDetail,
        jobQueue=queue,
        filters=by_name,
    )
    named = [job["jobId"] for job in listed if job.get("jobName") == job_name]
    jobs = describe_in_parts(client, "describe_jobs", "jobs", named, deadline, shape=JobDetail)
    found = [job for job in jobs if (job.get("parameters") or {}).get(MARK) == mark]
    return [job["jobId"] for job in sorted(found, key=lambda job: job.get("createdAt") or 0)]


def _queues(
    wanted: list[str] | None, client: BaseClient, deadline: RequestDeadline
) -> list[QueueDetail]:
    call = "describe_job_queues"
    if wanted is None:
        return list(paginate(client, call, "jobQueues", deadline, shape=QueueDetail))
    return describe_in_parts(client, call, "jobQueues", wanted, deadline, shape=QueueDetail)


def _environments(
    arns: Sequence[str], client: BaseClient, deadline: RequestDeadline
) -> dict[str, ComputeEnvironment]:
    found: dict[str, ComputeEnvironment] = {}
    listed = describe_in_parts(
        client,
        "describe_compute_environments",
        "computeEnvironments",
        arns,
        deadline,
        shape=EnvironmentDetail,
    )
    for detail in listed:
        environment = parse_environment(detail)
        if set(AUTO_INSTANCE_TYPES) & set(environment.instance_types) and not is_amazons(client):
            # Which types a Batch emulator chooses is unknown
            environment = replace(environment, instance_types=())
        found[detail.get("computeEnvironmentArn", environment.name)] = environment
        found[environment.name] = environment
    return found


def _environment_arns(detail: QueueDetail) -> list[str]:
    order = sorted(
        detail.get("computeEnvironmentOrder") or [], key=lambda entry: entry.get("order", 0)
    )
    return [entry["computeEnvironment"] for entry in order]


def _state(detail: QueueDetail, known: Mapping[str, ComputeEnvironment]) -> QueueState:
    environments = tuple(known[arn] for arn in _environment_arns(detail) if arn in known)
    usable = tuple(environment for environment in environments if environment.usable)
    considered = usable or environments
    markets: set[Market | None] = {_MARKETS.get(environment.kind) for environment in considered}
    if len(markets) == 1:
        market = markets.pop()
    else:
        market = None
    problem = _problem(detail, environments, usable, market)
    limits = [environment.max_vcpus for environment in considered]
    actions = {
        action["reason"]: action["maxTimeSeconds"]
        for action in detail.get("jobStateTimeLimitActions") or []
    }
    return QueueState(
        name=detail["jobQueueName"],
        arn=detail.get("jobQueueArn", ""),
        market=market,
        instance_types=_all_types(considered),
        # "Multi-node parallel jobs aren't supported on compute environments that use Spot
        # Instances", nor on unmanaged ones or Fargate:
        # https://docs.aws.amazon.com/batch/latest/userguide/mnp-ce.html
        multi_node=bool(considered)
        and all(environment.kind == "EC2" and environment.managed for environment in considered),
        usable=not problem,
        problem=problem,
        fargate=any(environment.fargate for environment in considered),
        max_vcpus=None
        if None in limits or not limits
        else max(limit for limit in limits if limit is not None),
        compute_environments=environments,
        cancels_after_seconds=actions or None,
    )


def _problem(
    detail: QueueDetail,
    environments: Sequence[ComputeEnvironment],
    usable: Sequence[ComputeEnvironment],
    market: Market | None,
) -> str:
    name = detail["jobQueueName"]
    if detail.get("state") != "ENABLED":
        return f"queue {name} is {detail.get('state', 'in no state')} and accepts no jobs"
    if (detail.get("status") or "VALID") not in ("VALID", "UPDATING"):  # the field is optional
        why = " ".join(str(detail.get("statusReason") or "").split())
        return f"queue {name} is {detail.get('status')}{': ' + why if why else ''}"
    if not environments:
        return f"queue {name} has no compute environment"
    if not usable:
        return f"queue {name}: " + "; ".join(environment.problem for environment in environments)
    if market is None:
        kinds = ", ".join(
            f"{environment.name}: {environment.kind or 'unmanaged'}" for environment in usable
        )
        return f"queue {name} mixes markets ({kinds}), so that a job's price is unknown"
    return ""


def _unseen(
    name: str, *, arn: str = "", configured_region: str | None = None, problem: str = ""
) -> QueueState:
    """Return the state of a queue that Batch has not described.

    It counts as usable unless `problem` is given.
    """
    return QueueState(
        name=name,
        arn=arn,
        market=None,
        instance_types=(),
        multi_node=False,
        usable=not problem,
        problem=problem,
        configured_region=configured_region,
    )


def _narrowed(state: QueueState, declared: QueueConfig) -> QueueState:
    problem = state.problem or declaration_conflict(state, declared)
    return replace(
        state,
        instance_types=_common(declared.instance_types, state.instance_types),
        multi_node=state.multi_node and declared.multi_node,
        usable=not problem,
        problem=problem,
        reservation=declared.reservation,
    )


def _all_types(environments: Iterable[ComputeEnvironment]) -> tuple[str, ...]:
    types: dict[str, None] = {}  # in order, each once
    for environment in environments:
        types.update(dict.fromkeys(environment.instance_types))
    return tuple(types)


def _common(declared: Sequence[str], offered: Sequence[str]) -> tuple[str, ...]:
    """Return the types that are both declared (in the configuration) and offered (by Batch).

    An empty list allows all.

    A declared family, such as g5, is replaced by the types of this family that Batch lists, such as
    g5.xlarge.
    """
    if not declared or not offered:
        return tuple(declared or offered)
    narrow = [kind for kind in declared if kind in offered or not _lists_types_of(offered, kind)]
    listed = [entry for entry in offered if _is_of_a_family(entry, declared)]
    return tuple(dict.fromkeys([*narrow, *listed])) or tuple(declared)


def _is_of_a_family(entry: str, families: Iterable[str]) -> bool:
    return any(_lists_types_of([entry], family) for family in families)


def _lists_types_of(offered: Sequence[str], kind: str) -> bool:
    """Return whether `offered` contains individual types of the family `kind`, such as g5.xlarge
    for g5.
    """
    whole = kind.rstrip(".")
    prefix = whole if "." in whole else f"{whole}."
    return any(entry != whole and entry.startswith(prefix) for entry in offered)


def _offered(kind: str, offered: Sequence[str]) -> bool:
    """Return whether a compute environment that lists `offered` can provide the instance type or
    family `kind`.
    """
    family, _, size = kind.rstrip(".").partition(".")
    for entry in offered:
        other, _, its_size = entry.partition(".")
        if entry in AUTO_INSTANCE_TYPES and not has_accelerator(kind):
            return True  # Batch's own choice varies and has never had GPUs
        if family == other and (not size or not its_size or its_size.startswith(size)):
            return True
    return False


def _rank_of(queue: QueueState) -> tuple[int, float]:
    if queue.fargate:
        return (_FARGATE, 0.0)
    return _rank(queue.instance_types)


def _rank(types: Iterable[str]) -> tuple[int, float]:
    """Return a sort key for the best machine among the types: its kind and its number of vCPUs.

    Machines without accelerators come first, and among these the smallest.
    """
    fit = [kind for kind in types if _gib(kind) >= _LEAST_GIB and not is_arm(kind)]
    found = [(_GPU if has_accelerator(kind) else _CPU, _vcpus(kind)) for kind in fit]
    if found:
        return min(found)
    if list(types):
        return (_UNFIT, 0.0)
    return (_UNKNOWN, 0.0)


def _vcpus(listed: str) -> float:
    if listed in AUTO_INSTANCE_TYPES:
        return _ANY_SIZE_VCPUS
    size = listed.partition(".")[2].rstrip("*")
    if not size:
        return _ANY_SIZE_VCPUS
    if size.startswith("metal"):
        return _METAL_VCPUS
    times = re.fullmatch(r"([0-9]+)xlarge", size)
    if times:
        return 4.0 * int(times[1])
    return _VCPUS.get(size, _ANY_SIZE_VCPUS)


def _gib(listed: str) -> float:
    if listed in AUTO_INSTANCE_TYPES or "." not in listed.rstrip("."):
        return _LEAST_GIB
    return _vcpus(listed) * _GIB_PER_VCPU.get(listed[0], 4.0)
