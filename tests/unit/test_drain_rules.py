"""A node's drain: what a notice or signal becomes, which notices are waited out, and when an order
is due.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.infra import notices
from ebbflow.infra.notices import Notice, NoticeSource, rehearse_notice
from ebbflow.training.launch import messages, preemption
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.heartbeat import HeartbeatReading
from ebbflow.training.launch.messages import GangSpec, OrderRecord, RankOrder
from ebbflow.training.launch.preemption import Drain, may_be_repeated, seconds_until_expired
from tests.support.clock import StandingClock
from tests.support.flow import wait_until
from tests.support.imds import INTERRUPTION_PATH, FakeMetadata

METAFLOW = "Metaflow's notice of a spot interruption"
REBALANCE = "rebalance recommendation"
MARGIN_SECONDS = 8.0
STOP_SECONDS = 20.0
SAVE_SECONDS = 50.0


class Agent:
    """What a drain has around it: the clock, node 0's orders, the event log and the notice file."""

    def __init__(self, folder: Path, clock: StandingClock) -> None:
        self.folder = folder
        self.clock = clock
        self.sent: list[RankOrder] = []
        self.coming: list[RankOrder] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.notice_file = folder / "spot_termination_notice"
        self.drains: list[Drain] = []

    def open(self, **survival: Any) -> Drain:
        """The drain of node 1, after the first look at its sources."""
        known = {
            "notice_file": str(self.notice_file),
            "notice_margin_seconds": MARGIN_SECONDS,
            **survival,
        }
        checkpoint = {"stop_seconds": STOP_SECONDS, "deadline_seconds": SAVE_SECONDS}
        config = RunConfig(survival=known, checkpoint=checkpoint)
        spec = GangSpec(
            job="job",
            run="run",
            attempt=0,
            node=1,
            nodes=2,
            processes_per_node=1,
            main_address="127.0.0.1",
            config=config,
            store_uri=str(self.folder),
            prepared={},
            log_folder=str(self.folder / "job" / "logs"),
        )
        drain = Drain(spec)
        self.drains.append(drain)
        return drain

    def write_notice(self, seconds: float) -> None:
        """Of Metaflow's monitor: the machine ends so many seconds from now."""
        moment = datetime.fromtimestamp(self.clock.time() + seconds, UTC)
        self.notice_file.write_text(moment.isoformat())

    def rehearse(self, drain: Drain, *, action: str, seconds: float) -> None:
        """Write a rehearsed notice, and wait until the drain's sources have it."""
        rehearse_notice(drain.rehearsal_path, action=action, seconds=seconds)
        self.clock.seconds += 1.0  # the next look is due
        wait_until("the notice", lambda: not drain.rehearsal_path.exists(), timeout=60, pause=0.01)

    def emit(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]

    def order(self, order: RankOrder) -> None:
        self.sent.append(order)

    def orders(self) -> list[RankOrder]:
        orders = self.coming
        self.coming = []
        return orders

    def forward(self, drain: Drain, *orders: RankOrder) -> None:
        """Pass these orders of node 0 on, and report what is new to it."""
        self.coming += orders
        drain.forward_orders(self, self.emit)  # type: ignore[arg-type]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    agent = Agent(tmp_path, StandingClock(monkeypatch, notices, preemption, messages))
    yield agent
    for drain in agent.drains:
        drain.close()


def to_leave(seconds: float, cause: str = METAFLOW, node: int = 1) -> RankOrder:
    return RankOrder(seconds=seconds, cause=cause, node=node)


SAVE = to_leave(float("inf"), REBALANCE, 2)


def notice_of(source: NoticeSource, action: str = "terminate", ends_at: float = 0.0) -> Notice:
    return Notice(source=source, action=action, ends_at=ends_at)


