"""Faults that `--rehearse` injects into a run.

    --rehearse KIND@WHEN[:node=N|:rank=N][:seconds=S]     node-loss@60%, sleep@step:120:rank=1, notice@50%:node=0

A fault fires after its step was computed and before that step is saved, so the step is lost and repeated. (After a
notice nothing is lost, because the job saves first.) A fault fires once per job: its event in the store prevents a
second time after a resume.

Faults inside a rank are functions of this module. Their names appear when the culprit is reported. A function that
hangs never returns: its rank is killed, or dies with its agent.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ebbflow.infra.errors import InfraError, Outcome
from ebbflow.infra.notices import rehearse_notice

_MIB = 2**20
_BALLOON_MIB = 16


def busy_loop() -> None:
    while True:
        pass


def gil_held() -> None:
    """Hang in a C function that holds the GIL, so that no Python thread of this process can run."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.sleep(600)


def long_regex() -> None:
    """Match a regular expression that takes exponential time and holds the GIL."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def asleep() -> None:
    while True:
        time.sleep(600.0)


def loader_stuck() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as loader:
        assert loader.stdout is not None
        loader.stdout.read()


def raise_error(text: str) -> None:
    raise RuntimeError(text)


def extra_collective() -> None:
    """Call a collective that the other ranks never call, as `if rank == 0: all_reduce(…)` does."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(3))


def uneven_steps() -> None:
    """Wait in a barrier, as at the end of an epoch, while the other ranks still have steps to take."""
    import torch.distributed as dist

    dist.barrier()


def memory_limit(mebibytes: int) -> None:
    """Allocate more memory than the process may have, which raises MemoryError.

    Args:
        mebibytes: the memory that the process may still allocate before it reaches its limit.
    """
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + mebibytes * _MIB, hard))
    memory_balloon()


def memory_balloon() -> None:
    """Allocate memory and write to it until the kernel or a limit refuses."""
    held = []
    while True:
        held.append(bytearray(_BALLOON_MIB * _MIB))
        time.sleep(0.002)


def slow(seconds: float) -> None:
    """Sleep for `seconds`, to make one step slow without any error."""
    time.sleep(seconds)


def collect_garbage(objects: int) -> None:
    """Create `objects` reference cycles and collect them, which pauses the interpreter for a second or two."""
    cycles: list[list] = []
    for _ in range(objects):
        cycle: list = []
        cycle.append(cycle)
        cycles.append(cycle)
    cycles.clear()
    gc.collect()


# Functions that are called before the batch of a step is read. The workload carries out `not_a_number`.
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


NOTICE = "notice"
NON_FINITE = "non-finite"
_NODE_LOSS = "node-loss"
_SLOW_STEP = "slow-step"
_SECONDS = {NOTICE: 120.0, _SLOW_STEP: 5.0}  # defaults
KINDS = {
    _NODE_LOSS: "SIGKILL to a node's agent and all its ranks",
    "rank-kill": "SIGKILL to one rank",
    NOTICE: f"a spot notice to a node, which is killed after :seconds=S, {_SECONDS[NOTICE]:g} unless told",
    "exception": "RuntimeError on one rank",
    "sleep": "time.sleep on one rank, for ever",
    "busy-loop": "one rank computes for ever",
    "gil-held": "a C call on one rank that keeps the interpreter's lock",
    "loader-stuck": "one rank waits for a loader process that gives nothing",
    "extra-collective": "a collective that one rank alone calls",
    "uneven-steps": "one rank waits at the epoch's end, the others go on",
    NON_FINITE: "the loss of one rank in the step after it is not a number",
    _SLOW_STEP: f"one step of one rank takes :seconds=S longer, {_SECONDS[_SLOW_STEP]:g} unless told",
}
_OF_NODES = (_NODE_LOSS, NOTICE)
_OF_GANGS = ("extra-collective", "uneven-steps")
# The function of this module for each kind.
_HOOKS = {
    "exception": "raise_error",
    "sleep": "asleep",
    "busy-loop": "busy_loop",
    "gil-held": "gil_held",
    "loader-stuck": "loader_stuck",
    "extra-collective": "extra_collective",
    "uneven-steps": "uneven_steps",
    _SLOW_STEP: "slow",
}
_PATTERN = re.compile(
    r"(?P<kind>[a-z-]+)@(?:(?P<percent>\d+(?:\.\d+)?)%|step:(?P<step>\d+))"
    r"(?::(?P<target>node|rank)=(?P<number>\d+))?(?::seconds=(?P<seconds>\d+(?:\.\d+)?))?"
)


