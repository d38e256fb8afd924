"""Map-style datasets over files: image folders, WebDataset tar shards, MosaicML shards and Parquet.

Each finds a sample by its index, so the order is exact at any number of ranks. The files are in a
folder that every node can read, or below `s3://bucket/prefix`. They are read in the process that
needs a sample, which may be a worker.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import importlib
import io
import json
import os
import tarfile
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from ebbflow.core.errors import StoreUnavailable
from ebbflow.core.retry import retry
from ebbflow.core.store import Store
from ebbflow.core.store.multipart.requests import S3Client, find_account
from ebbflow.core.store.s3 import split_uri
from ebbflow.training.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_REQUEST_SECONDS = 30.0  # of one request
_ALL_SECONDS = 120.0  # of a request with its retries
_AHEAD_BYTES = 256 * 1024  # read at once from a bucket when a file is read in order

# The store's own client hangs in a process that is forked after its first request, such as a
# worker. This one does not.
_clients: dict[tuple[int, str], S3Client] = {}  # by process and bucket

_SCALARS = {
    *("int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
}
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "json": json.loads,
    "int": lambda data: int.from_bytes(data, "little", signed=True),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
}


@dataclass(frozen=True)
class DataFile:
    """A file of a dataset, on this machine or in a bucket.

    Attributes:
        path: path on this machine, or key in the bucket.
        name: path below the folder of the dataset.
        bucket: name of the bucket; "" for a file on this machine.
    """

    path: str
    name: str
    size: int
    bucket: str = ""

    def __str__(self) -> str:
        if self.bucket:
            return f"s3://{self.bucket}/{self.path}"
        return self.path

    def read(self, start: int, size: int) -> bytes:
        """Read `size` bytes from `start`, or fewer at the end of the file.

        Raises StoreError, OSError.
        """
        size = min(size, self.size - start)
        if not size:
            return b""
        if not self.bucket:
            with open(self.path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), size, start)
        limit = time.monotonic() + _ALL_SECONDS
        answer = retry(
            lambda: _client(self.bucket).send(
                "GET",
                self.path,
                headers={"range": f"bytes={start}-{start + size - 1}"},
                seconds=_REQUEST_SECONDS,
            ),
            left=lambda: limit - time.monotonic(),
            curable=lambda error, tries: isinstance(error, StoreUnavailable),  # noqa: ARG005 (the interface of retries)
        )
        if answer.status == 206:
            found = answer.body
        else:
            found = answer.body[start : start + size]
        if len(found) != size:
            raise DataError(
                f"{self}: {len(found)} bytes at {start}, not {size}; fix: the file has changed, "
                "start again"
            )
        return found

    def open(self) -> BinaryIO:
        if self.bucket:
            return io.BufferedReader(_BucketFile(self), _AHEAD_BYTES)
        return open(self.path, "rb")


class ImageFolder:
    """Dataset of images with one subfolder for each class; a sample is (image, class number).

    The classes are numbered by name.

    Args:
        transform: makes a tensor of a `PIL.Image` in RGB. It may draw random numbers, which are
            seeded for each sample.
        keep: returns whether the dataset has the file with this path below `path`; default: all
            files.
    """

    def __init__(
        self,
        path: str | Path,
        transform: Callable[[Any], Any],
        *,
        keep: Callable[[str], bool] = lambda name: True,  # noqa: ARG005 (takes the name, as others do)
    ) -> None:
        files = find_files(path, IMAGE_SUFFIXES)
        self._transform = transform
        self.classes = sorted({PurePosixPath(file.path).parent.name for file in files})
        number = {name: at for at, name in enumerate(self.classes)}
        self._files = [file for file in files if keep(file.name)]
        self._labels = [number[PurePosixPath(file.path).parent.name] for file in self._files]
        self.fingerprint = _fingerprint([(Path(file.name), file.size) for file in self._files])

    def __len__(self) -> int:
        return len(self._files)

    def describe(self, index: int) -> str:
        return str(self._files[index])

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image  # pyright: ignore[reportMissingImports]

        file = self._files[index]
        with Image.open(io.BytesIO(file.read(0, file.size))) as image:
            return self._transform(image.convert("RGB")), self._labels[index]


class TarShards:
    """Dataset of samples in tar shards of WebDataset.

    A sample is the dict {extension: bytes} of the files with the same name up to a dot.

    The headers of all shards are read once, so each sample is read by its place in the shard.
    Shards must not be compressed.

    Args:
        path: folder or glob of the shards, here or in a bucket.
        decode: makes a sample of the dict, which also has `__key__`.
    """

    def __init__(self, path: str | Path, decode: Callable[[dict[str, Any]], Any]) -> None:
        self._shards = find_files(path, (".tar",))
        self._decode = decode
        self._samples: list[tuple[str, list[_Member]]] = []
        for shard, file in enumerate(self._shards):
            self._index(shard, file)
        self.fingerprint = _fingerprint(
            [(PurePosixPath(shard.name).name, shard.size) for shard in self._shards]
        )

    def _index(self, shard: int, file: DataFile) -> None:
        before = ""
        try:
            with file.open() as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
                for member in archive:
                    folder, _, name = member.name.rpartition("/")
                    stem, dot, extension = name.partition(".")
                    if not member.isfile() or not dot:
                        continue
                    if folder:
                        key = f"{folder}/{stem}"
                    else:
                        key = stem
                    if key != before:
                        self._samples.append((key, []))
                    before = key
                    self._samples[-1][1].append(
                        _Member(shard, extension, member.offset_data, member.size)
                    )
        except (tarfile.TarError, OSError) as error:
            raise DataError(
                f"{file}: not an uncompressed tar file ({error}); fix: unpack .gz shards, copy a "
                "cut one again"
            ) from error

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        key, members = self._samples[index]
        content: dict[str, Any] = {"__key__": key}
        for member in members:
            content[member.extension] = self._shards[member.shard].read(member.offset, member.size)
        return self._decode(content)


class MosaicShards:
    """Dataset of samples that MosaicML's `MDSWriter` has written; a sample is a dict by column.

    Shards must not be compressed.

    A file begins with the number n of samples and n + 1 positions, as 4 bytes each. A sample is the
    sizes of its columns without a fixed size, as 4 bytes each, and the columns.

    Args:
        path: folder with `index.json`, here or in a bucket.
    """

    def __init__(self, path: str | Path) -> None:
        files = {
            PurePosixPath(file.name).as_posix(): file
            for file in find_files(path, (".json", ".mds", ".zstd"))
        }
        found = files.get("index.json")
        if found is None:
            raise DataError(
                f"{path}: no index.json; fix: name the folder that MDSWriter wrote, such as "
                f"{path}/train"
            )
        index = found.read(0, found.size)
        try:
            shards = json.loads(index)["shards"]
            first = shards[0]
            self._columns = list(
                zip(
                    first["column_names"],
                    first["column_encodings"],
                    first["column_sizes"],
                    strict=True,
                )
            )
            named = [
                (shard["raw_data"]["basename"], shard["raw_data"]["bytes"], shard["samples"])
                for shard in shards
            ]
            packed = [shard["compression"] for shard in shards if shard.get("zip_data")]
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(
                f"{found}: not an index of MDS shards ({type(error).__name__}: {error}); fix: "
                "copy it again"
            ) from None
        if packed:
            raise DataError(
                f"{found}: shards are compressed with {packed[0]}; fix: MDSWriter(compression=None)"
            )
        for name, encoding, _ in self._columns:
            if _find_decoder(encoding) is None:
                raise DataError(
                    f"{found}: column {name} is encoded as {encoding}, which is not read here; "
                    "fix: bytes"
                )
        for name, size, _ in named:
            if name not in files or files[name].size != size:
                if name in files:
                    have = f"{files[name].size} bytes"
                else:
                    have = "missing"
                raise DataError(
                    f"{path}/{name}: {have}, {size} bytes in index.json; fix: copy it again"
                )
        self._shards = [files[name] for name, _, _ in named]
        self._ends = list(accumulate(count for _, _, count in named))
        self._places: dict[
            int, NDArray[np.uint32]
        ] = {}  # positions of the samples by shard, as far as read
        self.fingerprint = hashlib.sha256(index).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard = bisect_right(self._ends, index)
        if shard:
            before = self._ends[shard - 1]
        else:
            before = 0
        if shard not in self._places:
            self._places[shard] = self._read_places(shard, self._ends[shard] - before + 1)
        start, end = self._places[shard][index - before : index - before + 2].tolist()
        data = self._shards[shard].read(start, end - start)
        sample = {}
        at = 0
        sizes = []
        for _, _, size in self._columns:
            if not size:
                size = int.from_bytes(data[at : at + 4], "little")
                at = at + 4
            sizes.append(size)
        for (name, encoding, _), size in zip(self._columns, sizes, strict=True):
            decode = _find_decoder(encoding)
            assert decode is not None
            sample[name] = decode(data[at : at + size])
            at = at + size
        return sample

    def _read_places(self, shard: int, count: int) -> NDArray[np.uint32]:
        """Read the positions at which the samples of a shard begin, and the end of the last one."""
        file = self._shards[shard]
        table = file.read(4, 4 * count)
        places = np.frombuffer(table[: len(table) // 4 * 4], "<u4")
        falls = (places[1:] < places[:-1]).any()
        if len(places) < count or falls or places[-1] > file.size:
            raise DataError(f"{file}: its table of samples is damaged; fix: copy it again")
        return places


class ParquetRows:
    """Dataset of rows in Parquet files; a sample is a dict by column.

    Each process keeps the row groups that it read last.

    A shuffled order reads a whole row group for a row, unless the kept ones have it. Write small
    row groups (`row_group_size=1000`), or give `keep` enough of them.

    Args:
        path: file, folder or glob, here or in a bucket.
        columns: names of the columns to read; None for all.
        keep: number of row groups that a process keeps in memory.
    """

    def __init__(
        self, path: str | Path, columns: Sequence[str] | None = None, *, keep: int = 16
    ) -> None:
        parquet = import_parquet()
        self._files = find_files(path, (".parquet",))
        self._columns = columns and list(columns)
        self._keep = keep
        self._groups: list[tuple[int, int]] = []  # file and row group
        rows: list[int] = []
        for number, file in enumerate(self._files):
            try:
                with file.open() as stream:
                    known = parquet.read_metadata(stream)
            except (import_arrow().ArrowException, OSError) as error:
                raise DataError(
                    f"{file}: {error}; fix: copy it again, or leave it out by a glob"
                ) from error
            names = known.schema.to_arrow_schema().names
            if missing := sorted(set(self._columns or ()) - set(names)):
                raise DataError(
                    f"{file}: there is no column {', '.join(missing)}; fix: one of "
                    f"{', '.join(names)}"
                )
            self._groups += [(number, group) for group in range(known.num_row_groups)]
            rows += [known.row_group(group).num_rows for group in range(known.num_row_groups)]
        self._ends = list(accumulate(rows))
        named = [(PurePosixPath(file.name).name, file.size) for file in self._files]
        self.fingerprint = _fingerprint([*named, self._columns])
        self._kept: dict[int, Any] = {}  # tables by row group, the newest last

    def __len__(self) -> int:
        if self._ends:
            return self._ends[-1]
        return 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        group = bisect_right(self._ends, index)
        table = self._kept.pop(group, None)
        if table is None:
            file, number = self._groups[group]
            with (
                self._files[file].open() as stream,
                import_parquet().ParquetFile(stream) as content,
            ):
                table = content.read_row_group(number, columns=self._columns, use_threads=False)
        self._kept[group] = table
        while len(self._kept) > self._keep:
            del self._kept[next(iter(self._kept))]
        if group:
            first = self._ends[group - 1]
        else:
            first = 0
        return table.slice(index - first, 1).to_pylist()[0]


def find_files(path: str | Path, suffixes: Sequence[str] = ()) -> list[DataFile]:
    """List the files in a folder and its subfolders, or those that match a glob, sorted by path.

    Args:
        path: on this machine, or s3://bucket/prefix.
        suffixes: endings of the listed files, with their dots and in lower case; none: every file.

    Raises:
        DataError: there is none.
        StoreError: the bucket does not answer.
    """
    if str(path).startswith("s3://"):
        found = _find_in_bucket(str(path))
    else:
        found = _find_here(Path(path))
    if suffixes:
        found = [file for file in found if PurePosixPath(file.path).suffix.lower() in suffixes]
    if not found:
        if suffixes:
            what = f"no file that ends in {', '.join(dict.fromkeys(suffixes))}"
        else:
            what = "no file"
        raise DataError(f"{path}: {what}; fix: name a folder, a file, or a glob of files")
    return sorted(found, key=lambda file: PurePosixPath(file.path))


def has_wildcard(path: str | Path) -> bool:
    """Return whether a path is a glob. An existing file or folder is not, whatever its name."""
    return glob.has_magic(str(path)) and (str(path).startswith("s3://") or not Path(path).exists())


def locate(root: Path, given: str) -> str | Path:
    """Resolve a path relative to `root`; an address in a bucket (s3://…) stays as it is."""
    if given.startswith("s3://"):
        return given.rstrip("/")
    return root / Path(given).expanduser()


def import_arrow() -> ModuleType:
    try:
        import pyarrow as arrow  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            "pyarrow is not installed, which reads Parquet and Arrow; fix: pip install pyarrow"
        ) from error
    return arrow


