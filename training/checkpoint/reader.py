"""Reads a commit's bytes and believes none of them: each chunk is compared with the sum that the manifest has of it."""

from __future__ import annotations

from infra.errors import ObjectNotFound, StoreError
from infra.store import Store
from training.checkpoint.checksum import crc_text
from training.checkpoint.manifest import DataObject, Manifest
from training.errors import CorruptCommit


def read_manifest(store: Store, key: str) -> Manifest:
    """The manifest under a commit key. Raises CorruptCommit when it is gone or not the one that was written."""
    try:
        return Manifest.from_bytes(store.get(key), key)
    except ObjectNotFound as error:
        raise CorruptCommit(f"{key}: there is no such commit") from error


class VerifiedObject:
    """Ranges of one data object. `bytes_read` counts what came from the store, repeats included."""

    def __init__(self, store: Store, data: DataObject) -> None:
        self._store = store
        self._data = data
        self._held: tuple[int, bytes] = (-1, b"")  # pieces are read in order: the last chunk often serves the next
        self.bytes_read = 0

    def read(self, start: int, length: int) -> bytearray:
        """`length` verified bytes from `start`. Raises CorruptCommit; StoreError when the store cannot be read."""
        end = start + length
        if end > self._data.size:
            raise CorruptCommit(f"{self._data.key}: bytes {start} to {end} are beyond its {self._data.size}")
        result = bytearray(length)
        size = self._data.chunk_bytes
        for number in range(start // size, -(-end // size)):
            chunk, base = self.chunk(number), number * size
            low, high = max(start, base), min(end, base + len(chunk))
            result[low - start : high - start] = memoryview(chunk)[low - base : high - base]
        return result

    def chunk(self, number: int) -> bytes:
        """A whole verified chunk. A bad one is fetched once more: it may have been hurt on the way only."""
        if self._held[0] == number:
            return self._held[1]
        for last_try in (False, True):
            data = self._fetch(number)
            actual, stated = crc_text(data), self._data.chunks[number]
            if actual == stated:
                self._held = (number, data)
                return data
            if last_try:
                raise CorruptCommit(
                    f"{self._data.key}: chunk {number} has CRC64NVME {actual}, saved was {stated} (fetched twice)"
                )
        raise AssertionError("unreachable")

    def _fetch(self, number: int) -> bytes:
        start = number * self._data.chunk_bytes
        length = min(self._data.chunk_bytes, self._data.size - start)
        try:
            data = self._store.get_range(self._data.key, start, length)
        except StoreError as error:
            raise self._judged(error) from error
        self.bytes_read += length
        return data

    def _judged(self, error: StoreError) -> Exception:
        """Missing or truncated is corruption; a store that does not answer is not."""
        meta = self._store.head(self._data.key)
        if meta is None:
            return CorruptCommit(f"{self._data.key}: there is no such object")
        if meta.size != self._data.size:
            return CorruptCommit(f"{self._data.key}: has {meta.size} bytes, {self._data.size} were saved: truncated")
        return error
