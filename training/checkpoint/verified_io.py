"""Checksums, retry until a deadline, and read-back for objects of the store.

Data is covered by CRC64NVME per chunk: 8 GB/s per core, and the chunks' checksums combine to the object's without a
second read.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from awscrt.checksums import combine_crc64nvme
from awscrt.checksums import crc64nvme as _crc64nvme

from ebbflow.infra.errors import ObjectNotFound, StoreError, StoreForbidden, StoreFull, StoreMisconfigured
from ebbflow.infra.store import Store
from ebbflow.training.errors import CheckpointError, CorruptCommit

T = TypeVar("T")
CHUNK_BYTES = 16 * 2**20
Buffer = bytes | bytearray | memoryview
_crc: Callable[..., int] = _crc64nvme  # its annotation asks for bytes; it takes any buffer
_READINGS = 6


def crc_text(data: Buffer) -> str:
    return crc_digits(_crc(data))


def chunk_crcs(data: memoryview, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """Return (CRC64NVME, length) of each chunk; one empty chunk for no data."""
    starts = range(0, max(len(data), 1), chunk_bytes)
    return [(_crc(data[start : start + chunk_bytes]), len(data[start : start + chunk_bytes])) for start in starts]


def combine_crcs(sums: Sequence[tuple[int, int]]) -> int:
    """Return the CRC64NVME of concatenated pieces from (checksum, length) of each."""
    whole = 0
    for number, (value, length) in enumerate(sums):
        whole = combine_crc64nvme(whole, value, length) if number else value
    return whole


def crc_of_pieces(pieces: Sequence[Buffer], value: int = 0) -> int:
    """Return the CRC64NVME of concatenated pieces. value: checksum of the bytes before them."""
    for piece in pieces:
        value = _crc(piece, value)
    return value


def canonical_json(document: dict[str, Any]) -> bytes:
    """Serialise to JSON with sorted keys, without spaces, in ASCII. Raises ValueError for NaN and infinity."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def crc_digits(crc: int) -> str:
    """Format a checksum as 16 hexadecimal digits; JSON numbers would lose precision."""
    return f"{crc:016x}"


def sha256_text(data: Buffer) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(document: dict[str, Any]) -> bytes:
    """Serialise to canonical JSON that carries a checksum of its content, for keys that contain none."""
    return canonical_json({**document, "seal": crc_text(canonical_json(document))})


def unseal(data: bytes, what: str) -> dict[str, Any]:
    """Parse a sealed document. Raises CorruptCommit naming `what` if any byte has changed."""
    try:
        document = json.loads(data)
        stated = document.pop("seal")
        content = canonical_json(document)
        actual = crc_text(content)
        entry = f'"seal":"{stated}"'.encode()
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CorruptCommit(f"{what}: not a sealed JSON document: {error!r}") from error
    # Compare bytes too: JSON has many spellings of one content.
    spelled = content in (data.replace(b"," + entry, b"", 1), data.replace(entry + b",", b"", 1))
    if stated != actual or not spelled:
        raise CorruptCommit(f"{what}: its seal says {stated}, its content is {actual}")
    return document


class Deadline:
    """A point in time, `seconds` from now on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining_seconds(self) -> float:
        return self._end - time.monotonic()


def backoff_pauses(*, first_seconds: float = 0.02, longest_seconds: float = 2.0) -> Iterator[float]:
    """Yield doubling pauses in seconds, with jitter so that ranks that failed together do not retry together."""
    pause = first_seconds
    while True:
        yield random.uniform(first_seconds, pause)
        pause = min(pause * 2, longest_seconds)


def is_curable(error: StoreError) -> bool:
    """Whether waiting may cure an error of the store."""
    return not isinstance(error, StoreForbidden | StoreFull | StoreMisconfigured)


def retry_until(
    deadline: Deadline,
    what: str,
    operation: Callable[[], T],
    *,
    curable: Callable[[StoreError], bool] = is_curable,
    longest_seconds: float = 2.0,
    where: str = "",
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Repeat `operation` while it raises a StoreError that waiting may cure.

    Args:
        where: the part of `what` that failed, for the error.
        longest_seconds: of a pause.

    Raises:
        CheckpointError: names `what`, the number of tries and the cause.
    """
    for tries, pause in enumerate(backoff_pauses(longest_seconds=longest_seconds), start=1):
        try:
            return operation()
        except StoreError as error:
            if not curable(error) or deadline.remaining_seconds <= pause:
                tried = f"{tries} {'try' if tries == 1 else 'tries'} within {deadline.seconds:g} s"
                cause = f"{where}: {error}" if where else error
                raise CheckpointError(f"{what}: gave up after {tried}: {cause}") from error
        sleep(pause)
    raise AssertionError("pauses never end")


def fetch_verified(store: Store, key: str, parse: Callable[[bytes, str], T], what: str | None = None) -> T:
    """Fetch an object and return `parse(bytes, what)`.

    Bytes may be damaged in the store or only in transit. Transit damage differs between readings, so CorruptCommit is
    raised only if two consecutive readings are equal.

    Args:
        what: name of the object in errors; default: its key.

    Raises:
        ObjectNotFound, StoreError, and whatever `parse` raises.
    """
    before, readings = None, 0
    while True:
        data, readings = store.get(key), readings + 1
        try:
            return parse(data, what or key)
        except CorruptCommit:
            if data == before or readings == _READINGS:
                raise
        before = data


def put_verified(store: Store, key: str, data: bytes) -> None:
    """Put an object and read it back. An error of the put is ignored if the object holds these bytes afterwards.

    Raises:
        StoreError: the put's own error if the object is missing, else that other bytes were read.
    """
    try:
        store.put(key, data)
        cause = None
    except StoreError as error:
        cause = error
    try:
        found = store.get(key)
    except ObjectNotFound as error:
        raise cause or error from error
    if found != data:
        raise cause or StoreError(
            f"put {store.uri}/{key}: read back {len(found)} bytes that differ from the {len(data)} put"
        )
