"""The agents of a gang among themselves: who takes part, what node 0 decides, and how long each
side waits.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    KubernetesConfig,
    RunConfig,
)
from ebbflow.core.errors import Outcome
from ebbflow.core.events import EndReason
from ebbflow.training.errors import GangError
from ebbflow.training.launch import membership, roster
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.membership import CoordinatorPeers, FollowerPeers
from ebbflow.training.launch.messages import (
    CAUSES,
    RETURNED,
    SIGTERM,
    GangSpec,
    GenerationEnd,
    GenerationStart,
    RankOrder,
    RankResult,
)
from ebbflow.training.launch.replacements import replacements_of
from ebbflow.training.launch.roster import StickyFlag
from ebbflow.training.launch.transport import control_ports
from tests.support.clock import StandingClock
from tests.support.flow import wait_until
from tests.support.gangs import KNOWN, SECRET
from tests.support.rank_evidence import calls, failed, hung, seen

NOTICE = CAUSES[2]
DEADLINE_SECONDS = 60.0
INTERRUPTED = RankResult(outcome=Outcome.INTERRUPTED, step=7)
COMPLETED = RankResult(outcome=Outcome.COMPLETED, step=9)

# For each case: least nodes, orders (node, cause), what happens, and the verdict: again, nodes that
# are left out.
GOINGS_ON: dict[str, tuple[int | None, list[tuple[int, str]], Any, bool, list[int]]] = {
    "enough others go on": (2, [(1, NOTICE)], INTERRUPTED, True, [1]),
    "two leave, and one is enough": (1, [(2, NOTICE), (1, NOTICE)], INTERRUPTED, True, [1, 2]),
    "too few others": (3, [(1, NOTICE)], INTERRUPTED, False, []),
    "no least number": (None, [(1, NOTICE)], INTERRUPTED, False, []),
    "no order": (2, [], INTERRUPTED, False, []),
    "node 0 leaves": (1, [(0, NOTICE), (1, NOTICE)], INTERRUPTED, False, []),
    "a signal to another node": (1, [(1, NOTICE), (2, SIGTERM)], INTERRUPTED, False, []),
    "a signal after the notice of a node": (2, [(1, NOTICE), (1, SIGTERM)], INTERRUPTED, True, [1]),
    "the work is done": (2, [(1, NOTICE)], COMPLETED, False, []),
    "a failure that may be tried again": (
        2,
        [(1, NOTICE)],
        failed(0, error="ValueError"),
        True,
        [1],
    ),
    "a failure that may not": (2, [(1, NOTICE)], failed(0, error="DataError"), False, []),
    "a lost node": (2, [(1, NOTICE)], "lost", True, [1]),
    "a lost node without a notice": (2, [], "lost", True, []),
    "a lost node that all others follow": (3, [(1, SIGTERM)], "lost", True, []),
    "a lost node and too few others": (3, [], "lost", False, []),
    "a bad reader": (2, [], failed(2, error="UnreliableReader"), True, [2]),
    "a bad reader and too few others": (3, [], failed(2, error="UnreliableReader"), True, []),
    "a bad reader on node 0": (2, [], failed(0, error="UnreliableReader"), True, []),
    "a bad reader beside a node that leaves": (
        1,
        [(1, NOTICE)],
        failed(2, error="UnreliableReader"),
        True,
        [1],
    ),
}


class Gang:
    """The agents of a gang in one process. All but node 0 are followers by their number."""

    def __init__(self, folder: Path, clock: StandingClock) -> None:
        self.folder = folder
        self.clock = clock
        self.followers: dict[int, FollowerPeers] = {}
        self.opened: dict[int, list[int]] = {}
        self.stopped: Callable[[], bool] = never
        self._all: list[FollowerPeers] = []

    def open(
        self,
        nodes: int = 3,
        *,
        processes_per_node: int = 1,
        min_nodes: int | None = 2,
        notices: dict[int, RankOrder] | None = None,
        replacements: int = 0,
    ) -> CoordinatorPeers:
        """Start node 0's side and let all followers join."""
        cluster = ClusterConfig(
            min_nodes=min_nodes, expected_start_seconds=3.0, start_deadline_seconds=2.0
        )
        name = "-".join(self.folder.parts[-2:])
        self.spec = GangSpec(
            job="job",
            run=name,
            attempt=0,
            node=0,
            nodes=nodes,
            processes_per_node=processes_per_node,
            main_address="127.0.0.1",
            config=RunConfig(
                cluster=cluster,
                checkpoint=CheckpointConfig(stop_seconds=25.0),
                kubernetes=KubernetesConfig(node_replacements=replacements),
            ),
            store_uri="store",
            prepared={},
            log_folder="logs",
            candidate_ports=control_ports(name, 0),
        )
        self.coordinator = CoordinatorPeers(self.spec, "host-0", SECRET)
        if nodes > 1:
            joining = [self.join(node, (notices or {}).get(node)) for node in range(1, nodes)]
            while any(thread.is_alive() for thread in joining):
                self.coordinator.admit_nodes()
                time.sleep(0.002)
        return self.coordinator

    def join(self, node: int, notice: RankOrder | None = None) -> threading.Thread:
        opened = self.opened[node] = []

        def call() -> None:
            follower = FollowerPeers(
                replace(self.spec, node=node),
                f"host-{node}",
                DEADLINE_SECONDS,
                lambda: self.stopped(),
                **KNOWN,
                pending_notice=notice,
                opened=opened.append,
            )
            self.followers[node] = follower
            self._all.append(follower)

        thread = threading.Thread(target=call)
        thread.start()
        return thread

    def start(self, nodes: Sequence[int] | None = None, generation: int = 1) -> GenerationStart:
        """Start a generation, of which all followers that take part hear."""
        self.coordinator.roll_call(DEADLINE_SECONDS, never)
        own = list(self.coordinator.nodes if nodes is None else nodes)
        start = GenerationStart(
            generation=generation,
            generation_id=f"id-{generation}",
            candidates=[],
            rendezvous_port=1,
            terms=None,
            rehearse=None,
            hosts=self.coordinator.hosts(own),
            nodes=own,
        )
        self.coordinator.start(start)
        for node in own[1:]:
            assert self.followers[node].await_start(DEADLINE_SECONDS) == start
        return start

    def verdict(self) -> GenerationEnd:
        """Node 0's, once it has one and the others have heard it; time passes meanwhile."""

        def look() -> GenerationEnd | None:
            self.clock.seconds += 0.25
            return self.coordinator.poll()

        end = wait_until("the verdict", look, timeout=60, pause=0.002)
        for node in self.coordinator.nodes[1:]:
            told = wait_until("the verdict", self.followers[node].poll, timeout=60, pause=0.002)
            assert told == replace(
                end, ranks=list(end.ranks), at=list(end.at), left_out=list(end.left_out)
            )
        return end

    def settle(self) -> None:
        """Let node 0 act on all that was sent to it, while no time passes."""
        for _ in range(20):
            assert self.coordinator.poll() is None
            time.sleep(0.001)

    def close(self) -> None:
        for follower in self._all:
            follower.close()
        self.coordinator.close()


