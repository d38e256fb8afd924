"""A real gang, seen from outside: its pages and pushes while it trains, its logs and last words
when it dies.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbflow.core.layout import job_prefix
from ebbflow.core.rank_logs import LogLine, read_logs, utc_text
from ebbflow.core.store import Store
from ebbflow.training.errors import GangError
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.heartbeat import Heartbeat
from ebbflow.training.launch.logs import LogUploader, TerminalEcho
from ebbflow.training.launch.messages import GangSpec
from tests.support.exposition import values
from tests.support.flow import ROOT, wait_until
from tests.support.gangs import endless_gang, free_port
from tests.support.gateway import SmallGateway
from tests.support.swift import Swift


def gang_spec(folder: Path, **metrics: object) -> GangSpec:
    """Its disk is not the store's."""
    return endless_gang(folder, logs="runs/job/logs", metrics=metrics)


def steps_at(ports: range) -> dict[str, float]:
    """The step that each node shows, at whichever port it has."""
    found = {}
    for port in ports:
        try:
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()
        except (OSError, HTTPException):
            # Nobody listens; a free port may even be connected to itself
            continue
        for node in ("0", "1"):
            if steps := values(page, "ebbflow_step", node=node):
                found[node] = steps[0]
    return found


def test_a_gang_is_seen_while_it_trains_and_its_logs_outlive_a_node(tmp_path: Path) -> None:
    gateway = SmallGateway()
    port = free_port()
    spec = gang_spec(tmp_path, port=port, push_url=gateway.url, interval_seconds=1.0)
    gang = LocalGang(spec, tmp_path / "gang", tmp_path / "output.log")
    try:
        wait_until(
            "both nodes' pages", lambda: len(steps_at(range(port, port + 4))) == 2, timeout=60
        )
        wait_until(
            "both groups", lambda: set(gateway.groups()) == {("job", "0"), ("job", "1")}, timeout=60
        )
        [heartbeat] = (tmp_path / "runs").rglob("rank-1.heartbeat")
        os.kill(Heartbeat(heartbeat).read().pid, signal.SIGKILL)
        again = wait_until(
            "generation 2",
            lambda: list((tmp_path / "runs").rglob("000002-*/rank-0.log")),
            timeout=30,
        )[0]
        wait_until("its steps", lambda: "step " in again.read_text(), timeout=60)
        gang.agents[1].send_signal(signal.SIGTERM)
        assert gang.wait(60).outcome == "interrupted"
        assert gateway.groups() == {}, "a node left its group behind"
    finally:
        gang.kill()
        gateway.close()
    output = (tmp_path / "output.log").read_text()
    assert set(re.findall(r"metrics: node (\d) at http", output)) == {"0", "1"}
    assert "rank 1 failed first on this node" in output
    assert re.search(r"ebbflow logs job --rank 1 --generation 1 --around step:\d+\n", output)

    logs = sorted((tmp_path / "runs").rglob("0*/rank-*.log"))
    raw = {
        (int(log.parent.name[:6]), int(log.stem[-1])): log.read_text().splitlines() for log in logs
    }
    here = read_logs([tmp_path / "runs" / "job"], [])
    said = {}
    for key in raw:
        said[key] = [x.text for x in here.lines if (x.generation, x.rank) == key]
    assert len(raw) == 4 and said == raw and not here.notices
    assert any("Traceback" in line for line in raw[1, 0]), (
        "the rank that lost its peer has told of it"
    )
    far = read_logs([], [Store.open(spec.store_uri).sub(job_prefix("job"))])
    assert far.lines == here.lines


