"""A workload's model as plain numbers, measured on one sample: what the plan asks of a model it has no formula for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from infra.model_shape import ModelShape
from training.workload import Batch, Loss, Workload

_FLOAT32_BYTES = 4


@dataclass
class SavedBytes:
    """What autograd keeps for backward, each storage once, without the model's own tensors."""

    model: frozenset[int]
    seen: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.seen.values())

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.model:  # the address of the storage itself: data of fake tensors has none
            self.seen[storage._cdata] = storage.nbytes()
        return tensor


def measure_shape(workload: Workload, model: nn.Module, batch: Batch, *, unit: str) -> tuple[ModelShape, Loss]:
    """The shape of `model`, which is materialised or fake, by one forward pass over `batch` of one sample.

    Activations are measured as autograd keeps them, logits among them: in the precision of the model's own code, in
    eager mode and without recomputation. flops are the workload's own count. Returns the loss too, with its graph.
    """
    saved = SavedBytes(frozenset(tensor.untyped_storage()._cdata for tensor in _tensors(model)))
    with saved_tensors_hooks(saved.note, lambda tensor: tensor):
        loss = workload.loss(model, batch)
    units = list(workload.units(model))
    shape = ModelShape(
        parameters=_numel(model),
        largest_unit_parameters=max([_numel(part) for part in units] + [_outside(model, units)]),
        activation_bytes_per_sample=saved.total,
        logits_bytes_per_sample=0,
        flops_per_sample=float(workload.flops(batch)),
        tokens_per_sample=float(batch.weight),
        units=len(units),
        weight_unit=unit,
        kind="measured",
    )
    return shape, loss


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Tensors made inside have shapes and no data, so that a model larger than this machine can be looked at."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def weight_bytes(model: nn.Module) -> int:
    return _FLOAT32_BYTES * _numel(model)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _numel(part: nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


def _outside(model: nn.Module, units: list[nn.Module]) -> int:
    """Parameters of no unit: FSDP2 gathers them as one with the model itself."""
    inside = {id(parameter) for unit in units for parameter in unit.parameters()}
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)
