"""The agent's side of a warm start: one process per node that has imported everything and forks ranks when asked.

Without it, or when it died, each rank is a new interpreter: slower by all of its imports, otherwise the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ebbflow.infra.keeper import Keeper, RemoteChild
from ebbflow.infra.process import MessageReader, process_state
from ebbflow.infra.program import python_path

_FORK_DEADLINE_SECONDS = 10.0
_END_DEADLINE_SECONDS = 10.0
STANDBY_VARIABLE = "EBBFLOW_STANDBY_OF"


class Process(Protocol):
    """What of a rank's process an agent needs: `subprocess.Popen`, or `RemoteChild`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float) -> int: ...


class Standby:
    """The process that forks. log: what it has to say for itself, when it fails. colocated_ranks: that will share this
    machine's cores. keeper: starts it; without one it is this process's child, to be made in the main thread, which its
    life is tied to then. Raises OSError."""

    def __init__(self, log: Path, *, colocated_ranks: int, keeper: Keeper | None = None) -> None:
        environment = dict(with_project_path(os.environ), PYTHONUNBUFFERED="1")
        environment["OMP_NUM_THREADS"] = str(threads_of(colocated_ranks))  # libraries read it when they are loaded
        environment[STANDBY_VARIABLE] = str(os.getpid() if keeper is None else keeper.pid)
        its_input, self._requests = os.pipe()
        self._answers, its_output = os.pipe()
        try:
            with open(log, "wb") as errors:
                command = [sys.executable, "-m", "ebbflow.training", "--standby"]
                self._process = start_process(command, environment, (its_input, its_output, errors.fileno()), keeper)
        except OSError:
            os.close(self._requests)
            os.close(self._answers)
            raise
        finally:
            os.close(its_input)
            os.close(its_output)
        for pipe in (self._requests, self._answers):
            os.set_blocking(pipe, False)
        self._open = True
        self._messages = MessageReader(lambda: os.read(self._answers, 65536))
        self._number = 0
        self._started: dict[int, int] = {}
        self._living: set[int] = set()
        self._ended: dict[int, int] = {}
        self.ready = False
        self.lost = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def settled(self) -> bool:
        """Ready to fork, or lost: nothing to wait for."""
        self._hear()
        return self.ready or self.lost

    def fork(self, name: str, log: Path, environment: Mapping[str, str]) -> RemoteChild | None:
        """A rank as a new process, or None when there is none to be had; this standby is of no use any more then."""
        self._number += 1
        request = {"start": self._number, "environment": dict(environment), "log": str(log), "name": name}
        limit = time.monotonic() + _FORK_DEADLINE_SECONDS
        if not self._ask(json.dumps(request).encode() + b"\n", limit):
            self._lose()
            return None
        while self._number not in self._started and not self.lost:
            left = limit - time.monotonic()
            if left <= 0:
                self._lose()
                break
            select.select([self._answers], [], [], left)
            self._hear()
        pid = self._started.pop(self._number, None)
        return None if pid is None or self.lost else RemoteChild(pid, self)

    def ended(self, pid: int) -> int | None:
        """Exit status of a rank that has ended, negative for a signal's number; None while it lives."""
        self._hear()
        return self._ended.get(pid, -signal.SIGKILL if self.lost else None)

    def close(self) -> None:
        """Gone when this returns, and every rank that is still there with it."""
        self._lose()
        if self._open:
            self._open = False
            os.close(self._requests)
            os.close(self._answers)

    def abandon(self, pid: int) -> None:
        """Wait no more for a rank in uninterruptible sleep (state D); it ends by itself when it wakes."""
        self._living.discard(pid)

    def _ask(self, request: bytes, limit: float) -> bool:
        """Whether it was taken in time: a frozen process reads nothing, and a pipe holds 64 KiB at most."""
        pipe, unsent = self._requests, memoryview(request)
        while unsent and (left := limit - time.monotonic()) > 0:
            select.select([], [pipe], [], left)
            try:
                unsent = unsent[os.write(pipe, unsent) :]
            except BlockingIOError:
                continue
            except OSError:
                return False
        return not unsent

    def _lose(self) -> None:
        """The kernel ends its ranks with it, so that none can go on unseen."""
        self.lost = True
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_DEADLINE_SECONDS)
        limit = time.monotonic() + _END_DEADLINE_SECONDS
        while any(process_state(pid) not in ("", "Z") for pid in self._living) and time.monotonic() < limit:
            time.sleep(0.005)
        self._living.clear()

    def _hear(self) -> None:
        if not self.lost and not self._messages.read(self._note):
            self._lose()

    def _note(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.ready = True
        elif "started" in message:
            self._started[message["started"]] = message["pid"]
            self._living.add(message["pid"])
            self._ended.pop(message["pid"], None)  # of one that had this number before
        else:
            self._living.discard(message["ended"])
            self._ended[message["ended"]] = message["status"]


def start_cold(log: Path, environment: Mapping[str, str], keeper: Keeper | None = None) -> Process:
    """A rank as an interpreter of its own."""
    command = [sys.executable, "-m", "ebbflow.training"]
    with open(log, "ab") as output, open(os.devnull, "rb") as nothing:
        return start_process(command, environment, (nothing.fileno(), output.fileno(), output.fileno()), keeper)


def start_process(
    command: list[str], environment: Mapping[str, str], streams: tuple[int, int, int], keeper: Keeper | None
) -> Process:
    """Start a program in a session of its own: signals for the agent's group do not reach it. Raises OSError."""
    if keeper is not None and not keeper.lost:
        return keeper.spawn(command, environment, *streams)
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        command, env=dict(environment), stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
    )


def threads_of(colocated_ranks: int) -> int:
    """Of each rank: its share of the cores."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, colocated_ranks))


def with_project_path(environment: Mapping[str, str]) -> dict[str, str]:
    """The same, for a process that is to find the project's packages."""
    return dict(environment, PYTHONPATH=python_path(environment.get("PYTHONPATH")))
