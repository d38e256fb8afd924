"""Payloads of a job's events: one class per event name, with typed fields.

A payload is the typed view of an event's data. `parse_payload` makes it with pydantic. Values keep
their JSON form: no text becomes a number, and an integer stays an integer. Fields that a payload
does not declare stay in `Event.data`.

There are two kinds of types. A value that does not match a strict type (`Text`, `Integer`,
`Number`, `Measurement`, `Dollars`, `Flag`) makes the event invalid. A value that does not match a
lenient type (`AnyText`, `AnyInteger`, `AnyNumber`) counts as absent, since earlier versions did not
check it. Fields are None if they are absent or null, unless stated otherwise.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import Field, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from ebbflow.core.errors import Outcome

T = TypeVar("T")
_LARGEST_FLOAT = 1e30
_LARGEST_INT = 2**63
_LONGEST_VALUE = 40
_MISSING = "missing"  # pydantic's name of the error of an absent field
_UNEXPECTED = "unexpected_keyword_argument"  # likewise of an unknown field
_WITHOUT_VALUE = frozenset({"dict_type", "list_type", "dataclass_type"})


class LedgerClass(StrEnum):
    """What paid time was used for, such as useful steps, startup or waiting for data.

    Ranks report the classes up to HANG. The ledger derives the other classes from all events.
    """

    # Forward, backward, optimizer of a completed step that is in the final weights
    USEFUL_STEP = "useful_step"
    DATA_WAIT = "data_wait"  # waiting for the next batch
    CHECKPOINT_STALL = "checkpoint_stall"  # training waits for a save
    EVALUATION = "evaluation"
    PROFILING = "profiling"  # starting the profiler, and writing its traces and tables
    # From the node's start to the first step: processes, rendezvous, model, compilation
    STARTUP = "startup"
    RESTORE = "restore"  # reading a commit
    SHUTDOWN = "shutdown"  # from the last step to the node's end
    SCRIPT = "script"  # a script that calls no ebbflow.attach, whose steps are unknown
    HANG = "hang"  # the step that did not complete, until the hang was detected
    REDONE_STEP = "redone_step"  # a step that was lost and computed again
    SKIPPED_STEP = "skipped_step"  # a step whose update a guard skipped
    # From a rank's last step to its node's end, in an interrupted generation
    INTERRUPTION = "interruption"
    UNATTRIBUTED = "unattributed"  # paid, but no interval covers it
    # From the instance's start to Batch's start of the container or the agent's first event: boot and
    # image pull
    BOOT = "boot"
    IDLE = "idle"  # between two generations on the same billed instance
    MINIMUM_CHARGE = "minimum_charge"  # an instance is billed for at least 60 s
    # From the end of the last job on an instance of AWS Batch until Batch terminates it
    SCALE_DOWN = "scale_down"
    # Root volumes of the nodes. Their dollars have no time of their own.
    VOLUMES = "volumes"


class GuardAction(StrEnum):
    """Response of a guard (a check of losses, weights or memory), such as skipping an update.

    Rewind and split apply from the next start (`ebbflow.training.engine.guards.overrides`).
    """

    SKIP = "skip"
    REWIND = "rewind"
    SPLIT = "split"
    RENEW = "renew"
    SLOW_RANK = "slow_rank"
    DATA_BOUND = "data_bound"
    DIVERGED = "diverged"


class InvalidPayload(ValueError):
    """Error: an event's data do not match the types of its payload. The message names the first
    field.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """Base class of the payloads, and payload of events with unknown names."""


P = TypeVar("P", bound=Payload)


def _check_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ValueError


Text = Annotated[str | None, PlainValidator(_check_text)]


def check_integer(value: object) -> int | None:
    if value is None or (type(value) is int and abs(value) < _LARGEST_INT):
        return value
    raise ValueError


