"""Pools that a job could run in, judged or not; the queues that take them, and the progress that a plan builds on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ebbflow.cost.catalogue import Catalogue
from ebbflow.cost.ledger.generations import read_generations
from ebbflow.cost.ledger.ledger import spent_usd
from ebbflow.cost.plan.fit import Fit
from ebbflow.cost.plan.outlook import Case, Outlook
from ebbflow.infra.batch.queues import BATCHS_CHOICE
from ebbflow.infra.events import PLAN, STEP, Event

if TYPE_CHECKING:
    from ebbflow.infra.batch.queues import QueueState


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Where and how large: instance type × nodes × ranks per node × market × place. A gang lies in one zone, always.

    region: None for a pool that is ruled out everywhere. zone: its id, or its name where only that is known; None:
    any one zone of the region, since the price is the same in all (on-demand) or known no better (the static table).
    """

    instance_type: str
    nodes: int
    processes_per_node: int
    market: str
    region: str | None = None
    zone: str | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def place(self) -> str:
        """The zone, else the region; empty for everywhere."""
        return self.zone or self.region or ""

    def __str__(self) -> str:
        place = f" in {self.place}" if self.place else ""
        return f"{self.nodes} × {self.instance_type} {self.market.replace('_', '-')}{place}"


@dataclass(frozen=True, kw_only=True)
class Candidate(Pool):
    """A pool that can run the job, with what it is expected to take. usd_per_hour per node; all else estimated.

    quoted_usd_per_hour: the same price exactly as it was quoted, for the bill. on_demand_usd_per_hour: of the same
    type and region; None: not on record. price_kind: how the price is known, in words that begin with live, recorded
    or estimated. price_age_hours: since it was last known to hold. price_stale: older than cost.max_price_age_hours.
    speed_kind: measured, scaled … or prior; hazard_kind: estimated, or updated by jobs of this store.
    interval_seconds: of training between two saves, as the configuration has it; daly_interval_steps: Daly's.
    paid_hours: of each node; expected_hours: with the waits for capacity after reclaims, which are not paid.
    expected_usd: compute_usd + storage_usd + transfer_usd (`cost.plan.expect`); usd_per_step: of the remaining steps.
    case: what the hours depend on, and how they may vary; outlook: how they may come out, of the best pools only.
    """

    gpu: str
    gpu_count: int
    gpu_memory_bytes: int
    usd_per_hour: float
    quoted_usd_per_hour: str
    on_demand_usd_per_hour: float | None
    price_kind: str
    price_age_hours: float
    price_stale: bool
    micro_batch: int
    fit: Fit
    tokens_per_second: float
    step_seconds: float
    bound: str
    mfu: float
    speed_kind: str
    save_seconds: float
    interval_seconds: float
    hazard_per_hour: float
    hazard_kind: str
    daly_interval_steps: int
    interruptions: float
    paid_hours: float
    expected_hours: float
    compute_usd: float
    storage_usd: float
    transfer_usd: float
    expected_usd: float
    usd_per_step: float
    case: Case
    outlook: Outlook | None = None

    @property
    def gang_usd_per_hour(self) -> float:
        return self.usd_per_hour * self.nodes

    @property
    def savings_percent(self) -> float | None:
        """Of the price per hour, against on-demand; None: no on-demand price of the type and region is on record."""
        on_demand = self.on_demand_usd_per_hour
        return None if on_demand is None else 100.0 * (1.0 - self.usd_per_hour / on_demand)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Candidate:
        outlook = data["outlook"] and Outlook(**data["outlook"])
        return cls(**{**data, "fit": Fit(**data["fit"]), "case": Case.from_json(data["case"]), "outlook": outlook})


@dataclass(frozen=True, kw_only=True)
class Rejection(Pool):
    """A pool that cannot run the job. kind groups like reasons; excess: how much too large, where that has a size."""

    kind: str
    reason: str
    excess: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Rejection:
        return cls(**data)


