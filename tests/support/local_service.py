"""A stand-in of a cloud's API: an HTTP server in a process of its own, with a door through which
tests change it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ebbflow.core.process import die_with_parent

_ROOT = Path(__file__).resolve().parents[2]


class LocalServer(ThreadingHTTPServer):
    """A server of this machine alone, with a thread per connection."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int) -> None:
        super().__init__(("127.0.0.1", port), handler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """A client that leaves in the middle is no news."""


def serve(
    module: str,
    make_server: Callable[[dict[str, Any], Path, int], LocalServer],
    arguments: list[str],
) -> None:
    """Print {"endpoint"}, and serve until the parent ends or a signal comes.

    make_server: takes the settings, the folder in which jobs run, and the port.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("folder", type=Path, help="where jobs run")
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument("--parent", type=int, help="process whose end ends this one")
    parser.add_argument("--settings", default="{}", help="JSON, as Settings takes it")
    given = parser.parse_args(arguments)
    if given.parent is not None:
        die_with_parent(given.parent)
    server = make_server(json.loads(given.settings), given.folder, given.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    print(json.dumps({"endpoint": server.endpoint}), flush=True)
    server.serve_forever(poll_interval=0.2)
    server.server_close()


@contextlib.contextmanager
def run_service(module: str, folder: Path, log: Path, settings: dict[str, Any]) -> Iterator[str]:
    """Run `python -m module` until the end of the block. Yield its endpoint."""
    words = [str(folder), "--parent", str(os.getpid()), "--settings", json.dumps(settings)]
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{module} did not start:\n{log.read_text()}")
        yield json.loads(line)["endpoint"]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask_service(endpoint: str, path: str, document: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the door for tests."""
    request = urllib.request.Request(f"{endpoint}/_control/{path}", json.dumps(document).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())
