"""Messages between the processes of a gang: from a launcher to the agents, between agents, and from
agents to ranks.

All messages are plain data in JSON, except orders to running ranks. These go through shared memory
(`OrderRecord`), because a signal would kill a rank that is still starting.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, ConfigDict, PlainSerializer, StrictInt, TypeAdapter
from pydantic.dataclasses import dataclass as pydantic_dataclass

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import EndReason
from ebbflow.core.json_values import JsonObject
from ebbflow.core.layout import write_atomically
from ebbflow.core.requirements import installed_versions
from ebbflow.core.terms import Terms
from ebbflow.diagnose.nccl_errors import NcclCause
from ebbflow.diagnose.rules import load_rules
from ebbflow.training import errors
from ebbflow.training.launch.blame import Culprit, blame, find_shared_cause
from ebbflow.training.launch.crash_loop import SAME_LIMIT
from ebbflow.training.launch.evidence import PROVEN, WorkerFailure

SPEC_VARIABLE = "EBBFLOW_SPEC"
# Unknown fields are refused: all processes of a gang run the same code
WIRE = ConfigDict(extra="forbid", ser_json_inf_nan="constants")
# Names the file into which an attached job writes the size of its first steps
PROBE_VARIABLE = "EBBFLOW_PROBE"
_LONGEST_SILENCE_SECONDS = 20.0
# Errors of networks, services and files, which may go even where the rest of the message speaks of
# a mistake.
_MAY_PASS = re.compile(
    r"timeout|timed out|connection|socket|http|nccl|gloo|DistBackend|OSError|IOError", re.IGNORECASE
)
# One try more: what another process held may be free then
_SHARED_CAUSE_LIMIT = 2
_SHORTEST_SILENCE_SECONDS = 4.0  # agents ping each other once per second

SIGTERM = "SIGTERM"
RETURNED = "a lost node is back"
# Causes of orders; the order record holds an index into this list.
CAUSES = (
    "",
    SIGTERM,
    "spot interruption notice",
    "Metaflow's notice of a spot interruption",
    "rehearsed notice",
    "rebalance recommendation",
    RETURNED,
)
_LEAVE_AT, _CAUSE, _NODE, _SAVES, _ENDING, _TERMS, _FIELDS = range(7)

_NullIfInfinite = Annotated[
    float,
    PlainSerializer(lambda seconds: seconds if math.isfinite(seconds) else None, when_used="json"),
    BeforeValidator(lambda seconds: math.inf if seconds is None else seconds),
]

# Signals that another process may have sent. The program is blamed only if they recur at the same
# step.
_EXTERNAL_SIGNALS = {
    number.name for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
}

# Sections of the configuration that decide what a step computes.
_ALIKE = ("model", "training", "data", "parallel", "workload", "workload_options")
_VITAL = ("python", "torch")  # packages that must have the same version on all nodes


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class _StartSpec:
    job: str
    run: str  # Metaflow's run id. Without Metaflow, the job's name
    # Metaflow's retry count of the step, 0 at first. `ebbflow certify` counts its own restarts
    # instead
    attempt: int
    node: int  # number of this node
    config: RunConfig
    store_uri: str
    store_marker: str = ""  # id of the store's marker, for ranks without the launcher's environment
    prepared: dict  # result of the workload's `prepare`, with its fingerprint
    terms: Terms | None = None  # budget and price
    promised_gpus: int = 0  # GPUs per node that the chosen machines have; 0 if unknown

    def to_json(self) -> str:
        return TypeAdapter(type(self)).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of `to_json`. Raises ValueError."""
        return TypeAdapter(cls).validate_json(text)


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class GangSpec(_StartSpec):
    """Specification of a gang, for the agent of one node.

    `terms` and `rehearse` are used on node 0 only.
    """

    nodes: int
    processes_per_node: int
    main_address: str  # address at which node 0's agent listens
    log_folder: str  # folder for the ranks' logs and the files that agent and ranks share
    rehearse: str | None = None  # fault to inject
    # For the agents' connections, in order
    candidate_ports: list[int] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def ranks(self) -> range:
        first = self.node * self.processes_per_node
        return range(first, first + self.processes_per_node)

    @property
    def token(self) -> str:
        """Identifier of the gang, equal on all nodes.

        It shows if a node reached another gang's port.
        """
        return f"{self.job}/{self.run}/{self.attempt}/{self.nodes}x{self.processes_per_node}"

    @property
    def silence_seconds(self) -> float:
        """Seconds without a message after which a node counts as lost: `hang_floor_seconds`,
        clamped to 4–20 s.
        """
        return min(
            _LONGEST_SILENCE_SECONDS,
            max(_SHORTEST_SILENCE_SECONDS, self.config.survival.hang_floor_seconds),
        )


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class WorkerSpec(_StartSpec):
    """Specification for one rank.

    Rank number and world size are not in it but in torchrun's environment variables.
    """

    generation: int
    generation_id: str
    # Keys of commits to restore from, newest first; empty for a start from scratch
    candidates: list[str]
    rehearse: dict | None = None
    # Changes ordered by guards (`guards.overrides.Overrides`)
    overrides: dict = field(default_factory=dict)
    colocated_ranks: int = 1  # number of ranks that share this machine's cores
    control_path: str | None = None  # file that holds the `OrderRecord`
    kept_path: str | None = None  # folder for measurements that later generations reuse
    # File of the gang's key-value store if all its ranks are on this machine
    keys_path: str | None = None
    # File into which a rank writes a rehearsed spot interruption notice
    notice_path: str | None = None
    heartbeat_path: str | None = None
    result_path: str | None = None
    agent_pid: int | None = None

    @classmethod
    def from_environment(cls) -> WorkerSpec | None:
        """Read the spec that the agent wrote for this rank; None if torchrun or a user started this
        process.
        """
        path = os.environ.get(SPEC_VARIABLE)
        if path:
            return cls.from_json(Path(path).read_text())
        return None


