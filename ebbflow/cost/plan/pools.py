"""Pools of machines that can run a job (`Candidate`) or cannot (`Rejection`), and the queues that
run pools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from ebbflow.core.json_values import JsonObject
from ebbflow.core.terms import PriceWatch
from ebbflow.cost.catalogue import Catalogue
from ebbflow.cost.ledger.instances import SCALE_DOWN_SECONDS
from ebbflow.cost.plan.forecast import ForecastInputs, Outlook
from ebbflow.cost.plan.throughput import MemoryFit
from ebbflow.cost.plan_json import PriceJson
from ebbflow.cost.prices.quote import PoolPrice
from ebbflow.infra.batch.queues import AUTO_INSTANCE_TYPES, accepts_type, most_vcpus

if TYPE_CHECKING:
    from ebbflow.infra.batch.queues import QueueState


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Machines on which a job could run: instance type, number of nodes, ranks per node, market and
    zone.

    All nodes of a job (its gang) are in the same zone.
    """

    instance_type: str
    nodes: int
    processes_per_node: int
    market: str
    region: str | None = None  # None if the pool was rejected before regions were considered
    # zone id (use1-az1), or the zone name if the id is unknown. None means any single zone of the
    # region, because the price is the same in all zones (on-demand) or known only for the whole
    # region (static table).
    zone: str | None = None
    # id of the capacity reservation or Capacity Block that provides the machines; None for other
    # pools
    reservation: str | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def place(self) -> str:
        """The zone; the region if no zone is set; "" if neither is set."""
        return self.zone or self.region or ""

    def __str__(self) -> str:
        if self.place:
            place = f" in {self.place}"
        else:
            place = ""
        if self.reservation:
            held = f" (reservation {self.reservation})"
        else:
            held = ""
        return f"{self.nodes} × {self.instance_type} {self.market.replace('_', '-')}{place}{held}"


@dataclass(frozen=True, kw_only=True)
class Candidate(Pool):
    """A pool that can run the job, with its expected cost.

    All figures except the price are estimates.
    """

    gpu: str
    gpu_count: int
    gpu_memory_bytes: int
    price: PoolPrice  # of one node
    # on-demand price of one node of this type in this region; None if not on record
    on_demand_usd_per_hour: float | None
    micro_batch: int
    fit: MemoryFit
    tokens_per_second: float
    step_seconds: float
    bound: str  # the resource that limits the speed: compute, network, host, pcie or launch
    mfu: float
    speed_kind: str  # source of the speed (`ebbflow.cost.plan.throughput.Throughput.kind`)
    save_seconds: float  # time for which one checkpoint stops training
    interval_seconds: float
    hazard_per_hour: float  # expected interruptions of the job per hour
    hazard_kind: str  # source of the hazard estimate, as text
    daly_interval_steps: int  # optimal number of steps between checkpoints, by Daly's formula
    interruptions: float
    paid_hours: float  # expected paid hours per node
    expected_hours: (
        float  # `paid_hours` plus unpaid waits for capacity after machines were reclaimed
    )
    compute_usd: float  # of the nodes and their root volumes
    storage_usd: float
    transfer_usd: float
    expected_usd: float  # `compute_usd` + `storage_usd` + `transfer_usd`
    usd_per_step: float
    case: ForecastInputs  # inputs of the simulation
    # Result of the simulation; None except for the best pools. Where there is one, the expected
    # hours of this pool are its median, and its dollars and interruptions are its means.
    outlook: Outlook | None = None
    # Unix time at which the reservation ends; None if it has no end, or if the pool is not a
    # reservation
    ends_utc: float | None = None

    @property
    def gang_usd_per_hour(self) -> float:
        """Dollars per hour of all nodes with their root volumes."""
        return self.price.node_usd_float * self.nodes

    @property
    def savings_percent(self) -> float | None:
        """Savings against the on-demand price, in percent; None if that price is not on record."""
        on_demand = self.on_demand_usd_per_hour
        if on_demand is None:
            return None
        return 100.0 * (1.0 - self.price.usd_float / on_demand)

    def rise_usd(self, watch: PriceWatch, end_seconds: float) -> float:
        """Return the dollars that a rise of a watched Spot price may cost before the ranks know of
        it.

        They include the higher price of a step and of the `end_seconds` that are paid after it. The
        result is 0 for other pools.
        """
        if self.market != "spot":
            return 0.0
        return watch.rise_usd(self.gang_usd_per_hour, self.step_seconds + end_seconds)

    def reserve_usd(self, watch: PriceWatch, save_seconds: float, idle_seconds: float) -> float:
        """Return the dollars that a budget keeps in reserve for the end of the job.

        They pay for the last save, for machines that stay idle after it, and for an unknown rise of
        the price (`rise_usd`).
        """
        end_seconds = save_seconds + idle_seconds
        end_usd = self.gang_usd_per_hour * end_seconds / 3600
        return end_usd + self.rise_usd(watch, end_seconds)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Candidate:
        """Build a candidate from the result of `to_json`."""
        parts = ("price", "fit", "case", "outlook")
        plain = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        for name in parts:
            plain.pop(name, None)
        return cls(
            price=PoolPrice.from_json(cast(PriceJson, data)),
            fit=MemoryFit(**data["fit"]),
            case=ForecastInputs.from_json(data["case"]),
            outlook=Outlook.from_json(data["outlook"]),
            **plain,
        )

    def to_json(self) -> JsonObject:
        data = asdict(self)
        del data["price"]
        return {
            **data,
            **self.price.to_json(),
            "price_age_hours": self.price.age_hours,
            "price_stale": self.price.is_stale,
        }


