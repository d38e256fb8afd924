"""Faults of the network: between two agents, by the proxy between them, or of all there is between
two nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.chaos.fault import Aim, Fault, Means, Symptom
from benchmarks.chaos.orders import Strike
from benchmarks.chaos.places import Namespaces
from benchmarks.chaos.places.place import here
from benchmarks.chaos.proxy import Conduct
from benchmarks.chaos.scene import Scene
from ebbflow.core.events import EndReason
from ebbflow.training.errors import GangError

_ACTION = "the node counts as lost: a new attempt"
# TCP sends again soon after that; the pause that ranks see is up to twice as long
_FLAP_SECONDS = 0.5


def _turn(conduct: Conduct) -> Callable[[Scene, Aim], Strike | None]:
    def inject(scene: Scene, aim: Aim) -> Strike:
        if scene.proxy is None:
            raise GangError("a gang of one node has no network between its agents")
        scene.proxy.conduct = conduct
        return Strike.now()

    return inject


def _heal(scene: Scene, aim: Aim) -> None:
    if scene.proxy is not None:
        scene.proxy.conduct = Conduct.PASS


def _pull_the_cable(scene: Scene, aim: Aim) -> Strike:
    here(scene.place, Namespaces).link(up=False)
    return Strike.now()


def _shake_the_cable(scene: Scene, aim: Aim) -> Strike:
    strike = _pull_the_cable(scene, aim)
    time.sleep(_FLAP_SECONDS)
    here(scene.place, Namespaces).link(up=True)
    return strike


def _plug_in(scene: Scene, aim: Aim) -> None:
    here(scene.place, Namespaces).link(up=True)


def _lost(kind: str, what: str, conduct: Conduct, *, limit_seconds: float = 8.0) -> Fault:
    return Fault(
        kind=kind,
        means=Means.NETWORK,
        what=what,
        inject=_turn(conduct),
        heal=_heal,
        action=_ACTION,
        reasons=(EndReason.NODE_LOST,),
        node_is_guilty=True,
        limit_seconds=limit_seconds,
        nodes=(1,),
        bare=False,
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
        bare=False,
    ),
    Fault(
        kind="partition",
        means=Means.NETWORK,
        what=(
            "the link between two nodes goes down, for agents and ranks alike (network namespaces)"
        ),
        inject=_pull_the_cable,
        heal=_plug_in,
        action=_ACTION,
        reasons=(EndReason.NODE_LOST,),
        node_is_guilty=True,
        nodes=(1,),
        place=Namespaces,
        bare=False,
    ),
    Fault(
        kind="link-flap",
        means=Means.NETWORK,
        what=f"the link between two nodes is down for {_FLAP_SECONDS:g} s (network namespaces)",
        inject=_shake_the_cable,
        heal=_plug_in,
        action="none: what was lost is sent again",
        symptom=Symptom.NOTHING,
        nodes=(1,),
        place=Namespaces,
        bare=False,
    ),
)