Integer = Annotated[int | None, PlainValidator(check_integer)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStartedPayload(Payload):
    """Start of a generation (one start of all ranks), reported by node 0's agent, the
    coordinator.
    """

    parent: Text = None  # key of the commit it resumes; None: none
    parent_step: Integer = None
    nodes: Integer = None
    processes_per_node: Integer = None


def _check_flag(value: object) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise ValueError


Flag = Annotated[bool | None, PlainValidator(_check_flag)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEndedPayload(Payload):
    """End of a generation, reported by the coordinator."""

    reason: Text = None  # an `EndReason`, or the `Outcome` of a planned end
    culprit: Text = None
    user_code: Flag = None
    fingerprint: Text = None
    ranks_started: Flag = None  # False if it ended before any rank was started
    known_cause: Flag = None  # True if the loss of a node is explained, as by a fault of its GPU
    same_limit: Integer = None  # number of equal failures that end the job, if it is not the usual


def _check_number(value: Any) -> float | None:
    """Check a value that is summed, such as seconds or dollars: a number of plausible size, or
    None.
    """
    if value is None or (type(value) in (float, int) and abs(value) <= _LARGEST_FLOAT):
        return value
    return _unless_nan(value)


def _unless_nan(value: object) -> None:
    # Only of an event that was not read from a log, in which NaN is written as null
    if not (isinstance(value, float) and math.isnan(value)):
        raise ValueError


Number = Annotated[float | None, PlainValidator(_check_number)]


def _not_null(check: Callable[[object], T]) -> Callable[[object], T]:
    """Wrap the check of an element in a list or mapping so that it rejects null."""

    def check_element(value: object) -> T:
        if value is None:
            raise ValueError
        return check(value)

    return check_element


TextElement = Annotated[str, PlainValidator(_not_null(_check_text))]
IntegerElement = Annotated[int, PlainValidator(_not_null(check_integer))]
NumberElement = Annotated[float, PlainValidator(_not_null(_check_number))]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStartedPayload(Payload):
    """Start of a node's paid time, with facts about its machine (`infra.instance`).

    Reported by the node's agent.
    """

    ranks: list[IntegerElement] | None = None
    host: Text = None
    uptime_seconds: Number = None
    instance_id: Text = None
    instance_type: Text = None
    zone: Text = None
    zone_id: Text = None
    region: Text = None
    market: Text = None
    batch_job_id: Text = None


def _any_number(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return None


AnyNumber = Annotated[float | None, PlainValidator(_any_number)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHeartbeatPayload(Payload):
    """Heartbeat of a node's agent, sent once per second, with the state of the machine."""

    seconds: Number = None  # since the node's start
    trained: Integer = None  # last completed step of its ranks, once they have ended
    resident_bytes: AnyNumber = None  # of the ranks
    # Of the machine
    memory_available_bytes: AnyNumber = None
    disk_free_bytes: AnyNumber = None
    shared_memory_free_bytes: AnyNumber = None
    gpus: AnyNumber = None
    gpu_memory_used_bytes: AnyNumber = None
    gpu_memory_free_bytes: AnyNumber = None
    gpu_busy_percent: AnyNumber = None
    gpu_celsius: AnyNumber = None
    gpu_watts: AnyNumber = None
    gpus_slowed: AnyNumber = None  # by heat or power


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEndedPayload(Payload):
    """End of a node's paid time in a generation, reported by its agent."""

    seconds: Number = None  # since the node's start
    reason: Text = None


def _present(check: Callable[[object], T]) -> Callable[[object], T]:
    """Wrap the check of a field so that it requires the field to be present and not null."""

    def check_presence(value: object) -> T:
        if value is None:
            raise PydanticCustomError(_MISSING, _MISSING)
        return check(value)

    return check_presence


RequiredText = Annotated[str, PlainValidator(_present(_check_text))]
RequiredInteger = Annotated[int, PlainValidator(_present(check_integer))]
RequiredNumber = Annotated[float, PlainValidator(_present(_check_number))]


def _member_of(kinds: type[StrEnum]) -> Callable[[object], StrEnum | None]:
    members = {str(kind): kind for kind in kinds}

    def check_member(value: object) -> StrEnum | None:
        if value is None:
            return None
        if not isinstance(value, str) or value not in members:
            raise ValueError
        return members[value]

    return check_member


SecondsByClass = dict[
    Annotated[LedgerClass, PlainValidator(_not_null(_member_of(LedgerClass)))], NumberElement
]
RequiredClass = Annotated[LedgerClass, PlainValidator(_present(_member_of(LedgerClass)))]
RequiredOutcome = Annotated[Outcome, PlainValidator(_present(_member_of(Outcome)))]
OptionalAction = Annotated[GuardAction | None, PlainValidator(_member_of(GuardAction))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePayload(Payload):
    """Time that a rank spent outside of steps."""

    ledger_class: Annotated[RequiredClass, Field(validation_alias="class")]
    seconds: RequiredNumber


def _check_measurement(value: Any) -> float | None:
    """Check that a measured value is a finite number or None.

    It may be large: overflowing gradients have norms of up to 3e38.
    """
    if value is None or (type(value) in (float, int) and abs(value) <= sys.float_info.max):
        return value
    return _unless_nan(value)


Measurement = Annotated[float | None, PlainValidator(_check_measurement)]


def _check_loss(value: Any) -> float:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return math.nan
    _check_measurement(value)
    return value


# NaN: the loss was not finite
Loss = Annotated[float | None, PlainValidator(_check_loss)]


def _any_integer(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None


AnyInteger = Annotated[int | None, PlainValidator(_any_integer)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPayload(Payload):
    """A training step of a rank: its time, loss and speed."""

    seconds: SecondsByClass | None = None
    skipped: Text = None  # why its update was skipped
    tokens: Number = None  # the batch's weight, in the unit that the workload counts
    flops: Number = None  # of all ranks; rank 0 only
    # Without waiting for other ranks, from one step sync to the next
    own_seconds: Number = None
    slowest_seconds: Number = None  # of `slowest_rank`, beyond the others' median
    loss: Loss = None  # None: not recorded; NaN: not finite
    learning_rate: Measurement = None
    gradient_norm: Measurement = None
    slowest_ratio: Measurement = None  # of `slowest_rank`'s time to the others' median
    slowest_rank: AnyInteger = None  # rank with the longest `own_seconds`; rank 0 only
    max_steps: AnyInteger = None  # of the job, when a script's loop first says it or changes it
    merged: AnyInteger = None  # number of steps (`ebbflow.observe.watch.merge_committed_steps`)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPayload(Payload):
    """A save that was copied to the staging buffer and is not yet committed.

    Earlier events are flushed with it.
    """

    bytes: Integer = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPayload(Payload):
    """A commit: a durable, verified checkpoint."""

    key: Text = None
    bytes: Integer = None
    seconds: Number = None  # from the save's start
    stall_seconds: Number = None  # for which training waited


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSkippedPayload(Payload):
    """A due save that was skipped, by policy or because time was short."""

    reason: Text = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFailedPayload(Payload):
    """A save that failed, so that it did not become a commit."""

    message: Text = None
    seconds: AnyNumber = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalPayload(Payload):
    """The checkpoint interval that the job computed (`ebbflow.training.save_controller`)."""

    seconds: Number = None
    predicted_loss: Measurement = None  # share of the paid time


def _any_text(value: object) -> str | None:
    if isinstance(value, str):
        return value
    return None


AnyText = Annotated[str | None, PlainValidator(_any_text)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedCommit:
    """A commit that turned out to be damaged when a generation tried to restore it."""

    key: AnyText = None
    reason: AnyText = None
    lost: AnyText = None  # steps and dollars that are lost with it


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePayload(Payload):
    """The commit from which a generation resumed."""

    key: Text = None
    seconds: Number = None
    rejected: list[DamagedCommit] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPayload(Payload):
    """Return of the store to an older snapshot, which the user has accepted."""

    key: Text = None  # newest commit in the events
    found_key: Text = None  # newest commit in the store; None: none
    found_step: Integer = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeightsPayload(Payload):
    """The weights with which a new job began."""

    tensors: Integer = None
    seconds: Number = None
    files: list[dict[str, Any]] | None = None  # path, bytes, modified_unix, sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPayload(Payload):
    """Measured peak speed of one rank, in floating point operations per second."""

    flops_per_second: Number = None
    dtype: Text = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryPayload(Payload):
    """Peak GPU memory of a rank since its start; emitted each time the peak grows."""

    allocated_bytes: Integer = None  # by tensors
    reserved_bytes: Integer = None  # by torch's allocator, from the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePayload(Payload):
    """A profile of one rank, for the steps `first` to `last`."""

    first: Integer = None
    last: Integer = None
    trace: Text = None  # key
    lines: dict[str, TextElement]  # the profile's tables as text


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPayload(Payload):
    """Measurements of the worst links between machines (`ebbflow.training.network_probe`)."""

    nodes: RequiredInteger
    mtu: Integer = None
    where: dict[str, TextElement] | None = None
    seconds: Number = None
    round_trip_seconds: Number = None
    bandwidth_bytes_per_second: Number = None
    all_reduce_bytes_per_second: Number = None
    clock_offset_seconds: Measurement = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPayload(Payload):
    """Results of an evaluation: metrics, and pictures as SVG if the workload draws some."""

    metrics: dict[str, AnyNumber] | None = None
    non_finite: dict[str, TextElement] | None = None  # metrics that are inf or NaN, as texts
    pictures: dict[str, TextElement] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticePayload(Payload):
    """A notice that an agent received, such as a spot interruption, or a remark (`message`) of a
    rank.
    """

    source: Text = None
    action: Text = None
    does: Text = None  # response: leave, save, wait or nothing
    seconds_left: Number = None
    detail: AnyText = None
    message: AnyText = None
    rank: AnyInteger = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeSourcesPayload(Payload):
    """The sources of notices that an agent watches, such as the instance metadata."""

    watched: list[TextElement] | None = None
    absent: dict[str, Any] | None = None  # why, by source
    problem: Text = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPayload(Payload):
    """An action of a guard, reported by the guard's rank, or by rank 0 if all ranks act."""

    action: OptionalAction = None
    reason: Text = None
    rank: Integer = None
    share: Measurement = None
    usd_per_hour: Measurement = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificatePayload(Payload):
    """The resume certificate (`ebbflow.tryout.certify`), if the user requested one."""

    holds: Flag = None
    interruptions: list[Any] | None = None
    steps: Integer = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromisePayload(Payload):
    """Statement of how closely a resumed script, or job on GPUs, repeats an uninterrupted run."""

    level: Text = None
    same_data: Text = None  # by which means it reads the same data; "": it may differ
    reasons: list[TextElement] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjectedPayload(Payload):
    """A fault that was injected as a rehearsal, and its target."""

    kind: Text = None
    target: Text = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPayload(Payload):
    """Evidence about a rank that failed, or for which the other ranks wait."""

    culprit: Text = None
    reason: Text = None
    rank: AnyInteger = None
    kind: AnyText = None
    message: AnyText = None
    detail: AnyText = None
    usd_lost: AnyNumber = None  # since the newest commit


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultDetectedPayload(FaultPayload):
    """The fault that ended a generation, reported by the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallPayload(FaultPayload):
    """An idle rank for which the other ranks wait. It still runs, and may continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Value of a configuration key, and where it was set."""

    key: RequiredText
    source: Text = None
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredPayload(Payload):
    """The job's configuration, with one setting for each key."""

    settings: list[Setting]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCheck:
    """Result of a preflight check."""

    id: AnyText = None
    title: AnyText = None
    status: AnyText = None
    severity: AnyText = None
    detail: AnyText = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightPayload(Payload):
    """Results of preflight."""

    results: list[RecordedCheck] | None = None
    sent_away: Flag = None  # whether the step ran in a container


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPayload(Payload):
    """Description of the prepared data."""

    weight_unit: Text = None
    train_tokens: AnyNumber = None
    held_out_tokens: AnyNumber = None
    bytes: AnyNumber = None  # of the text files, train and held out
    unigram_entropy_nats: AnyNumber = None
    # Of a data set of rows: all, those without text, and those with half characters, replaced
    rows: AnyNumber = None
    empty_rows: AnyNumber = None
    repaired_rows: AnyNumber = None


def _check_dollars(value: Any) -> float | str | None:
    if value is None:
        return None
    try:
        usd = Decimal(str(value))
    except InvalidOperation:
        raise ValueError from None
    if isinstance(value, bool) or not usd.is_finite() or usd < 0:
        raise ValueError
    return value


# Dollars as they were recorded: a number, or text with all decimals
Dollars = Annotated[float | str | None, PlainValidator(_check_dollars)]
RequiredDollars = Annotated[float | str, PlainValidator(_present(_check_dollars))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPool:
    """The pool that a plan chose (`ebbflow.cost.plan.pools.Candidate`)."""

    instance_type: RequiredText
    market: RequiredText
    region: Text = None
    zone: Text = None
    nodes: Integer = None
    price_kind: Text = None
    usd_per_hour: RequiredDollars
    quoted_usd_per_hour: Dollars = None
    volume_usd_per_hour: Dollars = None
    on_demand_usd_per_hour: Dollars = None
    paid_hours: Number = None
    expected_hours: Number = None
    expected_usd: Number = None
    compute_usd: Number = None
    tokens_per_second: Number = None
    mfu: Number = None
    interruptions: Number = None
    processes_per_node: AnyInteger = None
    usd_per_step: AnyNumber = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRefusal:
    """Reason why a plan was refused."""

    outcome: RequiredOutcome
    message: RequiredText


def _check_list_or_mapping(value: object) -> Any:
    # Tuples: of an event that was not read from a log
    if value is None or isinstance(value, list | tuple | dict):
        return value
    raise ValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPayload(Payload):
    """Plan of the job (`ebbflow.cost.plan.plan.Plan`)."""

    chosen: PlannedPool | None = None
    simulated: Flag = None
    refusal: RecordedRefusal | None = None
    on_demand: dict[str, Dollars] | None = None  # dollars per hour, by instance type
    ranked: list[dict[str, Any]] | None = None
    rejected: Annotated[
        list[Any] | dict[str, Any] | None, PlainValidator(_check_list_or_mapping)
    ] = None
    counts: dict[str, IntegerElement] | None = None
    budget_usd: Number = None
    deadline_hours: Number = None
    started_utc: Number = None
    made_utc: AnyNumber = None
    fingerprint: AnyText = None
    steps: AnyInteger = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPayload(Payload):
    """The placement of an attempt: where it runs on AWS Batch or Kubernetes."""

    placement: dict[str, Any] | None = None  # `ebbflow.cost.capacity.Placement` as JSON
    after_generation: Integer = None  # the newest known generation
    attempt: AnyInteger = None
    task: AnyText = None  # of the flow
    why: AnyText = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSubmittedPayload(Payload):
    """A job that was submitted to AWS Batch."""

    job_id: Text = None
    job_name: AnyText = None
    task: AnyText = None  # of the flow
    # Id of the job that is used instead, if an unanswered submit created this one, which was
    # terminated; None: that job's id is unknown; "": this job is no such duplicate
    twin_of: AnyText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAttemptPayload(Payload):
    """A finished job of AWS Batch, with its placement (`ebbflow.cost.capacity`).

    Times are Unix seconds by Batch's clock; None for a state that the job did not reach.
    """

    job_id: RequiredText
    cause: Text = None
    nodes: Integer = None
    processes_per_node: Integer = None
    node_times: list[list[Number]] | None = None  # [started, stopped] of each of several nodes
    created_utc: Number = None
    started_utc: Number = None
    stopped_utc: Number = None
    job_name: AnyText = None
    queue: AnyText = None
    status: AnyText = None
    reason: AnyText = None
    exit_code: AnyInteger = None  # of the main container
    # Who ended a terminated job: ebbflow, limit, operator or unknown
    terminated_by: Text = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJobPayload(Payload):
    """A Slurm job that was submitted, was adopted from an earlier launcher, or has ended.

    Times are Unix seconds by Slurm's clock.
    """

    job_id: RequiredText
    does: AnyText = None  # "submitted", "adopted" or "ended"
    partition: AnyText = None
    nodes: Integer = None
    processes_per_node: Integer = None
    preemptible: Flag = None
    usd_per_node_hour: Number = None  # None if no price is stated
    # Of a submitted or adopted job
    most_minutes: Integer = None  # time limit; None: the partition's own
    why: AnyText = None  # why this partition
    # Of an ended job
    state: AnyText = None  # Slurm's word, such as NODE_FAIL
    cause: AnyText = None  # value of `ebbflow.infra.slurm.commands.Cause`
    reason: AnyText = None
    started_utc: Number = None
    stopped_utc: Number = None
    commits: Integer = None  # number of the job's commits at that time


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPayload(Payload):
    """A share of the budget, such as 0.5 or 0.8, that spending has reached."""

    threshold: RequiredNumber  # share of the budget
    spent_usd: Number = None
    budget_usd: Number = None
    reserve_usd: Number = None


def _check_price_part(value: object) -> float | str | None:
    try:
        return _check_number(value)
    except ValueError:
        return _check_dollars(value)


# Unix seconds, or dollars per hour
PricePart = Annotated[float | str, PlainValidator(_not_null(_check_price_part))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPrices:
    """Price changes of a pool, as pairs of Unix time and dollars per hour."""

    instance_type: RequiredText
    market: RequiredText
    region: Text = None
    zone: Text = None
    kind: Text = None
    changes: list[list[PricePart]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricesPayload(Payload):
    """Prices that the launcher fetched during the run, or the report step fetched after it."""

    pools: list[PoolPrices] | None = None
    asked_utc: Number = None  # Unix time of the newest answer; None: unknown
    problem: Text = None  # why there is no answer since then


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomePayload(Payload):
    """The job's final outcome."""

    outcome: RequiredOutcome
    weights_sha256: Text = None
    message: Text = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedPayload(Payload):
    """One run of the flow that the supervisor started, with its result."""

    verdict: Any = None  # `ebbflow.flows.supervising.record.RunVerdict`
    exit_code: Integer = None
    seconds: Number = None
    commit: AnyText = None  # key of the newest commit
    failures: AnyInteger = None  # that the run counts for


def parse_payload(kind: type[P], data: dict[str, Any]) -> P:
    """Parse the data of an event into its payload.

    Raises:
        InvalidPayload: A field is missing, or its value is of another type.
    """
    try:
        return _adapter(kind).validator.validate_python(data)
    except ValidationError as error:
        raise InvalidPayload(describe_error(error, "data")) from error


def describe_error(error: ValidationError, *place: str) -> str:
    """Describe the first problem that pydantic found, such as "data.nodes is 'two'".

    place: path of the validated value.
    """
    problem = error.errors(include_url=False, include_context=False)[0]
    path = _format_path((*place, *problem["loc"]))
    if problem["type"] == _UNEXPECTED:
        return f"unexpected field {path}"
    if _is_missing(problem):
        return f"{path} is missing"
    text = repr(problem["input"])
    if len(text) > _LONGEST_VALUE:
        text = f"{text[: _LONGEST_VALUE - 1]}…"
    return f"{path} is {text}"


@cache
def _adapter(kind: type[P]) -> TypeAdapter[P]:
    # Made at the first use: most processes write events, and read none
    return TypeAdapter(kind)


def _is_missing(problem: ErrorDetails) -> bool:
    is_field = isinstance(problem["loc"][-1], str) if problem["loc"] else False
    is_null = problem["input"] is None and problem["type"] in _WITHOUT_VALUE
    return problem["type"] == _MISSING or (is_field and is_null)


def _format_path(parts: tuple[int | str, ...]) -> str:
    path = ""
    for part in parts:
        if part == "[key]":
            path += " (key)"
        elif isinstance(part, int):
            path += f"[{part}]"
        elif path:
            path += f".{part}"
        else:
            path = part
    return path
