"""The process that submits an attempt to Kubernetes, on the local cluster: what it sends, deletes
and records.
"""

from __future__ import annotations

import copy
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.errors import Outcome
from ebbflow.flows.attempts.order import StopOrder, SubmitOrder
from ebbflow.flows.attempts.pod_submission import PodSubmission
from ebbflow.infra.kubernetes.answers import Owner
from ebbflow.infra.kubernetes.cluster import AttemptWatch, Cluster, describe_attempts, end_attempt
from tests.support.flow import wait_until
from tests.support.kubernetes.attempt import Submitted
from tests.support.kubernetes.fixture import LocalCluster, local_cluster

kubernetes = pytest.importorskip("kubernetes")

SAVING = "trap 'sleep 2; exit 1' TERM; sleep 60 & wait"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with local_cluster(tmp_path_factory.mktemp("cluster"), lost_seconds=0.5) as cluster:
        yield cluster


def test_a_refused_create_is_one_line_and_the_jobs_outcome(
    running: LocalCluster, tmp_path: Path
) -> None:
    running.change(quota={"count/jobsets.jobset.x-k8s.io": 0})
    try:
        submitted = Submitted(running, tmp_path, 2, "true")
        code, output = submitted.finish()
    finally:
        running.change(quota={})
    assert code == 202, output
    assert (
        "exceeded quota" in output and "Traceback" not in output and len(output.splitlines()) == 1
    )
    [outcome] = submitted.events("outcome")
    assert outcome["outcome"] == "no_capacity" and "exceeded quota" in outcome["message"]
    assert outcome["message"].endswith(
        "; fix: end other jobs, or raise the namespace's ResourceQuota"
    )


@pytest.mark.parametrize(
    ("status", "message", "stops"),
    [
        (400, 'admission webhook "validate.kyverno.svc-fail" denied the request: no limits', True),
        (400, "dry run is not supported", False),
    ],
)
def test_pods_that_an_admission_webhook_denies_are_not_submitted(
    running: LocalCluster,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    message: str,
    stops: bool,
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig()))
    fault = {"path": "POST .*/pods$", "status": status, "reason": "BadRequest", "message": message}
    running.change(faults=[fault])
    container = {"name": "main", "image": "ebbflow:local"}
    body = {"spec": {"template": {"spec": {"containers": [container]}}}}
    stop = PodSubmission(None)._refused_pod(body, "jobs")
    assert (stop is not None) is stops
    if stop is not None:
        assert stop.outcome is Outcome.FAILED and message in stop.message


def test_an_order_to_stop_is_the_jobs_outcome_and_submits_nothing(tmp_path: Path) -> None:
    message = "two images in a row cannot be pulled"
    order = SubmitOrder(
        job="job",
        run="1",
        step="train",
        task="5",
        attempt=2,
        store=str(tmp_path / "store"),
        stop=StopOrder(outcome=Outcome.FAILED, message=message),
    )
    with pytest.raises(SystemExit) as ended:
        PodSubmission(order).listen()
    assert ended.value.code == 202, "Metaflow does not try again"
    outcome_lines = []
    for path in tmp_path.rglob("*.jsonl"):
        outcome_lines += [line for line in path.read_text().splitlines() if "outcome" in line]
    [line] = outcome_lines
    assert json.loads(line)["data"] == {
        "outcome": "failed",
        "message": "two images in a row cannot be pulled",
    }


def test_pods_that_never_start_are_deleted_and_the_last_attempt_reports_it(
    running: LocalCluster, tmp_path: Path
) -> None:
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
    assert [event["outcome"] for event in submitted.events("outcome")] == ["no_capacity"]
    assert running.items("jobsets") == [] or ended["job_name"] not in json.dumps(
        running.items("jobsets")
    )


@pytest.fixture(scope="module")
def three(
    running: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Submitted, int, str]]:
    """Five attempts at once, each of two nodes, by the name of what happens to them."""
    running.change(
        pools=[{"name": "spot", "size": 12}],
        faults=[{"path": "POST .*jobsets", "status": 429, "times": 1}],
    )
    asked: dict[str, dict[str, Any]] = {
        "outage": {},
        "lost": {"node_replacements": 1},
        "tainted": {},
        "left": {},
        "deleted": {},
    }
    gate = tmp_path_factory.mktemp("gate") / "open"
    made = {
        name: Submitted(
            running,
            tmp_path_factory.mktemp(name),
            2,
            f"until [ -e {gate} ]; do sleep 0.1; done",
            **values,
        )
        for name, values in asked.items()
    }
    workers = {name: submission.pods(2)[1]["spec"]["nodeName"] for name, submission in made.items()}
    running.change(down=True)
    time.sleep(2)  # a look of each submitter and one of Metaflow's
    running.change(down=False)
    running.ask("lose", {"node": workers["lost"]})
    running.ask("notice", {"node": workers["tainted"]})
    made["left"].process.send_signal(signal.SIGTERM)
    [submit] = made["deleted"].events("batch_submitted")
    Cluster(kubernetes.config.new_client_from_config(str(running.kubeconfig()))).delete(
        submit["job_id"]
    )
    ended = {name: made[name].finish() for name in ("left", "tainted", "deleted")}
    made["lost"].pods(2)  # with the replacement
    gate.touch()
    return {
        name: (submission, *(ended.get(name) or submission.finish()))
        for name, submission in made.items()
    }


