"""Buckets in memory: objects, and what a listing shows of them, which may lag behind."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass, field

from tests.support.s3.refusals import Refused


@dataclass
class Stored:
    """One object. checksums: by algorithm, as sent or computed. listed_from: when listings begin to
    show it.
    """

    data: bytes
    etag: str
    checksums: dict[str, str]
    metadata: dict[str, str] = field(default_factory=dict)
    modified: float = field(default_factory=time.time)
    listed_from: float = 0.0


@dataclass
class Upload:
    """A multipart upload that is under way. parts: by number, as (bytes, etag)."""

    key: str
    algorithm: str | None
    metadata: dict[str, str]
    parts: dict[int, tuple[bytes, str]] = field(default_factory=dict)
    begun: float = field(default_factory=time.time)


class Bucket:
    """lock: held while something is applied, so that each operation is atomic."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, Upload] = {}
        self.quota_bytes: int | None = None
        self.quota_code = "QuotaExceeded"
        self._ghosts: dict[str, tuple[float, Stored]] = {}  # deleted, and listed until then

    def put(self, key: str, stored: Stored, stale_seconds: float = 0.0) -> None:
        with self.lock:
            before = self.objects.get(key)
            if self.quota_bytes is not None:
                used = sum(len(other.data) for other in self.objects.values())
                if used + len(stored.data) - (len(before.data) if before else 0) > self.quota_bytes:
                    raise Refused(
                        self.quota_code, f"the bucket's limit is {self.quota_bytes} bytes"
                    )
            if before is None:
                stored.listed_from = time.monotonic() + stale_seconds
            else:
                stored.listed_from = before.listed_from
            self.objects[key] = stored
            self._ghosts.pop(key, None)

    def get(self, key: str) -> Stored:
        with self.lock:
            if key not in self.objects:
                raise Refused("NoSuchKey", f"there is no object {key}")
            return self.objects[key]

    def delete(self, key: str, stale_seconds: float = 0.0) -> None:
        with self.lock:
            stored = self.objects.pop(key, None)
            if stored is not None and stale_seconds:
                self._ghosts[key] = (time.monotonic() + stale_seconds, stored)

    def listed(self, prefix: str) -> list[tuple[str, Stored]]:
        """What a listing shows now, by key."""
        now = time.monotonic()
        with self.lock:
            shown = {
                key: stored for key, stored in self.objects.items() if stored.listed_from <= now
            }
            shown |= {key: stored for key, (until, stored) in self._ghosts.items() if until > now}
        return sorted((key, stored) for key, stored in shown.items() if key.startswith(prefix))

    def flip(self, key: str, fraction: float) -> None:
        """Rot: one bit of a stored object is no longer what was accepted.

        Its sums and its etag stay as they were.
        """
        with self.lock:
            stored = self.objects.get(key)
            if stored is not None and stored.data:
                self.objects[key] = Stored(
                    **{**stored.__dict__, "data": flipped(stored.data, fraction)}
                )


def flipped(data: bytes, fraction: float) -> bytes:
    """One bit changed, at a fraction (0 to 1) of its length."""
    changed = bytearray(data)
    bit = min(int(fraction * len(data) * 8), len(data) * 8 - 1)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def etag_of(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()
