"""Upload one object in parallel parts, each with a checksum and retries, until a deadline.

A part's checksum is computed just before it is sent, so the store compares what it received with the bytes in memory.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.errors import ObjectNotFound, StoreError, StoreUnavailable
from ebbflow.infra.multipart.requests import Throttle
from ebbflow.infra.multipart.sinks import UploadedPart, UploadSink
from ebbflow.training.checkpoint.manifest import DataObject
from ebbflow.training.checkpoint.signing import sha256_of_chunks
from ebbflow.training.checkpoint.verified_io import (
    CHUNK_BYTES,
    Deadline,
    chunk_crcs,
    combine_crcs,
    crc_digits,
    is_curable,
    retry_until,
)
from ebbflow.training.errors import CheckpointError

_ABORT_SECONDS = 5.0
_LARGEST_COUNT = 10_000  # parts of one object in Amazon S3
_LONGEST_TRY_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class PartSettings:
    """The sizes into which an object is divided for its upload."""

    part_bytes: int = 2 * CHUNK_BYTES  # bytes per part, a multiple of `chunk_bytes`
    chunk_bytes: int = CHUNK_BYTES  # bytes per checksum in the index
    parallel: int = 4  # parts uploaded at once
    sha256: bool = False  # also compute the SHA-256 of each chunk


@dataclass(frozen=True)
class _Piece:
    number: int  # from 1 on
    start: int
    view: memoryview


@dataclass(frozen=True)
class _Sent:
    part: UploadedPart
    sums: list[tuple[int, int]]
    sha256: list[str]


class PartUploader:
    """Uploader of objects. Its threads and their connections are reused for the next object."""

    def __init__(self, sink: UploadSink, settings: PartSettings, throttle: Throttle) -> None:
        self._sink = sink
        self._settings = settings
        self._throttle = throttle
        self._pool = ThreadPoolExecutor(settings.parallel, thread_name_prefix="part")

    def upload(self, key: str, view: memoryview, deadline: Deadline) -> DataObject:
        """Upload an object, verify its size and checksum in the store, and return its description.

        Raises CheckpointError (names the part, the tries and the cause).
        """
        pieces = self._pieces(view)
        what = f"put {key}"
        size, count = len(view), len(pieces)

        def begin() -> Any:
            return self._sink.begin(key, size, parts=count, seconds=self._try_seconds(deadline, 0))

        begun = retry_until(deadline, what, begin)
        try:
            sent = self._send(what, begun, pieces, deadline)
            sums = [row for one in sent for row in one.sums]
            whole = combine_crcs(sums)
            self._finish(what, key, begun, sent, whole, len(view), deadline)
        except BaseException:
            with contextlib.suppress(StoreError):  # a later sweep removes it
                self._sink.abort(begun, seconds=_ABORT_SECONDS)
            raise
        self._check_stored(key, len(view), whole, deadline)
        chunks = tuple(crc_digits(value) for value, _ in sums) if len(view) else ()
        chunk_bytes = self._settings.chunk_bytes
        return DataObject(
            key=key,
            size=len(view),
            crc64nvme=crc_digits(whole),
            chunk_bytes=chunk_bytes,
            chunks=chunks,
            sha256=tuple(row for one in sent for row in one.sha256),
        )

    def sweep(self, prefix: str, *, older_than_seconds: float, seconds: float) -> list[str]:
        return self._sink.sweep(prefix, older_than_seconds=older_than_seconds, seconds=seconds)

    def _try_seconds(self, deadline: Deadline, part_bytes: int) -> float:
        """Return the timeout of one try in seconds.

        Three tries fit into the deadline, except for a part that needs longer because of the bandwidth cap.
        """
        usual = min(_LONGEST_TRY_SECONDS, deadline.seconds / 3)
        if (rate := self._throttle.bytes_per_second) is not None:
            usual = max(usual, 2.0 * part_bytes * self._settings.parallel / rate)
        return max(min(usual, deadline.remaining_seconds), 0.05)

    def _pieces(self, view: memoryview) -> list[_Piece]:
        size = self._settings.part_bytes
        while len(view) > size * _LARGEST_COUNT:
            size += self._settings.part_bytes
        starts = range(0, max(len(view), 1), size)
        return [_Piece(number, start, view[start : start + size]) for number, start in enumerate(starts, start=1)]

    def _send(self, what: str, begun: Any, pieces: list[_Piece], deadline: Deadline) -> list[_Sent]:
        """Send all parts. The first permanent failure stops the others."""
        stop = threading.Event()
        total = len(pieces)
        futures: list[Future[_Sent]] = [
            self._pool.submit(self._send_part, what, begun, piece, total, deadline, stop) for piece in pieces
        ]
        done, rest = wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((future for future in done if future.exception() is not None), None)
        if failed is not None:
            stop.set()
            for future in rest:
                future.cancel()
            wait(rest)  # each ends within its try: after this returns, the buffer may be overwritten
        for future in [failed, *futures] if failed else futures:
            future.result()
        return [future.result() for future in futures]

    def _send_part(
        self, what: str, begun: Any, piece: _Piece, total: int, deadline: Deadline, stop: threading.Event
    ) -> _Sent:
        sha256 = sha256_of_chunks(piece.view, self._settings.chunk_bytes) if self._settings.sha256 else []

        def send() -> _Sent:
            if stop.is_set():
                raise CheckpointError(f"{what}: part {piece.number} was stopped, because another part failed")
            sums = chunk_crcs(piece.view, self._settings.chunk_bytes)
            crc = combine_crcs(sums)
            seconds = self._try_seconds(deadline, len(piece.view))
            part = self._sink.put_part(begun, piece.number, piece.start, piece.view, crc, seconds=seconds)
            if part.crc64nvme not in (None, crc):
                raise StoreUnavailable(
                    f"the store has checksum {crc_digits(part.crc64nvme or 0)}, sent was {crc_digits(crc)}"
                )
            return _Sent(part, sums, sha256)

        return retry_until(
            deadline,
            what,
            send,
            curable=lambda error: is_curable(error) and not isinstance(error, ObjectNotFound),
            longest_seconds=_LONGEST_PAUSE_SECONDS,
            where=f"part {piece.number} of {total}, {len(piece.view)} bytes from {piece.start}",
            sleep=stop.wait,
        )

    def _finish(
        self, what: str, key: str, begun: Any, sent: list[_Sent], whole: int, size: int, deadline: Deadline
    ) -> None:
        """Complete the upload. After a store error, check whether the object has arrived; no other process writes this
        key.
        """
        parts, crcs = [one.part for one in sent], [combine_crcs(one.sums) for one in sent]

        def finish() -> None:
            try:
                stated = self._sink.finish(begun, parts, crcs, whole, seconds=self._try_seconds(deadline, 0))
            except StoreError:
                try:
                    found, stated = self._sink.size(key, seconds=self._try_seconds(deadline, 0))
                except StoreError:
                    found = None
                if found != size or stated not in (None, whole):
                    raise
                return
            _compare(key, stated, whole)

        retry_until(
            deadline,
            what,
            finish,
            curable=lambda error: isinstance(error, StoreUnavailable),
            longest_seconds=_LONGEST_PAUSE_SECONDS,
            where=f"putting {len(parts)} parts together",
        )

    def _check_stored(self, key: str, size: int, whole: int, deadline: Deadline) -> None:
        seconds = self._try_seconds(deadline, 0)
        found, stated = retry_until(deadline, f"head {key}", lambda: self._sink.size(key, seconds=seconds))
        if found != size:
            raise CheckpointError(f"{key}: {found} bytes arrived of {size}")
        _compare(key, stated, whole)


def _compare(key: str, stated: int | None, whole: int) -> None:
    if stated not in (None, whole):
        raise CheckpointError(f"{key}: the store has checksum {crc_digits(stated or 0)}, sent was {crc_digits(whole)}")
