"""Direct TCP connections between the ranks of a CPU gang, to exchange short rows of numbers.

Every step waits for the step sync, which exchanges a few hundred bytes. gloo's all-gather passes
them to another thread and back, which takes 0.5 ms on a machine where waking a thread is slow. A
socket needs a tenth of that time (`ebbflow bench overhead`).

Every rank has one connection to every other rank. A gang of more than `MOST_RANKS` uses the
all-gather instead.
"""

import hmac
import ipaddress
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

from ebbflow.training.compat import Store
from ebbflow.training.errors import RendezvousError

MOST_RANKS = 16
# Fits into the buffers of a connection, so all ranks can write before they read
LARGEST_ROW_BYTES = 4096
_HELLO = struct.Struct("!I16s")  # rank, token of the gang
_HEAD = struct.Struct("!QI")  # number of the exchange, number of bytes that follow
_HELLO_SECONDS = 5.0
_MOST_CALLERS = 64  # connections that have not sent the token yet
_LOOK_SECONDS = 0.5
_BACKLOG = 256


class PeerSockets:
    """One rank's connections to all other ranks. Each exchange has a deadline of `seconds`."""

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], seconds: float) -> None:
        self._rank = rank
        self._peers = dict(sorted(peers.items()))
        self._seconds = seconds
        self._number = 0
        for peer in self._peers.values():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(seconds)

    def gather(self, row: bytes) -> bytes:
        """Return the rows of all ranks, in rank order.

        All rows must have the same length. Collective.

        Raises RuntimeError if a connection breaks, a rank does not answer in time, or the ranks are
        at different exchanges.
        """
        self._number += 1
        message = _HEAD.pack(self._number, len(row)) + row
        for rank in self._peers:
            self._tell(rank, message)
        rows: list[bytes | memoryview] = []
        for rank in self._peers:  # no comprehension: its frame would hide where the rank waits
            rows.append(self._hear(rank, message))
        rows.insert(self._rank, row)
        return b"".join(rows)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _tell(self, rank: int, message: bytes) -> None:
        try:
            self._peers[rank].sendall(message)
        except OSError as error:
            self._lost(rank, error)

    def _hear(self, rank: int, own: bytes) -> memoryview:
        peer = self._peers[rank]
        message = memoryview(bytearray(len(own)))
        head = own[: _HEAD.size]
        try:
            # Usually reads the whole message, which saves a system call
            come = _read(peer, message, len(head))
            if message[: len(head)] == head:
                _read(peer, message[come:], len(own) - come)
        except OSError as error:
            self._lost(rank, error)
        if message[: len(head)] != head:
            (number, size) = _HEAD.unpack(message[: len(head)])
            (own_number, own_size) = _HEAD.unpack(head)
            raise RuntimeError(
                f"rank {rank} called another exchange: its number {number} of {size} bytes, "
                f"where rank {self._rank} is at number {own_number} of {own_size} bytes"
            )
        return message[len(head) :]

    def _lost(self, rank: int, error: OSError) -> NoReturn:
        if isinstance(error, TimeoutError):
            text = f"timed out waiting {self._seconds:g} s for rank {rank}"
        else:
            text = f"connection closed by peer: rank {rank} ({error})"
        raise RuntimeError(f"exchange {self._number} of rank {self._rank}: {text}") from error


def connect_peers(
    store: Store,
    rank: int,
    world_size: int,
    *,
    main: tuple[str, int],
    start_seconds: float,
    seconds: float,
) -> PeerSockets:
    """Connect this rank to every other rank; addresses are exchanged through `store`. Collective.

    This rank listens on the network interface with which it reaches `main`, the host and port of
    the gang's main node. The deadline is `start_seconds` for all connections, and `seconds` for
    each later exchange. Raises RendezvousError.
    """
    limit = time.monotonic() + start_seconds
    store.set_timeout(timedelta(seconds=start_seconds))
    if rank == 0:
        store.set("token", secrets.token_hex(8))
    peers: dict[int, socket.socket] = {}
    try:
        told, own = find_addresses(*main, start_seconds)
        with open_listener(own) as listener:
            store.set(str(rank), f"{told} {listener.getsockname()[1]}")
            token = store.get("token")
            for lower in range(rank):
                address, port = store.get(str(lower)).decode().split()
                peers[lower] = socket.create_connection(
                    (address, int(port)), max(0.1, limit - time.monotonic())
                )
                peers[lower].sendall(_HELLO.pack(rank, token))
            _await_peers(listener, token, peers, range(rank + 1, world_size), limit)
    except (OSError, RuntimeError) as error:  # the store raises RuntimeError
        for peer in peers.values():
            peer.close()
        missing = ", ".join(
            str(one) for one in range(world_size) if one != rank and one not in peers
        )
        raise RendezvousError(
            f"rank {rank}: no connection of its own to rank {missing or 'none'} within "
            f"{start_seconds:g} s (cluster.start_deadline_seconds): {error}; fix: let the nodes "
            "reach each other on all TCP ports"
        ) from error
    return PeerSockets(rank, peers, seconds)