@pytest.mark.parametrize(
    ("notice", "repeated"),
    [
        (notice_of(NoticeSource.METADATA), True),
        (notice_of(NoticeSource.METAFLOW), True),
        (notice_of(NoticeSource.REHEARSAL), False),
        (notice_of(NoticeSource.METADATA, "rebalance"), False),
        (notice_of(NoticeSource.SIGNAL, "leave"), False),
    ],
)
def test_only_a_real_notice_that_takes_the_machine_may_be_repeated(
    notice: Notice, repeated: bool
) -> None:
    assert may_be_repeated(notice) is repeated


@pytest.mark.parametrize(
    ("ends_in", "seconds"), [(5.0, 15.0), (-9.0, 1.0), (-10.0, 0.0), (-11.0, 0.0)]
)
def test_a_notice_expires_ten_seconds_after_its_time(
    ends_in: float, seconds: float, agent: Agent
) -> None:
    notice = notice_of(NoticeSource.METADATA, ends_at=agent.clock.seconds + ends_in)
    assert seconds_until_expired(notice) == seconds


def test_a_signal_is_an_order_to_leave_within_the_stop_timeout(agent: Agent) -> None:
    drain = agent.open()
    assert not drain.leaving and drain.cause == ""
    signalled_at = agent.clock.seconds
    drain.on_signal()
    agent.clock.seconds += 2.0
    drain.on_signal()  # a second signal moves nothing
    assert drain.leaving and drain.cause == "SIGTERM"
    agent.forward(drain)
    agent.forward(drain)
    assert agent.sent == [to_leave(STOP_SECONDS - 2.0, "SIGTERM")]
    assert agent.named("notice") == [
        {
            "at": (StandingClock.EPOCH + signalled_at, signalled_at),
            "source": "signal",
            "action": "leave",
            "seconds_left": STOP_SECONDS - 2.0,
            "save_seconds": STOP_SECONDS - 2.0,
            "does": "leave",
            "detail": "",
        }
    ]


def test_a_notice_is_an_order_to_leave_a_margin_before_its_time(agent: Agent) -> None:
    agent.write_notice(60.0)
    drain = agent.open()
    assert drain.find_pending(5.0) is None
    assert drain.leaving and drain.cause == f"{METAFLOW} to node 1"
    agent.clock.seconds += 0.5
    agent.forward(drain)
    assert agent.sent == [to_leave(60.0 - 0.5 - MARGIN_SECONDS)]
    [event] = agent.named("notice")
    assert (event["seconds_left"], event["save_seconds"], event["does"]) == (59.5, 51.5, "leave")
    assert str(agent.notice_file) in event["detail"]


@pytest.mark.parametrize(("seconds", "left"), [(10.5, 1.5), (8.5, 0.0)])
def test_a_notice_within_its_margin_is_due_now(seconds: float, left: float, agent: Agent) -> None:
    drain = agent.open()
    agent.rehearse(drain, action="terminate", seconds=seconds)
    wait_until("the notice", lambda: drain.leaving, timeout=60, pause=0.01)
    agent.forward(drain)
    assert agent.sent == [to_leave(left, "rehearsed notice")]


@pytest.mark.parametrize(
    ("on_rebalance", "seconds", "does"),
    [
        ("save", float("inf"), "save"),
        ("leave", SAVE_SECONDS, "leave"),
        ("nothing", None, "nothing"),
    ],
)
def test_a_rebalance_recommendation_acts_as_configured(
    on_rebalance: str,
    seconds: float | None,
    does: str,
    agent: Agent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with FakeMetadata() as service:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.address)
        service.recommend_rebalance()
        drain = agent.open(on_rebalance=on_rebalance)
        assert drain.find_pending(600.0) is None
    agent.forward(drain)
    assert agent.sent == ([] if seconds is None else [to_leave(seconds, REBALANCE)])
    assert drain.leaving is (does == "leave")
    assert drain.cause == (f"{REBALANCE} to node 1" if does == "leave" else "")
    [event] = agent.named("notice")
    assert (event["source"], event["action"], event["seconds_left"]) == (
        "metadata",
        "rebalance",
        None,
    )
    assert (event["save_seconds"], event["does"]) == (
        SAVE_SECONDS if does == "leave" else None,
        does,
    )


