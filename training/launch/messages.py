"""Messages between the processes of a gang: specifications, starts, verdicts and orders.

A signal would do the same to a rank that is ready for it, and kill one that is only starting. The record is read when
the rank comes to it, says until when, and costs a fraction of a microsecond.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ebbflow.infra.config.schema import SurvivalConfig
from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import EndReason
from ebbflow.infra.terms import Terms
from ebbflow.training import errors
from ebbflow.training.launch.blame import DIFFERENT_CALLS, LEFT_EARLY, Culprit, blame
from ebbflow.training.launch.evidence import WorkerFailure

SPEC_VARIABLE = "EBBFLOW_SPEC"
_LONGEST_SILENCE_SECONDS = 20.0
_SHORTEST_SILENCE_SECONDS = 4.0  # agents say something each second


@dataclass(frozen=True, kw_only=True)
class GangSpec:
    """One node's view of a gang to run. Every node gets the same but for `node`.

    main_address: where node 0's agent listens for the others.
    prepared: what the workload's `prepare` returned, with its fingerprint.
    terms, rehearse: node 0's count, and it tells the others.
    attempt: counts the starts that the scheduler made (Metaflow's retry count, plus earlier runs of the job).
    candidate_ports: control ports to try in order, the same on every node (see `control_ports`).
    promised_gpus: of each node by its placement; 0: the placement names none, as on this machine.
    """

    job: str
    run: str
    attempt: int
    node: int
    nodes: int
    processes_per_node: int
    main_address: str
    config: dict
    store_uri: str
    prepared: dict
    log_folder: str
    terms: dict | None = None
    rehearse: str | None = None
    candidate_ports: list[int] = field(default_factory=list)
    promised_gpus: int = 0

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        first = self.node * self.processes_per_node
        return range(first, first + self.processes_per_node)

    @property
    def token(self) -> str:
        """Tells agents of this start from anybody else who happens to listen on the same port."""
        return f"{self.job}/{self.run}/{self.attempt}/{self.nodes}x{self.processes_per_node}"

    @property
    def silence_seconds(self) -> float:
        """How long another node's agent may say nothing: as long as a rank without progress is left alone, but not so
        short that a busy machine is taken for a lost one, nor so long that a lost one is paid for."""
        floor_seconds = self.survival.hang_floor_seconds
        return min(_LONGEST_SILENCE_SECONDS, max(_SHORTEST_SILENCE_SECONDS, floor_seconds))

    @property
    def survival(self) -> SurvivalConfig:
        return SurvivalConfig(**self.config.get("survival", {}))


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker process is to do. Rank and world size come from torchrun's environment contract.

    candidates: commit keys to restore from, newest of the lineage first; empty: start afresh.
    config: `RunConfig.model_dump(mode="json")`. prepared: what the workload's `prepare` returned, with its fingerprint.
    rehearse: a fault to inject (`ebbflow.training.rehearse.Fault.to_json`), already known never to have fired.
    overrides: what is to be done otherwise than config says (`ebbflow.training.guards.overrides.Overrides.to_json`).
    colocated_ranks: ranks that share this machine's cores.
    promised_gpus: see `GangSpec`.
    kept_path: folder for what ranks need not measure again in the agent's later generations.
    control_path: where the node's agent tells its ranks to leave. notice_path: where a rehearsed notice is left for it.
    """

    job: str
    run: str
    attempt: int
    node: int
    generation: int
    generation_id: str
    candidates: list[str]
    config: dict
    store_uri: str
    prepared: dict
    terms: dict | None = None
    rehearse: dict | None = None
    overrides: dict = field(default_factory=dict)
    colocated_ranks: int = 1
    promised_gpus: int = 0
    control_path: str | None = None
    kept_path: str | None = None
    notice_path: str | None = None
    heartbeat_path: str | None = None
    result_path: str | None = None
    agent_pid: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        return cls(**json.loads(text))

    @classmethod
    def from_environment(cls) -> WorkerSpec | None:
        """The spec that this process's agent wrote, or None when it was started by torchrun or by hand."""
        path = os.environ.get(SPEC_VARIABLE)
        return cls.from_json(Path(path).read_text()) if path else None


@dataclass(frozen=True, kw_only=True)
class GangOutcome:
    """How a gang ended when it ended by itself: `outcome` is a value of `ebbflow.infra.errors.Outcome`.

    goes_on: for this node only; its machine had a notice, and the others go on without it.
    """

    outcome: str
    step: int
    generation: int
    weights_sha256: str | None = None
    message: str = ""
    goes_on: bool = False


SIGTERM = "SIGTERM"
# Why ranks are told to leave; the record holds the place in this list.
CAUSES = (
    "",
    SIGTERM,
    "spot interruption notice",
    "Metaflow's notice of a spot interruption",
    "rehearsed notice",
    "rebalance recommendation",
)
_LEAVE_AT, _CAUSE, _NODE, _SAVES, _WORDS = range(5)


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """What all ranks of a gang are to do: leave within `seconds`, or save now and go on (seconds: infinite).

    cause: one of CAUSES. node: where it came from.
    """

    seconds: float
    cause: str
    node: int

    @property
    def leave(self) -> bool:
        return math.isfinite(self.seconds)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds if self.leave else None}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankOrder:
        seconds = data["seconds"]
        return cls(seconds=math.inf if seconds is None else seconds, cause=data["cause"], node=data["node"])


