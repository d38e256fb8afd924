"""Choose a queue for one attempt from prices, past attempts and the remaining work, or give a
reason to stop.

Placing an attempt blocks Metaflow's scheduler, so it has time limits. `place_attempt` raises only
`JobIsRunning`, if another launcher has taken over the job.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ebbflow.core.errors import JobIsRunning, Outcome
from ebbflow.core.events import COMMIT, PLACED, PLAN, Event, read_events
from ebbflow.core.footprint import ModelShape
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.flows import pods
from ebbflow.flows.attempts.order import AttemptName, AttemptOrder
from ebbflow.flows.attempts.settlement import settle_attempts
from ebbflow.flows.job import (
    CLOCK_TOLERANCE_SECONDS,
    ClockReading,
    FlowSettings,
    Job,
    read_job_history,
)
from ebbflow.flows.team_budget import restore_reservation
from ebbflow.infra.aws.calls import within

if TYPE_CHECKING:
    from ebbflow.core.event_log import EventLog
    from ebbflow.cost.capacity import AttemptHistory, PastAttempt, Placement
    from ebbflow.cost.plan.plan import Plan
    from ebbflow.cost.prices.reservations import CapacityEvidence, Reservation
    from ebbflow.infra.batch import QueueState

DEADLINE_SECONDS = 60.0
PLANNED_SECONDS = 30.0  # for the second try, which uses the run's plan
_REQUEST_SECONDS = 20.0
# This many failed attempts in a row, without a lost machine, end the job: another would fail too.
_MOST_IN_VAIN = 5
_FAILED_CAUSES = ("user_code", "unknown", "not_made")
_MOST_TERMINATED = 3  # attempts in a row that were ended from outside, by an unknown author
_MOST_NEVER_MADE = 2  # attempts with capacity but without a container, such as with a missing image


@dataclass(kw_only=True)
class AttemptArtifacts:
    """Metaflow artifacts that the attempt's step will read."""

    job: str
    settings: FlowSettings
    capacity: dict  # the run's plan as JSON
    examined: dict | None  # shape and data of the user's own workload
    rounds: int  # of `train_node` so far
    num_nodes: int


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """Request to choose where one attempt runs."""

    flow: AttemptArtifacts
    name: AttemptName
    round: int  # number of the round of `train_node`, from 1
    one_node: bool  # the step is `train_node`, which cannot run a gang of several nodes
    last: bool  # the attempt is the last one that Metaflow allows
    backend: str = "batch"  # "batch" or "kubernetes"
    # set once the deadline has passed; a placement that is found later must not write its order
    abandoned: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class PlacementResult:
    """Result of placing an attempt: its order (where and how to train), or the reason why there is
    no order.
    """

    # The attempt's order; None if the attempt could not be placed
    order: AttemptOrder | None = None
    trouble: str = ""  # why there is no order, or only one from the run's plan; "" without trouble


def place_attempt(
    request: PlacementRequest, *, deadline_seconds: float = DEADLINE_SECONDS
) -> PlacementResult:
    """Choose a queue for an attempt at current prices.

    If this fails or takes too long, choose a pool from the plan that the run made at its start,
    within another 30 s. Raises JobIsRunning if another launcher has taken over the job.
    """
    try:
        return PlacementResult(
            order=within(deadline_seconds, lambda: _place_afresh(request), "placing")
        )
    except JobIsRunning:  # another launcher has taken over the job, so this run ends
        raise
    except Exception as error:  # a hook that raises would end the run
        trouble = f"{type(error).__name__}: {error}"
    request.abandoned.set()
    again = replace(request, abandoned=threading.Event())
    try:
        return PlacementResult(
            order=within(PLANNED_SECONDS, lambda: _place_by_run_plan(again), "placing"),
            trouble=trouble,
        )
    except Exception as error:
        again.abandoned.set()
        return PlacementResult(
            trouble=f"{trouble}; nor by the plan of the run: {type(error).__name__}: {error}"
        )


def make_order(request: PlacementRequest, plan: Plan, placed: Placement) -> AttemptOrder:
    """Convert a placement to an order for the attempt (see `AttemptOrder.does`).

    The step `train_node` cannot run several nodes. If the placement has several nodes, the order is
    "next", so that the step `train` runs them. It is also "next" for the last attempt that Metaflow
    allows `train_node`: the flow then runs the step once more, and Metaflow counts its attempts
    from 0.
    """
    from ebbflow.cost.capacity import with_placement

    nodes = placed.nodes
    processes_per_node = placed.processes_per_node
    if request.one_node and nodes > 1:
        return AttemptOrder.hand_on(placed, f"continues as a gang of {nodes} nodes")
    if request.one_node and request.last:
        return AttemptOrder.hand_on(
            placed, "another round, since this was the last attempt that Metaflow allows"
        )
    return AttemptOrder(
        nodes=nodes,
        processes_per_node=processes_per_node,
        placement=placed,
        plan=with_placement(plan, placed).brief(),
    )