def never() -> bool:
    return False


@pytest.fixture
def gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gang]:
    gang = Gang(tmp_path, StandingClock(monkeypatch, membership, roster))
    yield gang
    gang.close()


def to_leave(node: int, cause: str = NOTICE, seconds: float = 30.0) -> RankOrder:
    return RankOrder(seconds=seconds, cause=cause, node=node)


def heard(follower: FollowerPeers) -> list[RankOrder]:
    def look() -> list[RankOrder]:
        assert follower.poll() is None
        return follower.orders()

    return wait_until("an order", look, timeout=60, pause=0.002)


# Small parts.


def test_a_flag_holds_for_its_seconds_after_each_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StandingClock(monkeypatch, roster)
    flag = StickyFlag(3.0)
    assert not flag.holds
    flag.mark()
    clock.seconds += 2.5
    assert flag.holds
    flag.mark()
    clock.seconds += 2.75
    assert flag.holds
    clock.seconds += 0.25
    assert not flag.holds


@pytest.mark.parametrize(
    ("jobset", "configured", "replacements"), [(True, 2, 2), (False, 2, 0), (True, 0, 0)]
)
def test_lost_nodes_are_replaced_within_a_jobset_alone(
    jobset: bool, configured: int, replacements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if jobset:
        monkeypatch.setenv("METAFLOW_KUBERNETES_JOBSET_NAME", "js")
    assert replacements_of(KubernetesConfig(node_replacements=configured)) == replacements


def test_a_gang_of_one_node_opens_no_port(gang: Gang) -> None:
    coordinator = gang.open(1)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", gang.spec.candidate_ports[0]))
    coordinator.roll_call(0.0, never)
    assert (coordinator.nodes, coordinator.hosts([0]), coordinator.announce_wait(5.0)) == (
        [0],
        ["host-0"],
        "",
    )
    gang.start()
    coordinator.report_results({0: COMPLETED})
    end = coordinator.poll()
    assert end is not None and end.outcome is not None and end.outcome.step == 9


# The roll-call, and waits before the start.


def test_the_connected_nodes_take_part_by_their_numbers(gang: Gang) -> None:
    coordinator = gang.open(4)
    assert coordinator.nodes == [0, 1, 2, 3]
    assert coordinator.hosts([0, 3, 1]) == ["host-0", "host-3", "host-1"]
    gang.start()
    gang.followers[2].close()
    wait_until(
        "its loss",
        lambda: coordinator.keep_in_touch() or coordinator.nodes != [0, 1, 2, 3],
        timeout=60,
        pause=0.01,
    )
    assert coordinator.nodes == [0, 1, 3]


def test_all_followers_get_the_number_of_the_next_generation(gang: Gang) -> None:
    coordinator = gang.open(2)
    [follower] = gang.followers.values()
    follower.poll()
    assert gang.opened[1] == []
    coordinator.announce_generation(5)
    wait_until(
        "the number",
        lambda: follower.poll() is None and gang.opened[1] == [5],
        timeout=60,
        pause=0.002,
    )


def ended_after(gang: Gang, follower: FollowerPeers, deadline_seconds: float = 1.0) -> float:
    """Seconds until a follower gives up waiting for the start."""
    began = gang.clock.seconds
    end = follower.await_start(deadline_seconds)
    assert isinstance(end, GenerationEnd) and end.reason == EndReason.NODE_LOST
    assert (
        end.culprit == f"node 0 was lost before the start: no start within {deadline_seconds:g} s"
    )
    return gang.clock.seconds - began


def test_a_follower_waits_for_the_start_until_its_deadline(gang: Gang) -> None:
    gang.open(2)
    assert ended_after(gang, gang.followers[1]) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("seconds", "until"), [(3.0, 4.5), (0.0, 1.5), (-3.0, 1.5)])
