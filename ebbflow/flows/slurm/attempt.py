"""One attempt of a training step on Slurm: submit a Slurm job, wait for it, and judge its end.

The step runs where the launcher runs and trains in a Slurm job of N nodes, with one agent per node.
The order to the agents is in the job's store before the job is submitted, and the Slurm job's
comment names the order. A launcher that finds a live Slurm job of its job, which a killed launcher
has left, waits for that one and submits no second.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ebbflow.core.config.schema import PartitionConfig
from ebbflow.core.errors import InfraError, ObjectNotFound, Outcome
from ebbflow.core.event_payloads import SlurmJobPayload
from ebbflow.core.events import COMMIT, SLURM_JOB, Event, read_events, select_events
from ebbflow.core.json_values import JsonObject
from ebbflow.core.launchers import CLAIM_VARIABLE, RUN_CLAIM_VARIABLE
from ebbflow.core.layout import link_slurm_job
from ebbflow.core.process import OwnProgram
from ebbflow.core.program import PROJECT_ROOT, own_command, python_path
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.errors import TeamError
from ebbflow.cost.plan.candidates import read_progress
from ebbflow.cost.plan.partitions import (
    count_spent_usd,
    count_used_node_hours,
    make_partition_terms,
    measure_hours_needed,
)
from ebbflow.flows.job import ClockReading, Job
from ebbflow.flows.slurm.placement import (
    JobOutlook,
    PartitionChoice,
    choose_partition,
    limit_minutes,
    refused_partitions,
)
from ebbflow.flows.steps import say
from ebbflow.flows.team_budget import restore_reservation
from ebbflow.infra.slurm.commands import (
    FAR_SECONDS,
    Cause,
    LiveJob,
    SlurmJob,
    SlurmRejected,
    SlurmUnavailable,
    cancel,
    find_drained_nodes,
    find_live_jobs,
    look_up,
    read_partitions,
    submit,
    usual_minutes,
)
from ebbflow.infra.slurm.partitions import is_priced
from ebbflow.infra.slurm.script import (
    BatchScript,
    agent_lines,
    measure_save_seconds,
    partition_options,
    warning_seconds,
)
from ebbflow.training.launch.slurm_node import NodeResult, SlurmOrder, order_key, result_key

if TYPE_CHECKING:
    from ebbflow.core.config.schema import RunConfig
    from ebbflow.training.launch.messages import GangSpec

_LOOK_SECONDS = 1.0
_LONGEST_LOOK_SECONDS = 10.0  # each look is a request to the controller, which all users share
_SUBMIT_SECONDS = 300.0  # for which an unanswered sbatch is looked for and repeated
# After all agents have written their results; a dead slurmd keeps its job COMPLETING for minutes
_COMPLETING_SECONDS = 60.0
_LEAVE_SECONDS = 10.0  # beyond the last save, before a Slurm job that was asked to leave is killed
_MOST_IN_VAIN = 3  # Slurm jobs in a row without a commit, whose end nothing outside explains
_MOST_TAKEN = 20  # the same, if they were preempted or lost a node
_TAKEN = (Cause.PREEMPTED, Cause.NODE_FAILED, Cause.NODE_DRAINED, Cause.REQUEUED)
_PREFIX = "ebbflow"
_EARLY_SECONDS = 60  # by which Slurm may send its warning too early (sbatch(1), --signal)
_LONGEST_QUOTE = 200  # characters of a line of output
# Variables of the launcher's processes, which mean nothing on another machine
_OF_LAUNCHER = ("EBBFLOW_PARENT_PID", CLAIM_VARIABLE, RUN_CLAIM_VARIABLE)


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A submitted Slurm job, and the order (instructions) that it follows."""

    job_id: str
    key: str  # of the order in the job's store
    order: SlurmOrder


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """End of a Slurm job, as reported by Slurm and by the job's node 0."""

    slurm: SlurmJob
    result: NodeResult | None  # None: node 0 wrote none
    asked: bool  # whether a launcher has asked it to leave: at SIGTERM, or for other settings
    queue_expired: bool = False  # whether it was cancelled after `slurm.queue_minutes`
    drained: str = ""  # the node that an operator drains, and which the job has therefore left

    @property
    def cause(self) -> Cause:
        """Why the job ended.

        A gang saves and leaves before the time limit, so Slurm itself does not report the limit as
        the cause.
        """
        if self.queue_expired:
            return Cause.REFUSED
        if self.slurm.restarts:
            return Cause.REQUEUED
        has_left = self.result is not None and self.result.outcome is Outcome.INTERRUPTED
        if has_left and self.slurm.cause in (Cause.FAILED, Cause.COMPLETED):
            if self.asked:
                return Cause.CANCELLED
            return Cause.NODE_DRAINED if self.drained else Cause.TIME_LIMIT
        return self.slurm.cause

    def describe(self) -> str:
        """Describe how the job ended, such as "FAILED, n1 drained (new fan)"."""
        if self.cause is Cause.NODE_DRAINED:
            return f"{self.slurm.state}, {self.drained}"
        if self.queue_expired:
            return f"{self.slurm.state} by this launcher, no nodes in time"
        if self.cause is Cause.CANCELLED and self.asked:
            return f"{self.slurm.state}, asked by its launcher to leave"
        if self.cause is Cause.CANCELLED and not self.slurm.cancelled_by:
            return f"{self.slurm.state}, by whom is not known without sacct"
        return self.slurm.describe()


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """End of an attempt, and whether another attempt follows."""

    outcome: Outcome
    goes_on: bool = False  # whether another attempt follows
    was_asked: bool = False  # whether the launcher was asked to leave
    step: int | None = None
    weights_sha256: str | None = None
    message: str = ""  # to be recorded with the outcome; "" if node 0 has recorded the outcome
    told: str = ""  # how the Slurm job ended, if no outcome is to be recorded


