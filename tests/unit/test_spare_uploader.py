"""The uploader that a rank forks before it has threads."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ebbflow.core.process import process_state
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import reachable_commits, spare_uploader
from tests.support.flow import wait_until

# Saves once with the fork, and once more after it was killed
SAVER = """
import os, signal, sys, time
from pathlib import Path
from ebbflow.training.checkpoint.spare_uploader import fork_spare_uploader
fork_spare_uploader()
from torch import nn
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import Checkpointer, open_generation
job = Store.open(sys.argv[1])
model = nn.Linear(4, 4)
with Checkpointer(job.uri, generation=open_generation(job, run="r", attempt=0)) as saver:
    for step in (1, 2):
        saver.save(step, model, None, {})
        assert saver.wait().step == step
        print(Path(f"/proc/{saver.uploader_pid}/comm").read_text().strip(), flush=True)
        os.kill(saver.uploader_pid, signal.SIGKILL)
        while saver._saves.uploader._process.poll() is None:
            time.sleep(0.01)
"""


def test_a_rank_uploads_with_its_fork_and_replaces_it_by_a_program(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "forked"
    done = subprocess.run(
        [sys.executable, "-c", SAVER, str(job)],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [ref.step for ref in reachable_commits(Store.open(str(job)))] == [2, 1]
    lines = done.stdout.splitlines()  # with the remark on the uploader that ended
    assert lines[0] == "uploader"
    assert lines[-1].startswith("python")


def test_a_fork_that_was_given_no_work_ends_with_its_rank(tmp_path: Path) -> None:
    code = (
        "from ebbflow.training.checkpoint import spare_uploader as spare; import os, signal\n"
        "spare.fork_spare_uploader(); print(spare._spare.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    forked = int(done.stdout)
    wait_until("the end of the fork", lambda: process_state(forked) in ("", "Z"), 30)


def test_a_rank_that_cannot_fork_starts_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "fork", refuse)
    spare_uploader.fork_spare_uploader()
    assert spare_uploader.take_spare_uploader(["1", "0", "store"], []) is None
