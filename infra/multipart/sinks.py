"""Where an object can go in parts: a bucket, or a folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ebbflow.infra.errors import ObjectNotFound, StoreError
from ebbflow.infra.multipart.account import find_account
from ebbflow.infra.multipart.client import LARGEST_COUNT, Bucket, Part, Upload
from ebbflow.infra.multipart.folder import FolderSink
from ebbflow.infra.multipart.requests import Buffer
from ebbflow.infra.multipart.throttle import Throttle

_SMALLEST_PART = 5 * 2**20  # by S3, but for the last


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
