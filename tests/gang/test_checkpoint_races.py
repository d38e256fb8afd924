"""Two who work on the same commits at once, one of them cut short or much slower: what must stay,
stays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ebbflow.core.layout import pin_key
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import (
    Checkpointer,
    Generation,
    RetentionPolicy,
    open_generation,
    reachable_commits,
    retention,
    trace_lineage,
)
from ebbflow.training.checkpoint.commands import main as checkpoints
from ebbflow.training.checkpoint.lineage import CommitRef
from ebbflow.training.checkpoint.manifest import CheckpointId
from ebbflow.training.checkpoint.retention import Retention
from ebbflow.training.errors import CheckpointError


class Killed(BaseException):
    """Stands for SIGKILL: nothing behind it runs."""


@pytest.fixture
def job(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "jobs" / "race"))


def commit(job: Store, generation: Generation, *steps: int, keep_last: int = 99) -> list[str]:
    with Checkpointer(
        job.uri, generation=generation, retention=RetentionPolicy(keep_last=keep_last)
    ) as saver:
        keys = []
        for step in steps:
            saver.save(step, nn.Linear(2, 2), None, {})
            keys.append(saver.wait().key)
    return keys


def steps(job: Store) -> list[int]:
    return [traced.ref.step for traced in trace_lineage(job)]


def test_a_start_that_is_overtaken_by_retention_does_not_begin_from_nothing(
    job: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_generation(job, run="r", attempt=0)
    commit(job, first, 10, 20)
    put = Store.put

    def overtaken(self: Store, key: str, data: bytes, **options: Any) -> None:
        """The gang before goes on between the choice of the parent and its record."""
        if key.startswith("generations/"):
            commit(job, first, 30, 40, keep_last=1)
            # And the tombstones fall
            Retention(RetentionPolicy(keep_last=1)).run(job, _save(first, 40))
        put(self, key, data, **options)

    monkeypatch.setattr(Store, "put", overtaken)
    with pytest.raises(CheckpointError, match="start again"):
        open_generation(job, run="r", attempt=1)
    monkeypatch.undo()
    assert open_generation(job, run="r", attempt=2).parent_step == 40


def test_a_generation_with_a_parent_never_begins_from_nothing(job: Store) -> None:
    commit(job, open_generation(job, run="r", attempt=0), 10)
    second = open_generation(job, run="r", attempt=1)
    with (
        Checkpointer(job.uri, generation=second) as saver,
        pytest.raises(CheckpointError, match="not among"),
    ):
        saver.restore([], nn.Linear(2, 2), None)


def test_a_pin_outlives_a_deletion_that_was_cut_short_before_it_looked(
    job: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = open_generation(job, run="r", attempt=0)
    ref = CommitRef.from_key(commit(job, generation, 10, 20, 30)[0])
    assert checkpoints(["pin", job.uri, "10"]) == 0  # the keeper has chosen it already

    def killed(*_: object, **__: object) -> int:
        raise Killed

    # The first thing behind the tombstone
    monkeypatch.setattr(retention, "newest_generation_number", killed)
    with pytest.raises(Killed):
        retention.delete_commit(job, ref, generation.name, newest=1)
    monkeypatch.undo()
    for _ in range(2):
        Retention(RetentionPolicy(keep_last=1)).run(job, _save(generation, 30))
    assert job.head(pin_key(ref.sha256)) is not None and steps(job) == [30, 10]


def test_retention_gives_way_to_the_next_save_and_gets_on_all_the_same(job: Store) -> None:
    generation = open_generation(job, run="r", attempt=0)
    commit(job, generation, 1, 2, 3, 4, 5)
    keeper = Retention(RetentionPolicy(keep_last=1))
    left = []
    for _ in range(5):
        keeper.run(job, _save(generation, 5), lambda: True)
        left.append(steps(job))
    assert left == [[5, 4, 3, 2], [5, 4, 3], [5, 4], [5], [5]]
    assert [ref.step for ref in reachable_commits(job)] == [5]


def _save(generation: Generation, step: int) -> CheckpointId:
    return CheckpointId(job="race", generation=generation.name, step=step, world_size=1)