def test_an_announced_wait_moves_a_followers_deadline(
    seconds: float, until: float, gang: Gang
) -> None:
    """Node 0 announces it after half a second, and the follower's own deadline is 1 s."""
    coordinator = gang.open(2)
    began = gang.clock.seconds

    def announce() -> bool:
        if began + 0.5 <= gang.clock.seconds < began + 1.0:
            coordinator.announce_wait(seconds)
        return False

    gang.stopped = announce
    assert ended_after(gang, gang.followers[1]) == pytest.approx(until, abs=0.1)


def test_a_wait_is_announced_at_most_once_per_second(gang: Gang) -> None:
    coordinator = gang.open(2)
    coordinator.announce_wait(0.5)
    gang.clock.seconds += 0.75
    coordinator.announce_wait(20.0)  # too soon to be sent
    assert ended_after(gang, gang.followers[1]) == pytest.approx(1.5, abs=0.02)
    coordinator.announce_wait(1.0)
    gang.clock.seconds += 1.0
    coordinator.announce_wait(1.5)
    assert ended_after(gang, gang.followers[1]) == pytest.approx(2.5, abs=0.02)


def test_followers_get_a_wait_message_while_node_0_is_busy(gang: Gang) -> None:
    coordinator = gang.open(2)
    began = gang.clock.seconds

    def stay_busy() -> bool:
        if began + 0.5 <= gang.clock.seconds < began + 1.0:
            coordinator.keep_in_touch()
        return False

    gang.stopped = stay_busy
    assert ended_after(gang, gang.followers[1]) == pytest.approx(1.5, abs=0.1)


def test_a_follower_stopped_before_the_start_reports_it(gang: Gang) -> None:
    gang.open(2)
    gang.stopped = lambda: True
    end = gang.followers[1].await_start(5.0)
    assert isinstance(end, GenerationEnd)
    assert (end.reason, end.failed_as) == ("agent_stopped", "interrupted")
    assert end.culprit.startswith("asked to stop (this node)")


def test_a_follower_that_loses_node_0_before_the_start_reports_it(gang: Gang) -> None:
    coordinator = gang.open(2)
    began = gang.clock.seconds
    coordinator.close()
    end = gang.followers[1].await_start(3600.0)
    assert isinstance(end, GenerationEnd) and end.reason == "node_lost"
    assert end.culprit == "node 0 was lost before the start: connection closed"
    assert gang.clock.seconds - began < 3600.0
    end = gang.followers[1].poll()
    assert isinstance(end, GenerationEnd)
    assert (end.culprit, end.reason) == ("node 0 was lost: connection closed", "node_lost")


def test_a_late_follower_gets_the_gangs_result_instead_of_a_start(gang: Gang) -> None:
    coordinator = gang.open(2)
    coordinator.announce_end(GenerationEnd(culprit="rank 0: it failed", reason="rank_failed"))
    end = gang.followers[1].await_start(60.0)
    assert isinstance(end, GenerationEnd) and (end.culprit, end.reason) == (
        "rank 0: it failed",
        "rank_failed",
    )


def test_an_order_before_the_start_ends_the_roll_call_and_the_wait(gang: Gang) -> None:
    coordinator = gang.open(2)
    assert coordinator.announce_wait(0.0) == ""
    gang.followers[1].order(to_leave(1))
    cause = wait_until("the order", lambda: coordinator.announce_wait(0.0), timeout=60, pause=0.002)
    assert cause == coordinator.leave_cause == NOTICE


def test_the_roll_call_waits_until_no_notice_is_pending(gang: Gang) -> None:
    coordinator = gang.open(2, notices={1: to_leave(1, seconds=600.0)})
    [follower] = gang.followers.values()
    looks: list[float] = []

    def stopped() -> bool:
        looks.append(gang.clock.seconds)
        if len(looks) == 5:
            assert follower.report_wait(to_leave(1, seconds=500.0)) is None
        if len(looks) == 10:
            follower.report_wait_over()
        return False

    coordinator.roll_call(DEADLINE_SECONDS, stopped)
    assert len(looks) >= 10
    assert looks[1] - looks[0] == pytest.approx(0.02)


def test_all_followers_get_the_longest_wait(gang: Gang) -> None:
    notices = {1: to_leave(1, seconds=3.0), 2: to_leave(2, seconds=1.0)}
    coordinator = gang.open(4, notices=notices)
    looks = iter(range(4))
    with pytest.raises(GangError, match="this agent was asked to stop"):
        coordinator.roll_call(DEADLINE_SECONDS, lambda: next(looks, None) is None)
    assert ended_after(gang, gang.followers[3]) == pytest.approx(4.0, abs=0.2)


