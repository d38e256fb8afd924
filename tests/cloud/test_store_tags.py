"""Tags of objects go to Amazon's buckets, where lifecycle rules read them, and to no other store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from obstore.store import S3Store

from ebbflow.core.layout import TOMBSTONE_TAGS, tombstone_key
from ebbflow.core.store import Store

KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
}


class Listener(ThreadingHTTPServer):
    """Takes every put, and keeps the tags that came with it."""

    def __init__(self) -> None:
        self.tags: list[str | None] = []
        super().__init__(("127.0.0.1", 0), Putting)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Putting(BaseHTTPRequestHandler):
    server: Listener

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.tags.append(self.headers.get("x-amz-tagging"))
        self.send_response(200)
        self.send_header("etag", '"1"')
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_another_store_than_amazons_sees_no_tag(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (KEYS | {"AWS_ENDPOINT_URL_S3": listener.url}).items():
        monkeypatch.setenv(name, value)
    Store.open("s3://bucket/jobs").put(tombstone_key("0" * 64), b"{}", tags=TOMBSTONE_TAGS)
    assert listener.tags == [None]


def test_amazons_gets_the_tag_that_the_lifecycle_rule_asks_for(listener: Listener) -> None:
    """By the same client without what is set for other stores: Amazon's own cannot be reached from
    here.
    """
    client = S3Store(
        "bucket",
        endpoint=listener.url,
        region="us-east-1",
        access_key_id="testing",
        secret_access_key="testing",
        client_options={"allow_http": True},
    )
    Store(client, "s3://bucket", None).put(tombstone_key("0" * 64), b"{}", tags=TOMBSTONE_TAGS)
    assert listener.tags == ["ebbflow=tombstone"]
