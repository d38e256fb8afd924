"""Read the generations of a job from its events: how each ended, and which of its steps are part of
the final weights.

A generation is one start of the gang, which is all ranks of the job. It continues from a parent
commit and ends when the ranks end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ebbflow.core.events as ev
from ebbflow.core.errors import Outcome
from ebbflow.core.event_payloads import (
    GenerationEndedPayload,
    GenerationStartedPayload,
    OutcomePayload,
    RestorePayload,
)
from ebbflow.core.events import EndReason, Event, find_last_event, select_events
from ebbflow.core.grouping import group_by_key
from ebbflow.core.layout import parse_commit_key

# The job was done or stopped itself. Any other end is an interruption.
PLANNED_ENDS = frozenset(
    {Outcome.COMPLETED, Outcome.BUDGET, Outcome.DEADLINE, Outcome.NON_FINITE, Outcome.NO_CAPACITY}
)
# Outcomes of runs that were refused before they changed the job.
_REFUSED = frozenset({Outcome.PREFLIGHT, Outcome.CONFIG})


@dataclass(frozen=True, kw_only=True)
class RecordedGeneration:
    """One start of the gang (all ranks of the job), as its events record it."""

    number: int
    parent_step: int  # step of the commit that the generation started from
    started_wall: float  # Unix time of its first event
    ended_wall: float  # Unix time of its last event
    reason: str | None  # why the generation ended; None if no event records it
    culprit: str  # rank or node that caused the end; empty if none was recorded
    user_code: bool  # whether an error in the user's program ended it
    planned: bool  # whether it ended as intended (completed, budget, deadline, …)
    running: bool  # whether it is still running
    # pair (after, last) of step numbers. The steps after the first number, up to and including the
    # second, are part of the final weights. All other steps of the generation were discarded.
    kept: tuple[float, float]

    @property
    def unplanned(self) -> bool:
        return not self.planned and not self.running

    def keeps(self, step: int) -> bool:
        """Return whether this generation's execution of the step is part of the final weights."""
        return self.kept[0] < step <= self.kept[1]


def read_generations(
    events: Sequence[Event], *, running: bool = False
) -> dict[int, RecordedGeneration]:
    """Return all generations by number, oldest first.

    Args:
        running: Whether the job is still running. If so, the newest generation does not count as
            interrupted if its end is not recorded, and its steps after the last commit do not count
            as discarded.
    """
    by_number = group_by_key(
        (event.generation, event) for event in events if proves_generation(event)
    )
    numbers = sorted(by_number)
    kept = _find_kept_steps(by_number, running)
    return {
        number: _generation(
            number,
            by_number[number],
            running and number == numbers[-1],
            kept.get(number, (0.0, 0.0)),
        )
        for number in numbers
    }


def find_final_outcome(events: Sequence[Event]) -> Event[OutcomePayload] | None:
    """Find the `outcome` event that decides the job's outcome, or return None if there is none.

    This is the last `outcome` event of the newest generation, or a later `outcome` event from a
    step of the flow. A completed job stays completed if preflight refuses a later run of it
    (`find_later_refusal`).
    """
    outcomes = _final_outcomes(events)
    acted = [event for event in outcomes if event.payload.outcome not in _REFUSED]
    if acted and acted[-1].payload.outcome is Outcome.COMPLETED:
        return acted[-1]
    if outcomes:
        return outcomes[-1]
    return None


def find_later_refusal(events: Sequence[Event]) -> Event[OutcomePayload] | None:
    """Return the `outcome` event of a run that preflight refused after the job had completed.

    Return None if the last run was not refused in this way.
    """
    last = (_final_outcomes(events) or [None])[-1]
    if last is not find_final_outcome(events):
        return last
    return None


def find_last(events: Sequence[Event], name: str) -> Event | None:
    return next((event for event in reversed(events) if event.name == name), None)


def proves_generation(event: Event) -> bool:
    """Return whether the event alone proves that its generation started.

    A node's heartbeats and its `node_ended` event are no proof.
    """
    return event.rank >= 0 or event.name in (
        ev.GENERATION_STARTED,
        ev.GENERATION_ENDED,
        ev.NODE_STARTED,
    )


def accounts_for_time(event: Event) -> bool:
    """Return whether the event records how a rank spent an interval of its time, as `phase` and
    `step` events do.
    """
    return event.rank >= 0 and event.name in (ev.PHASE, ev.STEP)


def _final_outcomes(events: Sequence[Event]) -> list[Event[OutcomePayload]]:
    """Return the newest generation's `outcome` events, and any later `outcome` events that steps of
    the flow wrote.
    """
    started = [event for event in events if event.name == ev.GENERATION_STARTED]
    newest = max((event.generation for event in started), default=None)
    since = max(
        (event.t_wall for event in started if event.generation == newest), default=-math.inf
    )
    return [
        event
        for event in select_events(events, OutcomePayload)
        if newest is None
        or event.generation == newest
        or (event.rank < 0 and event.t_wall >= since)
    ]


