"""One rank that takes small steps, beats, and at step 20 has the trouble that it was told to have.

python -m tests.support.watched_rank HEARTBEAT RESULT TROUBLE
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ebbflow.training.gang import Gang, connect, leave
from ebbflow.training.launch.heartbeat import Heartbeat, WatchHooks

TROUBLE_STEP = 20
STEPS = 100_000


def sleep() -> None:
    time.sleep(600)


def busy() -> None:
    while True:
        pass


def hold_the_gil() -> None:
    while True:  # a signal ends a sleep
        ctypes.PyDLL(None).sleep(600)


def raise_error() -> None:
    raise ValueError("a sample that cannot be read")


def call_another_collective() -> None:
    dist.all_reduce(torch.ones(3))


def starve_the_loader() -> None:
    loader = torch.utils.data.DataLoader([1, 2], num_workers=1, collate_fn=lambda samples: sleep())
    next(iter(loader))


TROUBLES = {
    function.__name__: function
    for function in (
        sleep,
        busy,
        hold_the_gil,
        raise_error,
        call_another_collective,
        starve_the_loader,
    )
}


@record
def main(heartbeat: Path, result: Path, trouble: str, observed: WatchHooks) -> None:
    gang = connect(start_seconds=60, collective_seconds=60, generation="0")
    beat = Heartbeat(heartbeat).beat
    for step in range(1, STEPS):
        beat(step, "data")
        if step == TROUBLE_STEP and trouble == "leave":
            break
        if step == TROUBLE_STEP and trouble in TROUBLES:
            TROUBLES[trouble]()
        take_step(gang, beat, step)
    result.write_text(json.dumps({"outcome": "completed", "step": step - 1}))


def take_step(gang: Gang, beat: object, step: int) -> None:
    beat(step, "forward")
    time.sleep(0.005)
    beat(step, "backward")
    dist.all_reduce(torch.ones(100))
    gang.gather(torch.ones(8, dtype=torch.float64))
    beat(step, "optimizer")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    watched = WatchHooks(path, os.getppid())
    try:
        main(path, Path(sys.argv[2]), sys.argv[3], watched)
    except Exception:
        watched.save_records()
        leave(1)
    leave(0)
