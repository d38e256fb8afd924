"""`python -m pytest tests/soak_batch_trace.py`: a real run on the local Batch whose Spot goes. Minutes, so not
in CI; `tests/test_capacity_trace.py` has the same on a virtual clock.

Spot goes with a notice after the first commit and does not come back in time: the job waits in the queue of Spot as
long as that is safe, and is finished on demand before its deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.batch.fixture import LocalBatch
from tests.support.batch.flow import ON_DEMAND, SPOT, BatchRunner, account
from tests.support.flow import ROOT
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1800)]

CONFIG = str(ROOT / "configs" / "laptop.yaml")
TIME_SCALE = 12.0
SPOT_SECONDS = 2.0
DEADLINE_HOURS = 0.3
SETTINGS = {
    "training__max_steps": 100,
    "checkpoint__interval_steps": 10,
    "cost__deadline_hours": DEADLINE_HOURS,
    "batch__runnable_minutes": 1.5,
}


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory, swift: Swift) -> Iterator[LocalBatch]:
    with account(tmp_path_factory.mktemp("batch"), swift, time_scale=TIME_SCALE) as running:
        yield running


def test_spot_that_goes_for_good(batch: LocalBatch, swift: Swift, tmp_path: Path) -> None:
    runner = BatchRunner(tmp_path / "job", swift, batch)
    process = runner.start("run", "--config", CONFIG, *runner.options(**SETTINGS), "--with", "cloud")
    runner.await_commit()
    batch.change(queues={SPOT: {"capacity": [[0, 1], [SPOT_SECONDS * TIME_SCALE, 0]]}})
    batch.begin_traces()
    run = runner.finish(process, timeout=1500)
    assert run.exit_code == 0, run.output
    report = run.report
    attempts = report["money"]["attempts"]
    print([(one["queue"], one["ended"], one["actual"], one["why"]) for one in attempts])
    print(report["total_usd"], report["money"]["hindsight"], report["actual"]["wall_hours"])
    ended = [(one["queue"], one["ended"]) for one in attempts]
    assert ended[0] == (SPOT, "reclaimed") and ended[-1] == (ON_DEMAND, "ended")
    assert len(ended) >= 3 and set(ended[1:-1]) == {(SPOT, "never_started")}
    assert "last safe moment" in attempts[-1]["why"]
    assert report["actual"]["wall_hours"] < DEADLINE_HOURS
    assert report["outcome"] == "completed" and report["failures"] == 0
    assert round(sum(line["usd"] for line in report["ledger"]), 6) == report["total_usd"]
    assert report["money"]["hindsight"]["regret_usd"] > 0
