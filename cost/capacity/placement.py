"""Placement"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from ebbflow.cost.catalogue import Catalogue, InstanceType, load_catalogue
from ebbflow.cost.plan.candidates import Candidate, accepts_type, short_queue_name, why_unusable
from ebbflow.cost.plan.plan import Plan
from ebbflow.infra.events import BATCH_ATTEMPT, BATCH_SUBMITTED, GENERATION_ENDED, NODE_STARTED, NOTICE, PLACED, Event
from ebbflow.infra.notices import RECLAIMS

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
        return f"{where} in queue {short_queue_name(self.queue)}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Placement:
        """The inverse of `to_json`. Keys of later versions are passed over. Raises TypeError where one is missing."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


def pool_id(queue: str, instance_type: str, nodes: int) -> str:
    return f"{short_queue_name(queue)}/{nodes}x{instance_type}"


def memory_mib(kind: InstanceType) -> int:
    """Of an instance, as far as a job can have it."""
    left = (1 - _KERNEL_SHARE) * (1 - _RESERVED_SHARE)
    return math.floor(kind.ram_gib * 1024 * left) - _AGENT_MIB


def with_placement(plan: Plan, placement: Placement) -> Plan:
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
class QueueOffer:
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


def find_offers(
    ranked: Sequence[Candidate],
    queues: Mapping[str, QueueState],
    *,
    region: str | None = None,
    catalogue: Catalogue | None = None,
) -> tuple[QueueOffer, ...]:
    """In the plan's order, each type, size and queue once. region: where the queues are; None: not known."""
    kinds = load_catalogue() if catalogue is None else catalogue
    found: dict[str, QueueOffer] = {}
    for one in ranked:
        if region is not None and one.region not in (None, region):
            continue
        for name, queue in queues.items():
            if why_unusable(queue, one, kinds) is None:
                offer = QueueOffer(candidate=one, queue=name)
                found.setdefault(offer.id, offer)
    return tuple(found.values())


