"""Copies a rank's pieces into shared memory: the only time that training waits for a save.

Two slabs, allocated once with their pages present and used in turn: one is staged while the other is still uploaded.
They are anonymous files (memfd), so that the uploader inherits them by number, nothing has a name that could be left
behind, and the limit of /dev/shm does not apply.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from dataclasses import dataclass

import torch
from torch import Tensor

from training.checkpoint.manifest import ALIGNMENT, Item
from training.checkpoint.shards import Shard
from training.errors import CheckpointError


@dataclass(frozen=True)
class Staged:
    """What lies in slab number `slab`: `length` bytes, made of `items`."""

    slab: int
    length: int
    items: list[Item]


class Slabs:
    """Two buffers of shared memory; `descriptors` are for the uploader to inherit."""

    def __init__(self) -> None:
        if sys.byteorder != "little":
            raise CheckpointError("checkpoints are little-endian bytes as they lie in memory; this machine is not")
        self.descriptors = [_anonymous_file(f"ebbflow-slab-{number}") for number in range(2)]
        self._maps: list[mmap.mmap | None] = [None, None]
        self._views: list[Tensor | None] = [None, None]
        self._next = 0

    def stage(self, shards: list[Shard]) -> Staged:
        """Copy the shards into the slab whose turn it is. The caller sees to it that nobody reads that slab."""
        slab, self._next = self._next, 1 - self._next
        items: list[Item] = []
        end = 0
        for shard in shards:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            length = shard.local.numel() * shard.local.dtype.itemsize
            end = start + length
            dtype = str(shard.local.dtype).removeprefix("torch.")
            boxes = {"shape": shard.shape, "offsets": shard.offsets, "sizes": shard.sizes}
            items.append(Item(name=shard.name, dtype=dtype, start=start, length=length, **boxes))
        view = self._view(slab, end)
        for item, shard in zip(items, shards, strict=True):
            target = view[item.start : item.start + item.length].view(shard.local.dtype).view(item.sizes)
            target.copy_(shard.local)
        return Staged(slab, end, items)

    def close(self) -> None:
        """Give the memory back, once the uploader has ended too."""
        self._views = [None, None]
        self._maps = [None, None]
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def _view(self, slab: int, length: int) -> Tensor:
        """The slab as uint8, grown when needed. Pages are made present at once, or the first copy would fault each."""
        current = self._views[slab]
        if current is None or current.numel() < length:
            size = -(-max(length, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
            self._views[slab] = self._maps[slab] = None
            os.ftruncate(self.descriptors[slab], size)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            mapping = mmap.mmap(self.descriptors[slab], size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
            self._maps[slab] = mapping
            self._views[slab] = torch.frombuffer(mapping, dtype=torch.uint8)
        view = self._views[slab]
        assert view is not None
        return view


def _anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:  # no memfd outside Linux: an unlinked file serves
        return os.dup(file.fileno())
