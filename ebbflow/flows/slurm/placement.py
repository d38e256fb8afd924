"""The plan of a job on Slurm, and the choice of partition and time limit for the next attempt.

The rule is the same as for AWS Batch. The preferred partition is used, even if it is preemptible,
as long as deadline and budget leave enough to finish in the first non-preemptible one. Waiting in a
queue is free. If a partition has not granted its nodes within `slurm.queue_minutes`, the next one
is tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ebbflow.core.config.schema import PartitionConfig, RunConfig
from ebbflow.core.event_payloads import SlurmJobPayload
from ebbflow.core.events import read_events
from ebbflow.core.footprint import ModelShape
from ebbflow.cost.plan.partitions import (
    explain_ignored_budget,
    gang_nodes,
    make_partition_plan,
    read_evidence,
)
from ebbflow.cost.plan.plan import Plan
from ebbflow.flows.job import ClockReading, Job, read_job_progress
from ebbflow.infra.slurm.commands import Cause
from ebbflow.infra.slurm.partitions import is_priced, order_partitions

# Preemptions in a row without a commit between them, after which a job leaves a partition
_MOST_PREEMPTIONS = 2
# Share of the measured hours that is kept for slower steps
_SLACK = 0.25
# Changes of machines that must fit before the deadline: one preemption, and the move
_MOVES = 2


@dataclass(frozen=True, kw_only=True)
class PartitionChoice:
    """The partition that was chosen for an attempt, and the reason."""

    partition: PartitionConfig | None  # None: the cluster's default
    reason: str


@dataclass(frozen=True, kw_only=True)
class JobOutlook:
    """Hours that a job still needs, and the hours and dollars that its limits leave."""

    hours_needed: float | None = (
        None  # of the remaining steps, measured; None before the first ones
    )
    hours_left: float | None = None  # until the deadline; None without one
    usd_left: float | None = None  # of the budget; None without one, or without prices


def plan_on_slurm(job: Job, shape: ModelShape | None) -> Plan:
    """Return the job's plan on the partitions; print why a budget cannot limit it."""
    ignored = explain_ignored_budget(job.config)
    if ignored:
        print(ignored, flush=True)
    return make_partition_plan(
        job.config,
        read_events(job.store),
        now_utc=ClockReading.of(job.store).utc,
        progress=read_job_progress(job),
        evidence=read_evidence(job.config),
        shape=shape,
    )


def choose_partition(
    config: RunConfig, ends: Sequence[SlurmJobPayload], outlook: JobOutlook
) -> PartitionChoice:
    """Choose the partition for the next attempt.

    Args:
        ends: the ended Slurm jobs of this run, oldest first.
    """
    partitions = order_partitions(config)
    if not partitions:
        return PartitionChoice(partition=None, reason="the cluster's default")
    refused = refused_partitions(ends)
    # A partition that was tried again later can grant its nodes now
    open_ones = [partition for partition in partitions if partition.name not in refused]
    preferred = (open_ones or partitions)[0]
    safe = next((partition for partition in open_ones if not partition.preemptible), None)
    if preferred.preemptible and safe is not None:
        danger = _find_danger(config, ends, preferred, safe, outlook)
        if danger:
            return PartitionChoice(partition=safe, reason=danger)
    if refused:
        reason = f"{', '.join(refused)} granted no nodes within {config.slurm.queue_minutes:g} min"
    elif is_priced(config):
        reason = f"the cheapest, ${preferred.usd_per_node_hour:g} per node and hour"
    else:
        reason = "preferred"
    return PartitionChoice(partition=preferred, reason=reason)


def refused_partitions(ends: Sequence[SlurmJobPayload]) -> list[str]:
    """Return the partitions in which the newest consecutive Slurm jobs got no nodes in time."""
    refused: list[str] = []
    for end in itertools.takewhile(lambda end: end.cause == Cause.REFUSED, reversed(ends)):
        refused.insert(0, str(end.partition))
    return refused


def count_vain_preemptions(ends: Sequence[SlurmJobPayload]) -> int:
    """Count the newest consecutive Slurm jobs that were preempted before a new commit."""
    count = 0
    for position in range(len(ends) - 1, -1, -1):
        end = ends[position]
        before = ends[position - 1].commits if position else 0
        if end.cause != Cause.PREEMPTED or end.commits != before:
            break
        count += 1
    return count


def limit_minutes(
    config: RunConfig, *, node_hours_used: float, usual_minutes: float | None
) -> int | None:
    """Return the time limit in minutes that `slurm.budget_node_hours` leaves for the next job.

    The limit is whole and at least 0. Return None if the budget is not the tighter limit.

    Args:
        node_hours_used: by the job's former Slurm jobs.
        usual_minutes: the limit without a budget; None: unlimited.
    """
    budget = config.slurm.budget_node_hours
    if budget is None:
        return None
    left = math.floor(60 * (budget - node_hours_used) / gang_nodes(config))
    if usual_minutes is not None and usual_minutes <= left:
        return None
    return max(0, left)


def _find_danger(
    config: RunConfig,
    ends: Sequence[SlurmJobPayload],
    preferred: PartitionConfig,
    safe: PartitionConfig,
    outlook: JobOutlook,
) -> str:
    """Return why an attempt in a preemptible partition would endanger the job, or "" if it would
    not.
    """
    vain = count_vain_preemptions(ends)
    if vain >= _MOST_PREEMPTIONS:
        return f"{preferred.name} preempted {vain} attempts in a row before a commit"
    if outlook.hours_needed is None:
        return ""
    moves = _MOVES * config.cluster.expected_start_seconds / 3600
    wanted = outlook.hours_needed * (1 + _SLACK) + moves
    if outlook.hours_left is not None and outlook.hours_left < wanted:
        return f"{outlook.hours_left:.2f} h to the deadline, and {wanted:.2f} h needed with a preemption"
    if outlook.usd_left is None or not is_priced(config):
        return ""
    nodes = gang_nodes(config)
    finish = outlook.hours_needed * nodes * (safe.usd_per_node_hour or 0.0)
    lost = moves * nodes * (preferred.usd_per_node_hour or 0.0)
    # If the safe one is beyond the budget, only the preemptible one can finish the job
    if finish <= outlook.usd_left < finish * (1 + _SLACK) + lost:
        return (
            f"${outlook.usd_left:.4f} of the budget is left, and finishing in {safe.name} after a "
            f"preemption may take ${finish * (1 + _SLACK) + lost:.4f}"
        )
    return ""
