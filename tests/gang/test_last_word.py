"""Agents that leave while others wait for them: everybody hears why, and an interruption is no
failure.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import NODE_HEARTBEAT, EndReason, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.training.errors import GangError
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.membership import CoordinatorPeers, FollowerPeers
from ebbflow.training.launch.messages import GangSpec, GenerationEnd, GenerationStart, RankOrder
from ebbflow.training.launch.transport import (
    Connection,
    RollCallServer,
    StartSecret,
    control_ports,
    join_gang,
    new_nonce,
)
from tests.support.flow import wait_until
from tests.support.gangs import KNOWN, SECRET, endless_gang

START = GenerationStart(
    generation=1,
    generation_id="x",
    candidates=[],
    rendezvous_port=1,
    terms=None,
    rehearse=None,
    hosts=["a", "b"],
    nodes=[0, 1],
)
NOTICE = RankOrder(seconds=30.0, cause="spot interruption notice", node=1)


def never() -> bool:
    return False


def spec_of(folder: Path, *, nodes: int) -> GangSpec:
    run = f"run-of-{nodes}-{folder.name}"
    return GangSpec(
        job="job",
        run=run,
        attempt=0,
        node=0,
        nodes=nodes,
        processes_per_node=1,
        main_address="127.0.0.1",
        config=RunConfig(),
        store_uri=str(folder),
        prepared={},
        log_folder=str(folder),
        candidate_ports=control_ports(run, 0),
    )


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[CoordinatorPeers, FollowerPeers]]:
    """Two agents in a generation that has begun."""
    spec = spec_of(tmp_path, nodes=2)
    coordinator = CoordinatorPeers(spec, "a", SECRET)
    members = []
    thread = threading.Thread(
        target=lambda: members.append(FollowerPeers(replace(spec, node=1), "b", 10, never, **KNOWN))
    )
    thread.start()
    coordinator.roll_call(10, never)
    thread.join()
    coordinator.start(START)
    assert members[0].await_start(10) == START
    yield coordinator, members[0]
    members[0].close()
    coordinator.close()


def test_a_busy_follower_gets_the_reason_when_the_coordinator_leaves(
    pair: tuple[CoordinatorPeers, FollowerPeers],
) -> None:
    coordinator, member = pair
    last = coordinator.regroup(10, lambda: True)
    assert isinstance(last, GenerationEnd)
    coordinator.announce_end(last)
    coordinator.close()
    for _ in range(3):  # what it says now is refused, and must not cost it what it has not read yet
        member.ready()
        time.sleep(0.05)
    word = member.await_start(5)
    assert isinstance(word, GenerationEnd) and (word.reason, word.failed_as) == (
        EndReason.AGENT_STOPPED,
        "interrupted",
    )


def test_a_ready_node_that_leaves_between_generations_reports_it(
    pair: tuple[CoordinatorPeers, FollowerPeers],
) -> None:
    coordinator, member = pair
    member.ready()
    wait_until("the regrouping", lambda: coordinator.regroup(10, never) == [0, 1], timeout=60)
    member.order(NOTICE)
    member.close()
    time.sleep(0.1)
    last = coordinator.regroup(10, never)
    assert (
        isinstance(last, GenerationEnd)
        and last.failed_as == "interrupted"
        and NOTICE.cause in last.culprit
    )


def test_losing_a_machine_after_its_notice_is_an_interruption(
    pair: tuple[CoordinatorPeers, FollowerPeers],
) -> None:
    coordinator, member = pair
    member.order(NOTICE)
    member.close()
    verdict = wait_until("the verdict", coordinator.poll, timeout=60)
    assert verdict.reason == EndReason.NODE_LOST and verdict.again
    last = coordinator.regroup(10, never)
    assert isinstance(last, GenerationEnd) and last.failed_as == "interrupted"


def test_losing_a_machine_without_a_notice_is_a_failure(
    pair: tuple[CoordinatorPeers, FollowerPeers],
) -> None:
    coordinator, member = pair
    member.close()
    verdict = wait_until("the verdict", coordinator.poll, timeout=60)
    assert (verdict.reason, verdict.again, verdict.failed_as) == (
        EndReason.NODE_LOST,
        False,
        "failed",
    )


def test_a_node_that_disconnects_before_its_greeting_has_not_joined() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1]]
    lobby = RollCallServer("127.0.0.1", ports, "token", SECRET)
    with socket.create_connection(
        ("127.0.0.1", ports[0])
    ) as gone:  # a coordinator that is busy greets nobody
        gone.sendall(
            json.dumps({"kind": "hello", "nonce": new_nonce(), "node": 1, "host": "b"}).encode()
            + b"\n"
        )
    came: list[Connection] = []
    hello = {"node": 1, "host": "b"}
    thread = threading.Timer(
        0.5, lambda: came.append(join_gang("127.0.0.1", ports, "token", hello, 10, **KNOWN))
    )
    thread.start()
    connection, _ = lobby.roll_call(2, 10)[1]
    connection.receive()
    thread.join()
    assert not connection.closed and came
    lobby.close()


def test_a_roll_call_ends_when_a_joined_node_is_preempted(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, nodes=3)
    coordinator = CoordinatorPeers(spec, "a", SECRET)

    def come_and_go() -> None:
        member = FollowerPeers(replace(spec, node=1), "b", 10, never, **KNOWN)
        member.order(NOTICE)
        member.close()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    with pytest.raises(GangError, match="asked to stop"):
        coordinator.roll_call(20, never)
    assert coordinator.leave_cause == NOTICE.cause
    thread.join()
    coordinator.close()


@pytest.mark.parametrize("joined", [True, False])
def test_an_agent_preempted_before_the_start_is_interrupted_and_informs_the_coordinator(
    joined: bool, tmp_path: Path
) -> None:
    spec = endless_gang(tmp_path, survival={"standby": False})
    spec = replace(spec, candidate_ports=control_ports(f"{spec.job}/{spec.run}", spec.attempt))
    if joined:
        coordinator = CoordinatorPeers(spec, "a", SECRET)
    else:
        coordinator = None
    StartSecret(
        Store.open(spec.store_uri).sub(job_prefix(spec.job)), spec.run, spec.attempt
    ).publish(SECRET)
    gang = LocalGang(
        spec,
        tmp_path / "gang",
        tmp_path / "output.log",
        alter=lambda own: own if own.node == 1 else None,
    )
    [agent] = gang.agents
    told = tmp_path / "gang" / "node-1.result.json"
    if coordinator is not None:
        coordinator.roll_call(30, never)
    wait_until("its readiness", lambda: _catches(agent.pid, signal.SIGTERM), timeout=30)
    agent.send_signal(signal.SIGTERM)
    if coordinator is not None:
        last = coordinator.regroup(20, never)
        assert (
            isinstance(last, GenerationEnd)
            and last.failed_as == "interrupted"
            and "SIGTERM" in last.culprit
        )
        coordinator.close()
    agent.wait(30)
    assert json.loads(told.read_text())["outcome"] == "interrupted"


def test_a_node_that_waits_for_others_is_paid_for_until_its_last_sign(tmp_path: Path) -> None:
    """Of an agent that is killed nothing but its heartbeats tells how long it has cost money."""
    spec = endless_gang(tmp_path, survival={"standby": False})
    gang = LocalGang(
        spec,
        tmp_path / "gang",
        tmp_path / "output.log",
        alter=lambda own: own if own.node == 0 else None,
    )
    store = Store.open(spec.store_uri).sub(job_prefix(spec.job))
    beats = wait_until(
        "signs", lambda: [e for e in read_events(store) if e.name == NODE_HEARTBEAT], timeout=30
    )
    gang.kill()
    assert beats[-1].data["seconds"] > 0


def _catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
