"""Text files: which are found, how they are split, what is no text, and what their shards are named
after.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbflow.core.config.schema import DataConfig
from ebbflow.core.store import Store
from ebbflow.training.data.build import (
    SourceFile,
    TextDetector,
    check_head,
    find_files,
    is_held_out,
    open_source,
    prepare_tokens,
    split_files,
)
from ebbflow.training.errors import DataError

NAMES = ["a.txt", "b.txt", "c.txt", "d.txt", "e.txt"]

FIX = "fix: convert it into UTF-8 text, or leave it out by data.path or data.suffixes"


def put(path: Path, content: bytes = b"text\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def names_of(files: list[SourceFile]) -> list[str]:
    return [file.name for file in files]


def test_a_folder_is_searched_without_tests_caches_and_packages(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    kept = ["a/x.md", "b.txt", "b/deep/tested/y.txt", "z.txt"]
    for name in kept:
        put(texts / name)
    for folder in (
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "site-packages",
        "dist-packages",
        "node_modules",
        ".git",
        ".venv",
    ):
        put(texts / folder / "x.txt")
        put(texts / "b" / folder / "x.txt")
    put(texts / "b" / "other.py")
    (texts / "folder.txt").mkdir()
    found = find_files(DataConfig(path="texts", suffixes=[".txt", ".md"]), project_root=tmp_path)
    assert names_of(found) == kept
    assert [file.path for file in found] == [texts / name for name in kept]
    assert found[0] == SourceFile("a/x.md", texts / "a/x.md", start=0, end=None)
    by_absolute_path = find_files(
        DataConfig(path=str(texts), suffixes=[".md"]), project_root=Path("/nowhere")
    )
    assert names_of(by_absolute_path) == ["a/x.md"]


def test_a_path_may_be_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    book = put(tmp_path / "books" / "one.dat")
    found = find_files(DataConfig(path="~/books/one.dat"), project_root=Path("/nowhere"))
    assert found == [SourceFile("one.dat", book)]


def test_a_glob_matches_files_below_their_common_folder(tmp_path: Path) -> None:
    for name in ("deep/b/z.txt", "deep/a/y.txt", "deep/a/c/x.txt", "deep/a.txt/folder"):
        put(tmp_path / name)
    whole = find_files(DataConfig(path="deep/**/*.txt"), project_root=tmp_path)
    assert names_of(whole) == ["a/c/x.txt", "a/y.txt", "b/z.txt"]
    assert names_of(find_files(DataConfig(path="deep/a/*.txt"), project_root=tmp_path)) == ["y.txt"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "texts",
            "data.path 'texts' holds no file that ends in .rs, .go; fix: set data.suffixes to "
            "the endings there are",
        ),
        (
            "nowhere/*.txt",
            "data.path 'nowhere/*.txt' is no folder, no file, and matches no file as a glob "
            "({root}/nowhere/*.txt); fix: name text that exists, or leave data.path out to train "
            "on the standard library",
        ),
        (
            "texts/*",
            "data.path 'texts/*' is no folder, no file, and matches no file as a glob "
            "({root}/texts/*); fix: name text that exists, or leave data.path out to train on "
            "the standard library",
        ),
        (
            "/dev/null",
            "data.path '/dev/null' is a device, which cannot be read twice; "
            "fix: copy what it delivers into a regular file",
        ),
    ],
)
def test_a_path_without_text_is_refused(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "texts" / "folder.rs").mkdir(parents=True)
    with pytest.raises(DataError) as caught:
        find_files(DataConfig(path=path, suffixes=[".rs", ".go"]), project_root=tmp_path)
    assert str(caught.value) == message.format(root=tmp_path)


def share_of(name: str) -> float:
    """Return the number from 0 to 1 that decides the side of a file."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:12], 16) / 2**48


def test_a_file_is_held_out_by_its_name_alone() -> None:
    share = share_of("a.txt")
    assert not is_held_out("a.txt", share) and is_held_out("a.txt", math.nextafter(share, 1.0))


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("fraction", [0.0001, 0.25, 0.5, 0.75, 0.9999])
def test_neither_side_of_a_split_is_empty(count: int, fraction: float) -> None:
    files = [SourceFile(name, Path(name)) for name in NAMES[:count]]
    by_share = sorted(NAMES[:count], key=share_of)
    below = sum(share_of(name) < fraction for name in by_share)
    held_out = set(by_share[: min(max(below, 1), count - 1)])
    train, other = split_files(files, fraction)
    assert names_of(train) == [name for name in NAMES[:count] if name not in held_out]
    assert names_of(other) == [name for name in NAMES[:count] if name in held_out]


