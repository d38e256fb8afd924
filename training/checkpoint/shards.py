"""Which rank writes what: the same answer on every rank, without a word between them.

A piece of a DTensor is written by the rank that has it; where replicas have it too (HSDP), by one of them; a plain
tensor, which all ranks hold, by one rank. Those choices spread the bytes evenly: the largest first, to whoever has
least. Where a DTensor's piece lies in the whole is asked of DCP's planner. Its global plan, which gathers the plans of
all ranks to find duplicates, is not used: a save needs no collective, so that it cannot deadlock with training.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Shard:
    """A local tensor and the box of the whole that it is: `local.shape == sizes`."""

    name: str
    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def shards_of_rank(state: dict[str, Tensor], rank: int, world_size: int) -> list[Shard]:
    """What `rank` has to write of `state`, by name; a rank without rows leaves its piece out."""
    sharded = {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor)}
    plain = {name: tensor for name, tensor in state.items() if name not in sharded}
    writers = _spread({name: _bytes(tensor) for name, tensor in plain.items()}, world_size)
    shards = []
    for name, tensor in plain.items():
        if writers[name] == rank:
            shape = tuple(tensor.shape)
            shards.append(Shard(name, tensor, shape, (0,) * len(shape), shape))
    ours = _written_replicas(sharded)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(ours, None, True)
    for item in planner.create_local_plan().items:
        chunk, tensor = item.tensor_data.chunk, ours[item.index.fqn]
        if math.prod(chunk.sizes) or not tensor.numel():
            local = tensor.to_local()
            shards.append(Shard(item.index.fqn, local, tuple(tensor.shape), tuple(chunk.offsets), tuple(chunk.sizes)))
    return sorted(shards, key=lambda shard: (shard.name, shard.offsets))


def _written_replicas(sharded: dict[str, DTensor]) -> dict[str, DTensor]:
    """Those of which this rank is the writing replica; without replicate dimensions, all."""
    by_count: dict[int, dict[str, int]] = defaultdict(dict)
    place: dict[str, int] = {}
    for name, tensor in sharded.items():
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            continue
        count, index = 1, 0
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                size = tensor.device_mesh.size(dimension)
                count, index = count * size, index * size + coordinate[dimension]
        by_count[count][name] = _bytes(tensor)
        place[name] = index
    ours = {}
    for count, sizes in by_count.items():
        for name, writer in _spread(sizes, count).items():
            if writer == place[name]:
                ours[name] = sharded[name]
    return ours


def _spread(sizes: dict[str, int], writers: int) -> dict[str, int]:
    """Writer of each name: largest first, to the least loaded, the lowest number among equals."""
    loads = [(0, writer) for writer in range(writers)]
    chosen = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, writer = heapq.heappop(loads)
        chosen[name] = writer
        heapq.heappush(loads, (load + sizes[name], writer))
    return chosen


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
