"""Commits from a DeepSpeed engine, for scripts that call `ebbflow.attach(engine)`.

DeepSpeed writes its own checkpoint for every commit, and the commit holds its files beside the
state of the loop. Such a checkpoint fits only the number of ranks that wrote it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ebbflow.training.attach.capture import Captured, Say, ScriptState, Stateful
from ebbflow.training.attach.folder import FolderState, is_file
from ebbflow.training.checkpoint.manifest import TensorEntry
from ebbflow.training.checkpoint.restore import Place, RestoreResult
from ebbflow.training.checkpoint.state import FurtherState
from ebbflow.training.errors import AttachError
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.start_check import FITS_RANKS
from ebbflow.training.weights.load import weights_sha256

_FOLDER = Path("ebbflow-checkpoints")  # in the working folder, which all ranks must see
_TAG = "engine"


class DeepSpeedState(ScriptState):
    """State of a script that trains a DeepSpeed engine in its own loop."""

    def __init__(
        self,
        spec: WorkerSpec,
        gang: Gang,
        engine: Any,
        states: Mapping[str, Stateful],
    ) -> None:
        if type(engine).__name__ != "DeepSpeedEngine":
            raise AttachError(
                "attach: the model has a DeepSpeedEngine within; fix: pass the engine itself first"
            )
        optimizer = getattr(engine, "basic_optimizer", None)
        if not isinstance(optimizer, Optimizer):
            raise AttachError(
                "attach: the engine has no torch optimizer; fix: deepspeed.initialize(optimizer=…)"
            )
        super().__init__(gang, engine, optimizer, states, by_library=True)
        self._engine = engine
        self._into = _FOLDER / spec.job
        self._files = FolderState(spec, gang, self._into)

    def capture(self, step: int, /) -> Captured:
        files = self._files
        files.remove(self._into)  # also what a killed attempt left
        files.folder = self._into / f"step-{step}"
        self._engine.save_checkpoint(str(files.folder), tag=_TAG)
        files.wait_for_all()
        engine = files.capture(step)
        self._check_files(engine.tensors.shared)
        files.remove(self._into)  # mapped files remain readable
        loop = super().capture(step)
        tensors = FurtherState(loop.tensors.own, loop.tensors.shared | engine.tensors.shared)
        # Its files fit no other number of ranks
        return Captured(engine.fields | loop.fields | {FITS_RANKS: self._gang.world_size}, tensors)

    def open_place(self) -> Place:
        place_file = self._files.open_place()
        place_state = super().open_place()

        def place(name: str, entry: TensorEntry) -> Tensor | None:
            if is_file(name):
                return place_file(name, entry)
            return place_state(name, entry)

        return place

    def restore(self, restored: RestoreResult, say: Say) -> None:
        self._files.restore(restored, say)
        if restored.world_size != self._gang.world_size:
            raise AttachError(
                f"{restored.key} has DeepSpeed's files of {restored.world_size} ranks, which fit "
                f"no other number; fix: start {restored.world_size} ranks, or give this job "
                "another name"
            )
        folder = self._files.restored
        assert folder is not None
        if self._engine.load_checkpoint(str(folder), tag=_TAG)[0] is None:
            raise AttachError(
                f"{restored.key}: DeepSpeed has not loaded {folder}; fix: see its own messages "
                "above"
            )
        self._files.remove(folder)
        super().restore(restored, say)

    def digest(self) -> str | None:
        if self._engine.zero_optimization_stage() == 3:
            return None  # each rank has only pieces of the weights
        return weights_sha256(self._engine.module)

    def _check_files(self, files: Mapping[str, Tensor]) -> None:
        """Raise AttachError if the ranks see different files."""
        lines = [f"{name} {content.numel()}" for name, content in sorted(files.items())]
        checksum = float(zlib.crc32("\n".join(lines).encode()))
        if len(set(self._gang.gather_numbers([checksum]))) > 1:
            raise AttachError(
                f"{self._files.folder}: the ranks see different files; fix: start in a folder that "
                "all nodes share"
            )


def make_state(
    spec: WorkerSpec,
    gang: Gang,
    model: nn.Module,
    _optimizer: object,
    states: Mapping[str, Stateful],
) -> DeepSpeedState:
    """Return the state to save for a script with a DeepSpeed engine, including the engine's
    optimizer.

    Raises AttachError for an engine that cannot be saved.
    """
    return DeepSpeedState(spec, gang, model, states)
