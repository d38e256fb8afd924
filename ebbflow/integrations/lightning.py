"""Commits from Lightning's Trainer, by a callback.

    trainer = Trainer(..., callbacks=[CommitCallback()])
    trainer.fit(model, loader, ckpt_path=CommitCallback.restore(trainer, loader))

A commit holds a checkpoint file of Lightning. On its own, Lightning restores no random states, and
when it resumes in the middle of an epoch it reads the first samples of that epoch again. This
callback makes the order of samples depend only on the seed and the epoch, skips the batches that
were already read, and restores the random states.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from ebbflow.training.attach.entry import attach_folder
from ebbflow.training.attach.folder import FolderJob
from ebbflow.training.attach.loop import refuse
from ebbflow.training.attach.state import BatchSource
from ebbflow.training.errors import AttachError


class CommitCallback(Callback):
    """Callback that saves the Trainer's state and commits it, each time a commit is due.

    The arguments are those of `ebbflow.attach`.
    """

    def __init__(
        self, *, store: str | None = None, name: str | None = None, config: str | Path | None = None
    ) -> None:
        self._wanted = {"store": store, "name": name, "config": config}
        self._job: FolderJob | None = None
        self._seed = torch.initial_seed()
        # Epochs read, batches of this epoch read, and batches to skip
        self._epoch = 0
        self._read = 0
        self._skip = 0
        self._global_step = 0
        self._last: Path | None = None

    @staticmethod
    def restore(trainer: Trainer, loader: Any = None) -> str | None:
        """Restore the newest commit, and return the checkpoint's path for `fit`, or None without a
        commit.

        If the training loader is given, a resumed run reads the same samples as an uninterrupted
        one.
        """
        found = [
            callback
            for callback in getattr(trainer, "callbacks", [])
            if isinstance(callback, CommitCallback)
        ]
        if len(found) != 1:
            refuse(
                AttachError(
                    f"the Trainer has {len(found)} CommitCallbacks; fix: "
                    "callbacks=[CommitCallback()]"
                )
            )
        job = found[0]._attach(trainer)
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if type(callback).state_dict is Callback.state_dict:
                job.watch_object(type(callback).__name__, callback)
        found[0]._keep_order(loader)
        if job.restored is None:
            return None
        return str(job.restored)

    def _keep_order(self, loader: Any) -> None:
        job = self._job
        assert job is not None
        if isinstance(loader, DataLoader) and not hasattr(loader, "state_dict"):
            iterate = type(loader).__iter__
            sources: list[BatchSource] = []

            def read(loader: DataLoader[Any]) -> Iterator[Any]:
                # Lightning may copy it for another sampler
                if not sources or sources[-1].loader is not loader:
                    sources.append(
                        BatchSource(loader, self._seed, job.record_notice, iterate=iterate)
                    )
                self._read = self._skip
                self._skip = 0
                job.restore_random_states()
                return sources[-1].epoch(self._epoch, self._read)

            loader.__class__ = type(type(loader).__name__, (type(loader),), {"__iter__": read})
        elif not hasattr(loader, "state_dict"):
            job.record_inexact_data()
            job.say(
                "samples of an epoch are read again after a resume; fix: "
                "CommitCallback.restore(trainer, loader)"
            )

    def _folder(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir, "ebbflow-checkpoints")

    def _attach(self, trainer: Trainer) -> FolderJob:
        if self._job is None:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                # Joins the process group, which `fit` would do later
                trainer.strategy.setup_environment()
            self._job = attach_folder(self._folder(trainer), **self._wanted)
        return self._job

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "epoch": self._epoch, "read": self._read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seed, self._epoch, self._skip = (
            state_dict[name] for name in ("seed", "epoch", "read")
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        job = self._attach(trainer)
        if job.resumed and trainer.global_step == 0:
            fix = "fix: trainer.fit(..., ckpt_path=CommitCallback.restore(trainer))"
            refuse(
                AttachError(
                    f"job {job.name} is at step {job.step}, and the Trainer begins anew; {fix}"
                )
            )
        self._global_step = trainer.global_step
        job.describe(pl_module, trainer.estimated_stepping_batches, divided=trainer.max_steps < 0)
        # Lightning ends at SIGTERM, some steps before the save that all ranks agree on
        job.watch_signals()

    def on_train_batch_start(self, trainer: Trainer, *_: object, **__: object) -> None:
        self._attach(trainer).begin_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: object, **__: object
    ) -> None:
        del pl_module  # an argument of Lightning's hook
        job = self._attach(trainer)
        self._read += 1
        if isinstance(outputs, dict):
            loss = outputs.get("loss")
        else:
            loss = outputs
        if loss is not None:
            job.log(loss=loss)
        updated = trainer.global_step != self._global_step
        self._global_step = trainer.global_step
        # The code of an epoch's end has not run after its last batch, and Lightning would not run
        # it after a resume.
        samples = (getattr(trainer.train_dataloader, "batch_size", None) or 1) * trainer.world_size
        if job.end_step(samples, updated=updated and not trainer.is_last_batch):
            self._save(trainer)

    def on_train_epoch_end(self, *_: object, **__: object) -> None:
        self._epoch = self._epoch + 1
        self._read = 0

    def _save(self, trainer: Trainer) -> None:
        job = self._attach(trainer)
        path = self._folder(trainer) / f"step-{job.step}.ckpt"
        trainer.save_checkpoint(path)
        former = self._last
        self._last = path
        job.commit(path)
        if former is not None and trainer.is_global_zero:
            former.unlink(missing_ok=True)

    def on_validation_batch_start(self, trainer: Trainer, *_: object, **__: object) -> None:
        self._attach(trainer).begin_evaluation()

    def on_train_end(self, trainer: Trainer, *_: object, **__: object) -> None:
        job = self._attach(trainer)
        if not job.is_committed:
            self._save(trainer)
        job.complete()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        del trainer, pl_module  # arguments of Lightning's hook
        if self._job is not None:
            self._job.fail(exception)