def import_parquet() -> ModuleType:
    import_arrow()
    return importlib.import_module("pyarrow.parquet")


def _fingerprint(rows: Sequence[object]) -> str:
    return hashlib.sha256("\n".join(map(str, rows)).encode()).hexdigest()


def _client(bucket: str) -> S3Client:
    place = os.getpid(), bucket
    if place not in _clients:
        _clients[place] = S3Client(bucket, find_account())
    return _clients[place]


class _BucketFile(io.RawIOBase):
    """Binary stream of a file in a bucket, in which each read is a request."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        )
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        found = self._file.read(self._at, max(0, min(len(view), self._file.size - self._at)))
        view[: len(found)] = found
        self._at += len(found)
        return len(found)


def _find_here(path: Path) -> list[DataFile]:
    if has_wildcard(path):
        # A pattern with two ** gives files several times
        once = dict.fromkeys(glob.glob(str(path), recursive=True))
        found = [place for place in map(Path, once) if place.is_file()]
        named = [(place, place.name) for place in found]
    elif path.is_dir():
        found = map(Path, glob.glob(f"{glob.escape(str(path))}/**", recursive=True))
        named = [(place, place.relative_to(path).as_posix()) for place in found if place.is_file()]
    else:
        if path.is_file():
            named = [(path, path.name)]
        else:
            named = []
    return [DataFile(str(place), name, place.stat().st_size) for place, name in named]


def _find_in_bucket(uri: str) -> list[DataFile]:
    bucket, key = split_uri(uri)
    parts = PurePosixPath(key).parts
    wild = next((at for at, part in enumerate(parts) if glob.has_magic(part)), None)
    folder = "/".join(parts[:wild])
    store = Store.open(f"s3://{bucket}/{folder}".rstrip("/"), create=False)
    if wild is not None:
        found = [
            meta for meta in store.list() if _fits(PurePosixPath(meta.key).parts, parts[wild:])
        ]
    else:
        meta = Store.open(f"s3://{bucket}", create=False).head(folder) if key else None
        if meta is not None:
            return [DataFile(folder, parts[-1], meta.size, bucket)]
        found = [meta for meta in store.list() if _fits(PurePosixPath(meta.key).parts, ("**",))]
    return [
        DataFile(f"{folder}/{meta.key}".lstrip("/"), meta.key, meta.size, bucket) for meta in found
    ]


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path matches a glob, both given as lists of their parts.

    The part `**` stands for any number of folders. As on a disk, a wildcard matches no hidden file
    or folder.
    """
    if not pattern:
        return not parts
    if pattern[0] == "**":
        shown = next((at for at, part in enumerate(parts) if part.startswith(".")), len(parts) - 1)
        return any(_fits(parts[skipped:], pattern[1:] or ("*",)) for skipped in range(shown + 1))
    if not parts or parts[0].startswith(".") > pattern[0].startswith("."):
        return False
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


