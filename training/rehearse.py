"""Faults that users aim at their own job, to see it survive before paying for it.

    --rehearse KIND@WHEN[:node=N|:rank=N][:seconds=S]     node-loss@60%, rank-kill@step:120:rank=1, notice@50%:node=0

A fault strikes after its step was computed and before that step is saved, so that work really is lost; with a notice,
so that nothing is. It fires once per job: the event it leaves behind keeps it from firing again on resume.
"""

from __future__ import annotations

import math
import os
import re
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.errors import InfraError
from infra.notices import rehearse_notice
from infra.outcome import Outcome

NOTICE = "notice"
KINDS = {
    "node-loss": "SIGKILL to a node's agent and all its ranks",
    "rank-kill": "SIGKILL to one rank",
    NOTICE: "a spot notice to a node, which is killed after :seconds=S, 120 unless told",
}
_SPOT_NOTICE_SECONDS = 120.0
_PATTERN = re.compile(
    r"(?P<kind>[a-z-]+)@(?:(?P<percent>\d+(?:\.\d+)?)%|step:(?P<step>\d+))"
    r"(?::(?P<target>node|rank)=(?P<number>\d+))?(?::seconds=(?P<seconds>\d+(?:\.\d+)?))?"
)


class RehearsalError(InfraError):
    """A `--rehearse` that cannot be understood or can never fire."""

    outcome = Outcome.CONFIG


@dataclass(frozen=True, kw_only=True)
class Fault:
    """fraction: of max_steps (0 to 1), or None when `step` is given. node, rank: the target, or None: the last one.

    seconds: of a notice, until its machine is gone.
    """

    kind: str
    fraction: float | None = None
    step: int | None = None
    node: int | None = None
    rank: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read KIND@WHEN[:node=N|:rank=N][:seconds=S]. Raises RehearsalError that shows what would be right."""
        match = _PATTERN.fullmatch(text)
        if match is None or match["kind"] not in KINDS:
            kinds = ", ".join(f"{kind} ({meaning})" for kind, meaning in KINDS.items())
            raise RehearsalError(
                f"--rehearse {text}: not KIND@WHEN[:node=N|:rank=N][:seconds=S]\n"
                f"  hint: kinds are {kinds}; WHEN is 60% or step:120; for example --rehearse node-loss@60%"
            )
        fraction = float(match["percent"]) / 100 if match["percent"] else None
        if fraction is not None and not 0 < fraction < 1:
            raise RehearsalError(f"--rehearse {text}: {match['percent']}% is not between 0% and 100%")
        kind = match["kind"]
        if kind != "rank-kill" and match["target"] == "rank":
            raise RehearsalError(f"--rehearse {text}: {kind} takes :node=N, not :rank=N")
        if kind != NOTICE and match["seconds"]:
            raise RehearsalError(f"--rehearse {text}: {kind} strikes at once and takes no :seconds=S")
        more: dict = {match["target"]: int(match["number"])} if match["target"] else {}
        if kind == NOTICE:
            more["seconds"] = float(match["seconds"] or _SPOT_NOTICE_SECONDS)
        return cls(kind=kind, fraction=fraction, step=int(match["step"]) if match["step"] else None, **more)

    def check(self, *, max_steps: int, nodes: int, world_size: int) -> None:
        """Refuse a fault that could never fire in this job. Raises RehearsalError."""
        step = self.due_step(max_steps)
        if not 0 < step < max_steps:
            raise RehearsalError(
                f"--rehearse: step {step} is not between 1 and training.max_steps - 1 = {max_steps - 1}"
            )
        if self.node is not None and self.node >= nodes:
            raise RehearsalError(f"--rehearse: there is no node {self.node}; the job has nodes 0 to {nodes - 1}")
        if self.rank is not None and self.rank >= world_size:
            raise RehearsalError(f"--rehearse: there is no rank {self.rank}; the job has ranks 0 to {world_size - 1}")

    def due_step(self, max_steps: int) -> int:
        return self.step if self.step is not None else math.ceil((self.fraction or 0.0) * max_steps)

    def due(self, step: int, max_steps: int) -> bool:
        return step == self.due_step(max_steps)

    def targets(self, *, node: int, rank: int, nodes: int, world_size: int) -> bool:
        """Whether this rank is to strike. A node is struck by its first rank only."""
        if self.rank is not None:
            return rank == self.rank
        wanted_node = nodes - 1 if self.node is None else self.node
        first_rank_of_node = wanted_node * (world_size // nodes)
        if self.kind == "rank-kill" and self.node is None:
            return rank == world_size - 1
        return node == wanted_node and rank == first_rank_of_node

    def strike(self, agent_pid: int | None, notice_path: str | None = None) -> None:
        """Returns after a notice alone. Killing the agent takes every process of its node along (they die with their
        parent); a notice is left at `notice_path` for the agent, and without one comes as SIGTERM."""
        if self.kind == NOTICE:
            if notice_path is None:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                rehearse_notice(Path(notice_path), action="terminate", seconds=self.seconds or _SPOT_NOTICE_SECONDS)
            return
        if self.kind == "node-loss" and agent_pid is not None:
            os.kill(agent_pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

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
