"""The probe of the network between nodes: measured links, own addresses, and comparison with earlier
probes.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from ebbflow.core.events import NETWORK, describe_network
from ebbflow.cost.report.figure_text import format_key_figures
from ebbflow.cost.report.report import build_report
from ebbflow.training.errors import RendezvousError
from ebbflow.training.network_probe import find_own_address, probe_links, summarize_links
from tests.support.timelines import event


@pytest.mark.parametrize(("host", "address"), [("node-0", "node-0"), ("127.0.0.1", "127.0.0.1")])
def test_a_main_node_whose_name_resolves_to_loopback_publishes_its_name(
    host: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other nodes resolve the name to a reachable address (127.0.1.1 is Debian's for the own name)."""
    resolve = socket.getaddrinfo

    def look_up(host: str, *arguments: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if host == "node-0" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert find_own_address(host, server.getsockname()[1], 5.0) == address


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
    assert sorted((link.source, link.target) for link in found[0]) == [
        (a, b) for a in range(3) for b in range(3) if a != b
    ]
    assert all(
        link.round_trip > 0 and link.mtu > 1000 and abs(link.clock_offset) < 10 for link in found[0]
    )
    assert sorted((link.source, link.target) for link in found[0] if link.bandwidth) == [
        (0, 1),
        (1, 2),
        (2, 0),
    ]

    links = [replace(link, clock_offset=-3.0 if link.target == 2 else 0.001) for link in found[0]]
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