def pods_of(three: dict[str, Any], name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The recorded end of an attempt, and the pods that it had."""
    submitted = three[name][0]
    [ended] = submitted.events("batch_attempt")
    past = [
        pod
        for pod in submitted.cluster.past()["pods"]
        if pod["pod"].startswith(f"{ended['job_name']}-")
    ]
    return ended, sorted(past, key=lambda one: one["started"])


def test_an_outage_and_throttling_change_nothing(three: dict[str, Any]) -> None:
    _, code, output = three["outage"]
    assert (
        code == 0 and output.splitlines()[-1] == "succeeded" and "training continues" in output
    ), output
    ended, past = pods_of(three, "outage")
    assert ended["cause"] == "ended" and ended["status"] == "SUCCEEDED"
    for (start, stop), pod in zip(sorted(ended["node_times"]), past, strict=True):
        assert abs(start - pod["started"]) <= 1.5 and abs(stop - pod["ended"]) <= 1.5, (
            "whole seconds"
        )


def test_a_lost_worker_is_replaced_alone_and_metaflow_sees_no_failure(
    three: dict[str, Any],
) -> None:
    _, code, output = three["lost"]
    assert code == 0 and output.splitlines()[-1] == "succeeded", output
    ended, past = pods_of(three, "lost")
    assert ended["cause"] == "ended" and len(past) == 3
    assert sorted(pod["exit_code"] is None for pod in past) == [False, False, True]
    assert len([pod for pod in past if "-control-" in pod["pod"]]) == 1, "node 0's pod ran on"


def test_a_launcher_that_is_asked_to_leave_deletes_its_pods_and_waits_for_their_end(
    three: dict[str, Any],
) -> None:
    submitted, code, output = three["left"]
    assert code == 128 + signal.SIGTERM, output
    ended, past = pods_of(three, "left")
    assert ended["cause"] == "terminated", (ended, output)
    assert len(ended["node_times"]) == len(past) == 2
    assert ended["terminated_by"] == "ebbflow"
    assert not [
        pod
        for pod in submitted.cluster.items("pods")
        if ended["job_name"] in pod["metadata"]["name"]
    ]


def test_a_jobset_that_is_deleted_from_outside_has_an_unknown_author(
    three: dict[str, Any],
) -> None:
    ended, _ = pods_of(three, "deleted")
    assert (ended["cause"], ended["terminated_by"]) == ("terminated", "unknown")
    assert "it was deleted from outside of this run" in ended["reason"]


def test_a_pod_whose_node_is_announced_to_go_is_evicted(three: dict[str, Any]) -> None:
    _, _, output = three["tainted"]
    assert (
        output.splitlines()[-1] == "failed" and "taken away (karpenter.sh/disrupted)" in output
    ), output
    ended, _ = pods_of(three, "tainted")
    assert ended["cause"] == "reclaimed"


def submit(cluster: Cluster, name: str, command: str = SAVING) -> str:
    """Create a JobSet of a control and a worker, without Metaflow, and return its id."""
    container: dict[str, Any] = {
        "name": "main",
        "image": "ebbflow:local",
        "command": ["bash", "-c", command],
    }
    container["resources"] = {"requests": {"cpu": "1"}}
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    pod = {"restartPolicy": "Never", "containers": [container], "tolerations": [toleration]}
    pod |= {
        "nodeSelector": {"karpenter.sh/capacity-type": "spot"},
        "terminationGracePeriodSeconds": 20,
    }
    job = {
        "spec": {"backoffLimit": 0, "parallelism": 1, "completions": 1, "template": {"spec": pod}}
    }
    replicated = [{"name": role, "replicas": 1, "template": job} for role in ("control", "worker")]
    body = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}}
    made = kubernetes.client.CustomObjectsApi(
        cluster._core.api_client
    ).create_namespaced_custom_object
    made(
        "jobset.x-k8s.io",
        "v1alpha2",
        "ebbflow",
        "jobsets",
        {**body, "spec": {"replicatedJobs": replicated}},
    )
    return f"ebbflow/jobsets/{name}"


def test_a_jobset_that_is_deleted_between_two_answers_has_lost_no_node(
    running: LocalCluster,
) -> None:
    class SlowAnswers(Cluster):
        """The JobSet is deleted, and its nodes are removed, before the owner is read."""

        def owner(self, job_id: str) -> Owner | None:
            for pod in watch.pods.values():
                self.delete(job_id)
                wait_until("the node is removed", lambda name=pod.machine: self.has_lost(name), 30)
            return super().owner(job_id)

    client = kubernetes.config.new_client_from_config(str(running.kubeconfig()))
    running.change(pools=[{"name": "spot", "size": 9}])
    watch = AttemptWatch(submit(Cluster(client), "between", "trap exit TERM; sleep 60 & wait"), 2)

    def has_begun() -> bool:
        watch.look(Cluster(client), time.time())
        return len([pod for pod in watch.pods.values() if pod.started]) == 2

    wait_until("the pods", has_begun, 30)
    watch.look(SlowAnswers(client), time.time())
    watch.end(Cluster(client), time.monotonic() + 30)
    assert watch.over and watch.cause(None) == "terminated"


def test_the_ends_that_a_launcher_sees_late_are_billed_to_the_second(
    running: LocalCluster,
) -> None:
    """One reading before and one after: a drain, a deletion, a launcher that is gone, and a gang
    that fails.
    """
    cluster = Cluster(kubernetes.config.new_client_from_config(str(running.kubeconfig())))
    running.change(pools=[{"name": "spot", "size": 9}])
    names = ("drained", "deleted", "left", "failed")
    ids = {
        name: submit(cluster, name, "sleep 3; exit 1" if name == "failed" else SAVING)
        for name in names
    }
    watches = {name: AttemptWatch(job_id) for name, job_id in ids.items()}

    def look(name: str) -> AttemptWatch:
        watches[name].look(cluster, time.time())
        return watches[name]

    def begun(name: str) -> bool:
        return len([pod for pod in look(name).pods.values() if pod.started]) == 2

    for name in ("drained", "deleted", "left"):
        wait_until("the pods", lambda name=name: begun(name), 30)
    late = {name: copy.deepcopy(watches[name]) for name in ("drained", "deleted")}
    running.ask("evict", {"pod": next(pod for pod in watches["drained"].pods if "worker" in pod)})
    cluster.delete(ids["deleted"])
    look("drained")
    assert [pod.lost for pod in watches["drained"].pods.values() if pod.ended is None].count(
        True
    ) == 1, "it saves"
    ends = {"left": end_attempt(ids["left"], cluster, 30)}  # by the next launcher
    wait_until("all have ended", lambda: all(look(name).over for name in names), 30)
    ends |= {name: watches[name].attempt(now=time.time() + 99) for name in names if name != "left"}
    for name, watch in late.items():
        watch.look(cluster, time.time() + 99)
        ends[f"{name}, read after its pods' removal"] = watch.attempt(now=time.time() + 99)
    assert {name.partition(",")[0]: end.cause for name, end in ends.items()} == {
        "drained": "reclaimed",
        "deleted": "terminated",
        "left": "terminated",
        "failed": "user_code",
    }
    running.change(quota={"requests.cpu": 0})
    watches["refused"] = AttemptWatch(submit(cluster, "refused"))
    try:
        wait_until(
            "the quota is named", lambda: "requests.cpu=1, used" in look("refused").waiting, 30
        )
        assert watches["refused"].waiting.endswith(
            "; fix: end other jobs, or raise the namespace's ResourceQuota"
        )
    finally:
        running.change(quota={})
        cluster.delete(watches["refused"].job_id)
    told = describe_attempts(list(ids.values()), cluster, now=time.time() + 99)
    assert {name for name in names if ids[name] in told} == {"drained", "failed"}
    assert (
        told[ids["failed"]].node_times == ends["failed"].node_times
        and told[ids["drained"]].nodes == 2
    )
    past = running.past()["pods"]
    for name, attempt in ends.items():
        mine = sorted(
            (pod for pod in past if pod["pod"].startswith(f"{name.partition(',')[0]}-")),
            key=lambda one: one["pod"],
        )
        for (start, stop), pod in zip(attempt.node_times, mine, strict=True):
            assert start == pytest.approx(pod["started"], abs=1) and stop == pytest.approx(
                pod["ended"], abs=1
            ), name
