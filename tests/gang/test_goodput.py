"""Where a tormented job's time went: every second in one share, the last execution of a step the
only useful one.
"""

from __future__ import annotations

import pytest

from benchmarks.soak.goodput import shares_text, time_shares
from ebbflow.core.events import NODE_STARTED, PHASE, STEP, Event


def event(
    name: str,
    at: float,
    *,
    generation: int = 1,
    rank: int | None = 0,
    step: int | None = None,
    **data,
) -> Event:
    place = {"t_wall": 0.0, "t_mono": at, "job": "j", "run": "r", "attempt": 0, "node": rank or 0}
    return Event(name=name, generation=generation, rank=rank, step=step, data=data, **place)


def test_the_last_execution_counts_and_the_gap_belongs_to_nobody() -> None:
    events = []
    for rank in (0, 1):
        events += [
            event(NODE_STARTED, 0.0, rank=rank),
            event(PHASE, 2.0, rank=rank, **{"class": "startup", "seconds": 2.0}),
            event(STEP, 5.0, rank=rank, step=1, seconds={"useful_step": 2.0, "data_wait": 1.0}),
            event(NODE_STARTED, 7.0, rank=rank, generation=2),
            event(STEP, 10.0, rank=rank, step=1, generation=2, seconds={"useful_step": 3.0}),
        ]
    shares = time_shares(events)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["useful_step"] == pytest.approx(0.3) and shares["redone_step"] == pytest.approx(
        0.3
    )
    assert shares["startup"] == pytest.approx(0.2) and shares["absent"] == pytest.approx(0.2)
    assert "useful" not in shares_text(shares) and "absent 20.0%" in shares_text(shares)
    assert time_shares(events[:1]) == {}
    hung = event(PHASE, 10.0, generation=2, **{"class": "useful_step", "seconds": 0.0001})
    assert time_shares([*events, hung])["useful_step"] == shares["useful_step"], (
        "its step never completed"
    )
