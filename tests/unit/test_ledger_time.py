"""Paid time of nodes and ranks: where it starts and ends, what each event accounts for, and what is
waste.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.core.events import (
    GENERATION_ENDED,
    GENERATION_STARTED,
    NODE_ENDED,
    NODE_HEARTBEAT,
    NODE_STARTED,
    PHASE,
    STEP,
    Event,
)
from ebbflow.cost.errors import LedgerError
from ebbflow.cost.ledger.generations import RecordedGeneration
from ebbflow.cost.ledger.timeline import (
    MACHINE_KEYS,
    NodeTime,
    RankTime,
    compute_rank_times,
    compute_rate,
)
from ebbflow.cost.ledger.timeline import read_paid_nodes as read_nodes
from tests.support.timelines import WALL, event

STARTED = NODE_STARTED
ENDED = NODE_ENDED
BEAT = NODE_HEARTBEAT

WORK = {
    "useful_step": 4.0,
    "data_wait": 2.0,
    "evaluation": 1.0,
    "checkpoint_stall": 0.5,
    "startup": 0.25,
}

_kinds = st.sampled_from(["startup", "useful_step", "data_wait", "evaluation", "shutdown"])
_intervals = st.lists(st.tuples(_kinds, st.integers(0, 5000), st.integers(0, 2000)), max_size=6)


def of_node(name: str, t: float, node: int = 0, **data: Any) -> Event:
    return event(name, t, generation=1, node=node, **data)


def phase(t: float, kind: str, seconds: float, rank: int = 0, node: int = 0) -> Event:
    return event(
        PHASE, t, generation=1, node=node, rank=rank, **{"class": kind, "seconds": seconds}
    )


def step(
    t: float, number: int | None = 1, rank: int = 0, skipped: str | None = None, **seconds: float
) -> Event:
    return event(STEP, t, generation=1, rank=rank, step=number, seconds=seconds, skipped=skipped)


def generation(
    reason: str | None = None,
    *,
    planned: bool = False,
    running: bool = False,
    kept: tuple[float, float] = (0.0, 100.0),
) -> RecordedGeneration:
    return RecordedGeneration(
        number=1,
        parent_step=0,
        started_wall=WALL,
        ended_wall=WALL,
        reason=reason,
        culprit="",
        user_code=False,
        planned=planned,
        running=running,
        kept=kept,
    )


COMPLETED = generation("completed", planned=True)
KILLED = generation("rank_killed")


def rank_time(
    events: list[Event], of: RecordedGeneration = COMPLETED, *, seconds: float | None = 100.0
) -> RankTime:
    """Time of rank 0 on a node that starts at 0 s and, unless `seconds` is None, ends after them."""
    agent = [of_node(STARTED, 0.0, ranks=[0])]
    if seconds is not None:
        agent.append(of_node(ENDED, seconds, seconds=seconds))
    [node] = read_nodes([*agent, *events])
    [rank] = compute_rank_times(node, of)
    assert sum(rank.classes.values()) == rank.paid
    return rank


def seconds_of(rank: RankTime) -> dict[str, float]:
    return {str(kind): micros / 1e6 for kind, micros in rank.classes.items() if micros}


def only_node(*events: Event) -> NodeTime:
    [node] = read_nodes(events)
    return node


def test_a_node_starts_and_ends_with_its_agents_events() -> None:
    events = [
        of_node(STARTED, 10.0, ranks=[1, 0], host="h"),
        of_node(STARTED, 20.0, ranks=[7]),
        of_node(BEAT, 500.0, seconds=400.0),
        phase(600.0, "startup", 1.0, rank=2),
        of_node(ENDED, 90.0, seconds=70.0),
        of_node(ENDED, 95.0, seconds=75.5),
    ]
    node = only_node(*events)
    assert (node.start, node.end, node.measured) == (10.0, 85.5, True), (
        "the first start, and the last end"
    )
    assert (node.ranks, node.machine) == ([0, 1, 2], {"host": "h"})
    assert (node.started_wall, node.ended_wall) == (WALL + 10.0, WALL + 85.5)
    assert (node.paid_seconds, node.paid_micros) == (75.5, 75_500_000)


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ([of_node(ENDED, 50.0)], 50.0),  # an end without seconds: by its time
        ([], 10.0),
        ([of_node(BEAT, 50.0)], 10.0),  # a heartbeat without seconds proves nothing
        ([of_node(BEAT, 50.0, seconds=30.0), of_node(BEAT, 60.0, seconds=20.0)], 40.0),
        (
            [
                of_node(BEAT, 50.0, seconds=30.0),
                phase(41.0, "startup", 1.0),
                phase(12.0, "startup", 1.0),
            ],
            41.0,
        ),
        ([of_node(BEAT, 50.0, seconds=30.0), phase(39.0, "startup", 1.0)], 40.0),
    ],
)
def test_a_node_without_seconds_of_its_end_ends_with_its_last_sign_of_life(
    events: list[Event], end: float
) -> None:
    node = only_node(of_node(STARTED, 10.0, ranks=[0]), *events)
    assert (node.start, node.end) == (10.0, end)
    assert node.measured is (bool(events) and events[0].name == ENDED)


def proof(t: float = 0.0) -> Event:
    """An event that proves the generation and is no event of a node's time."""
    return of_node(GENERATION_STARTED, t)