@pydantic_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="ignore"))
class RankResult:
    """Result of a rank that has finished, from the file that the rank writes."""

    outcome: Outcome
    step: StrictInt
    message: str = ""
    weights_sha256: str | None = None


@pydantic_dataclass(frozen=True, config=WIRE)
class GangOutcome:
    """Outcome of a gang that ended without a failure.

    `goes_on` is True if other nodes continue without this node.
    """

    outcome: str  # value of an `Outcome`
    step: int
    generation: int
    weights_sha256: str | None = None
    message: str = ""
    goes_on: bool = False


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class RankOrder:
    """Order to all ranks to save and exit within `seconds`, or to save and continue if `seconds` is
    infinite.
    """

    seconds: _NullIfInfinite
    cause: str  # one of CAUSES
    node: int  # node whose notice or signal caused the order

    @property
    def leave(self) -> bool:
        return math.isfinite(self.seconds)


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class NewTerms:
    """Cost terms at a new price.

    Their spending includes all costs until the time `at` (time.monotonic()).
    """

    terms: Terms
    at: float


class OrderRecord:
    """The agent's orders to the ranks of its node, in shared memory.

    The agent writes the record. Each rank reads it once per step, which takes less than 1 µs. Reads
    need no lock, because there is one writer and each field is one aligned 8-byte integer. New
    terms are in a file beside it, which the record counts.
    """

    def __init__(self, path: Path) -> None:
        self._terms_path = path.with_suffix(".terms.json")
        with open(path, "r+b") as file:
            self._record = memoryview(mmap.mmap(file.fileno(), _FIELDS * 8)).cast("q")

    @classmethod
    def create(cls, path: Path) -> OrderRecord:
        path.write_bytes(bytes(_FIELDS * 8))
        return cls(path)

    def write(self, order: RankOrder) -> None:
        """Write an order to the shared record.

        Of several orders to exit, the earliest deadline applies.
        """
        record = self._record
        if not order.leave:
            record[_SAVES] += 1
            return
        leave_at = time.monotonic_ns() + int(max(order.seconds, 0.0) * 1e9)
        if record[_LEAVE_AT] and record[_LEAVE_AT] <= leave_at:
            return
        # The first cause counts; it is written before the time, which readers check
        if not record[_LEAVE_AT]:
            record[_NODE] = order.node
            record[_CAUSE] = CAUSES.index(order.cause)
        record[_LEAVE_AT] = leave_at

    def write_terms(self, new: NewTerms) -> None:
        content = TypeAdapter(NewTerms).dump_json(new)
        write_atomically(self._terms_path, content)
        self._record[_TERMS] += 1

    @property
    def terms_version(self) -> int:
        """How many times new cost terms have been written to the record."""
        return self._record[_TERMS]

    def read_terms(self) -> NewTerms:
        """Read the newest cost terms. Call this only if `terms_version` is not 0."""
        return TypeAdapter(NewTerms).validate_json(self._terms_path.read_bytes())

    def announce_end(self) -> None:
        """Mark in the record that the agent is about to kill the ranks."""
        self._record[_ENDING] = 1

    @property
    def ending(self) -> bool:
        return bool(self._record[_ENDING])

    @property
    def leave_at(self) -> float:
        return self._record[_LEAVE_AT] / 1e9 or math.inf

    @property
    def saves(self) -> int:
        return self._record[_SAVES]

    @property
    def cause(self) -> str:
        """Cause of the order to exit, as text for messages; "" if there is no such order."""
        record = self._record
        if not record[_LEAVE_AT]:
            return ""
        cause = CAUSES[record[_CAUSE]]
        if cause in (SIGTERM, RETURNED):
            return cause
        return f"{cause} to node {record[_NODE]}"


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class GenerationStart:
    generation: int
    generation_id: str
    candidates: list[str]  # keys of commits to restore from, newest first
    rendezvous_port: int  # port of torch's store on node 0
    terms: Terms | None  # budget and price, with the spending so far
    rehearse: dict | None  # fault to inject
    # File of the ranks' key-value store if all nodes are on one machine; "": a server serves it
    keys_path: str = ""
    hosts: list[str]  # host names of these nodes
    # Nodes that take part, by their numbers in `GangSpec.node`, in the order of their ranks
    nodes: list[int]
    # Changes to the section `training` of the configuration
    overrides: dict = field(default_factory=dict)
    node_0: dict = field(default_factory=dict)  # `describe_node` of node 0

    def colocated_nodes(self, node: int) -> int:
        return self.hosts.count(self.hosts[node])


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class GenerationEnd:
    """Result of a generation or of the whole gang: either an `outcome` that all ranks agreed on, or
    a failure.
    """

    outcome: GangOutcome | None = None
    culprit: str = ""  # message that names the rank or node that caused the failure
    reason: str = ""  # `EndReason`, or the value of the outcome
    ranks: Sequence[int] = ()  # ranks that caused the failure or are stopped; they are killed first
    error: str = ""  # class name of the culprit's exception
    # Text that is equal for equal failures of the program; "" for others, such as a lost node
    fingerprint: str = ""
    # Number of equal failures without a new commit that end the job
    same_limit: int = SAME_LIMIT
    known_cause: bool = False  # the loss of a node is explained, as by a fault of its GPU
    details: dict = field(default_factory=dict)  # further fields of the event FAULT_DETECTED
    at: Sequence[float] = ()  # (Unix time, monotonic time) at which the end was decided
    user_code: bool = False  # whether the user's code caused the failure
    # Whether the gang continues with another generation once all ranks have ended
    again: bool = False
    left_out: Sequence[
        int
    ] = ()  # nodes that take no part in that generation, by their numbers in `GangSpec.node`
    curable: bool = True  # whether a new attempt may succeed
    failed_as: str = Outcome.FAILED.value  # outcome of the job if no new attempt follows
    # Number of the generation that nodes are billed for although it started no ranks; 0 otherwise
    generation: int = 0


