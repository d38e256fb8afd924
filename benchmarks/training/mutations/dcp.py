"""torch.distributed.checkpoint with its FileSystemWriter and FileSystemReader, and their defaults."""

from __future__ import annotations

import io
import sys
import traceback
from contextlib import redirect_stderr
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.training.mutations.contestant import STEPS, Answer, Outcome, same, tensors

_WORLD_SIZE = 2
_NO_MEMORY = ("MemoryError", "can't allocate memory", "bad_alloc", "not enough memory")


class Dcp:
    """It has no command that verifies, and goes back to nothing earlier by itself."""

    @staticmethod
    def store(folder: Path) -> None:
        multiprocessing.spawn(_save, args=(str(folder),), nprocs=_WORLD_SIZE)
        (folder / "meeting").unlink(missing_ok=True)

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"step-{STEPS[-1]}"
        self._stored = tensors(STEPS[-1])

    def ask(self) -> Answer:
        loaded = {name: torch.full_like(tensor, -1.0) for name, tensor in self._stored.items()}
        try:
            with redirect_stderr(io.StringIO()):
                dcp.load(loaded, checkpoint_id=str(self._path), no_dist=True)
        except (
            Exception,
            dcp.api.CheckpointException,
        ) as error:  # whatever it is, the user is told
            told = "".join(traceback.format_exception(error))
            no_memory = any(mark in told for mark in _NO_MEMORY)
            return Answer(Outcome.CRASHED if no_memory else Outcome.REFUSED, False, told)
        return Answer(Outcome.SAME if same(loaded, self._stored) else Outcome.WRONG, False, "")


def _save(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=_WORLD_SIZE
    )
    mesh = init_device_mesh("cpu", (_WORLD_SIZE,))
    for step in STEPS:
        state = {
            name: distribute_tensor(tensor, mesh, [Shard(0)])
            for name, tensor in tensors(step).items()
        }
        dcp.save(state, checkpoint_id=f"{folder}/step-{step}")
    dist.barrier()
    sys.stdout.flush()
    dist.destroy_process_group()
