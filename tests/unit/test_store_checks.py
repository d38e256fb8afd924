"""The preflight does in a store what a job will do there, and names what is missing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.preflight import CheckResult, PreflightContext, run_checks
from ebbflow.infra.checks import CHECKS
from tests.support.faulty_s3 import Fault, closed_port, faulty_s3, swallowing_port
from tests.support.flow import FlowRunner
from tests.support.swift import Swift
from tests.support.swift_server import OTHER_KEY

STORE_CHECKS = ("store-probe", "store-multipart", "store-clock")


def results(store: str, folder: Path, *ids: str) -> dict[str, CheckResult]:
    context = PreflightContext(config=RunConfig(store=store), project_root=folder)
    wanted = [check for check in CHECKS if check.id in (ids or STORE_CHECKS)]
    return {result.id: result for result in run_checks(wanted, context)}


@pytest.fixture
def bucket(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in swift.environment().items():
        monkeypatch.setenv(name, value)
    return swift.new_bucket()


@pytest.fixture
def endpoint_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    yield lambda endpoint: monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)


def test_a_good_bucket_passes_and_is_left_as_it_was(
    swift: Swift, bucket: str, tmp_path: Path
) -> None:
    found = results(f"s3://{bucket}/prefix", tmp_path)
    assert {result.status for result in found.values()} == {"passed"}, found
    assert "put, list, get, delete of 4096 bytes" in found["store-probe"].detail
    client = swift.client()
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)


def test_wrong_keys_fail_with_their_fix(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    found = results(f"s3://{bucket}", tmp_path, "store-probe")["store-probe"]
    assert found.status == "failed" and "SignatureDoesNotMatch" in found.detail
    assert found.fix and "AWS_SECRET_ACCESS_KEY" in found.fix


def test_a_user_without_permissions_gets_their_names(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OTHER_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "reading")
    found = results(f"s3://{bucket}", tmp_path)
    assert found["store-probe"].status == "failed" and "s3:PutObject" in str(
        found["store-probe"].fix
    )
    assert found["store-multipart"].status == "warning" and "s3:PutObject" in str(
        found["store-multipart"].fix
    )


def test_missing_rights_are_named_together(
    endpoint_of: Callable[[str], None], tmp_path: Path
) -> None:
    """List and get are GET; delete is POST. Nothing of this is allowed but put."""
    with faulty_s3(Fault(403, "AccessDenied", only=frozenset({"GET", "POST"}))) as endpoint:
        endpoint_of(endpoint)
        found = results("s3://bucket", tmp_path, "store-probe")["store-probe"]
    assert found.status == "failed" and found.detail == "s3://bucket: forbidden: list, get, delete"
    assert found.fix == "allow s3:ListBucket, s3:GetObject, s3:DeleteObject there"


@pytest.mark.parametrize(
    ("ahead_seconds", "words"),
    [
        (7200, r"clock is 7,\d{3} s behind .*signed requests are refused"),
        (-120, r"clock is 1[12]\d s ahead of"),
    ],
)
def test_a_wrong_clock_is_reported(
    endpoint_of: Callable[[str], None], tmp_path: Path, ahead_seconds: float, words: str
) -> None:
    with faulty_s3(Fault(403, clock_seconds=ahead_seconds)) as endpoint:
        endpoint_of(endpoint)
        found = results("s3://bucket", tmp_path, "store-clock")["store-clock"]
    assert found.status == "warning"
    assert re.search(words, found.detail), found.detail


def test_a_clock_that_cannot_be_asked_is_no_pass(
    endpoint_of: Callable[[str], None], tmp_path: Path
) -> None:
    endpoint_of(closed_port())
    found = results("s3://bucket", tmp_path, "store-clock")["store-clock"]
    assert found.status == "skipped" and found.detail.startswith(
        "skipped, because http://127.0.0.1:"
    )


@pytest.mark.parametrize("away", ["refused", "swallowed"])
@pytest.mark.slow
def test_a_store_that_is_away_stops_the_run_in_preflight(tmp_path: Path, away: str) -> None:
    """With exit code 3, before anything is written, and long before a task would have been started."""
    runner = FlowRunner(tmp_path, store="s3://bucket/prefix")
    runner.environment |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    began = time.monotonic()
    with swallowing_port() as endpoint:
        if away == "swallowed":
            runner.environment["AWS_ENDPOINT_URL"] = endpoint
        else:
            runner.environment["AWS_ENDPOINT_URL"] = closed_port()
        run = runner.run("run", *runner.options(), timeout=200)
    assert run.exit_code == 3, run.output
    assert time.monotonic() - began < 60
    assert ("connection refused by" if away == "refused" else "no connection to") in run.output
    assert "Traceback" not in run.output and "Task is starting" not in run.output
    assert not (tmp_path / "runs" / "latest").exists()
