"""A workload whose evaluation is long, and writes down each pass that it makes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.workload_cases import Sound

TOLD_AFTER = 3


class LongEvaluation(Sound):
    """Options: passes of an evaluation, seconds for each, marks (a folder). Where that holds a file
    `tell`, it is taken away, and the process is told to leave after three passes."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        # It is only tried, before there is a rank
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            return {"score": 0.5}
        options: Any = self.context.options
        marks = Path(options["marks"])
        with open(marks / f"passes-{self.context.rank}", "a") as done:
            for number in range(1, options["passes"] + 1):
                with contextlib.suppress(Exception):  # as code does that goes on whatever happens
                    model(torch.zeros(1, 4))
                done.write(".")
                done.flush()
                order = marks / "tell"
                if number == TOLD_AFTER and order.exists():
                    order.unlink()
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(options["seconds"])
        return {"score": 0.5}
