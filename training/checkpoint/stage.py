"""Copies a rank's pieces into shared memory: the only time that training waits for a save.

Two slabs, used in turn: one is staged while the other is still uploaded. From a CPU the copy is done when `stage`
returns. From a CUDA device it is queued on a stream of its own into page-locked memory, beside the next forward and
backward; `finish` has to be called before the optimizer changes what is being copied. (Of that, nothing has been
verified on a device yet.)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from ebbflow.training.checkpoint.plan import Layout
from ebbflow.training.checkpoint.slabs import Slab
from ebbflow.training.errors import CheckpointError


@dataclass(frozen=True)
class Staged:
    """What lies in slab number `slab`, or is on its way there while `copied` is not None."""

    slab: int
    layout: Layout
    copied: torch.cuda.Event | None = None


class Stage:
    """Two slabs and the views into them; `descriptors` are for the uploader to inherit."""

    def __init__(self) -> None:
        if sys.byteorder != "little":
            raise CheckpointError("checkpoints are little-endian bytes as they lie in memory; this machine is not")
        self._slabs = [Slab(f"ebbflow-slab-{number}") for number in range(2)]
        self.descriptors = [slab.descriptor for slab in self._slabs]
        self._targets: list[tuple[int, list[Tensor]]] = [(-1, []), (-1, [])]  # number of the layout, views
        self._next = 0
        self._stream: torch.cuda.Stream | None = None

    def prepare(self, length: int) -> None:
        """Make room for `length` bytes in both slabs, in the background."""
        for slab in self._slabs:
            slab.prepare(length)

    def stage(self, sources: list[Tensor], layout: Layout) -> Staged:
        """Copy into the slab whose turn it is. The caller sees to it that nobody reads that slab."""
        number, self._next = self._next, 1 - self._next
        targets = self._views(number, layout)
        on_device = [index for index, source in enumerate(sources) if source.is_cuda]
        if not on_device:
            torch._foreach_copy_(targets, sources)
            return Staged(number, layout)
        return Staged(number, layout, self._copy_from_device(number, targets, sources, on_device))

    def close(self) -> None:
        """Give the memory back, once the uploader has ended too."""
        self._targets = [(-1, []), (-1, [])]
        for slab in self._slabs:
            slab.close()
        self.descriptors = []

    def _views(self, number: int, layout: Layout) -> list[Tensor]:
        known, targets = self._targets[number]
        if known == layout.number:
            return targets
        self._targets[number] = (-1, [])  # no view may hold on to memory that is about to be replaced
        whole = self._slabs[number].view(layout.length)
        targets = [
            whole[item.start : item.start + item.length].view(getattr(torch, item.dtype)).view(item.sizes)
            for item in layout.items
        ]
        self._targets[number] = (layout.number, targets)
        return targets

    def _copy_from_device(
        self, number: int, targets: list[Tensor], sources: list[Tensor], on_device: list[int]
    ) -> torch.cuda.Event:
        self._slabs[number].pin()
        device = sources[on_device[0]].device
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        queued = set(on_device)
        with torch.cuda.stream(self._stream):
            for index in on_device:
                targets[index].copy_(sources[index], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
            if index not in queued:
                target.copy_(source)
        return copied
