"""The store keeps the same promises as a folder and as a bucket; the bucket is one of a real
server.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ebbflow.core.errors import (
    ObjectNotFound,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreMisconfigured,
)
from ebbflow.core.store import Store
from tests.support.flow import ROOT
from tests.support.s3.fixture import FailingServer, failing_s3
from tests.support.swift import Swift
from tests.support.swift_server import OTHER_KEY

__all__ = ["failing_s3"]  # a fixture

LARGE = 12 << 20  # more than one part of a multipart upload


@pytest.fixture
def bucket(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket, and the environment that leads to it."""
    for name, value in swift.environment().items():
        monkeypatch.setenv(name, value)
    return swift.new_bucket()


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return Store.open(str(tmp_path / "store"))
    return Store.open(f"s3://{request.getfixturevalue('bucket')}/some/prefix")


def test_a_store_returns_what_was_put(store: Store) -> None:
    large = os.urandom(LARGE)
    store.put("a/large", memoryview(large))
    store.put("a/empty", b"")
    assert store.get("a/large") == large
    assert store.get("a/empty") == b""
    assert store.get_range("a/large", LARGE - 3, 3) == large[-3:]
    store.put("a/large", b"again")
    assert store.get("a/large") == b"again"
    with pytest.raises(StoreError, match=r"3 bytes at 2, expected 9: truncated"):
        store.get_range("a/large", 2, 9)


def test_a_private_object_leaves_its_folder_to_others(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        Store.open(str(tmp_path)).put("secrets/r-0", b"x", private=True)
    finally:
        os.umask(before)
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o775
    assert (tmp_path / "secrets" / "r-0").stat().st_mode & 0o777 == 0o600


def test_a_store_reports_a_missing_object(store: Store) -> None:
    for ask in (store.get, lambda key: store.get_range(key, 0, 1)):
        with pytest.raises(ObjectNotFound, match=f"{store.uri}/none: no such object"):
            ask("none")
    assert store.head("none") is None
    assert store.list("none") == []
    store.delete("none")


def test_a_folder_that_is_only_read_is_not_created(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=False)
    assert list(store.list("")) == []
    with pytest.raises(ObjectNotFound):
        store.get("jobs/one")
    assert list(tmp_path.iterdir()) == []
    store.put("jobs/one", b"1")
    assert store.get("jobs/one") == b"1"


def test_a_listing_is_sorted_and_knows_folders(store: Store) -> None:
    for key in ("jobs/b/2", "jobs/b/1", "jobs/a", "jobs-not", "jobs/b2/1"):
        store.put(key, key.encode())
    assert [meta.key for meta in store.list()] == [
        "jobs-not",
        "jobs/a",
        "jobs/b/1",
        "jobs/b/2",
        "jobs/b2/1",
    ]
    assert [meta.key for meta in store.list("jobs/b")] == ["jobs/b/1", "jobs/b/2"]
    assert [meta.key for meta in store.list("jobs", limit=2)] == ["jobs/a", "jobs/b/1"]
    below = store.sub("jobs/b")
    assert [(meta.key, meta.size) for meta in below.list()] == [("1", 8), ("2", 8)]
    assert below.uri == f"{store.uri}/jobs/b" and below.get("1") == b"jobs/b/1"
    below.delete("1")
    assert store.head("jobs/b/1") is None and store.head("jobs/b/2").size == 8


def test_pages_are_in_order_and_may_begin_after_a_key(store: Store) -> None:
    for key in ("a/3", "a/1", "b/1", "a/2", "a/2x"):
        store.put(key, b"")
    later_keys = []
    for page in store.pages("a", after="a/2"):
        later_keys += [meta.key for meta in page]
    assert later_keys == ["a/2x", "a/3"]
    sub_keys = []
    for page in store.sub("a").pages():
        sub_keys += [meta.key for meta in page]
    assert sub_keys == ["1", "2", "2x", "3"]
    assert [*store.pages("none")] == [*store.pages("a", after="a/4")] == [[]]


def test_a_page_is_asked_for_when_it_is_wanted(
    failing_s3: FailingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", failing_s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", failing_s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", failing_s3.secret_key)
    bucket = failing_s3.new_bucket()
    store = Store.open(f"s3://{bucket}/job")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(f"many/{number:04d}", b""), range(1002)))
    pages = store.pages("many")
    assert len(next(pages)) == 1000 and failing_s3.told(bucket)["requests"]["list"] == 1
    assert [meta.key for meta in next(pages)] == ["many/1000", "many/1001"]
    last_pages = []
    for page in store.pages("many", after="many/1000"):
        last_pages.append([meta.key for meta in page])
    assert last_pages == [["many/1001"]]
    assert failing_s3.told(bucket)["requests"]["list"] == 3


