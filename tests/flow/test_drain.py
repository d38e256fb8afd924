"""From a notice to ranks that leave: what is ordered, what the record of the ranks says, and what
they make of it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import NOTICE
from ebbflow.infra.instance import ENDPOINT_VARIABLE
from ebbflow.infra.notices import rehearse_notice
from ebbflow.training.launch import preemption as preemption_module
from ebbflow.training.launch.agent_messages import decode, encode
from ebbflow.training.launch.messages import CAUSES, GangSpec, OrderRecord, RankOrder
from ebbflow.training.launch.preemption import Drain
from ebbflow.training.limits import Limits, Stop
from tests.support.flow import wait_until
from tests.support.imds import FakeMetadata

MakeDrain = Callable[..., Drain]


class Post:
    """Other nodes that say back what they are told, as a coordinator does."""

    def __init__(self) -> None:
        self.told: list[RankOrder] = []
        self._waiting: list[RankOrder] = []

    def order(self, order: RankOrder) -> None:
        self.told.append(order)
        self._waiting.append(decode(json.loads(json.dumps(encode(order)))))

    def orders(self) -> list[RankOrder]:
        waiting = self._waiting
        self._waiting = []
        return waiting


@pytest.fixture
def make_drain(tmp_path: Path) -> Iterator[MakeDrain]:
    made: list[Drain] = []

    def make(**sections: dict[str, Any]) -> Drain:
        config = RunConfig.model_validate(
            {"survival": {"notice_file": str(tmp_path / "metaflow")}, **sections}
        )
        spec = GangSpec(
            job="job",
            run="run",
            attempt=0,
            node=1,
            nodes=2,
            processes_per_node=1,
            main_address="127.0.0.1",
            config=config,
            store_uri=str(tmp_path),
            prepared={},
            log_folder=str(tmp_path),
        )
        made.append(Drain(spec))
        return made[-1]

    yield make
    for drain in made:
        drain.close()


def attend(drain: Drain, post: Post, events: list[dict[str, Any]]) -> list[RankOrder]:
    drain.forward_orders(
        post, lambda name, **data: events.append({"name": name, **data}) if name == NOTICE else None
    )
    return post.told


def outlive(drain: Drain, longest_seconds: float) -> str:
    assert drain.find_pending(longest_seconds) is not None
    return drain.wait_out_notices(lambda seconds: "")


def leave_notice(folder: Path, seconds: float) -> None:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
    (folder / "metaflow").write_text(moment)


def limits_of(control: OrderRecord) -> Limits:
    return Limits(None, world_size=1, elapsed_seconds=lambda: 0.0, control=control)


def test_the_earliest_of_several_notices_sets_the_drain_and_its_reason(
    make_drain: MakeDrain, tmp_path: Path
) -> None:
    drain = make_drain(checkpoint={"stop_seconds": 30.0})
    post = Post()
    events = []
    limits = limits_of(OrderRecord(drain.create_order_record(tmp_path)))
    attend(drain, post, events)
    assert (limits.stop(), limits.stop_seconds, drain.leaving) == (Stop.NONE, math.inf, False)

    rehearse_notice(drain.rehearsal_path, action="terminate", seconds=120)
    wait_until("the order", lambda: attend(drain, post, events), timeout=60)
    assert limits.stop() is Stop.INTERRUPTED and drain.leaving
    # 10 s are kept back of the notice, and 2 s to end the process
    assert 90 < limits.stop_seconds <= 108
    drain.on_signal()
    attend(drain, post, events)
    assert limits.stop() is Stop.INTERRUPTED and 20 < limits.stop_seconds <= 28
    drain.on_signal()
    attend(drain, post, events)
    assert len(post.told) == 2, "a signal that comes again says nothing new"
    assert limits.describe(Stop.INTERRUPTED) == "asked to leave (rehearsed notice to node 1)"
    assert [(event["source"], event["action"], event["does"]) for event in events] == [
        ("rehearsal", "terminate", "leave"),
        ("signal", "leave", "leave"),
    ]
    assert events[0]["seconds_left"] == pytest.approx(120, abs=15)
    assert events[0]["save_seconds"] == pytest.approx(110, abs=15)


def test_a_rehearsed_notice_ends_the_machine_at_its_time(
    make_drain: MakeDrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its ranks are doing then."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: killed.append(what))
    drain = make_drain()
    post = Post()
    events = []
    rehearse_notice(drain.rehearsal_path, action="terminate", seconds=0.5)
    wait_until("the order", lambda: attend(drain, post, events), timeout=60)
    assert post.told[0].seconds == 0.0
    wait_until("the end", lambda: attend(drain, post, events) and killed, timeout=60)
    assert killed[0] == (os.getpid(), signal.SIGKILL)


def test_a_coordinator_without_answer_costs_no_save(make_drain: MakeDrain, tmp_path: Path) -> None:
    drain = make_drain(checkpoint={"stop_seconds": 30.0})
    post = Post()
    post.orders = list  # type: ignore[method-assign]
    limits = limits_of(OrderRecord(drain.create_order_record(tmp_path)))
    drain.on_signal()
    attend(drain, post, [])
    assert not limits.drain_requested, "the coordinator has a moment to tell all nodes alike"
    wait_until("the word", lambda: attend(drain, post, []) and limits.drain_requested, timeout=60)
    assert (
        20 < limits.stop_seconds <= 28
        and limits.describe(Stop.INTERRUPTED) == "asked to leave (SIGTERM)"
    )


def test_a_drain_order_holds_for_ranks_that_start_later(
    make_drain: MakeDrain, tmp_path: Path
) -> None:
    drain = make_drain(checkpoint={"stop_seconds": 30.0})
    post = Post()
    drain.on_signal()
    assert drain.leaving and drain.cause == "SIGTERM"
    attend(drain, post, [])
    time.sleep(0.2)
    later = limits_of(OrderRecord(drain.create_order_record(tmp_path)))
    assert later.drain_requested and later.stop_seconds <= 27.8


@pytest.mark.parametrize(
    ("setting", "does"), [("save", "save"), ("leave", "leave"), ("nothing", "nothing")]
)
def test_a_recommendation_alone_saves_unless_set_otherwise(
    setting: str, does: str, make_drain: MakeDrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeMetadata() as service:
        service.recommend_rebalance()
        monkeypatch.setenv(ENDPOINT_VARIABLE, service.address)
        drain = make_drain(survival={"on_rebalance": setting})
        post = Post()
        events = []
        limits = limits_of(OrderRecord(drain.create_order_record(tmp_path)))
        wait_until("the notice", lambda: attend(drain, post, events) or events, timeout=60)
    assert [event["does"] for event in events] == [does]
    assert (limits.stop() is Stop.INTERRUPTED) == (does == "leave") == drain.leaving
    assert [limits.save_wanted(), limits.save_wanted()] == [does == "save", False]


def test_a_notice_from_before_the_start_is_waited_out_and_then_ignored(
    make_drain: MakeDrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an attempt meets it that comes to the machine which the one before had to leave."""
    monkeypatch.setattr(preemption_module, "STALE_SECONDS", 0.5)
    began = time.monotonic()
    leave_notice(tmp_path, 2)
    drain = make_drain()
    post = Post()
    events = []
    assert outlive(drain, 60) == "" and 1 < time.monotonic() - began < 50
    limits = limits_of(OrderRecord(drain.create_order_record(tmp_path)))
    attend(drain, post, events)
    assert (drain.leaving, post.told, limits.stop()) == (False, [], Stop.NONE)
    assert [(event["source"], event["does"]) for event in events] == [("metaflow", "wait")]
    drain.on_signal()
    attend(drain, post, events)
    assert drain.leaving and drain.cause == "SIGTERM"
    assert limits.stop() is Stop.INTERRUPTED and 20 < limits.stop_seconds <= 28


