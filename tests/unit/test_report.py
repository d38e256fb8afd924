"""One report, many renderings, one set of figures: also for jobs that failed, and for logs that end
anywhere.
"""

from __future__ import annotations

import html
import json
import math
import pickle
import re
import subprocess
import sys
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import (
    EVALUATION,
    FAULT_DETECTED,
    OUTCOME,
    PLAN,
    PREFLIGHT,
    PREPARED,
    RESTORE,
    Event,
    LedgerClass,
    Origin,
)
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.cost.amounts import format_usd
from ebbflow.cost.errors import ReportError
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.report.figure_text import explain_figures, format_key_figures, format_ledger_rows
from ebbflow.cost.report.render_html import render as render_html
from ebbflow.cost.report.render_text import render as render_text
from ebbflow.cost.report.report import (
    RunReport,
    build_report,
    ledger_frame,
    loss_frame,
    throughput_frame,
)
from ebbflow.cost.report.verdict import render_verdict
from tests.support.timelines import WALL, GangLog, event, plan_event, timelines

ROOT = Path(__file__).parents[2]
FIELDS = [
    *(
        "schema",
        "job",
        "outcome",
        "exit_code",
        "interruptions",
        "failures",
        "redone_steps",
        "weights_sha256",
    ),
    *(
        "loss_curve",
        "ledger",
        "total_usd",
        "paid_rank_seconds",
        "savings_usd",
        "plan",
        "actual",
        "events",
    ),
    *("configuration", "money", "progress", "charts", "running"),
]


