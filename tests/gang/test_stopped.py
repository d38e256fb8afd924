"""Processes that are stopped while others wait for them: tasks of the flow, and the run of a
supervisor.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from ebbflow.core.process import StoppedProcesses, children
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.flows.gang import end_stopped_tasks
from ebbflow.flows.supervising import child as child_module
from ebbflow.flows.supervising.child import FlowProcess
from ebbflow.training.launch.node_runtime import LoopWatchdog
from tests.support.flow import wait_until

SAY_MUCH = """
import sys
from ebbflow.training.launch.logs import flush_output, print_line
for number in range(25_000):  # 1.3 MB
    print_line(f"line {number:06} " + "x" * 40)
open(sys.argv[1], "w").close()
sys.stdin.read()
flush_output(float(sys.argv[2]))
print_line("after the pause")
flush_output(float(sys.argv[2]))
"""
STUCK_IN_PRINT = """
from ebbflow.training.launch.node_runtime import LoopWatchdog
LoopWatchdog(lambda: 17, 0.5)
while True:
    print("x" * 65536, flush=True)
"""
TASK = (
    "import json, subprocess, sys, time; [subprocess.Popen(one) for one in "
    "json.loads(sys.argv[1])]; time.sleep(600)"
)


def task(*words: str, below: Sequence[list[str]] = ()) -> list[str]:
    """A task of Metaflow's, to judge from the words of its command line. below: commands that it
    starts.
    """
    return [sys.executable, "-c", TASK, json.dumps(below), *words]


def test_a_stopped_task_is_killed_wherever_it_runs_and_no_other_one() -> None:
    # The control task, and another node's
    gang = subprocess.Popen(task("step", below=[task("step")]))
    submitting = subprocess.Popen(task("batch", "step"))
    tasks = [gang, submitting, *(subprocess.Popen(task(word)) for word in ("step", "card", "step"))]
    _, _, stopped, sidecar, running = tasks
    done = threading.Event()
    watch = threading.Thread(
        target=end_stopped_tasks, args=(os.getpid(),), kwargs={"limit_seconds": 0.5, "done": done}
    )
    try:
        [other_node] = wait_until("the other node's task", lambda: children(gang.pid), timeout=60)
        for pid in (other_node, submitting.pid, stopped.pid, sidecar.pid):
            os.kill(pid, signal.SIGSTOP)
        watch.start()
        assert stopped.wait(60) == -signal.SIGKILL
        wait_until("the end of the other node's", lambda: not children(gang.pid), timeout=60)
        assert [process.poll() for process in (gang, submitting, sidecar, running)] == [None] * 4
    finally:
        done.set()
        for leftover in tasks:
            leftover.kill()
            leftover.wait()
        watch.join(60)


def test_processes_stopped_with_their_launcher_are_left_alone() -> None:
    seconds = [0.0]
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stopped = StoppedProcesses(20.0, now=lambda: seconds[0])
    try:
        sleeping.send_signal(signal.SIGSTOP)
        wait_until(
            "its stop",
            lambda: stopped.look([sleeping.pid]) == {} and state(sleeping.pid) == "T",
            timeout=60,
        )
        seconds[0] += 3600.0  # Ctrl-Z, and fg an hour later
        assert stopped.look([sleeping.pid]) == {}
        for _ in range(18):
            seconds[0] += 1.0
            assert stopped.look([sleeping.pid]) == {}
        seconds[0] += 1.0
        assert stopped.look([sleeping.pid]) == {sleeping.pid: 21.0}
        sleeping.send_signal(signal.SIGCONT)
        wait_until("its going on", lambda: state(sleeping.pid) != "T", timeout=60)
        assert stopped.look([sleeping.pid]) == {}
    finally:
        sleeping.kill()
        sleeping.wait()


@pytest.mark.parametrize(("stops", "code"), [(1, 7), (2, -signal.SIGKILL)])
def test_a_run_that_was_stopped_is_continued_once_and_then_killed(
    stops: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert child_module.STOPPED_SECONDS == 60.0
    monkeypatch.setattr(child_module, "STOPPED_SECONDS", 0.5)
    program = (
        f"import os, signal\nfor _ in range({stops}): os.kill(os.getpid(), "
        "signal.SIGSTOP)\nos._exit(7)"
    )
    flow = FlowProcess()
    assert [flow.run([sys.executable, "-c", program]) for _ in range(2)] == [code, code], (
        "each run anew"
    )
    said = re.findall(
        r"^the run was stopped \(state T\) for \d+ s: (\w+)$", capsys.readouterr().err, re.MULTILINE
    )
    assert said == ["continued", "killed"][:stops] * 2


def test_only_the_agent_whose_loop_hangs_is_ended() -> None:
    turns = itertools.count()
    ended = [threading.Event(), threading.Event()]
    turning = LoopWatchdog(lambda: next(turns), 0.2, end=ended[0].set)
    stuck = LoopWatchdog(lambda: 17, 0.2, end=ended[1].set)
    assert ended[1].wait(60) and not ended[0].is_set()
    closed = LoopWatchdog(lambda: 17, 60.0, end=ended[0].set)
    for watchdog in (turning, stuck, closed):
        watchdog.close()
    assert not ended[0].is_set()


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_an_output_that_takes_nothing_does_not_stop_an_agent(kind: str, tmp_path: Path) -> None:
    """A terminal after Ctrl-S, or a pipe whose reader is stopped: what fits is kept, the rest is
    counted.
    """
    done = tmp_path / "said"
    if kind == "pipe":
        reader, output = os.pipe()
    else:
        reader, output = os.openpty()
    if kind == "terminal":
        termios.tcflow(output, termios.TCOOFF)
    command = [sys.executable, "-c", SAY_MUCH, str(done), "60"]
    agent = subprocess.Popen(command, cwd=PROJECT_ROOT, stdin=subprocess.PIPE, stdout=output)
    try:
        wait_until("the end of its lines", done.exists, timeout=60)
        if kind == "terminal":
            termios.tcflow(output, termios.TCOON)
        os.close(output)
        agent.stdin.write(b"go on")
        agent.stdin.close()
        said = read_all(reader).decode().splitlines()
        assert agent.wait(60) == 0
    finally:
        agent.kill()
        agent.wait()
        os.close(reader)
    lines = [line for line in said if line.startswith("line ")]
    assert [int(line.split()[1]) for line in lines] == [*range(len(lines))]
    assert f"{25_000 - len(lines)} lines were dropped while this output took none" in said[-2]
    assert said[-1] == "after the pause" and len(said) == len(lines) + 2


def test_an_agent_leaves_though_its_output_takes_nothing(tmp_path: Path) -> None:
    reader, output = os.pipe()
    command = [sys.executable, "-c", SAY_MUCH, str(tmp_path / "said"), "0.1"]
    with subprocess.Popen(
        command, cwd=PROJECT_ROOT, stdin=subprocess.DEVNULL, stdout=output
    ) as agent:
        try:
            assert agent.wait(60) == 0
        finally:
            agent.kill()
    os.close(reader)
    os.close(output)


def test_the_loops_watchdog_ends_an_agent_that_its_own_output_has_stopped() -> None:
    reader, output = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", STUCK_IN_PRINT], cwd=PROJECT_ROOT, stdout=output
    ) as agent:
        try:
            assert agent.wait(60) == -signal.SIGKILL
        finally:
            agent.kill()
    os.close(reader)
    os.close(output)


def read_all(descriptor: int) -> bytes:
    pieces = []
    with contextlib.suppress(OSError):  # EIO: no process has the terminal open any more
        while piece := os.read(descriptor, 65536):
            pieces.append(piece)
    return b"".join(pieces)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
