"""The store itself: the same few operations on a local folder and on a bucket.

A `put` that returned is durable: on S3 by the service's promise, locally by fsync of the file and its folders.
Keys of data, indexes and commits are never overwritten; reports are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError
from obstore.store import LocalStore

from infra.errors import ObjectNotFound, StoreError, StoreMisconfigured
from infra.store.durable import sync_file, write_private
from infra.store.faults import translated
from infra.store.s3 import open_bucket, split_uri

Buffer = bytes | bytearray | memoryview

_PAGE = 1000  # keys that S3 lists at once


@dataclass(frozen=True)
class ObjectMeta:
    """key relative to the store, size in bytes, modified as Unix time."""

    key: str
    size: int
    modified: float


class Store:
    """Keys are relative to the store's root, parts joined by "/". Not fork-safe: open one per process."""

    def __init__(self, backend: Any, uri: str, root: Path | None, prefix: str = "") -> None:
        self._backend = backend
        self._root = root
        self._prefix = prefix.strip("/")
        self.uri = uri.rstrip("/")

    @classmethod
    def open(cls, uri: str, *, request_timeout_seconds: float = 60.0) -> Store:
        """Open a folder (created when missing) or ``s3://bucket/prefix``. No request is made yet.

        request_timeout_seconds bounds each request, its retries included; a large put and a long listing are several.
        Credentials, region and endpoint come from where every AWS tool finds them (`infra.store.aws`).
        """
        if uri.startswith("s3://"):
            bucket, prefix = split_uri(uri)
            return cls(open_bucket(bucket, request_timeout_seconds), f"s3://{bucket}", None).sub(prefix)
        if "://" in uri and not uri.startswith("file://"):
            raise StoreMisconfigured(f"store {uri!r}: unknown kind; fix: a folder or s3://bucket/prefix")
        root = Path(uri.removeprefix("file://")).expanduser().resolve()
        with translated("open", str(root)):
            root.mkdir(parents=True, exist_ok=True)
            return cls(LocalStore(root), str(root), root)

    def sub(self, prefix: str) -> Store:
        """The same store, seen from below `prefix`."""
        below = prefix.strip("/")
        return Store(self._backend, f"{self.uri}/{below}" if below else self.uri, self._root, self._full(below))

    def put(self, key: str, data: Buffer, *, tags: Mapping[str, str] | None = None, private: bool = False) -> None:
        """Write the whole object and make it durable. Raises StoreError.

        tags: for a bucket's lifecycle rules; a folder, and a store that is not Amazon's, goes without. private: in a
        folder only this user may read it.
        """
        with self._translated("put", key):
            if private and self._root is not None:
                write_private(self._root / self._full(key), data)
                sync_file(self._root / self._full(key), self._root)
                return
            obstore.put(self._backend, self._full(key), memoryview(data).cast("B"), tags=dict(tags) if tags else None)
            if self._root is not None:
                sync_file(self._root / self._full(key), self._root)

    def create(self, key: str, data: Buffer) -> bool:
        """Write an object only if there is none under the key, and make it durable. False: there is one already.

        A bucket's service decides between two writers (If-None-Match). One that does not know the condition is asked
        before instead. There, and in services that check it before they write (OpenStack Swift), two writers at the
        same moment may both succeed, and the later one's content stays.
        """
        try:
            with self._translated("put", key):
                obstore.put(self._backend, self._full(key), memoryview(data).cast("B"), mode="create")
        except StoreError as error:
            if isinstance(error.__cause__, AlreadyExistsError | PreconditionError):
                return self.get(key) == bytes(data)  # a retry whose first try arrived finds its own object
            if not _is_condition_unsupported(error.__cause__):
                raise
            if self.head(key) is not None:
                return False
            self.put(key, data)
            return True
        if self._root is not None:
            with self._translated("put", key):
                sync_file(self._root / self._full(key), self._root)
        return True

    def get(self, key: str) -> bytes:
        """The whole object. Raises ObjectNotFound or StoreError."""
        with self._translated("get", key):
            return bytes(obstore.get(self._backend, self._full(key)).bytes())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`. A shorter object raises StoreError, so that truncation is never silent."""
        if length == 0:
            return b""
        with self._translated("get", key):
            data = bytes(obstore.get_range(self._backend, self._full(key), start=start, length=length))
        if len(data) != length:
            raise StoreError(f"get {self.uri}/{key}: {len(data)} bytes at {start}, expected {length}: truncated")
        return data

    def head(self, key: str) -> ObjectMeta | None:
        """Size and time of an object, or None when there is none."""
        try:
            with self._translated("head", key):
                return self._meta(obstore.head(self._backend, self._full(key)))
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
            with self._translated("delete", key):
                obstore.delete(self._backend, self._full(key))
        except ObjectNotFound:
            pass

    def local_path(self, key: str) -> Path | None:
        """Where the object lies on this machine's disk, or None for a remote store."""
        return None if self._root is None else self._root / self._full(key)

    def _given(self, prefix: str, after: str) -> Iterator[list[ObjectMeta]]:
        """As the store lists them."""
        offset = self._full(after) if after else None
        with self._translated("list", prefix):
            for batch in obstore.list(self._backend, self._full(prefix) or None, offset=offset, chunk_size=_PAGE):
                yield [self._meta(item) for item in batch]

    def _full(self, key: str) -> str:
        key = key.strip("/")
        return f"{self._prefix}/{key}".strip("/") if self._prefix else key

    def _meta(self, item: Any) -> ObjectMeta:
        path = item["path"]
        key = path[len(self._prefix) + 1 :] if self._prefix else path
        return ObjectMeta(key, int(item["size"]), item["last_modified"].timestamp())

    def _translated(self, operation: str, key: str) -> translated:
        return translated(operation, f"{self.uri}/{key}")


def _key(meta: ObjectMeta) -> str:
    return meta.key


def _is_condition_unsupported(cause: BaseException | None) -> bool:
    """Whether a bucket's service refused a request for its If-None-Match, as some that are not Amazon's do."""
    return isinstance(cause, NotSupportedError) or "501" in str(cause) or "NotImplemented" in str(cause)
