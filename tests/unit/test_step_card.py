"""The card of a step in a user's flow follows the live page of its job."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbflow.flows.own_flow import step_card
from ebbflow.flows.own_flow.step_card import StepCard, copy_live_page
from ebbflow.flows.own_flow.task_name import TaskName


def await_true(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_the_card_is_the_newest_live_page_until_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metaflow").mkdir()
    monkeypatch.setattr(step_card, "_CARD_SECONDS", 0.01)
    task = TaskName(flow="F", run="1", origin_run=None, step="train", task="2", attempt=0)
    card = StepCard(task=task, datastore="local", name="training")
    page = tmp_path / "live.html"

    def shown() -> list[str]:
        return [path.read_text() for path in tmp_path.glob(".metaflow/mf.cards/**/*training*.html")]

    with copy_live_page(page, card):
        page.write_text("step 1")
        await_true(lambda: "step 1" in shown())
        page.write_text("step 2")
        await_true(lambda: set(shown()) == {"step 2"})
    page.write_text("later")
    assert set(shown()) == {"step 2"}
    with copy_live_page(None, card):
        pass
