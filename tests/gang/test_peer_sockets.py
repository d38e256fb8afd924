"""Rows of numbers between ranks over connections of their own: the same table everywhere, and who
is missing named.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ebbflow.core.events import NETWORK, describe_network
from ebbflow.cost.report.figure_text import format_key_figures
from ebbflow.cost.report.report import build_report
from ebbflow.training.errors import RendezvousError
from ebbflow.training.gang import Gang
from ebbflow.training.launch.evidence import is_peer_loss_error
from ebbflow.training.network_probe import probe_links, summarize_links
from ebbflow.training.peer_sockets import PeerSockets, connect_peers
from tests.support.timelines import event


def open_wires(
    ranks: int,
    *,
    present: int | None = None,
    seconds: float = 60.0,
    start: float = 60.0,
    host: str = "127.0.0.1",
    told: dict[int, str] | None = None,
) -> list[PeerSockets]:
    """Of `ranks` ranks, the first `present` come; each in a thread with a client of its own. told:
    what each says of where it is to be found."""
    master = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )

    def one(rank: int) -> PeerSockets:
        client = dist.TCPStore(
            "127.0.0.1", master.port, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        return connect_peers(
            client, rank, ranks, main=(host, master.port), start_seconds=start, seconds=seconds
        )

    with ThreadPoolExecutor(ranks) as pool:
        wires = list(pool.map(one, range(present or ranks)))
    if told is not None:
        told |= {rank: master.get(str(rank)).decode() for rank in range(ranks)}
    return wires


def test_a_main_node_whose_name_leads_home_at_home_is_told_by_that_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As 127.0.1.1 for a host's own name: to another node that is another machine."""
    resolve = socket.getaddrinfo
    told = {}

    def look_up(host: str, *arguments: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if host == "node-0" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    wires = open_wires(2, host="node-0", told=told)
    assert [told[rank].split()[0] for rank in range(2)] == ["node-0", "node-0"]
    assert gather(wires, [b"0", b"1"]) == [b"01", b"01"]


def gather(wires: list[PeerSockets], rows: list[bytes]) -> list[bytes]:
    with ThreadPoolExecutor(len(wires)) as pool:
        return list(pool.map(lambda peers, row: peers.gather(row), wires, rows))


def in_gangs(call: Callable[[Gang, int], Any], ranks: int) -> list[Any]:
    """What `call` returns on each rank of a gang whose rows go over wires."""
    gangs = [
        Gang(rank=rank, world_size=ranks, peers=peers)
        for rank, peers in enumerate(open_wires(ranks))
    ]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(call, gangs, range(ranks)))


def test_every_rank_hears_the_same_rows_in_order_exchange_after_exchange() -> None:
    wires = open_wires(4)
    for number in range(50):
        rows = [bytes([rank, number, 7]) for rank in range(4)]
        assert gather(wires, rows) == [b"".join(rows)] * 4


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("length", [1, 16])
def test_numbers_come_as_they_were_told(ranks: int, length: int) -> None:
    told = [
        tuple([rank, 0.1 * rank, math.inf, 2.0**53 - rank] * 4)[:length] for rank in range(ranks)
    ]
    if ranks == 1:
        assert Gang().gather_numbers(told[0]) == told
    else:
        assert in_gangs(lambda gang, rank: gang.gather_numbers(told[rank]), ranks) == [told] * ranks


@pytest.mark.parametrize(
    "dtype, length",
    [(torch.float32, 1), (torch.int64, 3), (torch.bfloat16, 5), (torch.float64, 512)],
)
def test_a_row_keeps_its_type_and_length(dtype: torch.dtype, length: int) -> None:
    rows = [torch.arange(length).to(dtype) + rank for rank in range(2)]
    for table in in_gangs(lambda gang, rank: gang.gather(rows[rank]), 2):
        assert table.dtype == dtype and torch.equal(table, torch.stack(rows))


def test_a_rank_that_is_gone_is_told_as_a_lost_peer() -> None:
    here, gone = open_wires(2)
    gone.close()
    with pytest.raises(
        RuntimeError, match=r"exchange 1 of rank 0: connection closed by peer: rank 1"
    ) as told:
        here.gather(b"row")
    assert is_peer_loss_error(str(told.value))


def test_a_silent_rank_is_waited_for_no_longer_than_the_deadline() -> None:
    here, _silent = open_wires(2, seconds=0.2)
    with pytest.raises(RuntimeError, match=r"timed out waiting 0.2 s for rank 1") as told:
        here.gather(b"row")
    assert is_peer_loss_error(str(told.value))


def test_rows_of_different_exchanges_are_not_taken_for_each_other() -> None:
    wires = open_wires(2)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(peers.gather, bytes(1 + rank)) for rank, peers in enumerate(wires)]
    for call in calls:
        error = str(call.exception())
        assert "called another exchange" in error and is_peer_loss_error(error)


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(
        RendezvousError, match=r"rank 0: no connection of its own to rank (1, )?2 within 3 s"
    ):
        open_wires(3, present=2, start=3.0)


