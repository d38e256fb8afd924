"""The ledger adds up: by hand for the cases that matter, and for random timelines by its identity."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.core.events import NODE_ENDED, NODE_STARTED, PHASE, PLAN, STEP, Event
from ebbflow.cost.amounts import apportion, round_amount
from ebbflow.cost.errors import LedgerError
from ebbflow.cost.ledger.ledger import Ledger, compute_spent_usd, fold
from ebbflow.cost.ledger.timeline import read_paid_nodes
from ebbflow.cost.report.render_text import JOB_HEADER, build_job_row, format_job_rows
from ebbflow.cost.report.report import build_report
from tests.support.timelines import WALL, GangLog, faulty_jobs, plan_event, timelines


def seconds_of(ledger: Ledger) -> dict[str, float]:
    return {str(line.ledger_class): line.rank_seconds for line in ledger.lines}


def usd_of(ledger: Ledger) -> dict[str, Decimal]:
    return {str(line.ledger_class): line.usd for line in ledger.lines}


def kinds_of(ledger: Ledger) -> dict[str, str]:
    return {str(line.ledger_class): line.kind for line in ledger.lines}


def clean_run(ranks: int = 2) -> list[Event]:
    """One node for 20 s: a second until the process began, 3 s of start, 4 steps of 3 s, 2 s of
    end, 2 s of agent.
    """
    gang = GangLog(1, 100.0, [list(range(ranks))])
    gang.wait(1.0)
    gang.phase("startup", 3.0)
    gang.steps(1, 4, useful_step=2.5, data_wait=0.5)
    gang.commit(4)
    gang.outcome("completed")
    gang.phase("shutdown", 2.0)
    gang.ended("completed", 20.0)
    return [plan_event(), *gang.events]


def test_a_short_second_interval_is_not_taken_for_a_part_of_the_first() -> None:
    """A rank emits its start-up, and 0.08 s later what it has restored: both before its first step."""
    gang = GangLog(1, 100.0, [[0]])
    gang.wait(1.0)
    gang.phase("startup", 3.0)
    gang.phase("startup", 0.001)
    gang.phase("restore", 0.079)
    gang.steps(1, 4, useful_step=3.0)
    gang.outcome("completed")
    gang.phase("shutdown", 1.0)
    gang.ended("completed", 17.08)
    ledger = fold([plan_event(), *gang.events])
    seconds = {str(line.ledger_class): line.rank_seconds for line in ledger.lines}
    assert ledger.unattributed_share == 0 and seconds["startup"] == pytest.approx(4.001)
    assert seconds["restore"] == pytest.approx(0.079)


def killed_run() -> list[Event]:
    """6 steps of 2 s, a commit after step 4, a kill; then steps 5 to 8 again.

    One node, one rank.
    """
    first = GangLog(1, 0.0, [[0]])
    first.phase("startup", 5.0)
    first.steps(1, 6, useful_step=1.5, data_wait=0.5)
    first.commit(4)
    first.ended("rank_killed", 20.0, culprit="rank 0 on node 0 was killed by SIGKILL")
    second = GangLog(2, 30.0, [[0]], parent=(4, 1))
    second.phase("startup", 3.0)
    second.phase("restore", 1.0)
    second.steps(5, 8, useful_step=1.5, data_wait=0.5)
    second.commit(8)
    second.outcome("completed")
    second.phase("shutdown", 1.0)
    second.ended("completed", 14.0)
    return [plan_event(), *first.events, *second.events]


def test_a_clean_run_by_hand():
    ledger = fold(clean_run())
    assert seconds_of(ledger) == {
        "useful_step": 20.0,
        "data_wait": 4.0,
        "startup": 8.0,
        "shutdown": 8.0,
    }
    # $3.60 per node and hour is $0.0005 per second of each of its two ranks.
    assert usd_of(ledger) == {
        "useful_step": Decimal("0.010000"),
        "data_wait": Decimal("0.002000"),
        "startup": Decimal("0.004000"),
        "shutdown": Decimal("0.004000"),
    }
    assert ledger.total_usd == Decimal("0.020000")
    assert ledger.paid_rank_seconds == 40.0
    assert set(kinds_of(ledger).values()) == {"measured"}
    assert (ledger.price_kind, ledger.redone_steps, ledger.unattributed_share) == (
        "recorded 2026-07-20",
        0,
        0.0,
    )
    assert ledger.useful_on_demand_usd == Decimal("0.020000"), (
        "20 rank-seconds of useful steps at twice the price"
    )
    assert compute_spent_usd(clean_run()) == pytest.approx(0.02)


def test_a_kill_by_hand():
    ledger = fold(killed_run())
    assert seconds_of(ledger) == {
        "useful_step": (4 + 4) * 1.5,
        "data_wait": (4 + 4) * 0.5,
        "startup": 5.0 + 3.0,
        "restore": 1.0,
        "shutdown": 1.0 + 1.0,
        "redone_step": 2 * 2.0,
        "interruption": 20.0 - 17.0,
    }
    assert ledger.redone_steps == 2
    assert ledger.paid_rank_seconds == 34.0
    assert ledger.total_usd == Decimal("0.034000")
    assert ledger.useful_on_demand_usd == Decimal("0.024000"), (
        "8 kept steps of 1.5 s at $7.20 per hour"
    )


def test_a_node_without_an_end_is_billed_to_its_last_heartbeat_with_a_note():
    gang = GangLog(1, 0.0, [[0], [1]])
    gang.phase("startup", 4.0)
    gang.steps(1, 3, useful_step=2.0)
    gang.heartbeat(0, 9.0)  # older than the ranks' last step at 10 s
    gang.heartbeat(1, 12.5)
    gang.commit(3)
    ledger = fold([plan_event(), *gang.events])
    assert ledger.paid_rank_seconds == 10.0 + 12.5
    assert seconds_of(ledger) == {"useful_step": 12.0, "startup": 8.0, "interruption": 2.5}
    assert kinds_of(ledger) == {
        "useful_step": "measured",
        "startup": "measured",
        "interruption": "estimated",
    }
    assert ledger.total_usd == Decimal("0.022500")


def gang_with_phases_emitted_together(*, heartbeats: bool = True, ends: bool = True) -> list[Event]:
    """Two nodes for 20 s, ranks [0] and [1]: a process start at 1 s, then start-up and restore,
    emitted together.
    """
    gang = GangLog(1, 100.0, [[0], [1]])
    gang.wait(6.0)
    for rank, node in ((0, 0), (1, 1)):
        for kind, seconds in (("startup", 3.0), ("restore", 2.0)):
            gang.add(PHASE, 106.0, rank=rank, node=node, **{"class": kind, "seconds": seconds})
    gang.steps(1, 4, useful_step=3.0)
    gang.outcome("completed")
    gang.phase("shutdown", 1.0)
    if heartbeats:
        gang.heartbeat(0, 10.0)
        gang.heartbeat(1, 10.0)
    if ends:
        gang.ended("completed", 20.0)
    return [plan_event(), *gang.events]


@pytest.mark.parametrize(
    ("heartbeats", "ends", "paid_seconds"),
    [(True, True, 20.0), (True, False, 19.0), (False, True, 20.0), (False, False, 18.0)],
)
def test_a_node_whose_start_is_lost_is_billed_from_what_else_is_known(
    heartbeats, ends, paid_seconds
):
    """By its agent's other events it is paid as before; without any, from its first rank's process
    start.
    """
    whole = gang_with_phases_emitted_together(heartbeats=heartbeats, ends=ends)
    left = [event for event in whole if event.name != NODE_STARTED]
    [node, _] = read_paid_nodes(left)
    assert (node.paid_seconds, node.ranks) == (paid_seconds, [0])
    assert node.started_wall == WALL + node.start, "the two clocks of these events differ by WALL"
    ledger = fold(left)
    assert ledger.total_usd == 2 * Decimal(str(paid_seconds)) / 1000
    assert seconds_of(ledger)["useful_step"] == 24.0 and seconds_of(ledger)["restore"] == 4.0


def test_a_log_that_lost_any_one_event_still_has_a_ledger():
    whole = gang_with_phases_emitted_together()
    for lost, event in enumerate(whole):
        left = [*whole[:lost], *whole[lost + 1 :]]
        if event.name == PLAN:
            usd = Decimal("0")
        elif event.name == NODE_ENDED:
            usd = Decimal("0.039")
        else:
            usd = Decimal("0.04")
        assert fold(left).total_usd == usd, event


def test_a_node_of_which_only_the_agents_end_is_left_is_still_billed():
    whole = gang_with_phases_emitted_together()
    left = [event for event in whole if event.node == 0 or event.name == NODE_ENDED]
    assert [(node.ranks, node.paid_seconds) for node in read_paid_nodes(left)] == [
        ([0], 20.0),
        ([1], 20.0),
    ]
    assert fold(left).total_usd == Decimal("0.04")


def test_two_nodes_that_end_apart_and_a_rank_that_never_spoke():
    gang = GangLog(1, 0.0, [[0], [1]])
    del gang.clock[1]
    gang.phase("startup", 4.0)
    gang.steps(1, 2, useful_step=3.0)
    gang.add("generation_ended", 11.0, reason="node_lost", culprit="node 1", user_code=False)
    gang.node_ended(0, 11.0)
    gang.node_ended(1, 6.0)
    ledger = fold([plan_event(), *gang.events])
    # No commit: both steps are lost. Node 0 waited one second for its end, node 1 was never heard
    # of.
    assert seconds_of(ledger) == {"startup": 4.0, "redone_step": 6.0, "interruption": 1.0 + 6.0}
    assert ledger.total_usd == Decimal("0.017000")


def test_lineage_decides_what_was_thrown_away_not_the_step_number():
    first = GangLog(1, 0.0, [[0]])
    first.steps(1, 10, useful_step=1.0)
    first.commit(4)
    first.commit(8)
    first.ended("rank_killed", 10.0)
    zombie = GangLog(2, 20.0, [[0]], parent=(8, 1))
    zombie.steps(9, 14, useful_step=1.0)
    zombie.commit(12)
    zombie.ended("node_lost", 6.0)
    last = GangLog(3, 40.0, [[0]], parent=(4, 1))  # the newer commits were damaged
    last.steps(5, 14, useful_step=1.0)
    last.outcome("completed")
    last.ended("completed", 10.0)
    ledger = fold([plan_event(), *first.events, *zombie.events, *last.events])
    assert seconds_of(ledger) == {"useful_step": 4.0 + 10.0, "redone_step": 6.0 + 6.0}
    assert ledger.redone_steps == 6 + 6


def test_the_parent_commit_names_its_generation_even_when_a_step_was_never_recorded():
    lost = [
        event
        for event in killed_run()
        if not (event.generation == 1 and event.step == 4 and event.name == STEP)
    ]
    ledger = fold(lost)
    assert ledger.redone_steps == 2
    assert seconds_of(ledger)["unattributed"] == 2.0
    assert seconds_of(ledger)["useful_step"] == (3 + 4) * 1.5


@pytest.mark.parametrize("reason", ["budget", "rank_failed"])
def test_an_incomplete_job_loses_the_work_after_its_last_commit(reason: str):
    gang = GangLog(1, 0.0, [[0]])
    gang.steps(1, 7, useful_step=1.0, checkpoint_stall=0.5)
    gang.commit(5)
    if reason == "budget":
        gang.outcome("budget")
    gang.ended(reason, 10.5)
    events = [plan_event(), *gang.events]
    ledger = fold(events)
    assert seconds_of(ledger) == {"useful_step": 5.0, "checkpoint_stall": 3.5, "redone_step": 2.0}
    assert ledger.redone_steps == 2
    still_going = fold(
        [event for event in events if event.name not in ("outcome", "generation_ended")],
        running=True,
    )
    assert still_going.redone_steps == 0


def test_intervals_that_cannot_all_be_true_are_an_error_that_names_the_rank():
    gang = GangLog(1, 0.0, [[0]])
    gang.wait(10.0)
    gang.phase("startup", 2.0)
    gang.add(PHASE, 14.0, rank=0, **{"class": "data_wait", "seconds": 9.0})
    gang.ended("completed", 14.0)
    with pytest.raises(
        LedgerError,
        match=r"generation 1, node 0, rank 0: .* exceed .* by 7\.000 s: .*data_wait 9\.000",
    ):
        fold([plan_event(), *gang.events])


def test_jitter_comes_off_the_largest_class_and_gaps_are_unattributed():
    gang = GangLog(1, 0.0, [[0]])
    gang.phase("startup", 1.0)
    gang.steps(1, 1, useful_step=5.0)
    gang.add(PHASE, 8.0, rank=0, **{"class": "shutdown", "seconds": 2.03})
    gang.outcome("completed")
    gang.ended("completed", 8.0)
    ledger = fold([plan_event(), *gang.events])
    assert seconds_of(ledger) == {"useful_step": 4.97, "startup": 1.0, "shutdown": 2.03}
    gang.events = [event for event in gang.events if event.data.get("class") != "shutdown"]
    ledger = fold([plan_event(), *gang.events])
    assert seconds_of(ledger) == {"useful_step": 5.0, "startup": 1.0, "unattributed": 2.0}
    assert ledger.unattributed_share == pytest.approx(0.25)


def test_time_before_the_node_was_paid_for_costs_nothing():
    gang = GangLog(1, 10.0, [[0]])
    gang.clock[0] = 8.0  # the process began two seconds before the agent said so
    gang.phase("startup", 5.0)
    gang.steps(1, 1, useful_step=2.0)
    gang.outcome("completed")
    gang.ended("completed", 5.0)
    ledger = fold([plan_event(), *gang.events])
    assert seconds_of(ledger) == {"useful_step": 2.0, "startup": 3.0}


def test_each_node_is_priced_by_the_plan_that_was_in_force():
    first = GangLog(1, 10.0, [[0]])
    first.phase("startup", 10.0)
    first.ended("node_lost", 10.0)
    second = GangLog(2, 40.0, [[0, 1]])
    second.phase("startup", 10.0)
    second.outcome("completed")
    second.phase("shutdown", 0.0)
    second.ended("completed", 10.0)
    plans = [plan_event(3.6, simulated=True, t=0.0), plan_event(36.0, None, t=30.0)]
    ledger = fold([*plans, *first.events, *second.events])
    # 10 s at a tenth of a cent, 10 s at a cent: a node, not a rank
    assert ledger.total_usd == Decimal("0.110000")
    assert ledger.price_kind == "recorded 2026-07-20"
    assert ledger.useful_on_demand_usd is None
    assert fold(first.events).price_kind == "unpriced"


def test_ranks_without_an_agent_are_billed_from_their_own_events():
    events = [event for event in clean_run() if event.rank >= 0]
    ledger = fold([plan_event(), *events])
    assert ledger.paid_rank_seconds == 2 * 17.0  # from the process start to the last event
    assert seconds_of(ledger)["startup"] == 6.0
    assert fold([]).total_usd == 0


@given(
    st.lists(st.decimals(min_value=0, max_value=1000, places=9), min_size=1, max_size=12),
    st.integers(0, 6),
)
def test_apportioned_parts_sum_to_the_rounded_whole(amounts: list[Decimal], decimals: int):
    parts = apportion(amounts, decimals)
    assert sum(parts) == round_amount(sum(amounts), decimals)
    assert all(
        abs(part - amount) < Decimal(1).scaleb(-decimals)
        for part, amount in zip(parts, amounts, strict=True)
    )


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(timelines(), st.randoms(use_true_random=False))
def test_every_paid_rank_second_is_in_exactly_one_class(timeline: tuple[list[Event], int], random):
    events, thrown = timeline
    ledger = fold(events)
    assert sum(line.rank_microseconds for line in ledger.lines) == ledger.paid_microseconds
    assert sum((line.usd for line in ledger.lines), Decimal(0)) == ledger.total_usd
    assert all(line.rank_microseconds > 0 and line.usd >= 0 for line in ledger.lines)
    assert ledger.redone_steps == thrown
    shuffled = list(events)
    random.shuffle(shuffled)
    assert fold(shuffled) == ledger


@settings(max_examples=40, deadline=None)
@given(timelines(), st.data())
def test_any_prefix_of_a_log_has_a_ledger(timeline: tuple[list[Event], int], data: st.DataObject):
    events = sorted(timeline[0], key=lambda event: event.t_wall)
    ledger = fold(events[: data.draw(st.integers(0, len(events)))])
    assert sum(line.rank_microseconds for line in ledger.lines) == ledger.paid_microseconds
    assert sum((line.usd for line in ledger.lines), Decimal(0)) == ledger.total_usd


def test_an_unknown_class_is_named():
    gang = GangLog(1, 0.0, [[0]])
    gang.phase("coffee", 2.0)
    with pytest.raises(
        LedgerError, match=r"rank 0: a phase event without classes and seconds: .*coffee"
    ):
        fold(gang.events)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("hang", {"startup": 10.0, "hang": 160.0 + 30.0}),
        ("rank_failed", {"startup": 10.0, "interruption": 160.0 + 30.0}),
        ("non_finite", {"startup": 10.0, "redone_step": 160.0, "unattributed": 30.0}),
    ],
)
def test_a_step_that_never_completed_is_no_useful_work(reason: str, expected: dict[str, float]):
    """Two ranks wait for each other until they are ended: each reports 75 s within its first step."""
    gang = GangLog(1, 0.0, [[0, 1]])
    gang.phase("startup", 5.0)
    gang.phase("data_wait", 5.0)
    gang.phase("useful_step", 75.0)
    gang.ended(reason, 100.0)
    events = [plan_event(3.6, 360.0), *gang.events]
    assert seconds_of(fold(events)) == expected
    report = build_report(events)
    assert report.actual["goodput"] == 0.0
    assert report.savings_usd == -report.total_usd, "no useful work at any price saves nothing"


def test_evaluation_after_the_last_step_of_a_completed_job_is_evaluation():
    gang = GangLog(1, 0.0, [[0]])
    gang.steps(1, 2, useful_step=2.0)
    gang.phase("useful_step", 0.5)
    gang.phase("evaluation", 3.0)
    gang.outcome("completed")
    gang.phase("shutdown", 1.0)
    gang.ended("completed", 8.5)
    assert seconds_of(fold([plan_event(), *gang.events])) == {
        "useful_step": 4.0,
        "evaluation": 3.0,
        "shutdown": 0.5 + 1.0,
    }


@settings(max_examples=200, deadline=None)
@given(faulty_jobs())
@pytest.mark.slow
def test_useful_time_is_that_of_completed_steps_in_the_final_weights(
    job: tuple[list[Event], float],
):
    events, own_seconds = job
    ledger = fold(events)
    report = build_report(events)
    useful = seconds_of(ledger).get("useful_step", 0.0)
    assert useful == pytest.approx(own_seconds, abs=1e-3)
    assert sum(line.rank_microseconds for line in ledger.lines) == ledger.paid_microseconds
    goodput = build_job_row(report)["goodput"]
    assert goodput == pytest.approx(own_seconds / ledger.paid_rank_seconds, abs=1e-6)
    if own_seconds == 0.0:
        assert goodput == 0.0 and (report.savings_usd is None or report.savings_usd <= 0)
        assert format_job_rows([report, report])[-1][JOB_HEADER.index("goodput")] == "0.0 %", (
            "of the fleet"
        )
