"""Make commits from a DeepSpeed engine. `ebbflow.attach(engine)` uses this module by itself.

DeepSpeed writes its own checkpoint for every commit, and the commit holds its files beside the
state of the loop. Such a checkpoint fits only the number of ranks that wrote it.
"""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ebbflow.training.attach.folder import FolderJob
from ebbflow.training.attach.job import AttachedJob, Stateful
from ebbflow.training.checkpoint.restore import Place, RestoreResult
from ebbflow.training.checkpoint.state import FurtherState
from ebbflow.training.errors import AttachError
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.weights.load import weights_sha256

_FOLDER = Path("ebbflow-checkpoints")  # in the working folder, which all ranks must see
_TAG = "engine"


class Job(FolderJob):
    """The job of a script that trains with a DeepSpeed engine in a loop of its own."""

    _kept_steps = AttachedJob._kept_steps
    _same_data = AttachedJob._same_data

    def __init__(
        self,
        spec: WorkerSpec,
        gang: Gang,
        model: nn.Module,
        optimizer: Any,
        states: dict[str, Stateful],
    ) -> None:
        if type(model).__name__ != "DeepSpeedEngine":
            raise AttachError(
                "attach: the model has a DeepSpeedEngine within; fix: pass the engine itself first"
            )
        self._engine: Any = model
        inner = getattr(self._engine, "basic_optimizer", None)
        if not isinstance(inner, Optimizer):
            raise AttachError(
                "attach: the engine has no torch optimizer; fix: deepspeed.initialize(optimizer=…)"
            )
        self.restored = None
        self._into = _FOLDER / spec.job
        self._pending = None
        AttachedJob.__init__(self, spec, gang, model, inner, states)

    def _capture(self, step: int) -> dict[str, Any]:
        # The files of the last save, which are removed but still mapped
        self._saver.further = FurtherState()
        self._remove(self._into)  # also what a killed attempt left
        self._folder = self._into / f"step-{step}"
        self._engine.save_checkpoint(str(self._folder), tag=_TAG)
        self._wait_for_all()
        extra = super()._capture(step)
        files = self._saver.further.shared
        seen = zlib.crc32(
            "\n".join(f"{name} {one.numel()}" for name, one in sorted(files.items())).encode()
        )
        if len({row for (row,) in self._gang.gather_numbers([float(seen)])}) > 1:
            raise AttachError(
                f"{self._folder}: the ranks see different files; fix: start in a folder that all "
                "nodes share"
            )
        self._remove(self._into)  # mapped files remain readable
        extra |= AttachedJob._capture(self, step)
        loop = self._saver.further
        self._saver.further = FurtherState(loop.own, loop.shared | files)
        return extra

    def _restore(self) -> None:
        AttachedJob._restore(self)

    def _read_commit(self, place: Place) -> RestoreResult | None:
        restored = super()._read_commit(place)
        if restored is None:
            return None
        if restored.world_size != self._gang.world_size:
            raise AttachError(
                f"{restored.key} has DeepSpeed's files of {restored.world_size} ranks, which fit "
                f"no other number; fix: start {restored.world_size} ranks, or give this job "
                "another name"
            )
        folder = self.restored
        assert folder is not None
        if self._engine.load_checkpoint(str(folder), tag=_TAG)[0] is None:
            raise AttachError(
                f"{restored.key}: DeepSpeed has not loaded {folder}; fix: see its own messages "
                "above"
            )
        self._remove(folder)
        return restored

    def _remove(self, folder: Path) -> None:
        """Remove a folder when all ranks have come here. Collective."""
        self._wait_for_all()
        if self._writes:
            shutil.rmtree(folder, ignore_errors=True)
        self._wait_for_all()

    def _digest(self) -> str | None:
        if self._engine.zero_optimization_stage() == 3:
            return None  # each rank has only pieces of the weights
        return weights_sha256(self._engine.module)
