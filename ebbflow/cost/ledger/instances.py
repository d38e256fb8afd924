"""Paid time of instances that no agent recorded: idle pauses, minimum charges, and parts of AWS
Batch and Slurm jobs.

Instances are identified by their ids. EC2 bills Linux by the second from the start of an instance
to its end, and at least a minute (https://aws.amazon.com/ec2/pricing/on-demand/). An instance on
which no node started is not counted.

The time before the first node, in which the instance boots and pulls the image, follows from the
instance's uptime at the agent's first event. An instance that booted before its Batch job was
submitted, or had been up for longer than `LONGEST_IDLE_SECONDS`, was started by another job, which
pays for its boot.

AWS Batch keeps an instance for some minutes after its job, in case that another one can use it. A
job pays for this time after each stay on an instance (scale-down), unless the stay itself was
reclaimed or the job's next stay follows within that time. If a later stay on the instance is
reclaimed within this time after an earlier stay, the rest of this time stays charged although AWS
does not bill it, so that totals never fall. Nodes of Kubernetes and Slurm have no scale-down.

A node of a Batch job costs money from the moment when Batch starts it until it stops. If Batch
reports no times for a node, the times of the main node apply. The agents record a part of this
time, by the monotonic clock of their machine. The unrecorded part of a node's time consists of

    lead    from Batch's start to the agent's first event      start-up
    pauses  between two generations of the node                idle
    tail    from the last event to Batch's stop                interruption if the node was cut off, else idle

The length of this part is computed from durations. Each duration is measured by a single clock, so
no time is counted twice even if clocks differ. A Slurm job is treated like a Batch job. The
division into lead and tail compares the wall clocks of two machines, which may be minutes apart;
lead and tail are therefore estimated. If a node has no event, all of its time counts as start-up.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

from ebbflow.core.event_payloads import (
    BatchAttemptPayload,
    BatchSubmittedPayload,
    SlurmJobPayload,
)
from ebbflow.core.events import Event, LedgerClass, select_events
from ebbflow.core.grouping import group_by_key
from ebbflow.cost.ledger.generations import RecordedGeneration
from ebbflow.cost.ledger.timeline import MICRO, NodeTime
from ebbflow.cost.plan_json import CandidateJson
from ebbflow.cost.prices.quote import PRICE_KEYS, PoolPrice
from ebbflow.infra.instance import is_cluster_id

MINIMUM_SECONDS = 60.0
# A longer pause is not counted, because the instance may have run another job. `cost.reconcile`
# shows it if billed.
LONGEST_IDLE_SECONDS = 600.0
# Assumed time from the end of a job to the end of its instance of AWS Batch: half of the longest idle
# time. AWS names no time for a compute environment without `minScaleDownDelayMinutes`, as in our
# template (https://docs.aws.amazon.com/batch/latest/APIReference/API_ComputeScalingPolicy.html).
SCALE_DOWN_SECONDS = 300.0
# Clocks of two machines that follow NTP differ by less.
SYNCHRONISED_SECONDS = 60.0
# The bill shows these, while the ledger has only an estimate of them.
ESTIMATED_UNTIL_BILLED = frozenset({LedgerClass.BOOT, LedgerClass.SCALE_DOWN, LedgerClass.VOLUMES})
# A node without a job id is assigned to a job at most this far apart in time, because their clocks
# may differ.
CLOCKS_APART_SECONDS = 300.0
STATED_FOR_PARTITION = "stated in slurm.partitions"
_CANDIDATE_KEYS = (
    "instance_type",
    "market",
    "region",
    "zone",
    *PRICE_KEYS,
)


@dataclass(frozen=True, kw_only=True)
class ExtraTime:
    """Paid time of an instance that no agent of its nodes recorded."""

    node: NodeTime  # the node to whose ranks the time is charged, at the price of this node
    ledger_class: LedgerClass
    start: float  # Unix seconds
    seconds: float

    @property
    def micros(self) -> int:
        return round(self.seconds * MICRO)


@dataclass(frozen=True, kw_only=True)
class PaidStay:
    """Paid time of one node in a Batch job."""

    # started, stopped: Unix seconds by Batch's clock
    started: float
    stopped: float
    cause: str  # why the job ended
    by_aws_batch: bool = False  # which keeps the instance for some minutes after the job

    @property
    def micros(self) -> int:
        return max(0, round(self.stopped * MICRO) - round(self.started * MICRO))


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """One job of AWS Batch, or of Slurm, that was paid for."""

    job_id: str
    nodes: int  # number of nodes
    ranks: int  # ranks per node
    # started, stopped: Unix seconds at which the main node started and stopped, by Batch's clock
    started: float
    stopped: float
    cause: (
        str  # why the job ended, such as "reclaimed"; "ended" if nothing outside the job ended it
    )
    # Unix time of the job's submission; if that is not recorded, of its creation or start
    placed_wall: float
    # the pool in which the job was placed, in the JSON form of a plan's candidate; None if unknown
    candidate: CandidateJson | None
    # (started, stopped) by node, for the nodes whose times Batch reported
    node_times: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    # nodes of which Batch reports no time although it does of nodes: they never got a machine
    never_started: frozenset[int] = frozenset()
    by_slurm: bool = False  # whether Slurm ran it, at the price that `slurm.partitions` states

    def stay(self, node: int) -> PaidStay:
        """Return the paid time of one node."""
        started, stopped = self.node_times.get(node, (self.started, self.stopped))
        by_aws_batch = not self.by_slurm and not is_cluster_id(self.job_id)
        return PaidStay(
            started=started, stopped=stopped, cause=self.cause, by_aws_batch=by_aws_batch
        )

    @property
    def price(self) -> PoolPrice | None:
        """Price of one node; None if no valid price was recorded."""
        if self.candidate is None:
            return None
        try:
            return PoolPrice.from_json(self.candidate)
        except (KeyError, ValueError):
            return None


def group_by_instance(nodes: Sequence[NodeTime]) -> dict[str, list[NodeTime]]:
    """Group nodes by instance id, ordered by their start.

    Nodes without a known instance are left out.
    """
    ordered = sorted(nodes, key=lambda node: node.started_wall)
    return group_by_key((node.instance_id, node) for node in ordered if node.instance_id)


def find_instance_extras(
    nodes: Sequence[NodeTime], stays: Mapping[int, PaidStay]
) -> list[ExtraTime]:
    """Find idle pauses, scale-downs and minimum charges of instances. Nodes without an instance id
    are ignored.

    Args:
        stays: Paid time of the nodes of Batch jobs, by the `id()` of the `NodeTime`. This function
            does not report pauses in that time, because `find_batch_extras` reports them.
    """
    found = []

    def interval(node: NodeTime) -> tuple[float, float]:
        stay = stays.get(id(node))
        if stay is None:
            return (node.started_wall, node.ended_wall)
        return (stay.started, stay.stopped)

    for mine in group_by_instance(nodes).values():
        mine.sort(key=lambda node: interval(node)[0])
        (reached, _) = interval(mine[0])
        paid = 0.0
        kept_until = -math.inf  # by AWS Batch, after the last stay; that time is never taken back
        previous = mine[0]
        for node in mine:
            start, end = interval(node)
            pause = start - reached
            stay = stays.get(id(previous))
            # A reclaimed instance is not billed afterwards
            reclaimed = stay is not None and stay.cause == "reclaimed"
            if 0 < pause <= LONGEST_IDLE_SECONDS and not reclaimed:
                found.append(
                    ExtraTime(
                        node=previous, ledger_class=LedgerClass.IDLE, start=reached, seconds=pause
                    )
                )
                paid += pause
            elif reached < kept_until and pause > 0:
                found.append(_scale_down(previous, reached, kept_until))
            paid += max(0.0, end - max(start, reached))  # overlapping nodes count once
            if end >= reached:
                reached = end
                previous = node
            own_stay = stays.get(id(node))
            if own_stay is None or not own_stay.by_aws_batch:
                continue
            if own_stay.cause != "reclaimed":
                kept_until = max(kept_until, end + SCALE_DOWN_SECONDS)
        if reached < kept_until:
            found.append(_scale_down(previous, reached, kept_until))
            paid += kept_until - reached
            reached = kept_until
        before = max(0.0, mine[0].started_wall - interval(mine[0])[0])
        booted = max(0.0, float(mine[0].machine.get("uptime_seconds") or 0.0) - before)
        missing = MINIMUM_SECONDS - booted - paid
        if missing > 0:
            charge = LedgerClass.MINIMUM_CHARGE
            found.append(
                ExtraTime(node=previous, ledger_class=charge, start=reached, seconds=missing)
            )
    return found


def was_started_by_another_job(
    uptime_seconds: float, started_wall: float, submitted_wall: float | None
) -> bool:
    """Return whether another job started an instance before this job used it.

    Args:
        uptime_seconds: Time since the boot of the instance, at `started_wall`.
        started_wall: Unix time at which the job's node started.
        submitted_wall: Unix time at which the Batch job was submitted; None without AWS Batch.
    """
    if uptime_seconds > LONGEST_IDLE_SECONDS:
        return True
    if submitted_wall is None:
        return False
    return started_wall - uptime_seconds < submitted_wall - SYNCHRONISED_SECONDS


def find_boots(
    nodes: Sequence[NodeTime],
    stays: Mapping[int, PaidStay],
    submitted: Mapping[str, float],
) -> list[ExtraTime]:
    """Find the paid time of each instance before its first node started.

    The instance boots and pulls the image during this time. With AWS Batch, it ends when the
    container starts. Instances that another job started are left out.

    Args:
        stays: As for `find_instance_extras`.
        submitted: As from `read_submission_times`.
    """
    found = []
    for mine in group_by_instance(nodes).values():
        first = mine[0]
        stay = stays.get(id(first))
        if stay is None:
            paid_from = first.started_wall
        else:
            paid_from = min(stay.started, first.started_wall)
        uptime = float(first.machine.get("uptime_seconds") or 0.0)
        seconds = uptime - (first.started_wall - paid_from)
        submitted_wall = submitted.get(str(first.machine.get("batch_job_id")))
        warm = was_started_by_another_job(uptime, first.started_wall, submitted_wall)
        if not warm and seconds > 0:
            found.append(
                ExtraTime(
                    node=first,
                    ledger_class=LedgerClass.BOOT,
                    start=paid_from - seconds,
                    seconds=seconds,
                )
            )
    return found


def read_submission_times(events: Sequence[Event]) -> dict[str, float]:
    """Return the Unix time at which each AWS Batch or Kubernetes job was submitted, by job id.

    The time is by the service's clock if it is recorded, else by the launcher's clock.
    """
    found = _read_launcher_times(events)
    for event in select_events(events, BatchAttemptPayload):
        if event.payload.job_id and event.payload.created_utc is not None:
            found[event.payload.job_id] = float(event.payload.created_utc)
    return found


def read_batch_jobs(events: Sequence[Event]) -> dict[str, BatchJob]:
    """Read the Batch jobs by id, each from its newest event.

    Jobs that never started or still run are left out.

    Args:
        events: The events of the job, ordered by time.
    """
    submitted = _read_launcher_times(events)
    found = {}
    for event in select_events(events, BatchAttemptPayload):
        job = _batch_job(event, submitted)
        if job is not None:
            found[job.job_id] = job
    return found


def read_slurm_jobs(events: Sequence[Event]) -> dict[str, BatchJob]:
    """Read the ended Slurm jobs by id. Jobs that never started are left out."""
    found = {}
    for event in select_events(events, SlurmJobPayload):
        payload = event.payload
        if payload.does != "ended" or not payload.started_utc or not payload.stopped_utc:
            continue
        job = _make_slurm_job(payload, float(payload.started_utc), float(payload.stopped_utc))
        found[job.job_id] = job
    return found


def read_live_slurm_jobs(events: Sequence[Event]) -> dict[str, BatchJob]:
    """Read the newest Slurm job, by its id, unless its end is recorded.

    The job counts as started at its submission and without an end, so that it can be compared with
    the time of nodes. There is at most one live Slurm job.

    Args:
        events: The events of the job, ordered by time.
    """
    payloads = select_events(events, SlurmJobPayload)
    submitted = [event for event in payloads if event.payload.does == "submitted"]
    ended = {event.payload.job_id for event in payloads if event.payload.does == "ended"}
    if not submitted or submitted[-1].payload.job_id in ended:
        return {}
    newest = submitted[-1]
    job = _make_slurm_job(newest.payload, newest.t_wall, math.inf)
    return {job.job_id: job}


def make_partition_candidate(payload: SlurmJobPayload) -> CandidateJson | None:
    """Describe a Slurm job's partition as a pool with its stated price.

    Return None if no price is stated.
    """
    if payload.usd_per_node_hour is None:
        return None
    return {
        "instance_type": f"partition {payload.partition}",
        "market": "preemptible" if payload.preemptible else "not preemptible",
        "nodes": payload.nodes or 1,
        "usd_per_hour": payload.usd_per_node_hour,
        "price_kind": STATED_FOR_PARTITION,
    }


def group_nodes_by_job(
    nodes: Sequence[NodeTime], jobs: Mapping[str, BatchJob]
) -> dict[str, list[NodeTime]]:
    """Group nodes by the id of the Batch job in which they ran.

    A node that did not record the id is assigned to the Batch job whose running time overlaps most
    with that of the node.
    """
    found: dict[str, list[NodeTime]] = {job_id: [] for job_id in jobs}
    for node in nodes:
        job_id = node.machine.get("batch_job_id") or _find_job_by_time(node, jobs)
        if job_id in found:
            found[job_id].append(node)
    return found


def find_batch_extras(
    reported: Mapping[str, Sequence[NodeTime]],
    jobs: Mapping[str, BatchJob],
    generations: Mapping[int, RecordedGeneration],
) -> list[ExtraTime]:
    """Find the paid time of Batch jobs that their nodes did not record.

    This time consists of lead, pauses and tail, as defined in the module's docstring.

    Args:
        reported: The nodes that recorded events, by job id (`group_nodes_by_job`).
    """
    found = []
    for job_id, nodes in reported.items():
        ordered = sorted(nodes, key=lambda node: (node.generation, node.start))
        by_index = group_by_key((node.node, node) for node in ordered)
        for _, mine in sorted(by_index.items()):
            found += _find_node_extras(jobs[job_id], mine, generations)
    return found


def find_unreported_nodes(
    reported: Mapping[str, Sequence[NodeTime]], jobs: Mapping[str, BatchJob]
) -> list[tuple[BatchJob, int]]:
    """Find the nodes of Batch jobs that were paid for but recorded no event, as pairs (job, node).

    A node for which Batch reports no times is not paid for if Batch reports those of other nodes of
    the job.
    """
    found = []
    for job in jobs.values():
        known = {node.node for node in reported.get(job.job_id, ())}
        for node in range(job.nodes):
            if node in known or node in job.never_started:
                continue
            if job.stay(node).micros:
                found.append((job, node))
    return found


def _read_launcher_times(events: Sequence[Event]) -> dict[str, float]:
    """Return the launcher's Unix time at the submission of each job, by job id."""
    return {
        str(event.payload.job_id): event.t_wall
        for event in select_events(events, BatchSubmittedPayload)
    }


