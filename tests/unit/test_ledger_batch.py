"""The bill of AWS Batch's jobs: what agents told, what nobody heard, each second once, whatever the
clocks say.
"""

from __future__ import annotations

import random
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.core.events import BATCH_ATTEMPT, BATCH_SUBMITTED, NODE_STARTED, Event
from ebbflow.cost.ledger.ledger import Ledger, compute_spent_usd, fold
from ebbflow.cost.report.figure_text import explain_figures
from ebbflow.cost.report.report import build_report
from tests.support.timelines import WALL, GangLog, event, plan_event, timelines

MICRO = 1_000_000


def told(
    job_id: str, started: float | None, stopped: float | None, *, at: float = 1e6, **data
) -> Event:
    """Batch's word of a job of one node and two ranks at $3.60 an hour: a tenth of a cent a second."""
    of_job = {
        "job_id": job_id,
        "job_name": "train",
        "nodes": 1,
        "cause": "reclaimed",
        "processes_per_node": 2,
    }
    where = {
        "instance_type": "g5.xlarge",
        "market": "spot",
        "usd_per_hour": 3.6,
        "quoted_usd_per_hour": "3.6",
    }
    times = {"created_utc": None, "started_utc": _wall(started), "stopped_utc": _wall(stopped)}
    return event(
        BATCH_ATTEMPT,
        at,
        **{**of_job, **where, "price_kind": "recorded 2026-07-20", **times, **data},
    )


def gang(
    job_id: str | None, *, start: float = 0.0, number: int = 1, ends: bool = False, **machine
) -> GangLog:
    """40 s of one node with two ranks: 10 of start-up, 4 steps of 5 s, 10 that are lost or lead to
    the end.
    """
    known = {**machine, **({"batch_job_id": job_id} if job_id else {})}
    log = GangLog(number, start, [[0, 1]], machines=[known])
    log.phase("startup", 10.0)
    log.steps(1, 4, useful_step=5.0)
    log.commit(4)
    if ends:
        log.outcome("completed")
        log.phase("shutdown", 10.0)
        log.ended("completed", 40.0)
    else:
        log.heartbeat(0, 40.0)
    return log


def seconds_of(ledger: Ledger) -> dict[str, float]:
    return {str(line.ledger_class): line.rank_seconds for line in ledger.lines}


def assert_adds_up(ledger: Ledger) -> None:
    for lines in (ledger.lines, ledger.causes):
        assert sum((line.usd for line in lines), Decimal(0)) == ledger.total_usd
        assert sum(line.rank_microseconds for line in lines) == ledger.paid_microseconds
        assert all(line.rank_microseconds >= 0 and line.usd >= 0 for line in lines)
    bills = (*ledger.nodes, *ledger.unreported)
    assert sum(bill.rank_microseconds for bill in bills) == ledger.paid_microseconds


def test_a_killed_attempt_pays_from_batchs_start_to_its_stop() -> None:
    events = [plan_event(3.6), *gang("j").events, told("j", -100.0, 60.0)]
    ledger = fold(events)
    assert ledger.total_usd == Decimal("0.16") == Decimal(str(compute_spent_usd(events)))
    found = seconds_of(ledger)
    assert found["startup"] == 2 * (100 + 10), (
        "Batch's start to the first word, and the agent's own"
    )
    assert found["interruption"] == 2 * (10 + 20), (
        "from the last step to the last word, and on to the stop"
    )
    assert_adds_up(ledger)


def test_time_after_a_planned_end_is_idle() -> None:
    ledger = fold(
        [plan_event(3.6), *gang("j", ends=True).events, told("j", -5.0, 43.0, cause="ended")]
    )
    assert seconds_of(ledger)["idle"] == 2 * 3.0 and seconds_of(ledger)["startup"] == 2 * 15.0
    assert ledger.total_usd == Decimal("0.048")


def test_a_node_that_never_spoke_was_starting() -> None:
    one = told("silent", 0.0, 50.0, nodes=2)
    ledger = fold([plan_event(3.6), one])
    assert seconds_of(ledger) == {"startup": 2 * 2 * 50.0} and ledger.total_usd == Decimal("0.1")
    assert [line.cause for line in ledger.causes] == [
        "interruption: reclaimed before the first event"
    ]
    assert_adds_up(ledger)
    both = fold([plan_event(3.6), *gang("silent").events, one])
    assert both.total_usd == Decimal("0.1"), "node 0 spoke, node 1 did not: each is paid for 50 s"
    assert_adds_up(both)


