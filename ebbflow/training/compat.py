"""One interface to functions of torch that differ between its releases, from 2.7 on.

Import the classes of torch's key-value stores from this module: only torch's private module has
type information for them.
"""

import inspect
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

# Torch's; the functions below are public too
__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]

# Collective: writes every rank's tensor, the second argument, of shape `[k]`, into the first, of
# shape `[world_size * k]`. Renamed in torch 2.13.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_HAS_RECOMPILE_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters


def open_tcp_store(host: str, port: int, world_size: int, **options: Any) -> TCPStore:
    """Open a `TCPStore`.

    Use torch's older server if the libuv server of torch 2.7 refuses `master_listen_fd`.
    """
    try:
        return TCPStore(host, port, world_size, **options)
    except RuntimeError as error:
        if "listen fd" not in str(error):
            raise
        return TCPStore(host, port, world_size, use_libuv=False, **options)


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the timeout of a group's collectives. torch has no public function for groups of a device
    mesh.
    """
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def compile_module(module: nn.Module, *, recompile_limit: int) -> None:
    """Compile `module` in place, limiting recompilations.

    In torch 2.7, the limit applies to the whole process.
    """
    if _HAS_RECOMPILE_LIMIT:
        module.compile(dynamic=False, recompile_limit=recompile_limit)
        return
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, recompile_limit)
    module.compile(dynamic=False)
