"""DDP: the whole model on every rank, and what is sent of its gradients."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from infra.config.schema import DdpConfig
from training.gang import Gang
from training.parallel.mesh import make_mesh

_POWERSGD_RANK = 2
# torch demands two plain steps first, between which DDP would regroup its buckets.
_POWERSGD_PLAIN_STEPS = 2


def replicate_model(module: nn.Module, ddp: DdpConfig, gang: Gang) -> tuple[DistributedDataParallel, Compression]:
    """The weights are equal already, by seed or by commit, so that nothing is broadcast. Collective."""
    group = make_mesh(gang, shard=1)["replicate"].get_group()
    model = DistributedDataParallel(
        module,
        process_group=group,
        forward_sync_buffers=False,
        init_sync=False,
        find_unused_parameters=ddp.find_unused_parameters,
        static_graph=ddp.static_graph,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        bucket_cap_mb=ddp.bucket_cap_mb,
    )
    if not (ddp.static_graph or ddp.find_unused_parameters):
        _settle_buckets(model)
    return model, Compression(model, ddp.gradient_compression)


def _settle_buckets(model: DistributedDataParallel) -> None:
    """Let DDP make its final buckets now, by a backward pass through nothing but the parameters. Collective.

    It makes them after its first backward pass, in the order in which gradients came. Which rank's summand comes first
    depends on where an element lies in its bucket, and from three ranks on that shows in the last bit: a step that a
    resumed run takes first, and another one took later, would not be the same. With unused parameters sought, torch
    keeps its first buckets; a static graph would take this pass for a step.
    """
    model.reducer.prepare_for_forward()
    model.reducer.prepare_for_backward([])
    torch.stack([parameter.sum() for parameter in model.parameters() if parameter.requires_grad]).sum().backward()
    model.reducer._rebuild_buckets()
    model.zero_grad(set_to_none=True)


class Compression:
    """What stands between a bucket of gradients and the network.

    PowerSGD adds to each gradient what it left out of the one before, on every rank something else, and a commit does
    not hold that. So it begins anew behind every commit: a rank that restores one then stands where a rank that was
    not interrupted stands, at the price of one step's error and two uncompressed steps per commit.
    """

    def __init__(self, model: DistributedDataParallel, kind: str) -> None:
        self._group = model.process_group
        self._state: PowerSGDState | None = None
        if kind == "bfloat16":
            model.register_comm_hook(self._group, bf16_compress_hook)
        elif kind == "powersgd":
            self._state = self._fresh()
            model.register_comm_hook(self._state, powerSGD_hook)

    def begin_anew(self) -> None:
        if self._state is not None:
            fresh = self._fresh()
            for name in PowerSGDState.__slots__:
                setattr(self._state, name, getattr(fresh, name))

    def _fresh(self) -> PowerSGDState:
        return PowerSGDState(
            process_group=self._group,
            matrix_approximation_rank=_POWERSGD_RANK,
            start_powerSGD_iter=_POWERSGD_PLAIN_STEPS,
        )
