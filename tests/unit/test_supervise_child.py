"""The supervisor's child process: what is started, which signals reach it, and when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbflow.flows.supervising import child
from ebbflow.flows.supervising.child import LEAVE_SECONDS, FlowProcess
from tests.support.programs import Programs

PID = Programs.pid


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    started = Programs()
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(os, "kill", started.kill)
    return started


@pytest.fixture
def flow() -> FlowProcess:
    process = FlowProcess()
    process.listen()
    return process


def test_a_command_runs_in_a_session_of_its_own_tied_to_its_parent(
    programs: Programs, flow: FlowProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBFLOW_TEST_KEPT", "kept")
    monkeypatch.setenv("EBBFLOW_TEST_CHANGED", "before")
    flow.environment = {"EBBFLOW_TEST_CHANGED": "after"}
    programs.codes = [7, -9]
    assert flow.run(["flow.py", "run"]) == 7
    [started] = programs.started
    assert started.command == [
        sys.executable,
        str(Path(child.__file__)),
        str(os.getpid()),
        "flow.py",
        "run",
    ]
    assert started.options == {
        "env": {**os.environ, "EBBFLOW_TEST_CHANGED": "after"},
        "start_new_session": True,
    }
    assert started.options["env"]["EBBFLOW_TEST_KEPT"] == "kept"
    assert flow.run(["flow.py", "run"]) == -9
    assert programs.waits == [1.0, 1.0] and programs.kills == [] and not flow.asked_to_leave


def test_a_command_is_waited_for_until_it_ends(programs: Programs, flow: FlowProcess) -> None:
    programs.codes = [3]
    programs.looks = 4
    assert flow.run(["flow.py"]) == 3
    assert programs.waits == [1.0] * 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_as_a_request_to_leave(
    programs: Programs, flow: FlowProcess, number: signal.Signals
) -> None:
    programs.codes = [75]
    programs.during = [lambda: signal.raise_signal(number)]
    assert flow.run(["flow.py"]) == 75
    assert programs.kills == [(PID, signal.SIGTERM)] and flow.asked_to_leave
    assert flow.run(["flow.py"]) == 75 and len(programs.started) == 1, (
        "no command starts after that"
    )


@pytest.mark.parametrize(
    ("first", "second", "passed"),
    [
        (signal.SIGINT, signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGINT, signal.SIGINT),
        (signal.SIGINT, signal.SIGTERM, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM),
    ],
)
def test_a_second_ctrl_c_is_passed_on_as_such(
    programs: Programs,
    flow: FlowProcess,
    first: signal.Signals,
    second: signal.Signals,
    passed: signal.Signals,
) -> None:
    programs.codes = [75]
    programs.during = [lambda: signal.raise_signal(first), lambda: signal.raise_signal(second)]
    flow.run(["flow.py"])
    assert programs.kills == [(PID, signal.SIGTERM), (PID, passed)]


def test_a_signal_during_the_start_reaches_the_command(
    programs: Programs, flow: FlowProcess
) -> None:
    programs.codes = [75]
    programs.at_start = lambda: signal.raise_signal(signal.SIGTERM)
    assert flow.run(["flow.py"]) == 75
    assert programs.kills == [(PID, signal.SIGTERM)]


def test_an_ignored_hang_up_stays_ignored_and_no_other_signal(programs: Programs) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    flow = FlowProcess()
    flow.listen()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_a_command_that_does_not_leave_is_killed_after_three_minutes(
    programs: Programs, flow: FlowProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second request does not extend the time."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    programs.codes = [-9]

    def pass_time(seconds: float, then: Callable[[], None] = lambda: None) -> Callable[[], None]:
        def step() -> None:
            now[0] += seconds
            then()

        return step

    def ask() -> None:
        signal.raise_signal(signal.SIGTERM)

    programs.during = [
        pass_time(5000.0),
        pass_time(0.0, ask),
        pass_time(100.0, ask),
        pass_time(80.0),
        pass_time(0.1),
    ]
    assert LEAVE_SECONDS == 180.0
    flow.run(["flow.py"])
    assert programs.kills == [(PID, signal.SIGTERM)] * 2 + [(PID, signal.SIGKILL)]


def test_a_signal_after_the_commands_end_reaches_nothing(
    programs: Programs, flow: FlowProcess
) -> None:
    programs.codes = [0]
    flow.run(["flow.py"])
    signal.raise_signal(signal.SIGTERM)
    assert programs.kills == [] and flow.asked_to_leave


def test_a_signal_before_the_first_command_is_kept(programs: Programs, flow: FlowProcess) -> None:
    signal.raise_signal(signal.SIGTERM)
    assert flow.run(["flow.py"]) == 75 and programs.started == []


def test_a_command_that_has_just_ended_may_miss_a_signal(
    programs: Programs, flow: FlowProcess
) -> None:
    programs.codes = [0]
    programs.gone = True
    programs.during = [lambda: signal.raise_signal(signal.SIGTERM)]
    assert flow.run(["flow.py"]) == 0


def test_a_pause_ends_with_the_request_to_leave(
    flow: FlowProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = time.monotonic()
    flow.pause(0.05)
    assert time.monotonic() - before >= 0.05
    signal.raise_signal(signal.SIGTERM)
    before = time.monotonic()
    flow.pause(60.0)
    assert time.monotonic() - before < 30


def test_a_program_of_the_supervisor_finds_ebbflow_and_dies_with_its_parent() -> None:
    """Without site-packages, as under a system's interpreter.

    A process whose parent is another one ends at once.
    """
    tied = [sys.executable, "-S", child.__file__]
    command = ["/bin/echo", "one", "two"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(parent: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*tied, str(parent), *command],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            cwd="/",
        )

    alive = run(os.getpid())
    assert (alive.returncode, alive.stdout) == (0, "one two\n"), alive.stderr
    orphan = run(os.getpid() + 1)
    assert (orphan.returncode, orphan.stdout) == (75, ""), orphan.stderr


def test_a_program_of_an_installed_supervisor_adds_no_folder_to_the_path(tmp_path: Path) -> None:
    """There, no folder above it is a checkout, and another program's module may have the package's
    name.
    """
    program = tmp_path / "flows" / "supervising" / "child.py"
    program.parent.mkdir(parents=True)
    program.write_text(Path(child.__file__).read_text())
    (tmp_path / "ebbflow.py").write_text("raise SystemExit(9)")
    environment = {**os.environ, "PYTHONPATH": str(Path(child.__file__).resolve().parents[2])}
    command = [
        sys.executable,
        str(program),
        str(os.getpid()),
        sys.executable,
        "-S",
        "-c",
        "print(1)",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """A supervisor handles its process's signals, which here is pytest's."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
