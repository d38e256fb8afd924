"""Upload targets for objects in parts: a bucket or a folder.

Checksums are CRC64NVME, as 64-bit integers here and as base64 of 8 big-endian bytes on the wire. They accompany each
part and the whole object, and stores that support them verify them.

In a folder, whole blocks bypass the page cache where the file system allows it. Through the page cache the same bytes
cost about ten times the processor time and evict cached training data (measured on ext4).
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ebbflow.infra.errors import ObjectNotFound, StoreError, StoreForbidden, StoreFull, StoreTimeout, StoreUnavailable
from ebbflow.infra.multipart.requests import Buffer, S3Account, S3Client, S3Response, Throttle, find_account
from ebbflow.infra.store.folder import HANG_GUARD, UNFINISHED, sync_folders

_CHECKSUM = "x-amz-checksum-crc64nvme"
LARGEST_COUNT = 10_000  # S3's limit on the parts of one object


@dataclass(frozen=True)
class MultipartUpload:
    """A multipart upload in progress.

    Attributes:
        id: the store's upload id, "" if the object is put in one request instead.
        age_seconds: age by the store's clock; 0 unless `Bucket.uploads` listed the upload.
    """

    key: str
    id: str
    age_seconds: float = 0.0


@dataclass(frozen=True)
class UploadedPart:
    """A part in the store.

    Attributes:
        number: counted from 1.
        crc64nvme: the checksum that the store computed, None if it gives none.
    """

    number: int
    etag: str
    crc64nvme: int | None


class Bucket:
    """A bucket that receives multipart uploads. Thread-safe.

    Every method takes `seconds`, the deadline of the whole request, and raises as `S3Client.send` does.
    """

    def __init__(self, name: str, account: Callable[[], S3Account], throttle: Throttle | None = None) -> None:
        self._requests = S3Client(name, account)
        self._throttle = throttle

    def put(self, key: str, body: Buffer, crc64nvme: int, *, seconds: float) -> int | None:
        """Put the whole object in one request. Returns the store's checksum, None if it gives none."""
        answer = self._requests.send(
            "PUT", key, headers=_checksum(crc64nvme), body=body, seconds=seconds, throttle=self._throttle
        )
        return _stated(answer)

    def create(self, key: str, *, seconds: float) -> MultipartUpload:
        headers = {"x-amz-checksum-algorithm": "CRC64NVME", "x-amz-checksum-type": "FULL_OBJECT"}
        answer = self._requests.send("POST", key, query={"uploads": ""}, headers=headers, seconds=seconds)
        found = _parse(answer).findtext("UploadId")
        if not found:
            raise StoreUnavailable(f"create upload of {key}: the answer has no UploadId: {answer.body[:200]!r}")
        return MultipartUpload(key, found)

    def put_part(
        self, upload: MultipartUpload, number: int, body: Buffer, crc64nvme: int, *, seconds: float
    ) -> UploadedPart:
        """Upload one part. Part numbers start at 1."""
        answer = self._requests.send(
            "PUT",
            upload.key,
            query={"partNumber": str(number), "uploadId": upload.id},
            headers=_checksum(crc64nvme),
            body=body,
            seconds=seconds,
            throttle=self._throttle,
        )
        if not (etag := answer.headers.get("etag")):
            raise StoreUnavailable(f"part {number} of {upload.key}: the answer has no ETag")
        return UploadedPart(number, etag, _stated(answer))

    def complete(
        self, upload: MultipartUpload, parts: Sequence[UploadedPart], crcs: Sequence[int], whole: int, *, seconds: float
    ) -> int | None:
        """Join the parts into the object. Returns the store's checksum of the whole object, None if it gives none.

        Args:
            crcs: checksums of the parts, in the same order.
            whole: checksum of the whole object.
        """
        root = ElementTree.Element("CompleteMultipartUpload", xmlns="http://s3.amazonaws.com/doc/2006-03-01/")
        for part, crc in zip(parts, crcs, strict=True):
            node = ElementTree.SubElement(root, "Part")
            ElementTree.SubElement(node, "PartNumber").text = str(part.number)
            ElementTree.SubElement(node, "ETag").text = part.etag
            ElementTree.SubElement(node, "ChecksumCRC64NVME").text = _encoded(crc)
        answer = self._requests.send(
            "POST",
            upload.key,
            query={"uploadId": upload.id},
            headers={**_checksum(whole), "x-amz-checksum-type": "FULL_OBJECT", "content-type": "application/xml"},
            body=ElementTree.tostring(root),
            seconds=seconds,
        )
        document = _parse(answer)
        if document.tag == "Error":  # S3 answers 200 at once, and any error follows in the body
            raise StoreUnavailable(
                f"complete {upload.key}: {document.findtext('Code')}: {document.findtext('Message')}"
            )
        stated = document.findtext("ChecksumCRC64NVME")
        return _decoded(stated) if stated else _stated(answer)

    def abort(self, upload: MultipartUpload, *, seconds: float) -> None:
        self._requests.send("DELETE", upload.key, query={"uploadId": upload.id}, seconds=seconds)

    def size(self, key: str, *, seconds: float) -> tuple[int, int | None]:
        """Return (size in bytes, checksum or None) of an object. Raises ObjectNotFound."""
        answer = self._requests.send("HEAD", key, headers={"x-amz-checksum-mode": "ENABLED"}, seconds=seconds)
        return int(answer.headers["content-length"]), _stated(answer)

    def uploads(self, prefix: str, *, seconds: float) -> Iterator[MultipartUpload]:
        marker: dict[str, str] = {}
        while True:
            query = {"uploads": "", "prefix": prefix, **marker}
            answer = self._requests.send("GET", "", query=query, seconds=seconds)
            document = _parse(answer)
            now = parsedate_to_datetime(answer.headers["date"]).timestamp()
            for node in document.findall("Upload"):
                begun = _timestamp(node.findtext("Initiated") or "")
                yield MultipartUpload(node.findtext("Key") or "", node.findtext("UploadId") or "", now - begun)
            if document.findtext("IsTruncated") != "true":
                return
            marker = {
                "key-marker": document.findtext("NextKeyMarker") or "",
                "upload-id-marker": document.findtext("NextUploadIdMarker") or "",
            }


