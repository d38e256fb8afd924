"""Every way to end: the report says once, and rightly, how to go on; generations and their figures
are shown.
"""

from __future__ import annotations

import html
import json
import math
import re
import shlex
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from ebbflow.command import COMMANDS
from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import EVALUATION, PEAK, PLAN, STEP, EndReason, Event
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.report.figure_text import (
    format_comparison_rows,
    format_generation_rows,
    format_key_figures,
)
from ebbflow.cost.report.render_html import render as render_html
from ebbflow.cost.report.render_text import render as render_text
from ebbflow.cost.report.render_text import suggest_next_step
from ebbflow.cost.report.report import RunReport, build_report
from tests.support.timelines import WALL, GangLog, event, plan_event
from tests.unit.test_report import interrupted_job

ROOT = Path(__file__).parents[2]
RESUMED = {Outcome.INTERRUPTED, Outcome.FAILED, Outcome.CRASH_LOOP}


def ended(
    outcome: Outcome | str, *, budget_usd: float | None = None, deadline_hours: float | None = None
) -> RunReport:
    """Ten steps of 2 s on one node at a tenth of a cent per second, then the outcome."""
    plan = plan_event()
    limits = {"budget_usd": budget_usd, "deadline_hours": deadline_hours}
    gang = GangLog(1, 10.0, [[0]])
    gang.steps(1, 10, useful_step=2.0)
    gang.commit(8)
    gang.outcome(outcome, message="because")
    gang.ended(outcome, 20.0)
    return build_report([event(PLAN, 0.0, **plan.data, **limits), *gang.events])


def command(report: RunReport) -> str:
    following = suggest_next_step(report)
    assert following is not None
    return following.command


def setting(report: RunReport) -> tuple[str, str]:
    """The key and value that the command sets.

    They must be such that the configuration takes them.
    """
    (text,) = re.findall(r"--set (\S+)$", command(report))
    loaded = load_config(ROOT / "ebbflow/configs" / "laptop.yaml", [text], project_root=ROOT)
    key, _, value = text.partition("=")
    section, name = key.split(".")
    assert getattr(getattr(loaded.config, section), name) == float(value)
    return key, value


@pytest.mark.parametrize("outcome", list(Outcome))
def test_each_outcome_shows_once_how_to_continue(outcome: Outcome) -> None:
    report = ended(outcome)
    page = html.unescape(render_html(report))
    text = render_text(report)
    assert f"{outcome} (exit code {outcome.exit_code})" in text and outcome in page
    for rendered in (text, page):
        assert len(re.findall("ebbflow (resume|run)", rendered)) == (
            outcome is not Outcome.COMPLETED
        )
    assert max(map(len, text.splitlines())) <= 100
    if outcome is Outcome.COMPLETED:
        assert suggest_next_step(report) is None
        return
    assert command(report) in text and command(report) in page
    resumed = "ebbflow resume train --origin-run-id run-1"
    if outcome in RESUMED:
        assert command(report) == resumed
    else:
        assert command(report).startswith("ebbflow run --job demo")
    again = RunReport.from_json(json.loads(json.dumps(report.to_json(), allow_nan=False)))
    assert suggest_next_step(again) == suggest_next_step(report)


