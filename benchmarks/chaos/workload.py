"""The text model with injected faults: `workload: benchmarks.chaos.workload:Tormented`."""

from __future__ import annotations

import time
from pathlib import Path

from torch import nn

from benchmarks.chaos.hooks import HOOKS, NOT_A_NUMBER
from benchmarks.chaos.orders import Order, Orders
from ebbflow.training.workload import Cursor, Loss, WorkloadContext
from ebbflow.workloads.language.language_model import TextBatch, TextWorkload


class Tormented(TextWorkload):
    """Options: orders (folder of `Orders`), step_seconds (the least that a step takes; 0: no
    padding).
    """

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self._rank = context.rank
        self._orders = Orders(Path(str(context.options["orders"])))
        self._step_seconds = float(context.options.get("step_seconds", 0.0))
        self._batch_size = context.config.training.batch_size
        self._began = 0.0
        self._poisoned = False

    def next_batch(self, model: nn.Module, cursor: Cursor) -> TextBatch:
        left = self._step_seconds - (time.monotonic() - self._began)
        if left > 0:
            time.sleep(min(left, self._step_seconds))
        self._began = time.monotonic()
        order = self._orders.take(self._rank)
        if order is not None:
            self._carry_out(order, step=cursor.first // self._batch_size + 1)
        return super().next_batch(model, cursor)

    def loss(self, model: nn.Module, batch: TextBatch) -> Loss:
        loss = super().loss(model, batch)
        if self._poisoned:
            self._poisoned = False
            return Loss(loss.sum * float("nan"), loss.weight)
        return loss

    def _carry_out(self, order: Order, *, step: int) -> None:
        self._orders.strike(order, step=step)
        if order.hook == NOT_A_NUMBER:
            self._poisoned = True
        else:
            HOOKS[order.hook](**order.settings)
