"""Object store with the same operations on a local folder and on a bucket.

After `put` has returned, the object is durable: S3 guarantees this, and in a folder the file and
its folders are synced. Every operation ends within its deadline, even on a hanging file system.
Objects with data, indexes or commits are never overwritten; reports are.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

from ebbflow.core.errors import ObjectNotFound, StoreError
from ebbflow.core.layout import clock_key, marker_key
from ebbflow.core.store.errors import as_store_errors
from ebbflow.core.store.folder import HANG_GUARD, FolderBackend
from ebbflow.core.store.marker import StoreMarker, find_marker
from ebbflow.core.store.s3 import open_bucket, split_uri
from ebbflow.core.store_address import resolve_address

Buffer = bytes | bytearray | memoryview

T = TypeVar("T")
# As obstore prints the answer. A bare "501" is also in ports, keys and durations.
_UNSUPPORTED = re.compile(r"\bstatus code: 501\b|<Code>\s*NotImplemented\s*</Code>")
_PAGE = 1000  # keys that S3 lists at once
_SLOWEST_BYTES_PER_SECOND = 10e6  # of a folder's disk: a large object gets more time accordingly

_ASK_AGAIN_SECONDS = 600.0
_PROBE = b"the store's clock"


@dataclass(frozen=True)
class ObjectMeta:
    """Key, size and time of modification of an object."""

    key: str  # relative to the store
    size: int  # in bytes
    modified: float  # Unix time by the store's clock


class Store:
    """Object store in a folder or below a bucket's prefix.

    A forked process must open its own store.
    """

    def __init__(
        self,
        backend: Any,
        uri: str,
        root: Path | None,
        prefix: str = "",
        *,
        request_seconds: float = 60.0,
        marker: StoreMarker | None = None,
    ) -> None:
        self._marker = marker
        self._backend = backend
        self._root = root
        self.request_seconds = request_seconds
        self._prefix = prefix.strip("/")
        self.uri = uri.rstrip("/")

    @classmethod
    def open(cls, uri: str, *, request_timeout_seconds: float = 60.0, create: bool = True) -> Store:
        """Open a folder or ``s3://bucket/prefix``. No request is sent to a bucket yet.

        A missing folder is created, or with `create=False` read as an empty store until the first
        object is written.

        `request_timeout_seconds` limits each request, retries included. In a bucket, a large put or
        a long listing takes several requests. In a folder, each operation counts as one request,
        and the limit grows by 1 s for each 10 MB.

        If this process expects a marker of the store (`store.marker`), a folder without it is never
        created, and each of its operations raises WrongStore.
        """
        uri = resolve_address(uri)
        marker = find_marker(uri)
        if uri.startswith("s3://"):
            bucket, prefix = split_uri(uri)
            opened = open_bucket(bucket, request_timeout_seconds)
            return cls(
                opened,
                f"s3://{bucket}",
                None,
                request_seconds=request_timeout_seconds,
                marker=marker,
            ).sub(prefix)
        given = Path(uri.removeprefix("file://")).expanduser()

        def made() -> Path:
            root = given.resolve()
            if create and marker is None:
                root.mkdir(parents=True, exist_ok=True)
            return root

        with as_store_errors("open", str(given)):
            root = HANG_GUARD.run(made, request_timeout_seconds, f"open {given}")
        return cls(
            FolderBackend(root, marker),
            str(root),
            root,
            request_seconds=request_timeout_seconds,
            marker=marker,
        )

    def sub(self, prefix: str) -> Store:
        """Return a view of this store whose keys are relative to `prefix`."""
        below = prefix.strip("/")
        return Store(
            self._backend,
            f"{self.uri}/{below}",
            self._root,
            self._full(below),
            request_seconds=self.request_seconds,
            marker=self._marker,
        )

    def check_marker(self) -> None:
        """Raise WrongStore if a marker is expected of the store, and the store does not have it.

        In a bucket this is one request, so callers do it once per save or start. A folder is
        checked at each of its operations besides.
        """
        marker = self._marker
        if marker is None:
            return
        key = marker_key(marker.id)
        try:
            with as_store_errors("head", f"{marker.root}/{key}"):
                if self._root is not None:
                    self._local("head", key, marker.check_folder)
                    return
                _, prefix = split_uri(marker.root)
                obstore.head(self._backend, f"{prefix.strip('/')}/{key}".strip("/"))
        except ObjectNotFound:
            raise marker.error("the bucket has no such object") from None

    def put(
        self,
        key: str,
        data: Buffer,
        *,
        tags: Mapping[str, str] | None = None,
        private: bool = False,
    ) -> None:
        """Write the whole object and make it durable. Raises StoreError.

        `tags` are set in Amazon's buckets only, for their lifecycle rules. In a folder, only the
        current user can read a `private` file.
        """
        view = memoryview(data).cast("B")
        full = self._full(key)
        with as_store_errors("put", f"{self.uri}/{key}"):
            if self._root is not None:
                self._local(
                    "put",
                    key,
                    lambda: self._backend.put(full, view, private=private),
                    size=len(view),
                )
            else:
                obstore.put(self._backend, full, view, tags=dict(tags) if tags else None)

    def create(self, key: str, data: Buffer) -> bool:
        """Write an object durably unless the key exists.

        Return False if the key exists with other content.

        If two processes create the same key at the same time, only one succeeds; in a bucket, the
        service makes sure of this (If-None-Match). Some services do not support this condition, or
        check it before the write (OpenStack Swift). Then both processes may succeed, and the later
        content remains.
        """
        view = memoryview(data).cast("B")
        full = self._full(key)
        try:
            with as_store_errors("put", f"{self.uri}/{key}"):
                if self._root is not None:
                    self._local(
                        "put",
                        key,
                        lambda: self._backend.put(full, view, create=True),
                        size=len(view),
                    )
                else:
                    obstore.put(self._backend, full, view, mode="create")
        except StoreError as error:
            cause = error.__cause__
            if isinstance(cause, AlreadyExistsError | PreconditionError | FileExistsError):
                # A retry whose first try arrived finds its own object
                return self.get(key) == bytes(data)
            if not isinstance(cause, NotSupportedError) and not _UNSUPPORTED.search(str(cause)):
                raise
            try:
                return self.get(key) == bytes(data)
            except ObjectNotFound:
                self.put(key, data)
            return True
        return True

    def get(self, key: str) -> bytes:
        """Return the whole object. Raises ObjectNotFound or StoreError."""
        full = self._full(key)
        with as_store_errors("get", f"{self.uri}/{key}"):
            if self._root is not None:
                size, _ = self._local("get", key, lambda: self._backend.head(full))
                return self._local("get", key, lambda: self._backend.get(full), size=size)
            return bytes(obstore.get(self._backend, full).bytes())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`. Raises StoreError if the object is shorter."""
        if length == 0:
            return b""
        full = self._full(key)
        with as_store_errors("get", f"{self.uri}/{key}"):
            if self._root is not None:
                data = self._local(
                    "get", key, lambda: self._backend.get_range(full, start, length), size=length
                )
            else:
                data = bytes(obstore.get_range(self._backend, full, start=start, length=length))
        if len(data) != length:
            raise StoreError(
                f"get {self.uri}/{key}: {len(data)} bytes at {start}, expected {length}: truncated"
            )
        return data

    def head(self, key: str) -> ObjectMeta | None:
        """Return the metadata of an object, or None if it does not exist."""
        try:
            full = self._full(key)
            with as_store_errors("head", f"{self.uri}/{key}"):
                if self._root is not None:
                    return ObjectMeta(
                        key.strip("/"), *self._local("head", key, lambda: self._backend.head(full))
                    )
                return self._meta(obstore.head(self._backend, full))
        except ObjectNotFound:
            return None

    def list(self, prefix: str = "", *, limit: int | None = None) -> list[ObjectMeta]:
        """List at most `limit` of the objects below the folder `prefix`, sorted by key."""
        found: list[ObjectMeta] = []
        for page in self.pages(prefix):
            found += page
            if limit is not None and len(found) >= limit:
                break
        return sorted(found, key=attrgetter("key"))[:limit]

    def pages(self, prefix: str = "", *, after: str = "") -> Iterator[list[ObjectMeta]]:
        """Yield the objects below the folder `prefix`, sorted by key, in pages of up to 1,000.

        Only keys greater than `after` are listed.

        Each page is one request, which is sent when the caller asks for the page. However, a local
        folder, or a bucket whose first page is unsorted, is listed completely before the first
        page.
        """
        given = self._given(prefix, after)
        first = next(given, [])
        if self._root is None and first == sorted(first, key=attrgetter("key")):
            yield first
            yield from given
            return
        whole = first + list(itertools.chain.from_iterable(given))
        whole.sort(key=attrgetter("key"))
        pages = [whole[start : start + _PAGE] for start in range(0, len(whole), _PAGE)]
        yield from pages or [[]]

    def delete(self, key: str) -> None:
        """Delete an object. A missing object is not an error."""
        try:
            full = self._full(key)
            with as_store_errors("delete", f"{self.uri}/{key}"):
                if self._root is not None:
                    self._local("delete", key, lambda: self._backend.delete(full))
                else:
                    obstore.delete(self._backend, full)
        except ObjectNotFound:
            pass

    def local_path(self, key: str) -> Path | None:
        """Return the object's path on this machine's disk, or None for a remote store."""
        if self._root is None:
            return None
        return self._root / self._full(key)

    def _given(self, prefix: str, after: str) -> Iterator[list[ObjectMeta]]:
        if after:
            offset = self._full(after)
        else:
            offset = None
        full = self._full(prefix)
        with as_store_errors("list", f"{self.uri}/{prefix}"):
            if self._root is not None:
                found = self._local("list", prefix, lambda: self._backend.list(full, offset or ""))
                if self._prefix:
                    cut = len(self._prefix) + 1
                else:
                    cut = 0
                yield [ObjectMeta(key[cut:], size, modified) for key, size, modified in found]
                return
            for batch in obstore.list(
                self._backend, self._full(prefix) or None, offset=offset, chunk_size=_PAGE
            ):
                yield [self._meta(item) for item in batch]

    def _local(self, operation: str, key: str, call: Callable[[], T], *, size: int = 0) -> T:
        seconds = self.request_seconds + size / _SLOWEST_BYTES_PER_SECOND
        return HANG_GUARD.run(call, seconds, f"{operation} {self.uri}/{key}")

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key.strip('/')}".strip("/")

    def _meta(self, item: Any) -> ObjectMeta:
        path = item["path"]
        if self._prefix:
            key = path[len(self._prefix) + 1 :]
        else:
            key = path
        return ObjectMeta(key, int(item["size"]), item["last_modified"].timestamp())


