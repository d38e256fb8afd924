"""Nothing that a rank has started outlives its generation, nor its agent, whatever it does to hide."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.keeper import Keeper, RemoteChild, kill_descendants
from ebbflow.core.process import descendants, process_state
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.launch.workers import WorkerGroup
from tests.support.flow import wait_until

# Each prints the number of what it leaves, and ends or stays. All have an environment of their own,
# which is empty.
HIDE = """
import os, signal, sys, time
def say(pid):
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(pid))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
def sleep():
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.execve("/bin/sleep", ["sleep", "600"], {})
"""
DAEMON = (
    HIDE
    + """
if os.fork() == 0:
    os.setsid()
    if (pid := os.fork()) == 0:
        sleep()
    say(pid)
    os._exit(0)
os.wait()
time.sleep(600)
"""
)
# Never the same process for longer than a fork takes, each in a session of its own; five at a time.
RUNAWAY = (
    HIDE
    + """
for _ in range(5):
    if os.fork() == 0:
        while True:
            if os.fork():
                os._exit(0)
            os.setsid()
say(os.getpid())
time.sleep(600)
"""
)
# Each starts others without end, up to a limit that keeps the machine usable.
BOMB = (
    HIDE
    + """
import threading
say(os.getpid())
while True:
    if len(os.listdir("/proc")) < int(sys.argv[2]):
        os.fork()
    else:
        time.sleep(0.001)
