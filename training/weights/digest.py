"""The one number that says whether two runs ended with the same weights."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def weights_sha256(module: nn.Module) -> str:
    """SHA-256 of all weights, the same for equal weights in any mode and at any world size. Collective.

    For each parameter, in ascending order of its name's UTF-8 bytes, the digest takes
        name + "\\n" + dtype + "\\n" + shape + "\\n"    in UTF-8: dtype as "float32", shape as "64,128" (scalar: "")
    and then the full tensor's elements, row-major and little-endian, with nothing between or after.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters(), key=lambda item: item[0].encode()):
        value = parameter.detach()
        value = (_whole(value) if isinstance(value, DTensor) else value).cpu().contiguous()
        dtype, shape = str(value.dtype).removeprefix("torch."), ",".join(map(str, value.shape))
        digest.update(f"{name}\n{dtype}\n{shape}\n".encode())
        digest.update(_little_endian(value))
    return digest.hexdigest()


def _whole(value: DTensor) -> Tensor:
    """Gathered where the mesh can talk: shards that are offloaded lie in host memory, which NCCL does not reach."""
    return value.to(value.device_mesh.device_type).full_tensor()


def _little_endian(value: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; by way of uint8, since numpy knows no bfloat16."""
    elements = value.reshape(-1).view(torch.uint8).numpy()
    if sys.byteorder == "big":
        elements = elements.reshape(-1, value.element_size())[:, ::-1].copy().reshape(-1)
    return memoryview(elements)
