"""Join a rank to its gang (all ranks that train together), and exchange data between the ranks."""

import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ebbflow.core.json_values import JsonObject
from ebbflow.training.compat import (
    FileStore,
    PrefixStore,
    Store,
    all_gather_flat,
    open_tcp_store,
)
from ebbflow.training.errors import RendezvousError
from ebbflow.training.launch.devices import DeviceChoice, VisibleGpus, assign_gpus, detect_gpus
from ebbflow.training.launch.transport import is_loopback
from ebbflow.training.network_probe import (
    Link,
    find_own_address,
    probe_links,
    summarize_links,
    time_all_reduce,
)

_SIGN_SECONDS = 5.0  # between two signs of life of a rank that works while others wait
_SIGNS = "signs of life"  # key of their number


@dataclass(frozen=True, kw_only=True)
class Gang:
    """One rank's place in its gang, and its connections to the other ranks."""

    rank: int = 0  # the number of this rank, from 0 to `world_size` - 1
    world_size: int = 1  # the number of ranks
    # The number of ranks on each node. Consecutive ranks share a node, as with torchrun
    ranks_per_node: int = 1
    # The device of this rank's model
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # For messages outside collectives; None without torchrun's environment
    store: Store | None = None
    group: dist.ProcessGroup | None = None  # for the exchanges; None for the default one
    collective_seconds: float | None = None  # the timeout of each collective; None: torch's default
    # What the probe of the network found (`training.network_probe`)
    network: JsonObject | None = None
    device_note: str = ""  # a message if GPUs remain unused or differ, else ""
    # Lowest compute capability of all ranks' GPUs, such as 8.0; None: the CPU
    capability: float | None = None

    @property
    def alone(self) -> bool:
        return self.world_size == 1

    def gather(self, row: Tensor) -> Tensor:
        """Gather each rank's row `[k]` into `[world_size, k]`, equal on every rank. Collective."""
        if self.alone:
            return row[None]
        rows = row.new_empty(self.world_size * row.numel())
        all_gather_flat(rows, row, group=self.group)
        return rows.view(self.world_size, -1)

    def gather_numbers(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        """Gather each rank's numbers as 64-bit floats; return one tuple per rank, in rank order.

        Collective.
        """
        if self.alone:
            return [tuple(map(float, numbers))]
        row = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return [tuple(values) for values in self.gather(row).tolist()]

    def announce(self, alive: Callable[[], object]) -> Callable[[], object]:
        """Return a function that a rank calls during long work, before it calls `await_ranks`.

        The function calls `alive`, and gives a sign of life to the ranks that already wait in
        `await_ranks`.
        """
        last = 0.0

        def announce() -> None:
            nonlocal last
            alive()
            if self.store is not None and time.monotonic() - last > _SIGN_SECONDS:
                last = time.monotonic()
                with contextlib.suppress(dist.DistError, RuntimeError):
                    self.store.add(_SIGNS, 1)

        return announce

    def await_ranks(self, stage: str, seconds: float, alive: Callable[[], object]) -> None:
        """Wait until all ranks have finished the work that is named `stage`.

        This is for work that takes longer the more bytes a rank reads. A collective would end at
        the deadline of a step, so the ranks meet in the key-value store. Raises RendezvousError if
        no working rank has given a sign of life (`announce`) for `seconds`. `alive` is called about
        each second, since the agent takes a silent rank for a hung one. Each stage of a generation
        needs a name of its own. Collective.
        """
        if self.alone or self.store is None:
            return
        keys = [f"{stage}/{number}" for number in range(self.world_size)]
        pause = 0.01
        # Each look reads a key of each rank
        longest_pause = min(1.0, 0.05 * math.ceil(self.world_size / 16))
        signs = -1
        heard = time.monotonic()
        try:
            self.store.set(keys[self.rank], "")
            while not self.store.check(keys):
                alive()
                now = self.store.add(_SIGNS, 0)
                if now != signs:
                    signs = now
                    heard = time.monotonic()
                if time.monotonic() - heard > seconds:
                    where = (
                        f"to the end of {stage}, and none gave a sign of life for {seconds:.0f} s"
                    )
                    raise _missing_ranks(self.store, keys, self.rank, where)
                time.sleep(pause)
                pause = min(2 * pause, longest_pause)
        except (dist.DistError, RuntimeError) as error:
            raise _lost_store(self.rank) from error


def connect(
    *,
    start_seconds: float,
    collective_seconds: float,
    generation: str,
    device_choice: DeviceChoice = "auto",
    promised_gpus: int = 0,
    kept: Path | None = None,
    keys_path: Path | None = None,
) -> Gang:
    """Join the gang that torchrun's environment variables describe.

    If they are not set, return a gang of one rank.

    Args:
        start_seconds: deadline for all ranks to join.
        collective_seconds: timeout of each collective.
        generation: prefix of this gang's keys in the key-value store.
        promised_gpus: number of GPUs that each node should have; 0 if unknown.
        kept: folder that outlives this start. A mark in it makes later starts skip the network
            probe.
        keys_path: file of the key-value store, in a folder that only this user can enter, for a
            gang on one machine; None: a server at MASTER_ADDR and MASTER_PORT.

    Raises:
        RendezvousError: ranks are missing, or nodes cannot reach each other; the message names
            them.
        DeviceUnavailable: the ranks cannot use the configured device.
    """
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    own_gpus = detect_gpus(device_choice, promised=promised_gpus)
    seen = [own_gpus]
    store = None
    links = None
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    began = time.monotonic()
    if "MASTER_ADDR" in os.environ:
        if keys_path is not None:
            # torch's server has no authentication: any user of the machine could read its keys
            opened: Store = FileStore(str(keys_path), world_size)
        else:
            opened = _open_store(os.environ, rank, world_size, start_seconds)
        store = PrefixStore(generation, opened)
        seen = _roll_call(store, rank, world_size, start_seconds, own_gpus)
    assigned = assign_gpus(seen, device_choice)
    device = torch.device("cpu")
    if assigned.indices is not None:
        device = torch.device("cuda", assigned.indices[rank if store is not None else 0])
        torch.cuda.set_device(device)
    if store is not None:
        store.set_timeout(timedelta(seconds=start_seconds))
        _stay_on_loopback(os.environ["MASTER_ADDR"], os.environ)
        links = _probe(
            store, rank, world_size // per_node, per_node, generation, kept, start_seconds
        )
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=collective_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    network = None
    if links is not None:
        speed = time_all_reduce(device, world_size)
        network = summarize_links(
            links, nodes=world_size // per_node, seconds=time.monotonic() - began
        )
        network["all_reduce_bytes_per_second"] = speed
    return Gang(
        rank=rank,
        world_size=world_size,
        ranks_per_node=per_node,
        device=device,
        store=store,
        collective_seconds=collective_seconds,
        network=network,
        device_note=assigned.note,
        capability=assigned.capability,
    )


def leave(code: int) -> NoReturn:
    """Exit at once with `code`, without the interpreter's clean-up.

    The clean-up would destroy the process group. That can block on a dead peer, and torch 2.13
    aborts in about one of ten such exits, even after an orderly end ("terminate called without an
    active exception").
    """
    for stream in (sys.stdout, sys.stderr):
        # The user's code may have closed it
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)