class RehearsalError(InfraError):
    """A `--rehearse` value that is malformed or whose fault could never fire."""

    outcome = Outcome.CONFIG


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault to inject."""

    kind: str  # a key of `KINDS`
    fraction: float | None = None  # the share of `max_steps` (0 to 1) after which it fires; None if `step` is given
    step: int | None = None  # the step after which it fires; None if `fraction` is given
    node: int | None = None  # the number of the target node; None for the last node, or if `rank` is given
    rank: int | None = None  # the number of the target rank; None for the last rank, or if `node` is given
    seconds: float | None = None  # for a notice, the time until the node is killed; for a slow step, the delay

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse KIND@WHEN[:node=N|:rank=N][:seconds=S].

        Raises:
            RehearsalError: if the text is malformed; the message has a valid example.
        """
        match = _PATTERN.fullmatch(text)
        if match is None or match["kind"] not in KINDS:
            kinds = "\n".join(f"    {kind:16} {meaning}" for kind, meaning in KINDS.items())
            raise RehearsalError(
                f"--rehearse {text}: not KIND@WHEN[:node=N|:rank=N][:seconds=S]\n"
                f"  hint: WHEN is 60% or step:120; for example --rehearse node-loss@60%; kinds are\n{kinds}"
            )
        fraction = float(match["percent"]) / 100 if match["percent"] else None
        if fraction is not None and not 0 < fraction < 1:
            raise RehearsalError(f"--rehearse {text}: {match['percent']}% is not between 0% and 100%")
        kind = match["kind"]
        if kind in _OF_NODES and match["target"] == "rank":
            raise RehearsalError(f"--rehearse {text}: {kind} takes :node=N, not :rank=N")
        if kind not in _SECONDS and match["seconds"]:
            raise RehearsalError(f"--rehearse {text}: {kind} strikes at once and takes no :seconds=S")
        more: dict = {match["target"]: int(match["number"])} if match["target"] else {}
        if kind in _SECONDS:
            more["seconds"] = float(match["seconds"] or _SECONDS[kind])
        return cls(kind=kind, fraction=fraction, step=int(match["step"]) if match["step"] else None, **more)

    def check(self, *, max_steps: int, nodes: int, world_size: int) -> None:
        """Raise RehearsalError if the fault could never fire in this job."""
        step = self.due_step(max_steps)
        if not 0 < step < max_steps:
            raise RehearsalError(
                f"--rehearse: step {step} is not between 1 and training.max_steps - 1 = {max_steps - 1}"
            )
        if self.node is not None and self.node >= nodes:
            raise RehearsalError(f"--rehearse: there is no node {self.node}; the job has nodes 0 to {nodes - 1}")
        if self.rank is not None and self.rank >= world_size:
            raise RehearsalError(f"--rehearse: there is no rank {self.rank}; the job has ranks 0 to {world_size - 1}")
        if self.kind in _OF_GANGS and world_size < 2:
            raise RehearsalError(f"--rehearse: {self.kind} needs two ranks; the job has one")

    def due_step(self, max_steps: int) -> int:
        return self.step if self.step is not None else math.ceil((self.fraction or 0.0) * max_steps)

    def due(self, step: int, max_steps: int) -> bool:
        return step == self.due_step(max_steps)

    def targets(self, *, node: int, rank: int, nodes: int, world_size: int) -> bool:
        """Return whether this rank fires the fault. The first rank of a node fires a fault of its node."""
        if self.rank is not None:
            return rank == self.rank
        wanted_node = nodes - 1 if self.node is None else self.node
        first_rank_of_node = wanted_node * (world_size // nodes)
        if self.kind not in _OF_NODES and self.node is None:
            return rank == world_size - 1
        return node == wanted_node and rank == first_rank_of_node

    def strike(self, agent_pid: int | None, notice_path: str | None = None) -> None:
        """Fire the fault.

        This returns only after a notice, a slow step or a non-finite loss. The caller injects the non-finite loss
        itself.

        Args:
            agent_pid: the process id of this node's agent, which a node loss kills. All processes of the node die with
                it.
            notice_path: the file in which the agent looks for a notice. Without it, a notice is a SIGTERM to this
                process.
        """
        if self.kind == NOTICE:
            if notice_path is None:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                rehearse_notice(Path(notice_path), action="terminate", seconds=self.seconds or _SECONDS[NOTICE])
            return
        if self.kind == NON_FINITE:
            return
        if self.kind in _HOOKS:
            HOOKS[_HOOKS[self.kind]](**self._settings)
            return
        if self.kind == _NODE_LOSS and agent_pid is not None:
            os.kill(agent_pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    @property
    def _settings(self) -> dict:
        if self.kind == _SLOW_STEP:
            return {"seconds": self.seconds}
        return {"text": f"rehearsed: {self}"} if self.kind == "exception" else {}

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> Fault:
        return cls(**data)

    def __str__(self) -> str:
        when = f"step:{self.step}" if self.step is not None else f"{100 * (self.fraction or 0):g}%"
        target = (
            f":node={self.node}" if self.node is not None else f":rank={self.rank}" if self.rank is not None else ""
        )
        seconds = "" if self.seconds is None else f":seconds={self.seconds:g}"
        return f"{self.kind}@{when}{target}{seconds}"
