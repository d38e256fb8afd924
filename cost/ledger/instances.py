"""Paid time of instances beyond what their agents recorded: AWS Batch jobs, idle pauses and minimum charges.

Instances are known by their ids. EC2 bills Linux by the second from the start of an instance to its end, a minute at
the least (https://aws.amazon.com/ec2/pricing/on-demand/). A launch that never became a node costs nothing.

A job is paid on each of its nodes from when Batch started that node until it stopped, and what Batch has not told of
it is as its main node's. Agents tell a part of that: from the first word to the last, by their machine's monotonic
clock. The rest of the node's time in the job is

    lead    from Batch's start to the agent's first word                        start-up
    pauses  between two generations of the node                                 idle
    tail    from the last word to Batch's stop                                  what killed it, or idle

How much the rest is in all follows from durations alone, each by one clock: nothing is paid twice, whatever the clocks
say. How it is divided into lead and tail follows from wall clocks of two machines, which may be minutes apart: the lead
is cut to what there is, and both are estimated. A node that never said a word was starting, all its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from typing import Any

from ebbflow.cost.ledger.generations import RecordedGeneration
from ebbflow.cost.ledger.timeline import MICRO, NodeTime
from ebbflow.infra.events import BATCH_ATTEMPT, BATCH_SUBMITTED, Event, LedgerClass

MINIMUM_SECONDS = 60.0
# A longer pause of the same instance may have been another job's: it is left to the reconciliation with the bill.
LONGEST_IDLE_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class ExtraTime:
    """Paid time of an instance besides its nodes'. node: whose ranks and price it counts by; start: Unix seconds."""

    node: NodeTime
    ledger_class: LedgerClass
    start: float
    seconds: float

    @property
    def micros(self) -> int:
        return round(self.seconds * MICRO)


@dataclass(frozen=True, kw_only=True)
class PaidStay:
    """In which a node of a job was paid for: Unix seconds by Batch's clock, and what ended the job."""

    started: float
    stopped: float
    cause: str

    @property
    def micros(self) -> int:
        return max(0, round(self.stopped * MICRO) - round(self.started * MICRO))


def group_by_instance(nodes: Sequence[NodeTime]) -> dict[str, list[NodeTime]]:
    """Nodes whose instance is known, by its id, in the order in which they ran."""
    grouped: dict[str, list[NodeTime]] = {}
    for node in sorted(nodes, key=lambda node: node.started_wall):
        if node.instance_id:
            grouped.setdefault(node.instance_id, []).append(node)
    return grouped


def find_instance_extras(nodes: Sequence[NodeTime], stays: Mapping[int, PaidStay] | None = None) -> list[ExtraTime]:
    """What the instances were billed beyond their nodes' time. Machines without an id, such as this one, have none.

    stays: by the node's `id`, of nodes that were part of a longer stay that is paid whole, whoever pays it.
    """
    found = []
    known = stays or {}

    def span(node: NodeTime) -> tuple[float, float]:
        stay = known.get(id(node))
        return (node.started_wall, node.ended_wall) if stay is None else (stay.started, stay.stopped)

    def taken(node: NodeTime) -> bool:
        stay = known.get(id(node))
        return stay is not None and stay.cause == "reclaimed"

    for lived in group_by_instance(nodes).values():
        lived.sort(key=lambda node: span(node)[0])
        (reached, _), paid = span(lived[0]), 0.0
        previous = lived[0]
        for node in lived:
            start, end = span(node)
            pause = start - reached
            if 0 < pause <= LONGEST_IDLE_SECONDS and not taken(previous):  # nobody pays for one that was taken away
                found.append(ExtraTime(node=previous, ledger_class=LedgerClass.IDLE, start=reached, seconds=pause))
                paid += pause
            paid += max(0.0, end - max(start, reached))  # of two at once, once
            if end >= reached:
                reached, previous = end, node
        before = max(0.0, lived[0].started_wall - span(lived[0])[0])
        booted = max(0.0, float(lived[0].machine.get("uptime_seconds") or 0.0) - before)
        missing = MINIMUM_SECONDS - booted - paid
        if missing > 0:
            last = LedgerClass.MINIMUM_CHARGE
            found.append(ExtraTime(node=previous, ledger_class=last, start=reached, seconds=missing))
    return found


# A node that does not say which job it is of belongs to one that it overlaps with, clocks so far apart.
CLOCKS_APART_SECONDS = 300.0
_CANDIDATE_KEYS = ("instance_type", "market", "region", "zone", "usd_per_hour", "quoted_usd_per_hour", "price_kind")


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """One job that was paid for. started, stopped: Unix seconds by Batch's clock, of its main node; node_times: of all,
    as far as told.

    ranks: of each node. candidate: its placement as a plan's candidate has it; empty: nobody knows where it was.
    placed_wall: when it was submitted, as far as told; else when it was made or started.
    """

    job_id: str
    name: str
    nodes: int
    ranks: int
    started: float
    stopped: float
    cause: str
    placed_wall: float
    candidate: Mapping[str, Any]
    node_times: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def stay(self, node: int) -> PaidStay:
        started, stopped = self.node_times.get(node, (self.started, self.stopped))
        return PaidStay(started=started, stopped=stopped, cause=self.cause)

    @property
    def quote(self) -> Decimal | None:
        """Dollars per hour of a node; None: not told, or no price."""
        try:
            usd = Decimal(str(self.candidate.get("quoted_usd_per_hour") or self.candidate["usd_per_hour"]))
        except (KeyError, InvalidOperation):
            return None
        return usd if usd.is_finite() and usd >= 0 else None


