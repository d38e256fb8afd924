"""Typed events of a job, the ledger classes of paid time, and the reader of a job's event log.

    event = {v, t_wall, t_mono, job, run, attempt, generation, node, rank, step, name, data}

Object stores cannot append, so each process writes a series of objects, called segments
(`ebbflow.core.segments`). Constants in this module name the events that the ledger reads; other names are
allowed. `PAYLOADS` maps the names to the types of the events' data
(`ebbflow.core.event_payloads`). `read_log` reports events that do not match these types, and lines
that do not match their checksums.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import typing_extensions
from pydantic import ConfigDict, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import from_json

import ebbflow.core.event_payloads as payloads
from ebbflow.core.errors import EndReason as EndReason
from ebbflow.core.errors import Outcome
from ebbflow.core.event_payloads import GuardAction as GuardAction
from ebbflow.core.event_payloads import (
    InvalidPayload,
    Payload,
    RequiredInteger,
    RequiredNumber,
    RequiredText,
    describe_error,
    parse_payload,
)
from ebbflow.core.event_payloads import LedgerClass as LedgerClass
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

VERSION = 2  # version of a line's format; segments of version 1 have no seal

# Written by the coordinator, which is node 0's agent
GENERATION_STARTED = "generation_started"
GENERATION_ENDED = "generation_ended"
FAULT_DETECTED = "fault_detected"
ROLLBACK = "rollback"
# Written by each node's agent
NODE_STARTED = "node_started"
NODE_HEARTBEAT = "node_heartbeat"
NODE_ENDED = "node_ended"
NOTICE = "notice"
NOTICE_SOURCES = "notice_sources"
STALL = "stall"
# Written by each rank
PHASE = "phase"
STEP = "step"
STAGED = "staged"
COMMIT = "commit"
COMMIT_SKIPPED = "commit_skipped"
COMMIT_FAILED = "commit_failed"
INTERVAL = "interval"
RESTORE = "restore"
INITIAL_WEIGHTS = "initial_weights"
PEAK = "peak"
GPU_MEMORY = "gpu_memory"
PROFILE = "profile"
FAULT_INJECTED = "fault_injected"
GUARD = "guard"
# Written by rank 0
NETWORK = "network"
EVALUATION = "evaluation"
BUDGET = "budget"
PROMISE = "promise"
# Written by the flow's steps, or by rank 0 without a flow
CONFIGURED = "configured"
PREFLIGHT = "preflight"
PREPARED = "prepared"
PLAN = "plan"
CERTIFICATE = "certificate"
PRICES = "prices"
OUTCOME = "outcome"
# Written by the process that submits an attempt to AWS Batch or Kubernetes
PLACED = "placed"
BATCH_SUBMITTED = "batch_submitted"
BATCH_ATTEMPT = "batch_attempt"
SLURM_JOB = "slurm_job"
# Written by the supervisor after each run of the flow
SUPERVISED = "supervised"

PAYLOADS: dict[str, type[Payload]] = {
    GENERATION_STARTED: payloads.GenerationStartedPayload,
    GENERATION_ENDED: payloads.GenerationEndedPayload,
    FAULT_DETECTED: payloads.FaultDetectedPayload,
    ROLLBACK: payloads.RollbackPayload,
    NODE_STARTED: payloads.NodeStartedPayload,
    NODE_HEARTBEAT: payloads.NodeHeartbeatPayload,
    NODE_ENDED: payloads.NodeEndedPayload,
    NOTICE: payloads.NoticePayload,
    NOTICE_SOURCES: payloads.NoticeSourcesPayload,
    STALL: payloads.StallPayload,
    PHASE: payloads.PhasePayload,
    STEP: payloads.StepPayload,
    STAGED: payloads.StagedPayload,
    COMMIT: payloads.CommitPayload,
    COMMIT_SKIPPED: payloads.CommitSkippedPayload,
    COMMIT_FAILED: payloads.CommitFailedPayload,
    INTERVAL: payloads.IntervalPayload,
    RESTORE: payloads.RestorePayload,
    INITIAL_WEIGHTS: payloads.InitialWeightsPayload,
    PEAK: payloads.PeakPayload,
    GPU_MEMORY: payloads.GpuMemoryPayload,
    PROFILE: payloads.ProfilePayload,
    FAULT_INJECTED: payloads.FaultInjectedPayload,
    GUARD: payloads.GuardPayload,
    NETWORK: payloads.NetworkPayload,
    EVALUATION: payloads.EvaluationPayload,
    BUDGET: payloads.BudgetPayload,
    PROMISE: payloads.PromisePayload,
    CONFIGURED: payloads.ConfiguredPayload,
    PREFLIGHT: payloads.PreflightPayload,
    PREPARED: payloads.PreparedPayload,
    PLAN: payloads.PlanPayload,
    CERTIFICATE: payloads.CertificatePayload,
    PRICES: payloads.PricesPayload,
    OUTCOME: payloads.OutcomePayload,
    PLACED: payloads.PlacedPayload,
    BATCH_SUBMITTED: payloads.BatchSubmittedPayload,
    BATCH_ATTEMPT: payloads.BatchAttemptPayload,
    SLURM_JOB: payloads.SlurmJobPayload,
    SUPERVISED: payloads.SupervisedPayload,
}
# Their `step` is the name of a step of the flow
_OF_FLOW_STEPS = frozenset({PLACED, BATCH_SUBMITTED})
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
_warned: set[str] = set()  # stores whose damage was printed
PayloadT = typing_extensions.TypeVar("PayloadT", bound=Payload, covariant=True, default=Payload)
_P = TypeVar("_P", bound=Payload)


class InvalidEvent(ValueError):
    """Error: a line of the log is not an event. The message names the first field that does not
    match.
    """


class _PayloadSlot:
    """Slot for an event's parsed payload, kept out of the fields that are compared and written."""

    __slots__ = ("_payload",)

    _payload: Any

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)  # a copy parses its payload again

    def remember(self, payload: Payload) -> None:
        object.__setattr__(self, "_payload", payload)


