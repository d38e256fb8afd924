"""What the job queues of an account can take: their market, machines, and whether they take anything at all now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from infra.aws.calls import Patience, ask, is_amazons, pages
from infra.batch.machines import BATCHS_CHOICE

Market = Literal["spot", "on_demand"]

_SECONDS = 20.0
_NAMES_IN_A_REQUEST = 100
# computeResources.type → the market; others (SageMaker, ECS managed instances) are none that a price is known of.
_MARKETS: dict[str, Market] = {"SPOT": "spot", "FARGATE_SPOT": "spot", "EC2": "on_demand", "FARGATE": "on_demand"}


@dataclass(frozen=True, kw_only=True)
class ComputeEnvironment:
    """One compute environment. kind: Batch's computeResources.type (SPOT, EC2, FARGATE …), "" of an unmanaged one.

    instance_types: as given to Batch: types, families, or "optimal". max_vcpus: None where it has no limit.
    """

    name: str
    kind: str
    managed: bool
    usable: bool
    problem: str
    instance_types: tuple[str, ...] = ()
    max_vcpus: int | None = None
    subnets: tuple[str, ...] = ()
    placement_group: str | None = None
    launch_template: str | None = None
    instance_role: str | None = None
    allocation_strategy: str | None = None

    @property
    def fargate(self) -> bool:
        return self.kind.startswith("FARGATE")

    @property
    def keeps_nodes_near(self) -> bool:
        """Several nodes come to lie in one zone: by a placement group, or since there is one subnet only."""
        return self.placement_group is not None or len(self.subnets) == 1


@dataclass(frozen=True, kw_only=True)
class QueueState:
    """A job queue as Batch describes it now. usable: takes jobs and can run them; problem: why not, "" when it can.

    market: None where it is not one, or nobody knows. instance_types: of all its usable compute environments, empty:
    any. multi_node: Batch runs several nodes there. cancels_after_seconds: by reason, its jobStateTimeLimitActions.
    """

    name: str
    arn: str
    market: Market | None
    instance_types: tuple[str, ...]
    multi_node: bool
    usable: bool
    problem: str
    fargate: bool = False
    max_vcpus: int | None = None
    compute_environments: tuple[ComputeEnvironment, ...] = ()
    cancels_after_seconds: Mapping[str, int] | None = None

    @property
    def keeps_nodes_near(self) -> bool:
        """Several nodes come to lie in one zone in whichever of its compute environments."""
        return all(one.keeps_nodes_near for one in self.compute_environments if one.usable)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe_queues(
    names: Sequence[str] | None, client: Any, *, deadline_seconds: float = _SECONDS
) -> dict[str, QueueState]:
    """The queues of these names or ARNs, by what they were asked for; None: all of the region, by name.

    A queue that does not exist is in the answer, as one that cannot be used. Raises CloudError.
    """
    patience = Patience.of(deadline_seconds)
    wanted = None if names is None else list(dict.fromkeys(names))
    details = _queues(wanted, client, patience)
    arns = [arn for detail in details for arn in _environment_arns(detail)]
    environments = _environments(list(dict.fromkeys(arns)), client, patience)
    states = [_state(detail, environments) for detail in details]
    if wanted is None:
        return {state.name: state for state in sorted(states, key=lambda state: state.name)}
    known = {key: state for state in states for key in (state.name, state.arn)}
    region = client.meta.region_name
    return {name: known.get(name) or _missing(name, region) for name in wanted}


def environment_of(detail: Mapping[str, Any]) -> ComputeEnvironment:
    """Read from DescribeComputeEnvironments, whose answer need not hold state, status and type."""
    resources = detail.get("computeResources") or {}
    state, status = detail.get("state") or "ENABLED", detail.get("status") or "VALID"
    problem = ""
    if state != "ENABLED":
        problem = f"compute environment {detail['computeEnvironmentName']} is {state}"
    elif status not in ("VALID", "UPDATING"):
        why = " ".join(str(detail.get("statusReason") or "").split())
        problem = f"compute environment {detail['computeEnvironmentName']} is {status}{': ' + why if why else ''}"
    template = resources.get("launchTemplate") or {}
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
        launch_template=template.get("launchTemplateName") or template.get("launchTemplateId"),
        instance_role=resources.get("instanceRole") or None,
        allocation_strategy=resources.get("allocationStrategy"),
    )


def _queues(wanted: list[str] | None, client: Any, patience: Patience) -> list[Mapping[str, Any]]:
    if wanted is None:
        return list(pages(client, "describe_job_queues", "jobQueues", patience))
    found: list[Mapping[str, Any]] = []
    for start in range(0, len(wanted), _NAMES_IN_A_REQUEST):
        part = wanted[start : start + _NAMES_IN_A_REQUEST]
        found += ask(client, "describe_job_queues", patience, jobQueues=part).get("jobQueues") or []
    return found


def _environments(arns: Sequence[str], client: Any, patience: Patience) -> dict[str, ComputeEnvironment]:
    found: dict[str, ComputeEnvironment] = {}
    for start in range(0, len(arns), _NAMES_IN_A_REQUEST):
        part = list(arns[start : start + _NAMES_IN_A_REQUEST])
        answer = ask(client, "describe_compute_environments", patience, computeEnvironments=part)
        for detail in answer.get("computeEnvironments") or []:
            one = environment_of(detail)
            if set(BATCHS_CHOICE) & set(one.instance_types) and not is_amazons(client):
                one = replace(one, instance_types=())  # what another Batch chooses from, nobody knows
            found |= {detail.get("computeEnvironmentArn", one.name): one, one.name: one}
    return found


def _environment_arns(detail: Mapping[str, Any]) -> list[str]:
    order = sorted(detail.get("computeEnvironmentOrder") or [], key=lambda one: one.get("order", 0))
    return [one["computeEnvironment"] for one in order]


def _state(detail: Mapping[str, Any], known: Mapping[str, ComputeEnvironment]) -> QueueState:
    environments = tuple(known[arn] for arn in _environment_arns(detail) if arn in known)
    usable = tuple(one for one in environments if one.usable)
    considered = usable or environments
    market = _market(considered)
    problem = _problem(detail, environments, usable, market)
    limits = [one.max_vcpus for one in considered]
    actions = {one["reason"]: one["maxTimeSeconds"] for one in detail.get("jobStateTimeLimitActions") or []}
    return QueueState(
        name=detail["jobQueueName"],
        arn=detail.get("jobQueueArn", ""),
        market=market,
        instance_types=tuple(dict.fromkeys(kind for one in considered for kind in one.instance_types)),
        # "Multi-node parallel jobs aren't supported on compute environments that use Spot Instances", nor on
        # unmanaged ones or Fargate: https://docs.aws.amazon.com/batch/latest/userguide/mnp-ce.html
        multi_node=bool(considered) and all(one.kind == "EC2" and one.managed for one in considered),
        usable=not problem,
        problem=problem,
        fargate=any(one.fargate for one in considered),
        max_vcpus=None if None in limits or not limits else max(limit for limit in limits if limit is not None),
        compute_environments=environments,
        cancels_after_seconds=actions or None,
    )


def _market(environments: Sequence[ComputeEnvironment]) -> Market | None:
    markets = {_MARKETS.get(one.kind) for one in environments}
    return markets.pop() if len(markets) == 1 else None


def _problem(
    detail: Mapping[str, Any],
    environments: Sequence[ComputeEnvironment],
    usable: Sequence[ComputeEnvironment],
    market: Market | None,
) -> str:
    name = detail["jobQueueName"]
    if detail.get("state") != "ENABLED":
        return f"queue {name} is {detail.get('state', 'in no state')}: it takes no jobs"
    if (detail.get("status") or "VALID") not in ("VALID", "UPDATING"):  # the answer need not hold it
        why = " ".join(str(detail.get("statusReason") or "").split())
        return f"queue {name} is {detail['status']}{': ' + why if why else ''}"
    if not environments:
        return f"queue {name} has no compute environment"
    if not usable:
        return f"queue {name}: " + "; ".join(one.problem for one in environments)
    if market is None:
        kinds = ", ".join(f"{one.name}: {one.kind or 'unmanaged'}" for one in usable)
        return f"queue {name} is of no single market ({kinds}): the price of a job there would not be known"
    return ""


def _missing(name: str, region: str) -> QueueState:
    return QueueState(
        name=name.rpartition("/")[2],
        arn=name if name.startswith("arn:") else "",
        market=None,
        instance_types=(),
        multi_node=False,
        usable=False,
        problem=f"there is no job queue {name} in {region}",
    )
