"""The process that submits an attempt to Kubernetes, on the local cluster: what it sends, deletes and records."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="module")
def three(running: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Submitted, int, str]]:
    """Three attempts at once, each of two nodes, by the name of what happens to them."""
    running.change(pools=[{"name": "spot", "size": 9}], faults=[{"path": "POST .*jobsets", "status": 429, "times": 1}])
    asked: dict[str, dict[str, Any]] = {"outage": {}, "lost": {"node_replacements": 1}, "tainted": {}}
    made = {
        name: Submitted(running, tmp_path_factory.mktemp(name), 2, "sleep 14", **values)
        for name, values in asked.items()
    }
    workers = {name: one.pods(2)[1]["spec"]["nodeName"] for name, one in made.items()}
    running.change(down=True)
    time.sleep(2)  # a look of each submitter and one of Metaflow's
    running.change(down=False)
    running.ask("lose", {"node": workers["lost"]})
    running.ask("notice", {"node": workers["tainted"]})
    return {name: (one, *one.finish()) for name, one in made.items()}


def pods_of(three: dict[str, Any], name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The recorded end of an attempt, and the pods that it had."""
    submitted = three[name][0]
    [ended] = submitted.events("batch_attempt")
    past = [one for one in submitted.cluster.past()["pods"] if one["pod"].startswith(f"{ended['job_name']}-")]
    return ended, sorted(past, key=lambda one: one["started"])


def test_an_outage_and_throttling_change_nothing(three: dict[str, Any]) -> None:
    _, code, output = three["outage"]
    assert code == 0 and output.splitlines()[-1] == "succeeded" and "training continues" in output, output
    ended, past = pods_of(three, "outage")
    assert ended["cause"] == "ended" and ended["status"] == "SUCCEEDED"
    for (start, stop), one in zip(sorted(ended["node_times"]), past, strict=True):
        assert abs(start - one["started"]) <= 1.5 and abs(stop - one["ended"]) <= 1.5, "whole seconds"


def test_a_lost_worker_is_replaced_alone_and_metaflow_sees_no_failure(three: dict[str, Any]) -> None:
    _, code, output = three["lost"]
    assert code == 0 and output.splitlines()[-1] == "succeeded", output
    ended, past = pods_of(three, "lost")
    assert ended["cause"] == "ended" and len(past) == 3
    assert sorted(one["exit_code"] is None for one in past) == [False, False, True]
    assert len([one for one in past if "-control-" in one["pod"]]) == 1, "node 0's pod ran on"


def test_a_pod_whose_node_is_announced_to_go_is_evicted(three: dict[str, Any]) -> None:
    _, _, output = three["tainted"]
    assert output.splitlines()[-1] == "failed" and "taken away (karpenter.sh/disrupted)" in output, output
    ended, _ = pods_of(three, "tainted")
    assert ended["cause"] == "reclaimed"