def split_bytes(path: Path, content: bytes, fraction: float) -> tuple[bytes, bytes]:
    """Split a single file, and return the bytes of both parts."""
    file = SourceFile("book.txt", put(path / "book.txt", content))
    [train], [held_out] = split_files([file], fraction)
    assert (train.start, train.end, held_out.start, held_out.end) == (
        0,
        train.size,
        train.size,
        len(content),
    )
    assert train.size + held_out.size == len(content) == file.size
    with open_source(held_out) as stream:
        assert stream.read() == content[held_out.start :]
    return content[: train.size], content[held_out.start :]


@pytest.mark.parametrize(
    ("content", "fraction", "cut"),
    [
        (b"0123\n56\n89\n", 0.4, 8),  # 4.4 bytes, rounded to 4, from the next line end on
        (b"0123\n56\n89\n", 0.46, 8),
        (b"0123\n567\n9\n", 0.55, 5),  # the cut is a line end already
        (b"a\n\x80bc", 0.6, 2),
        (b"a\n\x80bc", 0.61, 2),
        (b"a\nbc", 0.75, 2),
        (b"\nabc", 0.75, 1),
        (b"0123456789", 0.3, 7),  # one line
        (b"0123456789", 0.01, 9),  # at least a byte
        (b"012345678\n", 0.3, 7),  # the last line end would leave nothing
        (b"0123456\n9\n", 0.5, 8),
        ("0123€6789".encode(), 0.5, 7),  # between two characters
        ("012345€9".encode(), 0.3, 9),
        ("012😀789".encode(), 0.6, 7),
        ("012😀78".encode(), 0.55, 7),
        (b"012\x80\x80\x80\x80\x80\x80", 0.66, 3),
        (b"012\x80\x80\x80\x80ab", 0.66, 3),
        (b"ab", 0.5, 1),
    ],
)
def test_a_single_file_is_cut_at_a_line_end_or_between_characters(
    tmp_path: Path, content: bytes, fraction: float, cut: int
) -> None:
    assert split_bytes(tmp_path, content, fraction) == (content[:cut], content[cut:])


@pytest.mark.parametrize(("place", "cut"), [(2**20 - 2, 2**20 + 9), (2**20 - 1, 11)])
def test_a_line_end_is_looked_for_within_a_mebibyte(tmp_path: Path, place: int, cut: int) -> None:
    """The search begins with the byte before the nominal cut, number 11 here."""
    content = bytearray(b"x" * (2**21))
    content[10 + place] = ord("\n")
    fraction = (2**21 - 11) / 2**21
    train, _ = split_bytes(tmp_path, bytes(content), fraction)
    assert len(train) == cut


@pytest.mark.parametrize(
    ("content", "fraction"), [(b"", 0.5), (b"a", 0.5), (b"ab", 0.9), (b"a\nb", 0.95)]
)
def test_a_file_that_is_too_short_to_split_is_refused(
    tmp_path: Path, content: bytes, fraction: float
) -> None:
    with pytest.raises(DataError) as caught:
        split_bytes(tmp_path, content, fraction)
    assert str(caught.value) == (
        f"{tmp_path}/book.txt has {len(content)} bytes, too few to split into train and held-out "
        "text; fix: set data.path to more text"
    )


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "none", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(DataError) as caught, open_source(SourceFile("x", path)):
            pass
        assert (
            str(caught.value)
            == f"{path} cannot be read: {reason}; fix: its permissions, or data.path"
        )


def refusal_of(pieces: list[bytes], *, start: int = 0) -> str:
    """Return why a file is no text, or "" if it is."""
    detector = TextDetector(SourceFile("x.txt", Path("/x.txt"), start=start))
    try:
        for piece in pieces:
            detector.examine(piece)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("head", "kind"),
    [
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
        (b"\x7fELF", "a program"),
        (b"\xff\xfe", "text in UTF-16 or UTF-32"),
        (b"\xfe\xff", "text in UTF-16"),
    ],
)
def test_a_binary_file_is_named_by_its_first_bytes(head: bytes, kind: str) -> None:
    text = head + b" and some more text" * 20 + b"\0"
    offset = text.index(b"\0")
    assert refusal_of([text]) == f"/x.txt has a NUL byte at offset {offset} (it is {kind}); {FIX}"
    assert (
        refusal_of([text], start=1000)
        == f"/x.txt has a NUL byte at offset {1000 + offset:,}; {FIX}"
    )
    later = [b"text" * 5, text]
    assert refusal_of(later) == f"/x.txt has a NUL byte at offset {20 + offset}; {FIX}", (
        "the first piece alone counts"
    )