@dataclass(frozen=True, kw_only=True)
class NextAttempt:
    """The next attempt of a job, before its submission."""

    spec: GangSpec
    choice: PartitionChoice
    hours_left: float | None  # until the deadline; None without one
    node_hours_used: float
    most_minutes: int | None  # that slurm.budget_node_hours leaves; None: it is not the limit
    warning_seconds: int  # between Slurm's warning and the time limit


@dataclass
class StopRequest:
    """Flag that is set when SIGTERM asks this process to leave."""

    received: bool = False


class JobWait:
    """Wait for the end of a Slurm job, during which this launcher may ask the job to leave or
    cancel it.

    Attributes:
        expired: whether the job was cancelled after `slurm.queue_minutes`.
        drained: the drained node for which the job was asked to leave, or "".
    """

    def __init__(self, job_id: str, config: RunConfig) -> None:
        self.expired = False
        self.drained = ""
        self._job_id = job_id
        self._config = config
        self._queued_until = time.monotonic() + 60 * config.slurm.queue_minutes
        self._kill_at: float | None = None

    def act(self, seen: SlurmJob, stop: StopRequest) -> None:
        """Ask the job to leave, or cancel it, if it must end."""
        if stop.received and self._kill_at is None:
            self._ask_to_leave(seen)
        if seen.state == "RUNNING" and self._kill_at is None:
            self.drained = _find_drained_node(seen.nodes)
            if self.drained:
                say(f"slurm: {self.drained}: job {self._job_id} saves and leaves")
                self._ask_to_leave(seen)
        if seen.waits and seen.restarts:
            _try_cancel(self._job_id)  # another Slurm job continues, from the last commit
        elif seen.waits and time.monotonic() > self._queued_until and not self.expired:
            self.expired = True
            _try_cancel(self._job_id)
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            _try_cancel(self._job_id)

    def _ask_to_leave(self, seen: SlurmJob) -> None:
        seconds = self._config.checkpoint.stop_seconds + _LEAVE_SECONDS
        self._kill_at = time.monotonic() + seconds
        _ask_to_leave(seen)