def test_a_notice_that_outlasts_the_deadline_ends_the_roll_call(gang: Gang) -> None:
    coordinator = gang.open(2, notices={1: to_leave(1, seconds=600.0)})
    began = gang.clock.seconds
    words = r"node 1 \(host-1\) still waits out its spot interruption notice, 2 s after all joined"
    with pytest.raises(GangError, match=words):
        coordinator.roll_call(2.0, never)
    assert gang.clock.seconds - began == pytest.approx(2.0, abs=0.05)
    assert coordinator.leave_cause == ""


def test_a_node_that_is_lost_with_a_pending_notice_is_an_interruption(gang: Gang) -> None:
    coordinator = gang.open(2, notices={1: to_leave(1, seconds=600.0)})
    gang.followers[1].close()
    words = (
        r"node 1 \(host-1\) was lost while it waited out its spot interruption notice: "
        r"connection closed"
    )
    with pytest.raises(GangError, match=words):
        coordinator.roll_call(30.0, never)
    assert coordinator.leave_cause == NOTICE


def test_a_wait_is_reported_at_most_once_per_second(gang: Gang) -> None:
    """Two reports, of 600 s and 0 s: the second would end the wait."""
    coordinator = gang.open(2)
    [follower] = gang.followers.values()
    follower.report_wait(to_leave(1, seconds=600.0))
    gang.clock.seconds += 0.75
    follower.report_wait(to_leave(1, seconds=0.0))
    time.sleep(0.02)
    coordinator.admit_nodes()
    with pytest.raises(GangError, match="still waits out"):
        coordinator.roll_call(1.0, never)


# Orders, store waits and requests.


def test_an_order_of_any_node_reaches_all_nodes(gang: Gang) -> None:
    coordinator = gang.open()
    gang.start()
    order = to_leave(1)
    gang.followers[1].order(order)
    wait_until(
        "the order",
        lambda: coordinator.poll() is None and coordinator.leave_cause,
        timeout=60,
        pause=0.002,
    )
    assert coordinator.orders() == [order] and coordinator.orders() == []
    assert [heard(follower) for follower in gang.followers.values()] == [[order], [order]]
    coordinator.order(RankOrder(seconds=float("inf"), cause=CAUSES[5], node=0))
    assert coordinator.leave_cause == NOTICE
    leaves = []
    for follower in gang.followers.values():
        leaves.append([order.leave for order in heard(follower)])
    assert leaves == [
        [False],
        [False],
    ]


@pytest.mark.parametrize("cause", [NOTICE, RETURNED])
def test_the_gang_leaves_for_a_notice_and_not_for_a_node_that_is_back(
    cause: str, gang: Gang
) -> None:
    coordinator = gang.open(2)
    coordinator.order(to_leave(0, cause))
    assert coordinator.leave_cause == ("" if cause == RETURNED else NOTICE)


def test_the_first_order_names_the_cause_for_which_the_gang_leaves(gang: Gang) -> None:
    coordinator = gang.open(2)
    coordinator.order(to_leave(0, SIGTERM))
    coordinator.order(to_leave(1, NOTICE))
    assert coordinator.leave_cause == SIGTERM


def test_a_new_generation_forgets_the_orders_to_make_room(gang: Gang) -> None:
    coordinator = gang.open(2)
    gang.start()
    [follower] = gang.followers.values()
    saves = RankOrder(seconds=float("inf"), cause=CAUSES[5], node=0)
    coordinator.order(to_leave(0, RETURNED))
    coordinator.order(saves)
    follower.poll()
    gang.start(generation=2)
    assert coordinator.orders() == [saves] and follower.orders() == [saves]


def test_a_wait_for_the_store_holds_three_seconds_on_all_nodes(gang: Gang) -> None:
    coordinator = gang.open()
    gang.start()
    everyone = [coordinator, *gang.followers.values()]
    assert not any(peers.store_wait_active for peers in everyone)
    gang.followers[1].waiting()
    for peers in everyone:
        wait_until(
            "the word",
            lambda peers=peers: peers.poll() is None and peers.store_wait_active,
            timeout=60,
            pause=0.002,
        )
    gang.clock.seconds += 2.75
    assert all(peers.store_wait_active for peers in everyone)
    gang.clock.seconds += 0.25
    assert not any(peers.store_wait_active for peers in everyone)


def test_a_followers_own_wait_for_the_store_counts_at_once(gang: Gang) -> None:
    gang.open(2)
    gang.start()
    gang.followers[1].waiting()
    assert gang.followers[1].store_wait_active


def test_a_first_failure_asks_all_nodes_for_positions_once(gang: Gang) -> None:
    coordinator = gang.open(2)
    gang.start()
    [follower] = gang.followers.values()
    everyone = (coordinator, follower)
    assert not any(peers.take_witness_request() for peers in everyone)
    coordinator.report(failed(0))
    wait_until(
        "the request",
        lambda: follower.poll() is None and follower.take_witness_request(),
        timeout=60,
        pause=0.002,
    )
    assert coordinator.take_witness_request() and not any(
        peers.take_witness_request() for peers in everyone
    )
    coordinator.report(failed(1))
    time.sleep(0.02)
    follower.poll()
    assert not any(peers.take_witness_request() for peers in everyone)


