"""Where the next attempt of a job runs on AWS Batch: asked before each attempt, with fresh prices and what came before.

`place` answers with a `Placement`; `history_of` reads from a job's events what its earlier attempts met.
"""

from __future__ import annotations

from ebbflow.cost.capacity.place import place
from ebbflow.cost.capacity.placement import History, PastAttempt, Placement, as_placed, attempt_record, history_of

__all__ = ["History", "PastAttempt", "Placement", "as_placed", "attempt_record", "history_of", "place"]