@pytest.mark.parametrize(
    ("events", "start", "wall"),
    [
        # By the agent's clock: the earliest start that its events name.
        ([of_node(BEAT, 50.0, seconds=30.0), of_node(ENDED, 90.0, seconds=75.0)], 15.0, 15.0),
        ([of_node(BEAT, 50.0, seconds=30.0), phase(25.0, "startup", 9.0)], 20.0, 20.0),
        # By the ranks: the start of the first interval of any of them.
        ([of_node(BEAT, 50.0), phase(25.0, "startup", 9.0)], 16.0, 16.0),
        ([phase(25.0, "startup", 9.0, rank=1), phase(26.0, "startup", 12.0, rank=0)], 14.0, 14.0),
    ],
)
def test_a_lost_start_of_a_node_follows_from_its_other_events(
    events: list[Event], start: float, wall: float
) -> None:
    node = only_node(proof(), *events)
    assert (node.start, node.started_wall) == (start, WALL + wall)
    assert node.machine == {}


def test_a_node_without_any_interval_and_without_a_start_is_not_paid() -> None:
    spoke = event("commit", 20.0, generation=1, rank=0, step=3)
    assert read_nodes([proof(), spoke, of_node(BEAT, 30.0)]) == []


@pytest.mark.parametrize(
    ("events", "start"),
    [
        # Phases that a rank emits together belong to one interval, and each of them is in it once.
        (
            [
                phase(20.0, "startup", 3.0),
                phase(20.0, "restore", 2.0),
                phase(20.0, "data_wait", 1.0),
            ],
            14.0,
        ),
        ([phase(20.0, "startup", 3.0), phase(20.5, "restore", 2.0)], 15.0),
        ([phase(20.0, "startup", 3.0), phase(20.75, "restore", 2.0)], 17.0),
        (
            [
                phase(20.0, "startup", 3.0),
                phase(20.25, "restore", 2.0),
                phase(20.75, "data_wait", 1.0),
            ],
            14.0,
        ),
        ([phase(20.0, "startup", 3.0), phase(20.0, "startup", 2.0)], 17.0),
        (
            [phase(20.0, "startup", 3.0), phase(20.0, "restore", 2.0), phase(20.0, "restore", 1.0)],
            15.0,
        ),
        ([phase(20.0, "startup", 3.0), step(20.25, useful_step=2.0)], 17.0),
        ([step(20.0, useful_step=3.0, data_wait=1.0), phase(20.25, "restore", 2.0)], 16.0),
        (
            [
                phase(20.0, "startup", 3.0),
                step(20.25, useful_step=2.0),
                phase(20.25, "restore", 1.0),
            ],
            17.0,
        ),
    ],
)
def test_the_first_interval_of_a_rank_has_all_phases_that_it_emitted_together(
    events: list[Event], start: float
) -> None:
    assert only_node(*events).start == start


