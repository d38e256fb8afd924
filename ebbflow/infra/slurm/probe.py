"""Short Slurm job that checks whether the nodes can run a gang (`slurm.probe`).

    python -m ebbflow.infra.slurm.probe STORE KEY

`srun` starts one such task per node. Node 0 listens on a port of the agents' range and writes its
address into the store below KEY. Every other node reads this address, which proves that the store
is shared. It then connects to node 0 and compares the clocks. Each task prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ebbflow.core.errors import InfraError, ObjectNotFound
from ebbflow.core.process import AGENT_PORTS, die_with_parent
from ebbflow.core.program import begin_program
from ebbflow.core.store import Store
from ebbflow.infra.slurm.environment import SlurmTask, first_address

_SECONDS = 40.0  # for the other nodes to start and to connect
_GREETING_SECONDS = 2.0  # a node sends it at once
_LOOK_SECONDS = 0.2
_TRIED_PORTS = 8


@dataclass(frozen=True, kw_only=True)
class NodeProbe:
    """Result of the probe on one node."""

    node: int
    name: str
    problem: str = ""  # why it cannot be part of a gang, or ""
    clock_seconds: float = 0.0  # its clock's lead over node 0's
    clock_error_seconds: float = 0.0  # half of the round trip, within which the lead is known


def read_probes(output: str) -> list[NodeProbe]:
    """Parse the nodes' results from the output of srun, in the order of the nodes."""
    probes = []
    for line in output.splitlines():
        if line.startswith("{"):
            probes.append(NodeProbe(**json.loads(line)))
    return sorted(probes, key=lambda probe: probe.node)


def probe_node(task: SlurmTask, store: Store, key: str) -> NodeProbe:
    """Test this node's access to the store and network, and compare its clock with node 0's."""
    name = socket.gethostname()
    try:
        if task.node == 0:
            _serve(task, store, key)
            return NodeProbe(node=0, name=name)
        lead, error = _ask(task, store, key)
    except (OSError, InfraError) as error:
        return NodeProbe(node=task.node, name=name, problem=str(error))
    return NodeProbe(node=task.node, name=name, clock_seconds=lead, clock_error_seconds=error)


def main(argv: Sequence[str]) -> int:
    die_with_parent()
    uri, key = argv
    task = SlurmTask.from_environment(os.environ)
    if task is None:
        print("no task of Slurm; preflight starts this with slurm.probe", file=sys.stderr)
        return 2
    found = probe_node(task, Store.open(uri), key)
    print(json.dumps(asdict(found)), flush=True)
    return 0


def _serve(task: SlurmTask, store: Store, key: str) -> None:
    """Send this node's clock to every other node that connects and sends the key.

    Connections that do not send the key are ignored.

    Raises:
        OSError: a node did not connect.
        InfraError: the store cannot be written.
    """
    address = first_address(task.nodes)
    with _bind() as listener:
        listener.listen(len(task.nodes))
        port = listener.getsockname()[1]
        store.put(f"{key}/address", json.dumps([address, port]).encode())
        limit = time.monotonic() + _SECONDS
        count = 0
        while count < len(task.nodes) - 1:
            listener.settimeout(max(0.1, limit - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise OSError(
                    f"{count} of {len(task.nodes) - 1} nodes connected to {address}:{port} "
                    f"within {_SECONDS:g} s"
                ) from None
            with connection:
                if _answer(connection, f"{key}\n".encode()):
                    count += 1


def _answer(connection: socket.socket, greeting: bytes) -> bool:
    """Send this node's clock if the peer sends the expected greeting. Return whether it did."""
    connection.settimeout(_GREETING_SECONDS)
    try:
        if connection.makefile("rb").readline(len(greeting)) != greeting:
            return False
        connection.sendall(f"{time.time():.6f}\n".encode())
    except OSError:
        return False
    return True


def _bind() -> socket.socket:
    """Bind a random port of the agents' range. Raises OSError after several failed tries."""
    problem: OSError | None = None
    for port in random.sample(AGENT_PORTS, _TRIED_PORTS):
        try:
            return socket.create_server(("", port))
        except OSError as error:
            problem = error
    assert problem is not None
    raise problem


def _ask(task: SlurmTask, store: Store, key: str) -> tuple[float, float]:
    """Return how far this clock is ahead of node 0's, and the error of this value, both in seconds.

    Raises:
        OSError: node 0 cannot be reached, or its address is not in the store.
        InfraError: the store cannot be read.
    """
    limit = time.monotonic() + _SECONDS
    while True:
        try:
            address, port = json.loads(store.get(f"{key}/address"))
            break
        except ObjectNotFound:
            if time.monotonic() > limit:
                raise OSError(
                    f"the store has not what {task.nodes[0]} wrote {_SECONDS:g} s ago: it is not "
                    "shared, or that node cannot write it"
                ) from None
        time.sleep(_LOOK_SECONDS)
    where = f"{address}:{port} of {task.nodes[0]}"
    try:
        with socket.create_connection((address, port), timeout=_SECONDS / 4) as connection:
            sent = time.time()
            connection.sendall(f"{key}\n".encode())
            clock = float(connection.makefile().readline())
            received = time.time()
    except OSError as error:
        raise OSError(f"cannot reach port {where}: {error}") from error
    except ValueError as error:
        raise OSError(f"port {where} closed, or answered without a clock: {error}") from error
    middle = (sent + received) / 2
    return middle - clock, (received - sent) / 2


if __name__ == "__main__":
    begin_program()
    sys.exit(main(sys.argv[1:]))
