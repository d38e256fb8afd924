"""What a node's GPUs say of themselves, by NVIDIA's management library, where its Python binding (pynvml) is installed.

Not verified on a GPU; the tests put another library in its place.
"""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any

_FRESH_SECONDS = 5.0


class GpuCounters:
    """Asked by a thread of its own: a driver in trouble may never answer, and the agent must not wait for it.

    One for all of an agent's life. With one for each generation, each would leave a thread at a driver that hangs.
    """

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._last: tuple[float, dict[str, int]] = (-_FRESH_SECONDS, {})
        self._thread: threading.Thread | None = None
        self._closed = False

    def sample(self) -> dict[str, int]:
        """What was found when it was last asked for: gpus, gpu_memory_used_bytes (of all), gpu_memory_free_bytes (of
        the fullest), gpu_busy_percent (of the idlest, as the driver averages it) and gpu_celsius (of the hottest).

        {} at first, where there are none, and where nothing has answered for 5 s. Returns at once.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask, name="gpu counters", daemon=True)
            self._thread.start()
        self._wanted.set()
        at, found = self._last
        return found if time.monotonic() - at < _FRESH_SECONDS else {}

    def close(self) -> None:
        """Its thread ends with the question that it is at."""
        self._closed = True
        self._wanted.set()

    def _ask(self) -> None:
        try:
            library = importlib.import_module("pynvml")
            library.nvmlInit()
            devices = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
        except Exception:  # no binding, no driver, a device that is lost: of no concern to a job
            return
        while devices:
            self._wanted.wait()
            self._wanted.clear()
            if self._closed:
                return
            self._last = (time.monotonic(), _counters(library, devices))


def _counters(library: Any, devices: list[Any]) -> dict[str, int]:
    """What a device does not tell is left out."""
    found = {"gpus": len(devices)}
    if memory := _answers(library.nvmlDeviceGetMemoryInfo, devices):
        found["gpu_memory_used_bytes"] = sum(int(one.used) for one in memory)
        found["gpu_memory_free_bytes"] = min(int(one.free) for one in memory)
    if busy := _answers(library.nvmlDeviceGetUtilizationRates, devices):
        found["gpu_busy_percent"] = min(int(one.gpu) for one in busy)
    if heat := _answers(library.nvmlDeviceGetTemperature, devices, library.NVML_TEMPERATURE_GPU):
        found["gpu_celsius"] = max(map(int, heat))
    return found


def _answers(question: Any, devices: list[Any], *more: Any) -> list[Any]:
    answers = []
    for device in devices:
        try:
            answers.append(question(device, *more))
        except Exception:  # not supported by this device, or not allowed
            continue
    return answers
