"""Map-style datasets over files: folders of images, WebDataset's tar shards, and Parquet.

Each finds a sample by its index, so the order is exact at any number of ranks. Files are opened in the process that
reads, which may be a worker. The paths must be readable on every node.
"""

from __future__ import annotations

import glob
import hashlib
import os
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ebbflow.training.errors import DataError

_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def _fingerprint(rows: Sequence[object]) -> str:
    return hashlib.sha256("\n".join(map(str, rows)).encode()).hexdigest()


def find_files(path: str | Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of a folder and its subfolders, or those of a glob, that end in `suffixes`, sorted by path.

    Raises:
        DataError: there is none.
    """
    pattern = Path(path) / "**" if Path(path).is_dir() else Path(path)
    found = [Path(one) for one in glob.glob(str(pattern), recursive=True)]
    found = [one for one in found if one.suffix.lower() in suffixes and one.is_file()]
    if not found:
        raise DataError(f"{path}: no file that ends in {', '.join(suffixes)}; fix: name a folder, a file or a glob")
    return sorted(found)


class ImageFolder:
    """Images in one subfolder for each class, as (image, class number). The classes are numbered by name.

    Args:
        transform: makes a tensor of a `PIL.Image` in RGB. It may draw random numbers, which are seeded for each sample.
        keep: returns whether the dataset has the file with this path below `path`; default: all files.
    """

    def __init__(
        self, path: str | Path, transform: Callable[[Any], Any], *, keep: Callable[[str], bool] = lambda name: True
    ) -> None:
        files, self._transform, root = find_files(path, _IMAGES), transform, Path(path)
        self.classes = sorted({one.parent.name for one in files})
        number = {name: at for at, name in enumerate(self.classes)}
        self._files = [one for one in files if keep(one.relative_to(root).as_posix())]
        self._labels = [number[one.parent.name] for one in self._files]
        self.fingerprint = _fingerprint([(one.relative_to(root), one.stat().st_size) for one in self._files])

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image  # pyright: ignore[reportMissingImports]

        with Image.open(self._files[index]) as image:
            return self._transform(image.convert("RGB")), self._labels[index]


class _Member(NamedTuple):
    shard: int
    extension: str
    offset: int
    size: int


class TarShards:
    """Tar shards of WebDataset. A sample is the dict {extension: bytes} of the files with the same name up to a dot.

    The headers of all shards are read once, so each sample is read by its place in the shard. Shards must not be
    compressed.

    Args:
        path: folder or glob of the shards.
        decode: makes a sample of the dict, which also has `__key__`.
    """

    def __init__(self, path: str | Path, decode: Callable[[dict[str, Any]], Any]) -> None:
        self._shards, self._decode = find_files(path, (".tar",)), decode
        self._samples: list[tuple[str, list[_Member]]] = []
        for shard, file in enumerate(self._shards):
            self._index(shard, file)
        self.fingerprint = _fingerprint([(one.name, one.stat().st_size) for one in self._shards])
        self._open: dict[tuple[int, int], int] = {}  # descriptors by process and shard

    def _index(self, shard: int, file: Path) -> None:
        before = ""
        try:
            with tarfile.open(file, "r:") as archive:
                for member in archive:
                    folder, _, name = member.name.rpartition("/")
                    stem, dot, extension = name.partition(".")
                    if not member.isfile() or not dot:
                        continue
                    key = f"{folder}/{stem}" if folder else stem
                    if key != before:
                        self._samples.append((key, []))
                    before = key
                    self._samples[-1][1].append(_Member(shard, extension, member.offset_data, member.size))
        except (tarfile.TarError, OSError) as error:
            raise DataError(f"{file}: not an uncompressed tar file ({error}); fix: unpack .gz shards") from error

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        key, members = self._samples[index]
        content: dict[str, Any] = {"__key__": key}
        for member in members:
            place = os.getpid(), member.shard
            if place not in self._open:
                self._open[place] = os.open(self._shards[member.shard], os.O_RDONLY)
            content[member.extension] = os.pread(self._open[place], member.size, member.offset)
        return self._decode(content)


class ParquetRows:
    """Rows of Parquet files as dicts by column. Each process keeps the row groups that it read last.

    A shuffled order reads a whole row group for a row, unless the kept ones have it. Write small row groups
    (`row_group_size=1000`), or give `keep` enough of them.

    Args:
        path: file, folder or glob.
        columns: names of the columns to read; None for all.
        keep: number of row groups that a process keeps in memory.
    """

    def __init__(self, path: str | Path, columns: Sequence[str] | None = None, *, keep: int = 16) -> None:
        parquet = import_parquet()
        self._files, self._columns, self._keep = find_files(path, (".parquet",)), columns and list(columns), keep
        self._groups: list[tuple[int, int]] = []  # file and row group
        rows: list[int] = []
        for number, file in enumerate(self._files):
            known = parquet.read_metadata(file)
            self._groups += [(number, group) for group in range(known.num_row_groups)]
            rows += [known.row_group(group).num_rows for group in range(known.num_row_groups)]
        self._ends = list(accumulate(rows))
        self.fingerprint = _fingerprint([(one.name, one.stat().st_size) for one in self._files] + [self._columns])
        self._kept: dict[int, Any] = {}  # tables by row group, the newest last

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        group = bisect_right(self._ends, index)
        table = self._kept.pop(group, None)
        if table is None:
            file, number = self._groups[group]
            with import_parquet().ParquetFile(self._files[file]) as content:
                table = content.read_row_group(number, columns=self._columns, use_threads=False)
        self._kept[group] = table
        while len(self._kept) > self._keep:
            del self._kept[next(iter(self._kept))]
        first = self._ends[group - 1] if group else 0
        return table.slice(index - first, 1).to_pylist()[0]


def import_parquet() -> Any:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError("pyarrow is not installed, which reads Parquet; fix: pip install pyarrow") from error
    return parquet
