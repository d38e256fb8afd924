"""Initialise weights from the seed, load them from safetensors files, and compute the digest that
compares runs.

In every parallel mode, each rank reads only the rows of a tensor that it holds, without a
collective. Names and shapes must match those of the model. Otherwise a weight could stay random
unnoticed, which is worse than an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ebbflow.core.grouping import group_by_key
from ebbflow.training.checkpoint.boxes import own_boxes
from ebbflow.training.checkpoint.model_folder import abbreviate
from ebbflow.training.errors import WorkloadError
from ebbflow.training.weights.files import StoredTensor, Translate, find_weights, open_weights

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_aten = torch.ops.aten
_DRAWS = (_aten.normal_.default, _aten.uniform_.default)
_BLOCK_ELEMENTS = 2**18  # elements that are drawn with one seed; smaller tensors are drawn whole


def initialise(
    module: nn.Module,
    blank: nn.Module,
    *,
    seed: int,
    overwritten: bool = False,
    progress: Callable[[], object] = lambda: None,
) -> None:
    """Fill `module`, sharded or not, with initial weights.

    `blank` is an unsharded copy of it on the meta device.

    Each module that holds parameters or buffers is materialised alone on the CPU, initialised by
    its own `reset_parameters` with a generator seeded by (seed, module name), and copied into
    `module`. A weight therefore depends only on the seed and its module's name, not on parallel
    mode, world size, device or the order of modules. A tied parameter is initialised once, under
    the name that `named_parameters` lists first. Raises WorkloadError for a module without
    `reset_parameters`.

    For sharded parameters, only this rank's rows are materialised and drawn (`_DrawByBlocks`). If
    `reset_parameters` does more than draw, copy and compute element by element, all rows are.

    If `overwritten` is True, a commit or file will overwrite everything except non-persistent
    buffers, so only modules with such buffers are initialised. `progress` is called before each
    module, since a large model takes minutes.
    """
    tied = tied_names(blank)
    targets = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, part in blank.named_modules():
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        if not own or (overwritten and not part._non_persistent_buffers_set):
            continue
        if getattr(part, "reset_parameters", None) is None:
            raise WorkloadError(
                f"module {name or '(the model)'} ({type(part).__name__}) holds {own[0][0]!r} but "
                "has no reset_parameters(); fix: add one that fills its parameters and buffers, "
                "as torch.nn.Linear does"
            )
        progress()
        names = {key: f"{name}.{key}" if name else key for key, _ in own}
        part.to_empty(device="cpu", recurse=False)  # takes memory only where it is written
        whole = dict(part._parameters)
        held = {
            key: _find_own_rows(targets[names[key]]) for key in whole if names.get(key) in targets
        }
        try:
            _reset(part, f"{seed}\n{name}", held)
        except _NotByRows:
            part._parameters.update(whole)
            _reset(part, f"{seed}\n{name}", {})
        for key, value in [
            *part.named_parameters(recurse=False),
            *part.named_buffers(recurse=False),
        ]:
            if names[key] not in tied:
                _copy_own_part(targets[names[key]], value)
        part._parameters.update(whole)
        part.to_empty(device="meta", recurse=False)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Map every other name of a tied parameter to its main name.

    The main name is the one that `named_parameters` lists first.
    """
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {
        name: first[id(value)] for name, value in named if first.setdefault(id(value), name) != name
    }


def materialise(module: nn.Module, device: torch.device | str) -> None:
    """Allocate memory for a module on the meta device, as `to_empty` does, but keep tied parameters
    tied.
    """
    tied = tied_names(module)
    module.to_empty(device=device)
    for name, first in tied.items():
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, module.get_parameter(first))


