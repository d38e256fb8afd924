"""Faults of the C library's calls: a disk that is slow or refuses, a network that answers late."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable

from benchmarks.chaos.fault import Aim, Fault, Means, Symptom
from benchmarks.chaos.orders import Strike
from benchmarks.chaos.places import Shimmed
from benchmarks.chaos.places.place import here
from benchmarks.chaos.scene import Scene
from ebbflow.core.events import EndReason

_SLOW_SECONDS = 1.5
_CONNECT_SECONDS = 0.5
_PATIENT = "none: training goes on, the commit comes later"


def _hurt(
    call: str, *, seconds: float = 0.0, number: int = 0
) -> Callable[[Scene, Aim], Strike | None]:
    def inject(scene: Scene, aim: Aim) -> Strike:
        here(scene.place, Shimmed).hurt(call, seconds=seconds, errno=number)
        return Strike.now()

    return inject


def _kill_and_slow_down(scene: Scene, aim: Aim) -> Strike:
    here(scene.place, Shimmed).hurt("connect", seconds=_CONNECT_SECONDS)
    pid = scene.rank_pid(aim.rank)
    os.kill(pid, signal.SIGKILL)
    return Strike.now(pid=pid)


def _heal(scene: Scene, aim: Aim) -> None:
    here(scene.place, Shimmed).heal()


def _of_the_disk(
    kind: str,
    what: str,
    inject: Callable[[Scene, Aim], Strike | None],
    symptom: Symptom,
    action: str,
) -> Fault:
    return Fault(
        kind=kind,
        means=Means.LIBRARY,
        what=what,
        inject=inject,
        heal=_heal,
        action=action,
        symptom=symptom,
        place=Shimmed,
        bare=False,
    )


LIBRARY = (
    _of_the_disk(
        "slow-fsync",
        f"each fsync of the store takes {_SLOW_SECONDS:g} s longer, for 3 s",
        _hurt("fsync", seconds=_SLOW_SECONDS),
        Symptom.NOTHING,
        _PATIENT,
    ),
    _of_the_disk(
        "failing-fsync",
        "each fsync of the store fails with EIO, for 3 s",
        _hurt("fsync", number=errno.EIO),
        Symptom.EITHER,
        "the save is said to have failed, and no commit is made of it; training goes on, or back "
        "to the last commit",
    ),
    _of_the_disk(
        "failing-write",
        "each write to the store fails with EIO, for 3 s",
        _hurt("write", number=errno.EIO),
        Symptom.EITHER,
        "the save is said to have failed, and no commit is made of it; training goes on, or back "
        "to the last commit",
    ),
    Fault(
        kind="slow-connect",
        means=Means.LIBRARY,
        what=f"SIGKILL to a rank, and each connection takes {_CONNECT_SECONDS:g} s longer to make",
        inject=_kill_and_slow_down,
        heal=_heal,
        action="the gang restarts from the newest commit, a little later",
        reasons=(EndReason.RANK_KILLED,),
        place=Shimmed,
        bare=False,
    ),
)
