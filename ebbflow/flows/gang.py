"""The steps `train` and `train_node`: start this node's agent, and turn its outcome into the step's
result.

In a multi-node job, AWS Batch gives each container two network interfaces: one in the VPC, and one
of the ECS agent, whose link-local address is the same in all containers. If gloo or NCCL chose the
interface of the ECS agent, they would wait forever. `set_network_interface` therefore selects the
interface in the VPC.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from ebbflow.core.config.device_settings import most_even_ranks
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError, Outcome
from ebbflow.core.event_payloads import NodeStartedPayload
from ebbflow.core.events import PRICES, Event, LogFollower, read_events, select_events
from ebbflow.core.layout import FLOW_EVENTS_PREFIX
from ebbflow.core.process import StoppedProcesses, children, read_system_file
from ebbflow.core.team_reservations import is_reserved
from ebbflow.core.terms import Fallback, RankPrice, Terms
from ebbflow.flows.decorators import CapacityDecorator, training_backend
from ebbflow.flows.job import FlowStep, Job, TrainArtifacts, spent_or_zero_usd
from ebbflow.flows.remote import UNPLACED_VARIABLE, in_container
from ebbflow.flows.steps import StepFailed, current_job, record_outcome, say
from ebbflow.infra.instance import identify_machine
from ebbflow.infra.slurm.partitions import gpus_per_node

if TYPE_CHECKING:
    from metaflow.metadata_provider.metadata import MetadataProvider

    from ebbflow.core.json_values import JsonObject
    from ebbflow.cost.ledger.pricing import MachineFacts
    from ebbflow.cost.plan_json import PlanJson
    from ebbflow.flows.attempts.order import AttemptOrder
    from ebbflow.training.launch.messages import GangSpec

_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_ANY_PORT = 9

STOPPED_TASK_SECONDS = 20.0  # without a heartbeat for so long, a node counts as lost
_LOOK_SECONDS = 1.0
_STOPPED = {"step": None, "weights_sha256": None}


class ParallelInfo(Protocol):
    """Position of a task among the nodes of a gang, as Metaflow reports it."""

    node_index: int
    main_ip: str  # address of node 0
    control_task_id: str | None  # task of node 0


class CurrentTask(Protocol):
    """The running task, from Metaflow's `current`."""

    run_id: str
    step_name: str
    task_id: str
    retry_count: int
    parallel: ParallelInfo  # only in a step with @parallel


@dataclass(frozen=True)
class GangShape:
    """The number of nodes in a gang and the number of ranks per node."""

    nodes: int
    processes_per_node: int


def set_network_interface(main_address: str) -> str | None:
    """Make gloo and NCCL use the network interface that routes to node 0.

    Sets NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, unless the user has set them. Returns the
    interface's name, or None (and sets nothing) if no interface routes to node 0.
    """
    name = route_interface(main_address)
    if name is not None:
        for variable in _VARIABLES:
            os.environ.setdefault(variable, name)
    return name