def explain_no_offer(
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
        wanted = next((one for one in near if accepts_type(queue.instance_types, one.instance_type)), near[0])
        lines.append(f"{short_queue_name(name)}: {why_unusable(queue, wanted, kinds)}")
    return "; ".join(lines)


RECLAIMED, USER_CODE, NEVER_STARTED, NOT_MADE, TERMINATED, ENDED, UNKNOWN = (
    "reclaimed",
    "user_code",
    "never_started",
    "not_made",
    "terminated",
    "ended",
    "unknown",
)

_TOLD_BETTER = (ENDED, UNKNOWN, USER_CODE, TERMINATED)


@dataclass(frozen=True, kw_only=True)
class PastAttempt:
    """One placement and what came of it. Unix times by Batch's clock; None: it did not come to that, or nobody told.

    run: of the flow that placed it. after_generation: the newest start of the gang that whoever placed it knew of; what
    a later one committed came after. Generations have one authority, and clocks are minutes apart.
    cause: as Batch tells it, except that an attempt that left on a reclaim's notice counts as reclaimed, that it is not
    the user's code that failed where the agents name something else, such as the store, and that it is where they name
    it and Batch names nothing. reason: Batch's own words, "" without any.
    """

    placement: Placement
    placed_utc: float
    job_id: str = ""
    cause: str = UNKNOWN
    reason: str = ""
    created_utc: float | None = None
    started_utc: float | None = None
    stopped_utc: float | None = None
    run: str = ""
    after_generation: int = 0

    @property
    def refused(self) -> bool:
        """Its pool had no capacity for as long as the job was let wait."""
        return self.cause == NEVER_STARTED or (self.cause == TERMINATED and self.started_utc is None)

    @property
    def ended_utc(self) -> float:
        """When it was known what came of it, as far as that was told."""
        known = (self.placed_utc, self.created_utc, self.started_utc, self.stopped_utc)
        return max(moment for moment in known if moment is not None)


@dataclass(frozen=True, kw_only=True)
class AttemptHistory:
    """All attempts of a job so far, oldest first."""

    attempts: tuple[PastAttempt, ...] = ()

    @property
    def last(self) -> PastAttempt | None:
        return self.attempts[-1] if self.attempts else None


def batch_attempt_data(attempt: Any, placement: Placement | None) -> dict[str, Any]:
    """The data of a `batch_attempt` event: what Batch told of a job (`infra.batch.attempts.BatchAttempt`), and where it
    was placed, so that the ledger can price it. placement: None where nobody knows."""
    told = asdict(attempt) if is_dataclass(attempt) and not isinstance(attempt, type) else dict(attempt)
    told["cause"] = str(told.get("cause") or UNKNOWN)
    placed = {} if placement is None else placement.to_json()
    names = ("instance_type", "market", "region", "zone", "processes_per_node", "usd_per_hour", "quoted_usd_per_hour")
    return {**told, **{name: placed.get(name) for name in (*names, "price_kind")}}


def read_attempts(events: Sequence[Event]) -> AttemptHistory:
    """From a job's events, in any order.

    What came of a placement is told of the job that was submitted for it; where no submit was recorded, it is the first
    `batch_attempt` that follows it and comes before the next one. Of a job that was told of twice the last word counts.
    A placement that this version cannot read is passed over.
    """
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    better = _as_agents_tell(ordered)
    newest = {str(event.data.get("job_id")): event.data for event in ordered if event.name == BATCH_ATTEMPT}
    attempts: list[PastAttempt] = []
    jobs = _jobs_of_placements(ordered)
    reached = 0
    for event in ordered:
        if event.name != PLACED or (placement := _placement(event.data)) is None:
            continue
        # One that was placed by the plan of the run, without the events, came no earlier than those before it.
        reached = max(reached, int(event.data.get("after_generation") or 0))
        attempt = PastAttempt(placement=placement, placed_utc=event.t_wall, run=event.run, after_generation=reached)
        job_id = jobs.get(id(event), "")
        attempts.append(
            _with_word(attempt, job_id, newest[job_id], better.get(job_id)) if job_id in newest else attempt
        )
    return AttemptHistory(attempts=tuple(attempts))


def _jobs_of_placements(ordered: Sequence[Event]) -> dict[int, str]:
    """Batch's job by the `id` of its `placed` event."""
    found: dict[int, str] = {}
    taken: set[str] = set()
    tries: dict[tuple[Any, ...], Event] = {}
    for event in ordered:
        if event.name == PLACED:
            tries[_try(event)] = event
        elif event.name == BATCH_SUBMITTED and "twin_of" in event.data:
            taken.add(str(event.data.get("job_id")))  # ended, since nobody waited for it: nothing came of it
        elif event.name == BATCH_SUBMITTED and (placed := tries.get(_try(event))) is not None:
            found[id(placed)] = str(event.data.get("job_id"))
            taken.add(found[id(placed)])
    open_one: Event | None = None
    for event in ordered:
        if event.name == PLACED:
            open_one = None if id(event) in found else event
        elif event.name == BATCH_ATTEMPT and open_one is not None and str(event.data.get("job_id")) not in taken:
            found[id(open_one)] = str(event.data.get("job_id"))
            taken.add(found[id(open_one)])
            open_one = None
    return found


def _try(event: Event) -> tuple[Any, ...]:
    return event.run, event.attempt, event.data.get("step"), event.data.get("task")


def _with_word(attempt: PastAttempt, job_id: str, data: Mapping[str, Any], better: str | None) -> PastAttempt:
    cause = str(data.get("cause") or UNKNOWN)
    if better is not None and cause in (_TOLD_BETTER if better == RECLAIMED else (USER_CODE, UNKNOWN)):
        cause = better
    times = {name: _moment(data.get(name)) for name in ("created_utc", "started_utc", "stopped_utc")}
    return replace(attempt, job_id=job_id, cause=cause, reason=str(data.get("reason") or ""), **times)


def _as_agents_tell(events: Sequence[Event]) -> dict[str, str]:
    """By job, what Batch cannot know of an attempt that left with a code: its machine was to be taken back, or the last
    generation was ended by something else than the program, which is no bug."""
    jobs: dict[int, set[str]] = {}
    for event in events:
        if event.name == NODE_STARTED and event.data.get("batch_job_id"):
            jobs.setdefault(event.generation, set()).add(str(event.data["batch_job_id"]))
    newest = {job_id: generation for generation in sorted(jobs) for job_id in jobs[generation]}
    found: dict[str, str] = {}
    for event in events:
        if event.name == GENERATION_ENDED and "user_code" in event.data:
            ended = [job_id for job_id in jobs.get(event.generation, ()) if newest[job_id] == event.generation]
            found |= dict.fromkeys(ended, USER_CODE if event.data["user_code"] else UNKNOWN)
    for event in events:
        if event.name == NOTICE and event.data.get("action") in RECLAIMS:
            found |= dict.fromkeys(jobs.get(event.generation, ()), RECLAIMED)
    return found


def _placement(data: Mapping[str, Any]) -> Placement | None:
    try:
        return Placement.from_json(data["placement"])
    except (KeyError, TypeError):
        return None


def _moment(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
