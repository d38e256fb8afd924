"""How far a job has come that a plan is to go on with: its plan prices only what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost.ledger.generations import read_generations
from cost.ledger.ledger import spent_usd
from infra.events import PLAN, STEP, Event


@dataclass(frozen=True, kw_only=True)
class Progress:
    """done_steps: that a next start goes on from. spent_usd: so far. started_utc: Unix time of the first plan that led
    to a start, from which the deadline counts; None: the job begins now.
    """

    done_steps: int = 0
    spent_usd: float = 0.0
    started_utc: float | None = None


FROM_THE_START = Progress()


def progress_of(events: Sequence[Event]) -> Progress:
    """From a job's events, in any order. Raises LedgerError where no account can be made of them."""
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    generations = read_generations(ordered)
    if not generations:
        return FROM_THE_START
    kept = generations[max(generations)].kept[1]
    taken = max((event.step for event in ordered if event.name == STEP and event.step is not None), default=0)
    started = min(generation.started_wall for generation in generations.values())
    plans = [event.t_wall for event in ordered if event.name == PLAN and event.data.get("chosen")]
    before = [at for at in plans if at <= started]
    return Progress(
        done_steps=int(min(kept, taken)),
        spent_usd=spent_usd(ordered),
        started_utc=max(before) if before else started,
    )
