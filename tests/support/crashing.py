"""Workloads that fail in the same way in each start."""

from __future__ import annotations

from torch import nn
from torch.distributed import DistBackendError

from ebbflow.training.workload import Cursor, WorkloadContext
from ebbflow.workloads.language.language_model import TextBatch, TextWorkload

CRASHES_AT_STEP = 5


class Crashing(TextWorkload):
    """The text model; its last rank raises at `CRASHES_AT_STEP`."""

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self._strikes = context.rank == context.world_size - 1
        self._first = (CRASHES_AT_STEP - 1) * context.config.training.batch_size

    def next_batch(self, model: nn.Module, cursor: Cursor) -> TextBatch:
        if self._strikes and cursor.first >= self._first:
            raise ValueError(f"a bug at sample {cursor.first}")
        return super().next_batch(model, cursor)


class Unconnected(TextWorkload):
    """The text model on machines where NCCL, which is not here, would find no network interface."""

    def next_batch(self, model: nn.Module, cursor: Cursor) -> TextBatch:
        raise DistBackendError(
            "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, NCCL version 2.27.5\n"
            "ncclSystemError: System call failed.\nLast error:\nBootstrap : no socket interface found"
        )
