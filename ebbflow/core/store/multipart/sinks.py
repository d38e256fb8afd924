"""Upload targets that receive an object in parts: a bucket or a folder.

Checksums are CRC64NVME: 64-bit integers in this module, base64 of the 8 big-endian bytes in
requests. Each part is sent with its checksum, and so is the whole object; stores that support these
checksums verify them.

In a folder, large blocks bypass the page cache where the file system allows it. Writing them
through the page cache takes about ten times the processor time and evicts cached training data
(measured on ext4).
"""

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

from ebbflow.core.errors import ObjectNotFound, StoreError, StoreTimeout, StoreUnavailable
from ebbflow.core.store.errors import as_store_errors
from ebbflow.core.store.folder import HANG_GUARD, UNFINISHED, create_file, sync_folders
from ebbflow.core.store.marker import StoreMarker, find_marker
from ebbflow.core.store.multipart.requests import (
    Buffer,
    S3Account,
    S3Client,
    S3Response,
    Throttle,
    find_account,
)
from ebbflow.core.store.s3 import split_uri

_CHECKSUM = "x-amz-checksum-crc64nvme"
LARGEST_COUNT = 10_000  # S3's limit on the parts of one object
_SMALLEST_PART = 5 * 2**20  # S3's limit for every part but the last
_BLOCK = 4096
_SMALLEST_DIRECT = 2**20
_SHORTEST_SECONDS = 0.05


@dataclass(frozen=True)
class UploadedPart:
    """A part of an object that the store has received."""

    number: int  # counted from 1
    etag: str
    crc64nvme: int | None  # the checksum that the store computed, None if it gives none


class UploadSink(Protocol):
    """Upload target for objects in parts.

    Keys are relative to its root; `seconds` limits each request.

    `begin` starts an upload; pass its result to `put_part`, `finish` and `abort`. `put_part` may
    run in several threads at once. `finish` takes the checksums of the parts (`crcs`) and of the
    whole object (`whole`), and returns the checksum that the store computed, or None if the store
    computes none. `size` returns the object's size in bytes and the store's checksum or None.
    `sweep` aborts the unfinished uploads below a prefix that are older than a limit, and returns
    their keys.
    """

    def begin(self, key: str, size: int, *, parts: int, seconds: float) -> Any: ...

    def put_part(
        self, begun: Any, number: int, start: int, body: Buffer, crc: int, *, seconds: float
    ) -> UploadedPart: ...

    def finish(
        self,
        begun: Any,
        parts: Sequence[UploadedPart],
        crcs: Sequence[int],
        whole: int,
        *,
        seconds: float,
    ) -> int | None: ...

    def abort(self, begun: Any, *, seconds: float) -> None: ...

    def size(self, key: str, *, seconds: float) -> tuple[int, int | None]: ...

    def sweep(self, prefix: str, *, older_than_seconds: float, seconds: float) -> list[str]: ...


@dataclass(frozen=True)
class MultipartUpload:
    """A multipart upload that has begun and is not yet finished.

    Its `id` is empty if the object is sent in one put request instead.
    """

    key: str
    id: str


