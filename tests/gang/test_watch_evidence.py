"""One process and its watch: what is remarkable and what is given up, and what the kernel says of
its end.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbflow.core.process import process_state
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.heartbeat import HangLimits, Heartbeat, HeartbeatReading
from ebbflow.training.launch.watch import RankWatch, resident_bytes
from tests.support.flow import wait_until

CHILD = "import sys; sys.stdin.readline(); memory = bytearray(300_000_000); sys.stdin.readline()"
LIMIT_BYTES = 100_000_000


class Rank(SimpleNamespace):
    """A rank as its agent has it; the test beats for it."""

    def __init__(self, folder: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        super().__init__(rank=3, log_path=folder / "rank-3.log", process=process)
        self.heartbeat = Heartbeat.create(folder / "rank-3.heartbeat")
        self.offset = 0.0  # of the watch's clock from that of the machine

    @property
    def beat(self) -> HeartbeatReading:
        return self.heartbeat.read()

    def now(self) -> float:
        return time.monotonic() + self.offset

    def result(self) -> None:
        return None

    def failure(self) -> WorkerFailure | None:
        if self.process.poll() is None:
            return None
        return WorkerFailure(rank=3, message="killed by SIGKILL", killed_by="SIGKILL")


class small_cgroup:  # noqa: N801 - reads as a phrase: with small_cgroup(pid)
    """A memory cgroup of its own for a process; False where that is not to be had."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        paths = [line.split(":", 2)[2] for line in lines if ":memory:" in line]
        if paths:
            self._folder = Path(f"/sys/fs/cgroup/memory{paths[0]}") / f"small-{os.getpid()}"
        else:
            self._folder = None

    def __enter__(self) -> bool:
        if self._folder is None:
            return False
        try:
            self._folder.mkdir()
            (self._folder / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
            (self._folder / "cgroup.procs").write_text(str(self._pid))
        except OSError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        if self._folder is not None and self._folder.exists():
            self._folder.rmdir()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.process.kill()
    rank.process.wait()


def watch_of(
    rank: Rank, folder: Path, *, floor_seconds: float, steps: tuple[int, ...] = (1, 2)
) -> RankWatch:
    deadlines = HangLimits(
        floor_seconds=floor_seconds, start_seconds=100.0, store_seconds=130.0, longest_seconds=300.0
    )
    watch = RankWatch([rank], deadlines, folder, node=1, now=rank.now)
    for step in steps:
        rank.heartbeat.beat(step, "forward")
        assert watch.check() == []
    return watch


def pass_time(watch: RankWatch, rank: Rank, seconds: float) -> list[WorkerFailure]:
    """Look twice a second, by the watch's own clock."""
    found = []
    for _ in range(int(2 * seconds)):
        rank.offset += 0.5
        found += watch.check()
    return found


def test_a_slow_rank_is_dumped_but_not_killed_below_the_hang_threshold(
    rank: Rank, tmp_path: Path
) -> None:
    watch = watch_of(rank, tmp_path, floor_seconds=20.0)
    began = rank.now()
    assert pass_time(watch, rank, 2.0) == []
    [witness] = pass_time(watch, rank, 2.0) or wait_until("the dump", watch.check, timeout=60)
    assert witness.witness and Path(witness.dump).is_file()
    rank.offset += 30.0  # nobody looked: at most a second of it counts
    assert all(failure.witness for failure in pass_time(watch, rank, 3.0))
    [failure] = wait_until(
        "the verdict",
        lambda: [failure for failure in pass_time(watch, rank, 1.0) if not failure.witness],
        timeout=60,
    )
    assert (failure.rank, failure.node, failure.step, failure.phase, failure.certainty) == (
        3,
        1,
        2,
        "forward",
        "slow",
    )
    assert "(limit 20 s)" in failure.message and rank.now() - began >= 49.0
    watch.close()


def test_a_rank_that_was_stopped_along_with_its_agent_is_not_to_blame_for_it(
    rank: Rank, tmp_path: Path
) -> None:
    watch = watch_of(rank, tmp_path, floor_seconds=20.0)
    rank.process.send_signal(signal.SIGSTOP)
    wait_until("its stop", lambda: process_state(rank.process.pid) == "T", timeout=60)
    # The rank was stopped first, and its agent has seen that
    assert pass_time(watch, rank, 0.5) == []
    rank.offset += 25.0
    assert pass_time(watch, rank, 0.5) == [] and watch.check() == [], "its agent goes on first"
    [failure] = wait_until("the verdict", lambda: pass_time(watch, rank, 0.5), timeout=60)
    assert failure.stopped and failure.certainty == "proven", "it stays stopped"
    watch.close()


def test_a_hung_rank_is_found_by_an_agent_whose_loop_is_slow(rank: Rank, tmp_path: Path) -> None:
    watch = watch_of(rank, tmp_path, floor_seconds=5.0)

    def look() -> list[WorkerFailure]:
        rank.offset += 1.5
        return [failure for failure in watch.check() if not failure.witness]

    [failure] = wait_until("the verdict", look, timeout=60)
    assert failure.hung and not failure.stopped
    watch.close()


def test_a_disk_that_takes_no_dump_does_not_end_the_watch(rank: Rank, tmp_path: Path) -> None:
    watch = watch_of(rank, tmp_path, floor_seconds=20.0)
    (tmp_path / "dump-1").touch()  # where its folder would be
    [witness] = pass_time(watch, rank, 4.0) or wait_until("the dump", watch.check, timeout=60)
    assert witness.witness and witness.dump == ""
    watch.close()


def test_a_rank_that_progresses_is_not_reported(rank: Rank, tmp_path: Path) -> None:
    watch = watch_of(rank, tmp_path, floor_seconds=3.0)
    for step in range(3, 30):
        rank.heartbeat.beat(step, "forward")
        rank.offset = 0.0
        assert pass_time(watch, rank, 2.0) == []
    watch.close()


def test_file_pages_shared_by_ranks_count_once_as_memory(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(bytes(64 * 2**20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        before = resident_bytes(os.getpid())
        assert not any(mapped[::4096])
        assert resident_bytes(os.getpid()) - before < 16 * 2**20
    held = mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held[::4096] = b"x" * (len(held) // 4096)
    assert resident_bytes(os.getpid()) - before > 60 * 2**20
    held.close()


def test_an_oom_kill_differs_from_other_kills(rank: Rank, tmp_path: Path) -> None:
    with small_cgroup(rank.process.pid) as limited:
        if not limited:
            pytest.skip("no memory cgroup can be made here (needs root and cgroup v1)")
        watch = watch_of(rank, tmp_path, floor_seconds=3.0)
        wait_until(
            "the interpreter to be loaded",
            lambda: watch.sample()["resident_bytes"] > 1e6,
            timeout=60,
        )
        rank.process.stdin.write(b"go\n")
        rank.process.stdin.flush()
        [failure] = wait_until("its end", watch.check, timeout=60)
    assert failure.memory_kill and failure.kind == "killed for memory"
    assert "by the kernel: out of memory, 0.0" in failure.message
    if os.access("/dev/kmsg", os.R_OK):
        assert f"Killed process {rank.process.pid} (" in failure.message
    watch.close()


def test_no_rank_is_blamed_while_one_waits_for_the_store(rank: Rank, tmp_path: Path) -> None:
    watch = watch_of(rank, tmp_path, floor_seconds=5.0)
    rank.offset += 60.0
    for _ in range(100):
        rank.offset += 0.5
        assert [failure for failure in watch.check(store_wait=True) if not failure.witness] == []
    found = pass_time(watch, rank, 5.0)
    limit = time.monotonic() + 60
    while not [failure for failure in found if failure.hung] and time.monotonic() < limit:
        found += watch.check()
    assert [failure.rank for failure in found if failure.hung] == [3]
    watch.close()


def test_ranks_get_a_full_step_of_time_after_a_store_wait(rank: Rank, tmp_path: Path) -> None:
    """The rank that waited has a step to make before it is where the others are."""
    watch = watch_of(rank, tmp_path, floor_seconds=60.0)
    for _ in range(200):
        rank.offset += 0.5
        watch.check(store_wait=True)
    found = pass_time(watch, rank, 10.0)
    watch.request_witnesses()
    found += wait_until("where it stands", watch.check, timeout=60)
    assert [failure for failure in found if failure.hung] == []
    hung = wait_until(
        "its end",
        lambda: [failure for failure in pass_time(watch, rank, 1.0) if failure.hung],
        timeout=60,
    )
    assert [failure.rank for failure in hung] == [3]
    watch.close()


def test_a_rank_that_is_stuck_as_it_waits_for_the_store_is_given_up(
    rank: Rank, tmp_path: Path
) -> None:
    watch = watch_of(rank, tmp_path, floor_seconds=5.0)
    rank.heartbeat.beat(3, "store")

    def look() -> list[WorkerFailure]:
        rank.offset += 0.5
        return [failure for failure in watch.check(store_wait=True) if failure.hung]

    assert not any(look() for _ in range(240))
    [hung] = wait_until("its end", look, timeout=60)
    assert (hung.rank, hung.phase) == (3, "store") and "(limit 130 s)" in hung.message
    watch.close()