def test_a_file_that_looks_like_text_throughout_is_known_by_its_head() -> None:
    assert refusal_of([b"%PDF-1.4 only ASCII"]) == f"/x.txt is a PDF document; {FIX}"
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    assert (
        refusal_of([pointer])
        == "/x.txt is a pointer of Git LFS, not the file itself; fix: git lfs pull"
    )
    for head in (b"%PDF-", pointer):
        assert refusal_of([head], start=1) == refusal_of([b"text", head]) == ""


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        ([b"\0"], "has a NUL byte at offset 0"),
        ([b"text\n", b"te\0t"], "has a NUL byte at offset 7"),
        ([b"\xff" + b"x" * 9], ""),  # a tenth
        ([b"\xff" + b"x" * 8], "is no UTF-8 text: 11 % of its first 9 bytes are invalid"),
        ([b"x" * 100, b"\xff" * 11], ""),
        ([b"x" * 100, b"\xff" * 12], "is no UTF-8 text: 11 % of its first 112 bytes are invalid"),
        ([b"x" * 100, b"\xff" * 11, "ü".encode() * 10, b"\xff" * 2 + b"y"], ""),
        (
            [b"x" * 100, b"\xff" * 11, b"\xff" * 2],
            "is no UTF-8 text: 12 % of its first 113 bytes are invalid",
        ),
        (
            [b"x" * 2000, b"\xff" * 250],
            "is no UTF-8 text: 11 % of its first 2,250 bytes are invalid",
        ),
    ],
)
def test_text_has_no_nul_bytes_and_few_invalid_ones(pieces: list[bytes], found: str) -> None:
    assert refusal_of(pieces) == (f"/x.txt {found}; {FIX}" if found else "")


def test_the_head_of_a_file_is_its_first_64_kib(tmp_path: Path) -> None:
    for place, refused in ((2**16 - 1, True), (2**16, False)):
        content = bytearray(b"x" * 2**17)
        content[place] = 0
        file = SourceFile("x.txt", put(tmp_path / "x.txt", bytes(content)))
        if refused:
            with pytest.raises(DataError, match="NUL byte at offset 65,535"):
                check_head(file)
        else:
            check_head(file)


def fingerprint_of(split: str, files: dict[str, list[bytes]]) -> str:
    """Return the fingerprint of shards, whose format is part of each store."""
    hashes = []
    for name, parts in sorted(files.items()):
        for part in parts:
            hashes.append([name, hashlib.sha256(part).hexdigest()])
    described = {"files": hashes, "format": 2, "split": split, "tokenizer": "bytes"}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def test_shards_are_described_by_all_that_determines_them(tmp_path: Path) -> None:
    files = {
        name: f"text {name}\n".encode() * (number + 2)
        for number, name in enumerate(reversed(NAMES))
    }
    for name, content in files.items():
        put(tmp_path / "texts" / name, content)
    store = Store.open(str(tmp_path / "store"))
    data = DataConfig(path="texts", suffixes=[".txt"], held_out_fraction=0.5)
    tokens = prepare_tokens(data, store, project_root=tmp_path)
    sides = {
        "train": b"\0".join(files[name] for name in NAMES if share_of(name) >= 0.5),
        "held_out": b"\0".join(files[name] for name in NAMES if share_of(name) < 0.5),
    }
    counts = np.bincount(np.frombuffer(sides["train"], np.uint8))
    shares = counts[counts > 0] / counts.sum()
    expected = {
        "fingerprint": fingerprint_of(
            "sha256(name) < 0.5", {name: [content] for name, content in files.items()}
        ),
        "vocab_size": 256,
        "train_tokens": len(sides["train"]),
        "held_out_tokens": len(sides["held_out"]),
        "unigram_entropy_nats": pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12),
        "files": 5,
        "bytes": sum(map(len, files.values())),
        "held_out_bytes": len(sides["held_out"].replace(b"\0", b"")),
        "shard_sha256": {
            name: hashlib.sha256(content).hexdigest() for name, content in sides.items()
        },
        "weight_unit": "tokens",
    }
    assert tokens.to_json() == expected
    shards = store.sub(f"tokens/{tokens.fingerprint}")
    assert {name: shards.get(f"{name}.bin") for name in sides} == sides
    assert shards.get("tokens.json") == json.dumps(tokens.to_json(), indent=1).encode()
    assert {meta.key for meta in shards.list()} == {"train.bin", "held_out.bin", "tokens.json"}


