"""Job for frameworks that write their own checkpoints, such as Lightning: each commit contains the
files of one folder.

The framework trains, and writes a folder when the job asks for one. The files are stored as byte
tensors in an ordinary commit, so they are staged, uploaded, verified and retained like any other
tensors.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ebbflow.training.attach.guards import describe_resize
from ebbflow.training.attach.job import AttachedJob, refuse
from ebbflow.training.checkpoint.manifest import TensorEntry
from ebbflow.training.checkpoint.restore import Place, RestoreResult
from ebbflow.training.checkpoint.state import SHARED_PREFIX, FurtherState
from ebbflow.training.errors import AttachError, TrainingError
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.limits import Position, Stop
from ebbflow.training.step_sync import StepSync

_PREFIX = f"{SHARED_PREFIX}file."


class FolderJob(AttachedJob):
    """A job driven by a framework, which calls `end_step` after each step and writes the folders
    that are committed.

    Attributes:
        restored: path of the restored folder or file; None if there was no commit.
    """

    def __init__(self, spec: WorkerSpec, gang: Gang, into: Path) -> None:
        self.restored: Path | None = None
        self._into = into
        self._folder = Path()
        self._pending: StepSync | None = None
        super().__init__(spec, gang, nn.Module(), None, {})

    _kept_steps = 1
    _by_library = True
    _same_data = "the library's own position"

    def describe(self, model: nn.Module, max_steps: float, *, divided: bool) -> None:
        """Set what only the framework knows: model, number of steps, and whether more ranks take
        fewer steps.
        """
        self._divided = divided
        self._model = model
        if 0 < max_steps < sys.maxsize:
            self._max_steps = int(max_steps)
        else:
            self._max_steps = 0

    def record_inexact_data(self) -> None:
        """Record that a resumed run may read samples that differ from those of an uninterrupted
        run.
        """
        self._same_data = ""

    @property
    def is_committed(self) -> bool:
        """Whether the state after the last step was saved."""
        return self._saved_step == self.step

    def log_last_step(self, loss: float) -> None:
        """Record the loss of the last step, which some frameworks provide only after the step has
        ended.
        """
        if self._steps:
            self._steps[-1] = (*self._steps[-1][:3], loss)

    def watch_signals(self) -> None:
        """Replace the framework's SIGTERM handler, so that SIGTERM makes the job save and exit."""
        self._limits.watch_signals()

    def begin_step(self) -> None:
        self._looping = True
        self._begin_step()

    def begin_evaluation(self) -> None:
        self._reporter.enter("evaluation", self.step)

    def end_step(
        self, samples: int = 1, *, learning_rate: float | None = None, updated: bool = True
    ) -> bool:
        """Count a step.

        Return whether the framework must write a folder now (equal on all ranks). Collective.

        Args:
            updated: whether the optimizer has applied all gradients; only then can the state be
                saved.
        """
        self.step += 1
        self._samples += samples
        self._record(samples, learning_rate)
        self._after_step()
        if self.step >= self._next_sync or (self._gang.alone and self._limits.drain_requested):
            sync = self._agree(not updated)
            skipped = sync.saving and self._config.checkpoint.when_busy == "skip"
            if sync.stop is not Stop.NONE or (sync.save_due and not skipped):
                if sync.settled:
                    self._pending = sync
                else:
                    self._next_sync = self.step + 1
            else:
                self._plan_next_sync(sync)
        self._reporter.enter("data", self.step + 1)
        return self._pending is not None

    def commit(self, folder: Path | str) -> None:
        """Commit a folder or file that the framework has written. Collective.

        If the job was asked to stop, exit afterwards (with code 75 after a notice or SIGTERM).
        """
        sync = self._pending
        self._pending = None
        self._reporter.enter("checkpoint", self.step)
        self._folder = Path(folder)
        self._flush_steps()  # so that no commit is newer than the recorded steps
        self._wait_for_all()
        try:
            if sync is not None:
                self._save(sync)
            else:
                self._saves.save(Position(self.step, self._samples))
            self._saver.before_step()
        except TrainingError as error:
            refuse(error)
        self._saver.further = FurtherState()  # closes the files
        if sync is not None and sync.stop is not Stop.NONE:
            self._leave(sync.stop.outcome, self._limits.describe(sync.stop))
        self._plan_next_sync(sync or self._agree())
        self._reporter.enter("data", self.step + 1)

    def complete(self) -> None:
        """End the job without a further commit."""
        self._saved_step = self.step
        self._complete()

    def _capture(self, step: int) -> dict[str, Any]:
        folder = self._folder
        if folder.is_file():
            paths = [folder]
        else:
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
        if not paths:
            raise AttachError(
                f"{folder}: rank {self._gang.rank} sees no files; fix: let all ranks write to "
                "one folder"
            )
        shared = {}
        for path in paths:
            if size := path.stat().st_size:
                name = f"{_PREFIX}{path.relative_to(folder.parent)}"
                shared[name] = torch.from_file(
                    str(path), shared=False, size=size, dtype=torch.uint8
                )
        self._saver.further = FurtherState({}, shared)
        self._saved_step = step
        empty = [str(path.relative_to(folder.parent)) for path in paths if not path.stat().st_size]
        return {"folder": {"name": folder.name, "empty": empty, "resized": self._resized}}

    def _restore(self) -> None:
        self._read_commit(lambda name, entry: None)

    def _read_commit(self, place: Place) -> RestoreResult | None:
        """Write the files of the newest commit into the target folder, on one rank of each node.

        Collective.
        """
        partial = self._into / ".ebbflow-restored"
        if self._writes:
            shutil.rmtree(partial, ignore_errors=True)

        def place_file(name: str, entry: TensorEntry) -> Tensor | None:
            if not name.startswith(_PREFIX):
                return place(name, entry)
            if not self._writes:
                return None
            path = _inside(partial, name.removeprefix(_PREFIX))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # left by a damaged commit that was tried before
            return torch.from_file(str(path), shared=True, size=entry.shape[0], dtype=torch.uint8)

        restored = super()._read_commit(place_file)
        if restored is None:
            return None
        known = restored.extra.get("folder")
        if known is None:
            raise AttachError(
                f"{restored.key} is no folder of a framework; fix: give this job another name"
            )
        self.restored = _inside(self._into, known["name"])
        self._resized = known.get("resized", "")
        if restored.world_size != self._gang.world_size:
            self._resized = describe_resize(restored.world_size, self._gang.world_size)
            self.say(f"{self._resized}; the rest of this epoch may have other samples")
        if self._resized:
            # Frameworks skip batches, which had other samples from then on
            self.record_inexact_data()
        if self._writes:
            for name in known["empty"]:
                path = _inside(partial, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            if self.restored.is_dir():
                shutil.rmtree(self.restored)
            (partial / known["name"]).replace(self.restored)
            shutil.rmtree(partial, ignore_errors=True)
        self._wait_for_all()
        return restored

    @property
    def _writes(self) -> bool:
        return self._gang.rank % self._spec.colocated_ranks == 0

    def _wait_for_all(self) -> None:
        if not self._gang.alone:
            dist.barrier(group=self._gang.group)


def _inside(folder: Path, name: str) -> Path:
    path = (folder / name).absolute()
    if ".." in Path(name).parts or not path.is_relative_to(folder.absolute()):
        raise AttachError(f"{name!r} of a commit leads out of {folder}")
    return path
