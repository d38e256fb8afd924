"""The trainer's end of its uploader process: starting, asking, listening with deadlines, ending."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from typing import Any

from ebbflow.infra.program import python_path

_KILLED_SECONDS = 2.0  # a process in the middle of a hanging write does not die before the write ends
_LOOK_SECONDS = 5.0


class UploaderClient:
    """One uploader process, started again when it died or had to be given up."""

    def __init__(self, store_uri: str, rank: int, slabs: list[int]) -> None:
        self._store_uri = store_uri
        self._rank = rank
        self._slabs = slabs
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Must run in a thread that lives as long as the trainer: the kernel ends the uploader with it."""
        path = python_path(os.environ.get("PYTHONPATH"))
        name = "ebbflow.training.checkpoint.uploader"
        arguments = [str(os.getpid()), str(self._rank), self._store_uri, *map(str, self._slabs)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=self._slabs,
            env={**os.environ, "PYTHONPATH": path},
        )
        # Lines wait in a queue, since a stopped process does not empty its pipe. Its own thread writes them.
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_talk, args=(self._process, self._lines), name="commands", daemon=True).start()
        # Each process has a queue of its own: a late answer of one that was given up reaches nobody.
        self._answers = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(self._process, self._answers), name="uploader", daemon=True).start()

    def running(self) -> int | None:
        """Its process id; one that has died is started again."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        return self.pid

    def tell(self, command: dict[str, Any]) -> None:
        """Send a command that may as well be lost with the process."""
        if self._process is not None:
            self._write(command)

    def ask(self, command: dict[str, Any]) -> None:
        """Send a command; a process that has died is first started again."""
        self.running()
        self._write(command)

    def answer(self, timeout_seconds: float) -> dict[str, Any] | None:
        """The next answer, or None when none came in time (0: only look)."""
        try:
            return self._answers.get(timeout=timeout_seconds) if timeout_seconds > 0 else self._answers.get_nowait()
        except queue.Empty:
            return None

    def give_up(self) -> None:
        """Kill the process; the next command starts another. One that the kernel does not let go is left to it."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILLED_SECONDS)
            self._process = None

    def close(self, grace_seconds: float) -> None:
        """Let it finish what it was asked, but not longer than `grace_seconds`; then end it."""
        if self._process is None:
            return
        end = time.monotonic() + grace_seconds
        try:
            self._write({"command": "finish"})
            self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        self.give_up()

    def _write(self, command: dict[str, Any]) -> None:
        self._lines.put(json.dumps(command) + "\n")


def _talk(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    """Until the process has died; `_listen` tells of that."""
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        while process.poll() is None:
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=_LOOK_SECONDS)
                process.stdin.write(line)
                process.stdin.flush()


def _listen(process: subprocess.Popen[str], answers: queue.SimpleQueue[dict[str, Any]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(json.loads(line))
    answers.put({"event": "ended", "exit_code": process.wait()})