def run_attempt(
    job: Job, spec: GangSpec, *, number: int, show: Callable[[JsonObject], None] | None = None
) -> AttemptEnd:
    """Train in one Slurm job, new or left by an earlier launcher, and return how the attempt ended.

    Args:
        spec: specification of node 0, without its address.
        number: number of the attempt within the run, from 1.
        show: called with the order, as `describe_order` returns it, before the job is submitted.
    """
    try:
        with _listen() as stop:
            submitted = adopt(job, spec.config)
            if submitted is None:
                unreserved = restore_reservation(job.root_store, job.name, spec.config)
                if unreserved:
                    return _stop(Outcome.BUDGET, unreserved)
                attempt = _prepare(job, spec)
                exceeded = _find_exceeded_limit(attempt)
                if exceeded is not None:
                    return _stop(*exceeded)
                order = _write_order(job, attempt, number)
                if show is not None:
                    show(describe_order(order))
                submitted = _submit_order(job, attempt, order)
            elif show is not None:
                show(describe_order(submitted.order))
            end = await_end(job, submitted, stop)
    except (InfraError, TeamError) as error:
        return AttemptEnd(outcome=error.outcome, message=str(error))
    return _judge(job, submitted, end)


def adopt(job: Job, config: RunConfig) -> SubmittedJob | None:
    """Adopt the live Slurm job that an earlier launcher has left, or return None if there is none.

    A second such job, or one with another configuration, is asked to save and leave first, and its
    end is recorded.

    Raises:
        InfraError: Slurm or the store does not answer.
    """
    adopted = None
    ended = _find_ended(job)
    all_live = _find_jobs(f"{_PREFIX}:{_token(job)}:")
    _settle_left_behind(job, ended | {live.job_id for live in all_live})
    for live in all_live:
        if live.job_id in ended:
            continue  # a dead slurmd keeps it COMPLETING for minutes
        _, _, run, number = live.comment.split(":")
        key = order_key(run, int(number))
        order = _read_order(job, key)
        submitted = None
        if order is not None:
            submitted = SubmittedJob(job_id=live.job_id, key=key, order=order)
        if adopted is None and submitted is not None and submitted.order.spec().config == config:
            adopted = submitted
            say(f"slurm: job {live.job_id} of run {run} still {live.state.lower()}: adopted")
            _record(job, adopted, does="adopted")
            continue
        say(f"slurm: job {live.job_id} of run {run} has other settings: asked to save and leave")
        seen = _drain(live.job_id, config)
        if submitted is not None:
            _record_left_behind(job, submitted, seen, run=run, asked=True)
    return adopted


def await_end(job: Job, submitted: SubmittedJob, stop: StopRequest) -> JobEnd:
    """Wait until a Slurm job has ended.

    If `stop` is set, the job saves and leaves first. A job that waits in the queue for longer than
    `slurm.queue_minutes` is cancelled.
    """
    wait = JobWait(submitted.job_id, job.config)
    completing_since: float | None = None
    shown = ""
    pause = _LOOK_SECONDS
    seen = SlurmJob(job_id=submitted.job_id, state="PENDING")
    while True:
        try:
            seen = look_up(submitted.job_id)
            text = _describe_progress(seen)
        except SlurmUnavailable as error:
            text = f"no answer, and the job goes on without it: {error}"
        if text != shown:
            say(f"slurm: job {submitted.job_id} {text}")
            shown = text
            pause = _LOOK_SECONDS
        if seen.ended:
            break
        if seen.state == "COMPLETING":
            completing_since = completing_since or time.monotonic()
            results = _has_results(job, submitted)
            if results and time.monotonic() - completing_since > _COMPLETING_SECONDS:
                break
        wait.act(seen, stop)
        _sleep(pause, stop)
        pause = min(1.5 * pause, _LOOK_SECONDS if stop.received else _LONGEST_LOOK_SECONDS)
    return JobEnd(
        slurm=seen,
        result=_read_result(job, submitted),
        asked=stop.received,
        queue_expired=wait.expired,
        drained=wait.drained,
    )


