"""Read a commit and verify every byte. Torch-free.

A checksum covers a whole chunk, so a chunk is read as a whole even if a rank needs only a part of
it. Several chunks are read in parallel. From a local store, bytes are read directly into their
destination and verified there.

    python -m ebbflow.training.checkpoint.reader PARENT_PID STORE_URI COMMIT_KEY [OBJECT_KEY
    [CHUNK]]

This program verifies a part of a commit in a new process. It prints {"problem": text}, with an
empty text if the bytes are as they were saved, or {"error": text} if the store cannot be read.
"""

import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from ebbflow.core.errors import (
    InfraError,
    ObjectNotFound,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)
from ebbflow.core.layout import data_key, data_prefix, index_key, index_prefix, parse_commit_key
from ebbflow.core.process import OwnProgram, die_with_parent, own_program_line
from ebbflow.core.program import python_path
from ebbflow.core.retry import backoff_pauses, retry
from ebbflow.core.store import Store
from ebbflow.core.store.folder import HANG_GUARD
from ebbflow.core.store.ranges import read_blocks
from ebbflow.training.checkpoint import verified_io
from ebbflow.training.checkpoint.manifest import DataObject, Manifest, RankIndex
from ebbflow.training.checkpoint.signing import signer
from ebbflow.training.errors import CheckpointError, CorruptCommit

_MOST_PIECES = 512  # per read; above this, one copy is cheaper than many buffers
_PARALLEL_REMOTE = 8  # requests to a remote store mostly wait
_PARALLEL_LOCAL = 2  # a read from the page cache is a copy
_BLOCK_BYTES = 2**19  # fits the processor's cache; smaller blocks cost more calls
_TRIES = 4
_CHUNK_SECONDS = 120.0  # for one chunk, with its retries
_READ_SECONDS = 120.0


@dataclass(frozen=True)
class WantedRange:
    """A byte range to read into `view`: `len(view)` bytes of data object number `object`, from byte
    `start` on.
    """

    object: int
    start: int
    view: memoryview


@dataclass(frozen=True)
class _Part:
    """A byte range of a chunk, and the memory `view` into which it is copied.

    The range has `len(view)` bytes from offset `at` of the chunk.
    """

    at: int
    view: memoryview


@dataclass(frozen=True)
class ChunkRead:
    """One chunk to read, and the destinations of its bytes."""

    object: int  # number of the data object
    number: int  # number of the chunk in the object
    start: int  # first byte of the chunk in the object
    length: int  # bytes of the chunk
    parts: tuple[_Part, ...]  # ranges to copy, sorted by position

    @property
    def disjoint(self) -> bool:
        """Whether a single scattered read can fill the destinations of all parts.

        The read is possible if there are at most 512 parts and no two of them overlap.
        """
        return len(self.parts) <= _MOST_PIECES and all(
            part.at + len(part.view) <= following.at
            for part, following in itertools.pairwise(self.parts)
        )

    def buffers(self, gap: memoryview) -> list[memoryview]:
        """Return the memory views, in order, that a single scattered read of the whole chunk fills.

        `gap` is scratch memory for bytes of the chunk that no part needs.
        """
        found = []
        at = 0
        for part in self.parts:
            if part.at > at:
                found.append(gap[at : part.at])
            found.append(part.view)
            at = part.at + len(part.view)
        if at < self.length:
            found.append(gap[at : self.length])
        return found

    def place(self, data: memoryview) -> None:
        for part in self.parts:
            part.view[:] = data[part.at : part.at + len(part.view)]


