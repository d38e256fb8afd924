"""Decide which rank writes which bytes, and lay them out in a staging buffer.

Every rank computes the same assignment without communication. A piece of a DTensor is written by
the rank that holds it; if several ranks hold replicas of the piece (HSDP), one of these ranks
writes it. A plain tensor, which all ranks hold, is written by one rank. The largest tensors are
assigned first, each to the rank with the fewest bytes so far. The global plan of torch's
distributed checkpointing (DCP), which gathers the plans of all ranks, is not used: without a
collective, a save cannot deadlock with training.

The plan is reused as long as model and optimizer hold the same tensors in the same memory: planning
takes milliseconds, comparing the tensors microseconds.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ebbflow.training.checkpoint.boxes import own_boxes
from ebbflow.training.checkpoint.manifest import ALIGNMENT, IndexEntry
from ebbflow.training.checkpoint.state import named_state

_MOMENTS_AT_MOST = 2  # for optimizers with betas; one for those with momentum only


@dataclass(frozen=True)
class TensorShard:
    """A rank's piece of a tensor, and its position in the whole tensor."""

    name: str
    local: Tensor  # the piece, of shape `sizes`
    shape: tuple[int, ...]  # shape of the whole tensor
    # Position of the piece's first element in the whole tensor, by dimension
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]  # shape of the piece

    @classmethod
    def of_whole(cls, name: str, tensor: Tensor) -> TensorShard:
        shape = tuple(tensor.shape)
        return cls(name, tensor, shape, (0,) * len(shape), shape)


@dataclass(frozen=True)
class BufferLayout:
    """The positions of all pieces in a staging buffer."""

    number: int  # increases each time the layout changes, so it identifies a layout
    items: tuple[IndexEntry, ...]
    length: int  # bytes that the pieces need in all


class SavePlanner:
    """Planner of one rank's saves.

    It reuses the last plan while model and optimizer are unchanged.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._owner: tuple[nn.Module, Optimizer | None] | None = None
        self._known: list[Tensor] = []
        self._memory: list[
            int
        ] = []  # addresses: a parameter keeps its identity when its data is replaced
        self._shards: list[TensorShard] = []
        self._shapes: list[tuple[Any, ...]] = []
        # Whether only the optimizer changes a source, by its position. Those of further tensors are
        # left out.
        self.settled: list[bool] = []
        self.layout = BufferLayout(0, (), 0)

    def plan(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        own: dict[str, Tensor],
        shared: dict[str, Tensor],
    ) -> list[Tensor]:
        """Return the tensors to copy, in the order of `self.layout`, which this call updates.

        A save also contains tensors that do not belong to model or optimizer and may differ at each
        call: `own`, which only this rank holds, such as random states, and `shared`, which all
        ranks hold.
        """
        if not self._is_known(model, optimizer):
            state = named_state(model, optimizer)
            self._shards = assign_shards(state, self._rank, self._world_size)
            # Read after `named_state`, which may bring a module's parameters back into their
            # sharded form.
            self._known = _tensors(model, optimizer)
            self._memory = [_address(tensor) for tensor in self._known]
            buffers = {_address(buffer) for buffer in model.buffers()}
            stepped = set(self._memory) - buffers
            self.settled = [_address(state[shard.name]) in stepped for shard in self._shards]
            self._owner = (model, optimizer)
        if shared:
            further = assign_shards(shared, self._rank, self._world_size)
        else:
            further = []
        shards = self._shards + assign_shards(own, 0, 1) + further
        shapes = [(shard.name, shard.offsets, shard.sizes, shard.local.dtype) for shard in shards]
        if shapes != self._shapes:
            self._shapes = shapes
            self.layout = lay_out(self.layout.number + 1, shards)
        return [shard.local for shard in shards]

    def forget(self) -> None:
        """Release the references to tensors. The next call of `plan` computes a new plan."""
        self._owner = None
        self._known = []
        self._shards = []

    def expected_bytes(self, model: nn.Module, optimizer: Optimizer | None) -> int:
        """Estimate the bytes of this rank's part of a save, erring on the high side."""
        shards = assign_shards(named_state(model, optimizer), self._rank, self._world_size)
        size = sum(_bytes(shard.local) + ALIGNMENT for shard in shards)
        if optimizer is not None and not optimizer.state:
            if "betas" in optimizer.defaults:
                moments = _MOMENTS_AT_MOST
            else:
                moments = bool(optimizer.defaults.get("momentum"))
            size *= 1 + moments
            size += 2 * ALIGNMENT * len(shards)
        return size + 64 * 1024  # random states

    def _is_known(self, model: nn.Module, optimizer: Optimizer | None) -> bool:
        if self._owner is None or self._owner[0] is not model or self._owner[1] is not optimizer:
            return False
        now = _tensors(model, optimizer)
        if len(now) != len(self._known) or any(
            a is not b for a, b in zip(now, self._known, strict=True)
        ):
            return False
        return [_address(tensor) for tensor in now] == self._memory


