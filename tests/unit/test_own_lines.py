"""What an agent prints itself, and the clock of a rank's heartbeat, whatever the user's code does."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbflow.training.launch.heartbeat import Heartbeat


def test_an_agents_own_line_has_no_raw_escape_sequence() -> None:
    program = (
        "from ebbflow.core.untrusted_text import guard_terminal\n"
        "from ebbflow.training.launch.logs import flush_output, print_line\n"
        "guard_terminal()\n"
        r"print_line('rank 1: ValueError: \x1b]0;title\x07\x1b[2Jé × 2')"
        "\nflush_output()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.decode() == ("rank 1: ValueError: \\u001b]0;title\\u0007\\u001b[2Jé × 2\n")


def test_heartbeats_go_on_although_the_users_code_patches_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = Heartbeat.create(tmp_path / "beat")
    real = time.monotonic_ns
    for module in list(sys.modules.values()):  # as freezegun does
        for name, value in list(vars(module).items()):
            if value is real:
                monkeypatch.setattr(module, name, lambda: 1)
    assert time.monotonic_ns() == 1
    before = real()
    heartbeat.beat(1, "forward")
    assert heartbeat.read().t_mono >= before / 1e9