def read_batch_jobs(events: Sequence[Event]) -> dict[str, BatchJob]:
    """By id: of each the last word that was told. Jobs that never started, or still run, are left out.

    events: by time.
    """
    submitted = {str(event.data.get("job_id")): event.t_wall for event in events if event.name == BATCH_SUBMITTED}
    found = {}
    for event in events:
        if event.name == BATCH_ATTEMPT and (job := _job(event.data, submitted)) is not None:
            found[job.job_id] = job
    return found


def group_nodes_by_job(nodes: Sequence[NodeTime], jobs: Mapping[str, BatchJob]) -> dict[str, list[NodeTime]]:
    """The nodes that spoke in each job: by the job's id, else by the time."""
    found: dict[str, list[NodeTime]] = {job_id: [] for job_id in jobs}
    for node in nodes:
        told = node.machine.get("batch_job_id")
        job_id = told if told else _job_by_time(node, jobs)
        if job_id in found:
            found[job_id].append(node)
    return found


def find_batch_extras(
    heard: Mapping[str, Sequence[NodeTime]], jobs: Mapping[str, BatchJob], generations: Mapping[int, RecordedGeneration]
) -> list[ExtraTime]:
    """Of the nodes that spoke: what their jobs cost beyond what they told of."""
    found = []
    for job_id, nodes in heard.items():
        for _, mine in _by_index(nodes):
            found += _of_node(jobs[job_id], mine, generations)
    return found


def find_unreported_nodes(
    heard: Mapping[str, Sequence[NodeTime]], jobs: Mapping[str, BatchJob]
) -> list[tuple[BatchJob, int]]:
    """(job, node) of all that were paid for and never said a word."""
    spoke = {(job_id, node.node) for job_id, nodes in heard.items() for node in nodes}
    everywhere = [(job, node) for job in jobs.values() for node in range(job.nodes)]
    return [(job, node) for job, node in everywhere if (job.job_id, node) not in spoke and job.stay(node).micros]


def _job(data: Mapping[str, Any], submitted: Mapping[str, float]) -> BatchJob | None:
    started, stopped = _moment(data.get("started_utc")), _moment(data.get("stopped_utc"))
    job_id = str(data.get("job_id") or "")
    if not job_id or started is None or stopped is None:
        return None
    created = _moment(data.get("created_utc"))
    return BatchJob(
        job_id=job_id,
        name=str(data.get("job_name") or ""),
        nodes=max(1, int(data.get("nodes") or 1)),
        ranks=max(1, int(data.get("processes_per_node") or 1)),
        started=started,
        stopped=stopped,
        cause=str(data.get("cause") or "unknown"),
        placed_wall=submitted.get(job_id, started if created is None else created),
        candidate={key: data[key] for key in _CANDIDATE_KEYS if data.get("instance_type") and key in data},
        node_times=_node_times(data.get("node_times"), started, stopped),
    )


def _node_times(told: Any, started: float, stopped: float) -> dict[int, tuple[float, float]]:
    """Of the nodes that are told of; what is missing of one is as the job has it."""
    found = {}
    for index, pair in enumerate(told if isinstance(told, list | tuple) else ()):
        begun, ended = map(_moment, pair)
        found[index] = (started if begun is None else begun, stopped if ended is None else ended)
    return found


def _moment(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _job_by_time(node: NodeTime, jobs: Mapping[str, BatchJob]) -> str | None:
    def together(job: BatchJob) -> float:
        stay = job.stay(node.node)
        return min(node.ended_wall, stay.stopped) - max(node.started_wall, stay.started)

    nearest = max((job for job in jobs.values() if node.node < job.nodes), key=together, default=None)
    return nearest.job_id if nearest is not None and together(nearest) > -CLOCKS_APART_SECONDS else None


def _by_index(nodes: Sequence[NodeTime]) -> list[tuple[int, list[NodeTime]]]:
    grouped: dict[int, list[NodeTime]] = {}
    for node in sorted(nodes, key=lambda node: (node.generation, node.start)):
        grouped.setdefault(node.node, []).append(node)
    return sorted(grouped.items())


def _of_node(job: BatchJob, mine: Sequence[NodeTime], generations: Mapping[int, RecordedGeneration]) -> list[ExtraTime]:
    """What is left of the job's time on this node, in microseconds that add up to it."""
    stay = job.stay(mine[0].node)
    left = stay.micros - sum(node.paid_micros for node in mine)
    found = []
    for before, after in pairwise(mine):
        pause = min(left, round((after.start - before.end) * MICRO))
        if pause > 0:
            found.append(_extra(before, LedgerClass.IDLE, before.ended_wall, pause))
            left -= pause
    if left <= 0:
        return found
    first, last = mine[0], mine[-1]
    lead = min(left, max(0, round((first.started_wall - stay.started) * MICRO)))
    if lead:
        found.append(_extra(first, LedgerClass.STARTUP, stay.started, lead))
    if left > lead:
        cut = generations[last.generation].unplanned
        kind = LedgerClass.INTERRUPTION if cut else LedgerClass.IDLE
        found.append(_extra(last, kind, stay.stopped - (left - lead) / MICRO, left - lead))
    return found


def _extra(node: NodeTime, kind: LedgerClass, start: float, micros: int) -> ExtraTime:
    return ExtraTime(node=node, ledger_class=kind, start=start, seconds=micros / MICRO)
