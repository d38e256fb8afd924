"""Gangs whose ranks are threads of one process, connected by gloo, or by a process group of threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from ebbflow.training.gang import Gang

T = TypeVar("T")


def connect_gangs(world_size: int, seconds: float = 20.0) -> list[Gang]:
    """Connect one gang by gloo, and return it as each rank has it.

    Args:
        seconds: timeout of each collective.
    """
    store = dist.HashStore()

    def connect(rank: int) -> Gang:
        gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gang", store), rank, world_size, timedelta(seconds=seconds)
        )
        group = dist.ProcessGroup(store, rank, world_size)
        kind = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), kind, gloo)
        group._set_default_backend(kind)
        return Gang(rank=rank, world_size=world_size, group=group)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(connect, range(world_size)))


def call_on_ranks(
    world_size: int, work: Callable[[Gang], T], *, seconds: float = 20.0
) -> list[T | BaseException]:
    """Call `work` on all ranks at once. Return what each rank returned or raised, in rank order."""
    gangs = connect_gangs(world_size, seconds)
    with ThreadPoolExecutor(world_size) as pool:
        calls = [pool.submit(work, gang) for gang in gangs]
        errors = [call.exception() for call in calls]
        return [
            call.result() if error is None else error
            for call, error in zip(calls, errors, strict=True)
        ]


def call_in_process_group(world_size: int, work: Callable[[int], T]) -> list[T]:
    """Call `work` with each rank, in threads that share a process group for tensors on the CPU."""
    store = dist.HashStore()

    def call(rank: int) -> T:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            return work(rank)
        except BaseException as error:
            # So that the other threads do not wait for this one
            ProcessLocalGroup.exception_handle(error)
            raise
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    try:
        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(call, range(world_size)))
    finally:
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
