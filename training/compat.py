"""One interface to the supported releases of torch, 2.7 to 2.13, where their interfaces differ.

The classes of torch's key-value stores are imported from here too: torch's private module has their type information,
its public module does not.
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


def all_gather_flat(gathered: Tensor, own: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write every rank's tensor into `gathered`, in the order of the ranks. Collective.

    Args:
        gathered: receives the result; shape `[world_size * k]`.
        own: this rank's tensor; shape `[k]`.
    """
    _all_gather(gathered, own, group=group)


def open_tcp_store(host: str, port: int, world_size: int, **options: Any) -> TCPStore:
    """Open a `TCPStore`.

    The libuv server of torch 2.7 refuses the option `master_listen_fd`; then the store uses torch's older server.
    """
    try:
        return TCPStore(host, port, world_size, **options)
    except RuntimeError as error:
        if "listen fd" not in str(error):
            raise
        return TCPStore(host, port, world_size, use_libuv=False, **options)


def compile_module(module: nn.Module, *, recompile_limit: int) -> None:
    """Compile `module` in place when it is first called, for the shapes of that call.

    Args:
        recompile_limit: how often the module may be compiled. Older releases of torch have no limit per module; there
            the limit of the whole process is raised to this number.
    """
    if _HAS_RECOMPILE_LIMIT:
        module.compile(dynamic=False, recompile_limit=recompile_limit)
        return
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, recompile_limit)
    module.compile(dynamic=False)