def test_the_ledger_distinguishes_nodes_by_run_attempt_generation_and_number() -> None:
    first = phase(20.0, "startup", 3.0)
    others = [
        Event(**{**first.__dict__, "run": "run-2"}),
        Event(**{**first.__dict__, "attempt": 7}),
        Event(**{**first.__dict__, "generation": 0}),
        Event(**{**first.__dict__, "node": 1}),
    ]
    nodes = read_nodes([*reversed(others), first])
    assert [(node.generation, node.node) for node in nodes] == [
        (0, 0),
        (1, 0),
        (1, 0),
        (1, 0),
        (1, 1),
    ]
    assert all(len(events) == 1 for node in nodes for events in node.events.values())


def test_heartbeats_and_ends_alone_do_not_prove_a_generation() -> None:
    alone = [of_node(BEAT, 30.0, seconds=20.0), of_node(ENDED, 40.0, seconds=30.0)]
    assert read_nodes(alone) == []
    assert len(read_nodes([*alone, proof()])) == 1
    assert len(read_nodes([*alone, of_node(GENERATION_ENDED, 41.0)])) == 1


def test_a_node_without_a_list_of_ranks_has_as_many_as_the_largest_other_node() -> None:
    lost = [of_node(BEAT, 30.0, node=2, seconds=20.0)]
    assert [node.ranks for node in read_nodes([proof(), *lost])] == [[2]], (
        "no node has ranks: one for each"
    )
    others = [of_node(STARTED, 0.0, ranks=[0, 1, 2]), of_node(STARTED, 0.0, node=1, ranks=[3])]
    assert [node.ranks for node in read_nodes([*others, *lost])] == [[0, 1, 2], [3], [6, 7, 8]]
    assert only_node(of_node(STARTED, 0.0)).ranks == [0], "a start that does not name its ranks"


def test_ranks_and_events_of_a_node_are_in_order() -> None:
    """Events are read by the wall clock, which may jump back; those of a node are ordered by its
    monotonic clock.
    """
    late = phase(30.0, "restore", 2.0, rank=8)
    early = phase(20.0, "startup", 3.0, rank=8)
    node = only_node(of_node(STARTED, 0.0, ranks=[8, 1, 16]), late, early)
    assert node.ranks == [1, 8, 16]
    assert node.events == {8: [early, late]}


def test_a_node_knows_each_fact_of_its_machine_that_is_recorded() -> None:
    facts = {key: f"some {key}" for key in MACHINE_KEYS} | {"uptime_seconds": 7.5}
    named = (
        "instance_id",
        "instance_type",
        "zone",
        "zone_id",
        "region",
        "market",
        "uptime_seconds",
        "host",
    )
    assert set(MACHINE_KEYS) == {*named, "batch_job_id"}
    node = only_node(of_node(STARTED, 0.0, ranks=[0], other=1, **facts))
    assert node.machine == facts and node.instance_id == "some instance_id"
    nothing = dict.fromkeys(MACHINE_KEYS, "") | {"uptime_seconds": 0.0}
    empty = only_node(of_node(STARTED, 0.0, ranks=[0], **nothing))
    assert empty.machine == {} and empty.instance_id is None
    assert NodeTime(**{**empty.__dict__, "machine": {"instance_id": ""}}).instance_id is None


