"""Reading a request's body off the wire: plain, in HTTP chunks, and in the chunks that AWS clients
wrap bodies in.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import BinaryIO

from tests.support.s3.refusals import Refused
from tests.support.s3.request import Request
from tests.support.s3.signature import Signature


class BrokenBody(Exception):
    """The client left in the middle of its body."""


def read_raw(source: BinaryIO, request: Request, halfway: Callable[[], None] | None) -> bytes:
    """What the client sends, as it stands on the wire. halfway: called once, when half of a plain
    body has come.
    """
    if "chunked" in request.headers.get("transfer-encoding", "").lower():
        if halfway is not None:
            halfway()
        return _http_chunks(source)
    length = request.headers.get("content-length")
    if length is None:
        if request.method == "PUT":
            raise Refused("MissingContentLength", "a body needs a Content-Length")
        return b""
    first = b""
    if halfway is not None:
        first = _exactly(source, int(length) // 2)
        halfway()
    return first + _exactly(source, int(length) - len(first))


def decode(raw: bytes, request: Request, signature: Signature) -> bytes:
    """The body's own bytes. Signed chunks are checked; trailers are left in `request.trailers`."""
    kind = request.header("x-amz-content-sha256") or ""
    if not kind.startswith("STREAMING-"):
        return raw
    signed = kind.startswith("STREAMING-AWS4-HMAC-SHA256-PAYLOAD")
    if not signed and kind != "STREAMING-UNSIGNED-PAYLOAD-TRAILER":
        raise Refused("NotImplemented", f"x-amz-content-sha256: {kind}")
    source = io.BytesIO(raw)
    parts = []
    previous = signature.value
    while True:
        size, _, extension = source.readline().strip().decode().partition(";")
        try:
            chunk = source.read(int(size, 16))
        except ValueError:
            raise Refused("IncompleteBody", f"a chunk begins with {size!r}") from None
        if signed:
            expected = signature.chunk(previous, chunk)
            if extension != f"chunk-signature={expected}":
                raise Refused(
                    "SignatureDoesNotMatch",
                    f"chunk {len(parts)} is not signed with this secret key",
                )
            previous = expected
        if not chunk:
            break
        parts.append(chunk)
        source.readline()
    _read_trailers(source, request, signature if signed else None, previous)
    body = b"".join(parts)
    stated = request.header("x-amz-decoded-content-length")
    if stated is None or int(stated) != len(body):
        raise Refused(
            "IncompleteBody", f"{len(body)} bytes came, x-amz-decoded-content-length says {stated}"
        )
    return body


def _read_trailers(
    source: BinaryIO, request: Request, signature: Signature | None, previous: str
) -> None:
    for line in source.read().decode().split("\r\n"):
        name, colon, value = line.partition(":")
        if colon:
            request.trailers[name.strip().lower()] = value.strip()
    stated = request.trailers.pop("x-amz-trailer-signature", None)
    if signature is not None and request.trailers:
        canonical = "".join(
            f"{name}:{value}\n" for name, value in sorted(request.trailers.items())
        ).encode()
        if stated != signature.trailer(previous, canonical):
            raise Refused(
                "SignatureDoesNotMatch", "the trailers are not signed with this secret key"
            )


def _http_chunks(source: BinaryIO) -> bytes:
    parts = []
    while True:
        size = int(source.readline().split(b";")[0] or b"x", 16)
        if not size:
            break
        parts.append(_exactly(source, size))
        source.readline()
    while source.readline().strip():
        pass
    return b"".join(parts)


def _exactly(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) != size:
        raise BrokenBody
    return data
