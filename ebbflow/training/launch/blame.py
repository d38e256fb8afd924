"""Search for the rank that caused a failure, with rules that use evidence from all nodes.

The culprit is the first of the following that the evidence shows:

1. a rank that failed on a node whose GPU has a hardware fault
2. a process that died, the earliest first
3. a process that is stopped (SIGSTOP)
4. ranks whose flight recorders show different collectives
5. a rank whose GPU has not started a collective in which the GPUs of other ranks wait (NCCL)
6. a living rank that waits neither in a collective nor for its GPU, while other ranks wait
7. a rank that finished while the other ranks continued
8. a rank whose collective failed at another code location than on the other ranks
9. the rank that is furthest behind
10. the rank whose flight recorder does not answer, while all others' do; on a busy machine that of a
    healthy rank may be late
11. the network

The failures of all other ranks are cascades: these ranks failed, or wait, because of the culprit.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from operator import attrgetter

from ebbflow.diagnose.judging import Finding, find_reported_cause
from ebbflow.diagnose.nccl_errors import NcclCause, find_message_cause
from ebbflow.training.launch.evidence import (
    PROVEN,
    SLOW,
    Mismatch,
    WorkerFailure,
    find_device_behind,
    find_furthest_behind,
    find_mismatch,
    has_other_size,
    has_queued_calls,
    is_engine_location,
    is_unusual_call,
)
from ebbflow.training.launch.heartbeat import PHASES

DIFFERENT_CALLS = "different collectives"
LEFT_EARLY = "left early"
HANG = "hang"
_by_time = attrgetter("timestamp")
_MOST_UNUSUAL_FIRST = (True, None, False)  # results of `is_unusual_call`
_STALL_SECONDS = 1.0  # without CPU time
_CUDA_ERROR = re.compile(r"\bcuda (?:error|failure)|\b(?:cudnn|cublas) ?(?:error|_status)", re.I)
# An exception counts as the cause of a kill only if it is more than this earlier
_KILL_SECONDS = 1.0
# For a rank without a report while all failed ranks wait: it is the likely culprit, and on a busy
# machine the dump of its stack takes seconds
_MISSING_RANK_SECONDS = 6.0


class BlameRule(StrEnum):
    """Rule that found the culprit, as text for people."""

    GPU_FAULT = "a GPU of its node has a hardware fault"
    DIED_FIRST = "it ended first"
    STOPPED = "its process is stopped"
    RECORDERS_DIFFER = "flight recorders differ"
    DEVICE_BEHIND = "its GPU has not started a collective in which the others' GPUs wait"
    RECORDER_SILENT = "its flight recorder does not answer, and the others' do"
    OUTSIDE_COLLECTIVE = "it stands outside of any collective"
    LEFT_EARLY = "it left while the others went on"
    CALLED_ELSEWHERE = "its collective was called from another place than the others'"
    FEWEST_CALLS = "it has called the fewest collectives"
    FURTHEST_BEHIND = "it is furthest behind"
    ALL_WAIT = "all ranks wait alike"
    NONE_STANDS_OUT = "no rank stands out"


_DIFFERENT_CALLS_RULES = (
    BlameRule.RECORDERS_DIFFER,
    BlameRule.CALLED_ELSEWHERE,
)


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Rank that caused the failure.

    If the network was the cause, this is the first rank that reported a failure.

    Attributes without a comment have the same meaning as in `WorkerFailure`.
    """

    rank: int
    node: int
    kind: str  # kind of failure in one or two words, such as "hang"
    because: BlameRule  # the rule that named this rank
    message: str
    where: str
    step: int
    phase: str
    certainty: str
    fingerprint: str
    # Other ranks that have not finished; they failed or waited because of this one
    cascades: Sequence[int]
    next_action: str  # advice on what to do next, or the step that the agents take
    dump: str
    failure: WorkerFailure  # the evidence from this rank

    @property
    def called_differently(self) -> bool:
        """Whether the rank called other collectives than the other ranks."""
        return self.because in _DIFFERENT_CALLS_RULES

    @property
    def left_early(self) -> bool:
        """Whether the rank finished while the other ranks continued."""
        return self.failure.left and not self.called_differently

    def details(self) -> dict:
        """Return the fields for the event FAULT_DETECTED: all non-empty fields except `message` and
        `failure`.
        """
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in ("message", "failure") and value != ""
        }


