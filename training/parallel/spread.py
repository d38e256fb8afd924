"""A model put together for training: built, sharded or replicated, and filled with its first weights.

The engine sees `Spread`: a model to call, the module that holds the parameters, and when gradients are reduced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from infra.config.schema import RunConfig
from infra.footprint import SMALL_MODEL_BYTES, shard_ranks
from training.errors import ParallelError
from training.gang import Gang
from training.parallel.refusals import Place, find_refusals
from training.parallel.replication import Compression, replicate_model
from training.parallel.sharding import DTYPES, shard_model
from training.parallel.units import autocast, compile_units, recompute_units
from training.weights.initialise import initialise, materialise
from training.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Spread:
    """model: what to call, with the hooks that reduce gradients. module: the bare module, for saving and hashing.

    copies: of the model, over all ranks. reduce_once: sharded gradients wait for the last micro-batch.
    """

    model: nn.Module
    module: nn.Module
    copies: int
    reduce_once: bool = True
    compiled: bool = False
    compression: Compression | None = None

    @contextmanager
    def gradients(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch: gradients are reduced over ranks with the `last`."""
        model = self.model
        # A static graph cannot begin with a backward pass that reduces nothing: torch fails an assertion. So it reduces
        # each time, in every step alike, or a resumed run would add in another order than one that was not interrupted.
        if isinstance(model, DistributedDataParallel) and not last and not model.static_graph:
            with model.no_sync():
                yield
            return
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last or not self.reduce_once)
            model.set_requires_all_reduce(last)  # between replicas once is enough in any case
            model.set_is_last_backward(last)
        yield

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The model in evaluation mode, without gradients. Forward passes must be as many on every rank.

        They are not compiled: few and of another size, they would each be compiled again.
        """
        self.module.eval()
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager") if self.compiled else nullcontext():
                yield self.module
        finally:
            self.module.train()
            for unit in self.module.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()  # what stays gathered until a backward pass would wait for one that never comes

    def gradient_tensors(self) -> list[Tensor]:
        """This rank's part of every gradient, as plain tensors that share the gradients' memory."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]

    def square_sum(self, gradients: list[Tensor]) -> Tensor:
        """This rank's share of the squared norm, float64: the shares of all ranks add up to the whole."""
        parts = [gradient for gradient in gradients if gradient.numel()]
        if not parts:  # fewer rows than ranks, in every parameter
            return torch.zeros((), dtype=torch.float64)
        norms = torch.stack(torch._foreach_norm(parts))
        # Each copy of the model has the same gradient, and its ranks a part of it each.
        return norms.double().square().sum() / self.copies

    def discarded(self) -> None:
        """To be called after a step whose gradients are thrown away: what was kept of them goes too."""
        if self.compression is not None:
            self.compression.begin_anew()

    def committed(self) -> None:
        """To be called after every save: what a commit does not hold must not outlive it."""
        if self.compression is not None:
            self.compression.begin_anew()


def spread_model(
    workload: Workload, config: RunConfig, gang: Gang, *, small_model_bytes: int = SMALL_MODEL_BYTES
) -> Spread:
    """The workload's model with its initial weights, which are bit-identical in every mode and at any world size.

    One rank alone needs no mode, unless FSDP2 is to do its mixed precision or offloading. Units are changed from the
    inside out: recompute, compile, then shard or replicate. Collective. Raises ParallelError for what cannot be done.
    """
    module = workload.model()
    blank, units = copy.deepcopy(module), list(workload.units(module))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    size = _checked_shard_size(config, gang, parameters)
    small = 4 * parameters <= small_model_bytes
    fsdp, sharded = config.fsdp, config.parallel.mode != "ddp"
    recompute_units(units, config.parallel.recompute)
    if config.parallel.compile:
        compile_units(units)
    if fsdp.use_mixed_precision and not sharded:
        autocast(module, gang.device.type, DTYPES[fsdp.param_dtype])
    if sharded and (not gang.alone or fsdp.use_mixed_precision or fsdp.cpu_offload):
        shard_model(module, units, fsdp, gang, size=size, keep_gathered=small)
    materialise(module, "cpu" if sharded and fsdp.cpu_offload else gang.device)
    initialise(module, blank, seed=config.training.seed)
    model, compression = module, None
    if not sharded and not gang.alone:
        model, compression = replicate_model(module, config.ddp, gang)
    return Spread(
        model=model,
        module=module,
        copies=gang.world_size // size,
        reduce_once=small,
        compiled=config.parallel.compile,
        compression=compression,
    )


def _checked_shard_size(config: RunConfig, gang: Gang, parameters: int) -> int:
    place = Place(
        ranks=gang.world_size,
        ranks_per_node=gang.ranks_per_node,
        gpu=gang.device.type == "cuda",
        parameters=parameters,
    )
    found = find_refusals(config, place)
    if found:
        raise ParallelError("; and ".join(map(str, found)))
    return shard_ranks(config, place.ranks, place.ranks_per_node)