def without_queue(queues: Mapping[str, QueueState], wanted: Pool, catalogue: Catalogue) -> str | None:
    """Why none of them takes the pool, by the queue that is nearest to it; None: one does."""
    lacks = {name: lack_of(queue, wanted, catalogue) for name, queue in queues.items()}
    if None in lacks.values():
        return None
    near = next((name for name, queue in queues.items() if queue.market == wanted.market), None)
    if near is None:
        return f"no queue is {wanted.market.replace('_', '-')}"
    return f"{short_name(near)}: {lacks[near]}"


def short_name(queue: str) -> str:
    """A queue's name without the rest of its ARN."""
    return queue.rpartition("/")[2]


def lack_of(queue: QueueState, wanted: Pool, catalogue: Catalogue) -> str | None:
    """Why the queue cannot run the pool; None: it can."""
    if not queue.usable:
        return queue.problem or "not usable"
    if queue.fargate:
        return "Fargate, which has no GPUs"
    if queue.market != wanted.market:
        return f"{str(queue.market).replace('_', '-')}, of which the plan has no pool; its best is {wanted}"
    if wanted.nodes > 1 and wanted.market == "spot" and not queue.multi_node:
        return f"AWS Batch runs no job of several nodes on Spot, and {wanted} is one"
    if wanted.nodes > 1 and not queue.multi_node:
        return f"takes no job of several nodes, and {wanted} is one"
    if not takes(queue.instance_types, wanted.instance_type):
        listed = ", ".join(queue.instance_types)
        if any(one in BATCHS_CHOICE for one in queue.instance_types):
            family = wanted.instance_type.partition(".")[0]
            return (
                f"has {listed}: what AWS Batch chooses itself has no GPUs, and {wanted} is one of {family}, not listed"
            )
        return f"has {listed}, and {wanted} is none of them"
    most, needed = _most_vcpus(queue, wanted.instance_type), wanted.nodes * catalogue[wanted.instance_type].vcpu
    if most is not None and needed > most:
        return f"may have {most} vCPUs (maxvCpus of its compute environment), and {wanted} has {needed}"
    return None


def _most_vcpus(queue: QueueState, instance_type: str) -> int | None:
    """Of the largest compute environment that takes the type, since a job runs in one of them: beyond it a job waits in
    RUNNABLE for ever. None: no limit is known.
    """
    able = [one for one in queue.compute_environments if one.usable and takes(one.instance_types, instance_type)]
    limits = [one.max_vcpus for one in able] or [queue.max_vcpus]
    return None if None in limits else max(limit for limit in limits if limit is not None)


def takes(listed: Sequence[str], instance_type: str) -> bool:
    """Whether the type is listed, or its family (g5), or the beginning of its name within the family (p4d.24); what
    Batch chooses itself ("optimal") is none of the catalogue, whose types all have GPUs. Nothing listed: any."""
    return not listed or any(
        instance_type == one or instance_type.startswith(f"{one}.") or ("." in one and _begins(one, instance_type))
        for one in listed
    )


def _begins(listed: str, instance_type: str) -> bool:
    return instance_type.startswith(listed.removesuffix("*"))


@dataclass(frozen=True, kw_only=True)
class Progress:
    """done_steps: that a next start goes on from. spent_usd: so far. started_utc: Unix time of the first plan that led
    to a start, from which the deadline counts; None: the job begins now.
    """

    done_steps: int = 0
    spent_usd: float = 0.0
    started_utc: float | None = None


FROM_THE_START = Progress()


def progress_of(events: Sequence[Event]) -> Progress:
    """From a job's events, in any order. Raises LedgerError where no account can be made of them."""
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    generations = read_generations(ordered)
    if not generations:
        return FROM_THE_START
    kept = generations[max(generations)].kept[1]
    taken = max((event.step for event in ordered if event.name == STEP and event.step is not None), default=0)
    started = min(generation.started_wall for generation in generations.values())
    plans = [event.t_wall for event in ordered if event.name == PLAN and event.data.get("chosen")]
    before = [at for at in plans if at <= started]
    return Progress(
        done_steps=int(min(kept, taken)),
        spent_usd=spent_usd(ordered),
        started_utc=max(before) if before else started,
    )
