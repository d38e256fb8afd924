"""What a fault is: how it is done and undone, and what a gang that survives it must say and do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.chaos.orders import Strike
from benchmarks.chaos.places.place import Place
from benchmarks.chaos.scene import Scene


class Means(StrEnum):
    """By what a fault comes about."""

    SIGNAL = "signal"
    HOOK = "hook"  # code inside the rank
    LAUNCH = "launch"  # of one node, before anything runs
    NETWORK = "network"  # the proxy between two agents, or the cable between two nodes
    DISK = "disk"
    STORE = "store"
    LIBRARY = "library"  # calls of the C library, in every process
    MEMORY = "memory"


class Symptom(StrEnum):
    """What is to be seen of a fault."""

    VERDICT = "verdict"  # fault_detected, which names the guilty; the job goes on from a commit
    OUTCOME = "outcome"  # the job ends with an outcome of its own, which names the guilty
    # Training goes on as if nothing were: whoever is killed for this is killed falsely
    NOTHING = "nothing"
    # It goes on, or there is a verdict: what counts is that the weights are right in the end
    EITHER = "either"


@dataclass(frozen=True, kw_only=True)
class Aim:
    """The target of one injection. number: of this injection in its job, for orders and their
    answers.
    """

    node: int
    rank: int
    number: int


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault.

    inject: does it, and returns when it struck; None while that is not known yet (a rank will
    tell). heal: undoes what outlives the gang. where: what the verdict's file and line must hold,
    "" where any will do, None where there is no line to be had. reasons: of
    `ebbflow.core.events.EndReason`, of which the verdict must give one; says: words that must be
    in it. node_is_guilty: a node and not a rank is to be named. action: what ought to be done.
    limit_seconds: for the verdict. place: where the job must live. missing: why else it cannot be
    done here, "" where it can. bare: bare torchrun can be faced with it.
    """

    kind: str
    means: Means
    what: str
    inject: Callable[[Scene, Aim], Strike | None]
    action: str
    symptom: Symptom = Symptom.VERDICT
    heal: Callable[[Scene, Aim], None] = lambda scene, aim: None
    reasons: tuple[str, ...] = ()
    says: str = ""
    where: str | None = None
    node_is_guilty: bool = False
    limit_seconds: float = 8.0
    nodes: tuple[int, ...] = (0, 1)
    place: type[Place] = Place
    missing: Callable[[], str] = lambda: ""
    bare: bool = True

    def refused(self) -> str:
        """Why it cannot be done here, "" where it can; whether mounts of one's own are allowed is
        not asked.
        """
        return self.missing() or self.place.missing()
