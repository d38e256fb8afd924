"""`make soak-batch`: Metaflow on the local Batch, alone and with a metadata service.

Minutes, so not in CI.

Alone: a machine that is lost, a retry, an artifact. Nothing of this project takes part: what it
shows of the stand-in holds for any flow. With a service: our flow, of whose Metaflow nothing is
changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.batch.fixture import job_when
from tests.support.batch.flow import LIGHT, BatchRunner, account
from tests.support.flow import assert_ledger_adds_up
from tests.support.metadata_service import metadata_service, seen_by_client
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(2400)]

PATIENCE_SECONDS = 900.0
TINY_FLOW = Path(__file__).parents[1] / "support" / "batch" / "tiny_flow.py"


def test_a_flow_that_knows_nothing_of_us_survives_a_lost_machine(
    tmp_path: Path, swift: Swift
) -> None:
    with account(tmp_path / "batch", swift) as batch:
        own = {"METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path), "METAFLOW_BATCH_JOB_QUEUE": LIGHT}
        process = subprocess.Popen(
            [sys.executable, str(TINY_FLOW), "run", "--with", "batch", "--sleep", "600"],
            cwd=tmp_path,
            env={**os.environ, **batch.environment(swift.new_bucket(), swift.environment()), **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            first = job_when(batch, "-shout-", "RUNNING", deadline_seconds=PATIENCE_SECONDS)
            batch.reclaim(first["jobId"], notice=False)
            output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()
        assert process.returncode == 0, output
        assert f"attempt 1 in {LIGHT}" in output
        jobs = {job["jobName"].split("-", 3)[3]: job for job in batch.jobs()}
        assert [job["status"] for job in jobs.values()] == [
            "SUCCEEDED",
            "FAILED",
            "SUCCEEDED",
            "SUCCEEDED",
        ]
        lost = next(
            job for name, job in jobs.items() if name.startswith("shout") and name.endswith("-0")
        )
        assert lost["statusReason"].startswith("Host EC2 (instance i-")


@pytest.mark.parametrize(("sent", "nodes"), [("batch", 1), ("cloud", 2)])
def test_with_a_metadata_service_a_run_is_told_to_it_and_nothing_is_mended(
    tmp_path: Path, swift: Swift, sent: str, nodes: int
) -> None:
    with metadata_service() as service, account(tmp_path / "batch", swift) as batch:
        runner = BatchRunner(tmp_path, swift, batch)
        runner.environment |= service.environment()
        run = runner.run(
            "run",
            "--verbose",
            "--with",
            sent,
            *runner.options(cluster__nodes=nodes),
            timeout=PATIENCE_SECONDS,
        )
        assert run.exit_code == 0, run.output
        assert "is unchanged" in run.output and "fixes for Metaflow" not in run.output
        seen = seen_by_client("TrainFlow/1", runner.environment)
        assert seen["successful"] and seen["train"] == [True] * nodes and seen["cards"] == 1
        assert (seen["outcome"], seen["weights"]) == ("completed", run.report["weights_sha256"])
        assert service.unknown == []
        assert service.beats["TrainFlow", "1"] > 0
        assert_ledger_adds_up(run.report)
