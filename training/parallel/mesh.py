"""The one mesh (replicate, shard) that every mode is a case of."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from training.gang import Gang


def make_mesh(gang: Gang, *, shard: int) -> DeviceMesh:
    """shard = 1 is DDP, shard = world size FSDP2, anything between HSDP. Ranks of one shard group are neighbours.

    Both dimensions are there in any case; `mesh["shard"]` and `mesh["replicate"]` are the parts. Collective.
    """
    if not dist.is_initialized():  # alone, and started without an environment that names a gang
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shape = (gang.world_size // shard, shard)
    return init_device_mesh(gang.device.type, shape, mesh_dim_names=("replicate", "shard"))