"""
)

AGENT = """
import sys, time
from pathlib import Path
from ebbflow.core.keeper import Keeper
from tests.gang.test_keeper import DAEMON, RUNAWAY, spawn
keeper = Keeper(Path(sys.argv[1], "keeper.log"))
_, daemon = spawn(keeper, Path(sys.argv[1]), DAEMON, "daemon")
spawn(keeper, Path(sys.argv[1]), RUNAWAY, "runaway")
Path(sys.argv[1], "pids.new").write_text(f"{keeper.pid} {daemon}")
Path(sys.argv[1], "pids.new").rename(Path(sys.argv[1], "pids"))
time.sleep(600)
"""


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path / "keeper.log")
    yield keeper
    keeper.close()


def spawn(keeper: Keeper, folder: Path, code: str, name: str = "told") -> tuple[RemoteChild, int]:
    """The process, and the number that it has told."""
    told = folder / name
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        code,
        str(told),
        str(len(os.listdir("/proc")) + 150),
    ]
    with open(os.devnull, "r+b") as nothing, open(folder / "errors.log", "ab") as errors:
        child = keeper.spawn(command, {}, nothing.fileno(), nothing.fileno(), errors.fileno())
    wait_until("its word", told.exists, timeout=60)
    return child, int(told.read_text())


def gone(*pids: int) -> Callable[[], bool]:
    return lambda: {process_state(pid) for pid in pids} <= {"", "Z"}


def test_the_keeper_starts_programs_and_reports_their_exits(keeper: Keeper, tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as out, open(os.devnull, "rb") as nothing:
        streams = (nothing.fileno(), out.fileno(), out.fileno())
        code = (
            "import os, sys; print(os.environ['LONG'][:3], os.getsid(0) == os.getpid()); "
            "sys.exit(7)"
        )
        child = keeper.spawn([sys.executable, "-c", code], {"LONG": "x" * 100_000}, *streams)
        assert child.wait(60) == 7
        other = keeper.spawn(["/bin/sleep", "600"], {}, *streams)
        other.send_signal(signal.SIGRTMIN + 5)
        assert other.wait(60) == -(signal.SIGRTMIN + 5)
        missing = keeper.spawn(["/no/such/program"], {}, *streams)
        assert missing.wait(60) == 127
    assert (tmp_path / "out").read_text() == "xxx True\n"


def test_a_program_gets_its_three_streams_and_no_other_ones(keeper: Keeper, tmp_path: Path) -> None:
    for name in ("one", "two"):  # the second one is forked when the keeper has had the first one's
        told = tmp_path / f"{name}-descriptors"
        code = "import os; os.execve('/bin/ls', ['ls', '/proc/self/fd'], {})"
        with open(told, "wb") as out, open(os.devnull, "rb") as nothing:
            streams = (nothing.fileno(), out.fileno(), out.fileno())
            assert (
                keeper.spawn([sys.executable, "-I", "-S", "-c", code], {}, *streams).wait(60) == 0
            )
        assert told.read_text().split() == ["0", "1", "2", "3"], "3 is the folder that ls reads"


@pytest.mark.parametrize("garbage", [b"warning: no JSON\n", b"7\n", b'{"other": 1}\n', b"\xff\n"])
def test_anothers_bytes_on_the_keepers_pipe_lose_the_keeper_and_raise_nothing(
    keeper: Keeper, garbage: bytes
) -> None:
    forged, other = socket.socketpair()
    real = keeper._channel
    keeper._channel = forged
    real.close()
    forged.setblocking(False)
    other.sendall(garbage)
    assert keeper.ended(1) == -signal.SIGKILL and keeper.lost
    other.close()


@pytest.mark.parametrize("code", [DAEMON, RUNAWAY, BOMB], ids=["daemon", "runaway", "bomb"])
def test_a_process_hidden_from_its_session_is_ended_with_its_generation(
    code: str, keeper: Keeper, tmp_path: Path
) -> None:
    child, hidden = spawn(keeper, tmp_path, code)
    child.kill()
    assert kill_descendants(keeper.pid, 60) == []
    assert descendants(keeper.pid) == [] and gone(hidden)()


def test_a_killed_agent_leaves_nothing_behind(tmp_path: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path)], cwd=PROJECT_ROOT)
    try:
        wait_until("its children", (tmp_path / "pids").exists, timeout=60)
        keeper, daemon = map(int, (tmp_path / "pids").read_text().split())
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGUSR1,
            signal.SIGPIPE,
        ):
            os.kill(keeper, number)
        time.sleep(0.2)
        assert not gone(keeper, daemon)(), "a stray signal ended the keeper"
        before = {descendant.pid for descendant in descendants(keeper)} | {keeper, daemon}
    finally:
        agent.kill()
        agent.wait()
    wait_until("the end of all", gone(*before), timeout=60)
    assert not descendants(keeper)


def test_the_kernel_reports_the_exit_of_a_stopped_parents_child(
    keeper: Keeper, tmp_path: Path
) -> None:
    child, _ = spawn(keeper, tmp_path, HIDE + "say(1); time.sleep(600)")
    os.kill(keeper.pid, signal.SIGSTOP)
    try:
        os.kill(child.pid, signal.SIGUSR2)
        assert child.wait(60) == -signal.SIGUSR2
    finally:
        os.kill(keeper.pid, signal.SIGCONT)


def test_a_culprits_daemon_is_ended_and_the_other_ranks_are_not(
    tmp_path: Path, keeper: Keeper
) -> None:
    """The others have still to write their last events; what the culprit has left may hold copies
    of its sockets.
    """
    spec = WorkerSpec(
        job="job",
        run="run",
        attempt=0,
        node=0,
        generation=1,
        generation_id="x",
        candidates=[],
        config=RunConfig(),
        store_uri=str(tmp_path),
        prepared={},
        agent_pid=os.getpid(),
    )
    group = WorkerGroup(range(2), 2, tmp_path, spec, ("127.0.0.1", 1), None, keeper)
    real = [worker.process for worker in group.workers]
    for process in real:
        process.kill()
    hidden = []
    for worker in group.workers:
        worker.process, pid = spawn(keeper, tmp_path, DAEMON, f"rank-{worker.rank}")
        hidden.append(pid)
    group._kill_leftovers([])
    assert not gone(hidden[0])() and not gone(hidden[1])()
    group.workers[0].process.kill()
    group._kill_leftovers(group.workers[:1])
    assert gone(hidden[0])() and group.workers[1].process.poll() is None
    assert group.end(grace_seconds=0.0) == {}
    assert gone(*hidden)() and not descendants(keeper.pid)
