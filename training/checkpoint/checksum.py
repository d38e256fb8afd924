"""CRC64NVME over chunks: 8 GB/s per core, and the chunks' sums combine to the object's without a second read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from awscrt.checksums import combine_crc64nvme, crc64nvme

from ebbflow.training.errors import CorruptCommit

CHUNK_BYTES = 16 * 2**20
Buffer = bytes | bytearray | memoryview


def crc_text(data: Buffer) -> str:
    return digits(crc64nvme(data))


def sums_of(data: memoryview, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """(CRC64NVME, length) of each chunk; of nothing, one chunk of no bytes."""
    starts = range(0, max(len(data), 1), chunk_bytes)
    return [(crc64nvme(data[start : start + chunk_bytes]), len(data[start : start + chunk_bytes])) for start in starts]


def combined(sums: Sequence[tuple[int, int]]) -> int:
    """The CRC64NVME of what lies back to back, from (sum, length) of each piece."""
    whole = 0
    for number, (value, length) in enumerate(sums):
        whole = combine_crc64nvme(whole, value, length) if number else value
    return whole


def sum_of_pieces(pieces: Sequence[Buffer], value: int = 0) -> int:
    """The CRC64NVME of pieces of memory as if they lay back to back, behind what has the sum `value`."""
    for piece in pieces:
        value = crc64nvme(piece, value)
    return value


def canonical_json(document: dict[str, Any]) -> bytes:
    """The one byte string for this content: sorted keys, no spaces, ASCII. NaN and infinity raise ValueError."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digits(crc: int) -> str:
    """16 hexadecimal digits, which JSON keeps exactly."""
    return f"{crc:016x}"


def sha256_text(data: Buffer) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(document: dict[str, Any]) -> bytes:
    """Canonical JSON that carries the checksum of its own content, for objects whose key does not."""
    return canonical_json({**document, "seal": crc_text(canonical_json(document))})


def unseal(data: bytes, what: str) -> dict[str, Any]:
    """The sealed document. Raises CorruptCommit naming `what` when any byte of it has changed."""
    try:
        document = json.loads(data)
        stated = document.pop("seal")
        content = canonical_json(document)
        actual = crc_text(content)
        entry = f'"seal":"{stated}"'.encode()
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CorruptCommit(f"{what}: not a sealed JSON document: {error!r}") from error
    # The bytes too: JSON has many spellings of one content, and a changed byte is a changed byte.
    spelled = content in (data.replace(b"," + entry, b"", 1), data.replace(entry + b",", b"", 1))
    if stated != actual or not spelled:
        raise CorruptCommit(f"{what}: its seal says {stated}, its content is {actual}")
    return document
