"""Open logs that are compressed, archived, cut off or interrupted by NUL bytes, as lost machines
leave them.

If a part of a log cannot be read, the reason is recorded, and the other parts are read.
"""

import bz2
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

_PIECE_BYTES = 1 << 16
_OUTPUT_BYTES = 1 << 20  # most bytes that one step of a decompressor returns
_HEAD_BYTES = 1024
_TAR_MARK = (257, b"ustar")
_ZSTD_MARK = b"\x28\xb5\x2f\xfd"
_ZIP_MARK = b"PK\x03\x04"
_DEEPEST = 3  # archives inside archives


class LogStream:
    """Stream of one decompressed log, which may be a member of an archive."""

    def __init__(
        self,
        name: str,
        stream: "BinaryIO | LogStream",
        head: bytes = b"",
        damage: str | None = None,
    ) -> None:
        self.name = name
        self._damage = damage
        self._head = head
        self._stream = stream

    @property
    def damage(self) -> str | None:
        """Reason why the log could not be read to its end; None if no damage was found so far."""
        if isinstance(self._stream, LogStream):
            return self._damage or self._stream.damage
        return self._damage

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes. Return b"" at the end, or where the log is damaged."""
        if self._head:
            part = self._head[:size]
            self._head = self._head[size:]
            return part
        if self._damage is not None:
            return b""
        try:
            return self._stream.read(size) or b""
        except (
            OSError,
            EOFError,
            zlib.error,
            lzma.LZMAError,
            tarfile.TarError,
            ValueError,
        ) as error:
            self._damage = getattr(error, "strerror", None) or str(error) or type(error).__name__
            return b""


def open_logs(name: str, stream: BinaryIO) -> Iterator[LogStream]:
    """Yield the one log in a stream, or each log of an archive.

    Read each of them before the next one. Raises OSError if an archive cannot be read at all.
    """
    yield from _open(LogStream(name, stream), stream, 0)


def open_growing(path: Path) -> BinaryIO:
    """Open a file that may still grow. Reading stops at the size that the file has now.

    A hole at its start is skipped; a log has one if it was truncated while its writer had it open.
    """
    raw = open(path, "rb")  # noqa: SIM115
    if not path.is_file():
        return raw
    size = os.fstat(raw.fileno()).st_size
    try:
        raw.seek(os.lseek(raw.fileno(), 0, os.SEEK_DATA))
    except OSError:
        raw.seek(0)
    return _Limited(raw, size)


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


class _Limited(io.RawIOBase, BinaryIO):
    """File object that ends at a given size, even if the file is longer."""

    def __init__(self, raw: BinaryIO, size: int) -> None:
        self._raw = raw
        self._size = size

    def read(self, size: int = -1, /) -> bytes:
        left = max(self._size - self._raw.tell(), 0)
        return self._raw.read(left if size < 0 else min(size, left))

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_END:
            return self._raw.seek(self._size + offset)
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def close(self) -> None:
        self._raw.close()


class _Decompressed(io.RawIOBase, BinaryIO):
    """File object with the decompressed bytes of a stream.

    A stream that is cut off yields what can be decompressed before it raises EOFError.
    """

    def __init__(self, source: LogStream, make: Callable[[], _Decompressor]) -> None:
        self._source = source
        self._make = make
        self._decompressor = make()
        self._waiting = b""  # compressed bytes that are not decompressed yet
        self._ready = b""

    def read(self, size: int = -1, /) -> bytes:
        while not self._ready and self._step():
            pass
        part = self._ready[:size]
        self._ready = self._ready[size:]
        return part

    def _step(self) -> bool:
        """Decompress the next bytes; return False at the end. Raises EOFError if the stream is cut
        off.
        """
        if self._decompressor.eof:
            rest = (self._decompressor.unused_data or self._waiting).lstrip(b"\0")
            self._waiting = rest or self._source.read(_PIECE_BYTES).lstrip(b"\0")
            if not self._waiting:
                return False
            self._decompressor = self._make()
        data = self._waiting or self._source.read(_PIECE_BYTES)
        self._ready = self._decompressor.decompress(data, _OUTPUT_BYTES)
        self._waiting = getattr(self._decompressor, "unconsumed_tail", b"")
        if not data and not self._ready and not self._decompressor.eof:
            raise EOFError("cut: the compressed file ends before its end mark")
        return True


def _inflate() -> _Decompressor:
    return zlib.decompressobj(wbits=31)  # type: ignore[return-value]


_DECOMPRESSORS: tuple[tuple[bytes, Callable[[], _Decompressor]], ...] = (
    (b"\x1f\x8b", _inflate),
    (b"\xfd7zXZ\x00", lzma.LZMADecompressor),
    (b"BZh", bz2.BZ2Decompressor),
)


def _open(log: LogStream, raw: BinaryIO, depth: int) -> Iterator[LogStream]:
    head = log.read(_HEAD_BYTES)
    log = LogStream(log.name, log, head)
    if depth == _DEEPEST:
        yield log
        return
    for mark, make in _DECOMPRESSORS:
        if head.startswith(mark):
            plain = _Decompressed(log, make)
            yield from _open(LogStream(log.name, plain), plain, depth + 1)
            return
    start, mark = _TAR_MARK
    if head.startswith(_ZSTD_MARK):
        plain = _open_zstd(log)
        yield from _open(LogStream(log.name, plain), plain, depth + 1)
    elif head[start:].startswith(mark):
        yield from _open_tar(log, depth)
    elif head.startswith(_ZIP_MARK) and raw.seekable():
        yield from _open_zip(log, raw, depth)
    else:
        yield log


def _open_zstd(log: LogStream) -> BinaryIO:
    try:
        import pyarrow
    except ImportError:
        raise OSError("compressed by zstd; fix: pip install pyarrow, or zstd -d it") from None
    return pyarrow.CompressedInputStream(_Readable(log), "zstd")


def _open_tar(log: LogStream, depth: int) -> Iterator[LogStream]:
    with _read_tar(log) as archive:
        while True:
            try:
                member = archive.next()
            except (tarfile.TarError, OSError, EOFError) as error:
                yield LogStream(log.name, io.BytesIO(), damage=log.damage or str(error))
                return
            if member is None:
                return
            stream = archive.extractfile(member) if member.isfile() else None
            if stream is not None:
                inner = LogStream(f"{log.name}!{member.name}", stream)  # type: ignore[arg-type]
                yield from _open(inner, stream, depth + 1)  # type: ignore[arg-type]


def _read_tar(log: LogStream) -> tarfile.TarFile:
    """Open a log as a tar archive. Raises OSError if it is cut off within its first header."""
    try:
        return tarfile.open(fileobj=_Readable(log), mode="r|")
    except tarfile.TarError as error:
        raise OSError(f"a tar archive that is damaged: {error}") from error


def _open_zip(log: LogStream, raw: BinaryIO, depth: int) -> Iterator[LogStream]:
    try:
        archive = zipfile.ZipFile(raw)
    except zipfile.BadZipFile as error:
        raise OSError(f"a zip archive that is damaged: {error}") from error
    with archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            try:
                stream = archive.open(member)
            except (RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
                name = f"{log.name}!{member.filename}"
                yield LogStream(name, io.BytesIO(), damage=str(error))
                continue
            inner = LogStream(f"{log.name}!{member.filename}", stream)  # type: ignore[arg-type]
            yield from _open(inner, stream, depth + 1)  # type: ignore[arg-type]


class _Readable(io.RawIOBase, BinaryIO):
    """File object that wraps a `LogStream`, for libraries."""

    def __init__(self, log: LogStream) -> None:
        self._log = log

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        return self._log.read(_OUTPUT_BYTES if size < 0 else size)
