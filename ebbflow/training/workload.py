"""The interface of a workload: the model, its data and its loss, as the training loop uses them.

To train your own, write a class with the methods of `Workload`, and set `workload` in the
configuration to "package.module:Name". `Name` may also be a function. It is called with one
`WorkloadContext` and returns a workload. docs/workloads.md is the guide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.store import Store
from ebbflow.training.errors import WorkloadError

_LARGEST_PICTURES_BYTES = 2**18  # of one evaluation: events are read whole


def _only_own(row: Tensor) -> Tensor:
    return row[None]


@dataclass(frozen=True, kw_only=True)
class WorkloadContext:
    """The argument that is passed when a workload is created.

    All attributes but `rank` and `device` are equal on all ranks.
    """

    config: RunConfig  # the configuration
    # storage for data: `prepare` writes to it and ranks read from it. Each workload name has its
    # own folder.
    store: Store
    project_root: Path  # the project's folder, to which relative paths refer
    # the dict that `prepare` returned, after conversion to JSON and back. If there is no `prepare`,
    # it has only "fingerprint" and "weight_unit" (the unit of a batch's weight, such as "tokens").
    prepared: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0  # the number of this rank
    world_size: int = 1  # the number of ranks
    # The device of this rank's model
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # returns the rows `[k]` of all ranks as `[world_size, k]`, equal on all ranks. Collective;
    # `evaluate` may use it.
    gather: Callable[[Tensor], Tensor] = _only_own
    # call it from time to time while `__init__` downloads: a rank without a sign of life is taken
    # for a hung one
    alive: Callable[[], object] = lambda: None

    @property
    def options(self) -> Mapping[str, bool | int | float | str]:
        return self.config.workload_options


@dataclass(frozen=True)
class Cursor:
    """The samples that a rank loads for one step: global indices from `first` to
    `first + count - 1`.
    """

    first: int
    count: int

    def share(self, rank: int, world_size: int) -> Cursor:
        """Return the part of the samples that one rank loads.

        The ranks' parts are consecutive, so all ranks together load the same samples per step at
        any world size.
        """
        start = rank * self.count // world_size
        end = (rank + 1) * self.count // world_size
        return Cursor(self.first + start, end - start)


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch, as a sum."""

    sum: Tensor  # scalar tensor: the losses of all elements added up, not averaged
    # the number of elements, such as tokens or samples. The sum is divided by the total weight of
    # all ranks.
    weight: float


class Batch(Protocol):
    """The data of one rank for one step.

    Attributes:
        weight: the number of elements, such as tokens or samples, over which the loss is averaged.
    """

    @property
    def weight(self) -> float: ...

    def split(self, parts: int) -> list[Self]:
        """Return exactly `parts` micro-batches, whose losses add up to the loss of this batch.

        Some may be empty.
        """
        ...


B = TypeVar("B", bound=Batch)


class Workload(Protocol[B]):
    """A model, its data and its loss.

    The training loop adds up losses and weights over all micro-batches and ranks, then divides
    once.

    A workload may also have these members, which are used if they exist:

    `prepare(context) -> dict`, a classmethod or staticmethod (or an attribute, if the workload is
    made by a function): called once before the gang starts, to put data into `context.store`. The
    dict must fit into JSON and becomes `context.prepared`. Its "fingerprint" (by default, a hash of
    the dict) must be the same when a job resumes.

    `check(context) -> str`, a classmethod or staticmethod: called by preflight, before `prepare`,
    without its data. It returns what it found, and raises WorkloadError for options that cannot be
    trained.

    `other_bytes() -> int` and `offloads_optimizer`, an attribute: the bytes that a rank keeps
    besides the model, and whether the optimizer's state is in main memory. The plan's memory
    estimate uses both.

    `weight_unit`, an attribute of the same class or function: the unit of a batch's weight for
    reports; by default "samples".

    `optimizer(model) -> Optimizer`: used instead of AdamW. The learning rate schedule sets the rate
    of every parameter group, multiplied by the group's "lr_scale" if it has one.

    `pictures() -> dict[str, str]`: called on rank 0 after `evaluate`; SVG images by name, for the
    report.

    `batch_phase = "forward"`: `next_batch` computes, as in reinforcement learning, so its time is
    not a wait for data.

    `translate_weights(name) -> str | None`: the model's name for a tensor of
    `training.initial_weights`; None to ignore that tensor.
    """

    def model(self) -> nn.Module:
        """Return the model on the meta device.

        Every module with parameters must initialise them in its method `reset_parameters`.
        """
        ...

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the parts of the model that are each sharded, compiled and recomputed as one.

        Units must not overlap. They are returned in the order of the forward pass.
        """
        ...

    def next_batch(self, model: nn.Module, cursor: Cursor) -> B:
        """Return the samples of `cursor`, on the device of the model.

        For reinforcement learning, return a rollout by `model` instead, with the cursor as its
        seed.
        """
        ...

    def loss(self, model: nn.Module, batch: B) -> Loss:
        """Run the forward pass of one micro-batch, and return its loss.

        If the micro-batch has weight 0, `Loss.sum` must be 0 but still depend on the parameters, so
        that they get gradients.
        """
        ...

    def flops(self, batch: B) -> float:
        """Return the floating point operations of forward and backward of this batch.

        A multiply-add counts as two.
        """
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return metrics by name, equal on all ranks.

        All ranks call this together, without gradients.
        """
        ...


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of `evaluate` as floats.

    A value may be a number or a tensor of one element.

    Raises:
        WorkloadError: if a value is not a number.
    """
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise WorkloadError(
            f"evaluate() must return one number for each name: {' '.join(str(error).split())}; "
            'fix: such as {"held_out_accuracy": 0.97}'
        ) from error


def draw_pictures(workload: Any) -> dict[str, str]:
    """Return the workload's SVG images of the last evaluation.

    If they cannot be shown, print why and return {}.
    """
    draw = getattr(workload, "pictures", None)
    if draw is None:
        return {}
    try:
        found = {str(name): str(picture) for name, picture in draw().items()}
    except Exception as error:  # a picture is not worth a job
        problem = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
    else:
        size = sum(len(picture.encode()) for picture in found.values())
        if size <= _LARGEST_PICTURES_BYTES and all(
            picture.startswith("<svg") for picture in found.values()
        ):
            return found
        problem = (
            f"returned {size} bytes; fix: SVG of at most {_LARGEST_PICTURES_BYTES} bytes in all"
        )
    print(
        f"pictures are left out of the report: {type(workload).__name__}.pictures() {problem}",
        flush=True,
    )
    return {}


def check_best_metric(config: RunConfig, metrics: Mapping[str, float]) -> None:
    """Raise WorkloadError if `checkpoint.keep_best` names a metric that the evaluation does not
    return.
    """
    best = config.checkpoint.keep_best
    if best.count and best.metric is not None and best.metric not in metrics:
        raise WorkloadError(
            f"checkpoint.keep_best.metric: the evaluation returns no {best.metric}, so no commit "
            f"would be kept for it; fix: one of {', '.join(metrics)}"
        )