def test_each_node_of_a_gang_is_paid_by_its_own_times() -> None:
    """The second started later than the main node and was lost earlier; the third never got a
    machine.
    """
    times = [[WALL - 10.0, WALL + 60.0], [WALL + 0.0, WALL + 50.0], [None, None]]
    job = told("j", -10.0, 60.0, nodes=3, processes_per_node=1, node_times=times)
    ledger = fold([plan_event(3.6), job])
    assert [bill.rank_microseconds / MICRO for bill in ledger.unreported] == [70.0, 50.0]
    assert ledger.total_usd == Decimal("0.12")
    half = told(
        "j",
        -10.0,
        60.0,
        nodes=2,
        processes_per_node=1,
        node_times=[[None, WALL + 40.0], [WALL, None]],
    )
    assert [
        bill.rank_microseconds / MICRO for bill in fold([plan_event(3.6), half]).unreported
    ] == [50.0, 60.0]
    log = GangLog(1, 0.0, [[0], [1]], machines=[{"batch_job_id": "j"}] * 2)
    for node in (0, 1):
        log.heartbeat(node, 40.0)
    spoken = fold([plan_event(3.6), *log.events, job])
    assert spoken.total_usd == Decimal("0.12"), "the same, whoever has told of a part of it"
    assert_adds_up(ledger)
    assert_adds_up(spoken)
    unknown = told("j", -10.0, 60.0, nodes=3, processes_per_node=1)
    bills = fold([plan_event(3.6), unknown]).unreported
    assert [bill.rank_microseconds / MICRO for bill in bills] == [70.0] * 3, (
        "Batch reports no node: each is taken to have run as the main node did"
    )


def test_the_time_from_boot_to_container_is_a_line_of_its_own_in_total_and_spent() -> None:
    """300 s from boot to the agent, of which Batch's own times hold 10 s."""
    known = {"instance_id": "i-1", "uptime_seconds": 300.0}
    log = gang("j", **known)
    ledger = fold([plan_event(3.6), *log.events, told("j", -10.0, 60.0)])
    [boot] = [line for line in ledger.lines if line.ledger_class == "boot"]
    assert (boot.rank_microseconds / MICRO, boot.usd, boot.kind) == (
        2 * 290.0,
        Decimal("0.29"),
        "estimated",
    )
    assert ledger.total_usd == Decimal("0.07") + boot.usd
    assert compute_spent_usd([plan_event(3.6), *log.events, told("j", -10.0, 60.0)]) == float(
        ledger.total_usd
    )
    assert_adds_up(ledger)
    again = fold(
        [
            plan_event(3.6),
            *log.events,
            *gang("k", number=2, start=100.0, **{**known, "uptime_seconds": 400.0}).events,
            told("j", -10.0, 60.0),
            told("k", 90.0, 160.0),
        ]
    )
    assert seconds_of(again)["boot"] == 2 * 290.0, "the same instance boots once"
    warm = fold([plan_event(3.6), *gang("j", **{**known, "uptime_seconds": 3600.0}).events])
    assert "boot" not in seconds_of(warm), "another job's instance"


@pytest.mark.parametrize(("submitted", "boot"), [(-400.0, 290.0), (-250.0, 290.0), (-230.0, None)])
def test_an_instance_that_booted_before_its_job_was_submitted_was_warm(
    submitted: float, boot: float | None
) -> None:
    """It booted 300 s before the agent's first event. Clocks may be 60 s apart."""
    log = gang("j", instance_id="i-1", uptime_seconds=300.0)
    order = event(BATCH_SUBMITTED, submitted, job_id="j", job_name="train")
    ledger = fold([plan_event(3.6), order, *log.events, told("j", -10.0, 60.0)])
    assert seconds_of(ledger).get("boot") == (None if boot is None else 2 * boot)
    assert_adds_up(ledger)
    # Batch's clock, if it is known, decides instead of the launcher's
    wrong = event(BATCH_SUBMITTED, -submitted - 500.0, job_id="j", job_name="train")
    known = told("j", -10.0, 60.0, created_utc=WALL + submitted)
    ledger = fold([plan_event(3.6), wrong, *log.events, known])
    assert seconds_of(ledger).get("boot") == (None if boot is None else 2 * boot)


