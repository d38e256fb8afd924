"""A real Prometheus scrapes a real gang of two nodes: every panel and every rule has data, and each
alert can fire.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebbflow.core.metrics import render_job_metrics
from ebbflow.core.terms import Terms
from ebbflow.cost.report.report import build_report
from ebbflow.observe.command import RULES, merge_pages, observe
from ebbflow.training.launch.agent import LocalGang
from tests.support.exposition import PROMTOOL, parse
from tests.support.flow import ROOT, wait_until
from tests.support.gangs import endless_gang, free_port, with_settings
from tests.support.timelines import GangLog, plan_event

DASHBOARDS = {
    path.stem: json.loads(path.read_text()) for path in (RULES.parent / "dashboards").glob("*.json")
}
RECORDED, ALERTS = (group["rules"] for group in yaml.safe_load(RULES.read_text())["groups"])
NO_GPU = "ebbflow_gpu_"  # this machine has none
# A CPU has no MFU
OF_GPUS = ("ebbflow_peak_flops_per_second", "ebbflow_job_mfu_ratio")
installed = pytest.mark.skipif(
    shutil.which("prometheus") is None or PROMTOOL is None,
    reason="prometheus (Debian) is not installed",
)


def ended_job() -> bytes:
    gang = GangLog(1, 1.0, [[0], [1]])
    gang.phase("startup", 1.0)
    gang.steps(1, 3, useful_step=1.0)
    gang.commit(2)
    gang.outcome("completed")
    gang.ended("completed", 6.0)
    events = [plan_event(), *gang.events]
    return render_job_metrics(build_report(events).to_json(), events)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the Prometheus of `ebbflow observe`, which has seen a gang train for some
    seconds.
    """
    folder = tmp_path_factory.mktemp("observed")
    for name in ("ended", "other"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "metrics.prom").write_bytes(
            ended_job().replace(b'"demo"', f'"{name}"'.encode())
        )
    port = free_port()
    metrics_port = free_port()
    spec = endless_gang(folder, metrics={"port": metrics_port}, checkpoint={"interval_steps": 20})
    terms = Terms(
        usd_per_rank_second=0.001,
        budget_usd=9.0,
        deadline_utc=time.time() + 9e4,
        price_kind="simulated",
    )
    spec = with_settings(replace(spec, terms=terms), training={"evaluation_interval_steps": 20})
    gang = LocalGang(spec, folder / "gang", folder / "output.log")
    words = ["--port", str(port), "--metrics-port", str(metrics_port), "--interval", "1"]
    with open(folder / "observe.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ebbflow.infra", "observe", *words],
            cwd=ROOT,
            env=os.environ | {"EBBFLOW_RUNS": str(folder / "runs")},
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"
    wanted = "count(ebbflow_last_commit_step > 20) and on () count(ebbflow:seconds_left:estimate)"
    wanted += " and on () count(ebbflow_held_out_loss)"
    try:
        wait_until("series of the gang", lambda: query(address, wanted), timeout=120, pause=0.5)
        time.sleep(3.0)  # rates need two samples, and rules an evaluation after them
        yield address
    finally:
        gang.kill()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, (folder / "observe.log").read_text()


def query(address: str, expression: str) -> list[dict[str, Any]]:
    try:
        with urllib.request.urlopen(
            f"{address}/api/v1/query?query={urllib.parse.quote(expression)}", timeout=10
        ) as page:
            return json.loads(page.read())["data"]["result"]
    except OSError:
        return []


def queries() -> dict[str, str]:
    """Every query by where it is.

    Of an alert, each series that it compares, since a quiet alert has no data itself.
    """
    found = {}
    for name, board in DASHBOARDS.items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                found[f"{name}: {panel['title']} {target['refId']}"] = target["expr"].replace(
                    "$job", ".*"
                )
    found |= {f"recorded {rule['record']}": rule["record"] for rule in RECORDED}
    for rule in ALERTS:
        for number, series in enumerate(
            re.findall(r"(?:ebbflow|up)[\w:]*(?:\{[^}]*\})?", rule["expr"])
        ):
            found[f"{rule['alert']} {number}"] = re.sub(
                r'outcome=~"[^"]*"', 'outcome="completed"', series
            )
    return {
        place: expression
        for place, expression in found.items()
        if not any(metric in expression for metric in (NO_GPU, *OF_GPUS))
    }


