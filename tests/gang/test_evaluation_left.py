"""Evaluations in the midst of which all are told to leave: ranks leave them together, between two
passes.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import EVALUATION, STEP, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.infra.notices import rehearse_notice
from ebbflow.training.checkpoint import reachable_commits
from ebbflow.training.engine.parallel import Spread
from ebbflow.training.evaluation import Evaluation
from ebbflow.training.gang import Gang
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.messages import GangSpec
from ebbflow.training.limits import Limits
from tests.support.alone import run_alone
from tests.support.flow import wait_until
from tests.support.long_evaluation import TOLD_AFTER

PASSES = 40
_SOON = timedelta(seconds=60)


class Ranks:
    """Two ranks as threads.

    Each pass is one collective of both, as of a sharded model: nobody is a pass ahead.

    told: by rank, the pass before which it hears that it is to leave; a rank that is not in it
        never does.
    """

    def __init__(self, told: dict[int, int], vote_seconds: float) -> None:
        self.told = told
        self._vote_seconds = vote_seconds
        self.passes = [0, 0]
        self.metrics = cast(list[Any], ["nothing", "nothing"])
        self._collective = threading.Barrier(2, timeout=60)
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )

    def run(self) -> None:
        threads = [threading.Thread(target=self._evaluate, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)

    def _evaluate(self, rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", self._store.port, is_master=False, timeout=_SOON)
        limits = Limits(None, world_size=2, elapsed_seconds=lambda: 0.0)
        gang = Gang(rank=rank, world_size=2, store=dist.PrefixStore("generation", store))
        model = nn.Linear(1, 1)

        def evaluate(model: nn.Module) -> dict[str, float]:
            for number in range(1, PASSES + 1):
                if number == self.told.get(rank):
                    limits.request_drain(60.0)
                model(torch.zeros(1, 1))
                self._collective.wait()
                self.passes[rank] += 1
            return {"score": 1.0}

        evaluation = Evaluation(gang, limits, vote_seconds=self._vote_seconds)
        spread = Spread(model=model, module=model, copies=1)
        self.metrics[rank] = evaluation.run(cast(Any, SimpleNamespace(evaluate=evaluate)), spread)


def test_ranks_that_get_a_notice_at_different_batches_leave_evaluation_after_the_same() -> None:
    """One gives its vote while the other stands in the collective of that pass, and takes it back."""
    ranks = Ranks(told={0: 5, 1: 6}, vote_seconds=2.0)
    ranks.run()
    assert ranks.metrics == [None, None]
    assert ranks.passes[0] == ranks.passes[1] and 5 <= ranks.passes[0] < PASSES


def test_an_evaluation_that_not_all_can_leave_comes_to_its_end() -> None:
    ranks = Ranks(told={0: 5}, vote_seconds=0.1)
    ranks.run()
    assert ranks.metrics == [{"score": 1.0}] * 2 and ranks.passes == [PASSES] * 2


def config_of(folder: Path, interval_steps: int = 2, **options: Any) -> RunConfig:
    """Evaluations after steps 2 and 4, of which the last one is the end; no save but the last."""
    return RunConfig.model_validate(
        {
            "store": str(folder / "store"),
            "workload": "tests.support.long_evaluation:LongEvaluation",
            "workload_options": {"passes": 500, "seconds": 0.0, "marks": str(folder), **options},
            "training": {
                "batch_size": 4,
                "max_steps": 4,
                "evaluation_interval_steps": interval_steps,
                "scheduler": {"type": "constant", "warmup_steps": 0},
            },
            "parallel": {"mode": "ddp"},
            "checkpoint": {"interval_steps": 4},
            "cluster": {"nodes": 1, "processes_per_node": 2},
            "survival": {"notice_file": str(folder / "notice")},
        }
    )


def passes_made(folder: Path, rank: int = 0) -> int:
    path = folder / f"passes-{rank}"
    if path.exists():
        return len(path.read_text())
    return 0


def test_an_evaluation_is_left_and_the_one_at_the_end_is_made_up_for(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    job = Store.open(str(tmp_path / "store")).sub(job_prefix("job"))
    seen: list[tuple[Outcome, int, int, int]] = []
    for told in (True, True, False):
        if told:
            (tmp_path / "tell").touch()
        (tmp_path / "passes-0").unlink(missing_ok=True)
        ending = run_alone(config, "job")
        seen.append(
            (ending.outcome, ending.step, reachable_commits(job)[0].step, passes_made(tmp_path))
        )
        if told:
            assert ending.message.endswith("; saved, to be resumed")
    assert seen == [
        (Outcome.INTERRUPTED, 3, 3, TOLD_AFTER),  # all leave after the step that follows
        (Outcome.INTERRUPTED, 4, 4, TOLD_AFTER),  # nothing is left to do but that evaluation
        (Outcome.COMPLETED, 4, 4, 500),
    ]
    events = read_events(job)
    assert [event.step for event in events if event.name == STEP] == [1, 2, 3, 4], "each once"
    assert [event.data["metrics"] for event in events if event.name == EVALUATION] == [
        {"score": 0.5}
    ]


def test_a_gang_leaves_its_last_evaluation_at_a_notice(tmp_path: Path) -> None:
    """An evaluation of hours, of which no more is made than it takes all ranks to hear."""
    config = config_of(tmp_path, interval_steps=1000, passes=10**6, seconds=0.02)
    spec = GangSpec(
        job="job",
        run="run",
        attempt=0,
        node=0,
        nodes=1,
        processes_per_node=2,
        main_address="127.0.0.1",
        config=config,
        store_uri=config.store,
        prepared={"fingerprint": "points", "weight_unit": "points"},
        log_folder=str(tmp_path / "logs"),
    )
    gang = LocalGang(spec, tmp_path / "gang", tmp_path / "output.log")
    try:
        wait_until(
            "the evaluation",
            lambda: all(passes_made(tmp_path, rank) for rank in range(2)),
            timeout=120,
        )
        rehearse_notice(tmp_path / "logs" / "notice-node-0.json", action="terminate", seconds=120)
        outcome = gang.wait(100)
    finally:
        gang.kill()
    assert (outcome.outcome, outcome.step) == ("interrupted", 4)
    assert outcome.message == "asked to leave (rehearsed notice to node 0); saved, to be resumed"


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_store_only_a_rank_that_is_alone_can_leave(world_size: int) -> None:
    limits = Limits(None, world_size=world_size, elapsed_seconds=lambda: 0.0)
    model = nn.Linear(1, 1)
    limits.request_drain(60.0)
    workload = SimpleNamespace(
        evaluate=lambda model: {"score": float(model(torch.zeros(1, 1)).numel())}
    )
    left = Evaluation(Gang(world_size=world_size), limits).run(
        cast(Any, workload), Spread(model=model, module=model, copies=1)
    )
    assert left == (None if world_size == 1 else {"score": 1.0})
