"""Seeded schedules of gangs that die, race and meet a failing store; `make soak` plays a thousand
of them.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from benchmarks.soak.schedules.commands import play_all
from benchmarks.soak.schedules.plan import draw
from benchmarks.soak.schedules.summary import added_up, text
from tests.support.planted_bugs import played

# Of the first 26 seeds those in which, together, everything happens that is asserted below.
SEEDS = [0, 6, 9, 12, 14, 15, 17, 18, 19, 24, 25]


@pytest.mark.timeout(600)
def test_what_is_committed_survives_every_schedule(tmp_path: Path) -> None:
    outcomes = play_all(SEEDS, str(tmp_path), workers=os.cpu_count() or 1)
    problems = []
    for outcome in outcomes:
        for problem in outcome.problems:
            problems.append(f"--seed {outcome.seed}: {problem}")
    assert not problems, "ebbflow soak schedules\n" + "\n".join(problems)
    tally = added_up(one.tally for one in outcomes)
    faults = added_up(one.faults for one in outcomes)
    victims = {name.split()[2] for name in tally if name.startswith("kill of ")}
    assert victims == {"rank", "uploader", "all"}, "little has happened:\n" + text(outcomes, 0.0)
    assert (
        min(tally[name] for name in ("zombies", "frozen gangs", "rewinds", "two launchers at once"))
        > 0
    )
    assert tally["commits"] >= len(SEEDS), "each last gang commits"
    assert tally["restores"] >= len(SEEDS) // 2, (
        "on a slow machine, kills come before the first commit"
    )
    assert min(tally[name] for name in ("multipart uploads", "puts without room")) > 0
    assert (
        min(
            faults[kind] for kind in ("error", "lost", "reset", "flip", "rot", "stall", "slow_down")
        )
        > 0
    )


def test_a_seed_is_a_schedule_and_a_thousand_of_them_have_everything() -> None:
    schedules = [draw(seed) for seed in range(1000)]
    assert schedules[137] == draw(137)
    acts = [act for schedule in schedules for act in schedule.acts]
    assert {act.way for act in acts} == {"quiet", "rank", "uploader", "all", "zombie", "frozen"}
    assert {act.world_size for act in acts} == {1, 2, 3} and {act.launchers for act in acts} == {
        1,
        2,
    }
    assert {(act.kill.request, act.kill.point) for act in acts} >= {
        (request, point)
        for request in ("data", "index", "commits")
        for point in ("before", "mid", "after")
    }
    assert any(act.rewind for act in acts) and any(
        schedule.conduct["stale"] for schedule in schedules
    )
    assert len({schedule.storm for schedule in schedules}) == 10 and {
        one.store for one in schedules
    } == {
        "s3",
        "folder",
    }


@pytest.mark.timeout(120)
def test_the_oracle_of_the_schedules_finds_planted_bugs(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(played, str(tmp_path)).result()
    expected = {
        "sums are not looked at": "is not what",
        "the highest step is the newest": "its parent is",
        "retention keeps the oldest": "was reported committed",
    }
    assert set(found) == set(expected)
    for bug, (problems, sound) in found.items():
        assert sound == [], f"without the bug {bug!r}"
        assert any(expected[bug] in problem for problem in problems), f"{bug}: {problems}"