@installed
def test_every_panel_and_every_rule_has_data(prometheus: str) -> None:
    asked = queries()
    assert len(asked) > 80 and len(ALERTS) >= 18
    for place, expression in asked.items():  # a busy machine misses a scrape now and then
        wait_until(
            f"data of {place}: {expression}",
            lambda one=expression: query(prometheus, one),
            timeout=60,
        )
    nodes = {sample["metric"]["node"] for sample in query(prometheus, "ebbflow_step")}
    assert nodes == {"0", "1"}
    assert {sample["metric"]["job"] for sample in query(prometheus, "ebbflow_job_step")} == {
        "ended",
        "other",
    }
    assert not query(prometheus, 'ALERTS{alertname=~"EbbflowJob.*"}')


def node(name: str, values: str, **labels: str) -> dict[str, str]:
    text = ",".join(
        f'{key}="{value}"' for key, value in {"job": "j", "node": "0", **labels}.items()
    )
    return {"series": f"{name if name == 'up' else f'ebbflow_{name}'}{{{text}}}", "values": values}


def training(step: str = "10x99", last: str = "1000x99") -> list[dict[str, str]]:
    """A job that takes one step a minute."""
    started = node("start_time_seconds", "0x99")
    return [started, node("steps_total", "0+1x99"), node("step", step), node("max_steps", last)]


def phases(**rates: int) -> list[dict[str, str]]:
    return [
        node("phase_seconds_total", f"0+{rate}x99", **{"class": name})
        for name, rate in rates.items()
    ]


def scraped(instance: str, up: str) -> list[dict[str, str]]:
    """A target whose job started after one minute, and served its metrics for five."""
    started = node("start_time_seconds", "60x4 _x20", job=f"of {instance}", instance=instance)
    return [node("up", up, job="ebbflow", instance=instance), started]