class StoreClock:
    """Clock that returns the store's time, by which the store dates its objects.

    To read the time, it puts a small probe object, reads the object's date, and deletes it. For the
    next 10 minutes it adds the elapsed time instead of probing again. The result is never later
    than the store's time, because the store dates a probe before its answer arrives. The age of an
    object is therefore never overestimated, and no object is deleted too early.
    """

    def __init__(self) -> None:
        self._dated: float | None = None  # by the store's clock, at the time `_at` or before it
        self._at = 0.0

    def now(self, store: Store, newest: float) -> float:
        """Return the store's Unix time.

        Without write access, return `newest`, the date of the newest known object.
        """
        elapsed = time.monotonic() - self._at
        if self._dated is None or elapsed > _ASK_AGAIN_SECONDS:
            self._dated = _probed(store)
            self._at = time.monotonic()
            elapsed = 0.0
        if self._dated is None:
            return newest
        return self._dated + elapsed


def _probed(store: Store) -> float | None:
    key = clock_key(secrets.token_hex(8))
    found: ObjectMeta | None = None
    left = {key}
    try:
        store.put(key, _PROBE)
        listed = store.list("clock")
        # Including probes of processes that were killed before deleting them
        left |= {meta.key for meta in listed}
        found = next((meta for meta in listed if meta.key == key), None) or store.head(key)
    except StoreError:
        pass
    for name in left:
        with contextlib.suppress(StoreError):  # the next probe's clean-up deletes it
            store.delete(name)
    return found and found.modified
