"""Host memory of each of eight ranks that initialise, save and restore a sharded model.

    python -m tests.support.sharded_memory FOLDER HIDDEN LAYERS VOCABULARY [--initialise-only]

The ranks are forked, and torch's process group talks to nobody: they meet in the store alone. Rank
3 prints as JSON the bytes of the model (float32), of its shards and of its state, and the growth of
its peak of resident memory in each phase. A small model runs first, so that imports and thread
pools do not count. On the CPU a rank's state is in host memory; with a GPU it would not be.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ebbflow.core.config.schema import ModelConfig, ParallelConfig, RunConfig
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import Checkpointer, Generation, open_generation
from ebbflow.training.engine.optimizer import make_optimizer
from ebbflow.training.engine.parallel import spread_model
from ebbflow.training.gang import Gang
from tests.support.spread_rank import ModelOnly

RANKS = 8
MEASURED = 3


def start_measuring() -> int:
    """Reset the peak, and return the resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return read_memory("VmRSS")


def read_memory(name: str) -> int:
    line = next(
        status_line
        for status_line in Path("/proc/self/status").read_text().splitlines()
        if status_line.startswith(name)
    )
    return int(line.split()[1]) * 1024


def local_parts(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    parts = ((name, value.detach()) for name, value in module.named_parameters())
    return {
        name: value.to_local() if isinstance(value, DTensor) else value for name, value in parts
    }


def run(job: Store, model: ModelConfig, rank: int, generation: Generation | None) -> dict[str, Any]:
    """One rank's part, which ends after it has initialised the model without a generation."""
    config = RunConfig(model=model, parallel=ParallelConfig(mode="fsdp2"))
    gang = Gang(rank=rank, world_size=RANKS, ranks_per_node=RANKS)
    before = start_measuring()
    began = time.monotonic()
    module = spread_model(ModelOnly(config), config, gang).module  # type: ignore[arg-type]
    found: dict[str, Any] = {
        "initialise": read_memory("VmHWM") - before,
        "seconds": time.monotonic() - began,
    }
    found["model"] = sum(4 * parameter.numel() for parameter in module.parameters())
    found["own"] = sum(value.nbytes for value in local_parts(module).values())
    if generation is None:
        return found
    optimizer = make_optimizer(module, config.training)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    kept = {name: value.clone() for name, value in local_parts(module).items()}
    with Checkpointer(job.uri, generation=generation, rank=rank, world_size=RANKS) as saver:
        before = start_measuring()
        saver.save(1, module, optimizer, {"cursor": 0})
        commit = saver.wait()
        found["save"] = read_memory("VmHWM") - before
    assert commit is not None
    for parameter in module.parameters():
        parameter.data.zero_()
    with Checkpointer(
        job.uri, generation=Generation(2, "reader"), rank=rank, world_size=RANKS
    ) as saver:
        before = start_measuring()
        saver.restore([commit.key], module, optimizer)
        found["restore"] = read_memory("VmHWM") - before
    found["equal"] = all(
        torch.equal(value, kept[name]) for name, value in local_parts(module).items()
    )
    return found


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    hidden, layers, vocabulary = map(int, arguments[1:4])
    sizes = {"hidden_size": hidden, "num_layers": layers, "vocab_size": vocabulary, "num_heads": 8}
    small = ModelConfig(hidden_size=64, num_layers=1, num_heads=2, sequence_length=16)
    models = {"small": small, "large": ModelConfig(sequence_length=64, **sizes)}
    jobs = {name: Store.open(str(Path(arguments[0], "jobs", name))) for name in models}
    whole = "--initialise-only" not in arguments
    generations = {
        name: open_generation(job, run="r", attempt=0) if whole else None
        for name, job in jobs.items()
    }
    children = []
    for rank in range(RANKS) if whole else [MEASURED]:
        pid = os.fork()
        if pid == 0:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
            for name, model in models.items():
                found = run(jobs[name], model, rank, generations[name])
            if rank == MEASURED:
                print(json.dumps(found), flush=True)
            os._exit(0)
        children.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))


if __name__ == "__main__":
    main(sys.argv[1:])
