"""Text becomes shards once, by content; samples come in an order that nothing but seed and index
decides.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ebbflow.core.config.schema import DataConfig, RunConfig
from ebbflow.core.layout import tokens_prefix
from ebbflow.core.store import Store
from ebbflow.training.data import SampleOrder, open_tokens, prepare_tokens
from ebbflow.training.data.build import SourceFile, find_files, is_held_out, open_source
from ebbflow.training.data.stream import TokenStream
from ebbflow.training.errors import DataError
from ebbflow.training.workload import Cursor, WorkloadContext
from ebbflow.workloads.language.language_model import TextWorkload
from tests.support.flow import wait_until
from tests.support.s3.fixture import FailingServer, failing_s3

__all__ = ["failing_s3"]

NOISE = bytes(np.random.default_rng(0).integers(1, 256, 50_000, dtype=np.uint8))


class RemoteStore:
    """A store that keeps its place to itself, as an object store does."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def sub(self, prefix: str) -> RemoteStore:
        return RemoteStore(self._inner.sub(prefix))

    def local_path(self, key: str) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@settings(max_examples=60, deadline=None)
@given(windows=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 2**20))
def test_each_epoch_visits_every_window_once(windows: int, seed: int, epoch: int) -> None:
    seen = SampleOrder(windows, seed).window(epoch * windows, windows)
    assert sorted(seen.tolist()) == list(range(windows))


def test_the_order_is_a_pure_function_of_seed_and_index() -> None:
    whole = SampleOrder(1009, 7).window(0, 3000)
    pieces = [SampleOrder(1009, 7).window(first, 100) for first in range(0, 3000, 100)]
    assert np.array_equal(whole, np.concatenate(pieces))
    assert not np.array_equal(whole[:1009], whole[1009:2018]), "each epoch has an order of its own"
    assert not np.array_equal(whole, SampleOrder(1009, 8).window(0, 3000))


def test_the_order_shuffles() -> None:
    """Neighbours land far apart on average: n/3 for a uniform permutation; and no position is fixed
    much.
    """
    windows = 20_000
    order = SampleOrder(windows, 3).window(0, windows)
    assert abs(np.abs(np.diff(order)).mean() / windows - 1 / 3) < 0.02
    assert (order == np.arange(windows)).sum() < 12


def write_texts(folder: Path, count: int = 40) -> None:
    for number in range(count):
        path = folder / f"part{number % 3}" / f"text{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text number {number}\n" * (number + 1))


def test_shards_hold_the_files_and_leak_none_into_the_held_out_text(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    data = DataConfig(path=str(tmp_path / "texts"), suffixes=[".txt"], held_out_fraction=0.2)
    store = Store.open(str(tmp_path / "store"))
    tokens = prepare_tokens(data, store, project_root=tmp_path)
    arrays = open_tokens(store, tokens.fingerprint)
    train = arrays.train.tobytes()
    held_out = arrays.held_out.tobytes()
    files = find_files(data, project_root=tmp_path)
    assert tokens.files == len(files) == 40
    for file in files:
        text = file.path.read_bytes()
        assert (text in held_out.split(b"\0")) == is_held_out(file.name, 0.2)
        assert (text in train.split(b"\0")) != is_held_out(file.name, 0.2)
    assert (tokens.train_tokens, tokens.held_out_tokens) == (len(train), len(held_out))
    assert hashlib.sha256(train).hexdigest() == tokens.shard_sha256["train"]
    counts = np.bincount(np.frombuffer(train, np.uint8))
    shares = counts[counts > 0] / len(train)
    assert tokens.unigram_entropy_nats == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12)