def check_weights_fit(found: Mapping[str, StoredTensor], model: nn.Module, path: str) -> None:
    """Raise WorkloadError if the stored tensors do not fit the model.

    They do not fit if a tensor is missing, unexpected or of another shape, or if it has integers
    where the model has floats or vice versa. A tied weight must be stored once, under any of its
    names.
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
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": shapes,
        "of another kind": kinds,
    }
    if any(problems.values()):
        parts = [
            f"{len(names)} {what}: {abbreviate(names)}" for what, names in problems.items() if names
        ]
        raise WorkloadError(
            f"training.initial_weights {path} does not fit the model; {'; '.join(parts)}; fix: "
            "the model's configuration, or translate_weights(name) of the workload, which gives "
            "the model's names"
        )


@torch.no_grad()
def load_weights(
    path: str,
    model: nn.Module,
    translate: Translate | None = None,
    *,
    progress: Callable[[], object] = lambda: None,
) -> int:
    """Fill the model, sharded or not, from safetensors files, and return the number of tensors.

    Values are converted to the model's dtype. `progress` is called before each tensor. Raises
    WorkloadError, and changes no weight, if the files do not fit.
    """
    found = find_weights(path, translate)
    check_weights_fit(found, model, path)
    targets, _ = _targets(model)
    with ExitStack() as stack:
        files = {}
        for file in {stored.file for stored in found.values()}:
            files[file] = stack.enter_context(open_weights(file, framework="pt"))
        for name, stored in found.items():
            progress()
            _fill(targets[name], files[stored.file], stored.name)
    return len(found)


def weights_sha256(module: nn.Module, *, progress: Callable[[], object] = lambda: None) -> str:
    """Return the SHA-256 of all weights, which does not depend on parallel mode or world size.

    Collective.

    Sharded weights are gathered on all ranks and hashed by rank 0. `progress` is called before each
    parameter.

    For each parameter, in ascending order of its name's UTF-8 bytes, the digest takes

        name + "\\n" + dtype + "\\n" + shape + "\\n"    in UTF-8: dtype as "float32", shape as "64,128" (scalar: "")

    and then the full tensor's elements, row-major and little-endian, with nothing between or after.
    """
    digest = hashlib.sha256()
    mesh = None
    for name, parameter in sorted(module.named_parameters(), key=lambda item: item[0].encode()):
        progress()
        value = parameter.detach()
        # Moved first if it is offloaded, because NCCL cannot reach host memory
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            moved = value.to(mesh.device_type)
            assert isinstance(moved, DTensor)
            value = moved.full_tensor()
        if mesh is not None and dist.get_rank() != 0:
            value.reshape(-1)[
                :1
            ].tolist()  # wait for rank 0 here: NCCL times a collective from when it was queued
            continue
        value = value.cpu().contiguous()
        dtype = str(value.dtype).removeprefix("torch.")
        shape = ",".join(map(str, value.shape))
        digest.update(f"{name}\n{dtype}\n{shape}\n".encode())
        # As uint8, because NumPy has no bfloat16
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    if mesh is None:
        return digest.hexdigest()
    shared = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(mesh.device_type)
    dist.broadcast(shared, 0)
    return bytes(shared.tolist()).hex()


class _NotByRows(Exception):
    """Raised for an operation that needs more of a parameter than a rank's rows."""


