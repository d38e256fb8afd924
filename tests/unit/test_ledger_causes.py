"""Lines, causes and steps of a ledger: each class of time in its cause, each discarded step counted
once.
"""

from __future__ import annotations

import random
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from ebbflow.core.events import (
    BATCH_ATTEMPT,
    BUDGET,
    CONFIGURED,
    GENERATION_ENDED,
    NODE_ENDED,
    NODE_HEARTBEAT,
    NODE_STARTED,
    PHASE,
    PLACED,
    STEP,
    Event,
    LedgerClass,
)
from ebbflow.cost.ledger.ledger import (
    Ledger,
    LedgerLine,
    compute_spent_usd,
    fold,
    last_notified_threshold,
)
from tests.support.timelines import WALL, GangLog, event, plan_event

ALL = ("startup", "restore", "data_wait", "evaluation", "checkpoint_stall", "shutdown")


def phases_log(
    number: int, start: float, reason: str, *kinds: str, ranks: int = 1, **machine: Any
) -> list[Event]:
    """One node whose ranks spend 10 s in each of the classes, and end with the last of them."""
    log = GangLog(number, start, [list(range(ranks))], machines=[machine])
    for kind in kinds:
        log.phase(kind, 10.0)
    log.ended(reason, 10.0 * len(kinds))
    return log.events


def causes_of(ledger: Ledger) -> dict[str, float]:
    return {line.cause: line.rank_microseconds / 1e6 for line in ledger.causes}


def test_each_class_of_a_planned_generation_has_its_cause() -> None:
    log = GangLog(1, 0.0, [[0]])
    for kind in ("startup", "restore"):
        log.phase(kind, 10.0)
    log.steps(1, 2, useful_step=10.0, data_wait=1.0, evaluation=2.0, checkpoint_stall=1.0)
    log.wait(5.0)
    log.add(STEP, log.now + 4.0, rank=0, step=3, seconds={"useful_step": 4.0}, skipped="loss")
    log.clock[0] += 4.0
    log.outcome("completed")
    log.phase("shutdown", 6.0)
    log.ended("completed", log.now)
    ledger = fold([plan_event(), *log.events])
    assert causes_of(ledger) == {
        "useful work": 20.0,
        "start and end": 26.0,
        "waiting for data": 2.0,
        "unattributed": 5.0,
        "evaluation": 4.0,
        "steps left out": 4.0,
        "saves": 2.0,
    }
    assert [line.cause for line in ledger.causes] == [
        "useful work",
        "start and end",
        "unattributed",
        "evaluation",
        "steps left out",
        "saves",
        "waiting for data",
    ], "useful work, then by dollars, then by name"
    assert [line.ledger_class for line in ledger.lines] == [
        kind for kind in LedgerClass if kind in {line.ledger_class for line in ledger.lines}
    ]


def test_an_interruption_is_charged_its_own_waste_and_the_start_up_after_it() -> None:
    """A hang loses 20 s and makes the second start necessary; that is killed, and the third start
    ends as planned.
    """
    first = phases_log(
        1,
        0.0,
        "hang",
        "startup",
        "useful_step",
        "checkpoint_stall",
        instance_id="i-1",
        uptime_seconds=3600,
    )
    second = phases_log(2, 40.0, "rank_killed", "startup", "restore", "useful_step")
    third = phases_log(3, 100.0, "completed", "startup", "shutdown")
    fourth = phases_log(4, 200.0, "completed", "startup")
    ledger = fold([plan_event(), *first, *second, *third, *fourth])
    assert causes_of(ledger) == {
        "start and end": 10.0
        + 10.0
        + 10.0,  # of the first start, the end of the third, and the start of the fourth
        "interruption: hang": 10.0 + 20.0,
        "interruption: rank killed": 10.0 + 10.0,
        "saves": 10.0,
    }


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("completed", "idle"),
        ("rank_killed", "interruption: rank killed"),
        (None, "interruption: no end recorded"),
    ],
)
def test_a_pause_after_a_generation_is_charged_to_its_end(reason: str | None, cause: str) -> None:
    machine = {"instance_id": "i-1", "uptime_seconds": 3600}
    first = phases_log(1, 0.0, reason or "x", "startup", ranks=2, **machine)
    if reason is None:
        first = [event for event in first if event.name != GENERATION_ENDED]
    ledger = fold([plan_event(), *first, *phases_log(2, 25.0, "completed", "shutdown", **machine)])
    assert causes_of(ledger)[cause] == 2 * 15.0, "of both ranks of the node before the pause"
    [line] = [line for line in ledger.lines if line.ledger_class == "idle"]
    assert (line.kind, line.usd, line.rank_seconds) == ("estimated", Decimal("0.015"), 30.0)