def time_waits(exclude: Callable[[float], object]) -> None:
    """Call `exclude` with the seconds of each wait for a collective in this thread.

    Waits in C++ are not seen: those of DDP, which waits at the end of the backward pass
    (`at_end_of_backward`).
    """
    original = dist.Work.wait
    thread = threading.get_ident()

    def wait(work: dist.Work, *limits: Any, **options: Any) -> Any:
        began = time.monotonic()
        try:
            return original(work, *limits, **options)
        finally:
            if threading.get_ident() == thread:
                exclude(time.monotonic() - began)

    dist.Work.wait = wait  # type: ignore[method-assign]


def at_end_of_backward(loss: Tensor, call: Callable[[], object]) -> None:
    """Call `call` when this rank has computed its gradients, before DDP waits for those of the
    other ranks.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    loss.register_hook(lambda _: engine.queue_callback(call))


def disconnect() -> None:
    """Destroy the process group. Call this only after an orderly end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _probe(
    store: Store,
    rank: int,
    nodes: int,
    per_node: int,
    name: str,
    kept: Path | None,
    start_seconds: float,
) -> list[Link] | None:
    """Probe the network between several machines (`probe_links`), unless an earlier start of this
    attempt did.
    """
    main = os.environ["MASTER_ADDR"]
    if nodes < 2 or is_loopback(main):
        return None
    if kept is None:
        mark = None
    else:
        mark = kept / "network-probed"
    if rank == 0:
        store.set("probe", "no" if mark is not None and mark.exists() else "yes")
    if store.get("probe") != b"yes":
        return None
    address = find_own_address(main, int(os.environ["MASTER_PORT"]), start_seconds)
    links = probe_links(
        store, rank // per_node, nodes, address=address, name=name, lead=rank % per_node == 0
    )
    if rank == 0:
        store.set("probed", "no" if links is None else "yes")
        with contextlib.suppress(OSError):
            if mark is not None and links is not None:
                mark.touch()
    # Rank 0 decides, because either all ranks time the all-reduce or none does
    if store.get("probed") == b"yes":
        return links or []
    return None


