"""One rank of a small gang that saves or restores; started as a process with torchrun's
environment.

checkpoint_rank.py save MODES FOLDER OUT          in each mode (joined by "+"): train two steps, save as job MODE
checkpoint_rank.py restore MODES FOLDER OUT       restore each job of the folder into a fresh model of each mode
checkpoint_rank.py mismatch MODES FOLDER OUT      restore each job into a wider model of each mode; what is raised
checkpoint_rank.py doubt MODES FOLDER OUT         restore job ddp while rank 1 reads wrongly, then after real damage
checkpoint_rank.py slow MODES FOLDER OUT          restore job ddp while rank 1 reads longer than a collective may take
checkpoint_rank.py hold PARAMETERS JOB_STORE OUT  save, write the uploader's pid to OUT, await the kill
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import Checkpointer, Generation, reachable_commits
from ebbflow.training.errors import RendezvousError, TrainingError
from ebbflow.training.gang import connect
from ebbflow.training.session import meet_others

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
GANG = {"rank": RANK, "world_size": WORLD_SIZE, "deadline_seconds": 30.0}
COLLECTIVE_SECONDS = 2.0


def build(mode: str, seed: int, width: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Uneven on purpose: 5 and 2 rows do not divide by 2 or 3 ranks, and 2 rows leave a third rank
    with none.
    """
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 2)
    )
    if mode == "ddp":
        model = DistributedDataParallel(model)
    elif mode in ("fsdp2", "hsdp"):
        if mode == "fsdp2":
            shape = (WORLD_SIZE,)
        else:
            shape = (WORLD_SIZE, 1)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """SHA-256 of every full tensor by name, and the learning rate."""
    if isinstance(model, DistributedDataParallel):
        inner = model.module
    else:
        inner = model
    found = {name: digest(tensor) for name, tensor in inner.state_dict().items()}
    for name, parameter in inner.named_parameters():
        for key, value in sorted(optimizer.state[parameter].items()):
            found[f"{name}/{key}"] = digest(value)
    return {**found, "lr": repr(optimizer.param_groups[0]["lr"])}