def _checksum(crc64nvme: int) -> dict[str, str]:
    return {_CHECKSUM: _encoded(crc64nvme)}


def _encoded(crc64nvme: int) -> str:
    return base64.b64encode(crc64nvme.to_bytes(8, "big")).decode()


def _decoded(text: str) -> int | None:
    """Decode a checksum. Returns None for a checksum of the parts' checksums, such as "…-3", which some stores send."""
    return None if "-" in text else int.from_bytes(base64.b64decode(text), "big")


def _stated(answer: S3Response) -> int | None:
    text = answer.headers.get(_CHECKSUM)
    return _decoded(text) if text else None


def _timestamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _parse(answer: S3Response) -> ElementTree.Element:
    """Parse an XML answer. The namespace is removed, because only some stores send it."""
    try:
        document = ElementTree.fromstring(answer.body)
    except ElementTree.ParseError as error:
        raise StoreUnavailable(f"the answer is not XML: {answer.body[:200]!r}") from error
    for node in document.iter():
        node.tag = node.tag.rpartition("}")[2]
    return document


_BLOCK = 4096
_SMALLEST_DIRECT = 2**20
_SHORTEST_SECONDS = 0.05
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@dataclass
class _File:
    """An unfinished file.

    Attributes:
        unfinished: path of the file until it is finished and renamed to `path`.
        cached: descriptor that writes through the page cache.
        direct: second descriptor, which bypasses the page cache; None if unavailable.
        hung: an abandoned call may still use the descriptors, so they are never closed.
    """

    path: Path
    unfinished: Path
    cached: int
    direct: int | None
    hung: bool = False

    def run(self, call: Callable[[], None], seconds: float) -> None:
        """Run `call`, an operation on the file. Raises StoreTimeout at the deadline; later operations are refused."""
        if self.hung:
            raise StoreError(f"put {self.path}: an operation on this file hangs")
        try:
            HANG_GUARD.run(call, seconds, f"put {self.path}")
        except StoreTimeout:
            self.hung = True
            raise

    def close(self) -> None:
        os.close(self.cached)
        if self.direct is not None:
            os.close(self.direct)


