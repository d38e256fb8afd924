"""The watch of a node's ranks: which end is whose fault, how long a rank may be silent, and what is
dumped when.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.process import ProcessStat, children, process_state
from ebbflow.training.launch import heartbeat as heartbeat_module
from ebbflow.training.launch import watch as watch_module
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.heartbeat import DUMP_SIGNAL, HangLimits, Heartbeat
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.launch.watch import MemoryKills, RankWatch, node_sample, resident_bytes
from ebbflow.training.launch.workers import Worker
from tests.support.clock import StandingClock
from tests.support.flow import wait_until

SLEEP = ("sleep", "600")
FLOOR_SECONDS = 20.0
STORE_SECONDS = 130.0
COLLECTIVE = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"

TRACEBACK = '  File "/a/user/loss.py", line 9, in log\n    x()\n'

KILLED = "Killed process 17 (python) total-vm:1kB"


class Node:
    """Ranks that only sleep, and their watch; the test beats for them and moves the clock of both."""

    def __init__(self, folder: Path, clock: StandingClock) -> None:
        self.folder = folder
        self.clock = clock
        self.system = folder / "system"
        self.workers: list[Worker] = []
        self.beats: list[Heartbeat] = []
        self.watches: list[RankWatch] = []

    def start(
        self,
        ranks: int = 1,
        command: Sequence[str] = SLEEP,
        *,
        floor_seconds: float = FLOOR_SECONDS,
        **known: Any,
    ) -> RankWatch:
        spec = WorkerSpec(
            job="job",
            run="run",
            attempt=0,
            node=0,
            config=RunConfig(),
            store_uri="store",
            prepared={},
            generation=1,
            generation_id="x",
            candidates=[],
        )
        for rank in range(ranks):
            worker = Worker(
                rank,
                rank,
                self.folder,
                spec,
                {},
                lambda *_: subprocess.Popen(command, start_new_session=True),
            )
            self.workers.append(worker)
            self.beats.append(Heartbeat(self.folder / f"rank-{rank}.heartbeat"))
        limits = HangLimits(
            floor_seconds=floor_seconds,
            start_seconds=100.0,
            store_seconds=STORE_SECONDS,
            longest_seconds=300.0,
        )
        known = {"node": 2, "now": self.clock.monotonic, "system": self.system, **known}
        watch = RankWatch(self.workers, limits, self.folder, **known)
        self.watches.append(watch)
        return watch

    def take_step(self, watch: RankWatch, step: int, phase: str = "forward") -> None:
        for beat in self.beats:
            beat.beat(step, phase)
        assert watch.check() == []

    def take_steps(self, watch: RankWatch, *, phase: str = "forward") -> None:
        """Two steps of each rank, so that the first is over. The last heartbeats are of now."""
        self.take_step(watch, 6, phase)
        self.clock.seconds += 0.125
        self.take_step(watch, 7, phase)

    def pass_time(self, watch: RankWatch, seconds: float, **known: bool) -> list[WorkerFailure]:
        """Look every half second, and at the end."""
        found: list[WorkerFailure] = []
        until = self.clock.seconds + seconds
        while self.clock.seconds + 0.5 < until:
            self.clock.seconds += 0.5
            found += watch.check(**known)
        self.clock.seconds = until
        return found + watch.check(**known)

    def pass_time_with_dumps(self, watch: RankWatch, seconds: float) -> list[WorkerFailure]:
        """Look every half second, and wait for each dump that begins before the clock moves on."""
        found: list[WorkerFailure] = []
        until = self.clock.seconds + seconds
        while self.clock.seconds < until:
            self.clock.seconds = min(until, self.clock.seconds + 0.5)
            before = dumps(self)
            seen = watch.check()
            if not seen and dumps(self) != before:
                seen = look(watch)
            found += seen
        return found

    def end(self, rank: int, number: int = signal.SIGKILL) -> None:
        self.workers[rank].process.send_signal(number)
        self.workers[rank].process.wait()

    def finish(self, rank: int, **result: Any) -> None:
        (self.folder / f"rank-{rank}.result.json").write_text(json.dumps(result))
        self.end(rank)

    def stop(self, rank: int) -> None:
        pid = self.workers[rank].process.pid
        self.workers[rank].process.send_signal(signal.SIGSTOP)
        wait_until("its stop", lambda: process_state(pid) == "T", timeout=60, pause=0.01)

    def write_log(self, rank: int, frames: Sequence[tuple[str, str]], *, reason: str = "") -> None:
        """What faulthandler writes on a fatal signal; frames: file and function, innermost first."""
        if reason:
            lines = [f"  what():  {reason}"]
        else:
            lines = []
        lines += ["Fatal Python error: Aborted", "", "Current thread 0x2 (most recent call first):"]
        lines += [f'  File "{file}", line 9 in {name}' for file, name in frames]
        self.workers[rank].log_path.write_text("\n".join(lines) + "\n")

    def close(self) -> None:
        for watch in self.watches:
            watch.close()
        for worker in self.workers:
            if worker.process.poll() is None:
                os.killpg(worker.process.pid, signal.SIGKILL)
                worker.process.wait()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    # No py-spy
    monkeypatch.setattr("ebbflow.training.launch.evidence.shutil.which", lambda *_, **__: None)
    node = Node(tmp_path, StandingClock(monkeypatch, heartbeat_module))
    yield node
    node.close()


def look(watch: RankWatch) -> list[WorkerFailure]:
    """What the dump that is under way says."""
    return wait_until("the dump", watch.check, timeout=60, pause=0.01)


def dumps(node: Node) -> list[str]:
    return sorted(path.name for path in node.folder.glob("dump-*"))


# Ends of ranks.


def test_a_killed_rank_is_reported_once_with_its_last_heartbeat(node: Node) -> None:
    watch = node.start(2)
    node.take_steps(watch, phase="backward")
    node.end(1)
    [failure] = watch.check()
    assert (failure.rank, failure.node, failure.killed_by, failure.message) == (
        1,
        2,
        "SIGKILL",
        "killed by SIGKILL",
    )
    assert (failure.step, failure.phase, failure.where, failure.waiting) == (
        7,
        "backward",
        "",
        False,
    )
    assert (failure.memory_kill, failure.cascade, failure.witness, failure.calls) == (
        False,
        False,
        False,
        [],
    )
    assert watch.check() == []
    assert node.pass_time(watch, 1.0) == []


@pytest.mark.parametrize(
    ("number", "frames", "cascade", "waiting"),
    [
        (signal.SIGABRT, [(COLLECTIVE, "wait"), ("/a/user/loss.py", "log")], True, True),
        (signal.SIGABRT, [("/a/user/loss.py", "log")], False, False),  # the user's assert in C++
        (signal.SIGABRT, None, False, False),
        (signal.SIGSEGV, [(COLLECTIVE, "wait"), ("/a/user/loss.py", "log")], False, True),
    ],
)
def test_only_an_abort_in_a_collective_is_a_cascade(
    number: int, frames: list[tuple[str, str]] | None, cascade: bool, waiting: bool, node: Node
) -> None:
    watch = node.start()
    if frames is not None:
        node.write_log(0, frames)
    node.end(0, number)
    [failure] = watch.check()
    assert (failure.cascade, failure.waiting) == (cascade, waiting)
    assert failure.where == ("user/loss.py:9 in log" if frames else "")


def test_a_crash_report_has_the_place_and_the_reason(node: Node) -> None:
    watch = node.start(2)
    node.write_log(0, [("/a/user/loss.py", "log")], reason="an index is out of range")
    node.write_log(1, [("/a/user/loss.py", "log")])
    node.end(0, signal.SIGSEGV)
    node.end(1, signal.SIGBUS)
    messages = [failure.message for failure in watch.check()]
    assert messages == [
        "killed by SIGSEGV in user/loss.py:9 in log: an index is out of range",
        "killed by SIGBUS in user/loss.py:9 in log",
    ]


def write_error(node: Node, record: object) -> None:
    (node.folder / "rank-0.error.json").write_text(
        record if isinstance(record, str) else json.dumps(record)
    )


def test_an_exception_has_its_place_and_no_crash(node: Node) -> None:
    watch = node.start(command=("sh", "-c", "exit 1"))
    node.write_log(0, [(COLLECTIVE, "wait")], reason="of another process")
    extra = {"py_callstack": TRACEBACK, "timestamp": "12"}
    write_error(node, {"message": {"message": "ValueError: x", "extraInfo": extra}})
    [failure] = wait_until("its end", watch.check, timeout=60, pause=0.01)
    assert (failure.message, failure.where, failure.error) == (
        "ValueError: x",
        "user/loss.py:9 in log",
        "ValueError",
    )
    assert (failure.cascade, failure.waiting, failure.memory_kill) == (False, False, False)


def test_an_exception_of_a_lost_peer_is_a_cascade(node: Node) -> None:
    watch = node.start(command=("sh", "-c", "exit 1"))
    write_error(
        node, {"message": {"message": "RuntimeError: Connection closed by peer", "extraInfo": {}}}
    )
    [failure] = wait_until("its end", watch.check, timeout=60, pause=0.01)
    assert (failure.cascade, failure.where) == (True, "")


@pytest.mark.parametrize(
    "record",
    [
        None,  # no file
        "{",
        "[" * 200_000,
        {},
        {"message": {"message": "ValueError: x"}},
        {"message": "ValueError: x"},
        {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": 7}}},
    ],
)
def test_an_exception_without_a_traceback_has_no_place(record: object, node: Node) -> None:
    watch = node.start(command=("sh", "-c", "exit 1"))
    if record is not None:
        write_error(node, record)
    [failure] = wait_until("its end", watch.check, timeout=60, pause=0.01)
    assert failure.where == ""


def test_a_long_place_is_cut(node: Node) -> None:
    watch = node.start(command=("sh", "-c", "exit 1"))
    traceback = f'  File "/a/user/loss.py", line 9, in {"x" * 2000}\n'
    write_error(
        node, {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": traceback}}}
    )
    [failure] = wait_until("its end", watch.check, timeout=60, pause=0.01)
    assert (
        failure.where.startswith("user/loss.py:9 in xxx")
        and "1518 characters left out" in failure.where
    )


def test_a_dead_ranks_collectives_are_those_that_it_saved(node: Node) -> None:
    watch = node.start()
    entry = {
        "profiling_name": "gloo:all_reduce",
        "process_group": ["0"],
        "collective_seq_id": 3,
        "input_sizes": [[4]],
    }
    (node.folder / "rank-0.records.json").write_text(json.dumps({"entries": [entry]}))
    node.end(0)
    [failure] = watch.check()
    assert failure.calls == [["0", 3, "all_reduce [[4]]"]]


def test_a_rank_that_finished_is_a_witness_of_what_ends_the_others(node: Node) -> None:
    watch = node.start(3)
    node.take_steps(watch)
    (node.folder / "rank-0.result.json").write_text(json.dumps({"outcome": "completed", "step": 9}))
    node.finish(1, outcome="interrupted", step=5)
    assert watch.check() == [], "to finish is no failure"
    node.end(2)
    failure, witness = watch.check()
    assert (failure.rank, failure.witness) == (2, False)
    assert (witness.rank, witness.left, witness.witness, witness.step) == (1, True, True, 5)
    assert witness.message == "left after step 5: interrupted"


# Kills for memory.


def of_system(node: Node, pid: int, cgroup: str) -> None:
    path = node.system / "proc" / str(pid) / "cgroup"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(cgroup)


def count_kills(node: Node, path: str, kills: int) -> None:
    """The kernel's counter in a file below /sys/fs/cgroup, or in /proc/vmstat."""
    file = node.system / (path if path.startswith("proc") else f"sys/fs/cgroup/{path}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"oom_kill_disable 9\n\noom_kill {kills}\nunder_oom 9\n")


@pytest.mark.parametrize(
    ("cgroup", "counter"),
    [
        ("0::/job", "job/memory.events"),
        ("0::/a:b", "a:b/memory.events"),
        ("9:memory:/job", "memory/job/memory.oom_control"),
        ("9:cpu,memory:/job", "memory/job/memory.oom_control"),
        ("0::/job", "memory.events"),
        ("9:memory:/job", "memory/memory.oom_control"),
        ("", "proc/vmstat"),
    ],
)
def test_a_kill_for_memory_is_one_more_in_a_counter_of_the_process(
    cgroup: str, counter: str, node: Node
) -> None:
    of_system(node, 17, cgroup)
    count_kills(node, counter, 3)
    kills = MemoryKills(17, system=node.system)
    assert not kills.happened()
    count_kills(node, counter, 4)
    kills.follow()
    assert kills.happened()


@pytest.mark.parametrize(
    "counter", ["other/memory.events", "memory/job/memory.oom_control", "proc/vmstat"]
)
def test_a_kill_in_another_cgroup_is_not_the_processs(counter: str, node: Node) -> None:
    of_system(node, 17, "0::/job\n9:cpu:/job")
    count_kills(node, "job/memory.events", 3)
    count_kills(node, counter, 3)
    kills = MemoryKills(17, system=node.system)
    count_kills(node, counter, 4)
    assert not kills.happened()


def test_a_cgroup_that_a_process_enters_later_counts_from_then(node: Node) -> None:
    of_system(node, 17, "0::/job")
    count_kills(node, "job/memory.events", 0)
    count_kills(node, "later/memory.events", 5)
    kills = MemoryKills(17, system=node.system)
    of_system(node, 17, "0::/later")
    kills.follow()
    assert not kills.happened()
    count_kills(node, "later/memory.events", 6)
    assert kills.happened()


@pytest.mark.parametrize(
    ("at", "text", "heard"),
    [
        (600.0, KILLED, True),
        (498.0, KILLED, True),  # the clocks may differ by 2 s
        (497.99, KILLED, False),
        (600.0, "Killed process 171 (python)", False),
        (600.0, "Killed process 17", False),
        (600.0, "Started process 17 (python)", False),
    ],
)
def test_the_kernel_log_names_the_process_that_it_killed(
    at: float, text: str, heard: bool, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 500.0}.__getitem__)
    kills = MemoryKills(17, system=node.system)
    assert kills.kernel_message() == "", "without a log"
    log = node.system / "dev" / "kmsg"
    log.parent.mkdir(parents=True)
    log.write_text(f"6,1,{round(at * 1e6)},-;{text}\n SUBSYSTEM=memory\n")
    before = os.listdir("/proc/self/fd")
    assert (kills.kernel_message(), kills.happened()) == (text if heard else "", heard)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("number", "memory_kill"), [(signal.SIGKILL, True), (signal.SIGTERM, False)]
)
def test_only_the_kernels_own_signal_is_a_kill_for_memory(
    number: int, memory_kill: bool, node: Node
) -> None:
    count_kills(node, "memory.events", 0)
    watch = node.start()
    count_kills(node, "memory.events", 1)
    node.end(0, number)
    [failure] = watch.check()
    assert failure.memory_kill is memory_kill
    name = signal.Signals(number).name
    assert (
        failure.message
        == f"killed by {name}{' by the kernel: out of memory' if memory_kill else ''}"
    )


