"""What the agents of a gang tell each other of a generation: how it starts, and how it ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import EndReason
from ebbflow.infra.terms import Terms
from ebbflow.training import errors
from ebbflow.training.errors import describe_exception, describe_traceback
from ebbflow.training.launch.echo import say
from ebbflow.training.launch.spec import GangOutcome
from ebbflow.training.launch.watch.blame import DIFFERENT_CALLS, LEFT_EARLY, Culprit, blame
from ebbflow.training.launch.watch.dump import WorkerFailure
from ebbflow.training.launch.watch.stacks import parse_traceback

# Signals that anybody may have sent. Only where they come at the same step again are they the program's doing.
_FROM_OUTSIDE = {number.name for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}


@dataclass(frozen=True, kw_only=True)
class Start:
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
class Verdict:
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
    def from_message(cls, message: dict[str, Any]) -> Verdict:
        outcome = message.pop("outcome", None)
        return cls(outcome=GangOutcome(**outcome) if outcome else None, **message)


def agent_failed(error: Exception, node: int) -> Verdict:
    """The end of a gang one of whose agents raised: a failure of the program, which a new attempt may cure."""
    text = describe_traceback(error)
    say(text)
    place = parse_traceback(text)
    kind = f"{errors.AgentFailure.__name__} ({type(error).__name__})"
    return Verdict(
        culprit=f"the agent of node {node} failed: {describe_exception(error)}{f' in {place}' if place else ''}",
        reason=EndReason.AGENT_FAILED,
        error=errors.AgentFailure.__name__,
        fingerprint=f"{kind} at {place}" if place else kind,
        at=(time.time(), time.monotonic()),
        user_code=True,
    )


def told_to_leave(cause: str) -> Verdict:
    """The end of a gang that was told to leave while no rank of it ran: nothing is lost, and no code is to blame."""
    culprit = f"told to leave ({cause}) before the gang could go on; the last commit stands"
    return Verdict(culprit=culprit, reason=EndReason.AGENT_STOPPED, failed_as=Outcome.INTERRUPTED.value)


def left_out(verdict: Verdict, cause: str) -> Verdict:
    """The end of a gang for a node without which the others go on. cause: of its notice, where it had one."""
    step = verdict.outcome.step if verdict.outcome else int(verdict.details.get("step", 0))
    why = f"told to leave ({cause})" if cause else f"left out: {' '.join(verdict.culprit.split())[:300]}"
    message = f"{why}; the others go on"
    outcome = GangOutcome(outcome=Outcome.INTERRUPTED.value, step=step, generation=0, message=message, goes_on=True)
    return Verdict(outcome=outcome, reason=EndReason.AGENT_STOPPED)


def guilty(evidence: Sequence[WorkerFailure]) -> Verdict:
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
    return Verdict(
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


def agreed(finished: Mapping[int, dict[int, dict]], generation: int) -> Verdict:
    """What the results of all ranks, by node, say together."""
    results = {rank: result for node in finished.values() for rank, result in node.items()}
    first = results[0]
    strays = [rank for rank, result in sorted(results.items()) if _ending(result) != _ending(first)]
    if strays:
        culprit = f"ranks did not end alike: rank 0 {_ending(first)}, rank {strays[0]} {_ending(results[strays[0]])}"
        return Verdict(culprit=culprit, reason=EndReason.RANK_FAILED, fingerprint="ranks did not end alike", again=True)
    outcome = GangOutcome(
        outcome=Outcome(first["outcome"]).value,
        step=int(first["step"]),
        generation=generation,
        weights_sha256=first.get("weights_sha256"),
        message=first.get("message", ""),
    )
    return Verdict(outcome=outcome, reason=outcome.outcome)


def unaffordable(start: Start, step: int) -> Verdict | None:
    """The end of a gang whose ranks must not start, since nothing is left but the price of a last save; None: they may.

    step: of the commit that stands.
    """
    message = "" if start.terms is None else Terms.from_json(start.terms).out_of_money()
    if not message:
        return None
    outcome = GangOutcome(outcome=Outcome.BUDGET.value, step=step, generation=start.generation, message=message)
    return Verdict(outcome=outcome, reason=outcome.outcome)


def _fingerprint(culprit: Culprit) -> str:
    failure = culprit.failure
    chance = failure.stopped or (failure.killed_by in _FROM_OUTSIDE and not failure.memory_kill)
    return f"{culprit.fingerprint} in step {culprit.step}" if chance else culprit.fingerprint


def _ending(result: dict) -> tuple[str, int, str | None]:
    return result["outcome"], int(result["step"]), result.get("weights_sha256")
