"""The live page and the report page: what they show at any moment of a job, in a browser and
without one.
"""

from __future__ import annotations

import html
import json
import os
import re
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError

import pytest

from ebbflow.core.errors import Outcome
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import CONFIGURED, FAULT_DETECTED, PLAN, STEP, Event, LedgerClass, Origin
from ebbflow.core.layout import job_prefix
from ebbflow.core.rank_logs import LogLine
from ebbflow.core.store import Store
from ebbflow.cost.__main__ import main
from ebbflow.cost.report.charts import thin_columns
from ebbflow.cost.report.render_html import render
from ebbflow.cost.report.render_jobs import render_jobs_page
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.cost.report.verdict import (
    describe_stop,
    render_progress,
    render_verdict,
    summarize_status,
)
from ebbflow.observe.observer import JobObserver, PageFile
from ebbflow.observe.watch import LivePage, LiveReport, _Server, merge_committed_steps
from tests.support.browser import cut_off, dump
from tests.support.flow import wait_until
from tests.support.timelines import GangLog, event, plan_event
from tests.unit.test_report import expensive, interrupted_job

PICTURES = Path(__file__).parents[2] / "docs" / "pictures.py"
LAUNCHER = {"since_utc": 1.8e9, "host": "here", "user": "ada", "pid": 1, "command": "run"}
SETTINGS = [
    {"key": "training.max_steps", "value": 8, "source": "configs/laptop.yaml:18"},
    {"key": "model.num_layers", "value": 3, "source": "--set"},
]