def blame(evidence: Sequence[WorkerFailure], ranks: int | None = None) -> Culprit:
    """Find the rank that caused the failure.

    `evidence` has the failures, and the positions of ranks that have not failed. `ranks` is the
    number of ranks of the generation; None if unknown.
    """
    failures = [failure for failure in evidence if not failure.witness]
    for find_culprit in (_broken_gpu, _died, _stopped):
        accusation = find_culprit(failures)
        if accusation is not None:
            return _culprit(accusation, evidence, message=_explain_device_error(accusation.failure))
    mismatch = detect_mismatch(evidence)
    if mismatch is not None:
        return _mismatch_culprit(mismatch, evidence)
    for find_culprit in (
        _device_behind,
        _outside_collective,
        _left,
        _odd_call,
        _behind,
        _recorder_silent,
    ):
        accusation = find_culprit(evidence)
        if accusation is not None:
            certainty = _certainty_of(accusation.rule, evidence)
            return _culprit(accusation, evidence, certainty=certainty)
    return _network(evidence, ranks)


def detect_mismatch(evidence: Sequence[WorkerFailure]) -> Mismatch | None:
    """Return the first position at which ranks called different collectives; None if there is none.

    A mismatch proves that the gang has failed.
    """
    latest = _latest(evidence)
    calls = {failure.rank: failure.calls for failure in latest}
    return find_mismatch(calls, {failure.rank: failure.where for failure in latest})


def detect_stall(evidence: Sequence[WorkerFailure]) -> Culprit | None:
    """Return an idle rank for which all other ranks wait; None if there is none.

    The rank is in no collective and uses no CPU time. It is no proof: the rank may wait for a lock,
    a download or another process.
    """
    culprit = blame(evidence)
    others = [failure for failure in evidence if failure.rank != culprit.rank]
    idle = culprit.kind == HANG and culprit.failure.idle_seconds >= _STALL_SECONDS
    if idle and others and all(map(_waits, others)):
        return culprit
    return None


def find_shared_cause(evidence: Sequence[WorkerFailure], ranks: int) -> NcclCause | None:
    """Return the cause on their own machines that NCCL names for ranks of every node; None if there
    is none.

    The cause does not lie between the machines, as a fault of the network would. At least one rank
    of each node must name it. All other ranks must have failed as a result or wait for a peer.

    Args:
        ranks: number of ranks of the generation. Without evidence from all of them, nothing is
            known of their nodes.
    """
    latest = _latest(evidence)
    named = {failure.rank: _local_cause(failure) for failure in latest}
    causes = {cause for cause in named.values() if cause is not None}
    if len(named) != ranks or len(causes) != 1:
        return None
    nodes = {failure.node for failure in latest if named[failure.rank] is not None}
    for failure in latest:
        follows = failure.cascade or failure.hung or (failure.witness and not failure.left)
        if named[failure.rank] is None and not (follows and failure.node in nodes):
            return None
    return causes.pop()


# One return per kind of evidence
def settle_seconds(failures: Sequence[WorkerFailure], *, all_heard: bool = False) -> float:  # noqa: PLR0911 - one return for each rule, in the order of their precedence
    """Return how many seconds to wait after the first failure for a report about its cause.

    `all_heard` is True if every rank has reported. In that case no more evidence about a hang will
    arrive.
    """
    if any(failure.killed or failure.stopped for failure in failures):
        if all(failure.cascade for failure in failures if not failure.hung):
            return 1.0
        return 0.3
    if any(not failure.cascade and not failure.hung for failure in failures):
        # If all ranks fail of it, another start is useless
        if not all_heard and any(map(_local_cause, failures)):
            return 3.0
        return 0.5
    if not failures:
        return 1.0  # the positions of all ranks are the evidence
    if all(failure.cascade for failure in failures):
        return 3.0
    if all_heard:
        return 0.2
    if all(failure.hung and _waits(failure) for failure in failures):
        return _MISSING_RANK_SECONDS
    return 1.5


