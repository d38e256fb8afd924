"""Notices that stand as agents start: who waits one out is there, is waited for, and is on the
bill.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import (
    GENERATION_ENDED,
    NODE_ENDED,
    NODE_HEARTBEAT,
    NODE_STARTED,
    NOTICE,
    STEP,
    Event,
    read_events,
)
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.cost.ledger.ledger import fold
from ebbflow.training.errors import GangError
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.membership import CoordinatorPeers, FollowerPeers
from ebbflow.training.launch.messages import CAUSES, GangSpec, RankOrder
from ebbflow.training.launch.transport import control_ports
from tests.support.flow import wait_until
from tests.support.gangs import KNOWN, SECRET, endless_gang, with_settings

NOTICE_STANDS = RankOrder(seconds=600.0, cause=CAUSES[2], node=1)


class Waiting:
    """A coordinator that calls the roll, and node 1, which has come and cannot start."""

    def __init__(self, folder: Path) -> None:
        run = f"waiting-{folder.name}"
        self.spec = GangSpec(
            job="job",
            run=run,
            attempt=0,
            node=0,
            nodes=2,
            processes_per_node=1,
            main_address="127.0.0.1",
            config=RunConfig(),
            store_uri=str(folder),
            prepared={},
            log_folder=str(folder),
            candidate_ports=control_ports(run, 0),
        )
        self.coordinator = CoordinatorPeers(self.spec, "a", SECRET)
        self.coordinator.announce_generation(7)
        self.opened: list[int] = []
        self.members: list[FollowerPeers] = []
        self.errors: list[str] = []

    def call_roll(self, deadline_seconds: float) -> threading.Thread:
        def call() -> None:
            try:
                self.coordinator.roll_call(deadline_seconds, never)
            except Exception as error:
                self.errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        own = replace(self.spec, node=1)
        self.members.append(
            FollowerPeers(
                own,
                "b",
                60,
                never,
                **KNOWN,
                pending_notice=NOTICE_STANDS,
                opened=self.opened.append,
            )
        )
        return thread


def never() -> bool:
    return False


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    waiting = Waiting(tmp_path)
    yield waiting
    for member in waiting.members:
        member.close()
    waiting.coordinator.close()


def test_the_start_waits_for_a_node_that_waits_out_its_notice(waiting: Waiting) -> None:
    """It has come, and knows for which generation, so that it can say what it costs."""
    thread = waiting.call_roll(60)
    [member] = waiting.members
    wait_until(
        "the generation", lambda: member.report_wait(NOTICE_STANDS) or waiting.opened, timeout=60
    )
    thread.join(1.0)
    assert thread.is_alive() and waiting.opened == [7]
    member.report_wait_over()
    thread.join(60)
    assert not thread.is_alive() and waiting.errors == []


def test_losing_a_machine_during_its_notice_wait_is_expected(waiting: Waiting) -> None:
    thread = waiting.call_roll(60)
    waiting.members[0].close()
    thread.join(60)
    assert (
        "node 1 (b) was lost while it waited out its spot interruption notice" in waiting.errors[0]
    )
    assert waiting.coordinator.leave_cause == NOTICE_STANDS.cause


def test_a_notice_without_an_end_is_waited_for_as_long_as_a_start_may_take(
    waiting: Waiting,
) -> None:
    thread = waiting.call_roll(2)
    thread.join(60)
    assert waiting.errors == [
        "roll-call: node 1 (b) still waits out its spot interruption notice, 2 s after all joined"
    ]


def test_a_rejoined_node_is_read_on_its_new_connection(waiting: Waiting) -> None:
    """It had no answer in time, while node 0 was busy or stood still."""
    done = threading.Event()
    own = replace(waiting.spec, node=1)

    def greet() -> None:
        while not done.wait(0.01):
            waiting.coordinator.admit_nodes()

    thread = threading.Thread(target=greet)
    thread.start()
    try:
        FollowerPeers(own, "b", 60, never, **KNOWN, pending_notice=NOTICE_STANDS).close()
        waiting.members.append(
            member := FollowerPeers(own, "b", 60, never, **KNOWN, opened=waiting.opened.append)
        )
        wait_until("the generation", lambda: member.poll() or waiting.opened, timeout=60)
    finally:
        done.set()
        thread.join(60)
    assert waiting.opened == [7] and waiting.coordinator.nodes == [0, 1]
    waiting.coordinator.roll_call(60, never)  # what it stood for before is not waited for


def stand(path: Path, seconds: float) -> None:
    path.write_text(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds)))


def events_of(spec: GangSpec) -> list[Event]:
    return read_events(Store.open(spec.store_uri).sub(job_prefix(spec.job)))


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event.name == name]


def of_node_1(folder: Path, own: GangSpec) -> GangSpec:
    """Its machine alone has a notice."""
    if own.node == 0:
        return own
    return with_settings(own, survival={"notice_file": str(folder / "notice-1")})


@pytest.mark.parametrize("gone", ["killed", "told to end"])
def test_the_bill_has_the_wait_of_node_0(gone: str, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    spec = replace(
        endless_gang(tmp_path, survival={"notice_file": str(notice), "standby": False}), nodes=1
    )
    stand(notice, 90)
    gang = LocalGang(spec, tmp_path / "gang", tmp_path / "output.log")
    wait_until("signs of life", lambda: named(events_of(spec), NODE_HEARTBEAT)[1:], timeout=60)
    gang.agents[0].send_signal(signal.SIGKILL if gone == "killed" else signal.SIGTERM)
    with pytest.raises(GangError):
        gang.wait(60)
    events = events_of(spec)
    assert [event.data["does"] for event in named(events, NOTICE)] == ["wait"] + ["leave"] * (
        gone != "killed"
    )
    assert (
        len(named(events, NODE_ENDED)) == len(named(events, GENERATION_ENDED)) == (gone != "killed")
    )
    lived = max(
        event.data["seconds"] for event in events if event.name in (NODE_HEARTBEAT, NODE_ENDED)
    )
    assert fold(events).paid_rank_seconds == pytest.approx(lived, abs=0.001) and lived > 0.5


def test_a_member_lost_during_its_wait_is_billed_as_an_interruption(
    tmp_path: Path,
) -> None:
    spec = endless_gang(
        tmp_path, survival={"notice_file": str(tmp_path / "none"), "standby": False}
    )
    stand(tmp_path / "notice-1", 90)
    gang = LocalGang(
        spec, tmp_path / "gang", tmp_path / "output.log", alter=lambda own: of_node_1(tmp_path, own)
    )

    def beats(node: int) -> list[Event]:
        heartbeats = named(events_of(spec), NODE_HEARTBEAT)
        return [heartbeat for heartbeat in heartbeats if heartbeat.node == node]

    wait_until("signs of life of both", lambda: beats(0)[1:] and beats(1)[1:], timeout=60)
    gang.agents[1].kill()
    with pytest.raises(GangError, match="spot") as error:
        gang.wait(60)
    assert error.value.outcome == "interrupted"
    bill = {node.node.node: node.node.paid_seconds for node in fold(events_of(spec)).nodes}
    assert bill[1] >= beats(1)[-1].data["seconds"] > 0 and bill[0] > 0


def test_a_gang_starts_in_the_attempt_in_which_a_member_has_waited_out_its_notice(
    tmp_path: Path,
) -> None:
    """The notice's time is over as it starts, and nothing has come of it."""
    spec = endless_gang(
        tmp_path, survival={"notice_file": str(tmp_path / "none"), "standby": False}
    )
    stand(tmp_path / "notice-1", 0)
    gang = LocalGang(
        spec, tmp_path / "gang", tmp_path / "output.log", alter=lambda own: of_node_1(tmp_path, own)
    )
    try:
        wait_until("steps", lambda: named(events_of(spec), STEP), timeout=120)
    finally:
        gang.kill()
    events = events_of(spec)
    assert sorted(event.node for event in named(events, NODE_STARTED)) == [0, 1], (
        "each once, in the one generation"
    )
    assert [(event.node, event.data["does"]) for event in named(events, NOTICE)] == [(1, "wait")]
    assert {event.generation for event in events} == {1}
