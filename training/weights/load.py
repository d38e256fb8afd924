"""Weights to start from: a safetensors file, or a folder in the layout of Hugging Face, read by slices.

Each rank reads of each tensor only the rows that it holds, in any parallel mode, without a collective. Names and shapes
must be those of the model: a weight that is silently left at random is worse than a refusal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from training.errors import WorkloadError
from training.weights.files import Stored, Translate, find_weights, opened, some

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def compare(found: Mapping[str, Stored], model: nn.Module, path: str) -> None:
    """Raises WorkloadError with what is missing, unexpected or of another shape: counts, and a few of each.

    A tensor that the model has under several names (tied weights) is wanted once, under any of them.
    """
    targets, names = _targets(model)
    missing = [alike[0] for alike in names if not set(alike) & set(found)]
    unexpected = [stored.name for name, stored in found.items() if name not in targets]
    shapes = [
        f"{name} is {list(stored.shape)}, the model's {list(targets[name].shape)}"
        for name, stored in found.items()
        if name in targets and stored.shape != tuple(targets[name].shape)
    ]
    kinds = [
        f"{name} is {stored.dtype}, the model's {targets[name].dtype}"
        for name, stored in found.items()
        if name in targets and targets[name].is_floating_point() != (stored.dtype in _FLOATS)
    ]
    said = {"missing": missing, "unexpected": unexpected, "of another shape": shapes, "of another kind": kinds}
    if any(said.values()):
        parts = [f"{len(names)} {what}: {some(names)}" for what, names in said.items() if names]
        raise WorkloadError(
            f"training.initial_weights {path} does not fit the model; {'; '.join(parts)}; fix: the model's "
            "configuration, or translate_weights(name) of the workload, which gives the model's names"
        )


@torch.no_grad()
def load_weights(path: str, model: nn.Module, translate: Translate | None = None) -> int:
    """Fill the model, sharded or not, and return the number of tensors. Raises WorkloadError before it changes any.

    Numbers are converted to the model's own type: half-precision files fill float32 weights.
    """
    found = find_weights(path, translate)
    compare(found, model, path)
    targets, _ = _targets(model)
    with ExitStack() as stack:
        files = {
            file: stack.enter_context(opened(file, framework="pt"))
            for file in {stored.file for stored in found.values()}
        }
        for name, stored in found.items():
            _fill(targets[name], files[stored.file], stored.name)
    return len(found)


def _targets(model: nn.Module) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Parameters and persistent buffers by each of their names, and the names of each tensor together."""
    targets = dict(model.state_dict(keep_vars=True))
    alike: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        alike.setdefault(id(tensor), []).append(name)
    return targets, list(alike.values())


def _fill(target: Tensor, file: Any, name: str) -> None:
    """The rows (and columns) that are here, straight from the file."""
    if not isinstance(target, DTensor):
        target.copy_(file.get_tensor(name))
        return
    for offsets, sizes in _boxes(target):
        if math.prod(sizes):
            box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            target.to_local().copy_(file.get_slice(name)[box])


def _boxes(tensor: DTensor) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the local piece in the whole, as DCP's planner sees them."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({"tensor": tensor}, None, True)
    for item in planner.create_local_plan().items:
        chunk = item.tensor_data.chunk
        yield tuple(chunk.offsets), tuple(chunk.sizes)
