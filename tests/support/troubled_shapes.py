"""The example workload with a trouble on rank 1: a step that takes longer (`slow`), or a sample
that fails (`bad`).
"""

from __future__ import annotations

import time
from typing import Any

from examples.shapes import Shapes

SLEEP_SECONDS = 0.06


class TroubledShapes(Shapes):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        if context.rank == 1:
            self._slow = str(context.options.get("slow", ""))
        else:
            self._slow = ""
        self._bad = int(context.options.get("bad", -1))

    def next_batch(self, model: Any, cursor: Any) -> Any:
        time.sleep(SLEEP_SECONDS * (self._slow == "data"))
        if self._bad in range(cursor.first, cursor.first + cursor.count):
            raise ValueError(f"drawing {self._bad} has no pixels")
        return super().next_batch(model, cursor)

    def loss(self, model: Any, batch: Any) -> Any:
        loss = super().loss(model, batch)
        if self._slow == "backward":
            loss.sum.register_hook(lambda _: time.sleep(SLEEP_SECONDS))
        time.sleep(SLEEP_SECONDS * (self._slow == "forward"))
        return loss
