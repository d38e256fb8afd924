"""Reader of a training step's samples, which reads one step ahead into page-locked memory on a
GPU.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ebbflow.training.workload import Cursor

ReadSamples = Callable[[Cursor], Sequence[Tensor]]


class StepReader:
    """Reader of each step's tensors.

    On a CPU it reads a step on request. On a GPU, a thread reads the step after the requested one,
    so that the host neither makes samples nor waits for a copy between two steps.

    Args:
        read: returns the tensors of the samples at a cursor, in the host's memory. On a GPU a thread
            calls it, one call at a time.
        device: where the tensors are wanted.
        batch_size: samples of a step on all ranks: the distance of two steps.
    """

    def __init__(self, read: ReadSamples, device: torch.device, batch_size: int) -> None:
        self._read = read
        self._device = device
        self._batch_size = batch_size
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[Cursor, Future[list[Tensor]]] | None = None

    def take(self, cursor: Cursor) -> list[Tensor]:
        """Return the tensors of the samples at a cursor, on the device."""
        if self._device.type != "cuda":
            return [part.to(self._device) for part in self._read(cursor)]
        if self._thread is None:  # a new thread would use the first GPU
            self._thread = ThreadPoolExecutor(1, "reader", torch.cuda.set_device, (self._device,))
        expected, parts = self._ahead or (None, None)
        if parts is None or expected != cursor:
            parts = self._thread.submit(self._read_pinned, cursor)
        after = Cursor(cursor.first + self._batch_size, cursor.count)
        self._ahead = after, self._thread.submit(self._read_pinned, after)
        return [part.to(self._device, non_blocking=True) for part in parts.result()]

    def _read_pinned(self, cursor: Cursor) -> list[Tensor]:
        return [part.pin_memory() for part in self._read(cursor)]