def test_a_minimum_charge_is_a_cause_of_its_own() -> None:
    ledger = fold([plan_event(), *phases_log(1, 0.0, "completed", "shutdown", instance_id="i-1")])
    assert causes_of(ledger) == {"minimum charge": 50.0, "start and end": 10.0}


@pytest.mark.parametrize(
    ("cause", "named"),
    [
        ("ended", "start and end"),
        ("reclaimed", "interruption: reclaimed before the first event"),
        ("user_code", "interruption: user code before the first event"),
    ],
)
def test_a_node_without_events_is_charged_to_what_ended_its_job(cause: str, named: str) -> None:
    times = {"started_utc": WALL, "stopped_utc": WALL + 50.0}
    attempt = event(
        BATCH_ATTEMPT, 99.0, job_id="j", nodes=1, processes_per_node=3, cause=cause, **times
    )
    ledger = fold([plan_event(), attempt])
    assert causes_of(ledger) == {named: 150.0}
    assert (ledger.total_usd, ledger.paid_rank_seconds) == (Decimal("0.05"), 150.0)
    assert ledger.price_kind == "recorded 2026-07-20"
    assert compute_spent_usd([plan_event(), attempt]) == 0.05


def test_cells_divide_the_same_seconds_and_dollars_by_cause_and_class() -> None:
    first = phases_log(1, 0.0, "hang", "startup", "useful_step")
    second = phases_log(2, 40.0, "hang", "startup", "evaluation", "useful_step")
    ledger = fold([plan_event(), *first, *second])
    cells = {(cause, str(kind)): (micros / 1e6, usd) for cause, kind, micros, usd in ledger.cells}
    assert cells == {
        ("start and end", "startup"): (10.0, Decimal("0.01")),
        ("interruption: hang", "hang"): (30.0, Decimal("0.03")),
        ("interruption: hang", "startup"): (10.0, Decimal("0.01")),
    }
    assert ledger.paid_microseconds == 50_000_000
    assert {line.cause: line.usd for line in ledger.causes} == {
        "start and end": Decimal("0.01"),
        "interruption: hang": Decimal("0.04"),
    }


def test_ledgers_are_equal_by_their_figures_and_not_by_their_bills() -> None:
    ledger = fold([plan_event(), *phases_log(1, 0.0, "hang", "startup")])
    figures = Ledger(
        lines=ledger.lines,
        paid_microseconds=ledger.paid_microseconds,
        total_usd=ledger.total_usd,
        price_kind=ledger.price_kind,
        useful_on_demand_usd=ledger.useful_on_demand_usd,
        same_on_demand_usd=ledger.same_on_demand_usd,
        redone_steps=ledger.redone_steps,
        causes=ledger.causes,
        cells=ledger.cells,
    )
    assert ledger == figures and ledger.nodes and figures.nodes == figures.unreported == ()
    silent = fold([event(BATCH_ATTEMPT, 9.0, job_id="j", started_utc=WALL, stopped_utc=WALL + 5.0)])
    assert silent.unreported and replace(silent, unreported=()) == silent


def test_the_price_kind_is_that_of_the_last_node() -> None:
    first = phases_log(1, 10.0, "hang", "startup")
    later = plan_event(simulated=True, t=30.0)
    ledger = fold([plan_event(), *first, later, *phases_log(2, 40.0, "completed", "startup")])
    assert ledger.price_kind == "simulated"
    assert fold([plan_event()]).price_kind == "unpriced"


def test_useful_work_on_demand_is_unknown_as_soon_as_one_price_is() -> None:
    def log(number: int, start: float) -> list[Event]:
        gang = GangLog(number, start, [[0], [1]])
        gang.steps(1, 1, useful_step=10.0, data_wait=5.0)
        gang.outcome("completed")
        gang.ended("completed", 15.0)
        return gang.events

    known = [plan_event(3.6, 7.2), *log(1, 0.0)]
    assert fold(known).useful_on_demand_usd == Decimal("0.04"), (
        "two nodes for 10 s at $0.002 a second, without waits"
    )
    first_unknown = [
        plan_event(3.6, None),
        plan_event(3.6, 7.2, t=50.0),
        *log(1, 0.0),
        *log(2, 60.0),
    ]
    assert fold(first_unknown).useful_on_demand_usd is None
    idle = fold([plan_event(3.6, 7.2), *phases_log(1, 0.0, "completed", "startup")])
    assert idle.useful_on_demand_usd == 0