def test_a_new_generation_forgets_failures_results_and_requests(gang: Gang) -> None:
    coordinator = gang.open(2)
    gang.start()
    [follower] = gang.followers.values()
    coordinator.report(failed(0))
    coordinator.report_results({0: COMPLETED})
    gang.verdict()
    follower.poll()
    gang.start(generation=2)
    assert not coordinator.take_witness_request() and not follower.take_witness_request()
    gang.clock.seconds += 10.0
    gang.settle()
    follower.report_results({1: COMPLETED})
    gang.settle()
    coordinator.report_results({0: COMPLETED})
    assert gang.verdict().reason == "completed"


# Failures.


def test_a_failure_is_decided_when_its_evidence_has_settled(gang: Gang) -> None:
    coordinator = gang.open(2)
    gang.start()
    coordinator.report(failed(0))  # 0.5 s
    gang.clock.seconds += 0.4375
    assert coordinator.poll() is None
    coordinator.report(failed(1))  # does not start the time anew
    gang.clock.seconds += 0.0625
    end = coordinator.poll()
    assert end is not None and end.ranks == [0]


@pytest.mark.parametrize(("heard_from", "seconds"), [(3, 1.5), (4, 0.2)])
def test_a_hang_is_decided_sooner_when_every_rank_has_reported(
    heard_from: int, seconds: float, gang: Gang
) -> None:
    coordinator = gang.open(2, processes_per_node=2)
    gang.start()
    coordinator.report(hung(0, waiting=False))
    for rank in range(1, heard_from):
        coordinator.report(seen(rank))
    gang.clock.seconds += seconds - 0.0625
    assert coordinator.poll() is None
    gang.clock.seconds += 0.125
    assert coordinator.poll() is not None


def test_collectives_that_differ_are_a_failure_before_any_rank_has_failed(gang: Gang) -> None:
    coordinator = gang.open(2)
    gang.start()
    coordinator.report(seen(0, calls=calls("a")))
    gang.clock.seconds += 5.0
    gang.settle()
    gang.followers[1].report(seen(1, calls=calls("b"), where="user/loss.py:9 in log"))
    end = gang.verdict()
    assert (end.reason, end.curable, coordinator.take_witness_request()) == (
        "rank_failed",
        False,
        True,
    )


def test_an_idle_rank_for_which_all_others_wait_is_a_stall(gang: Gang) -> None:
    coordinator = gang.open(3)
    gang.start()
    coordinator.report(seen(0, waiting=False, idle_seconds=5.0))
    coordinator.report(seen(1))
    assert coordinator.stall is None, "rank 2 has not reported"
    coordinator.report(seen(2))
    assert coordinator.stall is not None and coordinator.stall.rank == 0
    coordinator.report(seen(0))
    assert coordinator.stall is None
    gang.clock.seconds += 60.0
    assert coordinator.poll() is None, "it is no proof"


def test_after_a_failure_no_stall_is_looked_for(gang: Gang) -> None:
    coordinator = gang.open(2)
    gang.start()
    coordinator.report(failed(1, cascade=True))
    coordinator.report(seen(0, waiting=False, idle_seconds=5.0))
    coordinator.report(seen(1))
    assert coordinator.stall is None


@pytest.mark.parametrize(("age", "counts"), [(10.0, True), (10.0625, False)])
def test_positions_of_the_last_ten_seconds_are_evidence(
    age: float, counts: bool, gang: Gang
) -> None:
    coordinator = gang.open(2)
    gang.start()
    coordinator.report(seen(0, calls=calls("a")))
    gang.clock.seconds += age
    coordinator.report(seen(1, calls=calls("b")))
    assert coordinator.take_witness_request() is counts


def test_a_lost_node_is_a_failure_of_its_first_rank(gang: Gang) -> None:
    coordinator = gang.open(3, processes_per_node=2, min_nodes=None)
    gang.start()
    gang.followers[2].close()
    end = gang.verdict()
    assert end.culprit == "node 2 (host-2) was lost: connection closed"
    assert (end.reason, end.ranks, end.details["node"], end.again) == ("node_lost", [4], 2, False)
    assert end.details["cascades"] == []
    all_ready(gang, 1)
    assert coordinator.regroup(1.0, never) == GenerationEnd(culprit=end.culprit, reason="node_lost")


def test_nodes_are_named_by_their_place_in_the_generation(gang: Gang) -> None:
    gang.open(4, processes_per_node=2)
    gang.start([0, 2, 3])
    gang.followers[3].close()
    end = gang.verdict()
    assert (end.culprit, end.ranks) == ("node 2 (host-3) was lost: connection closed", [4])


def test_two_lost_nodes_are_two_failures(gang: Gang) -> None:
    gang.open(4)
    gang.start()
    gang.followers[1].close()
    gang.followers[3].close()
    end = gang.verdict()
    assert end.ranks in ([1], [3]) and set(end.details["cascades"]) | set(end.ranks) == {1, 3}


def test_a_node_that_has_finished_may_go(gang: Gang) -> None:
    coordinator = gang.open(2)
    gang.start()
    gang.followers[1].report_results({1: COMPLETED})
    gang.followers[1].close()
    gang.settle()
    gang.clock.seconds += 5.0
    gang.settle()
    coordinator.report_results({0: COMPLETED})
    assert gang.verdict().reason == "completed"


