"""A placement that AWS Batch can enact: pool, queue, nodes and time limit, and the queues that can run each pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ebbflow.cost.catalogue import Catalogue, InstanceType, load_catalogue
from ebbflow.cost.plan.plan import Plan
from ebbflow.cost.plan.pools import Candidate, lack_of, short_name, takes

if TYPE_CHECKING:
    from ebbflow.infra.batch.queues import QueueState


# Of the installed memory: the kernel and the platform keep 2.5 % (8,192 MiB register as 7,985), the ECS agent 32 MiB,
# and 5 % are recommended for it and other system processes. Source: AWS Batch user guide, "Compute resource memory
# management" and "Reserve system memory", read 2026-11. Of the processors nothing is kept.
_KERNEL_SHARE, _RESERVED_SHARE, _AGENT_MIB = 0.025, 0.05, 32


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one attempt runs and why.

    queue: its name or ARN. market: spot or on_demand. region, zone: of the price; Batch itself chooses the zone.
    cpu, gpu, memory_mib: what the job asks for on each node, so that one job fills one instance.
    wall_seconds: paid time that budget and deadline still bear, for Batch's own attempt duration; at least 60.
    runnable_seconds: how long the job may wait for capacity before it is better placed elsewhere.
    usd_per_hour: per node, estimated as the plan quoted it; quoted_usd_per_hour: the same as text, for the bill.
    expected_hours, expected_usd: of finishing the rest of the job there, as the plan has them.
    start_by_utc: Unix time by which it is to run, so that on-demand after it would still be in time; None: no matter.
    reason: in one line. policy: who chose. state: what it saw, to be shown again to the policy of the next decision.
    """

    queue: str
    market: str
    instance_type: str
    region: str | None
    zone: str | None
    nodes: int
    processes_per_node: int
    cpu: int
    gpu: int
    memory_mib: int
    wall_seconds: int
    runnable_seconds: int
    usd_per_hour: float
    quoted_usd_per_hour: str
    price_kind: str
    expected_hours: float
    expected_usd: float
    reason: str
    policy: str = ""
    start_by_utc: float | None = None
    state: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def pool(self) -> str:
        """What the policy knows it by: its memory is of pools, not of prices."""
        return pool_id(self.queue, self.instance_type, self.nodes)

    @property
    def gang_usd_per_hour(self) -> float:
        return self.usd_per_hour * self.nodes

    def __str__(self) -> str:
        where = f"{self.nodes} × {self.instance_type} {self.market.replace('_', '-')}"
        return f"{where} in queue {short_name(self.queue)}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Placement:
        """The inverse of `to_json`. Keys of later versions are passed over. Raises TypeError where one is missing."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


def pool_id(queue: str, instance_type: str, nodes: int) -> str:
    return f"{short_name(queue)}/{nodes}x{instance_type}"


def memory_mib(kind: InstanceType) -> int:
    """Of an instance, as far as a job can have it."""
    left = (1 - _KERNEL_SHARE) * (1 - _RESERVED_SHARE)
    return math.floor(kind.ram_gib * 1024 * left) - _AGENT_MIB


def as_placed(plan: Plan, placement: Placement) -> Plan:
    """The plan with the placed pool as the chosen one, so that terms, ledger and report follow what is really taken.

    Raises KeyError where the plan has no such pool.
    """
    ours = next((one for one in plan.ranked if _is_of(one, placement)), None)
    if ours is None:
        raise KeyError(f"{placement} is not among the {len(plan.ranked)} pools of the plan")
    others = tuple(one for one in plan.ranked if one is not ours)
    return replace(plan, ranked=(ours, *others), reserve_usd=reserve_usd(plan, ours))


def reserve_usd(plan: Plan, pool: Candidate) -> float:
    """The price of one last save there: the plan has it of its chosen pool, and it goes by the gang's price."""
    chosen = plan.ranked[0].gang_usd_per_hour
    return plan.reserve_usd * pool.gang_usd_per_hour / chosen if chosen else plan.reserve_usd


def _is_of(one: Candidate, placement: Placement) -> bool:
    names = ("instance_type", "nodes", "processes_per_node", "market", "region", "zone")
    return all(getattr(one, name) == getattr(placement, name) for name in names)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One pool as Batch can run it: the cheapest of the plan's places for the type, since Batch chooses the zone."""

    candidate: Candidate
    queue: str

    @property
    def id(self) -> str:
        return pool_id(self.queue, self.candidate.instance_type, self.candidate.nodes)

    @property
    def is_spot(self) -> bool:
        return self.candidate.market == "spot"

    @property
    def work_hours(self) -> float:
        return self.candidate.case.work_hours


def offers(
    ranked: Sequence[Candidate],
    queues: Mapping[str, QueueState],
    *,
    region: str | None = None,
    catalogue: Catalogue | None = None,
) -> tuple[Offer, ...]:
    """In the plan's order, each type, size and queue once. region: where the queues are; None: not known."""
    kinds = load_catalogue() if catalogue is None else catalogue
    found: dict[str, Offer] = {}
    for one in ranked:
        if region is not None and one.region not in (None, region):
            continue
        for name, queue in queues.items():
            if lack_of(queue, one, kinds) is None:
                offer = Offer(candidate=one, queue=name)
                found.setdefault(offer.id, offer)
    return tuple(found.values())


def lacking(
    ranked: Sequence[Candidate],
    queues: Mapping[str, QueueState],
    *,
    region: str | None = None,
    catalogue: Catalogue | None = None,
) -> str:
    """What each queue lacks to run the cheapest pool that is nearest to it."""
    if not queues:
        return "the account has no queue that training may go to"
    here = [one for one in ranked if region is None or one.region in (None, region)]
    if not here:
        return f"the plan has no pool in {region}, where the queues are; fix: name it in cost.regions"
    kinds = load_catalogue() if catalogue is None else catalogue
    lines = []
    for name, queue in queues.items():
        near = [one for one in here if one.market == queue.market] or here
        wanted = next((one for one in near if takes(queue.instance_types, one.instance_type)), near[0])
        lines.append(f"{short_name(name)}: {lack_of(queue, wanted, kinds)}")
    return "; ".join(lines)
