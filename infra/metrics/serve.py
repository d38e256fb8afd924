"""`/metrics` over HTTP, from a thread of its own: nothing that goes wrong here may reach what is being measured."""

from __future__ import annotations

import errno
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST  # text format 0.0.4

PORTS_TRIED = 16
_REQUEST_SECONDS = 10.0
_LOOK_SECONDS = 0.1  # how soon the server notices that it is to close


class MetricsServer:
    """Serves `page()` at the first free one of `PORTS_TRIED` ports from `port` on: nodes may share a machine.

    address: an IP address of this machine to listen on; "": all of them. Raises OSError when no port is free, or when
    port or address is not allowed.
    """

    def __init__(self, port: int, page: Callable[[], bytes], *, address: str) -> None:
        self._server = _listen(address, port, _handler(page))
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_SECONDS,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_REQUEST_SECONDS)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of this host's full name, which waits for a name server that may be away."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that goes away in mid-answer is its own affair."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def _listen(address: str, port: int, handler: type[BaseHTTPRequestHandler]) -> _Server:
    server = _Server6 if ":" in address else _Server
    last = min(port + PORTS_TRIED - 1, 65535)
    for number in range(port, last + 1):
        try:
            return server((address, number), handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"ports {port} to {last} are all taken")


def _handler(page: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:
            found = self.path.split("?")[0] == "/metrics"
            content = page() if found else b"metrics are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST if found else "text/plain")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """A line per scrape is nobody's news."""

    return Handler
