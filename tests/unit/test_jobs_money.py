"""Money in reports: by cause, against hindsight, over many jobs, and loaded by name or place."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import pytest

from ebbflow.core.config.schema import CostConfig, RunConfig
from ebbflow.core.errors import CloudRefused
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import (
    BUDGET,
    CONFIGURED,
    NODE_STARTED,
    PLAN,
    PRICES,
    Event,
    Origin,
    read_events,
)
from ebbflow.core.layout import KnownJob, event_key, find_records, remember_job, runs_folder
from ebbflow.core.store import Store
from ebbflow.cost import jobs
from ebbflow.cost.errors import PriceError, ReportError
from ebbflow.cost.jobs import find_job_uri, list_jobs, list_known_jobs, load_report
from ebbflow.cost.ledger.ledger import fold
from ebbflow.cost.prices.source import read_price_changes
from ebbflow.cost.report.figure_text import (
    CAUSE_HEADER,
    format_cause_rows,
    format_comparison_rows,
    format_key_figures,
)
from ebbflow.cost.report.render_html import render as render_html
from ebbflow.cost.report.render_text import render as render_text
from ebbflow.cost.report.render_text import render_table
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.flows.job import Job
from ebbflow.flows.reporting import record_prices
from tests.support.timelines import WALL, GangLog, event, plan_event, prices_event

ROOT = Path(__file__).parents[2]


def killed_job(*, deadline_hours: float | None = None) -> list[Event]:
    """5 s of start and 4 steps of 2 s; a kill after 20 s that wastes 2 steps; 3 s of start and 4
    steps again.
    """
    first = GangLog(1, 0.0, [[0]])
    first.phase("startup", 5.0)
    first.steps(1, 6, useful_step=2.0)
    first.commit(4)
    first.ended("node_lost", 20.0)
    second = GangLog(2, 30.0, [[0]], parent=(4, 1))
    second.phase("startup", 2.0)
    second.phase("restore", 1.0)
    second.steps(5, 8, useful_step=2.0)
    second.commit(8)
    second.outcome("completed")
    second.phase("shutdown", 1.0)
    second.ended("completed", 12.0)
    plan = plan_event()
    plan.data["deadline_hours"] = deadline_hours
    who = [
        {"key": "cost.owner", "value": "ada", "source": "--set"},
        {"key": "cost.project", "value": "engine", "source": "default"},
    ]
    return [event(CONFIGURED, -1.0, settings=who), plan, *first.events, *second.events]


def put_job(store: Path, name: str, events: Sequence[Event]) -> None:
    content = "\n".join(event.to_json() for event in events).encode()
    Store.open(str(store / "jobs" / name)).put(event_key(1, 0, "test", "000000.a"), content)


def test_an_interruption_carries_all_that_it_cost() -> None:
    report = build_report(killed_job())
    usd = {line["cause"]: Decimal(str(line["usd"])) for line in report.money["causes"]}
    # A tenth of a cent a second: 8 kept steps; 2 redone, 3 s until the node's end, the second start
    # with its restore.
    assert usd == {
        "useful work": Decimal("0.016"),
        "interruption: node lost": Decimal("0.004") + Decimal("0.003") + Decimal("0.003"),
        "start and end": Decimal("0.006"),
    }
    assert sum(usd.values()) == report.total_usd == Decimal("0.032")
    assert sum(line.usd for line in fold(killed_job()).causes) == report.total_usd
    for rendering in (render_text(report), render_html(report)):
        assert all(cell in rendering for row in format_cause_rows(report) for cell in row)
        assert "ada, project engine" in rendering
    assert all(cell in render_text(report) for cell in CAUSE_HEADER)


def test_job_costs_show_the_first_plans_forecast_and_the_spent_budget() -> None:
    events = killed_job()
    later = plan_event(t=29.0)
    later.data["chosen"]["expected_usd"] = 0.1  # of what was left
    later.data["budget_usd"] = 0.064
    told = event(
        BUDGET,
        31.0,
        generation=2,
        rank=0,
        threshold=0.5,
        spent_usd=0.033,
        budget_usd=0.064,
        reserve_usd=0.0,
    )
    report = build_report([*events, later, told])
    assert {row[0]: row[1] for row in format_comparison_rows(report)}["dollars"] == "$0.9000"
    assert format_key_figures(report)["budget"] == "50.0 % of $0.0640, notified at 50 %"


def test_hindsight_at_one_price_is_the_work_and_one_start() -> None:
    found = build_report(killed_job()).money["hindsight"]
    assert found["usd"] == pytest.approx(0.001 * (16.0 + 5.0))
    assert found["regret_usd"] == pytest.approx(0.032 - 0.021)
    assert (found["kind"], found["pools"]) == ("estimated", 2)
    assert (
        build_report([event for event in killed_job() if event.name != "plan"]).money["hindsight"]
        is None
    )


def test_hindsight_waits_and_moves_as_the_recorded_prices_would_have_had_it() -> None:
    """Of 3,600 s until the deadline the last 1,000 were cheap in another zone: with the future
    known, it waits.
    """
    cheap = prices_event([(0.0, 3.6), (2600.0, 0.36)], zone="use1-az9", t=50.0)
    found = build_report([*killed_job(deadline_hours=1.0), cheap]).money["hindsight"]
    assert found["usd"] == pytest.approx(0.0001 * 21.0, rel=0.02)
    without_time = build_report([*killed_job(), cheap]).money["hindsight"]
    assert without_time["usd"] == pytest.approx(0.001 * 21.0, rel=0.02)


def test_hindsight_knows_what_each_plan_of_the_job_quoted() -> None:
    """The second plan is dearer: all of the work at the first one's price is the least that it
    could have cost.
    """
    dearer = plan_event(7.0, t=25.0)
    report = build_report([*killed_job(), dearer])
    found = report.money["hindsight"]
    assert report.total_usd > Decimal("0.032")
    assert found["usd"] == pytest.approx(0.001 * 21.0, rel=0.02)


def test_time_between_generations_on_one_instance_is_in_their_lines() -> None:
    events = killed_job()
    for recorded in events:
        if recorded.name == NODE_STARTED:
            recorded.data.update(instance_id="i-1", uptime_seconds=3600.0)
    report = build_report(events)
    assert [line["paid_rank_seconds"] for line in report.events["generations"]] == [30.0, 12.0]
    assert report.paid_rank_seconds == 42.0


def test_several_jobs_are_listed_with_their_total(tmp_path: Path) -> None:
    reports = [build_report(killed_job()), build_report(killed_job()[:-6])]
    text = render_table(reports)
    *_, total, kinds = text.splitlines()
    dollars = [Decimal(amount) for amount in re.findall(r"\$(0\.\d{4})", total)]
    assert dollars[0] == sum(report.total_usd for report in reports)
    assert "recorded 2026-07-20" in kinds and "estimated" in kinds


def run(*words: str, runs: Path) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, EBBFLOW_RUNS=str(runs))
    command = [sys.executable, "-m", "cost", "report", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


def test_jobs_of_another_project_of_this_machine_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one that has the name of a job here."""
    monkeypatch.delenv("EBBFLOW_RUNS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (here, there) = (tmp_path / "here", tmp_path / "there")
    for project, name in ((there, "same"), (there, "other"), (here, "same")):
        project.mkdir(exist_ok=True)
        store = str(project / "store")
        put_job(project / "store", name, killed_job())
        remember_job(runs_folder(project), KnownJob(name, store))
    monkeypatch.setattr(jobs, "PROJECT_ROOT", here)
    assert set(list_known_jobs()) == {"same", "other", str(there / "runs" / "same")}
    assert find_job_uri("same") == str(here / "store" / "jobs" / "same")
    assert find_job_uri("other") == str(there / "store" / "jobs" / "other")
    assert find_job_uri(str(there / "runs" / "same")) == str(there / "store" / "jobs" / "same")
    monkeypatch.setattr(jobs, "PROJECT_ROOT", tmp_path / "elsewhere")
    assert find_job_uri("latest") == str(here / "store" / "jobs" / "same")
    (there / ".metaflow").mkdir()
    assert find_records(tmp_path / "elsewhere") == there
    monkeypatch.setenv("EBBFLOW_RUNS", str(tmp_path / "mine"))
    assert list_known_jobs() == []


@pytest.mark.slow
def test_the_command_reports_all_known_jobs_as_csv(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("one", "two"):
        put_job(tmp_path / "store", name, killed_job())
        (runs / name).mkdir(parents=True)
        (runs / name / "job.json").write_bytes(KnownJob(name, str(tmp_path / "store")).note())
    (runs / "latest").symlink_to("two")
    assert sorted(list_known_jobs(runs)) == list_jobs(str(tmp_path / "store")) == ["one", "two"]
    done = run("--csv", runs=runs)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["total_usd"] for row in rows] == ["0.032000", "0.032000"]
    assert {(row["owner"], row["project"], row["outcome"]) for row in rows} == {
        ("ada", "engine", "completed")
    }
    (runs / "gone").mkdir()
    (runs / "gone" / "job.json").write_bytes(KnownJob("gone", str(tmp_path / "store")).note())
    others = run("--csv", runs=runs)
    assert (others.returncode, others.stdout) == (
        0,
        done.stdout,
    ) and "gone is left out" in others.stderr
    nobody = run("--json", runs=tmp_path / "empty")
    assert nobody.returncode == 2 and "no job in the list of this machine" in nobody.stderr


def test_a_report_is_loaded_by_file_folder_and_name(tmp_path: Path) -> None:
    put_job(tmp_path, "demo", killed_job())
    folder = tmp_path / "jobs" / "demo"
    built = load_report(str(folder))
    assert isinstance(built, RunReport) and built.total_usd == Decimal("0.032")
    written = {**built.to_json(), "interruptions": 7}
    (folder / "report.json").write_text(json.dumps(written))
    assert load_report(str(folder)).interruptions == 7
    assert load_report(str(folder / "report.json")).interruptions == 7
    assert load_report("demo", store=str(tmp_path), fresh=True).interruptions == 1
    older = {name: value for name, value in written.items() if name != "money"}
    (folder / "report.json").write_text(json.dumps(older))
    assert format_cause_rows(load_report(str(folder))) == []
    (folder / "report.json").write_text("{}")
    for place in (folder / "report.json", tmp_path / "nothing.json", tmp_path / "nowhere"):
        with pytest.raises(ReportError, match=str(place.name)):
            load_report(str(place))


def test_changes_of_price_since_the_plan_are_taken_from_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    plain = {
        "InstanceType": "g5.xlarge",
        "AvailabilityZone": "us-east-1a",
        "AvailabilityZoneId": "use1-az4",
    }
    times = (
        "2027-01-15T07:00:00Z",
        "2027-01-15T07:59:00Z",
        "2027-01-15T08:00:30Z",
        "2027-01-15T09:00:00Z",
    )
    records = [
        {**plain, "Timestamp": at, "SpotPrice": f"0.{i}"} for i, at in enumerate(times, start=1)
    ]
    other = {**plain, "InstanceType": "p3.2xlarge", "Timestamp": times[1], "SpotPrice": "1.0"}
    path.write_text(json.dumps({"SpotPriceHistory": [*records, other]}))
    plan = {"made_utc": WALL, "chosen": {"instance_type": "g5.xlarge"}}  # 08:00 UTC of that day
    [pool] = read_price_changes(CostConfig(prices=str(path)), plan, now_utc=WALL + 600)
    assert pool["changes"] == [[WALL - 60.0, "0.2"], [WALL + 30.0, "0.3"]]
    assert (pool["zone"], pool["market"], pool["kind"]) == ("use1-az4", "spot", "recorded")
    assert read_price_changes(CostConfig(), plan, now_utc=WALL + 600) == []

    def refused(region: str) -> None:
        raise CloudRefused(f"{region} refused it")

    with pytest.raises(PriceError, match="us-east-1 refused it"):
        read_price_changes(CostConfig(prices="live"), plan, now_utc=WALL + 600, client=refused)


def test_changes_are_recorded_of_every_type_that_a_plan_chose(tmp_path: Path) -> None:
    """The first plan was refused for want of a pool, the next two chose one type each."""
    path = tmp_path / "prices.json"
    place = {
        "AvailabilityZone": "us-east-1a",
        "AvailabilityZoneId": "use1-az4",
        "Timestamp": "2026-01-15T08:30:00Z",
    }
    types = ("g5.xlarge", "g6.xlarge", "p3.2xlarge")
    path.write_text(
        json.dumps([{**place, "InstanceType": kind, "SpotPrice": "1.0"} for kind in types])
    )
    config = RunConfig(store=str(tmp_path), cost=CostConfig(prices=str(path)))
    job = Job(name="demo", run="1", config=config)
    with EventLog(job.store, Origin(job="demo", run="1", process="plan")) as log:
        for kind in (None, "g5.xlarge", "g6.xlarge"):
            if kind is None:
                chosen = None
            else:
                chosen = {"instance_type": kind, "market": "spot", "usd_per_hour": 1.0}
            log.emit(PLAN, made_utc=WALL - 366 * 86400, chosen=chosen)
    record_prices(job)
    [told] = [event for event in read_events(job.store) if event.name == PRICES]
    assert sorted(pool["instance_type"] for pool in told.data["pools"]) == [
        "g5.xlarge",
        "g6.xlarge",
    ]