def describe_node(spec: GangSpec) -> dict[str, dict]:
    """Return what must be equal on all nodes: versions of packages, and settings that affect a
    step.
    """
    settings: JsonObject = {}
    config = spec.config.model_dump(mode="json", include=set(_ALIKE))
    for section in _ALIKE:
        value = config[section]
        if isinstance(value, dict):
            settings |= {f"{section}.{key}": setting for key, setting in value.items()}
        else:
            settings[section] = value
    return {"versions": installed_versions(), "settings": settings}


def find_differences(spec: GangSpec, node_0: Mapping[str, dict]) -> tuple[list[str], bool]:
    """Describe how this node differs from node 0, and return whether that forbids its ranks to
    start.
    """
    this_node = describe_node(spec)
    texts = list[str]()
    fatal = False
    for kind, first in node_0.items():
        for name in dict.fromkeys([*first, *this_node[kind]]):
            here = this_node[kind].get(name)
            there = first.get(name)
            if here != there:
                texts.append(f"{name} {here} (node 0: {there})")
                fatal = fatal or kind == "settings" or name in _VITAL
    return texts, fatal


def end_from_stop_request(cause: str) -> GenerationEnd:
    """Return the result of a gang that was asked to stop while none of its ranks ran."""
    culprit = f"asked to stop ({cause}) before the gang could continue; the last commit is kept"
    return GenerationEnd(
        culprit=culprit, reason=EndReason.AGENT_STOPPED, failed_as=Outcome.INTERRUPTED.value
    )


