"""Reader of a data set's rows: JSON Lines, JSON, Parquet, Arrow, or output of `save_to_disk`.

JSON Lines and JSON may be compressed. `save_to_disk` is a method of Hugging Face `datasets`. A data
set is a file, a folder or a glob, on this machine or in a bucket (s3://…).
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, Protocol

from ebbflow.core.json_values import Json, JsonObject
from ebbflow.training.errors import DataError
from ebbflow.workloads.readers.files import (
    DataFile,
    find_files,
    has_wildcard,
    import_arrow,
    import_parquet,
)

Row = Mapping[str, Json]

_TRAIN = re.compile(r"(^|[/._-])train(ing)?([/._-]|$)", re.IGNORECASE)
_OTHER_SPLIT = re.compile(
    r"(^|[/._-])(test|testing|valid|validation|val|dev|eval|evaluation)([/._-]|$)", re.IGNORECASE
)
_ABOUT = re.compile(
    r"(^|/)(readme|licen[cs]e|notice|changelog|contributing|citation)[^/]*$", re.IGNORECASE
)
_SYNONYMS = {".ndjson": ".jsonl"}
_COMPRESSIBLE = (".jsonl", ".json")
# `datasets` keeps results of its own calls there
_SCRATCH = re.compile(r"(^|/)(cache|indices)-[^/]*\.arrow$")
_FILE_OF_ARROW = b"ARROW1"  # else it is a stream


class RowTable(Protocol):
    """Interface of pyarrow's tables of rows."""

    def to_pylist(self) -> list[JsonObject]: ...


class PlacedRow(NamedTuple):
    """A row, with its file and its number there."""

    file: DataFile
    number: int  # in its file, from 1
    row: Row

    def __str__(self) -> str:
        return f"{self.file}, row {self.number}"


def find_rows(path: str | Path, texts: Sequence[str]) -> list[DataFile]:
    """List the files of a data set that have rows, in the order of their paths.

    If the data set is plain text, the list is empty. If the names of files in a folder tell several
    splits, only files of the split "train" are returned.

    Args:
        texts: endings of files that are plain text in a folder.

    Raises:
        DataError: there is no such file, or there are files of several formats.
        StoreError: the bucket does not answer.
    """
    one_file = not has_wildcard(path) and _kind_of(str(path)) in _READERS
    folder = not has_wildcard(path) and not one_file
    files = find_files(path)
    if folder:
        files = _select_readable(path, files, texts)
    if saved := _find_saved(path, {file.name: file for file in files}):
        return saved
    files = [file for file in files if not _SCRATCH.search(file.name)]
    found = {}
    for suffix in _READERS:
        group = [file for file in files if _kind(file) == suffix]
        if group:
            found[suffix] = group
    others = [
        file for file in files if _kind(file) not in _READERS and not _ABOUT.search(file.name)
    ]
    if len(found) > 1 or (folder and others):
        found.pop(".json", None)  # it describes the others
    if not found:
        return []
    if len(found) > 1 or others:
        endings = sorted({*found, *map(_suffix, others)})
        if folder:
            base = path
        else:
            base = "FOLDER"
        raise DataError(
            f"{path}: there are files that end in {', '.join(endings)}; fix: name those of one "
            f"kind, such as {base}/**/*{next(iter(found))}"
        )
    rows = next(iter(found.values()))
    if folder:
        train = [row for row in rows if _TRAIN.search(row.name)]
        if train and any(
            _OTHER_SPLIT.search(row.name) for row in rows if not _TRAIN.search(row.name)
        ):
            return train
    return rows


def read_rows(files: Sequence[DataFile], column: str | None = None) -> Iterator[PlacedRow]:
    """Yield the rows of files, with at least the column `column`.

    Rows have all their columns if `column` is None or if they lack it. Raises DataError for a file
    that cannot be read as rows, and if there are no rows.
    """
    count = 0
    for file in files:
        for number, row in enumerate(_READERS[_kind(file)](file, column), 1):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{file}, row {number}: a {type(row).__name__}; fix: one JSON object for "
                    "each row"
                )
            count += 1
            yield PlacedRow(file, number, row)
    if not count:
        if len(files) > 1:
            more = f" and {len(files) - 1} more files have"
        else:
            more = " has"
        raise DataError(f"{files[0]}{more} no rows; fix: another dataset")


def _suffix(file: DataFile) -> str:
    return PurePosixPath(file.path).suffix.lower()


def _kind(file: DataFile) -> str:
    return _kind_of(file.path)


def _kind_of(path: str) -> str:
    """Return the ending that tells a file's format, such as .jsonl for rows.ndjson.gz."""
    name = PurePosixPath(path)
    suffix = name.suffix.lower()
    if suffix in _OPEN_COMPRESSED:
        inner = PurePosixPath(name.stem).suffix.lower()
        inner = _SYNONYMS.get(inner, inner)
        return inner if inner in _COMPRESSIBLE else suffix
    return _SYNONYMS.get(suffix, suffix)


def _select_readable(
    path: str | Path, files: Sequence[DataFile], texts: Sequence[str]
) -> list[DataFile]:
    """Select the files that have rows or are plain text. Raises DataError if there is none."""
    found = [file for file in files if _kind(file) in _READERS or _suffix(file) in texts]
    if found:
        return found
    endings = ", ".join(dict.fromkeys([*_READERS, *_SYNONYMS, *texts]))
    fix = "name a folder, a file, or a glob of files"
    if {_suffix(file) for file in files} & {".csv", ".tsv"}:
        fix = "write it as JSON Lines (pandas: to_json(path, orient='records', lines=True))"
    raise DataError(
        f"{path}: no file that ends in {endings} (.jsonl and .json also with "
        f"{', '.join(_OPEN_COMPRESSED)}); fix: {fix}"
    )


