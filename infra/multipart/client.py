"""A bucket seen by who uploads in parts: put, create, part, complete, abort, list what was left half done.

Checksums are CRC64NVME, as 64-bit numbers here and as base64 of 8 big-endian bytes on the wire. They go with each part
and with the whole, which stores that know them compare; what comes back is returned, None where nothing does.
"""

from __future__ import annotations

import base64
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime

from ebbflow.infra.errors import StoreAway
from ebbflow.infra.multipart.account import Account
from ebbflow.infra.multipart.requests import Answer, Buffer, Requests
from ebbflow.infra.multipart.throttle import Throttle

_CHECKSUM = "x-amz-checksum-crc64nvme"
LARGEST_COUNT = 10_000  # parts of one object, by S3


@dataclass(frozen=True)
class Upload:
    """A multipart upload under way. age_seconds: by the store's own clock, where it was listed."""

    key: str
    id: str
    age_seconds: float = 0.0


@dataclass(frozen=True)
class Part:
    """A part that the store has. crc64nvme: what the store computed, None when it does not say."""

    number: int
    etag: str
    crc64nvme: int | None


class Bucket:
    """All calls take `seconds`, for the whole request, and raise as `Requests.send` does. Thread-safe."""

    def __init__(self, name: str, account: Callable[[], Account], throttle: Throttle | None = None) -> None:
        self._requests = Requests(name, account)
        self._throttle = throttle

    def put(self, key: str, body: Buffer, crc64nvme: int, *, seconds: float) -> int | None:
        """One request for the whole object. Returns the store's checksum of it, None when it gives none."""
        answer = self._requests.send(
            "PUT", key, headers=_checksum(crc64nvme), body=body, seconds=seconds, throttle=self._throttle
        )
        return _stated(answer)

    def create(self, key: str, *, seconds: float) -> Upload:
        headers = {"x-amz-checksum-algorithm": "CRC64NVME", "x-amz-checksum-type": "FULL_OBJECT"}
        answer = self._requests.send("POST", key, query={"uploads": ""}, headers=headers, seconds=seconds)
        found = _parse(answer).findtext("UploadId")
        if not found:
            raise StoreAway(f"create upload of {key}: the answer has no UploadId: {answer.body[:200]!r}")
        return Upload(key, found)

    def put_part(self, upload: Upload, number: int, body: Buffer, crc64nvme: int, *, seconds: float) -> Part:
        """number: from 1 on."""
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
            raise StoreAway(f"part {number} of {upload.key}: the answer has no ETag")
        return Part(number, etag, _stated(answer))

    def complete(
        self, upload: Upload, parts: Sequence[Part], crcs: Sequence[int], whole: int, *, seconds: float
    ) -> int | None:
        """Put the parts together. Returns the store's checksum of the whole, None when it gives none."""
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
        if document.tag == "Error":  # S3 answers 200 at once, and an error in the body when it comes to that
            raise StoreAway(f"complete {upload.key}: {document.findtext('Code')}: {document.findtext('Message')}")
        stated = document.findtext("ChecksumCRC64NVME")
        return _decoded(stated) if stated else _stated(answer)

    def abort(self, upload: Upload, *, seconds: float) -> None:
        self._requests.send("DELETE", upload.key, query={"uploadId": upload.id}, seconds=seconds)

    def size(self, key: str, *, seconds: float) -> tuple[int, int | None]:
        """(bytes, checksum or None) of an object. Raises ObjectNotFound."""
        answer = self._requests.send("HEAD", key, headers={"x-amz-checksum-mode": "ENABLED"}, seconds=seconds)
        return int(answer.headers["content-length"]), _stated(answer)

    def uploads(self, prefix: str, *, seconds: float) -> Iterator[Upload]:
        """Uploads that were begun below `prefix` and neither completed nor aborted."""
        marker: dict[str, str] = {}
        while True:
            query = {"uploads": "", "prefix": prefix, **marker}
            answer = self._requests.send("GET", "", query=query, seconds=seconds)
            document = _parse(answer)
            now = parsedate_to_datetime(answer.headers["date"]).timestamp()
            for node in document.findall("Upload"):
                begun = _timestamp(node.findtext("Initiated") or "")
                yield Upload(node.findtext("Key") or "", node.findtext("UploadId") or "", now - begun)
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
    """None for what is no checksum of a whole: some stores give a checksum of the parts' checksums, "…-3"."""
    return None if "-" in text else int.from_bytes(base64.b64decode(text), "big")


def _stated(answer: Answer) -> int | None:
    text = answer.headers.get(_CHECKSUM)
    return _decoded(text) if text else None


def _timestamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _parse(answer: Answer) -> ElementTree.Element:
    """The document without its name space, which not all stores give."""
    try:
        document = ElementTree.fromstring(answer.body)
    except ElementTree.ParseError as error:
        raise StoreAway(f"an answer that is no XML: {answer.body[:200]!r}") from error
    for node in document.iter():
        node.tag = node.tag.rpartition("}")[2]
    return document
