"""Faults of memory: what one rank is allowed, by its own limit or by the kernel's (a cgroup of
version 1 or 2).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from benchmarks.chaos.fault import Aim, Fault, Means
from benchmarks.chaos.orders import Order, Strike
from benchmarks.chaos.scene import Scene
from ebbflow.core.events import EndReason
from ebbflow.training.errors import GangError

_AGAIN = (
    "the gang restarts from the newest commit; the third time without a new commit ends the job"
)
# Beyond what the rank had before: memory that is charged already stays with its old cgroup
_MEBIBYTES = 96
_EMPTY_SECONDS = 5.0
_SEEN_SECONDS = 2.5  # an agent looks once a second which cgroup its ranks are in
_MOUNTS = Path("/sys/fs/cgroup")


def _limits(root: Path) -> dict[str, str]:
    """By file of a new cgroup what to write into it; swap would only make the end slow."""
    size = str(_MEBIBYTES * 2**20)
    if root == _MOUNTS:
        return {"memory.max": size, "memory.swap.max": "0"}
    return {"memory.limit_in_bytes": size, "memory.memsw.limit_in_bytes": size}


def _root() -> Path | None:
    """Where memory cgroups can be made: the mount of version 1, or of version 2 with that
    controller.
    """
    if (_MOUNTS / "memory" / "cgroup.procs").exists():
        return _MOUNTS / "memory"
    with contextlib.suppress(OSError):
        if "memory" in (_MOUNTS / "cgroup.subtree_control").read_text().split():
            return _MOUNTS
    return None


def _no_cgroup() -> str:
    root = _root()
    if root is None:
        return "no memory controller of cgroups is mounted and delegated at /sys/fs/cgroup"
    if os.geteuid() != 0 or not os.access(root, os.W_OK):
        return (
            f"no cgroup may be made in {root}: run as root, in a container with cgroups of its own"
        )
    return ""


def _cgroup(aim: Aim) -> Path:
    root = _root()
    assert root is not None
    return root / f"ebbflow-chaos-{os.getpid()}-{aim.number}"


def _cage(scene: Scene, aim: Aim) -> Strike | None:
    """Raises GangError where the kernel refuses."""
    group = _cgroup(aim)
    try:
        group.mkdir()
        for name, value in _limits(group.parent).items():
            if (group / name).exists():  # limits of swap are not compiled into every kernel
                (group / name).write_text(value)
        (group / "cgroup.procs").write_text(str(scene.rank_pid(aim.rank)))
    except OSError as error:
        raise GangError(f"{group}: {error}") from error
    time.sleep(_SEEN_SECONDS)
    scene.orders.give(aim.rank, Order(hook="memory_balloon", number=aim.number))
    return None


def _open_cage(scene: Scene, aim: Aim) -> None:
    """Who is still in it goes back to where there is no such limit: a rank that did not come to its
    order. One that was killed is there until it is reaped."""
    group = _cgroup(aim)
    limit = time.monotonic() + _EMPTY_SECONDS
    while group.exists() and time.monotonic() < limit:
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                (group.parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)


def _ask_for_too_much(scene: Scene, aim: Aim) -> None:
    order = Order(hook="memory_limit", number=aim.number, settings={"mebibytes": 256})
    scene.orders.give(aim.rank, order)


MEMORY = (
    Fault(
        kind="memory-limit",
        means=Means.MEMORY,
        what="one rank asks for more memory than its limit (RLIMIT_AS)",
        inject=_ask_for_too_much,
        action=_AGAIN,
        reasons=(EndReason.RANK_FAILED, EndReason.RANK_KILLED),
        where="in memory_balloon",
    ),
    Fault(
        kind="memory-kill",
        means=Means.MEMORY,
        what=f"the kernel kills one rank that takes more than {_MEBIBYTES} MiB (cgroup)",
        inject=_cage,
        heal=_open_cage,
        action="the gang restarts from the newest commit; the verdict says that memory was wanting",
        reasons=(EndReason.RANK_KILLED,),
        says="out of memory",
        missing=_no_cgroup,
        bare=False,
    ),
)