def _open_store(
    environment: Mapping[str, str], rank: int, world_size: int, seconds: float
) -> Store:
    """Connect to the gang's key-value store.

    Torchrun's agent serves it if there is one, otherwise rank 0 does.
    """
    host = environment["MASTER_ADDR"]
    port = int(environment["MASTER_PORT"])
    kept_by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = rank == 0 and not kept_by_agent
    try:
        return open_tcp_store(
            host,
            port,
            world_size,
            is_master=is_master,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,  # `_roll_call` does this, and names the missing ranks
            multi_tenant=True,
            master_listen_fd=_loopback_listener(host, port) if is_master else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        if kept_by_agent:
            keeper = "torchrun's agent"
        else:
            keeper = "rank 0"
        raise RendezvousError(
            f"rank {rank}: {keeper} did not answer at {host}:{port} within {seconds:g} s, so "
            f"rank 0 counts as missing ({' '.join(str(error).split())[:200]}); fix: look at its "
            "log, and at firewalls between the nodes"
        ) from error


def _loopback_listener(host: str, port: int) -> int | None:
    """Return the descriptor of a listening loopback socket for the key-value store, or None.

    By default torch's server listens on every interface, so any process that can reach it may read
    and write keys. Return None if the ranks are on several machines, or if the port is taken, which
    torch then reports.
    """
    if not is_loopback(host):
        return None
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[4][:2], family=address[0], backlog=1024).detach()
    except OSError:
        return None


def _stay_on_loopback(host: str, environment: MutableMapping[str, str]) -> None:
    """Make gloo and NCCL use the loopback interface if all ranks are on this machine and the user
    set no interface.
    """
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if is_loopback(host) and name is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.setdefault(variable, name)


def _roll_call(
    store: Store, rank: int, world_size: int, seconds: float, own_gpus: VisibleGpus
) -> list[VisibleGpus]:
    keys = [f"joined/{number}" for number in range(world_size)]
    store.set(keys[rank], own_gpus.to_json())
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except (dist.DistError, RuntimeError) as error:
        where = f"within {seconds:g} s (cluster.start_deadline_seconds)"
        raise _missing_ranks(store, keys, rank, where) from error
    return [VisibleGpus.from_json(text) for text in store.multi_get(keys)]


def _missing_ranks(store: Store, keys: Sequence[str], rank: int, where: str) -> RendezvousError:
    """Return an error that names the ranks whose key is not in the store, for a rank that waited
    for them.
    """
    try:
        missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
    except (dist.DistError, RuntimeError):
        return _lost_store(rank)
    return RendezvousError(
        f"rank {rank}: {len(keys) - len(missing)} of {len(keys)} ranks came {where}; missing: rank "
        f"{', '.join(missing)}; fix: look at the logs of the missing ranks first"
    )


def _lost_store(rank: int) -> RendezvousError:
    return RendezvousError(
        f"rank {rank}: the key-value store does not answer, so the process that serves it "
        "(torchrun's agent or rank 0) has ended; fix: look at its log first"
    )