class BucketSink:
    """Upload target in a bucket.

    An object of one part is sent as a plain put, a larger one as a multipart upload.
    """

    def __init__(
        self, bucket: str, account: Callable[[], S3Account], throttle: Throttle, prefix: str = ""
    ) -> None:
        self._client = S3Client(bucket, account)
        self._throttle = throttle
        self._prefix = prefix.strip("/")

    def begin(self, key: str, size: int, *, parts: int, seconds: float) -> MultipartUpload:
        if parts > LARGEST_COUNT or (parts > 1 and size < (parts - 1) * _SMALLEST_PART):
            raise StoreError(
                f"{key}: {size} bytes cannot be put in {parts} parts: 5 MiB each, at most "
                f"{LARGEST_COUNT}"
            )
        full = self._full(key)
        if parts == 1:
            return MultipartUpload(full, "")
        headers = {"x-amz-checksum-algorithm": "CRC64NVME", "x-amz-checksum-type": "FULL_OBJECT"}
        answer = self._client.send(
            "POST", full, query={"uploads": ""}, headers=headers, seconds=seconds
        )
        found = _parse(answer).findtext("UploadId")
        if not found:
            raise StoreUnavailable(
                f"create upload of {full}: the answer has no UploadId: {answer.body[:200]!r}"
            )
        return MultipartUpload(full, found)

    def put_part(
        self,
        begun: MultipartUpload,
        number: int,
        start: int,  # noqa: ARG002 (the interface of all sinks)
        body: Buffer,
        crc: int,
        *,
        seconds: float,
    ) -> UploadedPart:
        if begun.id:
            query = {"partNumber": str(number), "uploadId": begun.id}
        else:
            query = {}
        headers = {_CHECKSUM: _encoded(crc)}
        limits: dict[str, Any] = {"seconds": seconds, "throttle": self._throttle}
        answer = self._client.send(
            "PUT", begun.key, query=query, headers=headers, body=body, **limits
        )
        etag = answer.headers.get("etag", "")
        if begun.id and not etag:
            raise StoreUnavailable(f"part {number} of {begun.key}: the answer has no ETag")
        return UploadedPart(number, etag, _stated(answer))

    def finish(
        self,
        begun: MultipartUpload,
        parts: Sequence[UploadedPart],
        crcs: Sequence[int],
        whole: int,
        *,
        seconds: float,
    ) -> int | None:
        if not begun.id:
            return parts[0].crc64nvme
        root = ElementTree.Element(
            "CompleteMultipartUpload", xmlns="http://s3.amazonaws.com/doc/2006-03-01/"
        )
        for part, crc in zip(parts, crcs, strict=True):
            node = ElementTree.SubElement(root, "Part")
            about = {
                "PartNumber": str(part.number),
                "ETag": part.etag,
                "ChecksumCRC64NVME": _encoded(crc),
            }
            for name, text in about.items():
                ElementTree.SubElement(node, name).text = text
        about = {
            _CHECKSUM: _encoded(whole),
            "x-amz-checksum-type": "FULL_OBJECT",
            "content-type": "application/xml",
        }
        query = {"uploadId": begun.id}
        body = ElementTree.tostring(root)
        answer = self._client.send(
            "POST", begun.key, query=query, headers=about, body=body, seconds=seconds
        )
        document = _parse(answer)
        if document.tag == "Error":  # S3 answers 200 at once, and any error follows in the body
            cause = f"{document.findtext('Code')}: {document.findtext('Message')}"
            raise StoreUnavailable(f"complete {begun.key}: {cause}")
        stated = document.findtext("ChecksumCRC64NVME")
        if stated:
            return _decoded(stated)
        return _stated(answer)

    def abort(self, begun: MultipartUpload, *, seconds: float) -> None:
        if begun.id:
            self._client.send("DELETE", begun.key, query={"uploadId": begun.id}, seconds=seconds)

    def size(self, key: str, *, seconds: float) -> tuple[int, int | None]:
        headers = {"x-amz-checksum-mode": "ENABLED"}
        answer = self._client.send("HEAD", self._full(key), headers=headers, seconds=seconds)
        return int(answer.headers["content-length"]), _stated(answer)

    def sweep(self, prefix: str, *, older_than_seconds: float, seconds: float) -> list[str]:
        end = time.monotonic() + seconds
        swept = []
        for upload, age_seconds in self._unfinished(self._full(prefix), seconds):
            left = end - time.monotonic()
            if age_seconds > older_than_seconds and left > 0:
                with contextlib.suppress(ObjectNotFound):  # another process swept it
                    self.abort(upload, seconds=left)
                    swept.append(upload.key)
        return swept

    def _unfinished(self, prefix: str, seconds: float) -> Iterator[tuple[MultipartUpload, float]]:
        """Yield each unfinished upload below `prefix` with its age in seconds, by the store's
        clock.
        """
        query: dict[str, str] | None = {"uploads": "", "prefix": prefix}
        while query is not None:
            answer = self._client.send("GET", "", query=query, seconds=seconds)
            document = _parse(answer)
            now = parsedate_to_datetime(answer.headers["date"]).timestamp()
            for node in document.findall("Upload"):
                begun = datetime.fromisoformat(node.findtext("Initiated") or "").timestamp()
                yield (
                    MultipartUpload(node.findtext("Key") or "", node.findtext("UploadId") or ""),
                    now - begun,
                )
            key = document.findtext("NextKeyMarker") or ""
            upload = document.findtext("NextUploadIdMarker") or ""
            more = document.findtext("IsTruncated") == "true"
            if more:
                query = query | {"key-marker": key, "upload-id-marker": upload}
            else:
                query = None

    def _full(self, key: str) -> str:
        if self._prefix:
            return f"{self._prefix}/{key}"
        return key


