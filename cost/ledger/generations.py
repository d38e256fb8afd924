"""The generations of a job as its events tell them: how each ended, and which of its steps are in the final weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import (
    COMMIT,
    GENERATION_ENDED,
    GENERATION_STARTED,
    NODE_STARTED,
    OUTCOME,
    PHASE,
    RESTORE,
    STEP,
    EndReason,
    Event,
)
from ebbflow.infra.layout import parse_commit_key

# Ends that were meant: the job was done, or stopped itself. Anything else cut the generation short.
PLANNED_ENDS = frozenset({Outcome.COMPLETED, Outcome.BUDGET, Outcome.DEADLINE, Outcome.NON_FINITE, Outcome.NO_CAPACITY})
# What a run is refused with before it does anything: the job is then as it was.
_REFUSED = frozenset({Outcome.PREFLIGHT, Outcome.CONFIG})


@dataclass(frozen=True, kw_only=True)
class RecordedGeneration:
    """One start of the gang.

    reason: how it ended, None while nothing says so. kept: the steps (after, up to) that are part of the final
    weights; the rest of its steps was thrown away. started_wall, ended_wall: Unix time.
    """

    number: int
    parent_step: int
    started_wall: float
    ended_wall: float
    reason: str | None
    culprit: str
    user_code: bool
    planned: bool
    running: bool
    kept: tuple[float, float] = (0.0, 0.0)

    @property
    def unplanned(self) -> bool:
        return not self.planned and not self.running

    def keeps(self, step: int) -> bool:
        return self.kept[0] < step <= self.kept[1]


def read_generations(events: Sequence[Event], *, running: bool = False) -> dict[int, RecordedGeneration]:
    """All generations by number, oldest first.

    running: the job is still going on, so that a newest generation without an end is no interruption and its steps
    after the last commit are not lost yet.
    """
    by_number: dict[int, list[Event]] = {}
    for event in events:
        if proves_generation(event):
            by_number.setdefault(event.generation, []).append(event)
    numbers = sorted(by_number)
    kept = _kept_steps(by_number, running)
    return {
        number: _generation(number, by_number[number], running and number == numbers[-1], kept.get(number, (0.0, 0.0)))
        for number in numbers
    }


def find_final_outcome(events: Sequence[Event]) -> Event | None:
    """The last `outcome` event that concerns the newest generation: its own, or one that the flow wrote after it.

    A completed job stays completed if preflight refuses a later run of it (`find_later_refusal`).
    """
    concerning = _concerning(events)
    acted = [event for event in concerning if event.data.get("outcome") not in _REFUSED]
    stays = bool(acted) and acted[-1].data.get("outcome") == Outcome.COMPLETED
    return acted[-1] if stays else (concerning or [None])[-1]


def find_later_refusal(events: Sequence[Event]) -> Event | None:
    """The last `outcome` event, where a completed job's later run was refused by its checks; None: it was not."""
    last = (_concerning(events) or [None])[-1]
    return last if last is not find_final_outcome(events) else None


def _concerning(events: Sequence[Event]) -> list[Event]:
    started = [event for event in events if event.name == GENERATION_STARTED]
    newest = max((event.generation for event in started), default=None)
    since = max((event.t_wall for event in started if event.generation == newest), default=-math.inf)

    def concerns(event: Event) -> bool:
        return newest is None or event.generation == newest or (event.rank < 0 and event.t_wall >= since)

    return [event for event in events if event.name == OUTCOME and concerns(event)]


def _generation(number: int, events: list[Event], running: bool, kept: tuple[float, float]) -> RecordedGeneration:
    ended = _last(events, GENERATION_ENDED)
    outcome = _last(events, OUTCOME)
    data: dict[str, Any] = {} if ended is None else ended.data
    reason = data.get("reason")
    if ended is None and outcome is not None and outcome.data.get("outcome") in PLANNED_ENDS:
        reason = outcome.data["outcome"]  # the gang was done; only its agent did not live to say so
    return RecordedGeneration(
        number=number,
        parent_step=_parent_step(events),
        started_wall=min(event.t_wall for event in events),
        ended_wall=max(event.t_wall for event in events),
        reason=reason,
        culprit=str(data.get("culprit") or ""),
        # Only what a rank or an agent raised can be the program's fault; a superseded gang, for one, came too late.
        user_code=reason in (EndReason.RANK_FAILED, EndReason.AGENT_FAILED) and bool(data.get("user_code")),
        planned=reason in PLANNED_ENDS,
        running=running and reason is None,
        kept=kept,
    )


def _kept_steps(by_number: dict[int, list[Event]], running: bool) -> dict[int, tuple[float, float]]:
    """Walk from the newest generation to its parent commit's generation, and so on: what lies on the way is kept."""
    kept: dict[int, tuple[float, float]] = {}
    if not by_number:
        return kept
    number: int | None = max(by_number)
    high = _newest_kept(by_number[number], running)
    while number is not None:
        low = _parent_step(by_number[number])
        kept[number] = (float(low), high)
        high = float(low)
        number = _parent_generation(by_number, number) if low > 0 else None
    return kept


def _newest_kept(events: list[Event], running: bool) -> float:
    """The newest generation's last kept step: its last commit, unless it completed or is still going on."""
    outcome = _last(events, OUTCOME)
    ended = _last(events, GENERATION_ENDED)
    completed = outcome is not None and outcome.data.get("outcome") == Outcome.COMPLETED
    completed = completed or (ended is not None and ended.data.get("reason") == Outcome.COMPLETED)
    if completed or running:
        return math.inf
    commits = [event.step for event in events if event.name == COMMIT and event.step is not None]
    return float(max(commits, default=_parent_step(events)))


def _parent_step(events: list[Event]) -> int:
    """Where the generation went on from: what it restored, which is older than planned when a commit was corrupt."""
    restored = _last(events, RESTORE)
    if restored is not None and restored.step is not None:
        return restored.step
    started = _last(events, GENERATION_STARTED)
    if started is not None:
        return int(started.data.get("parent_step") or 0)
    steps = [event.step for event in events if event.name == STEP and event.step is not None]
    return min(steps, default=1) - 1  # its start was not recorded: it began before its first step


def _parent_generation(by_number: dict[int, list[Event]], number: int) -> int | None:
    """The generation that wrote the parent commit: from its key, else the newest earlier one that got that far."""
    events = by_number[number]
    told = _last(events, RESTORE) or _last(events, GENERATION_STARTED)
    key = None if told is None else told.data.get("key" if told.name == RESTORE else "parent")
    older = [other for other in by_number if other < number]
    if key:
        try:
            _, parent, _ = parse_commit_key(key)
        except ValueError:
            parent = None
        if parent in older:
            return parent
    step = _parent_step(by_number[number])
    reached = [other for other in older if any(e.name == STEP and e.step == step for e in by_number[other])]
    return max(reached, default=None)


def _last(events: list[Event], name: str) -> Event | None:
    return next((event for event in reversed(events) if event.name == name), None)


def proves_generation(event: Event) -> bool:
    """Whether the event alone shows that its generation existed: an agent's heartbeats and end do not."""
    return event.rank >= 0 or event.name in (GENERATION_STARTED, GENERATION_ENDED, NODE_STARTED)


def accounts_for_time(event: Event) -> bool:
    """Whether the event accounts for a rank's time."""
    return event.rank >= 0 and event.name in (PHASE, STEP)