def digest(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        whole = tensor.full_tensor()
    else:
        whole = tensor
    return hashlib.sha256(
        whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def main(action: str, modes: str, folder: str, out: str) -> None:
    if action == "hold":
        hold(int(modes), folder, out)
    results: dict[str, dict] = {}
    if action == "slow":
        results = {"ddp": slow(f"{folder}/jobs/ddp")}
    elif WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    if action == "doubt":
        results = doubt(f"{folder}/jobs/ddp")
    for mode in modes.split("+") if action not in ("doubt", "slow") else []:
        if action == "save":
            results[mode] = save(mode, f"{folder}/jobs/{mode}")
        act = {"restore": restore, "mismatch": mismatch}.get(action)
        for job in sorted(path.name for path in Path(folder, "jobs").iterdir()) if act else []:
            results[f"{job}>{mode}"] = act(mode, f"{folder}/jobs/{job}")
    Path(f"{out}.{RANK}").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


def save(mode: str, job_store: str) -> dict:
    number, generation_id = (
        Store.open(job_store).list("generations")[0].key.split("/")[1][: -len(".json")].split("-")
    )
    with Checkpointer(
        job_store, generation=Generation(int(number), generation_id), **GANG
    ) as checkpointer:
        model, optimizer = build(mode, seed=1)
        train(model, optimizer, 2)
        torch.manual_seed(100 + RANK)
        torch.rand(7)
        optimizer.param_groups[0]["lr"] = 0.1 + 0.2  # a float that must come back to the last bit
        checkpointer.save(2, model, optimizer, {"cursor": 16})
        commit = checkpointer.wait()
        return {
            "commit": commit.key,
            "drawn": torch.rand(3).tolist(),
            "digests": digests(model, optimizer),
        }


def restore(mode: str, job_store: str) -> dict:
    candidates = [ref.key for ref in reachable_commits(Store.open(job_store))]
    with Checkpointer(job_store, generation=Generation(2, "reader"), **GANG) as checkpointer:
        model, optimizer = build(mode, seed=2)
        restored = checkpointer.restore(candidates, model, optimizer)
        result = {"rng": restored.rng, "extra": restored.extra, "drawn": torch.rand(3).tolist()}
        return {**result, "digests": digests(model, optimizer)}


def slow(job_store: str) -> dict:
    """How long each rank restored, and how often it gave a sign of life while it waited."""
    gang = connect(start_seconds=30, collective_seconds=COLLECTIVE_SECONDS, generation="slow")
    candidates = [ref.key for ref in reachable_commits(Store.open(job_store))]
    limits = {
        "start_deadline_seconds": 3 * COLLECTIVE_SECONDS,
        "step_deadline_seconds": COLLECTIVE_SECONDS,
    }
    config = RunConfig.model_validate({"cluster": limits})
    signs: list[float] = []

    def alive() -> None:
        signs.append(time.monotonic())

    def read() -> None:
        time.sleep(2.5 * COLLECTIVE_SECONDS if RANK == 1 else 0.0)

    with Checkpointer(job_store, generation=Generation(2, "reader"), **GANG) as checkpointer:
        began = time.monotonic()
        (model, optimizer) = build("ddp", seed=2)
        meet = partial(meet_others, gang, config, alive)
        restored = checkpointer.restore(candidates, model, optimizer, progress=read, meet=meet)
        seconds = time.monotonic() - began
        missing = ""
        if RANK == 0:
            try:
                meet_others(gang, config, alive, "a stage of rank 0 alone")
            except RendezvousError as error:
                missing = str(error)
        return {"step": restored.step, "seconds": seconds, "signs": len(signs), "missing": missing}


def mismatch(mode: str, job_store: str) -> dict:
    """Twice: before the optimizer's first step, as a job that goes on, and after it."""
    candidates = [ref.key for ref in reachable_commits(Store.open(job_store))]
    raised = []
    with Checkpointer(job_store, generation=Generation(2, "reader"), **GANG) as checkpointer:
        for steps in (0, 1):
            model, optimizer = build(mode, seed=2, width=8)
            train(model, optimizer, steps)
            try:
                checkpointer.restore(candidates, model, optimizer)
            except TrainingError as error:
                raised.append([type(error).__name__, str(error.outcome), error.curable, str(error)])
    return {"raised": raised, "reachable": len(reachable_commits(Store.open(job_store)))}


def doubt(job_store: str) -> dict:
    """Each rank is a node of its own.

    What each is told, and what is left, first of wrong reads and then of damage.
    """
    import ebbflow.training.checkpoint.reader as reader
    import ebbflow.training.checkpoint.restore as restoring

    store = Store.open(job_store)
    read_blocks = reader.read_blocks
    found = {}
    restoring._SUSPECT_FIRST_SECONDS = 0.0

    def flipped(*what: Any, **options: Any) -> Iterator[list[memoryview]]:
        for block in read_blocks(*what, **options):
            block[0][0] ^= 1
            yield block

    for case in ("wrong reads", "damage"):
        if RANK == 1 and case == "wrong reads":
            reader.read_blocks = flipped
        else:
            reader.read_blocks = read_blocks
        if RANK == 0 and case == "damage":
            path = store.local_path(store.list("data")[1].key)
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        dist.barrier()
        candidates = [ref.key for ref in reachable_commits(store)]
        with Checkpointer(
            job_store, generation=Generation(2, "reader"), node=RANK, **GANG
        ) as checkpointer:
            try:
                checkpointer.restore(candidates, *build("ddp", seed=2))
                found[case] = ["restored", "", 0]
            except TrainingError as error:
                dist.barrier()
                found[case] = [type(error).__name__, str(error), len(store.list("quarantine"))]
    return found


def hold(parameters: int, job_store: str, out: str) -> None:
    checkpointer = Checkpointer(job_store, generation=Generation(1, "hold"))
    checkpointer.save(1, nn.Linear(parameters, 1), None, {})
    Path(out).write_text(str(checkpointer.uploader_pid))
    time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