def _generation(
    number: int, events: list[Event], running: bool, kept: tuple[float, float]
) -> RecordedGeneration:
    last_end = find_last_event(events, GenerationEndedPayload)
    outcome = find_last_event(events, OutcomePayload)
    if last_end is None:
        ended = GenerationEndedPayload()
    else:
        ended = last_end.payload
    reason = ended.reason
    culprit = ended.culprit or ""
    # Other reasons are never the program's fault, such as a gang that a newer launcher superseded
    user_code = reason in (EndReason.RANK_FAILED, EndReason.AGENT_FAILED) and bool(ended.user_code)
    # A launcher's refusal is that of a later run. A rank's refusal ends its generation.
    ends_generation = outcome is not None and (
        outcome.payload.outcome not in _REFUSED or outcome.rank >= 0
    )
    if last_end is None and outcome is not None and ends_generation:
        # There is no agent, or it died before it recorded the end
        reason = outcome.payload.outcome
        user_code = reason is Outcome.FAILED or reason in _REFUSED
        if user_code:
            culprit = outcome.payload.message or ""
    return RecordedGeneration(
        number=number,
        parent_step=_find_parent_step(events),
        started_wall=min(event.t_wall for event in events),
        ended_wall=max(event.t_wall for event in events),
        reason=reason,
        culprit=culprit,
        user_code=user_code,
        planned=reason in PLANNED_ENDS,
        running=running and reason is None,
        kept=kept,
    )


def _find_kept_steps(
    by_number: dict[int, list[Event]], running: bool
) -> dict[int, tuple[float, float]]:
    """Find the steps of each generation that are part of the final weights.

    Return a pair (after, last) by generation number, as in `RecordedGeneration.kept`. These steps
    belong to the newest generation, to the generation that wrote its parent commit, and so on back
    to the job's first start. The steps of all other generations were discarded.
    """
    kept: dict[int, tuple[float, float]] = {}
    if not by_number:
        return kept
    number: int | None = max(by_number)
    high = _find_last_kept_step(by_number[number], running)
    while number is not None:
        low = float(_find_parent_step(by_number[number]))
        kept[number] = (low, high)
        high = low
        number = _find_parent_generation(by_number, number)
    return kept


def _find_last_kept_step(events: list[Event], running: bool) -> float:
    """Return the last step of the newest generation that is part of the final weights.

    This is the step of the generation's last commit; infinity if the generation completed or is
    running.
    """
    outcome = find_last_event(events, OutcomePayload)
    ended = find_last_event(events, GenerationEndedPayload)
    job_completed = outcome is not None and outcome.payload.outcome is Outcome.COMPLETED
    generation_completed = ended is not None and ended.payload.reason == Outcome.COMPLETED
    if job_completed or generation_completed or running:
        return math.inf
    commits = [event.step for event in events if event.name == ev.COMMIT and event.step is not None]
    return float(max(commits, default=_find_parent_step(events)))


def _find_parent_step(events: list[Event]) -> int:
    """Return the step of the commit from which the generation started.

    If newer commits were corrupt, this step is older than planned.
    """
    restored = find_last_event(events, RestorePayload)
    if restored is not None and restored.step is not None:
        return restored.step
    started = find_last_event(events, GenerationStartedPayload)
    if started is not None:
        return started.payload.parent_step or 0
    steps = [event.step for event in events if event.name == ev.STEP and event.step is not None]
    # No start was recorded: assume that it began before its first step
    return min(steps, default=1) - 1


def _find_parent_generation(by_number: dict[int, list[Event]], number: int) -> int | None:
    """Find the generation that wrote the parent commit of the generation `number`.

    Return its number, or None if it is unknown or there is no such commit. The commit's key
    contains the number. If no key is recorded, use the newest earlier generation that executed the
    commit's step.
    """
    events = by_number[number]
    restored = find_last_event(events, RestorePayload)
    started = find_last_event(events, GenerationStartedPayload)
    if restored is not None:
        key = restored.payload.key
    elif started is not None:
        key = started.payload.parent
    else:
        key = None
    older = [other for other in by_number if other < number]
    if key:
        try:
            _, parent, _ = parse_commit_key(key)
        except ValueError:
            parent = None
        if parent in older:
            return parent
    step = _find_parent_step(events)
    reached = [
        other
        for other in older
        if any(e.name == ev.STEP and e.step == step for e in by_number[other])
    ]
    return max(reached, default=None)
