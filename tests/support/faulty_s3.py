"""An S3 endpoint that does nothing but fail, in the way that a test asks for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Fault:
    """What every request is answered with. seconds: to wait before that; clock_seconds: how far
    Date is ahead.
    """

    status: int = 500
    code: str = "InternalError"
    message: str = "injected"
    seconds: float = 0.0
    clock_seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    # Methods that fail; the others succeed with an empty answer; none: all fail
    only: frozenset[str] = frozenset()
    times: int | None = None  # how many requests fail; None: all
    requests: list[str] = field(default_factory=list)  # "METHOD path" of all that were asked

    def body(self) -> bytes:
        return f"<Error><Code>{self.code}</Code><Message>{self.message}</Message></Error>".encode()


@contextmanager
def faulty_s3(fault: Fault) -> Iterator[str]:
    """The endpoint, http://127.0.0.1:port, for as long as the block lasts."""
    server = _Server(fault)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()


@contextmanager
def swallowing_port() -> Iterator[str]:
    """An endpoint whose connections are never taken: its queue is full, so that the kernel drops
    what comes.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
            waiting.append(client)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for client in waiting:
                client.close()


def closed_port() -> str:
    """An endpoint where nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _answer(self) -> None:
        fault = self.server.fault
        fault.requests.append(f"{self.command} {self.path}")
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.closing.wait(fault.seconds):
            return
        fails = not fault.only or self.command in fault.only
        fails = fails and (fault.times is None or len(fault.requests) <= fault.times)
        if fails:
            body = fault.body()
        else:
            body = b""
        self.send_response_only(fault.status if fails else 200)
        self.send_header("Date", formatdate(time.time() + fault.clock_seconds, usegmt=True))
        for name, value in (fault.headers if fails else {"ETag": '"0"'}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815 - the names that http.server looks for

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, fault: Fault) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fault = fault
        self.closing = threading.Event()

    def handle_error(self, *_: Any) -> None:
        """A client that has given up is what these tests are about."""
