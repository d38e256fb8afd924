"""The checksums that a client may send: each that it sends must be right, or the body is refused."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Callable

from awscrt.checksums import crc32c, crc64nvme

from tests.support.s3.refusals import Refused
from tests.support.s3.request import Request

PREFIX = "x-amz-checksum-"
_NO_SUMS = {f"{PREFIX}{name}" for name in ("algorithm", "mode", "type")}


def compute(algorithm: str, data: bytes) -> str:
    """As it stands in a header."""
    return base64.b64encode(ALGORITHMS[algorithm](data)).decode()


def check(request: Request) -> dict[str, str]:
    """The sums that came with the body, by algorithm.

    Raises Refused: BadDigest, InvalidDigest, InvalidRequest.
    """
    md5 = request.header("content-md5")
    if md5 is not None:
        actual = base64.b64encode(hashlib.md5(request.body).digest()).decode()
        _compare("Content-MD5", md5, actual, 16, "InvalidDigest")
    found = {}
    for name, stated in {**request.headers, **request.trailers}.items():
        if not name.startswith(PREFIX) or name in _NO_SUMS:
            continue
        algorithm = name.removeprefix(PREFIX)
        if algorithm not in ALGORITHMS:
            raise Refused("InvalidRequest", f"{name}: not a checksum that is known here")
        actual = compute(algorithm, request.body)
        _compare(name, stated, actual, len(base64.b64decode(actual)), "InvalidRequest")
        found[algorithm] = stated
    announced = request.header("x-amz-trailer")
    if announced and announced.lower() not in request.trailers:
        raise Refused("InvalidRequest", f"the trailer {announced} was announced and did not come")
    return found


def _number(compute: Callable[[bytes], int], size: int) -> Callable[[bytes], bytes]:
    return lambda data: compute(data).to_bytes(size, "big")


ALGORITHMS: dict[str, Callable[[bytes], bytes]] = {
    "crc32": _number(zlib.crc32, 4),
    "crc32c": _number(crc32c, 4),
    "crc64nvme": _number(crc64nvme, 8),
    "sha1": lambda data: hashlib.sha1(data).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
}


def _compare(name: str, stated: str, actual: str, size: int, malformed: str) -> None:
    try:
        well_formed = len(base64.b64decode(stated, validate=True)) == size
    except (binascii.Error, ValueError):
        well_formed = False
    if not well_formed:
        raise Refused(malformed, f"{name}: {stated!r} is not {size} bytes in base64")
    if stated != actual:
        raise Refused("BadDigest", f"{name}: {stated} was sent, the body has {actual}")