@dataclass(frozen=True)
class _Accusation:
    failure: WorkerFailure
    rule: BlameRule


def _broken_gpu(failures: Sequence[WorkerFailure]) -> _Accusation | None:
    broken = [failure for failure in failures if failure.gpu_fault]
    if broken:
        return _Accusation(min(broken, key=_by_time), BlameRule.GPU_FAULT)
    return None


def _stopped(failures: Sequence[WorkerFailure]) -> _Accusation | None:
    stopped = [failure for failure in failures if failure.stopped]
    if stopped:
        return _Accusation(min(stopped, key=_by_time), BlameRule.STOPPED)
    return None


def _died(failures: Sequence[WorkerFailure]) -> _Accusation | None:
    """Return the rank that died first; None if all deaths were cascades.

    Lost nodes take precedence over dead ranks. Ranks killed by SIGABRT come last, because torch
    aborts a rank after another one failed.
    """
    dead = [failure for failure in failures if not failure.hung and not failure.cascade]
    if not dead:
        return None

    def order(failure: WorkerFailure) -> tuple[bool, bool, float]:
        if failure.killed:
            ended_at = failure.timestamp - _KILL_SECONDS
        else:
            ended_at = failure.timestamp
        return failure.lost_node is None, failure.killed_by == "SIGABRT", ended_at

    return _Accusation(min(dead, key=order), BlameRule.DIED_FIRST)


def _device_behind(evidence: Sequence[WorkerFailure]) -> _Accusation | None:
    ranks = {failure.rank: failure for failure in _latest(evidence) if not failure.left}
    behind = find_device_behind({rank: failure.calls for rank, failure in ranks.items()})
    if not behind:
        return None
    late = [ranks[rank] for rank in behind]
    return _Accusation(min(late, key=_place_and_time), BlameRule.DEVICE_BEHIND)


def _recorder_silent(evidence: Sequence[WorkerFailure]) -> _Accusation | None:
    """Return the only living rank whose flight recorder does not answer; None if there is none.

    C++ threads serve the recorder, so the rank's process or driver is stuck. The recorders of all
    other living ranks must have answered.
    """
    alive = [failure for failure in _latest(evidence) if not failure.cascade and not failure.left]
    silent = [failure for failure in alive if failure.recorder_silent]
    answered = [failure for failure in alive if failure.calls and not failure.recorder_silent]
    if len(silent) == 1 and answered and len(answered) + 1 == len(alive):
        return _Accusation(silent[0], BlameRule.RECORDER_SILENT)
    return None


def _waits(failure: WorkerFailure) -> bool:
    return failure.waiting or has_queued_calls(failure.calls)


def _outside_collective(evidence: Sequence[WorkerFailure]) -> _Accusation | None:
    """Return a living rank that waits neither in a collective nor for its device.

    Return None if there is none, or if all living ranks are outside of collectives in the same step
    and phase.
    """
    alive = [
        failure
        for failure in _latest(evidence)
        if not failure.cascade and not failure.left and failure.where
    ]
    outside = [failure for failure in alive if not _waits(failure)]
    if not outside:
        return None
    same_place = len({_place(failure) for failure in alive}) == 1
    if same_place and len(outside) == len(alive) > 1:
        return None
    return _Accusation(min(outside, key=_place_and_time), BlameRule.OUTSIDE_COLLECTIVE)


def _left(evidence: Sequence[WorkerFailure]) -> _Accusation | None:
    gone = [failure for failure in evidence if failure.left]
    if gone:
        return _Accusation(min(gone, key=attrgetter("step")), BlameRule.LEFT_EARLY)
    return None


def _odd_call(evidence: Sequence[WorkerFailure]) -> _Accusation | None:
    """Return the rank whose failed collective is the most unusual; None if all failed at the same
    code location.

    Only ranks that lost a peer are compared. The criteria, most important first:

    1. The rank's last two calls never followed each other before. Ranks with too few recorded calls
        come second.
    2. Few ranks failed at this code location.
    3. The code location is outside the engine's own collectives, which all ranks call.
    """
    broken = [failure for failure in evidence if failure.cascade and failure.where]
    places = Counter(failure.where for failure in broken)
    if len(places) < 2:
        return None

    def order(failure: WorkerFailure) -> tuple[int, int, bool, float]:
        surprise = _MOST_UNUSUAL_FIRST.index(is_unusual_call(failure.calls))
        in_engine = is_engine_location(failure.where)
        return surprise, places[failure.where], in_engine, failure.timestamp

    return _Accusation(min(broken, key=order), BlameRule.CALLED_ELSEWHERE)


