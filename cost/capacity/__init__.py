"""Where the next attempt of a job runs on AWS Batch: asked before each attempt, with fresh prices and what came before.

`place` answers with a `Placement`; `history_of` reads from a job's events what its earlier attempts met.
"""

from __future__ import annotations

from ebbflow.cost.capacity.decision import choose_placement
from ebbflow.cost.capacity.placement import (
    AttemptHistory,
    PastAttempt,
    Placement,
    batch_attempt_data,
    read_attempts,
    with_placement,
)

__all__ = [
    "AttemptHistory",
    "PastAttempt",
    "Placement",
    "batch_attempt_data",
    "choose_placement",
    "read_attempts",
    "with_placement",
]