class _Rows(Tensor):
    """A parameter on the CPU that has memory only for the rows of one rank.

    These rows are `own`; the first of them is row `first` of the whole parameter.
    """

    own: Tensor
    first: int

    @staticmethod
    def __new__(cls, shape: torch.Size, own: Tensor, first: int) -> _Rows:
        rows = Tensor._make_wrapper_subclass(cls, shape, dtype=own.dtype)  # type: ignore[attr-defined]
        rows.own = own
        rows.first = first
        return rows

    def __init__(self, shape: torch.Size, own: Tensor, first: int) -> None:
        pass

    def cut(self, value: Any) -> Any:
        """Return this rank's rows of `value` if it is a tensor of this shape."""
        if isinstance(value, _Rows):
            return value.own
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if value.shape != self.shape:
            raise _NotByRows
        return value[self.first : self.first + len(self.own)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _NotByRows  # outside `_DrawByBlocks`


class _DrawByBlocks(TorchDispatchMode):
    """Context in which large tensors are filled with random numbers by blocks of rows.

    Each block has its own seed.

    So a rank draws only the blocks that contain its rows, and its rows equal those of the whole
    tensor. A block's seed depends on `text`, on the number of earlier large draws and on the
    block's number.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args:
            target: Any = args[0]
        else:
            target = None
        drawn = func in _DRAWS and target.device.type == "cpu"
        if drawn and target.numel() > _BLOCK_ELEMENTS and kwargs.get("generator") is None:
            self._draw(func, target, args[1:])
            return target
        if not any(isinstance(leaf, _Rows) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if not isinstance(target, _Rows):
            raise _NotByRows
        if func is _aten.detach.default:
            return _Rows(target.shape, target.own, target.first)
        if drawn:
            whole = torch.empty(target.shape, dtype=target.dtype)
            target.own.copy_(target.cut(func(whole, *args[1:], **kwargs)))
        elif func in (_aten.zero_.default, _aten.copy_.default, _aten.fill_.Scalar) or (
            func._schema.is_mutable and torch.Tag.pointwise in func.tags
        ):
            func(*tree_map(target.cut, args), **tree_map(target.cut, kwargs))
        else:
            raise _NotByRows
        return target

    def _draw(self, func: Any, target: Tensor, numbers: Any) -> None:
        self._draws += 1
        if isinstance(target, _Rows):
            first = target.first
            own = target.own
        else:
            first = 0
            own = target
        rows = max(1, _BLOCK_ELEMENTS * len(target) // target.numel())
        for block in range(first // rows, -(-(first + len(own)) // rows) if len(own) else 0):
            begin = block * rows
            end = min((block + 1) * rows, len(target))
            values = torch.empty((end - begin, *target.shape[1:]), dtype=target.dtype)
            generator = torch.Generator().manual_seed(
                _seed(f"{self._text}\n{self._draws}\n{block}")
            )
            func(values, *numbers, generator=generator)
            low = max(begin, first)
            high = min(end, first + len(own))
            own[low - first : high - first].copy_(values[low - begin : high - begin])


def _seed(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # torch takes a signed 64-bit seed


def _reset(part: nn.Module, text: str, held: Mapping[str, tuple[int, int] | None]) -> None:
    """Call the `reset_parameters` of a module on the CPU, with random numbers that depend on
    `text`.

    `held` maps parameters to (first row, number of rows), or to None if the whole parameter gets
    memory.
    """
    with torch.random.fork_rng(devices=[]), _DrawByBlocks(text):
        for key, rows in held.items():
            if rows is not None:
                shape = part.get_parameter(key).shape
                (first, count) = rows
                own = torch.empty((count, *shape[1:]), dtype=part.get_parameter(key).dtype)
                part._parameters[key] = nn.Parameter(_Rows(shape, own, first))
        torch.manual_seed(_seed(text))
        reset: Any = part.reset_parameters
        reset()


def _find_own_rows(target: Tensor) -> tuple[int, int] | None:
    """Return the rows of which this rank holds parts, as first row and number of rows.

    Return None if the tensor is not sharded.
    """
    if not isinstance(target, DTensor) or target.dim() == 0:
        return None
    rows = [box.slices[0] for box in own_boxes(target)]
    first = min((row.start for row in rows), default=0)
    return first, max((row.stop for row in rows), default=0) - first


def _copy_own_part(target: Tensor, value: Tensor) -> None:
    """Copy the part of a tensor that this rank holds from `value`.

    `value` is the whole tensor, or a `_Rows` with the rows that this rank needs.
    """
    if isinstance(value, _Rows):
        rows = value.own
        first = value.first
    else:
        rows = value.detach()
        first = 0
    for box in own_boxes(target):
        if box.offsets:
            rows_here = rows.narrow(0, box.offsets[0] - first, box.sizes[0])
            box.local.copy_(rows_here[(slice(None), *box.slices[1:])])
        else:
            box.local.copy_(rows)


def _targets(model: nn.Module) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Return the model's parameters and persistent buffers by name, and the list of all names of
    each tensor.
    """
    targets = dict(model.state_dict(keep_vars=True))
    alike = group_by_key((id(tensor), name) for name, tensor in targets.items())
    return targets, list(alike.values())


def _fill(target: Tensor, file: Any, name: str) -> None:
    """Fill the part of a tensor that this rank holds from a file, and read no other part."""
    if not isinstance(target, DTensor):
        target.copy_(file.get_tensor(name))
    for box in own_boxes(target) if isinstance(target, DTensor) else ():
        box.local.copy_(file.get_slice(name)[box.slices])
