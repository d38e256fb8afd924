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
9. the rank that waits in a collective that the other ranks did not call, else the rank that is
    furthest behind
10. the network

The failures of all other ranks are cascades: these ranks failed, or wait, because of the culprit.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter

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
_RECORDERS_DIFFER = "flight recorders differ"
_CALLED_ALONE = "it waits in a collective that the other ranks did not call"
_CALLED_ELSEWHERE = "its collective was called from another place than the others'"
HANG = "hang"
_first = attrgetter("timestamp")
_MOST_UNUSUAL_FIRST = (True, None, False)  # results of `is_unusual_call`
_LONE_CALL_SECONDS = 2.0  # the ranks report the positions of one dump within less
_STALL_SECONDS = 1.0  # without CPU time
# An exception counts as the cause of a kill only if it is more than this earlier
_KILL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Rank that caused the failure.

    If the network was the cause, this is the first rank that reported a failure.

    Attributes without a comment have the same meaning as in `WorkerFailure`.
    """

    rank: int
    node: int
    kind: str  # kind of failure in one or two words, such as "hang"
    because: str  # text for the rule that named this rank, such as "it ended first"
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

    def details(self) -> dict:
        """Return the fields for the event FAULT_DETECTED: all non-empty fields except `message` and
        `failure`.
        """
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in ("message", "failure") and value != ""
        }


def blame(evidence: Sequence[WorkerFailure]) -> Culprit:
    """Return the culprit.

    `evidence` has the failures, and the positions of ranks that have not failed.
    """
    failures = [failure for failure in evidence if not failure.witness]
    if broken := [failure for failure in failures if failure.gpu_fault]:
        return _culprit(min(broken, key=_first), "a GPU of its node has a hardware fault", evidence)
    died = _died(failures)
    if died is not None:
        return _culprit(*died, evidence)
    if stopped := [failure for failure in failures if failure.stopped]:
        return _culprit(min(stopped, key=_first), "its process is stopped", evidence)
    mismatch = detect_mismatch(evidence)
    if mismatch is not None:
        odd = next(one for one in _latest(evidence) if one.rank == mismatch.ranks[0])
        if odd.where:
            message = f"{mismatch} ({odd.where})"
        else:
            message = str(mismatch)
        return _culprit(odd, _RECORDERS_DIFFER, evidence, message=message, certainty=PROVEN)
    for rule in (_device_behind, _outside_collective, _left, _odd_call, _behind):
        found = rule(evidence)
        if found is not None:
            sizes = any(has_other_size(failure.message) for failure in evidence)
            if rule is _odd_call:
                proven = sizes
            else:
                proven = found[1] == _CALLED_ALONE and _all_wait_for_good(evidence)
            if proven:
                certainty = PROVEN
            elif rule is _odd_call:
                certainty = SLOW
            else:
                certainty = ""
            return _culprit(found[0], found[1], evidence, certainty=certainty)
    return _network(evidence)


def detect_mismatch(evidence: Sequence[WorkerFailure]) -> Mismatch | None:
    """Return the first position at which ranks called different collectives; None if there is none.

    A mismatch proves that the gang has failed.
    """
    latest = _latest(evidence)
    return find_mismatch(
        {one.rank: one.calls for one in latest}, {one.rank: one.where for one in latest}
    )


class LoneCall:
    """A rank alone in a collective that the other ranks did not call, as dumps of all ranks show it
    over time.

    All ranks wait then, and none of them can continue. It proves that the gang has failed if a
    second dump shows it.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._places = list[tuple[int, str, str]]()

    def lasts(self, evidence: Sequence[WorkerFailure], now: float) -> bool:
        alone = _all_wait_for_good(evidence) and blame(evidence).because == _CALLED_ALONE
        if alone:
            places = sorted(
                (failure.rank, failure.where, str(failure.calls)) for failure in evidence
            )
        else:
            places = []
        if not alone or places != self._places:
            self._since = now
            self._places = places
        return now - self._since >= _LONE_CALL_SECONDS


def _all_wait_for_good(evidence: Sequence[WorkerFailure]) -> bool:
    """Return whether the gang is deadlocked: each rank waits for other ranks, outside of a backward
    pass.

    Waits for a device do not count, since it may just be slow, nor waits in a backward pass for
    slower ranks.
    """
    places = (
        failure.where
        for failure in evidence
        if failure.waiting and not has_queued_calls(failure.calls)
    )
    return sum(not place.startswith("training/engine/loop.py") for place in places) == len(evidence)


