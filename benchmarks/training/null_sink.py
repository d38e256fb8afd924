"""An S3 that keeps nothing: what a client alone can do, with a server that takes next to none of
the machine's time.

    python -m benchmarks.training.null_sink PARENT_PID

Prints its port. Bodies above a mebibyte are discarded by the kernel, without being copied
(MSG_TRUNC), and counted; small ones are kept, so that indexes and manifests are found again. It
checks no signature and no checksum.
"""

from __future__ import annotations

import hashlib
import re
import socket
import sys
import threading
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from ebbflow.core.process import die_with_parent

_KEPT_BYTES = 2**20
_BLOCK = 4 * 2**20
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


@dataclass
class _Objects:
    sizes: dict[str, int] = field(default_factory=dict)
    bodies: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)  # bytes so far, by upload
    lock: threading.Lock = field(default_factory=threading.Lock)


def main(parent_pid: int) -> None:
    die_with_parent(parent_pid)
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(listener.getsockname()[1], flush=True)
    objects = _Objects()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection, objects), daemon=True).start()


def _serve(connection: socket.socket, objects: _Objects) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffered = b""
    try:
        while True:
            while b"\r\n\r\n" not in buffered:
                more = connection.recv(65536)
                if not more:
                    return
                buffered += more
            head, buffered = buffered.split(b"\r\n\r\n", 1)
            lines = head.decode("latin-1").split("\r\n")
            method, target, _ = lines[0].split(" ")
            headers = {
                name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])
            }
            if "expect" in headers:
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            size, body, buffered = _take_body(connection, headers, buffered)
            connection.sendall(_answer(objects, method, target, headers, size, body))
    except OSError:
        return
    finally:
        connection.close()


def _take_body(
    connection: socket.socket, headers: dict[str, str], buffered: bytes
) -> tuple[int, bytes, bytes]:
    """(length, the bytes where they are kept, what came after)."""
    if headers.get("transfer-encoding", "") == "chunked":
        raise OSError("no chunked bodies here")
    size = int(headers.get("content-length", "0"))
    if size <= _KEPT_BYTES:
        while len(buffered) < size:
            more = connection.recv(65536)
            if not more:
                raise OSError("closed")
            buffered += more
        return size, buffered[:size], buffered[size:]
    left = size - len(buffered)
    while left > 0:
        # Discarded in the kernel: the number of bytes is all that comes back.
        left -= _discard(connection, min(left, _BLOCK))
    return size, b"", b""


def _discard(connection: socket.socket, size: int) -> int:
    count = connection.recv_into(memoryview(_NOTHING)[:size], size, socket.MSG_TRUNC)
    if count == 0:
        raise OSError("closed")
    return count


_NOTHING = bytearray(_BLOCK)


def _answer(
    o: _Objects, method: str, target: str, headers: dict[str, str], size: int, body: bytes
) -> bytes:
    url = urlsplit(target)
    query = {
        name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()
    }
    key = unquote(url.path).lstrip("/").partition("/")[2]
    with o.lock:
        if method == "GET" and not key:
            return _list(o, query)
        if "uploadId" in query or "uploads" in query:
            return _multipart(o, method, key, query, size)
        if method == "POST" and "delete" in query:
            names = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for name in names:
                o.sizes.pop(name, None), o.bodies.pop(name, None)
            rows = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            return _response(200, f"<DeleteResult>{rows}</DeleteResult>".encode())
        if method == "PUT":
            o.sizes[key] = _decoded_size(headers, size)
            o.bodies[key] = body
            return _response(200, b"", {"ETag": f'"{hashlib.md5(key.encode()).hexdigest()}"'})
        if method == "DELETE":
            o.sizes.pop(key, None), o.bodies.pop(key, None)
            return _response(204)
        if key not in o.sizes:
            return _response(
                404, b"<Error><Code>NoSuchKey</Code></Error>" if method == "GET" else b""
            )
        about = {"Last-Modified": _DATE, "ETag": f'"{hashlib.md5(key.encode()).hexdigest()}"'}
        if method == "HEAD":
            return _response(200, b"", about, length=o.sizes[key])
        return _response(200, o.bodies[key], about)


def _decoded_size(headers: dict[str, str], size: int) -> int:
    return int(headers.get("x-amz-decoded-content-length", size))


def _multipart(o: _Objects, method: str, key: str, query: dict[str, str], size: int) -> bytes:
    if method == "POST" and "uploads" in query:
        upload = hashlib.md5(f"{key}{len(o.parts)}".encode()).hexdigest()
        o.parts[upload] = 0
        body = f"<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
        return _response(200, f"{body}</InitiateMultipartUploadResult>".encode())
    upload = query["uploadId"]
    if method == "PUT":
        o.parts[upload] += size
        return _response(
            200, b"", {"ETag": f'"{hashlib.md5(query["partNumber"].encode()).hexdigest()}"'}
        )
    if method == "POST":
        o.sizes[key] = o.parts.pop(upload)
        o.bodies[key] = b""
        body = (
            f"<CompleteMultipartUploadResult><Key>{escape(key)}</Key><ETag>&quot;0-1&quot;</ETag>"
        )
        return _response(200, f"{body}</CompleteMultipartUploadResult>".encode())
    o.parts.pop(upload, None)
    return _response(204)


def _list(o: _Objects, query: dict[str, str]) -> bytes:
    if "uploads" in query:
        return _response(200, b"<ListMultipartUploadsResult></ListMultipartUploadsResult>")
    if "location" in query:
        return _response(200, b"<LocationConstraint></LocationConstraint>")
    keys = sorted(key for key in o.sizes if key.startswith(query.get("prefix", "")))
    after = query.get("continuation-token") or query.get("start-after", "")
    limit = int(query.get("max-keys", "1000"))
    page = [key for key in keys if key > after][:limit]
    more = bool(page) and page[-1] != keys[-1]
    rows = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{o.sizes[key]}</Size><ETag>&quot;0&quot;</ETag>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
        for key in page
    )
    if more:
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
    else:
        token = ""
    about = f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
    return _response(
        200, f"<ListBucketResult><Name>b</Name>{about}{rows}</ListBucketResult>".encode()
    )


def _response(
    status: int, body: bytes = b"", headers: dict[str, str] | None = None, length: int | None = None
) -> bytes:
    known = {
        "Content-Length": str(len(body) if length is None else length),
        "Date": _DATE,
        **(headers or {}),
    }
    if body.startswith(b"<"):
        known["Content-Type"] = "application/xml"
    lines = "".join(f"{name}: {value}\r\n" for name, value in known.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body


if __name__ == "__main__":
    main(int(sys.argv[1]))
