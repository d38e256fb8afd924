"""A whole run on the local Batch: it waits for capacity in vain, is placed elsewhere, reclaimed
with notice, finishes.

Weights and losses equal those of a quiet run of one rank on this machine, bit for bit; the bill is
Batch's own; and no secret that the machines have in their environment is told to anybody.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.batch.fixture import LocalBatch
from tests.support.batch.flow import LIGHT, ON_DEMAND, SPOT, BatchRunner, account
from tests.support.batch.prepared import paced_settings, with_paced
from tests.support.flow import FlowRun, FlowRunner, metered_rank_seconds, train_alone
from tests.support.swift import Swift
from tests.support.swift_server import SECRET_KEY

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1200)]

FULL = "spot-g4dn"  # cheaper than g5, and without an instance left
_QUEUES = [
    {"name": FULL, "market": "spot", "instance_types": ["g4dn.xlarge"]},
    {"name": SPOT, "market": "spot", "instance_types": ["g5.xlarge"]},
    {"name": ON_DEMAND, "market": "on_demand", "instance_types": ["g5.xlarge"], "multi_node": True},
]
_PLANTED = {
    "AWS_SESSION_TOKEN": "planted-session-token-8c1d",
    "HF_TOKEN": "planted-hugging-face-token-77aa",
    "STORE_PASSWORD": "planted-store-password-e012",
}


@dataclass(frozen=True)
class Reclaimed:
    """runner, run: of the flow. jobs: Batch's, of the training steps, oldest first."""

    runner: BatchRunner
    run: FlowRun
    jobs: list[dict[str, Any]]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of the same job on this machine, undisturbed."""
    folder = tmp_path_factory.mktemp("quiet")
    return train_alone(FlowRunner(folder, environment=with_paced(folder)), **paced_settings(0.0))


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory, swift: Swift) -> Iterator[LocalBatch]:
    full = {FULL: {"market": "spot", "instance_types": ["g4dn.xlarge"], "capacity": [[0, 0]]}}
    folder = tmp_path_factory.mktemp("batch")
    with account(folder, swift, time_scale=3.0, image=with_paced(folder)) as batch:
        batch.change(queues=full)
        yield batch


@pytest.fixture(scope="module")
def reclaimed(
    tmp_path_factory: pytest.TempPathFactory, swift: Swift, cloud: LocalBatch
) -> Reclaimed:
    """Every step in Batch. The first submit of training is throttled three times."""
    runner = BatchRunner(tmp_path_factory.mktemp("reclaimed"), swift, cloud)
    runner.environment |= _PLANTED | with_paced(cloud.folder)
    types = json.dumps(["g4dn.xlarge", "g5.xlarge"])
    settings = {
        "cluster__instance_types": types,
        "batch__queues": json.dumps(_QUEUES),
        "batch__runnable_minutes": 0.05,
    }
    settings |= paced_settings(0.2)  # it still trains when the notice comes
    process = runner.start("run", "--with", "batch", *runner.options(**settings))
    runner.await_so(
        "the preparation", lambda: [job for job in cloud.jobs() if "-prepare-" in job["jobName"]]
    )
    cloud.change(rules=[{"operation": "SubmitJob", "kind": "throttle", "times": 3}])
    runner.await_commit()
    cloud.change(queues={FULL: {"capacity": []}})
    cloud.reclaim(runner.training_jobs()[-1]["jobId"])
    return Reclaimed(runner, runner.finish(process, 400), runner.training_jobs())


def test_a_reclaimed_job_ends_with_the_weights_of_an_uninterrupted_run(
    reclaimed: Reclaimed, quiet: dict[str, Any]
) -> None:
    run = reclaimed.run
    assert run.exit_code == 0, run.output
    assert run.report["outcome"] == "completed"
    assert run.report["weights_sha256"] == quiet["weights_sha256"]
    assert run.report["loss_curve"] == quiet["loss_curve"]
    assert run.report["redone_steps"] == 0  # the notice was heard in time


def test_each_attempt_ran_where_it_was_placed_and_has_a_reason(reclaimed: Reclaimed) -> None:
    placed = [event["data"] for event in reclaimed.runner.events() if event["name"] == "placed"]
    queues = [job["jobQueue"].rpartition("/")[2] for job in reclaimed.jobs]
    assert queues == [attempt["placement"]["queue"] for attempt in placed]
    assert queues[:2] == [FULL, SPOT], "the cheapest first; it had no capacity, so the next best"
    assert "had no capacity" in placed[1]["why"] and "reclaimed" in placed[2]["why"]
    waited, lost, *_, last = reclaimed.jobs
    assert "startedAt" not in waited and last["status"] == "SUCCEEDED"
    notices = [event for event in reclaimed.runner.events() if event["name"] == "notice"]
    assert [event["data"]["source"] for event in notices] == ["metadata"]
    assert lost["stoppedAt"] / 1000 > notices[0]["t_wall"]
    others = [job for job in reclaimed.runner.batch.jobs() if "-train" not in job["jobName"]]
    assert {job["jobQueue"].rpartition("/")[2] for job in others} == {LIGHT}


def test_both_machines_are_billed_from_batchs_own_times(reclaimed: Reclaimed) -> None:
    report = reclaimed.run.report
    seconds = [
        (job["stoppedAt"] - job["startedAt"]) / 1000 for job in reclaimed.jobs if "startedAt" in job
    ]
    assert len(seconds) == 2
    assert metered_rank_seconds(report) == pytest.approx(sum(seconds), abs=0.1)
    assert round(sum(line["usd"] for line in report["ledger"]), 6) == report["total_usd"] > 0


def test_a_throttled_submit_is_only_tried_again(reclaimed: Reclaimed) -> None:
    assert reclaimed.runner.batch.told()["met"] == {"throttle": 3}
    assert reclaimed.run.report["failures"] == 0


def test_no_secret_reaches_logs_cards_artifacts_events_or_reports(reclaimed: Reclaimed) -> None:
    """Looked for where anybody can read: Metaflow's artifacts are compressed pickles, code packages
    archives.
    """
    runner = reclaimed.runner
    told = {
        "output": reclaimed.run.output.encode(),
        "jobs": json.dumps(runner.batch.jobs()).encode(),
    }
    told |= {f"bucket: {key}": runner.content(key) for key in runner.keys("")}
    told |= {str(path): path.read_bytes() for path in runner.folder.rglob("*") if path.is_file()}
    told |= {
        str(path): path.read_bytes() for path in runner.batch.folder.rglob("*") if path.is_file()
    }
    assert any("/artifacts" in name or "data/" in name for name in told)
    secrets = [SECRET_KEY, *_PLANTED.values()]
    found = set()
    for name, content in told.items():
        if any(secret.encode() in _plain(content) for secret in secrets):
            found.add(name)
    assert not found
    # What is looked for would be found
    assert SECRET_KEY.encode() in _plain(gzip.compress(SECRET_KEY.encode()))


def _plain(content: bytes) -> bytes:
    """As it reads once unpacked."""
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            files = [archive.extractfile(member) for member in archive if member.isfile()]
            return b"\n".join(file.read() for file in files if file is not None)
    except tarfile.TarError:
        return content
