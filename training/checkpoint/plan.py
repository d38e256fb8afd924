"""What a rank saves, worked out once and kept while model and optimizer hold the same tensors.

Naming every tensor, and finding out where each piece of a DTensor lies in the whole, costs milliseconds; asking whether
anything has changed costs microseconds. What is compared are the tensors and where they lie, not their values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ebbflow.training.checkpoint.manifest import ALIGNMENT, Item
from ebbflow.training.checkpoint.shards import Shard, shards_of_rank
from ebbflow.training.checkpoint.state import named_state

_MOMENTS_AT_MOST = 2  # of the optimizers whose settings have betas; one with momentum alone


@dataclass(frozen=True)
class Layout:
    """Where each piece goes in a slab: `length` bytes, made of `items`; `number` tells one layout from another."""

    number: int
    items: tuple[Item, ...]
    length: int


class Planner:
    """For one rank; remembers the last plan."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._owner: tuple[nn.Module, Optimizer | None] | None = None
        self._known: list[Tensor] = []
        self._memory: list[int] = []  # where they were: a parameter keeps its identity when its data is replaced
        self._shards: list[Shard] = []
        self._wholes: list[Tensor] = []  # that the shards were taken from, in their order
        self._shapes: list[tuple[Any, ...]] = []
        self.layout = Layout(0, (), 0)

    def plan(self, model: nn.Module, optimizer: Optimizer | None, own: dict[str, Tensor]) -> list[Tensor]:
        """The tensors to copy, as `self.layout` has them. own: more of this rank's, which are new at each save."""
        if not self._is_known(model, optimizer):
            state = named_state(model, optimizer)
            self._shards = shards_of_rank(state, self._rank, self._world_size)
            self._wholes = [state[shard.name] for shard in self._shards]
            # Taken after the state: naming it may bring a module's parameters back into their sharded form.
            self._known = _tensors(model, optimizer)
            self._memory = [_address(tensor) for tensor in self._known]
            self._owner = (model, optimizer)
        sources = [whole.to_local() if isinstance(whole, DTensor) else whole for whole in self._wholes]
        shards = self._shards + shards_of_rank(own, 0, 1)
        sources += [shard.local for shard in shards[len(self._shards) :]]
        shapes = [(shard.name, shard.offsets, shard.sizes, shard.local.dtype) for shard in shards]
        if shapes != self._shapes:
            self._shapes = shapes
            self.layout = _layout(self.layout.number + 1, shards)
        return sources

    def forget(self) -> None:
        """Let go of the tensors."""
        self._owner, self._known, self._wholes, self._shards = None, [], [], []

    def expected_bytes(self, model: nn.Module, optimizer: Optimizer | None) -> int:
        """How much a save will need, before the optimizer's first step too: an estimate on the high side."""
        shards = shards_of_rank(named_state(model, optimizer), self._rank, self._world_size)
        size = sum(_bytes(shard.local) + ALIGNMENT for shard in shards)
        if optimizer is not None and not optimizer.state:
            size *= 1 + _moments(optimizer)
            size += 2 * ALIGNMENT * len(shards)
        return size + 64 * 1024  # random states

    def _is_known(self, model: nn.Module, optimizer: Optimizer | None) -> bool:
        if self._owner is None or self._owner[0] is not model or self._owner[1] is not optimizer:
            return False
        now = _tensors(model, optimizer)
        if len(now) != len(self._known) or any(a is not b for a, b in zip(now, self._known, strict=True)):
            return False
        return [_address(tensor) for tensor in now] == self._memory


def _tensors(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    found = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.extend(value for value in optimizer.state.get(parameter, {}).values() if torch.is_tensor(value))
    return found


def _address(tensor: Tensor) -> int:
    # Not to_local(), which costs more than all the rest of a plan that is kept.
    return getattr(tensor, "_local_tensor", tensor).data_ptr()


def _layout(number: int, shards: list[Shard]) -> Layout:
    items: list[Item] = []
    end = 0
    for shard in shards:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        length = _bytes(shard.local)
        end = start + length
        dtype = str(shard.local.dtype).removeprefix("torch.")
        boxes = {"shape": shard.shape, "offsets": shard.offsets, "sizes": shard.sizes}
        items.append(Item(name=shard.name, dtype=dtype, start=start, length=length, **boxes))
    return Layout(number, tuple(items), end)


def _moments(optimizer: Optimizer) -> int:
    if "betas" in optimizer.defaults:
        return _MOMENTS_AT_MOST
    return 1 if optimizer.defaults.get("momentum") else 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