def test_an_oom_kill_reports_the_last_size_and_the_kernels_message(node: Node) -> None:
    watch = node.start()
    pid = node.workers[0].process.pid
    wait_until("its size", lambda: watch.sample()["resident_bytes"], timeout=60, pause=0.01)
    log = node.system / "dev" / "kmsg"
    log.parent.mkdir(parents=True)
    text = f"Killed process {pid} (sleep)"
    log.write_text(f"6,1,{int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)},-;{text}\n")
    node.end(0)
    assert watch.sample()["resident_bytes"] == 0
    [failure] = watch.check()
    size = "0.00 GiB resident when last measured"
    assert failure.message == f"killed by SIGKILL by the kernel: out of memory, {size} ({text})"


def test_a_cgroup_is_followed_with_each_sample(node: Node) -> None:
    watch = node.start()
    of_system(node, node.workers[0].process.pid, "0::/later")
    count_kills(node, "later/memory.events", 5)
    watch.sample()
    count_kills(node, "later/memory.events", 6)
    node.end(0)
    [failure] = watch.check()
    assert failure.memory_kill


# Samples.


def test_a_nodes_sample_is_that_of_its_living_ranks_disk_and_gpus(node: Node) -> None:
    gpus = SimpleNamespace(sample=lambda: {"gpus": 8})
    watch = node.start(2, gpus=gpus)
    pids = [worker.process.pid for worker in node.workers]
    wait_until("their sizes", lambda: all(map(resident_bytes, pids)), timeout=60, pause=0.01)

    def is_their_sum() -> bool:  # once they have grown
        return watch.sample()["resident_bytes"] == sum(map(resident_bytes, pids)) > 0

    wait_until("the sum of their sizes", is_their_sum, timeout=60, pause=0.01)
    sample = watch.sample()
    assert sorted(sample) == [
        "disk_free_bytes",
        "gpus",
        "memory_available_bytes",
        "resident_bytes",
        "shared_memory_free_bytes",
    ]
    node.end(0)
    assert watch.sample()["resident_bytes"] == resident_bytes(pids[1])
    assert "disk_free_bytes" not in node_sample([], node.folder / "missing")


