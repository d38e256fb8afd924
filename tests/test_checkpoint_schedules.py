"""Seeded schedules of gangs that die, race and meet a failing store; `make soak` plays a thousand of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from training.soak.schedules.commands import play_all
from training.soak.schedules.plan import draw

COUNT = 20


@pytest.mark.timeout(600)
def test_what_is_committed_survives_every_schedule(tmp_path: Path) -> None:
    outcomes = play_all(list(range(COUNT)), str(tmp_path), workers=min(2, os.cpu_count() or 1))
    problems = [f"--seed {outcome.seed}: {problem}" for outcome in outcomes for problem in outcome.problems]
    assert not problems, "python -m training soak schedules\n" + "\n".join(problems)
    assert len(outcomes) == COUNT and sum(sum(outcome.faults.values()) for outcome in outcomes) > 0


def test_a_seed_is_a_schedule_and_a_thousand_of_them_have_everything() -> None:
    schedules = [draw(seed) for seed in range(1000)]
    assert schedules[137] == draw(137)
    acts = [act for schedule in schedules for act in schedule.acts]
    assert {act.way for act in acts} == {"quiet", "rank", "uploader", "all", "zombie", "frozen"}
    assert {act.world_size for act in acts} == {1, 2, 3} and {act.launchers for act in acts} == {1, 2}
    assert any(act.rewind for act in acts) and any(schedule.conduct["stale"] for schedule in schedules)
    assert len({schedule.storm for schedule in schedules}) == 7
