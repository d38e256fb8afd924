"""Bits that flip at rest, and arithmetic that is wrong, on one rank of an FSDP2 gang: the rank is
named, and the job ends with the weights of an undisturbed one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ebbflow.core.events import GUARD, RESTORE
from ebbflow.training.launch.messages import GangOutcome
from ebbflow.training.workload import Cursor, Loss
from tests.support.guard_jobs import Job
from tests.support.workload_cases import Points, Sound


class Faulty(Sound):
    """On rank 1, a bit of the weights flips before step 6, and the gradient that it computes in step
    10 is wrong; each once, unless the file of option `quiet` exists.
    """

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Points:
        step = cursor.first // 8 + 1
        self.wrong = self._begins("sum") if step == 10 else False
        if step == 6 and self._begins("flip"):
            with torch.no_grad():
                weights: Any = next(iter(model.parameters()))
                weights.to_local().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 3)
        return super().next_batch(model, cursor)

    def loss(self, model: nn.Module, batch: Points) -> Loss:
        loss = super().loss(model, batch)
        if self.wrong:
            self.wrong = False  # the second time the same arithmetic is right
            loss.sum.register_hook(lambda gradient: gradient * (1 + 2**-20))
        return loss

    def _begins(self, fault: str) -> bool:
        mark = Path(self.context.options["folder"], fault)
        begins = self.context.rank == 1 and not mark.exists()
        if begins:
            mark.touch()
        return begins


def run(folder: Path, done: tuple[str, ...] = ()) -> tuple[Job, GangOutcome]:
    job = Job.make(
        folder,
        workload="tests.gang.test_silent_faults:Faulty",
        options={"folder": str(folder)},
        training={"deterministic": "strict"},
        parallel={"mode": "fsdp2"},
        checkpoint={"interval_steps": 1, "keep_last": 100},
        guards={"check_at_rest": True, "repeat_interval_steps": 2},
    )
    for fault in done:
        (folder / fault).touch()
    return job, job.run()


def test_a_silent_fault_of_one_rank_is_named_and_taken_back(tmp_path: Path) -> None:
    _, quiet = run(tmp_path / "quiet", done=("flip", "sum"))
    assert (quiet.outcome, quiet.generation) == ("completed", 1)
    job, outcome = run(tmp_path / "faulty")
    assert (outcome.outcome, outcome.generation) == ("completed", 3)
    assert outcome.weights_sha256 == quiet.weights_sha256
    flip, wrong = job.events(GUARD)
    # The commit of step 5 may hold the bit that flipped after it
    assert flip.data["reason"] == (
        "weights or optimizer state of rank 1 changed at rest between steps 5 and 6; the job goes "
        "back to the newest commit up to step 4"
    )
    assert wrong.data["reason"] == (
        "step 10, computed twice, differs on rank 1 in its gradients; the job goes back to the "
        "newest commit up to step 8"
    )
    for seen in (flip, wrong):
        assert (seen.data["action"], seen.data["ranks"]) == ("diverged", [1])
    assert [event.step for event in job.events(RESTORE)] == [4, 8]
