"""A metadata service of EC2 on the loopback, as healthy or as broken as a test wants it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_TOKEN = "a-token"
_INSTANCE = "i-0123456789abcdef0"


@dataclass(frozen=True)
class Behaviour:
    """version_1: whether requests without a token are answered. silent: takes the connection and never answers."""

    version_1: bool = False
    silent: bool = False
    token_status: int = 200
    notice: str | None = None


@contextmanager
def metadata_service(behaviour: Behaviour) -> Iterator[str]:
    """Its address, for AWS_EC2_METADATA_SERVICE_ENDPOINT."""
    released = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            if behaviour.silent:
                released.wait()
                return
            wanted = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            self._answer(behaviour.token_status if wanted else 400, _TOKEN)

        def do_GET(self) -> None:
            if self.headers["X-aws-ec2-metadata-token"] != _TOKEN and not behaviour.version_1:
                self._answer(401, "")
            elif self.path == "/latest/meta-data/instance-id":
                self._answer(200, _INSTANCE)
            elif self.path == "/latest/meta-data/spot/instance-action" and behaviour.notice:
                self._answer(200, behaviour.notice)
            else:
                self._answer(404, "")

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        released.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
