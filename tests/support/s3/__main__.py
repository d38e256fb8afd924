"""`python -m tests.support.s3 [--port N] [--parent PID]`: prints {"endpoint", "access_key",
"secret_key"}, serves.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys

from tests.support.s3.server import Server
from tests.support.s3.signature import ACCESS_KEY, SECRET_KEY

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.s3", description="A strict, failing S3 server."
    )
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument("--parent", type=int, help="process whose end ends this one")
    given = parser.parse_args(arguments)
    if given.parent is not None and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != given.parent:
            return
    # Many short requests: who waits for the interpreter waits less long
    sys.setswitchinterval(0.001)
    server = Server(given.port)
    about = {"endpoint": server.endpoint, "access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
    print(json.dumps(about), flush=True)
    server.serve_forever(poll_interval=0.5)


if __name__ == "__main__":
    main(sys.argv[1:])