def connect_under(
    disturbance: Callable[[tuple[str, int]], AbstractContextManager],
) -> list[PeerSockets]:
    """Connect two ranks while something else calls at the address of rank 0."""
    master = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    main = ("127.0.0.1", master.port)
    found = []
    opened = threading.Thread(
        target=lambda: found.append(
            connect_peers(master, 0, 2, main=main, start_seconds=60, seconds=60)
        )
    )
    opened.start()
    client = dist.TCPStore(*main, wait_for_workers=False, timeout=timedelta(seconds=60))
    host, port = client.get("0").decode().split()
    with disturbance((host, int(port))):
        peer = connect_peers(client, 1, 2, main=main, start_seconds=60, seconds=60)
        opened.join(60)
    return [found[0], peer]


def test_callers_without_a_word_delay_no_peer() -> None:
    """100 idle connections at 5 s each are more than the 60 s of a start."""

    @contextmanager
    def idle_callers(address: tuple[str, int]) -> Iterator[None]:
        idle = [socket.create_connection(address) for _ in range(100)]
        yield
        for one in idle:
            one.close()

    assert gather(connect_under(idle_callers), [b"0", b"1"]) == [b"01", b"01"]


def test_a_stranger_is_sent_away() -> None:
    """A rank of an older gang, or a port scan, that connects before the others do."""

    @contextmanager
    def stranger(address: tuple[str, int]) -> Iterator[None]:
        with socket.create_connection(address) as caller:
            caller.sendall(b"\0\0\0\1" + b"another gang's ." + b"\0" * 8)
            yield
            with suppress(ConnectionResetError):
                assert caller.recv(1) == b""

    assert gather(connect_under(stranger), [b"0", b"1"]) == [b"01", b"01"]


def probe(store: dist.Store, nodes: int, broken: int | None = None) -> list[Any]:
    """One lead rank per node, and one rank that does not measure; each in a thread."""

    def one(rank: int) -> Any:
        node = rank % nodes
        if rank != broken:
            address = "127.0.0.1"
        else:
            address = "255.255.255.255"
        try:
            return probe_links(
                store, node, nodes, address=address, name="gang/1", lead=rank < nodes
            )
        except RendezvousError as error:
            return str(error)

    with ThreadPoolExecutor(nodes + 1) as pool:
        return list(pool.map(one, range(nodes + 1)))


def test_the_links_between_nodes_are_measured_and_a_node_that_cannot_be_reached_is_named() -> None:
    found = probe(dist.HashStore(), 3)
    assert all(links == found[0] for links in found)
    assert sorted((one.source, one.target) for one in found[0]) == [
        (a, b) for a in range(3) for b in range(3) if a != b
    ]
    assert all(
        one.round_trip > 0 and one.mtu > 1000 and abs(one.clock_offset) < 10 for one in found[0]
    )
    assert sorted((one.source, one.target) for one in found[0] if one.bandwidth) == [
        (0, 1),
        (1, 2),
        (2, 0),
    ]

    links = [replace(one, clock_offset=-3.0 if one.target == 2 else 0.001) for one in found[0]]
    links[0] = replace(links[0], bandwidth=1e6)
    figures = summarize_links(links, nodes=3, seconds=1.5)
    assert (figures["bandwidth_bytes_per_second"], figures["where"]["bandwidth"]) == (
        1e6,
        "node 0 → node 1",
    )
    assert figures["clock_offset_seconds"] == -3.0 and figures["where"]["clock_offset"].endswith(
        "node 2"
    )
    figures["all_reduce_bytes_per_second"] = 2e6
    assert describe_network(figures).startswith("all-reduce 2 MB/s, slowest link 1 MB/s, MTU ")

    told = probe(dist.HashStore(), 2, broken=1)
    assert (
        len(set(told)) == 1
        and told[0].startswith("node 0 cannot reach node 1: 255.255.255.255:")
        and "fix: " in told[0]
    )


def test_a_network_is_compared_with_the_jobs_earlier_probes() -> None:
    def probed(t: float, speed: float) -> Any:
        return event(
            NETWORK,
            t,
            nodes=2,
            mtu=9001,
            all_reduce_bytes_per_second=speed,
            clock_offset_seconds=-0.02,
        )

    once = build_report([probed(1.0, 4e9)])
    assert (
        format_key_figures(once)["network"]
        == "all-reduce 4,000 MB/s, MTU 9,001, clocks within 20 ms"
    )
    again = build_report([probed(1.0, 4e9), probed(2.0, 5e9), probed(3.0, 1e9)])
    assert format_key_figures(again)["network"].startswith(
        "all-reduce 1,000 MB/s (earlier 4,500, SLOW), MTU"
    )
    assert again.actual["network"]["before"]["probes"] == 2
