"""Faults of the launch: a node that is never started, or that has a wrong address of node 0."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from benchmarks.chaos.fault import Aim, Fault, Means
from benchmarks.chaos.orders import Strike
from benchmarks.chaos.scene import Scene
from ebbflow.core.events import EndReason
from ebbflow.training.errors import GangError
from ebbflow.training.launch.messages import GangSpec

_START_SECONDS = 4.0  # short, because such a start never succeeds
_OPEN_SECONDS = 120.0  # for node 0's program to come up on a busy machine
_LOOK_SECONDS = 0.05
_ACTION = "every node ends within cluster.start_deadline_seconds, and says who is missing"


def _alter_one(
    change: Callable[[GangSpec], GangSpec | None],
) -> Callable[[Scene, Aim], Strike | None]:
    def inject(scene: Scene, aim: Aim) -> Strike:
        scene.close()
        scene.tamper(
            lambda spec: change(_hurried(spec)) if spec.node == aim.node else _hurried(spec)
        )
        before = _count_generations(scene)
        scene.start()
        _await_generation(scene, before)
        return Strike.now()

    return inject


def _count_generations(scene: Scene) -> int:
    return len(list(scene.store.list("generations")))


def _await_generation(scene: Scene, before: int) -> None:
    """Wait until node 0 has opened its generation, after which it waits for the other node."""
    limit = time.monotonic() + _OPEN_SECONDS
    while _count_generations(scene) == before:
        if time.monotonic() > limit or not scene.running:
            raise GangError(f"{scene.spec.job}: node 0 opened no generation")
        time.sleep(_LOOK_SECONDS)


def _hurried(spec: GangSpec) -> GangSpec:
    cluster = spec.config.cluster.model_copy(update={"start_deadline_seconds": _START_SECONDS})
    return replace(spec, config=spec.config.model_copy(update={"cluster": cluster}))


def _absent(_spec: GangSpec) -> None:
    return None


def _wrong_port(spec: GangSpec) -> GangSpec:
    """Point the node to the discard port, which is closed."""
    return replace(spec, candidate_ports=[9])


def _bad_name(spec: GangSpec) -> GangSpec:
    """Point the node to a name below .invalid, which never resolves (RFC 2606)."""
    return replace(spec, main_address="no-such-host.invalid")


def _launch(kind: str, what: str, change: Callable[[GangSpec], GangSpec | None]) -> Fault:
    return Fault(
        kind=kind,
        means=Means.LAUNCH,
        what=what,
        inject=_alter_one(change),
        action=_ACTION,
        reasons=(EndReason.ROLL_CALL,),
        node_is_guilty=True,
        nodes=(1,),
    )


LAUNCHING = (
    _launch("missing-peer", "node 1 is never started", _absent),
    _launch("wrong-port", "node 1 looks for node 0 on a port where nobody listens", _wrong_port),
    _launch("bad-name", "node 1 looks for node 0 by a name that does not resolve", _bad_name),
)
