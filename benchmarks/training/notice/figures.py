"""What the event log of a job says of its notices: read after the job, with the clock of this one
machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ebbflow.core.events import COMMIT, GENERATION_STARTED, NOTICE, STEP, Event


def steps_taken(events: Sequence[Event]) -> list[int]:
    """Every step that rank 0 took, those that were taken twice twice."""
    return [
        event.step
        for event in events
        if event.name == STEP and event.rank == 0 and event.step is not None
    ]


def steps_redone(events: Sequence[Event]) -> int:
    taken = steps_taken(events)
    return len(taken) - len(set(taken))


def notice_figures(
    events: Sequence[Event], given: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One row for each notice: {source, node, at_step, heard_seconds, durable_seconds, left_step,
    lost_steps}.

    given: {generation, source, node, at_step, given_at, outcome_step} of each. heard_seconds: until
    an agent had it. durable_seconds: from the notice to the commit of the step that the ranks left
    at; None: there is none. lost_steps: taken after the last commit, or since the start.
    """
    rows = []
    for one in given:
        own = [event for event in events if event.generation == one["generation"]]
        heard = [
            event.t_mono
            for event in own
            if event.name == NOTICE and event.data.get("source") == one["source"]
        ]
        taken = steps_taken(own)
        left = max(taken, default=None)
        durable = [event for event in own if event.name == COMMIT and event.step == left]
        kept = max(
            [
                min(taken, default=1) - 1,
                *(event.step for event in own if event.name == COMMIT and event.step),
            ]
        )
        rows.append(
            {
                "source": one["source"],
                "node": one["node"],
                "at_step": one["at_step"],
                "heard_seconds": min(heard) - one["given_at"] if heard else None,
                "durable_seconds": durable[0].t_mono - one["given_at"] if durable else None,
                "left_step": left,
                "lost_steps": None if left is None else left - kept,
            }
        )
    return rows


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """count, median, p95 and the worst."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0, "median": None, "p95": None, "worst": None}
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return {
        "count": len(ordered),
        "median": statistics.median(ordered),
        "p95": p95,
        "worst": ordered[-1],
    }


def generation_of_attempt(events: Sequence[Event], attempt: int) -> int | None:
    """The last generation that an attempt opened."""
    own = [
        event.generation
        for event in events
        if event.attempt == attempt and event.name == GENERATION_STARTED
    ]
    return max(own, default=None)
