"""Partitions of a Slurm cluster as the pools of a job: order, plan, terms, and what a job has used.

Slurm reports neither prices nor speeds. Dollars are those of `slurm.partitions`, hours are known
once the job has taken steps, and node-hours are counted by Slurm's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ebbflow.core.config.schema import PartitionConfig, RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.event_payloads import SlurmJobPayload
from ebbflow.core.events import STEP, Event, select_events
from ebbflow.core.footprint import ModelShape, causal_lm_shape
from ebbflow.core.reliability import GammaHazard
from ebbflow.core.terms import UNPRICED, Terms
from ebbflow.cost.errors import LedgerError
from ebbflow.cost.ledger.ledger import compute_spent_usd, last_notified_threshold
from ebbflow.cost.plan.candidates import JobProgress
from ebbflow.cost.plan.plan import Plan, describe_interval
from ebbflow.cost.plan.pools import PartitionOffer
from ebbflow.cost.plan.refusal import PlanRefusal
from ebbflow.cost.plan.throughput import speed_fingerprint
from ebbflow.infra.slurm.commands import (
    Cause,
    SlurmRejected,
    SlurmUnavailable,
    count_nodes,
    estimate_start,
)
from ebbflow.infra.slurm.partitions import is_priced, order_partitions
from ebbflow.infra.slurm.script import partition_options

# Interruptions per hour before the job has seen any (assumed, as a prior)
_PREEMPTIBLE_HAZARD = 1 / 24
_SAFE_HAZARD = 1 / 240
_STATED = "stated"


@dataclass(frozen=True, kw_only=True)
class PartitionEvidence:
    """A partition's capacity, as Slurm reports it before a submission."""

    nodes: Mapping[str, int] = field(default_factory=dict)  # number of nodes by state
    start_utc: float | None = None  # when the job would start (Unix seconds); None: not told
    problem: str = ""  # why Slurm would refuse the job


def explain_ignored_budget(config: RunConfig) -> str:
    """Return why `cost.budget_usd` cannot limit the job, and how to fix that; "" if it can."""
    if config.cost.budget_usd is None or is_priced(config):
        return ""
    unpriced = [
        f"slurm.partitions[{index}] ({partition.name})"
        for index, partition in enumerate(config.slurm.partitions)
        if partition.usd_per_node_hour is None
    ]
    where = ", ".join(unpriced) or "slurm.partitions"
    return (
        f"cost.budget_usd ${config.cost.budget_usd:g} does not limit this job: {where} without "
        "usd_per_node_hour; fix: name the price of each partition, or set slurm.budget_node_hours"
    )


def gang_nodes(config: RunConfig) -> int:
    """Return the number of nodes of a job on Slurm; 1 if `cluster.nodes` is not a number yet."""
    nodes = config.cluster.nodes
    return nodes if isinstance(nodes, int) else 1


def measure_hours_needed(events: Sequence[Event], max_steps: int) -> float | None:
    """Estimate the hours of the remaining steps from the speed of the newest generation.

    Return None before this generation has taken two steps.
    """
    steps = [event for event in events if event.name == STEP and event.step is not None]
    if not steps:
        return None
    newest = max(event.generation for event in steps)
    times = {event.step or 0: event.t_wall for event in steps if event.generation == newest}
    first = min(times)
    last = max(times)
    if first == last:
        return None
    seconds_per_step = (times[last] - times[first]) / (last - first)
    return max(0, max_steps - last) * seconds_per_step / 3600


def count_used_node_hours(events: Sequence[Event]) -> float:
    """Return the node-hours of the job's ended Slurm jobs, by Slurm's clock."""
    return sum(_hours(payload) * (payload.nodes or 1) for payload in _read_ends(events))


def count_spent_usd(events: Sequence[Event]) -> float:
    """Return the dollars spent so far.

    Return 0 if the ledger has an error, so that this does not stop training.
    """
    try:
        return compute_spent_usd(events)
    except LedgerError:
        return 0.0


