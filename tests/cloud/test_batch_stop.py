"""A container of AWS Batch is told to stop: Docker tells its first process alone, and kills all
when that has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbflow.flows.attempts.submission import wrap_job_commands
from ebbflow.flows.metaflow_fixes import node_command

ROOT = Path(__file__).resolve().parents[2]
_TASK = f"""
import signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from ebbflow.flows.attempts.submission import listen_for_stop

def leave(number, frame):
    signal.signal(number, signal.SIG_IGN)  # sent to all of the group, it comes twice
    print("saves", flush=True)
    time.sleep(0.5)
    Path("saved").touch()
    sys.exit(75)

listen_for_stop()
if {{listens}}:
    signal.signal(signal.SIGTERM, leave)
Path("up").touch()
time.sleep(120)
"""
# As Metaflow's: the task's lines pass through another process, and what comes after the task must
# run as well.
_COMMAND = """set -o pipefail; python task.py 2>&1 | python -c 'import sys
for line in sys.stdin: open("log", "a").write(line)'; code=$?; touch after; exit $code"""


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["first process", "process group"])
@pytest.mark.parametrize(("listens", "code"), [(True, 75), (False, 128 + signal.SIGTERM)])
def test_a_task_that_is_stopped_saves_and_its_last_lines_are_kept(
    tmp_path: Path, send, listens: bool, code: int
) -> None:
    (tmp_path / "task.py").write_text(_TASK.format(listens=listens))
    shell = _started(tmp_path, _COMMAND)
    _await(tmp_path / "up")
    send(shell.pid, signal.SIGTERM)
    assert shell.wait(60) == code
    assert (tmp_path / "after").exists()
    assert (tmp_path / "saved").exists() is listens
    assert not listens or (tmp_path / "log").read_text() == "saves\n"


def test_before_there_is_a_task_the_container_ends_at_once(tmp_path: Path) -> None:
    shell = _started(tmp_path, "touch up; sleep 120; touch after")
    try:
        _await(tmp_path / "up")
        os.kill(shell.pid, signal.SIGTERM)
        assert shell.wait(60) == 128 + signal.SIGKILL
        assert not (tmp_path / "after").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # its `sleep`, which ends with a container


def test_the_command_does_what_it_did_on_every_node(tmp_path: Path) -> None:
    assert _started(tmp_path, """echo "$PWD" 'a  b' $((1 + 1)) > out; exit 9""").wait(60) == 9
    assert (tmp_path / "out").read_text() == f"{tmp_path} a  b 2\n"
    main = "python flow.py step train --task-id control-7 --split-index 0 "
    nodes = [{"containerOverrides": {"command": ["bash", "-c", main]}} for _ in range(2)]
    request = {"nodeOverrides": {"nodePropertyOverrides": nodes}}
    wrap_job_commands(request)
    commands = [node["containerOverrides"]["command"] for node in nodes]
    assert commands[0] == commands[1] and commands[0][-1] == main
    assert "--task-id 7-node-$AWS_BATCH_JOB_NODE_INDEX" in node_command(commands[0][-1])


def test_other_commands_stay_as_they_are() -> None:
    request = {"containerOverrides": {"command": ["python", "-m", "infra"]}}
    wrap_job_commands(request)
    assert request == {"containerOverrides": {"command": ["python", "-m", "infra"]}}


def _request(text: str) -> dict:
    return {"jobName": "a", "containerOverrides": {"command": ["bash", "-c", text]}}


def _started(folder: Path, text: str) -> subprocess.Popen[bytes]:
    request = _request(text)
    wrap_job_commands(request)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = request["containerOverrides"]["command"]
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PATH": path}, start_new_session=True
    )


def _await(file: Path) -> None:
    limit = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < limit, f"no {file}"
        time.sleep(0.02)
