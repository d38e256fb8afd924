"""A workload that takes the same time on a slow machine as on a fast one: what a trace of Spot
capacity is laid beside.

It trains as the built-in text model does, bit for bit, and sleeps until it is time for the next
micro-batch. A folder with this file alone stands in the container's PYTHONPATH, as a package of the
user's own in the image would.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from ebbflow.training.workload import Cursor, Loss, WorkloadContext
from ebbflow.workloads.language.language_model import TextBatch, TextWorkload


class Paced(TextWorkload):
    """Options: seconds_per_step, at least so long; crashes_at_step, 0: none, else a bug that is
    always there.
    """

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        # Two that wait for each other are slow where others want the cores too
        torch.set_num_threads(1)
        self._seconds = float(context.options.get("seconds_per_step", 0.0))
        self._due = 0.0
        step = int(context.options.get("crashes_at_step", 0))
        if step:
            self._crash = (step - 1) * context.config.training.batch_size
        else:
            self._crash = None

    def next_batch(self, model: nn.Module, cursor: Cursor) -> TextBatch:
        if self._crash is not None and cursor.first >= self._crash:
            raise ValueError(f"a bug at sample {cursor.first}")
        return super().next_batch(model, cursor)

    def loss(self, model: nn.Module, batch: TextBatch) -> Loss:
        time.sleep(max(0.0, self._due - time.monotonic()))
        self._due = time.monotonic() + self._seconds
        return super().loss(model, batch)
