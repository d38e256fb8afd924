"""Faults of the disk: the store lies on a small tmpfs of this process's own mounts, filled to the last byte."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from training.chaos.fault import Aim, Fault, Means, Symptom
from training.chaos.orders import Strike
from training.chaos.scene import Scene

_CLONE_NEWNS = 0x00020000  # <linux/sched.h>
SMALL_DISK_MIB = 48
_FILLER = "filler"


def own_mounts() -> str:
    """From now on mounts of this process and those it starts are nobody else's, and end with them. Returns why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        return f"mounts of one's own are refused here ({os.strerror(ctypes.get_errno())}): run as root"
    done = subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, text=True)
    return done.stderr.strip()


def mount_small_disk(folder: Path) -> str:
    """Mounts SMALL_DISK_MIB of memory on `folder`. Returns why it could not."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MIB}m", "none", str(folder)]
    return subprocess.run(command, capture_output=True, text=True).stderr.strip()


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def _store_folder(scene: Scene) -> Path:
    return Path(scene.spec.store_uri.removeprefix("file://"))


def _fill(scene: Scene, aim: Aim) -> Strike:
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
        action="older commits give way; without any left the job ends and says so, and goes on once there is room",
        symptom=Symptom.EITHER,
        limit_seconds=30.0,
        bare=False,
    ),
)
