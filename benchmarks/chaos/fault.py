"""The definition of a fault: how it is injected and removed, and what the gang must report and do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.chaos.orders import Strike
from benchmarks.chaos.scene import Scene


class Means(StrEnum):
    """The way in which a fault is injected."""

    SIGNAL = "signal"
    HOOK = "hook"  # code inside the rank
    LAUNCH = "launch"  # of one node, before anything runs
    NETWORK = "network"  # the proxy between two agents


class Symptom(StrEnum):
    """The observable effect of a fault."""

    VERDICT = "verdict"  # `fault_detected` names the culprit; the job continues from a commit
    OUTCOME = "outcome"  # the job ends with an outcome that names the culprit
    NOTHING = "nothing"  # training continues; ending any rank would be a false kill


@dataclass(frozen=True, kw_only=True)
class Aim:
    """The target of one injection."""

    node: int
    rank: int
    number: int  # of this injection in its job; it identifies orders and strikes


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault.

    Attributes:
        what: The fault in one sentence.
        inject: Injects it. Returns when it struck, or None if a rank records that itself.
        heal: Removes what outlives the gang.
        action: The expected recovery in one sentence.
        reasons: `ebbflow.core.events.EndReason`s, of which the verdict must give one.
        where: Text of the verdict's file and line; "" if any will do, None if there is none.
        node_is_guilty: Whether the verdict must name a node instead of a rank.
        limit_seconds: The latest time of the verdict.
    """

    kind: str
    means: Means
    what: str
    inject: Callable[[Scene, Aim], Strike | None]
    action: str
    symptom: Symptom = Symptom.VERDICT
    heal: Callable[[Scene], None] | None = None
    reasons: tuple[str, ...] = ()
    where: str | None = None
    node_is_guilty: bool = False
    limit_seconds: float = 8.0
    nodes: tuple[int, ...] = (0, 1)
