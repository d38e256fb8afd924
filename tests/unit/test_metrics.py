"""Metrics keep to Prometheus' conventions, are all documented, and say what the report says."""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path

import pytest

from ebbflow.core.events import COMMIT_FAILED, EVALUATION, PREPARED, Event
from ebbflow.core.metrics import (
    JOB_METRICS,
    NODE_METRICS,
    MetricBoard,
    MetricKind,
    render_job_metrics,
)
from ebbflow.cost.report.report import build_report
from tests.support.exposition import PROMTOOL, lint, parse, values
from tests.support.timelines import GangLog, event, plan_event

ROOT = Path(__file__).resolve().parents[2]
ALL = [*JOB_METRICS, *NODE_METRICS]
# What a label may be made of: sets that do not grow with time.
BOUNDED = {"class", "kind", "outcome", "rank", "instance_type", "market"}


def a_job() -> list[Event]:
    """A plan, a generation that was lost with one step to redo, and the one that completed the job."""
    first = GangLog(1, 1.0, [[0], [1]])
    first.phase("startup", 1.0)
    first.steps(1, 3, useful_step=1.0, data_wait=0.1)
    first.commit(2)
    first.ended("node_lost", 6.0, culprit="node 1 (b) was lost")
    second = GangLog(2, 20.0, [[0], [1]], parent=(2, 1))
    second.phase("startup", 1.0)
    second.steps(3, 4, useful_step=1.0)
    for logged in second.events:
        if logged.name == "step" and logged.rank == 0:
            logged.data.update(slowest_rank=1, slowest_ratio=1.5, slowest_seconds=0.5)
    second.commit(4)
    second.outcome("completed")
    second.ended("completed", 4.0)
    said = [
        event(PREPARED, 0.5, unigram_entropy_nats=3.0),
        event(COMMIT_FAILED, 21.0, generation=2, rank=0, message="full"),
        event(EVALUATION, 22.5, generation=2, rank=0, step=4, metrics={"held_out_loss": 1.5}),
    ]
    plan = plan_event()
    plan.data["budget_usd"] = 5.0
    return [plan, *said, *first.events, *second.events]


def page_of(events: list[Event]) -> bytes:
    return render_job_metrics(build_report(events).to_json(), events)


def test_names_and_labels_keep_to_the_conventions() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)
    for metric in ALL:
        assert re.fullmatch(r"ebbflow_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert set(metric.labels) <= BOUNDED and metric.help.endswith(".")
        for unit, word in (
            ("seconds", "seconds"),
            ("bytes", "Bytes"),
            ("usd", "dollars"),
            ("ratio", ""),
        ):
            if (
                unit in metric.name.split("_")
                and "timestamp" not in metric.name
                and "start_time" not in metric.name
            ):
                assert word in metric.help, f"{metric.name}: its help does not name the unit"


def test_every_name_is_documented_with_its_type_and_labels_and_nothing_else_is() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(ebbflow_\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$", text, re.MULTILINE)
    documented = [
        (name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows
    ]
    assert sorted(documented) == sorted(
        (metric.name, metric.kind.value, metric.labels) for metric in ALL
    )
    pages = [text, (ROOT / "docs" / "observability.md").read_text()]
    pages += [
        path.read_text()
        for path in (ROOT / "ebbflow/infra" / "observe").rglob("*")
        if path.suffix in (".json", ".yaml")
    ]
    mentioned = {
        name
        for name in re.findall(r"\bebbflow_\w+", "\n".join(pages))
        if not name.endswith(("_bucket", "_sum", "_count"))
    }
    assert mentioned <= {metric.name for metric in ALL}


def test_the_metrics_page_of_a_job_agrees_with_its_report() -> None:
    events = a_job()
    report = build_report(events)
    page = page_of(events)
    # No rank measured its peak
    assert set(parse(page)) == {m.name for m in JOB_METRICS} - {"ebbflow_job_mfu_ratio"}
    assert sum(values(page, "ebbflow_job_rank_seconds_total")) == pytest.approx(
        report.paid_rank_seconds
    )
    assert sum(values(page, "ebbflow_job_usd_total")) == pytest.approx(float(report.total_usd))
    assert values(page, "ebbflow_job_usd_total", kind="measured") == [], (
        "a simulated price makes no measured dollar"
    )
    assert values(page, "ebbflow_job_outcome", outcome="completed") == [1]
    assert sum(values(page, "ebbflow_job_outcome")) == 1
    expected = {
        "redone_steps_total": 1,
        "interruptions_total": 1,
        "failures_total": 0,
        "generations_total": 2,
        "commits_total": 2,
        "commit_failures_total": 1,
        "committed_bytes_total": 2,
        "tokens_total": 5000,
        "step": 4,
        "held_out_loss": 1.5,
        "budget_usd": 5,
        "goodput_ratio": report.actual["goodput"],
        "slowest_rank": 1,
        "slowest_rank_seconds": 1.0,
        "slowest_rank_usd": report.charts["ranks"][0]["lost_usd"],
    }
    assert {name: values(page, f"ebbflow_job_{name}") for name in expected} == {
        name: [pytest.approx(value)] for name, value in expected.items()
    }
    assert all(
        sample.labels["job"] == "demo"
        for family in parse(page).values()
        for sample in family.samples
    )


def test_unknown_metrics_are_absent_and_not_zero() -> None:
    gang = GangLog(1, 0.0, [[0]])
    gang.steps(1, 1, loss=math.nan, useful_step=1.0)
    gang.ended("rank_failed", 2.0, user_code=True)
    page = page_of(gang.events)
    names = set(parse(page))
    absent = {
        "loss",
        "held_out_loss",
        "usd_total",
        "savings_usd",
        "budget_usd",
        "planned_usd",
        "capacity_info",
    }
    assert names.isdisjoint({f"ebbflow_job_{name}" for name in absent})
    assert values(page, "ebbflow_job_failures_total") == [1]


@pytest.mark.skipif(
    PROMTOOL is None, reason="promtool (Debian package prometheus) is not installed"
)
def test_promtool_accepts_the_metrics_page_of_a_job() -> None:
    assert lint(page_of(a_job())) == ""


def test_a_board_takes_no_name_outside_the_catalogue_and_no_missing_label() -> None:
    board = MetricBoard(NODE_METRICS, {"job": "j", "node": "0"})
    with pytest.raises(KeyError):
        board.set("ebbflow_undocumented", 1.0)
    board.set("ebbflow_rank_step", 1.0)
    with pytest.raises(ValueError, match="ebbflow_rank_step has labels"):
        board.page()


def test_label_values_of_any_kind_survive_the_page() -> None:
    board = MetricBoard(NODE_METRICS, {"job": 'a "b"\\\n·', "node": "0"})
    board.set("ebbflow_step", 3)
    assert values(board.page(), "ebbflow_step", job='a "b"\\\n·') == [3]


def test_pages_are_whole_while_values_change() -> None:
    """A histogram whose count and buckets were read at different moments would not parse as one."""
    board = MetricBoard(NODE_METRICS, {"job": "j", "node": "0"})
    ended = threading.Event()

    def observe() -> None:
        while not ended.is_set():
            board.observe("ebbflow_step_seconds", 0.3)

    thread = threading.Thread(target=observe)
    thread.start()
    try:
        for _ in range(50):
            samples = {s.name: s for s in parse(board.page())["ebbflow_step_seconds"].samples}
            count = samples["ebbflow_step_seconds_count"].value
            assert samples["ebbflow_step_seconds_sum"].value == pytest.approx(0.3 * count)
    finally:
        ended.set()
        thread.join()
