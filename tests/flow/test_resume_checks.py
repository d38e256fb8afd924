"""`resume` repeats no step that ended well, the preflight of its run among them: so it is checked
before it begins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.load import load_config
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import PREFLIGHT, Origin
from ebbflow.core.layout import NOTE, KnownJob, job_prefix
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store

CONFIG = "configs/laptop.yaml"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A job that this machine started last, of two runs, under a name of its own; Metaflow has no
    record of it.
    """
    runs = tmp_path / "runs"
    (runs / "mine").mkdir(parents=True)
    (runs / "latest").symlink_to("mine")
    (runs / "mine" / NOTE).write_bytes(KnownJob("mine", str(tmp_path / "store")).note())
    put_settings(tmp_path)
    for run in ("171", "172"):
        with EventLog(store(tmp_path), Origin(job="mine", run=run, process="preflight")) as log:
            log.emit(PREFLIGHT, results=[])
    return runs


def store(folder: Path) -> Store:
    return Store.open(str(folder / "store"), request_timeout_seconds=10.0).sub(job_prefix("mine"))


def put_settings(folder: Path, **settings: Any) -> None:
    chosen = [
        f"store={folder / 'store'}",
        *(f"{key.replace('__', '.')}={value}" for key, value in settings.items()),
    ]
    config = load_config(
        str(PROJECT_ROOT / CONFIG), chosen, project_root=PROJECT_ROOT, cwd=PROJECT_ROOT
    ).config
    document = {"path": CONFIG, "config": config.model_dump(mode="json"), "sources": {}}
    store(folder).put("config.json", json.dumps(document).encode())


def resume(runs: Path, *words: str) -> subprocess.CompletedProcess[str]:
    own = {"EBBFLOW_RUNS": str(runs), "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(runs.parent)}
    command = [
        sys.executable,
        str(PROJECT_ROOT / "ebbflow/flows" / "train_flow.py"),
        "resume",
        *words,
    ]
    return subprocess.run(
        command,
        env={**os.environ, **own},
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("words", [(), ("train", "--origin-run-id", "172")])
def test_checks_that_refuse_a_run_refuse_its_resume(runs: Path, words: tuple[str, ...]) -> None:
    put_settings(runs.parent, model__hidden_size=65536, model__num_layers=96)
    done = resume(runs, *words)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "planned-memory" in done.stderr and "Metaflow" not in done.stdout


def test_resume_of_a_valid_run_is_left_to_metaflow(runs: Path) -> None:
    done = resume(runs)
    assert done.returncode == 1 and "nothing is checked" not in done.stdout, (
        done.stdout + done.stderr
    )


def test_a_run_of_an_unknown_job_is_not_compared_with_current_settings(
    runs: Path,
) -> None:
    put_settings(runs.parent, model__hidden_size=65536, model__num_layers=96)
    done = resume(runs, "--origin-run-id", "99")
    assert done.returncode == 1 and "has no job of run 99" in done.stdout, done.stdout + done.stderr
