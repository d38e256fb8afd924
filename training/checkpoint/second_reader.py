"""A second reader for what one process finds damaged: memory, a cable or a cache may have changed what it read.

    python -m ebbflow.training.checkpoint.second_reader PARENT_PID STORE_URI COMMIT_KEY [OBJECT_KEY [CHUNK]]

reads again and prints {"problem": text}, empty where the bytes are as they were saved, or {"error": text} where the
store cannot be read. Torch-free.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from ebbflow.infra.errors import InfraError, StoreAway
from ebbflow.infra.process import die_with_parent
from ebbflow.infra.program import python_path
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.reader import VerifiedReader, read_manifest
from ebbflow.training.errors import CheckpointError, CorruptCommit

_READ_SECONDS = 120.0


def find_problem(store: Store, key: str, object_key: str = "", chunk: int | None = None) -> str:
    """Describe what is wrong with a commit's manifest, and with one of its data objects where one is named.

    chunk: of that object; None: its presence and its size. Returns "" where all of it is sound. Raises StoreError when
    the store cannot be read, and CheckpointError for a manifest of another version.
    """
    try:
        manifest = read_manifest(store, key)
        if problem := next(manifest.problems(), ""):
            return f"{key}: {problem}"
        if object_key:
            VerifiedReader(store, manifest.data).check(object_key, chunk)
    except CorruptCommit as error:
        return str(error)
    return ""


def find_problem_in_new_process(store_uri: str, key: str, object_key: str = "", chunk: int | None = None) -> str:
    """`find_problem`, by a process that shares no memory with this one. Raises StoreAway when that cannot tell."""
    path = python_path(os.environ.get("PYTHONPATH"))
    arguments = [str(os.getpid()), store_uri, key]
    if object_key:
        arguments += [object_key] if chunk is None else [object_key, str(chunk)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ebbflow.training.checkpoint.second_reader", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_READ_SECONDS,
            env={**os.environ, "PYTHONPATH": path},
        )
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise StoreAway(f"{store_uri}/{key}: no second process could read it again: {error!r}"[:500]) from error
    if answer.get("error"):
        raise StoreAway(f"{store_uri}/{key}: a second process could not read it again: {answer['error']}")
    return answer["problem"]


def main(argv: list[str]) -> int:
    parent_pid, store_uri, key, *rest = argv
    die_with_parent(int(parent_pid))
    object_key = rest[0] if rest else ""
    chunk = int(rest[1]) if rest[1:] else None
    try:
        answer = {"problem": find_problem(Store.open(store_uri), key, object_key, chunk)}
    except (CheckpointError, InfraError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
