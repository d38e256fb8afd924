"""The guides' headline troubles in real processes, ten seeds each: family, rank, seconds to the verdict, retries.

    python -m pytest -s tests/soak/soak_headlines.py

`SOAK_SEEDS` (default 10) sets the number of seeds. Each test appends its rows to `headlines.jsonl` in the
folder `SOAK_RECORD`, if that is set. The rank and the step are drawn from the seed.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.diagnose.job import diagnose_job
from ebbflow.infra.diagnose.judging import diagnose_files
from ebbflow.infra.events import read_events
from ebbflow.infra.rank_logs import read_logs
from ebbflow.training.errors import GangError
from tests.support.guard_jobs import Job
from tests.support.injected import INJECTIONS, inject

SEEDS = range(int(os.environ.get("SOAK_SEEDS", "10")))
# trouble: (families that name it, whether it may be cured by another start)
TROUBLES: dict[str, tuple[set[str], bool]] = {
    "leave_out_a_branch": ({"synchronization"}, False),
    "call_a_collective": ({"synchronization"}, True),
    "save_alone": ({"synchronization"}, True),
    "raise_error": ({"program", "data"}, True),
    "die": ({"synchronization", "hardware"}, True),
    "freeze": ({"synchronization"}, True),
    "lose_a_loader_worker": ({"data"}, True),
    "divide_by_zero": ({"quality"}, False),
}


def record(**row: Any) -> None:
    print(json.dumps(row), flush=True)
    if folder := os.environ.get("SOAK_RECORD"):
        with open(Path(folder, "headlines.jsonl"), "a") as rows:
            rows.write(json.dumps(row) + "\n")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_headline_of_a_job(trouble: str, seed: int, tmp_path: Path) -> None:
    families, curable = TROUBLES[trouble]
    draw = random.Random(f"{trouble} {seed}")
    guilty, step = draw.randrange(2), draw.choice([1, 1, 2, 3, 5, 8])
    mark = tmp_path / "mark"
    options = {"trouble": trouble, "guilty": guilty, "step": step, "mark": str(mark)}
    survival = {"hang_floor_seconds": 5.0}  # the default is 60
    workload = "tests.support.headline:Headline"
    job = Job.make(tmp_path / "job", workload=workload, options=options, survival=survival)
    begun = time.monotonic()
    try:
        outcome, generation = (end := job.run()).outcome, end.generation
    except GangError as error:
        outcome, generation = str(error.outcome), 1
    took = time.monotonic() - begun
    faults = [*job.events("fault_detected"), *job.events("generation_ended")]
    first = min((event.t_wall for event in faults if event.data.get("culprit")), default=None)
    struck = float(mark.read_text())
    ranks = {event.data.get("rank") for event in job.events("fault_detected")}
    named = f"rank {guilty}" in " ".join(str(event.data.get("culprit", "")) for event in faults) or guilty in ranks
    named = named or trouble == "divide_by_zero"  # the mean over all ranks is NaN
    diagnosis = diagnose_job(read_events(job.store), read_logs([job.folder], [job.store]).lines)
    root = next((each for each in diagnosis.findings if each.role == "root"), None)
    generations = len(job.events("generation_ended"))
    record(
        kind="job",
        name=trouble,
        seed=seed,
        step=step,
        family=root.rule.family if root else None,
        symptom=root.rule.id if root else None,
        right=bool(root and root.rule.family in families),
        rank_right=named,
        seconds=None if first is None else round(first - struck, 2),
        outcome=str(outcome),
        generation=generation,
        generations=generations,
        took=round(took, 1),
    )
    assert root and root.rule.family in families and named
    assert curable or generations == 1


@pytest.mark.parametrize("name", INJECTIONS)
def test_a_symptom_in_logs_of_plain_torch(name: str, tmp_path: Path) -> None:
    made, wrong = INJECTIONS[name], []
    for seed in SEEDS:
        logs, guilty, seconds = inject(name, tmp_path / str(seed), seed)
        root = next((each for each in diagnose_files(logs).findings if each.role == "root"), None)
        right = bool(root) and root.rule.id in (made.symptom, *made.answers)
        record(
            kind="plain",
            name=name,
            seed=seed,
            symptom=root.rule.id if root else None,
            right=right,
            guilty=guilty,
            rank=root.ranks[0] if root and root.ranks else None,
            seconds=round(seconds, 2),
        )
        wrong += [] if right else [(seed, root.rule.id if root else None)]
    assert not wrong