class _Member(NamedTuple):
    shard: int
    extension: str
    offset: int
    size: int


def _find_decoder(encoding: str) -> Callable[[bytes], Any] | None:
    kind, _, settings = encoding.partition(":")
    if kind in _SCALARS:
        return lambda data: np.frombuffer(data, kind)[0]
    if kind == "ndarray":
        return lambda data: _decode_array(data, *settings.partition(":")[::2])
    if kind in ("jpeg", "png"):
        return _decode_image
    return _DECODERS.get(encoding)


def _decode_image(data: bytes) -> Any:
    from PIL import Image  # pyright: ignore[reportMissingImports]

    return Image.open(io.BytesIO(data))


def _decode_array(data: bytes, dtype: str, shape: str) -> NDArray[Any]:
    """Decode an array, whose type and shape are at the start of the data unless the encoding names
    them.

    The type is one byte: the width in bits, plus 0, 1 or 2 for unsigned, signed or float. The shape
    is one byte, which is 4 × the number of dimensions + log2 of the bytes of each, and the
    dimensions.
    """
    at = 0
    if not dtype:
        dtype = f"{('uint', 'int', 'float')[data[0] % 8]}{data[0] // 8 * 8}"
        at = 1
    if shape:
        dimensions: Sequence[int] = [int(part) for part in shape.split(",")]
    else:
        dimensions = []
    if not shape:
        count = data[at] >> 2
        width = 1 << (data[at] & 3)
        dimensions = np.frombuffer(data, f"<u{width}", count, at + 1).tolist()
        at += 1 + count * width
    return np.frombuffer(data, dtype, offset=at).reshape(dimensions).copy()
