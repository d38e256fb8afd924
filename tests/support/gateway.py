"""Two Pushgateways: a small one that keeps groups as the real one does, and the real one where it
is installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.flow import wait_until
from tests.support.gangs import free_port

BINARY = next(filter(None, map(shutil.which, ("prometheus-pushgateway", "pushgateway"))), None)
Groups = dict[tuple[str, str], dict[str, float]]


class SmallGateway:
    """PUT replaces the whole group of its path, DELETE removes the group of exactly its path;
    groups never expire.

    requests: (method, path) of all that came. away: pushes are answered with 503. A body that is no
    exposition format is answered with 400.
    """

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self.away = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def groups(self) -> Groups:
        """{(job, node): {metric: value}} of the metrics without further labels."""
        found: Groups = {}
        for path, body in self.kept.items():
            words = path.split("/")
            key = dict(zip(words[2::2], words[3::2], strict=True))
            samples = []
            for family in text_string_to_metric_families(body):
                samples += family.samples
            plain = {
                sample.name: sample.value
                for sample in samples
                if set(sample.labels) <= {"job", "node"}
            }
            found[key["job"], key["node"]] = plain
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(gateway) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler below has a self of its own
        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                gateway.requests.append(("PUT", self.path))
                if gateway.away:
                    self.send_error(503)
                    return
                try:
                    list(text_string_to_metric_families(body))
                except ValueError:
                    self.send_error(400)
                    return
                gateway.kept[self.path] = body
                self._answer()

            def do_DELETE(self) -> None:
                gateway.requests.append(("DELETE", self.path))
                gateway.kept.pop(self.path, None)
                self._answer()

            def _answer(self) -> None:
                self.send_response(202)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        return Handler


class RealGateway:
    """Debian's prometheus-pushgateway, which persists to a system path unless told otherwise."""

    def __init__(self, folder: Path) -> None:
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        command = [
            BINARY,
            f"--web.listen-address={address}",
            f"--persistence.file={folder / 'groups'}",
        ]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until("the Pushgateway", self._is_ready, timeout=20)

    def groups(self) -> Groups:
        found: Groups = {}
        for group in self._get("/api/v1/metrics")["data"]:
            plain = {}
            for name, family in group.items():
                for metric in (
                    family["metrics"] if isinstance(family, dict) and "metrics" in family else []
                ):
                    if set(metric["labels"]) <= {"job", "node", "instance"} and "value" in metric:
                        plain[name] = float(metric["value"])
            found[group["labels"]["job"], group["labels"]["node"]] = plain
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        try:
            self._get("/api/v1/status")
        except OSError:
            return False
        return True

    def _get(self, path: str) -> dict:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as answer:
            return json.loads(answer.read())


@contextmanager
def running_gateway(kind: str, folder: Path) -> Iterator[SmallGateway | RealGateway]:
    """kind: small or real."""
    if kind == "small":
        gateway = SmallGateway()
    else:
        gateway = RealGateway(folder)
    try:
        yield gateway
    finally:
        gateway.close()
