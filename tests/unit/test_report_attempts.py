"""The report of a job on AWS Batch: each attempt with its place, why, what was planned and what
came of it.
"""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.events import BATCH_SUBMITTED, PLAN, PREFLIGHT
from ebbflow.cost.capacity import choose_placement, read_attempts, with_placement
from ebbflow.cost.report.figure_text import (
    describe_prices,
    explain_figures,
    format_attempt_rows,
    format_placement_rows,
)
from ebbflow.cost.report.render_html import render as render_html
from ebbflow.cost.report.render_text import render as render_text
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.flows import cards
from tests.support.browser import cut_off
from tests.support.capacity import BOTH, JobLog, batch_config, planned
from tests.support.timelines import WALL, GangLog, event

CONFIG = batch_config()


def placed(log: JobLog, at: float, share_done: float) -> None:
    """Plan and placement, as a launcher writes them."""
    plan = planned(CONFIG, WALL + at, share_done=share_done)
    placement = choose_placement(
        CONFIG, plan=plan, history=read_attempts(log.events), queues=BOTH, now_utc=WALL + at
    )
    log.events.append(event(PLAN, at, **with_placement(plan, placement).brief().to_json()))
    log.placed(placement, at + 0.1)


def told(log: JobLog, cause: str, at: float, *, started: float | None, job_id: str) -> None:
    log.told(
        cause, read_attempts(log.events).attempts[-1].placement, at, started=started, job_id=job_id
    )


@pytest.fixture(scope="module")
def report() -> RunReport:
    """Never started; then reclaimed after 1,000 s; then done."""
    log = JobLog()
    placed(log, 0.0, 0.0)
    told(log, "never_started", 1800.0, started=None, job_id="one")
    placed(log, 1801.0, 0.0)
    first = GangLog(1, 2200.0, [[0]], machines=[{"batch_job_id": "two"}])
    first.phase("startup", 100.0)
    first.steps(1, 8, useful_step=100.0)
    first.commit(8)
    log.events += first.events
    told(log, "reclaimed", 3100.0 + 30, started=2130.0, job_id="two")
    placed(log, 3131.0, 0.4)
    last = GangLog(2, 3400.0, [[0]], parent=(8, 1), machines=[{"batch_job_id": "three"}])
    last.phase("startup", 100.0)
    last.steps(9, 12, useful_step=100.0)
    last.outcome("completed")
    last.phase("shutdown", 10.0)
    last.ended("completed", 510.0)
    log.events += last.events
    told(log, "ended", 3915.0, started=3390.0, job_id="three")
    return build_report([replace(event, run="run-1") for event in log.events])


def test_each_attempt_has_its_place_its_plan_and_what_came_of_it(report: RunReport) -> None:
    attempts = report.money["attempts"]
    assert [attempt["ended"] for attempt in attempts] == ["never_started", "reclaimed", "ended"]
    assert [attempt["actual"]["hours"] for attempt in attempts] == [
        None,
        pytest.approx(1000 / 3600),
        pytest.approx(525 / 3600),
    ]
    assert attempts[0]["actual"]["usd"] is None and attempts[0]["actual"]["wait_seconds"] == 60.0
    assert all(attempt["planned"]["wall_seconds"] >= 60 for attempt in attempts)
    for attempt in attempts[1:]:
        assert attempt["actual"]["usd_per_hour"] == pytest.approx(
            attempt["planned"]["usd_per_hour"], rel=1e-4
        )
        assert 0 < attempt["actual"]["hours"] < attempt["planned"]["hours"]
    assert sum(attempt["actual"]["usd"] or 0 for attempt in attempts) == pytest.approx(
        float(report.total_usd), abs=2e-6
    )
    assert "had no capacity" in attempts[1]["why"] and "was reclaimed" in attempts[2]["why"]
    assert RunReport.from_json(report.to_json()).money["attempts"] == attempts


