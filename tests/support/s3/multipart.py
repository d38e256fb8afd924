"""Multipart uploads: nothing of one is visible until it is complete, and then all of it is."""

from __future__ import annotations

import binascii
import hashlib
import secrets
from xml.etree import ElementTree

from tests.support.s3 import checksums
from tests.support.s3.faults import Conduct
from tests.support.s3.objects import Bucket, Stored, Upload, etag_of
from tests.support.s3.refusals import Refused
from tests.support.s3.request import Answer, Request
from tests.support.s3.xml_text import document, time_text

_MOST_PARTS = 10_000


def _create(request: Request, bucket: Bucket, _: Conduct) -> Answer:
    algorithm = (request.header("x-amz-checksum-algorithm") or "").lower() or None
    if algorithm is not None and algorithm not in checksums.ALGORITHMS:
        raise Refused("InvalidRequest", f"x-amz-checksum-algorithm: {algorithm}")
    metadata = {
        name: value for name, value in request.headers.items() if name.startswith("x-amz-meta-")
    }
    upload_id = secrets.token_urlsafe(18)
    bucket.uploads[upload_id] = Upload(request.key, algorithm, metadata)
    fields = [("Bucket", bucket.name), ("Key", request.key), ("UploadId", upload_id)]
    return Answer(body=document("InitiateMultipartUploadResult", fields))


def _part(request: Request, bucket: Bucket, _: Conduct) -> Answer:
    upload = _upload(request, bucket)
    sums = checksums.check(request)
    try:
        number = int(request.query["partNumber"])
    except (KeyError, ValueError):
        raise Refused("InvalidArgument", "partNumber must be a number") from None
    if not 1 <= number <= _MOST_PARTS:
        raise Refused("InvalidArgument", f"partNumber {number} is not between 1 and {_MOST_PARTS}")
    etag = etag_of(request.body)
    upload.parts[number] = (request.body, etag)
    return Answer(
        headers={
            "ETag": f'"{etag}"',
            **{f"{checksums.PREFIX}{name}": value for name, value in sums.items()},
        }
    )


def _complete(request: Request, bucket: Bucket, conduct: Conduct) -> Answer:
    upload = _upload(request, bucket)
    parts = _chosen_parts(request, upload, conduct.minimum_part_bytes)
    if not conduct.racy:
        _refuse_existing(request, bucket)
    data = b"".join(part for part, _ in parts)
    digests = b"".join(binascii.unhexlify(etag) for _, etag in parts)
    # The sum of the whole, which S3 keeps for this algorithm; those of other algorithms are
    # composites, not kept here.
    sums = {"crc64nvme": checksums.compute("crc64nvme", data)}
    stated = request.header(f"{checksums.PREFIX}crc64nvme")
    if stated is not None and stated != sums["crc64nvme"]:
        raise Refused(
            "BadDigest", f"CRC64NVME of the object: {stated} was sent, it has {sums['crc64nvme']}"
        )
    stored = Stored(data, f"{hashlib.md5(digests).hexdigest()}-{len(parts)}", sums, upload.metadata)
    bucket.put(request.key, stored, conduct.stale_seconds(request.key))
    del bucket.uploads[request.query["uploadId"]]
    fields = [
        ("Location", request.path),
        ("Bucket", bucket.name),
        ("Key", request.key),
        ("ETag", f'"{stored.etag}"'),
    ]
    sums_shown = [("ChecksumCRC64NVME", sums["crc64nvme"]), ("ChecksumType", "FULL_OBJECT")]
    return Answer(body=document("CompleteMultipartUploadResult", [*fields, *sums_shown]))


def _chosen_parts(request: Request, upload: Upload, minimum: int) -> list[tuple[bytes, str]]:
    """Those that the request names.

    Raises Refused: MalformedXML, InvalidPart, InvalidPartOrder, EntityTooSmall.
    """
    try:
        root = ElementTree.fromstring(request.body)
        rows = [_children(element) for element in root if element.tag.endswith("Part")]
        named = [(int(row["PartNumber"]), row["ETag"].strip('"'), row) for row in rows]
    except (ElementTree.ParseError, KeyError, ValueError) as error:
        raise Refused("MalformedXML", repr(error)) from error
    numbers = [number for number, _, _ in named]
    if not numbers:
        raise Refused("MalformedXML", "no part is named")
    if numbers != sorted(set(numbers)):
        raise Refused("InvalidPartOrder", f"parts in the order {numbers}")
    chosen = []
    for number, etag, row in named:
        if upload.parts.get(number, (b"", ""))[1] != etag:
            raise Refused("InvalidPart", f"part {number} with the ETag {etag} was not uploaded")
        data = upload.parts[number][0]
        for algorithm in checksums.ALGORITHMS:
            stated = row.get(f"Checksum{algorithm.upper()}")
            if stated is not None and stated != checksums.compute(algorithm, data):
                raise Refused("InvalidPart", f"part {number} has not the {algorithm} {stated}")
        chosen.append(upload.parts[number])
    small = [
        number
        for (number, _, _), (data, _) in zip(named[:-1], chosen[:-1], strict=True)
        if len(data) < minimum
    ]
    if small:
        raise Refused(
            "EntityTooSmall", f"parts {small} have less than {minimum} bytes, and are not the last"
        )
    return chosen


def _abort(request: Request, bucket: Bucket, _: Conduct) -> Answer:
    _upload(request, bucket)
    del bucket.uploads[request.query["uploadId"]]
    return Answer(204)


def _list_uploads(request: Request, bucket: Bucket, _: Conduct) -> Answer:
    prefix = request.query.get("prefix", "")
    rows = [
        (
            "Upload",
            [("Key", upload.key), ("UploadId", name), ("Initiated", time_text(upload.begun))],
        )
        for name, upload in sorted(
            bucket.uploads.items(), key=lambda pair: (pair[1].key, pair[1].begun)
        )
        if upload.key.startswith(prefix)
    ]
    head = [("Bucket", bucket.name), ("Prefix", prefix), ("IsTruncated", "false")]
    return Answer(body=document("ListMultipartUploadsResult", [*head, *rows]))


def _list_parts(request: Request, bucket: Bucket, _: Conduct) -> Answer:
    upload = _upload(request, bucket)
    rows = [
        ("Part", [("PartNumber", str(number)), ("ETag", f'"{etag}"'), ("Size", str(len(data)))])
        for number, (data, etag) in sorted(upload.parts.items())
    ]
    head = [("Bucket", bucket.name), ("Key", upload.key), ("IsTruncated", "false")]
    return Answer(body=document("ListPartsResult", [*head, *rows]))


def _upload(request: Request, bucket: Bucket) -> Upload:
    upload = bucket.uploads.get(request.query["uploadId"])
    if upload is None or upload.key != request.key:
        raise Refused(
            "NoSuchUpload", f"there is no upload {request.query['uploadId']} of {request.key}"
        )
    return upload


def _refuse_existing(request: Request, bucket: Bucket) -> None:
    if request.header("if-none-match") == "*" and request.key in bucket.objects:
        raise Refused("PreconditionFailed", f"{request.key} is there already")


def _children(element: ElementTree.Element) -> dict[str, str]:
    return {child.tag.rpartition("}")[2]: child.text or "" for child in element}


OPERATIONS = {
    "create": _create,
    "part": _part,
    "complete": _complete,
    "abort": _abort,
    "uploads": _list_uploads,
    "parts": _list_parts,
}
