"""Host memory of a rank of eight: its eighth of the model, and of the state for a save or a
restore, and a constant.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MIB = 2**20


def test_a_rank_needs_the_memory_of_its_own_part(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.support.sharded_memory",
        str(tmp_path),
        "768",
        "4",
        "32768",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    own = found["own"]
    state = 3 * found["own"]
    assert found["equal"] and own < 1.1 * found["model"] / 8
    assert found["initialise"] <= own + 48 * MIB < found["model"] / 2
    assert found["save"] <= state + 48 * MIB, "one of two staging buffers"
    assert found["restore"] <= state + 48 * MIB
