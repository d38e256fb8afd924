"""Notices to single nodes: one that stands as an agent starts, and one for which the others need
not leave.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.core.config.schema import ClusterConfig, RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import (
    FAULT_DETECTED,
    GENERATION_ENDED,
    GENERATION_STARTED,
    STEP,
    read_events,
)
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.core.terms import Terms
from ebbflow.cost.report.report import build_report
from ebbflow.infra.notices import rehearse_notice
from ebbflow.training.checkpoint import reachable_commits
from ebbflow.training.errors import GangError
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.membership import CoordinatorPeers, FollowerPeers
from ebbflow.training.launch.messages import (
    CAUSES,
    GangSpec,
    GenerationStart,
    RankOrder,
    RankResult,
)
from ebbflow.training.launch.transport import control_ports
from tests.support.flow import wait_until
from tests.support.gangs import KNOWN, SECRET, endless_gang

INTERRUPTED = RankResult(outcome=Outcome.INTERRUPTED, step=7, message="asked to leave")
NOTICE = CAUSES[2]
REBALANCE = CAUSES[5]
SIGNAL = CAUSES[1]


def test_on_a_machine_that_is_going_away_no_rank_is_started(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    output = tmp_path / "output.log"
    spec = replace(endless_gang(tmp_path, survival={"notice_file": str(notice)}), nodes=1)
    notice.write_text(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 90)))
    gang = LocalGang(spec, tmp_path / "gang", output)
    said = "no rank is started before that"
    wait_until("its word", lambda: said in output.read_text(), timeout=60)
    gang.agents[0].send_signal(signal.SIGTERM)
    with pytest.raises(GangError, match="this machine is going away in") as error:
        gang.wait(60)
    assert (error.value.outcome, error.value.curable) == ("interrupted", True)
    assert not list(Path(spec.log_folder).glob("*/rank-*"))


def test_a_noticed_node_leaves_and_enough_others_go_on_without_redoing_a_step(
    tmp_path: Path,
) -> None:
    cluster = {"nodes": 3, "min_nodes": 2, "start_deadline_seconds": 60.0}
    spec = endless_gang(tmp_path, checkpoint={"interval_steps": 1_000_000}, cluster=cluster)
    spec = replace(spec, nodes=3, terms=Terms(usd_per_rank_second=0.01))
    store = Store.open(spec.store_uri).sub(job_prefix(spec.job))
    gang = LocalGang(spec, tmp_path / "gang", tmp_path / "output.log")
    wait_until(
        "steps", lambda: [event for event in read_events(store) if event.name == STEP], timeout=60
    )
    rehearse_notice(Path(spec.log_folder) / "notice-node-1.json", action="terminate", seconds=60)
    gang.agents[1].wait(60)
    left = json.loads((tmp_path / "gang" / "node-1.result.json").read_text())
    assert (left["outcome"], left["goes_on"]) == ("interrupted", True)
    [commit] = wait_until("the save", lambda: reachable_commits(store), timeout=60)
    assert commit.step == left["step"] and commit.generation == 1
    wait_until("steps of two", lambda: _steps(store, generation=2)[5:], timeout=60)
    gang.agents[2].send_signal(signal.SIGTERM)
    outcome = gang.wait(60)
    assert (outcome.outcome, outcome.generation) == ("interrupted", 2)

    events = read_events(store)
    steps = [event.step for event in events if event.name == STEP and event.rank == 0]
    assert steps == list(range(1, outcome.step + 1)), "each once"
    begun = {event.generation: event.data for event in events if event.name == GENERATION_STARTED}
    assert {number: data["nodes"] for number, data in begun.items()} == {1: 3, 2: 2}
    assert begun[2]["parent_step"] == commit.step
    assert [event.data["reason"] for event in events if event.name == GENERATION_ENDED] == [
        "interrupted"
    ] * 2
    assert not [event for event in events if event.name == FAULT_DETECTED]
    report = build_report(events)
    assert (report.failures, report.redone_steps) == (0, 0)
    assert sum(row.rank_seconds for row in report.ledger) == pytest.approx(report.paid_rank_seconds)


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[tuple[CoordinatorPeers, list[FollowerPeers]]]:
    """Three agents in a generation that has begun; two are enough."""
    run = f"trio-{tmp_path.name}"
    spec = GangSpec(
        job="job",
        run=run,
        attempt=0,
        node=0,
        nodes=3,
        processes_per_node=1,
        main_address="127.0.0.1",
        config=RunConfig(cluster=ClusterConfig(min_nodes=2)),
        store_uri=str(tmp_path),
        prepared={},
        log_folder=str(tmp_path),
        candidate_ports=control_ports(run, 0),
    )
    coordinator = CoordinatorPeers(spec, "a", SECRET)
    members = {}

    def member(node: int) -> None:
        members[node] = FollowerPeers(replace(spec, node=node), "b", 30, lambda: False, **KNOWN)

    threads = [threading.Thread(target=member, args=(node,)) for node in (1, 2)]
    for thread in threads:
        thread.start()
    coordinator.roll_call(30, lambda: False)
    for thread in threads:
        thread.join()
    start = GenerationStart(
        generation=1,
        generation_id="x",
        candidates=[],
        rendezvous_port=1,
        terms=None,
        rehearse=None,
        hosts=["a", "b", "b"],
        nodes=[0, 1, 2],
    )
    coordinator.start(start)
    assert [members[node].await_start(30) for node in (1, 2)] == [start, start]
    yield coordinator, [members[1], members[2]]
    for channel in members.values():
        channel.close()
    coordinator.close()


@pytest.mark.parametrize(
    ("orders", "left_out"),
    [
        ([(1, NOTICE)], [1]),
        ([(2, REBALANCE)], [2]),
        ([(1, NOTICE), (1, SIGNAL)], [1]),  # what a node that is drained hears
        ([(1, SIGNAL)], []),
        ([(1, NOTICE), (2, SIGNAL)], []),
        ([(0, NOTICE)], []),
        ([(1, NOTICE), (2, NOTICE)], []),  # one alone is not enough
    ],
)
def test_one_noticed_node_leaves_alone_unless_all_have_to(
    orders: list[tuple[int, str]],
    left_out: list[int],
    trio: tuple[CoordinatorPeers, list[FollowerPeers]],
) -> None:
    coordinator, members = trio
    for node, cause in orders:
        order = RankOrder(seconds=60.0, cause=cause, node=node)
        members[node - 1].order(order) if node else coordinator.order(order)
    coordinator.report_results({0: INTERRUPTED})
    for rank, member in enumerate(members, start=1):
        member.report_results({rank: INTERRUPTED})
    verdict = wait_until("the verdict", coordinator.poll, timeout=30)
    heard = [wait_until("the verdict", member.poll, timeout=30) for member in members]
    assert [(message.again, list(message.left_out)) for message in (verdict, *heard)] == [
        (bool(left_out), left_out)
    ] * 3
    assert verdict.outcome is not None and (verdict.outcome.step, verdict.culprit) == (7, "")
    if left_out:
        [staying] = {1, 2} - set(left_out)
        members[staying - 1].ready()
        assert (
            coordinator.regroup(30, lambda: False) == [0, staying] and not coordinator.leave_cause
        )
    else:
        assert coordinator.leave_cause


def test_losing_a_noticed_machine_before_its_ranks_left_stops_no_other_node(
    trio: tuple[CoordinatorPeers, list[FollowerPeers]],
) -> None:
    coordinator, members = trio
    members[0].order(RankOrder(seconds=60.0, cause=NOTICE, node=1))
    wait_until(
        "the order", lambda: coordinator.poll() is None and coordinator.leave_cause, timeout=30
    )
    members[0].close()
    verdict = wait_until("the verdict", coordinator.poll, timeout=30)
    assert (verdict.reason, verdict.again, verdict.left_out) == ("node_lost", True, [1])
    members[1].ready()
    assert coordinator.regroup(30, lambda: False) == [0, 2]


@pytest.mark.parametrize(("rank", "left_out"), [(1, [1]), (0, [])])
def test_a_node_that_reads_commits_wrongly_is_left_out_but_for_the_one_that_coordinates(
    rank: int, left_out: list[int], trio: tuple[CoordinatorPeers, list[FollowerPeers]]
) -> None:
    coordinator, members = trio
    failure = WorkerFailure(
        rank=rank, node=rank, message="it reads wrongly", error="UnreliableReader", timestamp=1.0
    )
    (members[rank - 1] if rank else coordinator).report(failure)
    verdict = wait_until("the verdict", coordinator.poll, timeout=30)
    assert (verdict.again, list(verdict.left_out), verdict.user_code) == (True, left_out, False)
    assert bool(verdict.fingerprint) == (not left_out), "node 0's comes again at most twice"
    for member in members:
        member.ready()
    assert coordinator.regroup(30, lambda: False) == [
        node for node in (0, 1, 2) if node not in left_out
    ]


def _steps(store: Store, *, generation: int) -> list[int | None]:
    return [
        event.step
        for event in read_events(store)
        if event.name == STEP and event.generation == generation
    ]