def test_the_scale_down_of_an_instance_is_a_line_of_its_own_in_total_spent_and_savings() -> None:
    log = gang("j", ends=True, instance_id="i-1", uptime_seconds=0.0)
    before = [plan_event(3.6, on_demand=7.2), *log.events]
    events = [*before, told("j", 0.0, 40.0, cause="ended")]
    ledger = fold(events)
    [line] = [line for line in ledger.lines if line.ledger_class == "scale_down"]
    assert (line.rank_microseconds / MICRO, line.usd, line.kind) == (
        2 * 300.0,
        Decimal("0.3"),
        "estimated",
    )
    assert ledger.total_usd == Decimal("0.34") == Decimal(str(compute_spent_usd(events)))
    assert ledger.same_on_demand_usd is not None
    running = fold(before).same_on_demand_usd
    assert running is not None
    # On demand at $7.20, Batch would keep the machine as well; the minimum charge is gone
    assert running == 60 * Decimal("0.002")
    assert ledger.same_on_demand_usd == 340 * Decimal("0.002")
    assert_adds_up(ledger)
    [explained] = [text for text in explain_figures(build_report(events)) if "scale down" in text]
    assert explained == (
        "estimated: scale down: 300 s assumed after each job of AWS Batch whose instance was not "
        "reclaimed"
    )