def test_shards_are_built_once_and_named_by_content(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    store = Store.open(str(tmp_path / "store"))
    data = DataConfig(path=str(tmp_path / "texts"), suffixes=[".txt"])
    first = prepare_tokens(data, store, project_root=tmp_path)
    before = {meta.key: meta.modified for meta in store.list()}
    (tmp_path / "texts").rename(tmp_path / "moved")
    moved = DataConfig(path="moved", suffixes=[".txt"])
    assert prepare_tokens(moved, store, project_root=tmp_path) == first, (
        "the place of the text does not matter"
    )
    assert {meta.key: meta.modified for meta in store.list()} == before
    with open(tmp_path / "moved" / "part1" / "text1.txt", "a") as file:
        file.write("!")
    assert prepare_tokens(moved, store, project_root=tmp_path).fingerprint != first.fingerprint


@pytest.mark.parametrize("left", [None, 0, 8])
def test_a_shard_that_was_cut_is_built_again_before_any_rank_opens_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], left: int | None
) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"text {number} " * 50)
    data = DataConfig(path="texts", suffixes=[".txt"], held_out_fraction=0.3)
    store = Store.open(str(tmp_path / "store"))
    first = prepare_tokens(data, store, project_root=tmp_path)
    key = f"{tokens_prefix(first.fingerprint)}/train.bin"
    whole = store.get(key)
    if left is None:
        store.delete(key)
    else:
        store.put(key, whole[:left])
    assert prepare_tokens(data, store, project_root=tmp_path) == first
    assert store.get(key) == whole
    assert f"train.bin has {left or 0} of {len(whole):,} bytes" in capsys.readouterr().out
    prepare_tokens(data, store, project_root=tmp_path)
    assert capsys.readouterr().out == ""


