"""The process that carries a rank's staged bytes to the store while training goes on.

    python -m training.checkpoint.uploader PARENT_PID RANK STORE_URI SLAB_FD [SLAB_FD ...]

It is started, not forked, imports no torch, and takes one JSON command per line:

    {"command": "save",  "slab", "length", "items", "common", "save", "data_key", "seconds", "keep_last"}
    {"command": "await", "save", "seconds"}       until that save is committed, by whomever
    {"command": "finish"}                         end after what was asked before

Answers, one JSON line each: uploaded, committed, failed, superseded, retention_failed.

Its end: at once with its parent's (the kernel kills it, and the command pipe closes). SIGINT, SIGTERM and SIGHUP are
ignored: they reach the whole process group on Ctrl-C or a drain, just when the trainer needs its last save carried.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from infra.errors import InfraError, StoreError
from infra.layout import index_key
from infra.process import die_with_parent
from infra.store import Store
from training.checkpoint.checksum import CHUNK_BYTES, chunk_sums
from training.checkpoint.commit import Attempt, await_commit, try_commit
from training.checkpoint.deadline import Deadline, retried
from training.checkpoint.manifest import DataObject, Item, RankIndex, Save
from training.checkpoint.retention import Retention
from training.errors import GenerationSuperseded, TrainingError

_LONGEST_REQUEST_SECONDS = 60.0


def main(argv: list[str]) -> int:
    """Serve commands until "finish" or the end of the pipe."""
    parent_pid, rank, store_uri, *slabs = argv
    die_with_parent(int(parent_pid))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    uploader = Uploader(store_uri, int(rank), [int(fd) for fd in slabs])
    for command in _commands():
        if command["command"] == "finish":
            break
        uploader.serve(command)
    return 0


class Uploader:
    """Serves one command after the other; every failure becomes an answer."""

    def __init__(self, store_uri: str, rank: int, slabs: list[int]) -> None:
        self._store_uri = store_uri
        self._rank = rank
        self._slabs = slabs
        self._store: Store | None = None
        self._retention: Retention | None = None

    def serve(self, command: dict[str, Any]) -> None:
        save = Save(**command["save"])
        deadline = Deadline(command["seconds"])
        try:
            store = self._opened(deadline)
            if command["command"] == "await":
                _committed(save, await_commit(store, save, deadline))
            else:
                self._save(store, save, command, deadline)
        except (TrainingError, InfraError, OSError, ValueError) as error:
            message = f"rank {self._rank}: {error}"
            _answer("failed", save=save, message=message)

    def _opened(self, deadline: Deadline) -> Store:
        """One store, and its connections, for all saves. A request can fail and be tried again within a deadline."""
        if self._store is None:
            limit = min(_LONGEST_REQUEST_SECONDS, max(1.0, deadline.seconds / 2))
            self._store = Store.open(self._store_uri, request_timeout_seconds=limit)
        return self._store

    def _save(self, store: Store, save: Save, command: dict[str, Any], deadline: Deadline) -> None:
        data = self._upload(store, command, deadline)
        items = tuple(Item.from_json(row) for row in command["items"])
        index = RankIndex(save=save, rank=self._rank, data=data, items=items, common=command["common"])
        key, raw = index_key(save.generation, save.step, self._rank), index.to_bytes()
        retried(f"put {key}", lambda: store.put(key, raw), deadline)
        _answer("uploaded", save=save, bytes=data.size)
        if self._rank == 0:
            _committed(save, await_commit(store, save, deadline))
            self._retain(store, save, command["keep_last"])
        else:
            self._commit_if_last(store, save)

    def _upload(self, store: Store, command: dict[str, Any], deadline: Deadline) -> DataObject:
        """Checksums first, then the bytes as they were summed, then a look whether all of them arrived."""
        key, length = command["data_key"], command["length"]
        with mmap.mmap(self._slabs[command["slab"]], max(length, 1), mmap.MAP_SHARED, mmap.PROT_READ) as slab:
            view = memoryview(slab)[:length]
            try:
                chunks, whole = chunk_sums(view)
                retried(f"put {key}", lambda: store.put(key, view), deadline)
            finally:
                view.release()
        meta = retried(f"head {key}", lambda: store.head(key), deadline)
        if meta is None or meta.size != length:
            raise StoreError(f"{store.uri}/{key}: {meta.size if meta else 'no'} bytes arrived of {length}")
        sums = {"crc64nvme": whole, "chunk_bytes": CHUNK_BYTES, "chunks": tuple(chunks)}
        return DataObject(key=key, size=length, **sums)

    def _commit_if_last(self, store: Store, save: Save) -> None:
        """One look; if others are missing it falls to a later one, at the latest to rank 0's uploader."""
        try:
            attempt = try_commit(store, save)
        except StoreError:
            return
        if attempt.commit is not None:
            _committed(save, attempt)

    def _retain(self, store: Store, save: Save, keep_last: int) -> None:
        try:
            self._retention = self._retention or Retention(keep_last)
            self._retention.run(store, save)
        except GenerationSuperseded as error:
            _answer("superseded", save=save, message=str(error))
        except (TrainingError, InfraError) as error:
            _answer("retention_failed", save=save, message=f"rank {self._rank}: {error}")


def _committed(save: Save, attempt: Attempt) -> None:
    assert attempt.commit is not None
    _answer("committed", save=save, key=attempt.commit.key, bytes=attempt.size)


def _answer(event: str, *, save: Save, **data: Any) -> None:
    print(json.dumps({"event": event, "step": save.step, **data}), flush=True)


def _commands() -> Iterator[dict[str, Any]]:
    """Commands from the pipe. A thread reads it, so that its end, the parent's, is noticed in mid-upload too."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, name="commands", daemon=True).start()
    while True:
        yield json.loads(lines.get())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