def test_a_long_listing_comes_whole(bucket: str) -> None:
    """More keys than one answer of this server holds."""
    store = Store.open(f"s3://{bucket}")
    names = [f"many/{number:02d}" for number in range(50)]
    for name in names:
        store.put(name, b"")
    assert [meta.key for meta in store.list("many")] == names
    assert [meta.key for meta in store.list("many", limit=30)] == names[:30]


@pytest.mark.parametrize(
    ("access_key", "secret_key"), [("test:tester", "wrong"), ("test:nobody", "testing")]
)
def test_wrong_keys_differ_from_missing_permissions(
    swift: Swift, bucket: str, monkeypatch: pytest.MonkeyPatch, access_key: str, secret_key: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret_key)
    with pytest.raises(
        StoreForbidden,
        match=rf"^put s3://{bucket}/k: forbidden: .*key.*; fix: check AWS_ACCESS_KEY_ID",
    ):
        Store.open(f"s3://{bucket}").put("k", b"1")


def test_a_right_that_is_missing_is_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OTHER_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "reading")
    store = Store.open(f"s3://{bucket}")
    for action, ask in {
        "s3:PutObject": lambda: store.put("k", b"1"),
        "s3:ListBucket": lambda: store.list("k"),
        "s3:DeleteObject": lambda: store.delete("k"),
    }.items():
        with pytest.raises(
            StoreForbidden,
            match=rf"forbidden \(AccessDenied\); fix: allow {action} on arn:aws:s3:::",
        ):
            ask()


def test_a_quota_that_is_used_up_is_a_full_store(swift: Swift, bucket: str) -> None:
    store = Store.open(f"s3://{bucket}")
    store.put("small", b"1")
    swift.limit(bucket, 1000)
    with pytest.raises(StoreFull, match=rf"^put s3://{bucket}/big: no space: .*EntityTooLarge"):
        store.put("big", bytes(2000))
    assert store.get("small") == b"1"


def test_a_missing_bucket_is_reported(bucket: str) -> None:
    store = Store.open("s3://no-such-bucket/prefix")
    for ask in (lambda: store.put("k", b""), lambda: store.get("k"), lambda: store.list()):
        with pytest.raises(
            StoreMisconfigured, match=r"there is no bucket 'no-such-bucket'; fix: create it"
        ):
            ask()


def test_a_full_disk_is_a_full_store(tmp_path: Path) -> None:
    """In a process that may write files of 4 KiB only; the kernel's answer stands for that of a
    full disk.
    """
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from ebbflow.core.errors import StoreFull\n"
        "from ebbflow.core.store import Store\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    Store.open(sys.argv[1]).put('k', bytes(8192))\n"
        "except StoreFull as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith(f"put {tmp_path}/k: no space: "), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("swift://bucket", "unknown kind"),
        ("gs://bucket", "CRC64NVME"),
        ("s3://", "names no bucket"),
    ],
)
def test_a_store_that_cannot_be_is_refused(uri: str, words: str) -> None:
    with pytest.raises(StoreMisconfigured, match=words):
        Store.open(uri)
