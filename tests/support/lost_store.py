"""A job whose store goes away in mid-run and comes back: lost_store.py KIND FOLDER OUT

KIND is "rename", or "mount" in a mount namespace of its own, where the disk of the store is
unmounted lazily. Writes what happened as JSON to OUT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ebbflow.core.layout import job_prefix, parse_commit_key

STEPS = 60
LOST_AFTER = 10
_DEADLINE_SECONDS = 100.0
_SCRIPT = f"""
import time
import torch
import ebbflow

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in ebbflow.attach(model, optimizer).steps({STEPS}):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
"""
_SETTINGS = (
    "checkpoint.interval_steps=1",
    "cluster.start_deadline_seconds=4",
)


@dataclass
class LostStore:
    """What a run showed that lost its store, and the run after it."""

    code_without: int
    output_without: str
    written_elsewhere: list[str]  # files at the store's place while the store was away
    kept_step: int  # of the newest commit when the store came back
    code_refused: int  # of a start while the store was away
    output_refused: str
    code_after: int
    output_after: str
    last_step: int


def main(kind: str, folder: Path, out: Path) -> None:
    place = folder / "place"
    store = place / "store"
    (folder / "train.py").write_text(_SCRIPT)
    lose, bring_back = _prepare(kind, folder, place)
    first = _start(folder, store)
    limit = time.monotonic() + _DEADLINE_SECONDS
    while _newest_step(store) < LOST_AFTER:
        assert first.poll() is None and time.monotonic() < limit, first.communicate()[0]
        time.sleep(0.02)
    lose()
    output_without, _ = first.communicate(timeout=_DEADLINE_SECONDS)
    refused = _start(folder, store)
    output_refused, _ = refused.communicate(timeout=_DEADLINE_SECONDS)
    elsewhere = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    bring_back()
    kept = _newest_step(store)
    second = _start(folder, store)
    output_after, _ = second.communicate(timeout=_DEADLINE_SECONDS)
    seen = LostStore(
        code_without=first.returncode,
        output_without=output_without,
        written_elsewhere=elsewhere,
        kept_step=kept,
        code_refused=refused.returncode,
        output_refused=output_refused,
        code_after=second.returncode,
        output_after=output_after,
        last_step=_newest_step(store),
    )
    out.write_text(json.dumps(asdict(seen)))


def _prepare(
    kind: str, folder: Path, place: Path
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return how the store is lost, and how it comes back."""
    place.mkdir()
    away = folder / "away"
    if kind == "rename":

        def rename() -> None:
            (place / "store").rename(away)

        return rename, lambda: away.rename(place / "store")
    away.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(away)], check=True)
    mount = ["mount", "--bind", str(away), str(place)]
    subprocess.run(mount, check=True)

    def unmount() -> None:
        subprocess.run(["umount", "-l", str(place)], check=True)

    return unmount, lambda: subprocess.run(mount, check=True)


def _start(folder: Path, store: Path) -> subprocess.Popen[str]:
    words = [f"--set=store={store}", *(f"--set={setting}" for setting in _SETTINGS)]
    return subprocess.Popen(
        [sys.executable, "-m", "ebbflow", "run", "train.py", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _newest_step(store: Path) -> int:
    job = store / job_prefix("train")
    try:
        keys = [str(path.relative_to(job)) for path in job.glob("commits/*/*/*.json")]
    except FileNotFoundError:  # a folder was deleted meanwhile, since it was empty
        return 0
    return max((parse_commit_key(key)[0] for key in keys), default=0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
