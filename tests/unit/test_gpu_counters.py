"""What an agent tells of GPUs, by a library that stands in for NVIDIA's: no GPU is there to be
asked.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.core.events import EndReason
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.generation import NodeGeneration
from ebbflow.training.launch.gpus import (
    GpuMonitor,
    _visible_devices,
    fault_from_error,
    fault_from_xid,
)
from ebbflow.training.launch.heartbeat import HangLimits, HeartbeatReading
from ebbflow.training.launch.messages import end_from_failures
from ebbflow.training.launch.watch import RankWatch
from tests.support.flow import wait_until

GIB = 2**30


class Library:
    """Two devices. The second tells no temperature; `stuck`: no question is ever answered."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.stuck = False
        self.released = threading.Event()

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

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:  # noqa: N802
        return 251_400 + 1000 * device  # milliwatts

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: int) -> int:  # noqa: N802
        return 0

    nvmlClocksThrottleReasonHwSlowdown = nvmlClocksThrottleReasonSwThermalSlowdown = 8  # noqa: N815
    nvmlClocksThrottleReasonHwThermalSlowdown = nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 64  # noqa: N815


class Here:
    """A worker that is watched: this process."""

    rank = 0
    process = SimpleNamespace(pid=os.getpid(), poll=lambda: None)

    def __init__(self, folder: Path) -> None:
        self.log_path = folder / "rank-0.log"
        self.beat = HeartbeatReading(pid=os.getpid(), step=1, phase="data", t_mono=0.0)

    def result(self) -> None:
        return None

    def failure(self) -> None:
        return None


class Faulty(Library):
    """Two devices, whose faults and memory a test sets.

    NVML's events are a queue of (device, Xid).
    """

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 1
    NVML_NVLINK_MAX_LINKS = 4
    NVML_ERROR_GPU_IS_LOST = 15
    nvmlEventTypeXidCriticalError = 8  # noqa: N815
    nvmlClocksThrottleReasonHwSlowdown = 8  # noqa: N815
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20  # noqa: N815
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40  # noqa: N815
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80  # noqa: N815

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.ecc = 0
        self.rows = 0
        self.link = 1
        self.lost = False
        self.used = [1, 1]

    def nvmlDeviceGetPciInfo(self, device: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:0{device + 7}:00.0".encode())

    def nvmlEventSetCreate(self) -> str:  # noqa: N802
        return "events"

    def nvmlDeviceRegisterEvents(self, device: int, kinds: int, events: str) -> None:  # noqa: N802
        assert kinds == 8

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> SimpleNamespace:  # noqa: N802
        device, xid = self.events.pop(0)  # IndexError: none came in time
        return SimpleNamespace(device=device, eventData=xid)

    def nvmlDeviceGetTotalEccErrors(self, device: int, kind: int, counter: int) -> int:  # noqa: N802
        return self.ecc * device

    def nvmlDeviceGetRemappedRows(self, device: int) -> tuple[int, int, int, int]:  # noqa: N802
        return (1, 0, 0, self.rows)

    def nvmlDeviceGetNvLinkState(self, device: int, link: int) -> int:  # noqa: N802
        if link > 1:
            raise RuntimeError("Invalid Argument")
        return self.link

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: int) -> int:  # noqa: N802
        if device:
            return 0x40  # the hardware is too hot
        return 0x4  # a power cap, which is usual

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:  # noqa: N802
        if self.lost and device:
            error = RuntimeError("GPU is lost")
            error.value = 15  # type: ignore[attr-defined]
            raise error
        return SimpleNamespace(used=self.used[device] * GIB, free=GIB)


@pytest.fixture
def counters() -> Iterator[GpuMonitor]:
    counters = GpuMonitor()
    yield counters
    counters.close()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    yield library
    library.released.set()


def test_gpu_counters_aggregate_extremes_and_sums(library: Library, counters: GpuMonitor) -> None:
    wait_until("an answer", counters.sample, timeout=60)
    assert counters.sample() == {
        "gpus": 2,
        "gpu_memory_used_bytes": 21 * GIB,
        "gpu_memory_free_bytes": 69 * GIB,
        "gpu_busy_percent": 40,
        "gpu_celsius": 61,
        "gpus_slowed": 0,
        "gpu_watts": 504,
    }


def test_a_page_that_is_asked_for_rarely_waits_for_the_first_answer(
    library: Library, counters: GpuMonitor
) -> None:
    assert counters.sample(wait_seconds=60.0)["gpus"] == 2


def test_a_hanging_gpu_driver_delays_nothing(library: Library, counters: GpuMonitor) -> None:
    """The agent's loop, which watches the ranks, asks this once a second."""
    wait_until("an answer", counters.sample, timeout=60)
    library.stuck = True
    wait_until("silence", lambda: not counters.sample(), timeout=60)


def test_a_driver_that_hangs_keeps_one_thread_however_many_generations_come(
    library: Library, counters: GpuMonitor, tmp_path: Path
) -> None:
    library.stuck = True
    deadlines = HangLimits(
        floor_seconds=3.0, start_seconds=100.0, store_seconds=130.0, longest_seconds=300.0
    )
    before = set(threading.enumerate())  # the thread of a former test may end meanwhile
    for _ in range(3):
        watch = RankWatch([Here(tmp_path)], deadlines, tmp_path, gpus=counters)
        assert "gpus" not in watch.sample()
        watch.close()
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["gpu counters"]
    library.stuck = False
    library.released.set()
    wait_until("an answer, once it comes to itself", counters.sample, timeout=60)


