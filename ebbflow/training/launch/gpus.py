"""Monitor a node's GPUs through NVIDIA's library (NVML) and the kernel log: use, hardware faults,
thermal throttling.

This module was never run on a GPU; the tests replace the library. A fault that needs a reset or
another machine makes the node unusable (`GpuFault.fatal`). Xid numbers are those of NVIDIA's Xid
catalog (GPU Deployment and Management Documentation). Xids that a program can cause, such as 13 and
31, do not count as hardware faults.
"""

import contextlib
import ctypes
import importlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
# Handle of a GPU, as NVML's Python module has it
Device: TypeAlias = "ctypes._Pointer[ctypes.Structure]"
_FRESH_SECONDS = 5.0
_LOOK_SECONDS = 0.02
_ANSWER_SECONDS = 1.0
_RELEASED_BYTES = 2**29  # less than a CUDA context and a model
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[^)]*)\): (?P<number>\d+)")
# Xid 154 announces a recovery action, also that none is needed any more
_RECOVERED = re.compile(r": 154\b.*\bto 0x0\b")
_FATAL_XIDS = {
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    61: "internal microcontroller breakpoint",
    62: "internal microcontroller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained ECC error",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
    143: "GPU could not be initialized",
    154: "GPU needs a reset, or its node a reboot or drain",
}
_PASSING_XIDS = {
    63: "row remapped",
    94: "contained ECC error",
    **dict.fromkeys(range(144, 151), "NVLink error"),
}
# Parts of messages of CUDA errors in a rank (cudaGetErrorString) that only hardware causes.
_FATAL_TEXTS = (
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "gpu is lost",
    "fallen off the bus",
)


@dataclass(frozen=True)
class GpuFault:
    device: str  # PCI address, or index
    what: str
    fatal: bool = True  # whether this machine cannot continue

    def __str__(self) -> str:
        return f"GPU {self.device}: {self.what}"