def test_messages_about_an_ended_generation_are_ignored(gang: Gang) -> None:
    coordinator = gang.open(2)
    gang.start()
    follower = gang.followers[1]
    follower.report(failed(1))
    follower.report_results({1: COMPLETED})
    follower.waiting()
    time.sleep(0.02)
    coordinator.start(replace(gang.start(generation=2), generation=2))
    gang.settle()
    assert not coordinator.take_witness_request() and not coordinator.store_wait_active


def test_messages_before_the_first_generation_are_ignored(gang: Gang) -> None:
    coordinator = gang.open(2)
    gang.followers[1].ready()
    for _ in range(20):
        coordinator.admit_nodes()
        time.sleep(0.001)
    assert coordinator.nodes == [0, 1]


def test_a_follower_that_sends_nonsense_is_lost(gang: Gang) -> None:
    coordinator = gang.open(2, min_nodes=None)
    gang.start()
    nonsense = {"kind": "finished", "generation": 1, "results": {"x": {}}}
    gang.followers[1]._connection.send(nonsense)
    end = gang.verdict()
    assert end.culprit.startswith(
        "node 1 (host-1) was lost: it sent a malformed message: ValueError"
    )
    assert coordinator.nodes == [0]


# Ends of generations.


def test_a_generation_ends_when_all_nodes_have_finished(gang: Gang) -> None:
    coordinator = gang.open(3, processes_per_node=2)
    gang.start()
    gang.followers[1].report_results({2: COMPLETED, 3: COMPLETED})
    gang.followers[2].report_results({4: COMPLETED, 5: COMPLETED})
    gang.settle()
    coordinator.report_results({0: COMPLETED, 1: COMPLETED})
    end = gang.verdict()
    assert end.outcome is not None
    assert (end.outcome.outcome, end.outcome.step, end.outcome.generation) == ("completed", 9, 1)
    assert (end.again, list(end.left_out)) == (False, [])


@pytest.mark.parametrize("name", GOINGS_ON)
def test_the_gang_continues_without_some_nodes_where_that_helps(name: str, gang: Gang) -> None:
    min_nodes, orders, happens, again, left_out = GOINGS_ON[name]
    coordinator = gang.open(3, min_nodes=min_nodes)
    gang.start()
    for node, cause in orders:
        coordinator.order(to_leave(node, cause))
    if isinstance(happens, WorkerFailure):
        coordinator.report(happens)
    elif happens == "lost":
        gang.followers[1].close()
    else:
        for node, follower in gang.followers.items():
            follower.report_results({node: happens})
        coordinator.report_results({0: happens})
    end = gang.verdict()
    assert (end.again, list(end.left_out)) == (again, left_out)
    assert bool(coordinator.leave_cause) is (bool(orders) and not left_out)
    if happens == "lost":
        gone = {1}
    else:
        gone = set()
    assert coordinator.nodes == [node for node in (0, 1, 2) if node not in {*left_out, *gone}]


def test_a_bad_readers_node_follows_from_its_rank(gang: Gang) -> None:
    coordinator = gang.open(4, processes_per_node=2)
    gang.start([0, 2, 3])
    coordinator.report(failed(3, error="UnreliableReader"))
    end = gang.verdict()
    assert (list(end.left_out), end.fingerprint) == ([2], "")


def test_orders_of_a_node_that_is_left_out_no_longer_count(gang: Gang) -> None:
    coordinator = gang.open(3)
    gang.start()
    coordinator.report(failed(1, error="UnreliableReader"))
    gang.verdict()
    coordinator.order(to_leave(1))
    assert coordinator.leave_cause == ""
    coordinator.order(to_leave(2))
    assert coordinator.leave_cause == NOTICE


# Between two generations.


def test_the_next_generation_waits_for_the_ranks_of_all_nodes(gang: Gang) -> None:
    coordinator = gang.open(3)
    gang.start()
    gang.followers[2].ready()
    looks: list[float] = []

    def stopped() -> bool:
        looks.append(gang.clock.seconds)
        if len(looks) == 10:
            gang.followers[1].ready()
        return False

    assert coordinator.regroup(DEADLINE_SECONDS, stopped) == [0, 1, 2]
    assert len(looks) >= 10 and looks[1] - looks[0] == pytest.approx(0.01)
    gang.start(generation=2)
    looks.clear()
    gang.followers[2].ready()
    assert coordinator.regroup(0.5, stopped) == [0, 1, 2] or len(looks) >= 10, (
        "each generation anew"
    )


@pytest.mark.parametrize("min_nodes", [2, 3])
def test_a_node_whose_ranks_end_too_late_is_lost(min_nodes: int, gang: Gang) -> None:
    coordinator = gang.open(3, min_nodes=min_nodes)
    gang.start()
    gang.followers[1].ready()
    began = gang.clock.seconds
    result = coordinator.regroup(1.0, never)
    assert gang.clock.seconds - began == pytest.approx(1.0, abs=0.02)
    culprit = "node 2 (host-2) was lost: its ranks did not end within 1 s"
    assert result == (
        [0, 1] if min_nodes == 2 else GenerationEnd(culprit=culprit, reason="node_lost")
    )
    lost = wait_until("the end", gang.followers[2].poll, timeout=60, pause=0.002)
    assert lost.reason == "node_lost" and lost.culprit.startswith("node 0 was lost: connection")