def _behind(evidence: Sequence[WorkerFailure]) -> _Accusation | None:
    ranks = _latest(evidence)
    behind = find_furthest_behind({failure.rank: failure.calls for failure in ranks})
    if behind:
        late = [failure for failure in ranks if failure.rank in behind]
        return _Accusation(min(late, key=_by_time), BlameRule.FEWEST_CALLS)
    alive = [failure for failure in ranks if not failure.cascade]
    if len({_place(failure) for failure in alive}) > 1:
        return _Accusation(min(alive, key=_place_and_time), BlameRule.FURTHEST_BEHIND)
    return None


def _network(evidence: Sequence[WorkerFailure], ranks: int | None) -> Culprit:
    """Blame the network if the first failed rank waited for others or lost a peer; else blame that
    rank.

    If ranks are missing in the evidence, name those too: one of them may be the cause.
    """
    failures = [failure for failure in evidence if not failure.witness] or list(evidence)
    first = min(failures, key=_by_time)
    missing = sorted(set(range(ranks or 0)) - {failure.rank for failure in evidence})
    # A witness whose stack could not be read may be the cause
    if not missing and all(map(_waits, failures)) and all(map(_waits, _latest(evidence))):
        rule = BlameRule.ALL_WAIT
    else:
        rule = BlameRule.NONE_STANDS_OUT
    accusation = _Accusation(first, rule)
    alone = len(evidence) == 1 and not missing
    if alone or not (first.cascade or _waits(first)):
        return _culprit(accusation, evidence)
    reported = [(failure.rank, failure.message) for failure in failures if not failure.hung]
    cause = find_reported_cause(reported)
    if cause is not None:
        text = _add_cause(first.message, cause)
        return _culprit(accusation, evidence, message=text)
    words = find_message_cause(first.message)
    if words is not None and words.cause:
        text = f"{first.message}; {words.cause}; fix: {words.fix}"
        return _culprit(accusation, evidence, message=text, certainty=SLOW)
    unheard = f"the ranks without a report ({', '.join(map(str, missing))})"
    if missing and first.cascade:
        text = f"{first.message}; it lost a peer: look first at {unheard}"
    else:
        text = (
            f"{first.message}; {rule} and no process has ended: check the network and the storage "
            "for a hang"
        )
        if missing:
            text += f", and first the nodes of {unheard}"
    return _culprit(accusation, evidence, message=text, certainty=SLOW)


def _explain_device_error(failure: WorkerFailure) -> str:
    """Add to an NCCL or CUDA error the cause and fix that `ebbflow diagnose` finds in its message.

    Return "" for another error, or if the cause is unknown.
    """
    known = find_message_cause(failure.message) is not None
    if not known and not _CUDA_ERROR.search(failure.message):
        return ""
    cause = find_reported_cause([(failure.rank, failure.message)])
    if cause is None:
        return ""
    return _add_cause(failure.message, cause)


def _local_cause(failure: WorkerFailure) -> NcclCause | None:
    """Return the cause on the rank's own machine that its NCCL error names; None if it names none."""
    if failure.killed or failure.hung or failure.witness or failure.gpu_fault:
        return None
    cause = find_message_cause(failure.message)
    return cause if cause is not None and cause.is_local else None


def _add_cause(message: str, cause: Finding) -> str:
    """Append a diagnosis to a message: its title, cause and fix."""
    words = find_message_cause(message)
    about = f" ({words.cause})" if words is not None and words.cause else ""
    return f"{message}; {cause.rule.title}{about}; fix: {cause.rule.fix[0]}"


def _mismatch_culprit(mismatch: Mismatch, evidence: Sequence[WorkerFailure]) -> Culprit:
    odd = next(failure for failure in _latest(evidence) if failure.rank == mismatch.ranks[0])
    if odd.where:
        message = f"{mismatch} ({odd.where})"
    else:
        message = str(mismatch)
    accusation = _Accusation(odd, BlameRule.RECORDERS_DIFFER)
    return _culprit(accusation, evidence, message=message, certainty=PROVEN)


