"""A cap on bytes per second over all threads of a process, so that training keeps its share of the network."""

from __future__ import annotations

import threading
import time

_BURST_SECONDS = 0.05  # short, so that the network is shared evenly and not by turns


class Throttle:
    """bytes_per_second None: no cap; it may be changed at any time. Thread-safe."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        if bytes_per_second is not None and bytes_per_second <= 0:
            raise ValueError(f"bytes_per_second must be positive: {bytes_per_second}")
        self.bytes_per_second = bytes_per_second
        self._free_at = 0.0  # time.monotonic() at which what was taken so far has been paid for
        self._lock = threading.Lock()

    @property
    def slice_bytes(self) -> int | None:
        """How much to send at once; None without a cap: as much as there is."""
        rate = self.bytes_per_second
        return None if rate is None else max(16 * 1024, int(rate * _BURST_SECONDS))

    def take(self, size: int) -> None:
        """Wait until `size` bytes may be sent."""
        rate = self.bytes_per_second
        if rate is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + size / rate
        if start > now:
            time.sleep(start - now)
