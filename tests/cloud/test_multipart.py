"""Objects in parts: what is signed, what is compared, what a store that misbehaves leads to."""

from __future__ import annotations

import base64
import http.server
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from awscrt.checksums import crc64nvme

from ebbflow.core.errors import ObjectNotFound, StoreForbidden, StoreFull, StoreUnavailable
from ebbflow.core.store.multipart.requests import S3Account, Throttle, encoded_query, signed_headers
from ebbflow.core.store.multipart.sinks import BucketSink, FolderSink, open_sink
from ebbflow.training.checkpoint.part_uploader import PartSettings, PartUploader
from ebbflow.training.checkpoint.verified_io import CHUNK_BYTES, Deadline, crc_digits
from ebbflow.training.errors import CheckpointError

MIB = 2**20
Reply = tuple[int, dict[str, str], bytes]
Behaviour = Callable[["Request"], Reply | None]


class Request:
    """What came in, and how often the same was asked before."""

    def __init__(
        self, method: str, target: str, body: bytes, headers: dict[str, str], before: int
    ) -> None:
        self.method = method
        self.target = target
        self.body = body
        self.headers = headers
        self.before = before
        part = re.search(r"partNumber=(\d+)", target)
        if part:
            self.part = int(part[1])
        else:
            self.part = None


class Memory:
    """A small S3 of one bucket; `misbehave` may answer in its stead (None: it does not)."""

    def __init__(self, misbehave: Behaviour) -> None:
        self.objects: dict[str, bytes] = {}
        self.parts: dict[int, bytes] = {}
        self.aborted = 0
        self.seen: list[Request] = []
        self.misbehave = misbehave

    def answer(self, request: Request) -> Reply:
        return self.misbehave(request) or self.behave(request)

    def behave(self, request: Request) -> Reply:
        path = request.target.partition("?")[0]
        if request.method == "HEAD":
            known = self.objects.get(path)
            if known is None:
                return (404, {}, b"")
            return (200, {"Content-Length": str(len(known))}, b"")
        if request.method == "DELETE":
            self.aborted += 1
            return 204, {}, b""
        if request.method == "POST" and request.target.endswith("uploads="):
            return 200, {}, b"<R><UploadId>u1</UploadId></R>"
        if request.method == "POST":
            self.objects[path] = b"".join(self.parts[number] for number in sorted(self.parts))
            return 200, {}, b"<R><ETag>e</ETag></R>"
        if request.part is None:
            self.objects[path] = request.body
        else:
            self.parts[request.part] = request.body
        return 200, {"ETag": '"e"'}, b""


@contextmanager
def serving(
    misbehave: Behaviour = lambda request: None,
) -> Iterator[tuple[Memory, Callable[[], S3Account]]]:
    memory = Memory(misbehave)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            before = sum((r.method, r.target) == (self.command, self.path) for r in memory.seen)
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, body, headers, before)
            memory.seen.append(request)
            status, headers, data = memory.answer(request)
            if status == 0:  # hangs up without an answer
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_PUT = do_POST = do_HEAD = do_DELETE = do_GET = handle_one  # noqa: N815

        def log_message(self, *_: object) -> None:
            return None

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    account = S3Account("us-east-1", f"http://127.0.0.1:{server.server_port}", "key", "secret")
    try:
        yield memory, lambda: account
    finally:
        server.shutdown()
        server.server_close()


def uploader_to(account: Callable[[], S3Account], monkeypatch: pytest.MonkeyPatch) -> PartUploader:
    known = account()
    for name, value in {
        "AWS_ENDPOINT_URL": known.endpoint or "",
        "AWS_ACCESS_KEY_ID": known.access_key,
        "AWS_SECRET_ACCESS_KEY": known.secret_key,
    }.items():
        monkeypatch.setenv(name, value)
    throttle = Throttle()
    return PartUploader(
        open_sink("s3://bucket/job", throttle), PartSettings(part_bytes=CHUNK_BYTES), throttle
    )


def put(account: Callable[[], S3Account], key: str, body: bytes, *, seconds: float) -> None:
    sink = BucketSink("bucket", account, Throttle())
    sink.put_part(
        sink.begin(key, len(body), parts=1, seconds=seconds), 1, 0, body, 0, seconds=seconds
    )


