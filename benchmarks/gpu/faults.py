"""A workload whose device hangs or runs out of memory once, for the jobs of `ebbflow bench gpu`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ebbflow.core.store import Store
from ebbflow.training.engine.optimizer import make_optimizer
from ebbflow.training.workload import Cursor, Loss, WorkloadContext
from ebbflow.workloads.language.language_model import TextBatch, TextWorkload

HANG = "hang"
OUT_OF_MEMORY = "out of memory"
FAULT_STEP = 3
_CHUNK_BYTES = 2**28
_TOO_MANY_BYTES = 2**60  # no machine's address space has them
_ENDLESS_CYCLES = 2**62


class FaultyText(TextWorkload):
    """The built-in workload, with options `fault`, `rank` (that hangs) and `mark` (a file: it has
    hung).

    Out of memory is genuine, from the device's allocator: in forward as long as a micro-batch has
    all samples of the rank, then in the optimizer as long as it has half of them.
    """

    def __init__(self, context: WorkloadContext) -> None:
        # The shards of all jobs
        super().__init__(replace(context, store=Store.open(context.config.store)))
        self._fault = context.options["fault"]
        self._mark = Path(str(context.options["mark"]))
        self._hangs = self._fault == HANG and context.options["rank"] == context.rank
        self._rank_samples = (
            Cursor(0, context.config.training.batch_size)
            .share(context.rank, context.world_size)
            .count
        )
        self._step = 0
        self._parts = 1

    def next_batch(self, model: nn.Module, cursor: Cursor) -> TextBatch:
        self._step = cursor.first // self._config.training.batch_size + 1
        return super().next_batch(model, cursor)

    def loss(self, model: nn.Module, batch: TextBatch) -> Loss:
        if model.training:
            self._parts = self._rank_samples // max(1, len(batch.inputs))
            self._fill(parts=1)
        if self._hangs and self._step >= FAULT_STEP and not self._mark.exists():
            self._mark.touch()
            torch.cuda._sleep(_ENDLESS_CYCLES)
        return super().loss(model, batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make_optimizer(model, self._config.training)
        optimizer.register_step_pre_hook(lambda *_: self._fill(parts=2))
        return optimizer

    def _fill(self, *, parts: int) -> None:
        if self._fault == OUT_OF_MEMORY and self._parts == parts and self._step >= FAULT_STEP:
            fill_memory(self._context.device)


def fill_memory(device: torch.device) -> None:
    """Allocate until the allocator of the device refuses. Raises its error."""
    if device.type == "cpu":
        size = _TOO_MANY_BYTES
    else:
        size = _CHUNK_BYTES
    held = []
    while True:
        held.append(torch.empty(size, dtype=torch.uint8, device=device))
