"""What S3 does with one whole request: buckets and objects.

Strict: what is not known here is refused.
"""

from __future__ import annotations

import re
from email.utils import formatdate
from xml.etree import ElementTree

from tests.support.s3 import checksums, multipart
from tests.support.s3.faults import Conduct
from tests.support.s3.listing import list_objects
from tests.support.s3.objects import Bucket, Stored, etag_of
from tests.support.s3.refusals import Refused
from tests.support.s3.request import Answer, Request
from tests.support.s3.xml_text import document

_SUBRESOURCES = {
    "acl",
    "cors",
    "lifecycle",
    "object-lock",
    "policy",
    "retention",
    "tagging",
    "versioning",
    "versions",
}
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


# One answer for each kind of request.
def operation_of(request: Request) -> str:  # noqa: PLR0911
    """A short name, which faults go by: put, get, head, delete, list, part, create, complete, abort
    …
    """
    query = request.query
    if not request.key:
        if request.method == "POST" and "delete" in query:
            return "delete_many"
        if request.method == "GET" and request.bucket:
            if "uploads" in query:
                return "uploads"
            if "location" in query:
                return "location"
            return "list"
        return f"bucket_{request.method.lower()}"
    if "uploadId" in query:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort", "GET": "parts"}.get(
            request.method, "unknown"
        )
    if request.method == "POST" and "uploads" in query:
        return "create"
    return request.method.lower()


def check_precondition(request: Request, bucket: Bucket) -> None:
    """If-None-Match: * and If-Match on what is to be written."""
    none = request.header("if-none-match")
    match = request.header("if-match")
    if none not in (None, "*"):
        raise Refused("NotImplemented", f"If-None-Match: {none} on a write; only * is known")
    with bucket.lock:
        present = bucket.objects.get(request.key)
        if none and present is not None:
            raise Refused("PreconditionFailed", f"{request.key} is there already")
        if match and present is None:
            raise Refused("NoSuchKey", f"there is no object {request.key}")
        if match and present is not None and match.strip('"') != present.etag:
            raise Refused("PreconditionFailed", f"{request.key} has the ETag {present.etag}")


def apply(request: Request, bucket: Bucket, conduct: Conduct) -> Answer:
    """Do what is asked, atomically. Raises Refused."""
    operation = operation_of(request)
    if _SUBRESOURCES & set(request.query) or request.header("x-amz-copy-source"):
        raise Refused("NotImplemented", f"{request.method} {request.target}")
    handler = {
        "put": _put,
        "get": _get,
        "head": _get,
        "delete": _delete,
        "delete_many": _delete_many,
        "list": lambda r, b, _: list_objects(r, b),
        "location": lambda *_: Answer(body=document("LocationConstraint", "")),
        "bucket_head": lambda *_: Answer(),
        **multipart.OPERATIONS,
    }.get(operation)
    if handler is None:
        raise Refused("NotImplemented", f"{request.method} {request.target}")
    with bucket.lock:
        return handler(request, bucket, conduct)


def metadata_of(request: Request) -> dict[str, str]:
    return {
        name: value for name, value in request.headers.items() if name.startswith("x-amz-meta-")
    }


def sum_headers(sums: dict[str, str]) -> dict[str, str]:
    return {f"{checksums.PREFIX}{name}": value for name, value in sums.items()}


def _put(request: Request, bucket: Bucket, conduct: Conduct) -> Answer:
    found = checksums.check(request)
    if not conduct.racy:
        check_precondition(request, bucket)
    sums = found or {"crc64nvme": checksums.compute("crc64nvme", request.body)}
    stored = Stored(request.body, etag_of(request.body), sums, metadata_of(request))
    bucket.put(request.key, stored, conduct.stale_seconds(request.key))
    return Answer(headers={"ETag": f'"{stored.etag}"', **sum_headers(stored.checksums)})


def _get(request: Request, bucket: Bucket, conduct: Conduct) -> Answer:
    stored = bucket.get(request.key)
    match = request.header("if-match")
    none = request.header("if-none-match")
    if match and match.strip('"') not in (stored.etag, "*"):
        raise Refused("PreconditionFailed", f"{request.key} has the ETag {stored.etag}")
    headers = {
        "ETag": f'"{stored.etag}"',
        "Last-Modified": formatdate(stored.modified, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Type": "binary/octet-stream",
        **stored.metadata,
    }
    if none and none.strip('"') in (stored.etag, "*"):
        return Answer(304, headers=headers)
    body = stored.data
    status = 200
    wanted = request.header("range")
    span = _span(wanted, len(body)) if wanted is not None else None
    if span is not None:
        headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{len(body)}"
        body = body[span[0] : span[1]]
        status = 206
    elif (request.header("x-amz-checksum-mode") or "").upper() == "ENABLED":
        headers |= sum_headers(stored.checksums)
    return Answer(status, body, headers, content=True)


def _span(wanted: str, size: int) -> tuple[int, int] | None:
    """Half open; None where the header is to be ignored.

    Raises Refused for what cannot be satisfied.
    """
    found = _RANGE.fullmatch(wanted.strip())
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        start, end = (max(0, size - int(last)), size)
    else:
        start, end = (int(first), int(last or size) + 1)
    if start >= size or (not first and int(last) == 0) or end <= start:
        raise Refused("InvalidRange", f"{wanted} of {size} bytes")
    return start, min(end, size)


def _delete(request: Request, bucket: Bucket, conduct: Conduct) -> Answer:
    bucket.delete(request.key, conduct.stale_seconds(request.key))
    return Answer(204)


def _delete_many(request: Request, bucket: Bucket, conduct: Conduct) -> Answer:
    if not checksums.check(request) and request.header("content-md5") is None:
        raise Refused("InvalidRequest", "a deletion of many needs Content-MD5 or a checksum")
    try:
        root = ElementTree.fromstring(request.body)
    except ElementTree.ParseError as error:
        raise Refused("MalformedXML", str(error)) from error
    keys = [element.text or "" for element in root.iter() if element.tag.endswith("Key")]
    if not 0 < len(keys) <= 1000:
        raise Refused("MalformedXML", f"{len(keys)} keys; 1 to 1000 are possible")
    for key in keys:
        bucket.delete(key, conduct.stale_seconds(key))
    return Answer(body=document("DeleteResult", [("Deleted", [("Key", key)]) for key in keys]))
