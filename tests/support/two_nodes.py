"""Two processes on two nodes in network namespaces: one calls the other by name, and their link
goes down meanwhile.

python -m tests.support.two_nodes FOLDER     prints what was heard, and when it was not
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path

from benchmarks.chaos.places import Namespaces
from benchmarks.chaos.places.mounts import own_mounts

_LISTEN = """
import socket
from ebbflow.core.process import die_with_parent
die_with_parent()
server = socket.create_server(("", 0))
print(socket.gethostname(), server.getsockname()[1], flush=True)
peer, _ = server.accept()
while data := peer.recv(100):
    print(data.decode(), flush=True)
"""
_CALL = """
import socket, sys
from ebbflow.core.process import die_with_parent
die_with_parent()
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60)
for line in sys.stdin:
    peer.sendall(line.strip().encode())
"""
_DOWN_SECONDS = 0.5


def main(folder: Path) -> None:
    if refused := Namespaces.missing() or own_mounts():
        print(json.dumps({"refused": refused}))
        return
    with Namespaces(folder / "place") as place:
        listener = subprocess.Popen(
            [*place.command(0), sys.executable, "-c", _LISTEN], stdout=subprocess.PIPE
        )
        assert listener.stdout is not None
        host, port = listener.stdout.readline().decode().split()
        caller = subprocess.Popen(
            [*place.command(1), sys.executable, "-c", _CALL, host, port], stdin=subprocess.PIPE
        )
        assert caller.stdin is not None
        try:
            caller.stdin.write(b"before\n")
            caller.stdin.flush()
            before = listener.stdout.readline().decode().strip()
            place.link(up=False)
            caller.stdin.write(b"while\n")
            caller.stdin.flush()
            silent = not select.select([listener.stdout], [], [], _DOWN_SECONDS)[0]
            place.link(up=True)
            after = listener.stdout.readline().decode().strip()
        finally:
            for process in (listener, caller):
                process.kill()
                process.wait()
    print(json.dumps({"host": host, "before": before, "silent": silent, "after": after}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
