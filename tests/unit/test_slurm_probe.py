"""The probe of Slurm's nodes, where other programs use its port."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ebbflow.core.errors import ObjectNotFound
from ebbflow.core.store import Store
from ebbflow.infra.slurm.environment import SlurmTask
from ebbflow.infra.slurm.probe import probe_node

KEY = "probes/1"


def task(node: int) -> SlurmTask:
    return SlurmTask(
        job_id="1",
        step_id=0,
        rank=node,
        world_size=2,
        node=node,
        local_rank=0,
        tasks_on_node=1,
        nodes=("localhost", "localhost"),
    )


def read_address(store: Store) -> tuple[str, int]:
    for _ in range(200):
        try:
            address, port = json.loads(store.get(f"{KEY}/address"))
            return address, port
        except ObjectNotFound:
            time.sleep(0.01)
    raise AssertionError("node 0 wrote no address")


def test_a_strangers_connection_is_no_node(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(probe_node, task(0), store, KEY)
        address = read_address(store)
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        socket.create_connection(address).close()
        second = probe_node(task(1), store, KEY)
    assert (first.result().problem, second.problem) == ("", "")
    assert abs(second.clock_seconds) < 5.0


def test_a_peer_that_closes_early_is_a_problem_of_the_node(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        store.put(f"{KEY}/address", json.dumps(listener.getsockname()).encode())
        probe = pool.submit(probe_node, task(1), store, KEY)
        connection, _ = listener.accept()
        with connection:
            connection.recv(100)
    assert "closed, or answered without a clock" in probe.result().problem