def make_fresh_plan(
    job: Job,
    events: Sequence[Event],
    examined: dict | None,
    now: float,
    evidence: CapacityEvidence,
) -> Plan:
    from ebbflow.cost.plan.candidates import read_progress
    from ebbflow.cost.plan.plan import make_plan
    from ebbflow.cost.prices.source import open_prices

    return make_plan(
        job.config,
        now_utc=now,
        shape=None if examined is None else ModelShape.from_json(examined["shape"]),
        prices=open_prices(job.config, now, project_root=PROJECT_ROOT),
        history=read_job_history(job),
        progress=read_progress(events, run=job.run),
        evidence=evidence,
    )


def give_up_reason(
    history: AttemptHistory, events: Sequence[Event], *, run: str, on_demand_comes: bool = False
) -> tuple[Outcome, str] | None:
    """Return the outcome and message for ending the job after too many failed attempts in a row,
    else None.

    An attempt does not count as failed if a commit followed it, if its machine was lost, or if it
    belongs to a run other than `run`, because a new run may have fixed the cause.

    Args:
        on_demand_comes: Whether a deadline will move the job to on-demand. If so, refused attempts
            on Spot and in reservations do not count.
    """
    committed = max((event.generation for event in events if event.name == COMMIT), default=0)

    def failed(attempt: PastAttempt) -> bool:
        gained = attempt.run != run or attempt.after_generation < committed
        return not gained and (attempt.refused or attempt.cause in _FAILED_CAUSES)

    def counts(attempt: PastAttempt) -> bool:
        placement = attempt.placement
        before_on_demand = placement.market == "spot" or placement.reservation is not None
        return not (on_demand_comes and attempt.refused and before_on_demand)

    last = list(filter(counts, itertools.takewhile(failed, reversed(history.attempts))))
    none_started = all(attempt.refused or attempt.started_utc is None for attempt in last)
    causes = {attempt.cause for attempt in last}
    no_container = none_started and causes <= {"user_code", "not_made"}
    if len(last) < (_MOST_NEVER_MADE if no_container else _MOST_IN_VAIN):
        return None
    described = {f"{attempt.placement}: {attempt.cause.replace('_', ' ')}" for attempt in last}
    words = ", ".join(sorted(described))
    if none_started and not no_container:
        outcome = Outcome.NO_CAPACITY
    else:
        outcome = Outcome.FAILED
    if last[0].reason:
        batch_reason = f"; the last one: {last[0].reason}"
    else:
        batch_reason = ""
    return (
        outcome,
        f"{len(last)} attempts in a row failed ({words}), and another would too{batch_reason}",
    )


def operator_stop_reason(history: AttemptHistory, *, run: str) -> str:
    """Return why the run must end because an operator ended its newest attempts, or "".

    One termination by an operator suffices. If the backend does not tell who ended an attempt, the
    third in a row counts as an operator's. Commits in between do not matter.
    """
    mine = [attempt for attempt in history.attempts if attempt.run == run]
    if not mine:
        return ""
    last = mine[-1]
    if last.terminated_by == "operator":
        return f"{last.job_id} was terminated by an operator ({last.reason or 'no reason given'})"
    unknown = list(
        itertools.takewhile(lambda attempt: attempt.terminated_by == "unknown", reversed(mine))
    )
    if len(unknown) < _MOST_TERMINATED:
        return ""
    return (
        f"{len(unknown)} attempts in a row were ended from outside of the run, the last one "
        f"{last.job_id} ({last.reason or 'no reason given'})"
    )


def describe_order(order: AttemptOrder) -> str:
    if order.does == "stop":
        return f"no further attempt: {order.outcome}: {order.message}"
    if order.does == "next":
        return order.message
    assert order.placement is not None  # an order to train has one
    return f"{order.placement}: {order.placement.reason}"


def _place_afresh(request: PlacementRequest) -> AttemptOrder:
    from ebbflow.cost.capacity import read_attempts
    from ebbflow.cost.errors import CostError
    from ebbflow.cost.prices.reservations import open_evidence
    from ebbflow.infra.batch import batch_client, training_queues
    from ebbflow.infra.kubernetes.cluster import Cluster, open_cluster

    job = _job(request)
    on_batch = request.backend == "batch"
    config = job.config
    if on_batch:
        client = batch_client(config.batch.region)
    else:
        client = open_cluster()
    with job.events(_process(request)) as log:
        events = read_events(job.store)
        events += settle_attempts(job, events, client, log)
        history = read_attempts(events)
        comes = config.cost.deadline_hours is not None
        stopped = operator_stop_reason(history, run=job.run)
        if stopped:
            return _put_order(job, request, AttemptOrder.stop(Outcome.INTERRUPTED, stopped))
        ending = give_up_reason(history, events, run=job.run, on_demand_comes=comes)
        if ending is not None:
            return _put_order(job, request, AttemptOrder.stop(*ending))
        unreserved = restore_reservation(job.root_store, job.name, config)
        if unreserved:
            return _put_order(job, request, AttemptOrder.stop(Outcome.BUDGET, unreserved))
        clock = ClockReading.of(job.store)
        now = history.latest_utc(clock.utc)
        evidence = open_evidence(config)
        plan = make_fresh_plan(job, events, request.flow.examined, now, evidence)
        if isinstance(client, Cluster):
            queues = pods.pod_markets()
        else:
            queues = training_queues(config.batch, client)
        try:
            inputs = _PlacementInputs(
                plan=plan,
                history=history,
                queues=queues,
                clock=clock,
                held=evidence.held,
                newest_generation=max((event.generation for event in events), default=0),
            )
            return _place(request, job, log, inputs)
        except CostError as error:
            return _put_order(job, request, AttemptOrder.stop(error.outcome, str(error)))


