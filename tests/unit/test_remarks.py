"""Remarks of a rank are printed and recorded, such as those on a replaced uploader process."""

import os
import signal
from pathlib import Path

import pytest

from ebbflow.core.event_log import EventLog
from ebbflow.core.events import NOTICE, Origin, read_events
from ebbflow.core.remarks import record_remarks, remark
from ebbflow.core.store import Store
from ebbflow.cost.report.report import build_report
from ebbflow.training.checkpoint.inflight_save import UploaderClient
from tests.support.flow import wait_until
from tests.support.timelines import GangLog


def test_a_remark_is_printed_and_recorded_while_the_log_is_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open(str(tmp_path))
    with EventLog(store, Origin(job="demo", run="1", rank=0)) as log, record_remarks(log.emit):
        remark("a worker was replaced")
    remark("nobody records this")

    assert capsys.readouterr().out == "a worker was replaced\nnobody records this\n"
    assert [event.data["message"] for event in read_events(store)] == ["a worker was replaced"]


def test_a_killed_uploader_is_replaced_with_a_remark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = UploaderClient(str(tmp_path), 3, [], start=True)
    try:
        first = client.running()
        assert first is not None
        assert capsys.readouterr().out == ""
        os.kill(first, signal.SIGKILL)

        wait_until("another uploader", lambda: client.running() != first, 30)
    finally:
        client.give_up()

    assert capsys.readouterr().out == (
        "rank 3: its uploader process was killed by SIGKILL; another one uploads from now on\n"
    )


def test_the_report_lists_remarks_among_its_events() -> None:
    gang = GangLog(1, 10.0, [[0]])
    gang.steps(1, 3, useful_step=1.0)
    gang.add(NOTICE, 12.0, rank=0, message="a worker was replaced")
    gang.outcome("completed")

    notable = build_report(gang.events).events["notable"]

    assert [event["text"] for event in notable if event["name"] == NOTICE] == [
        "message a worker was replaced"
    ]