def read_evidence(config: RunConfig) -> dict[str, PartitionEvidence]:
    """Ask Slurm for the capacity of each partition, by name.

    Partitions about which Slurm reports nothing are left out.
    """
    evidence = {}
    for partition in config.slurm.partitions:
        options = [
            f"--nodes={gang_nodes(config)}",
            "--ntasks-per-node=1",
            *partition_options(partition),
            *config.slurm.options,
        ]
        start = None
        problem = ""
        try:
            nodes = count_nodes(partition.name)
            start = estimate_start(options)
        except SlurmUnavailable:
            continue
        except SlurmRejected as error:
            nodes = {}
            problem = str(error)
        evidence[partition.name] = PartitionEvidence(nodes=nodes, start_utc=start, problem=problem)
    return evidence


def make_partition_plan(
    config: RunConfig,
    events: Sequence[Event],
    *,
    now_utc: float,
    progress: JobProgress,
    evidence: Mapping[str, PartitionEvidence],
    shape: ModelShape | None = None,
) -> Plan:
    """Make the plan of a job on Slurm, whose candidates are the partitions.

    The plan is refused if the measured rest of the job exceeds what is left of its budget.

    Args:
        events: the job's events, in any order.
        shape: size of the model; None means the built-in model.
    """
    if shape is None:
        shape = causal_lm_shape(config.model)
    config = shape.applied_to(config)
    steps = max(0, config.training.max_steps - progress.done_steps)
    hours = measure_hours_needed(events, config.training.max_steps)
    offers = tuple(
        _make_offer(config, partition, hours, evidence.get(partition.name))
        for partition in order_partitions(config)
    )
    return Plan(
        made_utc=now_utc,
        started_utc=progress.started_utc or now_utc,
        backend="slurm",
        simulated=False,
        steps=steps,
        done_steps=progress.done_steps,
        spent_usd=progress.spent_usd,
        tokens=steps * config.training.batch_size * shape.tokens_per_sample,
        weight_unit=shape.weight_unit,
        interval=describe_interval(config),
        fingerprint=speed_fingerprint(config),
        budget_usd=config.cost.budget_usd if is_priced(config) else None,
        deadline_hours=config.cost.deadline_hours,
        reserve_usd=min((_reserve_usd(config, offer) for offer in offers), default=0.0),
        reserve_seconds=config.checkpoint.deadline_seconds,
        prices=(_describe_prices(config),),
        notes=(_describe_speed(hours),),
        ranked=(),
        rejected=(),
        counts={},
        refusal=_find_refusal(config, events, progress, hours),
        partitions=offers,
    )


def make_partition_terms(
    config: RunConfig,
    partition: PartitionConfig | None,
    events: Sequence[Event],
    *,
    processes_per_node: int,
    started_utc: float,
) -> Terms:
    """Return the price, budget and deadline of an attempt in a partition.

    Args:
        partition: None: the cluster's default, which has no price.
        events: the job's events, in any order.
        started_utc: Unix time from which the deadline counts.
    """
    price = 0.0
    if partition is not None and is_priced(config):
        price = partition.usd_per_node_hour or 0.0
    budget = config.cost.budget_usd if price else None
    deadline = config.cost.deadline_hours
    return Terms(
        usd_per_rank_second=price / processes_per_node / 3600,
        budget_usd=budget,
        spent_usd=count_spent_usd(events),
        reserve_usd=price * gang_nodes(config) * config.checkpoint.deadline_seconds / 3600,
        reserve_seconds=config.checkpoint.deadline_seconds,
        deadline_utc=None if deadline is None else started_utc + deadline * 3600,
        hazard_per_hour=_estimate_hazard(partition, events),
        price_kind=_STATED if price else UNPRICED,
        last_notified_threshold=last_notified_threshold(events, budget),
    )