def end_for_left_out_node(end: GenerationEnd, cause: str) -> GenerationEnd:
    """Return the result for a node without which the gang continues.

    `end` is the node's last result.
    """
    if end.outcome:
        step = end.outcome.step
    else:
        step = int(end.details.get("step", 0))
    if cause:
        why = f"asked to leave ({cause})"
    else:
        why = f"left out: {' '.join(end.culprit.split())[:300]}"
    message = f"{why}; the others go on"
    outcome = GangOutcome(
        outcome=Outcome.INTERRUPTED.value, step=step, generation=0, message=message, goes_on=True
    )
    return GenerationEnd(outcome=outcome, reason=EndReason.AGENT_STOPPED)


def end_from_failures(evidence: Sequence[WorkerFailure], ranks: int | None = None) -> GenerationEnd:
    """Return the result of a failed generation, with the culprit that the evidence shows.

    `again` is True if new ranks on the same nodes may succeed. After the loss of a node it is False
    here, and the caller sets it if enough nodes are left. A cause of NCCL that all nodes share
    leaves at most one more try.

    Args:
        ranks: number of ranks of the generation; None if unknown.
    """
    culprit = blame(evidence, ranks)
    failure = culprit.failure
    kind = errors.error_class(failure.error)
    lost_node = failure.lost_node is not None
    reason = _end_reason(culprit)
    # Its failure is an echo of another rank's
    cascade = failure.cascade and not culprit.called_differently
    in_program = reason in (EndReason.RANK_FAILED, EndReason.AGENT_FAILED)
    curable = kind.curable and not _recurs(culprit)
    if lost_node:
        text = culprit.message
    else:
        text = f"rank {culprit.rank}: {culprit.message}"
    # Repetitions of these are no crash loop
    if lost_node or failure.gpu_fault or issubclass(kind, errors.StartAnew):
        fingerprint = ""
    else:
        fingerprint = _fingerprint(culprit)
    stopped = {report.rank for report in evidence if report.stopped}
    end = GenerationEnd(
        culprit=text,
        reason=reason,
        ranks=sorted({culprit.rank} | stopped),
        error=failure.error,
        fingerprint=fingerprint,
        known_cause=bool(failure.gpu_fault),
        details=culprit.details(),
        at=(time.time(), time.monotonic()),
        user_code=in_program and not cascade and not failure.gpu_fault,
        again=curable and not lost_node,
        curable=curable,
        failed_as=kind.outcome.value,
    )
    shared = None if ranks is None else find_shared_cause(evidence, ranks)
    if shared is None:
        return end
    return _end_from_shared_cause(end, shared)


