"""How one model is spread over the ranks: replicated (DDP), sharded (FSDP2), or whole when there is only one.

The engine sees `Spread`: a model to call, the module that holds the parameters, and when gradients are reduced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from infra.config.schema import RunConfig
from training.gang import Gang
from training.weights import initialise
from training.workload import Workload

# Below this, FSDP2 keeps parameters gathered from forward to backward, and whole gradients between micro-batches, which
# it then reduces once per step. Above, both go back to shards at once: they are the memory that sharding is to save.
_SMALL_MODEL_BYTES = 2**30


@dataclass(frozen=True)
class Spread:
    """model: what to call, with the hooks that reduce gradients. module: the bare module, for saving and hashing."""

    model: nn.Module
    module: nn.Module
    gang: Gang
    reduce_once: bool = True

    @contextmanager
    def gradients(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch: gradients are reduced over ranks with the `last`."""
        if isinstance(self.model, DistributedDataParallel) and not last:
            with self.model.no_sync():
                yield
            return
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last or not self.reduce_once)
            self.model.set_is_last_backward(last)
        yield

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The model in evaluation mode, without gradients. Forward passes must be as many on every rank."""
        self.module.eval()
        try:
            with torch.no_grad():
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
        norms = torch.stack(torch._foreach_norm([gradient for gradient in gradients if gradient.numel()]))
        # Replicas hold the same gradient each, shards a part of it.
        copies = 1 if isinstance(self.model, FSDPModule) else self.gang.world_size
        return norms.double().square().sum() / copies


def make_mesh(gang: Gang, *, shard: int) -> DeviceMesh:
    """The one mesh (replicate, shard): shard = 1 is DDP, shard = world size FSDP2, anything between HSDP."""
    shape = (gang.world_size // shard, shard)
    return init_device_mesh(gang.device.type, shape, mesh_dim_names=("replicate", "shard"))


def spread_model(workload: Workload, config: RunConfig, gang: Gang) -> Spread:
    """The workload's model with its initial weights, which are bit-identical in every mode and at any world size.

    One rank alone needs neither mode, unless FSDP2 is to do its mixed precision.
    """
    module = workload.model()
    blank = copy.deepcopy(module)
    small = 4 * sum(parameter.numel() for parameter in module.parameters()) <= _SMALL_MODEL_BYTES
    if config.parallel.mode == "fsdp2" and (not gang.alone or config.fsdp.use_mixed_precision):
        mesh = make_mesh(gang, shard=gang.world_size)["shard"]
        policy = _policy(mixed_precision=config.fsdp.use_mixed_precision)
        for unit in workload.units(module):
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=not small)
        fully_shard(module, mesh=mesh, mp_policy=policy)
    module.to_empty(device=gang.device)
    initialise(module, blank, seed=config.training.seed)
    model = module
    if config.parallel.mode == "ddp" and not gang.alone:
        group = make_mesh(gang, shard=1)["replicate"].get_group()
        # The weights are equal already, by seed or by commit, so that nothing needs to be broadcast.
        model = DistributedDataParallel(
            module, process_group=group, forward_sync_buffers=False, gradient_as_bucket_view=True, init_sync=False
        )
    return Spread(model, module, gang, reduce_once=small)


def _policy(*, mixed_precision: bool) -> MixedPrecisionPolicy:
    if not mixed_precision:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