def detect_stall(evidence: Sequence[WorkerFailure]) -> Culprit | None:
    """Return the rank that uses no CPU time outside of any collective while all others wait; None
    if there is none.

    It is no proof: the rank may wait for a lock, a download or another process.
    """
    culprit = blame(evidence)
    others = [failure for failure in evidence if failure.rank != culprit.rank]
    idle = culprit.kind == HANG and culprit.failure.idle_seconds >= _STALL_SECONDS
    if idle and others and all(map(_waits, others)):
        return culprit
    return None


def settle_seconds(failures: Sequence[WorkerFailure], *, all_heard: bool = False) -> float:
    """Return how many seconds to wait after the first failure for a report about its cause.

    `all_heard` is True if every rank has reported. In that case no more evidence about a hang will
    arrive.
    """
    if any(failure.killed_by or failure.stopped for failure in failures):
        if all(failure.cascade for failure in failures if not failure.hung):
            return 1.0
        return 0.3
    if any(not failure.cascade and not failure.hung for failure in failures):
        return 0.5
    if not failures:
        return 1.0  # the positions of all ranks are the evidence
    if all(failure.cascade for failure in failures):
        return 3.0
    if all_heard:
        return 0.2
    return 1.5


def _died(failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, str] | None:
    """Return the rank that died first, and the reason why it is the culprit; None if all deaths
    were cascades.

    Lost nodes take precedence over dead ranks. Ranks killed by SIGABRT come last, because torch
    aborts a rank after another one failed.
    """
    dead = [failure for failure in failures if not failure.hung and not failure.cascade]
    if not dead:
        return None

    def order(one: WorkerFailure) -> tuple[bool, bool, float]:
        lost_node = (one.killed_by or "").startswith("node ")
        return (
            not lost_node,
            one.killed_by == "SIGABRT",
            one.timestamp - (_KILL_SECONDS if one.killed_by else 0.0),
        )

    return min(dead, key=order), "it ended first"


def _device_behind(evidence: Sequence[WorkerFailure]) -> tuple[WorkerFailure, str] | None:
    ranks = {one.rank: one for one in _latest(evidence) if not one.left}
    late = [
        ranks[rank] for rank in find_device_behind({rank: one.calls for rank, one in ranks.items()})
    ]
    if not late:
        return None
    return min(
        late, key=_place_and_time
    ), "its GPU has not started a collective in which the others' GPUs wait"


def _waits(one: WorkerFailure) -> bool:
    return one.waiting or has_queued_calls(one.calls)


def _outside_collective(evidence: Sequence[WorkerFailure]) -> tuple[WorkerFailure, str] | None:
    """Return a living rank that waits neither in a collective nor for its device.

    Return None if there is none, or if all living ranks are outside of collectives in the same step
    and phase.
    """
    alive = [one for one in _latest(evidence) if not one.cascade and not one.left and one.where]
    outside = [one for one in alive if not _waits(one)]
    if not outside or (len(outside) == len(alive) > 1 and len({_place(one) for one in alive}) == 1):
        return None
    return min(outside, key=_place_and_time), "it stands outside of any collective"


def _left(evidence: Sequence[WorkerFailure]) -> tuple[WorkerFailure, str] | None:
    gone = [failure for failure in evidence if failure.left]
    if gone:
        return (min(gone, key=lambda one: one.step), "it left while the others went on")
    return None


def _odd_call(evidence: Sequence[WorkerFailure]) -> tuple[WorkerFailure, str] | None:
    """Return the rank whose failed collective is the most unusual; None if all failed at the same
    code location.

    Only ranks that lost a peer are compared. The criteria, most important first:

    1. The rank's last two calls never followed each other before. Ranks with too few recorded calls
        come second.
    2. Few ranks failed at this code location.
    3. The code location is outside the engine's own collectives, which all ranks call.
    """
    broken = [failure for failure in evidence if failure.cascade and failure.where]
    places = Counter(one.where for one in broken)
    if len(places) < 2:
        return None

    def order(one: WorkerFailure) -> tuple[int, int, bool, float]:
        surprise = _MOST_UNUSUAL_FIRST.index(is_unusual_call(one.calls))
        return surprise, places[one.where], is_engine_location(one.where), one.timestamp

    return min(broken, key=order), _CALLED_ELSEWHERE