def _make_offer(
    config: RunConfig,
    partition: PartitionConfig,
    hours: float | None,
    evidence: PartitionEvidence | None,
) -> PartitionOffer:
    nodes = gang_nodes(config)
    used = None if hours is None else hours * nodes
    price = partition.usd_per_node_hour
    usd = None if used is None or price is None else used * price
    if evidence is None:
        evidence = PartitionEvidence()
    return PartitionOffer(
        name=partition.name,
        nodes=nodes,
        preemptible=partition.preemptible,
        usd_per_node_hour=price,
        max_hours=partition.max_hours,
        node_states=", ".join(f"{number} {state}" for state, number in evidence.nodes.items()),
        start_utc=evidence.start_utc,
        problem=evidence.problem,
        node_hours=used,
        usd=usd,
    )


def _find_refusal(
    config: RunConfig, events: Sequence[Event], progress: JobProgress, hours: float | None
) -> PlanRefusal | None:
    nodes = gang_nodes(config)
    rest = (hours or 0.0) * nodes
    most = config.slurm.budget_node_hours
    used = count_used_node_hours(events)
    if most is not None and used + rest > most:
        return PlanRefusal(
            outcome=Outcome.BUDGET,
            message=f"slurm.budget_node_hours is {most:.4g}; {used:.4g} are used, and the remaining "
            f"steps need {rest:.4g} = {hours or 0.0:.4g} h × {nodes} nodes as measured",
            hint=f"--set slurm.budget_node_hours={used + 1.25 * rest + 0.1 * nodes:.3g}",
            enough=used + rest,
        )
    budget = config.cost.budget_usd
    if budget is None or not is_priced(config):
        return None
    cheapest = order_partitions(config)[0]
    price = cheapest.usd_per_node_hour or 0.0
    reserve = price * nodes * config.checkpoint.deadline_seconds / 3600
    needed = progress.spent_usd + rest * price + reserve
    if needed <= budget:
        return None
    return PlanRefusal(
        outcome=Outcome.BUDGET,
        message=f"cost.budget_usd is ${budget:.4f}; ${progress.spent_usd:.4f} is spent, the remaining "
        f"steps need {hours or 0.0:.4g} h × {nodes} nodes × ${price:.4f}/h in {cheapest.name}, the "
        f"cheapest partition, and ${reserve:.4f} is kept for the last save: ${needed:.4f}",
        hint=f"--set cost.budget_usd={needed * 1.25:.2f}",
        enough=needed,
    )


def _reserve_usd(config: RunConfig, offer: PartitionOffer) -> float:
    price = offer.usd_per_node_hour or 0.0
    return price * offer.nodes * config.checkpoint.deadline_seconds / 3600


def _describe_prices(config: RunConfig) -> str:
    if is_priced(config):
        return "dollars: stated in slurm.partitions, per node and hour of Slurm's clock"
    return "Slurm tells no prices, and slurm.partitions has none: node-hours are counted"


def _describe_speed(hours: float | None) -> str:
    if hours is None:
        return "hours are not known before the job has taken steps on this cluster"
    return "hours: of the remaining steps at the job's measured speed, alike in each partition"


def _estimate_hazard(partition: PartitionConfig | None, events: Sequence[Event]) -> float:
    """Estimate the interruptions per hour of a partition from a prior and the job's preemptions."""
    prior = _SAFE_HAZARD
    name = None
    if partition is not None:
        name = partition.name
        prior = _PREEMPTIBLE_HAZARD if partition.preemptible else _SAFE_HAZARD
    ends = [end for end in _read_ends(events) if name is None or end.partition == name]
    taken = sum(end.cause in (Cause.PREEMPTED, Cause.NODE_FAILED) for end in ends)
    hours = sum(_hours(end) for end in ends)
    return GammaHazard.from_prior(prior).seen(taken, hours).per_hour


def _read_ends(events: Sequence[Event]) -> list[SlurmJobPayload]:
    """Return the last recorded end of each of the job's Slurm jobs."""
    newest = {
        event.payload.job_id: event.payload
        for event in select_events(events, SlurmJobPayload)
        if event.payload.does == "ended"
    }
    return list(newest.values())


def _hours(end: SlurmJobPayload) -> float:
    """Return the hours for which a Slurm job ran, by Slurm's clock; 0 if they are unknown."""
    if not end.started_utc or not end.stopped_utc:
        return 0.0
    return max(0.0, end.stopped_utc - end.started_utc) / 3600
