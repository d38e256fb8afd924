"""The process that is asked, seen from the one that counts: started, asked with a deadline, and
started anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from ebbflow.core.program import python_path
from ebbflow.training.errors import CheckpointError

_START_SECONDS = 120.0  # on a busy machine importing torch alone takes many
_ANSWER_SECONDS = 20.0
_END_SECONDS = 20.0


def store(name: str, folder: Path) -> None:
    """Have the checkpoints made. Raises CheckpointError with the end of what it said."""
    folder.mkdir(parents=True)
    done = subprocess.run(
        _command(name, "store", folder),
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=_START_SECONDS,
    )
    if done.returncode:
        raise CheckpointError(
            f"{name}: no checkpoints were made: exit code {done.returncode}\n{done.stderr[-2000:]}"
        )


class Asked:
    """One process, below `folder`.

    A context manager; use it from one thread, which outlives the process.

    starts: how often it was started: once, and once more for each time it died.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._log = folder.with_name(folder.name + ".log")
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def __enter__(self) -> Asked:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def warm(self) -> None:
        """Start it if it does not run.

        To be called while nothing is changed: it loads once by itself.
        """
        if self._process is not None:
            return
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                _command(self._name, "serve", self._folder),
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.starts += 1
        first = self._asked(_START_SECONDS)
        if first["outcome"] == "crashed":
            raise CheckpointError(
                f"{self._name}: the process that is asked did not start: {first['told']}"
            )

    def ask(self) -> dict[str, Any]:
        """outcome, named, told, resident_bytes.

        One that dies, or is silent too long, has crashed.
        """
        return self._asked(_ANSWER_SECONDS)

    def _asked(self, seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(b"\n")
            process.stdin.flush()
            line = self._line(seconds)
        except BrokenPipeError:
            line = b""
        if line is not None and line.endswith(b"\n"):
            return json.loads(line)
        if line is None:
            why = f"no answer within {seconds:g} s"
        else:
            why = _ended(process)
        self._stop()
        log = self._log.read_text(errors="replace")[-2000:]
        return {"outcome": "crashed", "named": False, "told": f"{why}\n{log}", "resident_bytes": 0}

    def _line(self, seconds: float) -> bytes | None:
        """None when none came in time.

        An answer is one write of one line, so whoever begins it ends it.
        """
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        return self._process.stdout.readline()

    def _stop(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # what it was asked last may not have reached it
            self._process.stdin.close()
        self._process = None


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Its pipe was closed, so it is about to be gone."""
    try:
        code = process.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        return f"closed its output and did not end within {_END_SECONDS:g} s"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _command(name: str, action: str, folder: Path) -> list[str]:
    module = "benchmarks.training.mutations.asked"
    return [sys.executable, "-m", module, name, action, str(folder), str(os.getpid())]


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": python_path(),
    }
