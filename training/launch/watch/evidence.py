"""What the kernel says of a process and of its node: state, memory, kills for want of it, disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

_CLOCK_SECONDS = 2.0  # the clock of the kernel's log may differ so much from that of processes
_LOG_RECORDS = 100_000


class MemoryKills:
    """Whether the kernel has killed for want of memory since this was made, in the cgroup of a process or at all.

    A container sees its own cgroup at the root of its mount; the paths of /proc/PID/cgroup are tried first.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._before: dict[Path, int] = {}
        self.follow()

    def follow(self) -> None:
        """From time to time: a process can be moved to another cgroup."""
        for file in _counter_files(self._pid):
            self._before.setdefault(file, _kills(file))

    def told(self) -> str:
        """What the kernel's log says of the end of this process; "" when it says nothing, or may not be read.

        In a container its numbers are another namespace's, so that it is silent there, and the counters must do.
        """
        for seconds, text in _kernel_log():
            if seconds >= self._since - _CLOCK_SECONDS and f"Killed process {self._pid} (" in text:
                return text
        return ""

    def happened(self) -> bool:
        return bool(self.told()) or any(_kills(file) > before for file, before in self._before.items())


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM, without mapped files; 0 when it is gone.

    The pages of libraries and data that are mapped are shared by all ranks, and dropped before anybody is killed. What
    a forked rank still shares of the standby's own memory is counted: only the kernel's look at each page
    (smaps_rollup), which takes tens of milliseconds, could tell it apart.
    """
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        return sum(1024 * int(line[1]) for line in lines if line and line[0] in ("RssAnon:", "RssShmem:"))
    except (OSError, ValueError, IndexError):
        return 0


def node_sample(pids: Iterable[int], folder: Path) -> dict[str, int]:
    """One look at the node, for its heartbeat: some tenths of a millisecond per process, and none is started."""
    sample = {"resident_bytes": sum(map(resident_bytes, pids))}
    if (available := _available_bytes()) is not None:
        sample["memory_available_bytes"] = available
    for name, path in (("disk_free_bytes", folder), ("shared_memory_free_bytes", Path("/dev/shm"))):
        try:
            sample[name] = shutil.disk_usage(path).free
        except OSError:
            continue
    return sample


def cpu_seconds(pid: int) -> float | None:
    """Of all its threads since it started (proc(5), fields 14 and 15 of stat); None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _kernel_log() -> Iterable[tuple[float, str]]:
    """(seconds since boot, text) of each record of /dev/kmsg: "priority,number,microseconds,flags;text"."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        for _ in range(_LOG_RECORDS):
            try:
                prefix, _, text = os.read(log, 8192).decode(errors="replace").partition(";")
                yield int(prefix.split(",")[2]) / 1e6, text.partition("\n")[0]
            except BrokenPipeError:  # overwritten while it was read: the next record is there
                continue
            except (OSError, ValueError, IndexError):
                return
    finally:
        os.close(log)


def _available_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _counter_files(pid: int) -> Iterable[Path]:
    """Each file that counts memory kills of this process's cgroup, of versions 1 and 2; without any, the kernel's."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    candidates = [root / "memory.events", root / "memory" / "memory.oom_control"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            candidates.append(root / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            candidates.append(root / "memory" / path.lstrip("/") / "memory.oom_control")
    found = [file for file in dict.fromkeys(candidates) if file.exists()]
    return found or [Path("/proc/vmstat")]


def _kills(file: Path) -> int:
    try:
        for line in file.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        pass
    return 0