def _open_rows(file: DataFile) -> BinaryIO | io.BufferedIOBase:
    """Open a file of rows, and decompress it if its ending is that of a compressed file."""
    stream = file.open()
    decompress = _OPEN_COMPRESSED.get(_suffix(file))
    if decompress is None:
        return stream
    return decompress(stream)


def _open_zstd(stream: BinaryIO) -> io.BufferedIOBase:
    arrow = import_arrow()
    return io.BufferedReader(arrow.CompressedInputStream(stream, "zstd"))


def _find_saved(path: str | Path, files: Mapping[str, DataFile]) -> list[DataFile]:
    """Return the Arrow files that `save_to_disk` wrote into a folder.

    Of a DatasetDict, these are the files of the split "train".
    """
    part = ""
    splits = files.get("dataset_dict.json")
    if splits is not None:
        names = _read_about(splits).get("splits", [])
        if "train" not in names:
            raise DataError(
                f"{path} has the splits {', '.join(map(str, names))}; fix: name the folder of "
                "one of them"
            )
        part = "train/"
    state = files.get(f"{part}state.json")
    if state is None:
        return []
    about = _read_about(state)
    if about.get("_indices_files"):
        raise DataError(
            f"{path} was saved as a selection of rows; fix: flatten_indices() before save_to_disk"
        )
    names = [f"{part}{entry.get('filename')}" for entry in about.get("_data_files") or ()]
    if missing := [name for name in names if name not in files]:
        raise DataError(
            f"{path}/{missing[0]} is missing, but {state} names it; fix: copy the whole folder"
        )
    return [files[name] for name in names]


def _read_about(file: DataFile) -> dict[str, Any]:
    try:
        found = json.loads(file.read(0, file.size))
    except ValueError as error:
        raise DataError(f"{file}: not JSON ({error}); fix: save_to_disk again") from error
    if isinstance(found, dict):
        return found
    return {}


def _read_json_lines(file: DataFile, column: str | None) -> Iterator[Json]:  # noqa: ARG001 (the interface of readers)
    with _reading(file), _open_rows(file) as stream:
        yield from _parse_lines(file, stream)


def _parse_lines(file: DataFile, stream: Iterable[bytes]) -> Iterator[Json]:
    for number, line in enumerate(stream, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                yield json.loads(text)
        except ValueError as error:
            if isinstance(error, UnicodeDecodeError):
                kind = "UTF-8"
            else:
                kind = "JSON"
            raise DataError(
                f"{file}:{number}: not {kind} ({error}); fix: one JSON object per line"
            ) from error


def _read_json(file: DataFile, column: str | None) -> Iterator[Json]:  # noqa: ARG001 (the interface of readers)
    """Yield the objects in a file that is a JSON list or has one object per line."""
    with _reading(file), _open_rows(file) as stream:
        first = b""
        while not first.strip():
            first = stream.readline()
            if not first:
                return
        start = first.removeprefix(b"\xef\xbb\xbf").lstrip()
        if not start.startswith(b"["):
            yield from _parse_lines(file, chain([first], stream))
            return
        content = start + stream.read()
    try:
        yield from json.loads(content)
    except ValueError as error:
        raise DataError(
            f"{file}: not JSON ({error}); fix: a list of objects, or one object per line"
        ) from error


@contextmanager
def _reading(file: DataFile) -> Iterator[None]:
    """Convert the errors of decompressing a damaged file to DataError."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, OSError) as error:
        if _suffix(file) not in _OPEN_COMPRESSED:
            raise
        raise DataError(
            f"{file} cannot be decompressed: {' '.join(str(error).split())[:200]}; fix: copy it "
            "again"
        ) from error


def _read_tables(
    file: DataFile, batches: Callable[[BinaryIO], Iterator[RowTable]], fix: str
) -> Iterator[Json]:
    arrow = import_arrow()
    try:
        with file.open() as stream:
            for batch in batches(stream):
                yield from batch.to_pylist()
    except (arrow.ArrowException, OSError, EOFError) as error:
        raise DataError(f"{file}: {' '.join(str(error).split())[:200]}; fix: {fix}") from error


def _read_parquet(file: DataFile, column: str | None) -> Iterator[Json]:
    parquet = import_parquet()

    def batches(stream: BinaryIO) -> Iterator[RowTable]:
        with parquet.ParquetFile(stream) as content:
            yield from content.iter_batches(
                columns=[column] if column in content.schema_arrow.names else None
            )

    return _read_tables(file, batches, "copy it again, or leave it out by a glob")


def _read_arrow(file: DataFile, column: str | None) -> Iterator[Json]:
    arrow = import_arrow()

    def batches(stream: BinaryIO) -> Iterator[RowTable]:
        head = stream.read(len(_FILE_OF_ARROW))
        stream.seek(0)
        if head == _FILE_OF_ARROW:
            content = arrow.ipc.open_file(stream)
            found = (content.get_batch(number) for number in range(content.num_record_batches))
        else:
            found = iter(arrow.ipc.open_stream(stream))
        for batch in found:
            yield batch.select([column]) if column in batch.schema.names else batch

    return _read_tables(file, batches, "copy it again, or save_to_disk")


_OPEN_COMPRESSED: dict[str, Callable[[BinaryIO], io.BufferedIOBase]] = {
    ".gz": lambda stream: gzip.GzipFile(fileobj=stream),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": _open_zstd,
}
_READERS: dict[str, Callable[[DataFile, str | None], Iterator[Json]]] = {
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".json": _read_json,
}
