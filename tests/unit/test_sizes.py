"""Sizes at the edge: many parts, objects, ranks and long names; the largest are in soak_sizes.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from ebbflow.core.errors import LayoutError
from ebbflow.core.layout import check_job_name, plain_name
from ebbflow.core.store import Store
from ebbflow.core.store.multipart.requests import Throttle
from ebbflow.core.store.multipart.sinks import LARGEST_COUNT, FolderSink
from ebbflow.cost.report.render_html import render
from ebbflow.cost.report.report import build_report
from ebbflow.training.checkpoint import Checkpointer, open_generation, reachable_commits
from ebbflow.training.checkpoint.part_uploader import PartSettings, PartUploader
from ebbflow.training.checkpoint.verified_io import Deadline
from tests.support.timelines import GangLog, plan_event


class CountingSink(FolderSink):
    """A folder that counts the parts of uploads."""

    parts = 0

    def begin(self, key: str, size: int, *, parts: int, seconds: float) -> Any:
        self.parts = parts
        return super().begin(key, size, parts=parts, seconds=seconds)


@pytest.mark.slow
def test_an_object_beyond_ten_thousand_parts_gets_larger_ones(tmp_path: Path) -> None:
    throttle = Throttle()
    sink = CountingSink(tmp_path, throttle)
    uploader = PartUploader(sink, PartSettings(part_bytes=4, chunk_bytes=4), throttle)
    data = os.urandom(4 * LARGEST_COUNT + 1)
    assert uploader.upload("data", memoryview(data), Deadline(60)).size == len(data)
    assert sink.parts == LARGEST_COUNT // 2 + 1
    assert (tmp_path / "data").read_bytes() == data


@given(st.text(max_size=250))
@example("x" * 200)
@example("🚀" * 60)
def test_any_text_becomes_the_name_of_a_job_or_is_refused(text: str) -> None:
    try:
        assert check_job_name(text) == text and len(text) <= 100 and text.isascii()
    except LayoutError as error:
        assert "at most 100" in str(error)
    assert check_job_name(f"j{plain_name(text)}")


def test_a_commit_without_optimizer_state_is_restored(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "jobs/plain"))
    model = nn.Linear(2, 3)
    generation = open_generation(store, run="r", attempt=0)
    with Checkpointer(store.uri, generation=generation) as checkpointer:
        checkpointer.save(1, model, torch.optim.SGD(model.parameters()), {"cursor": 1})
        checkpointer.wait()
    other = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(other.parameters())
    generation = open_generation(store, run="r", attempt=1)
    with Checkpointer(store.uri, generation=generation) as checkpointer:
        assert checkpointer.restore([reachable_commits(store)[0].key], other, optimizer).step == 1
    assert torch.equal(other.weight, model.weight) and not optimizer.state


def test_thousands_of_objects_are_listed_completely(tmp_path: Path) -> None:
    folder = tmp_path / "store/jobs/j"
    folder.mkdir(parents=True)
    names = [f"{number:05d}" for number in range(3000)]
    for name in names:
        (folder / name).touch()
    listed = sorted(meta.key for meta in Store.open(str(tmp_path / "store")).list("jobs/j"))
    assert listed == [f"jobs/j/{name}" for name in names]


@pytest.mark.parametrize(("ranks", "steps"), [(1000, 20), (1, 5000)])
@pytest.mark.slow
def test_a_large_job_has_a_small_page(ranks: int, steps: int) -> None:
    began = time.process_time()
    log = GangLog(1, 10.0, [list(range(node, min(node + 8, ranks))) for node in range(0, ranks, 8)])
    log.phase("startup", 5.0)
    log.steps(1, steps, loss=6.0, useful_step=1.5, data_wait=0.5)
    log.outcome("completed")
    log.ended("completed", 14.0)
    page = render(build_report([plan_event(t=2.0), *log.events]))
    assert len(page) < 200_000
    assert time.process_time() - began < 30  # 2 s on an idle core
