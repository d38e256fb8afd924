"""Paid time that no agent recorded: pauses, the minimum of an instance, and the parts of a Batch
job.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.core.events import BATCH_ATTEMPT, BATCH_SUBMITTED, PLACED, Event, LedgerClass
from ebbflow.cost.ledger.generations import RecordedGeneration
from ebbflow.cost.ledger.instances import (
    BatchJob,
    ExtraTime,
    PaidStay,
    find_batch_extras,
    find_instance_extras,
    find_unreported_nodes,
    group_by_instance,
    group_nodes_by_job,
    read_batch_jobs,
)
from ebbflow.cost.ledger.timeline import NodeTime
from tests.support.timelines import WALL, event, paid_node

BOOTED = {"instance_id": "i-1", "uptime_seconds": 600.0}

_seconds = st.integers(0, 200).map(float)


def on(start: float, seconds: float, node: int = 0, **machine: Any) -> NodeTime:
    """A node on the instance i-1, which was booted long ago unless `machine` says otherwise."""
    return paid_node(start, seconds, node=node, **{**BOOTED, **machine})


def batch_stay(started: float, stopped: float, cause: str) -> PaidStay:
    """A stay in a job of AWS Batch, in seconds after `WALL`."""
    return PaidStay(started=WALL + started, stopped=WALL + stopped, cause=cause, by_aws_batch=True)


def found_extras(
    nodes: list[NodeTime], stays: dict[int, PaidStay] | None = None
) -> list[tuple[int, str, float, float]]:
    """Each extra as (position of its node in `nodes`, class, start after `WALL`, seconds)."""
    positions = {id(node): position for position, node in enumerate(nodes)}
    return [
        (positions[id(extra.node)], str(extra.ledger_class), extra.start - WALL, extra.seconds)
        for extra in find_instance_extras(nodes, stays or {})
    ]


@pytest.mark.parametrize(
    ("pause", "counts"),
    [(0.0, False), (0.25, True), (30.0, True), (600.0, True), (600.25, False), (-5.0, False)],
)
def test_a_pause_of_an_instance_is_idle_up_to_ten_minutes(pause: float, counts: bool) -> None:
    nodes = [on(0.0, 70.0), on(70.0 + pause, 70.0)]
    assert found_extras(nodes) == ([(0, "idle", 70.0, pause)] if counts else [])


def test_pauses_are_of_one_instance_between_nodes_in_the_order_of_their_start() -> None:
    nodes = [
        on(300.0, 100.0),
        on(0.0, 100.0),
        on(150.0, 100.0, instance_id="i-2"),
        on(120.0, 100.0, instance_id=None),
    ]
    assert found_extras(nodes) == [(1, "idle", 100.0, 200.0)]


def test_a_pause_begins_when_the_last_of_overlapping_nodes_ends() -> None:
    """The second node ends within the first one; the pause belongs to the node that ended last."""
    nodes = [on(0.0, 100.0), on(20.0, 50.0, node=1), on(130.0, 70.0)]
    assert found_extras(nodes) == [(0, "idle", 100.0, 30.0)]
    nodes = [on(0.0, 100.0), on(20.0, 90.0, node=1), on(130.0, 70.0)]
    assert found_extras(nodes) == [(1, "idle", 110.0, 20.0)]
    nodes = [on(0.0, 100.0), on(20.0, 80.0, node=1), on(130.0, 70.0)]
    assert found_extras(nodes) == [(1, "idle", 100.0, 30.0)], (
        "of two that end together, the one that started last"
    )


@pytest.mark.parametrize(
    ("nodes", "missing"),
    [
        ([(0.0, 20.0)], 40.0),
        ([(0.0, 60.0)], 0.0),
        ([(0.0, 59.75)], 0.25),
        ([(0.0, 60.25)], 0.0),
        ([(0.0, 20.0), (30.0, 15.0)], 15.0),  # a pause is paid as well
        ([(0.0, 20.0), (10.0, 15.0)], 35.0),  # overlapping nodes count once
        ([(0.0, 20.0), (5.0, 10.0)], 40.0),
        ([(0.0, 20.0), (1000.0, 15.0)], 25.0),  # too long a pause is not
    ],
)
def test_an_instance_is_billed_a_minute_at_least(
    nodes: list[tuple[float, float]], missing: float
) -> None:
    listed = [
        on(start, seconds, number, uptime_seconds=None)
        for number, (start, seconds) in enumerate(nodes)
    ]
    charges = [extra for extra in found_extras(listed) if extra[1] == "minimum_charge"]
    end = max(start + seconds for start, seconds in nodes)
    last = [start + seconds for start, seconds in nodes].index(end)
    assert charges == ([(last, "minimum_charge", end, missing)] if missing else [])


@pytest.mark.parametrize(
    ("uptime", "before", "missing"),
    [
        (None, 0.0, 40.0),
        (12.5, 0.0, 27.5),
        (40.0, 0.0, 0.0),
        (12.5, 5.0, 27.5),  # 5 s of the uptime are in Batch's time, which is paid: 7.5 s are not
        (3.0, 5.0, 35.0),
    ],
)
def test_the_minute_counts_from_the_boot_of_the_instance(
    uptime: float | None, before: float, missing: float
) -> None:
    node = on(0.0, 20.0, uptime_seconds=uptime)
    if before:
        stays = {id(node): batch_stay(-before, 20.0, "reclaimed")}
    else:
        stays = {}
    found = found_extras([node], stays)
    assert found == ([(0, "minimum_charge", 20.0, missing)] if missing else [])


def test_the_boot_is_that_of_the_first_node() -> None:
    nodes = [on(0.0, 10.0, uptime_seconds=15.0), on(10.0, 10.0, uptime_seconds=50.0)]
    assert found_extras(nodes) == [(1, "minimum_charge", 20.0, 25.0)]


@pytest.mark.parametrize(
    ("cause", "found"),
    [
        # AWS Batch keeps the instance for 300 s, of which the next job takes 100
        ("ended", [(0, "idle", 80.0, 15.0), (1, "scale_down", 180.0, 200.0)]),
        ("reclaimed", []),  # a reclaimed instance is not billed afterwards
    ],
)
def test_a_pause_between_batch_jobs_is_measured_by_their_times(cause: str, found: list) -> None:
    nodes = [on(0.0, 70.0), on(100.0, 70.0)]
    stays = {
        id(nodes[0]): batch_stay(-10.0, 80.0, cause),
        id(nodes[1]): batch_stay(95.0, 180.0, "reclaimed"),
    }
    assert found_extras(nodes, stays) == found
    # Batch's times decide which job came first, too, when its clock and the machines' are apart.
    swapped = {
        id(nodes[0]): batch_stay(200.0, 470.0, "reclaimed"),
        id(nodes[1]): batch_stay(100.0, 170.0, cause),
    }
    assert found_extras(nodes, swapped) == [(1, "idle", 170.0, 30.0)][: len(found)]


@pytest.mark.parametrize(
    ("causes", "second", "found"),
    [
        (["ended"], None, [(0, "scale_down", 80.0, 300.0)]),
        (["user_code"], None, [(0, "scale_down", 80.0, 300.0)]),
        (["reclaimed"], None, []),
        # The pause of an instance that served both jobs is paid; after it one scale-down is left
        (["ended", "ended"], 280.0, [(0, "idle", 80.0, 200.0), (1, "scale_down", 380.0, 300.0)]),
        # After too long a pause the instance may have run another job
        (
            ["ended", "ended"],
            1080.0,
            [(0, "scale_down", 80.0, 300.0), (1, "scale_down", 1180.0, 300.0)],
        ),
        # The rest of the first job's 300 s stays charged, so that the total never falls
        (
            ["ended", "reclaimed"],
            180.0,
            [(0, "idle", 80.0, 100.0), (1, "scale_down", 280.0, 100.0)],
        ),
    ],
)
def test_batch_keeps_an_instance_for_five_minutes_after_its_job(
    causes: list[str], second: float | None, found: list
) -> None:
    nodes = [on(0.0, 70.0)]
    stays = {id(nodes[0]): batch_stay(0.0, 80.0, causes[0])}
    if second is not None:
        nodes.append(on(second, 90.0))
        stays[id(nodes[1])] = batch_stay(second, second + 100.0, causes[1])
    assert found_extras(nodes, stays) == found
    others = {key: replace(stay, by_aws_batch=False) for key, stay in stays.items()}
    assert "scale_down" not in {extra[1] for extra in found_extras(nodes, others)}


@pytest.mark.parametrize(
    ("job_id", "by_slurm", "by_aws_batch"),
    [("3f0c-1d", False, True), ("team/jobsets/js-1", False, False), ("slurm-7", True, False)],
)
def test_only_aws_batch_keeps_instances(job_id: str, by_slurm: bool, by_aws_batch: bool) -> None:
    job = replace(only_job(attempt()), job_id=job_id, by_slurm=by_slurm)
    assert job.stay(0).by_aws_batch is by_aws_batch


def test_nodes_of_an_unknown_instance_are_in_no_group() -> None:
    first = on(50.0, 1.0)
    second = on(10.0, 1.0)
    other = on(0.0, 1.0, instance_id="i-2")
    unknown = paid_node(0.0, 1.0)
    assert group_by_instance([first, second, other, unknown]) == {
        "i-2": [other],
        "i-1": [second, first],
    }


def attempt(
    started: float | None = 0.0, stopped: float | None = 100.0, at: float = 1e6, **data: Any
) -> Event:
    times = {"started_utc": started, "stopped_utc": stopped}
    return event(BATCH_ATTEMPT, at, **{"job_id": "j", **times, **data})


def only_job(*events: Event) -> BatchJob:
    [job] = read_batch_jobs(events).values()
    return job


def test_a_batch_job_is_read_with_its_defaults() -> None:
    job = only_job(attempt(5, 100.5))
    assert (job.job_id, job.nodes, job.ranks, job.started, job.stopped) == ("j", 1, 1, 5.0, 100.5)
    assert (job.cause, job.placed_wall, job.candidate, job.node_times) == ("unknown", 5.0, None, {})
    full = only_job(attempt(nodes=3, processes_per_node=8, cause="reclaimed", created_utc=2.0))
    assert (full.nodes, full.ranks, full.cause, full.placed_wall) == (3, 8, "reclaimed", 2.0)
    assert (
        only_job(attempt(nodes=0, processes_per_node=0)).nodes,
        only_job(attempt(nodes=-2)).ranks,
    ) == (1, 1)


def test_a_batch_job_was_placed_when_it_was_submitted() -> None:
    submitted = [
        event(BATCH_SUBMITTED, at, job_id=job_id) for at, job_id in ((3.0, "j"), (4.0, "other"))
    ]
    assert only_job(*submitted, attempt(created_utc=2.0)).placed_wall == WALL + 3.0
    assert only_job(*submitted[1:], attempt(created_utc=2.0)).placed_wall == 2.0
    assert only_job(event(PLACED, 3.0, job_id="j"), attempt()).placed_wall == 0.0


@pytest.mark.parametrize(
    "data",
    [
        {"started_utc": None},
        {"stopped_utc": None},
        {"job_id": ""},
    ],
)
def test_a_batch_job_without_an_id_or_both_times_was_not_paid_for(data: dict[str, Any]) -> None:
    assert read_batch_jobs(
        [attempt(**{"started": 0.0, "stopped": 9.0}), attempt(**data)]
    ).keys() == {"j"}
    assert read_batch_jobs([attempt(**data)]) == {}


def test_the_newest_record_of_a_batch_job_counts_if_it_is_complete() -> None:
    other = event(PLACED, 2e6, **attempt(stopped=90.0).data)
    records = [
        attempt(stopped=50.0),
        attempt(stopped=70.0),
        attempt(stopped=None),
        attempt(job_id="k"),
        other,
    ]
    assert {name: job.stopped for name, job in read_batch_jobs(records).items()} == {
        "j": 70.0,
        "k": 100.0,
    }


def test_the_pool_of_a_batch_job_is_known_only_with_its_instance_type() -> None:
    pool = {
        "instance_type": "g5.xlarge",
        "market": "spot",
        "region": "us-east-1",
        "zone": None,
        "usd_per_hour": 1.0,
        "quoted_usd_per_hour": "1.00",
        "price_kind": "recorded",
    }
    assert only_job(attempt(**pool, queue="q")).candidate == pool
    without = {key: value for key, value in pool.items() if key != "instance_type"}
    assert only_job(attempt(**without)).candidate is None


def test_a_node_of_a_batch_job_has_its_own_times_where_batch_reported_them() -> None:
    own = [[None, None], [5.0, None], [None, 90.0], [5.0, 90.0]]
    job = only_job(attempt(nodes=5, cause="reclaimed", node_times=own))
    stays = [(stay.started, stay.stopped) for stay in map(job.stay, range(5))]
    assert stays == [(0.0, 100.0), (5.0, 100.0), (0.0, 90.0), (5.0, 90.0), (0.0, 100.0)]
    assert {job.stay(node).cause for node in range(5)} == {"reclaimed"}


@pytest.mark.parametrize(
    ("started", "stopped", "micros"), [(1.0, 2.5, 1_500_000), (2.0, 2.0, 0), (2.0, 1.0, 0)]
)
def test_a_paid_stay_is_never_negative(started: float, stopped: float, micros: int) -> None:
    assert PaidStay(started=started, stopped=stopped, cause="ended").micros == micros


def test_extra_time_is_in_whole_microseconds() -> None:
    extra = ExtraTime(
        node=on(0.0, 1.0), ledger_class=LedgerClass.IDLE, start=0.0, seconds=1.2345678
    )
    assert extra.micros == 1_234_568


def job(job_id: str, started: float, stopped: float, nodes: int = 1, **fields: Any) -> BatchJob:
    times = {"started": WALL + started, "stopped": WALL + stopped, "placed_wall": WALL + started}
    return BatchJob(
        **{
            "job_id": job_id,
            "nodes": nodes,
            "ranks": 1,
            "cause": "ended",
            "candidate": {},
            **times,
            **fields,
        }
    )


def assigned(node: NodeTime, *jobs: BatchJob) -> str | None:
    known = {job.job_id: job for job in jobs}
    grouped = group_nodes_by_job([node], known)
    assert grouped.keys() == known.keys()
    return next((job_id for job_id, nodes in grouped.items() if nodes), None)


def test_a_node_belongs_to_the_job_that_it_names_and_to_no_other() -> None:
    jobs = (job("far", 9000.0, 9100.0), job("near", 0.0, 100.0))
    assert assigned(paid_node(0.0, 100.0, batch_job_id="far"), *jobs) == "far"
    assert assigned(paid_node(0.0, 100.0, batch_job_id="unknown"), *jobs) is None
    assert assigned(paid_node(0.0, 100.0)) is None


@pytest.mark.parametrize(
    ("start", "seconds", "jobs", "expected"),
    [
        # The longest overlap wins: 30 s, then 40 s, then 30 s.
        (70.0, 70.0, ((0, 100), (100, 200)), "1"),
        (70.0, 50.0, ((0, 100), (100, 200)), "0"),
        (70.0, 200.0, ((0, 100), (100, 140), (140, 170)), "1"),
        # Without any overlap the nearest job, at most 5 minutes away, since clocks differ.
        (399.75, 10.0, ((0, 100),), "0"),
        (400.0, 10.0, ((0, 100),), None),
        (-309.75, 10.0, ((0, 100),), "0"),
        (-310.0, 10.0, ((0, 100),), None),
        (300.0, 10.0, ((0, 100), (400, 500)), "1"),
        (280.0, 10.0, ((0, 190), (400, 500)), "0"),
    ],
)
def test_a_node_without_a_job_id_belongs_to_the_job_that_ran_at_its_time(
    start, seconds, jobs, expected
) -> None:
    listed = [job(str(number), *times) for number, times in enumerate(jobs)]
    assert assigned(paid_node(start, seconds), *listed) == expected


def test_a_node_without_a_job_id_is_compared_with_its_own_times_in_jobs_that_have_it() -> None:
    small = job("small", 0.0, 100.0, nodes=2)
    large = job("large", 0.0, 60.0, nodes=3)
    assert assigned(paid_node(0.0, 100.0, node=1), small, large) == "small"
    assert assigned(paid_node(0.0, 100.0, node=2), small, large) == "large"
    own = {1: (WALL + 90.0, WALL + 100.0)}
    assert (
        assigned(
            paid_node(0.0, 100.0, node=1), job("small", 0.0, 100.0, nodes=2, node_times=own), large
        )
        == "large"
    )


def generations(*unplanned: bool) -> dict[int, RecordedGeneration]:
    return {
        number: RecordedGeneration(
            number=number,
            parent_step=0,
            started_wall=WALL,
            ended_wall=WALL,
            reason=None,
            culprit="",
            user_code=False,
            planned=not cut_off,
            running=False,
            kept=(0.0, 0.0),
        )
        for number, cut_off in enumerate(unplanned, start=1)
    }


def batch_extras(
    of: BatchJob, *nodes: NodeTime, known: dict[int, RecordedGeneration] | None = None
) -> list[tuple[str, float, float]]:
    """Each extra as (class, start after `WALL`, seconds)."""
    extras = find_batch_extras(
        {of.job_id: nodes}, {of.job_id: of}, known or generations(True, True, True)
    )
    return [
        (str(extra.ledger_class), round(extra.start - WALL, 6), extra.seconds) for extra in extras
    ]


@pytest.mark.parametrize(
    ("started", "stopped", "expected"),
    [
        (-10.0, 60.0, [("startup", -10.0, 10.0), ("interruption", 40.0, 20.0)]),
        (-10.0, 40.0, [("startup", -10.0, 10.0)]),
        (0.0, 60.0, [("interruption", 40.0, 20.0)]),
        (0.0, 40.0, []),
        (0.0, 30.0, []),  # Batch reports less than the agents: nothing is missing
        # Its clock is minutes behind: all of it seems lead
        (-300.0, -230.0, [("startup", -300.0, 30.0)]),
        (300.0, 370.0, [("interruption", 340.0, 30.0)]),  # or ahead: all of it seems tail
        (-10.0, 40.000001, [("startup", -10.0, 10.0), ("interruption", 40.0, 0.000001)]),
    ],
)
def test_time_before_and_after_the_agents_is_lead_and_tail(
    started: float, stopped: float, expected: list
) -> None:
    """The agent recorded 40 s."""
    assert batch_extras(job("j", started, stopped), paid_node(0.0, 40.0)) == expected


@pytest.mark.parametrize(
    ("unplanned", "kind"), [((True, False), "idle"), ((False, True), "interruption")]
)
def test_the_tail_is_an_interruption_if_the_last_generation_was_cut_off(
    unplanned, kind: str
) -> None:
    nodes = [paid_node(0.0, 40.0, generation=1), paid_node(40.0, 40.0, generation=2)]
    assert batch_extras(job("j", 0.0, 90.0), *nodes, known=generations(*unplanned)) == [
        (kind, 80.0, 10.0)
    ]


@pytest.mark.parametrize(
    ("stopped", "expected"),
    [
        (100.0, [("idle", 40.0, 15.0), ("interruption", 95.0, 5.0)]),
        (95.0, [("idle", 40.0, 15.0)]),
        (90.0, [("idle", 40.0, 10.0)]),  # of the pause only what Batch reports
        (80.0, []),
        (70.0, []),
    ],
)
def test_a_pause_between_generations_of_a_node_is_idle(stopped: float, expected: list) -> None:
    """Two generations of 40 s with a pause of 15 s, in the order of their numbers."""
    nodes = [paid_node(55.0, 40.0, generation=2), paid_node(0.0, 40.0, generation=1)]
    assert batch_extras(job("j", 0.0, stopped), *nodes) == expected


def test_generations_of_a_node_are_ordered_by_number_and_then_by_their_start() -> None:
    """A machine that was started anew counts its seconds from zero; a number may have been started
    twice.
    """
    rebooted = [paid_node(10.0, 40.0, generation=2), paid_node(500.0, 40.0, generation=1)]
    known = generations(True, False)
    assert batch_extras(job("j", 500.0, 590.0), *rebooted, known=known) == [("idle", 580.0, 10.0)]
    twice = [paid_node(55.0, 40.0), paid_node(0.0, 40.0)]
    assert batch_extras(job("j", 0.0, 95.0), *twice) == [("idle", 40.0, 15.0)]


def test_several_pauses_share_the_time_that_is_left() -> None:
    nodes = [
        paid_node(start, 10.0, generation=number)
        for number, start in enumerate((0.0, 20.0, 30.0, 50.0), start=1)
    ]
    assert batch_extras(job("j", 0.0, 55.0), *nodes, known=generations(*[True] * 4)) == [
        ("idle", 10.0, 10.0),
        ("idle", 40.0, 5.0),
    ]


def test_nodes_of_a_job_have_their_extras_in_the_order_of_their_numbers() -> None:
    of = job("j", 0.0, 50.0, nodes=2, node_times={1: (WALL - 5.0, WALL + 40.0)})
    assert batch_extras(of, paid_node(0.0, 40.0, node=1), paid_node(0.0, 40.0, node=0)) == [
        ("interruption", 40.0, 10.0),
        ("startup", -5.0, 5.0),
    ]


def test_nodes_without_events_are_those_of_each_job_that_were_paid_for() -> None:
    jobs = {
        "a": job("a", 0.0, 50.0, nodes=3, node_times={2: (WALL, WALL)}),
        "b": job("b", 0.0, 50.0, nodes=2),
        "c": job("c", 50.0, 50.0),
    }
    reported = {"a": [paid_node(0.0, 40.0, node=1)], "b": [paid_node(0.0, 40.0, node=0)], "c": []}
    found = [(job.job_id, node) for job, node in find_unreported_nodes(reported, jobs)]
    assert found == [("a", 0), ("b", 1)]


@given(
    st.lists(st.tuples(_seconds, _seconds), min_size=1, max_size=5),
    st.integers(-400, 400),
    st.integers(0, 1000),
)
def test_extras_of_a_batch_job_are_the_whole_difference_to_its_agents(
    nodes, skew: int, whole: int
) -> None:
    """Generations of one node with pauses, and Batch's clock `skew` seconds from the agent's."""
    listed = []
    reached = 0.0
    for number, (pause, seconds) in enumerate(nodes, start=1):
        listed.append(paid_node(reached + pause, seconds, generation=number))
        reached += pause + seconds
    extras = batch_extras(
        job("j", skew, skew + whole), *listed, known=generations(*[True] * len(listed))
    )
    assert sum(seconds for _, _, seconds in extras) == max(
        0, whole - sum(seconds for _, seconds in nodes)
    )
    assert all(seconds > 0 for _, _, seconds in extras)
