"""A folder as a place for objects in parts: a file appears under its name once it is durable.

Whole blocks go to the disk directly where the file system allows it: through the page cache the same bytes cost some
ten times the processor time and push out what training has cached (measured on ext4).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import ObjectNotFound, StoreAway, StoreError, StoreForbidden, StoreFull, StoreHung
from ebbflow.infra.multipart.client import Part
from ebbflow.infra.multipart.requests import Buffer
from ebbflow.infra.multipart.throttle import Throttle
from ebbflow.infra.store.folder import ABANDONABLE, UNFINISHED, sync_folders

_BLOCK = 4096
_SMALLEST_DIRECT = 2**20
_SHORTEST_SECONDS = 0.05
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@dataclass
class _File:
    """An unfinished file. direct: a second descriptor that bypasses the page cache, None where there is none."""

    path: Path
    unfinished: Path
    cached: int
    direct: int | None
    hung: bool = False  # an abandoned call may still use the descriptors, which are therefore never closed

    def run(self, call: Callable[[], None], seconds: float) -> None:
        """Raises StoreHung when `call` does not come back in time; nothing more is written to this file then."""
        if self.hung:
            raise StoreError(f"put {self.path}: an operation on this file hangs")
        try:
            ABANDONABLE.run(call, seconds, f"put {self.path}")
        except StoreHung:
            self.hung = True
            raise

    def close(self) -> None:
        os.close(self.cached)
        if self.direct is not None:
            os.close(self.direct)


class FolderSink:
    """Parts are written where they belong in a file beside the name, which is synced and then given its name."""

    def __init__(self, root: Path, throttle: Throttle) -> None:
        self._root = root
        self._throttle = throttle

    def begin(self, key: str, size: int, *, parts: int, seconds: float) -> _File:
        path = self._root / key
        unfinished = path.with_name(f"{path.name}#{os.getpid()}")

        def opened() -> _File:
            path.parent.mkdir(parents=True, exist_ok=True)
            cached = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
            direct = None
            if size >= _SMALLEST_DIRECT and hasattr(os, "O_DIRECT"):
                with contextlib.suppress(OSError):
                    direct = os.open(unfinished, os.O_WRONLY | os.O_DIRECT)
            return _File(path, unfinished, cached, direct)

        with _told(f"put {path}"):
            return ABANDONABLE.run(opened, seconds, f"put {path}")

    def put_part(self, begun: _File, number: int, start: int, body: Buffer, crc: int, *, seconds: float) -> Part:
        view, end = memoryview(body).cast("B"), time.monotonic() + seconds
        step = self._throttle.slice_bytes or max(len(view), 1)
        step = -(-step // _BLOCK) * _BLOCK
        with _told(f"put {begun.path}"):
            for at in range(0, len(view), step):
                piece = view[at : at + step]
                self._throttle.take(len(piece))
                begun.run(partial(_write, begun, piece, start + at), max(end - time.monotonic(), _SHORTEST_SECONDS))
        return Part(number, "", None)

    def finish(
        self, begun: _File, parts: Sequence[Part], crcs: Sequence[int], whole: int, *, seconds: float
    ) -> int | None:
        def finished() -> None:
            os.fsync(begun.cached)
            os.replace(begun.unfinished, begun.path)
            sync_folders(begun.path.parent, self._root)

        with _told(f"put {begun.path}", otherwise=StoreError):  # a failed sync is not cured by another
            begun.run(finished, seconds)
            begun.close()
        return None

    def abort(self, begun: _File, *, seconds: float) -> None:
        with _told(f"abort {begun.path}"):
            ABANDONABLE.run(lambda: begun.unfinished.unlink(missing_ok=True), seconds, f"abort {begun.path}")
            if not begun.hung:
                begun.close()

    def size(self, key: str, *, seconds: float) -> tuple[int, int | None]:
        path = self._root / key
        with _told(f"head {path}"):
            return ABANDONABLE.run(lambda: path.stat().st_size, seconds, f"head {path}"), None

    def sweep(self, prefix: str, *, older_than_seconds: float, seconds: float) -> list[str]:
        now, swept = time.time(), []

        def sweep_all() -> None:
            for path in (self._root / prefix).rglob("*#*"):
                if UNFINISHED.fullmatch(path.name) and now - path.stat().st_mtime > older_than_seconds:
                    path.unlink(missing_ok=True)
                    swept.append(str(path.relative_to(self._root)))

        with _told(f"sweep {self._root / prefix}"):
            ABANDONABLE.run(sweep_all, seconds, f"sweep {self._root / prefix}")
        return swept


def _write(file: _File, data: memoryview, start: int) -> None:
    whole = len(data) // _BLOCK * _BLOCK
    if file.direct is not None and whole >= _SMALLEST_DIRECT and start % _BLOCK == 0:
        try:
            written = os.pwrite(file.direct, data[:whole], start)
            data, start = data[written:], start + written
        except OSError as error:
            if error.errno != errno.EINVAL:  # memory or disk that is aligned otherwise: through the cache then
                raise
    while data and not file.hung:
        written = os.pwrite(file.cached, data, start)
        data, start = data[written:], start + written


class _told:  # noqa: N801 - reads as a phrase
    """An error of the system within the block becomes one of the store."""

    def __init__(self, what: str, otherwise: type[StoreError] = StoreAway) -> None:
        self._what = what
        self._otherwise = otherwise

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, OSError):
            return False
        words = f"{self._what}: {error.strerror or error}"
        if isinstance(error, FileNotFoundError):
            raise ObjectNotFound(words) from error
        if error.errno in _FULL:
            raise StoreFull(f"{words}; no room; fix: free space, or a store on another disk") from error
        if error.errno in _FORBIDDEN:
            raise StoreForbidden(f"{words}; fix: the folder's owner and permissions") from error
        raise self._otherwise(words) from error
