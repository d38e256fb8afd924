"""Agents find each other, name who is missing, and tell a stranger from a peer."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.training.errors import GangError
from ebbflow.training.launch.heartbeat import Heartbeat
from ebbflow.training.launch.membership import CoordinatorPeers, FollowerPeers
from ebbflow.training.launch.messages import GangSpec, GenerationEnd
from ebbflow.training.launch.transport import Connection, RollCallServer, control_ports, join_gang
from tests.support.gangs import KNOWN, SECRET, free_port

ROOT = Path(__file__).resolve().parents[2]


def test_ports_are_the_same_everywhere_and_differ_between_attempts() -> None:
    assert control_ports("run-1", 0) == control_ports("run-1", 0)
    assert control_ports("run-1", 0) != control_ports("run-1", 1)
    assert all(1024 < port < 32768 for port in control_ports("run-1", 0))


def test_roll_call_names_the_missing_nodes_within_its_deadline() -> None:
    ports = [free_port()]
    lobby = RollCallServer("127.0.0.1", ports, "token", SECRET)
    present = threading.Thread(
        target=join_gang,
        args=("127.0.0.1", ports, "token", {"node": 2, "host": "b"}, 5),
        kwargs=KNOWN,
    )
    present.start()
    began = time.monotonic()
    with pytest.raises(
        GangError, match=r"2 of 4 nodes joined within 1 s .* missing: node 1, node 3"
    ):
        lobby.roll_call(4, deadline_seconds=1)
    assert time.monotonic() - began < 20
    present.join()
    lobby.close()


def test_nodes_of_a_failed_roll_call_get_its_generation(tmp_path: Path) -> None:
    """It has waited for it, and is paid for: without the number it could write no log."""
    ports = control_ports("run-of-three", 0)
    spec = GangSpec(
        job="job",
        run="run-of-three",
        attempt=0,
        node=0,
        nodes=3,
        processes_per_node=1,
        main_address="127.0.0.1",
        config=RunConfig(),
        store_uri=str(tmp_path),
        prepared={},
        log_folder=str(tmp_path),
        candidate_ports=ports,
    )
    lead = CoordinatorPeers(spec, "a", SECRET)
    told = []

    def follow() -> None:
        member = FollowerPeers(replace(spec, node=1), "b", 10, lambda: False, **KNOWN)
        told.append(member.await_start(10))
        member.close()

    thread = threading.Thread(target=follow)
    thread.start()
    with pytest.raises(GangError, match="missing: node 2"):
        lead.roll_call(2, lambda: False)
    lead.announce_end(GenerationEnd(culprit="node 2 never came", reason="roll_call", generation=7))
    lead.close()
    thread.join()
    assert [(verdict.culprit, verdict.generation) for verdict in told] == [("node 2 never came", 7)]


def test_for_a_peer_that_is_gone_nothing_is_kept() -> None:
    """The lead goes on telling all nodes that a rank waits for the store, for as long as that
    takes.
    """
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = Connection(socket.create_connection(door.getsockname()))
        door.accept()[0].close()
    limit = time.monotonic() + 60
    while not near.closed and time.monotonic() < limit:
        near.keep_alive()
        near.send({"kind": "waiting"})
    assert near.closed
    for _ in range(1000):
        near.send({"kind": "waiting"})
        near.keep_alive()
    assert not near.unsent
    near.close()


def test_a_node_that_finds_no_coordinator_reports_it() -> None:
    with pytest.raises(GangError, match="node 1 could not reach node 0 within 1 s"):
        join_gang(
            "127.0.0.1",
            [free_port()],
            "token",
            {"node": 1, "host": "b"},
            deadline_seconds=1,
            **KNOWN,
        )


def test_a_taken_port_is_passed_over_by_both_sides() -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        ports = [stranger.getsockname()[1], free_port()]
        lobby = RollCallServer("127.0.0.1", ports, "token", SECRET)
        assert lobby.port == ports[1]
        stranger.close()  # refuses from now on: the node goes on to the next port
        joiner = threading.Thread(
            target=join_gang,
            args=("127.0.0.1", ports, "token", {"node": 1, "host": "b"}, 10),
            kwargs=KNOWN,
        )
        joiner.start()
        assert set(lobby.roll_call(2, deadline_seconds=10)) == {1}
        joiner.join()
        lobby.close()


def test_an_agent_of_another_job_is_sent_away() -> None:
    ports = [free_port()]
    lobby = RollCallServer("127.0.0.1", ports, "ours", SECRET)
    errors: list[BaseException] = []

    def other() -> None:
        try:
            join_gang(
                "127.0.0.1", ports, "theirs", {"node": 1, "host": "b"}, deadline_seconds=1, **KNOWN
            )
        except GangError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(GangError, match="missing: node 1"):
        lobby.roll_call(2, deadline_seconds=2)
    thread.join()
    lobby.close()
    assert "another program listens there" in str(errors[0])


def test_messages_cross_and_a_closed_end_is_noticed() -> None:
    ports = [free_port()]
    lobby = RollCallServer("127.0.0.1", ports, "t", SECRET)
    ends: list = []
    thread = threading.Thread(
        target=lambda: ends.append(
            join_gang(
                "127.0.0.1", ports, "t", {"node": 1, "host": "b"}, deadline_seconds=5, **KNOWN
            )
        )
    )
    thread.start()
    connection, hello = lobby.roll_call(2, deadline_seconds=5)[1]
    thread.join()
    assert hello["host"] == "b"
    ends[0].send({"kind": "failed", "text": "x" * 100_000})
    limit = time.monotonic() + 60
    messages: list = []
    while not messages and time.monotonic() < limit:
        messages = connection.receive()
    assert messages[0]["kind"] == "failed" and len(messages[0]["text"]) == 100_000
    ends[0].close()
    while not connection.closed and time.monotonic() < limit:
        connection.receive()
    assert connection.closed == "connection closed"
    lobby.close()


def test_evidence_of_any_size_arrives_whole_though_the_peer_reads_late() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = Connection(socket.create_connection(door.getsockname()))
        far = Connection(door.accept()[0])
    evidence = [{"kind": "failed", "stack": "x" * 300_000, "number": number} for number in range(4)]
    for message in evidence:
        near.send(message)
    heard: list[dict] = []
    limit = time.monotonic() + 60
    while len(heard) < len(evidence) and time.monotonic() < limit:
        heard += far.receive()
        near.keep_alive()
        near.receive()
    assert heard == evidence and not near.closed
    far.close()
    while not near.closed and time.monotonic() < limit:
        near.send(evidence[0])
    assert near.closed
    near.close()


def test_heartbeat_carries_progress(tmp_path) -> None:
    agent_side = Heartbeat.create(tmp_path / "beat")
    worker_side = Heartbeat(tmp_path / "beat")
    before = time.monotonic()
    worker_side.beat(17, "backward")
    beat = agent_side.read()
    assert (beat.step, beat.phase) == (17, "backward")
    assert before <= beat.t_mono <= time.monotonic()


def test_a_heartbeat_is_never_read_half_written(tmp_path) -> None:
    """An agent that reads half a beat sees a rank that has been silent since the machine started,
    and kills it.
    """
    agent_side = Heartbeat.create(tmp_path / "beat")
    code = (
        "import sys, time; from pathlib import Path; from ebbflow.training.launch.heartbeat "
        "import Heartbeat\nbeat = Heartbeat(Path(sys.argv[1])); end = time.monotonic() + 2; step "
        "= 0\nwhile time.monotonic() < end: step += 1; beat.beat(step, 'forward')"
    )
    before = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "beat")], cwd=ROOT) as writer:
        reads = 0
        while writer.poll() is None:
            beat = agent_side.read()
            assert before - 1 <= beat.t_mono <= time.monotonic()
            reads += 1
    assert writer.returncode == 0 and reads > 1000 and agent_side.read().step > 1000
