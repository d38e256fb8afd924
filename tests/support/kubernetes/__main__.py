"""`python -m tests.support.kubernetes FOLDER [--port N] [--parent PID] [--settings JSON]`: prints {"endpoint"}, serves.

Each pod runs in FOLDER/POD. Lives until its parent ends, or a signal.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from pathlib import Path

from ebbflow.infra.process import die_with_parent
from tests.support.kubernetes.server import Server
from tests.support.kubernetes.settings import Settings


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.kubernetes", description="A cluster on one machine.")
    parser.add_argument("folder", type=Path, help="where pods run")
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument("--parent", type=int, help="process whose end ends this one")
    parser.add_argument("--settings", default="{}", help="JSON, as Settings takes it")
    given = parser.parse_args(arguments)
    if given.parent is not None:
        die_with_parent(given.parent)
    settings = Settings()
    settings.change(json.loads(given.settings))
    server = Server(settings, given.folder, given.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    print(json.dumps({"endpoint": server.endpoint}), flush=True)
    server.serve_forever(poll_interval=0.2)
    server.server_close()


if __name__ == "__main__":
    main(sys.argv[1:])
