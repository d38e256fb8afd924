"""Faults that a rank commits itself: those of `--rehearse`, and some that only the chaos benchmarks
inject.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ebbflow.training import rehearse

_MIB = 2**20
_BALLOON_MIB = 16
NOT_A_NUMBER = "not_a_number"


def long_regex() -> None:
    """Match a regular expression that takes exponential time and holds the GIL."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def memory_limit(mebibytes: int) -> None:
    """Allocate more than the `mebibytes` that the process may still allocate then, which raises
    MemoryError.
    """
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + mebibytes * _MIB, hard))
    memory_balloon()


def kill_node(pid: int) -> None:
    """Kill this node's agent, which takes all ranks of the node along."""
    os.kill(pid, signal.SIGKILL)
    time.sleep(60.0)  # nothing of this step may happen after it


def memory_balloon() -> None:
    """Allocate memory and write to it until the kernel or a limit refuses."""
    held = []
    while True:
        held.append(bytearray(_BALLOON_MIB * _MIB))
        time.sleep(0.002)


# Functions that are called before the batch of a step is read. The workload carries out
# `not_a_number`.
HOOKS: dict[str, Callable[..., None]] = {
    hook.__name__: hook
    for hook in (
        rehearse.busy_loop,
        rehearse.gil_held,
        long_regex,
        rehearse.asleep,
        rehearse.loader_stuck,
        rehearse.raise_error,
        rehearse.extra_collective,
        rehearse.uneven_steps,
        memory_limit,
        kill_node,
        memory_balloon,
        rehearse.slow,
    )
}
