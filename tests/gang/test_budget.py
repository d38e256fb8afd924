"""The budget: told at its thresholds, kept with the last save in reserve, and a larger one goes on
from there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.core.errors import Outcome
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import (
    BUDGET,
    COMMIT,
    NODE_STARTED,
    PLAN,
    STEP,
    Event,
    Origin,
    read_events,
)
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.core.terms import Terms
from ebbflow.cost.ledger.ledger import compute_spent_usd, fold, last_notified_threshold
from ebbflow.cost.report.report import build_report
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.messages import GangOutcome, GangSpec
from ebbflow.training.limits import Limits, Stop
from tests.support.gangs import endless_gang, with_settings
from tests.support.timelines import plan_event

USD_PER_HOUR = 36.0  # of a node: a cent a second
GANG_USD_PER_SECOND = 2 * USD_PER_HOUR / 3600
BUDGET_USD = 14 * GANG_USD_PER_SECOND
RESERVE_USD = 5 * GANG_USD_PER_SECOND


class Job:
    """A gang of two ranks with a stated price, started as the flow does: with what the events say
    was spent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = endless_gang(folder, checkpoint={"interval_steps": 100_000})
        self.store = Store.open(self.spec.store_uri).sub(job_prefix(self.spec.job))
        with EventLog(self.store, Origin(job="job", run="run", process="plan")) as log:
            log.emit(PLAN, **plan_event(USD_PER_HOUR, None).data, budget_usd=BUDGET_USD)

    def events(self) -> list[Event]:
        return read_events(self.store)

    def run(self, attempt: int, budget_usd: float, *, max_steps: int | None = None) -> GangOutcome:
        events = self.events()
        terms = Terms(
            usd_per_rank_second=GANG_USD_PER_SECOND / 2,
            budget_usd=budget_usd,
            reserve_usd=RESERVE_USD,
            spent_usd=compute_spent_usd(events),
            last_notified_threshold=last_notified_threshold(events, budget_usd),
        )
        spec: GangSpec = replace(self.spec, attempt=attempt, terms=terms)
        if max_steps:
            spec = with_settings(spec, training={"max_steps": max_steps})
        return LocalGang(spec, self.folder / f"gang-{attempt}", self.folder / "output.log").wait(90)


def test_budget_thresholds_are_reported_once_and_a_step_must_be_affordable() -> None:
    now = 0.0
    terms = Terms(
        usd_per_rank_second=0.01, budget_usd=10.0, reserve_usd=1.0, last_notified_threshold=0.5
    )
    limits = Limits(terms, world_size=1, elapsed_seconds=lambda: now)
    seen = []
    for now in (0.0, 100.0, 550.0, 700.0, 810.0):
        stop = limits.stop()
        seen += [
            (now, news["threshold"], news["spent_usd"])
            for news in limits.new_budget_thresholds(stop)
        ]
    # Half was told by an earlier attempt. A step of 450 s was seen: at $5.50 another one would not
    # fit into $9.00.
    assert stop is Stop.BUDGET and seen == [(550.0, 0.8, 5.5), (550.0, 1.0, 5.5)]
    now = 0.0
    brisk = Limits(
        replace(terms, last_notified_threshold=0.0), world_size=1, elapsed_seconds=lambda: now
    )
    told: dict[float, float] = {}
    while (stop := brisk.stop()) is Stop.NONE:
        told |= {news["threshold"]: now for news in brisk.new_budget_thresholds(stop)}
        now += 1.0
    told |= {news["threshold"]: now for news in brisk.new_budget_thresholds(stop)}
    assert told == {0.5: 500.0, 0.8: 800.0, 1.0: 899.0}


def test_the_first_step_of_an_attempt_has_the_price_that_the_plan_expects() -> None:
    terms = Terms(
        usd_per_rank_second=0.01,
        budget_usd=10.0,
        reserve_usd=1.0,
        spent_usd=8.0,
        step_seconds=101.0,
    )
    for step_seconds, expected in ((101.0, Stop.BUDGET), (99.0, Stop.NONE)):
        limits = Limits(
            replace(terms, step_seconds=step_seconds), world_size=1, elapsed_seconds=lambda: 0.0
        )
        assert limits.stop() is expected
    assert "a step costs up to $0.9900" in limits.describe(Stop.BUDGET)
    now = 0.0
    measured = Limits(replace(terms, step_seconds=99.0), world_size=1, elapsed_seconds=lambda: now)
    assert measured.stop() is Stop.NONE
    now = 1.0
    assert measured.stop() is Stop.NONE
    assert measured.next_step_usd == pytest.approx(0.01), "a step was measured"


def test_no_budget_reports_nothing_and_an_empty_budget_starts_nothing() -> None:
    terms = Terms(usd_per_rank_second=1.0, reserve_usd=2.0, spent_usd=1e9)
    assert terms.out_of_money() == "" and terms.reached(1e9) == []
    assert (
        Limits(terms, world_size=1, elapsed_seconds=lambda: 1e9).new_budget_thresholds(Stop.NONE)
        == []
    )
    assert replace(terms, budget_usd=10.0, spent_usd=7.9).out_of_money() == ""
    assert "$8.0000 of $10.0000" in replace(terms, budget_usd=10.0, spent_usd=8.0).out_of_money()


def test_a_gang_stops_within_its_budget_and_continues_with_a_larger_one(tmp_path: Path) -> None:
    job = Job(tmp_path)
    outcome = job.run(0, BUDGET_USD)
    assert outcome.outcome == Outcome.BUDGET and "is kept in reserve" in outcome.message
    events = job.events()
    report = build_report(events)
    assert (report.outcome, report.exit_code) == (Outcome.BUDGET, 4)
    [committed] = {event.step for event in events if event.name == COMMIT}
    assert committed == outcome.step, "the reserve has paid for a last save"
    first_step = min(event.t_wall for event in events if event.name == STEP)
    started = min(event.t_wall for event in events if event.name == NODE_STARTED)
    # Limits are looked at from the first step on: a start-up that alone takes longer (a busy
    # machine) is not stopped.
    limit = max(BUDGET_USD, (first_step - started) * GANG_USD_PER_SECOND + RESERVE_USD)
    assert BUDGET_USD - RESERVE_USD <= float(report.total_usd) <= limit
    told = [event.data["threshold"] for event in events if event.name == BUDGET]
    assert told == [0.5, 0.8, 1.0]

    again = job.run(1, BUDGET_USD)
    assert again.outcome == Outcome.BUDGET and "nothing is left to train with" in again.message
    events = job.events()
    assert build_report(events).outcome is Outcome.BUDGET
    assert not [event for event in events if event.generation == 2 and event.rank >= 0], (
        "no rank was started"
    )
    waited = {
        event.node for event in events if event.generation == 2 and event.name == NODE_STARTED
    }
    paid = {
        bill.node.node: bill.node.measured
        for bill in fold(events).nodes
        if bill.node.generation == 2
    }
    assert waited == {0, 1} and paid == {0: True, 1: True}, (
        "every node that waited for the start is paid for"
    )
    assert [event.data["threshold"] for event in events if event.name == BUDGET] == told

    done = job.run(2, 100 * BUDGET_USD, max_steps=outcome.step + 3)
    assert (done.outcome, done.step) == (Outcome.COMPLETED, outcome.step + 3)
    ledger = fold(job.events())
    assert ledger.redone_steps == 0
    assert float(ledger.total_usd) == pytest.approx(compute_spent_usd(job.events()))