def test_shards_of_a_single_file_are_named_after_both_of_its_parts(tmp_path: Path) -> None:
    put(tmp_path / "book.txt", b"one\ntwo\nthree\nfour\n")
    store = Store.open(str(tmp_path / "store"))
    tokens = prepare_tokens(
        DataConfig(path="book.txt", held_out_fraction=0.25), store, project_root=tmp_path
    )
    parts = [b"one\ntwo\nthree\n", b"four\n"]
    assert tokens.fingerprint == fingerprint_of("last 0.25 of one file", {"book.txt": parts})
    assert (tokens.files, tokens.bytes, tokens.held_out_bytes) == (1, 19, 5)
    assert store.get(f"tokens/{tokens.fingerprint}/held_out.bin") == b"four\n"


def test_a_side_without_text_has_an_empty_shard(tmp_path: Path) -> None:
    first, second = sorted(("a.txt", "b.txt"), key=share_of)
    put(tmp_path / "texts" / first, b"")
    put(tmp_path / "texts" / second, b"text")
    store = Store.open(str(tmp_path / "store"))
    tokens = prepare_tokens(
        DataConfig(path="texts", suffixes=[".txt"]), store, project_root=tmp_path
    )
    assert (tokens.train_tokens, tokens.held_out_tokens) == (4, 0)
    assert store.get(f"tokens/{tokens.fingerprint}/held_out.bin") == b""


def test_text_that_changes_between_its_two_readings_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path / "texts" / "a.txt")
    put(tmp_path / "texts" / "b.txt")

    class Changing:
        """A store that is opened when each file has been read once."""

        def sub(self, prefix: str) -> Store:
            path.write_bytes(b"tex!\n")
            return Store.open(str(tmp_path / "store")).sub(prefix)

    store: Any = Changing()
    with pytest.raises(DataError) as caught:
        prepare_tokens(DataConfig(path="texts", suffixes=[".txt"]), store, project_root=tmp_path)
    assert (
        str(caught.value)
        == f"{path} changed while it was read; fix: start again when no process writes to it"
    )


def test_text_that_is_appended_between_the_readings_of_a_single_file_is_left_out(
    tmp_path: Path,
) -> None:
    content = b"one\ntwo\nthree\nfour\n"
    path = put(tmp_path / "book.txt", content)

    class Growing:
        """A store that is opened when the file has been read once."""

        def sub(self, prefix: str) -> Store:
            path.write_bytes(content + b"five\n" * 10)
            return Store.open(str(tmp_path / "store")).sub(prefix)

    store: Any = Growing()
    tokens = prepare_tokens(
        DataConfig(path="book.txt", held_out_fraction=0.25), store, project_root=tmp_path
    )
    assert (tokens.bytes, tokens.held_out_bytes, tokens.held_out_tokens) == (19, 5, 5)


def test_a_binary_file_is_found_when_all_of_it_is_read(tmp_path: Path) -> None:
    """The head of the file is text."""
    put(tmp_path / "texts" / "a.txt", b"line of text\n" * 6000 + b"\xff" * 30_000)
    put(tmp_path / "texts" / "b.txt")
    store = Store.open(str(tmp_path / "store"))
    with pytest.raises(
        DataError, match=r"a\.txt is no UTF-8 text: 28 % of its first 108,000 bytes are invalid"
    ):
        prepare_tokens(DataConfig(path="texts", suffixes=[".txt"]), store, project_root=tmp_path)


def test_a_source_file_cannot_be_changed_and_knows_its_size(tmp_path: Path) -> None:
    path = put(tmp_path / "x.txt", b"0123456789")
    file = SourceFile("x.txt", path)
    assert (
        file.size,
        SourceFile("x", path, start=3).size,
        SourceFile("x", path, start=3, end=7).size,
    ) == (10, 7, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        file.start = 1  # type: ignore[misc]
