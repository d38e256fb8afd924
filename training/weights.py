"""The weights themselves: where they start, and the one number that says whether two runs ended with the same."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from training.errors import WorkloadError


def initialise(module: nn.Module, blank: nn.Module, *, seed: int) -> None:
    """Fill `module`, sharded or not, with initial weights; `blank` is the same model, whole, on the meta device.

    Each module of `blank` that holds parameters or buffers is materialised alone on the CPU, initialised by its own
    `reset_parameters` under a generator seeded by (seed, its name), and copied. So a weight depends on nothing but
    the seed and its name: not on mode, world size, device, or the order of modules. Raises WorkloadError.
    """
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
            _copy(targets[f"{name}.{key}" if name else key], value.detach())
        part.to_empty(device="meta", recurse=False)


def weights_sha256(module: nn.Module) -> str:
    """SHA-256 of all weights, the same for equal weights in any mode and at any world size. Collective.

    For each parameter, in ascending order of its name's UTF-8 bytes, the digest takes
        name + "\\n" + dtype + "\\n" + shape + "\\n"    in UTF-8: dtype as "float32", shape as "64,128" (scalar: "")
    and then the full tensor's elements, row-major and little-endian, with nothing between or after.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters(), key=lambda item: item[0].encode()):
        value = parameter.detach()
        value = (value.full_tensor() if isinstance(value, DTensor) else value).cpu().contiguous()
        dtype, shape = str(value.dtype).removeprefix("torch."), ",".join(map(str, value.shape))
        digest.update(f"{name}\n{dtype}\n{shape}\n".encode())
        digest.update(_little_endian(value))
    return digest.hexdigest()


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


def _little_endian(value: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; by way of uint8, since numpy knows no bfloat16."""
    elements = value.reshape(-1).view(torch.uint8).numpy()
    if sys.byteorder == "big":
        elements = elements.reshape(-1, value.element_size())[:, ::-1].copy().reshape(-1)
    return memoryview(elements)
