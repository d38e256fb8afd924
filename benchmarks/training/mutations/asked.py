"""One that is asked, as a process: `python -m benchmarks.training.mutations.asked NAME store|serve
FOLDER PARENT_PID`.

store makes the checkpoints. serve answers each line of stdin by a line of JSON on what was stdout:
a damaged `.metadata` is a pickle that can make its reader ask for any amount of memory, crash, or
never end, so that whoever reads it must not be the one who counts. Memory is limited to what a
sound load needs and a gibibyte; a load that this limit ends with an error which does not name it,
as DCP's does not, has refused.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from ebbflow.core.process import die_with_parent

_ROOM_BYTES = 2**30


def main(name: str, action: str, folder: str, parent_pid: str) -> None:
    die_with_parent(int(parent_pid))
    import torch

    from benchmarks.training.mutations.commits import Commits
    from benchmarks.training.mutations.dcp import Dcp

    torch.set_num_threads(1)
    kind = {"commits": Commits, "dcp": Dcp}[name]
    if action == "store":
        kind.store(Path(folder))
    else:
        _serve(kind(Path(folder)))


def _serve(contestant: object) -> None:
    from benchmarks.training.mutations.contestant import Contestant

    asked: Contestant = contestant  # type: ignore[assignment]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    asked.ask()  # imports, threads and caches are there before the limit is set
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory_bytes(0) + _ROOM_BYTES, hard))
    for _ in sys.stdin:
        answer = asked.ask()
        document = {"outcome": answer.outcome, "named": answer.named, "told": answer.told[-8000:]}
        answers.write(json.dumps({**document, "resident_bytes": _memory_bytes(1)}) + "\n")


def _memory_bytes(column: int) -> int:
    """Of this process; column 0: of addresses, 1: resident."""
    return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()


if __name__ == "__main__":
    main(*sys.argv[1:])
