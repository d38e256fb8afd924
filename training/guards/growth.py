"""Memory that grows with every step: when it will have used up what is left, by the slope of the last minute."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

_SAMPLE_SECONDS = 1.0
_SAMPLES = 60
_SAMPLES_PER_LOOK = 10  # all pairs of 60 samples take about a millisecond
HORIZON_SECONDS = 300.0
_GIB = 2**30


class GrowthWatch:
    """Samples once a second what this process holds, and warns when its growth meets the limit within the horizon.

    The slope is that of Theil and Sen, the median over all pairs of samples: a single leap, such as a first save or
    evaluation, moves it little. Three quarters of the pairs must rise as well: what goes up and down is no leak. And
    the limit must be nearer than the beginning: a process that only settles down does not end for it, again and again.

    held: bytes that this process holds. left: bytes that it and `sharers` processes like it may still take.
    """

    def __init__(
        self, what: str, *, held: Callable[[], float], left: Callable[[], float], sharers: int, now: Callable[[], float]
    ) -> None:
        self._what = what
        self._held, self._left, self._sharers, self._now = held, left, sharers, now
        self._next = 0.0
        self._first: float | None = None
        self._count = 0
        self._taken: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)

    def look(self, needed_seconds: float) -> str:
        """Why to start anew, or nothing. needed_seconds: until the job is done; a limit beyond that does no harm."""
        now = self._now()
        if now < self._next:
            return ""
        self._next = now + _SAMPLE_SECONDS
        self._first = now if self._first is None else self._first
        self._taken.append((now, self._held()))
        self._count += 1
        if len(self._taken) < _SAMPLES or self._count % _SAMPLES_PER_LOOK:
            return ""
        slope = _slope(self._taken)
        if slope <= 0:
            return ""
        left = self._left()
        seconds = left / (slope * self._sharers)
        if seconds > min(HORIZON_SECONDS, needed_seconds, now - self._first):
            return ""
        per_second = f"{slope * self._sharers / 2**20:.1f} MiB/s"
        return f"{self._what} grows by {per_second} and {left / _GIB:.2f} GiB are left: full in {seconds:.0f} s"


def _slope(taken: deque[tuple[float, float]]) -> float:
    """Bytes per second; 0 where fewer than three quarters of the pairs rise."""
    slopes = [(b - a) / max(t - s, 1e-9) for (s, a), (t, b) in combinations(taken, 2)]
    if statistics.quantiles(slopes, n=4)[0] <= 0:
        return 0.0
    return statistics.median(slopes)


def resident_bytes() -> float:
    """Of this process, less what it has mapped of files, which the kernel drops when memory gets short: data that is
    read through a map would look like a leak (proc(5), /proc/pid/status). 0 where there is no /proc."""
    try:
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    except OSError:
        return 0.0
    return sum(1024.0 * int(line[1]) for line in lines if line and line[0] in ("RssAnon:", "RssShmem:"))


def host_bytes_left() -> float:
    """What this machine, or the container that the process is in, can still give; infinite where nothing says so."""
    left = [_meminfo_available(), *(_cgroup_left(*names) for names in _CGROUP_FILES)]
    return min(left)


# Limit, use, and the lines of memory.stat with the page cache, which is dropped before anybody is killed: of cgroup v2,
# then v1. Data that was read more than once is in its active part.
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", ("inactive_file", "active_file")),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def _meminfo_available() -> float:
    try:
        text = Path("/proc/meminfo").read_text()
        return float(text.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return float("inf")


def _cgroup_left(limit: str, use: str, droppable: tuple[str, ...]) -> float:
    """As the container sees itself: its own group is mounted as the root."""
    try:
        stat = Path(use).with_name("memory.stat").read_text()
        fields = dict(line.split() for line in stat.splitlines())
        dropped = sum(float(fields.get(name, 0)) for name in droppable)
        return float(Path(limit).read_text()) - float(Path(use).read_text()) + dropped
    except (OSError, ValueError):  # no such file, or "max"
        return float("inf")