def _batch_job(
    event: Event[BatchAttemptPayload], submitted: Mapping[str, float]
) -> BatchJob | None:
    attempt = event.payload
    if not attempt.job_id or attempt.started_utc is None or attempt.stopped_utc is None:
        return None
    started = float(attempt.started_utc)
    stopped = float(attempt.stopped_utc)
    created = started if attempt.created_utc is None else float(attempt.created_utc)
    node_times = {}
    for index, (node_started, node_stopped) in enumerate(attempt.node_times or ()):
        node_times[index] = (
            started if node_started is None else float(node_started),
            stopped if node_stopped is None else float(node_stopped),
        )
    # The job's own times are those of the main node, 0
    listed = [tuple(times) for times in attempt.node_times or ()]
    silent = {index for index, times in enumerate(listed) if index and times == (None, None)}
    if set(listed) == {(None, None)}:
        silent = set()  # Batch did not answer for the nodes
    # As recorded: the keys of a plan's candidate
    recorded = {key: event.data[key] for key in _CANDIDATE_KEYS if key in event.data}
    candidate = cast(CandidateJson, recorded)
    return BatchJob(
        job_id=attempt.job_id,
        nodes=max(1, attempt.nodes or 1),
        ranks=max(1, attempt.processes_per_node or 1),
        started=started,
        stopped=stopped,
        cause=attempt.cause or "unknown",
        placed_wall=submitted.get(attempt.job_id, created),
        candidate=candidate if recorded.get("instance_type") else None,
        node_times=node_times,
        never_started=frozenset(silent),
    )


