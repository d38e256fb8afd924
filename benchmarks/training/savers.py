"""Ways to save and restore one model and optimizer: Ebbflow's commits, and torch's distributed
checkpoint (DCP).
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from benchmarks.training.laps import await_all
from ebbflow.training.checkpoint import Checkpointer, CommitRef, Generation, RetentionPolicy


class Saver(Protocol):
    """One contestant; every rank calls the same methods in the same order. Collective."""

    def save(self, step: int) -> None:
        """Return when training may continue and change the state."""
        ...

    def finish(self) -> None:
        """Return when the save can be restored after a crash of this machine."""
        ...

    def tidy(self) -> None:
        """Delete what is no longer needed, outside all measured time."""
        ...

    def restore(self) -> None:
        """Fill model and optimizer from the last save."""
        ...

    def close(self) -> None: ...


class CommitSaver:
    """Ebbflow's commits. Keeps one; the uploader deletes the one before."""

    def __init__(
        self, uri: str, generation: Generation, model: nn.Module, optimizer: Optimizer, rank: int
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._commit: CommitRef | None = None
        self._checkpointer = Checkpointer(
            uri,
            generation=generation,
            rank=rank,
            world_size=dist.get_world_size(),
            deadline_seconds=300,
            retention=RetentionPolicy(keep_last=1),
        )
        # As a trainer does at its start, long before the first save
        self._checkpointer.prepare(model, optimizer)

    def save(self, step: int) -> None:
        self._checkpointer.save(step, self._model, self._optimizer, {"cursor": step})

    def finish(self) -> None:
        self._commit = self._checkpointer.wait()

    def tidy(self) -> None:
        return None

    def restore(self) -> None:
        assert self._commit is not None
        self._checkpointer.restore([self._commit.key], self._model, self._optimizer)

    def close(self) -> None:
        self._checkpointer.close()


class DcpSaver:
    """`dcp.save`: returns when the files are written and synced (FileSystemWriter's default)."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._folder = folder
        self._model = model
        self._optimizer = optimizer
        # DCP's own, as async_save works beside training's collectives
        self._group = dist.new_group(backend="gloo")
        self._step: int | None = None
        self._obsolete: int | None = None

    def save(self, step: int) -> None:
        self._obsolete = self._step
        self._step = step
        self._save(self._state(), str(self._path(step)))

    def finish(self) -> None:
        return None

    def tidy(self) -> None:
        await_all()
        if self._obsolete is not None and dist.get_rank() == 0:
            shutil.rmtree(self._path(self._obsolete))

    def restore(self) -> None:
        assert self._step is not None
        state = self._state()
        dcp.load(state, checkpoint_id=str(self._path(self._step)), process_group=self._group)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def close(self) -> None:
        return None

    def _save(self, state: dict[str, Any], path: str) -> None:
        dcp.save(state, checkpoint_id=path, process_group=self._group)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step}"


class DcpAsyncSaver(DcpSaver):
    """`dcp.async_save` with one stager for all saves, so that its buffers are allocated once."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        # Without an accelerator torch refuses pinned memory and non-blocking copies
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._upload: Future[Any] | None = None

    def finish(self) -> None:
        assert self._upload is not None
        self._upload.result()

    def close(self) -> None:
        self._stager.close()

    def _save(self, state: dict[str, Any], path: str) -> None:
        response = dcp.async_save(
            state, checkpoint_id=path, process_group=self._group, async_stager=self._stager
        )
        if isinstance(response, Future):
            self._upload = response
        else:
            response.staging_completion.result()
            self._upload = response.upload_completion
