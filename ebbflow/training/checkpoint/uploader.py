"""Run the process that uploads a rank's staged bytes to the store while training continues.

    python -m ebbflow.training.checkpoint.uploader PARENT_PID RANK STORE_URI BUFFER_FD [BUFFER_FD
    ...]

The process is started as a new program, not forked. It does not import torch. It reads one JSON
command per line from stdin. These are the commands and their fields:

    {"command": "save",  "buffer", "length", "layout", "items", "common", "save", "data_key",
    "seconds",
                         "retention", "upload": {"bytes_per_second", "deadline_seconds",
                         "chunk_bytes"}}
    {"command": "await", "save", "seconds"}       wait until any rank has committed this checkpoint
    {"command": "abandon", "step"}                another rank failed to save this step: stop waiting for its commit
    {"command": "hurry"}                          lift the bandwidth cap, also for the upload in progress
    {"command": "finish"}                         exit after all earlier commands

It writes one JSON line per event to stdout: uploaded, committed, failed, superseded or warning.

The kernel kills the process when its parent dies. The process ignores SIGINT, SIGTERM, SIGHUP and
SIGUSR1, because Ctrl-C, a drain and Slurm's notices send them to the whole process group, just when
the trainer needs its last checkpoint uploaded.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ebbflow.core.errors import InfraError, StoreFull
from ebbflow.core.layout import index_key
from ebbflow.core.process import die_with_parent
from ebbflow.core.store import Store
from ebbflow.core.store.multipart.requests import Throttle
from ebbflow.core.store.multipart.sinks import open_sink
from ebbflow.training.checkpoint.commit import CommitAttempt, await_commit, commit_as_backup
from ebbflow.training.checkpoint.manifest import CheckpointId, DataObject, IndexEntry, RankIndex
from ebbflow.training.checkpoint.part_uploader import PartSettings, PartUploader
from ebbflow.training.checkpoint.retention import Retention, RetentionPolicy
from ebbflow.training.checkpoint.signing import signed_index_bytes, signer
from ebbflow.training.checkpoint.upload_messages import (
    FinishCommand,
    SaveCommand,
    UploadAnswer,
    UploadCommand,
    UploadWork,
)
from ebbflow.training.checkpoint.verified_io import Deadline, put_verified, retry_until
from ebbflow.training.errors import GenerationSuperseded, TrainingError

_LONGEST_REQUEST_SECONDS = 60.0
_NICENESS = 10
_DATA_SHARE = 0.9
_CHUNKS_PER_PART = 2
_SWEEP_EVERY_SECONDS = 600.0
_SWEEP_SECONDS = 5.0  # the next save may be waiting
_SECONDS_TO_MAKE_ROOM = 2.0
_ABANDONED_SECONDS = 2.0
_YOUNGEST_SWEPT_SECONDS = 900.0  # another generation's save may have been given more time than ours


class Uploader:
    """Executor of the trainer's commands, one at a time.

    It writes the result or failure of each command to stdout.
    """

    def __init__(
        self, store_uri: str, rank: int, buffers: list[int], commands: CommandQueue
    ) -> None:
        self._store_uri = store_uri
        self._rank = rank
        self._buffers = [_SharedBuffer(descriptor) for descriptor in buffers]
        self._commands = commands
        self._store: Store | None = None
        self._request_seconds = math.inf
        self._parts: PartUploader | None = None
        self._throttle = commands.throttle
        self._retention: Retention | None = None
        self._layout = 0
        self._items = ()
        self._swept_at = -math.inf

    def serve(self, command: UploadWork) -> None:
        save = CheckpointId(**command["save"])
        deadline = Deadline(command["seconds"])
        try:
            store = self._open_store(deadline)
            if self._rank == 0:  # one small read per save
                retry_until(deadline, "the store's marker", store.check_marker)
            if command["command"] == "await":
                given_up = self._commands.abandoned(save.step)
                _committed(
                    save, await_commit(store, save, deadline, foreign_first=True, given_up=given_up)
                )
            else:
                self._save_in_room(store, save, command, deadline)
        except GenerationSuperseded as error:
            _answer({"event": "superseded", "step": save.step, "message": str(error)})
        except (TrainingError, InfraError, OSError, ValueError) as error:
            cause = type(error.__cause__ or error).__name__
            message = f"rank {self._rank}: {error}"
            _answer({"event": "failed", "step": save.step, "message": message, "cause": cause})

    def _open_store(self, deadline: Deadline) -> Store:
        """Open the store with a request timeout that leaves time for retries before the deadline."""
        limit = min(_LONGEST_REQUEST_SECONDS, max(1.0, deadline.seconds / 3))
        if self._store is None or limit < self._request_seconds:  # the last save has little time
            self._store = Store.open(self._store_uri, request_timeout_seconds=limit)
            self._request_seconds = limit
        return self._store

    def _save_in_room(
        self, store: Store, save: CheckpointId, command: SaveCommand, deadline: Deadline
    ) -> None:
        """Upload and commit a checkpoint. If the store is full, delete old commits and try again.

        All ranks find the store full at the same time. Rank n first waits n × 2 s and tries again,
        so that usually rank 0 alone deletes commits, for all ranks.
        """
        waited = self._rank == 0
        made_room = False
        while True:
            try:
                return self._save(store, save, command, deadline)
            except TrainingError as error:
                if made_room or not isinstance(error.__cause__, StoreFull):
                    raise
                if waited:
                    limit = command["upload"]["deadline_seconds"]
                    policy = command["retention"]
                    deleted = self._retention_of(save, policy).make_room(
                        store, save, deadline_seconds=limit
                    )
                    steps = ", ".join(str(ref.step) for ref in deleted) or "none"
                    self._warn(save, f"{error}; commits deleted to make room: {steps}")
                    made_room = True
                else:
                    time.sleep(
                        min(self._rank * _SECONDS_TO_MAKE_ROOM, deadline.remaining_seconds / 4)
                    )
                    waited = True

    def _save(
        self, store: Store, save: CheckpointId, command: SaveCommand, deadline: Deadline
    ) -> None:
        began = time.monotonic()
        cpu_began = time.process_time()
        data = self._upload(store, command, deadline)
        items = self._index_entries(command)
        index = RankIndex(
            save=save, rank=self._rank, data=data, items=items, common=command["common"]
        )
        key = index_key(save.generation, save.step, self._rank)
        raw = signed_index_bytes(store, key, index)
        retry_until(deadline, f"put {key}", lambda: put_verified(store, key, raw))
        seconds = time.monotonic() - began
        cpu_seconds = time.process_time() - cpu_began
        _answer(
            {
                "event": "uploaded",
                "step": save.step,
                "bytes": data.size,
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
            }
        )
        if self._rank == 0:
            _committed(
                save,
                await_commit(store, save, deadline, given_up=self._commands.abandoned(save.step)),
            )
            self._retain(store, save, command["retention"])
            self._sweep(save, command["upload"]["deadline_seconds"])
        else:
            commit_as_backup(store, save, self._rank, deadline, self._commands.wait)

    def _index_entries(self, command: SaveCommand) -> tuple[IndexEntry, ...]:
        """Return the index entries of a command's layout.

        Only the first command with that layout contains them.
        """
        if command["items"] is not None:
            self._layout = command["layout"]
            self._items = tuple(IndexEntry.from_json(row) for row in command["items"])
        if command["layout"] != self._layout:
            raise ValueError(f"layout {command['layout']} was never sent to this uploader")
        return self._items

    def _upload(self, store: Store, command: SaveCommand, deadline: Deadline) -> DataObject:
        """Upload the data within 90 % of the remaining time, which leaves the rest for the index
        and the commit.
        """
        if self._commands.hurried:
            self._throttle.bytes_per_second = None
        else:
            self._throttle.bytes_per_second = command["upload"]["bytes_per_second"]
        if self._parts is None:
            chunk_bytes = command["upload"]["chunk_bytes"]
            settings = PartSettings(
                part_bytes=_CHUNKS_PER_PART * chunk_bytes,
                chunk_bytes=chunk_bytes,
                sha256=signer() is not None,
            )
            self._parts = PartUploader(
                open_sink(store.uri, self._throttle), settings, self._throttle
            )
        view = self._buffers[command["buffer"]].view(command["length"])
        try:
            return self._parts.upload(
                command["data_key"], view, Deadline(_DATA_SHARE * deadline.remaining_seconds)
            )
        finally:
            view.release()

    def _retain(self, store: Store, save: CheckpointId, policy: dict[str, Any]) -> None:
        try:
            self._retention_of(save, policy).run(store, save, lambda: self._commands.wait(0))
        except GenerationSuperseded as error:
            _answer({"event": "superseded", "step": save.step, "message": str(error)})
        except (TrainingError, InfraError) as error:
            self._warn(save, f"retention: {error}")

    def _retention_of(self, save: CheckpointId, policy: dict[str, Any]) -> Retention:
        self._retention = self._retention or Retention(
            RetentionPolicy(**policy), partial(self._warn, save)
        )
        return self._retention

    def _warn(self, save: CheckpointId, message: str) -> None:
        text = f"rank {self._rank}: {message}"
        _answer({"event": "warning", "step": save.step, "message": text})

    def _sweep(self, save: CheckpointId, deadline_seconds: float) -> None:
        """Abort unfinished multipart uploads that are too old to belong to a running save."""
        if (
            self._parts is None
            or time.monotonic() < self._swept_at + _SWEEP_EVERY_SECONDS
            or self._commands.wait(0)
        ):
            return
        self._swept_at = time.monotonic()
        older = max(2 * deadline_seconds, _YOUNGEST_SWEPT_SECONDS)
        try:
            self._parts.sweep("data/", older_than_seconds=older, seconds=_SWEEP_SECONDS)
        except (InfraError, OSError) as error:
            self._warn(save, f"sweep of unfinished uploads: {error}")


class CommandQueue:
    """The trainer's commands, which a thread reads from stdin.

    The thread applies "hurry" and "abandon" at once, even during an upload, and ends the process
    when the trainer dies.
    """

    def __init__(self) -> None:
        self.throttle = Throttle()
        self.hurried = False
        self._abandoned: dict[int, float] = {}  # time.monotonic() by step
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def next(self) -> UploadWork | FinishCommand:
        with self._changed:
            self._changed.wait_for(lambda: self._lines)
            return json.loads(self._lines.popleft())

    def abandoned(self, step: int) -> Callable[[], bool]:
        """Return a function that returns whether "abandon" for `step` arrived more than 2 s ago."""
        return lambda: time.monotonic() - self._abandoned.get(step, math.inf) > _ABANDONED_SECONDS

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for a command, and return whether there is one."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._lines, seconds))

    def _read(self) -> None:
        for line in sys.stdin:
            command: UploadCommand = json.loads(line)
            if command["command"] == "hurry":
                self.hurried = True
                self.throttle.bytes_per_second = None
                continue
            if command["command"] == "abandon":
                self._abandoned = {command["step"]: time.monotonic()}
                continue
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        os._exit(0)


def main(argv: list[str]) -> int:
    """Execute commands from stdin until "finish" or end of input."""
    parent_pid, rank, store_uri, *buffers = argv
    die_with_parent(int(parent_pid))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if os.getpriority(os.PRIO_PROCESS, 0) == os.getpriority(os.PRIO_PROCESS, int(parent_pid)):
        os.nice(_NICENESS)  # training has priority
    commands = CommandQueue()
    uploader = Uploader(store_uri, int(rank), [int(fd) for fd in buffers], commands)
    command = commands.next()
    while command["command"] != "finish":
        uploader.serve(command)
        command = commands.next()
    return 0


class _SharedBuffer:
    """A staging buffer of the trainer, mapped into this process.

    After the buffer has grown, it is mapped again.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None

    def view(self, length: int) -> memoryview:
        if self._map is None or len(self._map) < length:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            size = os.fstat(self._descriptor).st_size
            self._map = mmap.mmap(self._descriptor, max(size, 1), flags, mmap.PROT_READ)
        return memoryview(self._map)[:length]


def _committed(save: CheckpointId, attempt: CommitAttempt) -> None:
    assert attempt.commit is not None
    _answer(
        {
            "event": "committed",
            "step": save.step,
            "key": attempt.commit.key,
            "bytes": attempt.size,
        }
    )


def _answer(answer: UploadAnswer) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