class OrderRecord:
    """Created by the agent of a node, opened by its ranks: one writer, no lock, each number stored whole."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._record = memoryview(mmap.mmap(file.fileno(), _WORDS * 8)).cast("q")

    @classmethod
    def create(cls, path: Path) -> OrderRecord:
        path.write_bytes(bytes(_WORDS * 8))
        return cls(path)

    def tell(self, order: RankOrder) -> None:
        """Of several times to leave the shortest counts; a save is asked for once each time."""
        record = self._record
        if not order.leave:
            record[_SAVES] += 1
            return
        leave_at = time.monotonic_ns() + int(max(order.seconds, 0.0) * 1e9)
        if record[_LEAVE_AT] and record[_LEAVE_AT] <= leave_at:
            return
        if not record[_LEAVE_AT]:  # what came first is what they leave for; the place before the time, for readers
            record[_NODE], record[_CAUSE] = order.node, CAUSES.index(order.cause)
        record[_LEAVE_AT] = leave_at

    @property
    def leave_at(self) -> float:
        """time.monotonic() by which the ranks must be gone; infinite while nobody has told them to leave."""
        return self._record[_LEAVE_AT] / 1e9 or math.inf

    @property
    def saves(self) -> int:
        """How many times a save was asked for."""
        return self._record[_SAVES]

    @property
    def cause(self) -> str:
        """Why, for people; "" while nobody has told them to leave."""
        record = self._record
        if not record[_LEAVE_AT]:
            return ""
        cause = CAUSES[record[_CAUSE]]
        return cause if cause == SIGTERM else f"{cause} to node {record[_NODE]}"


# Signals that anybody may have sent. Only where they come at the same step again are they the program's doing.
_FROM_OUTSIDE = {number.name for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}


@dataclass(frozen=True, kw_only=True)
class GenerationStart:
    """What node 0 tells everybody: the generation, what to restore, where torch's store will listen, which fault.

    nodes: the agents that take part, by the numbers that they joined with; in this order they get their ranks.
    hosts: theirs. overrides: of the configuration's section training, such as gradient_accumulation_steps.
    """

    generation: int
    generation_id: str
    candidates: list[str]
    rendezvous_port: int
    terms: dict | None
    rehearse: dict | None
    hosts: list[str]
    nodes: list[int]
    overrides: dict = field(default_factory=dict)

    def colocated_nodes(self, node: int) -> int:
        return self.hosts.count(self.hosts[node])


@dataclass(frozen=True, kw_only=True)
class GenerationEnd:
    """The end of a generation: an `outcome` that the ranks agreed on, or a `culprit` that ended it.

    ranks: the culprit's, to be ended first. error: the class of its exception. fingerprint: the same for the same
    trouble again; empty for what does not lie in the program, such as a lost node.
    details: what the event of the fault has of the culprit besides (`training.launch.watch.blame.Culprit.details`).
    at: (Unix time, monotonic time) of the verdict, for events.
    again: the gang goes on with another generation, as soon as all ranks are gone; `Start` or a last word will come.
    left_out: nodes that go on no more then, by the numbers that they joined with: their machines had notices, or
        read commits wrongly.
    curable: a new attempt may end better. failed_as: the job's outcome when it does not.
    generation: of a gang that was never started, which its nodes waited for, and are paid for.
    """

    outcome: GangOutcome | None = None
    culprit: str = ""
    reason: str = ""
    ranks: Sequence[int] = ()
    error: str = ""
    fingerprint: str = ""
    details: dict = field(default_factory=dict)
    at: Sequence[float] = ()
    user_code: bool = False
    again: bool = False
    left_out: Sequence[int] = ()
    curable: bool = True
    failed_as: str = Outcome.FAILED.value
    generation: int = 0

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> GenerationEnd:
        outcome = message.pop("outcome", None)
        return cls(outcome=GangOutcome(**outcome) if outcome else None, **message)


def end_from_stop_request(cause: str) -> GenerationEnd:
    """The end of a gang that was told to leave while no rank of it ran: nothing is lost, and no code is to blame."""
    culprit = f"told to leave ({cause}) before the gang could go on; the last commit stands"
    return GenerationEnd(culprit=culprit, reason=EndReason.AGENT_STOPPED, failed_as=Outcome.INTERRUPTED.value)


def end_for_left_out_node(verdict: GenerationEnd, cause: str) -> GenerationEnd:
    """The end of a gang for a node without which the others go on. cause: of its notice, where it had one."""
    step = verdict.outcome.step if verdict.outcome else int(verdict.details.get("step", 0))
    why = f"told to leave ({cause})" if cause else f"left out: {' '.join(verdict.culprit.split())[:300]}"
    message = f"{why}; the others go on"
    outcome = GangOutcome(outcome=Outcome.INTERRUPTED.value, step=step, generation=0, message=message, goes_on=True)
    return GenerationEnd(outcome=outcome, reason=EndReason.AGENT_STOPPED)


def end_from_failures(evidence: Sequence[WorkerFailure]) -> GenerationEnd:
    """Who ended the generation. All but a lost node can be cured with the agents that are there."""
    culprit = blame(evidence)
    worst = culprit.failure
    lost_node = (worst.killed_by or "").startswith("node ")
    kind = errors.error_class(worst.error)
    if lost_node:
        reason = EndReason.NODE_LOST
    elif culprit.kind in (DIFFERENT_CALLS, LEFT_EARLY):
        reason = EndReason.RANK_FAILED
    elif worst.killed_by:
        reason = EndReason.RANK_KILLED
    elif worst.hung or worst.witness:
        reason = EndReason.HANG
    elif kind is errors.GenerationSuperseded:
        reason = EndReason.SUPERSEDED
    else:
        reason = kind.end_reason
    blameless = lost_node or issubclass(kind, errors.StartAnew)
    cascade = worst.cascade and culprit.kind != DIFFERENT_CALLS
    return GenerationEnd(
        culprit=culprit.message if lost_node else f"rank {culprit.rank}: {culprit.message}",
        reason=reason,
        ranks=sorted({culprit.rank, *(failure.rank for failure in evidence if failure.stopped)}),
        error=worst.error,
        fingerprint="" if blameless else _fingerprint(culprit),
        details=culprit.details(),
        at=(time.time(), time.monotonic()),
        user_code=reason in (EndReason.RANK_FAILED, EndReason.AGENT_FAILED) and not cascade,
        again=kind.curable and not lost_node,
        curable=kind.curable,
        failed_as=kind.outcome.value,
    )


def end_from_results(finished: Mapping[int, dict[int, dict]], generation: int) -> GenerationEnd:
    """What the results of all ranks, by node, say together."""
    results = {rank: result for node in finished.values() for rank, result in node.items()}
    first = results[0]
    strays = [rank for rank, result in sorted(results.items()) if _ending(result) != _ending(first)]
    if strays:
        culprit = f"ranks did not end alike: rank 0 {_ending(first)}, rank {strays[0]} {_ending(results[strays[0]])}"
        return GenerationEnd(
            culprit=culprit, reason=EndReason.RANK_FAILED, fingerprint="ranks did not end alike", again=True
        )
    outcome = GangOutcome(
        outcome=Outcome(first["outcome"]).value,
        step=int(first["step"]),
        generation=generation,
        weights_sha256=first.get("weights_sha256"),
        message=first.get("message", ""),
    )
    return GenerationEnd(outcome=outcome, reason=outcome.outcome)


def end_if_unaffordable(start: GenerationStart, step: int) -> GenerationEnd | None:
    """The end of a gang whose ranks must not start, since nothing is left but the price of a last save; None: they may.

    step: of the commit that stands.
    """
    message = "" if start.terms is None else Terms.from_json(start.terms).out_of_money()
    if not message:
        return None
    outcome = GangOutcome(outcome=Outcome.BUDGET.value, step=step, generation=start.generation, message=message)
    return GenerationEnd(outcome=outcome, reason=outcome.outcome)


def _fingerprint(culprit: Culprit) -> str:
    failure = culprit.failure
    chance = failure.stopped or (failure.killed_by in _FROM_OUTSIDE and not failure.memory_kill)
    return f"{culprit.fingerprint} in step {culprit.step}" if chance else culprit.fingerprint


def _ending(result: dict) -> tuple[str, int, str | None]:
    return result["outcome"], int(result["step"]), result.get("weights_sha256")