class Page(HTMLParser):
    """What a browser would act on: tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def interrupted_job(*, completed: bool = True) -> list[Event]:
    """Prepared, killed at step 6 after a commit of step 4, then either completed at step 8 or
    failed again.
    """
    first = GangLog(1, 10.0, [[0], [1]])
    first.phase("startup", 5.0)
    first.steps(1, 6, loss=6.0, useful_step=1.5, data_wait=0.5)
    first.commit(4)
    first.add(FAULT_DETECTED, 30.0, culprit="node 1 (host-1) was lost")
    first.ended("node_lost", 20.0, culprit="node 1 (host-1) was lost")
    second = GangLog(2, 40.0, [[0], [1]], parent=(4, 1))
    second.phase("startup", 4.0)
    second.add(RESTORE, 44.0, rank=0, step=4, key="k", seconds=0.5, rejected=[])
    second.steps(5, 8, loss=4.0, useful_step=1.5, data_wait=0.5)
    second.commit(8)
    second.add(EVALUATION, second.now, rank=0, step=8, metrics={"held_out_loss": 1.5})
    if completed:
        second.outcome("completed")
        second.phase("shutdown", 1.0)
        second.ended("completed", 14.0)
    else:
        second.ended(
            "rank_failed", 14.0, culprit="rank 1: ValueError: no such thing", user_code=True
        )
    before = [
        event(PREPARED, 3.0, unigram_entropy_nats=3.0, train_tokens=10_000),
        plan_event(t=2.0),
    ]
    return [event(PREFLIGHT, 1.0, results=[]), *before, *first.events, *second.events]


def test_a_report_counts_the_rows_that_were_changed():
    prepared = event(PREPARED, 3.5, train_tokens=10, rows=4000, empty_rows=2, repaired_rows=1)
    events = interrupted_job()
    figures = format_key_figures(build_report([events[0], prepared, *events[2:]]))
    assert figures["rows read"] == "4,000, 2 without text, half characters replaced in 1"
    assert "rows read" not in format_key_figures(build_report(events))


def test_the_figures_of_an_interrupted_job():
    report = build_report(interrupted_job())
    assert (report.outcome, report.exit_code) == (Outcome.COMPLETED, 0)
    assert (report.interruptions, report.failures, report.redone_steps) == (1, 0, 2)
    assert report.weights_sha256 == "cd" * 32
    # Steps 5 and 6 show the second generation's loss, 4 / step, not the first one's 6 / step.
    assert report.loss_curve == [(s, 6.0 / s) for s in range(1, 5)] + [
        (s, 4.0 / s) for s in range(5, 9)
    ]
    assert report.total_usd == Decimal("0.068000")  # (20 s + 14 s) × 2 nodes at a tenth of a cent
    # The same machines on demand, at twice the price, without the interruption's share
    added = sum(
        cause["usd"]
        for cause in report.money["causes"]
        if cause["cause"].startswith("interruption")
    )
    assert 0.02 < added < 0.03
    assert float(report.savings_usd) == pytest.approx(2 * (0.068 - added) - 0.068)
    actual = report.actual
    assert actual["tokens_per_second"] == pytest.approx(1000 / 2.0)
    assert (actual["held_out_loss"], actual["held_out_ratio"]) == (1.5, 0.5)
    assert (actual["commits"], actual["generations"], actual["steps"]) == (2, 2, 8)
    assert actual["wall_hours"] == pytest.approx(53.0 / 3600)
    assert report.events["counts"]["step"] == 20
    (failure,) = report.events["failures"]
    assert failure["what"] == "generation 1: node_lost" and failure["seconds"] == 29.0
    assert actual[
        "usd_per_1000_rollouts"
    ] is None and "per 1,000 rollouts" not in format_key_figures(report)
    counted = build_report(
        [*interrupted_job(), event(EVALUATION, 52.0, step=8, metrics={"rollouts": 34})]
    )
    assert counted.actual["usd_per_1000_rollouts"] == pytest.approx(0.068 / 34 * 1000)
    assert format_key_figures(counted)["per 1,000 rollouts"] == "$2.0000"
    assert "$2.0000" in render_text(counted) and "$2.0000" in render_html(counted)


def test_a_failed_job_has_a_report_with_the_first_failure_first():
    report = build_report(interrupted_job(completed=False))
    assert (report.outcome, report.exit_code) == (Outcome.FAILED, 1)
    assert (report.interruptions, report.failures) == (2, 1)
    assert [failure["generation"] for failure in report.events["failures"]] == [1, 2]
    assert report.redone_steps == 2  # all of the second generation's steps were committed
    text = render_text(report)
    assert text.index("node 1 (host-1) was lost") < text.index("ValueError")
    assert "resume train --origin-run-id run-1" in text and "resume train" in render_html(report)


def test_any_prefix_of_a_log_can_be_reported():
    events = interrupted_job()
    outcomes = set()
    for length in range(1, len(events) + 1):
        report = build_report(events[:length])
        outcomes.add(report.outcome)
        assert sum(line.usd for line in report.ledger) == report.total_usd
        json.dumps(report.to_json(), allow_nan=False)
        render_text(report), render_html(report)
    assert outcomes == {Outcome.INTERRUPTED, Outcome.COMPLETED}
    with pytest.raises(ReportError, match="no events"):
        build_report([])


def test_the_report_of_a_job_without_steps_gives_the_reason():
    failed = {
        "id": "store",
        "title": "store can be written",
        "status": "failed",
        "detail": "disk full",
    }
    checked = [
        event(
            PREFLIGHT,
            1.0,
            results=[failed, {"id": "shm", "status": "warning", "severity": "warning"}],
        ),
        event(OUTCOME, 1.1, outcome="preflight", message="1 checks failed"),
    ]
    report = build_report(checked)
    assert report.outcome is Outcome.PREFLIGHT and report.exit_code == 3
    assert [failure["culprit"] for failure in report.events["failures"]] == ["disk full"]
    plan = make_plan(RunConfig.model_validate({"cost": {"budget_usd": 0.001}}), now_utc=WALL)
    refused = build_report([event(PLAN, 2.0, **plan.to_json())])
    assert refused.outcome is Outcome.BUDGET and refused.total_usd == 0 and refused.savings_usd == 0
    assert "$0.0010" in render_text(refused)


def test_json_has_the_fixed_fields_and_comes_back():
    report = build_report(interrupted_job())
    text = json.dumps(report.to_json(), allow_nan=False)
    data = json.loads(text, parse_float=Decimal)
    assert list(data) == FIELDS
    assert set(data["ledger"][0]) == {"class", "rank_seconds", "usd", "kind"}
    assert sum(line["usd"] for line in data["ledger"]) == data["total_usd"] == Decimal("0.068")
    assert sum(line["rank_seconds"] for line in data["ledger"]) == data["paid_rank_seconds"] == 68
    assert RunReport.from_json(json.loads(text)).to_json() == report.to_json()
    with pytest.raises(ReportError, match="schema 7"):
        RunReport.from_json({**report.to_json(), "schema": 7})


def expensive() -> list[Event]:
    """Thousands of dollars over three generations, at prices that divide badly."""
    events = [plan_event(98.76543, 133.33, simulated=False)]
    for number in (1, 2, 3):
        if number == 1:
            parent = None
        else:
            parent = (7 * (number - 1), number - 1)
        gang = GangLog(number, number * 100_000.0, [[0, 1, 2], [3, 4, 5]], parent)
        gang.phase("startup", 333.3)
        first = 7 * (number - 1) + 1
        gang.steps(first, first + 8, useful_step=1234.567, data_wait=1.7, checkpoint_stall=0.3)
        gang.commit(first + 6)
        gang.ended("node_lost", 20_000.0)
        events += gang.events
    return events


@pytest.mark.parametrize(
    "job", [interrupted_job, expensive, lambda: interrupted_job(completed=False)]
)
def test_every_rendering_holds_the_same_figures(job):
    report = build_report(job())
    text = render_text(report)
    page = html.unescape(render_html(report))
    for name, figure in format_key_figures(report).items():
        assert figure in text, name
        assert figure in page, name
    for row in format_ledger_rows(report):
        for cell in row:
            assert cell in text and cell in page
    assert max(map(len, text.splitlines())) <= 100
    assert all(line[0] in "┌│└" for line in text.splitlines())


def assert_displayed_rows_add_up(report: RunReport) -> str:
    *lines, total = format_ledger_rows(report)
    for column in (1, 3):
        amounts = [Decimal(re.sub(r"[$,]", "", row[column])) for row in [*lines, total]]
        assert sum(amounts[:-1]) == amounts[-1], total
    return total[3]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(timelines())
def test_displayed_lines_sum_to_the_displayed_total_to_the_cent(timeline):
    assert_displayed_rows_add_up(build_report(timeline[0]))
    assert len(assert_displayed_rows_add_up(build_report(expensive())).partition(".")[2]) == 2


def test_foreign_text_stays_text():
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[31mred\nline"
    events = [
        Event(**{**vars(event), "job": evil, "run": evil})
        for event in interrupted_job(completed=False)
        if event.name != PLAN
    ]
    plan = plan_event().data
    events.insert(
        0, event(PLAN, 0.0, **{**plan, "chosen": {**plan["chosen"], "instance_type": evil}})
    )
    events.append(event(OUTCOME, 90.0, outcome="failed", message=evil))
    events = [Event(**{**vars(event), "job": evil}) for event in events]
    report = build_report(events)
    written = render_html(report, earlier=[report])
    page = Page(written)
    assert {tag for tag, _ in page.tags}.isdisjoint({"img", "link", "iframe", "base"})
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert [script.get("id") for script in scripts] == ["data", None, None], (
        "its data, and its own two scripts"
    )
    data = written.split('id="data">')[1].split("</script>")[0]
    assert evil.splitlines()[0][:20] in json.dumps(json.loads(data)) and not set("<>&") & set(data)
    for _, attributes in page.tags:
        assert not any(name.startswith("on") or name in ("src", "href") for name in attributes)
    text = render_text(report)
    assert "\x1b" not in text and all(line[0] in "┌│└" for line in text.splitlines())


def test_the_page_asks_the_network_for_nothing():
    page = render_html(build_report(interrupted_job()))
    assert "default-src 'none'" in page and "connect-src" not in page
    assert len(re.sub(r'id="data">.*?</script>|<svg.*?</svg>', "", page)) < 200_000
    page = re.sub("<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"https?://|//[a-z]|@import|url\(", page)
    assert "prefers-color-scheme:dark" in page and 'name="viewport"' in page


def test_losses_that_are_no_numbers_break_nothing():
    gang = GangLog(1, 0.0, [[0]])
    gang.steps(1, 3, useful_step=1.0)
    gang.steps(4, 4, loss=math.nan, useful_step=1.0)
    gang.steps(5, 5, loss=math.inf, useful_step=1.0)
    gang.steps(6, 7, useful_step=1.0)
    gang.steps(8, 8, loss=math.nan, useful_step=1.0)
    gang.add(EVALUATION, 8.0, rank=0, step=8, metrics={"held_out_loss": math.nan})
    gang.outcome("non_finite", message="loss nan at step 8")
    gang.ended("non_finite", 8.0)
    report = build_report([plan_event(), *gang.events])
    assert report.outcome is Outcome.NON_FINITE and report.interruptions == 0
    assert [step for step, loss in report.loss_curve if loss is None] == [4, 5, 8]
    page = render_html(report)
    text = render_text(report)
    chart = re.findall(r'<figure class="chart" id="figure-loss">.*?</figure>', page)[0]
    assert chart.count('<polyline class="soft"') == 2, (
        "the curve must not bridge what was not finite"
    )
    assert chart.count('class="mark non-finite"') == 3
    page = re.sub("<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"\bnan\b", re.sub(r"loss nan at step 8", "", (page + text).lower()))
    assert "held-out loss" not in format_key_figures(report), "a row of n/a says nothing"
    assert not [
        name for name, figure in format_key_figures(report).items() if figure.startswith("n/a")
    ]
    json.dumps(report.to_json(), allow_nan=False)
    frame = loss_frame(report)
    assert frame["loss"].isna().sum() == 3


def test_a_zombies_late_step_does_not_rewrite_the_curve():
    first = GangLog(1, 0.0, [[0]])
    second = GangLog(2, 10.0, [[0]], parent=(2, 1))
    first.steps(1, 4, loss=8.0, useful_step=1.0)
    second.steps(3, 4, loss=4.0, useful_step=1.0)
    first.clock[0] = 20.0
    first.steps(4, 4, loss=8.0, useful_step=1.0)
    assert build_report([*first.events, *second.events]).loss_curve[-1] == (4, 1.0)


def test_dollars_are_written_one_way():
    shown = {
        0.00004: "$0.0000",
        9.99996: "$10.0000",
        10: "$10.00",
        Decimal("1234.565"): "$1,234.56",
        -0.02: "-$0.0200",
    }
    assert {amount: format_usd(amount) for amount in shown} == shown
    assert format_usd(None) == format_usd(math.nan) == "n/a"


def test_frames_hold_the_same_numbers():
    events = interrupted_job()
    report = build_report(events)
    ledger = ledger_frame(report)
    assert ledger["usd"].sum() == report.total_usd
    assert ledger["rank_seconds"].sum() == pytest.approx(report.paid_rank_seconds)
    assert list(loss_frame(report).itertuples(index=False, name=None)) == report.loss_curve
    steps = throughput_frame(events)
    assert (steps["kept"].sum(), (~steps["kept"]).sum() > 0) == (
        len(report.loss_curve),
        report.redone_steps > 0,
    )
    assert steps[steps["kept"]][["step", "loss"]].to_numpy().tolist() == [
        list(pair) for pair in report.loss_curve
    ]
    in_steps = {
        LedgerClass.USEFUL_STEP,
        LedgerClass.REDONE_STEP,
        LedgerClass.DATA_WAIT,
        LedgerClass.EVALUATION,
    }
    paid = sum(float(line.usd) for line in report.ledger if line.ledger_class in in_steps)
    assert steps["usd"].sum() == pytest.approx(paid, abs=1e-5)
    assert list(steps.columns[-2:]) == ["generation", "kept"] and steps["mfu"].isna().all(), (
        "no peak was measured"
    )
    assert pickle.loads(pickle.dumps(report)) == RunReport.from_json(report.to_json())
    assert report["outcome"] == report.to_json()["outcome"]


def test_importing_the_report_imports_neither_pandas_nor_torch():
    modules = "ebbflow.cost.report.render_html, ebbflow.cost.report.report"
    code = f"import sys, {modules}; print({{'pandas', 'torch', 'metaflow'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.slow
def test_the_command_rebuilds_the_report_from_the_store(tmp_path: Path):
    store = Store.open(str(tmp_path / "store"))
    with EventLog(
        store.sub(job_prefix("demo")), Origin(job="demo", run="run-1", process="plan")
    ) as log:
        log.emit(PLAN, **plan_event().data)
        log.emit(OUTCOME, outcome="no_capacity", message="nothing fits")
    for place in (
        ["demo", "--store", str(tmp_path / "store")],
        [str(tmp_path / "store" / job_prefix("demo"))],
    ):
        command = [sys.executable, "-m", "cost", "report", *place]
        done = subprocess.run(
            [*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and json.loads(done.stdout)["outcome"] == "no_capacity", (
            done.stderr
        )
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "no_capacity (exit code 5)" in shown.stdout
    missing = subprocess.run(
        [*command[:-1], "nobody"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert missing.returncode == 2 and "looked for" in missing.stderr and not missing.stdout


def test_the_report_shows_the_finding_of_diagnose() -> None:
    report = build_report([event for event in interrupted_job() if event.name != OUTCOME])
    assert report.events["finding"]["symptom"] == "I02"
    for text in (render_html(report), render_text(report)):
        assert "a node vanished without a notice" in text and "see: I02" in text


def long_job(*, kill: bool) -> list[Event]:
    """100 s of work after 20 s of start-up; with a kill, 30 s of it are done again after 20 s more."""
    plan = plan_event(3.6, 7.2)
    plan.data["cheapest_on_demand"] = {"pool": "1 × g6.xlarge on-demand", "usd": 0.19, "hours": 0.1}
    gang = GangLog(1, 0.0, [[0]])
    gang.phase("startup", 20.0)
    gang.steps(1, 10, useful_step=10.0)
    if not kill:
        gang.phase("evaluation", 5.0)
        gang.outcome("completed")
        gang.ended("completed", 125.0)
        return [plan, *gang.events]
    gang.commit(7)
    gang.ended("node_lost", 120.0)
    again = GangLog(2, 130.0, [[0]], (7, 1))
    again.phase("startup", 20.0)
    again.steps(8, 10, useful_step=10.0)
    again.phase("evaluation", 5.0)
    again.outcome("completed")
    again.ended("completed", 55.0)
    return [plan, *gang.events, *again.events]


def test_savings_compare_with_the_same_machines_on_demand_and_interruptions_reduce_them() -> None:
    """Spot at half the on-demand price: $0.25 on demand for 125 s."""
    calm = build_report(long_job(kill=False))
    assert (calm.total_usd, calm.savings_usd) == (Decimal("0.125"), Decimal("0.125"))
    assert "50 % below the same machines on demand" in render_verdict(calm)
    struck = build_report(long_job(kill=True))
    assert (struck.total_usd, struck.savings_usd) == (Decimal("0.175"), Decimal("0.075"))
    assert "30 % below the same machines on demand" in render_verdict(struck)
    lines = explain_figures(struck)
    assert any("cheapest on-demand pool in time, 1 × g6.xlarge" in line for line in lines)
    assert any("same machines on demand" in line for line in lines)