def test_the_terminal_shows_the_first_failing_ranks_last_words(tmp_path: Path) -> None:
    spec = gang_spec(tmp_path)
    # No such tokens in the store
    lost = replace(spec, prepared={**spec.prepared, "fingerprint": "0" * 64})
    gang = LocalGang(lost, tmp_path / "gang", tmp_path / "output.log")
    with pytest.raises(GangError) as error:
        gang.wait(90)
    output = (tmp_path / "output.log").read_text()
    first = re.search(
        r"rank (\d) failed first on this node, its last lines \((\S+)\):\n((?:\| .*\n)+)", output
    )
    assert first is not None, output
    shown = first[3].splitlines()
    assert len(shown) <= 15 and Path(first[2]).read_text().splitlines()[-1] == shown[
        -1
    ].removeprefix("| ")
    assert str(error.value).splitlines()[0].partition(": ")[2][:40] in "\n".join(shown)
    assert f"ebbflow logs job --rank {first[1]} --generation 1 --around step:0" in output


def test_logs_come_back_from_a_bucket_by_the_jobs_name_alone(
    swift: Swift, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in swift.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("EBBFLOW_RUNS", str(tmp_path / "runs"))
    uri = f"s3://{swift.new_bucket()}/some/prefix"
    shipper = LogUploader(Store.open(uri).sub(job_prefix("far")), generation=2, node=3, say=print)
    texts = ["one", "two · half", "three"]
    for start, text in enumerate(texts):
        place = {"generation": 2, "node": 3, "rank": 6, "start": start, "end": start + 1}
        line = LogLine(
            t=utc_text(start), job="far", step=start, phase="forward", text=text, **place
        )
        shipper.add(6, [line.to_json().encode()])
    shipper.close(deadline_seconds=60)
    (tmp_path / "runs" / "far").mkdir(parents=True)
    (tmp_path / "runs" / "far" / "job.json").write_text(
        json.dumps({"schema": 1, "job": "far", "store": uri})
    )
    for words in (["far"], ["far", "--store", uri]):
        command = [sys.executable, "-m", "infra", "logs", *words]

        def shown(command: list[str] = command) -> bool:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
            return [line.partition(" | ")[2] for line in done.stdout.splitlines()] == texts

        # Swift lists what it has acknowledged a little late
        wait_until(f"{texts} from {words}", shown, timeout=60)


def test_a_traceback_that_is_only_logged_does_not_end_the_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    log = tmp_path / "rank-0.log"
    echo = TerminalEcho(SimpleNamespace(workers=[SimpleNamespace(rank=0, log_path=log)]))
    log.write_text(
        "hello\nTraceback (most recent call last):\n  File x\nValueError: caught\nstep 1/9\n"
    )
    echo.echo_new_lines()
    with log.open("a") as more:
        more.write("a word\nstep 2/9\nTraceback (most recent call last):\nstep 3/9\n")
    echo.echo_new_lines()
    assert capsys.readouterr().out == "hello\nstep 1/9\nstep 2/9\nstep 3/9\n"


def test_warnings_of_native_code_stay_in_the_raw_log(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    log = tmp_path / "rank-0.log"
    echo = TerminalEcho(SimpleNamespace(workers=[SimpleNamespace(rank=0, log_path=log)]))
    note = (
        "[W1122 20:53:08.732392175 WorkerServer.cpp:113] [c10d] Server listening to UNIX "
        "/proc/self/fd/4\n"
    )
    log.write_text(
        f"hello\n{note}step 1/9\n[rank0]:[W1122 20:53:09.1 TCPStore.cpp:125] recvValue failed\n"
    )
    echo.echo_new_lines()
    with log.open("a") as more:
        more.write(
            "Exception raised from recvBytes at Utils.hpp:678\nframe #0: c10::Error::Error + "
            "0x9\nstep 2/9\n"
        )
        more.write(
            "[E1122 20:53:09.1 ProcessGroupGloo.cpp:9] an error\nframe #1: of my own\n/x.py:3: "
            "UserWarning: mine\n"
        )
    echo.echo_new_lines()
    shown = capsys.readouterr().out.splitlines()
    assert shown[:3] == ["hello", "step 1/9", "step 2/9"]
    assert shown[3:] == [
        "[E1122 20:53:09.1 ProcessGroupGloo.cpp:9] an error",
        "frame #1: of my own",
        "/x.py:3: UserWarning: mine",
    ]