class FolderSink:
    """An upload target in a folder. Parts are written into an unfinished file, which is then synced and renamed."""

    def __init__(self, root: Path, throttle: Throttle) -> None:
        self._root = root
        self._throttle = throttle

    def begin(self, key: str, size: int, *, parts: int, seconds: float) -> _File:
        path = self._root / key
        unfinished = path.with_name(f"{path.name}#{os.getpid()}")

        def opened() -> _File:
            path.parent.mkdir(parents=True, exist_ok=True)
            cached = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
            direct = None
            if size >= _SMALLEST_DIRECT and hasattr(os, "O_DIRECT"):
                with contextlib.suppress(OSError):
                    direct = os.open(unfinished, os.O_WRONLY | os.O_DIRECT)
            return _File(path, unfinished, cached, direct)

        with os_errors_as_store_errors(f"put {path}"):
            return HANG_GUARD.run(opened, seconds, f"put {path}")

    def put_part(
        self, begun: _File, number: int, start: int, body: Buffer, crc: int, *, seconds: float
    ) -> UploadedPart:
        view, end = memoryview(body).cast("B"), time.monotonic() + seconds
        step = self._throttle.slice_bytes or max(len(view), 1)
        step = -(-step // _BLOCK) * _BLOCK
        with os_errors_as_store_errors(f"put {begun.path}"):
            for at in range(0, len(view), step):
                piece = view[at : at + step]
                self._throttle.take(len(piece))
                begun.run(partial(_write, begun, piece, start + at), max(end - time.monotonic(), _SHORTEST_SECONDS))
        return UploadedPart(number, "", None)

    def finish(
        self, begun: _File, parts: Sequence[UploadedPart], crcs: Sequence[int], whole: int, *, seconds: float
    ) -> int | None:
        def finished() -> None:
            os.fsync(begun.cached)
            os.replace(begun.unfinished, begun.path)
            sync_folders(begun.path.parent, self._root)

        with os_errors_as_store_errors(
            f"put {begun.path}", otherwise=StoreError
        ):  # a second sync would not report the failure again
            begun.run(finished, seconds)
            begun.close()
        return None

    def abort(self, begun: _File, *, seconds: float) -> None:
        with os_errors_as_store_errors(f"abort {begun.path}"):
            HANG_GUARD.run(lambda: begun.unfinished.unlink(missing_ok=True), seconds, f"abort {begun.path}")
            if not begun.hung:
                begun.close()

    def size(self, key: str, *, seconds: float) -> tuple[int, int | None]:
        path = self._root / key
        with os_errors_as_store_errors(f"head {path}"):
            return HANG_GUARD.run(lambda: path.stat().st_size, seconds, f"head {path}"), None

    def sweep(self, prefix: str, *, older_than_seconds: float, seconds: float) -> list[str]:
        now, swept = time.time(), []

        def sweep_all() -> None:
            for path in (self._root / prefix).rglob("*#*"):
                if UNFINISHED.fullmatch(path.name) and now - path.stat().st_mtime > older_than_seconds:
                    path.unlink(missing_ok=True)
                    swept.append(str(path.relative_to(self._root)))

        with os_errors_as_store_errors(f"sweep {self._root / prefix}"):
            HANG_GUARD.run(sweep_all, seconds, f"sweep {self._root / prefix}")
        return swept


def _write(file: _File, data: memoryview, start: int) -> None:
    whole = len(data) // _BLOCK * _BLOCK
    if file.direct is not None and whole >= _SMALLEST_DIRECT and start % _BLOCK == 0:
        try:
            written = os.pwrite(file.direct, data[:whole], start)
            data, start = data[written:], start + written
        except OSError as error:
            if error.errno != errno.EINVAL:  # memory or disk with another alignment: use the page cache
                raise
    while data and not file.hung:
        written = os.pwrite(file.cached, data, start)
        data, start = data[written:], start + written


class os_errors_as_store_errors:  # noqa: N801 - reads as a phrase
    def __init__(self, what: str, otherwise: type[StoreError] = StoreUnavailable) -> None:
        self._what = what
        self._otherwise = otherwise

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, OSError):
            return
        words = f"{self._what}: {error.strerror or error}"
        if isinstance(error, FileNotFoundError):
            raise ObjectNotFound(words) from error
        if error.errno in _FULL:
            raise StoreFull(f"{words}; no space; fix: free space, or a store on another disk") from error
        if error.errno in _FORBIDDEN:
            raise StoreForbidden(f"{words}; fix: the folder's owner and permissions") from error
        raise self._otherwise(words) from error


