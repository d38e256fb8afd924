"""A policy as it was before the process that asked it died: shown again all that the job's decisions showed it.

Policies draw nothing and read no clock, so that the same states in the same order make the same policy. The states of
the decisions are recorded with the placements; between them, as long as an attempt ran, its pool is shown as running.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from cost.capacity.history import History, PastAttempt
from cost.capacity.situation import HOUR, running, state_from_json
from cost.policy.interface import Policy, State

# An attempt is shown at its decisions' distance, but no more often than this: a policy learns from spells, not ticks.
_MOST_SIGHTS = 50


def remember(policy: Policy, history: History, *, started_utc: float) -> None:
    """Show `policy` what the job's earlier decisions and attempts showed. started_utc: of the job's clock.

    Raises whatever the policy raises: one that cannot bear its own past cannot be asked.
    """
    for attempt in history.attempts:
        for state in _sights(attempt, started_utc):
            policy.decide(state)


def _sights(attempt: PastAttempt, started_utc: float) -> Iterator[State]:
    try:
        decided = state_from_json(attempt.placement.state or {})
    except (KeyError, TypeError, ValueError):
        return  # recorded by another version: less is remembered, and nothing wrong
    yield decided
    pool = attempt.placement.pool
    if attempt.started_utc is None or pool not in {view.id for view in decided.pools}:
        return
    first = max(decided.now_hours, (attempt.started_utc - started_utc) / HOUR)
    last = max(first, (attempt.ended_utc - started_utc) / HOUR)
    step = max(decided.tick_hours, (last - first) / _MOST_SIGHTS)
    for number in range(math.floor((last - first) / step) + 1):
        done = max(0.0, number * step - decided.changeover_hours)
        yield running(decided, pool, first + number * step, done)
