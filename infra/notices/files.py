"""Notices that somebody writes into a file: Metaflow's spot monitor, and a rehearsal."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from ebbflow.infra.notices.metadata import Ending
from ebbflow.infra.notices.notice import STALE_SECONDS, Notice, NoticeSource

METAFLOW_FILE = "/tmp/spot_termination_notice"  # as Metaflow 2.19 tells it in current.spot_termination_notice


class MetaflowSource:
    """The time of termination, as Metaflow's spot monitor found it: an ISO time, or nothing while it is written.

    The monitor's signal does not reach the task, and its file may be left over from a machine that was stopped and came
    back: what is past counts for nothing.
    """

    name = NoticeSource.METAFLOW
    poll_seconds = 0.5

    def __init__(self, path: Path = Path(METAFLOW_FILE)) -> None:
        self._path = path
        self._ending = Ending()

    def begin(self) -> str:
        return "" if self._path.parent.is_dir() else f"there is no folder {self._path.parent}"

    def look(self) -> list[Notice]:
        try:
            said = self._path.read_text(errors="replace").strip()[:100]
        except FileNotFoundError:
            return []
        ends_at = self._ending.of(said)
        if not said or ends_at < time.monotonic() - STALE_SECONDS:
            return []
        return [Notice(source=self.name, action="terminate", ends_at=ends_at, detail=f"{self._path}: {said}")]


class RehearsalSource:
    """A notice that a rehearsed fault leaves for its node; heard once, since the file is then taken away."""

    name = NoticeSource.REHEARSAL
    poll_seconds = 0.1

    def __init__(self, path: Path) -> None:
        self._path = path
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()  # of an attempt that did not live to hear it

    def begin(self) -> str:
        return ""

    def look(self) -> list[Notice]:
        try:
            said = json.loads(self._path.read_text())
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise OSError(f"{self._path}: {error}") from error
        self._path.unlink(missing_ok=True)
        ends_at = said["t_mono"] + said["seconds"]
        return [Notice(source=self.name, action=said["action"], ends_at=ends_at, heard_at=said["t_mono"])]


def rehearse_notice(path: Path, *, action: str, seconds: float) -> None:
    """Leave a notice for the agent of this node; whole or not at all, since it looks at any time."""
    said = {"action": action, "seconds": seconds, "t_mono": time.monotonic()}
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(said))
    os.replace(fresh, path)
