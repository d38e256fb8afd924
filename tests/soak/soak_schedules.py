"""A thousand seeded schedules of gangs that die, race and meet a failing store.

`SCHEDULE_SEED` (default: 0) is the first seed and `SCHEDULE_COUNT` (default: 1000) the number of
seeds. The folder of a seed that failed is kept.

pytest -n 0 -s tests/soak/soak_schedules.py
SCHEDULE_SEED=137 SCHEDULE_COUNT=1 pytest -n 0 -s tests/soak/soak_schedules.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.schedules.play import add_up, list_problems, play_all

SEED = int(os.environ.get("SCHEDULE_SEED", "0"))
COUNT = int(os.environ.get("SCHEDULE_COUNT", "1000"))


@pytest.mark.timeout(4 * 3600)
def test_a_commit_survives_every_schedule(tmp_path: Path) -> None:
    seeds = list(range(SEED, SEED + COUNT))
    workers = 2 * (os.cpu_count() or 1)  # schedules mostly wait: for victims, deadlines, stalls

    outcomes = play_all(seeds, tmp_path, workers=min(workers, len(seeds)))

    counts = {
        "events": add_up(outcome.tally for outcome in outcomes),
        "faults": add_up(outcome.faults for outcome in outcomes),
    }
    for title, tally in counts.items():
        print(f"{title}:")
        for name, count in sorted(tally.items()):
            print(f"{count:8,}  {name}")
    assert list_problems(outcomes) == []