def test_the_first_local_drain_order_holds_until_node_0_answers(agent: Agent) -> None:
    drain = agent.open()
    drain.on_signal()
    assert drain.leaving
    agent.rehearse(drain, action="terminate", seconds=100.0)
    wait_until(
        "both notices", lambda: agent.forward(drain) or len(agent.sent) == 2, timeout=60, pause=0.01
    )
    assert drain.cause == "SIGTERM"
    agent.forward(drain, SAVE)
    assert drain.cause == "SIGTERM", "an order to save is no cause to leave"
    agent.forward(drain, to_leave(9.0, METAFLOW, node=0))
    assert drain.cause == f"{METAFLOW} to node 0"


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("SIGTERM", "SIGTERM"),
        ("a lost node is back", "a lost node is back"),
        (METAFLOW, f"{METAFLOW} to node 2"),
    ],
)
def test_a_cause_names_its_node_where_a_machine_is_meant(
    cause: str, text: str, agent: Agent
) -> None:
    drain = agent.open()
    agent.forward(drain, to_leave(9.0, cause, node=2))
    assert drain.cause == text


# Pending notices: those that are there before the ranks start.


@pytest.mark.parametrize(("longest_seconds", "pending"), [(40.0, True), (39.5, False)])
def test_a_notice_is_waited_out_unless_there_is_time_to_train(
    longest_seconds: float, pending: bool, agent: Agent
) -> None:
    agent.write_notice(30.0)
    drain = agent.open()
    order = drain.find_pending(longest_seconds)
    assert order == (to_leave(40.0) if pending else None)
    assert drain.leaving is not pending
    drain.record_pending(agent.emit)
    drain.record_pending(agent.emit)
    events = agent.named("notice")
    assert [event["does"] for event in events] == (["wait"] if pending else [])
    assert drain.record_notices(agent.emit) == (
        [] if pending else [to_leave(30.0 - MARGIN_SECONDS)]
    )


def test_of_two_pending_notices_the_sooner_one_counts(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    moment = datetime.fromtimestamp(agent.clock.time() + 100.0, UTC).isoformat()
    agent.write_notice(30.0)
    with FakeMetadata(
        {INTERRUPTION_PATH: json.dumps({"action": "stop", "time": moment})}
    ) as service:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.address)
        drain = agent.open()
        assert drain.find_pending(60.0) == to_leave(40.0)
    drain.record_pending(agent.emit)
    assert {event["source"] for event in agent.named("notice")} == {"metadata", "metaflow"}