def _place_by_run_plan(request: PlacementRequest) -> AttemptOrder:
    """Choose a queue from the run's plan and the configured queues, without querying Batch, prices
    or events.

    The caller must not stop the job because of an error raised here, even a CostError, since the
    function ignores current information.
    """
    from ebbflow.cost.capacity import AttemptHistory
    from ebbflow.cost.plan.plan import Plan
    from ebbflow.infra.batch import declared_queues

    job = _job(request)
    unreserved = restore_reservation(job.root_store, job.name, job.config)
    if unreserved:
        return _put_order(job, request, AttemptOrder.stop(Outcome.BUDGET, unreserved))
    if request.backend == "batch":
        queues = declared_queues(job.config.batch)
    else:
        queues = pods.pod_markets()
    with job.events(_process(request)) as log:
        inputs = _PlacementInputs(
            plan=Plan.from_json(request.flow.capacity),
            history=AttemptHistory(),
            queues=queues,
            clock=ClockReading.of(job.store),
        )
        return _place(request, job, log, inputs)


def _job(request: PlacementRequest) -> Job:
    from ebbflow.infra.batch import limit_to_queue_region

    job = replace(Job.of(request.flow, request.name.run), request_seconds=_REQUEST_SECONDS)
    if request.backend == "batch":
        return replace(job, config=limit_to_queue_region(job.config, only_if_set=False))
    return replace(job, config=job.config.changed("cluster", nodes=request.flow.num_nodes))


def _process(request: PlacementRequest) -> str:
    return f"placing-{request.name.step}-{request.name.task}-{request.name.attempt}"


@dataclass(frozen=True, kw_only=True)
class _PlacementInputs:
    """Inputs for the choice of a pool (instance type, nodes, market and place)."""

    plan: Plan
    history: AttemptHistory
    queues: Mapping[str, QueueState]
    clock: ClockReading
    held: Sequence[Reservation] | None = None  # reservations of the account; None: unknown
    # `give_up_reason` needs it to find later commits
    newest_generation: int = 0


def _place(
    request: PlacementRequest, job: Job, log: EventLog, inputs: _PlacementInputs
) -> AttemptOrder:
    """Choose a pool, record the plan and the placement as events, and put the attempt's order into
    the store.

    Raises CostError if no queue can run the job, or the job's limits allow no further attempt.
    """
    from ebbflow.cost.capacity import choose_placement

    placed = choose_placement(
        job.config,
        plan=inputs.plan,
        history=inputs.history,
        queues=inputs.queues,
        now_utc=inputs.clock.utc,
        held=inputs.held,
    )
    placed = _in_launcher_time(placed, inputs)
    order = make_order(request, inputs.plan, placed)
    attempt_plan = order.plan
    _refuse_if_abandoned(request)
    if attempt_plan is not None:
        log.origin = replace(log.origin, attempt=request.name.attempt)
        log.emit(PLAN, **attempt_plan.to_json())
        log.emit(
            PLACED,
            step=request.name.step,
            placement=placed.to_json(),
            why=placed.reason,
            attempt=request.name.attempt,
            round=request.round,
            task=request.name.task,
            after_generation=inputs.newest_generation,
        )
    return _put_order(job, request, order)


def _in_launcher_time(placed: Placement, inputs: _PlacementInputs) -> Placement:
    """Convert the placement's times to this machine's clock, which the submitting process uses.

    The placement's reason says so if that clock is wrong.
    """
    clock = inputs.clock
    batch_ahead = inputs.history.latest_utc(clock.utc) - clock.own_utc
    ahead = max(batch_ahead, clock.ahead_seconds, key=abs)
    if abs(ahead) <= CLOCK_TOLERANCE_SECONDS:
        return placed
    direction = "behind" if ahead > 0 else "ahead of"
    reason = (
        f"the launcher's clock is {abs(ahead) / 60:.1f} min {direction} the store's or AWS "
        f"Batch's, and times are corrected; {placed.reason}"
    )
    if placed.start_by_utc is None:
        return replace(placed, reason=reason)
    return replace(placed, reason=reason, start_by_utc=placed.start_by_utc - ahead)


def _put_order(job: Job, request: PlacementRequest, order: AttemptOrder) -> AttemptOrder:
    _refuse_if_abandoned(request)
    order.put(job.store, request.name)
    return order


def _refuse_if_abandoned(request: PlacementRequest) -> None:
    """Raise TimeoutError if the deadline for this placement has passed.

    The scheduler may have written another order meanwhile.
    """
    if request.abandoned.is_set():
        raise TimeoutError("the deadline for this placement has passed")
