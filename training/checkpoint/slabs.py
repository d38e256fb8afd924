"""Shared memory that a save is copied into, allocated with its pages present before it is needed.

Anonymous files (memfd), so that the uploader inherits them by number, nothing has a name that could be left behind,
and the limit of /dev/shm does not apply.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import threading

import torch
from torch import Tensor

_BLOCK = 64 * 2**20
_GROWTH = 1.05  # a state that has grown is likely to grow again


class Slab:
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
