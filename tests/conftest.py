"""Shared set-up of all tests: the interpreter's folder on PATH, and nothing of the user's
environment.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.swift import swift  # noqa: F401 - one server for all tests that ask for it

# The suite behaves the same on a workstation with GPUs: neither the tests nor the processes that
# they start see one.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Two tests share the cores at a time. Threads that spin while they wait for a core of another test
# made single-rank jobs use four times the CPU seconds. Read when torch loads; the number of threads
# stays that of a job.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Images of containers often set it. Each of thousands of processes would compile its sources again: a
# rank's imports take three times the CPU seconds where the packages have no bytecode either.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The list of this machine's projects is the user's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="ebbflow-tests-state-")

# A loaded machine is no failure: what has a time limit has pytest's. One commit gives one result,
# so examples are not drawn anew in each run; `pytest --hypothesis-profile=explore` looks for new
# ones.
settings.register_profile("ebbflow", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("ebbflow")

# The suite may run under nohup (SIGHUP ignored) or in the background of a shell (SIGINT ignored),
# which every process that a test starts would inherit.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def foreign_variables() -> list[str]:
    """Variables that a cluster or a shell happens to have set."""
    prefixes = ("METAFLOW_", "EBBFLOW_", "AWS_", "MF_PARALLEL_")
    return [
        name for name in os.environ if name.startswith(prefixes) or name in {"RANK", "WORLD_SIZE"}
    ]


# Also for fixtures that several tests share, which are made before the fixture below is.
for _name in foreign_variables():
    del os.environ[_name]
os.environ["EBBFLOW_LIVE_PAGE"] = "0"  # a process beside each run; the tests of the page start it


# Each process of tests imports everything: a fifth of that time went into looking for garbage, of
# which there is none, and each full collection of a test would look through all of it again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may depend on what another one has set."""
    for name in foreign_variables():
        monkeypatch.delenv(name)
    monkeypatch.setenv("EBBFLOW_LIVE_PAGE", "0")
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