def test_the_signature_is_the_one_of_the_documentation() -> None:
    """AWS, "Signature Calculations": the listing of objects, with an unsigned payload in place of
    the empty one.
    """
    account = S3Account(
        "us-east-1", None, "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    )
    query = encoded_query({"max-keys": "2", "prefix": "J"})
    host = {"host": "examplebucket.s3.amazonaws.com"}
    signed = signed_headers(account, "GET", "/", query, host, now=1369353600.0)
    assert query == "max-keys=2&prefix=J"
    assert signed["x-amz-date"] == "20130524T000000Z"
    scope = "Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request"
    assert signed["authorization"].startswith(
        f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host;x-amz-content-sha256;"
    )
    botocore = pytest.importorskip("botocore.auth")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    request = AWSRequest("GET", "https://examplebucket.s3.amazonaws.com/?max-keys=2&prefix=J")
    request.headers["X-Amz-Content-SHA256"] = "UNSIGNED-PAYLOAD"
    request.context["timestamp"] = "20130524T000000Z"
    request.headers["X-Amz-Date"] = "20130524T000000Z"
    signer = botocore.S3SigV4Auth(
        Credentials(account.access_key, account.secret_key), "s3", "us-east-1"
    )
    text = signer.string_to_sign(request, signer.canonical_request(request))
    assert signer.signature(text, request) in signed["authorization"]


def test_parts_are_summed_sent_and_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(2 * CHUNK_BYTES + 5)
    with serving() as (memory, account):
        stored = uploader_to(account, monkeypatch).upload(
            "data/1.bin", memoryview(data), Deadline(30)
        )
    assert memory.objects["/bucket/job/data/1.bin"] == data
    assert (stored.size, stored.crc64nvme) == (len(data), crc_digits(crc64nvme(data)))
    assert stored.chunks == tuple(
        crc_digits(crc64nvme(data[at : at + CHUNK_BYTES]))
        for at in range(0, len(data), CHUNK_BYTES)
    )
    parts = [request for request in memory.seen if request.part is not None]
    assert sorted(request.part for request in parts) == [1, 2, 3]
    for request in parts:
        stated = int.from_bytes(
            base64.b64decode(request.headers["x-amz-checksum-crc64nvme"]), "big"
        )
        assert stated == crc64nvme(request.body)


def test_trouble_is_tried_again_and_a_lost_answer_is_settled_by_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def misbehave(request: Request) -> Reply | None:
        if request.part == 2 and request.before < 4:
            refusal = b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"
            wrong = {"ETag": '"e"', "x-amz-checksum-crc64nvme": base64.b64encode(bytes(8)).decode()}
            return [(503, {}, refusal), (0, {}, b""), (409, {}, b""), (200, wrong, b"")][
                request.before
            ]
        if request.method == "POST" and "uploadId" in request.target:
            memory.behave(request)  # it is done, but nobody hears of it
            return 0, {}, b""
        return None

    data = os.urandom(2 * CHUNK_BYTES)
    with serving(misbehave) as (memory, account):
        stored = uploader_to(account, monkeypatch).upload(
            "data/1.bin", memoryview(data), Deadline(60)
        )
    assert memory.objects["/bucket/job/data/1.bin"] == data and stored.size == len(data)
    assert sum(request.part == 2 for request in memory.seen) == 5
    assert memory.aborted == 0


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (
            (503, {}, b"<Error><Code>SlowDown</Code></Error>"),
            r"after \d+ tries in \S+ of 1 s: part 2 of 2, .*SlowDown",
        ),
        (
            (403, {}, b"<Error><Code>AccessDenied</Code></Error>"),
            r"after 1 try in \S+ of 1 s: part 2 .* AccessDenied",
        ),
        ((507, {}, b""), r"after 1 try in \S+ of 1 s: part 2 of 2, .* no space"),
    ],
)
def test_a_permanent_error_of_a_part_ends_the_upload_in_time_and_cleans_up(
    monkeypatch: pytest.MonkeyPatch, reply: Reply, cause: str
) -> None:
    def misbehave(request: Request) -> Reply | None:
        if request.part == 2:
            return reply
        return None

    with serving(misbehave) as (memory, account):
        uploader = uploader_to(account, monkeypatch)
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=rf"put data/1.bin: gave up {cause}"):
            uploader.upload("data/1.bin", memoryview(bytes(2 * CHUNK_BYTES)), Deadline(1))
        assert time.monotonic() - began < 20
    assert memory.aborted == 1 and not memory.objects


