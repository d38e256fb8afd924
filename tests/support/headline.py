"""A workload that has one headline trouble of the guides on one rank, at one step; it records when."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ebbflow.training.workload import Cursor
from tests.support.guard_jobs import OneSided
from tests.support.workload_cases import Points, Sound


class Headline(OneSided):
    """Options: trouble (a method), guilty (rank), step, mark (a file: the trouble's time; it strikes once)."""

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Points:
        options: dict[str, Any] = dict(self.context.options)
        step = cursor.first // self.context.config.training.batch_size + 1
        self.factor, self.branch = 1.0, True
        mark = Path(options["mark"])
        lasting = options["trouble"] in ("leave_out_a_branch", "divide_by_zero", "call_a_collective")
        if step >= options["step"] and self.context.rank == options["guilty"] and (lasting or not mark.exists()):
            if not mark.exists():
                mark.write_text(str(time.time()))
            getattr(self, options["trouble"])()
        return Sound.next_batch(self, model, cursor)

    def errors(self, model: nn.Module, batch: Points) -> Tensor:
        return self.factor * super().errors(model, batch)

    def leave_out_a_branch(self) -> None:
        self.branch = False

    def divide_by_zero(self) -> None:
        self.factor = float("nan")

    def call_a_collective(self) -> None:
        dist.all_reduce(torch.ones(3))

    def save_alone(self) -> None:
        time.sleep(600)

    def raise_error(self) -> None:
        raise ValueError("cannot read sample 17")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def lose_a_loader_worker(self) -> None:
        class Fatal(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return 8

            def __getitem__(self, index: int) -> int:
                os.kill(os.getpid(), signal.SIGKILL)
                return index

        for _ in torch.utils.data.DataLoader(Fatal(), num_workers=1):
            pass