_SMALLEST_PART = 5 * 2**20  # S3's limit for every part but the last


class UploadSink(Protocol):
    """An upload target for objects in parts. Keys are relative to its root. Checksums are CRC64NVME.

    `begin` starts an upload, and its result is passed to `put_part`, `finish` and `abort`. `put_part` may run in
    several threads at once. `finish` returns the store's checksum, and `size` returns (bytes, checksum); the checksum
    is None if the store gives none.
    """

    def begin(self, key: str, size: int, *, parts: int, seconds: float) -> Any: ...

    def put_part(
        self, begun: Any, number: int, start: int, body: Buffer, crc: int, *, seconds: float
    ) -> UploadedPart: ...

    def finish(
        self, begun: Any, parts: Sequence[UploadedPart], crcs: Sequence[int], whole: int, *, seconds: float
    ) -> int | None: ...

    def abort(self, begun: Any, *, seconds: float) -> None: ...

    def size(self, key: str, *, seconds: float) -> tuple[int, int | None]: ...

    def sweep(self, prefix: str, *, older_than_seconds: float, seconds: float) -> list[str]:
        """Abort the unfinished uploads below `prefix` that are older than `older_than_seconds`. Returns their keys."""
        ...


def open_sink(uri: str, throttle: Throttle) -> UploadSink:
    """Open the upload target for ``s3://bucket/prefix`` or a folder, as in `Store.uri`."""
    if uri.startswith("s3://"):
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        return BucketSink(Bucket(bucket, find_account(), throttle), prefix)
    return FolderSink(Path(uri), throttle)


class BucketSink:
    """An upload target in a bucket. A single part is sent as a plain put, several parts as a multipart upload."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix.strip("/")

    def begin(self, key: str, size: int, *, parts: int, seconds: float) -> MultipartUpload:
        if parts > LARGEST_COUNT or (parts > 1 and size < (parts - 1) * _SMALLEST_PART):
            raise StoreError(f"{key}: {size} bytes cannot be put in {parts} parts: 5 MiB each, at most {LARGEST_COUNT}")
        if parts == 1:
            return MultipartUpload(self._full(key), "")
        return self._bucket.create(self._full(key), seconds=seconds)

    def put_part(
        self, begun: MultipartUpload, number: int, start: int, body: Buffer, crc: int, *, seconds: float
    ) -> UploadedPart:
        if not begun.id:
            return UploadedPart(number, "", self._bucket.put(begun.key, body, crc, seconds=seconds))
        return self._bucket.put_part(begun, number, body, crc, seconds=seconds)

    def finish(
        self, begun: MultipartUpload, parts: Sequence[UploadedPart], crcs: Sequence[int], whole: int, *, seconds: float
    ) -> int | None:
        if not begun.id:
            return parts[0].crc64nvme
        return self._bucket.complete(begun, parts, crcs, whole, seconds=seconds)

    def abort(self, begun: MultipartUpload, *, seconds: float) -> None:
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
                except ObjectNotFound:  # another process swept it
                    continue
                swept.append(upload.key)
        return swept

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key
