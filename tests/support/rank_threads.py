"""Gangs whose ranks are threads of one process, connected by the sockets of a real gang, or by a
process group.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from ebbflow.training.gang import Gang
from ebbflow.training.peer_sockets import PeerSockets

T = TypeVar("T")


@contextmanager
def connected_gangs(world_size: int) -> Iterator[list[Gang]]:
    """Return a context with the gang of each rank."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for lower, higher in combinations(range(world_size), 2):
            ends[lower][higher] = socket.create_connection(server.getsockname())
            ends[higher][lower], _ = server.accept()
    peers = [PeerSockets(rank, ends[rank], 20.0) for rank in range(world_size)]
    try:
        yield [
            Gang(rank=rank, world_size=world_size, peers=peers[rank]) for rank in range(world_size)
        ]
    finally:
        for connections in peers:
            connections.close()


def call_on_ranks(world_size: int, work: Callable[[Gang], T]) -> list[T | Exception]:
    """Call `work` on all ranks at once. Return what each rank returned or raised, in rank order."""
    with connected_gangs(world_size) as gangs, ThreadPoolExecutor(world_size) as pool:
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
