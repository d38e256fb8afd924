"""Puts one rank's guards together, and finds the micro-batch that fits where that is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from infra.config.schema import RunConfig
from infra.events import GUARD, GuardAction
from infra.layout import job_prefix
from infra.store import Store
from training.gang import Gang
from training.guards.growth import GrowthWatch, host_bytes_left, resident_bytes
from training.guards.guards import Guards
from training.guards.micro_batch import fitting_accumulation, try_micro_batch
from training.guards.overrides import Overrides, record_split
from training.launch.spec import WorkerSpec
from training.parallel import Spread
from training.workload import Cursor, Workload

_REPLICATED = "ddp"


def overridden(config: RunConfig, overrides: Overrides) -> RunConfig:
    """What the job was configured with, as far as no guard has changed it since: never fewer micro-batches."""
    accumulation = overrides.gradient_accumulation_steps
    if accumulation is None or accumulation <= config.training.gradient_accumulation_steps:
        return config
    training = config.training.model_copy(update={"gradient_accumulation_steps": accumulation})
    return config.model_copy(update={"training": training})


def make_guards(spec: WorkerSpec, config: RunConfig, gang: Gang, *, copies: int, emit: Callable[..., object]) -> Guards:
    """copies: of the model, over all ranks."""
    growth: tuple[GrowthWatch, ...] = ()
    if config.guards.memory_growth == "renew":
        growth = _growth_watches(gang, spec.colocated_ranks)
    return Guards(
        config=config,
        gang=gang,
        copies=copies,
        emit=emit,
        store=Store.open(spec.store_uri).sub(job_prefix(spec.job)),
        generation=spec.generation,
        overrides=Overrides.from_json(spec.overrides),
        growth=growth,
    )


def fit_micro_batch(guards: Guards, workload: Workload, spread: Spread, optimizer: torch.optim.Optimizer) -> RunConfig:
    """The configuration with as many micro-batches as it takes, where it leaves that open. Collective.

    Tried with the first batch of the job, once in its life: what was found is an order to all later starts, so that
    they add up gradients in the same parts. A sharded model cannot be tried by one rank alone; there the first step
    tries. Raises BatchCannotBeSplit.
    """
    config, gang = guards.config, guards.gang
    known = guards.overrides.gradient_accumulation_steps is not None
    if config.training.micro_batch == "fixed" or known or not (gang.alone or config.parallel.mode == _REPLICATED):
        return config
    cursor = Cursor(0, config.training.batch_size).share(gang.rank, gang.world_size)
    batch = workload.next_batch(spread.module, cursor)

    def fits(parts: int) -> bool:
        return try_micro_batch(workload, spread.module, batch, parts, has_state=bool(optimizer.state))

    def tell(text: str) -> None:
        if gang.rank == 0:
            print(f"before the first step: {text}", flush=True)

    accumulation = fitting_accumulation(config, gang, fits, tell=tell)
    if gang.rank == 0 and guards.store is not None:
        record_split(guards.store, generation=guards.generation, rank=0, accumulation=accumulation)
        reason = f"tried before the first step: {accumulation} micro-batches fit"
        guards.emit(GUARD, action=GuardAction.SPLIT, rank=0, accumulation=accumulation, reason=reason)
    return overridden(config, Overrides(gradient_accumulation_steps=accumulation))


def _growth_watches(gang: Gang, colocated_ranks: int) -> tuple[GrowthWatch, ...]:
    host = GrowthWatch(
        "memory", held=resident_bytes, left=host_bytes_left, sharers=max(1, colocated_ranks), now=time.monotonic
    )
    if gang.device.type != "cuda":
        return (host,)
    device = GrowthWatch(
        "memory of the GPU",
        held=lambda: float(torch.cuda.memory_allocated(gang.device)),
        left=lambda: float(torch.cuda.mem_get_info(gang.device)[0] + _cached_bytes(gang.device)),
        sharers=1,
        now=time.monotonic,
    )
    return host, device


def _cached_bytes(device: torch.device) -> int:
    """Taken from the device, and free for tensors."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
