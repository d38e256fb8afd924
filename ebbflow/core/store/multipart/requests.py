"""Signed S3 requests with deadlines, over kept-alive connections and with a bandwidth limit.

Signatures follow AWS's "Signature Calculations for the Authorization Header: Transferring Payload
in a Single Chunk". They do not cover the payload. CRC64NVME checksums protect the payload, because
they take a quarter of the time.
"""

import hashlib
import hmac
import http.client
import os
import re
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from urllib.parse import quote, urlsplit

from ebbflow.core.errors import (
    ObjectNotFound,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
)
from ebbflow.core.store.s3 import aws_settings, credential_provider, read_certificates

_CREDENTIALS_SECONDS = 30.0

_PAYLOAD = "UNSIGNED-PAYLOAD"

_BURST_SECONDS = 0.05  # short, so that threads share the network evenly

Buffer = bytes | bytearray | memoryview

_FULL_CODES = frozenset(
    {"EntityTooLarge", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"}
)
# The request was corrupted or late: a retry may succeed.
_AGAIN_CODES = frozenset(
    {"BadDigest", "RequestTimeout", "IncompleteBody", "XAmzContentChecksumMismatch"}
)
_LONGEST_TEXT = 300


@dataclass(frozen=True)
class S3Account:
    """Region, endpoint and access keys for requests to S3."""

    region: str
    endpoint: str | None  # URL of a store that is not Amazon's, None for Amazon S3
    access_key: str = ""  # "" if requests are not signed, as for a public bucket
    secret_key: str = ""
    token: str | None = None  # session token of temporary keys, else None


class Throttle:
    """Limit on the bytes per second that are sent by all threads of a process together.

    It may be changed at any time.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        if bytes_per_second is not None and bytes_per_second <= 0:
            raise ValueError(f"bytes_per_second must be positive: {bytes_per_second}")
        self.bytes_per_second = bytes_per_second
        self._free_at = 0.0  # time.monotonic() at which the bytes taken so far are within the cap
        self._lock = threading.Lock()

    @property
    def slice_bytes(self) -> int | None:
        """Number of bytes to send per call of `take`, or None without a limit."""
        rate = self.bytes_per_second
        if rate is None:
            return None
        return max(16 * 1024, int(rate * _BURST_SECONDS))

    def take(self, size: int) -> None:
        """Wait until `size` more bytes may be sent."""
        rate = self.bytes_per_second
        if rate is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + size / rate
        if start > now:
            time.sleep(start - now)


@dataclass(frozen=True)
class S3Response:
    """A response of S3. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class S3Client:
    """Client for one bucket. Thread-safe: each thread keeps its own connection."""

    def __init__(self, bucket: str, account: Callable[[], S3Account]) -> None:
        self._bucket = bucket
        self._account = account
        self._kept = threading.local()

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
    ) -> S3Response:
        """Send a request within `seconds`, and return the response if its status is below 300.

        The key "" addresses the bucket itself. `throttle` limits the speed at which the body is
        sent.

        Raises:
            StoreUnavailable: no or late response, status 5xx, 408, 409 or 429, or corrupted bytes;
                a retry may help.
            ObjectNotFound: status 404.
            StoreForbidden: status 401 or 403.
            StoreFull: the store accepts no more bytes.
            StoreMisconfigured: the bucket does not exist or is in another region.
            StoreError: any other response.
        """
        account = self._account()
        scheme, host, path = self._place(account, key)
        encoded = encoded_query(query or {})
        view = memoryview(body).cast("B")
        given = {"host": host, "content-length": str(len(view)), **(headers or {})}
        ready = signed_headers(account, method, path, encoded, given, now=time.time())
        what = f"{method} s3://{self._bucket}/{key}"
        if encoded:
            target = f"{path}?{encoded}"
        else:
            target = path
        end = time.monotonic() + seconds
        try:
            connection = self._connection(scheme, host, max(seconds, 0.05))
            # A peer that sends single bytes keeps resetting a socket's timeout, but not this timer.
            watch = threading.Timer(max(seconds, 0.05), _break, [connection])
            watch.daemon = True
            watch.start()
            try:
                connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
                for name, value in ready.items():
                    connection.putheader(name, value)
                connection.endheaders()
                broken = _send(connection, view, end, throttle)
                try:
                    response = connection.getresponse()
                    data = response.read()
                except (OSError, http.client.HTTPException) as error:
                    raise broken or error from error
            finally:
                watch.cancel()
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            late = time.monotonic() >= end - 0.01
            if late:
                cause = f"no whole answer within {seconds:.1f} s"
            else:
                cause = str(error) or type(error).__name__
            raise StoreUnavailable(f"{what}: the connection to {host} broke: {cause}") from error
        if broken or response.will_close:
            self._drop()
        answer = S3Response(
            response.status, {name.lower(): value for name, value in response.getheaders()}, data
        )
        if answer.status >= 300:
            raise _refused(what, answer)
        return answer

    def _place(self, account: S3Account, key: str) -> tuple[str, str, str]:
        """Return the scheme, host and path of a key's URL.

        The bucket's name is in the path, or on Amazon S3 in the host.
        """
        if account.endpoint is None:
            if "." in self._bucket:  # would not match Amazon's certificate
                return (
                    "https",
                    f"s3.{account.region}.amazonaws.com",
                    encoded_path(f"{self._bucket}/{key}"),
                )
            return "https", f"{self._bucket}.s3.{account.region}.amazonaws.com", encoded_path(key)
        url = urlsplit(account.endpoint)
        return url.scheme, url.netloc, encoded_path(f"{url.path.strip('/')}/{self._bucket}/{key}")

    def _connection(self, scheme: str, host: str, seconds: float) -> http.client.HTTPConnection:
        kept = getattr(self._kept, "connection", None)
        if (
            kept is not None
            and self._kept.place == (scheme, host)
            and kept.sock is not None
            and _is_quiet(kept.sock)
        ):
            kept.sock.settimeout(seconds)
            return kept
        self._drop()
        if scheme == "https":
            connection = http.client.HTTPSConnection(host, timeout=seconds, context=_tls_context())
        else:
            connection = http.client.HTTPConnection(host, timeout=seconds)
        connection.connect()
        self._kept.connection = connection
        self._kept.place = (scheme, host)
        return connection

    def _drop(self) -> None:
        connection = getattr(self._kept, "connection", None)
        self._kept.connection = None
        if connection is not None:
            connection.close()


