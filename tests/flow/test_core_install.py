"""An installation without the extra `flow` trains and reports scripts; the flow says what it lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.own_flow import ROOT, SOURCES

FLOW_PACKAGES = ("metaflow", "boto3", "botocore", "pandas", "prometheus_client")
# Python imports it at its start, in each process of a job
HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
import importlib.util
found = importlib.util.find_spec
def find_spec(name, package=None):
    return None if name.partition(".")[0] in {names} else found(name, package)
importlib.util.find_spec = find_spec
"""
pytestmark = pytest.mark.flow


class CoreInstall:
    """A folder in which Python finds no package of the extra `flow`."""

    def __init__(self, folder: Path, *, hidden: tuple[str, ...] = FLOW_PACKAGES) -> None:
        self.folder = folder
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(HIDE.format(names=repr(hidden)))
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{site}:{ROOT}",
            "EBBFLOW_RUNS": str(folder / "runs"),
            "EBBFLOW__STORE": str(folder / "store"),
            "METAFLOW_USER": "tester",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=280,
        )


def test_a_script_trains_and_is_reported_and_planned_and_the_flow_names_its_extra(
    tmp_path: Path,
) -> None:
    core = CoreInstall(tmp_path)
    (tmp_path / "train.py").write_text((SOURCES / "train.py").read_text())
    trained = core.run("-m", "ebbflow", "run", "train.py", "--", "--max-steps", "8")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "Traceback" not in trained.stderr
    reported = core.run("-m", "ebbflow", "report", "train", "--json")
    assert reported.returncode == 0, reported.stdout + reported.stderr
    assert json.loads(reported.stdout)["outcome"] == "completed"
    planned = core.run("-m", "ebbflow", "plan")
    assert "capacity plan" in planned.stdout, planned.stdout + planned.stderr
    refused = core.run("-m", "ebbflow", "run", "--job", "flow")
    assert refused.returncode == 3
    assert refused.stderr.startswith("metaflow is not installed for ")
    assert len(refused.stderr.splitlines()) == 1, refused.stderr


def test_the_decorator_names_the_packages_that_a_flow_lacks(tmp_path: Path) -> None:
    core = CoreInstall(tmp_path, hidden=("prometheus_client", "pandas"))
    for name in ("single.py", "train.py"):
        (tmp_path / name).write_text((SOURCES / name).read_text())
    done = core.run("single.py", "check")
    text = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1, text
    assert "single.py:17: @ebbflow of step train: not installed: pandas, prometheus-client" in text
    assert "fix: pip install 'ebbflow[flow]'" in text
    assert "Traceback" not in text
