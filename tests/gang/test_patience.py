"""Stores that are in trouble while a gang starts: asked again within the deadline, which no attempt
is lost for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome, StoreMisconfigured, StoreUnavailable
from ebbflow.training.launch import coordinator as coordinator_module
from ebbflow.training.launch.coordinator import Coordinator
from ebbflow.training.launch.membership import FollowerPeers
from ebbflow.training.launch.messages import GangOutcome, GangSpec, GenerationEnd
from ebbflow.training.launch.node_runtime import NodeRuntime
from ebbflow.training.launch.transport import Connection, control_ports
from tests.support.flow import wait_until
from tests.support.gangs import with_settings

DONE = GenerationEnd(
    outcome=GangOutcome(outcome=Outcome.COMPLETED, step=1, generation=1), reason=Outcome.COMPLETED
)
FAILED = GenerationEnd(
    culprit="rank 0: ValueError: x", reason="rank_failed", fingerprint="x", again=True
)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[NodeRuntime]:
    cluster = {"nodes": 1, "start_deadline_seconds": 60.0}
    survival = {"standby": False, "notice_file": str(tmp_path / "notice")}
    spec = GangSpec(
        job="job",
        run="run",
        attempt=0,
        node=0,
        nodes=1,
        processes_per_node=1,
        main_address="127.0.0.1",
        config=RunConfig(store=str(tmp_path), cluster=cluster, survival=survival),
        store_uri=str(tmp_path),
        prepared={},
        log_folder=str(tmp_path / "logs"),
    )
    own = NodeRuntime(spec)
    yield own
    own.close()


def troubled(work: Callable[..., Any], times: int, error: Exception) -> Callable[..., Any]:
    """`work`, whose first calls find a store that is in trouble."""
    left = [error] * times

    def call(*arguments: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return work(*arguments, **options)

    return call


@pytest.mark.parametrize("what", ["open_generation", "reachable_commits", "read_overrides"])
@pytest.mark.parametrize("ends", [[DONE], [FAILED, DONE]])
def test_a_start_outlasts_a_store_that_refuses_for_a_while(
    ends: list[GenerationEnd], what: str, own: NodeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start as the next one: to open a generation, and to say what it restores."""
    work = getattr(coordinator_module, what)
    coming = list(ends)

    def run_ranks(*_: Any) -> GenerationEnd:
        monkeypatch.setattr(
            coordinator_module, what, troubled(work, 2, StoreUnavailable("503 SlowDown"))
        )
        return coming.pop(0)

    monkeypatch.setattr(
        coordinator_module, what, troubled(work, 2, StoreUnavailable("503 SlowDown"))
    )
    monkeypatch.setattr(own, "run_ranks", run_ranks)
    assert Coordinator(own).run() == DONE and coming == []


def test_joined_nodes_wait_while_the_first_start_reads_the_store(
    own: NodeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would give node 0 up, which may wait as long again for the nodes that are missing."""
    own.spec = spec = replace(own.spec, nodes=2, candidate_ports=control_ports("patience", 0))
    work = coordinator_module.open_generation
    send = Connection.send
    told = []

    def tell(connection: Connection, message: dict[str, Any]) -> None:
        told.append(message["kind"])
        send(connection, message)

    def slow(*arguments: Any, **options: Any) -> Any:
        wait_until("a word to who has come", lambda: "notice_wait" in told, timeout=60)
        return work(*arguments, **options)

    monkeypatch.setattr(Connection, "send", tell)
    monkeypatch.setattr(coordinator_module, "open_generation", slow)
    monkeypatch.setattr(own, "run_ranks", lambda *_: DONE)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(
            FollowerPeers, replace(spec, node=1), "b", 60, lambda: False, secret=own.secret.fetch
        )
        assert Coordinator(own).run() == DONE
        coming.result(60).close()


def test_pods_wait_for_the_machines_of_others_to_boot(
    own: NodeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(own.spec, nodes=2, candidate_ports=control_ports("boot", 0))
    spec = with_settings(
        spec, cluster={"start_deadline_seconds": 0.2, "expected_start_seconds": 60.0}
    )
    monkeypatch.setenv("METAFLOW_KUBERNETES_JOBSET_NAME", "js")
    pod = NodeRuntime(spec)
    monkeypatch.setattr(pod, "run_ranks", lambda *_: DONE)

    def join() -> FollowerPeers:
        time.sleep(0.6)
        return FollowerPeers(replace(spec, node=1), "b", 60, lambda: False, secret=pod.secret.fetch)

    try:
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(join)
            assert Coordinator(pod).run() == DONE
            coming.result(60).close()
    finally:
        pod.close()


def test_an_unusable_store_is_reported_without_a_retry(
    own: NodeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.start_seconds = 3600.0
    refused = troubled(
        coordinator_module.open_generation, 1, StoreMisconfigured("there is no bucket 'runs'")
    )
    monkeypatch.setattr(coordinator_module, "open_generation", refused)
    monkeypatch.setattr(own, "run_ranks", lambda *_: DONE)
    with pytest.raises(StoreMisconfigured, match="there is no bucket"):
        Coordinator(own).run()


def test_the_last_store_error_is_raised_at_the_deadline(
    own: NodeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.start_seconds = 0.5
    monkeypatch.setattr(
        coordinator_module,
        "reachable_commits",
        troubled(list, 1000, StoreUnavailable("503 SlowDown")),
    )
    last = Coordinator(own).run()
    assert last == replace(last, culprit="503 SlowDown", reason="store", generation=1, outcome=None)
