"""The placement of one attempt: prices, past attempts and remaining work decide on a queue, or on a reason for none."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ebbflow.flows import pods
from ebbflow.flows.attempts.order import AttemptName, Order
from ebbflow.flows.attempts.settlement import settle
from ebbflow.flows.job import Job
from ebbflow.flows.steps import read_job_history
from ebbflow.infra.aws.calls import within
from ebbflow.infra.errors import JobIsRunning, Outcome
from ebbflow.infra.events import COMMIT, PLACED, PLAN, Event, read_events
from ebbflow.infra.footprint import ModelShape
from ebbflow.infra.program import PROJECT_ROOT

if TYPE_CHECKING:
    from ebbflow.cost.capacity import AttemptHistory, PastAttempt, Placement
    from ebbflow.cost.plan.plan import Plan
    from ebbflow.infra.batch import QueueState
    from ebbflow.infra.event_log import EventLog


DEADLINE_SECONDS = 60.0
PLANNED_SECONDS = 30.0  # more, where it is by the plan of the run
_REQUEST_SECONDS = 20.0
# Attempts in a row that came to nothing and that no machine's loss explains: another would come to nothing as well.
_MOST_IN_VAIN = 5
_MOST_NEVER_MADE = 2  # no container was ever made, and not for want of capacity: as without its image


@dataclass(frozen=True, kw_only=True)
class Ask:
    """An attempt that is to be placed. flow: the artifacts that the step will find (`job`, `settings`, `capacity` …).

    round: of `train_node`, counted from 1. one_node: the step cannot be a gang. last: Metaflow tries no further.
    backend: batch or kubernetes. abandoned: nobody waits for the answer any more, so that none may be left behind.
    """

    flow: SimpleNamespace
    name: AttemptName
    round: int
    one_node: bool
    last: bool
    backend: str = "batch"
    abandoned: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """trouble: why it was not decided afresh; order is then by the plan of the run, or None where not even that could
    be done.
    """

    order: Order | None = None
    trouble: str = ""


def place_attempt(ask: Ask, *, deadline_seconds: float = DEADLINE_SECONDS) -> Answer:
    """A store or a service that hangs holds up nobody: afresh within the deadline, else by the plan of the run within
    30 s more."""
    try:
        return Answer(order=within(deadline_seconds, lambda: _order(ask), "placing"))
    except JobIsRunning:  # the run ends: another launcher has taken the job over
        raise
    except Exception as error:  # whatever it is, a hook that raises would end the run
        trouble = f"{type(error).__name__}: {error}"
    ask.abandoned.set()
    again = replace(ask, abandoned=threading.Event())
    try:
        return Answer(order=within(PLANNED_SECONDS, lambda: _as_planned(again), "placing"), trouble=trouble)
    except Exception as error:
        again.abandoned.set()
        return Answer(trouble=f"{trouble}; nor by the plan of the run: {type(error).__name__}: {error}")


def _order(ask: Ask) -> Order:
    from ebbflow.cost.capacity import read_attempts
    from ebbflow.cost.errors import CostError
    from ebbflow.infra.batch import batch_client, training_queues

    job, on_batch = _job(ask), ask.backend == "batch"
    config = job.config
    client = batch_client(config.batch.region) if on_batch else None
    with job.events(_process(ask)) as log:
        events = read_events(job.store)
        events += settle(job, events, client, log) if on_batch else []
        history = read_attempts(events)
        comes = config.cost.deadline_hours is not None
        if said := in_vain(history, events, run=job.run, on_demand_comes=comes):
            return _ordered(job, ask, Order(does="stop", outcome=said[0].value, message=said[1]))
        plan = fresh_plan(job, events, ask.flow.examined)
        queues = training_queues(config.batch, client) if on_batch else pods.markets()
        try:
            newest = max((event.generation for event in events), default=0)
            return _placed(ask, job, log, plan, history, queues, after_generation=newest)
        except CostError as error:
            return _ordered(job, ask, Order(does="stop", outcome=error.outcome.value, message=str(error)))


def _as_planned(ask: Ask) -> Order:
    """Where Batch, prices or events cannot be asked: by the plan of the run and the queues as they are configured.

    Raises where that cannot be either, CostError among others: what little is known then is no reason to stop a job.
    """
    from ebbflow.cost.capacity import AttemptHistory
    from ebbflow.cost.plan.plan import Plan
    from ebbflow.infra.batch import declared_queues

    job = _job(ask)
    queues = declared_queues(job.config.batch) if ask.backend == "batch" else pods.markets()
    with job.events(_process(ask)) as log:
        return _placed(ask, job, log, Plan.from_json(ask.flow.capacity), AttemptHistory(), queues)


def _job(ask: Ask) -> Job:
    """With the configuration as it holds where the attempt is to run."""
    from ebbflow.infra.batch import in_queues_region

    job = replace(Job.of(ask.flow, ask.name.run), request_seconds=_REQUEST_SECONDS)
    if ask.backend == "batch":
        return replace(job, config=in_queues_region(job.config, told=False))
    return replace(job, config=pods.with_nodes(job.config, ask.flow.num_nodes))


def _process(ask: Ask) -> str:
    return f"placing-{ask.name.step}-{ask.name.task}-{ask.name.attempt}"


def _placed(
    ask: Ask,
    job: Job,
    log: EventLog,
    plan: Plan,
    history: AttemptHistory,
    queues: Mapping[str, QueueState],
    *,
    after_generation: int = 0,
) -> Order:
    """Raises CostError where none of the queues will do, or none of the limits. after_generation: the newest known."""
    from ebbflow.cost.capacity import choose_placement

    placed = choose_placement(job.config, plan=plan, history=history, queues=queues, now_utc=time.time())
    order = shaped(ask, plan, placed)
    _still_wanted(ask)
    if order.does == "train":
        log.origin = replace(log.origin, attempt=ask.name.attempt)
        log.emit(PLAN, **(order.plan or {}))
        told = {"attempt": ask.name.attempt, "round": ask.round, "step": ask.name.step, "task": ask.name.task}
        told["after_generation"] = after_generation
        log.emit(PLACED, placement=order.placement, why=placed.reason, **told)
    return _ordered(job, ask, order)


def _ordered(job: Job, ask: Ask, order: Order) -> Order:
    _still_wanted(ask)
    order.put(job.store, ask.name)
    return order


def _still_wanted(ask: Ask) -> None:
    """What is decided too late must not be found by a container that was placed otherwise."""
    if ask.abandoned.is_set():
        raise TimeoutError("nobody waits any more")


def shaped(ask: Ask, plan: Plan, placed: Placement) -> Order:
    """What the step can do with a placement: a single node cannot become a gang within its own step."""
    from ebbflow.cost.capacity import with_placement

    shape = {"nodes": placed.nodes, "processes_per_node": placed.processes_per_node}
    if ask.one_node and placed.nodes > 1:
        return Order(does="gang", **shape)
    if ask.one_node and ask.last:  # Metaflow tries no further, and another round counts anew
        return Order(does="again", **shape)
    return Order(does="train", placement=placed.to_json(), plan=with_placement(plan, placed).brief().to_json(), **shape)


def fresh_plan(job: Job, events: Sequence[Event], examined: dict[str, Any] | None) -> Plan:
    """Of the work that is left, at the prices of now."""
    from ebbflow.cost.plan.candidates import read_progress
    from ebbflow.cost.plan.plan import make_plan
    from ebbflow.cost.prices.source import open_prices

    now = time.time()
    measured = {} if examined is None else {"shape": ModelShape.from_json(examined["shape"])}
    prices = open_prices(job.config, now, project_root=PROJECT_ROOT)
    known = {"history": read_job_history(job), "progress": read_progress(events)}
    return make_plan(job.config, now_utc=now, prices=prices, **known, **measured)


def in_vain(
    history: AttemptHistory, events: Sequence[Event], *, run: str, on_demand_comes: bool = False
) -> tuple[Outcome, str] | None:
    """The outcome and the words for a job whose last attempts all came to nothing; None while there is hope.

    run: whose attempts count, since whoever starts another run may have mended what those before it came to nothing by.
    One that was placed before the newest commit's generation began led to something, and the loss of a machine is
    nobody's failure. on_demand_comes: a deadline ends the waiting for Spot, however often there is none.
    """
    committed = max((event.generation for event in events if event.name == COMMIT), default=0)

    def is_vain(one: PastAttempt) -> bool:
        gained = one.run != run or one.after_generation < committed
        return not gained and (one.refused or one.cause in ("user_code", "unknown", "not_made"))

    last = list(itertools.takewhile(is_vain, reversed(history.attempts)))
    if on_demand_comes and last and all(one.refused and one.placement.market == "spot" for one in last):
        return None
    never = all(one.started_utc is None for one in last)
    unmakeable = never and all(one.cause in ("user_code", "not_made") for one in last)
    if len(last) < (_MOST_NEVER_MADE if unmakeable else _MOST_IN_VAIN):
        return None
    words = ", ".join(sorted({f"{one.placement}: {one.cause.replace('_', ' ')}" for one in last}))
    outcome = Outcome.NO_CAPACITY if never and not unmakeable else Outcome.FAILED
    said = f"; AWS Batch of the last one: {last[0].reason}" if last[0].reason else ""
    return outcome, f"{len(last)} attempts in a row came to nothing ({words}), and another would as well{said}"


def said_of(order: Order) -> str:
    """One line for the run's log."""
    if order.does == "stop":
        return f"no further attempt: {order.outcome}: {order.message}"
    if order.does == "gang":
        return f"goes on as a gang of {order.nodes} nodes"
    if order.does == "again":
        return "goes round again, since this was the step's last attempt"
    placement = order.placement or {}
    return (
        f"{placement.get('nodes')} × {placement.get('instance_type')} {str(placement.get('market')).replace('_', '-')} "
        f"in queue {str(placement.get('queue')).rpartition('/')[2]}: {placement.get('reason')}"
    )
