"""Choice of the partition for the next attempt on Slurm.

The rule is that of AWS Batch without prices: the preferred partition while it is safe, then the
first one whose jobs are not preempted. Waiting in a queue is free, and a partition that has not
granted its nodes within `slurm.queue_minutes` is left for the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ebbflow.core.config.schema import PartitionConfig, RunConfig
from ebbflow.core.event_payloads import SlurmJobPayload
from ebbflow.core.events import STEP, Event
from ebbflow.infra.slurm.commands import Cause

# Preemptions in a row without a commit between them, after which a job leaves a partition
_MOST_PREEMPTIONS = 2
# Share of the measured hours that is kept for slower steps
_SLACK = 0.25
# Changes of machines that must fit before the deadline: one preemption, and the move
_MOVES = 2


@dataclass(frozen=True, kw_only=True)
class PartitionChoice:
    """The partition of an attempt, and why."""

    partition: PartitionConfig | None  # None: the cluster's default
    reason: str


def choose_partition(
    config: RunConfig,
    ends: Sequence[SlurmJobPayload],
    *,
    hours_left: float | None,
    hours_needed: float | None,
) -> PartitionChoice:
    """Choose the partition for the next attempt.

    Args:
        ends: the ended Slurm jobs of this run, oldest first.
        hours_left: hours until the deadline; None without one.
        hours_needed: measured hours of the remaining steps; None before the first steps.
    """
    partitions = config.slurm.partitions
    if not partitions:
        return PartitionChoice(partition=None, reason="the cluster's default")
    refused = refused_partitions(ends)
    # A partition that was tried again later can grant its nodes now
    open_ones = [partition for partition in partitions if partition.name not in refused]
    preferred = (open_ones or partitions)[0]
    if refused:
        reason = f"{', '.join(refused)} granted no nodes within {config.slurm.queue_minutes:g} min"
    else:
        reason = "preferred"
    safe = next((partition for partition in open_ones if not partition.preemptible), None)
    if not preferred.preemptible or safe is None:
        return PartitionChoice(partition=preferred, reason=reason)
    vain = count_vain_preemptions(ends)
    if vain >= _MOST_PREEMPTIONS:
        why = f"{preferred.name} preempted {vain} attempts in a row before a commit"
        return PartitionChoice(partition=safe, reason=why)
    if hours_left is not None and hours_needed is not None:
        start = config.cluster.expected_start_seconds / 3600
        wanted = hours_needed * (1 + _SLACK) + _MOVES * start
        if hours_left < wanted:
            why = f"{hours_left:.2f} h to the deadline, and {wanted:.2f} h needed with a preemption"
            return PartitionChoice(partition=safe, reason=why)
    return PartitionChoice(partition=preferred, reason=reason)


def refused_partitions(ends: Sequence[SlurmJobPayload]) -> list[str]:
    """Return the partitions in which the last Slurm jobs in a row got no nodes in time."""
    refused: list[str] = []
    for end in itertools.takewhile(lambda end: end.cause == Cause.REFUSED, reversed(ends)):
        refused.insert(0, str(end.partition))
    return refused


def count_vain_preemptions(ends: Sequence[SlurmJobPayload]) -> int:
    """Return how many of the last Slurm jobs in a row were preempted without a new commit."""
    count = 0
    for position in range(len(ends) - 1, -1, -1):
        end = ends[position]
        before = ends[position - 1].commits if position else 0
        if end.cause != Cause.PREEMPTED or end.commits != before:
            break
        count += 1
    return count


def measure_hours_needed(events: Sequence[Event], max_steps: int) -> float | None:
    """Return the hours of the remaining steps at the speed of the newest generation; None before it
    has taken two steps.
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