def make_batch_script(job: Job, attempt: NextAttempt, key: str, comment: str) -> BatchScript:
    """Build the script of one Slurm job, in which each node runs an agent."""
    spec = attempt.spec
    config = spec.config
    slurm = config.slurm
    options = [
        f"--job-name={job.name}",
        f"--comment={comment}",
        *partition_options(attempt.choice.partition, most_minutes=attempt.most_minutes),
        f"--nodes={spec.nodes}",
        "--ntasks-per-node=1",
        "--no-requeue",
        f"--signal=B:USR1@{attempt.warning_seconds}",
        f"--output={str(log_folder(job)).replace('%', '%%')}/%j.log",
        "--open-mode=append",
        *slurm.options,
    ]
    may_leave = config.cluster.min_nodes is not None
    if may_leave:
        options.append("--no-kill")  # a lost node does not end the others
    python = "python" if slurm.activate or slurm.container_image else sys.executable
    words = [python, "-m", OwnProgram.SLURM_NODE.value, job.store.uri, key]
    return BatchScript(options=options, lines=agent_lines(slurm, words, may_leave=may_leave))


def describe_order(order: SlurmOrder) -> JsonObject:
    """Return an order's pool, nodes, limits and reason, with the keys of `AttemptOrder.brief`."""
    spec = order.spec()
    if order.most_minutes is None:
        wall_seconds = None
    else:
        wall_seconds = 60 * order.most_minutes
    return {
        "does": "train",
        "nodes": spec.nodes,
        "processes_per_node": spec.processes_per_node,
        "pool": _describe_partition(order),
        "limits": {
            "wall_seconds": wall_seconds,
            "runnable_seconds": 60 * spec.config.slurm.queue_minutes,
        },
        "reason": order.reason,
    }


def ended_jobs(events: Sequence[Event], run: str) -> list[SlurmJobPayload]:
    """Return the records of a run's ended Slurm jobs, oldest first."""
    return [
        event.payload
        for event in select_events(events, SlurmJobPayload)
        if event.run == run and event.payload.does == "ended"
    ]


def count_submitted_jobs(events: Sequence[Event], run: str) -> int:
    """Return how many Slurm jobs a run has submitted."""
    return sum(
        event.run == run and event.payload.does == "submitted"
        for event in select_events(events, SlurmJobPayload)
    )


def log_folder(job: Job) -> Path:
    """Return the folder of the Slurm jobs' output, which must be on a disk that the nodes share."""
    shared = job.store.local_path("slurm")
    folder = job.folder / "slurm" if shared is None else shared
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _prepare(job: Job, spec: GangSpec) -> NextAttempt:
    """Choose the partition, cost terms and time limit of the next attempt.

    Raises:
        InfraError: Slurm or the store does not answer.
    """
    config = spec.config
    events = read_events(job.store)
    progress = read_progress(events, run=job.run)
    now = ClockReading.of(job.store).utc
    hours_left = None
    if config.cost.deadline_hours is not None:
        hours_left = config.cost.deadline_hours - (now - (progress.started_utc or now)) / 3600
    usd_left = None
    if config.cost.budget_usd is not None and is_priced(config):
        usd_left = config.cost.budget_usd - count_spent_usd(events)
    choice = choose_partition(
        config,
        ended_jobs(events, job.run),
        JobOutlook(
            hours_needed=measure_hours_needed(events, config.training.max_steps),
            hours_left=hours_left,
            usd_left=usd_left,
        ),
    )
    terms = make_partition_terms(
        config,
        choice.partition,
        events,
        processes_per_node=spec.processes_per_node,
        started_utc=progress.started_utc or now,
    )
    used = count_used_node_hours(events)
    return NextAttempt(
        spec=replace(spec, terms=terms),
        choice=choice,
        hours_left=hours_left,
        node_hours_used=used,
        most_minutes=_limit_minutes(config, choice.partition, used),
        warning_seconds=warning_seconds(config, measure_save_seconds(events)),
    )


