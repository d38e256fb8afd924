"""Probe of the network between the nodes of a gang, before the process group connects them.

Rank 0 decides whether to probe: once per attempt, and not if all nodes are on one machine. One rank
of each node then connects to every other node, on a port of the gang's range, and measures round
trip, clock offset (as NTP does, from the fastest of several exchanges) and the path's MTU. Then it
measures the bandwidth to the next node while all nodes send. After the process group has connected,
all ranks time an all-reduce. The probe takes at most 60 s, usually under 3 s.
"""

import contextlib
import hashlib
import ipaddress
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ebbflow.core.json_values import JsonObject
from ebbflow.training.compat import PrefixStore, Store
from ebbflow.training.errors import RendezvousError
from ebbflow.training.launch.transport import control_ports

LIMIT_SECONDS = 60.0
_CONNECT_SECONDS = 5.0
_TRIES = 2
_CALLERS = 16
_EXCHANGES = 8
_SEND_SECONDS = 1.0
_MOST_CHUNKS = 256
_CHUNK = bytes(2**20)
_REDUCED_NUMBERS = 2**20
_REDUCTIONS = 3
_CLOCK = b"c"
_DATA = b"d"
_IP_MTU = 14  # <linux/in.h>
_BACKLOG = 256
_PROBLEMS = (dist.DistError, RuntimeError, OSError)


@dataclass(frozen=True)
class Link:
    """Measurements of one direction between two nodes, in seconds, bytes, or bytes per second.

    None means unknown.
    """

    source: int
    target: int
    round_trip: float | None = None
    clock_offset: float | None = None  # by how much the target's clock is ahead
    mtu: int | None = None
    bandwidth: float | None = None
    error: str = ""


def find_own_address(host: str, port: int, seconds: float) -> str:
    """Return the address at which other nodes reach this one.

    This is the address of the interface with which this node reaches the gang's main node at `host`
    and `port`. On the main node, the node's own name may resolve to a loopback address (Debian's
    127.0.1.1), while other nodes resolve it to a reachable address. Then the result is the name.
    """
    with socket.create_connection((host, port), seconds) as connection:
        address = connection.getsockname()[0]
    if host in (address, "localhost") or not ipaddress.ip_address(address).is_loopback:
        return address
    return host


def probe_links(
    store: Store, node: int, nodes: int, *, address: str, name: str, lead: bool
) -> list[Link] | None:
    """Measure the links between all nodes and return them, or None if a node did not report in
    time. Collective.

    Args:
        store: key-value store of the gang.
        address: address at which other nodes reach this one.
        name: text that is the same on all nodes of this start; ports and a token are derived from
            it.
        lead: whether this rank measures for its node.

    Raises RendezvousError if a node cannot reach another one.
    """
    until = time.monotonic() + LIMIT_SECONDS
    store = PrefixStore("probe", store)

    def collect(kind: str) -> list[Any]:
        keys = [f"{kind}/{number}" for number in range(nodes)]
        store.wait(keys, timedelta(seconds=max(0.1, until - time.monotonic())))
        return [json.loads(text) for text in store.multi_get(keys)]

    with contextlib.ExitStack() as stack, contextlib.suppress(*_PROBLEMS):
        if lead:
            token = hashlib.sha256(name.encode()).digest()
            listener = stack.enter_context(_listen(control_ports(f"{name}/probe", 0)))
            threading.Thread(
                target=_serve, args=(listener, token), name="network probe", daemon=True
            ).start()
            store.set(f"at/{node}", json.dumps([address, listener.getsockname()[1]]))
            links = _measure(node, [(host, port) for host, port in collect("at")], token)
            store.set(f"links/{node}", json.dumps([asdict(link) for link in links]))
        records = itertools.chain.from_iterable(collect("links"))
        links = [Link(**record) for record in records]
        broken = [link for link in links if link.error]
        if not broken:
            return links
        shown = [
            f"node {link.source} cannot reach node {link.target}: {link.error}"
            for link in broken[:4]
        ]
        if len(broken) > 4:
            shown += [f"{len(broken) - 4} more pairs"]
        fix = "let the nodes talk to each other on all TCP ports (security group, NetworkPolicy)"
        raise RendezvousError(f"{'; '.join(shown)}; fix: {fix}")
    return None