def assign_shards(state: dict[str, Tensor], rank: int, world_size: int) -> list[TensorShard]:
    """List the pieces of `state` that `rank` writes, sorted by name. Empty pieces are left out."""
    sharded = {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor)}
    plain = {name: tensor for name, tensor in state.items() if name not in sharded}
    writers = _spread({name: _bytes(tensor) for name, tensor in plain.items()}, world_size)
    shards = []
    for name, tensor in plain.items():
        if writers[name] == rank:
            shards.append(TensorShard.of_whole(name, tensor))
    for name, tensor in _written_replicas(sharded).items():
        shape = tuple(tensor.shape)
        boxes = own_boxes(tensor)
        shards += [TensorShard(name, box.local, shape, box.offsets, box.sizes) for box in boxes]
        if not tensor.numel():
            shards.append(TensorShard.of_whole(name, tensor.to_local()))
    return sorted(shards, key=lambda shard: (shard.name, shard.offsets))


def lay_out(number: int, shards: list[TensorShard]) -> BufferLayout:
    """Place shards one after the other in a buffer, each aligned to 64 bytes, and return the
    layout.
    """
    items: list[IndexEntry] = []
    end = 0
    for shard in shards:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        length = _bytes(shard.local)
        end = start + length
        dtype = str(shard.local.dtype).removeprefix("torch.")
        boxes = {"shape": shard.shape, "offsets": shard.offsets, "sizes": shard.sizes}
        items.append(IndexEntry(name=shard.name, dtype=dtype, start=start, length=length, **boxes))
    return BufferLayout(number, tuple(items), end)


def _written_replicas(sharded: dict[str, DTensor]) -> dict[str, DTensor]:
    """Return the DTensors whose local piece this rank writes.

    Only one rank writes a replicated piece.
    """
    by_count: dict[int, dict[str, int]] = defaultdict(dict)
    place: dict[str, int] = {}
    for name, tensor in sharded.items():
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            continue
        count = 1
        index = 0
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                size = tensor.device_mesh.size(dimension)
                count = count * size
                index = index * size + coordinate[dimension]
        by_count[count][name] = _bytes(tensor)
        place[name] = index
    ours = {}
    for count, sizes in by_count.items():
        for name, writer in _spread(sizes, count).items():
            if writer == place[name]:
                ours[name] = sharded[name]
    return ours


def _spread(sizes: dict[str, int], writers: int) -> dict[str, int]:
    """Assign tensors to writers: the largest first, each to the writer with the fewest bytes so
    far.

    Args:
        sizes: bytes by tensor name.
        writers: number of writers.

    Returns:
        The number of the writer, from 0, by tensor name.
    """
    loads = [(0, writer) for writer in range(writers)]
    chosen = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, writer = heapq.heappop(loads)
        chosen[name] = writer
        heapq.heappush(loads, (load + sizes[name], writer))
    return chosen


def _tensors(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    found = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.extend(
                    value
                    for value in optimizer.state.get(parameter, {}).values()
                    if torch.is_tensor(value)
                )
    return found


def _address(tensor: Tensor) -> int:
    # to_local() would cost more than everything else in a reused plan.
    return getattr(tensor, "_local_tensor", tensor).data_ptr()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