def test_all_lost_nodes_are_named(gang: Gang) -> None:
    coordinator = gang.open(3, min_nodes=3)
    gang.start()
    gang.followers[2].close()
    result = coordinator.regroup(1.0, never)
    assert isinstance(result, GenerationEnd)
    assert result.culprit == (
        "node 1 (host-1) was lost: its ranks did not end within 1 s; node 2 (host-2) was lost: "
        "connection closed"
    )


@pytest.mark.parametrize(("cause", "told"), [("", "this node"), (NOTICE, NOTICE)])
def test_a_gang_that_is_to_leave_starts_no_generation(cause: str, told: str, gang: Gang) -> None:
    coordinator = gang.open(2)
    gang.start()
    if cause:
        coordinator.order(to_leave(1))
    result = coordinator.regroup(5.0, lambda: not cause)
    assert isinstance(result, GenerationEnd) and result.reason == "agent_stopped"
    assert result.culprit.startswith(f"asked to stop ({told})")


# Replacements of lost nodes.


@pytest.fixture
def jobset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAFLOW_KUBERNETES_JOBSET_NAME", "js")


def lose(gang: Gang, node: int) -> GenerationEnd:
    gang.followers[node].close()
    return gang.verdict()


def all_ready(gang: Gang, *nodes: int) -> None:
    for node in nodes:
        gang.followers[node].ready()


@pytest.mark.usefixtures("jobset")
def test_a_gang_that_needs_all_its_nodes_waits_for_the_replacement(gang: Gang) -> None:
    coordinator = gang.open(3, min_nodes=None, replacements=1)
    gang.start()
    end = lose(gang, 1)
    assert (end.reason, end.again) == ("node_lost", True)
    all_ready(gang, 2)
    joining: list[threading.Thread] = []

    def meanwhile() -> None:
        if not joining:
            joining.append(gang.join(1))
        time.sleep(0.05)  # the gang's clock is much faster than the one by which nodes join

    assert coordinator.regroup(5.0, never, meanwhile) == [0, 1, 2]
    joining[0].join()
    gang.followers[1].poll()
    assert gang.opened[1] == [], "the ended generation is not its own"
    gang.start(generation=2)
    end = lose(gang, 1)
    assert not end.again, "the cluster replaces one node"


@pytest.mark.usefixtures("jobset")
def test_a_replacement_has_the_time_of_a_start(gang: Gang) -> None:
    """3 s until it is there and 2 s to start."""
    coordinator = gang.open(3, min_nodes=None, replacements=1)
    gang.start()
    end = lose(gang, 1)
    all_ready(gang, 2)
    began = gang.clock.seconds
    assert coordinator.regroup(5.0, never) == GenerationEnd(culprit=end.culprit, reason="node_lost")
    assert gang.clock.seconds - began == pytest.approx(5.0, abs=0.1)
    assert not port_is_open(gang)


@pytest.mark.usefixtures("jobset")
def test_the_other_nodes_get_a_wait_message_for_a_replacement(gang: Gang) -> None:
    coordinator = gang.open(3, min_nodes=None, replacements=1)
    gang.start()
    lose(gang, 1)
    all_ready(gang, 2)
    looks = iter(range(5))
    coordinator.regroup(5.0, lambda: next(looks, None) is None)
    assert ended_after(gang, gang.followers[2]) == pytest.approx(6.0, abs=0.2)


@pytest.mark.usefixtures("jobset")
@pytest.mark.parametrize("event", ["stop", "order", "loss"])
def test_the_wait_for_a_replacement_ends_when_the_gang_cannot_go_on(event: str, gang: Gang) -> None:
    coordinator = gang.open(3, min_nodes=None, replacements=1)
    gang.start()
    lose(gang, 1)
    all_ready(gang, 2)
    began = gang.clock.seconds
    happened: list[bool] = []

    def meanwhile() -> None:
        if not happened and event == "order":
            gang.followers[2].order(to_leave(2))
        if not happened and event == "loss":
            gang.followers[2].close()
        happened.append(True)

    result = coordinator.regroup(5.0, lambda: event == "stop" and bool(happened), meanwhile)
    assert isinstance(result, GenerationEnd) and result.reason == "node_lost"
    assert gang.clock.seconds - began < 4.0


@pytest.mark.usefixtures("jobset")
@pytest.mark.parametrize(("replacements", "again"), [(1, False), (2, True)])
def test_no_more_nodes_are_replaced_than_the_cluster_does(
    replacements: int, again: bool, gang: Gang
) -> None:
    gang.open(4, min_nodes=None, replacements=replacements)
    gang.start()
    gang.followers[1].close()
    assert lose(gang, 3).again is again