def test_time_of_a_rank_is_start_up_then_its_intervals_then_the_end() -> None:
    """Process start at 8 s, 2 s of start-up, a step, 3 s of nothing, a step, and 75 s after the
    last event.
    """
    events = [
        phase(10.0, "startup", 2.0),
        step(15.0, useful_step=5.0),
        step(25.0, 2, useful_step=7.0),
    ]
    rank = rank_time(events)
    assert seconds_of(rank) == {"startup": 10.0, "useful_step": 12.0, "unattributed": 78.0}
    assert [(span.start / 1e6, span.end / 1e6) for span in rank.spans] == [
        (0.0, 8.0),
        (8.0, 10.0),
        (10.0, 15.0),
        (18.0, 25.0),
        (25.0, 100.0),
    ]
    at_once = rank_time([step(4.0, useful_step=4.0)], seconds=4.0)
    assert [(span.start, span.end) for span in at_once.spans] == [
        (0, 0),
        (0, 4_000_000),
        (4_000_000, 4_000_000),
    ]
    assert seconds_of(rank_time(events, KILLED))["interruption"] == 75.0
    assert seconds_of(rank_time(events, generation("hang")))["hang"] == 75.0
    leaving = [*events, phase(26.0, "shutdown", 1.0)]
    assert seconds_of(rank_time(leaving))["shutdown"] == 75.0
    assert seconds_of(rank_time(leaving, KILLED)) == {
        "startup": 10.0,
        "useful_step": 12.0,
        "unattributed": 3.0,
        "shutdown": 1.0,
        "interruption": 74.0,
    }
    closed = [*leaving, step(27.0, 3, useful_step=1.0)]
    assert seconds_of(rank_time(closed)).get("shutdown") == 1.0, "the last event decides"


def test_time_after_the_last_event_is_estimated_only_if_the_end_was_not_measured() -> None:
    events = [phase(10.0, "startup", 2.0), step(15.0, useful_step=5.0)]
    assert rank_time(events, KILLED).estimated == frozenset()
    beat = of_node(BEAT, 40.0, seconds=40.0)
    assert rank_time([*events, beat], KILLED, seconds=None).estimated == {"interruption"}
    assert (
        rank_time([*events, of_node(BEAT, 15.0, seconds=15.0)], KILLED, seconds=None).estimated
        == frozenset()
    )
    assert rank_time([beat], KILLED, seconds=None).estimated == {"interruption"}
    assert rank_time([], KILLED).estimated == frozenset()


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        (KILLED, "interruption"),
        (generation("hang"), "hang"),
        (COMPLETED, "unattributed"),
        (generation("budget", planned=True), "startup"),
        (generation(running=True), "startup"),
        (generation(), "interruption"),
    ],
)
def test_a_node_without_any_rank_event_was_waiting_or_was_lost(
    of: RecordedGeneration, kind: str
) -> None:
    rank = rank_time([], of)
    assert seconds_of(rank) == {kind: 100.0}
    assert [(span.start, span.end, dict(span.classes)) for span in rank.spans] == [
        (0, 100_000_000, {kind: 100_000_000})
    ]


def test_a_silent_rank_beside_one_that_spoke_was_not_about_to_start() -> None:
    """Rank 1 has no event although rank 0 of the same node has one."""
    node = only_node(
        of_node(STARTED, 0.0, ranks=[0, 1]),
        phase(10.0, "startup", 2.0),
        of_node(ENDED, 50.0, seconds=50.0),
    )
    _, silent = compute_rank_times(node, generation("budget", planned=True))
    assert seconds_of(silent) == {"unattributed": 50.0}
    _, silent = compute_rank_times(node, generation(running=True))
    assert seconds_of(silent) == {"unattributed": 50.0}


def test_time_of_ranks_is_computed_once_for_each_reading_of_the_generation() -> None:
    node = only_node(of_node(STARTED, 0.0, ranks=[0]), of_node(ENDED, 9.0, seconds=9.0))
    first = compute_rank_times(node, KILLED)
    assert compute_rank_times(node, KILLED) is first
    assert seconds_of(compute_rank_times(node, generation("hang"))[0]) == {"hang": 9.0}
    assert node == only_node(of_node(STARTED, 0.0, ranks=[0]), of_node(ENDED, 9.0, seconds=9.0)), (
        "it is a cache"
    )
    assert "rank_times" not in repr(node)


