"""Upload one object in parallel parts, each with a checksum and retries, until a deadline.

A part's checksum is computed from memory just before the part is sent, so the store detects any
change in transit.
"""

import contextlib
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from ebbflow.core.errors import ObjectNotFound, StoreError, StoreUnavailable, WrongStore
from ebbflow.core.store.multipart.requests import Throttle
from ebbflow.core.store.multipart.sinks import LARGEST_COUNT, UploadedPart, UploadSink
from ebbflow.training.checkpoint import verified_io
from ebbflow.training.checkpoint.manifest import DataObject
from ebbflow.training.checkpoint.signing import sha256_of_chunks
from ebbflow.training.errors import CheckpointError

_ABORT_SECONDS = 5.0
_LONGEST_TRY_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class PartSettings:
    """The part and chunk sizes of an upload, and its parallelism."""

    part_bytes: int = 2 * verified_io.CHUNK_BYTES  # bytes per part, a multiple of `chunk_bytes`
    chunk_bytes: int = verified_io.CHUNK_BYTES  # bytes per checksum in the index
    parallel: int = 4  # parts uploaded at once
    sha256: bool = False  # also compute the SHA-256 of each chunk


@dataclass(frozen=True)
class _Sent:
    part: UploadedPart
    sums: list[tuple[int, int]]
    sha256: list[str]


