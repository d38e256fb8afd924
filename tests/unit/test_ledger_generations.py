"""Generations as their events record them: their ends, the steps that are kept, and the outcome of
the job.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from ebbflow.core.events import (
    COMMIT,
    GENERATION_ENDED,
    GENERATION_STARTED,
    NODE_ENDED,
    NODE_HEARTBEAT,
    NODE_STARTED,
    OUTCOME,
    PHASE,
    RESTORE,
    STEP,
    Event,
)
from ebbflow.cost.ledger.generations import (
    PLANNED_ENDS,
    RecordedGeneration,
    accounts_for_time,
    find_final_outcome,
    find_last,
    find_later_refusal,
    proves_generation,
    read_generations,
)
from tests.support.timelines import WALL, event, key


def of(
    generation: int,
    name: str,
    t: float = 0.0,
    *,
    rank: int = -1,
    step: int | None = None,
    **data: Any,
) -> Event:
    return event(name, t, generation=generation, rank=rank, step=step, **data)


def started(generation: int, parent: tuple[int, int] | None = None, t: float = 0.0) -> Event:
    """A start from the commit of (step, generation)."""
    if parent is None:
        return of(generation, GENERATION_STARTED, t, parent=None, parent_step=0)
    return of(generation, GENERATION_STARTED, t, parent=key(*parent), parent_step=parent[0])


def stepped(generation: int, *steps: int) -> list[Event]:
    return [of(generation, STEP, rank=0, step=step) for step in steps]


def committed(generation: int, step: int | None) -> Event:
    return of(generation, COMMIT, rank=0, step=step)


def outcome(generation: int, text: str, t: float = 0.0, rank: int = 0) -> Event:
    return of(generation, OUTCOME, t, rank=rank, outcome=text)


DONE, REFUSED, BUDGET = (outcome(2, text, t=50.0) for text in ("completed", "preflight", "budget"))


def ended(generation: int, reason: str | None, **data: Any) -> Event:
    return of(generation, GENERATION_ENDED, reason=reason, **data)


def only(*events: Event, running: bool = False) -> RecordedGeneration:
    [found] = read_generations(events, running=running).values()
    return found


@pytest.mark.parametrize(
    ("name", "rank", "proves", "accounts"),
    [
        (GENERATION_STARTED, -1, True, False),
        (GENERATION_ENDED, -1, True, False),
        (NODE_STARTED, -1, True, False),
        (NODE_HEARTBEAT, -1, False, False),
        (NODE_ENDED, -1, False, False),
        (OUTCOME, -1, False, False),
        (COMMIT, 0, True, False),
        (PHASE, 0, True, True),
        (STEP, 0, True, True),
        (PHASE, -1, False, False),
        (STEP, -1, False, False),
    ],
)
def test_an_event_proves_a_generation_or_accounts_for_time(
    name: str, rank: int, proves: bool, accounts: bool
) -> None:
    assert proves_generation(of(1, name, rank=rank)) is proves
    assert accounts_for_time(of(1, name, rank=rank)) is accounts


def test_a_generation_lasts_from_its_first_event_to_its_last() -> None:
    events = [
        started(1, t=7.0),
        of(1, COMMIT, 3.0, rank=0),
        of(1, COMMIT, 9.0, rank=0),
        of(1, NODE_HEARTBEAT, 99.0),
    ]
    found = only(*events)
    assert (found.number, found.started_wall, found.ended_wall) == (1, WALL + 3.0, WALL + 9.0)


def test_generations_are_ordered_by_number() -> None:
    assert list(read_generations([started(3), started(1), started(2)])) == [1, 2, 3]
    assert read_generations([of(1, NODE_HEARTBEAT)]) == {}


@pytest.mark.parametrize("reason", ["completed", "budget", "deadline", "non_finite", "no_capacity"])
def test_a_planned_end_is_no_interruption(reason: str) -> None:
    for events in ([started(1), ended(1, reason)], [started(1), outcome(1, reason)]):
        found = only(*events)
        assert (found.reason, found.planned, found.running, found.unplanned) == (
            reason,
            True,
            False,
            False,
        )
    assert {str(end) for end in PLANNED_ENDS} == {
        "completed",
        "budget",
        "deadline",
        "non_finite",
        "no_capacity",
    }


@pytest.mark.parametrize(
    "reason", ["rank_killed", "node_lost", "hang", "preflight", "failed", None]
)
def test_any_other_end_is_an_interruption(reason: str | None) -> None:
    found = only(started(1), ended(1, reason))
    assert (found.reason, found.planned, found.running, found.unplanned) == (
        reason,
        False,
        False,
        True,
    )


@pytest.mark.parametrize("reason", ["preflight", "config"])
def test_a_launchers_refusal_is_no_reason_of_a_generations_end(reason: str) -> None:
    lost = only(started(1), outcome(1, reason, rank=-1))
    assert (lost.reason, lost.unplanned) == (None, True)


@pytest.mark.parametrize(
    ("reason", "user_code"), [("failed", True), ("config", True), ("interrupted", False)]
)
def test_the_outcome_of_ranks_without_an_agent_is_the_end_of_their_generation(
    reason: str, user_code: bool
) -> None:
    left = only(started(1), outcome(1, reason))
    assert (left.reason, left.user_code, left.unplanned) == (reason, user_code, True)


def test_a_recorded_end_prevails_over_the_outcome_and_the_last_end_over_others() -> None:
    assert only(started(1), ended(1, "hang"), outcome(1, "completed")).reason == "hang"
    assert only(started(1), ended(1, "hang"), ended(1, "node_lost")).reason == "node_lost"
    assert only(started(1), outcome(1, "completed"), outcome(1, "failed")).reason == "failed"


def test_only_the_newest_generation_of_a_running_job_without_an_end_is_running() -> None:
    found = read_generations([started(1), started(2)], running=True)
    assert [generation.running for generation in found.values()] == [False, True]
    assert [generation.unplanned for generation in found.values()] == [True, False]
    assert not only(started(1)).running
    assert not only(started(1), ended(1, "hang"), running=True).running


@pytest.mark.parametrize(
    ("reason", "recorded", "user_code"),
    [
        ("rank_failed", True, True),
        ("agent_failed", True, True),
        ("rank_failed", False, False),
        ("rank_failed", None, False),
        ("superseded", True, False),
        ("rank_killed", True, False),
    ],
)
def test_user_code_is_at_fault_only_if_a_rank_or_an_agent_failed(
    reason: str, recorded: Any, user_code: bool
) -> None:
    assert only(started(1), ended(1, reason, user_code=recorded)).user_code is user_code


def test_the_culprit_is_text() -> None:
    assert only(started(1), ended(1, "hang", culprit="rank 3")).culprit == "rank 3"
    assert only(started(1), ended(1, "hang", culprit=None)).culprit == ""


def test_a_generation_keeps_the_steps_after_its_parents_up_to_the_last() -> None:
    found = read_generations(
        [started(1), committed(1, 4), started(2, parent=(4, 1)), committed(2, 9)]
    )
    kept_steps = []
    for generation in found.values():
        kept_steps.append([step for step in range(12) if generation.keeps(step)])
    assert kept_steps == [
        [1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]


@pytest.mark.parametrize(
    ("events", "running", "last"),
    [
        ([outcome(1, "completed")], False, math.inf),
        ([ended(1, "completed")], False, math.inf),
        ([], True, math.inf),
        ([outcome(1, "budget"), ended(1, "budget"), committed(1, 7), committed(1, 5)], False, 7.0),
        ([committed(1, 7), committed(1, None)], False, 7.0),
        ([], False, 3.0),  # no commit: nothing beyond the parent
        ([outcome(1, "budget")], True, math.inf),
    ],
)
def test_the_newest_generation_keeps_its_steps_to_its_last_commit_or_all(
    events, running: bool, last: float
) -> None:
    earlier = [started(0), committed(0, 3)]
    found = read_generations([*earlier, started(1, parent=(3, 0)), *events], running=running)
    assert found[1].kept == (3.0, last)
    assert found[0].kept == (0.0, 3.0)


def test_a_generation_that_is_no_ancestor_of_the_newest_keeps_nothing() -> None:
    """The third continues from the first, so that the second was in vain; the fourth starts anew."""
    first = [started(1), *stepped(1, 1, 2, 3, 4, 5, 6), committed(1, 4), committed(1, 6)]
    second = [started(2, parent=(6, 1)), *stepped(2, 7, 8), committed(2, 8)]
    third = [started(3, parent=(4, 1)), *stepped(3, 5, 6), committed(3, 6)]
    found = read_generations([*first, *second, *third])
    assert [generation.kept for generation in found.values()] == [
        (0.0, 4.0),
        (0.0, 0.0),
        (4.0, 6.0),
    ]
    found = read_generations([*first, *second, *third, started(4), committed(4, 2)])
    assert [generation.kept for generation in found.values()] == [(0.0, 0.0)] * 3 + [(0.0, 2.0)]


@pytest.mark.parametrize(
    ("events", "step"),
    [
        ([started(1)], 0),
        ([started(1, parent=(5, 0))], 5),
        ([started(1, parent=(5, 0)), of(1, RESTORE, rank=0, step=3)], 3),
        (
            [
                of(1, RESTORE, rank=0, step=3),
                of(1, RESTORE, rank=0, step=2),
                started(1, parent=(5, 0)),
            ],
            2,
        ),
        ([started(1, parent=(5, 0)), of(1, RESTORE, rank=0, step=None)], 5),
        ([of(1, GENERATION_STARTED, parent_step=None)], 0),
        ([started(1, parent=(5, 0)), *stepped(1, 9)], 5),
        (stepped(1, 9, 8, 10), 7),
        ([of(1, STEP, rank=0, step=None)], 0),
        ([committed(1, 4)], 0),
    ],
)
def test_the_parent_step_is_the_restored_one_else_the_planned_one_else_the_one_before_the_first(
    events, step
) -> None:
    assert only(*events).parent_step == step


def test_the_parent_generation_is_named_by_the_key_of_the_restored_commit() -> None:
    """Generations 1 and 2 both executed step 4, and only a key tells whose commit was restored."""
    before = [started(1), *stepped(1, 1, 2, 3, 4), started(2), *stepped(2, 1, 2, 3, 4)]
    planned = [started(3, parent=(4, 1)), *stepped(3, 5)]
    assert [generation.kept for generation in read_generations([*before, *planned]).values()][
        :2
    ] == [(0.0, 4.0), (0.0, 0.0)]
    restored = [*planned, of(3, RESTORE, rank=0, step=4, key=key(4, 2))]
    assert [generation.kept for generation in read_generations([*before, *restored]).values()][
        :2
    ] == [(0.0, 0.0), (0.0, 4.0)]


@pytest.mark.parametrize("parent", [None, "nonsense", key(4, 9), key(4, 3)])
def test_without_a_usable_key_the_parent_is_the_newest_earlier_generation_that_executed_the_step(
    parent,
) -> None:
    before = [started(1), *stepped(1, 4), started(2), *stepped(2, 3, 4), started(7), *stepped(7, 4)]
    third = of(3, GENERATION_STARTED, parent=parent, parent_step=4)
    found = read_generations([*before[:5], third, *stepped(3, 5)])
    assert [generation.kept for generation in found.values()] == [
        (0.0, 0.0),
        (0.0, 4.0),
        (4.0, 4.0),
    ]
    only_first = read_generations(
        [started(1), *stepped(1, 4), started(2), *stepped(2, 3, 5), third]
    )
    assert [generation.kept for generation in only_first.values()] == [
        (0.0, 4.0),
        (0.0, 0.0),
        (4.0, 4.0),
    ]
    nobody = read_generations([started(1), *stepped(1, 3), committed(1, 4), third])
    assert [generation.kept for generation in nobody.values()] == [(0.0, 0.0), (4.0, 4.0)]


def test_find_last_is_the_last_event_of_a_name() -> None:
    events = [committed(1, 3), committed(1, 4), outcome(1, "budget")]
    assert find_last(events, COMMIT) is events[1]
    assert find_last(events, RESTORE) is None


@pytest.mark.parametrize(
    ("events", "final", "refusal"),
    [
        ([], None, None),
        ([DONE], DONE, None),
        ([BUDGET, DONE], DONE, None),
        ([DONE, BUDGET], BUDGET, None),
        # A job that completed stays completed, whether preflight or the configuration refuses a
        # later run.
        ([DONE, REFUSED], DONE, REFUSED),
        ([DONE, outcome(2, "config", t=60.0)], DONE, outcome(2, "config", t=60.0)),
        ([DONE, BUDGET, REFUSED], REFUSED, None),
        ([BUDGET, REFUSED], REFUSED, None),
        ([REFUSED], REFUSED, None),
    ],
)
def test_the_final_outcome_is_the_last_one_unless_a_run_after_completion_was_refused(
    events, final, refusal
) -> None:
    events = [started(1, t=1.0), started(2, t=40.0), *events]
    assert find_final_outcome(events) == final
    assert find_later_refusal(events) == refusal


@pytest.mark.parametrize(
    ("told", "counts"),
    [
        (outcome(2, "budget", t=50.0), True),
        (outcome(2, "budget", t=1.0), True),  # of the newest generation, whatever the clock says
        (outcome(1, "budget", t=50.0), False),  # a rank of an older one
        # A step of the flow, at the start of the newest or later
        (outcome(0, "budget", t=40.0, rank=-1), True),
        (outcome(0, "budget", t=39.0, rank=-1), False),
    ],
)
def test_an_outcome_counts_if_it_is_of_the_newest_generation_or_of_a_later_flow_step(
    told: Event, counts: bool
) -> None:
    events = [started(1, t=60.0), started(2, t=40.0), started(2, t=30.0), told]
    assert (find_final_outcome(events) is told) is counts


def test_every_outcome_counts_as_long_as_no_generation_started() -> None:
    told = outcome(7, "preflight")
    assert find_final_outcome([told]) is told
