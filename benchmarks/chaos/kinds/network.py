"""Faults of the network between two agents, injected by the proxy between them."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.chaos.fault import Aim, Fault, Means, Symptom
from benchmarks.chaos.orders import Strike
from benchmarks.chaos.proxy import Conduct
from benchmarks.chaos.scene import Scene
from ebbflow.core.events import EndReason
from ebbflow.training.errors import GangError

_ACTION = "the node counts as lost: a new attempt"


def _turn(conduct: Conduct) -> Callable[[Scene, Aim], Strike | None]:
    def inject(scene: Scene, _aim: Aim) -> Strike:
        if scene.proxy is None:
            raise GangError("a gang of one node has no network between its agents")
        scene.proxy.conduct = conduct
        return Strike.now()

    return inject


def _heal(scene: Scene) -> None:
    if scene.proxy is not None:
        scene.proxy.conduct = Conduct.PASS


def _lost(kind: str, what: str, conduct: Conduct) -> Fault:
    return Fault(
        kind=kind,
        means=Means.NETWORK,
        what=what,
        inject=_turn(conduct),
        heal=_heal,
        action=_ACTION,
        reasons=(EndReason.NODE_LOST,),
        node_is_guilty=True,
        nodes=(1,),
    )


NETWORK = (
    _lost("connection-reset", "the agents' connection is reset", Conduct.RESET),
    _lost("connection-closed", "the agents' connection is closed", Conduct.DROP),
    _lost("blackhole", "the agents' packets are swallowed", Conduct.BLACKHOLE),
    Fault(
        kind="delay",
        means=Means.NETWORK,
        what="the agents' packets arrive 0.2 s late, for 3 s",
        inject=_turn(Conduct.DELAY),
        heal=_heal,
        action="none: the agents are patient",
        symptom=Symptom.NOTHING,
        nodes=(1,),
    ),
)