class GpuMonitor:
    """Monitor of a node's GPUs.

    It reads the GPUs' state in a thread, because a broken driver may block.

    On a machine without GPUs, it does nothing.

    Attributes:
        faults: the hardware faults since the agent started, in the order in which they were found.
        idle_bytes: the memory that each GPU used before the first rank started; empty if unknown.
    """

    def __init__(self, *, kernel_log: str = "/dev/kmsg") -> None:
        self._wanted = threading.Event()
        self._taken = threading.Condition()
        self._last: tuple[float, dict[str, int]] = (-_FRESH_SECONDS, {})
        self._thread: threading.Thread | None = None
        self._closed = False
        self._kernel_log = kernel_log
        self._samples = 0
        self._used: list[int] = []
        self.faults: list[GpuFault] = []
        self.idle_bytes: list[int] = []

    def sample(self, *, wait_seconds: float = 0.0) -> dict[str, int]:
        """Return the newest measurement and request the next.

        Wait at most `wait_seconds` for a recent measurement.

        Return {} if the measurement is older than 5 s. Fields: gpus (number), gpu_memory_used_bytes
        (sum), gpu_memory_free_bytes (smallest), gpu_busy_percent (smallest), gpu_celsius (highest),
        gpu_watts (sum), gpus_slowed (number of GPUs that are throttled because of heat or power).
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask, name="gpu counters", daemon=True)
            self._thread.start()
        self._wanted.set()
        limit = time.monotonic() + wait_seconds
        while self._thread.is_alive():
            now = time.monotonic()
            if now >= limit or now - self._last[0] < _FRESH_SECONDS:
                break
            time.sleep(_LOOK_SECONDS)
        measured_at, counters = self._last
        if time.monotonic() - measured_at < _FRESH_SECONDS:
            return counters
        return {}

    def add(self, fault: GpuFault) -> None:
        self.faults.append(fault)

    def refresh(self, seconds: float) -> bool:
        """Wait up to `seconds` for a new measurement.

        Return False if none arrives, for example without a GPU.
        """
        if not self.sample(wait_seconds=seconds):
            return False
        with self._taken:
            wanted = self._samples + 2  # the next one may have begun already
            limit = time.monotonic() + seconds
            while self._samples < wanted and time.monotonic() < limit:
                self._wanted.set()
                self._taken.wait(max(0.0, min(limit - time.monotonic(), 0.05)))
            return self._samples >= wanted

    def note_idle(self) -> None:
        """Set `idle_bytes` to the memory in use now, unless it is already set.

        Call this before ranks start.
        """
        if not self.idle_bytes and self.refresh(_ANSWER_SECONDS):
            self.idle_bytes = self._used

    @property
    def fatal_fault(self) -> GpuFault | None:
        return next((fault for fault in self.faults if fault.fatal), None)

    def await_release(self, seconds: float, meanwhile: Callable[[], object]) -> str:
        """Wait until the memory in use on each GPU is about as small as before the first rank
        started.

        The driver frees the memory of a killed process some time after the process has ended.
        Return "" or, after `seconds`, a message about the memory still in use.
        """
        idle = self.idle_bytes
        limit = time.monotonic() + seconds
        while idle and self.refresh(_ANSWER_SECONDS) and len(self._used) == len(idle):
            held = [now - then for now, then in zip(self._used, idle, strict=True)]
            if max(held) <= _RELEASED_BYTES:
                return ""
            if time.monotonic() >= limit:
                return (
                    f"{max(held) / 2**30:.1f} GiB of GPU {held.index(max(held))} are still in "
                    f"use after {seconds:g} s"
                )
            meanwhile()
        return ""

    def close(self) -> None:
        self._closed = True
        self._wanted.set()

    def _ask(self) -> None:
        try:
            library = importlib.import_module("pynvml")
            library.nvmlInit()
            devices = _visible_devices(library)
        except Exception:  # no binding, no driver or a lost device: train without these figures
            return
        find_faults = _FaultFinder(library, devices, self._kernel_log).find
        while devices:
            self._wanted.wait()
            self._wanted.clear()
            if self._closed:
                return
            for fault in find_faults():
                self.add(fault)
            found, self._used = _counters(library, devices)
            self._last = (time.monotonic(), found)
            with self._taken:
                self._samples += 1
                self._taken.notify_all()


def fault_from_xid(device: str, number: int) -> GpuFault | None:
    """Return the hardware fault that an Xid reports; None for an unknown Xid, or an Xid that a
    program can cause.
    """
    what = _FATAL_XIDS.get(number) or _PASSING_XIDS.get(number)
    if what is None:
        return None
    return GpuFault(device, f"Xid {number}, {what}", number in _FATAL_XIDS)


def fault_from_error(message: str) -> GpuFault | None:
    """Return the hardware fault that a rank's error message reports; None if it reports none."""
    text = message.lower()
    found = next((sign for sign in _FATAL_TEXTS if sign in text), None)
    if found is None:
        return None
    return GpuFault("of the rank", found)


def kernel_records(log: int) -> Iterator[tuple[float, str]]:
    """Yield (seconds since boot, text) for each record in the kernel log that can be read without
    waiting.

    A record has the form "priority,number,microseconds,flags;text".
    """
    while True:
        try:
            prefix, _, text = os.read(log, 8192).decode(errors="replace").partition(";")
            yield int(prefix.split(",")[2]) / 1e6, text.partition("\n")[0]
        except BrokenPipeError:  # the record was overwritten; the next one is available
            continue
        except (OSError, ValueError, IndexError):
            return


def _visible_devices(library: ModuleType) -> list[Device]:
    """Return the handles of the GPUs that this job may use. Other GPUs may belong to other jobs."""
    devices = [
        library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())
    ]
    wanted = [
        name.strip()
        for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if name.strip()
    ]
    if not wanted or wanted == ["all"]:
        return devices
    visible = []
    for index, device in enumerate(devices):
        uuid = _uuid(library, device)
        if str(index) in wanted or uuid.startswith(tuple(wanted)):
            visible.append(device)
    return visible


def _uuid(library: ModuleType, device: Device) -> str:
    name = library.nvmlDeviceGetUUID(device)
    if isinstance(name, bytes):
        return name.decode()
    return str(name)


