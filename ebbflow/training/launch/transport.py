"""Connections between the agents of a gang: JSON lines over TCP, from each follower to node 0.

Agents hold these connections, not ranks, so that a frozen rank cannot block the report about
itself. An agent detects the loss of a node when the connection closes or, more slowly, when no
message arrives.

At the start of a connection, both sides prove in a handshake that they belong to the same start of
the gang. Node 0 draws a random secret for each start and writes it to the job's store, so every
process that can read the store can take part. The secret is never sent. Each side answers the
other's nonce with an HMAC (RFC 2104, SHA-256) over both nonces, the start, the sender's role and
the node's hello (its first message), so that an answer cannot be replayed, reflected or altered.
Messages after the handshake have no HMAC (docs/security.md). The memory and connections that one
peer can use are limited before and after the handshake.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ebbflow.core.errors import InfraError, ObjectNotFound, Outcome
from ebbflow.core.json_values import Json
from ebbflow.core.layout import secret_key
from ebbflow.core.process import AGENT_PORTS, AwakeClock
from ebbflow.core.store import Store
from ebbflow.training.errors import GangError, TrainingError

SECRET_BYTES = 32
LARGEST_GREETING_BYTES = 4096  # per message before the handshake has ended
HANDSHAKE_SECONDS = 5.0  # from the connection to the welcome
COORDINATOR = "node 0"
FOLLOWER = "follower"
_NONCE_BYTES = 32
_LONGEST_REFUSAL = 4096

Message = dict[str, Any]
PING_SECONDS = 1.0
SILENCE_SECONDS = 20.0  # default limit
LARGEST_MESSAGE_BYTES = 16 * 2**20
DEEPEST_MESSAGE = 64  # nesting of objects and lists
# Limits of the connections before the end of their handshake
MOST_CALLERS = 64
MOST_CALLERS_OF_ONE_SOURCE = 32
# Limits per peer, so that one peer cannot delay all others
_BYTES_PER_LOOK = 2**20
_MESSAGES_PER_LOOK = 1000
_CLOSE_SECONDS = 1.0
_SECRET_PAUSE_SECONDS = 0.2
_LOOK_SECONDS = 0.02
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


class StartSecret:
    """Secret of one start of a gang, kept in the job's store.

    `run` and `attempt` are the fields of `GangSpec`.
    """

    def __init__(self, job_store: Store, run: str, attempt: int) -> None:
        self._store = job_store
        self._key = secret_key(run, attempt)

    def publish(self, secret: bytes) -> None:
        self._store.put(self._key, secret.hex().encode(), private=True)

    def refuse(self, error: TrainingError) -> None:
        """Replace the secret with node 0's error, so that followers do not wait for a start that
        will not happen.
        """
        refusal = {"refused": str(error)[:_LONGEST_REFUSAL], "outcome": error.outcome.value}
        with contextlib.suppress(InfraError):
            self._store.put(self._key, json.dumps(refusal).encode(), private=True)

    def fetch(self) -> bytes | None:
        """Return the secret; None if there is none yet.

        Raises StoreError, or GangError if node 0 refused the start.
        """
        try:
            content = self._store.get(self._key).decode("utf-8", "replace")
        except ObjectNotFound:
            return None
        if content.startswith("{"):
            raise _refusal(content)
        try:
            secret = bytes.fromhex(content)
        except ValueError:
            return None
        if len(secret) == SECRET_BYTES:
            return secret
        return None

    def withdraw(self) -> None:
        """Delete the secret after all nodes have joined.

        Ignore errors, since the secret is useless afterwards.
        """
        with contextlib.suppress(InfraError):
            self._store.delete(self._key)


class Connection:
    """Connection to one peer, the agent of another node.

    It counts as lost after `silence_seconds` without data.

    Time during which this process was suspended does not count (`AwakeClock`).
    """

    def __init__(
        self,
        peer: socket.socket,
        silence_seconds: float = SILENCE_SECONDS,
        *,
        largest_bytes: int = LARGEST_MESSAGE_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = peer
        self._silence_seconds = silence_seconds
        self._now = now
        self.opened_at = now()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._buffer = bytearray()
        self._searched = 0  # bytes of the buffer known to contain no line end
        self.largest_bytes = largest_bytes
        self.put_back: list[Message] = []
        self.unsent = bytearray()
        self._awake = AwakeClock(now)
        self._received_at = 0.0  # awake seconds
        self._pinged = float("-inf")
        self.closed = ""

    def send(self, message: Message) -> None:
        """Queue a message, and send as much of the queue as the kernel accepts without blocking.

        Later calls send the rest of the queue. If more than 16 MiB are unsent, the peer counts as
        lost, and the queue is dropped.
        """
        if not self.closed:
            self.unsent += json.dumps(message).encode() + b"\n"
            self._write()
        if len(self.unsent) > LARGEST_MESSAGE_BYTES:
            self.refuse("it does not read its messages")
        if self.closed:
            self.unsent.clear()

    def receive(self) -> list[Message]:
        """Return the complete messages that have arrived, at most 1,000. Pings are left out."""
        self._read()
        self._write()
        messages = self.put_back
        self.put_back = []
        for _ in range(_MESSAGES_PER_LOOK):
            end = self._buffer.find(b"\n", self._searched)
            if end < 0:
                self._searched = len(self._buffer)
                break
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._searched = 0
            if line:
                messages.append(self._parse(line))
        return [message for message in messages if message.get("kind") != "ping"]

    def refuse(self, reason: str) -> None:
        self.closed = self.closed or reason

    def keep_alive(self) -> None:
        """Send a ping once per second, and detect a silent peer.

        Call this in each iteration of the agent's loop.
        """
        awake = self._awake.tick()
        now = self._now()
        self._read()
        if now - self._pinged >= PING_SECONDS:
            self._pinged = now
            self.send({"kind": "ping"})
        if awake - self._received_at > self._silence_seconds:
            self.refuse(f"silent for {awake - self._received_at:.0f} s")

    def close(self) -> None:
        """Close the connection, after trying for at most 1 s to send queued messages."""
        limit = time.monotonic() + _CLOSE_SECONDS
        while self.unsent and not self.closed and time.monotonic() < limit:
            select.select([], [self._socket], [], _CLOSE_SECONDS)
            self._write()
        self._socket.close()

    def _parse(self, line: bytes) -> Message:
        """Return the message in a line.

        If the line is invalid, refuse the peer and return a ping.
        """
        message = None
        if not _is_deep(line):
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(line)
        if isinstance(message, dict) and isinstance(message.get("kind"), str):
            return message
        self.refuse("it sent something that is not a message")
        return {"kind": "ping"}

    def _write(self) -> None:
        while self.unsent and not self.closed:
            try:
                sent = self._socket.send(self.unsent)
            except BlockingIOError:
                return
            except OSError as error:
                # Messages that the peer sent before it closed are still valid
                self._read(LARGEST_MESSAGE_BYTES)
                self.refuse(f"connection lost: {error.strerror or error}")
                return
            del self.unsent[:sent]

    def _read(self, most_bytes: int = _BYTES_PER_LOOK) -> None:
        """Read at most about `most_bytes` without blocking.

        Further data stay in the kernel's and peer's buffers.
        """
        taken = 0
        while not self.closed and taken < most_bytes:
            if len(self._buffer) > self.largest_bytes:
                # Not silence of the peer: the buffer on this side is full
                self._received_at = self._awake.seconds
                if self._buffer.find(b"\n", self._searched) < 0:
                    self.refuse(f"it sent a message of more than {self.largest_bytes:,} bytes")
                return
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
            self._received_at = self._awake.seconds
            self._buffer += data
            taken += len(data)


def _is_deep(line: bytes) -> bool:
    if line.count(b"[") + line.count(b"{") <= DEEPEST_MESSAGE:
        return False
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(line):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(match[0], 0)
        if depth > DEEPEST_MESSAGE:
            return True
    return False


@dataclass
class _Caller:
    connection: Connection
    source: str
    until: float
    hello: Message = field(default_factory=dict)
    nonces: tuple[str, str] = ("", "")


class RollCallServer:
    """Server on node 0 for the roll-call: it accepts one connection per follower until all have
    joined.
    """

    def __init__(
        self,
        address: str,
        ports: Sequence[int],
        token: str,
        secret: bytes,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._token = token
        self._secret = secret
        self._silence_seconds = silence_seconds
        # A gang on one machine accepts no connections from elsewhere.
        self._listener = _bind_first(
            "127.0.0.1" if address == "127.0.0.1" else "", ports, "control"
        )
        self._listener.listen(128)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self.joined: dict[int, tuple[Connection, Message]] = {}
        self._callers: list[_Caller] = []

    def admit(self, nodes: int) -> None:
        """Accept new connections, continue all handshakes, and keep joined connections alive.

        Never blocks.
        """
        for connection, _ in self.joined.values():
            connection.keep_alive()
        self._accept()
        for caller in list(self._callers):
            if time.monotonic() > caller.until:
                caller.connection.refuse("its handshake timed out")
            if caller.connection.closed:
                caller.connection.close()
            if caller.connection.closed or self._admit(caller, nodes):
                self._callers.remove(caller)

    def roll_call(
        self, nodes: int, deadline_seconds: float, stopped: Callable[[], bool] = lambda: False
    ) -> dict[int, tuple[Connection, Message]]:
        """Wait until all followers have joined, and return `joined`.

        Raises GangError if a follower is missing at the deadline, or if `stopped` returns True.
        """
        limit = time.monotonic() + deadline_seconds
        while len(self.joined) < nodes - 1:
            if stopped():
                raise GangError("roll-call: this agent was asked to stop")
            if time.monotonic() > limit:
                missing = ", ".join(
                    f"node {node}" for node in range(1, nodes) if node not in self.joined
                )
                raise GangError(
                    f"roll-call: {len(self.joined) + 1} of {nodes} nodes joined within "
                    f"{deadline_seconds:g} s on port {self.port}; missing: {missing}"
                )
            self.admit(nodes)
            time.sleep(_LOOK_SECONDS)
        return self.joined

    def close(self) -> None:
        self._listener.close()
        for caller in self._callers:
            caller.connection.close()
        self._callers = []

    def _accept(self) -> None:
        for _ in range(MOST_CALLERS):
            try:
                peer, address = self._listener.accept()
            except OSError:
                # No connection is waiting, it was closed, or this process may not open more files
                return
            connection = Connection(
                peer, self._silence_seconds, largest_bytes=LARGEST_GREETING_BYTES
            )
            self._callers.append(
                _Caller(connection, address[0], time.monotonic() + HANDSHAKE_SECONDS)
            )
            source, count = Counter(caller.source for caller in self._callers).most_common(1)[0]
            if len(self._callers) > MOST_CALLERS or count > MOST_CALLERS_OF_ONE_SOURCE:
                oldest = next(caller for caller in self._callers if caller.source == source)
                oldest.connection.close()
                self._callers.remove(oldest)

    def _admit(self, caller: _Caller, nodes: int) -> bool:
        """Process messages of a connecting follower.

        Return whether its handshake is over, successful or not.
        """
        peer = caller.connection
        for message in peer.receive():
            if peer.closed:  # the follower will connect again
                return False
            kind = message.pop("kind")
            if kind == "hello" and not caller.hello and _is_hello(message, nodes):
                caller.nonces = (message.pop("nonce"), new_nonce())
                caller.hello = message
                proof = proof_of(
                    COORDINATOR, self._secret, self._token, caller.hello, caller.nonces
                )
                peer.send({"kind": "challenge", "nonce": caller.nonces[1], "proof": proof})
                continue
            expected = proof_of(FOLLOWER, self._secret, self._token, caller.hello, caller.nonces)
            if kind == "proof" and caller.hello and is_proof(message.get("proof"), expected):
                peer.largest_bytes = LARGEST_MESSAGE_BYTES
                peer.send({"kind": "welcome"})
                self.joined[caller.hello["node"]] = (peer, caller.hello)
            else:
                peer.send({"kind": "stranger"})
                peer.close()
            return True
        return False


def new_nonce() -> str:
    return secrets.token_hex(_NONCE_BYTES)


def proof_of(
    role: str, secret: bytes, token: str, hello: Mapping[str, Json], nonces: tuple[str, str]
) -> str:
    """Return the HMAC with which one side of the handshake proves that it knows the secret.

    `role` is COORDINATOR or FOLLOWER. `nonces` has the follower's nonce followed by node 0's nonce.
    """
    covered = json.dumps([role, token, *nonces, dict(hello)], sort_keys=True, separators=(",", ":"))
    return hmac.new(secret, covered.encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, expected: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(
        given.encode("utf-8", "replace"), expected.encode()
    )


def is_nonce(value: object) -> bool:
    return isinstance(value, str) and len(value) == 2 * _NONCE_BYTES


def control_ports(run: str, attempt: int) -> list[int]:
    """Return the ports to try, in order.

    They depend only on `run` and `attempt`, so all nodes get the same ports.
    """
    digest = hashlib.sha256(f"{run}/{attempt}".encode()).digest()
    numbers = [int.from_bytes(digest[2 * i : 2 * i + 2], "big") for i in range(8)]
    return [AGENT_PORTS[number % len(AGENT_PORTS)] for number in numbers]


def rendezvous_port(address: str, run: str, attempt: int) -> int:
    ports = control_ports(f"{run}/rendezvous", attempt)
    with _bind_first(address, ports, "rendezvous") as probe:
        return probe.getsockname()[1]


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, which means that all nodes of the gang are on
    this machine.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# The address, the handshake and the wait of one connection
def join_gang(  # noqa: PLR0913
    address: str,
    ports: Sequence[int],
    token: str,
    hello: Message,
    deadline_seconds: float,
    stopped: Callable[[], bool] = lambda: False,
    silence_seconds: float = SILENCE_SECONDS,
    *,
    secret: Callable[[], bytes | None],
) -> Connection:
    """Connect to node 0 as a follower, and return the connection after a successful handshake.

    `token` is `GangSpec.token`. `hello` is the first message, with the node's number and host name.
    `secret` reads the secret of this start from the store; it returns None if there is none yet,
    and may raise InfraError. After a failed handshake, `secret` is called again, since it may have
    returned the secret of an earlier start.

    Raises GangError if node 0 cannot be reached before the deadline, or if `stopped` returned True.
    """
    limit = time.monotonic() + deadline_seconds
    last = "no answer"
    known = None
    while time.monotonic() < limit and not stopped():
        if known is None:
            try:
                known = secret()
                if not known:
                    last = "the job's store holds no secret of this start yet: node 0 has not begun"
            except InfraError as error:
                last = f"the secret of this start cannot be read: {error}"
            if known is None:
                time.sleep(_SECRET_PAUSE_SECONDS)
                continue
        refused = False
        for port in ports:
            try:
                peer = socket.create_connection((address, port), timeout=min(5.0, deadline_seconds))
            except OSError as error:
                last = f"{address}:{port}: {error}"
                continue
            connection = Connection(peer, silence_seconds, largest_bytes=LARGEST_GREETING_BYTES)
            if _shake_hands(connection, token, hello, known, HANDSHAKE_SECONDS):
                return connection
            connection.close()
            refused = True
            last = f"{address}:{port}: another program listens there"
        if not refused:  # node 0 may have refused the start
            time.sleep(_SECRET_PAUSE_SECONDS)
        known = None
        time.sleep(0.1)
    raise GangError(
        f"roll-call: node {hello['node']} could not reach node 0 within {deadline_seconds:g} s "
        f"({last})\n  hint: is node 0 running, and may nodes talk to each other on ports "
        f"{min(ports)}-{max(ports)}?"
    )


def _refusal(content: str) -> GangError:
    try:
        document = json.loads(content)
        return GangError(
            f"node 0 refused the start: {document['refused']}",
            curable=False,
            outcome=Outcome(document["outcome"]),
        )
    except (ValueError, LookupError, TypeError):
        return GangError("node 0 refused the start", curable=False)


def _is_hello(message: Message, nodes: int) -> bool:
    node = message.get("node")
    notice = message.get("notice")
    return (
        is_nonce(message.get("nonce"))
        and type(node) is int
        and node in range(1, nodes)
        and isinstance(message.get("host"), str)
        and (notice is None or isinstance(notice, dict))
    )


def _shake_hands(
    connection: Connection, token: str, hello: Message, secret: bytes, seconds: float
) -> bool:
    limit = time.monotonic() + seconds
    nonces = (new_nonce(), "")
    connection.send({"kind": "hello", "nonce": nonces[0], **hello})
    while time.monotonic() < limit and not connection.closed:
        messages = connection.receive()
        for at, message in enumerate(messages):
            if message["kind"] == "challenge" and not nonces[1] and is_nonce(message.get("nonce")):
                nonces = (nonces[0], message["nonce"])
                if not is_proof(
                    message.get("proof"), proof_of(COORDINATOR, secret, token, hello, nonces)
                ):
                    return False
                connection.send(
                    {"kind": "proof", "proof": proof_of(FOLLOWER, secret, token, hello, nonces)}
                )
            elif message["kind"] == "welcome" and nonces[1]:
                # The number of the generation may have arrived with the welcome.
                connection.put_back = messages[at + 1 :]
                connection.largest_bytes = LARGEST_MESSAGE_BYTES
                return True
            else:
                return False
        time.sleep(0.01)
    return False


def _bind_first(address: str, ports: Sequence[int], purpose: str) -> socket.socket:
    for port in ports:
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((address, port))
        except OSError:
            bound.close()
            continue
        return bound
    raise GangError(f"none of the {purpose} ports {list(ports)} is free on this machine")