@dataclass
class ReadFigures:
    """Totals over the reader's threads: seconds per activity, and bytes read, including repeated
    reads.
    """

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
    """Reader of byte ranges of a commit's data objects. It verifies every byte.

    It reads `parallel` chunks at once. The default is 2 for a local store and 8 for a remote store.
    """

    def __init__(
        self, store: Store, data: Sequence[DataObject], *, parallel: int | None = None
    ) -> None:
        self._store = store
        self._data = data
        local = not data or store.local_path(data[0].key) is not None
        self._parallel = parallel or (_PARALLEL_LOCAL if local else _PARALLEL_REMOTE)
        self._local = local
        self.figures = ReadFigures()

    def read(self, wanted: Iterable[WantedRange]) -> None:
        """Fill the wanted ranges with verified bytes.

        After an error the content of the ranges is undefined.

        Raises CorruptCommit if the commit is damaged. Raises StoreError if the store cannot be
        read; the commit may still be sound.
        """
        for outcome in self._run(plan_chunks(wanted, self._data), stop_at_first=True):
            if outcome is not None:
                raise outcome

    def problems(self) -> Iterator[CorruptCommit]:
        """Read all chunks of all objects, and yield an error for each damaged chunk or object.

        Raises StoreError.
        """
        chunks = []
        for number, data in enumerate(self._data):
            for place, base in enumerate(range(0, data.size, data.chunk_bytes)):
                chunks.append(
                    ChunkRead(number, place, base, min(data.chunk_bytes, data.size - base), ())
                )
        for outcome in self._run(chunks, stop_at_first=False):
            if isinstance(outcome, CorruptCommit):
                yield outcome
            elif outcome is not None:
                raise outcome

    def check(self, key: str, number: int | None) -> None:
        """Verify one chunk of the data object `key`.

        A local chunk is read from the disk, not from the page cache.

        `number` is the number of the chunk; None checks only that the object exists and has the
        right size. Raises CorruptCommit if the object or chunk is damaged or not part of this
        commit, and StoreError if the store cannot be read.
        """
        place = next((place for place, data in enumerate(self._data) if data.key == key), None)
        if place is None:
            raise CorruptCommit(f"{key}: is not part of this commit", object_key=key)
        data = self._data[place]
        meta = self._store.head(key)
        if meta is None or meta.size != data.size:
            if meta is None:
                found = "there is no such object"
            else:
                found = f"has {meta.size} bytes, {data.size} were saved"
            raise CorruptCommit(f"{key}: {found}", object_key=key)
        if number is None:
            return
        if not 0 <= number < len(data.chunks):
            raise CorruptCommit(f"{key}: has no chunk {number}", object_key=key, chunk=number)
        base = number * data.chunk_bytes
        length = min(data.chunk_bytes, data.size - base)
        _drop_from_page_cache(self._store.local_path(key), base, length)
        self._read_chunk(ChunkRead(place, number, base, length, ()))

    def _run(
        self, chunks: Sequence[ChunkRead], *, stop_at_first: bool
    ) -> Iterator[BaseException | None]:
        with ThreadPoolExecutor(self._parallel, thread_name_prefix="read") as pool:
            futures: list[Future[None]] = [pool.submit(self._read_chunk, chunk) for chunk in chunks]
            try:
                if stop_at_first:
                    wait(futures, return_when=FIRST_EXCEPTION)
                    pool.shutdown(cancel_futures=True)
                for future in futures:  # a cancelled one comes after the one with the exception
                    yield future.exception()
            finally:
                pool.shutdown(cancel_futures=True)

    def _read_chunk(self, chunk: ChunkRead) -> None:
        """Read and verify a chunk.

        If it is damaged, read it a second time, since data can be damaged in transit.

        Raises CorruptCommit if both reads return damaged data.
        """
        data = self._data[chunk.object]
        stated = " ".join(
            [data.chunks[chunk.number], *data.sha256[chunk.number : chunk.number + 1]]
        )
        for last_try in (False, True):
            actual = self._fetch(data, chunk)
            if actual == stated:
                return
            if last_try:
                if data.sha256:
                    kind = "CRC64NVME and SHA-256"
                else:
                    kind = "CRC64NVME"
                message = (
                    f"{data.key}: chunk {chunk.number} has {kind} {actual}, saved was {stated} "
                    "(fetched twice)"
                )
                raise CorruptCommit(message, object_key=data.key, chunk=chunk.number)

    def _fetch(self, data: DataObject, chunk: ChunkRead) -> str:
        """Fetch a chunk into its destinations.

        Return its CRC as text, followed by its SHA-256 if the manifest has one.

        Store errors are retried: up to four tries within 120 s.
        """
        deadline = verified_io.Deadline(_CHUNK_SECONDS)

        def fetch() -> str:
            if not self._local:
                return self._fetch_remote(data, chunk)
            what = f"get {self._store.uri}/{data.key}"
            return HANG_GUARD.run(
                lambda: self._fetch_local(data, chunk), self._store.request_seconds, what
            )

        def curable(error: Exception, tries: int) -> bool:
            # After a timeout the abandoned read may still write here, so only another process may
            # retry.
            if not isinstance(error, StoreError) or isinstance(error, StoreTimeout):
                return False
            found = self._damage(data)
            if found is not None:
                raise found from error
            return verified_io.is_curable(error) and tries < _TRIES

        pauses = backoff_pauses(first_seconds=0.05)
        return retry(fetch, left=lambda: deadline.remaining_seconds, curable=curable, pauses=pauses)

    def _fetch_local(self, data: DataObject, chunk: ChunkRead) -> str:
        # New for each read: an abandoned read may still write into its own.
        gap = memoryview(bytearray(chunk.length))
        if chunk.disjoint:
            buffers = chunk.buffers(gap)
        else:
            buffers = [gap]
        download = verify = 0.0
        value = 0
        if data.sha256:
            sha256 = hashlib.sha256()
        else:
            sha256 = None
        mark = time.perf_counter()
        for block in read_blocks(
            self._store, data.key, chunk.start, buffers, block_bytes=_BLOCK_BYTES
        ):
            read = time.perf_counter()
            value = verified_io.crc_of_pieces(block, value)
            if sha256 is not None:
                for piece in block:
                    sha256.update(piece)
            summed = time.perf_counter()
            download = download + read - mark
            verify = verify + summed - read
            mark = summed
        if not chunk.disjoint:
            chunk.place(gap)
        self.figures.add(chunk.length, download, verify, time.perf_counter() - mark)
        return _checksum_text(value, sha256)

    def _fetch_remote(self, data: DataObject, chunk: ChunkRead) -> str:
        began = time.perf_counter()
        received = memoryview(self._store.get_range(data.key, chunk.start, chunk.length))
        read = time.perf_counter()
        value = _checksum_text(
            verified_io.crc_of_pieces([received]), hashlib.sha256(received) if data.sha256 else None
        )
        summed = time.perf_counter()
        chunk.place(received)
        self.figures.add(chunk.length, read - began, summed - read, time.perf_counter() - summed)
        return value

    def _damage(self, data: DataObject) -> CorruptCommit | None:
        """Return a CorruptCommit error if the object is missing or its size is wrong, else None.

        Also return None if the store cannot be read.
        """
        try:
            meta = self._store.head(data.key)
        except StoreError:
            return None
        if meta is not None and meta.size == data.size:
            return None
        if meta:
            found = f"has {meta.size} bytes, {data.size} were saved: truncated"
        else:
            found = "there is no such object"
        return CorruptCommit(f"{data.key}: {found}", object_key=data.key)


