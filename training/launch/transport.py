"""How agents talk to each other: JSON lines over TCP with node 0 in the middle, and the handshake before it.

Node 0 draws a secret for each start and puts it into the job's store; every reader of that store can take part. Neither
side ever sends the secret: each answers a fresh nonce of the other with an HMAC (RFC 2104, SHA-256). The answer covers
both nonces, the start, the sender's role and the node's hello, so that none can be replayed, reflected or altered.
Messages after the handshake carry no HMAC of their own (docs/security.md).

Agents, not ranks, hold this conversation, so that a frozen rank cannot block the news of it. A closed connection is
the fastest sign of a lost node; silence is the slower one. A peer is believed only after both sides have proved that
they belong to the same start (`ebbflow.training.launch.transport`); before and after that all it may cost is bounded.
"""

from __future__ import annotations

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

from ebbflow.infra.errors import InfraError, ObjectNotFound, Outcome
from ebbflow.infra.layout import secret_key
from ebbflow.infra.process import AwakeClock
from ebbflow.infra.store import Store
from ebbflow.training.errors import GangError, TrainingError

SECRET_BYTES = 32
LARGEST_GREETING_BYTES = 4096  # of any message before a peer is known
HANDSHAKE_SECONDS = 5.0  # from the connection to the welcome
_COORDINATOR, _FOLLOWER = "node 0", "follower"
_NONCE_BYTES = 32
_LONGEST_REFUSAL = 4096


def new_nonce() -> str:
    return secrets.token_hex(_NONCE_BYTES)


def coordinator_proof(secret: bytes, token: str, hello: Mapping[str, Any], nonces: tuple[str, str]) -> str:
    """What node 0 answers to a hello. nonces: the follower's, then node 0's."""
    return _proof(_COORDINATOR, secret, token, hello, nonces)


def follower_proof(secret: bytes, token: str, hello: Mapping[str, Any], nonces: tuple[str, str]) -> str:
    """What a follower answers to node 0's nonce."""
    return _proof(_FOLLOWER, secret, token, hello, nonces)


def is_proof(given: object, expected: str) -> bool:
    """Compared in constant time."""
    return isinstance(given, str) and hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def is_nonce(value: object) -> bool:
    return isinstance(value, str) and len(value) == 2 * _NONCE_BYTES


class StartSecret:
    """The secret of one start in the job's store. run, attempt: as in `GangSpec`."""

    def __init__(self, job_store: Store, run: str, attempt: int) -> None:
        self._store, self._key = job_store, secret_key(run, attempt)

    def publish(self, secret: bytes) -> None:
        """Let the followers read it; in a folder only this user can (mode 0600). Raises StoreError."""
        self._store.put(self._key, secret.hex().encode(), private=True)

    def refuse(self, error: TrainingError) -> None:
        """Put node 0's refusal in the secret's place, so that no follower waits for a start that will not come.

        It may stay: every start has a key of its own. A store that does not take it costs the followers their deadline.
        """
        refusal = {"refused": str(error)[:_LONGEST_REFUSAL], "outcome": error.outcome.value}
        with contextlib.suppress(InfraError):
            self._store.put(self._key, json.dumps(refusal).encode(), private=True)

    def fetch(self) -> bytes | None:
        """None while node 0 has not published it. Raises StoreError, and GangError where node 0 refuses the start."""
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
        return secret if len(secret) == SECRET_BYTES else None

    def withdraw(self) -> None:
        """Delete it after the roll-call, when it opens nothing any more; so one that cannot be deleted may stay."""
        with contextlib.suppress(InfraError):
            self._store.delete(self._key)


def _refusal(content: str) -> GangError:
    try:
        document = json.loads(content)
        return GangError(
            f"node 0 refused the start: {document['refused']}", curable=False, outcome=Outcome(document["outcome"])
        )
    except (ValueError, LookupError, TypeError):
        return GangError("node 0 refused the start", curable=False)


def _proof(role: str, secret: bytes, token: str, hello: Mapping[str, Any], nonces: tuple[str, str]) -> str:
    covered = json.dumps([role, token, *nonces, dict(hello)], sort_keys=True, separators=(",", ":"))
    return hmac.new(secret, covered.encode(), hashlib.sha256).hexdigest()


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


