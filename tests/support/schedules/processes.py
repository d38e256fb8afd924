"""Forked processes, their reports, and their ends.

A process is forked from one that has a single thread and has imported torch and the store's client,
but has used neither. So forking is safe.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbflow.core.process import die_with_parent

_READ_BYTES = 1 << 20


@dataclass
class Process:
    """A forked process.

    Attributes:
        pipe: The file descriptor that its reports come from.
        reports: Its reports so far, each with its name as "event" and its time as "at".
        status: Its exit code once it has ended, or minus the number of the signal that ended it.
        pending: The bytes of a line that has not arrived as a whole.
        is_open: Whether further reports may come.
    """

    name: str
    pid: int
    pipe: int
    reports: list[dict[str, Any]] = field(default_factory=list)
    status: int | None = None
    pending: bytes = b""
    is_open: bool = True

    @property
    def is_over(self) -> bool:
        """Whether it has ended and all its reports have been read."""
        return self.status is not None and not self.is_open

    def all(self, event: str) -> list[dict[str, Any]]:
        return [report for report in self.reports if report["event"] == event]

    def first(self, event: str) -> dict[str, Any] | None:
        return next(iter(self.all(event)), None)

    def signal(self, number: int) -> None:
        if self.status is None:
            os.kill(self.pid, number)

    def receive(self) -> None:
        """Read the reports that have arrived."""
        try:
            data = os.read(self.pipe, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        *lines, self.pending = (self.pending + data).split(b"\n")
        self.reports += [json.loads(line) for line in lines]

    def close(self) -> None:
        os.close(self.pipe)
        self.is_open = False


class Processes:
    """All processes of one schedule.

    Args:
        environment: Environment variables that the processes have in addition.
        log: The file that gets their output.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._environment = dict(environment)
        self._log = log
        self._processes: list[Process] = []

    def start(self, name: str, program: Callable[..., None], *arguments: Any) -> Process:
        """Fork a process that runs `program(report, *arguments)`."""
        read_end, write_end = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            self._run(parent, write_end, program, arguments)
        os.close(write_end)
        os.set_blocking(read_end, False)
        process = Process(name, pid, read_end)
        self._processes.append(process)
        return process

    def listen(self, seconds: float) -> None:
        """Read reports, after a wait of at most `seconds` for the first, and reap what has ended."""
        pipes = {process.pipe: process for process in self._processes if process.is_open}
        if pipes:
            readable, _, _ = select.select(list(pipes), [], [], seconds)
            for pipe in readable:
                pipes[pipe].receive()
        for process in self._processes:
            if process.status is None:
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if pid:
                    process.status = os.waitstatus_to_exitcode(status)

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Listen until the condition holds. Return False if it does not hold in time."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            self.listen(0.05)
        return True

    def wait_for(self, processes: list[Process], seconds: float) -> bool:
        """Listen until all of them have ended. Return False if they do not end in time."""
        return self.wait_until(lambda: all(process.is_over for process in processes), seconds)

    def end(self) -> None:
        """Kill all that are left, and read their last reports."""
        for process in self._processes:
            process.signal(signal.SIGKILL)
        self.wait_for(self._processes, 10.0)
        for process in self._processes:
            if process.is_open:
                process.close()

    def _run(
        self, parent: int, pipe: int, program: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        """Run a program in the child. Does not return."""
        code = 1
        try:
            die_with_parent(parent)
            os.environ.update(self._environment)
            output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for descriptor in (1, 2):
                os.dup2(output, descriptor)

            def report(event: str, **data: Any) -> None:
                line = json.dumps({"event": event, "at": time.monotonic(), **data}) + "\n"
                os.write(pipe, line.encode())

            try:
                program(report, *arguments)
                code = 0
            except Exception as error:
                traceback.print_exc()
                report("error", kind=type(error).__name__, message=str(error))
        finally:
            os._exit(code)
