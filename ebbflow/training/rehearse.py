"""Faults that `--rehearse` injects into a run.

    --rehearse KIND@WHEN[:node=N|:rank=N][:seconds=S]     node-loss@60%, sleep@step:120:rank=1, notice@50%:node=0

A fault fires once per job, after its step was computed and before that step is saved, so the step
is lost and repeated. (After a notice nothing is lost, because the job saves first.)

Each fault inside a rank is a function of its own, because the function's name appears in the report
about the culprit. A function that hangs never returns: its rank is killed, or dies with its agent.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ebbflow.core.errors import InfraError, Outcome
from ebbflow.infra.notices import rehearse_notice

NOTICE = "notice"
NON_FINITE = "non-finite"
_NODE_LOSS = "node-loss"
_SLOW_STEP = "slow-step"
_SECONDS = {NOTICE: 120.0, _SLOW_STEP: 5.0}  # defaults
KINDS = {
    _NODE_LOSS: "SIGKILL to a node's agent and all its ranks",
    "rank-kill": "SIGKILL to one rank",
    NOTICE: (
        f"a spot notice to a node, which is killed after :seconds=S, {_SECONDS[NOTICE]:g} by "
        "default"
    ),
    "exception": "RuntimeError on one rank",
    "sleep": "time.sleep on one rank, forever",
    "busy-loop": "one rank computes forever",
    "gil-held": "a C call on one rank that keeps the interpreter's lock",
    "loader-stuck": "one rank waits for a loader process that returns nothing",
    "extra-collective": "a collective that one rank alone calls",
    "uneven-steps": "one rank waits at the epoch's end while the others continue",
    NON_FINITE: "a non-finite loss on one rank in the next step",
    _SLOW_STEP: f"one step of one rank takes :seconds=S longer, {_SECONDS[_SLOW_STEP]:g} by default",
}
_OF_NODES = (_NODE_LOSS, NOTICE)
_OF_GANGS = ("extra-collective", "uneven-steps")
_PATTERN = re.compile(
    r"(?P<kind>[a-z-]+)@(?:(?P<percent>\d+(?:\.\d+)?)%|step:(?P<step>\d+))"
    r"(?::(?P<target>node|rank)=(?P<number>\d+))?(?::seconds=(?P<seconds>\d+(?:\.\d+)?))?"
)


class RehearsalError(InfraError, outcome=Outcome.CONFIG):
    """Error for a `--rehearse` value that is malformed or whose fault could never fire."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: str  # a key of `KINDS`
    # The share of `max_steps` (0 to 1) after which it fires; None if `step` is given
    fraction: float | None = None
    step: int | None = None  # the step after which it fires; None if `fraction` is given
    # The number of the target node; None for the last node, or if `rank` is given
    node: int | None = None
    # The number of the target rank; None for the last rank, or if `node` is given
    rank: int | None = None
    # For a notice, the time until the node is killed; for a slow step, the delay
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse KIND@WHEN[:node=N|:rank=N][:seconds=S].

        Raises RehearsalError, whose message shows a valid example.
        """
        match = _PATTERN.fullmatch(text)
        if match is None or match["kind"] not in KINDS:
            kinds = "\n".join(f"    {kind:16} {meaning}" for kind, meaning in KINDS.items())
            raise RehearsalError(
                f"--rehearse {text}: not KIND@WHEN[:node=N|:rank=N][:seconds=S]\n  hint: WHEN is "
                f"60% or step:120; for example --rehearse node-loss@60%; kinds are\n{kinds}"
            )
        if match["percent"]:
            fraction = float(match["percent"]) / 100
        else:
            fraction = None
        if fraction is not None and not 0 < fraction < 1:
            raise RehearsalError(
                f"--rehearse {text}: {match['percent']}% is not between 0% and 100%"
            )
        kind = match["kind"]
        if kind in _OF_NODES and match["target"] == "rank":
            raise RehearsalError(f"--rehearse {text}: {kind} takes :node=N, not :rank=N")
        if kind not in _SECONDS and match["seconds"]:
            raise RehearsalError(
                f"--rehearse {text}: {kind} strikes at once and takes no :seconds=S"
            )
        if match["target"]:
            more: dict = {match["target"]: int(match["number"])}
        else:
            more = {}
        if kind in _SECONDS:
            more["seconds"] = float(match["seconds"] or _SECONDS[kind])
        return cls(
            kind=kind, fraction=fraction, step=int(match["step"]) if match["step"] else None, **more
        )

    def check(self, *, max_steps: int, nodes: int, world_size: int) -> None:
        step = self.due_step(max_steps)
        if not 0 < step < max_steps:
            limits = f"1 and training.max_steps - 1 = {max_steps - 1}"
            raise RehearsalError(f"--rehearse: step {step} is not between {limits}")
        if self.node is not None and self.node >= nodes:
            raise RehearsalError(
                f"--rehearse: there is no node {self.node}; the job has nodes 0 to {nodes - 1}"
            )
        if self.rank is not None and self.rank >= world_size:
            raise RehearsalError(
                f"--rehearse: there is no rank {self.rank}; the job has ranks 0 to {world_size - 1}"
            )
        if self.kind in _OF_GANGS and world_size < 2:
            raise RehearsalError(f"--rehearse: {self.kind} needs two ranks; the job has one")

    def due_step(self, max_steps: int) -> int:
        if self.step is not None:
            return self.step
        return math.ceil((self.fraction or 0.0) * max_steps)

    def targets(self, *, node: int, rank: int, nodes: int, world_size: int) -> bool:
        """Return whether this rank fires the fault.

        The node's first rank fires a fault of a node.
        """
        if self.rank is not None:
            return rank == self.rank
        if self.node is None:
            wanted_node = nodes - 1
        else:
            wanted_node = self.node
        first_rank_of_node = wanted_node * (world_size // nodes)
        if self.kind not in _OF_NODES and self.node is None:
            return rank == world_size - 1
        return node == wanted_node and rank == first_rank_of_node

    def strike(self, agent_pid: int | None, notice_path: str | None = None) -> None:
        """Fire the fault. A non-finite loss is left to the caller.

        This function returns after a notice or a slow step, or if the fault is left to the caller;
        other faults end or hang the rank. A node loss kills the agent `agent_pid`, and with it all
        processes of the node. A notice is written to `notice_path`; if that is None, this process
        gets SIGTERM instead.
        """
        if self.kind == NOTICE:
            if notice_path is None:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                rehearse_notice(
                    Path(notice_path), action="terminate", seconds=self.seconds or _SECONDS[NOTICE]
                )
            return
        if self.kind == NON_FINITE:
            return
        if self.kind in _HOOKS:
            if self.kind == "exception":
                text = {"text": f"rehearsed: {self}"}
            else:
                text = {}
            _HOOKS[self.kind](**({"seconds": self.seconds} if self.kind == _SLOW_STEP else text))
            return
        if self.kind == _NODE_LOSS and agent_pid is not None:
            os.kill(agent_pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def __str__(self) -> str:
        if self.step is not None:
            when = f"step:{self.step}"
        else:
            when = f"{100 * (self.fraction or 0):g}%"
        if self.node is None:
            target = ""
        else:
            target = f":node={self.node}"
        if self.rank is not None:
            target = f":rank={self.rank}"
        if self.seconds is None:
            seconds = ""
        else:
            seconds = f":seconds={self.seconds:g}"
        return f"{self.kind}@{when}{target}{seconds}"


def busy_loop() -> None:
    while True:
        pass


def gil_held() -> None:
    """Hang in a C function that holds the GIL, so that no Python thread of this process can run."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.sleep(600)


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


def slow(seconds: float) -> None:
    time.sleep(seconds)


_HOOKS: dict[str, Callable[..., None]] = {
    "exception": raise_error,
    "sleep": asleep,
    "busy-loop": busy_loop,
    "gil-held": gil_held,
    "loader-stuck": loader_stuck,
    "extra-collective": extra_collective,
    "uneven-steps": uneven_steps,
    _SLOW_STEP: slow,
}