def test_without_a_notice_the_ranks_may_start(
    agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    drain = agent.open()
    assert drain.find_pending(float("inf")) is None and not drain.leaving
    assert drain.wait_out_notices(lambda seconds: "not called") == ""
    assert "the notice has expired" not in printed(capsys)


def test_a_notice_that_has_expired_meanwhile_keeps_no_rank_from_starting(agent: Agent) -> None:
    agent.write_notice(-9.0)
    drain = agent.open()
    wait_until("the notice", lambda: drain.leaving, timeout=60, pause=0.01)
    agent.clock.seconds += 1.5
    assert drain.find_pending(600.0) is None


def test_a_pending_notice_is_waited_out(agent: Agent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.write_notice(30.0)
    drain = agent.open()
    assert drain.find_pending(600.0) is not None
    began = agent.clock.seconds
    left: list[float] = []
    assert drain.wait_out_notices(lambda seconds: left.append(seconds) or "") == ""
    assert agent.clock.seconds - began == pytest.approx(40.1, abs=0.11)
    assert left[:2] == pytest.approx([40.0, 39.9]) and left[-1] == pytest.approx(0.0, abs=0.11)
    assert not drain.leaving and drain.record_notices(agent.emit) == []
    output = printed(capsys)
    assert (
        f"node 1: this machine is going away in 30 s ({METAFLOW}): no rank is started before that"
        in output
    )
    assert "node 1: the notice has expired and this machine is still there: starting" in output
    assert output.count("going away") == 1


@pytest.mark.parametrize("why", ["SIGTERM", "the gang has ended"])
def test_a_wait_for_a_notice_ends_for_a_reason(
    why: str, agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.write_notice(30.0)
    drain = agent.open()
    drain.find_pending(600.0)
    asked: list[float] = []

    def meanwhile(seconds: float) -> str:
        asked.append(seconds)
        if why == "SIGTERM":
            drain.on_signal()
        if why == "SIGTERM":
            return ""
        return why

    assert drain.wait_out_notices(meanwhile) == f"{why}, and this machine is going away in 30 s"
    assert asked == [40.0]
    assert "the notice has expired" not in printed(capsys)
    assert drain.leaving is (why == "SIGTERM")


def test_after_the_wait_a_notice_is_an_order_again(agent: Agent) -> None:
    drain = agent.open()
    drain.find_pending(600.0)
    drain.wait_out_notices(lambda seconds: "")
    agent.write_notice(60.0)
    agent.clock.seconds += 1.0
    wait_until("the notice", lambda: drain.leaving, timeout=60, pause=0.02)


# Orders of node 0.


def test_an_order_of_node_0_is_passed_on_to_the_ranks(agent: Agent) -> None:
    drain = agent.open()
    record = OrderRecord(drain.create_order_record(agent.folder))
    agent.forward(drain, SAVE)
    assert (record.saves, record.leave_at, drain.leaving) == (1, float("inf"), False)
    agent.forward(drain, to_leave(30.0, METAFLOW, node=0))
    assert record.leave_at == agent.clock.seconds + 30.0 and record.cause == f"{METAFLOW} to node 0"
    assert drain.leaving and agent.sent == []
    assert not record.ending
    drain.announce_end()
    assert record.ending


def test_an_agent_without_ranks_announces_no_end(agent: Agent) -> None:
    drain = agent.open()
    drain.announce_end()
    agent.forward(drain, to_leave(30.0))
    assert drain.leaving


def test_ranks_that_start_later_get_the_orders_that_still_apply(agent: Agent) -> None:
    drain = agent.open()
    agent.forward(drain, SAVE, to_leave(30.0, METAFLOW, node=2))
    due = agent.clock.seconds + 30.0
    agent.clock.seconds += 12.0
    path = drain.create_order_record(agent.folder)
    assert path == agent.folder / "node-1.control"
    record = OrderRecord(path)
    assert (record.saves, record.leave_at, record.cause) == (0, due, f"{METAFLOW} to node 2")


def test_the_orders_of_nodes_that_are_left_out_are_forgotten(agent: Agent) -> None:
    drain = agent.open()
    agent.forward(drain, to_leave(30.0, node=2), to_leave(35.0, "a lost node is back", node=0))
    drain.forget_nodes([3])
    assert drain.leaving and drain.cause == f"{METAFLOW} to node 2"
    drain.forget_nodes([2])
    assert not drain.leaving and drain.cause == ""
    agent.forward(drain, to_leave(30.0, node=2), to_leave(30.0, node=3))
    assert not drain.leaving, "sent before they were left out"
    agent.forward(drain, to_leave(30.0, node=0))
    assert drain.leaving


def test_drain_orders_keep_their_time_after_nodes_are_excluded(agent: Agent) -> None:
    drain = agent.open()
    group = ranks(agent, alive=True)
    agent.forward(drain, SAVE, to_leave(10.0, node=2), to_leave(25.0, node=0))
    drain.forget_nodes([2])
    agent.clock.seconds += 55.0
    assert drain.find_overstaying_ranks(group) == []
    agent.clock.seconds += 0.5
    assert len(drain.find_overstaying_ranks(group)) == 1


def test_a_local_drain_order_holds_when_all_others_are_cleared(agent: Agent) -> None:
    drain = agent.open()
    drain.on_signal()
    assert drain.leaving
    agent.forward(drain, to_leave(10.0, node=2))
    drain.forget_nodes([2])
    group = ranks(agent, alive=True)
    agent.clock.seconds += STOP_SECONDS + 30.0
    assert drain.find_overstaying_ranks(group) == []
    agent.clock.seconds += 0.5
    assert len(drain.find_overstaying_ranks(group)) == 1


def ranks(agent: Agent, *, alive: bool) -> Any:
    """A group of rank 3, which has ended, and rank 4, which may be alive."""
    beat = HeartbeatReading(1, 17, "backward", agent.clock.seconds)

    def worker(rank: int, code: int | None) -> SimpleNamespace:
        return SimpleNamespace(rank=rank, beat=beat, process=SimpleNamespace(poll=lambda: code))

    return SimpleNamespace(workers=[worker(3, 0), worker(4, None if alive else 0)])


def test_a_rank_that_outlives_its_deadline_by_thirty_seconds_has_failed(agent: Agent) -> None:
    drain = agent.open()
    group = ranks(agent, alive=True)
    agent.clock.seconds += 1000.0
    assert drain.find_overstaying_ranks(group) == []
    agent.forward(drain, to_leave(12.0, node=0), to_leave(90.0, node=0))
    agent.clock.seconds += 42.0
    assert drain.find_overstaying_ranks(group) == []
    agent.clock.seconds += 0.5
    assert drain.find_overstaying_ranks(group) == [
        WorkerFailure(
            rank=4,
            node=1,
            message=f"asked to leave ({METAFLOW} to node 0) and still running 30 s after its deadline",
            hung=True,
            certainty="slow",
            timestamp=agent.clock.time(),
            step=17,
            phase="backward",
        )
    ]
    assert drain.find_overstaying_ranks(ranks(agent, alive=False)) == []


def test_a_node_acts_alone_when_node_0_has_not_answered_for_a_second(agent: Agent) -> None:
    drain = agent.open()
    record = OrderRecord(drain.create_order_record(agent.folder))
    began = agent.clock.seconds
    drain.on_signal()
    agent.forward(drain)
    agent.clock.seconds = began + 0.75
    agent.forward(drain)
    assert record.leave_at == float("inf")
    agent.clock.seconds = began + 1.0
    agent.forward(drain)
    assert record.leave_at == began + STOP_SECONDS and record.cause == "SIGTERM"


def test_a_later_notice_does_not_postpone_what_a_node_does_alone(agent: Agent) -> None:
    drain = agent.open()
    record = OrderRecord(drain.create_order_record(agent.folder))
    drain.on_signal()
    agent.forward(drain)
    agent.clock.seconds += 0.5
    agent.rehearse(drain, action="terminate", seconds=1000.0)
    wait_until(
        "both notices", lambda: agent.forward(drain) or len(agent.sent) == 2, timeout=60, pause=0.01
    )
    assert record.leave_at < float("inf")


def test_a_rehearsed_notice_ends_the_machine_at_its_time(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(
        preemption, "os", SimpleNamespace(kill=lambda *call: killed.append(call), getpid=lambda: 17)
    )
    drain = agent.open()
    ends_at = agent.clock.seconds + 60.0
    agent.rehearse(drain, action="terminate", seconds=60.0)
    wait_until("the notice", lambda: drain.leaving, timeout=60, pause=0.01)
    agent.rehearse(drain, action="stop", seconds=600.0)  # a later one does not postpone it
    wait_until(
        "both notices", lambda: agent.forward(drain) or len(agent.sent) == 2, timeout=60, pause=0.01
    )
    agent.clock.seconds = ends_at - 0.5
    agent.forward(drain)
    assert killed == []
    agent.clock.seconds = ends_at
    agent.forward(drain)
    assert killed == [(17, signal.SIGKILL)]


def test_a_real_notice_ends_no_machine_by_itself(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(
        preemption, "os", SimpleNamespace(kill=lambda *call: killed.append(call), getpid=lambda: 17)
    )
    agent.write_notice(5.0)
    drain = agent.open()
    drain.find_pending(0.0)
    agent.clock.seconds += 100.0
    agent.forward(drain)
    assert agent.sent and killed == []


def test_the_sources_are_reported_once(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    drain = agent.open()
    wait_until(
        "the sources",
        lambda: agent.forward(drain) or agent.named("notice_sources"),
        timeout=60,
        pause=0.01,
    )
    agent.forward(drain)
    absent = {"metadata": "AWS_EC2_METADATA_DISABLED is true"}
    assert agent.named("notice_sources") == [
        {"watched": ["metaflow", "rehearsal"], "absent": absent}
    ]


def test_a_service_that_answers_late_is_watched_from_then_on(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setattr(notices, "_FIRST_START_PAUSE_SECONDS", 0.01)
    with FakeMetadata() as service:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.address)
        service.token_status = 503
        drain = agent.open()

        def sources() -> list[dict[str, Any]]:
            agent.forward(drain)
            return agent.named("notice_sources")

        wait_until("what is missing", lambda: len(sources()) == 2, timeout=60, pause=0.01)
        service.token_status = 200
        service.interrupt(120)
        wait_until("the source", lambda: len(sources()) == 3, timeout=60, pause=0.01)
        wait_until("the order", lambda: drain.leaving, timeout=60, pause=0.01)
    absent, problem, gained = agent.named("notice_sources")
    why = f"{service.address} gives no token: status 503"
    assert absent == {"watched": ["metaflow", "rehearsal"], "absent": {"metadata": why}}
    assert problem == {"problem": f"metadata: {why}; asked again every 5 s"}
    assert gained == {"watched": ["metadata", "metaflow", "rehearsal"], "absent": {}}
    output = printed(capsys)
    assert output.count("notices may be missed") == 1
    assert "node 1: notices are now received from: metadata" in output


def test_a_source_that_fails_is_reported(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notices.MetaflowSource, "poll_seconds", 0.01)
    drain = agent.open(notice_file=str(agent.folder))  # a folder cannot be read

    def look() -> list[dict[str, Any]]:
        agent.forward(drain)
        return [event for event in agent.named("notice_sources") if "problem" in event]

    [event] = wait_until("the problem", look, timeout=60, pause=0.02)
    assert event["problem"].startswith(
        "metaflow: 5 requests in a row failed, the last: [Errno 21] Is a directory"
    )
    assert f"node 1: notices may be missed: {event['problem']}" in printed(capsys)


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    preemption.print_line("end")
    parts: list[str] = []
    wait_until(
        "the output",
        lambda: parts.append(capsys.readouterr().out) or "end\n" in "".join(parts),
        timeout=60,
        pause=0.01,
    )
    return "".join(parts)


def test_notices_are_printed_with_what_they_lead_to(
    agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    drain = agent.open()
    drain.on_signal()
    agent.forward(drain)
    agent.rehearse(drain, action="rebalance", seconds=float("inf"))
    wait_until(
        "the notice", lambda: agent.forward(drain) or len(agent.sent) == 2, timeout=60, pause=0.01
    )
    output = printed(capsys)
    assert "node 1: notice by signal: leave, 20 s left; the gang is to leave" in output
    assert "node 1: notice by rehearsal: rebalance; the gang is to save" in output


def test_a_closed_drain_looks_for_no_more_notices(agent: Agent) -> None:
    first = agent.open()
    second = agent.open()  # of the next attempt, in the same folder
    first.close()
    second.close()
    assert "notices" not in [thread.name for thread in threading.enumerate()]