@pytest.mark.parametrize(
    ("number", "skipped", "kept", "waste"),
    [
        (1, None, (0.0, 1.0), ""),
        (1, "loss", (0.0, 1.0), "skipped_step"),
        (1, None, (1.0, 2.0), "redone_step"),
        (2, None, (0.0, 1.0), "redone_step"),
        (2, "loss", (0.0, 1.0), "redone_step"),
        (None, None, (0.0, 1.0), "redone_step"),
    ],
)
def test_a_step_is_waste_if_it_was_skipped_or_is_not_in_the_final_weights(
    number, skipped, kept, waste: str
) -> None:
    """Work, waits for data and evaluation of such a step are waste; a save and a start-up are not."""
    of = generation("completed", planned=True, kept=kept)
    found = seconds_of(rank_time([step(7.75, number, skipped=skipped, **WORK)], of, seconds=7.75))
    assert found == (WORK if not waste else {waste: 7.0, "checkpoint_stall": 0.5, "startup": 0.25})


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        # Of a step that did not complete, evaluation and waits for data are waste only if the end
        # cut it off.
        (COMPLETED, {"shutdown": 4.0, "data_wait": 2.0, "evaluation": 1.0}),
        (generation(running=True), {"shutdown": 4.0, "data_wait": 2.0, "evaluation": 1.0}),
        (KILLED, {"interruption": 7.0}),
        (generation(), {"interruption": 7.0}),
        (generation("hang"), {"hang": 7.0}),
        (generation("non_finite", planned=True), {"redone_step": 7.0}),
        (generation("budget", planned=True), {"redone_step": 7.0}),
    ],
)
def test_phases_of_a_step_that_never_completed_are_wasted_by_the_end(
    of: RecordedGeneration, expected: dict
) -> None:
    kinds = {"useful_step": 4.0, "data_wait": 2.0, "evaluation": 1.0, "checkpoint_stall": 0.5}
    events = []
    reached = 0.0
    for kind, seconds in kinds.items():
        reached += seconds
        events.append(phase(reached, kind, seconds))
    assert seconds_of(rank_time(events, of, seconds=reached)) == {
        **expected,
        "checkpoint_stall": 0.5,
    }


def test_wasted_time_is_added_to_time_of_the_same_class() -> None:
    of = generation("completed", planned=True, kept=(1.0, 2.0))
    both = step(3.0, 1, useful_step=2.0, redone_step=1.0)
    assert seconds_of(rank_time([both], of, seconds=3.0)) == {"redone_step": 3.0}
    no_seconds = step(3.0, 1, useful_step=0.0, checkpoint_stall=3.0)
    assert set(rank_time([no_seconds], of, seconds=3.0).classes) == {
        "startup",
        "checkpoint_stall",
        "unattributed",
    }


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # The node starts at 0 s: an interval from -6 s to 4 s loses its first 6 s, of the longest
        # class first.
        ([step(4.0, useful_step=7.0, data_wait=3.0)], {"useful_step": 1.0, "data_wait": 3.0}),
        ([step(1.0, useful_step=7.0, data_wait=3.0)], {"data_wait": 1.0}),
        ([step(4.0, data_wait=3.0, useful_step=7.0)], {"useful_step": 1.0, "data_wait": 3.0}),
        # It ends at 20 s: of an interval from 12 s to 24 s, 4 s are not paid.
        (
            [step(24.0, useful_step=7.0, data_wait=5.0)],
            {"startup": 12.0, "useful_step": 3.0, "data_wait": 5.0},
        ),
        # Both ends are outside.
        ([step(25.0, useful_step=20.0, data_wait=10.0)], {"useful_step": 10.0, "data_wait": 10.0}),
        ([step(30.0, useful_step=5.0)], {"startup": 20.0}),
    ],
)
def test_time_outside_the_paid_time_is_cut_off_the_longest_class(
    events: list[Event], expected: dict
) -> None:
    found = seconds_of(rank_time(events, seconds=20.0))
    found.pop("unattributed", None)
    assert found == expected


@pytest.mark.parametrize(
    ("paid", "excess", "fits"),
    [
        # Below 10 s of paid time 50 ms are allowed, above them 0.5 %.
        (4.0, 0.05, True),
        (4.0, 0.050001, False),
        (100.0, 0.5, True),
        (100.0, 0.500001, False),
        (10.0, 0.05, True),
        (10.0, 0.050001, False),
        (12.0, 0.06, True),
        (12.0, 0.060001, False),
    ],
)
def test_intervals_may_exceed_the_paid_time_by_half_a_percent_or_50_milliseconds(
    paid: float, excess: float, fits: bool
) -> None:
    """A step takes all of the time, and one more phase has the excess."""
    events = [step(paid, useful_step=paid), phase(paid, "checkpoint_stall", excess)]
    if not fits:
        with pytest.raises(
            LedgerError, match=rf"rank 0: its intervals exceed its paid time by {excess:.3f} s"
        ):
            rank_time(events, seconds=paid)
        return
    found = rank_time(events, seconds=paid).classes
    assert found["useful_step"] == round((paid - excess) * 1e6), (
        "the excess is taken off the longest class"
    )
    assert found["checkpoint_stall"] == round(excess * 1e6)


