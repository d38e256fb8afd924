"""Faults of the disk: the store lies on a small tmpfs of this process's own mounts, filled to the
last byte.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.chaos.fault import Aim, Fault, Means, Symptom
from benchmarks.chaos.orders import Strike
from benchmarks.chaos.places import SmallDisk
from benchmarks.chaos.places.place import here
from benchmarks.chaos.scene import Scene

_FILLER = "filler"


def _store_folder(scene: Scene) -> Path:
    return Path(scene.spec.store_uri.removeprefix("file://"))


def _fill(scene: Scene, aim: Aim) -> Strike:
    here(scene.place, SmallDisk)  # any other disk is somebody else's too
    strike = Strike.now()
    with (_store_folder(scene) / _FILLER).open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**16))
        except OSError:
            return strike


def _make_room(scene: Scene, aim: Aim) -> None:
    (_store_folder(scene) / _FILLER).unlink(missing_ok=True)


DISK = (
    Fault(
        kind="full-disk",
        means=Means.DISK,
        what="no byte is left on the store's disk",
        inject=_fill,
        heal=_make_room,
        action=(
            "older commits give way; without any left the job ends and says so, and goes on once "
            "there is room"
        ),
        symptom=Symptom.EITHER,
        limit_seconds=30.0,
        place=SmallDisk,
        bare=False,
    ),
)
