"""What is trained, as the engine sees it. A user's own workload implements these few methods and gets all the rest.

`workload: package.module:Name` in the configuration names what is called with one `WorkloadContext` and gives a
`Workload`: a class, or any function. docs/workloads.md is the guide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.store import Store
from ebbflow.training.errors import WorkloadError


def _only_own(row: Tensor) -> Tensor:
    return row[None]


@dataclass(frozen=True, kw_only=True)
class WorkloadContext:
    """What a workload is made with. The same on all ranks but for `rank` and `device`.

    store: where `prepare` puts data and ranks read it; each workload's name has a part of the store of its own.
    prepared: what `prepare` returned, as JSON gives it back; without one only fingerprint and weight_unit.
    gather: every rank's row [k] as [world_size, k], equal on all ranks; collective, for `evaluate`.
    """

    config: RunConfig
    store: Store
    project_root: Path
    prepared: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    gather: Callable[[Tensor], Tensor] = _only_own

    @property
    def options(self) -> Mapping[str, bool | int | float | str]:
        """`workload_options` of the configuration."""
        return self.config.workload_options


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
    """Model, data and loss. The engine adds up losses and weights over micro-batches and ranks and divides once.

    What may be left out, and is then asked for by name:
    `prepare(context) -> dict` of the class (classmethod or staticmethod), or an attribute of the function: called once
    before the gang starts, to put data into `context.store`. What it returns is JSON and becomes `context.prepared`.
    Its "fingerprint" (or, without one, the hash of all of it) must be the same when a job goes on.
    `weight_unit`, an attribute of the same place: what a batch's weight counts, for reports; "samples" when not said.
    `optimizer(model) -> Optimizer`: instead of AdamW. The schedule sets the learning rate of every group, times the
    group's own "lr_scale" where it has one.
    `translate_weights(name) -> str | None`: the model's name of a tensor of `training.initial_weights`; None leaves
    that tensor out.
    """

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


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What `evaluate` returned, as plain numbers; a tensor of one element is one. Raises WorkloadError."""
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise WorkloadError(
            f"evaluate() must return one number for each name: {' '.join(str(error).split())}; "
            'fix: such as {"held_out_accuracy": 0.97}'
        ) from error
