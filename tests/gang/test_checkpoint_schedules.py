"""Seeded schedules of gangs that die, race and meet a failing store.

tests/soak/soak_schedules.py plays a thousand of them.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.support.schedules.plan import WAYS, draw
from tests.support.schedules.planted_bugs import judge_planted_bugs
from tests.support.schedules.play import add_up, list_problems, play_all

SEEDS = list(range(8))
# So many that everything that is asserted of them happens in several of them
LONG_SEEDS = list(range(26))


@pytest.mark.timeout(600)
def test_a_commit_survives_a_few_schedules(tmp_path: Path) -> None:
    outcomes = play_all(SEEDS, tmp_path, workers=os.cpu_count() or 1)

    assert list_problems(outcomes) == []
    tally = add_up(outcome.tally for outcome in outcomes)
    assert tally["commits"] >= len(SEEDS), "each last gang commits"
    assert any(name.startswith("kill of ") for name in tally), tally
    assert sum(add_up(outcome.faults for outcome in outcomes).values()) > 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_commit_survives_every_schedule(tmp_path: Path) -> None:
    outcomes = play_all(LONG_SEEDS, tmp_path, workers=os.cpu_count() or 1)

    assert list_problems(outcomes) == []
    tally = add_up(outcome.tally for outcome in outcomes)
    faults = add_up(outcome.faults for outcome in outcomes)
    for victim in ("rank", "uploader", "all"):
        assert any(name.startswith(f"kill of {victim} ") for name in tally), tally
    assert tally["commits"] >= len(LONG_SEEDS), "each last gang commits"
    assert tally["restores"] >= len(LONG_SEEDS) // 2, (
        "on a slow machine, kills come before the first commit"
    )
    for event in ("zombies", "frozen gangs", "rewinds", "two launchers at once"):
        assert tally[event] > 0, event
    for event in ("multipart uploads", "puts without room"):
        assert tally[event] > 0, event
    for kind in ("error", "lost", "reset", "flip", "rot", "stall", "slow_down"):
        assert faults[kind] > 0, kind


def test_a_seed_draws_one_schedule_and_a_thousand_seeds_draw_everything() -> None:
    schedules = [draw(seed) for seed in range(1000)]
    acts = []
    for schedule in schedules:
        acts += schedule.acts
    kills = {(act.kill.request, act.kill.point) for act in acts}

    assert schedules[137] == draw(137)
    assert {act.way for act in acts} == set(WAYS)
    assert {act.world_size for act in acts} == {1, 2, 3}
    assert {act.launchers for act in acts} == {1, 2}
    for request in ("data", "index", "commits"):
        for point in ("before", "mid", "after"):
            assert (request, point) in kills
    assert any(act.rewind for act in acts)
    assert any(schedule.conduct["stale"] for schedule in schedules)
    assert len({schedule.storm for schedule in schedules}) == 10
    assert {schedule.store for schedule in schedules} == {"s3", "folder"}


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_oracle_of_the_schedules_finds_planted_bugs(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        verdicts = pool.submit(judge_planted_bugs, tmp_path).result()

    assert len(verdicts) == 3
    for bug, verdict in verdicts.items():
        assert verdict.problems_without == [], f"without the bug {bug!r}"
        assert any(verdict.expected in problem for problem in verdict.problems), (
            f"{bug}: {verdict.problems}"
        )