def time_all_reduce(device: torch.device, world_size: int) -> float:
    """Return the bytes per second that each rank sends in an all-reduce of 4 MiB (median of 3).

    Collective.
    """
    numbers = torch.zeros(_REDUCED_NUMBERS, device=device)
    seconds = []
    for _ in range(_REDUCTIONS + 1):  # the first one makes connections
        began = time.perf_counter()
        dist.all_reduce(numbers)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return (
        2 * (world_size - 1) / world_size * numbers.nbytes / sorted(seconds[1:])[_REDUCTIONS // 2]
    )


def summarize_links(links: Sequence[Link], *, nodes: int, seconds: float) -> JsonObject:
    """Return the worst value of each measurement, each with its link, as data of a `network` event."""
    where: dict[str, str] = {}

    def worst(key: str, pick: Callable[..., Link]) -> float | None:
        known = [link for link in links if getattr(link, key) is not None]
        if not known:
            return None
        link = pick(known, key=lambda link: abs(getattr(link, key)))
        where[key] = f"node {link.source} → node {link.target}"
        return getattr(link, key)

    return {
        "nodes": nodes,
        "seconds": seconds,
        "bandwidth_bytes_per_second": worst("bandwidth", min),
        "mtu": worst("mtu", min),
        "clock_offset_seconds": worst("clock_offset", max),
        "round_trip_seconds": worst("round_trip", max),
        "where": where,
    }


@contextlib.contextmanager
def _listen(ports: Sequence[int]) -> Iterator[socket.socket]:
    """Listen on the first free port of the gang's range, or on any port if none is free."""
    for port in [*ports, 0]:
        with contextlib.suppress(OSError):
            listener = _open_listener(port)
            break
    else:
        raise OSError("no port is free")
    try:
        yield listener
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # `close` alone does not end `accept`
        listener.close()


def _open_listener(port: int) -> socket.socket:
    """Listen on all interfaces by IPv4 and IPv6, since the main node's name may have an IPv6
    address.

    Port 0 means any free port. Raises OSError.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=_BACKLOG)


def _serve(listener: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError):  # closed: the probe is over
        while True:
            peer, _ = listener.accept()
            threading.Thread(
                target=_answer, args=(peer, token), name="network probe", daemon=True
            ).start()


def _answer(peer: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError), peer:
        peer.settimeout(_CONNECT_SECONDS)
        known = _receive(peer, len(token)) == token
        while known:
            if _receive(peer, 1) == _DATA:
                _receive(peer, len(_CHUNK))
            peer.sendall(struct.pack("!d", time.time()))


def _receive(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            raise ConnectionError("connection closed")
        data += more
    return bytes(data)


def _measure(node: int, at: Sequence[tuple[str, int]], token: bytes) -> list[Link]:
    others = [(node + step) % len(at) for step in range(1, len(at))]
    with ThreadPoolExecutor(_CALLERS) as pool:
        links = list(
            pool.map(lambda target: _exchange(Link(node, target), at[target], token), others)
        )
    with contextlib.suppress(OSError):  # it answered a moment ago: its bandwidth stays unknown
        if not links[0].error:
            links[0] = replace(links[0], bandwidth=_bandwidth(at[others[0]], token))
    return links


def _exchange(link: Link, address: tuple[str, int], token: bytes) -> Link:
    """Return `link` with the measured round trip, clock offset and MTU, or with `error` set.

    The clock offset assumes that both directions are equally fast.
    """
    for _ in range(_TRIES):
        try:
            with _call(address, token) as peer:
                if peer.family == socket.AF_INET:
                    mtu = peer.getsockopt(socket.IPPROTO_IP, _IP_MTU)
                else:
                    mtu = None
                pairs = []
                for _ in range(_EXCHANGES):
                    wall = time.time()
                    began = time.perf_counter()
                    peer.sendall(_CLOCK)
                    there = struct.unpack("!d", _receive(peer, 8))[0]
                    trip = time.perf_counter() - began
                    pairs.append((trip, there - (wall + trip / 2)))
            return replace(
                link, round_trip=min(pairs)[0], clock_offset=min(pairs)[1], mtu=mtu, error=""
            )
        except OSError as error:
            link = replace(link, error=f"{address[0]}:{address[1]}: {error}")
    return link


def _bandwidth(address: tuple[str, int], token: bytes) -> float:
    """Send data up to a limit of time and bytes, and wait for all answers.

    Return the bytes per second.
    """
    sent = 0
    began = time.perf_counter()
    with _call(address, token) as peer:
        while sent < _MOST_CHUNKS and time.perf_counter() - began < _SEND_SECONDS:
            peer.sendall(_DATA + _CHUNK)
            sent += 1
        _receive(peer, 8 * sent)
    return sent * len(_CHUNK) / (time.perf_counter() - began)


@contextlib.contextmanager
def _call(address: tuple[str, int], token: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=_CONNECT_SECONDS) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(token)
        yield peer