class PartUploader:
    """Uploader of objects in parallel parts.

    It keeps its threads and connections from one object to the next.
    """

    def __init__(self, sink: UploadSink, settings: PartSettings, throttle: Throttle) -> None:
        self._sink = sink
        self._settings = settings
        self._throttle = throttle
        self._pool = ThreadPoolExecutor(settings.parallel, thread_name_prefix="part")

    def upload(self, key: str, view: memoryview, deadline: verified_io.Deadline) -> DataObject:
        """Upload an object, and verify its size and checksum in the store.

        Return its key, size and checksums.

        Raises CheckpointError.
        """
        sink = self._sink
        settings = self._settings
        what = f"put {key}"
        size = settings.part_bytes
        while len(view) > size * LARGEST_COUNT:
            size += settings.part_bytes
        starts = range(0, max(len(view), 1), size)
        stop = threading.Event()

        def begin() -> Any:
            return sink.begin(
                key, len(view), parts=len(starts), seconds=self._try_seconds(deadline, 0)
            )

        def send_part(number: int, start: int) -> _Sent:
            piece = view[start : start + size]
            if settings.sha256:
                sha256 = sha256_of_chunks(piece, settings.chunk_bytes)
            else:
                sha256 = []

            def send() -> _Sent:
                if stop.is_set():
                    raise CheckpointError(
                        f"{what}: part {number} was stopped, because another part failed"
                    )
                sums = verified_io.chunk_crcs(piece, settings.chunk_bytes)
                crc = verified_io.combine_crcs(sums)
                part = sink.put_part(
                    begun,
                    number,
                    start,
                    piece,
                    crc,
                    seconds=self._try_seconds(deadline, len(piece)),
                )
                _compare("", part.crc64nvme, crc, StoreUnavailable)
                return _Sent(part, sums, sha256)

            return verified_io.retry_until(
                deadline,
                what,
                send,
                curable=lambda error: (
                    verified_io.is_curable(error) and not isinstance(error, ObjectNotFound)
                ),
                longest_seconds=_LONGEST_PAUSE_SECONDS,
                where=f"part {number} of {len(starts)}, {len(piece)} bytes from {start}",
                sleep=stop.wait,
            )

        def finish() -> None:
            self._finish(key, begun, sent, whole, len(view), deadline)

        begun = verified_io.retry_until(deadline, what, begin)
        try:
            futures = [self._pool.submit(send_part, *part) for part in enumerate(starts, start=1)]
            sent = _results(futures, stop)
            sums = list(itertools.chain.from_iterable(part.sums for part in sent))
            whole = verified_io.combine_crcs(sums)
            verified_io.retry_until(
                deadline,
                what,
                finish,
                curable=_is_unanswered,
                longest_seconds=_LONGEST_PAUSE_SECONDS,
                where=f"putting {len(starts)} parts together",
            )
        except BaseException:
            with contextlib.suppress(StoreError):  # a later sweep removes it
                sink.abort(begun, seconds=_ABORT_SECONDS)
            raise
        self._check_stored(key, len(view), whole, deadline)
        if len(view):
            chunks = tuple(verified_io.crc_digits(value) for value, _ in sums)
        else:
            chunks = ()
        return DataObject(
            key=key,
            size=len(view),
            crc64nvme=verified_io.crc_digits(whole),
            chunk_bytes=settings.chunk_bytes,
            chunks=chunks,
            sha256=tuple(itertools.chain.from_iterable(part.sha256 for part in sent)),
        )

    def sweep(self, prefix: str, *, older_than_seconds: float, seconds: float) -> list[str]:
        return self._sink.sweep(prefix, older_than_seconds=older_than_seconds, seconds=seconds)

    def _try_seconds(self, deadline: verified_io.Deadline, part_bytes: int) -> float:
        """Return the timeout of one try: a third of the deadline, or more if a bandwidth cap
        requires it.
        """
        usual = min(_LONGEST_TRY_SECONDS, deadline.seconds / 3)
        rate = self._throttle.bytes_per_second
        if rate is not None:
            usual = max(usual, 2.0 * part_bytes * self._settings.parallel / rate)
        return max(min(usual, deadline.remaining_seconds), 0.05)

    def _finish(
        self,
        key: str,
        begun: Any,
        sent: Sequence[_Sent],
        whole: int,
        length: int,
        deadline: verified_io.Deadline,
    ) -> None:
        """Complete an upload by combining its parts into one object. `whole` is the object's
        checksum.
        """
        parts = [part.part for part in sent]
        crcs = [verified_io.combine_crcs(part.sums) for part in sent]
        seconds = self._try_seconds(deadline, 0)
        try:
            stated = self._sink.finish(begun, parts, crcs, whole, seconds=seconds)
        except StoreError:
            # The object may have arrived all the same; no other process writes this key
            try:
                size, stated = self._sink.size(key, seconds=self._try_seconds(deadline, 0))
            except StoreError:
                size = None
                stated = None
            if size != length or stated not in (None, whole):
                raise
        _compare(f"{key}: ", stated, whole, CheckpointError)

    def _check_stored(
        self, key: str, length: int, whole: int, deadline: verified_io.Deadline
    ) -> None:
        seconds = self._try_seconds(deadline, 0)
        size, stated = verified_io.retry_until(
            deadline, f"head {key}", lambda: self._sink.size(key, seconds=seconds)
        )
        if size != length:
            raise CheckpointError(f"{key}: {size} bytes arrived of {length}")
        _compare(f"{key}: ", stated, whole, CheckpointError)


def _results(futures: list[Future[_Sent]], stop: threading.Event) -> list[_Sent]:
    """Wait for all parts and return them.

    On the first permanent failure, stop the other parts and raise the error.
    """
    done, rest = wait(futures, return_when=FIRST_EXCEPTION)
    failed = next((future for future in done if future.exception() is not None), None)
    if failed is not None:
        stop.set()
        for future in rest:
            future.cancel()
        wait(rest)  # each ends within its try: after this returns, the buffer may be overwritten
        failed.result()
    return [future.result() for future in futures]


def _compare(what: str, stated: int | None, sent: int, kind: type[Exception]) -> None:
    if stated not in (None, sent):
        digits = [verified_io.crc_digits(crc) for crc in (stated or 0, sent)]
        raise kind(f"{what}the store has checksum {digits[0]}, sent was {digits[1]}")


def _is_unanswered(error: BaseException) -> bool:
    """Return whether a failed request may be repeated, because the store was only unavailable.

    After the loss of the store's mount, a repeated request would find nothing.
    """
    return isinstance(error, StoreUnavailable) and not isinstance(error, WrongStore)
