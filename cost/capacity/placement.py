"""A decision that Batch can enact: which queue, on how many nodes, with what of a machine, for how long at most."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cost.catalogue import InstanceType
from cost.plan.plan import Plan
from cost.plan.pools import Candidate
from cost.plan.queues import short_name

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