def _certainty_of(rule: BlameRule, evidence: Sequence[WorkerFailure]) -> str:
    """Return how certain the culprit is: PROVEN or SLOW.

    Return "" if the evidence from the culprit itself decides.
    """
    if rule is BlameRule.CALLED_ELSEWHERE:
        if any(has_other_size(failure.message) for failure in evidence):
            return PROVEN
        return SLOW
    return ""


def _culprit(
    accusation: _Accusation,
    evidence: Sequence[WorkerFailure],
    *,
    message: str = "",
    certainty: str = "",
) -> Culprit:
    failure = accusation.failure
    kind = _kind(failure, accusation.rule)
    if failure.where:
        fingerprint = f"{kind} at {failure.where}"
    else:
        fingerprint = kind
    if failure.witness and kind == HANG:
        own_message = f"no progress {failure.message}"
    else:
        own_message = failure.message
    if failure.witness and not failure.left:
        own_certainty = SLOW
    else:
        own_certainty = failure.certainty
    others = [other for other in evidence if other.rank != failure.rank]
    return Culprit(
        rank=failure.rank,
        node=failure.node,
        kind=kind,
        because=accusation.rule,
        message=message or own_message,
        where=failure.where,
        step=failure.step,
        phase=failure.phase,
        certainty=certainty or own_certainty,
        fingerprint=fingerprint,
        cascades=sorted({other.rank for other in others if not other.left}),
        next_action=_next_action(failure, kind),
        dump=failure.dump,
        failure=failure,
    )


def _kind(failure: WorkerFailure, rule: BlameRule) -> str:
    if rule in _DIFFERENT_CALLS_RULES:
        return DIFFERENT_CALLS
    if failure.left:
        return LEFT_EARLY
    if failure.witness:
        return HANG
    return failure.kind


# One return per piece of advice
def _next_action(failure: WorkerFailure, kind: str) -> str:  # noqa: PLR0911
    if failure.lost_node is not None or failure.gpu_fault:
        return "a new attempt on another machine, from the newest commit"
    if failure.memory_kill:
        return (
            "restart from the newest commit; if it comes again: more "
            "gradient_accumulation_steps, fewer loader workers"
        )
    if failure.killed_by == "SIGBUS":
        return (
            "restart from the newest commit; SIGBUS is often a full /dev/shm: give the container "
            "more shared memory"
        )
    if failure.killed_by:
        return "restart from the newest commit"
    if failure.stopped:
        return "continue and end the stopped process, restart from the newest commit"
    if kind in (DIFFERENT_CALLS, LEFT_EARLY):
        return (
            "every rank must call the same collectives in the same order: correct the code at "
            f"{failure.where or 'it'}"
        )
    if kind == HANG:
        if failure.where:
            place = f"look at {failure.where}, "
        else:
            place = ""
        return (
            f"end it and restart from the newest commit; if it comes again: {place}stacks are in "
            "the dump"
        )
    return (
        "restart from the newest commit; the same exception three times without a new commit "
        "ends the job"
    )


def _latest(evidence: Sequence[WorkerFailure]) -> list[WorkerFailure]:
    """Return one record per rank: the rank's last failure, or its last position if it has not
    failed.

    If this record has no code location or no collective calls, the missing fields come from the
    rank's earlier records.
    """
    ranks: dict[int, WorkerFailure] = {}
    for failure in sorted(evidence, key=lambda failure: not failure.witness):
        before = ranks.get(failure.rank, failure)
        ranks[failure.rank] = replace(
            failure, where=failure.where or before.where, calls=failure.calls or before.calls
        )
    return list(ranks.values())


def _place(failure: WorkerFailure) -> tuple[int, int]:
    if failure.phase in PHASES:
        phase = PHASES.index(failure.phase)
    else:
        phase = 0
    return failure.step, phase


def _place_and_time(failure: WorkerFailure) -> tuple[int, int, float]:
    step, phase = _place(failure)
    return step, phase, failure.timestamp
