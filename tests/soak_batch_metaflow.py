"""`make soak-batch`: Metaflow alone on the local Batch: a machine that is lost, a retry, an artifact.

Nothing of this project takes part: what it shows of the stand-in holds for any flow. A minute, so not in CI.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.batch.fixture import job_when
from tests.support.batch.flow import LIGHT, account
from tests.support.swift import Swift

pytestmark = pytest.mark.flow

TINY_FLOW = Path(__file__).parent / "support" / "batch" / "tiny_flow.py"


def test_a_flow_that_knows_nothing_of_us_survives_a_lost_machine(tmp_path: Path, swift: Swift) -> None:
    with account(tmp_path / "batch", swift) as batch:
        own = {"METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path), "METAFLOW_BATCH_JOB_QUEUE": LIGHT}
        process = subprocess.Popen(
            [sys.executable, str(TINY_FLOW), "run", "--with", "batch", "--sleep", "600"],
            cwd=tmp_path, env={**os.environ, **batch.environment(swift.new_bucket(), swift.environment()), **own},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            first = job_when(batch, "-shout-", "RUNNING", deadline_seconds=200)
            batch.reclaim(first["jobId"], notice=False)
            output, _ = process.communicate(timeout=200)
        finally:
            process.kill()
        assert process.returncode == 0, output
        assert f"attempt 1 in {LIGHT}" in output
        jobs = {job["jobName"].split("-", 3)[3]: job for job in batch.jobs()}
        assert [job["status"] for job in jobs.values()] == ["SUCCEEDED", "FAILED", "SUCCEEDED", "SUCCEEDED"]
        lost = next(job for name, job in jobs.items() if name.startswith("shout") and name.endswith("-0"))
        assert lost["statusReason"].startswith("Host EC2 (instance i-")