@dataclass(frozen=True, kw_only=True)
class Rejection(Pool):
    """A pool that cannot run the job."""

    kind: str  # short name of the reason. Rejections of one kind are counted together.
    reason: str  # the reason in full, with numbers
    # Ratio of the needed to the available memory, time or money; 0 for all other reasons
    excess: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PartitionOffer:
    """A partition of a Slurm cluster that could run the job, with the facts that Slurm reports."""

    name: str
    nodes: int  # nodes of the job
    preemptible: bool
    usd_per_node_hour: float | None  # None if it is not stated
    max_hours: float | None  # configured time limit of each Slurm job
    node_states: str  # number of the partition's nodes by state; "" if Slurm told none
    start_utc: float | None  # Unix time of the start that Slurm estimates; None if it told none
    problem: str  # why Slurm would refuse the job now, or ""
    # Of the remaining steps, at the job's measured speed; None before the first steps
    node_hours: float | None
    usd: float | None


def get_idle_seconds(backend: str) -> float:
    """Return the seconds for which machines are still paid after a job, as the ledger counts them.

    backend: the back end of the job (`cluster.plan_for`).
    """
    if backend == "batch":
        return SCALE_DOWN_SECONDS
    return 0.0


def why_no_queue(
    queues: Mapping[str, QueueState], wanted: Pool, catalogue: Catalogue
) -> str | None:
    """Explain why no queue can run the pool, using one queue as an example.

    Return None if a queue can run it.
    """
    lacks = {name: why_unusable(queue, wanted, catalogue) for name, queue in queues.items()}
    if None in lacks.values():
        return None
    near = next((name for name, queue in queues.items() if queue.market == wanted.market), None)
    if near is None:
        return f"no queue is {wanted.market.replace('_', '-')}"
    return f"{short_queue_name(near)}: {lacks[near]}"


def short_queue_name(queue: str) -> str:
    """Return the name of a queue, given its name or ARN."""
    return queue.rpartition("/")[2]


# One return per reason: the first reason that applies is the answer.
def why_unusable(  # noqa: PLR0911
    queue: QueueState, wanted: Pool, catalogue: Catalogue
) -> str | None:
    """Explain why the queue cannot run the pool. Return None if it can."""
    if not queue.usable:
        return queue.problem or "not usable"
    if queue.fargate:
        return "Fargate, which has no GPUs"
    if wanted.region is not None and queue.region not in (None, wanted.region):
        return f"is in {queue.region}"
    if queue.reservation != wanted.reservation:
        if queue.reservation:
            return f"runs on reservation {queue.reservation}"
        return f"is not of {wanted.reservation}"
    if queue.market != wanted.market:
        return (
            f"{str(queue.market).replace('_', '-')}, of which the plan has no pool; its best is "
            f"{wanted}"
        )
    if wanted.nodes > 1 and wanted.market == "spot" and not queue.multi_node:
        return f"AWS Batch runs no job of several nodes on Spot, and {wanted} is one"
    if wanted.nodes > 1 and not queue.multi_node:
        return f"takes no job of several nodes, and {wanted} is one"
    if not accepts_type(queue.instance_types, wanted.instance_type):
        listed = ", ".join(queue.instance_types)
        if any(kind in AUTO_INSTANCE_TYPES for kind in queue.instance_types):
            family = wanted.instance_type.partition(".")[0]
            return (
                f"has {listed}: what AWS Batch chooses itself has no GPUs, and {wanted} is one "
                f"of {family}, not listed"
            )
        return f"has {listed}, and {wanted} is none of them"
    most = most_vcpus(queue, wanted.instance_type)
    needed = wanted.nodes * catalogue[wanted.instance_type].vcpu
    if most is not None and needed > most:
        return (
            f"may have {most} vCPUs (maxvCpus of its compute environment), and {wanted} has "
            f"{needed}"
        )
    return None
