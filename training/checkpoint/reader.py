"""Reads a commit's bytes and believes none of them: each chunk is compared with the sum that the manifest has of it.

A sum covers a whole chunk, so whole chunks are read, even where a rank needs a part only; several at once, each into
the memory where its bytes belong, and summed there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from ebbflow.infra.errors import ObjectNotFound, StoreError, StoreHung
from ebbflow.infra.ranges import read_blocks
from ebbflow.infra.store import Store
from ebbflow.infra.store.folder import ABANDONABLE
from ebbflow.training.checkpoint.checksum import digits, sum_of_pieces
from ebbflow.training.checkpoint.chunks import ChunkRead, Wanted, plan_chunks
from ebbflow.training.checkpoint.deadline import HOPELESS, Deadline, pauses
from ebbflow.training.checkpoint.manifest import DataObject, Manifest
from ebbflow.training.checkpoint.settled import fetched
from ebbflow.training.checkpoint.signing import signer
from ebbflow.training.errors import CorruptCommit

_PARALLEL_REMOTE = 8  # a request to a store mostly waits
_PARALLEL_LOCAL = 2  # a read from the page cache is a copy
_BLOCK_BYTES = 2**19  # summed while it is still in the processor's cache; smaller ones cost more calls than they save
_TRIES = 4
_PATIENCE_SECONDS = 120.0  # for one chunk, with its tries


def read_manifest(store: Store, key: str) -> Manifest:
    """The manifest under a commit key. Raises CorruptCommit when it is gone or not the one that was written.

    Where this process checks signatures: RefusedCommit for a commit without a right one.
    """
    signs = signer()
    try:
        manifest = fetched(store, key, Manifest.from_bytes)
    except ObjectNotFound as error:
        raise CorruptCommit(f"{key}: there is no such commit") from error
    return manifest if signs is None else signs.check_manifest(store, key, manifest)


@dataclass
class ReadFigures:
    """What reading took. Seconds are those of all threads together; `bytes` came from the store, repeats included."""

    bytes: int = 0
    download_seconds: float = 0.0
    verify_seconds: float = 0.0
    place_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, count: int, download: float, verify: float, place: float) -> None:
        with self._lock:
            self.bytes += count
            self.download_seconds += download
            self.verify_seconds += verify
            self.place_seconds += place


class VerifiedReader:
    """Reads ranges of data objects. parallel: chunks under way at once; None: as suits the store."""

    def __init__(self, store: Store, data: Sequence[DataObject], *, parallel: int | None = None) -> None:
        self._store = store
        self._data = data
        local = not data or store.local_path(data[0].key) is not None
        self._parallel = parallel or (_PARALLEL_LOCAL if local else _PARALLEL_REMOTE)
        self._local = local
        self._scratch = threading.local()
        self.figures = ReadFigures()

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Fill what is wanted with verified bytes.

        Raises CorruptCommit; StoreError when the store cannot be read, which says nothing of the commit. What was
        wanted is then not to be used.
        """
        for outcome in self._run(plan_chunks(wanted, self._data), stop_at_first=True):
            if outcome is not None:
                raise outcome

    def problems(self) -> Iterator[CorruptCommit]:
        """Every bad chunk of all objects; nothing is kept. Raises StoreError."""
        chunks = [
            ChunkRead(number, place, base, min(data.chunk_bytes, data.size - base), ())
            for number, data in enumerate(self._data)
            for place, base in enumerate(range(0, data.size, data.chunk_bytes))
        ]
        for outcome in self._run(chunks, stop_at_first=False):
            if isinstance(outcome, CorruptCommit):
                yield outcome
            elif outcome is not None:
                raise outcome

    def check(self, key: str, number: int | None) -> None:
        """Read one chunk of the data object `key` from the disk itself, or look at its presence and size alone.

        Raises CorruptCommit for an object or chunk that is damaged or not part of this commit, and StoreError.
        """
        place = next((place for place, data in enumerate(self._data) if data.key == key), None)
        if place is None:
            raise CorruptCommit(f"{key}: is not part of this commit", object_key=key)
        data = self._data[place]
        meta = self._store.head(key)
        if meta is None or meta.size != data.size:
            found = "there is no such object" if meta is None else f"has {meta.size} bytes, {data.size} were saved"
            raise CorruptCommit(f"{key}: {found}", object_key=key)
        if number is None:
            return
        if not 0 <= number < len(data.chunks):
            raise CorruptCommit(f"{key}: has no chunk {number}", object_key=key, chunk=number)
        base = number * data.chunk_bytes
        length = min(data.chunk_bytes, data.size - base)
        _forget_cached(self._store.local_path(key), base, length)
        self._read_chunk(ChunkRead(place, number, base, length, ()))

    def _run(self, chunks: Sequence[ChunkRead], *, stop_at_first: bool) -> Iterator[BaseException | None]:
        if not chunks:
            return
        with ThreadPoolExecutor(min(self._parallel, len(chunks)), thread_name_prefix="read") as pool:
            futures: list[Future[None]] = [pool.submit(self._read_chunk, chunk) for chunk in chunks]
            try:
                if stop_at_first:
                    wait(futures, return_when=FIRST_EXCEPTION)
                    pool.shutdown(wait=True, cancel_futures=True)
                    futures = [future for future in futures if not future.cancelled()]
                for future in futures:
                    yield future.exception()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _read_chunk(self, chunk: ChunkRead) -> None:
        """A bad one is fetched once more: it may have been hurt on the way only."""
        data = self._data[chunk.object]
        stated = " ".join([data.chunks[chunk.number], *data.sha256[chunk.number : chunk.number + 1]])
        for last_try in (False, True):
            actual = self._fetch(data, chunk)
            if actual == stated:
                return
            if last_try:
                kind = "CRC64NVME and SHA-256" if data.sha256 else "CRC64NVME"
                message = f"{data.key}: chunk {chunk.number} has {kind} {actual}, saved was {stated} (fetched twice)"
                raise CorruptCommit(message, object_key=data.key, chunk=chunk.number)

    def _fetch(self, data: DataObject, chunk: ChunkRead) -> str:
        """The bytes where they belong, and their sum, with the SHA-256 where the manifest has one.

        A store in trouble is asked again for a while.
        """
        deadline = Deadline(_PATIENCE_SECONDS)
        for tries, pause in enumerate(pauses(first_seconds=0.05), start=1):
            try:
                if not self._local:
                    return self._fetch_remote(data, chunk)
                what = f"get {self._store.uri}/{data.key}"
                return ABANDONABLE.run(lambda: self._fetch_local(data, chunk), self._store.request_seconds, what)
            except StoreHung:  # the abandoned read may fill this memory at any time: another process tries again
                raise
            except StoreError as error:
                found = self._judged(data, error)
                if found is not error or isinstance(error, HOPELESS) or tries == _TRIES:
                    raise found from error
                if deadline.remaining_seconds <= pause:
                    raise
            time.sleep(pause)
        raise AssertionError("pauses never end")

    def _fetch_local(self, data: DataObject, chunk: ChunkRead) -> str:
        gap = self._gap(chunk.length)
        buffers = chunk.buffers(gap) if chunk.disjoint else [gap]
        download = verify = 0.0
        value, sha256, mark = 0, hashlib.sha256() if data.sha256 else None, time.perf_counter()
        for block in read_blocks(self._store, data.key, chunk.start, buffers, block_bytes=_BLOCK_BYTES):
            read = time.perf_counter()
            value = sum_of_pieces(block, value)
            for piece in block if sha256 is not None else ():
                sha256.update(piece)
            summed = time.perf_counter()
            download, verify, mark = download + read - mark, verify + summed - read, summed
        if not chunk.disjoint:
            chunk.place(gap)
        self.figures.add(chunk.length, download, verify, time.perf_counter() - mark)
        return _sum_text(value, sha256)

    def _fetch_remote(self, data: DataObject, chunk: ChunkRead) -> str:
        began = time.perf_counter()
        received = memoryview(self._store.get_range(data.key, chunk.start, chunk.length))
        read = time.perf_counter()
        value = _sum_text(sum_of_pieces([received]), hashlib.sha256(received) if data.sha256 else None)
        summed = time.perf_counter()
        chunk.place(received)
        self.figures.add(chunk.length, read - began, summed - read, time.perf_counter() - summed)
        return value

    def _judged(self, data: DataObject, error: StoreError) -> Exception:
        """Missing or truncated is corruption; a store that does not answer is not."""
        try:
            meta = self._store.head(data.key)
        except StoreError:
            return error
        if meta is None:
            return CorruptCommit(f"{data.key}: there is no such object", object_key=data.key)
        if meta.size != data.size:
            message = f"{data.key}: has {meta.size} bytes, {data.size} were saved: truncated"
            return CorruptCommit(message, object_key=data.key)
        return error

    def _gap(self, length: int) -> memoryview:
        """Memory of this thread's own for what nobody wants."""
        held: memoryview | None = getattr(self._scratch, "view", None)
        if held is None or len(held) < length:
            held = self._scratch.view = memoryview(bytearray(length))
        return held[:length]


def _sum_text(crc: int, sha256: hashlib._Hash | None) -> str:
    return digits(crc) if sha256 is None else f"{digits(crc)} {sha256.hexdigest()}"


def _forget_cached(path: Path | None, start: int, length: int) -> None:
    """Have a range of a local file read from the disk again: the page cache may be what is damaged."""
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if path is not None else -1
        if descriptor >= 0:
            try:
                os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
