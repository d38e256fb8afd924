"""Where a job is, and how its loop ended."""

from __future__ import annotations

from dataclasses import dataclass

from ebbflow.infra.errors import Outcome


@dataclass(frozen=True)
class Position:
    """Where the job is: steps taken, and the global index of the first sample that no step has seen."""

    step: int = 0
    cursor: int = 0

    def next(self, samples: int) -> Position:
        return Position(self.step + 1, self.cursor + samples)


@dataclass(frozen=True)
class Ending:
    """How the loop ended, the same on all ranks. step: the last one taken. weights_sha256: None when not computed."""

    outcome: Outcome
    step: int
    message: str = ""
    weights_sha256: str | None = None
