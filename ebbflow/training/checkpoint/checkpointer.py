"""Save checkpoints without waiting for the store, track their commits, and restore the newest valid
one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ebbflow.core.events import STAGED
from ebbflow.core.layout import data_key
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.inflight_save import (
    InflightSave,
    SaveTracker,
    UploadCost,
    UploaderClient,
)
from ebbflow.training.checkpoint.lineage import CommitRef, Generation, amend_parent
from ebbflow.training.checkpoint.manifest import CheckpointId
from ebbflow.training.checkpoint.restore import Meet, Place, RestoreResult, restore_newest
from ebbflow.training.checkpoint.retention import RetentionPolicy
from ebbflow.training.checkpoint.save_plan import SavePlanner
from ebbflow.training.checkpoint.staging import StagedState, StagingArea
from ebbflow.training.checkpoint.state import (
    FurtherState,
    capture_rng,
    optimizer_settings,
    rng_name,
)
from ebbflow.training.checkpoint.verified_io import (
    CHUNK_BYTES,
    Deadline,
    canonical_json,
    retry_until,
)
from ebbflow.training.errors import CheckpointError

_CLOSE_GRACE_SECONDS = 5.0
# Of one rank: eight that share a network volume of 125 MiB/s, the least that EBS gives, have 15. A
# save or restore of more bytes has more time than its deadline.
SLOWEST_BYTES_PER_SECOND = 10 * 2**20


class Checkpointer:
    """Object that saves and restores one rank's part of a checkpoint.

    All ranks call its methods for the same steps.

    Create it in the main thread: the uploader process ends with the thread that started it. Not
    thread-safe.

    Args:
        job_store_uri: the job's folder in the store (`<store>/jobs/<job>`).
        generation: the current start of the gang, as `open_generation` returned it.
        deadline_seconds: time for a save to become a commit, counted from the call of `save`. A
            save has more time if its bytes need it at 10 MiB/s per rank, or at half the bandwidth
            cap.
        upload_bytes_per_second: bandwidth cap for this rank's uploads; None means no cap.
        chunk_bytes: bytes per checksum. An upload part has two chunks; Amazon S3 requires parts of
            at least 5 MiB.
        request_seconds: timeout of each store request during a restore.
        emit: records an event; usually `EventLog.emit`. Rank 0 emits `commit`; all ranks emit
            `staged` and `commit_failed`.
        waiting: called when a wait for the uploader begins; returns a function that is called when
            the wait ends.
        starts_uploader: start the uploader process now, and not after the first step or at the first
            save: where many ranks start on few cores, all wait for the slowest.

    Attributes:
        further: tensors to save in addition to model, optimizer and random states.
    """

    # Public constructor, in which each setting has a default
    def __init__(  # noqa: PLR0913
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
        emit: Callable[..., object] | None = None,
        waiting: Callable[[], Callable[[], None]] | None = None,
        starts_uploader: bool = True,
    ) -> None:
        self._store = Store.open(job_store_uri, request_timeout_seconds=request_seconds)
        self._job = self._store.uri.rsplit("/", 1)[-1]
        self._generation = generation
        self._rank = rank
        self._world_size = world_size
        self._node = node
        self._deadline_seconds = deadline_seconds
        self._retention = retention or RetentionPolicy()
        self._emit = emit or (lambda *_, **__: None)
        self._bytes_per_second = upload_bytes_per_second
        self._chunk_bytes = chunk_bytes
        self._stage = StagingArea()
        self._planner = SavePlanner(rank, world_size)
        uploader = UploaderClient(
            self._store.uri, rank, self._stage.descriptors, start=starts_uploader
        )
        self._steps_begun = 0
        self._saves = SaveTracker(uploader, rank, self._emit, waiting or (lambda: lambda: None))
        self.further = FurtherState()
        # A save whose copy from the device may still be running. The uploader gets it when the copy
        # is complete.
        self._queued: tuple[InflightSave, StagedState, dict[str, Any] | None] | None = None
        self._last_step: int | None = None
        self._expected_bytes = 0  # of this rank's part of the first save
        # Pid of the uploader, layout number that it has
        self._layout_of: tuple[int | None, int] = (None, 0)

    @property
    def uploader_pid(self) -> int | None:
        return self._saves.uploader.pid

    @property
    def last_commit(self) -> CommitRef | None:
        """The newest commit that this rank knows of.

        On ranks above 0 it may be out of date until `wait` returns.
        """
        self._saves.drain()
        return self._saves.last_commit

    @property
    def busy(self) -> bool:
        """Whether a save is in flight, so that the next `save` would have to wait.

        Ranks may have different answers.
        """
        return self._queued is not None or self._saves.busy

    @property
    def expected_seconds(self) -> float | None:
        """Estimated seconds until a save that begins now would be durable; None before the first
        durable save.
        """
        self._saves.drain()
        return self._saves.expected_seconds(self._planner.layout.length)

    @property
    def limit_seconds(self) -> float:
        """Time for a save of this rank's bytes to become a commit.

        All ranks should use the longest of their times.
        """
        return self._seconds_for(max(self._planner.layout.length, self._expected_bytes))

    @property
    def last_durable(self) -> tuple[int, float] | None:
        """Step and duration of the last durable save; None before the first.

        The duration is the time, in seconds, from the call of `save` until the save was durable.
        """
        self._saves.drain()
        return self._saves.durable

    @property
    def failed_step(self) -> int | None:
        """Step of this rank's last save if that save failed, else None."""
        self._saves.drain()
        return self._saves.failed_step

    def abandon(self, step: int) -> None:
        """Stop waiting for the commit of `step`, because another rank failed to save it."""
        self._saves.abandon(step)

    @property
    def upload_cost(self) -> UploadCost:
        return self._saves.cost

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Allocate staging buffers in the background, so that the first save is as fast as later
        ones.
        """
        device = next((tensor.device for tensor in model.parameters() if tensor.is_cuda), None)
        self._expected_bytes = self._planner.expected_bytes(model, optimizer)
        self._stage.prepare(self._expected_bytes, device)

    def hurry(self) -> None:
        """Lift the bandwidth cap on uploads.

        Call this after the last step, when little time is left.
        """
        self._bytes_per_second = None
        self._saves.uploader.tell({"command": "hurry"})

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: dict[str, Any],
        *,
        deadline_seconds: float | None = None,
        least_seconds: float = 0.0,
    ) -> float:
        """Copy the state after `step` into a staging buffer, hand it to the uploader, and return
        the stall in seconds.

        The stall is the time of the copy, plus the wait for an earlier save that is still in
        flight. Saving a step again does nothing and returns 0.0. A copy from a CUDA device may
        still be running on return; `before_step` waits for it.

        Args:
            extra: further data to store with the checkpoint, as JSON without NaN. Only rank 0's
                data is stored.
            deadline_seconds: deadline of this save; default: `limit_seconds`, but at least
                `least_seconds`.

        Raises:
            GenerationSuperseded: a newer generation of the job is running.
            CheckpointError: two saves in a row have failed.
        """
        began = time.monotonic()
        if self._last_step is not None and step <= self._last_step:
            if step == self._last_step:
                return 0.0
            raise CheckpointError(
                f"step {step} after {self._last_step}: a rewind needs a new generation"
            )
        self.before_step()
        if self._rank == 0:
            common = self._common(model, optimizer, extra)
        else:
            common = None
        random_states = capture_rng(self._rank)
        for name, state in self.further.own.items():
            random_states[rng_name(self._rank, name)] = state
        sources = self._planner.plan(model, optimizer, random_states, self.further.shared)
        staged = self._stage.stage(sources, self._planner.layout, self._planner.settled)
        self._emit(STAGED, step=step, bytes=staged.layout.length)
        self._saves.settle()
        self._saves.raise_if_hopeless()
        self._last_step = step
        save = CheckpointId(
            job=self._job, generation=self._generation.name, step=step, world_size=self._world_size
        )
        flight = InflightSave(
            save=save,
            began=began,
            deadline=Deadline(
                max(self.limit_seconds, least_seconds)
                if deadline_seconds is None
                else deadline_seconds
            ),
            size=staged.layout.length,
            stall_seconds=time.monotonic() - began,
        )
        self._queued = flight, staged, common
        if staged.copied is None:
            self._send()
        return time.monotonic() - began

    def before_step(self) -> None:
        """Wait until the last save is copied from the device.

        Call it before the optimizer changes the state.
        """
        if self._steps_begun == 1:  # the first step is done, and no other rank waits for it
            self._saves.uploader.start_ahead()
        self._steps_begun += 1
        if self._queued is not None:
            copied = self._queued[1].copied
            if copied is not None:
                copied.synchronize()
            self._send()

    def wait(self) -> CommitRef | None:
        """Wait until the newest save is committed.

        Return the newest commit, or None if nothing was saved or restored.

        Raises CheckpointError (the save failed, or its deadline passed), GenerationSuperseded (a
        newer generation of the job is running).
        """
        self.before_step()
        flights = self._saves
        flights.settle()
        last = flights.last
        if last is None:
            return flights.last_commit
        known = flights.last_commit and (flights.last_commit.generation, flights.last_commit.step)
        if flights.last_failure is None and known != (self._generation.number, last.save.step):
            flights.submit(
                last, {"command": "await", "save": last.name, "seconds": last.left_seconds}
            )
            flights.settle()
        flights.raise_if_lost()
        return flights.last_commit

    def restore(
        self,
        candidates: list[str],
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        place: Place | None = None,
        progress: Callable[[], object] = lambda: None,
        meet: Meet = lambda _stage: None,
    ) -> RestoreResult | None:
        """Fill model and optimizer from the first candidate that all ranks can verify.

        Without candidates, return None.

        Damaged candidates are quarantined and reported.

        Args:
            candidates: commit keys, newest first.
            place: called for each tensor of `FurtherState.shared`; returns the destination tensor,
                or None to skip it. By default, all are skipped.
            progress: called after each 512 MiB, since a large state takes minutes.
            meet: as of `restore_newest`.

        Raises:
            CommitMismatch: the commit belongs to another model.
            CheckpointError: no candidate can be restored.
        """
        if self._generation.parent is not None and self._generation.parent not in candidates:
            raise CheckpointError(
                f"{self._generation.name} starts from {self._generation.parent}, which is not "
                "among the candidates; hint: to rewind, open the generation with that commit as "
                "its parent"
            )
        restored = restore_newest(
            self._store,
            candidates,
            model,
            optimizer,
            self._rank,
            self._world_size,
            node=self._node,
            place=place,
            progress=progress,
            meet=meet,
        )
        self._planner.forget()
        if restored is not None:
            self._saves.last_commit = CommitRef.from_key(restored.key)
            if self._generation.parent not in (None, restored.key):
                self._go_back_to(restored.key, restored.step)
        return restored

    def close(self) -> None:
        """End the uploader process and free the staging buffers.

        An in-flight save gets 5 s to finish; call `wait` first to make sure that it is committed.
        """
        if self._stage.descriptors:
            self._saves.uploader.close(_CLOSE_GRACE_SECONDS)
            self._planner.forget()
            self._stage.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _seconds_for(self, size: int) -> float:
        """Return the seconds within which a save with `size` bytes on this rank must become a
        commit.
        """
        rate = min(SLOWEST_BYTES_PER_SECOND, (self._bytes_per_second or math.inf) / 2)
        return max(self._deadline_seconds, size / rate)

    def _go_back_to(self, key: str, step: int) -> None:
        """Record the restored commit as the generation's parent, in place of one that could not be
        restored.
        """
        generation = replace(self._generation, parent=key, parent_step=step)
        if self._rank == 0:
            # Otherwise late commits between the two would count
            what = f"amend the record of {generation.name}"
            deadline = Deadline(self._deadline_seconds)
            retry_until(
                deadline, what, lambda: amend_parent(self._store, self._generation, generation)
            )
        self._generation = generation

    def _common(
        self, model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any]
    ) -> dict[str, Any]:
        if optimizer is None:
            settings = None
        else:
            settings = optimizer_settings(model, optimizer)
        common = {"extra": extra, "optimizer": settings, "parent": self._generation.parent}
        try:
            canonical_json(common)
        except (ValueError, TypeError) as error:
            hint = (
                "ebbflow.attach(model, NAME=optimizer) saves optimizers with lists of tensors, "
                "such as LBFGS"
            )
            raise CheckpointError(
                f"extra or the optimizer's settings cannot be kept as JSON: {error}; fix: {hint}"
            ) from error
        return common

    def _send(self) -> None:
        assert self._queued is not None
        (flight, staged, common) = self._queued
        self._queued = None
        layout = staged.layout
        known = (self._saves.uploader.running(), layout.number)
        if known == self._layout_of:
            items = None
        else:
            items = [item.to_json() for item in layout.items]
        self._layout_of = known
        self._saves.submit(
            flight,
            {
                "command": "save",
                "save": flight.name,
                "seconds": flight.left_seconds,
                "buffer": staged.buffer,
                "length": layout.length,
                "layout": layout.number,
                "items": items,
                "common": common,
                "data_key": data_key(flight.save.generation, flight.save.step, self._rank),
                "retention": self._retention.__dict__,
                "upload": {
                    "bytes_per_second": self._bytes_per_second,
                    "deadline_seconds": self.limit_seconds,
                    "chunk_bytes": self._chunk_bytes,
                },
            },
        )