def find_account() -> Callable[[], S3Account]:
    """Return a function that returns the S3 account with its current access keys.

    Raises StoreForbidden, StoreUnavailable.
    """
    settings = aws_settings()
    keys = os.environ
    provider = credential_provider(_CREDENTIALS_SECONDS)
    signed = keys.get("AWS_ACCESS_KEY_ID") and keys.get("AWS_SECRET_ACCESS_KEY")
    known = {
        "access_key_id": keys["AWS_ACCESS_KEY_ID"] if signed else "",
        "secret_access_key": keys["AWS_SECRET_ACCESS_KEY"] if signed else "",
        "token": keys.get("AWS_SESSION_TOKEN") if signed else None,
    }

    def account() -> S3Account:
        if provider is None:
            now = known
        else:
            now = provider()
        own = now["access_key_id"], now["secret_access_key"], now["token"]
        return S3Account(settings.region, settings.endpoint, *own)

    return account


def signed_headers(
    account: S3Account,
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    *,
    now: float,
) -> dict[str, str]:
    """Sign a request, and return its headers with those of the signature, named in lower case.

    `headers` must contain "host". `path` and `query` are percent-encoded, as in the request; `now`
    is Unix time.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    known = {name.lower(): " ".join(value.split()) for name, value in headers.items()}
    known |= {"x-amz-date": stamp, "x-amz-content-sha256": _PAYLOAD}
    if not account.access_key:
        return known
    if account.token:
        known["x-amz-security-token"] = account.token
    names = sorted(known)
    lines = [f"{name}:{known[name]}\n" for name in names]
    request = "\n".join([method, path, query, "".join(lines), ";".join(names), _PAYLOAD])
    scope = f"{stamp[:8]}/{account.region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{account.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    credential = f"Credential={account.access_key}/{scope}"
    known["authorization"] = (
        f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return known


def encoded_query(parameters: Mapping[str, str]) -> str:
    """Percent-encode query parameters, sorted by name as the signature requires."""
    return "&".join(
        f"{quote(name, safe='-_.~')}={quote(parameters[name], safe='-_.~')}"
        for name in sorted(parameters)
    )


def encoded_path(key: str) -> str:
    return quote(f"/{key.lstrip('/')}", safe="/-_.~")


@cache
def _tls_context() -> ssl.SSLContext:
    """Return a TLS context that trusts the system's authorities and private ones
    (AWS_CA_BUNDLE).
    """
    context = ssl.create_default_context()
    certificates = read_certificates()
    if certificates is not None:
        context.load_verify_locations(cadata=certificates.decode("ascii", "ignore"))
    return context


def _send(
    connection: http.client.HTTPConnection, body: memoryview, end: float, throttle: Throttle | None
) -> OSError | None:
    """Send the body of a request, and return the error that stopped the sending, or None.

    The error is not raised, because a store that refuses a request may respond and close the
    connection before it has read the body. The caller then still reads the response.
    """
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
    except (OSError, AttributeError) as error:  # the timer of `send` may have closed it
        if isinstance(error, OSError):
            return error
        return ConnectionAbortedError("closed at its deadline")
    return None


def _limit_sending(connected: socket.socket, seconds: float) -> None:
    """Limit how long one send on the socket may block.

    On Linux without TLS, the kernel enforces the limit (SO_SNDTIMEO). Python's own timeout would
    make the socket non-blocking. A large body would then need a wait and a call per buffer, and
    each needs the interpreter's lock.
    """
    if isinstance(connected, ssl.SSLSocket) or not sys.platform.startswith("linux"):
        connected.settimeout(seconds)
        return
    whole = int(seconds)
    # A timeval; zero would mean no limit
    limit = struct.pack("ll", whole, max(int(1e6 * (seconds - whole)), 1))
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _is_quiet(connected: socket.socket) -> bool:
    """Return whether a kept-alive connection can be reused: the server has not closed it, and no
    bytes are unread.
    """
    if isinstance(connected, ssl.SSLSocket):
        return True  # TLS allows no peeking, so the connection is tried as it is
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


def _refused(what: str, answer: S3Response) -> StoreError:
    text = answer.body.decode(errors="replace")
    match = re.search(r"<Code>\s*(\w+)\s*</Code>", text)
    if match:
        code = match[1]
    else:
        code = ""
    message = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    if message:
        words = " ".join(message[1].split())[:_LONGEST_TEXT]
    else:
        words = ""
    message_line = f"{what}: HTTP {answer.status} {code}".rstrip() + (f": {words}" if words else "")
    status = answer.status
    if code == "NoSuchBucket" or status in (301, 307):
        return StoreMisconfigured(
            f"{message_line}; fix: the bucket's name, AWS_REGION or the endpoint"
        )
    if status == 404:
        return ObjectNotFound(message_line)
    if code in _FULL_CODES or status in (413, 507):
        return StoreFull(f"{message_line}; no space; fix: delete old jobs, or raise the quota")
    if code in _AGAIN_CODES or status in (408, 409, 429) or status >= 500:
        return StoreUnavailable(message_line)
    if status in (401, 403):
        return StoreForbidden(
            f"{message_line}; fix: check the keys, and that they may put and list in this bucket"
        )
    return StoreError(message_line)
