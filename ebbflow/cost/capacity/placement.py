"""Placements of a job's attempts on AWS Batch, the queues that can run each pool, and how earlier
attempts ended.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from ebbflow.core.event_payloads import (
    BatchAttemptPayload,
    BatchSubmittedPayload,
    GenerationEndedPayload,
    NodeStartedPayload,
    NoticePayload,
    PlacedPayload,
)
from ebbflow.core.events import Event, is_event, select_events
from ebbflow.cost.catalogue import Catalogue, InstanceType, load_catalogue
from ebbflow.cost.plan.plan import Plan
from ebbflow.cost.plan.pools import (
    Candidate,
    Pool,
    get_idle_seconds,
    short_queue_name,
    why_unusable,
)
from ebbflow.cost.plan_json import PriceJson
from ebbflow.cost.prices.quote import PRICE_KEYS, PoolPrice
from ebbflow.infra.batch.queues import accepts_type
from ebbflow.infra.notices import RECLAIMS

if TYPE_CHECKING:
    from ebbflow.infra.batch.jobs import BatchAttempt
    from ebbflow.infra.batch.queues import QueueState

# Memory that a job cannot have: 2.5 % for kernel and platform (8,192 MiB register as 7,985), 32 MiB
# for the ECS agent, and 5 % recommended for system processes. Source: AWS Batch user guide,
# "Compute resource memory management" and "Reserve system memory", read 2026-11. Processors are not
# reserved.
_KERNEL_SHARE = 0.025
_RESERVED_SHARE = 0.05
_AGENT_MIB = 32

RECLAIMED = "reclaimed"
USER_CODE = "user_code"
NEVER_STARTED = "never_started"
NOT_MADE = "not_made"
TERMINATED = "terminated"
ENDED = "ended"
UNKNOWN = "unknown"
_CORRECTABLE = (ENDED, UNKNOWN, USER_CODE, TERMINATED)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Queue, machines and limits of one attempt on AWS Batch, and the reason for this choice."""

    queue: str  # name or ARN of the queue
    market: str  # "spot" or "on_demand"
    instance_type: str
    # region, zone: region and zone of the price; AWS Batch chooses the actual zone
    region: str | None
    zone: str | None
    nodes: int
    processes_per_node: int
    # cpu, gpu, memory_mib: resources requested per node: all that one instance has
    cpu: int
    gpu: int
    memory_mib: int
    # time limit after which AWS Batch ends the attempt: the paid seconds that budget and deadline
    # allow, but at least 60
    wall_seconds: int
    runnable_seconds: (
        int  # longest wait for capacity. After it, the next attempt gets a new placement.
    )
    price: PoolPrice  # the plan's price of one node
    # expected_hours, expected_usd: the plan's forecast for the rest of the job if it stays in this
    # pool
    expected_hours: float
    expected_usd: float
    reason: str  # reason for this choice, as one line of text
    policy: str = ""  # name of the rule that chose the pool; "" after a failure of the user's code
    # Unix time by which the attempt must start. A later start would leave too little time to finish
    # on demand if the attempt fails. None means no limit.
    start_by_utc: float | None = None
    # id of the capacity reservation or Capacity Block that runs the attempt; None for other pools
    reservation: str | None = None
    # time and dollars that a Spot attempt reserves for finishing on demand, and the reservation to
    # which it moves (`ebbflow.core.terms.Fallback` as JSON). None if there is neither.
    fallback: dict[str, Any] | None = field(default=None, repr=False)
    # labels of the nodes of a pool of `kubernetes.pools`; None for a type of Amazon's
    node_selector: dict[str, str] | None = None

    @property
    def pool(self) -> str:
        """Id that `AttemptHistory` uses for the combination of queue, instance type and number of
        nodes.
        """
        return pool_id(self.queue, self.instance_type, self.nodes)

    @property
    def gang_usd_per_hour(self) -> float:
        """Dollars per hour of all nodes with their root volumes."""
        return self.price.node_usd_float * self.nodes

    def __str__(self) -> str:
        where = f"{self.nodes} × {self.instance_type} {self.market.replace('_', '-')}"
        return f"{where} in queue {short_queue_name(self.queue)}"

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        del data["price"]
        return {**data, **self.price.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Placement:
        """Build a placement from the result of `to_json`.

        Ignores unknown keys.

        Raises:
            KeyError: There is no price.
            TypeError: Another key is missing.
            ValueError: The price is invalid.
        """
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        known["price"] = PoolPrice.from_json(cast(PriceJson, data))
        return cls(**known)


@dataclass(frozen=True, kw_only=True)
class QueueOffer:
    """A pool, and an AWS Batch queue that can run it.

    AWS Batch chooses the zone. The offer therefore has the pool of the cheapest zone, which
    represents all zones.
    """

    candidate: Candidate
    queue: str

    @property
    def id(self) -> str:
        return pool_id(self.queue, self.candidate.instance_type, self.candidate.nodes)

    @property
    def is_spot(self) -> bool:
        return self.candidate.market == "spot"


def pool_id(queue: str, instance_type: str, nodes: int) -> str:
    return f"{short_queue_name(queue)}/{nodes}x{instance_type}"


def memory_mib(kind: InstanceType) -> int:
    """Return the memory of an instance that a job can request, in MiB."""
    left = (1 - _KERNEL_SHARE) * (1 - _RESERVED_SHARE)
    return math.floor(kind.ram_gib * 1024 * left) - _AGENT_MIB


@dataclass(frozen=True, kw_only=True)
class PastAttempt:
    """An earlier attempt: its placement, and how it ended.

    `created_utc`, `started_utc` and `stopped_utc` are Unix times from AWS Batch; None if not
    reached or unknown.
    """

    placement: Placement
    placed_utc: float
    job_id: str = ""
    # why the attempt ended according to AWS Batch, corrected by the agents' events. An attempt that
    # ended after a reclaim notice counts as reclaimed. A failure is attributed to the user's code
    # only if no agent reports another cause.
    cause: str = UNKNOWN
    reason: str = ""  # AWS Batch's text about the end, or ""
    # Who ended an attempt whose cause is "terminated": ebbflow, limit, operator or unknown
    terminated_by: str | None = None
    created_utc: float | None = None
    started_utc: float | None = None
    stopped_utc: float | None = None
    run: str = ""  # Metaflow run that placed the attempt
    # newest generation (start of the ranks) that was recorded when the attempt was placed. Newer
    # generations belong to this or to later attempts. Times cannot show this order, because clocks
    # may differ by minutes.
    after_generation: int = 0

    @property
    def refused(self) -> bool:
        """Whether the attempt never started because its pool had no capacity within the allowed
        time.
        """
        return self.cause == NEVER_STARTED or (
            self.cause == TERMINATED and self.started_utc is None
        )

    @property
    def ended_utc(self) -> float:
        """Unix time of the attempt's end.

        If the end is unknown, this is the latest known time of the attempt.
        """
        known = (self.placed_utc, self.created_utc, self.started_utc, self.stopped_utc)
        return max(moment for moment in known if moment is not None)


@dataclass(frozen=True, kw_only=True)
class AttemptHistory:
    """All attempts of a job, oldest first."""

    attempts: tuple[PastAttempt, ...] = ()

    @property
    def last(self) -> PastAttempt | None:
        if self.attempts:
            return self.attempts[-1]
        return None

    def latest_utc(self, now_utc: float) -> float:
        """Return `now_utc`, or the latest Unix time that AWS Batch reported for an attempt if that
        is later.
        """
        times = [
            attempt.stopped_utc or attempt.started_utc or attempt.created_utc
            for attempt in self.attempts
        ]
        return max([now_utc, *(moment for moment in times if moment is not None)])


def with_placement(plan: Plan, placement: Placement) -> Plan:
    """Return the plan with the placement's pool as the chosen pool, so that ledger and report use
    the pool's price.

    Raises KeyError if the pool is not among the plan's ranked pools.
    """
    read_pool = operator.attrgetter(*Pool.__dataclass_fields__)
    wanted = read_pool(placement)
    ours = next((candidate for candidate in plan.ranked if read_pool(candidate) == wanted), None)
    if ours is None:
        raise KeyError(f"{placement} is not among the {len(plan.ranked)} pools of the plan")
    others = tuple(candidate for candidate in plan.ranked if candidate is not ours)
    return replace(
        plan,
        ranked=(ours, *others),
        reserve_usd=ours.reserve_usd(
            plan.price_watch, plan.reserve_seconds, get_idle_seconds(plan.backend)
        ),
    )


def find_offers(
    ranked: Sequence[Candidate],
    queues: Mapping[str, QueueState],
    *,
    region: str | None = None,
    catalogue: Catalogue | None = None,
) -> tuple[QueueOffer, ...]:
    """Return one offer for each usable combination of queue, instance type and number of nodes, in
    the plan's order.

    Args:
        region: Region assumed for queues without a region. A queue runs only pools of its region;
            if the region is unknown (None), the queue runs pools of any region.
    """
    if catalogue is None:
        kinds = load_catalogue()
    else:
        kinds = catalogue
    found: dict[str, QueueOffer] = {}
    for candidate in ranked:
        for name, queue in queues.items():
            if (
                _is_there(candidate, queue.region or region)
                and why_unusable(queue, candidate, kinds) is None
            ):
                offer = QueueOffer(candidate=candidate, queue=name)
                found.setdefault(offer.id, offer)
    return tuple(found.values())


def explain_no_offer(
    ranked: Sequence[Candidate],
    queues: Mapping[str, QueueState],
    *,
    region: str | None = None,
    catalogue: Catalogue | None = None,
) -> str:
    """Explain for each queue why it cannot run any pool of the plan.

    Each explanation uses one pool as an example. This is the cheapest pool with the queue's market
    and instance types. If the plan has no such pool, it is the cheapest pool with the queue's
    market, else the cheapest pool of the plan.
    """
    if not queues:
        return "the account has no queue that training may go to"
    where = {queue.region or region for queue in queues.values()}
    here = [
        candidate for candidate in ranked if any(_is_there(candidate, place) for place in where)
    ]
    if not here:
        places = ", ".join(sorted(map(str, where)))
        return (
            f"the plan has no pool in {places}, where the queues are; fix: name it in cost.regions"
        )
    if catalogue is None:
        kinds = load_catalogue()
    else:
        kinds = catalogue
    lines = []
    for name, queue in queues.items():
        near = [candidate for candidate in here if candidate.market == queue.market] or here
        wanted = next(
            (
                candidate
                for candidate in near
                if accepts_type(queue.instance_types, candidate.instance_type)
            ),
            near[0],
        )
        lines.append(f"{short_queue_name(name)}: {why_unusable(queue, wanted, kinds)}")
    return "; ".join(lines)


def batch_attempt_data(attempt: BatchAttempt, placement: Placement | None) -> dict[str, Any]:
    """Return the data of a `batch_attempt` event: AWS Batch's description of a job, and the job's
    machines and price.

    Args:
        placement: Placement of the job; None if unknown.
    """
    names = ("instance_type", "market", "region", "zone", "processes_per_node")
    if placement is None:
        return {**asdict(attempt), **dict.fromkeys((*names, *PRICE_KEYS))}
    return {
        **asdict(attempt),
        **{name: getattr(placement, name) for name in names},
        **placement.price.to_json(),
    }


def read_attempts(events: Sequence[Event]) -> AttemptHistory:
    """Read a job's attempts from its events, in any order.

    The end of an attempt is read from the newest `batch_attempt` event of its AWS Batch job. If no
    event records which job was submitted, it is the job of the first `batch_attempt` event before
    the next placement. Unreadable placements are skipped.
    """
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    agents = _causes_from_agents(ordered)
    newest = {
        event.payload.job_id: event.payload for event in select_events(ordered, BatchAttemptPayload)
    }
    attempts: list[PastAttempt] = []
    jobs = _jobs_of_placements(ordered)
    reached = 0
    for event in select_events(ordered, PlacedPayload):
        placement = read_placement(event.payload)
        if placement is None:
            continue
        # A placement made without the job's events records no generation: use that of the placement
        # before it.
        reached = max(reached, event.payload.after_generation or 0)
        attempt = PastAttempt(
            placement=placement, placed_utc=event.t_wall, run=event.run, after_generation=reached
        )
        job_id = jobs.get(id(event), "")
        attempts.append(
            _with_end(attempt, job_id, newest[job_id], agents.get(job_id))
            if job_id in newest
            else attempt
        )
    return AttemptHistory(attempts=tuple(attempts))


def read_placement(placed: PlacedPayload) -> Placement | None:
    """Return the recorded placement; None if this version cannot read it."""
    if placed.placement is None:
        return None
    try:
        return Placement.from_json(placed.placement)
    except (KeyError, TypeError, ValueError):
        return None


def _is_there(candidate: Candidate, region: str | None) -> bool:
    return region is None or candidate.region in (None, region)


def _jobs_of_placements(ordered: Sequence[Event]) -> dict[int, str]:
    """Return the AWS Batch job id of each `placed` event, by the event's `id()`."""
    found: dict[int, str] = {}
    taken: set[str] = set()
    tries: dict[_Try, Event] = {}
    for event in ordered:
        if is_event(event, PlacedPayload):
            tries[_try(event)] = event
        elif is_event(event, BatchSubmittedPayload):
            job_id = str(event.payload.job_id)
            placed = tries.get(_try(event))
            if event.payload.twin_of != "":
                taken.add(job_id)  # a duplicate submit, which was ended
            elif placed is not None:
                found[id(placed)] = job_id
                taken.add(job_id)
    open_one: Event | None = None
    for event in ordered:
        if is_event(event, PlacedPayload):
            if id(event) in found:
                open_one = None
            else:
                open_one = event
        elif (
            is_event(event, BatchAttemptPayload)
            and open_one is not None
            and event.payload.job_id not in taken
        ):
            found[id(open_one)] = event.payload.job_id
            taken.add(event.payload.job_id)
            open_one = None
    return found


@dataclass(frozen=True)
class _Try:
    """Task of a flow step for which an attempt was placed and submitted."""

    run: str
    attempt: int
    step: int | None  # in fact its name: `Event.step`
    task: str | None


def _try(event: Event[PlacedPayload] | Event[BatchSubmittedPayload]) -> _Try:
    return _Try(event.run, event.attempt, event.step, event.payload.task)


def _with_end(
    attempt: PastAttempt, job_id: str, recorded: BatchAttemptPayload, better: str | None
) -> PastAttempt:
    cause = recorded.cause or UNKNOWN
    if better is not None and cause in (
        _CORRECTABLE if better == RECLAIMED else (USER_CODE, UNKNOWN)
    ):
        cause = better
    return replace(
        attempt,
        job_id=job_id,
        cause=cause,
        reason=recorded.reason or "",
        terminated_by=recorded.terminated_by if cause == TERMINATED else None,
        created_utc=_moment(recorded.created_utc),
        started_utc=_moment(recorded.started_utc),
        stopped_utc=_moment(recorded.stopped_utc),
    )


def _causes_from_agents(events: Sequence[Event]) -> dict[str, str]:
    """Read from the agents' events why AWS Batch jobs ended, by job id.

    A cause is, for example, a reclaim notice, or an error of the user's code that ended the job's
    last generation.
    """
    jobs: dict[int, set[str]] = {}
    for event in select_events(events, NodeStartedPayload):
        if event.payload.batch_job_id:
            jobs.setdefault(event.generation, set()).add(event.payload.batch_job_id)
    newest: dict[str, int] = {}
    for generation in sorted(jobs):
        newest.update(dict.fromkeys(jobs[generation], generation))
    found: dict[str, str] = {}
    for event in select_events(events, GenerationEndedPayload):
        if event.payload.user_code is not None:
            ended = [
                job_id
                for job_id in jobs.get(event.generation, ())
                if newest[job_id] == event.generation
            ]
            found |= dict.fromkeys(ended, USER_CODE if event.payload.user_code else UNKNOWN)
    for event in select_events(events, NoticePayload):
        if event.payload.action in RECLAIMS:
            found |= dict.fromkeys(jobs.get(event.generation, ()), RECLAIMED)
    return found


def _moment(value: float | None) -> float | None:
    return None if value is None else float(value)
