"""The agents' control channel against strangers, peers that send too much, and pauses: no node is
lost by them.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.process import AwakeClock
from ebbflow.core.store import Store
from ebbflow.training.errors import GangError
from ebbflow.training.launch import transport
from ebbflow.training.launch.transport import (
    FOLLOWER,
    SECRET_BYTES,
    Connection,
    Message,
    RollCallServer,
    StartSecret,
    join_gang,
    new_nonce,
    proof_of,
)
from tests.support.gangs import KNOWN, SECRET, free_port

TOKEN = "job/run/0/2x1"
HELLO = {"node": 1, "host": "b"}
Door = tuple[str, int]


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


NONSENSE = [
    b"[" * 200_000 + b"\n",
    b"[" * 2000 + b"\n",
    b'{"kind":' * 300 + b"\n",
    b"\xff\xfe\n",
    line(None),
    line({"kind": []}),
    line({"kind": "proof", "proof": "x"}),
    line({"kind": "hello", "nonce": new_nonce(), "node": True, "host": "b"}),
    line({"kind": "hello", "nonce": new_nonce(), "node": 7, "host": "b"}),
    line({"kind": "hello", "nonce": 1, **HELLO}),
    line({"kind": "hello", "nonce": "\ud800" * 64, **HELLO}),
    line({"kind": "hello", "nonce": new_nonce(), "node": 1, "host": "b", "notice": []}),
    line({"kind": "welcome"}),
]


def answer(peer: socket.socket) -> Message:
    """The next message that is no ping; {"kind": "closed"} at the end."""
    data = b""
    with suppress(OSError):
        while byte := peer.recv(1):
            data += byte
            if byte == b"\n":
                message = json.loads(data)
                if message["kind"] != "ping":
                    return message
                data = b""
    return {"kind": "closed"}


def connect(door: Door) -> socket.socket:
    return socket.create_connection(door, timeout=60)


def say(words: bytes, door: Door) -> list[socket.socket]:
    stranger = connect(door)
    with suppress(OSError):
        stranger.sendall(words)
    return [stranger]


def say_100_mib_without_a_line(door: Door) -> list[socket.socket]:
    stranger = connect(door)
    with pytest.raises(OSError):
        for _ in range(100):
            stranger.sendall(b"x" * 2**20)
    return [stranger]


def stay_idle(door: Door) -> list[socket.socket]:
    return [connect(door) for _ in range(120)]


def prove(door: Door, secret: bytes, nonces: tuple[str, str] | None = None) -> str:
    """The answer to a proof by this secret, over the nonces of this handshake or over others."""
    with connect(door) as stranger:
        if nonces is None:
            own = new_nonce()
        else:
            own = nonces[0]
        stranger.sendall(line({"kind": "hello", "nonce": own, **HELLO}))
        challenge = answer(stranger)
        assert challenge["kind"] == "challenge" and set(challenge) == {"kind", "nonce", "proof"}
        proof = proof_of(FOLLOWER, secret, TOKEN, HELLO, nonces or (own, challenge["nonce"]))
        stranger.sendall(line({"kind": "proof", "proof": proof}))
        return answer(stranger)["kind"]


def guess(door: Door) -> list[socket.socket]:
    """What can be guessed is the start's name; it was all that a node had to say once."""
    for secret in (b"", TOKEN.encode(), bytes(SECRET_BYTES)):
        assert prove(door, secret) == "stranger"
    return []


def replay(door: Door) -> list[socket.socket]:
    """A proof by the right secret, as it was overheard in another handshake."""
    assert prove(door, SECRET, nonces=(new_nonce(), new_nonce())) == "stranger"
    return []


def reflect(door: Door) -> list[socket.socket]:
    """Node 0's own proof, sent back to it."""
    with connect(door) as stranger:
        stranger.sendall(line({"kind": "hello", "nonce": new_nonce(), **HELLO}))
        stranger.sendall(line({"kind": "proof", "proof": answer(stranger)["proof"]}))
        assert answer(stranger)["kind"] == "stranger"
    return []


@pytest.fixture
def lobby() -> Iterator[RollCallServer]:
    lobby = RollCallServer("127.0.0.1", [free_port()], TOKEN, SECRET)
    yield lobby
    for connection, _ in lobby.joined.values():
        connection.close()
    lobby.close()