# alert: (when, series for which it fires then, series for which it does not)
CASES: dict[str, tuple[str, list[dict[str, str]], list[dict[str, str]]]] = {
    "EbbflowRankSilent": (
        "10m",
        [node("rank_heartbeat_timestamp_seconds", "0x20", rank="0")],
        [node("rank_heartbeat_timestamp_seconds", "0+60x20", rank="0")],
    ),
    "EbbflowStalled": (
        "40m",
        [*training()[:1], node("steps_total", "5x99"), *training()[2:]],
        [*training()[:1], node("steps_total", "5x99"), *training(last="10x99")[2:]],
    ),
    "EbbflowLossNotFinite": (
        "5m",
        [node("steps_total", "5x9")],
        [node("steps_total", "5x9"), node("loss", "2x9")],
    ),
    "EbbflowLossSpike": ("75m", [node("loss", "2x60 10x30")], [node("loss", "2x99")]),
    "EbbflowSlow": (
        "80m",
        [node("tokens_per_second", "100x60 50x30")],
        [node("tokens_per_second", "100x99")],
    ),
    "EbbflowStraggler": (
        "40m",
        [node("slowest_rank_ratio", "1.5x60")],
        [node("slowest_rank_ratio", "1.1x60")],
    ),
    "EbbflowDataBound": (
        "40m",
        phases(data_wait=20, useful_step=40),
        phases(data_wait=2, useful_step=40),
    ),
    "EbbflowSavesStall": (
        "40m",
        phases(checkpoint_stall=6, useful_step=9),
        phases(checkpoint_stall=1, useful_step=99),
    ),
    "EbbflowGoodputLow": (
        "60m",
        phases(startup=30, useful_step=30),
        phases(startup=5, useful_step=50),
    ),
    "EbbflowCommitStale": (
        "70m",
        [node("last_commit_timestamp_seconds", "0x99")],
        [node("last_commit_timestamp_seconds", "0+60x99")],
    ),
    "EbbflowNothingCommitted": (
        "70m",
        training(),
        [*training(), node("last_commit_timestamp_seconds", "0+60x99")],
    ),
    "EbbflowCommitsFail": (
        "15m",
        [node("commit_failures_total", "0x10 1x9")],
        [node("commit_failures_total", "0x9")],
    ),
    "EbbflowRestartsOften": (
        "30m",
        [node("generation", "1x5 2x5 3x5 4x20")],
        [node("generation", "1x5 2x40")],
    ),
    "EbbflowBudgetNearlySpent": (
        "5m",
        [node("spent_usd", "9.5x9", kind="live"), node("budget_usd", "10x9")],
        [node("spent_usd", "5x9", kind="live"), node("budget_usd", "10x9")],
    ),
    "EbbflowBudgetWillNotDo": (
        "40m",
        [
            *training(),
            node("spent_usd", "1x99"),
            node("usd_per_hour", "10x99"),
            node("budget_usd", "10x99"),
        ],
        [
            *training(last="20x99"),
            node("spent_usd", "1x99"),
            node("usd_per_hour", "9x99"),
            node("budget_usd", "10x99"),
        ],
    ),
    "EbbflowDeadlineWillBeMissed": (
        "40m",
        [*training(), node("deadline_timestamp_seconds", "10000x99")],
        [*training(), node("deadline_timestamp_seconds", "1000000x99")],
    ),
    "EbbflowMuchAtRisk": ("10m", [node("at_risk_usd", "60x20")], [node("at_risk_usd", "5x20")]),
    "EbbflowNodeNotScraped": (
        "15m",
        scraped("b", "1x5 0x20"),
        [
            node("up", "0x20", job="ebbflow", instance="idle"),
            *scraped("c", "1x20"),
            *scraped("b", "1x5 0x20"),
            node("job_last_event_timestamp_seconds", "_x5 330x20", job="of b"),
        ],
    ),
    "EbbflowJobFailed": (
        "2m",
        [node("job_outcome", "1x9", outcome="failed")],
        [node("job_outcome", "1x9", outcome="budget")],
    ),
    "EbbflowJobDearerThanPlanned": (
        "2m",
        [node("job_usd_total", "20x9"), node("job_planned_usd", "10x9")],
        [node("job_usd_total", "12x9"), node("job_planned_usd", "10x9")],
    ),
}


@installed
def test_each_alert_fires_when_it_should_and_not_otherwise(tmp_path: Path) -> None:
    assert set(CASES) == {rule["alert"] for rule in ALERTS}
    tests = []
    for name, (when, *both) in CASES.items():
        for series, fires in zip(both, (True, False), strict=True):
            asked = {
                "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                "eval_time": when,
            }
            if fires:
                expected = [{"labels": "{}", "value": 1}]
            else:
                expected = []
            tests.append(
                {
                    "interval": "1m",
                    "input_series": series,
                    "promql_expr_test": [{**asked, "exp_samples": expected}],
                }
            )
    path = tmp_path / "test.json"
    path.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests})
    )
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_pages_of_several_jobs_become_one_page() -> None:
    pages = [ended_job().decode().replace('"demo"', f'"{name}"') for name in ("a", "b")]
    merged = parse(merge_pages(pages))
    assert set(merged) == set(parse(pages[0].encode()))
    assert {sample.labels["job"] for sample in merged["ebbflow_job_step"].samples} == {"a", "b"}


def test_observe_without_prometheus_prints_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert observe(None, tmp_path) == 3  # type: ignore[arg-type]
    assert "fix: apt-get install prometheus" in capsys.readouterr().err


@installed
def test_a_port_that_is_none_or_in_use_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port, why in ((99999, "port must be 0-65535"), (taken.getsockname()[1], "in use")):
            assert (
                observe(argparse.Namespace(port=port, metrics_port=9400, interval=5.0), tmp_path)
                == 2
            )
            [line] = capsys.readouterr().err.splitlines()
            assert f"port {port}" in line and why in line and line.endswith("fix: --port")