def test_without_the_nvml_library_there_are_no_counters(
    monkeypatch: pytest.MonkeyPatch, counters: GpuMonitor
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    before = set(threading.enumerate())
    assert counters.sample() == {}
    wait_until("the end of its thread", lambda: not set(threading.enumerate()) - before, timeout=60)
    assert counters.sample() == {}


@pytest.fixture
def faulty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Faulty, GpuMonitor, Path]]:
    library = Faulty()
    log = tmp_path / "kmsg"
    log.write_text("")
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monitor = GpuMonitor(kernel_log=str(log))
    wait_until("an answer", monitor.sample, timeout=60)
    yield library, monitor, log
    monitor.close()


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (
            lambda library: library.events.append((1, 79)),
            "GPU 0000:08:00: Xid 79, GPU has fallen off the bus",
        ),
        (lambda library: setattr(library, "ecc", 2), "GPU 0000:08:00: uncorrectable ECC error"),
        (lambda library: setattr(library, "rows", 1), "GPU 0000:07:00: row remapping failed"),
        (lambda library: setattr(library, "link", 0), "GPU 0000:07:00: NVLink 0 is down"),
        (lambda library: setattr(library, "lost", True), "GPU 0000:08:00: GPU is lost"),
    ],
)
def test_faults_of_hardware_are_found(faulty: tuple, cause: Any, expected: str) -> None:
    library, monitor, _ = faulty
    assert monitor.fatal_fault is None and monitor.sample()["gpus_slowed"] == 1
    library.events += [(0, 31), (0, 13)]  # a program's own errors
    cause(library)
    assert monitor.refresh(30)
    assert str(monitor.fatal_fault) == expected


def test_the_kernel_log_shows_xids_of_this_nodes_gpus_alone(faulty: tuple) -> None:
    _, monitor, log = faulty
    other = "0000:c1:00"
    own = "0000:07:00"
    for device in (other, own):
        with log.open("a") as file:
            file.write(
                f"3,1,5,-;NVRM: Xid (PCI:{device}): 95, pid=77, name=python, Uncontained ECC "
                "error\n"
            )
        assert monitor.refresh(30)
        assert [fault.device for fault in monitor.faults] == [own] * (device == own)
    known = len(monitor.faults)
    for action, faults in (("0x0 (None)", 0), ("0x2 (Node Reboot Required)", 1)):
        with log.open("a") as file:
            file.write(
                f"3,1,5,-;NVRM: Xid (PCI:{own}): 154, GPU recovery action changed from 0x1 (GPU "
                f"Reset Required) to {action}\n"
            )
        assert monitor.refresh(30)
        assert len(monitor.faults) == known + faults
    assert monitor.fatal_fault is not None
    assert fault_from_xid(own, 43) is None
    contained = fault_from_xid(own, 94)
    assert contained is not None and not contained.fatal
    assert fault_from_error("CUDA error: uncorrectable ECC error encountered")
    assert fault_from_error("CUDA error: an illegal memory access was encountered") is None


def test_a_broken_gpu_is_blamed_and_counts_towards_no_crash_loop() -> None:
    """Rank 0 has raised before, in a collective that broke."""
    broken: dict[str, Any] = {
        "message": "CUDA error: unspecified launch failure",
        "error": "AcceleratorError",
    }
    user = WorkerFailure(
        rank=0, message="ValueError: x", error="ValueError", where="user/a.py:1 in f", timestamp=1.0
    )
    fault = WorkerFailure(rank=3, **broken, gpu_fault="GPU 0000:07:00: Xid 79", timestamp=2.0)
    end = end_from_failures([user, fault])
    assert (end.ranks, end.fingerprint, end.user_code, end.again) == ([3], "", False, True)
    assert end_from_failures([user]).fingerprint and end_from_failures([user]).user_code


def test_a_rank_starts_once_the_memory_of_the_last_is_free(faulty: tuple) -> None:
    library, monitor, _ = faulty
    monitor.note_idle()
    library.used = [40, 1]
    waits: list[int] = []

    def release() -> None:
        waits.append(len(waits))
        if len(waits) == 3:
            library.used = [1, 1]

    assert monitor.await_release(60, release) == "" and len(waits) >= 3
    library.used = [1, 30]
    assert monitor.await_release(0.0, release) == "29.0 GiB of GPU 1 are still in use after 0 s"


def test_a_node_with_a_broken_gpu_leaves(faulty: tuple, tmp_path: Path) -> None:
    """The end of its generation, with the fault found only after the rank's failure was reported."""
    library, monitor, _ = faulty
    generation: Any = object.__new__(NodeGeneration)
    generation._gpus = monitor
    generation._spec = SimpleNamespace(node=2)
    generation._faults_before = 0
    failed = WorkerFailure(
        rank=5, message="RuntimeError: CUDA error: unknown error", error="RuntimeError"
    )
    assert generation._add_gpu_fault(failed) == failed
    library.events.append((0, 79))
    known = generation._add_gpu_fault(failed)
    assert (
        known.gpu_fault == "GPU 0000:07:00: Xid 79, GPU has fallen off the bus"
        and known.kind == "GPU fault"
    )
    end = generation._after_ranks(end_from_failures([known]), {})
    assert (end.reason, end.again) == (EndReason.NODE_LOST, False) and "Xid 79" in end.culprit


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, [0, 1, 2]), ("1", [1]), ("GPU-c,0", [0, 2]), ("9", [])]
)
def test_gpus_of_other_jobs_are_left_out(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list
) -> None:
    library = SimpleNamespace(
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda device: f"GPU-{'abc'[device]}123".encode(),
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _visible_devices(library) == expected
