"""A node's ranks when starting or ending them goes wrong: none is left behind, and nobody waits
without end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.keeper import Keeper, RemoteChild
from ebbflow.core.process import children, process_state
from ebbflow.core.store import Store
from ebbflow.training.launch import workers as workers_module
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.generation import NodeGeneration, NodeLog
from ebbflow.training.launch.messages import (
    SPEC_VARIABLE,
    GangSpec,
    GenerationStart,
    WorkerSpec,
    end_from_failures,
)
from ebbflow.training.launch.preemption import Drain
from ebbflow.training.launch.workers import Standby, WorkerGroup
from tests.support.flow import wait_until

# A rank with a child that stayed in its session, one that left it, and one that it forked; none
# hears of its end.
STUCK_CHILDREN = """
import os, subprocess, sys, time
from ebbflow.core.process import tie_forked_children
tie_forked_children()
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
told = sys.argv[1]
pids = [subprocess.Popen(sleep, env={}, start_new_session=leaves).pid for leaves in (False, True)]
if (forked := os.fork()) == 0:
    os.setsid()
    time.sleep(600)
with open(told + ".new", "w") as file:
    print(*pids, forked, file=file)
os.rename(told + ".new", told)
time.sleep(600)
"""


class InTheKernel(SimpleNamespace):
    """A process that even SIGKILL does not end, as one that waits for a file system that is gone."""

    pid = 1
    returncode = None

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "without a deadline"
        raise subprocess.TimeoutExpired("rank", timeout)


@pytest.fixture
def spec(tmp_path: Path) -> WorkerSpec:
    return WorkerSpec(
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


def test_of_ranks_that_cannot_all_be_started_none_is_left(spec: WorkerSpec, tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    (tmp_path / "rank-1.spec.json").mkdir()  # stands for a disk that takes no more
    with pytest.raises(OSError, match=r"rank-1\.spec\.json"):
        WorkerGroup(range(2), 2, tmp_path, spec, ("127.0.0.1", 1))
    assert set(children(os.getpid())) == before


def test_ranks_of_the_second_node_know_their_place_as_under_torchrun(
    spec: WorkerSpec, tmp_path: Path
) -> None:
    seen: list[dict[str, str]] = []

    def fork(name: str, log: Path, environment: dict[str, str]) -> InTheKernel:
        seen.append(environment)
        return InTheKernel()

    WorkerGroup(
        range(2, 4),
        4,
        tmp_path,
        spec,
        ("127.0.0.1", 1),
        SimpleNamespace(ready=True, lost=False, pid=1, fork=fork),
    )
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    values = []
    for variables in seen:
        values.append([variables[name] for name in names])
    assert values == [
        ["2", "0", "1", "4", "2"],
        ["3", "1", "1", "4", "2"],
    ]


def test_a_rank_that_the_kernel_does_not_let_go_is_not_waited_for_without_end(
    spec: WorkerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "_KILLED_SECONDS", 0.2)
    abandoned: list[int] = []
    stuck = SimpleNamespace(
        ready=True, lost=False, pid=1, fork=lambda *_: InTheKernel(), abandon=abandoned.append
    )
    group = WorkerGroup(range(2), 2, tmp_path, spec, ("127.0.0.1", 1), stuck)
    held: list[None] = []
    assert list(group.end(grace_seconds=0.0, meanwhile=lambda: held.append(None))) == [0, 1]
    assert held and abandoned == [1, 1], (
        "the agent stays in touch with the others, and waits for these no more"
    )


@pytest.mark.parametrize("culprits", [(0,), ()])
def test_child_processes_of_a_rank_do_not_outlive_it(
    spec: WorkerSpec, tmp_path: Path, culprits: tuple[int, ...]
) -> None:
    told = tmp_path / "children"

    keeper = Keeper(tmp_path / "keeper.log")

    def fork(name: str, log: Path, environment: dict[str, str]) -> RemoteChild:
        with open(log, "ab") as output:
            command = [sys.executable, "-c", STUCK_CHILDREN, str(told)]
            return keeper.spawn(command, environment, *[output.fileno()] * 3)

    standby = SimpleNamespace(ready=True, lost=False, pid=0, fork=fork)
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    group = WorkerGroup(range(1), 1, tmp_path, spec, ("127.0.0.1", 1), standby, keeper)
    try:
        stuck = [
            int(pid)
            for pid in wait_until(
                "its children", lambda: told.exists() and told.read_text().split(), 60
            )
        ]
        assert len(stuck) == 3 and all(process_state(pid) in ("S", "R") for pid in stuck)
        assert group.end(culprits, grace_seconds=0.1) == {}
        wait_until(
            "the end of all", lambda: {process_state(pid) for pid in stuck} <= {"", "Z"}, timeout=60
        )
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
        keeper.close()


def test_a_frozen_standby_is_given_up_though_it_does_not_read_what_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "_FORK_DEADLINE_SECONDS", 0.5)
    standby = Standby(tmp_path / "standby.log", colocated_ranks=1)
    began = time.monotonic()
    os.kill(standby.pid, signal.SIGSTOP)
    request = {"LONG": "x" * 200_000}  # a pipe holds 64 KiB
    assert standby.fork("rank 0", tmp_path / "rank-0.log", request) is None
    assert standby.lost and time.monotonic() - began < 30
    standby.close()


def test_a_reused_pid_is_not_killed() -> None:
    """A standby reaps a rank before its agent hears of the end."""
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        RemoteChild(bystander.pid, SimpleNamespace(pid=1, ended=lambda pid: None)).kill()
        with pytest.raises(subprocess.TimeoutExpired):
            bystander.wait(0.3)
    finally:
        bystander.kill()
        bystander.wait()


def test_with_a_lost_standby_its_ranks_are_gone(spec: WorkerSpec, tmp_path: Path) -> None:
    """One that another process writes to is lost too; its ranks have none of its pipes, so that
    they cannot.
    """
    keeper = Keeper(tmp_path / "keeper.log")
    standby = Standby(tmp_path / "standby.log", colocated_ranks=1, keeper=keeper)
    wait_until("its imports", lambda: standby.is_settled, timeout=120)
    assert standby.ready, (tmp_path / "standby.log").read_text()
    group = WorkerGroup(range(2), 2, tmp_path, spec, ("127.0.0.1", 1), standby)
    pids = [worker.process.pid for worker in group.workers]
    own_pipes = {os.fstat(pipe).st_ino for pipe in (standby._requests, standby._answers)}
    assert own_pipes <= pipes_of(standby.pid)
    for pid in pids:
        wait_until("its own streams", lambda pid=pid: not own_pipes & pipes_of(pid), timeout=60)
    with open(f"/proc/{standby.pid}/fd/1", "wb") as answers:
        answers.write(b"WARNING: no JSON\n")
    wait_until("its loss", lambda: standby.is_settled and standby.lost, timeout=60)
    standby.close()
    keeper.close()
    assert {process_state(pid) for pid in pids} <= {"", "Z"}
    assert None not in [worker.process.poll() for worker in group.workers]


def pipes_of(pid: int) -> set[int]:
    """The inodes of the pipes that a process has open."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("pipe:["):
                    found.add(int(target.removeprefix("pipe:[").removesuffix("]")))
    return found


def second_of_two_nodes(folder: Path) -> tuple[GangSpec, GenerationStart]:
    config = RunConfig(survival={"standby": False, "notice_file": str(folder / "notice")})
    spec = GangSpec(
        job="job",
        run="run",
        attempt=0,
        node=1,
        nodes=2,
        processes_per_node=1,
        main_address="127.0.0.1",
        config=config,
        store_uri=str(folder),
        prepared={},
        log_folder=str(folder),
    )
    start = GenerationStart(
        generation=1,
        generation_id="x",
        candidates=[],
        rendezvous_port=1,
        terms=None,
        rehearse=None,
        hosts=["a", "b"],
        nodes=[0, 1],
    )
    return spec, start


def test_ranks_that_cannot_be_started_are_news_for_all_and_no_traceback(tmp_path: Path) -> None:
    spec, start = second_of_two_nodes(tmp_path)
    told: list[WorkerFailure] = []
    peers = SimpleNamespace(
        report=told.append, poll=lambda: end_from_failures(told) if told else None
    )
    drain = Drain(spec)
    store = Store.open(str(tmp_path))
    try:
        generation = NodeGeneration(spec, start, peers, drain, NodeLog(store, "b"), store)
        generation.folder.write_text("a file stands where its folder is to be")
        verdict = generation.run(None, generation.folder)
    finally:
        drain.close()
    assert [(failure.rank, failure.node) for failure in told] == [(1, 1)]
    assert (
        "RankNotStarted: its ranks cannot be started: " in verdict.culprit
        and generation.folder.name in verdict.culprit
    )
    assert (verdict.again, verdict.user_code, verdict.reason) == (
        True,
        False,
        "roll_call",
    ) and verdict.fingerprint


@pytest.mark.parametrize("device", ["", "/dev/nvidia0"])
def test_a_gang_continues_after_a_rank_in_uninterruptible_sleep(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(workers_module, "_KILLED_SECONDS", 0.2)
    monkeypatch.setattr(workers_module, "find_open_device", lambda pid: device)
    spec, start = second_of_two_nodes(tmp_path)
    held: list[None] = []
    verdict = end_from_failures(
        [WorkerFailure(rank=0, message="killed by SIGKILL", killed_by="SIGKILL")]
    )
    peers = SimpleNamespace(
        poll=lambda: verdict,
        keep_in_touch=lambda: held.append(None),
        orders=list,
        take_witness_request=bool,
        store_wait_active=False,
    )
    standby = SimpleNamespace(
        ready=True,
        lost=False,
        is_settled=True,
        pid=1,
        fork=lambda *_: InTheKernel(),
        abandon=lambda pid: None,
    )
    drain = Drain(spec)
    store = Store.open(str(tmp_path))
    try:
        generation = NodeGeneration(spec, start, peers, drain, NodeLog(store, "b"), store)
        monkeypatch.setattr(generation, "_await_readiness", lambda standby: None)
        ended = generation.run(standby, generation.folder)
    finally:
        drain.close()
    assert (
        held
        and "rank 1: SIGKILL sent; stuck in uninterruptible sleep (state D)"
        in capsys.readouterr().out
    )
    if device:
        assert (ended.again, ended.curable, ended.reason) == (
            False,
            True,
            "node_lost",
        ) and device in ended.culprit
    else:
        assert ended == verdict and ended.again


@pytest.mark.parametrize("own", [None, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_ranks_get_segments_that_grow_unless_the_user_has_settings(
    own: str | None, spec: WorkerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(own, "max_split_size_mb:64")
    group = WorkerGroup(range(1), 1, tmp_path, spec, ("127.0.0.1", 1))
    environment = Path(f"/proc/{group.workers[0].process.pid}/environ")

    def read_own_environment() -> list[str]:
        """The file is empty until the kernel has finished the exec, which Popen does not wait for."""
        lines = environment.read_text().split("\0")
        if any(line.startswith(f"{SPEC_VARIABLE}=") for line in lines):
            return lines
        return []

    try:
        lines = wait_until("the rank's environment", read_own_environment, timeout=60, pause=0.01)
    finally:
        group.end(range(1), grace_seconds=0.0)
    found = [line for line in lines if "ALLOC_CONF=" in line]
    assert found == [
        f"{own}=max_split_size_mb:64" if own else "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    ]
