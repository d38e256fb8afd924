"""What the loop needs of whoever saves: the part of `ebbflow.training.checkpoint.Checkpointer` that it calls."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn


class Saver(Protocol):
    """One rank's. Every rank calls `save` and `wait` for the same steps."""

    @property
    def last_commit(self) -> Any:
        """The newest commit known here, with its `step`; None before there is one."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a save of this rank is still under way."""
        ...

    @property
    def expected_seconds(self) -> float | None:
        """Until a save that began now would be durable; None while that is not known."""
        ...

    @property
    def last_durable(self) -> tuple[int, float] | None:
        """(step, seconds that it took) of the last save that became durable here."""
        ...

    @property
    def failed_step(self) -> int | None:
        """The step of the last save of this rank, where that failed; None where it did not."""
        ...

    def abandon(self, step: int) -> None:
        """Another rank failed to save `step`: it becomes no commit."""
        ...

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Make room for what will be saved, ahead of the first save."""
        ...

    def before_step(self) -> None:
        """Returns when the optimizer may change the state."""
        ...

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: dict,
        *,
        deadline_seconds: float | None = None,
    ) -> float:
        """Begin a save; how long training was held up, in seconds."""
        ...

    def hurry(self) -> None:
        """Spare no bandwidth from now on."""
        ...

    def wait(self) -> Any:
        """Until the newest save is a commit."""
        ...


class NoSaver:
    """Saves nothing, and remembers the steps at which it was asked to: for what is not about commits."""

    last_commit = last_durable = expected_seconds = failed_step = None
    busy = False

    def __init__(self) -> None:
        self.steps: list[int] = []

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        return None

    def abandon(self, step: int) -> None:
        return None

    def restore(self, candidates: list[str], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Nothing was saved that could come back."""
        return None

    def before_step(self) -> None:
        return None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: dict,
        *,
        deadline_seconds: float | None = None,
    ) -> float:
        self.steps.append(step)
        return 0.0

    def hurry(self) -> None:
        return None

    def wait(self) -> None:
        return None
