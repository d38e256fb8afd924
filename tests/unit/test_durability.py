"""What a put or a save has reported is on the disk: bytes before their name, and names before the
report.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.errors import StoreError
from ebbflow.core.layout import data_key, index_key
from ebbflow.core.signing_key import NAME_VARIABLE
from ebbflow.core.store import Store
from ebbflow.core.store.multipart.requests import Throttle
from ebbflow.core.store.multipart.sinks import open_sink
from ebbflow.training.checkpoint.verified_io import put_verified
from tests.support.durability import (
    LOG_VARIABLE,
    Call,
    build_call_log,
    feed_all,
    preloaded_calls,
    recorded_calls,
    why_not_preloaded,
)
from tests.support.flow import ROOT

preloads = pytest.mark.skipif(bool(why_not_preloaded()), reason=why_not_preloaded())

PUTS = """
import os, sys
from ebbflow.core.store import Store
exec(sys.argv[2])
store = Store.open(sys.argv[1])
store.put("a/object", b"content")
store.create("a/claim", b"content")
"""
WITHOUT_FILE_SYNC = (
    "fsync = os.fsync; os.fsync = lambda fd: fsync(fd) if os.path.isdir(f'/proc/self/fd/{fd}') "
    "else None"
)
WITHOUT_FOLDER_SYNC = (
    "fsync = os.fsync; os.fsync = lambda fd: None if os.path.isdir(f'/proc/self/fd/{fd}') else "
    "fsync(fd)"
)


@pytest.mark.parametrize(
    ("calls", "at_risk", "early"),
    [
        ("write:k# fsync:k# rename:k#>k fsync:.", [], []),
        ("write:k# fsync:k# link:k#>k unlink:k# fsync:.", [], []),
        ("write:k# rename:k#>k fsync:.", ["k"], ["k"]),
        ("write:k# fsync:k# write:k# rename:k#>k fsync:.", ["k"], ["k"]),
        ("write:k# rename:k#>k fsync:k fsync:.", [], ["k"]),
        ("write:k# link:k#>k fsync:k# unlink:k# fsync:.", ["k"], ["k"]),
        ("write:k# fsync:k# rename:k#>k", ["k"], []),
        ("write:k# fsync:k# fsync:. rename:k#>k", ["k"], []),
        ("mkdir:a write:a/k# fsync:a/k# rename:a/k#>a/k fsync:a", ["a"], []),
        ("mkdir:a write:a/k# fsync:a/k# rename:a/k#>a/k fsync:.", ["a/k"], []),
        ("write:k#", ["k#"], []),
    ],
)
def test_the_disk_model_shows_what_a_crash_would_lose(
    tmp_path: Path, calls: str, at_risk: list[str], early: list[str]
) -> None:
    fed = []
    for text in calls.split():
        name, _, paths = text.partition(":")
        absolute = [str(tmp_path / path) for path in paths.split(">")]
        fed.append(Call(name, *absolute))
    disk = feed_all(tmp_path, fed)
    assert disk.at_risk == at_risk
    assert disk.early_names == early


@pytest.mark.parametrize("key", ["object", "some/deep/folder/object"])
@pytest.mark.parametrize("content", [b"", b"content"])
@pytest.mark.parametrize("way", ["put", "replace", "private", "create"])
def test_a_folder_s_object_is_synced_before_it_has_its_name_and_its_folders_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, key: str, content: bytes
) -> None:
    store = Store.open(str(tmp_path))
    if way == "replace":
        store.put(key, b"before")
    with recorded_calls(monkeypatch) as calls:
        if way == "create":
            assert store.create(key, content)
        else:
            store.put(key, content, private=way == "private")
    disk = feed_all(tmp_path, calls)
    assert disk.named == [key]
    assert disk.early_names == []
    assert disk.at_risk == []
    names = [call.name for call in calls if call.name in ("fsync", "rename", "link")]
    assert names[:2] == ["fsync", "link" if way == "create" else "rename"], (
        "also the size of an empty file is synced"
    )
    folders = [call.path for call in calls if call.name == "fsync" and Path(call.path).is_dir()]
    above = [str(folder) for folder in (tmp_path / key).parents if folder.is_relative_to(tmp_path)]
    assert folders == above, "each folder up to the store's, and none above it"
    assert store.get(key) == content


def test_an_upload_in_parts_is_synced_before_it_has_its_name_and_its_folders_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = open_sink(str(tmp_path), Throttle())
    with recorded_calls(monkeypatch) as calls:
        begun = sink.begin("data/a/object", 7, parts=1, seconds=30)
        sink.put_part(begun, 1, 0, b"content", 0, seconds=30)
        assert feed_all(tmp_path, calls).named == []
        sink.finish(begun, [], [], 0, seconds=30)
    disk = feed_all(tmp_path, calls)
    assert (disk.named, disk.early_names, disk.at_risk) == (["data/a/object"], [], [])


@pytest.mark.parametrize("failing", ["file", "folder"])
def test_a_put_whose_sync_fails_is_no_success_though_its_bytes_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    store = Store.open(str(tmp_path))
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")
        if is_folder == (failing == "folder"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match="Input/output error"):
            put_verified(store, "object", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ([] if failing == "file" else ["object"])
    put_verified(store, "object", b"content")


@pytest.fixture(scope="module")
def call_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_call_log(tmp_path_factory.mktemp("library"))


def environment_with(call_log: Path, log: Path) -> dict[str, str]:
    return {
        **os.environ,
        "LD_PRELOAD": str(call_log),
        LOG_VARIABLE: str(log),
        "PYTHONPATH": str(ROOT),
    }


@preloads
@pytest.mark.parametrize(
    ("change", "early", "at_risk"),
    [
        ("", [], []),
        (WITHOUT_FILE_SYNC, ["a/object", "a/claim"], ["a/claim", "a/object"]),
        (WITHOUT_FOLDER_SYNC, [], ["a", "a/claim", "a/object"]),
    ],
    ids=["sound", "file-not-synced", "folder-not-synced"],
)
def test_the_kernel_sees_the_syncs_of_a_put_and_their_absence(
    tmp_path: Path, call_log: Path, change: str, early: list[str], at_risk: list[str]
) -> None:
    store = tmp_path / "store"
    log = tmp_path / "log"
    store.mkdir()
    environment = environment_with(call_log, log)
    subprocess.run(
        [sys.executable, "-c", PUTS, str(store), change],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=60,
    )
    disk = feed_all(store, preloaded_calls(log))
    assert disk.named == ["a/object", "a/claim"]
    assert disk.early_names == early
    assert disk.at_risk == at_risk


def save_command(length: int) -> dict[str, Any]:
    save = {"job": "job", "generation": "000001-x", "step": 3, "world_size": 1}
    return {
        "command": "save",
        "buffer": 0,
        "length": length,
        "layout": 1,
        "items": [["weight", "uint8", [length], [0], [length], 0, length]],
        "common": {"extra": {}, "optimizer": None, "parent": None},
        "save": save,
        "data_key": data_key(save["generation"], save["step"], 0),
        "seconds": 30.0,
        "retention": {},
        "upload": {"bytes_per_second": None, "deadline_seconds": 30.0, "chunk_bytes": 4096},
    }


@preloads
def test_all_that_a_commit_names_is_durable_before_the_commit_can_be_seen(
    tmp_path: Path, call_log: Path
) -> None:
    """The uploader of a rank, watched from below."""
    store = tmp_path / "job"
    log = tmp_path / "log"
    store.mkdir()
    length = 20_000
    environment = environment_with(call_log, log)
    environment |= {
        NAME_VARIABLE: "EBBFLOW_TEST_KEY",
        "EBBFLOW_TEST_KEY": "a key of this test alone",
    }
    with open(tmp_path / "buffer", "w+b") as buffer:
        buffer.write(bytes(length))
        buffer.flush()
        module = "ebbflow.training.checkpoint.uploader"
        uploader = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), "0", str(store), str(buffer.fileno())],
            env=environment,
            pass_fds=[buffer.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with uploader:
            uploader.stdin.write(json.dumps(save_command(length)) + "\n")
            uploader.stdin.flush()
            events = [json.loads(uploader.stdout.readline())["event"] for _ in range(2)]
    assert events == ["uploaded", "committed"]
    calls = preloaded_calls(log)
    (commit,) = [meta.key for meta in Store.open(str(store)).list("commits")]
    named = next(
        number for number, call in enumerate(calls) if call.new_path == str(store / commit)
    )
    before = feed_all(store, calls[:named])
    assert [name.split("/")[0] for name in before.named] == ["data", "index", "signatures"]
    assert before.named[:2] == [data_key("000001-x", 3, 0), index_key("000001-x", 3, 0)]
    unfinished_manifest = f"{commit}#"
    lost = [
        path
        for path in before.at_risk
        if not commit.startswith(path) and not path.startswith(unfinished_manifest)
    ]
    assert lost == []
    for answer in events:
        told = next(
            number
            for number, call in enumerate(calls)
            if call.name == "answer" and f'"{answer}"' in call.path
        )
        reported = feed_all(store, calls[:told])
        assert (reported.at_risk, reported.early_names) == ([], []), (
            f"before {answer!r} was reported"
        )
    assert reported.named[-1] == commit
