"""Find text files, split them into training and held-out text, and build token shards without
loading whole files.
"""

import glob
import hashlib
import json
import mmap
import os
import stat
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ebbflow.core.config.schema import DataConfig
from ebbflow.core.layout import tokens_prefix
from ebbflow.core.store import Store
from ebbflow.training.data.tokenizer import (
    Tokenizer,
    dtype_of,
    encode_files,
    open_tokenizer,
    text_pieces,
)
from ebbflow.training.data.tokens import (
    DESCRIPTION,
    FORMAT_VERSION,
    SHARDS,
    Tokens,
    count_tokens,
    entropy_nats,
    read_description,
)
from ebbflow.training.errors import DataError

# Folders with test data, caches or third-party packages.
SKIPPED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "site-packages",
        "dist-packages",
        "node_modules",
        ".git",
        ".venv",
    }
)

# First bytes of formats that are often stored beside text, and their names.
_SIGNATURES = (
    (b"\x89PNG\r\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"RIFF", "a RIFF file (WebP, WAV, AVI)"),
    (b"PAR1", "a Parquet table"),
    (b"ARROW1", "an Arrow file"),
    (b"Obj\x01", "an Avro file"),
    (b"ORC", "an ORC table"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"BZh", "compressed by bzip2"),
    (b"\xfd7zXZ\x00", "compressed by xz"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"\x04\x22\x4d\x18", "compressed by lz4"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"PK\x03\x04", "a zip archive (or docx, xlsx, npz, pt)"),
    (b"%PDF-", "a PDF document"),
    (b"\x7fELF", "a program"),
    (b"\xff\xfe", "text in UTF-16 or UTF-32"),
    (b"\xfe\xff", "text in UTF-16"),
)
_ASCII_ONLY = (b"%PDF-",)  # such files may look like text throughout
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Latin-1 text of European languages has up to 5 %, compressed data and images more than 30 %.
_MOST_INVALID_SHARE = 0.1
_HEAD_BYTES = 64 * 1024
_LINE_SEARCH_BYTES = 2**20


@dataclass(frozen=True)
class SourceFile:
    """A text file, or a contiguous part of one."""

    name: str  # path below the data's root, with "/" on every system
    path: Path
    start: int = 0  # offset of the part's first byte
    end: int | None = None  # offset at which the part ends; None means the end of the file

    @property
    def size(self) -> int:
        return (os.stat(self.path).st_size if self.end is None else self.end) - self.start


class TextDetector:
    """Detector of binary files.

    Text is UTF-8 without NUL bytes and with at most 10 % of invalid bytes.
    """

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._bytes = self._invalid = 0
        self._signature = ""

    def examine(self, piece: bytes) -> None:
        """Examine the next bytes of the content.

        Raises DataError as soon as the content is certainly not text.
        """
        if not self._bytes and self._file.start == 0:
            self._signature = next(
                (name for head, name in _SIGNATURES if piece.startswith(head)), ""
            )
            if piece.startswith(_ASCII_ONLY):
                raise self._refusal(f"is {self._signature}")
            if piece.startswith(_LFS_POINTER):
                raise DataError(
                    f"{self._file.path} is a pointer of Git LFS, not the file itself; fix: git "
                    "lfs pull"
                )
        at = piece.find(b"\0")
        if at >= 0:
            raise self._refusal(f"has a NUL byte at offset {self._file.start + self._bytes + at:,}")
        self._bytes += len(piece)
        try:
            piece.decode("utf-8")
        except UnicodeDecodeError:
            self._invalid += len(piece) - len(piece.decode("utf-8", "ignore").encode())
            if self._invalid > _MOST_INVALID_SHARE * self._bytes:
                share = 100 * self._invalid / self._bytes
                raise self._refusal(
                    f"is no UTF-8 text: {share:.0f} % of its first {self._bytes:,} bytes are "
                    "invalid"
                ) from None

    def _refusal(self, found: str) -> DataError:
        if self._signature and self._signature not in found:
            named = f" (it is {self._signature})"
        else:
            named = ""
        return DataError(
            f"{self._file.path} {found}{named}; fix: convert it into UTF-8 text, or leave it out "
            "by data.path or data.suffixes"
        )


def find_files(data: DataConfig, *, project_root: Path) -> list[SourceFile]:
    """List the text files of `data.path`, sorted by name. Raises DataError.

    If no path is configured, list the source files of Python's standard library.
    """
    if data.path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return _find_below(root, tuple(data.suffixes), f"the standard library at {root}")
    path = project_root / Path(data.path).expanduser()
    if path.is_file():
        return [SourceFile(path.name, path)]
    if path.exists() and not path.is_dir():
        raise DataError(
            f"data.path {data.path!r} is {_describe_kind(path.stat().st_mode)}, which cannot be "
            "read twice; fix: copy what it delivers into a regular file"
        )
    if path.is_dir():
        return _find_below(path, tuple(data.suffixes), f"data.path {data.path!r}")
    return _find_matching(str(path), data.path)


def is_held_out(name: str, fraction: float) -> bool:
    """Return whether a file is held out for evaluation.

    `fraction`, from 0 to 1, is the share of files to hold out.

    The decision depends on the file's name alone, so adding a file moves no other file between the
    training and held-out text. Whole files are held out, because windows of one file share
    vocabulary and copied passages.
    """
    return _hash_fraction(name) < fraction


def split_files(
    files: list[SourceFile], fraction: float
) -> tuple[list[SourceFile], list[SourceFile]]:
    """Split files, or the bytes of a single file, into a training part and a held-out `fraction`.

    Raises DataError if the text is too short to split.
    """
    if len(files) == 1:
        return _split_inside(files[0], fraction)
    # With few files all may fall on one side; then the file with the lowest (or highest) hash
    # changes sides.
    lots = sorted(_hash_fraction(file.name) for file in files)
    limit = min(max(fraction, lots[1]), lots[-1])
    train = [file for file in files if not is_held_out(file.name, limit)]
    return train, [file for file in files if is_held_out(file.name, limit)]


@contextmanager
def open_source(file: SourceFile) -> Iterator[BinaryIO]:
    """Open a file at the first byte of the described part.

    Do not block if the file is a FIFO. Raises DataError.
    """
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise DataError(
                    f"{file.path} is {_describe_kind(mode)}, not a regular file; fix: move it away"
                )
            stream.seek(file.start)
            yield stream
    except OSError as error:
        raise DataError(
            f"{file.path} cannot be read: {error.strerror}; fix: its permissions, or data.path"
        ) from error


def check_head(file: SourceFile) -> None:
    """Check that a file is readable and that its first 64 KiB look like text. Raises DataError."""
    with open_source(file) as stream:
        head = stream.read(_HEAD_BYTES)
    TextDetector(file).examine(head)


def prepare_tokens(data: DataConfig, store: Store, *, project_root: Path) -> Tokens:
    """Build the token shards of `data` in `store` unless they exist, and return their description.

    The shards are identified by a fingerprint of the format, the tokenizer, the split rule, and
    each file's name and content. The fingerprint does not depend on this machine. Raises DataError
    if files or tokenizer are missing or unusable, and StoreError if the store failed.
    """
    tokenizer = open_tokenizer(data, project_root=project_root)
    files = find_files(data, project_root=project_root)
    train, held_out = split_files(files, data.held_out_fraction)
    sides = {
        "train": [_hash(file) for file in train],
        "held_out": [_hash(file) for file in held_out],
    }
    hashed = sorted(
        [*sides["train"], *sides["held_out"]], key=lambda hashed_file: hashed_file.file.name
    )
    fraction = data.held_out_fraction
    described = {
        "format": FORMAT_VERSION,
        "tokenizer": tokenizer.identity,
        "split": f"last {fraction!r} of one file"
        if len(files) == 1
        else f"sha256(name) < {fraction!r}",
        "files": [[read.file.name, read.sha256] for read in hashed],
    }
    fingerprint = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    shards = store.sub(tokens_prefix(fingerprint))
    known = read_description(shards)
    cut = "" if known is None else _find_cut_shard(shards, known)
    if known is not None and not cut:
        return known
    if cut:
        print(f"{cut}; it is built again from the same text", flush=True)
    built = {name: _build(side, tokenizer, shards, SHARDS[name]) for name, side in sides.items()}
    tokens = Tokens(
        fingerprint=fingerprint,
        vocab_size=tokenizer.vocab_size,
        train_tokens=built["train"].tokens,
        held_out_tokens=built["held_out"].tokens,
        unigram_entropy_nats=built["train"].entropy_nats,
        files=len(files),
        bytes=sum(read.size for read in hashed),
        held_out_bytes=sum(read.size for read in sides["held_out"]),
        shard_sha256={name: shard.sha256 for name, shard in built.items()},
    )
    shards.put(DESCRIPTION, json.dumps(tokens.to_json(), indent=1).encode())
    return tokens


def _split_inside(file: SourceFile, fraction: float) -> tuple[list[SourceFile], list[SourceFile]]:
    """Split a file so that its last `fraction` of bytes is held out.

    The cut is at the next line end within 1 MiB. If there is no line end, it is between two
    characters.
    """
    with open_source(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        nominal = size - max(1, round(size * fraction))
        stream.seek(max(0, nominal - 1))
        block = stream.read(_LINE_SEARCH_BYTES)
    feed = block.find(b"\n", 0, -1)  # not the last byte: nothing would be left
    if feed < 0 or nominal <= 0:  # no line ends there: cut between two characters
        feed = next((at for at, byte in enumerate(block[1:5]) if byte & 0xC0 != 0x80), 0)
    cut = nominal + feed
    if cut <= 0:
        raise DataError(
            f"{file.path} has {size} bytes, too few to split into train and held-out text; "
            "fix: set data.path to more text"
        )
    return [replace(file, end=cut)], [replace(file, start=cut, end=size)]


def _describe_kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "no file")


def _hash_fraction(name: str) -> float:
    """Map a name to a number from 0 (included) to 1 (excluded), by hashing the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _find_below(root: Path, suffixes: tuple[str, ...], what: str) -> list[SourceFile]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder) / name
            if name.endswith(suffixes) and path.is_file():
                found.append(SourceFile(path.relative_to(root).as_posix(), path))
    if not found:
        raise DataError(
            f"{what} holds no file that ends in {', '.join(suffixes)}; fix: set data.suffixes to "
            "the endings there are"
        )
    return sorted(found, key=lambda file: file.name)


def _find_matching(pattern: str, written: str) -> list[SourceFile]:
    paths = [Path(path) for path in glob.glob(pattern, recursive=True)]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise DataError(
            f"data.path {written!r} is no folder, no file, and matches no file as a glob "
            f"({pattern}); fix: name text that exists, or leave data.path out to train on the "
            "standard library"
        )
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return sorted(
        (SourceFile(p.relative_to(root).as_posix(), p) for p in paths), key=lambda file: file.name
    )


@dataclass(frozen=True)
class _Hashed:
    """A source file, with the SHA-256 and size in bytes of its content at the first reading."""

    file: SourceFile
    sha256: str
    size: int


@dataclass(frozen=True)
class _Shard:
    tokens: int
    sha256: str
    entropy_nats: float


def _hash(file: SourceFile) -> _Hashed:
    """Read a file or part of a file, and return it with its SHA-256.

    Raises DataError if it is not text.
    """
    digest = hashlib.sha256()
    size = 0
    detector = TextDetector(file)
    for piece in _pieces_of(file):
        detector.examine(piece)
        digest.update(piece)
        size += len(piece)
    return _Hashed(file, digest.hexdigest(), size)


def _build(side: list[_Hashed], tokenizer: Tokenizer, shards: Store, key: str) -> _Shard:
    """Build one shard under `key`.

    The shard is first written to a temporary file, because its size is known only at the end.
    """
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    digest = hashlib.sha256()
    with tempfile.TemporaryFile() as file:
        for tokens in encode_files(map(_pieces_if_unchanged, side), tokenizer):
            counts += count_tokens(tokens, tokenizer.vocab_size)
            content = tokens.tobytes()
            digest.update(content)
            file.write(content)
        file.flush()
        if counts.any():
            # Not closed: a failed put may still hold the map, and closing it would hide the store's
            # error.
            shards.put(key, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        else:
            shards.put(key, b"")
    return _Shard(int(counts.sum()), digest.hexdigest(), entropy_nats(counts))


def _find_cut_shard(shards: Store, tokens: Tokens) -> str:
    """Describe the first shard that is missing or truncated; return "" if there is none."""
    counts = {"train": tokens.train_tokens, "held_out": tokens.held_out_tokens}
    for name, count in counts.items():
        key = SHARDS[name]
        size = count * dtype_of(tokens.vocab_size).itemsize
        meta = shards.head(key)
        if meta is None or meta.size != size:
            there = 0 if meta is None else meta.size
            return f"{shards.uri}/{key} has {there:,} of {size:,} bytes"
    return ""


def _pieces_if_unchanged(hashed: _Hashed) -> Iterator[bytes]:
    """Read a file again and yield its pieces.

    Raises DataError at the end if the content has changed.
    """
    digest = hashlib.sha256()
    for piece in _pieces_of(hashed.file):
        digest.update(piece)
        yield piece
    if digest.hexdigest() != hashed.sha256:
        raise DataError(
            f"{hashed.file.path} changed while it was read; fix: start again when no process writes "
            "to it"
        )


def _pieces_of(file: SourceFile) -> Iterator[bytes]:
    with open_source(file) as stream:
        yield from text_pieces(stream, limit=None if file.end is None else file.end - file.start)
