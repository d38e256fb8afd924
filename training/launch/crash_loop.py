"""When going on is only burning money: the same trouble again and again, with no new commit in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ebbflow.infra.events import GENERATION_ENDED, NODE_ENDED, NODE_STARTED, Event

SAME_LIMIT = 3
ANY_LIMIT = 10  # failures of whatever kind: a job that never gets as far as a commit does not get anywhere


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A generation that failed. rank_seconds: paid for it."""

    generation: int
    fingerprint: str
    rank_seconds: float


def failures_on_record(events: Iterable[Event]) -> list[Failed]:
    """Of all attempts of the job, oldest first."""
    ended: dict[int, str] = {}
    seconds: dict[int, float] = {}
    ranks: dict[tuple[str, int, int, int], int] = {}
    for event in events:
        node = event.run, event.attempt, event.generation, event.node
        if event.name == NODE_STARTED:
            ranks[node] = len(event.data.get("ranks") or [])
        elif event.name == NODE_ENDED:
            paid = float(event.data.get("seconds") or 0.0) * ranks.get(node, 0)
            seconds[event.generation] = seconds.get(event.generation, 0.0) + paid
        elif event.name == GENERATION_ENDED and event.data.get("fingerprint"):
            ended[event.generation] = event.data["fingerprint"]
    return [
        Failed(generation=number, fingerprint=ended[number], rank_seconds=seconds.get(number, 0.0))
        for number in sorted(ended)
    ]


def crash_loop(failures: Sequence[Failed], newest_commit_generation: int) -> list[Failed]:
    """The failures that make a loop, the last one being the newest; none when another generation may do better.

    newest_commit_generation: which generation wrote the newest commit, 0 without one. What failed before that
    generation is forgiven: the job has come further since.
    """
    since = [failure for failure in failures if failure.generation >= newest_commit_generation]
    if not since:
        return []
    same = [failure for failure in since if failure.fingerprint == since[-1].fingerprint]
    if len(same) >= SAME_LIMIT:
        return same
    return since if len(since) >= ANY_LIMIT else []


def describe(loop: Sequence[Failed], culprit: str, *, usd_per_rank_second: float | None) -> str:
    """The message of the outcome: which trouble, how often, and what it has cost."""
    seconds = sum(failure.rank_seconds for failure in loop)
    cost = f"{seconds:.0f} rank-seconds"
    if usd_per_rank_second is not None:
        cost += f", ${seconds * usd_per_rank_second:.4f} at the planned price"
    numbers = ", ".join(str(failure.generation) for failure in loop)
    kinds = {failure.fingerprint for failure in loop}
    what = (
        f"the same failure {len(loop)} times ({loop[-1].fingerprint})" if len(kinds) == 1 else f"{len(loop)} failures"
    )
    return (
        f"crash loop: {what} with no new commit in between, in generations {numbers}, which cost {cost}; "
        f"the last one: {' '.join(culprit.split())[:300]}"
    )
