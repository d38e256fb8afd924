"""The exit code of a run that ended before anything of its job was recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.flow import ROOT

_FLOW = """
import sys

from metaflow import FlowSpec, step

from ebbflow.flows import launcher
from ebbflow.flows.launch import Launch
from ebbflow.core.config.schema import RunConfig


class EarlyFlow(FlowSpec):
    @step
    def start(self):
        self.job, self.settings = "early", {"config": RunConfig(store=STORE).model_dump(mode="json")}
        self.next(self.end)

    @step
    def end(self):
        sys.exit(1)


if __name__ == "__main__":
    launcher.run(EarlyFlow, Launch(sys.argv))
"""


def test_a_run_that_recorded_nothing_has_failed_and_is_no_bad_configuration(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(_FLOW.replace("STORE", repr(str(tmp_path / "runs"))))
    own = {
        "EBBFLOW_RUNS": str(tmp_path / "runs"),
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path),
    }
    environment = {**os.environ, **own, "METAFLOW_USER": "tester", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "early.py", "--datastore", "local", "run", "--run-id-file", "run-id"]
    run = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "no report: no events: nothing of this job was recorded" in run.stderr