def plan_chunks(wanted: Iterable[WantedRange], objects: Sequence[DataObject]) -> list[ChunkRead]:
    """List the chunks that hold the wanted ranges, each chunk once, ordered by object and position.

    Raises CorruptCommit if a range is beyond the end of its object.
    """
    parts: dict[tuple[int, int], list[_Part]] = defaultdict(list)
    for want in wanted:
        data = objects[want.object]
        end = want.start + len(want.view)
        if want.start < 0 or end > data.size:
            raise CorruptCommit(
                f"{data.key}: bytes {want.start} to {end} are beyond its {data.size}"
            )
        size = data.chunk_bytes
        for number in range(want.start // size, -(-end // size) if len(want.view) else 0):
            low = max(want.start, number * size)
            high = min(end, (number + 1) * size)
            piece = want.view[low - want.start : high - want.start]
            parts[want.object, number].append(_Part(low - number * size, piece))
    chunks = []
    for (place, number), found in sorted(parts.items()):
        data = objects[place]
        base = number * data.chunk_bytes
        length = min(data.chunk_bytes, data.size - base)
        chunks.append(
            ChunkRead(place, number, base, length, tuple(sorted(found, key=lambda part: part.at)))
        )
    return chunks


def read_manifest(store: Store, key: str) -> Manifest:
    """Read the manifest with the commit key `key`.

    Raises CorruptCommit if it is missing or damaged, and RefusedCommit if this process checks
    signatures and the commit has no valid signature.
    """
    signs = signer()
    try:
        manifest = verified_io.fetch_verified(store, key, Manifest.from_bytes)
    except ObjectNotFound as error:
        raise CorruptCommit(f"{key}: there is no such commit") from error
    if signs is None:
        return manifest
    return signs.check_manifest(store, key, manifest)


def find_problem(store: Store, key: str, object_key: str = "", chunk: int | None = None) -> str:
    """Check a commit's manifest and, if given, one data object.

    Return a description of the problem, or "".

    `chunk` is the number of the object's chunk to verify; None checks only that the object exists
    and has the right size. Raises StoreError if the store cannot be read, and CheckpointError if
    the manifest has another format version.
    """
    try:
        manifest = read_manifest(store, key)
        if problem := next(manifest.problems(), ""):
            return f"{key}: {problem}"
        if object_key:
            VerifiedReader(store, manifest.data).check(object_key, chunk)
    except CorruptCommit as error:
        return str(error)
    return ""


def find_problem_in_new_process(
    store_uri: str, key: str, object_key: str = "", chunk: int | None = None
) -> str:
    """Run `find_problem` in a new process, which shares no memory with this one, and return its
    result.

    Raises StoreUnavailable if the process gives no result.
    """
    arguments = [str(os.getpid()), store_uri, key]
    if object_key:
        if chunk is None:
            arguments += [object_key]
        else:
            arguments += [object_key, str(chunk)]
    try:
        done = subprocess.run(
            own_program_line(OwnProgram.PART_READER, *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_READ_SECONDS,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise StoreUnavailable(
            f"{store_uri}/{key}: no second process could read it again: {error!r}"[:500]
        ) from error
    if answer.get("error"):
        raise StoreUnavailable(
            f"{store_uri}/{key}: a second process could not read it again: {answer['error']}"
        )
    return answer["problem"]


def main(argv: list[str]) -> int:
    parent_pid, store_uri, key, *rest = argv
    die_with_parent(int(parent_pid))
    if rest:
        object_key = rest[0]
    else:
        object_key = ""
    if rest[1:]:
        chunk = int(rest[1])
    else:
        chunk = None
    try:
        answer = {"problem": find_problem(Store.open(store_uri), key, object_key, chunk)}
    except (CheckpointError, InfraError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 0


def verify_commit(store: Store, key: str) -> list[str]:
    """Verify a commit and return its problems, one line per object; the list is empty if the commit
    is sound.

    Compare the manifest with its key, each index with its hash in the manifest, each data object's
    size and chunks with their checksums, and the objects in the store with those that the manifest
    names. Raises StoreError if the store cannot be read.
    """
    try:
        manifest = read_manifest(store, key)
    except CheckpointError as error:
        return [str(error)]
    inside = [f"{key}: {problem}" for problem in manifest.problems()]
    return [*inside, *_index_problems(store, manifest), *_data_problems(store, manifest)]


def find_uncommitted(store: Store) -> Iterator[tuple[int, str]]:
    """Yield (step, index prefix) of each save that all ranks finished but that no manifest names.

    Such a save is being committed or deleted, or its processes were killed before they wrote the
    manifest, or its manifest was lost. Only a person can tell these cases apart.
    """
    ranks: dict[tuple[str, str], set[str]] = defaultdict(set)
    for meta in store.list("index"):  # before the commits, so that a commit made meanwhile is seen
        parts = meta.key.split("/")
        if len(parts) == 4:
            ranks[parts[1], parts[2]].add(meta.key)
    committed = set()
    for meta in store.list("commits"):
        with contextlib.suppress(ValueError):  # not a commit key
            step, generation, _ = parse_commit_key(meta.key)
            committed.add((generation, step))
    for (generation, text), keys in ranks.items():
        number = generation.split("-")[0]
        if not (number.isdigit() and text.isdigit()) or (int(number), int(text)) in committed:
            continue
        step = int(text)
        with contextlib.suppress(CorruptCommit, ObjectNotFound):
            first = verified_io.fetch_verified(
                store, index_key(generation, step, 0), RankIndex.from_bytes
            )
            if all(
                index_key(generation, step, rank) in keys for rank in range(first.save.world_size)
            ):
                yield step, index_prefix(generation, step)


def _checksum_text(crc: int, sha256: "hashlib._Hash | None") -> str:
    if sha256 is None:
        return verified_io.crc_digits(crc)
    return f"{verified_io.crc_digits(crc)} {sha256.hexdigest()}"


def _drop_from_page_cache(path: Path | None, start: int, length: int) -> None:
    """Drop a range of a local file from the page cache, because perhaps only the cached copy is
    damaged.
    """
    if path is None:
        return
    with contextlib.suppress(OSError, AttributeError):  # not all systems have the call
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _index_problems(store: Store, manifest: Manifest) -> Iterator[str]:
    save = manifest.save
    expected = [index_key(save.generation, save.step, rank) for rank in range(save.world_size)]
    for rank, stated in enumerate(manifest.indexes):
        key = expected[rank]
        try:
            actual = verified_io.sha256_text(store.get(key))
            if actual != stated:
                yield f"{key}: SHA-256 {actual}, the manifest says {stated}"
        except ObjectNotFound:
            yield f"{key}: there is no such object"
    yield from _unexpected_objects(store, index_prefix(save.generation, save.step), expected)


def _data_problems(store: Store, manifest: Manifest) -> Iterator[str]:
    save = manifest.save
    whole = []
    for rank, data in enumerate(manifest.data):
        if data.key != data_key(save.generation, save.step, rank):
            yield f"{data.key}: is not the place of rank {rank} of this commit"
        meta = store.head(data.key)
        if meta is None or meta.size != data.size:
            yield (
                f"{data.key}: {f'{meta.size} bytes' if meta else 'no such object'}, {data.size} "
                "bytes were saved"
            )
            continue
        whole.append(data)
    for problem in VerifiedReader(store, whole).problems():
        yield str(problem)
    yield from _unexpected_objects(
        store, data_prefix(save.generation, save.step), [data.key for data in manifest.data]
    )


def _unexpected_objects(store: Store, prefix: str, expected: list[str]) -> Iterator[str]:
    for meta in store.list(prefix):
        if meta.key not in expected:
            yield f"{meta.key}: is no part of this commit"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