def _limit_minutes(config: RunConfig, partition: PartitionConfig | None, used: float) -> int | None:
    if config.slurm.budget_node_hours is None:
        return None
    known = read_partitions()
    if partition is None:
        fields = next((shown for shown in known.values() if shown.get("Default") == "YES"), {})
    else:
        fields = known.get(partition.name, {})
    usual = usual_minutes(partition, fields)
    return limit_minutes(config, node_hours_used=used, usual_minutes=usual)


def _find_exceeded_limit(attempt: NextAttempt) -> tuple[Outcome, str] | None:
    """Return the outcome and message if a limit of the job forbids another attempt, else None."""
    config = attempt.spec.config
    left = attempt.hours_left
    if left is not None and left <= 0:
        late = f"the deadline passed {-left:.1f} h ago (cost.deadline_hours)"
        return Outcome.DEADLINE, late
    minutes = attempt.most_minutes
    notice = attempt.warning_seconds + _EARLY_SECONDS
    if minutes is not None and 60 * minutes <= notice:
        budget = config.slurm.budget_node_hours
        return Outcome.BUDGET, (
            f"budget: {attempt.node_hours_used:.4g} of {budget:g} node-hours are used, and the "
            f"{minutes} min that are left for {attempt.spec.nodes} nodes are too short: Slurm may warn "
            f"{notice} s before the end; fix: a larger slurm.budget_node_hours"
        )
    terms = attempt.spec.terms
    spent = "" if terms is None else terms.out_of_money()
    return (Outcome.BUDGET, spent) if spent else None


def _write_order(job: Job, attempt: NextAttempt, number: int) -> SlurmOrder:
    """Write an attempt's `SlurmOrder` to the store, where the nodes of its Slurm job read it."""
    partition = attempt.choice.partition
    order = SlurmOrder(
        gang=attempt.spec.to_json(),
        partition=None if partition is None else partition.name,
        round=number,
        most_minutes=attempt.most_minutes,
        reason=attempt.choice.reason,
    )
    job.store.put(order_key(job.run, number), order.model_dump_json().encode())
    return order


def _submit_order(job: Job, attempt: NextAttempt, order: SlurmOrder) -> SubmittedJob:
    """Submit a Slurm job that carries out an order."""
    key = order_key(job.run, order.round)
    comment = f"{_PREFIX}:{_token(job)}:{job.run}:{order.round}"
    script = make_batch_script(job, attempt, key, comment).render()
    job_id = _submit_once(script, comment)
    submitted = SubmittedJob(job_id=job_id, key=key, order=order)
    limit = "" if order.most_minutes is None else f", {order.most_minutes} min at most"
    say(
        f"slurm: attempt {order.round} is job {job_id} in {_describe_partition(order)} "
        f"({order.reason}), {attempt.spec.nodes} nodes{limit}"
    )
    _record(job, submitted, does="submitted")
    return submitted


def _describe_partition(order: SlurmOrder) -> str:
    if order.partition is None:
        return "the default partition"
    return f"partition {order.partition}"


