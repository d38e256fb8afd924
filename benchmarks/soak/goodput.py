"""What a job's time was spent on, of all time from its first start to its end, gaps between
attempts included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ebbflow.core.events import NODE_STARTED, PHASE, STEP, Event, LedgerClass

# No rank was at work: dead or frozen until it was noticed, or not started again yet
_ABSENT = "absent"


def time_shares(events: Sequence[Event]) -> dict[str, float]:
    """Share of the rank-seconds from the first start to the last event, by what they were spent on;
    sums to 1. The share of useful steps, without their waiting for data, is the goodput.

    By ledger class as the ranks report them. Of steps that were done again, the last execution
    counts; the others, and steps that never completed, are redone_step. Time that no rank reports
    is `absent`. Empty without any step.
    """
    seconds: dict[str, float] = defaultdict(float)
    for executions in _executions(events).values():
        *redone, last = (
            spent for _, spent in sorted(executions, key=lambda execution: execution[0])
        )
        seconds[LedgerClass.REDONE_STEP] += sum(sum(spent.values()) for spent in redone)
        for name, value in last.items():
            seconds[name] += value
    for event in events:
        if event.name == PHASE:
            name = str(event.data["class"])
            # A phase has the time of a step that never completed
            incomplete = name == LedgerClass.USEFUL_STEP
            seconds[LedgerClass.REDONE_STEP if incomplete else name] += float(event.data["seconds"])
    ranks = {event.rank for event in events if event.name == STEP}
    began = min((event.t_mono for event in events if event.name == NODE_STARTED), default=0.0)
    ended = max((event.t_mono for event in events), default=0.0)
    total = (ended - began) * len(ranks)
    if total <= 0:
        return {}
    seconds[_ABSENT] = total - sum(seconds.values())
    return {str(name): value / total for name, value in seconds.items()}


def _executions(
    events: Sequence[Event],
) -> dict[tuple[int, int], list[tuple[int, dict[str, float]]]]:
    """(generation, seconds by class) of each execution of a rank's step."""
    found: dict[tuple[int, int], list[tuple[int, dict[str, float]]]] = defaultdict(list)
    for event in events:
        if event.name == STEP and event.step is not None:
            found[event.rank, event.step].append((event.generation, event.data["seconds"]))
    return found


def shares_text(shares: dict[str, float]) -> str:
    """One line, the largest loss first; what is below a thousandth is left out."""
    lost = sorted(
        ((value, name) for name, value in shares.items() if name != LedgerClass.USEFUL_STEP),
        reverse=True,
    )
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.1%}" for value, name in lost if value >= 0.001
    )
