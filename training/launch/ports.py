"""Where the agents of a gang meet, derived from run and attempt, so that nobody has to be told."""

from __future__ import annotations

import hashlib
import ipaddress
import socket

from ebbflow.training.errors import GangError

# Below Linux's default ephemeral range (32768-60999), so that no outgoing connection holds one by chance.
_FIRST, _COUNT = 20_000, 12_000


def control_ports(run: str, attempt: int, *, tries: int = 8) -> list[int]:
    """Ports to try in order: the same list on every node, another one for each run and attempt."""
    digest = hashlib.sha256(f"{run}/{attempt}".encode()).digest()
    return [_FIRST + int.from_bytes(digest[2 * i : 2 * i + 2], "big") % _COUNT for i in range(tries)]


def rendezvous_port(address: str, run: str, attempt: int) -> int:
    """The first free port for torch's store, from a list of its own for each run and attempt.

    Node 0 looks and tells the others. Raises GangError when none of the list is free.
    """
    ports = control_ports(f"{run}/rendezvous", attempt)
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise GangError(f"none of the rendezvous ports {ports} is free on this machine")


def on_loopback(host: str) -> bool:
    """Whether `host`, as it is written, is this machine's loopback address: the gang is on this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