def _submit_once(script: str, comment: str) -> str:
    """Submit a script, and return the id of its job.

    If the answer is lost, the job may exist. Before the next try, it is searched by its comment.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        # Inside salloc, those of its allocation contradict those of the new job
        if name not in _OF_LAUNCHER and (not name.startswith("SLURM_") or name == "SLURM_CONF")
    }
    environment |= {"PYTHONPATH": python_path(), "EBBFLOW_PROJECT": str(PROJECT_ROOT)}
    limit = time.monotonic() + _SUBMIT_SECONDS
    while True:
        try:
            return submit(script, environment)
        except SlurmUnavailable as error:
            if time.monotonic() > limit:
                raise
            say(f"slurm: {error}; trying again")
        time.sleep(_LOOK_SECONDS)
        with contextlib.suppress(SlurmUnavailable):
            for live in find_live_jobs(comment):
                return live.job_id


def _judge(job: Job, submitted: SubmittedJob, end: JobEnd) -> AttemptEnd:
    """Record how the Slurm job ended, and decide how the training goes on."""
    _record(job, submitted, does="ended", end=end)
    result = end.result
    told = f"Slurm job {submitted.job_id} ended: {end.describe()}"
    if result is not None and not result.error and result.outcome is not Outcome.INTERRUPTED:
        return AttemptEnd(
            outcome=result.outcome, step=result.step, weights_sha256=result.weights_sha256
        )
    if end.asked:
        return AttemptEnd(outcome=Outcome.INTERRUPTED, was_asked=True, told=told)
    if result is not None and result.error and not result.curable:
        return AttemptEnd(outcome=result.outcome, told=result.error)  # node 0 has recorded it
    return _follow_up(job, submitted, end)


def _follow_up(job: Job, submitted: SubmittedJob, end: JobEnd) -> AttemptEnd:
    """Decide whether another attempt follows a Slurm job that did not complete the training."""
    told = f"Slurm job {submitted.job_id} ended: {end.describe()}"
    events = read_events(job.store)
    ends = ended_jobs(events, job.run)
    if end.queue_expired:
        refused = refused_partitions(ends)
        if len(refused) < len(job.config.slurm.partitions):
            say(f"slurm: {told}; another partition follows")
            return AttemptEnd(outcome=Outcome.INTERRUPTED, goes_on=True)
        message = (
            f"{told}: {' and '.join(refused)} did not grant {submitted.order.spec().nodes} nodes "
            f"within {job.config.slurm.queue_minutes:g} min; fix: raise slurm.queue_minutes, or "
            "name another partition"
        )
        return _stop(Outcome.NO_CAPACITY, message)
    if end.cause is Cause.CANCELLED:
        again = f"{own_command()} run --with slurm --job {job.name}"
        return _stop(Outcome.INTERRUPTED, f"{told}; to go on: {again} and its configuration")
    reason = _give_up_reason(ends, commits=sum(event.name == COMMIT for event in events))
    if reason:
        output = log_folder(job) / f"{submitted.job_id}.log"
        return _stop(Outcome.FAILED, f"{reason}; output: {output}{_quote_last_line(output)}")
    result = end.result
    saved = "" if result is None or result.step is None else f", saved at step {result.step}"
    say(f"slurm: {told}{saved} ({end.cause}); another attempt follows")
    return AttemptEnd(outcome=Outcome.INTERRUPTED, goes_on=True)


def _give_up_reason(ends: Sequence[SlurmJobPayload], *, commits: int) -> str:
    """Return why another attempt would not help, or "" if it may help.

    Only attempts of this run since its last commit count.
    """
    vain = list(itertools.takewhile(lambda end: end.commits == commits, reversed(ends)))
    # A cancelled one was another launcher's: this run ends with its own
    excused = (*_TAKEN, Cause.REFUSED, Cause.CANCELLED)
    failed = [end for end in vain if end.cause not in excused]
    if len(failed) < _MOST_IN_VAIN and len(vain) < _MOST_TAKEN:
        return ""
    causes = ", ".join(sorted({f"{end.state}: {end.cause}" for end in vain}))
    last = f"; the last one: {vain[0].reason}" if vain[0].reason else ""
    return f"{len(vain)} Slurm jobs in a row ended without a commit ({causes}){last}"


def _quote_last_line(output: Path) -> str:
    """Return the last line of a Slurm job's output as the end of a message, or "" without one."""
    try:
        lines = output.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f", which ends with: {one_line(last)[:_LONGEST_QUOTE]}" if last else ""