def test_a_store_that_trickles_does_not_outlive_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def trickle() -> None:
        connection, _ = listener.accept()
        with connection:
            for byte in b"HTTP/1.1 200 OK\r\nX: " + b"a" * 1000:
                try:
                    connection.send(bytes([byte]))
                except OSError:
                    return
                time.sleep(0.05)

    threading.Thread(target=trickle, daemon=True).start()
    account = S3Account(
        "us-east-1", f"http://127.0.0.1:{listener.getsockname()[1]}", "key", "secret"
    )
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"no whole answer within 0\.5 s"):
        put(lambda: account, "key", b"data", seconds=0.5)
    assert time.monotonic() - began < 3
    listener.close()


def test_a_store_that_stops_reading_does_not_outlive_the_deadline() -> None:
    body = bytes(2 * CHUNK_BYTES)  # more than the buffers of both sides take
    with socket.create_server(("127.0.0.1", 0)) as listener:
        account = S3Account(
            "us-east-1", f"http://127.0.0.1:{listener.getsockname()[1]}", "key", "secret"
        )
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"no whole answer within 0\.5 s"):
            put(lambda: account, "key", body, seconds=0.5)
        assert time.monotonic() - began < 3


def test_upload_refusals_have_distinct_errors() -> None:
    replies = {
        "/bucket/gone": (404, b"<Error><Code>NoSuchUpload</Code></Error>", ObjectNotFound),
        "/bucket/key": (403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>", StoreForbidden),
        "/bucket/full": (403, b"<Error><Code>QuotaExceeded</Code></Error>", StoreFull),
        "/bucket/hurt": (400, b"<Error><Code>BadDigest</Code></Error>", StoreUnavailable),
    }
    with serving(lambda request: (replies[request.target][0], {}, replies[request.target][1])) as (
        _,
        account,
    ):
        for path, (_, _, kind) in replies.items():
            with pytest.raises(kind):
                put(account, path.rpartition("/")[2], b"", seconds=5)


def test_a_file_appears_whole_or_not_at_all_and_leftovers_are_swept(tmp_path: Path) -> None:
    throttle = Throttle()
    sink = FolderSink(tmp_path, throttle)
    uploader = PartUploader(sink, PartSettings(part_bytes=CHUNK_BYTES), throttle)
    for size in (0, 1, 4097, MIB + 1, 2 * CHUNK_BYTES + 12345):
        data = os.urandom(size)
        assert uploader.upload(f"data/{size}.bin", memoryview(data), Deadline(30)).size == size
        assert (tmp_path / f"data/{size}.bin").read_bytes() == data
    sink.begin("data/left.bin", 10, parts=1, seconds=1)
    assert not (tmp_path / "data/left.bin").exists()
    assert uploader.sweep("data", older_than_seconds=60, seconds=5) == []
    (left,) = [path for path in (tmp_path / "data").iterdir() if "left" in path.name]
    os.utime(left, (time.time() - 100, time.time() - 100))
    assert len(uploader.sweep("data", older_than_seconds=60, seconds=5)) == 1
    assert (
        sorted(path.stat().st_size for path in (tmp_path / "data").iterdir())[-1]
        == 2 * CHUNK_BYTES + 12345
    )


def test_the_cap_holds_for_all_parts_together_and_can_be_lifted(tmp_path: Path) -> None:
    throttle = Throttle(8.0 * MIB)
    uploader = PartUploader(FolderSink(tmp_path, throttle), PartSettings(part_bytes=MIB), throttle)
    began = time.monotonic()
    uploader.upload("capped", memoryview(bytes(4 * MIB)), Deadline(30))
    assert time.monotonic() - began >= 0.4, "4 MiB at 8 MiB/s"
    threading.Timer(0.2, lambda: setattr(throttle, "bytes_per_second", None)).start()
    throttle.bytes_per_second = 0.5 * MIB
    began = time.monotonic()
    uploader.upload("hurried", memoryview(bytes(4 * MIB)), Deadline(30))
    assert time.monotonic() - began < 6, "8 s at half a MiB per second"
