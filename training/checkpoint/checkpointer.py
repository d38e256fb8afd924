"""The trainer's door: save without waiting for the store, know what is committed, restore what verifies."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from infra.events import COMMIT, COMMIT_FAILED, STAGED
from infra.layout import data_key
from infra.store import Store
from training.checkpoint.checksum import canonical_json
from training.checkpoint.deadline import Deadline
from training.checkpoint.lineage import CommitRef, Generation
from training.checkpoint.manifest import Save
from training.checkpoint.restore import Restored, restore_newest
from training.checkpoint.rng import capture_rng
from training.checkpoint.shards import shards_of_rank
from training.checkpoint.stage import Slabs
from training.checkpoint.state import named_state, optimizer_settings
from training.checkpoint.uploader_client import UploaderClient
from training.errors import CheckpointError, GenerationSuperseded

_ANSWER_MARGIN_SECONDS = 2.0  # the uploader keeps the deadline itself; past this margin it counts as stuck
_CLOSE_GRACE_SECONDS = 5.0
_FAILURES_IN_A_ROW = 2  # one failed save is reported and survived; the second in a row ends the gang


@dataclass
class _InFlight:
    save: Save
    began: float  # time.monotonic() when `save` was called
    deadline: Deadline
    command: str


class Checkpointer:
    """Saves and restores one rank's part. Every rank calls `save`, `wait` and `restore` for the same steps.

    job_store_uri: the job's folder in the store (``<store>/jobs/<job>``). deadline_seconds: for one save to be
    committed, from its staging on. keep_last: commits of the lineage kept. emit: `EventLog.emit` or None; rank 0
    emits ``commit`` (key, bytes, seconds), every rank ``commit_failed`` (message).

    Make it in the main thread: the uploader process ends with the thread that started it. Not thread-safe.
    """

    def __init__(
        self,
        job_store_uri: str,
        *,
        generation: Generation,
        rank: int = 0,
        world_size: int = 1,
        node: int = 0,
        deadline_seconds: float = 120.0,
        keep_last: int = 3,
        emit: Callable[..., Any] | None = None,
    ) -> None:
        self._store = Store.open(job_store_uri)
        self._job = self._store.uri.rsplit("/", 1)[-1]
        self._generation = generation
        self._rank, self._world_size, self._node = rank, world_size, node
        self._deadline_seconds = deadline_seconds
        self._keep_last = keep_last
        self._emit = emit or (lambda *_, **__: None)
        self._slabs = Slabs()
        self._uploader = UploaderClient(self._store.uri, rank, self._slabs.descriptors)
        self._in_flight: _InFlight | None = None
        self._last_saved: _InFlight | None = None
        self._last_commit: CommitRef | None = None
        self._last_failure: str | None = None
        self._failures = 0
        self._superseded: str | None = None

    @property
    def uploader_pid(self) -> int | None:
        return self._uploader.pid

    @property
    def last_commit(self) -> CommitRef | None:
        """The newest commit known here, without waiting. On ranks above 0 it may lag behind until `wait`."""
        self._drain()
        return self._last_commit

    def save(self, step: int, model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any]) -> float:
        """Stage the state after `step` and leave the rest to the uploader. Returns the stall in seconds.

        The stall is the copy, and the wait for the save before when it is still under way. extra: JSON without NaN;
        rank 0's is kept. A step that this generation has already saved is not saved twice (0.0 is returned).
        Raises GenerationSuperseded, and CheckpointError when two saves in a row have failed.
        """
        began = time.monotonic()
        if self._last_saved is not None and step <= self._last_saved.save.step:
            if step == self._last_saved.save.step:
                return 0.0
            raise CheckpointError(f"step {step} after {self._last_saved.save.step}: a rewind needs a new generation")
        common = self._common(model, optimizer, extra) if self._rank == 0 else None
        shards = shards_of_rank(named_state(model, optimizer), self._rank, self._world_size)
        shards += shards_of_rank(capture_rng(self._rank), 0, 1)
        staged = self._slabs.stage(shards)
        self._settle()
        self._raise_if_hopeless()
        self._emit(STAGED, step=step, bytes=staged.length)
        save = Save(job=self._job, generation=self._generation.name, step=step, world_size=self._world_size)
        self._last_saved = self._submit(
            save,
            began,
            Deadline(self._deadline_seconds),
            command="save",
            slab=staged.slab,
            length=staged.length,
            items=[item.to_json() for item in staged.items],
            common=common,
            data_key=data_key(save.generation, step, self._rank),
            keep_last=self._keep_last,
        )
        return time.monotonic() - began

    def wait(self) -> CommitRef | None:
        """Until the newest save is committed by all ranks. Raises CheckpointError at its deadline, naming the cause."""
        self._settle()
        last = self._last_saved
        if last is None:
            return self._last_commit
        here = (self._generation.number, last.save.step)
        known = self._last_commit and (self._last_commit.generation, self._last_commit.step)
        if self._last_failure is None and known != here:
            self._submit(last.save, last.began, last.deadline, command="await")
            self._settle()
        if self._superseded is not None:
            raise GenerationSuperseded(self._superseded)
        if self._last_failure is not None:
            raise CheckpointError(self._last_failure)
        return self._last_commit

    def restore(self, candidates: list[str], model: nn.Module, optimizer: Optimizer | None) -> Restored | None:
        """Fill model and optimizer from the first candidate that verifies on all ranks; None without candidates.

        A damaged candidate is quarantined and reported. Raises CommitMismatch, and CheckpointError when none is left.
        """
        if self._generation.parent is not None and candidates and self._generation.parent not in candidates:
            raise CheckpointError(
                f"{self._generation.name} starts from {self._generation.parent}, which is not among the candidates; "
                "hint: to rewind, open the generation with that commit as its parent"
            )
        restored = restore_newest(self._store, candidates, model, optimizer, self._rank, self._world_size)
        if restored is not None:
            self._last_commit = CommitRef.from_key(restored.key)
        return restored

    def close(self) -> None:
        """End the uploader; a save under way gets a few seconds. Call `wait` first to be sure of it."""
        if self._slabs.descriptors:
            self._uploader.close(_CLOSE_GRACE_SECONDS)
            self._slabs.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _common(self, model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any]) -> dict[str, Any]:
        settings = None if optimizer is None else optimizer_settings(model, optimizer)
        common = {"extra": extra, "optimizer": settings, "parent": self._generation.parent}
        try:
            canonical_json(common)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"extra or the optimizer's settings cannot be kept as JSON: {error}") from error
        return common

    def _submit(self, save: Save, began: float, deadline: Deadline, *, command: str, **more: Any) -> _InFlight:
        seconds = max(deadline.remaining_seconds, 1.0)
        self._uploader.ask({"command": command, "save": save.__dict__, "seconds": seconds, **more})
        self._in_flight = _InFlight(save, began, deadline, command)
        return self._in_flight

    def _settle(self) -> None:
        """Wait for the save under way; at its deadline the uploader counts as stuck and is replaced."""
        self._drain()
        while self._in_flight is not None:
            remaining = max(self._in_flight.deadline.remaining_seconds, 1.0) + _ANSWER_MARGIN_SECONDS
            if not self._take_answer(remaining):
                self._uploader.give_up()
                seconds = self._in_flight.deadline.seconds
                self._failed(f"rank {self._rank}: its uploader gave no answer within {seconds:g} s and was ended")

    def _drain(self) -> None:
        while self._take_answer(0):
            pass

    def _take_answer(self, timeout_seconds: float) -> bool:
        answer = self._uploader.answer(timeout_seconds)
        if answer is None:
            return False
        handler = {
            "uploaded": self._on_uploaded,
            "committed": self._on_committed,
            "failed": lambda a: self._failed(a["message"], a["step"]),
            "superseded": self._on_superseded,
            "retention_failed": lambda a: self._warn(f"retention: {a['message']}"),
            "ended": self._on_ended,
        }[answer["event"]]
        handler(answer)
        return True

    def _on_uploaded(self, answer: dict[str, Any]) -> None:
        """Durable, not yet committed. Rank 0's save stays under way until the commit is seen."""
        if self._rank != 0:
            self._done(answer["step"])

    def _on_committed(self, answer: dict[str, Any]) -> None:
        ref = CommitRef.from_key(answer["key"])
        if self._rank == 0 and self._last_saved is not None:
            seconds = time.monotonic() - self._last_saved.began
            self._emit(COMMIT, step=ref.step, key=ref.key, bytes=answer["bytes"], seconds=seconds)
        self._last_commit = ref
        self._done(ref.step)

    def _on_superseded(self, answer: dict[str, Any]) -> None:
        self._superseded = answer["message"]
        self._warn(answer["message"])

    def _on_ended(self, answer: dict[str, Any]) -> None:
        if self._in_flight is not None:
            self._failed(f"rank {self._rank}: its uploader ended with exit code {answer['exit_code']}")

    def _done(self, step: int) -> None:
        self._failures, self._last_failure = 0, None
        if self._in_flight is not None and self._in_flight.save.step == step:
            self._in_flight = None

    def _failed(self, message: str, step: int | None = None) -> None:
        """A failed save; `step` None: the one under way."""
        under_way = self._in_flight.save.step if self._in_flight is not None else None
        step = under_way if step is None else step
        if step == under_way:  # a late failure of an earlier save leaves the present one under way
            self._in_flight = None
        self._failures += 1
        self._last_failure = message
        self._warn(message)
        self._emit(COMMIT_FAILED, step=step, message=message)

    def _raise_if_hopeless(self) -> None:
        if self._superseded is not None:
            raise GenerationSuperseded(self._superseded)
        if self._failures >= _FAILURES_IN_A_ROW:
            raise CheckpointError(f"{self._failures} saves in a row have failed, the last: {self._last_failure}")

    def _warn(self, message: str) -> None:
        print(f"checkpoint: WARNING: {message}", file=sys.stderr, flush=True)
