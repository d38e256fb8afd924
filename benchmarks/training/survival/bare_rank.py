"""A rank of bare torchrun: DDP by torch alone, with a checkpoint to restart from, under the same
faults.

    torchrun … -m benchmarks.training.survival.bare_rank FOLDER

What torch's own elastic tutorials write: the newest snapshot is loaded at the start, rank 0 saves
one each ten steps.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from benchmarks.chaos.hooks import HOOKS, NOT_A_NUMBER
from benchmarks.chaos.orders import Orders

_SAVE_STEPS = 10
_STEP_SECONDS = 0.05
MAX_STEPS = 200


@record
def main(folder: Path) -> None:
    """Writes `step-RANK` with each step: its number, this process and the monotonic clock."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    orders = Orders(folder / "orders")
    snapshot = folder / "snapshot.pt"
    step = 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < MAX_STEPS:
        time.sleep(_STEP_SECONDS)
        poisoned = _carry_out(orders, rank, step + 1)
        torch.manual_seed(step * 1000 + rank)
        loss = model(torch.randn(16, 64)).square().mean()
        if poisoned:
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % _SAVE_STEPS == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, snapshot.with_suffix(".tmp"))
            snapshot.with_suffix(".tmp").replace(snapshot)
        _show(folder / f"step-{rank}", step)


def _carry_out(orders: Orders, rank: int, step: int) -> bool:
    """Whether the loss of this step is to be no number."""
    order = orders.take(rank)
    if order is None:
        return False
    orders.strike(order, step=step)
    if order.hook == NOT_A_NUMBER:
        return True
    HOOKS[order.hook](**order.settings)
    return False


def _show(path: Path, step: int) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f"{step} {os.getpid()} {time.monotonic()}")
    temporary.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
