"""`make soak-batch`: nine interruptions of one job in the local Batch, under the supervisor, and a
bug that is always there. Minutes, so not in CI.

Spot reclaims with a notice and without one, and in the middle the launcher is killed, which leaves
its job behind.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch.fixture import LocalBatch
from tests.support.batch.flow import PREFIX, SPOT, BatchRunner, account
from tests.support.batch.prepared import paced_settings, with_paced
from tests.support.flow import ROOT, FlowRunner, assert_ledger_adds_up, processes_with
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(3600)]

CONFIG = str(ROOT / "ebbflow/configs" / "laptop.yaml")
INTERRUPTIONS = 9
LAUNCHER_DIES_AT = 5
# A step computes for 0.02 s on a machine left alone and for 0.5 s among many others. Enough of them
# that the job is not done before the last interruption.
STEPS = 250
SECONDS_PER_STEP = 0.3
_NEWEST = 10**6 - 1  # keys of commits count generations down from it (core/layout.py)


class Supervised(BatchRunner):
    program = ROOT / "ebbflow/flows" / "supervise.py"

    def commits(self) -> int:
        """Of the newest generation that has any, its number; 0 before the first commit."""
        found = (
            re.search(r"/commits/\d+/(\d+)/", key)
            for key in self.keys(f"{PREFIX}/jobs/laptop/commits/")
        )
        return max((_NEWEST - int(match[1]) for match in found if match), default=0)


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory, swift: Swift) -> Iterator[LocalBatch]:
    folder = tmp_path_factory.mktemp("batch")
    with account(folder, swift, image=with_paced(folder)) as running:
        yield running


@pytest.fixture
def runner(tmp_path: Path, swift: Swift, batch: LocalBatch) -> Supervised:
    found = Supervised(tmp_path / "job", swift, batch)
    found.environment |= with_paced(batch.folder)
    return found


def running_job(runner: Supervised) -> str | None:
    jobs = [job for job in runner.training_jobs() if job["status"] == "RUNNING"]
    if jobs:
        return jobs[-1]["jobId"]
    return None


def interrupt(runner: Supervised, number: int) -> None:
    """One interruption, after a commit of a generation that had none before."""
    if number == LAUNCHER_DIES_AT:
        [launcher] = [
            pid
            for pid in processes_with(str(runner.folder))
            if b"train_flow.py\0run" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(launcher, signal.SIGKILL)
        return
    job = running_job(runner)
    assert job is not None, f"nothing runs: {runner.log.read_text()[-4000:]}"
    runner.batch.reclaim(job, notice=bool(number % 2))


def told(output: str) -> list[str]:
    """What the supervisor has said."""
    return re.findall(r"^supervise: (.*)$", output, re.MULTILINE)


def test_nine_interruptions_of_one_job(runner: Supervised, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"training__max_steps": STEPS, "checkpoint__interval_steps": 10}
    settings |= {"training__evaluation_interval_steps": STEPS}
    paced = {**settings, **paced_settings(SECONDS_PER_STEP)}
    process = runner.start(
        CONFIG, *runner.options(**paced), "--with", "cloud", "--pause-seconds", "1"
    )
    seen = 0
    for number in range(1, INTERRUPTIONS + 1):
        seen = runner.await_so(
            f"a commit after interruption {number - 1}",
            lambda before=seen: (newest := runner.commits()) > before and newest,
        )
        interrupt(runner, number)
    run = runner.finish(process, timeout=1200)
    assert run.exit_code == 0, run.output
    print("\n".join(told(run.output)))
    report = run.report
    assert report["outcome"] == "completed"
    assert report["interruptions"] >= INTERRUPTIONS and report["failures"] == 0
    assert_ledger_adds_up(report)
    jobs = runner.training_jobs()
    print(
        f"{len(jobs)} jobs, {report['interruptions']} interruptions, {report['redone_steps']} "
        "redone steps"
    )
    assert len(jobs) > 5, "more than Metaflow's own attempts"
    assert {job["status"] for job in jobs} <= {"SUCCEEDED", "FAILED"}, "no job is left behind"

    quiet = FlowRunner(tmp_path / "quiet", environment=with_paced(tmp_path))
    at_once = quiet.options(cluster__nodes=1, **settings, **paced_settings(0.0))
    expected = quiet.run("run", *at_once, timeout=1200)
    assert report["weights_sha256"] == expected.report["weights_sha256"]
    assert report["loss_curve"] == expected.report["loss_curve"]


def test_three_identical_crashes_end_the_job_at_a_cost_stated(runner: Supervised) -> None:
    before = len(runner.batch.jobs())
    settings = {**paced_settings(0.0, crashes_at_step=5), "checkpoint__interval_steps": 30}
    process = runner.start(
        CONFIG, *runner.options(**settings), "--with", "cloud", "--pause-seconds", "1"
    )
    run = runner.finish(process, timeout=1200)
    assert run.exit_code == 6, run.output
    assert run.report["outcome"] == "crash_loop" and run.report["failures"] == 3
    *_, why, cost = told(run.output)
    print(why, cost, sep="\n")
    assert why.startswith("stopped, crash_loop (exit code 6): crash loop: the same failure 3 times")
    assert "a bug at sample" in why
    assert f"it has cost ${run.report['total_usd']:.4f}" in cost and run.report["total_usd"] > 0
    queues = {job["jobQueue"].rpartition("/")[2] for job in runner.training_jobs(before=before)}
    assert queues == {SPOT}, "a bug is not tried on dearer capacity"
    assert_ledger_adds_up(run.report)
