"""The plain place: this machine as it is, with a proxy between two agents.

The others differ in a few things.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self, TypeVar

from ebbflow.training.errors import GangError

TOOL_SECONDS = 30.0


class Place:
    """A context in which one job is made, started and judged. folder: of this place alone.

    proxied: node 1 talks to node 0 through a proxy. main_address: of node 0. own_mounts: it needs
    mounts of its own (`mounts.py`). most_faults: of one job, 0: any number. store: of the job, None
    where that of its configuration will do. environment: what processes that are started meanwhile
    find in theirs.
    """

    proxied: ClassVar[bool] = True
    own_mounts: ClassVar[bool] = False
    most_faults: ClassVar[int] = 0
    main_address: ClassVar[str] = "127.0.0.1"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store: str | None = None
        self.environment: dict[str, str] = {}
        self._before: dict[str, str | None] = {}

    @classmethod
    def missing(cls) -> str:
        """Why there can be none here, "" where there can."""
        return ""

    def set_up(self) -> None:
        """Raises GangError where this machine refuses it after all."""

    def take_down(self) -> None:
        """After the job has ended; also where `set_up` failed half-way. What cannot be undone is
        left; raises nothing for it, since what the job has shown counts all the same."""

    def command(self, node: int) -> list[str]:
        """What the command of that node's agent begins with; it must become the agent, and not
        start it.
        """
        return []

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.set_up()
        except BaseException:
            self.take_down()
            raise
        self._before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.take_down()


Kind = TypeVar("Kind", bound=Place)


def here(place: Place, kind: type[Kind]) -> Kind:
    """The place as one of that kind.

    Raises GangError where a fault was aimed at a job that lives elsewhere.
    """
    if not isinstance(place, kind):
        raise GangError(
            f"this fault needs a job in {kind.__name__}; this one lives in {type(place).__name__}"
        )
    return place


def needs_tools(tools: Sequence[str], *, root: bool) -> str:
    """Why these cannot be used, "" where they can."""
    if root and os.geteuid() != 0:
        return "it needs root"
    absent = [tool for tool in tools if shutil.which(tool) is None]
    if absent:
        return f"there is no {' and no '.join(absent)} on this machine"
    return ""


def run_tool(command: Sequence[str], *, seconds: float | None = None) -> None:
    """Raises GangError with what the tool says where it fails, and where it has not come back in
    time.

    seconds: None for 30, enough for a tool that is over in milliseconds on a machine that is not in
        trouble.
    """
    if seconds is None:
        seconds = TOOL_SECONDS
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise GangError(f"{' '.join(command)}: not done within {seconds:g} s, and ended") from None
    except OSError as error:
        raise GangError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise GangError(
            f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}"
        )
