"""What an agent tells of GPUs, by a library that stands in for NVIDIA's: no GPU is there to be asked."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbflow.training.launch.heartbeat import HangLimits, HeartbeatReading
from ebbflow.training.launch.watch import GpuCounters, RankWatch
from tests.support.flow import wait_until

GIB = 2**30


class Library:
    """Two devices. The second tells no temperature; `stuck`: no question is ever answered."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.stuck, self.released = False, threading.Event()

    def nvmlInit(self) -> None:  # noqa: N802 - the library's names
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:  # noqa: N802
        if self.stuck:
            self.released.wait(120)
        return SimpleNamespace(used=(10 + device) * GIB, free=(70 - device) * GIB)

    def nvmlDeviceGetUtilizationRates(self, device: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=90 - 50 * device)

    def nvmlDeviceGetTemperature(self, device: int, sensor: int) -> int:  # noqa: N802
        if device == 1:
            raise RuntimeError("Not Supported")
        return 61


@pytest.fixture
def counters() -> Iterator[GpuCounters]:
    counters = GpuCounters()
    yield counters
    counters.close()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    yield library
    library.released.set()


def test_extremes_and_sums_of_what_the_devices_tell(library: Library, counters: GpuCounters) -> None:
    wait_until("an answer", counters.sample, timeout=60)
    assert counters.sample() == {
        "gpus": 2,
        "gpu_memory_used_bytes": 21 * GIB,
        "gpu_memory_free_bytes": 69 * GIB,
        "gpu_busy_percent": 40,
        "gpu_celsius": 61,
    }


def test_a_driver_that_does_not_answer_holds_nobody_up(library: Library, counters: GpuCounters) -> None:
    """The agent's loop, which watches the ranks, asks this once a second."""
    wait_until("an answer", counters.sample, timeout=60)
    library.stuck = True
    wait_until("silence", lambda: not counters.sample(), timeout=60)


def test_a_driver_that_hangs_keeps_one_thread_however_many_generations_come(
    library: Library, counters: GpuCounters, tmp_path: Path
) -> None:
    library.stuck = True
    deadlines = HangLimits(floor_seconds=3.0, start_seconds=100.0, store_seconds=130.0, longest_seconds=300.0)
    before = set(threading.enumerate())  # the thread of a former test may end meanwhile
    for _ in range(3):
        watch = RankWatch([Here(tmp_path)], deadlines, tmp_path, gpus=counters)
        assert "gpus" not in watch.sample()
        watch.close()
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["gpu counters"]
    library.stuck = False
    library.released.set()
    wait_until("an answer, once it comes to itself", counters.sample, timeout=60)


class Here:
    """A worker that is watched: this process."""

    rank = 0
    process = SimpleNamespace(pid=os.getpid(), poll=lambda: None)

    def __init__(self, folder: Path) -> None:
        self.log_path, self.beat = (
            folder / "rank-0.log",
            HeartbeatReading(pid=os.getpid(), step=1, phase="data", t_mono=0.0),
        )

    def result(self) -> None:
        return None

    def failure(self) -> None:
        return None


def test_without_the_library_nothing_is_told(monkeypatch: pytest.MonkeyPatch, counters: GpuCounters) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    before = set(threading.enumerate())
    assert counters.sample() == {}
    wait_until("the end of its thread", lambda: not set(threading.enumerate()) - before, timeout=60)
    assert counters.sample() == {}
