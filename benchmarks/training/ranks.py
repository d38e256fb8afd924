"""Start the ranks that measure, with torchrun's environment, and collect their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ebbflow.core.program import python_path
from ebbflow.training.errors import GangError
from ebbflow.training.launch.transport import rendezvous_port

_ADDRESS = "127.0.0.1"
_POLL_SECONDS = 0.05
_LOG_TAIL_LINES = 20


def run_ranks(
    task: dict[str, Any], folder: Path, *, ranks: int, deadline_seconds: float
) -> list[Any]:
    """Return each rank's result of `task`, in order of rank.

    Two or more ranks form a gloo group on this machine's CPU.

    Args:
        task: JSON for `benchmarks.training.rank`, with its `kind`.

    Raises:
        GangError: A rank failed or was late. The message has the end of its log.
    """
    path = folder / f"{task['kind']}-{ranks}.json"
    path.write_text(json.dumps({**task, "parent_pid": os.getpid()}))
    environment = _environment(ranks, rendezvous_port(_ADDRESS, str(path), attempt=0))
    processes = [_start(path, environment, rank) for rank in range(ranks)]
    try:
        _await(processes, path, time.monotonic() + deadline_seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(ranks)]


def _environment(ranks: int, port: int) -> dict[str, str]:
    # A rank alone finds no master, not even one of this process's own environment
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("MASTER_")
    }
    environment = {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": python_path(),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    if ranks > 1:
        environment |= {"MASTER_ADDR": _ADDRESS, "MASTER_PORT": str(port)}
    return environment


def _start(path: Path, environment: dict[str, str], rank: int) -> subprocess.Popen[bytes]:
    with open(f"{path}.{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.training.rank", str(path)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _await(processes: list[subprocess.Popen[bytes]], path: Path, end: float) -> None:
    """Wait until all have exited with 0; the first failure ends the wait."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise GangError(
                    f"{path.stem}: rank {rank} ended with exit code {code}:\n{_tail(path, rank)}"
                )
        if all(code == 0 for code in codes):
            return
        if time.monotonic() >= end:
            late = [rank for rank, code in enumerate(codes) if code is None]
            logs = "\n".join(f"rank {rank}:\n{_tail(path, rank)}" for rank in late)
            raise GangError(
                f"{path.stem}: rank {', '.join(map(str, late))} did not end in time; fix: less "
                f"work\n{logs}"
            )
        time.sleep(_POLL_SECONDS)


def _tail(path: Path, rank: int) -> str:
    return "\n".join(
        Path(f"{path}.{rank}.log").read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    )