def test_a_node_of_kubernetes_has_no_scale_down() -> None:
    job_id = "team/jobsets/js-1"
    log = gang(job_id, ends=True, instance_id="i-1", uptime_seconds=0.0)
    events = [
        plan_event(3.6),
        event(BATCH_SUBMITTED, -10.0, job_id=job_id, job_name="js-1"),
        *log.events,
        told(job_id, 0.0, 100.0, cause="ended"),
    ]
    ledger = fold(events)
    assert "scale_down" not in seconds_of(ledger)
    assert ledger.total_usd == Decimal("0.1") == Decimal(str(compute_spent_usd(events)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
@pytest.mark.slow
def test_the_total_never_falls_as_jobs_of_batch_follow_each_other_on_instances(seed: int) -> None:
    """Random attempts on two instances, some warm; each event in turn is added to the log."""
    draw = random.Random(seed)
    events = [plan_event(3.6)]
    booted = {}
    at = 0.0
    for number in range(1, draw.randint(2, 6)):
        instance_id = draw.choice(["i-1", "i-2"])
        submitted = at
        start = at + draw.choice([10.0, 200.0, 700.0])
        boot = booted.setdefault(instance_id, start - draw.choice([0.0, 120.0, 900.0]))
        log = gang(
            f"job-{number}",
            start=start,
            number=number,
            ends=draw.random() < 0.5,
            instance_id=instance_id,
            uptime_seconds=start - boot,
        )
        at = start + 40.0 + draw.choice([0.0, 5.0, 30.0])
        cause = draw.choice(["reclaimed", "ended", "user_code", "terminated"])
        if cause == "reclaimed":
            del booted[instance_id]
        events += [
            event(BATCH_SUBMITTED, submitted, job_id=f"job-{number}", job_name="train"),
            *log.events,
            told(f"job-{number}", start - draw.choice([0.0, 8.0]), at, at=at, cause=cause),
        ]
    total = Decimal(0)
    for count in range(1, len(events) + 1):
        ledger = fold(events[:count])
        assert_adds_up(ledger)
        assert ledger.total_usd >= total
        total = ledger.total_usd


@pytest.mark.parametrize("times", [(None, None), (None, 60.0), (10.0, None)])
def test_without_both_times_only_the_agents_word_is_billed(times) -> None:
    assert fold([plan_event(3.6), *gang("j").events, told("j", *times)]).total_usd == Decimal(
        "0.04"
    )
    assert fold([plan_event(3.6), told("j", *times)]).total_usd == 0


def test_the_last_word_on_a_job_counts_and_counts_once() -> None:
    twice = [told("j", -100.0, 60.0, at=1e6), told("j", -100.0, 100.0, at=2e6)]
    assert fold([plan_event(3.6), *gang("j").events, *twice]).total_usd == Decimal("0.2")


@pytest.mark.parametrize("skew", [-300.0, -45.0, 0.0, 45.0, 300.0])
def test_clocks_minutes_apart_change_no_total(skew: float) -> None:
    """Batch's clock against the agent's: 100 s before, 40 s told, 20 s after, in all 160."""
    events = [plan_event(3.6, t=-1000.0), *gang("j").events, told("j", -100.0 + skew, 60.0 + skew)]
    ledger = fold(events)
    assert ledger.total_usd == Decimal("0.16") and ledger.paid_rank_seconds == 320.0
    assert_adds_up(ledger)


def test_a_batch_job_is_matched_by_time_without_its_id() -> None:
    first = gang(None)
    second = gang(None, number=2, start=500.0)
    jobs = [told("one", -10.0, 50.0), told("two", 490.0, 550.0)]
    ledger = fold([plan_event(3.6), *first.events, *second.events, *jobs])
    assert ledger.total_usd == Decimal("0.12")
    assert [bill.job.job_id for bill in ledger.nodes] == ["one", "two"]


def test_each_node_of_a_job_has_its_own_instance() -> None:
    """AWS Batch puts no two nodes of a job on one, and a service of one address for all gives all
    the same id.
    """
    log = GangLog(1, 0.0, [[0], [1]], machines=[{"instance_id": "i-1", "batch_job_id": "j"}] * 2)
    for node in (0, 1):
        log.heartbeat(node, 40.0)
    ledger = fold(
        [plan_event(3.6), *log.events, told("j", 0.0, 100.0, nodes=2, processes_per_node=1)]
    )
    assert ledger.total_usd == Decimal("0.2")
    assert_adds_up(ledger)


def test_an_attempt_has_the_price_of_its_own_placement() -> None:
    """Spot, then on demand at twice the price; the second agent's clock is five minutes behind the
    launcher's.
    """
    spot = gang("spot")
    dear = gang("dear", number=2, start=200.0)
    where = {"market": "on_demand", "usd_per_hour": 7.2, "quoted_usd_per_hour": "7.2"}
    plans = [plan_event(3.6, t=-400.0), plan_event(3.6, t=450.0)]
    jobs = [told("spot", 0.0, 40.0, at=60.0), told("dear", 500.0, 540.0, **where)]
    ledger = fold([*plans, *spot.events, *dear.events, *jobs])
    assert [bill.usd for bill in ledger.nodes] == [Decimal("0.04"), Decimal("0.08")]
    assert ledger.useful_on_demand_usd is not None


def test_a_pause_between_generations_of_a_job_is_paid_once() -> None:
    known = {"instance_id": "i-1", "uptime_seconds": 3600.0}
    first = gang("j", **known)
    second = gang("j", number=2, start=50.0, **known)
    ledger = fold([plan_event(3.6), *first.events, *second.events, told("j", 0.0, 100.0)])
    assert ledger.total_usd == Decimal("0.1") and seconds_of(ledger)["idle"] == 2 * 10.0
    assert_adds_up(ledger)


def test_an_instance_is_billed_between_two_jobs_and_has_one_minimum_each() -> None:
    known = {"instance_id": "i-1", "uptime_seconds": 20.0}
    first = gang("a", **known)
    second = gang("b", number=2, start=100.0, **known)
    jobs = [told("a", -10.0, 45.0, cause="user_code"), told("b", 90.0, 145.0)]
    ledger = fold([plan_event(3.6), *first.events, *second.events, *jobs])
    assert ledger.total_usd == Decimal("0.365"), (
        "10 s of boot, from the first job's start to the second's stop, and the 200 s for which "
        "AWS Batch keeps the instance of the first at least"
    )
    assert_adds_up(ledger)
    jobs = [told("a", -10.0, 45.0), told("b", 90.0, 145.0)]
    ledger = fold([plan_event(3.6), *first.events, *second.events, *jobs])
    assert ledger.total_usd == Decimal("0.12"), (
        "one that was taken away waits for nobody, whatever its successor says"
    )
    short = fold([plan_event(3.6), *gang("a", **known).events, told("a", -10.0, 40.0)])
    assert short.total_usd == Decimal("0.06"), (
        "10 s before its job, and 50 in it: a minute, and nothing is missing"
    )
    shorter = fold(
        [
            plan_event(3.6),
            *gang("a", **{**known, "uptime_seconds": 12.0}).events,
            told("a", -10.0, 40.0),
        ]
    )
    assert shorter.total_usd == Decimal("0.06"), "2 s and 50 s: 8 are missing"


@settings(max_examples=60, deadline=None)
@given(timelines(), st.integers(0, 10**6))
def test_every_paid_second_is_in_one_class_and_all_sum_to_the_cent(timeline, seed: int) -> None:
    """Random kills and lost ends in random jobs of Batch: overlapping, skewed, told twice, without
    times, silent.
    """
    draw = random.Random(seed)
    events = []
    jobs = {}
    for logged in timeline[0]:
        if logged.name == NODE_STARTED:
            job_id = f"job-{logged.generation // draw.choice([1, 1, 2])}"
            tells = draw.random() < 0.9
            logged = replace(
                logged, data={**logged.data, **({"batch_job_id": job_id} if tells else {})}
            )
            jobs.setdefault(job_id, logged.t_mono)
        events.append(logged)
    words = []
    for job_id, start in [*jobs.items(), ("never", 50.0)]:
        began = start - draw.uniform(-50, 400) + draw.choice([-300, 0, 300])
        stopped = began + draw.choice([0.0, draw.uniform(0, 300), draw.uniform(0, 3000)])
        times = draw.choice([(began, stopped)] * 4 + [(None, stopped), (began, None)])
        nodes = draw.randint(1, 4)
        cause = draw.choice(["reclaimed", "ended", "user_code", "unknown"])
        own = [
            [_wall(began + draw.uniform(0, 50)), _wall(stopped + draw.uniform(-50, 50))]
            for _ in range(nodes)
        ]
        known = {
            "nodes": nodes,
            "cause": cause,
            "node_times": draw.choice([(), own, [*own[:-1], [None, None]]]),
        }
        words += [told(job_id, *times, at=1e6 + n, **known) for n in range(draw.choice([1, 1, 2]))]
    ledger = fold([*events, *words])
    assert_adds_up(ledger)
    assert ledger.paid_microseconds == expected_micros(ledger, words)


def expected_micros(ledger: Ledger, words: list[Event]) -> int:
    """Rank-microseconds: of each node of each job the longer of what agents and what Batch told;
    else the agents'.
    """
    total = 0
    spoke = {}
    for bill in ledger.nodes:
        total += bill.node.paid_micros * len(bill.node.ranks)
        if bill.job is not None:
            spoke.setdefault((bill.job.job_id, bill.node.node), []).append(bill)
    for word in {word.data["job_id"]: word for word in words}.values():
        data = word.data
        if data["started_utc"] is None or data["stopped_utc"] is None:
            continue
        for node in range(data["nodes"]):
            if data["node_times"]:
                started, stopped = data["node_times"][node]
            else:
                started, stopped = (None, None)
            if started is None:
                started = data["started_utc"]
                stopped = data["stopped_utc"]
            whole = max(0, round(stopped * MICRO) - round(started * MICRO))
            bills = spoke.pop((data["job_id"], node), [])
            others = [times for times in data["node_times"] or () if times != [None, None]]
            if node and not bills and others and data["node_times"][node] == [None, None]:
                continue  # it never got a machine
            if not bills:
                total += whole * data["processes_per_node"]
                continue
            missing = max(0, whole - sum(bill.node.paid_micros for bill in bills))
            extra = [
                (extra.micros, len(bill.node.ranks)) for bill in bills for extra in bill.extras
            ]
            assert sum(micros for micros, _ in extra) == missing
            total += sum(micros * ranks for micros, ranks in extra)
    for bills in spoke.values():  # beyond the nodes that Batch knows of: as one that it does know
        total += sum(extra.micros * len(bill.node.ranks) for bill in bills for extra in bill.extras)
    return total


def _wall(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    return WALL + seconds