def find_addresses(host: str, port: int, seconds: float) -> tuple[str, str]:
    """Return the address to publish to other ranks, and the address to listen on ("" for all
    interfaces).

    On the main node, the node's own name may resolve to a loopback address (Debian's 127.0.1.1),
    while other nodes resolve it to a reachable address. In that case this rank publishes the name
    and listens on all interfaces.
    """
    with socket.create_connection((host, port), seconds) as way:
        own = way.getsockname()[0]
    if host in (own, "localhost") or not ipaddress.ip_address(own).is_loopback:
        return own, own
    return host, ""


def open_listener(address: str, port: int = 0) -> socket.socket:
    """Listen on an address; "" means all interfaces, by IPv4 and IPv6, and port 0 any free port.

    Raises OSError.
    """
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    if ":" in address:
        family = socket.AF_INET6
    else:
        family = socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)


def _await_peers(
    listener: socket.socket,
    token: bytes,
    peers: dict[int, socket.socket],
    wanted: range,
    limit: float,
) -> None:
    """Accept connections until each rank of `wanted` has connected, sent the gang's token and been
    added to `peers`.

    Other callers, such as a rank of an older gang or a port scan, do not delay the peers: up to
    `_MOST_CALLERS` connections are read concurrently, each for at most `_HELLO_SECONDS`. Raises
    TimeoutError once the monotonic clock passes `limit`.
    """
    listener.setblocking(False)
    callers: dict[
        socket.socket, tuple[float, bytearray]
    ] = {}  # (its deadline, the bytes it has sent)
    try:
        while any(rank not in peers for rank in wanted):
            now = time.monotonic()
            if now > limit:
                raise TimeoutError("timed out")
            overdue = [caller for caller, (until, _) in callers.items() if now > until]
            for caller in [*overdue, *list(callers)[: max(0, len(callers) - _MOST_CALLERS)]]:
                if callers.pop(caller, None) is not None:
                    caller.close()
            for ready in select.select(
                [listener, *callers], [], [], min(_LOOK_SECONDS, max(0.0, limit - now))
            )[0]:
                if ready is listener:
                    with suppress(BlockingIOError, ConnectionAbortedError):
                        caller = listener.accept()[0]
                        caller.setblocking(False)
                        callers[caller] = (now + _HELLO_SECONDS, bytearray())
                elif _answered(ready, callers[ready][1], token, peers, wanted):
                    del callers[ready]
    finally:
        for caller in callers:
            caller.close()


def _answered(
    caller: socket.socket,
    received: bytearray,
    token: bytes,
    peers: dict[int, socket.socket],
    wanted: range,
) -> bool:
    """Read more of the first message of an incoming connection into the buffer `received`.

    Return False if more of the message must follow. Otherwise, add the connection to `peers`, or
    close it if invalid.
    """
    try:
        data = caller.recv(_HELLO.size - len(received))
    except BlockingIOError:
        return False
    except OSError:
        data = b""
    received += data
    if data and len(received) < _HELLO.size:
        return False
    if len(received) == _HELLO.size:
        rank, theirs = _HELLO.unpack(received)
        if hmac.compare_digest(theirs, token) and rank in wanted and rank not in peers:
            caller.setblocking(True)
            peers[rank] = caller
            return True
    caller.close()
    return True


def _read(peer: socket.socket, into: bytearray | memoryview, enough: int) -> int:
    """Receive at least `enough` bytes into the buffer `into`, and return their number.

    Raises OSError.
    """
    rest = memoryview(into)
    come = 0
    while come < enough:
        count = peer.recv_into(rest[come:])
        if count == 0:
            raise ConnectionResetError("end of stream")
        come += count
    return come
