"""What goes wrong inside a rank, in a function each, so that a verdict's file and line can be judged by its name.

Those that hang never return: the rank is killed, or dies with its agent.
"""

from __future__ import annotations

import ctypes
import gc
import re
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

_MIB = 2**20
_BALLOON_MIB = 16


def busy_loop() -> None:
    while True:
        pass


def gil_held() -> None:
    """In a C function that keeps the interpreter's lock, so that no other thread of this process runs either."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.sleep(600)


def long_regex() -> None:
    """Takes exponential time in C, with the interpreter's lock held."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def asleep() -> None:
    while True:
        time.sleep(600.0)


def loader_stuck() -> None:
    """Waits for a loader process that has nothing to give."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as loader:
        assert loader.stdout is not None
        loader.stdout.read()


def raise_error(text: str) -> None:
    raise RuntimeError(text)


def extra_collective() -> None:
    """What `if rank == 0: all_reduce(…)` does: the other ranks never call it."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(3))


def uneven_steps() -> None:
    """A rank that believes the epoch to be over waits for the others, who still have steps to take."""
    import torch.distributed as dist

    dist.barrier()


def memory_limit(mebibytes: int) -> None:
    """Asks for more memory than the process may have: MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + mebibytes * _MIB, hard))
    memory_balloon()


def memory_balloon() -> None:
    """Takes memory, and touches it, until somebody says no."""
    held = []
    while True:
        held.append(bytearray(_BALLOON_MIB * _MIB))
        time.sleep(0.002)


def slow(seconds: float) -> None:
    """One slow step. Nothing is broken."""
    time.sleep(seconds)


def collect_garbage(objects: int) -> None:
    """A collector that has much to look at: the interpreter stands still for a second or two."""
    cycles: list[list] = []
    for _ in range(objects):
        cycle: list = []
        cycle.append(cycle)
        cycles.append(cycle)
    cycles.clear()
    gc.collect()


# Carried out before the batch of a step is read. `not_a_number` is done by the workload, which holds the loss.
HOOKS: dict[str, Callable[..., None]] = {
    hook.__name__: hook
    for hook in (
        busy_loop,
        gil_held,
        long_regex,
        asleep,
        loader_stuck,
        raise_error,
        extra_collective,
        uneven_steps,
        memory_limit,
        memory_balloon,
        slow,
        collect_garbage,
    )
}
NOT_A_NUMBER = "not_a_number"
