"""A folder whose file system hangs: every operation ends in time, a save fails, and nothing else
waits for it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ebbflow.core.errors import StoreError, StoreTimeout, StoreUnavailable
from ebbflow.core.events import read_events
from ebbflow.core.store import Store
from ebbflow.core.store.folder import FolderBackend, HangGuard
from ebbflow.core.store.multipart.requests import Throttle
from ebbflow.core.store.multipart.sinks import open_sink
from ebbflow.training.checkpoint import (
    Checkpointer,
    open_generation,
    reachable_commits,
    verify_commit,
)
from ebbflow.training.checkpoint.commit import await_commit
from ebbflow.training.checkpoint.file_formats import read_file
from ebbflow.training.checkpoint.inflight_save import UploaderClient
from ebbflow.training.checkpoint.manifest import CheckpointId
from ebbflow.training.checkpoint.verified_io import Deadline
from ebbflow.training.errors import CheckpointError


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every operation on a folder waits for this event."""
    over = threading.Event()
    for name in ("put", "get", "get_range", "head", "list", "delete"):
        monkeypatch.setattr(FolderBackend, name, lambda *_, **__: over.wait(120))
    yield over
    over.set()


def test_every_operation_of_a_folder_that_hangs_ends_in_time(
    tmp_path: Path, hang: threading.Event
) -> None:
    store = Store.open(str(tmp_path), request_timeout_seconds=0.05)
    operations = [
        lambda: store.put("a", b"x"),
        lambda: store.get("a"),
        lambda: store.get_range("a", 0, 1),
        lambda: store.head("a"),
        lambda: store.list(),
        lambda: store.delete("a"),
    ]
    for operation in operations:
        with pytest.raises(
            StoreUnavailable,
            match=r"no answer from the file system within 0\.05 s; fix: check the mount",
        ):
            operation()


@pytest.mark.parametrize("call", ["listdir", "stat"])
def test_a_start_does_not_wait_for_an_event_log_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = Store.open(str(tmp_path), request_timeout_seconds=0.05)
    over = threading.Event()
    real = getattr(os, call)
    (tmp_path / "events" / "000001").mkdir(parents=True)

    def hanging(path: Any, *rest: Any, **options: Any) -> Any:
        if not isinstance(path, int) and b"events" in os.fsencode(path) and not over.wait(60):
            pytest.fail("the caller waited for the file system")
        return real(path, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, hanging)
        with pytest.raises(
            StoreTimeout, match=r"list .*/events: no answer from the file system within 0\.05 s"
        ):
            read_events(store)
        over.set()


@pytest.mark.parametrize("create", [False, True])
def test_a_put_that_was_abandoned_changes_nothing_when_the_mount_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create: bool
) -> None:
    """Its caller has gone on: a claim that was released meanwhile must not come back."""
    store = Store.open(str(tmp_path), request_timeout_seconds=0.2)
    over = threading.Event()
    write = os.write
    hung = []

    def hang_once(descriptor: int, data: Any) -> int:
        if bytes(data) == b"older":
            hung.append(threading.current_thread())
            over.wait(120)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", hang_once)
    with pytest.raises(StoreTimeout):
        (store.create if create else store.put)("key", b"older")
    if not create:
        Store.open(str(tmp_path)).put("key", b"newer")
    over.set()
    hung[0].join(60)
    assert not hung[0].is_alive()
    assert [path.name for path in tmp_path.iterdir()] == ([] if create else ["key"]), (
        "no unfinished file either"
    )
    assert create or store.get("key") == b"newer"


def test_calls_that_hang_are_counted() -> None:
    pool = HangGuard()
    over = threading.Event()
    for _ in range(64):
        with pytest.raises(StoreTimeout):
            pool.run(lambda: over.wait(120), 0.001, "put x")
    with pytest.raises(StoreTimeout, match="not tried: 64 operations"):
        pool.run(lambda: None, 60, "put x")
    over.set()
    limit = time.monotonic() + 60
    while pool._abandoned and time.monotonic() < limit:
        time.sleep(0.01)
    assert pool.run(lambda: 7, 60, "x") == 7
    with pytest.raises(KeyError):
        pool.run(lambda: {}["x"], 60, "x")