@pytest.mark.usefixtures("jobset")
def test_a_smaller_gang_takes_a_lost_node_in_when_it_is_back(gang: Gang) -> None:
    coordinator = gang.open(3, min_nodes=2, replacements=1)
    gang.start()
    coordinator.announce_generation(1)
    lose(gang, 1)
    all_ready(gang, 2)
    assert coordinator.regroup(5.0, never) == [0, 2]
    gang.start(generation=2)
    joining = gang.join(1)
    wait_until(
        "its return",
        lambda: coordinator.poll() is None and coordinator.orders(),
        timeout=60,
        pause=0.002,
    )
    joining.join()
    [order] = heard(gang.followers[2])
    assert order == RankOrder(seconds=25.0, cause=RETURNED, node=0)
    gang.settle()
    assert coordinator.orders() == [], "it is asked for once"
    gang.followers[2].report_results({1: INTERRUPTED})
    coordinator.report_results({0: INTERRUPTED})
    end = gang.verdict()
    assert end.again and not end.left_out and not coordinator.leave_cause
    all_ready(gang, 2)
    assert coordinator.regroup(5.0, never) == [0, 1, 2]
    gang.followers[1].poll()
    assert gang.opened[1] == []
    start = gang.start(generation=3)
    assert start.hosts == ["host-0", "host-1", "host-2"]
    assert not coordinator.orders() and not gang.followers[2].orders()
    gang.followers[1].close()
    gang.verdict()
    all_ready(gang, 2)
    assert coordinator.regroup(5.0, never) == [0, 2]
    gang.start(generation=4)
    assert not port_is_open(gang), "no second node is replaced"


def port_is_open(gang: Gang) -> bool:
    """Whether node 0 waits for nodes."""
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", gang.spec.candidate_ports[0])) == 0


@pytest.mark.usefixtures("jobset")
@pytest.mark.parametrize("moment", ["a rank has failed", "a node has finished"])
def test_a_node_that_comes_back_at_the_end_of_a_generation_hurries_none(
    moment: str, gang: Gang
) -> None:
    coordinator = gang.open(3, min_nodes=2, replacements=1)
    gang.start()
    lose(gang, 1)
    all_ready(gang, 2)
    coordinator.regroup(5.0, never)
    gang.start(generation=2)
    if moment == "a rank has failed":
        coordinator.report(failed(0, cascade=True))  # its cause may take 3 s
    else:
        coordinator.report_results({0: COMPLETED})
    joining = gang.join(1)
    wait_until(
        "its return",
        lambda: coordinator.poll() is None and not joining.is_alive(),
        timeout=60,
        pause=0.002,
    )
    gang.settle()
    assert coordinator.orders() == []
    coordinator.close()
    assert not port_is_open(gang)


@pytest.mark.usefixtures("jobset")
def test_a_rejoining_node_gets_a_wait_message_until_the_next_start(gang: Gang) -> None:
    coordinator = gang.open(3, min_nodes=2, replacements=1)
    gang.start()
    lose(gang, 1)
    all_ready(gang, 2)
    coordinator.regroup(5.0, never)
    gang.start(generation=2)
    joining = gang.join(1)
    wait_until(
        "its return",
        lambda: coordinator.poll() is None and not joining.is_alive(),
        timeout=60,
        pause=0.002,
    )
    gang.clock.seconds += 1.0
    began = gang.clock.seconds

    def run_on() -> bool:
        if began + 0.5 <= gang.clock.seconds < began + 1.0:
            assert coordinator.poll() is None
        return False

    gang.stopped = run_on
    assert ended_after(gang, gang.followers[1]) == pytest.approx(1.5, abs=0.1)


@pytest.mark.usefixtures("jobset")
def test_a_gang_that_leaves_for_a_notice_does_not_go_on_for_a_node_that_is_back(gang: Gang) -> None:
    coordinator = gang.open(3, min_nodes=2, replacements=1)
    gang.start()
    lose(gang, 1)
    all_ready(gang, 2)
    coordinator.regroup(5.0, never)
    gang.start(generation=2)
    joining = gang.join(1)
    wait_until(
        "its return",
        lambda: coordinator.poll() is None and coordinator.orders(),
        timeout=60,
        pause=0.002,
    )
    joining.join()
    coordinator.order(to_leave(0, SIGTERM))
    gang.followers[2].report_results({1: INTERRUPTED})
    coordinator.report_results({0: INTERRUPTED})
    assert not gang.verdict().again


@pytest.mark.usefixtures("jobset")
@pytest.mark.parametrize("results", [COMPLETED, INTERRUPTED])
def test_a_gang_that_has_room_ends_with_its_work(results: RankResult, gang: Gang) -> None:
    coordinator = gang.open(3, min_nodes=2, replacements=1)
    gang.start()
    lose(gang, 1)
    all_ready(gang, 2)
    coordinator.regroup(5.0, never)
    gang.start(generation=2)
    if results is COMPLETED:
        joining = gang.join(1)
        wait_until(
            "its return",
            lambda: coordinator.poll() is None and coordinator.orders(),
            timeout=60,
            pause=0.002,
        )
        joining.join()
    gang.followers[2].report_results({1: results})
    coordinator.report_results({0: results})
    assert not gang.verdict().again, (
        "interrupted without a node that is back, or completed with one"
    )


def test_a_closed_coordinator_closes_its_port_and_connections(gang: Gang) -> None:
    coordinator = gang.open(2)
    assert port_is_open(gang)
    coordinator.close()
    assert not port_is_open(gang)
    end = wait_until("the end", gang.followers[1].poll, timeout=60, pause=0.002)
    assert end.culprit == "node 0 was lost: connection closed"
