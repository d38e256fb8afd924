"""Read single rows of a token shard from a remote store, ahead of the steps that need them.

This serves shards that are too large for the local cache.
"""

import os
import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from ebbflow.core.store import Store
from ebbflow.training.retry import retry_until_deadline

_REQUESTS = 16  # at the same time, of one rank
_RETRY_SECONDS = 120.0
_CHECKSUM_BYTES = 4


class TokenStream:
    """Array-like reader of a token shard that stays in a remote store.

    The index is an array of token offsets with shape [rows, window + 1], as for a memory-mapped
    shard. Each row is one request. Its last token, the target of the token before it, is the first
    token of the next window.

    As many windows as fit into `kept_bytes` are kept in the file `kept`, for later epochs and for
    the other ranks of the machine. These are the first ones: samples are drawn in a random order,
    so any choice is as good. The file has each row and its CRC-32. A row from the store is not
    verified: the shard's SHA-256 needs all of it.
    """

    def __init__(
        self,
        shards: Store,
        key: str,
        *,
        size: int,
        dtype: np.dtype,
        window: int,
        kept: Path,
        kept_bytes: int,
    ) -> None:
        self.size = size
        self._shards = shards
        self._key = key
        self._dtype = dtype
        self._window = window
        self._row_bytes = (window + 1) * dtype.itemsize
        self._most_kept = kept_bytes // (self._row_bytes + _CHECKSUM_BYTES)
        self._file = os.open(kept, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._threads = ThreadPoolExecutor(_REQUESTS, "token-rows")
        self._ahead: dict[int, Future[np.ndarray]] = {}

    def read_ahead(self, windows: Iterable[int]) -> None:
        """Begin to read the windows with these numbers, in this order.

        Drop the windows of the last call that are not among them.
        """
        self._ahead = {number: self._begin(number) for number in windows}

    def __getitem__(self, offsets: np.ndarray) -> np.ndarray:
        rows = [self._begin(number) for number in (offsets[:, 0] // self._window).tolist()]
        if rows:
            return np.stack([row.result() for row in rows])
        return np.empty(offsets.shape, self._dtype)

    def _begin(self, number: int) -> Future[np.ndarray]:
        return self._ahead.get(number) or self._threads.submit(self._row, number)

    def _row(self, number: int) -> np.ndarray:
        place = number * (self._row_bytes + _CHECKSUM_BYTES)
        record = os.pread(self._file, self._row_bytes + _CHECKSUM_BYTES, place)
        row = record[: self._row_bytes]
        if record != _with_checksum(row):
            first = number * self._window * self._dtype.itemsize
            row = retry_until_deadline(
                lambda: self._shards.get_range(self._key, first, self._row_bytes), _RETRY_SECONDS
            )
            if number < self._most_kept:
                with suppress(OSError):  # such as a full volume
                    os.pwrite(self._file, _with_checksum(row), place)
        return np.frombuffer(row, dtype=self._dtype)


def _with_checksum(row: bytes) -> bytes:
    return row + zlib.crc32(row).to_bytes(_CHECKSUM_BYTES, "little")
