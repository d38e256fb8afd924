"""Adapters to other training libraries: one module per library, which must be installed.

They import `core` and `training`, and never prices or Metaflow.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from typing import Any, TypeVar

R = TypeVar("R")
# module with the Trainer: (the adapter, the method that trains, the argument with the checkpoint to
# resume from)
_TRAINERS = {
    "transformers.trainer": ("transformers", "train", "resume_from_checkpoint"),
    "lightning.pytorch.trainer.trainer": ("lightning", "fit", "ckpt_path"),
}


# A trial has one rank on the CPU. Lightning would wait for as many ranks as its Trainer names.
_TRIAL = {"lightning": {"accelerator": "cpu", "devices": 1, "num_nodes": 1}}


def switch_on(*, trial: bool = False) -> None:
    """Change the Trainers that this process imports from now on: they make commits and resume from
    them.

    Each gets a CommitCallback, and starts from the newest commit.

    Args:
        trial: whether this process is the only rank of a trial, without accelerators.
    """
    sys.meta_path.insert(0, _AfterImport(_TRIAL if trial else {}))


class _AfterImport(MetaPathFinder):
    """Import hook that changes the Trainer of a library's module once the module is imported."""

    def __init__(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        self._left = dict(_TRAINERS)
        self._settings = settings

    def find_spec(self, name: str, *_: object) -> Any:
        known = self._left.pop(name, None)
        if known is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                trainer = module.Trainer
                (library, method, _) = known
                setattr(trainer, method, _committing(getattr(trainer, method), *known))
                settings = self._settings.get(library)
                if settings:
                    trainer.__init__ = _constructing(trainer.__init__, settings)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _constructing(
    original: Callable[..., None], settings: Mapping[str, Any]
) -> Callable[..., None]:
    @functools.wraps(original)
    def construct(trainer: Any, *given: Any, **options: Any) -> None:
        original(trainer, *given, **{**options, **settings})

    return construct


def _committing(
    original: Callable[..., R], library: str, method: str, argument: str
) -> Callable[..., R]:
    @functools.wraps(original)
    def train(trainer: Any, *given: Any, **options: Any) -> R:
        callback = _commit_callback(library)
        if library == "transformers":
            callbacks = trainer.callback_handler.callbacks
        else:
            callbacks = trainer.callbacks
        if not any(isinstance(known, callback) for known in callbacks):
            if method == "fit":
                loader = [options.get("train_dataloaders", given[1] if len(given) > 1 else None)]
            else:
                loader = []
            callbacks.append(callback())
            restored = callback.restore(trainer, *loader)
            if restored:
                if method == "train":
                    given = given[:0]
                options[argument] = restored
        return original(trainer, *given, **options)

    return train


def _commit_callback(library: str) -> Any:
    """Import and return the CommitCallback for a library, which must be installed."""
    if library == "transformers":
        from ebbflow.integrations.transformers import CommitCallback
    else:
        from ebbflow.integrations.lightning import CommitCallback
    return CommitCallback
