"""What torch compiles is a phase of its own, in whichever step it happens: longer than any other,
and no hang.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import LedgerClass
from ebbflow.core.store import Store
from ebbflow.training.engine.inductor import open_compile_cache
from ebbflow.training.engine.parallel import report_compilation
from ebbflow.training.gang import Gang
from ebbflow.training.launch.heartbeat import (
    HangLimits,
    Heartbeat,
    HeartbeatReading,
    PhaseThresholds,
)
from ebbflow.training.reporter import Clock, Reporter
from tests.support.guard_jobs import Job

DEADLINES = HangLimits(
    floor_seconds=3.0, start_seconds=120.0, store_seconds=130.0, longest_seconds=300.0
)


class Rank:
    """A rank's reporter with its heartbeat, and an agent's limits that look at every beat.

    The clock stands still.
    """

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self._phase = "init"
        self.clock = Clock(lambda *_, **__: None, started=self.now, now=lambda: self.now)
        self.heartbeat = Heartbeat.create(folder / "heartbeat")
        self.limits = PhaseThresholds(DEADLINES)
        self.seen: list[tuple[int, str, float]] = []
        self.reporter = Reporter(self.clock, lambda *_, **__: None, self._beat)

    def _beat(self, step: int, phase: str) -> None:
        self.heartbeat.beat(step, phase)
        beat = self.heartbeat.read()
        self.limits.observe(beat, beat.t_mono)
        self.seen.append((step, phase, self.limits.hang_threshold(beat)))
        # The phase that ends has taken this long
        if self._phase == "compile":
            self.now += 7.0
        else:
            self.now += 1.0
        self._phase = phase


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    import torch._dynamo

    rank = Rank(tmp_path)
    stop = report_compilation(lambda: rank.reporter.enter_temporarily("compile"))
    yield rank
    stop()
    torch._dynamo.reset()


def test_compilation_has_the_longest_limit_and_is_no_useful_time(rank: Rank) -> None:
    double = torch.compile(lambda numbers: 2 * numbers, backend="eager", dynamic=False)

    def step(number: int, size: int) -> dict[str, float]:
        rank.seen.clear()
        rank.reporter.enter("data", number)
        rank.reporter.enter("forward", number)
        double(torch.ones(size))
        rank.reporter.enter("optimizer", number)
        return rank.clock.take()

    step(1, 4)
    assert [phase for _, phase, _ in rank.seen] == [
        "data",
        "forward",
        "compile",
        "forward",
        "optimizer",
    ]
    for number in range(2, 30):
        step(number, 4)
        assert [phase for _, phase, _ in rank.seen] == ["data", "forward", "optimizer"]
    seconds = step(30, 5)  # another shape, and so once more
    assert [(number, phase) for number, phase, _ in rank.seen[1:4]] == [
        (30, "forward"),
        (30, "compile"),
        (30, "forward"),
    ]
    limits = {phase: limit for _, phase, limit in rank.seen}
    assert (
        limits["compile"]
        == DEADLINES.longest_seconds
        > limits["forward"]
        == DEADLINES.floor_seconds
    )
    assert seconds[LedgerClass.STARTUP] == 7.0 and seconds[
        LedgerClass.USEFUL_STEP
    ] == pytest.approx(3.0)


def test_an_evaluation_that_compiles_is_still_the_first_one(rank: Rank) -> None:
    double = torch.compile(lambda numbers: 2 * numbers, backend="eager", dynamic=False)
    rank.reporter.enter("forward", 1)
    rank.reporter.enter("evaluation", 1)
    double(torch.ones(4))
    rank.reporter.enter("forward", 2)
    rank.reporter.enter("evaluation", 2)
    limits = [(phase, limit) for _, phase, limit in rank.seen if phase != "forward"]
    assert [phase for phase, _ in limits] == ["evaluation", "compile", "evaluation", "evaluation"]
    assert [limit for _, limit in limits[:3]] == [DEADLINES.longest_seconds] * 3
    assert rank.heartbeat.read().entered == 2


def test_a_rank_that_has_ended_gets_no_compile_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job of the same process would tell it to a heartbeat and a clock that are nobody's
    any more.
    """
    import torch._dynamo

    heard: list[str] = []
    monkeypatch.setattr(
        Reporter, "enter_temporarily", lambda self, phase: heard.append(phase) or (lambda: None)
    )
    assert Job.make(tmp_path / "job", steps=4).run_alone().step == 4
    heard.clear()
    torch.compile(lambda numbers: 3 * numbers, backend="eager", dynamic=False)(torch.ones(4))
    torch._dynamo.reset()
    assert heard == []


def test_the_second_evaluation_may_be_as_long_as_the_first() -> None:
    limits = PhaseThresholds(DEADLINES)
    evaluation = HeartbeatReading(pid=1, step=1, phase="evaluation", t_mono=100.0, entered=1)
    limits.observe(replace(evaluation, phase="forward", t_mono=90.0), 90.0)
    for seconds in range(30):
        limits.observe(evaluation, 100.0 + seconds)
    limits.observe(replace(evaluation, step=2, phase="forward", t_mono=129.0, entered=2), 129.0)
    second = replace(evaluation, step=2, t_mono=130.0, entered=2)
    limits.observe(second, 130.0)
    assert limits.hang_threshold(second) > 30.0 > DEADLINES.floor_seconds


def test_a_start_on_another_machine_finds_compiled_code_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another machine has another folder for torch's files.

    What cannot be read is compiled again.
    """
    from torch._dynamo.utils import counters

    config = RunConfig().changed("parallel", compile=True)
    store = Store.open(str(tmp_path / "store"))

    def start(machine: str, config: RunConfig = config) -> dict[str, int]:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / machine))
        torch._dynamo.reset()
        counters.clear()
        reach = open_compile_cache(config, Gang(), store)
        # Calls a library: no C++ compiler takes seconds
        square = torch.compile(torch.mm, dynamic=False)
        for step in (1, 2):
            reach(step)
            square(torch.ones(4, 4), torch.ones(4, 4))
        for thread in threading.enumerate():
            if thread.name == "compile cache":
                thread.join()
        return {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}

    try:
        assert start("first") == {"hit": 0, "miss": 1}
        (key,) = store.list("compile-cache/")
        kept = store.get(key.key)
        assert start("second") == {"hit": 1, "miss": 0} and store.get(key.key) == kept
        assert start("signed", config.changed("checkpoint", signing_key_env="KEY")) == {
            "hit": 0,
            "miss": 1,
        }
        assert start("off", config.changed("parallel", compile_cache=False)) == {
            "hit": 0,
            "miss": 1,
        }
        capfd.readouterr()
        store.put(key.key, b"damaged")
        assert start("third") == {"hit": 0, "miss": 1}
        assert f"rank 0: compile cache {store.uri}/{key.key}: " in capfd.readouterr().out
        assert start("fourth") == {"hit": 1, "miss": 0}, "it was saved again"
        # A processor with other vector instructions
        monkeypatch.setattr(torch._inductor.config.cpp, "simdlen", 1)
        assert (
            start("other") == {"hit": 0, "miss": 1} and len(list(store.list("compile-cache/"))) == 2
        )
    finally:
        torch._dynamo.reset()
