"""The store's own rules, in a folder and in a bucket in memory: keys, pages, creations, time
limits, and its clock.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError, NotSupportedError, PreconditionError
from obstore.store import MemoryStore

from ebbflow.core.errors import (
    ObjectNotFound,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from ebbflow.core.store import ObjectMeta, Store
from ebbflow.core.store.folder import FolderBackend, HangGuard
from ebbflow.core.store.objects import StoreClock


def bucket(backend: Any = None, **options: Any) -> Store:
    return Store(MemoryStore() if backend is None else backend, "s3://bucket", None, **options)


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return Store.open(str(tmp_path / "store"))
    return bucket()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str]]:
    """Each time limit for a call on a folder, in seconds, with what the call does."""
    limits: list[tuple[float, str]] = []
    run = HangGuard.run

    def record(guard: HangGuard, call: Callable[[], Any], seconds: float, what: str) -> Any:
        limits.append((seconds, what))
        return run(guard, call, seconds, what)

    monkeypatch.setattr(HangGuard, "run", record)
    return limits


def keys_of(metas: list[ObjectMeta]) -> list[str]:
    return [meta.key for meta in metas]


@pytest.mark.parametrize(
    ("uri", "store_uri"),
    [("{}/a", "{}/a"), ("file://{}/a", "{}/a"), ("{}/a/", "{}/a"), ("{}/b/../a", "{}/a")],
)
def test_an_address_of_a_folder_opens_it(tmp_path: Path, uri: str, store_uri: str) -> None:
    store = Store.open(uri.format(tmp_path))
    assert store.uri == store_uri.format(tmp_path)
    assert (tmp_path / "a").is_dir()
    store.put("k", b"x")
    assert (tmp_path / "a" / "k").read_bytes() == b"x"
    Store.open(uri.format(tmp_path))


def test_an_address_below_the_home_folder_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store.open("~/deep/store").uri == f"{tmp_path}/deep/store"


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ObjectNotFound, match=f"^open {tmp_path}/file/store: no such object$"):
        Store.open(str(tmp_path / "file" / "store"))


def test_a_store_below_a_prefix_has_the_same_objects_under_shorter_keys(store: Store) -> None:
    for sub in (store.sub("a/b"), store.sub("/a/b/"), store.sub("a").sub("b")):
        assert sub.uri == f"{store.uri}/a/b"
        sub.put("/k/", b"x")
        assert store.get("a/b/k") == b"x"
        assert keys_of(sub.list()) == ["k"] and sub.head("k").key == "k"
        sub.delete("k")
        assert store.head("a/b/k") is None
    assert store.sub("").uri == store.uri and store.sub("/").uri == store.uri
    store.sub("").put("k", b"y")
    assert store.get("k") == b"y"


def test_a_store_below_a_prefix_keeps_the_time_limit(tmp_path: Path) -> None:
    assert Store.open(str(tmp_path)).sub("a").request_seconds == 60.0
    assert Store.open(str(tmp_path), request_timeout_seconds=7.0).sub("a").request_seconds == 7.0
    assert bucket().sub("a").request_seconds == 60.0
    assert bucket(request_seconds=7.0).sub("a").request_seconds == 7.0


def test_an_address_of_a_bucket_opens_it_below_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    store = Store.open("s3://bucket/some/prefix/", request_timeout_seconds=10.0)
    assert (store.uri, store.request_seconds) == ("s3://bucket/some/prefix", 10.0)
    assert store.local_path("k") is None


def test_a_file_of_a_store_is_found_on_this_machine_only_in_a_folder(tmp_path: Path) -> None:
    assert Store.open(str(tmp_path)).sub("a").local_path("k") == tmp_path / "a" / "k"
    assert bucket().sub("a").local_path("k") is None


def test_a_stored_object_has_a_size_in_bytes_and_a_date(store: Store) -> None:
    before = time.time()
    store.put("a/k", memoryview(bytearray(b"12345678")).cast("I"))
    meta = store.head("a/k")
    assert (meta.key, meta.size) == ("a/k", 8)
    assert before - 2.0 <= meta.modified <= time.time() + 2.0
    assert store.list("a") == [meta]
    assert store.head("a") is None and store.head("none") is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        meta.size = 9


def test_a_missing_object_may_be_deleted_and_not_read(store: Store) -> None:
    store.delete("none")
    with pytest.raises(ObjectNotFound):
        store.get("none")
    with pytest.raises(ObjectNotFound):
        store.get_range("none", 0, 1)
    assert store.get_range("none", 0, 0) == b"", "nothing is asked for"


def test_a_range_is_exactly_as_long_as_asked(store: Store) -> None:
    store.put("k", b"12345678")
    assert store.get_range("k", 0, 8) == b"12345678"
    assert store.get_range("k", 6, 2) == b"78"
    with pytest.raises(StoreError, match=f"get {store.uri}/k: 2 bytes at 6, expected 3: truncated"):
        store.get_range("k", 6, 3)


def test_an_object_is_private_only_in_a_folder_and_if_it_is_asked_for(store: Store) -> None:
    before = os.umask(0)
    try:
        store.put("secret", b"x", private=True)
        store.put("k", b"x")
        store.create("created", b"x")
    finally:
        os.umask(before)
    for key, mode in (("secret", 0o600), ("k", 0o666), ("created", 0o666)):
        path = store.local_path(key)
        assert store.get(key) == b"x"
        assert path is None or path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("tags", [None, {}, {"name": "value"}])
def test_tags_go_with_a_put_to_a_bucket(
    monkeypatch: pytest.MonkeyPatch, tags: dict[str, str] | None
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(obstore, "put", lambda *_, tags: given.append(tags))
    bucket().put("k", b"x", tags=tags)
    assert given == [tags or None]


def test_an_object_is_created_once_and_its_content_identifies_the_creator(store: Store) -> None:
    assert store.create("a/k", b"mine")
    assert store.create("a/k", b"mine"), "its own content: the first try arrived"
    assert store.create("a/k", bytearray(b"mine"))
    assert not store.create("a/k", b"other")
    assert store.get("a/k") == b"mine"
    assert keys_of(store.list()) == ["a/k"]


def failing_put(monkeypatch: pytest.MonkeyPatch, *failures: Exception) -> list[dict[str, Any]]:
    """The options of each put to a bucket. The first puts fail."""
    asked: list[dict[str, Any]] = []
    put = obstore.put
    left = list(failures)

    def fail_first(*arguments: Any, **options: Any) -> Any:
        asked.append(options)
        if left:
            raise left.pop(0)
        return put(*arguments, **options)

    monkeypatch.setattr(obstore, "put", fail_first)
    return asked


def test_a_conflict_of_two_creations_is_settled_by_the_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = bucket()
    store.put("k", b"theirs")
    for content, is_ours in ((b"theirs", True), (b"mine", False)):
        failing_put(monkeypatch, PreconditionError("412"))
        assert store.create("k", content) is is_ours
    assert store.get("k") == b"theirs"


@pytest.mark.parametrize(
    ("answer", "is_unsupported"),
    [
        (NotSupportedError("x"), True),
        (GenericError("Server returned non-2xx status code: 501 Not Implemented"), True),
        (GenericError("status code: 400: <Error><Code>NotImplemented</Code></Error>"), True),
        (GenericError("status code: 400: <Error><Code> NotImplemented </Code></Error>"), True),
        (GenericError("status code: 400: NotImplemented"), False),
        (GenericError("status code: 5010"), False),
        (
            GenericError(
                "PUT http://127.0.0.1:501/b/k in 501.7ms, retry_timeout: 501ms - status code: 500"
            ),
            False,
        ),
        (
            GenericError(
                "status code: 409: <Error><Code>ConditionalRequestConflict</Code></Error>"
            ),
            False,
        ),
    ],
    ids=str,
)
def test_a_creation_drops_the_condition_only_if_the_service_does_not_support_it(
    monkeypatch: pytest.MonkeyPatch, answer: Exception, is_unsupported: bool
) -> None:
    store = bucket()
    asked = failing_put(monkeypatch, answer)
    if not is_unsupported:
        with pytest.raises(StoreError):
            store.create("k", b"mine")
        assert store.head("k") is None
        return
    assert store.create("k", b"mine")
    assert [options.get("mode") for options in asked] == ["create", None]
    for content, is_ours in ((b"mine", True), (b"other", False)):
        failing_put(monkeypatch, answer)
        assert store.create("k", content) is is_ours
    assert store.get("k") == b"mine"


def test_a_listing_is_sorted_and_may_be_short(store: Store) -> None:
    for key in ("b/2", "a", "b/1", "c", "b-x"):
        store.put(key, key.encode())
    assert keys_of(store.list()) == ["a", "b-x", "b/1", "b/2", "c"]
    assert keys_of(store.list("b")) == ["b/1", "b/2"]
    for limit, count in ((0, 0), (1, 1), (2, 2), (3, 2)):
        assert keys_of(store.list("b", limit=limit)) == ["b/1", "b/2"][:count]
    assert keys_of(store.sub("b").list()) == ["1", "2"]


def paged(*pages: list[str]) -> tuple[Callable[..., Iterator[list[dict[str, Any]]]], list[int]]:
    """A listing of a bucket in the given pages, and the numbers of the pages that were asked for."""
    asked: list[int] = []

    def list_pages(*_: Any, **__: Any) -> Iterator[list[dict[str, Any]]]:
        date = obstore.head(MEMORY, "dated")["last_modified"]
        for number, keys in enumerate(pages):
            asked.append(number)
            yield [{"path": key, "size": 1, "last_modified": date} for key in keys]

    return list_pages, asked


MEMORY = MemoryStore()
obstore.put(MEMORY, "dated", b"")


def test_sorted_pages_of_a_bucket_are_asked_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    list_pages, asked = paged(["a", "b"], ["c", "d"], ["e"])
    monkeypatch.setattr(obstore, "list", list_pages)
    pages = bucket().pages()
    assert keys_of(next(pages)) == ["a", "b"] and asked == [0]
    assert keys_of(next(pages)) == ["c", "d"] and asked == [0, 1]
    assert keys_of(next(pages)) == ["e"]
    asked.clear()
    assert keys_of(bucket().list(limit=2)) == ["a", "b"] and asked == [0]
    assert keys_of(bucket().list(limit=3)) == ["a", "b", "c"] and asked == [0, 0, 1]
    assert keys_of(bucket().list()) == ["a", "b", "c", "d", "e"]


def test_pages_of_a_bucket_whose_first_is_unsorted_come_sorted_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    list_pages, asked = paged(["d", "b"], ["c", "a"])
    monkeypatch.setattr(obstore, "list", list_pages)
    assert [keys_of(page) for page in bucket().pages()] == [["a", "b", "c", "d"]]
    assert asked == [0, 1]
    assert keys_of(bucket().list(limit=2)) == ["a", "b"]


def test_a_listing_of_a_bucket_is_sorted_though_a_later_page_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    list_pages, _ = paged(["a", "b"], ["d", "c"])
    monkeypatch.setattr(obstore, "list", list_pages)
    assert keys_of(bucket().list()) == ["a", "b", "c", "d"]


def test_a_bucket_is_asked_for_pages_of_a_thousand_after_a_key_below_the_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []

    def list_pages(
        _: Any, prefix: str | None, *, offset: str | None, chunk_size: int
    ) -> Iterator[list[Any]]:
        asked.append((prefix, offset, chunk_size))
        return iter([])

    monkeypatch.setattr(obstore, "list", list_pages)
    store = bucket()
    assert [*store.pages()] == [[]]
    assert [*store.sub("job").pages("a", after="a/2")] == [[]]
    assert asked == [(None, None, 1000), ("job/a", "job/a/2", 1000)]


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(
    ("count", "sizes"), [(0, [0]), (999, [999]), (1000, [1000]), (1001, [1000, 1])]
)
def test_a_folder_is_listed_in_pages_of_a_thousand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, sizes: list[int], is_sorted: bool
) -> None:
    if is_sorted:
        numbers = range(count)
    else:
        numbers = reversed(range(count))
    rows = [(f"job/{number:04d}", 1, 2.0) for number in numbers]
    monkeypatch.setattr(FolderBackend, "list", lambda *_: rows)
    pages = [*Store.open(str(tmp_path)).sub("job").pages()]
    assert [len(page) for page in pages] == sizes
    listed = []
    for page in pages:
        listed += page
    assert keys_of(listed) == [f"{number:04d}" for number in range(count)]


def test_pages_of_a_folder_may_begin_after_a_key(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    for key in ("a/1", "a/2", "b/1"):
        store.put(key, b"")
    assert [keys_of(page) for page in store.pages(after="a/1")] == [["a/2", "b/1"]]
    assert [keys_of(page) for page in store.sub("a").pages(after="1")] == [["2"]]


def test_each_operation_on_a_folder_has_a_time_limit_that_grows_with_its_bytes(
    tmp_path: Path, limits: list[tuple[float, str]]
) -> None:
    """By 1 s for each 10 MB."""
    store = Store.open(str(tmp_path), request_timeout_seconds=5.0)
    size = 100_000
    store.put("k", bytes(size))
    store.create("c", bytes(size))
    store.get("k")
    store.get_range("k", 0, size // 2)
    store.head("k")
    store.list("a")
    store.delete("k")
    assert limits == [
        (5.0, f"open {tmp_path}"),
        (5.01, f"put {tmp_path}/k"),
        (5.01, f"put {tmp_path}/c"),
        (5.0, f"get {tmp_path}/k"),
        (5.01, f"get {tmp_path}/k"),
        (5.005, f"get {tmp_path}/k"),
        (5.0, f"head {tmp_path}/k"),
        (5.0, f"list {tmp_path}/a"),
        (5.0, f"delete {tmp_path}/k"),
    ]


def test_every_operation_on_a_bucket_gives_errors_that_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise GenericError("status code: 503")

    for name in ("put", "get", "get_range", "head", "list", "delete"):
        monkeypatch.setattr(obstore, name, fail)
    store = bucket().sub("job")
    operations: list[tuple[str, Callable[[], object]]] = [
        ("put", lambda: store.put("k", b"")),
        ("put", lambda: store.create("k", b"")),
        ("get", lambda: store.get("k")),
        ("get", lambda: store.get_range("k", 0, 1)),
        ("head", lambda: store.head("k")),
        ("list", lambda: store.list("k")),
        ("delete", lambda: store.delete("k")),
    ]
    for name, operation in operations:
        with pytest.raises(
            StoreUnavailable, match=f"^{name} s3://bucket/job/k: the store has an internal error"
        ):
            operation()


class ClockedStore:
    """A store that dates its objects `ahead` seconds after this machine's monotonic clock."""

    def __init__(self, now: Callable[[], float], ahead: float) -> None:
        self.now = now
        self.ahead = ahead
        self.objects: dict[str, float] = {}
        self.unlisted = False
        self.forbidden: set[str] = set()
        self.puts = 0
        self.heads = 0

    def _allow(self, operation: str) -> None:
        if operation in self.forbidden:
            raise StoreFull(operation)

    def put(self, key: str, _: bytes) -> None:
        self._allow("put")
        self.puts += 1
        self.objects[key] = self.now() + self.ahead

    def list(self, prefix: str) -> list[ObjectMeta]:
        self._allow("list")
        if self.unlisted:
            listed = []
        else:
            listed = sorted(self.objects.items())
        return [ObjectMeta(key, 1, date) for key, date in listed if key.startswith(f"{prefix}/")]

    def head(self, key: str) -> ObjectMeta | None:
        self.heads += 1
        if key in self.objects:
            return ObjectMeta(key, 1, self.objects[key])
        return None

    def delete(self, key: str) -> None:
        self._allow("delete")
        self.objects.pop(key, None)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """This machine's monotonic clock."""
    seconds = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def clocked(seconds: list[float]) -> ClockedStore:
    return ClockedStore(lambda: seconds[0], 5000.0)


