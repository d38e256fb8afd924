"""While a rank anywhere waits for the store, nobody is blamed for waiting for that rank."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

from ebbflow.core.config.schema import RunConfig
from ebbflow.training.launch.membership import CoordinatorPeers, FollowerPeers
from ebbflow.training.launch.messages import GangSpec, GenerationStart
from ebbflow.training.launch.transport import control_ports
from tests.support.gangs import KNOWN, SECRET

_DEADLINE_SECONDS = 60.0
FREE = {"terms": None, "rehearse": None, "hosts": ["zero", "1", "2"]}


def spec_of(folder: Path, node: int) -> GangSpec:
    return GangSpec(
        job="job",
        run="run",
        attempt=0,
        node=node,
        nodes=3,
        processes_per_node=1,
        main_address="127.0.0.1",
        config=RunConfig(store=str(folder)),
        store_uri=str(folder),
        prepared={},
        log_folder=str(folder / "logs"),
        candidate_ports=control_ports(folder.name, 0),
    )


def test_a_store_wait_of_one_node_is_known_to_all(tmp_path: Path) -> None:
    coordinator = CoordinatorPeers(spec_of(tmp_path, 0), "zero", SECRET)
    calling = threading.Thread(
        target=coordinator.roll_call, args=(_DEADLINE_SECONDS, lambda: False)
    )
    calling.start()
    members = [
        FollowerPeers(
            replace(spec_of(tmp_path, n)), f"{n}", _DEADLINE_SECONDS, lambda: False, **KNOWN
        )
        for n in (1, 2)
    ]
    calling.join(_DEADLINE_SECONDS)
    coordinator.start(
        GenerationStart(
            generation=1,
            generation_id="id",
            candidates=[],
            rendezvous_port=1,
            **FREE,
            nodes=[0, 1, 2],
        )
    )
    assert all(
        isinstance(member.await_start(_DEADLINE_SECONDS), GenerationStart) for member in members
    )
    try:
        assert not any(member.store_wait_active for member in (coordinator, *members))
        members[0].waiting()
        limit = time.monotonic() + _DEADLINE_SECONDS
        told = set()
        while len(told) < 3 and time.monotonic() < limit:
            assert all(member.poll() is None for member in (coordinator, *members))
            told |= {
                name
                for name, member in zip("012", (coordinator, *members), strict=True)
                if member.store_wait_active
            }
        assert told == {"0", "1", "2"}
    finally:
        for member in (*members, coordinator):
            member.close()
