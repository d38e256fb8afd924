"""What this machine knows of jobs: a folder runs/<job> for each, with a note of the store in which the job lies."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from ebbflow.infra.layout import job_prefix

NOTE = "job.json"
METAFLOW_FOLDER = ".metaflow"


def runs_folder(project_root: Path) -> Path:
    """Reports and logs of this machine, and runs/latest. EBBFLOW_RUNS moves it; jobs lie where `store` says."""
    own = os.environ.get("EBBFLOW_RUNS")
    return Path(own).absolute() if own else records_root(project_root, "runs") / "runs"


def records_root(project_root: Path, name: str) -> Path:
    """The folder that has `name` (runs, .metaflow) in it: the project, or the user's state folder where the project
    cannot be written to. The same from any working directory, so that every command finds what another one left.
    """
    folder = project_root / name
    if os.access(folder if folder.exists() else project_root, os.W_OK | os.X_OK):
        return project_root.absolute()
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return (state / "ebbflow").absolute()


@dataclass(frozen=True)
class KnownJob:
    """What the note says. store: as in the configuration, paths absolute."""

    name: str
    store: str

    @property
    def uri(self) -> str:
        """The job's own folder, or s3://bucket/prefix/jobs/NAME."""
        return f"{self.store.rstrip('/')}/{job_prefix(self.name)}"

    def note(self) -> bytes:
        """The content of the note."""
        return json.dumps({"schema": 1, "job": self.name, "store": self.store}, indent=1).encode()


def known_job(folder: Path) -> KnownJob | None:
    """The job that a folder such as runs/latest stands for; None without a note that can be read."""
    try:
        note = json.loads((folder / NOTE).read_text())
        return KnownJob(str(note["job"]), str(note["store"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