def _behind(evidence: Sequence[WorkerFailure]) -> tuple[WorkerFailure, str] | None:
    ranks = _latest(evidence)
    behind = find_furthest_behind({rank.rank: rank.calls for rank in ranks})
    if behind:
        late = [rank for rank in ranks if rank.rank in behind]
        ahead = [rank for rank in ranks if rank.rank not in behind and rank.calls]
        if _called_alone(ahead, late):
            return min(ahead, key=_first), _CALLED_ALONE
        return min(late, key=_first), "it has called the fewest collectives"
    alive = [rank for rank in ranks if not rank.cascade]
    if len({_place(one) for one in alive}) > 1:
        return min(alive, key=_place_and_time), "it is furthest behind"
    return None


def _called_alone(ahead: Sequence[WorkerFailure], late: Sequence[WorkerFailure]) -> bool:
    """Return whether the ranks in `ahead` called a collective that the ranks in `late` will not
    call.

    In this case the late ranks only appear to be behind. They wait in an exchange of the engine in
    the same step, which flight recorders do not show for a CPU gang
    (`ebbflow.training.peer_sockets`).

    The smaller group is at fault. If both groups have the same size, the ranks ahead are at fault.
    The exception is a rank ahead that had already made its last two calls in this order before:
    then the ranks ahead are not at fault.
    """
    if not ahead or not all(
        failure.waiting and is_engine_location(failure.where) for failure in late
    ):
        return False
    if any(is_engine_location(failure.where) for failure in ahead) or max(
        failure.step for failure in ahead
    ) > min(failure.step for failure in late):
        return False
    if len(ahead) == len(late):
        return all(is_unusual_call(failure.calls) is not False for failure in ahead)
    return len(ahead) < len(late)


def _network(evidence: Sequence[WorkerFailure]) -> Culprit:
    """Blame the network if the first failed rank waits for other ranks or lost a peer; otherwise
    blame this rank.
    """
    failures = [failure for failure in evidence if not failure.witness] or list(evidence)
    first = min(failures, key=_first)
    if all(map(_waits, failures)):
        because = "all ranks wait alike"
    else:
        because = "no rank stands out"
    if len(evidence) == 1 or not (first.cascade or _waits(first)):
        return _culprit(first, because, evidence)
    text = (
        f"{first.message}; {because} and no process has ended: check the network and the storage "
        "for a hang"
    )
    return _culprit(first, because, evidence, message=text, certainty=SLOW)


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
        message=message
        or (f"no progress {one.message}" if kind == HANG and one.witness else one.message),
        where=one.where,
        step=one.step,
        phase=one.phase,
        certainty=certainty or (SLOW if one.witness and not one.left else one.certainty),
        fingerprint=f"{kind} at {one.where}" if one.where else kind,
        cascades=sorted(
            {other.rank for other in evidence if other.rank != one.rank and not other.left}
        ),
        next_action=_next_action(one, kind),
        dump=one.dump,
        failure=one,
    )


def _kind(one: WorkerFailure, because: str) -> str:
    if because in (_RECORDERS_DIFFER, _CALLED_ALONE, _CALLED_ELSEWHERE):
        return DIFFERENT_CALLS
    if one.left:
        return LEFT_EARLY
    if one.witness:
        return HANG
    return one.kind


def _next_action(one: WorkerFailure, kind: str) -> str:
    if (one.killed_by or "").startswith("node ") or one.gpu_fault:
        return "a new attempt on another machine, from the newest commit"
    if one.memory_kill:
        return (
            "restart from the newest commit; if it comes again: more "
            "gradient_accumulation_steps, fewer loader workers"
        )
    if one.killed_by == "SIGBUS":
        return (
            "restart from the newest commit; SIGBUS is often a full /dev/shm: give the container "
            "more shared memory"
        )
    if one.killed_by:
        return "restart from the newest commit"
    if one.stopped:
        return "continue and end the stopped process, restart from the newest commit"
    if kind in (DIFFERENT_CALLS, LEFT_EARLY):
        return (
            "every rank must call the same collectives in the same order: correct the code at "
            f"{one.where or 'it'}"
        )
    if kind == HANG:
        if one.where:
            place = f"look at {one.where}, "
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


def _place(one: WorkerFailure) -> tuple[int, int]:
    return one.step, PHASES.index(one.phase) if one.phase in PHASES else 0


def _place_and_time(one: WorkerFailure) -> tuple[int, int, float]:
    return (*_place(one), one.timestamp)
