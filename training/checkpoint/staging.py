"""Copy a rank's tensors into shared-memory staging buffers that its uploader process reads.

Anonymous files (memfd), so that the uploader inherits them by number, nothing has a name that could be left behind,
and the limit of /dev/shm does not apply.

Two slabs, used in turn: one is staged while the other is still uploaded. From a CPU the copy is done when `stage`
returns. From a CUDA device it is queued on a stream of its own into page-locked memory, beside the next forward and
backward; `finish` has to be called before the optimizer changes what is being copied. (Of that, nothing has been
verified on a device yet.)
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from ebbflow.training.checkpoint.save_plan import BufferLayout
from ebbflow.training.errors import CheckpointError

_BLOCK = 64 * 2**20
_GROWTH = 1.05  # a state that has grown is likely to grow again


class StagingBuffer:
    """One buffer. `prepare` makes its pages present in a thread; `view` waits for that."""

    def __init__(self, name: str) -> None:
        self.descriptor = _anonymous_file(name)
        self._map: mmap.mmap | None = None
        self._view: Tensor | None = None
        self._thread: threading.Thread | None = None
        self._pinned = False

    def prepare(self, length: int) -> None:
        """Have `length` bytes ready soon. What was in it is lost."""
        self.join()
        if self._view is not None and self._view.numel() >= length:
            return
        self._allocate(length)
        self._thread = threading.Thread(target=self._fault, name="slab", daemon=True)
        self._thread.start()

    def view(self, length: int) -> Tensor:
        """At least `length` bytes as uint8."""
        self.join()
        if self._view is None or self._view.numel() < length:
            self._allocate(length if self._view is None else int(length * _GROWTH))
            self._fault()
        assert self._view is not None
        return self._view

    def pin(self) -> None:
        """Page-lock it, so that a CUDA device copies into it by itself."""
        if not self._pinned and self._view is not None:
            result = torch.cuda.cudart().cudaHostRegister(self._view.data_ptr(), self._view.numel(), 0)
            self._pinned = int(result) == 0

    def close(self) -> None:
        self.join()
        self._unpin()
        self._view = self._map = None
        os.close(self.descriptor)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _allocate(self, length: int) -> None:
        size = -(-max(length, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._unpin()
        self._view = self._map = None
        os.ftruncate(self.descriptor, size)
        self._map = mmap.mmap(self.descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # where shared memory has no large pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = torch.frombuffer(self._map, dtype=torch.uint8)

    def _fault(self) -> None:
        """Touch each page, which is what costs. In blocks: the interpreter lock is free meanwhile."""
        view = self._view
        assert view is not None
        for start in range(0, view.numel(), _BLOCK):
            ctypes.memset(view.data_ptr() + start, 0, min(_BLOCK, view.numel() - start))

    def _unpin(self) -> None:
        if self._pinned and self._view is not None:
            torch.cuda.cudart().cudaHostUnregister(self._view.data_ptr())
        self._pinned = False


def _anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:  # no memfd outside Linux: an unlinked file serves
        return os.dup(file.fileno())


@dataclass(frozen=True)
class StagedState:
    """What lies in slab number `slab`, or is on its way there while `copied` is not None."""

    slab: int
    layout: BufferLayout
    copied: torch.cuda.Event | None = None


class StagingArea:
    """Two slabs and the views into them; `descriptors` are for the uploader to inherit."""

    def __init__(self) -> None:
        if sys.byteorder != "little":
            raise CheckpointError("checkpoints are little-endian bytes as they lie in memory; this machine is not")
        self._slabs = [StagingBuffer(f"ebbflow-slab-{number}") for number in range(2)]
        self.descriptors = [slab.descriptor for slab in self._slabs]
        self._targets: list[tuple[int, list[Tensor]]] = [(-1, []), (-1, [])]  # number of the layout, views
        self._next = 0
        self._stream: torch.cuda.Stream | None = None

    def prepare(self, length: int) -> None:
        """Make room for `length` bytes in both slabs, in the background."""
        for slab in self._slabs:
            slab.prepare(length)

    def stage(self, sources: list[Tensor], layout: BufferLayout) -> StagedState:
        """Copy into the slab whose turn it is. The caller sees to it that nobody reads that slab."""
        number, self._next = self._next, 1 - self._next
        targets = self._views(number, layout)
        on_device = [index for index, source in enumerate(sources) if source.is_cuda]
        if not on_device:
            torch._foreach_copy_(targets, sources)
            return StagedState(number, layout)
        return StagedState(number, layout, self._copy_from_device(number, targets, sources, on_device))

    def close(self) -> None:
        """Give the memory back, once the uploader has ended too."""
        self._targets = [(-1, []), (-1, [])]
        for slab in self._slabs:
            slab.close()
        self.descriptors = []

    def _views(self, number: int, layout: BufferLayout) -> list[Tensor]:
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
