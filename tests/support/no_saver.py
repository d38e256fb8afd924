"""A saver for training loops whose saves do not matter."""

from __future__ import annotations

from typing import Any

from ebbflow.training.checkpoint import Checkpointer


class NoSaver(Checkpointer):
    """A saver that saves nothing but records the steps at which `save` was called."""

    last_commit = last_durable = expected_seconds = failed_step = None
    busy = False
    limit_seconds = 0.0

    def __init__(self) -> None:
        self.steps: list[int] = []

    def prepare(self, *_: Any) -> None:
        return None

    def abandon(self, *_: Any) -> None:
        return None

    def restore(self, *_: Any, **__: Any) -> None:
        return None

    def before_step(self) -> None:
        return None

    def save(self, step: int, *_: Any, **__: Any) -> float:
        self.steps.append(step)
        return 0.0

    def hurry(self) -> None:
        return None

    def wait(self) -> None:
        return None
