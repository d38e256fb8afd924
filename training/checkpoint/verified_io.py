"""Checksums, deadlines and read-back for objects of the store."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from awscrt.checksums import combine_crc64nvme, crc64nvme

from ebbflow.infra.errors import ObjectNotFound, StoreError, StoreForbidden, StoreFull, StoreMisconfigured
from ebbflow.infra.store import Store
from ebbflow.training.errors import CheckpointError, CorruptCommit

CHUNK_BYTES = 16 * 2**20
Buffer = bytes | bytearray | memoryview


def crc_text(data: Buffer) -> str:
    return crc_digits(crc64nvme(data))


def chunk_crcs(data: memoryview, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """(CRC64NVME, length) of each chunk; of nothing, one chunk of no bytes."""
    starts = range(0, max(len(data), 1), chunk_bytes)
    return [(crc64nvme(data[start : start + chunk_bytes]), len(data[start : start + chunk_bytes])) for start in starts]


def combine_crcs(sums: Sequence[tuple[int, int]]) -> int:
    """The CRC64NVME of what lies back to back, from (sum, length) of each piece."""
    whole = 0
    for number, (value, length) in enumerate(sums):
        whole = combine_crc64nvme(whole, value, length) if number else value
    return whole


def crc_of_pieces(pieces: Sequence[Buffer], value: int = 0) -> int:
    """The CRC64NVME of pieces of memory as if they lay back to back, behind what has the sum `value`."""
    for piece in pieces:
        value = crc64nvme(piece, value)
    return value


def canonical_json(document: dict[str, Any]) -> bytes:
    """The one byte string for this content: sorted keys, no spaces, ASCII. NaN and infinity raise ValueError."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def crc_digits(crc: int) -> str:
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


T = TypeVar("T")

# What waiting does not cure; who reads the message can.
NOT_RETRIED = (StoreForbidden, StoreFull, StoreMisconfigured)


class Deadline:
    """`seconds` from now, on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining_seconds(self) -> float:
        return self._end - time.monotonic()


def backoff_pauses(*, first_seconds: float = 0.02, longest_seconds: float = 2.0) -> Iterator[float]:
    """Doubling pauses with full jitter above the first, so that ranks that failed together do not return together."""
    pause = first_seconds
    while True:
        yield random.uniform(first_seconds, pause)
        pause = min(pause * 2, longest_seconds)


def retry(what: str, operation: Callable[[], T], deadline: Deadline) -> T:
    """Repeat `operation` while it raises a StoreError that time may cure.

    Raises CheckpointError naming `what`, the tries and the cause.
    """
    for tries, pause in enumerate(backoff_pauses(), start=1):
        try:
            return operation()
        except StoreError as error:
            if isinstance(error, NOT_RETRIED) or deadline.remaining_seconds <= pause:
                raise give_up_error(what, tries, deadline, error) from error
        time.sleep(pause)
    raise AssertionError("pauses never end")


def give_up_error(what: str, tries: int, deadline: Deadline, error: StoreError) -> CheckpointError:
    """The one sentence for a store that did not do what was asked, whatever the reason."""
    tried = f"{tries} {'try' if tries == 1 else 'tries'} within {deadline.seconds:g} s"
    return CheckpointError(f"{what}: gave up after {tried}: {error}")


T = TypeVar("T")
_READINGS = 6


def fetch_verified(store: Store, key: str, parse: Callable[[bytes, str], T], what: str | None = None) -> T:
    """`parse(bytes, what)` of an object that may be hurt where it lies, or on the way only.

    Harm on the way is not the same twice: CorruptCommit is believed when two readings running are alike. A start that
    passes over a commit for two unlucky readings would lose its work.

    what: the name that errors give it, else the key. Raises ObjectNotFound, StoreError, and what `parse` raises.
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
    """Put and read back: it is there, and it is these bytes. An error, even a refusal, is settled by what is read.

    Raises the StoreError of the put when the bytes are not there, and StoreError when others are.
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
        raise cause or StoreError(f"put {store.uri}/{key}: {len(found)} other bytes than the {len(data)} put are read")
