"""`make soak-batch`: the launcher of a run in the local Batch is asked to leave, or killed.

Minutes, so not in CI.

Whatever becomes of it: no job of Batch runs on unseen, never do two count for one job, and the job
goes on to the weights of a quiet run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch.fixture import LocalBatch
from tests.support.batch.flow import BatchRunner, account
from tests.support.batch.prepared import paced_settings, with_paced
from tests.support.flow import (
    FlowRun,
    FlowRunner,
    assert_ledger_adds_up,
    metered_rank_seconds,
    processes_with,
    wait_until,
)
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(3600)]

ENDED = ("SUCCEEDED", "FAILED")
# On a machine with much other work: eight light steps, each a container that begins with Python and
# Metaflow.
PATIENCE_SECONDS = 1200.0
STEPS: dict[str, Any] = {"training__max_steps": 80, "checkpoint__interval_steps": 8}
# Slow enough that the launcher is told, or killed, in mid-training on any machine.
SETTINGS = {**STEPS, **paced_settings(0.3)}


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory, swift: Swift) -> Iterator[LocalBatch]:
    """A container that is asked to end has 30 s, as on ECS."""
    folder = tmp_path_factory.mktemp("batch")
    with account(folder, swift, stop_seconds=30, image=with_paced(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("quiet")
    runner = FlowRunner(folder, environment=with_paced(folder))
    options = runner.options(cluster__nodes=1, **STEPS, **paced_settings(0.0))
    run = runner.run("run", *options, timeout=PATIENCE_SECONDS)
    assert run.exit_code == 0, run.output
    return run.report


@pytest.fixture
def runner(tmp_path: Path, swift: Swift, batch: LocalBatch) -> Iterator[BatchRunner]:
    """Of a test of its own; nothing that it started outlives it."""
    runner = BatchRunner(tmp_path / "job", swift, batch)
    runner.environment |= with_paced(batch.folder)
    yield runner
    for pid in processes_with(str(runner.folder)):
        os.kill(pid, signal.SIGKILL)


def started(runner: BatchRunner, *words: str) -> subprocess.Popen[str]:
    """A run that has committed once."""
    process = runner.start("run", *words, *runner.options(**SETTINGS))
    runner.await_commit()
    return process


def running(runner: BatchRunner, before: int = 0) -> list[str]:
    return [job["jobId"] for job in runner.batch.jobs()[before:] if job["status"] not in ENDED]


def assert_as_quiet(run: FlowRun, quiet: dict[str, Any]) -> None:
    assert run.exit_code == 0, run.output
    assert run.report["outcome"] == "completed"
    assert run.report["weights_sha256"] == quiet["weights_sha256"]
    assert run.report["loss_curve"] == quiet["loss_curve"]
    assert_ledger_adds_up(run.report)


def assert_billed_by_batch(runner: BatchRunner, run: FlowRun, before: int) -> None:
    jobs = [job for job in runner.training_jobs(before=before) if "startedAt" in job]
    seconds = sum((job["stoppedAt"] - job["startedAt"]) / 1000 for job in jobs)
    assert len(jobs) > 1 and metered_rank_seconds(run.report) == pytest.approx(seconds, abs=0.5)


@pytest.mark.parametrize(("sent", "number"), [("batch", signal.SIGTERM), ("cloud", signal.SIGINT)])
def test_a_launcher_that_is_asked_to_leave_ends_its_job_and_the_printed_line_goes_on(
    runner: BatchRunner, batch: LocalBatch, quiet: dict[str, Any], sent: str, number: signal.Signals
) -> None:
    """SIGTERM comes to the launcher alone, Ctrl-C of a terminal to all that it has started as well."""
    before = len(batch.jobs())
    process = started(runner, "--with", sent)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    left = runner.finish(process, PATIENCE_SECONDS)
    assert left.exit_code == 75, left.output
    assert left.report["outcome"] == "interrupted" and left.report["failures"] == 0
    assert running(runner, before) == []
    assert processes_with(str(runner.folder)) == []
    assert runner.training_jobs(before=before)[-1]["statusReason"].startswith(
        "Ebbflow: ended: the launcher was told"
    )
    line = re.search(r"flows/train_flow\.py (run --job \S+)$", left.output, re.MULTILINE)
    assert line is not None, left.output
    run = runner.run(
        *shlex.split(line[1]),
        "--with",
        "cloud",
        *runner.options(**SETTINGS),
        timeout=PATIENCE_SECONDS,
    )
    assert_as_quiet(run, quiet)
    assert run.report["redone_steps"] == 0, "it saved before it left"
    assert_billed_by_batch(runner, run, before)


def test_sigterm_ends_a_job_whose_submit_is_not_answered_yet(
    runner: BatchRunner, batch: LocalBatch
) -> None:
    before = len(batch.jobs())
    process = runner.start("run", "--with", "cloud", *runner.options(**SETTINGS))
    runner.await_so(
        "the plan", lambda: [event for event in runner.events() if event["name"] == "prepared"]
    )
    batch.change(rules=[{"operation": "SubmitJob", "kind": "slow", "seconds": 8, "times": 1}])
    runner.await_so("the submit", lambda: runner.training_jobs(before=before))
    process.terminate()
    left = runner.finish(process, PATIENCE_SECONDS)
    assert left.exit_code == 75, left.output
    assert running(runner, before) == []


def test_a_launcher_that_is_killed_takes_its_job_along_and_resume_goes_on(
    runner: BatchRunner, batch: LocalBatch, quiet: dict[str, Any]
) -> None:
    before = len(batch.jobs())
    process = started(runner, "--with", "cloud")
    os.kill(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)
    wait_until("the end of its job", lambda: not running(runner, before), timeout=PATIENCE_SECONDS)
    wait_until(
        "the end of its processes",
        lambda: not processes_with(str(runner.folder)),
        timeout=PATIENCE_SECONDS,
    )
    run = runner.run("resume", "--with", "batch", timeout=PATIENCE_SECONDS)
    assert_as_quiet(run, quiet)
    assert_billed_by_batch(runner, run, before)


def test_a_run_whose_submit_was_refused_for_good_goes_on_by_resume(
    runner: BatchRunner, batch: LocalBatch, quiet: dict[str, Any]
) -> None:
    before = len(batch.jobs())
    process = runner.start("run", "--with", "cloud", *runner.options(**SETTINGS))
    runner.await_so(
        "the preparation",
        lambda: [event for event in runner.events() if event["name"] == "prepared"],
    )
    batch.change(rules=[{"operation": "SubmitJob", "kind": "refuse", "times": 1}])
    failed = runner.finish(process, PATIENCE_SECONDS)
    told = "message: AWS Batch refused the submit of train_node: SubmitJob is refused"
    assert failed.exit_code == 1 and told in failed.output, failed.output
    assert not runner.training_jobs(before=before)
    assert_as_quiet(runner.run("resume", "--with", "batch", timeout=PATIENCE_SECONDS), quiet)


def test_what_was_left_behind_is_told_and_ended_by_the_next_start(
    runner: BatchRunner, batch: LocalBatch, quiet: dict[str, Any]
) -> None:
    """The launcher's machine is gone with all that ran there. What it left in Batch freezes and
    thaws late: its last save is one of an older generation, and counts for nothing."""
    before = len(batch.jobs())
    process = started(runner, "--with", "cloud", "--job", "left")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)
    [left] = running(runner, before)
    frozen = processes_with(left)
    signal_all(frozen, signal.SIGSTOP)
    process = runner.start(
        "run", "--verbose", "--job", "left", "--with", "cloud", *runner.options(**SETTINGS)
    )
    runner.await_so("a new attempt", lambda: running(runner, before)[1:])
    signal_all(frozen, signal.SIGCONT)
    run = runner.finish(process, timeout=PATIENCE_SECONDS)
    told = f"job {left} of run"
    preflight, _, placed = run.output.partition("capacity plan")
    assert told in preflight and "no process of this run waits for it" in preflight
    assert told in placed and "was left behind: terminated" in placed
    job = next(job for job in batch.jobs() if job["jobId"] == left)
    assert job["status"] == "FAILED" and job["statusReason"].startswith("Ebbflow: ended: run"), job
    assert_as_quiet(run, quiet)
    assert_billed_by_batch(runner, run, before)


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
