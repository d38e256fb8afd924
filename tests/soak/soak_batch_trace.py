"""A real run on the local Batch whose Spot capacity follows a trace, 45 times as fast. Minutes, so
not in CI; `tests/cloud/test_capacity_trace.py` has the same on a virtual clock.

    SPOT_TRACE=us-east-2a_v100_1.json python -m pytest -s tests/soak/soak_batch_trace.py

SPOT_TRACE: one zone's recording, `{"metadata": {"gap_seconds": 195}, "data": [0, 1, …]}` with the
number of available machines per tick; without it the trace is made up. Of a recording the first place is taken where Spot comes twice and then stays away.
Whenever it is there the job takes it, between whiles it waits in the queue of Spot, and at the last
safe moment it is finished on demand, in time.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.events import PLACED
from tests.support.batch.fixture import LocalBatch
from tests.support.batch.flow import ON_DEMAND, SPOT, BatchRunner, account
from tests.support.batch.prepared import paced_settings, remember_speeds, with_paced
from tests.support.flow import ROOT, TINY, FlowRun, assert_ledger_adds_up
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1500)]

CONFIG = str(ROOT / "ebbflow/configs" / "laptop.yaml")
TIME_SCALE = 45.0
GAP_SECONDS = 195.0
MADE_UP = (18, 8, 20, 400)  # ticks of GAP_SECONDS: with capacity, without, with, without
SPELL_TICKS = range(14, 26)  # bears a start and some of the work, but not all of it
GAP_TICKS = range(1, 11)  # a gap is over while the job may still wait
LAST_TICKS = 150

# More than a step computes for on a machine with much other work.
STEPS = 240
SECONDS_PER_STEP = 0.8
# A container is at its first step in some 10 s here, on a busy machine in 30.
START_SECONDS = 30.0
RUNNABLE_MINUTES = 1.0
DEADLINE_HOURS = 0.2
SETTINGS = {
    **paced_settings(SECONDS_PER_STEP),
    "training__max_steps": STEPS,
    "training__evaluation_interval_steps": STEPS,
    "checkpoint__interval_steps": 12,
    "cluster__expected_start_seconds": START_SECONDS,
    "cost__deadline_hours": DEADLINE_HOURS,
    "batch__runnable_minutes": RUNNABLE_MINUTES,
    "checkpoint__deadline_seconds": 10,
    "survival__hang_floor_seconds": 3,
}


def spells() -> tuple[int, ...]:
    """Ticks with capacity and without it, alternately."""
    path = os.environ.get("SPOT_TRACE")
    if not path:
        return MADE_UP
    trace = json.loads(Path(path).read_text())
    gap_seconds = trace["metadata"]["gap_seconds"]
    assert gap_seconds == GAP_SECONDS, f"{path} has ticks of {gap_seconds:g} s"
    available = [count > 0 for count in trace["data"]]
    found = [(up, len(list(ticks))) for up, ticks in itertools.groupby(available)]
    for at in range(len(found) - 3):
        (up, first), (_, gap), (_, second), (_, last) = found[at : at + 4]
        if (
            up
            and first in SPELL_TICKS
            and gap in GAP_TICKS
            and second in SPELL_TICKS
            and last >= LAST_TICKS
        ):
            print(
                f"{path}: from tick {sum(ticks for _, ticks in found[:at])}: "
                f"{first, gap, second, last}"
            )
            return first, gap, second, last
    raise AssertionError(f"{path}: Spot never comes twice and then stays away")


def capacity(ticks: tuple[int, ...]) -> list[list[float]]:
    """As the local Batch takes it."""
    begins = itertools.accumulate((0, *ticks[:-1]))
    return [[begin * GAP_SECONDS, 1 - number % 2] for number, begin in enumerate(begins)]


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory, swift: Swift) -> Iterator[LocalBatch]:
    """A notice comes 10 s before the instance goes, as in the other tests."""
    folder = tmp_path_factory.mktemp("batch")
    pace = {
        "time_scale": TIME_SCALE,
        "notice_seconds": 10 * TIME_SCALE,
        "image": with_paced(folder),
    }
    with account(folder, swift, **pace) as running:
        yield running


@pytest.fixture(scope="module")
def finished(
    batch: LocalBatch, swift: Swift, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FlowRun, list[dict[str, Any]]]:
    """The run, and the placements of its attempts as they were decided."""
    ticks = spells()
    runner = BatchRunner(tmp_path_factory.mktemp("job"), swift, batch)
    runner.environment |= with_paced(batch.folder)
    options = runner.options(**SETTINGS)
    tokens = TINY["training.batch_size"] * TINY["model.sequence_length"]
    remember_speeds(runner, options, {("g5.xlarge", 1): tokens / SECONDS_PER_STEP})
    process = runner.start("run", "--verbose", "--config", CONFIG, *options, "--with", "cloud")
    runner.await_so(
        "training", lambda: any(job["status"] == "RUNNING" for job in runner.training_jobs())
    )
    batch.change(queues={SPOT: {"capacity": capacity(ticks)}})
    batch.begin_traces()
    run = runner.finish(process, timeout=1300)
    assert run.exit_code == 0, run.output
    return run, [event["data"]["placement"] for event in runner.events() if event["name"] == PLACED]


def test_spot_whenever_it_is_there_and_on_demand_in_time(
    finished: tuple[FlowRun, list[dict[str, Any]]],
) -> None:
    report = finished[0].report
    attempts = report["money"]["attempts"]
    for attempt in attempts:
        print(attempt["queue"], attempt["ended"], attempt["actual"], attempt["why"])
    ended = [(attempt["queue"], attempt["ended"]) for attempt in attempts]
    assert ended[-1] == (ON_DEMAND, "ended") and {queue for queue, _ in ended[:-1]} == {SPOT}
    assert ended.count((SPOT, "reclaimed")) == 2, "it was there twice"
    assert {end for _, end in ended[:-1]} <= {"reclaimed", "never_started"}
    assert attempts[1]["actual"]["wait_seconds"] > 1, "it was waited for in the queue"
    assert "last safe moment" in attempts[-1]["why"]
    assert report["actual"]["wall_hours"] < DEADLINE_HOURS
    assert report["outcome"] == "completed" and report["failures"] == 0
    assert [step for step, _ in report["loss_curve"]] == list(range(1, STEPS + 1))


def test_an_attempt_keeps_its_reserve_on_spot_only(
    finished: tuple[FlowRun, list[dict[str, Any]]],
) -> None:
    """Each attempt on Spot carries what on-demand would need, and no wait for capacity is longer
    than that allows.
    """
    for placement in finished[1]:
        print(f"{placement['market']}: {placement['reason']}, {placement['fallback']}")
        assert (placement["fallback"] is None) == (placement["market"] == "on_demand"), placement[
            "reason"
        ]
        if placement["fallback"] is not None:
            assert (
                placement["fallback"]["seconds"]
                >= 60 * RUNNABLE_MINUTES
                >= placement["runnable_seconds"] - 1
            )


def test_the_report_says_planned_against_actual_and_the_regret(
    finished: tuple[FlowRun, list[dict[str, Any]]],
) -> None:
    run, _ = finished
    attempts = run.report["money"]["attempts"]
    money = run.report["money"]
    print(
        run.report["total_usd"],
        money["hindsight"],
        run.report["savings_usd"],
        run.report["actual"]["wall_hours"],
    )
    assert_ledger_adds_up(run.report)
    ran = [attempt for attempt in attempts if attempt["ended"] != "never_started"]
    for attempt in ran:
        assert attempt["actual"]["usd_per_hour"] == pytest.approx(
            attempt["planned"]["usd_per_hour"], rel=1e-3
        )
        assert attempt["planned"]["hours"] > 0 and attempt["actual"]["hours"] > 0
    assert sum(attempt["actual"]["usd"] for attempt in ran) == pytest.approx(
        run.report["total_usd"], abs=1e-5
    )
    assert money["hindsight"]["regret_usd"] == pytest.approx(
        run.report["total_usd"] - money["hindsight"]["usd"], abs=1e-6
    )
    assert money["hindsight"]["regret_usd"] > 0
    assert "plan against actual" in run.output and "in hindsight" in run.output
