"""EC2's metadata service on the loopback, as healthy or as broken as wanted, and changeable while
it runs.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType, TracebackType

_TOKEN_PATH = "/latest/api/token"
INTERRUPTION_PATH = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_RELEASE_SECONDS = 30.0


class FakeMetadata:
    """answers: what a GET of a path gives. token_status: of the PUT. hop_limit: answers to the PUT
    never arrive, as in a container one hop too far. version_1: a GET needs no token. silent:
    nothing is ever answered. asked: every request's method and path, in order.
    """

    def __init__(self, answers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.answers = dict(answers)
        self.token = "a-token"
        self.token_status = 200
        self.hop_limit = self.version_1 = self.silent = False
        self.asked: list[tuple[str, str]] = []
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """For AWS_EC2_METADATA_SERVICE_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def interrupt(self, seconds: float, action: str = "terminate") -> None:
        """The instance is to go in so many seconds, rounded up to whole ones as the service tells
        them.
        """
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds + 0.999))
        self.answers[INTERRUPTION_PATH] = json.dumps({"action": action, "time": moment})

    def recommend_rebalance(self) -> None:
        self.answers[_REBALANCE] = json.dumps(
            {"noticeTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        )

    def forget(self) -> None:
        """Another instance, of which nothing is said."""
        self.answers.clear()

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def __enter__(self) -> FakeMetadata:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _handler(fake: FakeMetadata) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - self is the handler's, below
        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                fake.asked.append(("PUT", self.path))
                if fake.silent or fake.hop_limit:
                    fake._released.wait(_RELEASE_SECONDS)
                    return
                wanted = (
                    self.path == _TOKEN_PATH
                    and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                )
                self._answer(fake.token_status if wanted else 400, fake.token)

            def do_GET(self) -> None:
                fake.asked.append(("GET", self.path))
                if fake.silent:
                    fake._released.wait(_RELEASE_SECONDS)
                    return
                if self.headers["X-aws-ec2-metadata-token"] != fake.token and not fake.version_1:
                    self._answer(401, "")
                elif (text := fake.answers.get(self.path)) is not None:
                    self._answer(200, text)
                else:
                    self._answer(404, "")

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *words: object) -> None:
                pass

        return Handler
