"""The whole job with a bucket as its store, on a real server: it completes, survives and resumes as
in a folder.

The same promises as in test_flow_survival.py: weights and losses equal to a quiet run's, bit for
bit, and the reports on the launching machine although nothing else of the job lies there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import (
    ROOT,
    FlowRun,
    FlowRunner,
    train_quietly,
    wait_until,
)
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]  # several runs, on a busy machine

PREFIX = "some/prefix"


class Bucket(FlowRunner):
    """Runs flows whose jobs lie in a bucket of their own."""

    def __init__(self, folder: Path, swift: Swift) -> None:
        self.swift = swift
        self.bucket = swift.new_bucket()
        super().__init__(
            folder, store=f"s3://{self.bucket}/{PREFIX}", environment=swift.environment()
        )

    def keep_metaflow_in_the_bucket(self) -> None:
        self.environment |= {
            "METAFLOW_DEFAULT_DATASTORE": "s3",
            "METAFLOW_DATASTORE_SYSROOT_S3": f"s3://{self.bucket}/metaflow",
            "METAFLOW_S3_ENDPOINT_URL": self.swift.endpoint,
            "METAFLOW_S3_WORKER_COUNT": "4",  # of 64 processes for each handful of objects
        }

    def keys(self, below: str) -> list[str]:
        """What lies in the bucket, seen with a client of another make than ours."""
        pages = (
            self.swift.client()
            .get_paginator("list_objects_v2")
            .paginate(Bucket=self.bucket, Prefix=below)
        )
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def await_commit(self) -> None:
        wait_until(
            "a commit",
            lambda: [key for key in self.keys(f"{PREFIX}/jobs/") if "/commits/" in key],
            timeout=200,
        )

    def command(self, *words: str) -> str:
        """What `python -m …` prints; it must succeed."""
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env={**os.environ, **self.environment, "EBBFLOW_RUNS": str(self.runs)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of the same job in a folder, without a fault."""
    folder = tmp_path_factory.mktemp("quiet")
    return train_quietly(folder, *FlowRunner(folder).options())


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory, swift: Swift) -> tuple[Bucket, FlowRun]:
    """A run that loses a node and completes."""
    runner = Bucket(tmp_path_factory.mktemp("lost-s3"), swift)
    run = runner.run("run", *runner.options(), "--rehearse", "node-loss@60%")
    assert run.exit_code == 0, run.output
    return runner, run


def assert_same_result(run: FlowRun, quiet: dict[str, Any]) -> None:
    assert run.report["outcome"] == "completed", run.output
    assert run.report["weights_sha256"] == quiet["weights_sha256"]
    assert run.report["loss_curve"] == quiet["loss_curve"]
    assert round(sum(line["usd"] for line in run.report["ledger"]), 6) == run.report["total_usd"]
    assert {"report.json", "report.html"} <= {path.name for path in run.folder.iterdir()}
    assert run.folder.name == run.report["job"]


def test_a_run_that_loses_a_node_leaves_all_in_the_bucket_and_the_reports_here(
    quiet: dict[str, Any], lost: tuple[Bucket, FlowRun]
) -> None:
    runner, run = lost
    assert_same_result(run, quiet)
    assert run.report["interruptions"] == 1 and run.report["failures"] == 0
    assert run.report["redone_steps"] >= 1
    assert run.report["events"]["counts"]["fault_injected"] == 1
    job = f"{PREFIX}/jobs/{run.report['job']}"
    kinds = {key.removeprefix(f"{job}/").partition("/")[0] for key in runner.keys(job)}
    assert kinds >= {
        "config.json",
        "events",
        "generations",
        "data",
        "index",
        "commits",
        "report.json",
        "report.html",
    }
    here = {path.name for path in run.folder.iterdir()}
    assert not here & {"events", "generations", "data", "commits"}
    assert not (runner.runs / "jobs").exists()


def test_the_commands_read_a_job_in_a_bucket(lost: tuple[Bucket, FlowRun]) -> None:
    runner, run = lost
    job = run.report["job"]
    for named in ((job, "--store", runner.store), ("latest",)):
        report = json.loads(runner.command("cost", "report", *named, "--json"))
        assert [report[key] for key in ("job", "weights_sha256", "total_usd")] == [
            run.report[key] for key in ("job", "weights_sha256", "total_usd")
        ]
    place = f"{runner.store}/jobs/{job}"
    listed = json.loads(runner.command("training", "checkpoints", "list", place, "--json"))
    by_name = json.loads(
        runner.command("training", "checkpoints", "list", str(runner.runs / "latest"), "--json")
    )
    assert [row["key"] for row in by_name] == [row["key"] for row in listed]
    newest = next(row for row in listed if row["reachable"])
    assert newest["step"] == 60
    assert set(newest["metrics"]) >= {"held_out_loss"}, "the last commit has its own metrics"
    assert [row["best"] for row in listed].count(True) == 1
    verified = json.loads(runner.command("training", "checkpoints", "verify", place, "--json"))
    # Of the lost node's last save there may be data that no commit names.
    assert sorted(row["key"] for row in verified if row["sound"]) == sorted(
        row["key"] for row in listed
    )


@pytest.mark.long
def test_a_job_continued_by_its_name_and_metaflow_in_the_bucket_too(
    quiet: dict[str, Any], tmp_path: Path, swift: Swift
) -> None:
    """What Metaflow records does not matter to the job: the second run keeps it elsewhere than the
    first one.
    """
    runner = Bucket(tmp_path, swift)
    process = runner.start("run", *runner.options(), "--job", "by-name")
    runner.await_step(20, generation=1)
    process.send_signal(signal.SIGTERM)
    left = runner.finish(process)
    assert left.exit_code == 75, left.output
    assert left.report["outcome"] == "interrupted" and left.report["redone_steps"] == 0

    here = set((tmp_path / ".metaflow").rglob("*"))
    assert here and not runner.keys("metaflow/")
    runner.keep_metaflow_in_the_bucket()
    run = runner.run("run", *runner.options(), "--job", "by-name")
    assert run.exit_code == 0, run.output
    assert_same_result(run, quiet)
    assert run.report["job"] == run.folder.name == "by-name" and run.report["redone_steps"] == 0
    assert runner.keys("metaflow/TrainFlow/")
    assert not [
        path
        for path in (tmp_path / ".metaflow" / "TrainFlow" / "data").rglob("*")
        if path not in here
    ]
