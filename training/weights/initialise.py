"""The weights that a model starts from when nobody brings any: by the seed, the same in every mode."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from training.errors import WorkloadError


def initialise(module: nn.Module, blank: nn.Module, *, seed: int) -> None:
    """Fill `module`, sharded or not, with initial weights; `blank` is the same model, whole, on the meta device.

    Each module of `blank` that holds parameters or buffers is materialised alone on the CPU, initialised by its own
    `reset_parameters` under a generator seeded by (seed, its name), and copied. So a weight depends on nothing but
    the seed and its name: not on mode, world size, device, or the order of modules. A tied parameter starts as the
    first of its names does. Raises WorkloadError.
    """
    tied = tied_names(blank)
    targets = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, part in blank.named_modules():
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        if not own:
            continue
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            raise WorkloadError(
                f"module {name or '(the model)'} ({type(part).__name__}) holds {own[0][0]!r} but has no "
                "reset_parameters(); fix: add one that fills its parameters and buffers, as torch.nn.Linear does"
            )
        part.to_empty(device="cpu", recurse=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(seed, name))
            reset()
        for key, value in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            full = f"{name}.{key}" if name else key
            if full not in tied:
                _copy(targets[full], value.detach())
        part.to_empty(device="meta", recurse=False)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Each further name of a parameter that has several, with the first of them."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[id(value)] for name, value in named if first.setdefault(id(value), name) != name}


def materialise(module: nn.Module, device: torch.device | str) -> None:
    """Memory in place of the meta device, as `to_empty` gives it, which by itself would part tied parameters."""
    tied = tied_names(module)
    module.to_empty(device=device)
    for name, first in tied.items():
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, module.get_parameter(first))


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}\n{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # torch takes a signed 64-bit seed


def _copy(target: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        if isinstance(target, DTensor):
            # Every rank has the whole value, so that each cuts its own part out of it and none sends any.
            mesh, placements = target.device_mesh, target.placements
            own = distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)
            target.to_local().copy_(own.to_local())
        else:
            target.copy_(value)
