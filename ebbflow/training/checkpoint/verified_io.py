"""Compute checksums, retry until a deadline, and read and write objects of the store with
verification.

Each chunk of data has a CRC64NVME checksum, computed at 8 GB/s per core. The checksum of a whole
object is combined from those of its chunks, so the data is read only once.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from awscrt.checksums import combine_crc64nvme
from awscrt.checksums import crc64nvme as _crc64nvme

from ebbflow.core.errors import (
    ObjectNotFound,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreMisconfigured,
    WrongStore,
)
from ebbflow.core.json_values import JsonObject
from ebbflow.core.retry import backoff_pauses, retry
from ebbflow.core.store import Store
from ebbflow.training.errors import CheckpointError, CorruptCommit

T = TypeVar("T")
CHUNK_BYTES = 16 * 2**20
Buffer = bytes | bytearray | memoryview
_crc: Callable[..., int] = _crc64nvme  # its annotation asks for bytes; it takes any buffer
_READINGS = 6


class Deadline:
    """A point in time on the monotonic clock, a given number of seconds after this object is
    created.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining_seconds(self) -> float:
        return self._end - time.monotonic()


def crc_text(data: Buffer) -> str:
    return crc_digits(_crc(data))


def chunk_crcs(data: memoryview, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """Return (CRC64NVME, length in bytes) of each chunk. Empty data is one empty chunk."""
    starts = range(0, max(len(data), 1), chunk_bytes)
    return [
        (_crc(data[start : start + chunk_bytes]), len(data[start : start + chunk_bytes]))
        for start in starts
    ]


def combine_crcs(sums: Sequence[tuple[int, int]]) -> int:
    """Return the CRC64NVME of consecutive pieces together, given each piece's (checksum, length in
    bytes).
    """
    whole = 0  # the checksum of no bytes
    for value, length in sums:
        whole = combine_crc64nvme(whole, value, length)
    return whole


def crc_of_pieces(pieces: Sequence[Buffer], value: int = 0) -> int:
    """Return one CRC64NVME over consecutive pieces; `value` is the checksum of any bytes before
    them.
    """
    for piece in pieces:
        value = _crc(piece, value)
    return value


def canonical_json(document: JsonObject) -> bytes:
    """Serialise to ASCII JSON with sorted keys and no spaces.

    Raises ValueError for NaN and infinity.
    """
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def crc_digits(crc: int) -> str:
    """Format a checksum as 16 hexadecimal digits, since a JSON number would lose precision."""
    return f"{crc:016x}"


def sha256_text(data: Buffer) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(document: JsonObject) -> bytes:
    """Serialise a document to canonical JSON with its checksum in the field "seal".

    This is for objects whose key contains no checksum.
    """
    return canonical_json({**document, "seal": crc_text(canonical_json(document))})


def unseal(data: bytes, what: str) -> dict[str, Any]:
    """Parse a document that `seal` wrote.

    Raises CorruptCommit if any byte has changed; its message names `what`.
    """
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


def is_curable(error: Exception) -> bool:
    return isinstance(error, StoreError) and not isinstance(
        error, StoreForbidden | StoreFull | StoreMisconfigured | WrongStore
    )


def retry_until(
    deadline: Deadline,
    what: str,
    operation: Callable[[], T],
    *,
    curable: Callable[[Exception], bool] = is_curable,
    longest_seconds: float = 2.0,
    where: str = "",
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Call `operation` and return its result.

    If it raises an error that `curable` accepts, retry until the deadline.

    At the deadline, raise a StoreError as a CheckpointError, whose message has `what`, the number
    of tries, `where` and the cause. Other errors are raised unchanged.
    """

    began = time.monotonic()

    def give_up(error: Exception, tries: int) -> Exception:
        if not isinstance(error, StoreError):
            return error
        seconds = time.monotonic() - began
        tried = (
            f"{tries} {'try' if tries == 1 else 'tries'} in {seconds:.3g} of {deadline.seconds:g} s"
        )
        return CheckpointError(
            f"{what}: gave up after {tried}: {f'{where}: ' if where else ''}{error}"
        )

    return retry(
        operation,
        left=lambda: deadline.remaining_seconds,
        curable=lambda error, _: curable(error),
        give_up=give_up,
        pauses=backoff_pauses(longest_seconds=longest_seconds),
        sleep=sleep,
    )


def fetch_verified(
    store: Store, key: str, parse: Callable[[bytes, str], T], what: str | None = None
) -> T:
    """Fetch an object and return `parse(bytes, what)`.

    Fetch it again if `parse` raises CorruptCommit.

    Damage in transit differs between reads, while damage in the store does not. So CorruptCommit is
    raised only when two consecutive reads return the same bytes, or after six reads.
    """
    before = None
    readings = 0
    while True:
        data = store.get(key)
        readings = readings + 1
        try:
            return parse(data, what or key)
        except CorruptCommit:
            if data == before or readings == _READINGS:
                raise
        before = data


def put_verified(store: Store, key: str, data: bytes) -> None:
    """Put an object and read it back. Raises StoreError.

    In a remote store, a put that failed but did store the object is no error. In a folder it is
    one, because its bytes may be readable and not durable.
    """
    cause = None
    try:
        store.put(key, data)
    except StoreError as error:
        if store.local_path(key) is not None:
            raise
        cause = error
    try:
        found = store.get(key)
    except ObjectNotFound as error:
        raise cause or error from error
    if found != data:
        raise cause or StoreError(
            f"put {store.uri}/{key}: read back {len(found)} bytes that differ from the "
            f"{len(data)} put"
        )