def end_from_results(
    finished: Mapping[int, Mapping[int, RankResult]], generation: int
) -> GenerationEnd:
    """Return the result of a generation whose ranks have all finished.

    If their outcomes differ, it is a failure.

    Args:
        finished: results of each node's ranks.
        generation: number of the generation.
    """
    results: dict[int, RankResult] = {}
    for node_results in finished.values():
        results |= node_results
    first = results[0]
    for rank, result in sorted(results.items()):
        if _ending(result) != _ending(first):
            unlike = "ranks did not end alike"
            # An unequal number of steps comes again, unequal weights may not
            again = (result.outcome, result.step) == (first.outcome, first.step)
            return GenerationEnd(
                culprit=f"{unlike}: rank 0 {_ending(first)}, rank {rank} {_ending(result)}",
                reason=EndReason.RANK_FAILED,
                fingerprint=unlike,
                again=again,
                curable=again,
            )
    outcome = GangOutcome(
        outcome=first.outcome.value,
        step=first.step,
        generation=generation,
        weights_sha256=first.weights_sha256,
        message=first.message,
    )
    return GenerationEnd(outcome=outcome, reason=outcome.outcome)


def end_if_unaffordable(
    start: GenerationStart, step: int, *, max_steps: int, restart: bool
) -> GangOutcome | None:
    """Return an outcome if the job must stop before its ranks start from `step`, or None if they
    may start.

    The outcome is BUDGET if the rest of the budget suffices only for a last checkpoint. It is
    INTERRUPTED if ranks that ran here before (`restart`) must leave these machines now
    (`Terms.why_leave`).

    Args:
        step: Step of the newest commit.
        restart: Whether the ranks ran on these machines before.
    """
    terms = start.terms
    if terms is None:
        return None
    outcome = Outcome.BUDGET
    message = terms.out_of_money()
    if not message and restart:
        outcome = Outcome.INTERRUPTED
        left = max_steps - step
        message = terms.why_leave(
            left, spent_usd=terms.spent_usd, now_utc=time.time(), restart=True
        )
    if not message:
        return None
    return GangOutcome(
        outcome=outcome.value, step=step, generation=start.generation, message=message
    )


def _end_from_shared_cause(end: GenerationEnd, cause: NcclCause) -> GenerationEnd:
    """Add to a failed generation's result that its cause affects every node, and what to do.

    If new ranks would always meet the cause again, the gang does not start again; otherwise it
    starts once more.
    """
    if cause.recurs:
        action = f"no restart helps, since every node has this cause: {cause.fix}"
        return replace(
            end,
            culprit=f"{end.culprit}; not started again, since every node has this cause",
            details=end.details | {"next_action": action},
            user_code=False,
            again=False,
            curable=False,
            failed_as=Outcome.CONFIG.value,
        )
    action = f"one restart, since the cause may pass; if it comes again: {cause.fix}"
    return replace(
        end,
        fingerprint=f"NCCL: {cause.cause or cause.symptom}",
        same_limit=_SHARED_CAUSE_LIMIT,
        details=end.details | {"next_action": action},
        user_code=False,
    )


def _ending(result: RankResult) -> tuple[str, int, str | None]:
    return result.outcome.value, result.step, result.weights_sha256


def _end_reason(culprit: Culprit) -> EndReason:
    failure = culprit.failure
    if failure.lost_node is not None:
        return EndReason.NODE_LOST
    if culprit.called_differently or culprit.left_early:
        return EndReason.RANK_FAILED
    if failure.killed_by:
        return EndReason.RANK_KILLED
    if failure.hung or failure.witness:
        return EndReason.HANG
    kind = errors.error_class(failure.error)
    if kind is errors.GenerationSuperseded:
        return EndReason.SUPERSEDED
    return kind.end_reason


def _recurs(culprit: Culprit) -> bool:
    """Return whether another start would fail in the same way."""
    failure = culprit.failure
    same_collectives = culprit.called_differently and culprit.certainty == PROVEN
    same_number_of_steps = failure.left and failure.completed
    if same_collectives or same_number_of_steps:
        return True
    if not failure.error or failure.cascade or _MAY_PASS.search(failure.message):
        return False
    incurable = [rule for rule in load_rules().rules if not rule.curable]
    return any(rule.matches(failure.message) for rule in incurable)


def _fingerprint(culprit: Culprit) -> str:
    failure = culprit.failure
    external = failure.stopped or (
        failure.killed_by in _EXTERNAL_SIGNALS and not failure.memory_kill
    )
    if external:
        return f"{culprit.fingerprint} in step {culprit.step}"
    return culprit.fingerprint