def _check_step(value: Any) -> int | str | None:
    if value is None or isinstance(value, str):
        return value
    return payloads.check_integer(value)


@dataclass(frozen=True, kw_only=True)
class Event(_PayloadSlot, Generic[PayloadT]):
    """One event in the event log of a job.

    `Event[StepPayload]` is an event with that payload; `is_event` and `select_events` narrow an
    event of unknown payload to it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: RequiredText
    job: RequiredText
    run: RequiredText
    attempt: RequiredInteger
    generation: RequiredInteger
    node: RequiredInteger
    rank: RequiredInteger  # number of the rank; -1: the process is not a rank
    # Training step; of PLACED and BATCH_SUBMITTED the name of a step of the flow
    step: Annotated[int | None, PlainValidator(_check_step)]
    t_wall: RequiredNumber  # Unix time in seconds
    t_mono: RequiredNumber  # monotonic clock of the writing machine, in seconds
    data: dict[str, Any] = field(default_factory=dict)  # the payload as JSON values
    v: RequiredInteger = VERSION  # version of the line's format

    @classmethod
    def from_json(cls, line: str | bytes) -> Event:
        return cls(**json.loads(line))

    @property
    def payload(self) -> PayloadT:
        """The event's data, parsed into its payload class.

        Raises:
            InvalidPayload: The data do not match. Events of a log were checked as they were read.
        """
        try:
            return self._payload
        except AttributeError:
            self.remember(parse_payload(PAYLOADS.get(self.name, Payload), self.data))
        return self._payload

    def to_json(self) -> str:
        """Serialize the event as one line of strict JSON, with null for non-finite numbers.

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
    """All events of a job by wall time, and the damaged or missing parts of its event log."""

    events: list[Event]
    damage: tuple[Damage, ...]


class LogFollower:
    """Reader of a growing event log.

    It reads each segment once, and skips lines that are not valid events.

    Args:
        wanted: Condition on the keys of the segments to read; None: all.
    """

    def __init__(self, job_store: Store, *, wanted: Callable[[str], bool] | None = None) -> None:
        # To the segments that were read; missing segments are not noticed
        self.damage: list[Damage] = []
        self._store = job_store
        self._wanted = wanted or _any_key
        self._segments = Segments()

    def read_new(self) -> Iterator[list[Event]]:
        """Read the segments that were added since the last call; yield their events, a few thousand
        at a time.

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


def is_event(event: Event, kind: type[_P]) -> typing_extensions.TypeIs[Event[_P]]:
    """Return whether an event has a payload of this class."""
    return issubclass(PAYLOADS.get(event.name, Payload), kind)


def select_events(events: Iterable[Event], kind: type[_P]) -> list[Event[_P]]:
    """Return the events with a payload of this class, in the same order."""
    return [event for event in events if is_event(event, kind)]


def find_last_event(events: Sequence[Event], kind: type[_P]) -> Event[_P] | None:
    """Return the last event with a payload of this class; None if there is none."""
    return next((event for event in reversed(events) if is_event(event, kind)), None)


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
    named = {flaw.segment for flaw in damage}
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


def describe_network(probe: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> str:
    """Describe the data of a `network` event, such as "slowest link 900 MB/s".

    Args:
        before: medians of earlier `network` events, for comparison.
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
    """Replace NaN and infinities with None, also in nested values, because JSON has no such
    numbers.
    """
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _any_key(_key: str) -> bool:
    return True


def _parse(line: Line) -> Event | Damage:
    """Parse a line of the log.

    If it is not a valid event, return a damage record with the reason.
    """
    try:
        return _parse_event(_parse_json(line.content))
    except (InvalidEvent, InvalidPayload) as error:
        problem = str(error)
    except (ValueError, RecursionError):
        problem = "not JSON"
    return Damage(line.segment, f"{problem}; the event is left out", line.number)


def _parse_json(content: bytes) -> Any:
    try:
        return from_json(content, allow_inf_nan=False)
    except ValueError:
        # Old logs contain NaN and infinities
        return json.loads(content, parse_constant=_null_of)


def _null_of(_constant: str) -> None:
    return None


def _parse_event(fields: Any) -> Event:
    try:
        event = _event_adapter().validator.validate_python(fields)
    except ValidationError as error:
        if not isinstance(fields, dict):
            raise InvalidEvent("not an event") from error
        raise InvalidEvent(describe_error(error)) from error
    if event.name in PAYLOADS and "data" not in fields:
        raise InvalidEvent("data is missing")
    step_type = str if event.name in _OF_FLOW_STEPS else int
    if event.step is not None and not isinstance(event.step, step_type):
        raise InvalidEvent(f"step is {event.step!r}")
    event.remember(parse_payload(PAYLOADS.get(event.name, Payload), event.data))
    if max(abs(event.t_wall), abs(event.t_mono)) > _LARGEST_SECONDS:
        raise InvalidEvent("its time is out of range")
    return event


@cache
def _event_adapter() -> TypeAdapter[Event]:
    # Made at the first use: most processes write events, and read none
    return TypeAdapter(Event)


def _missing_writers(
    unsealed: Unsealed, events: Sequence[Event], newest: Mapping[str, float]
) -> Iterator[Damage]:
    """Yield a damage record for each process whose events, or whose last segment, are missing.

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
    """Return the key prefixes of all agents, ranks and flow steps that must have written events.

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
    """Return the generations in which every rank must have written events.

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
