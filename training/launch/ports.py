"""Where the agents of a gang meet, derived from run and attempt, so that nobody has to be told."""

from __future__ import annotations

import hashlib
import socket

# Below Linux's default ephemeral range (32768-60999), so that no outgoing connection holds one by chance.
_FIRST, _COUNT = 20_000, 12_000


def control_ports(run: str, attempt: int, *, tries: int = 8) -> list[int]:
    """Ports to try in order: the same list on every node, another one for each run and attempt."""
    digest = hashlib.sha256(f"{run}/{attempt}".encode()).digest()
    return [_FIRST + int.from_bytes(digest[2 * i : 2 * i + 2], "big") % _COUNT for i in range(tries)]


def free_port(address: str) -> int:
    """A port that was free a moment ago on this machine's `address`."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
