"""Typed events of a job, the ledger classes of paid time, and the reader of a job's event log.

    event = {v, t_wall, t_mono, job, run, attempt, generation, node, rank, step, name, data}

Object stores cannot append, so each process writes a series of objects, called segments
(`infra.segments`). Constants in this module name the events that the ledger reads; other names are
allowed. `_DATA` defines the types of an event's data. `read_log` reports events that do not match
these types, and lines that do not match their checksums.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Any

from pydantic_core import from_json

from ebbflow.core.errors import Outcome
from ebbflow.core.segments import (
    Damage,
    Line,
    Segments,
    Unsealed,
    read_new_segments,
    read_segments,
    unseal,
)
from ebbflow.core.store import Store


class LedgerClass(StrEnum):
    """Use of paid time.

    Ranks report the classes up to HANG. The ledger derives the other classes from all events.
    """

    # Forward, backward, optimizer of a completed step that is in the final weights
    USEFUL_STEP = "useful_step"
    DATA_WAIT = "data_wait"  # waiting for the next batch
    CHECKPOINT_STALL = "checkpoint_stall"  # training waits for a save
    EVALUATION = "evaluation"
    # From the node's start to the first step: processes, rendezvous, model, compilation
    STARTUP = "startup"
    RESTORE = "restore"  # reading a commit
    SHUTDOWN = "shutdown"  # from the last step to the node's end
    HANG = "hang"  # the step that did not complete, until the hang was detected
    REDONE_STEP = "redone_step"  # a step that was lost and computed again
    SKIPPED_STEP = "skipped_step"  # a step whose update a guard skipped
    # From a rank's last step to its node's end, in an interrupted generation
    INTERRUPTION = "interruption"
    UNATTRIBUTED = "unattributed"  # paid, but no interval covers it
    IDLE = "idle"  # between two generations on the same billed instance
    MINIMUM_CHARGE = "minimum_charge"  # an instance is billed for at least 60 s


VERSION = 2  # version of a line's format; segments of version 1 have no seal

# Written by the coordinator, which is node 0's agent. started: parent (commit key or null),
# parent_step, nodes, processes_per_node. ended: reason (an EndReason, or the Outcome of a planned
# end), culprit (text), user_code (bool); ranks_started (false) if it ended before any rank was
# started.
GENERATION_STARTED = "generation_started"
GENERATION_ENDED = "generation_ended"
# Written by each node's agent: the paid time. started: ranks (list), host, and the known facts of
# its machine (`infra.instance`): instance_id, instance_type, zone, zone_id, market, uptime_seconds,
# identified_by; batch_job_id. ended: seconds (since started), reason.
NODE_STARTED = "node_started"
# seconds (since started), resident_bytes (of the ranks), and of the machine memory_available_bytes,
# disk_free_bytes, shared_memory_free_bytes; with GPUs also gpus, gpu_memory_used_bytes,
# gpu_memory_free_bytes, gpu_busy_percent, gpu_celsius, gpu_watts and gpus_slowed (by heat or
# power); at the end of the ranks trained (their last completed step)
NODE_HEARTBEAT = "node_heartbeat"
NODE_ENDED = "node_ended"
# Written by each rank. phase: class (a ledger class), seconds. step: loss, tokens (the batch's
# weight in the unit it counts), seconds ({ledger class: seconds}), skipped (why its update was
# skipped), own_seconds (without waiting for other ranks, from one step sync to the next); on rank 0
# also flops (of all), and slowest_rank by own_seconds with its ratio to the others' median
# (slowest_ratio) and its seconds beyond it (slowest_seconds).
PHASE = "phase"
STEP = "step"
STAGED = "staged"  # step, bytes: a save is in flight; earlier events are flushed with it
COMMIT = "commit"  # step, key, bytes, seconds, stall_seconds
# Step, reason: a due save was skipped, by policy or for lack of time
COMMIT_SKIPPED = "commit_skipped"
# seconds, stall_seconds, slow_down_seconds, upload_seconds, hazard_per_hour, predicted_loss
INTERVAL = "interval"
COMMIT_FAILED = "commit_failed"  # step, message
# step, key, seconds, split, rejected (list of {key, reason, lost_steps, lost_usd, lost})
RESTORE = "restore"
# step, key (newest commit in the events), found_step, found_key (newest in the store; null: none):
# the store was restored from an older snapshot, and a person has accepted it
ROLLBACK = "rollback"
# Tensors, seconds, files (list of {path, bytes, modified_unix, sha256})
INITIAL_WEIGHTS = "initial_weights"
PEAK = "peak"  # flops_per_second (measured, of one rank), dtype
# steps first to last of a rank: trace (key), classes (seconds), collectives, overlap_share; lines:
# these as text
PROFILE = "profile"
# Written by rank 0: figures of the worst links between machines (training/network_probe.py)
NETWORK = "network"
# Metrics {name: value}; of a workload with pictures also pictures {name: SVG}
EVALUATION = "evaluation"
# Written by the agent that receives it. notice: source, action, seconds_left (null: unknown),
# save_seconds (left for a save), does (leave, save, nothing), detail. sources: watched (list),
# absent ({source: why}), or problem (text).
NOTICE = "notice"
NOTICE_SOURCES = "notice_sources"
FAULT_INJECTED = "fault_injected"  # kind, target, step
# Written by the rank whose guard acts, or by rank 0 if all ranks' guards do. action
# (`GuardAction`), reason (text); skip: samples ([first, end)); rewind: limit (the newest commit to
# go back to), first_sample, samples; split: accumulation (micro-batches per step); slow_rank,
# data_bound: rank, share, usd_per_hour; diverged: ranks.
GUARD = "guard"
# culprit (text), reason, fingerprint; of the culprit rank, node, kind, because (the rule that named
# it), where, step, phase, certainty, cascades (ranks), next_action, dump (path); lost_rank_seconds
# and usd_lost since the newest commit.
FAULT_DETECTED = "fault_detected"
# The same, of an idle rank for which the others wait; it is not ended yet, and may continue
STALL = "stall"
# Written by the flow's steps, or by rank 0 without a flow.
# Settings (list of {key, value, source}, one for each key of the configuration)
CONFIGURED = "configured"
PREFLIGHT = "preflight"  # results (list), sent_away (the step ran in a container)
# prepared: fingerprint, weight_unit, and of text train_tokens, held_out_tokens,
# unigram_entropy_nats, files, bytes …
PREPARED = "prepared"
PLAN = "plan"  # the plan as JSON
# Written by the process that submits an attempt to AWS Batch. placed: placement
# (`cost.capacity.Placement` as JSON), attempt, round, why, after_generation (the newest known
# generation). batch_attempt: Batch's record of the finished job
# (`ebbflow.infra.batch.jobs.BatchAttempt`): job_id, job_name, queue, nodes, status, created_utc,
# started_utc, stopped_utc (Unix times by Batch's clock; null: not reached), exit_code, reason,
# cause, node_times (of several nodes: [started, stopped] of each); and of its placement
# instance_type, market, region, zone, processes_per_node, usd_per_hour, quoted_usd_per_hour,
# price_kind. `ebbflow.cost.capacity.attempt_record` makes it.
PLACED = "placed"
# Written by the process that submitted: job_id, job_name, step, task (of the flow); twin_of: the
# job was created by an unanswered submit and was terminated; the id of the job that is used
# instead, or None.
BATCH_SUBMITTED = "batch_submitted"
BATCH_ATTEMPT = "batch_attempt"
BUDGET = "budget"  # threshold (share of the budget), spent_usd, budget_usd, reserve_usd
# prices: pools (list of {instance_type, market, region, zone, kind, changes: [[Unix time, "dollars
# per hour"], …]})
PRICES = "prices"
# certificate: the resume certificate as JSON (ebbflow.tryout.certify), if requested.
CERTIFICATE = "certificate"
# Written by rank 0 of a script, or of a job on GPUs: level (how exactly it resumes), same_data (by
# which means; "": it may differ), reasons.
PROMISE = "promise"
OUTCOME = "outcome"  # outcome, step, weights_sha256, message
# Written by the supervisor after each run of the flow: verdict
# (`flows.supervising.verdict.Verdict`), exit_code, seconds, commit (key of the newest one, or
# null), failures (that the run counts for).
SUPERVISED = "supervised"


class EndReason(StrEnum):
    """Reason why a generation, or a node's part of it, ended early.

    A planned end has an `Outcome` instead.
    """

    RANK_FAILED = "rank_failed"
    RANK_KILLED = "rank_killed"
    NODE_LOST = "node_lost"
    HANG = "hang"
    AGENT_FAILED = "agent_failed"  # an exception in the agent
    ROLL_CALL = "roll_call"  # not all nodes joined the start
    AGENT_STOPPED = "agent_stopped"  # asked to stop, by a notice or a signal
    SUPERSEDED = "superseded"  # a newer generation of the job has started
    STORE = "store"  # the store failed, or its content is damaged
    REWIND = "rewind"  # a guard went back to an older commit
    SPLIT = "split"  # a micro-batch did not fit into memory
    RENEWAL = "renewal"  # memory grew: processes were restarted before it ran out


class GuardAction(StrEnum):
    """Action that a guard takes.

    Rewind and split apply from the next start (`ebbflow.training.engine.guards.overrides`).
    """

    SKIP = "skip"
    REWIND = "rewind"
    SPLIT = "split"
    RENEW = "renew"
    SLOW_RANK = "slow_rank"
    DATA_BOUND = "data_bound"
    DIVERGED = "diverged"


def _is_dollars(value: Any) -> bool:
    try:
        usd = Decimal(str(value))
    except InvalidOperation:
        return False
    return not isinstance(value, bool) and usd.is_finite() and usd >= 0


def _is_measurement(value: Any) -> bool:
    """Return whether a value is a finite number.

    It may be large: overflowing gradients have norms of up to 3e38.
    """
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


_SECONDS = {LedgerClass: float}
_POOL = {"instance_type!": str, "market!": str, "region": str, "zone": str}
_CHOSEN = _POOL | {
    "nodes": int,
    "price_kind": str,
    **dict.fromkeys(
        ("usd_per_hour!", "quoted_usd_per_hour", "on_demand_usd_per_hour"), _is_dollars
    ),
    **dict.fromkeys(("expected_hours", "expected_usd", "compute_usd"), float),
    **dict.fromkeys(("tokens_per_second", "mfu", "interruptions"), float),
}
# The types ("shapes") of each event's data, as far as a reader depends on them. A key that ends
# with "!" is required; the others may be absent or null. float: a number up to 1e30, such as
# seconds, dollars and counts, which are summed; [shape]: a list; {type: shape}: a mapping with keys
# of that type; (shape, …): one of these; a function: a condition.
_DATA: dict[str, dict[str, Any]] = {
    GENERATION_STARTED: {
        "parent": str,
        "parent_step": int,
        "nodes": int,
        "processes_per_node": int,
    },
    GENERATION_ENDED: {
        "reason": str,
        "culprit": str,
        "user_code": bool,
        "fingerprint": str,
        "ranks_started": bool,
    },
    NODE_STARTED: {
        "ranks": [int],
        "host": str,
        "uptime_seconds": float,
        **dict.fromkeys(
            ("instance_id", "instance_type", "zone", "zone_id", "region", "market", "batch_job_id"),
            str,
        ),
    },
    NODE_HEARTBEAT: {"seconds": float, "trained": int},
    NODE_ENDED: {"seconds": float, "reason": str},
    PHASE: {"class!": LedgerClass, "seconds!": float},
    STEP: {
        "seconds": _SECONDS,
        "skipped": str,
        **dict.fromkeys(("tokens", "flops", "own_seconds", "slowest_seconds"), float),
        **dict.fromkeys(
            ("loss", "learning_rate", "gradient_norm", "slowest_ratio"), _is_measurement
        ),
    },
    STAGED: {"bytes": int},
    COMMIT: {"key": str, "bytes": int, "seconds": float, "stall_seconds": float},
    COMMIT_SKIPPED: {"reason": str},
    COMMIT_FAILED: {"message": str},
    INTERVAL: {"seconds": float, "predicted_loss": _is_measurement},
    RESTORE: {"key": str, "seconds": float, "rejected": [dict]},
    ROLLBACK: {"key": str, "found_key": str, "found_step": int},
    INITIAL_WEIGHTS: {"tensors": int, "seconds": float, "files": [dict]},
    PEAK: {"flops_per_second": float, "dtype": str},
    PROFILE: {"first": int, "last": int, "trace": str, "lines!": {str: str}},
    NETWORK: {
        "nodes!": int,
        "mtu": int,
        "where": {str: str},
        **dict.fromkeys(("seconds", "round_trip_seconds"), float),
        **dict.fromkeys(("bandwidth_bytes_per_second", "all_reduce_bytes_per_second"), float),
        "clock_offset_seconds": _is_measurement,
    },
    EVALUATION: {"metrics": {str: object}, "pictures": {str: str}},
    NOTICE: {"source": str, "action": str, "does": str, "seconds_left": float},
    NOTICE_SOURCES: {"watched": [str], "absent": dict, "problem": str},
    GUARD: {
        "action": GuardAction,
        "reason": str,
        "rank": int,
        **dict.fromkeys(("share", "usd_per_hour"), _is_measurement),
    },
    CERTIFICATE: {"holds": bool, "interruptions": list, "steps": int},
    PROMISE: {"level": str, "same_data": str, "reasons": [str]},
    FAULT_INJECTED: {"kind": str, "target": str},
    **{name: {"culprit": str, "reason": str} for name in (FAULT_DETECTED, STALL)},
    CONFIGURED: {"settings!": [{"key!": str, "source": str}]},
    PREFLIGHT: {"results": [dict], "sent_away": bool},
    PREPARED: {"weight_unit": str},
    PLAN: {
        "chosen": _CHOSEN,
        "simulated": bool,
        "refusal": {"outcome!": Outcome, "message!": str},
        "on_demand": {str: (_is_dollars, None)},
        "ranked": [dict],
        "rejected": (list, dict),
        "counts": {str: int},
        "budget_usd": float,
        "deadline_hours": float,
        "started_utc": float,
    },
    PLACED: {"placement": dict, "after_generation": int},
    BATCH_SUBMITTED: {"job_id": str},
    BATCH_ATTEMPT: {
        "job_id!": str,
        "cause": str,
        "nodes": int,
        "processes_per_node": int,
        "node_times": [[(float, None)]],
        **dict.fromkeys(("created_utc", "started_utc", "stopped_utc"), float),
    },
    BUDGET: {"threshold!": float, "spent_usd": float, "budget_usd": float, "reserve_usd": float},
    PRICES: {"pools": [_POOL | {"kind": str, "changes!": [[(float, _is_dollars)]]}]},
    OUTCOME: {"outcome!": Outcome, "weights_sha256": str, "message": str},
    SUPERVISED: {"verdict": object, "exit_code": int, "seconds": float},
}
_FIELDS = {
    **dict.fromkeys(("name!", "job!", "run!"), str),
    **dict.fromkeys(("attempt!", "generation!", "node!", "rank!", "step", "v"), int),
    **dict.fromkeys(("t_wall!", "t_mono!"), float),
    "data": dict,
}
# Their `step` is the name of a step of the flow
_OF_FLOW_STEPS = frozenset({PLACED, BATCH_SUBMITTED})
_LARGEST_FLOAT = 1e30
_LARGEST_INT = 2**63
_LARGEST_SECONDS = 1e11  # some thousand years: a longer time or duration is damage
# Ends after which every process of a generation has closed its log.
_CLOSED_BY = frozenset({Outcome.COMPLETED, Outcome.BUDGET, Outcome.DEADLINE, Outcome.NON_FINITE})
# A rank without events for this long, while another reports steps, has lost its events
_HEARD_SECONDS = 30.0
_RANK_PREFIX = re.compile(r"events/(\d+)/\d+-\d+")
_UNCLOSED_SECONDS = 60.0  # a flow step that wrote its last event this long ago has closed its log
_MOST_NODES = 100_000
# Steps that every job of the flow took before its first generation.
_FLOW_STEPS = frozenset(f"events/000000/0-{step}" for step in ("preflight", "plan", "prepare"))


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event in the event log of a job."""

    name: str
    job: str
    run: str
    attempt: int
    generation: int
    node: int
    rank: int  # number of the rank; -1: the process is not a rank
    step: int | None  # training step; of PLACED and BATCH_SUBMITTED the name of a step of the flow
    t_wall: float  # Unix time in seconds
    t_mono: float  # monotonic clock of the writing machine, in seconds
    data: dict[str, Any] = field(default_factory=dict)  # data of this kind of event
    v: int = VERSION  # version of the line's format

    @classmethod
    def from_json(cls, line: str | bytes) -> Event:
        return cls(**json.loads(line))

    def to_json(self) -> str:
        """Return the event as a line of strict JSON, with null for non-finite numbers.

        Raises TypeError if the data contains an object that JSON cannot represent.
        """
        try:
            return json.dumps(self.__dict__, separators=(",", ":"), allow_nan=False)
        except ValueError:  # rare: only events with non-finite numbers are copied
            return json.dumps(without_nan(self.__dict__), separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Fields that are the same in all events of a process."""

    job: str
    run: str = ""
    attempt: int = 0
    generation: int = 0
    node: int = 0
    rank: int = -1  # number of the rank; -1: the process is not a rank
    process: str = "rank"  # name of a process that is not a rank, such as "agent"

    @property
    def writer(self) -> int | str:
        if self.rank >= 0:
            return self.rank
        return self.process


@dataclass(frozen=True, kw_only=True)
class LogContent:
    """All events of a job, sorted by wall time, and the damaged or missing parts of its event log."""

    events: list[Event]
    damage: tuple[Damage, ...]


_warned: set[str] = set()


def read_events(job_store: Store) -> list[Event]:
    """Return all events of a job, sorted by wall time. Raises StoreError.

    If the log is damaged, print a warning to stderr, once per job. `read_log` returns the damage
    and prints nothing.
    """
    content = read_log(job_store)
    if content.damage and job_store.uri not in _warned:
        _warned.add(job_store.uri)
        first, *others = content.damage
        if others:
            more = f" (and {len(others)} more)"
        else:
            more = ""
        text = (
            f"events: WARNING: damaged log {job_store.uri}: {first.text}{more}; see the job's "
            "report"
        )
        print(text, file=sys.stderr, flush=True)
    return content.events


def read_log(job_store: Store) -> LogContent:
    """Return all events of a job, and the damaged or missing parts of its event log.

    Raises StoreError.
    """
    unsealed = unseal(read_segments(job_store))
    events: list[Event] = []
    damage = list(unsealed.damage)
    newest: dict[str, float] = {}  # Unix time, by segment
    unverified: dict[str, int] = defaultdict(int)
    for line in unsealed.lines:
        event = _parse(line)
        if isinstance(event, Damage):
            damage.append(event)
            continue
        events.append(event)
        newest[line.segment] = max(newest.get(line.segment, event.t_wall), event.t_wall)
        unverified[line.segment] += not line.sealed and event.v > 1
    named = {one.segment for one in damage}
    for segment, count in unverified.items():
        if count and segment not in named:
            damage.append(
                Damage(
                    segment,
                    f"no seal, the segment is cut off; its {count} events cannot be verified",
                )
            )
    events.sort(key=lambda event: (event.t_wall, event.t_mono))
    damage += _missing_writers(unsealed, events, newest)
    return LogContent(events=events, damage=tuple(damage))


class LogFollower:
    """Reader of a growing event log.

    It reads each segment once, and skips lines that are not valid events.

    Args:
        wanted: Condition on the keys of the segments to read.
    """

    def __init__(
        self, job_store: Store, *, wanted: Callable[[str], bool] = lambda key: True
    ) -> None:
        self.damage: list[
            Damage
        ] = []  # to the segments that were read; missing segments are not noticed
        self._store = job_store
        self._wanted = wanted
        self._segments = Segments()

    def read_new(self) -> Iterator[list[Event]]:
        """Read the segments that were added since the last call, and yield their events, some
        thousand at a time.

        Raises StoreError.
        """
        for contents in read_new_segments(self._store, self._segments, self._wanted):
            unsealed = unseal(Segments(contents=contents), gaps=False)
            found = []
            self.damage += unsealed.damage
            for line in unsealed.lines:
                event = _parse(line)
                if isinstance(event, Event):
                    found.append(event)
                else:
                    self.damage.append(event)
            yield found


def _parse(line: Line) -> Event | Damage:
    """Parse a line of the log.

    If it is not a valid event, return a damage record with the reason.
    """
    try:
        try:
            fields = from_json(line.content, allow_inf_nan=False)
        except ValueError:  # old logs contain NaN and infinities, which become None
            fields = json.loads(line.content, parse_constant=lambda word: None)
        problem = _CHECKS.get(str(fields.get("name")), _CHECK_OTHER)(fields)
        if not problem and max(abs(fields["t_wall"]), abs(fields["t_mono"])) > _LARGEST_SECONDS:
            problem = "its time is out of range"
        if not problem:
            return Event(**fields)
    except (ValueError, RecursionError):
        problem = "not JSON"
    except AttributeError:
        problem = "not an event"
    except TypeError as error:  # the event has a field that this version lacks
        problem = str(error)
    return Damage(line.segment, f"{problem}; the event is left out", line.number)


def _compile_shape(shape: Any) -> Callable[[Any], str]:
    """Make a function that describes the first part of a value that does not match `shape`; "" if
    all of it matches.

    shape: the expected type, written as in `_DATA`.
    """
    if isinstance(shape, dict):
        return _compile_fields(shape)
    if isinstance(shape, list):
        check = _compile_shape(shape[0])
        items = lambda value: (_below(f"[{at}]", check(item)) for at, item in enumerate(value))
        return lambda value: (
            next(filter(None, items(value)), "") if isinstance(value, list) else _is_wrong(value)
        )
    if isinstance(shape, tuple):
        checks = [_compile_shape(one) for one in shape]
        return lambda value: "" if any(not check(value) for check in checks) else _is_wrong(value)
    if isinstance(shape, type) and issubclass(shape, StrEnum):
        known = frozenset(map(str, shape))
        return lambda value: "" if isinstance(value, str) and value in known else _is_wrong(value)
    fits = _FITS.get(shape) or (
        (lambda value: isinstance(value, shape)) if isinstance(shape, type) else shape
    )
    return lambda value: "" if fits(value) else _is_wrong(value)


_FITS: dict[Any, Callable[[Any], bool]] = {
    # Never true of NaN
    float: lambda value: type(value) in (float, int) and abs(value) <= _LARGEST_FLOAT,
    int: lambda value: type(value) is int and abs(value) < _LARGEST_INT,
    object: lambda value: True,
    None: lambda value: value is None,
}


def _compile_fields(shape: Mapping[Any, Any]) -> Callable[[Any], str]:
    named = [
        (key.removesuffix("!"), key[-1] == "!", _compile_shape(shape[key]))
        for key in shape
        if type(key) is str
    ]
    every = [
        (_compile_shape(key), _compile_shape(inner))
        for key, inner in shape.items()
        if type(key) is not str
    ]

    def check_fields(value: Any) -> str:
        if not isinstance(value, dict):
            return _is_wrong(value)
        for name, required, check in named:
            item = value.get(name)
            if item is None:
                if required:
                    return f"{name} is missing"
            elif problem := check(item):
                return _below(name, problem)
        for check_key, check in every:
            for name, item in value.items():
                if problem := _below(f"{name} (key)", check_key(name)) or _below(name, check(item)):
                    return problem
        return ""

    return check_fields


def _below(name: str, problem: str) -> str:
    """Put the name of a field before the description of a problem in it; "" without a problem."""
    return problem and f"{name}{'' if problem[0] in ' [' else '.'}{problem}"


def _is_wrong(value: Any) -> str:
    text = repr(value)
    return f" is {text if len(text) <= 40 else f'{text[:39]}…'}"


_CHECKS = {  # by the name of an event
    name: _compile_shape(_FIELDS | {"data!": shape, "step": str if name in _OF_FLOW_STEPS else int})
    for name, shape in _DATA.items()
}
_CHECK_OTHER = _compile_shape(_FIELDS)


def _missing_writers(
    unsealed: Unsealed, events: Sequence[Event], newest: Mapping[str, float]
) -> Iterator[Damage]:
    """Yield one damage record per process whose events, or whose final segment, should be in the
    log but are missing.

    newest: Unix time of the newest event in each segment.
    """
    prefixes = {prefix for prefix, _ in unsealed.writers}
    closed_by_plan = _generations_ended(events, _CLOSED_BY)
    ended_nodes = {(event.generation, event.node) for event in events if event.name == NODE_ENDED}
    for prefix in sorted(_expected_writers(events, closed_by_plan, prefixes) - prefixes):
        yield Damage(
            prefix,
            "nothing is there of this process, which must have written; its time is not known",
        )
    latest = max((event.t_wall for event in events), default=0.0)
    for prefix, token in sorted(unsealed.open_writers):
        folder, _, process = prefix.removeprefix("events/").partition("/")
        node, _, name = process.partition("-")
        last = max(
            (at for key, at in newest.items() if key.startswith(f"{prefix}-") and token in key),
            default=latest,
        )
        if name == "agent":
            must = (
                int(folder) in closed_by_plan
                and node.isdecimal()
                and (int(folder), int(node)) not in ended_nodes
            )
        elif name.isdecimal():
            must = int(folder) in closed_by_plan
        else:
            # A process that waits for AWS Batch may be killed at any time; a flow step may be retried
            tried_again = any(
                other == prefix and again != token for other, again in unsealed.writers
            )
            must = prefix in _FLOW_STEPS and not tried_again and last < latest - _UNCLOSED_SECONDS
        if must:
            yield Damage(
                prefix,
                f"log {token} has no end: its last events are lost, or its process was killed",
            )


def _generations_ended(events: Sequence[Event], outcomes: Set[Outcome]) -> set[int]:
    ends = (event for event in events if event.name == GENERATION_ENDED)
    return {event.generation for event in ends if event.data.get("reason") in outcomes}


def _expected_writers(
    events: Sequence[Event], closed_by_plan: set[int], heard: set[str]
) -> set[str]:
    """Return the key prefixes of the agents, ranks and flow steps that must have written events.

    The set is empty for logs of version 1.

    Args:
        closed_by_plan: generations that ended as planned.
        heard: key prefixes of the processes that have written events.
    """
    if all(event.v == 1 for event in events):
        return set()
    found: set[str] = set()
    with_agents = {
        event.generation for event in events if event.name in (GENERATION_STARTED, NODE_STARTED)
    }
    with_ranks = {int(match[1]) for prefix in heard if (match := _RANK_PREFIX.fullmatch(prefix))}
    must_have_ranks = _generations_of_ranks(events, closed_by_plan, with_ranks)
    for event in events:
        folder = f"events/{event.generation:06d}"
        if event.rank >= 0 and event.generation in with_agents:
            found.add(f"{folder}/{event.node}-agent")
        if event.name == GENERATION_STARTED and event.generation in closed_by_plan:
            found |= {
                f"{folder}/{node}-agent"
                for node in range(min(event.data.get("nodes") or 0, _MOST_NODES))
            }
        if event.name == NODE_STARTED and event.generation in must_have_ranks:
            found |= {f"{folder}/{event.node}-{rank}" for rank in event.data.get("ranks") or []}
    if any(prefix.endswith("-agent") for prefix in heard) and not heard.isdisjoint(_FLOW_STEPS):
        found |= _FLOW_STEPS
    return found


def _generations_of_ranks(
    events: Sequence[Event], closed_by_plan: set[int], with_ranks: set[int]
) -> set[int]:
    """Return the generations in which every rank must have written at least one event.

    - Completed generations.
    - Generations with another planned end, if any rank wrote events. A job whose budget is spent
      ends before its ranks start.
    - Generations in which any rank reported steps for more than 30 s. Ranks step together, so the
      other ranks also had events to write. A rank that is killed before its first step may leave no
      event.
    """
    completed = _generations_ended(events, {Outcome.COMPLETED})
    spans: dict[
        tuple[int, int], tuple[float, float]
    ] = {}  # of a rank's steps, by its machine's monotonic clock
    for event in events:
        if event.name == STEP and event.rank >= 0:
            of_rank = event.generation, event.rank
            first, last = spans.get(of_rank, (event.t_mono, event.t_mono))
            spans[of_rank] = min(first, event.t_mono), max(last, event.t_mono)
    heard = {
        generation
        for (generation, _), (first, last) in spans.items()
        if last - first > _HEARD_SECONDS
    }
    return completed | (closed_by_plan & with_ranks) | heard


def describe_network(probe: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> str:
    """Describe the data of a `network` event. before: medians of earlier `network` events, for
    comparison.
    """
    parts = []
    for key, name in (
        ("all_reduce_bytes_per_second", "all-reduce"),
        ("bandwidth_bytes_per_second", "slowest link"),
    ):
        speed = probe.get(key)
        if speed is not None:
            usual = (before or {}).get(key)
            if usual and speed < usual / 2:
                slow = ", SLOW"
            else:
                slow = ""
            parts.append(
                f"{name} {speed / 1e6:,.0f} MB/s"
                + (f" (earlier {usual / 1e6:,.0f}{slow})" if usual else "")
            )
    if probe.get("mtu"):
        parts += [f"MTU {probe['mtu']:,}"]
    offset = probe.get("clock_offset_seconds")
    if offset is not None:
        parts.append(f"clocks within {abs(offset) * 1e3:,.0f} ms")
    return ", ".join(parts)


def without_nan(value: Any) -> Any:
    """Replace NaN and infinities with None, also in nested values, because JSON does not support
    them.
    """
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
