"""Job for frameworks that write their own checkpoints, such as Lightning: each commit contains the
files of one folder.

The framework trains, and writes a folder when the job asks for one. The files are stored as byte
tensors in an ordinary commit, so they are staged, uploaded, verified and retained like any other
tensors.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ebbflow.training.attach.capture import Captured, Say, Stateful
from ebbflow.training.attach.guards import describe_resize
from ebbflow.training.attach.loop import AttachedLoop, refuse
from ebbflow.training.attach.state import BatchSource
from ebbflow.training.checkpoint.manifest import TensorEntry
from ebbflow.training.checkpoint.restore import Place, RestoreResult
from ebbflow.training.checkpoint.state import SHARED_PREFIX, FurtherState
from ebbflow.training.errors import AttachError, TrainingError
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.limits import Stop
from ebbflow.training.step_sync import StepSync

_PREFIX = f"{SHARED_PREFIX}file."


class FolderState:
    """State of a job whose commits contain the files of one folder, or a single file.

    Attributes:
        folder: the folder or file for the next commit.
        restored: path of the restored folder or file; None if there was no commit.
    """

    by_library = True
    commits_guards = False
    optimizer: Optimizer | None = None
    source: BatchSource | None = None

    def __init__(self, spec: WorkerSpec, gang: Gang, into: Path) -> None:
        self.model = nn.Module()
        self.same_data = "the library's own position"
        self.resized = ""
        self.folder = Path()
        self.restored: Path | None = None
        self._into = into
        self._gang = gang
        # One rank of each node writes the files
        self._writes = gang.rank % spec.colocated_ranks == 0

    @property
    def stateful_objects(self) -> Sequence[Stateful]:
        return ()

    @property
    def saved_objects(self) -> Mapping[str, object]:
        return {}

    def capture(self, _step: int, /) -> Captured:
        folder = self.folder
        if folder.is_file():
            paths = [folder]
        else:
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
        if not paths:
            raise AttachError(
                f"{folder}: rank {self._gang.rank} sees no files; fix: let all ranks write to "
                "one folder"
            )
        shared: dict[str, Tensor] = {}
        empty: list[str] = []
        for path in paths:
            name = str(path.relative_to(folder.parent))
            size = path.stat().st_size
            if size:
                shared[f"{_PREFIX}{name}"] = torch.from_file(
                    str(path), shared=False, size=size, dtype=torch.uint8
                )
            else:
                empty.append(name)
        fields = {"name": folder.name, "empty": empty, "resized": self.resized}
        return Captured({"folder": fields}, FurtherState({}, shared))

    def open_place(self) -> Place:
        """Return a function that gives the destination of each file in a commit.

        Only one rank of each node writes the files.
        """
        partial = self._partial
        if self._writes:
            shutil.rmtree(partial, ignore_errors=True)

        def place(name: str, entry: TensorEntry) -> Tensor | None:
            if not is_file(name) or not self._writes:
                return None
            path = _path_inside(partial, name.removeprefix(_PREFIX))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # left by a damaged commit that was tried before
            return torch.from_file(str(path), shared=True, size=entry.shape[0], dtype=torch.uint8)

        return place

    def restore(self, restored: RestoreResult, say: Say) -> None:
        """Move the restored files from the temporary folder to their final place. Collective."""
        fields = restored.extra.get("folder")
        if fields is None:
            raise AttachError(
                f"{restored.key} is no folder of a framework; fix: give this job another name"
            )
        self.restored = _path_inside(self._into, fields["name"])
        self.resized = fields.get("resized", "")
        if restored.world_size != self._gang.world_size:
            self.resized = describe_resize(restored.world_size, self._gang.world_size)
            say(f"{self.resized}; the rest of this epoch may have other samples")
        if self.resized:
            # Frameworks skip batches, which had other samples from then on
            self.same_data = ""
        if self._writes:
            for name in fields["empty"]:
                path = _path_inside(self._partial, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            if self.restored.is_dir():
                shutil.rmtree(self.restored)
            (self._partial / fields["name"]).replace(self.restored)
            shutil.rmtree(self._partial, ignore_errors=True)
        self.wait_for_all()

    def digest(self) -> str | None:
        return None

    def remove(self, folder: Path) -> None:
        """Remove a folder as soon as all ranks have called this. Collective."""
        self.wait_for_all()
        if self._writes:
            shutil.rmtree(folder, ignore_errors=True)
        self.wait_for_all()

    def wait_for_all(self) -> None:
        if not self._gang.alone:
            dist.barrier(group=self._gang.group)

    @property
    def _partial(self) -> Path:
        """Temporary folder for the files of a commit until it is completely restored."""
        return self._into / ".ebbflow-restored"


class FolderJob:
    """A job whose training loop belongs to a framework.

    The framework calls `end_step` after each step, and writes the folders to commit.

    Attributes:
        name: name of the job.
        step: number of completed steps.
        resumed: whether a commit was restored.
        restored: path of the restored folder or file; None if there was no commit.
    """

    def __init__(self, spec: WorkerSpec, gang: Gang, into: Path) -> None:
        self._state = FolderState(spec, gang, into)
        self._loop = AttachedLoop(spec, gang, self._state, kept_steps=1)
        # The sync after which a commit is due; None if none is due
        self._pending: StepSync | None = None

    @property
    def name(self) -> str:
        return self._loop.name

    @property
    def step(self) -> int:
        return self._loop.step

    @property
    def resumed(self) -> bool:
        return self._loop.resumed

    @property
    def restored(self) -> Path | None:
        return self._state.restored

    @property
    def is_committed(self) -> bool:
        """Whether the state after the last step was saved."""
        return self._loop.saved_step == self.step

    def describe(self, model: nn.Module, max_steps: float, *, divided: bool) -> None:
        """Record the model, the number of steps, and whether more ranks take fewer steps.

        Only the framework knows these.
        """
        self._state.model = model
        self._loop.divided = divided
        if 0 < max_steps < sys.maxsize:
            self._loop.max_steps = int(max_steps)
        else:
            self._loop.max_steps = 0

    def record_inexact_data(self) -> None:
        """Record that a resumed run may read samples that differ from those of an uninterrupted
        run.
        """
        self._state.same_data = ""

    def watch_object(self, name: str, value: object) -> None:
        """Watch an object of the script that the framework holds, such as a callback, for changes."""
        self._loop.script.add_object(name, value)

    def add_inexact_reason(self, reason: str) -> None:
        """Record why a resume is not exact."""
        self._loop.script.add_reason(reason)

    def say(self, text: str) -> None:
        """Print a line if this is rank 0."""
        self._loop.say(text)

    def record_notice(self, text: str) -> None:
        """Print a line, and record it as an event, if this is rank 0."""
        self._loop.record_notice(text)

    def log(self, **values: Any) -> None:
        """Record the `loss` and `tokens` of this step, and metrics under any other names."""
        self._loop.step_log.log(values)

    def log_last_step(self, loss: float) -> None:
        """Record the loss of the last step after the step has ended.

        Some frameworks provide the loss only then.
        """
        self._loop.step_log.set_last_loss(loss)

    def restore_random_states(self) -> None:
        """Restore the random states of the commit again; only the first call has an effect."""
        self._loop.restore_random_states()

    def watch_signals(self) -> None:
        """Replace the framework's SIGTERM handler, so that SIGTERM makes the job save and exit."""
        self._loop.session.limits.watch_signals()

    def begin_step(self) -> None:
        self._loop.begin_framework_step()

    def begin_evaluation(self) -> None:
        self._loop.session.reporter.enter("evaluation", self.step)

    def end_step(
        self, samples: int = 1, *, learning_rate: float | None = None, updated: bool = True
    ) -> bool:
        """Count a step.

        Return whether the framework must write a folder now (equal on all ranks). Collective.

        Args:
            updated: whether the optimizer has applied all gradients; only then can the state be
                saved.
        """
        loop = self._loop
        loop.count_step(samples, learning_rate)
        if loop.sync_is_due:
            self._agree(updated)
        loop.session.reporter.enter("data", self.step + 1)
        return self._pending is not None

    def commit(self, folder: Path | str) -> None:
        """Commit a folder or file that the framework has written. Collective.

        If the job was asked to stop, exit afterwards (with code 75 after a notice or SIGTERM).
        """
        loop = self._loop
        saver = loop.session.saver
        sync = self._pending
        self._pending = None
        loop.session.reporter.enter("checkpoint", self.step)
        self._state.folder = Path(folder)
        loop.step_log.flush()  # so that no commit is newer than the recorded steps
        self._state.wait_for_all()
        try:
            loop.save(sync)
            saver.before_step()
        except TrainingError as error:
            refuse(error)
        saver.further = FurtherState()  # closes the files
        if sync is None:
            sync = loop.agree()
        else:
            loop.leave_if_stopped(sync)
        loop.plan_next_sync(sync)
        loop.session.reporter.enter("data", self.step + 1)

    def complete(self) -> None:
        """End the job without a further commit."""
        self._loop.saved_step = self.step
        self._loop.complete()

    def fail(self, error: BaseException) -> None:
        """End the job with the error that ended the framework's loop."""
        self._loop.leave_block(error)

    def _agree(self, updated: bool) -> None:
        """Agree with the other ranks whether a commit is due now."""
        loop = self._loop
        sync = loop.agree(not updated)
        skips_save = sync.saving and loop.session.config.checkpoint.when_busy == "skip"
        save_is_due = sync.save_due and not skips_save
        if sync.stop is Stop.NONE and not save_is_due:
            loop.plan_next_sync(sync)
        elif sync.settled:
            self._pending = sync
        else:
            loop.postpone_sync()


def is_file(name: str) -> bool:
    """Return whether a tensor in a commit contains a file of the folder, according to the tensor's
    name.
    """
    return name.startswith(_PREFIX)


def _path_inside(folder: Path, name: str) -> Path:
    path = (folder / name).absolute()
    if ".." in Path(name).parts or not path.is_relative_to(folder.absolute()):
        raise AttachError(f"{name!r} of a commit leads out of {folder}")
    return path