def test_a_processs_resident_bytes_are_its_anonymous_and_shared_memory(node: Node) -> None:
    node.start()
    pid = node.workers[0].process.pid
    wait_until("its memory", lambda: resident_bytes(pid), timeout=60, pause=0.01)
    time.sleep(0.05)
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = {
        line.partition(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")
    }
    assert resident_bytes(pid) == 1024 * (kilobytes["RssAnon"] + kilobytes["RssShmem"])
    assert resident_bytes(2**30) == 0


# Silence.


def is_hung(records: Sequence[WorkerFailure]) -> bool:
    return any(record.hung for record in records)


def assert_hangs_next(node: Node, watch: RankWatch) -> None:
    """The rank has been silent for exactly its threshold."""
    node.clock.seconds += 0.125
    wait_until("the failure", lambda: is_hung(watch.check()), timeout=60, pause=0.01)


def test_a_rank_hangs_once_it_is_silent_for_longer_than_its_threshold(node: Node) -> None:
    watch = node.start()
    node.take_steps(watch)
    assert not is_hung(node.pass_time(watch, FLOOR_SECONDS))
    watch.request_witnesses()
    assert not is_hung(look(watch))
    node.clock.seconds += 0.25
    [failure] = watch.check()
    assert failure.message == "no progress for 20.2 s (limit 20 s) at step 7 in forward"
    assert (failure.certainty, failure.hung, failure.stopped, failure.witness) == (
        "slow",
        True,
        False,
        False,
    )
    assert (failure.node, failure.step, failure.phase) == (2, 7, "forward")
    assert time.time() - failure.timestamp == pytest.approx(20.25, abs=5.0)
    assert node.pass_time(watch, 3.0) == [], "it is reported once"


def test_a_heartbeat_ends_the_silence(node: Node) -> None:
    watch = node.start()
    node.take_steps(watch)
    assert not is_hung(node.pass_time(watch, FLOOR_SECONDS - 1.0))
    node.take_step(watch, 8, "backward")  # not a phase that has just taken long
    assert not is_hung(node.pass_time(watch, FLOOR_SECONDS))
    assert_hangs_next(node, watch)


@pytest.mark.parametrize(("turn", "absent"), [(1.0, 0.0), (1.25, 0.25), (61.0, 60.0)])
def test_of_a_long_turn_of_the_agent_one_second_counts_as_silence(
    turn: float, absent: float, node: Node
) -> None:
    watch = node.start()
    node.take_steps(watch)
    node.clock.seconds += turn
    watch.check()
    assert not is_hung(node.pass_time(watch, FLOOR_SECONDS - turn + absent))
    assert_hangs_next(node, watch)


def test_an_agents_absence_before_the_last_heartbeat_excuses_nothing(node: Node) -> None:
    watch = node.start()
    node.take_steps(watch)
    node.clock.seconds += 61.0
    watch.check()
    node.take_step(watch, 8, "backward")  # not a phase that has just taken long
    assert not is_hung(node.pass_time(watch, FLOOR_SECONDS))
    assert_hangs_next(node, watch)


def test_a_wait_for_the_store_excuses_the_ranks_that_wait_for_the_waiting_one(node: Node) -> None:
    watch = node.start()
    node.take_steps(watch)
    assert not is_hung(node.pass_time(watch, 50.0, store_wait=True))
    assert not is_hung(node.pass_time(watch, FLOOR_SECONDS))
    assert_hangs_next(node, watch)


def test_a_wait_for_the_store_has_a_limit_of_its_own(node: Node) -> None:
    watch = node.start()
    node.take_steps(watch, phase="store")
    assert not is_hung(node.pass_time(watch, STORE_SECONDS, store_wait=True))
    node.clock.seconds += 0.125
    wait_until("the failure", lambda: is_hung(watch.check(store_wait=True)), timeout=60, pause=0.01)


def test_a_wait_for_the_store_before_the_last_heartbeat_excuses_nothing(node: Node) -> None:
    watch = node.start()
    node.take_steps(watch)
    node.pass_time(watch, 10.0, store_wait=True)
    node.take_step(watch, 8, "backward")  # not a phase that has just taken long
    assert not is_hung(node.pass_time(watch, FLOOR_SECONDS))
    assert_hangs_next(node, watch)


# Stopped ranks.


def test_a_rank_is_stopped_after_more_than_a_second_in_that_state(node: Node) -> None:
    watch = node.start(2)
    node.take_steps(watch)
    node.stop(1)
    assert node.pass_time(watch, 1.5) == []  # seen first after half a second
    node.clock.seconds += 0.125
    failure, witness = look(watch)
    assert (failure.rank, failure.stopped, failure.hung, failure.witness) == (1, True, True, False)
    assert failure.message == "no progress for 1.6 s at step 7 in forward, stopped by a signal"
    assert failure.certainty == "proven"
    assert (witness.rank, witness.witness, witness.message) == (0, True, "at step 7 in forward")
    assert node.pass_time(watch, 1.0) == [], "it is reported once"


def test_a_rank_that_progresses_in_time_is_not_reported(node: Node) -> None:
    watch = node.start()
    node.take_steps(watch)
    node.stop(0)
    assert node.pass_time(watch, 1.0) == []
    node.workers[0].process.send_signal(signal.SIGCONT)
    wait_until(
        "it", lambda: process_state(node.workers[0].process.pid) != "T", timeout=60, pause=0.01
    )
    assert node.pass_time(watch, 0.5) == []
    node.stop(0)
    assert node.pass_time(watch, 1.0) == []


def test_a_rank_that_was_stopped_with_its_agent_has_a_second_to_go_on(node: Node) -> None:
    watch = node.start()
    node.take_steps(watch)
    node.stop(0)
    assert node.pass_time(watch, 1.0) == []
    node.clock.seconds += 25.0
    assert watch.check() == []
    assert node.pass_time(watch, 1.0) == []
    node.clock.seconds += 0.125
    assert look(watch)[0].stopped


@pytest.mark.parametrize(("since_last_look", "seen"), [(0.0625, False), (0.125, True)])
def test_a_ranks_state_is_read_four_times_a_second(
    since_last_look: float, seen: bool, node: Node
) -> None:
    watch = node.start()
    node.take_steps(watch)  # the state was read an eighth of a second ago
    node.stop(0)
    node.clock.seconds += since_last_look
    watch.check()
    node.clock.seconds += 1.0
    assert watch.check() == []
    node.clock.seconds += 0.125
    if seen:
        assert look(watch)[0].stopped
    else:
        time.sleep(0.1)
        assert watch.check() == [] and dumps(node) == []


# CPU time.


def stat_of(pid: int, ticks: int, state: str) -> ProcessStat:
    return ProcessStat(pid, state, 1, 1, 1, 1, 1, 0, cpu_ticks=ticks)


@pytest.mark.parametrize(
    ("ticks", "state", "idle_seconds"),
    [
        ((5, 5, 5), "S", 2.0),
        ((5, 6, 7), "S", 2.0),  # 10 ms per second are its background threads
        ((5, 7, 9), "S", 0.0),
        ((9, 7, 5), "S", 0.0),  # a worker process has ended
        ((5, 5, 5), "R", 0.0),
        ((5, 5, 5), "D", 0.0),
    ],
)
def test_a_rank_is_idle_while_it_uses_hardly_any_cpu_time(
    ticks: tuple[int, ...],
    state: str,
    idle_seconds: float,
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel's counter is read once per second of silence."""
    coming = list(ticks)
    monkeypatch.setattr(
        watch_module, "process_stat", lambda pid: stat_of(pid, coming.pop(0), state)
    )
    watch = node.start()
    node.take_steps(watch)
    node.clock.seconds += 0.5
    watch.check()
    for _ in ticks:
        node.clock.seconds += 1.0
        watch.check()
    assert coming == []
    watch.request_witnesses()
    [witness] = look(watch)
    assert witness.idle_seconds == idle_seconds


def test_a_ranks_loader_workers_count_as_the_rank(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = node.start(command=("sh", "-c", "sleep 600 & wait"))
    pid = node.workers[0].process.pid
    [child] = wait_until("its child", lambda: children(pid), timeout=60, pause=0.01)
    states = {pid: "S", child: "R"}
    monkeypatch.setattr(watch_module, "process_stat", lambda pid: stat_of(pid, 0, states[pid]))
    node.take_steps(watch)
    node.pass_time(watch, 2.0)  # the kernel is asked after 1.5 s
    watch.request_witnesses()
    assert look(watch)[0].idle_seconds == 0.5
    states[child] = "S"
    node.pass_time(watch, 0.5)
    node.pass_time(watch, 0.4)
    watch.request_witnesses()
    assert look(watch)[0].idle_seconds == pytest.approx(1.4)


def test_a_rank_is_idle_no_longer_than_it_is_silent(node: Node) -> None:
    watch = node.start()
    node.take_steps(watch)
    node.clock.seconds += 0.5
    watch.request_witnesses()
    [witness] = look(watch)
    assert witness.idle_seconds == 0.0


# Dumps.


def test_suspicious_ranks_are_dumped_every_thirty_seconds(node: Node) -> None:
    watch = node.start(floor_seconds=100.0)
    node.take_steps(watch)
    assert node.pass_time(watch, 3.0) == [] and dumps(node) == []
    node.clock.seconds += 0.125
    [witness] = look(watch)
    assert (witness.witness, witness.hung, witness.message) == (True, False, "at step 7 in forward")
    assert node.pass_time(watch, 29.875) == [] and dumps(node) == ["dump-1"]
    node.clock.seconds += 0.125
    [witness] = look(watch)
    assert witness.witness and dumps(node) == ["dump-1", "dump-2"]


@pytest.mark.parametrize(("age", "reused"), [(5.0, True), (5.125, False)])
def test_a_dump_of_at_most_five_seconds_shows_where_a_hung_rank_is(
    age: float, reused: bool, node: Node
) -> None:
    watch = node.start(2)
    node.take_steps(watch)
    node.pass_time_with_dumps(watch, FLOOR_SECONDS + 0.125 - age - 0.5)
    node.beats[0].beat(8, "forward")
    node.pass_time_with_dumps(watch, 0.5)
    watch.request_witnesses()
    assert [record.rank for record in look(watch)] == [0, 1]
    before = dumps(node)
    records = node.pass_time_with_dumps(watch, age)
    assert [(record.rank, record.hung) for record in records] == [(1, True)] + [(0, False)] * (
        not reused
    )
    assert len(dumps(node)) - len(before) == (0 if reused else 1)


def test_a_dump_from_before_a_ranks_last_heartbeat_does_not_show_where_it_is(node: Node) -> None:
    watch = node.start()
    node.take_steps(watch)
    watch.request_witnesses()
    look(watch)
    node.clock.seconds += 0.125
    node.take_step(watch, 8)
    node.stop(0)
    node.pass_time(watch, 0.25)
    node.clock.seconds += 1.0
    assert watch.check() == []
    node.clock.seconds += 0.125
    [failure] = look(watch)
    assert failure.stopped and "dump-2" in failure.dump


def test_positions_are_reported_once_per_dump_and_on_request(node: Node) -> None:
    watch = node.start(2)
    node.take_steps(watch)
    node.finish(1, outcome="completed", step=7)
    watch.request_witnesses()
    reports = look(watch)
    assert [(record.rank, record.witness, record.left) for record in reports] == [
        (0, True, False),
        (1, True, True),
    ]
    assert watch.check() == []
    watch.request_witnesses()
    assert len(watch.check()) == 2 and dumps(node) == ["dump-1"]
    assert [path.name for path in (node.folder / "dump-1").iterdir()] == ["rank-0.txt"]


def test_a_hung_ranks_place_is_where_its_stack_is(node: Node) -> None:
    stacks = node.folder / "rank-0.stacks"
    program = (
        "import faulthandler as f, sys, time; f.register(int(sys.argv[1]), open(sys.argv[2], "
        "'w')); time.sleep(600)"
    )
    watch = node.start(command=(sys.executable, "-c", program, str(int(DUMP_SIGNAL)), str(stacks)))
    status = Path(f"/proc/{node.workers[0].process.pid}/status")

    def catches() -> int:
        return (
            int(status.read_text().partition("SigCgt:")[2].split()[0], 16) >> (DUMP_SIGNAL - 1) & 1
        )

    wait_until("its handler", catches, timeout=60, pause=0.01)
    node.take_steps(watch)
    watch.request_witnesses()
    [witness] = look(watch)
    assert (witness.where, witness.message) == (
        "<string>:1 in <module>",
        "at step 7 in forward, <string>:1 in <module>",
    )
    assert "<string>" in Path(witness.dump).read_text()


@pytest.mark.parametrize(
    ("work", "waits"),
    [("time.sleep(600)", True), ("re.match('(a+)+$', 64 * 'a' + 'b')", False)],
    ids=["blocked", "computing"],
)
def test_a_rank_that_computes_in_its_backward_pass_does_not_wait(
    node: Node, work: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody may trace, the kernel's state of the process tells."""
    monkeypatch.setattr("ebbflow.training.launch.evidence.shutil.which", lambda *_, **__: None)
    stacks = node.folder / "rank-0.stacks"
    program = (
        "import faulthandler as f, pathlib, re, sys, time\n"
        "def _engine_run_backward():\n"
        f"    {work}\n"
        "f.register(int(sys.argv[1]), open(sys.argv[2], 'w'))\n"
        "pathlib.Path(sys.argv[2] + '.ready').touch()\n"
        "_engine_run_backward()"
    )
    watch = node.start(command=(sys.executable, "-c", program, str(int(DUMP_SIGNAL)), str(stacks)))
    wait_until("its handler", Path(f"{stacks}.ready").exists, timeout=60, pause=0.01)
    node.take_steps(watch)
    state = "S" if waits else "R"
    pid = node.workers[0].process.pid
    wait_until("its work", lambda: process_state(pid) == state, timeout=60, pause=0.01)
    watch.request_witnesses()
    [witness] = look(watch)
    assert "_engine_run_backward" in Path(witness.dump).read_text()
    assert witness.waiting is waits


def test_a_closed_watch_makes_no_more_dumps(node: Node) -> None:
    watch = node.start()
    node.take_steps(watch)
    watch.close()
    watch.request_witnesses()
    with pytest.raises(RuntimeError, match="shutdown"):
        watch.check()


def test_one_suspicious_rank_is_enough_for_a_dump(node: Node) -> None:
    watch = node.start(2, floor_seconds=100.0)
    node.take_steps(watch)
    node.pass_time(watch, 2.0)
    node.beats[0].beat(8, "forward")
    assert node.pass_time(watch, 1.0) == []
    node.clock.seconds += 0.125
    assert [record.rank for record in look(watch)] == [0, 1]