def _stop(outcome: Outcome, message: str) -> AttemptEnd:
    say(f"slurm: {message}")
    return AttemptEnd(outcome=outcome, message=message)


def _record(job: Job, submitted: SubmittedJob, *, does: str, end: JobEnd | None = None) -> None:
    spec = submitted.order.spec()
    partition = _find_partition(submitted.order)
    with job.events(f"slurm-{submitted.job_id}-{does}") as log:
        log.origin = replace(log.origin, attempt=spec.attempt)
        if end is None:
            link_slurm_job(job.folder, submitted.job_id)
            log.emit(
                SLURM_JOB,
                does=does,
                job_id=submitted.job_id,
                partition=submitted.order.partition,
                nodes=spec.nodes,
                processes_per_node=spec.processes_per_node,
                preemptible=partition.preemptible,
                usd_per_node_hour=partition.usd_per_node_hour,
                most_minutes=submitted.order.most_minutes,
                why=submitted.order.reason,
            )
            return
        log.emit(
            SLURM_JOB,
            does=does,
            job_id=submitted.job_id,
            partition=end.slurm.partition or submitted.order.partition,
            nodes=spec.nodes,
            processes_per_node=spec.processes_per_node,
            preemptible=partition.preemptible,
            usd_per_node_hour=partition.usd_per_node_hour,
            state=end.slurm.state,
            cause=end.cause.value,
            reason=end.result.error if end.result and end.result.error else end.describe(),
            started_utc=end.slurm.started_utc,
            stopped_utc=end.slurm.ended_utc,
            commits=sum(event.name == COMMIT for event in read_events(job.store)),
        )


def _find_jobs(comment: str) -> list[LiveJob]:
    """Return the live jobs whose comment begins with `comment`.

    Wait for a controller that restarts.

    Raises:
        SlurmUnavailable: no answer for several minutes.
    """
    limit = time.monotonic() + _SUBMIT_SECONDS
    while True:
        try:
            return find_live_jobs(comment)
        except SlurmUnavailable as error:
            if time.monotonic() > limit:
                raise
            say(f"slurm: {error}; trying again")
        time.sleep(_LOOK_SECONDS)


def _find_partition(order: SlurmOrder) -> PartitionConfig:
    """Return the configuration of an order's partition. The cluster's default partition has no
    price.
    """
    for partition in order.spec().config.slurm.partitions:
        if partition.name == order.partition:
            return partition
    return PartitionConfig(name=order.partition or "")


def _settle_left_behind(job: Job, known: set[str]) -> None:
    """Record the end of each Slurm job that ended after its launcher had been killed.

    Args:
        known: ids of the jobs that are live or whose end is recorded.
    """
    for event in select_events(read_events(job.store), SlurmJobPayload):
        payload = event.payload
        if payload.does != "submitted" or payload.job_id in known:
            continue
        known.add(payload.job_id)
        key = order_key(event.run, int(event.attempt or 0) + 1)
        order = _read_order(job, key)
        if order is None:
            continue
        submitted = SubmittedJob(job_id=payload.job_id, key=key, order=order)
        seen = look_up(payload.job_id)
        _record_left_behind(job, submitted, seen, run=event.run, asked=False)


def _record_left_behind(
    job: Job, submitted: SubmittedJob, seen: SlurmJob, *, run: str, asked: bool
) -> None:
    """Record the end of a Slurm job that another launcher submitted.

    Args:
        asked: whether this launcher has asked it to leave.
    """
    end = JobEnd(slurm=seen, result=_read_result(job, submitted), asked=asked)
    say(f"slurm: job {submitted.job_id} of run {run} ended: {end.describe()}")
    _record(job, submitted, does="ended", end=end)


