"""Choice of the queue and machines for each attempt of a job on AWS Batch, from current prices and
earlier attempts.

`choose_placement` returns a `Placement`; `read_attempts` reads from a job's events how earlier
attempts ended.
"""

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
