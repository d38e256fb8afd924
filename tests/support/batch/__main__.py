"""`python -m tests.support.batch FOLDER [--port N] [--parent PID] [--settings JSON]`: prints
{"endpoint"}, serves.

Containers and their output lie in FOLDER/JOB/ATTEMPT-NODE. Lives until its parent ends, or a
signal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.support.batch.server import Server
from tests.support.batch.settings import Settings
from tests.support.local_service import serve


def make_server(values: dict[str, Any], folder: Path, port: int) -> Server:
    settings = Settings()
    settings.change(values)
    return Server(settings, folder, port)


if __name__ == "__main__":
    serve("tests.support.batch", make_server, sys.argv[1:])