def _scale_down(node: NodeTime, start: float, end: float) -> ExtraTime:
    """Return the time for which AWS Batch is assumed to keep a node's instance without a job.

    `start` and `end` are Unix seconds.
    """
    return ExtraTime(
        node=node, ledger_class=LedgerClass.SCALE_DOWN, start=start, seconds=end - start
    )


def _make_slurm_job(payload: SlurmJobPayload, started: float, stopped: float) -> BatchJob:
    """Convert the event payload of a Slurm job to a `BatchJob`.

    Args:
        started: Unix seconds.
        stopped: Unix seconds.
    """
    return BatchJob(
        job_id=f"slurm-{payload.job_id}",
        nodes=max(1, payload.nodes or 1),
        ranks=max(1, payload.processes_per_node or 1),
        started=started,
        stopped=stopped,
        cause="reclaimed" if payload.cause == "preempted" else "ended",
        placed_wall=started,
        candidate=make_partition_candidate(payload),
        by_slurm=True,
    )


def _find_job_by_time(node: NodeTime, jobs: Mapping[str, BatchJob]) -> str | None:
    def overlap_seconds(job: BatchJob) -> float:
        stay = job.stay(node.node)
        return min(node.ended_wall, stay.stopped) - max(node.started_wall, stay.started)

    nearest = max(
        (job for job in jobs.values() if node.node < job.nodes), key=overlap_seconds, default=None
    )
    if nearest is not None and overlap_seconds(nearest) > -CLOCKS_APART_SECONDS:
        return nearest.job_id
    return None


