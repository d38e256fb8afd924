"""Faults of a node and its surroundings: a program that takes its node along, busy cores, a store
whose mount is gone for a moment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.chaos.fault import Aim, Fault, Means, Symptom
from benchmarks.chaos.orders import Order, Strike
from benchmarks.chaos.scene import Scene
from ebbflow.core.events import EndReason
from ebbflow.training.errors import GangError

_FIXED_STEP = 15  # of every twenty
_EVERY_STEPS = 20
_STEP_SECONDS = 20.0
_BURNERS_PER_CORE = 8
_AWAY_SECONDS = 0.4  # less than passes between two saves, so that at most one fails


def _kill_node(scene: Scene, aim: Aim) -> None:
    """Order the rank to kill its agent, as a group kill for memory would, always at the same step."""
    limit = time.monotonic() + _STEP_SECONDS
    while scene.beats()[aim.rank].step % _EVERY_STEPS != _FIXED_STEP - 1:
        if time.monotonic() > limit:
            raise GangError(f"rank {aim.rank} did not come to step {_FIXED_STEP} of twenty")
        time.sleep(0.005)
    settings = {"pid": scene.agent_pid(aim.node)}
    scene.orders.give(aim.rank, Order(hook="kill_node", number=aim.number, settings=settings))


def _burn(scene: Scene, _aim: Aim) -> Strike:
    count = _BURNERS_PER_CORE * len(os.sched_getaffinity(0))
    program = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(9999))"
    scene.burners += [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    return Strike.now()


def _cool(scene: Scene) -> None:
    while scene.burners:
        burner = scene.burners.pop()
        burner.kill()
        burner.wait()


def _take_store_away(scene: Scene, _aim: Aim) -> Strike:
    store = Path(scene.spec.store_uri)
    strike = Strike.now()
    away = store.with_name("away")
    store.rename(away)
    try:
        store.mkdir()  # the empty folder below a mount point
        time.sleep(_AWAY_SECONDS)
        store.rmdir()  # fails if anything was written there
    finally:
        if not store.exists():
            away.rename(store)
    return strike


MACHINE = (
    Fault(
        kind="node-kill-at-step",
        means=Means.HOOK,
        what="a program that takes its node along, always at the same step",
        inject=_kill_node,
        action="a new attempt, on another node",
        reasons=(EndReason.NODE_LOST,),
        node_is_guilty=True,
        nodes=(1,),
    ),
    Fault(
        kind="cpu-pressure",
        means=Means.SIGNAL,
        what=f"{_BURNERS_PER_CORE} busy processes per core for 3 s",
        inject=_burn,
        heal=_cool,
        action="training goes on, slower",
        symptom=Symptom.NOTHING,
    ),
    Fault(
        kind="store-away",
        means=Means.SIGNAL,
        what=f"the store's mount is gone for {_AWAY_SECONDS:g} s, an empty folder in its place",
        inject=_take_store_away,
        action="nothing is written there, one save may fail, training goes on",
        symptom=Symptom.NOTHING,
    ),
)
