"""With a metadata service, of which a small one stands in: the flow's records are there, and
nothing is mended.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.preflight import PreflightContext
from ebbflow.flows.metaflow_fixes import check_metadata
from tests.support.flow import FlowRun, FlowRunner
from tests.support.metadata_service import MetadataService, metadata_service, seen_by_client

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def service() -> Iterator[MetadataService]:
    with metadata_service() as running:
        yield running


@pytest.fixture
def context(service: MetadataService, monkeypatch: pytest.MonkeyPatch) -> PreflightContext:
    """Of a run that goes to AWS Batch and has this service."""
    for name, value in service.environment().items():
        monkeypatch.setenv(name, value)
    config = RunConfig.model_validate({"store": "s3://bucket/x", "cluster": {"plan_for": "batch"}})
    return PreflightContext(config=config, project_root=ROOT, target="batch")


@pytest.mark.flow
@pytest.mark.timeout(900)
def test_a_run_and_its_report_are_found_through_the_service(
    tmp_path: Path, service: MetadataService
) -> None:
    """The job is called after the run, which the service numbers."""
    runner = FlowRunner(tmp_path, environment=service.environment())
    run: FlowRun = runner.run("run", *runner.options(training__max_steps=16), timeout=600)
    assert run.exit_code == 0, run.output
    assert (run.report["job"], run.report["outcome"]) == ("1", "completed")
    seen = seen_by_client(
        "TrainFlow/1", {**runner.environment, "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path)}
    )
    assert seen == {
        "successful": True,
        "outcome": "completed",
        "weights": run.report["weights_sha256"],
        "train": [True, True],
        "cards": 1,
    }
    assert service.unknown == []
    assert service.beats["TrainFlow", "1"] > 0 and len(service.beats) > 5, (
        "of the run and of each of its tasks"
    )


def test_preflight_says_that_nothing_is_mended(context: PreflightContext) -> None:
    found = check_metadata(context)
    assert found.status == "passed" and "is unchanged" in found.detail and "2.5.0" in found.detail


def test_a_service_that_does_not_answer_is_found_before_anything_is_submitted(
    context: PreflightContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAFLOW_SERVICE_URL", "http://127.0.0.1:9")
    found = check_metadata(context)
    assert (
        found.status == "failed"
        and "the metadata service at http://127.0.0.1:9 does not answer" in found.detail
    )
    assert "METAFLOW_SERVICE_URL" in (found.fix or "")
