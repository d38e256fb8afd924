"""A job on a disk that fills up; to be run in a mount namespace of its own: full_disk.py FOLDER OUT,
or, for a disk that runs out of inodes, full_disk.py FOLDER OUT inodes

Mounts 12 MB of memory on FOLDER, saves more than fits, then leaves no room at all. Writes what
happened as JSON to OUT.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from ebbflow.core.store import Store
from ebbflow.training.checkpoint import (
    Checkpointer,
    RetentionPolicy,
    open_generation,
    reachable_commits,
    verify_commit,
)
from ebbflow.training.checkpoint.commands import main as checkpoints
from ebbflow.training.errors import NoRoom

_SAVES = 8  # of 2 MB each


def main(folder: str, out: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", folder], check=True)
    job = Store.open(f"{folder}/jobs/job")
    model = nn.Linear(512, 1024)
    options = {
        "generation": open_generation(job, run="r", attempt=0),
        "retention": RetentionPolicy(keep_last=100),
    }
    found: dict[str, object] = {"committed": []}
    with Checkpointer(job.uri, deadline_seconds=20.0, **options) as checkpointer:
        for step in range(1, _SAVES + 1):
            nn.init.constant_(model.weight, step)
            checkpointer.save(step, model, None, {})
            found["committed"].append(checkpointer.wait().step)
        found["kept"] = [ref.step for ref in reachable_commits(job)]
        for ref in reachable_commits(job):
            checkpoints(["pin", job.uri, ref.sha256])
        filler = Path(folder, "filler")
        step = _SAVES + 1
        fill(filler)
        try:
            checkpointer.save(step, model, None, {})
            checkpointer.wait()
        except NoRoom as error:
            found |= {"stopped_at": step, "message": str(error), "curable": error.curable}
    filler.unlink()
    refs = reachable_commits(job)
    found["left"] = [ref.step for ref in refs]
    problems = []
    for ref in refs:
        problems += verify_commit(job, ref.key)
    found["problems"] = problems
    fresh = nn.Linear(512, 1024)
    with Checkpointer(job.uri, generation=open_generation(job, run="r", attempt=1)) as checkpointer:
        restored = checkpointer.restore([refs[0].key], fresh, None)
    found["restored"] = restored.step
    # Nothing was trained after that step
    found["equal"] = bool(torch.all(fresh.weight == float(_SAVES)))
    Path(out).write_text(json.dumps(found))


def run_out_of_inodes(folder: str, out: str) -> None:
    """Save 24 times where 12 saves find inodes, and write the committed and the kept steps."""
    options = ["-o", "nr_inodes=100"]
    subprocess.run(["mount", "-t", "tmpfs", *options, "none", folder], check=True)
    job = Store.open(f"{folder}/jobs/job")
    model = nn.Linear(8, 8)
    generation = open_generation(job, run="r", attempt=0)
    policy = RetentionPolicy(keep_last=100)
    committed = []
    with Checkpointer(
        job.uri, generation=generation, deadline_seconds=20.0, retention=policy
    ) as saver:
        for step in range(1, 25):
            saver.save(step, model, None, {})
            commit = saver.wait()
            assert commit is not None
            committed.append(commit.step)
    kept = [ref.step for ref in reachable_commits(job)]
    Path(out).write_text(json.dumps({"committed": committed, "kept": kept}))


def fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**16))
        except OSError:
            return


if __name__ == "__main__":
    if sys.argv[3:] == ["inodes"]:
        run_out_of_inodes(*sys.argv[1:3])
    else:
        main(*sys.argv[1:])
