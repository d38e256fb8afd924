"""The rank that caused a failure, as a pure function of the evidence of all nodes.

The rules, in order: a process that died → a stopped process → flight recorders that differ → a frame outside of any
collective → the rank furthest behind → the network. The first failure is the cause; ranks that only followed are
listed as cascades.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ebbflow.training.launch.evidence import (
    PROVEN,
    SLOW,
    Mismatch,
    WorkerFailure,
    find_furthest_behind,
    find_mismatch,
    is_engine_location,
    is_unusual_call,
)
from ebbflow.training.launch.heartbeat import PHASES

DIFFERENT_CALLS = "different collectives"
LEFT_EARLY = "left early"
_CALLED_ALONE = "it waits in a collective that the other ranks did not call"
HANG = "hang"
_KILL_SECONDS = 1.0  # an exception that much earlier than a kill is its cause, not its effect


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The rank that caused the failure; if the network did, the first rank that reported it.

    Attributes:
        kind: Kind of failure, in a word or two.
        because: The rule that applied.
        cascades: Ranks that only followed.
        next_action: What a person or the agents should do.
        failure: Report of this rank.
    """

    rank: int
    node: int
    kind: str
    because: str
    message: str
    where: str
    step: int
    phase: str
    certainty: str
    fingerprint: str
    cascades: Sequence[int]
    next_action: str
    dump: str
    failure: WorkerFailure

    def details(self) -> dict:
        """Return the fields of the fault's event, without the message and the full report."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in ("message", "failure") and value not in ("", None)
        }


def blame(evidence: Sequence[WorkerFailure]) -> Culprit:
    """Name the culprit.

    Args:
        evidence: Failures and witnesses, with at least one failure or a mismatch among the witnesses.
    """
    failures = [one for one in evidence if not one.witness]
    for rule in (_died, _stopped):
        if (found := rule(failures)) is not None:
            return _culprit(found[0], found[1], evidence)
    if (mismatch := detect_mismatch(evidence)) is not None:
        return _mismatched(mismatch, evidence)
    for rule in (_outside_collective, _left, _odd_call, _behind):
        if (found := rule(evidence)) is not None:
            return _culprit(found[0], found[1], evidence)
    return _network(evidence)


def detect_mismatch(evidence: Sequence[WorkerFailure]) -> Mismatch | None:
    """Return where ranks called different collectives: proof of a failure before any deadline has passed."""
    return find_mismatch({one.rank: one.calls for one in _latest(evidence) if one.calls})


def settle_seconds(failures: Sequence[WorkerFailure], *, all_heard: bool = False) -> float:
    """Return how long to wait for more evidence after the first failure, lest an effect be taken for the cause.

    Args:
        all_heard: There is evidence of every rank, so that nothing more about a hang will arrive.
    """
    if any(one.killed_by or one.stopped for one in failures):
        return 1.0 if all(one.cascade for one in failures if not one.hung) else 0.3
    if any(not one.cascade and not one.hung for one in failures):
        return 0.5
    if all(one.cascade for one in failures):
        return 3.0
    return 0.2 if all_heard else 1.5


def _died(failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, str] | None:
    """Blame the first rank that died; a lost node comes first, and an abort, which follows other failures, last."""
    dead = [one for one in failures if not one.hung and not one.cascade]
    if not dead:
        return None

    def order(one: WorkerFailure) -> tuple[bool, bool, float]:
        lost_node = (one.killed_by or "").startswith("node ")
        return not lost_node, one.killed_by == "SIGABRT", one.timestamp - (_KILL_SECONDS if one.killed_by else 0.0)

    return min(dead, key=order), "it ended first"


def _stopped(failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, str] | None:
    stopped = [one for one in failures if one.stopped]
    return (min(stopped, key=_first), "its process is stopped") if stopped else None


def _outside_collective(evidence: Sequence[WorkerFailure]) -> tuple[WorkerFailure, str] | None:
    """Blame a hung or witnessed rank that waits for no other rank."""
    alive = [one for one in _latest(evidence) if not one.cascade and not one.left and one.where]
    outside = [one for one in alive if not one.waiting]
    if not outside or (len(outside) == len(alive) > 1 and len({_place(one) for one in alive}) == 1):
        return None
    return min(outside, key=_place_and_time), "it stands outside of any collective"


def _left(evidence: Sequence[WorkerFailure]) -> tuple[WorkerFailure, str] | None:
    """Blame a rank that ended after fewer steps than the others."""
    gone = [one for one in evidence if one.left]
    return (min(gone, key=lambda one: one.step), "it left while the others went on") if gone else None


def _odd_call(evidence: Sequence[WorkerFailure]) -> tuple[WorkerFailure, str] | None:
    """Blame a rank whose collective broke although no rank had ended.

    First the one that made an unusual call, then the one without records, then the one at the rarest location; the
    engine's own collectives come last, since all ranks call them.
    """
    broken = [one for one in evidence if one.cascade and one.where]
    places = Counter(one.where for one in broken)
    if len(places) < 2:
        return None

    def order(one: WorkerFailure) -> tuple[int, int, bool, float]:
        unusual = is_unusual_call(one.calls)
        surprise = 0 if unusual else 1 if unusual is None else 2
        return surprise, places[one.where], is_engine_location(one.where), one.timestamp

    return min(broken, key=order), "its collective was called from another place than the others'"


def _behind(evidence: Sequence[WorkerFailure]) -> tuple[WorkerFailure, str] | None:
    ranks = [one for one in _latest(evidence) if not one.left]
    behind = find_furthest_behind({one.rank: one.calls for one in ranks if one.calls})
    if behind:
        late = [one for one in ranks if one.rank in behind]
        ahead = [one for one in ranks if one.rank not in behind and one.calls]
        if _called_alone(ahead, late):
            return min(ahead, key=_first), _CALLED_ALONE
        return min(late, key=_first), "it has called the fewest collectives"
    hung = [one for one in ranks if one.hung or (one.witness and not one.cascade)]
    if len({_place(one) for one in hung}) > 1:
        return min(hung, key=_place_and_time), "it is furthest behind"
    return None


def _called_alone(ahead: Sequence[WorkerFailure], late: Sequence[WorkerFailure]) -> bool:
    """Return whether the ranks with more calls are at fault: the others wait in the engine's exchange of the same step.

    A CPU gang's exchanges are in no recorder (`training.peer_sockets`). Of equally many ranks, an unusual call decides.
    """
    if not ahead or not all(one.waiting and is_engine_location(one.where) for one in late):
        return False
    if any(is_engine_location(one.where) for one in ahead) or max(one.step for one in ahead) > min(
        one.step for one in late
    ):
        return False
    if len(ahead) == len(late):
        return all(is_unusual_call(one.calls) is not False for one in ahead)
    return len(ahead) < len(late)


def _network(evidence: Sequence[WorkerFailure]) -> Culprit:
    """Blame the network if all ranks wait alike or connections broke without a dead process."""
    failures = [one for one in evidence if not one.witness] or list(evidence)
    first = min(failures, key=_first)
    because = "all ranks wait alike" if all(one.waiting for one in failures) else "no rank stands out"
    if len(evidence) == 1 or not (first.cascade or first.waiting):
        return _culprit(first, because, evidence)
    text = f"{first.message}; {because} and no process has ended: check the network and the storage for a hang"
    return _culprit(first, because, evidence, message=text, certainty=SLOW)


def _mismatched(mismatch: Mismatch, evidence: Sequence[WorkerFailure]) -> Culprit:
    latest = {one.rank: one for one in _latest(evidence)}
    odd = latest[mismatch.ranks[0]]
    place = f" ({odd.where})" if odd.where else ""
    return _culprit(odd, "flight recorders differ", evidence, message=f"{mismatch}{place}", certainty=PROVEN)


def _culprit(
    one: WorkerFailure,
    because: str,
    evidence: Sequence[WorkerFailure],
    *,
    message: str = "",
    certainty: str = "",
) -> Culprit:
    kind = _kind(one, because)
    return Culprit(
        rank=one.rank,
        node=one.node,
        kind=kind,
        because=because,
        message=message or (f"no progress {one.message}" if kind == HANG and one.witness else one.message),
        where=one.where,
        step=one.step,
        phase=one.phase,
        certainty=certainty or (SLOW if kind == HANG and one.witness else one.certainty),
        fingerprint=f"{kind} at {one.where}" if one.where else kind,
        cascades=sorted({other.rank for other in evidence if other.rank != one.rank and not other.left}),
        next_action=_next_action(one, kind),
        dump=one.dump,
        failure=one,
    )


def _kind(one: WorkerFailure, because: str) -> str:
    if because in ("flight recorders differ", _CALLED_ALONE) or (one.cascade and "another place" in because):
        return DIFFERENT_CALLS
    if one.left:
        return LEFT_EARLY
    return HANG if one.witness else one.kind


def _next_action(one: WorkerFailure, kind: str) -> str:
    if (one.killed_by or "").startswith("node "):
        return "a new attempt on another machine, from the newest commit"
    if one.memory_kill:
        return (
            "restart from the newest commit; if it comes again: more gradient_accumulation_steps, fewer loader workers"
        )
    if one.killed_by == "SIGBUS":
        return "restart from the newest commit; SIGBUS is often a full /dev/shm: give the container more shared memory"
    if one.killed_by:
        return "restart from the newest commit"
    if one.stopped:
        return "continue and end the stopped process, restart from the newest commit"
    if kind in (DIFFERENT_CALLS, LEFT_EARLY):
        return f"every rank must call the same collectives in the same order: correct the code at {one.where or 'it'}"
    if kind == HANG:
        place = f"look at {one.where}, " if one.where else ""
        return f"end it and restart from the newest commit; if it comes again: {place}stacks are in the dump"
    return "restart from the newest commit; the same exception three times without a new commit ends the job"


def _latest(evidence: Sequence[WorkerFailure]) -> list[WorkerFailure]:
    """Return one record per rank: its failure, else its last witness, completed with what only the other one shows."""
    ranks: dict[int, WorkerFailure] = {}
    for one in sorted(evidence, key=lambda one: not one.witness):
        before = ranks.get(one.rank, one)
        ranks[one.rank] = replace(one, where=one.where or before.where, calls=one.calls or before.calls)
    return list(ranks.values())


def _first(one: WorkerFailure) -> float:
    return one.timestamp


def _place(one: WorkerFailure) -> tuple[int, int]:
    return one.step, PHASES.index(one.phase) if one.phase in PHASES else 0


def _place_and_time(one: WorkerFailure) -> tuple[int, int, float]:
    return (*_place(one), one.timestamp)
