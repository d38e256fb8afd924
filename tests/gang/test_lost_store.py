"""A job whose store goes away while it runs: nothing is written elsewhere, nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.long_tests import mark_long
from tests.support.lost_store import LOST_AFTER, STEPS, LostStore

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", mark_long(["rename", "mount"], ["mount"]))
def test_a_run_whose_store_goes_away_never_completes_and_goes_on_when_it_is_back(
    tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out.json"
    folder = tmp_path / "project"
    folder.mkdir()
    script = str(ROOT / "tests" / "support" / "lost_store.py")
    command = [sys.executable, script, kind, str(folder), str(out)]
    if kind == "mount":
        prefix = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
        probe = [*prefix, "mount", "-t", "tmpfs", "none", str(folder)]
        if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
            pytest.skip("skipped, because this machine lets no test mount a file system")
        command = [*prefix, *command]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = LostStore(**json.loads(out.read_text()))
    assert seen.code_without != 0 and "completed" not in seen.output_without, seen.output_without
    assert "is not the store that this job began in" in seen.output_without
    assert seen.written_elsewhere == [], "below the mount point, or in a new folder"
    assert seen.code_refused == 3 and "is not the store that" in seen.output_refused
    assert seen.kept_step >= LOST_AFTER
    assert seen.code_after == 0, seen.output_after
    assert "completed" in seen.output_after and seen.last_step == STEPS
