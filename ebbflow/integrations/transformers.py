"""Commits from the Trainer of Hugging Face transformers and of its extensions, such as TRL and
PEFT.

    trainer = Trainer(..., callbacks=[CommitCallback()])
    trainer.train(resume_from_checkpoint=CommitCallback.restore(trainer))

A commit holds the folder `checkpoint-<step>` that the Trainer writes. The Trainer resumes exactly
from it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ebbflow.training.attach.entry import attach_folder
from ebbflow.training.attach.folder import FolderJob
from ebbflow.training.attach.influence import find_random_draws
from ebbflow.training.attach.loop import refuse
from ebbflow.training.errors import AttachError


class CommitCallback(TrainerCallback):
    """Callback that lets a Trainer save when a commit is due, and commits each folder that it
    saves.

    The arguments are those of `ebbflow.attach`. The Trainer also saves when its own arguments say
    so.
    """

    def __init__(
        self, *, store: str | None = None, name: str | None = None, config: str | Path | None = None
    ) -> None:
        self._wanted = {"store": store, "name": name, "config": config}
        self._job: FolderJob | None = None

    @staticmethod
    def restore(trainer: Trainer) -> str | None:
        """Restore the newest commit into the Trainer's output folder, and return its path for
        `train`.

        The result is None if there is no commit.
        """
        found = [
            callback
            for callback in trainer.callback_handler.callbacks
            if isinstance(callback, CommitCallback)
        ]
        if len(found) != 1:
            refuse(
                AttachError(
                    f"the Trainer has {len(found)} CommitCallbacks; fix: "
                    "callbacks=[CommitCallback()]"
                )
            )
        job = found[0]._attach(trainer.args)
        # EarlyStoppingCallback and others keep counters, which the Trainer saves but does not read
        trainer.args.restore_callback_states_from_checkpoint = True
        for callback in trainer.callback_handler.callbacks:
            if not isinstance(callback, ExportableState):
                job.watch_object(type(callback).__name__, callback)
        draws = find_random_draws(trainer.train_dataset, trainer.data_collator)
        if draws and trainer.args.dataloader_num_workers > 0:
            job.add_inexact_reason(
                f"{draws} draws random numbers in the processes of the loader, which are others after "
                "a resume; fix: dataloader_num_workers=0"
            )
        restored = job.restored
        if restored is None:
            return None
        return str(restored)

    def _attach(self, args: TrainingArguments) -> FolderJob:
        if args.save_only_model or args.ignore_data_skip:
            if args.save_only_model:
                name = "save_only_model"
            else:
                name = "ignore_data_skip"
            refuse(
                AttachError(
                    f"TrainingArguments.{name} makes an exact resume impossible; fix: leave it out"
                )
            )
        if self._job is None:
            assert args.output_dir is not None
            self._job = attach_folder(args.output_dir, **self._wanted)
        return self._job

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: object, **kwargs: Any
    ) -> None:
        job = self._attach(args)
        job.describe(kwargs["model"], state.max_steps, divided=args.max_steps <= 0)
        if job.step != state.global_step:
            fix = "fix: trainer.train(resume_from_checkpoint=CommitCallback.restore(trainer))"
            refuse(
                AttachError(
                    f"job {job.name} is at step {job.step}, the Trainer at {state.global_step}; "
                    f"{fix}"
                )
            )

    def on_step_begin(self, args: TrainingArguments, *_: object, **__: object) -> None:
        self._attach(args).begin_step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        scheduler = kwargs.get("lr_scheduler")
        if scheduler is None:
            rate = None
        else:
            rate = float(scheduler.get_last_lr()[0])
        wanted = self._attach(args).end_step(samples, learning_rate=rate)
        control.should_save |= wanted or state.global_step >= state.max_steps

    def on_log(self, *_: object, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if self._job is not None and "loss" in logs:
            self._job.log_last_step(logs["loss"])

    def on_save(
        self, args: TrainingArguments, state: TrainerState, *_: object, **__: object
    ) -> None:
        assert args.output_dir is not None
        self._attach(args).commit(Path(args.output_dir, f"checkpoint-{state.global_step}"))

    def on_prediction_step(self, *_: object, **__: object) -> None:
        if self._job is not None:
            self._job.begin_evaluation()

    def on_evaluate(self, *_: object, **kwargs: Any) -> None:
        metrics = kwargs.get("metrics") or {}
        if self._job is not None:
            numbers = {
                name: value for name, value in metrics.items() if isinstance(value, int | float)
            }
            self._job.log(
                **{name: value for name, value in numbers.items() if math.isfinite(value)}
            )

    def on_train_end(self, args: TrainingArguments, *_: object, **__: object) -> None:
        self._attach(args).complete()