def test_all_of_it_is_rendered(report: RunReport) -> None:
    text = render_text(report)
    page = html.unescape(render_html(report))
    assert max(len(line) for line in text.splitlines() if "prices  " not in line) <= 100
    plain = " ".join(text.replace("│", " ").split())
    for row in format_attempt_rows(report.money["attempts"]):
        assert " ".join(row) in plain and all(f">{cell}</td>" in page for cell in row)
    for _, where, why in format_placement_rows(report.money["attempts"]):
        assert why.split(";")[0] in plain and f">{where}</td>" in page and f">{why}</td>" in page
    assert "interruption: reclaimed" in plain, "not lost without a word: Batch told it"
    assert "never started" in plain and "Batch job in queue q: reclaimed" in plain


def test_the_report_shows_the_regret_of_the_whole_job(report: RunReport) -> None:
    found = report.money["hindsight"]
    assert found["regret_usd"] == pytest.approx(float(report.total_usd) - found["usd"], abs=1e-6)
    assert found["regret_usd"] > 0, "a second start was paid"
    assert found["start_hours"] == pytest.approx((70 + 100) / 3600), (
        "Batch's part of a start is a part of one"
    )


def test_a_job_that_an_unanswered_submit_made_twice_is_paid_for_and_no_attempt_of_its_own() -> None:
    log = JobLog()
    placed(log, 0.0, 0.0)
    for at, job_id, more in ((1.0, "own", {}), (2.0, "twin", {"twin_of": "own"})):
        log.events.append(event(BATCH_SUBMITTED, at, job_id=job_id, **more))
    for at, cause, job_id in ((300.0, "terminated", "twin"), (900.0, "ended", "own")):
        told(log, cause, at, started=120.0, job_id=job_id)
    report = build_report(log.events)
    [attempt] = report.money["attempts"]
    assert (attempt["job_id"], attempt["ended"]) == ("own", "ended")
    assert report.paid_rank_seconds == pytest.approx(780.0 + 180.0)


def test_the_report_of_an_unstarted_job_names_that_and_not_a_missing_plan() -> None:
    log = JobLog()
    assert describe_prices(build_report([event(PREFLIGHT, 0.0, results=[])])).endswith(
        "it has no plan"
    )
    placed(log, 0.0, 0.0)
    told(log, "never_started", 1800.0, started=None, job_id="one")
    report = build_report(log.events)
    assert report.total_usd == 0
    assert describe_prices(report).startswith("none: nothing of the job has started")
    assert "1 × g5.xlarge spot" in describe_prices(report) and "no plan" not in render_text(report)
    assert "exact at that price" not in " ".join(explain_figures(report))


@pytest.mark.parametrize("away", [True, False])
def test_the_report_names_light_steps_that_it_does_not_count(away: bool) -> None:
    log = JobLog()
    log.events.append(event(PREFLIGHT, 0.0, results=[], sent_away=away))
    placed(log, 1.0, 0.0)
    told(log, "ended", 900.0, started=120.0, job_id="one")
    found = [
        line
        for line in explain_figures(build_report(log.events))
        if line.startswith("not counted: jobs of the")
    ]
    assert bool(found) is away


@pytest.mark.parametrize("width", [390, 1280])
def test_no_table_is_cut_off(report: RunReport, width: int, tmp_path: Path) -> None:
    culprit = (
        "rank 1 on node 1 (ip-10-0-12-123.ec2.internal): RuntimeError: the collective was "
        "aborted, 30 s"
    )
    lines = [{**line, "culprit": culprit} for line in report.events["generations"]]
    page = render_html(replace(report, events={**report.events, "generations": lines}))
    assert page.count(culprit) == 2
    assert not cut_off(page, width, tmp_path)


def test_the_card_is_the_page_and_names_the_unit_of_the_loss(report: RunReport) -> None:
    text = "rank 1 can't <b>read</b> *x* & [y](javascript:z)"
    lines = [{**line, "culprit": text} for line in report.events["generations"]]
    report = replace(report, job="it's *a* job", events={**report.events, "generations": lines})
    report.actual["weight_unit"] = "images"
    card: list[Any] = []
    cards.show_report(card, report)
    page = cards.PageCard(components=[part.render() for part in card]).render(None)
    assert page.count(html.escape(text)) == 2 and "&amp;#" not in re.sub(
        "<script.*?</script>", "", page, flags=re.S
    )
    assert "<h1>it&#x27;s *a* job" in page and "Training loss, per image" in page