@pytest.mark.parametrize(
    "attack", [say_100_mib_without_a_line, stay_idle, guess, replay, reflect, *NONSENSE]
)
def test_a_stranger_neither_joins_nor_keeps_a_node_out(
    attack: Callable[[Door], list] | bytes, lobby: RollCallServer
) -> None:
    door = ("127.0.0.1", lobby.port)
    done = threading.Event()

    def node() -> tuple[list[socket.socket], Connection]:
        try:
            if isinstance(attack, bytes):
                strangers = say(attack, door)
            else:
                strangers = attack(door)
            return strangers, join_gang(door[0], [door[1]], TOKEN, HELLO, 60, **KNOWN)
        finally:
            done.set()

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(node)
        limit = time.monotonic() + 60
        while not (done.is_set() and lobby.joined) and time.monotonic() < limit:
            lobby.admit(2)
            time.sleep(0.01)
        strangers, member = coming.result(60)
    assert {number: hello for number, (_, hello) in lobby.joined.items()} == {1: HELLO}
    lobby.joined[1][0].send({"kind": "generation"})
    messages: list[Message] = []
    while not messages and time.monotonic() < limit:
        messages = member.receive()
    assert messages == [{"kind": "generation"}]
    for stranger in strangers:
        stranger.close()
    member.close()


def test_idle_strangers_are_dropped_whatever_they_trickle(
    lobby: RollCallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_SECONDS", 0.5)
    silent, trickling = (connect(("127.0.0.1", lobby.port)) for _ in range(2))
    dropped: set[socket.socket] = set()
    limit = time.monotonic() + 60
    while len(dropped) < 2 and time.monotonic() < limit:
        lobby.admit(2)
        with suppress(OSError):
            trickling.sendall(b" ")
        time.sleep(0.05)
        for stranger in (silent, trickling):
            stranger.settimeout(0.01)
            with suppress(TimeoutError):
                try:
                    data = stranger.recv(1)
                except ConnectionResetError:
                    data = b""
                if data:
                    dropped |= set()
                else:
                    dropped |= {stranger}
    assert dropped == {silent, trickling}
    silent.close()
    trickling.close()


@pytest.mark.parametrize(
    "words",
    [
        [{"kind": "welcome"}],
        [{"kind": "challenge", "nonce": new_nonce(), "proof": "0" * 64}, {"kind": "welcome"}],
    ],
)
def test_a_node_believes_no_coordinator_that_does_not_know_the_secret(words: list[Message]) -> None:
    """Nor does it answer: what it would prove could be of use elsewhere."""
    heard: list[bytes] = []

    def pose(door: socket.socket) -> None:
        with suppress(OSError):
            while True:
                with door.accept()[0] as peer:
                    peer.settimeout(10)
                    peer.sendall(b"".join(map(line, words)))
                    with suppress(OSError):
                        while data := peer.recv(65536):
                            heard.append(data)

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=pose, args=(door,), daemon=True).start()
        with pytest.raises(GangError, match="another program listens there"):
            join_gang(
                "127.0.0.1", [door.getsockname()[1]], TOKEN, HELLO, deadline_seconds=1, **KNOWN
            )
    told = b"".join(heard)
    assert b'"hello"' in told and b"proof" not in told and SECRET.hex().encode() not in told


def test_a_secret_that_an_earlier_start_left_behind_is_read_anew(lobby: RollCallServer) -> None:
    secrets = iter([None, b"old" * 11, SECRET])
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(
            join_gang, "127.0.0.1", [lobby.port], TOKEN, HELLO, 60, secret=lambda: next(secrets)
        )
        lobby.roll_call(2, 60)
        coming.result(60).close()


def test_the_secret_is_for_this_user_alone_and_gone_when_withdrawn(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    start = StartSecret(store, "17/2", 3)
    assert start.fetch() is None
    for secret in (SECRET, SECRET[::-1]):  # a start that is tried again
        start.publish(secret)
        assert start.fetch() == secret
    [found] = store.list("secrets")
    assert store.local_path(found.key).stat().st_mode & 0o777 == 0o600
    store.put(found.key, b"no secret")
    assert start.fetch() is None
    start.withdraw()
    assert store.list("secrets") == [] and start.fetch() is None


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return connect(door.getsockname()), door.accept()[0]


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection, Clock]]:
    """Two ends of one connection, both by one clock."""
    clock = Clock()
    near, far = (Connection(end, 20.0, now=clock) for end in connected())
    yield near, far, clock
    near.close()
    far.close()