def _find_drained_node(nodes: str) -> str:
    """Return a drained node with the operator's reason, such as "n1 drained (new fan)", or "".

    It is "" if no node is drained or Slurm does not answer.
    """
    try:
        drained = find_drained_nodes(nodes)
    except (SlurmUnavailable, SlurmRejected):
        return ""
    for node, reason in drained.items():
        return f"{node} drained ({reason})" if reason else f"{node} drained"
    return ""


def _find_ended(job: Job) -> set[str]:
    """Return the ids of the Slurm jobs whose end a launcher has recorded."""
    events = select_events(read_events(job.store), SlurmJobPayload)
    return {event.payload.job_id for event in events if event.payload.does == "ended"}


def _read_order(job: Job, key: str) -> SlurmOrder | None:
    """Read an order, or return None if the store has lost it or another version wrote it."""
    try:
        return SlurmOrder.model_validate_json(job.store.get(key))
    except (ObjectNotFound, ValidationError):
        return None


def _drain(job_id: str, config: RunConfig) -> SlurmJob:
    """Ask a Slurm job to save and leave, wait until it has ended, and return it."""
    cancel_at = time.monotonic() + config.checkpoint.stop_seconds + _LEAVE_SECONDS
    seen = SlurmJob(job_id=job_id, state="RUNNING")
    with contextlib.suppress(SlurmUnavailable):
        seen = look_up(job_id)
    _ask_to_leave(seen)
    while not seen.ended:
        time.sleep(_LOOK_SECONDS)
        if time.monotonic() > cancel_at:
            _try_cancel(job_id)
        with contextlib.suppress(SlurmUnavailable):
            seen = look_up(job_id)
    return seen


def _ask_to_leave(seen: SlurmJob) -> None:
    _try_cancel(seen.job_id, signal_name=None if seen.waits else "TERM")


def _sleep(seconds: float, stop: StopRequest) -> None:
    """Sleep for `seconds`, but wake up about a second after this process is asked to leave."""
    until = time.monotonic() + seconds
    asked_before = stop.received
    while time.monotonic() < until and stop.received == asked_before:
        time.sleep(min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))


def _try_cancel(job_id: str, *, signal_name: str | None = None) -> None:
    """Cancel a job or send it a signal. Ignore a Slurm that does not answer.

    The caller's next query shows whether that worked.
    """
    with contextlib.suppress(SlurmUnavailable):
        cancel(job_id, signal_name=signal_name)


def _describe_progress(seen: SlurmJob) -> str:
    if seen.waits:
        reason = f" ({seen.reason})" if seen.reason else ""
        start = seen.expected_start_utc
        if start is None or not 0 < start - time.time() < FAR_SECONDS:
            return f"waits in the queue{reason}"
        at = time.strftime("%d %b %H:%M", time.localtime(start))
        return f"waits in the queue{reason}; Slurm expects its start on {at}"
    if seen.state == "RUNNING":
        return f"runs on {seen.nodes}"
    if seen.state == "COMPLETING":
        return "ends"
    return seen.describe()


def _has_results(job: Job, submitted: SubmittedJob) -> bool:
    return _read_result(job, submitted) is not None


def _read_result(job: Job, submitted: SubmittedJob) -> NodeResult | None:
    """Return node 0's result, or None if it wrote none."""
    key = result_key(submitted.key, 0)
    if job.store.head(key) is None:
        return None
    return NodeResult.model_validate_json(job.store.get(key))


def _token(job: Job) -> str:
    """Return a short hash that identifies the job among all jobs of all stores."""
    return hashlib.sha256(job.store.uri.encode()).hexdigest()[:12]


@contextlib.contextmanager
def _listen() -> Iterator[StopRequest]:
    """Context manager that turns SIGTERM, by which the launcher asks its tasks to leave, into a
    flag.
    """
    stop = StopRequest()

    def receive(_number: int, _frame: object) -> None:
        stop.received = True

    before = signal.signal(signal.SIGTERM, receive)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
