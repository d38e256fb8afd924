"""What an agent prints itself, and the clock of a rank's heartbeat, whatever the user's code does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbflow.training.attach.standalone import record_exception
from ebbflow.training.launch.heartbeat import Heartbeat
from ebbflow.training.launch.workers import Worker


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


def test_a_secret_in_an_exceptions_text_is_not_in_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("WAREHOUSE_PASSWORD", "sesame-42-sesame")
    text = "cannot open postgres://ada:lovelace@db/x with sesame-42-sesame at line 7"
    try:
        raise ConnectionError(text)
    except ConnectionError as error:
        record_exception(error)
    written = path.read_text()
    agent = Worker.__new__(Worker)  # reads what any program may have written
    agent._error_path = path
    path.write_text(json.dumps({"message": {"message": f"ConnectionError: {text}"}}))
    assert agent._error(1)["message"] == json.loads(written)["message"]["message"]
    assert "lovelace" not in written and "sesame" not in written
    message = json.loads(written)["message"]
    assert message["message"].startswith("ConnectionError: cannot open postgres://ada:[redacted: ")
    assert message["message"].endswith("at line 7")
    frames = message["extraInfo"]["py_callstack"]
    assert "test_own_lines.py" in frames and "record_exception" not in frames.split("\n")[0]
    assert text in capsys.readouterr().err, "its own output is left as it is"