@dataclass
class _File:
    """A file that is still being written in parts."""

    path: Path
    unfinished: Path  # path of the file until it is finished and renamed to `path`
    cached: int  # descriptor that writes through the page cache
    direct: int | None  # second descriptor, which bypasses the page cache; None if unavailable
    hung: bool = False  # an abandoned call may still use the descriptors, so they are never closed

    def run(self, call: Callable[[], None], seconds: float) -> None:
        """Run `call`, which operates on the file, within `seconds`.

        Raises StoreTimeout at the deadline. After that, every call raises StoreError, because the
        abandoned call may still be running.
        """
        if self.hung:
            raise StoreError(f"put {self.path}: an operation on this file hangs")
        try:
            HANG_GUARD.run(call, seconds, f"put {self.path}")
        except StoreTimeout:
            self.hung = True
            raise

    def write(self, data: memoryview, start: int) -> None:
        whole = len(data) // _BLOCK * _BLOCK
        if self.direct is not None and whole >= _SMALLEST_DIRECT and start % _BLOCK == 0:
            try:
                written = os.pwrite(self.direct, data[:whole], start)
                data = data[written:]
                start = start + written
            except OSError as error:
                # Memory or disk with another alignment: use the page cache
                if error.errno != errno.EINVAL:
                    raise
        while data and not self.hung:
            written = os.pwrite(self.cached, data, start)
            data = data[written:]
            start = start + written

    def close(self) -> None:
        os.close(self.cached)
        if self.direct is not None:
            os.close(self.direct)


