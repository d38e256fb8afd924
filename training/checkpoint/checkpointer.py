"""The trainer's door: save without waiting for the store, know what is committed, restore what verifies."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ebbflow.infra.events import STAGED
from ebbflow.infra.layout import data_key
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.inflight_save import InflightSave, SaveTracker, UploadCost, UploaderClient
from ebbflow.training.checkpoint.lineage import CommitRef, Generation, amend_parent
from ebbflow.training.checkpoint.manifest import CheckpointId
from ebbflow.training.checkpoint.restore import RestoreResult, restore_newest
from ebbflow.training.checkpoint.retention import RetentionPolicy
from ebbflow.training.checkpoint.save_plan import SavePlanner
from ebbflow.training.checkpoint.staging import StagedState, StagingArea
from ebbflow.training.checkpoint.state import capture_rng, optimizer_settings
from ebbflow.training.checkpoint.verified_io import CHUNK_BYTES, Deadline, canonical_json, retry
from ebbflow.training.errors import CheckpointError

_CLOSE_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class _Queued:
    """A save whose copy from the device is not finished: what the uploader is to be told then."""

    flight: InflightSave
    staged: StagedState
    common: dict[str, Any] | None
    data_key: str


class Checkpointer:
    """Saves and restores one rank's part. Every rank calls `save`, `wait` and `restore` for the same steps.

    job_store_uri: the job's folder in the store (``<store>/jobs/<job>``). deadline_seconds: for one save to be
    committed, from its staging on. retention: which commits are kept. upload_bytes_per_second: the cap of this
    rank's upload, None: none. chunk_bytes: what one checksum covers; an upload has parts of two chunks, which Amazon
    accepts from 5 MiB on. request_seconds: the longest that a request of a restore may take. emit: `EventLog.emit` or
    None; rank 0 emits ``commit`` (key, bytes, seconds, stall_seconds), every rank ``staged`` (bytes) and
    ``commit_failed`` (message).

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
        retention: RetentionPolicy | None = None,
        upload_bytes_per_second: float | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        request_seconds: float = 60.0,
        emit: Callable[..., Any] | None = None,
        waiting: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self._store = Store.open(job_store_uri, request_timeout_seconds=request_seconds)
        self._job = self._store.uri.rsplit("/", 1)[-1]
        self._generation = generation
        self._rank, self._world_size, self._node = rank, world_size, node
        self._deadline_seconds = deadline_seconds
        self._retention = retention or RetentionPolicy()
        self._emit = emit or (lambda *_, **__: None)
        self._bytes_per_second, self._chunk_bytes = upload_bytes_per_second, chunk_bytes
        self._stage = StagingArea()
        self._planner = SavePlanner(rank, world_size)
        uploader = UploaderClient(self._store.uri, rank, self._stage.descriptors)
        self._flights = SaveTracker(uploader, rank, self._emit, waiting or (lambda: lambda: None))
        self._queued: _Queued | None = None
        self._last_step: int | None = None
        self._layout_of: tuple[int | None, int] = (None, 0)  # pid of the uploader, number of the layout it knows

    @property
    def uploader_pid(self) -> int | None:
        return self._flights.uploader.pid

    @property
    def last_commit(self) -> CommitRef | None:
        """The newest commit known here, without waiting. On ranks above 0 it may lag behind until `wait`."""
        self._flights.drain()
        return self._flights.last_commit

    @property
    def busy(self) -> bool:
        """Whether a save is under way; the next one would have to wait for it. Ranks differ in it."""
        return self._queued is not None or self._flights.busy

    @property
    def expected_seconds(self) -> float | None:
        """How long a save would take now until it is durable, by what the last one took; None before that is known."""
        self._flights.drain()
        return self._flights.expected_seconds(self._planner.layout.length)

    @property
    def last_durable(self) -> tuple[int, float] | None:
        """(step, seconds from the call of `save` until it was durable here) of the last save that became so."""
        self._flights.drain()
        return self._flights.durable

    @property
    def failed_step(self) -> int | None:
        """The step that this rank was last asked to save, where that failed; for the other ranks, see `abandon`."""
        self._flights.drain()
        return self._flights.failed_step

    def abandon(self, step: int) -> None:
        """Another rank failed to save `step`, so that it becomes no commit: do not await it until its deadline."""
        self._flights.abandon(step)

    @property
    def upload_cost(self) -> UploadCost:
        """Of this rank's uploads so far."""
        return self._flights.cost

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Make room for saves in the background, so that the first is not slower than the others.

        Call it once model and optimizer are there; before the optimizer's first step its state is estimated.
        """
        self._stage.prepare(self._planner.expected_bytes(model, optimizer))

    def hurry(self) -> None:
        """From now on no bandwidth is spared: training has ended, and little time is left."""
        self._bytes_per_second = None
        self._flights.uploader.tell({"command": "hurry"})

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: dict[str, Any],
        *,
        deadline_seconds: float | None = None,
    ) -> float:
        """Stage the state after `step` and leave the rest to the uploader. Returns the stall in seconds.

        The stall is the copy, and the wait for the save before when it is still under way. extra: JSON without NaN;
        rank 0's is kept. deadline_seconds: for this save alone. A step that this generation has already saved is not
        saved twice (0.0 is returned). From a CUDA device the copy may still be under way: `before_step` awaits it.
        Raises GenerationSuperseded, and CheckpointError when two saves in a row have failed.
        """
        began = time.monotonic()
        if self._last_step is not None and step <= self._last_step:
            if step == self._last_step:
                return 0.0
            raise CheckpointError(f"step {step} after {self._last_step}: a rewind needs a new generation")
        self.before_step()
        common = self._common(model, optimizer, extra) if self._rank == 0 else None
        sources = self._planner.plan(model, optimizer, capture_rng(self._rank))
        staged = self._stage.stage(sources, self._planner.layout)
        self._emit(STAGED, step=step, bytes=staged.layout.length)
        self._flights.settle()
        self._flights.raise_if_hopeless()
        self._last_step = step
        save = CheckpointId(job=self._job, generation=self._generation.name, step=step, world_size=self._world_size)
        flight = InflightSave(
            save=save,
            began=began,
            deadline=Deadline(self._deadline_seconds if deadline_seconds is None else deadline_seconds),
            size=staged.layout.length,
            stall_seconds=time.monotonic() - began,
        )
        self._queued = _Queued(flight, staged, common, data_key(save.generation, step, self._rank))
        if staged.copied is None:
            self._send()
        return time.monotonic() - began

    def before_step(self) -> None:
        """Call it before the optimizer changes the state: waits until a copy from the device is done."""
        if self._queued is not None:
            if self._queued.staged.copied is not None:
                self._queued.staged.copied.synchronize()
            self._send()

    def wait(self) -> CommitRef | None:
        """Until the newest save is committed by all ranks. Raises CheckpointError at its deadline, naming the cause."""
        self.before_step()
        flights = self._flights
        flights.settle()
        last = flights.last
        if last is None:
            return flights.last_commit
        here = (self._generation.number, last.save.step)
        known = flights.last_commit and (flights.last_commit.generation, flights.last_commit.step)
        if flights.last_failure is None and known != here:
            flights.submit(last, command="await")
            flights.settle()
        flights.raise_if_lost()
        return flights.last_commit

    def restore(self, candidates: list[str], model: nn.Module, optimizer: Optimizer | None) -> RestoreResult | None:
        """Fill model and optimizer from the first candidate that verifies on all ranks; None where there is no parent.

        A damaged candidate is quarantined and reported. Raises CommitMismatch, and CheckpointError when none is left.
        """
        if self._generation.parent is not None and self._generation.parent not in candidates:
            raise CheckpointError(
                f"{self._generation.name} starts from {self._generation.parent}, which is not among the candidates; "
                "hint: to rewind, open the generation with that commit as its parent"
            )
        restored = restore_newest(
            self._store, candidates, model, optimizer, self._rank, self._world_size, node=self._node
        )
        self._planner.forget()
        if restored is not None:
            self._flights.last_commit = CommitRef.from_key(restored.key)
            if self._generation.parent not in (None, restored.key):
                self._go_back_to(restored.key, restored.step)
        return restored

    def close(self) -> None:
        """End the uploader; a save under way gets a few seconds. Call `wait` first to be sure of it."""
        if self._stage.descriptors:
            self._flights.uploader.close(_CLOSE_GRACE_SECONDS)
            self._planner.forget()
            self._stage.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _go_back_to(self, key: str, step: int) -> None:
        """This generation starts from an older commit than its record says: rank 0 says so in the record too."""
        generation = replace(self._generation, parent=key, parent_step=step)
        if self._rank == 0:
            what = f"amend the record of {generation.name}"  # else late commits between the two would count
            deadline = Deadline(self._deadline_seconds)
            retry(what, lambda: amend_parent(self._store, self._generation, generation), deadline)
        self._generation = generation

    def _common(self, model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any]) -> dict[str, Any]:
        settings = None if optimizer is None else optimizer_settings(model, optimizer)
        common = {"extra": extra, "optimizer": settings, "parent": self._generation.parent}
        try:
            canonical_json(common)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"extra or the optimizer's settings cannot be kept as JSON: {error}") from error
        return common

    def _send(self) -> None:
        """Hand the queued save to the uploader; the layout only where that process does not know it yet."""
        assert self._queued is not None
        queued, self._queued = self._queued, None
        layout = queued.staged.layout
        known = (self._flights.uploader.running(), layout.number)
        items = None if known == self._layout_of else [item.to_json() for item in layout.items]
        self._layout_of = known
        self._flights.submit(
            queued.flight,
            command="save",
            slab=queued.staged.slab,
            length=layout.length,
            layout=layout.number,
            items=items,
            common=queued.common,
            data_key=queued.data_key,
            retention=self._retention.__dict__,
            upload={
                "bytes_per_second": self._bytes_per_second,
                "deadline_seconds": self._deadline_seconds,
                "chunk_bytes": self._chunk_bytes,
            },
        )
