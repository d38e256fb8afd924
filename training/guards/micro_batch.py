"""How many micro-batches a step takes to fit into memory: tried before the first step, and corrected when one fails.

A rank that runs out of memory must not go on alone: its peers wait for it in the next collective, and a sharded model
is left half gathered. So it orders more micro-batches for the next start and ends. The batch, its samples and their
order stay; the gradient is the same sum in other parts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import nn

from infra.config.schema import RunConfig
from training.errors import BatchCannotBeSplit
from training.gang import Gang
from training.workload import Batch, Workload

# What AdamW keeps of each parameter. Before its first step the room for it is still to be found.
_OPTIMIZER_COPIES = 2
_HOST_SIGNS = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device, or of the host within a limit; the kernel's own killing is no exception and is seen by the agent."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _HOST_SIGNS)


def more_micro_batches(config: RunConfig, world_size: int, accumulation: int, *, factor: int = 2) -> int:
    """More than `accumulation`, and at least `factor` times as many: the next that divides a rank's samples evenly, or
    one sample each.

    Raises BatchCannotBeSplit with the arithmetic when there is one sample in each already, and where the next start
    would refuse more than one (`training.parallel.refusals`).
    """
    ddp = config.ddp
    if config.parallel.mode == "ddp" and ddp.static_graph and ddp.gradient_compression != "none":
        raise BatchCannotBeSplit(
            f"ddp.static_graph reduces gradients after each micro-batch, and ddp.gradient_compression "
            f"{ddp.gradient_compression} would compress what was compressed before, so that there can be only one; "
            "fix: set ddp.static_graph to false"
        )
    batch = config.training.batch_size
    samples = -(-batch // world_size)  # of the rank that has most
    if accumulation >= samples:
        raise BatchCannotBeSplit(
            f"training.batch_size {batch} / {world_size} ranks = {samples} samples per rank, in {accumulation} "
            "micro-batches of one sample each, which is the least there can be; fix: parallel.recompute full, "
            "parallel.mode fsdp2, fsdp.use_mixed_precision, a shorter model.sequence_length, or more memory"
        )
    even = (parts for parts in range(max(factor * accumulation, accumulation + 1), samples + 1) if samples % parts == 0)
    return next(even, samples)


def fitting_accumulation(
    config: RunConfig, gang: Gang, fits: Callable[[int], bool], *, tell: Callable[[str], None] = lambda text: None
) -> int:
    """The fewest micro-batches, from the configured number on, whose largest fits on all ranks. Collective.

    fits: tries one micro-batch of a step that is split into so many, on this rank alone. Raises BatchCannotBeSplit.
    """
    accumulation = config.training.gradient_accumulation_steps
    while True:
        own = torch.tensor([float(fits(accumulation))], dtype=torch.float64, device=gang.device)
        short = [rank for rank, fitted in enumerate(gang.gather(own).flatten().tolist()) if not fitted]
        if not short:
            return accumulation
        ranks = ", ".join(map(str, short[:5]))
        tell(f"a step in {accumulation} micro-batches does not fit into the memory of rank {ranks}")
        accumulation = more_micro_batches(config, gang.world_size, accumulation, factor=1)


def try_micro_batch(workload: Workload, module: nn.Module, batch: Batch, parts: int, *, has_state: bool) -> bool:
    """Whether forward and backward of the heaviest of `parts` micro-batches fit beside gradients and optimizer.

    The bare module is called, so that no other rank waits for this one. Gradients and buffers are as before
    afterwards. has_state: the optimizer has made its own already; else AdamW's is reckoned with.
    """
    part = max(batch.split(parts), key=lambda one: one.weight)
    buffers = [buffer.clone() for buffer in module.buffers()]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    ballast: list[torch.Tensor] = []
    try:
        if not has_state:
            ballast += [torch.empty_like(parameter) for parameter in trained for _ in range(_OPTIMIZER_COPIES)]
        workload.loss(module, part).sum.backward()
        return True
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        error.__traceback__ = None  # its frames hold the activations
        return False
    finally:
        ballast.clear()
        module.zero_grad(set_to_none=True)
        for buffer, before in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
