"""One rank that trains several curves one after another:
`python -m tests.support.curve_rank CURVES.json`.

Put together as a worker does it, commits and restoring included. Writes down every loss, every
sample, all weights.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ebbflow.training.engine.loop import train
from ebbflow.training.engine.trainer import Trainer
from ebbflow.training.engine.trainer_setup import build_trainer, restore
from ebbflow.training.gang import Gang, connect, disconnect, leave
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.reporter import Clock, Reporter
from ebbflow.training.session import open_saver
from ebbflow.training.workload import Cursor
from tests.support.no_saver import NoSaver


class Watched:
    """A workload whose samples are written down: global index, and a checksum of the text that
    came.
    """

    def __init__(self, inner: Any, *, leave_after: int | None) -> None:
        self._inner = inner
        self._leave_after = leave_after
        self.seen: list[tuple[int, int]] = []
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def next_batch(self, model: Any, cursor: Cursor) -> Any:
        self._steps += 1
        if self._steps == self._leave_after:
            os.kill(os.getpid(), signal.SIGTERM)
        batch = self._inner.next_batch(model, cursor)
        numbers = range(cursor.first, cursor.first + cursor.count)
        self.seen += [
            (n, zlib.crc32(row.numpy().tobytes()))
            for n, row in zip(numbers, batch.inputs, strict=True)
        ]
        return batch


def run(curve: dict[str, Any], gang: Gang, weights: Path) -> dict[str, Any]:
    spec = WorkerSpec(**curve["spec"])
    events: list[tuple[str, dict]] = []

    def emit(name: str, *, flush: bool = False, **data: Any) -> None:
        events.append((name, data))

    reporter = Reporter(Clock(emit), emit)
    if spec.generation:
        saver = open_saver(spec, gang, reporter)
    else:
        saver = NoSaver()
    trainer = build_trainer(spec, gang, reporter=reporter, saver=saver)
    trainer = replace(trainer, start=restore(trainer, spec.candidates), progress=None)
    watched = Watched(trainer.workload, leave_after=curve.get("leave_after"))
    ending = train(replace(trainer, workload=watched))
    if spec.generation:
        saver.close()
    save_weights(trainer, gang, weights)
    return {
        "outcome": str(ending.outcome),
        "began": trainer.start.step,
        "weights_sha256": ending.weights_sha256,
        "losses": [data["loss"] for name, data in events if name == "step"],
        "held_out": [
            data["metrics"]["held_out_loss"] for name, data in events if name == "evaluation"
        ],
        "seen": watched.seen,
    }


def save_weights(trainer: Trainer, gang: Gang, path: Path) -> None:
    state = {
        name: parameter.detach() for name, parameter in trainer.spread.module.named_parameters()
    }
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }
    if gang.rank == 0:
        torch.save(whole, path)


def main() -> None:
    curves = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    gang = connect(start_seconds=60, collective_seconds=60, generation="test")
    results = {
        name: run(curve, gang, Path(f"{sys.argv[1]}.{name}.pt")) for name, curve in curves.items()
    }
    Path(f"{sys.argv[1]}.{gang.rank}").write_text(json.dumps(results))
    disconnect()
    leave(0)


if __name__ == "__main__":
    main()