def test_a_crash_before_the_description_leaves_no_shards_to_be_believed(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    store = Store.open(str(tmp_path / "store"))
    data = DataConfig(path=str(tmp_path / "texts"), suffixes=[".txt"])
    tokens = prepare_tokens(data, store, project_root=tmp_path)
    store.delete(f"tokens/{tokens.fingerprint}/tokens.json")
    with pytest.raises(DataError, match="no complete token shards"):
        open_tokens(store, tokens.fingerprint)
    assert prepare_tokens(data, store, project_root=tmp_path) == tokens


def test_a_truncated_shard_is_noticed(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    store = Store.open(str(tmp_path / "store"))
    tokens = prepare_tokens(
        DataConfig(path="texts", suffixes=[".txt"]), store, project_root=tmp_path
    )
    key = f"tokens/{tokens.fingerprint}/train.bin"
    store.put(key, store.get(key)[:-1])
    with pytest.raises(DataError, match=r"train\.bin is not the"):
        open_tokens(store, tokens.fingerprint)


def test_a_remote_shard_is_downloaded_once_and_verified(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    local = Store.open(str(tmp_path / "store"))
    tokens = prepare_tokens(
        DataConfig(path="texts", suffixes=[".txt"]), local, project_root=tmp_path
    )
    remote = RemoteStore(local)
    arrays = open_tokens(remote, tokens.fingerprint, cache=tmp_path / "cache")
    assert arrays.train.tobytes() == local.get(f"tokens/{tokens.fingerprint}/train.bin")
    key = f"tokens/{tokens.fingerprint}/train.bin"
    content = bytearray(local.get(key))
    content[5] ^= 1
    local.put(key, bytes(content))
    again = open_tokens(remote, tokens.fingerprint, cache=tmp_path / "cache")
    assert np.array_equal(again.train, arrays.train), "the cache is used"
    with pytest.raises(DataError, match="sha256"):
        open_tokens(remote, tokens.fingerprint, cache=tmp_path / "other")


def test_ranks_of_one_machine_download_once(tmp_path: Path) -> None:
    """Each thread stands for a rank: a lock of a file holds between threads too, if each opens it."""
    write_texts(tmp_path / "texts")
    local = Store.open(str(tmp_path / "store"))
    tokens = prepare_tokens(
        DataConfig(path="texts", suffixes=[".txt"]), local, project_root=tmp_path
    )
    reads = list[str]()
    signs = list[int]()

    class Slow(RemoteStore):
        def sub(self, prefix: str) -> RemoteStore:
            return Slow(self._inner.sub(prefix))

        def get_range(self, key: str, start: int, length: int) -> bytes:
            reads.append(key)
            time.sleep(0.2)
            return self._inner.get_range(key, start, length)

    with ThreadPoolExecutor(4) as pool:
        options: dict[str, Any] = {
            "cache": tmp_path / "c",
            "alive": lambda: signs.append(threading.get_ident()),
        }
        opened = [
            pool.submit(open_tokens, Slow(local), tokens.fingerprint, **options) for _ in range(4)
        ]
        trains = {future.result().train.tobytes() for future in opened}
    assert sorted(reads) == ["held_out.bin", "train.bin"] and len(trains) == 1
    assert len(set(signs)) == 4, (
        "a rank that downloads or waits gives signs of life, however many bytes there are"
    )


def test_a_shard_larger_than_the_volume_is_read_in_rows_ahead_of_the_loop(
    tmp_path: Path, failing_s3: FailingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples are those of the file, bit for bit.

    Rows that fit into the volume are read once.
    """
    server = failing_s3
    bucket = failing_s3.new_bucket()
    server.use(monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_texts(tmp_path / "texts")
    local = Store.open(str(tmp_path / "store"))
    remote = Store.open(f"s3://{bucket}/data")
    texts = DataConfig(path="texts", suffixes=[".txt"])
    prepare_tokens(texts, local, project_root=tmp_path)
    prepared = prepare_tokens(texts, remote, project_root=tmp_path).to_json()
    length = 64
    kept = 7
    batch = 4
    # A byte for each token, a CRC-32 for each row
    room = prepared["held_out_tokens"] + kept * (length + 1 + 4)
    settings = {"model": {"sequence_length": length}, "data": {"cache_gib": room / 2**30}}
    config = RunConfig.model_validate({**settings, "training": {"batch_size": batch}})
    ours, theirs = (
        TextWorkload(
            WorkloadContext(config=config, store=store, project_root=tmp_path, prepared=prepared)
        )
        for store in (remote, local)
    )
    train = ours._tokens.train
    assert isinstance(train, TokenStream) and isinstance(ours._tokens.held_out, np.ndarray)
    windows = theirs._order.windows
    before = server.told(bucket)["requests"]["get"]
    steps = 2 * windows // batch

    for number in range(steps):
        found, expected = (
            workload.next_batch(nn.Module(), Cursor(batch * number, batch))
            for workload in (ours, theirs)
        )
        assert torch.equal(found.inputs, expected.inputs) and torch.equal(
            found.targets, expected.targets
        )
    drawn = theirs._order.window(0, batch * (steps + 4)).tolist()
    wanted = len([position for position in drawn if position >= kept]) + kept
    wait_until(
        "rows read ahead",
        lambda: server.told(bucket)["requests"]["get"] - before >= wanted,
        timeout=30,
    )
    wait_until(
        "the last rows", lambda: all(row.done() for row in train._ahead.values()), timeout=30
    )
    assert set(drawn[batch * steps :]) <= set(train._ahead), "the next four steps wait for nothing"
    assert server.told(bucket)["requests"]["get"] - before == wanted and windows > 3 * kept
    files = [path.name for path in tmp_path.rglob("*.rows")]
    assert files == [f"{prepared['shard_sha256']['train']}-{length}.rows"]


def test_the_standard_library_comes_without_its_tests() -> None:
    names = [file.name for file in find_files(DataConfig(), project_root=Path())]
    assert "argparse.py" in names and names == sorted(names)
    assert not [
        name
        for name in names
        if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/"))
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataConfig(path="nowhere"), "no folder, no file"),
        (DataConfig(path="texts", suffixes=[".rs"]), r"no file that ends in \.rs"),
        (DataConfig(path="texts/empty.txt"), "0 bytes, too few to split"),
    ],
)
def test_text_that_cannot_serve_is_refused_with_a_fix(
    data: DataConfig, message: str, tmp_path: Path
) -> None:
    write_texts(tmp_path / "texts")
    (tmp_path / "texts" / "empty.txt").touch()
    with pytest.raises(DataError, match=f"{message}.*fix:"):
        prepare_tokens(data, Store.open(str(tmp_path / "store")), project_root=tmp_path)


def test_a_glob_finds_what_a_folder_does(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    folder = find_files(DataConfig(path="texts", suffixes=[".txt"]), project_root=tmp_path)
    matched = find_files(DataConfig(path="texts/**/*.txt"), project_root=tmp_path)
    assert [file.name for file in matched] == [file.name for file in folder]


@pytest.mark.parametrize("ending", ["\n", " "], ids=["lines", "one line"])
@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.9])
def test_a_single_file_is_split_inside(ending: str, fraction: float, tmp_path: Path) -> None:
    text = "".join(f"{number} är größer als 日本{ending}" for number in range(5000)).encode()
    (tmp_path / "book.txt").write_bytes(text)
    store = Store.open(str(tmp_path / "store"))
    data = DataConfig(path="book.txt", held_out_fraction=fraction)
    tokens = prepare_tokens(data, store, project_root=tmp_path)
    arrays = open_tokens(store, tokens.fingerprint)
    train = arrays.train.tobytes()
    held_out = arrays.held_out.tobytes()
    assert train + held_out == text and (tokens.files, tokens.bytes) == (1, len(text))
    assert len(held_out) == pytest.approx(fraction * len(text), rel=0.02)
    assert train.decode() and held_out.decode(), "no character is cut"
    assert ending == " " or train.endswith(b"\n")
    assert prepare_tokens(data, store, project_root=tmp_path) == tokens
    other = DataConfig(path="book.txt", held_out_fraction=fraction / 2)
    assert prepare_tokens(other, store, project_root=tmp_path).fingerprint != tokens.fingerprint


def sqlite_file() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t (a text)")
    return connection.serialize()


BINARY = {
    "png": (b"\x89PNG\r\n\x1a\n" + NOISE, "a PNG image"),
    "parquet": (b"PAR1\x15\x00" + NOISE + b"PAR1", "a Parquet table"),
    "gzip": (gzip.compress(b"text " * 9000), "compressed by gzip"),
    "sqlite": (sqlite_file(), "an SQLite database"),
    "zip": (b"PK\x03\x04\x14\x00" + NOISE, "a zip archive"),
    "pdf": (b"%PDF-1.4\n" + b"only ASCII here\n" * 500, "a PDF document"),
    "utf-16": (("some text\n" * 500).encode("utf-16"), "text in UTF-16"),
    "nul late": (
        b"a line of text\n" * 200_000 + b"\0" + b"more\n" * 100,
        "NUL byte at offset 3,000,000",
    ),
    "noise without NUL": (NOISE, "is no UTF-8 text: 43 % of its first "),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
}


@pytest.mark.parametrize("kind", BINARY)
def test_a_binary_file_is_refused_by_name_and_never_trained_on(kind: str, tmp_path: Path) -> None:
    content, found = BINARY[kind]
    write_texts(tmp_path / "texts", count=3)
    (tmp_path / "texts" / "part0" / "odd.txt").write_bytes(content)
    store = Store.open(str(tmp_path / "store"))
    for path in ("texts", "texts/part0/odd.txt"):
        with pytest.raises(DataError) as caught:
            prepare_tokens(DataConfig(path=path, suffixes=[".txt"]), store, project_root=tmp_path)
        assert f"{tmp_path}/texts/part0/odd.txt" in str(caught.value) and "fix: " in str(
            caught.value
        )
        assert found in str(caught.value)
    assert not store.list(""), "no shard was written"


def test_text_in_an_older_encoding_passes(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_bytes(
        ("Grüße aus Köln und von allen Orten an dem Rhein.\n" * 400).encode("latin-1")
    )
    tokens = prepare_tokens(
        DataConfig(path="old.txt"), Store.open(str(tmp_path / "s")), project_root=tmp_path
    )
    assert tokens.files == 1


@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_data_from_a_non_regular_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.txt"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    store = Store.open(str(tmp_path / "store"))
    with pytest.raises(DataError, match=f"(?i)is a {kind}, .*fix:"):
        prepare_tokens(DataConfig(path="odd.txt"), store, project_root=tmp_path)
    # Made after the look
    with pytest.raises(DataError, match="fix:"), open_source(SourceFile("odd.txt", path)):
        pass
    with pytest.raises(DataError, match="not a regular file"):
        prepare_tokens(
            DataConfig(path="odd.txt", tokenizer="odd.txt"), store, project_root=tmp_path
        )
