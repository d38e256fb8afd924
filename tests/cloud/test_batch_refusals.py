"""What keeps a run from AWS Batch is answered with one clear line, before or after the submit, and
nothing waits for ever: unknown and disabled queues, a store that containers cannot read, an image
that cannot be pulled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.batch.fixture import LocalBatch
from tests.support.batch.flow import ON_DEMAND, BatchRunner, account
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory, swift: Swift) -> Iterator[LocalBatch]:
    with account(tmp_path_factory.mktemp("batch"), swift) as running:
        yield running


@pytest.fixture(scope="module")
def runner(
    tmp_path_factory: pytest.TempPathFactory, swift: Swift, batch: LocalBatch
) -> BatchRunner:
    return BatchRunner(tmp_path_factory.mktemp("refused"), swift, batch)


def queues(*names: str, **changes: Any) -> str:
    known = [
        {"name": name, "market": "on_demand", "instance_types": ["g5.xlarge"], **changes}
        for name in names
    ]
    return json.dumps(known)


def test_queues_that_cannot_be_used_are_found_before_anything_is_submitted(
    runner: BatchRunner, batch: LocalBatch
) -> None:
    batch.client().update_job_queue(jobQueue=ON_DEMAND, state="DISABLED")
    try:
        for name, problem in ((ON_DEMAND, "DISABLED"), ("nowhere", "nowhere")):
            run = runner.run("run", "--with", "cloud", *runner.options(batch__queues=queues(name)))
            assert run.exit_code == 3, run.output
            assert name in run.output and problem in run.output
            assert "Traceback" not in run.output
    finally:
        batch.client().update_job_queue(jobQueue=ON_DEMAND, state="ENABLED")
    assert not batch.jobs() and not runner.keys("metaflow/")


def test_a_store_that_is_a_folder_is_refused(runner: BatchRunner) -> None:
    run = runner.run("run", "--with", "batch", *runner.options(store=str(runner.folder / "store")))
    assert run.exit_code == 3, run.output
    assert "which containers cannot read" in run.output and "s3://" in run.output


def test_an_image_that_cannot_be_pulled_ends_the_job_with_its_error(
    runner: BatchRunner, batch: LocalBatch
) -> None:
    batch.change(missing_images=["^nobody/has:this$"])
    options = runner.options(batch__image="nobody/has:this", batch__queues=queues(ON_DEMAND))
    run = runner.run("run", "--with", "cloud", *options, timeout=400)
    batch.change(missing_images=[])
    assert run.exit_code == run.report["exit_code"] == 1, run.output
    assert "CannotPullContainerError" in run.output
    jobs = runner.training_jobs()
    assert len(jobs) == 2 and all("startedAt" not in job for job in jobs)
    assert run.report["total_usd"] == 0
