"""The example workload with a straggler: rank 1 sleeps in a part of each step."""

from __future__ import annotations

import time
from typing import Any

from examples.shapes import Shapes

SLEEP_SECONDS = 0.06


class SlowShapes(Shapes):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._place = str(context.options.get("slow", "forward")) if context.rank == 1 else ""

    def next_batch(self, model: Any, cursor: Any) -> Any:
        time.sleep(SLEEP_SECONDS * (self._place == "data"))
        return super().next_batch(model, cursor)

    def loss(self, model: Any, batch: Any) -> Any:
        loss = super().loss(model, batch)
        if self._place == "backward":
            loss.sum.register_hook(lambda _: time.sleep(SLEEP_SECONDS))
        time.sleep(SLEEP_SECONDS * (self._place == "forward"))
        return loss
