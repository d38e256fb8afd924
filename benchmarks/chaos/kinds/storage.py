"""Faults of the store: what S3 answers on a bad day, while saves are under way.

Nothing is lost, nobody is to blame.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from benchmarks.chaos.fault import Aim, Fault, Means, Symptom
from benchmarks.chaos.orders import Strike
from benchmarks.chaos.places import FailingStore
from benchmarks.chaos.places.place import here
from benchmarks.chaos.places.store import CALM
from benchmarks.chaos.scene import Scene
from ebbflow.core.events import EndReason


def _bad_day(**settings: Any) -> Callable[[Scene, Aim], Strike | None]:
    def inject(scene: Scene, aim: Aim) -> Strike:
        here(scene.place, FailingStore).behave(**settings)
        return Strike.now()

    return inject


def _kill_on_a_bad_day(scene: Scene, aim: Aim) -> Strike:
    here(scene.place, FailingStore).behave(rates={"slow_down": 0.5})
    pid = scene.rank_pid(aim.rank)
    os.kill(pid, signal.SIGKILL)
    return Strike.now(pid=pid)


def _heal(scene: Scene, aim: Aim) -> None:
    here(scene.place, FailingStore).behave(**CALM)


def _bearable(kind: str, what: str, **settings: Any) -> Fault:
    return Fault(
        kind=kind,
        means=Means.STORE,
        what=what,
        inject=_bad_day(**settings),
        heal=_heal,
        action="none: requests are made again, training goes on, the commit comes later",
        symptom=Symptom.NOTHING,
        place=FailingStore,
        bare=False,
    )


STORAGE = (
    _bearable(
        "store-503", "S3 answers each request with 503 SlowDown, for 3 s", rates={"slow_down": 1.0}
    ),
    _bearable(
        "store-slow",
        "S3 answers each request up to 2 s late, for 3 s",
        rates={"slow": 1.0},
        slow_up_to_seconds=2.0,
    ),
    _bearable(
        "store-cut",
        "half of S3's connections are reset in mid-body, a third of its answers to writes are "
        "lost, for 3 s",
        rates={"reset": 0.5, "lost": 0.33},
    ),
    Fault(
        kind="store-503-kill",
        means=Means.STORE,
        what="SIGKILL to a rank while S3 answers every other request with 503",
        inject=_kill_on_a_bad_day,
        heal=_heal,
        action="the gang restarts from the newest commit, and asks the store until it answers",
        reasons=(EndReason.RANK_KILLED,),
        place=FailingStore,
        bare=False,
    ),
)
