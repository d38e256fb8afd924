"""What is trained, as the engine sees it. A user's own workload implements these few methods and gets all the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from torch import Tensor, nn


@dataclass(frozen=True)
class Cursor:
    """The global sample indices that one rank is to load for one step: first … first + count − 1."""

    first: int
    count: int

    def share(self, rank: int, world_size: int) -> Cursor:
        """This rank's part. The parts follow one another, so that any world size reads the same samples per step."""
        start = rank * self.count // world_size
        end = (rank + 1) * self.count // world_size
        return Cursor(self.first + start, end - start)


@dataclass(frozen=True)
class Loss:
    """sum: scalar tensor, the loss added up, never averaged. weight: what it is to be divided by (tokens, samples)."""

    sum: Tensor
    weight: float


class Batch(Protocol):
    """One rank's data of one step. weight: what its loss will be averaged over."""

    @property
    def weight(self) -> float: ...

    def split(self, parts: int) -> list[Self]:
        """Exactly `parts` micro-batches whose losses sum to the whole's; some may be empty."""
        ...


B = TypeVar("B", bound=Batch)


class Workload(Protocol[B]):
    """Model, data and loss. The engine adds up losses and weights over micro-batches and ranks and divides once."""

    def model(self) -> nn.Module:
        """The model on the meta device. Every module that holds parameters initialises them in `reset_parameters`."""
        ...

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        """The parts that are sharded, compiled and recomputed as one, outermost blocks in forward order."""
        ...

    def next_batch(self, model: nn.Module, cursor: Cursor) -> B:
        """The samples of `cursor`, on the device of the model; or a rollout by `model`, seeded by the cursor."""
        ...

    def loss(self, model: nn.Module, batch: B) -> Loss:
        """Forward pass of one micro-batch. A batch of weight 0 must give a loss of 0 that still has gradients."""
        ...

    def flops(self, batch: B) -> float:
        """Floating point operations of forward and backward of this batch, a multiply-add counted as two."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics by name, equal on all ranks. Called on all ranks together, without gradients."""
        ...
