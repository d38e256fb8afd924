"""A folder as a store: what a file may be, what a listing leaves out, and calls that do not come
back.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ebbflow.core.errors import StoreError, StoreTimeout
from ebbflow.core.store.folder import (
    HANG_GUARD,
    FolderBackend,
    HangGuard,
    open_regular,
    refuse_if_abandoned,
)


@pytest.fixture
def folder(tmp_path: Path) -> FolderBackend:
    return FolderBackend(tmp_path)


def put(folder: FolderBackend, *keys: str) -> None:
    for key in keys:
        folder.put(key, memoryview(key.encode()))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def keys_of(listed: list[tuple[str, int, float]]) -> list[str]:
    return sorted(key for key, _, _ in listed)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"private": True}, 0o600),
        ({"private": False}, 0o666),
        ({}, 0o666),
        ({"create": True}, 0o666),
    ],
)
def test_a_folder_s_object_has_the_permissions_of_its_kind(
    folder: FolderBackend, options: dict[str, bool], mode: int
) -> None:
    before = os.umask(0)
    try:
        folder.put("k", memoryview(b"x"), **options)
    finally:
        os.umask(before)
    assert (folder.root / "k").stat().st_mode & 0o777 == mode


def test_a_put_in_a_folder_continues_after_a_partial_write(
    folder: FolderBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    folder.put("k", memoryview(b"12345678"))
    assert folder.get("k") == b"12345678"


def test_a_put_in_a_folder_replaces_what_an_earlier_process_left(folder: FolderBackend) -> None:
    left = folder.root / f"k#{os.getpid()}{threading.get_ident()}"
    left.write_bytes(b"longer than the object")
    folder.put("k", memoryview(b"short"))
    assert folder.get("k") == b"short"
    assert names_in(folder.root) == ["k"]


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_put_in_a_folder_that_fails_leaves_the_object_as_it_was_and_no_other_file(
    folder: FolderBackend, monkeypatch: pytest.MonkeyPatch, call: str, create: bool
) -> None:
    put(folder, "k" if not create else "other")
    before = names_in(folder.root)
    names = {"rename": "link" if create else "replace"}

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    descriptors = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, names.get(call, call), fail)
        with pytest.raises(OSError, match="No space left"):
            folder.put("k", memoryview(b"newer"), create=create)
    assert open_descriptors() == descriptors
    assert names_in(folder.root) == before
    assert create or folder.get("k") == b"k"


def test_a_created_object_is_never_replaced(folder: FolderBackend) -> None:
    folder.put("k", memoryview(b"first"), create=True)
    with pytest.raises(FileExistsError):
        folder.put("k", memoryview(b"second"), create=True)
    assert folder.get("k") == b"first"
    assert names_in(folder.root) == ["k"]


def test_no_operation_on_a_folder_leaves_a_descriptor_open(folder: FolderBackend) -> None:
    before = open_descriptors()
    put(folder, "a/k", "b")
    folder.put("c", memoryview(b"x"), create=True)
    os.mkfifo(folder.root / "fifo")
    assert folder.get("a/k") == b"a/k"
    assert folder.get_range("a/k", 1, 2) == b"/k"
    with pytest.raises(
        StoreError, match=f"^{folder.root}/fifo: not a regular file; fix: remove it$"
    ):
        open_regular(folder.root / "fifo")
    folder.list("", "")
    folder.delete("b")
    assert names_in(folder.root) == ["a", "c", "fifo"]
    assert open_descriptors() == before


def test_only_a_regular_file_has_a_size(folder: FolderBackend) -> None:
    put(folder, "a/k")
    os.utime(folder.root / "a" / "k", (5.0, 7.0))
    assert folder.head("a/k") == (3, 7.0)
    for key in ("a", "none"):
        with pytest.raises(FileNotFoundError):
            folder.head(key)


@pytest.mark.parametrize("key", ["a//b", "/a", "a/", "./a", "a/.", "a/../b", ".."])
def test_a_key_with_a_part_that_is_no_name_is_refused(folder: FolderBackend, key: str) -> None:
    with pytest.raises(StoreError, match="not a valid key"):
        folder.get(key)


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("k#1", False),
        ("k#12", False),
        ("k#x#3", False),
        ("#7", True),
        ("k#", True),
        ("k#1x", True),
        ("k1", True),
    ],
)
def test_a_listing_leaves_out_unfinished_files_only(
    folder: FolderBackend, name: str, listed: bool
) -> None:
    (folder.root / name).write_bytes(b"x")
    assert keys_of(folder.list("", "")) == ([name] if listed else [])


def test_a_listing_leaves_out_nothing_beside_what_is_no_key(folder: FolderBackend) -> None:
    keys = [f"k{number:02d}" for number in range(20)]
    put(folder, *keys)
    for number in range(20):
        (folder.root / f"k{number:02d}#1").write_bytes(b"x")
        (folder.root / f"link{number:02d}").symlink_to("none")
        os.mkdir(os.fsencode(folder.root) + b"/\xff%d" % number)
        Path(os.fsdecode(os.fsencode(folder.root) + b"/\xff%d" % number), "k").write_bytes(b"x")
    assert keys_of(folder.list("", "")) == keys


def test_a_folder_of_another_device_is_no_circle_though_its_number_is_the_same(
    folder: FolderBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "a/k")
    real = os.stat

    def number_alike(path: Any, **options: Any) -> os.stat_result:
        fields = [*real(path, **options)]
        fields[1:3] = [7, len(Path(path).parts)]
        return os.stat_result(fields)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", number_alike)
        listed = folder.list("", "")
    assert keys_of(listed) == ["a/k"]


def test_a_listing_of_a_folder_begins_after_a_key(folder: FolderBackend) -> None:
    put(folder, "a/1", "a/2", "b/3")
    os.utime(folder.root / "a" / "2", (5.0, 7.0))
    assert keys_of(folder.list("", "")) == ["a/1", "a/2", "b/3"]
    assert keys_of(folder.list("a", "a/1")) == ["a/2"]
    assert folder.list("a", "a/1") == [("a/2", 3, 7.0)]
    assert folder.list("a", "a/2") == []
    assert keys_of(folder.list("", "a/2")) == ["b/3"]
    assert folder.list("a/1", "") == [], "a file is no folder"


def test_a_listing_passes_over_links_that_lead_nowhere_or_back(folder: FolderBackend) -> None:
    put(folder, "a/b/k", "c/k")
    (folder.root / "a" / "b" / "up").symlink_to(folder.root / "a")
    (folder.root / "a" / "b" / "self").symlink_to(folder.root / "a" / "b" / "self")
    (folder.root / "a" / "none").symlink_to(folder.root / "none")
    (folder.root / "a" / "below-a-file").symlink_to(folder.root / "c" / "k" / "x")
    (folder.root / "a" / "other").symlink_to(folder.root / "c")
    assert keys_of(folder.list("", "")) == ["a/b/k", "a/other/k", "c/k"], (
        "the same folder twice, but in no circle"
    )


def test_a_listing_names_the_entry_that_it_cannot_examine(folder: FolderBackend) -> None:
    (folder.root / "long").symlink_to("x" * 300)
    with pytest.raises(OSError, match="File name too long"):
        folder.list("", "")


@pytest.mark.parametrize(
    ("vanished", "listed"),
    [("a/gone", ["a/2"]), ("a", [])],
    ids=["a folder below", "the folder itself"],
)
def test_a_listing_during_which_a_folder_is_deleted_is_made_anew(
    folder: FolderBackend, monkeypatch: pytest.MonkeyPatch, vanished: str, listed: list[str]
) -> None:
    put(folder, "a/1", "a/2", "a/gone/3")
    scandir = os.scandir

    def scan(path: str) -> Any:
        if path == str(folder.root / vanished):
            os.rename(path, f"{folder.root}-moved")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert keys_of(folder.list("a", "a/1")) == listed


def test_a_call_within_a_guarded_call_runs_under_its_deadline() -> None:
    outer = HangGuard()
    inner = HangGuard()
    threads = outer.run(
        lambda: (threading.get_ident(), inner.run(threading.get_ident, 1e-9, "inner")), 30, "outer"
    )
    assert threads[0] == threads[1] != threading.get_ident()


def test_a_late_guarded_call_names_what_hangs_and_the_fix() -> None:
    over = threading.Event()
    with pytest.raises(StoreTimeout) as late:
        HangGuard().run(lambda: over.wait(60), 0.0123, "put /store/k")
    over.set()
    assert str(late.value) == (
        "put /store/k: no answer from the file system within 0.0123 s; fix: check the mount "
        "(NFS, FUSE) or the disk, or use another store"
    )


def run_until_just_after_the_deadline(guard: HangGuard) -> None:
    """Run a call that ends, but whose thread is held up before it can hand over the result, until
    it is late.
    """
    at_end = threading.Event()
    is_late = threading.Event()

    def hold_up(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code.co_filename.endswith("store/folder.py"):
            at_end.set()
            is_late.wait(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "join", lambda *_: at_end.wait(60))
        threading.setprofile(hold_up)
        try:
            guard.run(lambda: None, 60, "put x")
        finally:
            threading.setprofile(None)
            is_late.set()


def test_a_guarded_call_that_ends_just_as_its_deadline_passes_does_not_count_as_one_that_hangs() -> (
    None
):
    guard = HangGuard()
    for _ in range(64):
        with pytest.raises(StoreTimeout, match="no answer"):
            run_until_just_after_the_deadline(guard)
    assert guard.run(lambda: 7, 60, "put x") == 7


@pytest.mark.parametrize("abandoned", [False, True])
def test_only_a_call_that_was_abandoned_is_refused_a_change(abandoned: bool) -> None:
    refuse_if_abandoned("outside of any call")
    over = threading.Event()
    outcome = list[str]()
    ended = threading.Event()

    def change() -> None:
        over.wait(60 if abandoned else 0)
        try:
            refuse_if_abandoned("put /store/k")
            outcome.append("changed")
        except StoreTimeout as error:
            outcome.append(str(error))
        ended.set()

    if abandoned:
        with pytest.raises(StoreTimeout):
            HangGuard().run(change, 0.01, "put /store/k")
    else:
        HangGuard().run(change, 60, "put /store/k")
    over.set()
    assert ended.wait(60)
    refused = "put /store/k: the file system answered after the deadline; nothing was changed"
    assert outcome == [refused if abandoned else "changed"]


def in_forked_child(call: Callable[[], object]) -> int:
    """Run a call in a forked child, and return the child's exit code: 0 unless the call raised."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_does_not_count_the_calls_that_hang_in_its_parent() -> None:
    over = threading.Event()
    hanging = []

    def hang() -> None:
        hanging.append(threading.current_thread())
        over.wait(60)

    for _ in range(64):
        with pytest.raises(StoreTimeout, match="no answer"):
            HANG_GUARD.run(hang, 0.001, "put x")
    with pytest.raises(
        StoreTimeout, match="put x: not tried: 64 operations on folders hang already"
    ):
        HANG_GUARD.run(lambda: None, 60, "put x")
    try:
        assert in_forked_child(lambda: HANG_GUARD.run(lambda: None, 60, "put x")) == 0
    finally:
        over.set()
        for thread in hanging:
            thread.join(60)
    HANG_GUARD.run(lambda: None, 60, "put x")


def test_a_delete_leaves_no_empty_folders_behind(folder: FolderBackend, tmp_path: Path) -> None:
    put(folder, "data/1/0.bin", "data/2/0.bin", "other/x")
    folder.delete("data/1/0.bin")
    assert names_in(tmp_path / "data") == ["2"]
    folder.delete("data/2/0.bin")
    assert names_in(tmp_path) == ["other"]
    folder.delete("other/x")
    assert names_in(tmp_path) == [], "the root stays"


def test_puts_and_deletes_in_one_folder_do_not_disturb_each_other(
    folder: FolderBackend, tmp_path: Path
) -> None:
    problems: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(150):
                put(folder, f"a/b/{name}")
                folder.delete(f"a/b/{name}")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [] and names_in(tmp_path) == []