def test_an_error_names_where_the_intervals_exceed_the_paid_time_and_by_how_much() -> None:
    events = [phase(6.0, "startup", 6.0), phase(6.0, "restore", 0.0), step(6.0, useful_step=2.5)]
    expected = (
        r"^generation 1, node 0, rank 0: its intervals exceed its paid time by 2.500 s: "
        r"startup 6.000 \+ useful_step 2.500 > paid 6.000 s$"
    )
    with pytest.raises(LedgerError, match=expected):
        rank_time(events, seconds=6.0)


@pytest.mark.parametrize(
    "event_",
    [
        event(PHASE, 5.0, generation=1, rank=0, seconds=1.0),
        event(PHASE, 5.0, generation=1, rank=0, **{"class": "startup"}),
        event(PHASE, 5.0, generation=1, rank=0, **{"class": "startup", "seconds": None}),
        event(PHASE, 5.0, generation=1, rank=0, **{"class": "startup", "seconds": "long"}),
        event(STEP, 5.0, generation=1, rank=0, step=1),
        event(STEP, 5.0, generation=1, rank=0, step=1, seconds=3.0),
        event(STEP, 5.0, generation=1, rank=0, step=1, seconds={"coffee": 3.0}),
    ],
)
def test_an_event_without_classes_and_seconds_is_a_ledger_error(event_: Event) -> None:
    with pytest.raises(
        LedgerError,
        match=r"^generation 1, node 0, rank 0: a (phase|step) event without classes and",
    ):
        rank_time([event_])


def test_negative_seconds_count_as_zero() -> None:
    assert seconds_of(rank_time([phase(5.0, "restore", -3.0)], seconds=6.0)) == {
        "startup": 5.0,
        "unattributed": 1.0,
    }


@pytest.mark.parametrize(
    ("data", "rate"),
    [
        ({"seconds": {"useful_step": 3.0, "data_wait": 1.0, "evaluation": 9.0}, "tokens": 8}, 2.0),
        ({"seconds": {"useful_step": 4.0}, "tokens": 8}, 2.0),
        ({"seconds": {"data_wait": 4.0}, "tokens": 8}, 2.0),
        ({"seconds": {"useful_step": 0.5}, "tokens": 8}, 16.0),
        ({"seconds": {}, "tokens": 8}, None),
        ({"seconds": {"useful_step": 4.0}, "tokens": 0}, None),
        ({"seconds": {"useful_step": 4.0}}, None),
        ({"tokens": 8}, None),
    ],
)
def test_rate_of_a_step_is_per_second_of_work_and_waits_for_data(
    data: dict[str, Any], rate: float | None
) -> None:
    assert compute_rate(event(STEP, 0.0, rank=0, step=1, **data), "tokens") == rate


@given(
    _intervals,
    st.integers(-9000, 9000),
    st.integers(1, 30_000),
    st.sampled_from([COMPLETED, KILLED]),
)
def test_classes_of_a_rank_sum_to_its_paid_time_wherever_its_events_are(
    intervals, reached: int, paid: int, of: RecordedGeneration
) -> None:
    """Phases one after the other, with pauses, on a node that may start and end before them.

    All in milliseconds.
    """
    events = []
    for kind, duration, pause in intervals:
        reached += duration + pause
        events.append(phase(reached / 1000, kind, duration / 1000))
    rank = rank_time(events, of, seconds=paid / 1000)
    assert rank.paid == paid * 1000
    assert all(micros >= 0 for micros in rank.classes.values())
    assert all(0 <= span.start <= span.end <= rank.paid for span in rank.spans)