def test_waiting_out_a_notice_is_no_drain_and_is_recorded_at_once(
    make_drain: MakeDrain, tmp_path: Path
) -> None:
    """Others are met meanwhile; and of a machine that goes while it waits nothing is recorded
    later.
    """
    leave_notice(tmp_path, 40)
    drain = make_drain()
    events = []
    left = []

    def meanwhile(seconds: float) -> str:
        drain.record_pending(lambda name, **data: events.append((data["source"], data["does"])))
        left.append((seconds, drain.leaving))
        return "node 1 was told to leave"

    standing = drain.find_pending(60)
    assert (
        standing is not None
        and 30 < standing.seconds <= 51
        and standing.cause == CAUSES[3]
        and not drain.leaving
    )
    assert drain.wait_out_notices(meanwhile).startswith(
        "node 1 was told to leave, and this machine is going away in "
    )
    assert events == [("metaflow", "wait")] and [leaving for _, leaving in left] == [False]
    assert 30 < left[0][0] <= 51


def test_the_later_of_two_pending_notices_is_waited_out_too(
    make_drain: MakeDrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the time of one cannot be read, say, and the machine goes by the other."""
    monkeypatch.setattr(preemption_module, "STALE_SECONDS", 0.5)
    leave_notice(tmp_path, 2)
    with FakeMetadata() as service:
        began = time.monotonic()
        service.interrupt(4)
        monkeypatch.setenv(ENDPOINT_VARIABLE, service.address)
        drain = make_drain()
        events = []
        assert outlive(drain, 60) == "" and time.monotonic() - began > 3
        attend(drain, Post(), events)
    assert sorted(event["source"] for event in events if event["does"] == "wait") == [
        "metadata",
        "metaflow",
    ]
    assert not drain.leaving


def test_a_notice_with_time_to_train_does_not_delay_the_start(
    make_drain: MakeDrain, tmp_path: Path
) -> None:
    leave_notice(tmp_path, 100)
    drain = make_drain()
    post = Post()
    assert drain.find_pending(60) is None
    assert [order.cause for order in attend(drain, post, [])] == [CAUSES[3]] and drain.leaving


def test_a_node_that_waits_out_a_notice_ends_on_request(
    make_drain: MakeDrain, tmp_path: Path
) -> None:
    leave_notice(tmp_path, 60)
    drain = make_drain()
    drain.on_signal()
    assert outlive(drain, 100).startswith("SIGTERM, and this machine is going away in ")


def test_notices_of_an_excluded_node_are_ignored(make_drain: MakeDrain, tmp_path: Path) -> None:
    drain = make_drain()
    post = Post()
    post.order(RankOrder(seconds=60.0, cause=CAUSES[2], node=2))
    attend(drain, post, [])
    assert drain.leaving
    drain.forget_nodes([2])
    post.order(RankOrder(seconds=50.0, cause=CAUSES[1], node=2))
    attend(drain, post, [])
    limits = limits_of(OrderRecord(drain.create_order_record(tmp_path)))
    assert (drain.leaving, drain.cause, limits.stop()) == (False, "", Stop.NONE)
    post.order(RankOrder(seconds=50.0, cause=CAUSES[2], node=3))
    attend(drain, post, [])
    assert drain.leaving and limits.stop() is Stop.INTERRUPTED


def test_a_record_keeps_what_came_first_as_the_cause(tmp_path: Path) -> None:
    control = OrderRecord.create(tmp_path / "record")
    control.write(RankOrder(seconds=100.0, cause=CAUSES[2], node=3))
    control.write(RankOrder(seconds=50.0, cause=CAUSES[1], node=0))
    control.write(RankOrder(seconds=70.0, cause=CAUSES[1], node=0))
    seen = OrderRecord(tmp_path / "record")
    assert seen.cause == "spot interruption notice to node 3"
    assert 40 < seen.leave_at - time.monotonic() <= 50