def route_interface(address: str) -> str | None:
    """Return the network interface that routes to an IPv4 address, or None. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError:
            return None
        own = probe.getsockname()[0]
        return next(
            (name for _, name in socket.if_nameindex() if _address_of(probe, name) == own), None
        )


def gang_shape(flow: TrainArtifacts, order: AttemptOrder | None = None) -> GangShape:
    """Return the gang's numbers of nodes and of ranks per node from the attempt's order.

    If there is no order, take the shape from the configuration.

    The order is the scheduler's decision about one attempt. If a value is `auto` in the
    configuration, it comes from the plan. On this machine, `auto` ranks per node means one rank per
    local GPU if there are GPUs.
    """
    if order is not None:
        return GangShape(order.nodes, order.processes_per_node)
    job = current_job(flow)
    chosen = flow.capacity["chosen"]
    cluster = job.config.cluster
    if cluster.nodes == "auto":
        nodes = chosen["nodes"]
    else:
        nodes = cluster.nodes
    processes = cluster.processes_per_node
    if processes == "auto":
        backend = training_backend(flow)
        if backend == "slurm":
            here = gpus_per_node(job.config.slurm)
        elif backend is None:
            here = ranks_of_local_gpus(job.config, nodes)
        else:
            here = None
        processes = here or chosen["processes_per_node"]
    return GangShape(nodes=nodes, processes_per_node=processes)


def ranks_of_local_gpus(config: RunConfig, nodes: int) -> int | None:
    """Return the largest number of ranks per node such that each rank has a local GPU and the batch
    divides evenly.

    Returns None if there is no such number.
    """
    # Not at module level, since it imports all checks
    from ebbflow.infra.checks.gpu import visible_gpus

    if config.cluster.device == "cpu":
        most = 0
    else:
        most = visible_gpus() // nodes
    parts = config.training.gradient_accumulation_steps * nodes
    return most_even_ranks(most, config.training.batch_size, parts)


def end_stopped_tasks(
    launcher: int,
    *,
    limit_seconds: float = STOPPED_TASK_SECONDS,
    done: threading.Event | None = None,
) -> None:
    """Kill local tasks that have been suspended by SIGSTOP for `limit_seconds`.

    Runs until `done` is set, or forever.

    Without this, Metaflow's scheduler (the process with id `launcher`) would wait forever for a
    suspended task. The node's agent is suspended together with its task, so the job recovers from
    the kill as it does from a lost node. Tasks that submit to AWS Batch are not killed, because
    their Batch jobs would continue without supervision.
    """
    watched = StoppedProcesses(limit_seconds)
    done = done or threading.Event()
    while not done.wait(min(_LOOK_SECONDS, limit_seconds / 4)):
        tasks = [pid for pid in children(launcher) if _is_local_task(pid)]
        # Other nodes
        tasks += [pid for task in tasks for pid in children(task) if _is_local_task(pid)]
        for pid, seconds in watched.look(tasks).items():
            text = (
                f"the task with pid {pid} was stopped (state T) for {seconds:.0f} s: killed, to "
                "be retried"
            )
            print(text, file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def initial_branch(flow: TrainArtifacts) -> str:
    """Return the flow's branch after `prepare`: "node" for the step `train_node`, else "gang".

    `train_node` is for a single node in AWS Batch, and for any number of nodes on Slurm.
    """
    backend = training_backend(flow)
    if backend == "slurm" or (backend == "batch" and flow.num_nodes == 1):
        return "node"
    return "gang"


def train_node(flow: TrainArtifacts, this: CurrentTask) -> tuple[dict, str]:
    """Run one round of the step `train_node`: train on one node until the job ends or the machine
    is reclaimed.

    Returns the outcome as JSON, and the next branch of the flow: "again", "gang" or "done". A drain
    after a Spot notice ends the round normally, and "again" repeats the step. Raises StepFailed for
    a failure that may not occur in a new attempt. On Slurm, a round is one Slurm job, also with
    several nodes.
    """
    flow.rounds += 1
    if training_backend(flow) == "slurm":
        return _train_on_slurm(flow, this)
    order = _order(flow, this)
    if order is not None and order.does == "next":
        flow.num_nodes = order.nodes
        branch = "gang" if order.nodes > 1 else "again"
        return {"outcome": Outcome.INTERRUPTED.value, **_STOPPED}, branch
    try:
        return _run_node(flow, this, order, node=0, main_address="127.0.0.1"), "done"
    except StepFailed as error:
        if error.outcome is not Outcome.INTERRUPTED:
            raise
        say(str(error))
        return {"outcome": Outcome.INTERRUPTED.value, **_STOPPED}, "again"


def train(flow: TrainArtifacts, this: CurrentTask) -> dict:
    """Run this node's agent in the gang and return the outcome as JSON.

    Raises StepFailed if a retry may succeed.
    """
    return _run_node(
        flow,
        this,
        _order(flow, this),
        node=this.parallel.node_index,
        main_address=this.parallel.main_ip,
    )


def _address_of(probe: socket.socket, name: str) -> str | None:
    request = array.array("B", struct.pack("256s", name.encode()[:15]))
    with contextlib.suppress(OSError):
        fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request, True)
        return socket.inet_ntoa(request.tobytes()[20:24])
    return None


def _is_local_task(pid: int) -> bool:
    words = read_system_file(f"/proc/{pid}/cmdline").split("\0")
    return "step" in words and not {"batch", "kubernetes"} & set(words)


def _run_node(
    flow: TrainArtifacts,
    this: CurrentTask,
    order: AttemptOrder | None,
    *,
    node: int,
    main_address: str,
) -> dict:
    from ebbflow.training.errors import GangError, TrainingError
    from ebbflow.training.launch.agent import run_gang

    if order is not None and order.does == "stop":  # because of budget, deadline or capacity
        say(f"no further attempt: {order.message}")
        if node == 0:
            record_outcome(flow, Outcome(order.outcome), order.message)
        return {"outcome": order.outcome, **_STOPPED}
    if in_container() and main_address != "127.0.0.1":
        set_network_interface(main_address)
    try:
        spec = _gang_spec(flow, this, order, node=node, main_address=main_address)
        prices = None
        if spec.terms is not None and spec.terms.price_look_seconds:
            prices = _HeldPrice(flow, Job.of(flow, this.run_id), order).read
        outcome = run_gang(spec, prices=prices, is_reserved=_reservation_check(flow, this, node))
    except (TrainingError, InfraError) as error:
        if isinstance(error, InfraError) or error.curable:  # the store may come back
            raise StepFailed(error.outcome, str(error)) from error
        say(f"a new attempt would not help: {error}")
        # The gang has recorded a GangError already
        if node == 0 and not isinstance(error, GangError):
            record_outcome(flow, error.outcome, str(error))
        return {"outcome": error.outcome.value, **_STOPPED}
    if outcome.goes_on:  # the other nodes go on
        say(f"node {node}: {outcome.message}")
    elif outcome.outcome == Outcome.INTERRUPTED:
        raise StepFailed(Outcome.INTERRUPTED, f"drained at step {outcome.step}: {outcome.message}")
    return {
        "outcome": outcome.outcome,
        "step": outcome.step,
        "weights_sha256": outcome.weights_sha256,
    }


def _train_on_slurm(flow: TrainArtifacts, this: CurrentTask) -> tuple[dict, str]:
    from ebbflow.flows.attempts.order import AttemptName, try_to_show_in_client
    from ebbflow.flows.slurm.attempt import run_attempt

    name = AttemptName(
        run=str(this.run_id),
        step=this.step_name,
        task=str(this.task_id),
        attempt=int(this.retry_count),
    )

    def show(order: JsonObject) -> None:
        trouble = try_to_show_in_client(_task_metadata(flow.train_node), name, order)
        if trouble:
            say(trouble)

    end = run_attempt(current_job(flow), _slurm_spec(flow, this), number=flow.rounds, show=show)
    if end.was_asked:
        raise StepFailed(end.outcome, end.told)
    if end.message:
        record_outcome(flow, end.outcome, end.message)
    reached = {"step": end.step, "weights_sha256": end.weights_sha256}
    return {"outcome": end.outcome.value, **reached}, "again" if end.goes_on else "done"


def _task_metadata(step: FlowStep) -> MetadataProvider:
    """Return the metadata provider of the task that runs a step with `@capacity`."""
    for decorator in step.decorators:
        if isinstance(decorator, CapacityDecorator):
            return decorator.metadata
    raise ValueError("the step has no @capacity")


def _order(flow: TrainArtifacts, this: CurrentTask) -> AttemptOrder | None:
    """Return the scheduler's order for this attempt, which names machines and number of nodes.

    Return None for a run on this machine or on Slurm.

    Raises StepFailed if no placement could be chosen for the attempt, or if the store fails.
    """
    # Late, since the flow file, which every card refresh imports, imports this module
    from ebbflow.flows.attempts.order import AttemptName, AttemptOrder

    if training_backend(flow) in (None, "slurm"):
        return None
    trouble = os.environ.get(UNPLACED_VARIABLE)
    if trouble:
        raise StepFailed(Outcome.FAILED, f"this attempt could not be placed: {trouble}")
    if getattr(this, "is_parallel", False):
        control = this.parallel.control_task_id
    else:
        control = None
    task = str(control or this.task_id)  # the task for which the scheduler wrote the order
    name = AttemptName(
        run=str(this.run_id), step=this.step_name, task=task, attempt=int(this.retry_count)
    )
    try:
        return AttemptOrder.get(Job.of(flow, this.run_id).store, name)
    except InfraError as error:
        raise StepFailed(error.outcome, str(error)) from error


def _gang_spec(
    flow: TrainArtifacts,
    this: CurrentTask,
    order: AttemptOrder | None,
    *,
    node: int,
    main_address: str,
) -> GangSpec:
    from ebbflow.training.launch.messages import GangSpec
    from ebbflow.training.launch.transport import control_ports

    job = Job.of(flow, this.run_id)
    shape = gang_shape(flow, order)
    placement = None if order is None else order.placement
    return GangSpec(
        job=job.name,
        run=this.run_id,
        attempt=this.retry_count,
        node=node,
        nodes=shape.nodes,
        processes_per_node=shape.processes_per_node,
        main_address=main_address,
        config=job.config,
        store_uri=job.config.store,
        prepared=flow.prepared,
        log_folder=str(job.folder / "logs"),
        terms=_terms(flow, job, order) if node == 0 else None,
        rehearse=flow.rehearse or None,
        candidate_ports=control_ports(this.run_id, this.retry_count),
        promised_gpus=0 if placement is None else placement.gpu,
    )


def _slurm_spec(flow: TrainArtifacts, this: CurrentTask) -> GangSpec:
    """Return the specification of node 0 for this round's Slurm job, without its address.

    The Slurm job adds the address.
    """
    from ebbflow.training.launch.transport import control_ports

    spec = _gang_spec(flow, this, None, node=0, main_address="")
    attempt = flow.rounds - 1  # each round is one attempt
    return replace(spec, attempt=attempt, candidate_ports=control_ports(spec.run, attempt))


def _terms(flow: TrainArtifacts, job: Job, order: AttemptOrder | None) -> Terms | None:
    """Return the attempt's cost terms: price per rank-second, the job's limits, and the job's costs
    so far. Return None if the plan has no pool.
    """
    from ebbflow.cost.errors import CostError
    from ebbflow.cost.ledger.ledger import last_notified_threshold
    from ebbflow.cost.plan.plan import Plan

    if order is None or order.plan is None:
        plan = Plan.from_json(flow.capacity)
    else:
        plan = order.plan
    if plan.chosen is None:  # on Slurm, no pool of a cloud need fit
        return None
    events = read_events(job.store)
    spent = spent_or_zero_usd(events)
    terms = plan.terms(
        spent_usd=spent, last_notified_threshold=last_notified_threshold(events, plan.budget_usd)
    )
    reserve = None
    if order is not None and order.placement is not None:
        reserve = order.placement.fallback
    terms = replace(terms, fallback=Fallback(**reserve) if reserve else None)
    held = _HeldPrice(flow, job, order)
    try:
        price = held.read(events).price_at(time.time())
    except (CostError, InfraError) as error:
        say(f"the price of this machine is unknown, so the planned one applies: {error}")
        return terms
    booted = held.boot_seconds(events) * gang_shape(flow, order).nodes
    ranks = gang_shape(flow, order).processes_per_node
    # The plan's price for this gang's ranks, so that other ranks on a node are no rise of the price
    shared = terms.usd_per_rank_second * plan.chosen.processes_per_node / ranks
    terms = replace(terms, usd_per_rank_second=shared)
    return terms.at_price(price, spent_usd=spent + booted * ranks * price)


def _reservation_check(
    flow: TrainArtifacts, this: CurrentTask, node: int
) -> Callable[[], bool] | None:
    """Return a function that checks whether the job is still reserved in its team's budget.

    Return None for nodes other than node 0, for a job without a team, and on this machine, where
    dollars are simulated.
    """
    job = Job.of(flow, this.run_id)
    if node != 0 or job.config.cost.team_file is None or training_backend(flow) is None:
        return None
    return partial(is_reserved, job.root_store, job.name)


class _HeldPrice:
    """Price of this machine as the ledger bills it, with its root volume.

    It comes from the job's recorded prices for the machine's type, market and zone.
    """

    def __init__(self, flow: TrainArtifacts, job: Job, order: AttemptOrder | None) -> None:
        plan = flow.capacity
        if order is not None and order.plan is not None:
            plan = order.plan.to_json()
        self._plan = cast("PlanJson", plan)
        self._ranks_per_node = gang_shape(flow, order).processes_per_node
        self._machine: MachineFacts = {}
        self._instance_id: str | None = None
        self._job_id: str | None = None  # as the backend calls this attempt
        self._uptime_seconds = 0.0
        if in_container():
            identity = identify_machine()
            self._machine = cast("MachineFacts", identity.to_json())
            self._instance_id = identity.instance_id
            self._job_id = identity.batch_job_id
            self._uptime_seconds = identity.uptime_seconds or 0.0
        self._log = LogFollower(job.store, wanted=lambda key: key.startswith(FLOW_EVENTS_PREFIX))
        self._events: list[Event] = []

    def boot_seconds(self, events: Sequence[Event]) -> float:
        """Return the paid seconds of this machine before this attempt, as the ledger will count
        them.

        Return 0 if an earlier attempt or another job started the machine. Other nodes count alike.
        """
        from ebbflow.cost.ledger.instances import (
            read_submission_times,
            was_started_by_another_job,
        )

        before = {event.payload.instance_id for event in select_events(events, NodeStartedPayload)}
        submitted = read_submission_times(events).get(str(self._job_id))
        uptime = self._uptime_seconds
        if self._instance_id in before or was_started_by_another_job(
            uptime, time.time(), submitted
        ):
            return 0.0
        return uptime

    def read(self, events: Sequence[Event] = ()) -> RankPrice:
        """Return the price over time as recorded so far, in `events` or else in the store.

        Raises:
            StoreError: The store does not answer.
            LedgerError: An event has an invalid price.
        """
        from ebbflow.cost.ledger.pricing import Pricing
        from ebbflow.cost.ledger.timeline import MICRO

        if not events:
            for new in self._log.read_new():
                self._events += [event for event in new if event.name == PRICES]
        pricing = Pricing.of(events or self._events)
        curve = pricing.price_machine(self._plan, self._machine).node_curve
        scale = 3600 * self._ranks_per_node
        changes = [(at / MICRO, float(usd) / scale) for at, usd in curve.changes]
        return RankPrice(float(curve.first) / scale, changes)