class _FaultFinder:
    """Detector of hardware faults.

    It looks for new Xids in NVML events or in the kernel log, and for error counters that have
    increased.
    """

    def __init__(self, library: ModuleType, devices: list[Device], kernel_log: str) -> None:
        self._library = library
        self._devices = devices
        self._names = [_device_name(library, device, index) for index, device in enumerate(devices)]
        self._before = [self._state(device) for device in devices]
        self._events: Any = None
        self._log: int | None = None
        with contextlib.suppress(Exception):  # not supported, as under WSL
            events = library.nvmlEventSetCreate()
            for device in devices:
                library.nvmlDeviceRegisterEvents(
                    device, library.nvmlEventTypeXidCriticalError, events
                )
            self._events = events
        with contextlib.suppress(OSError):  # containers cannot read it
            self._log = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)

    def find(self) -> list[GpuFault]:
        found = []
        while self._events is not None:
            try:
                event = self._library.nvmlEventSetWait_v2(self._events, 0)
            except Exception:  # no more events
                break
            found.append(
                fault_from_xid(_device_name(self._library, event.device, 0), int(event.eventData))
            )
        for _, text in () if self._log is None else kernel_records(self._log):
            match = _XID.search(text)
            # Not another job's GPU
            if match and (match["device"].lower() in self._names or self._names[0] == "0"):
                device = match["device"].lower()
                if not _RECOVERED.search(text):
                    found.append(fault_from_xid(device, int(match["number"])))
        for index, device in enumerate(self._devices):
            before = self._before[index]
            now = self._state(device)
            found += [
                GpuFault(self._names[index], what)
                for what in now
                if now[what] > before.get(what, 0)
            ]
            self._before[index] = before | now
        return [fault for fault in found if fault is not None]

    def _state(self, device: Device) -> dict[str, int]:
        """Return one error counter per kind of fault.

        Counters that the GPU does not have are left out.
        """
        library = self._library
        state = dict[str, int]()
        with contextlib.suppress(Exception):
            kind = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
            since_boot = library.NVML_VOLATILE_ECC
            state["uncorrectable ECC error"] = library.nvmlDeviceGetTotalEccErrors(
                device, kind, since_boot
            )
        with contextlib.suppress(Exception):
            state["row remapping failed"] = library.nvmlDeviceGetRemappedRows(device)[3]
        try:
            library.nvmlDeviceGetMemoryInfo(device)
        except Exception as error:
            lost = getattr(error, "value", None) == getattr(library, "NVML_ERROR_GPU_IS_LOST", 15)
            state["GPU is lost"] = int(lost)
        with contextlib.suppress(Exception):  # raises after the last link
            for link in range(library.NVML_NVLINK_MAX_LINKS):
                state[f"NVLink {link} is down"] = int(
                    not library.nvmlDeviceGetNvLinkState(device, link)
                )
        return state


def _device_name(library: ModuleType, device: Device, index: int) -> str:
    try:
        address = library.nvmlDeviceGetPciInfo(device).busId
        if isinstance(address, bytes):
            text = address.decode()
        else:
            text = str(address)
        return text.lower().removeprefix("0000").removesuffix(".0")  # as in the kernel log
    except Exception:
        return str(index)


def _counters(library: ModuleType, devices: list[Device]) -> tuple[dict[str, int], list[int]]:
    found = {"gpus": len(devices)}
    used = list[int]()
    if memory := _query(library.nvmlDeviceGetMemoryInfo, devices):
        used = [int(device.used) for device in memory]
        found["gpu_memory_used_bytes"] = sum(used)
        found["gpu_memory_free_bytes"] = min(int(device.free) for device in memory)
    if busy := _query(library.nvmlDeviceGetUtilizationRates, devices):
        found["gpu_busy_percent"] = min(int(device.gpu) for device in busy)
    if heat := _query(library.nvmlDeviceGetTemperature, devices, library.NVML_TEMPERATURE_GPU):
        found["gpu_celsius"] = max(map(int, heat))
    with contextlib.suppress(AttributeError):  # older libraries
        names = ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
        slow = sum(getattr(library, f"nvmlClocksThrottleReason{name}") for name in names)
        if reasons := _query(library.nvmlDeviceGetCurrentClocksThrottleReasons, devices):
            found["gpus_slowed"] = sum(bool(int(reason) & slow) for reason in reasons)
        if power := _query(library.nvmlDeviceGetPowerUsage, devices):  # in milliwatts
            found["gpu_watts"] = round(sum(map(int, power)) / 1000)
    return found, used


def _query(function: Callable[..., T], devices: list[Device], *more: int) -> list[T]:
    answers: list[T] = []
    for device in devices:
        with contextlib.suppress(Exception):  # not supported by this device, or not permitted
            answers.append(function(device, *more))
    return answers
