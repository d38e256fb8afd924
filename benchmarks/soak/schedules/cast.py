"""Processes forked from this one, what they tell, and their ends.

This process itself never opens a store.

Forking is safe here, because it is done from a process with one thread that has imported torch and
the client of the store, and used neither. The children do, each for itself.
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

_LINE_BYTES = 1 << 20


@dataclass
class Actor:
    """One process. told: its reports, in order, each with the time it came. status: once it has
    ended.
    """

    name: str
    pid: int
    pipe: int
    told: list[dict[str, Any]] = field(default_factory=list)
    status: int | None = None
    rest: bytes = b""
    open: bool = True

    @property
    def over(self) -> bool:
        """It has ended, and all that it told has been read."""
        return self.status is not None and not self.open

    def all(self, event: str) -> list[dict[str, Any]]:
        return [report for report in self.told if report["event"] == event]

    def first(self, event: str) -> dict[str, Any] | None:
        return next(iter(self.all(event)), None)

    def signal(self, number: int) -> None:
        if self.status is None:
            os.kill(self.pid, number)


class Cast:
    """All actors of one schedule. environment: of the children; log: where their output goes."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._environment = dict(environment)
        self._log = log
        self.actors: list[Actor] = []

    def start(self, name: str, part: Callable[..., None], *arguments: Any) -> Actor:
        """Fork a process that plays `part(report, *arguments)`."""
        read_end, write_end = os.pipe()
        director = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            self._play(director, write_end, part, arguments)
        os.close(write_end)
        os.set_blocking(read_end, False)
        actor = Actor(name, pid, read_end)
        self.actors.append(actor)
        return actor

    def listen(self, seconds: float) -> None:
        """Take in what was told, waiting so long at most for something to come."""
        pipes = {actor.pipe: actor for actor in self.actors if actor.open}
        if pipes:
            readable, _, _ = select.select(list(pipes), [], [], seconds)
        else:
            readable, _, _ = ([], [], [])
        for descriptor in readable:
            _take(pipes[descriptor])
        for actor in self.actors:
            if actor.status is None:
                pid, status = os.waitpid(actor.pid, os.WNOHANG)
                if pid:
                    actor.status = os.waitstatus_to_exitcode(status)

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Listen until the condition holds; False when it does not in time."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            self.listen(0.05)
        return True

    def end(self) -> None:
        """Kill all that are left, and take in what they told before."""
        for actor in self.actors:
            actor.signal(signal.SIGKILL)
        self.until(lambda: all(actor.over for actor in self.actors), 10.0)
        for actor in self.actors:
            if actor.open:
                _close(actor)

    def _play(
        self, director: int, pipe: int, part: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        """In the child; does not return."""
        code = 1
        try:
            die_with_parent(director)
            os.environ.update(self._environment)
            output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for descriptor in (1, 2):
                os.dup2(output, descriptor)

            def report(event: str, **data: Any) -> None:
                line = json.dumps({"event": event, "at": time.monotonic(), **data}) + "\n"
                os.write(pipe, line.encode())

            try:
                part(report, *arguments)
                code = 0
            except Exception as error:
                traceback.print_exc()
                report("error", kind=type(error).__name__, message=str(error))
        finally:
            os._exit(code)


def _take(actor: Actor) -> None:
    try:
        data = os.read(actor.pipe, _LINE_BYTES)
    except BlockingIOError:
        return
    if not data:
        _close(actor)
        return
    *lines, actor.rest = (actor.rest + data).split(b"\n")
    actor.told += [json.loads(line) for line in lines]


def _close(actor: Actor) -> None:
    os.close(actor.pipe)
    actor.open = False
