"""`ebbflow trace`: a timeline that Perfetto opens, with each rank's time where the ledger has it."""

from __future__ import annotations

import itertools
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.events import Event
from ebbflow.cost.errors import ReportError
from ebbflow.cost.ledger.ledger import fold
from ebbflow.observe.trace import build_spans, build_trace, main, send_spans
from tests.support.timelines import GangLog, event, plan_event


def a_job() -> list[Event]:
    first = GangLog(1, 1.0, [[0], [1]])
    first.phase("startup", 1.0)
    first.steps(1, 3, useful_step=1.0, data_wait=0.25)
    first.commit(2)
    second = GangLog(2, 20.0, [[0], [1]], parent=(2, 1))
    second.phase("startup", 1.0)
    second.steps(3, 4, useful_step=1.0, checkpoint_stall=0.5)
    second.outcome("completed")
    second.ended("completed", 5.0)
    notice = event(
        "notice", 5.0, generation=1, node=1, source="metadata", action="terminate", does="leave"
    )
    return [plan_event(), *first.events, notice, *second.events]


def test_slices_of_a_rank_do_not_overlap_and_sum_to_its_classes() -> None:
    trace = build_trace(a_job())
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] >= 0]
    by_rank = defaultdict(list)
    for slice_event in slices:
        by_rank[slice_event["pid"], slice_event["tid"]].append(slice_event)
    assert set(by_rank) == {(0, 0), (1, 1)}
    for thread_slices in by_rank.values():
        thread_slices.sort(key=lambda one: one["ts"])
        for slice_event, following in itertools.pairwise(thread_slices):
            assert slice_event["ts"] + slice_event["dur"] <= following["ts"] + 2, (
                slice_event,
                following,
            )
    seconds = defaultdict(float)
    for slice_event in slices:
        seconds[slice_event["name"]] += slice_event["dur"] / 1e6
    ledger = {
        str(line.ledger_class).replace("_", " "): line.rank_seconds for line in fold(a_job()).lines
    }
    for name in ("checkpoint stall", "startup"):
        assert seconds[name] == pytest.approx(ledger[name], abs=1e-3)
    # Redone: with its waits
    steps = sum(ledger[name] for name in ("useful step", "redone step", "data wait"))
    assert seconds["useful step"] + seconds["data wait"] == pytest.approx(steps, abs=1e-3)


def test_generations_marks_and_names_are_there_also_for_an_end_that_was_not_recorded() -> None:
    found = build_trace(a_job())["traceEvents"]
    spans = {event["name"]: event for event in found if event["pid"] == -1 and event["ph"] == "X"}
    assert (
        spans["generation 1"]["dur"] > 0 and spans["generation 2"]["args"]["reason"] == "completed"
    )
    marks = {event["name"] for event in found if event["ph"] == "i"}
    assert {"commit 2", "notice", "outcome"} <= marks
    assert {event["args"]["name"] for event in found if event["ph"] == "M"} >= {
        "generations",
        "node 1",
        "rank 0",
    }
    assert all(event["ts"] >= -1 for event in found if event["ph"] != "M")


def test_the_command_writes_a_file_and_names_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "job" / "events" / "000001"
    folder.mkdir(parents=True)
    (folder / "0-0-000000.abcdef.jsonl").write_text(
        "".join(f"{event.to_json()}\n" for event in a_job())
    )
    assert main(["trace", str(tmp_path / "job")]) == 0
    assert json.loads((tmp_path / "demo.trace.json").read_text())["otherData"]["job"] == "demo"
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert main(["trace", str(tmp_path / "job"), "--out", str(tmp_path / "no" / "file")]) == 1
    assert main(["trace", str(tmp_path / "job"), "--otlp", "http://127.0.0.1:1"]) != 0
    assert "127.0.0.1:1/v1/traces" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "job"), "--otlp", "localhost:4318"]) != 0
    assert "for example http://localhost:4318" in capsys.readouterr().err
    assert (
        main(["trace", "nothing"]) != 0 and "no events of job 'nothing'" in capsys.readouterr().err
    )


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, str, dict[str, Any]]], dict[str, Any]]]:
    """Address of an OTLP/HTTP server, the requests that it got (path, a header, body), and what it
    answers.
    """
    requests: list[tuple[str, str, dict[str, Any]]] = []
    answer: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Content-Type"] == "application/json"
            requests.append((self.path, self.headers.get("api-key", ""), body))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", requests, answer
        server.shutdown()


@pytest.mark.slow
def test_a_collector_gets_generations_saves_and_steps_as_spans(
    collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, requests, answer = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=abc, other=1")
    spans = build_spans(a_job())
    send_spans(url, "demo", spans)
    ((path, key, body),) = requests
    assert (path, key) == ("/v1/traces", "abc")
    (resource,) = body["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "ebbflow"}} in resource["resource"][
        "attributes"
    ]
    sent = resource["scopeSpans"][0]["spans"]
    by_id = {span["spanId"]: span for span in sent}
    assert len(by_id) == len(sent) and {len(span_id) for span_id in by_id} == {16}
    assert {span["traceId"] for span in sent} == {spans[0]["traceId"]} and len(
        spans[0]["traceId"]
    ) == 32
    assert [span["name"] for span in sent].count(
        "step"
    ) == 5  # three of generation 1, two of generation 2
    steps = [span for span in sent if span["name"] == "step"]
    parents = [by_id[step["parentSpanId"]]["name"] for step in steps]
    assert parents == ["generation 1"] * 3 + ["generation 2"] * 2
    assert int(steps[0]["endTimeUnixNano"]) - int(steps[0]["startTimeUnixNano"]) == pytest.approx(
        1.25e9, rel=1e-6
    )
    (commit,) = [span for span in sent if span["name"] == "commit"]
    assert int(commit["endTimeUnixNano"]) - int(commit["startTimeUnixNano"]) == pytest.approx(
        1e8, rel=1e-4
    )
    assert {"key": "ebbflow.step", "value": {"intValue": "2"}} in commit["attributes"]
    roots = [span for span in sent if "parentSpanId" not in span]
    assert [root["name"] for root in roots] == ["job demo"]
    assert build_spans(a_job()) == spans, "a job that is sent twice has the same ids"
    answer["partialSuccess"] = {"rejectedSpans": "3", "errorMessage": "too old"}
    with pytest.raises(ReportError, match="refused 3 spans: too old"):
        send_spans(f"{url}/v1/traces", "demo", spans)
