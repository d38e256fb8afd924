"""The object store: the same few operations on a local folder and on a bucket.

A `put` that returned is durable: on S3 by the service's promise, locally by fsync of the file and its folders.
Every operation ends within its deadline, on a bucket and on a folder whose file system hangs (`infra.store.folder`).
Keys of data, indexes and commits are never overwritten; reports are.

This machine's clock says nothing of a store's, and the newest object of a job says little once nothing is put any more.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

from ebbflow.infra.errors import ObjectNotFound, StoreError, StoreMisconfigured
from ebbflow.infra.layout import clock_key
from ebbflow.infra.store.errors import as_store_errors
from ebbflow.infra.store.folder import HANG_GUARD, FolderBackend
from ebbflow.infra.store.s3 import open_bucket, split_uri

Buffer = bytes | bytearray | memoryview

T = TypeVar("T")
# As obstore prints the answer. A bare "501" is also in ports, keys and durations.
_UNSUPPORTED = re.compile(r"\bstatus code: 501\b|<Code>\s*NotImplemented\s*</Code>")
_PAGE = 1000  # keys that S3 lists at once
_SLOWEST_BYTES_PER_SECOND = 10e6  # of a folder's disk: a large object is given so much more time


@dataclass(frozen=True)
class ObjectMeta:
    """key relative to the store, size in bytes, modified as Unix time."""

    key: str
    size: int
    modified: float


class Store:
    """Keys are relative to the store's root, parts joined by "/". Not fork-safe: open one per process."""

    def __init__(
        self, backend: Any, uri: str, root: Path | None, prefix: str = "", *, request_seconds: float = 60.0
    ) -> None:
        self._backend = backend
        self._root = root
        self.request_seconds = request_seconds
        self._prefix = prefix.strip("/")
        self.uri = uri.rstrip("/")

    @classmethod
    def open(cls, uri: str, *, request_timeout_seconds: float = 60.0) -> Store:
        """Open a folder (created when missing) or ``s3://bucket/prefix``. No request is made yet.

        request_timeout_seconds bounds each request, its retries included; a large put and a long listing are several.
        In a folder each operation is one request, and a large object has 1 s more for each 10 MB.
        Credentials, region and endpoint come from where every AWS tool finds them (`ebbflow.infra.store.s3`).
        """
        if uri.startswith("s3://"):
            bucket, prefix = split_uri(uri)
            opened = open_bucket(bucket, request_timeout_seconds)
            return cls(opened, f"s3://{bucket}", None, request_seconds=request_timeout_seconds).sub(prefix)
        if "://" in uri and not uri.startswith("file://"):
            raise StoreMisconfigured(f"store {uri!r}: unknown kind; fix: a folder or s3://bucket/prefix")
        given = Path(uri.removeprefix("file://")).expanduser()

        def made() -> Path:
            root = given.resolve()
            root.mkdir(parents=True, exist_ok=True)
            return root

        with as_store_errors("open", str(given)):
            root = HANG_GUARD.run(made, request_timeout_seconds, f"open {given}")
        return cls(FolderBackend(root), str(root), root, request_seconds=request_timeout_seconds)

    def sub(self, prefix: str) -> Store:
        """The same store, seen from below `prefix`."""
        below = prefix.strip("/")
        uri = f"{self.uri}/{below}" if below else self.uri
        return Store(self._backend, uri, self._root, self._full(below), request_seconds=self.request_seconds)

    def put(self, key: str, data: Buffer, *, tags: Mapping[str, str] | None = None, private: bool = False) -> None:
        """Write the whole object and make it durable. Raises StoreError.

        tags: for a bucket's lifecycle rules; a folder, and a store that is not Amazon's, goes without. private: in a
        folder only this user may read it.
        """
        view, full = memoryview(data).cast("B"), self._full(key)
        with self._translated("put", key):
            if self._root is not None:
                self._local("put", key, lambda: self._backend.put(full, view, private=private), size=len(view))
            else:
                obstore.put(self._backend, full, view, tags=dict(tags) if tags else None)

    def create(self, key: str, data: Buffer) -> bool:
        """Write an object only if there is none under the key, and make it durable. False: there is one already.

        A bucket's service decides between two writers (If-None-Match). One that does not know the condition is asked
        before instead. There, and in services that check it before they write (OpenStack Swift), two writers at the
        same moment may both succeed, and the later one's content stays.
        """
        view, full = memoryview(data).cast("B"), self._full(key)
        try:
            with self._translated("put", key):
                if self._root is not None:
                    self._local("put", key, lambda: self._backend.put(full, view, create=True), size=len(view))
                else:
                    obstore.put(self._backend, full, view, mode="create")
        except StoreError as error:
            if isinstance(error.__cause__, AlreadyExistsError | PreconditionError | FileExistsError):
                return self.get(key) == bytes(data)  # a retry whose first try arrived finds its own object
            if not _is_condition_unsupported(error.__cause__):
                raise
            try:
                return self.get(key) == bytes(data)
            except ObjectNotFound:
                self.put(key, data)
            return True
        return True

    def get(self, key: str) -> bytes:
        """The whole object. Raises ObjectNotFound or StoreError."""
        full = self._full(key)
        with self._translated("get", key):
            if self._root is not None:
                size, _ = self._local("get", key, lambda: self._backend.head(full))
                return self._local("get", key, lambda: self._backend.get(full), size=size)
            return bytes(obstore.get(self._backend, full).bytes())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`. A shorter object raises StoreError, so that truncation is never silent."""
        if length == 0:
            return b""
        full = self._full(key)
        with self._translated("get", key):
            if self._root is not None:
                data = self._local("get", key, lambda: self._backend.get_range(full, start, length), size=length)
            else:
                data = bytes(obstore.get_range(self._backend, full, start=start, length=length))
        if len(data) != length:
            raise StoreError(f"get {self.uri}/{key}: {len(data)} bytes at {start}, expected {length}: truncated")
        return data

    def head(self, key: str) -> ObjectMeta | None:
        """Size and time of an object, or None when there is none."""
        try:
            full = self._full(key)
            with self._translated("head", key):
                if self._root is not None:
                    return ObjectMeta(key.strip("/"), *self._local("head", key, lambda: self._backend.head(full)))
                return self._meta(obstore.head(self._backend, full))
        except ObjectNotFound:
            return None

    def list(self, prefix: str = "", *, limit: int | None = None) -> list[ObjectMeta]:
        """Objects below the folder `prefix`, sorted by key; at most `limit` of them when given."""
        found: list[ObjectMeta] = []
        for page in self.pages(prefix):
            found += page
            if limit is not None and len(found) >= limit:
                break
        return sorted(found, key=_key)[:limit]

    def pages(self, prefix: str = "", *, after: str = "") -> Iterator[list[ObjectMeta]]:
        """Objects below the folder `prefix` whose keys come after `after`, in the order of keys, at most 1,000 a page.

        Each page is one request, made when the page is asked for. A folder, and a store that lists in no order (its
        first page shows it), are read as a whole before the first page is given.
        """
        given = self._given(prefix, after)
        first = next(given, [])
        if self._root is None and first == sorted(first, key=_key):
            yield first
            yield from given
            return
        whole = sorted([*first, *(meta for page in given for meta in page)], key=_key)
        for start in range(0, max(1, len(whole)), _PAGE):
            yield whole[start : start + _PAGE]

    def delete(self, key: str) -> None:
        """Remove an object; one that is already gone is no error."""
        try:
            full = self._full(key)
            with self._translated("delete", key):
                if self._root is not None:
                    self._local("delete", key, lambda: self._backend.delete(full))
                else:
                    obstore.delete(self._backend, full)
        except ObjectNotFound:
            pass

    def local_path(self, key: str) -> Path | None:
        """Where the object lies on this machine's disk, or None for a remote store."""
        return None if self._root is None else self._root / self._full(key)

    def _given(self, prefix: str, after: str) -> Iterator[list[ObjectMeta]]:
        """As the store lists them."""
        offset, full = self._full(after) if after else None, self._full(prefix)
        with self._translated("list", prefix):
            if self._root is not None:
                found = self._local("list", prefix, lambda: self._backend.list(full, offset or ""))
                cut = len(self._prefix) + 1 if self._prefix else 0
                yield [ObjectMeta(key[cut:], size, modified) for key, size, modified in found]
                return
            for batch in obstore.list(self._backend, self._full(prefix) or None, offset=offset, chunk_size=_PAGE):
                yield [self._meta(item) for item in batch]

    def _local(self, operation: str, key: str, call: Callable[[], T], *, size: int = 0) -> T:
        seconds = self.request_seconds + size / _SLOWEST_BYTES_PER_SECOND
        return HANG_GUARD.run(call, seconds, f"{operation} {self.uri}/{key}")

    def _full(self, key: str) -> str:
        key = key.strip("/")
        return f"{self._prefix}/{key}".strip("/") if self._prefix else key

    def _meta(self, item: Any) -> ObjectMeta:
        path = item["path"]
        key = path[len(self._prefix) + 1 :] if self._prefix else path
        return ObjectMeta(key, int(item["size"]), item["last_modified"].timestamp())

    def _translated(self, operation: str, key: str) -> as_store_errors:
        return as_store_errors(operation, f"{self.uri}/{key}")


def _key(meta: ObjectMeta) -> str:
    return meta.key


def _is_condition_unsupported(cause: BaseException | None) -> bool:
    """Whether a bucket's service refused a request for its If-None-Match, as some that are not Amazon's do."""
    return isinstance(cause, NotSupportedError) or bool(_UNSUPPORTED.search(str(cause)))


_ASK_AGAIN_SECONDS = 600.0
_PROBE = b"the store's clock"


class StoreClock:
    """Asks rarely. What it says is never later than the store's time, so that what is judged by it is kept too long
    rather than too short: the probe is dated before its answer comes, and after that only elapsed time is added.
    """

    def __init__(self) -> None:
        self._dated: float | None = None  # by the store's clock, at the time `_at` or before it
        self._at = 0.0

    def now(self, store: Store, newest: float) -> float:
        """Unix time. newest: of the objects that are known, which stands in where nothing can be put: no room, or no
        permission."""
        elapsed = time.monotonic() - self._at
        if self._dated is None or elapsed > _ASK_AGAIN_SECONDS:
            self._dated, self._at, elapsed = _probed(store), time.monotonic(), 0.0
        return newest if self._dated is None else self._dated + elapsed


def _probed(store: Store) -> float | None:
    """The listing dates it like the objects it is compared with; where that lags, a look at the object itself does."""
    key = clock_key(secrets.token_hex(8))
    found: ObjectMeta | None = None
    left = {key}
    try:
        store.put(key, _PROBE)
        listed = store.list("clock")
        left |= {meta.key for meta in listed}  # with those of processes that were killed here
        found = next((meta for meta in listed if meta.key == key), None) or store.head(key)
    except StoreError:
        pass
    for name in left:
        with contextlib.suppress(StoreError):  # then the next one takes it away
            store.delete(name)
    return found and found.modified