class Clock:
    """A job's log that a test extends event by event."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(str(folder)).sub(job_prefix("demo"))
        self.log = EventLog(
            self.store, Origin(job="demo", run="run-1", process="test"), flush_seconds=0.01
        )

    def write(self, events: list[Event]) -> None:
        for recorded in events:
            fields = {
                name: getattr(recorded, name)
                for name in ("generation", "node", "rank", "run", "attempt")
            }
            if recorded.rank < 0:
                process = "agent"
            else:
                process = "rank"
            with EventLog(self.store, Origin(job="demo", process=process, **fields)) as log:
                log.emit(
                    recorded.name,
                    step=recorded.step,
                    at=(recorded.t_wall, recorded.t_mono),
                    **recorded.data,
                )


def job_with_settings(length: int | None = None) -> list[Event]:
    return [event(CONFIGURED, 0.5, settings=SETTINGS), *interrupted_job()][:length]


def data_of(page: str) -> dict:
    return json.loads(re.findall(r'id="data">(.*?)</script>', page)[0])


def test_the_page_answers_what_is_asked_in_ten_seconds() -> None:
    report = build_report(job_with_settings())
    verdict = render_verdict(report)
    # Generation 1's tail and lost steps, and generation 2's start: 4 + 3 + 5 s × 2 ranks at a tenth
    # of a cent.
    causes = [
        cause for cause in report.money["causes"] if cause["cause"].startswith("interruption")
    ]
    assert sum(cell["usd"] for cell in report.money["cells"]) == pytest.approx(
        float(report.total_usd)
    )
    assert (
        f"1 interruption cost {sum(cause['rank_seconds'] for cause in causes) / 2:.1f} s and $"
        in verdict
    )
    assert verdict.startswith("Completed in 53.5 s for $0.0680; "), "12 s of work compare nothing"
    page = render(report, earlier=[build_report(interrupted_job())])
    assert verdict in page and "8 of 8 steps" in page
    assert "--set model.num_layers=3" in page and "--config configs/laptop.yaml" in page
    running = build_report(job_with_settings(), running=LAUNCHER)
    assert "8 of 8 steps" in render_verdict(running) and running.progress["at_risk_steps"] == 0
    assert any("loses no finished step" in line for line in summarize_status(running))


def test_the_page_of_a_running_job_shows_its_end_its_cost_and_what_a_kill_loses() -> None:
    gang = GangLog(1, 10.0, [[0], [1]])
    gang.phase("startup", 5.0)
    gang.steps(1, 5, useful_step=2.0)
    gang.commit(4)
    settings = [{"key": "training.max_steps", "value": 20, "source": "default"}]
    report = build_report(
        [event(CONFIGURED, 0.0, settings=settings), plan_event(), *gang.events], running=LAUNCHER
    )
    found = report.progress
    assert (found["step"], found["steps"], found["at_risk_steps"]) == (5, 20, 1)
    assert found["eta_seconds"] == pytest.approx(30.0)  # 15 steps of 2 s
    # One step of 2 s on 2 nodes at a tenth of a cent
    assert found["at_risk_usd"] == pytest.approx(0.004)
    assert found["forecast_usd"] == pytest.approx(float(report.total_usd) + 0.06)
    assert found["low_usd"] <= found["forecast_usd"] <= found["high_usd"]
    columns = data_of(render(report))["tables"]["steps"]
    assert columns["step"][-1] == 20 and columns["usd_forecast"][-1] == pytest.approx(
        found["forecast_usd"], rel=1e-5
    )
    assert columns["loss"][-1] is None


def test_a_slow_rank_and_the_failure_that_ended_the_job_are_named() -> None:
    gang = GangLog(1, 1.0, [[0, 1], [2, 3]])
    gang.steps(1, 4, useful_step=1.0)
    for logged in gang.events:
        if logged.name == STEP and logged.rank == 0:
            logged.data.update(
                slowest_rank=2, slowest_ratio=1.62, slowest_seconds=0.38, own_seconds=0.75
            )
    page = render(build_report([plan_event(), *gang.events], running=LAUNCHER))
    slow = (
        "rank 2 on node 1 host-1 is slow: 380 ms more than the others' median in 100 % of the "
        "steps, which cost 1.5 s"
    )
    assert html.escape(f"{slow} and $0.0") in page and "of it waiting for other ranks" in page
    gang = GangLog(1, 1.0, [[0, 1], [2, 3]])
    gang.steps(1, 4, useful_step=1.0)
    gang.events[-1].data.update(slowest_rank=3, slowest_ratio=1.01)
    assert "no rank is slow" in render(build_report([plan_event(), *gang.events], running=LAUNCHER))
    # It survived the lost node of generation 1
    failed = build_report(interrupted_job(completed=False))
    assert "generation 2: rank failed (rank 1: ValueError: no such thing)" in render_verdict(failed)
    failed = replace(
        failed,
        job="179543",
        configuration=[{"key": "model.num_layers", "value": 3, "source": "--set"}],
    )
    assert "<h1>3-layer transformer <small>job 179543</small></h1>" in render(failed)


def test_thinning_keeps_spikes_and_gaps() -> None:
    count = 100_000
    losses: list[float | None] = [1.0] * count
    losses[12_345] = 99.0
    losses[50_000] = None
    losses[77_777] = -7.0
    axis: list[float | None] = [float(step) for step in range(count)]
    thin = thin_columns({"step": axis, "seconds": axis, "usd": axis, "loss": losses})
    assert len(thin["step"]) == len(thin["loss"]) <= 600
    assert max(loss for loss in thin["loss"] if loss is not None) == 99.0
    assert min(loss for loss in thin["loss"] if loss is not None) == -7.0
    assert thin["loss"].count(None) == 1
    steps = [step for step in thin["step"] if step is not None]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == count - 1


def test_a_million_steps_and_a_thousand_ranks_are_a_small_page() -> None:
    values: list[float | None] = [float(step) for step in range(1_000_000)]
    columns = dict.fromkeys(("step", "seconds", "usd", "loss", "speed"), values)
    gang = GangLog(1, 0.0, [list(range(8 * node, 8 * node + 8)) for node in range(128)])
    gang.steps(1, 3, useful_step=1.0)
    report = build_report([plan_event(), *gang.events])
    assert len(report.charts["ranks"]) == 1024 and len(report.charts["lanes"]) == 64
    report.charts["steps"] = thin_columns(dict(columns))
    report.loss_curve[:] = [(step, 1.0) for step in range(1_000_000)]
    began = time.process_time()
    page = render(report, earlier=[report])
    assert time.process_time() - began < 2.0
    assert len(page) < 600_000


def test_an_old_report_and_a_job_without_steps_have_a_page() -> None:
    old = build_report(interrupted_job()).to_json()
    for name in ("charts", "progress"):
        old.pop(name)
    del old["events"]["checks"], old["money"]["cells"]
    page = render(RunReport.from_json(old))
    assert 'id="figure-loss"' in page and "Completed" in page
    assert "no step has been recorded yet" in render(
        build_report([event(CONFIGURED, 0.0, settings=[])])
    )


def test_the_live_page_grows_with_the_log_and_ends_as_the_report(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    events = job_with_settings()
    target = tmp_path / "live.html"
    live = LiveReport("demo", str(tmp_path), launcher=LAUNCHER)
    observer = JobObserver(live, [PageFile("demo", target)])
    observer.look()
    wait_until("a page without events", target.exists)
    assert "waiting for the job" in target.read_text()
    clock.write([recorded for recorded in events if recorded.generation < 2])
    observer.look()
    wait_until(
        "a page of the job",
        lambda: "Restarting from step 4 (2 steps lost): 4 of 8 steps" in target.read_text(),
    )
    observer.look(last=True)
    assert observer.finish(30)
    text = target.read_text()
    assert 'data-state="ended"' in text and "node_lost" in text.replace(" ", "_")
    assert not list(tmp_path.glob(".live.html*"))


def test_the_server_shows_the_page_only_under_its_secret_address(
    tmp_path: Path,
) -> None:
    Clock(tmp_path).write(job_with_settings())
    with _Server(0, LivePage("demo", str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with urllib.request.urlopen(server.url, timeout=20) as answer:
            assert (
                b"Completed in" in answer.read() and answer.headers["Cache-Control"] == "no-store"
            )
        base = f"http://127.0.0.1:{server.server_port}"
        for url, headers in (
            (f"{base}/", {}),
            (f"{base}/guess/", {}),
            (server.url, {"Host": "evil.example"}),
        ):
            with pytest.raises(HTTPError, match="404"):
                urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20)
        with pytest.raises(HTTPError, match="501"):
            urllib.request.urlopen(urllib.request.Request(server.url, data=b"x=1"), timeout=20)
        server.shutdown()


def test_an_open_page_takes_newer_figures_and_ends_as_report_without_a_reload(
    tmp_path: Path,
) -> None:
    """From disk, without a server: the file is replaced while the page is open."""
    evil = "<img src=x onerror=document.title='hacked'>"
    events = [Event(**{**vars(setting), "job": evil}) for setting in job_with_settings()]
    page = tmp_path / "live.html"
    now = time.time()
    page.write_text(render(build_report(events[:20], running=LAUNCHER), written=now))

    def end() -> None:
        time.sleep(1.0)
        fresh = tmp_path / "fresh"
        # Shortly before the last live page
        fresh.write_text(render(build_report(events), written=now - 2))
        fresh.replace(page)

    thread = threading.Thread(target=end)
    thread.start()
    shown = dump(page, tmp_path, budget_milliseconds=90_000)
    thread.join()
    assert (
        'data-state="ended"' in shown and "Completed in" in shown and "<title>hacked" not in shown
    )
    assert shown.count('<figure class="chart"') >= 4, "charts are shown again with the new data"


@pytest.mark.parametrize("width", [360, 768, 1440])
@pytest.mark.slow
def test_nothing_is_cut_off_at_any_width(width: int, tmp_path: Path) -> None:
    report = build_report(job_with_settings())
    assert not cut_off(render(report, earlier=[report]), width, tmp_path)


def test_the_figures_of_a_failure_come_first() -> None:
    report = build_report(interrupted_job(completed=False))
    assert report.outcome is Outcome.FAILED
    page = render(report)
    assert page.index("Why it ended") < page.index("Training</h2>") < page.index("Timeline")
    assert (
        "resume train --origin-run-id run-1" in page
        and "<pre>ebbflow logs demo\nebbflow diagnose demo</pre>" in page
    )
    assert {segment[2] for lane in report.charts["lanes"] for segment in lane["segments"]} <= set(
        map(str, LedgerClass)
    )
    assert STEP in report.events["counts"]


def test_the_stack_of_the_failed_rank_and_the_path_of_its_log_are_on_the_page() -> None:
    """Of the generation that ended the job, from the first cause on, and without terminal codes or
    markup.
    """
    first = "Traceback (most recent call last)"
    cause = [
        "  File a.py, line 1",
        "KeyError: 'x'",
        "",
        "During handling of the above exception, another exception",
        "",
    ]
    texts = [
        first,
        "ValueError: handled",
        "step 3",
        f"{first}:",
        *cause,
        f"{first}:",
        "ValueError: <b>no such\x1b[31m",
    ]
    texts[4] += ", token=hunter2hunter2"  # a secret
    common = {"t": "2027-01-15T08:00:00.000Z", "job": "demo", "node": 0, "step": 3, "phase": None}
    lines = []
    for at, text in enumerate(texts):
        lines += [
            LogLine(text=text, start=at, end=at + 1, generation=generation, rank=rank, **common)
            for generation, rank in ((1, 1), (2, 0), (2, 1))
            if rank == 1 or ("ValueError" not in text and first not in text)
        ]
    report = build_report(interrupted_job(completed=False), logs=lambda: lines)
    safe = [text.replace("hunter2hunter2", "[redacted: named secret]") for text in texts[3:]]
    assert report.events["stack"] == {"rank": 1, "lines": safe} and "hunter2" not in render(report)
    page = render(report)
    assert "(runs/demo/logs/000002-*/rank-1.log)" in page and "KeyError: &#x27;x&#x27;" in page
    assert "ValueError: &lt;b&gt;no such</pre>" in page and "ValueError: handled" not in page
    assert "<pre>ebbflow logs demo --generation 2 --rank 1\nebbflow diagnose demo</pre>" in page
    assert ">rank-0.log</td>" in page and "logs are in runs/demo/logs/000002-* on each node" in page
    assert RunReport.from_json(report.to_json()).events["stack"] == report.events["stack"]


def test_what_a_failed_rank_printed_last_leaves_out_torchs_own_notes() -> None:
    error = ["Traceback (most recent call last):", "RuntimeError: no more"]
    note = "[W1129 09:17:32.428959393 WorkerServer.cpp:113] [c10d] Server listening to UNIX /a"
    lines = [
        LogLine(
            t="2027-01-15T08:00:00.000Z",
            job="demo",
            generation=2,
            node=0,
            rank=1,
            step=3,
            phase=None,
            text=text,
            start=at,
            end=at + 1,
        )
        for at, text in enumerate([*error, note])
    ]

    report = build_report(interrupted_job(completed=False), logs=lambda: lines)

    stack = report.events["stack"]
    assert stack is not None and stack["lines"] == error


def test_the_commands_print_one_state_and_write_a_page_of_all_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Clock(tmp_path).write(job_with_settings())
    assert main(["watch", "demo", "--store", str(tmp_path), "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("Completed in 53.5 s for $0.0680")
    page = tmp_path / "jobs.html"
    assert main(["jobs", "demo", "--store", str(tmp_path), "--html", str(page)]) == 0
    assert capsys.readouterr().err.endswith(": 1 job\n")
    text = page.read_text()
    assert "simulated" not in text
    priced = build_report(
        [plan_event(simulated=True), *(event for event in interrupted_job() if event.name != PLAN)]
    )
    of_plan = render_jobs_page([("demo", "", "", "completed", 0.068, None)], {"demo": priced}, [])
    assert "prices of 1 job are simulated" in of_plan and "$0.0680 (simulated prices)" in of_plan
    assert (
        "1 job, 0 running; $0.0680 spent" in text and "100 % of 8" in text and "node lost" in text
    )
    assert "2027-01-15" in text and "Dollars by day and owner" in text
    capsys.readouterr()
    assert main(["watch", "nosuch", "--store", str(tmp_path)]) != 0
    assert "no events of job 'nosuch'" in capsys.readouterr().err
    assert main(["watch", "demo", "--store", str(tmp_path), "--port", "70000"]) != 0
    assert "fix: leave --port out" in capsys.readouterr().err


def test_a_damaged_log_is_shown_on_the_live_page_and_in_one_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(tmp_path)
    live = LiveReport("demo", str(tmp_path), launcher=LAUNCHER)
    clock.write(job_with_settings())
    segment = max(
        (tmp_path / "jobs" / "demo" / "events").rglob("*.jsonl"),
        key=lambda path: path.stat().st_size,
    )
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join([lines[0].replace(b'"', b"'", 1), *lines[1:]]))
    said = "DAMAGED: the event log is damaged in "
    assert [len(new) for new in live.read_new()]
    assert said in render(live.build())
    assert said in LivePage("demo", str(tmp_path)).render().decode(), "of an ended job"
    assert main(["watch", "demo", "--store", str(tmp_path), "--once"]) == 0
    assert said in capsys.readouterr().out


def test_unknown_prices_are_no_free_machines() -> None:
    report = build_report([setting for setting in job_with_settings() if setting.name != PLAN])
    assert report.paid_microseconds and "price unknown" in render_verdict(report)
    page = render(report)
    assert "$0.0000" not in page and "the price is unknown" in page
    running = replace(report, outcome=None, running=LAUNCHER)
    assert "price unknown" in render_verdict(running) and "$0.0000" not in "".join(
        summarize_status(running)
    )


def test_words_of_a_failure_and_of_a_rehearsal() -> None:
    report = build_report(interrupted_job(completed=False))
    assert (report.interruptions, report.failures) == (2, 1)
    assert "1 interruption and 1 failure" in render(report)
    report.events["failures"][-1]["evidence"] = {"cascades": [0], "rank": 1}
    page = render(report)
    assert "<dt>failed after it</dt><dd>rank 0</dd>" in page and 'id="rehearsal"' not in page
    injected = event("fault_injected", 3.0, kind="node-loss", target="node 1", generation=1)
    page = render(build_report([*job_with_settings(), injected]))
    assert "survived; no uninterrupted run of these" in page and "; a fault was rehearsed; " in page
    assert "a fault was rehearsed" not in render(build_report(job_with_settings()))


def test_the_page_explains_the_difference_to_the_plan() -> None:
    events = job_with_settings()
    (plan,) = [event for event in events if event.name == PLAN]
    # A cent, of which 60 % are for useful work.
    plan.data["chosen"] |= {"compute_usd": 0.01, "expected_hours": 1.0, "case": {"work_hours": 0.6}}
    page = render(build_report(events))
    assert ">$0.0060</td>" in page and ">$0.0040</td>" in page
    found = re.search(
        r">useful work (\S+), everything else (\S+), of which interruption: node lost cost \$", page
    )
    assert found
    useful, extra = (float(group.replace("$", "")) for group in found.groups())
    assert useful + extra == pytest.approx(0.068 - 0.01, abs=2e-4)


def test_lost_steps_that_are_not_yet_redone_count_in_no_figure() -> None:
    first = GangLog(1, 10.0, [[0], [1]])
    first.steps(1, 15, useful_step=2.0)
    first.commit(4)
    first.ended("node_lost", 30.0)
    second = GangLog(2, 45.0, [[0], [1]], parent=(4, 1))
    second.steps(5, 6, useful_step=4.0)
    settings = [{"key": "training.max_steps", "value": 20, "source": "default"}]
    begun = event(CONFIGURED, 0.0, settings=settings)
    report = build_report([begun, plan_event(), *first.events, *second.events], running=LAUNCHER)
    found = report.progress
    assert (found["step"], found["at_risk_steps"]) == (6, 2)
    assert found["eta_seconds"] == pytest.approx(56.0)  # 14 steps of 4 s
    assert found["at_risk_seconds"] == pytest.approx(8.0)
    assert "loss 0.3333 · 250 tokens/s · ETA 56.0 s" in render_progress(report)
    columns = data_of(render(report))["tables"]["steps"]
    assert columns["step"] == [*range(1, 16), 20]
    drawn = {
        name: [step for step, usd in zip(columns["step"], columns[name], strict=True) if usd]
        for name in ("usd_spent", "usd_forecast")
    }
    assert drawn == {"usd_spent": [*range(1, 7)], "usd_forecast": [6, 20]}


def test_steps_without_samples_have_no_speed() -> None:
    gang = GangLog(1, 10.0, [[0]])
    gang.steps(1, 5, useful_step=2.0)
    for written in gang.events:
        written.data.pop("tokens", None)
    report = build_report([plan_event(), *gang.events], running=LAUNCHER)
    assert render_progress(report).startswith("step 5 · loss 0.4000 · $")


@pytest.mark.parametrize("last", [905, 1101])
def test_a_long_job_is_foretold_right_after_a_loss(last: int) -> None:
    """Its plots show each bucket of steps by a few of them, and the newest step is in one with lost
    steps.
    """
    first = GangLog(1, 10.0, [[0]])
    first.steps(1, 1200, useful_step=20.0)
    first.commit(900)
    first.ended("node_lost", 24_000.0)
    second = GangLog(2, 24_100.0, [[0]], parent=(900, 1))
    second.steps(901, last, useful_step=20.0)
    settings = [{"key": "training.max_steps", "value": 2000, "source": "default"}]
    begun = event(CONFIGURED, 0.0, settings=settings)
    beat = event("node_heartbeat", second.now + 1.0, generation=2, seconds=1.0)
    events = [begun, plan_event(), *first.events, *second.events, beat]
    found = build_report(events, running=LAUNCHER).progress
    assert found["step"] == last
    assert found["eta_seconds"] == pytest.approx(20.0 * (2000 - last), rel=1e-6)


def test_the_page_has_the_parts_that_are_pictured() -> None:
    page = render(build_report(job_with_settings(), running=LAUNCHER))
    pictured = re.findall(r'part="#([\w-]+)"|querySelector\(.#([\w-]+)', PICTURES.read_text())
    ids = {name for names in pictured for name in names if name}
    assert ids == {"ranks", "figure-usd"}
    assert all(f'id="{name}"' in page for name in ids)


def test_clocks_that_are_apart_are_a_caution_on_the_page() -> None:
    for offset, shown in ((3720.0, True), (-0.02, False)):
        events = [
            *job_with_settings(),
            event("network", 11.0, nodes=2, clock_offset_seconds=offset),
        ]
        assert (
            "the clocks of the nodes are 1 h 02 min apart" in render(build_report(events))
        ) is shown


def test_a_figure_of_several_lines_has_a_legend_without_scripts() -> None:
    drawn = render(build_report(job_with_settings()))
    figure = re.findall(r'<figure class="chart" id="figure-loss">.*?</figure>', drawn)[0]
    assert re.search(
        r'</svg><div class="keys"><span><i style="background:var\(--soft\)"></i>loss</span>', figure
    )


def test_while_nodes_are_replaced_no_end_is_foretold() -> None:
    gang = GangLog(1, 10.0, [[0], [1]])
    gang.steps(1, 5, useful_step=2.0)
    settings = [{"key": "training.max_steps", "value": 20, "source": "default"}]
    begun = [event(CONFIGURED, 0.0, settings=settings), plan_event(), *gang.events]
    assert build_report(begun, running=LAUNCHER).progress["eta_seconds"] == pytest.approx(30.0)
    silent = [*begun, event("node_heartbeat", 200.0, generation=1, seconds=190.0)]
    assert build_report(silent, running=LAUNCHER).progress["eta_seconds"] is None
    found = [
        *begun,
        event("fault_detected", 20.5, generation=1, culprit="node 1 (host-1) was lost"),
    ]
    assert build_report(found, running=LAUNCHER).progress["eta_seconds"] is None
    gang.ended("node_lost", 11.0)
    lost = [event(CONFIGURED, 0.0, settings=settings), plan_event(), *gang.events]
    assert build_report(lost, running=LAUNCHER).progress["eta_seconds"] is None


def test_a_store_that_may_not_be_entered_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = tmp_path / "closed"
    user = os.geteuid()
    (closed / "jobs" / "demo" / "events").mkdir(parents=True)
    closed.chmod(0)
    if user == 0:
        os.seteuid(65534)  # root may enter every folder
    try:
        for words in (["watch", "demo"], ["watch", "demo", "--once"], ["report", "demo"], ["jobs"]):
            assert main([*words, "--store", str(closed)]) != 0
            assert re.fullmatch(r"[^\n]*Permission denied[^\n]*\n", capsys.readouterr().err), words
    finally:
        os.seteuid(user)
        closed.chmod(0o700)


def test_merging_committed_steps_changes_no_amount() -> None:
    events = sorted(expensive() + interrupted_tail(), key=lambda one: (one.t_wall, one.t_mono))
    merged = merge_committed_steps(events)
    assert len(merged) < 0.7 * len(events)
    before = build_report(events)
    after = build_report(merge_committed_steps(merged))
    assert [(line.ledger_class, line.rank_microseconds) for line in after.ledger] == [
        (line.ledger_class, line.rank_microseconds) for line in before.ledger
    ]
    assert after.total_usd == before.total_usd and after.actual["steps"] == before.actual["steps"]
    spread = [chart["step_seconds"] for chart in before.charts["ranks"]]
    assert [chart["step_seconds"] for chart in after.charts["ranks"]] == pytest.approx(spread)


def interrupted_tail() -> list[Event]:
    """A fourth generation that goes on from step 21, and is killed after steps that no commit
    holds.
    """
    gang = GangLog(4, 400_000.0, [[0, 1, 2], [3, 4, 5]], (21, 3))
    gang.steps(22, 40, useful_step=100.0, data_wait=1.0)
    gang.commit(36)
    gang.ended("node_lost", 3000.0)
    return gang.events


def test_a_job_that_restarts_says_from_which_step_and_that_a_kill_loses_nothing() -> None:
    gang = GangLog(1, 10.0, [[0], [1]])
    gang.steps(1, 60, useful_step=1.0)
    gang.commit(48)
    lost = event(FAULT_DETECTED, 80.0, generation=1, culprit="node 1", reason="node_lost")
    settings = [{"key": "training.max_steps", "value": 120, "source": "default"}]
    configured = event(CONFIGURED, 0.0, settings=settings)
    report = build_report([configured, plan_event(), *gang.events, lost], running=LAUNCHER)

    assert report.state == "restarting"
    assert render_verdict(report).startswith("Restarting from step 48 (12 steps lost): 48 of 120")
    assert "the job goes on from step 48" in describe_stop(report)
    assert "Ctrl-C" not in describe_stop(report)

    again = GangLog(2, 90.0, [[0], [1]], parent=(48, 1))
    report = build_report(
        [configured, plan_event(), *gang.events, lost, *again.events], running=LAUNCHER
    )
    assert render_verdict(report).startswith("Restarting from step 48 (12 steps lost)")
    again.steps(49, 50, useful_step=1.0)
    report = build_report(
        [configured, plan_event(), *gang.events, lost, *again.events], running=LAUNCHER
    )
    assert render_verdict(report).startswith("Running: 50 of 120 steps")


def test_a_job_before_its_first_step_says_what_is_done_instead() -> None:
    configured = event(CONFIGURED, 0.0, settings=[])
    events = [configured]
    assert build_report(events, running=LAUNCHER).state == "starting"
    assert "Starting (preflight checks): " in render_verdict(build_report(events, running=LAUNCHER))
    events.append(plan_event())
    assert "the data is prepared" in render_verdict(build_report(events, running=LAUNCHER))