def test_a_pause_of_all_agents_counts_as_silence_of_none(
    ends: tuple[Connection, Connection, Clock],
) -> None:
    near, far, clock = ends
    for _ in range(3):
        for _ in range(100):  # 5 s
            clock.seconds += 0.05
            near.keep_alive()
            far.keep_alive()
        clock.seconds += 25.0
    near.keep_alive()
    far.keep_alive()
    assert not near.closed and not far.closed


def test_messages_from_a_pause_are_read_before_heartbeats_are_judged(
    ends: tuple[Connection, Connection, Clock],
) -> None:
    """At the very limit of silence."""
    near, far, clock = ends
    while clock.seconds < 1020:
        clock.seconds += 0.25
        near.keep_alive()
    assert not near.closed
    far.keep_alive()
    clock.seconds += 25.0
    time.sleep(0.1)
    near.keep_alive()
    assert not near.closed


def test_a_silent_peer_is_lost_though_this_loop_is_slow(
    ends: tuple[Connection, Connection, Clock],
) -> None:
    near, _, clock = ends
    turns = 0
    while not near.closed:
        clock.seconds += 1.5
        near.keep_alive()
        turns += 1
        assert turns < 100
    assert near.closed == "silent for 20 s"


def test_a_silent_peer_is_lost_at_its_limit(ends: tuple[Connection, Connection, Clock]) -> None:
    near, _, clock = ends
    while not near.closed:
        clock.seconds += 0.05
        near.keep_alive()
        assert clock.seconds < 1021
    assert clock.seconds > 1020


def test_the_awake_clock_counts_turns_and_no_pause() -> None:
    clock = Clock()
    awake = AwakeClock(clock)
    for seconds in (0.1, 100.0, 0.2, -5.0):
        clock.seconds += seconds
        awake.tick()
    assert awake.seconds == pytest.approx(0.1 + 0.25 + 0.2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (b"[" * 200_000 + b"\n", "it sent something that is not a message"),
        (
            b'{"kind": "failed", "x": ' + b'{"y":' * 5000 + b"\n",
            "it sent something that is not a message",
        ),
        (
            b'{"kind": "failed", "x": "\\' * 50_000 + b"[" * 100 + b"\n",
            "it sent something that is not a message",
        ),
        (b"x" * (17 * 2**20), "it sent a message of more than 16,777,216 bytes"),
    ],
)
def test_a_peer_that_is_known_is_bounded_too(words: bytes, reason: str) -> None:
    near, far = connected()
    connection = Connection(near)
    sending = threading.Thread(target=lambda: suppressed(far.sendall, words), daemon=True)
    sending.start()
    limit = time.monotonic() + 60
    while not connection.closed and time.monotonic() < limit:
        assert connection.receive() == []
    assert connection.closed == reason
    connection.close()
    far.close()
    sending.join(60)


def test_brackets_in_a_text_are_not_nested() -> None:
    near, far = connected()
    connection = Connection(near)
    message = {"kind": "failed", "text": '[{"' * 1000, "rows": [[n] for n in range(200)]}
    far.sendall(line(message))
    assert connection.receive() == [message] and not connection.closed
    connection.close()
    far.close()


def test_a_flood_of_messages_is_taken_in_parts() -> None:
    near, far = connected()
    connection = Connection(near)
    count = 20_000
    threading.Thread(
        target=lambda: suppressed(far.sendall, line({"kind": "x"}) * count), daemon=True
    ).start()
    parts: list[int] = []
    limit = time.monotonic() + 60
    while sum(parts) < count and time.monotonic() < limit:
        parts.append(len(connection.receive()))
    assert sum(parts) == count and max(parts) <= 1000 and not connection.closed
    connection.close()
    far.close()


def suppressed(call: Callable[..., Any], *arguments: object) -> None:
    with suppress(OSError):
        call(*arguments)
