"""One signed request with a deadline for the whole of it, over connections that are kept, one per thread."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from ebbflow.infra.errors import ObjectNotFound, StoreAway, StoreError, StoreForbidden, StoreFull, StoreMisconfigured
from ebbflow.infra.multipart.account import Account
from ebbflow.infra.multipart.signing import encoded_path, encoded_query, signed_headers
from ebbflow.infra.multipart.throttle import Throttle
from ebbflow.infra.multipart.watch import Watch

Buffer = bytes | bytearray | memoryview

_FULL_CODES = frozenset({"EntityTooLarge", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"})
# The bytes, or the clock, went wrong on the way: the same request may do better.
_AGAIN_CODES = frozenset({"BadDigest", "RequestTimeout", "IncompleteBody", "XAmzContentChecksumMismatch"})
_LONGEST_TEXT = 300


@dataclass(frozen=True)
class Answer:
    """headers: by lower-case name."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Requests:
    """Requests to one bucket. Thread-safe; each thread keeps a connection of its own."""

    def __init__(self, bucket: str, account: Callable[[], Account]) -> None:
        self._bucket = bucket
        self._account = account
        self._kept = threading.local()
        self._watch = Watch()

    def send(
        self,
        method: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Buffer = b"",
        seconds: float,
        throttle: Throttle | None = None,
    ) -> Answer:
        """The answer to a request that succeeded. key "": the bucket itself.

        Raises StoreAway for what another try may cure (no or late answer, 5xx, 408, 409, 429, bytes that changed on
        their way), ObjectNotFound, StoreForbidden, StoreFull, StoreMisconfigured, and StoreError for any other answer.
        """
        account = self._account()
        scheme, host, path = self._place(account, key)
        encoded = encoded_query(query or {})
        view = memoryview(body).cast("B")
        given = {"host": host, "content-length": str(len(view)), **(headers or {})}
        ready = signed_headers(account, method, path, encoded, given, now=time.time())
        what = f"{method} s3://{self._bucket}/{key}"
        target = f"{path}?{encoded}" if encoded else path
        try:
            answer = self._exchange(scheme, host, method, target, ready, view, seconds, throttle)
        except (OSError, http.client.HTTPException) as error:
            cause = str(error) or type(error).__name__
            raise StoreAway(f"{what}: the connection to {host} broke: {cause}") from error
        if answer.status >= 300:
            raise _refused(what, answer)
        return answer

    def _place(self, account: Account, key: str) -> tuple[str, str, str]:
        """(scheme, host, path). Amazon's own buckets are names of hosts; others expect the bucket in the path."""
        if account.endpoint is None:
            if "." in self._bucket:  # would not match Amazon's certificate
                return "https", f"s3.{account.region}.amazonaws.com", encoded_path(f"{self._bucket}/{key}")
            return "https", f"{self._bucket}.s3.{account.region}.amazonaws.com", encoded_path(key)
        url = urlsplit(account.endpoint)
        return url.scheme, url.netloc, encoded_path(f"{url.path.strip('/')}/{self._bucket}/{key}")

    def _exchange(
        self,
        scheme: str,
        host: str,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: memoryview,
        seconds: float,
        throttle: Throttle | None,
    ) -> Answer:
        end = time.monotonic() + seconds
        connection = self._connection(scheme, host, max(seconds, 0.05))
        try:
            # A peer that trickles bytes renews every time-out of a socket: this one cannot be renewed.
            with self._watch.limit(max(seconds, 0.05), partial(_break, connection)):
                connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
                for name, value in headers.items():
                    connection.putheader(name, value)
                connection.endheaders()
                broken = _send(connection, body, end, throttle)
                try:
                    response = connection.getresponse()
                    data = response.read()
                except (OSError, http.client.HTTPException) as error:
                    raise broken or error from error
            if broken or response.will_close:
                self._drop()
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, data)
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            if time.monotonic() >= end - 0.01:
                raise TimeoutError(f"no whole answer within {seconds:.1f} s") from error
            raise

    def _connection(self, scheme: str, host: str, seconds: float) -> http.client.HTTPConnection:
        kept = getattr(self._kept, "connection", None)
        if kept is not None and self._kept.place == (scheme, host) and kept.sock is not None and _is_quiet(kept.sock):
            kept.sock.settimeout(seconds)
            return kept
        self._drop()
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        connection = kind(host, timeout=seconds)
        connection.connect()
        self._kept.connection, self._kept.place = connection, (scheme, host)
        return connection

    def _drop(self) -> None:
        connection = getattr(self._kept, "connection", None)
        self._kept.connection = None
        if connection is not None:
            connection.close()


def _send(
    connection: http.client.HTTPConnection, body: memoryview, end: float, throttle: Throttle | None
) -> OSError | None:
    """What broke off the sending: a store that refuses often answers, and closes, before it has read everything."""
    size = len(body)
    step = (throttle and throttle.slice_bytes) or max(size, 1)
    try:
        for start in range(0, size, step):
            piece = body[start : start + step]
            if throttle is not None:
                throttle.take(len(piece))
            _limit_sending(connection.sock, max(end - time.monotonic(), 0.001))
            connection.sock.sendall(piece)
        connection.sock.settimeout(max(end - time.monotonic(), 0.001))
    except (OSError, AttributeError) as error:  # the watch may have closed it in between
        return error if isinstance(error, OSError) else ConnectionAbortedError("closed at its deadline")
    return None


def _limit_sending(connected: socket.socket, seconds: float) -> None:
    """No send waits longer.

    By the kernel where it can: a time-out of Python's own makes the socket non-blocking, and a large body is then a
    wait and a call for each buffer's worth that the other side has taken, under the interpreter's lock.
    """
    if isinstance(connected, ssl.SSLSocket) or not sys.platform.startswith("linux"):
        connected.settimeout(seconds)
        return
    whole = int(seconds)
    limit = struct.pack("ll", whole, max(int(1e6 * (seconds - whole)), 1))  # a timeval; of zero there would be no limit
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _is_quiet(connected: socket.socket) -> bool:
    """False for a connection that the other side has closed meanwhile, or that has an answer nobody asked for."""
    if isinstance(connected, ssl.SSLSocket):
        return True  # cannot be peeked at: it is tried as it is
    try:
        connected.settimeout(0)
        connected.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _break(connection: http.client.HTTPConnection) -> None:
    try:
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _refused(what: str, answer: Answer) -> StoreError:
    text = answer.body.decode(errors="replace")
    match = re.search(r"<Code>\s*(\w+)\s*</Code>", text)
    code = match[1] if match else ""
    message = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    words = " ".join(message[1].split())[:_LONGEST_TEXT] if message else ""
    said = f"{what}: HTTP {answer.status} {code}".rstrip() + (f": {words}" if words else "")
    status = answer.status
    if code == "NoSuchBucket" or status in (301, 307):
        return StoreMisconfigured(f"{said}; fix: the bucket's name, AWS_REGION or the endpoint")
    if status == 404:
        return ObjectNotFound(said)
    if code in _FULL_CODES or status in (413, 507):
        return StoreFull(f"{said}; no room; fix: delete old jobs, or raise the quota")
    if code in _AGAIN_CODES or status in (408, 409, 429) or status >= 500:
        return StoreAway(said)
    if status in (401, 403):
        return StoreForbidden(f"{said}; fix: check the keys, and that they may put and list in this bucket")
    return StoreError(said)