def _find_node_extras(
    job: BatchJob, mine: Sequence[NodeTime], generations: Mapping[int, RecordedGeneration]
) -> list[ExtraTime]:
    """Divide the unrecorded part of a node's paid time into lead, pauses and tail.

    The module's docstring defines these parts. They are exact to 1 µs.
    """

    def extra(node: NodeTime, kind: LedgerClass, start: float, micros: int) -> ExtraTime:
        return ExtraTime(node=node, ledger_class=kind, start=start, seconds=micros / MICRO)

    stay = job.stay(mine[0].node)
    left = max(0, stay.micros - sum(node.paid_micros for node in mine))
    found = []
    for before, after in pairwise(mine):
        pause = min(left, round((after.start - before.end) * MICRO))
        if pause > 0:
            found.append(extra(before, LedgerClass.IDLE, before.ended_wall, pause))
            left -= pause
    first = mine[0]
    last = mine[-1]
    lead = min(left, max(0, round((first.started_wall - stay.started) * MICRO)))
    if lead:
        found.append(extra(first, LedgerClass.STARTUP, stay.started, lead))
    if left > lead:
        cut_off = generations[last.generation].unplanned
        if cut_off:
            kind = LedgerClass.INTERRUPTION
        else:
            kind = LedgerClass.IDLE
        found.append(extra(last, kind, stay.stopped - (left - lead) / MICRO, left - lead))
    return found