def is_loopback(host: str) -> bool:
    """Whether `host`, as it is written, is this machine's loopback address: the gang is on this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


Message = dict[str, Any]
PING_SECONDS = 1.0
SILENCE_SECONDS = 20.0  # where nothing else is said
LARGEST_MESSAGE_BYTES = 16 * 2**20
DEEPEST_MESSAGE = 64  # objects and lists within each other
MOST_CALLERS, MOST_CALLERS_OF_ONE_SOURCE = 64, 32  # connections that have not proved yet who they are
_BYTES_PER_LOOK, _MESSAGES_PER_LOOK = 2**20, 1000  # of one peer: the others, and this node's ranks, have a turn too
_CLOSE_SECONDS = 1.0
_SECRET_PAUSE_SECONDS = 0.2
_LOOK_SECONDS = 0.02
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


class Connection:
    """One peer. `receive` never blocks; `closed` is set when the peer went away or fell silent for so many seconds.

    Silence is judged only after everything that has arrived was read, and time in which this process did not run is
    no silence of the peer's (`AwakeClock`).
    """

    def __init__(
        self,
        peer: socket.socket,
        silence_seconds: float = SILENCE_SECONDS,
        *,
        largest_bytes: int = LARGEST_MESSAGE_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """largest_bytes: of one message that the peer may send."""
        self._socket = peer
        self._silence_seconds, self._now = silence_seconds, now
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._buffer = bytearray()
        self._searched = 0  # so many bytes of the buffer hold no end of a line
        self.largest_bytes = largest_bytes
        self._put_back: list[Message] = []
        self._unsent = bytearray()
        self._awake = AwakeClock(now)
        self._received_at = 0.0  # awake seconds
        self._pinged = float("-inf")
        self.closed = ""

    def send(self, message: Message) -> None:
        """What the kernel does not take at once goes out with the next call of any kind. A peer that reads nothing for
        as long as silence is borne, or leaves 16 MiB unread, is gone, and what it would have been told with it."""
        if not self.closed:
            self._unsent += json.dumps(message).encode() + b"\n"
            self._write()
        if self.unsent_bytes > LARGEST_MESSAGE_BYTES:
            self.closed = self.closed or "it does not read what it is told"
        if self.closed:
            self._unsent.clear()

    @property
    def unsent_bytes(self) -> int:
        """Of what was said and the kernel has not taken yet; nothing waits for a peer that is gone."""
        return len(self._unsent)

    def receive(self) -> list[Message]:
        """Whole messages that have arrived, pings left out: at most 1,000, the rest with the next call."""
        self._read()
        self._write()
        messages, self._put_back = self._put_back, []
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

    def push_back(self, messages: list[Message]) -> None:
        """What was received and is for somebody else: the next call of `receive` begins with it."""
        self._put_back = messages

    def refuse(self, reason: str) -> None:
        """Hear nothing more of this peer."""
        self.closed = self.closed or reason

    def keep_alive(self) -> None:
        """Ping when it is time, and judge the peer's silence: to be called in each turn of the agent's loop."""
        awake, now = self._awake.tick(), self._now()
        self._read()
        if now - self._pinged >= PING_SECONDS:
            self._pinged = now
            self.send({"kind": "ping"})
        if awake - self._received_at > self._silence_seconds:
            self.refuse(f"silent for {awake - self._received_at:.0f} s")

    def close(self) -> None:
        """What is still unsent, such as a last word, has a moment to go out."""
        limit = time.monotonic() + _CLOSE_SECONDS
        while self._unsent and not self.closed and time.monotonic() < limit:
            select.select([], [self._socket], [], _CLOSE_SECONDS)
            self._write()
        self._socket.close()

    def _parse(self, line: bytes) -> Message:
        """A peer that does not speak our language is closed, and what it said is passed over."""
        message = None
        if not _is_deep(line):
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(line)
        if isinstance(message, dict) and isinstance(message.get("kind"), str):
            return message
        self.refuse("it does not speak our language")
        return {"kind": "ping"}

    def _write(self) -> None:
        while self._unsent and not self.closed:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                self._read(LARGEST_MESSAGE_BYTES)  # a last word that was sent before it went still counts
                self.refuse(f"connection lost: {error.strerror or error}")
                return
            del self._unsent[:sent]

    def _read(self, most_bytes: int = _BYTES_PER_LOOK) -> None:
        """What has arrived, up to most_bytes; the rest waits in the kernel, and then at the peer's."""
        taken = 0
        while not self.closed and taken < most_bytes:
            if len(self._buffer) > self.largest_bytes:
                self._received_at = self._awake.seconds  # it is this side that does not listen
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
    """Whether objects and lists are nested deeper than any message of ours; without parsing it."""
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
    """A connection that has not proved yet who it is. until: time.monotonic() by which it must have."""

    connection: Connection
    source: str
    until: float
    hello: Message = field(default_factory=dict)
    nonces: tuple[str, str] = ("", "")