def test_the_store_s_clock_is_read_from_a_probe_at_most_every_ten_minutes(
    seconds: list[float],
) -> None:
    store = clocked(seconds)
    clock = StoreClock()
    assert clock.now(store, 1.0) == 5100.0
    assert store.objects == {} and (store.puts, store.heads) == (1, 0), "the listing has the date"
    seconds[0] += 600.0
    assert clock.now(store, 1.0) == 5700.0 and store.puts == 1
    store.ahead = 6000.0
    seconds[0] += 1.0
    assert clock.now(store, 1.0) == 6701.0 and store.puts == 2, (
        "after more than 600 s it asks again"
    )
    seconds[0] += 3.0
    assert clock.now(store, 1.0) == 6704.0 and store.puts == 2


def test_the_store_s_clock_never_runs_ahead_of_the_store(
    seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe is dated before its answer arrives."""
    store = clocked(seconds)
    put = store.put

    def put_slowly(key: str, data: bytes) -> None:
        put(key, data)
        seconds[0] += 4.0

    monkeypatch.setattr(store, "put", put_slowly)
    assert StoreClock().now(store, 1.0) == 5100.0, "the store's own clock shows 5104"


def test_the_store_s_clock_finds_a_probe_that_is_not_listed_yet(seconds: list[float]) -> None:
    store = clocked(seconds)
    store.unlisted = True
    assert StoreClock().now(store, 1.0) == 5100.0
    assert store.objects == {}


def test_the_store_s_clock_removes_the_probes_of_processes_that_were_killed(
    seconds: list[float],
) -> None:
    store = clocked(seconds)
    store.objects = {"clock/0": 1.0, "clock/~": 2.0, "data/k": 3.0}
    assert StoreClock().now(store, 1.0) == 5100.0, "by the date of its own probe"
    assert store.objects == {"data/k": 3.0}


@pytest.mark.parametrize("forbidden", ["put", "list"])
def test_without_access_the_newest_object_is_the_store_s_clock(
    seconds: list[float], forbidden: str
) -> None:
    store = clocked(seconds)
    clock = StoreClock()
    store.forbidden = {forbidden}
    assert clock.now(store, 77.0) == 77.0
    assert store.objects == {}
    store.forbidden = {"delete"}
    assert clock.now(store, 77.0) == 5100.0, "a probe that cannot be removed is still dated"
