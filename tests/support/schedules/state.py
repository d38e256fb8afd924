"""A small state that is a function of (generation, step), so that a restore can be compared with it
bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import AdamW, Optimizer

# Uneven at every world size; `single` leaves ranks empty
_SHAPES = {"wide": (7, 33), "single": (1, 5), "flat": (40,)}
# 18 MB with its moments: each of three ranks uploads more than one part of 5 MiB
_LARGE = {"vast": (1_500_007,)}


class Small(nn.Module):
    """Parameters that are sharded by rows over several ranks, a replicated one and a buffer."""

    def __init__(self, world_size: int, *, large: bool) -> None:
        super().__init__()
        mesh = None
        if world_size > 1:
            mesh = init_device_mesh("cpu", (world_size,))
        shapes = dict(_SHAPES)
        if large:
            shapes |= _LARGE
        for name, shape in shapes.items():
            tensor = torch.zeros(shape)
            if mesh is not None:
                tensor = distribute_tensor(tensor, mesh, [Shard(0)])
            self.register_parameter(name, nn.Parameter(tensor))
        self.replicated = nn.Parameter(torch.zeros(11))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))


def build(world_size: int, *, large: bool = False) -> tuple[Small, AdamW]:
    """Build an empty state. Several ranks call it together, with a process group."""
    model = Small(world_size, large=large)
    return model, AdamW(model.parameters(), lr=1e-3)


def fill(model: nn.Module, optimizer: Optimizer, generation: str, step: int) -> None:
    """Fill in the state after `step` of `generation`, with the moments of the optimizer."""
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter).detach()
            state["exp_avg_sq"] = torch.zeros_like(parameter).detach()
    for name, whole, local in _tensors(model, optimizer):
        local.copy_(_expected_part(name, whole, generation, step))


def list_differences(
    model: nn.Module, optimizer: Optimizer, generation: str, step: int
) -> list[str]:
    """Name this rank's tensors that differ from the state after `step` of `generation`."""
    wrong = []
    for name, parameter in model.named_parameters():
        if set(optimizer.state[parameter]) != {"step", "exp_avg", "exp_avg_sq"}:
            wrong.append(f"{name} has the optimizer state {sorted(optimizer.state[parameter])}")
    for name, whole, local in _tensors(model, optimizer):
        if not torch.equal(local, _expected_part(name, whole, generation, step)):
            wrong.append(name)
    return wrong


def _tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, tensor and this rank's part of the tensor."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        yield name, tensor, _local_part(tensor)
        for key, value in sorted(optimizer.state.get(tensor, {}).items()):
            yield f"{name}.{key}", value, _local_part(value)


def _local_part(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.detach().to_local()
    return tensor.detach()


def _expected_part(name: str, tensor: Tensor, generation: str, step: int) -> Tensor:
    """Compute this rank's part of the tensor `name`."""
    digest = hashlib.sha256(f"{name} {generation} {step}".encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    if tensor.dtype == torch.int64:
        return torch.tensor(number)
    whole = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(number))
    if not isinstance(tensor, DTensor):
        return whole
    pieces = whole.chunk(dist.get_world_size())
    if dist.get_rank() < len(pieces):
        return pieces[dist.get_rank()]
    return whole[:0]
