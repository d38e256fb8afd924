"""What the bench of notices makes of an event log."""

from __future__ import annotations

import pytest

from benchmarks.training.notice.figures import notice_figures, spread, steps_redone
from ebbflow.core.events import COMMIT, NOTICE, STEP, Event


def event(
    name: str, at: float, generation: int, *, step: int | None = None, rank: int = 0, **data: object
) -> Event:
    return Event(
        name=name,
        job="job",
        run="run",
        attempt=generation - 1,
        generation=generation,
        node=0,
        rank=rank,
        step=step,
        t_wall=at,
        t_mono=at,
        data=data,
    )


def test_a_notice_is_judged_by_the_commit_of_the_step_that_the_ranks_left_at() -> None:
    first = [event(STEP, 10.0 + step, 1, step=step) for step in range(1, 6)]
    others = [event(STEP, 10.0 + step, 1, step=step, rank=1) for step in range(1, 6)]
    saved = [event(NOTICE, 14.5, 1, rank=-1, source="metadata"), event(COMMIT, 16.0, 1, step=5)]
    # And no commit: gone too soon
    second = [event(STEP, 30.0 + step, 2, step=step) for step in range(6, 10)]
    third = [event(STEP, 50.0 + step, 3, step=step) for step in range(6, 8)]
    given = [
        {"generation": 1, "source": "metadata", "node": 1, "at_step": 4, "given_at": 14.0},
        {"generation": 2, "source": "signal", "node": 0, "at_step": 8, "given_at": 38.0},
    ]
    events = [*first, *others, *saved, *second, *third]
    good, bad = notice_figures(events, given)
    assert good["heard_seconds"] == pytest.approx(0.5) and good["durable_seconds"] == pytest.approx(
        2.0
    )
    assert (good["left_step"], good["lost_steps"]) == (5, 0)
    assert (bad["heard_seconds"], bad["durable_seconds"]) == (None, None)
    assert (bad["left_step"], bad["lost_steps"]) == (9, 4)
    assert steps_redone(events) == 2
    assert spread([3.0, 1.0, 2.0]) == {"count": 3, "median": 2.0, "p95": 3.0, "worst": 3.0}
