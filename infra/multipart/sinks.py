"""Where an object can go in parts: a bucket, or a folder, where a file appears under its name once it is durable."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from infra.errors import ObjectNotFound, StoreAway, StoreError, StoreForbidden, StoreFull
from infra.multipart.account import find_account
from infra.multipart.client import LARGEST_COUNT, Bucket, Part, Upload
from infra.multipart.requests import Buffer
from infra.multipart.throttle import Throttle

_SMALLEST_PART = 5 * 2**20  # by S3, but for the last
# obstore leaves names of this kind out of its listings: they are its own unfinished files, too.
_UNFINISHED = re.compile(r".+#\d+")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class Sink(Protocol):
    """Keys are relative to the store that it was opened for. Checksums are CRC64NVME; None: the store gives none.

    What `begin` returns is handed to the calls that follow. `put_part` may be called by several threads at once.
    """

    def begin(self, key: str, size: int, *, parts: int, seconds: float) -> Any: ...

    def put_part(self, begun: Any, number: int, start: int, body: Buffer, crc: int, *, seconds: float) -> Part: ...

    def finish(
        self, begun: Any, parts: Sequence[Part], crcs: Sequence[int], whole: int, *, seconds: float
    ) -> int | None: ...

    def abort(self, begun: Any, *, seconds: float) -> None: ...

    def size(self, key: str, *, seconds: float) -> tuple[int, int | None]: ...

    def sweep(self, prefix: str, *, older_than_seconds: float, seconds: float) -> list[str]:
        """Abort what was begun below `prefix` that long ago and never finished. Returns the keys."""
        ...


def open_sink(uri: str, throttle: Throttle) -> Sink:
    """For ``s3://bucket/prefix`` or a folder, as `Store.uri` has them."""
    if uri.startswith("s3://"):
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        return BucketSink(Bucket(bucket, find_account(), throttle), prefix)
    return FolderSink(Path(uri), throttle)


class BucketSink:
    """One part is a plain put, which an S3 makes visible as a whole; several are a multipart upload."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix.strip("/")

    def begin(self, key: str, size: int, *, parts: int, seconds: float) -> Upload:
        if parts > LARGEST_COUNT or (parts > 1 and size < (parts - 1) * _SMALLEST_PART):
            raise StoreError(f"{key}: {size} bytes cannot be put in {parts} parts: 5 MiB each, at most {LARGEST_COUNT}")
        if parts == 1:
            return Upload(self._full(key), "")
        return self._bucket.create(self._full(key), seconds=seconds)

    def put_part(self, begun: Upload, number: int, start: int, body: Buffer, crc: int, *, seconds: float) -> Part:
        if not begun.id:
            return Part(number, "", self._bucket.put(begun.key, body, crc, seconds=seconds))
        return self._bucket.put_part(begun, number, body, crc, seconds=seconds)

    def finish(
        self, begun: Upload, parts: Sequence[Part], crcs: Sequence[int], whole: int, *, seconds: float
    ) -> int | None:
        if not begun.id:
            return parts[0].crc64nvme
        return self._bucket.complete(begun, parts, crcs, whole, seconds=seconds)

    def abort(self, begun: Upload, *, seconds: float) -> None:
        if begun.id:
            self._bucket.abort(begun, seconds=seconds)

    def size(self, key: str, *, seconds: float) -> tuple[int, int | None]:
        return self._bucket.size(self._full(key), seconds=seconds)

    def sweep(self, prefix: str, *, older_than_seconds: float, seconds: float) -> list[str]:
        end = time.monotonic() + seconds
        swept = []
        for upload in self._bucket.uploads(self._full(prefix), seconds=seconds):
            left = end - time.monotonic()
            if upload.age_seconds > older_than_seconds and left > 0:
                try:
                    self._bucket.abort(upload, seconds=left)
                except ObjectNotFound:  # another sweep was first
                    continue
                swept.append(upload.key)
        return swept

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key


class FolderSink:
    """Parts are written where they belong in a file beside the name, which is synced and then given its name."""

    def __init__(self, root: Path, throttle: Throttle) -> None:
        self._root = root
        self._throttle = throttle

    def begin(self, key: str, size: int, *, parts: int, seconds: float) -> tuple[Path, int]:
        path = self._root / key
        with _Told(f"put {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"{path.name}#{os.getpid()}")
            descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        return path, descriptor

    def put_part(
        self, begun: tuple[Path, int], number: int, start: int, body: Buffer, crc: int, *, seconds: float
    ) -> Part:
        path, descriptor = begun
        view = memoryview(body).cast("B")
        step = self._throttle.slice_bytes or max(len(view), 1)
        with _Told(f"put {path}"):
            for at in range(0, len(view), step):
                piece = view[at : at + step]
                self._throttle.take(len(piece))
                while piece:
                    written = os.pwrite(descriptor, piece, start + at)
                    at, piece = at + written, piece[written:]
        return Part(number, "", None)

    def finish(
        self, begun: tuple[Path, int], parts: Sequence[Part], crcs: Sequence[int], whole: int, *, seconds: float
    ) -> int | None:
        path, descriptor = begun
        with _Told(f"put {path}", otherwise=StoreError):  # a failed sync is not cured by another
            os.fsync(descriptor)
            os.replace(path.with_name(f"{path.name}#{os.getpid()}"), path)
            folder = path.parent
            _sync_folder(folder)
            while folder not in (self._root, folder.parent):
                folder = folder.parent
                _sync_folder(folder)
            os.close(descriptor)
        return None

    def abort(self, begun: tuple[Path, int], *, seconds: float) -> None:
        path, descriptor = begun
        with _Told(f"abort {path}"):
            path.with_name(f"{path.name}#{os.getpid()}").unlink(missing_ok=True)
            os.close(descriptor)

    def size(self, key: str, *, seconds: float) -> tuple[int, int | None]:
        with _Told(f"head {self._root / key}"):
            return (self._root / key).stat().st_size, None

    def sweep(self, prefix: str, *, older_than_seconds: float, seconds: float) -> list[str]:
        now, swept = time.time(), []
        with _Told(f"sweep {self._root / prefix}"):
            for path in (self._root / prefix).rglob("*#*"):
                if _UNFINISHED.fullmatch(path.name) and now - path.stat().st_mtime > older_than_seconds:
                    path.unlink(missing_ok=True)
                    swept.append(str(path.relative_to(self._root)))
        return swept


class _Told:
    """An error of the system within the block becomes one of the store."""

    def __init__(self, what: str, otherwise: type[StoreError] = StoreAway) -> None:
        self._what = what
        self._otherwise = otherwise

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, OSError):
            return False
        words = f"{self._what}: {error.strerror or error}"
        if isinstance(error, FileNotFoundError):
            raise ObjectNotFound(words) from error
        if error.errno in _FULL:
            raise StoreFull(f"{words}; no room; fix: free space, or a store on another disk") from error
        if error.errno in _FORBIDDEN:
            raise StoreForbidden(f"{words}; fix: the folder's owner and permissions") from error
        raise self._otherwise(words) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