def test_the_command_to_type_does_not_depend_on_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own folder has no flows/train_flow.py and no .venv."""
    report = ended(Outcome.INTERRUPTED)
    following = suggest_next_step(report, program="'/my env/bin/ebbflow'")
    assert following is not None
    assert shlex.split(following.command)[:2] == ["/my env/bin/ebbflow", "resume"]
    assert following.command in render_text(report, program="'/my env/bin/ebbflow'")
    assert "<pre>ebbflow resume train" in render_html(report)
    for name in shlex.split(command(report))[1:2]:
        assert name in COMMANDS
    unknown = build_report(
        [Event(**{**vars(event), "run": ""}) for event in interrupted_job(completed=False)]
    )
    assert command(unknown) == "ebbflow run --job demo"


def test_limits_are_raised_by_what_they_did_not_allow() -> None:
    # Twice the two cents that were spent
    assert setting(ended(Outcome.BUDGET)) == ("cost.budget_usd", "0.04")
    # Half of the budget was kept for the last save: twice the spent would be no more than the
    # budget was.
    assert setting(ended(Outcome.BUDGET, budget_usd=0.041)) == ("cost.budget_usd", "0.061")
    assert setting(ended(Outcome.DEADLINE, deadline_hours=1.25)) == ("cost.deadline_hours", "2.5")
    assert setting(ended(Outcome.DEADLINE, deadline_hours=1234)) == ("cost.deadline_hours", "2500")


@pytest.mark.parametrize("limit", [{"budget_usd": 0.001}, {"deadline_hours": 0.001}])
def test_a_refused_plan_is_not_refused_again_with_what_is_suggested(
    limit: dict[str, float],
) -> None:
    plan = make_plan(RunConfig.model_validate({"cost": limit}), now_utc=WALL)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    key, value = setting(build_report([event(PLAN, 2.0, **plan.to_json())]))
    raised = RunConfig.model_validate({"cost": {key.removeprefix("cost."): float(value)}})
    assert list(limit) == [key.removeprefix("cost.")]
    assert make_plan(raised, now_utc=WALL).refusal is None


def test_an_outcome_without_capacity_shows_the_plans_hint() -> None:
    plan = make_plan(
        RunConfig.model_validate({"cluster": {"instance_types": ["q9"]}}), now_utc=WALL
    )
    report = build_report([event(PLAN, 2.0, **plan.to_json())])
    following = suggest_next_step(report)
    assert following is not None and plan.refusal is not None
    assert plan.refusal.hint in following.explanation
    assert following.command.endswith("run --job demo")


@pytest.mark.parametrize("strict", [True, False])
def test_a_loss_that_is_no_number_is_read_as_null_and_as_nan(strict: bool) -> None:
    """Lines of strict JSON say null; those written before said NaN."""
    if strict:
        unknown = None
    else:
        unknown = math.nan
    gang = GangLog(1, 0.0, [[0]])
    gang.steps(1, 3, useful_step=1.0)
    gang.add(PEAK, 0.1, rank=0, flops_per_second=unknown, dtype="float32")
    gang.add(EVALUATION, 3.0, rank=0, step=3, metrics={"held_out_loss": unknown})
    gang.outcome("non_finite", message="no finite loss")
    gang.ended("non_finite", 3.0)
    rates = {1: 0.001, 2: 0.003, 3: 0.002}
    for recorded in gang.events:
        if recorded.name == STEP:
            recorded.data.update(learning_rate=rates[recorded.step or 0], gradient_norm=unknown)
            if recorded.step == 3:
                recorded.data["loss"] = unknown
    lines = [json.dumps(vars(recorded), allow_nan=not strict) for recorded in gang.events]
    assert any("NaN" in line for line in lines) is not strict
    report = build_report([Event.from_json(line) for line in lines])
    assert report.loss_curve == [(1, 2.0), (2, 1.0), (3, None)]
    assert report.outcome is Outcome.NON_FINITE
    assert report.actual["held_out_loss"] is None and report.actual["mfu"] is None
    following = suggest_next_step(report)
    assert following is not None and "would fail again at step 3" in following.explanation
    assert setting(report) == ("training.learning_rate", "0.0015")
    page = re.sub("<script>.*?</script>", "", render_html(report), flags=re.DOTALL)
    text = render_text(report)
    assert not re.search(r"\bnan\b", (page + text).lower())


def test_a_run_without_a_known_learning_rate_suggests_no_number() -> None:
    assert command(ended(Outcome.NON_FINITE)).endswith("--set training.learning_rate=RATE")


def test_mfu_names_its_reference_peak() -> None:
    gang = GangLog(1, 0.0, [[0]])
    gang.add(PEAK, 0.1, rank=0, flops_per_second=4e9, dtype="float32")
    gang.steps(1, 3, useful_step=2.0)
    for recorded in gang.events:
        if recorded.name == STEP:
            recorded.data["flops"] = 2e9
    gang.outcome("completed")
    report = build_report([plan_event(), *gang.events])
    assert format_key_figures(report)["MFU"] == "25.0 % of measured peak"
    assert (
        "MFU",
        "30.0 % of data sheet peak",
        "25.0 % of measured peak",
    ) in format_comparison_rows(report)
    assert "25.0 % of measured peak" in render_text(
        report
    ) and "25.0 % of measured peak" in render_html(report)
    assert "MFU" not in format_key_figures(ended(Outcome.COMPLETED))


def test_generations_are_listed_when_there_is_more_than_one() -> None:
    report = build_report(interrupted_job())
    assert format_generation_rows(report) == [
        ("1", "0", "6", "40.00", "node lost", "node 1 (host-1) was lost"),
        ("2", "4", "8", "28.00", "completed", ""),
    ]
    page = html.unescape(render_html(report))
    text = render_text(report)
    for name in ("from step", "last step", "culprit"):
        assert name in text and f"<th>{name}</th>" in page
    (line,) = [line for line in text.splitlines() if re.search(r"│ +1 |│ 1 ", line)]
    assert line.endswith("40.00  node lost  node 1 (host-1) was lost")
    single = ended(Outcome.COMPLETED)
    assert format_generation_rows(single) == [] and "<h2>Generations" not in render_html(single)


def test_many_generations_with_long_foreign_culprits_stay_within_the_line() -> None:
    evil = "<b onload=x>" + "a very long culprit " * 20 + "\x1b[31m"
    events = [plan_event()]
    for number in range(1, 31):
        gang = GangLog(number, 100.0 * number, [[0]], None if number == 1 else (3, number - 1))
        gang.steps(4 if number > 1 else 1, 6, useful_step=1 / 3)
        gang.ended(evil if number == 30 else "rank_failed", 10 / 3, culprit=evil, user_code=True)
        events += gang.events
    report = build_report(events)
    text = render_text(report)
    page = render_html(report)
    assert max(map(len, text.splitlines())) <= 100 and "\x1b" not in text
    assert "… and 18 earlier ones" in text
    assert "<b onload" not in page and page.count("&lt;b onload") > 30
    paid = [Decimal(row[3]) for row in format_generation_rows(report)]
    assert len(paid) == 30 and sum(paid) == round(Decimal(str(report.paid_rank_seconds)), 2)


def test_a_superseded_generation_is_no_failure_of_the_program() -> None:
    gang = GangLog(1, 0.0, [[0]])
    gang.steps(1, 3, useful_step=1.0)
    gang.ended(
        EndReason.SUPERSEDED, 4.0, culprit="rank 0: a newer generation was opened", user_code=True
    )
    report = build_report([plan_event(), *gang.events])
    assert (report.outcome, report.interruptions, report.failures) == (Outcome.INTERRUPTED, 1, 0)


def test_a_completed_job_stays_so_when_a_later_run_of_it_is_refused() -> None:
    def later(at: float, outcome: Outcome) -> Event:
        return replace(
            event("outcome", at, outcome=outcome.value, message="2 checks failed"), run="9"
        )

    def settings(at: float, run: str) -> Event:
        rows = [{"key": "cost.owner", "value": f"of run {run}", "source": "default"}]
        return replace(event("configured", at, settings=rows), run=run)

    done = [settings(0.0, event("outcome", 0.0).run), *interrupted_job()]
    refused = build_report([*done, settings(499.0, "9"), later(500.0, Outcome.PREFLIGHT)])
    assert refused.configuration == build_report(done).configuration != []
    assert refused.money["owner"] == build_report(done).money["owner"] != ""
    assert (refused.outcome, refused.exit_code, suggest_next_step(refused)) == (
        Outcome.COMPLETED,
        0,
        None,
    )
    assert refused.events["refused"] == {"run": "9", "outcome": "preflight"}
    assert refused.weights_sha256 == build_report(done).weights_sha256 is not None
    said = "run 9 was refused (preflight: 2 checks failed), and the job stays as it was"
    assert said in " ".join(render_text(refused).replace("│", " ").split()) and said in render_html(
        refused
    )
    failed = build_report([*done, later(500.0, Outcome.PREFLIGHT), later(600.0, Outcome.FAILED)])
    assert failed.outcome is Outcome.FAILED and failed.events["refused"] is None
    again = build_report([*done, later(500.0, Outcome.FAILED), later(600.0, Outcome.PREFLIGHT)])
    assert again.outcome is Outcome.PREFLIGHT, "it was not completed any more"
    begun = build_report([*interrupted_job(completed=False), later(500.0, Outcome.PREFLIGHT)])
    assert begun.outcome is Outcome.PREFLIGHT and begun.events["refused"] is None


def measured_job(*peaks: float) -> RunReport:
    """Generations on one host, each with two ranks that measure a peak; every step does 2e9 flops
    in 2 s.
    """
    events = [plan_event()]
    for number, peak in enumerate(peaks, start=1):
        gang = GangLog(
            number,
            100.0 * number,
            [[0, 1]],
            None if number == 1 else (3 * (number - 1), number - 1),
        )
        for rank in (0, 1):
            gang.add(PEAK, gang.start, rank=rank, flops_per_second=peak, dtype="float32")
        gang.steps(3 * number - 2, 3 * number, useful_step=2.0)
        gang.commit(3 * number)
        gang.ended("rank_killed" if number < len(peaks) else "completed", 10.0)
        events += gang.events
    for recorded in events:
        if recorded.name == STEP and recorded.rank == 0:
            recorded.data["flops"] = 2e9
    return build_report(events)


def test_one_peak_per_machine_the_best_that_was_measured() -> None:
    assert measured_job(1e9).actual["mfu"] == pytest.approx(0.5)
    assert measured_job(1e9, 0.25e9, 0.4e9).actual["mfu"] == pytest.approx(0.5), (
        "a busy machine raises no MFU"
    )
    assert measured_job(0.25e9, 1e9).actual["mfu"] == pytest.approx(0.5)


def test_an_mfu_above_100_percent_is_withheld_with_its_reason() -> None:
    report = measured_job(0.2e9)
    assert report.actual["mfu"] is None
    why = "withheld: 2.5 times the peak, which was measured while the machine was busy"
    assert format_key_figures(report)["MFU"] == why
    assert why in render_text(report) and max(map(len, render_text(report).splitlines())) <= 100