class RollCallServer:
    """Node 0's side of the roll-call: collects one connection for each other node."""

    def __init__(
        self,
        address: str,
        ports: Sequence[int],
        token: str,
        secret: bytes,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """secret: of this start; see `ebbflow.training.launch.transport`."""
        self._token, self._secret, self._silence_seconds = token, secret, silence_seconds
        # A gang on one machine is nobody else's business.
        self._listener = _listen("127.0.0.1" if address == "127.0.0.1" else "", ports)
        self.port = self._listener.getsockname()[1]
        self.joined: dict[int, tuple[Connection, Message]] = {}
        self._callers: list[_Caller] = []

    def admit(self, nodes: int) -> None:
        """One look at the door: who has come is let in, and all who came before are kept in touch with."""
        for connection, _ in self.joined.values():
            connection.keep_alive()  # who came first must not take the wait for the last one for silence
        self._accept()
        now, waiting = time.monotonic(), []
        for caller in self._callers:
            if now > caller.until:
                caller.connection.refuse("it did not say who it is")
            if caller.connection.closed:
                caller.connection.close()
            elif not self._admit(caller, nodes):
                waiting.append(caller)
        self._callers = waiting

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
            time.sleep(_LOOK_SECONDS)
        return joined

    def close(self) -> None:
        """Nobody else is let in; those who have joined stay connected."""
        self._listener.close()
        for caller in self._callers:
            caller.connection.close()
        self._callers = []

    def _accept(self) -> None:
        for _ in range(MOST_CALLERS):
            try:
                peer, address = self._listener.accept()
            except OSError:  # there is none, or it is gone again, or this process may open no more files
                return
            connection = Connection(peer, self._silence_seconds, largest_bytes=LARGEST_GREETING_BYTES)
            self._callers.append(_Caller(connection, address[0], time.monotonic() + HANDSHAKE_SECONDS))
            self._drop_excess()

    def _drop_excess(self) -> None:
        """Of the source with the most callers the oldest one goes: those from elsewhere are not crowded out."""
        source, count = Counter(caller.source for caller in self._callers).most_common(1)[0]
        if len(self._callers) > MOST_CALLERS or count > MOST_CALLERS_OF_ONE_SOURCE:
            oldest = next(caller for caller in self._callers if caller.source == source)
            oldest.connection.close()
            self._callers.remove(oldest)

    def _admit(self, caller: _Caller, nodes: int) -> bool:
        """Whether this caller has been answered, one way or the other."""
        peer = caller.connection
        for message in peer.receive():
            if peer.closed:  # one that has gone tries again, and is then to be told from this one
                return False
            kind = message.pop("kind")
            if kind == "hello" and not caller.hello and _is_hello(message, nodes):
                caller.nonces = (message.pop("nonce"), new_nonce())
                caller.hello = message
                proof = coordinator_proof(self._secret, self._token, caller.hello, caller.nonces)
                peer.send({"kind": "challenge", "nonce": caller.nonces[1], "proof": proof})
                continue
            expected = follower_proof(self._secret, self._token, caller.hello, caller.nonces)
            if kind == "proof" and caller.hello and is_proof(message.get("proof"), expected):
                peer.largest_bytes = LARGEST_MESSAGE_BYTES
                peer.send({"kind": "welcome"})
                self.joined[caller.hello["node"]] = (peer, caller.hello)
            else:
                peer.send({"kind": "stranger"})
                peer.close()
            return True
        return False


def _is_hello(message: Message, nodes: int) -> bool:
    node, standing = message.get("node"), message.get("standing")
    return (
        is_nonce(message.get("nonce"))
        and type(node) is int
        and node in range(1, nodes)
        and isinstance(message.get("host"), str)
        and (standing is None or isinstance(standing, dict))
    )


def join_gang(
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
    """Another node's side of the roll-call. Raises GangError when node 0 cannot be found in time.

    secret: reads the secret of this start, anew after each handshake that failed: what an earlier start left behind is
    soon replaced. It returns None while there is none, and may raise InfraError.
    """
    limit = time.monotonic() + deadline_seconds
    last, known = "no answer", None
    while time.monotonic() < limit and not stopped():
        if known is None:
            try:
                known = secret()
                last = last if known else "the job's store holds no secret of this start yet: node 0 has not begun"
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
            refused, last = True, f"{address}:{port}: somebody else listens there"
        if not refused:  # node 0 may have refused the start and closed its port
            time.sleep(_SECRET_PAUSE_SECONDS)
        known = None
        time.sleep(0.1)
    raise GangError(
        f"roll-call: node {hello['node']} could not reach node 0 within {deadline_seconds:g} s ({last})\n"
        f"  hint: is node 0 running, and may nodes talk to each other on ports {min(ports)}-{max(ports)}?"
    )


def _shake_hands(connection: Connection, token: str, hello: Message, secret: bytes, seconds: float) -> bool:
    limit, nonces = time.monotonic() + seconds, (new_nonce(), "")
    connection.send({"kind": "hello", "nonce": nonces[0], **hello})
    while time.monotonic() < limit and not connection.closed:
        messages = connection.receive()
        for at, message in enumerate(messages):
            if message["kind"] == "challenge" and not nonces[1] and is_nonce(message.get("nonce")):
                nonces = (nonces[0], message["nonce"])
                if not is_proof(message.get("proof"), coordinator_proof(secret, token, hello, nonces)):
                    return False
                connection.send({"kind": "proof", "proof": follower_proof(secret, token, hello, nonces)})
            elif message["kind"] == "welcome" and nonces[1]:
                # What follows may be the number of the generation, said in one breath.
                connection.push_back(messages[at + 1 :])
                connection.largest_bytes = LARGEST_MESSAGE_BYTES
                return True
            else:
                return False
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