def test_the_share_of_unattributed_time_is_of_all_paid_time() -> None:
    log = GangLog(1, 0.0, [[0]])
    log.phase("startup", 30.0)
    log.outcome("completed")
    log.ended("completed", 40.0)
    assert fold([plan_event(), *log.events]).unattributed_share == 0.25
    assert fold([]).unattributed_share == 0.0


def test_a_line_has_its_time_in_seconds() -> None:
    line = LedgerLine(
        ledger_class=LedgerClass.IDLE, rank_microseconds=1_500_000, usd=Decimal(1), kind="measured"
    )
    assert line.rank_seconds == 1.5


def test_events_are_ordered_by_wall_clock_and_then_by_the_monotonic_clock() -> None:
    """Two heartbeats of one second of the wall clock, of which the second is the last word on the
    settings.
    """

    def settings(t_mono: float, owner: str) -> Event:
        one = event(CONFIGURED, 5.0, settings=[{"key": "cost.owner", "value": owner}])
        return Event(**{**one.__dict__, "t_mono": t_mono})

    assert fold([settings(2.0, "bea"), settings(1.0, "ada")]).owner == "bea"
    early = Event(**{**settings(9.0, "eve").__dict__, "t_wall": WALL})
    assert fold([settings(2.0, "bea"), early]).owner == "bea"


def test_owner_and_project_are_of_the_newest_configuration_or_empty() -> None:
    rows = [
        {"key": "cost.budget_usd", "value": 5.0},
        {"key": "cost.owner", "value": None},
        {"key": "cost.project", "value": 7},
    ]
    ledger = fold(
        [
            event(CONFIGURED, 0.0, settings=[{"key": "cost.owner", "value": "ada"}]),
            event(CONFIGURED, 1.0, settings=rows),
        ]
    )
    assert (ledger.owner, ledger.project) == ("", "7")
    nothing = fold([event(CONFIGURED, 0.0, settings=[])])
    assert (nothing.owner, nothing.project) == ("", "")


@pytest.mark.parametrize(
    ("budget", "threshold"), [(10.0, 0.8), (20.0, 0.9), (None, 0.0), (30.0, 0.0)]
)
def test_the_last_notified_threshold_is_the_highest_of_the_current_budget(
    budget: float | None, threshold: float
) -> None:
    told = [(0.5, 10.0), (0.8, 10.0), (0.5, 10.0), (0.9, 20.0)]
    events = [event(BUDGET, 0.0, threshold=share, budget_usd=usd) for share, usd in told]
    other = event(STEP, 0.0, rank=0, step=1, threshold=0.99, budget_usd=10.0)
    assert last_notified_threshold([*events, other], budget) == threshold


def killed(
    trained: int | None, *steps: int, committed: int | None = None, ranks: int = 1
) -> list[Event]:
    """A generation that was killed after these steps, and whose agent knows the last one."""
    log = GangLog(1, 0.0, [list(range(ranks))])
    for step in steps:
        log.steps(step, step, useful_step=1.0)
    if committed:
        log.commit(committed)
    log.add(NODE_HEARTBEAT, log.now, node=0, seconds=log.now, trained=trained)
    log.add(GENERATION_ENDED, log.now, reason="rank_killed")
    return [plan_event(), *log.events]


@pytest.mark.parametrize(
    ("events", "redone"),
    [
        (killed(None, 1, 2, 3), 3),
        (killed(3, 1, 2, 3), 3),
        (killed(4, 1, 2, 3), 4),  # one step more than the ranks had recorded
        (killed(6, 1, 2, 3), 6),
        (killed(2, 1, 2, 3), 3),
        (killed(6, 1, 2, 3, committed=3), 3),
        (killed(4, 1, 2, 3, 4, committed=4), 0),
        (killed(5, 1, 2, 3, 4, committed=4), 1),
        (killed(2), 2),  # no step was recorded
        (killed(0), 0),
        (killed(3, 1, 2, 3, ranks=3), 3),  # all ranks execute a step together
    ],
)
def test_redone_steps_are_counted_once_up_to_the_last_that_the_agent_knows(
    events: list[Event], redone: int
) -> None:
    assert fold(events).redone_steps == redone


