"""Which machine a figure was measured on: without it a figure says nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path


def describe_machine() -> dict[str, object]:
    """cores: those this process may use. load_average: of the last minute before, so that noise shows."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "system": platform.system(),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def file_system(folder: Path) -> str:
    """The kind of file system that `folder` is on, such as ext4 or tmpfs; "unknown" where the system does not say."""
    path = str(folder.resolve())
    best, kind = "", "unknown"
    for _, mount, mounted, *_ in _lines("/proc/mounts"):
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):  # of two on one place, the later one hides the earlier
            best, kind = mount, mounted
    return kind


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line[:2] == ["model", "name"]:
            return " ".join(line[2:]).removeprefix(":").strip()
    return platform.processor() or platform.machine()


def _lines(path: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return []
