"""The process that submits an attempt to Kubernetes, on the local cluster: what it sends, deletes and records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kubernetes.attempt import Submitted
from tests.support.kubernetes.fixture import LocalCluster, local_cluster


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with local_cluster(tmp_path_factory.mktemp("cluster"), lost_seconds=0.5) as cluster:
        yield cluster


def test_a_refused_create_is_one_line_and_the_jobs_outcome(running: LocalCluster, tmp_path: Path) -> None:
    running.change(quota={"count/jobsets.jobset.x-k8s.io": 0})
    try:
        submitted = Submitted(running, tmp_path, 2, "true")
        code, output = submitted.finish()
    finally:
        running.change(quota={})
    assert code == 202, output
    assert "exceeded quota" in output and "Traceback" not in output and len(output.splitlines()) == 1
    [outcome] = submitted.events("outcome")
    assert outcome["outcome"] == "failed" and "exceeded quota" in outcome["message"]


def test_what_never_starts_is_deleted_and_the_last_attempt_says_so(running: LocalCluster, tmp_path: Path) -> None:
    pools = [{"name": "other", "market": "on-demand"}]
    running.change(pools=pools)
    try:
        submitted = Submitted(running, tmp_path, 2, "true", runnable_seconds=1, last=True)
        code, output = submitted.finish()
    finally:
        running.change(pools=[{"name": "spot"}, *pools])
    assert code != 0 and "for capacity" in output
    [ended] = submitted.events("batch_attempt")
    assert ended["cause"] == "never_started" and ended["started_utc"] is None
    assert [one["outcome"] for one in submitted.events("outcome")] == ["no_capacity"]
    assert running.items("jobsets") == [] or ended["job_name"] not in json.dumps(running.items("jobsets"))
