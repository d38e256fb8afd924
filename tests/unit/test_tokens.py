"""Token shards: the order of samples, downloads, and rows that are streamed."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.core.errors import StoreUnavailable
from ebbflow.core.store import Store
from ebbflow.training.data.stream import TokenStream
from ebbflow.training.data.tokens import (
    SampleOrder,
    TokenArrays,
    Tokens,
    count_tokens,
    download_shard,
    downloads_folder,
    entropy_nats,
    open_tokens,
    read_description,
)
from ebbflow.training.errors import DataError

TRAIN = np.arange(1000, dtype="<u2") % 300
HELD_OUT = np.arange(600, dtype="<u2")[::-1] % 300

BIG = b"0123456789abcdef" * 2**20 + b"12345"

WINDOW = 4
ROWS = 10
ROW_TOKENS = np.arange(WINDOW * ROWS + 1, dtype="<u2") * 1000
ROW_BYTES = 2 * (WINDOW + 1)


@dataclass
class Remote:
    """A store that cannot be mapped into memory, with the keys of its requests for parts."""

    inner: Store
    requests: list[tuple[str, int, int]]

    @property
    def uri(self) -> str:
        return self.inner.uri

    def sub(self, prefix: str) -> Remote:
        return Remote(self.inner.sub(prefix), self.requests)

    def local_path(self, key: str) -> None:
        return None

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.requests.append((key, start, length))
        return self.inner.get_range(key, start, length)


class Shards:
    """A store with one shard."""

    uri = "s3://bucket/tokens/f"

    def __init__(self, content: bytes = BIG) -> None:
        self.content = content
        self.requests: list[tuple[str, int, int]] = []

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.requests.append((key, start, length))
        return self.content[start : start + length]


def mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def window_of(windows: int, seed: int, sample: int) -> int:
    """Return the window of a sample, by the formula in plain integers."""
    bits = max(1, ((windows - 1).bit_length() + 1) // 2)
    mask = 2**bits - 1
    epoch, value = divmod(sample, windows)
    key = mix(mix(seed % 2**64) ^ epoch)
    while True:
        left = value >> bits
        right = value & mask
        for number in range(6):
            left, right = right, left ^ (mix(right ^ mix((key + number) % 2**64)) & mask)
        value = (left << bits) | right
        if value < windows:
            return value


@settings(max_examples=40)
@given(
    windows=st.integers(1, 5000) | st.sampled_from([1, 2, 4, 5, 16, 17, 64, 65, 1024, 4096, 4097]),
    seed=st.integers(0, 2**70),
    first=st.integers(0, 9000) | st.integers(2**31, 2**40),
    count=st.integers(0, 20),
)
def test_the_order_of_samples_is_its_formula(
    windows: int, seed: int, first: int, count: int
) -> None:
    order = SampleOrder(windows, seed).window(first, count)
    assert order.dtype == np.int64 and order.shape == (count,)
    assert order.tolist() == [
        window_of(windows, seed, sample) for sample in range(first, first + count)
    ]


def test_the_order_of_samples_never_changes() -> None:
    """Jobs that are resumed by a later release read on where they stopped."""
    order = SampleOrder(10, 1234)
    assert order.window(0, 10).tolist() == [1, 8, 9, 2, 0, 5, 4, 3, 7, 6]
    assert order.window(10, 10).tolist() == [5, 4, 8, 6, 1, 9, 3, 2, 7, 0]
    assert SampleOrder(1000, 2**64 + 7).window(4090, 8).tolist() == [
        937,
        802,
        909,
        40,
        934,
        126,
        65,
        169,
    ]


def test_an_order_needs_a_window() -> None:
    assert SampleOrder(1, 5).window(3, 2).tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"^an order needs at least one window, not 0$"):
        SampleOrder(0, 5)


def test_tokens_are_counted_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow.training.data.tokens._CHUNK_TOKENS", 4)
    counts = count_tokens(np.array([0, 3, 3, 1, 0, 0, 3, 0, 1, 3], dtype=np.uint8), 6)
    assert counts.dtype == np.int64 and counts.tolist() == [4, 2, 0, 4, 0, 0]
    assert count_tokens(np.array([], dtype=np.uint8), 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("counts", "entropy"),
    [
        ([0, 0], 0.0),
        ([0, 7], 0.0),
        ([1, 1, 0, 1, 1], np.log(4)),
        ([3, 0, 1], 0.75 * np.log(4 / 3) + 0.25 * np.log(4)),
    ],
)
def test_the_entropy_of_counts_is_in_nats(counts: list[int], entropy: float) -> None:
    found = entropy_nats(np.array(counts, dtype=np.int64))
    assert found == pytest.approx(entropy, rel=1e-12) and not str(found).startswith("-")


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def put_shards(store: Store, *, held_out: np.ndarray = HELD_OUT) -> Tokens:
    """Put shards with the fingerprint "f", of two bytes per token."""
    contents = {"train": TRAIN.tobytes(), "held_out": held_out.tobytes()}
    about = Tokens(
        fingerprint="f",
        vocab_size=300,
        train_tokens=TRAIN.size,
        held_out_tokens=held_out.size,
        unigram_entropy_nats=1.0,
        files=2,
        bytes=5000,
        held_out_bytes=2000,
        shard_sha256={name: digest_of(content) for name, content in contents.items()},
    )
    for name, content in contents.items():
        store.put(f"tokens/f/{name}.bin", content)
    store.put("tokens/f/tokens.json", json.dumps(about.to_json()).encode())
    return about


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


@pytest.fixture
def remote(local: Store) -> Any:
    return Remote(local, [])


def test_shards_of_a_local_store_are_mapped_in_place_and_read_only(
    local: Store, tmp_path: Path
) -> None:
    about = put_shards(local)
    arrays = open_tokens(local, "f", cache=tmp_path / "cache", window=64, cache_gib=0.0)
    assert isinstance(
        arrays.train, np.ndarray
    ) and arrays.train.dtype == arrays.held_out.dtype == np.dtype("<u2")
    assert np.array_equal(arrays.train, TRAIN) and np.array_equal(arrays.held_out, HELD_OUT)
    assert not arrays.train.flags.writeable and arrays.about == about
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("window", "cache_gib", "free", "streamed", "kept_rows"),
    [
        (0, 0.0, 0, [], 0),  # without a window nothing can be streamed
        (64, None, 10**9, [], 0),
        (64, 3200 / 2**30, 10**9, [], 0),  # both shards fit
        (64, 3199 / 2**30, 10**9, ["train"], 9),
        (64, 1200 / 2**30, 10**9, ["train"], 0),
        (64, 1199 / 2**30, 10**9, ["held_out", "train"], 8),
        (64, None, 2500, [], 0),  # 80 % of free space
        (64, None, 2490, ["train"], 9),
        (64, 2.0, 2490, ["train"], 9),
    ],
)
def test_a_shard_that_does_not_fit_is_streamed(
    remote: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    window: int,
    cache_gib: float | None,
    free: int,
    streamed: list[str],
    kept_rows: int,
) -> None:
    about = put_shards(remote.inner)
    asked: list[Path] = []
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=free)
    )
    cache = tmp_path / "nested" / "cache"
    if window:
        arrays = open_tokens(remote, "f", cache=cache, window=window, cache_gib=cache_gib)
    else:
        arrays = open_tokens(remote, "f", cache=cache, cache_gib=cache_gib)
    kinds = {name: getattr(arrays, name) for name in ("held_out", "train")}
    assert [name for name, shard in kinds.items() if isinstance(shard, TokenStream)] == streamed
    expected = {
        f"{sha256}-64.rows" if name in streamed else f"{sha256}.bin"
        for name, sha256 in about.shard_sha256.items()
    }
    assert {path.name for path in cache.iterdir() if path.suffix != ".lock"} == expected
    assert asked == ([cache, cache] if window else [])
    for name, tokens in (("train", TRAIN), ("held_out", HELD_OUT)):
        shard = kinds[name]
        assert shard.size == tokens.size
        offsets = np.array([[64 * row + column for column in range(65)] for row in (0, 3)])
        rows = shard[offsets]
        assert rows.dtype == np.dtype("<u2") and np.array_equal(rows, tokens[offsets])
    if streamed:
        rows = cache / f"{about.shard_sha256[streamed[0]]}-64.rows"
        shard = kinds[streamed[0]]
        shard[np.arange(9)[:, None] * 64 + np.arange(65)]
        assert rows.stat().st_size == kept_rows * (65 * 2 + 4)


def test_a_downloaded_shard_is_used_without_room(remote: Any, tmp_path: Path) -> None:
    put_shards(remote.inner)
    open_tokens(remote, "f", cache=tmp_path / "cache")
    before = len(remote.requests)
    arrays = open_tokens(remote, "f", cache=tmp_path / "cache", window=64, cache_gib=0.0)
    assert isinstance(arrays.train, np.ndarray) and np.array_equal(arrays.train, TRAIN)
    assert len(remote.requests) == before


def test_downloads_are_in_a_folder_of_the_user(
    remote: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert downloads_folder() == tmp_path / f"ebbflow-tokens-{os.getuid()}"
    about = put_shards(remote.inner)
    signs: list[bool] = []
    open_tokens(remote, "f", alive=lambda: signs.append(True))
    names = {path.name for path in downloads_folder().iterdir()}
    expected_names = set()
    for digest in about.shard_sha256.values():
        expected_names |= {f"{digest}.{end}" for end in ("bin", "lock")}
    assert names == expected_names
    assert len(signs) == 2


def test_missing_and_changed_shards_are_named(local: Store, remote: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_tokens(local, "f")
    fix = "fix: prepare them again with the same data"
    assert str(caught.value) == f"{local.uri}/tokens/f holds no complete token shards; {fix}"
    about = put_shards(local)
    cache = tmp_path / "cache"
    open_tokens(remote, "f", cache=cache)
    for path in (
        cache / f"{about.shard_sha256['train']}.bin",
        local.sub("tokens/f").local_path("train.bin"),
    ):
        assert path is not None
        if path.parent == cache:
            source: Any = remote
        else:
            source = local
        for change in (lambda path: path.write_bytes(b"x" * 1999), Path.unlink):
            if path.parent == cache and change is Path.unlink:
                continue  # it would be downloaded again
            change(path)
            with pytest.raises(DataError) as caught:
                open_tokens(source, "f", cache=cache)
            fix = f"fix: delete {local.uri}/tokens/f and prepare the tokens again"
            assert (
                str(caught.value)
                == f"{path} is not the 2000 bytes that tokens.json promises; {fix}"
            )


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"files": 2}', b"3"])
def test_a_damaged_description_is_named(local: Store, content: bytes) -> None:
    shards = local.sub("tokens/f")
    assert read_description(shards) is None
    shards.put("tokens.json", content)
    with pytest.raises(
        DataError, match=r"tokens/f/tokens\.json is damaged: .*; fix: delete it and prepare again$"
    ):
        read_description(shards)


def test_a_shard_is_downloaded_in_pieces_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rename works within one volume only
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    shards: Any = Shards()
    signs: list[int] = []
    cache = tmp_path / "a" / "b"
    path = download_shard(
        shards,
        "train.bin",
        digest_of(BIG),
        len(BIG),
        cache,
        lambda: signs.append(len(shards.requests)),
    )
    assert path == cache / f"{digest_of(BIG)}.bin" and path.read_bytes() == BIG
    assert shards.requests == [("train.bin", 0, 2**24), ("train.bin", 2**24, 5)] and signs == [1, 2]
    assert (
        download_shard(shards, "train.bin", digest_of(BIG), len(BIG), cache) == path
        and len(shards.requests) == 2
    )
    assert sorted(entry.name for entry in cache.iterdir()) == [
        f"{digest_of(BIG)}.bin",
        f"{digest_of(BIG)}.lock",
    ]


def test_a_shard_that_arrives_changed_is_refused(tmp_path: Path) -> None:
    shards: Any = Shards(b"changed")
    with pytest.raises(DataError) as caught:
        download_shard(shards, "train.bin", "e" * 64, 7, tmp_path)
    assert str(caught.value) == (
        f"s3://bucket/tokens/f/train.bin has sha256 {digest_of(b'changed')}, not the {'e' * 64} "
        "of tokens.json; fix: delete it and prepare the tokens again"
    )
    assert [path.name for path in tmp_path.iterdir()] == [f"{'e' * 64}.lock"]


@pytest.mark.parametrize("finished", [True, False])
def test_a_rank_waits_for_the_one_that_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """The other rank ends after three seconds, with the shard or without it."""
    content = b"tokens"
    shards = Shards(b"tokens")
    name = digest_of(content)
    other = os.open(tmp_path / f"{name}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            if finished:
                (tmp_path / f"{name}.bin").write_bytes(content)
            os.close(other)

    monkeypatch.setattr(time, "sleep", sleep)
    signs: list[int] = []
    source: Any = shards
    path = download_shard(source, "train.bin", name, 6, tmp_path, lambda: signs.append(len(pauses)))
    assert path.read_bytes() == content and pauses == [1.0, 1.0, 1.0]
    assert signs == ([0, 1, 2] if finished else [0, 1, 2, 3]) and len(shards.requests) == (
        0 if finished else 1
    )


def offsets_of(*numbers: int) -> np.ndarray:
    return np.array(numbers)[:, None] * WINDOW + np.arange(WINDOW + 1)


def open_stream(shards: Any, kept: Path, *, kept_bytes: int = 0) -> TokenStream:
    return TokenStream(
        shards,
        "train.bin",
        size=ROW_TOKENS.size,
        dtype=np.dtype("<u2"),
        window=WINDOW,
        kept=kept,
        kept_bytes=kept_bytes,
    )


def starts_of(shards: Shards) -> list[int]:
    assert all(request[::2] == ("train.bin", ROW_BYTES) for request in shards.requests)
    return sorted(start // (2 * WINDOW) for _, start, _ in shards.requests)


def test_a_stream_reads_each_row_with_one_request(tmp_path: Path) -> None:
    shards = Shards(ROW_TOKENS.tobytes())
    stream = open_stream(shards, tmp_path / "rows")
    rows = stream[offsets_of(9, 0, 3)]
    assert stream.size == ROW_TOKENS.size and rows.dtype == np.dtype("<u2")
    assert np.array_equal(rows, ROW_TOKENS[offsets_of(9, 0, 3)])
    assert starts_of(shards) == [0, 3, 9]
    empty = stream[np.empty((0, WINDOW + 1), dtype=np.int64)]
    assert empty.shape == (0, WINDOW + 1) and empty.dtype == np.dtype("<u2")


def test_windows_of_one_token_are_rows_of_two(tmp_path: Path) -> None:
    stream = TokenStream(
        Shards(bytes(range(9))),  # type: ignore[arg-type]
        "train.bin",
        size=9,
        dtype=np.dtype("u1"),
        window=1,
        kept=tmp_path / "rows",
        kept_bytes=0,
    )
    assert stream[np.array([[4, 5], [7, 8]])].tolist() == [[4, 5], [7, 8]]


@pytest.mark.parametrize(
    ("kept_bytes", "most_kept"),
    [(-100, 0), (0, 0), (13, 0), (14, 1), (3 * 14 - 1, 2), (3 * 14, 3), (10**6, ROWS)],
)
def test_a_stream_keeps_as_many_rows_as_there_is_room_for(
    tmp_path: Path, kept_bytes: int, most_kept: int
) -> None:
    kept = tmp_path / "rows"
    everything = offsets_of(*range(ROWS))
    open_stream(Shards(ROW_TOKENS.tobytes()), kept, kept_bytes=kept_bytes)[everything]
    assert (
        kept.stat().st_size == most_kept * (ROW_BYTES + 4) and kept.stat().st_mode & 0o777 == 0o600
    )
    again = Shards(ROW_TOKENS.tobytes())
    assert np.array_equal(
        open_stream(again, kept, kept_bytes=kept_bytes)[everything], ROW_TOKENS[everything]
    )
    assert starts_of(again) == list(range(most_kept, ROWS))


@pytest.mark.parametrize("place", [14, 23, 24, 27])
def test_a_stream_reads_a_kept_row_again_if_a_byte_of_it_changed(
    tmp_path: Path, place: int
) -> None:
    kept = tmp_path / "rows"
    everything = offsets_of(*range(ROWS))
    open_stream(Shards(ROW_TOKENS.tobytes()), kept, kept_bytes=10**6)[everything]
    content = bytearray(kept.read_bytes())
    content[place] ^= 1
    kept.write_bytes(content)
    shards = Shards(ROW_TOKENS.tobytes())
    assert np.array_equal(
        open_stream(shards, kept, kept_bytes=10**6)[everything], ROW_TOKENS[everything]
    )
    assert starts_of(shards) == [1]


def test_a_stream_reads_ahead_in_order_and_forgets_what_it_did_not_use(tmp_path: Path) -> None:
    shards = Shards(ROW_TOKENS.tobytes())
    stream = open_stream(shards, tmp_path / "rows")
    stream.read_ahead([5, 6])
    stream.read_ahead([6, 7])
    assert np.array_equal(stream[offsets_of(6, 7)], ROW_TOKENS[offsets_of(6, 7)])
    assert starts_of(shards) == [5, 6, 7]
    stream[offsets_of(5)]
    assert starts_of(shards) == [5, 5, 6, 7]


def test_a_full_volume_does_not_end_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", write)
    stream = open_stream(Shards(ROW_TOKENS.tobytes()), tmp_path / "rows", kept_bytes=10**6)
    assert np.array_equal(stream[offsets_of(2)], ROW_TOKENS[offsets_of(2)])


def test_a_stream_reads_sixteen_rows_at_once(tmp_path: Path) -> None:
    """Sixteen requests wait for each other, and a seventeenth would have the time to come."""
    begun = threading.Semaphore(0)
    proceed = threading.Event()

    class Slow(Shards):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            begun.release()
            assert proceed.wait(20)
            return super().get_range(key, start, length)

    stream = open_stream(Slow(bytes(1000)), tmp_path / "rows")
    stream.read_ahead(range(40))
    for _ in range(16):
        assert begun.acquire(timeout=20)
    assert not begun.acquire(timeout=0.1)
    proceed.set()
    stream[offsets_of(*range(40))]


def test_a_stream_gives_up_a_store_that_fails_for_two_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request fails after 40 seconds."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    class Away(Shards):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            nonlocal now
            now += 40.0
            self.requests.append((key, start, length))
            raise StoreUnavailable("away")

    shards = Away()
    with pytest.raises(StoreUnavailable):
        open_stream(shards, tmp_path / "rows")[offsets_of(2)]
    assert starts_of(shards) == [2, 2, 2]


def test_a_description_of_shards_cannot_be_changed() -> None:
    about = Tokens(**{field.name: 1 for field in dataclasses.fields(Tokens)})  # type: ignore[arg-type]
    assert about.to_json()["weight_unit"] == 1 and Tokens(**about.to_json()) == about
    with pytest.raises(TypeError):
        Tokens(*about.to_json().values())
    for value in (about, TokenArrays(TRAIN, HELD_OUT, about)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.train_tokens = 2  # type: ignore[misc,union-attr]
