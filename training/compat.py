"""The places in which the supported releases of torch, 2.7 to 2.13, differ.

The key-value stores are here too, from the module that has type information for them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore", "all_gather_flat", "compile_module", "open_tcp_store"]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_HAS_RECOMPILE_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters


def all_gather_flat(gathered: Tensor, own: Tensor) -> None:
    """Gather every rank's tensor, one after the other, into `gathered`. Collective.

    Args:
        gathered: shape `[world_size * k]`.
        own: shape `[k]`.
    """
    _all_gather(gathered, own)


def open_tcp_store(host: str, port: int, world_size: int, **options: Any) -> TCPStore:
    """A `TCPStore`; with `master_listen_fd`, which libuv's server of torch 2.7 does not take, the older server."""
    try:
        return TCPStore(host, port, world_size, **options)
    except RuntimeError as error:
        if "listen fd" not in str(error):
            raise
        return TCPStore(host, port, world_size, use_libuv=False, **options)


def compile_module(module: nn.Module, *, recompile_limit: int) -> None:
    """Compile `module` in place at its first call, for the shapes of that call.

    Before torch had a limit for each module, the limit of the process is raised instead.
    """
    if _HAS_RECOMPILE_LIMIT:
        module.compile(dynamic=False, recompile_limit=recompile_limit)
        return
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, recompile_limit)
    module.compile(dynamic=False)
