"""`make soak-batch`: nine interruptions of one job in the local Batch, under the supervisor. Minutes, so not in CI.

Spot reclaims with a notice and without one, and in the middle the launcher is killed, which leaves its job behind.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch.fixture import LocalBatch
from tests.support.batch.flow import BatchRunner, account
from tests.support.flow import ROOT, FlowRunner, processes_with, wait_until
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(2400)]

CONFIG = str(ROOT / "configs" / "laptop.yaml")
INTERRUPTIONS = 9
LAUNCHER_DIES_AT = 5
STEPS = 400


class Supervised(BatchRunner):
    program = ROOT / "flows" / "supervise.py"

    def commits(self) -> int:
        """Of the newest generation that has any, its number; 0 before the first commit."""
        return max((event["generation"] for event in self.events() if event["name"] == "commit"), default=0)


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory, swift: Swift) -> Iterator[LocalBatch]:
    with account(tmp_path_factory.mktemp("batch"), swift) as running:
        yield running


def running_job(runner: Supervised) -> str | None:
    jobs = [job for job in runner.training_jobs() if job["status"] == "RUNNING"]
    return jobs[-1]["jobId"] if jobs else None


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


def test_nine_interruptions_of_one_job(batch: LocalBatch, swift: Swift, tmp_path: Path) -> None:
    runner = Supervised(tmp_path / "job", swift, batch)
    settings: dict[str, Any] = {"training__max_steps": STEPS, "checkpoint__interval_steps": 10}
    process = runner.start(CONFIG, *runner.options(**settings), "--with", "cloud", "--pause-seconds", "1")
    seen = 0
    for number in range(1, INTERRUPTIONS + 1):
        seen = wait_until(
            f"a commit after interruption {number - 1}",
            lambda before=seen: (newest := runner.commits()) > before and newest,
            timeout=600,
        )
        interrupt(runner, number)
    run = runner.finish(process, timeout=900)
    assert run.exit_code == 0, run.output
    print("\n".join(line for line in run.output.splitlines() if line.startswith("supervise:")))
    report = run.report
    assert report["outcome"] == "completed"
    assert report["interruptions"] >= INTERRUPTIONS and report["failures"] == 0
    assert round(sum(line["usd"] for line in report["ledger"]), 6) == report["total_usd"]
    assert {job["status"] for job in runner.training_jobs()} <= {"SUCCEEDED", "FAILED"}, "no job is left behind"

    quiet = FlowRunner(tmp_path / "quiet")
    expected = quiet.run("run", *quiet.options(cluster__nodes=1, **settings), timeout=600)
    assert report["weights_sha256"] == expected.report["weights_sha256"]
    assert report["loss_curve"] == expected.report["loss_curve"]