def test_redone_steps_of_a_later_generation_count_from_its_parent() -> None:
    """Generation 2 starts from step 4 and is killed in step 7 before a rank has recorded any step."""
    first = GangLog(1, 0.0, [[0]])
    first.steps(1, 5, useful_step=1.0)
    first.commit(4)
    first.ended("rank_killed", 5.0)
    second = GangLog(2, 20.0, [[0], [1]], parent=(4, 1))
    for node in (0, 1):
        second.add(NODE_HEARTBEAT, 30.0, node=node, seconds=10.0, trained=6)
    second.ended("rank_killed", 10.0)
    events = [plan_event(), *first.events, *second.events]
    assert fold(events).redone_steps == 1 + 2, "step 5, and then steps 5 and 6"
    unknown = event(NODE_HEARTBEAT, 50.0, generation=9, trained=6, seconds=1.0)
    assert fold([*events, unknown]).redone_steps == 3, (
        "a generation that no event proves executed nothing"
    )
    placed = event(PLACED, 50.0, generation=2, step="train", trained=9)
    assert fold([*events, placed]).redone_steps == 3, (
        "another event's step is the name of a step of the flow"
    )
    evaluated = event(STEP, 30.0, generation=2, rank=0, step=None, seconds={"evaluation": 1.0})
    assert fold([*events, evaluated]).redone_steps == 3


def test_spent_dollars_are_those_of_all_nodes_even_if_intervals_contradict_each_other() -> None:
    log = GangLog(1, 0.0, [[0], [1]])
    log.add(PHASE, 10.0, rank=0, **{"class": "startup", "seconds": 10.0})
    log.add(PHASE, 10.0, rank=0, **{"class": "restore", "seconds": 10.0})
    log.ended("completed", 20.0)
    times = {"started_utc": WALL, "stopped_utc": WALL + 50.0}
    silent = event(BATCH_ATTEMPT, 99.0, job_id="j", nodes=3, cause="ended", **times)
    late = plan_event(36.0, t=70.0)
    events = [late, plan_event(), *log.events, silent]
    # Two nodes of 20 s; by their times they are nodes 0 and 1 of the job, which was paid for 50 s
    # on three nodes.
    assert compute_spent_usd(events) == 0.15
    assert compute_spent_usd([late, plan_event(), *log.events]) == 0.04
    assert compute_spent_usd([]) == 0.0
    plans = [plan_event(36.0, t=-5.0), plan_event(3.6, t=-10.0)]
    assert compute_spent_usd([*plans, *log.events]) == 0.4, (
        "the newer of two plans, wherever it is in the list"
    )


def test_start_up_and_end_of_a_node_are_in_the_order_of_events_whatever_the_order_of_the_list() -> (
    None
):
    events = phases_log(1, 0.0, "completed", "startup", ranks=2)
    shuffled = []
    for name in (NODE_ENDED, PHASE, NODE_STARTED):
        for logged in events:
            if logged.name == name:
                shuffled.append(logged)
    rest = [event for event in events if event not in shuffled]
    assert fold([plan_event(), *shuffled, *rest]) == fold([plan_event(), *events])


@pytest.mark.parametrize("seed", range(30))
def test_a_total_of_half_a_unit_is_rounded_once_for_lines_and_causes(seed: int) -> None:
    """A sum of Decimals depends on its order in the 28th digit, which decides how a half is
    rounded.
    """
    draw = random.Random(seed)
    first, second = sorted(draw.sample(range(1, 9_000_000), 2))
    log = GangLog(1, 0.0, [list(range(7))])
    for kind, micros in (
        ("shutdown", first),
        ("restore", second - first),
        ("evaluation", 9_000_000 - second),
    ):
        log.phase(kind, micros / 1e6)
    log.ended("completed", 9.0)
    plan = plan_event()
    # Nine seconds at an odd multiple of $0.0002 an hour are an odd number of half micro-dollars.
    plan.data["chosen"]["quoted_usd_per_hour"] = str(
        (2 * draw.randrange(2000) + 1) * Decimal("0.0002")
    )
    ledger = fold([plan, *log.events])
    assert sum((line.usd for line in ledger.lines), Decimal(0)) == ledger.total_usd
    assert sum((line.usd for line in ledger.causes), Decimal(0)) == ledger.total_usd
