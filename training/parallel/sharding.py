"""FSDP2 and HSDP: each unit's parameters in shards, over all ranks or within groups that are replicated."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from infra.config.schema import FsdpConfig
from training.gang import Gang
from training.parallel.mesh import make_mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard_model(
    module: nn.Module, units: Iterable[nn.Module], fsdp: FsdpConfig, gang: Gang, *, size: int, keep_gathered: bool
) -> None:
    """In place, on the meta device. size: ranks that hold one copy; keep_gathered: from forward to backward."""
    mesh = make_mesh(gang, shard=size)
    options = {
        # Over one dimension alone, FSDP2 reduces in one step where HSDP's two would be the same.
        "mesh": mesh["shard"] if size == gang.world_size else mesh,
        "mp_policy": _precision(fsdp),
        # Pinned memory is for copies to a GPU. On a CPU shards are in host memory in any case.
        "offload_policy": CPUOffloadPolicy(pin_memory=gang.device.type == "cuda")
        if fsdp.cpu_offload
        else OffloadPolicy(),
    }
    for unit in units:
        fully_shard(unit, reshard_after_forward=not keep_gathered, **options)
    fully_shard(module, **options)


def _precision(fsdp: FsdpConfig) -> MixedPrecisionPolicy:
    if not fsdp.use_mixed_precision:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[fsdp.param_dtype], reduce_dtype=DTYPES[fsdp.reduce_dtype])
