"""Copy a rank's tensors into shared-memory staging buffers, from which its uploader process reads.

The buffers are anonymous files (memfd): the uploader inherits their file descriptors, no files
remain after the processes end, and the size limit of /dev/shm does not apply. Two buffers
alternate: one buffer is filled while the other is uploaded.

`stage` copies CPU tensors before it returns. It copies CUDA tensors into page-locked memory on a
separate stream, while the next forward and backward pass run; `Checkpointer.before_step` waits for
this copy before the optimizer changes the state. The forward pass itself may change other tensors,
such as the statistics of a batch norm: these are copied on the device first.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebbflow.core.process import host_bytes_left
from ebbflow.training.checkpoint.save_plan import BufferLayout
from ebbflow.training.errors import CheckpointError, NoRoom

_BLOCK = 64 * 2**20
_GROWTH = 1.05  # a state that has grown is likely to grow again


class StagingBuffer:
    """A shared-memory buffer.

    A background thread allocates and page-locks it; `view` waits for that thread.

    CUDA remembers an error of `cudaHostRegister` for the thread that called it, and torch would
    raise the error at a later call from that thread. So only the background thread, which ends
    afterwards, calls `cudaHostRegister`. The driver does not enforce `ulimit -l`
    (os_lock_user_pages in its os-mlock.c), so a low limit alone refuses nothing.
    """

    def __init__(self, name: str) -> None:
        # The GPU that copies into the buffer; None: it is not page-locked
        self.device: torch.device | None = None
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create(name)
        else:  # outside Linux
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self._map: mmap.mmap | None = None
        self._view: Tensor | None = None
        self._thread: threading.Thread | None = None
        self._pinned = False

    def prepare(self, length: int) -> None:
        """Allocate `length` bytes in the background if the buffer is smaller.

        This may discard its content.
        """
        self.join()
        if self._view is not None and self._view.numel() >= length:
            return
        self._allocate(length)

    def view(self, length: int) -> Tensor:
        """Return the buffer as a uint8 tensor of at least `length` bytes, enlarging it if
        necessary.
        """
        self.join()
        if self._view is None or self._view.numel() < length:
            self._allocate(length if self._view is None else int(length * _GROWTH))
            self.join()
        assert self._view is not None
        return self._view

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
        try:
            os.ftruncate(self.descriptor, size)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            raise NoRoom(
                f"this rank's part of a checkpoint takes {size:,} bytes of shared memory, and files "
                f"may have {limit:,} (`ulimit -f`); fix: ulimit -f unlimited"
            ) from error
        self._map = mmap.mmap(
            self.descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # where shared memory has no large pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = torch.frombuffer(self._map, dtype=torch.uint8)
        self._thread = threading.Thread(target=self._fault, name="staging", daemon=True)
        self._thread.start()

    def _fault(self) -> None:
        """Touch each page, so that later copies cause no page faults, and page-lock the buffer for
        a GPU.

        The work is done in blocks, each of which releases the interpreter lock (GIL).
        """
        view = self._view
        assert view is not None
        for start in range(0, view.numel(), _BLOCK):
            ctypes.memset(view.data_ptr() + start, 0, min(_BLOCK, view.numel() - start))
        if self.device is None:
            return
        why = "it would take more than half of the free memory"
        if host_bytes_left() > view.numel():
            with torch.cuda.device(self.device):  # a new thread would use the first GPU
                cuda: Any = torch.cuda.cudart()
                error = int(cuda.cudaHostRegister(view.data_ptr(), view.numel(), 0))
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            if limit == resource.RLIM_INFINITY:
                allowed = "unlimited"
            else:
                allowed = f"{limit // 1024} KiB"
            self._pinned = error == 0
            why = f"cudaHostRegister failed with error {error}; ulimit -l is {allowed}"
        if not self._pinned:
            size = f"{view.numel() / 2**30:.2f} GiB"
            print(
                f"checkpoint: {size} are not page-locked, so saves hold up training: {why}",
                file=sys.stderr,
                flush=True,
            )

    def _unpin(self) -> None:
        if self._pinned and self._view is not None:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self._view.data_ptr())
        self._pinned = False


@dataclass(frozen=True)
class StagedState:
    """A state that has been copied, or is being copied, into a staging buffer."""

    buffer: int  # number of the buffer
    layout: BufferLayout
    # event at which the copy from a CUDA device is complete; None if it is complete already
    copied: torch.cuda.Event | None = None
    kept: tuple[Tensor, ...] = ()  # copies on the device, which are needed until then


class StagingArea:
    """Two staging buffers and the tensor views into them.

    The uploader inherits their file `descriptors`.
    """

    def __init__(self) -> None:
        if sys.byteorder != "little":
            raise CheckpointError(
                "checkpoints are little-endian memory images; this machine is big-endian"
            )
        self._buffers = [StagingBuffer(f"ebbflow-staging-{number}") for number in range(2)]
        self.descriptors = [buffer.descriptor for buffer in self._buffers]
        # Number of the layout, views
        self._targets: list[tuple[int, list[Tensor]]] = [(-1, []), (-1, [])]
        self._next = 0
        self._stream: torch.cuda.Stream | None = None

    def prepare(self, length: int, device: torch.device | None = None) -> None:
        """Allocate the buffers in the background.

        `device` is the GPU whose tensors will be copied, if any.
        """
        for buffer in self._buffers:
            buffer.device = device
            buffer.prepare(length)

    def stage(
        self, sources: list[Tensor], layout: BufferLayout, settled: Sequence[bool] = ()
    ) -> StagedState:
        """Copy tensors into the next of the two buffers, at the positions in `layout`.

        `settled` says for each tensor whether only the optimizer changes it. All other CUDA tensors
        are cloned first, because the next forward pass may change them. The caller ensures that no
        upload is reading the buffer.
        """
        number = self._next
        self._next = 1 - self._next
        targets = self._views(number, layout)
        on_device = [index for index, source in enumerate(sources) if source.is_cuda]
        if not on_device:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage] - has no public name
            return StagedState(number, layout)
        kept = {i: sources[i].clone() for i in on_device if not (i < len(settled) and settled[i])}
        sources = [kept.get(index, source) for index, source in enumerate(sources)]
        return StagedState(
            number,
            layout,
            self._copy_from_device(targets, sources, on_device),
            tuple(kept.values()),
        )

    def close(self) -> None:
        """Free the memory. Call this after the uploader has exited."""
        self._targets = [(-1, []), (-1, [])]
        for buffer in self._buffers:
            buffer.close()
        self.descriptors = []

    def _views(self, number: int, layout: BufferLayout) -> list[Tensor]:
        known, targets = self._targets[number]
        if known == layout.number:
            return targets
        # A view would keep memory alive that is about to be replaced
        self._targets[number] = (-1, [])
        whole = self._buffers[number].view(layout.length)
        targets = [
            whole[item.start : item.start + item.length]
            .view(getattr(torch, item.dtype))
            .view(item.sizes)
            for item in layout.items
        ]
        self._targets[number] = (layout.number, targets)
        return targets

    def _copy_from_device(
        self, targets: list[Tensor], sources: list[Tensor], on_device: list[int]
    ) -> torch.cuda.Event:
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