class FolderSink:
    """Upload target in a folder.

    Parts are written to a temporary file, which is synced and renamed at the end.
    """

    def __init__(self, root: Path, throttle: Throttle, marker: StoreMarker | None = None) -> None:
        self._root = root
        self._throttle = throttle
        self._marker = marker

    def begin(self, key: str, size: int, *, parts: int, seconds: float) -> _File:  # noqa: ARG002 (the interface of all sinks)
        path = self._root / key
        unfinished = path.with_name(f"{path.name}#{os.getpid()}")

        def opened() -> _File:
            self._check_marker()
            cached = create_file(unfinished, os.O_RDWR | os.O_NONBLOCK, 0o666)
            direct = None
            if size >= _SMALLEST_DIRECT and hasattr(os, "O_DIRECT"):
                with contextlib.suppress(OSError):
                    direct = os.open(unfinished, os.O_WRONLY | os.O_DIRECT)
            return _File(path, unfinished, cached, direct)

        with as_store_errors("put", str(path), StoreUnavailable):
            return HANG_GUARD.run(opened, seconds, f"put {path}")

    def put_part(
        self,
        begun: _File,
        number: int,
        start: int,
        body: Buffer,
        crc: int,  # noqa: ARG002 (the interface of all sinks)
        *,
        seconds: float,
    ) -> UploadedPart:
        view = memoryview(body).cast("B")
        end = time.monotonic() + seconds
        step = self._throttle.slice_bytes or max(len(view), 1)
        step = -(-step // _BLOCK) * _BLOCK
        with as_store_errors("put", str(begun.path), StoreUnavailable):
            for at in range(0, len(view), step):
                piece = view[at : at + step]
                self._throttle.take(len(piece))
                begun.run(
                    partial(begun.write, piece, start + at),
                    max(end - time.monotonic(), _SHORTEST_SECONDS),
                )
        return UploadedPart(number, "", None)

    def finish(
        self,
        begun: _File,
        parts: Sequence[UploadedPart],  # noqa: ARG002 (the interface of all sinks)
        crcs: Sequence[int],  # noqa: ARG002 (the interface of all sinks)
        whole: int,  # noqa: ARG002 (the interface of all sinks)
        *,
        seconds: float,
    ) -> int | None:
        def finished() -> None:
            os.fsync(begun.cached)
            os.replace(begun.unfinished, begun.path)
            sync_folders(begun.path.parent, self._root)
            self._check_marker()

        # Not curable: a second sync would not report the failure again
        with as_store_errors("put", str(begun.path)):
            begun.run(finished, seconds)
            begun.close()
        return None

    def abort(self, begun: _File, *, seconds: float) -> None:
        with as_store_errors("abort", str(begun.path), StoreUnavailable):
            HANG_GUARD.run(
                lambda: begun.unfinished.unlink(missing_ok=True), seconds, f"abort {begun.path}"
            )
            if not begun.hung:
                begun.close()

    def size(self, key: str, *, seconds: float) -> tuple[int, int | None]:
        path = self._root / key
        with as_store_errors("head", str(path), StoreUnavailable):
            return HANG_GUARD.run(lambda: path.stat().st_size, seconds, f"head {path}"), None

    def sweep(self, prefix: str, *, older_than_seconds: float, seconds: float) -> list[str]:
        folder = self._root / prefix
        now = time.time()
        swept = []

        def sweep_all() -> None:
            for path in folder.rglob("*#*"):
                if (
                    UNFINISHED.fullmatch(path.name)
                    and now - path.stat().st_mtime > older_than_seconds
                ):
                    path.unlink(missing_ok=True)
                    swept.append(str(path.relative_to(self._root)))

        with as_store_errors("sweep", str(folder), StoreUnavailable):
            HANG_GUARD.run(sweep_all, seconds, f"sweep {folder}")
        return swept

    def _check_marker(self) -> None:
        if self._marker is not None:
            self._marker.check_folder()


def open_sink(uri: str, throttle: Throttle) -> UploadSink:
    """Open the upload target at `uri`: ``s3://bucket/prefix`` or the path of a folder."""
    if uri.startswith("s3://"):
        bucket, prefix = split_uri(uri)
        return BucketSink(bucket, find_account(), throttle, prefix)
    return FolderSink(Path(uri), throttle, find_marker(uri))


def _encoded(crc64nvme: int) -> str:
    return base64.b64encode(crc64nvme.to_bytes(8, "big")).decode()


def _decoded(text: str) -> int | None:
    """Decode a base64 checksum to an integer.

    Return None for a composite checksum ("…-3": a checksum of the parts' checksums).
    """
    if "-" in text:
        return None
    return int.from_bytes(base64.b64decode(text), "big")


def _stated(answer: S3Response) -> int | None:
    text = answer.headers.get(_CHECKSUM)
    if text:
        return _decoded(text)
    return None


def _parse(answer: S3Response) -> ElementTree.Element:
    """Parse an XML response and strip its namespace, which only some stores send."""
    try:
        document = ElementTree.fromstring(answer.body)
    except ElementTree.ParseError as error:
        raise StoreUnavailable(f"the answer is not XML: {answer.body[:200]!r}") from error
    for node in document.iter():
        node.tag = node.tag.rpartition("}")[2]
    return document