def test_a_part_that_hangs_is_abandoned_and_its_file_is_never_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = open_sink(str(tmp_path), Throttle())
    over = threading.Event()
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *what: over.wait(120) and pwrite(*what))
    begun = sink.begin("data/x", 10, parts=1, seconds=60)
    with pytest.raises(StoreTimeout):
        sink.put_part(begun, 1, 0, b"0123456789", 0, seconds=0.05)
    with pytest.raises(StoreError, match="an operation on this file hangs"):
        sink.finish(begun, [], [], 0, seconds=60)
    sink.abort(begun, seconds=60)
    over.set()
    os.fstat(begun.cached)  # left open: its number must not become another file's
    assert not (tmp_path / "data" / "x").exists()


def test_a_listing_skips_invalid_keys_and_reports_unreadable_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(str(tmp_path))
    store.put("data/a", b"1")
    os.mkdir(os.fsencode(tmp_path) + b"/data/\xff\xfe")
    (tmp_path / "data" / "round").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "itself").symlink_to(tmp_path / "data" / "itself")
    (tmp_path / "data" / "nowhere").symlink_to(tmp_path / "none")
    os.mkfifo(tmp_path / "data" / "fifo")
    (tmp_path / "data" / "b#77").write_bytes(b"unfinished")
    assert [meta.key for meta in store.list()] == ["data/a"]
    assert [meta.key for meta in store.list("data")] == ["data/a"]
    for ask in (store.get, lambda key: store.get_range(key, 0, 1)):
        with pytest.raises(StoreError):
            ask("data/fifo")
    with pytest.raises(StoreError, match="not a valid key"):
        store.get("../data/a")

    def broken(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(StoreError, match="Input/output error"):
        store.list("data")


def test_verify_does_not_wait_for_a_fifo(tmp_path: Path) -> None:
    job = Store.open(str(tmp_path))
    with Checkpointer(job.uri, generation=open_generation(job, run="r", attempt=0)) as saver:
        saver.save(1, nn.Linear(8, 8), None, {})
        key = saver.wait().key
    path = job.local_path(job.list("data")[0].key)
    path.unlink()
    os.mkfifo(path)
    assert any("no such object" in problem for problem in verify_commit(job, key))


def test_a_frozen_uploader_costs_one_save_and_holds_up_nothing_else(tmp_path: Path) -> None:
    job = Store.open(str(tmp_path))
    generation = open_generation(job, run="r", attempt=0)
    with Checkpointer(job.uri, generation=generation, deadline_seconds=1.0) as saver:
        saver.save(1, nn.Linear(8, 8), None, {}, deadline_seconds=60.0)
        assert saver.wait().step == 1
        frozen = saver.uploader_pid
        os.kill(frozen, signal.SIGSTOP)
        saver.save(2, nn.Linear(8, 8), None, {})
        assert saver.failed_step is None
        saver.save(3, nn.Linear(8, 8), None, {}, deadline_seconds=60.0)
        assert saver.failed_step == 2 and saver.uploader_pid != frozen
        assert saver.wait().step == 3 and saver.failed_step is None
    assert [ref.step for ref in reachable_commits(job)] == [3, 1]


def test_a_stopped_uploader_accepts_no_request_and_delays_no_rank(tmp_path: Path) -> None:
    client = UploaderClient(str(tmp_path), 0, [], start=True)
    try:
        os.kill(client.pid, signal.SIGSTOP)
        for _ in range(64):  # more than a pipe holds
            client.ask({"command": "hurry", "padding": "x" * 65536})
    finally:
        client.give_up()


def test_a_commit_that_another_rank_failed_to_save_is_not_awaited(tmp_path: Path) -> None:
    save = CheckpointId(job="job", generation="000001-x", step=5, world_size=2)
    with pytest.raises(CheckpointError, match=r"step 5 .* no index from rank 0, 1"):
        await_commit(Store.open(str(tmp_path)), save, Deadline(3600.0), given_up=lambda: True)
    job = Store.open(str(tmp_path / "jobs" / "job"))
    gang = {
        "generation": open_generation(job, run="r", attempt=0),
        "world_size": 2,
        "deadline_seconds": 3600.0,
    }
    with Checkpointer(job.uri, **gang) as saver:
        saver.save(1, nn.Linear(8, 8), None, {})
        saver.abandon(1)
        with pytest.raises(CheckpointError, match="no index from rank 1"):
            saver.wait()
        assert saver.failed_step == 1


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors", "folder/.metadata"])
def test_an_import_does_not_wait_for_a_fifo(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_file(path.parent if path.parent != tmp_path else path)
