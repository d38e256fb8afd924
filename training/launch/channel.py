"""Agents talking to each other: JSON lines over TCP, node 0 in the middle.

Agents, not ranks, hold this conversation, so that a frozen rank cannot block the news of it. A closed connection is
the fastest sign of a lost node; silence is the slower one.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from training.errors import GangError

Message = dict[str, Any]
PING_SECONDS = 1.0
SILENCE_SECONDS = 20.0  # where nothing else is said
_UNREAD_BYTES = 16 * 2**20
_CLOSE_SECONDS = 1.0


class Connection:
    """One peer. `receive` never blocks; `closed` is set when the peer went away or fell silent for so many seconds."""

    def __init__(self, peer: socket.socket, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._socket = peer
        self._silence_seconds = silence_seconds
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._buffer = b""
        self._put_back: list[Message] = []
        self._unsent = bytearray()
        self._heard = time.monotonic()
        self._pinged = 0.0
        self.closed = ""

    def send(self, message: Message) -> None:
        """What the kernel does not take at once goes out with the next call of any kind. A peer that reads nothing for
        as long as silence is borne, or leaves 16 MiB unread, is gone, and what it would have been told with it."""
        if not self.closed:
            self._unsent += json.dumps(message).encode() + b"\n"
            self._write()
        if self.unsent_bytes > _UNREAD_BYTES:
            self.closed = self.closed or "it does not read what it is told"
        if self.closed:
            self._unsent.clear()

    @property
    def unsent_bytes(self) -> int:
        """Of what was said and the kernel has not taken yet; nothing waits for a peer that is gone."""
        return len(self._unsent)

    def receive(self) -> list[Message]:
        """All whole messages that have arrived, pings left out."""
        self._read()
        self._write()
        *lines, self._buffer = self._buffer.split(b"\n")
        messages = self._put_back + [self._parse(line) for line in lines if line]
        self._put_back = []
        return [message for message in messages if message.get("kind") != "ping"]

    def put_back(self, messages: list[Message]) -> None:
        """What was received and is for somebody else: the next call of `receive` begins with it."""
        self._put_back = messages

    def _parse(self, line: bytes) -> Message:
        """A peer that does not speak our language is closed, and what it said is passed over."""
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if isinstance(message, dict):
            return message
        self.closed = self.closed or "it does not speak our language"
        return {"kind": "ping"}

    def keep_alive(self) -> None:
        now = time.monotonic()
        if now - self._pinged >= PING_SECONDS:
            self._pinged = now
            self.send({"kind": "ping"})
        if now - self._heard > self._silence_seconds and not self.closed:
            self.closed = f"silent for {now - self._heard:.0f} s"

    def hold(self) -> None:
        """Stay in touch while nobody here listens: what arrives is kept for `receive`."""
        self._read()
        self.keep_alive()

    def close(self) -> None:
        """What is still unsent, such as a last word, has a moment to go out."""
        limit = time.monotonic() + _CLOSE_SECONDS
        while self._unsent and not self.closed and time.monotonic() < limit:
            select.select([], [self._socket], [], _CLOSE_SECONDS)
            self._write()
        self._socket.close()

    def _write(self) -> None:
        while self._unsent and not self.closed:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                self._read()  # a last word that was sent before it went still counts
                self.closed = self.closed or f"connection lost: {error.strerror or error}"
                return
            del self._unsent[:sent]

    def _read(self) -> None:
        while not self.closed:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                return
            except OSError as error:
                self.closed = f"connection lost: {error.strerror or error}"
                return
            if not data:
                self.closed = "connection closed"
                return
            self._heard = time.monotonic()
            self._buffer += data


class Lobby:
    """Node 0's side of the roll-call: collects one connection for each other node."""

    def __init__(
        self,
        address: str,
        ports: Sequence[int],
        token: str,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._token, self._silence_seconds = token, silence_seconds
        # A gang on one machine is nobody else's business.
        self._listener = _listen("127.0.0.1" if address == "127.0.0.1" else "", ports)
        self.port = self._listener.getsockname()[1]
        self.joined: dict[int, tuple[Connection, Message]] = {}
        self._strangers: list[Connection] = []  # who has not said who they are

    def admit(self, nodes: int) -> None:
        """One look at the door: who has come is let in, and all who came before are kept in touch with."""
        for connection, _ in self.joined.values():
            connection.hold()  # who came first must not take the wait for the last one for silence
        came = self._strangers + self._accept()
        self._strangers = [peer for peer in came if not self._admit(peer, nodes, self.joined) and not peer.closed]

    def roll_call(
        self, nodes: int, deadline_seconds: float, stopped: Callable[[], bool] = lambda: False
    ) -> dict[int, tuple[Connection, Message]]:
        """Wait for the other nodes. Returns each one's connection and hello; raises GangError naming the missing.

        `stopped` is asked all along: whether this agent was told to leave.
        """
        joined = self.joined
        limit = time.monotonic() + deadline_seconds
        while len(joined) < nodes - 1:
            if stopped():
                raise GangError("roll-call: this agent was told to leave")
            if time.monotonic() > limit:
                missing = sorted(set(range(1, nodes)) - set(joined))
                raise GangError(
                    f"roll-call: {len(joined) + 1} of {nodes} nodes joined within {deadline_seconds:g} s on port "
                    f"{self.port}; missing: {', '.join(f'node {node}' for node in missing)}"
                )
            self.admit(nodes)
            time.sleep(0.02)
        return joined

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> list[Connection]:
        accepted = []
        with contextlib.suppress(BlockingIOError):
            while True:
                accepted.append(Connection(self._listener.accept()[0], self._silence_seconds))
        return accepted

    def _admit(self, peer: Connection, nodes: int, joined: dict[int, tuple[Connection, Message]]) -> bool:
        """Whether this peer has been answered, one way or the other."""
        hello = next(iter(peer.receive()), None)
        if hello is None or peer.closed:  # one that has gone tries again, and is then to be told from this one
            return False
        if hello.get("token") != self._token or hello.get("node") not in range(1, nodes):
            peer.send({"kind": "stranger"})
            peer.close()
            return True
        peer.send({"kind": "welcome"})
        joined[hello["node"]] = (peer, hello)
        return True


def join(
    address: str,
    ports: Sequence[int],
    token: str,
    hello: Message,
    deadline_seconds: float,
    stopped: Callable[[], bool] = lambda: False,
    silence_seconds: float = SILENCE_SECONDS,
) -> Connection:
    """Another node's side of the roll-call. Raises GangError when node 0 cannot be found in time."""
    limit = time.monotonic() + deadline_seconds
    last = "no answer"
    while time.monotonic() < limit and not stopped():
        for port in ports:
            try:
                peer = socket.create_connection((address, port), timeout=min(5.0, deadline_seconds))
            except OSError as error:
                last = f"{address}:{port}: {error}"
                continue
            connection = Connection(peer, silence_seconds)
            connection.send({"kind": "hello", "token": token, **hello})
            if _welcomed(connection, seconds=5.0):
                return connection
            last = f"{address}:{port}: somebody else listens there"
            connection.close()
        time.sleep(0.1)
    raise GangError(
        f"roll-call: node {hello['node']} could not reach node 0 within {deadline_seconds:g} s ({last})\n"
        f"  hint: is node 0 running, and may nodes talk to each other on ports {min(ports)}-{max(ports)}?"
    )


def _welcomed(connection: Connection, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and not connection.closed:
        if messages := connection.receive():
            connection.put_back(messages[1:])  # such as the number of the generation, said in one breath
            return messages[0].get("kind") == "welcome"
        time.sleep(0.01)
    return False


def _listen(address: str, ports: Sequence[int]) -> socket.socket:
    for port in ports:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError:
            listener.close()
            continue
        listener.listen(128)
        listener.setblocking(False)
        return listener
    raise GangError(f"none of the control ports {list(ports)} is free on this machine")
